"""The matrix kernels against float64, on fresh inputs between NaN, into NaN; through the interpreter without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import sweep
from support.interpreted import DEVICE, kernels, on_gpu
from torch import Tensor

from muonckpt.optimizer.ground.tensors import Places, Stack

k = kernels("triton.kernel_products")
tiles = kernels("triton.multiply")
multiply = kernels("triton.multiply").multiply
EVERY_TILE = tuple(
    dict.fromkeys((*tiles.SMALL_TILES, *tiles.LARGE_TILES, *tiles.WIDE_TILES))
)  # other tests use one (`conftest`)

BF16, FP16 = torch.bfloat16, torch.float16
HALF = [BF16, FP16]
# A dtype and a side; what a dtype changes does not depend on sides.
EACH = sweep([(BF16, False), (FP16, True)], (FP16, True))
ROUNDING = {BF16: 2.0**-9, FP16: 2.0**-12}
MIXED = Places(((1, 16, 48), (2, 48, 16), (1, 32, 64)))


def fresh(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def stacked(matrices: list[Tensor], turned: bool = False) -> Stack:
    """Matrices end to end, each transposed there if they are turned, between NaN."""
    places = Places.of(tuple((m.mT if turned else m).shape) for m in matrices)
    memory = torch.full((places.numel + 32,), torch.nan, dtype=matrices[0].dtype, device=DEVICE)
    stack = Stack(memory[16:-16], places, turned)
    for place, matrix in zip(stack, matrices, strict=True):
        place.copy_(matrix)
    return stack


def assert_rounded(found: Tensor, exact: Tensor, magnitude: Tensor) -> None:
    """Within half a unit in the last place (2.5 times it near a power of two) and what fp32 sums may lose."""
    bound = 1.01 * ROUNDING[found.dtype] * 2 * exact.abs() + 2.0**-20 * magnitude + 2.0**-25
    assert (found.double() - exact).abs().le(bound).all()


@pytest.mark.parametrize(
    ("dtype", "left", "right"),
    [(BF16, False, False), (FP16, False, True), (FP16, True, False), (BF16, True, True)],
)
def test_products_of_any_sizes_in_one_launch(dtype: torch.dtype, left: bool, right: bool) -> None:
    sizes = [(16, 16, 16), (48, 80, 32), (48, 80, 32), (16, 112, 64)]
    a = [fresh(m, inner, dtype=dtype) for m, inner, _ in sizes]
    b = [fresh(inner, n, dtype=dtype) for _, inner, n in sizes]
    d = [fresh(m, n, dtype=dtype) for m, _, n in sizes]
    memory = torch.full((sum(m * n for m, _, n in sizes) + 32,), torch.nan, dtype=dtype, device=DEVICE)
    found = multiply(
        *(stacked(a, left), stacked(b, right)),
        alpha=0.75, addend=stacked(d), beta=-2.5, diagonal=1.5, out=memory[16:-16],
    )  # fmt: skip
    for out, x, y, z in zip(found, a, b, d, strict=True):
        eye = torch.eye(*z.shape, dtype=torch.float64, device=DEVICE)
        exact = 0.75 * x.double() @ y.double() - 2.5 * z.double() + 1.5 * eye
        assert_rounded(out, exact, x.double().abs() @ y.double().abs() + z.double().abs())
    assert memory[:16].isnan().all(), "written before the results"
    assert memory[-16:].isnan().all(), "written after the results"


@pytest.mark.parametrize(("dtype", "turned"), EACH)
def test_a_symmetric_product_is_the_whole_product(dtype: torch.dtype, turned: bool) -> None:
    # Sums below 256: exact in any order.
    xs = [torch.randint(-1, 2, (m, n)).to(dtype).to(DEVICE) for m, n in [(16, 48), (48, 32), (80, 48)]]
    x = stacked(xs, turned)
    once = multiply(x, x.mT, symmetric=True, out=torch.full((8960,), torch.nan, dtype=dtype, device=DEVICE))
    again = multiply(x, x.mT, addend=once, beta=2.0, diagonal=3.0, symmetric=True)
    for matrix, r, found in zip(xs, once, again, strict=True):
        exact = matrix.double() @ matrix.double().mT
        assert torch.equal(r.double(), exact)
        assert torch.equal(found.double(), 3 * exact + 3 * torch.eye(len(matrix), device=DEVICE))


@pytest.mark.parametrize(("dtype", "turned"), EACH)
def test_each_operation_against_float64(dtype: torch.dtype, turned: bool) -> None:
    xs = [fresh(m, n, dtype=dtype) for m, n in [(48, 96), (32, 80)]]
    kind, x = k.KernelProducts(dtype), stacked(xs, turned)
    r = kind.gram(x)
    for found, one in zip(r, xs, strict=True):
        assert_rounded(found, one.double() @ one.double().mT, one.double().abs() @ one.double().abs().mT)
    r = Stack((r.memory / 100).to(dtype), r.places)
    z, without_a, cubic = (
        kind.polynomial(r, -2.0, 0.5, 3.0),
        kind.polynomial(r, -2.0, 0.5),
        kind.polynomial(r, -2.0, 0.0),
    )
    added, only = kind.multiply_add(x, 1.5, z), kind.multiply_add(x, 0.0, z)
    assert added.turned == turned
    for one, s, t, u, v, first, second in zip(xs, r, z, without_a, cubic, added, only, strict=True):
        magnitude = 3 * (s.double().abs() @ s.double().abs() + s.double().abs() + 1)
        square, eye = 0.5 * s.double() @ s.double(), torch.eye(len(one), dtype=torch.float64, device=DEVICE)
        assert_rounded(t, 3 * eye - 2 * s.double() + square, magnitude)
        assert_rounded(u, square - 2 * s.double(), magnitude)
        assert_rounded(v, -2 * s.double(), magnitude)
        sizes = t.double().abs() @ one.double().abs() + one.abs()
        assert_rounded(first, 1.5 * one.double() + t.double() @ one.double(), sizes)
        assert_rounded(second, t.double() @ one.double(), sizes)
    for symmetric in (r, z, kind.commuting_product(z, r)):
        assert all(torch.equal(one, one.mT) for one in symmetric)


def test_what_multiplies_need_not_be_symmetric() -> None:
    """`iterations.compound` leaves rounding errors in Q; tall matrices are multiplied from the other side."""
    x, q = torch.randint(-2, 3, (16, 48)).to(BF16).to(DEVICE), torch.randint(-2, 3, (16, 16)).to(BF16).to(DEVICE)
    for turned in (False, True):
        [found] = k.KernelProducts(BF16).multiply_add(stacked([x], turned), 2.0, stacked([q]))
        assert torch.equal(found.double(), 2 * x.double() + q.double() @ x.double())


def test_commuting_takes_what_is_below_the_diagonal() -> None:
    z, q = (m @ m.mT for m in torch.randint(-1, 2, (2, 48, 3)).to(BF16).to(DEVICE))  # they do not commute
    below = (z.double() @ q.double()).tril()
    [found] = k.KernelProducts(BF16).commuting_product(stacked([z]), stacked([q]))
    assert torch.equal(found.double(), below + below.tril(-1).mT)


@pytest.mark.parametrize(("dtype", "turned"), EACH)
def test_a_matrix_has_the_same_bits_alone_and_in_a_stack(dtype: torch.dtype, turned: bool) -> None:
    xs = [fresh(*shape, dtype=dtype) for shape in MIXED]
    ps = [fresh(len(x), len(x), dtype=dtype) for x in xs]
    kind = k.KernelProducts(dtype)

    def done(these: list[Tensor], by: list[Tensor]) -> list[list[Tensor]]:
        x = stacked(these, turned)
        return [
            [*stack] for stack in (kind.normalized(x, 1e-7, 0.25), kind.gram(x), kind.multiply_add(x, 2.0, stacked(by)))
        ]

    all_done = done(xs, ps)
    for index, (x, p) in enumerate(zip(xs, ps, strict=True)):
        for together, [alone] in zip(all_done, done([x], [p]), strict=True):
            assert torch.equal(together[index], alone)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("given", [torch.float32, BF16])
def test_normal_divides_by_the_norm(dtype: torch.dtype, given: torch.dtype) -> None:
    xs = [10.0**-scale * torch.randn(shape, device=DEVICE) for scale, shape in enumerate([(16, 160), (80, 48)])]
    stack, kind = stacked([x.to(given) for x in xs]), k.KernelProducts(dtype)
    for x, found, small in zip(
        stack, kind.normalized(stack, 1e-7, 0.25), kind.normalized(stack, 1e4, 2.0), strict=True
    ):
        exact = x.double() / torch.linalg.matrix_norm(x.double()) / 0.25
        assert_rounded(found, exact, exact.abs())
        assert_rounded(small, x.double() / 2e4, x.double().abs() / 2e4)


@pytest.mark.filterwarnings("ignore:overflow")
def test_normal_of_what_has_no_norm() -> None:
    xs = [torch.ones(16, 32, device=DEVICE) for _ in range(4)]
    xs[0][:], xs[1][2, 3], xs[2][7, 23] = 0, torch.nan, torch.inf
    zero, *bad, good = k.KernelProducts(FP16).normalized(stacked(xs), 1e-7, 0.25)
    assert not zero.any()
    assert all(each.isnan().all() for each in bad)
    assert good.isfinite().all()


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("power", [50, 66, 90, 126])
def test_normal_takes_what_overflows_when_it_is_squared(power: int) -> None:
    xs = [torch.rand(16, 32, device=DEVICE), torch.rand(48, 64, device=DEVICE)]
    ordinary = k.KernelProducts(FP16).normalized(stacked(xs), 1e-7, 0.25)
    found = k.KernelProducts(FP16).normalized(stacked([xs[0], xs[1] * 2.0**power]), 1e-7, 0.25)
    assert all(map(torch.equal, found, ordinary))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_sides_are_filled_up_and_cut_off_again(dtype: torch.dtype) -> None:
    seen = []

    def work(x: Stack) -> Stack:
        seen.append((x.places, x.turned))
        for matrix in x:
            high, wide = next(sizes)
            assert not matrix[high:].any()
            assert not matrix[:, wide:].any()
        return Stack(x.memory * 2, x.places, x.turned)

    for shapes in ([(30, 33), (16, 32), (32, 48), (1, 300)], [(33, 30), (5, 2)]):
        places, sizes = Places.of(shapes), iter([tuple(sorted(shape)) for shape in shapes])
        memory = fresh(places.numel, dtype=dtype)
        assert torch.equal(k.KernelProducts(BF16).run_all(memory, places, dtype, work), memory * 2)
    assert seen == [
        (Places(((1, 32, 48), (1, 16, 32), (1, 32, 48), (1, 16, 304))), False),
        (Places(((1, 48, 32), (1, 16, 16))), True),
    ]


def test_nothing_is_done_for_empty_matrices() -> None:
    kind, empty = k.KernelProducts(BF16), Stack(fresh(0), Places(((2, 0, 16),)))
    assert kind.normalized(empty, 1e-7, 1.0).memory.shape == (0,)
    assert kind.gram(empty).places == Places(((2, 0, 0),))
    assert not kind.gram(empty.mT).memory.any()
    assert kind.gram(empty.mT).memory.shape == (512,)
    assert kind.run_all(fresh(0), Places(()), BF16, lambda x: x).shape == (0,)


def test_refusals() -> None:
    a = stacked([fresh(16, 32)])
    with pytest.raises(ValueError, match="cannot be multiplied"):
        multiply(a, a)
    with pytest.raises(ValueError, match="one dtype of 16 bits"):
        multiply(Stack(a.memory.float(), a.places), a.mT)
    with pytest.raises(ValueError, match="not symmetric"):
        multiply(a, stacked([fresh(32, 48)]), symmetric=True)
    with pytest.raises(ValueError, match="addend"):
        multiply(a, a.mT, addend=a)
    with pytest.raises(ValueError, match="multiples of 16"):
        multiply(stacked([fresh(16, 30)]), stacked([fresh(30, 16)]))
    with pytest.raises(ValueError, match="tall matrices are not done together"):
        k.KernelProducts(BF16).run_all(fresh(20), Places(((1, 2, 5), (1, 5, 2))), BF16, lambda x: x)
    with pytest.raises(ValueError, match="bfloat16 and float16"):
        k.KernelProducts(torch.float32)
    for runs in (((0, 1, 1),), ((1, -1, 1),), ((1, 2, 2), (3, 2, 2))):
        with pytest.raises(ValueError, match="runs"):
            Places(runs)


@pytest.mark.parametrize(("side", "rows", "columns"), [(8, 1, 1), (300, 32, 64), (50, 64, 16), (9, 2, 3)])
def test_tiles_cover_what_they_must_once(side: int, rows: int, columns: int) -> None:
    m = n = side
    for symmetric in (False, True):
        times = torch.zeros(m + rows, n + columns, dtype=torch.int64)
        for i, j in tiles.grid(m, n, tiles.Tile(rows, columns, 4, 1), symmetric):
            times[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] += 1
        times = times[:m, :n]
        assert times.max() == 1
        assert times.tril().eq(torch.ones(m, n).tril()).all() if symmetric else times.all()


COMPILED = """
import json, re, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from muonckpt.optimizer.triton import multiply

def compiled(dtype, mirror, tile):
    kernel = multiply._multiply
    fixed = dict(ADD=True, MIRROR=mirror, LEFT_TURNED=False, RIGHT_TURNED=mirror, EVEN=False)
    fixed |= dict(ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=multiply.DEPTH)
    kinds = dict.fromkeys(["left", "right", "addend", "out"], "*" + dtype) | {"tiles": "*i32", "sizes": "*i64"}
    kinds |= dict.fromkeys(["alpha", "beta", "diagonal"], "fp32")
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in fixed else kinds[name] for name in names},
        {(names.index(name),): value for name, value in fixed.items()},
        {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if "*" in kinds.get(name, "")},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    staged = 2 * multiply.DEPTH * (tile.rows + tile.columns) * tile.stages
    ptx = found.asm["ptx"]
    loads = re.findall(r"cp\\.async\\.c[ag]\\.shared\\.global [^;]*;", ptx)
    return found.metadata.shared, "wgmma" in ptx, len(loads), sum("0x10" in load for load in loads), staged

every = dict.fromkeys((*multiply.SMALL_TILES, *multiply.LARGE_TILES, *multiply.WIDE_TILES))
print(json.dumps([compiled(("bf16", "fp16")[n % 2], n % 3 < 2, tile) for n, tile in enumerate(every)]))
"""


@pytest.mark.exhaustive
def test_every_tile_compiles_for_hopper_with_its_loads_in_flight(tmp_path: Path) -> None:
    """Without a GPU: matrix units are used, all loads take 16 bytes, and shared memory has room for all stages, so that
    loads overlap."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 6
    for shared, matrix_units, loads, wide, staged in found:
        assert matrix_units
        assert loads == wide > 0
        assert staged <= shared <= 227 * 1024


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_every_tile_gives_the_same_bits(dtype: torch.dtype, symmetric: bool, turned: bool) -> None:
    x = stacked([fresh(side, 1040, dtype=dtype) for side in (1008, 2048)], turned)
    found = [multiply(x, x.mT, symmetric=symmetric, tile=tile).memory for tile in EVERY_TILE]
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.gpu
@on_gpu
def test_offsets_beyond_31_bits() -> None:
    places = Places(((1, 1 << 11, 1 << 21), (1, 48, 1 << 10)))  # more than 2^32 elements
    x = Stack(torch.randint(-1, 2, (places.numel,), device=DEVICE, dtype=torch.int8).to(FP16) / 64, places)
    for found, one in zip(multiply(x, x.mT), x, strict=True):
        exact = one[-64:].float() @ one[-64:].float().mT
        torch.testing.assert_close(found[-64:, -64:].float(), exact, rtol=2e-3, atol=1e-2)
