"""The matrix kernels against float64, on fresh inputs between NaN, into NaN; through the interpreter without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interpreted import DEVICE, kernels, on_gpu, poisoned
from torch import Tensor

k = kernels("kernels")
tiles = kernels("tiles")

BF16, FP16 = torch.bfloat16, torch.float16
HALF = [BF16, FP16]
ROUNDING = {BF16: 2.0**-9, FP16: 2.0**-12}
ORDERS = ["rows", "columns", "gaps"]


def fresh(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def nan_like(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def assert_rounded(found: Tensor, exact: Tensor, magnitude: Tensor) -> None:
    """Within half a unit in the last place (2.5 times it near a power of two) and what fp32 sums may lose."""
    bound = 1.01 * ROUNDING[found.dtype] * 2 * exact.abs() + 2.0**-20 * magnitude + 2.0**-25
    assert (found.double() - exact).abs().le(bound).all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("left", "right"), [("rows", "columns"), ("columns", "gaps"), ("gaps", "rows")])
@pytest.mark.parametrize(("batch", "m", "inner", "n"), [(1, 1, 1, 1), (2, 33, 70, 45), (3, 32, 16, 64), (1, 65, 7, 2)])
def test_product_of_any_size_and_strides(
    dtype: torch.dtype, left: str, right: str, batch: int, m: int, inner: int, n: int
) -> None:
    a, b = fresh(batch, m, inner, dtype=dtype), fresh(batch, inner, n, dtype=dtype)
    d = fresh(batch, m, n, dtype=dtype)
    memory = nan_like(batch, m + 2, n + 2, dtype=dtype)
    out = memory[:, 1:-1, 1:-1]
    k.multiply(
        poisoned(a, left), poisoned(b, right), out, alpha=0.75, addend=poisoned(d, left), beta=-2.5, diagonal=1.5
    )
    eye = torch.eye(m, n, dtype=torch.float64, device=DEVICE)
    exact = 0.75 * a.double() @ b.double() - 2.5 * d.double() + 1.5 * eye
    assert_rounded(out, exact, a.double().abs() @ b.double().abs() + d.double().abs())
    out.fill_(torch.nan)
    assert memory.isnan().all(), "written outside of the result"


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("side", "depth"), [(1, 3), (31, 20), (32, 48), (77, 33)])
def test_symmetric_product_is_the_whole_product(dtype: torch.dtype, order: str, side: int, depth: int) -> None:
    x = torch.randint(-1, 2, (2, side, depth)).to(dtype).to(DEVICE)  # sums below 256: exact in any order
    view = poisoned(x, order)
    out = k.multiply(view, view.mT, nan_like(2, side, side, dtype=dtype), symmetric=True)
    assert torch.equal(out.double(), x.double() @ x.double().mT)
    out = k.multiply(view, view.mT, nan_like(2, side, side, dtype=torch.float32), addend=out, beta=2.0, symmetric=True)
    assert torch.equal(out.double(), 3 * x.double() @ x.double().mT)


@pytest.mark.parametrize("dtype", HALF)
def test_each_operation_against_float64(dtype: torch.dtype) -> None:
    x = fresh(2, 35, 83, dtype=dtype)
    kind = k.Kernels(dtype)
    r, exact = kind.gram(x), x.double() @ x.double().mT
    assert_rounded(r, exact, x.double().abs() @ x.double().abs().mT)
    r = (r / 100).to(dtype)
    magnitude = r.double().abs() @ r.double().abs() + r.double().abs() + 1
    eye = torch.eye(35, dtype=torch.float64, device=DEVICE)
    z = kind.square(r, -2.0, 0.5, 3.0)
    assert_rounded(z, 3 * eye - 2 * r.double() + 0.5 * r.double() @ r.double(), 3 * magnitude)
    assert_rounded(kind.square(r, -2.0, 0.5), 0.5 * r.double() @ r.double() - 2 * r.double(), 3 * magnitude)
    assert_rounded(kind.square(r, -2.0, 0.0), -2 * r.double(), 3 * magnitude)
    added = kind.added(x, 1.5, z)
    assert_rounded(added, 1.5 * x.double() + z.double() @ x.double(), z.double().abs() @ x.double().abs() + x.abs())
    assert_rounded(kind.added(x, 0.0, z), z.double() @ x.double(), z.double().abs() @ x.double().abs())
    for symmetric in (r, z, kind.commuting(z, r)):
        assert torch.equal(symmetric, symmetric.mT)


def test_commuting_takes_what_is_below_the_diagonal() -> None:
    z, q = (m @ m.mT for m in torch.randint(-1, 2, (2, 1, 40, 3)).to(BF16).to(DEVICE))  # they do not commute
    below = (z.double() @ q.double())[0].tril()
    assert torch.equal(k.Kernels(BF16).commuting(z, q)[0].double(), below + below.tril(-1).mT)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("order", ORDERS)
def test_a_matrix_has_the_same_bits_alone_and_in_a_stack(dtype: torch.dtype, order: str) -> None:
    x, p = fresh(3, 18, 70, dtype=dtype), fresh(3, 18, 18, dtype=dtype)
    kind = k.Kernels(dtype)
    together = kind.normal(x, 1e-7, 0.25), kind.gram(x), kind.added(x, 2.0, p)
    for index in range(3):
        one = poisoned(x[index : index + 1], order)
        alone = kind.normal(one, 1e-7, 0.25), kind.gram(one), kind.added(one, 2.0, p[index : index + 1])
        assert all(torch.equal(some[index], this[0]) for some, this in zip(together, alone, strict=True))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("given", [torch.float32, BF16])
def test_normal_divides_by_the_norm(dtype: torch.dtype, order: str, given: torch.dtype) -> None:
    x = fresh(2, 9, 150, dtype=given)
    x[1] *= 1e-3
    exact = x.double() / torch.linalg.matrix_norm(x.double(), keepdim=True) / 0.25
    assert_rounded(k.Kernels(dtype).normal(poisoned(x, order), 1e-7, 0.25), exact, exact.abs())
    small = k.Kernels(dtype).normal(x, 1e4, 2.0)
    assert_rounded(small, x.double() / 2e4, x.double().abs() / 2e4)


@pytest.mark.filterwarnings("ignore:overflow")
def test_normal_of_what_has_no_norm() -> None:
    x = torch.ones(5, 8, 24, device=DEVICE)
    x[0], x[1, 2, 3], x[2, 7, 23], x[3] = 0, torch.nan, torch.inf, 1e20
    found = k.Kernels(FP16).normal(x, 1e-7, 0.25)
    assert not found[0].any()
    assert found[1:4].isnan().all()
    assert found[4].isfinite().all()


def test_sides_are_filled_up_and_cut_off_again() -> None:
    seen = []

    def work(x: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return x * 2

    x = fresh(2, 30, 33)
    found = k.Kernels(BF16).over(x, work)
    assert torch.equal(found, x * 2)
    assert seen == [(2, 32, 48)]


def test_nothing_is_done_for_empty_matrices() -> None:
    kind = k.Kernels(BF16)
    assert kind.normal(fresh(2, 0, 5), 1e-7, 1.0).shape == (2, 0, 5)
    assert kind.gram(fresh(0, 4, 5)).shape == (0, 4, 4)
    assert not kind.gram(fresh(1, 4, 0)).any()


def test_refusals() -> None:
    a = fresh(1, 4, 6)
    with pytest.raises(ValueError, match="do not fit together"):
        k.multiply(a, a, fresh(1, 4, 4))
    with pytest.raises(ValueError, match="one dtype of 16 bits"):
        k.multiply(a.float(), a.mT.float(), fresh(1, 4, 4))
    with pytest.raises(ValueError, match="not symmetric"):
        k.multiply(a, fresh(1, 6, 5), fresh(1, 4, 5), symmetric=True)
    with pytest.raises(ValueError, match="bfloat16 and float16"):
        k.Kernels(torch.float32)


@pytest.mark.parametrize(("side", "rows", "columns"), [(8, 1, 1), (300, 32, 64), (50, 64, 16), (9, 2, 3)])
def test_tiles_cover_what_they_must_once(side: int, rows: int, columns: int) -> None:
    m = n = side
    for symmetric in (False, True):
        times = torch.zeros(m + rows, n + columns, dtype=torch.int64)
        for i, j in tiles.tiles(m, n, rows, columns, symmetric, torch.device("cpu")).tolist():
            times[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] += 1
        times = times[:m, :n]
        assert times.max() == 1
        assert times.tril().eq(torch.ones(m, n).tril()).all() if symmetric else times.all()


COMPILED = """
import json, re, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from muonckpt.optimizer import kernels, tiles

def compiled(dtype, mirror, tile):
    kernel = kernels._multiply
    fixed = dict(ADD=True, MIRROR=mirror, EVEN=False, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tiles.DEPTH)
    fixed |= dict(left_column=1, add_column=1, out_column=1) | ({"right_row": 1} if mirror else {"right_column": 1})
    kinds = dict.fromkeys(["left", "right", "addend", "out"], "*" + dtype) | {"tiles": "*i32"}
    kinds |= dict.fromkeys(["alpha", "beta", "diagonal"], "fp32")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names}
    even = [name for name in names if name not in fixed and kinds.get(name) != "fp32" and name != "count"]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in fixed.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in even},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    staged = 2 * tiles.DEPTH * (tile.rows + tile.columns) * tile.stages
    return found.metadata.shared, "wgmma" in found.asm["ptx"], staged

print(json.dumps([compiled(("bf16", "fp16")[n % 2], n % 3 < 2, tile) for n, tile in enumerate(tiles.TILES)]))
"""


def test_every_tile_compiles_for_hopper_with_its_loads_in_flight(tmp_path: Path) -> None:
    """Without a GPU: matrix units are used, and shared memory has room for all stages, so that loads overlap."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 5
    for shared, matrix_units, staged in found:
        assert matrix_units
        assert staged <= shared <= 227 * 1024


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("side", [1000, 2048])
def test_every_tile_gives_the_same_bits(dtype: torch.dtype, symmetric: bool, side: int) -> None:
    x = fresh(2, side, 1040, dtype=dtype)
    found = [
        k.multiply(x, x.mT, nan_like(2, side, side, dtype=dtype), symmetric=symmetric, tile=tile)
        for tile in tiles.TILES
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.gpu
@on_gpu
def test_offsets_beyond_31_bits() -> None:
    x = torch.randint(-1, 2, (3, 40, 1 << 25), device=DEVICE, dtype=torch.int8).to(FP16)  # 2^32 elements
    out = k.multiply(x[..., :64], x[..., -64:].mT, nan_like(3, 40, 40, dtype=FP16))
    assert torch.equal(out.double(), x[..., :64].double() @ x[..., -64:].double().mT)


@pytest.mark.gpu
@on_gpu
def test_a_graph_is_captured_after_a_step_and_refused_before() -> None:
    x, kind = fresh(1, 272, 528), k.Kernels(BF16)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="before capturing"), torch.cuda.graph(graph):
        kind.gram(x)
    want = kind.gram(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kind.gram(x)
    graph.replay()
    assert torch.equal(found, want)
