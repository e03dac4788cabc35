"""Writing a zarr v3 hierarchy: shards of checked chunks, in streams of bounded size, without the zarr library.

Chunks are bands of whole trailing dims, so each is one run of the row-major tensor, and every reader of ours copies
it straight out of the file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from ..box import Box, Index
from ..errors import SourceError
from ..fingerprint import as_hex, combine
from ..record import StateRecord
from .directory import sync_tree
from .dtypes import itemsize
from .facts import facts_of
from .output import created, write_synced
from .remote import Location
from .stream import Fetch, FilePlan, passing
from .sums import Sums
from .zarr_array import INDEX_CHECKSUM, METADATA, OURS, ZarrArray, stored_as

CHUNK_BYTES = 4 << 20
"""Most bytes of a chunk, the smallest part that zarr reads."""

SHARD_BYTES = 1 << 30
"""Most bytes of the chunks in a file, unless the caller says otherwise."""

_VALUE = "value"
"""Name of the array of a tensor that is no optimizer slot."""

_MISSING = 2**64 - 1
_LONGEST_NAME = 200


def nodes(tensors: Sequence[StateRecord]) -> list[str]:
    """Where each tensor goes: its path in the state dict, which ends in its slot or in ``value``.

    Raises:
        SourceError: two tensors would share a place, or one lie inside another.
    """
    made = []
    for tensor in tensors:
        path = tensor.path if tensor.slot is not None and tensor.path[-1:] == (tensor.slot,) else (*tensor.path, _VALUE)
        made.append("/".join(map(_name, path)))
    counts = Counter(made)
    groups = {parent for node in made for parent in _parents(node)}
    for tensor, node in zip(tensors, made, strict=True):
        if counts[node] > 1 or node in groups:
            raise SourceError(f"tensor {tensor.key!r}: its place {node!r} in the hierarchy is taken by another one")
    return made


def files(
    tensors: Sequence[StateRecord], provenance: Mapping[str, Any], shard_bytes: int | None = None
) -> tuple[FilePlan, ...]:
    """The files of elements that `write` would write; their lengths do not depend on the provenance."""
    arrays = (_array(tensor, node, shard_bytes) for tensor, node in zip(tensors, nodes(tensors), strict=True))
    return tuple(
        FilePlan(file, 1, box.numel * itemsize(array.dtype), _length(array, sum(1 for _ in array.chunks(box))))
        for array in arrays
        for file, box in array.files()
    )


def write(
    directory: Location,
    tensors: Sequence[StateRecord],
    fetch: Fetch,
    provenance: Mapping[str, Any],
    shard_bytes: int | None = None,
    band_bytes: int = 1 << 20,
) -> None:
    """Write a hierarchy, synced, in bands of at most ``band_bytes``; ``shard_bytes`` of chunks go into a file (None:
    `SHARD_BYTES`)."""
    places = nodes(tensors)
    groups = sorted({parent for node in places for parent in _parents(node)} | {""})
    for group in groups:
        (directory / group).mkdir(exist_ok=True)
    for tensor, node in zip(tensors, places, strict=True):
        (directory / node).mkdir()
        array = _array(tensor, node, shard_bytes)
        shares = [
            _write_file(directory / file, array, tensor, box, fetch, band_bytes)
            for file, box in array.files()  # none if there is no element
        ]
        final = dataclasses.replace(tensor, fingerprint=as_hex(combine(*shares)))
        array = dataclasses.replace(array, attributes={OURS: facts_of(final)})
        write_synced(directory / node / METADATA, array.to_json().encode())
    ours = {OURS: {"version": 1, "tensors": len(tensors), "provenance": dict(provenance)}}
    for group in reversed(groups):  # the root last: it is what tells that there is a hierarchy
        _write_json(directory / group, {"zarr_format": 3, "node_type": "group", "attributes": {} if group else ours})
    sync_tree(directory)


def _array(tensor: StateRecord, node: str, shard_bytes: int | None) -> ZarrArray:
    size = itemsize(tensor.dtype)
    chunk = _block(tensor.shape, CHUNK_BYTES // size)
    shard = _block(tensor.shape, max((shard_bytes or SHARD_BYTES) // size, math.prod(chunk)))
    whole = tuple(-(-length // part) * part for length, part in zip(shard, chunk, strict=True))
    # Stock zarr 3.1 cannot read a shard without dims.
    return ZarrArray(node, tensor.shape, stored_as(tensor.dtype), whole, chunk, INDEX_CHECKSUM, bool(tensor.shape))


def _block(shape: Index, most: int) -> Index:
    """The largest run of at most ``most`` elements that divides a tensor of this shape into equal ones (almost)."""
    block = list(shape)
    for dim, length in enumerate(shape):
        inner = math.prod(shape[dim + 1 :])
        fitting = min(max(most // max(inner, 1), 1), length)
        if fitting:
            block[dim] = -(-length // -(-length // fitting))
        if fitting > 1 or inner <= most:
            break
    return tuple(max(length, 1) for length in block)


def _write_file(file: Location, array: ZarrArray, tensor: StateRecord, box: Box, fetch: Fetch, band_bytes: int) -> int:
    """One file, synced; returns the share of its elements in the fingerprint."""
    from google_crc32c import extend

    file.parent.mkdir(parents=True, exist_ok=True)
    chunks = list(array.chunks(box))
    stored = array.chunk_bytes + INDEX_CHECKSUM
    index = np.full((array.chunks_per_file, 2), _MISSING, "<u8")
    share = at = 0
    with created(file, _length(array, len(chunks))) as output:
        for number, part in chunks:
            index[number] = at, stored
            sums, checksum, end = Sums(), 0, at
            for raw in passing(fetch, tensor, part, band_bytes, sums):
                checksum = extend(checksum, bytes(raw))
                end = output.write(raw, end)
            for padding in _zeros(at + array.chunk_bytes - end, band_bytes):
                checksum = extend(checksum, padding)
                end = output.write(padding, end)
            at = output.write(checksum.to_bytes(INDEX_CHECKSUM, "little"), end)
            share = combine(share, sums.share)
        if array.sharded:
            raw_index = index.tobytes()
            output.write(raw_index + extend(0, raw_index).to_bytes(INDEX_CHECKSUM, "little"), at)
    return share


def _length(array: ZarrArray, chunks: int) -> int:
    """Bytes of a file of so many chunks."""
    return chunks * (array.chunk_bytes + INDEX_CHECKSUM) + array.index_bytes


def _zeros(count: int, most: int) -> Iterator[bytes]:
    for start in range(0, count, most):
        yield bytes(min(most, count - start))


def _name(part: str | int) -> str:
    """A plain file name for a part of a path: itself, or where it is none what is plain of it and its hash.

    It need not tell the part again: the attributes do.
    """
    text = str(part)
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", text)[:_LONGEST_NAME]
    if plain == text and text and not text.startswith((".", "__")) and text != METADATA:
        return text
    digest = xxhash.xxh3_64_hexdigest(text.encode(errors="surrogatepass"))
    return f"{plain.lstrip('._')}-{digest}"


def _parents(node: str) -> Iterator[str]:
    """The groups that hold a node, but for the root."""
    parts = node.split("/")
    for depth in range(1, len(parts)):
        yield "/".join(parts[:depth])


def _write_json(folder: Location, fields: Mapping[str, Any]) -> None:
    write_synced(folder / METADATA, json.dumps(fields, indent=1).encode())
