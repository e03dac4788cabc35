"""CUDA graphs: refusals and work-arounds while one is captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured: launches run at every replay, and the host cannot wait."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def is_capturable(device: torch.device) -> bool:
    """Return whether steps on a device can be captured; then their numbers always stay there, for the same bits."""
    return device.type == "cuda"


def upload_numbers(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Upload numbers to a device, without waiting for it."""
    if is_capturing():  # nothing may be copied from the host, but a launch holds its numbers
        tensor = torch.empty(len(values), dtype=dtype, device=device)
        for place, value in zip(tensor, values, strict=True):
            place.fill_(value)
        return tensor
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def refuse_new_tables(reason: str) -> None:
    """Raise RuntimeError if a CUDA graph is being captured: tables for new shapes must be made before."""
    if is_capturing():
        raise RuntimeError(f"{reason}: run one step with these shapes before capturing a CUDA graph")


def time_replays(work: Callable[[], object], *, times: int = 10, rounds: int = 5) -> float:
    """Return the seconds that work takes on the current device when replayed as a CUDA graph: the median of ``rounds``.

    Args:
        work: has run before, and can be captured.
        times: how often it is done in one graph.
    """
    graph = torch.cuda.CUDAGraph()
    # Threads that wait for collectives may ask the device something while this one captures.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(times):
            work()
    durations = []
    for _ in range(rounds + 1):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        durations.append(start.elapsed_time(stop) / 1e3 / times)
    # The first replay warms up.
    middle: float = median(durations[1:])
    return middle


def refuse_absent(shapes: Sequence[tuple[int, ...]], active: Sequence[bool]) -> None:
    """Raise RuntimeError for parameters that have no gradient, and are not ``active``: replays would skip them."""
    absent = [shape for shape, is_active in zip(shapes, active, strict=True) if not is_active]
    if absent:
        raise RuntimeError(
            f"{len(absent)} of {len(shapes)} parameters have no gradient while a CUDA graph is being captured (the "
            f"first is of shape {absent[0]}): the graph would leave them out for ever. Give them gradients, of zeros "
            "if need be, or take them out of the optimizer"
        )


def refuse_host(algorithm: str, device: torch.device) -> None:
    """Raise RuntimeError while a graph is captured: parameters on a host would be stepped then, and at no replay."""
    if is_capturing():
        raise RuntimeError(
            f"a CUDA graph is being captured, and a group of {algorithm!r} has parameters on {device}: the graph would "
            "leave them out. Give them an optimizer of their own, and step it outside of the graph"
        )
