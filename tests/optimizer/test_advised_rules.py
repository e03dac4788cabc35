"""The arguments that errors tell to write: followed until they sort the model, they take nothing away from Muon."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from muonckpt.optimizer import Muon, groups
from muonckpt.optimizer.groups import DEEPSEEK, LLAMA, MODULE_TYPES, Rule, Rules, UnsortedError, sort_parameters

WIDTH, VOCABULARY, LAYERS = 8, 16, 3


class Experts(nn.Module):
    """Four experts in one parameter, or in one for each."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        if stacked:
            self.up = nn.Parameter(torch.ones(4, VOCABULARY, WIDTH))
            self.down = nn.Parameter(torch.ones(4, WIDTH, VOCABULARY))
        else:
            self.each = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY, bias=False) for _ in range(4))


def model(width: int, stacked: bool, heads: int) -> nn.Module:
    """A language model whose experts have as many rows as the vocabulary; with this width, so has all else."""
    layers = [
        nn.ModuleDict({
            "query": nn.Linear(width, width, bias=False), "norm": nn.LayerNorm(width),
            "router": nn.Linear(width, 4, bias=False), "experts": Experts(stacked),
        })
        for _ in range(LAYERS)
    ]  # fmt: skip
    parts = {"embed": nn.Embedding(VOCABULARY, width), "layers": nn.ModuleList(layers)}
    if heads == 1:
        parts["unembed"] = nn.Linear(width, VOCABULARY, bias=False)
    elif heads:
        parts["heads"] = nn.ModuleList(nn.Linear(width, VOCABULARY, bias=False) for _ in range(heads))
    return nn.ModuleDict(parts)


def followed(net: nn.Module, *rules: Rules, **arguments: Any) -> dict[str, str]:
    """Follow what errors say to write until the model is sorted; return the algorithms by name."""
    for _ in range(4):
        try:
            return {
                decision.names[0]: str(decision.algorithm) for decision in sort_parameters(net, *rules, **arguments)
            }
        except UnsortedError as error:
            line = ", ".join(f"{name}={code}" for name, code in error.arguments.items())
            assert f"\nWrite {line}\n" in str(error)
            names = {**vars(groups), "RULES": rules, "q": WIDTH, "k": WIDTH, "v": WIDTH}
            written = {name: eval(code, names) for name, code in error.arguments.items()}
            rules = (written.pop("rules"),) if "rules" in written else rules
            arguments |= written
    raise AssertionError(f"the advice goes in a circle: {rules}, {arguments}")


@pytest.mark.parametrize("heads", [0, 1, 2])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("width", [WIDTH, VOCABULARY])
@pytest.mark.parametrize("rules", [(), MODULE_TYPES, LLAMA, DEEPSEEK])
def test_followed_rules_give_adamw_heads_embeddings_and_vectors_alone(rules, width, stacked, heads):
    algorithms = followed(model(width, stacked, heads), rules)
    adamw = {name for name, algorithm in algorithms.items() if algorithm == "adamw"}
    outside = {name for name in algorithms if name.startswith(("embed", "unembed", "heads")) or "norm" in name}
    assert adamw == outside


def test_a_head_that_is_named_stays_the_only_one():
    algorithms = followed(model(VOCABULARY, stacked=False, heads=1), head="unembed")
    assert [name for name, algorithm in algorithms.items() if algorithm == "adamw" and "norm" not in name] == [
        "embed.weight",
        "unembed.weight",
    ]


def test_bare_matrices_are_matrices_first():
    net = nn.ModuleDict({"up": nn.Linear(4, 8, bias=False), "attention": nn.MultiheadAttention(8, 2)})
    algorithms = followed(net)
    assert {name for name, algorithm in algorithms.items() if algorithm == "muon"} == {
        "up.weight", "attention.in_proj_weight", "attention.out_proj.weight"
    }  # fmt: skip


@pytest.mark.parametrize("rules", [MODULE_TYPES, [[Rule("matrix", "*.weight")], MODULE_TYPES]])
def test_no_rule_takes_a_matrix_for_a_vector_that_a_wrapper_has_flattened(rules):
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    for layer in net:
        layer.weight = nn.Parameter(layer.weight.detach().flatten()[:64].clone())
    with pytest.raises(ValueError, match="flattens parameters") as refusal:
        Muon.for_model(net, rules=rules, lr=0.02, adamw_lr=1e-3)
    assert "Write" not in str(refusal.value)
    named = sort_parameters(net, [[Rule("vector", "*.weight")], MODULE_TYPES])
    assert {decision.kind for decision in named} == {"vector"}
