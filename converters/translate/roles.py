"""What the entries of a checkpoint are, by their dialect: weights, state, counters, options and the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ...errors import SourceError
from ...record import Blob, Manifest, StateRecord
from .dialect import Dialect


@dataclass(frozen=True, slots=True)
class Roles:
    """The entries of a checkpoint, sorted by what they are.

    Attributes:
        tensors: weights, by (None, parameter), and state, by (slot, parameter).
        counters: the steps of parameters, tensors or plain items, by parameter and slot.
        others, items: tensors and items to be carried: neither state nor options of groups, or derived state.
        left: keys of the slots that are to be left behind.
        chains: which of several optimizers, as keys say it, the state of each parameter is of.
    """

    tensors: Mapping[tuple[str | None, str], StateRecord]
    counters: Mapping[str, Mapping[str, StateRecord | Blob]]
    others: tuple[StateRecord, ...]
    items: tuple[Blob, ...]
    left: tuple[str, ...]
    chains: Mapping[str, Collection[str]]


def roles_of(manifest: Manifest, dialect: Dialect, leave: Collection[str]) -> Roles:
    """Sort the entries of a checkpoint; slots in ``leave`` are only listed.

    Raises:
        SourceError: state that belongs to each element is no tensor.
    """
    steps = {method.slots["step"] for method in dialect.methods if "step" in method.slots}
    tensors: dict[tuple[str | None, str], StateRecord] = {}
    counters: defaultdict[str, dict[str, StateRecord | Blob]] = defaultdict(dict)
    others: list[StateRecord] = []
    items: list[Blob] = []
    left: list[str] = []
    chains: defaultdict[str, set[str]] = defaultdict(set)

    def is_counted(entry: StateRecord | Blob, state: Mapping[str, str]) -> bool:
        """Note state that is the same for tensors and items: what is left behind, and counters."""
        chains[state["name"]].add(state.get("chain", ""))
        if state["slot"] in leave:
            left.append(entry.key)
        elif state["slot"] in steps and state["slot"] not in dialect.derived:
            counters[state["name"]][state["slot"]] = entry
        else:
            return False
        return True

    for tensor in manifest.tensors:
        if state := dialect.state.read(tensor.path):
            if is_counted(tensor, state):
                continue
            if state["slot"] in dialect.derived:
                others.append(tensor)
            else:
                tensors[state["slot"], state["name"]] = tensor
        elif dialect.option is not None and dialect.option.read(tensor.path):
            continue
        elif weight := dialect.model.read(tensor.path):
            tensors[None, weight["name"]] = tensor
        else:
            others.append(tensor)
    for blob in manifest.blobs:
        if state := dialect.state.read(blob.path):
            if is_counted(blob, state):
                continue
            if state["slot"] not in dialect.derived:
                raise SourceError(f"{blob.key!r} is no tensor, expected one; leave it out with --drop {state['slot']}")
            items.append(blob)
        elif dialect.option is None or not dialect.option.read(blob.path):
            items.append(blob)
    return Roles(tensors, counters, tuple(others), tuple(items), tuple(left), chains)
