"""A kind of destination: what its files are, how tensors and items lie in them, and what describes them all."""

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
        name: of the format.
        of_ranks: whether each rank of a mesh has a file of its own; otherwise tensors are written whole.
    """

    name: ClassVar[str]
    of_ranks: ClassVar[bool]

    @property
    def root(self) -> str:
        """The one file that the destination is; without a name it is the directory with all of them."""
        return ""

    @abstractmethod
    def arrange(self, task: WriteRequest) -> Arranged:
        """Decide what goes where in which file.

        Raises:
            SourceError: the format cannot hold something.
            TargetError: the target does not fit the tensors.
        """

    @abstractmethod
    def describe(self, manifest: Manifest, folder: Location) -> None:
        """Write what readers need besides the files, synced, into the finished directory."""

    def staged(self, destination: Location) -> Location:
        """Where files are written before the destination is published."""
        return publish.staging_place(destination)


def extended_provenance(
    task: WriteRequest, name: str, step: Mapping[str, Any], earlier: Sequence[Any] | None, buffers: Sequence[Any]
) -> dict[str, Any]:
    """The provenance of the source, and under ``name`` what is done now; flat buffers are these, if there are any.

    Args:
        step: what is done, besides by which program to which source.
        earlier: steps of the same name, to which this is added; None where only the last is kept.
    """
    told = {"notes": list(task.outputs.notes), "left_out": list(task.outputs.left_out)}
    done = {"program": PROGRAM, "source": task.source, **step, **{key: value for key, value in told.items() if value}}
    kept = {key: value for key, value in task.provenance.items() if key != "buffers"}
    now = {name: done if earlier is None else [*earlier, done]}
    return {**kept, **now, **({"buffers": list(buffers)} if buffers else {})}
