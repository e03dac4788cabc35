"""The processes that share a job: how they find each other, agree, and fail together.

One process needs no torch.  Several, started by torchrun, Slurm or MPI, form a gloo process group; the ranks of a
program that is running form one more.  All agreements are the same collective, so an error of one worker meets the
others at the next one.  In between a worker may be busy for hours: one that is killed closes its connections, and one
that is silent is the launcher's to end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ...names.errors import DestinationError, Interrupted, LostRankError, MuonckptError, SourceError
from ...store.io.location import Location, Remote, is_there, refuse_unseen

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

TIMEOUT = 120.0
"""The default number of seconds to wait at the beginning until all workers are there."""

LONGEST_WAIT = 0.2
"""Seconds.  A signal that arrives just before a wait begins is noticed only when the wait ends."""

_LONGEST_WORK = timedelta(days=7)
"""The time-out of an agreement: longer than any worker works on its share after the others have done theirs."""

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
"""The variables in which torchrun, srun, Open MPI and MPICH store the rank and the number of processes; the first pair
that is set counts.  ``SLURM_NTASKS`` is not used, because it is also set in batch scripts, which run once."""

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
    """The workers of a job, who all call the same methods in the same order; without a process group, one process."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.me = Worker()
        self._group = process_group
        self._is_over = False
        if process_group is not None:
            from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

            self.me = Worker(process_group.rank(), process_group.size())
            self._store = PrefixStore(process_group.group_name, distributed_c10d._get_default_store())

    def gather(self, value: T) -> list[T]:
        """Return the values of all workers, by rank.

        Raises:
            MuonckptError: another worker failed; the same kind of error as there.
            Interrupted: another worker was interrupted or lost.
            LaunchError: another worker has nothing more to do.
        """
        return [value] if self._group is None else self._agree(_VALUE, lambda: value)

    def broadcast(self, value: T) -> T:
        """Return the coordinator's value on all workers.  Collective, and raises as `gather`."""
        return self.gather(value)[0]

    def refuse_unseen(self, source: Location) -> None:
        """Raise `SourceError` on all workers if the first one sees a source of a machine, and another one does not."""
        if self.broadcast(isinstance(source, Remote) or is_there(source)):
            refuse_unseen(source, f"rank {self.me.rank}", SourceError)

    def check_others(self) -> None:
        """Look whether another worker has failed, in some 50 microseconds, so that none works for hours in vain.

        Raises:
            Interrupted: one has; or the coordinator is lost, which serves the store that is looked at.
        """
        if self._group is None:
            return
        try:
            if self._store.check([_STOPPED]):
                raise _OthersFailed
        except RuntimeError as error:
            raise self._lost(error) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error of one worker on all of them, when all have stopped."""
        try:
            yield
        except BaseException as error:
            if self._group is not None and not self._is_over:
                self._announce_failure()
                self._agree(_STOPPED, partial(_raise_again, error))
            raise

    def leave(self) -> None:
        """Wait until all workers have nothing more to do.

        The coordinator does the last step of the work: if it comes here, all is done, whatever happens to the others.
        """
        with suppress(MuonckptError) if self.me.coordinates else nullcontext():
            self._agree(_END, lambda: None)

    def _agree(self, call: str, answer: Callable[[], T]) -> list[T]:
        """Gather the answers of all workers.

        A worker that is interrupted while it waits tells the others, who then come to this agreement, and waits on; if
        they were all here already, the interruption is raised on this worker, to be told at the next agreement.
        """
        answers = _in_thread(partial(self._gather, call, answer))
        try:
            return _result(answers)
        except KeyboardInterrupt:
            self._announce_failure()
            _result(answers)
            raise

    def _gather(self, call: str, answer: Callable[[], T]) -> list[T]:
        from ...checkpoint.all_ranks import gather_on_all

        self._is_over = True  # unless all bring the requested value
        try:
            answers = gather_on_all(self._group, MuonckptError, lambda: (call, answer()))
        except LostRankError as error:
            raise self._lost(error.__cause__ or error) from error
        calls = {call for call, _ in answers}
        if _STOPPED in calls:
            raise Interrupted("another worker was interrupted; run the command again")
        if len(calls) > 1:
            raise LaunchError("the workers do not run the same command")
        self._is_over = False
        return [value for _, value in answers]

    def _announce_failure(self) -> None:
        with suppress(RuntimeError):  # of a store whose server, the coordinator, is lost
            self._store.set(_STOPPED, "")

    def _lost(self, error: BaseException) -> Interrupted:
        return Interrupted(
            f"{self.me} lost another worker, which was killed or cut off, or has not answered for "
            f"{_LONGEST_WORK.days} days; run the command again (torch says: {_line(error)})"
        )


_VALUE, _STOPPED, _END = "value", "stopped", "end"
"""The state of a worker in an agreement: it brings a value, has stopped because of an error, or has nothing more to do.

The second is also the key that a worker sets in the store when it fails."""


class _OthersFailed(Interrupted):
    """Another worker has failed, and will say how at the next agreement."""


def _raise_again(error: BaseException) -> None:
    """Raise an error in the form in which the others hear it; one that came from them is theirs to raise."""
    if isinstance(error, _OthersFailed):
        return
    if isinstance(error, OSError):
        raise DestinationError(f"{type(error).__name__}: {error}") from error
    if isinstance(error, Exception):
        raise error
    raise Interrupted("interrupted; run the command again") from error


def joined(environment: Mapping[str, str], timeout: float = TIMEOUT) -> AbstractContextManager[Workers]:
    """Join the workers of this command for the duration of a block.

    An error that ends the block on one worker ends it on all.  The coordinator does the last step of the work, so the
    others leave the block after it.

    Args:
        timeout: seconds to wait at the beginning until all workers are there.

    Raises:
        LaunchError: the environment is contradictory, or does not say where the workers meet.
        Interrupted: not all workers arrived, or one was lost.
    """
    me = worker_of(environment)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if me.world > 1 and missing:
        raise LaunchError(
            f"{me} cannot find the others: {' and '.join(missing)} not set in the environment. torchrun sets them; "
            "under another launcher set MASTER_ADDR to the machine of worker 0 and MASTER_PORT to a free port of it"
        )
    return _sharing(me, timeout, range(me.world))


def joined_ranks(process_group: dist.ProcessGroup | None) -> AbstractContextManager[Workers]:
    """Join the ranks of a program that is running, those of a process group, for the duration of a block.

    Args:
        process_group: None means all ranks, or this process where there are no others.

    Raises:
        Interrupted: a worker was lost.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return nullcontext(Workers())
    ranks = dist.get_process_group_ranks(process_group)
    return _sharing(Worker(dist.get_rank(process_group), len(ranks)), TIMEOUT, ranks)


@contextmanager
def _sharing(me: Worker, timeout: float, ranks: Collection[int]) -> Iterator[Workers]:
    """Give the process a group of all workers while it shares a job; the coordinator serves their store."""
    if me.world == 1:
        yield Workers()
        return
    import torch.distributed as dist  # not by a thread, which may not have ended when Python shuts down

    try:
        workers = Workers(group := _result(_in_thread(partial(_new_group, me, timedelta(seconds=timeout), ranks))))
    except Exception as error:  # torch raises errors of any kind
        raise Interrupted(
            f"{me} did not meet the others within {timeout:g} s; check that all {me.world} were started and can reach "
            f"MASTER_ADDR and MASTER_PORT (torch says: {_line(error)})"
        ) from error
    try:
        with workers.together():
            yield workers
        workers.leave()
    finally:
        with suppress(Exception):  # the work is done; connections to a lost worker may fail to close
            dist.destroy_process_group(group)


def _new_group(me: Worker, limit: timedelta, ranks: Collection[int]) -> dist.ProcessGroup:
    """Make a gloo process group of the workers, in addition to the default group if there is one.

    They meet within the limit.  Then they wait for each other as long as the longest share of the work may take.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from ...ranks.new_group import new_group

    if dist.is_initialized():
        group = new_group(ranks, "gloo", limit)
    else:
        shared, _, _ = next(rendezvous("env://", me.rank, me.world, timeout=limit))
        store = _new_store(shared, me, limit)
        dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world, timeout=limit)
        group = dist.distributed_c10d._get_default_group()
    # torch 2.14 has a public function, and warns of the private one.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(_LONGEST_WORK, group)
    return group


def _new_store(shared: Store, me: Worker, limit: timedelta) -> Store:
    """Make a new store, served by the coordinator, through which the workers tell each other their addresses.

    When torchrun restarts workers, they get the store of the killed ones, and would read their addresses from it
    (pytorch's issue 135712, still in torch 2.13).  So the only thing in that store is the port of a new one; a port
    that does not answer belongs to an earlier start.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host = os.environ["MASTER_ADDR"]
    if me.coordinates:
        server = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        shared.set(_PORT, str(server.port))
        return server
    deadline = time.monotonic() + limit.total_seconds()
    while True:
        port = int(shared.get(_PORT))
        try:
            store: Store = TCPStore(host, port, wait_for_workers=False, timeout=min(limit, timedelta(seconds=2)))
            break
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
    store.set_timeout(limit)
    return store


_PORT = "muonckpt/port"


def _in_thread(function: Callable[[], T]) -> Future[T]:
    """Start a function in a thread of its own, because signals are not noticed inside torch."""
    pool = ThreadPoolExecutor(1)
    result = pool.submit(function)
    pool.shutdown(wait=False)
    return result


def _result(future: Future[T]) -> T:
    while not future.done():
        wait([future], LONGEST_WAIT)
    return future.result()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
