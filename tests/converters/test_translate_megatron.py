"""Megatron's fsdp_dtensor in the keys of any other program and back, with the ready-made tables."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from support.continued import load_ours
from support.golden import golden
from support.translated import MEGATRON, copied, executed, options, read, translated, truth_of, words_apart

import muonckpt
from muonckpt import SourceError, TargetError
from muonckpt.converters.options import grouped
from muonckpt.converters.translate.names import load_rules
from muonckpt.names.vocabulary import GROUP_OPTIONS, Convention
from muonckpt.optimizer import LayerWise, Muon
from muonckpt.programs.signs import COMMON_STATE

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*did not say options")


def megatron(name: str) -> tuple:
    path, _ = read(MEGATRON.format(name))
    return path, truth_of(f"megatron/fsdp_dtensor/{name}")


@pytest.mark.parametrize("name", ["dp4", "dp4tp2ep2"])
def test_megatron_halves_and_experts_are_joined_and_come_apart_again(name):
    path, truth = megatron(name)
    rules = load_rules("megatron-swiglu") + load_rules("megatron-experts")
    result = translated(MEGATRON.format(name), "dcp", rules=rules)
    found = executed(path, result)
    seen = set()
    for key, words in found.items():
        if key.startswith("model."):
            seen |= check_megatron(truth, key.removeprefix("model."), "model.module.{}", words)
        elif key.startswith("optimizer.state."):
            param, slot = key.removeprefix("optimizer.state.").rsplit(".", 1)
            if slot == "step":  # in the metadata of the group there
                assert words.view("<f4") == 10
                continue
            seen |= check_megatron(truth, param, f"optimizer.state.module.module.module.{{}}.{slot}", words)
    assert seen == {key for key in truth if not key.startswith("rng_state")}
    groups = options(result)
    listed = [name for key, names in groups.items() if key.endswith(".params") for name in names]
    params = {key.removeprefix("optimizer.state.").rsplit(".", 1)[0] for key in found if key.startswith("optimizer.")}
    assert sorted(listed) == sorted(params)


def check_megatron(truth, param, key, words) -> set[str]:
    """Compare a joined tensor with its parts in the truth; the keys of those."""

    def halves(name):
        whole = key.format(name)
        return [whole] if whole in truth else [key.format(f"{name}_{half}") for half in "wv"]

    if ".experts.linear_" in param:
        parts = [halves(f"{param}{expert}") for expert in range(4)]
        assert np.array_equal(words, np.stack([np.concatenate([truth[k] for k in keys]) for keys in parts]))
        return {k for keys in parts for k in keys}
    keys = halves(param)
    assert np.array_equal(words, np.concatenate([truth[k] for k in keys]))
    return set(keys)


@pytest.mark.parametrize("name", ["dp4", "dp4tp2ep2"])
def test_megatron_there_and_back_is_the_same_checkpoint(name):
    """Rules and their inverse in one table: every tensor under its key, every group as it was."""
    path, truth = megatron(name)
    _, manifest = read(MEGATRON.format(name))
    forth = load_rules("megatron-swiglu") + load_rules("megatron-experts")
    back = load_rules("inverse:megatron-experts") + load_rules("inverse:megatron-swiglu")
    result = translated(MEGATRON.format(name), "fsdp_dtensor", rules=forth + back)
    found = executed(path, result)
    for key, words in truth.items():
        if not key.startswith("rng_state"):
            assert np.array_equal(found[key], words), key
    assert copied(result).keys() == {blob.key for blob in manifest.blobs}


EXPERTS = "decoder.layers.1.mlp.experts.{}linear_fc{}.weight{}"


def test_named_experts_become_those_of_torch_dist_and_come_home(tmp_path):
    """All in one tensor, or one by one: as Megatron's own factories name and order what it saves."""
    path, truth = megatron("dp4tp2ep2")
    state = {"": "model.module.{}", "momentum_buffer": "optimizer.state.module.module.module.{}.momentum_buffer"}
    for table in ("torch-dist-experts", "torch-dist-singletons"):
        out, home = tmp_path / table, tmp_path / f"{table} home"
        muonckpt.convert(path, out, **grouped(to_dialect="torch_dist_chained", rules=["megatron-swiglu", table]))
        back = [f"inverse:{table}", "inverse:megatron-swiglu"]
        muonckpt.convert(out, home, **grouped(to_dialect="fsdp_dtensor", rules=back, step=10))
        found, arrived = muonckpt.open(out).tensors, muonckpt.open(home).tensors
        for slot, key in state.items():
            prefix = f"chained_0.optimizer.state.{slot}." if slot else ""
            for expert in range(4):
                gate, up = (truth[key.format(EXPERTS.format("", 1, f"{expert}_{half}"))] for half in "wv")
                down = truth[key.format(EXPERTS.format("", 2, expert))]
                if table == "torch-dist-experts":
                    name = EXPERTS.format("experts.", "{}", "")
                    parts = {name.format(1): np.concatenate([gate, up]), name.format(2): down}
                    mine = {name: found[prefix + name].bits()[expert] for name in parts}
                else:
                    name = EXPERTS.format(f"experts.{expert}.", "{}", "{}")
                    parts = {name.format(1, "_w"): gate, name.format(1, "_v"): up, name.format(2, ""): down}
                    mine = {name: found[prefix + name].bits() for name in parts}
                for name, words in parts.items():
                    assert np.array_equal(mine[name], words), (table, name)
            for name, words in truth.items():
                if name.startswith(key.partition("{}")[0]) and name.endswith(slot):
                    assert np.array_equal(arrived[name].bits(), words), (table, name)


def test_megatron_momentum_in_the_convention_of_another_program():
    """The coefficient is in the metadata of the whole, the momentum in two halves."""
    path, truth = megatron("dp4")
    rules = load_rules("megatron-swiglu")
    with pytest.raises(SourceError, match="`convention="):
        translated(MEGATRON.format("dp4"), "dion", rules=rules)
    result = translated(MEGATRON.format("dp4"), "dion", rules=rules, convention=Convention.EMA)
    found = executed(path, result)
    mlp = "decoder.layers.0.mlp.linear_fc1.weight"
    state = f"optimizer.state.module.module.module.{mlp}"
    whole = np.concatenate([truth[f"{state}_{half}.momentum_buffer"] for half in "wv"]).view("<f4").astype(np.float64)
    meta = {blob.key: blob for blob in read(MEGATRON.format("dp4"))[1].blobs}
    mu = muonckpt.open(path).values.item(meta[f"optimizer.param_to_group_meta.module.module.module.{mlp}.momentum"])
    want = (whole / (1 - mu)).astype("<f4").view("<u4")
    assert words_apart(found[f"optimizer.state.{mlp}.momentum"], want) <= 1


def test_megatron_groups_say_in_our_words_what_megatron_says_and_the_defaults_of_the_rest():
    overrides = {"convention": Convention.EMA}
    rules = load_rules("megatron-swiglu")
    result = translated(MEGATRON.format("dp4"), "muonckpt", rules=rules, **overrides)
    found = options(result)
    checklist = {check.subject for check in result.checklist}
    of_megatron = {"lr", "weight_decay", "momentum", "betas", "eps", "params", "max_lr", "min_lr"}
    for number in {key.split(".")[2] for key in found}:
        mine = {key.split(".", 3)[3]: value for key, value in found.items() if key.split(".")[2] == number}
        made_up = {o: value for o, value in mine.items() if o not in of_megatron | {"algorithm", "param_names"}}
        defaults = GROUP_OPTIONS[mine["algorithm"]]
        assert made_up == {o: defaults[o] for o in made_up} and mine.keys() >= defaults.keys()
        listed = {f"{option} of {mine['algorithm']} groups" for option in made_up.keys() - {"convention"}}
        assert listed <= checklist


class Layers(torch.nn.Module):
    """The parameters of the layer-wise runs of Megatron."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((p * gradients[name].to(p.dtype)).sum() for name, p in self.named_parameters())


SHAPES = {
    f"l{layer}_{part}": shape
    for layer in range(3)
    for part, shape in {"qkv": (48, 16), "proj": (16, 16), "fc1": (80, 16), "fc2": (16, 40)}.items()
}


def widest(rows: int, columns: int) -> float:
    return max(rows, columns) ** 0.5


def continued(path: str, dtype: torch.dtype, layer_wise: bool) -> dict[str, torch.Tensor]:
    """What a step makes of a checkpoint: the weights, and the masters if there are."""
    model = Layers(dtype)
    how = {"lr": 7.0, "adjust_lr_fn": widest, "ns_coefficients": "quintic", "ns_dtype": "float32"}
    groups = [{"params": list(model.parameters())}]
    optimizer = LayerWise(model, groups, **how) if layer_wise else Muon(groups, **how)
    load_ours(model, optimizer, path)
    generator = torch.Generator().manual_seed(0)
    model({name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}).backward()
    optimizer.step()
    state = {name: optimizer.state[p] for name, p in model.named_parameters()}
    return {name: state[name].get("fp32_param", p).detach() for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
@pytest.mark.filterwarnings("ignore:group 0 keeps")
def test_megatrons_layer_wise_run_goes_on_in_muon_and_in_layer_wise_of_any_dtype(tmp_path):
    """Masters as they are, as weights, or left out: the same update, of the same point or of the rounded one."""
    source = golden("megatron/layer_wise/ws4_padded") / "torch_dist"
    ways = {"kept": {}, "masters": {}, "model": {"state_dtype": "bfloat16"}}
    for way, more in ways.items():
        weights = None if way == "kept" else way
        report = muonckpt.convert(
            source,
            tmp_path / way,
            **grouped(to_dialect="muonckpt", convention="ema", weights=weights, **more),
        )
        assert COMMON_STATE in report.left_out
    kept = continued(tmp_path / "kept", torch.bfloat16, layer_wise=True)
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    truth = truth_of("megatron/layer_wise/ws4_padded")
    for layer_wise in (True, False):
        result = continued(tmp_path / "masters", torch.float32, layer_wise)
        for name, tensor in result.items():
            before = torch.from_numpy(truth[f"optimizer.state.fp32_param.{name}"].view("<f4").copy())
            # The gradients of a 16-bit model are rounded.
            assert torch.linalg.norm(tensor - kept[name]) < 2e-2 * torch.linalg.norm(tensor - before)
    assert {tensor.dtype for tensor in continued(tmp_path / "model", torch.bfloat16, False).values()} == {
        torch.bfloat16
    }
    with muonckpt.open(tmp_path / "model") as found:
        for name in SHAPES:
            rounded = torch.from_numpy(truth[f"optimizer.state.momentum_buffer.{name}"].view("<f4").copy()).bfloat16()
            tensor = found.tensors[f"optimizer.state.{name}.momentum_buffer"]
            assert tensor.dtype == "bfloat16" and np.array_equal(tensor.numpy(), rounded.float().numpy())
    with pytest.raises(TargetError, match="no float32 masters"):
        muonckpt.convert(tmp_path / "masters", tmp_path / "x", **grouped(weights="masters"))
    with pytest.raises(SourceError, match='weights="masters"'):
        muonckpt.convert(source, tmp_path / "x", to_dialect="torch")


LION = "upstream/torch_dist_muon_lion/ckpt"
NORM, MATRIX = "decoder.final_layernorm.weight", "decoder.layers.mlp.linear_fc2.weight"


class Normalized(torch.nn.Module):
    """The parameter of Megatron's run that Lion steps, and one of its matrices."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.decoder = torch.nn.Module()
        self.decoder.final_layernorm = torch.nn.LayerNorm(8, bias=False, dtype=dtype)


def test_lion_of_megatron_steps_on_in_ours_and_comes_home(tmp_path):
    """Its one average, its rates and its masters; the next step has the bits of the published algorithm."""
    ours, home = tmp_path / "ours", tmp_path / "home"
    options = {"to_dialect": "muonckpt", "convention": "ema"}
    muonckpt.convert(golden(LION), ours, **grouped(weights="masters", **options))
    with muonckpt.open(golden(LION)) as opened:
        prefix = "chained_1.optimizer.state.{}." + NORM
        weight = torch.from_numpy(opened.tensors[prefix.format("fp32_param")].numpy())
        average = torch.from_numpy(opened.tensors[prefix.format("exp_avg")].numpy())
    model = Normalized(torch.float32)
    optimizer = Muon([{"params": [*model.named_parameters()], "algorithm": "lion", "lr": 9.0}])
    with pytest.warns(UserWarning, match=r"betas=\(0.9, 0.98\), not .*lr=0.0003, not 9.0"):
        load_ours(model, optimizer, ours, allow_extra=["*linear*"])
    gradient = torch.randn(8, generator=torch.Generator().manual_seed(0))
    model.decoder.final_layernorm.weight.grad = gradient.clone()
    optimizer.step()
    stepped = weight * (1 - 3e-4 * 0.1) - 3e-4 * average.lerp(gradient, 1 - 0.9).sign()
    assert torch.equal(model.decoder.final_layernorm.weight.detach(), stepped)
    (state,) = optimizer.state.values()
    assert torch.equal(state["exp_avg"], average.lerp(gradient, 1 - 0.98))

    muonckpt.convert(golden(LION), tmp_path / "masters", **grouped(**options))
    muonckpt.convert(tmp_path / "masters", home, **grouped(to_dialect="torch_dist_chained", format="torch_dist"))
    with muonckpt.open(golden(LION)) as before, muonckpt.open(home) as after:
        assert before.tensors.keys() == after.tensors.keys()
        for key, tensor in before.tensors.items():
            assert np.array_equal(after.tensors[key].bits(), tensor.bits()), key
        (blob,) = after.outline.blobs
        optimizers = after.values.item(blob)[0]["optimizer"]
    (muon,), (lion,) = (optimizers[number]["optimizer"]["param_groups"] for number in (0, 1))
    assert (muon["lr"], muon["momentum"], muon["weight_decay"]) == (0.02, 0.95, 0.1)
    assert (lion["lr"], lion["betas"], lion["weight_decay"]) == (3e-4, (0.9, 0.98), 0.1)
    assert not {"step", "eps"} & lion.keys()


def test_adamw_that_lost_its_squares_is_not_taken_for_lion(tmp_path):
    prefix = "module.module.module."
    state = {f"{prefix}norm": {"exp_avg": torch.ones(3)}}
    meta = {f"{prefix}norm": {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "step": 3}}
    checkpoint = {"model": {"module.norm": torch.ones(3)}, "optimizer": {"state": state, "param_to_group_meta": meta}}
    torch.distributed.checkpoint.save(checkpoint, checkpoint_id=tmp_path / "run", no_dist=True)
    with pytest.raises(SourceError, match=r"'norm' has exp_avg as lion .* its group has 'eps', which lion lacks"):
        muonckpt.convert(tmp_path / "run", tmp_path / "ours", to_dialect="muonckpt")
    assert [row["method"] for row in muonckpt.inspect(tmp_path / "run").optimizer] == ["unknown"]
    copy = tmp_path / "copy"
    muonckpt.convert(tmp_path / "run", copy, **grouped(select=["model.*"]))
    muonckpt.convert(copy, tmp_path / "weights", to_dialect="muonckpt")


def test_two_methods_do_not_become_one_optimizer_of_megatron(tmp_path):
    parameters = {name: torch.nn.Parameter(torch.ones(3)) for name in ("adamw", "lion")}
    optimizer = Muon([{"params": [(name, p)], "algorithm": name, "lr": 0.1} for name, p in parameters.items()])
    state = {name: optimizer.state[p] for name, p in parameters.items()}
    groups = [{**group, "params": [group["algorithm"]]} for group in optimizer.param_groups]
    weights = {name: p.data for name, p in parameters.items()}
    muonckpt.save({"model": weights, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "ours")
    options = grouped(to_dialect="torch_dist_chained", format="torch_dist")
    with pytest.raises(SourceError, match="adamw and lion would both be chained_1 of torch_dist_chained"):
        muonckpt.convert(tmp_path / "ours", tmp_path / "out", **options)
    # The cure of the message.
    chosen = ["model.*", "optimizer.state.adamw.*", "optimizer.param_groups.0.*"]
    muonckpt.convert(tmp_path / "ours", tmp_path / "chosen", **grouped(select=chosen))
    muonckpt.convert(tmp_path / "chosen", tmp_path / "out", **options)


def test_groups_in_the_common_state_are_written_for_another_form_and_all_else_in_it_stays(tmp_path):
    """A copied item kept the groups of two optimizers where the keys of state were of one."""
    plain, at = tmp_path / "plain", tmp_path / "source"
    rates = {MATRIX: 0.02, NORM: 3e-4}
    muonckpt.convert(golden(LION), at, **grouped(to_dialect="torch_dist_chained", convention="ema", weights="model"))
    for step, program in enumerate(("fsdp_dtensor", "torch_dist_chained", "fsdp_dtensor", "torch_dist")):
        out, ours = tmp_path / f"{step}", tmp_path / f"{step}-ours"
        muonckpt.convert(at, out, **grouped(to_dialect=program))
        with muonckpt.open(out) as opened:
            (common,) = [opened.values.item(blob)[0] for blob in opened.outline.blobs if blob.key == COMMON_STATE]
        assert common["iteration"] == 5
        muonckpt.convert(out, ours, **grouped(to_dialect="muonckpt"))
        assert rates.items() <= rates_of(ours).items()
        at = out

    # An item with more than plain data is not written again, and the cure keeps groups and state.
    shutil.copytree(golden(LION), plain)
    common = torch.load(plain / "common.pt", weights_only=True)
    torch.save({**common, "size": torch.Size([3])}, plain / "common.pt")
    options = {"convention": "ema", "weights": "model"}
    fsdp, ours, chained = tmp_path / "fsdp", tmp_path / "ours", grouped(to_dialect="torch_dist_chained")
    muonckpt.convert(plain, fsdp, **grouped(to_dialect="fsdp_dtensor", **options))
    with pytest.raises(SourceError, match=r"cannot be rewritten for torch_dist_chained: .*the source to muonckpt"):
        muonckpt.convert(fsdp, tmp_path / "out", **chained)
    muonckpt.convert(fsdp, ours, to_dialect="muonckpt")
    muonckpt.convert(ours, tmp_path / "out", **chained)
    assert rates.items() <= rates_of(ours).items()


def rates_of(path) -> dict[str, float]:
    """The rate of each parameter's group."""
    with muonckpt.open(path) as opened:
        return {name: group["lr"] for group in opened.groups.values() for name in group["params"]}
