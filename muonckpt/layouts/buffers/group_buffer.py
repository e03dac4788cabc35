"""A flat buffer in a checkpoint: its slot, the ranks of the whole run that share it, and how both are recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from ...box import Index
from ...errors import LayoutError, SourceError
from ...layout import Fragment
from . import layout_json
from .buffer_layout import BufferLayout
from .layout_json import LAYOUT, FieldTypes, check_fields, int_tuple

GROUP: FieldTypes = {"slot": (str, NoneType), "part": (int,), "group": (list,), "origins": (list,)}
"""The fields that a checkpoint records for a buffer besides those of its layout."""


@dataclass(frozen=True, slots=True)
class GroupBuffer:
    """A buffer of one slot of state, shared by a group of ranks.

    Args:
        slot: of the optimizer's state; None for weights and everything else without a slot.
        part: number of the group among those that cut the same tensors.
        group: the global rank of each rank of the layout.
        origins: for each parameter of the layout the global index of its first element: where other axes of the mesh
            cut the tensor as well, the buffer holds a box of it only.
        layout: its parameters have the keys of the tensors as names, and their dtypes.

    Raises:
        LayoutError: the layout has no parameters, the group does not have as many distinct ranks, or the origins do not
            fit the parameters.
    """

    slot: str | None
    part: int
    group: tuple[int, ...]
    origins: tuple[Index, ...]
    layout: BufferLayout

    def __post_init__(self) -> None:
        if not self.layout.parameters:
            raise LayoutError("expected a buffer with parameters, got one of padding only")
        if len(self.group) != self.layout.ranks or len(set(self.group)) != len(self.group) or min(self.group) < 0:
            raise LayoutError(f"expected {self.layout.ranks} ranks that share a buffer, got {self.group}")
        dims = [len(origin) for origin in self.origins]
        if dims != [len(placed.parameter.shape) for placed in self.layout.parameters]:
            raise LayoutError(f"the origins {self.origins} are not those of the buffer's parameters")

    def fragments(self) -> Iterator[tuple[str, Fragment]]:
        """The key of each tensor with the fragments of its boxes, whose buffers are the global ranks."""
        held = self.layout.held_layouts(self.group)
        for placed, origin in zip(self.layout.parameters, self.origins, strict=True):
            for fragment in held[placed.name].fragments:
                yield placed.name, Fragment(fragment.box.shift(origin), fragment.place)

    def to_json(self) -> dict[str, Any]:
        """The fields of `GROUP`, then those of the layout."""
        return {
            "slot": self.slot,
            "part": self.part,
            "group": list(self.group),
            "origins": list(map(list, self.origins)),
            **layout_json.to_json(self.layout),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GroupBuffer:
        """Read what `to_json` wrote; other fields belong to the format that has them.

        Raises:
            SourceError: a field is missing, of another type, or not what the others say.
        """
        try:
            own = {key: data[key] for key in GROUP}
            check_fields(own, GROUP)
            layout = layout_json.from_json({key: data[key] for key in LAYOUT})
            return cls(own["slot"], own["part"], int_tuple(own["group"]), tuple(map(int_tuple, own["origins"])), layout)
        except (KeyError, TypeError, ValueError) as error:
            raise SourceError(f"damaged record of a flat buffer: {type(error).__name__}: {error}") from error


def recorded(provenance: Mapping[str, Any]) -> tuple[GroupBuffer, ...]:
    """The flat buffers that the tensors of a checkpoint lie in, given its provenance.

    Raises:
        SourceError: the record is not as docs/formats/manifest.md says.
    """
    try:
        return tuple(map(GroupBuffer.from_json, provenance.get("buffers", ())))
    except TypeError as error:
        raise SourceError(f"damaged record of flat buffers: {error}") from error


def recorded_run(provenance: Mapping[str, Any]) -> tuple[GroupBuffer, ...]:
    """The flat buffers of the layer-wise run that saved a checkpoint, given its provenance; none if it was another run.

    They have no slot: they hold parameters and gradients, by the names of the parameters.

    Raises:
        SourceError: the record is not as docs/formats/manifest.md says.
    """
    try:
        run = provenance.get("layer_wise", {"buffers": (), "ranks": ()})
        buffers = zip(map(layout_json.from_json, run["buffers"]), map(int_tuple, run["ranks"]), strict=True)
        return tuple(GroupBuffer(None, 0, ranks, layout.origins, layout) for layout, ranks in buffers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(f"damaged record of flat buffers: {type(error).__name__}: {error}") from error
