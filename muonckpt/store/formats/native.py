"""Our own format: a DCP directory that a manifest describes as well."""

from __future__ import annotations

from ...errors import SourceError, about
from ...record import MANIFEST_FILE, Manifest
from ..io.location import Location
from ..io.regular import read_whole


def read_native(path: Location) -> Manifest:
    """The manifest of a checkpoint in our own format.

    Raises:
        DamageError: it is missing or damaged.
        SourceError: it is of another version, or cannot be read.
    """
    file = path / MANIFEST_FILE
    try:
        with about(file):
            return Manifest.from_json(read_whole(file))
    except OSError as error:
        raise SourceError(f"cannot read {file}: {error}") from error
