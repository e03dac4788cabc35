"""A run as its checkpoints tell it: which steps there are, which are whole, and what changed between them.

All of it from metadata; fingerprints, where they are recorded, tell which tensors have changed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from ...names.errors import SourceError
from ...names.wording import counted, fields_of, listed, moment, shape_text, size
from ...programs.model_view import ModelView, Role
from ...record.record import StateRecord, by_key, no_chunks
from ...runs.resumes import Resume, resumes_of
from ...runs.run_verdict import RunVerdict, verdict_on
from ...store.io.location import Location, Remote, location
from ...store.open_checkpoint import OpenCheckpoint
from ...store.verify.damage import Damage
from ...store.verify.run import Run, RunStep, look_at_folder, viewed_run_of
from ...store.verify.step_names import NumberedName
from .contents import first_look, option_value
from .holders import writing_ranks


@dataclass(frozen=True, slots=True)
class StepView:
    """The metadata of one checkpoint of a run.

    Attributes:
        format: what a user calls it.
        ranks: how many processes wrote it; None if that is recorded nowhere.
        view: the model view, without chunks and parameters: a run has many steps.
    """

    format: str
    ranks: int | None
    view: ModelView

    @classmethod
    def of(cls, opened: OpenCheckpoint) -> StepView:
        # The chunks of all steps would not fit into memory.
        look = first_look(opened)
        tensors: dict[Role, tuple[StateRecord, ...]] = {}
        for role, members in look.view.tensors.items():
            tensors[role] = tuple(replace(tensor, chunks=no_chunks(len(tensor.shape))) for tensor in members)
        # A reshard keeps the provenance, but writes for other ranks.
        world = look.manifest.provenance.get("world")
        is_recorded = isinstance(world, int) and not look.manifest.provenance.get("resharded")
        ranks = world if is_recorded else len(writing_ranks(look.manifest)) or None
        return cls(opened.format.name, ranks, replace(look.view, tensors=tensors, parameters={}, owners={}))

    @property
    def program(self) -> str:
        """The program whose keys it has; empty if unknown."""
        return self.view.dialect.name if self.view.dialect else ""

    def tensors(self) -> dict[str, StateRecord]:
        return by_key(self.view.tensors_of(*self.view.tensors))

    def options(self) -> dict[str, Mapping[str, Any]]:
        """Return the options of each parameter's group, by name."""
        options: dict[str, Mapping[str, Any]] = {}
        for group in self.view.groups:
            options |= dict.fromkeys(group.parameters, group.options)
        return options


@dataclass(frozen=True, slots=True)
class StepChange:
    """Changes from one readable step of a run to the next; ``lines`` print them.

    Attributes:
        since, name: the names of both steps.
        added, removed: the keys of tensors that only the later, or only the earlier one has.
        reshaped: of tensors whose shape or dtype changed, both, by key.
        options: each change of an option: its name, both values, and the number of parameters that it concerns.
        ranks, programs: of both steps.
        moved: for each role of tensors, how many changed, stayed the same, and have no fingerprint on one side.
    """

    since: str
    name: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    reshaped: Mapping[str, tuple[str, str]]
    options: tuple[tuple[str, Any, Any, int], ...]
    ranks: tuple[int | None, int | None]
    programs: tuple[str, str]
    moved: Mapping[str, tuple[int, int, int]]

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines())

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many tensors in both changed, stayed the same, and cannot be compared by fingerprints."""
        changed, same, unknown = map(sum, zip((0, 0, 0), *self.moved.values(), strict=True))
        return changed, same, unknown

    @property
    def is_one_step(self) -> bool:
        """Whether both are the same step, of two runs or of two attempts, whose tensors may well be equal."""
        numbers = [NumberedName.parsed(name) for name in (self.since, self.name)]
        return len({numbered.step.step for numbered in numbers if numbered}) == 1

    @property
    def differs(self) -> bool:
        """Whether anything is known to differ but the number of ranks."""
        return bool(self.added or self.removed or self.reshaped or self.options or self.counts[0])

    def _lines(self) -> Iterator[str]:
        # Who wrote it, then tensors, options, and what stood still.
        if self.programs[0] != self.programs[1]:
            yield f"keys of {self.programs[0] or 'an unknown program'}, then of {self.programs[1] or 'an unknown one'}"
        if self.ranks[0] != self.ranks[1]:
            yield f"ranks {self.ranks[0] or 'unknown'} -> {self.ranks[1] or 'unknown'}"
        for word, keys in (("new", self.added), ("gone", self.removed)):
            if keys:
                yield f"{counted(len(keys), 'tensor')} {word}: {listed(keys, 3)}"
        for key, (before, after) in list(self.reshaped.items())[:3]:
            yield f"{key}: {before} -> {after}"
        if len(self.reshaped) > 3:
            yield f"and {len(self.reshaped) - 3} more tensors of another shape or dtype"
        for name, before, after, count in self.options:
            yield f"{name} {option_value(before)} -> {option_value(after)} ({counted(count, 'parameter')})"
        for role, (changed, same, unknown) in self.moved.items():
            if same and role in _TRAINED and not self.is_one_step:
                total = counted(changed + same + unknown, "tensor")
                yield f"{same} of {total} of {role} did not change: frozen, without gradients, or stale"

    def to_json(self) -> dict[str, Any]:
        options = [dict(zip(_OPTION_FIELDS, option, strict=True)) for option in self.options]
        moved = {role: dict(zip(_MOVED_FIELDS, counts, strict=True)) for role, counts in self.moved.items()}
        return {**fields_of(self), "options": options, "moved": moved, "lines": self.lines}


_OPTION_FIELDS = ("option", "before", "after", "parameters")
_MOVED_FIELDS = ("changed", "same", "unknown")

_TRAINED = frozenset({Role.WEIGHTS, Role.MOMENTUM, Role.MOMENTS, Role.MASTERS})

_ABSENT = "absent"


def change_between(since: str, before: StepView, name: str, after: StepView) -> StepChange:
    """Compare two checkpoints of one run, or of two."""
    # Tensors of both by shape and dtype, and where both record a fingerprint, by that.
    old_tensors, new_tensors = before.tensors(), after.tensors()
    moved = {str(role): [0, 0, 0] for role in after.view.tensors}
    reshaped = {}
    for key, new in new_tensors.items():
        old = old_tensors.get(key)
        if old is None:
            continue
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            reshaped[key] = f"{shape_text(old.shape)} {old.dtype}", f"{shape_text(new.shape)} {new.dtype}"
        is_comparable = None not in (old.fingerprint, new.fingerprint)
        moved[after.view.role(new)][int(old.fingerprint == new.fingerprint) if is_comparable else 2] += 1
    # Options by parameter: each change once, with the number of parameters that it concerns.
    old_options, new_options = before.options(), after.options()
    changes: Counter[tuple[str, str]] = Counter()
    values: dict[tuple[str, str], tuple[str, Any, Any]] = {}
    for parameter in (parameter for parameter in new_options if parameter in old_options):
        old_group, new_group = old_options[parameter], new_options[parameter]
        if old_group == new_group:
            continue
        for option in dict.fromkeys((*new_group, *old_group)):
            pair = old_group.get(option, _ABSENT), new_group.get(option, _ABSENT)
            if pair[0] != pair[1]:
                changes[option, repr(pair)] += 1
                values[option, repr(pair)] = option, *pair
    return StepChange(
        since,
        name,
        added=tuple(key for key in new_tensors if key not in old_tensors),
        removed=tuple(key for key in old_tensors if key not in new_tensors),
        reshaped=reshaped,
        options=tuple((*values[key], count) for key, count in changes.items()),
        ranks=(before.ranks, after.ranks),
        programs=(before.program, after.program),
        moved={role: (counts[0], counts[1], counts[2]) for role, counts in moved.items()},
    )


@dataclass(frozen=True)
class RunHistory:
    """The steps of a run, and what their metadata say.

    Attributes:
        run: the folder with its steps.
        views: by the name of the step; those whose metadata cannot be read have none.
        resume_times: when the run was resumed, as `Series` has recorded it, in seconds since 1970 and in order.
        resumes: the last ones, the oldest first.
        unread_resumes: a sentence about what of their record cannot be read; empty if all is.
        read: the damage that reading has shown, by the names of steps.
    """

    run: Run
    views: Mapping[str, StepView]
    resume_times: tuple[float, ...] = ()
    resumes: tuple[Resume, ...] = ()
    unread_resumes: str = ""
    read: Mapping[str, Damage] = field(default_factory=dict)

    @cached_property
    def verdict(self) -> RunVerdict:
        """The faults of the run, and the next steps."""
        return verdict_on(self.run, self.resumes, self.read)

    @property
    def steps(self) -> tuple[RunStep, ...]:
        return self.run.steps

    @property
    def newest_whole(self) -> RunStep | None:
        return self.run.newest_whole

    @cached_property
    def changes(self) -> tuple[StepChange, ...]:
        """Changes between each two consecutive steps whose metadata can be read."""
        names = [step.name for step in self.steps if step.name in self.views]
        return tuple(change_between(a, self.views[a], b, self.views[b]) for a, b in pairwise(names))

    def to_json(self) -> dict[str, Any]:
        pointer = self.run.pointer
        return {
            "run": str(self.run.path),
            "steps": self.steps,
            "newest_whole": self.newest_whole.name if self.newest_whole else None,
            "pointer": {"file": pointer.file, "text": pointer.text, "names": pointer.name} if pointer else None,
            "changes": self.changes,
            "missing": self.verdict.missing,
            "verdict": self.verdict.diagnosis,
            "resume_times": self.resume_times,
            "resumes": [{**fields_of(resume), "verdict": resume.verdict} for resume in self.resumes],
            "unread_resumes": self.unread_resumes,
        }


def look_at_run(path: str | os.PathLike[str] | Remote) -> RunHistory:
    """Look at all checkpoints of a run, of any program, as ``muonckpt inspect RUN`` shows them.

    Reads the metadata of each, and no elements; writes nothing.

    Args:
        path: the folder of the run: a path, or a URL such as ``s3://bucket/run``.

    Raises:
        SourceError: it is no folder, or holds no checkpoint in a folder that ends with a number.
        UnavailableError: the folder cannot be looked at.
    """
    place = location(path, SourceError)
    run, views = look_at_folder(place, StepView.of)
    if not run.steps:
        raise SourceError(f"expected checkpoints in folders that end with the number of a step in {place}, found none")
    return _with_resumes(run, views)


def history_of(path: Location) -> RunHistory | None:
    """Look at a run as `look_at_run` does; None if the path is not the folder of one."""
    if (viewed := viewed_run_of(path, StepView.of)) is None:
        return None
    return _with_resumes(*viewed)


def _with_resumes(run: Run, views: Mapping[str, StepView]) -> RunHistory:
    times, resumes, unread = resumes_of(run.path)
    return RunHistory(run, views, resume_times=times, resumes=resumes, unread_resumes=unread)


def overview_of_run(history: RunHistory) -> Iterator[tuple[str, str]]:
    """Yield what there is to know about a run beside the table of its steps, as labelled lines."""
    yield from state_of_run(history)
    # How it went on from step to step.
    for change in history.changes:
        for number, line in enumerate(change.lines):
            yield "" if number else "changed", line if number else f"{change.since} -> {change.name}: {line}"
    yield from resume_lines(history)


def state_of_run(history: RunHistory) -> Iterator[tuple[str, str]]:
    """Yield which steps are here, which are not whole, and where a resume would begin, as labelled lines."""
    run = history.run
    formats = dict.fromkeys(view.format for view in history.views.values())
    total = size(sum(step.bytes or 0 for step in run.steps))
    yield "run", f"{run.path}: {counted(len(run.steps), 'step')}, {total}, {', '.join(formats) or 'none readable'}"
    yield from history.verdict.faults()
    yield from history.verdict.facts


STEP_HEADERS = ("step", "state", "bytes", "saved (UTC)", "checked (UTC)")
"""The headers of the columns of `step_row`."""


def step_row(step: RunStep) -> tuple[str, ...]:
    """Return the row of a step in a table of the run."""
    saved = "-" if step.saved is None else moment(step.saved)
    last = "never" if step.verified is None else moment(step.verified.timestamp)
    return step.name, step.state, "-" if step.bytes is None else size(step.bytes), saved, last


_MAX_RESUMES = 10
"""The most resumes of a run that are listed."""


def resume_lines(history: RunHistory) -> Iterator[tuple[str, str]]:
    """Yield the records of a run's resumes, as labelled lines: nothing is guessed from the steps."""
    shown = history.resumes[-_MAX_RESUMES:]
    if len(shown) < len(history.resume_times):
        yield "resumed", f"{counted(len(history.resume_times), 'time')}; the last {len(shown)}:"
    yield from (("resumed", resume.sentence) for resume in shown)
    if history.unread_resumes:
        yield "resumed", history.unread_resumes


@dataclass(frozen=True, slots=True)
class RunDifference:
    """Two runs side by side.

    Attributes:
        a, b: both, with their resumes.
        steps: what differs by metadata at each step that both have and that can be read, from A to B.
        only_a, only_b: the numbers of the steps that one of them has.
    """

    a: RunHistory
    b: RunHistory
    steps: tuple[StepChange, ...]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]

    @property
    def differs(self) -> bool:
        return bool(self.only_a or self.only_b) or any(step.differs for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        return {**fields_of(self), "differs": self.differs}


def diff_runs(a: str | os.PathLike[str] | Remote, b: str | os.PathLike[str] | Remote) -> RunDifference:
    """Compare two runs step by step by their metadata, as ``muonckpt diff RUN_A RUN_B`` shows them; reads no elements.

    Raises:
        SourceError: as `look_at_run`.
    """
    history_a, history_b = look_at_run(a), look_at_run(b)
    names_a, names_b = _readable_steps(history_a), _readable_steps(history_b)
    changes = []
    for step, name in names_b.items():
        if step in names_a:
            view_a, view_b = history_a.views[names_a[step]], history_b.views[name]
            changes.append(change_between(names_a[step], view_a, name, view_b))
    only_a, only_b = sorted(names_a.keys() - names_b.keys()), sorted(names_b.keys() - names_a.keys())
    return RunDifference(history_a, history_b, steps=tuple(changes), only_a=tuple(only_a), only_b=tuple(only_b))


def _readable_steps(history: RunHistory) -> dict[int, str]:
    """Return the names of the steps whose metadata can be read, by number."""
    return {step.step: step.name for step in history.steps if step.name in history.views}
