"""Can it be resumed there?  Compared with what `reshard` would write, and with what the mesh layouts hold."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import pytest
import torch
from support.commands import called
from support.golden import golden

import muonckpt
from muonckpt.optimizer import Muon

STACK, FUSED = "layers.0.experts", "layers.0.qkv"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two layers with a stack of 6 experts, a fused matrix and a bias each, by names."""
    path = tmp_path_factory.mktemp("fits") / "step-00000007"
    shapes = {"qkv": (24, 16), "experts": (6, 16, 8), "up": (32, 16), "bias": (10,)}
    model = {f"layers.{layer}.{name}": torch.ones(shape) for layer in (0, 1) for name, shape in shapes.items()}
    momenta = {name: {"momentum_buffer": value} for name, value in model.items() if value.ndim > 1}
    vectors = {name: value for name, value in model.items() if value.ndim == 1}
    adam = {name: {"exp_avg": v, "exp_avg_sq": v, "step": torch.tensor(7.0)} for name, v in vectors.items()}
    qkv = [name for name in momenta if name.endswith("qkv")]
    options = {"convention": "ema", "lr": 0.02}
    groups = [
        {"params": [n for n in momenta if n not in qkv], "algorithm": "muon", "momentum": 0.95, **options},
        {"params": qkv, "algorithm": "muon", "momentum": 0.95, "pieces": (16, 4, 4), **options},
        {"params": [*adam], "algorithm": "adamw", "betas": (0.9, 0.95), **options},
    ]
    muonckpt.save({"model": model, "optimizer": {"state": {**momenta, **adam}, "param_groups": groups}}, path)
    return path


@pytest.mark.parametrize(
    ("mesh", "shard", "layout"),
    [
        ({"dp": 4}, {}, "rows"),
        ({"dp": 3, "tp": 2}, {}, "rows"),
        ({"dp": 2, "ep": 4}, {"*experts*": [("ep", 0), ("dp", 1)], "*bias*": []}, "rows"),
        ({"dp": 3}, {}, "balanced"),
        ({"dp": 3}, {}, "flat"),
    ],
)
def test_ranks_hold_what_reshard_writes_for_them(mesh, shard, layout, saved, tmp_path):
    """Replicas are written once, so that a rank's file may have less than the rank would hold."""
    fit = muonckpt.fits(saved, mesh, shard=shard, layout=layout)
    assert fit and fit.sentence.startswith("yes: `load` reshards it")
    muonckpt.reshard(saved, tmp_path / "out", mesh=mesh, shard=shard, layout=layout)
    written = Counter(dict.fromkeys(range(fit.ranks), 0))
    for tensor in muonckpt.open(tmp_path / "out").outline.tensors:
        for chunk in tensor.chunks if tensor.shape else ():
            written[int(chunk.item.file.split("_")[2])] += chunk.box.numel * 4
    scalars = {entry["slot"]: entry for entry in fit.shares}["step"]
    assert (scalars["tensors"], scalars["least"], scalars["most"]) == (2, 8, 8), "every rank has the counters"
    every = fit.shares[-1]
    if not shard:
        assert (every["least"], every["most"]) == (min(written.values()) + 8, max(written.values()) + 8)
        assert every["bytes"] == sum(written.values()) + 8 * fit.ranks
    assert sum(entry["bytes"] for entry in fit.shares[:-1]) == every["bytes"] >= sum(written.values())


def test_uneven_and_empty_shares_are_named_by_layers(saved):
    fit = muonckpt.fits(saved, {"dp": 8})
    assert [(u.pattern, u.tensors, u.least, u.most, u.empty_ranks) for u in fit.uneven] == [
        ("layers.*.experts", 4, 0, 128, 2),
        ("layers.*.bias", 6, 0, 2, 3),
    ]
    assert (fit.uneven_tensors, fit.empty_tensors, fit.empty_ranks, fit.tensors) == (10, 10, 3, 20)
    assert "10 of 20 tensors are uneven and up to 3 ranks hold nothing of 10" in fit.sentence
    assert "equal shares" in muonckpt.fits(saved, {"dp": 2}).sentence


def test_cuts_that_go_through_fused_matrices_and_stacks_are_told(saved):
    found = muonckpt.fits(saved, {"ep": 4, "tp": 2}, shard={"*experts*": [("ep", 0)], "*qkv*": [("tp", 0)]})
    messages = {finding.kind: finding for finding in found.findings}
    assert "ep:0 cuts stacks of 6 matrices into 4 parts of at most 2, 1 of them empty" in messages["stack"].message
    assert "fused of 16+4+4" in messages["fused"].message
    assert set(messages["fused"].names) == {key for key in muonckpt.open(saved).tensors if "qkv" in key}
    assert not {"stack", "fused"} & {f.kind for f in muonckpt.fits(saved, {"ep": 4}).findings}, "only cuts by rules"
    columns = muonckpt.fits(saved, {"tp": 3}, shard={"*up*": [("tp", 1)], "*": []}).findings
    assert [finding.kind for finding in columns] == ["unequal"]


def test_damage_means_no_with_the_remedies_and_exit_code_1(saved, tmp_path):
    assert called("inspect", saved, "--fits", "dp=48").returncode == 0
    shutil.copytree(saved, tmp_path / "broken")
    [file] = (tmp_path / "broken").glob("*.distcp")
    file.unlink()
    fit = muonckpt.fits(tmp_path / "broken", {"dp": 2})
    assert not fit and fit.sentence.startswith("no: ") and file.name in fit.sentence
    done = called("inspect", tmp_path / "broken", "--fits", "dp=2")
    assert done.returncode == 1 and fit.diagnosis.sentence in done.stdout, done.stderr
    assert all(remedy.command in done.stdout for remedy in fit.diagnosis.remedies)
    assert json.loads(called("inspect", tmp_path / "broken", "--fits", "dp=2", "--json").stdout)["fits"] is False


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("dion_fsdp4/ckpt", "convert"),
        ("titan_fsdp4/ckpt", "convert"),
        ("xtuner_fsdp4/ckpt", "convert"),
        ("torch_fsdp4/ckpt", "convert"),
        ("megatron/fsdp_dtensor/dp4/iter_0000010", "convert"),
        ("megatron/layer_wise/ws4_padded/torch_dist", "convert"),
    ],
)
def test_of_other_programs_the_weights_can_be_loaded_and_the_state_after_convert(name, optimizer, tmp_path):
    path = golden(name)
    fit = muonckpt.fits(path, {"dp": 3})
    assert fit and fit.optimizer == optimizer and fit.sentence.startswith("yes for its weights")
    assert any(f"muonckpt convert {path} " in finding.message for finding in fit.findings)


def test_converted_state_and_weights_alone_are_a_yes(saved, tmp_path):
    muonckpt.convert(golden("dion_fsdp4/ckpt"), tmp_path / "ours", to_dialect="muonckpt")
    assert muonckpt.fits(tmp_path / "ours", {"dp": 3}).optimizer == "load"
    muonckpt.convert(saved, tmp_path / "weights", format="safetensors", select=["model.*"])
    weights = muonckpt.fits(tmp_path / "weights", {"dp": 3})
    assert weights and weights.optimizer == "none" and "no optimizer state" in weights.sentence


def test_numbered_state_is_told(tmp_path):
    model = torch.nn.Linear(4, 4, bias=False)
    opt = Muon([{"params": [model.weight], "algorithm": "muon"}])
    muonckpt.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "numbers")
    assert "numbers" in [finding.kind for finding in muonckpt.fits(tmp_path / "numbers", {"dp": 2}).findings]


def test_a_mesh_or_a_rule_that_does_not_fit_is_a_mistake_of_usage(saved):
    for wrong in (["--shard", "*qkvv*=dp:0"], ["--shard", "*bias*=dp:1"], ["--shard", "*=tp:0"], ["--layout", "row"]):
        done = called("inspect", saved, "--fits", "dp=2", *wrong)
        assert done.returncode == 2, wrong
    assert called("inspect", saved, "--layout", "flat").returncode == 2


def test_many_small_pieces_may_pay_a_reshard(tmp_path):
    """From 512 ranks with a row each to 256 that hold two columns: each would read a piece of every chunk."""
    muonckpt.save({"w": torch.zeros(512, 512)}, tmp_path / "whole")
    muonckpt.reshard(tmp_path / "whole", tmp_path / "rows", mesh={"dp": 512})
    fit = muonckpt.fits(tmp_path / "rows", {"tp": 256}, shard={"*": [("tp", 1)]})
    assert dict(fit.reads) == {"count": 512 * 256, "bytes": 512 * 512 * 4, "resharded": 256}
    assert f"muonckpt reshard {tmp_path / 'rows'} " in fit.advice and "--shard '*=tp:1'" in fit.advice
    assert muonckpt.fits(tmp_path / "whole", {"tp": 256}).advice.startswith("`load` suffices: the ranks")
