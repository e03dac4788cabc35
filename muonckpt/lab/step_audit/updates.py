"""The update that a hypothesis would have made, and how far the stored weights are from it.

Nothing here is shared with our optimizer: Newton-Schulz stands here as its authors write it, so that a fault of ours
cannot explain itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import Index
from ...names.coefficients import CoefficientSet
from ...store.reading.dtypes import bfloat16_words

Matrix = NDArray[np.float64]
Rounded = NDArray[np.float32]

_MANTISSA_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
"""Bits after the point of a stored number."""

ROW_SLOTS = frozenset({"rows", "dion_rows"})
"""The common names of NorMuon's second moment of rows."""

_SAFETY, _COARSE_SAFETY = 3.0, 2.5
"""The multiples of the rounding of storage, and of Newton-Schulz in 16 bits, up to which a hypothesis explains an
update.  The second is made by rounding each operation once; programs that round in other places leave up to 1.6 times
as much."""

_LINE_SAFETY = 4.0
"""The multiple of the bound for one row or column beside all, which few elements make."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The matrices that were orthogonalised one by one.

    Attributes:
        flatten: all dims but the first are one; else a parameter of more than two dims is a stack of matrices.
        pieces: rows of each matrix; None for all rows.
        columns: columns of each matrix, likewise.
        interleaved: the rows are this many blocks, each of ``pieces``, and a matrix has its piece of every block.
        causes: the reasons for which a program may cut so.
    """

    flatten: bool = False
    pieces: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    interleaved: int = 1
    causes: tuple[str, ...] = ()

    def matrices(self, array: Matrix) -> Iterator[Matrix]:
        """Yield each matrix, or a stack of them, as a view or copy of a parameter's array."""
        for view, rows, columns in self._views(array):
            block = view[..., rows[0] : rows[1], columns[0] : columns[1]]
            yield block.reshape(*block.shape[:-3], -1, block.shape[-1])

    def assemble(self, matrices: Iterator[Matrix], shape: Index) -> Matrix:
        """Return the parameter's array made of its matrices, which is the inverse of `matrices`."""
        array = np.empty(shape)
        for (view, rows, columns), matrix in zip(self._views(array), matrices, strict=True):
            block = view[..., rows[0] : rows[1], columns[0] : columns[1]]
            block[...] = matrix.reshape(block.shape)
        return array

    def _views(self, array: Matrix) -> Iterator[tuple[Matrix, tuple[int, int], tuple[int, int]]]:
        """Yield views of ``[..., blocks, rows of a block, columns]`` with the ranges of each matrix in them."""
        whole = (
            array.reshape(array.shape[0], -1) if self.flatten else array.reshape((1,) * (2 - array.ndim) + array.shape)
        )
        *stack, rows, columns = whole.shape
        view = whole.reshape(*stack, self.interleaved, rows // self.interleaved, columns)
        for row_range in pairwise(accumulate(self.pieces or (view.shape[-2],), initial=0)):
            for column_range in pairwise(accumulate(self.columns or (columns,), initial=0)):
                yield view, row_range, column_range

    def is_of(self, other: Cut) -> bool:
        """Return whether two cut alike, whatever the causes."""
        return replace(self, causes=()) == replace(other, causes=())


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The direction that a method makes of the momentum.

    Attributes:
        method: one of `METHODS`, such as "muon".
        momentum: the coefficient of momentum, which the direction of Nesterov depends on.
        betas: of Lion.
        name: of the published ``coefficients``, or "recorded".
    """

    method: str = "muon"
    momentum: float = 0.95
    nesterov: bool = True
    betas: tuple[float, float] = (0.9, 0.99)
    name: str = ""
    coefficients: CoefficientSet | None = None
    steps: int = 5

    def is_of(self, other: UpdateRule) -> bool:
        """Return whether two make directions alike, but for the coefficient of momentum."""
        return replace(self, momentum=0, name="") == replace(other, momentum=0, name="")


@dataclass(frozen=True)
class Evidence:
    """A parameter in two checkpoints: weights and state before and after the step.

    Attributes:
        state: after the step, by the common name of the slot.
        dtypes: of the weights and the momentum.
    """

    name: str
    before: Matrix
    after: Matrix
    momentum_before: Matrix
    state: Mapping[str, Matrix]
    dtypes: tuple[str, str]

    @property
    def shape(self) -> Index:
        return self.before.shape

    @cached_property
    def change(self) -> Matrix:
        return self.after - self.before

    @cached_property
    def rounding(self) -> float:
        """The norm of the error that storing the weights makes in their change."""
        return math.hypot(*(float(np.linalg.norm(spacing(w, self.dtypes[0]))) for w in (self.before, self.after)))

    def source(self, rule: UpdateRule) -> Matrix:
        """Return what the method makes its direction of, up to a factor.

        With gradients summed up or averaged, ``g`` is ``m' - mu m`` up to a factor, and Nesterov's ``g + mu m'`` is
        ``(1 + mu) m' - mu m``: the direction does not tell the two conventions apart.
        """
        after, mu = self.state["momentum" if "momentum" in self.state else "first"], rule.momentum
        return (1 + mu) * after - mu * self.momentum_before if rule.nesterov else after


def spacing(values: Matrix, dtype: str) -> Matrix:
    """Return the root mean square of the error of rounding each value to a dtype."""
    _, exponents = np.frexp(values)
    errors: Matrix = np.ldexp(1.0, exponents - 1 - _MANTISSA_BITS.get(dtype, 23)) / math.sqrt(12)
    return errors


def to_bfloat16(values: Rounded) -> Rounded:
    """Round float32 to bfloat16, to the nearest, ties to even."""
    words = bfloat16_words(values.astype(np.float64))
    nearest: Rounded = (words.astype(np.uint32) << 16).view(np.float32)
    return nearest


def orthogonalized(matrix: Matrix, rule: UpdateRule, rounded: bool = False) -> Matrix:
    """Return each matrix of a stack after Newton-Schulz, in float32, or ``rounded`` to bfloat16 throughout."""
    assert rule.coefficients is not None, "rules of orthogonal directions have coefficients"
    cast = to_bfloat16 if rounded else np.asarray
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.swapaxes(-1, -2) if is_tall else matrix
    norms = _norms(wide) * rule.coefficients.norm_scale
    x = cast((wide / np.maximum(norms, 1e-30)).astype(np.float32))
    for a, b, c in rule.coefficients.schedule(rule.steps):
        gram = cast(x @ x.swapaxes(-1, -2))
        polynomial = cast(np.float32(b) * gram + np.float32(c) * cast(gram @ gram))
        x = cast(np.float32(a) * x + cast(polynomial @ x))
    return (x.swapaxes(-1, -2) if is_tall else x).astype(np.float64)


def _norms(matrices: Matrix) -> Matrix:
    norms: Matrix = np.linalg.norm(matrices, axis=(-2, -1), keepdims=True)
    return norms


METHODS = frozenset({"muon", "normuon", "adamw", "lion", "the sign of the momentum", "the momentum itself"})
"""The methods that `direction` knows."""

ELEMENTWISE = frozenset({"adamw", "lion"})
"""Methods of single elements; each has one hypothesis."""


def direction(evidence: Evidence, cut: Cut, rule: UpdateRule, rounded: bool = False) -> Matrix:
    """Return the direction of the update that a rule makes, up to a factor; ``rounded`` as of `orthogonalized`."""
    state = evidence.state
    match rule.method:
        case "adamw":
            # The corrections for the first steps are factors, up to epsilon.
            return state["first"] / (np.sqrt(state["second"]) + 1e-12)
        case "lion":
            # The stored average says which gradient came in.  Lion mixes it with the average of before by beta1 for
            # the update, and by beta2 for the next average.
            before, (beta1, beta2) = evidence.momentum_before, rule.betas
            gradient = (state["first"] - beta2 * before) / (1 - beta2)
            return np.sign(beta1 * before + (1 - beta1) * gradient)
        case "the sign of the momentum":
            return np.sign(evidence.source(rule))
        case "the momentum itself":
            return evidence.source(rule)
    matrices = (orthogonalized(matrix, rule, rounded) for matrix in cut.matrices(evidence.source(rule)))
    orthogonal = cut.assemble(matrices, evidence.shape)
    if rule.method == "muon":
        return orthogonal
    # NorMuon divides rows by the root of their second moment, and gives each matrix the norm that it had before.
    [slot] = state.keys() & ROW_SLOTS
    divided = orthogonal / (np.sqrt(state[slot]) + 1e-8)
    pairs = zip(cut.matrices(orthogonal), cut.matrices(divided), strict=True)
    return cut.assemble((d * (_norms(o) / np.maximum(_norms(d), 1e-30)) for o, d in pairs), evidence.shape)


@dataclass(frozen=True)
class Explanation:
    """The nearest that a hypothesis comes to the stored change ``W' - W``, as ``-rate · direction - decay · W``.

    Attributes:
        rates: fitted for matrices of each shape: the learning rate times the scale.
        decay: fitted: the learning rate times the weight decay, give or take ``decay_error``.
        residual: the norm of what it does not explain, as a part of the update's.
        line_residual: the same of the row or column that is explained worst, beside the mean row or column.
    """

    cut: Cut
    rule: UpdateRule
    rates: Mapping[Index, float]
    decay: float
    decay_error: float
    residual: float
    line_residual: float

    def is_within(self, bound: float) -> bool:
        """Return whether it leaves no more than a bound, in all rows and columns."""
        return self.residual <= bound and self.line_residual <= _LINE_SAFETY * bound


def explain(evidence: Evidence, cut: Cut, rule: UpdateRule) -> tuple[Explanation, Matrix]:
    """Fit rates and decay of a hypothesis to a stored change, by least squares; return what it does not explain, too.

    The latter is shaped like the parameter.
    """
    update = direction(evidence, cut, rule)
    # A rate for each shape of matrices, as scales depend on shapes.
    shapes = list(dict.fromkeys(matrix.shape[-2:] for matrix in cut.matrices(evidence.before)))
    regressors = [update]
    if len(shapes) > 1:
        regressors = []
        for shape in shapes:
            parts = (m if m.shape[-2:] == shape else np.zeros_like(m) for m in cut.matrices(update))
            regressors.append(cut.assemble(parts, evidence.shape))
    # Decay by sign has to leave plainly less to be believed.
    factors, remainder = _least_squares(evidence, [*regressors, evidence.before])
    decayed = evidence.before * (update * evidence.before > 0)
    cautious_factors, cautious_remainder = _least_squares(evidence, [*regressors, decayed])
    if is_cautious := bool(np.linalg.norm(cautious_remainder) < np.linalg.norm(remainder) / 2):
        factors, remainder = cautious_factors, cautious_remainder
    update_norm = float(np.linalg.norm(evidence.change - factors[-1] * (decayed if is_cautious else evidence.before)))
    remainder_norm = float(np.linalg.norm(remainder))
    # The worst row or column beside the mean of all.
    line_residual = 0.0
    if update_norm and remainder.ndim >= 2:
        squares = remainder.reshape(-1, remainder.shape[-1]) ** 2
        worst = max(float(sums.max()) * sums.size for sums in (squares.sum(1), squares.sum(0)))
        line_residual = math.sqrt(worst) / update_norm
    # Six standard errors of a fitted factor, if the remainder is noise.
    error = 6 * remainder_norm / math.sqrt(remainder.size) / (float(np.linalg.norm(evidence.before)) or 1.0)
    explanation = Explanation(
        cut,
        rule,
        rates={shape: -float(factor) for shape, factor in zip(shapes, factors, strict=False)},
        decay=-float(factors[-1]),
        decay_error=error,
        residual=remainder_norm / update_norm if update_norm else 0.0,
        line_residual=line_residual,
    )
    return explanation, remainder


def _least_squares(evidence: Evidence, regressors: list[Matrix]) -> tuple[NDArray[np.float64], Matrix]:
    """Return the factors of regressors that come nearest to the change, and the remainder."""
    # The normal equations, with regressors scaled to norm 1.
    gram = np.array([[float(np.vdot(a, b)) for b in regressors] for a in regressors])
    norms = np.sqrt(np.diag(gram)) + 1e-300
    products = np.array([float(np.vdot(regressor, evidence.change)) for regressor in regressors]) / norms
    factors = np.linalg.lstsq(gram / np.outer(norms, norms), products, rcond=1e-12)[0] / norms
    remainder = evidence.change.copy()
    for factor, regressor in zip(factors, regressors, strict=True):
        remainder -= factor * regressor
    return factors, remainder


def rounding_bounds(evidence: Evidence, best: Explanation) -> tuple[float, float]:
    """Return what rounding may leave of a true hypothesis: in float32, and with 16 bits in Newton-Schulz."""
    size = float(np.linalg.norm(evidence.change + best.decay * evidence.before)) or 1.0
    weights = evidence.rounding / size
    # Rounded momentum moves the direction: by how much is tried with one draw of such an error.
    generator = np.random.default_rng(0)
    noisy_state = {name: _perturb(value, evidence.dtypes[1], generator) for name, value in evidence.state.items()}
    before = _perturb(evidence.momentum_before, evidence.dtypes[1], generator)
    noisy = replace(evidence, momentum_before=before, state={**evidence.state, **noisy_state})
    exact_direction = direction(evidence, best.cut, best.rule)
    norm = float(np.linalg.norm(exact_direction)) or 1.0
    moved = float(np.linalg.norm(direction(noisy, best.cut, best.rule) - exact_direction)) / norm
    # The same in 16 bits, which most programs compute in; 1e-6 covers the order of float32 sums.
    coarse = float(np.linalg.norm(direction(evidence, best.cut, best.rule, rounded=True) - exact_direction)) / norm
    fine = math.hypot(weights, moved, 1e-6)
    return _SAFETY * fine, math.hypot(_SAFETY * fine, _COARSE_SAFETY * coarse)


def _perturb(values: Matrix, dtype: str, generator: np.random.Generator) -> Matrix:
    return values + spacing(values, dtype) * math.sqrt(12) * (generator.random(values.shape) - 0.5)
