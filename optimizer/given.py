"""Hyper-parameters as the code gave them: remembered, so that a resume can say which of them the saved state overrides.

A loaded state brings rates with it, as schedules have changed them, so what the code gives now has no effect.  It was
changed on purpose if it is not what the code gave then.  Groups do not say that once a schedule has changed them, other
than by ``initial_lr``; so state dicts have the options `GIVEN_KEYS` there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ..names.errors import warn_on_rank
from ..names.resumption import as_tuples, same_value
from ..names.vocabulary import GIVEN_KEYS, SCHEDULER_OPTIONS, ParamGroup
from ..names.wording import listed
from .state import as_numbers

SHOWN = 4
"""Groups whose differences are told; the others are counted."""


def given_in(group: ParamGroup) -> dict[str, Any]:
    """Return what the code gave a group, by option, as far as the group can tell."""
    known = {**group, "lr": group.get("initial_lr", group["lr"])}
    known |= {option: group[key] for option, key in GIVEN_KEYS.items() if key in group}
    return {option: as_tuples(as_numbers(known[option])) for option in GIVEN_KEYS if option in known}


def unsaid(group: ParamGroup, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a state dict needs, so that `given_in` tells what the code gave."""
    told = given_in(group)
    return {GIVEN_KEYS[option]: value for option, value in given.items() if option in told and told[option] != value}


def settle(groups: Sequence[dict[str, Any]], before: Sequence[ParamGroup], given: Sequence[dict[str, Any]]) -> None:
    """Warn, on the first rank, of what the code gives and loaded groups override; ``given`` becomes the saved run's.

    Args:
        before: the groups as they were.
    """
    overridden = []
    for number, (group, was, mine) in enumerate(zip(groups, before, given, strict=True)):
        saved = {option: group.pop(key) for option, key in GIVEN_KEYS.items() if key in group}
        here = mine | {option: as_numbers(was[option]) for option in SCHEDULER_OPTIONS & was.keys()}
        there = saved | {option: as_numbers(group[option]) for option in SCHEDULER_OPTIONS & group.keys()}
        differing = {option for option in here.keys() & there.keys() if not same_value(here[option], there[option])}
        if "lr" in differing:  # which it follows
            differing.discard("initial_lr")
        if differing:
            changes = ", ".join(f"{option}={there[option]!r}, not {here[option]!r}" for option in sorted(differing))
            overridden.append(f"group {number} ({group['algorithm']}): {changes}")
        mine.update(saved)
    if overridden and not (dist.is_initialized() and dist.get_rank()):
        warn_on_rank(
            "hyper-parameters are those of the saved run, which the loaded state brings, and not those that the code "
            f"gives now: {listed(overridden, SHOWN, '; ')}. To train with the code's, set them in "
            "optimizer.param_groups after loading; with a scheduler set initial_lr and its base_lrs as well",
            stacklevel=2,
        )
