"""What is done with an orthogonalised matrix before it is applied, and functions as scales."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from muonckpt.optimizer import Muon, orthogonalize
from muonckpt.optimizer.step.methods import MATRICES


def test_normuon_divides_rows_by_the_root_of_their_mean_square_and_keeps_the_norm():
    """Against algorithm 1 of arXiv 2510.05491, written out in float64 with the norm of Muon instead of 0.2 √(mn)."""
    torch.manual_seed(0)
    matrices = [torch.randn(6, 40, dtype=torch.float64) * torch.logspace(0, -2, 6).view(6, 1) for _ in range(4)]
    moment, expected = torch.zeros(6, 1), torch.zeros(6, 1, dtype=torch.float64)
    for matrix in matrices:
        found = MATRICES["normuon"].finish(
            matrix.float(), {"second_moment": moment}, {"beta2": 0.9, "update_norm": "muon"}
        )
        expected = 0.9 * expected + 0.1 * (matrix**2).mean(dim=1, keepdim=True)
        want = matrix / (expected.sqrt() + 1e-8)
        want *= matrix.norm() / want.norm()
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(moment.double(), expected, rtol=1e-5, atol=1e-9)


def test_normuon_of_zeros_is_zeros():
    moment = torch.zeros(3, 1)
    assert (
        not MATRICES["normuon"]
        .finish(torch.zeros(3, 5), {"second_moment": moment}, {"beta2": 0.95, "update_norm": "muon"})
        .any()
    )


def halved(rows: int, columns: int) -> float:
    return 0.5 * math.sqrt(rows / columns)


def test_a_function_may_scale_the_rate_and_only_its_name_is_in_the_state():
    torch.manual_seed(0)
    start, gradient = torch.randn(24, 16), torch.randn(24, 16)
    p = nn.Parameter(start.clone())
    p.grad = gradient.clone()
    opt = Muon([p], lr=0.1, weight_decay=0.0, momentum=0.0, adjust_lr_fn=halved)
    opt.step()
    update = orthogonalize(gradient.bfloat16()).float() * halved(24, 16)
    torch.testing.assert_close(p.detach(), start - 0.1 * update, rtol=0, atol=1e-6)
    saved = opt.state_dict()["param_groups"][0]["adjust_lr"]
    assert saved.endswith("test_methods.halved")
    twin = copy.deepcopy(opt)
    twin.load_state_dict(opt.state_dict())
    with pytest.warns(UserWarning, match="keeps the code's adjust_lr='original'"):
        Muon([nn.Parameter(start)]).load_state_dict(opt.state_dict())


def test_two_functions_of_one_name_are_not_mixed_up():
    def scale(factor: float):
        return lambda rows, columns: factor

    opt = Muon([nn.Parameter(torch.ones(2, 2))], adjust_lr_fn=scale(1.0))
    with pytest.raises(ValueError, match="two different functions are called"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "adjust_lr": scale(2.0)})
