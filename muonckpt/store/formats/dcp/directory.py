"""Checkpoints of torch.distributed.checkpoint (DCP): a directory of ``.metadata`` and ``__{rank}_{n}.distcp`` files.

``.metadata`` lists the tensors, the boxes in which they are stored, and the file and range of each box's item; an item
repeats dtype and shape and adds strides (:mod:`.items`), for which it is the authority.  Both are read without torch
and without running any code in them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ....box import Box
from ....chunks import Boxes, Chunks
from ....columns import UNKNOWN, Columns, Row
from ....errors import DamageError, SourceError, about
from ....record import Blob, Extent, Manifest, StateRecord
from ....vocabulary import KeyPath
from ...io import limits
from ...io.bounds import extent_faults
from ...io.checksums import xxh3_128
from ...io.location import Location
from ...io.regular import open_regular
from ...reading.payloads import Payloads
from ..signs import COMMON_FILE, METADATA_FILE
from .items import located
from .metadata_pickle import Metadata, StoredItem, TensorMeta, parse_metadata


class DcpReader:
    """Reads ``.metadata`` and the sizes of the files; opens an item when its elements are located.

    ``faults`` are files that are missing, cut or not regular, and items that overlap.  ``digest`` is the xxh3-128 of
    ``.metadata`` in hex.

    Raises:
        SourceError: there is no checkpoint; or its metadata is damaged, refused or contradicts itself.
    """

    def __init__(self, path: Location) -> None:
        self.payloads = Payloads(path)
        try:
            data = _read_metadata(path)
            self.digest = xxh3_128([data])
            with about(path / METADATA_FILE):
                manifest = _manifest(parse_metadata(data))
            self.outline = replace(manifest, blobs=(*manifest.blobs, *common_file(path)))
            self.faults = tuple(extent_faults(path, named_items(self.outline)))
        except OSError as error:
            raise SourceError(f"cannot read {path}: {error}") from error

    def locate(self, tensors: Sequence[StateRecord]) -> tuple[StateRecord, ...]:
        """The tensors with the place and the CRC-32 of each chunk, as its item says; in the order of files."""
        try:
            return located(self.payloads.directory, tensors)
        except OSError as error:
            raise SourceError(f"cannot read {self.payloads.directory}: {error}") from error


def common_file(path: Location) -> tuple[Blob, ...]:
    """The item that Megatron keeps beside the checkpoint, if it does."""
    if not (path / COMMON_FILE).exists():
        return ()
    with open_regular(path / COMMON_FILE) as file:
        return (Blob(COMMON_FILE, (COMMON_FILE,), Extent(COMMON_FILE, 0, file.size)),)


# From metadata to manifest.


def _manifest(metadata: Metadata) -> Manifest:
    chunks = {(key, offsets) for key, tensor in metadata.tensors.items() for offsets, _ in tensor.chunks}
    planned = chunks | {(key, None) for key in metadata.blobs}
    for key, offsets in metadata.storage.keys() - planned:
        raise DamageError(f"expected items of known tensors only, found one for {key!r} at offsets {offsets}")
    optimizers = _optimizers(metadata.paths)
    return Manifest(
        tuple(_records(metadata, optimizers)),
        tuple(_blob(key, metadata) for key in metadata.blobs),
        {"format": "torch.distributed.checkpoint", "version": metadata.version, "not_kept": list(metadata.extra)},
    )


def _records(metadata: Metadata, optimizers: Collection[KeyPath]) -> Iterator[StateRecord]:
    rows, places = list[Row](), list[tuple[int, Boxes]]()
    known: dict[object, Boxes] = {}
    for key, tensor in metadata.tensors.items():
        cut = tensor.size, tensor.chunks
        if cut not in known:
            known[cut] = _boxes(key, tensor)
        places.append((len(rows), known[cut]))
        for offsets, _ in tensor.chunks:
            item = _item(key, offsets, metadata)
            rows.append((item.file, item.offset, item.length, UNKNOWN, UNKNOWN, None, UNKNOWN))
    columns = Columns.of(rows)
    for (key, tensor), place in zip(metadata.tensors.items(), places, strict=True):
        path = _path(key, metadata)
        name, slot = _optimizer_state(path, optimizers)
        yield StateRecord(key, path, tensor.size, tensor.dtype, Chunks(columns, *place), name=name, slot=slot)


def _boxes(key: str, tensor: TensorMeta) -> Boxes:
    boxes = []
    for offsets, sizes in tensor.chunks:
        if not len(offsets) == len(sizes) == len(tensor.size):
            raise DamageError(f"tensor {key!r}: expected {len(tensor.size)} dims, found {offsets} and {sizes}")
        boxes.append(Box(offsets, tuple(map(int.__add__, offsets, sizes))))
        if any(hi > size for hi, size in zip(boxes[-1].hi, tensor.size, strict=True)):
            raise DamageError(f"tensor {key!r}: expected boxes within shape {tensor.size}, found {boxes[-1]}")
    return Boxes.of_all(boxes, len(tensor.size))


def _item(key: str, offsets: tuple[int, ...] | None, metadata: Metadata) -> StoredItem:
    item = metadata.storage.get((key, offsets))
    where = "" if offsets is None else f" at offsets {offsets}"
    if item is None:
        raise DamageError(f"expected a stored item for {key!r}{where}, found none: its writer did not finish")
    if item.transforms:
        raise SourceError(f"expected a plain item for {key!r}{where}, found one encoded with {item.transforms}")
    return item


def _blob(key: str, metadata: Metadata) -> Blob:
    item = _item(key, None, metadata)
    return Blob(key, _path(key, metadata), Extent(item.file, item.offset, item.length))


def _path(key: str, metadata: Metadata) -> KeyPath:
    return metadata.paths.get(key, (key,))


def _optimizers(paths: Mapping[str, KeyPath]) -> set[KeyPath]:
    """The paths of optimizers in the nested state dict: those with a "param_groups"."""
    return {path[:depth] for path in paths.values() for depth, part in enumerate(path) if part == "param_groups"}


def _optimizer_state(path: KeyPath, optimizers: Collection[KeyPath]) -> tuple[str | None, str | None]:
    """Parameter and slot of ``(*optimizer, "state", parameter, slot)``; None where the structure is another."""
    match path:
        case (*where, "state", str(name), str(slot)) if tuple(where) in optimizers:
            return name, slot
    return None, None


# Files.


def _read_metadata(path: Location) -> bytes:
    if not path.is_dir():
        raise SourceError(f"expected a checkpoint directory, found no directory {path}")
    names = {entry.name for entry in path.iterdir()}
    if METADATA_FILE not in names:
        if any(fnmatch.fnmatchcase(name, f"__*{METADATA_FILE}") for name in names):
            raise SourceError(
                f"{path} holds one __<rank>.metadata for each rank, as DCP writes with use_collectives=False: each "
                "knows only its own rank, so they cannot be resharded; load them on the same ranks and save again"
            )
        unfinished = f": a save into {path} did not finish" if f"{METADATA_FILE}.tmp" in names else ""
        below = _checkpoints_below(path, names)
        instead = f"; there is one in {', '.join(below[:8])}: give the path of one" if below else ""
        raise SourceError(f"expected {METADATA_FILE} in {path}, found none{unfinished}{instead}")
    with open_regular(path / METADATA_FILE) as file:
        size = file.size
        limits.check_description(path / METADATA_FILE, size)
        return file.read(0, size)


def _checkpoints_below(path: Location, names: Collection[str]) -> list[str]:
    """The folders here that are checkpoints, or hold the folders of one, sorted."""

    def is_one(place: Location) -> bool:
        if (place / METADATA_FILE).exists():
            return True
        return place.is_dir() and any((folder / METADATA_FILE).exists() for folder in place.iterdir())

    return sorted(name for name in names if is_one(path / name))


def named_items(manifest: Manifest) -> Iterator[tuple[Extent, str]]:
    """Every item, and what to call it."""
    for tensor in manifest.tensors:
        yield from ((chunk.item, f"{tensor.key!r} box {chunk.box}") for chunk in tensor.chunks)
    yield from ((blob.item, repr(blob.key)) for blob in manifest.blobs)
