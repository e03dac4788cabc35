"""A list of plans as one collective: exact splits, 16-bit payload, no padding.

A :class:`Route` is what the plans mean for one rank: which strided parts of its tensors go where in one flat send
buffer, and which parts of the flat receive buffer go where in its tensors.  Both sides derive their splits from the
same plans, so nothing is negotiated.  With `layer_wise`, this is the only file of the step that talks to other ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..box import Index
from ..layout import Place
from ..plan import Copy, Plan

Ranks = tuple[int, ...]

HEADER = 4
"""16-bit elements in front of what each rank sends to each other: a 64-bit digest of what it is about to do."""


@dataclass(frozen=True, slots=True)
class Strip:
    """A box in a tensor's memory (``offset``, ``sizes``, ``strides``) and on the wire (dense, from ``at``)."""

    plan: int
    sizes: Index
    strides: Index
    offset: int
    at: int

    def of(self, memory: Tensor) -> Tensor:
        """This box as a view of a contiguous tensor."""
        return memory.as_strided(self.sizes, self.strides, memory.storage_offset() + self.offset)

    def on(self, wire: Tensor) -> Tensor:
        """This box as a view of the flat wire buffer."""
        return wire.narrow(0, self.at, math.prod(self.sizes)).view(self.sizes)


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's part of a list of plans.  Counts are elements per rank of the group, headers included.

    ``sends`` and ``receives`` are by tensor: on the side of the parameters that is the parameter's number, on the side
    of the owners the matrix's.
    """

    sends: Mapping[int, tuple[Strip, ...]]
    receives: Mapping[int, tuple[Strip, ...]]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]


def route(
    plans: Sequence[Plan],
    ranks: Sequence[int],
    rank: int,
    source_tensor: Sequence[int],
    target_tensor: Sequence[int],
) -> Route:
    """What ``plans`` mean for ``rank``.

    Args:
        ranks: global ranks in the order of the process group.
        source_tensor: for each plan, the number of the tensor that it reads.
        target_tensor: for each plan, the number of the tensor that it writes.
    """
    copies = [(index, copy) for index, plan in enumerate(plans) for copy in plan.copies]
    outgoing = [(index, copy.target, copy.source, copy) for index, copy in copies if copy.source.buffer == rank]
    incoming = [(index, copy.source, copy.target, copy) for index, copy in copies if copy.target.buffer == rank]
    sends, send_counts = _strips(outgoing, ranks, source_tensor)
    receives, receive_counts = _strips(incoming, ranks, target_tensor)
    return Route(sends, receives, send_counts, receive_counts)


def _strips(
    copies: Iterable[tuple[int, Place, Place, Copy]], ranks: Sequence[int], tensor: Sequence[int]
) -> tuple[Mapping[int, tuple[Strip, ...]], tuple[int, ...]]:
    """Lay copies end to end, by the rank on the other side and then in plan order, after each rank's header."""
    peer_of = {rank: index for index, rank in enumerate(ranks)}
    counts = [HEADER] * len(ranks)
    by_peer: list[list[tuple[int, Place, Copy]]] = [[] for _ in ranks]
    for index, there, here, copy in copies:
        peer = peer_of[there.buffer]  # type: ignore[index]
        by_peer[peer].append((index, here, copy))
        counts[peer] += copy.box.numel
    strips: defaultdict[int, list[Strip]] = defaultdict(list)
    start = 0
    for peer, count in enumerate(counts):
        at = start + HEADER
        for index, here, copy in by_peer[peer]:
            strips[tensor[index]].append(Strip(index, copy.box.shape, here.strides, here.offset, at))
            at += copy.box.numel
        start += count
    return {number: tuple(found) for number, found in strips.items()}, tuple(counts)


class Wire:
    """Flat buffers of one exchange: fill ``send`` by :meth:`pack`, :meth:`run`, then read by :meth:`unpack`."""

    def __init__(self, route: Route, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.route = route
        self.group = group
        self.send = torch.empty(sum(route.send_counts), dtype=dtype, device=device)
        self.received: Tensor | None = None

    def pack(self, tensor: int, memory: Tensor) -> None:
        """Round the parts of a contiguous tensor that leave (or stay) to the wire dtype."""
        for strip in self.route.sends.get(tensor, ()):
            strip.on(self.send).copy_(strip.of(memory))

    def run(self, intent: bytes) -> None:
        """Exchange.  ``intent`` is compared between all ranks.

        Raises:
            RuntimeError: on every rank, if any two ranks intended different things.
        """
        note = torch.frombuffer(bytearray(hashlib.blake2b(intent, digest_size=8).digest()), dtype=torch.uint8)
        note = note.to(self.send.device)
        for start in _starts(self.route.send_counts):
            _header(self.send, start).copy_(note)
        if self.group is None:
            self.received = self.send
        else:
            self.received = torch.empty(sum(self.route.receive_counts), dtype=self.send.dtype, device=self.send.device)
            dist.all_to_all_single(
                self.received, self.send, list(self.route.receive_counts), list(self.route.send_counts), self.group
            )
        notes = torch.stack([_header(self.received, start) for start in _starts(self.route.receive_counts)])
        disagree = (notes != note).any(dim=1).nonzero().flatten().tolist()
        if disagree:
            raise RuntimeError(
                f"ranks disagree about this optimizer step: ranks {disagree} of the group have gradients for other "
                "parameters than this one. A parameter's gradient must be present on all ranks that hold it or on "
                "none. The momentum of the others has taken this gradient in; do not repeat the step"
            )

    def unpack(self, tensor: int) -> Iterable[tuple[Strip, Tensor]]:
        """What arrived for a tensor: each strip with its values, dense, in the wire dtype."""
        assert self.received is not None, "unpack() before run()"
        for strip in self.route.receives.get(tensor, ()):
            yield strip, strip.on(self.received)


def ranks_of(param: Tensor, replicas: dist.ProcessGroup | None) -> Ranks:
    """The global ranks that hold parts or copies of a parameter, sorted; none for this process alone.

    A mesh of any number of axes is no more than its ranks here: what each axis does is in the layout.
    """
    if isinstance(param, DTensor):
        return tuple(sorted(param.device_mesh.mesh.flatten().tolist()))
    return tuple(sorted(dist.get_process_group_ranks(replicas))) if replicas is not None else ()


def group_of(ranks: Ranks, param: Tensor) -> dist.ProcessGroup | None:
    """A process group of exactly these ranks, one of which is ours; made if there is none at hand.

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
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    if isinstance(param, DTensor) and param.device_mesh.ndim == 1:
        return param.device_mesh.get_group()
    made: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return made


def agree(digest: bytes, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Compare 16 bytes between all ranks of a group.

    Raises:
        RuntimeError: on every rank, if they differ.
    """
    if group is None:
        return
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group)
    differ = [rank for rank, theirs in enumerate(everyone) if not torch.equal(theirs, mine)]
    if differ:
        raise RuntimeError(
            f"ranks {differ} of the group planned another exchange than this one: every rank must build the optimizer "
            "from the same parameters, in the same groups and order"
        )


def _header(wire: Tensor, start: int) -> Tensor:
    """The first HEADER * 2 bytes of a rank's part, as bytes, whatever the wire dtype."""
    return wire.narrow(0, start, HEADER).view(torch.uint8)[: HEADER * 2]


def _starts(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]
