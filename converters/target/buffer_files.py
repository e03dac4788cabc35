"""Raw flat buffers as a destination: the part of each rank of each buffer, with padding, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import ClassVar

from ...layouts.buffers.buffer_layout import BufferLayout
from ...layouts.buffers.group_buffer import GroupBuffer
from ...layouts.buffers.parameters import Parameter
from ...layouts.buffers.ranges import divided, end_to_end
from ...record import Manifest
from ...store.formats import flat_buffers
from ...store.formats.flat_buffers import ITEMS, RANK_FILE
from ...store.io.location import Location
from ..engine.output_files import NoFrame, OutputChunk, OutputFile, place_items
from ..engine.outputs import OutputItem
from .rank_files import Filled, LocalBox, RankFiles


class BufferFiles(RankFiles):
    """Flat buffers as they lie in the memory of ranks, and an index: docs/formats/flat_buffers.md.

    Each tensor is at its place in the buffers; non-tensor items are end to end in a file of their own.
    """

    name: ClassVar[str] = "buffers"

    def fill(
        self, buffers: Sequence[GroupBuffer], items: Sequence[OutputItem], boxes: Sequence[Sequence[LocalBox]]
    ) -> Filled:
        stored = flat_buffers.place(buffers or tuple(_end_to_end(boxes)))
        ends = flat_buffers.ends(stored)
        places = {(rank, key, chunk.box): chunk for buffer in stored for rank, key, chunk in buffer.chunks()}
        placed, length = place_items(ITEMS, items)
        files = [OutputFile(ITEMS, placed, (), length)]
        for rank, local_boxes in enumerate(boxes):
            chunks = []
            for local in local_boxes:
                place = places[rank, local.output.key, local.box]
                chunks.append(OutputChunk(local.output, place, NoFrame(place.item.length), local.copies))
            chunks.sort(key=lambda chunk: chunk.stored.item.offset)
            files.append(OutputFile(RANK_FILE(rank), (), tuple(chunks), ends.get(RANK_FILE(rank), 0)))
        return Filled(tuple(files), tuple(buffer.to_json() for buffer in stored))

    def describe(self, manifest: Manifest, folder: Location) -> None:
        flat_buffers.write_buffer_index(manifest, folder)


def _end_to_end(boxes: Sequence[Sequence[LocalBox]]) -> Iterator[GroupBuffer]:
    """Buffers of each rank's own, with its boxes end to end, for layouts that have no buffers, such as rows."""
    for rank, local_boxes in enumerate(boxes):
        members: defaultdict[tuple[str | None, str], list[LocalBox]] = defaultdict(list)
        for local in local_boxes:
            members[local.output.record.slot, local.output.record.dtype].append(local)
        for (slot, dtype), group in members.items():
            parameters = [Parameter(local.output.key, local.box.shape, dtype) for local in group]
            ranges, buckets = end_to_end([parameters])
            layout = BufferLayout("end-to-end", 1, 1, tuple(ranges.values()), buckets, divided(buckets, 1))
            yield GroupBuffer(slot, rank, (rank,), tuple(local.box.lo for local in group), layout)
