"""Damage: what is wrong with a checkpoint, in terms of a run, whoever looks; `diagnosis` adds what to do about it.

`verify` finds damage by reading everything; `inspect`, `diff`, `report` and `load` by the presence and the sizes of
files alone.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
from ...names.wording import Finding, counted, enumerated, listed, size
from ...programs.signs import METADATA_FILE
from ...record.chunks import Boxes, Chunks
from ...record.record import MANIFEST_FILE, Manifest, StateRecord, entry_keys, first_rows_of
from ..formats.registry import OWN, format_of
from ..io.checksums import xxh3_128
from ..io.location import Location, entries_of, is_file, is_folder, is_there, items_beside
from ..io.regular import read_text_file
from ..open_checkpoint import OpenCheckpoint
from ..reading.dtypes import itemsize
from ..reading.payloads import check_chunk

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

    Attributes:
        manifest: of the checkpoint, as far as it could be read.
        chunks: for each chunk, in the order of ``manifest.columns``, whether it is lost.
        items: the keys of the items that are lost.
        files: the files that are missing or too short, or that cannot be opened or read, with the reason.
        holes: boxes of tensors, by key, that no chunk covers.
        read: whether all bytes were compared; else only the files' sizes.
        mixed_up: whether the manifest is of another save than the files.
        misplaced: by the name of a file the name under which its bytes are.
        findings: the faults that the losses do not explain.
        disk_errors: of files that the disk cannot read, by name: the checkpoint may be whole elsewhere.
    """

    manifest: Manifest
    chunks: NDArray[np.bool_]
    items: frozenset[str] = frozenset()
    files: Mapping[str, str] = field(default_factory=dict)
    holes: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    read: bool = False
    mixed_up: bool = False
    misplaced: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    disk_errors: Mapping[str, DiskError] = field(default_factory=dict)

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

    def with_findings(self, findings: Sequence[Finding]) -> Damage:
        """Return the same losses beside those of the findings that they do not explain."""
        if not findings:
            return self
        keys = {*entry_keys(self.tensors)} | self.items
        # A reader stops at files that are missing, and says so.
        kinds = {"files", "disk", "metadata", "description"} if self.files else set[str]()
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
    def by_file(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each file of ``manifest.columns``, how many of its chunks are lost, and how many it has with elements."""
        files, count = self.manifest.columns.file, len(self.manifest.columns.names)
        lost_files, stored_files = files[self.chunks], files[self.manifest.elements > 0]
        return np.bincount(lost_files, minlength=count), np.bincount(stored_files, minlength=count)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        return first_rows_of(self.manifest.tensors)

    @cached_property
    def _boxes(self) -> list[tuple[StateRecord, Boxes]]:
        """The tensors that have lost elements, with the boxes of their lost chunks and their holes."""
        lost_boxes = []
        for tensor, (start, stop) in zip(self.manifest.tensors, pairwise(self.starts.tolist()), strict=True):
            is_lost = self.chunks[start:stop]
            if is_lost.any() or tensor.key in self.holes:
                boxes = tensor.boxes.select(np.flatnonzero(is_lost))
                holes = Boxes.of_all(self.holes.get(tensor.key, ()), boxes.ndim)
                lo, hi = np.concatenate([boxes.lo, holes.lo]), np.concatenate([boxes.hi, holes.hi])
                lost_boxes.append((tensor, Boxes.of(lo, hi)))
        return lost_boxes

    @cached_property
    def tensors(self) -> tuple[StateRecord, ...]:
        """The tensors that have lost elements."""
        return tuple(tensor for tensor, _ in self._boxes)

    @property
    def bytes(self) -> int:
        """The bytes of the elements that are lost."""
        return sum(boxes.elements * itemsize(tensor.dtype) for tensor, boxes in self._boxes)

    def to_json(self) -> dict[str, Any]:
        """Return the losses as plain data; the lost boxes are columns, with the number of their tensor."""
        columns: dict[str, list[Any]] = {"tensor": [], "lo": [], "hi": []}
        for number, (_, boxes) in enumerate(self._boxes):
            columns["tensor"] += [number] * len(boxes)
            columns["lo"] += boxes.lo.tolist()
            columns["hi"] += boxes.hi.tolist()
        return {
            "bytes": self.bytes,
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
        files = {name: length for name, length in self.files.items() if name not in names}
        chunks = self.chunks & ~self.manifest.columns.is_in(names)
        return replace(self, chunks=chunks, items=items, files=files, misplaced={})

    @property
    def sentence(self) -> str:
        """All that is wrong, as one sentence for people; empty if nothing is."""
        messages_by_kind = defaultdict[str, list[str]](list)
        for finding in self.findings:
            messages_by_kind[finding.kind].append(finding.message)
        sentences = [listed(messages, 1, "; ") for messages in messages_by_kind.values()]
        return "; ".join([self._losses_in_words, *sentences] if self else sentences)

    @property
    def _losses_in_words(self) -> str:
        num_lost, num_stored = int(self.chunks.sum()), int((self.manifest.elements > 0).sum())
        # Bytes that are elsewhere are not lost.
        if self.misplaced:
            moves = [f"that of {name} is called {file}" for name, file in sorted(self.misplaced.items())]
            text = f"{counted(len(moves), 'file')} with other names than when it was saved: {listed(moves, 4)}"
            besides = self.without_misplaced
            return f"{text}; {besides._losses_in_words if besides else 'nothing else is wrong, and nothing is lost'}"
        if self.mixed_up:
            files = _files(sorted(self.manifest.columns.names))
            return (
                f"{MANIFEST_FILE} is of another save than {files}: {num_lost} of {num_stored} chunks have other bytes"
            )
        # The verdict comes first, the numbers last.
        text = ": ".join([listed(self._causes(), 3, "; "), *filter(None, [self._loss])])
        if self.read and (num_lost < num_stored or len(self.items) < len(self.manifest.blobs)):
            text += "; all else is whole"
        numbers = [f"{num_lost} of {num_stored} chunks"] * (num_lost > 0) + [size(self.bytes)] * bool(self.tensors)
        return f"{text} ({', '.join(numbers)})" if numbers else text

    @property
    def _loss(self) -> str:
        """How many tensors of each kind have lost elements, weights first, and how many items are lost; some keys."""
        losses = []
        if self.tensors:
            totals = Counter(map(self.view.noun, self.manifest.tensors))
            counts = Counter(map(self.view.noun, self.tensors))
            kinds = enumerated(
                [f"{counts[noun]} of {totals[noun]} {noun}" for noun in sorted(counts, key="weights".__ne__)]
            )
            have = "has" if len(self.tensors) == 1 else "have"
            losses.append(f"{kinds} {have} lost elements ({listed(entry_keys(self.tensors), 3)})")
        if self.items:
            total = len(self.manifest.blobs)
            losses.append(f"{len(self.items)} of {total} other items are lost ({listed(sorted(self.items), 2)})")
        return ", and ".join(losses)

    def _causes(self) -> Iterator[str]:
        """Yield the reasons, each with its files."""
        files_by_reason = defaultdict[str, list[str]](list)
        for name, reason in self.files.items():
            files_by_reason[reason].append(name)
        # Files of the right size with other bytes.
        names = np.array(self.manifest.columns.names, object)[self.by_file[0] > 0]
        damaged = {*names} | {blob.item.file for blob in self.manifest.blobs if blob.key in self.items}
        if damaged := damaged - self.files.keys():
            files_by_reason["has damaged bytes"] = [*damaged]
        for reason, files in files_by_reason.items():
            yield f"{_files(sorted(files))} {reason if len(files) == 1 else _PLURALS.get(reason, reason)}"
        if self.holes:
            yield f"no file has some elements of {counted(len(self.holes), 'tensor')}"


_PLURALS = {"is missing": "are missing", "has damaged bytes": "have damaged bytes"}


def _files(names: Sequence[str]) -> str:
    ranks, text = {*map(rank_in_name, names)}, listed(names, 3)
    if None in ranks:
        return f"{counted(len(names), 'file')} ({text})" if len(names) > 1 else f"the file {text}"
    if len(names) == 1:
        return f"rank {ranks.pop()}'s file {text}"
    return f"the files of ranks {listed(sorted(rank for rank in ranks if rank is not None))} ({text})"


NOTHING_LOST = Damage(Manifest(()), np.zeros(0, np.bool_))


_MAX_HOLES = 256
"""The most holes of a tensor that are listed, else none: lost files leave few, hostile boxes very many."""


def damage_of_files(checkpoint: OpenCheckpoint) -> Damage:
    """Return the losses of missing or cut files, by their names and sizes alone.

    Raises:
        UnavailableError: it is not known whether a file is there.
    """
    manifest, columns, files = checkpoint.outline, checkpoint.outline.columns, checkpoint.lost_files()
    # Chunks and items that reach beyond the ends of their files.
    lengths = {name: file.length for name, file in files.items()}
    ends = np.array([*(lengths.get(name, MAX_ELEMENTS) for name in columns.names), 0], np.int64)
    chunks = (columns.item_end() > ends[columns.file]) & (manifest.elements > 0)
    items = frozenset(b.key for b in manifest.blobs if b.item.end > lengths.get(b.item.file, MAX_ELEMENTS))
    # Elements that no file has.
    holes = {}
    for tensor in manifest.tensors:
        box = Box.of(tensor.shape)
        if tensor.boxes.elements < box.numel:
            boxes = holes_in(box, tensor.boxes, _MAX_HOLES)
            holes[tensor.key] = tuple(boxes) if len(boxes) <= _MAX_HOLES else ()
    reasons = {name: file.reason for name, file in files.items()}
    disk_errors = {name: file.disk_error for name, file in files.items() if file.disk_error}
    return Damage(manifest, chunks, items, reasons, holes, disk_errors=disk_errors)


_MAX_PAIRS = 1 << 16
"""The most pairs of a name and a file that are looked at: some seconds."""

_SAMPLES = 8
"""Chunks of a file, spread over it, that identify it under another name."""


def misplaced_files(checkpoint: OpenCheckpoint, damage: Damage) -> dict[str, str]:
    """Return, by the names of files that are not there, or have other bytes, the names under which their bytes are.

    Reads some chunks of files: two files that are in each other's place, and one with another name, are found so.
    """
    if not isinstance(checkpoint.path, Path) or not is_folder(checkpoint.path):
        return {}
    # The chunks of each file, the smallest first: few are read of a file that is another one.
    manifest, names = damage.manifest, damage.manifest.columns.names
    order = np.lexsort((manifest.elements, manifest.columns.file))
    order = order[manifest.elements[order] > 0]
    num_lost, num_stored = damage.by_file
    rows_by_name = dict(zip(names, np.split(order, np.cumsum(num_stored)[:-1]), strict=True)) if names else {}

    @cache
    def has_chunks(file: str, name: str) -> bool:
        """Return whether a file has the chunks that were written under a name."""
        rows = rows_by_name.get(name, ())
        sample = np.unique(np.linspace(0, len(rows) - 1, _SAMPLES).astype(np.int64)) if len(rows) else ()
        return len(sample) > 0 and all(_is_in(checkpoint, damage, int(rows[number]), file) for number in sample)

    # The names that have lost everything, and the files that may have their bytes.
    is_short = np.array([name in damage.files for name in names], np.bool_)
    numbers = np.flatnonzero((num_stored > 0) & ((num_lost == num_stored) | is_short))
    suspects = [names[number] for number in numbers if "/" not in names[number]]
    descriptions = {MANIFEST_FILE, METADATA_FILE, *manifest.files}
    candidates = [e.name for e in entries_of(checkpoint.path) if is_file(e) and e.name not in descriptions]
    if len(suspects) * len(candidates) > _MAX_PAIRS:
        return {}
    # Where a file is under another name, that name's own bytes are looked for, too.
    places: dict[str, str] = {}
    while suspects:
        name = suspects.pop()
        for file in candidates:
            if file != name and file not in places.values() and has_chunks(file, name) and not has_chunks(file, file):
                places[name] = file
                if len(rows_by_name.get(file, ())) and file not in places and file not in suspects:
                    suspects.append(file)
                break
    return places


def _is_in(checkpoint: OpenCheckpoint, damage: Damage, row: int, file: str) -> bool:
    """Return whether a file has one chunk of the manifest where the chunk's own file must have it."""
    number = int(np.searchsorted(damage.starts, row, side="right")) - 1
    tensor = damage.manifest.tensors[number]
    chunk = tensor.chunks[row - int(damage.starts[number])]
    payload = chunk.payload and replace(chunk.payload, file=file)
    chunk = replace(chunk, item=replace(chunk.item, file=file), payload=payload)
    try:
        (tensor,) = checkpoint.locate([replace(tensor, chunks=Chunks.of([chunk], len(tensor.shape)))])
        check_chunk(checkpoint.payloads, tensor, tensor.chunks[0])
    except (SourceError, UnavailableError):
        return False
    return checkpoint.payloads.has_checksum(tensor.chunks[0])


HARMLESS = frozenset({"description", "metadata", "manifest", "nonfinite"})
"""Kinds of findings with which all elements and items are those that were saved."""


def damage_by_files(checkpoint: OpenCheckpoint) -> Damage:
    """Return the damage that descriptions, names and sizes of files show.

    This decides whether a checkpoint is whole where its elements are not read.

    Raises:
        UnavailableError: it is not known whether a file is there, or a disk cannot open it.
    """
    damage = damage_of_files(checkpoint)
    for error in damage.disk_errors.values():
        raise error
    misplaced = misplaced_files(checkpoint, damage) if damage.files else {}
    return replace(damage, misplaced=misplaced).with_findings(findings_by_files(checkpoint))


def open_remains(path: Location) -> OpenCheckpoint:
    """Open a checkpoint, or what remains of a damaged one, if its format can read that and something is lost.

    Raises:
        SourceError: as `open` does about the metadata, where nothing remains.
    """
    try:
        return OpenCheckpoint(path)
    except DamageError:
        with suppress(SourceError):
            if format := format_of(path).of_remains:
                checkpoint = OpenCheckpoint(path, format)
                if checkpoint.faults or damage_of_files(checkpoint):
                    return checkpoint
        raise


def damage_at(path: Location) -> Damage:
    """Return the damage of whatever is at a path, as `damage_by_files` does, also if it cannot be opened."""
    try:
        with open_remains(path) as checkpoint:
            return damage_by_files(checkpoint)
    except (SourceError, LayoutError) as error:
        return damage_of_unreadable(path, error)


def damage_of_unreadable(path: Location, error: MuonckptError) -> Damage:
    """Return the damage of a checkpoint that cannot be opened; ``error`` is the reason."""
    reason = str(error).removeprefix(f"{path}: ")
    return replace(NOTHING_LOST, findings=(Finding("unreadable", f"it cannot be opened: {reason}"),))


_KINDS_OF_FAULTS = {
    DiskError: "disk",
    SeveralSavesError: "several_saves",
    MisdescribedError: "description",
    UnlistedError: "unlisted",
}


def findings_by_files(checkpoint: OpenCheckpoint) -> list[Finding]:
    """Return the faults that the reader has met, and the descriptions that are missing or not as they were written."""
    findings = []
    for fault in checkpoint.faults:
        message = str(fault).removeprefix(f"{checkpoint.path}: ")
        findings.append(Finding(_KINDS_OF_FAULTS.get(type(fault), "files"), message))
    if checkpoint.lacks_manifest:
        message = f"its {MANIFEST_FILE} is missing, and with it digests, momentum conventions and layouts"
        findings.append(Finding("manifest", message))
    items = items_beside(checkpoint.path)
    if checkpoint.items_digest is not None and not is_there(items):
        message = f"{items} is missing, in which items were written beside this checkpoint"
        findings.append(Finding("items", message))
    return [*findings, *_changed_descriptions(checkpoint)]


def _changed_descriptions(checkpoint: OpenCheckpoint) -> Iterator[Finding]:
    """Compare the files that describe a checkpoint of ours to other programs with their digests."""
    digests = checkpoint.outline.files
    for name in sorted({METADATA_FILE, *digests}) if checkpoint.format is OWN else ():
        if not is_there(checkpoint.path / name):
            yield Finding("description", f"its {name} is missing, which other programs read")
            continue
        if name not in digests:
            continue
        try:
            digest = xxh3_128([read_text_file(checkpoint.path / name)])
        except SourceError as error:
            yield Finding("description", f"its {name} is damaged: {error}")
            continue
        if digest != digests[name]:
            message = f"its {name} is damaged: digest {digest}, expected {digests[name]} by {MANIFEST_FILE}"
            yield Finding("description", message)
