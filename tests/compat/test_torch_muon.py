"""The drop-in class for torch.optim.Muon: its updates, its state both ways, and the same bits on any mesh."""

from __future__ import annotations

import copy
import inspect
import json

import pytest
import torch
from safetensors.torch import load_file
from support.golden import golden
from torch import nn

from muonckpt.compat.torch_muon import Muon

SHAPES = [(24, 16), (16, 40), (12, 12), (1, 9)]


class Exact(torch.Tensor):
    """A gradient that does not become bfloat16, so that torch's Newton-Schulz runs in float32."""

    def bfloat16(self):
        return self.clone()


def random(seed: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], gradient=lambda tensor: tensor) -> None:
    for step in (1, 2, 3):
        for param, value in zip(params, random(step), strict=True):
            param.grad = gradient(value)
        optimizer.step()


OPTIONS = {
    "defaults": {},
    "no nesterov": {"nesterov": False},
    "rms": {"adjust_lr_fn": "match_rms_adamw"},
    "original": {"adjust_lr_fn": "original", "momentum": 0.7, "weight_decay": 0.5, "lr": 0.3},
    "coefficients": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 12},
    "few steps": {"ns_steps": 2},
    "eps": {"eps": 50.0},
    "rate in a tensor": {"lr": torch.tensor(0.2)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_update_is_torchs(name):
    ours, theirs = ([nn.Parameter(weight) for weight in random(0)] for _ in range(2))
    train(Muon([{"params": ours, "ns_dtype": "float32"}], **OPTIONS[name]), ours)
    train(torch.optim.Muon(theirs, **OPTIONS[name]), theirs, lambda value: value.as_subclass(Exact))
    for mine, other, start in zip(ours, theirs, random(0), strict=True):
        torch.testing.assert_close(mine - start, other.as_subclass(torch.Tensor) - start, rtol=1e-4, atol=1e-6)


def test_options_of_groups_are_torchs():
    ours, theirs = ([nn.Parameter(weight) for weight in random(0)] for _ in range(2))

    def groups(params: list[nn.Parameter]) -> list[dict]:
        return [
            {"params": params[:2], "adjust_lr_fn": "match_rms_adamw", "ns_coefficients": (2.0, -1.5, 0.5)},
            {"params": params[2:], "adjust_lr_fn": None, "nesterov": False, "lr": 0.1},
        ]

    mine = Muon([{**group, "ns_dtype": "float32"} for group in groups(ours)])
    other = torch.optim.Muon(groups(theirs))
    train(mine, ours)
    train(other, theirs, lambda value: value.as_subclass(Exact))
    for mine, other, start in zip(ours, theirs, random(0), strict=True):
        torch.testing.assert_close(mine - start, other.as_subclass(torch.Tensor) - start, rtol=1e-4, atol=1e-6)


def test_arguments_are_torchs_in_the_same_order():
    ours, theirs = (list(inspect.signature(made.__init__).parameters.values()) for made in (Muon, torch.optim.Muon))
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.default, p.kind) for p in theirs]
    positional = (0.1, 0.2, 0.3, False, (2.0, -1.5, 0.5), 1e-6, 4, "match_rms_adamw")
    made = (muon([nn.Parameter(torch.ones(2, 2))], *positional) for muon in (Muon, torch.optim.Muon))
    group, expected = (optimizer.state_dict()["param_groups"][0] for optimizer in made)
    assert {name: group[name] for name in expected if name != "params"} == {
        name: value for name, value in expected.items() if name != "params"
    }


def carry_over(source: list[nn.Parameter], target: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for param, other in zip(source, target, strict=True):
            other.copy_(param.as_subclass(torch.Tensor))


@pytest.mark.filterwarnings("error")
def test_state_loads_both_ways():
    """Three steps here, three there, and three here again are nine steps of one."""
    ours, theirs, alone = ([nn.Parameter(weight) for weight in random(0)] for _ in range(3))
    mine = Muon([{"params": ours, "ns_dtype": "float32"}], lr=0.1)
    other, reference = torch.optim.Muon(theirs, lr=0.5), torch.optim.Muon(alone, lr=0.1)
    train(mine, ours)
    other.load_state_dict(copy.deepcopy(mine.state_dict()))
    carry_over(ours, theirs)
    train(other, theirs, lambda value: value.as_subclass(Exact))
    for slots in mine.state.values():
        slots["momentum_buffer"].zero_()
    fresh = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.5).state_dict()
    with pytest.warns(UserWarning, match=r"of the saved run, .*group 0 \(muon\): weight_decay=0.5, not 0.1\. "):
        mine.load_state_dict(copy.deepcopy(fresh | {"state": other.state_dict()["state"]}))
    assert mine.param_groups[0]["weight_decay"] == 0.5
    with pytest.warns(UserWarning, match=r"weight_decay=0.1, not 0.5\. "):
        mine.load_state_dict(copy.deepcopy(other.state_dict()))
    assert mine.param_groups[0]["lr"] == 0.1
    carry_over(theirs, ours)
    train(mine, ours)
    for _ in range(3):
        train(reference, alone, lambda value: value.as_subclass(Exact))
    for param, expected in zip(ours, alone, strict=True):
        torch.testing.assert_close(param.detach(), expected.detach().as_subclass(torch.Tensor), rtol=1e-4, atol=1e-5)


def test_three_steps_are_those_that_torch_made():
    """The golden run was made in bfloat16, which rounds a few per cent away; momentum has no such excuse."""
    path = golden("torch_fsdp4")
    meta, truth = json.loads((path / "meta.json").read_text()), load_file(path / "truth.safetensors")
    shapes = [tuple(param["shape"]) for param in meta["params"]]
    names = {param["name"] for param in meta["params"] if param["group"] == "muon"}
    draw = {
        seed: dict(zip([p["name"] for p in meta["params"]], random(seed, shapes), strict=True)) for seed in range(4)
    }
    params = {name: nn.Parameter(0.05 * draw[0][name]) for name in sorted(names)}
    [options] = {json.dumps({k: v for k, v in g.items() if k != "params"}) for g in meta["param_groups"][0]}
    optimizer = Muon(params.values(), **json.loads(options))
    for seed in (1, 2, 3):
        for name, param in params.items():
            param.grad = 0.1 * draw[seed][name]
        optimizer.step()
    for name, param in params.items():
        torch.testing.assert_close(param.detach(), truth[f"param/{name}"], rtol=0, atol=0.01)
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], truth[f"state/{name}/momentum_buffer"])


def test_what_torch_refuses_is_refused():
    for shape in ((2, 3, 4), (3,)):
        with pytest.raises(ValueError, match=r"torch\.optim\.Muon takes two dims only|Muon needs a matrix"):
            Muon([nn.Parameter(torch.ones(shape))])
    for scale in ("spectral", "none", "match"):
        with pytest.raises(ValueError, match=f"adjust_lr_fn='{scale}': expected None, 'original' or 'match_rms_adamw'"):
            Muon([nn.Parameter(torch.ones(2, 2))], adjust_lr_fn=scale)
