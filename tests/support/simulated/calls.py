"""What stands in for calls of the system, and for functions of Python and torch, while a machine runs."""

from __future__ import annotations

import gc
import io
import os
import random
import secrets
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import device_mesh, distributed_c10d as c10d

import muonckpt

from .group import group_named, new_group
from .machine import Machine

# --- calls of the system ----------------------------------------------------------------------------------------------

CALLS = {
    "open": ("open",),
    "read": ("pread", "preadv"),
    "write": ("pwrite", "posix_fallocate"),
    "fsync": ("fsync",),
    "stat": ("stat", "lstat"),
    "list": ("listdir", "scandir"),
    "mkdir": ("mkdir",),
    "rename": ("rename", "replace"),
    "link": ("link",),
    "unlink": ("unlink",),
    "rmdir": ("rmdir",),
    "": ("fstat", "close"),  # which never fail
}
"""By the kinds of `machine.KINDS`, the functions of `os`."""


def seen(kind: str, name: str) -> Callable[..., Any]:
    """A call of the system that goes through the machine: its step before it, and its note after it."""
    real = getattr(os, name)

    def call(*args: Any, **options: Any) -> Any:
        machine = Machine.current
        path = machine.path(args[0], options.get("dir_fd")) if machine and args else None
        if path is None:
            return real(*args, **options)
        is_new = name == "open" and args[1] & os.O_CREAT
        if kind and machine.step("create" if is_new else kind, path):
            if number := machine.fault.number:
                raise OSError(number, os.strerror(number), path)
            args = halved(name, *args)
        node = machine.disk.node(args[0] if isinstance(args[0], int) else path)
        return noted(machine, name, path, node, args, real(*args, **options))

    return call


def halved(name: str, place: int, what: Any, *rest: Any) -> tuple[Any, ...]:
    """Read or write a part of what was asked for."""
    match name:
        case "pread":
            what = max(what // 2, 1)
        case "preadv":
            what = [what[0][: max(len(what[0]) // 2, 1)]]
        case "pwrite":
            what = what[: max(len(what) // 2, 1)]
    return place, what, *rest


def noted(machine: Machine, name: str, path: str, node: Any, args: Any, result: Any) -> Any:
    """Note what a call has changed on the disk; return its result.

    Args:
        node: what was at the place before it; None if nothing was.
    """
    disk = machine.disk
    match name:
        case "open":
            machine.paths[result] = path
            if node is None:
                disk.renamed(None, None, path)
        case "close":
            del machine.paths[args[0]]
        case "pwrite":
            disk.wrote(node, args[2], bytes(args[1][:result]))
        case "posix_fallocate":
            disk.wrote(node, args[1], bytes(args[2]))
        case "fsync":
            disk.synced(node)
            if not node.is_folder:
                with OPEN(f"/proc/self/fd/{args[0]}", "rb") as file:
                    machine.note(file.read())
        case "mkdir":
            disk.renamed(None, None, path)
        case "rename" | "replace":
            disk.renamed(node, path, machine.path(args[1]))
        case "link":
            disk.renamed(node, None, machine.path(args[1]))
        case "unlink" | "rmdir":
            disk.renamed(node, path, None)
        case "stat" | "lstat" | "fstat":
            return shown(machine, result)
        case "listdir":
            return sorted(result)
        case "scandir":
            with result:
                entries = sorted(result, key=lambda entry: entry.name)
                return Entries([shown_entry(machine, path, entry) for entry in entries])
    return result


def shown(machine: Machine, status: os.stat_result) -> os.stat_result:
    """The status of a file, with its number and the times of the simulation."""
    node = machine.disk.nodes[status.st_ino]
    values = [*status[:10]]
    values[1], values[7:10] = node.number, [node.written // 10**9, node.written // 10**9, node.changed // 10**9]
    times = {"st_mtime": node.written / 1e9, "st_mtime_ns": node.written, "st_ctime_ns": node.changed}
    return os.stat_result(values, {**times, "st_ctime": node.changed / 1e9, "st_blocks": status.st_blocks})


class Entries(chain[SimpleNamespace]):
    """What ``scandir`` returns: an iterator that is a context."""

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *error: object) -> None: ...


def shown_entry(machine: Machine, path: str, entry: os.DirEntry[str]) -> SimpleNamespace:
    kinds = {"is_dir": entry.is_dir, "is_file": entry.is_file, "is_symlink": entry.is_symlink}
    stat = lambda **options: shown(machine, entry.stat(**options))  # noqa: E731
    return SimpleNamespace(name=entry.name, path=f"{path}/{entry.name}", stat=stat, **kinds)


class BufferedFile(io.FileIO):
    """A file below Python's buffers, which is written by calls that the machine sees."""

    def write(self, data: Any) -> int:
        count = os.pwrite(self.fileno(), memoryview(data).cast("B"), self.tell())
        self.seek(count, os.SEEK_CUR)
        return count

    def close(self) -> None:
        if not self.closed:
            os.close(self.fileno())
        super().close()


OPEN, EXCEPTION = io.open, Future.exception


def opened(machine: Machine, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
    if machine.path(file) is None:
        return OPEN(file, mode, *args, **options)
    assert mode in ("wb", "xb"), "the package reads without Python's buffers"
    if not isinstance(file, int):
        file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    return io.BufferedWriter(BufferedFile(file, "wb", closefd=False))


# --- threads ----------------------------------------------------------------------------------------------------------


class Pool(futures.Executor):
    """A pool of threads: one with a name has a thread that works when its turn comes, others work at the call."""

    def __init__(self, threads: int, name: str = "") -> None:
        self.name, self.last = name, None

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        future, former, machine = Future[Any](), self.last, Machine.current

        def work() -> None:
            machine.wait(lambda: former not in machine.tasks)
            try:
                future.set_result(function(*args))
            except Exception as error:
                future.set_exception(error)

        if self.name:
            self.last = machine.spawn(machine.task.process, work)
        else:
            work()
        return future

    def map(self, function: Callable[..., Any], *values: Any) -> list[Any]:
        return [function(*each) for each in zip(*values, strict=False)]


# --- functions of modules ---------------------------------------------------------------------------------------------


def random_bytes(machine: Machine, count: int) -> bytes:
    """The bytes of a name; or more of them, for sums, which are the same as caches say how often they are asked for."""
    return machine.identities.randbytes(count) if count <= 16 else random.Random(count).randbytes(count)


SIMULATED: list[tuple[Any, str, Callable[..., Any]]] = [
    (io, "open", opened),
    (os, "urandom", random_bytes),
    (secrets, "token_bytes", lambda machine, count: machine.identities.randbytes(count)),
    (time, "time", lambda machine: machine.disk.now / 1e9),
    (time, "monotonic", lambda machine: machine.disk.now / 1e9),
    (time, "sleep", lambda machine, seconds: machine.pass_time(seconds)),
    (signal, "getsignal", lambda machine, number: machine.task.process.handlers.get(number, signal.SIG_DFL)),
    (signal, "signal", lambda machine, number, handler: machine.task.process.handlers.update({number: handler})),
    (threading, "main_thread", lambda machine: threading.current_thread()),
    # No timer ends while ranks make calls.
    (threading, "Timer", lambda machine, *args: SimpleNamespace(start=bool, cancel=bool)),
    (Future, "exception", lambda machine, future, *timeout: machine.wait(future.done) or EXCEPTION(future)),
]
"""Functions, and what they are while a machine runs."""


def in_simulation(owner: Any, name: str, simulated: Callable[..., Any]) -> Callable[..., Any]:
    real = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        machine = Machine.current
        return real(*args, **options) if machine is None else simulated(machine, *args, **options)

    return call


@contextmanager
def simulation() -> Iterator[None]:
    """Have the calls of this process go to the machine that runs, during the block."""
    for name in muonckpt.__all__:
        getattr(muonckpt, name)  # imports its module
    changes: list[tuple[Any, str, Any]] = [
        *((os, name, seen(kind, name)) for kind, names in CALLS.items() for name in names),
        *((owner, name, in_simulation(owner, name, simulated)) for owner, name, simulated in SIMULATED),
        (futures, "ThreadPoolExecutor", Pool),
        (c10d, "_new_process_group_helper", new_group),
        (device_mesh, "_resolve_process_group", group_named),
        # Tables of this process, which stands for one rank.
        (c10d, "_register_process_group", lambda *args: None),
        (c10d, "_unregister_process_group", lambda *args: None),
    ]
    modules = [module for name, module in sys.modules.items() if name.startswith("muonckpt")]
    for owner, name, value in [*changes]:
        real = getattr(owner, name)
        changes += [(module, name, value) for module in modules if vars(module).get(name) is real]
    # Collected when processes end, so that what they have left open is closed then.
    gc.collect()
    gc.freeze()
    gc.disable()
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        for change in changes:
            patch.setattr(*change)
        yield
