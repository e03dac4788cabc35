"""Work on the elements of checkpoints that may be damaged, without the tensors that are.

Names and sizes of files show most damage before any element is read.  Where the work meets other damage, the
checkpoints are read whole, as `verify` reads them, and it is done again without all that is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

from ...converters.look.contents import FirstLook, first_look
from ...names.errors import LayoutError, SourceError
from ...record.record import Manifest, entry_keys
from ...store.io.location import Location
from ...store.open_checkpoint import OpenCheckpoint
from ...store.reading.payloads import Progress
from ...store.verify.damage import Damage
from ...store.verify.diagnosis import Diagnosis, diagnosis_by_files, open_damaged

Result = TypeVar("Result")


@dataclass(frozen=True)
class PageSource:
    """An open checkpoint, perhaps a damaged one.

    Attributes:
        look: its metadata by role.
        diagnosis: the damage as far as it has been searched for, and what to do.
        left_out: the keys of items that are lost, and of tensors that have lost elements or whose chunks overlap.
    """

    opened: OpenCheckpoint
    look: FirstLook
    diagnosis: Diagnosis
    left_out: frozenset[str]

    @classmethod
    def at(cls, place: Location, stack: ExitStack) -> PageSource:
        """Open a checkpoint, which ``stack`` closes, and look at the names and the sizes of its files.

        Raises:
            SourceError: there is none, or its metadata cannot be read.
        """
        opened = stack.enter_context(open_damaged(place))
        diagnosis = diagnosis_by_files(opened)
        return cls(opened, first_look(opened), diagnosis, _damaged_keys(opened.outline, diagnosis.damage))

    @property
    def damage(self) -> Damage:
        return self.diagnosis.damage

    def read_whole(self, jobs: int, progress: Progress) -> PageSource:
        """Read everything, to find all that is lost."""
        from ...store.verify.audit import audit  # not needed where nothing is damaged

        diagnosis = audit(self.opened, progress, jobs).diagnosis
        return replace(self, diagnosis=diagnosis, left_out=_damaged_keys(self.opened.outline, diagnosis.damage))


def _damaged_keys(manifest: Manifest, damage: Damage) -> frozenset[str]:
    overlapping = entry_keys(tensor for tensor in manifest.tensors if tensor.coverage_fault)
    return frozenset([*damage.items, *entry_keys(damage.tensors), *overlapping])


def on_whole_parts(
    sources: Sequence[PageSource],
    jobs: int,
    progress: Progress,
    work: Callable[[Sequence[PageSource], Progress], Result],
) -> tuple[Sequence[PageSource], Result]:
    """Do ``work`` on all that is whole; return the checkpoints with the damage that is known then, and its result.

    If ``work`` meets damage, all is read to find the rest of it, and ``work`` is done again without what is lost.

    Raises:
        Exception: as ``work`` does on tensors that are whole.
    """
    next_progress = in_turns(progress)
    try:
        return sources, work(sources, next_progress())
    except (SourceError, LayoutError):
        sources = [source.read_whole(jobs, next_progress()) for source in sources]
        return sources, work(sources, next_progress())


def in_turns(progress: Progress) -> Callable[[], Progress]:
    """Return a function that returns, for each of several pieces of work in turn, its progress function."""
    bytes_done = 0

    def next_progress() -> Progress:
        bytes_before = bytes_done

        def advance(count: int, total: int) -> None:
            nonlocal bytes_done
            bytes_done += count
            progress(count, bytes_before + total)

        return advance

    return next_progress
