"""Tensors as the boxes that this rank holds, and the hooks by which DCP asks for them.

DCP takes a DTensor for one box on each rank, which is wrong where placements interleave, or a flat buffer was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import add, gt
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ..algebra.box import Box, Index, flat_boxes
from ..algebra.layout import corners_of
from ..algebra.overlap import overlaps
from ..names.errors import LayoutError
from .tensors import declares_boxes, fragments_here, local_of

Parts = Mapping[Index, Tensor]
"""The boxes of a rank: by the global index of each box's first element, a view of its elements."""

_PARTWISE = {torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.zeros_like.default,
             torch.ops.aten.empty_like.default}  # fmt: skip


class BoxedTensor(Tensor):
    """A tensor of global ``shape``; this rank holds ``parts``, which share memory with their sources.

    It goes into state dicts: `muonckpt` and stock DCP find its boxes by DCP's hooks.  It can be cloned, detached and
    deep-copied, and zeros can be made like it; compute with its parts.

    Args:
        shape: of the whole tensor.
        parts: see `Parts`; may be empty.
        dtype, device: of the elements; those of the parts, if there are any.

    Raises:
        LayoutError: a part reaches outside the shape, two overlap, or their dtypes differ.
    """

    parts: Parts

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        parts: Parts,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> BoxedTensor:
        for part in parts.values():
            dtype, device = dtype or part.dtype, device or part.device
        # The wrapper has no memory of its own.
        boxed: BoxedTensor = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype or torch.get_default_dtype(), device=torch.device(device or "cpu")
        )
        boxed.parts = MappingProxyType({tuple(lo): part.detach() for lo, part in parts.items() if part.numel()})
        _check_parts(tuple(shape), boxed.dtype, boxed.parts)
        return boxed

    @classmethod
    def of_flat(cls, shape: Sequence[int], start: int, flat: Tensor) -> BoxedTensor:
        """Return elements ``start : start + flat.numel()`` of the flattened (row-major) tensor.

        Args:
            flat: those elements, in one dim.

        Raises:
            LayoutError: the range is not inside the tensor.
        """
        parts, offset = {}, 0
        for box in flat_boxes(tuple(shape), start, start + flat.numel()):
            parts[box.lo] = flat[offset : offset + box.numel].view(box.shape)
            offset += box.numel
        return cls(shape, parts, flat.dtype, flat.device)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        boxes = [(lo, part.shape) for lo, part in self.parts.items()]
        if 0 in self.shape:  # a tensor without elements is known by its one empty box
            boxes = [((0,) * self.ndim, self.shape)]
        return [ChunkStorageMetadata(torch.Size(lo), torch.Size(sizes)) for lo, sizes in boxes]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(self.dtype, torch.strided, False, torch.contiguous_format, False)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self.parts[tuple(index.offset or ())]

    def __deepcopy__(self, memo: dict[int, Any]) -> BoxedTensor:
        return self._map_parts(Tensor.clone)

    def __repr__(self) -> str:  # type: ignore[override]
        boxes = ", ".join(map(str, _boxes_of(self.parts)))
        return f"BoxedTensor({self.dtype} of shape {tuple(self.shape)}, here: {boxes or 'nothing'})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _PARTWISE and isinstance(args[0], BoxedTensor):
            return args[0]._map_parts(lambda part: func(part, *args[1:], **(kwargs or {})))
        raise TypeError(f"{func} of a BoxedTensor: it is the boxes that this rank holds; compute with its parts")

    def _map_parts(self, function: Callable[[Tensor], Tensor]) -> BoxedTensor:
        return type(self)(self.shape, {lo: function(part) for lo, part in self.parts.items()}, self.dtype, self.device)


def parts_of(tensor: Tensor) -> Parts:
    """Return the boxes that this rank holds of any tensor.

    Raises:
        LayoutError: the hooks or placements are wrong or unknown.
    """
    if isinstance(tensor, ShardedTensor):
        # A shard may itself be a sharded tensor, as FSDP1 made them of tensor parallelism.
        parts: dict[Index, Tensor] = {}
        for shard in tensor.local_shards():
            offsets = shard.metadata.shard_offsets
            parts |= {tuple(map(add, offsets, lo)): part for lo, part in parts_of(shard.tensor).items()}
        return parts
    if declares_boxes(tensor):
        return dict(_declared_parts(tensor))
    if isinstance(tensor, DTensor):
        return _placed_parts(tensor)
    return {(0,) * tensor.ndim: tensor.detach()} if tensor.numel() else {}


def whole_shape(tensor: Tensor) -> Index:
    """Return the global shape of any tensor: the one that DCP's hooks name, if it has them."""
    if not isinstance(tensor, DTensor | ShardedTensor | BoxedTensor) and declares_boxes(tensor):
        items: list[WriteItem] = tensor.__create_write_items__("", tensor)  # type: ignore[attr-defined]
        for item in items:
            if item.tensor_data is not None:
                return tuple(item.tensor_data.size)
    return tuple(tensor.shape)


def _placed_parts(tensor: DTensor) -> Parts:
    local, parts = local_of(tensor), {}
    for fragment in fragments_here(tensor):
        if fragment.box.shape == tuple(local.shape):
            return {fragment.box.lo: local}
        # The local tensor may be of any strides; the layout takes it for a dense one.
        starts = np.unravel_index(fragment.place.offset, tuple(local.shape)) if local.ndim else ()
        window = tuple(slice(int(lo), int(lo) + n) for lo, n in zip(starts, fragment.box.shape, strict=True))
        parts[fragment.box.lo] = local[window]
    return parts


def _declared_parts(tensor: Any) -> Iterator[tuple[Index, Tensor]]:
    for number, chunk in enumerate(tensor.__create_chunk_list__()):
        # Empty chunks have no elements to ask for.
        if 0 in chunk.sizes:
            continue
        part: Tensor = tensor.__get_tensor_shard__(MetadataIndex("", chunk.offsets, number))
        if part.shape != chunk.sizes:
            box = Box.of(chunk.sizes).shift(chunk.offsets)
            raise LayoutError(f"hooks of the tensor give elements of shape {tuple(part.shape)} for box {box}")
        yield tuple(chunk.offsets), part.detach()


def _boxes_of(parts: Parts) -> list[Box]:
    return [Box.of(tuple(part.shape)).shift(lo) for lo, part in parts.items()]


def _check_parts(shape: Index, dtype: torch.dtype, parts: Parts) -> None:
    """Refuse parts that overlap, reach outside the tensor, or have another dtype."""
    boxes = _boxes_of(parts)
    for box, part in zip(boxes, parts.values(), strict=True):
        if box.ndim != len(shape) or any(map(gt, box.hi, shape)):
            raise LayoutError(f"box {box} reaches outside the tensor of shape {shape}")
        if part.dtype != dtype:
            raise LayoutError(f"box {box} is {part.dtype}, the tensor is {dtype}")
    if len(boxes) > 1:
        lo, hi = corners_of(shape, boxes)
        for i, j in zip(*overlaps(lo, hi, lo, hi), strict=True):
            if i != j:
                raise LayoutError(f"boxes {boxes[i]} and {boxes[j]} of one rank overlap")
