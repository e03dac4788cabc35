"""Which parameter is what: every parameter has one place, and what is unclear is refused, heads above all."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import given, strategies as st
from support.modules import HEAD, kinds, linear, placed_once, refusal, simple, stack, tree
from support.workers import run
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from muonckpt import ArgumentError
from muonckpt.optimizer.groups import (
    MODULE_TYPES,
    Decisions,
    Rule,
    Split,
    UnsortedError,
    sort_parameters,
)

SIMPLE = {"tokens.weight": "embedding", "up.weight": "matrix", "up.bias": "vector", "down.weight": "matrix",
          "norm.weight": "vector", "norm.bias": "vector", "head.weight": "head"}  # fmt: skip


def test_torch_modules_are_sorted_by_type_once_the_head_is_named():
    model = simple()
    decisions = sort_parameters(model, HEAD, MODULE_TYPES)
    assert kinds(decisions) == SIMPLE
    placed_once(model, decisions)


def test_subclasses_count_as_their_type():
    class Scaled(nn.Linear):
        pass

    model = tree({"proj": Scaled(4, 6), "bag": nn.EmbeddingBag(9, 4)})
    found = sort_parameters(model, MODULE_TYPES)
    assert kinds(found) == {"proj.weight": "matrix", "proj.bias": "vector", "bag.weight": "embedding"}


# Output heads.


def test_a_matrix_as_tall_as_an_embedding_is_asked_about_until_the_head_is_known():
    [tall] = refusal(simple())
    assert tall == "head.weight [20, 8] has as many rows as an embedding"
    with pytest.raises(UnsortedError, match=r"(?m)^Write head='head'$"):
        sort_parameters(simple())
    assert kinds(sort_parameters(simple(), head="head")) == SIMPLE
    assert kinds(sort_parameters(simple(), HEAD, MODULE_TYPES)) == SIMPLE
    assert kinds(sort_parameters(simple(), head=None))["head.weight"] == "matrix"


def deep(**others: nn.Module) -> nn.ModuleDict:
    layers = nn.ModuleList(tree({"up": linear(12, 8), "down": linear(8, 12)}) for _ in range(2))
    return nn.ModuleDict({"tokens": nn.Embedding(20, 8), "places": nn.Embedding(12, 8), "layers": layers, **others})


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("layers.0.down", r"expected a layer with the 20 rows of an embedding, found layers.0.down.weight \[8, 12\]"),
        (["layers.1.down", "layers.0.down"], "with the 20 rows of an embedding, found layers.1.down.weight"),
        ("tokens", r"found tokens.weight \[20, 8\] in Embedding"),
        ("layers.1", "the one layer that is the output head, found 2: layers.1.up.weight, layers.1.down.weight"),
        (
            nn.ModuleDict,
            "the one layer that is the output head, found 5: layers.0.up.weight, layers.0.down.weight, lay",
        ),
    ],
)
def test_a_layer_that_is_not_the_head_is_refused_with_the_one_that_may_be(head, message):
    model = deep(lm_head=linear(20, 8))
    with pytest.raises(ArgumentError, match=rf"{message}.*Write head='lm_head'"):
        sort_parameters(model, head=model if head is nn.ModuleDict else head)
    several = deep(heads=nn.ModuleList(linear(20, 8) for _ in range(3)))
    with pytest.raises(ArgumentError, match=r"Write head=\['heads.0', 'heads.1', 'heads.2'\]"):
        sort_parameters(several, head="layers.0.down")
    assert [d.names[0] for d in sort_parameters(several, head="heads") if d.kind == "head"] == [
        f"heads.{number}.weight" for number in range(3)
    ]
    tied = deep(lm_head=linear(20, 8))
    tied["lm_head"].weight = tied["tokens"].weight
    with pytest.raises(ArgumentError, match="Write head='lm_head'"):
        sort_parameters(tied, head="layers.0.down")


def test_the_head_of_a_classifier_has_rows_of_its_own():
    model = deep(classes=nn.ModuleDict({"dense": linear(8, 8), "out": linear(3, 8)}))
    found = kinds(sort_parameters(model, head="classes.out"))
    assert found["classes.out.weight"] == "head" and found["classes.dense.weight"] == "matrix"
    with pytest.raises(ArgumentError, match=r"found 2: .*Write head='classes.out', or all in a list"):
        sort_parameters(model, head="classes")
    listed = kinds(sort_parameters(model, head=["classes.dense", "classes.out"]))
    assert listed["classes.out.weight"] == listed["classes.dense.weight"] == "head"


def test_a_model_without_an_embedding_of_such_rows_needs_no_word_about_a_head():
    model = tree({"up": linear(12, 8), "down": linear(8, 12)})
    assert kinds(sort_parameters(model)) == {"up.weight": "matrix", "down.weight": "matrix"}
    padded = tree({"tokens": nn.Embedding(20, 8), "lm_head": linear(24, 8)})
    [asked] = refusal(padded)
    assert asked.startswith("lm_head.weight [24, 8]")


def test_frozen_embeddings_and_those_of_other_types_count_too():
    frozen = simple()
    frozen.tokens.weight.requires_grad_(False)
    assert len(refusal(frozen)) == 1
    custom = tree({"tokens.table": stack(20, 8), "head": linear(20, 8)})
    assert len(refusal(custom, (Rule("embedding", "tokens.table"),), MODULE_TYPES)) == 1


def test_a_head_that_may_be_missing_is_no_answer_where_types_decide():
    assert len(refusal(simple(), (Rule("head", "lm_head.weight", optional=True),), MODULE_TYPES)) == 1


# Shared parameters.


def tied() -> nn.Module:
    model = simple()
    model.head.weight = model.tokens.weight
    return model


@pytest.mark.parametrize("layers", [(MODULE_TYPES,), ((*HEAD, *MODULE_TYPES),)])
def test_a_tied_head_is_found_by_identity(layers):
    model = tied()
    decisions = sort_parameters(model, *layers)
    [decision] = [decision for decision in decisions if decision.kind == "embedding"]
    assert (decision.names, decision.why) == (("tokens.weight", "head.weight"), "Embedding.weight (tied)")
    placed_once(model, decisions)


def test_equal_values_do_not_tie():
    model = simple()
    with torch.no_grad():
        model.head.weight.copy_(model.tokens.weight)
    assert len(refusal(model, MODULE_TYPES)) == 1


def test_what_a_rule_names_is_not_taken_for_a_tied_head():
    [line] = refusal(tied(), (Rule("matrix", "head.weight"), *MODULE_TYPES))
    assert line.startswith("tokens.weight = head.weight [20, 8] in Embedding and Linear: ") and "disagree" in line
    earlier = sort_parameters(tied(), (Rule("matrix", "head.weight"),), MODULE_TYPES)
    assert kinds(earlier)["tokens.weight"] == "matrix"


def test_a_tied_model_is_not_asked_for_another_head():
    """A matrix as tall as the embedding is a matrix where the head is known to be the embedding."""
    model = tied()
    model.tall = nn.Linear(8, model.tokens.weight.shape[0], bias=False)
    assert kinds(sort_parameters(model, MODULE_TYPES))["tall.weight"] == "matrix"


# Stacks.


@pytest.mark.parametrize(
    ("shapes", "are_experts"),
    [
        ({"w1": (4, 6, 8), "w2": (4, 8, 6), "w3": (4, 6, 8)}, True),
        ({"w1": (4, 6, 8), "w2": (4, 8, 6), "scale": (6,)}, True),
        ({"gate_up_proj": (4, 12, 8), "down_proj": (4, 8, 6)}, True),
        ({"w1": (4, 6, 8), "w2": (4, 8, 6), "table": (4, 6, 6)}, False),
        ({"w1": (4, 6, 8), "w2": (2, 8, 6)}, False),
        ({"w1": (1, 6, 8), "w2": (1, 8, 6)}, False),
        ({"positions": (4, 6, 8)}, False),
        ({"by_rows": (4, 6, 6), "by_columns": (4, 8, 8)}, False),
    ],
)
def test_stacks_are_experts_where_their_shapes_prove_it_and_asked_about_otherwise(shapes, are_experts):
    model = tree({f"experts.{name}": stack(*shape) for name, shape in shapes.items()})
    if are_experts:
        found = kinds(sort_parameters(model, split={"*.gate_up_proj": 2} if "down_proj" in shapes else {}))
        assert all(found[f"experts.{name}"] == "experts" for name, shape in shapes.items() if len(shape) == 3)
    else:
        assert len(refusal(model)) == len(shapes)


@pytest.mark.parametrize(("shape", "kind"), [((4, 6, 8), "experts"), ((1, 3, 5), "other"), ((3, 5), "matrix")])
def test_the_rule_to_write_for_a_bare_parameter(shape, kind):
    model = tree({"up": linear(12, 8), "bare": stack(*shape)})
    assert refusal(model) == [f"bare {list(shape)} in Module: no rule selects it"]
    with pytest.raises(UnsortedError, match=r"Write rules=\[\[.*\], MODULE_TYPES\]") as refused:
        sort_parameters(model)
    assert refused.value.arguments == {"rules": f"[[Rule({kind!r}, 'bare')], MODULE_TYPES]"}
    assert kinds(sort_parameters(model, eval(refused.value.arguments["rules"])))["bare"] == kind
    conv = tree({"conv": nn.Conv1d(4, 6, 3, bias=False)})
    with pytest.raises(UnsortedError) as refused:
        sort_parameters(conv, (Rule("head", (), optional=True),))
    assert refused.value.arguments == {"rules": "[[Rule('convolution', 'conv.weight')], RULES]"}


@pytest.mark.parametrize(
    ("kind", "name", "meant"), [("matrix", "experts", "experts"), ("experts", "up.weight", "matrix")]
)
def test_the_rule_to_write_gives_no_matrix_to_adamw(kind, name, meant):
    model = tree({"up": linear(12, 8)})
    model.experts = nn.Parameter(torch.zeros(4, 6, 8))
    own = [Rule(kind, name), Rule("experts", "experts")] if name == "up.weight" else [Rule(kind, name)]
    with pytest.raises(ValueError, match=rf"Write rules=\[\[Rule\('{meant}', '{name}'\)\], RULES\]"):
        sort_parameters(model, own, MODULE_TYPES)
    said = kinds(sort_parameters(model, (Rule(meant, name),), own, MODULE_TYPES))
    assert said["experts"] == "experts" and said["up.weight"] == "matrix"


def test_what_is_not_shared_is_not_tied():
    [line] = refusal(simple(), (*HEAD, Rule("embedding", "head.weight")), MODULE_TYPES)
    assert line.startswith("head.weight [20, 8] in Linear: ") and "disagree" in line


def test_a_shared_module_is_one_parameter_with_all_its_names():
    shared = linear(4, 4)
    model = tree({"a.proj": shared, "b.proj": shared})
    [decision] = sort_parameters(model, MODULE_TYPES)
    assert decision.names == ("a.proj.weight", "b.proj.weight")
    placed_once(model, Decisions((decision,)))
    [line] = refusal(model, (Rule("matrix", "a.*"), Rule("other", "b.*")))
    assert "disagree" in line


# Models as they are trained.


def block() -> nn.Module:
    return tree({"up": linear(12, 8, bias=True), "down": linear(8, 12)})


def nested() -> nn.Module:
    return tree({"tokens": nn.Embedding(20, 8), "blocks": nn.ModuleList([block(), block()]), "head": linear(20, 8)})


def checkpointed() -> nn.Module:
    model = nested()
    model.blocks[0].up = checkpoint_wrapper(model.blocks[0].up)
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    return model


BLOCKS = (Rule("matrix", "blocks.?.up.weight", split=Split(3)),)


def test_names_are_without_what_wrappers_insert():
    model = checkpointed()
    model.blocks[1] = torch.compile(model.blocks[1])
    plain = sort_parameters(nested(), HEAD, BLOCKS, MODULE_TYPES)
    assert sort_parameters(torch.compile(model), HEAD, BLOCKS, MODULE_TYPES) == plain


def sharded(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    model = checkpointed()
    for part in (model.blocks[0].up, model.blocks[1], model):
        fully_shard(part, mesh=mesh)
    decisions = sort_parameters(model, HEAD, BLOCKS, MODULE_TYPES)
    placed_once(model, decisions)
    return str(decisions), sorted(name for decision in decisions for name in decision.names)


def replicated(rank, world):
    inner = nested()
    inner.blocks[0] = DistributedDataParallel(inner.blocks[0])
    return str(sort_parameters(DistributedDataParallel(inner), HEAD, BLOCKS, MODULE_TYPES))


def test_sharded_and_replicated_models_are_sorted_alike():
    plain = sort_parameters(nested(), HEAD, BLOCKS, MODULE_TYPES)
    names = sorted(name for decision in plain for name in decision.names)
    assert run(2, sharded) == [(str(plain), names)] * 2
    assert run(2, replicated) == [str(plain)] * 2


# Any model and any rules: one place for every parameter, or an error.

PARTS = {
    "linear": lambda: linear(3, 4, bias=True),
    "embedding": lambda: nn.Embedding(3, 4),
    "conv": lambda: nn.Conv1d(2, 3, 2),
    "experts": lambda: stack(2, 3, 4),
    "norm": lambda: nn.RMSNorm(4),
    "shared": None,
}
RULES = [
    *MODULE_TYPES,
    Rule("head", "*.0.weight"),
    Rule("matrix", "*linear*.weight", split=Split(3)),
    Rule("matrix", "linear.?.weight"),
    Rule("experts", "experts.*"),
    Rule("experts", dims=(3,)),
    Rule("other", module=nn.Conv1d),
    Rule("other", "*.1.*"),
]


def naive(model: nn.Module, layers: list[list[Rule]]) -> dict[str, set[str]]:
    """For every trainable parameter, by its first name, the kinds that its first layer with a rule gives it."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    found = {}
    for several in names.values():
        given = [{rule.kind for rule in layer for name in several if selects(rule, model, name)} for layer in layers]
        found[several[0]] = next(filter(None, given), set())
    return found


def selects(rule: Rule, model: nn.Module, name: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    patterns = [rule.names] if isinstance(rule.names, str) else rule.names
    return (
        (patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns))
        and (rule.module is None or isinstance(model.get_submodule(owner), rule.module))
        and rule.attribute in (None, attribute)
        and (rule.dims is None or model.get_parameter(name).dim() in rule.dims)
        and (rule.where is None or rule.where(model.get_submodule(owner)))
    )


REST = [Rule("other", "*", optional=True)]


@given(
    parts=st.lists(st.tuples(st.sampled_from(sorted(PARTS)), st.booleans()), min_size=1, max_size=6),
    layers=st.lists(st.lists(st.sampled_from(RULES), max_size=3), max_size=4),
    lenient=st.booleans(),
)
def test_every_parameter_has_one_place_or_the_call_raises(parts, layers, lenient):
    made: dict[str, nn.Module | nn.Parameter] = {}
    for number, (kind, frozen) in enumerate(parts):
        part = PARTS[kind]() if PARTS[kind] else next(iter(made.values()), linear(3, 4))
        made[f"{kind}.{number}"] = part.requires_grad_(not frozen)
    if lenient:
        layers = [*([replace(rule, optional=True) for rule in layer] for layer in layers), REST]
    model = tree(made)
    expected = naive(model, layers if any(layers) else [[*MODULE_TYPES]])
    try:
        decisions = sort_parameters(model, *layers)
    except ValueError:
        return
    placed_once(model, decisions)
    kept = {decision.names[0]: decision.kind for decision in decisions if decision.kind != "frozen"}
    assert kept.keys() == expected.keys()
    # Several kinds are only reconciled where an embedding is tied.
    assert all(
        {kind} == expected[name] or (kind == "embedding" and kind in expected[name]) for name, kind in kept.items()
    )
