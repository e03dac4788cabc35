"""Collectives and bytes, counted where every caller must pass: at the process group.

`counted` is a backend whose groups note each collective and hand it on to a gloo group of their own.  What a library
calls (``torch.distributed``, functional collectives, DTensor's redistributions inside an op) makes no difference; a
collective that this file does not know fails, it is never missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "counted"


@dataclass(slots=True)
class Traffic:
    """What this process has taken part in since the last :meth:`reset`: collectives by name, and bytes sent."""

    collectives: Counter[str] = field(default_factory=Counter)
    sent: float = 0.0

    def reset(self) -> None:
        self.collectives.clear()
        self.sent = 0.0


def bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def sent_by_all_to_all(
    world: int, rank: int, output: Tensor, input: Tensor, output_splits: list[int], splits: list[int], *_: Any
) -> float:
    """All but a rank's own part; splits are rows of ``given``, none means equal ones."""
    rows = splits or [len(input) // world] * world
    return input.nbytes * (1 - rows[rank] / max(len(input), 1))


Sent = Callable[..., float]
"""Bytes that a rank sends in one collective of ``world`` ranks if its algorithm wastes no bandwidth (a ring for the
reductions and gathers).  Called with world, rank, and the process group's own arguments."""

SENT: dict[str, Sent] = {
    "allreduce": lambda world, rank, tensors, *_: 2 * bytes_of(tensors) * (world - 1) / world,
    "allreduce_coalesced": lambda world, rank, tensors, *_: 2 * bytes_of(tensors) * (world - 1) / world,
    "allgather": lambda world, rank, outputs, inputs, *_: bytes_of(inputs) * (world - 1),
    "all_gather_single": lambda world, rank, output, input, *_: input.nbytes * (world - 1),
    "all_gather_single_coalesced": lambda world, rank, outputs, inputs, *_: bytes_of(inputs) * (world - 1),
    "reduce": lambda world, rank, tensors, options: bytes_of(tensors) * (rank != options.rootRank),
    "broadcast": lambda world, rank, tensors, options: bytes_of(tensors) * ((rank + 1) % world != options.rootRank),
    "reduce_scatter": lambda world, rank, outputs, inputs, *_: bytes_of(outputs) * (world - 1),
    "reduce_scatter_single": lambda world, rank, output, input, *_: output.nbytes * (world - 1),
    "reduce_scatter_single_coalesced": lambda world, rank, outputs, inputs, *_: bytes_of(outputs) * (world - 1),
    "all_to_all_single": sent_by_all_to_all,
    "barrier": lambda *_, **__: 0.0,
}


class CountedGroup(dist.ProcessGroup):
    """Notes each collective in ``traffic`` and lets a gloo group do it."""

    def __init__(self, traffic: Traffic, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.traffic = traffic
        self.gloo = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.gloo._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        """Torch's name of this group, by which functional collectives find it."""
        return dist.distributed_c10d._world.pg_names[self]


def counted(name: str, sent: Sent) -> Callable[..., dist.Work]:
    """The method of a :class:`CountedGroup` for one collective."""

    def collective(group: CountedGroup, *args: Any, **options: Any) -> dist.Work:
        group.traffic.collectives[name] += 1
        group.traffic.sent += sent(group.size(), group.rank(), *args)
        return getattr(group.gloo, name)(*args, **options)

    return collective


for _name, _sent in SENT.items():
    setattr(CountedGroup, _name, counted(_name, _sent))


@cache
def register() -> Traffic:
    """Make ``backend="counted"`` known to torch; returns what all groups of this process add to."""
    traffic = Traffic()
    dist.Backend.register_backend(BACKEND, partial(CountedGroup, traffic), devices=["cpu"])
    return traffic
