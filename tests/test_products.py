"""Which arithmetic is chosen for a matrix, and that the choice follows from facts that all ranks share."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

from muonckpt.optimizer import products as module
from muonckpt.optimizer.products import TorchProducts, fills, held, products

CUDA = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU of compute capability 9.0."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    module._kernels.cache_clear()


FILLED = [(1281, 1281, 1), (8192, 2048, 1), (768, 2048, 128), (128, 4096, 64)]
NOT_FILLED = [(1024, 1024, 1), (1280, 4096, 1), (128, 4096, 63), (0, 5, 1000)]


@pytest.mark.parametrize(
    ("rows", "columns", "copies", "filled"),
    [(*shape, True) for shape in FILLED] + [(*shape, False) for shape in NOT_FILLED],
)
def test_a_wave_of_tiles(rows: int, columns: int, copies: int, filled: bool) -> None:
    assert fills(rows, columns, copies) == fills(columns, rows, copies) == filled


def test_torch_where_there_is_no_kernel(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(products(torch.device("cpu"), torch.bfloat16, 4096, 4096), TorchProducts)
        assert products(CUDA, torch.float32, 4096, 4096) == TorchProducts(torch.float32, torch.float32)
        assert products(CUDA, torch.bfloat16, 64, 4096) == TorchProducts(torch.bfloat16, torch.bfloat16)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert products(CUDA, torch.float16, 4096, 4096) == TorchProducts(torch.float16, torch.float16)
        monkeypatch.setattr(torch.version, "cuda", None)
        assert products(CUDA, torch.float16, 4096, 4096) == TorchProducts(torch.float16, torch.float16)


def test_kernels_on_a_gpu(hopper: None) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from muonckpt.optimizer.kernels import Kernels

    assert products(CUDA, torch.bfloat16, 4096, 2048) == Kernels(torch.bfloat16)
    assert products(CUDA, torch.float16, 100, 400, copies=200) == Kernels(torch.float16)


def test_missing_triton_is_said_once(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "muonckpt.optimizer.kernels", raising=False)
    for name in ("kernels", "tiles", "launches"):
        monkeypatch.delitem(sys.modules, f"muonckpt.optimizer.{name}", raising=False)
        monkeypatch.delattr(f"muonckpt.optimizer.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    with pytest.warns(RuntimeWarning, match="Triton is not installed") as said:
        for _ in range(3):
            assert products(CUDA, torch.bfloat16, 4096, 4096) == TorchProducts(torch.bfloat16, torch.bfloat16)
    assert len(said) == 1
    module._kernels.cache_clear()


def test_torch_products_do_one_matrix_after_the_other() -> None:
    seen = []

    def work(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return x + 1

    stack = torch.randn(3, 4, 5)
    assert torch.equal(TorchProducts(torch.float32, torch.float32).over(stack, work), stack + 1)
    assert seen == [(4, 5)] * 3
    assert TorchProducts(torch.float32, torch.float32).over(stack[:0], work).shape == (0, 4, 5)


def test_a_cpu_multiplies_16_bits_where_it_has_units_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for units, found in (({"amx_bf16": True}, torch.bfloat16), ({"avx512_bf16": False}, torch.float32)):
        module._has_units.cache_clear()
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda units=units: units)
        assert held(cpu, torch.bfloat16, module.WORTH) == found
        assert held(cpu, torch.float16, module.WORTH) == torch.float32
        assert held(cpu, torch.bfloat16, module.WORTH - 1) == torch.float32
        assert held(cpu, torch.float32, module.WORTH) == torch.float32
    module._has_units.cache_clear()
    assert held(CUDA, torch.bfloat16) == torch.bfloat16


def test_held_wider_or_not_the_results_are_alike() -> None:
    x = torch.randn(70, 300).bfloat16()
    narrow, wide = (TorchProducts(torch.bfloat16, kept) for kept in (torch.bfloat16, torch.float32))
    r, exact = narrow.gram(x), wide.gram(x.float())
    assert (r.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(r.float(), exact, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(
        narrow.added(x, 2.0, r).float(), wide.added(x.float(), 2.0, r.float()), rtol=2**-7, atol=0.1
    )
