"""CUDA graphs: refusals and work-arounds while one is captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor


def capturing() -> bool:
    """Return whether a CUDA graph is being captured: launches run at every replay, and the host cannot wait."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def capturable(device: torch.device) -> bool:
    """Return whether steps on a device can be captured; then their numbers always stay there, for the same bits."""
    return device.type == "cuda"


def uploaded(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Upload numbers to a device, without waiting for it."""
    if capturing():  # nothing may be copied from the host, but a launch holds its numbers
        tensor = torch.empty(len(values), dtype=dtype, device=device)
        for place, value in zip(tensor, values, strict=True):
            place.fill_(value)
        return tensor
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def settled(missing: str) -> None:
    """Raise a RuntimeError if a CUDA graph is being captured: tables for new shapes must be made before."""
    if capturing():
        raise RuntimeError(f"{missing}: run one step with these shapes before capturing a CUDA graph")


def replayed(work: Callable[[], object], *, times: int = 10, rounds: int = 5) -> float:
    """Return the seconds that work takes on the current device when replayed as a CUDA graph.

    Args:
        work: has run before, and can be captured.
        times: how often it is done in one graph.
        rounds: replays after the first, of which the median counts.
    """
    graph = torch.cuda.CUDAGraph()
    # Threads that wait for collectives may ask the device something while this one captures.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(times):
            work()
    durations = []
    for _ in range(rounds + 1):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        durations.append(begin.elapsed_time(end) / 1e3 / times)
    middle: float = median(durations[1:])
    return middle


def refuse_absent(shapes: Sequence[tuple[int, ...]], active: Sequence[bool]) -> None:
    """Refuse parameters that are not ``active``, as they have no gradient: replays of a graph would skip them."""
    absent = [shape for shape, taking_part in zip(shapes, active, strict=True) if not taking_part]
    if absent:
        raise RuntimeError(
            f"{len(absent)} of {len(shapes)} parameters have no gradient while a CUDA graph is being captured (the "
            f"first is of shape {absent[0]}): the graph would leave them out for ever. Give them gradients, of zeros "
            "if need be, or take them out of the optimizer"
        )


def refuse_host(algorithm: str, device: torch.device) -> None:
    """Raise a RuntimeError while a graph is captured: parameters that are not on a GPU would be stepped then, and at no
    replay."""
    if capturing():
        raise RuntimeError(
            f"a CUDA graph is being captured, and a group of {algorithm!r} has parameters on {device}: the graph would "
            "leave them out. Give them an optimizer of their own, and step it outside of the graph"
        )
