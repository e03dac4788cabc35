"""Which choose_products is chosen for a matrix, and that the choice follows from facts that all ranks share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from muonckpt.optimizer.ground.tensors import Places
from muonckpt.optimizer.newton_schulz import products
from muonckpt.optimizer.newton_schulz.products import (
    CACHED_ELEMENTS,
    MIN_ROUNDED_WORK,
    MIN_UNIT_WORK,
    Form,
    TorchProducts,
    by_torch,
    choose_products,
    prefer_kernels,
)
from muonckpt.optimizer.step.step import fills_gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN, KERNELS = Form(kernels=False, gram=False), Form(kernels=True, gram=False)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU of compute capability 9.0."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    products._kernels.cache_clear()


FILLED = [(1281, 1281, 1), (8192, 2048, 1), (768, 2048, 128), (128, 4096, 64)]
NOT_FILLED = [(1024, 1024, 1), (1280, 4096, 1), (128, 4096, 63), (0, 5, 1000)]


@pytest.mark.parametrize(
    ("rows", "columns", "copies", "filled"),
    [(*shape, True) for shape in FILLED] + [(*shape, False) for shape in NOT_FILLED],
)
def test_what_fills_a_gpu(rows: int, columns: int, copies: int, filled: bool) -> None:
    assert fills_gpu(rows, columns, copies) == fills_gpu(columns, rows, copies) == filled


def test_kernels_are_preferred_where_they_run(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prefer_kernels(CUDA, BF16, 64, 4096, 1) == Form(kernels=True, gram=True)
    assert prefer_kernels(CUDA, FP16, 4096, 4096, 1) == KERNELS
    for device, dtype in ((CPU, BF16), (CUDA, FP32)):
        assert prefer_kernels(device, dtype, 4096, 4096, 1) == PLAIN
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert prefer_kernels(CUDA, FP16, 4096, 4096, 1) == PLAIN
    monkeypatch.setattr(torch.version, "cuda", None)
    assert prefer_kernels(CUDA, FP16, 4096, 4096, 1) == PLAIN


def test_kernels_where_they_run_and_nowhere_else(hopper: None) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from muonckpt.optimizer.triton.kernel_products import KernelProducts

    assert choose_products(KERNELS, CUDA, BF16, 8, 8) == KernelProducts(BF16)
    assert choose_products(PLAIN, CUDA, BF16, 4096, 4096) == TorchProducts(BF16, BF16)
    with pytest.raises(ValueError, match="no kernels for"):
        choose_products(KERNELS, CUDA, FP32, 4096, 4096)


def test_missing_triton_is_said_once(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "muonckpt.optimizer.triton.kernel_products", raising=False)
    for name in ("multiply", "launches"):
        monkeypatch.delitem(sys.modules, f"muonckpt.optimizer.triton.{name}", raising=False)
        monkeypatch.delattr(f"muonckpt.optimizer.triton.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    with pytest.warns(RuntimeWarning, match="Triton is not installed") as said:
        for _ in range(3):
            assert choose_products(KERNELS, CUDA, BF16, 4096, 4096) == TorchProducts(BF16, BF16)
    assert len(said) == 1
    products._kernels.cache_clear()


def test_torch_products_do_one_matrix_after_the_other() -> None:
    seen = []

    def work(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return x + 1

    memory = torch.randn(2 * 20 + 3 * 7)
    kind = TorchProducts(FP32, FP32)
    assert torch.equal(kind.run_all(memory, Places(((2, 4, 5), (1, 3, 7))), FP32, work), memory + 1)
    assert torch.equal(kind.run_all(memory[:20], Places(((1, 5, 4),)), BF16, work), (memory[:20] + 1).bfloat16())
    assert seen == [(4, 5), (4, 5), (3, 7), (4, 5)]


def test_matrices_are_done_together_where_that_gives_the_bits_that_they_have_alone() -> None:
    seen: list[tuple[int, ...]] = []

    def alike(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return x + 1

    def other_in_threes(x: torch.Tensor) -> torch.Tensor:
        return alike(x) + 2**-20 * (len(x) == 3)

    def other_by_two_threads(x: torch.Tensor) -> torch.Tensor:
        return alike(x) + 2**-20 * (x.ndim == 3 and torch.get_num_threads() == 2)

    memory, kind = torch.randn(5 * 20), TorchProducts(FP32, FP32, stack_elements=3 * 20)
    places = Places(((5, 5, 4),))
    for work, done in ((alike, [(3, 4, 5), (2, 4, 5)]), (other_in_threes, [(4, 5)] * 3 + [(2, 4, 5)])):
        for _ in range(2):  # the first tries
            seen.clear()
            with torch.device("meta"):  # a user's default device has no part in it
                assert torch.equal(kind.run_all(memory, places, FP32, work), memory + 1)
        assert seen == done
    assert torch.get_num_threads() == 1
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        assert torch.equal(kind.run_all(memory, places, FP32, other_by_two_threads), memory + 1)


def test_a_cpu_multiplies_16_bits_where_it_has_units_for_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(products, "CPU_INFO", tmp_path / "cpuinfo")
    for flag, found in (("amx_bf16", BF16), ("avx512_bf16_like", FP32)):
        products._has_units.cache_clear()
        products.CPU_INFO.write_text(f"processor\t: 0\nflags\t\t: fpu {flag} avx2\n")
        assert by_torch(CPU, BF16, 1, MIN_ROUNDED_WORK) == TorchProducts(BF16, found, CACHED_ELEMENTS[found.itemsize])
        assert by_torch(CPU, FP16, 1, MIN_ROUNDED_WORK) == TorchProducts(FP16, FP32, CACHED_ELEMENTS[4])
        small = TorchProducts(FP32, FP32, CACHED_ELEMENTS[4])
        assert by_torch(CPU, FP16, 1, MIN_ROUNDED_WORK - 1) == by_torch(CPU, FP32, 1, MIN_ROUNDED_WORK) == small
        assert by_torch(CPU, BF16, 1, MIN_UNIT_WORK - 1) == small
        assert by_torch(CPU, BF16, 1, MIN_UNIT_WORK) == (
            TorchProducts(BF16, BF16, CACHED_ELEMENTS[2]) if found is BF16 else small
        )
    products._has_units.cache_clear()
    assert by_torch(CUDA, BF16, 512, 512) == TorchProducts(BF16, BF16)


@pytest.mark.parametrize("shape", [(512, 512), (70, 301), (4, 65, 70)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_matrix_in_16_bits_is_divided_in_fp32_and_rounded_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    kind, x = TorchProducts(dtype, dtype), torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(kind.normalized(x, 1e-7, 0.26), kind.normalized(x.float(), 1e-7, 0.26))


def test_held_wider_or_not_the_results_are_alike() -> None:
    x = torch.randn(70, 300).bfloat16()
    narrow, wide = (TorchProducts(torch.bfloat16, kept) for kept in (torch.bfloat16, torch.float32))
    r, exact = narrow.gram(x), wide.gram(x.float())
    assert (r.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(r.float(), exact, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(
        narrow.multiply_add(x, 2.0, r).float(), wide.multiply_add(x.float(), 2.0, r.float()), rtol=2**-7, atol=0.1
    )
