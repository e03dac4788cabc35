"""Checkpoint directories: which manifest describes one, and how a finished one appears."""

from __future__ import annotations

from ... import record
from ...errors import SourceError
from ...record import Manifest
from ..io.location import Location
from ..io.output import write_synced
from ..io.regular import open_regular
from .dcp import directory as dcp


def read(path: Location, *, payloads: bool = False) -> Manifest:
    """The manifest of a checkpoint: its own, or one made from a stock DCP ``.metadata``.

    Args:
        payloads: also open every item of a stock checkpoint, to learn where its raw bytes and checksums are.

    Raises:
        SourceError: there is no checkpoint, or its metadata is damaged or refused.
    """
    file = path / record.FILE
    try:
        if not file.exists():
            return dcp.read(path, payloads=payloads)
        with open_regular(file) as opened:
            return Manifest.from_json(opened.read(0, opened.size).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"cannot read {file}: {error}") from error


def write_manifest(manifest: Manifest, directory: Location) -> None:
    """Write both descriptions of a checkpoint, ours and DCP's, and sync them."""
    write_synced(directory / record.FILE, manifest.to_json().encode())
    dcp.write_metadata(manifest, directory)
