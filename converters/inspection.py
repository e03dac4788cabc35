"""What is in a checkpoint and how it is laid out, from its metadata alone."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SourceError
from ..record import Extent, Manifest, StateRecord
from ..store.io.location import Remote
from ..store.open_checkpoint import open
from ..store.reading.dtypes import itemsize
from .buffer_summary import NO_STATE, buffer_summary, labelled_buffers, without_buffers
from .translate.detection import detect, with_slots


@dataclass(frozen=True, slots=True)
class Inspection:
    """A summary of a checkpoint's metadata; sizes are in bytes.

    Attributes:
        checkpoint: where it is.
        kind: its format.
        dialect: the program whose keys it has: ``name`` and ``who``, None if that is unknown, and the ``reasons``.
        provenance: which program made it and how, without its records of flat buffers, which are long.
        tensors, chunks, bytes: the numbers of tensors and chunks, and the bytes of all elements.
        other_items, files: the numbers of non-tensor items and of files.
        layouts: how tensors were laid out on the ranks that wrote them, with the number of ``tensors`` of each layout.
        buffers: a summary of the flat buffers: sizes, padding, and what each rank holds.
        slots: for each slot of optimizer state ``tensors``, ``elements``, ``bytes`` and ``dtypes``.
        manifest: the manifest, with parameters and slots as the keys of the dialect name them.
    """

    checkpoint: str
    kind: str
    dialect: Mapping[str, Any]
    provenance: Mapping[str, Any]
    tensors: int
    chunks: int
    bytes: int
    other_items: int
    files: int
    layouts: tuple[Mapping[str, Any], ...]
    buffers: tuple[Mapping[str, Any], ...]
    slots: tuple[Mapping[str, Any], ...]
    manifest: Manifest

    def to_json(self) -> dict[str, Any]:
        """JSON data: the attributes under their names, without the manifest."""
        fields = (field.name for field in dataclasses.fields(self) if field.name != "manifest")
        return {name: getattr(self, name) for name in fields}


def inspect(path: str | os.PathLike[str] | Remote) -> Inspection:
    """Summarise what is in a checkpoint of any format and how it is laid out, as ``muonckpt inspect`` prints it.

    Reads metadata only, and needs no torch.

    Args:
        path: a path, or a URL such as ``s3://bucket/step1000``.

    Raises:
        SourceError: there is no checkpoint, or its metadata are damaged or refused.
    """
    with open(path) as checkpoint:
        manifest = with_slots(checkpoint.outline)
    layouts = Counter(json.dumps(tensor.layout) for tensor in manifest.tensors if tensor.layout)
    return Inspection(
        checkpoint=str(checkpoint.path),
        kind=checkpoint.format.name,
        dialect=_dialect(manifest),
        provenance=without_buffers(manifest.provenance),
        tensors=len(manifest.tensors),
        chunks=sum(len(tensor.chunks) for tensor in manifest.tensors),
        bytes=sum(map(_bytes, manifest.tensors)),
        other_items=len(manifest.blobs),
        files=len({item.file for item in _items(manifest)}),
        layouts=tuple({**json.loads(layout), "tensors": count} for layout, count in layouts.most_common()),
        buffers=tuple(buffer_summary(labelled_buffers(manifest.provenance))),
        slots=tuple(_slot(name, manifest.tensors) for name in dict.fromkeys(t.slot for t in manifest.tensors)),
        manifest=manifest,
    )


def _dialect(manifest: Manifest) -> dict[str, Any]:
    """The program whose keys these are, if that is known, and why or why not."""
    try:
        detected = detect(manifest)
    except SourceError as error:
        return {"name": None, "who": None, "reasons": [str(error)]}
    return {"name": detected.dialect.name, "who": detected.dialect.who, "reasons": list(detected.reasons)}


def _slot(name: str | None, tensors: Sequence[StateRecord]) -> dict[str, Any]:
    members = [tensor for tensor in tensors if tensor.slot == name]
    return {
        "slot": name or NO_STATE,
        "tensors": len(members),
        "elements": sum(math.prod(tensor.shape) for tensor in members),
        "bytes": sum(map(_bytes, members)),
        "dtypes": sorted({tensor.dtype for tensor in members}),
    }


def _items(manifest: Manifest) -> Iterator[Extent]:
    for tensor in manifest.tensors:
        yield from (chunk.item for chunk in tensor.chunks)
    yield from (blob.item for blob in manifest.blobs)


def _bytes(tensor: StateRecord) -> int:
    return math.prod(tensor.shape) * itemsize(tensor.dtype)
