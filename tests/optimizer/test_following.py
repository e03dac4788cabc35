"""State follows its parameters: what frameworks do to these before a step, and between steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support import sweep
from support.every_kind import local_of
from support.failing import raised
from support.workers import run
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from muonckpt.optimizer import Muon


class Net(nn.Module):
    """A matrix, a stack of matrices with NorMuon, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"up": (12, 8), "experts": (2, 6, 8), "norm": (8,)}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm * (x + x @ self.up.T @ self.up + x @ self.experts.mT.sum(0) @ self.experts[0])).square()


def groups(net: Net) -> list[dict]:
    return [
        {"params": [("up", net.up)]},
        {"params": [("experts", net.experts)], "algorithm": "normuon"},
        {"params": [("norm", net.norm)], "algorithm": "adamw", "lr": 1e-2},
    ]


def train(net: nn.Module, opt: Muon, steps: range) -> None:
    for step in steps:
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        net(x.to(net.norm.dtype)).sum().backward()
        opt.step()
        opt.zero_grad()


def replace(opt: Muon, net: nn.Module) -> None:
    """What accelerate does: the parameters of a model take the place of those that groups had."""
    for group, param in zip(opt.param_groups, net.parameters(), strict=True):
        group["params"] = [param]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def result(net: nn.Module, opt: Muon) -> list[Tensor]:
    """Parameters and state, whole."""
    params = list(net.parameters())
    return [whole(tensor).detach().clone() for p in params for tensor in (p, *opt.state[p].values())]


def expected(steps: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    net = Net().to(dtype)
    opt = Muon(groups(net), lr=0.1)
    train(net, opt, range(steps))
    return result(net, opt)


# --- one process -----------------------------------------------------------------------------------------------------


def test_parameters_that_are_cast_before_the_first_step():
    net = Net()
    opt = Muon(groups(net), lr=0.1)
    net.to(torch.bfloat16)
    train(net, opt, range(3))
    assert all(map(torch.equal, result(net, opt), expected(3, torch.bfloat16)))


def test_state_in_use_is_cast_with_its_parameters():
    net = Net()
    opt = Muon(groups(net), lr=0.1)
    train(net, opt, range(2))
    before = result(net, opt)
    net.to(torch.float64)
    assert opt.state_dict()["state"][0]["momentum_buffer"].dtype is torch.float64
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(before, result(net, opt), strict=True))
    assert opt.state[net.norm]["step"] == 2
    train(net, opt, range(2, 4))


@pytest.mark.filterwarnings("ignore:no parameter of this optimizer has a gradient")
@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
@pytest.mark.parametrize("when", ["step", "state_dict", "load_state_dict"])
def test_a_model_that_is_built_without_values(when):
    with torch.device("meta"):
        net = Net()
    opt = Muon(groups(net), lr=0.1)
    saved = copy.deepcopy(Muon(groups(Net())).state_dict())
    net.to_empty(device="cpu")
    net.load_state_dict(Net().state_dict())
    with pytest.raises(RuntimeError, match="meta device"):
        opt.step()
    replace(opt, net)
    if when == "state_dict":
        assert not opt.state_dict()["state"][0]["momentum_buffer"].is_meta
    if when == "load_state_dict":
        opt.load_state_dict(saved)
        opt.param_groups[0]["lr"] = opt.param_groups[1]["lr"] = 0.1
    train(net, opt, range(3))
    assert all(map(torch.equal, result(net, opt), expected(3)))


def test_groups_that_grow_or_shrink_are_refused():
    net = Net()
    opt = Muon(groups(net), lr=0.1)
    opt.param_groups[0]["params"].append(nn.Parameter(torch.ones(2, 2)))
    with pytest.raises(ValueError, match=r"group 0 had 1 parameters, and now it has 2: .*add_param_group"):
        train(net, opt, range(1))
    opt.param_groups[0]["params"] = []
    with pytest.raises(ValueError, match=r"group 0 had 1 parameters, and now it has 0: .*requires_grad_"):
        opt.state_dict()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda groups: groups.pop(), "the optimizer had 3 parameter groups, and now it has 2"),
        (lambda groups: groups.pop(0), "the optimizer had 3 parameter groups, and now it has 2"),
        (lambda groups: groups.append(dict(groups[0])), "the optimizer had 3 parameter groups, and now it has 4"),
        (lambda groups: groups.reverse(), "group 0 has parameters that were in group 2"),
        (lambda groups: groups.insert(0, groups.pop()), "group 0 has parameters that were in group 2"),
    ],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_groups_that_come_go_or_move_are_refused_until_they_are_put_back(edit, message, steps):
    net = Net()
    opt = Muon(groups(net), lr=0.1)
    train(net, opt, range(steps))
    before, kept = result(net, opt), list(opt.param_groups)
    edit(opt.param_groups)
    for refused in (opt.step, opt.state_dict):
        with pytest.raises(ValueError, match=rf"{message}: put param_groups back .* requires_grad_\(False\)"):
            refused()
    assert all(map(torch.equal, result(net, opt), before))
    opt.param_groups[:] = kept
    net.norm.requires_grad_(False)
    train(net, opt, range(steps, 4))
    assert torch.equal(net.norm, before[-4]) and not torch.equal(net.up, before[0])


def test_the_order_within_a_group_does_not_matter_to_state():
    params = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    opt = Muon(params, lr=0.1)
    for param in params:
        param.grad = torch.randn(4, 4)
    opt.step()
    before = {param: opt.state[param]["momentum_buffer"].clone() for param in params}
    opt.param_groups[0]["params"].reverse()
    opt.state_dict()
    assert all(torch.equal(opt.state[param]["momentum_buffer"], held) for param, held in before.items())


def test_what_replaces_a_matrix_must_be_one():
    net = Net()
    opt = Muon(groups(net), lr=0.1)
    opt.param_groups[0]["params"] = [nn.Parameter(net.up.detach().flatten())]
    with pytest.raises(ValueError, match="Muon needs a matrix"):
        opt.step()


def test_another_shape_is_refused_once_state_is_in_use():
    net = Net()
    opt = Muon(groups(net), lr=0.1)
    train(net, opt, range(1))
    opt.param_groups[0]["params"] = [nn.Parameter(torch.ones(3, 3))]
    with pytest.raises(ValueError, match=r"parameter 'up' was replaced after .*momentum_buffer is \(12, 8\)"):
        opt.step()


# --- ranks -----------------------------------------------------------------------------------------------------------


def placed(mesh, placements: Callable[[Tensor], list]) -> Callable[[Net], None]:
    def place(net: Net) -> None:
        for name, param in list(net.named_parameters()):
            setattr(net, name, nn.Parameter(distribute_tensor(param.detach(), mesh, placements(param))))

    return place


def shard(net: Net) -> None:
    fully_shard(net)


def shard_in_two_ways(net: Net) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(net, mesh=mesh)


WAYS = {"FSDP2": shard, "HSDP": shard_in_two_ways}


def sharded_later(rank: int, world: int, way: str, steps_before: int) -> list[Tensor]:
    net = Net()
    opt = Muon(groups(net), lr=0.1)
    train(net, opt, range(steps_before))
    WAYS[way](net)
    replace(opt, net)
    train(net, opt, range(steps_before, 4))
    assert get_optimizer_state_dict(net, opt)["state"].keys() == {"up", "experts", "norm"}
    return result(net, opt)


@pytest.mark.parametrize(("way", "world"), [("FSDP2", 3), ("HSDP", 4)])
@pytest.mark.parametrize("steps_before", sweep([0, 2], 2))
def test_parameters_that_are_sharded_after_the_optimizer_was_built(way, world, steps_before):
    """Every rank has seen the same gradients, so the run is the one of a single process."""
    one = expected(4)
    for found in run(world, sharded_later, way, steps_before):
        for mine, other in zip(found, one, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=2e-2)


def unsharded_later(rank: int, world: int) -> list[str]:
    net = Net()
    shard(net)
    opt = Muon(groups(net), lr=0.1)
    fresh = Net()
    messages = []
    for steps in range(2):
        train(net, opt, range(steps))
        replace(opt, fresh)
        messages.append(raised(opt.state_dict))
        replace(opt, net)
    return messages


def test_state_that_other_ranks_hold_is_not_dropped():
    for before, after in run(2, unsharded_later):
        assert before == "no error"
        assert after.startswith("LayoutError: parameter 'up' was replaced after it had been stepped"), after
        assert "Save a checkpoint before the change" in after


def gathered_row(rank: int, world: int) -> str:
    """A matrix of one row, all of which is on the first rank, becomes a plain tensor on both."""
    mesh = init_device_mesh("cpu", (world,))
    row = nn.Parameter(distribute_tensor(torch.ones(1, 8), mesh, [Shard(0)]))
    opt = Muon([("row", row)], lr=0.1)
    row.grad = torch.ones_like(row)
    opt.step()
    opt.param_groups[0]["params"] = [nn.Parameter(row.full_tensor())]
    return raised(opt.state_dict)


def test_a_rank_that_holds_nothing_does_not_take_its_state_for_new():
    holder, other = run(2, gathered_row)
    assert holder == "no error" and other.startswith("LayoutError: parameter 'row' was replaced after"), other


def replicated_later(rank: int, world: int) -> list[Tensor]:
    net = Net()
    opt = Muon(groups(net), lr=0.1)
    train(net, opt, range(2))
    mesh = init_device_mesh("cpu", (world,))
    placed(mesh, lambda param: [Replicate()])(net)
    replace(opt, net)
    before = opt.state_dict()["state"]
    return [local_of(tensor) for slots in before.values() for tensor in slots.values()]


def test_state_in_use_is_the_same_on_every_replica():
    net = Net()
    opt = Muon(groups(net), lr=0.1)
    train(net, opt, range(2))
    held = [tensor for slots in opt.state_dict()["state"].values() for tensor in slots.values()]
    assert all(all(map(torch.equal, found, held)) for found in run(2, replicated_later))


def replaced_wrongly_on_one_rank(rank: int, world: int, how: str) -> list[str]:
    net = Net()
    shard(net)
    opt = Muon(groups(net), lr=0.1)
    train(net, opt, range(1))
    kept = opt.param_groups[0]["params"]
    net(torch.ones(5, 8)).sum().backward()
    if rank == 1:
        opt.param_groups[0]["params"] = {"fewer": [], "another": [nn.Parameter(torch.ones(3, 3))]}[how]
    messages = [raised(opt.step)]
    opt.param_groups[0]["params"] = kept
    return [*messages, raised(opt.step)]


@pytest.mark.parametrize("how", ["fewer", "another"])
def test_what_cannot_follow_on_one_rank_is_told_to_all(how):
    told, own = run(2, replaced_wrongly_on_one_rank, how)
    assert own[0].startswith(("ArgumentError: ", "LayoutError: ")) and told[0].startswith("RuntimeError: "), (own, told)
    assert own[0].partition(": ")[2][:40] in told[0]
    assert own[1] == told[1] == "no error"


# --- doubts ----------------------------------------------------------------------------------------------------------


def test_a_step_without_any_gradient_is_warned_of():
    net = Net()
    opt = Muon(groups(net))
    with pytest.warns(RuntimeWarning, match="no parameter of this optimizer has a gradient") as told:
        opt.step()
    assert [warning.filename for warning in told] == [__file__]


def warnings_of(rank: int, world: int, replicas: bool, sharded: bool) -> list[str]:
    net = Net()
    if sharded:
        shard(net)
    opt = Muon(groups(net), replicas=dist.group.WORLD if replicas else None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(net, opt, range(2))
    return [str(warning.message) for warning in told if issubclass(warning.category, RuntimeWarning)]


@pytest.mark.parametrize(("replicas", "sharded"), [(False, False), (True, False), (False, True)])
def test_work_that_every_rank_repeats_is_warned_of_once(replicas, sharded):
    for told in run(2, warnings_of, replicas, sharded):
        if replicas or sharded:
            assert told == []
        else:
            [message] = told
            assert message.startswith("2 parameters of matrix groups are plain tensors") and "replicas=" in message
