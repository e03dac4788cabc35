"""The ranks that hold a parameter, process groups of exactly those, and the parameters that one set of ranks holds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from types import MappingProxyType
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...names.errors import ArgumentError
from ...names.vocabulary import EXP_AVG, MOMENTUM, ParamGroup
from ...names.wording import listed
from ...ranks.new_group import new_group, time_out
from ..methods.matrix import is_matrix_method
from ..planning.schedule import Ranks
from .agreement import Facts, Intent, step_intent

State = Mapping[Tensor, Mapping[str, Tensor]]
"""An optimizer's state, by parameter and slot."""


def ranks_of(param: Tensor, replicas: dist.ProcessGroup | None) -> Ranks:
    """Return the global ranks that hold parts or copies of a parameter, sorted; none for this process alone."""
    if isinstance(param, DTensor):
        return tuple(sorted(param.device_mesh.mesh.flatten().tolist()))
    return ranks_of_group(replicas)


def ranks_of_group(group: dist.ProcessGroup | None) -> Ranks:
    """Return the global ranks of a process group, sorted; none for this process alone."""
    return tuple(sorted(dist.get_process_group_ranks(group))) if group is not None else ()


def refuse_ended_groups(*groups: dist.ProcessGroup | None) -> None:
    """Raise RuntimeError for a process group that was destroyed, or has another number of ranks than it was made for.

    It would wait for ranks that are gone until it times out.
    """
    for group in groups:
        try:
            if group is None or len(ranks_of_group(group)) == group.size():
                continue
            reason = f"has {group.size()} ranks now, and was made for {len(ranks_of_group(group))}"
        except KeyError:
            reason = "has been destroyed"
        raise RuntimeError(
            f"the process group by which this optimizer shares its steps {reason}. Build another optimizer: of plain "
            "tensors (DDP) with replicas= the new group, and new.load_state_dict(old.state_dict()), as every rank has "
            "all state; of sharded parameters on a new mesh, from a checkpoint (muonckpt.load)"
        )


def unique_groups(*groups: dist.ProcessGroup | None) -> list[dist.ProcessGroup | None]:
    """Return groups, each replaced by the first of the same ranks: ``new_group`` makes a new object every time."""
    group_of_ranks: dict[Ranks, dist.ProcessGroup] = {}
    unique: list[dist.ProcessGroup | None] = []
    for group in groups:
        unique.append(None if group is None else group_of_ranks.setdefault(ranks_of_group(group), group))
    return unique


def collective_order(ranks: Ranks) -> tuple[int, int, Ranks]:
    """Return the key by which every rank sorts its sets of ranks, for collectives in one global order.

    A set comes before those that contain it, and a mesh axis before those outside of it, so that news reaches all ranks
    of a mesh in one pass.
    """
    return ranks[-1] - ranks[0] if ranks else -1, len(ranks), ranks


_new_groups: WeakKeyDictionary[dist.ProcessGroup, dict[Ranks, dist.ProcessGroup]] = WeakKeyDictionary()
"""The groups that `group_of` has made, by the default process group: they end with it."""


def group_of(ranks: Ranks, *existing: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a process group of exactly these ranks, an ``existing`` one or always the same; None for one rank.
    Collective over ``ranks`` if it has to be made.

    Raises:
        ArgumentError: this rank is not among them.
    """
    if ranks and dist.get_rank() not in ranks:
        raise ArgumentError(
            f"rank {dist.get_rank()} is not on the mesh of a parameter (ranks {listed(ranks)}); give each rank "
            "parameters that it holds, and no others"
        )
    world = dist.group.WORLD
    if world is None or len(ranks) < 2:
        return None
    for group in (world, *existing):
        # The groups of unused mesh axes are fake and carry nothing.
        if ranks_of_group(group) == ranks and (dist.get_backend(group) == "fake") == (dist.get_backend() == "fake"):
            return group
    # No group has these ranks: one is made, and serves all later optimizers.
    groups = _new_groups.setdefault(world, {})
    if ranks not in groups:
        groups[ranks] = new_group(ranks, dist.get_backend(world), time_out(world, world._device_types[0]))
    return groups[ranks]


def groups_of_mesh(mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """Return the process groups of the axes of a mesh."""
    return mesh.get_all_groups() if mesh is not None else []


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A parameter, the number of its group, and its name if the groups have names."""

    param: Tensor
    group: int
    algorithm: str
    name: str | None


@dataclass(frozen=True, eq=False)
class RankSet:
    """Parameters of one optimizer that are held by the same ranks.

    Attributes:
        ranks: sorted; none for this process alone.
        members: in the order of the optimizer; there may be none for the ranks of ``replicas``.
    """

    ranks: Ranks
    members: tuple[Member, ...]
    state: State

    @cached_property
    def matrices(self) -> list[Member]:
        return [member for member in self.members if is_matrix_method(member.algorithm)]

    @cached_property
    def matrix_states(self) -> list[Mapping[str, Tensor]]:
        """The states of matrices: looking parameters up in each step would take longer."""
        return [self.state[member.param] for member in self.matrices]

    @property
    def is_alone(self) -> bool:
        return len(self.ranks) < 2

    @property
    def device(self) -> torch.device:
        """The device on which its tensors are exchanged."""
        return self.members[0].param.device if self.members else torch.device("cpu")

    @property
    def mesh(self) -> DeviceMesh | None:
        """A mesh of the ranks, if a parameter is on one."""
        meshes = (member.param.device_mesh for member in self.members if isinstance(member.param, DTensor))
        return next(meshes, None)

    @cached_property
    def group_numbers(self) -> dict[int, int]:
        """The numbers of groups that all ranks have in common, by those on this rank."""
        numbers: dict[int, int] = {}
        for member in self.members:
            numbers.setdefault(member.group, len(numbers))
        return numbers

    @property
    def labels(self) -> list[str]:
        """Names of the parameters, the same on all ranks."""
        labels = []
        for number, member in enumerate(self.members):
            labels.append(f"parameter {number if member.name is None else repr(member.name)}")
        return labels

    def step_intent(self, all_groups: Sequence[ParamGroup], constants: Facts) -> Intent:
        """Return the intent to step those of the parameters that have a gradient."""
        gradients: list[torch.dtype | None] = []
        momenta: list[torch.dtype | None] = []
        for param, slots, momentum in self._momenta:
            gradient = param.grad
            gradients.append(None if gradient is None else gradient.dtype)
            momenta.append(None if momentum is None else slots[momentum].dtype)
        dtypes = tuple(gradients), tuple(momenta)
        return step_intent(self.groups(all_groups), constants, *dtypes, lambda: self.labels)

    @cached_property
    def _momenta(self) -> list[tuple[Tensor, Mapping[str, Tensor], str | None]]:
        """Parameters, their states, and the slots of momenta."""
        momenta = []
        for member in self.members:
            slots = self.state[member.param]
            momenta.append((member.param, slots, next((slot for slot in (MOMENTUM, EXP_AVG) if slot in slots), None)))
        return momenta

    def groups(self, all_groups: Sequence[ParamGroup]) -> dict[int, ParamGroup]:
        """Return the groups of its parameters, by their common numbers."""
        return {number: all_groups[group] for group, number in self.group_numbers.items()}


_optimizer_counts: WeakKeyDictionary[dist.ProcessGroup, Counter[Hashable]] = WeakKeyDictionary()
"""The number of optimizers of each kind that this process has built, by the default process group."""


def ordinals(groups: Sequence[ParamGroup], replicas: dist.ProcessGroup | None) -> dict[Ranks, int]:
    """Return, by ranks, an optimizer's number among those built of equal parameters there, which tells it apart."""
    numbers: dict[Ranks, int] = {}
    if (world := dist.group.WORLD) is None:
        return numbers
    counts = _optimizer_counts.setdefault(world, Counter())
    for rank_set in rank_sets(groups, replicas):
        members = ((member.algorithm, member.name, member.param.shape) for member in rank_set.members)
        kind = (rank_set.ranks, *members)
        counts[kind] += 1
        numbers[rank_set.ranks] = counts[kind]
    return numbers


def rank_sets(
    groups: Sequence[ParamGroup], replicas: dist.ProcessGroup | None, state: State = MappingProxyType({})
) -> list[RankSet]:
    """Return the parameters of groups by their ranks, in the global order of collectives."""
    members: defaultdict[Ranks, list[Member]] = defaultdict(list)
    # The ranks of replicas plan together, also where this one has no plain tensor.
    if replicas is not None:
        members[ranks_of_group(replicas)] = []
    for number, group in enumerate(groups):
        for param, name in zip_longest(group["params"], group.get("param_names", ())[: len(group["params"])]):
            members[ranks_of(param, replicas)].append(
                Member(param, group=number, algorithm=group["algorithm"], name=name)
            )
    return [RankSet(ranks, tuple(members[ranks]), state) for ranks in sorted(members, key=collective_order)]
