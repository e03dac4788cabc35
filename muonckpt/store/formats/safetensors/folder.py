"""Checkpoints of the safetensors format: one file, or a folder of files with an index as Hugging Face libraries use it.

The format records dtype, shape and place of each tensor.  The rest (parameter, slot, convention, pieces, digest,
fingerprint) is in a manifest in the header's ``__metadata__``, under ``muonckpt``: docs/formats/safetensors.md.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....box import Box
from ....chunks import in_columns
from ....errors import DamageError, DestinationError, SourceError, about
from ....fingerprint import as_hex
from ....record import Chunk, Extent, Manifest, StateRecord
from ....seal import check_digest, digest_of
from ...io.checksums import Sums
from ...io.location import Location
from ...io.new_file import write_synced
from ...io.regular import open_regular, read_whole
from ...reading.dtypes import itemsize
from . import header
from .header import CODE_OF_DTYPE, MANIFEST_KEY, METADATA_KEY, Header, HeaderEntry

INDEX_FILE = "model.safetensors.index.json"
"""Name of the index of a sharded checkpoint, as we write it.  Any other single index is read, too."""

_DATA = "data"
"""The file in that manifest's extents, which count from the data section, and so do not depend on its own length."""

_PARTS = "DCP_SHARDING_INFO"
"""A key that DCP's ``HuggingFaceStorageWriter`` writes to ``__metadata__``: the file's tensors may be parts of tensors
whose size it does not record.  Where it has written whole tensors there is an index."""

_SHARD = re.compile(r"model-[0-9]+-of-[0-9]+\.safetensors$")
"""Names of the files of a sharded checkpoint: such a file without an index is a part, or unfinished."""


def read_safetensors(path: Location) -> Manifest:
    """The manifest of a file, or of a folder with an index or a single file.  Reads headers only.

    Extents name files in ``folder(path)``.  Of tensors that others wrote only the name is known, which is their key.

    Raises:
        SourceError: there is none, it is damaged, or headers, index and manifest disagree.
    """
    try:
        files, index = ([path], None) if not path.is_dir() else _files(path)
        tensors: dict[str, StateRecord] = {}
        provenance: Mapping[str, Any] = {}
        for file in files:
            with about(file):
                recorded, tensors_of_file = _read_file(file, index)
                for tensor in tensors_of_file:
                    if tensors.setdefault(tensor.key, tensor) is not tensor:
                        raise DamageError(f"tensor {tensor.key!r} is in another file of the checkpoint as well")
            provenance = provenance or recorded
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error}") from error
    file_of_tensor = {key: tensor.chunks[0].item.file for key, tensor in tensors.items()}
    if index is not None and file_of_tensor != index.files:
        differing = sorted(file_of_tensor.items() ^ index.files.items())[0]
        raise DamageError(f"{path}: the index and the files disagree about tensor {differing[0]!r}")
    return Manifest(tuple(tensors.values()), (), provenance or {"format": "safetensors"})


def folder(path: Location) -> Location:
    """The directory in which the extents of `read_safetensors` name files."""
    return path if path.is_dir() else path.parent


def refuse(tensors: Sequence[StateRecord]) -> None:
    """Refuse tensors that the format cannot hold.

    Raises:
        SourceError: it cannot hold one of them; names the dtypes that it has.
    """
    for tensor in tensors:
        if tensor.dtype not in CODE_OF_DTYPE:
            raise SourceError(
                f"tensor {tensor.key!r}: safetensors has no dtype {tensor.dtype}; it has {', '.join(CODE_OF_DTYPE)}"
            )
        if tensor.key == METADATA_KEY:
            raise SourceError(f"safetensors keeps the name {METADATA_KEY!r} for itself; no tensor can have it")
        try:
            tensor.key.encode()
        except UnicodeEncodeError:
            raise SourceError(f"tensor {tensor.key!r}: the format demands names of valid Unicode") from None


def front(tensors: Sequence[StateRecord], provenance: Mapping[str, Any], sums: Sequence[tuple[str, int]] = ()) -> bytes:
    """The bytes before the elements of these tensors, which follow each other in this order.

    Args:
        sums: digest and share of the fingerprint of each tensor.  Without them the length is the same.

    Raises:
        DestinationError: the header would be longer than readers accept.
    """
    none = Sums()
    entries, chunks, start = {}, [], 0
    sums = sums or [(none.digest, none.share)] * len(tensors)
    for tensor, (digest, _) in zip(tensors, sums, strict=True):
        place = Extent(_DATA, start, length_of(tensor))
        entries[tensor.key] = HeaderEntry(tensor.dtype, tensor.shape, start, place.end)
        chunks.append(([Chunk(Box.of(tensor.shape), place, place, digest)], len(tensor.shape)))
        start = place.end
    described = (
        dataclasses.replace(tensor, chunks=own, fingerprint=as_hex(share))
        for tensor, own, (_, share) in zip(tensors, in_columns(chunks), sums, strict=True)
    )
    # "format" tells Hugging Face libraries whose tensors these are; some refuse a file without it.
    manifest = Manifest(tuple(described), (), provenance).to_json()
    head = Header(entries, {"format": "pt", MANIFEST_KEY: manifest}).encode()
    if len(head) - 8 > header.MAX_HEADER_BYTES:
        raise DestinationError(f"a header of {len(head)} bytes, of at most {header.MAX_HEADER_BYTES}; use --shard-size")
    return head


def shards(tensors: Sequence[StateRecord], most: int) -> list[tuple[str, list[StateRecord]]]:
    """The names of files, and the tensors in each, in order.

    A file has at most ``most`` bytes of elements, or one tensor.  Without tensors there is one empty file.
    """
    contents: list[list[StateRecord]] = [[]]
    used = 0
    for tensor in tensors:
        if contents[-1] and used + length_of(tensor) > most:
            contents.append([])
            used = 0
        contents[-1].append(tensor)
        used += length_of(tensor)
    return [(f"model-{number:05d}-of-{len(contents):05d}.safetensors", own) for number, own in enumerate(contents, 1)]


def write_shard_index(manifest: Manifest, names: Sequence[str], directory: Location) -> None:
    """Write the index of finished shards of these names, and wait until it is on disk.

    The digests of the shards' headers, which have those of their tensors, bind the files together.
    """
    headers = {}
    for name in names:
        with open_regular(directory / name) as opened:
            _, _, headers[name] = header.read_header(opened)
    files = {tensor.key: tensor.chunks[0].item.file for tensor in manifest.tensors}
    sizes = {"total_size": sum(map(length_of, manifest.tensors))}
    ours = {"version": 1, "headers": headers}
    seal = digest_of([sizes, ours, files])
    index = {"metadata": {**sizes, MANIFEST_KEY: {**ours, "digest": seal}}, "weight_map": files}
    write_synced(directory / INDEX_FILE, json.dumps(index, indent=1, ensure_ascii=False).encode())


@dataclass(frozen=True, slots=True)
class _Index:
    """The file of each tensor; and if we wrote the index, the digest of each file's header, else nothing."""

    files: Mapping[str, str]
    headers: Mapping[str, str]

    @classmethod
    def of(cls, data: Any) -> _Index:
        """The index in the JSON of its file.

        Raises:
            DamageError: it is not an index, or is ours and not the one that was written.
        """
        match data:
            case {"weight_map": dict(files)} if all(isinstance(name, str) for name in files.values()):
                pass
            case _:
                raise DamageError("damaged index: expected a weight_map of file names")
        match data.get("metadata"):
            case {"muonckpt": {"digest": recorded, "headers": dict(headers), **version}, **sizes}:
                check_digest(recorded, [sizes, {**version, "headers": headers}, files])
                return cls(files, headers)
            case {"muonckpt": _}:
                raise DamageError("damaged index: expected digests of headers under muonckpt")
        return cls(files, {})


def by_element_size(tensors: Sequence[StateRecord]) -> list[StateRecord]:
    """The tensors with large elements first, as the stock writer orders them, which aligns all of them."""
    return sorted(tensors, key=lambda tensor: -itemsize(tensor.dtype))


def length_of(tensor: StateRecord) -> int:
    """Bytes of its elements."""
    return Box.of(tensor.shape).numel * itemsize(tensor.dtype)


def _files(path: Location) -> tuple[list[Location], _Index | None]:
    """The files of a folder, and its index if there is one."""
    indices: list[Location] = sorted(path.glob("*.safetensors.index.json"), key=str)
    singles: list[Location] = sorted(path.glob("*.safetensors"), key=str)
    if not indices and len(singles) == 1 and not _SHARD.match(singles[0].name):
        return singles, None
    if len(indices) != 1:
        lost = not indices and any(_SHARD.match(single.name) for single in singles)
        kind = DamageError if lost else SourceError
        raise kind(f"{path}: expected one index (*.safetensors.index.json), found {len(indices)}")
    with about(indices[0]):
        try:
            index = _Index.of(json.loads(read_whole(indices[0])))
        except (ValueError, RecursionError) as error:
            raise DamageError(f"damaged index: {error}") from error
        names = sorted({Extent(name, 0, 0).file for name in (*index.files.values(), *index.headers)})
        return [path / name for name in names], index


def _read_file(file: Location, index: _Index | None) -> tuple[Mapping[str, Any], list[StateRecord]]:
    """Provenance and tensors of one file."""
    with open_regular(file) as opened:
        file_header, start, actual = header.read_header(opened)
    expected = actual if index is None else index.headers.get(file.name, actual)
    if actual != expected:
        raise DamageError(
            f"its header has digest {actual}, the index expects {expected}: it is damaged, or of another save"
        )
    if _PARTS in file_header.metadata and index is None:
        raise SourceError(
            "expected whole tensors, found what one rank had of them (by DCP's HuggingFaceStorageWriter with "
            "save_distributed): consolidate the files of all ranks with torch first"
        )
    text = file_header.metadata.get(MANIFEST_KEY)
    recorded = Manifest(()) if text is None else Manifest.from_json(text)
    known = {tensor.key: tensor for tensor in recorded.tensors}
    lost = sorted(known.keys() - file_header.entries.keys())
    if lost:
        raise DamageError(f"expected tensor {lost[0]!r}, which {METADATA_KEY} describes; found none")
    stored = []
    for key, entry in file_header.entries.items():
        place, box = Extent(file.name, start + entry.start, entry.stop - entry.start), Box.of(entry.shape)
        tensor = known.get(key)
        if tensor and (tensor.dtype, tensor.shape, [*tensor.boxes]) != (entry.dtype, entry.shape, [box]):
            raise DamageError(
                f"tensor {key!r}: {entry.dtype} of shape {entry.shape}, but {METADATA_KEY} says otherwise"
            )
        digest = None if tensor is None else tensor.chunks[0].digest
        stored.append(([Chunk(box, place, place, digest)], len(entry.shape)))
    tensors = [
        dataclasses.replace(known[key], chunks=chunks)
        if key in known
        else StateRecord(key, (key,), entry.shape, entry.dtype, chunks)
        for (key, entry), chunks in zip(file_header.entries.items(), in_columns(stored), strict=True)
    ]
    return recorded.provenance, tensors
