"""The record of a run's resumes: what was restored, on how many ranks, and whether what ran was proved to be that.

Each is a line of JSON in ``resumes.jsonl`` in the folder of the run, and a second line of that attempt has the proof.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..names.errors import SourceError
from ..names.wording import counted, fields_of, moment
from ..store.io.location import Location, Remote
from ..store.io.regular import open_regular

RESUMES_FILE = "resumes.jsonl"

_MAX_BYTES = 16 << 20


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
        if self.proof["equal"]:
            return f"proved: {counted(self.proof['tensors'], 'tensor')} as they were saved{suffix}"
        return f"not as it was saved: {'; '.join(self.proof['differences'])}{suffix}"

    @property
    def sentence(self) -> str:
        """The resume in one line."""
        ranks = "an unknown number of ranks" if self.ranks_saved is None else counted(self.ranks_saved, "rank")
        return f"from step {self.step}, {moment(self.timestamp)} UTC, {ranks} -> {self.ranks}: {self.verdict}"


def add_resume(folder: Location, step: int, path: str, ranks_saved: int | None, ranks: int) -> Resume:
    """Record that a run was resumed, and return the record.

    Raises:
        OSError, SourceError: it cannot be read or written.
    """
    attempt = max((resume.attempt for resume in _read(folder)[0]), default=0) + 1
    resume = Resume(attempt, round(time.time(), 3), step, path, ranks_saved, ranks)
    add_line(folder, resume)
    return resume


def add_line(folder: Location, resume: Resume) -> None:
    """Write a line behind the others; the last of an attempt counts."""
    line = json.dumps(fields_of(resume)).encode() + b"\n"
    file = folder / RESUMES_FILE
    if isinstance(file, Remote):  # nothing grows in an object store
        file.write(_content(file) + line)
        return
    with file.open("ab+") as lines:
        lines.seek(max(lines.tell() - 1, 0))
        is_torn = lines.read(1) not in (b"", b"\n")  # by a process that was killed
        lines.write(b"\n" * is_torn + line)


def resumes_of(folder: Location) -> tuple[list[Resume], str]:
    """Return the resumes of a run in order, and a sentence about what of the record cannot be read; empty if all is."""
    try:
        resumes, damaged_lines = _read(folder)
    except SourceError as error:
        return [], f"{RESUMES_FILE} cannot be read: {error}"
    return resumes, f"{counted(damaged_lines, 'line')} of {RESUMES_FILE} cannot be read" if damaged_lines else ""


def _read(folder: Location) -> tuple[list[Resume], int]:
    """Return the resumes of a run in order, and the number of damaged lines; none where it has no record.

    Raises:
        SourceError: the record cannot be read.
    """
    # The last line of an attempt counts: it has the proof.
    resumes: dict[int, Resume] = {}
    damaged_lines = 0
    for line in _content(folder / RESUMES_FILE).splitlines():
        try:
            resume = _parsed(json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError, OSError):
            damaged_lines += 1
        else:
            resumes[resume.attempt] = resume
    return [resumes[attempt] for attempt in sorted(resumes)], damaged_lines


def _content(file: Location) -> bytes:
    if not file.exists():
        return b""
    with open_regular(file) as opened:
        if opened.size > _MAX_BYTES:
            raise SourceError(f"{file}: expected a record of at most {_MAX_BYTES} bytes, found {opened.size}")
        return bytes(opened.read(0, opened.size))


def _parsed(data: Any) -> Resume:
    """Return the resume in a line; raises whatever Python does of data that are not as `add_line` writes them."""
    numbers = {name: int(data[name]) for name in ("attempt", "step", "ranks")}
    timestamp, ranks_saved, proof = float(data["timestamp"]), data["ranks_saved"], data["proof"]
    moment(timestamp)  # else nothing could show it
    if proof is not None:
        proof = {
            "equal": bool(proof["equal"]),
            "tensors": int(proof["tensors"]),
            "items": int(proof["items"]),
            "differences": [*map(str, proof["differences"])],
            "unchecked": [*map(str, proof["unchecked"])],
        }
    return Resume(
        timestamp=timestamp,
        path=str(data["path"]),
        ranks_saved=None if ranks_saved is None else int(ranks_saved),
        proof=proof,
        **numbers,
    )
