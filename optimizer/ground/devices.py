"""Facts about a device that the host needs: whether it waits for it, how numbers get there, and how long work takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor


def is_asynchronous(device: torch.device) -> bool:
    """Return whether the host runs ahead of a device, so that to read a number from there is to wait for it."""
    return device.type == "cuda"


def upload_numbers(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Upload numbers to a device, without waiting for it."""
    return upload(torch.tensor(values, dtype=dtype), device)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Upload a tensor of the host to a device, without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if is_asynchronous(device) else tensor


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
