"""What a checkpoint has lost, in terms of a run, and what to do about it: one description, whoever looks.

`verify` finds damage by reading everything; `inspect`, `diff`, `report` and `load` by the presence and the sizes of
files alone.  All of them say it in the same sentence, and give the same commands.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ..box import Box
from ..layout import holes_in
from ..record import Manifest, StateRecord
from ..vocabulary import EXP_AVG, EXP_AVG_SQ, MASTER, MOMENTUM, SECOND_MOMENT, STEP
from ..wording import counted, size
from .open_checkpoint import OpenCheckpoint
from .reading.dtypes import itemsize

_RANK_IN_NAME = re.compile(
    r"(?:.*/)?(?:__([0-9]{1,7})_[0-9]+\.distcp|(?:rank|layer_wise_optimizer)_([0-9]{1,7})\.[a-z]+)"
)
"""Names of files that a rank writes alone: DCP, flat buffers, layer-wise files."""


@lru_cache(maxsize=1 << 16)
def rank_in_name(file: str) -> int | None:
    """Return the rank that wrote a file, if the file's name tells."""
    match = _RANK_IN_NAME.fullmatch(file)
    return None if match is None else int(match[1] or match[2])


_NAMES: Mapping[str | None, str] = MappingProxyType(
    {
        None: "weights",
        MOMENTUM: "momenta",
        SECOND_MOMENT: "second moments",
        EXP_AVG: "moments",
        EXP_AVG_SQ: "moments",
        STEP: "step counters",
        MASTER: "master weights",
    }
)
"""What people call the tensors of a slot."""


def kind_of(tensor: StateRecord) -> str:
    """Return what people call such tensors, in the plural, as far as the checkpoint itself says what they are."""
    return _NAMES.get(tensor.slot, f"state {tensor.slot!r}")


@dataclass(frozen=True, eq=False)
class Damage:
    """What of a checkpoint is lost.

    Attributes:
        manifest: of the checkpoint, as far as it could be read.
        chunks: for each chunk, in the order of ``manifest.columns``, whether it is lost.
        items: the keys of the items that are lost.
        files: the files that are missing (None) or shorter than was recorded (their length in bytes).
        holes: boxes of tensors, by key, that no chunk covers, although the tensor has them.
        read: whether all bytes were compared with what was recorded; else only the files' sizes.
    """

    manifest: Manifest
    chunks: NDArray[np.bool_]
    items: frozenset[str] = frozenset()
    files: Mapping[str, int | None] = field(default_factory=dict)
    holes: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    read: bool = False

    def __bool__(self) -> bool:
        return bool(self.chunks.any() or self.items or self.files or self.holes)

    @cached_property
    def starts(self) -> list[int]:
        """The number of the first chunk of each tensor, and at the end the number of all."""
        return np.cumsum([0, *(len(tensor.chunks) for tensor in self.manifest.tensors)]).tolist()

    def lost_boxes(self) -> Iterator[tuple[StateRecord, tuple[Box, ...]]]:
        """Yield the tensors that have lost elements, and the boxes of these."""
        for tensor, start in zip(self.manifest.tensors, self.starts, strict=False):
            lost = np.flatnonzero(self.chunks[start : start + len(tensor.chunks)]).tolist()
            if boxes := (*map(tensor.boxes.__getitem__, lost), *self.holes.get(tensor.key, ())):
                yield tensor, boxes

    def sentence(self, kind: Callable[[StateRecord], str] = kind_of) -> str:
        """Return what is lost, as one sentence for people; ``kind`` says what a tensor is, in the plural."""
        lost = list(self.lost_boxes())
        stored = int((self.manifest.elements > 0).sum())
        bytes_lost = sum(sum(box.numel for box in boxes) * itemsize(tensor.dtype) for tensor, boxes in lost)
        parts = []
        if lost:
            parts.append(f"{int(self.chunks.sum())} of {counted(stored, 'chunk')}, {size(bytes_lost)}")
        if self.items:
            parts.append(f"{len(self.items)} of {counted(len(self.manifest.blobs), 'item')} that are not tensors")
        kinds = Counter(kind(tensor) for tensor, _ in lost)
        what = ", ".join(f"{name} of {count}" for name, count in kinds.items())
        of_tensors = f": {what}{' tensors' if len(lost) > 1 else ' tensor'}" if what else ""
        rest = "all else is whole" if self.read else "all other files have their size"
        cause = "; ".join(self._causes()) or "bytes are not those that were written"
        return f"{cause}: lost are {' and '.join(parts)}{of_tensors}; {rest}" if parts else f"{cause}; {rest}"

    def _causes(self) -> Iterator[str]:
        missing = sorted(name for name, length in self.files.items() if length is None)
        cut = sorted(name for name, length in self.files.items() if length is not None)
        for names, fate in ((missing, "missing"), (cut, "cut short")):
            if names:
                yield f"{_files(names)} {'is' if len(names) == 1 else 'are'} {fate}"
        columns = self.manifest.columns
        damaged: defaultdict[str, int] = defaultdict(int)
        for number, count in zip(*np.unique(columns.file[self.chunks], return_counts=True), strict=True):
            if (name := columns.names[number]) not in self.files:
                damaged[name] += int(count)
        if damaged:
            yield f"{_files(sorted(damaged))} {'has' if len(damaged) == 1 else 'have'} damaged bytes"
        if self.holes:
            yield f"no file has some elements of {counted(len(self.holes), 'tensor')}"


def _files(names: Sequence[str]) -> str:
    ranks = [rank for rank in map(rank_in_name, names) if rank is not None]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if len(ranks) < len(names):
        return f"{counted(len(names), 'file')} ({shown})" if len(names) > 1 else f"the file {shown}"
    if len(names) == 1:
        return f"rank {ranks[0]}'s file {shown}"
    return f"the files of ranks {', '.join(map(str, sorted({*ranks})[:8]))}{' …' * (len({*ranks}) > 8)} ({shown})"


NOTHING_LOST = Damage(Manifest(()), np.zeros(0, np.bool_))


_MOST_HOLES = 256
"""The most holes of a tensor that are listed, else none: lost files leave few, hostile boxes very many."""


def damage_of_files(checkpoint: OpenCheckpoint) -> Damage:
    """Return what is lost with files that are missing or cut, by their names and sizes alone."""
    manifest, files = checkpoint.outline, checkpoint.lost_files
    columns = manifest.columns
    ends = np.array([_length(files, name) for name in columns.names] or [0], np.int64)
    lost = (columns.item + columns.item_length > ends[columns.file]) & (manifest.elements > 0)
    items = frozenset(blob.key for blob in manifest.blobs if blob.item.end > _length(files, blob.item.file))
    holes = {}
    for tensor in manifest.tensors:
        if tensor.boxes.elements < Box.of(tensor.shape).numel:
            left = holes_in(Box.of(tensor.shape), tensor.boxes, _MOST_HOLES)
            holes[tensor.key] = tuple(left) if len(left) <= _MOST_HOLES else ()
    return Damage(manifest, lost, items, files, holes)


def _length(files: Mapping[str, int | None], name: str) -> int:
    """Return the bytes that a file has, where it is one of these; all there can be for any other."""
    return files[name] or 0 if name in files else np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something to do about damage: a ``command`` for a shell, or a line of Python, and what that gives."""

    command: str
    gives: str

    def __str__(self) -> str:
        return f"{self.command}\n    {self.gives}"


def command(*words: object) -> str:
    """Return a command of ours as it can be pasted into a shell."""
    return shlex.join(["muonckpt", *map(str, words)])


def numbered(remedies: Iterable[Remedy]) -> str:
    """Return remedies as the end of an error message: "what to do: (a) …; (b) …"."""
    listed = [f"({chr(ord('a') + number)}) {one.command}: {one.gives}" for number, one in enumerate(remedies)]
    return f"What to do: {'; '.join(listed)}" if listed else ""
