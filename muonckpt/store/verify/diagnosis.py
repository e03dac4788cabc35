"""A diagnosis names in one sentence the faults of a checkpoint, and the next step: the same in every tool and error.

`diagnosis_of` knows all bytes; `diagnosis_by_files` looks at descriptions, and the presence and sizes of files, alone;
`diagnosis_at` is of whatever is at a path, also if it cannot be opened.  `open` refuses by it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
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
from ...record.record import MANIFEST_FILE
from ..formats.registry import OWN
from ..io.location import Location, Remote, is_folder, is_there, location
from ..open_checkpoint import OpenCheckpoint
from .damage import Damage, damage_by_files, damage_of_unreadable, open_remains, rank_in_name
from .run import (
    Run,
    RunStep,
    StepName,
    has_lost_all,
    has_stock_description,
    last_verification,
    new_attempt,
    whole_before,
)
from .verification import Verification


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something to do about damage: a ``command`` for a shell, or a line of Python, and what that gives."""

    command: str
    gives: str


@dataclass(frozen=True, eq=False)
class Verdict:
    """The faults of a checkpoint or a run, in one sentence without the path, and what to do; true if anything is.

    Attributes:
        remedies: the cheapest and most exact first.
    """

    path: Location
    sentence: str
    remedies: tuple[Remedy, ...]

    def __bool__(self) -> bool:
        return bool(self.sentence)

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


@dataclass(frozen=True, eq=False)
class Diagnosis(Verdict):
    """The verdict on a checkpoint, in terms of a run.

    Attributes:
        damage: what is wrong, as far as the checkpoint was read.
        verified: the last verification of exactly these files, if it was looked up.
    """

    damage: Damage
    verified: Verification | None

    @classmethod
    def of(
        cls, path: Location, damage: Damage, remedies: Iterable[Remedy], verified: Verification | None = None
    ) -> Diagnosis:
        """Make a diagnosis: a verification that has found a loss counts before the files, as it has read them."""
        sentence = damage.sentence
        if verified is not None and verified.has_loss:
            sentence = verified.sentence if damage else verified.loss
        return cls(path, sentence, tuple(remedies), damage, verified)

    @property
    def has_loss(self) -> bool:
        """Whether something is lost, or may be."""
        return self.damage.has_loss or (self.verified is not None and self.verified.has_loss)

    def __str__(self) -> str:
        """Return one paragraph, for errors."""
        return str(self.error)

    @property
    def error(self) -> DamageError:
        """The error that says so."""
        return DamageError(f"{self.path}: {self.sentence}", self.advice)

    def to_json(self) -> dict[str, Any] | None:
        """Return it as plain data; None if nothing is wrong."""
        if not self.sentence:
            return None
        return {"sentence": self.sentence, "remedies": self.remedies, "lost": self.damage or None}


def diagnosis_of(checkpoint: OpenCheckpoint, damage: Damage, damaged_steps: Collection[str] = ()) -> Diagnosis:
    """Say what to do about the damage of an open checkpoint.

    Args:
        damaged_steps: the names of other steps of its run that are known to be damaged.
    """
    is_whole = not damage and not damage.findings
    return Diagnosis.of(checkpoint.path, damage, () if is_whole else _remedies(checkpoint, damage, damaged_steps))


def diagnosis_by_files(checkpoint: OpenCheckpoint, damaged_steps: Collection[str] = ()) -> Diagnosis:
    """Diagnose an open checkpoint by its descriptions, files' sizes and its last verification."""
    path, last = checkpoint.path, last_verification(checkpoint.path)
    diagnosis = diagnosis_of(checkpoint, damage_by_files(checkpoint), damaged_steps)
    # The files do not show what reading has shown.
    remedies = diagnosis.remedies
    if last is not None and last.misplaced:
        remedies = (_renamed(path, last.misplaced),)
    elif last is not None and last.has_loss and not diagnosis.damage:
        remedies = _remedies_for_others(path, damaged_steps)
        if last.mixed_up:
            remedies = (*_by_stock_description(path), *remedies)
    return Diagnosis.of(path, diagnosis.damage, remedies, last)


def diagnosis_at(path: Location, damaged_steps: Collection[str] = ()) -> Diagnosis:
    """Diagnose a checkpoint by its descriptions and the names and sizes of its files."""
    try:
        with open_remains(path) as checkpoint:
            return diagnosis_by_files(checkpoint, damaged_steps)
    except (SourceError, LayoutError) as error:
        remedies = _remedies_of_unreadable(path, error, damaged_steps)
        return Diagnosis.of(path, damage_of_unreadable(path, error), remedies)


def diagnosis_of_damaged(path: Location, damaged_steps: Collection[str] = ()) -> Diagnosis:
    """Diagnose a checkpoint in which reading has met damage, whether its files show that or not."""
    diagnosis = diagnosis_at(path, damaged_steps)
    return diagnosis or replace(diagnosis, remedies=_remedies_for_others(path, damaged_steps))


def advice_on(path: Location) -> str:
    """Return the message where reading a checkpoint has found damage: the losses, and the next step."""
    try:
        diagnosis = diagnosis_of_damaged(path)
    except UnavailableError:  # the damage is the news
        return ""
    return f"{diagnosis.sentence}. {diagnosis.advice}" if diagnosis else diagnosis.advice


def _remedies_for_others(path: Location, damaged_steps: Collection[str]) -> tuple[Remedy, ...]:
    """Return what to do about damage that names and sizes of files do not show."""
    reading = Remedy(command("verify", path), "lists all that is damaged, and what can be done about it")
    return (reading, *_earlier_step(path, damaged_steps, is_proved=True))


def next_step(run: Run, steps: Sequence[RunStep]) -> str:
    """Say what to do about the newest faulty one of some steps of a run, or else about those that cannot be read."""
    faulty = [step for step in steps if step.state == "faulty"]
    if faulty:
        return f"{command('verify', faulty[-1].path)} (what to do about {faulty[-1].name})"
    return run.way_back()


# --- what to do -------------------------------------------------------------------------------------------------------


_DESCRIPTIVE = frozenset({"metadata", "description", "manifest", "key"})
"""Kinds of findings about descriptions, not about elements."""

_MAX_NAMES = 12
"""The most parameters that a line of Python names."""


def _remedies(checkpoint: OpenCheckpoint, damage: Damage, damaged_steps: Collection[str]) -> Iterator[Remedy]:
    """Yield what to do, the cheapest and most exact first.

    A cure that gives up state is not among them where another one keeps it.
    """
    path, kinds = checkpoint.path, damage.kinds
    # Files get their names back.
    if damage.misplaced:
        yield _renamed(path, damage.misplaced)
        damage = damage.without_misplaced
        if not damage:
            return
    # Descriptions are written again.
    has_loss = bool(damage.tensors or damage.items or "unlisted" in kinds)
    if not has_loss and (damage or kinds) and kinds <= _DESCRIPTIVE:
        yield _COPY if checkpoint.faults else _rebuilt(checkpoint)
        return
    if damage.mixed_up:
        yield from _by_stock_description(path)
    # The run goes on from another step, or a copy has the lost files.
    earlier_step = [*_earlier_step(path, damaged_steps, is_proved=bool(damage) and not damage.disk_errors)]
    yield from earlier_step
    if earlier_step:
        return
    if has_loss or "several_saves" in kinds:
        yield _COPY
    # State of the optimizer begins as zeros, where no weight is lost.
    is_state_alone = bool(damage.tensors) and not damage.items and "unlisted" not in kinds and damage.begins_at_zero
    names = sorted({tensor.name or "" for tensor in damage.tensors})
    are_names = len(names) <= _MAX_NAMES and all(name and not name.isdecimal() for name in names)
    if is_state_alone and are_names and checkpoint.format is OWN and not damage.mixed_up:
        is_of_series = StepName.parsed(_with_name(path).name) is not None
        yield Remedy(
            f"{'Series.resume(...' if is_of_series else f'muonckpt.load(state, {str(path)!r}'}, fresh={names!r})",
            f"in Python: the state of {counted(len(names), 'parameter')} begins from zero, also its undamaged part",
        )


_COPY = Remedy(
    "muonckpt verify COPY",
    "tells whether a copy of this checkpoint is whole, if you have one: then copy the damaged files from there",
)


_STAYS = "Series.resume does not pass over it"


def _earlier_step(path: Location, damaged_steps: Collection[str], is_proved: bool) -> Iterator[Remedy]:
    """Yield how the run goes on without a step; ``is_proved``: recorded as damaged, or shown so by its bytes."""
    place = _with_name(path)
    if before := whole_before(place, damaged_steps):
        known_by = "its last verification" if before.verified else "its files' sizes"
        step = f"step {before.step} is the newest whole one besides it, by {known_by}: reads it all"
        resume = ", then resume from that"
        if StepName.parsed(place.name) is not None:
            goes_back = "; Series.resume goes back to it by itself, as the damage is proved"
            resume = goes_back if is_proved else f"{resume}; move this one away first, as {_STAYS}"
        yield Remedy(command("verify", before.path), f"{step}{resume}")


def _renamed(path: Location, misplaced: Mapping[str, str]) -> Remedy:
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
    return Remedy(" && ".join(commands), "gives every file its name back; then verify it")


def _rebuilt(checkpoint: OpenCheckpoint) -> Remedy:
    """Return how to write a checkpoint again with all its descriptions; its elements are whole."""
    path, manifest = checkpoint.path, checkpoint.outline
    # On as many ranks as wrote it, in the same format.
    ranks = {rank_in_name(name) for name in manifest.columns.names} - {None}
    options = ["--mesh", f"dp={max(1, len(ranks))}"]
    if MEGATRON_FILE in manifest.files or is_there(path / MEGATRON_FILE):
        options += ["--format", "torch_dist"]
    return Remedy(
        command("reshard", path, _free_path(path), *options), "writes the same elements with new descriptions"
    )


def _remedies_of_unreadable(path: Location, error: Exception, damaged_steps: Collection[str]) -> Iterator[Remedy]:
    """Yield what to do if a checkpoint's description cannot be read."""
    if is_folder(path):
        # A manifest of a newer version of this package is not damaged.
        if isinstance(error, DamageError) and is_there(path / MANIFEST_FILE):
            yield from _by_stock_description(path)
        yield _COPY
    yield from _earlier_step(path, damaged_steps, is_proved=isinstance(error, DamageError))


def _by_stock_description(path: Location) -> Iterator[Remedy]:
    """Yield how to read a checkpoint without our description of it, if DCP's is whole."""
    if isinstance(path, Path) and has_stock_description(path):
        yield Remedy(
            shell_line("mv", path / MANIFEST_FILE, path / f"{MANIFEST_FILE}.aside"),
            f"makes {METADATA_FILE} the description, without digests and momentum conventions: CRC-32s are all that is "
            f"checked then; a copy of the right {MANIFEST_FILE}, if there is one, has the others",
        )


def _with_name(path: Location) -> Location:
    return path.resolve() if path.name in ("", "..") else path


def _free_path(path: Location) -> Location:
    """Return the path of a checkpoint beside this one that does not exist yet: of the same step, if it is of a run."""
    place = _with_name(path)
    if (name := new_attempt(place)) is not None:
        return place.parent / name
    names = chain([f"{place.name}-rebuilt"], (f"{place.name}-rebuilt{number}" for number in count(2)))
    return next(place.parent / name for name in names if not is_there(place.parent / name))


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
    """Return the checkpoint unless it has faults; those of ``lost_files`` may pass."""
    for fault in checkpoint.faults:
        if not (lost_files and isinstance(fault, LostFileError)):
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
