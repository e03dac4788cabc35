"""16-bit tensors are computed in float32 and rounded once.

torch's CPU kernels round a product with a number in the last elements of a 16-bit tensor and not in the vectors before
them (``add_`` with ``alpha``), so in 16 bits an element would depend on where a shard ends.  In float32 and float64
they compute an element alike wherever it lies.  Two 16-bit tensors may be added as they are: that rounds once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]
"""What torch's ``_foreach_`` operators take."""


def exact_dtype(tensor: Tensor) -> torch.dtype:
    """What a tensor is computed in: its own dtype, float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def in_dtype(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """The tensors, all of one dtype, in another: the very list if it is theirs."""
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
