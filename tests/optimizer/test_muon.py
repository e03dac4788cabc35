"""What a step does, and how the optimizer resumes through stock DCP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import torch_since, workers
from support.every_kind import assert_same_bits, snapshot
from support.fsdp_model import build, steps
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from muonckpt import LayoutError
from muonckpt.optimizer import ADJUST_LR, Muon, orthogonalize

# --- state ------------------------------------------------------------------------------------------------------


def interrupted(rank: int, world: int, path: str) -> list[torch.Tensor]:
    """Save after two steps with stock DCP and train two more; return a snapshot."""
    net, opt = build()
    steps(net, opt, 0, 2)
    model, state = get_state_dict(net, opt)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=path)
    steps(net, opt, 2, 4)
    return snapshot(list(net.parameters()), opt)


def resumed(rank: int, world: int, path: str) -> tuple[list[torch.Tensor], list[str]]:
    """Load with stock DCP and train the last two steps; return a snapshot, and the keys of the state."""
    net, opt = build()
    model, state = get_state_dict(net, opt)
    keys = []
    for name, slots in state["state"].items():
        keys += [f"{name}.{slot}" for slot in slots]
    dcp.load({"model": model, "optimizer": state}, checkpoint_id=path)
    set_state_dict(net, opt, model_state_dict=model, optim_state_dict=state)
    steps(net, opt, 2, 4)
    return snapshot(list(net.parameters()), opt), keys


@pytest.mark.parametrize("world", [1, 2])
def test_stock_dcp_resumes_in_fresh_processes_as_the_uninterrupted_run_also_without_gradients(world, tmp_path):
    path = str(tmp_path / "checkpoint")
    expected = run(world, interrupted, path)
    workers.shutdown()  # so that fresh processes resume
    for uninterrupted, (actual, keys) in zip(expected, run(world, resumed, path), strict=True):
        assert_same_bits(actual, uninterrupted)
        assert "unused.weight.momentum_buffer" in keys and "unused.bias.exp_avg" in keys


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
def test_an_option_of_former_versions_is_left_in_the_checkpoint():
    opt = Muon([nn.Parameter(torch.randn(4, 3))])
    state = opt.state_dict()
    state["param_groups"][0] |= {"blocks": 4, "lr": 0.5}
    opt.load_state_dict(state)
    assert opt.param_groups[0]["lr"] == 0.5 and "blocks" not in opt.param_groups[0]


# --- the step itself --------------------------------------------------------------------------------------------


def test_the_update_is_decay_then_scaled_orthogonal_momentum():
    torch.manual_seed(0)
    start, gradient = torch.randn(24, 16), torch.randn(24, 16)
    for adjust, scale in ADJUST_LR.items():
        p = nn.Parameter(start.clone())
        p.grad = gradient.clone()
        Muon([p], lr=0.1, weight_decay=0.5, adjust_lr_fn=adjust).step()
        # The momentum starts from zeros, and Nesterov looks one step ahead.
        moment = 0.05 * gradient
        update = orthogonalize(torch.lerp(gradient, moment, 0.95).bfloat16()).float() * scale(24, 16)
        torch.testing.assert_close(p.detach(), start * (1 - 0.1 * 0.5) - 0.1 * update, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_is_only_the_average_of_gradients(dtype, nesterov):
    """Orthogonalising must never write into an alias of the momentum."""
    torch.manual_seed(0)
    gradient = torch.randn(24, 16).to(dtype)
    p = nn.Parameter(torch.randn(24, 16).to(dtype))
    p.grad = gradient.clone()
    opt = Muon([p], nesterov=nesterov)
    opt.step()
    assert torch.equal(opt.state[p]["momentum_buffer"], torch.zeros_like(gradient).lerp_(gradient, 1 - 0.95))
    assert torch.equal(p.grad, gradient)


@torch_since.grad_dtype
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_16_bit_momentum_and_update_are_float32_rounded_once(nesterov):
    """A float32 gradient is not rounded to the momentum's dtype before."""
    torch.manual_seed(0)
    start, gradient, momentum = (torch.randn(24, 16) for _ in range(3))
    p = nn.Parameter(start.bfloat16())
    p.grad_dtype = torch.float32
    p.grad = gradient.clone()
    opt = Muon([p], nesterov=nesterov, lr=0.1, weight_decay=0.0, adjust_lr_fn="none", ns_dtype="float32")
    opt.state[p]["momentum_buffer"].copy_(momentum)
    opt.step()
    # The momentum is rounded to bfloat16 once, and so is the parameter.
    average = momentum.bfloat16().float().lerp_(gradient, 0.05).bfloat16()
    assert torch.equal(opt.state[p]["momentum_buffer"], average)
    update = orthogonalize(
        torch.lerp(gradient, average.float(), 0.95) if nesterov else average.float(), dtype=torch.float32
    )
    assert torch.equal(p.detach(), start.bfloat16().float().add_(update, alpha=-0.1).bfloat16())


@pytest.mark.parametrize("options", [{}, {"algorithm": "normuon"}, {"ns_dtype": "float16"}], ids=str)
def test_a_finite_gradient_of_any_size_leaves_a_finite_parameter_and_momentum(options):
    """Above 1.8e19 the square of an element is beyond float32."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(24, 16))
    opt = Muon([{"params": [p], **options}], lr=0.1)
    for size in (1.0, 1e25, 1.0):
        before, p.grad = p.detach().clone(), size * torch.randn(24, 16)
        opt.step()
        assert p.isfinite().all() and 0.1 < (p - before).norm() < 1
        assert opt.state[p]["momentum_buffer"].isfinite().all()


def test_each_fused_piece_is_orthogonalised_and_scaled_on_its_own():
    torch.manual_seed(0)
    start, gradient = torch.randn(40, 16), torch.randn(40, 16)
    # One parameter of three pieces.
    fused = nn.Parameter(start.clone())
    fused.grad = gradient.clone()
    Muon([{"params": [fused], "pieces": (24, 8, 8)}]).step()
    # A parameter for each piece.
    parts = [nn.Parameter(part.clone()) for part in start.split((24, 8, 8))]
    for part, g in zip(parts, gradient.split((24, 8, 8)), strict=True):
        part.grad = g.clone()
    Muon(parts).step()
    assert torch.equal(fused, torch.cat(parts))


def test_autocast_around_the_step_changes_nothing():
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(24, 16))
        p.grad = torch.randn(24, 16)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            Muon([p], ns_dtype="float32").step()
        results.append(p.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        ({"algorithm": "sgd"}, ValueError, "'sgd'.*adamw.*muon"),
        ({"ns_coefficients": "magic"}, ValueError, "ns_coefficients='magic'.*quintic"),
        ({"ns_dtype": "float64"}, ValueError, "float64.*float16"),
        ({"gram": ()}, ValueError, "gram"),
        ({"adjust_lr_fn": "x"}, ValueError, "match_rms_adamw"),
        ({"momentum": 1.0}, ValueError, "momentum=1.0"),
        ({"pieces": (2, 3)}, LayoutError, r"\(2, 3\).*4 rows"),
    ],
)
def test_bad_groups_are_refused_when_the_optimizer_is_built(group, error, message):
    with pytest.raises(error, match=message):
        Muon([{"params": [nn.Parameter(torch.randn(4, 3))], **group}])
