"""Trains a tiny model in DeepSpeed, on as many ranks as torchrun starts; a script, so that no test imports DeepSpeed.

``deepspeed_run.py JSON``: the stage, the dtype, where to load from and save to, and the steps.  What the run has at its
end is gathered from memory and written beside the checkpoint as ``truth.pt``, by the names of parameters.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, BATCH = 11, 12
MUON = {"momentum": 0.9, "muon_lr": 0.02, "adam_lr": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.95]}


class Model(nn.Module):
    """Matrices of different shapes, a stack of three, vectors, a tied head, a frozen vector and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.a = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.b = nn.Linear(5, 7, bias=False)
        self.mix = nn.Parameter(torch.randn(3, 4, 7) / 3)
        self.c = nn.Linear(4, 6)
        self.lm_head = nn.Linear(6, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed.weight
        self.shift = nn.Parameter(torch.linspace(0, 1, 5), requires_grad=False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.a(self.embed(x))) + self.shift)
        x = torch.einsum("...i,kji->...j", torch.tanh(self.b(x)), self.mix) * self.scale[0]
        return self.lm_head(self.c(x)).float()

    def groups(self, count: int) -> list[dict[str, object]]:
        """Return the parameters that are trained, in one group or in two with rates of their own."""
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        if count == 1:
            return [{"params": [p for _, p in named]}]
        first = [p for name, p in named if name.startswith(("a.", "embed"))]
        return [{"params": first, "lr": 0.03}, {"params": [p for _, p in named if not any(p is q for q in first)]}]


def batch(step: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """Return a rank's share of a step's tokens; all shares together are the same on any number of ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    x, y = (torch.randint(0, VOCABULARY, (BATCH, 3), generator=generator) for _ in range(2))
    rows = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    return x[rows], y[rows]


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), y.reshape(-1))


def gathered_state(engine: Any, p: Tensor, slot: str) -> Tensor:
    """Return the whole state of a parameter, put together by DeepSpeed's own addresses of its fragments."""
    from deepspeed import comm
    from deepspeed.utils import safe_get_full_optimizer_state

    if hasattr(p, "ds_id"):
        return safe_get_full_optimizer_state(p, slot)
    whole, place = torch.zeros(p.numel()), p._hp_mapping
    if place is not None:
        flat = engine.optimizer.optimizer.param_groups[place.param_group_index]["params"][0]
        of_rank, of_p = place.hp_fragment_address, place.lp_fragment_address
        part = engine.optimizer.optimizer.state[flat][slot].narrow(0, of_rank.start, of_rank.numel)
        whole.narrow(0, of_p.start, of_p.numel).copy_(part)
    comm.all_reduce(whole)
    return whole.view(p.shape)


def main() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed import comm
    from deepspeed.runtime.zero.muon import original_muon
    from deepspeed.utils import safe_get_full_fp32_param

    settings = {"stage": 2, "dtype": "fp32", "ns_method": "standard", "groups": 2, "zero": {}, "universal": False,
             "steps": 3, "load": None, "save": None, "tags": (), **json.loads(sys.argv[1])}  # fmt: skip
    world = int(os.environ["WORLD_SIZE"])
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Muon", "params": {**MUON, "ns_method": settings["ns_method"], "torch_adam": True}},
        "zero_optimization": {"stage": settings["stage"], "reduce_scatter": False, **settings["zero"]},
        "checkpoint": {"load_universal": settings["universal"]},
    }
    if settings["dtype"] != "fp32":
        config["bf16"] = {"enabled": True}
    if settings["dtype"] == "bf16+fp32":  # with ZeRO 1 this is BF16_Optimizer
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        model.mix.requires_grad_(False)  # it takes no stacks of matrices
    if settings["dtype"] == "fp32":  # then Newton-Schulz as well, to compare with runs elsewhere
        original_muon.ns_compute_dtype = lambda ns_method="gram": torch.float32
    momenta: dict[tuple[int, ...], Tensor] = {}
    update = original_muon.muon_update

    def recorded(gradient: Tensor, momentum: Tensor, *args: object, **options: object) -> Tensor:
        result = update(gradient, momentum, *args, **options)
        momenta[tuple(momentum.shape)] = momentum.detach().clone()
        return result

    original_muon.muon_update = recorded
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.groups(settings["groups"]), config=config)
    if settings["load"]:
        path, _ = engine.load_checkpoint(settings["load"], tag=settings.get("tag"))
        assert path, "DeepSpeed found nothing to load"
    losses = []
    for step in range(engine.global_steps, engine.global_steps + settings["steps"]):
        x, y = batch(step, comm.get_rank(), world)
        loss = loss_of(engine(x), y)
        engine.backward(loss)
        engine.step()
        comm.all_reduce(loss := loss.detach().clone())
        losses.append(float(loss) / world)
        if f"global_step{engine.global_steps}" in settings["tags"]:
            engine.save_checkpoint(settings["save"])
    if not settings["save"]:
        return
    engine.save_checkpoint(settings["save"])
    gathered: list[dict[tuple[int, ...], Tensor]] = [{} for _ in range(world)]
    torch.distributed.all_gather_object(gathered, momenta)
    whole = {shape: momentum for rows in gathered for shape, momentum in rows.items()}
    truth: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            shape = tuple(getattr(p, "ds_shape", p.shape))
            truth[f"model.{name}"] = safe_get_full_fp32_param(p)
            if shape in whole:
                truth[f"optimizer.state.{name}.momentum_buffer"] = whole[shape]
            else:
                for slot in ("exp_avg", "exp_avg_sq"):
                    truth[f"optimizer.state.{name}.{slot}"] = gathered_state(engine, p, slot)
    if comm.get_rank() == 0:
        truth = {key: value.detach().clone() for key, value in truth.items()}
        torch.save({"tensors": truth, "losses": losses}, Path(settings["save"]) / "truth.pt")


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()  # a thread of gloo that still works would end the program by an abort
