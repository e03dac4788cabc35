"""What one collective moves of the flat buffers: gradients to where they are held, and weights from there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...errors import lost_ranks
from ...layouts.buffers.buffer_layout import BufferLayout
from .buffer_memory import BucketMemory, FlatBuffer, Part
from .members import Members, SharingGroup

# torch 2.13 has new names for these, and warns of the old ones.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Bucket(BucketMemory):
    """What one reduction and one gather move, of one buffer.

    Args:
        exact: unequal shards are reduced to their owners only, else by one all-reduce.
    """

    def __init__(self, buffer: FlatBuffer, number: int, group: SharingGroup, exact: bool) -> None:
        super().__init__(buffer, number)
        self.group, self._exact = group, exact

    def reduce(self) -> list[dist.Work]:
        """Begin to add up gradients where they are held, in place; elsewhere the memory is undefined then."""
        memory, group = self.gradients, self.group
        if group is None:
            return []
        if self.even:
            return [REDUCE_SCATTER(self.held(memory)[dist.get_rank(group)][1], memory, group=group, async_op=True)]
        if not self._exact:
            return [dist.all_reduce(memory, group=group, async_op=True)]
        return [dist.reduce(shard, group=group, group_dst=to, async_op=True) for to, shard in self.held(memory)]

    def gather(self) -> list[dist.Work]:
        """Begin to bring the weights from where they are held to every rank, in place."""
        memory, group = self.weights, self.group
        if group is None:
            return []
        if self.even:
            return [ALL_GATHER(memory, self.held(memory)[dist.get_rank(group)][1], group=group, async_op=True)]
        return [dist.broadcast(shard, group=group, group_src=of, async_op=True) for of, shard in self.held(memory)]


def filled(
    layouts: Sequence[BufferLayout], members: Members, gradient_dtype: torch.dtype | None, exact: bool
) -> tuple[dict[str, Part], list[Bucket]]:
    """Buffers with the values of rank 0: this rank's parts by name, and buckets as a backward pass fills them."""
    parts: dict[str, Part] = {}
    buckets: list[Bucket] = []
    for layout in layouts:
        group = members.group_of_buffer(layout)
        buffer = FlatBuffer(layout, members.named, dist.get_rank(group) if group else 0, gradient_dtype)
        if group is not None:
            dist.broadcast(buffer.weights, group=group, group_src=0)
        parts |= buffer.parts()
        buckets += [Bucket(buffer, number, group, exact) for number in range(len(layout.buckets))]
    order = {name: number for number, name in enumerate(members.named)}
    # A bucket is full when the first of its parameters in the forward pass has its gradient.
    buckets.sort(key=lambda bucket: min(order[name] for name in bucket.gradient_of), reverse=True)
    return parts, buckets


def warm_up(buckets: Sequence[Bucket]) -> None:
    """Make the connections of all that training moves, by the first bucket of each kind: gradients are zeros still, and
    weights the same on all ranks.  Collective.  Why: `exchange.connect`."""
    for bucket in {(bucket.group, bucket.even): bucket for bucket in reversed(buckets)}.values():
        for work in (*bucket.reduce(), *bucket.gather()):
            with lost_ranks():
                work.wait()
