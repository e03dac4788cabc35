"""Fills what a damaged checkpoint has lost: from its own replicas, from other checkpoints, and with zeros.

A damaged checkpoint is a layout with holes.  Each source is a layout of the same tensors, with holes of its own, and
gives the boxes that those before it lack.  Together they tile each tensor, or it is named as lost.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ...algebra.box import Box, Index
from ...algebra.layout import Fragment, Place, TensorLayout, dense, holes_in
from ...names.errors import ADVICE, DamageError, MuonckptError, SourceError, about
from ...names.keys import key_of
from ...names.version import PROGRAM
from ...names.vocabulary import KeyPath, begins_as_zeros
from ...names.wording import counted, listed
from ...programs.model_view import BEGIN_ANEW, ModelView, Role
from ...record.chunks import Boxes, Chunks, Strides
from ...record.record import Blob, Manifest, StateRecord, by_key, entry_keys, match_keys, names_of
from ...store.io.checksums import xxh3_128
from ...store.open_checkpoint import OpenCheckpoint, check_blob
from ...store.reading.payloads import payload_of
from ...store.verify.diagnosis import Diagnosis
from ..compare.elements import StoredChunk, compare_bits
from ..engine.outputs import OutputItem, Outputs, OutputTensor, constant
from ..look.contents import recorded_step
from .joined import JoinedCheckpoints, JoinedPayloads
from .same_save import Comparison, FillingSource, WholePart, common_boxes, is_described, overlapping, same_items

_MAX_NAMED = 6
"""Losses, and reasons for them, that an error names."""

_MIXED = "together they are the state of no moment of the run, and to go back to one whole step is usually better"

_ChosenBoxes = tuple[tuple[Box, int], ...]
"""Boxes, each with the number of the chunk that has it."""


@dataclass(frozen=True, slots=True)
class _Substitute:
    """Boxes of a tensor that a source gives, from chunks of ``record``, and whether they are of the same save.

    Replicas are chunks of the damaged checkpoint itself, source 0; zeros have no record either.
    """

    source: int
    boxes: _ChosenBoxes
    is_same_save: bool
    record: StateRecord | None = None


@dataclass(frozen=True)
class Filling:
    """A damaged checkpoint, and by key what it lacks and what fills that.

    Attributes:
        part: of the damaged checkpoint, what is whole.
        sources: what may fill it, numbered from 1: first what is the checkpoint itself, by its other descriptions.
        comparisons: with the sources that are other checkpoints, by their numbers.
        missing_boxes: those that nothing has filled so far.
        items: for each lost item that a source has, the number of that, the item there, and whether it is of the same
            save.
        reasons: why a source was not used for a key.
    """

    part: WholePart
    diagnosis: Diagnosis
    sources: Sequence[FillingSource]
    comparisons: Mapping[int, Comparison]
    missing_boxes: dict[str, tuple[Box, ...]]
    substitutes: defaultdict[str, list[_Substitute]]
    items: dict[str, tuple[int, Blob, bool]] = field(default_factory=dict)
    reasons: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(
        cls,
        part: WholePart,
        diagnosis: Diagnosis,
        itself: Sequence[OpenCheckpoint],
        comparisons: Sequence[Comparison],
    ) -> Filling:
        """Begin to fill what a part lacks: from what the checkpoint itself has elsewhere, then from other sources."""
        sources = [*(FillingSource.of("itself", opened) for opened in itself), *(c.source for c in comparisons)]
        numbered = dict(enumerate(comparisons, len(itself) + 1))
        filling = cls(part, diagnosis, sources, numbered, {}, defaultdict(list))
        # A lost chunk whose box another whole chunk has is no loss.
        for tensor, lost_boxes in part.damage.lost_boxes():
            numbers = {box: number for number, box in enumerate(filling.tensors[tensor.key].boxes)}
            boxes = dict.fromkeys(lost_boxes)
            if replicas := tuple((box, numbers[box]) for box in boxes if box in numbers):
                filling.substitutes[tensor.key].append(_Substitute(0, replicas, True))
            if missing := tuple(box for box in boxes if box not in numbers):
                filling.missing_boxes[tensor.key] = missing
        return filling

    @property
    def damaged(self) -> OpenCheckpoint:
        return self.part.opened

    @property
    def view(self) -> ModelView:
        return self.part.look.view

    @cached_property
    def tensors(self) -> Mapping[str, StateRecord]:
        """The tensors of the damaged checkpoint by key, with their whole chunks."""
        return by_key(self.part.tensors)

    @property
    def _missing_items(self) -> list[str]:
        return sorted(self.part.damage.items - self.items.keys())

    def fill(self, mix_steps: bool, fresh: Sequence[str], jobs: int) -> None:
        """Fill what is lost from each source in turn, and then with zeros.

        Raises:
            SourceError: a source is of another model, sources contradict each other, or something stays lost.
            TargetError: a pattern of ``fresh`` matches no tensor.
        """
        for number in range(1, len(self.sources) + 1):
            self._fill_from(number, mix_steps, jobs)
            for key in self._missing_items:
                self._fill_item(number, key, mix_steps)
        if not mix_steps:
            self._refuse_contradictions(jobs)
        # Zeros are the last resort, and only for state that begins as zeros.
        fresh_keys = match_keys(fresh, list(self.tensors), names_of(self.part.tensors)) if fresh else set()
        for key in [key for key in self.missing_boxes if key in fresh_keys]:
            tensor = self.tensors[key]
            parameter = self.view.parameters.get(tensor.name or "")
            options = parameter.options if parameter else {}
            if begins_as_zeros(tensor.slot or "", options) or self.view.role(tensor) in BEGIN_ANEW:
                boxes = tuple((box, 0) for box in self.missing_boxes.pop(key))
                self.substitutes[key].append(_Substitute(len(self.sources) + 1, boxes, False))
            else:
                self.reasons[key].append(
                    f"{self.view.noun(tensor)} do not begin as zeros, so `fresh=` does not make them"
                )
        self._refuse_losses()

    def _fill_from(self, number: int, mix_steps: bool, jobs: int) -> None:
        """Fill boxes of tensors from a source."""
        source, candidates = self.sources[number - 1], dict[str, StateRecord]()
        # The chunks of the source that have elements of the boxes that nothing has filled so far.
        for key, boxes in self.missing_boxes.items():
            candidate = source.counterpart(self.tensors[key], self.view)
            if candidate is not None:
                self._refuse_misfit(number, self.tensors[key], candidate)
                pairs = overlapping(Boxes.of_all(boxes, candidate.boxes.ndim), candidate.boxes)
                chunks = candidate.chunks.select(np.unique(pairs[:, 1]).tolist())
                candidates[key] = replace(candidate, chunks=chunks)
        # Those of them that are whole, and of the same save, or permitted to be of another.
        whole_records = source.whole_chunks(list(candidates.values()), jobs)
        for key, record in zip(candidates, whole_records, strict=True):
            if len(record.chunks) < len(candidates[key].chunks) and number in self.comparisons:
                self.reasons[key].append(f"{source.name} is damaged there")
            permitted, is_same_save = self._permitted(number, self.tensors[key], record, mix_steps)
            boxes_there, missing = _split_boxes(self.missing_boxes.pop(key), permitted.boxes)
            if boxes_there:
                self.substitutes[key].append(_Substitute(number, boxes_there, is_same_save, permitted))
            if missing:
                self.missing_boxes[key] = missing

    def _has_fingerprint(self, number: int, tensor: StateRecord) -> bool | None:
        """Return whether a source has the tensor whose fingerprint is recorded; None if no fingerprints tell."""
        if tensor.fingerprint is None or number not in self.comparisons:
            return None
        comparison = self.comparisons[number]
        if comparison.differs and not is_described(self.damaged):
            return None  # nothing binds the record to this save, and it may be of the source's
        fingerprint = comparison.fingerprints.get(tensor.key)
        return None if fingerprint is None else fingerprint == tensor.fingerprint

    def _is_same_save(self, number: int, tensor: StateRecord | None) -> bool:
        """Return whether a source has a tensor, or an item, of the same save, as far as both say so."""
        if number not in self.comparisons:
            return True
        comparison = self.comparisons[number]
        if tensor is None:
            return comparison.is_same_save()
        by_fingerprint = self._has_fingerprint(number, tensor)
        return comparison.is_same_save(tensor.key) if by_fingerprint is None else by_fingerprint

    def _refuse_misfit(self, number: int, tensor: StateRecord, candidate: StateRecord) -> None:
        source = self.sources[number - 1]
        # A convention that one of them does not know is no misfit in the same save.
        conventions = [self.view.convention(tensor), source.look.view.convention(candidate)]
        if None in conventions and self._is_same_save(number, tensor):
            conventions = [None, None]
        for noun, expected, actual in (
            ("shape", tensor.shape, candidate.shape),
            ("dtype", tensor.dtype, candidate.dtype),
            ("momentum convention", *(convention or "(not recorded)" for convention in conventions)),
        ):
            if expected != actual:
                raise SourceError(
                    f"tensor {tensor.key!r}: expected the {noun} {expected} of {self.damaged.path}, found {actual} in "
                    f"{source.name}; convert that first, or leave it out"
                )

    def _permitted(
        self, number: int, tensor: StateRecord, candidate: StateRecord, mix_steps: bool
    ) -> tuple[StateRecord, bool]:
        """Return the chunks of a source's tensor that may fill this one, and whether all are of the same save.

        The recorded digest of a lost chunk decides about a chunk of the same box, as fingerprints do about a tensor.
        """
        source, is_itself = self.sources[number - 1], number not in self.comparisons
        is_same_save = self._is_same_save(number, tensor)
        if self._has_fingerprint(number, tensor):
            return candidate, True
        # Chunks are judged by themselves where a digest tells, and else by the save of their source.
        same: list[int] = []
        unlike: list[int] = []
        for index, chunk in enumerate(candidate.chunks):
            expected = self._lost_digests.get((tensor.key, chunk.box))
            if expected is not None and chunk.strides is None:
                actual = chunk.digest or xxh3_128(source.opened.payloads.bands(payload_of(candidate, chunk)))
                (same if actual == expected else unlike).append(index)
            elif not (is_itself and chunk.item.file in self.part.damage.strays):
                (same if is_same_save else unlike).append(index)
        if unlike and not is_itself and not mix_steps:
            self._refuse(number, tensor.key, self.comparisons[number].moment)
        indices = sorted(same + unlike) if mix_steps and not is_itself else same
        return replace(candidate, chunks=candidate.chunks.select(indices)), len(indices) == len(same)

    @cached_property
    def _lost_digests(self) -> Mapping[tuple[str, Box], str]:
        return dict(self.part.lost_digests())

    def _fill_item(self, number: int, key: str, mix_steps: bool) -> None:
        source, is_itself = self.sources[number - 1], number not in self.comparisons
        if (blob := source.items.get(key)) is None:
            return
        try:
            check_blob(source.opened.payloads, blob)
        except MuonckptError:
            if not is_itself:
                self.reasons[key].append(f"{source.name} is damaged there")
            return
        # As with chunks, the recorded digest of the lost item decides, if there is one.
        expected = self.part.lost_items.get(key)
        is_source_same = self._is_same_save(number, None)
        is_same_save = is_source_same and not (is_itself and blob.item.file in self.part.damage.strays)
        if expected is not None:
            is_same_save = expected == xxh3_128(source.opened.payloads.bands(blob.item))
        if is_same_save or (mix_steps and not is_itself):
            self.items[key] = number, blob, is_same_save
        elif not is_itself:
            moment = "another save (its bytes are others)" if is_source_same else self.comparisons[number].moment
            self._refuse(number, key, moment)

    def _refuse(self, number: int, key: str, moment: str) -> None:
        name = self.sources[number - 1].name
        self.reasons[key].append(f"{name} has it of {moment}, which `mix_steps=True` allows")

    def _refuse_contradictions(self, jobs: int) -> None:
        """Refuse what one source gives and another one of the same save has otherwise, where nothing recorded decides.

        Raises:
            SourceError: there is such a tensor or item.
        """
        # Tensors: what was given is compared with what every other source of this save has there.
        for key, substitutes in self.substitutes.items():
            tensor = self.tensors[key]
            for substitute in substitutes if tensor.fingerprint is None else ():
                for number, comparison in self.comparisons.items() if substitute.record else ():
                    counterpart = comparison.source.counterpart(tensor, self.view)
                    if number == substitute.source or counterpart is None or not self._is_same_save(number, tensor):
                        continue
                    giver = self.sources[substitute.source - 1]
                    if box := _first_difference(giver, substitute, comparison.source, counterpart, jobs):
                        self._refuse_contradiction(f"tensor {key!r} {box}", substitute.source, number)
        # Items likewise.
        for key, (number, blob, _) in self.items.items():
            for other_number, comparison in self.comparisons.items() if key not in self.part.lost_items else ():
                source, other_blob = comparison.source, comparison.source.items.get(key)
                if other_number == number or other_blob is None or not comparison.is_same_save():
                    continue
                with suppress(DamageError):
                    if not same_items(self.sources[number - 1].opened, blob, source.opened, other_blob):
                        self._refuse_contradiction(f"item {key!r}", number, other_number)

    def _refuse_contradiction(self, subject: str, *numbers: int) -> None:
        names = " and ".join(self.sources[number - 1].name for number in numbers)
        raise SourceError(
            f"{self.damaged.path}: {self.diagnosis.sentence}. {subject} is lost, {names} have others, and what is "
            f"whole here is the same in both: nothing tells which is of this save. Nothing was written. {ADVICE}give "
            "the right one alone, as `others=`"
        )

    def _refuse_losses(self) -> None:
        keys = [*self.missing_boxes, *self._missing_items]
        if not keys:
            return
        # Say what is lost, and why no source gave it, the commonest reason first.
        losses = [f"tensor {key!r} {listed(boxes, 3)}" for key, boxes in self.missing_boxes.items()]
        losses += [f"item {key!r}" for key in self._missing_items]
        counts = Counter[str]()
        for key in keys:
            counts.update(self.reasons[key])
        reasons = (f"; {reason} ({count} of {len(keys)})" for reason, count in counts.most_common(_MAX_NAMED))
        raise SourceError(
            f"{self.damaged.path}: {self.diagnosis.sentence}. Of that nothing given has {len(keys)}: "
            f"{listed(losses, _MAX_NAMED, '; ')}{''.join(reasons)}. Nothing was written. {self.diagnosis.advice}"
        )

    # What is written.

    def outputs(self, misspelt_keys: Collection[str] = ()) -> tuple[JoinedCheckpoints, Outputs]:
        """Return the checkpoints as one source of a job, and what is written of them.

        Args:
            misspelt_keys: of tensors and items, whose keys are others than their paths.

        Raises:
            LayoutError: the boxes of a tensor do not tile it; names the tensor.
            SourceError: nothing tells whether a key is damaged or its path.
        """
        # What each checkpoint gives, the damaged one first; their files get names in which the number is.
        given_tensors = [list(self.part.tensors), *(list[StateRecord]() for _ in self.sources)]
        for substitutes in self.substitutes.values():
            for substitute in substitutes:
                if substitute.record is not None:
                    given_tensors[substitute.source].append(substitute.record)
        given_blobs = [list(self.part.items.values()), *(list[Blob]() for _ in self.sources)]
        for number, blob, _ in self.items.values():
            given_blobs[number].append(blob)
        manifests: list[Manifest] = []
        for number, (tensors, blobs) in enumerate(zip(given_tensors, given_blobs, strict=True)):
            manifests.append(Manifest(tuple(tensors), tuple(blobs)).renamed(f"{number}/{{}}".format))
        payloads = JoinedPayloads([self.damaged.payloads, *(source.opened.payloads for source in self.sources)])
        # Tensors and items are those of the damaged checkpoint, put together from all.
        chunks: list[dict[str, Chunks]] = []
        for manifest in manifests:
            chunks.append({tensor.key: tensor.chunks for tensor in manifest.tensors})
        zeros = {tensor.dtype: constant(payloads, tensor.dtype) for tensor in self.part.tensors}
        outputs = [self._output(tensor, chunks, zeros[tensor.dtype].chunks) for tensor in self.part.tensors]
        items: dict[str, Blob] = {}
        for manifest in manifests:
            items |= by_key(manifest.blobs)
        output_items = [OutputItem(blob.key, blob.path, items[blob.key]) for blob in self.damaged.outline.blobs]
        for number, output in enumerate(outputs):
            if output.key in misspelt_keys:
                key, path = self._spelling(output.record, misspelt_keys)
                outputs[number] = replace(output, record=replace(output.record, key=key, path=path))
        for number, item in enumerate(output_items):
            if item.key in misspelt_keys:
                key, path = self._spelling(item, misspelt_keys)
                output_items[number] = replace(item, key=key, path=path)
        base = self._provenance()
        provenance = {**base, "salvaged": [*base.get("salvaged", ()), self._entry()]}
        source = JoinedCheckpoints(self.damaged.path, payloads, manifests, provenance)
        return source, Outputs(outputs, output_items, constants=tuple(zeros.values()))

    def _spelling(self, entry: StateRecord | OutputItem, misspelt_keys: Collection[str]) -> tuple[str, KeyPath]:
        """Return the key and the path of a tensor or an item of which one is damaged: a source tells which.

        Raises:
            SourceError: no source tells, and neither does the rest of the parameter.
        """
        # A source that has one of the two, for the same tensor or item, is a witness.
        keys = entry.key, key_of(entry.path)
        for source in self.sources:
            candidate = next((source.items[key] for key in keys if key in source.items), None)
            tensor = source.counterpart(entry, self.view) if isinstance(entry, StateRecord) else None
            if (witness := tensor or candidate) and witness.key in keys:
                return witness.key, witness.path
        # A path is right if it says that the tensor is of a parameter that is known otherwise.
        if parameter := self.view.parameters.get(self.view.owners.get(entry.key, "")):
            tensors = (*parameter.state.values(), *((parameter.weight,) if parameter.weight else ()))
            if parameter.group or {*entry_keys(tensors)} - {*misspelt_keys}:
                return keys[1], entry.path
        raise SourceError(
            f"{self.damaged.path}: {self.diagnosis.sentence}: {keys[0]!r} has the path of {keys[1]!r}, and nothing "
            f"tells which is right. Nothing was written. {ADVICE}give a checkpoint that has it, such as the step "
            "before, as `others=`"
        )

    def _provenance(self) -> dict[str, Any]:
        """Return what is known of the save: what the checkpoint says, or a source of the same save if it cannot."""
        witnesses = (c.source for c in self.comparisons.values() if c.source.records_digests and c.is_same_save())
        witness = next(witnesses, None)
        if witness is None:
            return dict(self.damaged.provenance)
        if self.part.damage.strays or self.part.mixture:
            return dict(witness.opened.provenance)
        step = recorded_step(witness.look.manifest)
        return {**({} if step is None else {"step": step}), **self.damaged.provenance}

    def _output(self, record: StateRecord, chunks: Sequence[Mapping[str, Chunks]], zeros: Chunks) -> OutputTensor:
        substitutes = [substitute for substitute in self.substitutes.get(record.key, ()) if substitute.source]
        sources = [chunks[0][record.key]]
        pieces: list[_Piece] = []
        for substitute in substitutes:
            stored = substitute.record
            sources.append(zeros if stored is None else chunks[substitute.source][stored.key])
            boxes, strides = (None, None) if stored is None else (stored.boxes, stored.chunks.strides)
            pieces.append((boxes, strides, substitute.boxes))
        with about(f"tensor {record.key!r}"):
            layout = _layout(record.shape, record.boxes, record.chunks.strides, tuple(pieces))
        # Elements of another save have another fingerprint; those of this one have what a source recorded.
        fingerprint = None
        if all(substitute.is_same_save for substitute in substitutes):
            same = (c.fingerprints.get(record.key) for c in self.comparisons.values() if c.is_same_save(record.key))
            fingerprint = record.fingerprint or next(filter(None, same), None)
        return OutputTensor(replace(record, fingerprint=fingerprint), layout, tuple(sources))

    def _entry(self) -> dict[str, Any]:
        """Return the record of the boxes and items that are not the checkpoint's own, in columns, as they are many."""
        # Tensors have few geometries, so boxes are listed once and numbered.
        box_numbers: dict[Box, int] = {}
        columns: dict[str, list[int]] = {"tensor": [], "box": [], "source": []}
        for number, substitutes in enumerate(self.substitutes.values()):
            for substitute in substitutes:
                columns["tensor"] += [number] * len(substitute.boxes)
                columns["box"] += [box_numbers.setdefault(box, len(box_numbers)) for box, _ in substitute.boxes]
                columns["source"] += [substitute.source] * len(substitute.boxes)
        sources: list[tuple[str, str | None, int | float | None]] = [
            ("its own replicas", self.damaged.format.name, self.part.step)
        ]
        sources += [(s.opened.path.resolve().name, s.opened.format.name, s.look.step) for s in self.sources]
        sources += [("zeros", None, None)]
        return {
            "program": PROGRAM,
            "source": self.damaged.path.resolve().name,
            "damage": self.diagnosis.sentence or "a file or a description of it was lost",
            "sources": [dict(zip(("name", "format", "step"), row, strict=True)) for row in sources],
            "tensors": list(self.substitutes),
            "boxes": [[list(box.lo), list(box.hi)] for box in box_numbers],
            "taken": columns,
            "items": {key: number for key, (number, *_) in sorted(self.items.items())},
            "notes": [*self._mixture_notes(), *self._unused_notes(), *self._unproved_notes()],
        }

    def _mixture_notes(self) -> Iterator[str]:
        """Say what it means that tensors and items are of several steps, or begin anew."""
        # Each tensor counts once for a source, however many of its boxes that gave.
        keys_by_source: defaultdict[int, dict[str, None]] = defaultdict(dict)
        for key, substitutes in self.substitutes.items():
            for substitute in substitutes:
                if not substitute.is_same_save:
                    keys_by_source[substitute.source][key] = None
        counts: defaultdict[tuple[int, bool], Counter[str]] = defaultdict(Counter)
        for number, keys in keys_by_source.items():
            for tensor in map(self.tensors.__getitem__, keys):
                counts[number, self.view.role(tensor) is Role.MOMENTUM][self.view.noun(tensor)] += 1
        for (number, is_momentum), nouns in sorted(counts.items()):
            names = ", ".join(f"{noun} of {count}" for noun, count in sorted(nouns.items()))
            tensors = f"{names} {'tensor' if nouns.total() == 1 else 'tensors'}"
            if number > len(self.sources):
                yield f"{tensors} begin anew, as zeros, where nothing has them"
            else:
                moment = f"are those of {self.comparisons[number].moment} where they were lost"
                yield f"{tensors} {moment}: {self._decay() if is_momentum else _MIXED}"
        items = Counter(number for number, _, is_same_save in self.items.values() if not is_same_save)
        for number, count in sorted(items.items()):
            yield f"{counted(count, 'item')} (options, counters): of {self.comparisons[number].moment}"

    def _decay(self) -> str:
        """Say what a mixed momentum means, with the run's own coefficient where its groups say it."""
        names = self.view.dialect.options_called("momentum") if self.view.dialect else frozenset()
        coefficients: list[float] = []
        for group in self.view.groups:
            values = (group.options[name] for name in names & group.options.keys())
            coefficients += [value for value in values if isinstance(value, float) and 0 < value < 1]
        steps = f" ({1 / (1 - max(coefficients)):.0f} here)" if coefficients else ""
        return f"such a momentum is the direction of another step there, and decays within 1 / (1 - mu) steps{steps}"

    def _unused_notes(self) -> Iterator[str]:
        """Name the sources that are of another save although their step does not say so."""
        used = {number for number, *_ in self.items.values()}
        for substitutes in self.substitutes.values():
            used |= {substitute.source for substitute in substitutes}
        for number, comparison in self.comparisons.items():
            if comparison.differs and number not in used:
                yield f"nothing was taken from {comparison.source.name}, which is of {comparison.moment}"

    def _unproved_notes(self) -> Iterator[str]:
        """Say that nothing tells whether all that was kept is of one save, if so."""
        # Proof is a digest of this save, or the same elements in a source of this save.
        is_whole, is_proved = self.part.is_whole, self.part.has_record.copy()
        for comparison in self.comparisons.values():
            is_proved |= comparison.is_equal & comparison.is_same_save()
        unproved = int((is_whole & ~is_proved).sum())
        if unproved and not is_proved.any():
            yield (
                "whether all of it is of one save cannot be judged: there are no digests that were recorded when it "
                "was saved, and no source of the same save to compare it with (`others=`)"
            )
        elif unproved:
            yield (
                f"whether {unproved} of {int(is_whole.sum())} chunks are of the same save as the others cannot be "
                "judged: no digests of them were recorded, and no source of the same save has them"
            )


@lru_cache(maxsize=1024)
def _split_boxes(missing: tuple[Box, ...], boxes: Boxes) -> tuple[_ChosenBoxes, tuple[Box, ...]]:
    """Split missing boxes in those that these boxes have, each with the number of the box that has it, and others.

    Cached: the tensors of a model have few geometries.
    """
    # Each box that has a part of a missing one takes it, and leaves up to two boxes a dim.
    remainders = {number: [box] for number, box in enumerate(missing)}
    chosen: list[tuple[Box, int]] = []
    for missing_number, number in overlapping(Boxes.of_all(missing, boxes.ndim), boxes).tolist():
        candidate, remainder = boxes[number], remainders[missing_number]
        remainders[missing_number] = []
        for box in remainder:
            if (common := box & candidate) is not None:
                chosen.append((common, number))
            remainders[missing_number] += holes_in(box, (candidate,))
    still_missing: list[Box] = []
    for remainder in remainders.values():
        still_missing += remainder
    return tuple(chosen), tuple(still_missing)


def _first_difference(
    giver: FillingSource, substitute: _Substitute, source: FillingSource, counterpart: StateRecord, jobs: int
) -> Box | None:
    """Return the first box of a substitute of which another source has other bits; None if there is none."""
    assert substitute.record is not None, "a source gave it"
    # A chunk of the one may meet several of the other.
    boxes_by_chunk = defaultdict[int, list[Box]](list)
    for box, number in substitute.boxes:
        boxes_by_chunk[number].append(box)
    (stored,) = source.whole_chunks([counterpart], jobs)
    for number, chunk, other_chunk, common in common_boxes(substitute.record, stored):
        elements = StoredChunk(substitute.record, chunk, giver.opened.payloads)
        other_elements = StoredChunk(stored, other_chunk, source.opened.payloads)
        for box in filter(None, (box & common for box in boxes_by_chunk[number])):
            is_equal, _ = compare_bits(elements, other_elements, box)
            if not is_equal:
                return box
    return None


_Piece = tuple[Boxes | None, Strides | None, _ChosenBoxes]
"""The boxes and strides of a source's chunks (None for zeros), and the boxes that it gives, with their chunks."""


@lru_cache(maxsize=1024)
def _layout(shape: Index, boxes: Boxes, strides: Strides | None, pieces: tuple[_Piece, ...]) -> TensorLayout:
    """Return the layout of a tensor in its own whole chunks, and in what others give, buffers counted through all.

    Raises:
        LayoutError: they leave a hole or overlap.
    """

    def stored(boxes: Boxes, strides: Strides | None, number: int, first: int) -> Fragment:
        box, box_strides = boxes[number], strides[number] if strides else None
        if box_strides is None:
            return dense(box, first + number)
        return Fragment(box, Place(first + number, 0, box_strides))

    # First what is whole itself, then what each source gives; zeros are one element, repeated.
    fragments = [stored(boxes, strides, number, 0) for number in range(len(boxes))]
    first = len(boxes)
    for source_boxes, source_strides, chosen in pieces:
        for box, number in chosen:
            place = Place(first, 0, (0,) * box.ndim)
            if source_boxes is not None:
                place = stored(source_boxes, source_strides, number, first).place_at(box.lo)
            fragments.append(Fragment(box, place))
        first += 1 if source_boxes is None else len(source_boxes)
    return TensorLayout.of(shape, fragments)
