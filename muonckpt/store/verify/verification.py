"""The record of when checkpoints were last verified: a small JSON file for each, in a folder where they lie.

A checkpoint is published once and never changed.  So an entry holds for the very files that were read: a checkpoint
that is changed, copied or restored has other files, and no entry.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import xxhash

from ...names.errors import RemovedError, SourceError, UnavailableError
from ...names.wording import fields_of, listed, moment
from ...programs.signs import METADATA_FILE
from ...record.record import MANIFEST_FILE
from ..io.location import Location, Remote, is_folder, is_link, is_there, local_errors, names_in
from ..io.new_file import write_synced
from ..io.publish import MARK
from ..io.regular import open_regular

RECORD = ".muonckpt-verified"
"""The folder of the record, with a file for each checkpoint that has its name."""

_MAX_BYTES = 1 << 20

_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
"""Fields of a store's description of an object that say when it was written."""

_IDENTITIES = ("ETag", "etag", "generation", "version_id", "ino", *_TIMES)


@dataclass(frozen=True, slots=True)
class Verification:
    """The last verification of a checkpoint.

    Attributes:
        timestamp: of its end, in seconds since 1970.
        verdict: as in `AuditReport`.
        sentence: the fault; empty if there is none.
        has_loss: whether elements or items are lost.
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

    @property
    def finding(self) -> str:
        """The fault that it has found, and when."""
        return f"verified {moment(self.timestamp)} UTC: {self.sentence}"


@dataclass(frozen=True, slots=True)
class FilesState:
    """The files of a checkpoint, without their contents.

    Attributes:
        bytes: of all of them.
        saved: when its description was written, or else the last file, in seconds since 1970; None if not known.
        digest: over names, sizes, times and identities: another one for a changed checkpoint, and for a copy.
    """

    bytes: int
    saved: float | None
    digest: str


def look_at_files(place: Location) -> FilesState:
    """Look at all files of a checkpoint, which is a folder or a file; none are opened.

    Raises:
        UnavailableError: they cannot be listed.
    """
    facts: list[_FileFacts] = []
    if isinstance(place, Remote):
        for path, info in place.described().items():
            identity = json.dumps([str(info[name]) for name in _IDENTITIES if name in info])
            moments = (_seconds(info[name]) for name in _TIMES if name in info)
            facts.append((path, int(info.get("size") or 0), next(moments, None), identity))
    else:
        facts += _local_facts(place)
    facts = sorted(fact for fact in facts if not fact[0].startswith(f"{RECORD}/"))
    # A file that has been damaged, or put back, since then has a later time.
    times = [time for _, _, time, _ in facts if time is not None]
    described = [time for name, _, time, _ in facts if time is not None and name in (MANIFEST_FILE, METADATA_FILE)]
    names = json.dumps([(name, size, identity) for name, size, _, identity in facts])
    digest = xxhash.xxh3_128_hexdigest(names.encode())
    saved = min(described) if described else max(times, default=None)
    return FilesState(sum(size for _, size, _, _ in facts), saved, digest)


@contextmanager
def unless_removed(place: Location) -> Iterator[None]:
    """Raise `RemovedError` if a checkpoint is being removed, or was, whole or in part, while the block read it.

    A removal begins with a rename, or a mark in a store; other programs delete one file after another.
    """
    before = _names_at(place)
    if MARK in before:
        raise RemovedError(f"{place} is being removed")
    cause: Exception | None = None
    try:
        yield
    except (SourceError, OSError) as error:
        cause = error
    now = _names_at(place)
    missing = sorted(before - now)
    if "" in missing or MARK in now:
        raise RemovedError(f"{place} was removed while it was read") from cause
    if missing:
        raise RemovedError(f"{place} lost files while it was read: {listed(missing, 3)} was removed") from cause
    if cause is not None:
        raise cause


def _names_at(place: Location) -> set[str]:
    """Return the names in a folder, and an empty one for the place itself; none if nothing is there."""
    try:
        return {"", *names_in(place)}
    except NotADirectoryError:
        return {""}
    except FileNotFoundError:
        return set()


_FileFacts = tuple[str, int, float | None, str]
"""The name, the size, the time of writing and the identity of a file."""


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


def _local_facts(place: Path) -> Iterable[_FileFacts]:
    if not is_folder(place):
        with suppress(FileNotFoundError, NotADirectoryError), local_errors(place):
            yield _file_facts(".", place.stat())
        return
    pending = [(str(place), "")]
    while pending:
        folder, prefix = pending.pop()
        with suppress(FileNotFoundError), local_errors(folder), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append((entry.path, f"{prefix}{entry.name}/"))
                elif entry.is_file():
                    with suppress(FileNotFoundError):  # it is being saved or removed
                        yield _file_facts(f"{prefix}{entry.name}", entry.stat())


def _file_facts(name: str, status: os.stat_result) -> _FileFacts:
    # The time of change is in the identity, because no program can put it back.
    return name, status.st_size, status.st_mtime, f"{status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns}"


def read_verification(place: Location) -> Verification | None:
    """Read the last verification of a checkpoint, whatever its files are now; None if there is no valid one.

    Raises:
        UnavailableError: the record may be there, and cannot be read.
    """
    try:
        with open_regular(place.parent / RECORD / place.name) as file:
            entry = json.loads(file.read(0, min(file.size, _MAX_BYTES)))
    except (SourceError, ValueError, RecursionError):
        return None
    match entry:
        case {
            "timestamp": int() | float() as timestamp,
            "verdict": str(verdict),
            "sentence": str(sentence),
            "has_loss": bool(has_loss),
            "version": str(version),
            "files": str(files),
        }:
            return Verification(timestamp, verdict, sentence, has_loss, version, files)
    return None


def record_verification(checkpoint: Location, entry: Verification) -> str:
    """Record that a checkpoint has been verified; return a note if that is not possible.

    If its files have changed since ``entry.files``, nothing is recorded.  Several processes may record in one folder at
    a time.
    """
    place = checkpoint.absolute()
    record, text = place.parent / RECORD, json.dumps(fields_of(entry), indent=1).encode()
    try:
        if look_at_files(place).digest != entry.files:
            return f"not recorded: the files of {checkpoint} changed while they were verified"
        if isinstance(record, Remote):
            (record / place.name).write(text)
        else:
            _write_entry(record, place.name, text)
    except (UnavailableError, OSError) as error:
        return f"when it was verified cannot be recorded in {place.parent}: {getattr(error, 'strerror', None) or error}"
    return ""


def _write_entry(record: Path, name: str, text: bytes) -> None:
    if is_link(record):
        raise OSError(f"{record} is a symbolic link, expected a folder")
    record.mkdir(exist_ok=True)
    # The file changes at once.
    draft = record / f".{name}.{os.urandom(8).hex()}"
    try:
        write_synced(draft, text)
        draft.replace(record / name)
    finally:
        draft.unlink(missing_ok=True)
    # Checkpoints that are gone leave the record, and so do drafts of processes that were killed.
    for entry in record.iterdir():
        checkpoint = entry.name[1:].rpartition(".")[0] if entry.name.startswith(".") else entry.name
        if not (checkpoint and is_there(record.parent / checkpoint)):
            entry.unlink(missing_ok=True)
