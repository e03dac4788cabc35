"""fp16 on the wire: what the owner reads depends on the matrix only, not on the strips that it came in."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from muonckpt.optimizer.planning.half import pack_half, unpack_half

FP32 = torch.float32
ELEMENT = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.builds(
    # Near each other in size, where subnormal and normal rounding differ.
    lambda mantissa, exponent: math.ldexp(mantissa, exponent),
    st.floats(1, 2, exclude_max=True, width=32),
    st.integers(-40, 3),
)


def travelled(strips: list[Tensor]) -> Tensor:
    """What the owner of these strips reads."""
    packed = [pack_half(strip) for strip in strips]
    highest = torch.stack([exponent for _, exponent in packed]).max()
    return torch.cat([unpack_half(values, exponent, highest) for values, exponent in packed])


def oracle(elements: list[float]) -> list[float]:
    """Eleven significant bits, to even; zero below 2^-27 of the largest power of two; in Python's own numbers."""

    def short(value: float) -> float:
        mantissa, exponent = math.frexp(value)
        return math.ldexp(round(math.ldexp(mantissa, 11)), exponent - 11)

    largest = max(map(abs, elements))
    top = max(math.frexp(largest)[1] - 1 if largest else -99, -99)
    return [short(each) if abs(short(each)) >= 2.0 ** (top - 27) else 0.0 for each in elements]


@given(st.lists(ELEMENT, min_size=1, max_size=12), st.data())
@example([2.0**100, 2.0**100 * (1 - 2.0**-24), 2.0**73, 2.0**73 * (1 - 2.0**-13), 2.0**72], None)
@example([1.0, 2.0**-28 * (1 - 0.4 * 2.0**-10), 2.0**-27 * (1 - 2.0**-13), 2.0**-27 * (1 - 2.0**-11)], None)
@example([3.4e38, 1e-45, -3.4e38], None)
@example([0.0, -0.0, 1e-40], None)
def test_the_owner_reads_the_same_from_any_strips(elements: list[float], data: st.DataObject | None) -> None:
    values = torch.tensor(elements, dtype=FP32)
    expected = torch.tensor(oracle(values.tolist()), dtype=torch.float64).to(FP32)
    sizes = [[1] * len(elements), [len(elements)]]
    if data is not None:
        cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(elements) - 1)), max_size=4)) - {len(elements)})
        sizes.append([hi - lo for lo, hi in zip([0, *cuts], [*cuts, len(elements)], strict=True)])
    for size in sizes:
        assert torch.equal(travelled(list(values.split(size))), expected)


def test_strips_of_one_matrix_far_apart_in_size() -> None:
    """One strip lies in the subnormal range of a whole matrix's exponent, and would be rounded there otherwise."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(64, 48, generator=generator) * torch.logspace(0, -12, 64)[:, None]
    assert torch.equal(travelled(list(matrix.split(1))), travelled([matrix]))
    assert torch.equal(travelled(list(matrix.split(7, dim=1))[:1]), travelled([matrix[:, :7]]))
    # The trap is real: without the exponents' agreement on what is zero, sharding shows.
    apart = torch.cat([unpack_half(*pack_half(row), pack_half(row)[1]) for row in matrix.split(1)])
    assert not torch.equal(apart, travelled([matrix]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_relative_error_is_that_of_eleven_bits(dtype: torch.dtype) -> None:
    for scale in (1e-20, 1e-6, 1.0, 1e20):
        strip = torch.randn(1000, generator=torch.Generator().manual_seed(1)).mul(scale).to(dtype)
        before = strip.clone()
        found = travelled([strip])
        assert torch.equal(strip, before)
        if dtype.itemsize > 2:
            assert float(((found.double() - strip.double()) / strip.double()).abs().nan_to_num().max()) <= 2**-11
        else:
            assert torch.equal(found, strip.float())  # 16 bits survive as they are


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives_so(bad: float) -> None:
    found = travelled([torch.tensor([1.0, bad]), torch.tensor([2.0])])
    assert torch.equal(found[1].isnan(), torch.tensor(math.isnan(bad)))
    assert math.isnan(bad) or float(found[1]) == bad


def test_strided_strips_and_shapes() -> None:
    matrix = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    values, exponent = pack_half(matrix[::2, 1::3])
    assert (values.shape, values.dtype, exponent.shape, exponent.dtype) == ((3, 3), torch.float16, (), torch.int16)
    assert torch.equal(unpack_half(values, exponent, exponent), travelled([matrix[::2, 1::3].contiguous()]))
    with pytest.raises(RuntimeError):
        pack_half(torch.empty(0))
