"""What a rule selects, which one wins, what it may say; and the decisions: their table and their groups."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.failing import raised
from support.modules import HEAD, kinds, linear, placed_once, refusal, simple, stack, tree, under
from support.workers import run
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from muonckpt.optimizer import Muon
from muonckpt.optimizer.groups import (
    KINDS,
    MODULE_TYPES,
    Decisions,
    Rule,
    Split,
    grouped_qkv,
    sort_parameters,
    stacked_qkv,
)

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "groups.md"


def test_earlier_layers_win_and_one_layer_must_agree():
    router = (Rule("router", "up.weight"),)
    assert kinds(sort_parameters(simple(), HEAD, router, MODULE_TYPES))["up.weight"] == "router"
    assert kinds(sort_parameters(simple(), HEAD, MODULE_TYPES, router))["up.weight"] == "matrix"
    [line] = refusal(simple(), HEAD, (*router, *MODULE_TYPES))
    assert line == (
        f"up.weight [12, 8] in Linear: {router[0]!r} and {MODULE_TYPES[-3]!r} disagree; "
        "put the one that shall win into an earlier layer"
    )
    agreeing = (Rule("router", "up.weight"), Rule("router", "u*.weight"))
    assert kinds(sort_parameters(simple(), HEAD, agreeing, MODULE_TYPES))["up.weight"] == "router"
    splits = (Rule("matrix", "up.weight", split=Split(2)), Rule("matrix", "u*.weight"))
    assert "disagree" in refusal(simple(), HEAD, splits, MODULE_TYPES)[0]


NOTHING = Rule("other", (), optional=True)


def test_a_rule_that_selects_nothing_is_refused_unless_optional():
    assert refusal(simple(), (*HEAD, Rule("matrix", "upp.*")), MODULE_TYPES) == [
        "Rule('matrix', 'upp.*') selects nothing; did you mean 'up'?"
    ]
    assert refusal(simple(), (*HEAD, Rule("other", module=nn.Conv2d, dims=(4,))), MODULE_TYPES) == [
        "Rule('other', module=torch.nn.modules.conv.Conv2d, dims=(4,)) selects nothing"
    ]
    sort_parameters(simple(), (*HEAD, Rule("matrix", "upp.*", optional=True)), MODULE_TYPES)


def test_parameters_under_no_rule_are_all_listed_with_shapes_and_modules():
    parts = {"pair": nn.Bilinear(4, 2, 4), "bare": stack(3, 4)}
    model = tree(under("0", parts), {"1.pair": nn.Bilinear(4, 2, 4)})
    assert refusal(model, MODULE_TYPES) == [
        "0.bare [3, 4] in Module: no rule selects it",
        "*.pair.weight (2 alike) [4, 4, 2] in Bilinear: no rule selects it",
    ]
    assert refusal(simple(), [NOTHING])[-1] == "and 4 more"


SELECTORS = {
    Rule("other", "u?.weight"): {"up.weight"},
    Rule("other", "U*"): set(),
    Rule("other", ("up.*", "no[rt]m.bias")): {"up.weight", "up.bias", "norm.bias"},
    Rule("other", ()): set(),
    Rule("other", module=nn.Linear): {"up.weight", "up.bias", "down.weight", "head.weight"},
    Rule("other", attribute="bias"): {"up.bias", "norm.bias"},
    Rule("other", dims=(1,)): {"up.bias", "norm.weight", "norm.bias"},
    Rule("other", where=lambda module: module.training and hasattr(module, "eps")): {"norm.weight", "norm.bias"},
    Rule("other", "*.weight", module=nn.LayerNorm, attribute="weight", dims=(1, 2)): {"norm.weight"},
    Rule("other", "*.weight", module=nn.LayerNorm, dims=(2,)): set(),
}


@pytest.mark.parametrize("rule", SELECTORS, ids=range(len(SELECTORS)))  # a repr has addresses, and differs by process
def test_all_selectors_of_a_rule_must_hold(rule):
    model, rest = simple(), (Rule("embedding", "*"))
    found = sort_parameters(model, (replace(rule, optional=True),), rest)
    assert {name for name, kind in kinds(found).items() if kind == "other"} == SELECTORS[rule]
    if not SELECTORS[rule]:
        [line] = refusal(model, (rule,), rest)
        assert line.startswith(f"{rule!r} selects nothing")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rule("matrices", "*"), "unknown kind; expected one of matrix, experts"),
        (lambda: Rule("matrix"), "would select every parameter"),
        (lambda: Rule("head", "*", split=Split(2)), "only matrices, experts, convolutions and routers are split"),
        (lambda: Split(0), "at least 1"),
        (lambda: Split(columns=(3, 0)), "at least 1"),
        (lambda: Split(2, interleaved=0), "at least 1"),
        (lambda: Split(interleaved=4), "which pieces"),
        (lambda: grouped_qkv(6, 4, 8), "kv_heads=4: expected a divisor of heads=6"),
    ],
)
def test_impossible_rules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("matrix", (3,)), ("matrix", (2, 3, 4)), ("matrix", (2, 3, 4, 5)), ("experts", (3, 4)), ("experts", (2, 3, 4, 5)),
     ("vector", (3, 4)), ("convolution", (3, 4)), ("convolution", (2, 2, 2, 2, 2, 2))],
)  # fmt: skip
def test_a_kind_that_cannot_have_the_shape_is_refused(kind, shape):
    [line] = refusal(tree({"part": stack(*shape)}), (Rule(kind, "part")))
    assert line.startswith(f"part {list(shape)} in Module: kind {kind!r} has ") and KINDS[kind].advice in line


def test_a_convolution_is_never_taken_for_experts():
    model = tree({"conv": nn.Conv1d(4, 4, 2, bias=False)})
    assert refusal(model, [NOTHING]) == ["conv.weight [4, 4, 2] in Conv1d: no rule selects it"]
    experts = Rule("experts", dims=(3,))
    assert refusal(model, [experts]) == [
        "conv.weight [4, 4, 2] in Conv1d: a convolution's weight is one matrix of its first dim and all others, and no "
        "stack of experts",
    ]
    with pytest.raises(ValueError, match=r"Write rules=\[\[Rule\('convolution', 'conv.weight'\)\], RULES\]"):
        sort_parameters(model, [experts])
    assert kinds(sort_parameters(model, [Rule("convolution", "conv.weight")], [experts])) == {
        "conv.weight": "convolution"
    }
    assert kinds(sort_parameters(model, [Rule("other", module=nn.Conv1d)], MODULE_TYPES)) == {"conv.weight": "other"}


CONVOLUTIONS = {
    "Conv1d": ((6, 4, 3), 1),
    "Conv2d": ((6, 2, 3, 3), 2),
    "Conv3d": ((6, 4, 2, 2, 2), 1),
    "ConvTranspose1d": ((4, 6, 3), 1),
    "ConvTranspose2d": ((4, 3, 3, 3), 2),
    "ConvTranspose3d": ((4, 6, 2, 2, 2), 1),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_a_matrix_for_each_of_its_groups(name):
    shape, groups = CONVOLUTIONS[name]
    model = tree({"conv": getattr(nn, name)(4, 6, shape[-1], groups=groups), "norm": nn.GroupNorm(2, 6)})
    decisions = sort_parameters(model, MODULE_TYPES)
    assert kinds(decisions) == {
        "conv.weight": "convolution", "conv.bias": "vector", "norm.weight": "vector", "norm.bias": "vector",
    }  # fmt: skip
    [kernels, _] = decisions.groups()
    # [out, in / groups, ...], or transposed [in, out / groups, ...]: groups are parts of the first dim.
    pieces = {"pieces": (shape[0] // groups,) * groups} if groups > 1 else {}
    assert tuple(model.conv.weight.shape) == shape
    assert {key: value for key, value in kernels.items() if key != "params"} == {
        "algorithm": "muon", "flatten": True, **pieces,
    }  # fmt: skip
    [line] = [line for line in str(decisions).splitlines() if line.startswith("conv.weight")]
    assert f"{name}.weight" in line and ("flattened, " if groups > 1 else "flattened ") in line


def test_a_rule_of_ones_own_says_whether_groups_are_matrices():
    model = tree({"depthwise": nn.Conv2d(4, 4, 3, groups=4, bias=False), "up": linear(3, 4)})
    by_groups = Rule("convolution", "depthwise.weight")
    whole = replace(by_groups, split=Split())
    for rule, options in ((whole, {}), (by_groups, {"pieces": (1, 1, 1, 1)})):
        matrices, kernels = sort_parameters(model, [rule], MODULE_TYPES).groups()
        assert {key: value for key, value in kernels.items() if key not in ("algorithm", "params")} == {
            "flatten": True, **options,
        }  # fmt: skip
        assert matrices["params"] == [model.up.weight]
    with pytest.raises(ValueError, match=r"'flatten'.* the rules say that, not the options"):
        sort_parameters(model, [whole], MODULE_TYPES).groups(kinds={"convolution": {"flatten": False}})


# Splits.


@pytest.mark.parametrize(
    ("split", "shape", "options", "text"),
    [
        (Split(), (6, 4), {}, "-"),
        (Split((3, 2, 1)), (6, 4), {"pieces": (3, 2, 1)}, "3 + 2 + 1"),
        (Split(2), (5, 6, 4), {"pieces": (3, 3)}, "3 + 3"),
        (Split(columns=4), (6, 8), {"columns": (2, 2, 2, 2)}, "columns 4 x 2"),
        (Split(2, (3, 1)), (6, 4), {"pieces": (3, 3), "columns": (3, 1)}, "3 + 3, columns 3 + 1"),
        (Split((2, 1), interleaved=2), (6, 4), {"pieces": (2, 1), "interleaved": 2}, "2 x (2 + 1)"),
        (Split(3, interleaved=2), (6, 4), {"pieces": (1, 1, 1), "interleaved": 2}, "2 x (3 x 1)"),
        (stacked_qkv(4, 2, 3), (24, 5), {"pieces": (12, 6, 6)}, "12 + 6 + 6"),
        (grouped_qkv(4, 2, 3), (24, 5), {"pieces": (6, 3, 3), "interleaved": 2}, "2 x (6 + 3 + 3)"),
        (grouped_qkv(4, 1, 3), (18, 5), {"pieces": (12, 3, 3)}, "12 + 3 + 3"),
    ],
)
def test_splits_become_options_of_the_group(split, shape, options, text):
    model = tree({"part": stack(*shape)})
    rule = Rule("matrix" if len(shape) == 2 else "experts", "part", split=split)
    decisions = sort_parameters(model, (rule))
    assert re.split(" {2,}", str(decisions).splitlines()[1])[-2:] == [text, "part"]
    assert decisions.groups(muon={"lr": 0.1}) == [{"algorithm": "muon", "lr": 0.1, "params": [model.part], **options}]
    placed_once(model, decisions)


@pytest.mark.parametrize("shape", [(6, 4), (3, 6, 4)])
@pytest.mark.parametrize(
    ("split", "message"),
    [
        (Split((3, 2)), "add up to the 6 rows"),
        (Split(4), "add up to the 6 rows"),
        (Split(columns=(2, 1)), "add up to the 4 columns"),
        (Split(columns=3), "add up to the 4 columns"),
        (Split((2, 1), interleaved=4), "4 times add up to the 6 rows"),
        (Split((3, 3), interleaved=2), "2 times add up to the 6 rows"),
    ],
)
def test_splits_that_do_not_add_up_are_refused(split, message, shape):
    kind = "matrix" if len(shape) == 2 else "experts"
    [line] = refusal(tree({"part": stack(*shape)}), (Rule(kind, "part", split=split)))
    assert line.startswith(f"part {list(shape)} in Module: ") and line.endswith(message)


# What is decided.

TABLE = """\
parameter              count  shape       kind       algorithm  fused                 decided by
tokens.weight          1      [20, 8]     embedding  adamw      -                     Embedding.weight
frozen                 1      [3]         frozen     none       -                     requires_grad=False
blocks.*.qkv.weight    2      [24, 8]     matrix     muon       2 x (8 + 2 + 2)       *.qkv.weight (Megatron's order)
blocks.*.out.weight    2      [8, 16]     matrix     muon       columns 4 x 4         *.out.weight and Linear
blocks.*.norm.weight   2      [8]         vector     adamw      -                     1-D
blocks.1.experts.both  1      [5, 12, 8]  experts    muon       6 + 6, columns 4 + 4  *.experts.both
head.weight            1      [20, 8]     head       adamw      -                     head.weight
adamw: 4 parameters, 336 elements
none: 1 parameters, 3 elements
muon: 5 parameters, 1,120 elements"""


def several() -> Decisions:
    def block():
        return {"qkv": linear(24, 8), "out": linear(8, 16), "norm": nn.RMSNorm(8)}

    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    model = tree(
        {"tokens": nn.Embedding(20, 8), "note.frozen": frozen},
        under("blocks.0", block()),
        under("blocks.1", {**block(), "experts.both": stack(5, 12, 8)}),
        {"head": linear(20, 8)},
    )
    rules = (
        Rule("matrix", "*.qkv.weight", split=Split((8, 2, 2), interleaved=2), why="Megatron's order"),
        Rule("matrix", "*.out.weight", module=nn.Linear, split=Split(columns=4)),
        Rule("experts", "*.experts.both", split=Split(2, columns=(4, 4))),
    )
    decisions = sort_parameters(model, (*HEAD, *rules), MODULE_TYPES)
    placed_once(model, decisions)
    return decisions


def test_the_table_is_stable():
    assert str(several()) == TABLE.replace("\nfrozen     ", "\nnote.frozen")
    assert several() == several()


def test_numbers_are_folded_only_where_they_differ():
    model = tree({f"blocks.7.experts.{expert}.up2": linear(3, 3) for expert in range(12)})
    assert str(sort_parameters(model, MODULE_TYPES)).splitlines()[1].split()[:2] == [
        "blocks.7.experts.*.up2.weight", "12",
    ]  # fmt: skip


def test_a_frozen_parameter_is_listed_needs_no_rule_and_has_no_state():
    model = tree({"conv": nn.Conv1d(2, 2, 2, bias=False).requires_grad_(False), "up": linear(3, 3)})
    decisions = sort_parameters(model, [Rule("other", "conv.*")], MODULE_TYPES)
    assert kinds(decisions) == {"conv.weight": "frozen", "up.weight": "matrix"}
    placed_once(model, decisions)
    optimizer = Muon(decisions.groups(adamw={"lr": 1e-3}))
    model.conv.requires_grad_(True)
    optimizer.add_param_group({"params": [model.conv.weight], "algorithm": "adamw", "lr": 1e-3})
    assert model.conv.weight in optimizer.state


def test_options_are_those_of_the_algorithm_then_of_the_kind():
    groups = several().groups(
        muon={"lr": 0.02, "algorithm": "normuon"},
        adamw={"lr": 3e-4, "algorithm": "lion"},
        kinds={"vector": {"weight_decay": 0.0}, "experts": {"lr": 0.01, "algorithm": "muon"}},
    )
    brief = [
        ({key: value for key, value in group.items() if key != "params"}, len(group["params"])) for group in groups
    ]
    assert brief == [
        ({"algorithm": "normuon", "lr": 0.02, "columns": (4, 4, 4, 4)}, 2),
        ({"algorithm": "normuon", "lr": 0.02, "pieces": (8, 2, 2), "interleaved": 2}, 2),
        ({"algorithm": "lion", "lr": 3e-4}, 2),
        ({"algorithm": "muon", "lr": 0.01, "pieces": (6, 6), "columns": (4, 4)}, 1),
        ({"algorithm": "lion", "lr": 3e-4, "weight_decay": 0.0}, 2),
    ]
    assert len(Muon(groups).state) == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": {"embeddings": {"lr": 0.1}}}, "unknown kinds ..embeddings.."),
        ({"kinds": {"frozen": {"lr": 0.1}}}, "unknown kinds ..frozen.."),
        ({"muon": {"pieces": (4, 4)}}, "pieces.*the rules say that"),
        ({"adamw": {"params": []}}, "params.*the rules say that"),
        ({"muon": {"algorithm": "adamw"}}, "'adamw' for 'matrix', which takes one of .*'muon'"),
        ({"kinds": {"router": {"algorithm": "adamw"}}}, "'adamw' for 'router'.*by a rule"),
    ],
)
def test_options_that_would_make_the_table_wrong_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        several().groups(**options)


def test_a_parameter_is_decided_once():
    [decision, *_] = several()
    with pytest.raises(ValueError, match="twice"):
        Decisions((decision, decision))


def test_the_guide_shows_what_is_printed(capsys):
    text = GUIDE.read_text()
    exec("\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)), {"__name__": "guide"})
    printed = capsys.readouterr().out
    shown = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(shown) == 3 and all(part in printed for block in shown for part in block.split("…\n"))


def under_fsdp1(rank: int, world: int, original: bool) -> str:
    model = FullyShardedDataParallel(simple(), use_orig_params=original, device_id=torch.device("cpu"))
    return raised(sort_parameters, model, HEAD, MODULE_TYPES)


@pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel")
@pytest.mark.parametrize("original", [False, True])
def test_fsdp1_is_refused_by_name_however_it_shows_its_parameters(original):
    """With its own parameters too, as Lightning's strategy="fsdp" has it: they are vectors then, and some are empty."""
    for told in run(2, under_fsdp1, original):
        assert "FSDP1 (FullyShardedDataParallel) flattens parameters" in told and "FSDP2" in told
