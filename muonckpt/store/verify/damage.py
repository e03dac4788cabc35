"""Damage: what a checkpoint has lost, in terms of a run, whoever looks; `diagnosis` adds what to do about it.

`verify` finds damage by reading everything; `inspect`, `diff`, `report` and `load` by the presence and the sizes of
files alone.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import MAX_ELEMENTS, Box
from ...algebra.layout import holes_in
from ...names.errors import (
    DiskError,
    MisdescribedError,
    SeveralSavesError,
    SourceError,
    UnavailableError,
    UnlistedError,
)
from ...names.wording import Finding, counted, enumerated, listed, size
from ...programs.signs import METADATA_FILE
from ...record.chunks import Boxes, Chunks
from ...record.record import MANIFEST_FILE, Manifest, StateRecord, entry_keys
from ..formats.registry import OWN
from ..io.checksums import xxh3_128
from ..io.location import entries_of, is_file, is_folder, is_there, items_beside
from ..io.regular import open_regular, read_text_file
from ..open_checkpoint import OpenCheckpoint, file_sizes
from ..reading.dtypes import itemsize
from ..reading.payloads import check_chunk

if TYPE_CHECKING:
    from ...programs.model_view import ModelView
    from .verification import Verification

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
    """The losses of a checkpoint.

    Attributes:
        manifest: of the checkpoint, as far as it could be read.
        chunks: for each chunk, in the order of ``manifest.columns``, whether it is lost.
        items: the keys of the items that are lost.
        files: the files that are missing (None) or shorter than was recorded (their length in bytes).
        unopened: why files that are there cannot be opened; they are among ``files``, with None.
        disk_files: files that the disk cannot read; they are among ``files``, with None.
        holes: boxes of tensors, by key, that no chunk covers.
        read: whether all bytes were compared; else only the files' sizes.
        mixed_up: whether the manifest is of another save than the files.
        misplaced: by the name of a file the name under which its bytes are.
    """

    manifest: Manifest
    chunks: NDArray[np.bool_]
    items: frozenset[str] = frozenset()
    files: Mapping[str, int | None] = field(default_factory=dict)
    unopened: Mapping[str, str] = field(default_factory=dict)
    disk_files: frozenset[str] = frozenset()
    holes: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    read: bool = False
    mixed_up: bool = False
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
        files, count = self.manifest.columns.file, len(self.manifest.columns.names)
        lost_files, stored_files = files[self.chunks], files[self.manifest.elements > 0]
        return np.bincount(lost_files, minlength=count), np.bincount(stored_files, minlength=count)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The number of the first chunk of each tensor, and at the end the number of all."""
        return np.cumsum([0, *(len(tensor.chunks) for tensor in self.manifest.tensors)], dtype=np.int64)

    @cached_property
    def _losses(self) -> list[tuple[StateRecord, Boxes, tuple[Box, ...]]]:
        """The tensors that have lost elements, with the boxes of their lost chunks, and their holes."""
        counts = np.diff(np.concatenate([[0], np.cumsum(self.chunks)])[self.starts])
        losses = []
        for tensor, start, count in zip(self.manifest.tensors, self.starts.tolist(), counts.tolist(), strict=False):
            holes = self.holes.get(tensor.key)
            if count or holes is not None:
                numbers = np.flatnonzero(self.chunks[start : start + len(tensor.chunks)])
                losses.append((tensor, tensor.boxes.select(numbers), holes or ()))
        return losses

    @cached_property
    def tensors(self) -> tuple[StateRecord, ...]:
        """The tensors that have lost elements."""
        return tuple(tensor for tensor, _, _ in self._losses)

    @cached_property
    def bytes(self) -> int:
        """The bytes of the elements that are lost."""
        total = 0
        for tensor, boxes, holes in self._losses:
            total += (boxes.elements + sum(hole.numel for hole in holes)) * itemsize(tensor.dtype)
        return total

    def to_json(self) -> dict[str, Any]:
        """Return the losses as plain data; the lost boxes are columns, with the number of their tensor."""
        columns: dict[str, list[Any]] = {"tensor": [], "lo": [], "hi": []}
        for number, (_, boxes, holes) in enumerate(self._losses):
            columns["tensor"] += [number] * (len(boxes) + len(holes))
            columns["lo"] += [*boxes.lo.tolist(), *(list(hole.lo) for hole in holes)]
            columns["hi"] += [*boxes.hi.tolist(), *(list(hole.hi) for hole in holes)]
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
        """The losses, as one sentence for people."""
        num_lost, num_stored = int(self.chunks.sum()), int((self.manifest.elements > 0).sum())
        # Bytes that are elsewhere are not lost.
        if self.misplaced:
            moves = [f"that of {name} is called {file}" for name, file in sorted(self.misplaced.items())]
            text = f"{counted(len(moves), 'file')} with other names than when it was saved: {listed(moves, 4)}"
            besides = self.without_misplaced
            return f"{text}; {besides.sentence if besides else 'nothing else is wrong, and nothing is lost'}"
        chunks = f"{num_lost} of {num_stored} chunks"
        if self.mixed_up:
            files = _files(sorted(self.manifest.columns.names))
            return f"{MANIFEST_FILE} is of another save than {files}: {chunks} have other bytes"
        causes = "; ".join(self._causes())
        if not self.tensors and not self.items:
            return f"{causes}; {self._remainder}"
        # The verdict comes first, the numbers last.
        numbers = [chunks] * (num_lost > 0) + [size(self.bytes)] * bool(self.tensors)
        extent = f" ({', '.join(numbers)})" if numbers else ""
        cause = causes or "bytes are not those that were written"
        if not self._has_remainder:
            return f"{cause}: everything is lost{extent}"
        losses = [*self._lost_tensors()]
        if self.items:
            keys = listed(sorted(self.items), 2)
            losses.append(
                f"{len(self.items)} of {len(self.manifest.blobs)} items that are not tensors are lost ({keys})"
            )
        loss = ", and ".join(losses)
        return "; ".join((f"{cause}: {loss}", *self._prospects(), f"{self._remainder}{extent}"))

    @property
    def _has_remainder(self) -> bool:
        """Whether a chunk or an item is not lost."""
        has_chunk = bool(((self.manifest.elements > 0) & ~self.chunks).any())
        return has_chunk or len(self.items) < len(self.manifest.blobs)

    @property
    def _remainder(self) -> str:
        """The state of all other files, if there are any."""
        if self.tensors or self.items:
            remainder = "all else is whole"
        else:
            kinds = {"tensors": self.manifest.tensors, "items": self.manifest.blobs}
            nouns = [noun for noun, members in kinds.items() if members]
            remainder = f"{' and '.join(nouns)} are whole" if nouns else "it describes no tensor"
        if self.read:
            return remainder
        files = {*self.manifest.columns.names} | {blob.item.file for blob in self.manifest.blobs}
        return "all other files are long enough" if files - self.files.keys() else "there is no other file"

    def _lost_tensors(self) -> Iterator[str]:
        """Yield how many tensors of each kind have lost elements, weights first, with some of their keys."""
        if self.tensors:
            totals = Counter(map(self.view.noun, self.manifest.tensors))
            counts = Counter(map(self.view.noun, self.tensors))
            nouns = sorted(counts, key=self._transient.__contains__)
            kinds = enumerated([f"{counts[noun]} of {totals[noun]} {noun}" for noun in nouns])
            verb = "has" if len(self.tensors) == 1 else "have"
            yield f"{kinds} {verb} lost elements ({listed(entry_keys(self.tensors), 3)})"

    @cached_property
    def _transient(self) -> frozenset[str]:
        """Nouns for the lost tensors that can begin from zero."""
        from ...programs.model_view import BEGIN_ANEW

        return frozenset(self.view.noun(tensor) for tensor in self.tensors if self.view.role(tensor) in BEGIN_ANEW)

    def _prospects(self) -> Iterator[str]:
        """Yield which lost tensors can begin from zero, and which cannot."""
        nouns = dict.fromkeys(map(self.view.noun, self.tensors))
        transient = enumerated([noun for noun in nouns if noun in self._transient])
        lasting = enumerated([noun for noun in nouns if noun not in self._transient | _NO_KINDS])
        if transient:
            yield f"{transient} can begin from zero" + (f", {lasting} cannot" if lasting else "")
        elif lasting:
            yield f"{lasting} cannot begin from zero"

    def _causes(self) -> Iterator[str]:
        # Files that are not there, too short, or that the system does not open.
        cut = sorted(name for name, length in self.files.items() if length is not None)
        missing = sorted(self.files.keys() - self.unopened.keys() - self.disk_files - {*cut})
        if missing:
            yield f"{_files(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        if len(cut) == 1:
            yield f"{_files(cut)} is cut short ({self.files[cut[0]]} of {file_sizes(self.manifest)[cut[0]]} bytes)"
        elif cut:
            yield f"{_files(cut)} are cut short"
        for name in sorted(self.unopened)[:1]:
            yield f"{_files(sorted(self.unopened))} cannot be opened: {self.unopened[name]}"
        if self.disk_files:
            yield f"{_files(sorted(self.disk_files))} cannot be read, as a disk fails (EIO)"
        # Files of the right size with other bytes; in some of several chunks not one is right.
        names = np.array(self.manifest.columns.names, object)
        num_lost, num_stored = self.by_file
        damaged = {*names[num_lost > 0]} | {blob.item.file for blob in self.manifest.blobs if blob.key in self.items}
        damaged -= self.files.keys()
        swapped = damaged & {*names[(num_lost == num_stored) & (num_stored > 1)]}
        for group, fate in (
            (swapped, "none of the bytes that were written (another save's, perhaps)"),
            (damaged - swapped, "damaged bytes"),
        ):
            if group:
                yield f"{_files(sorted(group))} {'has' if len(group) == 1 else 'have'} {fate}"
        if self.holes:
            yield f"no file has some elements of {counted(len(self.holes), 'tensor')}"


_NO_KINDS = frozenset({"tensors", "other tensors"})
"""Nouns that say nothing about the role of a tensor."""


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


def damage_of_files(checkpoint: OpenCheckpoint, disk_errors: dict[str, DiskError] | None = None) -> Damage:
    """Return the losses of missing or cut files, by their names and sizes alone.

    Args:
        disk_errors: receives those of files that a disk cannot open, which are lost then; else they are raised.

    Raises:
        UnavailableError: it is not known whether a file is there.
    """
    manifest = checkpoint.outline
    files = checkpoint.lost_files() if disk_errors is None else checkpoint.lost_files(disk_errors.__setitem__)
    columns = manifest.columns

    def length(name: str) -> int:
        return (files[name] or 0) if name in files else MAX_ELEMENTS

    # Chunks and items that reach beyond the ends of their files.
    ends = np.array([*map(length, columns.names), 0], np.int64)
    chunks = (columns.item_end() > ends[columns.file]) & (manifest.elements > 0)
    items = frozenset(blob.key for blob in manifest.blobs if blob.item.end > length(blob.item.file))
    # Elements that no file has.
    holes = {}
    for tensor in manifest.tensors:
        box = Box.of(tensor.shape)
        if tensor.boxes.elements < box.numel:
            boxes = holes_in(box, tensor.boxes, _MAX_HOLES)
            holes[tensor.key] = tuple(boxes) if len(boxes) <= _MAX_HOLES else ()
    disk_files = frozenset(disk_errors or ())
    unopened = _refusals(checkpoint, files.keys() - disk_files)
    damage = Damage(manifest, chunks, items, files, unopened, disk_files, holes)
    return replace(damage, misplaced=misplaced_files(checkpoint, damage)) if files else damage


def _refusals(checkpoint: OpenCheckpoint, names: Iterable[str]) -> dict[str, str]:
    """Return why files that count as missing, and are there, cannot be opened."""
    refusals = {}
    for name in sorted(names):
        place = checkpoint.payloads.place(name)
        if is_there(place):
            try:
                with open_regular(place):
                    pass
            except SourceError as error:
                refusals[name] = str(error)
    return refusals


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
    lost_names = (names[number] for number in numbers if "/" not in names[number])
    suspects = [name for name in lost_names if name not in damage.unopened.keys() | damage.disk_files]
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


@dataclass(frozen=True, eq=False)
class FilesVerdict:
    """Facts about a checkpoint from descriptions, names and sizes of files, and its last verification.

    This decides whether a checkpoint is whole where its elements are not read.

    Attributes:
        damage: by the files.
        findings: those that the damage does not explain.
        last: the last verification of exactly these files.
    """

    damage: Damage
    findings: Sequence[Finding]
    last: Verification | None

    @classmethod
    def of(cls, checkpoint: OpenCheckpoint, last: Verification | None) -> FilesVerdict:
        damage = damage_of_files(checkpoint)
        return cls(damage, unexplained(damage, findings_by_files(checkpoint)), last)

    @property
    def is_complete(self) -> bool:
        """Whether all elements and items are there, and our description of them, whatever else is wrong."""
        return not self.damage and {finding.kind for finding in self.findings} <= HARMLESS - {"manifest"}

    @property
    def sentence(self) -> str:
        """The faults by the last verification, which has read all; else by the files."""
        if self.last is not None and not self.last.is_whole:
            return self.last.sentence
        return sentence_of(self.damage, self.findings)


def findings_by_files(checkpoint: OpenCheckpoint) -> list[Finding]:
    """Return the faults that the reader has met, and the descriptions that are missing or not as they were written."""
    findings = faults_of(checkpoint)
    if checkpoint.lacks_manifest:
        findings.append(Finding("manifest", f"{checkpoint.path} has lost its {MANIFEST_FILE}"))
    items = items_beside(checkpoint.path)
    if checkpoint.items_digest is not None and not is_there(items):
        message = f"{items} is missing, in which items were written beside this checkpoint"
        findings.append(Finding("items", message))
    return [*findings, *changed_descriptions(checkpoint, checkpoint.outline.files.keys())]


def changed_descriptions(checkpoint: OpenCheckpoint, names: Iterable[str]) -> Iterator[Finding]:
    """Compare the named files, which describe a checkpoint of ours to other programs, with their digests."""
    for name in sorted(names) if checkpoint.format is OWN else ():
        expected = checkpoint.outline.files[name]
        if not is_there(checkpoint.path / name):
            yield Finding("description", f"its {name} is missing, which other programs read")
            continue
        try:
            digest = xxh3_128([read_text_file(checkpoint.path / name)])
        except SourceError as error:
            digest = str(error)
        if digest != expected:
            message = f"its {name} is damaged: digest {digest}, expected {expected} by {MANIFEST_FILE}"
            yield Finding("description", message)


def faults_of(checkpoint: OpenCheckpoint) -> list[Finding]:
    """Return the faults that its reader has met."""

    def kind(fault: SourceError | DiskError) -> str:
        match fault:
            case DiskError():
                return "disk"
            case SeveralSavesError():
                return "several_saves"
            case MisdescribedError():
                return "description"
            case UnlistedError():
                return "unlisted"
        return "files"

    return [Finding(kind(fault), str(fault).removeprefix(f"{checkpoint.path}: ")) for fault in checkpoint.faults]


def unexplained(damage: Damage, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that the sentence about damage has not said already."""
    # A finding of the following kinds is a consequence of the damage.
    kinds = set[str]()
    if damage.files:  # the reader of `.metadata` stops at files that are missing, and says so
        kinds |= {"files", "disk", "missing_file", "cut_file", "metadata", "description"}
    if damage.chunks.any():
        kinds |= {"unreadable", "crc32c", "digest", "crc32", "fingerprint"}
    if damage.items:
        kinds.add("blob")
    if damage.holes:
        kinds |= {"coverage", "hole", "fingerprint"}
    keys = {*entry_keys(damage.tensors)} | damage.items
    findings = [finding for finding in findings if finding.kind not in kinds]
    return [finding for finding in findings if not (finding.kind == "metadata" and finding.key in keys)]


_SENTENCES: Mapping[str, str] = MappingProxyType(
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


def sentence_of(damage: Damage, findings: Sequence[Finding]) -> str:
    """Describe the faults of a checkpoint, in terms of a run; empty if there are none.

    Args:
        findings: what the damage does not explain.
    """
    sentences = [damage.sentence] if damage else []
    by_kind = defaultdict[str, list[Finding]](list)
    for finding in findings:
        by_kind[finding.kind].append(finding)
    for kind, group in by_kind.items():
        count = len({finding.key for finding in group})
        if kind in _SENTENCES:
            have = "has" if count == 1 else "have"
            sentences.append(_SENTENCES[kind].format(tensors=counted(count, "tensor"), have=have))
        else:
            sentences.append(listed([finding.message for finding in group], 1, "; "))
    return "; ".join(sentences)
