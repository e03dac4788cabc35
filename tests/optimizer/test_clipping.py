"""Clipping by the global norm: every element once, on every topology, and one number on all ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from support import sweep
from support.every_kind import assert_same_bits, local_of, make, snapshot, train, values
from support.failing import raised
from support.topologies import HARD, TOPOLOGIES, Home, part_of, placer, world_of
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from muonckpt.optimizer import clip_grad_norm_

LIMIT = 7.0


def norm_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.flatten().double() for gradient in gradients]).norm().float()


def clipped(gradients: list[torch.Tensor], limit: float) -> list[torch.Tensor]:
    """In float32, and rounded once."""
    factor = (limit / (norm_of(gradients) + 1e-6)).clamp(max=1.0)
    return [(gradient.float() * factor).to(gradient.dtype) for gradient in gradients]


def with_gradients(gradients: list[torch.Tensor]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    return params


def mixed(seed: int) -> list[torch.Tensor]:
    """Every third one in 16 bits, and one without dims."""
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    return [value.to(dtypes[index % 3]) for index, value in enumerate(values(seed, torch.float32))]


def clip_everywhere(rank: int, world: int, homes: tuple[Home | None, ...]) -> tuple[float, list[str]]:
    """The norm, and the gradients of which this rank has other bits than its part of what a single process has."""
    place = placer(homes)
    params = with_gradients([place(index, gradient) for index, gradient in enumerate(mixed(1))])
    norm = clip_grad_norm_(params, LIMIT)
    again = clip_grad_norm_(params, 2 * LIMIT)
    assert norm.dtype == torch.float32 and norm.shape == () and again < 1.01 * LIMIT
    wrong = [
        f"{tuple(whole.shape)} of {whole.dtype}"
        for whole, param in zip(clipped(mixed(1), LIMIT), params, strict=True)
        if not torch.equal(local_of(param.grad), part_of(whole, param.grad))
    ]
    return float(norm), wrong


@pytest.mark.parametrize("name", sweep(TOPOLOGIES, *HARD[3:]))
def test_norm_and_gradients_are_those_of_a_single_process(name):
    homes = TOPOLOGIES[name]
    assert run(world_of(homes), clip_everywhere, homes) == [(float(norm_of(mixed(1))), [])] * world_of(homes)


def test_in_one_process_it_does_what_torch_does():
    ours, theirs = (with_gradients(values(1, torch.float32)) for _ in range(2))
    norm, expected = clip_grad_norm_(ours, LIMIT), nn.utils.clip_grad_norm_(theirs, LIMIT)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=0)


def test_a_norm_below_the_limit_changes_no_bit():
    gradients = mixed(2)
    params = with_gradients([gradient.clone() for gradient in gradients])
    assert clip_grad_norm_(iter(params), 1e9) == norm_of(gradients)
    assert all(torch.equal(param.grad, gradient) for param, gradient in zip(params, gradients, strict=True))


def test_one_parameter_and_none_and_no_gradients():
    [param] = with_gradients([torch.tensor(-3.0)])
    assert clip_grad_norm_(param, 1.0) == 3.0
    assert param.grad == pytest.approx(-1.0)
    assert clip_grad_norm_([], 1.0) == 0.0
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0.0


def clip_nonfinite(rank: int, world: int, bad: float, raising: bool) -> tuple[str, list[float]]:
    mesh = init_device_mesh("cpu", (2, 2))
    gradient = torch.ones(4, 4)
    gradient[3, 3] = bad
    [param] = with_gradients([distribute_tensor(gradient, mesh, [Shard(0), Shard(1)], src_data_rank=None)])
    try:
        outcome = str(float(clip_grad_norm_([param], 1.0, error_if_nonfinite=raising)))
    except RuntimeError as error:
        outcome = str(error)
    return outcome, local_of(param.grad).flatten().tolist()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_nonfinite_norm_is_refused_on_all_ranks_and_nothing_is_scaled(bad):
    outcomes = run(4, clip_nonfinite, bad, True)
    shown = "nan" if math.isnan(bad) else "inf"
    assert all(f"the norm of the gradients is {shown}" in outcome for outcome, _ in outcomes)
    assert [gradient for _, gradient in outcomes[:3]] == [[1.0] * 4] * 3
    assert outcomes[3][1][:3] == [1.0] * 3


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_nonfinite_norm_scales_as_torchs_does(bad):
    [param] = with_gradients([torch.tensor([1.0, bad])])
    expected = float(nn.utils.clip_grad_norm_(param, 1.0))
    outcomes = run(4, clip_nonfinite, bad, False)
    assert [outcome for outcome, _ in outcomes] == [str(expected)] * 4
    torch.testing.assert_close(torch.tensor(outcomes[3][1][-2:]), param.grad, equal_nan=True)


def stepped_if_finite(rank: int, world: int, homes: tuple[Home | None, ...]) -> tuple[list[torch.Tensor], list[bool]]:
    """What comes of two steps, with a gradient that is not finite between them; and which norms were finite."""
    place, finite = placer(homes), []
    params = [nn.Parameter(place(number, value)) for number, value in enumerate(values(0, torch.float32))]
    optimizer = make(params, replicas=dist.group.WORLD)
    for seed in (1, -3, 2):
        gradients = values(abs(seed), torch.float32)
        if seed < 0:
            gradients[seed].view(-1)[-1] = math.nan
        for number, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
            param.grad = place(number, gradient)
        norm = clip_grad_norm_(params, 1e9)
        if norm.isfinite():
            optimizer.step()
        finite.append(bool(norm.isfinite()))
        optimizer.zero_grad()
    return snapshot(params, optimizer), finite


@pytest.mark.parametrize("name", sweep(["FSDP2, rows, 3 ranks", "HSDP", "DDP"], "HSDP"))
def test_ranks_leave_out_a_step_together_where_the_norm_is_not_finite(name):
    params = [nn.Parameter(value) for value in values(0, torch.float32)]
    optimizer = make(params)
    train(params, optimizer, lambda gradient: gradient, torch.float32, steps=2)
    expected = snapshot(params, optimizer)
    for found, finite in run(world_of(TOPOLOGIES[name]), stepped_if_finite, TOPOLOGIES[name]):
        assert finite == [True, False, True]
        assert_same_bits(found, expected)


def clip_with_one_missing(rank: int, world: int) -> float:
    """Rank 0 has no gradient of the second parameter, the others one of zeros."""
    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])) for _ in range(2)]
    params[0].grad = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
    if rank:
        params[1].grad = torch.zeros_like(params[1])
    return float(clip_grad_norm_(params, 1.0))


def test_a_gradient_that_some_ranks_lack_stops_nobody():
    assert run(3, clip_with_one_missing) == [pytest.approx(math.sqrt(12))] * 3


def clip_stages(rank: int, world: int) -> float:
    """Two stages of two ranks, each with parameters of its own, plain and sharded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    stage = rank // 2
    plain = torch.full((2,), 1.0 + stage)
    sharded = distribute_tensor(torch.full((3, 3), 3.0 + stage), mesh["shard"], [Shard(0)], src_data_rank=None)
    return float(clip_grad_norm_(with_gradients([plain, sharded]), 1.0, pipeline=mesh["stage"].get_group()))


def test_stages_have_parameters_of_their_own():
    assert run(4, clip_stages) == [pytest.approx(math.sqrt(2 + 2 * 4 + 9 * 9 + 9 * 16))] * 4


def collectives(rank: int, world: int) -> tuple[list[dict[str, int]], int]:
    """What two calls send, and the process groups that are made for them."""
    whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("x", "y", "z"))
    homes = [(whole, [Shard(0)] * 3), (whole["y", "z"], [Shard(0), Shard(1)]), (whole["y", "z"], [Shard(1), Shard(0)])]
    params = with_gradients([distribute_tensor(torch.ones(8, 8), *home, src_data_rank=None) for home in homes])
    params += with_gradients([torch.ones(8)])
    before, counts = len(dist.distributed_c10d._world.pg_map), []
    for _ in range(2):
        with CommDebugMode() as mode:
            clip_grad_norm_(params, 1.0)
        counts.append({str(name): count for name, count in mode.get_comm_counts().items()})
    return counts, len(dist.distributed_c10d._world.pg_map) - before


def test_one_sum_for_each_set_of_ranks_and_groups_are_made_once():
    for counts, made in run(8, collectives):
        assert counts == [{"c10d._allgather_base_": 2}] * 2
        assert made == 1


def own(rank: int, world: int, case: str) -> tuple[str, bool]:
    """The norm or the error, and whether the gradients are as they were."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "fsdp"))
    pair = float(rank // 2)

    def part(value: float, axis: str = "fsdp") -> torch.Tensor:
        return distribute_tensor(torch.full((4, 3), value), mesh[axis], [Shard(0)], src_data_rank=None)

    dense = distribute_tensor(torch.ones(4, 3), mesh, [Replicate(), Shard(0)], src_data_rank=None)
    everyones = torch.ones(4, 3)
    given = {
        "experts": [dense, part(5 + pair)],
        "experts and plain": [everyones, dense, part(5 + pair)],
        "plain": [dense, torch.full((4, 3), float(rank))],
        "axes that cross": [part(1.0), part(1.0, "expert")],
        "some have none": [dense, part(1.0)] if pair else [dense],
        "replicas": [dense, part(5.0), everyones],
        "not finite on one": [dense, part(math.inf if pair else 1.0)],
        "experts on the whole mesh": [
            dense,
            distribute_tensor(
                torch.cat([torch.full((4, 3), 5.0), torch.full((4, 3), 6.0)]), mesh, [Shard(0)] * 2, src_data_rank=None
            ),
        ],
    }[case]
    params = with_gradients([gradient.clone() for gradient in given])
    told = raised(lambda: given.append(clip_grad_norm_(params, 1.0)))
    kept = all(torch.equal(local_of(p.grad), local_of(g)) for p, g in zip(params, given, strict=False))
    return (str(float(given[-1])) if told == "no error" else told), kept


@pytest.mark.parametrize("case", ["experts", "experts and plain", "plain", "axes that cross", "some have none",
                                  "not finite on one"])  # fmt: skip
def test_a_norm_that_ranks_do_not_have_in_common_is_refused_on_all_of_them(case):
    for told, kept in run(4, own, case):
        assert told.startswith("ArgumentError: ranks would scale gradients by different norms") and kept


def test_replicas_and_experts_of_which_the_mesh_says_it_have_one_norm():
    for case, squares in {"replicas": 12 + 12 * 25 + 12, "experts on the whole mesh": 12 + 12 * 25 + 12 * 36}.items():
        assert {told for told, _ in run(4, own, case)} == {str(float(torch.tensor(squares).double().sqrt().float()))}


def clip_misplaced(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (world,))
    param = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    return raised(clip_grad_norm_, [param], 1.0)


def test_a_gradient_that_is_laid_out_otherwise_is_refused():
    assert all("redistribute the gradient first" in message for message in run(2, clip_misplaced))
