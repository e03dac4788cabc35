"""Where a checkpoint should lie: a mesh, what its axes do to which tensors, and which layout the ranks have.

Nothing follows from the name of an axis or of a parameter.  A rule of the user says which axes cut which dims of
which tensors, in that order; the first rule whose pattern fits a tensor's key wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...box import row_major
from ...errors import TargetError
from ...layout import TensorLayout
from ...layouts.buffers.placements import PLACEMENTS
from ...layouts.mesh import Mesh
from ...record import StateRecord

if TYPE_CHECKING:
    from ...layouts.buffers.group_buffer import GroupBuffer

AxisCut = tuple[str, int]
"""An axis of the mesh and the dim of a tensor that it cuts."""

ROWS = "rows"
"""The layout without flat buffers: tensors are cut by rows, or as the rules say."""

FLAT = "flat"
"""The layout in flat buffers that are cut evenly, wherever that falls."""

LAYOUTS: Mapping[str, str] = MappingProxyType(
    {
        ROWS: "cut by --shard, else by rows over all ranks",
        FLAT: "tensors end to end, cut evenly anywhere",
        **{name: placement.description for name, placement in PLACEMENTS.items()},
    }
)
"""Every layout by its name, with a line for help texts; those after the first are in flat buffers."""


@dataclass(frozen=True, slots=True)
class ShardRule:
    """Tensors whose key fits the shell pattern ``glob`` are cut by these axes, the first of them into the coarsest
    parts.  The axes that it does not name hold replicas or, in a layout of buffers, share the buffer."""

    glob: str
    cuts: tuple[AxisCut, ...]

    def __str__(self) -> str:
        return f"{self.glob}={','.join(f'{axis}:{dim}' for axis, dim in self.cuts)}"


@dataclass(frozen=True, slots=True)
class Target:
    """The mesh (sizes by axis, the first outermost; ranks are numbered row-major), rules, and one of `LAYOUTS`.

    Tensors that no rule fits: in rows, every axis cuts dim 0, the first axis first; in buffers, no axis cuts them
    and all ranks share the buffer.  A tensor without dims has nothing to cut, whatever the rules say.

    Raises:
        TargetError: no such layout; a rule names an axis twice, or one that the mesh does not have.
    """

    mesh: Mapping[str, int]
    rules: tuple[ShardRule, ...] = ()
    layout: str = "rows"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise TargetError(f"no layout {self.layout!r}; there are {', '.join(LAYOUTS)}")
        if not self.mesh or min(self.mesh.values()) < 1:
            raise TargetError(f"a mesh needs axes with ranks: {dict(self.mesh)}")
        for rule in self.rules:
            axes = [axis for axis, _ in rule.cuts]
            if len(set(axes)) != len(axes) or not self.mesh.keys() >= set(axes):
                raise TargetError(f"rule {rule}: expected axes out of {', '.join(self.mesh)}, each at most once")
            if min((dim for _, dim in rule.cuts), default=0) < 0:
                raise TargetError(f"rule {rule}: dims are counted from 0")

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    def cuts(self, tensor: StateRecord, default: tuple[AxisCut, ...]) -> tuple[AxisCut, ...]:
        """The axes that cut a tensor.

        Raises:
            TargetError: the rule that fits it cuts a dim that it does not have.
        """
        rule = next((rule for rule in self.rules if fnmatchcase(tensor.key, rule.glob)), None)
        cuts = default if rule is None else rule.cuts
        if tensor.shape and any(dim >= len(tensor.shape) for _, dim in cuts):
            raise TargetError(
                f"rule {rule} cuts a dim that tensor {tensor.key!r} of shape {tensor.shape} does not have; "
                "put a rule of its own before it"
            )
        return cuts if tensor.shape else ()

    def grid(self, cuts: Sequence[AxisCut]) -> tuple[Mesh, tuple[str, ...]]:
        """The same ranks on a mesh whose first axes are those of the cuts, in their order; and its axes' names."""
        axes = [axis for axis, _ in cuts]
        axes += [axis for axis in self.mesh if axis not in axes]
        steps = dict(zip(self.mesh, row_major(tuple(self.mesh.values())), strict=True))
        places = product(*(range(0, self.mesh[axis] * steps[axis], steps[axis]) for axis in axes))
        return Mesh(tuple(self.mesh[axis] for axis in axes), tuple(map(sum, places))), tuple(axes)


@dataclass(frozen=True, slots=True)
class LaidOut:
    """By key: a layout whose buffers are ranks, and the same in words for the manifest; then the flat buffers used."""

    layouts: Mapping[str, TensorLayout]
    words: Mapping[str, Mapping[str, Any] | None]
    buffers: tuple[GroupBuffer, ...] = ()
