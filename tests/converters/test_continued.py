"""A run of another program, converted, goes on as if nothing had happened: its options, schedules and lazy state."""

from __future__ import annotations

import ast
import json
import warnings

import numpy as np
import pytest
import torch
from support import sweep
from support.commands import called
from support.continued import (
    EXACT,
    Model,
    exact_torch_muon,
    furthest,
    load_ours,
    load_stock,
    save,
    train,
    weights_of,
)
from support.golden import golden
from support.modules import tree
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim.lr_scheduler import LambdaLR

import muonckpt
from muonckpt import SourceError
from muonckpt.converters.options import grouped
from muonckpt.converters.translate.names import NameRule, NameRules
from muonckpt.names.vocabulary import GROUP_OPTIONS
from muonckpt.optimizer import Muon

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*did not say options")


def falling(step: int) -> float:
    return 0.9**step


def torchs(model: Model, **options) -> list[torch.optim.Optimizer]:
    """As torch has them; the matrices are in two groups."""
    matrices = [{"params": model.matrices[:1], "weight_decay": 0.3}, {"params": model.matrices[1:]}]
    matrices = [group | {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 6, **options} for group in matrices]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(model.vectors, lr=0.01)]


def ours(model: Model, **options) -> Muon:
    """Other rates, and its groups in another order and otherwise cut."""
    groups = [
        {"params": model.vectors, "algorithm": "adamw", "lr": 7.0},
        {"params": model.matrices[1:], "weight_decay": 5.0},
        {"params": model.matrices[:1]},
    ]
    how = {"adjust_lr_fn": "match_rms_adamw", "ns_coefficients": "keller", "ns_steps": 6, **EXACT, **options}
    return Muon(groups, lr=7.0, **how)


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
@pytest.mark.filterwarnings("ignore:.*schedulers know groups by their numbers")
@pytest.mark.filterwarnings("ignore:group . keeps the code's")
def test_a_run_of_torch_with_a_schedule_goes_on_in_ours_and_back_in_torch(tmp_path, monkeypatch):
    model = Model()
    optimizers = torchs(model)
    schedulers = [LambdaLR(optimizer, falling) for optimizer in optimizers]
    with exact_torch_muon(monkeypatch):
        train(model, optimizers, range(3), schedulers)
    save(model, optimizers, tmp_path / "torch", lr_scheduler=schedulers[0].state_dict(), loader={"seen": 3})
    start = weights_of(model)
    with exact_torch_muon(monkeypatch):
        train(model, optimizers, range(3, 6), schedulers)

    report = muonckpt.convert(tmp_path / "torch", tmp_path / "ours", to_dialect="muonckpt")
    assert not [check for check in report.checklist if check.action == "set in code"]
    listed = ast.literal_eval(called("inspect", tmp_path / "ours", "--groups").stdout)
    assert [group["params"] for group in listed] == [["qkv"], ["up", "down"], ["scale", "shift"]]
    assert [(group["initial_lr"], group["weight_decay"]) for group in listed] == [
        (0.02, 0.3),
        (0.02, 0.1),
        (0.01, 0.01),
    ]
    twin = Model()
    optimizer = ours(twin)
    cure = r"extra key 'loader.seen'.*allow_extra=\['loader\.seen', 'lr_scheduler\.\*'\]"
    with pytest.raises(SourceError, match=cure) as refusal:
        load_ours(twin, optimizer, tmp_path / "ours")
    assert "muonckpt convert" not in str(refusal.value)
    loaded = load_ours(twin, optimizer, tmp_path / "ours", allow_extra=["loader.seen", "lr_scheduler.*"])
    assert not loaded.own_options
    assert [group["ns_dtype"] for group in optimizer.param_groups[1:]] == ["float32"] * 2
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.01, 0.02, 0.02]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.1, 0.3]
    schedule = LambdaLR(optimizer, falling, last_epoch=2)
    train(twin, [optimizer], range(3, 6), [schedule])
    assert furthest(model, twin, start) < 1e-5
    assert [g["lr"] for g in optimizer.param_groups] == [optimizers[1].param_groups[0]["lr"]] + [
        group["lr"] for group in reversed(optimizers[0].param_groups)
    ]

    # And back, into the groups of a given run, whose other coefficients are reported.
    save(twin, [optimizer], tmp_path / "again")
    start = weights_of(twin)
    train(twin, [optimizer], range(6, 8), [schedule])
    third = Model()
    optimizers = torchs(third, ns_coefficients=(1.0, 2.0, 3.0))
    template = tmp_path / "template.json"
    template.write_text(json.dumps({"param_groups": get_state_dict(third, optimizers)[1]["param_groups"]}))
    third = Model()
    optimizers = torchs(third, ns_coefficients=(1.0, 2.0, 3.0))
    report = muonckpt.convert(
        tmp_path / "again", tmp_path / "back", **grouped(from_dialect="muonckpt", to_dialect="torch", like=template)
    )
    differing = [check for check in report.checklist if check.subject.startswith("ns_coefficients")]
    assert [check.values for check in differing] == [("(3.4445, -4.775, 2.0315)",)] * 2
    for each in optimizers:
        each.param_groups[0].update(lr=7.0, initial_lr=7.0)
        LambdaLR(each, falling)  # stock DCP loads what its template has: so that it has initial_lr
    load_stock(third, optimizers, tmp_path / "back")
    schedulers = [LambdaLR(optimizer, falling, last_epoch=5) for optimizer in optimizers]
    with exact_torch_muon(monkeypatch):
        train(third, optimizers, range(6, 8), schedulers)
    assert furthest(twin, third, start) < 1e-5


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
def test_what_torch_drops_of_a_flattened_state_dict_is_said_with_the_cure(tmp_path):
    """It sets only the options that the running groups have, so a scheduler would begin at the decayed rate."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model = Model()
    optimizer = ours(model)
    for group, lr in zip(optimizer.param_groups, (0.01, 0.02, 0.02), strict=True):
        group["lr"] = lr
    train(model, [optimizer], range(3), [LambdaLR(optimizer, falling)])
    weights, state = get_state_dict(model, optimizer, options=flat)
    muonckpt.save({"model": weights, "optimizer": state}, tmp_path / "ours")
    report = muonckpt.convert(tmp_path / "ours", tmp_path / "flat", **grouped(to_dialect="torch", keys="flat"))
    said = {check.subject: check.values for check in report.checklist if check.action == "set in code"}
    assert said["initial_lr of groups"] == ("0.01", "0.02")

    def loaded(**given) -> Muon:
        twin = Model()
        optimizer = ours(twin)
        for group in optimizer.param_groups:
            group.update(given)
        weights, state = get_state_dict(twin, optimizer, options=flat)
        muonckpt.load({"model": weights, "optimizer": state}, tmp_path / "ours")
        set_state_dict(twin, optimizer, model_state_dict=weights, optim_state_dict=state, options=flat)
        return optimizer

    with pytest.warns(UserWarning, match=r"initial_lr=0.0[12].* drops .*before get_state_dict"):
        assert all("initial_lr" not in group for group in loaded().param_groups)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*drops")
        assert [group["initial_lr"] for group in loaded(initial_lr=7.0).param_groups] == [0.01, 0.02, 0.02]


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
def test_a_matrix_without_a_gradient_is_said_and_filled_only_if_asked_to(tmp_path, monkeypatch):
    model = Model()
    optimizers = torchs(model)
    with exact_torch_muon(monkeypatch):
        train(model, optimizers, range(3), idle=("down", "shift"))
        save(model, optimizers, tmp_path / "torch")
        start = weights_of(model)
        train(model, optimizers, range(3, 6))
    report = muonckpt.convert(tmp_path / "torch", tmp_path / "lacking", to_dialect="muonckpt")
    (missing,) = (check for check in report.checklist if check.subject == "no state in the source")
    assert missing.values == ("down", "shift") and "`fill_missing=True`" in missing.reason
    twin = Model()
    with pytest.raises(SourceError, match="2 parameters differ: new, without state in the checkpoint: shift, down"):
        load_ours(twin, ours(twin), tmp_path / "lacking")
    muonckpt.convert(tmp_path / "torch", tmp_path / "filled", **grouped(to_dialect="muonckpt", fill_missing=True))
    optimizer = ours(twin)
    with pytest.warns(UserWarning, match=r"group [12] keeps the code's ns_dtype='float32' \(saved 'bfloat16'\)"):
        load_ours(twin, optimizer, tmp_path / "filled")
    train(twin, [optimizer], range(3, 6))
    assert furthest(model, twin, start) < 1e-5


def test_masters_and_rows_that_are_missing_begin_as_a_run_makes_them(tmp_path):
    """A master is its weight, exactly; dion's mean squares of rows are a column of zeros; ours are refused by name."""
    weights = {"a": torch.randn(6, 4).bfloat16(), "idle": torch.randn(6, 4).bfloat16()}
    groups = {"ours": {"algorithm": "muon", "convention": "ema", "momentum": 0.9},
              "rows": {"algorithm": "normuon", "convention": "ema", "momentum": 0.9},
              "dion": {"algorithm": "normuon", "mu": 0.9, "cautious_wd": False, "epsilon": 1e-8}}  # fmt: skip
    states = {"ours": {"momentum_buffer": torch.ones(6, 4), "fp32_param": torch.ones(6, 4)},
              "rows": {"momentum_buffer": torch.ones(6, 4), "second_moment": torch.ones(6, 1)},
              "dion": {"momentum": torch.ones(6, 4), "variance_neuron": torch.ones(6, 1)}}  # fmt: skip
    for name, group in groups.items():
        optimizer = {"state": {"a": states[name]}, "param_groups": [{"params": ["a", "idle"], "lr": 0.1, **group}]}
        muonckpt.save({"model": weights, "optimizer": optimizer}, tmp_path / name)
        program = "dion" if name == "dion" else "muonckpt"
        asked = {"from_dialect": program, "to_dialect": program, "fill_missing": True}
        if name == "rows":
            with pytest.raises(SourceError, match=r"'idle' has no state.*not known how second_moment begins.*fresh"):
                muonckpt.convert(tmp_path / name, tmp_path / f"{name} filled", **grouped(**asked))
            continue
        muonckpt.convert(tmp_path / name, tmp_path / f"{name} filled", **grouped(**asked))
        with muonckpt.open(tmp_path / f"{name} filled") as filled:
            found = {key.rpartition(".")[2]: t for key, t in filled.tensors.items() if "state.idle" in key}
            assert found.keys() == states[name].keys()
            for slot, tensor in found.items():
                expected = weights["idle"].float().numpy() if slot == "fp32_param" else 0
                assert tensor.shape == states[name][slot].shape and tensor.dtype == "float32"
                assert (tensor.numpy() == expected).all()


def test_a_result_fits_a_given_run_or_says_why_not(tmp_path):
    model = Model()
    optimizers = torchs(model)
    train(model, optimizers, range(2))
    save(model, optimizers, tmp_path / "torch")
    given = ours(Model(), ns_steps=5)
    with pytest.raises(ValueError, match=r"give describe\(\) the model"):
        given.describe()
    third = Model()
    given = ours(third, ns_steps=5)
    template = json.loads(json.dumps(given.describe(third)))
    report = muonckpt.convert(tmp_path / "torch", tmp_path / "fits", **grouped(to_dialect="muonckpt", like=template))
    assert {(c.subject, c.values) for c in report.checklist if c.action == "set in code"} == {
        *((f"ns_steps of group {number}", ("6",)) for number in (1, 2)),
        *((f"ns_dtype of group {number}", ("'bfloat16'",)) for number in (1, 2)),
    }
    groups = muonckpt.open(tmp_path / "fits").groups
    assert [g["params"] for g in groups.values()] == [g["params"] for g in template["param_groups"]]
    assert [{*g} - {"param_names"} for g in groups.values()] == [set(g) for g in template["param_groups"]]
    weights, state = get_state_dict(third, given)
    dcp_load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "fits", no_dist=True)
    assert state["param_groups"][2]["ns_dtype"] == "bfloat16" and state["param_groups"][2]["ns_steps"] == 6

    one_group = [{"params": ["qkv", "up", "down"]}, template["param_groups"][0]]
    for groups, message in (
        (one_group, "group 0 of the template has 'qkv' and 'up', which in the source have weight_decay=0.3 and"),
        (template["param_groups"][1:], r"only the source has \['scale', 'shift'\]"),
        ([*template["param_groups"], {"params": ["new"]}], r"only the template has \['new'\]"),
    ):
        with pytest.raises(SourceError, match=message):
            muonckpt.convert(
                tmp_path / "torch", tmp_path / "x", **grouped(to_dialect="muonckpt", like={"param_groups": groups})
            )


@pytest.mark.parametrize(("interleaved", "pieces"), [(1, (12, 4, 4)), (4, (3, 1, 1))])
def test_matrices_that_a_rule_joins_are_orthogonalised_on_their_own_as_before(interleaved, pieces, tmp_path):
    model = torch.torch.nn.ParameterDict({name: torch.ones(rows, 8) for name, rows in (("q", 12), ("k", 4), ("v", 4))})
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    save(model, [optimizer], tmp_path / "torch")
    shares = () if interleaved == 1 else pieces
    rule = NameRule(("q", "k", "v"), ("qkv",), shares=shares, interleaved=interleaved)
    muonckpt.convert(tmp_path / "torch", tmp_path / "ours", **grouped(to_dialect="muonckpt", rules=NameRules((rule,))))
    (group,) = muonckpt.open(tmp_path / "ours").groups.values()
    assert (group["params"], group["pieces"], group["interleaved"]) == (["qkv"], pieces, interleaved)


MEGATRON = {"rules": "megatron-swiglu", "convention": "ema", "step": 10}
SOURCES = {
    "torch_fsdp4/ckpt": {},
    "torch_hsdp2x2/ckpt": {},
    "dion_fsdp4/ckpt": {},
    "titan_fsdp4/ckpt": {},
    "xtuner_fsdp4/ckpt": {"step": 3},
    "megatron/fsdp_dtensor/dp4/iter_0000010": MEGATRON,
    "megatron/fsdp_dtensor/dp4tp2ep2/iter_0000010": MEGATRON,
}


FORMS = [(keys, named) for keys in ("nested", "flat") for named in (False, True)]


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
@pytest.mark.parametrize(("keys", "named"), sweep(FORMS, ("nested", True), ("flat", False)))
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.filterwarnings("ignore:group ")
def test_stock_dcp_loads_what_was_converted_into_our_optimizer(source, keys, named, tmp_path):
    """As Hugging Face, accelerate and torchtitan load: every key of the template must be there."""
    muonckpt.convert(golden(source), tmp_path / "ours", **grouped(to_dialect="muonckpt", keys=keys, **SOURCES[source]))
    with muonckpt.open(tmp_path / "ours") as opened:
        stored = {key: torch.tensor(np.asarray(tensor.numpy())) for key, tensor in opened.tensors.items()}
        groups = list({tuple(group["param_names"]): group for group in opened.groups.values()}.values())
    shapes = {key.removeprefix("model."): tuple(t.shape) for key, t in stored.items() if key.startswith("model.")}
    model = tree({name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})
    params = dict(model.named_parameters())
    made = [
        {"params": [(name, params[name]) if named else params[name] for name in group["param_names"]],
         "algorithm": group["algorithm"], "lr": 7.0, "pieces": group.get("pieces")}
        for group in groups
    ]  # fmt: skip
    optimizer = Muon([{k: v for k, v in g.items() if k != "pieces" or v} for g in made], lr=7.0)
    options = StateDictOptions(flatten_optimizer_state_dict=keys == "flat")
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp_load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "ours", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    for name, param in params.items():
        for slot, held in optimizer.state[param].items():
            assert torch.equal(held, stored[f"optimizer.state.{name}.{slot}"].to(held.dtype)), (name, slot)
    assert [g["lr"] for g in optimizer.param_groups] == [group["lr"] for group in groups]
    before = {name: param.detach().clone() for name, param in params.items()}
    train(model, [optimizer], range(1))
    assert not any(torch.equal(before[name], param) for name, param in params.items())


def test_the_options_that_a_new_optimizer_has_are_those_that_conversions_write():
    for algorithm, defaults in GROUP_OPTIONS.items():
        param = torch.nn.Parameter(torch.zeros(4, 3))
        (group,) = Muon([{"params": [param], "algorithm": algorithm, "lr": defaults["lr"]}]).param_groups
        assert {k: v for k, v in group.items() if k != "params"} == {**defaults, "algorithm": algorithm}
