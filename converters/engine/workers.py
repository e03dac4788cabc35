"""The processes that share a job: how they find each other, exchange values, and fail together.

One process needs no torch.  Several, started by torchrun, Slurm or MPI, form a gloo process group.  A worker may be
busy for any length of time, so the work itself never waits in a collective.  Instead a thread of each process takes
part in rounds, at least one a second: in a round every worker says that it is busy, brings a value or an error, or is
ready to leave.  If a worker is killed, stopped or cut off, the next round fails by torch's own time-out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import Interrupted, MuonckptError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

TIMEOUT = 120.0
"""The default number of seconds without an answer after which another worker counts as lost."""

LONGEST_WAIT = 0.2
"""Seconds.  A signal that arrives just before a wait begins is noticed only when the wait ends."""

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
"""The variables in which torchrun, srun, Open MPI and MPICH store the rank and the number of processes; the first pair
that is set counts.  ``SLURM_NTASKS`` is not used, because a batch script has it although it runs once."""

_SET_WITHOUT_A_LAUNCHER = {"SLURM_PROCID"}
"""Slurm sets it in a batch script, too."""


class LaunchError(MuonckptError, ValueError):
    """The environment contradicts itself about the processes of a command, or they do different work."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One of ``world`` processes that share a job."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise LaunchError(f"there is no worker {self.rank} of {self.world}: expected one of 0 to {self.world - 1}")

    def __str__(self) -> str:
        return f"worker {self.rank} of {self.world}"

    @property
    def coordinates(self) -> bool:
        """True for the coordinator: worker 0, which begins the work, publishes the result and reports it."""
        return self.rank == 0


def worker_of(environment: Mapping[str, str]) -> Worker:
    """Return which worker a process with this environment is; without a launcher it is the only one.

    Raises:
        LaunchError: the rank is not possible, or only one of a launcher's two variables is set.
    """
    for names in _LAUNCHERS:
        values = [environment[name] for name in names if name in environment]
        if not values or (len(values) == 1 and names[0] in environment.keys() & _SET_WITHOUT_A_LAUNCHER):
            continue
        try:
            rank, world = map(int, values)
        except ValueError:
            shown = ", ".join(f"{name}={environment.get(name, '')!r}" for name in names)
            raise LaunchError(f"expected a rank and a number of processes in the environment, found {shown}") from None
        return Worker(rank, world)
    return Worker()


class Workers:
    """The workers of a job, who all call the same methods in the same order; in this class, one process alone.

    Attributes:
        stop: set when a worker has failed or is lost: the work should then raise `Interrupted`.
    """

    def __init__(self, me: Worker = Worker()) -> None:
        self.me = me
        self.stop = Event()

    def gather(self, value: T) -> list[T]:
        """Return the value of every worker, by rank.

        Raises:
            Exception: the error of a worker that failed, or `Interrupted` if one is lost.
        """
        return [value]

    def fail(self, error: BaseException) -> BaseException:
        """Tell the others about an error, and wait until all workers have stopped.

        Returns:
            The error that all of them should raise: the one of the worker that failed first.
        """
        return error


@contextmanager
def together(workers: Workers) -> Iterator[None]:
    """Raise an error of one worker on all of them, when all have stopped."""
    try:
        yield
    except BaseException as error:
        shared = workers.fail(error)
        if shared is error:
            raise
        raise shared from error


@contextmanager
def joined(environment: Mapping[str, str], timeout: float = TIMEOUT) -> Iterator[Workers]:
    """Join the workers of this command for the duration of a block.

    An error that ends the block on one worker ends it on all, with the same error.  The coordinator does the last step
    of the work, so the other workers leave the block after it.

    Args:
        timeout: seconds without an answer after which another worker counts as lost.

    Raises:
        LaunchError: the environment is contradictory, or does not say where the workers meet.
        Interrupted: not all workers arrived, or one was lost.
    """
    me = worker_of(environment)
    if me.world == 1:
        yield Workers()
        return
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]:
        raise LaunchError(
            f"{me} cannot find the others: {' and '.join(missing)} not set in the environment. torchrun sets them; "
            "under another launcher set MASTER_ADDR to the machine of worker 0 and MASTER_PORT to a free port of it"
        )
    with _sharing(ProcessGroup(me, timeout)) as workers:
        yield workers


@contextmanager
def joined_ranks(process_group: dist.ProcessGroup | None, timeout: float = TIMEOUT) -> Iterator[Workers]:
    """Join the ranks of a program that is running, those of a process group, for the duration of a block.

    Args:
        process_group: None means all ranks, or this process where there are no others.
        timeout: as for `joined`.

    Raises:
        Interrupted: a worker was lost.
    """
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(process_group) if dist.is_initialized() else []
    if len(ranks) < 2:
        yield Workers()
        return
    with _sharing(ProcessGroup(Worker(ranks.index(dist.get_rank()), len(ranks)), timeout, ranks)) as workers:
        yield workers


@contextmanager
def _sharing(workers: ProcessGroup) -> Iterator[Workers]:
    with together(workers):
        yield workers
    workers.leave()


# --- several processes ------------------------------------------------------------------------------------------------

_PAUSE = 1.0
"""Seconds between two rounds of a busy worker; a tenth of the time-out if that is less."""

_LATE, _GRACE = 1.25, 5.0
"""Time-outs, and seconds in addition, after which torch counts as hanging: it does not return from a store whose server
is stopped, for one."""

_PORT = "muonckpt/port"

_CONNECT = timedelta(seconds=2)
"""How long to wait for a store that may no longer exist, before asking again."""


class _Kind(IntEnum):
    BUSY = 0
    VALUE = 1
    ERROR = 2
    LEAVING = 3


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of this worker.  ``answer`` gets the contents of all workers; it is empty if an error came first."""

    kind: _Kind
    content: Any = None
    answer: Future[list[Any]] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Trouble:
    """The reason why all stop, and what the worker that failed told about it; None if a worker is lost."""

    error: BaseException
    told: tuple[type[BaseException], str] | None = None


class ProcessGroup(Workers):
    """Several workers, joined by a gloo process group; ``ranks`` are theirs in the world, if not all."""

    def __init__(self, me: Worker, timeout: float, ranks: Collection[int] = ()) -> None:
        import torch.distributed  # not by the thread: it may not have ended when Python shuts down  # noqa: F401

        super().__init__(me)
        self._timeout = timeout
        self._ranks = ranks
        self._met = False
        self._trouble: _Trouble | None = None
        self._messages: SimpleQueue[_Message] = SimpleQueue()
        self._latest = time.monotonic()
        self._thread = Thread(target=self._serve, name="rounds", daemon=True)
        self._thread.start()

    def gather(self, value: T) -> list[T]:
        values = self._wait(self._send(_Kind.VALUE, value))
        if self._trouble is not None:
            raise self._trouble.error
        return values

    def fail(self, error: BaseException) -> BaseException:
        """Tell the others about an error; an interruption does not wait for workers that have not joined yet."""
        if isinstance(error, KeyboardInterrupt) and not self._met:
            return error
        is_new, told = self._trouble is None, _told(error)
        if is_new:
            self._wait(self._send(_Kind.ERROR, told))
        self._send(_Kind.LEAVING)
        self._wait_for_the_end()
        if self._trouble is None or (is_new and self._trouble.told is None):  # no other worker is left
            self._trouble = _Trouble(error, told)
        return error if self._trouble.told == told else self._trouble.error

    def leave(self) -> None:
        """Wait until all workers are ready to leave.

        The coordinator does the last step of the work: if it comes here without an error, all is done, whatever happens
        to the others.  An interruption has nothing left to stop, so it is raised afterwards.
        """
        self._send(_Kind.LEAVING)
        try:
            self._wait_for_the_end()
        except KeyboardInterrupt:
            self._wait_for_the_end()
            raise
        if self._trouble is not None and not self.me.coordinates:
            raise self._trouble.error

    # --- the worker's own thread -------------------------------------------------------------------------------------

    def _send(self, kind: _Kind, content: object = None) -> _Message:
        message = _Message(kind, content)
        self._messages.put(message)
        return message

    def _wait(self, message: _Message) -> list[Any]:
        """Return the answer to a message; it is empty if the rounds have ended without one."""
        while self._is_serving() and not message.answer.done():
            with suppress(TimeoutError):
                return message.answer.result(LONGEST_WAIT)
        return message.answer.result() if message.answer.done() else []

    def _wait_for_the_end(self) -> None:
        """Wait until the thread has ended: Python must not shut down while it is inside torch, unless that hangs."""
        while self._is_serving():
            self._thread.join(LONGEST_WAIT)

    def _is_serving(self) -> bool:
        late = _LATE * self._timeout + _GRACE
        if self._thread.is_alive() and time.monotonic() - self._latest > late:
            self._stop_for(self._lost(TimeoutError(f"nothing for {late:g} s")))
            return False
        return self._thread.is_alive()

    # --- the thread of the rounds ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        import torch.distributed as dist

        try:
            group = self._connected()
            self._met = True
            self._take_part(group)
        except Exception as error:  # torch raises errors of any kind
            self._stop_for(self._lost(error))
        if self._met:
            with suppress(Exception):  # the work is done; connections to a lost worker may fail to close
                dist.destroy_process_group(group)

    def _connected(self) -> dist.ProcessGroup:
        """Make a gloo process group of all workers, in addition to the default group if there is one."""
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        from ...new_group import new_group

        limit = timedelta(seconds=self._timeout)
        if dist.is_initialized():
            return new_group(self._ranks or range(dist.get_world_size()), "gloo", limit)
        self._latest = time.monotonic()
        # An attribute, because this process may be the server from which the others still have to read.
        self._shared, _, _ = next(rendezvous("env://", self.me.rank, self.me.world, timeout=limit))
        self._latest = time.monotonic()
        store = _new_store(self._shared, self.me, self._timeout)
        self._latest = time.monotonic()
        dist.init_process_group("gloo", store=store, rank=self.me.rank, world_size=self.me.world, timeout=limit)
        world: dist.ProcessGroup | None = dist.group.WORLD
        assert world is not None, "init_process_group() makes it"
        return world

    def _take_part(self, group: dist.ProcessGroup) -> None:
        from ...checkpoint.all_ranks import gather_on_all

        def all_told(own: T) -> list[T]:
            return gather_on_all(group, MuonckptError, lambda: own)

        pause = min(_PAUSE, self._timeout / 10)
        message = busy = _Message(_Kind.BUSY)
        while True:
            with suppress(Empty):  # a new message replaces one that is no longer waited for
                message = self._messages.get(timeout=pause if message is busy else 0)
            if self._trouble is not None and message.kind in (_Kind.VALUE, _Kind.ERROR):
                message.answer.set_result([])  # too late
                message = busy
            self._latest = time.monotonic()
            kinds = all_told(message.kind)
            if _Kind.ERROR in kinds or set(kinds) == {_Kind.VALUE}:
                contents = all_told(message.content)
                if _Kind.ERROR in kinds:
                    rank = kinds.index(_Kind.ERROR)
                    kind, text = contents[rank]
                    self._stop_for(kind(f"{Worker(rank, self.me.world)}: {text or 'stopped'}"), contents[rank])
                if message.kind in (_Kind.VALUE, _Kind.ERROR):
                    message.answer.set_result(contents)
                    message = busy
            elif set(kinds) == {_Kind.LEAVING}:
                return
            elif _Kind.BUSY not in kinds and self._trouble is None:
                self._stop_for(LaunchError("the workers do not run the same command"))

    def _stop_for(self, error: BaseException, told: tuple[type[BaseException], str] | None = None) -> None:
        self._trouble = self._trouble or _Trouble(error, told)
        self.stop.set()

    def _lost(self, error: Exception) -> Interrupted:
        says = f"(torch says: {' '.join(str(error.__cause__ or error).split())})"
        if self._met:
            return Interrupted(
                f"{self.me} lost another worker, which was killed, stopped or cut off, or gave no answer for "
                f"{self._timeout:g} s; continue with the same command and --resume {says}"
            )
        return Interrupted(
            f"{self.me} did not meet the others within {self._timeout:g} s; check that all {self.me.world} were "
            f"started and can reach MASTER_ADDR and MASTER_PORT {says}"
        )


def _new_store(shared: Store, me: Worker, timeout: float) -> Store:
    """Make a new store, served by the coordinator, through which the workers tell each other their addresses.

    When torchrun restarts workers, they get the store of those that were killed, and would read their addresses from it
    (pytorch's issue 135712, still in torch 2.13).  So the only thing in that store is the port of a new one; a port
    that does not answer belongs to an earlier start.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit, host = timedelta(seconds=timeout), os.environ["MASTER_ADDR"]
    if me.coordinates:
        server = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        shared.set(_PORT, str(server.port))
        return server
    deadline = time.monotonic() + timeout
    while True:
        port = int(shared.get(_PORT))
        try:
            store: Store = TCPStore(host, port, wait_for_workers=False, timeout=min(limit, _CONNECT))
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
        else:
            store.set_timeout(limit)
            return store


def _told(error: BaseException) -> tuple[type[BaseException], str]:
    """Return an error's class, as far as it decides the exit code, and its text: the others can raise these, too."""
    if isinstance(error, MuonckptError | KeyboardInterrupt):
        return type(error), str(error)
    return OSError if isinstance(error, OSError) else MuonckptError, f"{type(error).__name__}: {error}"
