"""The chunks of a file to write, in columns: a checkpoint can have a million of them.

What chunks of equal tensors have in common is a :class:`ChunkPlan`, of which there are few; a file has for each chunk
its tensor, its plan and its offset (:class:`OutputChunks`); an :class:`OutputChunk` is made when it is asked for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Protocol, overload

import numpy as np

from ...box import Box, Index, row_major
from ...columns import Column
from ...errors import about
from ...layout import Buffer, Place, TensorLayout
from ...plan import Copy
from ...record import Chunk, Extent, StateRecord
from ...store.io.checksums import Checksum, crc32_of
from ...store.reading.dtypes import itemsize
from .outputs import OutputTensor, copies_into, source_rows


class PayloadFrame(Protocol):
    """The bytes around the elements of a stored chunk; lengths and offsets are in bytes."""

    @property
    def head(self) -> bytes: ...

    @property
    def payload_offset(self) -> int: ...

    @property
    def payload_length(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def checksum_of(self) -> Checksum:
        """The checksum of the elements that the tail contains."""
        ...

    def tail(self, checksum: int) -> bytes:
        """The bytes after elements with this checksum."""
        ...


SourceItems = tuple[str, Sequence[int]]
"""A file of the source, and offsets of items in it, in bytes."""

FrameOf = Callable[[str, Index], PayloadFrame]
"""Makes the frame of elements of this dtype (torch's name) in a box of this shape."""


@dataclass(frozen=True, slots=True)
class NoFrame:
    """The frame of elements that are stored with nothing around them."""

    payload_length: int
    head: ClassVar[bytes] = b""
    payload_offset: ClassVar[int] = 0

    @property
    def length(self) -> int:
        return self.payload_length

    @property
    def checksum_of(self) -> Checksum:
        return crc32_of

    def tail(self, checksum: int) -> bytes:
        return b""


def bare(dtype: str, shape: Index) -> PayloadFrame:
    """No frame around the elements."""
    return NoFrame(math.prod(shape) * itemsize(dtype))


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPlan:
    """How a box of ``dtype`` is written: the frame around its elements, and the copies that fill its payload.

    The copies go from buffers of the tensor to places in the payload.  Chunks of tensors that lie alike share a plan;
    it equals no other, so that they are known by it.  ``in_runs`` says whether each copy is one run of elements on both
    sides.
    """

    box: Box
    dtype: str
    frame: PayloadFrame
    copies: tuple[Copy, ...]
    in_runs: bool = field(init=False)

    def __post_init__(self) -> None:
        in_runs = all(_is_run(place, copy.box.shape) for copy in self.copies for place in (copy.source, copy.target))
        object.__setattr__(self, "in_runs", in_runs)

    @property
    def buffers(self) -> Iterable[Buffer]:
        """The buffers that it copies from, each once."""
        return dict.fromkeys(copy.source.buffer for copy in self.copies)


def _is_run(place: Place, shape: Index) -> bool:
    return all(n == 1 or a == b for n, a, b in zip(shape, place.strides, row_major(shape), strict=True))


def chunk_plans(output: OutputTensor, boxes: Sequence[Box], frame_of: FrameOf) -> tuple[ChunkPlan, ...]:
    """The plans of boxes that tile a tensor; tensors that lie alike get the same.

    Raises:
        LayoutError: the elements of the tensor have another shape; names the tensor.
    """
    with about(f"tensor {output.key!r}"):
        return _plans(output.layouts, tuple(boxes), output.record.dtype, frame_of)


@lru_cache(maxsize=1024)
def _plans(
    sources: tuple[TensorLayout, ...], boxes: tuple[Box, ...], dtype: str, frame_of: FrameOf
) -> tuple[ChunkPlan, ...]:
    return tuple(
        ChunkPlan(box, dtype, frame_of(dtype, box.shape), copies)
        for box, copies in zip(boxes, copies_into(boxes, sources), strict=True)
    )


def is_direct(output: OutputTensor, plan: ChunkPlan) -> bool:
    """Whether elements are moved as they are, and each copy is one run of elements in both the source and the file."""
    return plan.in_runs and not output.computed


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A chunk of a tensor to write: its plan, and the offset of its item in a file, in bytes."""

    output: OutputTensor
    plan: ChunkPlan
    file: str
    offset: int

    @property
    def record(self) -> StateRecord:
        return self.output.record

    @property
    def item(self) -> Extent:
        return Extent(self.file, self.offset, self.plan.frame.length)

    @property
    def payload(self) -> Extent:
        frame = self.plan.frame
        return Extent(self.file, self.offset + frame.payload_offset, frame.payload_length)

    @property
    def sources(self) -> list[Chunk]:
        """The chunks of the source that it is copied from, in the order in which they lie in files."""
        stored = self.output.chunks
        sources = {chunk.item: chunk for chunk in (stored[own] for own in self.plan.buffers if own in stored)}
        return [sources[item] for item in sorted(sources, key=lambda item: (item.file, item.offset))]


@dataclass(frozen=True, slots=True, eq=False)
class OutputChunks(Sequence[OutputChunk]):
    """The chunks of one file, in the order of their places: an entry of each column for each chunk.

    ``offsets`` are those of the items, in bytes.
    """

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
        """Chunks one after the other, the first at ``start``; each begins at a multiple of ``alignment`` bytes."""
        lengths = np.fromiter((plan.frame.length for plan in plans), np.int64, len(plans))
        ends = start + np.cumsum(-(-lengths // alignment) * alignment)
        return cls(file, outputs, plans, np.concatenate([[start], ends[:-1]])[: len(plans)].astype(np.int64))

    def __len__(self) -> int:
        return len(self.plans)

    @overload
    def __getitem__(self, index: int) -> OutputChunk: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[OutputChunk, ...]: ...
    def __getitem__(self, index: int | slice) -> OutputChunk | tuple[OutputChunk, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(len(self))[index])
        return OutputChunk(self.outputs[index], self.plans[index], self.file, int(self.offsets[index]))

    @property
    def end(self) -> int:
        """The offset behind the last chunk, in bytes; 0 if there is none."""
        return int(self.offsets[-1]) + self.plans[-1].frame.length if self.plans else 0

    def alike(self, numbers: Iterable[int] | None = None) -> dict[ChunkPlan, list[int]]:
        """The numbers of the chunks that have the same plan; of all of them, or of these."""
        groups: defaultdict[ChunkPlan, list[int]] = defaultdict(list)
        for number in range(len(self)) if numbers is None else numbers:
            groups[self.plans[number]].append(number)
        return groups

    def sources(self, numbers: Iterable[int] | None = None) -> Iterator[SourceItems]:
        """The items of the source that chunks are copied from, all of them or these; some items several times."""
        for plan, alike in self.alike(numbers).items():
            outputs = [self.outputs[number] for number in alike]
            for buffer in plan.buffers:
                offsets: defaultdict[str, list[int]] = defaultdict(list)
                for file, offset, *_ in source_rows([own for own in outputs if buffer in own.chunks], buffer):
                    offsets[file].append(offset)
                yield from offsets.items()
