"""What Megatron's per-rank optimizer files do not record: the parameters, and which of them a file holds.

A file lists states by number: parameter groups in order, in each the parameters that its rank owns.  The owners and
the order follow from the parameters and the algorithm that dealt them.  Both are in a description that the user writes,
``layer_wise.toml`` or ``.json``: docs/formats/layer_wise.md.  Nothing is guessed.

Sources: ``_shard_params_from_layout`` and ``_shard_params_ping_pong`` of Megatron's ``layer_wise_optimizer.py`` (core
0.19.2, and branch dev for the total order): both walk the groups, the first in forward order, the second sorted.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from ....box import Index
from ....errors import SourceError
from ....layouts.buffers.buffer_layout import BufferLayout
from ....layouts.buffers.parameters import GroupSizes, Parameter
from ....layouts.buffers.placements import PLACEMENTS, ToPlace
from ...io import limits
from ...io.location import Location
from ...io.regular import read_whole
from .. import signs
from .tensor_parallel import TensorCut, TensorParallelism

_Order = Callable[[Parameter, int, int], tuple[int, ...]]
"""The sort key of a parameter in its group, given the number of its buffer and its start there.  Equal parameters stay
in forward order."""

_ORDERS: Mapping[str, _Order] = MappingProxyType(
    {
        "padded-nscost": lambda parameter, buffer, start: (),
        "padded-numel": lambda parameter, buffer, start: (),
        "decoupled-total-order": lambda parameter, buffer, start: (parameter.numel, parameter.chunk, buffer, start),
        "legacy-pingpong": lambda parameter, buffer, start: (parameter.numel,),
    }
)
"""How Megatron numbers the parameters in a file, by placement: one for each of Megatron's `PLACEMENTS`."""

DESCRIPTION_PARSERS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    dict(zip(signs.LAYER_WISE_FILES, (tomllib.loads, json.loads), strict=True))
)
"""File names of a description, and the parser of each."""


@dataclass(frozen=True, slots=True)
class ListedParameter:
    """A parameter, the number of its parameter group, and for an expert its expert-parallel rank (``part``)."""

    parameter: Parameter
    group: int = 0
    part: int = 0


@dataclass(frozen=True, slots=True)
class Select:
    """Selects a group's parameters from a model's checkpoint, by shell patterns and number of dims."""

    names: tuple[str, ...]
    dims: int | None = None
    expert: bool = False

    def fits(self, name: str, shape: Index) -> bool:
        return self.dims in (None, len(shape)) and any(fnmatchcase(name, pattern) for pattern in self.names)


@dataclass(frozen=True, slots=True)
class Description:
    """A parsed description.

    Args:
        algorithm: one of `_ORDERS`.
        members: the parameters, in forward order.
        model, groups: instead of members a model's checkpoint, and the selection of each group.
        files: names of the ranks' files, in order; if empty, ``layer_wise_optimizer_{rank}.pt``.
        experts: size of expert parallelism: the ranks ``e, e + experts, …`` have the experts of part ``e``.
        bucket_size, busbw: options of the run's buffers.
        tensor_parallel: how the parts of tensor-parallel ranks become whole; None if there is one such rank.
    """

    algorithm: str
    members: tuple[ListedParameter, ...] = ()
    model: str | None = None
    groups: tuple[Select, ...] = ()
    files: tuple[str, ...] = ()
    experts: int = 1
    bucket_size: int | None = None
    busbw: bool = False
    tensor_parallel: TensorParallelism | None = None

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of tensor-parallel ranks, with a slash, or one empty name for the directory itself."""
        return tuple(f"{name}/" for name in self.tensor_parallel.folders) if self.tensor_parallel else ("",)

    def __post_init__(self) -> None:
        if self.algorithm not in _ORDERS:
            raise SourceError(f"no algorithm {self.algorithm!r}; there are {', '.join(_ORDERS)}")
        if bool(self.members) == bool(self.groups) or bool(self.groups) > bool(self.model):
            raise SourceError("expected either [[parameter]] tables, or a model and [[group]] tables that select of it")
        twice = [name for name, n in Counter(member.parameter.name for member in self.members).items() if n > 1]
        if twice:
            raise SourceError(f"expected distinct names for all parameters, found {twice[0]!r} twice")
        if self.experts > 1 and self.tensor_parallel is not None:
            raise SourceError("parts of tensor parallelism are not joined where there is expert parallelism as well")
        if self.experts < 1 or (self.experts > 1 and self.groups):
            raise SourceError("with expert parallelism list every [[parameter]]: a model's file has one rank's experts")
        strange = [
            member
            for member in self.members
            if member.part not in range(self.experts if member.parameter.expert else 1)
        ]
        if strange:
            raise SourceError(f"{strange[0].parameter.name!r} is in part {strange[0].part} of {self.experts}")

    def selected(self, listed: Sequence[tuple[str, Index, str]]) -> tuple[ListedParameter, ...]:
        """The parameters, given what the model's checkpoint lists: (name, shape, dtype), in forward order.

        Raises:
            SourceError: a pattern fits nothing.
        """
        if self.members:
            return self.members
        members = []
        for name, shape, dtype in listed:
            number = next((n for n, group in enumerate(self.groups) if group.fits(name, shape)), None)
            if number is not None:
                members.append(ListedParameter(Parameter(name, shape, dtype, self.groups[number].expert), number))
        if idle := set(range(len(self.groups))) - {member.group for member in members}:
            raise SourceError(f"nothing in {self.model} fits {self.groups[min(idle)]}")
        return tuple(members)


def read_description(path: Location) -> Description | None:
    """The description in a directory, or None if there is none.

    Raises:
        SourceError: it is not TOML or JSON, or not a description.
    """
    for name, parse in DESCRIPTION_PARSERS.items():
        file = path / name
        if file.is_file():
            try:
                text = read_whole(file).decode()
                limits.check_limit(max(line.count(".") for line in text.split("\n")), limits.DOTS, "dots in a line")
                return _description(parse(text))
            except RecursionError:
                raise SourceError(f"{file}: nested too deeply") from None
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, SourceError) as error:
                raise SourceError(f"{file}: {error}") from error
    return None


_FieldTypes = Mapping[str, type]

_TOLD: _FieldTypes = {"algorithm": str, "model": str, "experts": int, "bucket_size": int, "busbw": bool}
_LISTS: _FieldTypes = {"files": list, "parameter": list, "group": list, "tensor_parallel": list, "cut": list}
_SEEN: _FieldTypes = {"name": str, "shape": list, "dtype": str, "expert": bool, "tied": bool, "chunk": int, "fold": int}
_MEMBER: _FieldTypes = {"group": int, "part": int}
_SELECT: _FieldTypes = {"names": list, "dims": int, "expert": bool}
_CUT: _FieldTypes = {"names": list, "dim": int, "interleaved": int}


def _description(data: Any) -> Description:
    _check(data, {**_TOLD, **_LISTS}, "algorithm")
    return Description(
        members=tuple(map(_member, data.get("parameter", ()))),
        groups=tuple(map(_select, data.get("group", ()))),
        files=tuple(map(str, data.get("files", ()))),
        tensor_parallel=_tensor_parallel(tuple(map(str, data.get("tensor_parallel", ()))), data.get("cut", ())),
        **_those(data, _TOLD),
    )


def _member(data: Any) -> ListedParameter:
    _check(data, {**_SEEN, **_MEMBER}, "name", "shape")
    shape = tuple(map(int, data["shape"]))
    return ListedParameter(Parameter(**{**_those(data, _SEEN), "shape": shape}), **_those(data, _MEMBER))


def _select(data: Any) -> Select:
    _check(data, _SELECT, "names")
    return Select(**{**_those(data, _SELECT), "names": tuple(map(str, data["names"]))})


def _tensor_parallel(folders: tuple[str, ...], cuts: Sequence[Any]) -> TensorParallelism | None:
    if bool(folders) != bool(cuts):
        raise SourceError("expected both: tensor_parallel with the folders of its ranks, and [[cut]] tables")
    for cut in cuts:
        _check(cut, _CUT, "names")
    tables = (TensorCut(**{**_those(cut, _CUT), "names": tuple(map(str, cut["names"]))}) for cut in cuts)
    return TensorParallelism(folders, tuple(tables)) if folders else None


def _those(data: Mapping[str, Any], kinds: _FieldTypes) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key in kinds}


def _check(data: Any, kinds: _FieldTypes, *needed: str) -> None:
    if not isinstance(data, Mapping) or not data.keys() >= set(needed):
        raise SourceError(f"expected a table with {', '.join(needed)}, found {data!r:.200}")
    for key, value in data.items():
        if type(value) is not kinds.get(key):  # a bool is not an int here
            raise SourceError(f"{key!r} cannot be {value!r:.200}; there are {', '.join(kinds)}")


# Owners.


@dataclass(frozen=True, slots=True)
class Dealt:
    """Parameters dealt to ranks.

    Args:
        buffers: each with the ranks of the run that share it.
        shares: names by (rank, group), in the order of the numbers in that rank's file.
    """

    buffers: tuple[tuple[tuple[int, ...], BufferLayout], ...]
    shares: Mapping[tuple[int, int], tuple[str, ...]]


def deal(description: Description, members: Sequence[ListedParameter], ranks: int) -> Dealt:
    """The share of each of ``ranks`` data-parallel ranks, as the description's algorithm dealt it.

    Raises:
        SourceError: the ranks do not divide into expert-parallel parts.
    """
    if ranks % description.experts:
        raise SourceError(f"{ranks} ranks do not divide into {description.experts} expert-parallel parts")
    place, order = PLACEMENTS[description.algorithm].place, _ORDERS[description.algorithm]
    buffers: list[tuple[tuple[int, ...], BufferLayout]] = []
    places: dict[str, tuple[int, ...]] = {}
    owners: dict[str, int] = {}
    for part in range(description.experts):
        members_of_part = [member for member in members if not member.parameter.expert or member.part == part]
        for number, buffer in enumerate(place(_to_place(description, members_of_part, ranks))):
            experts = buffer.parameters[0].parameter.expert
            if part and not experts:
                continue  # the same for every part
            group = tuple(range(part, ranks, description.experts)) if experts else tuple(range(ranks))
            buffers.append((group, buffer))
            places |= {p.name: order(p.parameter, number, p.start) for p in buffer.parameters}
            owners |= {name: group[owner] for name, owner in buffer.owners.items() if owner is not None}
    shares: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for member in members:
        shares[owners[member.parameter.name], member.group].append(member.parameter.name)
    ordered = {where: tuple(sorted(names, key=lambda name: places[name])) for where, names in shares.items()}
    return Dealt(tuple(buffers), ordered)


def _to_place(description: Description, members: Sequence[ListedParameter], ranks: int) -> ToPlace:
    """The run's parameters, all of them matrices, or owned whole by another optimizer."""
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for member in members:
        groups[member.group].append(member.parameter.name)
    return ToPlace(
        tuple(member.parameter for member in members),
        frozenset(member.parameter.name for member in members),
        GroupSizes(ranks, ranks // description.experts),
        groups=tuple(tuple(groups[number]) for number in sorted(groups)),
        bucket_size=description.bucket_size,
        busbw=description.busbw,
    )
