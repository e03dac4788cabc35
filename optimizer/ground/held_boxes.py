"""The boxes of a DTensor that this rank holds, where placements do not say it: told to DCP by its documented hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ...box import Box


def declare_boxes(value: DTensor, boxes: Sequence[Box]) -> None:
    """Put DCP's hooks on the local tensor: its boxes, which lie dense, one after the other; none if it is empty."""
    chunks = [ChunkStorageMetadata(torch.Size(box.lo), torch.Size(box.shape)) for box in boxes]
    local: Any = value._local_tensor
    views, offset = {}, 0
    for box in boxes:
        views[box.lo] = local.view(-1)[offset : offset + box.numel].view(box.shape)
        offset += box.numel
    properties = TensorProperties.create_from_tensor(local)
    size = value.shape

    def write_items(name: str, _: DTensor) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, size),
            )
            for chunk in chunks
        ]

    local.__create_chunk_list__ = lambda: chunks
    local.__create_write_items__ = write_items
    local.__get_tensor_shard__ = lambda index: views[tuple(index.offset)]


def declared_boxes(value: Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return offsets and sizes of the boxes that were declared for a tensor; none if it is not a DTensor."""
    if not isinstance(value, DTensor):
        return []
    chunks = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
