"""Newton-Schulz against a float64 SVD: quality as published, and the promises of `orthogonalize`."""

from __future__ import annotations

import math
import shutil
import textwrap
from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest
import torch
from packaging.version import Version
from support import spectra, sweep
from support.spectra import gauss
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from muonckpt.names.coefficients import SAFE_TAIL, CoefficientSet, coefficient_set, emerging_coefficients
from muonckpt.names.vocabulary import MUON
from muonckpt.optimizer import COEFFICIENTS
from muonckpt.optimizer.newton_schulz import iterations
from muonckpt.optimizer.newton_schulz.iterations import orthogonalize
from muonckpt.optimizer.newton_schulz.products import Form, frobenius
from muonckpt.optimizer.newton_schulz.recipe import EPS, Recipe

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAMES = tuple(COEFFICIENTS)


def error(spectrum: str, m: int, n: int, name: str | CoefficientSet, steps: int, dtype: torch.dtype) -> float:
    return spectra.error(
        orthogonalize(spectra.matrix(spectrum, m, n), coefficients=name, steps=steps, dtype=dtype), spectrum
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_algorithm_of_the_docstring_is_what_runs(name: str) -> None:
    """It stands there for people to read; `orthogonalize` must be that, but for rounding."""
    lines = iterations.__doc__.split("::\n\n")[1].split("\n\nThe other code")[0]
    names: dict = {}
    exec(textwrap.dedent(lines), names)
    matrix, coefficients = gauss(12, 30).double(), COEFFICIENTS[name]
    plain = names["orthogonalize"](matrix, coefficients.schedule(7), coefficients.norm_scale)
    torch.testing.assert_close(plain, orthogonalize(matrix, coefficients=name, steps=7, dtype=FP64), rtol=0, atol=1e-10)


# (spectrum, m, n, set, steps, dtype, relative error measured on peers' coefficients with another seed)
PUBLISHED = [
    ("gauss", 512, 2048, "keller", 5, BF16, 0.145),
    ("gauss", 512, 2048, "quintic", 5, BF16, 0.017),
    ("gauss", 512, 2048, "polar_express", 5, BF16, 0.087),
    ("gauss", 512, 2048, "cans", 5, BF16, 0.081),
    ("gauss", 512, 2048, "aol", 4, BF16, 0.015),
    ("gauss", 512, 2048, "deepseek_v4", 10, BF16, 0.006),
    ("gauss", 512, 2048, "deepseek_v4", 10, FP32, 0.0005),
    ("gauss", 512, 2048, "cubic5", 5, BF16, 0.170),
    ("gauss", 512, 512, "keller", 5, BF16, 0.190),
    ("gauss", 512, 512, "quintic", 5, BF16, 0.107),
    ("gauss", 512, 512, "polar_express", 5, BF16, 0.113),
    ("gauss", 512, 512, "cans", 5, BF16, 0.107),
    ("gauss", 512, 512, "aol", 4, BF16, 0.225),
    ("gauss", 512, 512, "deepseek_v4", 10, BF16, 0.008),
    ("gauss", 512, 512, "cubic5", 5, BF16, 0.273),
    ("log-uniform", 512, 2048, "keller", 8, FP32, 0.219),
    ("log-uniform", 512, 2048, "quintic", 5, BF16, 0.611),
    ("log-uniform", 512, 2048, "quintic", 8, FP32, 0.413),
    ("log-uniform", 512, 2048, "polar_express", 5, BF16, 0.554),
    ("log-uniform", 512, 2048, "polar_express", 8, FP32, 0.317),
    ("log-uniform", 512, 2048, "cans", 8, FP32, 0.304),
    ("log-uniform", 512, 2048, "aol", 4, BF16, 0.731),
    ("log-uniform", 512, 2048, "deepseek_v4", 10, BF16, 0.525),
    ("log-uniform", 512, 2048, "cubic5", 5, BF16, 0.727),
]


@pytest.mark.parametrize(
    ("spectrum", "m", "n", "name", "steps", "dtype", "published"), sweep(PUBLISHED, *PUBLISHED[::4])
)
def test_quality_is_as_published(
    spectrum: str, m: int, n: int, name: str, steps: int, dtype: torch.dtype, published: float
) -> None:
    assert error(spectrum, m, n, name, steps, dtype) <= 1.15 * published


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [1, 5, 12])
def test_float64_is_the_polynomial_of_the_singular_values(name: str, steps: int) -> None:
    matrix = gauss(12, 20).double()
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / (s.norm() * COEFFICIENTS[name].norm_scale)
    for a, b, c in COEFFICIENTS[name].schedule(steps):
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(
        orthogonalize(matrix, coefficients=name, steps=steps, dtype=FP64), (u * s) @ v, rtol=0, atol=1e-10
    )


def test_schedule_takes_the_first_steps_and_then_the_tail() -> None:
    quintic = COEFFICIENTS["quintic"]
    assert quintic.schedule(3) == quintic.steps[:3]
    assert quintic.schedule(8) == quintic.steps + (SAFE_TAIL,) * 3
    assert COEFFICIENTS["keller"].schedule(7) == ((3.4445, -4.7750, 2.0315),) * 7
    assert COEFFICIENTS["deepseek_v4"].schedule(11)[7:] == (
        (3.4445, -4.7750, 2.0315),
        (2.0, -1.5, 0.5),
        (2.0, -1.5, 0.5),
        SAFE_TAIL,
    )
    with pytest.raises(ValueError, match="steps=0"):
        quintic.schedule(0)


KELLER, SETTLING = (3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)
AOL = COEFFICIENTS["aol"].steps
EMERGING = {
    ("simple", 9): "keller",
    ("quintic", 5): "quintic",
    ("quintic", 7): (*COEFFICIENTS["quintic"].steps, *COEFFICIENTS["quintic"].steps[:2]),
    ("polar_express", 16): "polar_express",
    ("cans", 5): "cans",
    ("aol", 4): "aol",
    ("aol", 5): (*AOL, AOL[0]),
    ("aol", 9): (*AOL, *AOL, AOL[0]),
    ("deepseekv4", 10): "deepseek_v4",
    ("deepseekv4", 12): (*(KELLER,) * 8, *(SETTLING,) * 4),
    ("cubic5", 5): "cubic5",
}
"""What Emerging-Optimizers runs: past its end a list begins again, or its last triple is repeated."""


@pytest.mark.parametrize(("kind", "steps"), EMERGING)
def test_types_of_emerging_optimizers_make_its_update(kind: str, steps: int) -> None:
    coefficients = emerging_coefficients(kind, steps)
    assert coefficients == EMERGING[kind, steps]


def test_a_type_that_is_unknown_or_has_another_number_of_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown coefficient type 'custom', expected one of simple, quintic"):
        emerging_coefficients("custom", 5)
    with pytest.raises(ValueError, match="cubic5 is a schedule of 5 steps, found steps=6"):
        emerging_coefficients("cubic5", 6)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "keller"])
@pytest.mark.parametrize(("spectrum", "rows"), [("gauss", 64), ("gauss", 256), ("log-uniform", 64)])
def test_steps_past_the_list_never_raise_the_error(name: str, spectrum: str, rows: int) -> None:
    end = len(COEFFICIENTS[name].steps)
    errors = [error(spectrum, rows, 256, name, end + more, FP32) for more in (0, 1, 2, 5)]
    assert all(later <= earlier + 1e-6 for earlier, later in pairwise(errors)), errors


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", NAMES)
def test_sixteen_bits_follow_fp32(name: str, dtype: torch.dtype) -> None:
    """Rounding alone: measured up to 0.015 in bf16, CANS 0.054, and an eighth of it in fp16."""
    matrix = gauss(128, 512)
    bound = 0.08 if name == "cans" else 0.02
    rounded = orthogonalize(matrix, coefficients=name, dtype=dtype).float()
    exact = orthogonalize(matrix, coefficients=name, dtype=FP32)
    assert float((rounded - exact).norm() / exact.norm()) < (bound if dtype == BF16 else bound / 8)


def uneven(m: int, n: int) -> Tensor:
    """Rows over three decades and columns over two, in no order: parts of it lie deep below the largest elements."""
    generator = torch.Generator().manual_seed(1)
    rows, columns = torch.logspace(0, -3, m), torch.logspace(0, -2, n)
    rows, columns = rows[torch.randperm(m, generator=generator)], columns[torch.randperm(n, generator=generator)]
    return gauss(m, n) * rows[:, None] * columns


def test_fp16_keeps_small_rows() -> None:
    """Held at its own size instead of four times that, such a matrix loses four times as much of its worst row."""
    exact = orthogonalize(uneven(512, 2048), dtype=FP32)
    found = orthogonalize(uneven(512, 2048), dtype=FP16).float()
    assert float(((found - exact).norm(dim=1) / exact.norm(dim=1)).max()) < 0.003
    assert float((found - exact).norm() / exact.norm()) < 0.001


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
@pytest.mark.parametrize("name", NAMES)
def test_holding_a_matrix_at_another_size_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    """The iteration as it is written in the papers, without a scale; a small matrix on a CPU is rounded at the end."""
    x = gauss(24, 40).to(torch.promote_types(dtype, FP32))
    x = x / (frobenius(x) * COEFFICIENTS[name].norm_scale)
    for a, b, c in COEFFICIENTS[name].schedule(5):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c) if c else gram * b, x, beta=a)
    assert torch.equal(orthogonalize(gauss(24, 40), coefficients=name, dtype=dtype), x.to(dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("gram", [None, (2,)])
@pytest.mark.parametrize("name", NAMES)
def test_rounding_never_drives_a_singular_value_away(
    name: str, gram: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    """Large ones meet the maxima of a set's polynomials, where it is least stable: CANS undamped gives infinity."""
    matrices = [torch.ones(1, 1), torch.ones(24, 40)]
    for angle in torch.linspace(0, math.pi / 2, 25):
        values = torch.tensor([angle.cos(), angle.sin(), 1e-3, 1e-3])
        u, _, v = torch.linalg.svd(gauss(4, 8), full_matrices=False)
        matrices.append((u * values) @ v)
    for matrix in matrices:
        for scale in (1e-5, 1.0, 1e17):
            found = orthogonalize(matrix * scale, coefficients=name, dtype=dtype, gram=gram)
            assert float(torch.linalg.matrix_norm(found.float(), 2)) < 1.35


def test_fp32_stays_fp32_to_the_end() -> None:
    """No 16-bit value anywhere: then this would be 4e-4 at best."""
    exact = orthogonalize(gauss(64, 160), dtype=FP64)
    for gram in (None, (2,), ()):
        assert float((orthogonalize(gauss(64, 160), dtype=FP32, gram=gram) - exact).norm() / exact.norm()) < 4e-6


@pytest.mark.parametrize(("m", "n"), [(64, 96), (96, 64), (128, 128)])
def test_keller_agrees_with_torch(m: int, n: int) -> None:
    ours = orthogonalize(gauss(m, n), coefficients="keller").float()
    theirs = _zeropower_via_newtonschulz(gauss(m, n), (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
    # Each is 0.014 from the fp32 result: two independent bf16 roundings.
    assert float((ours - theirs).norm() / theirs.norm()) < 0.025


@pytest.mark.parametrize("given", [BF16, FP16, FP32, FP64])
@pytest.mark.parametrize("wanted", [BF16, FP16, FP32, FP64])
@pytest.mark.parametrize("gram", [None, (2,)])
@pytest.mark.parametrize(("m", "n"), [(6, 10), (10, 6), (8, 8)])
def test_inputs_are_never_mutated(
    given: torch.dtype, wanted: torch.dtype, gram: tuple[int, ...] | None, m: int, n: int
) -> None:
    before = gauss(m, n).to(given)
    matrix = before.clone().requires_grad_()
    result = orthogonalize(matrix, dtype=wanted, gram=gram)
    assert torch.equal(matrix.detach(), before)
    assert (result.shape, result.dtype, result.requires_grad) == ((m, n), wanted, False)
    assert result.untyped_storage().data_ptr() != matrix.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("gram", [None, (2,)])
@pytest.mark.parametrize("name", NAMES)
def test_tall_is_the_transpose_of_wide(name: str, gram: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    wide = gauss(48, 80)
    tall = orthogonalize(wide.mT.contiguous(), coefficients=name, dtype=dtype, gram=gram)
    assert torch.equal(tall.mT, orthogonalize(wide, coefficients=name, dtype=dtype, gram=gram))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("gram", [None, (2,)])
@pytest.mark.parametrize(("m", "n"), [(33, 65), (65, 33), (64, 64)])
def test_only_the_values_count(dtype: torch.dtype, gram: tuple[int, ...] | None, m: int, n: int) -> None:
    """Strided, misaligned and repeated calls give the same bits."""
    matrix = gauss(m, n)
    expected = orthogonalize(matrix, dtype=dtype, gram=gram)
    flats = [torch.full((offset + m * n,), torch.nan)[offset:].view(m, n) for offset in (1, 3)]
    strided = torch.full((2 * m, 3 * n), torch.nan)[::2, ::3]
    for same in (*(memory.copy_(matrix) for memory in (*flats, strided)), matrix.mT.contiguous().mT, matrix):
        assert torch.equal(orthogonalize(same, dtype=dtype, gram=gram), expected)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_scale_free_above_eps(dtype: torch.dtype) -> None:
    matrix = gauss(24, 40)
    expected = orthogonalize(matrix, dtype=dtype)
    # Beyond 2^64 the square of an element overflows, and the largest one here is just below the end of fp32.
    for power in (-20, -1, 7, 50, 61, 66, 90, 125):
        assert torch.equal(orthogonalize(matrix * 2.0**power, dtype=dtype), expected)
    below = orthogonalize(matrix * 1e-12, dtype=dtype, eps=1e-7)
    assert 0 < below.norm() < 0.1 * expected.norm()
    assert torch.equal(
        orthogonalize(matrix * 2.0**90, dtype=dtype, eps=2.0**125), orthogonalize(matrix, dtype=dtype, eps=2.0**35)
    )


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", [(24, 40), (512, 512)])
def test_small_matrices_are_not_starved_and_smaller_ones_fade(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """A momentum of norm 1e-12 gives the bits that it gives at norm 1; finite ones of any size a finite result."""
    matrix = gauss(*shape)
    matrix /= matrix.norm()
    expected, size = orthogonalize(matrix, dtype=dtype), math.sqrt(min(shape))
    assert torch.equal(orthogonalize(matrix * 2.0**-40, dtype=dtype), expected)
    assert torch.equal(orthogonalize(matrix * 2.0**-49, dtype=dtype), expected)
    for power in range(-54, -150, -5 if min(shape) < 100 else -24):
        faded = orthogonalize(matrix * 2.0**power, dtype=dtype).float().norm()
        assert faded < size * min(1.5, 1e4 * 2.0 ** (power + 49)), power
    assert MUON.eps == EPS == Recipe().eps


@pytest.mark.parametrize("power", [500, 600, 1021])
def test_fp64_has_norms_beyond_its_squares_too(power: int) -> None:
    expected = orthogonalize(gauss(24, 40).to(FP64), dtype=FP64)
    assert torch.equal(orthogonalize(gauss(24, 40).to(FP64) * 2.0**power, dtype=FP64), expected)


def test_compiled_code_does_not_look_at_the_norm() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(orthogonalize, backend="eager", fullgraph=True)
    for power in (0, 90):
        assert torch.equal(compiled(gauss(24, 40) * 2.0**power), orthogonalize(gauss(24, 40)))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (0, 5), (5, 0), (0, 0)])
def test_zero_and_empty(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for name in ("quintic", "polar_express_dion", "cubic5"):
        result = orthogonalize(torch.zeros(shape), coefficients=name, dtype=dtype)
        assert torch.equal(result, torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["keller", "cubic5"])
def test_divergence_is_not_hidden(bad: float, name: str) -> None:
    """Dividing by an infinite norm would give zeros."""
    matrix = gauss(6, 9).clone()
    matrix[2, 3] = bad
    assert orthogonalize(matrix, coefficients=name).isnan().all()


def test_norm_of_a_large_matrix() -> None:
    """A single running fp32 sum over these elements is 1 % off."""
    assert float(frobenius(torch.full((4096, 4096), 0.3))) == pytest.approx(0.3 * 4096, rel=1e-5)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"'kelly'.*keller.*cubic5"):
        orthogonalize(gauss(2, 3), coefficients="kelly")
    with pytest.raises(ValueError, match=r"\(2, 3, 4, 5\)"):
        orthogonalize(torch.zeros(2, 3, 4, 5))
    with pytest.raises(ValueError, match="int64"):
        orthogonalize(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        orthogonalize(gauss(2, 3), dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="steps=0"):
        orthogonalize(gauss(2, 3), steps=0)


def test_the_table_is_frozen_and_a_set_of_ones_own_is_welcome() -> None:
    assert all(name == each.name and each.source for name, each in COEFFICIENTS.items())
    with pytest.raises(TypeError):
        COEFFICIENTS["mine"] = COEFFICIENTS["keller"]  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        COEFFICIENTS["keller"].norm_scale = 2.0  # type: ignore[misc]
    mine = CoefficientSet("mine", (SAFE_TAIL,), "this test")
    assert coefficient_set(mine) is mine
    assert error("gauss", 12, 20, mine, 30, FP64) < 1e-9
    for steps, scale in (((), 1.0), (((1.0, math.nan, 0.0),), 1.0), ((SAFE_TAIL,), 0.0), ((SAFE_TAIL,), 2.0)):
        with pytest.raises(ValueError, match="'broken'"):
            CoefficientSet("broken", steps, "this test", norm_scale=scale)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="older torch.compile makes no dataclasses")
def test_newton_schulz_compiles() -> None:
    torch._dynamo.reset()
    matrix, options = torch.randn(24, 64), {"steps": 2, "gram": (1,), "dtype": torch.float32}
    form = Form(kernels=False, gram=True)
    found = torch.compile(orthogonalize, dynamic=False, fullgraph=True)(matrix, form=form, **options)
    torch.testing.assert_close(found, orthogonalize(matrix, form=form, **options), rtol=1e-4, atol=1e-5)
