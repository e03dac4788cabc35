"""Where each tensor goes: cut by rows or by the rules, or in flat buffers that ranks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from ...errors import TargetError, did_you_mean
from ...layout import TensorLayout
from ...layouts.flat import owned_layout
from ...layouts.mesh import AxisPlacement, Mesh, Replicate, Shard, mesh_layout
from ...record import StateRecord
from .topology import ROWS, AxisCut, LaidOut, Target


def lay_out(
    target: Target, tensors: Sequence[StateRecord], provenance: Mapping[str, Any] = MappingProxyType({})
) -> LaidOut:
    """Lay these tensors out on the target.

    Args:
        provenance: of their source.  If it records buffers of the target's layout, in which the same ranks share the
            same tensors, these buffers are used as they are, so that owners do not change.

    Raises:
        TargetError: a rule matches no tensor, or cuts a dim that a matching tensor does not have.
        SourceError: the provenance is damaged.
    """
    for rule in target.rules:
        if not any(fnmatchcase(tensor.key, rule.glob) for tensor in tensors):
            close = did_you_mean(rule.glob, [tensor.key for tensor in tensors])
            raise TargetError(f"rule {rule} matches none of {len(tensors)} tensors{close}")
    if target.layout == ROWS:
        return _in_rows(target, tensors)
    from .buffer_layouts import lay_out_in_buffers  # not needed for rows

    return lay_out_in_buffers(target, tensors, provenance)


def _in_rows(target: Target, tensors: Sequence[StateRecord]) -> LaidOut:
    layouts: dict[str, TensorLayout] = {}
    recorded: dict[str, Mapping[str, Any] | None] = {}
    grids: dict[tuple[AxisCut, ...], tuple[Mesh, tuple[AxisPlacement, ...], Mapping[str, Any]]] = {}
    all_axes = tuple((axis, 0) for axis in target.mesh)
    for tensor in tensors:
        if not tensor.shape:
            layouts[tensor.key], recorded[tensor.key] = owned_layout((), 0), None
            continue
        cuts = target.cuts(tensor, all_axes)
        if cuts not in grids:
            grids[cuts] = _grid(target, cuts)
        mesh, placements, recorded[tensor.key] = grids[cuts]
        layouts[tensor.key] = mesh_layout(tensor.shape, mesh, placements)
    return LaidOut(layouts, recorded)


def _grid(target: Target, cuts: Sequence[AxisCut]) -> tuple[Mesh, tuple[AxisPlacement, ...], Mapping[str, Any]]:
    """Return the mesh and the placements of tensors with these cuts, and both as JSON data."""
    mesh, axes = target.grid(cuts)
    placements: list[AxisPlacement] = [Shard(dim) for _, dim in cuts]
    placements += [Replicate()] * (len(axes) - len(cuts))
    recorded = {
        "algorithm": "mesh",
        "version": 1,
        "mesh": list(mesh.shape),
        "axes": list(axes),
        "ranks": list(mesh.ranks),
        "placements": list(map(str, placements)),
    }
    return mesh, tuple(placements), recorded
