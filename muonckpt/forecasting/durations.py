"""How long a step's Muon part, a save and a reshard take at given rates, if nothing else gets in the way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .exchange_bytes import StepPlan


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates, None where unknown.

    Attributes:
        link: bytes a second that a rank sends, and receives at the same time.
        disk: bytes a second that a rank writes or reads.
        flops: floating-point operations a second of a rank in Newton-Schulz.
    """

    link: float | None = None
    disk: float | None = None
    flops: float | None = None


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of one step: of the exchange and of Newton-Schulz alone, and of both as their stages overlap; None where
    a rate is unknown."""

    exchange: float | None
    newton_schulz: float | None
    muon: float | None


def step_seconds(plan: StepPlan, rates: Rates) -> StepSeconds:
    """The seconds of the slowest rank of every stage.

    While a stage is orthogonalised, the next one gathers and the one before returns; latencies and the element-wise
    parts of a step are left out.
    """
    wires = np.maximum(plan.sent, plan.received).max(axis=2)
    exchange = wires / rates.link if rates.link else None
    compute = plan.work.max(axis=1) / rates.flops if rates.flops else None
    muon = None
    if exchange is not None and compute is not None:
        there, back = [*exchange[:, 0], 0.0], [0.0, *exchange[:, 1]]
        hidden = (max(seconds, there[i + 1] + back[i]) for i, seconds in enumerate(compute))
        muon = float(there[0] + sum(hidden) + back[-1])
    return StepSeconds(
        None if exchange is None else float(exchange.sum()), None if compute is None else float(compute.sum()), muon
    )
