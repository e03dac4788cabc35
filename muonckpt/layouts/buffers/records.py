"""Flat buffers as JSON data in checkpoints, so that no reader has to know how parameters were placed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from types import NoneType
from typing import Any

from ...algebra.box import MAX_ELEMENTS, Index
from ...algebra.layout import Fragment
from ...names.errors import DamageError, LayoutError
from .buffer_layout import BufferLayout, PlacedParameter, consecutive_shards, rank_of
from .parameters import Parameter

FieldTypes = Mapping[str, tuple[type, ...]]

LAYOUT: FieldTypes = {
    "algorithm": (str,),
    "version": (int,),
    "options": (dict,),
    "ranks": (int,),
    "numel": (int,),
    "padding": (int,),
    "alignment": (int,),
    "whole": (bool,),
    "buckets": (list,),
    "shards": (list,),
    "parameters": (list,),
}
"""The fields of a layout.  ``buckets`` are [start, stop], ``shards`` [start, stop, rank], in elements."""

PARAMETER: FieldTypes = {
    "name": (str,),
    "shape": (list,),
    "dtype": (str,),
    "expert": (bool,),
    "tied": (bool,),
    "chunk": (int,),
    "unit": (int, NoneType),
    "fold": (int,),
    "start": (int,),
    "stop": (int,),
    "bucket": (int,),
    "owner": (int, NoneType),
}
"""The fields of a parameter: the input of the algorithm, then its range, its bucket, and its owner if it has one."""


def to_json(layout: BufferLayout) -> dict[str, Any]:
    """Return a layout as JSON data, with owners and ends, so that readers compute nothing."""
    owners, parameters = layout.owners, []
    for entry in layout.parameters:
        fields = {**asdict(entry.parameter), "shape": list(entry.parameter.shape)}
        # Readers need the range and the owner without knowing the algorithm.
        place = {"start": entry.start, "stop": entry.stop, "bucket": entry.bucket, "owner": owners[entry.name]}
        parameters.append(fields | place)
    return {key: getattr(layout, key) for key in LAYOUT} | {
        "options": dict(layout.options),
        "buckets": list(map(list, layout.buckets)),
        "shards": [[shard.start, shard.stop, rank_of(shard)] for shard in layout.shards],
        "parameters": parameters,
    }


def from_json(data: Mapping[str, Any]) -> BufferLayout:
    """Read what `to_json` wrote.  Parameters stay where they are, even if a later version of the algorithm differs.

    Raises:
        DamageError: a field is missing, unknown, of another type, or not what the others say.
    """
    with _damaged("buffer layout"):
        check_fields(data, LAYOUT)
        layout = BufferLayout(
            **{key: data[key] for key in ("algorithm", "version", "options", "ranks", "alignment", "whole")},
            parameters=tuple(map(_read_parameter, data["parameters"])),
            buckets=tuple((start, stop) for start, stop in map(int_tuple, data["buckets"])),
            shards=consecutive_shards((start, stop, rank) for start, stop, rank in map(int_tuple, data["shards"])),
        )
    # Derived fields, such as owners and padding, have to be those of the layout.
    written = to_json(layout)
    if inconsistent := [key for key in LAYOUT if data[key] != written[key]]:
        raise DamageError(f"damaged buffer layout: {inconsistent} do not agree with the other fields")
    return layout


@contextmanager
def _damaged(noun: str) -> Iterator[None]:
    """Raise `DamageError` for whatever reading damaged data raises."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise DamageError(f"damaged {noun}: {type(error).__name__}: {error}") from error


def _read_parameter(data: Any) -> PlacedParameter:
    check_fields(data, PARAMETER)
    parameter = {field.name: data[field.name] for field in fields(Parameter)}
    return PlacedParameter(Parameter(**parameter | {"shape": int_tuple(data["shape"])}), data["start"], data["bucket"])


def check_fields(data: Any, kinds: FieldTypes) -> None:
    """Raise `TypeError` unless an object has exactly these fields, each of one of its types."""
    if not isinstance(data, Mapping) or data.keys() != kinds.keys():
        raise TypeError(f"expected an object with {sorted(kinds)}, got {data!r:.200}")
    for key, value in data.items():
        if type(value) not in kinds[key]:  # a bool is not an int here
            raise TypeError(f"{key!r} cannot be {value!r:.200}")


def int_tuple(values: Any) -> tuple[int, ...]:
    """Read a JSON list of integers; raise `TypeError` if it is something else."""
    if type(values) is not list or any(type(value) is not int or abs(value) > MAX_ELEMENTS for value in values):
        raise TypeError(f"expected a list of integers of at most {MAX_ELEMENTS}, got {values!r:.200}")
    return tuple(values)


GROUP: FieldTypes = {"slot": (str, NoneType), "part": (int,), "group": (list,), "origins": (list,)}
"""Fields of a recorded buffer besides those of its layout."""


@dataclass(frozen=True, slots=True)
class GroupBuffer:
    """A buffer of one slot of state, shared by a group of ranks.

    Args:
        slot: of the optimizer's state; None for weights and everything else without a slot.
        part: number of the group among those that cut the same tensors.
        group: the global rank of each rank of the layout.
        origins: the global index of each parameter's first element; not zero where other axes cut the tensor, too.
        layout: its parameters have the keys of the tensors as names, and their dtypes.

    Raises:
        LayoutError: the layout has no parameters, or group or origins do not fit it.
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
        if dims != [len(entry.parameter.shape) for entry in self.layout.parameters]:
            raise LayoutError(f"the origins {self.origins} are not those of the buffer's parameters")

    def fragments(self) -> Iterator[tuple[str, Fragment]]:
        """Yield the key of each tensor with the fragments of its boxes, whose buffers are the global ranks."""
        layouts = self.layout.tensor_layouts(self.group)
        for entry, origin in zip(self.layout.parameters, self.origins, strict=True):
            for fragment in layouts[entry.name].fragments:
                yield entry.name, Fragment(fragment.box.shift(origin), fragment.place)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data: the fields of `GROUP`, then those of the layout."""
        return {
            "slot": self.slot,
            "part": self.part,
            "group": list(self.group),
            "origins": list(map(list, self.origins)),
            **to_json(self.layout),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GroupBuffer:
        """Read what `to_json` wrote; other fields belong to the format that has them.

        Raises:
            DamageError: a field is missing, of another type, or not what the others say.
        """
        with _damaged("record of a flat buffer"):
            check_fields({key: data[key] for key in GROUP}, GROUP)
            group, origins = int_tuple(data["group"]), tuple(map(int_tuple, data["origins"]))
            return cls(
                slot=data["slot"],
                part=data["part"],
                group=group,
                origins=origins,
                layout=from_json({key: data[key] for key in LAYOUT}),
            )


def recorded_buffers(provenance: Mapping[str, Any]) -> tuple[GroupBuffer, ...]:
    """Read the flat buffers of a checkpoint's tensors from its provenance.

    Raises:
        DamageError: the record is not as docs/formats/manifest.md says.
    """
    with _damaged("record of flat buffers"):
        return tuple(map(GroupBuffer.from_json, provenance.get("buffers", ())))


def run_buffers(provenance: Mapping[str, Any]) -> tuple[GroupBuffer, ...]:
    """Read the flat buffers of the layer-wise run that saved a checkpoint from its provenance; empty for other runs.

    They hold parameters and gradients, by the names of the parameters, so they have no slot.

    Raises:
        DamageError: as `recorded_buffers`.
    """
    if "layer_wise" not in provenance:
        return ()
    buffers = []
    with _damaged("record of flat buffers"):
        run = provenance["layer_wise"]
        for recorded_layout, ranks in zip(run["buffers"], run["ranks"], strict=True):
            layout = from_json(recorded_layout)
            buffers.append(
                GroupBuffer(slot=None, part=0, group=int_tuple(ranks), origins=layout.origins, layout=layout)
            )
    return tuple(buffers)
