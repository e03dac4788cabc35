"""One machine from one seed: the calls of the system on its disk, its clock, what fails, and who is killed when."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import fcntl
import gc
import hashlib
import io
import os
import random
import secrets
import shutil
import signal
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import muonckpt

from . import ranks, stores
from .disk import Disk
from .ranks import AtOnce, InTurn, Killed, Process, Schedule, SimulatedWorld, Task

MOST_CALLS = 60_000
"""Calls of a history after which something goes round in circles."""

KINDS = {
    errno.EIO: ("read", "write", "fsync", "stat", "list"),
    errno.ENOSPC: ("write", "create", "mkdir", "rename", "link"),
    errno.EACCES: ("open", "create", "stat", "list", "rename", "unlink", "mkdir", "rmdir"),
    errno.EMFILE: ("open", "create", "list"),
    0: ("read", "write"),  # a part of the bytes
    403: ("ask", "put", "delete"),
    500: ("ask", "put", "delete"),
    503: ("ask", "put", "delete"),
    errno.ETIMEDOUT: ("ask", "put", "delete"),
}
"""What may fail, and in which calls; those above 400 and the last one in a store."""


@dataclass
class Fault:
    """Calls that fail: ``times`` of them, from that with the number ``at`` among those of its kinds."""

    number: int
    at: int
    times: int
    hits: int = 0

    def strikes(self, kind: str) -> bool:
        if kind not in KINDS[self.number]:
            return False
        self.at -= 1
        struck = self.at < 0 and self.times > 0
        self.times -= struck
        self.hits += struck
        return struck


class Machine:
    """A disk and a store, and the processes that use them."""

    def __init__(self, seed: str, root: str) -> None:
        self.dice = random.Random(seed)
        self.identities = random.Random(f"{seed} identities")
        shutil.rmtree(root, ignore_errors=True)
        self.disk, self.store = Disk(root), stores.Store(self)
        self.schedule = Schedule(self.dice)
        self.paths: dict[int, str] = {}
        self.fault: Fault | None = None
        self.calls = self.kills = 0
        self.trace = hashlib.blake2b()

    @property
    def process(self) -> Process | None:
        return self.schedule.task.process if self.schedule.task is not None else None

    def step(self, kind: str, place: str, data: bytes | memoryview = b"") -> bool:
        """Note a call before it is made; return whether it does only a part of it.

        Raises:
            Killed: this process has been killed.
            OSError: the call fails.
        """
        task = self.schedule.task
        if task is None:
            return False
        process = task.process
        if process.is_dead:
            raise Killed
        self.calls += 1
        process.calls += 1
        self.disk.now += 1000
        self.trace.update(f"{process.name} {process.rank} {kind} {place.removeprefix(self.disk.root)} ".encode())
        self.trace.update(bytes(data).replace(self.disk.root.encode(), b""))  # which names this process
        if self.calls > MOST_CALLS:
            self.schedule.is_hung = True
        if process.calls == process.kill_at:
            self.kill(process)
            raise Killed
        if process.signal_at and process.calls >= process.signal_at and task.is_main:
            process.signal_at = 0
            self._signal(process)
        self.schedule.switch()
        if self.fault is None or not self.fault.strikes(kind):
            return False
        if self.fault.number == 0:
            return True
        if place.startswith(self.disk.root):
            raise OSError(self.fault.number, os.strerror(self.fault.number), place)
        raise stores.refusal(self.fault.number)

    def kill(self, process: Process) -> None:
        self.kills += 1
        for each in {other.process for other in self.schedule.tasks} if process.loses_power else [process]:
            each.is_dead = True

    def _signal(self, process: Process) -> None:
        handler = process.handlers.get(signal.SIGTERM, signal.SIG_DFL)
        if callable(handler):
            handler(signal.SIGTERM, None)
        elif handler == signal.SIG_DFL:
            self.kill(process)
            raise Killed

    def bury(self, processes: Sequence[Process]) -> None:
        """Close what processes have left open."""
        if any(process.handles for process in processes):
            gc.collect()
        for process in processes:
            for handle in process.handles:
                if self.paths.pop(handle, None) is not None:
                    _REAL["close"](handle)

    # --- programs ---------------------------------------------------------------------------------------------------

    def start(self, name: str, world: int, work: Callable[[int], Any]) -> list[Task]:
        """Start the ranks of a program."""
        processes = [Process(name, rank) for rank in range(world)]
        store = dist.HashStore() if world > 1 else None
        tasks = []
        for rank, process in enumerate(processes):
            process.peers = processes
            process.memory = ranks.fresh_memory(_pristine)
            of_rank = SimulatedWorld(self.schedule, self.step, processes, rank, store) if world > 1 else None
            process.memory[c10d, "_world"] = (
                of_rank.data if of_rank else ranks.WorldData(None, {}, {}, {}, {}, 0, {}, {}, {}, [])
            )
            tasks.append(self.schedule.spawn(process, lambda rank=rank: work(rank), is_main=True))
        return tasks

    def run(self) -> None:
        """Run what was started until all of it has ended."""
        global current
        current = self
        outside = Process("outside", memory={key: getattr(*key) for key in [*_pristine, (c10d, "_world")]})
        processes = {task.process for task in self.schedule.tasks}
        try:
            self.schedule.run()
            ranks.enter(outside)
            self.bury(sorted(processes, key=lambda each: (each.name, each.rank)))
        finally:
            current = None
        if any(process.loses_power and process.is_dead for process in processes):
            self.disk.lose_power(self.dice)

    # --- places -----------------------------------------------------------------------------------------------------

    def path(self, place: Any, folder: int | None = None) -> str | None:
        """The path of a place on this disk; None for all others."""
        if isinstance(place, int):
            return self.paths.get(place)
        path = os.fspath(place)
        if folder is not None:
            base = self.paths.get(folder)
            return None if base is None else f"{base}/{path}"
        is_here = (
            isinstance(path, str) and path.startswith(self.disk.root) and path[len(self.disk.root) :][:1] in ("", "/")
        )
        return path if is_here else None

    def opened(self, handle: int, path: str) -> int:
        self.paths[handle] = path
        if self.process is not None:
            self.process.handles.add(handle)
        return handle

    def closed(self, handle: int) -> None:
        if self.paths.pop(handle, None) is not None and self.process is not None:
            self.process.handles.discard(handle)


current: Machine | None = None
"""The machine that runs now."""


def _store() -> stores.Store:
    assert current is not None
    return current.store


stores.Files.store = staticmethod(_store)  # type: ignore[assignment]

_CALLS = (
    "open close pwrite posix_fallocate fsync fdatasync pread preadv rename replace link unlink remove mkdir rmdir stat "
    "lstat fstat listdir scandir utime urandom"
)
_REAL: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in _CALLS.split()}
_pristine: dict[tuple[Any, str], Any] = {}


def _intercepts() -> dict[str, Callable[..., Any]]:
    """The calls of the system, with a step of the machine before each, and its note after it."""
    real = SimpleNamespace(**_REAL)

    def opens(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        place = current.path(path, dir_fd) if current else None
        if place is None or current is None:
            return real.open(path, flags, mode, dir_fd=dir_fd)
        current.step("create" if flags & os.O_CREAT else "open", place)
        is_new = bool(flags & os.O_CREAT) and current.disk.found(place) is None
        handle = real.open(path, flags, mode, dir_fd=dir_fd)
        if is_new:
            current.disk.created(place)
        return current.opened(handle, place)

    def close(handle: int) -> None:
        real.close(handle)
        if current:
            current.closed(handle)

    def pwrite(handle: int, data: Any, offset: int) -> int:
        place = current.path(handle) if current else None
        if place is None or current is None:
            return real.pwrite(handle, data, offset)
        data = memoryview(data).cast("B")
        if current.step("write", place, data):
            data = data[: max(len(data) // 2, 1)]
        count = real.pwrite(handle, data, offset)
        current.disk.wrote(current.disk.node(handle), offset, bytes(data[:count]))
        return count

    def posix_fallocate(handle: int, offset: int, length: int) -> None:
        place = current.path(handle) if current else None
        if place is not None and current is not None:
            current.step("write", place)
            size = real.fstat(handle).st_size
            current.disk.wrote(current.disk.node(handle), size, bytes(max(offset + length - size, 0)))
        real.posix_fallocate(handle, offset, length)

    def fsync(handle: int) -> None:
        place = current.path(handle) if current else None
        if place is None or current is None:
            return real.fsync(handle)
        current.step("fsync", place)
        current.disk.synced(handle)

    def pread(handle: int, length: int, offset: int) -> bytes:
        place = current.path(handle) if current else None
        if place is not None and current is not None and current.step("read", place):
            length = max(length // 2, 1)
        return real.pread(handle, length, offset)

    def preadv(handle: int, buffers: Any, offset: int) -> int:
        place = current.path(handle) if current else None
        if place is not None and current is not None and current.step("read", place):
            buffers = [memoryview(buffers[0])[: max(len(buffers[0]) // 2, 1)]]
        return real.preadv(handle, buffers, offset)

    def moves(name: str) -> Callable[..., None]:
        def call(source: Any, target: Any, **options: Any) -> None:
            places = current and (current.path(source), current.path(target))
            if not current or not places or None in places:
                return getattr(real, name)(source, target, **options)
            current.step("link" if name == "link" else "rename", places[0])
            node = current.disk.found(places[0])
            getattr(real, name)(source, target, **options)
            assert node is not None
            current.disk.moved(node, None if name == "link" else places[0], places[1])

        return call

    def removes(name: str) -> Callable[..., None]:
        def call(path: Any, *, dir_fd: int | None = None) -> None:
            place = current.path(path, dir_fd) if current else None
            if place is None or current is None:
                return getattr(real, name)(path, dir_fd=dir_fd)
            current.step("rmdir" if name == "rmdir" else "unlink", place)
            node = current.disk.found(place)
            getattr(real, name)(path, dir_fd=dir_fd)
            assert node is not None
            current.disk.moved(node, place, None)

        return call

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        place = current.path(path, dir_fd) if current else None
        if place is not None and current is not None:
            current.step("mkdir", place)
        real.mkdir(path, mode, dir_fd=dir_fd)
        if place is not None and current is not None:
            current.disk.created(place)

    def asks(name: str) -> Callable[..., Any]:
        def call(path: Any, *, dir_fd: int | None = None, **options: Any) -> Any:
            if not current:
                return getattr(real, name)(path, dir_fd=dir_fd, **options)
            place = current.path(path, dir_fd)
            if place is not None:
                current.step("stat", place)
            return current.disk.shown(getattr(real, name)(path, dir_fd=dir_fd, **options))

        return call

    def fstat(handle: int) -> os.stat_result:
        return current.disk.shown(real.fstat(handle)) if current else real.fstat(handle)

    def listdir(path: Any = ".") -> list[str]:
        place = current.path(path) if current else None
        if place is None or current is None:
            return real.listdir(path)
        current.step("list", place)
        return sorted(real.listdir(path))

    def scandir(path: Any = ".") -> Any:
        place = current.path(path) if current else None
        if place is None or current is None:
            return real.scandir(path)
        current.step("list", place)
        with real.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        return _Entries([_Entry(entry, f"{place}/{entry.name}") for entry in found])

    def utime(path: Any, *args: Any, **options: Any) -> None:
        real.utime(path, *args, **options)
        if current and current.path(path):
            node = current.disk.node(path)
            node.written = node.changed = current.disk.now

    calls = {
        call.__name__: call for call in (close, pwrite, posix_fallocate, fsync, pread, preadv, mkdir, fstat, listdir)
    }
    calls |= {"open": opens, "fdatasync": fsync, "scandir": scandir, "utime": utime, "urandom": _random_bytes}
    calls |= {name: moves(name) for name in ("rename", "replace", "link")}
    calls |= {name: removes(name) for name in ("unlink", "remove", "rmdir")}
    return calls | {name: asks(name) for name in ("stat", "lstat")}


class _Entries:
    """The iterator of ``scandir``."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self._following = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> _Entry:
        return next(self._following)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *error: object) -> None: ...

    def close(self) -> None: ...


class _Entry:
    def __init__(self, entry: os.DirEntry[str], path: str) -> None:
        self.name, self.path, self._entry = entry.name, path, entry
        self.is_dir, self.is_file, self.is_symlink = entry.is_dir, entry.is_file, entry.is_symlink

    def __fspath__(self) -> str:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        status = self._entry.stat(follow_symlinks=follow_symlinks)
        return current.disk.shown(status) if current else status


class _Written(io.FileIO):
    """A file that is written through Python's buffers."""

    def __init__(self, file: Any, mode: str) -> None:
        def opener(path: str, flags: int) -> int:
            return os.open(path, flags, 0o666)

        super().__init__(file, mode, opener=None if isinstance(file, int) else opener)

    def write(self, data: Any) -> int:
        assert current is not None
        data = memoryview(data).cast("B")
        if current.step("write", current.paths[self.fileno()], data):
            data = data[: max(len(data) // 2, 1)]
        offset = self.tell()
        count = super().write(data) or 0
        current.disk.wrote(current.disk.node(self.fileno()), offset, bytes(data[:count]))
        return count

    def close(self) -> None:
        handle = -1 if self.closed else self.fileno()
        super().close()
        if current:
            current.closed(handle)


_OPEN = io.open


def _io_open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
    if current is None or isinstance(file, bytes) or current.path(file) is None:
        return _OPEN(file, mode, *args, **options)
    if "b" in mode and not {*mode}.isdisjoint("wxa"):
        return io.BufferedWriter(_Written(file, mode))
    current.step("open", current.path(file) or "")
    return _OPEN(file, mode, *args, **options)


# --- the package's modules see this machine's clock, names and signals ------------------------------------------------


def _flock(handle: int, operation: int) -> None:
    if current is None or current.path(handle) is None:
        return fcntl.flock(handle, operation)
    if operation & fcntl.LOCK_NB:
        return fcntl.flock(handle, operation)

    def is_locked() -> bool:
        try:
            fcntl.flock(handle, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    current.schedule.wait(is_locked)


def _now() -> float:
    return current.disk.now / 1e9 if current else time.time()


def _sleep(seconds: float) -> None:
    if current is None:
        return time.sleep(seconds)
    current.disk.now += int(seconds * 1e9)


def _random_bytes(count: int) -> bytes:
    return current.identities.randbytes(count) if current else _REAL["urandom"](count)


class _NoTimer(SimpleNamespace):
    """Stands for a timer that warns after seconds: none pass while ranks make calls."""

    def __init__(self, *args: Any) -> None: ...

    def start(self) -> None: ...

    def cancel(self) -> None: ...


def _set_handler(number: int, handler: Any) -> Any:
    assert current is not None and current.process is not None
    former = _get_handler(number)
    current.process.handlers[number] = handler
    return former


def _get_handler(number: int) -> Any:
    assert current is not None and current.process is not None
    return current.process.handlers.get(number, signal.SIG_DFL)


def _stand_ins() -> dict[int, Any]:
    """What stands in the package's modules for what, by its identity."""
    threads = {**vars(threading), "main_thread": threading.current_thread}
    return {
        id(time): SimpleNamespace(**{**vars(time), "time": _now, "monotonic": _now, "sleep": _sleep}),
        id(fcntl): SimpleNamespace(**{**vars(fcntl), "flock": _flock}),
        id(uuid): SimpleNamespace(**{**vars(uuid), "uuid4": lambda: uuid.UUID(bytes=_random_bytes(16), version=4)}),
        id(secrets): SimpleNamespace(token_bytes=_random_bytes, token_hex=lambda count: _random_bytes(count).hex()),
        id(threading): SimpleNamespace(**threads),
        id(threading.Timer): _NoTimer,
        id(signal): SimpleNamespace(**{**vars(signal), "signal": _set_handler, "getsignal": _get_handler}),
        id(concurrent.futures.ThreadPoolExecutor): AtOnce,
    }


@contextlib.contextmanager
def intercepted() -> Iterator[None]:
    """Have the calls of this process go through the current machine during the block."""
    for name in muonckpt.__all__:
        getattr(muonckpt, name)  # imports its module
    changes: list[tuple[Any, str, Any]] = [(os, name, call) for name, call in _intercepts().items()]
    changes += [(io, "open", _io_open), (c10d, "_new_process_group_helper", ranks.new_group_helper)]
    changes += [(c10d, name, lambda *args: None) for name in ranks.OF_THE_REAL_PROCESS]
    conditions = ranks.simulated_threading(lambda: current.schedule if current else None)
    changes += [(concurrent.futures._base, "threading", conditions)]
    changes += [(concurrent.futures, "ThreadPoolExecutor", AtOnce)]
    stand_ins = _stand_ins()
    for name, module in list(sys.modules.items()):
        if name.startswith("muonckpt"):
            changes += [
                (module, key, stand_ins[id(value)]) for key, value in vars(module).items() if id(value) in stand_ins
            ]
    from muonckpt.checkpoint import async_saving

    changes.append((async_saving, "ThreadPoolExecutor", lambda *args: InTurn(current.schedule)))  # type: ignore[union-attr]
    former = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    # Collected when processes end, so that what they have left open is closed then.
    gc.collect()
    gc.freeze()
    gc.disable()
    _pristine.update({key: getattr(*key) for key in ranks.variables()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for owner, name, value in changes:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in former:
                setattr(owner, name, value)
            _pristine.clear()
            gc.unfreeze()
            gc.enable()
