"""Checkpoints of raw flat buffers: an image of each rank's memory in a file, and an index.

The index is a manifest whose record of buffers names their files, from which the places of elements follow; chunks that
it lists must agree, and add their digests: docs/formats/flat_buffers.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ...algebra.box import Box
from ...layouts.buffers.buffer_layout import rank_of
from ...layouts.buffers.records import GroupBuffer, int_tuple
from ...names.errors import DamageError, LayoutError, SourceError
from ...programs.signs import FLAT_BUFFERS_FILE
from ...record.chunks import in_columns
from ...record.record import Chunk, Extent, Manifest, StateRecord
from ..io.location import Location, is_there
from ..io.new_file import write_synced
from ..io.regular import extent_faults, read_text_file
from ..reading.dtypes import itemsize
from ..reading.payloads import Payloads, Reader

RANK_FILE = "rank_{}.bin".format

ITEMS = "items.bin"

_ALIGNMENT = 4096
"""Each rank's part of a buffer begins at a multiple of it in bytes, to be mapped or read with direct I/O."""


@dataclass(frozen=True, slots=True)
class StoredBuffer:
    """Holds a flat buffer, and the extent of each rank's part, padding included.

    Raises:
        LayoutError: the parameters differ in dtype, or the extents do not fit the ranks' parts.
    """

    buffer: GroupBuffer
    places: tuple[Extent, ...]

    def __post_init__(self) -> None:
        if [place.length for place in self.places] != lengths(self.buffer):
            raise LayoutError(f"expected places of {lengths(self.buffer)} bytes, got {self.places}")

    def chunks(self) -> Iterator[tuple[int, str, Chunk]]:
        """Yield (global rank, key, chunk) for every box of every tensor, replicas too."""
        size = itemsize(buffer_dtype(self.buffer))
        places = dict(zip(self.buffer.group, self.places, strict=True))
        for key, fragment in self.buffer.fragments():
            rank = fragment.place.buffer
            assert isinstance(rank, int), "the buffers of a group are its ranks"
            start = places[rank].offset + fragment.place.offset * size
            extent = Extent(places[rank].file, start, fragment.box.numel * size)
            yield rank, key, Chunk(fragment.box, extent, extent)

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the buffer, and ``files``: [name, offset, length] for each rank, in bytes."""
        files = [[place.file, place.offset, place.length] for place in self.places]
        return {**self.buffer.to_json(), "files": files}


def place(buffers: Sequence[GroupBuffer]) -> tuple[StoredBuffer, ...]:
    """Place each rank's parts of the buffers, aligned, one after another in its file."""
    # Parts without bytes take no space in the file.
    ends: defaultdict[int, int] = defaultdict(int)
    stored = []
    for buffer in buffers:
        places = []
        for rank, length in zip(buffer.group, lengths(buffer), strict=True):
            start = -(-ends[rank] // _ALIGNMENT) * _ALIGNMENT
            places.append(Extent(RANK_FILE(rank), start, length))
            ends[rank] = start + length if length else ends[rank]
        stored.append(StoredBuffer(buffer, tuple(places)))
    return tuple(stored)


def ends(stored: Sequence[StoredBuffer]) -> dict[str, int]:
    """Return the byte at which the last part in each file ends."""
    last_bytes: dict[str, int] = {}
    for extent in chain.from_iterable(buffer.places for buffer in stored):
        last_bytes[extent.file] = max(last_bytes.get(extent.file, 0), extent.end if extent.length else 0)
    return last_bytes


def lengths(buffer: GroupBuffer) -> list[int]:
    rank_lengths, size = [0] * buffer.layout.ranks, itemsize(buffer_dtype(buffer))
    for shard in buffer.layout.shards:
        rank_lengths[rank_of(shard)] += (shard.stop - shard.start) * size
    return rank_lengths


def buffer_dtype(buffer: GroupBuffer) -> str:
    dtypes = {placement.parameter.dtype for placement in buffer.layout.parameters}
    if len(dtypes) != 1:
        raise LayoutError(f"expected a buffer of one dtype, got {sorted(dtypes)}")
    return dtypes.pop()


def reader(path: Location) -> Reader:
    """Read the index of a directory, and the sizes of the files.

    Raises:
        SourceError: the index is damaged, contradicts itself, or lacks a tensor of a buffer.
    """
    file = path / FLAT_BUFFERS_FILE
    if not is_there(file):
        raise DamageError(f"its {FLAT_BUFFERS_FILE} is missing, which says where in the other files each element is")
    try:
        text = read_text_file(file).decode()
    except UnicodeDecodeError as error:
        raise DamageError(f"{file}: expected UTF-8: {error}") from error
    # The record of buffers says where the elements of each tensor are; chunks that the index lists must agree.
    try:
        manifest = Manifest.from_json(text)
        stored = []
        for fields in manifest.provenance["buffers"]:
            places = tuple(Extent(name, *int_tuple(span)) for name, *span in fields["files"])
            stored.append(StoredBuffer(GroupBuffer.from_json(fields), places))
        tensors = _located(manifest.tensors, stored)
    except (SourceError, KeyError, TypeError, ValueError, AttributeError) as error:
        kind = type(error) if isinstance(error, SourceError) else DamageError
        raise kind(f"{file}: {type(error).__name__}: {error}") from error
    # The files must reach as far as the buffers and items in them.
    named_extents = [(blob.item, repr(blob.key)) for blob in manifest.blobs]
    for number, buffer in enumerate(stored):
        named_extents += [(extent, f"buffer {number}") for extent in buffer.places if extent.length]
    faults = tuple(extent_faults(path, named_extents))
    return Reader(replace(manifest, tensors=tensors), Payloads(path), faults)


def write_buffer_index(manifest: Manifest, directory: Location) -> None:
    """Write the index of finished files, perhaps of no buffers, and wait until it is on disk."""
    index = replace(manifest, provenance={"buffers": [], **manifest.provenance})
    write_synced(directory / FLAT_BUFFERS_FILE, index.to_json().encode())


def _located(tensors: Sequence[StateRecord], stored: Sequence[StoredBuffer]) -> tuple[StateRecord, ...]:
    """Return tensors with the chunks that the buffers have of them, each box once."""
    # Replicas are the same box in several files; the first counts.
    dtypes = {tensor.key: tensor.dtype for tensor in tensors}
    chunks: defaultdict[str, dict[Box, Chunk]] = defaultdict(dict)
    for stored_buffer in stored:
        dtype = buffer_dtype(stored_buffer.buffer)
        for _, key, chunk in stored_buffer.chunks():
            if dtypes.get(key) != dtype:
                raise SourceError(f"a buffer of {dtype} holds tensor {key!r}; the index lists it as {dtypes.get(key)}")
            chunks[key].setdefault(chunk.box, chunk)
    # The chunks that the index lists, with their sums, or the expected ones if it lists none.
    chunks_of_tensors = []
    for tensor in tensors:
        listed = [chunk for chunk in tensor.chunks if chunk.box.numel]
        places = {chunk.box: replace(chunk, digest=None, crc32=None) for chunk in listed}
        if listed and (places != chunks[tensor.key] or len(places) != len(listed)):
            raise SourceError(f"tensor {tensor.key!r}: the chunks are not where the buffers say")
        chunks_of_tensors.append((listed or [*chunks[tensor.key].values()], len(tensor.shape)))
    columns = in_columns(chunks_of_tensors)
    return tuple(replace(tensor, chunks=of_tensor) for tensor, of_tensor in zip(tensors, columns, strict=True))
