"""The workers that share one piece of offline work: which of them this process is, and which part of it each does."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import MuonckptError

LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
"""The variables in which launchers say which process this is, and of how many: torchrun, srun, Open MPI, and MPICH and
its kin.  Not ``SLURM_NTASKS``, which a batch script sees although it runs once."""


class LaunchError(MuonckptError, ValueError):
    """The environment says something impossible about the workers."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One of ``world`` processes that do one job together.  The first leads: it begins the work, and publishes."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise LaunchError(f"there is no worker {self.rank} of {self.world}: expected one of 0 to {self.world - 1}")

    def __str__(self) -> str:
        return f"worker {self.rank} of {self.world}"

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def part(self, sizes: Sequence[int]) -> slice:
        """Which of the things of these sizes are its part."""
        ends = (0, *cuts(sizes, self.world))
        return slice(ends[self.rank], ends[self.rank + 1])


def worker_of(environment: Mapping[str, str]) -> Worker:
    """Which worker a process is, from what its launcher put into the environment; without a launcher the only one.

    Raises:
        LaunchError: no such worker is possible, or only one of a launcher's two variables is set.
    """
    for names in LAUNCHERS:
        found = [environment[name] for name in names if name in environment]
        if not found:
            continue
        try:
            rank, world = map(int, found)
        except ValueError:
            shown = ", ".join(f"{name}={environment.get(name, '')!r}" for name in names)
            raise LaunchError(f"expected two numbers in the environment, a rank and how many, got {shown}") from None
        return Worker(rank, world)
    return Worker()


def cuts(sizes: Sequence[int], world: int) -> tuple[int, ...]:
    """Where each of ``world`` parts of a sequence ends, so that the largest sum of sizes in one is the least possible.

    Parts are contiguous: files that follow each other are mostly made of the same chunks of the source, which a worker
    reads once.  No part exceeds the mean by more than the largest size.  The same on every worker.
    """
    most = range(max(sizes, default=0), sum(sizes) + 1)
    least = most[bisect_left(most, True, key=lambda limit: len(_filled(sizes, limit)) <= world)] if sizes else 0
    ends = _filled(sizes, least)
    return (*ends, *[len(sizes)] * (world - len(ends)))


def _filled(sizes: Sequence[int], limit: int) -> list[int]:
    """Where parts end that are filled one after the other up to this limit."""
    ends, filled = [], 0
    for at, size in enumerate(sizes):
        if filled + size > limit:
            ends.append(at)
            filled = 0
        filled += size
    return [*ends, len(sizes)]
