"""Damage: what is wrong with a checkpoint, in terms of a run, whoever looks; `diagnosis` adds what to do about it.

`verify` finds damage by reading everything; `inspect`, `diff`, `report` and `load` by the presence and the sizes of
files alone.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import MAX_ELEMENTS, Box
from ...algebra.layout import holes_in
from ...names.errors import (
    DamageError,
    DiskError,
    LayoutError,
    MisdescribedError,
    MuonckptError,
    SeveralSavesError,
    SourceError,
    UnavailableError,
    UnlistedError,
)
from ...names.wording import Finding, counted, enumerated, listed
from ...programs.signs import METADATA_FILE
from ...record.chunks import Boxes, Chunks
from ...record.record import MANIFEST_FILE, Manifest, StateRecord, entry_keys, first_rows_of
from ..formats.registry import DCP, OWN
from ..io.checksums import xxh3_128
from ..io.location import Location, entries_of, is_file, is_folder, is_there, items_beside
from ..io.regular import read_text_file
from ..open_checkpoint import DISK_FAILS, OpenCheckpoint
from ..reading.dtypes import itemsize
from ..reading.payloads import check_chunk
from .step_names import StepName

if TYPE_CHECKING:
    from ...programs.model_view import ModelView

_RANK_IN_NAME = re.compile(
    r"(?:.*/)?(?:__([0-9]{1,7})_[0-9]+\.distcp|(?:rank|layer_wise_optimizer)_([0-9]{1,7})\.[a-z]+"
    r"|(?:bf16_)?zero_pp_rank_([0-9]{1,7})_mp_rank_[0-9]+_(?:optim|model)_states\.pt)"
)
"""Names of files that a rank writes alone: DCP, flat buffers, layer-wise files, DeepSpeed's."""


@lru_cache(maxsize=1 << 16)
def rank_in_name(file: str) -> int | None:
    """Return the rank that wrote a file, if the file's name tells."""
    match = _RANK_IN_NAME.fullmatch(file)
    return None if match is None else int(match[match.lastindex or 0])


@dataclass(frozen=True, eq=False)
class Damage:
    """The losses of a checkpoint, and its other faults; true if something is lost.

    A lost chunk is a row: the manifest says its tensor, box and file, and ``files`` the reason.

    Attributes:
        manifest: of the checkpoint, as far as it could be read.
        chunks: for each chunk, in the order of ``manifest.columns``, whether it is lost.
        items: the keys of the items that are lost.
        files: the files that do not have all bytes, or other ones, with the reason.
        holes: boxes of tensors, by key, that no chunk covers.
        read: whether all bytes were compared; else only the files' sizes.
        misplaced: by the name of a file the name under which its bytes are.
        findings: the faults that the losses do not explain.
    """

    manifest: Manifest
    chunks: NDArray[np.bool_]
    items: frozenset[str] = frozenset()
    files: Mapping[str, str] = field(default_factory=dict)
    holes: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    read: bool = False
    misplaced: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.chunks.any() or self.items or self.files or self.holes)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of the other faults."""
        return frozenset(finding.kind for finding in self.findings)

    @property
    def has_loss(self) -> bool:
        """Whether something is lost, or may be."""
        return bool(self) or not self.kinds <= HARMLESS

    @property
    def is_of_disk(self) -> bool:
        """Whether a disk fails, so that the checkpoint may be whole elsewhere."""
        return DISK_FAILS in self.files.values()

    @property
    def is_mixed_up(self) -> bool:
        """Whether the manifest is of another save than the files."""
        return OTHER_SAVE in self.files.values()

    def with_findings(self, findings: Sequence[Finding]) -> Damage:
        """Return the same losses beside those of the findings that they do not explain."""
        if not findings:
            return self
        keys = {*entry_keys(self.tensors)} | self.items
        # A reader stops at files that are missing, and says so.
        kinds = {"files", "disk", "metadata", "description", "misdescribed"} if self.files else set[str]()
        return replace(self, findings=tuple(f for f in findings if f.kind not in kinds and f.key not in keys))

    @cached_property
    def view(self) -> ModelView:
        """The checkpoint in terms of a model and its optimizer, as its keys tell."""
        from ...programs.model_view import view_by_keys  # not needed where nothing is wrong

        return view_by_keys(self.manifest)

    @property
    def begins_at_zero(self) -> bool:
        """Whether all tensors that have lost elements are zeros when training begins."""
        from ...programs.model_view import BEGIN_AT_ZERO

        return {*map(self.view.role, self.tensors)} <= BEGIN_AT_ZERO

    @cached_property
    def lost_boxes(self) -> list[tuple[StateRecord, Boxes]]:
        """The tensors that have lost elements, with the boxes of their lost chunks and their holes."""
        lost_boxes = []
        starts = first_rows_of(self.manifest.tensors).tolist()
        for tensor, (start, stop) in zip(self.manifest.tensors, pairwise(starts), strict=True):
            is_lost = self.chunks[start:stop]
            if is_lost.any() or tensor.key in self.holes:
                boxes = tensor.boxes.select(np.flatnonzero(is_lost))
                holes = Boxes.of_all(self.holes.get(tensor.key, ()), boxes.ndim)
                lo, hi = np.concatenate([boxes.lo, holes.lo]), np.concatenate([boxes.hi, holes.hi])
                lost_boxes.append((tensor, Boxes.of(lo, hi)))
        return lost_boxes

    @property
    def tensors(self) -> list[StateRecord]:
        """The tensors that have lost elements."""
        return [tensor for tensor, _ in self.lost_boxes]

    @property
    def damaged_files(self) -> set[str]:
        """The files that have lost chunks or items."""
        items = (blob.item.file for blob in self.manifest.blobs if blob.key in self.items)
        return {*self.manifest.columns.select(np.flatnonzero(self.chunks)).files(), *items, *self.files}

    def to_json(self) -> dict[str, Any]:
        """Return the losses as plain data; the lost boxes are columns, with the number of their tensor."""
        columns: dict[str, list[Any]] = {"tensor": [], "lo": [], "hi": []}
        for number, (_, boxes) in enumerate(self.lost_boxes):
            columns["tensor"] += [number] * len(boxes)
            columns["lo"] += boxes.lo.tolist()
            columns["hi"] += boxes.hi.tolist()
        return {
            "bytes": sum(boxes.elements * itemsize(tensor.dtype) for tensor, boxes in self.lost_boxes),
            "chunks": int(self.chunks.sum()),
            "tensors": entry_keys(self.tensors),
            "boxes": columns,
            "items": sorted(self.items),
            "files": dict(self.files),
            "read": self.read,
        }

    @cached_property
    def without_misplaced(self) -> Damage:
        """The losses beside the bytes that are under other names."""
        names = self.misplaced.keys()
        items = frozenset(blob.key for blob in self.manifest.blobs if blob.item.file not in names) & self.items
        files = {name: reason for name, reason in self.files.items() if name not in names}
        chunks = self.chunks & ~self.manifest.columns.is_in(names)
        return replace(self, chunks=chunks, items=items, files=files, misplaced={}, findings=())

    @property
    def sentence(self) -> str:
        """All that is wrong, as one sentence for people; empty if nothing is."""
        parts = []
        if self.misplaced:
            moves = [f"that of {name} is called {file}" for name, file in sorted(self.misplaced.items())]
            files = counted(len(moves), "file")
            parts.append(f"{files} with other names than when it was saved: {listed(moves, 4)}")
            if not (self.without_misplaced or self.findings):
                parts.append("nothing else is wrong, and nothing is lost")
        if self and (lost := self.without_misplaced):
            # The reasons, each with its files.
            files_by_reason = defaultdict[str, list[str]](list)
            for name in sorted(lost.damaged_files):
                files_by_reason[lost.files.get(name, "has damaged bytes")].append(name)
            causes = []
            for reason, names in files_by_reason.items():
                rank, count = rank_in_name(names[0]), len(names)
                one = f"the file {names[0]}" if rank is None else f"rank {rank}'s file {names[0]}"
                causes.append(
                    f"{one} {reason}" if count == 1 else f"each of {count} files ({listed(names, 3)}) {reason}"
                )
            if lost.holes:
                causes.append(f"no file has some elements of {counted(len(lost.holes), 'tensor')}")
            # How many tensors of each kind have lost elements, weights first, and how many items are lost.
            losses = []
            if tensors := lost.tensors:
                totals = Counter(map(self.view.noun, self.manifest.tensors))
                counts = Counter(map(self.view.noun, tensors))
                nouns = sorted(counts, key="weights".__ne__)
                kinds = enumerated([f"{counts[noun]} of {totals[noun]} {noun}" for noun in nouns])
                have = "has" if len(tensors) == 1 else "have"
                some = f"{kinds} {have} lost elements ({listed(entry_keys(tensors), 3)})"
                are_all = len(tensors) == len(self.manifest.tensors) > 1
                losses.append(f"all {len(tensors)} tensors have lost elements" if are_all else some)
            if lost.items:
                count, total = len(lost.items), len(self.manifest.blobs)
                some = f"{count} of {total} other items are lost ({listed(sorted(lost.items), 2)})"
                losses.append(f"all {total} other items are lost" if count == total > 1 else some)
            parts.append(": ".join(filter(None, (listed(causes, 3, "; "), ", and ".join(losses)))))
        messages_by_kind = defaultdict[str, list[str]](list)
        for finding in self.findings:
            messages_by_kind[finding.kind].append(finding.message)
        return "; ".join([*parts, *(listed(messages, 1, "; ") for messages in messages_by_kind.values())])


NOTHING_LOST = Damage(Manifest(()), np.zeros(0, np.bool_))

OTHER_SAVE = f"is of another save than {MANIFEST_FILE}"
"""The reason of files that are whole by DCP's description, and not what ours says."""


_MAX_HOLES = 256
"""The most holes of a tensor that are listed, else none: lost files leave few, hostile boxes very many."""


def damage_of_files(checkpoint: OpenCheckpoint) -> Damage:
    """Return the losses of missing or cut files, by their names and sizes alone; findings are of disks.

    Raises:
        UnavailableError: it is not known whether a file is there.
    """
    manifest, columns, files = checkpoint.outline, checkpoint.outline.columns, checkpoint.lost_files()
    # Chunks and items that reach beyond the ends of their files.
    lengths = {name: file.length for name, file in files.items()}
    ends = np.array([*(lengths.get(name, MAX_ELEMENTS) for name in columns.names), 0], np.int64)
    chunks = (columns.item_end() > ends[columns.file]) & (manifest.elements > 0)
    blobs = manifest.blobs if lengths else ()
    items = frozenset(b.key for b in blobs if b.item.end > lengths.get(b.item.file, MAX_ELEMENTS))
    # Elements that no file has.
    holes = {}
    for tensor in manifest.tensors:
        if tensor.boxes.elements < math.prod(tensor.shape):
            boxes = holes_in(Box.of(tensor.shape), tensor.boxes, _MAX_HOLES)
            holes[tensor.key] = tuple(boxes) if len(boxes) <= _MAX_HOLES else ()
    reasons = {name: file.reason for name, file in files.items()}
    findings = tuple(Finding("disk", str(file.disk_error)) for file in files.values() if file.disk_error)
    return Damage(manifest, chunks, items, reasons, holes, findings=findings)


_MAX_PAIRS = 1 << 16
"""The most pairs of a name and a file that are looked at: some seconds."""

_SAMPLES = 8
"""Chunks of a file, spread over it, that identify it."""

_MAX_SAMPLED = 1 << 20
"""The most elements of such a chunk, unless all chunks of the file have more."""


def with_causes(checkpoint: OpenCheckpoint, damage: Damage, names: Collection[str]) -> Damage:
    """Return damage with the other places of the bytes of files, if there are any; the manifest may be of another save.

    Reads some chunks of files: two files that are in each other's place, and one with another name, are found so.

    Args:
        names: of files that may have other bytes, or none.
    """
    manifest = checkpoint.outline
    if not isinstance(checkpoint.path, Path) or not is_folder(checkpoint.path):
        return damage
    samples, starts = _samples_by_file(manifest), first_rows_of(manifest.tensors)

    @cache
    def has_chunks(file: str, name: str) -> bool:
        """Return whether a file has the chunks that were written under a name."""
        return name in samples and all(_is_in(checkpoint, starts, row, file) for row in samples[name])

    # A file without the chunks that were written under its name may be under the name of any other.
    suspects = [name for name in names if name in samples and not has_chunks(name, name)]
    descriptions = {MANIFEST_FILE, METADATA_FILE, *manifest.files}
    candidates = [e.name for e in entries_of(checkpoint.path) if is_file(e) and e.name not in descriptions]
    are_all_suspects = 0 < len(samples) == len(suspects)
    if len(suspects) * len(candidates) > _MAX_PAIRS:
        return damage
    # Where a file is under another name, that name's own bytes are looked for, too.
    places: dict[str, str] = {}
    while suspects:
        name = suspects.pop()
        for file in candidates:
            if file != name and file not in places.values() and has_chunks(file, name) and not has_chunks(file, file):
                places[name] = file
                if file in samples and file not in places and file not in suspects:
                    suspects.append(file)
                break
    # If no file has what the manifest says, and all have what DCP's description says, the manifest is of another save.
    if places or damage.files or not are_all_suspects or not _is_as_dcp_says(checkpoint):
        return replace(damage, misplaced=places)
    return replace(damage, files=dict.fromkeys(samples, OTHER_SAVE))


def _samples_by_file(manifest: Manifest) -> Mapping[str, Sequence[int]]:
    """Return the rows of chunks that identify each file, the smallest first, as few are read of another file.

    Two manifests that have the same chunks in a file have the same samples of it.
    """
    columns = manifest.columns
    order = np.lexsort((columns.item_end(), manifest.elements, columns.file))
    order = order[manifest.elements[order] > 0]
    files, first = np.unique(columns.file[order], return_index=True)
    samples = {}
    for file, rows in zip(files.tolist(), np.split(order, first[1:]), strict=False):
        count = max(1, int(np.searchsorted(manifest.elements[rows], _MAX_SAMPLED, side="right")))
        numbers = np.unique(np.linspace(0, count - 1, _SAMPLES).astype(np.int64))
        samples[columns.names[file]] = rows[numbers].tolist()
    return samples


def _is_in(checkpoint: OpenCheckpoint, starts: NDArray[np.int64], row: int, file: str) -> bool:
    """Return whether a file has one chunk of the manifest where the chunk's own file must have it."""
    number = int(np.searchsorted(starts, row, side="right")) - 1
    tensor = checkpoint.outline.tensors[number]
    chunk = tensor.chunks[row - int(starts[number])]
    payload = chunk.payload and replace(chunk.payload, file=file)
    chunk = replace(chunk, item=replace(chunk.item, file=file), payload=payload)
    try:
        (tensor,) = checkpoint.locate([replace(tensor, chunks=Chunks.of([chunk], len(tensor.shape)))])
        check_chunk(checkpoint.payloads, tensor, tensor.chunks[0])
    except (SourceError, UnavailableError):
        return False
    return checkpoint.payloads.has_checksum(tensor.chunks[0])


def _is_as_dcp_says(checkpoint: OpenCheckpoint) -> bool:
    """Return whether the files of a checkpoint of ours have the chunks that DCP's description says."""
    if checkpoint.format is not OWN:
        return False
    try:
        with OpenCheckpoint(checkpoint.path, DCP) as stock:
            samples, starts = _samples_by_file(stock.outline), first_rows_of(stock.outline.tensors)
            rows = ((name, row) for name, of_file in samples.items() for row in of_file)
            return not stock.faults and all(_is_in(stock, starts, row, name) for name, row in rows)
    except (SourceError, LayoutError):
        return False


HARMLESS = frozenset({"description", "metadata", "manifest", "nonfinite", "renamed"})
"""Kinds of findings with which all elements and items are those that were saved, and are read."""

DESCRIPTIVE = frozenset({"description", "metadata", "manifest", "misdescribed", "key"})
"""Kinds of findings about descriptions, not about elements."""


def damage_by_files(checkpoint: OpenCheckpoint) -> Damage:
    """Return the damage that descriptions, names and sizes of files show.

    This decides whether a checkpoint is whole where its elements are not read.

    Raises:
        UnavailableError: it is not known whether a file is there, or a disk cannot open it.
    """
    damage = damage_of_files(checkpoint)
    for finding in damage.findings:
        raise DiskError(finding.message)
    damage = with_causes(checkpoint, damage, damage.files) if damage.files else damage
    return damage.with_findings(findings_by_files(checkpoint))


def damage_at(path: Location) -> Damage:
    """Return the damage of whatever is at a path, as `damage_by_files` does, also if it cannot be opened."""
    try:
        with OpenCheckpoint(path) as checkpoint:
            return damage_by_files(checkpoint)
    except (SourceError, LayoutError) as error:
        return damage_of_unreadable(path, error)


def damage_of_unreadable(path: Location, error: MuonckptError) -> Damage:
    """Return the damage of a checkpoint that cannot be opened; ``error`` is the reason."""
    message = f"it cannot be opened: {str(error).removeprefix(f'{path}: ').removeprefix(f'{path}/')}"
    if StepName.parsed(path.name) and is_file(path):
        message = "it is a file, expected the folder of a checkpoint"
    # A manifest of a newer version of this package is not damaged.
    if not isinstance(error, DamageError):
        return replace(NOTHING_LOST, findings=(Finding("refused", message),))
    return replace(NOTHING_LOST, findings=(Finding("unreadable", message),))


def is_described_by_dcp(path: Location) -> bool:
    """Return whether DCP's description has all of a checkpoint of ours, so that it is read without our manifest."""
    from ..formats import dcp  # not needed where nothing is wrong

    with suppress(SourceError):
        return isinstance(path, Path) and is_there(path / MANIFEST_FILE) and not dcp.reader(path).faults
    return False


_KINDS_OF_FAULTS = {
    DiskError: "disk",
    SeveralSavesError: "several_saves",
    MisdescribedError: "misdescribed",
    UnlistedError: "unlisted",
}


def findings_by_files(checkpoint: OpenCheckpoint) -> list[Finding]:
    """Return the faults that the reader has met, and the descriptions that are missing or not as they were written."""
    findings = list[Finding]()
    for fault in checkpoint.faults:
        message = str(fault).removeprefix(f"{checkpoint.path}: ")
        findings.append(Finding(_KINDS_OF_FAULTS.get(type(fault), "files"), message))
    if checkpoint.lacks_manifest:
        message = f"its {MANIFEST_FILE} is missing, and with it digests, momentum conventions and layouts"
        findings.append(Finding("manifest", message))
    # The files that describe a checkpoint of ours to other programs, and items that were written beside another format.
    digests = checkpoint.outline.files
    for name in sorted({METADATA_FILE, *digests}) if checkpoint.format is OWN else ():
        if text_fault := _text_fault(checkpoint.path / name, digests.get(name)):
            findings.append(Finding("description", f"its {name} {text_fault}"))
    if checkpoint.items_digest is not None:
        items = items_beside(checkpoint.path)
        if text_fault := _text_fault(items, checkpoint.items_digest):
            findings.append(Finding("items", f"{items} {text_fault}"))
    # A manifest of another save does not say what the step is; what is missing beside it is no sign of one.
    named, saved = StepName.parsed(checkpoint.path.absolute().name), step_saved(checkpoint)
    if named and saved not in (None, named.step) and all(each.message.endswith("is missing") for each in findings):
        findings.append(Finding("renamed", f"it was saved as step {saved}, and its name is {named}"))
    return findings


def step_saved(checkpoint: OpenCheckpoint) -> int | None:
    """Return the step that a checkpoint of ours was saved as; None if it does not say."""
    step = checkpoint.outline.provenance.get("step")
    return step if type(step) is int else None


def _text_fault(place: Location, digest: str | None) -> str:
    """Say whether a text is missing, or has another digest; empty if it is as recorded, or nothing is recorded."""
    if not is_there(place):
        return "is missing"
    try:
        actual = xxh3_128([read_text_file(place)]) if digest else None
    except SourceError as error:
        return f"is damaged: {error}"
    return "" if actual == digest else f"is damaged: digest {actual}, expected {digest} by {MANIFEST_FILE}"
