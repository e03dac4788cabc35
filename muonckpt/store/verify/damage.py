"""What a checkpoint has lost, in terms of a run: one description, whoever looks; `diagnosis` adds what to do about it.

`verify` finds damage by reading everything; `inspect`, `diff`, `report` and `load` by the presence and the sizes of
files alone.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import Box
from ...algebra.layout import holes_in
from ...names.errors import SeveralSavesError, SourceError, UnlistedError
from ...names.wording import Finding, counted, listed, size
from ...programs.signs import METADATA_FILE
from ...record.chunks import Boxes, Chunks
from ...record.record import MANIFEST_FILE, Manifest, StateRecord
from ..io.location import items_beside
from ..io.regular import open_regular
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
    """What of a checkpoint is lost.

    Attributes:
        manifest: of the checkpoint, as far as it could be read.
        chunks: for each chunk, in the order of ``manifest.columns``, whether it is lost.
        items: the keys of the items that are lost.
        files: the files that are missing (None) or shorter than was recorded (their length in bytes).
        unopened: why files that are there cannot be opened; they are among ``files``, with None.
        holes: boxes of tensors, by key, that no chunk covers, although the tensor has them.
        read: whether all bytes were compared with what was recorded; else only the files' sizes.
        mixed_up: whether the manifest is that of another save than the files.
        misplaced: by the name of a file that is not there, or has other bytes, the name under which its bytes are.
        strays: files of another save than the others, by what another checkpoint of that save has.
    """

    manifest: Manifest
    chunks: NDArray[np.bool_]
    items: frozenset[str] = frozenset()
    files: Mapping[str, int | None] = field(default_factory=dict)
    unopened: Mapping[str, str] = field(default_factory=dict)
    holes: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    read: bool = False
    mixed_up: bool = False
    strays: frozenset[str] = frozenset()
    misplaced: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.chunks.any() or self.items or self.files or self.holes)

    @cached_property
    def view(self) -> ModelView:
        """The checkpoint in terms of a model and its optimizer, as its keys tell."""
        from ...programs.model_view import view_by_keys  # not needed where nothing is wrong

        return view_by_keys(self.manifest)

    @property
    def begins_anew(self) -> bool:
        """Whether all tensors that have lost elements are zeros when training begins."""
        from ...programs.model_view import BEGIN_ANEW

        return {*map(self.view.role, self.tensors)} <= BEGIN_ANEW

    @cached_property
    def by_file(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each file of ``manifest.columns``, how many of its chunks are lost, and how many it has with elements."""
        columns = self.manifest.columns
        of_lost, of_all = columns.file[self.chunks], columns.file[self.manifest.elements > 0]
        count = len(columns.names)
        return np.bincount(of_lost, minlength=count), np.bincount(of_all, minlength=count)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The number of the first chunk of each tensor, and at the end the number of all."""
        return np.cumsum([0, *(len(tensor.chunks) for tensor in self.manifest.tensors)], dtype=np.int64)

    @cached_property
    def tensors(self) -> tuple[StateRecord, ...]:
        """The tensors that have lost elements."""
        lost = np.diff(np.concatenate([[0], np.cumsum(self.chunks)])[self.starts])
        pairs = zip(self.manifest.tensors, lost.tolist(), strict=True)
        return tuple(tensor for tensor, count in pairs if count or tensor.key in self.holes)

    def lost_boxes(self) -> Iterator[tuple[StateRecord, tuple[Box, ...]]]:
        """Yield the tensors that have lost elements, and the boxes of these."""
        for tensor in self.tensors:
            yield tensor, (*self._boxes_of(tensor), *self.holes.get(tensor.key, ()))

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {tensor.key: number for number, tensor in enumerate(self.manifest.tensors)}

    def _boxes_of(self, tensor: StateRecord) -> Boxes:
        """Return the boxes of the chunks that a tensor has lost."""
        start = self.starts[self._places[tensor.key]]
        return tensor.boxes.select(np.flatnonzero(self.chunks[start : start + len(tensor.chunks)]))

    @cached_property
    def bytes(self) -> int:
        """The bytes of the elements that are lost."""
        sizes = np.array([itemsize(tensor.dtype) for tensor in self.manifest.tensors], np.int64)
        elements = np.where(self.chunks, self.manifest.elements, 0)
        sums = np.diff(np.concatenate([[0], np.cumsum(elements)])[self.starts])
        of_holes = (sum(b.numel for b in boxes) * sizes[self._places[key]] for key, boxes in self.holes.items())
        return int((sums * sizes).sum() + sum(of_holes))

    def to_json(self) -> dict[str, Any]:
        """Return what is lost as plain data; the lost boxes are columns, with the number of their tensor."""
        numbers, lo, hi = list[int](), list[list[int]](), list[list[int]]()
        for number, tensor in enumerate(self.tensors):
            own, holes = self._boxes_of(tensor), self.holes.get(tensor.key, ())
            numbers += [number] * (len(own) + len(holes))
            lo += [*own.lo.tolist(), *(list(hole.lo) for hole in holes)]
            hi += [*own.hi.tolist(), *(list(hole.hi) for hole in holes)]
        return {
            "bytes": self.bytes,
            "chunks": int(self.chunks.sum()),
            "tensors": [tensor.key for tensor in self.tensors],
            "boxes": {"tensor": numbers, "lo": lo, "hi": hi},
            "items": sorted(self.items),
            "files": dict(self.files),
            "read": self.read,
        }

    @cached_property
    def without_misplaced(self) -> Damage:
        """What is lost beside the bytes that are under other names."""
        names = self.misplaced.keys()
        items = frozenset(blob.key for blob in self.manifest.blobs if blob.item.file not in names) & self.items
        files = {name: length for name, length in self.files.items() if name not in names}
        chunks = self.chunks & ~self.manifest.columns.is_in(names)
        return replace(self, chunks=chunks, items=items, files=files, misplaced={})

    @property
    def sentence(self) -> str:
        """What is lost, as one sentence for people."""
        if self.misplaced:
            moved = [f"that of {name} is called {other}" for name, other in sorted(self.misplaced.items())]
            said = f"{counted(len(moved), 'file')} with other names than when it was saved: {listed(moved, 4)}"
            besides = self.without_misplaced
            return f"{said}; {besides.sentence if besides else 'nothing else is wrong, and nothing is lost'}"
        parts = []
        if self.tensors:
            parts.append(self._lost_elements())
        if self.items:
            keys = sorted(self.items)
            parts.append(f"{len(keys)} of {len(self.manifest.blobs)} items that are not tensors ({listed(keys, 2)})")
        if self.mixed_up:
            found, stored = int(self.chunks.sum()), int((self.manifest.elements > 0).sum())
            files = _files(sorted(self.manifest.columns.names))
            return f"{MANIFEST_FILE} is of another save than {files}: {found} of {stored} chunks have other bytes"
        if not parts:
            rest = "tensors and items are whole" if self.read else "all other files are long enough"
            return f"{'; '.join(self._causes())}; {rest}"
        lost = f"{' and '.join(parts)} {'is' if int(self.chunks.sum()) + len(self.items) == 1 else 'are'} lost"
        rest = "all else is whole" if self.read else "all other files are long enough"
        return f"{'; '.join(self._causes()) or 'bytes are not those that were written'}: {lost}; {rest}"

    def _lost_elements(self) -> str:
        chunks, stored = int(self.chunks.sum()), int((self.manifest.elements > 0).sum())
        kinds = Counter(map(self.view.noun, self.tensors))
        (first, count), *others = kinds.items()
        named = [f"{first} of {counted(count, 'tensor')}", *(f"{name} of {count}" for name, count in others)]
        whose = ", ".join(named).replace("tensors of ", "")
        if not chunks:
            return f"{size(self.bytes)} ({whose})"
        return f"{chunks} of {stored} chunks ({size(self.bytes)}: {whose})"

    def _causes(self) -> Iterator[str]:
        missing = sorted(name for name, length in self.files.items() if length is None and name not in self.unopened)
        cut = sorted(name for name, length in self.files.items() if length is not None)
        for names, fate in ((missing, "missing"), (cut, "cut short")):
            if names:
                yield f"{_files(names)} {'is' if len(names) == 1 else 'are'} {fate}{self._lengths(names)}"
        for name in sorted(self.unopened)[:1]:
            yield f"{_files(sorted(self.unopened))} cannot be opened: {self.unopened[name]}"
        columns = self.manifest.columns
        damaged, every = self.by_file
        of_items = {blob.item.file for blob in self.manifest.blobs if blob.key in self.items}
        others = {columns.names[number] for number in np.flatnonzero(damaged)} | of_items
        others -= self.files.keys() | self.strays
        swapped = {columns.names[number] for number in np.flatnonzero((damaged == every) & (every > 1))}
        for group, fate in (
            (self.strays, "the bytes of another save than all other files"),
            (others & swapped, "none of the bytes that were written (another save's, perhaps)"),
            (others - swapped, "damaged bytes"),
        ):
            if group:
                yield f"{_files(sorted(group))} {'has' if len(group) == 1 else 'have'} {fate}"
        if self.holes:
            yield f"no file has some elements of {counted(len(self.holes), 'tensor')}"

    def _lengths(self, names: Sequence[str]) -> str:
        """Return how long a file is, and how long it was, in brackets, if it is one and not missing."""
        if len(names) > 1 or (length := self.files[names[0]]) is None:
            return ""
        return f" ({length} of {_ends(self.manifest)[names[0]]} bytes)"


def _ends(manifest: Manifest) -> dict[str, int]:
    """Return by file the bytes that it needs to have."""
    columns = manifest.columns
    ends = np.zeros(len(columns.names), np.int64)
    np.maximum.at(ends, columns.file, columns.item_end())
    needed = dict(zip(columns.names, ends.tolist(), strict=True))
    for blob in manifest.blobs:
        needed[blob.item.file] = max(needed.get(blob.item.file, 0), blob.item.end)
    return needed


def _files(names: Sequence[str]) -> str:
    ranks = [rank for rank in map(rank_in_name, names) if rank is not None]
    shown = listed(names, 3)
    if len(ranks) < len(names):
        return f"{counted(len(names), 'file')} ({shown})" if len(names) > 1 else f"the file {shown}"
    if len(names) == 1:
        return f"rank {ranks[0]}'s file {shown}"
    return f"the files of ranks {listed(sorted({*ranks}))} ({shown})"


NOTHING_LOST = Damage(Manifest(()), np.zeros(0, np.bool_))


_MOST_HOLES = 256
"""The most holes of a tensor that are listed, else none: lost files leave few, hostile boxes very many."""


def damage_of_files(checkpoint: OpenCheckpoint) -> Damage:
    """Return what is lost with files that are missing or cut, by their names and sizes alone."""
    manifest, files = checkpoint.outline, checkpoint.lost_files
    columns = manifest.columns
    ends = np.array([_length(files, name) for name in columns.names] or [0], np.int64)
    lost = (columns.item_end() > ends[columns.file]) & (manifest.elements > 0)
    items = frozenset(blob.key for blob in manifest.blobs if blob.item.end > _length(files, blob.item.file))
    holes = {}
    for tensor in manifest.tensors:
        if tensor.boxes.elements < Box.of(tensor.shape).numel:
            left = holes_in(Box.of(tensor.shape), tensor.boxes, _MOST_HOLES)
            holes[tensor.key] = tuple(left) if len(left) <= _MOST_HOLES else ()
    damage = Damage(manifest, lost, items, files, dict(_unopened(checkpoint, files)), holes)
    return replace(damage, misplaced=misplaced_files(checkpoint, damage)) if files else damage


_MOST_PAIRS = 1 << 16
"""The most pairs of a name and a file that are looked at: some seconds."""

_SAMPLES = 8
"""Chunks of a file, spread over it, by which it is told under another name."""


def misplaced_files(checkpoint: OpenCheckpoint, damage: Damage) -> dict[str, str]:
    """Return, by the names of files that are not there, or have other bytes, the names under which their bytes are.

    Reads some chunks of files, and compares them with what was recorded; two files that are in each other's place, and
    one that has got another name, are found so.
    """
    if not isinstance(checkpoint.path, Path) or not checkpoint.path.is_dir():
        return {}
    # The chunks of each file, the smallest first: few are read of a file that is another one.
    manifest, names = damage.manifest, damage.manifest.columns.names
    order = np.lexsort((manifest.elements, manifest.columns.file))
    order = order[manifest.elements[order] > 0]
    lost, stored = damage.by_file
    rows_by_name = dict(zip(names, np.split(order, np.cumsum(stored)[:-1]), strict=True)) if names else {}

    @cache
    def has(file: str, name: str) -> bool:
        """Return whether a file has the chunks that were written under a name."""
        rows = rows_by_name[name]
        sample = rows[np.unique(np.linspace(0, len(rows) - 1, _SAMPLES).astype(np.int64))]
        return all(_is_in(checkpoint, damage, row, file) for row in sample.tolist())

    # Which names have lost everything, and which files may have it.
    is_short = np.array([name in damage.files for name in names], np.bool_)
    numbers = np.flatnonzero((stored > 0) & ((lost == stored) | is_short))
    lost_names = (names[number] for number in numbers if "/" not in names[number])
    suspects = [name for name in lost_names if name not in damage.unopened]
    descriptions = {MANIFEST_FILE, METADATA_FILE, *manifest.files}
    candidates = [e.name for e in checkpoint.path.iterdir() if e.is_file() and e.name not in descriptions]
    if len(suspects) * len(candidates) > _MOST_PAIRS:
        return {}
    # Where a file is under another name, that name's own bytes are looked for, too.
    places: dict[str, str] = {}
    while suspects:
        name = suspects.pop()
        for file in candidates:
            is_named = len(rows_by_name.get(file, ())) > 0
            if file != name and file not in places.values() and has(file, name) and not (is_named and has(file, file)):
                places[name] = file
                suspects += [file] if is_named and file not in places and file not in suspects else []
                break
    return places


def _is_in(checkpoint: OpenCheckpoint, damage: Damage, row: int, file: str) -> bool:
    """Return whether a file has one chunk of the manifest where the chunk's own file has to have it."""
    number = int(np.searchsorted(damage.starts, row, side="right")) - 1
    tensor = damage.manifest.tensors[number]
    chunk = tensor.chunks[row - int(damage.starts[number])]
    payload = chunk.payload and replace(chunk.payload, file=file)
    moved = replace(chunk, item=replace(chunk.item, file=file), payload=payload)
    try:
        (placed,) = checkpoint.locate([replace(tensor, chunks=Chunks.of([moved], len(tensor.shape)))])
        check_chunk(checkpoint.payloads, placed, placed.chunks[0])
    except SourceError:
        return False
    return checkpoint.payloads.has_checksum(placed.chunks[0])


def _unopened(checkpoint: OpenCheckpoint, files: Mapping[str, int | None]) -> Iterator[tuple[str, str]]:
    for name in (name for name, length in files.items() if length is None):
        place = checkpoint.payloads.place(name)
        if place.is_symlink() or place.exists():
            try:
                with open_regular(place):
                    pass
            except SourceError as error:
                yield name, str(error)


def _length(files: Mapping[str, int | None], name: str) -> int:
    """Return the bytes that a file has, where it is one of these; all there can be for any other."""
    return files[name] or 0 if name in files else np.iinfo(np.int64).max


def findings_by_files(checkpoint: OpenCheckpoint) -> list[Finding]:
    """Return what the reader has found, and which descriptions are missing."""
    findings = faults_of(checkpoint)
    if checkpoint.lacks_manifest:
        findings.append(Finding("manifest", f"{checkpoint.path} has lost its {MANIFEST_FILE}"))
    if checkpoint.items_digest is not None and not items_beside(checkpoint.path).exists():
        findings.append(Finding("items", f"{items_beside(checkpoint.path)} is missing"))
    return findings


def faults_of(checkpoint: OpenCheckpoint) -> list[Finding]:
    """Return the faults that its reader has found."""

    def kind(fault: SourceError) -> str:
        if not isinstance(fault, UnlistedError):
            return "files"
        if isinstance(fault, SeveralSavesError):
            return "several_saves"
        return "description" if fault.count == 0 else "unlisted"

    return [Finding(kind(fault), str(fault).removeprefix(f"{checkpoint.path}: ")) for fault in checkpoint.faults]


def sentence_of(damage: Damage, findings: Sequence[Finding]) -> str:
    """Say what is wrong with a checkpoint, in terms of a run; empty if nothing is.

    Args:
        findings: what the damage does not explain.
    """
    return "; ".join([*([damage.sentence] if damage else []), *_said(findings)])


def unexplained(damage: Damage, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that the sentence about damage has not said already."""
    keys, explained = {tensor.key for tensor in damage.tensors} | damage.items, _explained(damage)
    return [one for one in findings if one.kind not in explained and not (one.kind == "metadata" and one.key in keys)]


def _explained(damage: Damage) -> frozenset[str]:
    """Return the kinds of findings that the sentence about damage has said already."""
    kinds = set[str]()
    if damage.files:  # the reader of `.metadata` stops at files that are missing, and says so
        kinds |= {"files", "missing_file", "cut_file", "metadata", "description"}
    if damage.chunks.any():
        kinds |= {"unreadable", "crc32c", "digest", "crc32", "fingerprint"}
    if damage.items:
        kinds.add("blob")
    if damage.holes:
        kinds |= {"coverage", "hole", "fingerprint"}
    return frozenset(kinds)


_SAID: Mapping[str, str] = MappingProxyType(
    {
        "nonfinite": "{tensors} {have} infinite or NaN elements, and no bytes say that these were others when it was "
        "saved",
        "coverage": "the chunks of {tensors} overlap, or leave holes",
        "manifest": f"its {MANIFEST_FILE} is missing, and with it digests, momentum conventions and layouts",
        "metadata": f"{METADATA_FILE} and {MANIFEST_FILE} do not say the same",
        "key": f"{METADATA_FILE} has the path of another key in {{tensors}}",
    }
)
"""Sentences about findings by their kind; of other kinds the message is the sentence."""


def _said(findings: Sequence[Finding]) -> Iterator[str]:
    by_kind = defaultdict[str, list[Finding]](list)
    for finding in findings:
        by_kind[finding.kind].append(finding)
    for kind, alike in by_kind.items():
        tensors = len({finding.key for finding in alike})
        if kind in _SAID:
            yield _SAID[kind].format(tensors=counted(tensors, "tensor"), have="has" if tensors == 1 else "have")
        else:
            yield listed([finding.message for finding in alike], 1, "; ")
