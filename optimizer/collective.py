"""Steps that ranks take together: an error on one reaches the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .options import as_numbers, keys_of_code_options, params_of
from .step.agreement import Facts


class CollectiveOptimizer(Optimizer):
    """An optimizer that takes each step together with other ranks.

    If a closure, a hook, or a check fails on one rank, it still takes part in the step, with the error in place of its
    part, and all ranks raise.

    Attributes:
        code_options: the options that the code gave each group, as `options.options_in_code` returns them.
    """

    code_options: list[dict[str, Any]]

    _has_waiting_peers = False
    """Whether the other ranks wait for this rank's part in the present step."""

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

    def _consume_gradients(self) -> Facts:
        """Restart the count, and return the fact that shows a rank which alone has left out a step."""
        count, self._grads_consumed, self._zeroed_unused = self._zeroed_unused, True, 0
        return {"the number of times that gradients were dropped without a step": str(count)}

    def _step_with_ranks(self, failure: Exception | None) -> None:
        """Take a step together with the other ranks, or tell them of a failure."""
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
                if self._has_waiting_peers:
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
