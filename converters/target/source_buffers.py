"""The flat buffers that a source records, which a destination reuses so that owners do not change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...layouts.buffers.group_buffer import GroupBuffer, recorded, recorded_run
from ...layouts.buffers.parameters import Parameter
from ...layouts.buffers.ranges import PlacedParameter
from ...record import StateRecord


def buffers_of_state(provenance: Mapping[str, Any], tensors: Sequence[StateRecord]) -> tuple[GroupBuffer, ...]:
    """The buffers that a checkpoint is laid out in.

    If there are none, those of the layer-wise run that saved it, once for each slot of optimizer state.

    Args:
        tensors: the tensors of the checkpoint, which say which parameters have which slots, under which keys.

    Raises:
        SourceError: a record does not follow docs/formats/manifest.md.
    """
    return recorded(provenance) or tuple(_of_state(recorded_run(provenance), tensors))


def _of_state(run: Sequence[GroupBuffer], tensors: Sequence[StateRecord]) -> Iterator[GroupBuffer]:
    """The buffers of parameters as buffers of their state: each slot has its tensors at the places of the parameters.

    Only names, shapes and dtypes of the parameters are used; other properties mattered only to the placement.
    """
    slots: defaultdict[str, dict[str | None, StateRecord]] = defaultdict(dict)
    for tensor in tensors:
        if tensor.slot is not None:
            slots[tensor.slot][tensor.name] = tensor
    for slot, named in slots.items():
        for buffer in run:
            parameters = buffer.layout.parameters
            placed_state = tuple(_of(placed, named[placed.name]) for placed in parameters if _fits(placed, named))
            if placed_state:
                layout = replace(buffer.layout, parameters=placed_state)
                yield GroupBuffer(slot, 0, buffer.group, layout.origins, layout)


def _fits(placed: PlacedParameter, named: Mapping[str | None, StateRecord]) -> bool:
    """Whether a parameter has this slot of state, in the parameter's shape."""
    return placed.name in named and named[placed.name].shape == placed.parameter.shape


def _of(placed: PlacedParameter, tensor: StateRecord) -> PlacedParameter:
    return replace(placed, parameter=Parameter(tensor.key, tensor.shape, tensor.dtype))
