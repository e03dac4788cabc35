"""Whether the descriptions of a checkpoint are those that were written, and agree with each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..errors import MuonckptError, SourceError
from ..record import MANIFEST_FILE, Blob, Manifest, StateRecord
from .formats.native_writer import stock_metadata
from .formats.registry import DCP, OWN, SAFETENSORS, ZARR
from .formats.signs import METADATA_FILE
from .io.checksums import xxh3_128
from .io.location import Location, at_each
from .io.regular import open_regular, read_whole
from .io.side_file import items_beside
from .open_checkpoint import OpenCheckpoint


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault.  ``kind`` is one word for programs; ``message`` says what was expected, what was found, and where."""

    kind: str
    key: str | None
    message: str


def description_faults(checkpoint: OpenCheckpoint, framed: bool) -> Iterator[Finding]:
    """What the descriptions, and the names and sizes of the files, show to be damaged.

    Args:
        framed: whether the items of a checkpoint of ours are known to be what its manifest says.
    """
    yield from (Finding("files", None, str(fault)) for fault in checkpoint.faults)
    if checkpoint.lacks_manifest:
        message = f"{checkpoint.path} was saved with a {MANIFEST_FILE}, which is missing; restore it from a copy"
        yield Finding("manifest", None, message)
    if checkpoint.format is DCP:
        yield from _strange_keys(checkpoint.outline)
    if checkpoint.format is OWN:
        yield from _against_metadata(checkpoint, framed)
    digest = _digest_of_items(checkpoint)
    if digest is not None:
        yield from _items_faults(items_beside(checkpoint.path), digest)


def _items_faults(place: Location, digest: str) -> Iterator[Finding]:
    """What is wrong with the file of items that was written beside a checkpoint."""
    if not place.exists():
        yield Finding(
            "items",
            None,
            f"{place} is missing, in which hyper-parameters and other items were written beside this checkpoint; "
            "restore it from a copy, or write one without items with --tensors-only",
        )
    elif (actual := xxh3_128([read_whole(place)])) != digest:
        yield Finding("items", None, f"{place}: digest {actual}, expected {digest}: it is damaged, or of another save")


def _digest_of_items(checkpoint: OpenCheckpoint) -> str | None:
    """The digest of the file of items beside a checkpoint of tensors only, if one was written and recorded."""
    if checkpoint.format not in (SAFETENSORS, ZARR):
        return None
    match checkpoint.provenance.get("exported"):
        case {"items_digest": str(digest)}:
            return digest
    return None


def _strange_keys(manifest: Manifest) -> Iterator[Finding]:
    """Keys that are not their paths joined by dots, where the writer has made keys so: DCP's own planner does."""
    entries: tuple[StateRecord | Blob, ...] = (*manifest.tensors, *manifest.blobs)
    made = {entry.key: ".".join(map(str, entry.path)) for entry in entries}
    strange = {key: joined for key, joined in made.items() if key != joined}
    if 2 * len(strange) < len(made):
        for key, joined in strange.items():
            yield Finding("key", key, f"{key!r} in {METADATA_FILE} has the path of {joined!r}; expected the same")


def _against_metadata(checkpoint: OpenCheckpoint, framed: bool) -> Iterator[Finding]:
    """Compare what describes the checkpoint to other programs, as DCP's metadata, with the manifest."""
    others = dict(checkpoint.outline.files)
    if not (framed and _is_as_written(checkpoint.manifest, checkpoint.path)):
        yield from _against(checkpoint)
    for name in sorted(others.keys() - {METADATA_FILE}):
        try:
            actual = xxh3_128([read_whole(checkpoint.path / name)])
        except (SourceError, OSError) as error:
            actual = str(error)
        if actual != others[name]:
            message = f"{checkpoint.path / name}: digest {actual}, expected {others[name]}, as {MANIFEST_FILE} has it"
            yield Finding("metadata", None, message)


def _is_as_written(manifest: Manifest, directory: Location) -> bool:
    """Whether DCP's metadata say what the manifest says, in the very bytes that this package writes, and nothing in the
    files overlaps or reaches beyond their ends."""
    try:
        return _lie_in_files(manifest, directory) and _is_metadata_of(manifest, read_whole(directory / METADATA_FILE))
    except (MuonckptError, OSError):
        return False  # `_against` finds out what is wrong


def _lie_in_files(manifest: Manifest, directory: Location) -> bool:
    """Whether items follow one another in their files."""
    columns = manifest.columns
    numbers = {name: number for number, name in enumerate(columns.names)}
    of_blobs = [(numbers.setdefault(b.item.file, len(numbers)), b.item.offset, b.item.end) for b in manifest.blobs]
    of_chunks = np.stack([columns.file, columns.item, columns.item + columns.item_length], axis=1)
    extents = np.concatenate([of_chunks, np.array(of_blobs, np.int64).reshape(-1, 3)])
    extents = extents[np.lexsort((extents[:, 1], extents[:, 0]))]
    following = extents[1:]
    same_file = extents[:-1, 0] == following[:, 0]
    if (extents[:-1, 2] > following[:, 1])[same_file].any():
        return False
    ends = np.zeros(len(numbers), np.int64)
    np.maximum.at(ends, extents[:, 0], extents[:, 2])

    def size(name: str) -> int:
        with open_regular(directory / name) as file:
            return file.size

    return bool((np.array(at_each(directory, size, numbers), np.int64) >= ends).all())


def _is_metadata_of(manifest: Manifest, data: bytes) -> bool:
    """Whether these are the bytes of the ``.metadata`` that is written for a manifest."""
    position = 0
    for part in stock_metadata(manifest):
        if data[position : position + len(part)] != part:
            return False
        position += len(part)
    recorded = manifest.files.get(METADATA_FILE)
    return position == len(data) and recorded in (None, xxh3_128([data]))


def _against(checkpoint: OpenCheckpoint) -> list[Finding]:
    """What is wrong with DCP's metadata, which were not found to be those of the manifest."""
    from .formats.dcp.directory import DcpReader  # not needed where nothing is wrong

    recorded = checkpoint.outline.files.get(METADATA_FILE)
    try:
        reader = DcpReader(checkpoint.path)
        for fault in reader.faults:
            raise fault
        stock = replace(reader.outline, tensors=reader.locate(reader.outline.tensors))
        disagreements = list(_disagreements(checkpoint, stock))
        if recorded not in (None, reader.digest) and not disagreements:
            message = f"{checkpoint.path / METADATA_FILE}: digest {reader.digest}, {MANIFEST_FILE} has another"
            disagreements.append(Finding("metadata", None, message))
    except MuonckptError as error:
        return [Finding("metadata", None, f"{checkpoint.path / METADATA_FILE}: {error}")]
    return disagreements


def _disagreements(checkpoint: OpenCheckpoint, metadata: Manifest) -> Iterator[Finding]:
    """What DCP's metadata say otherwise than the manifest."""
    stock = _described(metadata)
    own = _described(checkpoint.manifest)
    for key in sorted(own.keys() | stock.keys()):
        if key not in own or key not in stock:
            file = MANIFEST_FILE if key in own else METADATA_FILE
            message = f"{key!r} is in {file} only, expected it in {MANIFEST_FILE} and {METADATA_FILE}"
            yield Finding("metadata", key, message)
            continue
        for fact, _ in sorted(own[key].items() ^ stock[key].items(), key=str)[:1]:
            values = f"{own[key].get(fact)} in {MANIFEST_FILE}, {stock[key].get(fact)} in {METADATA_FILE}"
            yield Finding("metadata", key, f"{key!r}: {fact} {values}; expected the same")


def _described(manifest: Manifest) -> dict[str, dict[str, object]]:
    """The facts that both descriptions state, by the key of each tensor and item."""
    described: dict[str, dict[str, object]] = {}
    for tensor in manifest.tensors:
        known = described[tensor.key] = {"dtype": tensor.dtype, "shape": tensor.shape, "path": tensor.path}
        known |= {f"box {chunk.box}": (chunk.payload, chunk.crc32) for chunk in tensor.chunks if chunk.box.numel}
    for blob in manifest.blobs:
        described[blob.key] = {"path": blob.path, "place": blob.item}
    return described
