"""What a checkpoint holds and where: the one type that every format is read into and written from.

A :class:`Manifest` lists tensors (:class:`StateRecord`) and opaque items (:class:`Blob`) with the byte extents of
their chunks.  Formats never know each other: a reader makes a manifest, a writer takes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .box import Box, Index


class Convention(StrEnum):
    """How a momentum buffer accumulates gradients."""

    EMA = "ema"
    """``m = mu * m + (1 - mu) * g``"""
    SUM = "sum"
    """``m = mu * m + g``"""


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes in one file of the checkpoint."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored box of a tensor.

    ``item`` is the whole item as its store wrote it (for DCP a small zip archive); ``payload`` the raw
    little-endian row-major elements of ``box`` inside it, None while the item has not been opened.  ``digest`` is
    the xxh3-128 of the payload in hex, ``crc32`` the checksum that the item itself carries; None where unknown.
    """

    box: Box
    item: Extent
    payload: Extent | None = None
    digest: str | None = None
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class Blob:
    """An item that is not a tensor.  Its bytes are carried verbatim and never unpickled."""

    key: str
    path: tuple[str | int, ...]
    item: Extent
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class StateRecord:
    """One logical tensor of a checkpoint.

    ``key`` is the flat key in the store, ``path`` the same as a path in the nested state dict.  ``dtype`` is
    torch's name without the prefix (``"float32"``).  The rest is what the format cannot say by itself: the
    parameter's ``name`` and the optimizer ``slot`` (None for anything that is not optimizer state), the momentum
    ``convention``, the ``matrices`` of a fused parameter, the ``layout`` that the run used (provenance), and the
    ``fingerprint``.
    """

    key: str
    path: tuple[str | int, ...]
    shape: Index
    dtype: str
    chunks: tuple[Chunk, ...]
    name: str | None = None
    slot: str | None = None
    convention: Convention | None = None
    matrices: tuple[tuple[Box, ...], ...] | None = None
    layout: Mapping[str, Any] | None = None
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything in one checkpoint.  ``provenance`` is free-form JSON: program, versions, world, mesh, step."""

    tensors: tuple[StateRecord, ...]
    blobs: tuple[Blob, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
