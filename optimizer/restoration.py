"""Loading a state dict: matching parameters, checking that state fits, starting some fresh, and merging options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..names.errors import warn_on_rank
from ..names.resumption import (
    IN_A_TRAINER,
    Globs,
    LoadReport,
    ParameterMatcher,
    ParameterState,
    as_tuples,
    describe_differences,
    explain_differences,
    scheduler_misfit,
)
from ..names.vocabulary import GIVEN_KEYS, SCHEDULER_OPTIONS, STEP, STEPS_TAKEN, begins_as_zeros
from .collective import CollectiveOptimizer
from .given import given_in, settle
from .methods.matrix import UNNAMED
from .methods.scalar import counted_on
from .options import as_plain
from .state import as_numbers, fault, in_form

RESTORED = ("lr", "momentum", "weight_decay", "betas", "beta2", "eps", STEPS_TAKEN, *sorted(SCHEDULER_OPTIONS))
"""Hyper-parameters that a loaded state brings with it, as schedules change them during a run."""

Misfit = Callable[[Tensor, Any], str | None]
"""Returns why a slot's tensor cannot be replaced by a loaded one, in words that follow the slot, or None."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A state dict ready to load, with the optimizer's own groups, and the report of the load."""

    state: dict[Any, Any]
    groups: list[dict[str, Any]]
    report: LoadReport


def fitting(
    optimizer: Optimizer, state_dict: Mapping[str, Any], misfit: Misfit, globs: Globs, kept: Collection[str] = ()
) -> Fitted:
    """Check a state dict, and return it as it is to be loaded.

    Parameters are matched by their names if both sides have them, each parameter its own, and otherwise by their
    numbers.  A frozen parameter may be missing, as stock DCP leaves it out when it sets a state dict; it keeps its
    state.

    Args:
        globs: names of the parameters that start fresh.
        kept: slots that these keep.

    Raises:
        ValueError: lists every parameter whose state does not fit, and why; or a glob matches nothing; or it is no
            state dict of an optimizer.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        roots = ", ".join(map(repr, islice(state_dict, 8))) or "nothing"
        raise ValueError(
            f"expected the state dict of an optimizer, which has 'state' and 'param_groups', found one with {roots}: "
            "give what optimizer.state_dict() returned, which may be a part of it"
        )
    saved_groups, state = state_dict["param_groups"], dict(state_dict["state"])
    names, sources = _pairs(optimizer, saved_groups, globs)
    # Describe both sides by name; saved averages in 8 bits, or in none, take the form that they have now.
    live = {}
    for group, group_names in zip(optimizer.param_groups, names, strict=True):
        for name, param in zip(group_names, group["params"], strict=True):
            slots = optimizer.state[param]
            live[name] = ParameterState(slots, group)
            key, _ = sources.get(name, (None, None))
            if name in sources and key not in state and not param.requires_grad:
                state[key] = slots
            if key in state:
                state[key] = in_form(slots, state[key])
    saved = {
        name: ParameterState(state.get(key, {}), saved_groups[number], (number,))
        for name, (key, number) in sources.items()
    }

    # Match them, and refuse what does not fit.
    options = [{key: as_tuples(as_numbers(group[key])) for key in RESTORED if key in group} for group in saved_groups]
    matcher = ParameterMatcher(
        live,
        saved,
        names,
        options.__getitem__,
        misfit,
        is_zeroed=lambda parameter, slot: slot in kept or begins_as_zeros(slot, parameter.options),
    )
    report, differences, faults, origins = matcher.match(globs)
    everybody = {*live, *saved}
    if differences:
        if _names(optimizer.param_groups) is None and _names(saved_groups) is None:
            told = f"{describe_differences(differences, everybody)}. Here {_BY_NUMBER}"
        else:
            told = explain_differences(differences, everybody, _CURE)
        raise ValueError(f"the state does not fit, training would go on wrongly. {told}")
    if idle := globs.unmatched(everybody):
        raise ValueError(f"fresh={idle!r} match no parameter of the optimizer or of the state")
    if faults:
        raise ValueError("; ".join(faults))
    # Leave out dropped state, and put zeros in place of what starts fresh.
    keys = {name: sources[name][0] if name in sources else ("fresh", name) for name in live}
    for name in report.dropped:
        del state[sources[name][0]]
    for name in report.fresh:
        slots = live[name].slots
        state[keys[name]] = {slot: slots[slot] if slot in kept else torch.zeros_like(slots[slot]) for slot in slots}
    groups = _restored(optimizer.param_groups, saved_groups, origins)
    for group, group_names in zip(groups, names, strict=True):
        group["params"] = [keys[name] for name in group_names]
    return Fitted(state, groups, report)


_CURE = (
    "muonckpt.load(..., {0}) from a checkpoint, or Muon.load_state_dict(..., {0}) if both optimizers were made of "
    f"named parameters{IN_A_TRAINER}"
)


_BY_NUMBER = (
    "parameters without names of their own are matched by their numbers: build the groups of the saved run, or make "
    "both optimizers of named_parameters(), or resume from a checkpoint of muonckpt.save, which has names"
)


def _pairs(
    optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], globs: Globs
) -> tuple[list[list[str]], dict[str, tuple[Any, int]]]:
    """Return the names of each group's parameters, or what stands for them, and by name the keys of saved parameters
    in the state dict, with the numbers of their groups.
    """
    groups = optimizer.param_groups
    names, saved_names = _names(groups), _names(saved)
    sides = [[*chain(*side)] for side in (names, saved_names) if side is not None]
    # Names tell parameters apart if both sides have them and none repeats, as those of two modules do.  Torch's
    # `set_optimizer_state_dict` gives names in place of numbers: the model's, and an optimizer may have others.
    unique, numbered = all(len({*side}) == len(side) for side in sides), _has_numbers(saved)
    if names is not None and saved_names is not None and unique and (numbered or {*sides[0]} == {*sides[1]}):
        labels = names
    elif not unique and numbered and len(sides) == 2 and names != saved_names:
        shown, saved_shown = (", ".join([*map(repr, side[:8]), "…"]) for side in sides)
        raise ValueError(
            f"names repeat and have changed, so they tell no parameters apart: the state has {saved_shown}, this "
            f"optimizer {shown}, and {_BY_NUMBER}"
        )
    else:
        labels = saved_names = _labels(groups, saved, names if unique else None, globs)
    pairs = enumerate(zip(saved_names, saved, strict=True))
    keys = (zip(of_group, group["params"], repeat(number)) for number, (of_group, group) in pairs)
    return labels, {name: (key, number) for name, key, number in chain(*keys)}


def _labels(
    groups: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    names: list[list[str]] | None,
    globs: Globs,
) -> list[list[str]]:
    """Return what is said of parameters that are matched by number: the saved key, a name, or place and shape."""
    sizes, saved_sizes = ([len(group["params"]) for group in side] for side in (groups, saved))
    if sizes != saved_sizes:
        raise ValueError(
            f"the state has groups of {saved_sizes} parameters, this optimizer of {sizes}, and {_BY_NUMBER}"
        )
    if not _has_numbers(saved):
        return [[*group["params"]] for group in saved]
    if names is None and globs.patterns:
        raise ValueError(
            f"fresh={list(globs.patterns)!r}: the parameters of this optimizer have no names, or share them, as those "
            "of two modules do; make it of named_parameters() of the whole model, or use muonckpt.load(..., fresh=...)"
        )
    return names or [
        [f"group {number} parameter {index} {tuple(param.shape)}" for index, param in enumerate(group["params"])]
        for number, group in enumerate(groups)
    ]


def _names(groups: Sequence[Mapping[str, Any]]) -> list[list[str]] | None:
    """Return the names of each group's parameters, if all have names, beside their numbers or in place of them."""
    names = [group.get("param_names") if _has_numbers([group]) else group["params"] for group in groups]
    return None if None in names else [list(group or ()) for group in names]


def _has_numbers(groups: Sequence[Mapping[str, Any]]) -> bool:
    return not any(isinstance(key, str) for group in groups for key in group["params"])


def _restored(
    groups: Sequence[dict[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    origins: Sequence[int | None],
) -> list[dict[str, Any]]:
    """Return an optimizer's groups with the `RESTORED` options of their origins."""
    restored = []
    for number, (mine, origin) in enumerate(zip(groups, origins, strict=True)):
        theirs = {} if origin is None else saved[origin]
        code = mine.keys() & theirs.keys() - {*RESTORED, "algorithm", "params", "param_names"}
        if differing := sorted(key for key in code if _plain(key, theirs[key]) != _plain(key, mine[key])):
            shown = ", ".join(f"{key}={mine[key]!r} (saved {theirs[key]!r})" for key in differing)
            warn_on_rank(f"group {number} keeps the code's {shown}", stacklevel=4)
        brought = {key: _like(mine.get(key), theirs[key]) for key in RESTORED if key in theirs}
        if theirs:
            brought |= {GIVEN_KEYS[option]: value for option, value in given_in(theirs).items()}
        restored.append({**mine, **brought})
    rates = [[as_numbers(group.get("initial_lr")) for group in side] for side in (saved, restored)]
    if unfit := scheduler_misfit(*rates):
        if any("initial_lr" in group for group in groups):
            raise ValueError(f"the state does not fit, training would go on wrongly: {unfit}")
        warn_on_rank(unfit, stacklevel=4)
    return restored


def _plain(key: str, value: Any) -> Any:
    """Return an option for comparison; torch writes coefficients as numbers, and None for the default scale."""
    if key == "ns_coefficients":
        return as_plain(as_tuples(value))
    return UNNAMED if key == "adjust_lr_fn" and value is None else as_tuples(value)


def _like(mine: Any, saved: Any) -> Any:
    """Return a saved value as a tensor where this optimizer has one."""
    if isinstance(mine, tuple | list):
        return type(mine)(_like(*both) for both in zip(mine, saved, strict=True))
    return mine.clone().fill_(float(saved)) if isinstance(mine, Tensor) else saved


def load_fitting(
    optimizer: CollectiveOptimizer,
    load: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
    globs: Globs,
    at_rest: Callable[[Tensor, Mapping[str, Tensor]], dict[str, Tensor]] = lambda param, slots: dict(slots),
) -> LoadReport:
    """Load a state dict that fits with torch's own ``load``; every slot keeps its dtype and its device.

    Args:
        at_rest: returns a parameter's state in the memory where it rests.

    Raises:
        ValueError: as `fitting`; nothing has been changed then.
    """
    fits: list[Fitted] = []

    def check(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        fits.append(fitting(optimizer, given, fault, globs))
        # torch would cast state to the parameter's dtype, and move it to its device.
        return {"state": {}, "param_groups": fits[0].groups}

    before = list(optimizer.param_groups)  # torch puts others in their place
    former = dict(optimizer.state)

    def restore(_: Optimizer) -> None:
        settle(optimizer.param_groups, before, optimizer.given)
        keys = [key for group in fits[0].groups for key in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param, key in zip(params, keys, strict=True):
            likes, loaded = former[param], fits[0].state[key]
            # A count of steps may have been made before the parameter was moved.
            devices = {slot: counted_on(param) if slot == STEP else like.device for slot, like in likes.items()}
            slots = {slot: loaded[slot].to(devices[slot], like.dtype) for slot, like in likes.items()}
            optimizer.state[param] = at_rest(param, slots)

    # After users' hooks that may mend the state dict, and before those that look at the loaded state.
    hooks = (
        optimizer.register_load_state_dict_pre_hook(check),
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),
    )
    try:
        load(state_dict)
    finally:
        for hook in hooks:
            hook.remove()
    return fits[0].report


class FreshStart:
    """A hook for ``register_load_state_dict_pre_hook``: some parameters start fresh whenever a state dict is loaded.

    For trainers, which load state dicts themselves; otherwise give ``fresh`` to `muonckpt.load` or
    `Muon.load_state_dict`.  It warns of what it does.  The optimizer's own state, which accelerate loads when it
    prepares an optimizer, stays as it is.

    Args:
        fresh: globs of parameters' names, as for `Muon.load_state_dict`.

    Raises:
        TypeError: ``fresh`` is no list of strings.
    """

    def __init__(self, fresh: Sequence[str]) -> None:
        self.globs = Globs.of(fresh)

    def __call__(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if _equal(optimizer.state_dict(), state_dict):
            return state_dict
        fitted = fitting(optimizer, state_dict, fault, self.globs)
        warn_on_rank(f"resuming with fresh={list(self.globs.patterns)!r}:\n{fitted.report}", stacklevel=2)
        return {"state": fitted.state, "param_groups": fitted.groups}


def _equal(own: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Return whether two state dicts are equal, perhaps on different devices."""

    def same(a: Any, b: Any) -> bool:
        if a is b or type(a) is not type(b) or type(a) is not Tensor:
            return a is b
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device))

    names = [[(group["params"], group.get("param_names")) for group in side["param_groups"]] for side in (own, given)]
    mine, theirs = own["state"], {key: {**slots} for key, slots in given["state"].items()}
    return (
        names[0] == names[1]
        and theirs.keys() == mine.keys()
        and all(
            slots.keys() == theirs[key].keys() and all(same(value, theirs[key][slot]) for slot, value in slots.items())
            for key, slots in mine.items()
        )
    )
