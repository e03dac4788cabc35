"""A rank's share of a nested state dict has one description, for saving, loading, attesting and redistributing.

`LiveState` has the elements, and `RankState` tells other ranks of them; `joint_state` joins what ranks tell.
"""

from __future__ import annotations

import os
import pickle
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.stateful import Stateful

from ..algebra.box import Box, Index
from ..algebra.overlap import IntArray
from ..layouts.boxed_tensor import Parts, parts_of, whole_shape
from ..layouts.mesh import MeshPlacement
from ..layouts.tensors import mesh_placement_of
from ..names.errors import ArgumentError, LayoutError, MuonckptError, about
from ..names.keys import NamedOptimizer, OptimizerKey, key_of, named_optimizers, numbered_optimizers, slots_of
from ..names.resumption import STATE_DICT, STATE_LINE
from ..names.vocabulary import MOMENTUM, ZERO_SLOTS, Convention, KeyPath
from ..record.chunks import Chunks, no_chunks
from ..record.record import StateRecord
from .bits import dtype_name
from .storable import digest_of_object


@dataclass(frozen=True, slots=True)
class Annotation:
    """Fields of a `record.StateRecord` that an optimizer knows of the slots of a group, and DCP's metadata lack."""

    slot: str | None = None
    convention: Convention | None = None
    pieces: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """The description that the tensors of a rank share which it holds alike, as layers repeat.

    Attributes:
        placement: where mesh and placements describe the tensors.
    """

    dtype: str
    shape: Index
    note: Annotation
    placement: MeshPlacement | None = None


@dataclass(frozen=True)
class RankForm:
    """The common facts of ranks that hold the same keys: everything but their boxes.

    Attributes:
        numbers: index of each key's kind in ``kinds``, where None means an object that is not a tensor.
        paths, names: each key's path in the nested state dict, and the parameter's name if known.
        optimizers: those that have parameter groups, which `with_joint_groups` knows by the names in them.
    """

    keys: tuple[str, ...]
    numbers: tuple[int, ...]
    kinds: tuple[ShardSpec | None, ...]
    paths: tuple[KeyPath, ...] = ()
    names: tuple[str | None, ...] = ()
    optimizers: tuple[NamedOptimizer, ...] = ()

    def renumbered(self, numbers: Mapping[str, Sequence[int]]) -> RankForm:
        """Return the form with other numbers for parameter groups, by the beginning of the keys of their options."""
        keys, paths = list(self.keys), list(self.paths)
        for place, key in enumerate(self.keys):
            for options in filter(key.startswith, numbers):
                # The number follows this prefix in the key, and at that depth in the path.
                former, _, option = key.removeprefix(options).partition(".")
                number = numbers[options][int(former)]
                keys[place] = f"{options}{number}.{option}"
                if path := self.paths and self.paths[place]:
                    # A part of a path may have dots.
                    depth = next(depth for depth in range(len(path)) if f"{key_of(path[:depth])}." == options)
                    paths[place] = (*path[:depth], number, *path[depth + 1 :])
        return replace(self, keys=tuple(keys), paths=tuple(paths), optimizers=())


@lru_cache(maxsize=1024)
def _unpickled_form(pickled: bytes) -> RankForm:
    """Return a form that many ranks have sent, which is one object for all of them."""
    return _shared_form(pickle.loads(pickled))


@lru_cache(maxsize=1024)
def _shared_form(form: RankForm) -> RankForm:
    return form


def _rank_state(form: bytes, counts: bytes, corners: bytes) -> RankState:
    return RankState(_unpickled_form(form), counts, corners)


@dataclass(frozen=True)
class RankState:
    """The description of a rank's state for others, a few bytes for each key.  Equal ones are saved alike.

    An *item* is a box, or an object that is not a tensor; items are numbered in the order of keys and boxes.

    Attributes:
        counts: the number of boxes of each kind.
        corners: of the boxes of all kinds in order, ``lo`` and ``hi`` of each.  Both are 64-bit integers, as bytes.
    """

    form: RankForm
    counts: bytes
    corners: bytes

    @classmethod
    def of(cls, form: RankForm, boxes_by_kind: Sequence[Sequence[Box]]) -> RankState:
        corners = [number for box in chain.from_iterable(boxes_by_kind) for number in (*box.lo, *box.hi)]
        counts = [*map(len, boxes_by_kind)]
        return cls(form, np.array(counts, np.int64).tobytes(), np.array(corners, np.int64).tobytes())

    def __reduce__(self) -> tuple[Any, ...]:
        return _rank_state, (pickle.dumps(self.form), self.counts, self.corners)

    @cached_property
    def boxes_by_kind(self) -> tuple[tuple[Box, ...], ...]:
        """The boxes of each kind; none of an object."""
        corners = [(map(tuple, lo[0].tolist()), map(tuple, hi[0].tolist())) for lo, hi in corners_by_kind([self])]
        return tuple(tuple(map(Box, *of_kind)) for of_kind in corners)

    def boxes(self, keys: Collection[str]) -> RankState:
        """Return where the tensors of some keys are, without paths and names."""
        numbers, has_options = {}, False
        prefixes = tuple(optimizer.options for optimizer in self.form.optimizers)
        for key, number in zip(self.form.keys, self.form.numbers, strict=True):
            if self.form.kinds[number] is not None:
                has_options |= key.startswith(prefixes)
                if key in keys:
                    numbers[key] = number
        # Groups are compared by ranks only where tensors of options go along.
        optimizers = self.form.optimizers if has_options else ()
        form = RankForm(tuple(numbers), tuple(numbers.values()), self.form.kinds, optimizers=optimizers)
        return replace(self, form=form)

    @cached_property
    def boxes_by_key(self) -> Mapping[str, tuple[Box, ...]]:
        return dict(zip(self.form.keys, map(self.boxes_by_kind.__getitem__, self.form.numbers), strict=True))

    def records(self) -> Iterator[StateRecord]:
        """Yield the record of each tensor, without chunks."""
        form = self.form
        for key, number, path, name in zip(form.keys, form.numbers, form.paths, form.names, strict=True):
            if (kind := form.kinds[number]) is not None:
                yield record_of(key, path, name, kind)

    def first_items(self) -> list[int]:
        """Return the number of each key's first item, and how many items there are."""
        counts = np.frombuffer(self.counts, np.int64) + np.array([kind is None for kind in self.form.kinds], np.int64)
        return [0, *np.cumsum(counts[np.array(self.form.numbers, np.int64)]).tolist()]


def corners_by_kind(states: Sequence[RankState]) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield the corners of boxes, ``lo`` and ``hi`` of shape ``[states, boxes, ndim]``, for each kind.

    The states have one form, and as many boxes of each kind.
    """
    corners = np.frombuffer(b"".join(state.corners for state in states), np.int64).reshape(len(states), -1)
    start = 0
    for kind, count in zip(states[0].form.kinds, np.frombuffer(states[0].counts, np.int64).tolist(), strict=True):
        ndim = 0 if kind is None else len(kind.shape)
        stop = start + 2 * count * ndim
        pairs = corners[:, start:stop].reshape(len(states), count, 2, ndim)
        yield pairs[:, :, 0], pairs[:, :, 1]
        start = stop


def record_of(
    key: str,
    path: KeyPath,
    name: str | None,
    kind: ShardSpec,
    chunks: Chunks | None = None,
    fingerprint: str | None = None,
) -> StateRecord:
    """Return the record of a tensor, without chunks if none are given."""
    note, shape = kind.note, kind.shape
    chunks = no_chunks(len(shape)) if chunks is None else chunks
    layout = kind.placement.to_json() if kind.placement else None
    annotations = name, note.slot, note.convention, note.pieces, layout
    return StateRecord(key, path, shape, kind.dtype, chunks, *annotations, fingerprint)


@dataclass(frozen=True, slots=True, eq=False)
class LocalParts:
    """The boxes of a tensor that are here, and their elements, which plans count end to end, box after box."""

    boxes: tuple[Box, ...]
    parts: tuple[Tensor, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, boxes: Sequence[Box], parts: Iterable[Tensor]) -> LocalParts:
        starts = (0,) if len(boxes) == 1 else tuple(accumulate((box.numel for box in boxes), initial=0))[:-1]
        return cls(tuple(boxes), tuple(parts), starts)

    def view(self, offset: int, lo: Index, hi: Index) -> Tensor:
        """Return the elements of a box inside the part with the offset."""
        number = bisect_right(self.starts, offset) - 1
        box = self.boxes[number]
        if lo == box.lo and hi == box.hi:
            return self.parts[number]
        origin = box.lo
        return self.parts[number][tuple(slice(a - at, b - at) for a, b, at in zip(lo, hi, origin, strict=True))]


NO_PARTS = LocalParts((), (), ())
"""The parts of a tensor that has no elements here."""

Item = tuple[str, Index | None]
"""A key, and the first index of the tensor's box; None for an object that is not a tensor."""

Digests = Mapping[int, bytes]
"""Digests of a rank's objects that are not tensors, by the numbers of items: equal objects have equal ones."""


@dataclass(frozen=True, eq=False)
class LiveState:
    """A nested state dict, made flat as DCP does it.

    Attributes:
        state_dict: the user's; ``nested`` has the state of its objects in their place.
        flat, paths: by key.
        optimizers: those whose parameters have names.
        rows: of some tensors, how many of the first rows this is about, by key.
    """

    state_dict: Mapping[str, Any]
    nested: dict[str, Any]
    flat: Mapping[str, Any]
    paths: Mapping[str, KeyPath] = field(repr=False)
    optimizers: tuple[NamedOptimizer, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, state_dict: Mapping[str, Any], purpose: str) -> LiveState:
        """Make a state dict flat; raises as `nested_state`, and if two parts of it would have one key."""
        nested = nested_state(state_dict, purpose)
        try:
            return cls(state_dict, nested, *flatten_state_dict(nested), tuple(named_optimizers(nested)))
        except ValueError as error:  # torch's, which ends with the key
            key = str(error).removeprefix("duplicated flatten key ")
            raise ArgumentError(
                f"two parts of the state dict {purpose} have the key {key!r}, because names and numbers on the way to "
                "a value are joined by dots: rename one"
            ) from error

    @cached_property
    def numbered(self) -> tuple[str, ...]:
        """The keys of optimizers whose parameters have numbers: they are matched by key."""
        return tuple(numbered_optimizers(self.nested))

    @cached_property
    def slots(self) -> Mapping[KeyPath, tuple[str, Annotation]]:
        """The slots of optimizers by path, as DCP makes paths: the parameter's name, and the annotation."""
        slots: dict[KeyPath, tuple[str, Annotation]] = {}
        annotations: dict[object, Annotation] = {}
        for path, name, slot, group in _slots_below((), self.nested):
            # Parameters of a group, and layers, share one annotation for each slot.
            pieces = group.get("pieces")
            # Another program's option of this name may be anything.
            if not isinstance(pieces, list | tuple) or any(type(rows) is not int for rows in pieces):
                pieces = ()
            convention = str(group.get("convention"))
            facts = slot, convention, tuple(pieces)
            if facts not in annotations:
                # Only momentum has the convention that its group declares.
                declared = Convention(convention) if slot == MOMENTUM and convention in {*Convention} else None
                annotations[facts] = Annotation(slot, declared, tuple(pieces) or None)
            slots[path] = name, annotations[facts]
        return slots

    def convention(self, path: KeyPath) -> Convention | None:
        """Return the convention of the momentum at a path, where an optimizer declares it."""
        _, note = self.slots.get(path, _NO_SLOT)
        return note.convention

    @cached_property
    def parts(self) -> dict[str, Parts]:
        """The boxes of each tensor that are here, by key.

        Raises:
            LayoutError: nothing says where a tensor is, or it is on the meta device; names it.
        """
        parts, key = {}, ""
        try:
            for key, value in self.flat.items():
                if isinstance(value, Tensor):
                    if value.is_meta:
                        raise LayoutError("it is on the meta device and has no elements: materialise it")
                    parts[key] = _parts_within(parts_of(value), 0, self.rows.get(key))
        except MuonckptError:
            with about(f"tensor {key!r}"):
                raise
        return parts

    @cached_property
    def described(self) -> RankState:
        """The description for other ranks; raises as ``parts``, and if a box has another dtype than its tensor."""
        # Layers repeat, so a model of many tensors has few kinds: others receive the kinds, and a number for each key.
        kinds: dict[object, int] = {None: 0}
        distinct: list[ShardSpec | None] = [None]
        boxes_by_kind: list[list[Box]] = [[]]
        numbers, names = [], list[str | None]()
        for key, value in self.flat.items():
            parts = self.parts.get(key)
            if parts is None:
                numbers.append(0)
                names.append(None)
                continue
            name, note = self.slots.get(self.paths[key], _NO_SLOT)
            local_boxes = tuple([(lo, part.shape, part.dtype) for lo, part in parts.items()])
            # Tensors share annotations, which are known by their identity, and mostly placements.
            placement, shape = mesh_placement_of(value), whole_shape(value)
            if key in self.rows:
                placement, shape = None, (self.rows[key], *shape[1:])
            number = kinds.setdefault((value.dtype, shape, local_boxes, id(note), id(placement)), len(kinds))
            # A kind that is new: its boxes are checked once for all tensors that have them.
            if number == len(distinct):
                boxes = []
                for lo, size, dtype in local_boxes:
                    boxes.append(Box.of(tuple(size)).shift(lo))
                    if dtype != value.dtype:
                        raise LayoutError(f"tensor {key!r}: box {boxes[-1]} is {dtype}, the tensor is {value.dtype}")
                boxes_by_kind.append(boxes)
                distinct.append(ShardSpec(dtype_name(value.dtype), shape, note, placement))
            numbers.append(number)
            names.append(name)
        # Optimizers without groups have nothing that ranks could number differently.
        grouped = tuple(optimizer for optimizer in self.optimizers if optimizer.groups is not None)
        keys, paths = tuple(self.flat), tuple(map(self.paths.__getitem__, self.flat))
        form = RankForm(keys, tuple(numbers), tuple(distinct), paths, tuple(names), grouped)
        return RankState.of(form, boxes_by_kind)

    def known_as(self, state: RankState) -> LiveState:
        """Return the same with the keys and paths of a state, which is ``described`` with other numbers of groups."""
        flat = dict(zip(state.form.keys, self.flat.values(), strict=True))
        paths = dict(zip(state.form.keys, state.form.paths, strict=True))
        return LiveState(self.state_dict, self.nested, flat, paths)

    @cached_property
    def items(self) -> list[Item]:
        """The items, by their numbers in ``described``."""
        items: list[Item] = []
        for key in self.flat:
            items += [(key, lo) for lo in self.parts.get(key, (None,))]
        return items

    @cached_property
    def digests(self) -> Digests:
        """The digests of objects that are not tensors, by the numbers of items."""
        digests = {}
        for number, (key, lo) in enumerate(self.items):
            if lo is None:
                digests[number] = digest_of_object(self.flat[key])
        return digests

    def local(self, key: str) -> LocalParts:
        """Return the elements of a tensor that are here."""
        parts = self.parts.get(key)
        return LocalParts.of(self.described.boxes_by_key[key], parts.values()) if parts else NO_PARTS

    @property
    def devices(self) -> frozenset[str]:
        parts = chain.from_iterable(parts.values() for parts in self.parts.values())
        return frozenset(part.device.type for part in parts)

    @torch.no_grad()
    def zero(self, keys: Iterable[str]) -> None:
        for key in keys:
            for part in self.parts.get(key, {}).values():
                part.zero_()

    def cut_to(self, rows: Mapping[str, int]) -> LiveState:
        """Return the same with the first rows alone of some tensors."""
        return replace(self, rows=rows) if rows else self

    @torch.no_grad()
    def zero_new_rows(self) -> None:
        """Set the state that is in no row of this to zeros; weights stay as they are."""
        for key, rows in self.rows.items():
            path = self.paths[key]
            if path in self.slots or any(slot.leaf in ZERO_SLOTS for slot in OptimizerKey.of_slot(path)):
                for part in _parts_within(parts_of(self.flat[key]), rows, None).values():
                    part.zero_()

    @torch.no_grad()
    def put(self, values: Mapping[str, Any], added: Mapping[KeyPath, Any]) -> None:
        """Set values by key, and added ones by path, in the state dict that was given; its objects load them."""
        # Values that have a place go there; the user's containers stay the same objects.
        keys_of: dict[int, dict[str, Any]] = {}
        for key, value in values.items():
            node: Any = self.nested
            for depth, part in enumerate(self.paths[key], 1):
                if isinstance(node, Mapping) and part not in node:  # paths have numbers as strings
                    keys_of[id(node)] = names = keys_of.get(id(node)) or {str(each): each for each in node}
                    part = names[str(part)]
                if depth == len(self.paths[key]):
                    node[part] = value
                else:
                    node = node[part]
        # Added ones make their place.
        for path, value in added.items():
            set_element(self.nested, path, value)
        # Only now is the state of an object complete, so that it can load it in one call.
        for key, value in self.state_dict.items():
            if isinstance(value, Stateful):
                value.load_state_dict(_copy_containers(self.nested[key]))  # some take parts out, as CyclicLR
            elif isinstance(self.state_dict, dict):
                self.state_dict[key] = self.nested[key]


def _parts_within(parts: Parts, start: int, stop: int | None) -> Parts:
    """Return what parts of a tensor have in these rows, as views."""
    if start == 0 and stop is None:
        return parts
    within = {}
    for lo, part in parts.items():
        first = max(start, lo[0])
        last = lo[0] + part.shape[0] if stop is None else min(stop, lo[0] + part.shape[0])
        if first < last:
            within[first, *lo[1:]] = part.narrow(0, first - lo[0], last - first)
    return within


def _copy_containers(value: Any) -> Any:
    """Return copies of nested dicts and lists, with the same values."""
    match value:
        case dict():
            copied = copy(value)  # with attributes, such as the metadata of a module's state dict
            for key, part in value.items():
                copied[key] = _copy_containers(part)
            return copied
        case list():
            return [*map(_copy_containers, value)]
    return value


def nested_state(state_dict: Mapping[str, Any], purpose: str) -> dict[str, Any]:
    """Return a state dict with the state of its objects in their place; errors name the purpose, as "to save"."""
    refuse_no_state_dict(state_dict, purpose)
    nested = dict(state_dict)
    for key in sorted(nested, key=str):  # in one order on all ranks: some objects communicate when they are asked
        # Whether an object follows a protocol is slow to tell, and tensors do not.
        if type(nested[key]) is not Tensor and isinstance(nested[key], Stateful):
            nested[key] = nested[key].state_dict()
        if _is_deeper(nested[key], _MOST_CONTAINERS):
            raise ArgumentError(
                f"{key!r} of the state dict {purpose} has a container that contains itself, or more than "
                f"{_MOST_CONTAINERS} containers inside one another: leave it out, or save its values in fewer"
            )
    return nested


_MOST_CONTAINERS = 100
"""How many may be inside one another: with many more, Python's stack ends a walk, that of a reader first."""


def _is_deeper(value: object, levels: int) -> bool:
    """Return whether more containers than this are inside one another, as those that contain themselves are."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    # Tensors, the most by far, cost no call.
    return any(
        isinstance(part, (dict, list, tuple)) and (levels == 1 or _is_deeper(part, levels - 1)) for part in parts
    )


def refuse_no_state_dict(value: object, purpose: str) -> None:
    if not isinstance(value, Mapping):
        swapped = isinstance(value, str | os.PathLike)
        order = "; the state dict is the first argument, and the path comes after it"
        line = f". Write {STATE_LINE}, and give {STATE_DICT}"
        raise ArgumentError(
            f"expected a state dict {purpose}, found {type(value).__name__}{order if swapped else line}"
        )


# --- Slots in a nested state dict -------------------------------------------------------------------------------------

_NO_SLOT: tuple[None, Annotation] = (None, Annotation())


def _slots_below(path: KeyPath, node: Any) -> Iterator[tuple[KeyPath, str, str, Mapping[str, Any]]]:
    """Yield path, parameter, slot and group of the state of optimizers at or below a path; inner optimizers come last.

    Paths are those of DCP: keys as strings, positions in lists as integers.
    """
    children: Iterable[tuple[Any, Any]] = enumerate(node)
    slots_root: object = None
    if isinstance(node, Mapping):
        for place, name, slot, group in slots_of(node):
            slots_root = place[0]
            yield (*path, *place), name, slot, group
        children = node.items()
    # The slots of a parameter are no optimizers themselves.
    for part, value in children:
        if part != slots_root and isinstance(value, Mapping | list):
            yield from _slots_below((*path, part if isinstance(node, list) else str(part)), value)
