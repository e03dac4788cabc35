"""The loaders of other programs as rules: what each takes from a checkpoint, refuses, and passes over in silence.

Sources: ``DefaultLoadPlanner`` and ``Optimizer.load_state_dict`` of torch 2.13; ``Trainer._load_from_checkpoint`` of
transformers 5; ``restore_optimizers`` of Lightning 2.6; torchtitan 0.3 loads with the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ...checkpoint.bits import dtype_name
from ...checkpoint.template import Stored
from ...names.keys import PARAM_GROUPS, STATE, OptimizerKey, key_of
from ...names.resumption import LoadReport
from ...names.vocabulary import PARAMS
from ...names.wording import counted, listed
from ...record.record import StateRecord


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a loader would do.

    Attributes:
        sources: keys of the checkpoint, by keys of the state dict.
        refusal: its error; empty if there is none.
        warnings: what it does in silence.
    """

    sources: Mapping[str, str]
    report: LoadReport
    refusal: str = ""
    warnings: tuple[str, ...] = ()


def _by_key(stored: Stored, state_dict: Mapping[str, Any]) -> Outcome:
    """Load each key of the state dict: a missing key or another shape is refused, and the rest cast or left."""
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
    # Of what only the checkpoint has, keys of the parts that are loaded are lost without a word.
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
    loaded = tuple(sorted(_parameters(paths[key] for key in sources)))
    return Outcome(sources, LoadReport(loaded), "; ".join(faults), tuple(warnings))


def _parameters(paths: Any) -> set[str]:
    """Return the names of parameters that have a slot at one of these paths."""
    names = set[str]()
    for path in paths:
        names |= {reading.name for reading in OptimizerKey.of_slot(path)}
    return names


def _by_position(stored: Stored, state_dict: Mapping[str, Any]) -> Outcome:
    """Load weights by name, and state by the position of parameters, as ``Optimizer.load_state_dict`` does."""
    _, paths = flatten_state_dict(dict(state_dict))
    entries = stored.entries
    faults, warnings = list[str](), list[str]()
    sources: dict[str, str] = {}
    # Weights that one side lacks are told by the trainer and passed over: new ones keep their first values.
    weights = {key for key, path in paths.items() if STATE not in path and PARAM_GROUPS not in path}
    if missing_weights := sorted(key for key in weights if key not in entries):
        warnings.append(f"weights that keep their first values: {listed(missing_weights, 4)}")
    # Groups have to be as many and as large; parameters go by their place in them, whatever their names.
    optimizer = next(iter(_optimizers(state_dict)), None)
    if optimizer is None:
        return Outcome({}, LoadReport(), "the state dict has no optimizer with groups")
    path, groups, state = optimizer
    saved_sizes = _saved_sizes(stored, path)
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
        warnings.append(f"parameters that begin anew without a word: numbers {listed(fresh, 8)}")
    sources |= {key: key for key in weights if key in entries}
    sources |= {key: key for key, path_of_key in paths.items() if PARAM_GROUPS in path_of_key and key in entries}
    return Outcome(sources, LoadReport(tuple(loaded), tuple(fresh)), "; ".join(faults), tuple(warnings))


def _optimizers(state_dict: Mapping[str, Any], path: tuple[str, ...] = ()) -> Any:
    """Yield the path, the groups and the state of each optimizer in a nested state dict."""
    match state_dict:
        case {"state": Mapping() as state, "param_groups": list() as groups}:
            yield path, groups, state
        case Mapping():
            for key, value in state_dict.items():
                yield from _optimizers(value, (*path, str(key)))


def _saved_sizes(stored: Stored, path: Sequence[str]) -> list[int]:
    """Return how many parameters each saved group has."""
    sizes: defaultdict[int, int] = defaultdict(int)
    for key, entry in stored.entries.items():
        for reading in OptimizerKey.of_option(entry.path):
            if key_of(reading.place.root) == key_of(tuple(path)) and reading.leaf == PARAMS:
                sizes[int(reading.name)] = len(stored.option(key) or ())
    return [sizes[number] for number in sorted(sizes)]


LOADERS: Mapping[str, Callable[[Stored, Mapping[str, Any]], Outcome]] = {
    "dcp": _by_key,
    "torchtitan": _by_key,
    "huggingface": _by_position,
    "lightning": _by_position,
}

POSITIONAL = frozenset({"huggingface", "lightning"})
"""Loaders that give state to parameters by their position in groups."""
