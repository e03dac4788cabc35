"""Megatron's fsdp_dtensor of MLA and MTP: options have a run's names, weights and state those of the format."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.golden import golden

import muonckpt
from muonckpt import SourceError
from muonckpt.converters.look.contents import groups_as_data
from muonckpt.converters.options import grouped
from muonckpt.optimizer import Muon

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

GOLDEN = "upstream/fsdp_dtensor_mla_mtp/ckpt"
LAYER = "decoder.layers.0"
Q, KV = (f"{LAYER}.self_attention.linear_{kind}_down_proj.weight" for kind in ("q", "kv"))
FUSED, NORM = (f"{LAYER}.self_attention.linear_qkv_down_proj.{leaf}" for leaf in ("weight", "layer_norm_weight"))
MTP = "mtp.layers.0.{}.self_attention.linear_proj.weight"
META = "optimizer.param_to_group_meta.module.module.module."
MOMENTUM = "optimizer.state.module.module.module.{}.momentum_buffer"


def rates(path) -> dict[str, float]:
    """Return the rate of each parameter that a group lists."""
    found = {}
    with muonckpt.open(path) as opened:
        for group in groups_as_data(opened.outline, opened.values):
            found |= dict.fromkeys(group["params"], group["lr"])
    return found


def saved(path, names, stored=None, **more):
    """Save matrices and their momenta under stored names, and options under the names that a run has."""
    stored = names if stored is None else stored
    prefix = "module.module.module."
    state = {f"{prefix}{name}": {"momentum_buffer": torch.rand(4, 3)} for name in stored}
    meta = {f"{prefix}{name}": {"lr": 0.02, "momentum": 0.95} for name in names} | {
        f"{prefix}{name}": options for name, options in more.items()
    }
    model = {f"module.{name}": torch.rand(4, 3) for name in stored}
    dcp.save({"model": model, "optimizer": {"state": state, "param_to_group_meta": meta}}, checkpoint_id=path)
    return path


def test_every_parameter_has_its_options_under_the_names_that_state_has():
    rate_of = {Q: 0.02, KV: 0.02, f"{LAYER}.self_attention.linear_proj.weight": 0.02,
               MTP.format("transformer_layer"): 0.02, f"{LAYER}.input_layernorm.weight": 3e-4,
               "decoder.final_layernorm.weight": 3e-4}  # fmt: skip
    assert rates(golden(GOLDEN)) == rate_of
    inspection = muonckpt.inspect(golden(GOLDEN))
    assert inspection.symptoms == ()
    assert [(row["method"], row["parameters"]) for row in inspection.optimizer] == [("muon", 4), ("adamw", 2)]


def test_a_run_is_converted_in_its_parts_with_a_warning_or_whole_and_comes_home(tmp_path):
    source, parts, whole = golden(GOLDEN), tmp_path / "parts", tmp_path / "whole"
    report = muonckpt.convert(source, parts, **grouped(to_dialect="muonckpt", convention="ema"))
    (check,) = [check for check in report.checklist if "takes as one" in check.subject]
    assert {*check.values} == {Q, KV} and "megatron-mla" in check.reason
    assert {name: rate for name, rate in rates(parts).items() if name in (Q, KV)} == {Q: 0.02, KV: 0.02}

    # By the tables that the warning names, it is the matrix that Megatron orthogonalises.
    tables = ["megatron-mla", "megatron-mtp"]
    report = muonckpt.convert(source, whole, **grouped(to_dialect="muonckpt", convention="ema", rules=tables))
    assert not [check for check in report.checklist if "takes as one" in check.subject]
    with muonckpt.open(source) as before, muonckpt.open(whole) as after:
        rows = [before.tensors[MOMENTUM.format(name)].numpy() for name in (Q, KV)]
        np.testing.assert_array_equal(
            after.tensors[f"optimizer.state.{FUSED}.momentum_buffer"].numpy(), np.vstack(rows)
        )
        assert f"model.{MTP.format('mtp_model_layer')}" in after.tensors and f"model.{NORM}" in after.tensors

    # Back: both an unfused and a fused run find their options.
    table = tmp_path / "split.toml"
    table.write_text(
        "[[rule]]\nfrom = '{p*}.linear_qkv_down_proj.weight'\nshares = [8, 6]\nkeeps_groups = true\n"
        "to = ['{p*}.linear_q_down_proj.weight', '{p*}.linear_kv_down_proj.weight']\n"
        "[[rule]]\nfrom = '{p*}.self_attention.linear_qkv_down_proj.layer_norm_weight'\n"
        "to = '{p*}.input_layernorm.weight'\n"
    )
    for path, rules in ((parts, []), (whole, [str(table), "inverse:megatron-mtp"])):
        home = tmp_path / f"{path.name} home"
        muonckpt.convert(path, home, **grouped(to_dialect="fsdp_dtensor", rules=rules))
        with muonckpt.open(source) as before, muonckpt.open(home) as after:
            assert before.tensors.keys() == after.tensors.keys()
            for key, tensor in before.tensors.items():
                np.testing.assert_array_equal(after.tensors[key].bits(), tensor.bits(), err_msg=key)
            for key in before.items:
                if key.startswith(META) and not key.endswith((".default_config", ".wd_mult")):
                    assert after.items[key] == before.items[key], key
        assert rates(home) == rates(source)


def test_the_whole_is_trained_on_as_megatron_orthogonalises_it(tmp_path):
    """One step of ours on what was converted is that of one matrix made of the momenta in the file by hand."""
    rules = ["megatron-mla"]
    muonckpt.convert(
        golden(GOLDEN), tmp_path / "whole", **grouped(to_dialect="muonckpt", convention="ema", rules=rules)
    )
    with muonckpt.open(golden(GOLDEN)) as opened:
        momentum = torch.from_numpy(np.vstack([opened.tensors[MOMENTUM.format(name)].numpy() for name in (Q, KV)]))
        weight = torch.from_numpy(np.vstack([opened.tensors[f"model.module.{name}"].numpy() for name in (Q, KV)]))
    gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    results = []
    for loads in (True, False):
        parameter = torch.nn.Parameter(torch.zeros_like(weight) if loads else weight.clone())
        optimizer = Muon([{"params": [(FUSED, parameter)], "lr": 0.02, "weight_decay": 0.1}])
        if loads:
            model = {FUSED: parameter.data}
            buffers = {FUSED: {"momentum_buffer": optimizer.state[parameter]["momentum_buffer"]}}
            state = {"model": model, "optimizer": {"state": buffers}}
            muonckpt.load(state, tmp_path / "whole", allow_extra=["*"])
        else:
            optimizer.state[parameter]["momentum_buffer"].copy_(momentum)
        parameter.grad = gradient.clone()
        optimizer.step()
        results.append(parameter.detach())
    assert torch.equal(*results) and not torch.equal(results[0], weight)


@pytest.mark.parametrize(
    ("stored", "listed"),
    [
        (["mtp.layers.1.transformer_layer.self_attention.linear_{}_down_proj.weight"] * 2,
         ["mtp.layers.1.mtp_model_layer.self_attention.linear_qkv_down_proj.weight"]),
        (["mtp.layers.0.mtp_model_layer.layers.0.mixer.in_proj.weight"],
         ["mtp.layers.0.mtp_model_layer.layers.0.mixer.in_proj.weight"]),
        (["decoder.layers.3.self_attention.linear_{}_down_proj.weight"] * 2,
         [f"decoder.layers.3.self_attention.linear_{kind}_down_proj.weight" for kind in ("q", "kv")]),
    ],
    ids=["MLA inside MTP", "Mamba's MTP", "MLA that is not fused"],
)  # fmt: skip
def test_names_are_translated_where_state_has_the_others_and_only_there(stored, listed, tmp_path):
    stored = [name.format(kind) for name, kind in zip(stored, ("q", "kv"), strict=False)]
    path = saved(tmp_path / "run", listed, stored)
    assert rates(path) == dict.fromkeys(stored, 0.02)
    muonckpt.convert(path, tmp_path / "ours", **grouped(to_dialect="muonckpt", convention="ema"))
    muonckpt.convert(tmp_path / "ours", tmp_path / "home", **grouped(to_dialect="fsdp_dtensor"))
    with muonckpt.open(tmp_path / "home") as home:
        assert {f"{META}{name}.lr" for name in {*stored, *listed}} <= home.items.keys()
    assert rates(tmp_path / "home") == rates(path)


@pytest.mark.parametrize(
    "listed",
    ["mtp.layers.0.mtp_model_layer.mlp.linear_fc1.weight", "decoder.layers.1.mlp.experts.linear_fc1.weight0",
     "mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc1.weight3"],
)  # fmt: skip
def test_halves_of_a_swiglu_have_the_options_of_the_whole_also_in_mtp(listed, tmp_path):
    whole = listed.replace("mtp_model_layer", "transformer_layer")
    halves = [f"{whole}_w", f"{whole}_v"]
    path = saved(tmp_path / "run", [listed], halves)
    assert rates(path) == dict.fromkeys(halves, 0.02)
    report = muonckpt.convert(path, tmp_path / "parts", **grouped(to_dialect="muonckpt", convention="ema"))
    (check,) = [check for check in report.checklist if "takes as one" in check.subject]
    assert {*check.values} == {*halves}
    # Joined by the table that the warning names, and split again, the run finds its options.
    options = grouped(to_dialect="muonckpt", convention="ema", rules=["megatron-swiglu"])
    muonckpt.convert(path, tmp_path / "ours", **options)
    assert rates(tmp_path / "ours") == {whole: 0.02}
    options = grouped(to_dialect="fsdp_dtensor", rules=["inverse:megatron-swiglu"])
    muonckpt.convert(tmp_path / "ours", tmp_path / "home", **options)
    muonckpt.convert(tmp_path / "parts", tmp_path / "home of parts", **grouped(to_dialect="fsdp_dtensor"))
    for folder in ("home", "home of parts"):
        with muonckpt.open(path) as before, muonckpt.open(tmp_path / folder) as after:
            for key, tensor in before.tensors.items():
                np.testing.assert_array_equal(after.tensors[key].bits(), tensor.bits())
            assert after.items[f"{META}{listed}.lr"] == 0.02
        assert rates(tmp_path / folder) == rates(path)


def test_options_that_are_listed_twice_and_differ_are_refused(tmp_path):
    path = saved(tmp_path / "same", [Q, KV], **{FUSED: {"lr": 0.02, "momentum": 0.95}})
    assert rates(path) == {Q: 0.02, KV: 0.02}
    path = saved(tmp_path / "other", [Q, KV], **{FUSED: {"lr": 0.01, "momentum": 0.95}})
    with pytest.raises(SourceError, match=r"linear_qkv_down_proj.weight' and of .*which are one parameter, and differ"):
        muonckpt.convert(path, tmp_path / "ours", **grouped(to_dialect="muonckpt", convention="ema"))
    cure = tmp_path / "cure"
    muonckpt.convert(path, cure, **grouped(select=["model.*", "optimizer.state.*", f"{META}{Q}.*", f"{META}{KV}.*"]))
    assert rates(cure) == {Q: 0.02, KV: 0.02}


def test_state_whose_options_are_nowhere_is_refused_as_before(tmp_path):
    path = saved(tmp_path / "run", [FUSED], [Q])  # half of it is lost
    with pytest.raises(SourceError, match=r"found state of .*linear_q_down_proj.weight, which no parameter group"):
        muonckpt.convert(path, tmp_path / "ours", **grouped(to_dialect="muonckpt", convention="ema"))
