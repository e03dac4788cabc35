"""The parts of other checkpoints, and the zeros, that fill what a damaged one has lost.

A damaged checkpoint is a layout with holes.  Each source is a layout of the same tensors, with holes of its own, and
gives the boxes that those before it lack.  Together they tile each tensor, or it is named as lost.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ...algebra.box import Box, Index
from ...algebra.layout import Fragment, Place, TensorLayout, dense, holes_in
from ...names.errors import ADVICE, DamageError, MuonckptError, SourceError, about
from ...names.version import PROGRAM
from ...names.vocabulary import begins_as_zeros
from ...names.wording import counted, listed
from ...programs.model_view import BEGIN_ANEW, ModelView, Role
from ...record.chunks import Boxes, Chunks, Strides
from ...record.record import Blob, Manifest, StateRecord, match_keys, names_of
from ...store.io.checksums import xxh3_128
from ...store.open_checkpoint import OpenCheckpoint, check_blob
from ...store.reading.payloads import payload_of
from ...store.verify.damage import Damage
from ...store.verify.diagnosis import Diagnosis
from ..engine.outputs import OutputItem, Outputs, OutputTensor, constant
from ..look.contents import FirstLook, recorded_step
from .joined import JoinedCheckpoints, JoinedPayloads
from .same_save import (
    Comparison,
    FillingSource,
    WholePart,
    common_boxes,
    compare_box,
    is_listed_whole,
    overlapping,
    same_items,
)


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
        part: of the damaged checkpoint, what is whole.
        sources: what may fill it, numbered from 1: first what is the checkpoint itself, by its other descriptions.
        comparisons: with the sources that are other checkpoints, by their numbers.
        left: the boxes that nothing has filled so far.
        items: for each lost item that was found the number of its source, itself there, and whether it is of the same
            save.
        refused: why a source was not used for a key.
    """

    part: WholePart
    diagnosis: Diagnosis
    sources: Sequence[FillingSource]
    comparisons: Mapping[int, Comparison]
    left: dict[str, tuple[Box, ...]]
    parts: defaultdict[str, list[_Part]]
    digests: Mapping[tuple[str, Box], str]
    items: dict[str, tuple[int, Blob, bool]] = field(default_factory=dict)
    refused: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def broken(self) -> OpenCheckpoint:
        return self.part.opened

    @property
    def look(self) -> FirstLook:
        return self.part.look

    @property
    def view(self) -> ModelView:
        return self.part.look.view

    @property
    def kept(self) -> Sequence[StateRecord]:
        return self.part.tensors

    @property
    def damage(self) -> Damage:
        return self.part.damage

    @classmethod
    def of(
        cls,
        part: WholePart,
        diagnosis: Diagnosis,
        itself: Sequence[OpenCheckpoint],
        comparisons: Sequence[Comparison],
    ) -> Filling:
        """Begin to fill what a part lacks: from what the checkpoint itself has elsewhere, then from other sources."""
        left: dict[str, tuple[Box, ...]] = {}
        parts: defaultdict[str, list[_Part]] = defaultdict(list)
        of_key = {tensor.key: tensor for tensor in part.tensors}
        for tensor, boxes in part.damage.lost_boxes():
            own = {box: number for number, box in enumerate(of_key[tensor.key].boxes)}
            if replicas := tuple((box, own[box]) for box in dict.fromkeys(boxes) if box in own):
                parts[tensor.key].append(_Part(0, replicas, True))
            if missing := tuple(box for box in dict.fromkeys(boxes) if box not in own):
                left[tensor.key] = missing
        return cls(
            part,
            diagnosis,
            [*(FillingSource.of("itself", opened) for opened in itself), *(one.source for one in comparisons)],
            dict(enumerate(comparisons, len(itself) + 1)),
            left,
            parts,
            dict(part.lost_digests()),
        )

    def fill(self, mix_steps: bool, fresh: Sequence[str], jobs: int) -> None:
        """Take what is lost from each source in turn, and then from zeros.

        Raises:
            SourceError: a source is of another model, sources contradict each other, or something stays lost.
            TargetError: a pattern of ``fresh`` matches no tensor.
        """
        of_key = {tensor.key: tensor for tensor in self.kept}
        for number, source in enumerate(self.sources, 1):
            # What it has of the boxes that nothing has filled so far.
            asked = {}
            for key, boxes in self.left.items():
                theirs = source.counterpart(of_key[key], self.view)
                if theirs is not None:
                    self._refuse_misfit(number, of_key[key], theirs)
                    pairs = overlapping(Boxes.of_all(boxes, theirs.boxes.ndim), theirs.boxes)
                    needed = np.unique(pairs[:, 1]).tolist()
                    asked[key] = replace(theirs, chunks=theirs.chunks.select(needed))
            # What of that is whole, and of the same save, or allowed to be of another.
            for key, record in zip(asked, source.whole(list(asked.values()), jobs), strict=True):
                if len(record.chunks) < len(asked[key].chunks) and number in self.comparisons:
                    self.refused[key].append(f"{source.name} is damaged there")
                record, same = self._allowed(number, of_key[key], record, mix_steps)
                taken, rest = _taken(self.left.pop(key), record.boxes)
                if taken:
                    self.parts[key].append(_Part(number, taken, same, record))
                if rest:
                    self.left[key] = rest
            for key in self.damage.items - self.items.keys():
                self._take_item(number, key, mix_steps)
        if not mix_steps:
            self._refuse_contradictions(jobs)
        begun = match_keys(fresh, list(of_key), names_of(self.kept)) if fresh else set()
        for key in [key for key in self.left if key in begun]:
            if self._begins_as_zeros(of_key[key]):
                zeros = tuple((box, 0) for box in self.left.pop(key))
                self.parts[key].append(_Part(len(self.sources) + 1, zeros, False))
            else:
                self.refused[key].append(
                    f"{self.view.noun(of_key[key])} do not begin as zeros, so --fresh does not make them"
                )
        self._refuse_losses()

    def _begins_as_zeros(self, tensor: StateRecord) -> bool:
        parameter = self.view.parameters.get(tensor.name or "")
        return (
            begins_as_zeros(tensor.slot or "", parameter.options if parameter else {})
            or self.view.role(tensor) in BEGIN_ANEW
        )

    def _has_fingerprint(self, number: int, mine: StateRecord) -> bool | None:
        """Return whether a source has the tensor of which this is recorded; None if no fingerprints tell."""
        if mine.fingerprint is None or number not in self.comparisons:
            return None
        comparison = self.comparisons[number]
        if comparison.differs and not is_listed_whole(self.broken):
            return None  # nothing binds the record to this save, and it may be of the source's
        fingerprint = comparison.fingerprints.get(mine.key)
        return None if fingerprint is None else fingerprint == mine.fingerprint

    def _is_same(self, number: int, mine: StateRecord | None) -> bool:
        """Return whether a source has the state of the same save, as far as both say so."""
        if number not in self.comparisons:
            return True
        comparison = self.comparisons[number]
        if mine is None:
            return comparison.is_same_save()
        by_fingerprint = self._has_fingerprint(number, mine)
        return comparison.is_same_save(mine.key) if by_fingerprint is None else by_fingerprint

    def _refuse_misfit(self, number: int, mine: StateRecord, theirs: StateRecord) -> None:
        source = self.sources[number - 1]
        conventions = [self.view.convention(mine), source.look.view.convention(theirs)]
        if None in conventions and self._is_same(number, mine):
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

    def _allowed(
        self, number: int, mine: StateRecord, theirs: StateRecord, mix_steps: bool
    ) -> tuple[StateRecord, bool]:
        """Return what of a source's tensor may fill this one, and whether all of that is of the same save.

        The recorded digest of a lost chunk decides about a chunk of the same box, as fingerprints do about a tensor.
        """
        source, same, is_itself = self.sources[number - 1], self._is_same(number, mine), number not in self.comparisons
        if self._has_fingerprint(number, mine):
            return theirs, True
        proven: list[int] = []
        others: list[int] = []
        for index, chunk in enumerate(theirs.chunks):
            expected = self.digests.get((mine.key, chunk.box))
            if expected is not None and chunk.strides is None:
                actual = chunk.digest or xxh3_128(source.opened.payloads.bands(payload_of(theirs, chunk)))
                (proven if actual == expected else others).append(index)
            elif not (is_itself and chunk.item.file in self.damage.strays):
                (proven if same else others).append(index)
        if others and not is_itself and not mix_steps:
            self._refuse(number, mine.key, self.comparisons[number].moment)
        taken = sorted(proven + others) if mix_steps and not is_itself else proven
        return replace(theirs, chunks=theirs.chunks.select(taken)), len(taken) == len(proven)

    def _take_item(self, number: int, key: str, mix_steps: bool) -> None:
        source = self.sources[number - 1]
        if (blob := source.items.get(key)) is None:
            return
        try:
            check_blob(source.opened.payloads, blob)
        except MuonckptError:
            self.refused[key] += [f"{source.name} is damaged there"] * (number in self.comparisons)
            return
        expected = self.part.lost_items.get(key)
        is_same_save, is_itself = self._is_same(number, None), number not in self.comparisons
        same = is_same_save and not (is_itself and blob.item.file in self.damage.strays)
        if expected is not None:
            same = expected == xxh3_128(source.opened.payloads.bands(blob.item))
        if same or (mix_steps and not is_itself):
            self.items[key] = number, blob, same
        elif not is_itself:
            moment = "another save (its bytes are others)" if is_same_save else self.comparisons[number].moment
            self._refuse(number, key, moment)

    def _refuse(self, number: int, key: str, moment: str) -> None:
        self.refused[key].append(f"{self.sources[number - 1].name} has it of {moment}, which --mix-steps allows")

    def _refuse_contradictions(self, jobs: int) -> None:
        """Refuse what one source gives and another one of the same save has otherwise, where nothing recorded decides.

        Raises:
            SourceError: there is such a tensor or item.
        """
        of_key = {tensor.key: tensor for tensor in self.kept}
        for key, parts in self.parts.items():
            mine = of_key[key]
            for part in parts if mine.fingerprint is None else ():
                if part.record is None:  # zeros, or replicas
                    continue
                for number, comparison in self.comparisons.items():
                    source = comparison.source
                    other = source.counterpart(mine, self.view)
                    if number == part.source or other is None or not self._is_same(number, mine):
                        continue
                    if box := _first_difference(self.sources[part.source - 1], part, source, other, jobs):
                        self._refuse_contradiction(f"tensor {key!r} {box}", part.source, number)
        unrecorded = {key: found for key, found in self.items.items() if key not in self.part.lost_items}
        for key, (number, blob, _) in unrecorded.items():
            for other_number, comparison in self.comparisons.items():
                source, other_blob = comparison.source, comparison.source.items.get(key)
                if other_number == number or other_blob is None or not comparison.is_same_save():
                    continue
                with suppress(DamageError):
                    if not same_items(self.sources[number - 1].opened, blob, source.opened, other_blob):
                        self._refuse_contradiction(f"item {key!r}", number, other_number)

    def _refuse_contradiction(self, subject: str, number: int, other: int) -> None:
        names = self.sources[number - 1].name, self.sources[other - 1].name
        raise SourceError(
            f"{self.broken.path}: {self.diagnosis.sentence}. {subject} is lost, {names[0]} and {names[1]} have others, "
            "and what is whole here is the same in both: nothing tells which is of this save. Nothing was written. "
            f"{ADVICE}give the right one alone, with --from"
        )

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
        blobs = [list(self.part.items.values())]
        blobs += [[blob for own, blob, _ in self.items.values() if own == n] for n in range(1, len(self.sources) + 1)]
        opened = [self.broken, *(source.opened for source in self.sources)]
        manifests = [
            Manifest(tuple(tensors), tuple(own)).renamed(f"{number}/{{}}".format)
            for number, (tensors, own) in enumerate(zip(given, blobs, strict=True))
        ]
        payloads = JoinedPayloads([one.payloads for one in opened])
        zeros = [constant(payloads, name) for name in dict.fromkeys(tensor.dtype for tensor in self.kept)]
        moved = [{tensor.key: tensor.chunks for tensor in manifest.tensors} for manifest in manifests]
        zeros_of = {tensor.dtype: tensor.chunks for tensor in zeros}
        tensors = [self._output(tensor, moved, zeros_of[tensor.dtype]) for tensor in self.kept]
        items = {blob.key: blob for manifest in manifests for blob in manifest.blobs}
        listed = [OutputItem(blob.key, blob.path, items[blob.key]) for blob in self.broken.outline.blobs]
        base = self._provenance()
        provenance = {**base, "salvaged": [*base.get("salvaged", ()), self._entry()]}
        source = JoinedCheckpoints(self.broken.path, payloads, manifests, provenance)
        return source, Outputs(tensors, listed, constants=tuple(zeros))

    def _provenance(self) -> dict[str, Any]:
        """Return what is known of the save: what the checkpoint says, or a source of the same save if it cannot."""
        recorded = (comparison for comparison in self.comparisons.values() if comparison.source.records_digests)
        same = next((one.source for one in recorded if one.is_same_save()), None)
        if same is None:
            return dict(self.broken.provenance)
        if self.damage.strays or self.part.mixture:
            return dict(same.opened.provenance)
        step = recorded_step(same.look.manifest)
        return {**({} if step is None else {"step": step}), **self.broken.provenance}

    def _output(self, record: StateRecord, moved: Sequence[Mapping[str, Chunks]], zeros: Chunks) -> OutputTensor:
        parts = [part for part in self.parts.get(record.key, ()) if part.source]
        sources = [moved[0][record.key]]
        pieces: list[_Piece] = []
        for part in parts:
            if part.record is None:
                sources.append(zeros)
                pieces.append((None, None, part.taken))
            else:
                sources.append(moved[part.source][part.record.key])
                pieces.append((part.record.boxes, part.record.chunks.strides, part.taken))
        with about(f"tensor {record.key!r}"):
            layout = _layout(record.shape, record.boxes, record.chunks.strides, tuple(pieces))
        fingerprint = (record.fingerprint or self._fingerprint(record)) if all(part.same for part in parts) else None
        return OutputTensor(replace(record, fingerprint=fingerprint), layout, tuple(sources))

    def _fingerprint(self, tensor: StateRecord) -> str | None:
        """Return the fingerprint that a source of the same save records of a tensor, for what is written to have it."""
        same = (comparison for comparison in self.comparisons.values() if comparison.is_same_save(tensor.key))
        return next((one.fingerprints[tensor.key] for one in same if tensor.key in one.fingerprints), None)

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
            ("its own replicas", self.broken.format.name, self.part.step)
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
            "items": {key: number for key, (number, *_) in sorted(self.items.items())},
            "notes": [*self._mixtures(), *self._other_saves(), *self._unjudged()],
        }

    def _mixtures(self) -> Iterator[str]:
        """Say what it means that tensors and items are of several steps, or begin anew."""
        of_key = {tensor.key: tensor for tensor in self.kept}
        others = {(part.source, key) for key, parts in self.parts.items() for part in parts if not part.same}
        kinds: defaultdict[tuple[int, bool], Counter[str]] = defaultdict(Counter)
        for number, key in others:
            tensor = of_key[key]
            kinds[number, self.view.role(tensor) is Role.MOMENTUM][self.view.noun(tensor)] += 1
        for (number, is_momentum), counts in sorted(kinds.items()):
            names = ", ".join(f"{kind} of {count}" for kind, count in sorted(counts.items()))
            tensors = f"{names} {'tensor' if counts.total() == 1 else 'tensors'}"
            if number > len(self.sources):
                yield f"{tensors} begin anew, as zeros, where nothing has them"
            else:
                of = f"are those of {self.comparisons[number].moment} where they were lost"
                yield f"{tensors} {of}: {self._fades() if is_momentum else _MIXED}"
        items = Counter(number for number, _, same in self.items.values() if not same)
        for number, count in sorted(items.items()):
            yield f"{counted(count, 'item')} (options, counters): of {self.comparisons[number].moment}"

    def _other_saves(self) -> Iterator[str]:
        """Name the sources that are of another save although their step does not say so."""
        used = {part.source for parts in self.parts.values() for part in parts}
        used |= {number for number, *_ in self.items.values()}
        for number, comparison in self.comparisons.items():
            if comparison.differs and number not in used:
                yield f"nothing was taken from {comparison.source.name}, which is of {comparison.moment}"

    def _unjudged(self) -> Iterator[str]:
        """Say that nothing tells whether all that was kept is of one save, if so."""
        kept, judged = self.part.whole, self.part.recorded.copy()
        for comparison in self.comparisons.values():
            judged |= comparison.equal & comparison.is_same_save()
        unjudged = int((kept & ~judged).sum())
        if unjudged and not judged.any():
            yield (
                "whether all of it is of one save cannot be judged: there are no digests that were recorded when it "
                "was saved, and no source of the same save to compare it with (--from)"
            )
        elif unjudged:
            yield (
                f"whether {unjudged} of {int(kept.sum())} chunks are of the same save as the others cannot be judged: "
                "no digests of them were recorded, and no source of the same save has them"
            )

    def _fades(self) -> str:
        """Say what a mixed momentum means, with the run's own coefficient where its groups say it."""
        names = self.view.dialect.options_called("momentum") if self.view.dialect else frozenset()
        found = [group.options[name] for group in self.view.groups for name in names & group.options.keys()]
        mu = max((value for value in found if isinstance(value, float) and 0 < value < 1), default=None)
        steps = "" if mu is None else f" ({1 / (1 - mu):.0f} here)"
        return f"such a momentum is the direction of another step there, and decays within 1 / (1 - mu) steps{steps}"


_MOST_NAMED = 6

_MIXED = "together they are the state of no moment of the run, and to go back to one whole step is usually better"


@lru_cache(maxsize=1024)
def _taken(left: tuple[Box, ...], boxes: Boxes) -> tuple[tuple[tuple[Box, int], ...], tuple[Box, ...]]:
    """Return which boxes of those that are left these have, with the number of the box that has each, and the rest.

    Cached: the tensors of a model have few geometries.
    """
    rest = {number: [box] for number, box in enumerate(left)}
    taken: list[tuple[Box, int]] = []
    for lacking, number in overlapping(Boxes.of_all(left, boxes.ndim), boxes).tolist():
        has, before = boxes[number], rest[lacking]
        taken += [(common, number) for box in before if (common := box & has) is not None]
        rest[lacking] = [part for box in before for part in holes_in(box, (has,))]
    return tuple(taken), tuple(box for parts in rest.values() for box in parts)


def _first_difference(
    source: FillingSource, part: _Part, other_source: FillingSource, other: StateRecord, jobs: int
) -> Box | None:
    """Return the first box that a part has taken, and of which another source has other bits; None if there is none."""
    assert part.record is not None, "it was taken from a source"
    (stored,) = other_source.whole([other], jobs)
    payloads = source.opened.payloads, other_source.opened.payloads
    boxes_by_chunk = defaultdict[int, list[Box]](list)
    for box, number in part.taken:
        boxes_by_chunk[number].append(box)
    for number, chunk, counterpart, common in common_boxes(part.record, stored):
        for box in filter(None, (box & common for box in boxes_by_chunk[number])):
            if not compare_box(payloads[0], part.record, chunk, payloads[1], stored, counterpart, box)[0]:
                return box
    return None


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
