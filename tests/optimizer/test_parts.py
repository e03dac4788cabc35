"""A matrix that several ranks share gives the same bits however its blocks are spread over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
import torch.distributed as dist
from support import spectra
from support.spectra import gauss
from support.workers import run
from torch import Tensor

from muonckpt.optimizer.newton_schulz.iterations import orthogonalize, orthogonalize_parts, tree_sum
from muonckpt.optimizer.newton_schulz.recipe import Recipe

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = [(24, 80), (80, 24), (33, 101), (101, 33), (32, 32), (40, 57)]


def blocks_of(matrix: Tensor, count: int) -> list[Tensor]:
    """Blocks of columns in the wide orientation, as views; the last one is narrower where it does not come out."""
    wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    return list(wide.split(-(-wide.shape[1] // count), dim=1))


def whole(parts: Iterable[Tensor], shape: tuple[int, int]) -> Tensor:
    wide = torch.cat(list(parts), dim=1)
    return wide.mT if shape[0] > shape[1] else wide


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("count", "each"), [(8, 4), (8, 2), (8, 1), (7, 4), (7, 2), (5, 1)])
def test_any_spread_over_ranks_gives_the_bits_of_one(
    shape: tuple[int, int], count: int, each: int, dtype: torch.dtype
) -> None:
    """In lockstep: as long as every sum so far was that of one process, so are a rank's blocks, and its next sum."""
    blocks = blocks_of(gauss(*shape), count)
    sums: list[Tensor] = []

    def alone(partials: Iterator[Tensor]) -> Tensor:
        sums.append(tree_sum(partials))
        return sums[-1]

    expected = orthogonalize_parts(blocks, Recipe(dtype=dtype), alone)
    found: list[Tensor] = []
    by_rank: list[list[Tensor]] = []
    for first in range(0, len(blocks), each):
        mine: list[Tensor] = []
        by_rank.append(mine)

        def together(partials: Iterator[Tensor], mine: list[Tensor] = mine) -> Tensor:
            mine.append(tree_sum(partials))
            return sums[len(mine) - 1]

        found += orthogonalize_parts(blocks[first : first + each], Recipe(dtype=dtype), together)
    assert [len(mine) for mine in by_rank] == [1 + 5] * len(by_rank)
    for parts, total in zip(zip(*by_rank, strict=True), sums, strict=True):
        assert torch.equal(tree_sum(parts), total)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def on_ranks(rank: int, world: int, shape: tuple[int, int], count: int, dtype: torch.dtype) -> list[Tensor]:
    blocks = blocks_of(gauss(*shape), count)
    each = -(-len(blocks) // world)

    def total(partials: Iterator[Tensor]) -> Tensor:
        mine = tree_sum(partials)
        everyone = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everyone, mine)
        return tree_sum(everyone)

    return orthogonalize_parts(blocks[rank * each : (rank + 1) * each], Recipe(dtype=dtype), total)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("shape", [(24, 80), (101, 33)])
def test_real_ranks_give_the_bits_of_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    expected = whole(orthogonalize_parts(blocks_of(gauss(*shape), 8), Recipe(dtype=dtype), tree_sum), shape)
    for world in (2, 4):
        by_rank = run(world, on_ranks, shape, 8, dtype)
        assert torch.equal(whole((part for parts in by_rank for part in parts), shape), expected)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_block_is_the_whole_matrix(shape: tuple[int, int], dtype: torch.dtype) -> None:
    found = orthogonalize_parts(blocks_of(gauss(*shape), 1), Recipe(dtype=dtype), tree_sum)
    assert torch.equal(whole(found, shape), orthogonalize(gauss(*shape), dtype=dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("spectrum", "m", "n"), [("gauss", 128, 512), ("gauss", 512, 128), ("log-uniform", 128, 500)])
def test_blocks_are_as_exact_as_the_whole(spectrum: str, m: int, n: int, dtype: torch.dtype) -> None:
    matrix = spectra.matrix(spectrum, m, n)
    blocked = whole(orthogonalize_parts(blocks_of(matrix, 8), Recipe(dtype=dtype), tree_sum), (m, n))
    unblocked = orthogonalize(matrix, dtype=dtype)
    assert spectra.error(blocked, spectrum) <= 1.001 * spectra.error(unblocked, spectrum)
    assert spectra.noise(blocked, spectrum) <= 1.02 * spectra.noise(unblocked, spectrum) + 1e-6


@pytest.mark.parametrize("given", [BF16, FP32])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
def test_parts_are_never_mutated_and_results_are_their_own(given: torch.dtype, dtype: torch.dtype) -> None:
    matrix = gauss(20, 60).to(given)
    before = matrix.clone()
    found = orthogonalize_parts(blocks_of(matrix, 4), Recipe(dtype=dtype), tree_sum)
    assert torch.equal(matrix, before)
    assert all(part.shape == (20, 15) and part.dtype == dtype and part.is_contiguous() for part in found)
    assert len({part.untyped_storage().data_ptr() for part in (*found, matrix)}) == 5
    copies = [block.contiguous() for block in blocks_of(matrix, 4)]
    assert all(map(torch.equal, orthogonalize_parts(copies, Recipe(dtype=dtype), tree_sum), found))


def test_an_empty_block_changes_nothing() -> None:
    one, two = gauss(6, 10).split(5, dim=1)
    expected = orthogonalize_parts([one, two], Recipe(), tree_sum)
    found = orthogonalize_parts([one, two, torch.empty(6, 0)], Recipe(), tree_sum)
    assert found.pop().shape == (6, 0)
    assert all(map(torch.equal, found, expected))


def test_divergence_in_one_block_is_hidden_in_none() -> None:
    one, two = gauss(6, 10).clone().split(5, dim=1)
    two[3, 3] = torch.nan
    assert all(part.isnan().all() for part in orthogonalize_parts([one, two], Recipe(), tree_sum))


@pytest.mark.parametrize("power", [61, 66, 90, 126])
def test_a_norm_that_overflows_is_no_divergence(power: int) -> None:
    one, two = gauss(6, 10).split(5, dim=1)
    expected = orthogonalize_parts([one, two], Recipe(), tree_sum)
    found = orthogonalize_parts([one * 2.0**power, two * 2.0**power], Recipe(), tree_sum)
    assert all(map(torch.equal, found, expected))
    mixed = orthogonalize_parts([one, two * 2.0**power], Recipe(), tree_sum)
    assert all(part.isfinite().all() for part in mixed) and mixed[0].abs().max() < 1e-12


def test_tree_sum_adds_neighbours_first() -> None:
    """In fp32 the order shows: each pair cancels, where a running sum would lose the ones."""
    big = torch.tensor(2.0**30)
    one = torch.tensor(1.0)
    assert tree_sum([one, one, big, -big]) == 2
    assert tree_sum([one, big, -big, one]) == 0
    assert tree_sum([big, -big, one]) == 1
    with pytest.raises(ValueError, match="no tensors"):
        tree_sum([])


@pytest.mark.parametrize("count", range(1, 18))
@pytest.mark.parametrize("each", [1, 2, 4, 8, 16])
def test_tree_sum_of_runs_is_the_tree_sum_of_all(count: int, each: int) -> None:
    parts = list(gauss(count, 33).split(1))
    runs = [tree_sum(parts[first : first + each]) for first in range(0, count, each)]
    assert torch.equal(tree_sum(runs), tree_sum(parts))
    exact = torch.cat(parts).double().sum(0, keepdim=True)
    torch.testing.assert_close(tree_sum(parts).double(), exact, rtol=0, atol=1e-5)


def test_tree_sum_holds_few_tensors_at_a_time() -> None:
    """A Gram matrix per block would be more than the matrix."""
    alive = set()

    class Counted(torch.Tensor):
        """Knows how many of its kind there are."""

        def __del__(self) -> None:
            alive.discard(id(self))

    most = 0

    def counted() -> Iterator[Tensor]:
        nonlocal most
        for _ in range(64):
            each = torch.zeros(1).as_subclass(Counted)
            alive.add(id(each))
            most = max(most, len(alive))
            yield each

    assert tree_sum(counted()) == 0
    assert most <= 3  # partials themselves; their sums are one tensor a level


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([], "one number of rows"),
        ([torch.zeros(2, 3), torch.zeros(3, 3)], r"\(2, 3\), \(3, 3\)"),
        ([torch.zeros(2, 3), torch.zeros(2)], r"\(2,\)"),
        ([torch.zeros(2, 3, dtype=torch.int64)], "int64"),
    ],
)
def test_refusals(parts: list[Tensor], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        orthogonalize_parts(parts, Recipe(), tree_sum)
