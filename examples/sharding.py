"""FSDP2 for the demo's model: one unit per block and one for the rest, rows over all ranks."""

from __future__ import annotations

import torch
from model import Transformer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard(model: Transformer, mesh: DeviceMesh, reduce_dtype: torch.dtype | None = None) -> None:
    """Shard `model` in place over the 1-D `mesh`, adding gradients up in `reduce_dtype` (default: their own).

    Gradients are *summed* over the ranks, not averaged: the loss is already divided by the size of the global
    batch, so that the gradient's scale does not depend on the number of ranks. A float64 sum of a few float32
    gradients hardly ever rounds, so that in float64 their order, hence the number of ranks, does not matter.
    """
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has neither an average nor a scaled sum
