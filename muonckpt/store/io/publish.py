"""How a finished checkpoint appears under its name: written beside it, synced, and renamed."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from ...errors import DestinationError
from .location import Location, Remote

CLAIM = ".muonckpt.saving"
"""An object by which a save reserves a destination in a store until it is published."""

STAGING = re.compile(r"\.(?P<name>.+?)\.[0-9a-f]{12}\.tmp(?P<discarded>\.[0-9a-f]{12})?")
"""Names of the staging directories of saves, and of those that `discard` is removing."""

JOURNAL = ".journal"
"""Name of the directory of journals in a staging directory."""


def reserve(destination: Location) -> Location:
    """A new place for the files of one save, which no reader mistakes for a checkpoint before they are published.

    It lies beside the destination, on the same file system.  In an object store, which cannot rename, it is the
    destination itself, which only one save can claim.

    Raises:
        DestinationError: the destination exists, or another save writes there.
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
        (destination / CLAIM).create(b"of a save that is not finished\n")
    except FileExistsError:
        raise taken from None
    if any(place.name != CLAIM for place in destination.iterdir()):  # it was published since we looked
        (destination / CLAIM).unlink()
        raise taken


def staging_place(destination: Location) -> Location:
    """Where files are written before they are published: beside the destination, or at it in an object store."""
    return destination if isinstance(destination, Remote) else staging_file(destination)


def staging_file(destination: Location) -> Location:
    """Where a single file is written before it is published: beside the destination, also in an object store."""
    return destination.parent / f".{destination.name}.reshard.tmp"


def journal(staged: Location) -> Location:
    """Where workers record finished files; what is published has no journal."""
    return staged / JOURNAL


def discard(staged: Location) -> None:
    """Remove what was written, as far as possible, after making sure that no process can publish it."""
    with suppress(OSError):  # the error that led here is the one to report
        if isinstance(staged, Remote):
            staged.remove()
        else:
            shutil.rmtree(staged.rename(staged.with_name(f"{staged.name}.{uuid.uuid4().hex[:12]}")), ignore_errors=True)


def refuse_existing(destination: Location, staged: Location | None = None) -> None:
    """Check that the destination is free, or holds unfinished work if files are ``staged`` there.

    Raises:
        DestinationError: it exists; nothing is ever overwritten in place.
    """
    unfinished = staged == destination and journal(destination).exists()
    if (destination.exists() or destination.is_symlink()) and not unfinished:
        raise DestinationError(f"{destination} exists already; choose another destination or remove it first")


def publish(staged: Location, destination: Location) -> None:
    """Make a finished directory or file appear under its name: sync it, rename it, sync its parent.

    An object store cannot rename.  There a single object is copied; several objects were written under their final
    names, descriptions last, and only the reservation is removed.

    Raises:
        DestinationError: the destination has appeared in the meantime, or it cannot be written.
    """
    if staged == destination:
        (destination / CLAIM).unlink(missing_ok=True)
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
        os.link(staged, destination)  # a rename would replace a file that has appeared there meanwhile
    sync_directory(destination.parent)


def sync_tree(path: Location) -> None:
    """Wait until the entries of a directory and of all below it are on disk; a store has none."""
    if isinstance(path, Path):
        for folder in [*(folder for folder in path.rglob("*") if folder.is_dir()), path]:
            sync_directory(folder)


def sync_directory(path: Path) -> None:
    """Wait until the entries of a directory are on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
