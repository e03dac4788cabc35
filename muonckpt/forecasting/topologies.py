"""One topology: a model's tensors on one mesh, with what a step moves and computes, and what its ranks hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..box import Index
from ..converters.look.holders import balance_of
from ..converters.target.topology import AxisCut, ShardRule, Target
from ..layout import TensorLayout
from ..layouts.mesh import AxisPlacement, Replicate, Shard, mesh_layout
from ..layouts.owned import owned_layout
from ..record import StateRecord, no_chunks
from .buffer_padding import buffer_padding
from .durations import Rates, StepSeconds, step_seconds
from .exchange_bytes import Counts, MuonOptions, StepPlan, step_plan
from .model_tensors import ModelParameter, ModelTensors
from .rank_memory import RankBytes, bytes_on_ranks

DESCRIPTIONS = 2
"""Files of a checkpoint that describe the others: ``.metadata`` and ``muonckpt.json``."""


@dataclass(frozen=True, slots=True)
class Topology:
    """What becomes of a model on one mesh; sizes are in bytes.

    Attributes:
        mesh: the sizes of its axes.
        unused_rules: rules that name an axis that this mesh does not have.
        ranks, matrices, stages: numbers; ``stages`` of exchange, each with two collectives.
        sent: how evenly ranks send in a step: ``least``, ``mean``, ``most``, ``busiest_rank``, ``most_to_mean``.
        busiest_sent: what the busiest rank sends, alignment of wires included.
        newton_schulz: how evenly FLOPs of a step are shared, in the same way.
        memory: of the rank that holds the most: ``weights``, ``gradients``, ``state``; ``wires`` of the rank that
            sends the most; and all of these together as ``total``.
        held: how evenly ranks hold weights, gradients and state.
        checkpoint: ``bytes`` of weights and state, number of ``files``, and the most that a rank writes (``most``).
        padding: for each layout in flat buffers of momentum, as ``reshard --layout`` makes them: ``layout``,
            ``padding_percent``, and the most that a rank has of ``elements``, padding included, and of
            ``newton_schulz`` in terms of the mean; the latter None where matrices are cut.
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
        """JSON data: the attributes under their names."""
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
