"""How fp16 travels.

bf16 has the range of fp32 and travels as it is.  fp16 has not, so each strip (a box of a matrix on its way to the
owner) is scaled by its own power of two, whose exponent travels with it.  A sender knows only its strips, and strips
depend on how the parameter is sharded; the owner's matrix must not.  Three facts make it so, bit for bit:

1. A strip whose largest magnitude is in ``[2^e, 2^(e+1))`` is multiplied by ``2^(14 - e)``, exactly.  Nothing
   overflows, and an element of ``2^(e - 28)`` or more becomes a normal fp16 number: it is rounded to 11 significant
   bits, as it would be under any other exponent that keeps it normal.
2. With ``E`` the largest ``e`` of all strips of the matrix, every element of ``2^(E - 28)`` or more is therefore
   rounded alike under any sharding.  The owner has all strips of its matrix, so ``E`` needs no collective.
3. Below that, an element is subnormal in some shardings and not in others.  The owner sets to zero whatever arrived
   below ``2^(E - 27)``.  Rounding does not cross powers of two, so these elements are all among it; and of the others,
   which arrive alike, the same ones are.

The way back needs none of this: the owner rounds the result, whose elements are 2 at most, before it is cut in strips.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TOP = 14
"""The largest magnitude of a strip arrives in ``[2^14, 2^15]``; fp16 ends just below 2^16."""

_DEPTH = 27
"""Elements of less than ``2^-27`` of the power of two below the matrix's largest become zero."""

_SMALLEST = -99
"""The least exponent: with it, ``2^(e - 27)`` and ``2^(14 - e)`` are normal fp32 numbers."""


def pack_half(strip: Tensor) -> tuple[Tensor, Tensor]:
    """A strip as it travels: fp16 values of the same shape, and the exponent ``e``, int16, without dims.

    Args:
        strip: any floating dtype, at least one element; what is beyond fp32 becomes infinite.  It is left alone.

    Returns:
        ``values`` with ``strip = values * 2^(e - 14)`` up to rounding.  An element that is not finite stays so.
        Nothing is read back from the device.
    """
    exact = strip.to(torch.float32)
    # The exponent bits of the largest magnitude; zero and subnormal read as -127, infinity and NaN as 128.
    largest = torch.linalg.vector_norm(exact, torch.inf)
    exponent = ((largest.view(torch.int32) >> 23) - 127).clamp_(_SMALLEST, 127)
    return (exact * _power(_TOP - exponent)).to(torch.float16), exponent.to(torch.int16)


def unpack_half(values: Tensor, exponent: Tensor, highest: Tensor) -> Tensor:
    """A strip as its owner reads it: fp32, of the size that it had before :func:`pack_half`.

    Args:
        values: fp16, as they were packed.
        exponent: int16, theirs.
        highest: int16, the largest exponent of all strips of the same matrix (for a matrix that is shared by columns:
            of the same block of columns).
    """
    exact = values.float() * _power(exponent - _TOP)
    # Not `where(abs >= floor)`: NaN stays NaN.
    return exact.masked_fill_(exact.abs() < _power(highest - _DEPTH), 0.0)


def _power(exponent: Tensor) -> Tensor:
    """``2^exponent`` in fp32, exactly: by its bits, as ``exp2`` of a device need not be exact.  -126 to 127."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
