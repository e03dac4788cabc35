"""The parts of other checkpoints, and the zeros, that fill what a damaged one has lost.

A damaged checkpoint is a layout with holes.  Each source is a layout of the same tensors, with holes of its own, and
gives the boxes that those before it lack.  Together they tile each tensor, or it is named as lost.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ...box import Box, Index
from ...chunks import Boxes, Chunks, Strides, chunks_numbered
from ...errors import MuonckptError, SourceError, about
from ...key_search import keys_matching, names_of
from ...layout import Fragment, Place, TensorLayout, dense, holes_in
from ...overlap import IntArray, overlaps
from ...record import Blob, Manifest, StateRecord
from ...store.damage import BEGIN_ANEW, Damage, Kind
from ...store.diagnosis import Diagnosis
from ...store.open_checkpoint import OpenCheckpoint, check_blob
from ...store.reading.payloads import check_chunk, payload_of
from ...version import PROGRAM
from ...vocabulary import MOMENTUM, begins_as_zeros
from ...wording import counted, listed
from ..engine.outputs import OutputItem, Outputs, OutputTensor
from ..look.contents import FirstLook, first_look, kinds_in
from .joined import JoinedCheckpoints, JoinedPayloads

Name = tuple[str, str | None]
"""A parameter, or a tensor of no parameter, and the slot of its state: the same in checkpoints with other keys."""


@dataclass(frozen=True)
class FillingSource:
    """A checkpoint that may fill what another one lacks; ``own`` if it is that one, by its other description."""

    name: str
    opened: OpenCheckpoint
    look: FirstLook
    own: bool
    tensors: Mapping[str | Name, StateRecord]
    items: Mapping[str, Blob]

    @classmethod
    def of(cls, name: str, opened: OpenCheckpoint, own: bool = False) -> FillingSource:
        look = first_look(opened)
        tensors: dict[str | Name, StateRecord] = {_name(tensor, look): tensor for tensor in look.manifest.tensors}
        tensors |= {tensor.key: tensor for tensor in look.manifest.tensors}
        return cls(name, opened, look, own, tensors, {blob.key: blob for blob in opened.outline.blobs})

    def whole(self, tensors: Sequence[StateRecord], jobs: int) -> list[StateRecord]:
        """Return these tensors with those of their chunks, located, whose bytes are those that were written."""

        def checked(place: tuple[StateRecord, int]) -> bool:
            tensor, number = place
            try:
                if not all_located:
                    (tensor,) = self.opened.locate([replace(tensor, chunks=tensor.chunks.only([number]))])
                chunk = tensor.chunks[number if all_located else 0]
                payload = payload_of(tensor, chunk)
                self.opened.payloads.reaching(payload.file, payload.end)  # there may be no checksum
                check_chunk(self.opened.payloads, tensor, chunk)
            except MuonckptError:
                return False
            return True

        all_located = True
        try:
            tensors = self.opened.locate(tensors)
        except MuonckptError:  # an item of one of them: find out which
            all_located = False
        stored = [(tensor, number) for tensor in tensors for number in range(len(tensor.chunks))]

        with ThreadPoolExecutor(jobs) as pool:
            passed = iter(list(pool.map(checked, stored)))
        numbers = [tuple(number for number in range(len(one.chunks)) if next(passed)) for one in tensors]
        return list(_reduced(self.opened, tensors, numbers))


def _name(tensor: StateRecord, look: FirstLook) -> Name:
    if tensor.slot is not None and tensor.name is not None:
        return tensor.name, tensor.slot
    fields = None if isinstance(look.program, str) else look.program.dialect.model.read(tensor.path)
    return (fields["name"] if fields else tensor.key), None


def _convention(tensor: StateRecord, look: FirstLook) -> str | None:
    """Return the momentum convention of a tensor as it is recorded, or as its group or its program has it."""
    dialect = None if isinstance(look.program, str) else look.program.dialect
    if tensor.convention or dialect is None or tensor.slot not in dialect.slots_called("momentum"):
        return tensor.convention
    return look.groups.conventions.get(tensor.name or "") or dialect.convention


def _reduced(
    opened: OpenCheckpoint, tensors: Sequence[StateRecord], numbers: Sequence[tuple[int, ...]]
) -> tuple[StateRecord, ...]:
    """Return tensors with the chunks of these numbers alone, on columns that they share, and located."""
    chunks = chunks_numbered([(tensor.chunks, own) for tensor, own in zip(tensors, numbers, strict=True)])
    return opened.locate([replace(tensor, chunks=own) for tensor, own in zip(tensors, chunks, strict=True)])


@dataclass(frozen=True, slots=True)
class _Part:
    """Boxes of a tensor that a source gives, each with the number of the chunk of ``record`` that has it.

    Zeros have no record, and replicas are chunks of the damaged checkpoint itself.  ``same`` if they are of its step.
    """

    source: int
    taken: tuple[tuple[Box, int], ...]
    same: bool
    record: StateRecord | None = None


@dataclass(frozen=True)
class Filling:
    """A damaged checkpoint, what it lacks, and the parts that fill that, by key.

    Attributes:
        kept: its tensors with the chunks that are whole, located.
        left: the boxes that nothing has filled so far.
        items: for each lost item that was found the number of its source, and itself there.
        refused: why a source was not used for a key.
    """

    broken: OpenCheckpoint
    look: FirstLook
    diagnosis: Diagnosis
    kind: Kind
    sources: Sequence[FillingSource]
    kept: Sequence[StateRecord]
    left: dict[str, tuple[Box, ...]]
    parts: defaultdict[str, list[_Part]]
    items: dict[str, tuple[int, Blob]] = field(default_factory=dict)
    refused: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def damage(self) -> Damage:
        return self.diagnosis.damage

    @classmethod
    def of(cls, broken: OpenCheckpoint, diagnosis: Diagnosis, sources: Sequence[FillingSource]) -> Filling:
        look, damage = first_look(broken), diagnosis.damage
        tensors = look.manifest.tensors
        whole = ~damage.chunks & (look.manifest.elements > 0)
        numbers = [
            tuple(np.flatnonzero(whole[start : start + len(tensor.chunks)]).tolist())
            for tensor, start in zip(tensors, damage.starts, strict=False)
        ]
        kept = _reduced(broken, tensors, numbers)
        left: dict[str, tuple[Box, ...]] = {}
        parts: defaultdict[str, list[_Part]] = defaultdict(list)
        of_key = {tensor.key: tensor for tensor in kept}
        for tensor, boxes in damage.lost_boxes():
            own = {box: number for number, box in enumerate(of_key[tensor.key].boxes)}
            if replicas := tuple((box, own[box]) for box in dict.fromkeys(boxes) if box in own):
                parts[tensor.key].append(_Part(0, replicas, True))
            if missing := tuple(box for box in dict.fromkeys(boxes) if box not in own):
                left[tensor.key] = missing
        return cls(broken, look, diagnosis, kinds_in(look.manifest), sources, kept, left, parts)

    def fill(self, mix_steps: bool, fresh: Sequence[str], jobs: int) -> None:
        """Take what is lost from each source in turn, and then from zeros.

        Raises:
            SourceError: a source is of another model, or something stays lost.
            TargetError: a pattern of ``fresh`` matches no tensor.
        """
        of_key = {tensor.key: tensor for tensor in self.kept}
        for number, source in enumerate(self.sources, 1):
            asked = {}
            for key, boxes in self.left.items():
                theirs = source.tensors.get(key) or source.tensors.get(_name(of_key[key], self.look))
                if theirs is not None and self._may_give(source, of_key[key], theirs, mix_steps):
                    needed = np.unique(_overlapping(boxes, theirs.boxes)[1]).tolist()
                    asked[key] = replace(theirs, chunks=theirs.chunks.only(needed))
            for key, record in zip(asked, source.whole(list(asked.values()), jobs), strict=True):
                if len(record.chunks) < len(asked[key].chunks) and not source.own:
                    self.refused[key].append(f"{source.name} is damaged there")
                taken, rest = _taken(self.left.pop(key), record.boxes)
                if taken:
                    self.parts[key].append(_Part(number, taken, self._is_same(source, of_key[key], record), record))
                if rest:
                    self.left[key] = rest
            for key in self.damage.items - self.items.keys():
                self._take_item(number, source, key, mix_steps)
        begun = keys_matching(fresh, list(of_key), names_of(self.kept)) if fresh else set()
        for key in [key for key in self.left if key in begun]:
            if self._begins_as_zeros(of_key[key]):
                zeros = tuple((box, 0) for box in self.left.pop(key))
                self.parts[key].append(_Part(len(self.sources) + 1, zeros, False))
            else:
                self.refused[key].append(
                    f"{self.kind(of_key[key])} do not begin as zeros, so --fresh does not make them"
                )
        self._refuse_losses()

    def _begins_as_zeros(self, tensor: StateRecord) -> bool:
        named = (group.options for group in self.look.groups.groups if tensor.name in group.parameters)
        return begins_as_zeros(tensor.slot or "", next(named, {})) or self.kind(tensor) in BEGIN_ANEW

    def _is_same(self, source: FillingSource, mine: StateRecord | None, theirs: StateRecord | None) -> bool:
        """Return whether a source has the state of the same moment, as far as both say so."""
        prints = (mine and mine.fingerprint), (theirs and theirs.fingerprint)
        if None not in prints:
            return prints[0] == prints[1]
        return source.own or (source.look.step is not None and source.look.step == self.look.step)

    def _may_give(self, source: FillingSource, mine: StateRecord, theirs: StateRecord, mix_steps: bool) -> bool:
        conventions = [_convention(mine, self.look), _convention(theirs, source.look)]
        is_same = source.own or (mine.fingerprint is not None and mine.fingerprint == theirs.fingerprint)
        if is_same and None in conventions:
            conventions = [None, None]
        for what, expected, found in (
            ("shape", mine.shape, theirs.shape),
            ("dtype", mine.dtype, theirs.dtype),
            ("momentum convention", *(convention or "(not recorded)" for convention in conventions)),
        ):
            if expected != found:
                raise SourceError(
                    f"tensor {mine.key!r}: expected the {what} {expected} of {self.broken.path}, found {found} in "
                    f"{source.name}; convert that first, or leave it out"
                )
        if mix_steps or self._is_same(source, mine, theirs):
            return True
        self.refused[mine.key].append(f"{source.name} has it of {self._moment(source)}, which --mix-steps allows")
        return False

    def _moment(self, source: FillingSource) -> str:
        """Say of which moment a source is, if it is not that of the damaged checkpoint."""
        if source.look.step is None:
            return "an unknown step"
        return f"step {source.look.step}" if source.look.step != self.look.step else "the same step of another run"

    def _take_item(self, number: int, source: FillingSource, key: str, mix_steps: bool) -> None:
        if (blob := source.items.get(key)) is None:
            return
        if not mix_steps and not self._is_same(source, None, None):
            self.refused[key].append(f"{source.name} has it of {self._moment(source)}, which --mix-steps allows")
            return
        try:
            check_blob(source.opened.payloads, blob)
        except MuonckptError:
            self.refused[key] += [f"{source.name} is damaged there"] * (not source.own)
        else:
            self.items[key] = number, blob

    def _refuse_losses(self) -> None:
        lost = [f"tensor {key!r} {listed(boxes, 3)}" for key, boxes in self.left.items()]
        keys = [*self.left, *sorted(self.damage.items - self.items.keys())]
        if not keys:
            return
        lost += [f"item {key!r}" for key in keys[len(lost) :]]
        shown = listed(lost, _MOST_NAMED, "; ")
        reasons = Counter(reason for key in keys for reason in self.refused[key]).most_common(_MOST_NAMED)
        why = "".join(f"; {reason} ({count} of {len(keys)})" for reason, count in reasons)
        raise SourceError(
            f"{self.broken.path}: {self.diagnosis.sentence}. Of that nothing given has {len(keys)}: {shown}{why}. "
            f"Nothing was written. {self.diagnosis.advice}"
        )

    # What is written.

    def outputs(self) -> tuple[JoinedCheckpoints, Outputs]:
        """Return the checkpoints as one source of a job, and what is written of them.

        Raises:
            LayoutError: the parts of a tensor do not tile it; names the tensor.
        """
        given: list[list[StateRecord]] = [list(self.kept), *([] for _ in self.sources)]
        for part in (part for parts in self.parts.values() for part in parts):
            if part.record is not None:
                given[part.source].append(part.record)
        blobs = [[blob for blob in self.broken.outline.blobs if blob.key not in self.damage.items]]
        blobs += [[blob for own, blob in self.items.values() if own == n] for n in range(1, len(self.sources) + 1)]
        opened = [self.broken, *(source.opened for source in self.sources)]
        manifests = [
            Manifest(tuple(tensors), tuple(own)).moved(f"{number}/{{}}".format)
            for number, (tensors, own) in enumerate(zip(given, blobs, strict=True))
        ]
        moved = [{tensor.key: tensor.chunks for tensor in manifest.tensors} for manifest in manifests]
        tensors = [self._output(tensor, moved) for tensor in self.kept]
        items = {blob.key: blob for manifest in manifests for blob in manifest.blobs}
        listed = [OutputItem(blob.key, blob.path, items[blob.key]) for blob in self.broken.outline.blobs]
        base = dict(self.broken.provenance)
        provenance = {**base, "salvaged": [*base.get("salvaged", ()), self._entry()]}
        payloads = JoinedPayloads([one.payloads for one in opened])
        return JoinedCheckpoints(self.broken.path, payloads, manifests, provenance), Outputs(tensors, listed)

    def _output(self, record: StateRecord, moved: Sequence[Mapping[str, Chunks]]) -> OutputTensor:
        parts = [part for part in self.parts.get(record.key, ()) if part.source]
        sources: list[Chunks | bytes] = [moved[0][record.key]]
        pieces: list[_Piece] = []
        for part in parts:
            if part.record is None:
                sources.append(bytes(_LARGEST_ELEMENT))
                pieces.append((None, None, part.taken))
            else:
                sources.append(moved[part.source][part.record.key])
                pieces.append((part.record.boxes, part.record.chunks.strides, part.taken))
        with about(f"tensor {record.key!r}"):
            layout = _layout(record.shape, record.boxes, record.chunks.strides, tuple(pieces))
        same = all(part.same for part in parts)
        return OutputTensor(record if same else replace(record, fingerprint=None), layout, tuple(sources))

    def _entry(self) -> dict[str, Any]:
        """Return the record of the boxes and items that are not the checkpoint's own, in columns, as they are many."""
        boxes: dict[Box, int] = {}
        columns: dict[str, list[int]] = {"tensor": [], "box": [], "source": []}
        for number, parts in enumerate(self.parts.values()):
            for part in parts:
                columns["tensor"] += [number] * len(part.taken)
                columns["box"] += [boxes.setdefault(box, len(boxes)) for box, _ in part.taken]
                columns["source"] += [part.source] * len(part.taken)
        rows: list[tuple[str, str | None, int | float | None]] = [
            ("its own replicas", self.broken.format.name, self.look.step)
        ]
        rows += [(s.opened.path.resolve().name, s.opened.format.name, s.look.step) for s in self.sources]
        rows += [("zeros", None, None)]
        return {
            "program": PROGRAM,
            "source": self.broken.path.resolve().name,
            "damage": self.diagnosis.sentence or "a file or a description of it was lost",
            "sources": [dict(zip(("name", "format", "step"), row, strict=True)) for row in rows],
            "tensors": list(self.parts),
            "boxes": [[list(box.lo), list(box.hi)] for box in boxes],
            "taken": columns,
            "items": {key: number for key, (number, _) in sorted(self.items.items())},
            "notes": list(self._mixtures()),
        }

    def _mixtures(self) -> Iterator[str]:
        """Say what it means that tensors and items are of several steps, or begin anew."""
        of_key = {tensor.key: tensor for tensor in self.kept}
        others = {(part.source, key) for key, parts in self.parts.items() for part in parts if not part.same}
        kinds: defaultdict[tuple[int, bool], Counter[str]] = defaultdict(Counter)
        for number, key in others:
            kinds[number, self._is_momentum(of_key[key])][self.kind(of_key[key])] += 1
        for (number, is_momentum), counts in sorted(kinds.items()):
            names = ", ".join(f"{kind} of {count}" for kind, count in sorted(counts.items()))
            tensors = f"{names} {'tensor' if counts.total() == 1 else 'tensors'}"
            if number > len(self.sources):
                yield f"{tensors} begin anew, as zeros, where nothing has them"
            else:
                of = f"are those of {self._moment(self.sources[number - 1])} where they were lost"
                yield f"{tensors} {of}: {self._fades() if is_momentum else _MIXED}"
        items = Counter(number for number, _ in self.items.values())
        for number, count in sorted(items.items()):
            if not self._is_same(source := self.sources[number - 1], None, None):
                yield f"{counted(count, 'item')} (options, counters): of {self._moment(source)}"

    def _is_momentum(self, tensor: StateRecord) -> bool:
        dialect = None if isinstance(self.look.program, str) else self.look.program.dialect
        return tensor.slot in (dialect.slots_called("momentum") if dialect else {MOMENTUM})

    def _fades(self) -> str:
        """Say what a mixed momentum means, with the run's own coefficient where its groups say it."""
        groups = self.look.groups.groups
        dialect = None if isinstance(self.look.program, str) else self.look.program.dialect
        names = {method.options.get("momentum", "") for method in dialect.methods} if dialect else set()
        found = [group.options[name] for group in groups for name in names & group.options.keys()]
        mu = max((value for value in found if isinstance(value, float) and 0 < value < 1), default=None)
        steps = "" if mu is None else f" ({1 / (1 - mu):.0f} here)"
        return f"such a momentum is the direction of another step there, and decays within 1 / (1 - mu) steps{steps}"


_MOST_NAMED = 6

_LARGEST_ELEMENT = 16

_MIXED = "together they are the state of no moment of the run, and to go back to one whole step is usually better"


def _corners(boxes: Boxes | Sequence[Box]) -> tuple[IntArray, IntArray]:
    """Return the corners of boxes as `overlaps` takes them: without dims a tensor is one element of one dim."""
    corners = boxes if isinstance(boxes, Boxes) else Boxes.of_all(boxes, boxes[0].ndim)
    if corners.ndim:
        return corners.lo, corners.hi
    return np.zeros((len(boxes), 1), np.int64), np.ones((len(boxes), 1), np.int64)


def _overlapping(left: tuple[Box, ...], boxes: Boxes) -> tuple[IntArray, IntArray]:
    return overlaps(*_corners(left), *_corners(boxes))


@lru_cache(maxsize=1024)
def _taken(left: tuple[Box, ...], boxes: Boxes) -> tuple[tuple[tuple[Box, int], ...], tuple[Box, ...]]:
    """Return which boxes of those that are left these have, with the number of the box that has each, and the rest.

    Cached: the tensors of a model have few geometries.
    """
    rest = {number: [box] for number, box in enumerate(left)}
    taken: list[tuple[Box, int]] = []
    for lacking, number in zip(*(side.tolist() for side in _overlapping(left, boxes)), strict=True):
        has, before = boxes[number], rest[lacking]
        taken += [(common, number) for box in before if (common := box & has) is not None]
        rest[lacking] = [part for box in before for part in holes_in(box, (has,))]
    return tuple(taken), tuple(box for parts in rest.values() for box in parts)


_Piece = tuple[Boxes | None, Strides | None, tuple[tuple[Box, int], ...]]
"""The boxes and strides of a source's chunks (None for zeros), and the boxes that are taken, with their chunks."""


@lru_cache(maxsize=1024)
def _layout(shape: Index, own: Boxes, strides: Strides | None, pieces: tuple[_Piece, ...]) -> TensorLayout:
    """Return the layout of a tensor in its own whole chunks, and in what others give, buffers counted through all.

    Raises:
        LayoutError: they leave a hole or overlap.
    """

    def stored(boxes: Boxes, along: Strides | None, number: int, first: int) -> Fragment:
        box = boxes[number]
        if along is None or along[number] is None:
            return dense(box, first + number)
        return Fragment(box, Place(first + number, 0, along[number] or ()))

    fragments = [stored(own, strides, number, 0) for number in range(len(own))]
    first = len(own)
    for boxes, along, taken in pieces:
        for box, number in taken:
            if boxes is None:
                fragments.append(Fragment(box, Place(first, 0, (0,) * box.ndim)))
            else:
                fragments.append(Fragment(box, stored(boxes, along, number, first).place_at(box.lo)))
        first += 1 if boxes is None else len(boxes)
    return TensorLayout.of(shape, fragments)
