"""Gradients of layer-wise training: when they are reduced, what is missing, clipped or accumulated."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from support.failing import raised
from support.layer_wise_training import (
    LAYOUTS,
    Net,
    alone,
    check,
    gradients,
    groups,
    of_dense,
    of_pair,
    pieces,
    run_each,
)
from support.workers import run
from torch import nn

from muonckpt.optimizer import LayerWise, Muon
from muonckpt.optimizer.layer_wise import buffers


def present(name: str, step: int) -> bool:
    """Two parameters lack a gradient in the first step, another one always."""
    return name != "stack" and (step > 0 or name not in ("proj", "bias"))


def with_gaps(rank: int, world: int, layout: str) -> dict:
    net = Net()
    opt = LayerWise(net, groups(net), layout=layout, average=False, bucket_size=700)
    for step in range(3):
        given = {name: g for name, g in gradients(net, step, rank).items() if present(name, step)}
        if step == 1 and rank == 0:
            given.pop("up")
        net(given).backward()
        opt.step()
    return pieces(net, opt)


def with_zeros(net: Net, step: int, rank: int) -> dict[str, torch.Tensor]:
    made = gradients(net, step, rank)
    if step == 1 and rank == 0:
        made["up"].zero_()
    return made


def test_a_gradient_that_no_rank_has_is_skipped_and_one_that_some_lack_counts_as_zero():
    for layout, found in run_each(3, with_gaps):
        check(found, alone(3, 3, has_gradient=present, of=with_zeros), layout)


def counted(rank: int, world: int, layout: str) -> list[list[str]]:
    """The collectives of two accumulating backward passes, of the last one, and of the step; then of an empty step."""
    net = Net()
    opt = LayerWise(net, groups(net), layout=layout, bucket_size=700)
    places = {
        "REDUCE_SCATTER": buffers,
        "ALL_GATHER": buffers,
        "reduce": dist,
        "broadcast": dist,
        "all_reduce": dist,
    }
    honest, called = {name: getattr(place, name) for name, place in places.items()}, []

    def recording(name):
        return lambda *a, **k: (called.append(name), honest[name](*a, **k))[1]

    told = []
    try:
        for name, place in places.items():
            setattr(place, name, recording(name))
        with opt.no_sync():
            for step in range(2):
                net(gradients(net, step, rank)).backward()
        told.append(list(called))
        called.clear()
        net(gradients(net, 2, rank)).backward()
        told.append(list(called))
        called.clear()
        opt.step()
        told.append(list(called))
    finally:
        for name, place in places.items():
            setattr(place, name, honest[name])
    return told


def test_gradients_are_reduced_during_the_last_backward_pass_and_nowhere_else():
    for accumulating, last, stepping in run(2, counted, "padded-nscost"):
        assert not accumulating and set(last) == {"REDUCE_SCATTER"} and len(last) >= 3
        assert stepping == ["all_reduce"] + ["ALL_GATHER"] * len(last)
    for accumulating, last, stepping in run(2, counted, "balanced"):
        assert not accumulating and set(last) == {"reduce", "REDUCE_SCATTER"}
        assert set(stepping) == {"all_reduce", "broadcast", "ALL_GATHER"} and "all_reduce" not in last


def accumulated(rank: int, world: int, layout: str, average: bool) -> dict:
    net = Net(dtype=torch.bfloat16)
    opt = LayerWise(net, groups(net), layout=layout, average=average, bucket_size=700)
    with opt.no_sync():
        net(gradients(net, 0, 2 * rank)).backward()
    net(gradients(net, 0, 2 * rank + 1)).backward()
    if average:
        with torch.no_grad():
            opt.finish_gradients()
            for part in opt._parts.values():
                part.gradient.mul_(world)
    opt.step()
    return pieces(net, opt)


@pytest.mark.parametrize("average", [False, True])
def test_accumulated_gradients_are_those_of_more_ranks(average):
    """Half of a small whole number is exact, so averaging can be undone here."""
    for layout, found in run_each(2, accumulated, average, layouts=("padded-nscost", "decoupled-total-order")):
        check(found, alone(4, 1, torch.bfloat16), layout)


def clipped(rank: int, world: int, layout: str) -> tuple[float, list[float], dict]:
    net = Net()
    opt = LayerWise(net, groups(net), layout=layout, average=False, bucket_size=700)
    norms = []
    for limit in (10.0, 1e6):
        net(gradients(net, 0, rank)).backward()
        norms.append(float(opt.clip_grad_norm_(limit)))
        opt.step()
    return norms, pieces(net, opt)


@pytest.mark.parametrize("world", [1, 3])
def test_clipping_is_by_the_norm_of_the_whole_model(world):
    net = Net()
    totals = {name: sum(gradients(net, 0, rank)[name] for rank in range(world)) for name, _ in net.named_parameters()}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in totals.values()))
    opt = Muon(groups(net))
    for factor in ((10.0 / (torch.tensor(norm, dtype=torch.float32) + 1e-6)).clamp(max=1.0), 1.0):
        for name, p in net.named_parameters():
            p.grad = totals[name] * factor
        opt.step()
    expected = {name: p.detach() for name, p in net.named_parameters()}
    for layout, found in run_each(world, clipped):
        for norms, _ in found:
            assert norms == [torch.tensor(norm).float().item()] * 2, layout
        check([state for _, state in found], expected, layout)


def stepped_if_finite(rank: int, world: int, layout: str) -> dict:
    """Two steps, with an expert's gradient that is not finite on one rank between them."""
    net = Net()
    pairs = [dist.new_group([first, first + 2]) for first in (0, 1)]
    options = {"experts": [net.up, net.down], "expert_group": pairs[rank % 2]}
    opt = LayerWise(net, groups(net), layout=layout, average=False, bucket_size=700, **options)
    for step, bad in ((0, False), (7, True), (1, False)):
        by = gradients(net, step, rank)
        by["up"].view(-1)[0] += math.nan if bad and rank == 1 else 0.0
        net(by).backward()
        if opt.clip_grad_norm_(1e9).isfinite():
            opt.step()
        opt.zero_grad()
    return pieces(net, opt)


def test_ranks_leave_out_a_step_together_where_the_norm_is_not_finite():
    for layout, found in run_each(4, stepped_if_finite, layouts=("padded-nscost", "balanced")):
        check(found, of_dense(alone(4, 2)), layout)


def mixed(rank: int, world: int) -> dict[str, tuple[dict, float]]:
    """Four ranks, expert parallelism 2: ranks 0 and 2 share some experts, 1 and 3 others."""
    shared = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    found = {}
    for layout in LAYOUTS:
        net = Net()
        experts = [net.up, net.down]
        opt = LayerWise(
            net, groups(net), layout=layout, average=False, bucket_size=700, experts=experts, expert_group=shared
        )
        for step in range(2):
            net(gradients(net, step, rank)).backward()
            norm = float(opt.clip_grad_norm_(1e9))
            opt.step()
        found[layout] = pieces(net, opt), norm
    return found


def test_experts_are_reduced_and_owned_in_their_own_group():
    net = Net()
    dense = of_dense(alone(4, 2))
    experts = [of_pair(0), of_pair(1)]
    sharing = {
        name: [[0, 2], [1, 3]] if name in ("up", "down") else [[0, 1, 2, 3]] for name, _ in net.named_parameters()
    }
    sums = [sum(gradients(net, 1, rank)[name] for rank in ranks) for name in sharing for ranks in sharing[name]]
    norm = math.sqrt(sum(float(total.square().sum()) for total in sums))
    found = run(4, mixed)
    for layout in LAYOUTS:
        states = [of_rank[layout][0] for of_rank in found]
        check(states, dense, layout)
        for which in (0, 1):
            check(states[which::2], experts[which], layout)
        assert all(of_rank[layout][1] == pytest.approx(norm, rel=1e-6) for of_rank in found), layout


def of_all(rank: int, world: int, layout: str) -> tuple[dict, dict, list[float]]:
    """Expert parallelism of 1: the experts' group has all ranks, and is another object; and the other way round."""
    found, norms = [], []
    for how in ({"expert_group": dist.new_group()}, {"group": dist.new_group(), "expert_group": dist.group.WORLD}):
        net = Net()
        experts = [net.up, net.down]
        opt = LayerWise(net, groups(net), layout=layout, average=False, bucket_size=700, experts=experts, **how)
        for step in range(2):
            net(gradients(net, step, rank)).backward()
            norms.append(float(opt.clip_grad_norm_(1e9)))
            opt.step()
        found.append(pieces(net, opt))
    return *found, norms


def test_groups_of_the_same_ranks_are_one_whatever_objects_they_are():
    for layout, found in run_each(2, of_all):
        for which in (0, 1):
            check([of_rank[which] for of_rank in found], alone(2, 2), layout)
        assert found[0][2] == found[1][2]


def crossed(rank: int, world: int) -> str:
    """Ranks 0 and 1 share dense parameters, ranks 0 and 2 experts."""
    dense, shared = ([dist.new_group(ranks) for ranks in pairs] for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    net = Net()
    opt = LayerWise(net, groups(net), group=dense[rank // 2], experts=[net.up], expert_group=shared[rank % 2])
    net(gradients(net, 0, rank)).backward()
    return raised(opt.clip_grad_norm_, 1.0)


def test_a_norm_that_some_ranks_would_have_otherwise_is_refused():
    for rank, message in enumerate(run(4, crossed)):
        assert message.startswith(f"ArgumentError: the ranks {(rank + 2) % 4} of expert_group are not in group")


def twice(rank: int, world: int) -> str:
    net = Net()
    opt = LayerWise(net, groups(net), layout="decoupled-total-order")
    net(gradients(net, 0, rank)).backward()
    try:
        net(gradients(net, 1, rank)).backward()
    except RuntimeError as error:
        return str(error)
    finally:
        opt.close()
    return "no error"


def test_a_second_backward_pass_that_would_be_reduced_twice_is_refused():
    assert all("no_sync" in message for message in run(2, twice))


def resumed(rank: int, world: int, layout: str) -> list[dict]:
    """zero_grad() forgets a pass; a loaded model is followed by the masters, to the last bit where nothing changed."""
    net = Net(dtype=torch.bfloat16)
    opt = LayerWise(net, groups(net), layout=layout, average=False, bucket_size=700)
    net(gradients(net, 7, rank)).backward()
    opt.zero_grad()
    net(gradients(net, 0, rank)).backward()
    opt.step()
    other = Net(dtype=torch.bfloat16).state_dict()
    net.load_state_dict({**net.state_dict(), "up": other["up"], "norm": other["norm"]})
    net(gradients(net, 1, rank)).backward()
    opt.step()
    return pieces(net, opt)


@pytest.mark.parametrize("layout", ["padded-nscost", "decoupled-total-order"])
def test_masters_follow_what_is_written_to_parameters(layout):
    net, master = Net(dtype=torch.bfloat16), Net()
    master.load_state_dict({name: value.float() for name, value in net.state_dict().items()})
    opt = Muon(groups(master))
    for step in range(2):
        for name, p in master.named_parameters():
            p.grad = sum(gradients(net, step, rank)[name].float() for rank in range(2))
        opt.step()
        if step == 0:
            for name in ("up", "norm"):
                p = master.get_parameter(name)
                back = net.get_parameter(name).detach()
                same = p.detach().bfloat16() == back
                p.data = torch.where(same, p.data, back.float())
    expected = {name: p.detach().bfloat16() for name, p in master.named_parameters()}
    check(run(2, resumed, layout), expected)


def begun(rank: int, world: int, layout: str) -> list[bool]:
    """Ranks that were made with other values begin with those of the first one."""
    net = Net()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(rank)
    LayerWise(net, groups(net), layout=layout)
    return [torch.equal(p, value) for p, value in zip(net.parameters(), Net().parameters(), strict=True)]


def test_all_ranks_begin_with_the_values_of_the_first():
    for layout in ("padded-nscost", "balanced"):
        assert all(map(all, run(3, begun, layout)))


class Waited:
    """A collective under way that says when it is waited for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait(self) -> None:
        self.log.append(self.name)


@pytest.mark.filterwarnings("ignore:no parameter of this optimizer has a gradient")
def test_modules_wait_for_their_own_parameters_only(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 2))
    log: list[str] = []
    monkeypatch.setattr(buffers.Bucket, "gather", lambda bucket: [Waited(" ".join(bucket.gradient_of), log)])
    opt = LayerWise(model, [{"params": model.parameters(), "algorithm": "adamw"}], bucket_size=1, overlap=True)
    log.clear()
    everything = ["0.weight", "2.bias", "2.weight"]
    opt.step()
    assert not log
    model[2](torch.ones(1, 3))
    assert sorted(log) == everything[1:]
    model(torch.ones(1, 2))
    assert log[2:] == everything[:1]
    for after in (model.state_dict, opt.state_dict, opt.close):
        log.clear()
        opt.step()
        after()
        assert sorted(log) == everything
