"""What a nested state dict says of its tensors and the store's own metadata does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..layouts.tensors import describe
from ..record import Convention

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Annotation:
    """Fields of a `record.StateRecord` that the saving program knows."""

    name: str | None = None
    slot: str | None = None
    convention: Convention | None = None
    pieces: tuple[int, ...] | None = None
    layout: Mapping[str, Any] | None = None


def annotate(state_dict: Mapping[str, Any]) -> dict[KeyPath, Annotation]:
    """Annotations by path.

    An optimizer's state is recognised by its structure, the one of ``torch.optim.Optimizer.state_dict`` keyed by
    parameter names: a mapping with ``state`` (name -> slot -> value) and ``param_groups`` (whose ``params`` are names).
    """
    return dict(_walk((), state_dict))


def _walk(path: KeyPath, node: Any) -> Iterator[tuple[KeyPath, Annotation]]:
    if isinstance(node, torch.Tensor):
        yield path, Annotation(layout=describe(node))
    elif isinstance(node, Mapping):
        if {"state", "param_groups"} <= node.keys():
            yield from _optimizer(path, node)
        else:
            for key, value in node.items():
                yield from _walk((*path, key), value)


def _optimizer(path: KeyPath, node: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Annotation]]:
    group_of = {name: group for group in node["param_groups"] for name in group.get("params", ())}
    for name, slots in node["state"].items():
        group = group_of.get(name, {})
        for slot, value in slots.items():
            momentum = slot == "momentum_buffer" and group.get("convention")
            yield (
                (*path, "state", name, slot),
                Annotation(
                    name=str(name),
                    slot=slot,
                    convention=Convention(group["convention"]) if momentum else None,
                    pieces=tuple(group["pieces"]) if group.get("pieces") else None,
                    layout=describe(value) if isinstance(value, torch.Tensor) else None,
                ),
            )
