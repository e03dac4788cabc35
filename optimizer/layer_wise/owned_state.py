"""Optimizer state that its owner has all of, or of which each rank has a flat range, as DCP saves and loads it.

Such a tensor is a DTensor with the parameter's global shape; where its elements are is said by DCP's hooks on the local
tensor, as for Megatron-FSDP's, because placements do not say it.  So it is the same to a checkpoint as the state of a
run on FSDP, with other boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from ...box import Box, row_major
from ...layouts.tensors import local_of
from ...resumption import Globs, LoadReport
from ...vocabulary import MASTER
from ..held_boxes import declare_boxes, declared_boxes
from ..restoration import fitting
from ..state import fault
from .buffer_memory import Part
from .members import options_of


def state_of(
    whole: Tensor, example: Mapping[str, Tensor], part: Part, inner: Mapping[str, Tensor], mesh: DeviceMesh | None
) -> dict[str, Tensor]:
    """The state of one parameter, with the same slots on every rank; shares memory with what is stepped.

    Args:
        whole: the parameter as it is stepped, on the meta device.
        example: its state, on the meta device but for its step.
        part: what this rank holds of it.
        inner: state of ``part.stepped``; nothing if that is a matrix of which this rank holds nothing.
        mesh: of the ranks that share the parameter; None: this process alone, which has everything.
    """
    template, held = dict(example), dict(inner)
    if part.mastered:
        template[MASTER], held[MASTER] = whole, part.stepped
    return {
        slot: held[slot] if like.ndim == 0 or mesh is None else _placed(like, held.get(slot), part, mesh)
        for slot, like in template.items()
    }


def _placed(like: Tensor, held: Tensor | None, part: Part, mesh: DeviceMesh) -> DTensor:
    shape = tuple(like.shape)
    if held is None or not part.boxes:
        held = torch.empty((0, *shape[1:]), dtype=like.dtype, device=part.weight.device)
    # What an owner has all of may be shaped unlike the parameter; what is cut never is.
    whole = held.numel() == like.numel()
    boxes = (Box.of(shape),) if whole else part.boxes
    placed: DTensor = DTensor.from_local(
        held, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=row_major(shape)
    )
    declare_boxes(placed, boxes)
    return placed


def restoring(optimizer: Optimizer, given: dict[str, Any], fresh: Globs) -> tuple[Callable[[], None], LoadReport]:
    """What copies a state dict into an optimizer's state, and those hyper-parameters that belong to the run.

    Masters of parameters that start ``fresh`` keep what they have.

    Raises:
        ValueError: names every parameter whose state is incomplete, laid out otherwise or of another dtype, or the
            group of another algorithm or convention.
    """
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        given = before(optimizer, given) or given
    loaded = fitting(optimizer, given, lambda own, other: fault(own, other) or _elsewhere(own, other), fresh, {MASTER})
    copies = [
        (local_of(value), local_of(loaded.state[key][slot]))
        for mine, group in zip(optimizer.param_groups, loaded.groups, strict=True)
        for param, key in zip(mine["params"], group["params"], strict=True)
        for slot, value in optimizer.state[param].items()
    ]

    def restore() -> None:
        for target, source in copies:
            target.copy_(source)
        for mine, group in zip(optimizer.param_groups, loaded.groups, strict=True):
            mine.update(options_of(group))
        for after in optimizer._optimizer_load_state_dict_post_hooks.values():
            after(optimizer)

    return restore, loaded.report


def _elsewhere(mine: Mapping[str, Tensor], loaded_slots: Mapping[str, Tensor]) -> str | None:
    """Why loaded tensors are not element for element where these are, though their placements are the same."""
    for slot, tensor in mine.items():
        if loaded_slots[slot].dtype != tensor.dtype:
            return f"{slot} is {loaded_slots[slot].dtype}, expected {tensor.dtype}"
        if declared_boxes(loaded_slots[slot]) != declared_boxes(tensor):
            return f"{slot} is cut otherwise; load it through a checkpoint"
    return None
