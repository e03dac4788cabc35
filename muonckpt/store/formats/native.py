"""Our own format, a directory of DCP with a manifest; and Megatron's ``torch_dist``.

Megatron's ``torch_dist`` is a DCP checkpoint with ``metadata.json``, and everything but tensors in one item:
docs/formats/torch_dist.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from ...names.errors import DamageError, DestinationError, SourceError, about
from ...names.vocabulary import Convention
from ...programs.signs import COMMON_FILE, COMMON_STATE, MEGATRON_FILE, METADATA_FILE
from ...record.chunks import Chunk, in_columns
from ...record.json_fields import matching, optional
from ...record.record import DIGEST, FINGERPRINT, MANIFEST_FILE, MANIFEST_VERSION, Manifest, StateRecord, record_fields
from ..io.checksums import xxh3_128
from ..io.location import Location
from ..io.new_file import write_parts, write_synced
from ..io.regular import read_text_file
from ..reading.payloads import Payloads, Reader


def reader(path: Location) -> Reader:
    """Read a checkpoint in our own format.

    Raises:
        DamageError: the manifest is missing or damaged.
        SourceError: it is of another version, or cannot be read.
    """
    return Reader(read_native(path), Payloads(path))


def read_native(path: Location) -> Manifest:
    file = path / MANIFEST_FILE
    try:
        with about(file):
            return Manifest.from_json(read_text_file(file))
    except OSError as error:
        raise SourceError(f"cannot read {file}: {error}") from error


def write_native(manifest: Manifest, directory: Location, extra: Mapping[str, bytes] = MappingProxyType({})) -> None:
    """Write all descriptions of a checkpoint, ours, DCP's and ``extra`` ones by file name, and sync them.

    DCP's, which makes a directory a checkpoint to stock programs, comes last.

    Raises:
        LayoutError: a key occurs twice, or two chunks of a tensor begin at the same place.
        DestinationError: a file exists, or cannot be written.
    """
    from .dcp_metadata import metadata_parts  # readers do not need it

    # Megatron's file of everything but tensors is no item of DCP's.
    blobs = tuple(blob for blob in manifest.blobs if blob.item.file != COMMON_FILE)
    metadata = _repeatable(partial(metadata_parts, replace(manifest, blobs=blobs)))
    _write_descriptions(manifest, directory, {**_makers(extra), METADATA_FILE: metadata})


def write_torch_checkpointing(manifest: Manifest, directory: Location, extra: Mapping[str, bytes]) -> None:
    """Write the manifest, then torch_checkpointing's descriptions by file name; raises as `write_native`."""
    _write_descriptions(manifest, directory, _makers(extra))


def _makers(descriptions: Mapping[str, bytes]) -> dict[str, _Make]:
    return {name: partial(list, [data]) for name, data in descriptions.items()}


def _write_descriptions(manifest: Manifest, directory: Location, makers: Mapping[str, _Make]) -> None:
    """Write the manifest, which has the digests of the other descriptions, then these in order."""
    digests = {name: xxh3_128(make()) for name, make in makers.items()}
    texts = map(str.encode, replace(manifest, files=digests).json_parts())
    for name, parts in [(MANIFEST_FILE, texts), *((name, make()) for name, make in makers.items())]:
        try:
            write_parts(directory / name, parts)
        except OSError as error:
            raise DestinationError(f"cannot write {directory / name}: {error.strerror or error}") from error


_Make = Callable[[], Iterable[bytes]]
"""Makes a description, in parts."""

_REPEATABLE_BYTES = 64 << 20
"""Most bytes of a description that stay in memory from its digest until it is written; a longer one is made twice."""


def _repeatable(make: _Make) -> _Make:
    """Return a function that yields the same parts again, from memory unless they are too many."""
    parts, size = list[bytes](), 0
    for part in make():
        parts.append(part)
        size += len(part)
        if size > _REPEATABLE_BYTES:
            return make
    return lambda: parts


_Value = TypeVar("_Value")


def reader_of_lines(path: Location) -> Reader:
    """Read a checkpoint whose manifest is damaged: by DCP's description, with the facts in lines that are whole.

    A manifest has a line for each tensor and each item.  Digests, fingerprints and momentum conventions are read from
    it: where one of these is damaged, bytes and the others show it.

    Raises:
        SourceError: DCP's description cannot be read either, or no line of the manifest can be.
    """
    from . import dcp  # not needed where nothing is wrong

    stock = dcp.reader(path)
    lines = _readable_lines(read_text_file(path / MANIFEST_FILE))
    if not lines:
        raise DamageError(f"{path / MANIFEST_FILE}: no line of it can be read")
    # Of each line what can prove itself is added to DCP's description.
    outline, tensors = stock.outline, []
    digested = ((_digested_chunks(t, lines.get(t.key, {})), len(t.shape)) for t in outline.tensors)
    for tensor, chunks in zip(outline.tensors, in_columns(digested), strict=True):
        fingerprint = _field(lines, tensor.key, "fingerprint", partial(optional, matching(FINGERPRINT)))
        convention = _field(lines, tensor.key, "convention", partial(optional, Convention))
        tensors.append(replace(tensor, chunks=chunks, fingerprint=fingerprint, convention=convention))
    blobs = tuple(replace(blob, digest=_field(lines, blob.key, "digest", matching(DIGEST))) for blob in outline.blobs)
    return replace(stock, outline=replace(outline, tensors=tuple(tensors), blobs=blobs))


def _readable_lines(text: bytes) -> Mapping[str, Mapping[str, Any]]:
    """Return the fields of tensors and items, by key, in the lines of a damaged manifest that are JSON."""
    lines: dict[str, Mapping[str, Any]] = {}
    for line in text.split(b"\n"):
        with suppress(ValueError, RecursionError):
            fields = json.loads(line.strip().removesuffix(b","))
            if isinstance(fields, dict) and isinstance(fields.get("key"), str):
                lines[fields["key"]] = fields
    return lines


def _field(lines: Mapping[str, Mapping[str, Any]], key: str, name: str, read: Callable[[Any], _Value]) -> _Value | None:
    try:
        return read(lines[key][name])
    except (KeyError, TypeError, ValueError):
        return None


def _digested_chunks(tensor: StateRecord, line: Mapping[str, Any]) -> list[Chunk]:
    """Return the chunks of a tensor with the digests in a line that has the same items of files in the same order."""
    chunks = list(tensor.chunks)
    match line:
        case {"chunks": {"item": list(offsets), "item_length": list(lengths), "digest": list(digests)}}:
            _, stock_offsets, stock_lengths = tensor.chunks.items
            if (offsets, lengths, len(digests)) == (stock_offsets, stock_lengths, len(chunks)):
                for number, digest in enumerate(digests):
                    if isinstance(digest, str) and DIGEST.fullmatch(digest):
                        chunks[number] = replace(chunks[number], digest=digest)
    return chunks


_VERSION = 1

_NO_CHUNKS: Mapping[str, list[int]] = {
    name: [] for name in ("file", "item", "item_length", "payload", "payload_length", "crc32", "digest")
}


def entry_of(tensor: StateRecord) -> dict[str, Any]:
    """Return a tensor's fields (docs/formats/manifest.md, "A tensor") and their version."""
    return {"version": _VERSION, **json.loads(json.dumps(record_fields(tensor)))}


def tensor_of(entry: Mapping[str, Any]) -> StateRecord:
    """Return the tensor of such an entry, without chunks.

    Raises:
        SourceError: the version is unknown, or a field is missing or of another type.
    """
    if entry.get("version") != _VERSION:
        raise SourceError(f"entry of version {entry.get('version')!r}; this program reads version {_VERSION}")
    # Its fields are checked as those of a tensor in a manifest, with no chunks.
    layout = entry.get("layout")
    layout_number = {} if layout is None else {"layout": 0}
    tensor: dict[str, Any] = {**entry, **layout_number, "chunks": {"boxes": 0, **_NO_CHUNKS}}
    manifest = {
        "format": "muonckpt",
        "version": MANIFEST_VERSION,
        "provenance": {},
        "data_files": [],
        "layouts": [] if layout is None else [layout],
        "boxes": [{"lo": [], "hi": []}],
        "tensors": [tensor],
        "blobs": [],
    }
    return Manifest.from_json(json.dumps(manifest)).tensors[0]


_BACKEND = b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'


def write_torch_dist(manifest: Manifest, directory: Location) -> None:
    """Write our description of a checkpoint, DCP's and Megatron's, and sync them.

    Without a common state Megatron loads no tensor, so an empty one is written where there is none.
    """
    from .dcp import common_file  # readers need neither
    from .torch_save.plain_item import plain_item

    if not any(blob.key in (COMMON_STATE, COMMON_FILE) for blob in manifest.blobs):
        (directory / COMMON_FILE).unlink(missing_ok=True)  # left by a run that was killed right after this
        data = plain_item({})
        write_synced(directory / COMMON_FILE, data)
        common = (replace(blob, digest=xxh3_128([data])) for blob in common_file(directory))
        manifest = replace(manifest, blobs=(*manifest.blobs, *common))
    write_native(manifest, directory, {MEGATRON_FILE: _BACKEND})
