"""The processes that do one job together, as each of them sees it.  One process alone is the simplest case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

from ...errors import MuonckptError


class LaunchError(MuonckptError, ValueError):
    """The environment says something impossible about the processes of a command."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One of ``world`` processes that do one job together."""

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
    """The workers of one job.  All of them call the same methods in the same order."""

    @property
    def me(self) -> Worker:
        """Which of them this process is."""
        ...

    @property
    def stop(self) -> Event:
        """Set when a worker has failed or is lost: whoever works should then raise `Interrupted`."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The value of every worker, by rank; JSON data.

        Raises:
            Exception: the error of a worker that failed instead, or `Interrupted` if one is lost.
        """
        ...

    def fail(self, error: BaseException) -> BaseException:
        """Tell the others of an error, and wait until all workers have stopped.

        Returns:
            The error that all of them should raise: that of the worker that failed first.
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
    """An error that ends the block on one worker ends it on all, with the same error, when all have stopped."""
    try:
        yield
    except BaseException as error:
        shared = workers.fail(error)
        if shared is error:
            raise
        raise shared from error
