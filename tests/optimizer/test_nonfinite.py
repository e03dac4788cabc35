"""A step with a gradient that is not finite on one rank is no step on any of them."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from support import sweep
from support.counted import counted
from support.every_kind import TENSORS, assert_same_bits, make, snapshot, train, values
from support.failing import raised
from support.layer_wise_training import Net, gradients, groups
from support.topologies import TOPOLOGIES, placer, world_of
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from muonckpt.optimizer import COEFFICIENTS, LayerWise, Muon

ODD = 1
"""The rank that has what is not finite."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def poison(params: list[torch.Tensor], kind: str, value: float) -> None:
    """One element of a gradient of a parameter of this kind that this rank has some of."""
    mine = [p for p, (shape, g) in zip(params, TENSORS, strict=True) if g.get("algorithm", "muon") == kind]
    local(next(p.grad for p in reversed(mine) if local(p.grad).numel())).view(-1)[-1] = value


BAD = [("muon", math.nan), ("adamw", math.inf), ("normuon", -math.inf), ("lion", math.nan), ("adamw", 1e20)]


def with_poisoned_steps(rank: int, world: int, name: str) -> tuple[list[torch.Tensor], int, bool, bool]:
    """What comes of two steps with poisoned ones between and after them; how many were skipped; whether these left the
    very bits of everything on this rank, and whether a step has the collectives of one that looks for nothing."""
    place = placer(TOPOLOGIES[name])
    found, calls = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for nonfinite in (None, "skip"):
            params = [nn.Parameter(place(number, v)) for number, v in enumerate(values(0, torch.float32))]
            opt = make(params, replicas=dist.group.WORLD, nonfinite=nonfinite)
            untouched = True
            for step in (1, 2):
                for p, (number, g) in zip(params, enumerate(values(step, torch.float32)), strict=True):
                    p.grad = place(number, g)
                with counted() as made:
                    opt.step()
                calls.append(made)
                for kind, value in BAD if nonfinite else ():
                    before = [t.clone() for t in here(params, opt)]
                    if rank == ODD:
                        poison(params, kind, value)
                    opt.step()
                    if rank == ODD:
                        poison(params, kind, 0.0)
                    untouched &= all(map(torch.equal, before, here(params, opt)))
            found = snapshot(params, opt)
    return found, opt.skipped_steps, untouched, calls[1] == calls[3]


def here(params: list[torch.Tensor], opt: Muon) -> list[torch.Tensor]:
    """All that this rank holds."""
    return [local(t.detach()) for p in params for t in (p, *(opt.state[p][slot] for slot in sorted(opt.state[p])))]


def whole_run() -> list[torch.Tensor]:
    params = [nn.Parameter(v) for v in values(0, torch.float32)]
    opt = make(params)
    train(params, opt, lambda g: g, torch.float32, steps=2)
    return snapshot(params, opt)


POISONED = ["FSDP2, rows, 3 ranks", "HSDP", "parts on different meshes", "DDP"]


@pytest.mark.parametrize("name", sweep(POISONED, "HSDP", "DDP"))
def test_a_run_with_poisoned_steps_is_the_run_without_them(name: str) -> None:
    """On one rank; in groups of every algorithm; also an element whose square is not finite, in AdamW's."""
    expected = whole_run()
    for found, skipped, untouched, as_many in run(world_of(TOPOLOGIES[name]), with_poisoned_steps, name):
        assert skipped == 2 * len(BAD) and untouched and as_many
        assert_same_bits(found, expected)


# --- raising --------------------------------------------------------------------------------------------------------


def rows(*shape: int) -> nn.Parameter:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)], src_data_rank=None))
    param.grad = torch.ones_like(param)
    return param


def many_in_a_row(rank: int, world: int) -> tuple[list[str], int, bool]:
    """A poisoned step that raises; with two that may be skipped, five of which the second is fine; and a fine one."""
    weight, bias = rows(9, 6), rows(9)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for options, steps in (({"nonfinite": "raise"}, "x"), ({"nonfinite": "skip", "most_skipped": 2}, "x.xxx.")):
            groups = [
                {"params": [("up.weight", weight)]},
                {"params": [("up.bias", bias)], "algorithm": "adamw", "lr": 0.1},
            ]
            opt = Muon(groups, **options)
            before = [t.clone() for t in (local(weight), local(opt.state[weight]["momentum_buffer"]))]
            for step in steps:
                if rank == ODD:
                    local(weight.grad)[0, 0] = math.nan if step == "x" else 1.0
                found.append(raised(opt.step))
                if len(found) == 1:
                    left = all(map(torch.equal, before, (local(weight), local(opt.state[weight]["momentum_buffer"]))))
    return found, opt.skipped_steps, left


def test_it_raises_the_same_on_all_ranks_at_once_or_after_so_many_in_a_row() -> None:
    results = run(3, many_in_a_row)
    assert all(result == results[0] for result in results)
    (at_once, *steps), skipped, left = results[0]
    assert left and skipped == 3
    assert at_once.startswith("RuntimeError: the optimizer does not step: gradients are not finite")
    assert f"rank {ODD}: gradients that are not finite, or too large for their state: up.weight." in at_once
    assert [step == "no error" for step in steps] == [True, True, True, True, False, True]
    assert "(2 steps before this one were skipped)" in steps[4] and "up.weight" in steps[4]


def crossing(rank: int, world: int) -> list[str]:
    """Two axes of a mesh; then also a parameter on all of it."""
    grid, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), []
    params = []
    for axes in ("a", "b", ("a", "b")):
        mesh = grid[axes]
        value = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
        params.append(nn.Parameter(value))
        params[-1].grad = torch.ones_like(value)
        found.append(raised(Muon(params, nonfinite="skip").step))
    return found


def test_ranks_of_which_no_set_holds_all_are_refused() -> None:
    for one, both, all_of_it in run(4, crossing):
        assert one == all_of_it == "no error" and "nonfinite: this rank shares some parameters with ranks" in both


# --- one process ----------------------------------------------------------------------------------------------------


def trained(bad: float | None, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], Muon]:
    params = [nn.Parameter(torch.ones(4, 6, dtype=dtype)), nn.Parameter(torch.ones(3, dtype=dtype))]
    opt = Muon([{"params": params[:1]}, {"params": params[1:], "algorithm": "lion", "lr": 0.1}], nonfinite="skip")
    for value in (1.0, bad, 2.0):
        for param in params:
            param.grad = torch.full_like(param, value or 0.0)
        if value is not None:
            opt.step()
    return snapshot(params, opt), opt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_gradient_may_be_half_as_large_as_its_state_could_hold(dtype: torch.dtype) -> None:
    end = torch.finfo(dtype if dtype.itemsize < 8 else torch.float32).max  # what travels to owners
    without, _ = trained(None, dtype)
    for bad in (end, -end, math.inf, math.nan):
        with pytest.warns(RuntimeWarning, match="skipped, number 1 of this run and 1 in a row: .* 0 of group 0, 0 of"):
            found, opt = trained(bad, dtype)
        assert_same_bits(found, without)
        assert opt.skipped_steps == copy.deepcopy(opt).skipped_steps == opt.report(1.0).skipped_steps == 1
        assert "1 steps were skipped" in str(opt.report(1.0))
    found, opt = trained(end / 2, dtype)
    assert opt.skipped_steps == 0 and all(bool(value.isfinite().all()) for value in found)


@pytest.mark.parametrize("update_norm", ["muon", "rms"])
def test_zeros_make_no_nan(update_norm: str) -> None:
    param = nn.Parameter(torch.ones(128, 128))
    param.grad = torch.zeros(128, 128)
    Muon([{"params": [param], "algorithm": "normuon", "update_norm": update_norm}], weight_decay=0.0).step()
    assert torch.equal(param, torch.ones(128, 128))


def test_no_published_set_leaves_the_range_of_its_products() -> None:
    """So a finite momentum gives a finite update: values begin between 0 and 1, and none exceeds 2 (`recipe.HOLD`)."""
    for chosen in COEFFICIENTS.values():
        for steps in (1, 5, 12):
            x = torch.linspace(0, 1 / min(1.0, chosen.norm_scale), 10001, dtype=torch.float64)
            for a, b, c in chosen.schedule(steps):
                x = a * x + b * x**3 + c * x**5
                assert x.abs().max() < 2, chosen.name


def test_torchs_gradient_scaler_skips_for_itself() -> None:
    """Its steps that it skips do not reach the optimizer; what it lets through does."""
    param = nn.Parameter(torch.ones(4, 6))
    opt, scaler = Muon([param], nonfinite="raise"), torch.amp.GradScaler("cpu", init_scale=4.0)
    for value, moved in ((math.inf, False), (1.0, True)):
        before = param.detach().clone()
        scaler.scale((param * value).sum()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert torch.equal(param, before) != moved and opt.skipped_steps == 0


@pytest.mark.parametrize(
    ("option", "message"),
    [({"nonfinite": "ignore"}, "'skip' or 'raise'"), ({"nonfinite": "skip", "most_skipped": -1}, "at least 0")],
)
def test_unknown_ways_are_refused(option: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.ones(2, 2))], **option)


# --- layer-wise -----------------------------------------------------------------------------------------------------


def layer_wise(rank: int, world: int) -> tuple[bool, int, str]:
    """Whether a run with poisoned steps is the run without them, on this rank; how many were skipped, and an error."""
    runs = []
    for nonfinite in (None, "skip"):
        net = Net()
        experts = [p for name, p in net.named_parameters() if name in ("up", "down")]
        pairs = [dist.new_group([which, which + 2]) for which in (0, 1)]
        options = {"experts": experts, "expert_group": pairs[rank % 2], "nonfinite": nonfinite, "most_skipped": 3}
        opt = LayerWise(net, groups(net), **options)
        for step in (0, 1):
            for bad in (None, "up", "norm") if nonfinite else (None,):
                by = gradients(net, step, rank)
                if bad is not None and rank == ODD:
                    by[bad].view(-1)[0] = math.nan
                net(by).backward()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    opt.step()
        state = [local(value) for slots in opt.state.values() for value in slots.values()]
        runs.append([t.detach().clone() for t in (*net.parameters(), *state)])
    by = gradients(net, 3, rank)
    by["qkv"].view(-1)[0] = math.inf if rank == ODD else 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net(by).backward()
        last = [raised(opt.step)]
        for _ in range(2):
            net(by).backward()
            last.append(raised(opt.step))
    return all(map(torch.equal, *runs)), opt.skipped_steps, last[-1]


def test_layer_wise_training_skips_on_all_ranks_and_raises_the_same() -> None:
    """Also where the poisoned gradient is one of experts, which only two of the ranks share."""
    results = run(4, layer_wise)
    assert all(same and skipped == 5 for same, skipped, _ in results)
    assert {error for *_, error in results} == {results[0][2]} and ": qkv" in results[0][2]
