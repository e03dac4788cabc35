"""The record of when checkpoints were last verified: one small JSON file in the folder where they lie.

A checkpoint is published once and never changed, so the record is beside it.  An entry holds for the very files that
were read: a checkpoint that is changed, copied or restored has other files, and no entry.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import xxhash

from ...names.errors import SourceError
from ...names.version import VERSION
from ...names.wording import fields_of
from ..io.location import Location, Remote, at_each
from ..io.lock import waiting
from ..io.new_file import content, write_synced
from ..io.regular import open_regular

RECORD = ".muonckpt-verified.json"
"""The name of the record: a file, or in a store a folder with an object for each checkpoint."""

_MOST_BYTES = 64 << 20

_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
"""Fields of a store's description of an object that say when it was written."""

_IDENTITIES = ("ETag", "etag", "generation", "version_id", "ino", *_TIMES)


@dataclass(frozen=True, slots=True)
class Verification:
    """The last verification of a checkpoint.

    Attributes:
        timestamp: of its end, in seconds since 1970.
        verdict: as `AuditReport` has it.
        sentence: what is wrong; empty if nothing is.
        has_loss: whether elements or items are lost; else all that was saved can be loaded.
        version: of the muonckpt that read it.
        files: the `FilesState.digest` of what was read.
    """

    timestamp: float
    verdict: str
    sentence: str
    has_loss: bool
    version: str
    files: str

    @property
    def is_whole(self) -> bool:
        return self.verdict != "faulty"


@dataclass(frozen=True, slots=True)
class FilesState:
    """The files of a checkpoint, without what is in them.

    Attributes:
        bytes: of all of them.
        last: when the last of them was written, in seconds since 1970; None where a store does not say.
        digest: over their names, sizes, times and identities: another one for a changed checkpoint, and for a copy.
            A local file's time of change is among them, which no program can put back.
    """

    bytes: int
    last: float | None
    digest: str


def look_at_files(place: Location) -> FilesState:
    """Look at all files of a checkpoint, which is a folder or a file; none are opened.

    Raises:
        OSError: they cannot be listed.
    """
    facts = sorted(_facts(place), key=lambda fact: fact[0])
    times = [time for _, _, time, _ in facts if time is not None]
    names = json.dumps([(name, size, identity) for name, size, _, identity in facts])
    digest = xxhash.xxh3_128_hexdigest(names.encode())
    return FilesState(sum(size for _, size, _, _ in facts), max(times, default=None), digest)


def _facts(place: Location) -> Iterable[tuple[str, int, float | None, str]]:
    """Yield the name, the size, the time of writing and the identity of each file."""
    if isinstance(place, Remote):
        for path, info in place.described().items():
            identity = json.dumps([str(info[name]) for name in _IDENTITIES if name in info])
            times = (_seconds(info[name]) for name in _TIMES if name in info)
            yield path, int(info.get("size") or 0), next(times, None), identity
        return
    if not place.is_dir():
        with suppress(FileNotFoundError):
            yield _fact(".", place.stat())
        return
    pending = [(str(place), "")]
    while pending:
        folder, prefix = pending.pop()
        with suppress(FileNotFoundError, PermissionError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append((entry.path, f"{prefix}{entry.name}/"))
                elif entry.is_file() and entry.name != RECORD:
                    with suppress(FileNotFoundError):  # it is being saved or removed
                        yield _fact(f"{prefix}{entry.name}", entry.stat())


def _fact(name: str, facts: os.stat_result) -> tuple[str, int, float | None, str]:
    return name, facts.st_size, facts.st_mtime, f"{facts.st_ino} {facts.st_mtime_ns} {facts.st_ctime_ns}"


def _seconds(time: object) -> float | None:
    match time:
        case datetime():
            return time.timestamp()
        case int() | float():
            return float(time)
        case str():
            with suppress(ValueError):
                return datetime.fromisoformat(time).timestamp()
    return None


def read_verifications(folder: Location) -> Mapping[str, Verification]:
    """Read the record of a folder: the last verification of each checkpoint in it, by name.

    What is not as this package writes it counts as not recorded.
    """
    if isinstance(folder, Remote):
        place = folder / RECORD
        try:
            objects = list(place.iterdir())
            parts = dict(zip([entry.name for entry in objects], at_each(place, content, objects), strict=True))
        except OSError:
            return {}
        return _valid({name: _plain(raw) for name, raw in parts.items()})
    try:
        with open_regular(folder / RECORD) as file:
            raw = file.read(0, min(file.size, _MOST_BYTES))
    except SourceError:
        return {}
    match _plain(raw):
        case {"checkpoints": dict(entries)}:
            return _valid(entries)
    return {}


def _plain(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _valid(entries: Mapping[str, Any]) -> dict[str, Verification]:
    valid = {}
    for name, entry in entries.items():
        match entry:
            case {
                "timestamp": int() | float() as timestamp,
                "verdict": str(verdict),
                "sentence": str(sentence),
                "has_loss": bool(has_loss),
                "version": str(version),
                "files": str(files),
            }:
                valid[name] = Verification(float(timestamp), verdict, sentence, has_loss, version, files)
    return valid


def last_verification(checkpoint: Location) -> Verification | None:
    """Return the last verification of a checkpoint as it is now; None if that is not recorded.

    Lists its files and reads the record beside it.
    """
    place = checkpoint.absolute()
    for recorded in (place, place.parent):  # the checkpoint of a step may lie in the step's folder
        entry = read_verifications(recorded.parent).get(recorded.name)
        with suppress(OSError):
            if entry and entry.files == look_at_files(recorded).digest:
                return entry
    return None


def record_verification(checkpoint: Location, verdict: str, sentence: str, has_loss: bool, before: FilesState) -> str:
    """Record that a checkpoint has been verified; return a note if that is not possible.

    Several processes may record in one folder at a time: nothing that one of them writes is lost.

    Args:
        verdict, sentence, has_loss: as `Verification` has them.
        before: its files when the verification began; if they have changed since, nothing is recorded.
    """
    place = checkpoint.absolute()
    try:
        if look_at_files(place) != before:
            return f"not recorded: the files of {checkpoint} changed while they were verified"
        _add(place.parent, place.name, Verification(time.time(), verdict, sentence, has_loss, VERSION, before.digest))
    except OSError as error:
        reason = error.strerror or error
        return f"when it was verified cannot be recorded in {place.parent}: {reason}"
    return ""


def _add(folder: Location, name: str, entry: Verification) -> None:
    if isinstance(folder, Remote):
        (folder / RECORD / name).write(json.dumps(fields_of(entry)).encode())
        return
    with waiting(folder):
        kept = {other: one for other, one in read_verifications(folder).items() if (folder / other).exists()}
        entries = {other: fields_of(one) for other, one in sorted({**kept, name: entry}.items())}
        text = json.dumps({"muonckpt": VERSION, "checkpoints": entries}, indent=1)
        _replace(folder / RECORD, text.encode())


def _replace(file: Path, data: bytes) -> None:
    """Give a small file other contents at once; drafts of killed processes go, as the folder is locked."""
    for abandoned in file.parent.glob(f"{file.name}.*.tmp"):
        abandoned.unlink(missing_ok=True)
    draft = file.with_name(f"{file.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        write_synced(draft, data)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
