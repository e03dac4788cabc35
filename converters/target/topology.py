"""The target of a reshard: a mesh, rules by which its axes cut tensors, and the layout of the ranks.

The names of axes and parameters have no meaning of their own: the user's rules say which axes cut which dims of which
tensors, and in which order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import TYPE_CHECKING, Any

from ...algebra.box import row_major
from ...algebra.layout import TensorLayout
from ...layouts.mesh import Mesh, MeshPlacement, Replicate, Shard
from ...names.errors import TargetError, did_you_mean
from ...names.vocabulary import PLACEMENTS
from ...record.record import StateRecord

if TYPE_CHECKING:
    from ...layouts.buffers.records import GroupBuffer

AxisCut = tuple[str, int]
"""An axis of the mesh and the dim of a tensor that it cuts."""

ROWS = "rows"
"""The layout without flat buffers."""

FLAT = "flat"
"""The layout in flat buffers that are cut into equal parts, even inside a row."""

LAYOUTS = (ROWS, FLAT, *PLACEMENTS)
"""All layouts by name; all but the first are in flat buffers."""


@dataclass(frozen=True, slots=True)
class ShardRule:
    """A rule that cuts tensors whose key matches the shell pattern ``glob`` by these axes, in this order.

    Axes that it does not name hold replicas or, in a layout of buffers, share the buffer.
    """

    glob: str
    cuts: tuple[AxisCut, ...]

    def __str__(self) -> str:
        return f"{self.glob}={','.join(f'{axis}:{dim}' for axis, dim in self.cuts)}"


@dataclass(frozen=True, slots=True)
class Target:
    """A mesh (sizes by axis, outermost first; ranks are numbered in row-major order), rules, and one of `LAYOUTS`.

    The first rule that matches a tensor's key counts.  If none does: in rows, all axes cut dim 0, in the order of the
    mesh; in buffers, no axis cuts the tensor and all ranks share the buffer.  Tensors without dims are never cut.

    Raises:
        TargetError: the layout is unknown; or a rule names an axis twice, or one that the mesh does not have.
    """

    mesh: Mapping[str, int]
    rules: tuple[ShardRule, ...] = ()
    layout: str = ROWS

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            close = did_you_mean(self.layout, LAYOUTS)
            raise TargetError(f"unknown layout {self.layout!r}; expected one of {', '.join(LAYOUTS)}{close}")
        if not self.mesh or min(self.mesh.values()) < 1:
            raise TargetError(
                f"a mesh needs at least one axis, and every axis at least one rank; found {dict(self.mesh)}"
            )
        # Each rule by itself: whether it fits the tensors is seen when these are cut.
        for rule in self.rules:
            axes = [axis for axis, _ in rule.cuts]
            if len(set(axes)) != len(axes) or not self.mesh.keys() >= set(axes):
                unknown = [axis for axis in axes if axis not in self.mesh]
                close = did_you_mean(unknown[0], [*self.mesh]) if unknown else ""
                mesh = ", ".join(self.mesh)
                raise TargetError(f"rule {rule}: expected axes of the mesh ({mesh}), each at most once{close}")
            if min((dim for _, dim in rule.cuts), default=0) < 0:
                raise TargetError(f"rule {rule}: dims are counted from 0")

    @classmethod
    def of(cls, mesh: Mapping[str, int], shard: Mapping[str, Sequence[AxisCut]], layout: str) -> Target:
        """Return the target that these arguments of `reshard` describe; raises as the constructor."""
        return cls(mesh, tuple(ShardRule(glob, tuple(cuts)) for glob, cuts in shard.items()), layout)

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    def cuts(self, tensor: StateRecord, default: tuple[AxisCut, ...]) -> tuple[AxisCut, ...]:
        """Return the axes that cut a tensor, with the dims that they cut.

        Raises:
            TargetError: the rule that matches it cuts a dim that it does not have.
        """
        rule = next((rule for rule in self.rules if fnmatchcase(tensor.key, rule.glob)), None)
        cuts = default if rule is None else rule.cuts
        if tensor.shape and any(dim >= len(tensor.shape) for _, dim in cuts):
            raise TargetError(
                f"rule {rule} cuts a dim that tensor {tensor.key!r} of shape {tensor.shape} does not have; "
                "put a rule for this tensor before it"
            )
        return cuts if tensor.shape else ()

    def placement(self, cuts: Sequence[AxisCut]) -> MeshPlacement:
        """Return a placement by these cuts on a mesh of the same ranks, whose first axes are those of the cuts."""
        # The cut axes first: the ranks that hold replicas of a part then follow one another.
        axes = [axis for axis, _ in cuts]
        axes += [axis for axis in self.mesh if axis not in axes]
        steps = dict(zip(self.mesh, row_major(tuple(self.mesh.values())), strict=True))
        places = product(*(range(0, self.mesh[axis] * steps[axis], steps[axis]) for axis in axes))
        mesh = Mesh(tuple(self.mesh[axis] for axis in axes), tuple(map(sum, places)))
        shards, replicas = (Shard(dim) for _, dim in cuts), (Replicate() for _ in axes[len(cuts) :])
        return MeshPlacement(mesh, tuple(axes), (*shards, *replicas))


@dataclass(frozen=True, slots=True)
class TargetLayouts:
    """The layouts of tensors by key, whose buffers are ranks; the same as JSON data; and the flat buffers, if any."""

    layouts: Mapping[str, TensorLayout]
    recorded: Mapping[str, Mapping[str, Any] | None]
    buffers: tuple[GroupBuffer, ...] = ()
