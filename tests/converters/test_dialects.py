"""Which program wrote a checkpoint: by its keys, with a reason, or a refusal with the choices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.resharded import make_job
from support.sharded import as_stock
from support.translated import MEGATRON, TORCH, W, nested, options, read, saved, translate, truth_of
from torch.distributed.checkpoint.state_dict import get_state_dict

import muonckpt
from muonckpt import SourceError
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.options import grouped, outputs_of
from muonckpt.converters.target.topology import Target
from muonckpt.converters.translate.groups import GroupTemplate
from muonckpt.converters.translate.request import Request
from muonckpt.names.keys import KeyPlace
from muonckpt.names.vocabulary import Convention
from muonckpt.programs.detection import detect, with_slots, with_slots_of
from muonckpt.programs.dialect import FLAT, Dialect, Keys
from muonckpt.programs.registry import DIALECTS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DETECTED = {"torch_fsdp4/ckpt": "torch", "torch_hsdp2x2/ckpt": "torch", "dion_fsdp4/ckpt": "dion",
            "xtuner_fsdp4/ckpt": "xtuner", "titan_fsdp4/ckpt": "titan", MEGATRON.format("dp4"): "fsdp_dtensor",
            MEGATRON.format("dp4tp2ep2"): "fsdp_dtensor",
            "megatron/layer_wise/ws4_padded/torch_dist": "torch_dist",
            "megatron/layer_wise/ws4_pingpong/torch_dist": "torch_dist"}  # fmt: skip


@pytest.mark.parametrize("name", DETECTED)
def test_real_checkpoints_are_recognised_with_a_reason(name):
    found = detect(read(name)[1])
    assert found.dialect.name == DETECTED[name]
    assert found.reasons and all(found.reasons)


@pytest.mark.parametrize("name", DETECTED)
def test_the_keys_of_real_checkpoints_say_parameter_and_slot(name):
    """Those of every tensor of state that its run had, and of nothing else."""
    folder, had = name.rpartition("/")[0], set()
    for key in truth_of(folder.removesuffix("/iter_0000010")):
        if key.startswith("state/"):
            had.add(tuple(key.split("/")[1:]))
        elif key.startswith("optimizer.state.module.module.module."):
            had.add(tuple(key.removeprefix("optimizer.state.module.module.module.").rsplit(".", 1)))
        elif key.startswith("optimizer.state."):
            had.add(tuple(key.removeprefix("optimizer.state.").split(".")[::-1]))
    known = {(tensor.name, tensor.slot) for tensor in with_slots(read(name)[1]).tensors if tensor.slot}
    assert known == had


def test_keys_that_tell_no_dialect_are_left_alone(tmp_path):
    manifest = saved(tmp_path, {"something": {"else": W}})[0]
    assert with_slots(manifest) == manifest


@pytest.mark.parametrize(
    "state, name",
    [
        (nested({"momentum_buffer": W}, lr=0.1), "dcp"),
        (nested({"momentum_buffer": W}, **TORCH), "torch"),
        (nested({"momentum_buffer": W}, lr=0.1, convention="ema"), "muonckpt"),
        (nested({"momentum_buffer": W, "use_muon": True}, wd=0.1, adamw_betas=(0.9, 0.9), adamw_eps=1e-8), "moonlight"),
        (nested({"momentum_buffer": W, "use_muon": True}, lr=0.1), "dcp"),
        (nested({"momentum_buffer": W}, **TORCH, conv_mode="flatten"), "dcp"),
        ({"optimizer": {"state": {"0": {"momentum_buffer": W}}, "param_groups": [{"params": [0]}]}}, "fully_shard"),
        ({"model": {"w": W}, "optimizer": {"state.w.momentum_buffer": W}}, "dcp"),
        ({"w": W, "optimizer": {"state.w.momentum_buffer": W}}, "dcp"),
        ({"model": {"module.w": W}}, "fsdp_dtensor"),
        ({"model": {"w": W}}, "dcp"),
        ({"optimizer.state.momentum_buffer.w": W, "w": W}, "torch_dist"),
        ({"chained_0.chained_1.optimizer.state.momentum_buffer.w": W, "w": W}, "torch_dist"),
        ({"layer_wise": {"state": {"w": {"momentum_buffer": W}}}, "model": {"w": W}}, "layer_wise"),
    ],
)
def test_keys_that_tell_a_dialect(state, name, tmp_path):
    assert detect(saved(tmp_path, state)[0]).dialect.name == name


@pytest.mark.parametrize(
    "state, message",
    [
        (nested({"momentum": W, "lr_ratio": 1.0, "step_dev": 1}), r"dion \(.*'step_dev'\), xtuner \(.*`from_dialect=`"),
        ({"something": {"else": W}}, "not those of a known dialect"),
        ({"a": {"w": W}, "b": {"w": W}, "optim": {"state.w.momentum_buffer": W}}, "under 'a' and under 'b'.*`select=`"),
    ],
)
def test_keys_that_do_not_tell_are_refused_with_the_choices(state, message, tmp_path):
    with pytest.raises(SourceError, match=message):
        detect(saved(tmp_path, state)[0])


@pytest.mark.parametrize(
    "state, named, message",
    [
        ({"app": {"v": W}}, "torch", "weights nor state: keys of .*'app.v'"),
        (nested({"momentum_buffer": W}, lr=0.1) | {"more": {"state": {"w": {"inner": {"exp_avg": W}}}}}, "torch",
         "'more.state.w.inner.exp_avg' is state of an optimizer that was not understood"),
        ({"model": {"w": W}, "a": nested({"momentum": W})["optimizer"], "b": nested({"momentum": W})["optimizer"]},
         "dion", "'a.state.w.momentum' and 'b.state.w.momentum' are state of parameters of the same name"),
    ],
)  # fmt: skip
def test_state_that_the_program_would_not_find_there_is_not_left_as_it_is(state, named, message, tmp_path):
    manifest, path = saved(tmp_path, state)
    with pytest.raises(SourceError, match=message):
        translate(manifest, muonckpt.open(path).values, DIALECTS["dion"], source=DIALECTS.get(named or ""))


def test_normuon_whose_rows_are_dropped_is_muon(tmp_path):
    state = nested({"momentum": W, "variance_neuron": W[:, :1]}, lr=0.1, mu=0.5, algorithm="normuon")
    manifest, path = saved(tmp_path, state)
    with pytest.raises(SourceError, match="no place for normuon with momentum, variance_neuron"):
        translate(manifest, muonckpt.open(path).values, DIALECTS["torch"])
    made = translate(manifest, muonckpt.open(path).values, DIALECTS["muonckpt"], drop=frozenset({"variance_neuron"}))
    assert options(made)["optimizer.param_groups.0.algorithm"] == "muon"
    assert [output.scale for output in made.tensors if output.record.slot == "momentum_buffer"] == [0.5]
    lacking = nested({"momentum": W}, mu=0.5, epsilon=1e-8, cautious_wd=False, algorithm="normuon")
    manifest, path = saved(tmp_path / "lacking", lacking)
    with pytest.raises(SourceError, match="has momentum in a group of 'normuon': no method"):
        translate(manifest, muonckpt.open(path).values, DIALECTS["torch"])


KELLER = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.95, "nesterov": True, "ns_steps": 5}


@pytest.mark.parametrize(
    "program, slot, group",
    [
        ("torch", "momentum_buffer", KELLER),
        ("torch", "momentum_buffer", TORCH | {"rank": 0}),
        ("titan", "momentum_buffer", KELLER),
        ("veomni", "momentum_buffer", TORCH),
        ("muonckpt", "momentum_buffer", KELLER),
        ("moonlight", "momentum_buffer", KELLER),
        ("dion", "momentum", KELLER | {"algorithm": "muon"}),
        ("xtuner", "momentum", KELLER | {"algorithm": "muon"}),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_a_convention_is_taken_of_no_program_that_the_groups_contradict(program, slot, group, flat, tmp_path):
    """Keller Jordan's momentum is a sum under torch's names: taken for torch's average, it would be 20 times too large.

    The same holds beside a group that is the program's, by which it would be detected.
    """
    state = nested({slot: W.clone()}, **group)
    if flat:
        options = {f"param_groups.w.{option}": value for option, value in group.items()}
        state["optimizer"] = {f"state.w.{slot}": W.clone(), **options}
    target = "dion" if program == "muonckpt" else "muonckpt"
    saved(tmp_path, state)
    asked = {"from_dialect": program, "to_dialect": target, "mu": 0.95, "step": 3}
    with pytest.raises(SourceError, match=rf"'w': momentum of {program} is .*`convention=.ema.` or `convention=.sum.`"):
        muonckpt.convert(tmp_path / "checkpoint", tmp_path / "out", **grouped(**asked))
    for given in Convention:
        muonckpt.convert(tmp_path / "checkpoint", tmp_path / given, **grouped(**asked, convention=given))
        (found,) = (t for t in muonckpt.open(tmp_path / given).tensors.values() if t.record.slot is not None)
        kept = "sum" if target == "dion" else "ema"
        scale = 1.0 if given == kept else 1 - 0.95 if kept == "ema" else 1 / (1 - 0.95)
        assert torch.equal(torch.from_numpy(found.numpy().copy()), (W.double() * scale).float())


# Groups with momentum as other public programs write them, in plain data: each bears marks of a program that we know.
RATES = {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95}
OLD_SCRIPT = {"nesterov": True, "ns_steps": 6, "adamw_betas": (0.95, 0.95), "adamw_eps": 1e-8}
STRANGERS = {
    "timm": ({"use_muon": True}, RATES | {"nesterov": False, "ns_steps": 5, "ns_coefficients": "quintic", "eps": 1e-7,
             "safety_factor": 1.0, "adjust_lr_fn": "rms_to_rms", "conv_mode": "flatten", "betas": (0.9, 0.95),
             "normalize_spatial": True, "fallback_lr_scale": 1.0, "algo": "muon", "scale_eps": False}, "conv_mode"),
    "pytorch_optimizer 4": ({}, RATES | {"use_muon": True, "nesterov": False, "ns_steps": 3, "use_adjusted_lr": True,
             "ns_coeffs": [(3.4, -4.7, 2.0)], "ns_method": "newton_schulz", "foreach": None}, "use_adjusted_lr"),
    "pytorch_optimizer 3": ({"use_muon": True, "moment1": W.clone()}, {"lr": 0.02, "momentum": 0.95, "step": 3,
             "adamw_lr": 3e-4, "adamw_lr_ratio": 0.015, "adamw_wd": 0.0, **OLD_SCRIPT}, "adamw_lr_ratio"),
    "dion2": ({"step_dev": torch.tensor(3.0)}, {"lr": 0.02, "ef_decay": 0.95, "fraction": 0.25, "beta1": 0.9,
             "beta2": 0.95, "weight_decay": 0.0, "epsilon": 1e-8, "algorithm": "dion2", "step": 3}, "ef_decay"),
    "nordion2": ({"variance_neuron": W[:, :1].clone()}, {"lr": 0.02, "mu": 0.95, "muon_beta2": 0.95, "algorithm":
             "nordion2", "fraction": 0.5, "step": 3, "epsilon": 1e-8, "selection_scope": "rank"}, "selection_scope"),
    "a fork of VeOmni": ({}, TORCH | {"ns_coefficients": [3.4, -4.7, 2.0], "ns_implementation": "std",
             "gram_ns_reset_iterations": (2,), "head_group": 4}, "head_group"),
}  # fmt: skip


@pytest.mark.parametrize("program", STRANGERS)
@pytest.mark.parametrize("flat", [False, True])
def test_an_option_that_a_program_never_writes_voids_its_claim(program, flat, tmp_path):
    """In `inspect` too; and the options are not read as those of the program that was ruled out."""
    slots, group, stranger = STRANGERS[program]
    state = nested({"momentum_buffer": W.clone(), **slots}, **group)
    if flat:
        state["optimizer"] = {f"state.w.{slot}": value for slot, value in state["optimizer"]["state"]["w"].items()}
        state["optimizer"] |= {f"param_groups.w.{option}": value for option, value in group.items()}
    manifest, path = saved(tmp_path, state)
    found = detect(manifest)
    assert (found.dialect.name, found.dialect.convention) == ("dcp", None)
    assert repr(stranger) in found.reasons[-1] and "`from_dialect=`" in found.reasons[-1]
    seen = muonckpt.inspect(path)
    assert seen.dialect["name"] == "dcp" and repr(stranger) in seen.dialect["reasons"][-1]


def test_options_of_no_known_program_are_read_by_name_and_kind_and_the_others_told(tmp_path):
    _, group, _ = STRANGERS["pytorch_optimizer 4"]
    manifest, path = saved(tmp_path, nested({"momentum_buffer": W.clone()}, **group, cautious=True))
    values, asked = muonckpt.open(path).values, {"convention": Convention.EMA}
    made = translate(manifest, values, DIALECTS["muonckpt"], **asked)
    said = options(made)
    assert said["optimizer.param_groups.0.nesterov"] is False and said["optimizer.param_groups.0.ns_steps"] == 3
    told = {check.subject.removesuffix(" of muon groups"): check for check in made.checklist if check.action == "left"}
    assert "no counterpart" in told["use_adjusted_lr"].reason and "this name" in told["cautious"].reason
    named = translate(manifest, values, DIALECTS["muonckpt"], source=DIALECTS["deepspeed"], **asked)
    told = {check.subject.removesuffix(" of muon groups"): check for check in named.checklist if check.action == "left"}
    assert all("this name" in told[option].reason for option in ("nesterov", "ns_steps"))


@pytest.mark.parametrize(
    "program, group, expected",
    [
        ("torch", TORCH | {"ns_coefficients": "quintic"}, "three numbers"),
        ("torch", TORCH | {"nesterov": "False"}, "True or False"),
        ("veomni", TORCH | {"ns_implementation": "std", "gram_ns_reset_iterations": "2"}, "whole numbers"),
        ("dion", {"lr": 0.02, "algorithm": "muon", "mu": "0.95", "cautious_wd": False, "epsilon": 1e-8}, "a number"),
        ("deepspeed", RATES | {"use_muon": True, "ns_method": 5}, "a word"),
        ("moonlight", {"wd": 0.1, "momentum": 0.95, "adamw_betas": 0.9, "adamw_eps": 1e-8}, "two numbers"),
    ],
)
def test_a_value_of_another_kind_than_the_programs_voids_its_claim(program, group, expected, tmp_path):
    slots = {"momentum_buffer": W.clone(), **({"use_muon": True} if program == "moonlight" else {})}
    manifest, path = saved(tmp_path, nested(slots, **group))
    assert detect(manifest).dialect.name == program  # by the names alone
    seen = muonckpt.inspect(path)
    assert seen.dialect["name"] == "dcp" and expected in seen.dialect["reasons"][-1]
    values = muonckpt.open(path).values
    with pytest.raises(SourceError, match=r"unknown; give `convention=|fits; muonckpt.convert leaves a slot out"):
        translate(manifest, values, DIALECTS["muonckpt"], drop=frozenset({"use_muon"} & slots.keys()))
    if program == "torch":
        with pytest.raises(SourceError, match=rf"not {expected} as the program does.*give `convention="):
            translate(manifest, values, DIALECTS["muonckpt"], source=DIALECTS["torch"])
        for source in ("torch", "dcp"):
            asked = {"source": DIALECTS[source], "convention": Convention.EMA}
            made = translate(manifest, values, DIALECTS["muonckpt"], **asked)
            assert any(f"expected {expected}" in check.reason for check in made.checklist)
            assert options(made)["optimizer.param_groups.0.ns_coefficients"] in ("quintic", "keller", (1.5, -0.5, 0.0))
            assert options(made)["optimizer.param_groups.0.nesterov"] is True


@pytest.mark.parametrize("name", DIALECTS)
def test_the_options_that_a_program_writes_are_of_its_kinds(name):
    dialect = DIALECTS[name]
    for method in dialect.methods:
        written = {**method.inert_options, **method.default_options}
        assert not dialect.misfits({option: value for option, value in written.items() if value is not None})


def test_a_group_of_another_program_beside_that_of_a_known_one_is_not_taken_for_its(tmp_path):
    """Also without --from: one group has all marks of ours, the other has none."""
    groups = [{"params": ["w"], "convention": "ema", "algorithm": "muon"}, {"params": ["v"], **KELLER}]
    states = {name: {"momentum_buffer": W.clone()} for name in ("w", "v")}
    manifest, path = saved(tmp_path, {"optimizer": {"state": states, "param_groups": groups}})
    with pytest.raises(SourceError, match="'v': momentum of muonckpt is ema, but the group lacks 'convention'"):
        translate(manifest, muonckpt.open(path).values, DIALECTS["torch"])
    groups[1] = {"params": ["v"], "convention": "sum", "algorithm": "muon"}
    manifest, path = saved(tmp_path / "said", {"optimizer": {"state": states, "param_groups": groups}})
    with pytest.raises(SourceError, match="'v': muonckpt says ema, its group says sum"):
        translate(manifest, muonckpt.open(path).values, DIALECTS["torch"])


@pytest.mark.parametrize("source, overrides", [("dion", {}), ("torch", {"target_convention": Convention.SUM})])
def test_a_sum_under_the_keys_of_no_program_is_not_taken_for_the_average_of_one(source, overrides, tmp_path):
    """What torch alone writes says as well that its momentum is an average."""
    path = read(f"{source}_fsdp4/ckpt")[0]
    request = Request(target=DIALECTS["dcp"], **overrides)
    job = make_job(path, Target({"dp": 2}), make_outputs=outputs_of(request))
    run_job(job, tmp_path / "out")
    as_stock(tmp_path / "out")
    found = detect(muonckpt.open(tmp_path / "out").outline)
    assert (found.dialect.name, found.dialect.convention) == ("dcp", None)


@pytest.mark.parametrize(
    "momentum, message", [(None, "give `mu=`"), ("x", "expected a number as momentum .*found 'x'")]
)
def test_a_coefficient_that_is_no_number_is_not_one(momentum, message, tmp_path):
    state = nested({"momentum_buffer": W.clone()}, **(TORCH | {"momentum": momentum}))
    manifest, path = saved(tmp_path, state)
    with pytest.raises(SourceError, match=message):
        values, asked = muonckpt.open(path).values, {"convention": Convention.EMA}
        translate(manifest, values, DIALECTS["dion"], source=DIALECTS["torch"], **asked)


# Numbers for names.


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.AdamW])
def test_parameters_get_the_numbers_that_the_optimizer_itself_gives(kind, tmp_path):
    """Matrices of one shape, in groups of another order: by a wrong number momentum would fit, and be another's."""
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.randn(4, 3)) for name in "abcd"})
    optimizer = kind([{"params": [model["c"], model["a"]]}, {"params": [model["d"], model["b"]], "lr": 0.5}])
    for param in model.values():
        param.grad = torch.randn(4, 3)
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "named", no_dist=True)
    report = muonckpt.convert(tmp_path / "named", tmp_path / "numbered", to_dialect="fully_shard")
    assert any(check.values == ("0 c", "1 a", "2 d", "3 b") for check in report.checklist)
    own = optimizer.state_dict()
    found = kind([{"params": [torch.nn.Parameter(torch.zeros(4, 3)) for _ in range(2)]} for _ in range(2)])
    for param in (param for group in found.param_groups for param in group["params"]):
        param.grad = torch.zeros(4, 3)
    found.step()
    read_back = {"optimizer": found.state_dict()}
    dcp.load(read_back, checkpoint_id=tmp_path / "numbered", no_dist=True)
    assert repr(read_back["optimizer"]) == repr(own)
    muonckpt.convert(tmp_path / "numbered", tmp_path / "back", to_dialect="torch")
    assert not muonckpt.diff(tmp_path / "named", tmp_path / "back").differs


def test_a_number_is_never_a_guess(tmp_path):
    """By name there is no order; a template of the run's groups gives it."""
    manifest, path = saved(tmp_path, {"model": {"w": W, "v": W}, "optimizer": {
        f"state.{name}.momentum_buffer": W * scale for name, scale in (("v", 1), ("w", 2))}
        | {f"param_groups.{name}.{option}": value for name in "vw" for option, value in TORCH.items()}})  # fmt: skip
    values, target = muonckpt.open(path).values, DIALECTS["fully_shard"]
    with pytest.raises(SourceError, match=r"without an order; give that order with `like=`"):
        translate(manifest, values, target)
    like = GroupTemplate.read({"param_groups": [{"params": ["w"]}, {"params": ["v"]}]})
    made = {tensor.key: tensor for tensor in translate(manifest, values, target, like=like).tensors}
    assert made["optimizer.state.0.momentum_buffer"].record.name == "w"
    assert made["optimizer.state.1.momentum_buffer"].record.name == "v"
    bare, path = saved(tmp_path / "bare", {"model": {"w": W}, "optimizer": {"state": {"w": {"momentum_buffer": W}}}})
    with pytest.raises(SourceError, match=r"does not say what its groups are; give that order with `like=`"):
        translate(bare, muonckpt.open(path).values, target)
    listed = nested({"momentum_buffer": W}, **TORCH)
    listed["optimizer"]["param_groups"].insert(0, {"params": ["idle"], "lr": 0.1})
    manifest, path = saved(tmp_path / "idle", listed)
    with pytest.raises(SourceError, match=r"'idle'.* all numbers after them would be wrong"):
        translate(manifest, muonckpt.open(path).values, target)


# Keys.


@pytest.mark.parametrize("name", DIALECTS)
def test_what_keys_write_they_read(name):
    """Names with dots, with digits, and with parts that look like a slot."""
    dialect = DIALECTS[name]
    for param in ("7", "31") if dialect.numbered else ("w", "a.b.weight", "layers.0.state.exp_avg", "module.x.step"):
        keys = dialect.keys
        found = keys.read_state(keys.write_state(param, "momentum_buffer"))
        assert found is not None and (found.name, found.leaf) == (param, "momentum_buffer")
        assert keys.read_weight(keys.write_weight(param)) == (param, "", "", False)


@pytest.mark.parametrize(
    "write",
    [
        lambda: Keys((FLAT,)).write_state("w", "a.b"),
        lambda: DIALECTS["fully_shard"].keys.write_state("w", "a"),
        lambda: Keys().write_state("", "a"),
        lambda: Keys().write_state("w", ""),
        lambda: Keys().write_weight(""),
        lambda: Keys(models=(KeyPlace(("model0",)), KeyPlace(("model1",)))).write_weight("w", "model2"),
        lambda: DIALECTS["torch_dist"].keys.write_weight("chained_0.optimizer.state.x"),
        lambda: DIALECTS["torch_dist"].keys.write_weight(""),
    ],
)
def test_what_could_not_be_read_back_is_not_written(write):
    with pytest.raises(SourceError, match="cannot hold"):
        write()


# Every program.

# Options of a group that have no value in a new optimizer of their program.
SAID = dict.fromkeys(("lr", "weight_decay", "wd", "eps", "adamw_eps"), 0.125) | {"nesterov": True, "ns_steps": 5}
SAID |= dict.fromkeys(("momentum", "mu", "beta1", "beta2"), 0.75) | dict.fromkeys(("betas", "adamw_betas"), (0.75, 0.5))
SAID |= {"step": 3, "flatten": False, "use_muon": True}


def checkpoint_of(dialect: Dialect) -> dict:
    """A state dict with a matrix and a vector as the program's table says, each in a group of its own."""
    tree = {}
    for number, (kind, shape) in enumerate({"muon": (4, 3), "adamw": (3,)}.items()):
        method = min((method for method in dialect.methods if method.name == kind), key=lambda m: len(m.slots))
        name, chain = f"layers.0.{kind}", dialect.chains.get(kind, "")
        known, entries = str(number) if dialect.numbered else name, {dialect.keys.write_weight(name): torch.ones(shape)}
        for slot in (*method.slots.values(), *dialect.derived):
            value = torch.tensor(3.0) if slot in dialect.slots_called("step") else torch.randn(shape)
            value = 1.0 if slot in dialect.derived else value
            entries[dialect.keys.write_state(known, slot, chain)] = value
        required = [o for coding in method.encodings if not coding.optional for o in coding.options]
        options = {**method.inert_options, **method.default_options}
        unknown = [option for option in (*options, *required) if options.get(option) is None]
        options |= {option: SAID[option] for option in unknown if option in SAID or option not in options}
        options = {option: value for option, value in options.items() if option not in dialect.unwritten_options}
        options |= {dialect.method_option: kind} if dialect.method_option else {}
        if dialect.common is None and dialect.keys.listed:
            group = {"params": [number if dialect.numbered else name], "param_names": [name], **options}
            entries[dialect.keys.write_option(str(number), "params")[:-1]] = group
        for option, value in options.items() if dialect.common is None and not dialect.keys.listed else ():
            entries[dialect.keys.write_option(known, option)] = value
        for path, value in entries.items():
            *parents, last = path
            node = tree
            for part in parents:
                node = node.setdefault(part, {})
            node[last] = value
    return tree


def state_in(path, dialect: Dialect) -> dict[tuple[str, str], np.ndarray]:
    """The state of the two parameters by the common names of slots, which differ from method to method."""
    found = {}
    with muonckpt.open(path) as opened:
        for tensor in with_slots_of(opened.manifest, detect(opened.manifest).dialect).tensors:
            if tensor.slot is not None:
                kind = {"0": "muon", "1": "adamw"}.get(tensor.name, tensor.name.rpartition(".")[2])
                names = {slot: c for m in dialect.methods if m.name == kind for c, slot in m.slots.items()}
                found[kind, names[tensor.slot]] = opened.tensors[tensor.key].numpy()
    return found


@pytest.mark.parametrize("name", DIALECTS)
def test_the_state_of_every_program_is_recognised_goes_to_ours_and_comes_back(name, tmp_path):
    """A program is tried as soon as it is registered.  The sum of a coefficient of 0.75 is 4 times the average."""
    dialect = DIALECTS[name]
    manifest, path = saved(tmp_path, checkpoint_of(dialect))
    assert detect(manifest).dialect.name == name.removesuffix("_chained")
    asked = grouped(convention=None if dialect.convention else "ema", step=3)
    muonckpt.convert(path, tmp_path / "ours", to_dialect="muonckpt", **asked)
    state, ours = state_in(path, dialect), state_in(tmp_path / "ours", DIALECTS["muonckpt"])
    factors = {("muon", "momentum"): 0.25 if dialect.convention is Convention.SUM else 1}
    for key in (("muon", "momentum"), ("adamw", "first"), ("adamw", "second")):
        assert np.array_equal(ours[key], state[key] * factors.get(key, 1)) and state[key].all(), key
    if dialect.writable:
        muonckpt.convert(tmp_path / "ours", tmp_path / "back", to_dialect=name)
        back = state_in(tmp_path / "back", dialect)
        assert back.keys() == state.keys() and all(np.array_equal(back[key], state[key]) for key in state)
