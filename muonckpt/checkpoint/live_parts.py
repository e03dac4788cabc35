"""The state of what will run: a model, its optimizers and scheduler, where the restored state dict had them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.state_dict import (
    _get_fqns,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.optim import Optimizer

from ..names.errors import ArgumentError, MuonckptError
from ..names.keys import key_of
from ..names.resumption import MAX_GLOBS
from ..names.vocabulary import PARAMS, KeyPath
from ..names.wording import listed
from .live_state import LiveState, refuse_no_state_dict
from .parameter_keys import GroupLabel, ParameterKeys, has_names, nested_by_parameter
from .resume_proof import ABSENT, Dispute, LoadedState, ResumeDifference
from .schedules import check_schedules
from .training import Training, foreign_parameters, refuse_other_objects


@dataclass(frozen=True)
class LiveParts:
    """The state that will run, beside the loaded state, both by parameter.

    Attributes:
        loaded: the basis for the proof.
        state_dict: of what will run.
        covered_keys: of the template, those of parts that are in the state dict.
        groups: as in `ParameterKeys`.
        unrestored: names of weights that are not in it because they were not restored.
        faults: differences that no state dict shows.
        unchecked: what else is not compared, in words.
        buffers: the model's that are in no state dict, by name.
    """

    loaded: LoadedState
    state_dict: Mapping[str, Any]
    covered_keys: frozenset[str]
    groups: Mapping[tuple[KeyPath, str], GroupLabel]
    unrestored: tuple[str, ...] = ()
    faults: tuple[ResumeDifference, ...] = ()
    unchecked: tuple[str, ...] = ()
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of_state_dict(cls, loaded: LoadedState, state_dict: Mapping[str, Any]) -> LiveParts:
        """Take a state dict that has whole parts of the template."""
        refuse_no_state_dict(state_dict, "to check")
        live = LiveState.of(state_dict, "to check")
        by_name = has_names(loaded.items, loaded.paths) and has_names(live.flat, live.paths)
        keys, basis = ParameterKeys.of(live.flat, live.paths, by_name), loaded.by_parameter(by_name)
        roots = {str(root) for root in state_dict}
        covered_keys = frozenset(key for key, path in basis.paths.items() if str(path[0]) in roots)
        # Parameters that go by number could be mistaken for each other.
        unchecked = tuple(_BY_NUMBER.format(key_of(root)) for root in sorted(keys.by_number, key=str))
        return cls(basis, nested_by_parameter(live.flat, keys), covered_keys, keys.groups, unchecked=unchecked)

    @classmethod
    def of_training(cls, loaded: LoadedState, training: Training) -> LiveParts:
        """Take the state of all objects of a training.  Collective."""
        model, optimizers = training.model, training.optimizers
        parts = cls.of_state_dict(loaded, training.state_dict())
        return parts._with_objects(loaded, model, optimizers, training.schedulers_by_key)

    @classmethod
    def of_objects(
        cls, loaded: LoadedState, model: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any | None
    ) -> LiveParts:
        """Take the state of a model, its optimizers and a scheduler, where the template had them.  Collective.

        The keys of an object's state give its place in the template: names such as "model" mean nothing.
        Weights that are in no template are left out, as where only trained ones are saved.

        Raises:
            ArgumentError: one of them is something else, or the template has no such state, or in several places.
        """
        refuse_other_objects(model, optimizers, "restored.check(model, optimizer, scheduler=scheduler)")
        if scheduler is not None and not callable(getattr(scheduler, "state_dict", None)):
            raise ArgumentError(
                f"expected one scheduler with a state_dict, found {type(scheduler).__name__}: to compare several, take "
                "the state dict of restore again, with each at its key: restored.compare(state_dict)"
            )
        # Torch knows no names for parameters of another model, so their state is not requested.
        foreign = [
            ResumeDifference(name, ABSENT, Dispute(fault)) for name, fault in foreign_parameters(model, optimizers)
        ]
        schedulers: dict[str, Any] = {}
        by_name = has_names(loaded.items, loaded.paths)
        for optimizer in optimizers:
            by_name &= all("param_names" in group for group in optimizer.param_groups)
        basis = loaded.by_parameter(by_name)
        template = _Template(basis.paths.values())
        # The keys of each object's state give its place in the template.
        try:
            weights = template.place("the model", [_Form(get_model_state_dict(model)), _Form(model.state_dict())])
            places = [] if foreign else _optimizer_places(template, loaded, model, optimizers, by_name)
            if scheduler is not None:
                place = template.place("the scheduler", [_Form(scheduler.state_dict())])
                places.append(place)
                schedulers[key_of(place.root)] = scheduler
        except MuonckptError:
            raise
        except Exception as error:  # of whatever kind, as torch looks for each parameter of the model, or takes a step
            raise ArgumentError(
                f"get_state_dict(model, optimizer) fails ({type(error).__name__}: {error}): give check the model whose "
                "parameters the optimizers have, before the first backward"
            ) from error
        # Weights that no template has were not restored, so they are named and not compared.
        names = weights.form.state
        restored = {name: value for name, value in names.items() if (*weights.root, name) in template}
        # All of it in one state dict, and the template's keys that the comparison has to find in it.
        nested: dict[str, Any] = {}
        covered, groups, unchecked = set[str](), dict[tuple[KeyPath, str], GroupLabel](), list[str]()
        for place in (_Place(weights.root, _Form(restored), 0), *places):
            for part, value in place.form.state.items():
                set_element(nested, (*place.root, part), value)
            groups |= {(place.root, label): group for label, group in place.form.groups.items()}
            unchecked += [_BY_NUMBER.format(key_of(place.root))] * place.form.by_number
            for key, path in basis.paths.items():
                # At the top of the template stand parts of others, too.
                if tuple(path[: len(place.root)]) == place.root and (place.root or path[0] in place.form.state):
                    covered.add(key)
        unrestored = tuple(sorted(names.keys() - restored.keys()))
        parts = cls(basis, nested, frozenset(covered), groups, unrestored, tuple(foreign), tuple(unchecked))
        return parts._with_objects(loaded, model, optimizers, schedulers)

    def _with_objects(
        self, loaded: LoadedState, model: nn.Module, optimizers: Sequence[Optimizer], schedulers: Mapping[str, Any]
    ) -> LiveParts:
        """Return the same with what objects show that no state dict has; schedulers by their keys."""
        faults, unchecked = [*self.faults, *_thawed_parameters(model, loaded.frozen)], [*self.unchecked]
        if loaded.frozen is None:
            unchecked.append("requires_grad, which the checkpoint does not record")
        # Wrappers give buffers other names in a state dict, so that a buffer is known by its identity.
        saved = {id(value) for value in model.state_dict(keep_vars=True).values()}
        buffers = {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in saved}
        parts = replace(self, faults=tuple(faults), unchecked=tuple(unchecked), buffers=buffers)
        return parts.with_schedules(schedulers, optimizers)

    def with_schedules(self, schedulers: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> LiveParts:
        """Return the same with what schedulers, by their keys, show that no state dict has."""
        faults, unchecked = [*self.faults], [*self.unchecked]
        for key, scheduler in schedulers.items():
            found = check_schedules(key, scheduler, optimizers, self.loaded.items.keys())
            faults += [ResumeDifference(key, ABSENT, Dispute(fault)) for key, fault in found.faults.items()]
            unchecked += found.unchecked
        return replace(self, faults=tuple(faults), unchecked=tuple(unchecked))


_BY_NUMBER = "which parameter is which in {!r}: they have no names, and were matched by number"


def frozen_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters of a model that require no gradients, as `get_model_state_dict` has them."""
    names: set[str] = set()
    for name, param in model.named_parameters():
        if not param.requires_grad:
            names |= _get_fqns(model, name)
    return sorted(names)


def _thawed_parameters(model: nn.Module, saved: Collection[str] | None) -> Iterator[ResumeDifference]:
    """Yield a difference for each parameter of a model that requires gradients now and did not then, or the reverse."""
    if saved is None:
        return
    names = set[str]().union(*(_get_fqns(model, name) for name, _ in model.named_parameters()))
    live = {*frozen_parameters(model)}
    for name in sorted(names & (live ^ {*saved})):
        yield ResumeDifference(f"{name}.requires_grad", name not in saved, name not in live)


def _optimizer_places(
    template: _Template, loaded: LoadedState, model: nn.Module, optimizers: Sequence[Optimizer], by_name: bool
) -> list[_Place]:
    """Return where optimizers are: saved as one, by get_state_dict(model, [one, other]), or each at its key."""
    if not optimizers:
        return []
    # Groups of the template list names or numbers; of other optimizers than its own, torch may know nothing.
    lists = [value for key, value in loaded.items.items() if loaded.paths[key][-1] == PARAMS and value]
    has_numbers = any(isinstance(members[0], int) for members in lists)
    has_named = not lists or any(isinstance(members[0], str) for members in lists)
    forms_of_each: list[list[_Form]] = []
    for members in ([*optimizers], *([optimizer] for optimizer in optimizers)):
        forms = [get_optimizer_state_dict(model, members)] if has_named else []
        if has_numbers and len(members) == 1:
            forms.append(members[0].state_dict())
        forms_of_each.append([_Form.of_optimizer(form, by_name) for form in forms])
    # Several may have been saved as one or each at its key: the form that has more of the template's keys is meant.
    joint, *each = forms_of_each
    if len(optimizers) == 1:
        return [template.place("the optimizer", joint)]
    if template.best_match(joint) > max(map(template.best_match, each)):
        return [template.place("the optimizers", joint)]
    return [template.place(f"optimizer {number}", forms) for number, forms in enumerate(each)]


@dataclass(frozen=True)
class _Form:
    """The state of an object, in a form of the template.

    Attributes:
        groups: of an optimizer, the group of each parameter by its label.
        by_number: True if these labels are numbers.
    """

    state: Mapping[str, Any]
    groups: Mapping[str, GroupLabel] = field(default_factory=dict)
    by_number: bool = False

    @classmethod
    def of_optimizer(cls, state_dict: Mapping[str, Any], by_name: bool) -> _Form:
        values, paths = flatten_state_dict(dict(state_dict))
        keys = ParameterKeys.of(values, paths, by_name)
        groups = {label: group for (_, label), group in keys.groups.items()}
        return cls(nested_by_parameter(values, keys), groups, bool(keys.by_number))


@dataclass(frozen=True)
class _Place:
    """A place of a state in the template: under ``root``, where ``matching`` of its keys are."""

    root: KeyPath
    form: _Form
    matching: int


class _Template:
    """The paths of a template, by what they end with."""

    def __init__(self, paths: Iterable[KeyPath]) -> None:
        self._paths = {tuple(path) for path in paths}
        self._roots_by_length: dict[int, dict[KeyPath, list[KeyPath]]] = {}

    def __contains__(self, path: KeyPath) -> bool:
        return path in self._paths

    def best_places(self, forms: Sequence[_Form]) -> list[_Place]:
        """Return the places that have the most keys of a state, in whichever of its forms; none if none has any."""
        # Every path of the state votes for the roots under which the template has it.
        places: list[_Place] = []
        for form in forms:
            _, paths = flatten_state_dict(dict(form.state))
            counts: Counter[KeyPath] = Counter()
            for path in paths.values():
                counts.update(self._roots(tuple(path)))
            places += map(_Place, counts.keys(), repeat(form), counts.values())
        places.sort(key=attrgetter("matching"))
        # Either of two forms that fit one place equally will do.
        best_places = {place.root: place for place in places if place.matching == places[-1].matching}
        return [*best_places.values()]

    def best_match(self, forms: Sequence[_Form]) -> int:
        """Return how many keys of a state one place has at most."""
        return max(map(attrgetter("matching"), self.best_places(forms)), default=0)

    def place(self, name: str, forms: Sequence[_Form]) -> _Place:
        """Return the one place of a state.

        Raises:
            ArgumentError: there is none, or there are several.
        """
        places = self.best_places(forms)
        if not places:
            raise ArgumentError(
                f"nothing that was restored has the keys of {name}: give check what was in the state dict of restore, "
                "or compare the state dict itself, taken again: restored.compare(state_dict)"
            )
        if len(places) > 1:
            roots = listed([repr(key_of(place.root)) for place in places], MAX_GLOBS, " and ")
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
