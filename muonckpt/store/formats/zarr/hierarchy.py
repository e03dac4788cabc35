"""Checkpoints in a zarr v3 hierarchy: a group for each parameter, an array for each of its tensors.

Arrays whose elements are stored unencoded (with or without shards and checksums) are read from their files.  For other
codecs the zarr library, imported when needed, decodes whole files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ....box import Box
from ....errors import DamageError, SourceError, about
from ....record import Chunk, Chunks, Extent, Manifest, StateRecord
from ....seal import check_digest
from ...io import limits
from ...io.location import Location
from ...io.regular import FileBytes, Held, open_regular, read_whole
from ...reading.dtypes import itemsize
from ...reading.payloads import Payloads
from ...reading.reader import LocatedReader
from ..manifest_entry import tensor_of
from ..signs import ZARR_FILE
from .array import (
    INDEX_CHECKSUM,
    MANIFEST_ATTRIBUTE,
    MISSING_CHUNK,
    SEAL,
    ZarrArray,
    array_seal,
    parse_array,
    parse_node,
    stored_as,
)

_DECODED_FILES = 4
"""Decoded files in the cache: a few threads read them band by band."""


class ZarrPayloads(Payloads):
    """The bytes of the elements: those of the files, or of whole decoded files where they are encoded."""

    def __init__(self, directory: Location, arrays: Sequence[ZarrArray]) -> None:
        super().__init__(directory)
        self._encoded = {
            file: (array, box) for array in arrays if not _is_read_raw(array) for file, box in array.files()
        }
        self._checked = {file for array in arrays if array.trailer for file, _ in array.files()}
        self._decode = lru_cache(_DECODED_FILES)(self._decoded)

    def _bytes(self, name: str) -> FileBytes:
        return Held(self._decode(name)) if name in self._encoded else super()._bytes(name)

    def is_checked(self, chunk: Chunk) -> bool:
        return chunk.item.file in self._checked

    def check_inside(self, item: Extent) -> None:
        """Check the CRC-32C behind an unencoded chunk; that of an encoded chunk is checked when it is decoded."""
        from google_crc32c import value as crc32c

        if item.file in self._checked and item.file not in self._encoded:
            raw = bytes(self.view(item))
            actual, expected = crc32c(raw[:-INDEX_CHECKSUM]), int.from_bytes(raw[-INDEX_CHECKSUM:], "little")
            if actual != expected:
                raise DamageError(f"CRC-32C {actual:08x}, expected {expected:08x}")

    def _decoded(self, file: str) -> memoryview:
        array, box = self._encoded[file]
        size = math.prod(array.file_shape) * itemsize(array.dtype)
        limits.check_limit(size, limits.DECODED + 1000 * self.on_disk(file), f"bytes in {file} when it is decoded")
        try:
            import zarr

            opened = zarr.open_array(str(self.directory / array.node), mode="r")
            block = np.asarray(opened[tuple(map(slice, box.lo, box.hi))])
        except Exception as error:  # whatever a codec raises
            raise SourceError(f"cannot decode {self.directory / file}: {type(error).__name__}: {error}") from error
        little = block.astype(block.dtype.newbyteorder("<"), copy=False)
        return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data


def reader(path: Location) -> LocatedReader:
    """The checkpoint in a hierarchy.  Reads metadata and the indices of shards.

    A chunk's ``item`` is its stored bytes, its ``payload`` the elements; of encoded arrays the payload is an extent of
    the whole decoded file, which `ZarrPayloads` provides.

    Raises:
        SourceError: there is none, it is damaged or refused; or a chunk is missing, which zarr would read as zeros.
    """
    try:
        attributes, arrays = _nodes(path)
        tensors = tuple(_record(path, array) for array in arrays)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error}") from error
    _check_root(path, attributes, arrays)
    match attributes.get(MANIFEST_ATTRIBUTE):
        case None:
            provenance: Mapping[str, Any] = {"format": "zarr"}
        case {"tensors": int(count), "provenance": dict(provenance)} if count == len(tensors):
            pass
        case {"tensors": int(count)}:
            raise DamageError(f"{path}: expected {count} arrays, found {len(tensors)}")
        case _:
            raise DamageError(f"{path / ZARR_FILE}: damaged attribute {MANIFEST_ATTRIBUTE!r}")
    return LocatedReader(Manifest(tensors, (), provenance), ZarrPayloads(path, arrays))


def _nodes(path: Location) -> tuple[Mapping[str, Any], list[ZarrArray]]:
    """The attributes of the root, and all arrays below it, or the one that it is, by name.  Links are not followed."""
    attributes: Mapping[str, Any] = {}
    arrays, pending = [], [""]
    while pending:
        node = pending.pop()
        place = path / node
        with about(place / ZARR_FILE):
            fields = parse_node(read_whole(place / ZARR_FILE))
            if not node:
                attributes = fields["attributes"]
            if fields["node_type"] == "array":
                arrays.append(parse_array(node, fields))
                continue
        inside = [entry.name for entry in place.iterdir() if entry.is_dir() and not entry.is_symlink()]
        members = [f"{node}/{name}" if node else name for name in sorted(inside, reverse=True)]
        pending += [member for member in members if (path / member / ZARR_FILE).exists()]
    return attributes, arrays


def _record(path: Location, array: ZarrArray) -> StateRecord:
    with about(path / array.node):
        chunks = list(_chunks(path, array)) if 0 not in array.shape else []
        if MANIFEST_ATTRIBUTE not in array.attributes:
            parts = tuple(array.node.split("/"))
            stored = Chunks.of(chunks, len(array.shape))
            return StateRecord(array.node or path.name, parts, array.shape, array.dtype, stored)
        entry = array.attributes[MANIFEST_ATTRIBUTE]
        if not isinstance(entry, dict):
            raise DamageError(f"damaged attribute {MANIFEST_ATTRIBUTE!r}")
        if entry.get(SEAL, seal := array_seal(array, entry)) != seal:
            raise DamageError(f"its description has digest {seal}, expected {entry[SEAL]}")
        tensor = tensor_of(entry)
        if (tensor.shape, stored_as(tensor.dtype)) != (array.shape, array.dtype):
            raise DamageError(
                f"{array.dtype} of shape {array.shape}, but attribute {MANIFEST_ATTRIBUTE!r} says otherwise"
            )
        digests = entry.get("digests", [None] * len(chunks))
        if len(digests) != len(chunks):
            raise DamageError(f"expected {len(digests)} chunks, as attribute {MANIFEST_ATTRIBUTE!r} says")
        sealed = (dataclasses.replace(c, digest=digest) for c, digest in zip(chunks, digests, strict=True))
        return dataclasses.replace(tensor, chunks=Chunks.of(sealed, len(tensor.shape)))


def _check_root(path: Location, attributes: Mapping[str, Any], arrays: Sequence[ZarrArray]) -> None:
    """Check that the root's description is the one that was written, with these arrays.

    Raises:
        DamageError: it is not.
    """
    match attributes.get(MANIFEST_ATTRIBUTE):
        case {"arrays": of_arrays, "digest": recorded, **rest}:
            with about(path / ZARR_FILE):
                check_digest(recorded, {**rest, "arrays": of_arrays})
            entries = ((array.node, array.attributes.get(MANIFEST_ATTRIBUTE)) for array in arrays)
            seals = {node: entry.get(SEAL) for node, entry in entries if isinstance(entry, dict)}
            with about(f"{path}: the arrays are not those of {ZARR_FILE}"):
                check_digest(of_arrays, seals)


def _is_read_raw(array: ZarrArray) -> bool:
    """Whether no decoding is needed: a CRC-32C is checked by decoding unless there is a fingerprint to compare with."""
    checked = array.trailer == 0 or MANIFEST_ATTRIBUTE in array.attributes
    return array.is_plain and checked


def _chunks(path: Location, array: ZarrArray) -> Iterator[Chunk]:
    raw = _is_read_raw(array)
    for file, box in array.files():
        size = _size(path, file)
        if not raw:
            with about(path / file):
                if array.sharded:
                    list(_stored(path, array, file, size, box))  # checks that no chunk is missing
            item = Extent(file, 0, size)
            yield Chunk(box, item, Extent(file, 0, box.numel * itemsize(array.dtype)))
            continue
        with about(path / file):
            for part, offset, length in _stored(path, array, file, size, box):
                if length != array.chunk_bytes + (array.trailer or 0):
                    raise DamageError(f"box {part}: expected {array.chunk_bytes} bytes and a checksum, found {length}")
                payload = Extent(file, offset, part.numel * itemsize(array.dtype))
                yield Chunk(part, Extent(file, offset, length), payload)


def _stored(path: Location, array: ZarrArray, file: str, size: int, box: Box) -> Iterator[tuple[Box, int, int]]:
    """Box, offset and length of each chunk of a file."""
    if not array.sharded:
        yield box, 0, size
        return
    index = _index(path, array, file, size)
    for number, part in array.chunks(box):
        offset, length = map(int, index[number])
        if offset == MISSING_CHUNK:
            raise DamageError(f"box {part} is not stored: zarr reads it as its fill value, but it may have been lost; "
                              "write it with write_empty_chunks")  # fmt: skip
        if offset + length > size:
            raise DamageError(f"box {part}: expected bytes within {size}, found {offset}+{length}: the file was cut")
        yield part, offset, length


def _index(path: Location, array: ZarrArray, file: str, size: int) -> Any:
    """The index of a shard: an offset and a length for each chunk, in row-major order."""
    from google_crc32c import value as crc32c

    if size < array.index_bytes:
        raise DamageError(f"expected a shard index of {array.index_bytes} bytes in a file of {size}: it was cut")
    with open_regular(path / file) as opened:
        limits.check_limit(
            array.index_bytes, limits.SMALL_DESCRIPTION + opened.on_disk, f"bytes of the index of {file}"
        )
        raw = opened.read(0 if array.index_first else size - array.index_bytes, array.index_bytes)
    index, checksum = raw[:-INDEX_CHECKSUM], int.from_bytes(raw[-INDEX_CHECKSUM:], "little")
    if crc32c(index) != checksum:
        raise DamageError(f"shard index with CRC-32C {crc32c(index):08x}, expected {checksum:08x}")
    return np.frombuffer(index, "<u8").reshape(-1, 2)


def _size(path: Location, file: str) -> int:
    """Bytes of the file of a chunk; a link anywhere on the way is refused."""
    place = path / file
    if not (place.exists() or place.is_symlink()):
        raise DamageError(f"{place} is not stored: zarr reads its box as the fill value, but it may have been lost; "
                          "write it with write_empty_chunks")  # fmt: skip
    if place.resolve() != path.resolve() / file:
        raise SourceError(f"cannot open {place}: one of its directories is a symbolic link")
    with open_regular(place) as opened:
        return opened.size
