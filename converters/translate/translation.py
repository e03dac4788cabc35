"""What a translated checkpoint is made of: data for whoever moves the bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import SourceError
from ...layout import Buffer, TensorLayout
from ...record import Blob, Chunk, Manifest, StateRecord
from .detection import Detected
from .dialects import Dialect, KeyPath


@dataclass(frozen=True, slots=True)
class Moved:
    """A target tensor made of the source's elements.

    ``record`` has no chunks yet.  ``layout`` says where each element lies: buffer ``"t:c"`` is the payload of chunk
    ``c`` of the source's tensor ``t`` (:meth:`Translation.chunk`); its offsets and strides are in elements.  Elements
    are multiplied by ``scale`` (:func:`.conventions.scaled`), or copied bit for bit if it is None.
    """

    record: StateRecord
    layout: TensorLayout
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A target tensor that the source has in another form: a counter.  ``payload`` are its raw bytes."""

    record: StateRecord
    payload: bytes


@dataclass(frozen=True, slots=True)
class CarriedItem:
    """An item whose bytes are copied verbatim under a key of the target."""

    source: Blob
    key: str
    path: KeyPath


@dataclass(frozen=True, slots=True)
class MadeItem:
    """An item that is written anew; ``data`` are its bytes, a whole stored item."""

    key: str
    path: KeyPath
    data: bytes


@dataclass(frozen=True, slots=True)
class Translation:
    """Everything that the target checkpoint holds.

    Raises:
        SourceError: two of its entries have one key.
    """

    source: Manifest
    detected: Detected
    target: Dialect
    moved: tuple[Moved, ...]
    made: tuple[MadeTensor, ...] = ()
    carried: tuple[CarriedItem, ...] = ()
    items: tuple[MadeItem, ...] = ()
    left: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        keys = [moved.record.key for moved in self.moved] + [made.record.key for made in self.made]
        keys += [carried.key for carried in self.carried] + [made.key for made in self.items]
        twice = [key for key, count in Counter(keys).items() if count > 1]
        if twice:
            raise SourceError(f"two things would get the key {twice[0]!r}; a rule must rename one of them")

    def chunk(self, buffer: Buffer) -> tuple[StateRecord, Chunk]:
        """The source's tensor and chunk that a buffer of :class:`Moved` stands for."""
        tensor, _, chunk = str(buffer).partition(":")
        record = self.source.tensors[int(tensor)]
        return record, record.chunks[int(chunk)]

    def lines(self) -> Iterator[str]:
        """What it does, in sentences."""
        yield f"source: {self.detected}"
        yield f"target: {self.target.name} ({self.target.who})"
        scales = Counter(moved.scale for moved in self.moved if moved.scale is not None)
        yield f"{len(self.moved)} tensors, {len(self.moved) - scales.total()} of them bit for bit"
        for scale, count in scales.items():
            what = "momentum is" if count == 1 else "momenta are"
            yield f"{count} {what} multiplied by {scale!r}, each element rounded once"
        if self.made:
            yield f"{len(self.made)} counters are written anew, such as {self.made[0].record.key}"
        yield f"{len(self.carried)} other items are copied as they are, {len(self.items)} options are written anew"
        yield from (f"note: {note}" for note in self.notes)
