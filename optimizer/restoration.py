"""Loading a state dict: matching parameters, checking that state fits, starting some fresh, and merging options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from ..layouts.tensors import local_of
from ..names.errors import ArgumentError, called_like, warn_on_rank
from ..names.resumption import (
    Globs,
    LoadReport,
    ParameterMatcher,
    ParameterState,
    advise_on_state,
    as_tuples,
    describe_differences,
    scheduler_misfit,
    with_flatten,
)
from ..names.vocabulary import GIVEN_KEYS, SCHEDULER_OPTIONS, begins_as_zeros
from ..names.wording import fitted
from .collective import CollectiveOptimizer
from .methods.matrix import UNNAMED
from .options import adopt_saved_options, as_numbers, options_in_code, options_of, params_of, parse_coefficients
from .state import tensor_misfit

RESTORED = (*GIVEN_KEYS, *sorted(SCHEDULER_OPTIONS))
"""Hyper-parameters that a loaded state brings with it, as schedules change them during a run."""

Misfit = Callable[[Tensor, Any], str | None]
"""Returns why a slot's tensor cannot be replaced by a loaded one, in words that follow the slot, or None."""


_CALL = "Muon.load_state_dict(..., {}), or to muon(...) in a Trainer"

_BY_NUMBER = (
    "parameters without names are matched by number: build the groups of the saved run, or make both optimizers "
    "of named_parameters()"
)


@dataclass(frozen=True, slots=True)
class FittedState:
    """A state dict ready to load, with the optimizer's own groups, and the report of the load."""

    state: dict[Any, Any]
    groups: list[dict[str, Any]]
    report: LoadReport


def fit_state_dict(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    misfit: Misfit,
    globs: Globs,
    lasting_slots: Collection[str] = (),
) -> FittedState:
    """Check a state dict, and return it in the form to load.

    Parameters are matched by their names if both sides have them, each parameter its own, and otherwise by their
    numbers.  A frozen one may be missing, as stock DCP leaves it out, and keeps its state.

    Args:
        globs: names of the parameters that start fresh.
        lasting_slots: slots that these keep.

    Raises:
        ArgumentError: lists every parameter whose state does not fit, and why; or a glob matches nothing.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        roots = ", ".join(map(repr, islice(state_dict, 8))) or "nothing"
        raise ArgumentError(
            f"expected the state dict of an optimizer, which has 'state' and 'param_groups', found one with {roots}: "
            "give what optimizer.state_dict() returned, which may be a part of it"
        )
    saved_groups, state = state_dict["param_groups"], dict(state_dict["state"])
    names, sources = _pair_parameters(optimizer, saved_groups, globs)
    # Describe both sides by name.
    live = {}
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        for name, param in zip(group_names, group["params"], strict=True):
            slots = optimizer.state[param]
            live[name] = ParameterState(slots, group)
            key, _ = sources.get(name, (None, None))
            if name in sources and key not in state and not param.requires_grad:
                state[key] = slots
    saved: dict[str, ParameterState] = {}
    for name, (key, number) in sources.items():
        saved[name] = ParameterState(state.get(key, {}), saved_groups[number], (number,))

    # Match them, and refuse state that does not fit.
    def restored_options(number: int) -> dict[str, Any]:
        group = saved_groups[number]
        return {key: as_tuples(as_numbers(group[key])) for key in RESTORED if key in group}

    matcher = ParameterMatcher(
        live,
        saved,
        groups=names,
        group_options=restored_options,
        slot_fault=misfit,
        is_zeroed=lambda parameter, slot: slot in lasting_slots or begins_as_zeros(slot, parameter.options),
    )
    report, differences, faults, origins = matcher.match(globs)
    all_names = {*live, *saved}
    if differences:
        if _names_of(optimizer.param_groups) is None and _names_of(saved_groups) is None:
            step = f"Here {_BY_NUMBER}"
        else:
            step = advise_on_state(differences, all_names, _CALL)
        failure = "the state does not fit, training would go on wrongly"
        raise ArgumentError(
            f"{failure}: {fitted(describe_differences(differences, all_names), '; ', failure, step)}. {step}"
        )
    if unmatched := globs.unmatched(all_names):
        raise ArgumentError(f"fresh={unmatched!r} match no parameter of the optimizer or of the state")
    if faults:
        raise ArgumentError(fitted(faults, "; "))
    # Leave out dropped state, and put zeros in place of fresh state.
    keys: dict[str, Any] = {name: ("fresh", name) for name in live} | {name: key for name, (key, _) in sources.items()}
    for name in report.dropped:
        del state[sources[name][0]]
    for name in report.fresh:
        state[keys[name]] = slots = dict(live[name].slots)
        for slot in slots.keys() - {*lasting_slots}:
            slots[slot] = torch.zeros_like(slots[slot])
    groups = _restore_options(optimizer.param_groups, saved_groups, origins)
    for group, group_names in zip(groups, names, strict=True):
        group["params"] = [keys[name] for name in group_names]
    return FittedState(state, groups, report)


def _pair_parameters(
    optimizer: Optimizer, saved_groups: Sequence[Mapping[str, Any]], globs: Globs
) -> tuple[list[list[str]], dict[str, tuple[Any, int]]]:
    """Return the labels of each group's parameters, and by label the keys and group numbers of the saved ones."""
    groups = optimizer.param_groups
    names, saved_names = _names_of(groups), _names_of(saved_groups)
    sides = [[*chain(*side)] for side in (names, saved_names) if side is not None]
    # Names tell parameters apart if both sides have them and none repeats, as those of two modules do.  Torch's
    # `set_optimizer_state_dict` gives names in place of numbers: the model's, and an optimizer may have others.
    are_unique, are_numbered = all(len({*side}) == len(side) for side in sides), _has_numbers(saved_groups)
    if len(sides) == 2 and are_unique and (are_numbered or {*sides[0]} == {*sides[1]}):
        labels, saved_labels = names, saved_names
    elif not are_unique and are_numbered and len(sides) == 2 and names != saved_names:
        shown, saved_shown = (", ".join([*map(repr, side[:8]), "…"]) for side in sides)
        raise ArgumentError(
            f"names repeat and have changed, so they tell no parameters apart: the state has {saved_shown}, this "
            f"optimizer {shown}, and {_BY_NUMBER}"
        )
    else:
        labels = saved_labels = _label_by_number(groups, saved_groups, names if are_unique else None, globs)
    assert labels is not None and saved_labels is not None
    sources = {}
    for number, (group_labels, group) in enumerate(zip(saved_labels, saved_groups, strict=True)):
        for label, key in zip(group_labels, group["params"], strict=False):
            sources[label] = (key, number)
    return labels, sources


def _label_by_number(
    groups: Sequence[Mapping[str, Any]],
    saved_groups: Sequence[Mapping[str, Any]],
    names: list[list[str]] | None,
    globs: Globs,
) -> list[list[str]]:
    """Return labels of parameters that are matched by number: the saved key, a name, or place and shape."""
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        raise ArgumentError(
            f"the state has groups of {saved_sizes} parameters, this optimizer of {sizes}, and {_BY_NUMBER}"
        )
    if not _has_numbers(saved_groups):
        return [[*group["params"]] for group in saved_groups]
    if names is None and globs.patterns:
        raise ArgumentError(
            f"fresh={list(globs.patterns)!r}: the parameters of this optimizer have no names, or share them, as those "
            "of two modules do; make it of named_parameters() of the whole model, or use muonckpt.load(..., fresh=...)"
        )
    if names is not None:
        return names
    # Without names, a place and a shape tell a parameter.
    labels = []
    for number, group in enumerate(groups):
        shapes = [tuple(param.shape) for param in group["params"]]
        labels.append([f"group {number} parameter {index} {shape}" for index, shape in enumerate(shapes)])
    return labels


def _names_of(groups: Sequence[Mapping[str, Any]]) -> list[list[str]] | None:
    """Return the names of each group's parameters, if all have names, beside their numbers or in place of them."""
    names: list[list[str]] = []
    for group in groups:
        group_names = group.get("param_names") if _has_numbers([group]) else group["params"]
        if group_names is None:
            return None
        names.append(list(group_names))
    return names


def _has_numbers(groups: Sequence[Mapping[str, Any]]) -> bool:
    return not any(isinstance(key, str) for key in params_of(groups))


def _restore_options(
    groups: Sequence[dict[str, Any]],
    saved_groups: Sequence[Mapping[str, Any]],
    origins: Sequence[int | None],
) -> list[dict[str, Any]]:
    """Return an optimizer's groups with the `RESTORED` options of the saved groups that they come from.

    Args:
        origins: the number of each group's saved group; None for one whose parameters all start fresh.
    """
    restored = []
    for number, (group, origin) in enumerate(zip(groups, origins, strict=True)):
        saved = {} if origin is None else saved_groups[origin]
        # Options that schedules do not change, such as those of Newton-Schulz, stay as the code has them.
        live_options, saved_options = with_flatten(group), with_flatten(saved)
        common = live_options.keys() & saved_options.keys() - {*RESTORED, "algorithm", "params", "param_names"}
        values = {key: (live_options[key], saved_options[key]) for key in sorted(common)}
        differing = [key for key, (a, b) in values.items() if _comparable(key, a) != _comparable(key, b)]
        if differing:
            shown = ", ".join("{}={!r} (saved {!r})".format(key, *values[key]) for key in differing)
            warn_on_rank(f"group {number} keeps the code's {shown}")
        # Rates come from the saved run; so does what its code gave them at first, under the keys of `GIVEN_KEYS`, from
        # which `adopt_saved_options` tells what has changed in the code since.
        options = {key: _convert_option(group.get(key), saved[key]) for key in RESTORED if key in saved}
        if saved:
            options |= {GIVEN_KEYS[option]: value for option, value in options_in_code(saved).items()}
        restored.append({**group, **options})
    # A saved scheduler knows groups by number and first rate.  A misfit is refused if this run has a scheduler already,
    # which would go on wrongly; else only warned of, as none may be made.
    saved_rates = [as_numbers(group.get("initial_lr")) for group in saved_groups]
    rates = [as_numbers(group.get("initial_lr")) for group in restored]
    if misfit := scheduler_misfit(saved_rates, rates):
        if any("initial_lr" in group for group in groups):
            raise ArgumentError(f"the state does not fit, training would go on wrongly: {misfit}")
        warn_on_rank(misfit)
    return restored


def _comparable(key: str, value: Any) -> Any:
    """Return an option for comparison; torch writes coefficients as numbers, and None for the default scale."""
    if key == "ns_coefficients":
        return parse_coefficients(as_tuples(value))
    return UNNAMED if key == "adjust_lr_fn" and value is None else as_tuples(value)


def _convert_option(live: Any, saved: Any) -> Any:
    """Return a saved value as a tensor where this optimizer has one."""
    if isinstance(live, tuple | list):
        return type(live)(_convert_option(*pair) for pair in zip(live, saved, strict=True))
    return live.clone().fill_(float(saved)) if isinstance(live, Tensor) else saved


def plan_restore(
    optimizer: CollectiveOptimizer,
    state_dict: dict[str, Any],
    misfit: Misfit,
    globs: Globs,
    lasting_slots: Collection[str] = (),
) -> tuple[Callable[[], None], LoadReport]:
    """Return a function that copies a state dict into an optimizer, and the report of that load.

    Every slot keeps its tensor, and so its dtype and its device.  Users' hooks run as in torch's own load.

    Args:
        misfit, globs, lasting_slots: as for `fit_state_dict`.
    """
    state_dict = {**state_dict}  # hooks may change it
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = pre_hook(optimizer, state_dict) or state_dict
    fitted = fit_state_dict(optimizer, state_dict, misfit, globs, lasting_slots)
    copies: list[tuple[Tensor, Tensor]] = []
    for group, fitted_group in zip(optimizer.param_groups, fitted.groups, strict=True):
        for param, key in zip(group["params"], fitted_group["params"], strict=True):
            for slot, tensor in optimizer.state[param].items():
                copies.append((local_of(tensor), local_of(fitted.state[key][slot])))

    def restore() -> None:
        _copy_all(copies)
        former_groups = [{**group} for group in optimizer.param_groups]
        for group, fitted_group in zip(optimizer.param_groups, fitted.groups, strict=True):
            group.update(options_of(fitted_group))
        adopt_saved_options(optimizer.param_groups, former_groups, optimizer.code_options)
        for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            post_hook(optimizer)

    return restore, fitted.report


def _copy_all(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy sources into targets, also a source that lies in the memory of a target."""
    memory = {target.untyped_storage().data_ptr() for target, _ in copies}
    # State that was loaded in place is there already.
    moves = [(target, source) for target, source in copies if not target.is_set_to(source)]
    kept = [source.clone() if source.untyped_storage().data_ptr() in memory else source for _, source in moves]
    for (target, _), source in zip(moves, kept, strict=True):
        target.copy_(source)


class FreshStart:
    """A hook for ``register_load_state_dict_pre_hook``: some parameters start fresh whenever a state dict is loaded.

    For trainers, which load state dicts themselves; otherwise give ``fresh`` to `muonckpt.load` or
    `Muon.load_state_dict`.  It warns of what it does.  The optimizer's own state, which accelerate loads when it
    prepares an optimizer, stays unchanged.

    Args:
        fresh: globs of parameters' names, as for `Muon.load_state_dict`.

    Raises:
        ArgumentError: ``fresh`` is no list of strings.
    """

    @called_like("optimizer.register_load_state_dict_pre_hook(FreshStart(['lm_head.*']))")
    def __init__(self, fresh: Sequence[str]) -> None:
        self.globs = Globs.of(fresh)

    def __call__(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if _are_equal(optimizer.state_dict(), state_dict):
            return state_dict
        fitted = fit_state_dict(optimizer, state_dict, tensor_misfit, self.globs)
        warn_on_rank(f"resuming with fresh={list(self.globs.patterns)!r}:\n{fitted.report}")
        return {"state": fitted.state, "param_groups": fitted.groups}


def _are_equal(live: Mapping[str, Any], loaded: Mapping[str, Any]) -> bool:
    """Return whether two state dicts are equal, perhaps on different devices."""
    (leaves, structure), (loaded_leaves, loaded_structure) = tree_flatten(live), tree_flatten(loaded)
    return bool(structure == loaded_structure) and all(map(_are_equal_values, leaves, loaded_leaves))


def _are_equal_values(a: Any, b: Any) -> bool:
    if type(a) is Tensor and type(b) is Tensor:
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device))
    # Tensors of other classes, which may have parts on other ranks, are equal only if they are one object.
    return a is b or not (isinstance(a, Tensor) or isinstance(b, Tensor) or a != b)
