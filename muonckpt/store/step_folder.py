"""A folder of checkpoints by step: which are whole, which may go, and what killed runs have left.

There is no record besides its files, so any process may look at any time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..errors import DamageError, DestinationError
from ..record import MANIFEST_FILE
from .formats import native
from .formats.dcp import named_items
from .formats.signs import METADATA_FILE
from .io import publish
from .io.checksums import xxh3_128
from .io.limits import gc_paused
from .io.location import Location, Remote, at_each
from .io.new_file import write_synced
from .io.publish import CLAIM
from .io.regular import check_extents, read_whole
from .run import StepName

_DESCRIPTIONS = (MANIFEST_FILE, METADATA_FILE)

_IDENTITY = ".muonckpt.run"


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest whole checkpoint, or None, and the newer ones that are not whole, each with its fault."""

    name: StepName | None
    faults: Mapping[StepName, str]


@dataclass(frozen=True, slots=True)
class StepFolder:
    """A folder of checkpoints, in which anything else is left alone.

    Several processes may look, but one writes and removes.
    """

    place: Location

    def path(self, name: StepName) -> Location:
        return self.place / str(name)

    def identity(self, make: bool) -> str | None:
        """Return what tells this run from all others: of a random file in the folder, and of where that is.

        So a folder that was copied, or begun anew, is that of another run.

        Args:
            make: the file, if there is none.  Otherwise that is None.

        Raises:
            DamageError, SourceError: it cannot be read.
            OSError: it cannot be made.
        """
        file = self.place / _IDENTITY
        if not file.exists():
            if not make:
                return None
            self.place.mkdir(parents=True, exist_ok=True)
            write_synced(file, secrets.token_hex(16).encode())
        return xxh3_128([read_whole(file), str(self.place.resolve()).encode()])[:16]

    def newest(self, damaged: Collection[StepName]) -> Newest:
        """Find the newest whole checkpoint, without reading data.

        Args:
            damaged: checkpoints that look whole and are known not to be.

        Raises:
            SourceError: the folder cannot be read, or a checkpoint is of a newer version of this package.
        """
        faults: dict[StepName, str] = {}
        listed: set[StepName] | None = None
        while (names := self._names()) != listed:  # while we look, one may be published and another removed
            listed, faults = names, {}
            for name in sorted(self._published(names) - set(damaged), reverse=True):
                fault = self.fault(name)
                if fault is None:
                    return Newest(name, faults)
                if self.exists(name):
                    faults[name] = fault
        return Newest(None, faults)

    def whole(self, step: int) -> StepName | None:
        """Find the last whole checkpoint of a step, without reading data.

        Raises:
            SourceError: as `newest`.
        """
        names = self._published(name for name in self._names() if name.step == step)
        return next((name for name in sorted(names, reverse=True) if self.fault(name) is None), None)

    def exists(self, name: StepName) -> bool:
        """Return True if a checkpoint of this name was published, and its removal has not begun."""
        return (self.path(name) / MANIFEST_FILE).exists()

    @gc_paused()
    def fault(self, name: StepName) -> str | None:
        """Return why a checkpoint is not whole, by its descriptions and the sizes of its files; None if it is.

        Raises:
            SourceError: it cannot be read, or is of a newer version of this package.
        """
        path, fault = self.path(name), ""
        try:
            check_extents(path, named_items(native.read_native(path)))
            if all((path / file).exists() for file in _DESCRIPTIONS):
                return None
        except DamageError as error:
            fault = str(error)
        from .diagnosis import diagnosis_at  # not needed where nothing is wrong

        return diagnosis_at(path).sentence or fault

    def new_name(self, step: int, replaceable: Callable[[StepName], bool]) -> StepName:
        """Return a free name for a new checkpoint of a step.

        Args:
            replaceable: returns True if a checkpoint of the same step may be superseded.

        Raises:
            DestinationError: a whole one may not.
        """
        names = {name for name in self._names() if name.step == step}
        for name in sorted(self._published(names)):
            if not replaceable(name) and self.fault(name) is None:
                raise DestinationError(
                    f"{self.path(name)} exists already, and is whole; a run that is resumed goes on behind it, from "
                    "restored.step + 1; if this run went back to an earlier step and the checkpoint is to be "
                    "superseded, save with replace=True"
                )
        return StepName(step, max((name.attempt for name in names), default=0) + 1)

    def prune(
        self, saved: StepName, keep_last: int, keep_every: int | None, is_whole: Callable[[StepName], bool]
    ) -> list[StepName]:
        """Remove the `superfluous` checkpoints, now that ``saved`` has been published.

        Returns:
            The checkpoints that are newer than ``saved``, sorted.

        Raises:
            DestinationError: the folder does not show what was saved, so nothing is removed.
            OSError: something cannot be removed.
        """
        published = self._published(self._names())
        if saved not in published:
            raise DestinationError(f"expected {self.path(saved)}, which was just saved, found it missing")
        for name in superfluous(published, saved, keep_last, keep_every, is_whole):
            publish.remove(self.path(name), _DESCRIPTIONS)
        return sorted(name for name in published if name > saved)

    def clean(self) -> None:
        """Remove half-removed checkpoints and files of abandoned saves, which killed runs have left.

        Raises:
            OSError: something cannot be removed.
        """
        for entry in self._entries():
            if isinstance(entry, Remote):
                files = _files(entry) if _is_of_series(entry.name) else set()
                half_removed = publish.MARK in files
                abandoned = CLAIM in files and not files >= set(_DESCRIPTIONS)
            else:
                half_removed = _is_of_series(publish.removed_name(entry.name))
                abandoned = _is_of_series(publish.staged_name(entry.name))
            if half_removed:
                publish.finish_removal(entry, _DESCRIPTIONS)
            elif abandoned and publish.is_stale(entry, self.place):
                publish.remove(entry, _DESCRIPTIONS)

    def _entries(self) -> list[Location]:
        try:
            return list(self.place.iterdir())
        except FileNotFoundError:
            return []

    def _names(self) -> set[StepName]:
        return {name for entry in self._entries() if (name := StepName.parsed(entry.name))}

    def _published(self, names: Iterable[StepName]) -> set[StepName]:
        def published(name: StepName) -> StepName | None:
            files = set() if self.path(name).is_symlink() else _files(self.path(name))
            begun = CLAIM in files and METADATA_FILE not in files
            return name if MANIFEST_FILE in files and publish.MARK not in files and not begun else None

        return set(filter(None, at_each(self.place, published, names)))


def superfluous(
    names: Iterable[StepName],
    saved: StepName,
    keep_last: int,
    keep_every: int | None,
    is_whole: Callable[[StepName], bool],
) -> Iterator[StepName]:
    """Yield the checkpoints to remove, the newest first; never ``saved``.

    Kept are the newest ``keep_last`` whole ones, ``saved`` among them, those whose step ``keep_every`` divides, and
    damaged ones that are as new as they.  Of a step that was saved again only the last whole attempt is kept.
    Checkpoints of later steps than ``saved`` are kept and not counted: the run went back, and they are not its past.
    """
    steps: set[int] = set()
    whole = 0
    for name in sorted((name for name in names if name <= saved), reverse=True):
        if name.step in steps:
            yield name
        elif whole < keep_last:
            if name == saved or is_whole(name):
                whole += 1
                steps.add(name.step)
        elif keep_every and name.step % keep_every == 0:
            steps.add(name.step)
        else:
            yield name


def _is_of_series(name: str | None) -> bool:
    return name is not None and StepName.parsed(name) is not None


def _files(folder: Location) -> set[str]:
    try:
        return {entry.name for entry in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return set()
