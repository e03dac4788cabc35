"""Work of all ranks together: computed by each, decided by one, with one outcome for all.

An error leaves no rank waiting: what a rank raises travels to the others in place of its answer.  So each function
here raises the same MuonckptError on all ranks, that of the first rank that failed, or LostRankError if another rank
was lost.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from threading import Timer
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..names.errors import ArgumentError, LostRankError, MuonckptError, SourceError, lost_ranks
from ..ranks.new_group import time_out
from ..ranks.release import in_flight

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The failures that all ranks receive, by global rank; -1 means all of them."""

    failures: Mapping[int, MuonckptError]

    def raise_it(self, cause: Exception | None) -> NoReturn:
        """Raise the error of the first rank that failed; ``cause`` was raised on this rank."""
        rank, failure = next(iter(self.failures.items()))
        # A rank is named only where it failed alone.
        is_alone = rank >= 0 and dist.is_initialized() and len(self.failures) == 1
        suffix = f" (rank {rank})" if is_alone and not failure.fault.startswith(f"rank {rank} ") else ""
        keys = tuple(dict.fromkeys(chain.from_iterable(each.keys for each in self.failures.values())))
        error = type(failure)(f"{failure.fault}{suffix}", failure.advice, keys=keys)
        if isinstance(cause, type(failure)) and str(cause) == str(error):
            cause.keys = keys
            raise cause  # without itself as its cause
        raise error from cause


class JointWork:
    """A block of work that ends alike on all ranks: each gives an answer, and the first one decides for all.

    Each rank calls `gather` once.  After that only the first rank works, until all call `broadcast`.  The end of the
    block waits for all ranks, if they have not met in either.  An error on any rank before is raised on all of them.

    Args:
        kind: the class for errors that are not ours.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, kind: type[MuonckptError]) -> None:
        self._group, self._kind = process_group, kind
        self._awaited: Literal["gather", "broadcast", ""] = "gather"
        """The exchange that the other ranks wait in, if one rank fails now."""
        self._cause: Exception | None = None
        """The error of this rank."""

    def __enter__(self) -> JointWork:
        return self

    def gather(self, answer: T) -> list[T] | None:
        """Return the answers of all ranks, in the order of the group, on its first rank; None on others."""
        self._awaited = ""
        answers, has_failed = gather_on_first(self._group, answer)
        if has_failed:  # nothing is decided on the answers of some ranks
            ranked = zip(group_ranks(self._group), answers or (), strict=False)
            failures = {rank: answer for rank, answer in ranked if isinstance(answer, MuonckptError)}
            self.broadcast(_Outcome(failures))
        self._awaited = "broadcast"
        return answers

    def broadcast(self, decision: T | _Outcome | None) -> T:
        """Return the first rank's decision on all ranks, or raise the failure that travels in its place."""
        self._awaited = ""
        return _unless_failed(_broadcast(self._group, decision), self._cause)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._awaited or not (error is None or isinstance(error, Exception)):
            return
        self._cause, failure = error, None if error is None else _as_ours(error, self._kind)
        if self._awaited == "gather":
            self.gather(failure)
        else:
            self.broadcast(failure and _Outcome({-1: failure}))


def gather_on_all(
    process_group: dist.ProcessGroup | None, kind: type[MuonckptError], answer: Callable[[], T]
) -> list[T]:
    """Return the answers of all ranks, in the order of the group: one gather and one broadcast."""
    with JointWork(process_group, kind) as work:
        return work.broadcast(work.gather(answer()))


def broadcast_from_first(process_group: dist.ProcessGroup | None, answer: Callable[[], T]) -> T:
    """Return the answer of the first rank, or raise its error, a `SourceError` if it is not ours: one broadcast."""
    message: T | _Outcome | None = None
    cause: Exception | None = None
    if is_coordinator(process_group):
        try:
            message = answer()
        except Exception as error:
            message, cause = _Outcome({-1: _as_ours(error, SourceError)}), error
    return _unless_failed(_broadcast(process_group, message), cause)


def scatter_from_first(process_group: dist.ProcessGroup | None, values: list[T] | None) -> T:
    """Return this rank's value among those that the first rank has for all; others give None."""
    received: list[Any] = [values and values[0]]
    if dist.is_initialized():
        with lost_ranks():
            dist.scatter_object_list(received, values, group=process_group, group_src=0)
    value: T = received[0]
    return value


_HEAD_BYTES = 1 << 10
"""Bytes of an object's pickle that are sent with its length, and mostly all of them: rounds cost more than bytes."""


def _divided(process_group: dist.ProcessGroup | None, value: object) -> tuple[Tensor, Tensor]:
    """Return the pickle of an object as a head, which is as long on all ranks, and a rest.

    The head begins with the length of the pickle, and with whether the object is an error.
    """
    pickled = pickle.dumps(value)
    raw = bytearray(len(pickled).to_bytes(8, "little") + bytes([isinstance(value, MuonckptError)]) + pickled)
    message = torch.frombuffer(raw.ljust(_HEAD_BYTES, b"\0"), dtype=torch.uint8).to(wire_device(process_group, ()))
    return message[:_HEAD_BYTES], message[_HEAD_BYTES:]


def _rest_bytes(head: Tensor) -> int:
    return max(9 + int.from_bytes(bytes(head[:8].tolist()), "little") - _HEAD_BYTES, 0)


def _joined(head: Tensor, rest: Tensor) -> Any:
    return pickle.loads(bytes(torch.cat([head, rest]).cpu().numpy()[9:]))


def gather_on_first(process_group: dist.ProcessGroup | None, answer: T) -> tuple[list[T] | None, bool]:
    """Return the answers of all ranks, in the order of the group, on its first rank, and None on others.

    All ranks also get whether an answer is an error.  They hear the head of every answer, and so the longest rest:
    to gather heads on the first rank alone, and to say what it has found, takes twice as long.
    """
    if not dist.is_initialized():
        return [answer], isinstance(answer, MuonckptError)
    num_ranks, is_first = dist.get_world_size(process_group), is_coordinator(process_group)
    head, rest = _divided(process_group, answer)
    heads, rests = list(head.repeat(num_ranks, 1)), None
    with lost_ranks():
        dist.all_gather(heads, in_flight(head.clone()), group=process_group)
        longest = max(map(_rest_bytes, heads))
        if is_first:
            rests = list(rest.new_empty(num_ranks, longest))
        if longest:
            padded = torch.cat([rest, rest.new_zeros(longest - len(rest))])
            dist.gather(in_flight(padded), rests, group=process_group, group_dst=0)
    has_failed = any(head[8] for head in heads)
    return None if rests is None else [answer, *map(_joined, heads[1:], rests[1:])], has_failed


def _broadcast(process_group: dist.ProcessGroup | None, message: T) -> T:
    """Return the first rank's message on all ranks."""
    if not dist.is_initialized():
        return message
    is_first = is_coordinator(process_group)
    head, rest = _divided(process_group, message)
    with lost_ranks():
        dist.broadcast(in_flight(head), group=process_group, group_src=0)
        rest = rest if is_first else head.new_empty(_rest_bytes(head))
        if len(rest):
            dist.broadcast(in_flight(rest), group=process_group, group_src=0)
    if not is_first:
        message = _joined(head, rest)
    return message


def _as_ours(error: Exception, kind: type[MuonckptError]) -> MuonckptError:
    return error if isinstance(error, MuonckptError) else kind(f"{type(error).__name__}: {error}")


def _unless_failed(message: R | _Outcome | None, cause: Exception | None) -> R:
    if isinstance(message, _Outcome):
        message.raise_it(cause)
    return message  # type: ignore[return-value]


@contextmanager
def unusable(advice: str = "") -> Iterator[None]:
    """Add to an error that tensors have been overwritten, and ``advice`` on how to get it before that."""
    try:
        yield
    except LostRankError:  # says it
        raise
    except MuonckptError as error:
        loss = f"THE STATE DICT IS UNUSABLE NOW: load another checkpoint into it{advice}"
        raise error.with_text(
            error.fault, ". ".join(filter(None, (error.advice, loss))), has_overwritten=True
        ) from error


def is_coordinator(process_group: dist.ProcessGroup | None) -> bool:
    """Return whether this is the first rank of the group."""
    return not dist.is_initialized() or dist.get_rank(process_group) == 0


def refuse_differing(process_group: dist.ProcessGroup | None, call: str, ranks: Sequence[Mapping[str, object]]) -> None:
    """Refuse arguments that have to be the same on all ranks, and are not.

    Args:
        call: what was called.
        ranks: each rank's arguments by name, in the order of the group.

    Raises:
        ArgumentError: names the first argument that differs, and two ranks.
    """
    for rank, arguments in zip(group_ranks(process_group), ranks, strict=True):
        for name, value in arguments.items():
            if value != ranks[0][name]:
                first = group_ranks(process_group)[0]
                raise ArgumentError(
                    f"{call} was called with {name}={ranks[0][name]!r} on rank {first}, and with {name}={value!r} on "
                    f"rank {rank}: it has to be the same on all ranks"
                )


def refuse_mixed_calls(process_group: dist.ProcessGroup | None, call: str) -> None:
    """Refuse different calls on different ranks, which would misunderstand each other, or wait.

    Every public call begins with this gather of names, before it asks objects of the user, which may communicate
    themselves.  Where others are long in coming, perhaps because they never call, it says so.  A process group without
    gloo for the host is not asked, as that would wait for its devices.

    Raises:
        ArgumentError: names two calls, and ranks that made them.
    """
    group = process_group or (dist.group.WORLD if dist.is_initialized() else None)
    if group is not None and time_out(group, torch.device("cpu")) is not None:
        with warned_when_waiting(group, call):
            bits_of_all(process_group, call, 0)


LONG_SECONDS = 20.0
"""Seconds after which a rank says that it waits for the others."""


@contextmanager
def warned_when_waiting(process_group: dist.ProcessGroup | None, call: str) -> Iterator[None]:
    """Warn if the block takes long; on two ranks of a group alone, as one of them may be the late one."""

    def tell() -> None:
        print(
            f"muonckpt: rank {dist.get_rank()} has waited {LONG_SECONDS:g} s in {call} for other ranks of the process "
            "group: all of them have to call it, so do not call it inside `if rank == 0`",
            file=sys.stderr,
            flush=True,
        )

    # A daemon, so that a rank that dies meanwhile is not kept by it.
    timer = Timer(LONG_SECONDS, tell)
    timer.daemon = True
    if dist.is_initialized() and dist.get_rank(process_group) < 2:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


_NOTE_BYTES = 64
"""More than the name of any call of ours, and its bits."""


def bits_of_all(process_group: dist.ProcessGroup | None, call: str, bits: int) -> int:
    """Return the bits that any rank has given, by the gather of names with which `refuse_mixed_calls` begins a call.

    Raises:
        ArgumentError: as `refuse_mixed_calls`.
    """
    if not dist.is_initialized():
        return bits
    # Bits and name in a fixed length: every rank knows it, so no rank has to tell it first.
    ranks = group_ranks(process_group)
    note = torch.frombuffer(bytearray(f"{bits} {call}".encode().ljust(_NOTE_BYTES)), dtype=torch.uint8)
    notes = list(note.to(wire_device(process_group, ())).repeat(len(ranks), 1))
    with lost_ranks():  # one exchange, as lengths are known; objects would take two
        dist.all_gather(notes, in_flight(notes[0].clone()), group=process_group)
    # Two names are two calls, whose further exchanges would misunderstand each other.
    joint_bits, first_call = 0, ""
    for rank, note in zip(ranks, notes, strict=True):
        rank_bits, _, rank_call = bytes(note.tolist()).decode().rstrip().partition(" ")
        first_call, joint_bits = first_call or rank_call, joint_bits | int(rank_bits)
        if rank_call != first_call:
            raise ArgumentError(
                f"rank {ranks[0]} called {first_call}, and rank {rank} called {rank_call}: all ranks of the process "
                "group have to make the same calls in the same order, so look for a branch that only some of them take"
            )
    return joint_bits


def group_ranks(process_group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group; [0] for one process without a process group."""
    return list(dist.get_process_group_ranks(process_group or dist.group.WORLD)) if dist.is_initialized() else [0]


def place_in(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this rank's place in a group, and the number of ranks there; (0, 1) without a process group."""
    return (dist.get_rank(process_group), dist.get_world_size(process_group)) if dist.is_initialized() else (0, 1)


def wire_device(process_group: dist.ProcessGroup | None, device_types: Collection[str]) -> torch.device:
    """Return the device from which bytes can be exchanged.

    Args:
        device_types: those of the devices on which any rank has tensors.
    """
    if not dist.is_initialized():
        return torch.device("cpu")
    # Host memory where that spares a copy, or where gloo is all there is; otherwise the fast backend's device.
    backends = dict(part.split(":") for part in dist.get_backend_config(process_group).split(","))
    fast = [device for device, backend in backends.items() if device != "cpu" and backend != "gloo"]
    if "cpu" in backends and (set(device_types) <= {"cpu"} or not fast):
        return torch.device("cpu")
    return torch.device(fast[0])


def exchange(
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
        dist.all_to_all_single(in_flight(receive), in_flight(send), list(take), list(give), group=process_group)
