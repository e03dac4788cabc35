"""What Newton-Schulz computes in, and what travels for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtype of the products, of updates on their way to an owner, and of results on their way back."""

    compute: torch.dtype
    there: torch.dtype
    back: torch.dtype


PRECISIONS: Mapping[str, Precision] = {
    "bfloat16": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    # A momentum may be too small or too large for float16; an orthogonal matrix fits.
    "float16": Precision(torch.float16, torch.float32, torch.float16),
    "float32": Precision(torch.float32, torch.float32, torch.float32),
}
