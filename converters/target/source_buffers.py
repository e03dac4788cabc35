"""The flat buffers that a source records, so that their owners are kept and never computed again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import SourceError
from ...layouts.buffers import group_buffer
from ...layouts.buffers import recorded as buffer_record
from ...layouts.buffers.group_buffer import GroupBuffer
from ...layouts.buffers.layout import BufferLayout
from ...layouts.buffers.parameters import Parameter
from ...layouts.buffers.ranges import PlacedParameter
from ...record import StateRecord


def recorded(provenance: Mapping[str, Any], tensors: Sequence[StateRecord]) -> tuple[GroupBuffer, ...]:
    """The buffers that a checkpoint lies in (``buffers``); if it lies in none, those of the layer-wise run that saved
    it (``layer_wise``), as buffers of each slot of state.

    Args:
        tensors: of the checkpoint: they say which parameters have which slots, under which keys.

    Raises:
        SourceError: a record is not as docs/formats/manifest.md says.
    """
    try:
        if "buffers" in provenance:
            return tuple(map(group_buffer.from_json, provenance["buffers"]))
        run = provenance.get("layer_wise", {"buffers": [], "ranks": []})
        layouts = [*map(buffer_record.from_json, run["buffers"])]
        return tuple(_of_state(layouts, [tuple(ranks) for ranks in run["ranks"]], tensors))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(f"damaged record of flat buffers: {type(error).__name__}: {error}") from error


def _of_state(
    layouts: Sequence[BufferLayout], groups: Sequence[tuple[int, ...]], tensors: Sequence[StateRecord]
) -> Iterator[GroupBuffer]:
    """The buffers of parameters as buffers of their state: of each slot what has it, in the same place.

    Parameters are known by name, shape and dtype here; what else an algorithm saw of them does not matter any more.
    """
    slots: defaultdict[str, dict[str | None, StateRecord]] = defaultdict(dict)
    for tensor in tensors:
        if tensor.slot is not None:
            slots[tensor.slot][tensor.name] = tensor
    for slot, named in slots.items():
        for layout, group in zip(layouts, groups, strict=True):
            held = tuple(_of(placed, named[placed.name]) for placed in layout.parameters if _fits(placed, named))
            if held:
                origins = tuple((0,) * len(placed.parameter.shape) for placed in held)
                yield GroupBuffer(slot, 0, group, origins, replace(layout, parameters=held))


def _fits(placed: PlacedParameter, named: Mapping[str | None, StateRecord]) -> bool:
    """Whether a parameter has this slot of state, in its own shape."""
    return placed.name in named and named[placed.name].shape == placed.parameter.shape


def _of(placed: PlacedParameter, tensor: StateRecord) -> PlacedParameter:
    return replace(placed, parameter=Parameter(tensor.key, tensor.shape, tensor.dtype))
