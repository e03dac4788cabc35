"""What each rank saves: DCP's planning, with every tensor as the boxes that ranks hold, and coverage proved."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.metadata import TensorStorageMetadata as TensorMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from ..box import Box, Index
from ..errors import LayoutError, about
from ..layout import Fragment, TensorLayout, dense
from ..layouts.boxed_tensor import all_boxed
from ..vocabulary import KeyPath
from .annotation import Annotation, annotations_of
from .plain_objects import refuse_unloadable


class CoveringSavePlanner(DefaultSavePlanner):
    """DCP's planner, which also proves coverage, and keeps the replicas that DCP drops as witnesses.

    Empty shards write nothing.  ``plans`` and ``witnesses`` (one entry per rank) exist on the coordinator.

    Args:
        failure: why this rank has nothing to plan; raised where all ranks hear of it.
    """

    plans: list[SavePlan]
    witnesses: list[tuple[WriteItem, ...]]
    annotations: Mapping[KeyPath, Annotation]

    def __init__(self, failure: BaseException | None = None) -> None:
        super().__init__()
        self._failure = failure

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        # Here, and not before DCP is called, so that an error of one rank reaches all ranks.
        if self._failure is not None:
            raise self._failure
        self.annotations = annotations_of(state_dict)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        for key, value in self.state_dict.items():
            if not isinstance(value, Tensor):
                refuse_unloadable(key, value)
        self.state_dict = all_boxed(self.state_dict)

    def create_local_plan(self) -> SavePlan:
        # Before DCP drops duplicates: an empty box may have the place of another rank's box that is not empty.
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[item for item in plan.items if not _empty(item) or _hollow(item)])
        return self.plan

    def annotation(self, key: str) -> Annotation:
        """This rank's annotation of a tensor."""
        return self.annotations.get(tuple(self.mappings[key]), Annotation())

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _prove_covered(all_plans)  # before DCP checks, whose error names neither the missing box nor the holders
        plans, metadata = super().create_global_plan(all_plans)
        for entry in metadata.state_dict_metadata.values():
            if isinstance(entry, TensorMetadata):
                entry.chunks = [chunk for chunk in entry.chunks if 0 not in chunk.sizes]
        items_of_ranks = [[item for item in plan.items if not _empty(item)] for plan in plans]
        self.witnesses = []
        for before, items in zip(all_plans, items_of_ranks, strict=True):
            written = {item.index for item in items}
            self.witnesses.append(
                tuple(item for item in before.items if item.index not in written and not _empty(item))
            )
        self.plans = [dataclasses.replace(plan, items=items) for plan, items in zip(plans, items_of_ranks, strict=True)]
        return self.plans, metadata


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


def _empty(item: WriteItem) -> bool:
    return item.tensor_data is not None and 0 in item.tensor_data.chunk.sizes


def _hollow(item: WriteItem) -> bool:
    """Whether the whole tensor has no elements."""
    return item.tensor_data is not None and 0 in item.tensor_data.size


def _prove_covered(plans: Sequence[SavePlan]) -> None:
    """Check that all ranks together hold every tensor whole; of replicas one counts, as DCP stores one."""
    shapes: dict[str, Index] = {}
    held: defaultdict[str, dict[Index, Fragment]] = defaultdict(dict)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is not None:
                shapes.setdefault(item.index.fqn, tuple(item.tensor_data.size))
                if not _empty(item):
                    box = Box.of(tuple(item.tensor_data.chunk.sizes)).shift(offsets_of(item))
                    held[item.index.fqn].setdefault(box.lo, dense(box, f"rank {rank}"))
    for key, shape in shapes.items():
        with about(f"tensor {key!r}"):
            TensorLayout(shape, tuple(held[key].values()))
    planned = {item.index.fqn for plan in plans for item in plan.items}
    for key in {key for plan in plans for key in plan.planner_data or ()} - planned:
        raise LayoutError(f"tensor {key!r}: no rank holds any of its elements")
