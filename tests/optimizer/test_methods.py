"""What is done with an orthogonalised matrix before it is applied, and functions as scales."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from muonckpt import LayoutError
from muonckpt.optimizer import Muon, orthogonalize
from muonckpt.optimizer.methods.form import WholeMatrix
from muonckpt.optimizer.methods.muon import NORMUON


def test_normuon_divides_rows_by_the_root_of_their_mean_square_and_keeps_the_norm():
    """Against algorithm 1 of arXiv 2510.05491, written out in float64 with the norm of Muon instead of 0.2 √(mn)."""
    torch.manual_seed(0)
    matrices = [torch.randn(6, 40, dtype=torch.float64) * torch.logspace(0, -2, 6).view(6, 1) for _ in range(4)]
    moment, expected = torch.zeros(6, 1), torch.zeros(6, 1, dtype=torch.float64)
    for matrix in matrices:
        options = {"beta2": 0.9, "update_norm": "muon"}
        found = NORMUON.update(WholeMatrix(matrix.float()[None], {"second_moment": moment[None]}, None, options))[0]
        expected = 0.9 * expected + 0.1 * (matrix**2).mean(dim=1, keepdim=True)
        want = matrix / (expected.sqrt() + 1e-8)
        want *= matrix.norm() / want.norm()
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(moment.double(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("shape", "summed"), [((6, 40), 0), ((40, 6), 1), ((8, 8), 1)])
def test_normuon_keeps_as_many_numbers_as_the_longer_side_has(shape, summed):
    """A step of Muon and one of NorMuon, from zero: the mean squares are of rows if tall, of columns if wide."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    options = {"lr": 1.0, "weight_decay": 0.0, "adjust_lr_fn": "none", "ns_dtype": "float32"}
    updates = []
    for more in ({}, {"algorithm": "normuon", "statistics": "longer", "beta2": 0.9}):
        p = nn.Parameter(torch.zeros(shape))
        p.grad = gradient.clone()
        opt = Muon([{"params": [p], **more}], **options)
        opt.step()
        updates.append(p.detach())
    plain, normal = updates
    squares = 0.1 * plain.square().mean(dim=summed, keepdim=True)
    torch.testing.assert_close(opt.state[p]["second_moment"], squares)
    expected = plain / squares.sqrt()
    torch.testing.assert_close(normal, expected * (plain.norm() / expected.norm()), rtol=1e-4, atol=1e-6)


def test_statistics_of_the_longer_side_need_matrices_of_one_kind():
    group = {"params": [nn.Parameter(torch.ones(20, 8))], "algorithm": "normuon", "statistics": "longer"}
    with pytest.raises(LayoutError, match="has tall and wide matrices"):
        Muon([{**group, "pieces": (16, 4)}])
    with pytest.raises(ValueError, match="statistics='columns': expected one of"):
        Muon([{**group, "statistics": "columns"}])


def test_normuon_of_zeros_is_zeros():
    options = {"beta2": 0.95, "update_norm": "muon"}
    assert not NORMUON.update(
        WholeMatrix(torch.zeros(2, 3, 5), {"second_moment": torch.zeros(2, 3, 1)}, None, options)
    ).any()


def halved(rows: int, columns: int) -> float:
    return 0.5 * math.sqrt(rows / columns)


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
def test_a_function_may_scale_the_rate_and_only_its_name_is_in_the_state():
    torch.manual_seed(0)
    start, gradient = torch.randn(24, 16), torch.randn(24, 16)
    p = nn.Parameter(start.clone())
    p.grad = gradient.clone()
    opt = Muon([p], lr=0.1, weight_decay=0.0, momentum=0.0, adjust_lr_fn=halved)
    opt.step()
    update = orthogonalize(gradient.bfloat16()).float() * halved(24, 16)
    torch.testing.assert_close(p.detach(), start - 0.1 * update, rtol=0, atol=1e-6)
    saved = opt.state_dict()["param_groups"][0]["adjust_lr_fn"]
    assert saved.endswith("test_methods.halved")
    twin = copy.deepcopy(opt)
    twin.load_state_dict(opt.state_dict())
    with pytest.warns(UserWarning, match="keeps the code's adjust_lr_fn='original'"):
        Muon([nn.Parameter(start)]).load_state_dict(opt.state_dict())


def test_two_functions_of_one_name_are_not_mixed_up():
    def scale(factor: float):
        return lambda rows, columns: factor

    opt = Muon([nn.Parameter(torch.ones(2, 2))], adjust_lr_fn=scale(1.0))
    with pytest.raises(ValueError, match="two different functions are called"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "adjust_lr_fn": scale(2.0)})
