"""The parameters that one set of ranks holds, and what these ranks must agree on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...vocabulary import ParamGroup
from ..planning.schedule import Ranks
from .methods import MATRICES
from .process_groups import in_order, members, ranks_of


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A parameter in the group of this number, and its name if groups have names."""

    param: Tensor
    group: int
    algorithm: str
    name: str | None


@dataclass(frozen=True, slots=True, eq=False)
class RankSet:
    """Parameters of one optimizer that are held by the same ranks.

    Attributes:
        ranks: sorted; none for this process alone.
        members: in the order of the optimizer; there may be none where the ranks are those of ``replicas``.
    """

    ranks: Ranks
    members: tuple[Member, ...]

    @property
    def matrices(self) -> list[Member]:
        return [member for member in self.members if member.algorithm in MATRICES]

    @property
    def alone(self) -> bool:
        return len(self.ranks) < 2

    @property
    def device(self) -> torch.device:
        """Where its tensors are exchanged."""
        return self.members[0].param.device if self.members else torch.device("cpu")

    @property
    def mesh(self) -> DeviceMesh | None:
        """A mesh of these ranks, if a parameter is on one."""
        meshes = (member.param.device_mesh for member in self.members if isinstance(member.param, DTensor))
        return next(meshes, None)

    @property
    def numbers(self) -> dict[int, int]:
        """By the number that a group has on this rank, one that all ranks have in common."""
        return {group: number for number, group in enumerate(dict.fromkeys(member.group for member in self.members))}

    @property
    def labels(self) -> list[str]:
        """Of the parameters, the same on all ranks."""
        named = enumerate(member.name for member in self.members)
        return [f"parameter {number}" if name is None else f"parameter {name!r}" for number, name in named]

    def groups(self, all_groups: Sequence[ParamGroup]) -> dict[int, ParamGroup]:
        """Those that its parameters are in, by the numbers that the ranks have in common."""
        return {number: all_groups[group] for group, number in self.numbers.items()}


def rank_sets(groups: Sequence[ParamGroup], replicas: dist.ProcessGroup | None) -> list[RankSet]:
    """The parameters of some groups by their ranks, in the order in which all ranks take part in collectives."""
    held: defaultdict[Ranks, list[Member]] = defaultdict(list)
    if replicas is not None:
        held[members(replicas)] = []
    for number, group in enumerate(groups):
        for param, name in zip_longest(group["params"], group.get("param_names", ())[: len(group["params"])]):
            held[ranks_of(param, replicas)].append(Member(param, number, group["algorithm"], name))
    return [RankSet(ranks, tuple(held[ranks])) for ranks in sorted(held, key=in_order)]
