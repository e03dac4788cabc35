"""A page about a checkpoint, alone or beside another one, whole or damaged: its data."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...converters.compare.diff import Difference, diff_of
from ...converters.compare.stats import (
    STATS_MEMORY,
    CheckpointStats,
    Measurable,
    bytes_of_elements,
    health_json,
    measurable,
    measured,
    siblings_of,
    stats_of,
)
from ...converters.look.contents import FirstLook
from ...converters.look.holders import chunk_bytes, cut_text, newton_schulz_by_rank
from ...converters.look.inspection import Inspection, description, inspection_of
from ...names.errors import DamageError, SourceError
from ...names.version import VERSION
from ...programs.model_view import ModelView, Role
from ...record.chunks import Boxes
from ...record.columns import UNKNOWN
from ...record.record import Manifest
from ...store.io.location import Remote, location
from ...store.reading.dtypes import itemsize
from ...store.reading.payloads import Progress
from ...store.verify.damage import Damage, rank_in_name
from ...store.verify.diagnosis import Diagnosis, diagnosis_at
from .document import html_of, plain, rounded, write_page
from .whole_parts import Looked, in_turns, on_whole_parts

StatsChoice = Literal["spectra", "norms", "none"]

_FIGURES = ("norm", "rms", "largest", "zeros", "nan", "infinite", "stable_rank", "spectrum")
"""Figures of each measured tensor on the page."""

_SCRIPTS = ("words", "frame", "findings", "table", "charts", "model", "rows", "map", "tensor", "sections", "checkpoint")
_UNREADABLE_SCRIPTS = ("words", "frame", "findings", "unreadable")


@dataclass(frozen=True, slots=True)
class UnreadablePage:
    """A page about a checkpoint whose description cannot be read: what is wrong, and what to do."""

    diagnosis: Diagnosis

    @property
    def lines(self) -> Iterator[str]:
        """The lines for a terminal, as of `Page`."""
        return self.diagnosis.lines

    @property
    def findings(self) -> int:
        """The number of findings besides what the diagnosis tells."""
        return 0

    def to_json(self) -> dict[str, Any]:
        """Return the data of the page."""
        return {
            "muonckpt": VERSION,
            "checkpoint": str(self.diagnosis.path),
            "verdict": verdict_of(self.diagnosis),
        }

    def html(self) -> str:
        return html_of(f"{self.diagnosis.path.name} - muonckpt report", self.to_json(), _UNREADABLE_SCRIPTS)

    def write(self, file: str | os.PathLike[str]) -> int:
        """Write the page as `Page.write` does."""
        return write_page(file, self.html())


@dataclass(frozen=True, slots=True)
class Page:
    """A page about a checkpoint.

    Attributes:
        known: its metadata by role.
        stats: its measured numbers, if any.
        difference: the changes since the other checkpoint (``a``), if there is one.
        diagnosis: what is wrong with it, and what to do.
        unmeasured, uncompared: the keys of tensors that were left out because parts of them are lost.
    """

    inspection: Inspection
    known: FirstLook
    stats: CheckpointStats | None
    difference: Difference | None
    diagnosis: Diagnosis
    unmeasured: frozenset[str] = frozenset()
    uncompared: frozenset[str] = frozenset()

    @property
    def lines(self) -> Iterator[str]:
        """The lines for a terminal that say what is wrong, and what to do; none if nothing is wrong."""
        return self.diagnosis.lines

    @property
    def findings(self) -> int:
        """The number of findings in the metadata and the numbers, besides what the diagnosis tells."""
        told = told_by(self.diagnosis.damage)
        symptoms = [symptom for symptom in self.inspection.symptoms if symptom.kind not in told]
        return len(symptoms) + len(self.stats.health if self.stats else ())

    def to_json(self) -> dict[str, Any]:
        """Return the data of the page, as docs/guide/report.md describes it."""
        manifest, ranks = self.inspection.manifest, self.inspection.bytes_of_ranks()
        work = newton_schulz_by_rank(self.known.view, list(ranks)) if ranks else None
        places = {tensor.key: number for number, tensor in enumerate(manifest.tensors)}
        stats = _stats_columns(self.stats, places) if self.stats else None
        unmeasured = sorted(places[key] for key in self.unmeasured)
        difference = self.difference.to_json() | {"left_out": sorted(self.uncompared)} if self.difference else None
        return {
            "muonckpt": VERSION,
            "overview": list(description(self.inspection)),
            "inspection": plain(self.inspection),
            "verdict": verdict_of(self.diagnosis),
            "lost": lost_columns(self.diagnosis.damage, places),
            **shard_columns(manifest, self.known.view),
            "ranks": {"bytes": by_number(ranks), "newton_schulz": by_number(work)},
            "stats": plain(stats | {"left_out": unmeasured}) if stats else None,
            "difference": plain(difference),
        }

    def html(self) -> str:
        return html_of(f"{Path(self.inspection.checkpoint).name} - muonckpt report", self.to_json(), _SCRIPTS)

    def write(self, file: str | os.PathLike[str]) -> int:
        """Write the page into a local file, which appears whole and replaces an earlier one; return its bytes.

        Raises:
            DestinationError: it cannot be written.
        """
        return write_page(file, self.html())


def report(
    path: str | os.PathLike[str] | Remote,
    other: str | os.PathLike[str] | Remote | None = None,
    *,
    stats: StatsChoice = "spectra",
    select: Sequence[str] = (),
    memory: int = STATS_MEMORY,
    jobs: int = 2,
    progress: Progress = lambda count, total: None,
) -> Page | UnreadablePage:
    """Make a page about a checkpoint, whole or damaged, as ``muonckpt report`` writes it; needs no torch.

    What is lost is shown, and left out of the numbers.  Where the description is lost, the page has only the verdict.

    Args:
        path: a path or a URL, of any format.
        other: another checkpoint, such as an earlier one of the run; the page shows the changes since.
        stats: the numbers to measure; with ``"none"`` elements are read only for a comparison.
        select: shell patterns of the keys of weights and state to measure; by default all.
        memory: the most bytes of elements in memory.
        jobs: the number of threads.
        progress: called with the bytes read since the last call, and with the total.

    Raises:
        SourceError: there is no checkpoint, or the metadata of the other one cannot be read.
        TargetError: a pattern matches nothing.
    """
    places = [location(place, SourceError) for place in (path, other) if place is not None]
    with ExitStack() as stack:
        turn = in_turns(progress)
        try:
            own = Looked.at(places[0], stack)
        except DamageError:
            return UnreadablePage(diagnosis_at(places[0]))
        looked: Sequence[Looked] = [own, *(Looked.at(place, stack) for place in places[1:])]
        if stats != "none":  # who reads elements also wants to know what else is damaged
            looked = [one.read_whole(jobs, turn()) if one.damage else one for one in looked]
        reading = Reading(stats, select, memory, jobs)
        looked, (found, difference) = on_whole_parts(looked, jobs, turn(), reading.numbers)
        own = looked[0]
        chosen = {tensor.key for _, tensor in reading.chosen(own.known)}
        return Page(
            inspection_of(own.opened, own.known),
            own.known,
            found,
            difference,
            own.diagnosis,
            unmeasured=own.left_out & chosen,
            uncompared=frozenset[str]().union(*(one.left_out for one in looked)),
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read of elements for a page, and with how much memory and how many threads."""

    stats: StatsChoice
    select: Sequence[str] = ()
    memory: int = STATS_MEMORY
    jobs: int = 2

    def chosen(self, known: FirstLook) -> Measurable:
        """Return the tensors to measure."""
        return () if self.stats == "none" else measurable(known, self.select)

    def numbers(self, looked: Sequence[Looked], progress: Progress) -> tuple[CheckpointStats | None, Difference | None]:
        """Measure a checkpoint, and compare it with the other one if there is one, without what they have lost."""
        own, *others = looked
        whole = [(role, tensor) for role, tensor in self.chosen(own.known) if tensor.key not in own.left_out]
        chosen = [(role, tensor.without_empty_chunks()) for role, tensor in whole]
        to_measure = bytes_of_elements(tensor for _, tensor in chosen)
        to_compare = 0

        def compared(count: int, total: int) -> None:
            nonlocal to_compare
            to_compare = total
            progress(count, total + to_measure)

        def passed(count: int) -> None:
            progress(count, to_compare + to_measure)

        memory, jobs, difference = self.memory, self.jobs, None
        for other in others:
            sides, without = ((one.opened, one.known) for one in (other, own)), own.left_out | other.left_out
            difference = diff_of(*sides, without=without, memory=memory, jobs=jobs, progress=compared)
        if self.stats == "none":
            return None, difference
        spectra, weights = self.stats == "spectra", own.known.view.tensors_of(Role.WEIGHTS)
        tensors = measured(own.opened, own.known, chosen, spectra=spectra, memory=memory, jobs=jobs, passed=passed)
        keys = {tensor.key for tensor in weights}
        changes = {  # root mean squares, where both checkpoints have a weight in one shape
            tensor.key: tensor.statistics.rms_change if tensor.statistics else 0.0
            for tensor in (difference.tensors if difference else ())
            if tensor.key in keys and tensor.by != "shape"
        }
        earlier, before = ((others[0].opened, others[0].known)) if others else (None, None)
        return stats_of(own.opened, own.known, tensors, earlier, before, changes), difference


def verdict_of(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the sentence and the remedies that every tool has; the sentence is empty if nothing is wrong."""
    remedies = [{"command": one.command, "gives": one.gives} for one in diagnosis.remedies]
    return {"sentence": diagnosis.sentence, "remedies": remedies, "read": diagnosis.damage.read}


def lost_columns(damage: Damage, places: Mapping[str, int]) -> dict[str, Any]:
    """Return what is lost, as columns.

    ``shards``: runs of rows of the columns of shards, ``start`` and ``stop``.  ``holes``: ``tensor``, a position, and
    the boxes ``lo`` and ``hi`` that no file has.  ``files``: ``name``, and the ``bytes`` that are left, None if it is
    missing.  ``items``: keys.  ``told``: kinds of findings that the verdict has told.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], damage.chunks, [False]]).astype(np.int8)))
    holes = [(places[key], box) for key, boxes in damage.holes.items() for box in boxes]
    return {
        "shards": {"start": edges[::2].tolist(), "stop": edges[1::2].tolist()},
        "holes": {
            "tensor": [number for number, _ in holes],
            "lo": [list(box.lo) for _, box in holes],
            "hi": [list(box.hi) for _, box in holes],
        },
        "files": {"name": list(damage.files), "bytes": list(damage.files.values())},
        "items": sorted(damage.items),
        "told": sorted(told_by(damage)),
    }


def told_by(damage: Damage) -> frozenset[str]:
    """Return the kinds of findings that the sentence about damage has told."""
    return frozenset({"missing_file", "cut_file", "hole"}) if damage else frozenset()


def _stats_columns(stats: CheckpointStats, places: Mapping[str, int]) -> dict[str, Any]:
    """Return the numbers as JSON data, with five significant digits.

    Figures are columns, and ``tensor`` a position in ``places``; rows of ``folded`` have ``members``, positions in
    columns.
    """
    rows = {id(tensor): row for row, tensor in enumerate(stats.tensors)}
    figures = [tensor.to_json() for tensor in stats.tensors]
    members = [[rows[id(tensor)] for tensor in group] for group in siblings_of(stats.tensors).values()]
    return {
        "since": stats.since,
        "steps": stats.steps,
        "tensors": {
            "tensor": [places[tensor.key] for tensor in stats.tensors],
            **{name: [rounded(row[name]) for row in figures] for name in _FIGURES},
        },
        "folded": [
            {name: rounded(value) for name, value in row.items()} | {"members": own}
            for row, own in zip(stats.folded(), members, strict=True)
        ],
        "updates": stats.updates,
        "health": [health_json(finding) for finding in stats.health],
    }


def shard_columns(manifest: Manifest, view: ModelView) -> dict[str, Any]:
    """Return tensors, their cuts and their shards as columns: a million shards take ten megabytes.

    ``tensors``: columns ``key``, ``role``, ``slot``, ``shape``, ``dtype``, ``bytes``, ``fingerprint`` and ``cut``, a
    position in ``cuts``.  ``cuts``: ``words``, and the boxes ``lo`` and ``hi``, one for each shard of a tensor.
    ``shards``, in the order of the tensors: columns ``file`` and ``offset``, of the elements or else of their item.
    ``files``: columns ``name``, ``rank`` (None if the name does not tell) and ``bytes`` of elements.
    """
    cuts: dict[tuple[tuple[int, ...], Boxes], int] = {}
    words: list[str] = []
    cut_of = []
    for tensor in manifest.tensors:
        number = cuts.setdefault((tensor.shape, tensor.boxes), len(cuts))
        if number == len(words):
            words.append(cut_text(tensor))
        cut_of.append(number)
    columns = manifest.columns
    held = np.zeros(len(columns.names), np.int64)
    np.add.at(held, columns.file, chunk_bytes(manifest))
    return {
        "tensors": {
            "key": [tensor.key for tensor in manifest.tensors],
            "role": [str(view.role(tensor)) for tensor in manifest.tensors],
            "slot": [tensor.slot for tensor in manifest.tensors],
            "shape": [list(tensor.shape) for tensor in manifest.tensors],
            "dtype": [tensor.dtype for tensor in manifest.tensors],
            "bytes": [math.prod(tensor.shape) * itemsize(tensor.dtype) for tensor in manifest.tensors],
            "fingerprint": [tensor.fingerprint for tensor in manifest.tensors],
            "cut": cut_of,
        },
        "cuts": [
            {"words": text, "lo": boxes.lo.tolist(), "hi": boxes.hi.tolist()}
            for (_, boxes), text in zip(cuts, words, strict=True)
        ],
        "shards": {
            "file": columns.file.tolist(),
            "offset": np.where(columns.payload() == UNKNOWN, columns.item, columns.payload()).tolist(),
        },
        "files": {
            "name": list(columns.names),
            "rank": [rank_in_name(name) for name in columns.names],
            "bytes": held.tolist(),
        },
    }


def by_number(shares: Mapping[int, int] | None) -> dict[str, list[int]] | None:
    """Return shares of ranks as columns ``rank`` and ``share``; None if unknown."""
    return {"rank": list(shares), "share": list(shares.values())} if shares else None
