"""Formats of other packages: installed beside this one, and found by their entry points.

A package names its formats in the group ``muonckpt.formats``::

    [project.entry-points."muonckpt.formats"]
    npy = "npy_folder:FORMAT"

where ``FORMAT`` is a `Format` with signs.  Plug-ins are looked for only where no file shows a format of ours, so they
cannot take over one of these, and cost nothing elsewhere.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from ...errors import SourceError
from ..reading.reader import Format

ENTRY_POINTS = "muonckpt.formats"
"""The group of entry points."""


def format_of_plugin(names: Sequence[str]) -> Format | None:
    """The format of a plug-in that one of these names of files is a sign of.

    Raises:
        SourceError: a plug-in cannot be imported or gives no format, or several plug-ins take the files for theirs.
    """
    from importlib.metadata import entry_points  # slow to import

    found: dict[str, Format] = {}
    for point in entry_points(group=ENTRY_POINTS):
        package = "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        plugin = f"plug-in {point.name!r} ({point.value}) of {package}"
        try:
            kind = point.load()
        except Exception as error:  # whatever other people's code raises
            raise SourceError(
                f"the {plugin} for formats cannot be imported: {type(error).__name__}: {error}; repair or uninstall it"
            ) from error
        if not isinstance(kind, Format):
            raise SourceError(f"the {plugin} for formats: expected a Format, found {type(kind).__name__}")
        if any(fnmatch.filter(names, sign) for sign in kind.signs):
            found[plugin] = kind
    if len(found) > 1:
        raise SourceError(f"several plug-ins read such files: {'; '.join(found)}: uninstall all but one")
    return next(iter(found.values()), None)
