"""The processes that share a job, as each of them sees it; a single process is the simplest case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

from ...errors import MuonckptError

LONGEST_WAIT = 0.2
"""Seconds.  A signal that arrives just before a wait begins is noticed only when the wait ends."""


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
        """Whether this is the coordinator: worker 0, which begins the work, publishes the result and reports it."""
        return self.rank == 0


class Workers(Protocol):
    """The workers of a job.  All of them call the same methods in the same order."""

    @property
    def me(self) -> Worker:
        """This process."""
        ...

    @property
    def stop(self) -> Event:
        """Set when a worker has failed or is lost: the work should then raise `Interrupted`."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The value of every worker, by rank; JSON data.

        Raises:
            Exception: the error of a worker that failed, or `Interrupted` if one is lost.
        """
        ...

    def fail(self, error: BaseException) -> BaseException:
        """Tell the others about an error, and wait until all workers have stopped.

        Returns:
            The error that all of them should raise: the one of the worker that failed first.
        """
        ...


class SingleWorker:
    """A single process."""

    def __init__(self) -> None:
        self.me = Worker()
        self.stop = Event()

    def gather(self, value: Any) -> list[Any]:
        """Its own value."""
        return [value]

    def fail(self, error: BaseException) -> BaseException:
        """Its own error."""
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
