"""Megatron's own optimizers over the one that is registered: a program that trains a small model on one of some ranks.

    python -P tests/support/upstream_megatron.py RANK WORLD FOLDER PLANS

PLANS is a JSON list of what to do one after the other: "config" (of OptimizerConfig), "load" and "save" (torch_dist
checkpoints, or null), "steps", "in_parts" (whether to ask for tensor parallelism).  What the rank then holds is saved
as FOLDER/memory-RANK-of-WORLD.pt.  It needs `megatron-core` 0.19, `emerging-optimizers` and what these import; it runs
in processes of its own, and exits with 3 and the reason where they cannot be imported.  Only queries of CUDA are stood
in for: groups, wrappers, ownership, steps and checkpoints are the packages' own code.
"""

from __future__ import annotations

import json
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

if not hasattr(typing, "override"):  # Python 3.11
    typing.override = lambda function: function

try:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.emerging_optimizers import HAVE_EMERGING_OPTIMIZERS
except ImportError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(3)
if not HAVE_EMERGING_OPTIMIZERS:
    print("emerging-optimizers cannot be imported", file=sys.stderr)
    sys.exit(3)

from muonckpt.integrations.megatron import NAME, MegatronMuon, config_to_kwargs

SIZES = SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=4)
TYPES = {torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float32: "torch.cuda.FloatTensor"}


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU, and say the types that Megatron expects."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == 0 or str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.type and len(args) == 1:
            return TYPES[args[0].dtype]
        return function(*args, **kwargs)


SHAPES = {
    "first_norm": (16,),
    "last_norm": (16,),
    "up": (24, 16),
    "down": (16, 24),
    "linear_qkv": (32, 16),
    "embedding": (32, 16),
}
"""Layer-wise owners get as many elements on two ranks: gloo gathers nothing else."""


class Net(nn.Module):
    """Parameters of which a step's gradients are given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = SIZES
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            owner, parameter = nn.Module(), nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            owner.register_parameter("weight", parameter)
            self.add_module(name, owner)
        self.embedding.weight.is_embedding_or_output_parameter = True


def train(net: Net, optimizer, plan: dict) -> None:
    """Load, step, and save, as the plan says; rates are scheduled as by Megatron, in the groups."""
    model = {
        name: ShardedTensor.from_rank_offsets(name, parameter, replica_id=(0, 0, dist.get_rank()))
        for name, parameter in net.named_parameters()
    }
    if plan["load"]:
        template = {"model": model, "optimizer": optimizer.sharded_state_dict(model, is_loading=True)}
        loaded = dist_checkpointing.load(template, plan["load"], strict="raise_all")
        optimizer.load_state_dict(loaded["optimizer"])
        for name, parameter in net.named_parameters():
            parameter.data.copy_(loaded["model"][name])
    for step in plan["steps"]:
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in net.parameters():
            parameter.main_grad = torch.randn(parameter.shape, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = group["max_lr"] / (1 + step)
        optimizer.step()
    if plan["save"]:
        Path(plan["save"]).mkdir(exist_ok=True)
        dist.barrier()
        dist_checkpointing.save({"model": model, "optimizer": optimizer.sharded_state_dict(model)}, plan["save"])


def carried_out(plan: dict) -> dict:
    """What this rank holds when the plan is carried out, or the error that ended it."""
    net = Net(torch.bfloat16)
    config = OptimizerConfig(
        **{"optimizer": NAME, "lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0, "bf16": True,
           "muon_fp32_matmul_prec": "high", **plan["config"]}
    )  # fmt: skip
    try:
        if plan["in_parts"]:
            config_to_kwargs(config, [net], SimpleNamespace(tp=dist.group.WORLD))
        optimizer = get_megatron_optimizer(config, [net], {}, use_gloo_process_groups=False)
    except ValueError as error:
        return {"error": str(error)}
    train(net, optimizer, plan)
    distributed_optimizer = next(
        chained.optimizer for chained in optimizer.chained_optimizers if isinstance(chained.optimizer, MegatronMuon)
    )
    return {
        "parameters": {name: parameter.detach().clone() for name, parameter in net.named_parameters()},
        "owned": sum(len(group["params"]) for group in distributed_optimizer.param_groups),
        "sharing": list(distributed_optimizer.schedules),
    }


def main(rank: int, world: int, folder: Path, plans: list[dict]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{world}", rank=rank, world_size=world)
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args: None
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    with OnCpu():
        torch.save([carried_out(plan) for plan in plans], folder / f"memory-{rank}-of-{world}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
