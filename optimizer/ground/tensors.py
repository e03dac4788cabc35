"""Operations on many tensors: by torch's ``_foreach_`` operators a portion at a time, or end to end in one memory.

16-bit tensors are computed in float32 and rounded once.  torch's CPU kernels round a product with a number in the last
elements of a 16-bit tensor and not in the vectors before them (``add_`` with ``alpha``), so in 16 bits an element would
depend on where a shard ends.  Two 16-bit tensors may be added as they are.

A portion is small enough for the processor's cache, and has tensors enough to share the cost of a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, pairwise, repeat
from typing import Any

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]
"""The lists that torch's ``_foreach_`` operators take."""

REDUCTIONS = {torch.float32: (2.0**64, 2.0**80), torch.float64: (2.0**512, 2.0**640)}
"""By dtype, a limit above every finite norm, the root of a finite sum, and the divisor of a matrix whose norm is
infinite: its squares, of up to 2^32 elements, add up, and those that count beside the largest are normal numbers."""

ELEMENTS = 2**16
"""The largest portion for each thread: five times as many float32 fit into the second cache of today's processors."""

DEVICE_PORTION_ELEMENTS = 2**26
"""The largest portion on another device, where launching an operation costs more than its cache would save."""

ALIGNMENT = 256
"""Bytes: a tensor at a multiple of them in a memory gets the bits that it has in a memory of its own.  Libraries
choose instructions by the address of an operand: MKL by 16 to 64 bytes, a GPU's reductions by 16, cuBLAS by up to 256.
"""


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor begins where a memory of its own might."""
    return tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0


def spacing(numel: int, dtype: torch.dtype) -> int:
    """Return how many elements apart matrices of ``numel`` begin in one memory, if each of them is aligned."""
    step = ALIGNMENT // dtype.itemsize
    return -(-numel // step) * step


def aligned_stack(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return fresh memory for matrices ``[count, rows, columns]``, each aligned."""
    count, rows, columns = shape
    pitch = spacing(rows * columns, dtype)
    return torch.empty(count * pitch, dtype=dtype, device=device).as_strided(shape, (pitch, columns, 1))


def stack_memory(stack: Tensor) -> Tensor:
    """Return all of the memory of an `aligned_stack`."""
    return stack.as_strided((len(stack) * stack.stride(0),), (1,))


def align_matrices(matrices: Tensor) -> Tensor:
    """Return a matrix, or each of ``[count, rows, columns]``, where a memory of its own might begin; copied only if it
    is elsewhere.
    """
    stack = matrices if matrices.ndim == 3 else matrices.unsqueeze(0)
    pitch, *strides = stack.stride()
    equally_aligned = len(stack) < 2 or pitch * stack.element_size() % ALIGNMENT == 0
    if equally_aligned and strides == [stack.shape[2], 1] and is_aligned(stack):
        return matrices
    count, rows, columns = stack.shape
    copies = aligned_stack((count, rows, columns), stack.dtype, stack.device).copy_(stack)
    return copies if matrices.ndim == 3 else copies[0]


def exact_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a tensor of floats is computed: its own, float32 at least."""
    return tensor.dtype if tensor.dtype.itemsize >= 4 else torch.float32


def cast_tensors(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Return the tensors, all of one dtype, in another: the very list if it is theirs."""
    return tensors if not tensors or tensors[0].dtype == dtype else [tensor.to(dtype) for tensor in tensors]


@contextmanager
def rounded_once(*lists: Tensors) -> Iterator[list[Tensors]]:
    """Lend lists of tensors, each of one dtype, to be changed; or float32 copies, which are rounded into them."""
    exact_lists = [cast_tensors(tensors, exact_dtype(tensors[0])) if tensors else tensors for tensors in lists]
    yield exact_lists
    for tensors, exact in zip(lists, exact_lists, strict=True):
        if exact is not tensors:
            torch._foreach_copy_(list(tensors), list(exact))


def portion_elements(device: torch.device) -> int:
    """Return the most elements of a portion on a device."""
    return ELEMENTS * torch.get_num_threads() if device.type == "cpu" else DEVICE_PORTION_ELEMENTS


def cut_portions(lists: Sequence[Tensors]) -> Iterator[list[Tensors]]:
    """Cut parallel lists of tensors of one device, of equal shapes at equal places, to portions of at most
    `portion_elements`.  Larger tensors are cut to flat parts, if all of them are contiguous.
    """
    if not lists[0]:
        return
    max_elements = portion_elements(lists[0][0].device)
    start = size = 0
    for number, tensor in enumerate(lists[0]):
        numel = tensor.numel()
        if size + numel > max_elements:
            # The portion before this tensor is full.
            if start < number:
                yield [tensors[start:number] for tensors in lists]
            start, size = number, 0
            parallel = [tensors[number] for tensors in lists]
            # One that is larger than a portion is cut by itself.
            if numel > max_elements and all(tensor.is_contiguous() for tensor in parallel):
                for offset in range(0, numel, max_elements):
                    yield [[tensor.view(-1)[offset : offset + max_elements]] for tensor in parallel]
                start = number + 1
                continue
        size += numel
    if start < len(lists[0]):
        yield [tensors[start:] for tensors in lists]


def number_like(value: float, like: Tensors) -> Tensor:
    """Return a number as a 0-d tensor like the tensors: torch would make another one for each tensor of a list."""
    return torch.tensor(value, dtype=like[0].dtype, device=like[0].device)


def interpolate(starts: Tensors, ends: Tensors, weight: float | Tensor) -> tuple[Tensor, ...]:
    """Return ``torch.lerp`` of tensors pair by pair; the ends themselves, copied, for a weight of 1.

    There torch's vector loop and the loop for a tensor's last elements give zeros other signs, so that bits would
    depend on where a shard begins.
    """
    if not isinstance(weight, Tensor) and weight == 1:
        return tuple(end.clone() for end in ends)
    # torch takes one number for all, or a list of tensors.
    return torch._foreach_lerp(starts, ends, [weight] * len(starts) if isinstance(weight, Tensor) else weight)


def interpolate_(starts: Tensors, ends: Tensors, weight: float | Tensor) -> None:
    """Put what `interpolate` returns in the place of the starts."""
    if not isinstance(weight, Tensor) and weight == 1:
        torch._foreach_copy_(starts, ends)
    else:
        torch._foreach_lerp_(starts, ends, [weight] * len(starts) if isinstance(weight, Tensor) else weight)


def decay(params: Tensors, updates: Tensors, group: Mapping[str, Any]) -> None:
    """Decoupled weight decay in place: ``p -= lr * weight_decay * p`` (Loshchilov & Hutter 2019, arXiv 1711.05101).

    In a ``cautious`` group, only where the update, which will be subtracted, does not move the element away from zero:
    ``update * p >= 0`` (Chen et al. 2025, arXiv 2510.12402, algorithm 1); other elements keep their bits.

    Args:
        updates: only their signs matter.
    """
    rate = float(group["lr"]) * group["weight_decay"]
    if group["cautious"]:
        torch._foreach_add_(params, mask_opposed(params, updates), alpha=-rate)
    elif rate and len(params) == 1:
        params[0].mul_(1 - rate)
    elif rate:
        torch._foreach_mul_(params, number_like(1 - rate, params))


def mask_opposed(params: Tensors, updates: Tensors) -> tuple[Tensor, ...]:
    """Return parameters where their update does not move them away from zero, and zeros elsewhere; exact."""
    # Signs, as a product of small numbers may vanish.
    signs = torch._foreach_sign(updates)
    opposed = torch._foreach_mul(signs, params)
    torch._foreach_clamp_max_(opposed, 0)
    torch._foreach_mul_(opposed, signs)
    return torch._foreach_sub(params, opposed)


def stack_boxes(boxes: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(boxes)) if len(boxes) > 1 else boxes[0].unsqueeze(0)


RowsColumns = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Places:
    """Places of matrices of any shapes that lie end to end in one memory, each row by row.

    Attributes:
        runs: ``(count, rows, columns)`` of neighbours of one shape.
    """

    runs: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        if any(min(run) < 0 or run[0] < 1 for run in self.runs):
            raise ValueError(f"expected runs of at least one matrix, got {self.runs}")
        if any(run[1:] == neighbour[1:] for run, neighbour in pairwise(self.runs)):
            raise ValueError(f"neighbouring runs are of one shape: {self.runs}")

    @classmethod
    def of(cls, shapes: Iterable[RowsColumns]) -> Places:
        return cls(tuple((len(list(run)), *shape) for shape, run in groupby(shapes)))

    def __iter__(self) -> Iterator[RowsColumns]:
        """Yield the shape of each matrix."""
        for count, rows, columns in self.runs:
            yield from repeat((rows, columns), count)

    def __len__(self) -> int:
        return sum(count for count, _, _ in self.runs)

    @property
    def numel(self) -> int:
        return sum(count * rows * columns for count, rows, columns in self.runs)

    @property
    def tall(self) -> bool:
        """Whether matrices are taller than wide; raises ValueError if some are and some are not."""
        kinds = {rows > columns for _, rows, columns in self.runs}
        if len(kinds) > 1:
            raise ValueError(f"tall matrices are not done together with others: {self.runs}")
        return any(kinds)

    def begins(self) -> list[int]:
        """Return where each matrix begins, in elements, and where the last ends."""
        return list(accumulate((rows * columns for rows, columns in self), initial=0))

    def split_matrices(self, memory: Tensor) -> list[Tensor]:
        """Return each matrix, a view of ``[numel]``."""
        if len(self) == 1:  # as a CPU does them: three operators less
            return [memory.view(self.runs[0][1:])]
        return [*chain.from_iterable(run.unbind() for run in self.split_runs(memory))]

    def split_runs(self, memory: Tensor) -> list[Tensor]:
        """Return each run, a view ``[count, rows, columns]`` of ``[numel]``."""
        if len(self.runs) == 1:
            return [memory.view(self.runs[0])]
        parts = torch.split(memory, [count * rows * columns for count, rows, columns in self.runs])
        return [part.view(run) for part, run in zip(parts, self.runs, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Matrices in one memory.

    Attributes:
        memory: ``[places.numel]``, contiguous.
        turned: each matrix is the transpose of the one in memory.
    """

    memory: Tensor
    places: Places
    turned: bool = False

    @property
    def mT(self) -> Stack:
        return Stack(self.memory, self.places, not self.turned)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield each matrix, a view."""
        for matrix in self.places.split_matrices(self.memory):
            yield matrix.mT if self.turned else matrix
