"""`doctor`: what parameters get, what is not meant, other programs' options in our words, and the proof."""

from __future__ import annotations

import json

import pytest
import torch
from support.checkouts import checkout
from support.commands import called
from support.foreign_optimizers import (
    AlteredMuon,
    DionMuon,
    EmergingMuon,
    FormerMuon,
    SingleDeviceMuonWithAuxAdam,
    ToyMuon,
)
from support.golden import golden
from torch import nn

import muonckpt
from muonckpt import TargetError
from muonckpt.converters.options import grouped
from muonckpt.names.resumption import as_tuples
from muonckpt.optimizer import Muon
from muonckpt.optimizer.groups import LLAMA, MODULE_TYPES, NO_HEAD, Rule, Split


class Net(nn.Module):
    """An embedding, two layers of two matrices, vectors, and a stack of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(24, 40), "down": nn.Linear(40, 24)}) for _ in "ab")
        self.experts = nn.Parameter(torch.randn(3, 8, 12))

    def matrices(self) -> list[nn.Parameter]:
        return [layer[name].weight for layer in self.layers for name in ("up", "down")]

    def others(self) -> list[nn.Parameter]:
        return [self.embed.weight, *(layer[name].bias for layer in self.layers for name in ("up", "down"))]


def by_torch():
    net = Net()
    muon = torch.optim.Muon(net.matrices(), lr=0.02, adjust_lr_fn="match_rms_adamw", nesterov=False)
    return net, [muon, torch.optim.AdamW([net.experts, *net.others()], lr=3e-4, eps=1e-6)]


def by_keller():
    net = Net()
    groups = [{"params": [*net.matrices(), net.experts], "use_muon": True, "weight_decay": 0.1, "momentum": 0.9}]
    return net, SingleDeviceMuonWithAuxAdam([*groups, {"params": net.others(), "use_muon": False}])


def by_dion():
    net = Net()
    first, *rest = net.matrices()
    groups = [{"params": [first], "split_sizes": (24, 8, 8), "nesterov": True, "cautious_wd": True}]
    groups += [{"params": [*rest, net.experts], "adjust_lr": "rms_norm"}]
    return net, DionMuon([*groups, {"params": net.others(), "algorithm": "adamw", "lr": 1e-3}], weight_decay=3.0)


def by_dion_with_quintic():
    net = Net()
    params = [{"params": [*net.matrices(), net.experts]}, {"params": net.others(), "algorithm": "adamw"}]
    return net, DionMuon(params, use_polar_express=False, adjust_lr=None)


def by_moonlight():
    net = Net()
    return net, ToyMuon(net.matrices(), [net.experts, *net.others()], lr=0.01)


def by_emerging():
    net = Net()
    muon = EmergingMuon(net.matrices(), extra_scale_factor=0.7, coefficient_type="aol", num_ns_steps=4)
    return net, (muon, torch.optim.Adam([net.experts, *net.others()]))


def by_emerging_in_rms():
    net = Net()
    muon = EmergingMuon(net.matrices(), extra_scale_factor=0.2, nesterov=True)
    return net, [muon, torch.optim.AdamW([net.experts, *net.others()])]


def by_emerging_past_the_end():
    """The last triple is repeated there, and the safe tail here, so each step's triple is written out."""
    net = Net()
    muon = EmergingMuon(net.matrices(), coefficient_type="deepseekv4", num_ns_steps=12)
    return net, [muon, torch.optim.AdamW([net.experts, *net.others()])]


class Pictures(nn.Module):
    """Kernels with more rows than columns, and fewer; and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 40, 3), nn.Conv2d(40, 8, (3, 1))
        self.norm = nn.GroupNorm(2, 8)

    def kernels(self) -> list[nn.Parameter]:
        return [self.first.weight, self.second.weight]

    def others(self) -> list[nn.Parameter]:
        return [self.first.bias, self.second.bias, *self.norm.parameters()]


def of_kernels_by_keller(script=SingleDeviceMuonWithAuxAdam):
    net = Pictures()
    return net, script([{"params": net.kernels(), "use_muon": True}, {"params": net.others(), "use_muon": False}])


def of_kernels_by_dion():
    net = Pictures()
    return net, DionMuon([{"params": net.kernels()}, {"params": net.others(), "algorithm": "adamw"}], flatten=True)


FOREIGN = [by_torch, by_keller, by_dion, by_dion_with_quintic, by_moonlight, by_emerging, by_emerging_in_rms]
FOREIGN += [by_emerging_past_the_end]
FOREIGN += [of_kernels_by_keller, of_kernels_by_dion]


@pytest.mark.parametrize("make", FOREIGN)
def test_two_steps_of_another_programs_muon_are_those_of_ours(make):
    found = muonckpt.doctor(make)
    assert found.proof.equal and found.proof.steps == 2, found.proof
    assert found.proof.exact.update < 1e-4 and found.proof.exact.momentum < 1e-6
    assert found.proof.exact.update < found.proof.as_run.update < 0.2  # theirs rounds to bfloat16
    stepped = {(one.shape, one.algorithm) for one in found.parameters if one.name in found.proof.parameters}
    assert stepped == {(one.shape, one.algorithm) for one in found.parameters}
    assert not found.proof.left_out and not found.replacement.refused


@pytest.mark.parametrize("make", FOREIGN)
def test_the_lines_make_the_optimizer_that_was_proved(make):
    found = muonckpt.doctor(make, proof=False)
    net, _ = make()
    scope = {"model": net}
    exec(compile(found.replacement.code, "lines", "exec"), scope)
    names = {param: name for name, param in net.named_parameters()}
    made = [{**group, "params": {names[p] for p in group["params"]}} for group in scope["optimizer"].param_groups]
    assert len(made) == len(found.replacement.groups)
    for group, wanted in zip(made, found.replacement.groups, strict=True):
        assert group["params"] == {one.name for one in wanted.members}
        for option, value in wanted.options.items():
            if callable(value):
                assert group[option] == "example.scale" or group[option].endswith("scale")
            else:
                assert as_tuples(group[option]) == as_tuples(value), option
    assert {name for group in made for name in group["params"]} == {*names.values()}


def test_every_option_of_the_other_program_is_named():
    found = muonckpt.doctor(by_torch, proof=False)
    _, optimizers = by_torch()
    for group, optimizer in zip(found.replacement.groups, optimizers, strict=True):
        told = " ".join(pair.theirs for pair in group.pairs)
        assert not [option for option in optimizer.param_groups[0] if option != "params" and f"{option}=" not in told]
    [muon, adamw] = [{pair.theirs: pair.ours for pair in group.pairs} for group in found.replacement.groups]
    assert muon["ns_coefficients=(3.4445, -4.775, 2.0315), ns_steps=5"] == 'ns_coefficients="keller", ns_steps=5'
    assert muon["nesterov=False"] == "nesterov=False" and muon["in its code"] == 'ns_dtype="bfloat16"'
    assert adamw["betas=(0.9, 0.999)"] == "betas=(0.9, 0.999)"
    assert adamw["maximize=False"] == "as here" and adamw["foreach=None"] == "does not change the update"


def test_an_option_that_changes_the_update_and_has_no_counterpart_is_told():
    def make():
        net = nn.Linear(4, 8, bias=False)
        return net, torch.optim.AdamW(net.parameters(), amsgrad=True)

    [group] = (found := muonckpt.doctor(make, proof=False)).replacement.groups
    assert {pair.theirs: pair.ours for pair in group.pairs}["amsgrad=True"] == "no counterpart"
    assert any("amsgrad" in note for note in found.replacement.notes)

    def uphill():
        net = nn.Linear(4, 8, bias=False)
        return net, torch.optim.AdamW(net.parameters(), maximize=True)

    [refused] = [one for one in muonckpt.doctor(uphill).findings if one.kind == "no_counterpart"]
    assert "it goes up the gradient" in refused.message


def test_the_options_of_a_run_are_those_that_convert_writes_for_its_checkpoint(tmp_path):
    """The same tables: the living optimizer of the golden run of dion, and what it saved."""
    meta = json.loads((golden("dion_fsdp4") / "meta.json").read_text())
    muonckpt.convert(golden("dion_fsdp4") / "ckpt", tmp_path / "ours", **grouped(to_dialect="muonckpt"))
    saved = {name: group for group in muonckpt.open(tmp_path / "ours").groups.values() for name in group["params"]}

    def make():
        net = nn.Module()
        made = {param["name"]: nn.Parameter(torch.zeros(param["shape"])) for param in meta["params"]}
        for name, param in made.items():
            holder = net
            for part in name.split(".")[:-1]:
                holder = holder._modules.setdefault(part, nn.Module())
            holder.register_parameter(name.rpartition(".")[2], param)
        groups = [{**group, "params": [made[name] for name in group["params"]]} for group in meta["param_groups"][0]]
        return net, DionMuon(groups)

    found = muonckpt.doctor(make)
    compared = 0
    for group in found.replacement.groups:
        for one in group.members:
            options = {name: value for name, value in group.options.items() if name != "ns_coefficients"}
            for name, value in options.items():
                if name != "ns_dtype":
                    assert as_tuples(saved[one.name][name]) == pytest.approx(as_tuples(value)), (one.name, name)
                    compared += 1
    assert compared > 100 and found.proof.equal


def test_a_changed_copy_of_a_script_is_found_by_the_proof_not_by_its_name(tmp_path):
    def make():
        net = Net()
        groups = [{"params": net.matrices(), "use_muon": True}]
        return net, AlteredMuon([*groups, {"params": [net.experts, *net.others()], "use_muon": False}])

    found = muonckpt.doctor(make)
    assert not found.proof.equal and found.proof.exact.update > 0.01 and found.proof.exact.momentum < 1e-6
    [differs] = [one for one in found.findings if one.kind == "differs"]
    assert "updates differ by" in differs.message and found.proof.exact.worst in differs.names


def test_unknown_optimizers_are_refused_by_name():
    class Lookahead(torch.optim.SGD):
        pass

    class MuonAdamW(torch.optim.SGD):
        pass

    for kind, words in ((Lookahead, "Lookahead with the options"), (MuonAdamW, "nanochat's MuonAdamW rescales rows")):

        def make(kind=kind):
            net = nn.Linear(4, 4)
            return net, kind(net.parameters(), lr=0.1)

        found = muonckpt.doctor(make)
        [unknown] = [one for one in found.findings if one.kind == "unknown_optimizer"]
        assert words in unknown.message and found.replacement is None and found.proof is None
        assert {one.algorithm for one in found.parameters} == {kind.__name__}


def test_the_proof_leaves_the_users_objects_alone():
    kept = {}

    def make():
        kept["net"] = net = Net()
        kept["muon"] = muon = torch.optim.Muon(net.matrices(), lr=0.02)
        muon.register_step_pre_hook(lambda *_: kept.setdefault("hooked", True))
        torch.optim.lr_scheduler.StepLR(muon, 1)  # which wraps `step`
        adamw = torch.optim.AdamW([net.experts, *net.others()])
        torch.ones(1).item()  # not on the meta device
        kept["before"] = [param.detach().clone() for param in net.parameters()]
        return net, [muon, adamw]

    found = muonckpt.doctor(make)
    assert found.proof.equal and found.device == "cpu" and "item()" in found.why_cpu
    assert "hooked" not in kept and not kept["muon"].state
    assert all(map(torch.equal, kept["before"], kept["net"].parameters()))
    assert all(param.grad is None for param in kept["net"].parameters())


def test_of_large_parameters_a_corner_is_stepped_or_they_are_left_out_and_named():
    def make():
        net = nn.ModuleDict({"tall": nn.Linear(4096, 12_288, bias=False), "odd": nn.Linear(6007, 6011, bias=False)})
        net["small"] = nn.Linear(64, 48, bias=False)
        net["norm"] = nn.LayerNorm(1 << 20)
        matrices = [param for param in net.parameters() if param.dim() == 2]
        vectors = {"params": [*net["norm"].parameters()], "use_muon": False}
        return net, SingleDeviceMuonWithAuxAdam([{"params": matrices, "use_muon": True}, vectors])

    found = muonckpt.doctor(make)
    assert found.device == "meta" and found.proof.equal
    assert found.proof.left_out == ("odd.weight",)
    assert set(found.proof.corners) == {"tall.weight", "norm.weight"}
    assert {*found.proof.corners, "small.weight"} == set(found.proof.parameters)


def test_parameters_of_another_model_and_those_of_two_optimizers_are_told():
    def strange():
        return nn.Linear(4, 4), torch.optim.AdamW(nn.Linear(3, 5).parameters())

    def twice():
        net = nn.Linear(4, 4)
        return net, [torch.optim.Muon([net.weight]), torch.optim.AdamW(net.parameters())]

    found = muonckpt.doctor(strange)
    assert {"not_in_model", "in_no_group"} == kinds(found).keys() and found.replacement is None
    assert "(5, 3)" in found.findings[0].message
    assert kinds(muonckpt.doctor(twice))["stepped_twice"] == ("weight",)


def test_a_function_that_leaves_or_is_lazy_is_told():
    def leaves():
        raise SystemExit(3)

    def lazy():
        net = nn.LazyLinear(4)
        return net, torch.optim.AdamW(net.parameters())

    for make, words in ((leaves, r"sys.exit\(3\); keep"), (lazy, "weight is uninitialized")):
        with pytest.raises(TargetError, match=words):
            muonckpt.doctor(make)


# What parameters get, and what is not meant.


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 24, bias=False), nn.Linear(16, 16, bias=False)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.zeros(4, 24, 16)), nn.Parameter(torch.zeros(4, 16, 12))
        self.flat = nn.Parameter(torch.zeros(32, 16))


class Suspect(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.attention, self.moe, self.norm = Attention(), Mixture(), nn.LayerNorm(16)
        self.plain, self.lost, self.frozen = (nn.Linear(16, 16, bias=False) for _ in range(3))


def kinds(found) -> dict[str, tuple[str, ...]]:
    return {finding.kind: finding.names for finding in found.findings}


@pytest.fixture(scope="module")
def suspicious():
    def make():
        net = Suspect()
        net.frozen.weight.requires_grad_(False)
        adamw = [net.norm.bias, net.plain.weight]
        own = [p for p in net.parameters() if all(p is not other for other in (*adamw, net.lost.weight))]
        groups = [{"params": own, "use_muon": True}, {"params": adamw, "use_muon": False}]
        return net, SingleDeviceMuonWithAuxAdam(groups)

    return muonckpt.doctor(make, proof=False)


def test_what_is_probably_not_meant_is_found_by_types_and_shapes(suspicious):
    found = {(finding.kind, *finding.names) for finding in suspicious.findings}
    assert found == {
        ("in_no_group", "lost.weight"),
        ("vector_in_muon", "norm.weight"),
        ("embedding_in_muon", "embed.weight"),
        ("head_in_muon", "head.weight"),
        ("left_to_adamw", "plain.weight"),
        ("fused_whole", "attention.qkv.weight"),
        ("fused_whole", "moe.up"),
        ("experts_as_one", "moe.flat"),
        ("frozen_in_group", "frozen.weight"),
    }
    fused = {finding.names: finding.means for finding in suspicious.findings if finding.kind == "fused_whole"}
    assert "split=Split((16, 4, 4))" in fused[("attention.qkv.weight",)] and "split=Split(2)" in fused[("moe.up",)]
    assert all(finding.means for finding in suspicious.findings)


def test_the_lines_to_write_are_rules_that_take_effect(suspicious):
    """With all of them together nothing is found but what rules do not decide."""
    rules = [finding.means.partition("rules=[[")[2] for finding in suspicious.findings]
    rules = [eval(text.partition("], MODULE_TYPES]")[0], {"Rule": Rule, "Split": Split}) for text in rules if text]
    assert len(rules) >= 6

    def make():
        net = Suspect()
        rest = [Rule("experts", "moe.down"), NO_HEAD]
        return net, Muon.for_model(net, rules=[[*rules, *rest], MODULE_TYPES], lr=0.02, adamw_lr=3e-4)

    found = muonckpt.doctor(make)
    assert not found.findings and found.replacement is None
    gets = {one.name: (one.algorithm, one.matrices) for one in found.parameters}
    assert gets["attention.qkv.weight"] == ("muon", 3) and gets["moe.up"] == ("muon", 8)
    assert (
        gets["embed.weight"] == ("adamw", 0)
        and gets["moe.flat"] == ("muon", 4)
        and gets["moe.gate.weight"] == ("muon", 1)
    )


def test_tied_weights_in_muon_are_one_finding():
    def make():
        net = Suspect(tied=True)
        return net, torch.optim.Muon([p for p in net.parameters() if p.dim() == 2])

    found = muonckpt.doctor(make, proof=False)
    assert kinds(found)["tied_in_muon"] == ("embed.weight",)
    assert not {"embedding_in_muon", "head_in_muon"} & kinds(found).keys()
    assert "embed.weight = head.weight" in next(f for f in found.findings if f.kind == "tied_in_muon").message


def test_a_tied_model_has_no_other_head():
    """Three matrices have as many rows as the embedding, which is the head."""

    def make():
        net = Suspect(tied=True)
        net.plain, net.lost, net.frozen = (nn.Linear(16, 40, bias=False) for _ in range(3))
        rules = [[Rule("matrix", "moe.flat"), Rule("experts", ("moe.up", "moe.down"))], MODULE_TYPES]
        return net, Muon.for_model(net, rules=rules, lr=0.02, adamw_lr=3e-4)

    found = muonckpt.doctor(make, proof=False)
    assert not {"head_in_muon", "tied_in_muon", "left_to_adamw"} & kinds(found).keys()
    gets = {one.name: one.algorithm for one in found.parameters}
    assert gets["plain.weight"] == "muon" and gets["embed.weight"] == "adamw"


def test_a_stack_that_dion_flattens_is_experts_as_one():
    def make():
        net = Net()
        groups = [{"params": [*net.matrices(), net.experts]}, {"params": net.others(), "algorithm": "adamw"}]
        return net, DionMuon(groups, flatten=True)

    found = muonckpt.doctor(make, proof=False)
    assert kinds(found)["experts_as_one"] == ("experts",)
    [group] = [group for group in found.replacement.groups if "experts" in {member.name for member in group.members}]
    assert group.options["flatten"] is True


def test_convolutions_that_other_programs_flatten_are_no_finding():
    for make in (of_kernels_by_keller, of_kernels_by_dion):
        found = muonckpt.doctor(make, proof=False)
        assert not found.findings
        assert {one.name: one.matrices for one in found.parameters if one.by_muon} == {
            "first.weight": 1, "second.weight": 1,
        }  # fmt: skip
        assert [group.options.get("flatten") for group in found.replacement.groups] == [True, None]
    # A copy of the script with the former scale is not taken for ours.
    found = muonckpt.doctor(lambda: of_kernels_by_keller(FormerMuon))
    assert not found.proof.equal and found.proof.exact.worst == "first.weight"


def test_convolutions_in_muon_that_nobody_flattens_are_found_and_the_line_flattens_them():
    def make():
        net = Pictures()
        net.line, net.grouped = nn.Conv1d(4, 6, 3, bias=False), nn.Conv2d(4, 6, 3, groups=2, bias=False)
        whole = {"params": [net.grouped.weight], "flatten": True}
        stacks = {"params": [net.line.weight]}
        others = {"params": [*net.kernels(), *net.others()], "algorithm": "adamw", "lr": 1e-3}
        return net, Muon([whole, stacks, others])

    found = muonckpt.doctor(make, proof=False)
    assert kinds(found) == {"convolution_in_muon": ("line.weight",), "fused_whole": ("grouped.weight",)}
    lines = {finding.kind: finding.means.partition("write: ")[2] for finding in found.findings}
    for line, name in ((lines["convolution_in_muon"], "line.weight"), (lines["fused_whole"], "grouped.weight")):
        net, _ = make()
        code = line.replace("MODULE_TYPES], …", "MODULE_TYPES], lr=0.02, adamw_lr=3e-4")
        optimizer = eval(code, {"Muon": Muon, "Rule": Rule, "Split": Split, "MODULE_TYPES": MODULE_TYPES, "model": net})
        [group] = [
            group for group in optimizer.param_groups if any(p is net.get_parameter(name) for p in group["params"])
        ]
        assert group["flatten"] is True and group["pieces"] == {"line.weight": None, "grouped.weight": (3, 3)}[name]

    def in_torch():
        net = Pictures()
        return net, DionMuon([{"params": net.kernels()}, {"params": net.others(), "algorithm": "adamw"}])

    found = muonckpt.doctor(in_torch, proof=False)
    assert kinds(found) == {"convolution_in_muon": ("first.weight", "second.weight")}
    assert {*found.replacement.refused} == {"first.weight", "second.weight"}


def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, **sizes))


def test_ready_made_rules_say_what_a_known_model_consists_of():
    def make():
        net = llama()
        matrices = [p for p in net.parameters() if p.dim() == 2]
        return net, [torch.optim.Muon(matrices), torch.optim.AdamW([p for p in net.parameters() if p.dim() != 2])]

    found = muonckpt.doctor(make)
    assert found.device == "meta" and found.proof.equal
    assert kinds(found) == {"embedding_in_muon": ("model.embed_tokens.weight",), "head_in_muon": ("lm_head.weight",)}
    assert "by the ready-made rules LLAMA" in found.findings[0].message


def test_a_healthy_model_has_no_finding_and_says_why_each_parameter_gets_what_it_gets():
    def make():
        net = llama()
        return net, Muon.for_model(net, rules=LLAMA, lr=0.02, adamw_lr=3e-4)

    found = muonckpt.doctor(make)
    assert found.findings == () and found.optimizers == ("muonckpt.optimizer.muon.Muon",)
    reasons = {one.name: (one.kind, one.why) for one in found.parameters}
    assert reasons["model.layers.2.mlp.up_proj.weight"] == ("matrix", "*mlp.up_proj.weight")
    assert reasons["model.embed_tokens.weight"] == ("embedding", "Embedding.weight")


def test_costs_are_those_of_plan_for_a_checkpoint_of_the_same_run(tmp_path):
    def make():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.Conv2d(8, 16, 3, groups=2), nn.Conv1d(8, 8, 3))
        return net, Muon.for_model(net, rules=[[NO_HEAD], MODULE_TYPES], lr=0.02, adamw_lr=3e-4)

    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(*make())
    muonckpt.save({"model": weights, "optimizer": state}, tmp_path / "ckpt")
    meshes = [{"dp": 4}, {"dp": 2, "tp": 2}]
    shard = {"*.weight": (("dp", 0), ("tp", 1))}
    found = muonckpt.doctor(make, meshes=meshes, shard=shard).prospect
    expected = muonckpt.forecast(meshes, checkpoint=tmp_path / "ckpt", shard=shard)
    assert found.topologies == expected.topologies
    assert found.topologies[0].sent["most"] > 0


# The function, and the command.

BUILD = """
import torch
from torch import nn
from sizes import WIDTH

def make():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    return model, torch.optim.Muon(model.parameters(), lr=0.02)

def forgetful():
    return nn.Linear(2, 2)

def broken():
    raise RuntimeError("no such data")
"""


@pytest.fixture
def build(tmp_path, monkeypatch):
    (tmp_path / "build_of_mine.py").write_text(BUILD)
    (tmp_path / "sizes.py").write_text("WIDTH = 24\n")
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return tmp_path / "build_of_mine.py"


def test_the_command_prints_the_table_the_lines_and_the_proof(build):
    done = called("doctor", f"{build}:make", "--mesh", "dp=2")
    assert done.returncode == 0, done.stderr
    assert "0.weight" not in done.stdout.split("write instead")[1].split("proof")[1]
    for words in (
        "torch.optim._muon.Muon; made on the meta device".replace("_muon.Muon", "Muon"),
        "*.weight   3      24 x 24  muon  1         group 0",
        "nothing odd",
        "sent a step, mean",
        'ns_coefficients="keller", ns_steps=5',
        '"params": named("*.weight"),',
        "proof: 2 steps of both with the same gradients, on copies of 1 parameter, one of each kind",
        "in float32: updates ",
    ):
        assert words in done.stdout, words
    data = json.loads(called("doctor", f"{build}:make", "--json").stdout)
    assert data["proof"]["equal"] is True and data["replacement"]["code"].startswith("from fnmatch")
    assert [one["gets"] for one in data["parameters"]] == ["muon"] * 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mak", "found nothing of that name; did you mean 'make'?"),
        ("forgetful", "returned Linear: expected a model and its optimizer"),
        ("broken", "broken() fails: RuntimeError: no such data"),
    ],
)
def test_a_function_that_does_not_serve_is_named(build, name, words):
    with pytest.raises(TargetError) as raised:
        muonckpt.doctor(f"{build}:{name}")
    assert words in str(raised.value)
    done = called("doctor", f"{build}:{name}")
    assert done.returncode == 2 and words.split(":")[0] in done.stderr


def test_files_that_are_not_there_and_bad_names_are_told(tmp_path):
    for source, words in (
        ("build.py", "expected FILE.py:FUNCTION"),
        (f"{tmp_path}/none.py:make", "there is no such file"),
        ("no_such_module:make", "no_such_module cannot be imported: ModuleNotFoundError"),
    ):
        with pytest.raises(TargetError, match=words):
            muonckpt.doctor(source)


def test_help_says_that_it_runs_the_file():
    assert "runs your file, with your rights" in " ".join(called("doctor", "--help").stdout.split())


def test_dions_own_class_does_the_same(monkeypatch):
    monkeypatch.syspath_prepend(checkout("dion"))
    dion = pytest.importorskip("dion")

    def make():
        net = Net()
        params = [{"params": [*net.matrices(), net.experts]}, {"params": net.others(), "algorithm": "adamw"}]
        return net, dion.Muon(params, nesterov=True, cautious_wd=True)

    def normalised():
        net = Net()
        params = [{"params": [*net.matrices(), net.experts]}, {"params": net.others(), "algorithm": "adamw"}]
        return net, dion.NorMuon(params)

    for one in (make, normalised):
        assert muonckpt.doctor(one).proof.exact.update < 1e-4
