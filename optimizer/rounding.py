"""16-bit tensors are computed in float32 and rounded once.

torch's CPU kernels round a product with a number in the last elements of a 16-bit tensor and not in the vectors before
them (``add_`` with ``alpha``), so in 16 bits an element would depend on where a shard ends.  In float32 and float64
they compute an element alike wherever it lies.  Two 16-bit tensors may be added as they are: that rounds once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def exact_dtype(tensor: Tensor) -> torch.dtype:
    """What a tensor is computed in: its own dtype, float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


@contextmanager
def rounded_once(*lists: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Change tensors in place: lends the very tensors, or float32 copies that are rounded into them at the end.

    Args:
        lists: in each, tensors of one dtype.
    """
    exact = [list(_exactly(tensors)) for tensors in lists]
    yield exact
    for tensors, changed in zip(lists, exact, strict=True):
        if tensors and changed[0] is not tensors[0]:
            torch._foreach_copy_(list(tensors), changed)


def _exactly(tensors: Sequence[Tensor]) -> Iterable[Tensor]:
    """Tensors of one dtype in what they are computed in."""
    if not tensors or (exact := exact_dtype(tensors[0])) is tensors[0].dtype:
        return tensors
    return (tensor.to(exact) for tensor in tensors)
