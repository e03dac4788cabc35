"""Work of all ranks together: computed by each, judged by one, with one outcome for all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from ..errors import Interrupted, MuonckptError

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


def dealt(
    process_group: dist.ProcessGroup | None, step: str, of_rank: Callable[[], T], deal: Callable[[list[T]], list[R]]
) -> R:
    """What the first rank makes of the answers of all for each of them: one gather and one scatter.

    Args:
        step, of_rank: as for `judged`.
        deal: runs on the first rank of the group; gives one value for each rank.

    Raises:
        CheckpointException: what was raised on a rank, the same on every rank; see `own_errors`.
    """
    return _DistWrapper(process_group, dist.is_initialized(), 0).reduce_scatter(step, of_rank, deal)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a rank has no answer."""

    kind: type[MuonckptError]
    text: str


def told_all(process_group: dist.ProcessGroup | None, kind: type[MuonckptError], of_rank: Callable[[], T]) -> list[T]:
    """The answers of all ranks, in the order of the group, on every rank: one gather.

    Args:
        kind: what an error becomes that is not one of ours.

    Raises:
        MuonckptError: of the first rank that failed, the same on every rank.
        Interrupted: another rank was lost.
    """
    answer: T | _Failure
    cause: Exception | None = None
    try:
        answer = of_rank()
    except MuonckptError as error:
        answer, cause = _Failure(type(error), str(error)), error
    except Exception as error:
        answer, cause = _Failure(kind, f"{type(error).__name__}: {error}"), error
    answers: list[T | _Failure | None] = [answer]
    if dist.is_initialized():
        answers = [None] * dist.get_world_size(process_group)
        with lost_ranks():
            dist.all_gather_object(answers, answer, process_group)
    failed = {rank: each for rank, each in zip(group_ranks(process_group), answers, strict=True)
              if isinstance(each, _Failure)}  # fmt: skip
    for rank, failure in failed.items():
        where = f" (rank {rank})" if dist.is_initialized() and len(failed) == 1 else ""
        raise failure.kind(f"{failure.text}{where}") from cause
    return answers  # type: ignore[return-value]


def group_ranks(process_group: dist.ProcessGroup | None) -> list[int]:
    """Global ranks, in the order of the group; [0] for one process without a process group."""
    return list(dist.get_process_group_ranks(process_group or dist.group.WORLD)) if dist.is_initialized() else [0]


def wire_device(process_group: dist.ProcessGroup | None, held: Collection[str]) -> torch.device:
    """Where bytes have to lie to be exchanged.

    Args:
        held: the types of the devices on which any rank has tensors.
    """
    if not dist.is_initialized():
        return torch.device("cpu")
    backends = dict(part.split(":") for part in dist.get_backend_config(process_group).split(","))
    fast = [device for device, backend in backends.items() if device != "cpu" and backend != "gloo"]
    if "cpu" in backends and (set(held) <= {"cpu"} or not fast):
        return torch.device("cpu")
    return torch.device(fast[0])


def exchanged(
    process_group: dist.ProcessGroup | None,
    send: Tensor,
    give: Sequence[int],
    receive: Tensor,
    take: Sequence[int],
) -> None:
    """Exchange bytes with exact splits: ``give[i]`` of ``send`` to rank i of the group, ``take[i]`` from it."""
    with lost_ranks():
        dist.all_to_all_single(receive, send, list(take), list(give), group=process_group)


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Say in words of ours that a collective has failed: torch's are of pairs of sockets.

    Raises:
        Interrupted: another rank was killed, or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        trace = error.__traceback__
        while trace and trace.tb_next:
            trace = trace.tb_next
        if trace is None or trace.tb_frame.f_globals.get("__name__") != dist.distributed_c10d.__name__:
            raise  # it is no collective that failed
        raise Interrupted(
            "another rank was lost: killed, stopped, cut off, or silent for longer than the process group waits (torch "
            f"says: {' '.join(str(error).split())}). Start all ranks again. A save that was cut off has published "
            "nothing, unless all of it; tensors that were being loaded or moved are not to be trained on"
        ) from error


@contextmanager
def own_errors(kind: type[MuonckptError]) -> Iterator[None]:
    """Raise one of our errors, the same on every rank, instead of DCP's collection of tracebacks.

    Args:
        kind: what an error becomes that is not one of ours.

    Raises:
        Interrupted: another rank was lost.
    """
    try:
        with lost_ranks():
            yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        where = f" (rank {rank})" if dist.is_initialized() and len(error.failures) == 1 else ""
        if isinstance(first, MuonckptError):
            raise type(first)(f"{first}{where}") from error
        raise kind(f"{type(first).__name__}: {first}{where}") from error
