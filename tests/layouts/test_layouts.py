"""Every reader against the element-wise oracle, and the mesh reader against torch's own splits."""

from __future__ import annotations

import pickle
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from support import sweep
from support.oracle import arange, execute, scatter
from support.random_layouts import READERS, random_mesh, random_placements, random_shape, row_layout
from torch.distributed.tensor import Replicate as TorchReplicate, Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from muonckpt import LayoutError
from muonckpt.algebra.box import Box
from muonckpt.algebra.layout import Fragment, Place, TensorLayout, dense, stacked, through
from muonckpt.algebra.plan import make_plan
from muonckpt.layouts.flat import even_shards, flat_layout, owned_layout
from muonckpt.layouts.mesh import Mesh, Replicate, Shard, StridedShard, local_shape, mesh_layout


@pytest.mark.parametrize("seed", sweep(range(4), 0))
def test_random_layout_pairs_move_every_element_to_its_place(seed):
    """500 pairs over all readers, 1-4 dims, up to 8 ranks, with empty shards and replicas."""
    rng = np.random.default_rng(seed)
    for _ in range(500):
        shape = random_shape(rng)
        source, target = (READERS[rng.integers(len(READERS))](rng, shape) for _ in range(2))
        values = arange(shape)
        plan = make_plan(source, target)
        assert execute(plan, scatter(values, source)) == scatter(values, target)


@pytest.mark.parametrize("seed", sweep(range(4), 0))
def test_fused_rows_through_any_layout(seed):
    """Unequal row blocks (q, k, v), each made of one or several runs of the fused rows, in any order."""
    rng = np.random.default_rng(100 + seed)
    for _ in range(200):
        shape = random_shape(rng, dims=int(rng.integers(2, 4)))
        dim = int(rng.integers(len(shape)))
        cuts = sorted({0, shape[dim], *rng.integers(0, shape[dim] + 1, size=3).tolist()})
        runs = list(pairwise(cuts))
        chosen = [runs[i] for i in rng.permutation(len(runs))[: rng.integers(1, len(runs) + 1)]]
        boxes = [
            Box(
                tuple(lo if d == dim else 0 for d in range(len(shape))),
                tuple(hi if d == dim else n for d, n in enumerate(shape)),
            )
            for lo, hi in chosen
        ]
        layout = READERS[rng.integers(len(READERS))](rng, shape)
        matrix = through(stacked(boxes, dim), layout)
        values = arange(shape)
        expected = np.concatenate([values[tuple(map(slice, box.lo, box.hi))] for box in boxes], axis=dim)
        assert matrix.shape == expected.shape
        held = scatter(values, layout)
        owner = owned_layout(matrix.shape, "owner")
        assert execute(make_plan(matrix, owner), held) == scatter(expected, owner)


def torch_placement(placement):
    match placement:
        case StridedShard(dim, split):
            return _StridedShard(dim, split_factor=split)
        case Shard(dim):
            return TorchShard(dim)
    return TorchReplicate()


def torch_local(values, mesh_shape, placements, coordinate):
    """torch's own split of the data itself, one mesh axis after the other."""
    for parts, placement, index in zip(mesh_shape, placements, coordinate, strict=True):
        if not isinstance(placement, TorchReplicate):
            shards, _ = placement._split_tensor(values, parts, with_padding=False, contiguous=False)
            values = shards[index]
    return values.contiguous()


@pytest.mark.parametrize("seed", sweep(range(4), 0))
def test_mesh_reader_is_torchs_split(seed):
    """Data, shape and first offset of every rank's local tensor, on thousands of shards."""
    rng = np.random.default_rng(200 + seed)
    shards = 0
    for _ in range(300):
        shape, mesh = random_shape(rng), random_mesh(rng)
        placements = random_placements(rng, len(mesh.shape), len(shape))
        theirs = tuple(map(torch_placement, placements))
        try:
            held = scatter(arange(shape), mesh_layout(shape, mesh, placements))
        except LayoutError as error:
            assert "in which order" in str(error)
            continue
        for rank, coordinate in zip(mesh.ranks, product(*map(range, mesh.shape)), strict=True):
            local = torch_local(torch.from_numpy(arange(shape)), mesh.shape, theirs, coordinate)
            flat = local.flatten().tolist()
            assert held.get(rank, {}) == dict(enumerate(flat))
            assert local_shape(shape, mesh, placements, rank) == tuple(local.shape)
            torch_shape, offset = _compute_local_shape_and_global_offset(shape, mesh.shape, list(coordinate), theirs)
            assert tuple(local.shape) == torch_shape
            if flat:
                assert flat[0] == np.ravel_multi_index(offset, shape)
            shards += 1
    assert shards > 1000


def test_rows_are_torch_chunks_also_uneven_and_empty():
    for rows, ranks in [(8, 4), (13, 4), (3, 4), (9, 8), (0, 2), (1, 8)]:
        held = scatter(arange((rows, 2)), row_layout((rows, 2), ranks))
        chunks = torch.from_numpy(arange((rows, 2))).chunk(ranks)
        assert {r: list(b.values()) for r, b in held.items()} == {
            r: c.flatten().tolist() for r, c in enumerate(chunks) if c.numel()
        }


def test_a_zero_dim_tensor_has_one_element():
    plan = make_plan(row_layout((), 3), owned_layout((), 1))
    assert [copy.source.buffer for copy in plan.copies] == [1]


def test_a_buffer_reads_its_own_replica_and_strangers_go_round():
    source = mesh_layout((8, 4), Mesh.of(4), (Replicate(),))
    onto_holders = make_plan(source, row_layout((8, 4), 4))
    assert onto_holders.moved() == 0
    front, back = Box((0,), (2,)), Box((2,), (4,))
    chained = TensorLayout.of((4,), (dense(front, 0), dense(front, 1), dense(back, 1, 2), dense(back, 2)))
    assert make_plan(chained, owned_layout((4,), 1)).moved() == 0  # the second of one box, the first of the other
    far = make_plan(
        source,
        TensorLayout.of((8, 4), tuple(dense(f.box, f"file{f.place.buffer}") for f in row_layout((8, 4), 4).fragments)),
    )
    assert sorted(copy.source.buffer for copy in far.copies) == [0, 1, 2, 3]
    hybrid = mesh_layout((8, 4), Mesh.of(2, 4), (Replicate(), Shard(0)))  # ranks 0-3 and 4-7 are replicas
    onto_six = make_plan(hybrid, owned_layout((8, 4), 6))
    assert [copy.source.buffer for copy in onto_six.copies] == [4, 5, 6, 7]


def test_a_hole_names_tensor_box_and_holders():
    with pytest.raises(LayoutError, match=r"no buffer holds box \[2:4, 0:3\].*buffers: 7"):
        TensorLayout.of((4, 3), (dense(Box((0, 0), (2, 3)), 7),))


def test_a_partial_overlap_names_both_boxes_and_holders():
    with pytest.raises(LayoutError, match=r"\[0:3\] in buffer 0.*\[2:4\] in buffer 1.*overlap in part"):
        TensorLayout.of((4,), (dense(Box((0,), (3,)), 0), dense(Box((2,), (4,)), 1)))


def test_a_box_out_of_bounds_is_refused():
    with pytest.raises(LayoutError, match=r"\[0:5\] in buffer 0.*outside.*\(4,\)"):
        TensorLayout.of((4,), (dense(Box((0,), (5,)), 0),))


def test_one_buffer_cannot_hold_a_box_twice():
    box = Box((0,), (4,))
    with pytest.raises(LayoutError, match="twice"):
        TensorLayout.of((4,), (dense(box, 0), dense(box, 0, 4)))


def test_shapes_must_agree():
    with pytest.raises(LayoutError, match=r"\(4, 2\).*\(4, 3\)"):
        make_plan(row_layout((4, 2), 2), row_layout((4, 3), 2))


def test_pieces_must_tile_their_matrix():
    layout = row_layout((4, 4), 2)
    pieces = stacked([Box((0, 0), (2, 4)), Box((2, 0), (4, 3))], dim=0)
    with pytest.raises(LayoutError, match="no buffer holds"):
        through(pieces, layout)
    with pytest.raises(LayoutError, match="outside the parameter"):
        through(stacked([Box((0, 0), (5, 4))], 0), layout)


def test_flat_shards_must_hold_the_tensor():
    with pytest.raises(LayoutError, match="no buffer holds"):
        flat_layout((4, 4), 10, even_shards(24, 2))
    with pytest.raises(LayoutError, match="does not divide"):
        even_shards(25, 2)


def test_a_mesh_has_distinct_ranks_and_a_placement_per_axis_that_fits_the_tensor():
    for shape, ranks in [((2, 2), (0, 1, 2)), ((2,), (1, 1)), ((3,), (0, 1))]:
        with pytest.raises(LayoutError, match="that many distinct ranks"):
            Mesh(shape, ranks)
    for placements in [(Shard(0),), (Shard(0), Replicate(), Replicate())]:
        with pytest.raises(LayoutError, match="needs 2 placements"):
            mesh_layout((4, 4), Mesh.of(2, 2), placements)
    for dim in (-1, 2):
        with pytest.raises(LayoutError, match=r"does not fit a tensor of shape \(4, 4\)"):
            mesh_layout((4, 4), Mesh.of(2), (Shard(dim),))


def test_a_share_without_gaps_is_one_box():
    """A checkpoint takes one box a rank, so a strided shard over one rank must not be several."""
    layout = mesh_layout((12, 3), Mesh.of(1, 2), (StridedShard(0, 4), Shard(1)))
    assert [fragment.box for fragment in layout.fragments] == [Box((0, 0), (12, 2)), Box((0, 2), (12, 3))]


def test_a_fragment_cannot_be_empty():
    with pytest.raises(LayoutError, match="empty"):
        Fragment(Box((1,), (1,)), Place(0, 0, (1,)))


def test_a_mesh_is_pickled_in_a_few_bytes_whatever_its_size_and_comes_back_the_same():
    """A rank tells the coordinator its mesh, in a job of thousands of ranks."""
    grid = np.arange(4096).reshape(16, 8, 32)
    meshes = [Mesh.of(4096), Mesh.of(1), Mesh((16, 32), tuple(grid[:, 3, :].reshape(-1).tolist()))]
    meshes += [Mesh((8, 16), tuple(grid[:, :, 5].T.reshape(-1).tolist())), Mesh((1, 4), (9, 7, 5, 3))]
    for mesh in meshes:
        data = pickle.dumps(mesh)
        assert len(data) < 150 and pickle.loads(data) == mesh
        assert pickle.loads(data) is pickle.loads(data), "one object for all ranks"
    irregular = Mesh((2, 2), (0, 1, 2, 5))
    assert pickle.loads(pickle.dumps(irregular)) == irregular
