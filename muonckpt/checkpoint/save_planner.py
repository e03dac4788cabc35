"""What each rank could save: DCP's planning, with every tensor as the boxes that ranks hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from ..box import Index
from ..errors import LayoutError
from ..layouts.boxed_tensor import all_boxed
from ..vocabulary import KeyPath
from .annotation import Annotation, annotations_of
from .offer import Offer, offer_of
from .plain_objects import refuse_unloadable


@dataclass(frozen=True)
class LocalPlan:
    """What one rank could save, before replicas are dropped.  Two that are equal lead to the same checkpoint.

    Attributes:
        items: DCP's; no empty boxes, but for tensors that have no elements at all.
        paths: in the nested state dict, by key.
        annotations: of the tensors of ``items``, by key.
    """

    items: list[WriteItem]
    paths: Mapping[str, KeyPath]
    annotations: Mapping[str, Annotation]

    @property
    def offer(self) -> Offer:
        """What the coordinator has to know of it."""
        return offer_of(self.items, self.paths, self.annotations)


class CoveringSavePlanner(DefaultSavePlanner):
    """DCP's planner of what one rank holds.  Empty shards write nothing; `whole_plan` plans all ranks together."""

    annotations: Mapping[KeyPath, Annotation]

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.annotations = annotations_of(state_dict)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        for key, value in self.state_dict.items():
            if not isinstance(value, Tensor):
                refuse_unloadable(key, value)
        self.state_dict = all_boxed(self.state_dict)

    def create_local_plan(self) -> SavePlan:
        # Before DCP drops duplicates: an empty box may have the place of another rank's box that is not empty.
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[item for item in plan.items if not empty(item) or _hollow(item)])
        return self.plan

    def local_plan(self, state_dict: Mapping[str, Any]) -> LocalPlan:
        """What this rank has of a state dict.

        Raises:
            LayoutError: a checkpoint cannot describe this rank's part of a tensor; names the tensor.
        """
        self.set_up_planner(dict(state_dict))
        items, paths = self.create_local_plan().items, self.mappings
        keys = {item.index.fqn for item in items if item.tensor_data is not None}
        notes = {key: self.annotations[path] for key, path in paths.items() if key in keys and path in self.annotations}
        return LocalPlan(items, paths, notes)


def planned_tensor(planner: SavePlanner, item: WriteItem) -> Tensor:
    """The elements that a plan's item stands for, where they are.

    Raises:
        LayoutError: the local tensor is not what the item says; names the tensor.
    """
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor) and item.tensor_data is not None
    dtype, shape = item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)
    if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
        raise LayoutError(
            f"tensor {item.index.fqn!r}: the local tensor is {tensor.dtype} of shape {tuple(tensor.shape)}, "
            f"its placements imply {dtype} of shape {shape}"
        )
    return tensor.detach()


def offsets_of(item: WriteItem) -> Index:
    """Of the box that a planned tensor stands for, the first index."""
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.offsets)


def empty(item: WriteItem) -> bool:
    """Whether a planned tensor has no elements."""
    return item.tensor_data is not None and 0 in item.tensor_data.chunk.sizes


def _hollow(item: WriteItem) -> bool:
    """Whether the whole tensor has no elements."""
    return item.tensor_data is not None and 0 in item.tensor_data.size
