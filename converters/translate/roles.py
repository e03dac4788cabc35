"""What the entries of a checkpoint are, by their dialect: weights, state, counters, options and the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ...errors import SourceError
from ...record import Blob, Manifest, StateRecord
from .dialects import Dialect


@dataclass(frozen=True, slots=True)
class Contents:
    """The entries of a checkpoint, sorted; tensors by their position in the manifest.

    Attributes:
        tensors: weights, by (None, parameter), and state, by (slot, parameter).
        counters: the steps of parameters, tensors or plain items, by parameter and slot.
        others, items: tensors and items to be carried: neither state nor options of groups, or derived state.
        positions: of all tensors in the manifest, by key.
        left: keys of the slots that are to be left behind.
        chains: which of several optimizers, as keys say it, the state of each parameter is of.
    """

    tensors: Mapping[tuple[str | None, str], int]
    counters: Mapping[str, Mapping[str, StateRecord | Blob]]
    others: tuple[int, ...]
    items: tuple[Blob, ...]
    positions: Mapping[str, int]
    left: tuple[str, ...]
    chains: Mapping[str, Collection[str]]


def contents(manifest: Manifest, dialect: Dialect, leave: Collection[str]) -> Contents:
    """Sort the entries of a checkpoint; slots in ``leave`` are only listed.

    Raises:
        SourceError: state that belongs to each element is no tensor.
    """
    steps = {method.slots["step"] for method in dialect.methods if "step" in method.slots}
    tensors: dict[tuple[str | None, str], int] = {}
    counters: defaultdict[str, dict[str, StateRecord | Blob]] = defaultdict(dict)
    others: list[int] = []
    items: list[Blob] = []
    left: list[str] = []
    chains: defaultdict[str, set[str]] = defaultdict(set)
    positions = {tensor.key: at for at, tensor in enumerate(manifest.tensors)}
    entries: tuple[StateRecord | Blob, ...] = (*manifest.tensors, *manifest.blobs)
    for entry in entries:
        at = positions.get(entry.key)
        state = dialect.state.read(entry.path)
        weight = dialect.model.read(entry.path) if at is not None else None
        if state:
            chains[state["name"]].add(state.get("chain", ""))
        if state and state["slot"] in leave:
            left.append(entry.key)
        elif state and state["slot"] in dialect.derived and isinstance(entry, Blob):
            items.append(entry)
        elif state and state["slot"] in dialect.derived:
            others.append(positions[entry.key])
        elif state and state["slot"] in steps:
            counters[state["name"]][state["slot"]] = entry
        elif state and at is not None:
            tensors[state["slot"], state["name"]] = at
        elif state:
            raise SourceError(f"{entry.key!r} is no tensor, expected one; leave it out with --drop {state['slot']}")
        elif dialect.option is not None and dialect.option.read(entry.path):
            continue
        elif at is not None and weight:
            tensors[None, weight["name"]] = at
        elif at is not None:
            others.append(at)
        else:
            assert isinstance(entry, Blob), "tensors have positions"
            items.append(entry)
    return Contents(tensors, counters, tuple(others), tuple(items), positions, tuple(left), chains)
