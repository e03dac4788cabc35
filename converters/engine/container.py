"""A kind of destination: its files, the places of tensors and items in them, and the files that describe the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...names.errors import TargetError
from ...names.version import PROGRAM
from ...record.record import Manifest
from ...store.formats.registry import BUILT_IN, format_written_as
from ...store.io import publish
from ...store.io.location import Location
from ...store.reading.payloads import Payloads
from ...store.reading.reader import import_named
from ..target.topology import Target
from .item_file import ItemFile
from .output_files import OutputFile
from .outputs import Outputs


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """A request to a container: write ``outputs``, made from the source of this name, for ``target``."""

    source: str
    provenance: Mapping[str, Any]
    payloads: Payloads
    outputs: Outputs
    target: Target
    select: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Arranged:
    """The files to write, and what the manifest says about them: layouts of tensors as JSON data, by key.

    ``items`` is a file beside the destination for the non-tensor items, if the other files cannot hold them.
    """

    files: tuple[OutputFile, ...]
    recorded_layouts: Mapping[str, Mapping[str, Any] | None]
    provenance: Mapping[str, Any]
    items: ItemFile | None = None


class Container(ABC):
    """A kind of destination.

    Attributes:
        name: the name of the format.
        of_ranks: whether each rank of a mesh has a file of its own; otherwise tensors are written whole.
    """

    name: str
    of_ranks: bool

    @property
    def root(self) -> str:
        """The name of the file that becomes the destination; empty if the destination is the directory of all files."""
        return ""

    @abstractmethod
    def arrange(self, request: WriteRequest) -> Arranged:
        """Decide what goes where in which file.

        Raises:
            SourceError: the format cannot hold a tensor or an item.
            TargetError: the target does not fit the tensors.
        """

    @abstractmethod
    def describe(self, manifest: Manifest, folder: Location) -> None:
        """Write and sync what else readers need, such as a manifest, into the finished directory."""

    def staged(self, destination: Location) -> Location:
        """Return where files are written before the destination is published."""
        return publish.staging_place(destination)


def extended_provenance(
    request: WriteRequest, name: str, step: Mapping[str, Any], earlier: Sequence[Any] | None, buffers: Sequence[Any]
) -> dict[str, Any]:
    """Return the source's provenance with an entry ``name`` for this conversion, and with these flat buffers if any.

    Args:
        step: details of this conversion; the program and the source are added.
        earlier: the entries to which this one is appended; None to keep only this one.
    """
    notes = {"notes": list(request.outputs.notes), "left_out": list(request.outputs.left_out)}
    entry = {"program": PROGRAM, "source": request.source, **step, **{key: text for key, text in notes.items() if text}}
    source = {key: value for key, value in request.provenance.items() if key != "buffers"}
    extended = {**source, name: entry if earlier is None else [*earlier, entry]}
    return {**extended, "buffers": list(buffers)} if buffers else extended


FORMATS = tuple(format.written_as for format in BUILT_IN if format.written_as)
"""The names of the built-in formats that can be written."""


def container_of(name: str, shard_bytes: int | None = None) -> Container:
    """Return the container of the format that is ``written_as`` this name.

    Raises:
        TargetError: there is no such format; or each rank has a file in it, and ``shard_bytes`` is given.
        SourceError: a plug-in for formats is broken.
    """
    format = format_written_as(name)
    if format is None:
        raise TargetError(f"unknown format {name!r}; expected one of {', '.join(FORMATS)}, or of a plug-in")
    make: Callable[..., Container] = import_named(format.writer)
    container = make()
    if shard_bytes is None:
        return container
    if container.of_ranks:
        raise TargetError(f"`shard_size=` has no meaning for format {name}; leave it out")
    return make(shard_bytes=shard_bytes)
