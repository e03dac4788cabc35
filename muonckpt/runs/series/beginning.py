"""The beginning of a run from a checkpoint of another one: of any program, written by whatever optimizer.

Weights go on, and the state of each parameter whose method is the same; all other state begins at zero.  Options are
those of the code, and schedulers go on at the step of the other run.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...checkpoint.all_ranks import JointWork, broadcast_from_first
from ...checkpoint.loading import LoadCall, run_load
from ...checkpoint.refusal import RESUME
from ...checkpoint.resume_proof import same_value
from ...checkpoint.training import MODEL, OPTIMIZER, Training
from ...converters.engine.container import container_of
from ...converters.engine.job import make_job
from ...converters.engine.workers import joined_ranks
from ...converters.options import Execution, Translation, outputs_of
from ...converters.target.topology import Target
from ...names.errors import (
    ArgumentError,
    DamageError,
    RemovedError,
    SourceError,
    UnknownOptimizerError,
    UnnamedStateError,
)
from ...names.resumption import Choices, as_initialised, in_short
from ...names.vocabulary import ALGORITHM, EXP_AVG, EXP_AVG_SQ, MOMENTUM, PARAMS, RUN_OPTIONS, STEP
from ...names.wording import counted, enumerated, listed
from ...store.io import publish
from ...store.io.limits import LimitError
from ...store.io.location import Location, is_there, location
from ...store.verify.diagnosis import open
from ..step_folder import DESCRIPTIONS

COPY = ".begin-from"
"""The folder beside the steps of a run that has the other checkpoint with our keys, until it has been loaded."""

_COUNTER = ".last_epoch"
"""The end of the key under which a scheduler of torch saves its step."""

_METHODS_OF_TORCH: Mapping[type[torch.optim.Optimizer], tuple[str, frozenset[str]]] = {
    torch.optim.AdamW: ("adamw", frozenset({EXP_AVG, EXP_AVG_SQ, STEP})),
    torch.optim.Muon: ("muon", frozenset({MOMENTUM})),
}
"""Our names of the methods of torch's optimizers, and the slots that they keep."""

_METHOD_BY_SLOTS = {slots: method for method, slots in _METHODS_OF_TORCH.values()}
"""The method of a group that does not say it, such as that of torch's AdamW beside a Muon of ours."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The beginning of a run.

    Attributes:
        path: of the checkpoint.
        step: the one to go on with.
        weights: how many were loaded.
        continued, new: how many parameters go on with their state, and how many begin without.
        kept: how many weights are as the code made them.
        grown: the names of parameters that have more rows than in the checkpoint.
        unused: the names of weights that only the checkpoint has.
        extra: the names of other objects, which are as the code made them.
        changed_options: values of the code that differ from the checkpoint's, for state that goes on; without lr.
        is_known: whether the checkpoint's optimizer is known.
        schedule_steps: how often the schedulers have been stepped; None without any.
    """

    path: str
    step: int
    weights: int
    continued: int
    new: int
    kept: int
    grown: Sequence[str]
    unused: Sequence[str]
    extra: Sequence[str]
    changed_options: Sequence[str]
    is_known: bool
    schedule_steps: int | None

    def __str__(self) -> str:
        parts = [as_initialised(self.kept)] if self.kept else []
        parts.append(f"{counted(self.weights, 'weight')} loaded")
        if self.grown:
            parts.append(f"{in_short(self.grown)} grown, new rows begin")
        if self.unused:
            parts.append(f"not loaded, as the model lacks them: {in_short(self.unused)}")
        if not self.is_known:
            parts.append("its optimizer is not known")
        new = f", that of {self.new} begins at zero" if self.new else ""
        parts.append(f"the state of {counted(self.continued, 'parameter')} goes on{new}")
        if self.extra:
            parts.append(f"as the code made it: {in_short(self.extra)}")
        if self.schedule_steps is not None:
            parts.append(f"schedules are at their step {self.schedule_steps}")
        changed = f", so {listed(self.changed_options, 3)}" if self.changed_options else ""
        return (
            f"begun from {self.path}: {'; '.join(parts)}; next step: {self.step}; "
            f"lr and other options are the code's{changed}"
        )


@dataclass(frozen=True, slots=True)
class _Source:
    """The part of the checkpoint that the first rank has read, with our keys.

    Attributes:
        weights: the shape of each.
        slots: by parameter, the shape of each slot of its state.
        methods: by parameter, the algorithm of its group.
        options: by parameter, the options of its group.
        updates: the most updates that a parameter counts; None if none does.
        epochs: the steps at which schedulers were, each once.
    """

    weights: Mapping[str, tuple[int, ...]]
    slots: Mapping[str, Mapping[str, tuple[int, ...]]]
    methods: Mapping[str, str]
    options: Mapping[str, Mapping[str, object]]
    updates: int | None
    epochs: frozenset[int]


def begin(
    training: Training,
    source: str,
    folder: Location,
    choices: Choices,
    step: int | None,
    group: dist.ProcessGroup | None,
) -> Beginning:
    """Set a model, its optimizers and schedulers from a checkpoint of another run.  Collective.

    Args:
        source: its path or URL.
        folder: of the run that begins.
        choices: which parameters start fresh, and which have grown.
        step: the one to go on with; None means the one after the checkpoint's.

    Raises:
        ArgumentError: a scheduler needs metrics, or has been stepped; or the checkpoint does not say its step, or
            that of its schedulers.
        SourceError, TargetError, DestinationError: the checkpoint cannot be converted, or lacks weights.
    """
    _refuse_schedules(training.schedulers)
    copy = folder / COPY
    # 1. The checkpoint with our keys, as conversion writes it.
    recorded_step, is_known = _convert(source, copy, group)
    found = broadcast_from_first(group, lambda: _read(copy))
    first = step if step is not None else recorded_step
    if first is None and (first := found.updates) is None:
        raise ArgumentError(
            f"{source} does not say how many steps it took. Write run.resume(begin_from={source!r}, begin_step=N), "
            "where N is the step to go on with"
        )
    if len(found.epochs) > 1 and training.schedulers:
        raise ArgumentError(
            f"expected schedulers at one step in {source}, found {enumerated([*map(str, sorted(found.epochs))])}. Make "
            "the series without scheduler, call resume, then make the scheduler and step it as often as it was"
        )
    # 2. The tensors that go on, by parameter and slot.  A fresh weight of another shape is as the code makes it.
    state_dict = training.state_dict()
    weights, state = state_dict[MODEL], state_dict[OPTIMIZER]
    methods = _live_methods(training, state)
    loaded_weights: dict[str, Any] = {}
    for name, value in weights.items():
        if not choices.fresh.match(name) or tuple(value.shape) == found.weights.get(name):
            loaded_weights[name] = value
    loaded_state: dict[str, dict[str, Any]] = {}
    for name, slots in state["state"].items():
        saved, grows = found.slots.get(name, {}), choices.grow.match(name)
        fits = slots.keys() == saved.keys() and all(_fits(slots[slot].shape, saved[slot], grows) for slot in slots)
        if fits and methods.get(name) == found.methods.get(name) and not choices.fresh.match(name):
            loaded_state[name] = slots
    template: dict[str, Any] = {MODEL: loaded_weights, OPTIMIZER: {"state": loaded_state}}
    try:
        options = {"allow_extra": True, "grow": choices.grow.patterns}
        loaded = run_load(LoadCall(template, str(copy), options, RESUME, group=group))
    except SourceError as error:  # raised on all ranks
        _remove_on_first(copy, group)
        raise error.with_text(str(error).replace(str(copy), source)) from error
    training.load_model_and_optimizers(weights | template[MODEL], state)
    # 3. Schedulers go on with the rates of the code's groups.
    taken_steps = found.updates or first if step is None else step
    schedule_steps = max(found.epochs, default=taken_steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of steps before the optimizer's first
        for scheduler in training.schedulers:
            for _ in range(schedule_steps):
                scheduler.step()
    _remove_on_first(copy, group)
    return Beginning(
        source,
        first,
        len(loaded_weights),
        len(loaded_state),
        len(methods.keys() - loaded_state.keys()),
        len(weights) - len(loaded_weights),
        loaded.report.grown,
        sorted(found.weights.keys() - weights.keys()),
        sorted(training.extra),
        [*_changed_options(found, state["param_groups"], loaded_state)],
        is_known,
        schedule_steps if training.schedulers else None,
    )


def _changed_options(found: _Source, groups: Iterable[Mapping[str, Any]], names: Collection[str]) -> Iterator[str]:
    """Yield options whose value the code changes for parameters with these names, and how many parameters these are."""
    changes: Counter[tuple[str, str, str]] = Counter()
    for group in groups:
        for name in {*names} & {*group[PARAMS]}:
            saved = found.options.get(name, {})
            for option in sorted((RUN_OPTIONS - {"lr"}) & group.keys() & saved.keys()):
                if not same_value(group[option], saved[option]):
                    changes[option, repr(group[option]), repr(saved[option])] += 1
    for (option, value, saved_value), count in changes.items():
        yield f"{option}={value} where {counted(count, 'parameter')} had {saved_value}"


def _fits(live: Sequence[int], saved: Sequence[int], grows: bool) -> bool:
    """Return whether a slot has the saved shape, or more rows if its parameter grows."""
    more_rows = len(live) == len(saved) > 0 and live[0] > saved[0] and [*live[1:]] == [*saved[1:]]
    return [*live] == [*saved] or (grows and more_rows)


def _refuse_schedules(schedulers: Sequence[Any]) -> None:
    """Refuse schedulers whose rate at a step cannot be found.

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
        if step := max(_steps_of(scheduler)):
            raise ArgumentError(f"{kind}: expected a new scheduler, found one at its step {step}")


def _steps_of(scheduler: Any) -> Iterator[int]:
    """Yield how often a scheduler has been stepped; a chained one has only the steps of its parts."""
    if hasattr(scheduler, "last_epoch"):
        yield scheduler.last_epoch
    else:
        for part in scheduler._schedulers:
            yield from _steps_of(part)


def _convert(source: str, copy: Location, group: dist.ProcessGroup | None) -> tuple[int | None, bool]:
    """Write a checkpoint with our keys, all ranks together.

    Returns:
        The step after the one that it records, and whether its optimizer is known; if not, weights alone are written.
    """
    broadcast_from_first(group, lambda: _remove(copy))
    with joined_ranks(group) as workers, open(location(source, SourceError)) as opened:
        container, target, is_known = container_of("dcp", None), Target({"dp": 1}), True
        try:
            job = make_job(opened, target, (), outputs_of(Translation().request("muonckpt")), container)
        except UnknownOptimizerError:
            is_known, request = False, Translation(model_only=True).request("muonckpt")
            job = make_job(opened, target, (), outputs_of(request), container)
        except (DamageError, LimitError, RemovedError, UnnamedStateError):  # no choice of the user makes it readable
            raise
        except SourceError as error:
            raise SourceError(
                f"{error}. Do so by muonckpt.convert({source!r}, 'copy', to_dialect='muonckpt', "
                "translation=muonckpt.Translation(...)), and begin from the copy"
            ) from None
        Execution(jobs=1).run(job, copy, (), workers)
        recorded = opened.provenance.get("step")
        return recorded + 1 if isinstance(recorded, int) else None, is_known


def _read(copy: Location) -> _Source:
    """Read which state the converted checkpoint has for which parameter."""
    with open(copy) as opened:
        slots, updates = dict[str, dict[str, tuple[int, ...]]](), [0]
        weights = {str(record.path[-1]): record.shape for record in opened.outline.tensors if record.path[0] == MODEL}
        for tensor in opened.tensors.values():
            if tensor.name is not None and tensor.slot is not None:
                slots.setdefault(tensor.name, {})[tensor.slot] = tensor.shape
                if tensor.slot == STEP:
                    updates.append(int(tensor.numpy().item()))
        methods: dict[str, str] = {}
        options_by_name: dict[str, Mapping[str, object]] = {}
        for options in opened.groups.values():
            for name in options[PARAMS]:
                options_by_name[name] = options
                slots_of_group = frozenset(slots.get(name, ()))
                methods[name] = str(options.get(ALGORITHM) or _METHOD_BY_SLOTS.get(slots_of_group, ""))
        # A scheduler of several counts for its parts, unless it has no step, as a chained one.
        counters = [key for key in opened.items if key.endswith(_COUNTER)]
        schedulers = {key.removesuffix(_COUNTER): key for key in counters}
        epochs = set[int]()
        for prefix, key in schedulers.items():
            if not any(prefix.startswith(f"{other}.") for other in schedulers) and type(opened.items[key]) is int:
                epochs.add(opened.items[key])
        return _Source(weights, slots, methods, options_by_name, max(updates) or None, frozenset(epochs))


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


def _remove_on_first(copy: Location, group: dist.ProcessGroup | None) -> None:
    with JointWork(group, SourceError) as work:
        if work.gather(None) is not None:
            _remove(copy)


def _remove(copy: Location) -> None:
    if is_there(copy):
        publish.remove(copy, DESCRIPTIONS)
