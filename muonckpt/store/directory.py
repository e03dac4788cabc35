"""Checkpoint directories: which manifest describes one, and how a finished one appears."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from .. import record
from ..errors import DestinationError, SourceError
from ..record import Manifest
from . import dcp


def read(path: Path, *, payloads: bool = False) -> Manifest:
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
        return Manifest.from_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"cannot read {file}: {error}") from error


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Write both descriptions of a checkpoint, ours and DCP's, and sync them."""
    write_synced(directory / record.FILE, manifest.to_json().encode())
    dcp.write_metadata(manifest, directory)


def write_synced(file: Path, data: bytes) -> None:
    """Write a new file and wait until it is on disk."""
    with file.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def staging(destination: Path) -> Path:
    """A name beside ``destination``, on the same file system, that no reader takes for a checkpoint."""
    return destination.parent / f".{destination.name}.{uuid.uuid4().hex[:12]}.tmp"


def refuse_existing(destination: Path) -> None:
    """Raises:
    DestinationError: something is there already; nothing is ever overwritten in place.
    """
    if destination.exists() or destination.is_symlink():
        raise DestinationError(f"{destination} exists already; choose another destination or remove it first")


def publish(staged: Path, destination: Path) -> None:
    """Make a finished directory appear under its name: sync it, rename it, sync its parent.

    Raises:
        DestinationError: the destination has appeared in the meantime, or the rename failed.
    """
    sync_directory(staged)
    refuse_existing(destination)
    try:
        staged.rename(destination)
    except OSError as error:
        raise DestinationError(f"cannot publish {destination}: {error}") from error
    sync_directory(destination.parent)


def sync_directory(path: Path) -> None:
    """Wait until the entries of a directory are on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
