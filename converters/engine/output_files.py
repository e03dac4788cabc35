"""The files of a destination: chunks and items, their places, and what the finished files hold; without the data.

A checkpoint can have a million chunks.  What chunks of equal tensors have in common is a :class:`ChunkPlan`, of which
there are few; a file has for each chunk its tensor, its plan and its offset (:class:`OutputChunks`); an
:class:`OutputChunk` is made when it is asked for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import ClassVar, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from ...box import Box, Index, row_major
from ...chunks import Boxes, Chunks
from ...columns import UNKNOWN, Column, Columns, check_name
from ...errors import about
from ...layout import Buffer, Place, TensorLayout
from ...plan import Copy
from ...record import Blob, Extent, StateRecord
from ...store.formats.torch_save.stored_zip import aligned
from ...store.io.checksums import Checksum, crc32_of
from ...store.reading.dtypes import itemsize
from .outputs import OutputItem, OutputTensor, copies_into
from .source_rows import Mask, SourceRows
from .staging import SUMS, ChunkSums, FinishedFile


class PayloadFrame(Protocol):
    """The bytes around the elements of a stored chunk.  Lengths and offsets are in bytes."""

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
        """The function for the checksum that the tail contains."""
        ...

    def tail(self, checksum: int) -> bytes:
        """Return the bytes after elements with this checksum."""
        ...


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
    """Return no frame around the elements."""
    return NoFrame(math.prod(shape) * itemsize(dtype))


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPlan:
    """A plan to write a box of ``dtype``: the frame around its elements, and the copies that fill its payload.

    ``terms`` are the copies from the buffers of each of the tensor's layouts to places in the payload.  Chunks of
    tensors that lie alike share a plan; it equals no other, so that they are known by it.  ``in_runs`` says whether
    each copy is one run of elements on both sides.
    """

    box: Box
    dtype: str
    frame: PayloadFrame
    terms: tuple[tuple[Copy, ...], ...]
    in_runs: bool = field(init=False)

    def __post_init__(self) -> None:
        in_runs = all(_is_run(place, copy.box.shape) for copy in self.copies for place in (copy.source, copy.target))
        object.__setattr__(self, "in_runs", in_runs)

    @property
    def copies(self) -> Iterator[Copy]:
        """Iterate over the copies of all terms."""
        return chain.from_iterable(self.terms)

    @property
    def buffers(self) -> Iterable[Buffer]:
        """The buffers that it copies from, each once."""
        return dict.fromkeys(copy.source.buffer for copy in self.copies)

    def amounts(self, dtypes: Sequence[str]) -> dict[Buffer, int]:
        """Return the bytes that it copies from each buffer, of elements of these dtypes, one for each term."""
        amounts = dict.fromkeys(self.buffers, 0)
        for copies, name in zip(self.terms, dtypes, strict=True):
            for copy in copies:
                amounts[copy.source.buffer] += copy.box.numel * itemsize(name)
        return amounts


def _is_run(place: Place, shape: Index) -> bool:
    return all(n == 1 or a == b for n, a, b in zip(shape, place.strides, row_major(shape), strict=True))


def chunk_plans(output: OutputTensor, boxes: Sequence[Box], frame_of: FrameOf) -> tuple[ChunkPlan, ...]:
    """Return the plans of boxes that tile a tensor; tensors that lie alike get the same.

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
        ChunkPlan(box, dtype, frame_of(dtype, box.shape), terms)
        for box, terms in zip(boxes, copies_into(boxes, sources), strict=True)
    )


def is_direct(output: OutputTensor, plan: ChunkPlan) -> bool:
    """Return whether elements are moved as they are, each copy being one run in the source and in the file."""
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
        """Group the numbers of all chunks, or of these, by plan."""
        groups: defaultdict[ChunkPlan, list[int]] = defaultdict(list)
        for number in range(len(self)) if numbers is None else numbers:
            groups[self.plans[number]].append(number)
        return groups

    def sources(self, rows: SourceRows, numbers: Iterable[int] | None = None) -> Mask:
        """Return which rows of the source chunks are copied from, all of them or these."""
        used = np.zeros(len(rows) + 1, np.bool_)  # one more, for what is in memory
        for plan, alike in self.alike(numbers).items():
            outputs = [self.outputs[number] for number in alike]
            for buffer in plan.buffers:
                used[rows.rows(outputs, buffer)] = True
        return used[:-1]


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """A non-tensor item, and where it goes (``blob``)."""

    output: OutputItem
    blob: Blob


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to write: its header, items and chunks of tensors, in the order of their places, with zeros between them.

    ``length`` in bytes.  A name with slashes lies in folders.  ``header`` makes the first bytes of the file from the
    sums of its chunks; how many bytes these are does not depend on the sums.
    """

    name: str
    items: tuple[PlacedItem, ...]
    chunks: OutputChunks
    length: int
    header: Callable[[ChunkSums], bytes] | None = None

    @property
    def count(self) -> int:
        """The number of chunks and items."""
        return len(self.items) + len(self.chunks)

    @property
    def payload(self) -> int:
        """Bytes of elements in this file."""
        return sum(plan.frame.payload_length for plan in self.chunks.plans)


def place_items(name: str, items: Sequence[OutputItem]) -> tuple[tuple[PlacedItem, ...], int]:
    """Place items one after the other, each aligned, and return the offset behind the last."""
    end = 0
    placed = []
    for item in items:
        blob = Blob(item.key, item.path, Extent(name, end, item.length))
        placed.append(PlacedItem(item, blob))
        end = aligned(blob.item.end)
    return tuple(placed), end


def written_tensors(
    outputs: Sequence[OutputTensor], files: Sequence[OutputFile], files_done: Mapping[str, FinishedFile]
) -> Iterator[tuple[Chunks, int]]:
    """Yield the chunks of each of these tensors, in the order of the files, and its fingerprint."""
    numbers = {output.key: number for number, output in enumerate(outputs)}
    plans = list(chain.from_iterable(file.chunks.plans for file in files))
    owners = (numbers[output.key] for file in files for output in file.chunks.outputs)
    owner = np.fromiter(owners, np.int32, len(plans))
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=len(outputs))).tolist()
    sums = np.concatenate([np.empty(0, SUMS), *(files_done[file.name].chunks for file in files)])[order]
    columns, known = _columns(files, plans, order, sums), dict[Boxes, Boxes]()
    shares = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sums["share"])])  # modulo 2**64
    for start, end, output in zip([0, *ends], ends, outputs, strict=False):
        boxes = _boxes(tuple([plans[number] for number in order[start:end].tolist()]), len(output.record.shape))
        yield Chunks(columns, start, known.setdefault(boxes, boxes)), (int(shares[end]) - int(shares[start])) % 2**64


@lru_cache(maxsize=1024)
def _boxes(plans: tuple[ChunkPlan, ...], ndim: int) -> Boxes:
    """Cached, because tensors that lie alike share their plans."""
    return Boxes.of_all([plan.box for plan in plans], ndim)


def _columns(
    files: Sequence[OutputFile], plans: Sequence[ChunkPlan], order: NDArray[np.intp], sums: ChunkSums
) -> Columns:
    """Return the columns of chunks of files, in this order, in which their sums are already."""
    known: dict[ChunkPlan, int] = {}
    number = np.fromiter((known.setdefault(plan, len(known)) for plan in plans), np.int32, len(plans))[order]
    frames = [plan.frame for plan in known]
    lengths = [(f.length, f.payload_offset, f.payload_length, f.checksum_of is crc32_of) for f in frames]
    length, start, payload_length, has_crc32 = np.array(lengths, np.int64).reshape(-1, 4).T
    offset = np.concatenate([np.zeros(0, np.int64), *(file.chunks.offsets for file in files)])[order]
    for file in files:
        check_name(file.name)
    return Columns(
        names=tuple(file.name for file in files),
        file=np.repeat(np.arange(len(files), dtype=np.int32), [len(file.chunks) for file in files])[order],
        item=offset,
        item_length=length[number],
        payload=offset + start[number],
        payload_length=payload_length[number],
        digest=np.ascontiguousarray(sums["digest"]).view(np.uint8).reshape(-1, 16),
        has_digest=np.ones(len(order), np.bool_),
        crc32=np.where(has_crc32[number], sums["checksum"].astype(np.int64), UNKNOWN),
    )
