"""What is wrong with a checkpoint, in one sentence, and what to do about it: what every tool and every error says.

`diagnosis_of` has what was found by reading; `diagnosis_by_files` looks at the presence and the sizes of files alone;
`diagnosis_of_unreadable` is of what cannot be opened; `diagnosis_at` of whatever is at a path.
"""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...names.errors import ADVICE, DamageError, LostFileError, MuonckptError, SourceError
from ...names.wording import Finding, counted, moment
from ...programs.signs import MEGATRON_FILE, METADATA_FILE, TORCH_CHECKPOINTING_FILE
from ...record.record import MANIFEST_FILE, Manifest
from ..formats.native import read_native
from ..formats.registry import OWN, format_of
from ..io.location import Location, Remote, location
from ..open_checkpoint import OpenCheckpoint
from .damage import (
    NOTHING_LOST,
    Damage,
    damage_of_files,
    findings_by_files,
    rank_in_name,
    sentence_of,
    unexplained,
)
from .run import RunStep, StepName, new_attempt, whole_before
from .verification import Verification, last_verification


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something to do about damage: a ``command`` for a shell, or a line of Python, and what that gives."""

    command: str
    gives: str


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What is wrong with a checkpoint.

    Attributes:
        path: of the checkpoint.
        sentence: what is wrong, in terms of a run, without the path; empty if nothing is.
        remedies: what to do, the cheapest and most exact first.
        damage: what is lost.
    """

    path: Location
    sentence: str
    remedies: tuple[Remedy, ...] = ()
    damage: Damage = NOTHING_LOST

    def __bool__(self) -> bool:
        return bool(self.sentence)

    def __str__(self) -> str:
        """Return one paragraph, as errors have it."""
        return str(self.error)

    @property
    def error(self) -> DamageError:
        """The error that says so."""
        return DamageError(f"{self.path}: {self.sentence}", self.advice)

    @property
    def advice(self) -> str:
        """What to do, in one sentence."""
        listed = "; ".join(f"({letter}) {one.command} ({one.gives})" for letter, one in self._lettered())
        return f"{ADVICE}{listed}" if listed else ""

    @property
    def lines(self) -> Iterator[str]:
        """Yield the lines that a terminal shows, a paragraph and a list; none if nothing is wrong."""
        if self.sentence:
            yield f"{self.path}: {self.sentence}."
            yield ""
        if self.remedies:
            yield ADVICE.strip()
            for letter, one in self._lettered():
                yield f"({letter}) {one.command}"
                yield f"    {one.gives}"
            yield ""

    def _lettered(self) -> Iterator[tuple[str, Remedy]]:
        for number, one in enumerate(self.remedies):
            yield chr(ord("a") + number), one

    def to_json(self) -> dict[str, Any] | None:
        """Return it as plain data; None if nothing is wrong."""
        if not self.sentence:
            return None
        return {"sentence": self.sentence, "remedies": self.remedies, "lost": self.damage or None}


def diagnosis_of(
    checkpoint: OpenCheckpoint,
    damage: Damage,
    findings: Sequence[Finding],
    besides: Collection[str] = (),
) -> Diagnosis:
    """Say what is wrong with an open checkpoint.

    Args:
        findings: what was found besides the damage, or explains it.
        besides: the names of other steps of its run that are known to be damaged.
    """
    if not damage and not findings:
        return Diagnosis(checkpoint.path, "", damage=damage)
    others = unexplained(damage, findings)
    remedies = tuple(_remedies(checkpoint, damage, others, besides))
    return Diagnosis(checkpoint.path, sentence_of(damage, others), remedies, damage)


def diagnosis_by_files(
    checkpoint: OpenCheckpoint,
    last: Verification | None,
    besides: Collection[str] = (),
) -> Diagnosis:
    """Say what is wrong with an open checkpoint, as far as files' names and sizes, and its last verification, tell.

    Args:
        last: what was recorded of these very files, by `last_verification`.
        besides: as for `diagnosis_of`.
    """
    diagnosis = diagnosis_of(checkpoint, damage_of_files(checkpoint), findings_by_files(checkpoint), besides)
    if diagnosis or last is None or not last.has_loss:
        return diagnosis
    sentence = f"verified {moment(last.timestamp)} UTC: {last.sentence}"
    return replace(_found_by_reading(checkpoint.path, besides), sentence=sentence)


def diagnosis_of_unreadable(path: Location, error: MuonckptError, besides: Collection[str] = ()) -> Diagnosis:
    """Say what is wrong with what cannot be opened; ``error`` is the reason."""
    if (rest := remains(path)) is not None:
        with rest:
            return diagnosis_by_files(rest, None, besides=besides)
    reason = str(error).removeprefix(f"{path}: ")
    return Diagnosis(path, f"it cannot be opened: {reason}", tuple(_instead_of_unreadable(path, besides)))


def remains(path: Location) -> OpenCheckpoint | None:
    """Open what is left of a checkpoint that cannot be opened, if its format can and something is lost; else None."""
    try:
        if left := format_of(path).without(()):
            opened = OpenCheckpoint(path, left)
            if opened.faults or damage_of_files(opened):
                return opened
    except SourceError:
        pass
    return None


def diagnosis_at(path: Location, besides: Collection[str] = ()) -> Diagnosis:
    """Say what is wrong with a checkpoint, as far as its descriptions and the names and sizes of its files tell."""
    try:
        with OpenCheckpoint(path) as checkpoint:
            return diagnosis_by_files(checkpoint, last_verification(path), besides=besides)
    except MuonckptError as error:
        return diagnosis_of_unreadable(path, error, besides)


def advice_on(path: Location) -> str:
    """Return what is to be said where reading a checkpoint has found damage: what is lost, and what to do."""
    diagnosis = diagnosis_at(path) or _found_by_reading(path)
    return f"{diagnosis.sentence}. {diagnosis.advice}" if diagnosis else diagnosis.advice


def advice_where_none_is_whole(run: Location, damaged: Sequence[str]) -> str:
    """Return what to do about the newest step of a run, given the names of its steps, all damaged."""
    path = run / max(damaged)
    return (diagnosis_at(path, damaged) or _found_by_reading(path, damaged)).advice


def _found_by_reading(path: Location, besides: Collection[str] = ()) -> Diagnosis:
    """Return what to do about damage that names and sizes of files do not show."""
    remedies = [Remedy(command("verify", path), "lists all that is damaged, and what can be done about it")]
    if before := _step_before(path, besides):
        remedies.append(_gone_back(path, before, by_itself=True))
    return Diagnosis(path, "", tuple(remedies))


# --- what to do -------------------------------------------------------------------------------------------------------


_DESCRIPTIVE = frozenset({"metadata", "description", "manifest", "key"})
"""Kinds of findings about descriptions, of which the elements know nothing."""


def _remedies(
    checkpoint: OpenCheckpoint, damage: Damage, findings: Sequence[Finding], besides: Collection[str]
) -> Iterator[Remedy]:
    """Yield what to do, the cheapest and most exact first.

    What gives up state is not among them where something else keeps it.
    """
    path, kinds = checkpoint.path, {finding.kind for finding in findings}
    if damage.misplaced:
        yield Remedy(" && ".join(_moves(path, damage.misplaced)), "gives every file its name back; then verify it")
        if not (damage := damage.without_misplaced):
            return
    lost = bool(damage.tensors or damage.items or "unlisted" in kinds)
    if not lost and (damage or kinds) and kinds <= _DESCRIPTIVE:
        yield _rebuilt(checkpoint)
        return
    if damage.mixed_up and _has_stock_description(path):
        yield _from_stock(path, "what the files have, of which save it may be,")
    before = _step_before(path, besides)
    if before is not None:
        yield _gone_back(path, before, by_itself=lost)
    if damage.mixed_up:
        return
    if "several_saves" in kinds:
        yield Remedy(
            f"{command('salvage', path, _free(path, 'salvaged'), '--from')} OTHER",
            "keeps what is of the save of OTHER, a copy of this checkpoint in any format, and takes the others from it",
        )
        return
    if not lost:
        if before is None and kinds & {"nonfinite"}:
            yield Remedy(command("stats", path), "says which tensors have such elements, and how many")
        return
    new = _free(path, "salvaged")
    if before is not None:
        yield Remedy(
            command("salvage", path, new, "--from", before.path, "--mix-steps"),
            f"writes what is whole here, and what is lost as it was at step {before.step}, with a list of it; "
            "a mixture that no step of the run had",
        )
        return
    if damaged := sorted({*besides} - {path.name}):
        yield Remedy(
            command("salvage", path, new, "--from", path.parent / damaged[-1], "--mix-steps"),
            "takes what is lost from that step, which is damaged too: if it has lost the same, nothing is written",
        )
    yield Remedy(
        f"{command('salvage', path, new, '--from')} OTHER",
        "takes what is lost from a copy, a replica or another step, if you have one: none is beside it",
    )
    if damage.tensors and not damage.items and "unlisted" not in kinds and damage.begins_anew:
        yield from _fresh(path, new, damage, checkpoint.format is OWN)


def _moves(path: Location, misplaced: Mapping[str, str]) -> Iterator[str]:
    """Yield the commands that give files their names; one that would be replaced is kept under a name of its own."""
    places, vacant = dict(misplaced), set[str]()

    def move(source: str, destination: str) -> str:
        vacant.add(source)
        return shlex.join(["mv", str(path / source), str(path / destination)])

    while places:
        name = next((name for name in places if name not in places.values()), next(iter(places)))
        if name not in vacant and (path / name).exists():
            yield move(name, f"{name}.aside")
            places = {other: f"{name}.aside" if file == name else file for other, file in places.items()}
        else:
            yield move(places.pop(name), name)


def _fresh(path: Location, new: str, damage: Damage, is_ours: bool) -> Iterator[Remedy]:
    """Yield how to begin lost state of the optimizer anew, which only this keeps all the rest."""
    yield Remedy(
        command("salvage", path, new, "--fresh", "*"),
        "writes what is whole, and zeros where state of the optimizer is lost: no weight is",
    )
    names = sorted({tensor.name or "" for tensor in damage.tensors})
    if is_ours and len(names) <= _MOST_NAMES and all(name and not name.isdecimal() for name in names):
        yield Remedy(
            f"muonckpt.load(state, {str(path)!r}, fresh={names!r})",
            f"in Python: the state of {counted(len(names), 'parameter')} begins anew, also what is whole of it",
        )


_MOST_NAMES = 12


def _rebuilt(checkpoint: OpenCheckpoint) -> Remedy:
    """Return how to write a checkpoint again with all its descriptions; its elements are whole."""
    path = checkpoint.path
    what = "the same elements with new descriptions"
    kept = "; muonckpt.load reads this one as it is, too" if checkpoint.format is OWN else ""
    lost = f"; a copy of {MANIFEST_FILE}, if there is one, would also keep its digests" * checkpoint.lacks_manifest
    salvaged = command("salvage", path, _free(path, "salvaged"))  # where nothing else opens it
    return Remedy(salvaged if checkpoint.faults else _reshard(path, checkpoint.outline), f"writes {what}{kept}{lost}")


_WRITTEN_AS = {MEGATRON_FILE: "torch_dist", TORCH_CHECKPOINTING_FILE: "torch_checkpointing"}
"""The word for ``--format`` by the file that another program needs beside a manifest."""


def _reshard(path: Location, manifest: Manifest) -> str:
    """Return the command that writes a checkpoint anew on as many ranks as wrote it."""
    ranks = {rank_in_name(name) for name in manifest.columns.names} - {None}
    written = {*manifest.files, *(file for file in _WRITTEN_AS if (path / file).exists())}
    form = next((("--format", word) for file, word in _WRITTEN_AS.items() if file in written), ())
    return command("reshard", path, _free(path, "rebuilt"), "--mesh", f"dp={max(1, len(ranks))}", *form)


def _gone_back(path: Location, before: RunStep, by_itself: bool) -> Remedy:
    itself = ""
    if by_itself and StepName.parsed(path.name) and StepName.parsed(before.name):
        itself = "; Series.restore does so by itself"
    whole = f"step {before.step} is the newest whole one besides it, by its files' sizes"
    return Remedy(command("verify", before.path), f"{whole}: reads it all, then resume from that{itself}")


def _instead_of_unreadable(path: Location, besides: Collection[str]) -> Iterator[Remedy]:
    """Yield what to do if a checkpoint's description cannot be read."""
    if _is_damaged(path) and _has_stock_description(path):
        yield _from_stock(path, "the same elements")
    elif path.is_dir():
        yield Remedy(
            f"{command('verify')} COPY",
            "tells whether a copy of this checkpoint is whole, if you have one: then copy the damaged file from there",
        )
    if before := _step_before(path, besides):
        yield _gone_back(path, before, by_itself=True)


def _from_stock(path: Location, what: str) -> Remedy:
    """Return how to write a checkpoint without our description of it."""
    return Remedy(
        command("salvage", path, _free(path, "salvaged")),
        f"reads {METADATA_FILE} instead, and writes {what} with a new {MANIFEST_FILE}; a copy of the right "
        f"{MANIFEST_FILE}, if there is one, would also keep its digests",
    )


def _is_damaged(path: Location) -> bool:
    """Return whether our description of a checkpoint is there, and damaged; one of a newer version is not."""
    try:
        if (path / MANIFEST_FILE).exists():
            read_native(path)
    except SourceError as error:
        return isinstance(error, DamageError)
    return False


def _has_stock_description(path: Location) -> bool:
    """Return whether DCP's description of a checkpoint, and all that it describes, are there."""
    from ..formats.dcp import DcpReader  # not needed where nothing is wrong

    try:
        return not DcpReader(path).faults
    except SourceError:
        return False


def _step_before(path: Location, besides: Collection[str] = ()) -> RunStep | None:
    return whole_before(path.resolve() if path.name in ("", "..") else path, besides)


def _free(path: Location, word: str) -> str:
    """Return the path of a checkpoint beside this one that does not exist yet: of the same step, if it is of a run."""
    place = path.resolve() if path.name in ("", "..") else path
    if (name := new_attempt(place)) is not None:
        return str(place.parent / name)
    names = (f"{place.name}-{word}{number}" for number in ("", *range(2, 1000)))
    return str(next(new for name in names if not (new := place.parent / name).exists()))


def command(*words: object) -> str:
    """Return a command of ours as it can be pasted into a shell."""
    return shlex.join(["muonckpt", *map(str, words)])


# --- opening what has to be whole, as far as descriptions and the sizes of files tell ---------------------------------


def open(path: str | os.PathLike[str] | Remote) -> OpenCheckpoint:
    """Open a checkpoint of any known format, in a folder, a file, or an object store.

    Reads its metadata; needs no torch.

    Args:
        path: a path, or a URL such as ``s3://bucket/step1000``.

    Raises:
        SourceError: there is no checkpoint, its metadata are damaged or refused, or no installed library supports the
            protocol.  Of a damaged one it says what is lost, and what to do.
    """
    return _refused(open_damaged(location(path, SourceError)), lost_files=False)


def open_to_load(path: str | os.PathLike[str] | Remote) -> OpenCheckpoint:
    """Open a checkpoint although files of it may be missing or cut, for those who check all that they read.

    Raises:
        SourceError: as `open`, but not for lost files.
    """
    return _refused(open_damaged(location(path, SourceError)), lost_files=True)


def _refused(checkpoint: OpenCheckpoint, lost_files: bool) -> OpenCheckpoint:
    """Return the checkpoint unless it has faults, of which those of ``lost_files`` may be meant to pass."""
    faults = [fault for fault in checkpoint.faults if not (lost_files and isinstance(fault, LostFileError))]
    if not faults and not checkpoint.lacks_manifest:
        return checkpoint
    for fault in faults:
        diagnosis = diagnosis_by_files(checkpoint, None)
        raise diagnosis.error if isinstance(fault, DamageError) else type(fault)(str(diagnosis)) from fault
    warnings.warn(
        f"{checkpoint.path} was saved with a {MANIFEST_FILE}, which is missing: it is read as a stock checkpoint, "
        f"without digests, momentum conventions and layouts, which a copy of {MANIFEST_FILE} would give back, if there "
        "is one; whatever is written from it has new descriptions of the same elements",
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
    except DamageError as error:
        raise diagnosis_of_unreadable(place, error).error from error


def check_files(checkpoint: OpenCheckpoint) -> None:
    """Check that every recorded file is there, and long enough, and that the last verification has found no loss.

    Reads no data.

    Raises:
        DamageError: something is lost; says what, and what to do.
    """
    if diagnosis := diagnosis_by_files(checkpoint, last_verification(checkpoint.path)):
        raise diagnosis.error
