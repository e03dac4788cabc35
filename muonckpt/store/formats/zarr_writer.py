"""Writes zarr v3 hierarchies: the arrays and chunks of tensors, the bytes around a chunk, and the descriptions.

Shards of checked chunks are written in streams of bounded size, without the zarr library; a chunk is one run of the
row-major tensor.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from ...algebra.box import Index
from ...programs.signs import ZARR_FILE
from ...record.json_fields import digest_of
from ...record.record import Manifest, StateRecord
from ..io.checksums import Frame, RawBytes
from ..io.location import Location
from ..io.new_file import write_synced
from ..reading.dtypes import itemsize
from .native import entry_of
from .zarr import (
    INDEX_CHECKSUM,
    MANIFEST_ATTRIBUTE,
    MISSING_CHUNK,
    SEAL,
    ZarrArray,
    array_seal,
    nodes,
    parents,
    stored_as,
)

CHUNK_BYTES = 4 << 20
"""Most bytes of a chunk, the smallest part that zarr reads."""

SHARD_BYTES = 1 << 30


def chunk_frame(payload_length: int, chunk_bytes: int, index: bytes) -> Frame:
    """Return the bytes after a chunk's elements.

    They are zeros beyond the array's edge up to ``chunk_bytes``, the CRC-32C of both, and after a shard's last chunk
    its ``index``.
    """

    def tail(checksum: int) -> bytes:
        padding = bytes(chunk_bytes - payload_length)
        return padding + _crc32c(padding, checksum).to_bytes(INDEX_CHECKSUM, "little") + index

    return Frame(
        payload_length,
        head=b"",
        tail=tail,
        tail_length=chunk_bytes - payload_length + INDEX_CHECKSUM + len(index),
        checksum_of=_crc32c,
    )


def _crc32c(raw: RawBytes, start: int) -> int:
    from google_crc32c import extend

    return int(extend(start, bytes(raw)))


def index_of(array: ZarrArray, numbers: Sequence[int]) -> bytes:
    """Return the index of a shard with the numbered chunks end to end; empty without shards."""
    if not array.sharded:
        return b""
    length = array.chunk_bytes + INDEX_CHECKSUM
    index = np.full((array.chunks_per_file, 2), MISSING_CHUNK, "<u8")
    index[numbers] = [(position * length, length) for position in range(len(numbers))]
    raw = index.tobytes()
    return raw + _crc32c(raw, 0).to_bytes(INDEX_CHECKSUM, "little")


def arrays(tensors: Sequence[StateRecord], shard_bytes: int | None) -> list[ZarrArray]:
    """Return the array of each tensor, with ``shard_bytes`` of chunks in a file (None: `SHARD_BYTES`), or one chunk.

    Raises:
        SourceError: as `nodes`.
    """
    shard_bytes = SHARD_BYTES if shard_bytes is None else shard_bytes
    zarr_arrays = []
    for tensor, node in zip(tensors, nodes(tensors), strict=True):
        size = itemsize(tensor.dtype)
        chunk = _block(tensor.shape, CHUNK_BYTES // size)
        block = _block(tensor.shape, max(shard_bytes // size, math.prod(chunk)))
        shard = tuple(-(-length // part) * part for length, part in zip(block, chunk, strict=True))
        # Stock zarr 3.1 cannot read a shard without dims.
        dtype, is_sharded = stored_as(tensor.dtype), bool(tensor.shape)
        zarr_arrays.append(
            ZarrArray(
                node,
                tensor.shape,
                dtype,
                file_shape=shard,
                chunk_shape=chunk,
                trailer=INDEX_CHECKSUM,
                sharded=is_sharded,
            )
        )
    return zarr_arrays


def write_descriptions(manifest: Manifest, arrays_of_tensors: Sequence[ZarrArray], directory: Location) -> None:
    """Write the descriptions of groups and arrays, and sync them."""
    # An array's description has its seal, the root's all seals: files of two saves do not pass for one.
    seals = {}
    for tensor, array in zip(manifest.tensors, arrays_of_tensors, strict=True):
        entry = {**entry_of(tensor), "digests": [chunk.digest for chunk in tensor.chunks]}
        seals[array.node] = array_seal(array, entry)
        attributes = {MANIFEST_ATTRIBUTE: {**entry, SEAL: seals[array.node]}}
        _write_node(directory / array.node, dataclasses.replace(array, attributes=attributes).to_json())
    root: dict[str, Any] = {"version": 1, "tensors": len(seals), "provenance": dict(manifest.provenance)}
    root = {**json.loads(json.dumps(root)), "arrays": digest_of(seals)}
    root_attributes = {MANIFEST_ATTRIBUTE: {**root, SEAL: digest_of(root)}}
    groups = {"", *chain.from_iterable(parents(array.node) for array in arrays_of_tensors)}
    for group in sorted(groups, reverse=True):  # the root last: it makes the directory a hierarchy
        node = {"zarr_format": 3, "node_type": "group", "attributes": {} if group else root_attributes}
        _write_node(directory / group, json.dumps(node, indent=1))


def _write_node(folder: Location, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_synced(folder / ZARR_FILE, text.encode())


def _block(shape: Index, max_elements: int) -> Index:
    """Return the largest run of at most so many elements that divides a tensor about equally."""
    block = list(shape)
    for dim, length in enumerate(shape):
        inner = math.prod(shape[dim + 1 :])
        max_length = min(max(max_elements // max(inner, 1), 1), length)
        if max_length:
            block[dim] = -(-length // -(-length // max_length))
        if max_length > 1 or inner <= max_elements:
            break
    return tuple(max(length, 1) for length in block)
