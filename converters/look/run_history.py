"""A run as its checkpoints tell it: which steps there are, which are whole, and what changed between them.

All of it from metadata; fingerprints, where they are recorded, tell which tensors have changed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from ...names.errors import SourceError
from ...names.wording import counted, fields_of, listed, moment, size
from ...programs.model_view import Role
from ...record.record import Manifest
from ...runs.resumes import Resume, resumes_of
from ...store.io.location import Location, Remote, location
from ...store.open_checkpoint import OpenCheckpoint
from ...store.verify.run import Run, RunStep, Visit, look_at_folder, run_of
from .contents import FirstLook, first_look, option_value
from .holders import writing_ranks

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the metadata of one checkpoint say, as far as it may change in the course of a run.

    Attributes:
        format: what a user calls it.
        program: whose keys it has; empty if unknown.
        ranks: how many processes wrote it; None if that is recorded nowhere.
        tensors: of each tensor, by key, its role, shape, dtype and recorded fingerprint.
        options: of each parameter, by name, the options of its group.
    """

    format: str
    program: str
    ranks: int | None
    tensors: Mapping[str, tuple[Role, Shape, str, str | None]]
    options: Mapping[str, Mapping[str, Any]]


def facts_of(opened: OpenCheckpoint) -> StepFacts:
    known = first_look(opened)
    options = {name: group.options for group in known.groups.groups for name in group.parameters}
    program = known.program if isinstance(known.program, str) else known.program.dialect.name
    tensors = {
        tensor.key: (role, tensor.shape, tensor.dtype, tensor.fingerprint)
        for role, members in known.view.tensors.items()
        for tensor in members
    }
    return StepFacts(opened.format.name, _program(known, program), _ranks(known.manifest), tensors, options)


def _program(known: FirstLook, name: str) -> str:
    return "" if isinstance(known.program, str) else name


def _ranks(manifest: Manifest) -> int | None:
    world = manifest.provenance.get("world")
    if isinstance(world, int) and not manifest.provenance.get("resharded"):
        return world
    return len(writing_ranks(manifest)) or None


@dataclass(frozen=True, slots=True)
class StepChange:
    """What changed from one readable step of a run to the next; ``lines`` say it for people.

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
        """How many tensors in both changed, stayed the same, and cannot be told by fingerprints."""
        changed, same, unknown = (
            (sum(column) for column in zip(*self.moved.values(), strict=True)) if self.moved else (0,) * 3
        )
        return changed, same, unknown

    @property
    def differs(self) -> bool:
        """Whether anything is known to differ but the number of ranks."""
        return bool(self.added or self.removed or self.reshaped or self.options or self.counts[0])

    def _lines(self) -> Iterator[str]:
        if self.programs[0] != self.programs[1]:
            yield f"keys of {self.programs[0] or 'an unknown program'}, then of {self.programs[1] or 'an unknown one'}"
        if self.ranks[0] != self.ranks[1]:
            yield f"ranks {self.ranks[0] or 'unknown'} -> {self.ranks[1] or 'unknown'}"
        for what, keys in (("new", self.added), ("gone", self.removed)):
            if keys:
                yield f"{counted(len(keys), 'tensor')} {what}: {listed(keys, 3)}"
        for key, (before, after) in list(self.reshaped.items())[:3]:
            yield f"{key}: {before} -> {after}"
        if len(self.reshaped) > 3:
            yield f"and {len(self.reshaped) - 3} more tensors of another shape or dtype"
        for name, before, after, count in self.options:
            yield f"{name} {option_value(before)} -> {option_value(after)} ({counted(count, 'parameter')})"
        still = {role: same for role, (changed, same, _) in self.moved.items() if same and role in _MOVING}
        for role, same in still.items():
            total = sum(self.moved[role])
            yield f"{same} of {counted(total, 'tensor')} of {role} did not change: frozen, without gradients, or stale"

    def to_json(self) -> dict[str, Any]:
        options = [{"option": n, "before": a, "after": b, "parameters": count} for n, a, b, count in self.options]
        moved = {role: dict(zip(("changed", "same", "unknown"), n, strict=True)) for role, n in self.moved.items()}
        return {**fields_of(self), "options": options, "moved": moved, "lines": self.lines}


_MOVING = frozenset({Role.WEIGHTS, Role.MOMENTUM, Role.MOMENTS, Role.MASTERS})

_ABSENT = "absent"


def change_between(since: str, before: StepFacts, name: str, after: StepFacts) -> StepChange:
    """Compare the facts of two checkpoints."""
    both = [key for key in after.tensors if key in before.tensors]
    moved = {str(role): [0, 0, 0] for role, *_ in after.tensors.values()}
    reshaped = {}
    for key in both:
        (_, shape, dtype, fingerprint), (role, new_shape, new_dtype, new) = before.tensors[key], after.tensors[key]
        if (shape, dtype) != (new_shape, new_dtype):
            reshaped[key] = f"{_shape(shape)} {dtype}", f"{_shape(new_shape)} {new_dtype}"
        moved[str(role)][2 if None in (fingerprint, new) else int(fingerprint == new)] += 1
    changed: Counter[tuple[str, str]] = Counter()
    values: dict[tuple[str, str], tuple[str, Any, Any]] = {}
    for parameter in (name for name in after.options if name in before.options):
        old, options = before.options[parameter], after.options[parameter]
        if old == options:
            continue
        for option in dict.fromkeys((*options, *old)):
            pair = old.get(option, _ABSENT), options.get(option, _ABSENT)
            if pair[0] != pair[1]:
                changed[option, repr(pair)] += 1
                values[option, repr(pair)] = option, *pair
    return StepChange(
        since,
        name,
        added=tuple(key for key in after.tensors if key not in before.tensors),
        removed=tuple(key for key in before.tensors if key not in after.tensors),
        reshaped=reshaped,
        options=tuple((*values[key], count) for key, count in changed.items()),
        ranks=(before.ranks, after.ranks),
        programs=(before.program, after.program),
        moved={role: (counts[0], counts[1], counts[2]) for role, counts in moved.items()},
    )


def _shape(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "scalar"


@dataclass(frozen=True)
class RunHistory:
    """The steps of a run, and what their metadata say.

    Attributes:
        run: the folder with its steps.
        facts: by the name of the step; those whose metadata cannot be read have none.
        resumes: as `Series` has recorded them, the oldest first.
        unread_resumes: a sentence about what of their record cannot be read; empty if all is.
    """

    run: Run
    facts: Mapping[str, StepFacts]
    resumes: tuple[Resume, ...] = ()
    unread_resumes: str = ""

    @property
    def steps(self) -> tuple[RunStep, ...]:
        return self.run.steps

    @property
    def newest_whole(self) -> RunStep | None:
        return self.run.newest_whole

    @cached_property
    def changes(self) -> tuple[StepChange, ...]:
        """What changed between each two consecutive steps whose metadata can be read."""
        named = [step.name for step in self.steps if step.name in self.facts]
        return tuple(change_between(a, self.facts[a], b, self.facts[b]) for a, b in pairwise(named))

    def to_json(self) -> dict[str, Any]:
        pointer = self.run.pointer
        return {
            "run": str(self.run.path),
            "steps": self.steps,
            "newest_whole": self.newest_whole.name if self.newest_whole else None,
            "pointer": {"file": pointer.file, "text": pointer.text, "names": pointer.name} if pointer else None,
            "changes": self.changes,
            "resumes": [{**fields_of(resume), "verdict": resume.verdict} for resume in self.resumes],
            "unread_resumes": self.unread_resumes,
        }


def look_at_run(path: str | os.PathLike[str] | Remote) -> RunHistory:
    """Look at all checkpoints of a run, of any program, as ``muonckpt inspect RUN`` shows them.

    Reads the metadata of each, and no elements; writes nothing.

    Args:
        path: the folder of the run: a path, or a URL such as ``s3://bucket/run``.

    Raises:
        SourceError: the folder cannot be read, or holds no checkpoint in a folder that ends with a number.
    """
    place = location(path, SourceError)
    facts, visit = _collecting()
    run = look_at_folder(place, visit)
    if not run.steps:
        raise SourceError(f"expected checkpoints in folders that end with the number of a step in {place}, found none")
    return _history(run, facts)


def history_of(path: Location) -> RunHistory | None:
    """Look at a run as `look_at_run` does; None if the path is not the folder of one."""
    facts, visit = _collecting()
    run = run_of(path, visit)
    return None if run is None else _history(run, facts)


def _history(run: Run, facts: Mapping[str, StepFacts]) -> RunHistory:
    resumes, unread = resumes_of(run.path)
    return RunHistory(run, facts, tuple(resumes), unread)


def _collecting() -> tuple[dict[str, StepFacts], Visit]:
    facts: dict[str, StepFacts] = {}

    def visit(name: str, opened: OpenCheckpoint) -> None:
        facts[name] = facts_of(opened)

    return facts, visit


def overview_of_run(history: RunHistory) -> Iterator[tuple[str, str]]:
    """Yield what there is to know about a run beside the table of its steps, as labelled lines."""
    run, newest = history.run, history.newest_whole
    formats = dict.fromkeys(facts.format for facts in history.facts.values())
    total = size(sum(step.bytes for step in run.steps))
    yield "run", f"{run.path}: {counted(len(run.steps), 'step')}, {total}, {', '.join(formats) or 'none readable'}"
    for step in run.steps:
        if step.state != "whole":
            yield step.state, f"{step.name}: {step.fault}"
    yield "newest whole", verdict_of(newest) if newest else "none"
    if run.pointer:
        yield "latest", _pointed(history)
    for change in history.changes:
        for number, line in enumerate(change.lines):
            yield "" if number else "changed", line if number else f"{change.since} -> {change.name}: {line}"
    yield from resume_lines(history)


def resume_lines(history: RunHistory) -> Iterator[tuple[str, str]]:
    """Yield what is recorded of a run's resumes, as labelled lines: nothing of it is guessed from the steps."""
    yield from (("resumed", resume.sentence) for resume in history.resumes)
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
    histories = look_at_run(a), look_at_run(b)
    named = [{step.step: step.name for step in history.steps if step.name in history.facts} for history in histories]
    steps = [
        change_between(named[0][step], histories[0].facts[named[0][step]], name, histories[1].facts[name])
        for step, name in named[1].items()
        if step in named[0]
    ]
    only_a, only_b = (tuple(sorted(one.keys() - other.keys())) for one, other in (named, named[::-1]))
    return RunDifference(*histories, tuple(steps), only_a, only_b)


def verdict_of(step: RunStep) -> str:
    """Say how whole a whole step is known to be."""
    last = step.verified
    if last is None:
        return f"{step.name}, by names and sizes of files; not verified yet"
    return f"{step.name}, verified {moment(last.timestamp)} UTC ({last.verdict})"


def _pointed(history: RunHistory) -> str:
    pointer = history.run.pointer
    assert pointer is not None, "asked for only where there is one"
    found = next((step for step in history.steps if step.name == pointer.name), None)
    said = f"the file {pointer.file} says {pointer.text}"
    if found is None:
        return f"{said}, which is not here: its program will not find what to resume from"
    if found.state != "whole":
        return f"{said}, which is {found.state}: its program would resume from that"
    return said
