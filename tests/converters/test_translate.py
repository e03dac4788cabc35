"""Checkpoints of any program in the keys of any other: against what each run itself had in memory."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support.golden import golden
from support.translated import (
    FLAT,
    MOMENTUM,
    PEERS,
    SUMS,
    TARGETS,
    TORCH,
    W,
    constants,
    copied,
    executed,
    expected,
    nested,
    opened,
    options,
    read,
    saved,
    translate,
    translated,
    truth_of,
    words_apart,
)

import muonckpt
from muonckpt import SourceError, TargetError
from muonckpt.converters.translate.names import READY_MADE, NameRule, NameRules, load_rules
from muonckpt.names.vocabulary import GROUP_OPTIONS, Convention
from muonckpt.optimizer import Muon
from muonckpt.programs.registry import DIALECTS
from muonckpt.programs.signs import COMMON_STATE

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", PEERS)
def test_any_program_to_any_other(source, target):
    """Bit for bit where the convention is the same; within one rounding where the momentum is scaled."""
    folder = PEERS[source]
    path, _ = read(f"{folder}/ckpt")
    result = translated(f"{folder}/ckpt", target)
    found, want = executed(path, result), expected(folder, target)
    assert found.keys() == want.keys()
    scales = {output.key for output in result.tensors if output.scale}
    assert bool(scales) == (target != "dcp" and (source in SUMS) != (target in SUMS))
    for key, words in want.items():
        assert words_apart(found[key], words) <= 1 if key in scales else np.array_equal(found[key], words), key
    for record in (output.record for output in result.tensors):
        path_of = record.path
        assert ".".join(map(str, path_of)) == record.key
        assert not record.chunks
        if ".state." in record.key:
            assert len(path_of) == (2 if target in FLAT else 4)
        if record.slot in ("momentum", "momentum_buffer") and record.convention:
            kept = "sum" if source in SUMS else "ema"
            assert record.convention == (kept if target == "dcp" else "sum" if target in SUMS else "ema")


@pytest.mark.parametrize("source, target, like", [("dion", "torch", "torch"), ("dion", "titan", "titan"),
                                                  ("torch", "dion", "dion"), ("titan", "dion", "dion")])  # fmt: skip
def test_scaled_momentum_is_what_the_other_program_itself_computed(source, target, like):
    """The runs saw the same gradients, so the other program's own checkpoint is the answer."""
    path, _ = read(f"{PEERS[source]}/ckpt")
    found, theirs = executed(path, translated(f"{PEERS[source]}/ckpt", target)), expected(PEERS[like], target)
    metas = (json.loads((golden(PEERS[peer]) / "meta.json").read_text()) for peer in (source, like))
    matrices = ({p["name"] for p in meta["params"] if p["group"] == "muon"} for meta in metas)
    slot = MOMENTUM.get(target, "momentum_buffer")
    keys = [f"optimizer.state.{name}.{slot}" for name in set.intersection(*matrices)]
    assert len(keys) >= 7
    for key in keys:
        mine, other = found[key].view("<f4"), theirs[key].view("<f4")
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=4e-7 * np.abs(other).max())  # three rounded steps each


def test_groups_of_dion_in_the_words_of_torch():
    meta = json.loads((golden("dion_fsdp4") / "meta.json").read_text())
    said = options(translated("dion_fsdp4/ckpt", "torch"))
    for number, group in enumerate(meta["param_groups"][0]):
        at = f"optimizer.param_groups.{number}."
        assert said[at + "params"] == group["params"]
        assert (said[at + "lr"], said[at + "weight_decay"]) == (group["lr"], group["weight_decay"])
        assert said[at + "eps"] == group["epsilon"]
        if group["algorithm"] == "muon":
            assert (said[at + "momentum"], said[at + "nesterov"]) == (group["mu"], group["nesterov"])
            assert said[at + "adjust_lr_fn"] == "match_rms_adamw"
        else:
            assert said[at + "betas"] == (group["beta1"], group["beta2"])


@pytest.mark.parametrize("source", ["dion", "xtuner"])
def test_groups_have_exactly_the_options_of_a_new_optimizer(source):
    """So that stock DCP, whose template is a new optimizer's, finds every key; but ours is told nothing unknown."""
    weight, bias = torch.nn.Parameter(torch.zeros(4, 3)), torch.nn.Parameter(torch.zeros(3))
    ours = Muon([{"params": [weight]}, {"params": [bias], "algorithm": "adamw", "lr": 1e-3}])
    fresh = {
        "torch": [torch.optim.Muon([weight]).param_groups[0], torch.optim.AdamW([bias]).param_groups[0]],
        "muonckpt": ours.param_groups,
    }
    assumed = {"gram", "ns_dtype"} | {"dion": {"ns_coefficients", "ns_steps"}, "xtuner": {"pieces"}}.get(source, set())
    for target, groups in fresh.items():
        result = translated(f"{PEERS[source]}/ckpt", target)
        said = options(result)
        for number in {key.split(".")[2] for key in said}:
            mine = {key.split(".", 3)[3] for key in said if key.split(".")[2] == number}
            assert mine - {"param_names"} in [set(group) for group in groups]
        told = {c.subject: c.values for c in result.checklist if "recorded as unsaid" in c.reason}
        defaults = {f"{option} of muon groups": (repr(GROUP_OPTIONS["muon"][option]),) for option in assumed}
        if source == "xtuner":  # it splits the rows of these alone, by an argument of its constructor
            names = "layers.0.attn.qkv.weight, layers.1.attn.qkv.weight"
            defaults[f"pieces of {names}"] = defaults.pop("pieces of muon groups")
        hints = [
            c.reason for c in result.checklist if c.subject == "ns_coefficients of muon groups" and source == "dion"
        ]
        assert all("'polar_express_dion' is its default" in hint for hint in hints)
        theirs = {"ns_coefficients of muon groups", "ns_steps of muon groups"} if source == "dion" else set()
        assert told == defaults if target == "muonckpt" else told.keys() == theirs
        recorded = set[str]().union(*(record["options"] for record in result.provenance.get("unsaid", ())))
        assert recorded == (assumed if target == "muonckpt" else {subject.split()[0] for subject in theirs})


def test_groups_by_name_are_put_together_and_taken_apart():
    """torchtitan's flat options, as torch's groups, and flat again."""
    meta = json.loads((golden("titan_fsdp4") / "meta.json").read_text())
    said = options(translated("titan_fsdp4/ckpt", "torch"))
    groups = [group for optimizer in meta["param_groups"] for group in optimizer]
    found = [said[key] for key in said if key.endswith(".params")]
    assert sorted(map(sorted, found)) == sorted(sorted(group["params"]) for group in groups)
    flat = options(translated("torch_fsdp4/ckpt", "titan"))
    for group in (
        group for o in json.loads((golden("torch_fsdp4") / "meta.json").read_text())["param_groups"] for group in o
    ):
        for name in group["params"]:
            for option, value in group.items():
                if option != "params":
                    stored = flat[f"optimizer.param_groups.{name}.{option}"]
                    assert (list(stored) if isinstance(stored, tuple) else stored) == value
    assert not [key for key in flat if key.endswith(".params")]


@pytest.mark.parametrize("source", PEERS)
def test_in_its_own_words_nothing_changes(source):
    folder = f"{PEERS[source]}/ckpt"
    path, manifest = read(folder)
    result = translated(folder, source.split()[0])
    assert not (options(result) or result.left_out or any(note.startswith("note: ") for note in result.notes))
    assert copied(result) == {blob.key: blob for blob in manifest.blobs}
    assert {output.key: (output.record.path, output.scale) for output in result.tensors} == {
        tensor.key: (tensor.path, None) for tensor in manifest.tensors
    }
    assert executed(path, result).keys() == {tensor.key for tensor in manifest.tensors}


def test_what_is_not_state_is_carried_and_the_derived_is_listed():
    result = translated("dion_fsdp4/ckpt", "torch")
    assert {"step", "wandb_id", "train_loader.dataloader_world_size"} <= copied(result).keys()
    left = translated("xtuner_fsdp4/ckpt", "torch").left_out
    assert left and all(key.endswith(".lr_ratio") for key in left)
    told = "\n".join(result.notes)
    for words in ("source: dion", "target: torch", "9 momenta are multiplied by 0.05"):
        assert words in told
    (unknown,) = (c for c in result.checklist if c.subject == "ns_coefficients of muon groups")
    assert unknown.values == ("(3.4445, -4.775, 2.0315)",) and "dion does not say it" in unknown.reason


# Conventions.


@pytest.fixture
def unknown(tmp_path):
    return saved(tmp_path, nested({"momentum_buffer": W.clone()}, lr=0.1))


def test_a_convention_that_nobody_declared_is_never_assumed(unknown):
    manifest, path = unknown
    with pytest.raises(SourceError, match=r"parameter 'w'.*`convention=.ema.` or `convention=.sum.`"):
        translate(manifest, opened(path).values, DIALECTS["torch"])
    with pytest.raises(SourceError, match=r"parameter 'w'.*sum to ema.*`mu=`"):
        translate(manifest, opened(path).values, DIALECTS["torch"], convention=Convention.SUM)
    same = translate(manifest, opened(path).values, DIALECTS["torch"], convention=Convention.EMA)
    assert [output.scale for output in same.tensors] == [None, None]
    other = translate(manifest, opened(path).values, DIALECTS["torch"], convention=Convention.SUM, mu=0.75)
    momentum = executed(path, other)["optimizer.state.w.momentum_buffer"].view("<f4")
    assert np.array_equal(momentum, W.numpy() * np.float32(0.25))
    kept = translate(manifest, opened(path).values, DIALECTS["dcp"])
    assert {output.record.convention for output in kept.tensors} == {None}


def test_a_target_without_a_convention_of_its_own_takes_the_one_asked_for(unknown):
    manifest, path = unknown
    overrides = {"convention": Convention.EMA, "target_convention": Convention.SUM, "mu": 0.5}
    outputs = translate(manifest, opened(path).values, DIALECTS["dcp"], **overrides)
    (momentum,) = (output for output in outputs.tensors if output.record.slot)
    assert (momentum.scale, momentum.record.convention) == (2.0, Convention.SUM)


def test_what_the_user_says_must_not_contradict_the_checkpoint():
    with pytest.raises(SourceError, match="dion says sum, `convention=` says ema"):
        translated("dion_fsdp4/ckpt", "torch", convention=Convention.EMA)
    with pytest.raises(SourceError, match=r"mu=0.95, `mu=` says 0.9"):
        translated("dion_fsdp4/ckpt", "torch", mu=0.9)
    with pytest.raises(SourceError, match="torch says ema, `target_convention=` says sum; leave `target_convention=` "):
        translated("dion_fsdp4/ckpt", "torch", target_convention=Convention.SUM)


def test_a_step_that_is_nowhere_must_be_given(tmp_path):
    state = nested({"exp_avg": W.clone(), "exp_avg_sq": W.clone()})
    state = {
        "model": {"module.w": W},
        "optimizer": {"state": {"module.module.module.w": state["optimizer"]["state"]["w"]}},
    }
    manifest, path = saved(tmp_path, state)
    with pytest.raises(SourceError, match=r"'w'.*stores the number of steps.*give `step=`"):
        translate(manifest, opened(path).values, DIALECTS["torch"])
    outputs = translate(manifest, opened(path).values, DIALECTS["torch"], step=7)
    (counter,) = constants(outputs)
    assert counter.key == "optimizer.state.w.step"
    assert executed(path, outputs)[counter.key].tobytes() == np.float32(7).tobytes()


def test_a_parameter_without_dims_keeps_all_of_its_state(tmp_path):
    slots = {"exp_avg": torch.tensor(0.25), "exp_avg_sq": torch.tensor(0.5), "step": torch.tensor(3.0)}
    manifest, path = saved(tmp_path, nested(slots) | {"model": {"w": torch.tensor(2.0)}})
    result = translate(manifest, opened(path).values, DIALECTS["dion"], source=DIALECTS["torch"])
    moved = {key: value.view("<f4").item() for key, value in executed(path, result).items()}
    assert moved == {"model.w": 2} | {f"optimizer.state.w.{slot}": value
                     for slot, value in (("momentum", 0.25), ("variance", 0.5), ("step_dev", 3.0))}  # fmt: skip


# What there is no place for.


def test_state_without_a_place_in_the_target_is_refused(tmp_path):
    name = "megatron/layer_wise/ws4_padded/torch_dist"
    with pytest.raises(SourceError, match=r"no place for muon with fp32_param, momentum_buffer.*`drop=`"):
        translated(name, "torch", convention=Convention.EMA)
    result = translated(name, "torch", convention=Convention.EMA, drop=frozenset({"fp32_param"}))
    path, _ = read(name)
    found, truth = executed(path, result), truth_of("megatron/layer_wise/ws4_padded")
    *masters, common = result.left_out
    assert common == COMMON_STATE and len(masters) == 12 and all("fp32_param" in key for key in masters)
    for key, words in truth.items():
        if "momentum_buffer" in key:
            assert np.array_equal(found[f"optimizer.state.{key.rpartition('.')[2]}.momentum_buffer"], words)
    manifest, where = saved(tmp_path, nested({"exp_inf": W.clone()}, **TORCH))
    with pytest.raises(SourceError, match="no method of torch"):
        translate(manifest, muonckpt.open(where).values, DIALECTS["dion"])
    manifest, where = saved(tmp_path / "none", nested({"momentum_buffer": None}, **TORCH))
    with pytest.raises(SourceError, match=r"expected a tensor at.*leave momentum_buffer out with `drop=`"):
        translate(manifest, muonckpt.open(where).values, DIALECTS["dion"])
    with pytest.raises(SourceError, match="read but not written"):
        translated("torch_fsdp4/ckpt", "moonlight")


def test_two_things_under_one_key_are_refused(tmp_path):
    """Left as it is, a tensor beside the model may have the name that a weight gets at the top."""
    state = {"x": W, **nested({"momentum_buffer": W.clone()}, **TORCH)}
    state["model"] = {"x": W.clone()}
    manifest, path = saved(tmp_path, state)
    with pytest.raises(SourceError, match="two tensors or items would get the key 'x'"):
        translate(manifest, opened(path).values, DIALECTS["titan"])


@pytest.mark.parametrize("step", [None, "x", 2.5, float("nan"), [1]])
def test_a_step_that_is_no_whole_number_is_refused(step, tmp_path):
    state = nested({"exp_avg": W.clone(), "exp_avg_sq": W.clone(), "step": step}, lr=0.1, betas=(0.9, 0.9))
    manifest, path = saved(tmp_path, state)
    with pytest.raises(SourceError, match="expected a whole number of steps"):
        translate(manifest, opened(path).values, DIALECTS["dion"], source=DIALECTS["torch"])


@pytest.mark.parametrize("target", ["torch_dist", "muonckpt"])
def test_masters_of_layer_wise_training_are_state_of_ours(target, tmp_path):
    masters = {"momentum_buffer": W.clone(), "fp32_param": W.clone()}
    manifest, path = saved(tmp_path, nested(masters, lr=0.1, momentum=0.9, algorithm="muon", convention="ema"))
    made = translate(manifest, opened(path).values, DIALECTS[target], source=DIALECTS["muonckpt"])
    assert {output.record.slot for output in made.tensors} >= {"momentum_buffer", "fp32_param"}


# Names.


def test_a_rule_renames_a_parameter_its_state_and_its_groups():
    rule = NameRule(("layers.{i}.{rest*}",), ("model.layers.{i}.{rest*}",))
    path, manifest = read("torch_fsdp4/ckpt")
    result = translated("torch_fsdp4/ckpt", "torch", rules=NameRules((rule,)))
    found, plain = executed(path, result), executed(path, translated("torch_fsdp4/ckpt", "torch"))
    renamed = {k.replace("model.layers.", "model.model.layers.").replace("state.layers.", "state.model.layers."): v
               for k, v in plain.items()}  # fmt: skip
    assert found.keys() == renamed.keys() and all(np.array_equal(found[key], renamed[key]) for key in found)
    listed = {name for key, names in options(result).items() for name in names}
    assert any(name.startswith("model.layers.1.") for name in listed) and "embed_tokens.weight" in listed
    assert len(result.items) == len(manifest.blobs)


@pytest.mark.parametrize("name", READY_MADE)
def test_ready_made_tables_read_back_and_have_a_way_back(name):
    rules = load_rules(name)
    assert NameRules.from_toml(rules.to_toml()) == rules
    assert load_rules(f"inverse:{name}").inverse() == rules
    with pytest.raises(TargetError, match="none of megatron-swiglu"):
        load_rules("no such table")


def two_groups(lr: float) -> dict:
    slots = {"momentum_buffer": W.clone()}
    groups = [
        {**TORCH, "params": ["a"]},
        {**TORCH, "params": ["b"], "lr": lr},
    ]
    return {"optimizer": {"state": {"a": slots, "b": slots}, "param_groups": groups}}


def test_parts_of_groups_that_differ_are_not_joined(tmp_path):
    rules = NameRules((NameRule(("a", "b"), ("ab",)),))
    manifest, path = saved(tmp_path / "same", two_groups(0.1))
    result = translate(manifest, opened(path).values, DIALECTS["torch"], rules=rules)
    assert options(result) == {"optimizer.param_groups.0.params": ["ab"], "optimizer.param_groups.1.params": []}
    manifest, path = saved(tmp_path / "other", two_groups(0.2))
    with pytest.raises(SourceError, match=r"parts of 'ab' are in groups with lr=0.1 and lr=0.2"):
        translate(manifest, opened(path).values, DIALECTS["torch"], rules=rules)


def test_an_option_that_is_a_tensor_is_read_and_carried(tmp_path):
    state = nested({"momentum_buffer": W.clone()}, **(TORCH | {"lr": torch.tensor(0.25), "momentum": 0.5}))
    manifest, path = saved(tmp_path, state)
    same = translate(manifest, opened(path).values, DIALECTS["torch"])
    assert executed(path, same)["optimizer.param_groups.0.lr"].view("<f4") == 0.25
    assert options(translate(manifest, opened(path).values, DIALECTS["dion"]))["optimizer.param_groups.0.lr"] == 0.25
