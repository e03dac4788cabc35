"""The files of a destination: chunks and items, their places, and what the finished files hold; without the data.

A checkpoint can have a million chunks, so they are columns (:class:`OutputChunks`): for each its tensor, its plan and
its offset.  There are few plans (:class:`ChunkPlan`), because tensors of one geometry share them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import Box, Index
from ...algebra.layout import Fragment, Place, TensorLayout, dense
from ...algebra.overlap import IntArray
from ...algebra.plan import Copies, dense_strides, make_plan
from ...names.errors import about
from ...record.chunks import Boxes, Chunks
from ...record.columns import UNKNOWN, Column, Columns, check_name
from ...record.record import Blob, Extent
from ...store.formats.torch_save.stored_zip import aligned
from ...store.io.checksums import Frame, crc32_of
from ...store.reading.dtypes import itemsize
from .outputs import OutputItem, OutputTensor
from .source_rows import Mask, SourceRows

SUMS = np.dtype([("digest", "V16"), ("checksum", "<u4"), ("share", "<u8")])
"""Sums of the elements of a chunk, computed while they are written: xxh3-128, the checksum that the frame stores, and
the share of the tensor's fingerprint."""

ChunkSums = NDArray[np.void]
"""`SUMS` of each of some chunks."""


class FinishedFile(NamedTuple):
    """A finished file: the digests of its items in hex, and the sums of its chunks, in the job's order."""

    items: tuple[str, ...]
    chunks: ChunkSums


FrameOf = Callable[[str, Index], Frame]
"""Makes the frame around elements of a dtype (torch's name) in a box of a shape."""


def bare(dtype: str, shape: Index) -> Frame:
    """Return an empty frame, as a `FrameOf`."""
    return Frame(math.prod(shape) * itemsize(dtype))


@dataclass(frozen=True, slots=True, eq=False)
class BoxCopies:
    """The copies that fill a box, dense from element 0, from the layout of a tensor, in the order of filling.

    Attributes:
        starts: the first index of each copy's box in the tensor, ``[n, d]``.
        table: their columns; ``source`` has numbers of buffers of the output.
        in_runs: whether each copy is one run of elements on both sides.
    """

    starts: IntArray
    table: Copies
    in_runs: bool

    @property
    def buffers(self) -> Iterable[int]:
        """The buffers that are copied from, each once."""
        return dict.fromkeys(self.table.source.tolist())

    def fragments(self) -> Iterator[Fragment]:
        """Yield the box of each copy, and its place in its source."""
        table = self.table
        columns = (self.starts, self.starts + table.sizes, table.source, table.source_offset, table.source_strides)
        for lo, hi, buffer, offset, strides in zip(*(column.tolist() for column in columns), strict=True):
            yield Fragment(Box(tuple(lo), tuple(hi)), Place(buffer, offset, tuple(strides)))

    def extents(self) -> tuple[list[int], list[int]]:
        """Return the first element of each copy in the box, and the last one of all copies up to it; both ascend."""
        last = self.table.target_offset + ((self.table.sizes - 1) * self.table.target_strides).sum(1)
        return self.table.target_offset.tolist(), np.maximum.accumulate(last).tolist()

    def max_numel(self, reach: int) -> int:
        """Return how many elements can be gathered from each copy's source at once, if that spans so many elements."""
        table = self.table
        spans = 1 + ((table.sizes - 1) * table.source_strides).sum(1)
        return int((reach * table.numel // spans).min(initial=reach))


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPlan:
    """A plan to write a box: the frame around its elements, and the copies from the tensor's layout.

    Chunks of tensors of one geometry share a plan.  It equals no other, so that chunks are grouped by it.
    """

    box: Box
    dtype: str
    frame: Frame
    copies: BoxCopies


def chunk_plans(output: OutputTensor, boxes: Sequence[Box], frame_of: FrameOf) -> tuple[ChunkPlan, ...]:
    """Return the plans of boxes that tile a tensor; tensors of one geometry get the same.

    Raises:
        LayoutError: the elements of the tensor have another shape; names the tensor.
    """
    with about(f"tensor {output.key!r}"):
        return _shared_plans(output.layout, tuple(boxes), output.record.dtype, frame_of)


@lru_cache(maxsize=1024)
def _shared_plans(source: TensorLayout, boxes: tuple[Box, ...], dtype: str, frame_of: FrameOf) -> tuple[ChunkPlan, ...]:
    boxed = zip(boxes, _copies_of_boxes(source, boxes), strict=True)
    return tuple(ChunkPlan(box, dtype, frame=frame_of(dtype, box.shape), copies=copies) for box, copies in boxed)


@lru_cache(maxsize=1024)
def _copies_of_boxes(source: TensorLayout, boxes: tuple[Box, ...]) -> tuple[BoxCopies, ...]:
    """Return the copies that fill each box; tensors of the same geometry share them."""
    # Box n is buffer -1 - n, so that none has the name of a chunk.
    filled = [(number, box) for number, box in enumerate(boxes) if box.numel]
    target = tuple(dense(box, -1 - number) for number, box in filled)
    plan = make_plan(source, TensorLayout.of(source.shape, target))
    # The copies of each box stand together, in the order of filling.
    box_numbers = -1 - np.array(plan.targets, np.int64)[plan.table.target]
    order = np.lexsort((plan.table.target_offset, box_numbers))
    table = replace(plan.table, source=np.array(plan.sources, np.int64)[plan.table.source]).rows(order)
    # A copy is one run if its strides are those of a dense box, but for dims of size 1.
    is_single, expected = table.sizes == 1, dense_strides(table.sizes)
    strides = (table.source_strides, table.target_strides)
    in_runs = np.all([is_single | (side == expected) for side in strides], (0, 2))
    ends = np.searchsorted(box_numbers[order], np.arange(len(boxes) + 1)).tolist()
    starts = plan.starts[order]
    copies = []
    for start, end in pairwise(ends):
        box_rows = slice(start, end)
        copies.append(BoxCopies(starts[box_rows], table.rows(box_rows), bool(in_runs[box_rows].all())))
    return tuple(copies)


@dataclass(frozen=True, slots=True, eq=False)
class OutputChunks:
    """The chunks of one file in columns, in the order of their places; the offsets of their items are in bytes."""

    file: str
    outputs: Sequence[OutputTensor]
    plans: Sequence[ChunkPlan]
    offsets: Column

    @classmethod
    def end_to_end(
        cls,
        file: str,
        outputs: Sequence[OutputTensor],
        plans: Sequence[ChunkPlan],
        start: int = 0,
        alignment: int = 1,
    ) -> OutputChunks:
        """Place chunks one after the other from byte ``start`` on, each at a multiple of ``alignment`` bytes."""
        lengths = np.fromiter((plan.frame.length for plan in plans), np.int64, len(plans))
        ends = start + np.cumsum(-(-lengths // alignment) * alignment)
        return cls(file, outputs, plans, np.concatenate([[start], ends[:-1]])[: len(plans)].astype(np.int64))

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def end(self) -> int:
        """The offset after the last chunk, in bytes; 0 if there is none."""
        return int(self.offsets[-1]) + self.plans[-1].frame.length if self.plans else 0

    def grouped(self, numbers: Iterable[int]) -> Iterator[tuple[ChunkPlan, list[int]]]:
        """Group these numbers by plan and `OutputTensor.kind`: they copy from the same places of their sources."""
        groups: defaultdict[tuple[ChunkPlan, Hashable], list[int]] = defaultdict(list)
        for number in numbers:
            groups[self.plans[number], self.outputs[number].kind].append(number)
        for (plan, _), members in groups.items():
            yield plan, members

    def sources(self, rows: SourceRows, numbers: Iterable[int] | None = None) -> Mask:
        """Return a mask of the rows of the source from which all chunks, or these, are copied."""
        outputs_by_plan: defaultdict[ChunkPlan, list[OutputTensor]] = defaultdict(list)
        for number in range(len(self)) if numbers is None else numbers:
            outputs_by_plan[self.plans[number]].append(self.outputs[number])
        is_source = np.zeros(len(rows), np.bool_)
        for plan, outputs in outputs_by_plan.items():
            for buffer in plan.copies.buffers:
                is_source[rows.rows(outputs, buffer)] = True
        return is_source


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to write: its header, its items, then its chunks, in the order of their places, with zeros between them.

    The items come with their places, as `place_items` gives them.  ``length`` is in bytes.  A name with slashes is in
    folders.  ``header`` makes the first bytes of the file from the sums of its chunks, ``footer`` the last ones; how
    many does not depend on the sums.
    """

    name: str
    items: Sequence[tuple[OutputItem, Blob]]
    chunks: OutputChunks
    length: int
    header: Callable[[ChunkSums], bytes] | None = None
    footer: Callable[[ChunkSums], bytes] | None = None

    @property
    def payload(self) -> int:
        """Bytes of elements in this file."""
        return sum(plan.frame.payload_length for plan in self.chunks.plans)


def place_items(name: str, items: Sequence[OutputItem]) -> tuple[list[tuple[OutputItem, Blob]], int]:
    """Place items one after the other, each aligned, and return the offset after the last."""
    end = 0
    placed_items = []
    for item in items:
        blob = Blob(item.key, item.path, Extent(name, end, item.length))
        placed_items.append((item, blob))
        end = aligned(blob.item.end)
    return placed_items, end


def items_file(name: str, items: Sequence[OutputItem]) -> OutputFile:
    """Return a file of items only."""
    placed_items, length = place_items(name, items)
    return OutputFile(name, placed_items, chunks=OutputChunks.end_to_end(name, (), ()), length=length)


def written_tensors(
    outputs: Sequence[OutputTensor], files: Sequence[OutputFile], files_done: Mapping[str, FinishedFile]
) -> Iterator[tuple[Chunks, int]]:
    """Yield for each tensor its chunks, in the order of the files, and its fingerprint."""
    # The chunks of all files are sorted by tensor.
    numbers = {output.key: number for number, output in enumerate(outputs)}
    plans = list(chain.from_iterable(file.chunks.plans for file in files))
    chunk_outputs = chain.from_iterable(file.chunks.outputs for file in files)
    tensor_numbers = np.fromiter((numbers[output.key] for output in chunk_outputs), np.int32, len(plans))
    order = np.argsort(tensor_numbers, kind="stable")
    ends = np.cumsum(np.bincount(tensor_numbers, minlength=len(outputs))).tolist()
    sums_by_file = [files_done[file.name].chunks for file in files]

    def sorted_sums(name: str) -> NDArray[Any]:
        """Return one of the `SUMS` of all chunks; all of them together would be in memory twice."""
        column: NDArray[Any] = np.concatenate([np.empty(0, SUMS)[name], *(sums[name] for sums in sums_by_file)])[order]
        return column

    # Tensors that are cut in the same way share boxes; a tensor's fingerprint is the sum of its chunks' shares.
    columns = _columns(files, plans, order, sorted_sums("digest"), sorted_sums("checksum"))
    shared_boxes = dict[Boxes, Boxes]()
    shares = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sorted_sums("share"))])  # modulo 2**64
    for start, end, output in zip([0, *ends], ends, outputs, strict=False):
        tensor_plans = tuple([plans[number] for number in order[start:end].tolist()])
        boxes = _boxes_of_plans(tensor_plans, len(output.record.shape))
        boxes = shared_boxes.setdefault(boxes, boxes)
        yield Chunks(columns, start, boxes), (int(shares[end]) - int(shares[start])) % 2**64


@lru_cache(maxsize=1024)  # tensors of one geometry share their plans
def _boxes_of_plans(plans: tuple[ChunkPlan, ...], ndim: int) -> Boxes:
    return Boxes.of_all([plan.box for plan in plans], ndim)


def _columns(
    files: Sequence[OutputFile],
    plans: Sequence[ChunkPlan],
    order: NDArray[np.intp],
    digest: NDArray[np.void],
    checksum: NDArray[np.uint32],
) -> Columns:
    """Return the columns of the files' chunks, sorted by ``order``; digests and checksums are sorted already."""
    # Chunks of one plan have one frame.
    numbers: dict[ChunkPlan, int] = {}
    frame_numbers = np.fromiter((numbers.setdefault(plan, len(numbers)) for plan in plans), np.int32, len(plans))[order]
    frames = [plan.frame for plan in numbers]
    lengths = [(frame.length, frame.payload_offset, frame.payload_length) for frame in frames]
    # A checksum that is no CRC-32 is of use to the frame only.
    has_crc32 = np.array([frame.checksum_of is crc32_of for frame in frames], np.bool_)
    for file in files:
        check_name(file.name)
    return Columns(
        names=tuple(file.name for file in files),
        file=np.repeat(np.arange(len(files), dtype=np.int32), [len(file.chunks) for file in files])[order],
        item=np.concatenate([np.zeros(0, np.int64), *(file.chunks.offsets for file in files)])[order],
        frame=frame_numbers,
        frames=np.array(lengths, np.int64).reshape(-1, 3),
        digest=digest.view(np.uint8).reshape(-1, 16),
        has_digest=np.ones(len(order), np.bool_),
        crc32=np.where(has_crc32[frame_numbers], checksum.astype(np.int64), UNKNOWN),
    )
