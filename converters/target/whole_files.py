"""Files of formats that hold whole tensors, whatever ranks there are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import SourceError
from ..engine.output_files import Arranged, OutputFile, Task
from ..engine.outputs import OutputTensor
from .container import Container, provenance


@dataclass(frozen=True, slots=True)
class WholeFiles(Container):
    """Every tensor whole, with at most ``shard_bytes`` of elements in a file; None: as is usual."""

    shard_bytes: int | None = None
    of_ranks: ClassVar[bool] = False

    def arrange(self, task: Task) -> Arranged:
        outputs = task.outputs
        if outputs.items:
            keys = [item.key for item in outputs.items]
            shown = ", ".join(map(repr, keys[:10])) + (", …" if len(keys) > 10 else "")
            raise SourceError(
                f"the source holds {len(keys)} items that are no tensors, which {self.name} cannot hold: {shown}; "
                "leave them out with --tensors-only"
            )
        layouts = {output.key: output.record.layout for output in outputs.tensors}
        buffers = task.provenance.get("buffers", ()) if any(layouts.values()) else ()  # a tensor still speaks of them
        recorded = provenance(task, "exported", {}, None, buffers)
        return Arranged(tuple(self.files(outputs.tensors, recorded)), layouts, recorded)

    @abstractmethod
    def files(self, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> Sequence[OutputFile]:
        """The files of these tensors; ``recorded`` is the provenance.

        Raises:
            SourceError: the format cannot hold one of the tensors.
        """
