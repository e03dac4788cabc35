"""The state of a rank in memory: what it tells other ranks of it, and where its elements are."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.stateful import Stateful

from ..box import Box
from ..chunks import no_chunks
from ..errors import LayoutError, about
from ..layouts.boxed_tensor import Parts, parts_of, whole_shape
from ..record import Blob, Extent, StateRecord
from ..store.io.checksums import xxh3_128
from ..vocabulary import KeyPath
from .annotation import Annotation, annotations_of
from .bits import dtype_name


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor of a state, and the boxes of it that a rank holds."""

    record: StateRecord
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class HeldItem:
    """What is not a tensor, pickled."""

    entry: Blob
    pickled: bytes


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank tells the others of its state.

    Attributes:
        options: values of options that are tensors, by key.
        devices: types of the devices that have its tensors.
    """

    tensors: tuple[HeldTensor, ...]
    items: tuple[HeldItem, ...]
    options: Mapping[str, float]
    devices: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class LiveState:
    """A nested state dict as DCP makes it flat, with the parts of its tensors.

    Attributes:
        given: what the user has given; objects with a state dict are replaced by that in ``nested``.
        flat, paths: by key.
        annotations: by path.
        parts: by key, of the tensors.
    """

    given: Mapping[str, Any]
    nested: dict[str, Any]
    flat: Mapping[str, Any]
    paths: Mapping[str, KeyPath]
    annotations: Mapping[KeyPath, Annotation]
    parts: Mapping[str, Parts] = field(repr=False)

    @classmethod
    def of(cls, state_dict: Mapping[str, Any]) -> LiveState:
        """Read a state dict.

        Raises:
            LayoutError: neither placements nor hooks say where a tensor is, or it is on the meta device; names it.
        """
        nested = {key: each.state_dict() if isinstance(each, Stateful) else each for key, each in state_dict.items()}
        flat, paths = flatten_state_dict(nested)
        parts = {}
        for key, value in flat.items():
            if isinstance(value, Tensor):
                with about(f"tensor {key!r}"):
                    if value.is_meta:
                        raise LayoutError("it is on the meta device and has no elements: materialise it")
                    parts[key] = parts_of(value)
        return cls(state_dict, nested, flat, paths, annotations_of(nested), parts)

    def boxes(self, key: str) -> tuple[Box, ...]:
        """The boxes of a tensor that are here, in the order of its parts."""
        return tuple(Box.of(tuple(part.shape)).shift(lo) for lo, part in self.parts[key].items())

    def described(self) -> RankState:
        """What other ranks have to know of it."""
        tensors = [HeldTensor(self._record(key), self.boxes(key)) for key in self.parts]
        items = []
        for key, value in self.flat.items():
            if key not in self.parts:
                pickled = pickle.dumps(value)
                extent = Extent("live", 0, len(pickled))
                items.append(HeldItem(Blob(key, tuple(self.paths[key]), extent, xxh3_128([pickled])), pickled))
        options = {
            key: float(self.flat[key])
            for key in self.parts
            if type(self.flat[key]) is Tensor and self.flat[key].numel() == 1 and "param_groups" in key
        }
        devices = frozenset(part.device.type for parts in self.parts.values() for part in parts.values())
        return RankState(tuple(tensors), tuple(items), options, devices)

    @torch.no_grad()
    def put(self, items: Mapping[str, bytes], added: Mapping[KeyPath, Any]) -> None:
        """Set what is not a tensor in the state dict that was given, and have its objects load their state.

        Args:
            items: pickled, by key.
            added: what it lacks, by path.
        """
        for key, pickled in items.items():
            set_element(self.nested, self.paths[key], pickle.loads(pickled))
        for path, value in added.items():
            set_element(self.nested, path, value)
        for key, value in self.given.items():
            if isinstance(value, Stateful):
                value.load_state_dict(self.nested[key])
            elif isinstance(self.given, dict):
                self.given[key] = self.nested[key]

    def _record(self, key: str) -> StateRecord:
        value, path = self.flat[key], tuple(self.paths[key])
        note = self.annotations.get(path, Annotation())
        return StateRecord(
            key,
            path,
            whole_shape(value),
            dtype_name(value.dtype),
            no_chunks(len(whole_shape(value))),
            note.name,
            note.slot,
            note.convention,
            note.pieces,
        )
