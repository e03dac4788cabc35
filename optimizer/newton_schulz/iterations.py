"""Newton-Schulz: the orthogonal factor of a matrix by matrix products only.

The polar factor ``U Vᵀ`` of ``M = U S Vᵀ`` is reached by odd polynomials of the singular values, applied as
``X ← a·X + b·(XXᵀ)X + c·(XXᵀ)²X``.  ``M`` is divided by its Frobenius norm first, so they all start in
``[0, 1]``.  Why it is done as it is, and how large the errors are: ``docs/design/newton_schulz.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, Generic

import torch
from torch import Tensor

from ...coefficients import Coefficients, Triple, coefficient_set
from .forms import Form, arithmetic, prefer_kernels
from .gram import compound
from .places import Places
from .products import REDUCTIONS, M, Products, bounded, by_torch, frobenius, reduction, widened
from .recipe import EPS, Recipe

Total = Callable[[Iterator[Tensor]], Tensor]


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
    """The approximate polar factor ``U Vᵀ`` of ``matrix = U S Vᵀ``, or of each matrix of a stack.

    The result depends on the values of a matrix only, not on its strides, its alignment or what shares its
    memory: the work is done on a fresh contiguous copy in the wide orientation, so a tall matrix gives
    exactly the transpose of what its transpose gives.  ``matrix`` is left alone, and no gradient flows.
    ``torch.compile`` takes it with ``fullgraph`` from torch 2.13 on.

    Args:
        matrix: ``[m, n]``, or a stack ``[B, m, n]``, of any real floating dtype; a dim may be 0.
        coefficients: a name in :data:`COEFFICIENTS`, a set, a triple for every step, or the triples of a set of one's
            own, one for each step.
        steps: how many, at least 1; see :meth:`CoefficientSet.schedule` for more steps than the set has.
        dtype: bf16, fp16, fp32 or fp64: every operand of a product is rounded to it, and so is the result.
            16-bit products are summed in fp32; fp32 ones on CUDA follow torch's TF32 setting.  Small matrices on a
            CPU are computed in fp32 throughout (:func:`.products.by_torch`).  On ill-conditioned matrices more than
            six steps in bf16 add more rounding than they remove error.
        eps: a lower bound on the Frobenius norm, in the units of ``matrix``.  A bound, as in
            ``torch.optim.Muon``, and not a summand: above it the result does not depend on the scale of
            ``matrix`` (to the bit for powers of two), so a momentum kept as a sum and one kept as a mean are
            orthogonalised alike.
        gram: None for the plain form; else the steps after which the Gram form (:mod:`.gram`) rebuilds its Gram
            matrix, e.g. ``(2,)``, or ``()`` for never.  It is used where ``form`` says so.  With bf16 its operands
            are rounded to fp16, an eighth of the error at the same cost, and the result to bf16.
        form: how; None: :func:`.forms.prefer_kernels`.  A matrix of a stack gets the bits that it has alone in the
            same form.

    Returns:
        The shape of ``matrix``, of ``dtype``, of any strides.  Zeros for zeros.  All NaN if an element is not finite,
        in fp32 or the wider of the two dtypes: a diverged momentum is not hidden.

    Raises:
        ValueError: neither a matrix nor a stack of floats, an unknown name, what :class:`Recipe` refuses, or a form
            that this device does not have.
    """
    if matrix.ndim not in (2, 3) or not matrix.is_floating_point():
        raise ValueError(f"expected a matrix of floats or a stack, got shape {tuple(matrix.shape)} of {matrix.dtype}")
    recipe = Recipe(coefficient_set(coefficients), steps, dtype, eps, None if gram is None else tuple(gram))
    if matrix.ndim == 2:
        [iteration] = _made()(recipe, form, matrix.device, ((1, *matrix.shape),))
        return iteration.kind.one(matrix.detach(), dtype, iteration)
    count, rows, columns = matrix.shape
    places = Places(((count, rows, columns),) if count else ())
    return orthogonalize_all(matrix.reshape(-1), places, recipe, form).view(matrix.shape)


def orthogonalize_all(memory: Tensor, places: Places, recipe: Recipe, form: Form | None) -> Tensor:
    """:func:`orthogonalize` for matrices of any shapes, end to end in one memory: ``[places.numel]`` in and out.

    With kernels of ours, all are done by as many launches as one.  Each matrix gets the bits that it has alone, if
    ``form`` is the same.

    Args:
        memory: contiguous, of a real floating dtype.
        places: where the matrices lie; for kernels all are tall, or none.
    """
    iterations = _made()(recipe, form, memory.device, places.runs)
    if len(iterations) == 1:
        return iterations[0].kind.over(memory.detach(), places, recipe.dtype, iterations[0])
    parts = torch.split(memory.detach(), [iteration.places.numel for iteration in iterations])
    results = [
        iteration.kind.over(part, iteration.places, recipe.dtype, iteration)
        for iteration, part in zip(iterations, parts, strict=True)
    ]
    return torch.cat([memory.new_empty(0, dtype=recipe.dtype), *results])


@dataclass(frozen=True, slots=True)
class _Iteration(Generic[M]):
    """What is done to a wide matrix, or to several at once: ``triples`` applied to it over its norm times ``scale``.

    Attributes:
        spans: runs of steps that share a Gram matrix; none for the plain form.
        places: where the matrices lie.
    """

    kind: Products[M]
    triples: tuple[Triple, ...]
    spans: tuple[tuple[int, int], ...]
    eps: float
    scale: float
    places: Places

    def __call__(self, x: M) -> M:
        kind = self.kind
        x = kind.normal(x, self.eps, self.scale)
        if self.spans:
            for start, stop in self.spans:
                x = kind.added(x, 0.0, compound(kind.gram(x), self.triples[start:stop], kind))
        else:
            for a, b, c in self.triples:
                x = kind.added(x, a, kind.square(kind.gram(x), b, c))
        return x


Run = tuple[int, int, int]
"""How many matrices of one shape lie end to end, and the shape: a run of :class:`Places`."""


def _iterations(
    recipe: Recipe, form: Form | None, device: torch.device, runs: tuple[Run, ...]
) -> tuple[_Iteration[Any], ...]:
    """What is done to each run, or to all of them at once."""
    triples, dtype = recipe.triples, recipe.dtype

    def of(form: Form, runs: tuple[Run, ...]) -> _Iteration[Any]:
        spans = recipe.spans if form.gram else ()
        inner = torch.float16 if spans and dtype.itemsize == 2 else dtype
        kind = arithmetic(form, device, inner, *runs[0][1:])
        return _Iteration(kind, triples, spans, recipe.eps, recipe.scale, Places(runs))

    forms = [form or prefer_kernels(device, dtype, rows, columns, count) for count, rows, columns in runs]
    if runs and forms[0].kernels:
        return (of(forms[0], runs),)  # for all shapes; torch's products are chosen by shape
    return tuple(of(form, (run,)) for form, run in zip(forms, runs, strict=True))


# Made anew, they would take a tenth of the time of a small matrix.
_cached = lru_cache(maxsize=1024)(_iterations)


def _made() -> Callable[..., tuple[_Iteration[Any], ...]]:
    return _iterations if torch.compiler.is_compiling() else _cached


@torch.no_grad()
def orthogonalize_parts(parts: Sequence[Tensor], recipe: Recipe, total: Total) -> list[Tensor]:
    """This rank's parts of the polar factor of a matrix that several ranks share.

    The matrix is cut into blocks of columns (of rows if it is tall, each given transposed), and each rank has some of
    them.  Everything is computed block by block, and only Gram matrices are added up, so the result does not depend on
    which rank has which blocks, if ``total`` does not.  How the matrix is cut does change the last bits.  The plain
    form only, by torch.  The other promises are those of :func:`orthogonalize`, which does the same to one block, up to
    the last bits where it uses kernels or the 16-bit units of a CPU.

    Args:
        parts: blocks ``[s, l_i]`` in order, at least one, where ``s`` is the short side of the whole matrix; ``l_i``
            may differ, be less than ``s``, or 0.
        total: is given what this rank's blocks add to a sum, one tensor per part, in order, of fp32 (fp64 for fp64):
            the shapes are :func:`sums_of_parts`.  Each is computed when it is asked for.  It returns the sum
            over the blocks of all ranks, the same bits on every rank: :func:`tree_sum` of what :func:`tree_sum` gave
            on each rank, or that alone if this rank has all.

    Returns:
        For each part, ``[s, l_i]``, contiguous, of ``dtype``.

    Raises:
        ValueError: no part, or parts that are not matrices of floats or differ in rows.
    """
    if not all(part.is_floating_point() for part in parts):
        raise ValueError(f"expected floats, got {[part.dtype for part in parts]}")
    if len({part.shape[0] for part in parts}) != 1 or any(part.ndim != 2 for part in parts):
        raise ValueError(f"expected parts of one number of rows, got {[tuple(part.shape) for part in parts]}")
    dtype = recipe.dtype
    kind = by_torch(parts[0].device, dtype, 0, 0)
    exact = [widened(part, dtype) for part in parts]
    # The root of a rounded square is what was squared (radix 2): one block has the norm that it has alone.
    norms = (torch.stack([frobenius(x), frobenius(x / REDUCTIONS[x.dtype][1])]) for x in exact)
    norm, reduced = total(pair.square().view(1, 2) for pair in norms).sqrt()[0]
    divisor = reduction(norm)
    norm = bounded(torch.where(divisor > 1, reduced, norm), recipe.eps / divisor, recipe.scale)
    xs = [(x / divisor / norm).to(kind.dtype) for x in exact]
    for a, b, c in recipe.triples:
        gram = total(_unrounded_gram(x) for x in xs).to(kind.dtype)
        p = kind.square(gram, b, c)
        xs = [kind.added(x, a, p) for x in xs]
    return [x.to(dtype) for x in xs]


def sums_of_parts(short: int, steps: int) -> list[tuple[int, int]]:
    """The shapes of all sums of :func:`orthogonalize_parts`, in order, for a matrix of this short side: of squares, as
    they are and reduced, and of Gram matrices."""
    return [(1, 2), *[(short, short)] * steps]


def tree_sum(partials: Iterable[Tensor]) -> Tensor:
    """The sum of tensors of one shape in a fixed order: neighbours first, then neighbouring pairs, and so on.

    So it can be split: cut the list into runs of one power of two (the last may be shorter), and the tree sum of the
    runs' tree sums has the bits of the tree sum of all.  Only about ``log2(n)`` tensors live at a time.

    Raises:
        ValueError: nothing to add.
    """
    sums: list[tuple[int, Tensor]] = []  # over 2^level partials each, levels falling
    for term in partials:
        level, right = 0, term
        while sums and sums[-1][0] == level:
            level, right = level + 1, sums.pop()[1] + right
        sums.append((level, right))
    if not sums:
        raise ValueError("tree_sum of no tensors")
    return reduce(lambda right, left: left + right, [term for _, term in reversed(sums)])


def _unrounded_gram(x: Tensor) -> Tensor:
    """``xxᵀ`` as it is summed up, in fp32 at least."""
    # Only an accelerator holds 16 bits here, and only there `mm` has an `out_dtype`.
    return torch.mm(x, x.mT, out_dtype=torch.float32) if x.dtype.itemsize == 2 else x @ x.mT
