"""One iteration: what forward and backward send besides Muon's exchange, what they compute, and what share is Muon's.

Collectives of parameters and gradients are counted as rings: of ``S`` ranks that share ``P`` bytes, each sends
``(S - 1) / S * P`` to gather them or to reduce them to shards, and twice that to reduce them on all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...converters.target.topology import Target
from ...record.record import StateRecord, no_chunks
from ...store.reading.dtypes import itemsize
from .hardware import Rates
from .models import ModelParameter, ModelTensors

MODEL_FLOPS = 6
"""Floating-point operations of forward and backward for each token and each parameter that it uses (Kaplan et al. 2020,
arXiv 2001.08361); attention over the sequence is not counted."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to keep parameters and gradients on ranks that share the batch.

    Attributes:
        about: a line for help texts.
        gathers: how often parameters are gathered in an iteration.
        exchange: whether Muon gathers matrices to their owners and returns them; otherwise gradients are reduced to
            the owners in the first place, and parameters are gathered from them.
    """

    about: str
    gathers: int
    exchange: bool


SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "fsdp": Scheme("shards, gathered for forward and for backward (FSDP2, ZeRO-3)", 2, True),
        "zero2": Scheme("whole parameters, sharded gradients and state (ZeRO-2)", 1, True),
        "owned": Scheme("whole matrices at owners, gathered as in FSDP (torchtitan's Owned, DMuon)", 2, False),
        "layerwise": Scheme("whole parameters, whole state at owners (Megatron's layer-wise, DMuon)", 1, False),
    }
)
"""Schemes by name."""


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained.

    Attributes:
        scheme: one of `SCHEMES`.
        keep: axes whose shards are used where they are: a parameter that a rule cuts along one of them is neither
            gathered nor reduced along it (TP, EP).
        tokens: in an iteration, of all ranks together; None if unknown.
        active: parameters that a token uses; None for those of the configuration.
    """

    scheme: str = "fsdp"
    keep: frozenset[str] = frozenset()
    tokens: float | None = None
    active: float | None = None


PLAIN_FSDP = Training()


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that a rank sends in an iteration besides Muon's exchange, and the number of collectives.

    ``resident`` are the bytes of the parameters that a rank holds all the time, where they are not sharded.
    """

    parameters: float
    gradients: float
    collectives: int
    resident: float | None

    def seconds(
        self, model_flops: float | None, muon: float | None, rates: Rates, ranks: int
    ) -> dict[str, float | None]:
        """Return the seconds of forward and backward, of their traffic and of an iteration, as `Topology.seconds`.

        Traffic hides behind forward and backward as far as there is room; Muon comes after both.
        """
        model = model_flops / ranks / rates.model if model_flops and rates.model else None
        traffic = (self.parameters + self.gradients) / rates.link if rates.link else None
        iteration = None
        if model is not None and traffic is not None and muon is not None:
            iteration = max(model, traffic) + muon
        return {"model": model, "traffic": traffic, "iteration": iteration}


def traffic_of(model: ModelTensors, target: Target, training: Training) -> Traffic:
    """Count the traffic of parameters and gradients; gradients have the dtype of parameters.

    A layer is gathered, and its gradients reduced, in one collective for each set of axes that its parameters share.
    """
    scheme = SCHEMES[training.scheme]
    parameters = gradients = resident = 0.0
    calls: set[tuple[str, str, tuple[str, ...]]] = set()
    for parameter in model.parameters:
        shards, copies = _axes_of(parameter, target, training.keep)
        share = parameter.numel * itemsize(parameter.dtype) / (target.ranks / (_ranks(target, shards + copies)))
        cut, copied = _ranks(target, shards), _ranks(target, copies)
        resident += share
        # Gradients are reduced to shards first, and the shards then over the copies.
        parameters += scheme.gathers * share * (cut - 1) / cut
        gradients += share * (cut - 1) / cut + 2 * share / cut * (copied - 1) / copied
        # A block's parameters with the same axes share one collective of each kind.
        block_match = _BLOCK.match(parameter.name)
        block = block_match[0] if block_match else ""
        if cut > 1:
            calls |= {(f"gather{number}", block, shards) for number in range(scheme.gathers)}
            calls.add(("reduce", block, shards))
        if copied > 1:
            calls.add(("sum", block, copies))
    return Traffic(parameters, gradients, len(calls), resident if scheme.gathers == 1 else None)


def _axes_of(
    parameter: ModelParameter, target: Target, keep: frozenset[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes along which a parameter is gathered, and those along which it has copies."""
    record = StateRecord(parameter.name, (), parameter.shape, parameter.dtype, no_chunks(len(parameter.shape)))
    local_axes = {axis for axis, _ in target.cuts(record, ())} & keep
    other_axes = tuple((axis, 0) for axis in target.mesh)
    cut_axes = {axis for axis, _ in target.cuts(record, other_axes)}
    gathered, copied = [], []
    for axis in target.mesh:
        if axis not in cut_axes:
            copied.append(axis)
        elif axis not in local_axes:
            gathered.append(axis)
    return tuple(gathered), tuple(copied)


def _ranks(target: Target, axes: tuple[str, ...]) -> int:
    return math.prod(target.mesh[axis] for axis in axes)


_BLOCK = re.compile(r".*?(?<![^.])[0-9]+(?![^.])")
"""A name up to its first number, which is its layer's."""
