"""Saving while training goes on: tensors are copied at the call, and written by a thread.

The training thread pays for the copy alone.  All else, `save_load.save` as it is, runs in one thread of each process,
on a process group of its own, so that its collectives never meet those of training.
"""

from __future__ import annotations

import atexit
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from ..errors import DestinationError, Interrupted, LostRankError, MuonckptError
from .all_ranks import judged, time_out
from .dcp_writer import SaveProgress
from .host_copy import HostCopy
from .joint_save import AgreedPlans, JointSave, as_json

OnError = Literal["raise", "warn"]
WhenBusy = Literal["wait", "refuse"]


class _Outcome(Future[None]):
    """A future that knows whether somebody has asked how it ended."""

    asked = False

    def result(self, timeout: float | None = None) -> None:
        self.exception(timeout)
        super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.asked = True
        return error

    def error(self) -> BaseException | None:
        """The same, without asking."""
        return super().exception()

    def of(self, work: Callable[[], None]) -> None:
        """Become what ``work`` ends with."""
        try:
            work()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(None)


class AsyncSave:
    """A save that runs along with training.

    An error that nobody has asked for is raised, or warned of, by the next ``async_save`` of the same process group,
    and printed when the program ends.

    Attributes:
        path: the checkpoint.
        progress: bytes that this rank has written, and has to write.
        future: the same, for programs that take a `concurrent.futures.Future`; who asks it has asked.
    """

    def __init__(self, path: str, progress: SaveProgress, outcome: _Outcome, on_error: OnError) -> None:
        self.path = path
        self.progress = progress
        self.future: Future[None] = outcome
        self._outcome = outcome
        self._on_error = on_error

    def done(self) -> bool:
        """Whether this rank has nothing left to do, well or not."""
        return self.future.done()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is published.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            TimeoutError: it is not finished.
            MuonckptError: what made the save fail, the same on every rank.
        """
        self.future.result(timeout)

    @property
    def unasked(self) -> BaseException | None:
        """The error that this rank has not asked for, once the save has ended; waits for that."""
        error = self._outcome.error()
        return None if self._outcome.asked else error

    @property
    def failed_on_all(self) -> bool:
        """Whether all ranks have the error with which the save has ended; waits for that."""
        error = self._outcome.error()
        return isinstance(error, MuonckptError) and not isinstance(error, LostRankError)

    def settle(self) -> None:
        """Wait, and raise or warn of an error that nobody has asked for, once."""
        error = self.unasked
        self.forgive()
        if error is None:
            return
        if self._on_error == "raise":
            raise error
        self.warn(error)

    def warn(self, error: BaseException) -> None:
        """Warn of the error of this save."""
        self.forgive()
        warnings.warn(f"saving {self.path} failed: {error}", RuntimeWarning, stacklevel=3)

    def forgive(self) -> None:
        """Count the error as asked for: another rank has."""
        self._outcome.asked = True


class _Lane:
    """What the saves of one process group share: buffers in host memory, a thread, and process groups."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.world = _world()
        self.process = os.getpid()
        self.last: AsyncSave | None = None
        self._copy = HostCopy()
        self._plans = AgreedPlans()
        self._thread = ThreadPoolExecutor(1, "muonckpt-save")
        self._group = _gloo(process_group) if self.world else None
        self._asking = _gloo(process_group) if self.world else None
        self._lost: LostRankError | None = None

    def submit(
        self,
        state_dict: Mapping[str, Any],
        path: str,
        provenance: Mapping[str, Any],
        on_error: OnError,
        then: Callable[[], None],
    ) -> AsyncSave:
        """Copy the state, and have it written, and ``then`` done.  Buffers are free: the last save has ended."""
        progress = SaveProgress()
        staged: dict[str, Any] = {}
        details: Mapping[str, Any] = {}
        failure: BaseException | None = None
        try:
            details = as_json(provenance)
            current = {
                key: each.state_dict() if isinstance(each, Stateful) else each for key, each in state_dict.items()
            }
            staged = self._copy.of(current)
        except MuonckptError as error:  # the other ranks plan with this one: they hear of it there
            failure = error
        except Exception as error:  # of a class that perhaps cannot travel to them
            failure = DestinationError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error

        def copied() -> Mapping[str, Any]:
            if failure is not None:
                raise failure
            return staged

        def work() -> None:
            with self._lost_together(path):
                JointSave(path, details, self._group, self._plans, progress).run(copied)
            then()

        outcome = _Outcome()
        self._thread.submit(outcome.of, work)
        self.last = AsyncSave(path, progress, outcome, on_error)
        return self.last

    @contextmanager
    def _lost_together(self, what: str) -> Iterator[None]:
        """Collectives in the block end on all ranks if they fail on one, because another has ended.

        Gloo tells only the ranks that wait for the one that has ended, and the others would wait for these.  So a rank
        that is told closes its connections, which tells the rest.

        Raises:
            LostRankError: a rank was lost, now or before.
        """
        if self._lost is not None:
            raise self._lost
        try:
            yield
        except Exception as error:
            outcome = isinstance(error, MuonckptError) and not isinstance(error, Interrupted)
            if outcome or self._group is None:  # all ranks have it, or there are no others
                raise
            self._lost = LostRankError(
                f"while {what} was being saved, a rank ended or did not answer in the time-out of the process group: "
                "the other ranks cannot save any more, so start all of them again. Earlier checkpoints are as they "
                "were, and this one, if it is there, is whole"
            )
            for group in (self._group, self._asking):
                if group in _world_groups():  # the world may have been ended meanwhile
                    dist.destroy_process_group(group)
            raise self._lost from error

    def busy(self) -> bool:
        """Whether any rank is still saving; the same answer on all."""
        mine = self.last is not None and not self.last.done()
        with self._lost_together("a checkpoint"):
            return judged(self._asking, DestinationError, lambda: mine, any)

    def settle(self) -> None:
        """Wait for the last save; raise or warn of its error, on all ranks alike, unless a rank has asked for it."""
        if self.last is None:
            return
        last, unasked = self.last, self.last.unasked is not None
        if last.failed_on_all:
            with self._lost_together(last.path):
                if not judged(self._asking, DestinationError, lambda: unasked, all):
                    last.forgive()
        last.settle()

    def close(self) -> None:
        """End the thread; the ranks of its world may have gone, so an error is only warned of."""
        self._thread.shutdown()
        self._copy.close()
        if self.last is not None and (error := self.last.unasked) is not None:
            self.last.warn(error)


_lanes: dict[dist.ProcessGroup | None, _Lane] = {}
_of_parent: list[_Lane] = []
"""Kept in a forked process, which must not give pinned memory back."""


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
    again, and returns.  A thread does what `save` does.  End with ``.result()`` before the process group is destroyed.

    Args:
        state_dict, path, provenance: as for `save`.
        process_group: of the ranks that save; the first call with it makes two gloo process groups of the same ranks,
            with its time-out if it has gloo for the host, else with gloo's own of 30 minutes.
        on_error: what the next call does if this save has failed and nobody has asked: ``"raise"`` its error, or
            ``"warn"`` of it and go on.
        when_busy: while a save of the same process group is running, ``"wait"`` until it ends, as its buffers are
            needed, or ``"refuse"``, which asks the other ranks first.

    Raises:
        DestinationError: ``"refuse"``, and a rank is still saving; or the last save failed.
        ValueError: an unknown choice.
        LostRankError: another rank was lost, now or in an earlier save.
    """
    place = os.fspath(path)
    return saved_along(
        state_dict, place, provenance, process_group, on_error, when_busy, lambda: (place, lambda: None)
    )  # fmt: skip


def saved_along(
    state_dict: Mapping[str, Any],
    wanted: str,
    provenance: Mapping[str, Any] | None,
    process_group: dist.ProcessGroup | None,
    on_error: OnError,
    when_busy: WhenBusy,
    begin: Callable[[], tuple[str, Callable[[], None]]],
) -> AsyncSave:
    """`async_save`, for those who name the checkpoint when the last save has ended.

    Args:
        wanted: what is to be saved, in words.
        begin: gives the path, and what this rank's thread does when the checkpoint is published.
    """
    if on_error not in ("raise", "warn") or when_busy not in ("wait", "refuse"):
        raise ValueError(
            f"on_error is 'raise' or 'warn', when_busy 'wait' or 'refuse'; got {on_error!r}, {when_busy!r}"
        )
    lane = _lane(process_group)
    if when_busy == "refuse" and lane.busy():
        raise DestinationError(
            f"{lane.last.path if lane.last else 'a checkpoint'} is still being saved: {wanted} is not"
        )
    lane.settle()
    path, then = begin()
    return lane.submit(state_dict, path, provenance or {}, on_error, then)


def settle_last(process_group: dist.ProcessGroup | None) -> None:
    """Wait for the last `async_save` of a process group, and raise or warn of its error as the next one would."""
    lane = _lanes.get(process_group or _world())
    if lane is not None and lane.process == os.getpid():
        lane.settle()


def _lane(process_group: dist.ProcessGroup | None) -> _Lane:
    """That of a process group; those of a world that is gone are closed."""
    world = _world()
    for group, lane in list(_lanes.items()):
        if lane.process != os.getpid():  # a fork of that process, without its threads
            _of_parent.append(_lanes.pop(group))
        elif lane.world is not world:
            del _lanes[group]
            lane.close()
    key = process_group or world
    if key not in _lanes:
        _lanes[key] = _Lane(process_group)
    return _lanes[key]


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def _gloo(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A process group of the same ranks, for the host."""
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    if process_group is not None:
        _count_alike(process_group)
    group: dist.ProcessGroup = dist.new_group(
        ranks, time_out(process_group), backend="gloo", use_local_synchronization=process_group is not None
    )
    return group


def _count_alike(process_group: dist.ProcessGroup) -> None:
    """Have all members know equally many process groups.

    Torch names a group that only its members make by that number, and members with two names wait for each other.
    """
    known = len(_world_groups())

    most = judged(process_group, DestinationError, lambda: known, lambda counts: max(counts))
    for _ in range(most - known):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def _world_groups() -> Mapping[dist.ProcessGroup, str]:
    return dist.distributed_c10d._world.pg_names


@atexit.register
def _print_failures() -> None:
    """Nobody is left to raise to: threads have ended by now."""
    for lane in _lanes.values():
        if lane.last is not None and lane.process == os.getpid():
            with suppress(KeyboardInterrupt):
                try:
                    lane.last.settle()
                except Exception as error:
                    traceback.print_exception(error)
