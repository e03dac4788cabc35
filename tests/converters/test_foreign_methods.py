"""State of optimizers that no program here has is not taken for AdamW's or Muon's, which has the same slots."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import muonckpt
from muonckpt import SourceError
from muonckpt.converters.options import grouped

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

W = torch.arange(12.0).reshape(4, 3)


def saved_run(path, optimizer_class, numbered=False, **options):
    """A checkpoint of a layer after a step."""
    model = nn.Sequential(nn.Linear(3, 4))
    optimizer = optimizer_class(model.named_parameters() if numbered else model.parameters(), **options)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = optimizer.state_dict() if numbered else get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=path, no_dist=True)
    return path


def saved_state(path, slots, **options):
    """A checkpoint of a matrix with these slots, of an optimizer that is not installed."""
    state = {"state": {"w": slots}, "param_groups": [{"params": ["w"], "lr": 0.1, **options}]}
    dcp.save({"model": {"w": W}, "optimizer": state}, checkpoint_id=path, no_dist=True)
    return path


TORCH = {
    "RAdam": (torch.optim.RAdam, {}, (), "'betas' and 'foreach' without 'amsgrad' as groups of torch.optim.RAdam"),
    "NAdam": (torch.optim.NAdam, {}, ("mu_product",), "'momentum_decay' as groups of torch.optim.NAdam"),
    "Adamax": (torch.optim.Adamax, {}, (), "torch.optim.RAdam or Adamax"),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9}, ("square_avg", "step"), "torch.optim.RMSprop"),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}, (), "'dampening' as groups of torch.optim.SGD"),
    "AMSGrad": (torch.optim.AdamW, {"amsgrad": True}, (), "exp_avg, exp_avg_sq, max_exp_avg_sq, step: no method"),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}, (), "coupled=0.1: decay that is added to the gradient"),
    "Adagrad": (torch.optim.Adagrad, {}, (), "step, sum: no method"),
}


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("name", TORCH)
def test_a_sibling_in_torch_is_refused(name, numbered, tmp_path):
    """Dropping the slots that tell it apart makes no AdamW of it."""
    optimizer_class, options, dropped, message = TORCH[name]
    source = saved_run(tmp_path / "source", optimizer_class, numbered, **options)
    for drop in {(), dropped}:
        with pytest.raises(SourceError, match=message) as refused:
            muonckpt.convert(source, tmp_path / "made", **grouped(to_dialect="muonckpt", drop=drop))
        assert "`select=`" in str(refused.value) or "`drop=`" in str(refused.value)
        assert not (tmp_path / "made").exists()


MOMENTS = {"step": torch.tensor(1.0), "exp_avg": W, "exp_avg_sq": W}
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
ELSEWHERE = {
    "LAMB": {"grad_averaging": True, "max_grad_norm": 1.0},
    "AdamP": {"delta": 0.1, "wd_ratio": 0.1, "nesterov": False},
    "AdaBound": {"final_lr": 0.1, "gamma": 1e-3, "amsbound": False},
    "Yogi": {"initial_accumulator": 1e-6},
    "GaLore": {"rank": 2, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"},
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_sibling_of_another_package_is_refused_by_its_options(name, tmp_path):
    source = saved_state(tmp_path / "source", MOMENTS, **ADAM, **ELSEWHERE[name])
    with pytest.raises(SourceError, match=f"as groups of {name} have, whose state cannot be translated.*`select=`"):
        muonckpt.convert(source, tmp_path / "made", to_dialect="muonckpt")


@pytest.mark.parametrize("shapes", [{"exp_avg": (2, 3), "exp_avg_sq": (2, 3)}, {"exp_avg_sq": ()}])
def test_moments_in_another_shape_than_the_weight_are_refused(shapes, tmp_path):
    """GaLore's are of low rank, and NovoGrad's second one is one number; both may lack telling options."""
    other = {slot: torch.ones(shape) for slot, shape in shapes.items()}
    source = saved_state(tmp_path / "source", {**MOMENTS, **other}, **ADAM)
    with pytest.raises(SourceError, match=r"'w' of shape .* has exp_avg.* of shape .*another optimizer than adamw"):
        muonckpt.convert(source, tmp_path / "made", to_dialect="muonckpt")
    # Its own program gets it back.
    muonckpt.convert(source, tmp_path / "copy")
    with muonckpt.open(tmp_path / "copy") as made:
        for slot, tensor in other.items():
            assert made.tensors[f"optimizer.state.w.{slot}"].shape == tensor.shape


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam])
def test_state_of_no_known_program_is_said_to_be_taken_for_adamw(optimizer_class, tmp_path):
    source = saved_run(tmp_path / "source", optimizer_class, weight_decay=0.0)
    report = muonckpt.convert(source, tmp_path / "made", to_dialect="muonckpt")
    expected = "note: the state of 2 parameters was taken for adamw by its slots alone (exp_avg, exp_avg_sq, step)"
    assert expected in report.notes
