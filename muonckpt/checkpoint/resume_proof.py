"""The result of a load, and of a comparison with its checkpoint: plain values."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from math import copysign
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ..names.errors import warn_on_rank
from ..names.keys import PARAM_GROUPS, key_of
from ..names.resumption import MAX_GLOBS, NAMES_OF_GROUPS, as_initialised, in_short
from ..names.vocabulary import KeyPath
from ..names.wording import counted, listed
from .attestation import TensorPrint
from .live_state import LiveState
from .parameter_keys import GroupLabel, ParameterKeys

_MAX_CHARACTERS = 120
"""Characters of a value that a phrase shows."""


class Absent(Enum):
    """A value that says that there is none: None is a value that options have."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT


@dataclass(frozen=True, eq=False)
class LoadedState:
    """Values that a load has put into a template: the basis for a proof.

    Attributes:
        paths: of the template's keys, those of this rank.
        items: the values that are no tensors as the checkpoint has them, by key of the template, on this rank; and
            those of plain tensors without dims, as rates and step counts may be.
        prints: the recorded fingerprints of the tensors that were loaded on any rank, by key of the template; the first
            rank's count.
        world_size: how many processes wrote the checkpoint; None if that is not recorded.
        unloaded_keys: of the checkpoint, those that ``allow_extra`` and ``fresh`` leave there; the first rank's count.
        grown: keys of tensors that have more rows here, without a fingerprint; likewise.
        initialised: keys of weights that ``fresh`` left as they were initialised.
        frozen: names of the model's parameters that did not require gradients; None if that is not recorded.
        origins: by key, the key that it had before `by_parameter`.
    """

    paths: Mapping[str, KeyPath]
    items: Mapping[str, Any]
    prints: Mapping[str, TensorPrint]
    world_size: int | None
    unloaded_keys: tuple[str, ...]
    frozen: frozenset[str] | None
    grown: tuple[str, ...] = ()
    initialised: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        template: LiveState,
        loaded_keys: Iterable[str],
        prints: Mapping[str, TensorPrint],
        provenance: Mapping[str, Any],
        unloaded_keys: Sequence[str],
        initialised: Sequence[str],
        grown: Sequence[str],
    ) -> LoadedState:
        """Describe a load that has just put values into a template.

        Args:
            loaded_keys: the template's keys whose values came from the checkpoint.
            provenance: of the checkpoint.
        """
        values, paths = flatten_state_dict(template.nested)
        # The names in groups are the template's, by which its groups were matched with those of the checkpoint.
        names = [key for key, path in paths.items() if path[-1] in NAMES_OF_GROUPS and PARAM_GROUPS in path]
        # Values are copied, as whoever loads the state dict may change it; tensors go by their fingerprints.
        items = {}
        for key in (*loaded_keys, *names):
            value = item_of(values[key]) if key in values else None
            if key in values and not isinstance(value, Tensor):
                items[key] = value if isinstance(value, TensorElement) else deepcopy(value)
        # A resharded checkpoint was written by other processes than those that trained.
        world = provenance.get("world")
        is_original = isinstance(world, int) and not provenance.get("resharded")
        frozen = frozenset(provenance["frozen"]) if "frozen" in provenance else None
        world_size = world if is_original else None
        return cls(paths, items, prints, world_size, tuple(unloaded_keys), frozen, tuple(grown), tuple(initialised))

    def by_parameter(self, by_name: bool) -> LoadedState:
        """Return the same with the keys of `ParameterKeys`, in which groups and parameters may have other numbers."""
        keys = ParameterKeys.of(self.items, self.paths, by_name)
        items = {key: self.items[origin] for key, origin in keys.origins.items() if origin in self.items}
        # Tensors of other ranks keep their keys; those in groups are left out, as their own ranks compare them.
        new_keys: defaultdict[str, list[str]] = defaultdict(list)
        for key, origin in keys.origins.items():
            new_keys[origin].append(key)
        groups = tuple(f"{key_of((*root, PARAM_GROUPS))}." for root in keys.roots)
        prints: dict[str, TensorPrint] = {}
        for key, tensor_print in self.prints.items():
            others = [] if key.startswith(groups) else [key]
            prints |= dict.fromkeys(new_keys.get(key, others), tensor_print)
        grown = tuple(chain.from_iterable(new_keys.get(key, [key]) for key in self.grown))
        return replace(self, paths=keys.paths, items=items, prints=prints, grown=grown, origins=keys.origins)


@dataclass(frozen=True, slots=True)
class TensorElement:
    """The element of a tensor without dims, such as a rate or a step count."""

    dtype: torch.dtype
    value: float

    def __repr__(self) -> str:
        return str(np.float32(self.value)) if self.dtype == torch.float32 else repr(self.value)


def item_of(value: Any) -> Any:
    """Return a value in the form that is compared and printed: a plain tensor without dims as its element."""
    if type(value) not in (Tensor, nn.Parameter) or value.ndim or value.is_meta:
        return value
    return TensorElement(value.dtype, value.item())


@dataclass(frozen=True, slots=True)
class ResumeDifference:
    """A part of the live state that is not what was saved.

    Attributes:
        key: its key in the state dict, such as ``optimizer.param_groups.0.lr``.
        saved, live: both values, a `TensorPrint` of tensors; `ABSENT` where one side has nothing.
        parameter: for an option, the parameter whose group has it; else empty.
        group: its group now; None where options have no groups.
    """

    key: str
    saved: Any
    live: Any
    parameter: str = ""
    group: GroupLabel | None = None

    @property
    def change(self) -> str:
        """The change in words, without what has changed."""
        match self.saved, self.live:
            case TensorPrint(), TensorPrint() if self.saved.shape != self.live.shape:
                return f"shape {self.live.shape}, saved with {self.saved.shape}"
            case TensorPrint(), TensorPrint() if self.saved.dtype != self.live.dtype:
                return f"{self.live.dtype}, saved as {self.saved.dtype}"
            case TensorPrint(), TensorPrint():
                return "other elements than were saved"
            case _, Dispute():
                return self.live.phrase
            case TensorPrint(), Absent():
                return "saved, and not there now"
            case _, Absent():
                return f"saved as {_short(self.saved)}, and not there now"
            case Absent(), TensorPrint():
                return "not there when it was saved"
            case Absent(), _:
                return f"{_short(self.live)}, not there when it was saved"
            case TensorElement(dtype=saved_dtype), TensorElement(dtype=live_dtype) if saved_dtype != live_dtype:
                return f"{_short(self.saved)} as {saved_dtype} -> {_short(self.live)} as {live_dtype}"
            case (TensorElement(), other) | (other, TensorElement()) if not isinstance(other, TensorElement):
                return f"{_with_type(self.saved)} -> {_with_type(self.live)}"
        return f"{_short(self.saved)} -> {_short(self.live)}"


@dataclass(frozen=True, slots=True)
class Dispute:
    """Fingerprints of ranks that should hold one tensor alike, and do not."""

    phrase: str


def _short(value: Any) -> str:
    text = f"a tensor, {value}" if isinstance(value, TensorPrint) else repr(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 2]} …"


def _with_type(value: Any) -> str:
    """Return a value in short, which says where it is an element of a tensor."""
    return f"tensor({value})" if isinstance(value, TensorElement) else _short(value)


@dataclass(frozen=True, slots=True)
class ResumeProof:
    """The comparison of a resumed run with the checkpoint that it goes on from, the same on all ranks.

    Attributes:
        step: of the checkpoint.
        tensors, items: how many are as they were saved.
        differences: the unequal values, by key.
        unchecked: restored values that were not given to the check, values that began from zero, and options of the
            code.
        ranks_saved, ranks: how many processes wrote the checkpoint, None if that is not recorded, and how many run now.
        initialised: keys of weights that were not loaded, as the checkpoint lacks them and ``fresh`` names them.
    """

    step: int
    tensors: int
    items: int
    differences: tuple[ResumeDifference, ...]
    unchecked: tuple[str, ...] = ()
    ranks_saved: int | None = None
    ranks: int = 1
    initialised: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def lines(self) -> tuple[str, ...]:
        """A phrase for each kind of difference: parameters of many layers are one."""
        # Differences of one kind are one entry, by the words that they have in common.
        options: defaultdict[tuple[str, str, GroupLabel | None], list[str]] = defaultdict(list)
        keys: defaultdict[str, list[str]] = defaultdict(list)
        disputes: list[str] = []
        for difference in self.differences:
            if isinstance(difference.live, Dispute):
                disputes.append(f"{difference.key}: {difference.change}")
            elif difference.parameter:
                option = difference.key.rpartition(".")[2]
                options[option, difference.change, difference.group].append(difference.parameter)
            else:
                keys[difference.change].append(difference.key)
        # Options come first, then whole values, then disputes among ranks.
        phrases = []
        for (option, change, group), names in options.items():
            is_whole_group = group is not None and len(names) == group.num_parameters
            phrases.append(f"{option} {change} in {group.text if group and is_whole_group else in_short(names)}")
        for change, members in keys.items():
            phrases.append(f"{in_short(members)}: {change}")
        if disputes:
            phrases.append(listed(disputes, MAX_GLOBS, "; "))
        return tuple(phrases)

    def __str__(self) -> str:
        unchecked = f"; not checked: {', '.join(self.unchecked)}" if self.unchecked else ""
        equal = f"{counted(self.tensors, 'tensor')} and {counted(self.items, 'other value')} are as they were saved"
        ranks = "" if self.ranks_saved is None else f"saved on {counted(self.ranks_saved, 'rank')}, now {self.ranks}, "
        initialised = ""
        if weights := self.initialised:
            initialised = f"{as_initialised(len(weights))}: {in_short(weights)}; "
        resumed = f"{initialised}resumed from step {self.step}, {ranks}"
        if self.equal and not self.tensors and self.unchecked:
            return f"{resumed}with nothing to prove: no tensor that runs now was loaded{unchecked}"
        if self.equal:
            return f"{resumed}proved: {equal}{unchecked}"
        return f"{resumed}not as it was saved: {'; '.join(self.lines)}; {equal}{unchecked}"

    def show(self) -> None:
        """Print the line, or warn of it if something is not as it was saved."""
        if self.equal:
            print(self, flush=True)
        else:
            warn_on_rank(str(self))

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "tensors": self.tensors,
            "items": self.items,
            "differences": [*self.lines],
            "unchecked": [*self.unchecked],
            "initialised": len(self.initialised),
        }


def same_value(value: Any, other: Any) -> bool:
    """Return whether two values of a state dict are the same, bit for bit where they are numbers or arrays.

    Lists and tuples are the same, because a format may keep either, and so are two NaN.
    """
    match value, other:
        case Mapping(), Mapping():
            return value.keys() == other.keys() and all(same_value(value[key], other[key]) for key in value)
        case (list() | tuple(), list() | tuple()):
            return len(value) == len(other) and all(map(same_value, value, other))
        case Tensor(), Tensor():
            is_alike = value.dtype == other.dtype and value.shape == other.shape
            return is_alike and torch.equal(
                *(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in (value, other))
            )
        case np.ndarray(), np.ndarray():
            return value.dtype == other.dtype and value.shape == other.shape and value.tobytes() == other.tobytes()
        case (bool(), _) | (_, bool()):
            return value is other
        case (int() | float(), int() | float()):
            return (value == other and copysign(1, value) == copysign(1, other)) or (value != value and other != other)
        case TensorElement(), TensorElement():
            return value.dtype == other.dtype and same_value(value.value, other.value)
    return type(value) is type(other) and (value == other or pickle.dumps(value) == pickle.dumps(other))
