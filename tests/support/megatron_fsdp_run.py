"""A run of Megatron-LM under Megatron-FSDP, as its source writes and loads the keys of its optimizers.

Imitated: Megatron-LM itself needs GPUs.  Its `DistributedOptimizer` writes options by parameter, and refuses to load
other options for one member of a group than for the others; `ChainedOptimizer` has a dict of optimizers, by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

SHAPES = {"qkv.weight": (20, 12), "fc1.weight": (24, 12), "fc2.weight": (12, 24), "norm.weight": (12,), "scalar": ()}
"""The parameters of a layer, of which the last has no dim."""

WRAPPERS = {"v1 bf16": ("module.", 3), "v1 fp32": ("module.", 2), "v2 bf16": ("", 2), "v2 fp32": ("", 1)}
"""What each kind of run has before the names of weights, and how many wrappers before those of its optimizers."""

ROOTS = {
    "v1 bf16": {},
    "v1 fp32": {"parameters": "module.module"},
    "v2 bf16": {"model": "model", "parameters": "module.module"},
    "v2 fp32": {"model": "model", "parameters": "module"},
}
"""The option `roots` with which each kind is written."""


class FusedAdam(torch.optim.AdamW):
    """AdamW that counts its steps by group, as Transformer Engine's does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if "exp_avg" in self.state[param]:
                    self.state[param]["step"] = torch.tensor(float(group.setdefault("step", 0)))
        super().step(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                self.state[param].pop("step", None)


@dataclass
class MegatronRun:
    """A model of a few layers, and the optimizers that update it: several are chained.

    Attributes:
        kind: of `WRAPPERS`.
        members: the names of the parameters of each optimizer, matrices or others, in the order of the chain.
    """

    kind: str
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    names: Mapping[nn.Parameter, str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = {param: name for name, param in self.model.named_parameters()}

    @classmethod
    def of(cls, kind: str, members: Iterable[Sequence[str]], dtype=torch.float32) -> MegatronRun:
        model, optimizers = zero_model(), []
        params = dict(model.named_parameters())
        for names in members:
            mine = [params[name] for name in names]
            if all(name.startswith("layers.") and params[name].ndim == 2 for name in names):
                optimizers.append(torch.optim.Muon(mine, lr=0.02, weight_decay=0.1, momentum=0.9))
            else:
                decaying, others = [p for p in mine if p.ndim == 2], [p for p in mine if p.ndim < 2]
                groups = [{"params": decaying, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
                optimizers.append(FusedAdam([g for g in groups if g["params"]], lr=0.003, betas=(0.9, 0.95)))
        for param in model.parameters():
            param.data = param.data.to(dtype)
        return cls(kind, model, optimizers)

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group's options, without those that the command line has."""
        stored = ("lr", "weight_decay", *(("betas", "eps", "step") if "betas" in group else ("momentum",)))
        multiplier = float(group["weight_decay"] != 0)
        idle = {"wd_mult": multiplier, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
        return {option: group[option] for option in stored if option in group} | idle

    def state_dict(self) -> dict[str, Any]:
        """What `generate_state_dict` gives DCP; the tensors are the run's."""
        before_weights, count = WRAPPERS[self.kind]
        wrapped = {param: "module." * count + name for param, name in self.names.items()}
        parts = []
        for optimizer in self.optimizers:
            state = {wrapped[p]: dict(slots) for p, slots in optimizer.state.items() if slots}
            meta = {wrapped[p]: self.options(group) for group in optimizer.param_groups for p in group["params"]}
            parts.append({"state": state, "param_to_group_meta": meta})
        chain = parts[0] if len(parts) == 1 else {str(k): part for k, part in enumerate(parts)}
        weights = {before_weights + name: param.detach() for param, name in self.names.items()}
        return {"model": weights, "optimizer": chain, "iteration": 3, "checkpoint_version": 3.0}

    def save(self, path: Path) -> Path:
        dcp.save(self.state_dict(), checkpoint_id=path, no_dist=True)
        return path

    def load(self, path: Path) -> None:
        """Load a checkpoint as `--strict-fsdp-dtensor-load` does: every key has to be there."""
        # State is made by a step of zero gradients, and then read in place.
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = torch.zeros_like(param)
            optimizer.step()
        state = self.state_dict()
        del state["iteration"], state["checkpoint_version"]
        dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=False), no_dist=True)
        chain = state["optimizer"] if len(self.optimizers) > 1 else {"0": state["optimizer"]}
        wrappers = "module." * WRAPPERS[self.kind][1]
        for optimizer, part in zip(self.optimizers, chain.values(), strict=True):
            for group in optimizer.param_groups:
                metas = [part["param_to_group_meta"][wrappers + self.names[param]] for param in group["params"]]
                assert all(meta == metas[0] for meta in metas), "the same metadata for all of a group"
                group.update(metas[0])

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(1000 + step)
            for param in self.names:
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            for optimizer in self.optimizers:
                optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: param.detach() for param, name in self.names.items()}


def zero_model(layers: int = 4) -> nn.Module:
    """A model of layers between an embedding and a head, all zeros."""
    shapes = {"embedding.weight": (18, 12)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in SHAPES.items()}
    model = nn.Module()
    for name, shape in (shapes | {"head.weight": (18, 12)}).items():
        *path, leaf = name.split(".")
        module = model
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(leaf, nn.Parameter(torch.zeros(shape)))
    return model
