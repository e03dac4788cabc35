"""Newton-Schulz: the orthogonal factor of a matrix by matrix products only.

The polar factor ``U Vᵀ`` of ``M = U S Vᵀ`` is reached by odd polynomials of the singular values.  The plain algorithm,
for a wide matrix::

    def orthogonalize(matrix, triples, norm_scale=1.0, eps=1e-15):
        # The Frobenius norm is no less than any singular value, so all of them start in [0, 1].
        x = matrix / (max(matrix.norm(), eps) * norm_scale)
        for a, b, c in triples:
            gram = x @ x.T  # has the squares of the singular values
            z = b * gram + c * (gram @ gram)
            x = a * x + z @ x  # each singular value s becomes a s + b s^3 + c s^5
        return x

The other code is for matrices that are tall (transposed) or many (stacks and kernels, by a `Products`), in 16 bits
(rounded as matrix units do, held at a size where fp16 has small numbers, norms that do not overflow), with the same
bits on every topology, and in the Gram form (`recipe`).  Reasons and errors: ``docs/design/newton_schulz.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic

import torch
from torch import Tensor

from ...names.coefficients import Coefficients, Triple, coefficient_set
from ...names.errors import ArgumentError, called_like
from ..ground.tensors import Places
from .products import Form, M, Products, choose_products, prefer_kernels
from .recipe import EPS, Recipe


@called_like("orthogonalize(matrix)")
def orthogonalize(
    matrix: Tensor,
    *,
    coefficients: Coefficients = "quintic",
    steps: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    eps: float = EPS,
    gram: Sequence[int] | None = None,
    form: Form | None = None,
) -> Tensor:
    """Return the approximate polar factor ``U Vᵀ`` of ``matrix = U S Vᵀ``, or of each matrix of a stack.

    The result depends on the values of a matrix only, not on its strides, its alignment or its neighbours in memory.
    A tall matrix gives exactly the transpose of its transpose's result.  No gradient flows.  ``torch.compile`` takes it
    with ``fullgraph`` from torch 2.13 on.

    Args:
        matrix: ``[m, n]``, or a stack ``[B, m, n]``, of any real floating dtype; a dim may be 0.
        coefficients: a name in :data:`COEFFICIENTS`, a set, a triple for every step, or one triple for each step.
        steps: at least 1; see :meth:`CoefficientSet.schedule` for more steps than the set has.
        dtype: bf16, fp16, fp32 or fp64, to which every operand of a product is rounded, and the result.
            16-bit products are summed in fp32; fp32 ones on CUDA follow torch's TF32 setting.  Small matrices on a
            CPU are computed in fp32 throughout (:func:`.products.by_torch`).  On ill-conditioned matrices more than
            six steps in bf16 add more rounding than they remove error.
        eps: a lower bound on the Frobenius norm, as in ``torch.optim.Muon``, and not a summand: above it the result
            does not depend on the scale of ``matrix`` (to the bit for powers of two), so a momentum kept as a sum and
            one kept as a mean are orthogonalised alike.
        gram: None for the plain form; else the steps after which the Gram form (:mod:`.recipe`) rebuilds its Gram
            matrix, e.g. ``(2,)``, or ``()`` for never, where ``form`` takes it.  With bf16 its operands are rounded
            to fp16, an eighth of the error at the same cost, and the result to bf16.
        form: None: :func:`.products.prefer_kernels`.  A matrix of a stack gets the bits that it has alone in the same
            form.

    Returns:
        The shape of ``matrix``, of ``dtype``, of any strides.  Zeros for zeros.  All NaN if an element is not finite,
        in fp32 or the wider of the two dtypes: a diverged momentum is not hidden.

    Raises:
        ArgumentError: neither a matrix nor a stack of floats, an unknown name, what :class:`Recipe` refuses, or a form
            that this device does not have.
    """
    if matrix.ndim not in (2, 3) or not matrix.is_floating_point():
        raise ArgumentError(
            f"matrix: expected one of floats, or a stack, found {tuple(matrix.shape)} of {matrix.dtype}"
        )
    recipe = Recipe(coefficient_set(coefficients), steps, dtype, eps, gram=None if gram is None else tuple(gram))
    if matrix.ndim == 2:
        [iteration] = _get_iterations(recipe, form, matrix.device, ((1, *matrix.shape),))
        return iteration.products.run_matrix(matrix.detach(), dtype, iteration)
    count, rows, columns = matrix.shape
    places = Places(((count, rows, columns),) if count else ())
    return orthogonalize_all(matrix.reshape(-1), places, recipe, form).view(matrix.shape)


def orthogonalize_all(memory: Tensor, places: Places, recipe: Recipe, form: Form | None) -> Tensor:
    """Orthogonalise matrices of any shapes, end to end in one memory: ``[places.numel]`` in and out.

    Each matrix gets the bits that it has alone in the same ``form``.

    Args:
        memory: contiguous, of a real floating dtype.
        places: for kernels all matrices are tall, or none.
    """
    iterations = _get_iterations(recipe, form, memory.device, places.runs)
    if len(iterations) == 1:
        return iterations[0].products.run_all(memory.detach(), places, recipe.dtype, iterations[0])
    parts = torch.split(memory.detach(), [iteration.places.numel for iteration in iterations])
    results = [memory.new_empty(0, dtype=recipe.dtype)]
    for iteration, part in zip(iterations, parts, strict=True):
        results.append(iteration.products.run_all(part, iteration.places, recipe.dtype, iteration))
    return torch.cat(results)


@dataclass(frozen=True, slots=True)
class _Iteration(Generic[M]):
    """Newton-Schulz for a wide matrix, divided by its norm times ``scale``, or for several at once.

    Attributes:
        spans: runs of steps that share a Gram matrix; none for the plain form.
    """

    products: Products[M]
    triples: tuple[Triple, ...]
    spans: tuple[tuple[int, int], ...]
    eps: float
    scale: float
    places: Places

    def __call__(self, x: M) -> M:
        products = self.products
        x = products.normalized(x, self.eps, self.scale)
        # The Gram form: the polynomials of a span are made of one Gram matrix, and multiply X at its end.
        for start, stop in self.spans:
            x = products.multiply_add(x, 0.0, compound(products.gram(x), self.triples[start:stop], products))
        # The plain form: each polynomial is made of a Gram matrix of its own.
        for a, b, c in () if self.spans else self.triples:
            x = products.multiply_add(x, a, products.polynomial(products.gram(x), b, c))
        return x


def compound(gram: M, triples: Sequence[Triple], products: Products[M]) -> M:
    """Return ``Q`` of ``[s, s]``, by which the steps ``triples`` multiply ``X``, from its Gram matrix.

    All matrices here are polynomials of ``gram``, so they are symmetric and commute, but for rounding.  ``Q`` is not
    mirrored: that would have four times the rounding error.
    """
    q: M | None = None
    for index, (a, b, c) in enumerate(triples):
        z = products.polynomial(gram, b, c, a)
        q = z if q is None else products.multiply_add(q, 0.0, z)
        # X becomes ZX, so the next step finds the Gram matrix ZRZ.
        if index + 1 < len(triples):
            gram = products.commuting_product(products.commuting_product(z, gram), z)
    assert q is not None, "compound() of no step"
    return q


Run = tuple[int, int, int]
"""A run of :class:`Places`."""


def _make_iterations(
    recipe: Recipe, form: Form | None, device: torch.device, runs: tuple[Run, ...]
) -> tuple[_Iteration[Any], ...]:
    """Return an iteration for each run of equal matrices, or one for all of them if kernels do them together."""

    def iteration(form: Form, runs: tuple[Run, ...]) -> _Iteration[Any]:
        spans = recipe.spans if form.gram else ()
        dtype = torch.float16 if spans and recipe.dtype.itemsize == 2 else recipe.dtype
        products = choose_products(form, device, dtype, *runs[0][1:])
        return _Iteration(products, recipe.triples, spans, recipe.eps, recipe.scale, places=Places(runs))

    forms = [form or prefer_kernels(device, recipe.dtype, rows, columns, count) for count, rows, columns in runs]
    if runs and forms[0].kernels:
        return (iteration(forms[0], runs),)  # for all shapes; torch's products are chosen by shape
    return tuple(iteration(run_form, (run,)) for run_form, run in zip(forms, runs, strict=True))


# Making them each time would take a tenth of the time of a small matrix.
_cached_iterations = lru_cache(maxsize=1024)(_make_iterations)


def _get_iterations(*arguments: Any) -> tuple[_Iteration[Any], ...]:
    # A compiler traces no cache.
    return (_make_iterations if torch.compiler.is_compiling() else _cached_iterations)(*arguments)
