"""Sum and average: exact where nothing changes, one rounding where it must, and never an assumption."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from muonckpt import SourceError
from muonckpt.converters.engine.outputs import scaled
from muonckpt.converters.translate.conventions import agreed_convention, momentum_factor
from muonckpt.converters.translate.request import Request
from muonckpt.names.vocabulary import Convention

EMA, SUM = Convention.EMA, Convention.SUM
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(INTEGERS[tensor.itemsize]).numpy().view(f"<u{tensor.itemsize}")


def any_bits(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Every kind of value: denormal, zero of both signs, infinite, NaN."""
    raw = torch.randint(
        0, 256, (count, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return raw.view(dtype).reshape(-1)


def neighbours(value: torch.Tensor) -> list[Fraction]:
    steps = (torch.nextafter(value, torch.full_like(value, to)) for to in (-float("inf"), float("inf")))
    return [Fraction(float(step)) for step in steps if torch.isfinite(step)]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    ("by", "to"),
    [(1 - 0.95, None), (1 / (1 - 0.95), None), (1 - 0.9, None), (1.0, None), (0.5, "bfloat16"), (1.0, "float32")],
)
def test_every_product_is_the_nearest_that_there_is(name, by, to):
    """Against exact rational arithmetic: no representable number is nearer to the product."""
    values = any_bits(DTYPES[name], 1500, 1)
    dtype = DTYPES[to or name]
    found = torch.from_numpy(scaled(bits(values), name, by, to).view(f"<i{dtype.itemsize}")).view(dtype)
    for value, result in zip(values, found, strict=True):
        if torch.isnan(value):
            assert torch.isnan(result)
        elif torch.isfinite(value) and torch.isfinite(result):
            exact = Fraction(float(value)) * Fraction(by)
            if (name, to) == ("float64", None):
                exact = Fraction(float(value) * by)  # the widest that there is: its own product
            off = abs(Fraction(float(result)) - exact)
            assert all(off <= abs(other - exact) for other in neighbours(result)), (value, result)
            assert torch.signbit(value) == torch.signbit(result)
        elif torch.isinf(value):
            assert value == result
        else:
            assert abs(float(value) * by) > torch.finfo(dtype).max


@pytest.mark.parametrize("name", DTYPES)
def test_shape_and_dtype_are_kept_and_a_factor_of_one_changes_no_number(name):
    values = any_bits(DTYPES[name], 60, 2)
    words = bits(values).reshape(3, 4, 5)
    same = scaled(words, name, 1.0)
    assert same.shape == words.shape and same.dtype == words.dtype
    numbers = ~torch.isnan(values).numpy().reshape(words.shape)
    assert np.array_equal(same[numbers], words[numbers])


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_average_is_the_sum_scaled_by_what_torch_and_dion_compute(nesterov):
    """The recurrences themselves, in float64, with a constant coefficient; Nesterov's lookahead included."""
    generator, mu = torch.Generator().manual_seed(3), 0.95
    total = average = torch.zeros(50, dtype=torch.float64)
    for _ in range(40):
        gradient = torch.randn(50, generator=generator, dtype=torch.float64)
        total, average = mu * total + gradient, torch.lerp(gradient, average, mu)
    if nesterov:
        total, average = gradient + mu * total, torch.lerp(gradient, average, mu)
    by = momentum_factor(SUM, EMA, mu, "w")
    scaled_sum = torch.from_numpy(scaled(bits(total), "float64", by).view("<i8")).view(torch.float64)
    torch.testing.assert_close(scaled_sum, average, rtol=1e-13, atol=0)


@pytest.mark.parametrize("convention", [EMA, SUM, None])
def test_nothing_is_scaled_where_nothing_changes(convention):
    assert momentum_factor(convention, convention, None, "w") is None
    assert momentum_factor(convention, None, None, "w") is None


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9, 0.95])
def test_factors_there_and_back(mu):
    assert momentum_factor(SUM, EMA, mu, "w") == 1 - mu
    assert momentum_factor(EMA, SUM, mu, "w") == 1 / (1 - mu)


def test_what_is_not_known_is_asked_for():
    with pytest.raises(SourceError, match=r"'w'.*`convention=.ema.` or `convention=.sum.`"):
        momentum_factor(None, EMA, 0.9, "parameter 'w'")
    with pytest.raises(SourceError, match=r"'w'.*sum to ema.*give `mu=`"):
        momentum_factor(SUM, EMA, None, "parameter 'w'")


@pytest.mark.parametrize("mu", [1.0, 1.5, -0.1, float("nan")])
def test_a_coefficient_that_cannot_be_converted_with_is_refused(mu):
    with pytest.raises(SourceError, match=r"in \[0, 1\)"):
        momentum_factor(EMA, SUM, mu, "w")
    with pytest.raises(SourceError, match="`mu=`"):
        Request(mu=mu)


def test_contradictions_are_refused():
    assert agreed_convention("w", {"the manifest": EMA, "`convention=`": None}, "choose") is EMA
    assert agreed_convention("w", {"the manifest": None}, "choose") is None
    with pytest.raises(SourceError, match="w: the manifest says ema, `convention=` says sum; choose"):
        agreed_convention("w", {"the manifest": EMA, "`convention=`": SUM}, "choose")


@pytest.mark.parametrize("dtype", ["int64", "float8_e4m3fn", "complex64"])
def test_what_is_no_momentum_is_not_scaled(dtype):
    with pytest.raises(SourceError, match=dtype):
        scaled(np.zeros(3, np.uint8), dtype, 0.5)
