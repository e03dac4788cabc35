"""The verdict on a run, and the next steps: what every command and the page print of it, and what a resume warns of."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..names.wording import by_fault, counted, enumerated, listed, moment
from ..store.verify.damage import Damage
from ..store.verify.diagnosis import Diagnosis, Remedy, diagnosis_at, diagnosis_of, moving, renaming, unlocking, way_on
from ..store.verify.run import Run
from .resumes import Resume

_MAX_STEPS = 3
"""The most damaged steps about which a verdict says what to do."""


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The faults of a run, and what to do.

    Attributes:
        missing: a sentence about each step that it had, and has not now.
        diagnosis: all that is wrong, in one sentence, and what to do.
    """

    run: Run
    missing: tuple[str, ...]
    diagnosis: Diagnosis

    def faults(self, besides: Collection[str] = ()) -> Iterator[tuple[str, str]]:
        """Yield the state of steps that are not whole, and their names and fault; each fault once, the newest first.

        Args:
            besides: the names of steps that are left out.
        """
        steps = [step for step in reversed(self.run.steps) if step.state != "whole" and step.name not in besides]
        for state in dict.fromkeys(step.state for step in steps):
            faults = []
            for step in steps:
                if step.state == state:
                    again = self.run.replacement(step.name)
                    faults.append((step.name, f"{step.fault}; {again.name} replaces it" if again else step.fault))
            yield from ((state, f"{names}: {fault}") for names, fault in by_fault(faults))

    @property
    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield where a resume begins, what is missing, and what else lies there, as labelled lines."""
        run, newest = self.run, self.run.newest_whole
        if newest:
            yield "newest usable" if newest.fault else "newest whole", f"{newest.name}, {newest.standing}"
        elif run.unread:
            readable = f"; the newest that can be read is {run.whole[-1].name}" if run.whole else ""
            yield "newest whole", f"unknown, as {run.unread[-1].name} cannot be read{readable}"
        else:
            yield "newest whole", "none"
        yield from (("missing", text) for text in self.missing)
        for name in run.unpublished:
            yield "unpublished", f"{name}: a save that goes on, or was stopped: a later save removes it then"
        if pointer := run.pointer:
            target = next((step for step in run.steps if step.name == pointer.name), None)
            consequence = ""
            if target is None:
                consequence = ", which is not here: its program will not find what to resume from"
            elif target.state != "whole":
                consequence = f", which is {target.state}: its program would resume from that"
            yield "latest", f"the file {pointer.file} says {pointer.text}{consequence}"

    @property
    def next_lines(self) -> Iterator[str]:
        """Yield what to do, a line each."""
        for number, remedy in enumerate(self.diagnosis.remedies):
            yield f"{'or' if number else 'next'}: {remedy.command} ({remedy.gives})"

    @property
    def exit_code(self) -> int:
        """1 if a step is faulty and not saved again, or missing; 3 if it is unknown which is the newest whole one."""
        run = self.run
        if self.missing or any(step.state == "faulty" and not run.replacement(step.name) for step in run.steps):
            return 1
        return 3 if run.unread else int(run.newest_whole is None)


def verdict_on(run: Run, resumes: Sequence[Resume], read: Mapping[str, Damage]) -> RunVerdict:
    """Judge a run by its steps and its last resume.

    Args:
        read: the damage that reading has shown, by the names of steps.
    """
    newest = run.whole[-1] if run.whole else None
    missing = tuple(missing_steps(run, resumes))
    texts = [text for text, _ in missing]
    bad = [step for step in reversed(run.steps) if step.state != "whole"]
    sentences = [f"missing: {text}" for text in texts]
    if bad:
        state = "not whole, or cannot be read" if any(step.state == "unread" for step in bad) else "not whole"
        names = listed((f"{step.name} ({step.state})" for step in bad), 3)
        sentences.insert(0, f"{len(bad)} of {counted(len(run.steps), 'step')} {state}: {names}")
    # Names that come back, the repair of damaged steps, the newest first, the way on, and what it does not need.
    repairs, way, needless = [remedy for _, remedy in missing if remedy], None, list[str]()
    for step in [step for step in bad if step.state == "faulty" and not run.replacement(step.name)][:_MAX_STEPS]:
        is_read = step.name in read
        known = diagnosis_of(step.path, read[step.name], run) if is_read else diagnosis_at(step.path, run)
        of_step = [remedy for remedy in known.remedies if not remedy.step]
        repairs += of_step
        if newest is None or run.steps.index(step) >= run.steps.index(newest):
            way = way or next((remedy for remedy in known.remedies if remedy.step), None)
        elif not of_step:
            needless.append(step.name)
    repairs += filter(None, (unlocking(step.path, step.fault) for step in reversed(run.unread)))
    if run.unread or texts:
        way = way or way_on(run)
    remedies = dict[str, Remedy]()
    for remedy in (*repairs, *filter(None, [way])):
        remedies.setdefault(remedy.command, remedy)
    if newest and needless:
        line = moving(run.path, needless)
        remedies[line] = Remedy(line, f"a resume from {newest.name} does not need it", newest.name)
    return RunVerdict(run, tuple(texts), Diagnosis(run.path, "; ".join(sentences), tuple(remedies.values())))


def missing_steps(run: Run, resumes: Sequence[Resume]) -> Iterator[tuple[str, Remedy | None]]:
    """Yield the newer steps that a run had: one that it was resumed from, and those that lie there under another name.

    Yields:
        A sentence, and how the step gets its name back, if it lies there.
    """
    newest = max((step.step for step in run.steps if step.is_published), default=-1)
    resumed = {}
    for last in resumes[-1:]:
        if last.step > newest:
            resumed[last.step] = f", from which the run was resumed {moment(last.timestamp)} UTC"
    # A checkpoint from which the run began lies there, too: it is older than the run's steps.
    newest_whole = run.whole[-1].step if run.whole else -1
    since = next((step.saved for step in (*run.whole[-1:], *run.steps)), None)
    names: dict[int, list[str]] = {}
    for stray in run.strays:
        is_later = since is not None and stray.saved is not None and stray.saved >= since
        if stray.step > newest_whole and not stray.has_loss and (is_later or stray.step in resumed):
            names.setdefault(stray.step, []).append(stray.name)
    for step in sorted({*names, *resumed}, reverse=True):
        text = f"step {step}{resumed.get(step, '')}"
        if step in names:
            yield f"{text}, which is called {enumerated(names[step])}", renaming(run.path / names[step][0], step)
        else:
            yield f"{text}; no copy of it is here, so look elsewhere first", None
