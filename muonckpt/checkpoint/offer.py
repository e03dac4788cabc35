"""What a rank tells the coordinator of what it could save: a few bytes for each item, as layers repeat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem

from ..box import Box, Index
from ..vocabulary import KeyPath
from .annotation import Annotation
from .bits import dtype_name


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A box that a rank holds of a tensor of this dtype and global shape."""

    dtype: str
    shape: Index
    box: Box


@dataclass(frozen=True, slots=True)
class ItemKind:
    """What items of several keys have in common: the offset by which DCP names them, and the box; objects have none."""

    offset: Index | None
    part: HeldPart | None

    @property
    def empty(self) -> bool:
        """Whether it is of a tensor and has no elements."""
        return self.part is not None and not self.part.box.numel

    def where(self, key: str) -> str:
        """What to call such an item of a key in an error."""
        return f"{key!r} at {self.offset or ()}"


@dataclass(frozen=True, slots=True)
class Offer:
    """A `LocalPlan` without what only its rank needs.

    Attributes:
        keys, kinds: of each item, its key and the number of its kind in ``distinct_kinds``.
        paths: in the nested state dict, by key.
        notes: of tensors, by key: the parameter's name and the number of the rest in ``distinct_notes``.
    """

    keys: Sequence[str]
    kinds: Sequence[int]
    distinct_kinds: Sequence[ItemKind]
    paths: Mapping[str, KeyPath]
    notes: Mapping[str, tuple[str | None, int]]
    distinct_notes: Sequence[Annotation]

    def note(self, key: str) -> Annotation | None:
        """The annotation of a tensor, if this rank has one."""
        if key not in self.notes:
            return None
        name, number = self.notes[key]
        return replace(self.distinct_notes[number], name=name)


def offer_of(items: Iterable[WriteItem], paths: Mapping[str, KeyPath], annotations: Mapping[str, Annotation]) -> Offer:
    """What to tell of these items."""
    items = list(items)
    kinds: dict[Any, int] = {}
    numbers = [kinds.setdefault(_kind_name(item), len(kinds)) for item in items]
    first = dict(zip(reversed(numbers), reversed(items), strict=True))
    notes: dict[Any, int] = {}
    layouts = {id(note.layout): note.layout for note in annotations.values()}  # tensors mostly share one object
    numbered = {
        key: (note.name, notes.setdefault((note.slot, note.convention, note.pieces, id(note.layout)), len(notes)))
        for key, note in annotations.items()
    }
    return Offer(
        [item.index.fqn for item in items],
        numbers,
        [_kind(first[number]) for number in range(len(kinds))],
        paths,
        numbered,
        [Annotation(None, slot, convention, pieces, layouts[layout]) for slot, convention, pieces, layout in notes],
    )


_CHUNK = attrgetter("chunk.offsets", "chunk.sizes", "properties.dtype", "size")


def _kind_name(item: WriteItem) -> tuple[Any, ...]:
    """What items of one kind have in common, to be compared."""
    data = item.tensor_data
    return (item.index.offset,) if data is None else (item.index.offset, *_CHUNK(data))


def _kind(item: WriteItem) -> ItemKind:
    offset, data = item.index.offset, item.tensor_data
    part = None
    if data is not None:
        box = Box.of(tuple(data.chunk.sizes)).shift(tuple(data.chunk.offsets))
        part = HeldPart(dtype_name(data.properties.dtype), tuple(data.size), box)
    return ItemKind(None if offset is None else tuple(offset), part)
