"""Whether checkpoints are of one save, by the elements and the items that they have in common.

Steps and names do not tell: another run has the same steps, and a copy that stopped half-way leaves files of two saves
under one description.  So what is whole of a damaged checkpoint is compared with each checkpoint that may fill it,
chunk by chunk and item by item.  Tensors whose fingerprints both record are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import Box
from ...algebra.fingerprint import as_hex, combine
from ...algebra.overlap import IntArray, overlaps
from ...names.errors import ADVICE, LayoutError, MuonckptError, SeveralSavesError, SourceError, UnlistedError
from ...names.wording import counted, listed
from ...programs.model_view import ModelView, Role
from ...record.chunks import Boxes
from ...record.record import Blob, Chunk, StateRecord, by_key, entry_keys, with_chunks
from ...store.open_checkpoint import OpenCheckpoint, check_blob, checked_blob
from ...store.reading.payloads import Payloads, check_chunk, chunk_share, payload_of
from ...store.verify.audit import AuditReport
from ...store.verify.damage import Damage
from ..compare.diff import same_value
from ..compare.elements import StoredChunk, compare_bits
from ..look.contents import FirstLook, first_look

Identity = tuple[str, str | None]
"""A parameter, or a tensor of no parameter, and the slot of its state: the same in checkpoints with other keys."""

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class FillingSource:
    """A checkpoint that may fill what another one lacks, or that one by its other description.

    Attributes:
        tensors: by key, and by parameter and slot.
        items: by key.
    """

    name: str
    opened: OpenCheckpoint
    look: FirstLook
    tensors: Mapping[str | Identity, StateRecord]
    items: Mapping[str, Blob]

    @classmethod
    def of(cls, name: str, opened: OpenCheckpoint) -> FillingSource:
        look = first_look(opened)
        tensors: dict[str | Identity, StateRecord] = {}
        for tensor in look.manifest.tensors:
            tensors[look.view.identity(tensor)] = tensor
        tensors |= {tensor.key: tensor for tensor in look.manifest.tensors}
        return cls(name, opened, look, tensors, by_key(opened.outline.blobs))

    def counterpart(self, tensor: StateRecord, view: ModelView) -> StateRecord | None:
        """Return the tensor of the same key, or of the same parameter and slot; None if there is none."""
        return self.tensors.get(tensor.key) or self.tensors.get(view.identity(tensor))

    @property
    def records_digests(self) -> bool:
        """Return whether its own records tell that all of it is of one save."""
        # Fingerprints of all tensors, or digests of all chunks, in a description that binds the files together.
        manifest = self.look.manifest
        has_fingerprints = all(tensor.fingerprint is not None for tensor in manifest.tensors)
        return (has_fingerprints or bool(manifest.columns.has_digest.all())) and is_described(self.opened)

    def whole_chunks(self, tensors: Sequence[StateRecord], jobs: int) -> list[StateRecord]:
        """Return these tensors with those of their chunks, located, whose bytes are those that were written."""
        # Nothing here raises: what cannot be read is not whole.
        located, errors = self.opened.locate_each(tensors)

        def is_whole(place: tuple[StateRecord, int]) -> bool:
            tensor, number = place
            chunk = tensor.chunks[number]
            if (tensor.key, chunk.box.lo) in errors:
                return False
            try:
                payload = payload_of(tensor, chunk)
                self.opened.payloads.open_file(payload.file, payload.end)  # there may be no checksum
                check_chunk(self.opened.payloads, tensor, chunk)
            except MuonckptError:
                return False
            return True

        places: list[tuple[StateRecord, int]] = []
        for tensor in located:
            places += [(tensor, number) for number in range(len(tensor.chunks))]
        with ThreadPoolExecutor(jobs) as pool:
            verdicts = list(pool.map(is_whole, places))
        # The numbers of each tensor's whole chunks; verdicts follow one another as its chunks do.
        whole_numbers, start = [], 0
        for tensor in located:
            whole_numbers.append(np.flatnonzero(verdicts[start : start + len(tensor.chunks)]).tolist())
            start += len(tensor.chunks)
        return with_chunks(located, whole_numbers)


def is_described(opened: OpenCheckpoint) -> bool:
    """Return whether the description that binds the files of a checkpoint together, if it has one, is there."""
    return not any(isinstance(fault, UnlistedError) and fault.keys is None for fault in opened.faults)


@dataclass(frozen=True, eq=False)
class WholePart:
    """The part of a damaged checkpoint that is whole.

    Attributes:
        tensors: all of its tensors, with the chunks that are whole, located.
        fingerprints: computed from the bytes of tensors that could be read whole, by key.
    """

    opened: OpenCheckpoint
    look: FirstLook
    damage: Damage
    tensors: tuple[StateRecord, ...]
    fingerprints: Mapping[str, str]

    @classmethod
    def of(cls, opened: OpenCheckpoint, look: FirstLook, damage: Damage, report: AuditReport) -> WholePart:
        part = cls(opened, look, damage, look.manifest.tensors, report.fingerprints)
        numbers = [(rows - start).tolist() for rows, start in zip(part.rows, damage.starts[:-1], strict=True)]
        located = opened.locate(with_chunks(part.tensors, numbers))
        # One of the records of a tensor may be damaged, where the others show that its elements are whole.
        wrong_keys: set[str] = set()
        for finding in report.findings:
            wrong_keys |= {*finding.names} if finding.kind in ("digest", "fingerprint") else set()
        wrong_keys &= part.fingerprints.keys() - {*entry_keys(damage.tensors)}
        tensors = []
        for tensor in located:
            if tensor.key in wrong_keys:
                # It has the fingerprint of its elements from now on, and its chunks have no digests.
                chunks = [replace(chunk, digest=None) for chunk in tensor.chunks]
                undigested = type(tensor.chunks).of(chunks, len(tensor.shape))
                tensor = replace(tensor, chunks=undigested, fingerprint=part.fingerprints[tensor.key])
            tensors.append(tensor)
        part = replace(part, tensors=tuple(tensors))
        # A file of which all records say that it is of another save is so in what nothing is recorded of, too.
        contradicted = part.files(part.has_record & damage.chunks) - part.files(part.has_record & part.is_whole)
        strays = (contradicted - damage.files.keys()) & part.files(~part.has_record & part.is_whole)
        return part.without(strays) if strays else part

    @property
    def step(self) -> int | float | None:
        """Return its step, unless files of another save may say it."""
        return None if self.damage.strays or self.mixture else self.look.step

    @property
    def mixture(self) -> SeveralSavesError | None:
        """Return the fault that says that it has files of several saves."""
        return next((fault for fault in self.opened.faults if isinstance(fault, SeveralSavesError)), None)

    @cached_property
    def items(self) -> dict[str, Blob]:
        """The items that are whole."""
        return {blob.key: blob for blob in self.opened.outline.blobs if blob.key not in self.damage.items}

    @cached_property
    def is_whole(self) -> Flags:
        """For each chunk, whether it is whole, and has elements."""
        return ~self.damage.chunks & (self.look.manifest.elements > 0)

    @cached_property
    def rows(self) -> tuple[IntArray, ...]:
        """The numbers of the whole chunks of each tensor in ``damage.chunks``."""
        bounds = pairwise(self.damage.starts.tolist())
        return tuple(start + np.flatnonzero(self.is_whole[start:stop]) for start, stop in bounds)

    @cached_property
    def has_record(self) -> Flags:
        """For each chunk, whether a record of its own save has the digest of its elements, or of all of the tensor."""
        manifest = self.look.manifest
        keys = {tensor.key for tensor in manifest.tensors if tensor.fingerprint is not None}
        return (manifest.columns.has_digest | self.chunks_of(keys)) & is_described(self.opened)

    def lost_digests(self) -> Iterator[tuple[tuple[str, Box], str]]:
        """Yield the recorded digests of lost chunks by key and box, where the record is of this save."""
        if not is_described(self.opened):
            return
        for tensor, start in zip(self.look.manifest.tensors, self.damage.starts.tolist(), strict=False):
            for number in np.flatnonzero(self.damage.chunks[start : start + len(tensor.chunks)]).tolist():
                chunk = tensor.chunks[number]
                if chunk.digest is not None:
                    yield (tensor.key, chunk.box), chunk.digest

    @cached_property
    def lost_items(self) -> Mapping[str, str]:
        """The recorded digests of lost items, by key."""
        blobs = self.opened.outline.blobs
        return {blob.key: blob.digest for blob in blobs if blob.key in self.damage.items and blob.digest is not None}

    @property
    def recorded_items(self) -> frozenset[str]:
        """The items of which a record of their own save has the digest."""
        return frozenset(key for key, blob in self.items.items() if blob.digest is not None)

    @cached_property
    def is_state(self) -> Flags:
        """For each chunk, whether it is of a momentum or a moment, which two moments of training do not share."""
        return self.chunks_of({*entry_keys(self.look.view.tensors_of(Role.MOMENTUM, Role.MOMENTS))})

    def chunks_of(self, keys: Collection[str]) -> Flags:
        """Return which chunks are of these tensors."""
        return np.repeat(
            np.array([tensor.key in keys for tensor in self.tensors], np.bool_), np.diff(self.damage.starts)
        )

    def files(self, chunks: Flags) -> frozenset[str]:
        """Return the files of these chunks."""
        return self.look.manifest.columns.files_of(chunks)

    def chunks_in(self, files: frozenset[str]) -> Flags:
        """Return which chunks lie in these files."""
        return self.look.manifest.columns.is_in(files)

    def without(self, files: frozenset[str]) -> WholePart:
        """Return the part without these files, which are of another save."""
        # They are lost from now on, with what was recorded of them.
        is_stray = self.chunks_in(files) & (self.look.manifest.elements > 0)
        stray_items = {key for key, blob in self.items.items() if blob.item.file in files}
        damage = replace(
            self.damage,
            chunks=self.damage.chunks | is_stray,
            items=self.damage.items | stray_items,
            strays=self.damage.strays | files,
        )
        numbers = [np.flatnonzero(~is_stray[rows]).tolist() for rows in self.rows]
        tensors = with_chunks(self.tensors, numbers)
        # What the files of another save record of their tensors is not true of these.
        lost_keys = {*entry_keys(damage.tensors)}
        if not self.has_record.any():
            for number, tensor in enumerate(tensors):
                if tensor.key in lost_keys:
                    tensors[number] = replace(tensor, fingerprint=None)
        fingerprints = {key: value for key, value in self.fingerprints.items() if key not in lost_keys}
        return WholePart(self.opened, self.look, damage, tuple(tensors), fingerprints)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The comparison of a source with the whole part of a damaged checkpoint, where they have tensors in common.

    Attributes:
        is_equal, is_different: for each chunk of the damaged checkpoint, whether what the source has of it is the same,
            or something of it other.
        is_telling: for each chunk, whether it is equal, and not one value throughout, as what was never trained is.
        equal_items, different_items: keys of items that both have.
        fingerprints: of the source's tensors, recorded or computed, by the key in the damaged checkpoint.
    """

    part: WholePart
    source: FillingSource
    is_equal: Flags
    is_different: Flags
    is_telling: Flags
    equal_items: frozenset[str]
    different_items: frozenset[str]
    fingerprints: Mapping[str, str]

    def within(self, part: WholePart) -> Comparison:
        """Return the comparison with a smaller part."""
        is_lost = part.damage.chunks
        return replace(
            self,
            part=part,
            is_equal=self.is_equal & ~is_lost,
            is_different=self.is_different & ~is_lost,
            is_telling=self.is_telling & ~is_lost,
            equal_items=self.equal_items & part.items.keys(),
            different_items=self.different_items & part.items.keys(),
        )

    # Whether it is the same save.

    @cached_property
    def differs(self) -> bool:
        return bool(self.is_different.any() or self.different_items)

    def is_same_save(self, key: str | None = None) -> bool:
        """Return whether the source is of the save of the damaged checkpoint, as far as both say so.

        Args:
            key: of a tensor that is asked for; the whole part of it tells where steps are unknown.
        """
        if self.differs or self._has_another_step:
            return False
        return self._has_known_steps or self._tells_moment or key in self._telling_keys

    @property
    def _has_known_steps(self) -> bool:
        return None not in (self.part.step, self.source.look.step)

    @property
    def _has_another_step(self) -> bool:
        return self._has_known_steps and self.part.step != self.source.look.step

    @cached_property
    def _tells_moment(self) -> bool:
        return bool((self.is_telling & self.part.is_state).any())

    @cached_property
    def _telling_keys(self) -> frozenset[str]:
        return self._keys_of(self.is_telling)

    def _keys_of(self, chunks: Flags) -> frozenset[str]:
        """Return the keys of the tensors of these chunks."""
        pairs = zip(self.part.tensors, self.part.rows, strict=True)
        return frozenset(tensor.key for tensor, rows in pairs if chunks[rows].any())

    # Whether the damaged checkpoint has files of several saves.

    @cached_property
    def _different_files(self) -> frozenset[str]:
        items = (self.part.items[key].item.file for key in self.different_items)
        return self.part.files(self.is_different) | frozenset(items)

    @cached_property
    def shows_mixture(self) -> bool:
        """Return whether some files have what the source's save has, and others do not.

        Equal chunks prove it that only the same moment of a run has: of state, or of a tensor that differs elsewhere.
        Where steps differ they are both: the state of a parameter that is trained no more is the same throughout.
        """
        is_torn = self.part.chunks_of(self._keys_of(self.is_different))
        moment = self.part.is_state & is_torn if self._has_another_step else self.part.is_state | is_torn
        same_files = self.part.files(self.is_telling & moment)
        return self.differs and bool(same_files) and not same_files & self._different_files

    @property
    def _agreeing(self) -> Flags:
        return self.is_equal & ~self.part.chunks_in(self._different_files)

    @property
    def agreement(self) -> int:
        """The elements that are equal, in files that do not differ in anything."""
        return int(self.part.look.manifest.elements[self._agreeing].sum())

    @property
    def strays(self) -> frozenset[str]:
        """The files of the damaged checkpoint that are of another save than most of it, if the source can tell.

        It can if its own records say that it is of one save, and nothing in these files is recorded to be of theirs.
        """
        files = self._different_files
        recorded_chunks = (self.is_different & self.part.has_record).any()
        is_recorded = recorded_chunks or self.different_items & self.part.recorded_items
        if is_recorded or not self.shows_mixture or not self.source.records_digests:
            return frozenset()
        compared = (self.is_equal | self.is_different) & self.part.chunks_in(files)
        if self.agreement >= int(self.part.look.manifest.elements[compared].sum()):
            return files
        return self.part.files(self._agreeing)

    # Sentences.

    @property
    def contradiction(self) -> str:
        """Say what both have and is another in each, and which files have it."""
        files = listed(sorted(self._different_files), 3)
        return (
            f"but {self.difference}, in {self.source.name}: if that is a copy of this very save, what differs here, in "
            f"{files}, is of another one: move it out of {self.part.opened.path} and salvage again"
        )

    @property
    def mixture(self) -> str:
        """Say what contradicts that both are of one save each, and what to do."""
        files, name = sorted(self._different_files), self.source.name
        equal_files = counted(len(self.part.files(self._agreeing)), "other file")
        return (
            f"{self.difference}, in {name}, and {equal_files} here is as there: one of the two is damaged, or has "
            f"files of another save, and no digests were recorded that say which. Nothing was written. {ADVICE}if "
            f"{listed(files, 3)} here is wrong, move it out of {self.part.opened.path} and salvage again; if {name} "
            "has files of another save, leave that out; or `mix_steps=True` keeps all that is here"
        )

    @property
    def moment(self) -> str:
        """Say of which moment the source is, if it is not that of the damaged checkpoint."""
        if self._has_another_step:
            return f"step {self.source.look.step}"
        save = "the same step of another run" if self._has_known_steps else "another save"
        if self.differs:
            return f"{save} ({self.difference})"
        return save if self._has_known_steps else "an unknown step"

    @property
    def difference(self) -> str:
        """Name the first of what differs, and how many more there are."""
        names = list[str]()
        for tensor, rows in zip(self.part.tensors, self.part.rows, strict=True):
            boxes = tensor.boxes.select(np.flatnonzero(self.is_different[rows]))
            names += [f"tensor {tensor.key!r} {box}" for box in boxes]
        names += [f"item {key!r}" for key in sorted(self.different_items)]
        both = int((self.is_equal | self.is_different).sum()) + len(self.equal_items | self.different_items)
        return f"{names[0]} is another there ({len(names)} of {counted(both, 'chunk')} and items that both have)"


def compare(part: WholePart, source: FillingSource, jobs: int) -> Comparison:
    """Compare what is whole of a damaged checkpoint with a source.

    Raises:
        SourceError: a file of the damaged checkpoint cannot be read any more.
    """
    is_equal, is_different, is_telling = np.zeros((3, len(part.damage.chunks)), np.bool_)
    fingerprints: dict[str, str] = {}
    pairs: list[tuple[StateRecord, IntArray, StateRecord]] = []
    # Fingerprints that are recorded or known tell without reading.
    for tensor, rows in zip(part.tensors, part.rows, strict=True):
        counterpart = source.counterpart(tensor, part.look.view)
        if counterpart is None or (counterpart.shape, counterpart.dtype) != (tensor.shape, tensor.dtype):
            continue
        conventions = {part.look.view.convention(tensor), source.look.view.convention(counterpart)} - {None}
        if len(conventions) > 1:  # the same momentum has other elements
            continue
        fingerprint = tensor.fingerprint or part.fingerprints.get(tensor.key)
        if counterpart.fingerprint is not None:
            fingerprints[tensor.key] = counterpart.fingerprint
        if fingerprint is not None and fingerprint == counterpart.fingerprint:
            is_equal[rows], is_telling[rows] = True, int(fingerprint, 16) != 0 and tensor.shape != ()
        elif tensor.fingerprint is not None and counterpart.fingerprint is not None:
            is_different[rows] = True
        else:
            pairs.append((tensor, rows, counterpart))
    # The elements of all others are read, where both are whole.
    counterparts = source.whole_chunks([counterpart for *_, counterpart in pairs], jobs)
    compare_tensors = partial(_compare_chunks, part.opened.payloads, source.opened.payloads)
    unshown: list[IntArray] = []
    with ThreadPoolExecutor(jobs) as pool:
        results = pool.map(compare_tensors, (tensor for tensor, *_ in pairs), counterparts)
        for (tensor, rows, _), result in zip(pairs, results, strict=True):
            is_equal[rows], is_different[rows], is_telling[rows], computed = result
            if computed is not None:
                fingerprints.setdefault(tensor.key, computed)
            fingerprint, of_source = part.fingerprints.get(tensor.key), fingerprints.get(tensor.key)
            has_other_elements = fingerprint is not None and of_source not in (None, fingerprint)
            if has_other_elements and not is_different[rows].any():
                unshown.append(rows[~is_equal[rows]])  # where the source is damaged, and records what was there
    # A difference that no chunk shows lies in a file that differs otherwise, if it has one.
    in_different_files = part.chunks_in(part.files(is_different))
    for rows in unshown:
        is_different[rows] = in_different_files[rows] if in_different_files[rows].any() else True
    is_same_item = dict(_compare_items(part, source))
    equal_items = frozenset(key for key, is_same in is_same_item.items() if is_same)
    different_items = frozenset(is_same_item.keys() - equal_items)
    return Comparison(part, source, is_equal, is_different, is_telling, equal_items, different_items, fingerprints)


def one_save(part: WholePart, comparisons: Sequence[Comparison], mix_steps: bool) -> tuple[WholePart, list[Comparison]]:
    """Reduce the whole part of a damaged checkpoint to the files of one save, as far as sources tell them apart.

    Returns that part, and the comparisons of the sources with it.

    Raises:
        SourceError: it is of several saves, or a source is, and nothing tells which; unless ``mix_steps``.
    """
    # Files of another save are left out until no source shows any.  The source that agrees in the most elements counts
    # first; after each cut all are compared with the smaller part, from which they may differ no more.
    while True:
        comparisons = [comparison.within(part) for comparison in comparisons]
        by_agreement = sorted(comparisons, key=lambda comparison: -comparison.agreement)
        strays = next(filter(None, (comparison.strays for comparison in by_agreement)), None)
        if strays is None:
            break
        part = part.without(strays)
    # A checkpoint that is known to mix saves: each chunk needs a witness, a source of the same save with digests.
    witnesses = [c for c in comparisons if c.is_same_save() and c.source.records_digests]
    is_unproved = part.is_whole
    for comparison in witnesses:
        is_unproved = is_unproved & ~comparison.is_equal
    if part.mixture is not None and is_unproved.any() and not mix_steps:
        chunks = f"{int(is_unproved.sum())} of {counted(int(part.is_whole.sum()), 'chunk')}"
        fault = str(part.mixture).removeprefix(f"{part.opened.path}: ")
        raise SourceError(
            f"{part.opened.path}: {fault}; {chunks} are in no source of the same save, with digests. Nothing was "
            f"written. {ADVICE}give a copy of this save, in any format, as `others=`: it tells which files are of it, "
            "and has the others"
        )
    # Without digests on either side a source that agrees in some files only shows that one of the two mixes saves, but
    # not which.
    has_digests = bool(witnesses) or part.has_record.any()
    if not (mix_steps or has_digests):
        for comparison in comparisons:
            if comparison.shows_mixture:
                raise SourceError(f"{part.opened.path}: {comparison.mixture}")
    return part, list(comparisons)


def _compare_items(part: WholePart, source: FillingSource) -> Iterator[tuple[str, bool]]:
    for key in part.items.keys() & source.items.keys():
        try:
            yield key, same_items(part.opened, part.items[key], source.opened, source.items[key])
        except MuonckptError:
            continue  # it is damaged in the source


def same_items(opened: OpenCheckpoint, blob: Blob, other_opened: OpenCheckpoint, other_blob: Blob) -> bool:
    """Return whether items of two checkpoints are the same bytes, or the same plain data.

    Raises:
        SourceError: one is damaged.
    """
    if blob.digest is not None and blob.digest == other_blob.digest:
        check_blob(other_opened.payloads, other_blob)
        return True
    return same_value(checked_blob(opened.payloads, blob), checked_blob(other_opened.payloads, other_blob))


def _compare_chunks(
    payloads: Payloads, other_payloads: Payloads, tensor: StateRecord, counterpart: StateRecord
) -> tuple[Flags, Flags, Flags, str | None]:
    """Compare the chunks of a tensor with those of another one, all of them whole.

    Returns:
        Which are equal as far as the other has them, which differ, which are equal and not one value throughout; and
        the fingerprint of the other, if that was compared.
    """
    # One fingerprint tells of a whole tensor, however the chunks of both lie.
    if tensor.fingerprint is not None and (computed := _fingerprint(other_payloads, counterpart)) is not None:
        equal = np.full(len(tensor.chunks), computed == tensor.fingerprint)
        return equal, ~equal, equal & (int(computed, 16) != 0), computed
    equal, different, telling = np.zeros((3, len(tensor.chunks)), np.bool_)
    for number, chunk, other_chunk, box in common_boxes(tensor, counterpart):
        pair = StoredChunk(tensor, chunk, payloads), StoredChunk(counterpart, other_chunk, other_payloads)
        is_equal, varies = compare_bits(*pair, box)
        equal[number] = True
        different[number] |= not is_equal
        telling[number] |= varies
    equal &= ~different
    return equal, different, telling & equal, None


def _fingerprint(payloads: Payloads, tensor: StateRecord) -> str | None:
    """Compute the fingerprint of a tensor; None if some of its elements are not there."""
    try:
        tensor.chunk_layout()
    except LayoutError:
        return None
    return as_hex(combine(*(chunk_share(payloads, tensor, chunk) for chunk in tensor.chunks)))


def common_boxes(tensor: StateRecord, counterpart: StateRecord) -> Iterator[tuple[int, Chunk, Chunk, Box]]:
    """Yield pairs of chunks that have elements in common, with the number of the first, and the box of these."""
    chunks, other_chunks = list(tensor.chunks), list(counterpart.chunks)
    for number, other_number in overlapping(tensor.boxes, counterpart.boxes).tolist():
        if (box := chunks[number].box & other_chunks[other_number].box) is not None:
            yield number, chunks[number], other_chunks[other_number], box


def overlapping(boxes: Boxes, other_boxes: Boxes) -> IntArray:
    """Return the pairs of numbers of boxes that have elements in common, as rows.

    Without dims a tensor is one element of one dim.
    """

    def corners(of: Boxes) -> tuple[IntArray, IntArray]:
        return (of.lo, of.hi) if of.ndim else (np.zeros((len(of), 1), np.int64), np.ones((len(of), 1), np.int64))

    return np.stack(overlaps(*corners(boxes), *corners(other_boxes)), axis=1)
