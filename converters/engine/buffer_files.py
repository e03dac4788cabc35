"""Raw flat buffers as a destination: the part of each rank of each buffer, with padding, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...algebra.box import Box
from ...layouts.buffers.buffer_layout import BufferLayout, bucket_shards, end_to_end
from ...layouts.buffers.parameters import Parameter
from ...layouts.buffers.records import GroupBuffer
from ...record.record import Manifest
from ...store.formats import flat_buffers
from ...store.formats.flat_buffers import ITEMS, RANK_FILE
from ...store.io.location import Location
from .output_files import OutputChunks, OutputFile, bare, items_file
from .outputs import OutputItem
from .rank_files import LocalBoxes, RankFiles


class BufferFiles(RankFiles):
    """Flat buffers in the form of the ranks' memory, and an index: docs/formats/flat_buffers.md.

    Each tensor is at its place in the buffers; non-tensor items are end to end in a file of their own.
    """

    name = "buffers"

    frame_of = staticmethod(bare)

    def fill(
        self, buffers: Sequence[GroupBuffer], items: Sequence[OutputItem], boxes: Sequence[LocalBoxes]
    ) -> tuple[list[OutputFile], list[dict[str, Any]]]:
        # The file of a rank has its boxes in the order of its buffers, which the format places one after the other.
        stored = flat_buffers.place(buffers or tuple(_end_to_end(boxes)))
        ends = flat_buffers.ends(stored)
        offsets: dict[tuple[int, str, Box], int] = {}
        for buffer in stored:
            offsets |= {(rank, key, chunk.box): chunk.item.offset for rank, key, chunk in buffer.chunks()}
        files = [items_file(ITEMS, items)]
        for rank, local in enumerate(boxes):
            name, placed = RANK_FILE(rank), sorted(local, key=lambda part: offsets[rank, part[0].key, part[1].box])
            outputs, plans = [output for output, _ in placed], [plan for _, plan in placed]
            starts = np.array([offsets[rank, output.key, plan.box] for output, plan in placed], np.int64)
            chunks = OutputChunks(name, outputs, plans=plans, offsets=starts)
            files.append(OutputFile(name, (), chunks=chunks, length=ends.get(name, 0)))
        return files, [buffer.to_json() for buffer in stored]

    def describe(self, manifest: Manifest, folder: Location) -> None:
        flat_buffers.write_buffer_index(manifest, folder)


def _end_to_end(boxes: Sequence[LocalBoxes]) -> Iterator[GroupBuffer]:
    """Yield buffers of each rank's own, with its boxes end to end, for layouts that have none, such as rows."""
    for rank, local in enumerate(boxes):
        members: defaultdict[tuple[str | None, str], list[tuple[str, Box]]] = defaultdict(list)
        for output, plan in local:
            members[output.record.slot, plan.dtype].append((output.key, plan.box))
        for (slot, dtype), group in members.items():
            parameters = [Parameter(key, box.shape, dtype) for key, box in group]
            ranges, buckets = end_to_end([parameters])
            layout = BufferLayout(
                "end-to-end",
                version=1,
                ranks=1,
                parameters=tuple(ranges.values()),
                buckets=buckets,
                shards=bucket_shards(buckets, 1),
            )
            yield GroupBuffer(slot, part=rank, group=(rank,), origins=tuple(box.lo for _, box in group), layout=layout)
