"""What travels for a step, what it takes in memory, and what happens when ranks do not agree."""

from __future__ import annotations

from weakref import ref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import sweep
from support.every_kind import assert_same_bits, snapshot
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

from muonckpt.lab.forecasting.models import fresh_parameter
from muonckpt.lab.forecasting.topologies import MuonOptions, step_plan
from muonckpt.layouts.mesh import Mesh, Shard as Rows, mesh_layout
from muonckpt.optimizer import Muon, StepExecution
from muonckpt.optimizer.ground import tensors as ground
from muonckpt.optimizer.newton_schulz.products import CACHED_ELEMENTS
from muonckpt.optimizer.planning.schedule import NOTE, WIRE_ALIGNMENT
from muonckpt.optimizer.step import boxes, step as step_module


def on_rows(shapes: list[tuple[int, int]], world: int, stages: int) -> tuple[list[torch.Tensor], Muon]:
    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(distribute_tensor(torch.randn(s), mesh, [Shard(0)], src_data_rank=None)) for s in shapes]
    opt = Muon(params, execution=StepExecution(stages=stages))
    for p in params:
        p.grad = torch.ones_like(p)
    return params, opt


def counted_step(rank: int, world: int, shapes: list[tuple[int, int]], stages: int) -> tuple[int, int, int, int]:
    """(all-to-alls of one step, stages, bytes that this rank sent to others, elements that the plan moves from it)."""
    params, opt = on_rows(shapes, world, stages)
    opt.step()  # plans and compares them; from here on only the exchange itself talks
    honest, sent = dist.all_to_all_single, []

    def counting(output, send, receive_counts, send_counts, group, async_op):
        sent.append(sum(n for peer, n in enumerate(send_counts) if peer != rank) * send.itemsize)
        return honest(output, send, receive_counts, send_counts, group, async_op=async_op)

    dist.all_to_all_single = counting
    try:
        opt.step()
    finally:
        dist.all_to_all_single = honest
    [schedule] = opt.schedules.values()
    local = {index: p.to_local().numel() for index, p in enumerate(params)}
    gathered = sum(local[unit.param] for unit in schedule.units if unit.owner != rank)
    returned = sum(
        p.numel() - local[index]
        for index, p in enumerate(params)
        for unit in schedule.units
        if unit.param == index and unit.owner == rank
    )
    return len(sent), len(schedule.stages), sum(sent), gathered + returned


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("stages", [1, 4])
def test_a_stage_is_two_collectives_of_exactly_the_elements_that_must_move_in_16_bits(world, stages):
    shapes = [(40, 16), (13, 16), (3, 16), (64, 24), (24, 64), (16, 16), (40, 16), (13, 16)]
    counted = run(world, counted_step, shapes, stages)
    for calls, made, sent, must in counted:
        assert calls == 2 * made and made <= stages
        assert 2 * must <= sent <= 2 * must + calls * (world - 1) * (NOTE + WIRE_ALIGNMENT - 2)
    # What `muonckpt lab plan` says of the same parameters, without processes.
    params = [fresh_parameter(f"{number}", shape, "float32", matrix=True) for number, shape in enumerate(shapes)]
    forecast = step_plan(
        params, lambda param, shape: mesh_layout(shape, Mesh.of(world), (Rows(0),)), world, MuonOptions(stages=stages)
    )
    assert len(forecast.work) == counted[0][1]
    for said, (calls, _, sent, _) in zip(forecast.sent.sum(axis=(0, 1)), counted, strict=True):
        assert said <= sent <= said + calls * (world - 1) * (WIRE_ALIGNMENT - 2)


def peak_of_a_step(rank: int, world: int, stages: int, together: int) -> tuple[int, list[int], int]:
    """(most bytes that a step had allocated at a time, bytes of each stage's wires, bytes of the largest matrix).

    Args:
        together: elements of matrices that are orthogonalised by one call.
    """
    shapes = [(256, 64)] * 24
    _, opt = on_rows(shapes, world, stages)
    before, step_module.MAX_STACK_ELEMENTS = step_module.MAX_STACK_ELEMENTS, together
    try:
        opt.step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
            opt.step()
    finally:
        step_module.MAX_STACK_ELEMENTS = before
    changes = [(e.start_ns(), e.nbytes()) for e in events.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for _, change in sorted(changes):
        live += change
        peak = max(peak, live)
    assert peak > 0
    [schedule] = opt.schedules.values()
    return peak, [stage.bytes for stage in schedule.stages], 4 * 256 * 64


def test_a_step_never_holds_more_than_two_stages():
    """Besides the products of the matrix, or of the small ones together, that are being orthogonalised."""
    for stages, together in ((1, 1), (2, 1), (6, 1), (6, step_module.MAX_STACK_ELEMENTS)):
        for peak, wires, matrix in run(2, peak_of_a_step, stages, together):
            assert len(wires) == stages
            most = max(a + b for a, b in zip([*wires, 0], [0, *wires], strict=True))
            assert peak <= most + 8 * max(matrix, 2 * CACHED_ELEMENTS[2] if together > 1 else 0)


def many_small(rank: int, world: int, dtype: torch.dtype, stages: int | None) -> list[torch.Tensor]:
    """Three steps of small matrices, most of them equal, of which others take part in every step.

    Args:
        world: 0: not distributed.
    """
    mesh = init_device_mesh("cpu", (world,)) if world else None
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 12), (12, 8), (8, 12), (3, 8, 12), (16, 16)] * 12

    def placed(shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=generator).to(dtype)
        return distribute_tensor(values, mesh, [Shard(len(shape) - 2)], src_data_rank=None) if mesh else values

    params = [nn.Parameter(placed(shape)) for shape in shapes]
    groups = [{"params": params[:45]}, {"params": params[45:], "pieces": (4, 4), "nesterov": False}]
    groups[1]["params"] = [param for param in params[45:] if param.shape[-2] == 8]
    opt = Muon(groups, lr=0.02, weight_decay=0.1, execution=StepExecution(stages=stages))
    taking_part = [param for group in groups for param in group["params"]]
    for step in range(3):
        for number, param in enumerate(taking_part):
            gradient = placed(tuple(param.shape))
            param.grad = None if step and number % 7 == step else gradient
        opt.step()
    return snapshot(taking_part, opt)


@pytest.mark.parametrize(("world", "dtype"), sweep([(2, torch.bfloat16), (3, torch.float32)], (3, torch.float32)))
def test_many_small_matrices_together_have_the_bits_of_each_by_itself(world, dtype, monkeypatch):
    found = [many_small(0, 0, dtype, None), *run(world, many_small, dtype, 2)]
    monkeypatch.setattr(step_module, "MAX_STACK_ELEMENTS", 1)
    monkeypatch.setattr(boxes, "MAX_BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(ground, "ELEMENTS", 20)
    expected = many_small(0, 0, dtype, None)
    for mine in found:
        assert_same_bits(mine, expected)


@pytest.mark.parametrize(
    ("option", "message"), [({"exchange": "pigeons"}, "all_gather"), ({"stages": 0}, "whole number of at least 1")]
)
def test_unknown_exchanges_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        StepExecution(**option)


def test_a_step_keeps_no_gradient():
    memory = np.ones((4, 4), np.float32)
    alive = ref(memory)
    p = nn.Parameter(torch.ones(4, 4))
    p.grad = torch.from_numpy(memory)
    del memory
    opt = Muon([p])
    opt.step()
    assert alive() is not None
    opt.zero_grad()
    assert alive() is None


def test_float16_does_not_limit_what_travels():
    """Momenta far beyond its range and far below give the bits that they give at their common size."""
    params = [nn.Parameter(torch.zeros(8, 12)) for _ in range(3)]
    gradient = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    for param, power in zip(params, (0, 60, -60), strict=True):
        param.grad = gradient * 2.0**power
    Muon(params, ns_dtype="float16", eps=1e-30).step()
    assert torch.equal(params[0], params[1]) and torch.equal(params[0], params[2])
