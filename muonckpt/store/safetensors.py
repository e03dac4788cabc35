"""Checkpoints of the safetensors format: one file, or a folder of files with an index as Hugging Face libraries use it.

The format says dtype, shape and place of each tensor.  What it cannot say (parameter, slot, convention, pieces,
digest, fingerprint) is a manifest in the header's ``__metadata__``, under ``muonckpt``: docs/formats/safetensors.md.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..box import Box
from ..errors import DestinationError, SourceError
from ..fingerprint import as_hex
from ..record import Chunk, Extent, Manifest, StateRecord
from . import safetensors_header as header
from .directory import write_synced
from .dtypes import itemsize
from .regular import open_regular
from .safetensors_header import CODES, METADATA, Entry, Header
from .stream import Fetch, create, passing, write_at
from .sums import Sums

INDEX = "model.safetensors.index.json"
"""Name of the index of a sharded checkpoint, as we write it.  Others are read if there is only one."""

OURS = "muonckpt"
"""Name of the manifest in ``__metadata__``."""

_DATA = "data"
"""What that manifest calls the data section: its extents count from there, so they do not depend on its own length."""

_MAX_INDEX = 1 << 30


def read(path: Path) -> Manifest:
    """What a file, or a folder with an index or a single file, holds.  Reads headers only.

    Extents name files in ``folder(path)``.  Tensors that we did not write have their name as key, and nothing else.

    Raises:
        SourceError: it is none, it is damaged, or headers, index and what is recorded of the tensors disagree.
    """
    try:
        files, expected = ([path], None) if not path.is_dir() else _files(path)
        tensors: dict[str, StateRecord] = {}
        provenance: Mapping[str, Any] = {}
        for file in files:
            with _at(file):
                recorded, mine = _read_file(file)
                for tensor in mine:
                    if tensors.setdefault(tensor.key, tensor) is not tensor:
                        raise SourceError(f"tensor {tensor.key!r} is in another file of the checkpoint as well")
            provenance = provenance or recorded
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error}") from error
    found = {key: tensor.chunks[0].item.file for key, tensor in tensors.items()}
    if expected is not None and found != expected:
        differing = sorted(found.items() ^ expected.items())[0]
        raise SourceError(f"{path}: the index and the files disagree about tensor {differing[0]!r}")
    return Manifest(tuple(tensors.values()), (), provenance or {"format": "safetensors"})


def folder(path: Path) -> Path:
    """The directory in which the extents of `read` name files."""
    return path if path.is_dir() else path.parent


def is_sharded(path: Path) -> bool:
    """Whether a directory holds safetensors files."""
    return any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json"))


def refuse(tensors: Sequence[StateRecord]) -> None:
    """Raises:
    SourceError: the format cannot hold one of the tensors; names all dtypes that it lacks.
    """
    for tensor in tensors:
        if tensor.dtype not in CODES:
            raise SourceError(
                f"tensor {tensor.key!r}: safetensors has no dtype {tensor.dtype}; it has {', '.join(CODES)}"
            )
        if tensor.key == METADATA:
            raise SourceError(f"safetensors keeps the name {METADATA!r} for itself; no tensor can have it")
        try:
            tensor.key.encode()
        except UnicodeEncodeError:
            raise SourceError(f"tensor {tensor.key!r}: the format demands names of valid Unicode") from None


def write_sharded(
    directory: Path,
    tensors: Sequence[StateRecord],
    fetch: Fetch,
    provenance: Mapping[str, Any],
    shard_bytes: int,
    band_bytes: int = 1 << 20,
) -> None:
    """Write files of at most ``shard_bytes`` of elements (a larger tensor has one of its own), and their index."""
    directory.mkdir()
    shards = _shards(tensors, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(directory / name, shard, fetch, provenance, band_bytes)
        weight_map |= {tensor.key: name for tensor in shard}
    index = {"metadata": {"total_size": sum(map(_length, tensors))}, "weight_map": weight_map}
    write_synced(directory / INDEX, json.dumps(index, indent=1, ensure_ascii=False).encode())


def write_file(
    file: Path, tensors: Sequence[StateRecord], fetch: Fetch, provenance: Mapping[str, Any], band_bytes: int = 1 << 20
) -> None:
    """Write one file, synced, front to back in bands of at most ``band_bytes``.

    Raises:
        DestinationError: the header would be longer than readers accept.
    """
    # Large elements first, as the stock writer does: each is then aligned to its own size.
    tensors = sorted(tensors, key=lambda tensor: -itemsize(tensor.dtype))
    head = _header(tensors, {}, provenance)
    front = head.encode()
    if len(front) - 8 > header.MAX_BYTES:
        raise DestinationError(f"{file}: a header of {len(front)} bytes, of at most {header.MAX_BYTES}; use shards")
    handle = create(file, len(front) + head.data_length)
    try:
        at, passed = len(front), {}
        for tensor in tensors:
            sums = passed[tensor.key] = Sums()
            for raw in passing(fetch, tensor, Box.of(tensor.shape), band_bytes, sums):
                at = write_at(handle, raw, at)
        final = _header(tensors, passed, provenance).encode()
        assert len(final) == len(front), "sums have as many digits as what stood in for them"
        write_at(handle, final, 0)
        os.fsync(handle)
    finally:
        os.close(handle)


def _header(tensors: Sequence[StateRecord], passed: Mapping[str, Sums], provenance: Mapping[str, Any]) -> Header:
    """The header, with sums of nothing for the tensors that have not passed yet."""
    entries, described, at, none = {}, [], 0, Sums()
    for tensor in tensors:
        entry = entries[tensor.key] = Entry(tensor.dtype, tensor.shape, at, at + _length(tensor))
        sums = passed.get(tensor.key, none)
        place = Extent(_DATA, at, _length(tensor))
        chunk = Chunk(Box.of(tensor.shape), place, place, sums.digest)
        described.append(dataclasses.replace(tensor, chunks=(chunk,), fingerprint=as_hex(sums.share)))
        at = entry.stop
    # "format" tells Hugging Face libraries whose tensors these are; some refuse a file without it.
    return Header(entries, {"format": "pt", OURS: Manifest(tuple(described), (), provenance).to_json()})


def _length(tensor: StateRecord) -> int:
    return Box.of(tensor.shape).numel * itemsize(tensor.dtype)


def _shards(tensors: Sequence[StateRecord], most: int) -> list[list[StateRecord]]:
    """The tensors in order, a new shard where the last one is full; one shard even if there is nothing."""
    shards: list[list[StateRecord]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + _length(tensor) > most:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += _length(tensor)
    return shards


def _files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files of a folder, and the file of each tensor if an index says it."""
    indices = sorted(path.glob("*.safetensors.index.json"))
    singles = sorted(path.glob("*.safetensors"))
    if not indices and len(singles) == 1:
        return singles, None
    if len(indices) != 1:
        raise SourceError(f"{path}: expected one index (*.safetensors.index.json), found {len(indices)}")
    with _at(indices[0]), open_regular(indices[0]) as handle, os.fdopen(handle, "rb", closefd=False) as stream:
        try:
            match json.loads(stream.read(_MAX_INDEX)):
                case {"weight_map": dict(named)} if all(isinstance(name, str) for name in named.values()):
                    names = sorted({Extent(name, 0, 0).file for name in named.values()})
                    return [path / name for name in names], named
        except (ValueError, RecursionError) as error:
            raise SourceError(f"damaged index: {error}") from error
        raise SourceError("damaged index: expected a weight_map of file names")


def _read_file(file: Path) -> tuple[Mapping[str, Any], list[StateRecord]]:
    """Provenance and tensors of one file."""
    with open_regular(file) as handle:
        found, start = header.read(handle)
    recorded = Manifest.from_json(found.metadata[OURS]) if OURS in found.metadata else Manifest(())
    known = {tensor.key: tensor for tensor in recorded.tensors}
    lost = sorted(known.keys() - found.entries.keys())
    if lost:
        raise SourceError(f"expected tensor {lost[0]!r}, which {METADATA} describes; found none")
    tensors = []
    for key, entry in found.entries.items():
        place = Extent(file.name, start + entry.start, entry.stop - entry.start)
        chunk = Chunk(Box.of(entry.shape), place, place)
        tensor = known.get(key)
        if tensor is None:
            tensors.append(StateRecord(key, (key,), entry.shape, entry.dtype, (chunk,)))
            continue
        if (tensor.dtype, tensor.shape, [c.box for c in tensor.chunks]) != (entry.dtype, entry.shape, [chunk.box]):
            raise SourceError(f"tensor {key!r}: {entry.dtype} of shape {entry.shape}, but {METADATA} says otherwise")
        digest = tensor.chunks[0].digest
        tensors.append(dataclasses.replace(tensor, chunks=(dataclasses.replace(chunk, digest=digest),)))
    return recorded.provenance, tensors


@contextmanager
def _at(place: Path) -> Iterator[None]:
    """Put the place in front of any source error raised inside."""
    try:
        yield
    except SourceError as error:
        raise SourceError(f"{place}: {error}") from error
