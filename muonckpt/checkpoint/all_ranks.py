"""Work of all ranks together: computed by each, judged by one, with one outcome for all.

Nothing is left waiting by an error: what a rank raises while it computes travels to the others in place of its answer,
as text and class, whatever can be pickled of it; and where a collective fails, the error says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, LostRankError, MuonckptError, lost_ranks

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a rank has no answer."""

    kind: type[MuonckptError]
    text: str


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What the ranks hear: of each that failed, why."""

    failures: dict[int, _Failure]

    def raise_it(self, cause: Exception | None) -> None:
        """Raise the error of the first rank that failed, if one has.

        Args:
            cause: what was raised on this rank.
        """
        for rank, failure in self.failures.items():
            where = f" (rank {rank})" if rank >= 0 and dist.is_initialized() and len(self.failures) == 1 else ""
            raise failure.kind(f"{failure.text}{where}") from cause


def _answered(kind: type[MuonckptError], of_rank: Callable[[], T]) -> tuple[T | _Failure, Exception | None]:
    """What this rank has to tell, and the error that it is, if it is one."""
    try:
        return of_rank(), None
    except MuonckptError as error:
        return _Failure(type(error), str(error)), error
    except Exception as error:
        return _Failure(kind, f"{type(error).__name__}: {error}"), error


def judged(
    process_group: dist.ProcessGroup | None,
    kind: type[MuonckptError],
    of_rank: Callable[[], T],
    judge: Callable[[list[T]], R],
) -> R:
    """What the first rank makes of the answers of all, on every rank: one gather and one broadcast.

    One process without a process group judges its own answer.

    Args:
        kind: what an error becomes that is not one of ours.
        of_rank: makes this rank's answer.
        judge: runs on the first rank of the group.

    Raises:
        MuonckptError: of the first rank that failed, or raised by ``judge``; the same on every rank.
        LostRankError: another rank was lost.
    """
    answer, cause = _answered(kind, of_rank)
    answers = _gathered(process_group, answer)
    told: list[R | _Outcome | None] = [None]
    if answers is not None:
        told, cause = _judged(process_group, kind, answers, lambda good: [judge(good)], cause)
    if dist.is_initialized():
        with lost_ranks():
            dist.broadcast_object_list(told, group=process_group, group_src=0)
    return _taken(told[0], cause)


def dealt(
    process_group: dist.ProcessGroup | None,
    kind: type[MuonckptError],
    of_rank: Callable[[], T],
    deal: Callable[[list[T]], list[R]],
) -> R:
    """What the first rank makes of the answers of all for each of them: one gather and one scatter.

    Args:
        kind, of_rank: as for `judged`.
        deal: runs on the first rank of the group; gives one value for each rank.

    Raises:
        MuonckptError, LostRankError: as `judged`.
    """
    answer, cause = _answered(kind, of_rank)
    answers = _gathered(process_group, answer)
    mine: list[R | _Outcome | None] = [None]
    told: list[R | _Outcome | None] | None = None
    if answers is not None:
        told, cause = _judged(process_group, kind, answers, deal, cause)
        told = told * len(answers) if isinstance(told[0], _Outcome) else told
        mine = told[:1]
    if dist.is_initialized():
        with lost_ranks():
            dist.scatter_object_list(mine, told, group=process_group, group_src=0)
    return _taken(mine[0], cause)


def _gathered(process_group: dist.ProcessGroup | None, answer: T) -> list[T] | None:
    """The answers of all ranks, on the first one."""
    if not dist.is_initialized():
        return [answer]
    world = dist.get_world_size(process_group)
    answers: list[T] | None = [answer] * world if dist.get_rank(process_group) == 0 else None
    with lost_ranks():
        dist.gather_object(answer, answers, group=process_group, group_dst=0)
    return answers


def _judged(
    process_group: dist.ProcessGroup | None,
    kind: type[MuonckptError],
    answers: Sequence[T | _Failure],
    judge: Callable[[list[T]], list[R]],
    cause: Exception | None,
) -> tuple[list[R | _Outcome | None], Exception | None]:
    """On the first rank: what to tell the ranks, and the error that it is, if it is one of this rank."""
    failures = _failures(process_group, answers)
    if failures:
        return [_Outcome(failures)], cause
    verdict, cause = _answered(kind, lambda: judge(list(answers)))  # type: ignore[arg-type]
    if isinstance(verdict, _Failure):  # about all ranks: where one of them is meant, the judge names it
        return [_Outcome({-1: verdict})], cause
    return [*verdict], None


def _taken(told: R | _Outcome | None, cause: Exception | None) -> R:
    if isinstance(told, _Outcome):
        told.raise_it(cause)
    return told  # type: ignore[return-value]


def _failures(process_group: dist.ProcessGroup | None, answers: Sequence[object]) -> dict[int, _Failure]:
    """By global rank."""
    each = zip(group_ranks(process_group), answers, strict=True)
    return {rank: answer for rank, answer in each if isinstance(answer, _Failure)}


def told_all(process_group: dist.ProcessGroup | None, kind: type[MuonckptError], of_rank: Callable[[], T]) -> list[T]:
    """The answers of all ranks, in the order of the group, on every rank: one gather.

    Args:
        kind, of_rank: as for `judged`.

    Raises:
        MuonckptError: of the first rank that failed, the same on every rank.
        LostRankError: another rank was lost.
    """
    answer, cause = _answered(kind, of_rank)
    answers: list[T | _Failure] = [answer]
    if dist.is_initialized():
        answers = [answer] * dist.get_world_size(process_group)
        with lost_ranks():
            dist.all_gather_object(answers, answer, process_group)
    _Outcome(_failures(process_group, answers)).raise_it(cause)
    return answers  # type: ignore[return-value]


def told_by_first(process_group: dist.ProcessGroup | None, kind: type[MuonckptError], of_first: Callable[[], T]) -> T:
    """The answer of the first rank, on every rank: one broadcast.

    Args:
        kind: as for `judged`.
        of_first: runs on the first rank of the group.

    Raises:
        MuonckptError: of the first rank, the same on every rank.
        LostRankError: another rank was lost.
    """
    told: list[T | _Outcome | None] = [None]
    cause: Exception | None = None
    if coordinates(process_group):
        answer, cause = _answered(kind, of_first)
        told = [_Outcome({-1: answer}) if isinstance(answer, _Failure) else answer]
    if dist.is_initialized():
        with lost_ranks():
            dist.broadcast_object_list(told, group=process_group, group_src=0)
    return _taken(told[0], cause)


@contextmanager
def unusable(advice: str = "") -> Iterator[None]:
    """Have an error say that the state dict is no state of any run: tensors have been overwritten.

    Args:
        advice: how to have the error before that.
    """
    try:
        yield
    except LostRankError:  # says it
        raise
    except MuonckptError as error:
        raise type(error)(
            f"{error}. THE STATE DICT IS UNUSABLE NOW: tensors were overwritten before this was found; load another "
            f"checkpoint into it, or make it anew{advice}"
        ) from error


def coordinates(process_group: dist.ProcessGroup | None) -> bool:
    """Whether this is the first rank of the group."""
    return not dist.is_initialized() or dist.get_rank(process_group) == 0


def refuse_differing(process_group: dist.ProcessGroup | None, call: str, ranks: Sequence[Mapping[str, object]]) -> None:
    """Refuse arguments that have to be the same on all ranks, and are not.

    Args:
        call: what was called.
        ranks: of each rank of the group, arguments by name.

    Raises:
        ArgumentError: names the first argument that differs, and two ranks.
    """
    for rank, given in zip(group_ranks(process_group), ranks, strict=True):
        for name, value in given.items():
            if value != ranks[0][name]:
                first = group_ranks(process_group)[0]
                raise ArgumentError(
                    f"{call} was called with {name}={ranks[0][name]!r} on rank {first}, and with {name}={value!r} on "
                    f"rank {rank}: it has to be the same on all ranks"
                )


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


def time_out(process_group: dist.ProcessGroup | None) -> timedelta | None:
    """How long a collective of the host waits for a rank, as ``init_process_group`` or ``new_group`` was told.

    None: the process group has no gloo for the host.
    """
    if "cpu:gloo" not in dist.get_backend_config(process_group).split(","):
        return None
    group = process_group or dist.group.WORLD
    assert group is not None, "there is a world"
    options = group._get_backend(torch.device("cpu")).options
    waits: timedelta = options._timeout
    return waits


def exchanged(
    process_group: dist.ProcessGroup | None,
    send: Tensor,
    give: Sequence[int],
    receive: Tensor,
    take: Sequence[int],
) -> None:
    """Exchange bytes with exact splits: ``give[i]`` of ``send`` to rank i of the group, ``take[i]`` from it.

    Raises:
        LostRankError: another rank was lost.
    """
    with lost_ranks():
        dist.all_to_all_single(receive, send, list(take), list(give), group=process_group)
