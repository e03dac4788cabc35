"""The flat buffers that a source records, so that their owners are kept and never computed again."""

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
    """The buffers that a checkpoint lies in; if it lies in none, those of the layer-wise run that saved it, as buffers
    of each slot of state.

    Args:
        tensors: of the checkpoint: they say which parameters have which slots, under which keys.

    Raises:
        SourceError: a record is not as docs/formats/manifest.md says.
    """
    return recorded(provenance) or tuple(_of_state(recorded_run(provenance), tensors))


def _of_state(run: Sequence[GroupBuffer], tensors: Sequence[StateRecord]) -> Iterator[GroupBuffer]:
    """The buffers of parameters as buffers of their state: of each slot what has it, in the same place.

    Parameters are known by name, shape and dtype here; what else an algorithm saw of them does not matter any more.
    """
    slots: defaultdict[str, dict[str | None, StateRecord]] = defaultdict(dict)
    for tensor in tensors:
        if tensor.slot is not None:
            slots[tensor.slot][tensor.name] = tensor
    for slot, named in slots.items():
        for buffer in run:
            parameters = buffer.layout.parameters
            held = tuple(_of(placed, named[placed.name]) for placed in parameters if _fits(placed, named))
            if held:
                layout = replace(buffer.layout, parameters=held)
                yield GroupBuffer(slot, 0, buffer.group, layout.origins, layout)


def _fits(placed: PlacedParameter, named: Mapping[str | None, StateRecord]) -> bool:
    """Whether a parameter has this slot of state, in its own shape."""
    return placed.name in named and named[placed.name].shape == placed.parameter.shape


def _of(placed: PlacedParameter, tensor: StateRecord) -> PlacedParameter:
    return replace(placed, parameter=Parameter(tensor.key, tensor.shape, tensor.dtype))
