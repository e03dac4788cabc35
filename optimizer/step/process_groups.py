"""The ranks that hold a parameter, and process groups of exactly those.

``torch.distributed.new_group(..., use_local_synchronization=True)`` names a group after its ranks and the number of
groups that this process is a member of.  Where members are in different numbers of groups, the names differ, and all of
them wait for the time-out.  So a group of our own is named after its ranks and how many we have made of these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..planning.schedule import Ranks


def ranks_of(param: Tensor, replicas: dist.ProcessGroup | None) -> Ranks:
    """The global ranks that hold parts or copies of a parameter, sorted; none for this process alone.

    Of a mesh only its ranks count here; what each axis does is in the layout.
    """
    if isinstance(param, DTensor):
        return tuple(sorted(param.device_mesh.mesh.flatten().tolist()))
    return members(replicas)


def members(group: dist.ProcessGroup | None) -> Ranks:
    """The global ranks of a process group, sorted; none for this process alone."""
    return tuple(sorted(dist.get_process_group_ranks(group))) if group is not None else ()


def in_order(ranks: Ranks) -> tuple[int, int, Ranks]:
    """The key by which every rank sorts the sets of ranks that it belongs to, for collectives in one global order.

    A set comes before those that contain it, and the sets of a mesh axis before those of the axes outside of it.  So
    what a rank has to tell reaches all ranks of a mesh in one pass, set by set.
    """
    return ranks[-1] - ranks[0] if ranks else -1, len(ranks), ranks


class ProcessGroups:
    """Groups that exist, and groups of our own for what they lack, by their ranks."""

    def __init__(self) -> None:
        self._own: dict[Ranks, dist.ProcessGroup] = {}

    def of(self, ranks: Ranks, *existing: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """A process group of exactly these ranks, this one among them; None for one rank.

        Collective over ``ranks`` (and no others) if it has to be made.

        Args:
            existing: groups to look at, besides that of the world.
        """
        if len(ranks) < 2:
            return None
        for group in (dist.group.WORLD, *existing):
            if members(group) == ranks and _carries(group):
                return group
        if ranks not in self._own:
            self._own[ranks] = _made(ranks)
        return self._own[ranks]


_of_worlds: WeakKeyDictionary[dist.ProcessGroup, ProcessGroups] = WeakKeyDictionary()
"""What `group_of` has made, by the default process group of its time: it ends with it."""


def group_of(ranks: Ranks, *existing: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """As `ProcessGroups.of`, one for all that this process does, as long as there is its world.

    Raises:
        ValueError: this rank is not among them.
    """
    if ranks and dist.get_rank() not in ranks:
        raise ValueError(
            f"rank {dist.get_rank()} is not on the mesh of a parameter (ranks {ranks}); give each rank parameters that "
            "it holds, and no others"
        )
    world = dist.group.WORLD
    return _of_worlds.setdefault(world, ProcessGroups()).of(ranks, *existing) if world is not None else None


def groups_of_mesh(mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """Those of the axes of a mesh."""
    return mesh.get_all_groups() if mesh is not None else []


def _carries(group: dist.ProcessGroup | None) -> bool:
    """Whether a group carries anything: trainers give mesh axes that they do not use a backend that does not."""
    return (dist.get_backend(group) == "fake") == (dist.get_backend() == "fake")


def _made(ranks: Ranks) -> dist.ProcessGroup:
    """A new group, under a name that no other group has, the same on all its ranks."""
    world, store = c10d._get_default_group(), c10d._get_default_store()
    digest = hashlib.blake2b(repr(ranks).encode(), digest_size=16).hexdigest()
    # The store lives as long as the names in it, and each rank counts for itself there, so no process has to remember.
    name = f"muonckpt-{digest}-{store.add(f'muonckpt-{digest}-of-rank-{dist.get_rank()}', 1)}"
    backend = dist.Backend(c10d._world.pg_map[world][0])
    group: dist.ProcessGroup
    with _unbound(world):
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            backend,
            store,
            name,  # type: ignore[arg-type]  # of a type that older versions do not have
            timeout=_time_out(world, backend),
            group_desc="muonckpt",
        )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def _time_out(world: dist.ProcessGroup, backend: dist.Backend) -> timedelta:
    """That of the world: what ``init_process_group`` was told; of backends that do not say it, torch's default."""
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    default: timedelta = c10d._get_default_timeout(backend)
    return getattr(options, "_timeout", default)


@contextmanager
def _unbound(world: dist.ProcessGroup) -> Iterator[None]:
    """torch splits the communicator of a world that is bound to a device, which all of the world would have to join."""
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device
