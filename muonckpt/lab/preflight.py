"""The public question: if this job were started now, would it resume from this checkpoint, and with what?

The user's model and optimizer are built on one of many ranks, without their memory and the other ranks.  The answer is
that of `load` itself, which matches their state dict with the checkpoint, or of the rules of another program's loader:
what it takes from a checkpoint, refuses, and passes over in silence.  Nothing is read but metadata and options.

Sources: ``DefaultLoadPlanner`` and ``Optimizer.load_state_dict`` of torch 2.13; ``Trainer._load_from_checkpoint`` of
transformers 5; ``restore_optimizers`` of Lightning 2.6; torchtitan 0.3 loads with the first.
"""

from __future__ import annotations

import glob
import inspect
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..checkpoint.bits import dtype_name
from ..checkpoint.loading import LoadCall, rehearse_load
from ..checkpoint.refusal import LOAD, RESUME
from ..checkpoint.stored import Stored
from ..names.errors import DamageError, MuonckptError, SourceError, TargetError, UnavailableError
from ..names.keys import PARAM_GROUPS, STATE, OptimizerKey, StateForm, key_of
from ..names.resumption import NAMES_OF_GROUPS, Choices, LoadReport, as_initialised, as_tuples
from ..names.vocabulary import HISTORY_OPTIONS, PARAMS, KeyPath
from ..names.wording import command, counted, fields_of, listed, merged_names
from ..optimizer import Muon
from ..programs.model_view import Role, view_by_keys
from ..record.record import StateRecord
from ..store.io.location import Remote, location
from ..store.open_checkpoint import OpenCheckpoint
from ..store.verify.diagnosis import diagnosis_by_files, open
from ..store.verify.step_names import StepName
from ..store.verify.verification import unless_removed
from .built import Built, Maker, build, maker_of


@dataclass(frozen=True, slots=True)
class OptionChange:
    """An option of a parameter group that the code gives another value than the checkpoint; the saved one counts.

    Attributes:
        group: the first parameters of the group, as text.
    """

    group: str
    option: str
    saved_value: Any
    code_value: Any


@dataclass(frozen=True, slots=True)
class Preflight:
    """The answer whether a run would resume; true if it would.

    Attributes:
        loader: whose rules were applied.
        refusal: the error that the loader would raise, with the cure; empty if there is none.
        report: what would be loaded and what would begin from zero.
        changes: options whose saved values would replace those of the code.
        warnings: what the loader would not say, and the user would want to know.
        unasked: roots of the checkpoint's keys that neither the model nor the optimizer has, such as "lr_scheduler".
        verified: whether a verification has read the bytes of exactly these files.
        next_step: where a run takes it from, if it is not in the folder of one; else empty.
    """

    checkpoint: str
    source: str
    mesh: Mapping[str, int]
    loader: str
    refusal: str
    report: LoadReport
    changes: tuple[OptionChange, ...] = ()
    warnings: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()
    verified: bool = False
    next_step: str = ""

    def __bool__(self) -> bool:
        return not self.refusal

    @property
    def sentence(self) -> str:
        """The answer in one sentence, yes or no first."""
        if self.refusal:
            return f"no: {self.refusal}"
        fresh = f", {len(self.report.fresh)} would begin from zero" if self.report.fresh else ""
        weights = f"{as_initialised(len(self.report.kept))}, " if self.report.kept else ""
        known_by = "" if self.verified else f"; bytes not verified ({command('verify', self.checkpoint)})"
        return f"yes: {weights}the state of {len(self.report.loaded)} parameters would be loaded{fresh}{known_by}"

    def to_json(self) -> dict[str, Any]:
        return {"resumes": bool(self), "sentence": self.sentence, **fields_of(self)}


def preflight(
    checkpoint: str | os.PathLike[str] | Remote,
    make: str | Maker,
    mesh: Mapping[str, int] | None = None,
    *,
    rank: int = 0,
    loader: str = "muonckpt",
    allow_extra: bool | Iterable[str] = False,
    fresh: Iterable[str] = (),
    grow: Iterable[str] = (),
    ungrouped: Iterable[str] = (),
) -> Preflight:
    """Say whether a job would resume from a checkpoint, before it is queued, as ``muonckpt preflight`` prints it.

    The function is called on the meta device, in a fake process group of the size of the mesh; a file that is named is
    imported, which runs it, with your rights.  Reads only metadata and options of the checkpoint.

    Args:
        make: a function that returns a model and an optimizer (or several), or "FILE.py:FUNCTION".  If it takes an
            argument, that is the device mesh.
        mesh: sizes of axes by name, the outermost first; by default one rank.
        rank: the rank that is asked, as stages of a pipeline hold other parameters.
        loader: "muonckpt", or the program whose loader is used: "dcp", "torchtitan", "huggingface" or "lightning".
        allow_extra, fresh, grow, ungrouped: as for `load`.

    Raises:
        SourceError: the checkpoint cannot be read.
        TargetError: the function fails, or an argument does not fit.
    """
    mesh = {"dp": 1} if mesh is None else mesh
    if loader not in ("muonckpt", *_LOADERS):
        raise TargetError(f"loader={loader!r}: expected muonckpt, or one of {', '.join(_LOADERS)}")
    fresh = [*fresh]
    source = make if isinstance(make, str) else getattr(make, "__qualname__", repr(make))
    place = location(checkpoint, SourceError)
    with unless_removed(place), ExitStack() as stack:
        # 1. No loader reads lost tensors.
        try:
            opened = stack.enter_context(open(place))
            diagnosis = diagnosis_by_files(opened)
            if diagnosis.has_loss and not fresh:
                raise diagnosis.error
        except DamageError as error:
            return Preflight(str(checkpoint), source, dict(mesh), loader, refusal=str(error), report=LoadReport())
        stack.enter_context(_fake_ranks(math.prod(mesh.values()), rank))
        # 2. The state dict that the code would load into, with the keys that the checkpoint has for its parts.
        built = _build_on(maker_of(make) if isinstance(make, str) else make, source, mesh)
        if loader in _POSITIONAL and any(isinstance(optimizer, Muon) for optimizer in built.optimizers):
            raise TargetError(
                f"loader={loader!r}: muonckpt's optimizer checks what a trainer loads into it: ask loader='muonckpt'"
            )
        stored = Stored.of(opened, (rank, math.prod(mesh.values())))
        model_root, optimizer_root = _roots(opened, built)
        weights, state = _state_of(built, stored.form(key_of(optimizer_root)))
        state_dict: dict[str, Any] = {}
        _put(state_dict, model_root, weights)
        _put(state_dict, optimizer_root, state)
        stored_roots = dict.fromkeys(str(entry.path[0]) for entry in stored.entries.values())
        unasked = tuple(root for root in stored_roots if root not in state_dict)
        # 3. Find what the loader would do with both.
        if loader == "muonckpt":
            unasked_keys = [f"{glob.escape(root)}*" for root in unasked]
            patterns = (
                allow_extra if isinstance(allow_extra, bool) and allow_extra else [*(allow_extra or ()), *unasked_keys]
            )
            choices = {"allow_extra": patterns, "fresh": fresh, "grow": grow, "ungrouped": ungrouped}
            outcome = _as_load(opened, state_dict, choices)
        else:
            outcome = _LOADERS[loader](stored, state_dict)
        changes = tuple(_option_changes(outcome, stored, state_dict))
    return Preflight(
        str(checkpoint),
        source,
        dict(mesh),
        loader,
        refusal=outcome.refusal,
        report=outcome.report,
        changes=changes,
        warnings=(*outcome.warnings, *([diagnosis.sentence] if diagnosis else ())),
        unasked=unasked,
        verified=diagnosis.verified is not None,
        next_step="" if loader != "muonckpt" or outcome.refusal else _place_in_run(opened),
    )


def _place_in_run(opened: OpenCheckpoint) -> str:
    """Say where a run takes a checkpoint from; empty if it is one of its steps."""
    path, step = opened.path, opened.provenance.get("step")
    if StepName.parsed(path.name) is not None:
        return ""
    if opened.format.name != "muonckpt" or not isinstance(step, int):
        return f"begin a run from it: run.resume(begin_from={str(path)!r})"
    name = StepName(step)
    return f"a Series takes it as RUN/{name}, or as RUN/{name}.2 where that is there: move it to that place"


def _roots(opened: OpenCheckpoint, built: Built) -> tuple[KeyPath, KeyPath]:
    """Return where a checkpoint has weights and the state of the optimizer, as most of their keys say."""
    view = view_by_keys(opened.outline)
    names = {name for name, _ in built.model.named_parameters()}
    models: Counter[KeyPath] = Counter()
    for tensor in view.tensors_of(Role.WEIGHTS, Role.OTHER):
        if tensor.path[-1] in names:
            models[tensor.path[:-1]] += 1
    optimizers: Counter[KeyPath] = Counter()
    for tensor in view.tensors_of(Role.MOMENTUM, Role.MOMENTS, Role.STATE):
        for reading in OptimizerKey.of_slot(tensor.path):
            optimizers[reading.place.root] += 1
    model_root = models.most_common(1)[0][0] if models else ("model",)
    return model_root, optimizers.most_common(1)[0][0] if optimizers else ("optimizer",)


def _put(state_dict: dict[str, Any], root: KeyPath, values: Mapping[str, Any]) -> None:
    """Put values into a nested state dict below a root."""
    node = state_dict
    for part in root:
        node = node.setdefault(str(part), {})
    node.update(values)


def _as_load(opened: OpenCheckpoint, state_dict: dict[str, Any], choices: Mapping[str, Any]) -> _Outcome:
    """Ask `load` itself, up to where it would begin to read; for a step of a series as `resume` calls it."""
    try:
        call = LOAD
        if StepName.parsed(opened.path.name) is not None:
            call, choices = RESUME, Choices.of(**choices).without_fresh(opened.provenance.get("fresh")).as_arguments()
        matching, report, refusal = rehearse_load(
            LoadCall(state_dict, path=str(opened.path), choices=choices, name=call), opened
        )
    except UnavailableError:  # is no answer
        raise
    except MuonckptError as error:
        return _Outcome({}, LoadReport(), str(error))
    return _Outcome(matching.sources, report, refusal, warnings=matching.doubts)


def _option_changes(outcome: _Outcome, stored: Stored, state_dict: Mapping[str, Any]) -> Iterator[OptionChange]:
    """Yield the options whose saved values would replace other ones of the code, each once for all groups alike."""
    values, paths = flatten_state_dict(dict(state_dict))
    members = {key: value for key, value in values.items() if paths[key][-1] == PARAMS}
    owners: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    changes: dict[tuple[str, str, str], tuple[Any, Any]] = {}
    for key in outcome.sources.keys() & values.keys():
        reading = next(OptimizerKey.of_option(paths[key]), None)
        if reading is None or reading.leaf in NAMES_OF_GROUPS | HISTORY_OPTIONS:
            continue
        # Rates that a scheduler has changed are compared as they began.
        initial_key = f"{key.removesuffix(reading.leaf)}initial_{reading.leaf}"
        saved_key = initial_key if initial_key in stored.entries else outcome.sources[key]
        saved_value, code_value = as_tuples(stored.option(saved_key)), as_tuples(values.get(initial_key, values[key]))
        if saved_value != code_value:
            change = reading.leaf, repr(saved_value), repr(code_value)
            names = members.get(f"{key.removesuffix(reading.leaf)}{PARAMS}", [reading.name])
            owners[change] += map(str, names)
            changes[change] = saved_value, code_value
    for change, (saved_value, code_value) in sorted(changes.items()):
        yield OptionChange(
            group=listed(merged_names(owners[change]), 3),
            option=change[0],
            saved_value=saved_value,
            code_value=code_value,
        )


# The state dict of the code.

_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that launchers set, which a user's function may read."""


@contextmanager
def _fake_ranks(world_size: int, rank: int) -> Iterator[None]:
    """Make this process believe that it is one of many ranks: collectives return at once, and send nothing.

    Raises:
        TargetError: this process has a process group already.
    """
    if dist.is_initialized():
        raise TargetError(
            "preflight makes a process group of its own, and this process has one: call it in another one"
        )
    environment = {name: os.environ.get(name) for name in _ENVIRONMENT}
    values = (rank, 0, world_size, 1, "localhost", 29500)
    os.environ.update(zip(_ENVIRONMENT, map(str, values), strict=True))
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _build_on(make: Maker, source: str, mesh: Mapping[str, int]) -> Built:
    """Call the user's function, with a device mesh if it takes an argument.

    Raises:
        TargetError: the function fails, or returns something else than a model and an optimizer.
    """
    maker: Callable[..., Any] = make
    if inspect.signature(make).parameters:
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        return build(partial(maker, device_mesh), source)
    return build(make, source)


def _state_of(built: Built, form: StateForm | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dicts of the model and of its optimizers, in the form in which a checkpoint has the latter."""
    weights = get_model_state_dict(built.model)
    # torch's call also gives optimizers that have not stepped the state that they will have.
    options = StateDictOptions(flatten_optimizer_state_dict=form is StateForm.FLAT)
    state = get_optimizer_state_dict(built.model, built.optimizers, options=options)
    if form is StateForm.NUMBERED and len(built.optimizers) == 1:
        state = built.optimizers[0].state_dict()
    stand_ins: dict[Any, Tensor] = {}
    return _with_stand_ins(weights, stand_ins), _with_stand_ins(state, stand_ins)


def _with_stand_ins(value: Any, stand_ins: dict[Any, Tensor]) -> Any:
    """Return a nested value with tensors of the meta device replaced; tied ones stay tied."""
    match value:
        case Mapping():
            return {key: _with_stand_ins(part, stand_ins) for key, part in value.items()}
        case list():
            return [_with_stand_ins(part, stand_ins) for part in value]
        case DTensor() if value.is_meta:
            local = _stand_in(value.to_local(), stand_ins)
            return DTensor.from_local(
                local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        case Tensor() if value.is_meta:
            return _stand_in(value, stand_ins)
    return value


def _stand_in(tensor: Tensor, stand_ins: dict[Any, Tensor]) -> Tensor:
    """Return a tensor of the same shape in memory that is never written, and so takes none; tied tensors share it."""
    key = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape
    if key not in stand_ins:
        stand_ins[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return stand_ins[key]


# The loaders of other programs.


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The answer of a loader.

    Attributes:
        sources: keys of the checkpoint, by keys of the state dict.
        refusal: its error; empty if there is none.
        warnings: what it does in silence.
    """

    sources: Mapping[str, str]
    report: LoadReport
    refusal: str = ""
    warnings: tuple[str, ...] = ()


def _by_key(stored: Stored, state_dict: Mapping[str, Any]) -> _Outcome:
    """Load each key of the state dict: a missing key or another shape is refused, and others are cast or left."""
    values, paths = flatten_state_dict(dict(state_dict))
    entries = stored.entries
    missing_keys = sorted(values.keys() - entries.keys())
    sources = {key: key for key in values if key in entries}
    other_shapes, casts = [], []
    for key in sources:
        value, entry = values[key], entries[key]
        if isinstance(value, Tensor) and isinstance(entry, StateRecord):
            if tuple(value.shape) != entry.shape:
                other_shapes.append(f"{key} is {entry.shape}, and {tuple(value.shape)} in the code")
            elif dtype_name(value.dtype) != entry.dtype:
                casts.append(f"{key} from {entry.dtype} to {dtype_name(value.dtype)}")
    faults = []
    if missing_keys:
        faults.append(f"{counted(len(missing_keys), 'key')} not in the checkpoint: {listed(missing_keys, 4)}")
    if other_shapes:
        faults.append(f"other shapes: {listed(other_shapes, 4)}")
    # Keys that only the checkpoint has, in parts that are loaded, are lost without a message.
    roots = {key_of(path[:1]) for path in paths.values()}
    lost_keys = [key for key, entry in entries.items() if key not in values and key_of(entry.path[:1]) in roots]
    lost_state = [key for key in lost_keys if isinstance(entries[key], StateRecord)]
    warnings = []
    if lost_state:
        warnings.append(
            f"left in the checkpoint without a word: {counted(len(lost_state), 'tensor')}: {listed(lost_state, 4)}"
        )
    if casts:
        warnings.append(f"cast without a word: {listed(casts, 4)}")
    loaded = set[str]()
    for key in sources:
        loaded |= {reading.name for reading in OptimizerKey.of_slot(paths[key])}
    return _Outcome(
        sources, report=LoadReport(tuple(sorted(loaded))), refusal="; ".join(faults), warnings=tuple(warnings)
    )


def _by_position(stored: Stored, state_dict: Mapping[str, Any]) -> _Outcome:
    """Load weights by name, and state by the position of parameters, as ``Optimizer.load_state_dict`` does."""
    _, paths = flatten_state_dict(dict(state_dict))
    entries = stored.entries
    faults, warnings = list[str](), list[str]()
    sources: dict[str, str] = {}
    # The trainer reports weights that one side lacks, and passes over them: new ones keep their first values.
    weights = {key for key, path in paths.items() if STATE not in path and PARAM_GROUPS not in path}
    if missing_weights := sorted(key for key in weights if key not in entries):
        warnings.append(f"weights that keep their first values: {listed(missing_weights, 4)}")
    # Groups have to be as many and as large; parameters go by their place in them, whatever their names.
    optimizer = next(iter(_optimizers(state_dict)), None)
    if optimizer is None:
        return _Outcome({}, LoadReport(), "the state dict has no optimizer with groups")
    path, groups, state = optimizer
    sizes_by_group: defaultdict[int, int] = defaultdict(int)
    for key, entry in entries.items():
        for reading in OptimizerKey.of_option(entry.path):
            if key_of(reading.place.root) == key_of(tuple(path)) and reading.leaf == PARAMS:
                sizes_by_group[int(reading.name)] = len(stored.option(key) or ())
    saved_sizes = [sizes_by_group[number] for number in sorted(sizes_by_group)]
    sizes = [len(group[PARAMS]) for group in groups]
    if saved_sizes != sizes:
        faults.append(
            f"the checkpoint has groups of {listed(saved_sizes, 6)} parameters, and the code of {listed(sizes, 6)}"
        )
    loaded, fresh, misfits = list[str](), list[str](), list[str]()
    for number in state:
        prefix = key_of((*path, STATE, number))
        saved_slots = [slot for slot in state[number] if f"{prefix}.{slot}" in entries]
        (loaded if saved_slots else fresh).append(str(number))
        for slot in saved_slots:
            value, entry = state[number][slot], entries[f"{prefix}.{slot}"]
            sources[f"{prefix}.{slot}"] = entry.key
            if isinstance(value, Tensor) and isinstance(entry, StateRecord) and tuple(value.shape) != entry.shape:
                misfits.append(f"{slot} of parameter {number} is {entry.shape}, and the parameter {tuple(value.shape)}")
    if misfits and not faults:
        faults.append(f"torch loads it, and the first step fails or computes nonsense: {listed(misfits, 4)}")
    if fresh and not faults:
        warnings.append(f"parameters that begin from zero without a message: numbers {listed(fresh, 8)}")
    sources |= {key: key for key in weights if key in entries}
    sources |= {key: key for key, path_of_key in paths.items() if PARAM_GROUPS in path_of_key and key in entries}
    return _Outcome(
        sources, report=LoadReport(tuple(loaded), tuple(fresh)), refusal="; ".join(faults), warnings=tuple(warnings)
    )


def _optimizers(state_dict: Mapping[str, Any], path: tuple[str, ...] = ()) -> Any:
    """Yield the path, the groups and the state of each optimizer in a nested state dict."""
    match state_dict:
        case {"state": Mapping() as state, "param_groups": list() as groups}:
            yield path, groups, state
        case Mapping():
            for key, value in state_dict.items():
                yield from _optimizers(value, (*path, str(key)))


_LOADERS: Mapping[str, Callable[[Stored, Mapping[str, Any]], _Outcome]] = {
    "dcp": _by_key,
    "torchtitan": _by_key,
    "huggingface": _by_position,
    "lightning": _by_position,
}

_POSITIONAL = frozenset({"huggingface", "lightning"})
"""Loaders that give state to parameters by their position in groups."""
