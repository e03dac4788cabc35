"""A page about a run: all its steps, which are whole, how norms, drift and sizes went, and its resumes."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from ...converters.compare.stats import STATS_MEMORY
from ...converters.look.inspection import inspection_of
from ...converters.look.run_history import (
    STEP_HEADERS,
    RunHistory,
    look_at_run,
    overview_of_run,
    state_of_run,
    step_row,
)
from ...names.errors import LayoutError, SourceError
from ...names.version import VERSION
from ...names.wording import Finding, unnumbered
from ...store.io.location import Remote, is_there
from ...store.reading.payloads import Progress
from ...store.verify.damage import NOTHING_LOST, Damage
from ...store.verify.diagnosis import Diagnosis
from ...store.verify.run import RunStep, judged
from .checkpoint_page import Reading, StatsChoice, verdict_of
from .document import HtmlPage, plain, rounded_columns
from .whole_parts import PageSource, in_turns, on_whole_parts


@dataclass(frozen=True, slots=True)
class TensorNumbers:
    """The norm of a tensor at a step, its finite elements, its stable rank (None if there is none), and its role."""

    role: str
    norm: float
    finite: int
    stable_rank: float | None


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The numbers of one readable step of a run.

    Attributes:
        findings: in the metadata and the numbers.
        since: the step that it is compared with; None if it is the first, or was not compared.
        tensors: the numbers of the measured tensors, by key.
        changes: the norm of the change of each tensor since that step, by key.
        left_out: the keys of tensors that were not measured because parts of them are lost.
        damage: what only reading has shown; `NOTHING_LOST` if there is no such.
    """

    findings: tuple[Finding, ...]
    since: str | None
    tensors: Mapping[str, TensorNumbers]
    changes: Mapping[str, float]
    left_out: frozenset[str]
    damage: Damage = NOTHING_LOST


_NO_NUMBERS = StepNumbers((), None, {}, {}, frozenset())
"""The contents of a step that cannot be read."""


@dataclass(frozen=True, slots=True)
class RunPage(HtmlPage):
    """A page about a run.

    Attributes:
        history: its steps, and what changed between them by their metadata.
        stats: the choice of numbers to measure.
        numbers: by the name of the step; those whose metadata cannot be read have none.
        diagnosis: what is wrong with the run, and what to do.
    """

    history: RunHistory
    stats: StatsChoice
    numbers: Mapping[str, StepNumbers]
    diagnosis: Diagnosis
    scripts = ("words", "frame", "findings", "table", "charts", "run")

    @property
    def name(self) -> str:
        return Path(str(self.history.run.path)).name

    @property
    def facts(self) -> Iterator[tuple[str, str]]:
        return state_of_run(self.history)

    @property
    def table(self) -> Sequence[Sequence[str]]:
        return (STEP_HEADERS, *map(step_row, reversed(self.history.steps)))

    @property
    def findings(self) -> int:
        """The number of findings in all steps, besides what the diagnosis tells."""
        return sum(len(step.findings) for step in self.numbers.values())

    def to_json(self) -> dict[str, Any]:
        """Return the data of the page, as docs/guide/report.md describes it."""
        findings, left_out, since = [], [], []
        for step in self.history.steps:
            numbers = self.numbers.get(step.name, _NO_NUMBERS)
            findings.append(plain(numbers.findings))
            left_out.append(len(numbers.left_out))
            since.append(numbers.since)
        return {
            "muonckpt": VERSION,
            **plain(self.history),
            "verdict": verdict_of(self.diagnosis, is_read=False),
            "overview": list(overview_of_run(self.history)),
            "measured": self.stats,
            "findings": findings,
            "left_out": left_out,
            "attempts": _attempts(self.history),
            "since": since,
            "series": plain(list(_series(self.history.steps, self.numbers))),
        }


def report_run(
    path: str | os.PathLike[str] | Remote,
    *,
    stats: StatsChoice = "norms",
    select: Sequence[str] = (),
    memory: int = STATS_MEMORY,
    jobs: int = 2,
    progress: Progress = lambda count, total: None,
) -> RunPage:
    """Make a page about all steps of a run, as ``muonckpt report RUN`` writes it; needs no torch.

    Damaged steps are on it, too: lost tensors are left out of the numbers.

    Args:
        path: the folder of the run: a path or a URL.
        stats: the numbers to measure.  With ``"none"`` no elements are read, and there are no norms and no drift; else
            those of each step are read twice, and once more for the step after it unless fingerprints tell that they
            are the same.
        select: shell patterns of the keys of weights and state to measure; by default all.
        memory: the most bytes of elements in memory.
        jobs: the number of threads.
        progress: called with the bytes read since the last call, and with the total of the present reading.

    Raises:
        SourceError: the folder cannot be read, or holds no checkpoint in a folder that ends with a number.
        TargetError: a pattern matches nothing.
    """
    return page_of_run(look_at_run(path), Reading(stats, select, memory, jobs), progress)


def page_of_run(history: RunHistory, reading: Reading, progress: Progress) -> RunPage:
    """Make a page as `report_run` does about a run whose metadata have been looked at."""
    next_progress = in_turns(progress)
    numbers: dict[str, StepNumbers] = {}
    # Two steps are open at once: each is compared with the readable one before it, the first with what was restored.
    attempts = _attempts(history)
    for attempt in sorted({*attempts}):
        members = [step for step, number in zip(history.steps, attempts, strict=True) if number == attempt]
        earlier: tuple[str, PageSource] | None = None
        with ExitStack() as stack:
            restored = {PurePath(resume.path).name for resume in history.resumes if resume.attempt == attempt}
            for step in (*(step for step in history.steps if step.name in restored), *members):
                if step.name not in history.views:
                    continue
                try:
                    source = PageSource.at(step.path, stack)
                except SourceError:
                    if is_there(step.path):
                        raise
                    continue  # it was removed since the run was looked at
                if step in members:
                    numbers[step.name] = _numbers_of(source, earlier, reading, next_progress())
                if earlier:
                    earlier[1].opened.close()
                earlier = step.name, source
    # The verdicts follow from what was read, so that row and exit code are of that.
    read = {name: step.damage for name, step in numbers.items() if step.damage is not NOTHING_LOST}
    steps = [judged(step, read[step.name]) if step.name in read else step for step in history.steps]
    history = replace(history, run=replace(history.run, steps=tuple(steps)), read=read)
    return RunPage(history, reading.stats, numbers, history.verdict.diagnosis)


def _attempts(history: RunHistory) -> list[int]:
    """Return the attempt that saved each step: the last that had begun, of an earlier step, when files were written.

    A step whose files were damaged or copied since then has a later time, and may be what an attempt began with.
    """
    begun_with = {resume.attempt: resume.step for resume in history.resumes}
    attempts = []
    for step in history.steps:
        attempt = bisect_right(history.resume_times, step.saved or 0)
        while begun_with.get(attempt, -1) >= step.step:
            attempt -= 1
        attempts.append(attempt)
    return attempts


def _numbers_of(
    source: PageSource, earlier: tuple[str, PageSource] | None, reading: Reading, progress: Progress
) -> StepNumbers:
    """Measure a step, and compare it with the one before, given by name and source."""
    findings = [*inspection_of(source.opened, source.look).symptoms]
    if reading.stats == "none":
        return StepNumbers(tuple(findings), None, {}, {}, frozenset())
    pair = [source, earlier[1]] if earlier else [source]
    try:
        (whole_source, *_), (stats, difference) = on_whole_parts(pair, reading.jobs, progress, reading.numbers)
    except (SourceError, LayoutError) as error:
        findings.append(Finding("unreadable", str(error)))
        return StepNumbers(tuple(findings), None, {}, {}, source.left_out)
    # Files, or the last verification, may have shown the damage before.
    read, known = whole_source.damage, source.diagnosis
    is_new = bool(read.sentence) and not (known.has_loss if read.has_loss else known)
    assert stats is not None, "something is measured"
    tensors = {t.key: TensorNumbers(t.role, t.figures.norm, t.figures.finite, t.stable_rank) for t in stats.tensors}
    selected_keys = {tensor.key for _, tensor in reading.selection(whole_source.look)}
    # The norm of the change of each tensor that both steps have in one shape.
    changes: dict[str, float] = {}
    for change in difference.tensors if difference else ():
        if change.by != "shape":
            changes[change.key] = change.statistics.norm_change if change.statistics else 0.0
    left_out = whole_source.left_out & selected_keys
    since = earlier[0] if earlier else None
    damage = read if is_new else NOTHING_LOST
    return StepNumbers((*findings, *stats.health), since, tensors, changes, left_out, damage)


def _series(steps: Sequence[RunStep], numbers: Mapping[str, StepNumbers]) -> Iterator[dict[str, Any]]:
    """Yield, for each parameter or slot in all layers, its norm, RMS, stable rank and drift at each step.

    Drift is the norm of the change since the step before, in terms of the norm there.  A value is None where a part of
    it is not known.
    """
    keys_by_pattern = defaultdict[tuple[str, str], dict[str, None]](dict)
    for step_numbers in numbers.values():
        for key, tensor in step_numbers.tensors.items():
            keys_by_pattern[unnumbered(key), tensor.role][key] = None
    for (pattern, role), keys in keys_by_pattern.items():
        points = [_values(numbers.get(step.name, _NO_NUMBERS), numbers, [*keys]) for step in steps]
        yield {"pattern": pattern, "role": role, "tensors": len(keys), **rounded_columns(points, _UNKNOWN)}


_UNKNOWN: Mapping[str, float | None] = {"norm": None, "rms": None, "stable_rank": None, "drift": None}


def _values(step: StepNumbers, numbers: Mapping[str, StepNumbers], keys: Sequence[str]) -> Mapping[str, float | None]:
    if not step.left_out.isdisjoint(keys):
        return _UNKNOWN
    tensors = [step.tensors[key] for key in keys if key in step.tensors]
    if not tensors:
        return _UNKNOWN
    norm = math.hypot(*(tensor.norm for tensor in tensors))
    finite = sum(tensor.finite for tensor in tensors)
    ranks = sorted(tensor.stable_rank for tensor in tensors if tensor.stable_rank is not None)
    # Drift needs every tensor at both steps, or it would be smaller than it is.
    earlier = numbers[step.since].tensors if step.since else {}
    earlier_norm = math.hypot(*(earlier[key].norm for key in keys if key in earlier))
    has_drift = earlier_norm > 0 and all(key in step.changes and key in earlier for key in keys)
    return {
        "norm": norm,
        "rms": norm / math.sqrt(finite) if finite else 0.0,
        "stable_rank": ranks[len(ranks) // 2] if ranks else None,
        "drift": math.hypot(*(step.changes[key] for key in keys)) / earlier_norm if has_drift else None,
    }
