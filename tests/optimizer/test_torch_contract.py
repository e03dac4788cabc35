"""Muon steps as any torch optimizer does: the checks that torch runs on its own, and those around it (AMP, compile)."""

from __future__ import annotations

import math
from itertools import cycle

import pytest
import torch
from support import sweep
from support.least_squares import ALGORITHMS, SCALAR, Line, contents, groups, normal, run_steps, same, trained
from torch import nn
from torch.optim import lr_scheduler as schedulers

from muonckpt.optimizer import Muon

# --- construction -----------------------------------------------------------------------------------------------


def test_what_torch_refuses_is_refused():
    p, q = nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(1, 1))
    with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
        Muon(p)
    with pytest.raises(TypeError, match=r"^Muon: params=a list: expected Iterable\[Tensor\]"):
        Muon([p, 1.0])
    with pytest.raises(ValueError, match="empty parameter list"):
        Muon([])
    with pytest.raises(ValueError, match="non-leaf"):
        Muon([p * 2])
    with pytest.raises(ValueError, match="more than one parameter group"):
        Muon([{"params": p}, {"params": p}])
    with pytest.raises(ValueError, match="parameter 1 of group 0 is parameter 0 of group 0, too"):
        Muon([p, p])
    with pytest.raises(ValueError, match="with/without names"):
        Muon([("weight", p), q])
    with pytest.raises(ValueError, match="lr="):
        Muon([p], lr=-1.0)
    with pytest.raises(ValueError, match="lr="):
        Muon([p], lr=torch.tensor([0.1, 0.1]))
    with pytest.raises(ValueError, match="lr="):
        Muon([p], lr=math.nan)


@pytest.mark.parametrize("option", ["maximize", "capturable", "differentiable", "fused", "amsgrad"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_options_that_torch_has_and_we_have_not_are_refused_not_ignored(algorithm, option):
    with pytest.raises(ValueError, match=f"{option}=True"):
        Muon([{"params": [nn.Parameter(torch.ones(2, 2))], "algorithm": algorithm, option: True}])
    Muon([{"params": [nn.Parameter(torch.ones(2, 2))], "algorithm": algorithm, option: False}])


# --- steps ------------------------------------------------------------------------------------------------------

SCHEDULERS = {
    "none": lambda opt: None,
    "StepLR": lambda opt: schedulers.StepLR(opt, step_size=10, gamma=0.9),
    "LambdaLR": lambda opt: schedulers.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "Linear, then cosine": lambda opt: schedulers.SequentialLR(
        opt, [schedulers.LinearLR(opt, 0.1, total_iters=5), schedulers.CosineAnnealingLR(opt, 15)], milestones=[5]
    ),
    "OneCycleLR": lambda opt: schedulers.OneCycleLR(opt, max_lr=0.02, total_steps=30, cycle_momentum=False),
    "ReduceLROnPlateau": lambda opt: schedulers.ReduceLROnPlateau(opt, patience=2),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("algorithm", sweep(ALGORITHMS, "muon", "adamw"))
def test_the_loss_goes_down_under_every_scheduler_and_a_rate_in_a_tensor_takes_the_same_steps(algorithm, name):
    found = []
    for lr in (torch.tensor(0.0078125, dtype=torch.float64), 0.0078125):
        net = Line()
        opt = Muon(groups(net.parameters(), algorithm), lr=lr)
        scheduler = SCHEDULERS[name](opt)
        losses = []
        for _ in range(20):
            losses.append(opt.step(net.closure(opt)).item())
            if scheduler is not None:
                scheduler.step(*([losses[-1]] if name == "ReduceLROnPlateau" else []))
        assert net().item() < losses[0]
        assert all(isinstance(group["lr"], torch.Tensor) == isinstance(lr, torch.Tensor) for group in opt.param_groups)
        found.append(contents(net, opt))
    assert same(*found)


CYCLES = {
    "OneCycleLR": lambda opt, **how: schedulers.OneCycleLR(opt, max_lr=0.02, total_steps=10, **how),
    "CyclicLR": lambda opt, **how: schedulers.CyclicLR(opt, base_lr=0.01, max_lr=0.02, **how),
}


@pytest.mark.filterwarnings("ignore:no parameter of this optimizer has a gradient")
@pytest.mark.parametrize("cycle", CYCLES)
def test_a_cycle_changes_what_all_groups_have_and_nothing_else(cycle):
    """These schedulers ask ``Optimizer.defaults`` what is cycled, momentum or beta1, and write it into every group."""
    net = Line()
    matrices, rest = {"params": [net.weight]}, {"params": [net.bias], "algorithm": "adamw", "lr": 0.01}
    both = Muon([matrices, rest])
    with pytest.raises(ValueError, match="momentum or beta1"):
        CYCLES[cycle](both)
    scheduler = CYCLES[cycle](both, cycle_momentum=False)
    both.step()
    scheduler.step()
    assert "momentum" not in both.param_groups[1] and "betas" not in both.param_groups[0]
    only = Muon([rest])
    beta2 = only.param_groups[0]["betas"][1]
    CYCLES[cycle](only, base_momentum=0.5, max_momentum=0.75)
    assert only.param_groups[0]["betas"] == (0.75, beta2) and "momentum" not in only.param_groups[0]


def test_a_group_that_is_added_or_refused_later_does_not_get_momentum():
    net = Line()
    opt = Muon([net.weight])
    with pytest.raises(ValueError, match="betas="):
        opt.add_param_group({"params": [net.bias], "algorithm": "adamw", "lr": 0.01, "betas": (2.0, 2.0)})
    assert opt.defaults["momentum"] == 0.95
    opt.add_param_group({"params": [net.bias], "algorithm": "adamw", "lr": 0.01})
    assert "momentum" not in opt.param_groups[1] and "momentum" not in opt.defaults


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_strided_parameters_step_as_contiguous_ones(algorithm):
    net, strided = Line(), Line(stride=2)
    with torch.no_grad():
        strided.load_state_dict(net.state_dict())
    assert not strided.weight.is_contiguous()
    opts = [Muon(groups(n.parameters(), algorithm), lr=0.01) for n in (net, strided)]
    for _ in range(3):
        for n, opt in zip((net, strided), opts, strict=True):
            n.weight.grad, n.bias.grad = normal(5, 10, seed=3).t(), normal(10, 3, seed=4)[:, 1]
            opt.step()
    assert same(contents(net, opts[0]), contents(strided, opts[1]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_parameters_of_several_dtypes_step_as_each_would_alone(algorithm, dtype):
    """Whatever is batched or fused, the bits of a parameter do not depend on its company."""
    shapes = [(4, 6), (4, 6), (6, 4), (8, 8), (4, 6), (1, 9), (2, 4, 6), (0, 3)]
    others = [torch.float32, dtype]

    def fresh() -> list[nn.Parameter]:
        return [nn.Parameter(normal(*s, seed=i, dtype=others[i % 2])) for i, s in enumerate(shapes)]

    together, alone = fresh(), fresh()
    opts = [Muon(groups(together, algorithm), lr=0.01), *(Muon(groups([p], algorithm), lr=0.01) for p in alone)]
    for step in range(3):
        for params in (together, alone):
            for i, p in enumerate(params):
                p.grad = normal(*p.shape, seed=100 + 10 * step + i, dtype=p.dtype)
        for opt in opts:
            opt.step()
    for i, (p, q) in enumerate(zip(together, alone, strict=True)):
        assert torch.equal(p, q) and p.dtype == others[i % 2], shapes[i]


@pytest.mark.parametrize("algorithm", SCALAR)
def test_scalars_and_empty_tensors_are_parameters_too(algorithm):
    params = [nn.Parameter(torch.ones(shape)) for shape in [(), (0,), (3, 0), (1,)]]
    opt = Muon(groups(params, algorithm), lr=0.5, weight_decay=0.0)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert params[0].item() == params[3].item() == pytest.approx(0.5)


@pytest.mark.filterwarnings("ignore:no parameter of this optimizer has a gradient")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_without_gradients_changes_nothing_and_zero_gradients_move_nothing(algorithm):
    net = Line()
    opt = Muon(groups(net.parameters(), algorithm), lr=0.1, weight_decay=0.0)
    before = contents(net, opt)
    assert opt.step() is None
    assert same(contents(net, opt), before)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.equal(net.weight, Line().weight) and torch.equal(net.bias, Line().bias)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_are_left_as_they_are_and_zero_grad_clears_them(algorithm):
    net = Line()
    opt = Muon(groups(net.parameters(), algorithm))
    net().backward()
    before = [(p.grad, p.grad.clone()) for p in net.parameters()]
    opt.step()
    assert all(p.grad is g and torch.equal(g, copied) for p, (g, copied) in zip(net.parameters(), before, strict=True))
    opt.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())
    opt.zero_grad()
    assert all(p.grad is None for p in net.parameters())


def test_the_closure_runs_once_with_gradients_on_and_its_value_is_returned():
    net = Line()
    opt = Muon(groups(net.parameters(), "muon"))
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return net.closure(opt)()

    with torch.no_grad():
        loss = opt.step(closure)
    assert calls == [True] and loss.requires_grad and torch.equal(loss, Line()())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_is_in_place_and_autograd_knows(algorithm):
    net = Line()
    opt = Muon(groups(net.parameters(), algorithm))
    storages = [p.data_ptr() for p in net.parameters()]
    net().backward()
    stale = (net.weight.square().sum() + net.bias.square().sum()).square()
    opt.step()
    assert all(p.is_leaf and p.requires_grad and p.grad_fn is None for p in net.parameters())
    assert [p.data_ptr() for p in net.parameters()] == storages
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_data_of_a_parameter_may_be_swapped_between_steps(algorithm):
    net, other = Line(), Line()
    opts = [Muon(groups(n.parameters(), algorithm), lr=0.01) for n in (net, other)]
    for n, opt in zip((net, other), opts, strict=True):
        run_steps(n, opt, 2)
    net.weight.data = net.weight.data.clone()
    net.bias.data = torch.stack([net.bias.data] * 2, 1)[:, 0]
    assert same(*(run_steps(n, opt, 2) for n, opt in zip((net, other), opts, strict=True)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_parameters_may_be_frozen_and_thawed(algorithm):
    net = Line()
    opt = Muon(groups(net.parameters(), algorithm), lr=0.01)
    run_steps(net, opt, 2)
    net.weight.requires_grad_(False)
    frozen, moving = contents(net, opt)[:2], net.bias.detach().clone()
    run_steps(net, opt, 2)
    assert same(contents(net, opt)[:2], frozen) and not torch.equal(net.bias, moving)
    net.weight.requires_grad_(True)
    run_steps(net, opt, 1)
    assert not torch.equal(net.weight, frozen[0])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_groups_may_be_added_while_training(algorithm):
    net, late = Line(), Line()
    opt = Muon(groups([net.weight], algorithm), lr=0.01)
    run_steps(net, opt, 2)
    for group in groups(late.parameters(), algorithm):
        opt.add_param_group(group)
    assert all(opt.state[p] for p in late.parameters()) and opt.param_groups[-1]["lr"] == 0.01
    expected = trained(algorithm, 2, lr=0.01)
    for _ in range(2):
        opt.zero_grad()
        late().backward()
        opt.step()
    assert same(contents(late, opt), expected)
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": net.weight, "algorithm": algorithm})


# --- around the optimizer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_gradient_scaler_skips_steps_with_infinite_gradients_and_no_others(algorithm):
    net = Line()
    opt = Muon(groups(net.parameters(), algorithm), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step in range(4):
        before = contents(net, opt)
        opt.zero_grad()
        scaler.scale(net()).backward()
        if step == 1:
            net.weight.grad[0, 0] = math.inf
        scaler.step(opt)
        scaler.update()
        assert same(contents(net, opt), before) == (step == 1)
    assert scaler.get_scale() == 512.0
    assert same(contents(net, opt), trained(algorithm, lr=0.01))


COMPILED = list(zip(ALGORITHMS, cycle(["eager", "aot_eager"]), strict=False))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("algorithm", "backend"), sweep(COMPILED, COMPILED[1]))
def test_a_compiled_training_step_takes_the_same_steps(algorithm, backend):
    torch._dynamo.reset()
    net = Line()
    opt = Muon(groups(net.parameters(), algorithm), lr=0.01)

    @torch.compile(backend=backend)
    def step() -> torch.Tensor:
        opt.zero_grad()
        loss = net()
        loss.backward()
        opt.step()
        return loss

    for _ in range(3):
        step()
    for found, expected in zip(contents(net, opt), trained(algorithm, lr=0.01), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
