"""Megatron's layer-wise optimizer files: one file, the parts of tensor-parallel ranks, and the names that no file has.

A file lists states by number: parameter groups in order, in each the parameters that its rank owns.  Owners and order
follow from the parameters and the algorithm that dealt them, which the user describes in ``layer_wise.toml`` or
``.json``: docs/formats/layer_wise.md.  Nothing is guessed.

Sources (Megatron core 0.19.2): ``state_dict`` of ``Float16OptimizerWithFloat16Params``, ``FP32Optimizer`` and
``ChainedOptimizer`` in ``optimizer.py``; ``_shard_params_from_layout`` and ``_shard_params_ping_pong`` of
``layer_wise_optimizer.py`` (branch dev for the total order), which walk the groups, the first in forward order, the
second sorted.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from ...algebra.box import Box, Index
from ...layouts.buffers.buffer_layout import BufferLayout
from ...layouts.buffers.parameters import GroupSizes, Parameter
from ...layouts.buffers.placements import PLACEMENTS, PlacementRequest
from ...names.errors import DamageError, SourceError, about
from ...names.vocabulary import MASTER, PARAMS
from ...programs import signs
from ...record.record import Chunks, Extent, StateRecord
from ..io import limits
from ..io.location import Location
from ..io.regular import read_text_file
from .torch_save import torch_file
from .torch_save.inert_pickle import Record, expect
from .torch_save.torch_file import SavedTensor, TorchFile

_Value = SavedTensor | bool | int | float | str | None
ParameterState = Mapping[str, _Value]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A rank's share of one parameter group: the group's options, and its parameters' states in order."""

    options: Mapping[str, object]
    states: tuple[ParameterState, ...]


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file: the groups of all child optimizers in order, and the names of their other entries.

    A child with fp32 masters keeps them beside the state of the optimizer that it wraps.
    """

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
        if PARAMS not in group:
            keys = sorted(map(str, group))
            raise DamageError(f"expected the parameters of a group under {PARAMS!r}, found {keys!s:.200}")
        ids = expect(list, group[PARAMS])
        held = expect(list, own_masters)
        if held and len(held) != len(ids):
            raise SourceError(f"{len(held)} masters for {len(ids)} parameters of a group: some are fp32 themselves")
        group_states: list[dict[str, _Value]] = [
            {
                str(slot): file.tensor(value) if type(value) is Record else _scalar(value)
                for slot, value in _mapping(states[number]).items()
            }
            for number in ids
        ]
        for state, master in zip(group_states, held, strict=False):
            state[MASTER] = file.tensor(master)
        options: dict[str, object] = {}
        for key, value in group.items():
            if key != PARAMS:
                with about(f"option {key!r}"):
                    match value:
                        case list():
                            options[str(key)] = list(map(_scalar, value))
                        case tuple():
                            options[str(key)] = tuple(map(_scalar, value))
                        case _:
                            options[str(key)] = _scalar(value)
        listed += ids
        yield RankGroup(options, tuple(group_states))
    if len(set(listed)) != len(listed) or set(listed) != states.keys():
        raise SourceError(f"its groups list {len(listed)} parameters, it has the state of {len(states)}")


def _mapping(value: object) -> dict[object, object]:
    if type(value) is Record and value.kind == "collections OrderedDict":
        return value.items or {}
    return expect(dict, value)


def _scalar(value: object) -> bool | int | float | str | None:
    if value is not None and type(value) not in (bool, int, float, str):
        raise SourceError(f"expected a number, a string or a tensor, found {type(value).__name__}")
    return value  # type: ignore[return-value]


# A tensor-parallel rank has a range of a dim, or with ``interleaved`` several: a fused gate and up half are ``g0 u0``
# on rank 0 and ``g1 u1`` on rank 1, which is ``g0 g1 u0 u1`` when joined.  What no rank cuts, every rank has whole.
# Source: ``_initialize_affine_weight_cpu`` of Megatron's ``tensor_parallel/layers.py`` (its ``stride`` is
# ``interleaved`` here), and ``set_tensor_model_parallel_attributes`` for what masters say of themselves.


@dataclass(frozen=True, slots=True)
class TensorCut:
    """A cut, along ``dim``, of parameters that fit a shell pattern; each rank has ``interleaved`` ranges.

    Raises:
        SourceError: it cuts no dim, or ranges of another dim than the first.
    """

    names: tuple[str, ...]
    dim: int = 0
    interleaved: int = 1

    def __post_init__(self) -> None:
        if self.dim < 0 or self.interleaved < 1 or (self.interleaved > 1 and self.dim):
            raise SourceError(f"expected a cut of a dim from 0, interleaved only along dim 0, found {self}")

    def fits(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names)

    def ranges(self, length: int, ranks: int) -> Iterator[tuple[int, int, int]]:
        """Yield each range of a dim of this length: its rank, its start there, and its start in the whole tensor.

        Raises:
            SourceError: the ranges of a rank cannot be of equal length.
        """
        each, rest = divmod(length, self.interleaved)
        if rest:
            raise SourceError(f"{length} rows do not divide into {self.interleaved} interleaved ranges")
        for rank in range(ranks):
            for turn in range(self.interleaved):
                yield rank, turn * each, (turn * ranks + rank) * each


@dataclass(frozen=True, slots=True)
class TensorParallelism:
    """The ``folders`` of tensor-parallel ranks, in order, and the ``cuts``, of which the first that fits counts."""

    folders: tuple[str, ...]
    cuts: tuple[TensorCut, ...]

    def cut_of(self, name: str) -> TensorCut | None:
        """Return a parameter's cut; None if every rank has all of it."""
        return next((cut for cut in self.cuts if cut.fits(name)), None)

    def joined(self, name: str, parts: Sequence[StateRecord]) -> StateRecord:
        """Join the parts, one chunk each, that ranks have of a parameter's tensor.

        Raises:
            SourceError: the parts do not fit each other; or ranks differ in what all of them should have whole.
        """
        first, cut = parts[0], self.cut_of(name)
        if any((part.shape, part.dtype) != (first.shape, first.dtype) for part in parts):
            found = ", ".join(f"{part.dtype} {part.shape}" for part in parts)
            raise SourceError(f"{first.key!r}: expected parts of one shape and dtype, found {found}")
        if cut is None or not first.shape:
            checksums = {part.chunks[0].crc32 for part in parts}
            if len(checksums) > 1 or None in checksums:
                raise SourceError(
                    f"{first.key!r} is not the same on all tensor-parallel ranks, or its files have no checksums that "
                    "tell: where tensor parallelism cuts it, say so in a [[cut]]"
                )
            return first
        if cut.dim >= len(first.shape):
            raise SourceError(f"{first.key!r} of shape {first.shape} has no dim {cut.dim} for {cut}")
        shape = [*first.shape]
        shape[cut.dim] *= len(parts)
        chunks = []
        length = first.shape[cut.dim] // cut.interleaved
        for rank, start, lies_at in cut.ranges(first.shape[cut.dim], len(parts)):
            lo, hi = [0] * len(shape), [*shape]
            lo[cut.dim], hi[cut.dim] = lies_at, lies_at + length
            chunk = replace(parts[rank].chunks[0], box=Box(tuple(lo), tuple(hi)))
            if cut.interleaved > 1:
                assert chunk.payload is not None, "files of torch.save say where their elements are"
                size = chunk.payload.length // first.shape[0]
                payload = replace(chunk.payload, offset=chunk.payload.offset + start * size, length=length * size)
                chunk = replace(chunk, payload=payload, crc32=None)
            chunks.append(chunk)
        return replace(first, shape=tuple(shape), chunks=Chunks.of(chunks, len(shape)), layout=None)

    def check_masters(self, rank: int, states: Mapping[str, ParameterState]) -> None:
        """Compare the cuts with the attributes of masters in the files of a rank.

        Raises:
            SourceError: they differ.
        """
        for name, state in states.items():
            for value in state.values():
                recorded = value.attributes if isinstance(value, SavedTensor) else {}
                if "partition_dim" not in recorded:
                    continue
                cut, dim = self.cut_of(name), recorded["partition_dim"]
                stride = recorded.get("partition_stride", 1)
                parallel = recorded.get("tensor_model_parallel") is True
                expected = None if cut is None else cut.dim
                if (dim if parallel else None) != expected or (cut and stride not in (1, cut.interleaved)):
                    raise SourceError(
                        f"the master of {name!r} in {self.folders[rank]} says tensor_model_parallel={parallel}, "
                        f"partition_dim={dim}, partition_stride={stride}; the description says {cut}"
                    )


_Order = Callable[[Parameter, int, int], tuple[int, ...]]
"""The sort key of a parameter in its group, from its buffer's number and its start there; sorting is stable."""

_ORDERS: Mapping[str, _Order] = MappingProxyType(
    {
        "padded-nscost": lambda parameter, buffer, start: (),
        "padded-numel": lambda parameter, buffer, start: (),
        "decoupled-total-order": lambda parameter, buffer, start: (parameter.numel, parameter.chunk, buffer, start),
        "legacy-pingpong": lambda parameter, buffer, start: (parameter.numel,),
    }
)
"""Megatron's orders of the parameters in a file, by placement."""

DESCRIPTION_PARSERS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    dict(zip(signs.LAYER_WISE_FILES, (tomllib.loads, json.loads), strict=True))
)
"""The parsers of a description, by file name."""


@dataclass(frozen=True, slots=True)
class ListedParameter:
    """A parameter, the number of its parameter group, and for an expert its expert-parallel rank (``part``)."""

    parameter: Parameter
    group: int = 0
    part: int = 0


@dataclass(frozen=True, slots=True)
class Select:
    """Selects a group's parameters of a model by shell patterns and number of dims."""

    names: tuple[str, ...]
    dims: int | None = None
    expert: bool = False

    def fits(self, name: str, shape: Index) -> bool:
        return self.dims in (None, len(shape)) and any(fnmatchcase(name, pattern) for pattern in self.names)


@dataclass(frozen=True, slots=True)
class Description:
    """A parsed description.

    Attributes:
        algorithm: one of `_ORDERS`.
        members: the parameters, in forward order.
        model, groups: instead of members a model's checkpoint, and the selection of each group.
        files: names of the ranks' files, in order; if empty, ``layer_wise_optimizer_{rank}.pt``.
        experts: size of expert parallelism: the ranks ``e, e + experts, …`` have the experts of part ``e``.
        bucket_size, busbw: options of the run's buffers.
        tensor_parallel: None if there is one tensor-parallel rank.
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
        """The folders of tensor-parallel ranks, with a slash; an empty name is the directory itself."""
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
        """Return the parameters in forward order.

        Args:
            listed: name, shape and dtype of each parameter in the model's checkpoint.

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
    """Read the description in a directory, if there is one.

    Raises:
        SourceError: it is not TOML or JSON, or not a description.
    """
    for name, parse in DESCRIPTION_PARSERS.items():
        file = path / name
        if file.is_file():
            try:
                text = read_text_file(file).decode()
                limits.check_limit(max(line.count(".") for line in text.split("\n")), limits.DOTS, "dots in a line")
                return _description(parse(text))
            except RecursionError:
                raise SourceError(f"{file}: nested too deeply") from None
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, SourceError) as error:
                raise SourceError(f"{file}: {error}") from error
    return None


_FieldTypes = Mapping[str, type]

_OPTIONS: _FieldTypes = {"algorithm": str, "model": str, "experts": int, "bucket_size": int, "busbw": bool}
_LISTS: _FieldTypes = {"files": list, "parameter": list, "group": list, "tensor_parallel": list, "cut": list}
_PARAMETER: _FieldTypes = {
    "name": str,
    "shape": list,
    "dtype": str,
    "expert": bool,
    "tied": bool,
    "chunk": int,
    "fold": int,
    "group": int,
    "part": int,
}
_SELECT: _FieldTypes = {"names": list, "dims": int, "expert": bool}
_CUT: _FieldTypes = {"names": list, "dim": int, "interleaved": int}


def _description(data: Any) -> Description:
    _check(data, {**_OPTIONS, **_LISTS}, "algorithm")
    members = []
    for table in data.get("parameter", ()):
        _check(table, _PARAMETER, "name", "shape")
        fields = {**table, "shape": tuple(map(int, table["shape"]))}
        place = {key: fields.pop(key) for key in ("group", "part") if key in fields}
        members.append(ListedParameter(Parameter(**fields), **place))
    folders = tuple(map(str, data.get("tensor_parallel", ())))
    for name in (*folders, *map(str, data.get("files", ()))):
        Extent(name, 0, 0)  # which refuses what is no name of a file inside the checkpoint
    cuts = tuple(TensorCut(**_with_names(table, _CUT)) for table in data.get("cut", ()))
    if bool(folders) != bool(cuts):
        raise SourceError("expected both: tensor_parallel with the folders of its ranks, and [[cut]] tables")
    return Description(
        members=tuple(members),
        groups=tuple(Select(**_with_names(table, _SELECT)) for table in data.get("group", ())),
        files=tuple(map(str, data.get("files", ()))),
        tensor_parallel=TensorParallelism(folders, cuts) if folders else None,
        **{key: value for key, value in data.items() if key in _OPTIONS},
    )


def _with_names(table: Any, kinds: _FieldTypes) -> dict[str, Any]:
    _check(table, kinds, "names")
    return {**table, "names": tuple(map(str, table["names"]))}


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

    Attributes:
        buffers: each with the ranks of the run that share it.
        shares: names by (rank, group), in the order of the numbers in that rank's file.
    """

    buffers: tuple[tuple[tuple[int, ...], BufferLayout], ...]
    shares: Mapping[tuple[int, int], tuple[str, ...]]


def deal(description: Description, members: Sequence[ListedParameter], ranks: int) -> Dealt:
    """Deal the parameters to ``ranks`` data-parallel ranks, by the description's algorithm.

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
        parameters = []
        groups: defaultdict[int, list[str]] = defaultdict(list)
        for member in members:
            if not member.parameter.expert or member.part == part:
                parameters.append(member.parameter)
                groups[member.group].append(member.parameter.name)
        to_place = PlacementRequest(
            tuple(parameters),
            frozenset(parameter.name for parameter in parameters),
            GroupSizes(ranks, ranks // description.experts),
            groups=tuple(tuple(groups[number]) for number in sorted(groups)),
            bucket_size=description.bucket_size,
            busbw=description.busbw,
        )
        for number, buffer in enumerate(place(to_place)):
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
