"""What Newton-Schulz computes in, and what travels for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of the products, of what is sent to a matrix's owner, and of what comes back."""

    compute: torch.dtype
    there: torch.dtype
    back: torch.dtype


PRECISIONS: Mapping[str, Precision] = {
    "bfloat16": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    # A momentum may be too small or too large for float16, and nobody knows the norm of a whole matrix before it is
    # whole; an orthogonal matrix fits.
    "float16": Precision(torch.float16, torch.bfloat16, torch.float16),
    "float32": Precision(torch.float32, torch.float32, torch.float32),
}
