"""Reading elements of a checkpoint into live tensors, after or while they are checked.

A plan says which elements of which chunk go where.  Every chunk of which something is read is compared with its digest
or, where ranks need one run of bytes each, with its CRC-32, which follows from those of the runs.  Only plain data is
unpickled.
"""

from __future__ import annotations

import io
import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..algebra.box import Box, Index
from ..algebra.plan import Copy, make_share
from ..names.errors import DamageError, SourceError
from ..record.chunks import Boxes, layout_in_boxes
from ..record.record import Blob, Chunk, Extent, StateRecord, with_chunks
from ..store.io.checksums import JoinedCrc, crc32
from ..store.io.location import Location, Remote
from ..store.open_checkpoint import OpenCheckpoint, checked_blob
from ..store.reading.dtypes import itemsize
from ..store.reading.payloads import as_words, check_chunk, checked_elements, payload_of
from ..store.verify.diagnosis import open_to_load
from .bits import bits_of
from .live_state import LiveState, RankBoxes, asked_layouts
from .shared_memory import differing_ties, tied_origins
from .storable import refuse_code

WhenChecked = Literal["before", "while"]

Where = tuple[str, Index]
"""Identifies a chunk: its tensor's key, and its first index."""


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Bytes ``start:stop`` of a chunk's payload, and their CRC-32 as read."""

    start: int
    stop: int
    crc32: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"expected a range of bytes, got {self.start}:{self.stop}")


@dataclass(frozen=True, slots=True)
class PartlyRead:
    """The runs that a rank has read of a chunk; the payload's length and CRC-32 as its item records them."""

    length: int
    crc32: int
    runs: tuple[ByteRun, ...]


def run_of(window_lo: Index, window: Index, shape: Index) -> tuple[int, int] | None:
    """Return where a window of a dense row-major chunk begins and ends, in elements; None if it is not contiguous.

    Args:
        window_lo: its first index in the chunk.
        window, shape: of both.
    """
    start, numel, row = 0, 1, 1
    for lo, n, size in zip(reversed(window_lo), reversed(window), reversed(shape), strict=True):
        if n != 1 and numel != row:  # parts of several rows
            return None
        start, numel, row = start + lo * row, numel * n, row * size
    return start, start + numel


def holds(reads: Sequence[PartlyRead]) -> bool | None:
    """Return whether the runs that ranks have read of a chunk are its payload; None if they do not tile it.

    Ranks that read the same run, as replicas do, must have the same checksum of it.
    """
    (length, recorded), *disagreeing = {(read.length, read.crc32) for read in reads}
    sums: dict[tuple[int, int], int] = {}
    for run in (run for read in reads for run in read.runs):
        if sums.setdefault((run.start, run.stop), run.crc32) != run.crc32:
            return False
    joined = JoinedCrc()
    for (start, stop), crc in sorted(sums.items()):
        joined.add(start, stop, crc)
    return not disagreeing and joined.crc32 == recorded if joined.reached == length else None


@dataclass(frozen=True, slots=True)
class _Read:
    """The elements of a box in a chunk, and where they go."""

    tensor: StateRecord
    chunk: Chunk
    box: Box
    target: Tensor

    @property
    def run(self) -> range | None:
        """The bytes of the payload, if they are a run that can be checked by itself, and not all of it."""
        box, whole = self.box, self.chunk.box
        if self.chunk.strides is not None or self.chunk.crc32 is None or box == whole:
            return None
        run = run_of(tuple(map(operator.sub, box.lo, whole.lo)), box.shape, whole.shape)
        return None if run is None else range(*(place * itemsize(self.tensor.dtype) for place in run))

    def is_known_to_differ(self, other: _Read) -> bool:
        """Return whether the tensors of two reads differ, by fingerprints or else by checksums of their chunks."""
        if self.tensor.fingerprint and other.tensor.fingerprint:
            return self.tensor.fingerprint != other.tensor.fingerprint
        chunks = self.chunk, other.chunk
        alike = chunks[0].box == chunks[1].box and chunks[0].strides == chunks[1].strides
        return alike and None not in (sums := {chunk.crc32 for chunk in chunks}) and len(sums) > 1


class ChunkReader:
    """A reader of elements, after everything that ranks read has been checked, or while it is.

    Args:
        check: as for `load`.
        opened: the checkpoint, if another rank has opened it for this one.

    Attributes:
        partly_read: the runs that this rank has read of chunks that it did not read whole, for `judge`.
    """

    def __init__(self, place: Location, check: WhenChecked | None = None, opened: OpenCheckpoint | None = None) -> None:
        self.place = place
        self.partly_read: dict[Where, PartlyRead] = {}
        self._opened = opened
        self._checks_before = (check or ("while" if isinstance(place, Remote) else "before")) == "before"
        self._checked: set[Chunk] = set()
        self._blobs: dict[str, Blob] = {}
        self._raw: dict[str, bytes] = {}
        self._reads: list[_Read] = []
        """In the order in which they lie in files."""

    @cached_property
    def checkpoint(self) -> OpenCheckpoint:
        """The checkpoint, opened when it is first needed, where errors reach all ranks."""
        return self._opened or open_to_load(self.place)

    @cached_property
    def _tensors(self) -> Mapping[str, StateRecord]:
        return {tensor.key: tensor for tensor in self.checkpoint.outline.tensors}

    def plan(self, live: LiveState, sources: Mapping[str, str], zeros: Collection[str]) -> None:
        """Plan to read values of a state dict, and open the items that have them, and no others.

        Args:
            sources: keys of the checkpoint, by those of the state dict.
            zeros: keys of the state dict that become zeros.

        Raises:
            LayoutError: elements of the state dict share memory, and are not those of whole tied tensors.
            SourceError: tensors of the checkpoint differ, and those of the state dict are tied.
        """
        blobs = {blob.key: blob for blob in self.checkpoint.outline.blobs}
        self._blobs = {key: blobs[source] for key, source in sources.items() if source not in self._tensors}
        wanted: defaultdict[str, list[tuple[int, Box, Tensor]]] = defaultdict(list)
        for key, source in sources.items():
            if source in self._tensors:
                tensor, local = self._tensors[source], live.local(key)
                for copy in _takes(tensor.shape, tensor.boxes, local.boxes):
                    wanted[source].append(
                        (int(copy.source.buffer), copy.box, local.view(copy.target.offset, copy.box.lo, copy.box.hi))
                    )
        tensors = [tensor for key, tensor in self._tensors.items() if wanted[key]]
        numbers = [sorted({number for number, _, _ in wanted[tensor.key]}) for tensor in tensors]
        located = self.checkpoint.locate(with_chunks(tensors, numbers))
        reads = []
        for tensor, own in zip(located, numbers, strict=True):
            chunks = dict(zip(own, tensor.chunks, strict=True))
            reads += [_Read(tensor, chunks[number], box, view) for number, box, view in wanted[tensor.key]]
        self._reads = sorted(reads, key=lambda read: (read.chunk.item.file, read.chunk.item.offset))
        self._refuse_overwriting(tied_origins(live, sources, zeros))

    def _refuse_overwriting(self, tied: Collection[tuple[str, str]]) -> None:
        """Refuse to read tensors that differ into the same memory: what is read last would be left of them."""
        if not tied:
            return
        reads: defaultdict[str, dict[Index, _Read]] = defaultdict(dict)
        for read in self._reads:
            reads[read.tensor.key].setdefault(read.box.lo, read)
        for one, other in sorted(tied):
            for lo in reads[one].keys() & reads[other].keys():
                if reads[one][lo].is_known_to_differ(reads[other][lo]):
                    raise SourceError(differing_ties(one, other, self.place))

    def check(self) -> Mapping[Where, PartlyRead]:
        """Read objects, and check elements if that is done before they are read; return partial reads."""
        for key, blob in self._blobs.items():
            self._raw[key] = checked_blob(self.checkpoint.payloads, blob)
            refuse_code(blob.key, self._raw[key])
        for read in self._reads if self._checks_before else ():
            self._check(read)
        return self.partly_read

    def read(self) -> dict[str, Any]:
        """Read elements into their tensors, after all ranks have checked, and return the objects."""
        if self._checks_before:
            self._checked.update(read.chunk for read in self._reads)
            self.partly_read = {}
        for read in self._reads:
            self._copy(read)
        return {key: torch.load(io.BytesIO(raw), weights_only=False) for key, raw in self._raw.items()}

    def _check(self, read: _Read) -> None:
        """Check the whole chunk, once, or note the checksum of a run of it for `judge`."""
        tensor, chunk, run = read.tensor, read.chunk, read.run
        if chunk in self._checked:
            return
        if run is None:
            check_chunk(self.checkpoint.payloads, tensor, chunk)
            self._checked.add(chunk)
        else:
            extent = Extent(chunk.item.file, payload_of(tensor, chunk).offset + run.start, len(run))
            self._note(read, ByteRun(run.start, run.stop, crc32(self.checkpoint.payloads.bands(extent))))

    def _copy(self, read: _Read) -> None:
        tensor, chunk, target, payloads = read.tensor, read.chunk, read.target, self.checkpoint.payloads
        staged = target if target.is_cpu else torch.empty(target.shape, dtype=target.dtype)
        words, payload = bits_of(staged), payload_of(tensor, chunk)
        if chunk not in self._checked and (run := read.run):
            raw = payloads.view(Extent(payload.file, payload.offset + run.start, len(run)))
            self._note(read, ByteRun(run.start, run.stop, crc32([raw])))
            np.copyto(words, as_words(raw, tensor.dtype, read.box.shape))
        elif chunk not in self._checked and read.box == chunk.box:
            np.copyto(words, checked_elements(payloads, tensor, chunk))
            self._checked.add(chunk)
        else:
            self._check(read)
            payloads.gather_into(words, payload, tensor.dtype, chunk.stored("").place_at(read.box.lo), read.box.shape)
        if staged is not target:
            target.copy_(staged)

    def _note(self, read: _Read, run: ByteRun) -> None:
        tensor, chunk = read.tensor, read.chunk
        assert chunk.crc32 is not None, "other chunks are read whole"
        where = tensor.key, chunk.box.lo
        known = self.partly_read.get(where, PartlyRead(payload_of(tensor, chunk).length, chunk.crc32, ()))
        self.partly_read[where] = replace(known, runs=(*known.runs, run))

    def judge(self, partly_read: Sequence[Mapping[Where, PartlyRead]]) -> None:
        """Compare the chunks that ranks have read in runs with their recorded checksums."""
        reads: defaultdict[Where, list[PartlyRead]] = defaultdict(list)
        for of_rank in partly_read:
            for where, read in of_rank.items():
                reads[where].append(read)
        for (key, lo), of_chunk in reads.items():
            verdict = holds(of_chunk)
            if verdict:
                continue
            tensor = self._tensors[key]
            (number,) = (n for n, box in enumerate(tensor.boxes) if box.lo == lo and box.numel)
            # Read it whole, also to find out what is wrong.
            (located,) = self.checkpoint.locate([replace(tensor, chunks=tensor.chunks.select([number]))])
            (chunk,) = located.chunks
            check_chunk(self.checkpoint.payloads, tensor, chunk)
            if verdict is False:
                raise DamageError(
                    f"tensor {tensor.key!r} box {chunk.box}: a rank read other bytes than {chunk.item.file} has"
                )


@lru_cache(maxsize=4096)
def _takes(shape: Index, boxes: Boxes, here: tuple[Box, ...]) -> tuple[Copy, ...]:
    """Return the copies from chunks, by number, that fill boxes; a model's tensors have few geometries."""
    if not here:
        return ()
    (asked,) = asked_layouts(shape, (RankBoxes(0, here),))
    return make_share(layout_in_boxes(shape, boxes), asked, 0).takes
