"""Everything that is fixed between steps: the matrices of some parameters, their owners, and the two exchanges.

A schedule covers the parameters that one set of ranks holds.  It is derived from shapes and placements alone, so every
rank makes the same one; it is never saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..box import Index
from ..layout import TensorLayout, through
from ..layouts.owned import owned_layout
from ..layouts.tensors import layout_of
from ..plan import digest, make_plan
from .exchange import Route, route
from .matrices import flops, matrices_of, rows_columns
from .owners import Work, assign


@dataclass(frozen=True, slots=True)
class Unit:
    """One matrix: the number of its parameter in the schedule, its shape (in the parameter's rank), its owner."""

    param: int
    shape: Index
    owner: int

    @property
    def rows_columns(self) -> tuple[int, int]:
        return rows_columns(self.shape)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the ranks of ``group`` do for ``params`` (None: this process alone).

    ``gather`` takes updates from where they rest to the owners; ``scatter`` takes results back to every holder.
    ``owned`` are the numbers of the units that this rank orthogonalises.
    """

    group: dist.ProcessGroup | None
    params: tuple[Tensor, ...]
    units: tuple[Unit, ...]
    owned: tuple[int, ...]
    gather: Route
    scatter: Route
    digest: bytes


def make_schedule(
    params: Sequence[Tensor],
    pieces: Sequence[tuple[int, ...] | None],
    steps: Sequence[int],
    group: dist.ProcessGroup | None,
) -> Schedule:
    """Plan for parameters that the ranks of ``group`` hold.

    Args:
        params: DTensors on meshes of exactly these ranks, or plain tensors replicated on all of them.
        pieces: rows of what is fused in each parameter (`matrices.matrices_of`).
        steps: Newton-Schulz iterations of each parameter, for its cost.
    """
    ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else (0,)
    rank = dist.get_rank() if group is not None else 0
    found: list[tuple[int, TensorLayout]] = []
    work = []
    for number, param in enumerate(params):
        layout = layout_of(param, replicas=ranks)
        for matrix in matrices_of(layout.shape, pieces[number]):
            unit = through(matrix, layout)
            found.append((number, unit))
            work.append(Work(unit, flops(*rows_columns(unit.shape), steps[number])))
    owners = assign(work, ranks)
    gather, scatter = [], []
    for (_, layout), owner in zip(found, owners, strict=True):
        whole = owned_layout(layout.shape, owner)
        gather.append(make_plan(layout, whole))
        scatter.append(make_plan(whole, layout))
    of_param = [number for number, _ in found]
    of_unit = range(len(found))
    return Schedule(
        group=group,
        params=tuple(params),
        units=tuple(Unit(n, layout.shape, owner) for (n, layout), owner in zip(found, owners, strict=True)),
        owned=tuple(index for index, owner in enumerate(owners) if owner == rank),
        gather=route(gather, ranks, rank, source_tensor=of_param, target_tensor=of_unit),
        scatter=route(scatter, ranks, rank, source_tensor=of_unit, target_tensor=of_param),
        digest=digest([*gather, *scatter]),
    )


def device_of(schedule: Schedule) -> torch.device:
    """Where the schedule's tensors live."""
    return schedule.params[0].device
