"""The beginning of a run from a checkpoint of another one: of any program, written by whatever optimizer.

Weights go on, and the state of each parameter whose method is the same; all other state begins at zero.  Options are
those of the code, and schedulers go on at the step of the other run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...checkpoint.all_ranks import broadcast_from_first, decide_on_first
from ...checkpoint.loading import load
from ...checkpoint.training import MODEL, OPTIMIZER, SCHEDULER, Training
from ...converters.engine.container import container_of
from ...converters.engine.job import make_job
from ...converters.engine.workers import joined_ranks
from ...converters.options import Execution, Translation
from ...converters.target.topology import Target
from ...names.errors import ArgumentError, DamageError, SourceError
from ...names.resumption import Globs, as_initialised
from ...names.vocabulary import ALGORITHM, EXP_AVG, EXP_AVG_SQ, MOMENTUM, PARAMS, STEP
from ...names.wording import counted
from ...store.io import publish
from ...store.io.location import Location, is_there, location
from ...store.verify.diagnosis import open
from ..step_folder import DESCRIPTIONS

COPY = ".begin-from"
"""The folder beside the steps of a run that has the other checkpoint with our keys, until it has been loaded."""

_METHODS_OF_TORCH: Mapping[type[torch.optim.Optimizer], tuple[str, frozenset[str]]] = {
    torch.optim.AdamW: ("adamw", frozenset({EXP_AVG, EXP_AVG_SQ, STEP})),
    torch.optim.Muon: ("muon", frozenset({MOMENTUM})),
}
"""Our names of the methods of torch's optimizers, and the slots that they keep."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a run has begun with.

    Attributes:
        path: of the checkpoint.
        step: the one to go on with.
        weights: how many were loaded.
        continued, new: how many parameters go on with their state, and how many begin without.
        kept: how many weights are as the code made them.
        schedule_steps: how often the schedulers have been stepped; None without any.
    """

    path: str
    step: int
    weights: int
    continued: int
    new: int
    kept: int
    schedule_steps: int | None

    def __str__(self) -> str:
        kept = f"{as_initialised(self.kept)}; " if self.kept else ""
        schedules = "" if self.schedule_steps is None else f"; schedules are at their step {self.schedule_steps}"
        return (
            f"begun from {self.path}: {kept}{counted(self.weights, 'weight')} loaded; the state of "
            f"{counted(self.continued, 'parameter')} goes on, that of {self.new} begins at zero{schedules}; next step: "
            f"{self.step}"
        )


@dataclass(frozen=True, slots=True)
class _Source:
    """What the first rank has read of the checkpoint, with our keys.

    Attributes:
        slots: by parameter, the shape of each slot of its state.
        methods: by parameter, the algorithm of its group.
        updates: the most updates that a parameter counts; None if none does.
        epochs: the step at which a scheduler was; None if there is none.
    """

    slots: Mapping[str, Mapping[str, tuple[int, ...]]]
    methods: Mapping[str, str]
    updates: int | None
    epochs: int | None


def begin(
    training: Training,
    source: str,
    folder: Location,
    fresh: Iterable[str],
    step: int | None,
    group: dist.ProcessGroup | None,
) -> Beginning:
    """Set a model, its optimizers and schedulers from a checkpoint of another run.  Collective.

    Args:
        source: its path or URL.
        folder: of the run that begins.
        fresh: globs of names of parameters that are as the code makes them.
        step: the one to go on with; None means the one behind the checkpoint's.

    Raises:
        ArgumentError: a scheduler needs metrics, or has been stepped; or the checkpoint does not say its step.
        SourceError, TargetError, DestinationError: the checkpoint cannot be converted, or lacks weights.
    """
    _refuse_schedules(training.schedulers)
    globs, copy = Globs.of(fresh), folder / COPY
    # 1. The checkpoint with our keys, as conversion writes it.
    recorded_step = _convert(source, copy, group)
    found = broadcast_from_first(group, lambda: _read(copy))
    first = step if step is not None else recorded_step
    if first is None and (first := found.updates) is None:
        raise ArgumentError(
            f"{source} does not say how many steps it took. Write run.resume(begin_from={source!r}, begin_step=N), "
            "where N is the step to go on with"
        )
    # 2. The tensors that go on, by parameter and slot.
    state_dict = training.state_dict()
    weights, state = state_dict[MODEL], state_dict[OPTIMIZER]
    methods = _live_methods(training, state)
    loaded_weights = {name: value for name, value in weights.items() if not globs.match(name)}
    loaded_state: dict[str, dict[str, Any]] = {}
    for name, slots in state["state"].items():
        shapes = {slot: tuple(value.shape) for slot, value in slots.items()}
        goes_on = shapes == found.slots.get(name) and methods.get(name) == found.methods.get(name)
        if goes_on and not globs.match(name):
            loaded_state[name] = slots
    template: dict[str, Any] = {MODEL: loaded_weights, OPTIMIZER: {"state": loaded_state}}
    load(template, str(copy), allow_extra=True, process_group=group)
    training.load_model_and_optimizers(weights | template[MODEL], state)
    # 3. Schedulers go on with the rates of the code's groups.
    schedule_steps = found.epochs if found.epochs is not None else first
    for scheduler in training.schedulers:
        _advance(scheduler, schedule_steps)
    decide_on_first(group, SourceError, lambda: None, lambda _: _remove(copy))
    parameters = methods.keys()
    return Beginning(
        source,
        first,
        len(loaded_weights),
        len(loaded_state),
        len(parameters - loaded_state.keys()),
        len(weights) - len(loaded_weights),
        schedule_steps if training.schedulers else None,
    )


def _refuse_schedules(schedulers: Sequence[Any]) -> None:
    """Refuse schedulers of which nothing tells the rate at a step.

    Raises:
        ArgumentError: names the scheduler.
    """
    for scheduler in schedulers:
        kind = type(scheduler).__name__
        if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
            raise ArgumentError(
                f"{kind}: its rate depends on more than the number of steps, so that the rate at the step of another "
                "run is not known. Make the series without it, call resume, and make the scheduler then"
            )
        # One of several has the steps of those in it.
        for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
            if getattr(part, "last_epoch", 0) > 0:
                raise ArgumentError(f"{kind}: expected a new scheduler, found one at its step {part.last_epoch}")


def _advance(scheduler: LRScheduler, steps: int) -> None:
    """Step a scheduler from its beginning, so that its groups have the rates of an uninterrupted run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of steps before the optimizer's first
        for _ in range(steps):
            scheduler.step()


def _convert(source: str, copy: Location, group: dist.ProcessGroup | None) -> int | None:
    """Write a checkpoint with our keys, all ranks together; return the step behind that which it records."""
    broadcast_from_first(group, lambda: _remove(copy))
    with joined_ranks(group) as workers, open(location(source, SourceError)) as opened:
        container = container_of("dcp", None)
        target = Target({"dp": 1})
        try:
            request = Translation().request("muonckpt")
            job = make_job(opened, target, (), request.outputs, container)
        except SourceError as error:
            if isinstance(error, DamageError):
                raise
            # Nothing is known of its optimizer, whose state begins at zero then.
            request = Translation(model_only=True).request("muonckpt")
            job = make_job(opened, target, (), request.outputs, container)
        Execution(jobs=1).run(job, copy, (), workers)
        recorded = opened.provenance.get("step")
        return recorded + 1 if isinstance(recorded, int) else None


def _read(copy: Location) -> _Source:
    """Read which state the converted checkpoint has of which parameter."""
    with open(copy) as opened:
        slots, updates = dict[str, dict[str, tuple[int, ...]]](), [0]
        for tensor in opened.tensors.values():
            if tensor.name is not None and tensor.slot is not None:
                slots.setdefault(tensor.name, {})[tensor.slot] = tensor.shape
                if tensor.slot == STEP:
                    updates.append(int(tensor.numpy().item()))
        methods: dict[str, str] = {}
        for options in opened.groups.values():
            methods |= dict.fromkeys(options[PARAMS], str(options[ALGORITHM]))
        epochs = opened.items.get(f"{SCHEDULER}.last_epoch")
        is_count = isinstance(epochs, int) and not isinstance(epochs, bool)
        return _Source(slots, methods, max(updates) or None, epochs if is_count else None)


def _live_methods(training: Training, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the method of each parameter that an optimizer steps, by its name; "" if that is not known."""
    groups = iter(state["param_groups"])
    methods: dict[str, str] = {}
    for optimizer in training.optimizers:
        torch_method, torch_slots = _METHODS_OF_TORCH.get(type(optimizer), ("", frozenset[str]()))
        for _ in optimizer.param_groups:
            group = next(groups)
            for name in group[PARAMS]:
                is_usual = torch_slots == state["state"].get(name, {}).keys()
                methods[name] = group.get(ALGORITHM) or (torch_method if is_usual else "")
    return methods


def _remove(copy: Location) -> None:
    if is_there(copy):
        publish.remove(copy, DESCRIPTIONS)
