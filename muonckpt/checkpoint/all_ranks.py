"""Work of all ranks together: computed by each, judged by one, with one outcome for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from ..errors import MuonckptError

T = TypeVar("T")
R = TypeVar("R")


def judged(
    process_group: dist.ProcessGroup | None, step: str, of_rank: Callable[[], T], judge: Callable[[list[T]], R]
) -> R:
    """What the first rank makes of the answers of all, on every rank: one gather and one broadcast.

    One process without a process group judges its own answer.

    Args:
        step: what is done, for DCP's records.
        of_rank: makes this rank's answer.
        judge: runs on the first rank of the group.

    Raises:
        MuonckptError: raised by ``judge``; the same on every rank.
        CheckpointException: anything else that was raised on a rank; see `own_errors`.
    """

    def outcome(answers: list[T]) -> R | MuonckptError:
        try:
            return judge(answers)
        except MuonckptError as error:  # a verdict about all ranks, not a failure of the one that judges
            return error

    ranks = _DistWrapper(process_group, dist.is_initialized(), 0)
    result: R | MuonckptError = ranks.all_reduce(step, of_rank, outcome)
    if isinstance(result, MuonckptError):
        raise result
    return result


@contextmanager
def own_errors(kind: type[MuonckptError]) -> Iterator[None]:
    """Raise one of our errors, the same on every rank, instead of DCP's collection of tracebacks.

    Args:
        kind: what an error becomes that is not one of ours.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        where = f" (rank {rank})" if dist.is_initialized() and len(error.failures) == 1 else ""
        if isinstance(first, MuonckptError):
            raise type(first)(f"{first}{where}") from error
        raise kind(f"{type(first).__name__}: {first}{where}") from error
