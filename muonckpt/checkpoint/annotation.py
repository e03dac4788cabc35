"""Facts about tensors that a nested state dict has and the store's own metadata lack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..layouts.tensors import placement_json
from ..vocabulary import MOMENTUM, Convention, KeyPath


@dataclass(frozen=True, slots=True)
class Annotation:
    """Fields of a `record.StateRecord` that the saving program knows."""

    name: str | None = None
    slot: str | None = None
    convention: Convention | None = None
    pieces: tuple[int, ...] | None = None
    layout: Mapping[str, Any] | None = None


def annotations_of(state_dict: Mapping[str, Any]) -> dict[KeyPath, Annotation]:
    """Annotations of all tensors, by path (as DCP makes paths: keys as strings, list positions as integers).

    An optimizer's state is recognised by the structure that torch documents for it: ``state`` (parameter -> slot ->
    value) beside ``param_groups`` (whose ``params`` are those parameters), or the same flattened,
    ``state.<name>.<slot>`` beside ``param_groups.<name>.<option>``.
    """
    return dict(_walk((), state_dict, {}))


def _walk(path: KeyPath, node: Any, known: Mapping[KeyPath, Annotation]) -> Iterator[tuple[KeyPath, Annotation]]:
    if isinstance(node, torch.Tensor):
        yield path, replace(known.get(path, Annotation()), layout=placement_json(node))
    elif isinstance(node, Mapping):
        known = {**known, **dict(_optimizer(path, node))}
        for key, value in node.items():
            yield from _walk((*path, str(key)), value, known)
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _walk((*path, index), value, known)


def _optimizer(path: KeyPath, node: Mapping[Any, Any]) -> Iterator[tuple[KeyPath, Annotation]]:
    """Annotations of an optimizer's state from its parameter groups, if the node is an optimizer's state dict."""
    match node:
        case {"state": Mapping() as state, "param_groups": [*groups]} if all(isinstance(g, Mapping) for g in groups):
            group_of = {name: group for group in groups for name in group.get("params") or ()}
            for name, slots in state.items():
                for slot in slots if isinstance(slots, Mapping) else ():
                    slot_path = (*path, "state", str(name), str(slot))
                    yield slot_path, _of_slot(str(name), str(slot), group_of.get(name, {}))
        case _:
            for key in node:
                prefix, _, rest = str(key).partition(".")
                name, _, slot = rest.rpartition(".")
                if prefix == "state" and name and f"param_groups.{name}.lr" in node:
                    group = {option: node.get(f"param_groups.{name}.{option}") for option in ("convention", "pieces")}
                    yield (*path, str(key)), _of_slot(name, slot, group)


def _of_slot(name: str, slot: str, group: Mapping[str, Any]) -> Annotation:
    convention, pieces = group.get("convention"), group.get("pieces")
    declared = [known for known in Convention if slot == MOMENTUM and known == convention]
    return Annotation(name, slot, declared[0] if declared else None, tuple(pieces) if pieces else None)
