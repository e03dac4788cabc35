"""Our own format: a DCP directory that a manifest describes as well."""

from __future__ import annotations

from ... import record
from ...errors import DamageError, SourceError, about
from ...record import Manifest
from ..io.location import Location
from ..io.new_file import write_synced
from ..io.regular import read_whole
from .dcp import directory as dcp


def read_native(path: Location) -> Manifest:
    """The manifest of a checkpoint in our own format.

    Raises:
        DamageError: it is missing or damaged.
        SourceError: it is of another version, or cannot be read.
    """
    file = path / record.MANIFEST_FILE
    try:
        with about(file):
            return Manifest.from_json(read_whole(file).decode())
    except UnicodeDecodeError as error:
        raise DamageError(f"{file}: expected UTF-8: {error}") from error
    except OSError as error:
        raise SourceError(f"cannot read {file}: {error}") from error


def write_native(manifest: Manifest, directory: Location) -> None:
    """Write both descriptions of a checkpoint, ours and DCP's, and sync them."""
    write_synced(directory / record.MANIFEST_FILE, manifest.to_json().encode())
    dcp.write_metadata(manifest, directory)
