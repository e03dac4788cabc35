"""Which matrices there are, who does which of them and when; all without a process."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from support import sweep
from support.random_layouts import random_overlapping_layout, row_layout

from muonckpt import LayoutError
from muonckpt.algebra.box import row_major
from muonckpt.algebra.layout import Place, through
from muonckpt.algebra.plan import Copies, Plan, make_plan
from muonckpt.layouts.flat import owned_layout
from muonckpt.layouts.mesh import Mesh, Replicate, Shard, StridedShard, mesh_layout
from muonckpt.names.collector import gc_paused
from muonckpt.optimizer.newton_schulz.costs import CostTable, measure
from muonckpt.optimizer.newton_schulz.products import Form
from muonckpt.optimizer.newton_schulz.recipe import flops
from muonckpt.optimizer.planning.matrices import Fused, Slot, Spec, matrices_of, one_per_column, one_per_row, shapes_of
from muonckpt.optimizer.planning.residence import OwnedMatrices, matrix_parts, rank_copies, residence
from muonckpt.optimizer.planning.schedule import (
    NOTE,
    Schedule,
    Work,
    assign_owners,
    cut_stages,
    make_schedule,
    worthwhile_stages,
)

HALF = torch.bfloat16


def cost(rows: int, columns: int) -> int:
    return flops(rows, columns, 5)


def boxes(*args) -> list[str]:
    return ["+".join(str(piece.box) for piece in matrix) for matrix in matrices_of(*args)]


def test_matrices_are_what_lies_between_the_cuts_of_every_stacked_index():
    assert boxes((2, 5, 3), Fused((2, 3))) == [
        "[0:1, 0:2, 0:3]", "[0:1, 2:5, 0:3]", "[1:2, 0:2, 0:3]", "[1:2, 2:5, 0:3]",
    ]  # fmt: skip
    assert boxes((4, 5), Fused(columns=(2, 3))) == ["[0:4, 0:2]", "[0:4, 2:5]"]
    assert boxes((8, 3), Fused((3, 1), interleaved=2)) == ["[0:3, 0:3]+[4:7, 0:3]", "[3:4, 0:3]+[7:8, 0:3]"]
    assert boxes((0, 3)) == boxes((2, 0, 3)) == []


@pytest.mark.parametrize(
    ("fused", "message"),
    [
        (Fused((2, 2)), "pieces.*add up to the 5 rows"),
        (Fused((5, 0)), "positive"),
        (Fused(columns=(2, 2)), "add up to the 3 columns"),
        (Fused(interleaved=2), "2 times add up to the 5 rows"),
        (Fused(interleaved=0), "0 times"),
    ],
)
def test_what_does_not_add_up_is_refused(fused, message):
    with pytest.raises(LayoutError, match=message):
        matrices_of((5, 3), fused)


REDUCIBLE = [((8, 6), Fused((3, 1), (2, 4), 2)), ((2, 5, 3), Fused((2, 3))), ((0, 4), Fused()), ((6, 0), Fused())]


@pytest.mark.parametrize(("shape", "fused"), REDUCIBLE)
def test_a_column_has_one_number_for_each_row_of_each_matrix(shape, fused):
    column = one_per_row(shape, fused)
    rows = [[(p.box.lo[:-1], p.box.hi[:-1]) for p in matrix] for matrix in matrices_of(shape, fused)]
    columns = matrices_of(column.shape, column.fused)
    assert [[(p.box.lo[:-1], p.box.hi[:-1]) for p in matrix] for matrix in columns] == rows
    assert all(p.box.shape[-1] == 1 for matrix in columns for p in matrix)


@pytest.mark.parametrize(("shape", "fused"), REDUCIBLE)
def test_a_row_has_one_number_for_each_column_of_each_matrix(shape, fused):
    row = one_per_column(shape, fused)
    columns = [{(p.box.lo[-1], p.box.hi[-1], p.box.lo[:-2]) for p in matrix} for matrix in matrices_of(shape, fused)]
    rows = matrices_of(row.shape, row.fused)
    assert [{(p.box.lo[-1], p.box.hi[-1], p.box.lo[:-2]) for p in matrix} for matrix in rows] == columns
    assert all([p.box.shape[-2] for p in matrix] == [1] for matrix in rows)


def test_flops_count_the_products_of_the_short_side():
    assert flops(4, 16, 5) == flops(16, 4, 5) == 5 * (4 * 16 * 16 + 2 * 64)


PLAIN, ON_GRAM = Form(kernels=False, gram=False), Form(kernels=False, gram=True)


def test_a_cost_table_scales_the_nearest_measured_shape_by_flops():
    table = CostTable({(64, 64): {PLAIN: 1000}, (64, 1024): {PLAIN: 64000}}, steps=5)
    assert table(64, 64, 5, None) == table(64, 64, 10, None) // 2 == 1000
    assert table(1024, 64, 5, None) == 64000
    assert table(128, 2048, 5, None) == round(64000 * flops(128, 2048, 5) / flops(64, 1024, 5))
    with pytest.raises(ValueError, match="at least one shape"):
        CostTable({}, steps=5)


def test_a_cost_table_is_measured_stored_and_chooses_the_fastest_form():
    measured = measure([(8, 16), (16, 8), (8, 8)], gram=(2,), repeats=1)
    assert list(measured.nanoseconds) == [(8, 16), (8, 8)]
    assert all(times.keys() == {PLAIN, ON_GRAM} for times in measured.nanoseconds.values())
    assert CostTable.from_json(measured.as_json()) == measured
    text = measured.as_json()
    for wrong_text in ("", "[]", "{}", text.replace("bfloat16", "none"), text.replace("[8, ", "[")):
        with pytest.raises(ValueError, match=r"expected the text of CostTable\.as_json"):
            CostTable.from_json(wrong_text)
    table = CostTable({(64, 64): {PLAIN: 10, ON_GRAM: 20}, (64, 256): {PLAIN: 50, ON_GRAM: 30}}, 5, (2,))
    forms = [table.form(torch.device("cpu"), torch.bfloat16, *shape, 1) for shape in [(70, 60), (512, 128)]]
    assert forms == [PLAIN, ON_GRAM]
    assert table(256, 64, 5, (2,)) == 30 and table(256, 64, 5, None) == 50
    with pytest.raises(ValueError, match="bfloat16, not in torch"):
        table.form(torch.device("cpu"), torch.float32, 8, 8, 1)
    with pytest.raises(ValueError, match="gram=None: expected the restarts of the Gram form"):
        CostTable({(8, 16): {ON_GRAM: 1}}, steps=5)


def work_of(layout, cost: int, ranks: int, numel: int | None = None) -> Work:
    [(holders, held)] = residence(layout, Fused(), tuple(range(ranks)))
    return Work(cost, numel or int(np.prod(layout.shape)), layout.shape, holders, held)


@pytest.mark.parametrize("seed", range(20))
def test_owners_are_balanced_within_the_bound_of_longest_first(seed):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 17))
    rows = row_layout((40, 4), ranks)
    work = [work_of(rows, int(cost), ranks) for cost in rng.integers(1, 1000, size=rng.integers(1, 80))]
    owners = assign_owners(work, range(ranks))
    load = np.bincount(owners, weights=[w.cost for w in work], minlength=ranks)
    best = max(sum(w.cost for w in work) / ranks, max(w.cost for w in work))
    assert load.max() <= best * 4 / 3 + max(w.cost for w in work) / 3
    assert owners == assign_owners(work, range(ranks))


@pytest.mark.parametrize("seed", range(20))
def test_nobody_receives_more_than_the_mean_and_one_matrix(seed):
    """Costs that have nothing to do with sizes, and matrices that lie whole anywhere."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 9))
    work = []
    for _ in range(rng.integers(1, 60)):
        shape = (int(rng.integers(1, 30)), int(rng.integers(1, 30)))
        layout = owned_layout(shape, int(rng.integers(ranks))) if rng.integers(2) else row_layout(shape, ranks)
        work.append(work_of(layout, int(rng.integers(1, 1000)), ranks))
    received = np.zeros(ranks)
    for each, owner in zip(work, assign_owners(work, range(ranks)), strict=True):
        received[owner] += each.numel - int(each.elements[each.holders == owner].sum())
    sizes = [each.numel for each in work]
    assert received.max() <= sum(sizes) / ranks + max(sizes) + 1


def test_a_matrix_that_is_whole_somewhere_stays_there_if_the_balance_allows():
    work = [work_of(owned_layout((4, 4), owner), 7, 4) for owner in (3, 1, 2, 0)]
    assert assign_owners(work, range(4)) == [3, 1, 2, 0]
    everywhere = [work_of(mesh_layout((4, 4), Mesh.of(4), (Replicate(),)), 7, 4) for _ in range(4)]
    assert sorted(assign_owners(everywhere, range(4))) == [0, 1, 2, 3]
    unbalanced = [work_of(owned_layout((4, 4), 0), 7, 4) for _ in range(4)]
    assert sorted(assign_owners(unbalanced, range(4))) == [0, 1, 2, 3]


def experts(count: int, mesh: Mesh, dim: int) -> Schedule:
    layout = mesh_layout((count, 8, 4), mesh, (Shard(0), Shard(dim)))
    slot = Slot("momentum_buffer", layout, Fused(), HALF, HALF)
    return make_schedule([Spec((slot,), cost)], mesh.ranks, 0)


def test_experts_stay_in_their_group_in_whatever_order_they_come():
    for unit in experts(16, Mesh.of(4, 2), 1).units:
        assert unit.owner // 2 == unit.index // 4


@pytest.mark.parametrize("count", [2, 3, 4, 6, 8, 12, 13])
def test_more_ranks_than_experts_or_fewer_are_all_used(count):
    schedule = experts(count, Mesh.of(4, 2), 1)
    load = np.bincount([unit.owner for unit in schedule.units], minlength=8)
    assert load.max() == -(-count // 8)


@pytest.mark.parametrize("seed", range(20))
def test_stages_share_every_ranks_work_and_have_as_many_matrices_as_ranks(seed):
    rng = np.random.default_rng(seed)
    ranks, most = int(rng.integers(1, 9)), int(rng.integers(1, 7))
    costs = rng.integers(1, 100, size=int(rng.integers(1, 100))).tolist()
    owners = assign_owners([work_of(row_layout((4, 4), ranks), cost, ranks) for cost in costs], range(ranks))
    stages = cut_stages(costs, owners, ranks, most)
    count = max(stages) + 1
    assert set(stages) == set(range(count)) and count <= max(1, min(most, len(costs) // ranks))
    load = np.zeros((ranks, count))
    np.add.at(load, (owners, stages), costs)
    assert load.max() <= load.sum(axis=1).max() / count + max(costs)


def test_every_rank_makes_its_part_of_one_schedule():
    mesh = Mesh.of(2, 3)
    layouts = [mesh_layout(shape, mesh, (Replicate(), Shard(0))) for shape in [(7, 5), (5, 7), (2, 3), (6, 6)]]
    specs = [Spec((Slot("m", layout, Fused(), HALF, HALF),), cost) for layout in layouts]
    parts = [make_schedule(specs, mesh.ranks, rank) for rank in range(6)]
    assert len({part.digest for part in parts}) == len({part.units for part in parts}) == 1
    for stage in zip(*(part.stages for part in parts), strict=True):
        for direction in ("gather", "scatter"):
            sent = [getattr(part, direction).send_counts for part in stage]
            received = [getattr(part, direction).receive_counts for part in stage]
            assert np.array_equal(np.array(sent), np.array(received).T)
    other = make_schedule([*specs[1:], specs[0]], mesh.ranks, 0)
    assert other.digest != parts[0].digest


def crossing(schedules: list[Schedule], replica: list[int], direction: str) -> int:
    """Bytes of what travels between replicas, without notes."""
    total = 0
    for rank, schedule in enumerate(schedules):
        for stage in schedule.stages:
            counts = getattr(stage, direction).send_counts
            total += sum(count - NOTE for peer, count in enumerate(counts) if replica[peer] != replica[rank])
    return total


@pytest.mark.parametrize("replicas_first", [True, False])
def test_between_replicas_nothing_travels_to_the_owners_and_each_result_once(replicas_first):
    """HSDP: an owner reads its own replica; every other replica needs each result, once, and no more."""
    mesh = Mesh.of(2, 4) if replicas_first else Mesh.of(4, 2)
    placements = (Replicate(), Shard(0)) if replicas_first else (Shard(0), Replicate())
    replica = [rank // 4 if replicas_first else rank % 2 for rank in range(8)]
    shapes = [(16, 8), (8, 16), (24, 8), (8, 8), (32, 8)] * 3
    specs = [Spec((Slot("m", mesh_layout(shape, mesh, placements), Fused(), HALF, HALF),), cost) for shape in shapes]
    schedules = [make_schedule(specs, mesh.ranks, rank) for rank in range(8)]
    assert crossing(schedules, replica, "gather") == 0
    assert crossing(schedules, replica, "scatter") == 2 * sum(m * n for m, n in shapes)
    assert len({unit.owner for unit in schedules[0].units}) == 8


def on_a_random_mesh(rng, shape):
    dims = rng.integers(len(shape), size=2).tolist()
    placements = [StridedShard(dims[0], 2), Shard(dims[1]), Replicate()]
    mesh = Mesh.of(*rng.integers(1, 4, size=3).tolist())
    return mesh_layout(shape, mesh, tuple(placements[i] for i in rng.permutation(3)))


@pytest.mark.parametrize("laid_out", [on_a_random_mesh, random_overlapping_layout])
@pytest.mark.parametrize("seed", sweep(range(20), *range(4)))
def test_what_a_rank_copies_to_any_owner_and_back_are_shares_of_the_plans(seed, laid_out):
    """Also where replicas of a part lie elsewhere than with the owner, and where the owner has nothing of a matrix."""
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 13, size=int(rng.integers(2, 4))).tolist())
    layout = laid_out(rng, shape)
    rows, columns = shape[-2:]
    fused = Fused((1, rows - 1) if rows > 1 else None, (columns - 1, 1) if columns > 1 else None)
    ranks = tuple(range(max(layout.buffers) + 2))
    for index, matrix in enumerate(matrices_of(shape, fused)):
        resting = through(matrix, layout)
        for owner in ranks:
            whole = owned_layout(shapes_of(shape, fused)[index], owner)
            matrices = OwnedMatrices(np.array([5]), np.array([index]), np.array([owner]))
            for rank in ranks:
                found = rank_copies(layout, fused, ranks, rank, matrices)
                for tables, way in [
                    ((found.gives, found.takes, found.local), (resting, whole)),
                    ((found.gives_back, found.takes_back, found.local.inverse()), (whole, resting)),
                ]:
                    assert_share(tables, make_plan(*way), rank)


def test_experts_between_two_cuts_are_planned_once():
    """What is listed grows with the boxes, not with experts times ranks."""
    layout = mesh_layout((384, 2048, 8), Mesh.of(128, 8), (Shard(1), Shard(0)))
    parts = matrix_parts(layout, Fused((1024, 1024)))
    assert len(parts.piece) == 1024 and len(set(parts.representative.tolist())) == 2 * 8
    assert len({id(home) for home in residence(layout, Fused((1024, 1024)), tuple(range(1024)))}) == 2 * 8


Row = tuple[object, ...]
"""A copy, or one end of it: sizes, and offset and strides for each end."""


def assert_share(tables: tuple[Copies, Copies, Copies], plan: Plan, rank: int) -> None:
    """What a rank gives, takes and has itself is its share of a plan: to each peer in order, its own in any."""
    gives, takes, own = tables
    assert (gives.source == 5).all() and (takes.target == 5).all() and (own.source == 5).all()

    def place(place: Place) -> Row:
        return place.offset, place.strides

    def by_peer(pairs: Iterable[tuple[object, Row]]) -> dict[object, list[Row]]:
        listed: defaultdict[object, list[Row]] = defaultdict(list)
        for peer, row in pairs:
            listed[peer].append(row)
        return listed

    def near(copies: Copies) -> dict[object, list[Row]]:
        """Ends at the source, by target; on the wire a box is dense."""
        assert rows(copies.target_strides) == [row_major(sizes) for sizes in copies.sizes.tolist()]
        ends = (copies.sizes, copies.source_offset, copies.source_strides)
        return by_peer(zip(copies.target.tolist(), zip(*(rows(column) for column in ends), strict=True), strict=True))

    assert near(gives) == by_peer(
        (copy.target.buffer, (copy.box.shape, *place(copy.source)))
        for copy in plan.copies
        if copy.source.buffer == rank != copy.target.buffer
    )
    assert near(takes.inverse()) == by_peer(
        (copy.source.buffer, (copy.box.shape, *place(copy.target)))
        for copy in plan.copies
        if copy.target.buffer == rank != copy.source.buffer
    )
    sizes, _, *source, _, offset, strides = own.columns
    assert set(zip(*map(rows, (sizes, *source, offset, strides)), strict=True)) == {
        (copy.box.shape, *place(copy.source), *place(copy.target))
        for copy in plan.copies
        if copy.source.buffer == rank == copy.target.buffer
    }


def rows(column: np.ndarray) -> list[object]:
    return [tuple(row) if isinstance(row, list) else row for row in column.tolist()]


def test_stages_are_as_many_as_the_exchange_is_worth():
    """One where nothing or little travels, more by the square root of it, and no more than four."""

    def stages(elements: int, ranks: int) -> int:
        layout = row_layout((elements // 64, 64), ranks)
        return worthwhile_stages([Spec((Slot("m", layout, Fused(), HALF, HALF),), cost)], ranks)

    sizes = [4, 1 << 23, 1 << 24, 1 << 25, 1 << 26, 1 << 30]
    assert [stages(size, 1) for size in sizes] == [1] * 6
    assert [stages(size, 2) for size in sizes] == [1, 1, 1, 2, 2, 4]
    assert stages(1 << 26, 2) >= stages(1 << 26, 64) == 1


def test_the_collector_runs_again_after_a_plan_that_failed():
    with pytest.raises(LayoutError), gc_paused():
        assert not gc.isenabled()
        shapes_of((4,))
    assert gc.isenabled()
