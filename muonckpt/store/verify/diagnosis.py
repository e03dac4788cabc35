"""A diagnosis names in one sentence the faults of a checkpoint, and the next step: the same in every tool and error.

`diagnosis_of` knows all bytes; `diagnosis_by_files` looks at descriptions, and the presence and sizes of files, alone;
`diagnosis_at` is of whatever is at a path, also if it cannot be opened.  `open` refuses by it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from ...names.wording import command, counted, shell_line
from ...programs.signs import MEGATRON_FILE, METADATA_FILE
from ...record.record import MANIFEST_FILE, Manifest
from ..io.location import Location, Remote, is_there, location
from ..open_checkpoint import OpenCheckpoint
from .damage import (
    DESCRIPTIVE,
    HARMLESS,
    NOTHING_LOST,
    Damage,
    damage_by_files,
    damage_of_unreadable,
    rank_in_name,
    stock_description,
    with_causes,
)
from .run import NumberedName, Run, RunStep, StepName, has_lost_all, last_verification, new_attempt, whole_before
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


def diagnosis_of(path: Location, damage: Damage, damaged_steps: Collection[str] = ()) -> Diagnosis:
    """Say what to do about the damage of a checkpoint.

    Args:
        damaged_steps: the names of other steps of its run that are known to be damaged.
    """
    remedies = _remedies(path, damage, damaged_steps) if damage or damage.findings else ()
    return Diagnosis(path, damage.sentence, tuple(remedies), damage)


def diagnosis_by_files(checkpoint: OpenCheckpoint, damaged_steps: Collection[str] = ()) -> Diagnosis:
    """Diagnose an open checkpoint by its descriptions, files' sizes and its last verification."""
    path, last = checkpoint.path, last_verification(checkpoint.path)
    damage = damage_by_files(checkpoint)
    if last is None or not last.has_loss:
        return replace(diagnosis_of(path, damage, damaged_steps), verified=last)
    # The files do not show what reading has shown; some of their bytes tell where others are.
    causes = with_causes(checkpoint, damage, checkpoint.outline.columns.names)
    remedies = _remedies(path, causes, damaged_steps, is_recorded=True)
    return Diagnosis(path, last.sentence if damage else last.loss, tuple(remedies), damage, last)


def diagnosis_at(path: Location, damaged_steps: Collection[str] = ()) -> Diagnosis:
    """Diagnose a checkpoint by its descriptions and the names and sizes of its files."""
    try:
        with OpenCheckpoint(path) as checkpoint:
            return diagnosis_by_files(checkpoint, damaged_steps)
    except (SourceError, LayoutError) as error:
        return diagnosis_of(path, damage_of_unreadable(path, error), damaged_steps)


def diagnosis_of_damaged(path: Location, damaged_steps: Collection[str] = ()) -> Diagnosis:
    """Diagnose a checkpoint in which reading has met damage, whether its files show that or not."""
    diagnosis = diagnosis_at(path, damaged_steps)
    if diagnosis:
        return diagnosis
    return replace(diagnosis, remedies=tuple(_remedies(path, diagnosis.damage, damaged_steps, is_recorded=True)))


def advice_on(path: Location) -> str:
    """Return the message where reading a checkpoint has found damage: the losses, and the next step."""
    try:
        diagnosis = diagnosis_of_damaged(path)
    except UnavailableError:  # the damage is the news
        return ""
    return f"{diagnosis.sentence}. {diagnosis.advice}" if diagnosis else diagnosis.advice


def next_step(run: Run, steps: Sequence[RunStep]) -> str:
    """Say what to do about the newest faulty one of some steps of a run, or else about those that cannot be read."""
    faulty, newest = [step for step in steps if step.state == "faulty" and not run.replacement(step)], run.newest_whole
    if faulty:
        # A resume passes over damage that is recorded, or that files show.
        cures = [remedy.step for remedy in diagnosis_at(faulty[-1].path).remedies if remedy.gives != _VERIFY]
        if newest and newest.verified and StepName.parsed(newest.name) and cures == [newest.name]:
            return f"{_START} (it resumes from {newest.name})"
        return f"{command('verify', faulty[-1].path)} (what to do about {faulty[-1].name})"
    return run.way_back()


# --- what to do -------------------------------------------------------------------------------------------------------

_EARLIER_STEP = "reads step {}, the newest whole one by {}; "
_START = "start the job again"
_TAKEN = "Series.resume goes back by itself to step {}, which is whole by its last verification"
_AGAIN = "reads all of {}, the same step written again, so that this one is not needed"
_RESUME = "then resume from that"
_GOES_BACK = "Series.resume goes back to it by itself"
_STAYS = f"{_RESUME}; move this one away first, as Series.resume does not pass over it"
_COPY = "tells whether a copy of this checkpoint is whole: then copy the damaged files from there"
_FRESH = "in Python: the state of {} begins from zero, also its undamaged part"
_RENAME = "gives every file its name back; then verify it"
_STOCK = (
    f"makes {METADATA_FILE} the description, without digests and momentum conventions: CRC-32s are all that is "
    "checked then"
)
_REWRITE = "writes the same elements with new descriptions"
_VERIFY = "lists all that is damaged, and what to do"

_MAX_NAMES = 12
"""The most parameters that a line of Python names."""


def _remedies(
    path: Location, damage: Damage, damaged_steps: Collection[str], is_recorded: bool = False
) -> Iterator[Remedy]:
    """Yield what to do, the cheapest and most exact first.

    A cure that gives up state is not among them where another one keeps it.

    Args:
        is_recorded: whether reading has found a loss, which names and sizes of files may not show.
    """
    kinds, is_unseen, place = damage.kinds, is_recorded and not damage, _named(path)
    before, name = whole_before(place, damaged_steps), NumberedName.parsed(place.name)
    if before and name and before.step == name.step.step and before.attempt > name.step.attempt:
        yield Remedy(command("verify", before.path), _AGAIN.format(before.name), before.name)
        return
    # Files get their names back.
    if damage.misplaced:
        yield Remedy(_moves(path, damage.misplaced), _RENAME)
        damage = damage.without_misplaced
        if not damage:
            return
    # Descriptions are written again, or copied where the checkpoint is not read without them.
    if not (damage or is_recorded) and kinds <= DESCRIPTIVE:
        yield Remedy("muonckpt verify COPY", _COPY) if "misdescribed" in kinds else _rebuilt(path, damage.manifest)
        return
    if (damage.is_mixed_up or "unreadable" in kinds) and stock_description(path):
        yield Remedy(shell_line("mv", path / MANIFEST_FILE, path / f"{MANIFEST_FILE}.aside"), _STOCK)
    if is_unseen:
        yield Remedy(command("verify", path), _VERIFY)
    # The run goes on from another step, or a copy has the lost files.
    if before:
        # A series passes over a step without a manifest, whatever is wrong with it.
        is_passed = is_recorded or not is_there(path / MANIFEST_FILE) or "unreadable" in kinds
        is_proved = is_passed or (bool(damage) and not damage.is_of_disk)
        is_of_series = StepName.parsed(place.name) is not None
        if is_of_series and is_proved and before.verified:
            yield Remedy(_START, _TAKEN.format(before.step), before.name)
        else:
            step = _EARLIER_STEP.format(before.step, "its last verification" if before.verified else "its files' sizes")
            resume = _RESUME if not is_of_series else _GOES_BACK if is_proved else _STAYS
            yield Remedy(command("verify", before.path), step + resume, before.name)
    if before or is_unseen:
        return
    if damage or not kinds <= HARMLESS:
        yield Remedy("muonckpt verify COPY", _COPY)
    # State of the optimizer begins as zeros, where no weight is lost.
    is_state_alone = bool(damage.tensors) and not damage.items and "unlisted" not in kinds and damage.begins_at_zero
    names = sorted({tensor.name or "" for tensor in damage.tensors})
    are_names = len(names) <= _MAX_NAMES and all(name and not name.isdecimal() for name in names)
    if is_state_alone and are_names and is_there(path / MANIFEST_FILE) and not damage.is_mixed_up:
        call = "Series.resume(..." if StepName.parsed(place.name) else f"muonckpt.load(state, {str(path)!r}"
        yield Remedy(f"{call}, fresh={names!r})", _FRESH.format(counted(len(names), "parameter")))


def _named(path: Location) -> Location:
    """Return a place whose last part is its name."""
    return path.resolve() if path.name in ("", "..") else path


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


def _rebuilt(path: Location, manifest: Manifest) -> Remedy:
    """Return how to write a checkpoint again with all its descriptions; its elements are whole."""
    place = _named(path)
    # On as many ranks as wrote it, in the same format; as another attempt at the step of a run.
    ranks = {rank_in_name(name) for name in manifest.columns.names} - {None}
    options = ["--mesh", f"dp={max(1, len(ranks))}"]
    if MEGATRON_FILE in manifest.files or is_there(path / MEGATRON_FILE):
        options += ["--format", "torch_dist"]
    name = new_attempt(place) or f"{place.name}-rebuilt"
    return Remedy(command("reshard", path, place.parent / name, *options), _REWRITE)


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
        if not (isinstance(error, DamageError) or has_lost_all(place)):
            raise
        raise diagnosis_at(place).error from error
