"""Small models for tests of what sorts their parameters, and what to ask of a sorted one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from muonckpt.optimizer import Muon
from muonckpt.optimizer.groups import Decisions, Rule, sort_parameters

HEAD = (Rule("head", "head.weight"),)

Parts = Mapping[str, nn.Module | nn.Parameter]


def linear(rows: int, columns: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(columns, rows, bias=bias)


def stack(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def under(prefix: str, parts: Parts) -> Parts:
    return {f"{prefix}.{name}": part for name, part in parts.items()}


def tree(*several: Parts) -> nn.Module:
    """A model whose modules and parameters have these qualified names."""
    root = nn.Module()
    for parts in several:
        for path, part in parts.items():
            *parents, name = path.split(".")
            holder = root
            for parent in parents:
                if parent not in dict(holder.named_children()):
                    holder.add_module(parent, nn.Module())
                holder = holder.get_submodule(parent)
            setattr(holder, name, part)
    return root


def placed_once(model: nn.Module, decisions: Decisions) -> None:
    """Every trainable parameter is in one group, of its algorithm; no frozen one is; and the optimizer takes them."""
    groups = decisions.groups(muon={"lr": 0.02}, adamw={"lr": 3e-4})
    algorithms = [(parameter, group["algorithm"]) for group in groups for parameter in group["params"]]
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    assert len(algorithms) == len(trained)
    assert {decision.parameter for decision in decisions} == set(model.parameters())
    assert dict(algorithms) == {d.parameter: d.algorithm for d in decisions if d.parameter in trained}
    if groups:
        assert set(Muon(groups).state) == trained


def simple() -> nn.Module:
    return tree({"tokens": nn.Embedding(20, 8), "up": linear(12, 8, bias=True), "down": linear(8, 12),
                 "norm": nn.LayerNorm(8), "head": linear(20, 8)})  # fmt: skip


def kinds(decisions: Decisions) -> dict[str, str]:
    return {name: decision.kind for decision in decisions for name in decision.names}


def refusal(model: nn.Module, *layers: tuple[Rule, ...], **arguments: Any) -> list[str]:
    """What is wrong, a line each."""
    with pytest.raises(ValueError, match=r"^the parameters cannot be sorted:") as error_info:
        sort_parameters(model, *layers, **arguments)
    return [line.removeprefix("- ") for line in str(error_info.value).splitlines() if line.startswith("- ")]
