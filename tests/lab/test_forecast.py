"""What `muonckpt lab plan` says, against published sizes, the planner's own wires, and checkpoints that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

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
    most_wires,
    step_plan,
)
from muonckpt.layouts.mesh import Mesh, Replicate, Shard, mesh_layout
from muonckpt.names.vocabulary import STATE_DTYPES
from muonckpt.names.wording import size
from muonckpt.optimizer import Muon, StepExecution
from muonckpt.optimizer.methods.matrix import MATRICES
from muonckpt.optimizer.newton_schulz.recipe import flops
from muonckpt.optimizer.planning.matrices import Fused, Slot, Spec
from muonckpt.optimizer.planning.schedule import WIRE_ALIGNMENT, Schedule, make_schedule

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "costs.md"

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
QWEN = {**LLAMA, "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True}  # fmt: skip
TINY = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 700, "num_hidden_layers": 1,
        "num_attention_heads": 4, "vocab_size": 300}  # fmt: skip
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
    found = called("lab", "plan", "--model", config(tmp_path, **{**LLAMA, "model_type": "perceiver"}), "--mesh", "dp=2")
    assert found.returncode == 2 and "'perceiver'" in found.stderr and "deepseek_v3" in found.stderr
    found = called("lab", "plan", "--model", config(tmp_path, **{**LLAMA, "hidden_size": "wide"}), "--mesh", "dp=2")
    assert found.returncode == 3 and "expected hidden_size to be an integer" in found.stderr
    found = called("lab", "plan", "--model", tmp_path, "--mesh", "dp=2")
    assert found.returncode == 3 and "config.json: expected hidden_size" in found.stderr
    (tmp_path / "config.json").unlink()
    found = called("lab", "plan", "--model", tmp_path, "--mesh", "dp=2")
    assert found.returncode == 3 and "give a checkpoint as --ckpt" in found.stderr
    with pytest.raises(TargetError, match=r"no mesh has the axes tp"):
        muonckpt.lab.plan([{"dp": 2}], model=config(tmp_path, **SMALL), shard={"*": [("tp", 0)]})


def leaving_bytes(schedule: Schedule, rank: int) -> int:
    """The bytes that the rank of this schedule sends to others, alignment and notes included."""
    routes = [route for stage in schedule.stages for route in (stage.gather, stage.scatter)]
    return sum(sum(route.send_counts) - route.send_counts[rank] for route in routes)


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
        if rank == said.sent.sum(axis=(0, 1)).argmax():
            assert most_wires(own.stages) == said.wires


SHAPES = [(24, 8), (5, 16), (16, 16), (3, 12, 8), (24, 8)]


def cost_of_a_step(rank: int, world: int, algorithm: str) -> tuple[int, int, int]:
    """Bytes that a rank sends, its matrices' FLOPs, and the most bytes of wires."""
    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(distribute_tensor(torch.ones(s), mesh, [Rows(0)], src_data_rank=None)) for s in SHAPES]
    opt = Muon([{"params": params, "algorithm": algorithm}], execution=StepExecution(stages=2))
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
    assert said.wires == costs[said.sent.sum(axis=(0, 1)).argmax()][2]


@pytest.mark.parametrize("options", [{"algorithm": "adamuon"}, {"algorithm": "normuon", "pieces": (8, 8)}])
def test_the_groups_of_a_checkpoint_say_what_its_matrices_cost(options, tmp_path):
    model = nn.Linear(12, 16, bias=False)
    opt = Muon([{"params": list(model.parameters()), **options}])
    model.weight.grad = torch.ones(16, 12)
    opt.step()
    weights, state = get_state_dict(model, opt)
    muonckpt.save({"model": weights, "optimizer": state}, tmp_path / "run")
    [found] = muonckpt.lab.plan([{"dp": 1}], checkpoint=tmp_path / "run").topologies
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
    prospect = muonckpt.lab.plan([{"dp": 2}], checkpoint=tmp_path / "run")
    assert (prospect.parameters, prospect.elements) == (3, 2 * 32 * 8 + 16 * 8)
    line = ("lab", "plan", "--ckpt", tmp_path / "run", "--mesh", "dp=2")
    assert "padding: flat" in called(*line, "--padding").stdout and "padding: " not in called(*line).stdout


def test_a_checkpoint_has_the_bytes_that_were_said(tmp_path):
    state = {"a": {"momentum_buffer": torch.ones(64, 32)}, "b": {"momentum_buffer": torch.ones(32, 32)}}
    model = {"a": torch.ones(64, 32), "b": torch.ones(32, 32), "n": torch.ones(32)}
    state["n"] = {"exp_avg": torch.ones(32), "exp_avg_sq": torch.ones(32), "step": torch.tensor(1.0)}
    groups = [{"params": ["a", "b"], "algorithm": "muon"}, {"params": ["n"], "algorithm": "adamw"}]
    muonckpt.save({"model": model, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "run")
    found = muonckpt.lab.plan(
        [{"dp": 4}, {"dp": 2, "copy": 2}],
        checkpoint=tmp_path / "run",
        shard={"*": [("dp", 0)]},
    )
    assert (found.parameters, found.matrices) == (3, 2)
    rows, copied = found.topologies
    for topology in found.topologies:
        assert topology.checkpoint["bytes"] == muonckpt.inspect(tmp_path / "run").bytes
    assert rows.checkpoint["most_received"] == 0
    assert (
        copied.checkpoint["most_received"] == (copied.checkpoint["bytes"] - 4) // 4
    )  # the step count is with one rank
    assert copied.memory["weights"] == 2 * rows.memory["weights"] == 4 * (64 * 32 + 32 * 32 + 32) // 2
    assert {padding["layout"]: padding["padding_percent"] for padding in rows.padding}["balanced"] == 0.0
    with pytest.raises(TargetError, match="momentum"):
        muonckpt.save({"model": model}, tmp_path / "weights")
        muonckpt.lab.plan([{"dp": 4}], checkpoint=tmp_path / "weights")


def test_the_command_compares_meshes(tmp_path):
    arguments = ["lab", "plan", "--model", config(tmp_path, **SMALL), "--mesh", "dp=4", "--mesh", "dp=2,tp=2"]
    arguments += ["--shard", "*_proj.weight=tp:0,dp:1", "--select", "*layers*"]
    found = json.loads(called(*arguments, "--json").stdout)
    assert [t["ranks"] for t in found["topologies"]] == [4, 4] and found["matrices"] == 14
    costs = [t["sent"]["most"] for t in found["topologies"]]
    assert found["cheapest"] == costs.index(min(costs))
    shown = called(*arguments)
    name = ("dp=4", "dp=2,tp=2")[found["cheapest"]]
    assert shown.returncode == 0 and f"cheapest: {name}, whose busiest rank sends" in shown.stdout
    assert "note: dp=4 has not all axes of the rule *_proj.weight=tp:0,dp:1" in shown.stdout


@pytest.mark.exhaustive  # it lists the matrices of a trillion parameters, five times
def test_the_table_of_state_in_other_dtypes_is_what_is_forecast(tmp_path):
    titles = (
        "model, ranks",
        "state",
        "its bytes",
        "all memory",
        "state read and written a step",
        "sent a step",
    )
    head = f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|\n"
    stage = ["model.layers.[1-9].*", "model.layers.1[0-5].*"]
    lines = []
    for name, fields, mesh, more in (
        ("1.5B, 8", QWEN, {"dp": 8}, {}),
        ("1T MoE, 64 of 256", KIMI, {"ep": 64}, {"select": stage, "shard": {"*experts*": [("ep", 0)]}}),
    ):
        file = config(tmp_path, **fields)
        for dtype in STATE_DTYPES:
            options = {"state_dtype": dtype, **more}
            found = muonckpt.lab.plan([mesh], model=file, **options).topologies[0]
            state, total, sent = found.memory["state"], found.memory["total"], found.sent["most"]
            lines.append(f"| {name} | {dtype} | {size(state)} | {size(total)} | {size(2 * state)} | {size(sent)} |\n")
    made = head + "".join(lines)
    found = re.search(re.escape(head) + r"(\|.*\n)*", PAGE.read_text())
    assert found and found[0] == made, f"the page should have:\n{made}"


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_state_in_another_dtype_is_forecast_as_the_optimizer_keeps_it(dtype, tmp_path):
    file, groups = config(tmp_path, **TINY), []
    for parameter in model_of_config(file).parameters:
        own = {} if parameter.method else {"algorithm": "adamw", "lr": 1e-3}
        option = "momentum_dtype" if parameter.method else "state_dtype"
        groups.append({"params": [torch.nn.Parameter(torch.zeros(parameter.shape))], option: dtype, **own})
    [found] = muonckpt.lab.plan([{"dp": 1}], model=file, state_dtype=dtype).topologies
    assert found.memory["state"] == Muon(groups).report(most_elementwise=1).state_bytes
    with pytest.raises(TargetError, match="unknown state_dtype 'int4'; expected one of float32, bfloat16"):
        muonckpt.lab.plan([{"dp": 1}], model=file, state_dtype="int4")
