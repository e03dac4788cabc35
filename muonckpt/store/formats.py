"""Which format a checkpoint is in, told by what is there, and how it is read: the door of every command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .. import record
from ..record import Manifest
from . import dcp, directory, safetensors, zarr
from .payload import Payloads


@dataclass(frozen=True, slots=True)
class Format:
    """One format.  ``read`` gives the manifest with the places of all elements, ``payloads`` their bytes.

    ``outline`` gives the manifest from metadata alone: nothing else is opened, and places may be missing.
    """

    name: str
    outline: Callable[[Path], Manifest]
    read: Callable[[Path], Manifest]
    payloads: Callable[[Path], Payloads]


def _with_payloads(path: Path) -> Manifest:
    return directory.read(path, payloads=True)


def _beside(path: Path) -> Payloads:
    return Payloads(safetensors.folder(path))


OWN = Format("muonckpt", directory.read, _with_payloads, Payloads)
DCP = Format("stock DCP", directory.read, _with_payloads, Payloads)
SAFETENSORS = Format("safetensors", safetensors.read, safetensors.read, _beside)
ZARR = Format("zarr", zarr.read, zarr.read, zarr.ZarrPayloads)


def format_of(path: Path) -> Format:
    """The format of what is there; a directory that shows no other one is taken for DCP, whose reader says what lacks.

    Our manifest and DCP's metadata come first: safetensors files may lie beside them.
    """
    if path.is_file():
        return SAFETENSORS
    if (path / record.FILE).exists():
        return OWN
    if (path / dcp.FILE).exists():
        return DCP
    if zarr.is_hierarchy(path):
        return ZARR
    return SAFETENSORS if safetensors.is_sharded(path) else DCP
