"""Ranks as threads, of which one runs at a time: the seed draws which, and a process may end at any call."""

from __future__ import annotations

import copy
import random
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d as c10d
from torch.testing._internal.distributed.multi_threaded_pg import WorldData, ret_work


class Killed(BaseException):
    """The process of this thread has been killed: no call of it has an effect any more."""


class Hung(BaseException):
    """No thread can go on."""


@dataclass(eq=False)
class Process:
    """A process: one rank of a program.

    Attributes:
        memory: what variables of the package's modules are in it.
        kill_at, signal_at: the number of the call at which it is killed, or gets SIGTERM; 0: never.
    """

    name: str
    rank: int = 0
    memory: dict[tuple[Any, str], Any] = field(default_factory=dict)
    handlers: dict[int, Any] = field(default_factory=dict)
    calls: int = 0
    kill_at: int = 0
    loses_power: bool = False
    signal_at: int = 0
    is_dead: bool = False
    is_over: bool = False

    def enter(self) -> None:
        for (module, name), value in self.memory.items():
            setattr(module, name, value)

    def leave(self) -> None:
        for module, name in self.memory:
            self.memory[module, name] = getattr(module, name)


class Task:
    """A thread of a process, which waits for its turn."""

    def __init__(self, process: Process, work: Callable[[], Any], is_main: bool) -> None:
        self.process, self.work, self.is_main = process, work, is_main
        self.turn = threading.Lock()
        self.turn.acquire()
        self.ready: Callable[[], bool] | None = None
        self.in_collective = self.timed_out = False
        self.error: BaseException | None = None
        self.trace = ""
        self.result: Any = None


class Schedule:
    """All threads of a simulation."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.tasks: list[Task] = []
        self.task: Task | None = None
        self.mailbox: dict[tuple[str, int], dict[int, Any]] = {}
        self.time_outs = 0
        self.is_hung = False
        self._done = threading.Lock()
        self._done.acquire()

    def spawn(self, process: Process, work: Callable[[], Any], is_main: bool = False) -> Task:
        task = Task(process, work, is_main)
        self.tasks.append(task)
        threading.Thread(target=self._life, args=(task,), daemon=True).start()
        return task

    def run(self) -> None:
        """Run all threads to their ends."""
        if self.tasks:
            self._hand_over(self._chosen())
            self._done.acquire()
        self.mailbox.clear()

    def _life(self, task: Task) -> None:
        task.turn.acquire()
        torch.autograd.set_grad_enabled(True)
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
        task.process.is_over = not any(other.process is task.process for other in self.tasks)
        if self.tasks:
            self._hand_over(self._chosen())
        else:
            self.task = None
            self._done.release()

    def _hand_over(self, task: Task) -> None:
        if self.task is None or self.task.process is not task.process:
            if self.task is not None:
                self.task.process.leave()
            task.process.enter()
        self.task = task
        task.turn.release()

    def _chosen(self) -> Task:
        ready = [task for task in self.tasks if task.process.is_dead or task.ready is None or task.ready()]
        if not ready:  # time passes, until those that wait for others give up
            ready = [task for task in self.tasks if task.in_collective]
            self.time_outs += 1
            for task in ready:
                task.timed_out = True
        if not ready:
            self.is_hung = True
            ready = self.tasks
        return ready[0] if len(ready) == 1 else self.dice.choice(ready)

    def switch(self) -> None:
        """Let another thread go on, perhaps."""
        if len(self.tasks) > 1 and self.dice.random() < 0.3:
            self._pass_on()
        self._check()

    def wait(self, ready: Callable[[], bool], in_collective: bool = False) -> None:
        """Go on when it is time.

        Raises:
            RuntimeError: as gloo does where other ranks do not answer in time.
        """
        task = self.task
        assert task is not None
        if not ready():
            task.ready, task.in_collective, task.timed_out = ready, in_collective, False
            self._pass_on()
            task.ready, task.in_collective = None, False
            self._check()
            if task.timed_out:
                raise RuntimeError("Timed out waiting for a rank")

    def _check(self) -> None:
        assert self.task is not None
        if self.task.process.is_dead:
            raise Killed
        if self.is_hung:
            raise Hung

    def _pass_on(self) -> None:
        this, following = self.task, self._chosen()
        if following is not this:
            assert this is not None
            self._hand_over(following)
            this.turn.acquire()


# --- memory of processes: variables of modules ------------------------------------------------------------------------

_VARIABLE = re.compile(r"_?[a-z]\w*")
_KINDS = ("WeakKeyDictionary", "AgreedPlans")


def variables() -> Iterator[tuple[Any, str]]:
    """The variables of the package's modules that a process changes."""
    for name, module in list(sys.modules.items()):
        for key, value in list(vars(module).items()) if name.startswith("muonckpt") else ():
            is_changing = isinstance(value, dict | list | set) or type(value).__name__ in _KINDS
            if is_changing and _VARIABLE.fullmatch(key):
                yield module, key


def fresh_memory(pristine: dict[tuple[Any, str], Any]) -> dict[tuple[Any, str], Any]:
    return {
        key: copy.copy(value) if isinstance(value, dict | list | set) else type(value)()
        for key, value in pristine.items()
    }


# --- what stands in for threads and groups ---------------------------------------------------------------------------


def stand_ins(schedule: Callable[[], Schedule | None]) -> list[tuple[Any, str, Any]]:
    """What waits for turns, as owner, name and value."""

    def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(future: Future[Any], timeout: float | None = None) -> Any:
            if running := schedule():
                running.wait(future.done)
            return function(future, timeout)

        return call

    class Pool:
        """A pool of threads: one thread works when its turn comes, several work at the call."""

        def __init__(self, threads: int, *name: str) -> None:
            self.is_one, self.last = threads == 1 and bool(name), None

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *error: object) -> None: ...

        def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
            future, running, former = Future[Any](), schedule(), self.last
            assert running is not None and running.task is not None

            def work() -> None:
                running.wait(lambda: former not in running.tasks)
                try:
                    future.set_result(function(*args))
                except Exception as error:
                    future.set_exception(error)

            if self.is_one:
                self.last = running.spawn(running.task.process, work)
            else:
                work()
            return future

        def map(self, function: Callable[..., Any], *values: Any) -> list[Any]:
            return [function(*each) for each in zip(*values, strict=False)]

        def shutdown(self, wait: bool = True) -> None:
            if wait and (running := schedule()):
                running.wait(lambda: self.last not in running.tasks)

    def wait_for(waiting: Sequence[Future[Any]]) -> None:
        for future in waiting:
            future.exception()

    return [
        (Future, "result", in_turn(Future.result)),
        (Future, "exception", in_turn(Future.exception)),
        (futures, "wait", wait_for),
        (futures, "ThreadPoolExecutor", Pool),
        (c10d, "_new_process_group_helper", _new_group_helper),
        (device_mesh, "_resolve_process_group", _group_named),
        *((c10d, name, lambda *args: None) for name in _OF_THE_REAL_PROCESS),
    ]


# --- a process group of threads ---------------------------------------------------------------------------------------


class Group(dist.ProcessGroup):
    """Exchanges over a mailbox: a rank waits for those whose words it needs, and no others."""

    _device_types = (torch.device("cpu"),)

    def __init__(self, world: SimulatedWorld, name: str, ranks: list[int], rank: int) -> None:
        super().__init__(rank, len(ranks))
        self._of, self._name, self._ranks, self._place, self._count = world, name, ranks, rank, 0

    def _get_backend(self, device: Any) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=60)))

    def size(self) -> int:
        return len(self._ranks)

    def rank(self) -> int:
        return self._place

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    def shutdown(self) -> None: ...

    def _exchange(self, kind: str, words: Any, of: Any) -> dict[int, Any]:
        """Give words to the others, and take those of some."""
        schedule, peers = self._of.schedule, self._of.peers
        self._of.step(kind, self._name)
        self._count += 1
        box = schedule.mailbox.setdefault((self._name, self._count), {})
        if words is not None:
            box[self._place] = words

        def lost() -> bool:
            return any(
                each not in box and (peers[self._ranks[each]].is_dead or peers[self._ranks[each]].is_over)
                for each in of
            )

        schedule.wait(lambda: all(each in box for each in of) or lost(), in_collective=True)
        if any(each not in box for each in of):
            raise RuntimeError("Connection closed by peer")
        return box

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        box = self._exchange("allgather", inputs[0].clone(), range(self.size()))
        for rank, output in enumerate(outputs[0]):
            output.copy_(box[rank])
        return ret_work(outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        is_root = opts.rootRank == self._place
        box = self._exchange("gather", inputs[0].clone(), range(self.size()) if is_root else ())
        for rank, output in enumerate(outputs[0] if is_root else ()):
            output.copy_(box[rank])
        return ret_work(outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        is_root = opts.rootRank == self._place
        words = [each.clone() for each in inputs[0]] if is_root else None
        outputs[0].copy_(self._exchange("scatter", words, (opts.rootRank,))[opts.rootRank][self._place])
        return ret_work(outputs)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        is_root = opts.rootRank == self._place
        box = self._exchange("broadcast", tensors[0].clone() if is_root else None, (opts.rootRank,))
        tensors[0].copy_(box[opts.rootRank])
        return ret_work(tensors)

    def all_to_all_single(self, output: Any, sent: Any, taken_lengths: Any, sent_lengths: Any, opts: Any = None) -> Any:
        parts = [part.clone() for part in sent.split(list(sent_lengths))]
        box = self._exchange("all_to_all", parts, range(self.size()))
        for rank, place in enumerate(output.split(list(taken_lengths))):
            place.copy_(box[rank][self._place])
        return ret_work(output)

    alltoall_base = all_to_all_single


class SimulatedWorld:
    """What one rank knows of its process groups; the store is that of all."""

    def __init__(
        self, schedule: Schedule, step: Callable[[str, str], Any], peers: list[Process], rank: int, store: Any
    ) -> None:
        self.schedule, self.step, self.peers, self.store = schedule, step, peers, store
        self.data = WorldData(None, {}, {}, {}, {}, 0, {}, {}, {}, [])
        self.data.simulated = self
        if len(peers) > 1:
            self.data.default_pg = self.group(f"world {peers[0].name}", list(range(len(peers))), rank)

    def group(self, name: str, ranks: list[int], rank: int) -> Group:
        group = Group(self, name, ranks, rank)
        self.data.pg_map[group] = ("gloo", self.store)
        self.data.pg_names[group] = self.data.pg_to_tag[group] = name
        self.data.pg_group_ranks[group] = {member: place for place, member in enumerate(ranks)}
        self.data.pg_backend_config[group] = "cpu:gloo"
        self.data.tags_to_pg[name] = [group]
        return group


_OF_THE_REAL_PROCESS = ("_register_process_group", "_unregister_process_group", "_unregister_all_process_groups")
"""Functions of torch that know one rank a process."""

_NEW_GROUP = c10d._new_process_group_helper


def _new_group_helper(
    size: int, rank: int, ranks: list[int], backend: Any, store: Any, name: str, *args: Any, **more: Any
) -> Any:
    """Make a group of the simulation where gloo is asked for."""
    if str(backend) != "gloo":
        return _NEW_GROUP(size, rank, ranks, backend, store, name, *args, **more)
    world = c10d._world.simulated  # type: ignore[attr-defined]
    return world.group(name, list(ranks), rank), store


def _group_named(name: str) -> Any:
    return next(group for group, known in c10d._world.pg_names.items() if known == name)
