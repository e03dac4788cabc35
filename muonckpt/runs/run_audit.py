"""Verification of checkpoints that is recorded: of one, of the newest whole one of a run, or of all, in the background.

Each is recorded as soon as it has been read, so that what was interrupted is not lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial

from ..names.errors import LayoutError, RemovedError, SourceError, UnavailableError
from ..names.version import VERSION
from ..store.io.location import Location, Remote, is_there, location
from ..store.io.regular import Pace
from ..store.reading.payloads import Progress
from ..store.verify.audit import AuditReport, damage_in, verify
from ..store.verify.run import Run, RunStep, judged, look_at_folder
from ..store.verify.verification import Verification, look_at_files, record_verification

Auditor = Callable[[Location], AuditReport]
"""Verifies a checkpoint."""


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The verification of one step of a run.

    Attributes:
        step: its present state, by this verification if it was read.
        report: the result; None if the step was not read.
        note: why the verification could not be recorded; empty if it was.
    """

    step: RunStep
    report: AuditReport | None = None
    note: str = ""

    @property
    def sentence(self) -> str:
        """The fault; empty if there is none."""
        return self.step.fault

    @property
    def is_whole(self) -> bool:
        return self.report is not None and self.step.state == "whole"

    @property
    def is_damaged(self) -> bool:
        """True if it is not whole, or is refused although it looked whole: an alarm stays on."""
        return self.step.state == "faulty"

    @property
    def is_unread(self) -> bool:
        """True if it could not be read although it is there: nothing is known of it."""
        return self.step.state == "unread"


def verify_recorded(
    path: Location, auditor: Auditor, folder: Location | None = None
) -> tuple[AuditReport, Verification, str]:
    """Verify a checkpoint and record it; return the report, the entry, and why it could not be recorded.

    Args:
        folder: the folder of a step in which the checkpoint is, if the record is to name that.

    Raises:
        SourceError: as `verify`.
    """
    place = path if folder is None else folder
    # The record is of the files as they were before.
    before = look_at_files(place)
    report = auditor(path)
    damage = report.damage
    entry = Verification(
        timestamp=time.time(),
        verdict=report.verdict,
        sentence=report.diagnosis.sentence,
        has_loss=bool(damage),
        version=VERSION,
        files=before.digest,
    )
    if damage.is_of_disk:
        return report, entry, "not recorded, as a disk fails here and the checkpoint may be whole elsewhere"
    return report, entry, record_verification(place, entry)


def record_damage(path: Location, keys: Collection[str]) -> None:
    """Record as `verify_recorded` that a checkpoint is damaged, where tensors or items have other checksums here, too.

    Nothing is recorded of what this process cannot read, or of files that have changed.

    Args:
        keys: those whose checksums a load has found wrong.
    """
    try:
        before = look_at_files(path)
        damage = damage_in(path, keys)
    except (SourceError, LayoutError, UnavailableError):  # it may be whole elsewhere, or its files show the damage
        return
    if damage is not None:
        entry = Verification(time.time(), "faulty", damage.sentence, True, VERSION, before.digest)
        record_verification(path, entry)


def verify_run(
    path: str | os.PathLike[str] | Remote,
    *,
    every: bool = False,
    jobs: int = 2,
    progress: Progress = lambda count, total: None,
    pace: Pace | None = None,
) -> Iterator[StepVerdict]:
    """Verify the checkpoints of a run, as ``muonckpt verify RUN`` does, and yield the verdict of each when it is known.

    Each is recorded, in the folder of the run, when it has been read.  By default the newest is verified, and if
    something of it is lost those before it, until nothing of one is; those of which a file is lost are not read.  One
    that cannot be read although it is there may be whole, and nothing is recorded of it.

    Args:
        path: the folder of the run: a path, or a URL.
        every: whether to verify all of them: first those never verified, the newest first, then those whose last
            verification is longest ago.
        jobs: threads that read and check.
        progress: called with the bytes read since the last call, and with the total of the checkpoint.
        pace: holds the reading back to a rate.

    Raises:
        SourceError: there is no such folder.
        UnavailableError: it cannot be read.
    """
    run, _ = look_at_folder(location(path, SourceError).absolute(), lambda opened: None)
    return verdicts_of(run, partial(verify, jobs=jobs, progress=progress, pace=pace), every)


def verdicts_of(run: Run, auditor: Auditor, every: bool = False) -> Iterator[StepVerdict]:
    """Verify steps of a run that has been looked at, as `verify_run` does."""

    def order(step: RunStep) -> tuple[float, int, int]:
        return step.verified.timestamp if step.verified else 0.0, -step.step, -step.attempt

    for step in sorted(run.steps, key=order) if every else reversed(run.steps):
        # A step that has lost a file is not read, unless all are requested; others cannot be.
        verdict = StepVerdict(step)
        if step.is_complete or (every and step.state == "faulty"):
            unread = replace(step, is_complete=False)
            try:
                report, entry, note = verify_recorded(step.path, auditor, step.folder)
                verdict = StepVerdict(judged(replace(step, verified=entry), report.damage), report, note)
            except UnavailableError as error:
                verdict = StepVerdict(replace(unread, state="unread", fault=str(error)))
            except SourceError as error:
                if is_there(step.path) and not isinstance(error, RemovedError):
                    verdict = StepVerdict(replace(unread, state="faulty", fault=str(error)))
                else:
                    verdict = StepVerdict(replace(unread, state="removed", fault="it was removed while it was read"))
        yield verdict
        if not (verdict.step.has_loss or every):
            return
