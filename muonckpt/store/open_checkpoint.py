"""A checkpoint, opened and parsed once: every command reads from one, and ``muonckpt.open`` (`diagnosis`) returns one.

Items that are not tensors are decoded as plain data; no code in one is ever run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..algebra.box import Box, Index, Selection, box_at, ranges_of
from ..names.collector import gc_paused
from ..names.errors import DamageError, DiskError, RemovedError, SourceError, about
from ..names.keys import OptimizerKey, key_of
from ..names.vocabulary import Convention
from ..programs.signs import NOT_READ, OUR_MARK
from ..record.record import Blob, Chunk, Chunks, Extent, Manifest, StateRecord
from .formats.registry import DCP, OWN, SAFETENSORS, ZARR, Format, format_of
from .formats.torch_save.inert_pickle import Anything
from .formats.torch_save.plain_item import plain_value
from .formats.torch_save.stored_zip import read_members
from .io import limits
from .io.checksums import RawBytes, crc32, xxh3_128
from .io.location import Location, is_there, map_each
from .io.regular import open_regular
from .reading.blocks import slices_within
from .reading.dtypes import dtype
from .reading.payloads import (
    Payloads,
    Reader,
    about_entry,
    check_chunk,
    checked_elements,
    compare_checksums,
    payload_of,
)


def check_blob(payloads: Payloads, blob: Blob) -> None:
    """Compare an item that is not a tensor with its digest, or with the CRC-32s of the zip that it is.

    Raises:
        SourceError: they differ, or cannot be read; names the item and the file.
    """
    item = blob.item
    with _about_item(payloads, blob):
        _check_item(blob, lambda start, length: payloads.bands(Extent(item.file, item.offset + start, length)))


def checked_blob(payloads: Payloads, blob: Blob) -> bytes:
    """Return the bytes of an item that is not a tensor, which are read once and compared as `check_blob` does.

    Raises:
        LimitError: it has more bytes than its file has on the disk.
        SourceError: it is damaged; names the item and the file.
    """
    # A file with holes could claim an item of any length.
    if blob.item.length > limits.SMALL_DESCRIPTION:
        max_bytes = limits.SMALL_DESCRIPTION + payloads.on_disk(blob.item.file)
        limits.check_limit(blob.item.length, max_bytes, f"bytes in item {blob.key!r} of {blob.item.file}")
    with _about_item(payloads, blob):
        raw = bytes(payloads.view(blob.item))
        _check_item(blob, lambda start, length: [raw[start : start + length]])
    return raw


def _about_item(payloads: Payloads, blob: Blob) -> AbstractContextManager[None]:
    return about_entry(blob.key, f"item {blob.key!r} in {payloads.place(blob.item.file)}")


def _check_item(blob: Blob, parts: Callable[[int, int], Iterable[RawBytes]]) -> None:
    """Compare the checksums of an item's bytes, of which ``parts`` gives those from an offset on."""
    # Our manifests have digests of items; without one its zip has a CRC-32 of each member.
    if blob.digest is not None:
        compare_checksums("digest", xxh3_128(parts(0, blob.item.length)), blob.digest)
        return
    for member in read_members(lambda start, length: b"".join(parts(start, length)), blob.item.length):
        if member.crc32 is not None:
            checksum = crc32(parts(member.offset, member.length))
            compare_checksums(f"CRC-32 of {member.name}", f"{checksum:08x}", f"{member.crc32:08x}")


class Values:
    """Reads small items of one checkpoint, each checked before it is used; raises `SourceError` for damaged ones."""

    def __init__(self, payloads: Payloads, tensors: TensorReader) -> None:
        self.payloads = payloads
        self._tensors = tensors
        self._decoded: dict[Blob, Any] = {}

    def read(self, entry: Blob | StateRecord) -> Any:
        return self.scalar(entry) if isinstance(entry, StateRecord) else self.item(entry)

    def item(self, blob: Blob) -> Any:
        """Read an item: None, a bool, number or string, or lists, tuples and string-keyed dicts of these."""
        if blob not in self._decoded:
            raw = checked_blob(self.payloads, blob)
            with about(f"item {blob.key!r}"):
                self._decoded[blob] = plain_value(raw)
        return self._decoded[blob]

    def parts(self, blob: Blob) -> Any:
        """Read an item that is plain data in part; other objects become inert `Record`s."""
        return plain_value(checked_blob(self.payloads, blob), Anything())

    def part(self, blob: Blob, key: str, value: object) -> Blob:
        """Return a part of an item as an item of its own, which `item` reads."""
        part = replace(blob, key=f"{blob.key}#{key}")
        self._decoded[part] = value
        return part

    def scalar(self, tensor: StateRecord) -> float | int:
        """Read the one element of a tensor of floats or integers, whatever their size."""
        if Box.of(tensor.shape).numel != 1:
            raise SourceError(f"tensor {tensor.key!r}: expected one element, found the shape {tensor.shape}")
        value = _as_numbers(self._tensors.words(tensor, Box.of(tensor.shape)), tensor).reshape(-1)[0].item()
        if not isinstance(value, float | int):
            raise SourceError(f"tensor {tensor.key!r}: expected a real number, found {tensor.dtype}")
        return value


class Items(Mapping[str, Any]):
    """The items of a checkpoint by key, or those of one group by option, each read and checked when it is first used.

    Tensors of one element count as items.  An item that is not plain data raises `SourceError`.
    """

    def __init__(self, entries: Mapping[str, Blob | StateRecord], values: Values) -> None:
        self._entries = entries
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values.read(self._entries[key])

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The place of a box of a tensor in one file; its elements of ``itemsize`` bytes are little-endian.

    Attributes:
        file: by its name inside the checkpoint.
        offset: the byte of the file with which the first element begins; None if the file holds them encoded.
        strides: bytes from one index to the next, along each dim.
    """

    box: Box
    file: str
    offset: int | None
    strides: Index
    itemsize: int

    @property
    def bytes(self) -> int:
        return self.box.numel * self.itemsize

    @property
    def run(self) -> int:
        """The number of bytes that follow one another, in row-major order, before the next gap."""
        return self._run_and_outer_dims[0]

    @property
    def runs(self) -> int:
        """The number of such runs."""
        return self.bytes // self.run

    def extents(self) -> Iterator[tuple[int, int]]:
        """Yield the offset and the length of each run: the bytes of ``tensor[box]``, in row-major order.

        Raises:
            SourceError: the file holds the elements encoded.
        """
        if self.offset is None:
            raise SourceError(f"{self.file} holds the elements encoded: no bytes of it are theirs alone")
        run, outer = self._run_and_outer_dims
        for index in product(*(range(0, self.box.shape[dim] * self.strides[dim], self.strides[dim]) for dim in outer)):
            yield self.offset + sum(index), run

    @property
    def _run_and_outer_dims(self) -> tuple[int, list[int]]:
        # The innermost dims that follow one another without gaps make the run; the others are iterated.
        run, dims = self.itemsize, [dim for dim, length in enumerate(self.box.shape) if length > 1]
        while dims and self.strides[dims[-1]] == run:
            run *= self.box.shape[dims.pop()]
        return run, dims


class TensorReader:
    """Reads boxes of tensors.  A chunk is located, and all of it checked, before any is used.  Not thread-safe."""

    def __init__(self, reader: Reader, place: Location) -> None:
        self._reader = reader
        self._place = place
        self._located: dict[tuple[str, Index], Chunk] = {}
        """Located chunks by the tensor's key and the chunk's first index."""
        self._checked: set[Chunk] = set()

    def words(self, tensor: StateRecord, box: Box) -> NDArray[Any]:
        """Read a box as raw bits, into an array of its own (one more dim of 2 for 16-byte elements).

        Raises:
            RemovedError: the checkpoint is not there any more, as where a run has removed an old step.
        """
        kind, payloads = dtype(tensor.dtype), self._reader.payloads
        try:
            # Chunks that overlap, leave a hole or are cut are refused before memory is taken for their elements.
            tensor.chunk_layout()
            chunks = self._chunks(tensor, box)
            for chunk in chunks:
                payload = payload_of(tensor, chunk)
                payloads.open_file(payload.file, payload.end)
            words = np.empty((*box.shape, *(2,) * (kind.itemsize > 8)), kind.bits)
            for chunk in chunks:
                common = chunk.box & box
                assert common is not None, "the chunk was chosen because they have elements in common"
                if chunk not in self._checked and chunk.box == common:  # one read serves the check and the caller
                    elements = checked_elements(payloads, tensor, chunk)
                else:
                    if chunk not in self._checked:
                        check_chunk(payloads, tensor, chunk)
                    place = chunk.stored("").place_at(common.lo)
                    elements = payloads.gather(payload_of(tensor, chunk), tensor.dtype, place, common.shape)
                self._checked.add(chunk)
                words[slices_within(common, box.lo)] = elements
            return words
        except DamageError as error:
            if is_there(self._place):
                raise
            raise RemovedError(f"{self._place} was removed while it was read. Open the newest whole step") from error

    def parts(self, tensor: StateRecord, box: Box) -> tuple[StoredPart, ...]:
        """Return the parts of a box of a tensor, one for each chunk that has some of it."""
        size, payloads = dtype(tensor.dtype).itemsize, self._reader.payloads
        parts = []
        for chunk in self._chunks(tensor, box):
            common, payload = chunk.box & box, payload_of(tensor, chunk)
            assert common is not None, "the chunk was chosen because they have elements in common"
            # The place of its first element, in bytes of the file.
            place = chunk.stored("").place_at(common.lo)
            offset = payload.offset + place.offset * size if payloads.is_verbatim(payload.file) else None
            parts.append(
                StoredPart(
                    box=common,
                    file=payload.file,
                    offset=offset,
                    strides=tuple(size * s for s in place.strides),
                    itemsize=size,
                )
            )
        return tuple(parts)

    def _chunks(self, tensor: StateRecord, box: Box) -> list[Chunk]:
        """Return the chunks that have elements of a box, located."""
        keys, unlocated = [], []
        for number, stored_box in enumerate(tensor.boxes):
            if stored_box & box:
                keys.append((tensor.key, stored_box.lo))
                if keys[-1] not in self._located:
                    unlocated.append(number)
        (located,) = self._reader.locate((replace(tensor, chunks=tensor.chunks.select(unlocated)),))
        for chunk in located.chunks:
            self._located[tensor.key, chunk.box.lo] = chunk
        return [self._located[key] for key in keys]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Reads a tensor of an open checkpoint.

    ``tensor[10:20]`` reads a box of it, as numpy would index it; negative indices count from the end, steps are one.
    A chunk is checked whole against its recorded checksum when any of it is read for the first time.
    """

    record: StateRecord
    reader: TensorReader

    @property
    def key(self) -> str:
        """The flat key in the checkpoint."""
        return self.record.key

    @property
    def shape(self) -> Index:
        """The logical shape."""
        return self.record.shape

    @property
    def dtype(self) -> str:
        """Torch's name of the element type without the prefix, such as ``"bfloat16"``."""
        return self.record.dtype

    @property
    def name(self) -> str | None:
        """The parameter whose optimizer state it is; None if that is not recorded."""
        return self.record.name

    @property
    def slot(self) -> str | None:
        """The slot of optimizer state; None if that is not recorded."""
        return self.record.slot

    @property
    def convention(self) -> Convention | None:
        """The convention by which a momentum buffer accumulates; None for others, or if that is not recorded."""
        return self.record.convention

    @property
    def layout(self) -> Mapping[str, Any] | None:
        """The layout on the ranks of the program that wrote it; None if that is not recorded."""
        return self.record.layout

    @property
    def fingerprint(self) -> str | None:
        """The recorded fingerprint, 16 hex digits."""
        return self.record.fingerprint

    def numpy(self) -> NDArray[Any]:
        """Read all elements; those of bfloat16 as float32, exactly, because numpy has no bfloat16.

        Raises:
            SourceError: a chunk is damaged; or numpy has no such type, and `bits` gives the raw elements.
            LayoutError: the chunks leave a hole or overlap.
        """
        return self[...]

    def bits(self) -> NDArray[Any]:
        """Read all elements as unsigned integers of their size; 16-byte elements as two of 8 bytes, on one more dim.

        Raises as `numpy`.
        """
        return self.reader.words(self.record, Box.of(self.shape))

    def __getitem__(self, selection: Selection) -> NDArray[Any]:
        box = self._box(selection)
        elements: NDArray[Any] = _as_numbers(self.reader.words(self.record, box), self.record)
        # A dim with one selected index goes away, as in numpy.
        ranges = ranges_of(self.shape, selection)
        return elements[tuple([0 if isinstance(indices, int) else slice(None) for indices in ranges])]

    def parts(self, selection: Selection = ...) -> tuple[StoredPart, ...]:
        """Return where the elements that ``tensor[selection]`` reads lie, in the order of the chunks.

        Reads no elements; the items of stock DCP are opened to find them.

        Raises:
            SourceError: an item is damaged.
            IndexError: the tensor has no such indices.
        """
        return self.reader.parts(self.record, self._box(selection))

    def _box(self, selection: Selection) -> Box:
        try:
            return box_at(self.shape, selection)
        except IndexError as error:
            raise IndexError(f"tensor {self.key!r} of shape {self.shape} has {error}") from None


def _as_numbers(words: NDArray[Any], tensor: StateRecord) -> NDArray[Any]:
    if tensor.dtype == "bfloat16":  # numpy lacks it, but its bits are the upper half of float32's
        return (words.astype(np.uint32) << 16).view(np.float32)
    try:
        kind = np.dtype(tensor.dtype).newbyteorder("<")
    except TypeError:
        raise SourceError(
            f"tensor {tensor.key!r}: numpy has no {tensor.dtype}; bits() gives the raw bits of its elements"
        ) from None
    numbers: NDArray[Any] = words.view(kind)
    return numbers[..., 0] if kind.itemsize > 8 else numbers


def file_sizes(manifest: Manifest) -> dict[str, int]:
    """Return the bytes that each file has at least to have: it reaches to the end of its last item."""
    columns = manifest.columns
    ends = np.zeros(len(columns.names), np.int64)
    np.maximum.at(ends, columns.file, columns.item_end())
    sizes = dict.fromkeys(manifest.files, 0)
    sizes |= {name: end for name, end in zip(columns.names, ends.tolist(), strict=True) if end}
    for blob in manifest.blobs:
        sizes[blob.item.file] = max(sizes.get(blob.item.file, 0), blob.item.end)
    return sizes


DISK_FAILS = "cannot be read, as a disk fails (EIO)"


class LostFile(NamedTuple):
    """Why a file does not have all bytes that it should have, and how many it has, from the first on.

    ``disk_error`` is that of the disk that cannot open it.
    """

    reason: str
    length: int = 0
    disk_error: DiskError | None = None


class OpenCheckpoint:
    """Reads a checkpoint of any format: its metadata when it is made, items and elements on request.

    A context manager, which closes the files at its end.  It may have `faults`, for which `open` refuses it.

    Args:
        format: by which it is read, where it has several descriptions; None means the one that its files show.

    Attributes:
        format: ``format.name`` is what a user calls it.
        outline: the manifest in the metadata, in which the places of a chunk's elements may be unknown.
        payloads: the bytes of its files.
        faults: the damage that shows without reading data, such as missing files.

    Raises:
        SourceError: there is no checkpoint, or its metadata are damaged or refused.
    """

    @gc_paused()
    def __init__(self, path: Location, format: Format | None = None) -> None:
        format = format or format_of(path)
        self.__setstate__((path, format, format.read(path)))

    def __getstate__(self) -> tuple[Location, Format, Reader]:
        return self.path, self.format, self._reader

    def __setstate__(self, state: tuple[Location, Format, Reader]) -> None:
        self.path, self.format, self._reader = state
        self.outline, self.payloads, self.faults = self._reader.outline, self._reader.payloads, self._reader.faults
        self._tensors = TensorReader(self._reader, self.path)

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.format.name} checkpoint at {self.path}: {len(self.outline.tensors)} tensors>"

    def close(self) -> None:
        """Close the files; reading opens them again."""
        self.payloads.close()

    # For users.

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors by their flat keys, in the order of the checkpoint."""
        records = _by_key(self.path, self.outline.tensors)
        return {key: StoredTensor(record, self._tensors) for key, record in records.items()}

    @cached_property
    def items(self) -> Mapping[str, Any]:
        """The items that are not tensors, by flat keys; each is decoded safely when it is first read."""
        return Items(_by_key(self.path, self.outline.blobs), self.values)

    @cached_property
    def groups(self) -> Mapping[str, Mapping[str, Any]]:
        """The options of the parameter groups, by keys such as ``"optimizer.param_groups.0"``.

        Groups under other keys than torch's, such as Megatron's, are not here.

        Raises:
            SourceError: an option is damaged or not plain data.
        """
        # Torch's keys of options end with the option; some options are tensors.
        groups: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        entries: tuple[Blob | StateRecord, ...] = (*self.outline.blobs, *self.outline.tensors)
        for entry in entries:
            if key := next(OptimizerKey.of_option(entry.path), None):
                group = key_of(entry.path).removesuffix(f".{key.leaf}")
                groups[group][key.leaf] = self.values.read(entry)
        return dict(groups)

    @property
    def provenance(self) -> Mapping[str, Any]:
        """JSON data on the program, step and meshes that made it."""
        return self.outline.provenance

    @property
    def not_read(self) -> list[str]:
        """Files in its folder that are not read, and copies of tensors in files that are read in part."""
        names = self.provenance.get(NOT_READ, ())  # a checkpoint made of another one also has what was not read there
        return [name for name in names if is_there(self.payloads.directory / name.rpartition(" in ")[2])]

    # For code that works on whole checkpoints.

    @property
    def lacks_manifest(self) -> bool:
        """True if this package wrote it and ``muonckpt.json`` is missing."""
        return self.format is DCP and OUR_MARK in self.outline.provenance.get("not_kept", ())

    @property
    def items_digest(self) -> str | None:
        """The recorded digest of the file of items beside a checkpoint of tensors only; None if there is none."""
        match self.provenance.get("exported"):
            case {"items_digest": str(digest)} if self.format in (SAFETENSORS, ZARR):
                return digest
        return None

    def lost_files(self) -> Mapping[str, LostFile]:
        """Return the files that do not have all bytes that the manifest promises, by name.

        Raises:
            UnavailableError: it is not known whether a file is there.
        """
        payloads, promised_sizes = self.payloads, file_sizes(self.outline)
        if self.format is OWN:  # what only describes it to other programs is no loss
            promised_sizes = {name: size for name, size in promised_sizes.items() if size}

        def look(name: str) -> LostFile | None:
            if payloads.is_in_memory(name):
                return None
            place, expected = payloads.place(name), promised_sizes[name]
            try:
                with open_regular(place) as file:
                    size = file.size
            except DiskError as error:
                return LostFile(DISK_FAILS, disk_error=error)
            except SourceError as error:
                return LostFile(f"cannot be opened: {error}" if is_there(place) else "is missing")
            # Items that were made of a description stand under its name.
            if size >= expected or not payloads.is_verbatim(name):
                return None
            return LostFile(f"is cut short ({size} of {expected} bytes)", size)

        files = zip(promised_sizes, map_each(payloads.directory, look, promised_sizes), strict=True)
        return {name: lost for name, lost in files if lost is not None}

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest with the places of all elements: the items of stock DCP are opened to find them.

        Raises:
            SourceError: an item is damaged, or not what the metadata promise.
        """
        return replace(self.outline, tensors=self.locate(self.outline.tensors))

    def locate(self, tensors: Sequence[StateRecord]) -> tuple[StateRecord, ...]:
        """Return tensors of the outline, or some of their chunks, with the places of the elements.

        Raises:
            SourceError: as `manifest`.
        """
        return self._reader.locate(tensors)

    def locate_each(
        self, tensors: Sequence[StateRecord]
    ) -> tuple[Sequence[StateRecord], dict[tuple[str, Index], SourceError | DiskError]]:
        """Return tensors with the places of all elements that can be found, and why those of other chunks cannot.

        The errors are by the tensor's key and the chunk's first index; such a chunk stays in its tensor, unlocated.
        """
        errors: dict[tuple[str, Index], SourceError | DiskError] = {}

        def locate_chunks(tensor: StateRecord) -> StateRecord:
            try:
                return self.locate([tensor])[0]
            except (SourceError, DiskError) as error:
                if len(tensor.chunks) == 1:
                    errors[tensor.key, tensor.chunks[0].box.lo] = error
                    return tensor
                chunks: list[Chunk] = []
                for number in range(len(tensor.chunks)):
                    chunks += locate_chunks(replace(tensor, chunks=tensor.chunks.select([number]))).chunks
                return replace(tensor, chunks=Chunks.of(chunks, len(tensor.shape)))

        try:
            return self.locate(tensors), errors
        except (SourceError, DiskError):  # of one chunk at least: find out which, one by one
            return tuple(map(locate_chunks, tensors)), errors

    @cached_property
    def values(self) -> Values:
        return Values(self.payloads, self._tensors)


_Entry = TypeVar("_Entry", StateRecord, Blob)


def _by_key(path: Location, entries: Iterable[_Entry]) -> dict[str, _Entry]:
    entries_of_keys: dict[str, _Entry] = {}
    for entry in entries:
        if entries_of_keys.setdefault(entry.key, entry) is not entry:
            raise SourceError(f"{path}: expected each key once, found {entry.key!r} twice")
    return entries_of_keys
