"""The contents of a checkpoint and their places, and the keys by which people ask for them.

A :class:`Manifest` lists tensors (:class:`StateRecord`) and opaque items (:class:`Blob`) with the byte extents of
their chunks.  Formats never know each other: a reader makes a manifest, a writer takes one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np

from ..algebra.box import MAX_DIMS, MAX_ELEMENTS, Index
from ..algebra.layout import TensorLayout
from ..names.errors import DamageError, LayoutError, SourceError, TargetError, about, did_you_mean
from ..names.keys import OptimizerKey
from ..names.vocabulary import Convention, KeyPath
from ..names.wording import listed
from .chunk_columns import ColumnReader, ColumnWriter
from .chunks import Boxes, Chunk, Chunks, Extent, columns_of, layout_in_boxes, no_chunks, on_columns, select_chunks
from .columns import Column, Columns
from .json_fields import (
    all_integers,
    all_key_paths,
    all_optional,
    all_strings,
    check_seal,
    compact,
    field_of_all,
    integers,
    layout,
    matching,
    provenance,
    sealed_parts,
    string,
    whole_number,
)

__all__ = [
    "DIGEST",
    "FINGERPRINT",
    "MANIFEST_FILE",
    "MANIFEST_VERSION",
    "Blob",
    "Boxes",
    "Chunk",
    "Chunks",
    "Extent",
    "Manifest",
    "StateRecord",
    "no_chunks",
]

T = TypeVar("T")

MANIFEST_FILE = "muonckpt.json"
"""Name of the manifest in a checkpoint directory."""

MANIFEST_VERSION = 2
"""Version of the manifest format that this package reads and writes."""

DIGEST = re.compile(r"[0-9a-f]{32}")
"""An xxh3-128 in hex."""

FINGERPRINT = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Blob:
    """An item that is not a tensor.  Its bytes are copied verbatim and never unpickled."""

    key: str
    path: KeyPath
    item: Extent
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class StateRecord:
    """One logical tensor of a checkpoint.

    Attributes:
        key, path: the flat key in the store, and the path in the nested state dict.
        dtype: torch's name without the prefix, such as ``"float32"``.
        name, slot: of optimizer state: its parameter, and the slot.
        pieces: the rows of the matrices fused in the parameter.
        layout: JSON data of the sharding in the run (provenance).
        fingerprint: 16 hex digits.

    Raises:
        SourceError, LayoutError: it has more dims or elements than any tensor, or other dims than its chunks.
    """

    key: str
    path: KeyPath
    shape: Index
    dtype: str
    chunks: Chunks
    name: str | None = None
    slot: str | None = None
    convention: Convention | None = None
    pieces: tuple[int, ...] | None = None
    layout: Mapping[str, Any] | None = None
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        if len(self.shape) > MAX_DIMS or math.prod(self.shape) > MAX_ELEMENTS:
            raise SourceError(
                f"tensor {self.key!r}: expected at most {MAX_DIMS} dims and {MAX_ELEMENTS} elements, found more"
            )
        if self.boxes.ndim != len(self.shape):
            raise LayoutError(
                f"tensor {self.key!r}: expected boxes of {len(self.shape)} dims, as its shape, found {self.boxes.ndim}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return StateRecord, tuple(map(self.__getattribute__, self.__slots__))  # half the time of a dataclass's own

    def without_empty_chunks(self) -> StateRecord:
        """Return the tensor without the chunks that have no elements: some ranks write a file of nothing else."""
        return replace(self, chunks=self.chunks.select(np.flatnonzero(self.boxes.numel > 0).tolist()))

    def chunk_layout(self) -> TensorLayout:
        """Return the tensor's layout in the checkpoint: buffer 3 is the payload of chunk 3.

        Raises:
            LayoutError: the chunks leave a hole or overlap; names the tensor and the box.
        """
        with about(f"tensor {self.key!r}"):
            return layout_in_boxes(self.shape, self.boxes, self.chunks.strides)

    @property
    def coverage_fault(self) -> str:
        """Why the chunks do not tile the tensor; empty if they do."""
        try:
            self.chunk_layout()
        except LayoutError as error:
            return str(error)
        return ""

    @property
    def boxes(self) -> Boxes:
        return self.chunks.boxes


class Keyed(Protocol):
    """A tensor or an item of a checkpoint, stored or to be written."""

    @property
    def key(self) -> str: ...


E = TypeVar("E", bound=Keyed)


def entry_keys(entries: Iterable[Keyed]) -> list[str]:
    return [entry.key for entry in entries]


def by_key(entries: Iterable[E]) -> dict[str, E]:
    """Return tensors or items by their keys; of several with one key the last."""
    return {entry.key: entry for entry in entries}


def first_rows_of(tensors: Iterable[StateRecord]) -> Column:
    """Return the number of the first chunk of each tensor among the chunks of all, and at the end the number of all."""
    return np.cumsum([0, *(len(tensor.boxes) for tensor in tensors)], dtype=np.int64)


def with_chunks(tensors: Sequence[StateRecord], numbers: Sequence[Sequence[int]]) -> list[StateRecord]:
    """Return tensors with the chunks of the ascending numbers alone, on columns that they share."""
    if all(len(of_tensor) == len(tensor.chunks) for tensor, of_tensor in zip(tensors, numbers, strict=True)):
        return [*tensors]
    pairs = zip(tensors, numbers, strict=True)
    selected = select_chunks([(tensor.chunks, tuple(of_tensor)) for tensor, of_tensor in pairs])
    return [replace(tensor, chunks=chunks) for tensor, chunks in zip(tensors, selected, strict=True)]


def says_convention(entries: Iterable[StateRecord | Blob]) -> bool:
    """Return whether entries say a momentum convention, as only those of our optimizer, or converted for it, do."""
    for entry in entries:
        if entry.convention is not None if isinstance(entry, StateRecord) else entry.key.endswith(".convention"):
            return True
    return False


@dataclass(frozen=True)
class Manifest:
    """The contents of one checkpoint.

    Attributes:
        provenance: free-form JSON: program, versions, world, mesh, step.
        files: files beside the manifest that describe the same checkpoint to other programs, with the xxh3-128 of their
            bytes in hex.
    """

    tensors: tuple[StateRecord, ...]
    blobs: tuple[Blob, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return Manifest, (self.tensors, self.blobs, self.provenance, self.files)  # without the joined columns

    @cached_property
    def columns(self) -> Columns:
        """The chunks of all tensors, one after the other."""
        return columns_of(tensor.chunks for tensor in self.tensors)

    @property
    def elements(self) -> Column:
        """The number of elements of each chunk, in the order of `columns`."""
        return np.concatenate([np.zeros(0, np.int64), *(tensor.boxes.numel for tensor in self.tensors)])

    def renamed(self, name_of: Callable[[str], str]) -> Manifest:
        """Return the same tensors and items in files of other names.

        Raises:
            SourceError: a name is refused.
        """
        blobs = (replace(blob, item=replace(blob.item, file=name_of(blob.item.file))) for blob in self.blobs)
        moved = on_columns((tensor.chunks for tensor in self.tensors), self.columns.renamed(name_of))
        pairs = zip(self.tensors, moved, strict=True)
        tensors = (replace(tensor, chunks=chunks) for tensor, chunks in pairs)
        return replace(self, tensors=tuple(tensors), blobs=tuple(blobs))

    def to_json(self) -> str:
        """Return the text of the manifest file: one line per tensor and blob, so that it can be read and compared.

        The last line has the digest of all that is before it.
        """
        return "".join(self.json_parts())

    def json_parts(self) -> Iterator[str]:
        """Return the text of the manifest file in parts, since all of it can take more memory than the manifest."""
        return sealed_parts(self._json_parts())

    def _json_parts(self) -> Iterator[str]:
        numbers, layouts = _number_layouts(self.tensors)
        # Values that tensors share are written once, before them.
        chunks = ColumnWriter([tensor.chunks for tensor in self.tensors])
        yield f'{{"format": "muonckpt", "version": {MANIFEST_VERSION},\n "provenance": {compact(self.provenance)},'
        yield f'\n "data_files": {compact(chunks.names)},\n "layouts": [\n  '
        yield from _lines(layouts)
        yield '\n ],\n "boxes": [\n  '
        yield from _lines(chunks.boxes)
        # One line for each tensor and each item.
        yield f"\n ],{_TENSORS.decode()}"
        fields = (compact({**record_fields(t), "layout": n}) for t, n in zip(self.tensors, numbers, strict=True))
        yield from _lines(f'{text[:-1]}, "chunks": {c}}}' for text, c in zip(fields, chunks.texts(), strict=True))
        yield _BLOBS.decode()
        yield from _lines(map(compact, map(_blob_json, self.blobs)))
        yield f'\n ],\n "files": {compact(dict(self.files))}'

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read and check a manifest; ``bytes`` are UTF-8.

        Raises:
            DamageError: it is not JSON, its text has changed, or a field is missing or wrong.
            SourceError: it is of another version, or names a file outside the checkpoint.
        """
        encoded = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        try:
            with suppress(json.JSONDecodeError):  # another program laid out the lines
                if (manifest := cls._parse_lines(encoded)) is not None:
                    return manifest
            return cls._parse_fields(encoded, json.loads(encoded), None)
        except KeyError as error:
            raise DamageError(f"damaged manifest: it lacks the field {error}") from error
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DamageError(f"damaged manifest: {type(error).__name__}: {error}") from error

    @classmethod
    def _parse_lines(cls, text: bytes) -> Manifest | None:
        """Read a text with a line for each tensor; return None or raise `JSONDecodeError` if it is laid out otherwise.

        Many lines at a time become columns, because all of them as objects may not fit into memory.
        """
        # The tensors are between the beginnings of two lists, which only our writer places so.
        start, end = text.find(_TENSORS), text.find(_BLOBS)
        if not 0 < start < end:
            return None
        fields = json.loads(text[: start + len(_TENSORS)] + text[end:])
        if fields.get("tensors") != []:
            return None
        return cls._parse_fields(text, fields, _blocks(text, start + len(_TENSORS), end))

    @classmethod
    def _parse_fields(cls, text: bytes, data: Any, blocks: Iterator[list[Any]] | None) -> Manifest:
        # The text is the one that was written, and of this version.
        check_seal(text, data)
        if data["format"] != "muonckpt" or data["version"] != MANIFEST_VERSION:
            raise SourceError(
                f"manifest of format {data['format']!r} version {data['version']!r}; this program reads "
                f"'muonckpt' version {MANIFEST_VERSION}"
            )
        return cls(
            tensors=_read_tensors(
                [data["tensors"]] if blocks is None else blocks,
                ColumnReader(data["data_files"], data["boxes"]),
                _layout_reader(data["layouts"]),
            ),
            blobs=_read_blobs(data["blobs"]),
            provenance=provenance(data["provenance"]),
            files={string(name): matching(DIGEST)(digest) for name, digest in data.get("files", {}).items()},
        )


_TENSORS = b'\n "tensors": [\n  '
_BLOBS = b'\n ],\n "blobs": [\n  '
_NEXT = b",\n  "
_BLOCK = 1 << 16
"""Bytes of a text that are parsed at a time: many lines, which take a fraction of the memory of all."""


def _blocks(text: bytes, start: int, end: int) -> Iterator[list[Any]]:
    """Yield the entries in the lines of a part of a text, many at a time."""
    stop = start
    while stop < end:
        stop = text.find(_NEXT, start + _BLOCK, end)
        stop = end if stop < 0 else stop
        yield json.loads(b"[null," + text[start:stop] + b"]")[1:]  # null, so that JSON refuses to have nothing after it
        start = stop + len(_NEXT)


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts with a comma and a new line between them."""
    for number, text in enumerate(texts):
        yield f",\n  {text}" if number else text


def _number_layouts(tensors: Iterable[StateRecord]) -> tuple[list[int | None], Iterable[str]]:
    """Return the number of each tensor's layout, and the texts of the distinct ones in this order."""
    numbers: list[int | None] = []
    texts: dict[str, int] = {}
    by_id: dict[int, int | None] = {id(None): None}  # tensors mostly share one object
    for tensor in tensors:
        if id(tensor.layout) not in by_id:
            by_id[id(tensor.layout)] = texts.setdefault(compact(tensor.layout), len(texts))
        numbers.append(by_id[id(tensor.layout)])
    return numbers, texts


def record_fields(tensor: StateRecord) -> dict[str, Any]:
    """Return the JSON data of a tensor, without its chunks."""
    return {
        "key": tensor.key,
        "path": list(tensor.path),
        "name": tensor.name,
        "slot": tensor.slot,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "convention": tensor.convention,
        "pieces": None if tensor.pieces is None else list(tensor.pieces),
        "fingerprint": tensor.fingerprint,
        "layout": tensor.layout,
    }


def _blob_json(blob: Blob) -> dict[str, Any]:
    return {
        "key": blob.key,
        "path": list(blob.path),
        "file": blob.item.file,
        "item": [blob.item.offset, blob.item.length],
        "digest": blob.digest,
    }


def _layout_reader(values: Iterable[Any]) -> Callable[[Any], Mapping[str, Any] | None]:
    """Return a reader of the numbers by which tensors refer to these layouts."""
    layouts = list(map(layout, values))

    def read(number: Any) -> Mapping[str, Any] | None:
        if number is not None and whole_number(number) >= len(layouts):
            raise ValueError(f"expected the number of one of {len(layouts)} layouts, got {number}")
        return None if number is None else layouts[number]

    return read


def _read_tensors(
    blocks: Iterable[Iterable[Any]], chunk_reader: ColumnReader, layout_of: Callable[[Any], Mapping[str, Any] | None]
) -> tuple[StateRecord, ...]:
    """Read tensors from their fields; equal values become one object."""
    distinct: dict[Any, Any] = {}

    def once(values: Iterable[T]) -> list[T]:
        values = list(values)
        return list(map(distinct.setdefault, values, values))

    # One reader for each field of a block of tensors: a call for each value would take longer than all else.
    readers: Mapping[str, Callable[[Sequence[Any]], Iterable[Any]]] = {
        "key": lambda keys: once(all_strings(keys)),
        "path": lambda paths: once(map(tuple, map(once, all_key_paths(paths)))),
        "shape": lambda shapes: once(all_integers(shapes)),
        "dtype": lambda dtypes: once(all_strings(dtypes)),
        "name": lambda names: once(all_optional(string, names)),
        "slot": lambda slots: once(all_optional(string, slots)),
        "convention": partial(all_optional, Convention),
        "pieces": lambda pieces: once(all_optional(integers, pieces)),
        "layout": lambda layouts: map(layout_of, layouts),
        "fingerprint": partial(all_optional, matching(FINGERPRINT)),
    }
    fields_of = itemgetter("chunks", *readers)
    # A block at a time, so that objects of few lines are in memory at once.
    records: list[tuple[Any, ...]] = []
    for block in blocks:
        if entries := list(map(fields_of, block)):
            chunks, *columns = zip(*entries, strict=True)
            fields = zip(readers, columns, strict=True)
            values = {name: field_of_all(name, readers[name], column, columns[0]) for name, column in fields}
            chunk_reader.read(chunks, list(map(len, values["shape"])))
            records += zip(*values.values(), strict=True)
    return tuple(
        StateRecord(key, path, shape, dtype, chunks, *annotations)
        for (key, path, shape, dtype, *annotations), chunks in zip(records, chunk_reader.chunks(), strict=True)
    )


def _read_blobs(entries: Sequence[Any]) -> tuple[Blob, ...]:
    rows = list(map(itemgetter("key", "path", "file", "item", "digest"), entries))
    keys, paths, files, items, digests = zip(*rows, strict=True) if rows else ((),) * 5
    extents = (Extent(file, *item) for file, item in zip(all_strings(files), all_integers(items), strict=True))
    return tuple(map(Blob, all_strings(keys), all_key_paths(paths), extents, all_optional(matching(DIGEST), digests)))


# Keys that people ask for, so that a pattern means the same wherever people give one.

Names = Mapping[str, tuple[str, str]]
"""Other names of keys of optimizer state: the parameter's with the slot, and the parameter's alone."""

_NO_NAMES: Names = MappingProxyType({})


def names_of(tensors: Iterable[StateRecord]) -> Names:
    """Return the other names of the state among these tensors, whose keys may have numbers for parameters."""
    names = {}
    for tensor in tensors:
        if tensor.name is not None and tensor.slot is not None:
            names[tensor.key] = f"{tensor.name}.{tensor.slot}", tensor.name
        # A manifest of another program records no names: keys have them, or numbers.
        elif key := next(OptimizerKey.of_slot(tensor.path), None):
            names[tensor.key] = f"{key.name}.{key.leaf}", key.name
    return names


def find_keys(pattern: str, keys: Sequence[str], names: Names = _NO_NAMES) -> list[str]:
    """Return the keys that a pattern matches; empty if it matches none.

    They are the key itself; or else those that match it as a shell pattern; or that end with it, from a dot on;
    or state whose parameter is called so, with or without the slot.
    """
    if pattern in keys:  # there are keys with brackets
        return [pattern]
    ending = f".{pattern}"

    def fits(name: str) -> bool:
        return fnmatchcase(name, pattern) or name.endswith(ending) or fnmatchcase(name, f"*{ending}")

    return (
        [key for key in keys if fnmatchcase(key, pattern)]
        or [key for key in keys if fits(key)]
        or [key for key in keys if key in names and fits(names[key][0])]
        or [key for key in keys if key in names and fits(names[key][1])]
    )


def find_key(pattern: str, keys: Sequence[str], names: Names = _NO_NAMES) -> str:
    """Return the one key of a tensor that a pattern matches.

    Raises:
        TargetError: it matches none, or several; names the closest, or the matches.
    """
    return _find_matches("tensor", "", pattern, keys, names, is_unique=True)[0]


def match_keys(
    patterns: Sequence[str], keys: Sequence[str], names: Names = _NO_NAMES, noun: str = "tensor", where: str = ""
) -> set[str]:
    """Return the keys that the patterns match; all of them if there are no patterns.

    Args:
        noun, where: name the keys in messages.

    Raises:
        TargetError: a pattern matches nothing, or one without a wildcard several keys; names them.
    """
    matches = set[str]() if patterns else {*keys}
    for pattern in patterns:
        matches.update(_find_matches(noun, where, pattern, keys, names, is_unique={*pattern}.isdisjoint("*?[")))
    return matches


def _find_matches(noun: str, where: str, pattern: str, keys: Sequence[str], names: Names, is_unique: bool) -> list[str]:
    matches = find_keys(pattern, keys, names)
    if not matches:
        raise TargetError(f"no {noun} matches {pattern!r}{where}{did_you_mean(pattern, [*keys])}")
    if is_unique and len(matches) > 1:
        raise TargetError(
            f"{pattern!r} may be each of {len(matches)} {noun}s{where}: {listed(matches)}; write more of the key"
        )
    return matches
