"""What a destination holds: tensors made from the source's elements, and non-tensor items."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import chain

import numpy as np

from ...box import Box
from ...chunks import Chunks, row_of, rows_numbered
from ...columns import Row
from ...errors import SourceError, TargetError, about, did_you_mean
from ...layout import Buffer, Fragment, TensorLayout, dense
from ...plan import Copy, make_plan
from ...record import Blob, Chunk, Manifest, StateRecord
from ...store.reading.payloads import Payloads
from ..translate.conventions import Words, scaled
from .checklist import Check
from .elements import ChunkReads, Room, gather_elements, unseen


@dataclass(frozen=True, slots=True)
class NumberedChunks(Mapping[Buffer, Chunk]):
    """The chunks of a tensor of the source, by the names that `StateRecord.chunk_layout` gives them.

    ``tensor`` is its key.
    """

    tensor: str
    chunks: Chunks

    def __getitem__(self, buffer: Buffer) -> Chunk:
        if buffer not in self:
            raise KeyError(buffer)
        return self.chunks[int(buffer)]

    def __contains__(self, buffer: object) -> bool:
        return isinstance(buffer, str) and buffer.isdecimal() and int(buffer) < len(self.chunks)

    def __iter__(self) -> Iterator[Buffer]:
        return map(str, range(len(self.chunks)))

    def __len__(self) -> int:
        return len(self.chunks)


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to write: ``record`` describes it (its chunks do not count), ``layout`` says where its elements lie.

    A buffer of the layout is the payload of a chunk of the source (``chunks``) or bytes in memory (``in_memory``), of
    elements of the dtype ``held``, or if that is None of ``record.dtype``.  Elements are multiplied by ``scale``, and
    rounded once to ``record.dtype``; if neither changes them, they are copied bit for bit.
    """

    record: StateRecord
    layout: TensorLayout
    chunks: Mapping[Buffer, Chunk] = field(default_factory=dict)
    in_memory: Mapping[Buffer, bytes] = field(default_factory=dict)
    scale: float | None = None
    held: str | None = None

    @classmethod
    def copy_of(cls, record: StateRecord) -> OutputTensor:
        """A tensor of the source as it is.

        Raises:
            LayoutError: its chunks leave a hole or overlap.
        """
        return cls(record, record.chunk_layout(), NumberedChunks(record.key, record.chunks))

    @property
    def computed(self) -> bool:
        """Whether elements are computed, and not copied."""
        return self.scale is not None or self.held is not None

    @property
    def source_record(self) -> StateRecord:
        """The record with the dtype of the elements in the source."""
        return self.record if self.held is None else dataclasses.replace(self.record, dtype=self.held)

    @property
    def key(self) -> str:
        return self.record.key

    @property
    def places(self) -> tuple[object, ...]:
        """What its elements are made of, as values that two jobs can compare."""
        if isinstance(self.chunks, NumberedChunks):
            chunks: object = self.chunks.tensor
        else:
            chunks = [(buffer, chunk.item) for buffer, chunk in self.chunks.items()]
        return layout_digest(self.layout), chunks, self.in_memory, self.scale, self.held

    def source_of(self, buffer: Buffer) -> object:
        """What tells the chunk of the source that is called ``buffer`` from all others."""
        return (self.chunks.tensor, buffer) if isinstance(self.chunks, NumberedChunks) else self.chunks[buffer].item

    @property
    def layouts(self) -> tuple[TensorLayout, ...]:
        """The layouts that each element is copied from."""
        return (self.layout,)

    def elements(
        self,
        payloads: Payloads,
        fragments: Iterable[Fragment],
        box: Box,
        reads: ChunkReads = unseen,
        room: Room = np.empty,
    ) -> Words:
        """The elements of a box to write, dense.  ``fragments`` must cover the box, without overlaps.

        ``reads`` sees what is read of the source; the elements may be in memory of ``room``.
        """
        words = gather_elements(payloads, self, fragments, box, reads, room)
        if not self.computed:
            return words
        by = 1.0 if self.scale is None else self.scale
        return scaled(words, self.source_record.dtype, by, self.record.dtype)

    def copies(self, boxes: Sequence[Box]) -> tuple[tuple[Copy, ...], ...]:
        """The copies that fill each of these boxes, which tile the tensor; each box is dense from element 0."""
        with about(f"tensor {self.key!r}"):
            return copies_into(tuple(boxes), self.layouts)


@lru_cache(maxsize=1024)
def layout_digest(layout: TensorLayout) -> bytes:
    """Cached, because tensors of the same geometry share their layout."""
    return layout.digest()


def copies_into(boxes: tuple[Box, ...], sources: Iterable[TensorLayout]) -> tuple[tuple[Copy, ...], ...]:
    """The copies that fill each of these boxes, as `OutputTensor.copies`, from all of these layouts."""
    of_sources = [_copies(source, boxes) for source in sources if boxes]
    return tuple(tuple(chain.from_iterable(copies)) for copies in zip(*of_sources, strict=True))


@lru_cache(maxsize=1024)
def _copies(source: TensorLayout, boxes: tuple[Box, ...]) -> tuple[tuple[Copy, ...], ...]:
    """Cached, because tensors of the same geometry share their copies."""
    filled = tuple(dense(box, number) for number, box in enumerate(boxes) if box.numel)
    copies: defaultdict[Buffer, list[Copy]] = defaultdict(list)
    for copy in make_plan(source, TensorLayout.of(source.shape, filled)).copies:
        copies[copy.target.buffer].append(copy)
    return tuple(tuple(copies[number]) for number in range(len(boxes)))


def source_rows(outputs: Sequence[OutputTensor], buffer: Buffer) -> list[Row]:
    """The row of the chunk of the source that each of these outputs calls ``buffer``."""
    numbered = [output.chunks for output in outputs]
    listed = [chunks.chunks for chunks in numbered if isinstance(chunks, NumberedChunks)]
    if listed and len(listed) == len(outputs):
        return list(rows_numbered(listed, int(buffer)))
    return [row_of(chunks[buffer]) for chunks in numbered]


@dataclass(frozen=True, slots=True)
class OutputItem:
    """A non-tensor item: a copy of an item of the source, or if ``source`` is None the bytes ``data``."""

    key: str
    path: tuple[str | int, ...]
    source: Blob | None = None
    data: bytes = b""

    @property
    def length(self) -> int:
        """Length in bytes."""
        return len(self.data) if self.source is None else self.source.item.length


@dataclass(frozen=True, slots=True)
class Outputs:
    """Everything that a destination holds.

    ``left_out`` are the keys of the source's tensors and items that are not in the destination; ``notes`` are sentences
    about what was decided, ``checklist`` what became of each thing.

    Raises:
        SourceError: two tensors or items have the same key.
    """

    tensors: Sequence[OutputTensor]
    items: Sequence[OutputItem] = ()
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    checklist: tuple[Check, ...] = ()

    def __post_init__(self) -> None:
        duplicates = [key for key, count in Counter(self.keys).items() if count > 1]
        if duplicates:
            raise SourceError(
                f"two tensors or items would get the key {duplicates[0]!r}; add a rule that renames one of them"
            )

    @property
    def keys(self) -> list[str]:
        """The keys of all tensors and items."""
        return [tensor.key for tensor in self.tensors] + [item.key for item in self.items]

    def selected(self, globs: Sequence[str]) -> Outputs:
        """The tensors and items whose key matches one of these shell patterns; everything if there are none.

        Raises:
            TargetError: a pattern matches nothing.
        """
        if not globs:
            return self
        for glob in globs:
            if not any(fnmatchcase(key, glob) for key in self.keys):
                raise TargetError(f"no key of the checkpoint matches {glob!r}{did_you_mean(glob, self.keys)}")
        chosen = {key for key in self.keys if any(fnmatchcase(key, glob) for glob in globs)}
        return dataclasses.replace(
            self,
            tensors=[tensor for tensor in self.tensors if tensor.key in chosen],
            items=[item for item in self.items if item.key in chosen],
        )

    def tensors_only(self) -> Outputs:
        """The same without items."""
        return dataclasses.replace(self, items=(), left_out=(*self.left_out, *(item.key for item in self.items)))

    def used(self, manifest: Manifest) -> Manifest:
        """The part of the source's manifest that these outputs are made from."""
        every = [tensor.chunks for tensor in self.tensors]
        whole = {chunks.tensor for chunks in every if isinstance(chunks, NumberedChunks)}
        parts = [chunks for chunks in every if not isinstance(chunks, NumberedChunks)]
        items = {chunk.item for chunks in parts for chunk in chunks.values()}
        blobs = {item.source for item in self.items}
        return dataclasses.replace(
            manifest,
            tensors=tuple(
                t
                for t in manifest.tensors
                if len(t.chunks) and (t.key in whole or any(c.item in items for c in t.chunks if items))
            ),
            blobs=tuple(blob for blob in manifest.blobs if blob in blobs),
        )
