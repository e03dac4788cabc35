"""Steps that ranks take together: an error on one reaches the others, and so does a gradient that skips the step.

A gradient that is not finite, or would make a momentum that is not, is one bit in the first notes that ranks exchange
(`step.exchange`), so all of them decide alike before anything is changed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..layouts.tensors import local_of
from ..names.errors import warn_on_rank
from ..names.state_forms import stored_slot
from ..names.vocabulary import EXP_AVG_SQ, ParamGroup
from ..names.wording import listed
from .given import unsaid
from .ground.cuda_graphs import is_capturing
from .state import as_numbers
from .step.agreement import Facts, Task, refusal
from .step.exchange import gather_texts
from .step.rank_sets import State


class CollectiveOptimizer(Optimizer):
    """An optimizer that takes each step together with other ranks.

    If a closure, a hook, or a check fails on one rank, it still takes part in the step, with the error in place of its
    part, and all ranks raise.

    Attributes:
        given: the hyper-parameters that the code gave each group, as `given_in` returns them.
    """

    given: list[dict[str, Any]]

    _awaited = False
    """Whether the other ranks wait for this one's part in the step under way."""

    _stepped, _dropped = True, 0
    """True once a step has taken the gradients since they were zeroed, and how often they were zeroed without one."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as any torch optimizer does, with rates that are tensors written as numbers."""
        state = super().state_dict()
        for group, given in zip(state["param_groups"], self.given, strict=True):
            group.update({key: as_numbers(value) for key, value in group.items()} | unsaid(group, given))
        return state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero gradients as any torch optimizer does, and count those that no step has taken."""
        if not self._stepped and any(p.grad is not None for group in self.param_groups for p in group["params"]):
            self._dropped += 1
        self._stepped = False
        super().zero_grad(set_to_none)

    def _gradients_taken(self) -> Facts:
        """Count anew, and return the fact that shows a rank that alone has dropped gradients, and left out a step."""
        dropped, self._stepped, self._dropped = self._dropped, True, 0
        return {"the number of times that gradients were dropped without a step": str(dropped)}

    def _take_part(self, failure: Exception | None) -> bool:
        """Take a step together with the other ranks, or tell them of a failure; returns False if it is not taken.

        Raises:
            Exception: on all ranks, if one of them fails; this rank's own if it has one.
        """
        raise NotImplementedError

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Let a step run its hooks, as torch does; errors before `_take_part` are told to the other ranks."""
        hooked = Optimizer.profile_hook_step(func)

        @wraps(func)
        def step(self: CollectiveOptimizer, *args: Any, **kwargs: Any) -> Any:
            self._awaited = True
            try:
                return hooked(self, *args, **kwargs)
            except Exception as error:
                if self._awaited and not is_capturing():
                    self._take_part(error)
                raise
            finally:
                self._awaited = False

        return step


ACTIONS = ("skip", "raise")

MOST_SKIPPED = 10
"""The default of skipped steps in a row: a spike is over by then, and a run that has diverged has lost minutes."""

TRAVELS = torch.finfo(torch.float32).max
"""The largest update that can travel, in float32, or in bfloat16, whose range is nearly the same."""

NAMED = 4
"""Parameters that a rank names; the others are counted."""

REFUSED = Task(
    "the optimizer does not step: gradients are not finite, or too large for their state",
    "Parameters and state are as they were before, on all ranks that share parameters: look at the batch and the loss, "
    "or go on from a checkpoint before them",
)


@dataclass(frozen=True, slots=True)
class Guarded:
    """The gradient that this rank holds of a parameter, the largest element allowed, and the parameter's name."""

    gradient: Tensor
    largest: float
    name: str

    @property
    def is_too_large(self) -> bool:
        return not bool((_sizes([self.gradient]) <= self.largest).all())


class NonFinite:
    """Skips steps, or raises, where gradients are not finite.

    Args:
        action: "skip" or "raise".
        most_in_a_row: after so many skipped steps, the next one raises.

    Attributes:
        policy: the arguments, in words.
        skipped, in_a_row: numbers of skipped steps.
    """

    def __init__(self, action: str, most_in_a_row: int) -> None:
        if action not in ACTIONS:
            raise ValueError(f"nonfinite={action!r}: expected None, 'skip' or 'raise'")
        if not isinstance(most_in_a_row, int) or most_in_a_row < 0:
            raise ValueError(f"most_skipped={most_in_a_row!r}: expected a number of steps, at least 0")
        self._most = most_in_a_row if action == "skip" else 0
        self.policy = f"{action!r}, with most_skipped={most_in_a_row}"
        self.skipped, self.in_a_row = 0, 0

    def look(self, held: Iterable[Guarded], failure: Exception | None) -> tuple[Tensor, Exception | None]:
        """Return whether this rank skips the step for a gradient, a bool on the device, and the failure, or that of
        looking.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        if is_capturing():
            raise RuntimeError(
                "nonfinite lets the host decide whether a step is taken, and a CUDA graph does what was captured: "
                "build the optimizer with nonfinite=None, and look at the norm of the gradients between replays"
            )
        skip = torch.zeros((), dtype=torch.bool)
        try:
            return (skip, failure) if failure is not None else (_any_too_large(held), None)
        except Exception as error:
            return skip, error

    def settle(self, taken: bool, held: Iterable[Guarded], together: dist.ProcessGroup | None) -> None:
        """Count a step that the ranks of a process group have taken, or not.

        Warns:
            RuntimeWarning: it was skipped; names this rank's parameters that are at fault.

        Raises:
            RuntimeError: on all ranks: steps are not to be skipped, or too many were.  Collective then.
        """
        if taken:
            self.in_a_row = 0
            return
        named = _named([mine.name for mine in held if mine.is_too_large])
        self.in_a_row += 1
        if self.in_a_row > self._most:
            before = f" ({self._most} steps before this one were skipped)" if self._most else ""
            raise refusal(replace(REFUSED, failure=REFUSED.failure + before), gather_texts(named, together))
        self.skipped += 1
        warn_on_rank(
            f"a step was skipped, number {self.skipped} of this run and {self.in_a_row} in a row: "
            f"{named or 'other ranks have gradients that are not finite, or too large for their state'}",
            RuntimeWarning,
            stacklevel=2,
        )


def _any_too_large(held: Iterable[Guarded]) -> Tensor:
    by_kind: defaultdict[tuple[torch.device, torch.dtype, float], list[Tensor]] = defaultdict(list)
    for mine in held:
        by_kind[mine.gradient.device, mine.gradient.dtype, mine.largest].append(mine.gradient)
    if not by_kind:
        return torch.zeros((), dtype=torch.bool)
    # Written so that NaN fails the test.
    fine = [(_sizes(some) <= largest).all() for (*_, largest), some in by_kind.items()]
    return ~torch.stack([fit.to(fine[0].device) for fit in fine]).all()


def guarded(groups: Iterable[ParamGroup], state: State) -> Iterator[Guarded]:
    """Yield the parameters that take part in a step, of which this rank holds elements."""
    for number, group in enumerate(groups):
        names = group.get("param_names", [f"{index} of group {number}" for index in range(len(group["params"]))])
        limits: dict[tuple[torch.dtype, ...], float] = {}  # a group's parameters have the same slots
        for param, name in zip(group["params"], names, strict=False):
            if param.grad is not None and (gradient := local_of(param.grad)).numel():
                slots = state[param]
                dtypes = tuple([value.dtype for value in slots.values()])
                if dtypes not in limits:
                    limits[dtypes] = largest(slots)
                yield Guarded(gradient, limits[dtypes], name)


def largest(slots: Mapping[str, Tensor]) -> float:
    """Return the size up to which an element of a gradient gives a finite state and update.

    An exponential moving average is no larger than its numbers.  So momenta stay below half of the end of their range,
    and differences of two can be computed; averages of squares stay within theirs.  A finite matrix has a finite update
    then: singular values begin below 1, and no published set makes more than 2 of them, for which `recipe.HOLD` has
    room.
    """
    floats = {slot: torch.finfo(own.dtype).max for slot, own in slots.items() if own.is_floating_point() and own.ndim}
    ends = [TRAVELS, *floats.values()]
    squared = [math.sqrt(end) for slot, end in floats.items() if stored_slot(slot).slot == EXP_AVG_SQ]
    return min([end / 2 for end in ends] + squared)


def _sizes(tensors: Sequence[Tensor]) -> Tensor:
    """Return sizes of elements, the largest of each tensor among them, float32 at least; NaN if there is one."""
    if tensors[0].device.type == "cpu":  # torch's norm of this kind takes ten times as long there
        largest = torch.stack([end for tensor in tensors for end in torch.aminmax(tensor)]).abs_()
    else:
        largest = torch.stack(torch._foreach_norm(list(tensors), math.inf))
    return largest.to(torch.promote_types(largest.dtype, torch.float32))


def _named(names: Sequence[str]) -> str:
    return f"gradients that are not finite, or too large for their state: {listed(names, NAMED)}" if names else ""
