"""Make the data of a page about a checkpoint, alone or beside another one, whole or damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...converters.compare.diff import Difference, diff_of
from ...converters.compare.stats import (
    STATS_MEMORY,
    CheckpointStats,
    Measurable,
    health_json,
    measurable,
    measured,
    siblings_of,
    stats_of,
)
from ...converters.look.contents import FirstLook
from ...converters.look.holders import bytes_by_file, cut_text, newton_schulz_by_rank
from ...converters.look.inspection import Inspection, description, inspection_of
from ...names.errors import DamageError, SourceError
from ...names.version import VERSION
from ...programs.model_view import ModelView, Role
from ...record.chunks import Boxes
from ...record.columns import UNKNOWN
from ...record.record import Manifest, entry_keys
from ...store.io.location import Remote, location
from ...store.reading.payloads import Progress, tensor_bytes
from ...store.verify.damage import Damage, rank_in_name
from ...store.verify.diagnosis import Diagnosis, diagnosis_at
from ...store.verify.verification import unless_removed
from .document import HtmlPage, plain, rounded, rounded_columns
from .whole_parts import PageSource, in_turns, on_whole_parts

StatsChoice = Literal["spectra", "norms", "none"]

_FIGURES = ("norm", "rms", "largest", "zeros", "nan", "infinite", "stable_rank", "spectrum")
"""Figures of each measured tensor on the page."""


@dataclass(frozen=True, slots=True)
class UnreadablePage(HtmlPage):
    """A page about a checkpoint whose description cannot be read: the fault, and the next step."""

    diagnosis: Diagnosis
    scripts = ("words", "frame", "findings", "unreadable")

    @property
    def name(self) -> str:
        return self.diagnosis.path.name

    @property
    def findings(self) -> int:
        """The number of findings besides what the diagnosis tells."""
        return 0

    def to_json(self) -> dict[str, Any]:
        """Return the data of the page."""
        return {
            "muonckpt": VERSION,
            "checkpoint": str(self.diagnosis.path),
            "verdict": verdict_of(self.diagnosis, self.diagnosis.damage.read),
        }


@dataclass(frozen=True, slots=True)
class Page(HtmlPage):
    """A page about a checkpoint.

    Attributes:
        look: its metadata by role.
        stats: its measured numbers, if any.
        difference: the changes since the other checkpoint (``a``), if there is one.
        diagnosis: its faults, and the next step.
        unmeasured, uncompared: the keys of tensors that were left out because parts of them are lost.
    """

    inspection: Inspection
    look: FirstLook
    stats: CheckpointStats | None
    difference: Difference | None
    diagnosis: Diagnosis
    unmeasured: frozenset[str] = frozenset()
    uncompared: frozenset[str] = frozenset()
    scripts = (
        "words", "frame", "findings", "table", "charts", "model", "rows", "map", "tensor", "sections", "checkpoint",
    )  # fmt: skip

    @property
    def name(self) -> str:
        return Path(self.inspection.checkpoint).name

    @property
    def facts(self) -> Iterator[tuple[str, str]]:
        return description(self.inspection)

    @property
    def findings(self) -> int:
        """The number of findings in the metadata and the numbers, besides what the diagnosis tells."""
        return len(self.inspection.symptoms) + len(self.stats.health if self.stats else ())

    def to_json(self) -> dict[str, Any]:
        """Return the data of the page, as docs/guide/report.md describes it."""
        manifest, ranks = self.inspection.manifest, self.inspection.bytes_of_ranks()
        work = newton_schulz_by_rank(self.look.view, list(ranks)) if ranks else None
        # Tables on the page refer to tensors by position.
        places = {tensor.key: number for number, tensor in enumerate(manifest.tensors)}
        stats = _stats_columns(self.stats, places) if self.stats else None
        unmeasured = sorted(places[key] for key in self.unmeasured)
        difference = self.difference.to_json() | {"left_out": sorted(self.uncompared)} if self.difference else None
        return {
            "muonckpt": VERSION,
            "overview": list(description(self.inspection)),
            "inspection": plain(self.inspection),
            "verdict": verdict_of(self.diagnosis, self.diagnosis.damage.read),
            "lost": lost_columns(self.diagnosis.damage, places),
            **shard_columns(manifest, self.look.view),
            "ranks": {"bytes": by_number(ranks), "newton_schulz": by_number(work)},
            "stats": plain(stats | {"left_out": unmeasured}) if stats else None,
            "difference": plain(difference),
        }


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

    Lost tensors are shown, and left out of the numbers.  Where the description is lost, the page has only the verdict.

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
        for place in places:
            stack.enter_context(unless_removed(place))
        next_progress = in_turns(progress)
        try:
            source = PageSource.at(places[0], stack)
        except DamageError:
            return UnreadablePage(diagnosis_at(places[0]))
        sources = [source]
        for place in places[1:]:
            sources.append(PageSource.at(place, stack))
        # Who reads elements also wants to know what else is damaged.
        if stats != "none":
            for number, damaged_source in enumerate(sources):
                if damaged_source.damage:
                    sources[number] = damaged_source.read_whole(jobs, next_progress())
        reading = Reading(stats, select, memory, jobs)
        [source, *earlier], (figures, difference) = on_whole_parts(sources, jobs, next_progress(), reading.numbers)
        selected_keys = {tensor.key for _, tensor in reading.selection(source.look)}
        return Page(
            inspection_of(source.opened, source.look),
            source.look,
            figures,
            difference,
            source.diagnosis,
            unmeasured=source.left_out & selected_keys,
            uncompared=source.left_out.union(*(other_source.left_out for other_source in earlier)),
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """Says which elements are read for a page, and with how much memory and how many threads."""

    stats: StatsChoice
    select: Sequence[str] = ()
    memory: int = STATS_MEMORY
    jobs: int = 2

    def selection(self, look: FirstLook) -> Measurable:
        """Return the tensors to measure."""
        return () if self.stats == "none" else measurable(look, self.select)

    def numbers(
        self, sources: Sequence[PageSource], progress: Progress
    ) -> tuple[CheckpointStats | None, Difference | None]:
        """Measure a checkpoint, and compare it with the other one if there is one, without what they have lost."""
        source, earlier = sources[0], sources[1] if len(sources) > 1 else None
        selection = []
        for role, tensor in self.selection(source.look):
            if tensor.key not in source.left_out:
                selection.append((role, tensor.without_empty_chunks()))

        # Both kinds of work advance one bar; the bytes to compare are known when the comparison begins.
        bytes_to_measure = sum(tensor_bytes(tensor) for _, tensor in selection)
        bytes_to_compare = 0

        def advance_comparison(count: int, total: int) -> None:
            nonlocal bytes_to_compare
            bytes_to_compare = total
            progress(count, total + bytes_to_measure)

        def advance_measurement(count: int) -> None:
            progress(count, bytes_to_compare + bytes_to_measure)

        difference = None
        if earlier is not None:
            difference = diff_of(
                (earlier.opened, earlier.look),
                (source.opened, source.look),
                without=source.left_out | earlier.left_out,
                memory=self.memory,
                jobs=self.jobs,
                progress=advance_comparison,
            )
        if self.stats == "none":
            return None, difference
        tensors = measured(
            source.opened,
            source.look,
            selection,
            spectra=self.stats == "spectra",
            memory=self.memory,
            jobs=self.jobs,
            passed=advance_measurement,
        )
        # The RMS of the change of each weight that both checkpoints have in one shape.
        weight_keys = {*entry_keys(source.look.view.tensors_of(Role.WEIGHTS))}
        changes: dict[str, float] = {}
        for change in difference.tensors if difference else ():
            if change.key in weight_keys and change.by != "shape":
                changes[change.key] = change.statistics.rms_change if change.statistics else 0.0
        earlier_opened, earlier_look = (earlier.opened, earlier.look) if earlier else (None, None)
        stats = stats_of(source.opened, source.look, tensors, earlier_opened, earlier_look, changes)
        return stats, difference


def verdict_of(verdict: Diagnosis, is_read: bool) -> dict[str, Any]:
    """Return the sentence and the remedies that every tool has; the sentence is empty if nothing is wrong."""
    return {"sentence": verdict.sentence, "remedies": plain(verdict.remedies), "read": is_read}


def lost_columns(damage: Damage, places: Mapping[str, int]) -> dict[str, Any]:
    """Return the lost shards, boxes, files and items as columns.

    ``shards``: runs of rows of the columns of shards, ``start`` and ``stop``.  ``holes``: ``tensor``, a position, and
    the boxes ``lo`` and ``hi`` that no file has.  ``files``: ``name``, and the ``reason`` why they are lost.
    ``items``: keys.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], damage.chunks, [False]]).astype(np.int8)))
    hole_tensors: list[int] = []
    for key, boxes in damage.holes.items():
        hole_tensors += [places[key]] * len(boxes)
    hole_boxes = [*chain.from_iterable(damage.holes.values())]
    return {
        "shards": {"start": edges[::2].tolist(), "stop": edges[1::2].tolist()},
        "holes": {
            "tensor": hole_tensors,
            "lo": [list(box.lo) for box in hole_boxes],
            "hi": [list(box.hi) for box in hole_boxes],
        },
        "files": {"name": list(damage.files), "reason": list(damage.files.values())},
        "items": sorted(damage.items),
    }


def _stats_columns(stats: CheckpointStats, places: Mapping[str, int]) -> dict[str, Any]:
    """Return the numbers as JSON data, with five significant digits.

    Figures are columns, and ``tensor`` a position in ``places``; rows of ``folded`` have ``members``, positions in
    columns.
    """
    # The page opens a folded row by the positions of its members.
    rows = {id(tensor): row for row, tensor in enumerate(stats.tensors)}
    folded = []
    for row, siblings in zip(stats.folded(), siblings_of(stats.tensors).values(), strict=True):
        folded.append({**rounded(row), "members": [rows[id(tensor)] for tensor in siblings]})
    figures = [tensor.to_json() for tensor in stats.tensors]
    return {
        "since": stats.since,
        "steps": stats.steps,
        "tensors": {
            "tensor": [places[tensor.key] for tensor in stats.tensors],
            **rounded_columns(figures, _FIGURES),
        },
        "folded": folded,
        "updates": stats.updates,
        "health": list(map(health_json, stats.health)),
    }


def shard_columns(manifest: Manifest, view: ModelView) -> dict[str, Any]:
    """Return tensors, their cuts and their shards as columns: a million shards take ten megabytes.

    ``tensors``: columns ``key``, ``role``, ``slot``, ``shape``, ``dtype``, ``bytes``, ``fingerprint`` and ``cut``, a
    position in ``cuts``.  ``cuts``: ``words``, and the boxes ``lo`` and ``hi``, one for each shard of a tensor.
    ``shards``, in the order of the tensors: columns ``file`` and ``offset``, of the elements or else of their item.
    ``files``: columns ``name``, ``rank`` (None if the name does not tell) and ``bytes`` of elements.
    """
    # Thousands of tensors have a few cuts, so each is stored once.
    cuts: dict[tuple[tuple[int, ...], Boxes], int] = {}
    texts: list[str] = []
    cut_indices = []
    for tensor in manifest.tensors:
        cut_index = cuts.setdefault((tensor.shape, tensor.boxes), len(cuts))
        if cut_index == len(texts):
            texts.append(cut_text(tensor))
        cut_indices.append(cut_index)
    cut_rows = []
    for (_, boxes), text in zip(cuts, texts, strict=True):
        cut_rows.append({"words": text, "lo": boxes.lo.tolist(), "hi": boxes.hi.tolist()})
    columns = manifest.columns
    return {
        "tensors": {
            "key": entry_keys(manifest.tensors),
            "role": [str(view.role(tensor)) for tensor in manifest.tensors],
            "slot": [tensor.slot for tensor in manifest.tensors],
            "shape": [list(tensor.shape) for tensor in manifest.tensors],
            "dtype": [tensor.dtype for tensor in manifest.tensors],
            "bytes": [tensor_bytes(tensor) for tensor in manifest.tensors],
            "fingerprint": [tensor.fingerprint for tensor in manifest.tensors],
            "cut": cut_indices,
        },
        "cuts": cut_rows,
        "shards": {
            "file": columns.file.tolist(),
            "offset": np.where(columns.payload() == UNKNOWN, columns.item, columns.payload()).tolist(),
        },
        "files": {
            "name": list(columns.names),
            "rank": list(map(rank_in_name, columns.names)),
            "bytes": bytes_by_file(manifest),
        },
    }


def by_number(shares: Mapping[int, int] | None) -> dict[str, list[int]] | None:
    """Return shares of ranks as columns ``rank`` and ``share``; None if unknown."""
    return {"rank": list(shares), "share": list(shares.values())} if shares else None
