"""Learning rate schedulers beside the groups of the optimizers that they step.

A scheduler keeps lists with a value for each parameter group, by number: ``base_lrs``, ``_last_lr``, ``max_lrs``.  The
groups of another job may have another order, and then a group would get the rates of another one.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiplicativeLR

from .resume_proof import same_value


@dataclass(frozen=True, slots=True)
class ScheduleFindings:
    """The known facts about the groups that a scheduler steps.

    Attributes:
        faults: by key, why the scheduler does not step these groups as it did those of the saved run.
        unchecked: phrases for what nothing shows: which value is for which group, or what a function gives.
    """

    faults: Mapping[str, str]
    unchecked: tuple[str, ...]


def check_schedules(
    key: str, scheduler: Any, optimizers: Sequence[Optimizer], saved_keys: Collection[str]
) -> ScheduleFindings:
    """Compare the lists of a scheduler, and of its parts, with the groups of its optimizer.

    Args:
        key: of the scheduler in the state dict.
        scheduler: of torch; others have no lists that are known.
        optimizers: those of the run.
        saved_keys: of all that was loaded.  Base rates that a scheduler does not save are those of the code, while the
            groups have those of the saved run.
    """
    faults: dict[str, str] = {}
    unchecked: list[str] = []
    for key_of_part, part, is_active in _parts(key, scheduler):
        groups = part.optimizer.param_groups
        if all(groups is not optimizer.param_groups for optimizer in optimizers):
            faults[key_of_part] = "the scheduler steps another optimizer than those of this run"
            continue
        proved: list[list[float]] = []
        for name, values in _lists_by_group(part, len(groups)).items():
            # The option of groups that stays the same unless other code writes it.
            option = {"base_lrs": "initial_lr", "_last_lr": "lr" if is_active else ""}.get(name, "")
            options = _numbers([group.get(option) for group in groups])
            is_unsaved = name == "base_lrs" and not any(each.startswith(f"{key_of_part}.{name}") for each in saved_keys)
            if option and len(values) != len(groups):
                faults[f"{key_of_part}.{name}"] = f"{values} for {len(groups)} parameter groups"
            elif values == options:
                proved.append(values)
            elif options and (is_unsaved or sorted(values) == sorted(options)):
                faults[f"{key_of_part}.{name}"] = f"{values}, but the groups of this optimizer have {option} {options}"
            elif len(values) == len(groups) and not _is_determined(values, proved):
                unchecked.append(f"which group each value of {key_of_part}.{name} is for")
        # No checkpoint has a function. Another one gives another rate than that of the step that was saved.
        if isinstance(part, LambdaLR) and part.last_epoch >= 0:
            factors = [function(part.last_epoch) for function in part.lr_lambdas if _is_function(function)]
            rates = _numbers([rate * factor for rate, factor in zip(part.base_lrs, factors, strict=False)])
            saved_rates = _numbers(part.get_last_lr())
            if len(factors) == len(saved_rates) and rates != saved_rates:
                faults[f"{key_of_part}.lr_lambdas"] = (
                    f"the code's functions give {rates} at step {part.last_epoch}, those of the saved run {saved_rates}"
                )
        elif isinstance(part, LambdaLR | MultiplicativeLR):
            unchecked.append(f"the functions of {key_of_part}")
    return ScheduleFindings(faults, tuple(unchecked))


def _parts(key: str, scheduler: Any) -> Iterator[tuple[str, LRScheduler, bool]]:
    """Yield a scheduler and those in it, chained or in turn, and whether its ``_last_lr`` is that of its groups now."""
    if isinstance(scheduler, LRScheduler):
        yield key, scheduler, True
        for number, part in enumerate(getattr(scheduler, "_schedulers", ())):
            for key_of_part, each, _ in _parts(f"{key}._schedulers.{number}", part):
                yield key_of_part, each, False


def _lists_by_group(scheduler: LRScheduler, num_groups: int) -> dict[str, list[float]]:
    """Return the lists of numbers that have a value for each group, those first that groups have too."""
    lists: dict[str, list[float]] = {}
    for name, value in sorted(vars(scheduler).items(), key=lambda entry: entry[0] not in ("base_lrs", "_last_lr")):
        numbers = _numbers(value) if isinstance(value, list) else []
        is_by_group = name in ("base_lrs", "_last_lr") or (len(numbers) == num_groups and name != "_milestones")
        if numbers and is_by_group:
            lists[name] = numbers
    return lists


def _is_function(function: object) -> bool:
    """Return whether a function has no state of its own, so that a call changes nothing."""
    return isinstance(function, FunctionType | partial)


def _numbers(values: Sequence[Any]) -> list[float]:
    """Return numbers, which may be tensors, as floats; empty if some are no numbers."""
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError):
        return []


def _is_determined(values: Sequence[float], proved: Sequence[Sequence[float]]) -> bool:
    """Return whether lists that are proved tell all groups apart which have different values."""
    by_proved: dict[tuple[float, ...], float] = {}
    for number, value in enumerate(values):
        if by_proved.setdefault(tuple(numbers[number] for numbers in proved), value) != value:
            return False
    return True


def is_of_torch(scheduler: object) -> bool:
    """Return whether an optimizer or a scheduler is of torch, whose arguments are known to stay the same."""
    return type(scheduler).__module__.startswith("torch.optim.")


def overridden_arguments(key: str, scheduler: Any, saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield each argument of a scheduler of torch, and of its parts, to which its saved state gives another value."""
    live = scheduler.state_dict()
    arguments = inspect.signature(type(scheduler)).parameters.keys() if is_of_torch(scheduler) else set[str]()
    attributes = {*arguments, *(f"_{name}" for name in arguments)} - {"last_epoch", "_schedulers"}
    for name in sorted(attributes & live.keys() & saved.keys()):
        if not same_value(live[name], saved[name]):
            yield f"{key}.{name}={saved[name]!r}, not {live[name]!r}"
    parts = zip(getattr(scheduler, "_schedulers", ()), saved.get("_schedulers", ()), strict=False)
    for number, (part, saved_part) in enumerate(parts):
        yield from overridden_arguments(f"{key}._schedulers.{number}", part, saved_part)
