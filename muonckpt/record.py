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
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np

from .box import MOST_DIMS, MOST_ELEMENTS, Index
from .chunk_fields import ChunkReader, chunk_fields
from .chunks import Boxes, Chunk, Column, Columns, Extent, boxes_of, columns_of, layout_in_boxes, strides_of
from .errors import DamageError, SourceError, about
from .layout import TensorLayout
from .seal import check_seal, sealed_text
from .vocabulary import Convention, KeyPath

__all__ = ["MANIFEST_FILE", "MANIFEST_VERSION", "Blob", "Boxes", "Chunk", "Extent", "Manifest", "StateRecord"]

T = TypeVar("T")

MANIFEST_FILE = "muonckpt.json"
"""Name of the manifest in a checkpoint directory."""

MANIFEST_VERSION = 1
"""Version of the manifest format that this package writes, and the only one it reads."""

_DEEPEST = 32
"""Levels of the free-form parts of a manifest."""

_DIGEST = re.compile(r"[0-9a-f]{32}")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")


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
    """

    key: str
    path: KeyPath
    shape: Index
    dtype: str
    chunks: Sequence[Chunk]
    name: str | None = None
    slot: str | None = None
    convention: Convention | None = None
    pieces: tuple[int, ...] | None = None
    layout: Mapping[str, Any] | None = None
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        if len(self.shape) > MOST_DIMS or math.prod(self.shape) > MOST_ELEMENTS:
            raise SourceError(
                f"tensor {self.key!r}: expected at most {MOST_DIMS} dims and {MOST_ELEMENTS} elements, found more"
            )

    def chunk_layout(self) -> TensorLayout:
        """The tensor's layout in the checkpoint: buffer ``"3"`` is the payload of chunk 3.

        Raises:
            LayoutError: the chunks leave a hole or overlap; names the tensor and the box.
        """
        with about(f"tensor {self.key!r}"):
            return layout_in_boxes(self.shape, self.boxes, strides_of(self.chunks))

    @property
    def boxes(self) -> Boxes:
        """The boxes of the chunks.

        Raises:
            LayoutError: a box has another number of dims than the shape.
        """
        return boxes_of(self.chunks, self.shape)


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
        return columns_of([tensor.chunks for tensor in self.tensors])

    @property
    def elements(self) -> Column:
        """The number of elements of each chunk, in the order of `columns`."""
        return np.concatenate([np.zeros(0, np.int64), *(tensor.boxes.numel for tensor in self.tensors)])

    def to_json(self) -> str:
        """The text of the manifest file: one line per tensor and blob, so that it can be read and compared.

        The last line has the digest of all that is before it.
        """
        tensors = ",\n  ".join(map(_tensor_json, self.tensors))
        blobs = ",\n  ".join(map(_compact, map(_blob_json, self.blobs)))
        return sealed_text(
            f'{{"format": "muonckpt", "version": {MANIFEST_VERSION},\n "provenance": {_compact(self.provenance)},'
            f'{_TENSORS.decode()}{tensors}{_BLOBS.decode()}{blobs}\n ],\n "files": {_compact(dict(self.files))}'
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read and check a manifest; ``bytes`` are UTF-8.

        Manifests of earlier releases have no digest of their own, and no ``files``.

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

        One line after another becomes columns, because all of them as objects can take more memory than there is.
        """
        start, end = text.find(_TENSORS), text.find(_BLOBS)
        if not 0 < start < end:
            return None
        fields = json.loads(text[: start + len(_TENSORS)] + text[end:])
        if fields.get("tensors") != []:
            return None
        return cls._of_fields(text, fields, _lines(text, start + len(_TENSORS), end))

    @classmethod
    def _of_fields(cls, text: bytes, data: Any, lines: Iterator[bytes] | None) -> Manifest:
        check_seal(text, data)
        if data["format"] != "muonckpt" or data["version"] != MANIFEST_VERSION:
            raise SourceError(
                f"manifest of format {data['format']!r} version {data['version']!r}; this program reads "
                f"'muonckpt' version {MANIFEST_VERSION}"
            )
        return cls(
            tensors=_tensors(data["tensors"] if lines is None else map(json.loads, lines)),
            blobs=tuple(map(_blob, data["blobs"])),
            provenance=_free_form(data["provenance"]),
            files={_str(name): _matching(_DIGEST)(digest) for name, digest in data.get("files", {}).items()},
        )


_TENSORS = b'\n "tensors": [\n  '
_BLOBS = b'\n ],\n "blobs": [\n  '


def _lines(text: bytes, start: int, end: int) -> Iterator[bytes]:
    """The lines of a part of a text, without the commas between them."""
    while start < end:
        stop = text.find(b",\n  ", start, end)
        stop = end if stop < 0 else stop
        yield text[start:stop]
        start = stop + 4


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tensor_json(tensor: StateRecord) -> str:
    fields = {
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
    return f'{_compact(fields)[:-1]}, "chunks": [{chunk_fields(tensor.chunks)}]}}'


def _blob_json(blob: Blob) -> dict[str, Any]:
    return {
        "key": blob.key,
        "path": list(blob.path),
        "file": blob.item.file,
        "item": [blob.item.offset, blob.item.length],
        "digest": blob.digest,
    }


def _tensors(entries: Iterable[Any]) -> tuple[StateRecord, ...]:
    """The tensors with these fields; values that many of them have are kept once."""
    reader, known, layouts = ChunkReader(), _Once(), dict[str, Any]()

    def fields_of(data: Any) -> tuple[Any, ...]:
        shape = known(_ints(data["shape"]))
        reader.read(data["chunks"], len(shape))
        layout = _optional(_free_form, data["layout"])
        return (
            known(_str(data["key"])),
            known(tuple(map(known, _path(data["path"])))),
            shape,
            known(_str(data["dtype"])),
            known(_optional(_str, data["name"])),
            known(_optional(_str, data["slot"])),
            _optional(Convention, data["convention"]),
            known(_optional(_ints, data["pieces"])),
            None if layout is None else layouts.setdefault(_compact(layout), layout),
            _optional(_matching(_FINGERPRINT), data["fingerprint"]),
        )

    fields = list(map(fields_of, entries))
    return tuple(
        StateRecord(key, path, shape, dtype, chunks, *rest)
        for (key, path, shape, dtype, *rest), chunks in zip(fields, reader.finished(), strict=True)
    )


class _Once:
    """Gives of equal values the first, so that a million of them take the memory of few."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}

    def __call__(self, value: T) -> T:
        return cast(T, self._values.setdefault(value, value))


def _blob(data: dict[str, Any]) -> Blob:
    return Blob(
        key=_str(data["key"]),
        path=_path(data["path"]),
        item=Extent(_str(data["file"]), *_ints(data["item"])),
        digest=_optional(_matching(_DIGEST), data["digest"]),
    )


def _optional(read: Callable[[Any], T], value: Any) -> T | None:
    return None if value is None else read(value)


def _free_form(value: Any) -> dict[str, Any]:
    """A JSON object of any content, which is not nested so deeply that it could not be written again."""
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        level = [
            part
            for container in level
            for part in (container.values() if isinstance(container, dict) else container)
            if isinstance(part, dict | list)
        ]
        if not level:
            return dict(value)
    raise ValueError(f"expected JSON of at most {_DEEPEST} levels")


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r:.200}")
    return value


def _int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"expected an integer >= 0, got {value!r:.200}")
    return value


def _ints(value: Any) -> Index:
    if not isinstance(value, list):
        raise TypeError(f"expected a list of integers, got {value!r:.200}")
    return tuple(map(_int, value))


def _path(value: Any) -> KeyPath:
    if not isinstance(value, list):
        raise TypeError(f"expected a path, got {value!r:.200}")
    return tuple(part if isinstance(part, str) else _int(part) for part in value)


def _matching(pattern: re.Pattern[str]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not pattern.fullmatch(_str(value)):
            raise ValueError(f"{value!r:.200} does not match {pattern.pattern}")
        return str(value)

    return read
