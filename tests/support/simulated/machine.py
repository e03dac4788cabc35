"""One machine from one seed: threads of processes of which one runs at a time, and what fails, is killed or is lost."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from threading import Lock, Thread
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch.distributed import distributed_c10d as c10d

from .disk import Disk
from .group import new_world

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
"""What may fail, and in which calls: the last four in a store."""


@dataclass
class Fault:
    """Calls that fail: ``times`` of them, from that with the number ``at`` among those of its kinds."""

    number: int = 0
    at: int = 0
    times: int = 0
    hits: int = 0

    def strikes(self, kind: str) -> bool:
        if kind not in KINDS[self.number]:
            return False
        self.at -= 1
        is_hit = self.at < 0 and self.hits < self.times
        self.hits += is_hit
        return is_hit


class Killed(BaseException):
    """The process of this thread has been killed: no call of it has an effect any more."""


class Hung(BaseException):
    """No thread can go on, or all go round in circles."""


@dataclass(eq=False)
class Process:
    """A process: one rank of a program.

    Attributes:
        memory: variables of modules, as they are in this process, or while it runs, outside of it.
        kill_at, signal_at: the number of the call at which it is killed, or gets SIGTERM; 0: never.
    """

    name: str
    rank: int
    memory: dict[tuple[Any, str], Any]
    handlers: dict[int, Any] = field(default_factory=dict)
    calls: int = 0
    kill_at: int = 0
    loses_power: bool = False
    signal_at: int = 0
    is_dead: bool = False

    def exchange_memory(self) -> None:
        for (module, name), value in self.memory.items():
            self.memory[module, name] = getattr(module, name)
            setattr(module, name, value)


@cache
def changing_variables() -> list[tuple[Any, str]]:
    """Return which variables of the package's modules a process changes."""
    kinds = (dict, list, set, WeakKeyDictionary)
    return [
        (module, name)
        for path, module in sys.modules.items()
        if path.startswith("muonckpt")
        for name, value in vars(module).items()
        if isinstance(value, kinds) and name.islower() and not name.startswith("__")
    ]


@dataclass(eq=False)
class Task:
    """A thread of a process, which waits for its turn, and until it is ready to go on."""

    process: Process
    work: Callable[[], Any] = bool
    is_main: bool = False
    turn: Lock = field(default_factory=Lock)
    ready: Callable[[], bool] = lambda: True
    in_collective: bool = False
    error: BaseException | None = None
    trace: str = ""
    result: Any = None

    def __post_init__(self) -> None:
        self.turn.acquire()


class Machine:
    """A disk and an object store, and the processes that use them.

    Attributes:
        current: the machine that runs now, to which the calls of this process go.
        tasks: all threads that have not ended; ``task``: the one that runs.
        objects: those of the store, by their paths: their bytes, and when they were written.
        late: deletions that the store has not made yet.
        paths: of the open files of the disk.
        trace: the digest of all calls, and of files that were synced, whatever the folder is called.
    """

    current: ClassVar[Any] = None

    def __init__(self, seed: str, root: str) -> None:
        self.dice = random.Random(seed)
        self.identities = random.Random(f"{seed} identities")
        self.disk = Disk(root)
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.late: list[Callable[[], object]] = []
        self.tasks: list[Task] = []
        self.task = self.outside = Task(Process("outside", 0, {}))
        self.paths: dict[int, str] = {}
        self.fault = Fault()
        self.calls = self.kills = 0
        self.is_hung = False
        self.trace = hashlib.blake2b()

    # --- threads, of which one runs at a time -----------------------------------------------------------------------

    def spawn(self, process: Process, work: Callable[[], Any], is_main: bool = False) -> Task:
        task = Task(process, work, is_main)
        self.tasks.append(task)
        Thread(target=self._live, args=(task,), daemon=True).start()
        return task

    def _live(self, task: Task) -> None:
        task.turn.acquire()
        try:
            if task.process.is_dead:
                raise Killed
            task.result = task.work()
        except BaseException as error:
            task.error, task.trace = error, "" if isinstance(error, Killed) else traceback.format_exc()
            # Frames would keep files open that ended with the process.
            link: BaseException | None = error
            while link is not None:
                link.__traceback__, link = None, link.__cause__ or link.__context__
        self.tasks.remove(task)
        self._give_turn()

    def _give_turn(self) -> None:
        """Let a thread run that can go on."""
        ready = [task for task in self.tasks if task.process.is_dead or task.ready()]
        # If none is, time passes, until those that wait for other ranks give up.
        ready = ready or [task for task in self.tasks if task.in_collective]
        self.is_hung |= bool(self.tasks) and not ready
        ready = ready or self.tasks or [self.outside]
        former, self.task = self.task, ready[0] if len(ready) == 1 else self.dice.choice(ready)
        if former.process is not self.task.process:
            former.process.exchange_memory()
            self.task.process.exchange_memory()
        self.task.turn.release()

    def _pass_on(self) -> None:
        """Let a thread run, and wait for the next turn of this one."""
        this = self.task
        self._give_turn()
        this.turn.acquire()
        if this.process.is_dead:
            raise Killed
        if self.is_hung:
            raise Hung("hung")

    def wait(self, ready: Callable[[], bool], in_collective: bool = False) -> None:
        """Go on when it is time."""
        if not ready():
            task = self.task
            task.ready, task.in_collective = ready, in_collective
            self._pass_on()
            task.ready, task.in_collective = Task.ready, False

    # --- calls ------------------------------------------------------------------------------------------------------

    def step(self, kind: str, place: str) -> bool:
        """Note a call before it is made; return whether it fails.

        Raises:
            Killed: this process has been killed.
        """
        process = self.task.process
        if process.is_dead:
            raise Killed
        self.calls += 1
        process.calls += 1
        self.disk.now += 1000
        self.trace.update(f"{process.name} {process.rank} {kind} {place.removeprefix(self.disk.root)} ".encode())
        if process.calls == process.kill_at:
            self._kill(process)
        if process.signal_at and process.calls >= process.signal_at and self.task.is_main:
            process.signal_at = 0
            handler = process.handlers.get(signal.SIGTERM, signal.SIG_DFL)
            if callable(handler):
                handler(signal.SIGTERM, None)
            elif handler == signal.SIG_DFL:
                self._kill(process)
        self.is_hung |= self.calls > MOST_CALLS
        if self.is_hung or (len(self.tasks) > 1 and self.dice.random() < 0.3):
            self._pass_on()
        return self.fault.strikes(kind)

    def _kill(self, process: Process) -> None:
        self.kills += 1
        for each in {task.process for task in self.tasks} if process.loses_power else {process}:
            each.is_dead = True
        raise Killed

    def note(self, data: bytes) -> None:
        self.trace.update(data.replace(self.disk.root.encode(), b""))

    def pass_time(self, seconds: float) -> None:
        self.disk.now += int(seconds * 1e9)

    def put(self, path: str, data: bytes) -> None:
        self.disk.now += 1
        self.objects[path] = bytes(data), self.disk.now

    def path(self, place: Any, folder: int | None = None) -> str | None:
        """The path of a place on this disk; None for all others."""
        if isinstance(place, int):
            return self.paths.get(place)
        path = os.fspath(place)
        if folder is not None:
            path = f"{self.paths.get(folder)}/{path}"
        is_here = isinstance(path, str) and f"{path}/".startswith(f"{self.disk.root}/")
        return path if is_here else None

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Have the calls of the block, which are not of a program, go to the system."""
        former, Machine.current = Machine.current, None
        try:
            yield
        finally:
            Machine.current = former

    # --- programs ---------------------------------------------------------------------------------------------------

    def start(self, name: str, ranks: int, work: Callable[[int], Any]) -> list[Task]:
        """Start the ranks of a program."""
        processes = [Process(name, rank, {}) for rank in range(ranks)]
        tasks, mailbox = [], {}
        for rank, process in enumerate(processes):
            process.memory = {key: getattr(*key).copy() for key in changing_variables()}
            process.memory[c10d, "_world"] = new_world(self, processes, rank, mailbox)
            tasks.append(self.spawn(process, partial(work, rank), is_main=True))
        return tasks

    def run(self) -> None:
        """Run what was started until all of it has ended."""
        processes = {task.process for task in self.tasks}
        Machine.current = self
        try:
            self._pass_on()
            # What processes have left open is closed with them.
            if self.paths:
                gc.collect()
            for handle in [*self.paths]:
                os.close(handle)
        finally:
            Machine.current = None
        if any(process.loses_power and process.is_dead for process in processes):
            self.disk.lose_power(self.dice)
