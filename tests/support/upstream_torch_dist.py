"""Megatron's own layer-wise Muon, loading a ``torch_dist`` checkpoint: a program that saves what it then has in memory.

    python -P tests/support/upstream_torch_dist.py CHECKPOINT OUT [lion]

One rank, so that it owns every matrix; what is no matrix has AdamW in a second optimizer, or Emerging-Optimizers' Lion.
That also takes a step, on gradients from -1 to 1, whose masters are saved as ``stepped``.  It needs `megatron-core`
0.19, `emerging-optimizers` and what these import; it runs in a process of its own, and exits with 3 and the reason
where they cannot be imported.  Only queries of CUDA are stood in for: sharding, loading and the optimizer are the
packages' own code.
"""

from __future__ import annotations

import sys
import typing
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

if not hasattr(typing, "override"):  # Python 3.11
    typing.override = lambda function: function

try:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon, _eopt_init_state_fn
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
except ImportError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(3)

GROUP = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "max_lr": 0.1,
         "min_lr": 0.0}  # fmt: skip
"""What Megatron tells groups by: as the golden runs had it."""


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU, and bfloat16 ones say the type that Megatron expects."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.type and len(args) == 1 and args[0].dtype is torch.bfloat16:
            return "torch.cuda.BFloat16Tensor"
        return function(*args, **kwargs)


def parameters(path: str) -> dict[str, torch.nn.Parameter]:
    """The checkpoint's weights, as parameters that hold nothing of it."""
    sharded_tensors = dist_checkpointing.load_tensors_metadata(path)
    weights = {key: tensor for key, tensor in sharded_tensors.items() if "optimizer.state." not in key}
    return {
        key: torch.nn.Parameter(torch.full(tensor.global_shape, torch.nan, dtype=torch.bfloat16))
        for key, tensor in weights.items()
    }


def adam_state(optimizer: torch.optim.Optimizer, config: object = None) -> None:
    """As Megatron makes it before it loads."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {slot: torch.zeros_like(param) for slot in ("exp_avg", "exp_avg_sq")}


def lion_state(optimizer: torch.optim.Optimizer, config: object = None) -> None:
    """As Megatron makes it before it loads."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {"exp_avg": torch.zeros_like(param)}


def main(path: str, out: str, scalar: str = "adam") -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}.rendezvous", rank=0, world_size=1)
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args: None
    params = parameters(path)
    matrices = [{**GROUP, "params": [param for param in params.values() if param.ndim == 2]}]
    vectors = [{**GROUP, "params": [param for param in params.values() if param.ndim != 2]}]
    bases, states = [TensorParallelMuon(matrices, lr=0.1, momentum=0.9, weight_decay=0.0)], [_eopt_init_state_fn]
    if vectors[0]["params"]:
        if scalar == "lion":
            from emerging_optimizers.scalar_optimizers import Lion

            bases.append(Lion(vectors, lr=0.5))
        else:
            bases.append(torch.optim.AdamW(vectors, lr=0.5, betas=(0.9, 0.95)))
        states.append(lion_state if scalar == "lion" else adam_state)
    named = {id(param): name for name, param in params.items()}
    names = [[named[id(param)] for param in base.param_groups[0]["params"]] for base in bases]
    group = dist.group.WORLD
    groups = SimpleNamespace(dp_cp=group, expt_dp=group, intra_dp_cp=None, tp=group, mp=group)
    config = OptimizerConfig(optimizer="muon", lr=0.1, bf16=True, use_layer_wise_distributed_optimizer=True)
    with OnCpu():
        optimizer = LayerWiseDistributedOptimizer(list(bases), config, groups, init_state_fn_list=states)
        model = {name: ShardedTensor.from_rank_offsets(name, param) for name, param in params.items()}
        template = {"model": model, "optimizer": optimizer.sharded_state_dict(model, is_loading=True)}
        loaded = dist_checkpointing.load(template, path, strict="raise_all")
        optimizer.load_state_dict(loaded["optimizer"])
    memory = dict(loaded["model"])
    for names_of_optimizer, wrapped, base in zip(names, optimizer.chained_optimizers, bases, strict=True):
        for name, master in zip(names_of_optimizer, wrapped.fp32_from_float16_groups[0], strict=True):
            slots = {"fp32_param": master, **base.state[master]}
            memory |= {f"optimizer.state.{slot}.{name}": value for slot, value in slots.items()}
    options = [{key: value for key, value in base.param_groups[0].items() if key != "params"} for base in bases]
    memory = {key: tensor.detach().clone() for key, tensor in memory.items()}
    stepped = {}
    if scalar == "lion":
        for name, master in zip(names[1], optimizer.chained_optimizers[1].fp32_from_float16_groups[0], strict=True):
            master.grad = torch.linspace(-1, 1, master.numel())
            stepped[name] = master
        bases[1].step()
    torch.save({"tensors": memory, "groups": options, "stepped": stepped}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
