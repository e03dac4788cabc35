"""Options that no run said: a conversion writes them for stock DCP, and nobody takes them for the saved run's."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import muonckpt
from muonckpt.converters.options import grouped
from muonckpt.converters.translate.names import NameRule, NameRules
from muonckpt.optimizer import Muon

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHAPES = {"up": (8, 6), "down": (6, 8)}
UNSAID = {"gram", "ns_coefficients", "ns_dtype", "ns_steps"}


def saved(path):
    """A checkpoint of dion, whose groups say nothing of Newton-Schulz."""
    options = {"algorithm": "muon", "lr": 0.02, "mu": 0.95, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1,
               "cautious_wd": False, "step": 3, "epsilon": 1e-8, "nesterov": True, "flatten": False,
               "adjust_lr": "rms_norm"}  # fmt: skip
    weights = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    state = {name: {"momentum": torch.ones(shape)} for name, shape in SHAPES.items()}
    groups = [{**options, "params": [*SHAPES]}]
    muonckpt.save({"model": weights, "optimizer": {"state": state, "param_groups": groups}}, path)


def resumed(path, flat: bool, names=SHAPES, **options) -> tuple[Muon, list[str]]:
    """Load into a new run, and return its optimizer and the warnings."""
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(SHAPES.get(name, (8, 6)))) for name in names})
    code = {"adjust_lr_fn": "match_rms_adamw", "eps": 1e-8, "lr": 0.5, **options}
    optimizer = Muon(list(model.named_parameters()), **code)
    form = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=form)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        muonckpt.load({"model": weights, "optimizer": state}, path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=form)
    return optimizer, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("keys", ["nested", "flat"])
@pytest.mark.parametrize("code", [{}, {"ns_coefficients": "polar_express_dion", "ns_dtype": "float32"}])
def test_a_load_says_what_the_source_did_not_say_whatever_the_code_has(keys, code, tmp_path):
    saved(tmp_path / "dion")
    muonckpt.convert(tmp_path / "dion", tmp_path / "ours", **grouped(to_dialect="muonckpt", keys=keys))
    optimizer, told = resumed(tmp_path / "ours", keys == "flat", **code)
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.02 and code.items() <= group.items()
    (line,) = [line for line in told if "the source did not say" in line]
    assert {word.partition("=")[0] for word in line.replace("(", " ").split() if "=" in word} == UNSAID
    assert not [line for line in told if "saved" in line and "ns_" in line]


def test_what_no_run_said_stays_so_through_further_conversions(tmp_path):
    """Renamed, resharded, and in another program's words, where it is no saved value either."""
    saved(tmp_path / "dion")
    rename = NameRules((NameRule(("up",), ("gate",)),))
    muonckpt.convert(tmp_path / "dion", tmp_path / "ours", **grouped(to_dialect="muonckpt"))
    muonckpt.convert(tmp_path / "ours", tmp_path / "renamed", **grouped(rules=rename))
    muonckpt.reshard(tmp_path / "renamed", tmp_path / "two", mesh={"dp": 2})
    _, told = resumed(tmp_path / "two", False, names=("gate", "down"))
    (line,) = [line for line in told if "the source did not say" in line]
    assert all(f"{option}=" in line for option in UNSAID)
    report = muonckpt.convert(tmp_path / "two", tmp_path / "torch", **grouped(to_dialect="torch"))
    unsaid = {check.subject: check for check in report.checklist if "recorded as unsaid" in check.reason}
    assert unsaid.keys() == {"ns_coefficients of muon groups", "ns_steps of muon groups"}
    # A run that has gone on from there says them: its own save has nothing unsaid.
    optimizer, _ = resumed(tmp_path / "two", False, names=("gate", "down"))
    muonckpt.save({"optimizer": optimizer.state_dict()}, tmp_path / "next")
    with muonckpt.open(tmp_path / "next") as later, muonckpt.open(tmp_path / "two") as before:
        assert "unsaid" not in later.provenance and before.provenance["unsaid"]


def test_what_a_template_says_is_said(tmp_path):
    saved(tmp_path / "dion")
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()})
    like = Muon(list(model.named_parameters()), ns_coefficients="keller", ns_steps=6).describe()
    muonckpt.convert(tmp_path / "dion", tmp_path / "ours", **grouped(to_dialect="muonckpt", like=like))
    with muonckpt.open(tmp_path / "ours") as made:
        assert "unsaid" not in made.provenance
        assert [group["ns_steps"] for group in made.groups.values()] == [6]


def test_torch_says_all_that_its_matrices_compute_with(tmp_path):
    weights = {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    model = nn.ParameterDict(weights)
    theirs = torch.optim.Muon([*model.named_parameters()], lr=0.02)
    sum(weight.square().sum() for weight in weights.values()).backward()
    theirs.step()
    state = get_state_dict(model, theirs)[1]
    muonckpt.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "torch")
    muonckpt.convert(tmp_path / "torch", tmp_path / "ours", **grouped(to_dialect="muonckpt"))
    optimizer, told = resumed(
        tmp_path / "ours", False, lr=0.02, adjust_lr_fn="original", eps=1e-7, ns_coefficients="keller"
    )
    assert told == [] and optimizer.param_groups[0]["ns_dtype"] == "bfloat16"
