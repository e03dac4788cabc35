"""One topology: a model on one mesh, what a step moves and computes, what ranks hold, and how long it takes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..box import Index
from ..converters.look.holders import balance_of
from ..converters.target.topology import AxisCut, ShardRule, Target
from ..layout import TensorLayout
from ..layouts.flat import owned_layout
from ..layouts.mesh import AxisPlacement, Replicate, Shard, mesh_layout
from ..record import StateRecord, no_chunks
from ..store.reading.dtypes import itemsize
from .buffer_padding import Shares, buffer_padding
from .exchange_bytes import Counts, MuonOptions, StepPlan, step_plan
from .model_tensors import ModelParameter, ModelTensors

DESCRIPTIONS = 2
"""Files of a checkpoint that describe the others: ``.metadata`` and ``muonckpt.json``."""


@dataclass(frozen=True, slots=True)
class Topology:
    """What becomes of a model on one mesh; sizes are in bytes.

    Attributes:
        unused_rules: rules that name an axis that this mesh does not have.
        stages: the number of stages of exchange, each with two collectives.
        sent: how evenly ranks send in a step: ``least``, ``mean``, ``most``, ``busiest_rank``, ``most_to_mean``.
        busiest_sent: what the busiest rank sends, alignment of wires included.
        newton_schulz: how evenly FLOPs of a step are shared, in the same way.
        memory: ``weights``, ``gradients``, ``state`` of the rank that holds the most; ``wires`` of the rank that sends
            the most; and their ``total``.
        held: how evenly ranks hold weights, gradients and state.
        checkpoint: ``bytes`` of weights and state, number of ``files``, and the ``most`` that a rank writes.
        padding: `BufferPadding` of each layout in flat buffers of momentum.
        seconds: of ``exchange``, ``newton_schulz`` and ``muon`` in a step, of a ``save``, and of a ``reshard`` by one
            process; None where a rate is unknown.
    """

    mesh: Mapping[str, int]
    unused_rules: tuple[str, ...]
    ranks: int
    matrices: int
    stages: int
    sent: Mapping[str, Any]
    busiest_sent: int
    newton_schulz: Mapping[str, Any]
    memory: Mapping[str, int]
    held: Mapping[str, Any]
    checkpoint: Mapping[str, int]
    padding: tuple[Mapping[str, Any], ...]
    seconds: Mapping[str, float | None]

    @property
    def name(self) -> str:
        """The mesh as the command line has it."""
        return ",".join(f"{axis}={count}" for axis, count in self.mesh.items())

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def topology_of(
    model: ModelTensors, mesh: Mapping[str, int], rules: Sequence[ShardRule], options: MuonOptions, rates: Rates
) -> Topology:
    """Lay a model out on a mesh, as ``reshard`` does, and plan a step there.

    Args:
        rules: the first that matches a parameter's name counts; those with axes that the mesh lacks do not.

    Raises:
        TargetError: a rule cuts a dim that a parameter does not have, or names an axis twice.
    """
    usable = tuple(rule for rule in rules if mesh.keys() >= {axis for axis, _ in rule.cuts})
    target = Target(mesh, usable)
    layout_of = _Layouts(target)
    step = step_plan(model.matrices, [layout_of(p, p.shape) for p in model.matrices], target.ranks, options)
    held = bytes_on_ranks(model.parameters, layout_of, target.ranks)
    return Topology(
        mesh=dict(mesh),
        unused_rules=tuple(str(rule) for rule in rules if rule not in usable),
        ranks=target.ranks,
        matrices=step.matrices,
        stages=len(step.work),
        sent=_balance(step.sent.sum(axis=(0, 1))),
        busiest_sent=step.busiest_sent,
        newton_schulz=_balance(step.work.sum(axis=0)),
        memory=_memory(held, step),
        held=_balance(held.held.astype(np.int64)),
        checkpoint={
            "bytes": round(held.written.sum()),
            "files": int(np.count_nonzero(held.written)) + DESCRIPTIONS,
            "most": round(held.written.max()),
        },
        padding=tuple(padding.to_json() for padding in buffer_padding(model.matrices, target)),
        seconds=_seconds(step_seconds(step, rates), held, rates),
    )


class _Layouts:
    """The layouts of tensors on a target; those of equal tensors are one object."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._default: tuple[AxisCut, ...] = tuple((axis, 0) for axis in target.mesh)
        self._laid_out = cache(self._lay_out)

    def __call__(self, parameter: ModelParameter, shape: Index) -> TensorLayout:
        if not shape:
            return owned_layout((), 0)
        record = StateRecord(parameter.name, (parameter.name,), shape, parameter.dtype, no_chunks(len(shape)))
        return self._laid_out(shape, self.target.cuts(record, self._default))

    def _lay_out(self, shape: Index, cuts: tuple[AxisCut, ...]) -> TensorLayout:
        mesh, axes = self.target.grid(cuts)
        placements: list[AxisPlacement] = [Shard(dim) for _, dim in cuts]
        placements += [Replicate()] * (len(axes) - len(cuts))
        return mesh_layout(shape, mesh, tuple(placements))


def _balance(shares: Counts) -> dict[str, Any]:
    balance = balance_of(dict(enumerate(shares.tolist())))
    assert balance is not None, "a mesh has ranks"
    return balance.to_json()


def _memory(held: RankBytes, step: StepPlan) -> dict[str, int]:
    fullest = int(held.held.argmax())
    parts = {name: round(getattr(held, name)[fullest]) for name in ("weights", "gradients", "state")}
    parts["wires"] = step.wires
    return {**parts, "total": sum(parts.values())}


def _seconds(step: StepSeconds, held: RankBytes, rates: Rates) -> dict[str, float | None]:
    save = reshard = None
    if rates.disk:
        save, reshard = float(held.written.max()) / rates.disk, 2 * float(held.written.sum()) / rates.disk
    return {**dataclasses.asdict(step), "save": save, "reshard": reshard}


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one rank, None where unknown.

    Attributes:
        link: bytes a second that it sends, and receives at the same time.
        disk: bytes a second that it writes or reads.
        flops: floating-point operations a second in Newton-Schulz.
    """

    link: float | None = None
    disk: float | None = None
    flops: float | None = None


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of one step: exchange and Newton-Schulz alone, and both as stages overlap; None where unknown."""

    exchange: float | None
    newton_schulz: float | None
    muon: float | None


def step_seconds(plan: StepPlan, rates: Rates) -> StepSeconds:
    """Return the seconds of the slowest rank of every stage.

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


LayoutOf = Callable[[ModelParameter, Index], TensorLayout]


@dataclass(frozen=True, slots=True, eq=False)
class RankBytes:
    """Bytes by rank.  Replicas hold the same and share the writing of it evenly."""

    weights: Shares
    gradients: Shares
    state: Shares
    written: Shares

    @property
    def held(self) -> Shares:
        return self.weights + self.gradients + self.state


def bytes_on_ranks(parameters: Sequence[ModelParameter], layout_of: LayoutOf, ranks: int) -> RankBytes:
    """Return what ranks hold of parameters, gradients in the parameters' dtype and state, and what they save."""
    times: Counter[tuple[str, TensorLayout, int]] = Counter()
    for parameter in parameters:
        times["weights", layout_of(parameter, parameter.shape), itemsize(parameter.dtype)] += 1
        for tensor in parameter.state:
            times["state", layout_of(parameter, tensor.shape), itemsize(tensor.dtype)] += 1
    totals = {"weights": np.zeros(ranks), "state": np.zeros(ranks)}
    written = np.zeros(ranks)
    for (what, layout, size), count in times.items():
        held, share = np.zeros(ranks), np.zeros(ranks)
        rows, first = layout.by_box
        numel, replicas = (layout.stops - layout.starts).prod(axis=1), np.diff(first)
        holders, box = np.array(layout.buffers, np.int64)[layout.buffer[rows]], layout.box[rows]
        np.add.at(held, holders, numel[box])
        np.add.at(share, holders, numel[box] / replicas[box])
        totals[what] += held * size * count
        written += share * size * count
    return RankBytes(totals["weights"], totals["weights"], totals["state"], written)
