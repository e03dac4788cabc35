"""Saving while training goes on: tensors are copied at the call, and written by a thread.

The training thread pays for the copy alone.  Everything else is `saving.save`, in one thread of each process, on a
process group of its own, so that its collectives never meet those of training.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from ..box import Index
from ..errors import DestinationError, Interrupted, LostRankError, MuonckptError
from ..layouts.boxed_tensor import BoxedTensor, parts_of, whole_shape
from ..layouts.tensors import declares_boxes
from ..new_group import new_group, time_out
from .all_ranks import decide_on_first, refuse_crossed
from .live_state import LiveState, nested_state, refuse_no_state_dict
from .saving import AgreedPlans, JointSave, SaveProgress, as_json
from .signals import end_in_order

OnError = Literal["raise", "warn"]
WhenBusy = Literal["wait", "refuse"]


class Joint(Protocol):
    """One save of all ranks."""

    def run(self, state: Callable[[], LiveState]) -> None:
        """Save what ``state`` returns, or fail on all ranks with one error and leave nothing."""


Write = Callable[[Mapping[str, Any], dist.ProcessGroup | None, AgreedPlans, SaveProgress], Joint]
"""A function that makes a save of its provenance, for the process group of a lane, with its plans and progress."""


class _SaveFuture(Future[None]):
    """A future that knows whether its error has been reported, which is when somebody has asked for it."""

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

    An error that nobody has asked for is raised, or warned of, by the next ``async_save`` of the same process group.
    If there is none, the program prints it when it ends, with exit code 120 unless ``on_error="warn"``.

    Attributes:
        path: the checkpoint.
        progress: bytes that this rank has written, and has to write.
        future: the same save, for programs that take a `concurrent.futures.Future`.
        on_error: ``"raise"`` or ``"warn"``, for an error that nobody has asked for.
    """

    def __init__(self, path: str, progress: SaveProgress, outcome: _SaveFuture, on_error: OnError) -> None:
        self.path = path
        self.progress = progress
        self.future: Future[None] = outcome
        self.on_error = on_error
        self._outcome = outcome

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
        """The error, for which this waits, if this rank has not asked for it."""
        error = self._outcome.error()
        return None if self._outcome.reported else error

    @property
    def failed_on_all(self) -> bool:
        """True if all ranks have an error, for which this waits."""
        error = self._outcome.error()
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
        warnings.warn(f"saving {self.path} failed: {error}", RuntimeWarning, stacklevel=3)

    def mark_reported(self) -> None:
        self._outcome.reported = True


class Lane:
    """The buffers, the thread and the process groups that saves of one process group share."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.world = _world()
        self.process = os.getpid()
        self.last: AsyncSave | None = None
        self._copy = HostCopy()
        self._plans = AgreedPlans()
        self._thread = ThreadPoolExecutor(1, "muonckpt-save")
        self._group = _gloo(process_group) if self.world else None
        self._asking = _gloo(process_group) if self.world else None
        if self.world:
            before_groups_end(self.wait)
        self.lost: LostRankError | None = None

    def submit(
        self,
        state_dict: Mapping[str, Any],
        path: str,
        provenance: Mapping[str, Any],
        on_error: OnError,
        write: Write,
        then: Callable[[], None],
    ) -> AsyncSave:
        """Copy the state, and have the thread write it and do ``then``.  The last save has ended: buffers are free."""
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
            with self._lost_together(path):
                write(details, self._group, self._plans, progress).run(copied)
            then()

        outcome = _SaveFuture()
        self._thread.submit(outcome.run, work)
        self.last = AsyncSave(path, progress, outcome, on_error)
        return self.last

    @contextmanager
    def _lost_together(self, what: str) -> Iterator[None]:
        """Let collectives in the block fail on all ranks if another rank has ended.

        Gloo tells only those that wait for that rank, and the others would wait for them.  So a rank that hears of it
        closes its connections, which tells the rest.

        Raises:
            LostRankError: a rank was lost, now or before.
        """
        if self.lost is not None:
            raise self.lost
        try:
            yield
        except Exception as error:
            if _world() is not self.world:
                raise DestinationError(
                    f"the process groups were ended while {what} was being saved: wait for it, with .result(), before "
                    "that"
                ) from error
            outcome = isinstance(error, MuonckptError) and not isinstance(error, Interrupted)
            if outcome or self._group is None:  # all ranks have it, or there are no others
                raise
            self.lost = LostRankError(
                f"while {what} was being saved, a rank ended or did not answer in the time-out of the process group: "
                "the other ranks cannot save any more, so start all of them again. Earlier checkpoints are as they "
                "were, and this one, if it is there, is whole"
            )
            if _world() is self.world:  # it may have been ended meanwhile, and all groups with it
                for group in (self._group, self._asking):
                    dist.destroy_process_group(group)
            raise self.lost from error

    def busy(self) -> bool:
        mine = self.last is not None and not self.last.done()
        with self._lost_together("a checkpoint"):
            return decide_on_first(self._asking, DestinationError, lambda: mine, any)

    def settle(self) -> None:
        """Wait for the last save; unless its error was reported on a rank, raise or warn of it on all."""
        if self.last is None:
            return
        last, unreported = self.last, self.last.unreported is not None
        if last.failed_on_all:
            with self._lost_together(last.path):
                if not decide_on_first(self._asking, DestinationError, lambda: unreported, all):
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


def async_save(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    provenance: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    on_error: OnError = "raise",
    when_busy: WhenBusy = "wait",
) -> AsyncSave:
    """Save a state dict while training goes on: what is saved is the state at the call.  Collective.

    The call copies this rank's tensors to host memory (pinned, if there is a GPU), in buffers that the next call uses
    again, and a thread saves them.  ``destroy_process_group()`` and the end of the program wait for it; end with
    ``.result()`` to have its error.

    Args:
        state_dict, path, provenance: as for `save`.
        process_group: the ranks that save; the first call makes two gloo process groups of them, with the time-out that
            this one has for the host, else with gloo's own of 30 minutes.
        on_error: what the next call does with an error that nobody has asked for: ``"raise"`` it, or ``"warn"`` of it.
        when_busy: while a save of the same process group is running, ``"wait"`` until it ends, or ``"refuse"``, which
            asks the other ranks first.

    Raises:
        DestinationError: ``"refuse"``, and a rank is still saving; or the last save failed.
        ValueError: an unknown choice.
        LostRankError: another rank was lost, now or in an earlier save.
    """
    if isinstance(path, Mapping):
        refuse_no_state_dict(state_dict, "to save")
    place = os.fspath(path)
    return save_in_thread(
        state_dict,
        place,
        provenance,
        process_group,
        on_error,
        when_busy,
        lambda: refuse_crossed(process_group, "async_save"),
        lambda: (place, lambda: None),
    )


def save_in_thread(
    state_dict: Mapping[str, Any],
    wanted: str,
    provenance: Mapping[str, Any] | None,
    process_group: dist.ProcessGroup | None,
    on_error: OnError,
    when_busy: WhenBusy,
    ask: Callable[[], None],
    begin: Callable[[], tuple[str, Callable[[], None]]],
) -> AsyncSave:
    """Save as `async_save` does, under a name that is known when the last save has ended.

    Args:
        wanted: what is to be saved, in words.
        ask: refuses other calls on other ranks.
        begin: returns the path, and a function for this rank's thread to call after publication.
    """
    if on_error not in ("raise", "warn") or when_busy not in ("wait", "refuse"):
        raise ValueError(
            f"on_error is 'raise' or 'warn', when_busy 'wait' or 'refuse'; got {on_error!r}, {when_busy!r}"
        )
    lane = lane_of(process_group, ask)
    if when_busy == "refuse" and lane.busy():
        raise DestinationError(
            f"{lane.last.path if lane.last else 'a checkpoint'} is still being saved: {wanted} is not"
        )
    lane.settle()
    path, then = begin()
    return lane.submit(state_dict, path, provenance or {}, on_error, partial(JointSave, path), then)


def lane_of(process_group: dist.ProcessGroup | None, ask: Callable[[], None]) -> Lane:
    """Return the lane of a process group for a new save, after ``ask`` has refused other calls on other ranks.

    Raises:
        LostRankError: another rank was lost in an earlier save.
    """
    known = _lanes.get(process_group or _world())
    if known is not None and known.lost is not None:  # the others may not be there to answer
        raise known.lost
    ask()
    end_in_order(_under_way)
    return _lane(process_group)


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
    mine = [lane.last for lane in _lanes.values() if lane.process == os.getpid()]
    return any(last is not None and not last.done() for last in mine)


def _lane(process_group: dist.ProcessGroup | None) -> Lane:
    """Return the lane of a process group, after closing those of worlds that are gone."""
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


@dataclass(frozen=True)
class _Boxes:
    shape: Index
    parts: dict[Index, Tensor]
    dtype: torch.dtype


class HostCopy:
    """A copy of state in buffers that are pinned if there is a GPU."""

    def __init__(self) -> None:
        self._stager = _stager()

    @torch.no_grad()
    def of(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        bare = {key: _mapped(value, _bare) for key, value in state_dict.items()}
        given = list(_tensors(bare))
        state: Any
        try:
            state = self._stager.stage(bare)
        except (AssertionError, KeyError):
            # Buffers go by storage, and one was resized since the last copy; or torch 2.12's stager is empty after use.
            self.close()
            self._stager = _stager()
            state = self._stager.stage(bare)
        for device in {tensor.device for tensor in given if tensor.is_cuda}:  # the stager waits for the current one
            torch.cuda.synchronize(device)
        for tensor, copy in zip(given, _tensors(state), strict=True):
            if type(copy) is not type(tensor) and tensor.data_ptr() == 0 and tensor.numel():
                raise TypeError(f"cannot copy a tensor of class {type(tensor).__name__}: save a plain tensor")
        return {key: _mapped(value, _joined) for key, value in state.items()}

    def close(self) -> None:
        self._stager.close()


def _stager() -> DefaultStager:
    cuda = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
        )
    )


def _mapped(node: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the leaves of nested state; containers in which nothing changes are kept."""
    if isinstance(node, Mapping):
        changed = {key: _mapped(value, function) for key, value in node.items()}
        return node if all(changed[key] is value for key, value in node.items()) else changed
    if isinstance(node, list | tuple):
        mapped = [_mapped(value, function) for value in node]
        return node if all(new is old for new, old in zip(mapped, node, strict=True)) else mapped
    return function(node)


def _bare(leaf: Any) -> Any:
    """Return a tensor without attributes, conjugation, negation and pending collectives."""
    if not isinstance(leaf, Tensor):
        return leaf
    if declares_boxes(leaf):
        return _Boxes(whole_shape(leaf), {lo: _bare_tensor(part) for lo, part in parts_of(leaf).items()}, leaf.dtype)
    if not isinstance(leaf, DTensor):
        return _bare_tensor(leaf)
    local = leaf._local_tensor
    bare = _bare_tensor(local)
    if bare is local and not leaf.__dict__:
        return leaf
    return DTensor.from_local(
        bare, leaf.device_mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
    )


def _joined(leaf: Any) -> Any:
    return BoxedTensor(leaf.shape, leaf.parts, leaf.dtype, "cpu") if isinstance(leaf, _Boxes) else leaf


def _bare_tensor(tensor: Tensor) -> Tensor:
    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.wait()
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return tensor
    if tensor.is_conj() or tensor.is_neg():
        return tensor.detach().resolve_conj().resolve_neg()
    return tensor.detach() if tensor.__dict__ else tensor


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
