"""Megatron's layer-wise optimizer files: one file, the parts of tensor-parallel ranks, and the names that no file has.

A file lists states by number: in each parameter group those of the parameters that its rank owns.  Owners and order
follow from the parameters and the algorithm that distributed them, which the user describes:
docs/formats/layer_wise.md.

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
from ...layouts.buffers.placements import PlacementRequest, place_parameters
from ...names.errors import DamageError, SourceError, about
from ...names.vocabulary import MASTER, PARAMS
from ...programs import signs
from ...record.record import Chunks, Extent, StateRecord
from ..io import limits
from ..io.location import Location, is_file
from ..io.regular import read_text_file
from .torch_save import torch_file
from .torch_save.inert_pickle import Record, expect
from .torch_save.torch_file import SavedTensor, TorchFile, mapping

_Value = SavedTensor | bool | int | float | str | None
ParameterState = Mapping[str, _Value]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Holds a rank's share of one parameter group: the group's options, and its parameters' states in order."""

    options: Mapping[str, object]
    states: tuple[ParameterState, ...]


@dataclass(frozen=True, slots=True)
class RankFile:
    """Holds one file: the groups of all child optimizers in order, and the names of entries that are not kept.

    A child with fp32 masters keeps them beside the state of the optimizer that it wraps.
    """

    name: str
    groups: tuple[RankGroup, ...]
    not_kept: frozenset[str]


def read_rank_file(directory: Location, name: str) -> RankFile:
    """Read one file, but no elements.

    Raises:
        SourceError: it is missing, damaged, or not the state of such an optimizer.
    """
    file = torch_file.read_torch_file(directory, name)
    try:
        children = file.content if type(file.content) is list else [file.content]
        groups: list[RankGroup] = []
        keys = set[object]()
        for child in children:
            groups += _read_groups(file, child)
            keys.update(mapping(child))
        not_kept = keys - {"optimizer", "fp32_from_fp16_params", "state", "param_groups"}
        return RankFile(name, tuple(groups), frozenset(map(str, not_kept)))
    except (SourceError, KeyError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise SourceError(f"{directory / name}: expected the state of a layer-wise optimizer: {reason}") from error


def _read_groups(file: TorchFile, child: object) -> Iterator[RankGroup]:
    """Yield the parameter groups of one of the chained optimizers in a file."""
    entries = mapping(child)
    optimizer = mapping(entries["optimizer"]) if "optimizer" in entries else entries
    states, groups = mapping(optimizer["state"]), expect(list, optimizer["param_groups"])
    masters_by_group = expect(list, entries.get("fp32_from_fp16_params", [[] for _ in groups]))
    all_ids = []
    for group, group_masters in zip(map(mapping, groups), masters_by_group, strict=True):
        # The states of its parameters, with their masters.
        if PARAMS not in group:
            keys = sorted(map(str, group))
            raise DamageError(f"expected the parameters of a group under {PARAMS!r}, found {keys!s:.200}")
        ids, masters = expect(list, group[PARAMS]), expect(list, group_masters)
        if masters and len(masters) != len(ids):
            raise SourceError(f"{len(masters)} masters for {len(ids)} parameters of a group: some are fp32 themselves")
        group_states: list[dict[str, _Value]] = []
        for number in ids:
            state: dict[str, _Value] = {}
            for slot, value in mapping(states[number]).items():
                state[str(slot)] = file.whole_tensor(value) if type(value) is Record else _read_scalar(value)
            group_states.append(state)
        for state, master in zip(group_states, masters, strict=False):
            state[MASTER] = file.whole_tensor(master)
        # Its options.
        options: dict[str, object] = {}
        for key, value in group.items():
            if key != PARAMS:
                with about(f"option {key!r}"):
                    options[str(key)] = _read_option(value)
        all_ids += ids
        yield RankGroup(options, tuple(group_states))
    # Each state belongs to one group.
    if len(set(all_ids)) != len(all_ids) or set(all_ids) != states.keys():
        raise SourceError(f"its groups list {len(all_ids)} parameters, it has the state of {len(states)}")


def _read_option(value: object) -> object:
    return type(value)(map(_read_scalar, value)) if isinstance(value, list | tuple) else _read_scalar(value)


def _read_scalar(value: object) -> bool | int | float | str | None:
    if value is not None and type(value) not in (bool, int, float, str):
        raise SourceError(f"expected a number, a string or a tensor, found {type(value).__name__}")
    return value  # type: ignore[return-value]


# A tensor-parallel rank has a range of a dim, or with ``interleaved`` several: a fused gate and up half are ``g0 u0``
# on rank 0 and ``g1 u1`` on rank 1, which is ``g0 g1 u0 u1`` when joined.  A tensor that is not cut is on every rank.
# Source: ``_initialize_affine_weight_cpu`` of Megatron's ``tensor_parallel/layers.py`` (its ``stride`` is
# ``interleaved`` here), and ``set_tensor_model_parallel_attributes`` for the attributes of masters.


@dataclass(frozen=True, slots=True)
class TensorCut:
    """Cuts parameters that fit a shell pattern along ``dim``; each rank has ``interleaved`` ranges.

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
        range_length, remainder = divmod(length, self.interleaved)
        if remainder:
            raise SourceError(f"{length} rows do not divide into {self.interleaved} interleaved ranges")
        for rank in range(ranks):
            for turn in range(self.interleaved):
                yield rank, turn * range_length, (turn * ranks + rank) * range_length


@dataclass(frozen=True, slots=True)
class TensorParallelism:
    """Lists the ``folders`` of tensor-parallel ranks, and the ``cuts``; the first that fits counts."""

    folders: tuple[str, ...]
    cuts: tuple[TensorCut, ...]

    def cut_of(self, name: str) -> TensorCut | None:
        """Return a parameter's cut; None if every rank has all of it."""
        return next((cut for cut in self.cuts if cut.fits(name)), None)

    def join(self, name: str, parts: Sequence[StateRecord]) -> StateRecord:
        """Join the parts, one chunk each, that ranks have of a parameter's tensor.

        Raises:
            SourceError: the parts do not fit each other; or a tensor that is not cut differs between ranks.
        """
        first, cut = parts[0], self.cut_of(name)
        if any((part.shape, part.dtype) != (first.shape, first.dtype) for part in parts):
            kinds = ", ".join(f"{part.dtype} {part.shape}" for part in parts)
            raise SourceError(f"{first.key!r}: expected parts of one shape and dtype, found {kinds}")

        # A tensor that is not cut is the same on all ranks, which only checksums tell without reading it.
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

        # Each range of a rank is a chunk of the joined tensor.
        shape = [*first.shape]
        shape[cut.dim] *= len(parts)
        chunks = []
        length = first.shape[cut.dim] // cut.interleaved
        for rank, start, joined_start in cut.ranges(first.shape[cut.dim], len(parts)):
            lo, hi = [0] * len(shape), [*shape]
            lo[cut.dim], hi[cut.dim] = joined_start, joined_start + length
            chunk = replace(parts[rank].chunks[0], box=Box(tuple(lo), tuple(hi)))
            # Each of several ranges is a run of rows (`TensorCut` interleaves only dim 0), so its bytes are one run of
            # the rank's; the checksum covers all ranges.
            if cut.interleaved > 1:
                assert chunk.payload is not None, "files of torch.save say where their elements are"
                row_bytes = chunk.payload.length // first.shape[0]
                offset = chunk.payload.offset + start * row_bytes
                payload = replace(chunk.payload, offset=offset, length=length * row_bytes)
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
                # Megatron marks its parameters, and the masters made of them.
                attributes = value.attributes if isinstance(value, SavedTensor) else {}
                if "partition_dim" not in attributes:
                    continue
                cut, dim = self.cut_of(name), attributes["partition_dim"]
                stride = attributes.get("partition_stride", 1)
                is_parallel = attributes.get("tensor_model_parallel") is True
                expected_dim = None if cut is None else cut.dim
                if (dim if is_parallel else None) != expected_dim or (cut and stride not in (1, cut.interleaved)):
                    raise SourceError(
                        f"the master of {name!r} in {self.folders[rank]} says tensor_model_parallel={is_parallel}, "
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
    """Lists a parameter, the number of its parameter group, and an expert's expert-parallel rank (``part``)."""

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
        model, groups: instead of members a model's checkpoint, and each group's selection of it.
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
        # Either it lists the parameters, or a model has them.
        if bool(self.members) == bool(self.groups) or bool(self.groups) > bool(self.model):
            raise SourceError("expected either [[parameter]] tables, or a model and [[group]] tables that select of it")
        counts = Counter(member.parameter.name for member in self.members)
        if duplicates := [name for name, count in counts.items() if count > 1]:
            raise SourceError(f"expected distinct names for all parameters, found {duplicates[0]!r} twice")
        # The files of expert-parallel ranks do not say which experts they have.
        if self.experts > 1 and self.tensor_parallel is not None:
            raise SourceError("parts of tensor parallelism are not joined where there is expert parallelism as well")
        if self.experts < 1 or (self.experts > 1 and self.groups):
            raise SourceError("with expert parallelism list every [[parameter]]: a model's file has one rank's experts")
        for member in self.members:
            if member.part not in range(self.experts if member.parameter.expert else 1):
                raise SourceError(f"{member.parameter.name!r} is in part {member.part} of {self.experts}")

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
        if empty_groups := set(range(len(self.groups))) - {member.group for member in members}:
            raise SourceError(f"nothing in {self.model} fits {self.groups[min(empty_groups)]}")
        return tuple(members)


def read_description(path: Location) -> Description | None:
    """Read the description in a directory, if there is one.

    Raises:
        SourceError: it is not TOML or JSON, or not a description.
    """
    for name, parse in DESCRIPTION_PARSERS.items():
        file = path / name
        if is_file(file):
            try:
                # Python's reader of TOML is slow for long generated files.
                text = read_text_file(file).decode()
                limits.check_limit(max(line.count(".") for line in text.split("\n")), limits.DOTS, "dots in a line")
                return _parse_description(parse(text))
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


def _parse_description(data: Any) -> Description:
    """Check the tables of a description, and return it; raises several kinds of errors."""
    _check_table(data, {**_OPTIONS, **_LISTS}, "algorithm")
    # The parameters, or the groups that select of a model's.
    members = []
    for table in data.get("parameter", ()):
        _check_table(table, _PARAMETER, "name", "shape")
        fields = {**table, "shape": tuple(map(int, table["shape"]))}
        place = {key: fields.pop(key) for key in ("group", "part") if key in fields}
        members.append(ListedParameter(Parameter(**fields), **place))
    # The files, of one tensor-parallel rank or of several.
    folders = tuple(map(str, data.get("tensor_parallel", ())))
    for name in (*folders, *map(str, data.get("files", ()))):
        Extent(name, 0, 0)  # refuses a name that is not of a file inside the checkpoint
    cuts = tuple(TensorCut(**_parse_names(table, _CUT)) for table in data.get("cut", ()))
    if bool(folders) != bool(cuts):
        raise SourceError("expected both: tensor_parallel with the folders of its ranks, and [[cut]] tables")
    return Description(
        members=tuple(members),
        groups=tuple(Select(**_parse_names(table, _SELECT)) for table in data.get("group", ())),
        files=tuple(map(str, data.get("files", ()))),
        tensor_parallel=TensorParallelism(folders, cuts) if folders else None,
        **{key: value for key, value in data.items() if key in _OPTIONS},
    )


def _parse_names(table: Any, kinds: _FieldTypes) -> dict[str, Any]:
    _check_table(table, kinds, "names")
    return {**table, "names": tuple(map(str, table["names"]))}


def _check_table(data: Any, kinds: _FieldTypes, *required_keys: str) -> None:
    if not isinstance(data, Mapping) or not data.keys() >= set(required_keys):
        raise SourceError(f"expected a table with {', '.join(required_keys)}, found {data!r:.200}")
    for key, value in data.items():
        if type(value) is not kinds.get(key):  # a bool is not an int here
            raise SourceError(f"{key!r} cannot be {value!r:.200}; there are {', '.join(kinds)}")


# Owners.


@dataclass(frozen=True, slots=True)
class RankShares:
    """Says which parameters each rank owns.

    Attributes:
        buffers: each with the ranks of the run that share it.
        names: of parameters by (rank, group), in the order of the numbers in that rank's file.
    """

    buffers: tuple[tuple[tuple[int, ...], BufferLayout], ...]
    names: Mapping[tuple[int, int], tuple[str, ...]]


def distribute(description: Description, members: Sequence[ListedParameter], ranks: int) -> RankShares:
    """Distribute the parameters over ``ranks`` data-parallel ranks, by the description's algorithm.

    Raises:
        SourceError: the ranks do not divide into expert-parallel parts.
    """
    if ranks % description.experts:
        raise SourceError(f"{ranks} ranks do not divide into {description.experts} expert-parallel parts")
    order = _ORDERS[description.algorithm]
    buffers: list[tuple[tuple[int, ...], BufferLayout]] = []
    places: dict[str, tuple[int, ...]] = {}
    owners: dict[str, int] = {}
    # Each expert-parallel part has buffers of its own for its experts; all others are the same in every part.
    for part in range(description.experts):
        parameters = []
        groups: defaultdict[int, list[str]] = defaultdict(list)
        for member in members:
            if not member.parameter.expert or member.part == part:
                parameters.append(member.parameter)
                groups[member.group].append(member.parameter.name)
        request = PlacementRequest(
            tuple(parameters),
            frozenset(parameter.name for parameter in parameters),
            GroupSizes(ranks, ranks // description.experts),
            groups=tuple(tuple(groups[number]) for number in sorted(groups)),
            bucket_size=description.bucket_size,
            busbw=description.busbw,
        )
        for number, buffer in enumerate(place_parameters(description.algorithm, request)):
            experts = buffer.parameters[0].parameter.expert
            if part and not experts:
                continue  # the same for every part
            group = tuple(range(part, ranks, description.experts)) if experts else tuple(range(ranks))
            buffers.append((group, buffer))
            places |= {p.name: order(p.parameter, number, p.start) for p in buffer.parameters}
            owners |= {name: group[owner] for name, owner in buffer.owners.items() if owner is not None}
    # The numbers in a rank's file follow the forward order, or the order of the places.
    shares: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for member in members:
        shares[owners[member.parameter.name], member.group].append(member.parameter.name)
    ordered = {share: tuple(sorted(names, key=places.__getitem__)) for share, names in shares.items()}
    return RankShares(tuple(buffers), ordered)
