"""The mistakes of the first hour: each script was written from the README alone, and its error shows what to write.

Where the advice is code, the test runs that code.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import muonckpt
from muonckpt.optimizer import Muon
from muonckpt.optimizer.groups import MODULE_TYPES, NO_HEAD, Rule, sort_parameters

RULES = [[Rule("head", "head.weight")], MODULE_TYPES]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.up = nn.Linear(16, 24)
        self.norm = nn.LayerNorm(24)
        self.down = nn.Linear(24, 16)
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.norm(self.up(self.words(words)).relu())))


NAMES = {thing.__name__: thing for thing in (torch, nn, muonckpt, Muon, Net, Rule, sort_parameters)} | {
    "MODULE_TYPES": MODULE_TYPES,
    "NO_HEAD": NO_HEAD,
    "RULES": RULES,
    "RATES": {"lr": 0.02, "adamw_lr": 3e-4},
}


def run(script: str, names: dict[str, Any]) -> str:
    """Run a script whose last line fails, and return the error as it is printed."""
    with pytest.raises(Exception) as refused:
        exec(script, names)
    assert refused.value.__cause__ is None, "one error, told once"
    return f"{type(refused.value).__name__}: {refused.value}"


MADE = {
    "Muon(model.parameters())": (
        "LayoutError: parameter 2 of group 0: Muon needs a matrix, got shape (24,); put this parameter in an "
    ),
    "Muon(model.named_parameters(), lr=0.02)": "LayoutError: up.bias: Muon needs a matrix, got shape (24,); put this",
    "Muon(model)": "TypeError: params: expected parameters or groups, found a model, Net. Write ",
    "Muon(model, lr=0.02)": "TypeError: params: expected parameters or groups, found a model, Net. Write ",
    "Muon.for_model(model, **RATES)": "ValueError: rules: expected some, found none. Write rules=",
    "Muon.for_model(model, rules=RULES)": "TypeError: ForModel.for_model: missing a required argument: 'lr'. Write ",
    "Muon.for_model(model, RULES, 0.02)": "TypeError: ForModel.for_model: too many positional arguments. Write ",
    "Muon.for_model(model, rules=RULES, lr=0.02)": "ValueError: a group of 'adamw' says no lr",
    "Muon.for_model(model.parameters(), rules=RULES, lr=0.02)": "TypeError: model: expected a model",
    "Muon.for_model(model, rules=RULES, lr='0.02', adamw_lr=3e-4)": "ValueError: lr='0.02': expected a finite rate",
    "Muon.for_model(model, rules=RULES, **RATES, momentum='0.9')": "ValueError: momentum='0.9': expected",
    "Muon.for_model(model, rules=RULES, **RATES, momentun=0.9)": "did you mean 'momentum'? Write ",
    "Muon.for_model(model, rules=RULES, lr=0.02, adam_lr=3e-4)": "unexpected keyword argument 'adam_lr'. Write ",
    "Muon.for_model(model, rules=RULES, **RATES, betas=(0.9, 0.99))": "Write kinds={'embedding': {'betas'",
    "Muon.for_model(model, rules=RULES, **RATES, algorithm='normuon')": "kinds={'matrix': {'algorithm'",
    "Muon.for_model(model, rules=MODULE_TYPES, **RATES)": "head.weight [50, 16] has as many rows",
    "Muon.for_model(model, rules=[[NO_HEAD], MODULE_TYPES], **RATES)": "head.weight [50, 16] has as many",
    "Muon.for_model(model, rules=[*RULES[0], *MODULE_TYPES], **RATES)": "Rule('head', 'head.weight') and ",
    "Muon.for_model(model, rules=['head.weight'], lr=0.02)": "TypeError: rules: expected rules in lists, as in rules=",
    "Muon.for_model(model, rules={'head.weight': 'adamw'}, lr=0.02)": "TypeError: rules: expected rules in lists",
    "Muon.for_model(model, rules=lambda name, p: p.ndim == 2, lr=0.02)": "found a function among them",
    "Muon.for_model(model, rules=[[Rule('head', 'heads.weight')], MODULE_TYPES], lr=0.02)": "did you mean 'head.weig",
    "Muon(sort_parameters(model, RULES))": "TypeError: params: expected parameters or groups, found the decisions of",
    "sort_parameters(model)": "ValueError: rules: expected some, found none. Write rules=",
    "sort_parameters()": "TypeError: sort_parameters: missing a required argument: 'model'. Write sort_parameters",
    "sort_parameters(RULES, model)": "TypeError: model: expected a model, whose names and modules decide, found a list",
}


@pytest.mark.parametrize("script", MADE)
def test_an_optimizer_that_cannot_be_made_shows_the_line_that_makes_it(script):
    names = {**NAMES, "model": Net()}
    error = run(script, names)
    assert MADE[script] in error
    if "Write Muon" in error and "lm_head" not in error and "decisions" not in error:
        assert type(eval(error.rpartition("Write ")[2], names)) is Muon
    elif "selects nothing" in error:  # the rule itself is wrong
        assert "did you mean 'head.weight'" in error
    elif written := re.search(r"Write rules=(\[.*\])(, where RULES are .*)?$", error):
        given = re.search(r"rules=(.*), (?:lr|\*\*RATES)", script)
        names["RULES"] = eval(given[1], names) if given else ()
        kinds = {name: decision.kind for decision in sort_parameters(names["model"], eval(written[1], names))
                 for name in decision.names}  # fmt: skip
        assert kinds["head.weight"] == "head" and kinds["up.weight"] == "matrix"
    elif written := re.search(r"Write (kinds=.*)$", error):
        call = re.sub(r", (betas|algorithm)=.*", f", {written[1]})", script)
        assert type(eval(call, names)) is Muon


@pytest.mark.parametrize(
    "rules",
    [RULES, [RULES], [RULES[0][0], MODULE_TYPES], (RULES[0], [MODULE_TYPES]), [RULES, [NO_HEAD]]],
    ids=["layers", "nested", "a rule beside a set", "tuples", "more"],
)
def test_rules_say_the_same_however_they_are_nested(rules):
    model = Net()
    expected = str(sort_parameters(model, *RULES))
    assert str(sort_parameters(model, rules)) == expected
    groups = Muon.for_model(model, rules=rules, lr=0.02, adamw_lr=3e-4).param_groups
    assert [len(group["params"]) for group in groups] == [2, 6]
