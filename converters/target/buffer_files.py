"""Raw flat buffers as a destination: what each rank holds of each buffer, padding included, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ...layouts.buffers.group_buffer import GroupBuffer
from ...layouts.buffers.layout import BufferLayout
from ...layouts.buffers.parameters import Parameter
from ...layouts.buffers.ranges import divided, end_to_end
from ...store.formats import flat_buffers
from ...store.formats.flat_buffers import FILE, ITEMS
from ..engine.output_files import Bare, Item, TargetFile, entries_in
from ..engine.outputs import Entry
from .rank_files import Filled, Part


def raw(buffers: Sequence[GroupBuffer], entries: Sequence[Entry], parts: Sequence[Sequence[Part]]) -> Filled:
    """One file a rank, each tensor at its place in the buffers; items that are no tensors end to end in one more."""
    stored = flat_buffers.place(buffers or tuple(_own(parts)))
    ends = flat_buffers.ends(stored)
    places = {(rank, key, chunk.box): chunk for each in stored for rank, key, chunk in each.chunks()}
    carried, length = entries_in(ITEMS, entries)
    found = [TargetFile(ITEMS, carried, (), length)]
    for rank, mine in enumerate(parts):
        items = []
        for wanted, box, copies in mine:
            chunk = places[rank, wanted.record.key, box]
            items.append(Item(wanted, chunk, Bare(chunk.item.length), copies))
        items.sort(key=lambda item: item.chunk.item.offset)
        found.append(TargetFile(FILE(rank), (), tuple(items), ends.get(FILE(rank), 0)))
    return Filled(tuple(file for file in found if file.length), tuple(each.to_json() for each in stored))


def _own(parts: Sequence[Sequence[Part]]) -> Iterator[GroupBuffer]:
    """What each rank has of a layout without buffers, such as rows, end to end in buffers of its own."""
    for rank, mine in enumerate(parts):
        members: defaultdict[tuple[str | None, str], list[Part]] = defaultdict(list)
        for part in mine:
            members[part[0].record.slot, part[0].record.dtype].append(part)
        for (slot, dtype), own in members.items():
            parameters = [Parameter(wanted.record.key, box.shape, dtype) for wanted, box, _ in own]
            slots, buckets = end_to_end([parameters])
            layout = BufferLayout("end-to-end", 1, 1, tuple(slots.values()), buckets, divided(buckets, 1))
            yield GroupBuffer(slot, rank, (rank,), tuple(box.lo for _, box, _ in own), layout)
