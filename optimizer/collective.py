"""Steps that ranks take together: an error on one reaches the others, and so does a gradient that skips the step.

A gradient that is not finite, or would make a momentum that is not, is one bit in the first notes that ranks exchange
(`step.exchange`), so all of them decide alike before anything is changed.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..layouts.tensors import local_of
from ..names.errors import warn_on_rank
from ..names.state_forms import stored_slot
from ..names.vocabulary import EXP_AVG_SQ, ParamGroup
from ..names.wording import listed
from .ground.cuda_graphs import is_capturing
from .options import as_numbers, keys_of_code_options, params_of
from .step.agreement import Facts, Task, refusal
from .step.exchange import gather_texts
from .step.rank_sets import State


class CollectiveOptimizer(Optimizer):
    """An optimizer that takes each step together with other ranks.

    If a closure, a hook, or a check fails on one rank, it still takes part in the step, with the error in place of its
    part, and all ranks raise.

    Attributes:
        code_options: the options that the code gave each group, as `options.options_in_code` returns them.
    """

    code_options: list[dict[str, Any]]

    _nonfinite: NonFinite | None = None
    """Skips steps, or raises, where gradients are not finite; None: nobody looks."""

    _has_waiting_peers = False
    """Whether the other ranks wait for this one's part in the present step."""

    _grads_consumed = True
    """Whether a step has used the gradients since they were zeroed."""

    _zeroed_unused = 0
    """How often gradients were zeroed without a step since the last one."""

    _end_hooks: Mapping[int, Callable[[], None]] = MappingProxyType({})
    """See `register_step_end_hook`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as any torch optimizer does, with rates that are tensors written as numbers."""
        state = super().state_dict()
        for group, options in zip(state["param_groups"], self.code_options, strict=True):
            keys = keys_of_code_options(group, options)
            group.update({key: as_numbers(value) for key, value in group.items()} | keys)
        return state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero gradients as any torch optimizer does, and count those that no step has used."""
        if not self._grads_consumed and any(param.grad is not None for param in params_of(self.param_groups)):
            self._zeroed_unused += 1
        self._grads_consumed = False
        super().zero_grad(set_to_none)

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because gradients were not finite (``nonfinite="skip"``)."""
        return self._nonfinite.skipped if self._nonfinite is not None else 0

    @property
    def _nonfinite_policy(self) -> str | None:
        return self._nonfinite.policy if self._nonfinite is not None else None

    def _consume_gradients(self) -> Facts:
        """Start the count anew, and return the fact that shows a rank which alone has left out a step."""
        count, self._grads_consumed, self._zeroed_unused = self._zeroed_unused, True, 0
        return {"the number of times that gradients were dropped without a step": str(count)}

    def _step_with_ranks(self, failure: Exception | None) -> bool:
        """Take a step together with the other ranks, or tell them of a failure; return False if it is skipped."""
        raise NotImplementedError

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Let a step run its hooks, as torch does; the other ranks hear of errors before `_step_with_ranks`."""
        hooked = Optimizer.profile_hook_step(func)

        @wraps(func)
        def step(self: CollectiveOptimizer, *args: Any, **kwargs: Any) -> Any:
            self._has_waiting_peers = True
            try:
                return hooked(self, *args, **kwargs)
            except Exception as error:
                # It came from a closure, a hook or a check, before the ranks met.
                if self._has_waiting_peers and not is_capturing():
                    self._step_with_ranks(error)
                raise
            finally:
                self._has_waiting_peers = False
                for hook in [*self._end_hooks.values()]:
                    hook()

        return step

    def register_step_end_hook(self, hook: Callable[[], None]) -> RemovableHandle:
        """Register a function that is called after each step, also after one that has failed."""
        hooks = self.__dict__.setdefault("_end_hooks", OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle


ACTIONS = ("skip", "raise")

MAX_SKIPPED_STEPS = 10
"""The default of skipped steps in a row: a spike is over by then, and a run that has diverged has lost minutes."""

MAX_WIRE_UPDATE = torch.finfo(torch.float32).max
"""The largest update that can travel, in float32, or in bfloat16, whose range is nearly the same."""

SHOWN_PARAMETERS = 4
"""Parameters that a rank names; others are counted."""

SKIP_TASK = Task(
    "the optimizer does not step: gradients are not finite, or too large for their state",
    "Parameters and state are as they were before, on all ranks that share parameters: look at the batch and the loss, "
    "or go on from a checkpoint before them",
)


@dataclass(frozen=True, slots=True)
class GuardedGradient:
    """This rank's part of a parameter's gradient, the largest element allowed, and the parameter's name."""

    gradient: Tensor
    max_element: float
    name: str

    @property
    def is_too_large(self) -> bool:
        return not bool((_largest_elements([self.gradient]) <= self.max_element).all())


class NonFinite:
    """Skips steps, or raises, where gradients are not finite.

    Args:
        action: "skip" or "raise".
        max_in_a_row: after so many skipped steps, the next one raises.

    Attributes:
        policy: the arguments, in words.
        skipped, in_a_row: numbers of skipped steps.
    """

    def __init__(self, action: str, max_in_a_row: int) -> None:
        if action not in ACTIONS:
            raise ValueError(f"nonfinite={action!r}: expected None, 'skip' or 'raise'")
        if not isinstance(max_in_a_row, int) or max_in_a_row < 0:
            raise ValueError(f"most_skipped={max_in_a_row!r}: expected a number of steps, at least 0")
        self._max_in_a_row = max_in_a_row if action == "skip" else 0
        self.policy = f"{action!r}, with most_skipped={max_in_a_row}"
        self.skipped, self.in_a_row = 0, 0

    def check(self, gradients: Iterable[GuardedGradient], failure: Exception | None) -> tuple[Tensor, Exception | None]:
        """Return whether this rank skips the step for a gradient, a bool on the device, and the failure, if any."""
        if is_capturing():
            raise RuntimeError(
                "nonfinite lets the host decide whether a step is taken, and a CUDA graph does what was captured: "
                "build the optimizer with nonfinite=None, and look at the norm of the gradients between replays"
            )
        skip = torch.zeros((), dtype=torch.bool)
        try:
            return (skip, failure) if failure is not None else (_any_too_large(gradients), None)
        except Exception as error:
            return skip, error

    def record_step(
        self, is_skipped: bool, gradients: Iterable[GuardedGradient], group: dist.ProcessGroup | None
    ) -> None:
        """Count a step that the ranks of a process group have taken, or warn that they have skipped it.

        Raises:
            RuntimeError: on all ranks: steps are not to be skipped, or too many were.  Collective then.
        """
        if not is_skipped:
            self.in_a_row = 0
            return
        # Name the gradients of this rank, and raise once there were too many skipped steps.
        names = [guarded.name for guarded in gradients if guarded.is_too_large]
        complaint = "gradients that are not finite, or too large for their state"
        report = f"{complaint}: {listed(names, SHOWN_PARAMETERS)}" if names else ""
        self.in_a_row += 1
        if self.in_a_row > self._max_in_a_row:
            history = f" ({self._max_in_a_row} steps before this one were skipped)" if self._max_in_a_row else ""
            raise refusal(replace(SKIP_TASK, failure=SKIP_TASK.failure + history), gather_texts(report, group))
        self.skipped += 1
        warn_on_rank(
            f"a step was skipped, number {self.skipped} of this run and {self.in_a_row} in a row: "
            f"{report or f'other ranks have {complaint}'}",
            RuntimeWarning,
        )


def _any_too_large(gradients: Iterable[GuardedGradient]) -> Tensor:
    # One operation for all gradients of a device, a dtype and a limit.
    by_kind: defaultdict[tuple[torch.device, torch.dtype, float], list[Tensor]] = defaultdict(list)
    for guarded in gradients:
        by_kind[guarded.gradient.device, guarded.gradient.dtype, guarded.max_element].append(guarded.gradient)
    if not by_kind:
        return torch.zeros((), dtype=torch.bool)
    # Written so that NaN fails the test.
    fits = [(_largest_elements(tensors) <= limit).all() for (*_, limit), tensors in by_kind.items()]
    return ~torch.stack([fit.to(fits[0].device) for fit in fits]).all()


def guard_gradients(groups: Iterable[ParamGroup], state: State) -> Iterator[GuardedGradient]:
    """Yield the gradients of a step of which this rank has elements."""
    for number, group in enumerate(groups):
        names = group.get("param_names", [f"{index} of group {number}" for index in range(len(group["params"]))])
        limits: dict[tuple[torch.dtype, ...], float] = {}  # a group's parameters have the same slots
        for param, name in zip(group["params"], names, strict=False):
            if param.grad is not None and (gradient := local_of(param.grad)).numel():
                slots = state[param]
                dtypes = tuple([value.dtype for value in slots.values()])
                if dtypes not in limits:
                    limits[dtypes] = max_gradient(slots)
                yield GuardedGradient(gradient, limits[dtypes], name)


def max_gradient(slots: Mapping[str, Tensor]) -> float:
    """Return the size up to which an element of a gradient gives a finite state and update.

    An exponential moving average is no larger than its numbers, so momenta stay below half of the end of their range,
    and averages of squares within theirs.  A finite matrix has a finite update then: singular values begin below 1, and
    no published set makes more than 2 of them, for which `recipe.HOLD` has room.
    """
    limits = [MAX_WIRE_UPDATE / 2]
    for name, tensor in slots.items():
        if tensor.is_floating_point() and tensor.ndim:
            end = torch.finfo(tensor.dtype).max
            limits.append(end / 2)
            if stored_slot(name).slot == EXP_AVG_SQ:
                limits.append(math.sqrt(end))
    return min(limits)


def _largest_elements(tensors: Sequence[Tensor]) -> Tensor:
    """Return sizes of elements, the largest of each tensor among them, float32 at least; NaN if there is one."""
    if tensors[0].device.type == "cpu":  # torch's norm of this kind takes ten times as long there
        ends: list[Tensor] = []
        for tensor in tensors:
            ends += torch.aminmax(tensor)
        sizes = torch.stack(ends).abs_()
    else:
        sizes = torch.stack(torch._foreach_norm(list(tensors), math.inf))
    return sizes.to(torch.promote_types(sizes.dtype, torch.float32))
