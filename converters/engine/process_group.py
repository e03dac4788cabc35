"""Several workers, joined by a gloo process group: the only file of the room that communicates and needs torch.

A worker may be busy for any length of time, so the work itself never waits in a collective.  Instead a thread of each
process takes part in rounds, at least one a second.  In a round every worker says that it is busy, brings a value or an
error, or is ready to leave; when all bring a value, the values are exchanged.  If a worker is killed, stopped or cut
off, the next round fails by torch's own time-out, however long the work would have taken.  Where torch itself does not
return (from a store whose server is stopped, for one), a second thread gives up a little later.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from ...errors import Interrupted, MuonckptError
from ...new_group import new_group
from .workers import LONGEST_WAIT, LaunchError, Worker

_PAUSE = 1.0
"""Seconds between two rounds of a busy worker; a tenth of the time-out if that is less."""

_PORT = "muonckpt/port"

_LATE = 1.25
"""Time-outs, and seconds in addition, after which torch counts as hanging."""

_GRACE = 5.0

_CONNECT = timedelta(seconds=2)
"""How long to wait for a store that may no longer exist, before asking again."""


class _Kind(IntEnum):
    """The kinds of messages in a round."""

    BUSY = 0
    VALUE = 1
    ERROR = 2
    LEAVING = 3


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of this worker.  ``answer`` gets the data of all workers; it is empty if an error came first."""

    kind: _Kind
    data: bytes = b""
    answer: Future[list[bytes]] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Trouble:
    """The reason why all stop.  ``data`` is the message of the worker that failed; empty if a worker is lost."""

    error: BaseException
    data: bytes = b""


class ProcessGroup:
    """The workers of one command, as :class:`.workers.Workers` has them.

    Args:
        timeout: seconds without an answer after which another worker counts as lost.
    """

    def __init__(self, me: Worker, timeout: float) -> None:
        self.me = me
        self.stop = Event()
        self._timeout = timeout
        self._met = False
        self._trouble: _Trouble | None = None
        self._messages: SimpleQueue[_Message] = SimpleQueue()
        self._thread = Thread(target=self._serve, name="rounds", daemon=True)
        self._hangs = False
        self._latest = time.monotonic()
        self._thread.start()
        Thread(target=self._watch, name="watch", daemon=True).start()

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every worker, by rank; JSON data."""
        values = self._wait(self._send(_Kind.VALUE, json.dumps(value).encode()))
        if self._trouble is not None:
            raise self._trouble.error
        return [json.loads(text) for text in values]

    def fail(self, error: BaseException) -> BaseException:
        """Tell the others about an error, and wait until all workers have stopped; returns the first worker's error.

        An interruption does not wait for workers that have not joined yet.
        """
        if isinstance(error, KeyboardInterrupt) and not self._met:
            return error
        is_new = self._trouble is None
        if is_new:
            self._wait(self._send(_Kind.ERROR, _packed(error)))
        self._send(_Kind.LEAVING)
        self._wait_for_the_end()
        if self._trouble is None or (is_new and not self._trouble.data):  # no other worker is left
            self._trouble = _Trouble(error, _packed(error))
        return error if self._trouble.data == _packed(error) else self._trouble.error

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

    def _send(self, kind: _Kind, data: bytes = b"") -> _Message:
        message = _Message(kind, data)
        self._messages.put(message)
        return message

    def _wait(self, message: _Message) -> list[bytes]:
        """Wait for the answer to a message; it is empty if the thread has ended without one."""
        while self._is_serving() and not message.answer.done():
            with suppress(TimeoutError):
                return message.answer.result(LONGEST_WAIT)
        return message.answer.result() if message.answer.done() else []

    def _wait_for_the_end(self) -> None:
        """Wait until the thread has ended: Python must not shut down while it is inside torch, unless that hangs."""
        while self._is_serving():
            self._thread.join(LONGEST_WAIT)

    def _is_serving(self) -> bool:
        return self._thread.is_alive() and not self._hangs

    # --- the thread that watches the other ---------------------------------------------------------------------------

    def _watch(self) -> None:
        late = _LATE * self._timeout + _GRACE
        while self._thread.is_alive():
            if time.monotonic() - self._latest > late:
                self._hangs = True
                text = self._lost if self._met else self._absent
                self._stop_for(Interrupted(text(TimeoutError(f"nothing for {late:g} s"))))
                return
            self._thread.join(min(_PAUSE, self._timeout / 10))

    # --- the thread of the rounds ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            group = self._connected()
        except Exception as error:  # torch raises errors of any kind
            self._stop_for(Interrupted(self._absent(error)))
            return
        self._met = True
        try:
            self._take_part(group)
        except Exception as error:
            self._stop_for(Interrupted(self._lost(error)))
        with suppress(Exception):  # the work is done; connections to a lost worker may fail to close
            dist.destroy_process_group(group)

    def _connected(self) -> dist.ProcessGroup:
        """Make a gloo process group of all workers, in addition to the default group if there is one."""
        limit = timedelta(seconds=self._timeout)
        if dist.is_initialized():
            return new_group(range(dist.get_world_size()), "gloo", limit)
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
        pause = min(_PAUSE, self._timeout / 10)
        message = busy = _Message(_Kind.BUSY)
        while True:
            with suppress(Empty):  # a new message replaces one that is no longer waited for
                message = self._messages.get(timeout=pause if message is busy else 0)
            if self._trouble is not None and message.kind in (_Kind.VALUE, _Kind.ERROR):
                message.answer.set_result([])  # too late
                message = busy
            self._latest = time.monotonic()
            sizes = _all(group, [int(message.kind), len(message.data)])
            kinds = [_Kind(kind) for kind, _ in sizes]
            if _Kind.ERROR in kinds or all(kind is _Kind.VALUE for kind in kinds):
                texts = _all_bytes(group, message.data, [size for _, size in sizes])
                if _Kind.ERROR in kinds:
                    rank = kinds.index(_Kind.ERROR)
                    self._stop_for(_unpacked(texts[rank], Worker(rank, self.me.world)), texts[rank])
                if message.kind in (_Kind.VALUE, _Kind.ERROR):
                    message.answer.set_result(texts)
                    message = busy
            elif all(kind is _Kind.LEAVING for kind in kinds):
                return
            elif _Kind.BUSY not in kinds and self._trouble is None:
                self._stop_for(LaunchError("the workers do not run the same command"))

    def _stop_for(self, error: BaseException, data: bytes = b"") -> None:
        self._trouble = self._trouble or _Trouble(error, data)
        self.stop.set()

    def _absent(self, error: Exception) -> str:
        return (
            f"{self.me} did not meet the others within {self._timeout:g} s; check that all {self.me.world} were "
            f"started and can reach MASTER_ADDR and MASTER_PORT (torch says: {_line(error)})"
        )

    def _lost(self, error: Exception) -> str:
        return (
            f"{self.me} lost another worker, which was killed, stopped or cut off, or gave no answer for "
            f"{self._timeout:g} s; continue with the same command and --resume (torch says: {_line(error)})"
        )


def _new_store(shared: Store, me: Worker, timeout: float) -> Store:
    """Make a new store, served by the coordinator, through which the workers tell each other their addresses.

    When torchrun restarts workers, they get the store of those that were killed, and would read their addresses from it
    (pytorch's issue 135712, still in torch 2.13).  So the only thing in that store is the port of a new one; a port
    that does not answer belongs to an earlier start.
    """
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


def _all(group: dist.ProcessGroup, numbers: Sequence[int]) -> list[list[int]]:
    """Gather as many numbers from every worker, by rank."""
    local = torch.tensor(numbers, dtype=torch.int64)
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    return [part.tolist() for part in parts]


def _all_bytes(group: dist.ProcessGroup, data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Gather the bytes of every worker, by rank; ``sizes`` are their lengths."""
    local = torch.zeros(max(sizes), dtype=torch.uint8)
    local[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else local[:0]
    parts = [torch.empty_like(local) for _ in sizes]
    dist.all_gather(parts, local, group=group)
    return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def _packed(error: BaseException) -> bytes:
    families, kinds = _families(), [kind.__name__ for kind in type(error).__mro__]
    text = str(error) if kinds[0] in families else f"{kinds[0]}: {error}"
    return json.dumps([next((kind for kind in kinds if kind in families), ""), text]).encode()


def _unpacked(data: bytes, worker: Worker) -> BaseException:
    """Make an error of the same family, and so with the same exit code, as the one of this worker."""
    name, text = json.loads(data)
    return _families().get(name, MuonckptError)(f"{worker}: {text or 'stopped'}")


def _families() -> dict[str, type[BaseException]]:
    """Return the errors that keep their type: ours, those of the file system, and Ctrl-C."""
    families: dict[str, type[BaseException]] = {kind.__name__: kind for kind in (OSError, KeyboardInterrupt)}
    kinds: list[type[MuonckptError]] = [MuonckptError]
    while kinds:
        kind = kinds.pop()
        families[kind.__name__] = kind
        kinds += kind.__subclasses__()
    return families


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
