"""The proof that a resumed run goes on from what was saved: what will run, compared with what was loaded, exactly.

`LoadedState` remembers what a load took from a checkpoint; `live_state_dict` finds the same parts in a live model, its
optimizers and scheduler; `compare` compares both on all ranks: tensors by fingerprint, everything else by value.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.optim import Optimizer

from ..names.errors import ArgumentError, AttestError
from ..names.keys import PARAM_GROUPS, OptimizerKey
from ..names.resumption import NAMES_OF_GROUPS, in_globs
from ..names.vocabulary import PARAMS, SCHEDULED, KeyPath
from ..names.wording import counted, listed
from .all_ranks import decide_on_first, group_ranks, refuse_crossed
from .attestation import SharesOfRank, TensorPrint, held_together, shares_of
from .live_state import LiveState
from .storable import refuse_unwritable

_MAX_GLOBS = 4
"""Patterns of names that a phrase lists."""

_MAX_CHARACTERS = 120
"""Of a value, in a phrase."""


@dataclass(frozen=True, eq=False)
class LoadedState:
    """What a load has put where: the basis for a proof.

    Attributes:
        paths: of the template's keys, those of this rank.
        items: the values that are no tensors as the checkpoint has them, by key of the template, on this rank.
        prints: the recorded fingerprints of the tensors that were loaded on any rank, by key of the template; the first
            rank's count.
        world_size: how many processes wrote the checkpoint; None if that is not recorded.
    """

    paths: Mapping[str, KeyPath]
    items: Mapping[str, Any]
    prints: Mapping[str, TensorPrint]
    world_size: int | None

    @classmethod
    def of(
        cls,
        template: LiveState,
        loaded_keys: Iterable[str],
        prints: Mapping[str, TensorPrint],
        provenance: Mapping[str, Any],
    ) -> LoadedState:
        """Describe a load that has just put values into a template.

        Args:
            loaded_keys: the template's keys whose values came from the checkpoint.
            provenance: of the checkpoint.
        """
        values, paths = flatten_state_dict(template.nested)
        # The names in groups are the template's, by which its groups were matched with those of the checkpoint.
        names = [key for key, path in paths.items() if path[-1] in NAMES_OF_GROUPS and PARAM_GROUPS in path]
        keys = [key for key in (*loaded_keys, *names) if key in values and not isinstance(values[key], Tensor)]
        items = {key: deepcopy(values[key]) for key in keys}  # whoever loads the state dict may change them
        world = provenance.get("world")
        is_original = isinstance(world, int) and not provenance.get("resharded")
        return cls(paths, items, prints, world if is_original else None)


@dataclass(frozen=True, slots=True)
class ResumeDifference:
    """A part of the live state that is not what was saved.

    Attributes:
        key: its key in the state dict, such as ``optimizer.param_groups.0.lr``.
        saved, live: both values, a `TensorPrint` of tensors; None where one side has nothing.
        group: of an option, its parameter group in words; empty where groups have no numbers.
        parameter: the parameter whose option it is there; else empty.
    """

    key: str
    saved: Any
    live: Any
    group: str = ""
    parameter: str = ""

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
            case _, None:
                return "saved, and not there now"
            case None, _:
                return "not there when it was saved"
        return f"{_short(self.saved)} -> {_short(self.live)}"


def _short(value: Any) -> str:
    text = f"a tensor, {value}" if isinstance(value, TensorPrint) else repr(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 2]} …"


@dataclass(frozen=True, slots=True)
class ResumeProof:
    """The comparison of a resumed run with the checkpoint that it goes on from, the same on all ranks.

    Attributes:
        step: of the checkpoint.
        tensors, items: how many are as they were saved.
        differences: what is not, by key.
        unchecked: what was restored and not given to the check, and what cannot be compared, as it began anew.
    """

    step: int
    tensors: int
    items: int
    differences: tuple[ResumeDifference, ...]
    unchecked: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def lines(self) -> tuple[str, ...]:
        """A phrase for each kind of difference: parameters of many layers are one."""
        options: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
        keys: defaultdict[str, list[str]] = defaultdict(list)
        for difference in self.differences:
            if difference.group or difference.parameter:
                option = difference.key.rpartition(".")[2]
                options[option, difference.change, difference.group].append(difference.parameter)
            else:
                keys[difference.change].append(difference.key)
        return (
            *(
                f"{option} {change} in {group or _in_short(names)}"
                for (option, change, group), names in options.items()
            ),
            *(f"{_in_short(members)}: {change}" for change, members in keys.items()),
        )

    def __str__(self) -> str:
        unchecked = f"; not checked: {', '.join(self.unchecked)}" if self.unchecked else ""
        equal = f"{counted(self.tensors, 'tensor')} and {counted(self.items, 'other value')} are as they were saved"
        if self.equal:
            return f"resumed from step {self.step}, proved: {equal}{unchecked}"
        return f"resumed from step {self.step}, not as it was saved: {'; '.join(self.lines)}; {equal}{unchecked}"

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "tensors": self.tensors,
            "items": self.items,
            "differences": [*self.lines],
            "unchecked": [*self.unchecked],
        }


def _in_short(names: Sequence[str]) -> str:
    """Return names as globs, the first of them, and how many names there are where globs stand for several."""
    globs = in_globs(names, ())
    return f"{listed(globs, _MAX_GLOBS)}{f' ({len(names)})' if len(names) > len(globs) else ''}"


# --- The state dict of what will run ----------------------------------------------------------------------------------


def live_state_dict(
    loaded: LoadedState, model: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the state of a model, its optimizers and a scheduler, where the template had them.  Collective.

    Each of them is asked for its state in the form that the template has, and lies where that state's keys are in the
    template: nothing is told by names such as "model".

    Returns:
        The state dict, and the names of weights that were not restored, as where only trained ones are saved.

    Raises:
        ArgumentError: the template has no such state, or in several places.
    """
    template = _Template(loaded.paths.values())
    # The model, without weights that are in no template: nothing is known of these.
    weights = template.place("the model", [get_model_state_dict(model), model.state_dict()])
    restored_weights = {name: value for name, value in weights.state.items() if (*weights.root, name) in template}
    places = [replace(weights, state=restored_weights)]
    # Several optimizers may have been saved as one, by get_state_dict(model, [one, other]), or each at its key.
    together = _optimizer_forms(loaded, model, optimizers) if optimizers else []
    if len(optimizers) > 1 and not any(place.lacking == 0 for place in template.best_places(together)):
        for number, optimizer in enumerate(optimizers):
            places.append(template.place(f"optimizer {number}", _optimizer_forms(loaded, model, [optimizer])))
    elif optimizers:
        places.append(template.place("the optimizer", together))
    if scheduler is not None:
        places.append(template.place("the scheduler", [scheduler.state_dict()]))
    nested: dict[str, Any] = {}
    for place in places:
        for part, value in place.state.items():
            set_element(nested, (*place.root, part), value)
    return nested, tuple(sorted(weights.state.keys() - restored_weights.keys()))


def _optimizer_forms(loaded: LoadedState, model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Mapping[str, Any]]:
    """Return the state of optimizers in the forms that the template has; of others an optimizer may know nothing."""
    forms: list[Mapping[str, Any]] = []
    members = [value for key, value in loaded.items.items() if loaded.paths[key][-1] == PARAMS and value]
    if any(isinstance(params[0], str) for params in members):
        forms.append(get_optimizer_state_dict(model, optimizers))
    if any(key.place.flat for path in loaded.paths.values() for key in OptimizerKey.of_option(path)):
        flattened = StateDictOptions(flatten_optimizer_state_dict=True)
        forms.append(get_optimizer_state_dict(model, optimizers, options=flattened))
    if len(optimizers) == 1 and any(isinstance(params[0], int) for params in members):
        forms.append(optimizers[0].state_dict())
    return forms


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a state lies in the template: under ``root``; ``lacking`` of its keys are not there."""

    root: KeyPath
    state: Mapping[str, Any]
    lacking: int


class _Template:
    """The paths of a template, by what they end with."""

    def __init__(self, paths: Iterable[KeyPath]) -> None:
        self._paths = {tuple(path) for path in paths}
        self._roots_by_length: dict[int, dict[KeyPath, list[KeyPath]]] = {}

    def __contains__(self, path: KeyPath) -> bool:
        return path in self._paths

    def best_places(self, forms: Sequence[Mapping[str, Any]]) -> list[_Place]:
        """Return the places that have the most keys of a state, in whichever of its forms; none if none has any."""
        matches: list[tuple[int, _Place]] = []
        for state in forms:
            _, paths = flatten_state_dict(dict(state))
            counts: Counter[KeyPath] = Counter()
            for path in paths.values():
                counts.update(self._roots(tuple(path)))
            matches += [(count, _Place(root, state, len(paths) - count)) for root, count in counts.items()]
        most = max((count for count, _ in matches), default=0)
        # Of two forms that fit one place equally, either will do.
        return [*{place.root: place for count, place in matches if count == most}.values()]

    def place(self, name: str, forms: Sequence[Mapping[str, Any]]) -> _Place:
        """Return the one place of a state.

        Raises:
            ArgumentError: there is none, or there are several.
        """
        places = self.best_places(forms)
        if not places:
            raise ArgumentError(
                f"nothing that was restored has the keys of {name}: give check what was in the state dict of restore, "
                "or compare the state dict itself, taken anew: restored.compare(state_dict)"
            )
        if len(places) > 1:
            roots = " and ".join(repr(".".join(map(str, place.root))) for place in places)
            raise ArgumentError(
                f"{name} may be any of {roots} of what was restored: compare the state dict itself, with each at its "
                "key: restored.compare(state_dict)"
            )
        return places[0]

    def _roots(self, ending: KeyPath) -> list[KeyPath]:
        """Return what stands before this ending in paths of the template."""
        length = len(ending)
        if length not in self._roots_by_length:
            roots: defaultdict[KeyPath, list[KeyPath]] = defaultdict(list)
            for path in sorted(self._paths, key=str):
                if len(path) >= length:
                    cut = len(path) - length
                    roots[path[cut:]].append(path[:cut])
            self._roots_by_length[length] = dict(roots)
        return self._roots_by_length[length].get(ending, [])


# --- The comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RankAnswer:
    """A rank's part of the comparison.

    Attributes:
        shares: of the fingerprints of its tensors.
        differences: between values that are no tensors.
        equal_items: how many of these are as they were saved.
        live_keys, template_keys: all keys of the state dict, and of the template.
        unrestored: names of weights that were not restored.
    """

    shares: SharesOfRank
    differences: tuple[ResumeDifference, ...]
    equal_items: int
    live_keys: frozenset[str]
    template_keys: frozenset[str]
    unrestored: frozenset[str]


def compare(
    loaded: LoadedState,
    state_dict: Mapping[str, Any],
    unrestored: Sequence[str],
    step: int,
    process_group: dist.ProcessGroup | None,
) -> ResumeProof:
    """Compare a state dict with what was loaded, on all ranks.  Collective; changes nothing.

    Args:
        unrestored: names of weights that are not in the state dict because they were not restored.

    Raises:
        AttestError: ranks that hold the same box of a tensor hold different elements.
        LayoutError: nobody holds some elements of a tensor.
    """
    refuse_crossed(process_group, "Restored.check")

    def answer() -> _RankAnswer:
        live = LiveState.of(state_dict, "to check")
        for key, value in live.flat.items():
            if isinstance(value, Tensor):
                refuse_unwritable(key, value)
        differences = tuple(_item_differences(loaded, live))
        equal_items = len(loaded.items.keys() & live.flat.keys() - {each.key for each in differences})
        live_keys, template_keys = frozenset(live.flat), frozenset(loaded.paths)
        shares = shares_of(live, live.parts)
        return _RankAnswer(shares, differences, equal_items, live_keys, template_keys, frozenset(unrestored))

    def decide(answers: list[_RankAnswer]) -> ResumeProof:
        held = held_together(group_ranks(process_group), [each.shares for each in answers])
        if held.faults:
            raise AttestError(f"live state differs from rank to rank: {'; '.join(held.faults)}")
        live_keys = frozenset[str]().union(*(each.live_keys for each in answers))
        template_keys = frozenset[str]().union(*(each.template_keys for each in answers))
        live_roots = {_root(key) for key in live_keys}
        # Values, of whichever rank has them.
        differences = {each.key: each for one in answers for each in one.differences}
        # Tensors: those that were loaded have to be there, with the elements that they had.
        for key, saved in loaded.prints.items():
            live = held.tensors.get(key)
            if key not in differences and live != saved and (live is not None or _root(key) in live_roots):
                differences[key] = ResumeDifference(key, saved, live)
        # Tensors that were not loaded: they began anew, or are of no state that was restored.
        new_keys = held.tensors.keys() - loaded.prints.keys() - differences.keys()
        for key in new_keys - template_keys:
            differences[key] = ResumeDifference(key, None, held.tensors[key])
        unchecked = sorted({_root(key) for key in template_keys} - live_roots)
        if anew := sorted(new_keys & template_keys):
            unchecked.append(f"{_in_short(anew)}, which began anew, or have no recorded fingerprint")
        if names := sorted(frozenset[str]().union(*(each.unrestored for each in answers))):
            unchecked.append(f"{_in_short(names)}, which the checkpoint does not have")
        return ResumeProof(
            step,
            len(loaded.prints.keys() & held.tensors.keys() - differences.keys()),
            max(each.equal_items for each in answers),
            tuple(differences[key] for key in sorted(differences)),
            tuple(unchecked),
        )

    return decide_on_first(process_group, AttestError, answer, decide)


def _root(key: str) -> str:
    return key.partition(".")[0]


def _item_differences(loaded: LoadedState, live: LiveState) -> Iterator[ResumeDifference]:
    """Yield the values that are no tensors, on one side at least, and not the same on this rank."""
    live_roots = {_root(key) for key in live.flat}
    for key, saved in loaded.items.items():
        if key in live.flat:
            value = live.flat[key]
            if isinstance(value, Tensor):
                yield _difference(live, key, saved, f"a tensor, {value.dtype}")
            elif not same_value(saved, value):
                yield _difference(live, key, saved, value)
        elif _root(key) in live_roots:
            yield ResumeDifference(key, saved, None)
    for key, value in live.flat.items():
        # An option that a scheduler writes for itself, as it is made, changes no step.
        is_option_of_scheduler = str(live.paths[key][-1]).rpartition(".")[2] in SCHEDULED
        if key not in loaded.paths and not isinstance(value, Tensor) and not is_option_of_scheduler:
            yield _difference(live, key, None, value)


def _difference(live: LiveState, key: str, saved: Any, value: Any) -> ResumeDifference:
    """Return a difference at a key that the live state has, with whose option it is."""
    path = live.paths[key]
    if len(path) > 2 and path[-3] == PARAM_GROUPS:
        begin = key.rpartition(".")[0]
        names = live.flat.get(f"{begin}.param_names") or live.flat.get(f"{begin}.{PARAMS}", ())
        called = live.flat.get(f"{begin}.name") or _in_short([*map(str, names)])
        return ResumeDifference(key, saved, value, group=f"group {path[-2]} ({called})")
    parameter = next((option.name for option in OptimizerKey.of_option(path)), "")
    return ResumeDifference(key, saved, value, parameter=parameter)


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values of a state dict are the same, bit for bit where they are numbers or arrays.

    Lists and tuples are the same, because a format may keep either, and so are two NaN.
    """
    match one, other:
        case Mapping(), Mapping():
            return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
        case (list() | tuple(), list() | tuple()):
            return len(one) == len(other) and all(map(same_value, one, other))
        case Tensor(), Tensor():
            alike = one.dtype == other.dtype and one.shape == other.shape
            return alike and torch.equal(
                *(each.detach().cpu().contiguous().view(-1).view(torch.uint8) for each in (one, other))
            )
        case np.ndarray(), np.ndarray():
            return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        case (bool(), _) | (_, bool()):
            return one is other
        case (int() | float(), int() | float()):
            return one == other or (one != one and other != other)
    return type(one) is type(other) and (one == other or pickle.dumps(one) == pickle.dumps(other))
