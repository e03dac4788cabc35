"""What a step costs in one process without a process group: Python per parameter, beside torch's own optimizers.

All five steps of Newton-Schulz are included.  The steps of all optimizers alternate, in turning order; a row is CPU
microseconds of a step over its number of parameters, and ratios are medians of those of every round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from machine import describe
from torch import nn

from muonckpt.optimizer import Muon

ROUNDS = 9
CASES = ((100, 64), (1_000, 64), (10_000, 16))
"""So many square matrices, of such a side."""

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

KINDS: dict[str, tuple[Make, Make]] = {
    "Muon beside torch.optim.Muon": (lambda matrices: Muon(matrices, ns_coefficients="keller"), torch.optim.Muon),
    "an AdamW group beside torch.optim.AdamW(foreach)": (
        lambda matrices: Muon([{"params": matrices, "algorithm": "adamw"}]),
        lambda matrices: torch.optim.AdamW(matrices, foreach=True),
    ),
}
"""By name: ours, and torch's."""


def matrices_of(count: int, side: int) -> list[nn.Parameter]:
    """Parameters with gradients, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.zeros(side, side)) for _ in range(count)]
    for matrix in matrices:
        matrix.grad = torch.randn(side, side, generator=generator)
    return matrices


def seconds(step: Callable[[], object]) -> float:
    """Of the processor."""
    begin = time.process_time()
    step()
    return time.process_time() - begin


def show(name: str, count: int, side: int) -> None:
    """One row."""
    steps = [make(matrices_of(count, side)).step for make in KINDS[name]]
    seconds_of_programs: list[list[float]] = [[], []]
    for number in range(ROUNDS + 2):  # the first two warm up
        for program in (0, 1) if number % 2 else (1, 0):
            seconds_of_programs[program].append(seconds(steps[program]))
    our_seconds, their_seconds = (values[2:] for values in seconds_of_programs)
    ratio = statistics.median(
        our_value / their_value for our_value, their_value in zip(our_seconds, their_seconds, strict=True)
    )
    microseconds = [1e6 * statistics.median(values) / count for values in (our_seconds, their_seconds)]
    print(
        f"| {name} | {count} of {side} x {side} | {microseconds[0]:.1f} | {microseconds[1]:.1f} | {ratio:.2f} |",
        flush=True,
    )


def main() -> None:
    torch.set_num_threads(1)
    print(f"{describe()}; one thread, {ROUNDS} alternating rounds\n")
    print("| | parameters | ours, µs of CPU each | torch's | ours over torch's |")
    print("|---|---|---|---|---|")
    for name in KINDS:
        for count, side in CASES:
            show(name, count, side)


if __name__ == "__main__":
    main()
