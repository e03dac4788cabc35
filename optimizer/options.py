"""Options of parameter groups that would be ignored silently."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

Group = Mapping[str, Any]

FOREIGN = ("amsgrad", "capturable", "differentiable", "fused", "maximize")
"""Options of torch's optimizers that would change the update, and that no algorithm here has."""


def refuse_foreign(group: Group) -> None:
    """Refuse options that would be ignored silently.

    Raises:
        ValueError: names the first of `FOREIGN` that is on.
    """
    for name in FOREIGN:
        if group.get(name):
            raise ValueError(f"{name}={group[name]!r}: {group['algorithm']!r} groups do not have this option")


def refuse_misspelt(group: Group, options: Collection[str]) -> None:
    """Refuse what is nearly the name of an option.  Other names are the user's own, as in any torch optimizer.

    Raises:
        ValueError: names both.
    """
    for name in group.keys() - options:
        for near in get_close_matches(name, options, n=1, cutoff=0.85):
            raise ValueError(f"{name}={group[name]!r}: groups have no such option; is {near!r} meant?")
