"""Publishing and removing checkpoints: a finished one is synced and renamed into place, a removed one renamed first.

A store cannot rename.  There objects get their final names at once, a claim reserves the destination, and a mark says
that a checkpoint is being removed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from ...names.errors import (
    DestinationError,
    LostRankError,
    SourceError,
    UnavailableError,
    UnsyncedError,
    unwritable,
)
from .location import Location, Remote, is_folder, is_link, is_there, map_each, raise_error
from .new_file import write_synced
from .regular import open_regular

CLAIM = ".muonckpt.saving"
"""An object by which a save reserves a destination in a store until it is published."""

STAGING = re.compile(r"\.(?P<name>.+?)\.[0-9a-f]{12}\.tmp(?P<discarded>\.[0-9a-f]{12})?")
"""Names of the staging directories of saves, and of the checkpoints that `discard` is removing."""


class Staging:
    """A place for the files of one save, which no reader takes for a checkpoint before they are published.

    It lies beside the destination; in an object store it is the destination itself, which only one save can claim,
    unless a single file is published.  A lock, which the system lifts when this process dies, tells other saves that a
    directory is not abandoned.  The end of its block removes the unpublished, and the folders made for it.

    Args:
        file: the name of the one file of it that becomes the destination; empty if the directory does.

    Raises:
        DestinationError: the destination exists, another save writes there, or the place cannot be made.
    """

    def __init__(self, destination: Location, file: str = "") -> None:
        self._destination, self._file = destination, file
        self._has_moved = False
        self._lock: int | None = None
        self._new_parents: list[Path] = []
        try:
            # Space first: what killed saves left would otherwise stay for ever.
            remove_abandoned(destination)
            refuse_existing(destination)
            if isinstance(destination, Remote) and not file:
                self.place: Location = destination
                _claim(destination)
                return
            # A folder with a name that no other process makes.
            self._new_parents = make_parents(destination)
            self.place = destination.parent / f".{destination.name}.{os.urandom(6).hex()}.tmp"
            self.place.mkdir()
            if isinstance(self.place, Path):
                self._lock = _lock_directory(self.place)
        except _InUse:
            raise _in_use_error(destination) from None
        except OSError as error:
            raise unwritable(destination, error) from error

    def publish(self) -> None:
        """Make the finished directory or file appear under its name: sync it, rename it, sync its parent.

        In a store a single object is copied; several already have their final names, and only the claim is removed.

        Raises:
            DestinationError: the destination has appeared in the meantime, or it cannot be written.
            UnsyncedError: it is published, but the folder in which it lies could not be synced.
        """
        destination = self._destination
        if self.place == destination:
            # All objects are there, so it is published: readers pass a claim that stays beside them.
            self._has_moved = True
            with suppress(OSError):
                (destination / CLAIM).unlink(missing_ok=True)
            return
        # One rename, or link, makes it appear; its files were synced when they were written.
        refuse_existing(destination)
        try:
            if isinstance(self.place, Remote) and isinstance(destination, Remote):
                (self.place / self._file).copy_to(destination)
            elif isinstance(self.place, Path) and isinstance(destination, Path):
                if self._file:  # a rename would replace a file that has appeared there meanwhile
                    os.link(self.place / self._file, destination)
                else:
                    for folder, _, _ in os.walk(self.place, topdown=False, onerror=raise_error):
                        sync_directory(Path(folder))
                    self.place.rename(destination)
                    self._has_moved = True
        except OSError as error:
            raise DestinationError(f"cannot publish {destination}, so it is not there: {error}") from error
        # The name is on the disk when the folder is synced.
        if isinstance(destination, Path):
            try:
                sync_directory(destination.parent)
            except OSError as error:
                raise UnsyncedError(
                    f"{destination} is published and whole, but its folder could not be synced ({error}): a crash of "
                    "the machine before the disk has caught up may undo that. Save it once more where the disk works, "
                    "or run sync and verify it"
                ) from error

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # Where a rank was lost, others may be writing still.  A store does not refuse that, so its claim stays, without
        # which their objects would look like a damaged checkpoint.
        others_write = isinstance(error, LostRankError) and isinstance(self.place, Remote)
        if not self._has_moved and not others_write:
            discard(self.place)
            with suppress(OSError):  # another process has made something there
                for folder in self._new_parents:
                    folder.rmdir()
        if self._lock is not None:
            os.close(self._lock)


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Constants of Linux's renameat2."""


def swap_in(finished: Path, place: Path) -> None:
    """Give a finished directory the name of whatever is at ``place``, and remove that.

    It is one step of the file system.  Where that cannot exchange names, as NFS, it is two, between which nothing has
    the name.  A process that is killed later leaves ``finished`` to be removed.
    """
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = [os.fsencode(path) for path in (finished, place)]
    if exchange is None or exchange(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        former = finished.with_name(f"{finished.name}.former")
        remove_any(former)
        place.rename(former)
        finished.rename(place)
        former.rename(finished)
    sync_directory(place.parent)
    remove_any(finished)


def remove_any(path: Path) -> None:
    """Remove a file, a link or a directory, if there is one."""
    if not is_link(path) and is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class _InUse(Exception):
    """A living process has locked a directory, or has just renamed it."""


def _lock_directory(folder: Path) -> int | None:
    """Lock a directory until the returned handle is closed; None where there are no such locks."""
    with ExitStack() as stack:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, handle)
        is_locked = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _InUse from None
        except OSError:
            is_locked = False
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), folder.stat()):
                if not is_locked:
                    return None
                stack.pop_all()
                return handle
    raise _InUse


def _claim(destination: Remote) -> None:
    """Claim a destination in a store, by the object that only one save can create."""
    claim = destination / CLAIM
    try:
        claim.create(b"of a save that is not finished\n")
    except FileExistsError:
        raise _in_use_error(destination) from None
    try:
        if any(place.name != CLAIM for place in destination.iterdir()):  # it was published since we looked
            raise _in_use_error(destination)
    except BaseException:
        claim.unlink()
        raise


def _in_use_error(destination: Location) -> DestinationError:
    return DestinationError(f"{destination} is being written by another save; choose another destination")


def discard(staged: Location) -> None:
    """Remove unfinished files as far as possible, after making sure that no process can publish them."""
    with suppress(OSError):  # the error that led here is the one to report
        if isinstance(staged, Remote):
            staged.remove()
            return
        match = STAGING.fullmatch(staged.name)
        if not (match and match["discarded"]):  # under another name it is never published
            staged = staged.rename(staged.with_name(f"{staged.name}.{os.urandom(6).hex()}"))
        shutil.rmtree(staged, ignore_errors=True)


def refuse_existing(destination: Location) -> None:
    """Raise `DestinationError` if the destination exists."""
    try:
        refused = is_there(destination)
    except UnavailableError as error:  # such as a name that is too long
        raise DestinationError(f"cannot write {destination}: {error}") from error
    if refused:
        raise DestinationError(f"{destination} exists already, and nothing is overwritten; choose another destination")


def make_parents(place: Location) -> list[Path]:
    """Make the missing directories above a place, each on disk before anything is made in it; return them, last first.

    A process may have been killed between making the last existing one and syncing its parent, so that is synced, too.
    """
    if isinstance(place, Remote):
        return []
    missing = [folder for folder in place.parents if not is_there(folder)]
    above = (missing[-1] if missing else place).parent.parent
    try:
        sync_directory(above)
    except OSError as error:  # such a process made no folder where this user may not read, or nothing is synced
        if error.errno not in (errno.EACCES, errno.EINVAL):
            raise
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_directory(folder.parent)
    return missing


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def refuse_other(place: Location, data: bytes) -> None:
    """Raise `DestinationError` if anything is there but a file with the same bytes, as a killed run leaves it."""
    if is_there(place):
        with suppress(SourceError), open_regular(place) as file:
            if file.size == len(data) and bytes(file.read(0, file.size)) == data:
                return
        raise DestinationError(f"{place} exists already, and nothing is overwritten; choose another destination")


@contextmanager
def publish_first(place: Location, data: bytes, draft: Location) -> Iterator[None]:
    """Write a small file before the block publishes the checkpoint beside it, and remove it if the block fails.

    Args:
        draft: where the file is written before it gets its name; on the same file system.

    Raises:
        DestinationError: another file is there.
    """
    # A killed run may have left the same file.
    refuse_other(place, data)
    if is_there(place):
        yield
        return
    try:
        if isinstance(place, Remote):
            place.create(data)
        elif isinstance(draft, Path):
            draft.unlink(missing_ok=True)
            write_synced(draft, data)
            os.link(draft, place)  # a rename would replace a file that has appeared there meanwhile
            try:
                draft.unlink()
                sync_directory(place.parent)
            except OSError:
                place.unlink(missing_ok=True)
                raise
    except FileExistsError:
        raise DestinationError(f"{place} has appeared in the meantime; choose another destination") from None
    # Without the checkpoint the file would describe nothing.
    try:
        yield
    except UnsyncedError:  # the checkpoint beside it is there
        raise
    except BaseException:
        place.unlink(missing_ok=True)
        raise


MARK = ".muonckpt.removing"
"""The object in a stored checkpoint that is being removed."""

_REMOVAL = re.compile(r"\.(?P<name>.+?)(\.[0-9a-f]{12}\.tmp)?\.[0-9a-f]{12}\.removing")

_STALE_FILES, _STALE_OBJECTS = 3600.0, 24 * 3600.0
"""Seconds without a change after which unfinished files have no writer any more.  A file grows while it is written; an
object appears when all of it has arrived."""


def remove(place: Location, descriptions: Collection[str]) -> None:
    """Remove a directory that may be a checkpoint; an `OSError` leaves what `finish_removal` deletes.

    Args:
        descriptions: names of the files without which readers see no checkpoint.
    """
    if isinstance(place, Remote):
        (place / MARK).write(b"of a checkpoint that is being removed\n")
        finish_removal(place, descriptions)
    else:
        hidden = place.with_name(f".{place.name.removeprefix('.')}.{os.urandom(6).hex()}.removing")
        place.rename(hidden)
        sync_directory(hidden.parent)  # after a crash of the machine no checkpoint lacks files under its own name
        shutil.rmtree(hidden)


def finish_removal(place: Location, descriptions: Collection[str]) -> None:
    """Delete the remains of a checkpoint whose removal was interrupted."""
    if isinstance(place, Path):
        shutil.rmtree(place)
        return
    # Descriptions go first, so that no reader sees a checkpoint that lacks files; the mark goes last.
    objects = [entry for entry in place.below() if entry.name != MARK]
    map_each(place, Remote.unlink, [entry for entry in objects if entry.name in descriptions])
    map_each(place, Remote.unlink, [entry for entry in objects if entry.name not in descriptions])
    (place / MARK).unlink(missing_ok=True)


def removed_name(name: str) -> str | None:
    """Return the name that a local directory had before its removal began; None if it is not being removed."""
    if match := _REMOVAL.fullmatch(name):
        return match["name"]
    match = STAGING.fullmatch(name)
    return match["name"] if match and match["discarded"] else None


def staged_name(name: str) -> str | None:
    """Return the name under which a local staging directory will be published; None for other directories."""
    match = STAGING.fullmatch(name)
    return match["name"] if match and not match["discarded"] else None


def remove_abandoned(destination: Location) -> None:
    """Remove the staging directories of saves to this destination whose processes have ended.

    Where the file system has no locks, a directory that has not changed for an hour counts as abandoned.
    """
    if not isinstance(destination, Path) or not is_folder(destination.parent):
        return
    for entry in destination.parent.iterdir():
        match = STAGING.fullmatch(entry.name)
        if match and match["name"] == destination.name:
            discard_abandoned(entry)


def discard_abandoned(staged: Path) -> None:
    """Remove a staging directory unless its process lives: see `remove_abandoned`."""
    with suppress(_InUse, FileNotFoundError):  # another process writes there, or removes it as well
        lock = _lock_directory(staged)
        if lock is not None:
            discard(staged)
            os.close(lock)
        elif is_stale(staged, staged.parent):
            discard(staged)


def is_stale(place: Location, folder: Location) -> bool:
    """Return whether unfinished files are so old, by the clock of ``folder``, that no process still writes them."""
    try:
        if isinstance(place, Path):
            last_change = max(entry.lstat().st_mtime for entry in (place, *place.rglob("*")))
        else:
            last_change = max(map_each(place, _read_last_change, place.below()), default=math.inf)
    except FileNotFoundError:  # it has been published, or removed, since it was listed
        return False
    if isinstance(folder, Path):
        folder.touch()
        return folder.stat().st_mtime - last_change > _STALE_FILES
    # A store's clock is that of a new object.
    clock = folder / ".muonckpt.now"
    clock.write(b"")
    now = _read_last_change(clock)
    clock.unlink(missing_ok=True)
    return now - last_change > _STALE_OBJECTS


def _read_last_change(place: Remote) -> float:
    moment: datetime = place.ask(place.fs.modified, place.path)
    return moment.timestamp()
