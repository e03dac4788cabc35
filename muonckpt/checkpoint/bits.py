"""Torch tensors as the bits of their elements, and the fingerprint of the bits where the tensor is.

The fingerprint is that of `algebra.fingerprint`, bit for bit, in two complete implementations that go through a tensor
in blocks.  ``share_by_torch`` uses torch's ``int64``, which wraps modulo 2**64 as numpy's ``uint64`` does;
``share_by_numpy`` is faster in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..algebra.box import Index
from ..algebra.fingerprint import DIM_STRIDE, GOLDEN, MIX, combine, fingerprint

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def integer_view(tensor: Tensor) -> Tensor:
    """View a tensor as integers of its element size, signed but for single bytes, with its strides.

    Elements of 16 bytes are two words of 8, on one more, last dim.
    """
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER[tensor.itemsize])


def bits_of(tensor: Tensor) -> NDArray[Any]:
    """View a CPU tensor as unsigned words of its element size."""
    words: NDArray[Any] = integer_view(tensor).numpy()
    return words.view(np.dtype(f"u{words.itemsize}"))


_DEVICE_BLOCK = 1 << 21
"""Words of a block on a device: its products, of 8 bytes, take 16 MiB and stay in the cache of a large GPU."""

_HOST_BLOCK = 1 << 18
"""Words of a block in host memory: at most 2 MiB, and as much for the weights of its rows."""

_CACHED = 1 << 16
"""Weights of at most so many indices are kept for the next tensor: at most 16 times 512 KiB on a device."""


def share_of(tensor: Tensor, origin: Index) -> Tensor:
    """Return the share of a box in its tensor's fingerprint, as an ``int64`` with the same bits, on its device.

    Shares of disjoint boxes add up modulo 2**64.  Nothing waits for a GPU.

    Args:
        tensor: the elements, of any dtype, shape and strides.
        origin: global index of the first one.
    """
    return share_by_numpy(tensor, origin) if tensor.is_cpu else share_by_torch(tensor, origin)


def share_by_numpy(tensor: Tensor, origin: Index) -> Tensor:
    """Compute `share_of` for a tensor in host memory."""
    bits = bits_of(_plain(tensor))
    origin = origin + (0,) * (bits.ndim - len(origin))
    shares = (
        fingerprint(bits[block], tuple(lo + int(along.start) for lo, along in zip(origin, block, strict=False)))
        for block in _blocks(bits.shape, _HOST_BLOCK)
    )
    return torch.tensor(_signed(combine(*shares)))


def share_by_torch(tensor: Tensor, origin: Index) -> Tensor:
    """Compute `share_of` for a tensor on any device."""
    words = integer_view(_plain(tensor))
    words = words.reshape(1) if words.ndim == 0 else words
    if words.itemsize == 8:
        words = words.unsqueeze(-1).view(torch.int32)
    origin = origin + (0,) * (words.ndim - len(origin))
    # With one dim it promotes 16 and 32 bits to 64 in the same pass, as a scalar would not; filling waits for no GPU.
    mask = torch.full((1,), (1 << 8 * words.itemsize) - 1, dtype=torch.int64, device=tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for block in _blocks(words.shape, _DEVICE_BLOCK):
        terms = words[block] & mask
        for dim in reversed(range(words.ndim)):
            begin, along, size = origin[dim], block[dim], words.shape[dim]
            if size <= _CACHED:
                weights = _cached_weights(dim, begin, begin + size, tensor.device)[along]
            else:
                weights = _weights(dim, begin + along.start, begin + along.stop, tensor.device)
            terms = terms.mul_(weights).sum(-1)
        total += terms
    return total


def unsigned(share: int) -> int:
    """Return the unsigned number that has the bits of an ``int64``."""
    return combine(share)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg()


def _blocks(shape: Index, max_elements: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices of blocks of at most ``max_elements`` elements: ranges of one dim, and all of the dims after it."""
    if 0 in shape:
        return
    if not shape:
        yield ()
        return
    # The first dim whose indices fit: blocks are as large as the bound allows, and mostly few.
    dim = next(dim for dim in range(len(shape)) if prod(shape[dim + 1 :]) <= max_elements)
    step = max_elements // prod(shape[dim + 1 :])
    inner_slices = tuple(slice(0, size) for size in shape[dim + 1 :])
    for before in product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], step):
            stop = min(start + step, shape[dim])
            yield (*(slice(index, index + 1) for index in before), slice(start, stop), *inner_slices)


def _weights(dim: int, start: int, stop: int, device: torch.device) -> Tensor:
    x = torch.arange(start + dim * DIM_STRIDE + 1, stop + dim * DIM_STRIDE + 1, device=device)
    x = x.mul_(_signed(int(GOLDEN)))
    x = (x ^ _shifted(x, 30)).mul_(_signed(int(MIX[0])))
    x = (x ^ _shifted(x, 27)).mul_(_signed(int(MIX[1])))
    return (x ^ _shifted(x, 31)).bitwise_or_(1)


_cached_weights = lru_cache(maxsize=16)(_weights)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift to the right, with zeros from the left: torch shifts the sign in."""
    return (x >> by).bitwise_and_((1 << 64 - by) - 1)


def _signed(value: int) -> int:
    return int(np.uint64(value).astype(np.int64))
