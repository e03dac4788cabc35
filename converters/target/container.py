"""A kind of destination: its files, the places of tensors and items in them, and the files that describe the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...record import Manifest
from ...store.io import publish
from ...store.io.location import Location
from ...version import PROGRAM
from ..engine.output_files import Arranged, WriteRequest


class Container(ABC):
    """One kind of destination.

    Attributes:
        name: the name of the format.
        of_ranks: whether each rank of a mesh has a file of its own; otherwise tensors are written whole.
    """

    name: ClassVar[str]
    of_ranks: ClassVar[bool]

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
        """Write and sync what readers need in addition, such as a manifest, into the finished directory."""

    def staged(self, destination: Location) -> Location:
        """Where files are written before the destination is published."""
        return publish.staging_place(destination)


def extended_provenance(
    request: WriteRequest, name: str, step: Mapping[str, Any], earlier: Sequence[Any] | None, buffers: Sequence[Any]
) -> dict[str, Any]:
    """The provenance of the source, with an entry ``name`` for this conversion, and with these flat buffers if any.

    Args:
        step: details of this conversion; the program and the source are added.
        earlier: entries of the same name, to which this one is appended; None if only the last one is kept.
    """
    notes = {"notes": list(request.outputs.notes), "left_out": list(request.outputs.left_out)}
    entry = {"program": PROGRAM, "source": request.source, **step, **{key: text for key, text in notes.items() if text}}
    source = {key: value for key, value in request.provenance.items() if key != "buffers"}
    extended = {**source, name: entry if earlier is None else [*earlier, entry]}
    return {**extended, "buffers": list(buffers)} if buffers else extended
