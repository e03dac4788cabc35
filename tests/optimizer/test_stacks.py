"""Stacks of matrices are orthogonalised as each of them alone, by torch and by kernels; kernels against float64."""

from __future__ import annotations

import pytest
import torch
from support import spectra, sweep
from support.interpreted import DEVICE, kernels
from torch import Tensor

from muonckpt.optimizer import COEFFICIENTS
from muonckpt.optimizer.ground.tensors import Places
from muonckpt.optimizer.newton_schulz.iterations import orthogonalize, orthogonalize_all
from muonckpt.optimizer.newton_schulz.products import Form
from muonckpt.optimizer.newton_schulz.recipe import Recipe

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(24, 40), (40, 24), (31, 31), (17, 70), (1, 5)]


@pytest.fixture
def by_kernels() -> Form:
    """Kernels, whatever the device and the size."""
    kernels("triton.kernel_products")
    return Form(kernels=True, gram=True)


def test_sums_that_are_alike_by_chance_do_not_make_a_stack() -> None:
    rows = torch.randn(20, 2, 1, 33, dtype=torch.float64)
    for pair in rows:
        for found, row in zip(orthogonalize(pair, dtype=torch.float64), pair, strict=True):
            assert torch.equal(found, orthogonalize(row, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("gram", [None, (2,)])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_a_stack_has_the_bits_of_its_matrices(m: int, n: int, gram: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    stack = torch.randn(3, m, n)
    found = orthogonalize(stack, dtype=dtype, gram=gram)
    assert found.is_contiguous()
    for index in range(3):
        assert torch.equal(found[index], orthogonalize(stack[index], dtype=dtype, gram=gram))


@pytest.mark.parametrize(("m", "n", "gram"), sweep([(40, 24, None), (17, 50, (2,))], (40, 24, None)))
def test_a_stack_has_the_bits_of_its_matrices_by_kernels(
    by_kernels: Form, m: int, n: int, gram: tuple[int, ...] | None
) -> None:
    stack = torch.randn(2, m, n, device=DEVICE)
    found = orthogonalize(stack, gram=gram, steps=3, form=by_kernels)
    assert found.is_contiguous()
    for index in range(2):
        assert torch.equal(found[index], orthogonalize(stack[index], gram=gram, steps=3, form=by_kernels))


@pytest.mark.parametrize(("tall", "gram"), sweep([(False, None), (True, (1,))], (True, (1,))))
def test_matrices_of_any_shapes_have_the_bits_that_they_have_alone(
    by_kernels: Form, tall: bool, gram: tuple[int, ...] | None
) -> None:
    shapes = [(16, 48), (7, 20), (7, 20), (0, 3), (33, 40), (15, 16)] + ([] if tall else [(20, 20)])
    places = Places.of(shape[::-1] if tall else shape for shape in shapes)
    memory = torch.randn(places.numel, device=DEVICE)
    found = orthogonalize_all(memory, places, Recipe(steps=2, gram=gram), by_kernels)
    for matrix, done in zip(places.split_matrices(memory), places.split_matrices(found), strict=True):
        alone = orthogonalize(matrix, gram=gram, steps=2, form=by_kernels)
        assert torch.equal(done, alone)
        # Turned, the norm is summed in another order; a square has another Gram matrix.
        torch.testing.assert_close(
            alone.mT, orthogonalize(matrix.mT, gram=gram, steps=2, form=by_kernels), rtol=0, atol=0.02
        )


NOISE = {BF16: 0.03, FP16: 0.004}


ITERATIONS = [  # every two of these with each other
    (33, 90, None, BF16, "quintic"),
    (33, 90, (2,), FP16, "cubic5"),
    (90, 33, None, FP16, "cubic5"),
    (90, 33, (2,), BF16, "cubic5"),
    (90, 33, (2,), FP16, "quintic"),
]


@pytest.mark.parametrize(("m", "n", "gram", "dtype", "coefficients"), sweep(ITERATIONS, ITERATIONS[1]))
def test_kernels_are_the_iteration(
    by_kernels: Form, m: int, n: int, gram: tuple[int, ...] | None, dtype: torch.dtype, coefficients: str
) -> None:
    matrix: Tensor = spectra.gauss(m, n).to(DEVICE)
    found = orthogonalize(matrix, coefficients=coefficients, dtype=dtype, gram=gram, form=by_kernels)
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    chosen = COEFFICIENTS[coefficients]
    s = s / (s.norm() * chosen.norm_scale)
    for a, b, c in chosen.schedule(5):
        s = a * s + b * s**3 + c * s**5
    exact = (u * s) @ v
    assert (found.double() - exact).norm() <= NOISE[dtype] * exact.norm()


def test_kernels_hide_no_divergence(by_kernels: Form) -> None:
    stack = torch.randn(3, 20, 30, device=DEVICE)
    stack[0, 3, 4], stack[2] = torch.inf, 0
    found = orthogonalize(stack, steps=2, form=by_kernels)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()
    assert not found[2].any()


@pytest.mark.parametrize("shape", [(3, 0, 5), (0, 4, 5), (2, 5, 0)])
def test_empty_stacks(shape: tuple[int, ...]) -> None:
    assert orthogonalize(torch.ones(shape)).shape == shape


def test_neither_a_matrix_nor_a_stack() -> None:
    for shape in [(3,), (2, 3, 4, 5)]:
        with pytest.raises(ValueError, match="or a stack"):
            orthogonalize(torch.ones(shape))
    with pytest.raises(ValueError, match="floats"):
        orthogonalize(torch.ones(3, 4, 5, dtype=torch.int32))
