"""Who does the work, and what travels for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from workers import run

from muonckpt.errors import LayoutError
from muonckpt.layouts.mesh import Mesh, Replicate, mesh_layout, row_layout
from muonckpt.layouts.owned import owned_layout
from muonckpt.optimizer import Muon
from muonckpt.optimizer.exchange import HEADER
from muonckpt.optimizer.matrices import flops, matrices_of
from muonckpt.optimizer.owners import Work, assign


def test_matrices_are_the_rows_between_the_cuts_of_every_stacked_index():
    found = matrices_of((2, 5, 3), (2, 3))
    assert [str(piece.box) for [piece] in found] == [
        "[0:1, 0:2, 0:3]", "[0:1, 2:5, 0:3]", "[1:2, 0:2, 0:3]", "[1:2, 2:5, 0:3]",
    ]  # fmt: skip
    with pytest.raises(LayoutError, match="add up to the 5 rows"):
        matrices_of((5, 3), (2, 2))


def test_flops_count_the_products_of_the_short_side():
    assert flops(4, 16, 5) == flops(16, 4, 5) == 5 * (4 * 16 * 16 + 2 * 64)


@pytest.mark.parametrize("seed", range(20))
def test_owners_are_balanced_within_the_bound_of_longest_first(seed):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 17))
    work = [Work(row_layout((4, 4), ranks), int(cost)) for cost in rng.integers(1, 1000, size=rng.integers(1, 80))]
    owners = assign(work, range(ranks))
    load = np.bincount(owners, weights=[w.cost for w in work], minlength=ranks)
    best = max(sum(w.cost for w in work) / ranks, max(w.cost for w in work))
    assert load.max() <= best * 4 / 3 + max(w.cost for w in work) / 3
    assert owners == assign(work, range(ranks))


def test_a_matrix_that_is_whole_somewhere_stays_there_if_the_balance_allows():
    work = [Work(owned_layout((4, 4), owner), 7) for owner in (3, 1, 2, 0)]
    assert assign(work, range(4)) == [3, 1, 2, 0]
    everywhere = [Work(mesh_layout((4, 4), Mesh.of(4), (Replicate(),)), 7) for _ in range(4)]
    assert sorted(assign(everywhere, range(4))) == [0, 1, 2, 3]


def counted_step(rank: int, world: int, shapes: list[tuple[int, int]]) -> tuple[int, int, int]:
    """(all-to-all calls of one step, bytes that this rank sent to others, elements that the plan moves from it)."""
    mesh = init_device_mesh("cpu", (world,))
    params = [nn.Parameter(distribute_tensor(torch.randn(s), mesh, [Shard(0)], src_data_rank=None)) for s in shapes]
    opt = Muon(params)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()  # plans and compares them; from here on only the exchange itself talks
    honest, sent = dist.all_to_all_single, []

    def counting(output, send, receive_counts, send_counts, group):
        sent.append(sum(n for peer, n in enumerate(send_counts) if peer != rank) * send.itemsize)
        return honest(output, send, receive_counts, send_counts, group)

    dist.all_to_all_single = counting
    try:
        opt.step()
    finally:
        dist.all_to_all_single = honest
    [schedule] = opt._schedules()
    local = {index: p.to_local().numel() for index, p in enumerate(params)}
    gathered = sum(local[unit.param] for unit in schedule.units if unit.owner != rank)
    returned = sum(
        p.numel() - local[index]
        for index, p in enumerate(params)
        for unit in schedule.units
        if unit.param == index and unit.owner == rank
    )
    return len(sent), sum(sent), gathered + returned


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_step_is_two_collectives_of_exactly_the_elements_that_must_move_in_16_bits(world):
    shapes = [(40, 16), (13, 16), (3, 16), (64, 24), (24, 64)]
    for calls, sent, must in run(world, counted_step, shapes):
        headers = 2 * (world - 1) * HEADER
        assert calls == 2
        assert sent == 2 * (must + headers)


def differing_plans(rank: int, world: int) -> str:
    """Rank 1 has its parameters in another order."""
    mesh = init_device_mesh("cpu", (world,))
    shapes = [(8, 4), (4, 8)] if rank != 1 else [(4, 8), (8, 4)]
    params = [nn.Parameter(distribute_tensor(torch.ones(s), mesh, [Shard(0)], src_data_rank=None)) for s in shapes]
    for p in params:
        p.grad = torch.ones_like(p)
    try:
        Muon(params).step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_ranks_that_planned_differently_stop_before_they_exchange():
    for message in run(3, differing_plans):
        assert "planned another exchange" in message
