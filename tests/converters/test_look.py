"""What looks sick in a checkpoint's metadata, who holds what, and the tree of modules."""

from __future__ import annotations

import ast
import copy
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import called
from support.golden import golden
from support.sharded import manifest_edited
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import muonckpt
from muonckpt.converters.look.contents import ranges
from muonckpt.names.wording import as_json

LAYERS = range(3)
MATRICES = [f"layers.{layer}.{name}.weight" for layer in LAYERS for name in ("up", "down")]
VECTORS = [f"layers.{layer}.norm.weight" for layer in LAYERS]
ELEMENTWISE = ["exp_avg", "exp_avg_sq"]


def healthy() -> dict:
    model = {name: torch.ones(6, 4) for name in MATRICES} | {name: torch.ones(6) for name in VECTORS}
    state = {name: {"momentum_buffer": torch.ones(6, 4)} for name in MATRICES}
    state |= {name: adam(6) for name in VECTORS}
    options = {"lr": 0.02, "weight_decay": 0.1, "convention": "ema"}
    groups = [
        {"params": list(MATRICES), "algorithm": "muon", "momentum": 0.95, **options},
        {"params": list(VECTORS), "algorithm": "adamw", "betas": (0.9, 0.95), **options},
    ]
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}}


def adam(*shape: int, steps: int = 7) -> dict:
    return {slot: torch.ones(shape) for slot in ELEMENTWISE} | {"step": torch.tensor(float(steps))}


def inspected(state: dict, path: Path) -> muonckpt.Inspection:
    muonckpt.save(state, path, provenance={"step": 7})
    return muonckpt.inspect(path)


def found(inspection: muonckpt.Inspection) -> list[tuple[str, tuple[str, ...]]]:
    return [(symptom.kind, symptom.names) for symptom in inspection.symptoms]


def test_a_healthy_run_is_described_and_has_no_symptoms(tmp_path):
    inspection = inspected(healthy(), tmp_path / "run")
    assert found(inspection) == []
    assert (inspection.step, inspection.steps["least"], inspection.steps["most"]) == (7, 7, 7)
    assert [dict(method) for method in inspection.optimizer] == [
        {"method": "muon", "parameters": 6, "matrices": 6},
        {"method": "adamw", "parameters": 3, "matrices": 0},
    ]
    assert {role["role"]: (role["tensors"], role["bytes"]) for role in inspection.roles} == {
        "weights": (9, 6 * 96 + 3 * 24),
        "momentum": (6, 6 * 96),
        "moments": (6, 6 * 24),
        "steps": (3, 12),
    }
    muon, adamw = (group["options"] for group in inspection.groups)
    assert (muon["lr"], muon["momentum"], muon["weight_decay"], adamw["betas"]) == (0.02, 0.95, 0.1, (0.9, 0.95))
    assert [(said["convention"], said["tensors"]) for said in inspection.conventions] == [("ema", 6)]
    json.dumps(inspection, default=as_json)


def muon_off(state):
    state["optimizer"]["state"][MATRICES[2]] = adam(6, 4)


def no_state(state):
    del state["optimizer"]["state"][MATRICES[3]]


def frozen(state):
    no_state(state)
    state["optimizer"]["param_groups"][0]["params"].remove(MATRICES[3])


def no_parameter(state):
    del state["model"][VECTORS[1]]


def half_a_method(state):
    del state["optimizer"]["state"][VECTORS[0]]["exp_avg_sq"], state["optimizer"]["state"][VECTORS[0]]["exp_avg"]


def another_shape(state):
    state["optimizer"]["state"][MATRICES[0]]["momentum_buffer"] = torch.ones(4, 6)


def another_dtype(state):
    state["model"][MATRICES[4]] = torch.ones(6, 4, dtype=torch.bfloat16)


def embedding(state):
    """Also with the shape of the matrices, and next to modules that have numbers."""
    state["model"]["embed.weight"] = torch.ones(9, 4)
    state["optimizer"]["state"]["embed.weight"] = adam(9, 4)
    state["optimizer"]["param_groups"][1]["params"].append("embed.weight")


def late(state):
    state["optimizer"]["state"][VECTORS[2]]["step"] = torch.tensor(3.0)


def of_another_optimizer(state):
    for name in VECTORS:
        state["optimizer"]["state"][name]["max_exp_avg_sq"] = torch.ones(6)


def unlike_its_siblings(state):
    of_another_optimizer(state)
    del state["optimizer"]["state"][VECTORS[2]]["exp_avg"]


SICK = {
    unlike_its_siblings: ("odd_state", (VECTORS[2],)),
    muon_off: ("muon_off", (MATRICES[2],)),
    no_state: ("no_state", (MATRICES[3],)),
    frozen: ("no_state", (MATRICES[3],)),
    no_parameter: ("no_parameter", (VECTORS[1],)),
    half_a_method: ("odd_state", (VECTORS[0],)),
    another_shape: ("shape", (MATRICES[0],)),
    another_dtype: ("dtype", (f"model.{MATRICES[4]}",)),
    late: ("steps", ()),
}


@pytest.mark.parametrize("disease", SICK, ids=lambda disease: disease.__name__)
def test_each_disease_is_named_with_what_has_it_and_nothing_else(disease, tmp_path):
    state = copy.deepcopy(healthy())
    disease(state)
    inspection = inspected(state, tmp_path / "run")
    assert found(inspection) == [SICK[disease]]
    [symptom] = inspection.symptoms
    assert symptom.message in called("inspect", tmp_path / "run").stdout


def lora(state):
    for name in MATRICES:
        state["optimizer"]["state"].pop(name)
        state["optimizer"]["param_groups"][0]["params"].remove(name)
    state["optimizer"]["param_groups"].pop(0)


def frozen_layers(state):
    for name in (*MATRICES[:2], VECTORS[0]):
        state["optimizer"]["state"].pop(name)
        for group in state["optimizer"]["param_groups"]:
            group["params"] = [own for own in group["params"] if own != name]


def buffers(state):
    state["model"] |= {f"layers.{layer}.rotary.inv_freq": torch.ones(2) for layer in LAYERS}


def numbered_modules(state):
    """A Sequential of an embedding, two matrices and a head: its numbers are no layers."""
    for number, muon in enumerate((False, True, False)):
        name, shape = f"tail.{number}.weight", (6, 4 + number)
        state["model"][name] = torch.ones(shape)
        state["optimizer"]["state"][name] = {"momentum_buffer": torch.ones(shape)} if muon else adam(*shape)
        state["optimizer"]["param_groups"][0 if muon else 1]["params"].append(name)


def norms_in_float32(state):
    for name in MATRICES:
        state["model"][name] = state["model"][name].bfloat16()
        state["optimizer"]["state"][name] = {"momentum_buffer": torch.ones(6, 4).bfloat16()}
    embedding(state)
    state["optimizer"]["state"]["embed.weight"] |= {slot: torch.ones(9, 4).bfloat16() for slot in ELEMENTWISE}


def half_by_adam(state):
    """All `down` matrices; and where `up` is by Muon in no more layers than not, nobody knows what was meant."""
    for name in (*MATRICES[1::2], *MATRICES[0:3:2]):
        state["optimizer"]["state"][name] = adam(6, 4)


def numbered_keys(state):
    """As torch numbers parameters: by group, whatever the layer."""
    names = [name for group in state["optimizer"]["param_groups"] for name in group["params"]]
    embedding(state)
    state["optimizer"]["state"]["embed.weight"] = adam(6, 4)
    state["model"]["embed.weight"] = torch.ones(6, 4)
    names.append("embed.weight")
    optimizer = state["optimizer"]
    optimizer["state"] = {number: optimizer["state"][name] for number, name in enumerate(names)}
    for group in optimizer["param_groups"]:
        group["params"] = [names.index(name) for name in group["params"]]


USUAL = [
    of_another_optimizer,
    embedding,
    lora,
    frozen_layers,
    buffers,
    numbered_modules,
    norms_in_float32,
    half_by_adam,
    numbered_keys,
]


@pytest.mark.parametrize("case", USUAL, ids=lambda case: case.__name__)
def test_what_is_usual_is_no_symptom(case, tmp_path):
    state = copy.deepcopy(healthy())
    case(state)
    assert found(inspected(state, tmp_path / "run")) == []
    assert "look at" not in called("inspect", tmp_path / "run").stdout


CHECKPOINTS = ["titan_fsdp4/ckpt", "torch_fsdp4/ckpt", "torch_hsdp2x2/ckpt", "dion_fsdp4/ckpt", "xtuner_fsdp4/ckpt",
               "megatron/fsdp_dtensor/dp4/iter_0000010", "megatron/fsdp_dtensor/dp4tp2ep2/iter_0000010",
               "megatron/layer_wise/ws4_padded/torch_dist", "megatron/layer_wise/ws4_pingpong/torch_dist"]  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_healthy_checkpoint_of_another_program_has_no_symptom(name):
    assert muonckpt.inspect(golden(name)).symptoms == ()


def test_a_numbered_parameter_with_a_recorded_name_is_compared_with_its_siblings(tmp_path):
    state = copy.deepcopy(healthy())
    muon_off(state)
    optimizer = state["optimizer"]
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    optimizer["state"] = {number: optimizer["state"][name] for number, name in enumerate(names)}
    for group in optimizer["param_groups"]:
        group["param_names"] = group["params"]
        group["params"] = [names.index(name) for name in group["params"]]
    inspection = inspected(state, tmp_path / "run")
    assert found(inspection) == [("muon_off", (MATRICES[2],))]
    assert [group["holds"] for group in inspection.groups] == [
        ("layers.*.{up, down}.weight",),
        ("layers.*.norm.weight",),
    ]


def options_shown(state: dict, path: Path) -> list[str]:
    inspected(state, path)
    return [line for line in called("inspect", path).stdout.splitlines() if line.startswith("group")]


def test_groups_are_shown_by_name_with_the_options_that_differ(tmp_path):
    state = copy.deepcopy(healthy())
    muon, adamw = state["optimizer"]["param_groups"]
    late = {**muon, "params": muon["params"][4:], "lr": 0.01}
    muon["params"] = muon["params"][:4]
    state["optimizer"]["param_groups"] = [muon, late, adamw]
    assert options_shown(state, tmp_path / "run") == [
        "groups        all: weight_decay 0.1, convention ema",
        "groups        muon: momentum 0.95",
        "group         0: muon, 4 parameters (layers.*.{up, down}.weight): lr 0.02",
        "group         1: muon, 2 parameters (layers.*.{up, down}.weight): lr 0.01",
        "group         2: adamw, 3 parameters (layers.*.norm.weight): lr 0.02, betas 0.9/0.95",
    ]


def test_what_groups_differ_in_is_whole_and_the_rest_is_counted_and_in_the_view_of_groups(tmp_path):
    state = copy.deepcopy(healthy())
    many = {f"option{number}": number for number in range(20)}
    muon, adamw = state["optimizer"]["param_groups"]
    late = {**muon, "params": muon["params"][4:], **{name: -1 - number for name, number in many.items()}}
    muon |= {"params": muon["params"][:4], **many}
    state["optimizer"]["param_groups"] = [
        muon,
        late,
        adamw | {f"extra{number}": number for number in many.values()} | {"lr": 0.5},
    ]
    shown = "\n".join(options_shown(state, tmp_path / "run"))
    words = shown.replace("\n", ",").replace(": ", ", ").split(",")
    assert all(words.count(f" {name} {value}") == 1 for name, n in many.items() for value in (n, -1 - n))
    assert shown.count("lr 0.02") == shown.count("lr 0.5") == 1 and "19 more (--groups)" in shown
    code = called("inspect", tmp_path / "run", "--groups").stdout
    assert [group.get("option19", group.get("extra19")) for group in ast.literal_eval(code)] == [19, -20, 19]


def test_every_group_is_read_however_many_there_are(tmp_path):
    """As torchtitan has them, one for each parameter; one of 200 has an option of its own."""
    names = [f"layers.{number}.up.weight" for number in range(200)]
    state = {f"state.{name}.momentum_buffer": torch.ones(2, 2) for name in names}
    for name in names:
        options = {"lr": 0.01 if "101" in name else 0.02, "momentum": 0.95, "nesterov": True, "ns_steps": 5,
                   "weight_decay": 0.1, "eps": 1e-7, "ns_coefficients": (3, -4, 2), "adjust_lr_fn": None}  # fmt: skip
        state |= {f"param_groups.{name}.{option}": value for option, value in options.items()}
    muonckpt.save({**{name: torch.ones(2, 2) for name in names}, "optimizer": state}, tmp_path / "run")
    groups = [(group["parameters"], group["options"]["lr"]) for group in muonckpt.inspect(tmp_path / "run").groups]
    assert groups == [(199, 0.02), (1, 0.01)]
    shown = called("inspect", tmp_path / "run", "--groups", "--json").stdout
    assert [len(group["params"]) for group in json.loads(shown)["param_groups"]] == [199, 1]


def test_holes_missing_files_and_conventions_that_disagree_are_seen(tmp_path):
    inspected(healthy(), tmp_path / "run")
    key = f"optimizer.state.{MATRICES[1]}.momentum_buffer"

    def damage(entries):
        entries[key]["chunks"][0]["hi"] = [5, 4]
        entries[f"optimizer.state.{MATRICES[0]}.momentum_buffer"]["convention"] = "sum"

    manifest_edited(tmp_path / "run", damage)
    sick = muonckpt.inspect(tmp_path / "run")
    assert [kind for kind, _ in found(sick)] == ["convention"]
    lost = "no file has some elements of 1 tensor: 1 of 6 momenta has lost elements ("
    assert lost in sick.diagnosis.sentence
    assert [str(box) for box in sick.diagnosis.damage.holes[key]] == ["[5:6, 0:4]"]
    [file] = (tmp_path / "run").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-9])
    assert f"rank 0's file {file.name} is cut short" in muonckpt.inspect(tmp_path / "run").diagnosis.sentence
    file.unlink()
    assert f"rank 0's file {file.name} is missing" in muonckpt.inspect(tmp_path / "run").diagnosis.sentence


@pytest.mark.parametrize("name", ["titan_fsdp4/ckpt", "megatron/fsdp_dtensor/dp4tp2ep2/iter_0000010"])
def test_shards_tile_each_tensor_and_ranks_hold_what_the_shards_say(name):
    inspection = muonckpt.inspect(golden(name))
    held = Counter()
    for tensor in inspection.manifest.tensors:
        shards = inspection.shards(tensor.key)
        count = np.zeros(tensor.shape, int)
        for shard in shards:
            count[tuple(map(slice, shard.box.lo, shard.box.hi))] += 1
            held[shard.rank] += shard.bytes
        assert (count == 1).all()
    assert dict(sorted(held.items())) == inspection.bytes_of_ranks()
    for rank in held:
        assert sum(s.bytes for shards in inspection.on_rank(rank).values() for s in shards) == held[rank]
    balance = inspection.balance["bytes"]
    assert (balance["most"], balance["least"]) == (max(held.values()), min(held.values()))
    assert held[balance["busiest_rank"]] == balance["most"]


def test_who_holds_an_expert_is_shown():
    path = golden("titan_fsdp4/ckpt")
    shown = called("inspect", path, "--tensor", "layers.0.experts.w13[5]").stdout.splitlines()
    assert [line.split()[:3] for line in shown[4:]] == [["2", "__2_0.distcp", "[5:6,"]]
    shown = called("inspect", path, "--tensor", "layers.0.experts.w13").stdout.splitlines()[3:]
    bars = [line.split()[-1] for line in shown]
    assert len(bars) == 4 and all("".join(column).count("#") == 1 for column in zip(*bars, strict=True))
    assert "0 to 7" in called("inspect", path, "--tensor", "layers.0.experts.w13[8]").stderr


def test_a_misspelt_key_glob_or_rank_is_answered_with_those_that_exist():
    path = golden("titan_fsdp4/ckpt")
    for arguments in (["--tensor", "layers.0.experts.w31"], ["*experts.w3*", "--sort", "bytes"]):
        done = called("inspect", path, *arguments)
        assert done.returncode == 2 and "experts.w13" in done.stderr
    done = called("inspect", path, "--rank", "9")
    assert done.returncode == 2 and "0 to 3" in done.stderr


def test_the_tree_folds_layers_that_are_alike_and_keeps_every_tensor_and_byte(tmp_path):
    state = healthy()
    state["model"]["layers.1.down.weight"] = torch.ones(3, 4)
    inspection = inspected(state, tmp_path / "run")
    [model] = inspection.tree("model.*")
    assert (model.name, model.tensors, model.bytes) == ("model.layers", 9, 6 * 96 - 48 + 3 * 24)
    assert [(branch.name, branch.count, branch.tensors) for branch in model.branches] == [("0,2", 2, 3), ("1", 1, 3)]

    def size(branches):
        return sum(b.count * (size(b.branches) if b.branches else 4 * math.prod(b.shape)) for b in branches)

    assert size(inspection.tree()) == inspection.bytes
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_lists_are_sorted_by_bytes_and_items_decoded(tmp_path):
    inspected(healthy(), tmp_path / "run")
    listed = json.loads(called("inspect", tmp_path / "run", "model.*", "--sort", "bytes", "--json").stdout)
    sizes = [tensor["bytes"] for tensor in listed]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == 9
    items = json.loads(called("inspect", tmp_path / "run", "--items", "--json").stdout)
    assert items["optimizer.param_groups.0.lr"] == 0.02 and items["optimizer.param_groups.0.params"] == MATRICES
    assert items[f"optimizer.state.{VECTORS[0]}.step"] == 7


def test_state_of_another_optimizer_with_the_slot_of_a_known_one_is_called_what_it_is(tmp_path):
    net = torch.nn.Linear(8, 8)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(2, 8)).sum().backward()
    sgd.step()
    weights, state = get_state_dict(net, sgd)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "run", no_dist=True)
    [row] = muonckpt.inspect(tmp_path / "run").optimizer
    assert row["method"] == "torch.optim.SGD"
