"""Our own format, a directory of DCP with a manifest; and Megatron's ``torch_dist``.

Megatron's ``torch_dist`` is a DCP checkpoint with ``metadata.json``, and everything but tensors in one item:
docs/formats/torch_dist.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from ...names.errors import SourceError, about, unwritable
from ...programs.signs import COMMON_FILE, COMMON_STATE, MEGATRON_FILE, METADATA_FILE
from ...record.record import MANIFEST_FILE, MANIFEST_VERSION, Blob, Extent, Manifest, StateRecord, record_fields
from ..io.checksums import xxh3_128
from ..io.location import Location, is_file, is_there, source_errors
from ..io.new_file import write_parts, write_synced
from ..io.regular import open_regular, read_text_file
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
    with source_errors(file):
        text = read_text_file(file)
    with about(file):
        return Manifest.from_json(text)


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
    makers: dict[str, _Make] = {
        **{name: partial(list, [data]) for name, data in extra.items()},
        METADATA_FILE: metadata,
    }
    # The manifest has the digests of the other descriptions.
    digests = {name: xxh3_128(make()) for name, make in makers.items()}
    texts = map(str.encode, replace(manifest, files=digests).json_parts())
    for name, parts in [(MANIFEST_FILE, texts), *((name, make()) for name, make in makers.items())]:
        try:
            write_parts(directory / name, parts)
        except OSError as error:
            raise unwritable(directory / name, error) from error


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


def common_file(path: Location) -> tuple[Blob, ...]:
    """Return the item that Megatron keeps beside the checkpoint, if it does."""
    if not is_there(path / COMMON_FILE):
        return ()
    with open_regular(path / COMMON_FILE) as file:
        return (Blob(COMMON_FILE, (COMMON_FILE,), Extent(COMMON_FILE, 0, file.size)),)


def is_torch_dist(path: Location) -> bool:
    """Return whether Megatron takes a directory for a ``torch_dist`` checkpoint."""
    if not is_file(path / MEGATRON_FILE):
        return False
    with open_regular(path / MEGATRON_FILE) as file:
        data = file.read(0, min(file.size, 1 << 16))
    try:
        fields = json.loads(data)
    except ValueError:
        return False
    return isinstance(fields, dict) and fields.get("sharded_backend") == "torch_dist"


def lost_common_file(path: Location, manifest: Manifest) -> tuple[Blob, ...]:
    """Return Megatron's item of everything but tensors, of one byte if no description gives its length."""
    if any(blob.key == COMMON_STATE for blob in manifest.blobs) or not is_torch_dist(path):
        return ()
    return (Blob(COMMON_FILE, (COMMON_FILE,), Extent(COMMON_FILE, 0, 1)),)


_BACKEND = b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'


def write_torch_dist(manifest: Manifest, directory: Location) -> None:
    """Write our description of a checkpoint, DCP's and Megatron's, and sync them.

    Without a common state Megatron loads no tensor, so an empty one is written where there is none.
    """
    from .torch_save.plain_item import plain_item  # readers do not need it

    if not any(blob.key in (COMMON_STATE, COMMON_FILE) for blob in manifest.blobs):
        data = plain_item({})
        write_synced(directory / COMMON_FILE, data)
        common = (replace(blob, digest=xxh3_128([data])) for blob in common_file(directory))
        manifest = replace(manifest, blobs=(*manifest.blobs, *common))
    write_native(manifest, directory, {MEGATRON_FILE: _BACKEND})
