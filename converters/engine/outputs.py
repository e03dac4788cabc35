"""What a destination is to hold: tensors made of the source's chunks, and items that are no tensors."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache

from ...box import Box
from ...errors import about
from ...layout import Buffer, TensorLayout, dense
from ...plan import Copy, make_plan
from ...record import Blob, Chunk, Manifest, StateRecord
from ..target.topology import TargetError
from ..translate.detection import annotate


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor to write: ``record`` says what it is (its chunks do not count), ``layout`` where its elements lie.

    A buffer of the layout is the payload of a source chunk, or raw bytes in memory (``made``); both dense elements of
    ``record.dtype``.  Elements are multiplied by ``scale``, or if it is None moved bit for bit.
    """

    record: StateRecord
    layout: TensorLayout
    chunks: Mapping[Buffer, Chunk]
    made: Mapping[Buffer, bytes] = field(default_factory=dict)
    scale: float | None = None

    def copies(self, boxes: Sequence[Box]) -> tuple[tuple[Copy, ...], ...]:
        """For each of the boxes, which together are the tensor, the copies that make it, dense from element 0."""
        with about(self.record.key):
            return _copies(self.layout, tuple(boxes))


@lru_cache(maxsize=1024)
def _copies(source: TensorLayout, boxes: tuple[Box, ...]) -> tuple[tuple[Copy, ...], ...]:
    """Cached: tensors of one geometry share them."""
    target = TensorLayout(source.shape, tuple(dense(box, number) for number, box in enumerate(boxes)))
    copies: defaultdict[Buffer, list[Copy]] = defaultdict(list)
    for copy in make_plan(source, target).copies:
        copies[copy.target.buffer].append(copy)
    return tuple(tuple(copies[number]) for number in range(len(boxes)))


@dataclass(frozen=True, slots=True)
class Entry:
    """An item that is no tensor: ``target`` says what it is called and how long it is; its bytes are those of an item
    of the source, or if that is None ``data``."""

    target: Blob
    source: Blob | None
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Content:
    """Everything that a destination is to hold.

    ``left_out`` are the keys of what the source has and this has not; ``notes`` sentences about what was decided.
    """

    tensors: Sequence[Wanted]
    entries: Sequence[Entry]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def selected(self, globs: Sequence[str]) -> Content:
        """What has a key that fits one of these shell patterns; everything if there are none.

        Raises:
            TargetError: a pattern fits nothing.
        """
        if not globs:
            return self
        keys = [each.record.key for each in self.tensors] + [each.target.key for each in self.entries]
        for glob in globs:
            if not any(fnmatchcase(key, glob) for key in keys):
                raise TargetError(f"nothing in the checkpoint has a key that fits {glob!r}")
        kept = {key for key in keys if any(fnmatchcase(key, glob) for glob in globs)}
        return dataclasses.replace(
            self,
            tensors=[each for each in self.tensors if each.record.key in kept],
            entries=[each for each in self.entries if each.target.key in kept],
        )

    def tensors_only(self) -> Content:
        """Without what is no tensor."""
        left = (*self.left_out, *(each.target.key for each in self.entries))
        return dataclasses.replace(self, entries=(), left_out=left)

    def used(self, manifest: Manifest) -> Manifest:
        """As much of the source's manifest as this content is made of."""
        chunks = {chunk.item for each in self.tensors for chunk in each.chunks.values()}
        blobs = {each.source for each in self.entries}
        return dataclasses.replace(
            manifest,
            tensors=tuple(t for t in manifest.tensors if any(chunk.item in chunks for chunk in t.chunks)),
            blobs=tuple(blob for blob in manifest.blobs if blob in blobs),
        )


Translate = Callable[[Manifest], Content]
"""What is made of a source."""


def as_they_are(manifest: Manifest) -> Content:
    """Every tensor and every item under its own name; slots, by which layouts sort tensors, are those of the keys
    where nothing is recorded.

    Raises:
        LayoutError: a tensor has a hole or an overlap.
    """
    recorded = any(tensor.slot is not None for tensor in manifest.tensors)
    tensors = (manifest if recorded else annotate(manifest)).tensors
    return Content(
        [Wanted(t, t.chunk_layout(), {str(i): c for i, c in enumerate(t.chunks)}) for t in tensors],
        [Entry(blob, blob) for blob in manifest.blobs],
    )


def tensors_only(translate: Translate) -> Translate:
    """The same, leaving out what is no tensor."""
    return lambda manifest: translate(manifest).tensors_only()
