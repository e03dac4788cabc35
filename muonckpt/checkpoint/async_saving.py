"""Saving while training goes on: tensors are copied at the call, and written by a thread.

The training thread pays for the copy alone.  Everything else is `saving.save`, in one thread of each process, on a
process group of its own, so that its collectives never meet those of training.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from datetime import timedelta
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from ..layouts.boxed_tensor import BoxedTensor, parts_of, whole_shape
from ..layouts.tensors import declares_boxes, local_of
from ..names.errors import (
    ArgumentError,
    DestinationError,
    Interrupted,
    LostRankError,
    MuonckptError,
    called_like,
    warn_on_rank,
)
from ..ranks.new_group import new_group, time_out
from ..store.io.location import absolute_name
from .all_ranks import gather_on_all, refuse_mixed_calls
from .live_state import LiveState, nested_state, refuse_no_state_dict
from .saving import AgreedPlans, SaveProgress, as_json, run_save
from .shared_memory import Elements
from .signals import end_in_order
from .storable import is_writable

OnError = Literal["raise", "warn"]
WhenBusy = Literal["wait", "refuse"]


class _SaveFuture(Future[None]):
    """A future that knows whether its error has been reported, that is, whether the caller has fetched it."""

    reported = False

    def result(self, timeout: float | None = None) -> None:
        self.exception(timeout)
        super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.reported = True
        return error

    def error(self) -> BaseException | None:
        """Return the same as ``exception()``, without counting it as reported."""
        return super().exception()

    def run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(None)


class AsyncSave:
    """A save that runs along with training.

    An error that was never fetched is raised, or warned of, by the next ``async_save`` of the same process group.
    If there is none, the program prints it when it ends, with exit code 120 unless ``on_error="warn"``.

    Attributes:
        path: the checkpoint.
        progress: bytes that this rank has written, and has to write.
        future: the same save, for programs that take a `concurrent.futures.Future`.
        on_error: ``"raise"`` or ``"warn"``, for an error that was never fetched.
    """

    def __init__(self, path: str, progress: SaveProgress, outcome: _SaveFuture, on_error: OnError) -> None:
        self.path = path
        self.progress = progress
        self.future = outcome
        self.on_error = on_error

    def done(self) -> bool:
        """Return whether this rank has finished, well or not."""
        return self.future.done()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is published.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            TimeoutError: it is not finished.
            MuonckptError: the save failed; the same on every rank.
        """
        self.future.result(timeout)

    @property
    def unreported(self) -> BaseException | None:
        """The error, for which this waits, if this rank has not fetched it."""
        error = self.future.error()
        return None if self.future.reported else error

    @property
    def failed_on_all(self) -> bool:
        """True if all ranks have an error, for which this waits."""
        error = self.future.error()
        return isinstance(error, MuonckptError) and not isinstance(error, LostRankError)

    def settle(self) -> None:
        """Wait, and raise or warn of an unreported error, once."""
        error = self.unreported
        self.mark_reported()
        if error is not None and self.on_error == "raise":
            raise error
        if error is not None:
            self.warn(error)

    def warn(self, error: BaseException) -> None:
        self.mark_reported()
        warn_on_rank(f"saving {self.path} failed: {error}", RuntimeWarning)

    def mark_reported(self) -> None:
        self.future.reported = True


class Lane:
    """The buffers, the thread and the process groups that saves of one process group share."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.world = _world()
        self.process = os.getpid()
        self.last: AsyncSave | None = None
        self._copy = HostCopy()
        self._plans: AgreedPlans = {}
        self._thread = ThreadPoolExecutor(1, "muonckpt-save")
        self._group = _gloo(process_group) if self.world else None
        self._asking = _gloo(process_group) if self.world else None
        if self.world:
            before_groups_end(self.wait)
        self.loss: LostRankError | None = None

    def submit(
        self,
        state_dict: Mapping[str, Any],
        path: str,
        provenance: Mapping[str, Any],
        on_error: OnError,
        then: Callable[[], None],
    ) -> AsyncSave:
        """Copy the state, and have the thread write it and do ``then``.  The last save has ended: buffers are free."""
        # The copy is all that the training thread waits for.
        progress = SaveProgress()
        staged: dict[str, Any] = {}
        details: Mapping[str, Any] = {}
        failure: Exception | None = None
        try:
            details = as_json(provenance)
            staged = self._copy.of(nested_state(state_dict, "to save"))
        except Exception as error:  # the other ranks plan with this one: they hear of it there
            failure = error

        def copied() -> LiveState:
            if failure is not None:
                raise failure
            return LiveState.of(staged, "to save")

        def work() -> None:
            with self._failing_together(path):
                run_save(copied, path, details, self._group, self._plans, progress)
            then()

        # One thread, so that saves of this lane meet those of other ranks in one order.
        outcome = _SaveFuture()
        self._thread.submit(outcome.run, work)
        self.last = AsyncSave(path, progress, outcome, on_error)
        return self.last

    @contextmanager
    def _failing_together(self, noun: str) -> Iterator[None]:
        """Let collectives in the block fail on all ranks if another rank has ended.

        Gloo tells only those that wait for that rank, and the others would wait for them.  So a rank that hears of it
        closes its connections, which ends the others' wait.

        Raises:
            LostRankError: a rank was lost, now or before.
        """
        if self.loss is not None:
            raise self.loss
        try:
            yield
        except Exception as error:
            # The program ended the groups itself: no rank was lost.
            if _world() is not self.world:
                raise DestinationError(
                    f"the process groups were ended while {noun} was being saved: wait for it, with .result(), before "
                    "that"
                ) from error
            outcome = isinstance(error, MuonckptError) and not isinstance(error, Interrupted)
            if outcome or self._group is None:  # all ranks know, or there are no others
                raise
            # From here on these groups are of no use, so the lane refuses further saves with the same error.
            self.loss = LostRankError(
                f"while {noun} was being saved, a rank ended or did not answer in the time-out of the process group: "
                "the other ranks cannot save any more, so start all of them again. Earlier checkpoints are as they "
                "were, and this one, if it is there, is whole"
            )
            if _world() is self.world:  # it may have been ended meanwhile, and all groups with it
                for group in (self._group, self._asking):
                    dist.destroy_process_group(group)
            raise self.loss from error

    def busy(self) -> bool:
        is_busy = self.last is not None and not self.last.done()
        with self._failing_together("a checkpoint"):
            return any(gather_on_all(self._asking, DestinationError, lambda: is_busy))

    def settle(self) -> None:
        """Wait for the last save; unless its error was reported on a rank, raise or warn of it on all."""
        if self.last is None:
            return
        # Where one rank has fetched the error and gone on, the others may not stop for it.
        last, unreported = self.last, self.last.unreported is not None
        if last.failed_on_all:
            with self._failing_together(last.path):
                if not all(gather_on_all(self._asking, DestinationError, lambda: unreported)):
                    last.mark_reported()
        last.settle()

    def wait(self) -> None:
        """Wait for the last save of this process, well or not."""
        if self.process == os.getpid() and self.last is not None:
            futures.wait([self.last.future])

    def close(self) -> None:
        """End the thread; the ranks of its world may have gone, so an error is only warned of."""
        self._thread.shutdown()
        self._copy.close()
        if self.last is not None and (error := self.last.unreported) is not None:
            self.last.warn(error)


_lanes: dict[dist.ProcessGroup | None, Lane] = {}
_of_parent: list[Lane] = []
"""The lanes of the parent in a forked process, which must not give pinned memory back."""


@called_like("muonckpt.async_save({'model': weights, 'optimizer': state}, path)")
def async_save(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    provenance: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    on_error: OnError = "raise",
    when_busy: WhenBusy = "wait",
) -> AsyncSave:
    """Save a state dict while training goes on: the state at the time of the call.  Collective.

    The call copies this rank's tensors to host memory (pinned, if there is a GPU), in buffers that the next call uses
    again, and a thread saves them.  ``destroy_process_group()`` and the end of the program wait for it; end with
    ``.result()`` to have its error.

    Args:
        state_dict, path, provenance: as for `save`.
        process_group: the ranks that save; the first call makes two gloo process groups of them, with the time-out that
            this one has for the host, else with gloo's own of 30 minutes.
        on_error: what the next call does with an error that was never fetched: ``"raise"`` it, or ``"warn"`` of it.
        when_busy: while a save of the same process group is running, ``"wait"`` until it ends, or ``"refuse"``, which
            asks the other ranks first.

    Raises:
        DestinationError: ``"refuse"``, and a rank is still saving; or the last save failed.
        ArgumentError: an unknown choice.
        LostRankError: another rank was lost, now or in an earlier save.
    """
    if isinstance(path, Mapping):
        refuse_no_state_dict(state_dict, "to save")
    place = absolute_name(path)  # training goes on, perhaps in another working directory
    check_before_asking(process_group, on_error, when_busy)
    refuse_mixed_calls(process_group, "async_save")
    lane = free_lane(process_group, place, when_busy)
    return lane.submit(state_dict, place, provenance or {}, on_error, lambda: None)  # nothing follows publication


def check_before_asking(process_group: dist.ProcessGroup | None, on_error: OnError, when_busy: WhenBusy) -> None:
    """Refuse unknown choices, and a process group that has lost a rank: the others may not be there to answer.

    Raises:
        ArgumentError: an unknown choice.
        LostRankError: another rank was lost in an earlier save.
    """
    if on_error not in ("raise", "warn") or when_busy not in ("wait", "refuse"):
        raise ArgumentError(
            f"on_error is 'raise' or 'warn', when_busy 'wait' or 'refuse'; got {on_error!r}, {when_busy!r}"
        )
    lane = _lanes.get(process_group or _world())
    if lane is not None and lane.loss is not None:
        raise lane.loss


def free_lane(process_group: dist.ProcessGroup | None, noun: str, when_busy: WhenBusy) -> Lane:
    """Return the lane of a process group when its last save has ended, all of whose ranks have made the same call.

    Args:
        noun: names the new save in errors.

    Raises:
        DestinationError: ``"refuse"``, and a rank is still saving; or the last save failed.
    """
    end_in_order(_under_way)
    lane = _lane(process_group)
    if when_busy == "refuse" and lane.busy():
        raise DestinationError(f"{lane.last.path if lane.last else 'a checkpoint'} is still being saved: {noun} is not")
    # The last save has to end first: its buffers are used again, and names may depend on its outcome.
    lane.settle()
    return lane


def settle_last(process_group: dist.ProcessGroup | None) -> None:
    """Wait for the last `async_save` of a process group, and raise or warn of its error as the next one would."""
    lane = _lanes.get(process_group or _world())
    if lane is not None and lane.process == os.getpid():
        lane.settle()


def wait_for_last(process_group: dist.ProcessGroup | None) -> None:
    """Wait for the last `async_save` of a process group, as the end of the program does."""
    lane = _lanes.get(process_group or _world())
    if lane is not None:
        lane.wait()


def _under_way() -> bool:
    saves = [lane.last for lane in _lanes.values() if lane.process == os.getpid()]
    return any(save is not None and not save.done() for save in saves)


def _lane(process_group: dist.ProcessGroup | None) -> Lane:
    """Return the lane of a process group, after closing those of worlds that are gone."""
    # Lanes of worlds that are gone hold threads and pinned memory.
    world = _world()
    for group, lane in list(_lanes.items()):
        if lane.process != os.getpid():  # a fork of that process, without its threads
            _of_parent.append(_lanes.pop(group))
        elif lane.world is not world:
            del _lanes[group]
            lane.close()
    key = process_group or world
    if key not in _lanes:
        _lanes[key] = Lane(process_group)
    return _lanes[key]


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def _gloo(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    like = process_group or dist.group.WORLD
    assert like is not None, "there is a world"
    return new_group(dist.get_process_group_ranks(like), "gloo", time_out(like, torch.device("cpu")))


@atexit.register
def _report_failures() -> None:
    """Print unreported errors at the end of the program, when threads have ended."""
    lost = False
    for lane in _lanes.values():
        if lane.last is None or lane.process != os.getpid():
            continue
        # A user who interrupts the wait at the end wants the program to end.
        with suppress(KeyboardInterrupt):
            if (error := lane.last.unreported) is not None:
                lost |= lane.last.on_error == "raise"
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                print(
                    f"muonckpt: saving {lane.last.path} failed, and the program ends without it: {reason} "
                    "(`with Series(...)`, or .result() of the last save, raises this while there is a state to save)",
                    file=sys.stderr,
                )
    if lost:
        fail_at_the_end()


# --- A copy of this rank's state in host memory -----------------------------------------------------------------------

_ALIGNMENT = 64
"""Bytes: a line of cache, and more than any dtype asks for."""


class HostCopy:
    """A copy of state in one block of host memory, pinned if there is a GPU, which the next copy uses again."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        self._places: list[Tensor] = []

    @torch.no_grad()
    def of(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Copy nested state: this rank's elements into the block, once where tensors share them, and all else deeply.

        Tensors that no checkpoint holds are returned as they are, for the save to refuse them by name.
        """
        memo: dict[int, Any] = {}
        staged: list[_Staged] = []
        for tensor in _tensors(state_dict):
            if is_writable(tensor):
                staged.append(_Staged.of(tensor))
            else:
                memo[id(tensor)] = tensor
        # Tied weights are the same elements, so they are copied once and stay tied in the copy.
        distinct: dict[Elements, Tensor] = {}
        for leaf in staged:
            distinct |= {Elements.of(part): part for part in leaf.parts}
        forms = [(part.shape, part.dtype) for part in distinct.values()]
        places = dict(zip(distinct, self._placed(forms), strict=True))
        # All copies are under way before the first is waited for.
        for name, part in distinct.items():
            places[name].copy_(part, non_blocking=part.is_cuda)
        for device in {part.device for part in distinct.values() if part.is_cuda}:
            torch.cuda.synchronize(device)
        # A deep copy that takes ours for tensors copies everything else.
        for leaf in staged:
            memo[id(leaf.tensor)] = leaf.rebuild(*(places[Elements.of(part)] for part in leaf.parts))
        return deepcopy(dict(state_dict), memo)

    def _placed(self, forms: list[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
        """Return places in the block for tensors, each dense; what the last copy had in them is lost."""
        # Saves of one run have the same forms, so places are laid out once, and memory is pinned once.
        if forms != self._forms:
            sizes = [shape.numel() * dtype.itemsize for shape, dtype in forms]
            *starts, length = accumulate((size + -size % _ALIGNMENT for size in sizes), initial=0)
            # A block that is far too large is given back as well.
            if not length <= len(self._block) <= 2 * length:
                self.close()
                self._block = torch.empty(length, dtype=torch.uint8)
                if torch.cuda.is_available() and length:  # by the byte: torch's allocator gives a power of two
                    pin_memory(self._block.data_ptr(), length)
            self._forms = forms
            self._places = [
                self._block[start : start + size].view(dtype).view(shape)
                for (shape, dtype), start, size in zip(forms, starts, sizes, strict=True)
            ]
        return self._places

    def close(self) -> None:
        """Give the memory back."""
        if self._block.is_pinned():
            unpin_memory(self._block.data_ptr())
        self._forms, self._places, self._block = [], [], self._block[:0].clone()


class _Staged(NamedTuple):
    """A tensor, its parts on this rank, and the function that makes another from copies of the parts."""

    tensor: Tensor
    parts: Sequence[Tensor]
    rebuild: Callable[..., Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> _Staged:
        # A copy has to say the same boxes or placements, without the device and class that it comes from.
        if declares_boxes(tensor) or isinstance(tensor, ShardedTensor):
            boxes, shape, dtype = parts_of(tensor), whole_shape(tensor), tensor.dtype
            return cls(
                tensor,
                list(boxes.values()),
                lambda *copies: BoxedTensor(shape, dict(zip(boxes, copies, strict=True)), dtype, "cpu"),
            )
        if isinstance(tensor, DTensor):
            # from_local() would move the copy to the mesh's device.
            placed: Any = DTensor
            return cls(tensor, [local_of(tensor)], lambda copy: placed(copy, tensor._spec, requires_grad=False))
        local = tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
        return cls(tensor, [local], lambda copy: copy)


def _tensors(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, Mapping | list | tuple):
        for value in node.values() if isinstance(node, Mapping) else node:
            yield from _tensors(value)


# --- The end of a program in which a save may be under way ------------------------------------------------------------

_BACKEND = "muonckpt_before_end"


class _EndingGroup(dist.ProcessGroup):
    """A process group of this rank alone, which torch shuts down before all others."""

    act: Callable[[], None]

    def __init__(self, store: object, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]

    def shutdown(self) -> None:
        self.act()


dist.Backend.register_backend(_BACKEND, _EndingGroup, devices=["cpu"])


def before_groups_end(act: Callable[[], None]) -> None:
    """Act at the beginning of ``destroy_process_group()`` of the world."""
    group: Any = dist.new_group([dist.get_rank()], backend=_BACKEND, use_local_synchronization=True)
    group.act = act


class _UnflushableStream:
    closed = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        raise OSError("a checkpoint was not saved")


def fail_at_the_end() -> None:
    """Have the program end with exit code 120, Python's for a standard error that cannot be flushed.

    `os._exit` would skip what others do at the end.
    """
    if sys.stderr is not None:
        sys.stderr = _UnflushableStream(sys.stderr)
