"""The arithmetic of Newton-Schulz: torch's products, and the choice between them and kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ...names.errors import warn_on_rank
from ..ground.devices import is_asynchronous
from ..ground.tensors import REDUCTIONS, Places, exact_dtype, is_aligned
from .recipe import gram_is_cheaper

M = TypeVar("M")


class Products(Protocol[M]):
    """The arithmetic of an orthogonalisation; ``M`` is a matrix of ``[s, l]``, or many that are done together."""

    def run_matrix(self, matrix: Tensor, dtype: torch.dtype, work: Callable[[M], M]) -> Tensor:
        """Return ``work`` done on a matrix, transposed if it is tall: ``[m, n]`` of ``dtype``, any strides."""

    def run_all(self, memory: Tensor, places: Places, dtype: torch.dtype, work: Callable[[M], M]) -> Tensor:
        """Return the same for every matrix of a memory; a memory of results."""

    def normalized(self, x: M, eps: float, scale: float) -> M:
        """``x`` over ``max(its Frobenius norm, eps) · scale``; all NaN if that is not finite."""

    def gram(self, x: M) -> M:
        """``x·xᵀ``, ``[s, s]``."""

    def polynomial(self, r: M, b: float, c: float, a: float = 0.0) -> M:
        """``a·I + b·r + c·r²`` for a symmetric ``r``."""

    def commuting_product(self, z: M, q: M) -> M:
        """``z·q`` for two symmetric matrices that commute."""

    def multiply_add(self, x: M, a: float, p: M) -> M:
        """``a·x + p·x``."""


@dataclass(frozen=True, slots=True)
class TorchProducts:
    """`Products` by torch's matrix products; ``M`` is a matrix, or a stack of equal ones ``[count, s, l]``.

    Args:
        dtype: operands and results are rounded to it.
        tensor_dtype: the dtype of the tensors, ``dtype`` or wider (`by_torch`).
        stack_elements: elements of the largest stack; 0: matrices are done one after the other.
    """

    dtype: torch.dtype
    tensor_dtype: torch.dtype
    stack_elements: int = 0

    def run_matrix(self, matrix: Tensor, dtype: torch.dtype, work: Callable[[Tensor], Tensor]) -> Tensor:
        is_tall = matrix.shape[-2] > matrix.shape[-1]
        return (work(matrix.mT).mT if is_tall else work(matrix)).to(dtype)

    def run_all(self, memory: Tensor, places: Places, dtype: torch.dtype, work: Callable[[Tensor], Tensor]) -> Tensor:
        results: list[Tensor] = []
        for run in places.split_runs(memory):
            count, rows, columns = run.shape
            max_count = min(count, self.stack_elements // max(1, rows * columns))
            for stack in run.unbind() if max_count < 2 else split_stacks(run, max_count, work):
                results.append(self.run_matrix(stack, dtype, work).reshape(-1))
        return results[0] if len(results) == 1 else torch.cat(results)

    def normalized(self, x: Tensor, eps: float, scale: float) -> Tensor:
        exact = prepare(x, self.dtype)
        norm = frobenius(exact)
        # Squares of large elements may overflow; then the matrix is divided twice, at first by a power of two.
        if may_overflow(norm):
            divisor = reduction(norm)
            exact = exact / divisor
            norm = bounded(frobenius(exact), eps / divisor, scale)
        else:
            norm = bounded(norm, eps, scale)
        # A copy of ours is divided in place: new memory costs as much as the division.
        return (exact / norm if exact is x else exact.div_(norm)).to(self.dtype).to(self.tensor_dtype)

    def gram(self, x: Tensor) -> Tensor:
        return self._round(x @ x.mT)

    def polynomial(self, r: Tensor, b: float, c: float, a: float = 0.0) -> Tensor:
        result = self._round(_add_product(r, b, r, r, c) if c else r * b)
        if not a:
            return result
        result.diagonal(dim1=-2, dim2=-1).add_(a)
        return self._round(result)

    def commuting_product(self, z: Tensor, q: Tensor) -> Tensor:
        return self._round(z @ q)

    def multiply_add(self, x: Tensor, a: float, p: Tensor) -> Tensor:
        return self._round(_add_product(x, a, p, x) if a else p @ x)

    def _round(self, x: Tensor) -> Tensor:
        return x if self.dtype is self.tensor_dtype else x.to(self.dtype).to(self.tensor_dtype)


def _add_product(addend: Tensor, beta: float, left: Tensor, right: Tensor, alpha: float = 1.0) -> Tensor:
    """Return ``beta·addend + alpha·left·right`` of matrices or stacks."""
    add = torch.addmm if left.ndim == 2 else torch.baddbmm
    return add(addend, left, right, beta=beta, alpha=alpha)


def split_stacks(run: Tensor, max_count: int, work: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Yield matrices of ``[count, m, n]`` in stacks of up to ``max_count``, or singly where stacks have other bits."""
    if torch.compiler.is_compiling():
        yield from run.unbind()
        return
    # A CPU's library may sum a stack in another order, which is tried once for each shape.
    for stack in torch.split(run, max_count):
        count, rows, columns = stack.shape
        if count > 1 and same_as_alone(work, count, rows, columns, run.dtype, torch.get_num_threads()):
            yield stack
        else:
            yield from stack.unbind()


@lru_cache(maxsize=1024)
def same_as_alone(
    work: Callable[[Tensor], Tensor], count: int, rows: int, columns: int, dtype: torch.dtype, threads: int
) -> bool:
    """Return whether ``count`` matrices in a stack get the bits that each has alone on this CPU, by trying once.

    A sum in another order may have the same bits by chance, so there are several matrices, the more the fewer sums each
    has, at changing places.
    """
    num_matrices = max(8, 256 // max(1, min(rows, columns)) ** 2)
    noise = torch.randn(num_matrices, rows, columns, generator=torch.Generator().manual_seed(0), device="cpu").to(dtype)
    wide_noise = noise.mT if rows > columns else noise
    single_results = torch.stack(list(map(work, wide_noise)))
    for first in range(0, num_matrices, count):
        numbers = torch.arange(first, first + count, device="cpu") % num_matrices
        stack = noise[numbers]
        if not torch.equal(work(stack.mT if rows > columns else stack), single_results[numbers]):
            return False
    return True


MAX_SUMMED_ELEMENTS = 1 << 16
"""Elements whose squares are summed up at once: a running sum in fp32 is off by less than 2^-8."""

CPU_INFO = Path("/proc/cpuinfo")
"""The file in which Linux lists the instructions of the CPU."""

MATRIX_UNITS = {
    torch.bfloat16: frozenset(("avx512_bf16", "amx_bf16")),
    torch.float16: frozenset(("avx512_fp16", "amx_fp16")),
}
"""Instructions for 16-bit products; with one of them a CPU multiplies 16 bits faster than fp32."""

CACHED_ELEMENTS = {2: 1 << 18, 4: 1 << 16, 8: 1 << 15}
"""Elements of the largest stack on a CPU, by the bytes of one: its matrices are to stay in the cache.  Us a matrix
alone, in such a stack, and in one four times as large: 58, 17 and 28 for 32 x 32 in fp32."""

MIN_UNIT_WORK = 1 << 18
"""Multiply-adds of a product from which `MATRIX_UNITS` are used, also in a stack: a dtype may not depend on company."""

MIN_ROUNDED_WORK = 1 << 21
"""Multiply-adds of a product from which fp32 is rounded where there are no `MATRIX_UNITS`: there rounding costs less
than the product.  64 x 64 takes 430 us in rounded fp32 and 220 in 16 bits, 128 x 128 930 and 890."""


def by_torch(device: torch.device, dtype: torch.dtype, side: int, length: int) -> TorchProducts:
    """Return the best of torch's products for a dtype and matrices of ``side x length``, shorter first.

    An fp32 product of rounded operands, rounded once, is that of a 16-bit matrix unit; a CPU without one does it 10 to
    100 times faster this way.  Where that rounding costs more than the product, only the result is rounded.
    """
    if device.type != "cpu":
        return TorchProducts(dtype, dtype)
    work = side * side * length
    if dtype.itemsize == 2 and (work < MIN_UNIT_WORK or (work < MIN_ROUNDED_WORK and not _has_units(dtype))):
        dtype = torch.float32
    tensor_dtype = dtype if dtype.itemsize > 2 or _has_units(dtype) else torch.float32
    return TorchProducts(dtype, tensor_dtype, CACHED_ELEMENTS[tensor_dtype.itemsize])


@lru_cache(maxsize=2)
def _has_units(dtype: torch.dtype) -> bool:
    # Asked of Linux: torch 2.9 and 2.10 do not say it.
    return not MATRIX_UNITS[dtype].isdisjoint(CPU_INFO.read_text().split())


def prepare(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix to be divided: contiguous, where a memory of its own might begin, in fp32 at least; itself if it
    is.  A CPU divides one of 16 bits by a number in fp32 and rounds once, so there it stays unchanged.
    """
    if not (matrix.dtype is dtype and matrix.is_cpu):
        matrix = matrix.to(torch.promote_types(torch.float32, dtype))
    matrix = matrix.contiguous()
    if torch.compiler.is_compiling() or is_aligned(matrix):  # a compiler makes kernels for any address
        return matrix
    return matrix.clone()


def frobenius(x: Tensor) -> Tensor:
    """Return the Frobenius norm of a contiguous matrix in fp32 at least, without dims; ``[count, 1, 1]`` of a stack."""
    # Row by row: torch's CPU kernel keeps plain running fp32 sums, and over 2**27 elements they are 4 % off.
    dtype, parts = exact_dtype(x), x
    if x.shape[-2] * x.shape[-1] > MAX_SUMMED_ELEMENTS:
        parts = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    if x.ndim == 2:
        norm: Tensor = torch.linalg.vector_norm(parts, dtype=dtype)
        return norm
    norms: Tensor = torch.linalg.vector_norm(parts.flatten(1), dim=1, dtype=dtype)
    return norms[:, None, None]


def bounded(norm: Tensor, eps: float | Tensor, scale: float) -> Tensor:
    """Return ``max(norm, eps) · scale`` for a scale below 1; NaN if the norm is not finite."""
    # An infinite norm would divide finite elements to zero: infinity less infinity is NaN.
    norm = norm.clamp(min=eps)
    return norm.sub_(norm, alpha=1 - scale)


def may_overflow(norm: Tensor) -> bool:
    """Return whether squares may have overflowed, so that a `reduction` is needed.  A GPU is not asked: that waits."""
    if is_asynchronous(norm.device) or torch.compiler.is_compiling():
        return True
    return not math.isfinite(norm.item()) if norm.ndim == 0 else not norm.isfinite().all()


def reduction(norm: Tensor) -> Tensor:
    """Return the power of two that divides a matrix, exactly, before its squares are added up: 1 unless its norm is
    infinite.
    """
    limit, largest = REDUCTIONS[norm.dtype]
    return (norm / limit).clamp(1.0, largest)


@dataclass(frozen=True, slots=True)
class Form:
    """A way to orthogonalise.  Forms differ in last bits, so all ranks must use the same one for a matrix.

    Attributes:
        kernels: by our kernels, else by torch's products.
        gram: several steps on one Gram matrix, where restarts are given (`recipe`); else the plain form.
    """

    kernels: bool
    gram: bool


Choice = Callable[[torch.device, torch.dtype, int, int, int], Form]
"""The form for ``copies`` matrices of ``m x n``, the same on all ranks: ``(device, dtype, m, n, copies)``."""


def prefer_kernels(device: torch.device, dtype: torch.dtype, rows: int, columns: int, copies: int) -> Form:
    """Choose kernels wherever they run.

    On an H100 they were the fastest for every shape from 256 x 256 on (`docs/performance.md`), and small matrices of
    all shapes share their launches.
    """
    return Form(has_kernels(device, dtype), gram_is_cheaper(rows, columns))


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels run there: 16 bits, on NVIDIA GPUs from compute capability 8.0 on."""
    suitable = device.type == "cuda" and torch.version.cuda is not None and dtype.itemsize == 2
    return suitable and torch.cuda.get_device_capability(device) >= (8, 0)


def choose_products(form: Form, device: torch.device, dtype: torch.dtype, rows: int, columns: int) -> Products[Any]:
    """Return the products to orthogonalise ``rows x columns`` with.

    Warns:
        RuntimeWarning: once, if there should be kernels and Triton is missing: torch does the work, up to twice slower.

    Raises:
        ValueError: kernels, where they do not run.
    """
    kernels = _kernels(device, dtype) if form.kernels else None
    return kernels or by_torch(device, dtype, *sorted((rows, columns)))


@lru_cache(maxsize=16)
def _kernels(device: torch.device, dtype: torch.dtype) -> Products[Any] | None:
    """Return the kernels, or None if Triton is missing."""
    try:
        from ..triton.kernel_products import KernelProducts
        from ..triton.launches import INTERPRETED
    except ModuleNotFoundError as error:
        missing_triton(
            error,
            "Newton-Schulz runs on torch's matrix products, up to twice slower, and its last bits are not those of "
            "ranks that have it",
        )
        return None
    if not (INTERPRETED and device.type == "cpu") and not has_kernels(device, dtype):
        raise ValueError(f"there are no kernels for {dtype} on {device}: choose forms that were measured there")
    return KernelProducts(dtype)


def missing_triton(error: ModuleNotFoundError, consequence: str) -> None:
    """Warn of the consequence if it is Triton that could not be imported; raise the error again if it is not."""
    if error.name is None or error.name.split(".")[0] != "triton":
        raise error
    warn_on_rank(
        f"Triton is not installed: {consequence}. Install triton, in the version that torch names",
        RuntimeWarning,
    )
