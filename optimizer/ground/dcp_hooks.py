"""DCP's documented hooks on a DTensor, which tell it the boxes of this rank where placements do not."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pickle import PicklingError
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ...algebra.box import Box, Index
from ...names.errors import LayoutError

_ADVICE = "save it on all ranks, by muonckpt.save or torch.distributed.checkpoint"


@dataclass(frozen=True, slots=True, eq=False)
class Hooks:
    """The boxes of a local tensor, for DCP.  A deep copy of the tensor has hooks, and views, of its own.

    Attributes:
        views: of the tensor's memory, by the first index of each box.
        size: the global shape.
    """

    chunks: list[ChunkStorageMetadata]
    views: dict[Index, Tensor]
    properties: TensorProperties
    size: torch.Size

    def chunk_list(self) -> list[ChunkStorageMetadata]:
        return self.chunks

    def write_items(self, name: str, _: DTensor) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, self.properties, self.size),
            )
            for chunk in self.chunks
        ]

    def shard(self, index: MetadataIndex) -> Tensor:
        return self.views[tuple(index.offset or ())]

    def refuse_gathering(self, *_: object, **__: object) -> NoReturn:
        """Stand in for `full_tensor` and `redistribute`, which would take the boxes for even shards."""
        raise LayoutError(
            f"each rank has other boxes of a tensor of shape {tuple(self.size)}, which torch cannot gather "
            f"(full_tensor(), StateDictOptions(full_state_dict=True)): {_ADVICE}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Hooks:
        return replace(self, views=deepcopy(self.views, memo))

    def __reduce__(self) -> NoReturn:
        raise PicklingError(
            f"each rank has other boxes of a tensor of shape {tuple(self.size)}, and one rank's file would be a part: "
            f"do not pickle this optimizer's state_dict() (torch.save); {_ADVICE}"
        )


def declare_boxes(value: DTensor, boxes: Sequence[Box]) -> None:
    """Put DCP's hooks on a local tensor, whose boxes lie dense, one after the other; none if it is empty."""
    dtensor: Any = value
    local: Any = value._local_tensor
    views, offset = {}, 0
    for box in boxes:
        views[box.lo] = local.view(-1)[offset : offset + box.numel].view(box.shape)
        offset += box.numel
    chunks = [ChunkStorageMetadata(torch.Size(box.lo), torch.Size(box.shape)) for box in boxes]
    hooks = Hooks(chunks, views, TensorProperties.create_from_tensor(local), value.shape)
    local.__create_chunk_list__ = hooks.chunk_list
    local.__create_write_items__ = hooks.write_items
    local.__get_tensor_shard__ = hooks.shard
    dtensor.full_tensor = dtensor.redistribute = hooks.refuse_gathering


def declared_boxes(value: Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return offsets and sizes of the boxes that were declared for a tensor; none if it is not a DTensor."""
    if not isinstance(value, DTensor):
        return []
    chunks = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
