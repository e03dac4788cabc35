"""Intents: ranks compare them before they act together, as a few bytes each time, and in words where these differ.

They travel as notes in front of the exchanged elements, so a rank that fails takes part in the next exchange, and all
learn of it there.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...names.coefficients import coefficient_set
from ...names.vocabulary import HISTORY_OPTIONS, ParamGroup
from ...names.wording import fitted, listed
from ..ground.devices import upload
from ..planning.schedule import NOTE

Facts = Mapping[str, str]
"""Values that are the same on all ranks, by subject."""

RATES = frozenset({"lr", "weight_decay", "momentum", "betas", "beta2"})
"""Options that every step reads again, so that schedules, and steps, may change them."""

NAMES = frozenset({"params", "param_names", "name"})
"""A group's members and labels."""

SHOWN = 2
"""Differences that a rank tells; the others are counted."""

LONGEST_COMPLAINT = 500
"""Characters of a rank's complaint."""

PLAN_FACT = "the plan"
"""The subject that says whether ranks step by the plan that they have."""


CLEARED = "the parameters whose state was cleared"
"""The subject of state that begins from zero: on all ranks or on none."""


@dataclass(frozen=True, slots=True)
class Task:
    """A joint action of ranks: the error if they differ, and advice."""

    failure: str
    advice: str


AGREE_ON_PLAN = Task(
    "ranks do not plan the same optimizer step",
    "Build the optimizer on every rank from the same parameters, in the same groups and order, with the same options "
    "(numbers count those that these ranks share)",
)
AGREE_ON_STEP = Task(
    "an optimizer step stops on all ranks that share it",
    "Rates, and the parameters that have a gradient, must be the same on all ranks. Do not repeat this step: momenta "
    "may have taken its gradients in",
)

AGREE_ON_LOAD = Task(
    "a state is loaded on all ranks or on none",
    "Load the same checkpoint on all of them",
)


class AgreedError(Exception):
    """An ``error`` that all ranks of a set know, so none of them waits for this one; it goes on to tell its other sets.

    Any other error leaves ranks waiting amid an exchange, and going on could make a circle of waiting ranks.  So it is
    raised at once; the others notice when this process ends.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _digest(intent: bytes) -> bytes:
    return hashlib.blake2b(intent, digest_size=NOTE).digest()


@dataclass(frozen=True, slots=True, eq=False)
class Intent:
    """A rank's statement of what it is about to do, or the ``error`` that keeps it from that.

    Attributes:
        digest: equal on two ranks if they intend the same.
        facts: the same in words; asked only where ranks differ.
    """

    task: Task
    digest: bytes
    facts: Callable[[], Facts]
    error: Exception | None = None

    @classmethod
    def of(cls, task: Task, facts: Facts) -> Intent:
        """Return the intent to do what these facts say."""
        return cls(task, _digest(repr(sorted(facts.items())).encode()), lambda: facts)

    def failed(self, error: Exception) -> Intent:
        """Return the intent of this rank if it has failed: it differs from every other rank's."""
        return replace(self, digest=_digest(f"rank {this_rank()} failed".encode()), error=error)

    def note(self, device: torch.device, copies: int = 1) -> Tensor:
        """Return the digest on a device, ``NOTE`` bytes, so many times; nothing waits for the device."""
        return upload(torch.frombuffer(bytearray(self.digest * copies), dtype=torch.uint8), device)

    def complaint(self, first: int, reference: Facts | None) -> str:
        """Return this rank's error, or how its facts differ from the first rank's; empty if they do not."""
        if self.error is not None:
            return _shorten(f"raised {type(self.error).__name__}: {self.error}")
        if reference is None:
            return ""
        facts, differences = self.facts(), []
        for subject in dict.fromkeys((*reference, *facts)):
            if facts.get(subject) != reference.get(subject):
                fact, first_fact = facts.get(subject, "unknown"), reference.get(subject, "unknown")
                differences.append(f"{subject} is {fact}, on rank {first} {first_fact}")
        return _shorten(listed(differences, SHOWN, "; "))


NO_INTENT = Intent.of(AGREE_ON_STEP, {})
"""The intent of a process that steps alone: there is none to differ from."""


def refusal(task: Task, complaints: Mapping[int, str]) -> RuntimeError:
    """Return the error of ranks that have none of their own, from the complaints of all (empty ones are left out)."""
    # Ranks that say the same are named together.
    by_text: defaultdict[str, list[int]] = defaultdict(list)
    for rank, text in complaints.items():
        if text:
            by_text[text].append(rank)
    sentences = []
    for text, ranks in by_text.items():
        sentences.append(f"rank{'' if len(ranks) == 1 else 's'} {listed(ranks)}: {text}")
    return RuntimeError(f"{task.failure}. {fitted(sentences, '; ', task.failure, task.advice)}. {task.advice}")


_SORTED_RATES = sorted(RATES)
_UNPLANNED = RATES | HISTORY_OPTIONS | NAMES


def plan_options(group: ParamGroup) -> dict[str, Any]:
    """Return the options that plans are made of: all but rates.  If they change, plans are made again."""
    return {key: value for key, value in group.items() if key not in _UNPLANNED}


def plan_facts(groups: Mapping[int, ParamGroup]) -> Facts:
    """Return the options of groups (by number) that hold as long as a plan; coefficients as numbers."""
    facts = {}
    for number, group in groups.items():
        for name, value in plan_options(group).items():
            facts[f"{name} of group {number}"] = repr(coefficient_set(value) if name == "ns_coefficients" else value)
    return facts


def _list_rates(groups: Mapping[int, ParamGroup]) -> Iterator[tuple[int, str, float]]:
    for number, group in groups.items():
        for name in _SORTED_RATES:
            if name in group:
                values = group[name] if isinstance(group[name], tuple | list) else (group[name],)
                for value in values:
                    try:
                        rate = float(value)
                    except (TypeError, ValueError, RuntimeError):  # its rank tells the others, as it tells any error
                        rate = math.nan
                    yield number, name, rate


_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate((None, *_DTYPES))}

Dtypes = tuple[torch.dtype | None, ...]


@lru_cache(maxsize=16)
def _dtype_bytes(gradients: Dtypes, momenta: Dtypes) -> bytes:
    return bytes([_DTYPE_NUMBERS[dtype] for dtype in gradients + momenta])


def step_intent(
    groups: Mapping[int, ParamGroup],
    constants: Facts,
    gradients: Dtypes = (),
    momenta: Dtypes = (),
    labels: Callable[[], Sequence[str]] = list,
) -> Intent:
    """Return the intent to step those parameters that have a gradient, at the rates that their groups have now.

    Args:
        groups: by number.
        constants: facts that must be the same as well.
        gradients, momenta: dtypes by parameter; None for a missing gradient.
        labels: names the parameters, where ranks differ.
    """

    def facts() -> Facts:
        dtypes = {}
        for label, gradient, momentum in zip(labels(), gradients, momenta, strict=True):
            dtypes[f"the gradient of {label}"] = "missing" if gradient is None else f"there, {gradient}"
            dtypes[f"the momentum of {label}"] = str(momentum)
        rates: defaultdict[str, list[str]] = defaultdict(list)
        for number, name, value in _list_rates(groups):
            rates[f"{name} of group {number}"].append(str(value))
        shown_rates = {subject: ", ".join(values) for subject, values in rates.items()}
        return {PLAN_FACT: "kept", **constants, **dtypes, **shown_rates}

    # A digest of everything is compared in each step, so it is made of a few bytes.
    rates_now = array("d", [value for *_, value in _list_rates(groups)])
    content = _dtype_bytes(gradients, momenta) + rates_now.tobytes() + repr(sorted(constants.items())).encode()
    return Intent(AGREE_ON_STEP, _digest(content), facts)


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_COMPLAINT else f"{text[: LONGEST_COMPLAINT - 1]}…"
