"""Checkpoints of torch.distributed.checkpoint (DCP): a directory of ``.metadata`` and ``__{rank}_{n}.distcp`` files.

``.metadata`` lists the tensors, their boxes, and the file and range of each box's item; an item repeats dtype and shape
and adds strides, for which it is the authority.  Both are read without running any code.  accelerate saves one
checkpoint in sibling folders.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, repeat, starmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import Box, Index
from ...names.errors import DamageError, SourceError, about
from ...names.keys import optimizers_of, slot_in
from ...names.wording import counted, listed
from ...programs.signs import METADATA_FILE, UNREAD
from ...record.chunks import Boxes, Chunks, Strides, columns_of, on_columns
from ...record.columns import UNKNOWN, Columns, Row
from ...record.record import Blob, Extent, Manifest, StateRecord, entry_keys
from ..io import limits
from ..io.location import Location, entries_of, folders_with, is_folder, is_there, listing, names_in, source_errors
from ..io.regular import File, extent_faults, open_regular
from ..reading.blocks import join_ranges
from ..reading.payloads import Payloads, Reader
from .dcp_metadata import Metadata, StoredItem, TensorMeta, parse_metadata
from .native import common_file, lost_common_file
from .torch_save import tensor_item
from .torch_save.tensor_item import ItemTemplate


def locate_chunks(path: Location, tensors: Sequence[StateRecord]) -> tuple[StateRecord, ...]:
    """Return tensors with ``payload``, ``crc32`` and ``strides`` of each chunk, as its item says.

    Raises:
        SourceError: an item is not the dense tensor that the metadata promise; names the tensor, the box and the file.
    """
    columns = columns_of(tensor.chunks for tensor in tensors)
    payload, payload_length, crc32 = columns.payload(), columns.payload_length(), columns.crc32.copy()
    strides: dict[int, Index] = {}
    offsets, lengths = columns.item.tolist(), columns.item_length().tolist()
    chunk_boxes: list[tuple[StateRecord, Box]] = []
    for tensor in tensors:
        chunk_boxes += zip(repeat(tensor), tensor.boxes, strict=False)

    def read_items(rows: NDArray[np.int64]) -> None:
        name = columns.names[columns.file[rows[0]]]
        # Most items are as torch and we write them, and need only be compared with a template.
        templates: dict[int, ItemTemplate] = {}
        for row in rows.tolist():
            tensor, box = chunk_boxes[row]
            template = tensor_item.template(tensor.dtype, box.shape)
            if template.length == lengths[row]:
                templates[row] = template
        with open_regular(path / name) as file:
            around = _Surroundings(file, ((template, offsets[row]) for row, template in templates.items()))
            for row in rows.tolist():
                # An item that is like its template need not be parsed.
                offset, known = offsets[row], templates.get(row)
                if known is not None and (payload_crc32 := around.crc32(known, offset)) is not None:
                    payload[row], payload_length[row] = offset + len(known.head), known.payload_length
                    crc32[row] = payload_crc32
                    continue
                tensor, box = chunk_boxes[row]
                try:
                    item = tensor_item.read_tensor(file.read, offset, lengths[row])
                    if (item.dtype, item.shape) != (tensor.dtype, box.shape):
                        raise SourceError(
                            f"expected {tensor.dtype} of shape {box.shape}, as .metadata says; found {item.dtype} of "
                            f"shape {item.shape}"
                        )
                except SourceError as error:
                    where = f"{path / name} at byte {offset}: tensor {tensor.key!r} box {box}"
                    raise DamageError(f"{where}: {error}") from error
                payload[row], payload_length[row] = item.offset, item.length
                crc32[row] = UNKNOWN if item.crc32 is None else item.crc32
                if not item.row_major:
                    strides[row] = item.strides  # saved while transposed or channels-last

    # The rows of each file, in the order of its items.
    order = np.lexsort((columns.item, columns.file))
    rows_by_file = np.split(order, np.flatnonzero(np.diff(columns.file[order])) + 1) if len(order) else []
    if len(rows_by_file) > 1:
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            list(pool.map(read_items, rows_by_file))
    else:
        list(map(read_items, rows_by_file))
    # The same chunks, with what the items say.
    extents = columns.item, columns.item_length(), payload, payload_length
    located = Columns.of_extents(columns.names, columns.file, *extents, columns.digest, columns.has_digest, crc32)
    located_tensors = []
    for tensor, chunks in zip(tensors, on_columns((tensor.chunks for tensor in tensors), located), strict=True):
        chunk_strides: Strides = tuple(map(strides.get, range(chunks.start, chunks.stop))) if strides else ()
        chunks = replace(chunks, strides=chunk_strides if any(chunk_strides) else None)
        located_tensors.append(replace(tensor, chunks=chunks))
    return tuple(located_tensors)


_FILES_AT_ONCE = 16
"""Files, or objects, from which threads read at once: a store, or a network's disk, is slow to answer."""


class _Surroundings:
    """Reads the bytes around the payloads of one file's items, of many items at a time.

    Args:
        items: the items that may be like their template, each with its first byte, in the order of the file.
    """

    def __init__(self, file: File, items: Iterable[tuple[ItemTemplate, int]]) -> None:
        self._file = file
        ends = chain.from_iterable(chain.from_iterable(starmap(_spans, items)))
        start, stop = np.fromiter(ends, np.int64).reshape(-1, 2).T
        runs = join_ranges(start, stop, file.gap, file.max_bytes)
        self._runs = zip(runs.start.tolist(), runs.stop.tolist(), strict=True)
        self._start = self._stop = 0
        self._data = b""
        """The run that was read last; shorter than from start to stop where the file ends."""

    def crc32(self, template: ItemTemplate, offset: int) -> int | None:
        """Return the CRC-32 that the next item has of its payload; None if the item is not like its template."""
        head, tail = (self._bytes(*span) for span in _spans(template, offset))
        return template.crc32_of(head, tail)

    def _bytes(self, start: int, stop: int) -> bytes:
        while stop > self._stop:
            self._start, self._stop = next(self._runs)
            self._data = self._file.read(self._start, self._stop - self._start)
        if start < self._start:  # items overlap, so that they cannot be read in order
            return b""
        return self._data[start - self._start : stop - self._start]


def _spans(template: ItemTemplate, offset: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the ranges of the file before and after an item's payload."""
    return (offset, offset + len(template.head)), (offset + template.tail_offset, offset + template.length)


def reader(path: Location) -> Reader:
    """Read ``.metadata`` and the sizes of the files; items are opened when their elements are located.

    Faults are missing, cut or irregular files, and overlapping items.

    Raises:
        SourceError: there is no checkpoint; or its metadata is damaged, refused or contradicts itself.
    """
    payloads = Payloads(path)
    with source_errors(path):
        if not is_folder(path):
            raise SourceError(f"expected a checkpoint directory, found no directory {path}")
        names = names_in(path)
        if METADATA_FILE not in names:
            raise _missing_metadata_error(path, names)
        with open_regular(path / METADATA_FILE) as file:
            limits.check_description(path / METADATA_FILE, file.size)
            data = file.read(0, file.size)
        with about(path / METADATA_FILE):
            manifest = _make_outline(parse_metadata(data))
        common_blobs = common_file(path) or lost_common_file(path, manifest)
        outline = replace(manifest, blobs=(*manifest.blobs, *common_blobs))
        faults = tuple(extent_faults(path, named_items(outline)))
    return Reader(outline, payloads, faults, locate=partial(locate_chunks, payloads.directory))


def _make_outline(metadata: Metadata) -> Manifest:
    """Return the manifest of a checkpoint, in which chunks have items, and no payloads yet."""
    # Refuse items that are of no chunk and no blob.
    expected_items: set[tuple[str, Index | None]] = {(key, None) for key in metadata.blobs}
    for key, tensor in metadata.tensors.items():
        expected_items.update((key, offsets) for offsets, _ in tensor.chunks)
    for key, offsets in metadata.storage.keys() - expected_items:
        raise DamageError(f"expected items of known tensors only, found one for {key!r} at offsets {offsets}")

    # Boxes are kept once for all tensors that are cut alike.
    rows, places = list[Row](), list[tuple[int, Boxes]]()
    boxes_of: dict[object, Boxes] = {}
    for key, tensor in metadata.tensors.items():
        geometry = tensor.size, tensor.chunks
        if geometry not in boxes_of:
            boxes_of[geometry] = _read_boxes(key, tensor)
        places.append((len(rows), boxes_of[geometry]))
        for offsets, _ in tensor.chunks:
            item = _find_item(key, offsets, metadata)
            rows.append((item.file, item.offset, item.length, UNKNOWN, UNKNOWN, None, UNKNOWN))
    columns = Columns.of(rows)

    # Paths map tensors of state to their parameters.
    optimizers = optimizers_of(metadata.paths.values())
    tensors = []
    for (key, tensor), place in zip(metadata.tensors.items(), places, strict=True):
        path = metadata.paths.get(key, (key,))
        name, slot = slot_in(path, optimizers)
        tensors.append(
            StateRecord(
                key, path, shape=tensor.size, dtype=tensor.dtype, chunks=Chunks(columns, *place), name=name, slot=slot
            )
        )
    blobs = []
    for key in metadata.blobs:
        item = _find_item(key, None, metadata)
        blobs.append(Blob(key, metadata.paths.get(key, (key,)), Extent(item.file, item.offset, item.length)))
    provenance = {"format": "torch.distributed.checkpoint", "version": metadata.version}
    return Manifest(tuple(tensors), tuple(blobs), {**provenance, "not_kept": list(metadata.extra)})


def _read_boxes(key: str, tensor: TensorMeta) -> Boxes:
    boxes = []
    for offsets, sizes in tensor.chunks:
        if not len(offsets) == len(sizes) == len(tensor.size):
            raise DamageError(f"tensor {key!r}: expected {len(tensor.size)} dims, found {offsets} and {sizes}")
        boxes.append(Box(offsets, tuple(map(operator.add, offsets, sizes))))
        if any(hi > size for hi, size in zip(boxes[-1].hi, tensor.size, strict=True)):
            raise DamageError(f"tensor {key!r}: expected boxes within shape {tensor.size}, found {boxes[-1]}")
    return Boxes.of_all(boxes, len(tensor.size))


def _find_item(key: str, offsets: tuple[int, ...] | None, metadata: Metadata) -> StoredItem:
    item = metadata.storage.get((key, offsets))
    where = "" if offsets is None else f" at offsets {offsets}"
    if item is None:
        raise DamageError(f"expected a stored item for {key!r}{where}, found none: its writer did not finish")
    if item.transforms:
        raise SourceError(f"expected a plain item for {key!r}{where}, found one encoded with {item.transforms}")
    return item


def _missing_metadata_error(path: Location, names: Sequence[str]) -> SourceError:
    """Return the error that a folder of files with these names has no ``.metadata``, with the reason and the cure."""

    def is_checkpoint(place: Location) -> bool:
        if is_there(place / METADATA_FILE):
            return True
        return is_folder(place) and any(is_there(folder / METADATA_FILE) for folder in entries_of(place))

    if fnmatch.filter(names, f"__*{METADATA_FILE}"):
        return SourceError(
            f"{path} holds one __<rank>.metadata for each rank, as DCP writes with use_collectives=False: each "
            "knows only its own rank, so they cannot be resharded; load them on the same ranks and save again"
        )
    unfinished = f": a save into {path} did not finish" if f"{METADATA_FILE}.tmp" in names else ""
    checkpoints = [name for name in names if is_checkpoint(path / name)]
    if checkpoints:
        return SourceError(
            f"expected a checkpoint, found a folder of {counted(len(checkpoints), 'checkpoint')}, such as a run's: "
            f"{path}{unfinished}. Give the path of one, such as {path / checkpoints[-1]}"
        )
    if data_files := fnmatch.filter(names, "__*_*.distcp"):
        return DamageError(f"expected {METADATA_FILE} beside {data_files[0]}, found none{unfinished}")
    if not unfinished and (other_format := _unread_format(path)):
        return SourceError(f"expected a checkpoint in {path}: {other_format}")
    return SourceError(f"expected a checkpoint in {path}, found no {METADATA_FILE} and no other known file{unfinished}")


_MAX_FOLDERS = 64
"""Folders in which files of formats that are not read are looked for."""


def _unread_format(path: Location) -> str:
    """Return what a folder has of a format that is not read, and what to do; empty if nothing known is in it."""
    pending = [""]
    for place in pending:  # and in the folders in it, which are added
        files, folders = listing(path / place)
        prefix = f"{place}/" if place else ""
        for pattern, meaning in UNREAD.items():
            if matches := fnmatch.filter(sorted(files), pattern):
                return f"{prefix}{matches[0]} is of {meaning}"
        pending += [f"{prefix}{name}" for name in sorted(folders)][: max(_MAX_FOLDERS - len(pending), 0)]
    return ""


def named_items(manifest: Manifest) -> Iterator[tuple[Extent, str]]:
    for tensor in manifest.tensors:
        yield from ((chunk.item, f"{tensor.key!r} box {chunk.box}") for chunk in tensor.chunks)
    yield from ((blob.item, repr(blob.key)) for blob in manifest.blobs)


def siblings_reader(path: Location) -> Reader:
    """Read all folders as one checkpoint.  Keys begin with their folder's name only if folders share keys.

    Raises:
        SourceError: the folders are not parts of one checkpoint, or one of them cannot be read.
    """
    # Optimizers in some folders and models in others make one checkpoint; others are checkpoints of a run.
    readers = {name: reader(path / name) for name in folders_with(path, METADATA_FILE)}
    outlines = {name: part.outline for name, part in readers.items()}
    if set(map(_has_optimizers_only, outlines.values())) != {True, False}:
        newest = max(outlines, key=lambda name: [int(number) for number in re.findall("[0-9]{1,18}", name)])
        raise SourceError(
            f"expected a checkpoint in {path}, found several, in its folders {listed(outlines)}; give the path of "
            f"one, such as {path / newest}"
        )

    # Keys that several folders have are distinguished by the folders' names.
    keys = Counter[str]()
    for outline in outlines.values():
        keys.update(entry_keys(outline.tensors))
        keys.update(entry_keys(outline.blobs))
    parts = [_outline_above(outline, name, keys.total() > len(keys)) for name, outline in outlines.items()]
    outline = Manifest(
        tuple(chain.from_iterable(part.tensors for part in parts)),
        tuple(chain.from_iterable(part.blobs for part in parts)),
        {**parts[0].provenance, "folders": list(outlines)},
    )
    payloads = Payloads(path)
    faults = tuple(chain.from_iterable(part.faults for part in readers.values()))
    return Reader(outline, payloads, faults, locate=partial(locate_chunks, payloads.directory))


def _has_optimizers_only(outline: Manifest) -> bool | None:
    """Return whether a folder has the state of optimizers and no other tensors; None if it has both."""
    paths = [*(tensor.path for tensor in outline.tensors), *(blob.path for blob in outline.blobs)]
    roots = {optimizer.root for optimizer in optimizers_of(paths)}
    if not roots:
        return False
    for tensor in outline.tensors:
        if all(tensor.path[: len(root)] != root for root in roots):
            return None
    return True


def _outline_above(outline: Manifest, folder: str, prefixes_keys: bool) -> Manifest:
    """Return the outline with files, and keys if these are to be told apart, as seen from the folder above."""
    moved = outline.renamed(lambda file: f"{folder}/{file}")
    if not prefixes_keys:
        return moved

    def key(entry: StateRecord | Blob) -> dict[str, Any]:
        return {"key": f"{folder}.{entry.key}", "path": (folder, *entry.path)}

    tensors = tuple(replace(tensor, **key(tensor)) for tensor in moved.tensors)
    return replace(moved, tensors=tensors, blobs=tuple(replace(blob, **key(blob)) for blob in moved.blobs))
