"""Destinations that hold whole tensors, on any mesh."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..engine.output_files import Arranged, OutputFile, WriteRequest
from ..engine.outputs import OutputTensor
from .container import Container, extended_provenance
from .item_file import ItemFile


@dataclass(frozen=True, slots=True)
class WholeFiles(Container):
    """Whole tensors, with at most ``shard_bytes`` of elements in a file, None for the format's default.

    Non-tensor items are in a file of items beside the destination.
    """

    shard_bytes: int | None = None
    of_ranks: ClassVar[bool] = False

    def arrange(self, request: WriteRequest) -> Arranged:
        outputs = request.outputs
        items = ItemFile.of(outputs.items, request.payloads, request.source) if outputs.items else None
        layouts = {output.key: output.record.layout for output in outputs.tensors}
        buffers = (
            request.provenance.get("buffers", ()) if any(layouts.values()) else ()
        )  # a tensor still refers to them
        step: dict[str, Any] = {}
        if items:
            step = {"items": len(items.decoded), "undecoded": list(items.undecoded), "items_digest": items.digest}
        recorded = extended_provenance(request, "exported", step, None, buffers)
        return Arranged(tuple(self.files(outputs.tensors, recorded)), layouts, recorded, items)

    @abstractmethod
    def files(self, tensors: Sequence[OutputTensor], recorded: Mapping[str, Any]) -> Sequence[OutputFile]:
        """The files of these tensors; ``recorded`` is the provenance to write.

        Raises:
            SourceError: the format cannot hold one of the tensors.
        """
