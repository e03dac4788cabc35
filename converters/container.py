"""What a destination's files are: how items lie in them, and what describes them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from ..box import Index
from ..layouts.group_buffer import GroupBuffer
from ..record import Chunk, Extent, Manifest
from ..store import directory, flat_buffers, torch_dist, torch_zip
from ..store.remote import Location
from .buffers import raw
from .content import Entry
from .files import Fill, Filled, Frame, Item, Part, TargetFile, aligned, entries_in
from .torch_dist import beside


@dataclass(frozen=True, slots=True)
class Container:
    """One kind of destination.

    Args:
        fill: says what goes where in which file.
        describe: writes what readers need besides the files, synced, into the finished directory.
        descriptions: the names of what that is.
    """

    name: str
    fill: Fill
    describe: Callable[[Manifest, Location], None]
    descriptions: tuple[str, ...]


def framed(name_of: Callable[[int], str], frame_of: Callable[[str, Index], Frame]) -> Fill:
    """One file a rank, every item in a frame, made for its dtype and shape; items that are no tensors in the first."""

    def fill(buffers: Sequence[GroupBuffer], entries: Sequence[Entry], parts: Sequence[Sequence[Part]]) -> Filled:
        first = [entries, *[()] * (len(parts) - 1)]
        files = (_file(name_of(rank), first[rank], mine, frame_of) for rank, mine in enumerate(parts))
        return Filled(tuple(file for file in files if file.length), tuple(each.to_json() for each in buffers))

    return fill


def _file(
    name: str, entries: Sequence[Entry], parts: Sequence[Part], frame_of: Callable[[str, Index], Frame]
) -> TargetFile:
    """Items end to end, each aligned; those that are no tensors first, as DCP does."""
    placed, at = entries_in(name, entries)
    items = []
    for wanted, box, copies in parts:
        frame = frame_of(wanted.record.dtype, box.shape)
        item = Extent(name, at, frame.length)
        payload = Extent(name, at + frame.payload_offset, frame.payload_length)
        items.append(Item(wanted, Chunk(box, item, payload), frame, copies))
        at = aligned(item.end)
    return TargetFile(name, placed, tuple(items), at)


DCP = Container(
    "dcp",
    framed("__{}_0.distcp".format, lru_cache(maxsize=1024)(torch_zip.frame)),  # few dtypes and shapes
    directory.write_manifest,
    ("muonckpt.json", ".metadata"),
)
"""A directory that `torch.distributed.checkpoint` reads, with our manifest."""

BUFFERS = Container("buffers", raw, flat_buffers.write_index, (flat_buffers.INDEX,))
"""Flat buffers as they lie in the memory of ranks, and an index: docs/formats/flat_buffers.md."""

TORCH_DIST = Container("torch_dist", beside(DCP.fill), torch_dist.write_manifest, torch_dist.DESCRIPTIONS)
"""A directory that Megatron's `dist_checkpointing` reads as well: docs/formats/torch_dist.md."""

CONTAINERS: Mapping[str, Container] = MappingProxyType({each.name: each for each in (DCP, BUFFERS, TORCH_DIST)})
"""By name."""
