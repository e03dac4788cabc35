"""Makes process groups among their members alone, whatever other groups each of them has.

``torch.distributed.new_group`` names a group by the number of groups in this process.  Where members have different
numbers, the names differ, and all of them wait for the time-out; where a group was destroyed, a name comes a second
time.  So a group of ours is named by its ranks and the number of groups of the same ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def new_group(members: Collection[int], backend: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """Return a new group, under a name that is the same on all its ranks and that no other has.  Collective over them.

    Args:
        members: global ranks, this one among them.
        timeout: None: torch's default for this backend.
    """
    ranks = sorted(members)
    # One count of groups for each set of ranks, in the store that all of them share.
    world, store = c10d._get_default_group(), c10d._get_default_store()
    digest = hashlib.blake2b(repr(tuple(ranks)).encode(), digest_size=16).hexdigest()
    # The store lives as long as the names in it, and each rank counts for itself there, so no process has to remember.
    name = f"muonckpt-{digest}-{store.add(f'muonckpt-{digest}-of-rank-{dist.get_rank()}', 1)}"
    group: dist.ProcessGroup
    # Under our own name, which torch's public function does not take.
    with _unbound(world):
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            dist.Backend(backend),
            store,
            name,  # type: ignore[arg-type]  # of a type that older versions do not have
            timeout=timeout or c10d._get_default_timeout(dist.Backend(backend)),
            group_desc="muonckpt",
        )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}  # as torch's new_group does
    return group


def time_out(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the time-out of a group; None if it has no backend for the device, or the backend has none."""
    if device not in group._device_types:
        return None
    timeout: timedelta | None = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
    return timeout


@contextmanager
def _unbound(world: dist.ProcessGroup) -> Iterator[None]:
    """Keep torch from splitting the communicator of a world bound to a device: all of the world would have to join."""
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device
