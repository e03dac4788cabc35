"""What `muonckpt plan` says, against published sizes, the planner's own wires, and checkpoints that exist."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import called
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Rows, distribute_tensor

import muonckpt
from muonckpt import TargetError
from muonckpt.lab.forecasting.models import fresh_parameter, model_of_config
from muonckpt.lab.forecasting.topologies import (
    MuonOptions,
    Rates,
    StepPlan,
    leaving_bytes,
    most_wires,
    step_plan,
    step_seconds,
)
from muonckpt.layouts.mesh import Mesh, Replicate, Shard, mesh_layout
from muonckpt.optimizer import Muon
from muonckpt.optimizer.methods.matrix import MATRICES
from muonckpt.optimizer.newton_schulz.recipe import flops
from muonckpt.optimizer.planning.matrices import Fused, Slot, Spec
from muonckpt.optimizer.planning.schedule import WIRE_ALIGNMENT, make_schedule

LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
DEEPSEEK = {
    "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
    "vocab_size": 129280, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
KIMI = {**DEEPSEEK, "model_type": "kimi_k2", "num_attention_heads": 64, "n_routed_experts": 384,
        "first_k_dense_replace": 1, "vocab_size": 163840}  # fmt: skip
SMALL = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 128}  # fmt: skip


def config(folder: Path, **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder / "config.json"


@pytest.mark.parametrize(
    ("fields", "elements"),
    [
        (LLAMA, 8_030_261_248),
        # Without the router's biases of 256 (384) numbers a layer, which are buffers.
        ({**DEEPSEEK, "model_type": "mine", "architectures": ["DeepseekV3ForCausalLM"]}, 671_026_404_352),
        (KIMI, 1_026_408_209_408),
    ],
    ids=["Llama 3 8B", "DeepSeek-V3", "Kimi K2"],
)
def test_models_have_the_published_sizes(fields, elements, tmp_path):
    assert sum(p.numel for p in model_of_config(config(tmp_path, **fields)).parameters) == elements


def test_a_config_that_is_not_known_is_refused(tmp_path):
    found = called("plan", "--model", config(tmp_path, **{**LLAMA, "model_type": "perceiver"}), "--mesh", "dp=2")
    assert found.returncode == 2 and "'perceiver'" in found.stderr and "deepseek_v3" in found.stderr
    found = called("plan", "--model", config(tmp_path, **{**LLAMA, "hidden_size": "wide"}), "--mesh", "dp=2")
    assert found.returncode == 3 and "expected hidden_size to be an integer" in found.stderr
    found = called("plan", "--model", tmp_path, "--mesh", "dp=2")
    assert found.returncode == 3 and "config.json: expected hidden_size" in found.stderr
    (tmp_path / "config.json").unlink()
    found = called("plan", "--model", tmp_path, "--mesh", "dp=2")
    assert found.returncode == 3 and "give a checkpoint as --ckpt" in found.stderr
    with pytest.raises(TargetError, match=r"no mesh has the axes tp"):
        muonckpt.forecast([{"dp": 2}], model=config(tmp_path, **SMALL), shard={"*": [("tp", 0)]})


@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(1))])
def test_bytes_are_those_of_all_ranks_wires(placements):
    """With replicas, a rank reads each part from one of them, and returns it to all."""
    mesh, ranks = Mesh.of(3, 2), tuple(range(6))
    shapes = [(24, 8), (5, 16), (16, 16), (4, 12, 8), (24, 8), (6, 5, 3, 2)]
    matrices = [Fused((12, 6, 6)), *[Fused()] * 4, Fused((2, 4), flatten=True)]
    params = [
        fresh_parameter(f"{number}", shape, "float32", matrix=True, fused=fused)
        for number, (shape, fused) in enumerate(zip(shapes, matrices, strict=True))
    ]
    layouts = [mesh_layout(shape, mesh, placements) for shape in shapes]
    said = step_plan(params, lambda param, shape: mesh_layout(shape, mesh, placements), 6, MuonOptions(stages=2))
    short = torch.bfloat16
    specs = [
        Spec(
            (Slot("momentum_buffer", layout, fused, short, short),),
            lambda m, n: flops(m, n, 5),
        )
        for layout, fused in zip(layouts, matrices, strict=True)
    ]
    for rank in ranks:
        own = make_schedule(specs, ranks, rank, 2)
        sent, about = leaving_bytes(own, rank), int(said.sent[:, :, rank].sum())
        assert about <= sent <= about + 2 * len(own.stages) * 5 * (WIRE_ALIGNMENT - 2)
        if rank == said.busiest:
            assert (sent, most_wires(own.stages)) == (said.busiest_sent, said.wires)


SHAPES = [(24, 8), (5, 16), (16, 16), (3, 12, 8), (24, 8)]


def cost_of_a_step(rank: int, world: int, algorithm: str) -> tuple[int, int, int]:
    """Bytes that a rank sends, its matrices' FLOPs, and the most bytes of wires."""
    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(distribute_tensor(torch.ones(s), mesh, [Rows(0)], src_data_rank=None)) for s in SHAPES]
    opt = Muon([{"params": params, "algorithm": algorithm}], stages=2)
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    [schedule] = opt.schedules.values()
    work = sum(schedule.units[unit].cost for stage in schedule.stages for unit in stage.owned)
    return leaving_bytes(schedule, rank), work, most_wires(schedule.stages)


@pytest.mark.parametrize("algorithm", ["normuon", "hyperball", "adamuon"])
def test_a_method_costs_what_its_steps_do(algorithm):
    """State that travels, and weights that travel one way."""
    world, method = 3, MATRICES[algorithm]
    params = [fresh_parameter(f"{n}", s, "float32", matrix=True, method=method) for n, s in enumerate(SHAPES)]
    said = step_plan(
        params, lambda param, shape: mesh_layout(shape, Mesh.of(world), (Shard(0),)), world, MuonOptions(stages=2)
    )
    costs = run(world, cost_of_a_step, algorithm)
    for rank, (sent, work, _) in enumerate(costs):
        about = int(said.sent[:, :, rank].sum())
        assert about <= sent <= about + 4 * (world - 1) * 2 * (WIRE_ALIGNMENT - 1)
        assert said.work[:, rank].sum() == work
    assert (said.busiest_sent, said.wires) == costs[said.busiest][::2]


@pytest.mark.parametrize("options", [{"algorithm": "adamuon"}, {"algorithm": "normuon", "pieces": (8, 8)}])
def test_the_groups_of_a_checkpoint_say_what_its_matrices_cost(options, tmp_path):
    model = nn.Linear(12, 16, bias=False)
    opt = Muon([{"params": list(model.parameters()), **options}])
    model.weight.grad = torch.ones(16, 12)
    opt.step()
    weights, state = get_state_dict(model, opt)
    muonckpt.save({"model": weights, "optimizer": state}, tmp_path / "run")
    [found] = muonckpt.forecast([{"dp": 1}], checkpoint=tmp_path / "run").topologies
    [schedule] = opt.schedules.values()
    assert found.newton_schulz["mean"] == sum(unit.cost for unit in schedule.units)
    assert found.memory["state"] == opt.report().state_bytes


def test_a_tied_weight_is_one_parameter_and_its_padding_is_printed_when_asked_for(tmp_path):
    embedding, matrix = torch.randn(32, 8), torch.randn(16, 8)
    model = {"embed.weight": embedding, "head.weight": embedding, "up.weight": matrix, "frozen.weight": embedding + 1}
    state = {"embed.weight": {"exp_avg": embedding}, "up.weight": {"momentum_buffer": matrix}}
    groups = [
        {"params": ["embed.weight"], "algorithm": "adamw"},
        {"params": ["up.weight"], "algorithm": "muon", "convention": "ema"},
    ]
    muonckpt.save({"model": model, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "run")
    prospect = muonckpt.forecast([{"dp": 2}], checkpoint=tmp_path / "run")
    assert (prospect.parameters, prospect.elements) == (3, 2 * 32 * 8 + 16 * 8)
    line = ("plan", "--ckpt", tmp_path / "run", "--mesh", "dp=2")
    assert "padding: flat" in called(*line, "--padding").stdout and "padding: " not in called(*line).stdout


def test_a_checkpoint_has_the_bytes_that_were_said(tmp_path):
    state = {"a": {"momentum_buffer": torch.ones(64, 32)}, "b": {"momentum_buffer": torch.ones(32, 32)}}
    model = {"a": torch.ones(64, 32), "b": torch.ones(32, 32), "n": torch.ones(32)}
    state["n"] = {"exp_avg": torch.ones(32), "exp_avg_sq": torch.ones(32), "step": torch.tensor(1.0)}
    groups = [{"params": ["a", "b"], "algorithm": "muon"}, {"params": ["n"], "algorithm": "adamw"}]
    muonckpt.save({"model": model, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "run")
    found = muonckpt.forecast(
        [{"dp": 4}, {"dp": 2, "copy": 2}],
        checkpoint=tmp_path / "run",
        shard={"*": [("dp", 0)]},
        rates=muonckpt.Rates(disk=1e6),
    )
    assert (found.parameters, found.matrices) == (3, 2)
    rows, copied = found.topologies
    for topology in found.topologies:
        assert topology.checkpoint["bytes"] == muonckpt.inspect(tmp_path / "run").bytes
        assert topology.seconds["save"] == pytest.approx(topology.checkpoint["most"] / 1e6, rel=1e-3)
        assert topology.seconds["muon"] is None
    assert rows.checkpoint["most_received"] == 0
    assert (
        copied.checkpoint["most_received"] == (copied.checkpoint["bytes"] - 4) // 4
    )  # the step count is with one rank
    assert copied.memory["weights"] == 2 * rows.memory["weights"] == 4 * (64 * 32 + 32 * 32 + 32) // 2
    assert {padding["layout"]: padding["padding_percent"] for padding in rows.padding}["balanced"] == 0.0
    with pytest.raises(TargetError, match="momentum"):
        muonckpt.save({"model": model}, tmp_path / "weights")
        muonckpt.forecast([{"dp": 4}], checkpoint=tmp_path / "weights")


def test_exchange_hides_behind_newton_schulz():
    sent = np.array([[[4, 2], [6, 1]], [[8, 0], [2, 2]]])
    plan = StepPlan(2, sent, sent, np.array([[30, 10], [10, 50]]), 0, 20, 0)
    found = step_seconds(plan, Rates(link=2.0, flops=10.0))
    assert (found["exchange"], found["newton_schulz"]) == (10.0, 8.0)
    assert found["muon"] == 2 + max(3, 4) + max(5, 3) + 1


def test_the_command_compares_meshes(tmp_path):
    arguments = ["plan", "--model", config(tmp_path, **SMALL), "--mesh", "dp=4", "--mesh", "dp=2,tp=2"]
    arguments += ["--shard", "*_proj.weight=tp:0,dp:1", "--link", "1GB", "--flops", "1e9", "--select", "*layers*"]
    found = json.loads(called(*arguments, "--json").stdout)
    assert [t["ranks"] for t in found["topologies"]] == [4, 4] and found["matrices"] == 14
    costs = [t["seconds"]["muon"] for t in found["topologies"]]
    assert found["cheapest"] == costs.index(min(costs))
    shown = called(*arguments)
    name = ("dp=4", "dp=2,tp=2")[found["cheapest"]]
    assert shown.returncode == 0 and f"cheapest: {name}, the fewest rank-seconds" in shown.stdout
    assert "note: dp=4 has not all axes of the rule *_proj.weight=tp:0,dp:1" in shown.stdout
