"""How a finished checkpoint appears under its name: written beside it, synced, and renamed."""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from ...errors import DestinationError
from .location import Location, Remote

_CLAIM = ".muonckpt.saving"
"""An object by which a save tells others that a destination in a store is taken, until it is published."""

JOURNAL = ".journal"
"""What a directory of unfinished work has besides files."""


def reserve(destination: Location) -> Location:
    """A new place for the files of one save, which no reader takes for a checkpoint before they are published.

    It lies beside the destination, on the same file system.  In an object store, which cannot rename, it is the
    destination itself, which only one save can claim.

    Raises:
        DestinationError: something is at the destination already, or another save writes there.
        OSError: the place cannot be made.
    """
    refuse_existing(destination)
    if isinstance(destination, Remote):
        _claim(destination)
        return destination
    staged = destination.parent / f".{destination.name}.{uuid.uuid4().hex[:12]}.tmp"
    staged.mkdir(parents=True)
    return staged


def _claim(destination: Remote) -> None:
    taken = DestinationError(f"{destination} is being written by another save; choose another destination")
    try:
        (destination / _CLAIM).create(b"of a save that is not finished\n")
    except FileExistsError:
        raise taken from None
    if any(place.name != _CLAIM for place in destination.iterdir()):  # it was published since we looked
        (destination / _CLAIM).unlink()
        raise taken


def staging_place(destination: Location) -> Location:
    """Where files are written before they are published: beside the destination; in an object store, which cannot
    rename, where they belong."""
    return destination if isinstance(destination, Remote) else staging_file(destination)


def staging_file(destination: Location) -> Location:
    """The same, but in an object store beside it as well: for a file that describes itself."""
    return destination.parent / f".{destination.name}.reshard.tmp"


def journal(staged: Location) -> Location:
    """Where those who write these files leave word of what is finished; there is none in what is published."""
    return staged / JOURNAL


def discard(staged: Location) -> None:
    """Remove what was written, as far as that can be done.  Nobody can publish what is left of it meanwhile."""
    with suppress(OSError):  # the error that led here is the one to be told
        if isinstance(staged, Remote):
            staged.remove()
        else:
            shutil.rmtree(staged.rename(staged.with_name(f"{staged.name}.{uuid.uuid4().hex[:12]}")), ignore_errors=True)


def refuse_existing(destination: Location, staged: Location | None = None) -> None:
    """Raises:
    DestinationError: something is there already; nothing is ever overwritten in place, but work may be unfinished
        there if it is where files are ``staged``.
    """
    unfinished = staged == destination and journal(destination).exists()
    if (destination.exists() or destination.is_symlink()) and not unfinished:
        raise DestinationError(f"{destination} exists already; choose another destination or remove it first")


def publish(staged: Location, destination: Location) -> None:
    """Make a finished directory or file appear under its name: sync it, rename it, sync its parent.

    An object store cannot rename.  There the store copies a single object; more than one have been written where they
    belong, what describes the others last, and this does nothing.

    Raises:
        DestinationError: the destination has appeared in the meantime, or it cannot be written.
    """
    if staged == destination:
        (destination / _CLAIM).unlink(missing_ok=True)
        return
    refuse_existing(destination)
    try:
        if isinstance(staged, Remote) and isinstance(destination, Remote):
            staged.copy_to(destination)
        elif isinstance(staged, Path) and isinstance(destination, Path):
            _rename(staged, destination)
    except OSError as error:
        raise DestinationError(f"cannot publish {destination}: {error}") from error


def _rename(staged: Path, destination: Path) -> None:
    if staged.is_dir():
        sync_directory(staged)
        staged.rename(destination)
    else:
        os.link(staged, destination)  # a rename would replace what may have appeared there meanwhile
    sync_directory(destination.parent)


def sync_tree(path: Location) -> None:
    """Wait until the entries of a directory and of all below it are on disk; a store has none."""
    if isinstance(path, Path):
        for folder in [*(each for each in path.rglob("*") if each.is_dir()), path]:
            sync_directory(folder)


def sync_directory(path: Path) -> None:
    """Wait until the entries of a directory are on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
