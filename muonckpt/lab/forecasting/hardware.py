"""Hardware by name: what one GPU computes and one link carries, from their makers' data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...names.errors import TargetError


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one rank, None where unknown.

    Attributes:
        link: bytes a second that it sends, and receives at the same time.
        disk: bytes a second that it writes or reads.
        flops: floating-point operations a second in Newton-Schulz.
        model: the same in forward and backward.
    """

    link: float | None = None
    disk: float | None = None
    flops: float | None = None
    model: float | None = None


UNKNOWN_RATES = Rates()

CHIPS: Mapping[str, float] = MappingProxyType(
    {
        "a100": 312e12,
        "h100": 989e12,
        "h200": 989e12,
        "gb200": 2.5e15,
        "gb300": 2.5e15,
        "mi300x": 1307e12,
    }
)
"""Peak FLOPs a second of one GPU in dense bfloat16, from its maker's data sheet: NVIDIA A100 (SXM), H100 (SXM), H200,
GB200 and GB300 NVL72 (360 PFLOPS with sparsity for 72 GPUs); AMD Instinct MI300X."""

LINKS: Mapping[str, float] = MappingProxyType(
    {
        "nvlink3": 300e9,
        "nvlink4": 450e9,
        "nvlink5": 900e9,
        "xgmi": 448e9,
        "infiniband": 50e9,
        "ethernet": 12.5e9,
    }
)
"""Bytes a second that one GPU sends: half of NVLink's 600 (A100), 900 (H100) and 1800 GB/s (Blackwell), which count
both directions; 7 links of 64 GB/s of a MI300X; a GPU's own InfiniBand NDR of 400 Gbit/s, or Ethernet of 100."""

TYPICAL_MFU = 0.4
"""The share of its peak that a GPU reaches in forward and backward, unless the user says it; dion's issue 96 measured
0.43 to 0.54 on 1 to 4 H100."""


def rates_of(chip: str, link: str, mfu: float = TYPICAL_MFU) -> Rates:
    """Return the rates of named hardware: peaks, so that durations are lower bounds, but ``mfu`` of it for the model.

    Raises:
        TargetError: an unknown name.
    """
    for noun, name, table in (("GPU", chip, CHIPS), ("link", link, LINKS)):
        if name not in table:
            raise TargetError(f"unknown {noun} {name!r}; expected one of {', '.join(table)}")
    return Rates(LINKS[link], None, CHIPS[chip], mfu * CHIPS[chip])
