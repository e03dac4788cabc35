"""Removing checkpoints: gone at once for whoever looks, and recognised as rubbish if the removal is cut off.

A directory is renamed before anything in it is deleted.  A store cannot rename: there a mark is written first, the
descriptions of the checkpoint are deleted next, its data then, and the mark last.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Collection
from datetime import datetime
from pathlib import Path

from .location import Location, Remote, asking, at_each
from .publish import STAGING, sync_directory

MARK = ".muonckpt.removing"
"""An object in a checkpoint, in a store, that is being removed."""

_REMOVED = re.compile(r"\.(?P<name>.+?)(\.[0-9a-f]{12}\.tmp)?\.[0-9a-f]{12}\.removing")

_STALE_FILES, _STALE_OBJECTS = 3600.0, 24 * 3600.0
"""Seconds without a change after which unfinished files have no writer any more.  A file grows while it is written; an
object appears when all of it has arrived."""


def remove(place: Location, descriptions: Collection[str]) -> None:
    """Remove a directory that may be a checkpoint.

    Args:
        descriptions: names of the files without which readers see no checkpoint.

    Raises:
        OSError: something cannot be deleted; what is left is recognised by `removed_name` or `MARK`.
    """
    if isinstance(place, Remote):
        (place / MARK).write(b"of a checkpoint that is being removed\n")
        finish_removal(place, descriptions)
    else:
        moved = place.with_name(f".{place.name.removeprefix('.')}.{uuid.uuid4().hex[:12]}.removing")
        place.rename(moved)
        sync_directory(moved.parent)  # after a crash of the machine no checkpoint lacks files under its own name
        shutil.rmtree(moved)


def finish_removal(place: Location, descriptions: Collection[str]) -> None:
    """Delete what a removal that was cut off has left.

    Raises:
        OSError: something cannot be deleted.
    """
    if isinstance(place, Path):
        shutil.rmtree(place)
        return
    objects = [each for each in place.below() if each.name != MARK]
    at_each(place, Remote.unlink, [each for each in objects if each.name in descriptions])
    at_each(place, Remote.unlink, [each for each in objects if each.name not in descriptions])
    (place / MARK).unlink(missing_ok=True)


def removed_name(name: str) -> str | None:
    """The name that a local directory had before its removal began, or None: it is not being removed."""
    if match := _REMOVED.fullmatch(name):
        return match["name"]
    match = STAGING.fullmatch(name)
    return match["name"] if match and match["discarded"] else None


def staged_name(name: str) -> str | None:
    """The name that a local staging directory will have when it is published, or None: it is none."""
    match = STAGING.fullmatch(name)
    return match["name"] if match and not match["discarded"] else None


def is_stale(place: Location, folder: Location) -> bool:
    """Whether a directory of unfinished files has not changed for so long that nobody writes there.

    The clock is that of the file system or of the store, in which the folder is.

    Raises:
        OSError: it cannot be asked.
    """
    try:
        changed = _last_change(place)
    except FileNotFoundError:  # it has been published, or removed, since it was listed
        return False
    return _now(folder) - changed > (_STALE_OBJECTS if isinstance(place, Remote) else _STALE_FILES)


def _now(folder: Location) -> float:
    if isinstance(folder, Path):
        folder.touch()
        return folder.stat().st_mtime
    clock = folder / ".muonckpt.now"
    clock.write(b"")
    now = _modified(clock)
    clock.unlink(missing_ok=True)
    return now


def _last_change(place: Location) -> float:
    if isinstance(place, Path):
        return max(each.lstat().st_mtime for each in (place, *place.iterdir()))
    return max(at_each(place, _modified, place.below()))


def _modified(place: Remote) -> float:
    with asking(place):
        changed: datetime = place.fs.modified(place.path)
        return changed.timestamp()
