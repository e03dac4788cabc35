"""The proof that a resumed run goes on from what was saved: what will run, compared with what was loaded, exactly.

`LoadedState` remembers what a load took from a checkpoint; `LiveParts` finds the same parts in a live model, its
optimizers and scheduler; `compare` compares both on all ranks: tensors by fingerprint, everything else by value.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from itertools import chain, repeat
from operator import attrgetter
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

from ..names.errors import ArgumentError, AttestError, MuonckptError
from ..names.keys import PARAM_GROUPS, OptimizerKey, key_of
from ..names.resumption import NAMES_OF_GROUPS, in_globs
from ..names.vocabulary import HISTORY_OPTIONS, PARAMS, KeyPath
from ..names.wording import counted, listed
from .all_ranks import decide_on_first, group_ranks, refuse_mixed_calls
from .attestation import SharesOfRank, TensorPrint, held_together, shares_of
from .live_state import LiveState, refuse_no_state_dict
from .storable import refuse_unwritable

_MAX_GLOBS = 4
"""Patterns of names that a phrase lists, or places."""

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
        unloaded_keys: of the checkpoint, those that ``allow_extra`` left there; the first rank's count.
    """

    paths: Mapping[str, KeyPath]
    items: Mapping[str, Any]
    prints: Mapping[str, TensorPrint]
    world_size: int | None
    unloaded_keys: tuple[str, ...]

    @classmethod
    def of(
        cls,
        template: LiveState,
        loaded_keys: Iterable[str],
        prints: Mapping[str, TensorPrint],
        provenance: Mapping[str, Any],
        unloaded_keys: Sequence[str],
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
            value = _item(values[key]) if key in values else None
            if key in values and not isinstance(value, Tensor):
                items[key] = value if isinstance(value, _Scalar) else deepcopy(value)
        # A resharded checkpoint was written by other processes than those that trained.
        world = provenance.get("world")
        is_original = isinstance(world, int) and not provenance.get("resharded")
        return cls(paths, items, prints, world if is_original else None, tuple(unloaded_keys))


@dataclass(frozen=True, slots=True)
class _Scalar:
    """The element of a tensor without dims, such as a rate or a step count."""

    dtype: torch.dtype
    value: float

    def __repr__(self) -> str:
        return str(np.float32(self.value)) if self.dtype == torch.float32 else repr(self.value)


def _item(value: Any) -> Any:
    """Return a value as it is compared and shown: a plain tensor without dims by its element."""
    if type(value) not in (Tensor, nn.Parameter) or value.ndim or value.is_meta:
        return value
    return _Scalar(value.dtype, value.item())


@dataclass(frozen=True, slots=True)
class ResumeDifference:
    """A part of the live state that is not what was saved.

    Attributes:
        key: its key in the state dict, such as ``optimizer.param_groups.0.lr``.
        saved, live: both values, a `TensorPrint` of tensors; `ABSENT` where one side has nothing.
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
            case _, _Dispute():
                return self.live.phrase
            case TensorPrint(), Absent():
                return "saved, and not there now"
            case _, Absent():
                return f"saved as {_short(self.saved)}, and not there now"
            case Absent(), TensorPrint():
                return "not there when it was saved"
            case Absent(), _:
                return f"{_short(self.live)}, not there when it was saved"
            case _Scalar(dtype=saved_dtype), _Scalar(dtype=live_dtype) if saved_dtype != live_dtype:
                return f"{_short(self.saved)} as {saved_dtype} -> {_short(self.live)} as {live_dtype}"
            case (_Scalar(), other) | (other, _Scalar()) if not isinstance(other, _Scalar):
                return f"{_with_type(self.saved)} -> {_with_type(self.live)}"
        return f"{_short(self.saved)} -> {_short(self.live)}"


@dataclass(frozen=True, slots=True)
class _Dispute:
    """Fingerprints of ranks that should hold one tensor alike, and do not."""

    phrase: str


def _short(value: Any) -> str:
    text = f"a tensor, {value}" if isinstance(value, TensorPrint) else repr(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 2]} …"


def _with_type(value: Any) -> str:
    """Return a value in short, which says where it is an element of a tensor."""
    return f"tensor({value})" if isinstance(value, _Scalar) else _short(value)


@dataclass(frozen=True, slots=True)
class ResumeProof:
    """The comparison of a resumed run with the checkpoint that it goes on from, the same on all ranks.

    Attributes:
        step: of the checkpoint.
        tensors, items: how many are as they were saved.
        differences: what is not, by key.
        unchecked: what was restored and not given to the check, and what cannot be compared, as it began anew.
        ranks_saved, ranks: how many processes wrote the checkpoint, None if that is not recorded, and how many run now.
    """

    step: int
    tensors: int
    items: int
    differences: tuple[ResumeDifference, ...]
    unchecked: tuple[str, ...] = ()
    ranks_saved: int | None = None
    ranks: int = 1

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def lines(self) -> tuple[str, ...]:
        """A phrase for each kind of difference: parameters of many layers are one."""
        # Differences of one kind are one entry, by the words that they have in common.
        options: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
        keys: defaultdict[str, list[str]] = defaultdict(list)
        disputes: list[str] = []
        for difference in self.differences:
            if isinstance(difference.live, _Dispute):
                disputes.append(f"{difference.key}: {difference.change}")
            elif difference.group or difference.parameter:
                option = difference.key.rpartition(".")[2]
                options[option, difference.change, difference.group].append(difference.parameter)
            else:
                keys[difference.change].append(difference.key)
        # Options come first, then whole values, then disputes among ranks.
        phrases = []
        for (option, change, group), names in options.items():
            phrases.append(f"{option} {change} in {group or _in_short(names)}")
        for change, members in keys.items():
            phrases.append(f"{_in_short(members)}: {change}")
        if disputes:
            phrases.append(listed(disputes, _MAX_GLOBS, "; "))
        return tuple(phrases)

    def __str__(self) -> str:
        unchecked = f"; not checked: {', '.join(self.unchecked)}" if self.unchecked else ""
        equal = f"{counted(self.tensors, 'tensor')} and {counted(self.items, 'other value')} are as they were saved"
        ranks = "" if self.ranks_saved is None else f"saved on {counted(self.ranks_saved, 'rank')}, now {self.ranks}, "
        resumed = f"resumed from step {self.step}, {ranks}"
        if self.equal and not self.tensors and self.unchecked:
            return f"{resumed}with nothing to prove: no tensor that runs now was loaded{unchecked}"
        if self.equal:
            return f"{resumed}proved: {equal}{unchecked}"
        return f"{resumed}not as it was saved: {'; '.join(self.lines)}; {equal}{unchecked}"

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


@dataclass(frozen=True)
class LiveParts:
    """The state dict of what will run.

    Attributes:
        covered_keys: of the template, those of parts that are in the state dict.
        unrestored: names of weights that are not in it because they were not restored.
    """

    state_dict: Mapping[str, Any]
    covered_keys: frozenset[str]
    unrestored: tuple[str, ...] = ()

    @classmethod
    def of_state_dict(cls, loaded: LoadedState, state_dict: Mapping[str, Any]) -> LiveParts:
        """Take a state dict that has whole parts of the template."""
        refuse_no_state_dict(state_dict, "to check")
        roots = {str(root) for root in state_dict}
        return cls(state_dict, frozenset(key for key, path in loaded.paths.items() if str(path[0]) in roots))

    @classmethod
    def of_objects(
        cls, loaded: LoadedState, model: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any | None
    ) -> LiveParts:
        """Take the state of a model, its optimizers and a scheduler, where the template had them.  Collective.

        Each of them is asked for its state in the form that the template has, and lies where that state's keys are in
        the template: nothing is told by names such as "model".  Weights that are in no template are left out, as where
        only trained ones are saved.

        Raises:
            ArgumentError: one of them is something else, or the template has no such state, or in several places.
        """
        # Each object is asked for its state, and its keys tell where in the template it was.
        _refuse_others(model, optimizers, scheduler)
        template = _Template(loaded.paths.values())
        try:
            weights = template.place("the model", [get_model_state_dict(model), model.state_dict()])
            of_optimizers = _optimizer_places(template, loaded, model, optimizers)
            of_schedulers = [] if scheduler is None else [template.place("the scheduler", [scheduler.state_dict()])]
        except MuonckptError:
            raise
        except Exception as error:  # of whatever kind, as torch looks for each parameter of the model, or takes a step
            raise ArgumentError(
                f"get_state_dict(model, optimizer) fails ({type(error).__name__}: {error}): give check the model whose "
                "parameters the optimizers have, before the first backward"
            ) from error
        # Weights that no template has were not restored, so they are named and not compared.
        restored = {name: value for name, value in weights.state.items() if (*weights.root, name) in template}
        places: list[tuple[KeyPath, Mapping[str, Any]]] = [(weights.root, restored)]
        places += [(place.root, place.state) for place in (*of_optimizers, *of_schedulers)]
        # All of it in one state dict, and the template's keys that the comparison has to find in it.
        nested: dict[str, Any] = {}
        covered = set[str]()
        for root, state in places:
            for part, value in state.items():
                set_element(nested, (*root, part), value)
            for key, path in loaded.paths.items():
                # At the top of the template stand parts of others, too.
                if tuple(path[: len(root)]) == root and (root or path[0] in state):
                    covered.add(key)
        return cls(nested, frozenset(covered), tuple(sorted(weights.state.keys() - restored.keys())))


def _refuse_others(model: object, optimizers: Sequence[object], scheduler: object) -> None:
    call = "restored.check(model, optimizer, scheduler=scheduler)"
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"expected a model, found {type(model).__name__}. Write {call}")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(f"expected an optimizer, found {type(optimizer).__name__}. Write {call}")
    if scheduler is not None and not callable(getattr(scheduler, "state_dict", None)):
        raise ArgumentError(
            f"expected one scheduler with a state_dict, found {type(scheduler).__name__}: to compare several, take the "
            "state dict of restore anew, with each at its key: restored.compare(state_dict)"
        )


def _optimizer_places(
    template: _Template, loaded: LoadedState, model: nn.Module, optimizers: Sequence[Optimizer]
) -> list[_Place]:
    """Return where optimizers are: saved as one, by get_state_dict(model, [one, other]), or each at its key."""
    if not optimizers:
        return []
    # Several may have been saved as one or each at its key: the form that has more of the template's keys is meant.
    joint_forms = _optimizer_forms(loaded, model, optimizers)
    if len(optimizers) == 1:
        return [template.place("the optimizer", joint_forms)]
    forms_of_each = [_optimizer_forms(loaded, model, [optimizer]) for optimizer in optimizers]
    if template.best_match(joint_forms) > max(map(template.best_match, forms_of_each)):
        return [template.place("the optimizers", joint_forms)]
    return [template.place(f"optimizer {number}", forms) for number, forms in enumerate(forms_of_each)]


def _optimizer_forms(loaded: LoadedState, model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Mapping[str, Any]]:
    """Return the state of optimizers in the forms that the template has; of others an optimizer may know nothing."""
    forms: list[Mapping[str, Any]] = []
    # Groups that list names are nested, numbers are the optimizer's own form; the flat form has keys of options.
    member_types = {type(value[0]) for key, value in loaded.items.items() if loaded.paths[key][-1] == PARAMS and value}
    if str in member_types:
        forms.append(get_optimizer_state_dict(model, optimizers))
    options = chain.from_iterable(map(OptimizerKey.of_option, loaded.paths.values()))
    if any(key.place.flat for key in options):
        flattened = StateDictOptions(flatten_optimizer_state_dict=True)
        forms.append(get_optimizer_state_dict(model, optimizers, options=flattened))
    if len(optimizers) == 1 and int in member_types:
        forms.append(optimizers[0].state_dict())
    return forms


@dataclass(frozen=True, slots=True)
class _Place:
    """A place of a state in the template: under ``root``, where ``matching`` of its keys are."""

    root: KeyPath
    state: Mapping[str, Any]
    matching: int


class _Template:
    """The paths of a template, by what they end with."""

    def __init__(self, paths: Iterable[KeyPath]) -> None:
        self._paths = {tuple(path) for path in paths}
        self._roots_by_length: dict[int, dict[KeyPath, list[KeyPath]]] = {}

    def __contains__(self, path: KeyPath) -> bool:
        return path in self._paths

    def best_places(self, forms: Sequence[Mapping[str, Any]]) -> list[_Place]:
        """Return the places that have the most keys of a state, in whichever of its forms; none if none has any."""
        # Every path of the state votes for the roots under which the template has it.
        places: list[_Place] = []
        for state in forms:
            _, paths = flatten_state_dict(dict(state))
            counts: Counter[KeyPath] = Counter()
            for path in paths.values():
                counts.update(self._roots(tuple(path)))
            places += map(_Place, counts.keys(), repeat(state), counts.values())
        places.sort(key=attrgetter("matching"))
        # Of two forms that fit one place equally, either will do.
        best_places = {place.root: place for place in places if place.matching == places[-1].matching}
        return [*best_places.values()]

    def best_match(self, forms: Sequence[Mapping[str, Any]]) -> int:
        """Return how many keys of a state one place has at most."""
        return max(map(attrgetter("matching"), self.best_places(forms)), default=0)

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
            roots = listed([repr(key_of(place.root)) for place in places], _MAX_GLOBS, " and ")
            raise ArgumentError(
                f"{name} may be any of {roots} of what was restored: compare the state dict itself, with each at its "
                "key: restored.compare(state_dict)"
            )
        return places[0]

    def _roots(self, suffix: KeyPath) -> list[KeyPath]:
        """Return what stands before this ending in paths of the template."""
        length = len(suffix)
        if length not in self._roots_by_length:
            roots: defaultdict[KeyPath, list[KeyPath]] = defaultdict(list)
            for path in sorted(self._paths, key=str):
                if len(path) >= length:
                    cut = len(path) - length
                    roots[path[cut:]].append(path[:cut])
            self._roots_by_length[length] = dict(roots)
        return self._roots_by_length[length].get(suffix, [])


# --- The comparison ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RankAnswer:
    """A rank's part of the comparison.

    Attributes:
        shares: of the fingerprints of its tensors.
        differences: between values that are no tensors.
        equal_items: how many of these are as they were saved.
        template_keys, covered_keys: all keys of the template, and those of parts that are compared.
        unchecked: parts of the template that are not compared.
        unloaded_items: keys of values that are compared, and were not loaded.
        unrestored: names of weights that were not restored.
    """

    shares: SharesOfRank
    differences: tuple[ResumeDifference, ...]
    equal_items: int
    template_keys: frozenset[str]
    covered_keys: frozenset[str]
    unchecked: frozenset[str]
    unloaded_items: frozenset[str]
    unrestored: frozenset[str]


def compare(
    loaded: LoadedState,
    take_parts: Callable[[], LiveParts],
    step: int,
    process_group: dist.ProcessGroup | None,
) -> ResumeProof:
    """Compare what will run with what was loaded, on all ranks.  Collective; changes nothing.

    Args:
        take_parts: returns this rank's part of what will run; its errors are raised on all ranks.

    Raises:
        ArgumentError, AttestError: what will run cannot be told, or read.
        LayoutError: nobody holds some elements of a tensor.
    """
    refuse_mixed_calls(process_group, "Restored.check")
    ranks = group_ranks(process_group)
    return decide_on_first(
        process_group,
        AttestError,
        lambda: _make_rank_answer(loaded, take_parts()),
        lambda answers: _prove(loaded, step, ranks, answers),
    )


def _make_rank_answer(loaded: LoadedState, parts: LiveParts) -> _RankAnswer:
    """Return the differences of this rank's values that are no tensors, and what `_prove` compares tensors by.

    A tensor may be cut over the ranks, so each takes its shares of the fingerprints, and the first rank joins them.
    """
    # Tensors that have no fingerprint are refused by name, before work is spent.
    live = LiveState.of(parts.state_dict, "to check")
    for key, value in live.flat.items():
        if isinstance(value, Tensor):
            refuse_unwritable(key, value)
    # Tensors: only their shares.  Other values: compared here, with those that this rank has loaded.
    shares = shares_of(live, live.parts)
    differences = {difference.key: difference for difference in _item_differences(loaded, live, parts.covered_keys)}
    # The proof counts equal values; those of tensors without dims count there as tensors.
    equal_items = 0
    for key, saved in loaded.items.items():
        equal_items += key in live.flat and key not in differences and not isinstance(saved, _Scalar)
    # Values that the load left as the template had them: the proof names them, as it has nothing to compare them with.
    # Options that schedulers write for themselves are left out, as they change no step.
    unloaded_items = set[str]()
    for key in live.flat.keys() & loaded.paths.keys() - loaded.items.keys():
        if not isinstance(live.flat[key], Tensor) and _option_of(live.paths[key]) not in HISTORY_OPTIONS:
            unloaded_items.add(key)
    return _RankAnswer(
        shares=shares,
        differences=tuple(differences.values()),
        equal_items=equal_items,
        template_keys=frozenset(loaded.paths),
        covered_keys=parts.covered_keys,
        unchecked=frozenset(_parts_beside(loaded.paths, parts.covered_keys)),
        unloaded_items=frozenset(unloaded_items),
        unrestored=frozenset(parts.unrestored),
    )


def _prove(loaded: LoadedState, step: int, ranks: Sequence[int], answers: Sequence[_RankAnswer]) -> ResumeProof:
    """Join the answers of all ranks to the proof, on the first one."""
    # Values differ on whichever rank has them; sets are those of any rank.
    differences: dict[str, ResumeDifference] = {}
    template_keys, covered_keys, unloaded_items = set[str](), set[str](), set[str]()
    unchecked_parts, unrestored_names = set[str](), set[str]()
    for answer in answers:
        for difference in answer.differences:
            differences[difference.key] = difference
        template_keys |= answer.template_keys
        covered_keys |= answer.covered_keys
        unloaded_items |= answer.unloaded_items
        unchecked_parts |= answer.unchecked
        unrestored_names |= answer.unrestored
    # Tensors that ranks should hold alike.
    live_tensors = held_together(ranks, [answer.shares for answer in answers])
    for key, phrase in live_tensors.disputes:
        dispute = _Dispute(phrase.lstrip(": "))
        differences.setdefault(key, ResumeDifference(key, loaded.prints.get(key, ABSENT), dispute))
    # Tensors: those that were loaded have to be there, with the elements that they had.
    for key, saved in loaded.prints.items():
        live = live_tensors.tensors.get(key, ABSENT)
        if live != saved and (live is not ABSENT or key in covered_keys or key not in template_keys):
            differences.setdefault(key, ResumeDifference(key, saved, live))
    # Tensors that were not loaded: they began anew, or are of no state that was restored.
    new_keys = live_tensors.tensors.keys() - loaded.prints.keys() - differences.keys()
    for key in new_keys - template_keys:
        differences[key] = ResumeDifference(key, ABSENT, live_tensors.tensors[key])
    # The proof names what it leaves out, so that nobody takes it for more than it is.
    unchecked = sorted(unchecked_parts)
    if new_items := sorted((new_keys & template_keys) | (unloaded_items - differences.keys())):
        unchecked.append(f"{_in_short(new_items)}, which began anew, or have no recorded fingerprint")
    if unrestored_names:
        unchecked.append(f"{_in_short(sorted(unrestored_names))}, which the checkpoint does not have")
    if loaded.unloaded_keys:
        unchecked.append(f"{_in_short(loaded.unloaded_keys)}, which allow_extra left in the checkpoint")
    equal_tensors = loaded.prints.keys() & live_tensors.tensors.keys() - differences.keys()
    equal_items = max(answer.equal_items for answer in answers)
    all_differences = tuple(map(differences.__getitem__, sorted(differences)))
    return ResumeProof(
        step, len(equal_tensors), equal_items, all_differences, tuple(unchecked), loaded.world_size, len(ranks)
    )


def _parts_beside(paths: Mapping[str, KeyPath], covered_keys: Collection[str]) -> Iterator[str]:
    """Yield the keys of the largest parts of a template that have none of the covered keys."""
    covered_roots: set[KeyPath] = set()
    for key in covered_keys:
        covered_roots.update(paths[key][:length] for length in range(len(paths[key]) + 1))
    # The shortest beginning of a path under which nothing is covered is such a part.
    for key in paths.keys() - covered_keys:
        path, length = paths[key], 1
        while path[:length] in covered_roots:
            length += 1
        yield key_of(path[:length])


def _option_of(path: KeyPath) -> str:
    return str(path[-1]).rpartition(".")[2]


def _item_differences(
    loaded: LoadedState, live: LiveState, covered_keys: Collection[str]
) -> Iterator[ResumeDifference]:
    """Yield the values that are no tensors, on one side at least, and not the same on this rank."""
    # Every loaded value has to be there; one of a part that was not given to the check is not asked for.
    for key, saved in loaded.items.items():
        if key in live.flat:
            value = _item(live.flat[key])
            if isinstance(value, Tensor):
                value = f"a tensor, {value.dtype}"
            if not same_value(saved, value):
                yield _difference(live, key, saved, value)
        elif key in covered_keys:
            yield _difference(live, key, saved, ABSENT, loaded.paths[key])
    # A value that the template never had is new, unless a scheduler wrote it for itself.
    for key, value in live.flat.items():
        if (
            key not in loaded.paths
            and not isinstance(value, Tensor)
            and _option_of(live.paths[key]) not in HISTORY_OPTIONS
        ):
            yield _difference(live, key, ABSENT, value)


def _difference(live: LiveState, key: str, saved: Any, value: Any, path: KeyPath | None = None) -> ResumeDifference:
    """Return a difference with whose option it is; the path is that of the live state, where it has the key."""
    path = path or live.paths[key]
    if len(path) > 2 and path[-3] == PARAM_GROUPS:
        begin = key.rpartition(".")[0]
        names = live.flat.get(f"{begin}.param_names") or live.flat.get(f"{begin}.{PARAMS}", ())
        called = live.flat.get(f"{begin}.name") or _in_short([*map(str, names)])
        return ResumeDifference(key, saved, value, group=f"group {path[-2]} ({called})")
    parameter = next((option.name for option in OptimizerKey.of_option(path)), "")
    return ResumeDifference(key, saved, value, parameter=parameter)


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
            return value == other or (value != value and other != other)
    return type(value) is type(other) and (value == other or pickle.dumps(value) == pickle.dumps(other))
