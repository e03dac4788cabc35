"""Where a checkpoint should lie: a mesh, what its axes do to which tensors, and which layout the ranks have.

Nothing follows from the name of an axis or of a parameter.  A rule of the user says which axes cut which dims of
which tensors, in that order; the first rule whose pattern fits a tensor's key wins.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from types import MappingProxyType
from typing import Any

from ..box import Box, Index, row_major
from ..errors import LayoutError
from ..layout import Fragment, TensorLayout
from ..layouts.balanced import balanced
from ..layouts.buffers import BufferLayout
from ..layouts.group_buffer import GroupBuffer
from ..layouts.megatron_compact import pingpong_legacy, pingpong_total_order
from ..layouts.megatron_padded import distributed_optimizer, padded_nscost, padded_numel
from ..layouts.mesh import Mesh, Placement, Replicate, Shard, mesh_layout
from ..layouts.owned import owned_layout
from ..layouts.parameters import Parameter, Ranks, split
from ..layouts.slots import divided, end_to_end
from ..record import StateRecord
from .recorded import recorded

Cut = tuple[str, int]
"""An axis of the mesh and the dim of a tensor that it cuts."""


class TargetError(LayoutError):
    """What was asked for cannot be done, whatever the checkpoint's state: an unknown axis, a dim that is not there."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors whose key fits the shell pattern ``glob`` are cut by these axes, the first of them into the coarsest
    parts.  The axes that it does not name hold replicas or, in a layout of buffers, share the buffer."""

    glob: str
    cuts: tuple[Cut, ...]

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
    rules: tuple[Rule, ...] = ()
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

    def cuts(self, tensor: StateRecord, default: tuple[Cut, ...]) -> tuple[Cut, ...]:
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

    def grid(self, cuts: Sequence[Cut]) -> tuple[Mesh, tuple[str, ...]]:
        """The same ranks on a mesh whose first axes are those of the cuts, in their order; and its axes' names."""
        axes = [axis for axis, _ in cuts]
        axes += [axis for axis in self.mesh if axis not in axes]
        steps = dict(zip(self.mesh, row_major(tuple(self.mesh.values())), strict=True))
        places = product(*(range(0, self.mesh[axis] * steps[axis], steps[axis]) for axis in axes))
        return Mesh(tuple(self.mesh[axis] for axis in axes), tuple(map(sum, places))), tuple(axes)

    def lay_out(self, tensors: Sequence[StateRecord], provenance: Mapping[str, Any] = MappingProxyType({})) -> Laid:
        """Where each of these tensors goes.

        Args:
            provenance: of their source.  Where it records buffers (`recorded`) in which the same ranks share the same
                tensors, placed by the algorithm that is asked for, these are kept as they are, whatever the version
                of its rules: owners are never computed again.

        Raises:
            TargetError: a rule does not fit a tensor that it matches, or matches none.
            SourceError: the provenance is damaged.
        """
        for rule in self.rules:
            if not any(fnmatchcase(tensor.key, rule.glob) for tensor in tensors):
                raise TargetError(f"rule {rule} fits none of {len(tensors)} tensors")
        return LAYOUTS[self.layout](self, tensors, provenance)


@dataclass(frozen=True, slots=True)
class Laid:
    """By key: a layout whose buffers are ranks, and the same in words for the manifest; then the flat buffers used."""

    layouts: Mapping[str, TensorLayout]
    words: Mapping[str, Mapping[str, Any] | None]
    buffers: tuple[GroupBuffer, ...] = ()


LayOut = Callable[[Target, Sequence[StateRecord], Mapping[str, Any]], Laid]
"""Lays out tensors; the last argument is their source's provenance."""


def _rows(target: Target, tensors: Sequence[StateRecord], provenance: Mapping[str, Any]) -> Laid:
    layouts: dict[str, TensorLayout] = {}
    words: dict[str, Mapping[str, Any] | None] = {}
    every = tuple((axis, 0) for axis in target.mesh)
    for tensor in tensors:
        if not tensor.shape:
            layouts[tensor.key], words[tensor.key] = owned_layout((), 0), None
            continue
        cuts = target.cuts(tensor, every)
        mesh, axes = target.grid(cuts)
        placements: list[Placement] = [Shard(dim) for _, dim in cuts]
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
    return Laid(layouts, words)


Place = Callable[[Sequence[Parameter], Ranks], tuple[BufferLayout, ...]]
"""Puts parameters into flat buffers over the ranks of one group."""


def _flat(parameters: Sequence[Parameter], ranks: Ranks) -> tuple[BufferLayout, ...]:
    """Everything of one dtype end to end, cut into equal parts, in the middle of a row if need be."""
    buffers = []
    for own in split(parameters):
        slots, buckets = end_to_end([own], divisor=ranks.dense)
        shards = divided(buckets, ranks.dense)
        buffers.append(BufferLayout("flat", 1, ranks.dense, tuple(slots.values()), buckets, shards))
    return tuple(buffers)


ELEMENTWISE = frozenset({"exp_avg", "exp_avg_sq"})
"""The slots of AdamW and Lion: their tensors are never orthogonalised, so nobody needs all of one."""


def _in_buffers(whole: Place, elementwise: Place) -> LayOut:
    """Buffers of their own for each slot of state, and for each part that the cut axes leave.

    Args:
        whole: places the tensors of all slots but those of `ELEMENTWISE`, which ``elementwise`` does.
    """

    def lay_out(target: Target, tensors: Sequence[StateRecord], provenance: Mapping[str, Any]) -> Laid:
        groups: defaultdict[tuple[str | None, tuple[str, ...]], list[StateRecord]] = defaultdict(list)
        cuts = {tensor.key: target.cuts(tensor, ()) for tensor in tensors}
        for tensor in tensors:
            groups[tensor.slot, tuple(axis for axis, _ in cuts[tensor.key])].append(tensor)
        known = _by_group(recorded(provenance, tensors))
        fragments: dict[str, list[Fragment]] = {tensor.key: [] for tensor in tensors}
        words: dict[str, Mapping[str, Any] | None] = dict.fromkeys(fragments)
        buffers: list[GroupBuffer] = []
        for (slot, axes), members in groups.items():
            place = elementwise if slot in ELEMENTWISE else whole
            mesh, _ = target.grid([(axis, 0) for axis in axes])
            parts = math.prod(mesh.shape[: len(axes)])
            share = len(mesh.ranks) // parts
            boxes = {t.key: _parts(t.shape, mesh.shape[: len(axes)], cuts[t.key]) for t in members}
            for part in range(parts):
                ranks = mesh.ranks[part * share : (part + 1) * share]
                here = {key: box[part] for key, box in boxes.items() if part in box}
                parameters = [Parameter(t.key, here[t.key].shape, t.dtype) for t in members if t.key in here]
                for layout in _kept(place(parameters, Ranks(share)), known[slot, ranks]):
                    names = [each.parameter.name for each in layout.slots]
                    buffers.append(GroupBuffer(slot, part, ranks, tuple(here[name].lo for name in names), layout))
                    words |= {name: _words(target, layout, cuts[name]) for name in names}
        for buffer in buffers:
            for key, fragment in buffer.fragments():
                fragments[key].append(fragment)
        layouts = {tensor.key: TensorLayout(tensor.shape, tuple(fragments[tensor.key])) for tensor in tensors}
        return Laid(layouts, words, tuple(buffers))

    return lay_out


Group = tuple[str | None, tuple[int, ...]]
"""A slot of state, and the global ranks that share its buffers."""


def _by_group(buffers: Iterable[GroupBuffer]) -> defaultdict[Group, list[BufferLayout]]:
    found: defaultdict[Group, list[BufferLayout]] = defaultdict(list)
    for each in buffers:
        found[each.slot, each.group].append(each.layout)
    return found


def _kept(fresh: tuple[BufferLayout, ...], known: Sequence[BufferLayout]) -> tuple[BufferLayout, ...]:
    """The known buffers of the same algorithm, if they hold exactly what the fresh ones do; else those."""
    algorithms = {layout.algorithm for layout in fresh}
    wanted = {slot.parameter for layout in fresh for slot in layout.slots}
    same = [layout for layout in known if layout.algorithm in algorithms]
    mine = tuple(layout for layout in same if wanted.issuperset(slot.parameter for slot in layout.slots))
    return mine if wanted == {slot.parameter for layout in mine for slot in layout.slots} else fresh


def _parts(shape: Index, sizes: Index, cuts: Sequence[Cut]) -> dict[int, Box]:
    """What the cut axes leave of a tensor, by coordinate; a part without elements is left out."""
    layout = mesh_layout(shape, Mesh.of(*sizes), tuple(Shard(dim) for _, dim in cuts))
    return {int(fragment.place.buffer): fragment.box for fragment in layout.fragments}


def _words(target: Target, buffer: BufferLayout, cuts: Sequence[Cut]) -> Mapping[str, Any]:
    return {
        "algorithm": buffer.algorithm,
        "version": buffer.version,
        "mesh": list(target.mesh.values()),
        "axes": list(target.mesh),
        "cuts": [list(cut) for cut in cuts],
    }


LAYOUTS: Mapping[str, LayOut] = MappingProxyType(
    {
        "rows": _rows,
        "flat": _in_buffers(_flat, _flat),
        "owned": _in_buffers(balanced, balanced),
        "padded": _in_buffers(padded_nscost, distributed_optimizer),
        "padded-numel": _in_buffers(padded_numel, distributed_optimizer),
        "compact": _in_buffers(pingpong_total_order, distributed_optimizer),
        "legacy": _in_buffers(pingpong_legacy, pingpong_legacy),
    }
)
"""By name: cut by rows (or as the rules say); flat buffers cut evenly; whole tensors with balanced owners, ours; in
Megatron's padded buffers, by the rules of its main branch or by those of core 0.18 and 0.19; in its compact ones; in
those of its legacy mode, which owns element-wise state whole too, where the three before cut that evenly."""
