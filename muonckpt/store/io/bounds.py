"""Whether the extents in a checkpoint's metadata lie in its files, checked before anything is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

from ...errors import DamageError
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
    items: defaultdict[str, list[tuple[Extent, str]]] = defaultdict(list)
    for extent, what in named:
        items[extent.file].append((extent, what))

    def is_there(name: str) -> bool:
        return (path / name).exists() or (path / name).is_symlink()

    def size_of(name: str) -> int:
        with open_regular(path / name) as file:
            return file.size

    names = sorted(items)
    missing = [name for name, exists in zip(names, at_each(path, is_there, names), strict=True) if not exists]
    if missing:
        raise DamageError(f"expected {len(items)} files in {path}, found {len(missing)} missing: {', '.join(missing)}")
    for name, size in zip(names, at_each(path, size_of, names), strict=True):
        extents = sorted(items[name], key=lambda item: item[0].offset)
        for (extent, what), (following, next_item) in pairwise([*extents, (Extent(name, size, 0), "")]):
            if extent.end > following.offset:
                reason = f"{next_item} begins before that" if next_item else f"the file has {size}: it was cut"
                raise DamageError(f"{path / name}: expected {what} up to byte {extent.end}, but {reason}")
