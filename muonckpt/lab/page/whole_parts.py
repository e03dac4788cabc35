"""Damaged checkpoints are looked at, too: work on their elements is done without the tensors that are damaged.

Names and sizes of files show most damage before any element is read.  Where work on the rest then meets other damage,
the checkpoints are read whole, as `verify` reads them, and the work is done again without all that is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

from ...converters.look.contents import FirstLook, first_look
from ...names.errors import LayoutError, SourceError
from ...record.record import Manifest
from ...store.io.location import Location
from ...store.open_checkpoint import OpenCheckpoint
from ...store.reading.payloads import Progress
from ...store.verify.damage import Damage
from ...store.verify.diagnosis import Diagnosis, diagnosis_by_files, open_damaged
from ...store.verify.verification import last_verification

R = TypeVar("R")


@dataclass(frozen=True)
class Looked:
    """An open checkpoint, perhaps a damaged one.

    Attributes:
        known: its metadata by role.
        diagnosis: what is wrong, as far as was looked, and what to do.
        left_out: the keys of items that are lost, and of tensors that have lost elements or whose chunks overlap.
    """

    opened: OpenCheckpoint
    known: FirstLook
    diagnosis: Diagnosis
    left_out: frozenset[str]

    @classmethod
    def at(cls, place: Location, stack: ExitStack) -> Looked:
        """Open a checkpoint, which ``stack`` closes, and look at the names and the sizes of its files.

        Raises:
            SourceError: there is none, or its metadata cannot be read.
        """
        opened = stack.enter_context(open_damaged(place))
        diagnosis = diagnosis_by_files(opened, last_verification(opened.path))
        return cls(opened, first_look(opened), diagnosis, _left_out(opened.outline, diagnosis.damage))

    @property
    def damage(self) -> Damage:
        return self.diagnosis.damage

    def read_whole(self, jobs: int, progress: Progress) -> Looked:
        """Read everything, to find all that is lost."""
        from ...store.verify.audit import audit  # not needed where nothing is damaged

        diagnosis = audit(self.opened, progress, jobs).diagnosis
        return replace(self, diagnosis=diagnosis, left_out=_left_out(self.opened.outline, diagnosis.damage))


def _left_out(manifest: Manifest, damage: Damage) -> frozenset[str]:
    keys = {*damage.items, *(tensor.key for tensor in damage.tensors)}
    for tensor in manifest.tensors:
        try:
            tensor.chunk_layout()
        except LayoutError:
            keys.add(tensor.key)
    return frozenset(keys)


def on_whole_parts(
    checkpoints: Sequence[Looked], jobs: int, progress: Progress, work: Callable[[Sequence[Looked], Progress], R]
) -> tuple[Sequence[Looked], R]:
    """Do ``work`` on all that is whole; return the checkpoints with all the damage that is known then, and its result.

    Raises:
        Exception: as ``work`` does on tensors that are whole.
    """
    turn = in_turns(progress)
    try:
        return checkpoints, work(checkpoints, turn())
    except (SourceError, LayoutError):
        checkpoints = [one.read_whole(jobs, turn()) for one in checkpoints]
        return checkpoints, work(checkpoints, turn())


def in_turns(progress: Progress) -> Callable[[], Progress]:
    """Return what makes a function for the progress of each of several pieces of work, one after the other."""
    done = 0

    def turn() -> Progress:
        before = done

        def advance(count: int, total: int) -> None:
            nonlocal done
            done += count
            progress(count, before + total)

        return advance

    return turn
