"""Whose state it is: numbers of one optimizer and of several, names that groups record, and state of nobody's group."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import called
from support.golden import golden
from support.translated import MEGATRON, TORCH, W, nested, saved, translate
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import muonckpt
from muonckpt import SourceError
from muonckpt.converters.options import grouped
from muonckpt.names.vocabulary import Convention
from muonckpt.optimizer import Muon
from muonckpt.programs.registry import DIALECTS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:hyper-parameters are those",
                                        "ignore:.*did not say options")  # fmt: skip

NAMES = ("2.weight", "0.weight", "1.weight", "2.bias", "0.bias")
"""Matrices of one shape, in another order than the model's: a wrong number would fit."""


def trained(named: bool):
    """A model with torch's two optimizers after a step, and every slot by the parameter's name."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    params = dict(model.named_parameters())

    def listed(*names):
        return [(name, params[name]) if named else params[name] for name in names]

    muon, adamw = torch.optim.Muon(listed(*NAMES[:3]), lr=0.02), torch.optim.AdamW(listed(*NAMES[3:]), lr=1e-3)
    for param in params.values():
        param.grad = torch.randn_like(param)
    muon.step(), adamw.step()
    slots = {name: {**muon.state, **adamw.state}[params[name]] for name in NAMES}
    return model, muon, adamw, slots


def ours(model: nn.Module) -> Muon:
    params = dict(model.named_parameters())
    groups = [
        {"params": [params[name] for name in NAMES[:3]], "lr": 0.02, "ns_coefficients": "keller"},
        {"params": [params[name] for name in NAMES[3:]], "lr": 1e-3, "algorithm": "adamw"},
    ]
    return Muon(groups)


def assert_resumed(path, slots) -> None:
    """Our optimizer takes it under the model's names, and has these slots."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = ours(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    report = muonckpt.load(state, path)
    assert {*report.loaded} == {*NAMES}
    for name, expected in slots.items():
        for slot, value in expected.items():
            assert torch.equal(state["optimizer"]["state"][name][slot], value), (name, slot)


@pytest.mark.parametrize("form", ["dcp", "torch.save"])
def test_names_that_the_groups_record_are_those_of_raw_state_dicts(form, tmp_path):
    model, muon, adamw, slots = trained(named=True)
    raw = {"model": model.state_dict(), "muon": muon.state_dict(), "adamw": adamw.state_dict()}
    if form == "dcp":
        dcp.save(raw, checkpoint_id=tmp_path / "raw", no_dist=True)
    else:
        (tmp_path / "raw").mkdir()
        torch.save(raw, tmp_path / "raw" / "all.pt")
    source = tmp_path / "raw" if form == "dcp" else tmp_path / "raw" / "all.pt"
    seen = muonckpt.inspect(source)
    assert {row["method"]: row["parameters"] for row in seen.optimizer} == {"muon": 3, "adamw": 2}
    assert [symptom.kind for symptom in seen.symptoms] == ["no_state"]  # of 1.bias, which no optimizer has
    muonckpt.convert(source, tmp_path / "ours", to_dialect="muonckpt")
    assert_resumed(tmp_path / "ours", slots)


@pytest.mark.parametrize("copy", [None, "ema"])
def test_the_model_beside_numbered_state_is_where_its_shapes_are(copy, tmp_path):
    """No key says "model", and neither a tensor at the top nor one in the middle has all shapes."""
    model, muon, adamw, slots = trained(named=True)
    raw = {"net": model.state_dict(), "muon": muon.state_dict(), "adamw": adamw.state_dict(), "rng": torch.ones(9)}
    raw |= {copy: model.state_dict()} if copy else {"model_stats": {"mean": torch.ones(4)}}
    dcp.save(raw, checkpoint_id=tmp_path / "raw", no_dist=True)
    if copy:
        with pytest.raises(SourceError, match=r"under 'ema' and under 'net'.*`select=`|under 'net' and under 'ema'"):
            muonckpt.convert(tmp_path / "raw", tmp_path / "ours", to_dialect="muonckpt")
        return
    muonckpt.convert(tmp_path / "raw", tmp_path / "ours", to_dialect="muonckpt")
    with muonckpt.open(tmp_path / "ours") as made:
        for name in NAMES:
            expected = model.get_parameter(name).detach().numpy()
            assert made.tensors[f"model.{name}"].numpy().tolist() == expected.tolist()
        keys = {f"optimizer.state.{name}.{slot}" for name, state in slots.items() for slot in state}
        assert keys <= made.tensors.keys() and {"rng", "model_stats.mean"} <= made.tensors.keys()


def test_numbers_that_nothing_names_are_refused_and_every_cure_that_is_printed_keeps_the_state(tmp_path):
    model, muon, adamw, slots = trained(named=False)
    raw = {"model": model.state_dict(), "muon": muon.state_dict(), "adamw": adamw.state_dict()}
    dcp.save(raw, checkpoint_id=tmp_path / "raw", no_dist=True)
    seen = muonckpt.inspect(tmp_path / "raw")
    assert {row["method"]: row["parameters"] for row in seen.optimizer} == {"muon": 3, "adamw": 2}
    assert {group["holds"] for group in seen.groups} == {("muon#0-2",), ("adamw#0-1",)}
    refused = called("convert", tmp_path / "raw", tmp_path / "ours", "--to", "muonckpt")
    assert refused.returncode == 3 and "state of number" in refused.stderr
    assert "get_optimizer_state_dict(model, optimizer)" in refused.stderr and "--rules (from = " in refused.stderr
    # The table of rules.
    numbers = [*(f"muon#{n}" for n in range(3)), *(f"adamw#{n}" for n in range(2))]
    rules = [f"[[rule]]\nfrom = '{number}'\nto = '{name}'" for number, name in zip(numbers, NAMES, strict=True)]
    (tmp_path / "rules.toml").write_text("\n".join(rules))
    table = tmp_path / "rules.toml"
    done = called("convert", tmp_path / "raw", tmp_path / "ours", "--to", "muonckpt", "--rules", table)
    assert done.returncode == 0, done.stderr
    assert_resumed(tmp_path / "ours", slots)
    # Into what it was saved from, and saved with names.
    model, muon, adamw, _ = trained(named=False)
    for state in (*muon.state.values(), *adamw.state.values()):
        for value in state.values():
            value.zero_()
    state = {"model": model.state_dict(), "muon": muon.state_dict(), "adamw": adamw.state_dict()}
    report = muonckpt.load(state, tmp_path / "raw")
    assert report.loaded == ("adamw#0", "adamw#1", "muon#0", "muon#1", "muon#2")
    muon.load_state_dict(state["muon"]), adamw.load_state_dict(state["adamw"])
    both = get_optimizer_state_dict(model, [muon, adamw])
    dcp.save({"model": model.state_dict(), "optimizer": both}, checkpoint_id=tmp_path / "named", no_dist=True)
    muonckpt.convert(tmp_path / "named", tmp_path / "again", to_dialect="muonckpt")
    assert_resumed(tmp_path / "again", slots)
    alone = called("convert", tmp_path / "raw", tmp_path / "alone", "--to", "muonckpt", "--model-only")
    assert alone.returncode == 0, alone.stderr
    assert {*muonckpt.open(tmp_path / "alone").tensors} == {f"model.{name}" for name in model.state_dict()}


def test_two_optimizers_in_one_file_are_never_one_and_the_error_says_how_to_name_them(tmp_path):
    model, muon, adamw, slots = trained(named=False)
    source = tmp_path / "checkpoint-3"
    source.mkdir()
    torch.save({"muon": muon.state_dict(), "adamw": adamw.state_dict()}, source / "optimizer.pt")
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    seen = muonckpt.inspect(source)
    assert {row["method"]: row["parameters"] for row in seen.optimizer} == {"muon": 3, "adamw": 2}
    assert {symptom.kind for symptom in seen.symptoms} <= {"no_state"}
    refused = called("convert", source, tmp_path / "ours", "--to", "muonckpt")
    assert refused.returncode == 3 and "--drop" not in refused.stderr
    assert 'parameter_names.json beside them, for each optimizer a list: {"optimizer.muon": ["…"]' in refused.stderr
    names = {"optimizer.muon": NAMES[:3], "optimizer.adamw": NAMES[3:]}
    (source / "parameter_names.json").write_text(json.dumps(names))
    done = called("convert", source, tmp_path / "ours", "--to", "muonckpt")
    assert done.returncode == 0, done.stderr
    assert_resumed(tmp_path / "ours", slots)


def test_numbers_beside_names_and_names_that_look_like_numbers(tmp_path):
    """One optimizer of several was given names; and a list of parameters has names such as "0"."""
    _, muon, _, slots = trained(named=True)
    model, _, adamw, _ = trained(named=False)
    raw = {"model": model.state_dict(), "a": muon.state_dict(), "b": adamw.state_dict()}
    dcp.save(raw, checkpoint_id=tmp_path / "raw", no_dist=True)
    manifest, values = muonckpt.open(tmp_path / "raw").manifest, muonckpt.open(tmp_path / "raw").values
    with pytest.raises(SourceError, match=r"state of number b#[01],"):
        translate(manifest, values, DIALECTS["muonckpt"])
    (tmp_path / "t.toml").write_text("\n".join(f"[[rule]]\nfrom='b#{n}'\nto='{NAMES[3 + n]}'" for n in range(2)))
    muonckpt.convert(
        tmp_path / "raw", tmp_path / "o", **grouped(to_dialect="muonckpt", rules=[str(tmp_path / "t.toml")])
    )
    assert_resumed(tmp_path / "o", slots)
    listed = {"model": {"0": W, "1": W + 1}, "optimizer": {
        "state": {name: {"momentum_buffer": W * int(name)} for name in "01"},
        "param_groups": [{"params": ["1", "0"], **TORCH}]}}  # fmt: skip
    manifest, path = saved(tmp_path / "list", listed)
    made = translate(manifest, muonckpt.open(path).values, DIALECTS["muonckpt"])
    assert {t.record.name for t in made.tensors if t.record.slot} == {"0", "1"}


# State that is lost, and state of nobody's group.


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_half_of_the_momenta_are_missed_with_names_and_with_numbers(named, weights, tmp_path):
    """As where each rank keeps the momentum of what it owns, and rank 0 saves."""
    names = [f"{n}.weight" for n in range(8)]
    keys = names if named else [str(n) for n in range(8)]
    state = {key: {"momentum_buffer": W.clone()} for key in keys[::2]}
    group = {"params": keys if named else [*range(8)], **TORCH}
    whole = {"optimizer": {"state": state, "param_groups": [group]}}
    saved(tmp_path, whole | ({"model": dict.fromkeys(names, W)} if weights else {}))
    (symptom,) = (s for s in muonckpt.inspect(tmp_path / "checkpoint").symptoms if s.kind == "no_state")
    assert {*symptom.names} == {*keys[1::2]} and "one rank's was saved" in str(symptom)
    group["params"] = group["params"][:5]  # one in five may be frozen
    state.update({key: {"momentum_buffer": W.clone()} for key in keys[:4]})
    del state[keys[4]], state[keys[6]]
    saved(tmp_path / "few", whole)
    (symptom,) = (s for s in muonckpt.inspect(tmp_path / "few" / "checkpoint").symptoms if s.kind == "no_state")
    assert {*symptom.names} == {keys[4]} and "frozen" in str(symptom) and "one rank" not in str(symptom)


OPTIONS = {
    "torch": TORCH,
    "titan": TORCH,
    "dcp": {"lr": 0.1, "momentum": 0.95},
    "fully_shard": {"lr": 0.1, "momentum": 0.95},
    "dion": {"lr": 0.1, "mu": 0.5, "algorithm": "muon", "epsilon": 1e-8, "cautious_wd": False},
    "xtuner": {"lr": 0.1, "mu": 0.5, "algorithm": "muon", "epsilon": 1e-8, "num_experts": 1},
    "veomni": TORCH | {"ns_implementation": "std", "gram_ns_reset_iterations": (2,)},
    "deepspeed": {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.95, "use_muon": True, "ns_method": "gram"},
    "moonlight": {"wd": 0.1, "momentum": 0.95, "adamw_betas": (0.9, 0.9), "adamw_eps": 1e-8},
    "muonckpt": {"lr": 0.1, "momentum": 0.5, "algorithm": "muon", "convention": "ema", "cautious": False},
}


# Flat keys have names, and so no program that has numbers.
@pytest.mark.parametrize(
    ("program", "flat"),
    [*((program, False) for program in OPTIONS), *((p, True) for p in OPTIONS if p != "fully_shard")],
)
def test_state_that_ends_in_no_group_is_an_error_whatever_the_program(program, flat, tmp_path):
    slot, number = DIALECTS[program].methods[0].slots["momentum"], program == "fully_shard"
    state = nested({slot: W.clone()}, **OPTIONS[program])
    lost = "1" if number else "lost"
    optimizer = {"state": {("0" if number else "w"): {slot: W.clone()}, lost: {slot: W.clone()}},
                 "param_groups": [{"params": [0] if number else ["w"], **OPTIONS[program]}]}  # fmt: skip
    if flat:
        optimizer = {f"state.{name}.{slot}": W.clone() for name in ("w", lost)}
        optimizer |= {f"param_groups.w.{option}": value for option, value in OPTIONS[program].items()}
    manifest, path = saved(tmp_path, state | {"optimizer": optimizer})
    (symptom,) = (s for s in muonckpt.inspect(path).symptoms if s.kind == "no_group")
    assert symptom.names == (lost,)
    values, asked = muonckpt.open(path).values, {"convention": DIALECTS[program].convention or Convention.EMA}
    target = DIALECTS["torch" if program == "muonckpt" else "muonckpt"]
    with pytest.raises(SourceError, match=rf"state of {lost}, which no parameter group of|state of number"):
        translate(manifest, values, target, **asked)
    # The cure that the error prints.
    kept = [tensor.key for tensor in manifest.tensors if lost not in tensor.key.split(".")]
    muonckpt.reshard(path, tmp_path / "copy", mesh={"dp": 1}, select=[*kept, "optimizer.param_groups.*"])
    if not number:
        opened = muonckpt.open(tmp_path / "copy")
        assert translate(opened.manifest, opened.values, target, **asked).tensors


def test_state_of_megatron_whose_options_are_lost_is_an_error_that_names_what_groups_list(tmp_path):
    opened = muonckpt.open(golden(MEGATRON.format("dp4")))
    keys = [entry.key for entry in (*opened.manifest.tensors, *opened.manifest.blobs)]
    kept = [key for key in keys if "param_to_group_meta" not in key or "linear_fc1" not in key]
    assert len(kept) < len(keys)
    muonckpt.reshard(opened.path, tmp_path / "copy", mesh={"dp": 1}, select=kept)
    copy, asked = muonckpt.open(tmp_path / "copy"), {"convention": Convention.EMA}
    with pytest.raises(SourceError, match=r"linear_fc1.*which no parameter group of fsdp_dtensor lists"):
        translate(copy.manifest, copy.values, DIALECTS["muonckpt"], **asked)
