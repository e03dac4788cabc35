"""The contents of a checkpoint and their places: the one type that every format is read into and written from.

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
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

from ..algebra.box import MAX_DIMS, MAX_ELEMENTS, Index
from ..algebra.layout import TensorLayout
from ..names.errors import DamageError, LayoutError, SourceError, about
from ..names.vocabulary import Convention, KeyPath
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
    key_path,
    layout,
    matching,
    optional,
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

    ``key`` is the flat key in the store, ``path`` the same as a path in the nested state dict.  ``dtype`` is
    torch's name without the prefix (``"float32"``).  The other fields are what the format cannot say by itself: the
    parameter's ``name`` and the optimizer ``slot`` (None for anything that is not optimizer state), the momentum
    ``convention``, the rows of the ``pieces`` fused in the parameter, the ``layout`` that the run used (provenance),
    and the ``fingerprint`` (16 hex digits).

    Raises:
        SourceError: it has more dims or elements than any tensor.
        LayoutError: the boxes of the chunks have another number of dims than the shape.
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
        """The tensor's layout in the checkpoint: buffer 3 is the payload of chunk 3.

        Raises:
            LayoutError: the chunks leave a hole or overlap; names the tensor and the box.
        """
        with about(f"tensor {self.key!r}"):
            return layout_in_boxes(self.shape, self.boxes, self.chunks.strides)

    @property
    def boxes(self) -> Boxes:
        """The boxes of the chunks."""
        return self.chunks.boxes


def with_chunks(tensors: Sequence[StateRecord], numbers: Sequence[Sequence[int]]) -> list[StateRecord]:
    """Return tensors with the chunks of these numbers alone, which rise, on columns that they share."""
    pairs = zip(tensors, numbers, strict=True)
    selected = select_chunks([(tensor.chunks, tuple(of_tensor)) for tensor, of_tensor in pairs])
    return [replace(tensor, chunks=chunks) for tensor, chunks in zip(tensors, selected, strict=True)]


def says_convention(entries: Iterable[StateRecord | Blob]) -> bool:
    """Return True for entries of our optimizer with momentum, or converted for it: no other says a convention."""
    return any(
        entry.convention is not None if isinstance(entry, StateRecord) else entry.key.endswith(".convention")
        for entry in entries
    )


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything in one checkpoint.  ``provenance`` is free-form JSON: program, versions, world, mesh, step.

    ``files`` are the files beside the manifest that describe the same checkpoint to other programs, with the xxh3-128
    of their bytes in hex.
    """

    tensors: tuple[StateRecord, ...]
    blobs: tuple[Blob, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def columns(self) -> Columns:
        """The chunks of all tensors, one after the other."""
        return columns_of(tensor.chunks for tensor in self.tensors)

    @property
    def elements(self) -> Column:
        """The number of elements of each chunk, in the order of `columns`."""
        return np.concatenate([np.zeros(0, np.int64), *(tensor.boxes.numel for tensor in self.tensors)])

    def renamed(self, name_of: Callable[[str], str]) -> Manifest:
        """The same tensors and items in files of other names.

        Raises:
            SourceError: a name is refused.
        """
        blobs = (replace(blob, item=replace(blob.item, file=name_of(blob.item.file))) for blob in self.blobs)
        return replace(self.on_columns(self.columns.renamed(name_of)), blobs=tuple(blobs))

    def on_columns(self, columns: Columns, start: int = 0) -> Manifest:
        """The same tensors, whose chunks are in the rows of these columns from ``start`` on."""
        chunks = on_columns((tensor.chunks for tensor in self.tensors), columns, start)
        tensors = (replace(tensor, chunks=own) for tensor, own in zip(self.tensors, chunks, strict=True))
        return replace(self, tensors=tuple(tensors))

    def to_json(self) -> str:
        """The text of the manifest file: one line per tensor and blob, so that it can be read and compared.

        The last line has the digest of all that is before it.
        """
        return "".join(self.json_parts())

    def json_parts(self) -> Iterator[str]:
        """The text of the manifest file in parts, since all of it can take more memory than the manifest."""
        return sealed_parts(self._json_parts())

    def _json_parts(self) -> Iterator[str]:
        layouts, chunks = _Layouts(), ColumnWriter([tensor.chunks for tensor in self.tensors])
        numbers = [layouts.number(tensor.layout) for tensor in self.tensors]
        yield f'{{"format": "muonckpt", "version": {MANIFEST_VERSION},\n "provenance": {compact(self.provenance)},'
        yield f'\n "data_files": {compact(chunks.names)},\n "layouts": [\n  '
        yield from _listed(layouts.texts)
        yield '\n ],\n "boxes": [\n  '
        yield from _listed(chunks.boxes)
        yield f"\n ],{_TENSORS.decode()}"
        yield from _listed(map(_tensor_json, self.tensors, numbers, chunks.texts()))
        yield _BLOBS.decode()
        yield from _listed(map(compact, map(_blob_json, self.blobs)))
        yield f'\n ],\n "files": {compact(dict(self.files))}'

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read and check a manifest; ``bytes`` are UTF-8.

        What other programs write has no digest of its own, and no ``files``.

        Raises:
            DamageError: it is not JSON, its text is not the one that was written, or a field is missing or not what it
                should be.
            SourceError: it is of another version, or names a file outside the checkpoint.
        """
        encoded = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        try:
            with suppress(json.JSONDecodeError):  # the lines are others than ours
                if (manifest := cls._of_lines(encoded)) is not None:
                    return manifest
            return cls._of_fields(encoded, json.loads(encoded), None)
        except KeyError as error:
            raise DamageError(f"damaged manifest: it lacks the field {error}") from error
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DamageError(f"damaged manifest: {type(error).__name__}: {error}") from error

    @classmethod
    def _of_lines(cls, text: bytes) -> Manifest | None:
        """The manifest in a text with a line for each tensor; None, or `JSONDecodeError`, if it is laid out otherwise.

        Many lines at a time become columns, because all of them as objects can take more memory than there is.
        """
        start, end = text.find(_TENSORS), text.find(_BLOBS)
        if not 0 < start < end:
            return None
        fields = json.loads(text[: start + len(_TENSORS)] + text[end:])
        if fields.get("tensors") != []:
            return None
        return cls._of_fields(text, fields, _blocks(text, start + len(_TENSORS), end))

    @classmethod
    def _of_fields(cls, text: bytes, data: Any, blocks: Iterator[list[Any]] | None) -> Manifest:
        check_seal(text, data)
        if data["format"] != "muonckpt" or data["version"] != MANIFEST_VERSION:
            raise SourceError(
                f"manifest of format {data['format']!r} version {data['version']!r}; this program reads "
                f"'muonckpt' version {MANIFEST_VERSION}"
            )
        return cls(
            tensors=_tensors(
                [data["tensors"]] if blocks is None else blocks,
                ColumnReader(data["data_files"], data["boxes"]),
                _numbered_layouts(data["layouts"]),
            ),
            blobs=tuple(map(_blob, data["blobs"])),
            provenance=provenance(data["provenance"]),
            files={string(name): matching(DIGEST)(digest) for name, digest in data.get("files", {}).items()},
        )


_TENSORS = b'\n "tensors": [\n  '
_BLOBS = b'\n ],\n "blobs": [\n  '


_NEXT = b",\n  "
_BLOCK = 1 << 16
"""Bytes of a text that are parsed at a time: many lines, which take a fraction of the memory of all."""


def _blocks(text: bytes, start: int, end: int) -> Iterator[list[Any]]:
    """The entries in the lines of a part of a text, those of many lines at a time."""
    stop = start
    while stop < end:
        stop = text.find(_NEXT, start + _BLOCK, end)
        stop = end if stop < 0 else stop
        yield json.loads(b"[null," + text[start:stop] + b"]")[1:]  # null, so that JSON refuses to have nothing after it
        start = stop + len(_NEXT)


def _listed(texts: Iterable[str]) -> Iterator[str]:
    """Texts with a comma and a new line between them."""
    for number, text in enumerate(texts):
        yield f",\n  {text}" if number else text


class _Layouts:
    """The distinct layouts of tensors, numbered."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._seen: dict[int, tuple[object, int]] = {}

    def number(self, layout: Mapping[str, Any] | None) -> int | None:
        """The number of a layout."""
        if layout is None:
            return None
        if id(layout) not in self._seen:  # tensors mostly share one object, which stays alive here
            self._seen[id(layout)] = layout, self._numbers.setdefault(compact(layout), len(self._numbers))
        return self._seen[id(layout)][1]

    @property
    def texts(self) -> Iterable[str]:
        return self._numbers


def record_fields(tensor: StateRecord) -> dict[str, Any]:
    """The JSON data of a tensor, without its chunks."""
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


def _tensor_json(tensor: StateRecord, layout: int | None, chunks: str) -> str:
    return f'{compact({**record_fields(tensor), "layout": layout})[:-1]}, "chunks": {chunks}}}'


def _blob_json(blob: Blob) -> dict[str, Any]:
    return {
        "key": blob.key,
        "path": list(blob.path),
        "file": blob.item.file,
        "item": [blob.item.offset, blob.item.length],
        "digest": blob.digest,
    }


def _numbered_layouts(listed: Iterable[Any]) -> Callable[[Any], Mapping[str, Any] | None]:
    """Return a reader of the numbers by which tensors refer to these layouts."""
    layouts = list(map(layout, listed))

    def numbered(number: Any) -> Mapping[str, Any] | None:
        if number is not None and whole_number(number) >= len(layouts):
            raise ValueError(f"expected the number of one of {len(layouts)} layouts, got {number}")
        return None if number is None else layouts[number]

    return numbered


def _tensors(
    blocks: Iterable[Iterable[Any]], reader: ColumnReader, layout_of: Callable[[Any], Mapping[str, Any] | None]
) -> tuple[StateRecord, ...]:
    """The tensors with these fields; values that many of them have are kept once."""
    known: dict[Any, Any] = {}

    def once(values: Iterable[T]) -> list[T]:
        values = list(values)
        return list(map(known.setdefault, values, values))

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
    read: list[tuple[Any, ...]] = []
    for block in blocks:
        if entries := list(map(fields_of, block)):
            chunks, *columns = zip(*entries, strict=True)
            listed = zip(readers, columns, strict=True)
            values = {name: field_of_all(name, readers[name], own, columns[0]) for name, own in listed}
            reader.read(chunks, list(map(len, values["shape"])))
            read += zip(*values.values(), strict=True)
    return tuple(
        StateRecord(key, path, shape, dtype, chunks, *rest)
        for (key, path, shape, dtype, *rest), chunks in zip(read, reader.chunks(), strict=True)
    )


def _blob(data: dict[str, Any]) -> Blob:
    return Blob(
        key=string(data["key"]),
        path=key_path(data["path"]),
        item=Extent(string(data["file"]), *integers(data["item"])),
        digest=optional(matching(DIGEST), data["digest"]),
    )
