"""Where each tensor goes: cut by rows, or as the rules say; or in flat buffers that ranks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from ...errors import TargetError
from ...layout import TensorLayout
from ...layouts.mesh import AxisPlacement, Replicate, Shard, mesh_layout
from ...layouts.owned import owned_layout
from ...record import StateRecord
from .topology import ROWS, LaidOut, Target


def lay_out(
    target: Target, tensors: Sequence[StateRecord], provenance: Mapping[str, Any] = MappingProxyType({})
) -> LaidOut:
    """Where each of these tensors goes.

    Args:
        provenance: of their source.  Where it records buffers in which the same ranks share the same tensors, placed
            by the algorithm that is asked for, these are kept as they are, whatever the version of its rules: owners
            are never computed again.

    Raises:
        TargetError: a rule does not fit a tensor that it matches, or matches none.
        SourceError: the provenance is damaged.
    """
    for rule in target.rules:
        if not any(fnmatchcase(tensor.key, rule.glob) for tensor in tensors):
            raise TargetError(f"rule {rule} fits none of {len(tensors)} tensors")
    if target.layout == ROWS:
        return _in_rows(target, tensors)
    from .buffer_layouts import lay_out_in_buffers  # rows need none of it

    return lay_out_in_buffers(target, tensors, provenance)


def _in_rows(target: Target, tensors: Sequence[StateRecord]) -> LaidOut:
    layouts: dict[str, TensorLayout] = {}
    words: dict[str, Mapping[str, Any] | None] = {}
    every = tuple((axis, 0) for axis in target.mesh)
    for tensor in tensors:
        if not tensor.shape:
            layouts[tensor.key], words[tensor.key] = owned_layout((), 0), None
            continue
        cuts = target.cuts(tensor, every)
        mesh, axes = target.grid(cuts)
        placements: list[AxisPlacement] = [Shard(dim) for _, dim in cuts]
        placements += [Replicate()] * (len(axes) - len(cuts))
        layouts[tensor.key] = mesh_layout(tensor.shape, mesh, tuple(placements))
        words[tensor.key] = {
            "algorithm": "mesh",
            "version": 1,
            "mesh": list(mesh.shape),
            "axes": list(axes),
            "ranks": list(mesh.ranks),
            "placements": list(map(str, placements)),
        }
    return LaidOut(layouts, words)
