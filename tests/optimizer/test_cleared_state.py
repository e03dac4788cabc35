"""State that the user cleared begins anew, on all ranks or on none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.every_kind import local_of
from support.failing import raised
from support.workers import run
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import muonckpt
from muonckpt.names.vocabulary import MASTER
from muonckpt.optimizer import LayerWise, Muon

ALGORITHMS = ("muon", "normuon", "adamuon", "hyperball", "adamw", "lion")
SHAPES = ((6, 8), (4, 4))


def replaced(opt: torch.optim.Optimizer) -> None:
    opt.state = defaultdict(dict)


def replaced_by_a_plain_dict(opt: torch.optim.Optimizer) -> None:
    opt.state = {}


def emptied(opt: torch.optim.Optimizer) -> None:
    for slots in opt.state.values():
        slots.clear()


WAYS = (replaced, replaced_by_a_plain_dict, emptied, lambda opt: opt.state.clear())


def params_of(place: Callable[[Tensor], Tensor] = Tensor.clone) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(place(torch.randn(shape, generator=generator))) for shape in SHAPES]


def made(params: list[nn.Parameter], algorithm: str, **options: object) -> Muon:
    first = {"params": [("up", params[0])], "algorithm": algorithm, "lr": 0.1}
    return Muon([first, {"params": [("down", params[1])]}], lr=0.1, **options)


def stepped(opt: Muon, steps: range, place: Callable[[Tensor], Tensor] = Tensor.clone) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for group in opt.param_groups:
            for param in group["params"]:
                param.grad = place(torch.randn(param.shape, generator=generator))
        opt.step()


def everything(opt: Muon) -> list[Tensor]:
    params = [param for group in opt.param_groups for param in group["params"]]
    return [local_of(t).detach().clone() for p in params for t in (p, *(opt.state[p][s] for s in sorted(opt.state[p])))]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@pytest.mark.parametrize("clear", WAYS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_cleared_state_is_that_of_an_optimizer_built_anew(algorithm, clear):
    results = []
    for renew in (clear, None):
        params = params_of()
        opt = made(params, algorithm)
        stepped(opt, range(3))
        if renew is None:
            opt = made(params, algorithm)
        else:
            renew(opt)
        stepped(opt, range(3, 6))
        results.append(everything(opt))
    assert same(*results)


@pytest.mark.parametrize("algorithm", ["adamuon", "adamw", "normuon"])
def test_a_part_of_a_parameters_state_is_refused_before_anything_moves(algorithm):
    params = params_of()
    opt = made(params, algorithm)
    stepped(opt, range(2))
    lost = sorted(opt.state[params[0]])[-1]
    opt.state[params[0]].pop(lost)
    before = everything(opt)
    message = rf"parameter 'up' has lost \['{lost}'\] of its state .* write optimizer.state.pop\(parameter\)"
    for refused in (partial(stepped, opt, range(2, 3)), opt.state_dict):
        with pytest.raises(muonckpt.ArgumentError, match=message):
            refused()
    assert same(before, everything(opt))
    opt.state.pop(params[0])  # as the message has it
    stepped(opt, range(2, 3))
    assert lost in opt.state[params[0]]


@pytest.mark.parametrize("algorithm", ["adamuon", "adamw"])
def test_state_that_is_no_dict_is_refused_before_anything_moves(algorithm):
    params = params_of()
    opt = made(params, algorithm)
    stepped(opt, range(2))
    weights = [param.detach().clone() for param in params]
    opt.state = None
    with pytest.raises(muonckpt.ArgumentError, match=r"optimizer.state is a NoneType, .* write optimizer.state = \{\}"):
        stepped(opt, range(2, 3))
    opt.state = {}  # as the message has it
    opt.state_dict()
    opt.state[params[0]] = None
    message = r"the state of parameter 'up' is a NoneType, .* write optimizer.state.pop\(parameter\)"
    with pytest.raises(muonckpt.ArgumentError, match=message):
        opt.state_dict()
    opt.state.pop(params[0])
    opt.state[params[1]] = dict.fromkeys(opt.state[params[1]])  # slots without tensors are cleared
    assert same(weights, params)
    twin_params = [nn.Parameter(weight) for weight in weights]
    twin = made(twin_params, algorithm)
    for each in (opt, twin):
        stepped(each, range(3, 5))
    assert same(everything(opt), everything(twin))


@pytest.mark.parametrize("algorithm", ["adamuon", "adamw"])
def test_state_of_another_dtype_or_shape_is_refused_before_anything_moves(algorithm):
    """Else some matrices would have moved when another one fails, or all would go on with other bits."""
    params = params_of()
    opt = made(params, algorithm)
    stepped(opt, range(2))
    weights = [param.detach().clone() for param in params]
    former = dict(opt.state[params[0]])
    for other, told in ((torch.Tensor.double, "float64"), (lambda slot: slot.new_zeros(7), r"shape \(7,\)")):
        opt.state[params[0]] = {slot: other(value) for slot, value in former.items()}
        with pytest.raises(
            ValueError, match=rf"of parameter 'up' was replaced by one of .*{told}.*, expected .*cast it"
        ):
            stepped(opt, range(2, 3))
        assert same(weights, params)
    opt.state[params[0]] = {slot: value.clone() for slot, value in former.items()}  # as the message has it
    stepped(opt, range(2, 3))
    assert not same(weights, params)


@pytest.mark.parametrize("clear", WAYS)
@pytest.mark.parametrize("with_gradients", [True, False])
def test_what_is_saved_after_clearing_is_the_state_that_training_goes_on_with(clear, with_gradients, tmp_path):
    model = nn.Linear(8, 8, bias=False)
    opt = Muon(model.parameters(), lr=0.1)
    model.weight.grad = torch.ones(8, 8)
    opt.step()
    model.weight.grad = torch.ones(8, 8) if with_gradients else None
    clear(opt)
    weights, state = get_state_dict(model, opt)
    muonckpt.save({"model": weights, "optimizer": state}, tmp_path / "saved")
    other = nn.Linear(8, 8, bias=False)
    resumed = Muon(other.parameters(), lr=0.1)
    resumed.state[other.weight]["momentum_buffer"].fill_(3)
    weights, state = get_state_dict(other, resumed)
    muonckpt.load({"model": weights, "optimizer": state}, tmp_path / "saved")
    assert torch.equal(state["state"]["weight"]["momentum_buffer"], torch.zeros(8, 8))


# --- several ranks ----------------------------------------------------------------------------------------------------


def cleared_on_ranks(rank: int, world: int, algorithm: str) -> tuple[list[str], bool]:
    """Return the errors of a step after one rank alone has cleared, after the others, too, and after ranks have cleared
    different parameters; and whether what was cleared on all is as built anew.
    """
    mesh = init_device_mesh("cpu", (world,))
    place = partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)], src_data_rank=None)
    params = params_of(place)
    opt = made(params, algorithm)
    stepped(opt, range(2), place)
    opt.state.clear()
    stepped(opt, range(2, 4), place)
    results = [everything(opt)]
    other = params_of(place)
    built = made(other, algorithm)
    stepped(built, range(2), place)
    built = made(other, algorithm)
    stepped(built, range(2, 4), place)
    results.append(everything(built))
    messages = []
    for turn in ([1], [0, 2]):
        if rank in turn:
            opt.state.clear()
        messages.append(raised(stepped, opt, range(4, 5), place))
    opt.state.pop(params[rank % 2])
    messages.append(raised(stepped, opt, range(5, 6), place))
    return messages, same(*results)


@pytest.mark.parametrize("algorithm", ["muon", "adamuon", "adamw"])
def test_ranks_begin_anew_together_or_stop(algorithm):
    for (alone, together, different), as_built in run(3, cleared_on_ranks, algorithm):
        assert "rank 1: the plan is made again" in alone
        assert together == "no error"
        assert "the parameters whose state was cleared" in different
        assert as_built


def cleared_layer_wise(rank: int, world: int, dtype: torch.dtype) -> tuple[list[bool], str]:
    def trained(renew: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)).to(dtype)
        weights, vectors = [m.weight for m in net], [m.bias for m in net]
        groups = [{"params": weights, "algorithm": "normuon"}, {"params": vectors, "algorithm": "adamw", "lr": 0.01}]
        opt = LayerWise(net, groups, lr=0.1)
        for step in range(6):
            if step == 3 and renew == "state":
                opt.state = defaultdict(dict)
            if step == 3 and renew == "rank" and rank == 0:
                opt.state.clear()
            if step == 3 and renew == "zeros":
                for slots in opt.state.values():
                    for slot in slots.keys() - {MASTER}:
                        local_of(slots[slot]).zero_()
            torch.manual_seed(step)
            net(torch.randn(4, 6, dtype=dtype)).square().mean().backward()
            opt.clip_grad_norm_(1.0)
            opt.step()
        saved = opt.state_dict()["state"]
        found = [local_of(saved[n][slot]).clone() for n in sorted(saved) for slot in sorted(saved[n])]
        return [*(p.detach().clone() for p in net.parameters()), *found]

    results = [trained(renew) for renew in ("state", "zeros", None)]
    return [same(results[0], other) for other in results[1:]], raised(trained, "rank")


@pytest.mark.parametrize(("world", "dtype"), [(1, torch.float32), (3, torch.bfloat16)], ids=str)
def test_cleared_state_of_layer_wise_begins_anew_where_its_owner_steps_it(world, dtype):
    for equal, one_rank in run(world, cleared_layer_wise, dtype):
        assert equal == [True, False]
        assert ("the parameters whose state was cleared" in one_rank) == (world > 1)
