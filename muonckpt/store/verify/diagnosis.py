"""A diagnosis names in one sentence the faults of a checkpoint, and the next step: the same in every tool and error.

`diagnosis_of` knows all bytes; `diagnosis_by_files` looks at descriptions, and the presence and sizes of files, alone;
`diagnosis_at` is of whatever is at a path, also if it cannot be opened.  `open` refuses by it.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from string import ascii_lowercase
from typing import Any

from ...names.errors import (
    ADVICE,
    DamageError,
    LayoutError,
    LostFileError,
    SourceError,
    UnavailableError,
)
from ...names.wording import command, counted, enumerated, shell_line
from ...programs.signs import MEGATRON_FILE, METADATA_FILE
from ...record.record import MANIFEST_FILE
from ..io.location import Location, Remote, entries_of, is_there, location
from ..open_checkpoint import OpenCheckpoint
from .damage import (
    DESCRIPTIVE,
    HARMLESS,
    NOTHING_LOST,
    Damage,
    damage_by_files,
    damage_of_unreadable,
    is_described_by_dcp,
    rank_in_name,
    with_causes,
)
from .run import Run, is_damaged, last_verification, newest_steps
from .step_names import NumberedName, StepName, free_name, new_attempt, siblings_of
from .verification import Verification


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something to do about damage: a ``command`` for a shell, a line of Python or a plain one, and what that gives.

    ``step`` is the name of the whole step from which the run goes on; empty if it goes on from none.
    """

    command: str
    gives: str
    step: str = ""

    def to_json(self) -> dict[str, str]:
        return {"command": self.command, "gives": self.gives}


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The faults of a checkpoint or a run, in one sentence without the path, and what to do; true if anything is.

    Attributes:
        remedies: the cheapest and most exact first.
        damage: of a checkpoint, as far as it was read.
        verified: the last verification of exactly these files, if it was looked up.
    """

    path: Location
    sentence: str
    remedies: tuple[Remedy, ...]
    damage: Damage = NOTHING_LOST
    verified: Verification | None = None

    def __bool__(self) -> bool:
        return bool(self.sentence)

    @property
    def has_loss(self) -> bool:
        """Whether something is lost, or may be."""
        return self.damage.has_loss or (self.verified is not None and self.verified.has_loss)

    @property
    def advice(self) -> str:
        """The remedies in one sentence."""
        lettered = zip(ascii_lowercase, self.remedies, strict=False)
        parts = [f"({letter}) {remedy.command} ({remedy.gives})" for letter, remedy in lettered]
        return f"{ADVICE}{'; '.join(parts)}" if parts else ""

    @property
    def lines(self) -> Iterator[str]:
        """Yield the lines that a terminal shows, a paragraph and a list; none if nothing is wrong."""
        if self.sentence:
            yield f"{self.path}: {self.sentence}."
            yield ""
        if self.remedies:
            yield ADVICE.strip()
            for letter, remedy in zip(ascii_lowercase, self.remedies, strict=False):
                yield f"({letter}) {remedy.command}"
                yield f"    {remedy.gives}"
            yield ""

    @property
    def error(self) -> DamageError:
        """The error that says so."""
        return DamageError(f"{self.path}: {self.sentence}", self.advice)

    def __str__(self) -> str:
        """Return one paragraph, for errors."""
        return str(self.error)

    def to_json(self) -> dict[str, Any] | None:
        """Return it as plain data; None if nothing is wrong."""
        if not self.sentence:
            return None
        return {"sentence": self.sentence, "remedies": self.remedies, "lost": self.damage or None}


def diagnosis_of(path: Location, damage: Damage, run: Run | None = None) -> Diagnosis:
    """Say what to do about the damage of a checkpoint.

    Args:
        run: the run that it is a step of; None looks at its newest steps.
    """
    remedies = _remedies(path, damage, run) if damage or damage.findings else ()
    return Diagnosis(path, damage.sentence, tuple(remedies), damage)


def diagnosis_by_files(checkpoint: OpenCheckpoint, run: Run | None = None) -> Diagnosis:
    """Diagnose an open checkpoint by its descriptions, files' sizes and its last verification."""
    path, last = checkpoint.path, last_verification(checkpoint.path)
    damage = damage_by_files(checkpoint)
    if last is None or last.is_whole or (damage.findings and not last.has_loss):
        return replace(diagnosis_of(path, damage, run), verified=last)
    if not last.has_loss:
        return Diagnosis(path, last.finding, (Remedy(command("verify", path), _VERIFY),), damage, last)
    # The files do not show what reading has shown; some of their bytes tell where others are.
    causes = with_causes(checkpoint, damage, checkpoint.outline.columns.names)
    remedies = _remedies(path, causes, run, is_recorded=True)
    return Diagnosis(path, last.sentence if damage else last.finding, tuple(remedies), damage, last)


def diagnosis_at(path: Location, run: Run | None = None) -> Diagnosis:
    """Diagnose a checkpoint by its descriptions and the names and sizes of its files."""
    try:
        with OpenCheckpoint(path) as checkpoint:
            return diagnosis_by_files(checkpoint, run)
    except (SourceError, LayoutError) as error:
        return diagnosis_of(path, damage_of_unreadable(path, error), run)


def diagnosis_of_damaged(path: Location, run: Run | None = None) -> Diagnosis:
    """Diagnose a checkpoint in which reading has met damage, whether its files show that or not."""
    diagnosis = diagnosis_at(path, run)
    if diagnosis:
        return diagnosis
    return replace(diagnosis, remedies=tuple(_remedies(path, diagnosis.damage, run, is_recorded=True)))


def advice_on(path: Location) -> str:
    """Return what to do about damage that reading a checkpoint has met."""
    try:
        return diagnosis_of_damaged(path).advice
    except UnavailableError:  # the damage is the news
        return ""


# --- what to do -------------------------------------------------------------------------------------------------------


def way_on(run: Run, name: str = "", is_passed: bool = True) -> Remedy | None:
    """Return how a run goes on from its newest whole step; None if it has none.

    Args:
        name: of a step from which it is not to go on, and whether a resume passes over that by itself.
    """
    whole = [step for step in run.whole if step.name != name]
    if not whole:
        return None
    newest = whole[-1]
    newer = run.steps[run.steps.index(newest) + 1 :]
    stuck = [step.name for step in newer if step.state == "unread" or (step.name == name and not is_passed)]
    goal = f"{newest.name}, {newest.standing}"
    is_of_series = StepName.parsed(newest.name) is not None
    if not (stuck or is_of_series):
        return Remedy(command("verify", newest.path), f"reads all of {goal}; then resume from that", newest.name)
    if not stuck:
        return Remedy("start the job again", f"it resumes from {goal}", newest.name)
    verb = "start the job again: it resumes" if is_of_series else "resume"
    return Remedy(moving(run.path, stuck), f"then {verb} from {goal}", newest.name)


def moving(run: Location, names: Sequence[str]) -> str:
    """Return the commands that move steps out of their run, into a folder beside it."""
    if isinstance(run, Remote):
        return f"move {enumerated(names)} out of {run}"
    folder = run.resolve() if run.name in ("", "..") else run
    aside = folder.parent / f"{folder.name}.aside"
    return f"{shell_line('mkdir', '-p', aside)} && {shell_line('mv', *(run / name for name in names), aside)}"


def unlocking(path: Location, fault: str) -> Remedy | None:
    """Return how this user gets the permission to read a checkpoint; None if its fault is another."""
    if isinstance(path, Remote) or os.strerror(errno.EACCES) not in fault:
        return None
    return Remedy(shell_line("chmod", "-R", "u+rX", path), "lets its owner read it; then start the job again")


def way_back(path: Location, fault: str) -> str:
    """Say how a step that cannot be read is read, and its run goes on from an older one; empty if neither is known."""
    lines = [f"{remedy.command} {remedy.gives}" for remedy in filter(None, [unlocking(path, fault)])]
    if NumberedName.parsed(path.name) and (remedy := way_on(newest_steps(path), path.name, is_passed=False)):
        lines.append(f"To go on from {remedy.step} instead: {remedy.command}")
    return ". ".join(lines)


@contextmanager
def naming_way_back(place: Location) -> Iterator[None]:
    """Add to the error of a step that cannot be read how its run goes on without it."""
    try:
        yield
    except UnavailableError as error:
        advice = ". ".join(filter(None, (error.advice, way_back(place, error.fault))))
        raise error.with_text(error.fault, advice) from error


def renaming(source: Location, step: int) -> Remedy:
    """Return how a checkpoint gets the name of the step that it was saved as; another one with that name stays."""
    place = source.parent / str(free_name(source.parent, step))
    line = f"rename {source} to {place.name}" if isinstance(source, Remote) else shell_line("mv", source, place)
    later = [name for name, number in siblings_of(place) if number.step > step and name != source.name]
    gives = f"a resume then finds step {step} by its name"
    if later:
        gives = f"it is step {step} again; a resume begins with the newest names, and {max(later)} is newer"
    return Remedy(line, gives)


_AGAIN = "reads all of {}, the same step written again, so that this one is not needed"
_COPY = "tells whether a copy of this checkpoint is whole: then copy the damaged files from there"
_FRESH = "in Python, for {}: the state of {} begins from zero, also its undamaged part"
_MOVED = "gives every file its name back; then verify it"
_STOCK = f"writes the step again by its {METADATA_FILE}, checked by CRC-32s alone, without momentum conventions"
_REWRITE = "writes the same elements with new descriptions; nothing is lost, and a resume takes it as it is"
_VERIFY = "lists all damage"

_MAX_NAMES = 12
"""The most parameters that a line of Python names."""


def _remedies(path: Location, damage: Damage, run: Run | None, is_recorded: bool = False) -> Iterator[Remedy]:
    """Yield what to do, the cheapest and most exact first.

    A cure that gives up state is not among them where another one keeps it.

    Args:
        is_recorded: whether reading has found a loss, which names and sizes of files may not show.
    """
    kinds, place = damage.kinds, path.resolve() if path.name in ("", "..") else path
    run = newest_steps(place) if run is None else run
    if again := run.replacement(place.name):
        yield Remedy(command("verify", again.path), _AGAIN.format(again.name), again.name)
        return
    # The step and its files get their names back.
    if "renamed" in kinds and not damage:
        yield renaming(place, damage.manifest.provenance["step"])
        # Under that name a verification says how its descriptions are written again.
        if not is_recorded:
            return
    kinds -= {"renamed"}
    if damage.misplaced:
        yield Remedy(_moves(path, damage.misplaced), _MOVED)
        damage, kinds, is_recorded = damage.without_misplaced, frozenset(), False
    if not (damage or kinds or is_recorded):
        return
    # Descriptions are written again, or copied where the checkpoint is not read without them.
    if not (damage or is_recorded) and kinds <= DESCRIPTIVE - {"manifest"}:
        is_copied = "misdescribed" in kinds
        yield Remedy("muonckpt verify COPY", _COPY) if is_copied else Remedy(_rewriting(place, damage), _REWRITE)
        return
    if (damage.is_mixed_up or "unreadable" in kinds) and is_described_by_dcp(path):
        move = shell_line("mv", path / MANIFEST_FILE, path / f"{MANIFEST_FILE}.aside")
        yield Remedy(f"{move} && {_rewriting(place, damage)}", _STOCK)
    elif not (damage or is_recorded) and "manifest" in kinds:
        yield Remedy(_rewriting(place, damage), _STOCK)
    # The run goes on from another step, or a copy has the lost files.
    has_loss = any(step.has_loss for step in run.steps if step.name == place.name)
    is_passed = has_loss or ((bool(damage) or is_recorded) and not damage.is_of_disk)
    if remedy := way_on(run, place.name, is_passed):
        yield remedy
        return
    if is_recorded and not damage:
        yield Remedy(command("verify", path), _VERIFY)
        return
    if damage or not kinds <= HARMLESS:
        yield Remedy("muonckpt verify COPY", _COPY)
    # State of the optimizer begins as zeros, where no weight is lost.
    is_state_alone = bool(damage.tensors) and not damage.items and "unlisted" not in kinds and damage.begins_at_zero
    names = sorted({tensor.name or "" for tensor in damage.tensors})
    are_names = len(names) <= _MAX_NAMES and all(name and not name.isdecimal() for name in names)
    if is_state_alone and are_names and is_there(path / MANIFEST_FILE) and not damage.is_mixed_up:
        call = "Series.resume(..." if StepName.parsed(place.name) else f"muonckpt.load(state, {str(path)!r}"
        yield Remedy(f"{call}, fresh={names!r})", _FRESH.format(place.name, counted(len(names), "parameter")))


def _moves(path: Location, misplaced: Mapping[str, str]) -> str:
    """Return the commands that give files their names; one that would be replaced is kept under a name of its own."""
    places, vacant, commands = dict(sorted(misplaced.items())), set[str](), list[str]()
    while places:
        # A name that no other file is waiting under is free; in a circle of names one moves aside first.
        name = next((name for name in places if name not in places.values()), next(iter(places)))
        source, destination = name, f"{name}.aside"
        if name in vacant or not is_there(path / name):
            source, destination = places.pop(name), name
        else:
            places = {key: destination if file == name else file for key, file in places.items()}
        vacant.add(source)
        commands.append(shell_line("mv", path / source, path / destination))
    return " && ".join(commands)


def _rewriting(place: Location, damage: Damage) -> str:
    """Return the command that writes a checkpoint again with all its descriptions; its elements are whole."""
    # On as many ranks as wrote it, in the same format; as another attempt at the step of a run.
    names = damage.manifest.columns.names or [entry.name for entry in entries_of(place)]
    options = ["--mesh", f"dp={max(1, len({rank_in_name(name) for name in names} - {None}))}"]
    if MEGATRON_FILE in damage.manifest.files or is_there(place / MEGATRON_FILE):
        options += ["--format", "torch_dist"]
    name = new_attempt(place) or f"{place.name}-rebuilt"
    return command("reshard", place, place.parent / name, *options)


# --- opening what has to be whole, as far as descriptions and the sizes of files tell ---------------------------------


def open(path: str | os.PathLike[str] | Remote) -> OpenCheckpoint:
    """Open a checkpoint of any known format, in a folder, a file, or an object store.

    Reads its metadata; needs no torch.

    Args:
        path: a path, or a URL such as ``s3://bucket/step1000``.

    Raises:
        SourceError: there is no checkpoint, its metadata are damaged or refused, or no installed library supports the
            protocol.  For a damaged one it names the losses, and the next step.
    """
    return _refused(open_damaged(location(path, SourceError)), lost_files=False)


def open_whole(path: str | os.PathLike[str] | Remote, partly: bool = False) -> OpenCheckpoint:
    """Open a checkpoint as `open` does, without losses as far as files and the last verification show.

    Args:
        partly: whether a part is requested, so that a loss is a warning: all bytes read are checked.

    Raises:
        SourceError: as `open`; or something is lost.
    """
    checkpoint = open(path)
    diagnosis = diagnosis_by_files(checkpoint)
    if diagnosis.has_loss and not partly:
        raise diagnosis.error
    if diagnosis and not checkpoint.lacks_manifest:  # `open` has warned of that
        warnings.warn(f"{checkpoint.path} is read although not whole: {diagnosis.sentence}", stacklevel=3)
    return checkpoint


def open_to_load(path: str | os.PathLike[str] | Remote) -> OpenCheckpoint:
    """Open a checkpoint although files of it may be missing or cut, for those who check all that they read.

    Raises:
        SourceError: as `open`, but not for lost files.
    """
    return _refused(open_damaged(location(path, SourceError)), lost_files=True)


def _refused(checkpoint: OpenCheckpoint, lost_files: bool) -> OpenCheckpoint:
    """Return the checkpoint unless it has faults; those of ``lost_files`` may pass, if what was in them is known."""
    for fault in checkpoint.faults:
        if not (lost_files and type(fault) is LostFileError):
            diagnosis = diagnosis_by_files(checkpoint)
            raise diagnosis.error if isinstance(fault, DamageError) else type(fault)(str(diagnosis)) from fault
    if checkpoint.lacks_manifest:
        warnings.warn(
            f"{checkpoint.path} was saved with a {MANIFEST_FILE}, which is missing: it is read as a stock checkpoint, "
            f"without digests, momentum conventions and layouts, which a copy of {MANIFEST_FILE} would give back, if "
            "there is one; whatever is written from it has new descriptions of the same elements",
            stacklevel=3,
        )
    return checkpoint


def open_damaged(place: Location) -> OpenCheckpoint:
    """Open a checkpoint as `open` does, also one with faults.

    Raises:
        SourceError: as `open` does about the metadata.
    """
    try:
        return OpenCheckpoint(place)
    except SourceError as error:
        if not is_damaged(place, error):
            raise
        raise diagnosis_at(place).error from error
