"""Expert parallelism and FSDP2 for the demo's model: which rank holds what, and how tokens and gradients travel.

A mesh of EP x FSDP ranks holds the experts: whole experts are divided over "ep", the rows of each over "fsdp".
Everything else is sharded by rows over all ranks, one unit per block and one for the rest.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from model import Experts, Transformer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def shard(model: Transformer, ep: int, reduce_dtype: torch.dtype | None = None) -> None:
    """Shard `model` in place over all ranks, its experts over `ep` of them, adding gradients up in `reduce_dtype`.

    Gradients are *summed* over the ranks, not averaged: the loss is already divided by the size of the global
    batch, so that the gradient's scale does not depend on the number of ranks, or on how many of them an expert's
    tokens have come from. A float64 sum of a few float32 gradients hardly ever rounds, so that in float64 their
    order, hence the mesh, does not matter.
    """
    world = dist.get_world_size()
    everyone = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("fsdp", "ep"))
    for module in model.modules():
        if isinstance(module, Experts):
            shard_experts(module, mesh, reduce_dtype)
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for block in model.blocks:
        fully_shard(block, mesh=everyone, mp_policy=policy)
    fully_shard(model, mesh=everyone, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has neither an average nor a scaled sum


def shard_experts(experts: Experts, mesh: DeviceMesh, reduce_dtype: torch.dtype | None) -> None:
    """Weights `[experts, rows, columns]` become DTensors: dim 0 over "ep", dim 1 over "fsdp".

    An expert's gradient is added up on its rank over the tokens of all "ep" ranks, before FSDP adds it up over
    "fsdp". For both sums to be in `reduce_dtype`, FSDP hands out the weights in that dtype too.
    """
    for name, weight in list(experts.named_parameters()):
        split = distribute_tensor(weight.detach(), mesh["ep"], [Shard(0)], src_data_rank=None)  # all have the same
        experts.register_parameter(name, nn.Parameter(split))
    policy = MixedPrecisionPolicy(param_dtype=reduce_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    fully_shard(experts, mesh=mesh["fsdp"], shard_placement_fn=lambda weight: Shard(1), mp_policy=policy)
    experts.register_forward_pre_hook(lambda module, inputs: gather_tokens(*inputs, mesh["ep"]))
    experts.register_forward_hook(lambda module, inputs, output: return_tokens(output, mesh["ep"]))


def gather_tokens(x: Tensor, gates: Tensor, ep: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Tokens of this rank, gates of all experts -> tokens of all `ep` ranks, gates of this rank's experts.

    x: [batch, seq, dim]; gates: [batch, seq, experts]. Backward, the ranks' gradients of `x` are added up.
    """
    tokens, gates_of_rank = (DTensor.from_local(tensor, ep, [Shard(0)]) for tensor in (x, gates))
    all_tokens = tokens.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    everyones_gates = gates_of_rank.redistribute(placements=[Replicate()])  # gloo has no all-to-all between dims
    return all_tokens, everyones_gates.redistribute(placements=[Shard(2)]).to_local()


def return_tokens(output: Tensor, ep: DeviceMesh) -> Tensor:
    """Sums over this rank's experts for all tokens -> sums over all experts for this rank's tokens.

    Two of the summands of a token are not zero, as two experts are chosen: their sum rounds once, in any order.
    """
    return DTensor.from_local(output, ep, [Partial()]).redistribute(placements=[Shard(0)]).to_local()
