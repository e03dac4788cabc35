"""Optimizer state that its owner has all of, or of which each rank has a flat range, as DCP saves and loads it.

Such a tensor is a DTensor with the parameter's global shape; where its elements are is said by DCP's hooks on the local
tensor, as for Megatron-FSDP's, because placements do not say it.  So it is the same to a checkpoint as the state of a
run on FSDP, with other boxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from ..box import Box, row_major
from ..layouts.tensors import local_of
from .flat_buffers import Part
from .layer_wise_model import options_of
from .state import fault, merged

MASTER = "fp32_param"
"""The slot of a float32 master; the name is Megatron's."""


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
    wanted, held = dict(example), dict(inner)
    if part.mastered:
        wanted[MASTER], held[MASTER] = whole, part.stepped
    return {
        slot: held[slot] if like.ndim == 0 or mesh is None else _placed(like, held.get(slot), part, mesh)
        for slot, like in wanted.items()
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
    say_boxes(placed, boxes)
    return placed


def say_boxes(value: DTensor, boxes: Sequence[Box]) -> None:
    """Put DCP's hooks on the local tensor: its boxes, which lie dense, one after the other; none if it is empty."""
    chunks = [ChunkStorageMetadata(torch.Size(box.lo), torch.Size(box.shape)) for box in boxes]
    local: Any = value._local_tensor
    views, at = {}, 0
    for box in boxes:
        views[box.lo] = local.view(-1)[at : at + box.numel].view(box.shape)
        at += box.numel
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


def restore(optimizer: Optimizer, given: dict[str, Any]) -> None:
    """Copy a state dict into an optimizer's state, and those hyper-parameters that belong to the run.

    Raises:
        ValueError: names every parameter whose state is incomplete, laid out otherwise or of another dtype, or the
            group of another algorithm or convention; nothing is changed then.
    """
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        given = before(optimizer, given) or given
    groups, saved_groups = optimizer.param_groups, given["param_groups"]
    sizes = [[len(group["params"]) for group in side] for side in (groups, saved_groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the state has groups of {sizes[1]} parameters, this optimizer of {sizes[0]}")
    hyper = [merged(*each) for each in zip(range(len(groups)), groups, saved_groups, strict=True)]
    copies, problems = [], []
    for number, (mine, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        for index, (param, key) in enumerate(zip(mine["params"], saved["params"], strict=True)):
            own, found = optimizer.state[param], given["state"].get(key, {})
            if why := fault(own, found) or _elsewhere(own, found):
                problems.append(f"group {number} parameter {index} {tuple(param.shape)}: {why}")
            else:
                copies += [(local_of(value), local_of(found[slot])) for slot, value in own.items()]
    if problems:
        raise ValueError("the state does not fit, training would go on wrongly: " + "; ".join(problems))
    for target, source in copies:
        target.copy_(source)
    for mine, loaded in zip(groups, hyper, strict=True):
        mine.update(options_of(loaded))
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def _elsewhere(mine: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """Why loaded tensors are not element for element where these are, though their placements are the same."""
    for slot, tensor in mine.items():
        if found[slot].dtype != tensor.dtype:
            return f"{slot} is {found[slot].dtype}, expected {tensor.dtype}"
        if _boxes(found[slot]) != _boxes(tensor):
            return f"{slot} is cut otherwise; load it through a checkpoint"
    return None


def _boxes(value: Tensor) -> list[tuple[Any, Any]]:
    if not isinstance(value, DTensor):
        return []
    chunks = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
