"""Whether what a checkpoint's metadata names lies in its files: before anything is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

from ...errors import SourceError
from ...record import Extent
from .location import Location, at_each
from .regular import open_regular


def check_extents(path: Location, named: Iterable[tuple[Extent, str]]) -> None:
    """Every file is there and regular, and the extents lie in it without overlap.

    Args:
        path: the checkpoint's directory.
        named: extents, none of them empty, and what to call each in an error.

    Raises:
        SourceError: a file is missing, cut, or no regular file, or two extents overlap.
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
    missing = [name for name, found in zip(names, at_each(path, is_there, names), strict=True) if not found]
    if missing:
        raise SourceError(f"expected {len(items)} files in {path}, found {len(missing)} missing: {', '.join(missing)}")
    for name, size in zip(names, at_each(path, size_of, names), strict=True):
        found = items[name]
        found.sort(key=lambda item: item[0].offset)
        for (extent, what), (following, other) in pairwise([*found, (Extent(name, size, 0), "")]):
            if extent.end > following.offset:
                instead = f"{other} begins there already" if other else f"the file has {size}: it was cut"
                raise SourceError(f"{path / name}: expected {what} up to byte {extent.end}, but {instead}")
