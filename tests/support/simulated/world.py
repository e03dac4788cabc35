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
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import muonckpt

from . import ranks, stores
from .disk import Disk
from .ranks import Killed, Process, Schedule, SimulatedWorld, Task

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

    def pass_time(self, seconds: float) -> None:
        self.disk.now += int(seconds * 1e9)

    @property
    def handlers(self) -> dict[int, Any]:
        """Handlers of signals in the process that runs."""
        assert self.process is not None
        return self.process.handlers

    def handle_signal(self, number: int, handler: Any) -> Any:
        former, self.handlers[number] = self.handlers.get(number, signal.SIG_DFL), handler
        return former

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

    # --- programs ---------------------------------------------------------------------------------------------------

    def start(self, name: str, world: int, work: Callable[[int], Any]) -> list[Task]:
        """Start the ranks of a program."""
        processes = [Process(name, rank) for rank in range(world)]
        store = dist.HashStore() if world > 1 else None
        tasks = []
        for rank, process in enumerate(processes):
            process.memory = ranks.fresh_memory(_pristine)
            process.memory[c10d, "_world"] = SimulatedWorld(self.schedule, self.step, processes, rank, store).data
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
            outside.enter()
            # What processes have left open is closed with them.
            if self.paths:
                gc.collect()
            for handle in self.paths:
                _REAL["close"](handle)
            self.paths.clear()
        finally:
            current = None
        if any(process.loses_power and process.is_dead for process in processes):
            self.disk.lose_power(self.dice)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Have the calls of the block, which are not of a program, go to the system."""
        global current
        former, current = current, None
        try:
            yield
        finally:
            current = former

    def path(self, place: Any, folder: int | None = None) -> str | None:
        """The path of a place on this disk; None for all others."""
        if isinstance(place, int):
            return self.paths.get(place)
        path = os.fspath(place)
        if folder is not None:
            return f"{self.paths[folder]}/{path}" if folder in self.paths else None
        root = self.disk.root
        return path if isinstance(path, str) and (path == root or path.startswith(f"{root}/")) else None


current: Machine | None = None
"""The machine that runs now."""

stores.Files.machine = staticmethod(lambda: current)  # type: ignore[assignment]


# --- calls of the system: a step of the machine before each, and its note after it ------------------------------------


@dataclass
class Call:
    """A call that was made.

    Attributes:
        node: what was at the place before it; None if nothing was.
        result: what the system has returned.
    """

    machine: Machine
    path: str
    node: Any
    args: tuple[Any, ...]
    result: Any

    @property
    def disk(self) -> Disk:
        return self.machine.disk

    def opened(self) -> Any:
        if self.node is None:
            self.disk.renamed(None, None, self.path)
        self.machine.paths[self.result] = self.path
        return self.result

    def wrote(self) -> Any:
        _, data, offset = self.args
        self.disk.wrote(self.node, offset, bytes(data[: self.result]))
        return self.result

    def renamed(self) -> None:
        self.disk.renamed(self.node, self.path, self.machine.path(self.args[1]))

    def removed(self) -> None:
        self.disk.renamed(self.node, self.path, None)

    def scanned(self) -> _Entries:
        with self.result:
            return _Entries(self.disk, self.path, sorted(self.result, key=lambda entry: entry.name))


_CALLS: dict[str, tuple[str, Callable[[Call], Any]]] = {
    "open": ("open", Call.opened),
    "close": ("", lambda call: call.machine.paths.pop(call.args[0])),
    "pwrite": ("write", Call.wrote),
    "posix_fallocate": ("write", lambda call: call.disk.wrote(call.node, call.args[1], bytes(call.args[2]))),
    "fsync": ("fsync", lambda call: call.disk.synced(call.node)),
    "pread": ("read", lambda call: call.result),
    "preadv": ("read", lambda call: call.result),
    "rename": ("rename", Call.renamed),
    "replace": ("rename", Call.renamed),
    "link": ("link", lambda call: call.disk.renamed(call.node, None, call.machine.path(call.args[1]))),
    "unlink": ("unlink", Call.removed),
    "remove": ("unlink", Call.removed),
    "rmdir": ("rmdir", Call.removed),
    "mkdir": ("mkdir", lambda call: call.disk.renamed(None, None, call.path)),
    "stat": ("stat", lambda call: call.disk.shown(call.result)),
    "lstat": ("stat", lambda call: call.disk.shown(call.result)),
    "fstat": ("", lambda call: call.disk.shown(call.result)),
    "listdir": ("list", lambda call: sorted(call.result)),
    "scandir": ("list", Call.scanned),
    "utime": ("", lambda call: call.disk.touched(call.node)),
}
"""Of each call its kind, if it may fail, and what is noted and returned after it."""

_REAL: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in _CALLS}
_pristine: dict[tuple[Any, str], Any] = {}


def _intercepted(name: str) -> Callable[..., Any]:
    real, (kind, note) = _REAL[name], _CALLS[name]

    def call(*args: Any, **options: Any) -> Any:
        machine = current
        path = machine.path(args[0], options.get("dir_fd")) if machine and args else None
        if machine is None or path is None:
            return real(*args, **options)
        is_new = name == "open" and args[1] & os.O_CREAT
        if kind and machine.step("create" if is_new else kind, path, args[1] if name == "pwrite" else b""):
            args = _halved(name, args)
        node = machine.disk.node(args[0] if isinstance(args[0], int) else path)
        return note(Call(machine, path, node, args, real(*args, **options)))

    return call


def _halved(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Read or write a part of what was asked for."""
    place, what, *rest = args
    if name == "pread":
        return place, max(what // 2, 1), *rest
    if name == "preadv":
        return place, [memoryview(what[0])[: max(len(what[0]) // 2, 1)]], *rest
    return (place, what[: max(len(what) // 2, 1)], *rest) if name == "pwrite" else args


class _Entries(Iterator[Any], contextlib.AbstractContextManager[Any]):
    """What ``scandir`` returns."""

    def __init__(self, disk: Disk, path: str, entries: Iterable[os.DirEntry[str]]) -> None:
        def entry_of(entry: os.DirEntry[str]) -> SimpleNamespace:
            kinds = {"is_dir": entry.is_dir, "is_file": entry.is_file, "is_symlink": entry.is_symlink}
            stat = lambda **options: disk.shown(entry.stat(**options))  # noqa: E731
            return SimpleNamespace(name=entry.name, path=f"{path}/{entry.name}", stat=stat, **kinds)

        self._following = iter([entry_of(entry) for entry in entries])

    def __next__(self) -> SimpleNamespace:
        return next(self._following)

    def __exit__(self, *error: object) -> None: ...


class _Written(io.FileIO):
    """A file that is written through Python's buffers."""

    def __init__(self, file: Any, mode: str) -> None:
        opener = None if isinstance(file, int) else lambda path, flags: os.open(path, flags, 0o666)
        super().__init__(file, mode, opener=opener)

    def write(self, data: Any) -> int:
        count = os.pwrite(self.fileno(), memoryview(data).cast("B"), self.tell())
        self.seek(count, os.SEEK_CUR)
        return count

    def close(self) -> None:
        handle = -1 if self.closed else self.fileno()
        super().close()
        if current:
            current.paths.pop(handle, None)


_REAL_OPEN = io.open


def _open(machine: Machine, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
    path = None if isinstance(file, bytes) else machine.path(file)
    if path is not None and "b" in mode and not {*mode}.isdisjoint("wxa"):
        return io.BufferedWriter(_Written(file, mode))
    if path is not None:
        machine.step("open", path)
    return _REAL_OPEN(file, mode, *args, **options)


def _lock(machine: Machine, handle: int, operation: int) -> None:
    def is_locked() -> bool:
        try:
            fcntl.flock(handle, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    if machine.path(handle) is None or operation & fcntl.LOCK_NB:
        fcntl.flock(handle, operation)
    else:
        machine.schedule.wait(is_locked)


# --- modules of Python, as the package's modules see them -------------------------------------------------------------

_SIMULATED: dict[tuple[ModuleType, str], Callable[..., Any]] = {
    (time, "time"): lambda machine: machine.disk.now / 1e9,
    (time, "monotonic"): lambda machine: machine.disk.now / 1e9,
    (time, "sleep"): lambda machine, seconds: machine.pass_time(seconds),
    (fcntl, "flock"): _lock,
    (secrets, "token_bytes"): lambda machine, count: machine.identities.randbytes(count),
    (secrets, "token_hex"): lambda machine, count: machine.identities.randbytes(count).hex(),
    (signal, "signal"): lambda machine, number, handler: machine.handle_signal(number, handler),
    (signal, "getsignal"): lambda machine, number: machine.handlers.get(number, signal.SIG_DFL),
    (threading, "main_thread"): lambda machine: threading.current_thread(),
    (threading, "Timer"): lambda machine, *args: SimpleNamespace(start=lambda: None, cancel=lambda: None),
}
"""Functions in simulations; no timer ends while ranks make calls."""


def _in_simulation(real: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        return real(*args, **options) if current is None else simulated(current, *args, **options)

    return call


def _stand_ins() -> dict[int, Any]:
    """What stands in the package's modules for modules and functions, by their identity."""
    modules: dict[ModuleType, dict[str, Any]] = {}
    functions = {}
    for (module, name), simulated in _SIMULATED.items():
        function = _in_simulation(getattr(module, name), simulated)
        functions[id(getattr(module, name))] = modules.setdefault(module, {**vars(module)})[name] = function
    return functions | {id(module): SimpleNamespace(**values) for module, values in modules.items()}


@contextlib.contextmanager
def intercepted() -> Iterator[None]:
    """Have the calls of this process go through the current machine during the block."""
    for name in muonckpt.__all__:
        getattr(muonckpt, name)  # imports its module
    changes: list[tuple[Any, str, Any]] = [(os, name, _intercepted(name)) for name in _CALLS]
    changes += [
        (io, "open", _in_simulation(io.open, _open)),
        (os, "urandom", _in_simulation(os.urandom, lambda machine, count: machine.identities.randbytes(count))),
        *ranks.stand_ins(lambda: current.schedule if current else None),
    ]
    pool = next(value for _, name, value in changes if name == "ThreadPoolExecutor")
    stand_ins = {**_stand_ins(), id(concurrent.futures.ThreadPoolExecutor): pool}
    for name, module in list(sys.modules.items()):
        if name.startswith("muonckpt"):
            replaced = [key for key, value in vars(module).items() if id(value) in stand_ins]
            changes += [(module, key, stand_ins[id(vars(module)[key])]) for key in replaced]
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
