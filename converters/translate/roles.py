"""The roles of a checkpoint's entries in its dialect: weights, state, counters, options and others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ...errors import SourceError, TargetError
from ...record import Blob, Manifest, StateRecord
from .dialect import Dialect


@dataclass(frozen=True, slots=True)
class Roles:
    """The entries of a checkpoint, sorted by role.

    Attributes:
        tensors: weights, by (None, parameter), and state, by (slot, parameter).
        counters: the step counters of parameters, which are tensors or plain items, by parameter and slot.
        other_tensors, items: tensors and items to copy: neither state nor group options, or derived state.
        left_out: keys of the slots to leave out.
        derived: the items of derived slots, by parameter and slot, also of those that are left out.
        chains: the optimizers, as keys name them, that the state of each parameter belongs to.
    """

    tensors: Mapping[tuple[str | None, str], StateRecord]
    counters: Mapping[str, Mapping[str, StateRecord | Blob]]
    other_tensors: tuple[StateRecord, ...]
    items: tuple[Blob, ...]
    left_out: tuple[str, ...]
    chains: Mapping[str, Collection[str]]
    derived: Mapping[str, Mapping[str, Blob]]


def with_masters_as_weights(roles: Roles, slots: Collection[str]) -> Roles:
    """The roles with masters, which are in these slots, as the weights; the model's rounded ones are left out.

    Raises:
        TargetError: there are no masters.
    """
    masters = {name: tensor for (slot, name), tensor in roles.tensors.items() if slot in slots}
    if not masters:
        raise TargetError("--weights masters: the source has no float32 masters; leave it out")
    others = {(slot, name): tensor for (slot, name), tensor in roles.tensors.items() if slot not in slots}
    replaced = tuple(others[None, name].key for name in masters if (None, name) in others)
    promoted = {(None, name): replace(tensor, name=None, slot=None) for name, tensor in masters.items()}
    return replace(roles, tensors=others | promoted, left_out=(*roles.left_out, *replaced))


def without_private_items(roles: Roles, source: Dialect, target: Dialect) -> tuple[Roles, tuple[str, ...]]:
    """The roles without what only the source's program can use, and the keys of that."""
    globs = source.private - target.private

    def is_private(entry: StateRecord | Blob) -> bool:
        return any(fnmatchcase(entry.key, glob) for glob in globs)

    entries: tuple[StateRecord | Blob, ...] = (*roles.items, *roles.other_tensors)
    kept = replace(
        roles,
        items=tuple(item for item in roles.items if not is_private(item)),
        other_tensors=tuple(tensor for tensor in roles.other_tensors if not is_private(tensor)),
    )
    return kept, tuple(entry.key for entry in entries if is_private(entry))


def roles_of(manifest: Manifest, dialect: Dialect, dropped: Collection[str]) -> Roles:
    """Sort the entries of a checkpoint; ``dropped`` slots are only listed.

    Raises:
        SourceError: state other than a counter is not a tensor.
    """
    steps = {method.slots["step"] for method in dialect.methods if "step" in method.slots}
    tensors: dict[tuple[str | None, str], StateRecord] = {}
    counters: defaultdict[str, dict[str, StateRecord | Blob]] = defaultdict(dict)
    other_tensors: list[StateRecord] = []
    items: list[Blob] = []
    left_out: list[str] = []
    chains: defaultdict[str, set[str]] = defaultdict(set)
    derived: defaultdict[str, dict[str, Blob]] = defaultdict(dict)

    def is_dropped_or_counter(entry: StateRecord | Blob, state: Mapping[str, str]) -> bool:
        """Sort dropped slots and counters, which can be tensors or items."""
        chains[state["name"]].add(state.get("chain", ""))
        if state["slot"] in dialect.derived and isinstance(entry, Blob):
            derived[state["name"]][state["slot"]] = entry
        if state["slot"] in dropped:
            left_out.append(entry.key)
        elif state["slot"] in steps and state["slot"] not in dialect.derived:
            counters[state["name"]][state["slot"]] = entry
        else:
            return False
        return True

    for tensor in manifest.tensors:
        if state := dialect.state.read(tensor.path):
            if is_dropped_or_counter(tensor, state):
                continue
            if state["slot"] in dialect.derived:
                other_tensors.append(tensor)
            elif (key := (state["slot"], state["name"])) in tensors:
                raise SourceError(
                    f"{tensors[key].key!r} and {tensor.key!r} are state of parameters of the same name in different "
                    "optimizers; make a copy of each with its model, by `muonckpt reshard --select`"
                )
            else:
                tensors[key] = tensor
        elif dialect.option is not None and dialect.option.read(tensor.path):
            continue
        elif weight := dialect.model.read(tensor.path):
            tensors[None, weight["name"]] = tensor
        else:
            other_tensors.append(tensor)
    for blob in manifest.blobs:
        if state := dialect.state.read(blob.path):
            if is_dropped_or_counter(blob, state):
                continue
            if state["slot"] not in dialect.derived:
                raise SourceError(
                    f"expected a tensor at {blob.key!r}, found another item; leave it out with --drop {state['slot']}"
                )
            items.append(blob)
        elif dialect.option is None or not dialect.option.read(blob.path):
            items.append(blob)
    return Roles(tensors, counters, tuple(other_tensors), tuple(items), tuple(left_out), chains, derived)
