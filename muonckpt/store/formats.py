"""Which format a checkpoint is in, told by what is there, and how it is read: the door of every command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .. import record
from ..errors import SourceError
from ..record import Manifest
from . import dcp, directory, flat_buffers, layer_wise, safetensors, zarr
from .payload import Payloads
from .remote import Location


@dataclass(frozen=True, slots=True)
class Format:
    """One format.  ``read`` gives the manifest with the places of all elements, ``payloads`` their bytes.

    ``outline`` gives the manifest from metadata alone: nothing else is opened, and places may be missing.
    """

    name: str
    outline: Callable[[Location], Manifest]
    read: Callable[[Location], Manifest]
    payloads: Callable[[Location], Payloads]


def _with_payloads(path: Location) -> Manifest:
    return directory.read(path, payloads=True)


def _beside(path: Location) -> Payloads:
    return Payloads(safetensors.folder(path))


OWN = Format("muonckpt", directory.read, _with_payloads, Payloads)
DCP = Format("stock DCP", directory.read, _with_payloads, Payloads)
BUFFERS = Format("flat buffers", flat_buffers.read, flat_buffers.read, Payloads)
SAFETENSORS = Format("safetensors", safetensors.read, safetensors.read, _beside)
ZARR = Format("zarr", zarr.read, zarr.read, zarr.ZarrPayloads)
LAYER_WISE = Format("Megatron's layer-wise files", layer_wise.read, layer_wise.read, layer_wise.LayerWisePayloads)


def format_of(path: Location) -> Format:
    """The format of what is there; a directory that shows no other one is taken for DCP, whose reader says what lacks.

    Our manifest and DCP's metadata come first: safetensors files may lie beside them.

    Raises:
        SourceError: nobody can look there.
    """
    try:
        return _shown(path)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error}") from error


def _shown(path: Location) -> Format:
    if path.is_file():
        return SAFETENSORS
    if (path / record.FILE).exists():
        return OWN
    if layer_wise.is_described(path):
        return LAYER_WISE
    if (path / dcp.FILE).exists():
        return DCP
    if (path / flat_buffers.INDEX).exists():
        return BUFFERS
    if zarr.is_hierarchy(path):
        return ZARR
    if safetensors.is_sharded(path):
        return SAFETENSORS
    return LAYER_WISE if layer_wise.has_files(path) else DCP
