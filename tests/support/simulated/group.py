"""Process groups of the ranks of one program, each of which is a thread: they exchange over a mailbox."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.multi_threaded_pg import WorldData, ret_work


class Group(dist.ProcessGroup):
    """What one rank sees of a group: it waits for those whose words it needs, and no others."""

    _device_types = (torch.device("cpu"),)
    group_name = ""

    def __init__(self, machine: Any, processes: Sequence[Any], rank: int, name: str, mailbox: dict[Any, Any]) -> None:
        super().__init__(rank, len(processes))
        self.machine, self.processes, self.group_name, self.mailbox = machine, processes, name, mailbox
        self.exchanges = 0

    def _get_backend(self, device: Any) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=60)))

    def shutdown(self) -> None: ...

    def _exchange(self, kind: str, given: list[torch.Tensor], places: dict[int, torch.Tensor]) -> Any:
        """Give a tensor to each rank, unless there is none, and take those of some ranks to their places."""
        self.machine.step(kind, self.group_name)
        self.exchanges += 1
        box = self.mailbox.setdefault((self.group_name, self.exchanges), {})
        if given:
            box[self.rank()] = given

        def is_lost(process: Any) -> bool:
            return process.is_dead or all(task.process is not process for task in self.machine.tasks)

        def is_over() -> bool:
            missing = [self.processes[rank] for rank in places if rank not in box]
            return not missing or any(map(is_lost, missing))

        self.machine.wait(is_over, in_collective=True)
        if not places.keys() <= box.keys():
            raise RuntimeError("Connection closed by peer, or timed out")
        for rank, place in places.items():
            place.copy_(box[rank][self.rank()])
        return ret_work(list(places.values()))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._exchange("allgather", [inputs[0].clone()] * self.size(), dict(enumerate(outputs[0])))

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        places = dict(enumerate(outputs[0])) if opts.rootRank == self.rank() else {}
        return self._exchange("gather", [inputs[0].clone()] * self.size(), places)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        given = [tensor.clone() for tensor in inputs[0]] if opts.rootRank == self.rank() else []
        return self._exchange("scatter", given, {opts.rootRank: outputs[0]})

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        given = [tensors[0].clone()] * self.size() if opts.rootRank == self.rank() else []
        return self._exchange("broadcast", given, {opts.rootRank: tensors[0]})

    def alltoall_base(self, output: Any, sent: Any, taken_lengths: Any, sent_lengths: Any, opts: Any = None) -> Any:
        places = dict(enumerate(output.split(list(taken_lengths))))
        return self._exchange("all_to_all", [part.clone() for part in sent.split(list(sent_lengths))], places)


def new_world(machine: Any, processes: Sequence[Any], rank: int, mailbox: dict[Any, Any]) -> WorldData:
    """Return what torch knows of process groups in one rank."""
    world, store = WorldData(None, {}, {}, {}, {}, 0, {}, {}, {}, []), dist.HashStore()

    def new_group(ranks: Sequence[int], rank: int, name: str) -> Group:
        group = Group(machine, [processes[each] for each in ranks], rank, name, mailbox)
        world.pg_map[group] = ("gloo", store)
        world.pg_names[group] = world.pg_to_tag[group] = name
        world.pg_group_ranks[group] = {member: place for place, member in enumerate(ranks)}
        world.pg_backend_config[group] = "cpu:gloo"
        world.tags_to_pg[name] = [group]
        return group

    world.new_group = new_group
    if len(processes) > 1:
        world.default_pg = new_group(range(len(processes)), rank, f"world {processes[0].name}")
    return world


_REAL_GROUP = c10d._new_process_group_helper


def new_group(size: int, rank: int, ranks: Any, backend: Any, store: Any, name: str, *args: Any, **more: Any) -> Any:
    """Make a group of the simulation where torch would make one of gloo."""
    if str(backend) == "gloo":
        return c10d._world.new_group(ranks, rank, name), store
    return _REAL_GROUP(size, rank, ranks, backend, store, name, *args, **more)


def group_named(name: str) -> Any:
    return next(group for group, known in c10d._world.pg_names.items() if known == name)
