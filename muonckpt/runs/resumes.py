"""The record of a run's resumes: what was restored, on how many ranks, and whether what ran was proved to be that.

Each resume is a small file of JSON in the folder ``resumes`` of the run, and each proof of it another one.  No file is
ever written again, so processes that restore at one moment do not see each other.  The name begins with the time.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..names.errors import SourceError
from ..names.resumption import as_initialised
from ..names.wording import counted, moment
from ..store.io.location import Location, Remote, is_link, map_each, names_in
from ..store.io.regular import open_regular

RESUMES_FOLDER = "resumes"

_NAME = re.compile(r"(?P<stem>(?P<time>[0-9]{1,11}\.[0-9]{6})-[0-9a-f]{12})(?P<proof>\.proof-[0-9.]+)?\.json")

_MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Resume:
    """A resume of a run.

    Attributes:
        attempt: from 1, in the order in which the run was resumed.
        timestamp: in seconds since 1970.
        step, path: of the checkpoint that was restored.
        ranks_saved, ranks: how many processes wrote it, None if that is not recorded, and how many restored it.
        proof: a `ResumeProof` as JSON data; None if what ran was not checked.
    """

    attempt: int
    timestamp: float
    step: int
    path: str
    ranks_saved: int | None
    ranks: int
    proof: Mapping[str, Any] | None = None

    @property
    def verdict(self) -> str:
        """One phrase: proved, not checked, or what differs."""
        if self.proof is None:
            return "not checked"
        unchecked = self.proof["unchecked"]
        suffix = f"; not checked: {', '.join(unchecked)}" if unchecked else ""
        weights = self.proof["initialised"]
        prefix = f"{as_initialised(weights)}; " if weights else ""
        if self.proof["equal"]:
            return f"{prefix}proved: {counted(self.proof['tensors'], 'tensor')} as they were saved{suffix}"
        return f"{prefix}not as it was saved: {'; '.join(self.proof['differences'])}{suffix}"

    @property
    def sentence(self) -> str:
        """The resume in one line."""
        ranks = f"on {counted(self.ranks, 'rank')}"
        if self.ranks_saved is not None:
            ranks = f"{counted(self.ranks_saved, 'rank')} -> {self.ranks}"
        return f"from step {self.step}, {moment(self.timestamp)} UTC, {ranks}: {self.verdict}"


class ResumeRecord(NamedTuple):
    """The records of a run's resumes.

    Attributes:
        times: when each resume was, in order, in seconds since 1970.
        resumes: the last of them that can be read, in order.
        unread: a sentence about what of the record cannot be read; empty if all is.
    """

    times: tuple[float, ...] = ()
    resumes: tuple[Resume, ...] = ()
    unread: str = ""


def add_resume(folder: Location, step: int, path: str, ranks_saved: int | None, ranks: int) -> str:
    """Record that a run was resumed; return the name by which `add_proof` knows the resume.

    Raises:
        OSError, MuonckptError: it cannot be written, or the folder of resumes is a link.
    """
    stem = f"{_now()}-{secrets.token_hex(6)}"
    _add(folder, f"{stem}.json", {"step": step, "path": path, "ranks_saved": ranks_saved, "ranks": ranks})
    return stem


def add_proof(folder: Location, resume: str, proof: Mapping[str, Any]) -> None:
    """Record the proof of a resume, given by its name; of several the last counts.  Raises as `add_resume`."""
    _add(folder, f"{resume}.proof-{_now()}.json", proof)


def _now() -> str:
    return f"{time.time():.6f}"


def _add(folder: Location, name: str, fields: Mapping[str, Any]) -> None:
    place, data = folder / RESUMES_FOLDER, json.dumps(fields).encode()
    if isinstance(place, Remote):
        (place / name).write(data)
        return
    # No link is followed, neither in the place of the folder nor in that of the file.
    place.mkdir(exist_ok=True)
    handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o666, dir_fd=handle), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.fsync(handle)
    finally:
        os.close(handle)


def resumes_of(folder: Location, max_read: int = 100) -> ResumeRecord:
    """Read the records of a run's resumes.

    Args:
        max_read: the most resumes that are read; all others are counted by their names.

    Raises:
        UnavailableError: the record may be there, and cannot be read.
    """
    place = folder / RESUMES_FOLDER
    if is_link(place):
        return ResumeRecord(unread=f"{RESUMES_FOLDER} cannot be read: it is a symbolic link, expected a folder")
    try:
        names = names_in(place)
    except FileNotFoundError:
        return ResumeRecord()
    except NotADirectoryError:
        return ResumeRecord(unread=f"{RESUMES_FOLDER} cannot be read: expected a folder")
    # Names begin with the time; the last proof of a resume counts.
    matches = list(filter(None, map(_NAME.fullmatch, names)))
    proofs = {match["stem"]: match[0] for match in matches if match["proof"]}
    stems = sorted({match["stem"]: float(match["time"]) for match in matches}.items(), key=lambda item: item[1])
    numbered = list(enumerate(stems, 1))[-max_read:]

    def read(of_resume: tuple[int, tuple[str, float]]) -> Resume | None:
        attempt, (stem, timestamp) = of_resume
        try:
            return _parsed(attempt, timestamp, _content(place, f"{stem}.json"), _content(place, proofs.get(stem)))
        except (SourceError, ValueError, TypeError, KeyError, RecursionError, OverflowError, OSError):
            return None

    resumes = map_each(place, read, numbered)
    damaged = resumes.count(None)
    unread = f"{counted(damaged, 'record')} in {RESUMES_FOLDER} cannot be read" if damaged else ""
    return ResumeRecord(tuple(timestamp for _, timestamp in stems), tuple(filter(None, resumes)), unread)


def _content(place: Location, name: str | None) -> Any:
    if name is None:
        return None
    with open_regular(place / name) as file:
        if file.size > _MAX_BYTES:
            raise SourceError(f"{place / name}: expected at most {_MAX_BYTES} bytes, found {file.size}")
        return json.loads(file.read(0, file.size))


def _parsed(attempt: int, timestamp: float, fields: Any, proof: Any) -> Resume:
    """Return the resume in a file; raises whatever Python does of data that are not as `add_resume` writes them."""
    moment(timestamp)  # else nothing could show it
    if proof is not None:
        proof = {
            "equal": bool(proof["equal"]),
            "tensors": int(proof["tensors"]),
            "items": int(proof["items"]),
            "differences": [*map(str, proof["differences"])],
            "unchecked": [*map(str, proof["unchecked"])],
            "initialised": int(proof.get("initialised", 0)),
        }
    ranks_saved = fields["ranks_saved"]
    return Resume(
        attempt,
        timestamp,
        int(fields["step"]),
        str(fields["path"]),
        None if ranks_saved is None else int(ranks_saved),
        int(fields["ranks"]),
        proof,
    )
