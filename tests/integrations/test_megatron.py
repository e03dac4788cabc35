"""Megatron's page: our layer-wise runs with its script, and our Muon in Megatron's own optimizers where they import."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.pages import as_launched, distance, script, uninterrupted_runs, whole
from support.resharded import grouped
from support.workers import run

import muonckpt
from muonckpt.optimizer import Muon

KINDS = ["padded-nscost", "decoupled-total-order"]
"""The layouts of Megatron's main branch and of its branch dev."""


def train(rank: int, world: int, kind: str, folder: str, begin_from: str | None = None) -> dict[str, Any]:
    """The script; whole parameters, who owns matrices, and what is told."""
    with as_launched(rank, world), redirect_stdout(StringIO()) as told:
        names = script("megatron.md")

        class Begun(muonckpt.Series):
            def resume(self) -> int:
                return super().resume(begin_from=begin_from)

        names["muonckpt"] = SimpleNamespace(Series=Begun)
        model, optimizer = names["train"](folder, kind)
        return {
            "told": told.getvalue(),
            "parameters": {name: whole(parameter) for name, parameter in model.named_parameters()},
            "owners": set(optimizer.buffers[0].owners.values()),
        }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[tuple[str, int], tuple[Path, dict[str, Any]]]:
    return uninterrupted_runs(train, KINDS, lambda: tmp_path_factory.mktemp("run"))


def test_ranks_own_matrices_and_train_as_one_process(uninterrupted):
    for kind in KINDS:
        assert uninterrupted[kind, 2][1]["owners"] == {0, 1}
        assert distance(uninterrupted[kind, 2][1], uninterrupted[KINDS[0], 1][1]) < 2e-5


@pytest.mark.parametrize(("saved", "resumed"), [(2, 2), (2, 1), (1, 2)])
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(uninterrupted, saved, resumed, tmp_path):
    """Also in the other layout."""
    folder, _ = uninterrupted[KINDS[0], saved]
    for kind in KINDS:
        copytree(folder, tmp_path / kind)
        result = run(resumed, train, kind, str(tmp_path / kind))[0]
        gap = distance(result, uninterrupted[kind, resumed][1])
        assert gap == 0 if (saved, kind) == (resumed, KINDS[0]) else gap < 2e-5
        assert result["told"].startswith(f"resumed from step 2, saved on {saved} rank"), result["told"]
        assert f", now {resumed}, proved: 48 tensors and " in result["told"]


def test_a_run_begins_from_one_of_adamw(tmp_path):
    model = script("megatron.md")["Net"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.zeros(2, 3, dtype=torch.long)).square().sum().backward()
    optimizer.step()
    saved = muonckpt.Series(tmp_path / "adamw", model, optimizer).save(1)
    told = run(2, train, KINDS[0], str(tmp_path / "muon"), saved.path)[0]["told"]
    counts = "the state of 10 parameters goes on, that of 4 begins at zero; next step: 2"
    assert told.startswith(f"begun from {saved.path}: 14 weights loaded; {counts}; lr and other options are the code's")
    told = run(1, train, KINDS[1], str(tmp_path / "muon"), saved.path)[0]["told"]
    assert told.startswith("resumed from step 2, saved on 2 ranks, now 1, proved: 48 tensors"), told


def test_a_run_becomes_a_checkpoint_that_megatron_reads(uninterrupted, tmp_path):
    folder, _ = uninterrupted[KINDS[0], 2]
    options = {"to_dialect": "torch_dist_chained", "format": "torch_dist"}
    saved = folder / "step-00000002"
    muonckpt.convert(saved, tmp_path / "iter_0000003", **grouped(**options))
    ours, theirs = (muonckpt.verify(path).fingerprints for path in (saved, tmp_path / "iter_0000003"))
    name, slot = "blocks.0.up.weight", "momentum_buffer"
    assert theirs[f"chained_0.optimizer.state.{slot}.{name}"] == ours[f"optimizer.state.{name}.{slot}"]
    assert theirs[name] == ours[f"model.{name}"]


def plan(
    config: dict[str, Any], steps: Sequence[int] = (), load: Path | None = None, save: Path | None = None, **more: Any
) -> dict[str, Any]:
    """What Megatron's program is to do."""
    paths = {"load": load and str(load), "save": save and str(save)}
    return {"config": config, "steps": steps, "in_parts": False, **paths, **more}


def upstream(world: int, folder: Path, plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the first rank of Megatron's own program holds after each of these plans."""
    program = Path(__file__).parents[1] / "support" / "upstream_megatron.py"
    command = [sys.executable, "-P", str(program)]
    arguments = [str(world), str(folder), json.dumps(plans)]
    ranks = [
        subprocess.Popen([*command, str(rank), *arguments], stderr=subprocess.PIPE, text=True) for rank in range(world)
    ]
    try:
        told = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if ranks[0].returncode == 3:
        why = told[0].strip().splitlines()[-1]
        pytest.skip(f"megatron-core 0.19 and emerging-optimizers cannot be imported ({why})")
    assert not any(rank.returncode for rank in ranks), told[0]
    return torch.load(folder / f"memory-0-of-{world}.pt", weights_only=True)


REFUSED = {
    "tp has 2 ranks, so each holds a part of a matrix": plan({}, in_parts=True),
    "decay is decoupled here": plan({"decoupled_weight_decay": False}),
    "muon_coefficient_type='custom': expected one of simple, quintic": plan({"muon_coefficient_type": "custom"}),
    "muon_scale_mode='none': expected one of spectral": plan({"muon_scale_mode": "none"}),
    "muon_fp32_matmul_prec='low': expected one of medium": plan({"muon_fp32_matmul_prec": "low"}),
}
LAYER_WISE = {"use_layer_wise_distributed_optimizer": True, "muon_scale_mode": "unit_rms_norm"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """By Megatron: uninterrupted runs on two ranks, and such as were resumed on two ranks and on one."""
    if not find_spec("megatron"):  # before a program is started for it
        pytest.skip("megatron-core is not installed")
    folder = tmp_path_factory.mktemp("megatron")
    results: dict[str, dict[str, Any]] = {}
    modes = {"shared": {}, "layer-wise": LAYER_WISE}
    plans = {}
    for mode, config in modes.items():
        plans[f"{mode} saved"] = plan(config, (0, 1), save=folder / mode)
        plans[f"{mode} on 2"] = plan(config, (0, 1, 2))
        plans[f"{mode} 2 -> 2"] = plan(config, (2,), load=folder / mode)
        plans[f"{mode} forgetful"] = plan(config, (2,))
    plans |= REFUSED
    results = dict(zip(plans, upstream(2, folder, list(plans.values())), strict=True))
    plans = {f"{mode} 2 -> 1": plan(config, (2,), load=folder / mode) for mode, config in modes.items()}
    return results | dict(zip(plans, upstream(1, folder, list(plans.values())), strict=True))


@pytest.mark.parametrize("mode", ["shared", "layer-wise"])
def test_megatron_trains_and_resumes_with_it(trained, mode):
    on_two = trained[f"{mode} on 2"]
    assert on_two["sharing"] == ([(0, 1)] if mode == "shared" else [()])
    assert on_two["owned"] == (3 if mode == "shared" else 2), "matrices of this rank"
    for resumed in ("2 -> 2", "2 -> 1"):
        assert distance(trained[f"{mode} {resumed}"], on_two) == 0
    assert distance(trained[f"{mode} forgetful"], on_two) > 1e-3


@pytest.mark.parametrize("mode", ["shared", "layer-wise"])
def test_its_updates_are_those_of_muon(trained, mode):
    """Of float32 masters, query groups split, with the scale of Megatron's words; all the rest is Megatron's Adam's."""
    scale = {"shared": lambda m, n: math.sqrt(max(m, n)), "layer-wise": lambda m, n: math.sqrt(m / n)}[mode]
    shapes = {"first_norm": (16,), "last_norm": (16,), "up": (24, 16), "down": (16, 24), "linear_qkv": (32, 16)}
    generator = torch.Generator().manual_seed(0)
    masters = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16().float())
        for name, shape in shapes.items()
    }
    matrices = [{"params": [masters["up"], masters["down"]]}, {"params": [masters["linear_qkv"]]}]
    matrices[1] |= {"pieces": (8, 4, 4), "interleaved": 2}
    options = {"momentum": 0.95, "nesterov": False, "ns_dtype": "float32", "ns_coefficients": "quintic"}
    optimizer = Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn=scale, **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(100 + step)
        for master in masters.values():
            master.grad = torch.randn(master.shape, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (1 + step)
        optimizer.step()
    held = trained[f"{mode} on 2"]["parameters"]
    for name in ("up", "down", "linear_qkv"):
        assert torch.equal(held[f"{name}.weight"], masters[name].detach().bfloat16()), name


@pytest.mark.parametrize("told", REFUSED)
def test_what_is_not_done_is_refused(trained, told):
    assert told in trained[told]["error"]
