"""Many tensors by one operator (torch's ``_foreach_``): a portion at a time, in a dtype in which every bit is the same.

16-bit tensors are computed in float32 and rounded once.  torch's CPU kernels round a product with a number in the last
elements of a 16-bit tensor and not in the vectors before them (``add_`` with ``alpha``), so in 16 bits an element would
depend on where a shard ends.  In float32 and float64 they compute an element alike wherever it lies.  Two 16-bit
tensors may be added as they are: that rounds once.

A portion has few enough elements that each operation finds in the processor's cache what the one before it has left,
and that temporary tensors are of a portion and not of all parameters; and tensors enough that beginning an operation is
shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]
"""What torch's ``_foreach_`` operators take."""

REDUCTIONS = {torch.float32: (2.0**64, 2.0**80), torch.float64: (2.0**512, 2.0**640)}
"""By dtype, a limit that every finite norm is below, being the root of a finite sum, and what a matrix is divided by if
its norm is not.  Then the squares of 2^32 elements of any size add up, and those that count beside the largest are
normal numbers."""


def exact_dtype(tensor: Tensor) -> torch.dtype:
    """Return what a tensor is computed in: its own dtype, float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def in_dtype(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Return the tensors, all of one dtype, in another: the very list if it is theirs."""
    return tensors if not tensors or tensors[0].dtype == dtype else [tensor.to(dtype) for tensor in tensors]


@contextmanager
def rounded_once(*lists: Tensors) -> Iterator[list[Tensors]]:
    """Change tensors in place: lends the very tensors, or float32 copies that are rounded into them at the end.

    Args:
        lists: in each, tensors of one dtype.
    """
    exact = [in_dtype(tensors, exact_dtype(tensors[0])) if tensors else tensors for tensors in lists]
    yield exact
    for tensors, changed in zip(lists, exact, strict=True):
        if changed is not tensors:
            torch._foreach_copy_(list(tensors), list(changed))


ELEMENTS = 2**16
"""Of a portion, for each thread: five times as many float32 fit into the second cache of today's processors."""

LAUNCHED = 2**26
"""Of a portion on another device, where to launch an operation costs more than its cache would save."""


def in_portions(lists: Sequence[Tensors]) -> Iterator[list[Tensors]]:
    """Cut parallel lists of tensors of one device, of equal shapes at equal places, to portions of at most `ELEMENTS` a
    thread, or `LAUNCHED`.

    Yields:
        of each list the same tensors; or of one that is larger a flat part, or all of it where it is not contiguous in
        every list.
    """
    if not lists[0]:
        return
    most = ELEMENTS * torch.get_num_threads() if lists[0][0].device.type == "cpu" else LAUNCHED
    begin = size = 0
    for number, tensor in enumerate(lists[0]):
        numel = tensor.numel()
        if size + numel > most:
            if begin < number:
                yield [tensors[begin:number] for tensors in lists]
            begin, size = number, 0
            if numel > most:
                yield from _cut([tensors[number] for tensors in lists], most)
                begin = number + 1
                continue
        size += numel
    if begin < len(lists[0]):
        yield [tensors[begin:] for tensors in lists]


def _cut(parallel: Tensors, most: int) -> Iterator[list[Tensors]]:
    if all(tensor.is_contiguous() for tensor in parallel):
        for begin in range(0, parallel[0].numel(), most):
            yield [[tensor.view(-1)[begin : begin + most]] for tensor in parallel]
    else:
        yield [[tensor] for tensor in parallel]
