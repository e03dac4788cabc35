"""The ranks that hold a parameter, and process groups of exactly those."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

Ranks = tuple[int, ...]

_made: WeakKeyDictionary[dist.ProcessGroup, dict[Ranks, dist.ProcessGroup]] = WeakKeyDictionary()
"""The groups that `group_of` has made, by the default process group of their time: they end with it."""


def ranks_of(param: Tensor, replicas: dist.ProcessGroup | None) -> Ranks:
    """The global ranks that hold parts or copies of a parameter, sorted; none for this process alone.

    A mesh of any number of axes is no more than its ranks here: what each axis does is in the layout.
    """
    if isinstance(param, DTensor):
        return tuple(sorted(param.device_mesh.mesh.flatten().tolist()))
    return tuple(sorted(dist.get_process_group_ranks(replicas))) if replicas is not None else ()


def group_of(ranks: Ranks, param: Tensor) -> dist.ProcessGroup | None:
    """A process group of exactly these ranks, one of which is ours; made once if there is none at hand.

    Collective over ``ranks`` (and no others) when it has to be made.

    Raises:
        ValueError: this rank holds nothing of the parameter.
    """
    if not ranks:
        return None
    if dist.get_rank() not in ranks:
        raise ValueError(
            f"rank {dist.get_rank()} is not on the mesh (ranks {ranks}) of a parameter of shape {tuple(param.shape)}; "
            "give each rank's optimizer only parameters that it holds"
        )
    world = dist.group.WORLD
    if world is None or len(ranks) == world.size():
        return world
    if isinstance(param, DTensor) and param.device_mesh.ndim == 1:
        return param.device_mesh.get_group()
    made = _made.setdefault(world, {})
    if ranks not in made:
        made[ranks] = new_group(ranks)
    return made[ranks]


def new_group(ranks: Ranks) -> dist.ProcessGroup:
    """Collective over ``ranks`` and no others."""
    made: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return made
