"""Whether the extents in a checkpoint's metadata lie in its files, checked before anything is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

from ...errors import DamageError, SourceError
from ...record import Extent
from .location import Location, at_each
from .regular import open_regular


def check_extents(path: Location, named: Iterable[tuple[Extent, str]]) -> None:
    """Check that every file exists and is regular, and that the extents lie in it without overlap.

    Args:
        path: the checkpoint's directory.
        named: extents, none of them empty, each with its name for errors.

    Raises:
        DamageError: a file is missing or cut, or two extents overlap.
        SourceError: a file is not regular.
    """
    for fault in extent_faults(path, named):
        raise fault


def extent_faults(path: Location, named: Iterable[tuple[Extent, str]]) -> Iterator[SourceError]:
    """The faults for which `check_extents` raises the first: one for all missing files, then at most one a file."""
    items: defaultdict[str, list[tuple[Extent, str]]] = defaultdict(list)
    for extent, what in named:
        items[extent.file].append((extent, what))

    def is_there(name: str) -> bool:
        return (path / name).exists() or (path / name).is_symlink()

    def size_of(name: str) -> int | SourceError:
        try:
            with open_regular(path / name) as file:
                return file.size
        except SourceError as error:
            return error

    names = sorted(items)
    are_there = dict(zip(names, at_each(path, is_there, names), strict=True))
    missing = [name for name in names if not are_there[name]]
    if missing:
        yield DamageError(f"expected {len(items)} files in {path}, found {len(missing)} missing: {', '.join(missing)}")
    present = [name for name in names if are_there[name]]
    for name, size in zip(present, at_each(path, size_of, present), strict=True):
        fault = size if isinstance(size, SourceError) else _beyond(path / name, items[name], size)
        if fault is not None:
            yield fault


def _beyond(file: Location, items: Iterable[tuple[Extent, str]], size: int) -> DamageError | None:
    """The first extent of a file that reaches into the next one or beyond the end of the file."""
    extents = sorted(items, key=lambda item: item[0].offset)
    for (extent, what), (following, next_item) in pairwise([*extents, (Extent(file.name, size, 0), "")]):
        if extent.end > following.offset:
            reason = f"{next_item} begins before that" if next_item else f"the file has {size}: it was cut"
            return DamageError(f"{file}: expected {what} up to byte {extent.end}, but {reason}")
    return None
