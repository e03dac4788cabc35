"""A small file beside a checkpoint, which appears whole, before the checkpoint does, and replaces nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import DestinationError, SourceError
from .location import Location, Remote
from .new_file import write_synced
from .publish import sync_directory
from .regular import open_regular


def items_beside(checkpoint: Location) -> Location:
    """The place of the file of items of a checkpoint that holds tensors only: docs/formats/items.md."""
    return checkpoint.parent / f"{checkpoint.name}.items.json"


def refuse_other(place: Location, data: bytes) -> None:
    """Check that nothing is there but the same file, as an interrupted run leaves it.

    Raises:
        DestinationError: something else is there.
    """
    if (place.exists() or place.is_symlink()) and not _holds(place, data):
        raise DestinationError(f"{place} exists already; choose another destination or remove it first")


@contextmanager
def published_first(place: Location, data: bytes, draft: Location) -> Iterator[None]:
    """Write a file before the block publishes a checkpoint, and remove it if the block fails.

    Args:
        draft: where the file is written before it gets its name; on the same file system.

    Raises:
        DestinationError: another file is there.
    """
    refuse_other(place, data)
    is_new = not place.exists()
    if is_new:
        _publish(place, data, draft)
    try:
        yield
    except BaseException:
        if is_new:
            place.unlink(missing_ok=True)
        raise


def _publish(place: Location, data: bytes, draft: Location) -> None:
    try:
        if isinstance(place, Remote):
            place.create(data)
        elif isinstance(draft, Path):
            draft.unlink(missing_ok=True)
            write_synced(draft, data)
            os.link(draft, place)  # a rename would replace a file that has appeared there meanwhile
            draft.unlink()
            sync_directory(place.parent)
    except FileExistsError:
        raise DestinationError(f"{place} has appeared in the meantime; choose another destination") from None


def _holds(place: Location, data: bytes) -> bool:
    try:
        with open_regular(place) as file:
            return file.size == len(data) and bytes(file.read(0, file.size)) == data
    except SourceError:
        return False
