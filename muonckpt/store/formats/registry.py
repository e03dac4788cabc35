"""Which format a checkpoint is in, told by what is there, and how it is read: the door of every command.

A format's reader is imported when a checkpoint of that format is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ... import record
from ...errors import SourceError
from ...record import Manifest
from ..io.location import Location
from ..reading.payloads import Payloads
from . import native, signs
from .dcp import directory as dcp


@dataclass(frozen=True, slots=True)
class Reader:
    """How a format is read.  ``read`` gives the manifest with the places of all elements, ``payloads`` their bytes.

    ``outline`` gives the manifest from metadata alone: nothing else is opened, and places may be missing.
    """

    outline: Callable[[Location], Manifest]
    read: Callable[[Location], Manifest]
    payloads: Callable[[Location], Payloads]


@dataclass(frozen=True, slots=True)
class Format:
    """One format; ``reader`` imports what reads it.  The methods are those of its `Reader`."""

    name: str
    reader: Callable[[], Reader]

    def outline(self, path: Location) -> Manifest:
        return self.reader().outline(path)

    def read(self, path: Location) -> Manifest:
        return self.reader().read(path)

    def payloads(self, path: Location) -> Payloads:
        return self.reader().payloads(path)


def _directory() -> Reader:
    return Reader(native.read, lambda path: native.read(path, payloads=True), Payloads)


def _flat_buffers() -> Reader:
    from . import flat_buffers

    return Reader(flat_buffers.read, flat_buffers.read, Payloads)


def _safetensors() -> Reader:
    from .safetensors import folder as safetensors

    return Reader(safetensors.read, safetensors.read, lambda path: Payloads(safetensors.folder(path)))


def _zarr() -> Reader:
    from .zarr import hierarchy as zarr

    return Reader(zarr.read, zarr.read, zarr.ZarrPayloads)


def _layer_wise() -> Reader:
    from .megatron import layer_wise

    return Reader(layer_wise.read, layer_wise.read, layer_wise.LayerWisePayloads)


OWN = Format("muonckpt", _directory)
DCP = Format("stock DCP", _directory)
BUFFERS = Format("flat buffers", _flat_buffers)
SAFETENSORS = Format("safetensors", _safetensors)
ZARR = Format("zarr", _zarr)
LAYER_WISE = Format("Megatron's layer-wise files", _layer_wise)


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
    if signs.describes_layer_wise(path):
        return LAYER_WISE
    if (path / dcp.FILE).exists():
        return DCP
    if signs.has_flat_buffers(path):
        return BUFFERS
    if signs.is_zarr(path):
        return ZARR
    if signs.has_safetensors(path):
        return SAFETENSORS
    return LAYER_WISE if signs.has_layer_wise(path) else DCP
