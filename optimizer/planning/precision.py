"""What Newton-Schulz computes in, and what travels for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .encodings import Coding, Plain, ScaledHalf


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtype of the products, how updates are sent to a matrix's owner, and how results come back."""

    compute: torch.dtype
    there: Coding
    back: Coding


PRECISIONS: Mapping[str, Precision] = {
    "bfloat16": Precision(torch.bfloat16, Plain(torch.bfloat16), Plain(torch.bfloat16)),
    # A momentum may be too small or too large for float16; an orthogonal matrix fits.
    "float16": Precision(torch.float16, ScaledHalf(), Plain(torch.float16)),
    "float32": Precision(torch.float32, Plain(torch.float32), Plain(torch.float32)),
}
