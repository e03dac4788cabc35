"""Optimizers whose step is collective: an error on one rank reaches the others, wherever in ``step()`` it is raised."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.optim import Optimizer

from .cuda_graphs import capturing


class CollectiveOptimizer(Optimizer):
    """An optimizer that takes each step together with other ranks.

    A closure, a hook, or a check of gradients may fail on one rank only.  Then this rank still takes part in what the
    others wait for, with the error in the place of its part, and all of them raise.
    """

    _awaited = False
    """Whether the other ranks wait for this one's part in the step under way."""

    def _take_part(self, failure: Exception | None) -> bool:
        """Do what a step does together with the other ranks.  Collective.

        Args:
            failure: what keeps this rank from its part.

        Returns:
            Whether the step is taken.

        Raises:
            Exception: on all ranks, if one of them fails; this rank's own if it has one.
        """
        raise NotImplementedError

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Let a step run its hooks, as torch does; what is raised before `_take_part` is told there."""
        hooked = Optimizer.profile_hook_step(func)

        @wraps(func)
        def step(self: CollectiveOptimizer, *args: Any, **kwargs: Any) -> Any:
            self._awaited = True
            try:
                return hooked(self, *args, **kwargs)
            except Exception as error:
                if self._awaited and not capturing():
                    self._take_part(error)
                raise
            finally:
                self._awaited = False

        return step
