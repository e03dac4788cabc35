"""The contents of a checkpoint and their places: the one type that every format is read into and written from.

A :class:`Manifest` lists tensors (:class:`StateRecord`) and opaque items (:class:`Blob`) with the byte extents of
their chunks.  Formats never know each other: a reader makes a manifest, a writer takes one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from .box import MOST_DIMS, MOST_ELEMENTS, Box, Index
from .errors import DamageError, LayoutError, SourceError, about
from .layout import Buffer, Fragment, Place, TensorLayout, dense
from .seal import sealed_text, unsealed_fields
from .vocabulary import Convention, KeyPath

MANIFEST_FILE = "muonckpt.json"
"""Name of the manifest in a checkpoint directory."""

MANIFEST_VERSION = 1
"""Version of the manifest format that this package writes, and the only one it reads."""

_DEEPEST = 32
"""Levels of the free-form parts of a manifest."""

_COMPONENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes in one file of the checkpoint: a plain name, or several joined by slashes (folders).

    Raises:
        SourceError: the file is not inside the directory by such names, or the range is negative.
    """

    file: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        # DCP's own names begin with underscores; a leading dot, a slash or anything exotic never does.
        if not all(map(_COMPONENT.fullmatch, self.file.split("/"))):
            raise SourceError(f"refused file name {self.file!r:.300}: expected plain names inside the checkpoint")
        if self.offset < 0 or self.length < 0 or self.offset + self.length > MOST_ELEMENTS:
            raise SourceError(f"refused byte range {self.offset}+{self.length} of {self.file!r}")

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored box of a tensor.

    ``item`` is the whole item as its store wrote it (for DCP a small zip archive); ``payload`` the raw
    little-endian elements of ``box`` inside it, None while the item has not been opened.  ``digest`` is
    the xxh3-128 of the payload in hex, ``crc32`` the checksum that the item itself carries; None where unknown.
    ``strides`` are those of the elements in the payload, in elements; None for row-major order.  We write row-major
    order only, so manifests do not record strides.
    """

    box: Box
    item: Extent
    payload: Extent | None = None
    digest: str | None = None
    crc32: int | None = None
    strides: Index | None = None

    def stored(self, buffer: Buffer) -> Fragment:
        """The fragment of the elements in the payload, which is called ``buffer``."""
        return _stored(self.box, self.strides, buffer)


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
    chunks: tuple[Chunk, ...]
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
            return _in_chunks(self.shape, tuple((chunk.box, chunk.strides) for chunk in self.chunks))


@lru_cache(maxsize=1024)
def _in_chunks(shape: Index, chunks: tuple[tuple[Box, Index | None], ...]) -> TensorLayout:
    """Cached: the tensors of a model have few geometries."""
    return TensorLayout(shape, tuple(_stored(*chunk, str(i)) for i, chunk in enumerate(chunks) if chunk[0].numel))


def _stored(box: Box, strides: Index | None, buffer: Buffer) -> Fragment:
    return dense(box, buffer) if strides is None else Fragment(box, Place(buffer, 0, strides))


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

    def to_json(self) -> str:
        """The text of the manifest file: one line per tensor and blob, so that it can be read and compared.

        The last line has the digest of all that is before it.
        """
        tensors = ",\n  ".join(map(_compact, map(_tensor_json, self.tensors)))
        blobs = ",\n  ".join(map(_compact, map(_blob_json, self.blobs)))
        return sealed_text(
            f'{{"format": "muonckpt", "version": {MANIFEST_VERSION},\n "provenance": {_compact(self.provenance)},\n'
            f' "tensors": [\n  {tensors}\n ],\n "blobs": [\n  {blobs}\n ],\n "files": {_compact(dict(self.files))}'
        )

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read and check a manifest.

        Manifests of earlier releases have no digest of their own, and no ``files``.

        Raises:
            DamageError: it is not JSON, its text is not the one that was written, or a field is missing or not what it
                should be.
            SourceError: it is of another version, or names a file outside the checkpoint.
        """
        try:
            data = unsealed_fields(text)
            if data["format"] != "muonckpt" or data["version"] != MANIFEST_VERSION:
                raise SourceError(
                    f"manifest of format {data['format']!r} version {data['version']!r}; this program reads "
                    f"'muonckpt' version {MANIFEST_VERSION}"
                )
            return cls(
                tensors=tuple(map(_tensor, data["tensors"])),
                blobs=tuple(map(_blob, data["blobs"])),
                provenance=_free_form(data["provenance"]),
                files={_str(name): _matching(_DIGEST)(digest) for name, digest in data.get("files", {}).items()},
            )
        except KeyError as error:
            raise DamageError(f"damaged manifest: it lacks the field {error}") from error
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DamageError(f"damaged manifest: {type(error).__name__}: {error}") from error


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tensor_json(tensor: StateRecord) -> dict[str, Any]:
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
        "chunks": [
            {
                "lo": list(chunk.box.lo),
                "hi": list(chunk.box.hi),
                "file": chunk.item.file,
                "item": [chunk.item.offset, chunk.item.length],
                "payload": None if chunk.payload is None else [chunk.payload.offset, chunk.payload.length],
                "digest": chunk.digest,
                "crc32": chunk.crc32,
                **({} if chunk.strides is None else {"strides": list(chunk.strides)}),
            }
            for chunk in tensor.chunks
        ],
    }


def _blob_json(blob: Blob) -> dict[str, Any]:
    return {
        "key": blob.key,
        "path": list(blob.path),
        "file": blob.item.file,
        "item": [blob.item.offset, blob.item.length],
        "digest": blob.digest,
    }


def _tensor(data: dict[str, Any]) -> StateRecord:
    return StateRecord(
        key=_str(data["key"]),
        path=_path(data["path"]),
        name=_optional(_str, data["name"]),
        slot=_optional(_str, data["slot"]),
        shape=_ints(data["shape"]),
        dtype=_str(data["dtype"]),
        convention=_optional(Convention, data["convention"]),
        pieces=_optional(_ints, data["pieces"]),
        fingerprint=_optional(_matching(_FINGERPRINT), data["fingerprint"]),
        layout=_optional(_free_form, data["layout"]),
        chunks=tuple(map(_chunk, data["chunks"])),
    )


def _chunk(data: dict[str, Any]) -> Chunk:
    file = _str(data["file"])
    if "strides" in data:  # they could reach outside the payload
        raise DamageError("damaged manifest: elements are stored row by row, found strides")
    try:
        box = Box(_ints(data["lo"]), _ints(data["hi"]))
    except LayoutError as error:
        raise DamageError(f"damaged manifest: {error}") from error
    return Chunk(
        box=box,
        item=Extent(file, *_ints(data["item"])),
        payload=_optional(lambda span: Extent(file, *_ints(span)), data["payload"]),
        digest=_optional(_matching(_DIGEST), data["digest"]),
        crc32=_optional(_int, data["crc32"]),
    )


def _blob(data: dict[str, Any]) -> Blob:
    return Blob(
        key=_str(data["key"]),
        path=_path(data["path"]),
        item=Extent(_str(data["file"]), *_ints(data["item"])),
        digest=_optional(_matching(_DIGEST), data["digest"]),
    )


T = TypeVar("T")


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
