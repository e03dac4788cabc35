"""The objects of a training as one state dict, with the keys that their checkpoints have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from ..names.errors import ArgumentError
from ..names.keys import PARAM_GROUPS
from ..names.vocabulary import PARAMS, RUN_OPTIONS, STEP
from .resume_proof import same_value
from .schedules import is_of_torch, overridden_arguments

MODEL, OPTIMIZER, SCHEDULER = "model", "optimizer", "scheduler"
"""The keys of the objects in the state dict."""

LOADER = "extra={'loader': StatefulDataLoader(...)}, from torchdata.stateful_dataloader, which saves its place"
"""The line to write for a loader of torch, which has no state."""


@dataclass(frozen=True)
class Training:
    """A model with what trains it.

    Attributes:
        optimizers: all of them; their state is one, as ``get_state_dict(model, [one, other])`` gives it.
        schedulers: the state of one is a dict, that of several a list.
        extra: other objects with ``state_dict`` and ``load_state_dict``, by their keys.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]
    extra: Mapping[str, Stateful]

    @classmethod
    def of(cls, model: Any, optimizer: object, scheduler: object, extra: Mapping[str, Any] | None) -> Training:
        """Check what a user gives: one optimizer and scheduler, or several.

        Raises:
            ArgumentError: one of them is something else; or a key of ``extra`` is taken.
        """
        call = "Series(folder, model, optimizer, scheduler=scheduler, extra={'loader': loader})"
        optimizers, schedulers = _several(optimizer), _several(scheduler)
        refuse_other_objects(model, optimizers, call)
        if not optimizers:
            raise ArgumentError(f"expected an optimizer for the model, found none. Write {call}")
        objects = {**{f"scheduler {number}": each for number, each in enumerate(schedulers)}, **(extra or {})}
        for name, each in objects.items():
            if not isinstance(each, Stateful):
                found = type(each).__name__
                line = LOADER if isinstance(each, DataLoader) else call
                raise ArgumentError(f"{name}: expected state_dict and load_state_dict, found {found}. Write {line}")
        if taken := {MODEL, OPTIMIZER, SCHEDULER} & {*(extra or {})}:
            raise ArgumentError(f"extra: the key {min(taken)!r} is that of another object. Give it another name")
        return cls(model, optimizers, schedulers, dict(extra or {}))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all objects; ``extra`` unchanged, as `muonckpt.load` sets it by itself.

        Raises:
            ArgumentError: an optimizer steps other tensors than the parameters of the model, or those of another one;
                or torch cannot take its state.
        """
        for name, fault in foreign_parameters(self.model, self.optimizers):
            raise ArgumentError(
                f"{name} {fault}. Make the optimizer after what replaces parameters: fully_shard, "
                "parallelize_module, .to() of another device, load_state_dict(assign=True)"
            )
        optimizer_of: dict[int, Optimizer] = {}
        for optimizer in self.optimizers:
            for param in chain.from_iterable(group[PARAMS] for group in optimizer.param_groups):
                if optimizer_of.setdefault(id(param), optimizer) is not optimizer:
                    [name, *_] = (name for name, each in self.model.named_parameters() if each is param)
                    raise ArgumentError(
                        f"parameter {name!r} is in two optimizers, and a checkpoint has one state of each parameter. "
                        "Give the second optimizer a Series of its own"
                    )
        unstepped = self.unstepped
        try:
            weights, state = get_state_dict(self.model, self.optimizers)
        except (AssertionError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"torch's get_state_dict(model, optimizer) fails ({type(error).__name__}: {error}). It takes "
                "optimizers whose step needs no closure, and models whose parameters are initialised"
            ) from error
        # Torch makes state that an optimizer lacks by a step with gradients of zero, and its counters count that step.
        for optimizer in unstepped:
            for values in optimizer.state.values():
                if isinstance(values.get(STEP), Tensor):
                    values[STEP].zero_()
        # Parts of a scheduler may share rates that are tensors, and have others in a checkpoint: each gets its own.
        states = [tree_map_only(Tensor, Tensor.clone, scheduler.state_dict()) for scheduler in self.schedulers]
        schedules = {SCHEDULER: states[0] if len(states) == 1 else states} if states else {}
        return {MODEL: weights, OPTIMIZER: state, **schedules, **self.extra}

    @property
    def unstepped(self) -> list[Optimizer]:
        """The optimizers that have no state yet, as torch's before their first step."""
        return [optimizer for optimizer in self.optimizers if not optimizer.state]

    @property
    def lacks_scheduler(self) -> bool:
        """Whether a scheduler has been made for the optimizers, which is not among the objects."""
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers)
        return not self.schedulers_by_key and any("initial_lr" in group for group in groups)

    @property
    def schedulers_by_key(self) -> dict[str, Any]:
        """Every scheduler by its key in the state dict, also those of torch that are in ``extra``."""
        schedulers = dict(zip(self.scheduler_keys(), self.schedulers, strict=True))
        for key, each in self.extra.items():
            if isinstance(each, LRScheduler):
                schedulers[key] = each
        return schedulers

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the state of the model, then that of the optimizers, and that of the schedulers of their groups."""
        self.load_model_and_optimizers(state_dict[MODEL], state_dict[OPTIMIZER])
        for _, scheduler, saved in self._scheduler_states(state_dict):
            scheduler.load_state_dict(saved)

    def load_model_and_optimizers(self, weights: dict[str, Any], state: dict[str, Any]) -> None:
        """Set the state of the model, then that of the optimizers."""
        set_state_dict(self.model, self.optimizers, model_state_dict=weights, optim_state_dict=state)
        # Torch matches groups by their parameters, and leaves one without any without its options.
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers)
        for group, loaded in zip(groups, state[PARAM_GROUPS], strict=True):
            if not group[PARAMS]:
                group.update({option: value for option, value in loaded.items() if option != PARAMS})

    def overridden_values(self, state_dict: Mapping[str, Any]) -> list[str]:
        """Return, in words, what the code gave objects of torch and a state would replace by something else."""
        overridden: list[str] = []
        saved_groups = iter(state_dict[OPTIMIZER][PARAM_GROUPS])
        for optimizer in self.optimizers:
            for number, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=False)):
                # Programs may change rates by hand at each step.
                options = group.keys() & saved.keys() - RUN_OPTIONS - {PARAMS}
                for option in sorted(options) if is_of_torch(optimizer) else ():
                    if not same_value(group[option], saved[option]):
                        change = f"{saved[option]!r}, not {group[option]!r}"
                        overridden.append(f"param_groups[{number}][{option!r}]={change}")
        for scheduler_state in self._scheduler_states(state_dict):
            overridden += overridden_arguments(*scheduler_state)
        return overridden

    def _scheduler_states(self, state_dict: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        states = state_dict.get(SCHEDULER, [])
        each_state = states if isinstance(states, list) else [states]
        return zip(self.scheduler_keys(), self.schedulers, each_state, strict=True)

    def scheduler_keys(self) -> list[str]:
        """Return the key of each scheduler in the state dict."""
        if len(self.schedulers) == 1:
            return [SCHEDULER]
        return [f"{SCHEDULER}.{number}" for number in range(len(self.schedulers))]


def foreign_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, str]]:
    """Yield each optimizer that steps tensors which are not the model's parameters, and a phrase that says so."""
    own = {id(param) for param in model.parameters()}
    for number, optimizer in enumerate(optimizers):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if foreign := sum(id(param) not in own for param in params):
            yield f"optimizer {number}", f"steps {foreign} of {len(params)} parameters that are not the model's"


def _several(objects: Any) -> tuple[Any, ...]:
    if objects is None:
        return ()
    return tuple(objects) if isinstance(objects, Iterable) and not isinstance(objects, Mapping) else (objects,)


def refuse_other_objects(model: object, optimizers: Sequence[object], call: str) -> None:
    """Raise `ArgumentError` for a model or an optimizer that is something else; it ends with the call to write."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"expected a model, found {type(model).__name__}. Write {call}")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(f"expected an optimizer, found {type(optimizer).__name__}. Write {call}")
