"""LayerWise never trains or clips nothing without a word."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.workers import run
from torch import Tensor, nn

from muonckpt.optimizer import LayerWise, Muon, clip_grad_norm_

X = torch.arange(12.0).view(4, 3) / 7


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def groups(net: nn.Module) -> list[dict]:
    matrices, vectors = ([p for p in net.parameters() if p.ndim == ndim] for ndim in (2, 1))
    return [{"params": matrices, "lr": 0.05}, {"params": vectors, "algorithm": "adamw", "lr": 0.01}]


def weights(net: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in net.parameters()]


def backward(net: nn.Module) -> None:
    net(X).square().mean().backward()


def moved(net: nn.Module, before: list[Tensor]) -> bool:
    return not any(map(torch.equal, weights(net), before))


def cast(net: nn.Module) -> None:
    net.to(torch.float64).to(torch.float32)


def assigned(net: nn.Module) -> None:
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)


def one_replaced(net: nn.Sequential) -> None:
    net[2].bias = nn.Parameter(net[2].bias.detach().clone())


@pytest.mark.parametrize("replace", [assigned, one_replaced, cast])
def test_replaced_parameters_are_refused_and_what_the_error_says_trains(replace):
    net = network()
    opt = LayerWise(net, groups(net))
    replace(net)
    backward(net)
    before = weights(net)
    with pytest.raises(
        ValueError, match=r"was replaced, cast or moved .* without assign=True, or close\(\) this optimizer"
    ):
        opt.step()
    assert not moved(net, before)
    opt.close()
    opt = LayerWise(net, groups(net))
    net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()})
    net.zero_grad()
    backward(net)
    opt.step()
    assert moved(net, before)


def differ(params: list[nn.Parameter], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(param.shape, generator=generator) for param in params]


def written_on_ranks(rank: int, world: int) -> list[Tensor]:
    """Train by gradients that no backward pass makes; one parameter has them on the last rank only."""
    net = network()
    opt = LayerWise(net, groups(net), group=dist.group.WORLD if world > 1 else None)
    params = list(net.parameters())
    for step in range(3):
        for number, (param, gradient) in enumerate(zip(params, differ(params, 10 * step + rank), strict=True)):
            if number or rank == world - 1:
                param.grad = gradient
        opt.step()
        assert all(param.grad is None for param in params)
    return weights(net)


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_that_are_written_by_hand_are_stepped(world):
    net = network()
    params, opt = list(net.parameters()), Muon(groups(net))
    for step in range(3):
        of_ranks = [differ(params, 10 * step + rank) for rank in range(world)]
        for param, *given in zip(params, *of_ranks, strict=True):
            param.grad = sum(given) / world
        params[0].grad = of_ranks[-1][0] / world
        opt.step()
    for found in run(world, written_on_ranks):
        assert all(map(torch.equal, found, weights(net)))


@pytest.mark.parametrize("finish", [lambda opt: None, LayerWise.finish_gradients, lambda opt: opt.clip_grad_norm_(1.0)])
def test_a_gradient_written_beside_that_of_a_backward_pass_is_refused(finish):
    net = network()
    opt = LayerWise(net, groups(net))
    backward(net)
    finish(opt)
    before = weights(net)
    net[0].weight.grad = torch.ones(5, 3)
    with pytest.raises(ValueError, match=r"'0.weight' has a gradient in param.grad, and another in its buffer"):
        opt.step()
    assert not moved(net, before)
    opt.zero_grad()
    assert net[0].weight.grad is None
    net[0].weight.register_hook(torch.ones_like)
    backward(net)
    opt.step()
    assert moved(net, before)


def test_a_gradient_written_for_what_was_reduced_without_one_is_refused():
    net = network()
    opt = LayerWise(net, groups(net))
    net[0](X).square().mean().backward()
    opt.finish_gradients()
    net[2].weight.grad = torch.ones(2, 5)
    with pytest.raises(RuntimeError, match=r"a gradient of '2.weight' after its bucket was reduced"):
        opt.step()


def test_clipping_what_lies_in_buffers_is_refused_and_the_method_clips():
    net, plain = network(), nn.Parameter(torch.ones(3))
    opt = LayerWise(net, groups(net))
    backward(net)
    for params in (net.parameters(), [plain, *net.parameters()]):
        with pytest.raises(
            ValueError, match=r"buffers of a LayerWise optimizer.*optimizer.clip_grad_norm_\(max_norm\)"
        ):
            clip_grad_norm_(params, 1e-9)
    norm = opt.clip_grad_norm_(1e-9)
    assert norm > 0.01 and opt.clip_grad_norm_(1.0) < 2e-9
    opt.close()
    backward(net)
    assert clip_grad_norm_(net.parameters(), 1e-9) == norm


CLOSED: dict[str, Callable[[LayerWise], object]] = {
    "step": LayerWise.step,
    "finish": LayerWise.finish_gradients,
    "clip": lambda opt: opt.clip_grad_norm_(1.0),
    "load": lambda opt: opt.load_state_dict(opt.state_dict()),
}


@pytest.mark.parametrize("call", CLOSED)
def test_a_closed_optimizer_steps_nothing_and_says_so(call):
    net = network()
    opt = LayerWise(net, groups(net))
    opt.close()
    backward(net)
    with pytest.raises(RuntimeError, match="this optimizer was closed"):
        CLOSED[call](opt)
    other, before = LayerWise(net, groups(net)), weights(net)
    net.zero_grad()
    backward(net)
    other.step()
    assert moved(net, before)


def test_a_step_without_any_gradient_is_warned_of():
    net = network()
    opt = LayerWise(net, groups(net))
    with pytest.warns(RuntimeWarning, match="no parameter of this optimizer has a gradient") as told:
        opt.step()
    assert [warning.filename for warning in told] == [__file__]


def test_parameters_that_the_model_got_later_are_warned_of_once():
    net = network()
    opt = LayerWise(net, groups(net))
    net.append(nn.Linear(2, 2, bias=False))
    with pytest.warns(RuntimeWarning, match=r"not reduced and no step changes them: 3.weight\.") as told:
        for _ in range(2):
            backward(net)
            opt.step()
    assert [warning.filename for warning in told] == [__file__]
    opt.close()
    net.zero_grad()
    opt, before = LayerWise(net, groups(net)), weights(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(net)
        opt.step()
    assert moved(net, before)
