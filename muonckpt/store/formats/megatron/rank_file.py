"""One ``layer_wise_optimizer_{rank}.pt``: the states of the parameters that a rank owns, by number, without names.

It is the ``state_dict`` of Megatron's layer-wise optimizer: that of its one child, or a list with one per child.  A
child with fp32 masters keeps them beside the state of the optimizer that it wraps.

Source: ``state_dict`` of ``Float16OptimizerWithFloat16Params``, ``FP32Optimizer`` and ``ChainedOptimizer`` in
Megatron's ``optimizer.py`` (core 0.19.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ....errors import SourceError
from ....vocabulary import MASTER, PARAMS
from ...io.location import Location
from ..torch_save import torch_file
from ..torch_save.inert_pickle import Record, expect
from ..torch_save.torch_file import SavedTensor, TorchFile

_Value = SavedTensor | bool | int | float | str | None
ParameterState = Mapping[str, _Value]
"""The state of one parameter, by slot."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The share of a rank in one parameter group: the group's options, and its parameters' states in order."""

    options: Mapping[str, object]
    states: tuple[ParameterState, ...]


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file: the groups of all children in order, and the other entries of the children."""

    name: str
    groups: tuple[RankGroup, ...]
    others: frozenset[str]


def read_rank_file(directory: Location, name: str) -> RankFile:
    """Read one file, but no elements.

    Raises:
        SourceError: it is missing, damaged, or not the state of such an optimizer.
    """
    file = torch_file.read_torch_file(directory, name)
    try:
        children = file.content if type(file.content) is list else [file.content]
        groups = [group for child in children for group in _groups(file, child)]
        others = {key for child in children for key in _mapping(child)} - {"optimizer", "fp32_from_fp16_params"}
        return RankFile(name, tuple(groups), frozenset(map(str, others - {"state", "param_groups"})))
    except (SourceError, KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise SourceError(f"{directory / name}: expected the state of a layer-wise optimizer: {what}") from error


def _groups(file: TorchFile, child: object) -> Iterator[RankGroup]:
    whole = _mapping(child)
    inner = _mapping(whole["optimizer"]) if "optimizer" in whole else whole
    states, groups = _mapping(inner["state"]), expect(list, inner["param_groups"])
    masters = expect(list, whole.get("fp32_from_fp16_params", [[] for _ in groups]))
    listed = []
    for group, own_masters in zip(map(_mapping, groups), masters, strict=True):
        ids = expect(list, group[PARAMS])
        held = expect(list, own_masters)
        if held and len(held) != len(ids):
            raise SourceError(f"{len(held)} masters for {len(ids)} parameters of a group: some are fp32 themselves")
        group_states = [
            {str(slot): _value(file, value) for slot, value in _mapping(states[number]).items()} for number in ids
        ]
        for state, master in zip(group_states, held, strict=False):
            state[MASTER] = file.tensor(master)
        options = {str(key): _plain(str(key), value) for key, value in group.items() if key != PARAMS}
        listed += ids
        yield RankGroup(options, tuple(group_states))
    if len(set(listed)) != len(listed) or set(listed) != states.keys():
        raise SourceError(f"its groups list {len(listed)} parameters, it has the state of {len(states)}")


def _mapping(value: object) -> dict[object, object]:
    """A dict, or an ``OrderedDict``."""
    if type(value) is Record and value.kind == "collections OrderedDict":
        return value.items or {}
    return expect(dict, value)


def _value(file: TorchFile, value: object) -> _Value:
    return file.tensor(value) if type(value) is Record else _scalar(value)


def _plain(option: str, value: object) -> object:
    """The value of an option: a scalar, or a flat sequence of scalars."""
    try:
        match value:
            case list():
                return list(map(_scalar, value))
            case tuple():
                return tuple(map(_scalar, value))
        return _scalar(value)
    except SourceError as error:
        raise SourceError(f"option {option!r}: {error}") from error


def _scalar(value: object) -> bool | int | float | str | None:
    if value is not None and type(value) not in (bool, int, float, str):
        raise SourceError(f"expected a number, a string or a tensor, found {type(value).__name__}")
    return value  # type: ignore[return-value]
