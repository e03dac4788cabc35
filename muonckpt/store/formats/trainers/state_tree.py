"""State dicts in files of ``torch.save``: tensors and plain data by paths, names for numbers, and DTensors' parts.

Dicts and lists can share parts, so every part is counted each time it is reached: a hostile file costs no more than
in proportion to its size.

Optimizers number their parameters.  Names come from ``param_names``, which torch records for optimizers of named
parameters, or from ``parameter_names.json``, which a person writes beside the files: docs/formats/trainers.md.  Nothing
else tells them for sure: weights of one shape look alike, and files of weights have another order.

Sources: ``DTensor``, ``DTensorSpec``, ``DeviceMesh`` and the placements of torch 2.4 to 2.13, pickled as they are.
"""

from __future__ import annotations

import json
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from ....algebra.box import Index
from ....layouts.mesh import AxisPlacement, Replicate, Shard, StridedShard
from ....names.errors import DamageError, SourceError, about
from ....names.keys import PARAM_GROUPS, STATE, is_optimizer, key_of
from ....names.vocabulary import MASTER, PARAMS, SECOND_MOMENT, STEP, ZERO_SLOTS, KeyPath
from ....names.wording import listed
from ....programs.signs import NAMES_FILE
from ....record.record import Chunk, Manifest, StateRecord
from ...io import limits
from ...io.location import Location, is_file
from ...io.regular import read_text_file
from ...reading.payloads import Reader
from ..torch_save.inert_pickle import Global, Record, expect, sequence, sizes_of
from ..torch_save.plain_item import ItemsInMemory, PlainParts
from ..torch_save.torch_file import (
    WITH_TYPE,
    MemberPayloads,
    TorchFile,
    checksums_inside,
    class_of,
    is_mapping,
    is_tensor,
    mapping,
)

T = TypeVar("T")

_MAX_DEPTH = 32
_MAX_LOOKED_AT = 1 << 12
"""Most parts of data in which the object is looked for that makes them no plain data."""


def _walk_leaves(file: TorchFile, content: object, root: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    """Yield the tensors, as the pickle has them, and the other data in a state dict, each with its path."""
    plain, count = PlainParts(file.described), 0
    max_count = limits.FREE_PARTS + file.described // limits.PICKLE_BYTES

    def below(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
        # A part counts each time it is used.
        nonlocal count
        count += 1
        limits.check_limit(count, max_count, "values in dicts that a file's pickle uses more than once")
        limits.check_limit(len(path), _MAX_DEPTH, "dicts and lists in each other")
        if is_mapping(value):
            for key, part in mapping(value).items():
                yield from below(part, (*path, _key_text(key)))
        elif type(value) in (list, tuple) and any(map(_holds_parts, cast(Sequence[object], value))):
            for number, part in enumerate(cast(Sequence[object], value)):
                yield from below(part, (*path, number))
        else:
            yield path, value

    # Tensors as they are, everything else as plain data, or by the name of what it is.
    for path, value in below(content, root):
        if is_tensor(value):
            yield path, value
            continue
        with about(key_of(path)):
            try:
                decoded_value: object = plain.part(value)
            except limits.LimitError:
                raise
            except SourceError:
                decoded_value = Undecoded(kind_in(value))
            yield path, decoded_value


def _holds_parts(value: object) -> bool:
    """Return whether a part of a list is a tensor or a dict, or a list with one directly in it."""
    if type(value) in (list, tuple):
        return any(is_tensor(part) or is_mapping(part) for part in cast(Sequence[object], value))
    return is_tensor(value) or is_mapping(value)


def _key_text(key: object) -> str:
    """Return a dict's key in the form of a path; objects by the name of their class."""
    match key:
        case Record(kind=kind):
            return f"<{kind}>"
        case tuple():
            return f"({', '.join(map(_key_text, key))})"
    return str(key)


def kind_in(value: object) -> str:
    """Return the name of the first object in data that is not plain, or what else is odd in it."""
    remaining = [value]
    for part in remaining:
        match part:
            case Record(kind=kind):
                return str(kind)
            case Global():
                return str(part)
            case list() | tuple() if len(remaining) < _MAX_LOOKED_AT:
                remaining += part
            case dict() if len(remaining) < _MAX_LOOKED_AT:
                remaining += [*part, *part.values()]
    return type(value).__name__


@dataclass(frozen=True, slots=True)
class Undecoded:
    """Represents an object that is no plain data, by the ``"module name"`` of its class: nothing of it is run."""

    kind: str

    def entry(self, path: KeyPath, file: str) -> str:
        """Return it as an entry of `signs.NOT_READ`."""
        return f"{key_of(path)} (undecoded: {self.kind:.80}) in {file}"


def decoded(
    file: TorchFile, content: object, root: KeyPath, *, dtensors: bool = False
) -> Iterator[tuple[KeyPath, object]]:
    """Yield tensors, as `SavedTensor` or `RankPart`, plain data and `Undecoded` in a state dict, each with its path.

    Keys of dicts become strings in paths, positions in lists integers, as in DCP.

    Args:
        dtensors: whether DTensors are read, as parts of ranks; else they are refused.

    Raises:
        LimitError: there is more than in proportion to the file.
        SourceError: a tensor is damaged, or a part of one.
    """
    chunks = []
    for path, value in _walk_leaves(file, content, root):
        if not is_tensor(value):
            yield path, value
            continue
        with about(key_of(path)):
            tensor_class = class_of(value)
            if tensor_class is not None and tensor_class not in _DTENSOR:
                yield path, Undecoded(tensor_class)
            elif not is_dtensor(value):
                tensor = file.tensor(value)
                chunks.append(tensor.chunk)
                yield path, tensor
            elif dtensors:
                part = rank_part(file, value)
                chunks.append(part.local)
                yield path, part
            else:
                raise SourceError(
                    "it is a DTensor, and this file has the part of one rank: give the folder with the files of "
                    "all ranks, under the names that verl or accelerate gave them (docs/formats/trainers.md)"
                )
    check_shared(file, chunks)


def same_on_ranks(noun: str, values: Mapping[int, T], advice: str = "") -> T:
    """Return the value that all ranks have, given by rank.

    Raises:
        SourceError: two ranks have something else; the message ends with the advice.
    """
    first = min(values)
    expected = repr(values[first])
    for rank, value in values.items():
        if repr(value) != expected:
            raise SourceError(
                f"expected the same {noun} on all ranks, found {expected:.80} on rank {first} and {value!r:.80} on "
                f"rank {rank}{advice}"
            )
    return values[first]


def check_shared(file: TorchFile, chunks: Iterable[Chunk]) -> None:
    """Refuse a file whose tensors share storages out of proportion to the bytes that are stored.

    Raises:
        LimitError: they do.
    """
    stored_bytes = sum(member.length for member in file.members.values())
    tensor_bytes = sum(chunk.payload.length for chunk in chunks if chunk.payload)
    max_bytes = limits.SMALL_DESCRIPTION + limits.UNFOLDED * stored_bytes
    limits.check_limit(tensor_bytes, max_bytes, f"bytes of tensors in {file.name}, which share storages")


def trainer_reader(
    folder: Location,
    tensors: Sequence[StateRecord],
    items: ItemsInMemory,
    files: Iterable[TorchFile],
    provenance: Mapping[str, object],
    faults: Iterable[SourceError] = (),
) -> Reader:
    """Return the reader of state dicts in files of ``torch.save``; the provenance leaves out empty lists.

    Args:
        files: those in which tensors may use a part of a storage.
    """
    provenance = {key: value for key, value in provenance.items() if value != []}
    manifest = Manifest(tuple(tensors), tuple(items.blobs), provenance)
    payloads = MemberPayloads(folder, items.in_memory, checksums_inside(files, tensors))
    return Reader(manifest, payloads, tuple(faults))


AS_PARAMETER = (ZERO_SLOTS | {MASTER}) - {STEP, SECOND_MOMENT}
"""Slots that have their parameter's shape in every program that writes them."""


@dataclass(frozen=True, slots=True)
class NamesFile:
    """The names of each optimizer's parameters in the order of their numbers.

    Attributes:
        of_optimizers: by the optimizer's root.
        of_only: those of the only optimizer, whatever its root.
    """

    of_optimizers: Mapping[str, Sequence[str]]
    of_only: Sequence[str] | None = None

    @classmethod
    def beside(cls, folder: Location) -> NamesFile:
        """Read the file in a folder, if any: a list of names, or a dict of such lists.

        Raises:
            SourceError: it is damaged, or holds something else.
        """
        file = folder / NAMES_FILE
        if not is_file(file):
            return cls({})
        with about(file):
            try:
                data = json.loads(read_text_file(file))
            except (ValueError, RecursionError) as error:
                raise SourceError(f"expected JSON, {error}") from error
            for names in data.values() if isinstance(data, dict) else [data]:
                if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                    raise SourceError("expected a list of names, or such a list for each of several optimizers")
        return cls(data) if isinstance(data, dict) else cls({}, data)

    def of(self, optimizer: str) -> Sequence[str] | None:
        """Return the names of an optimizer, by its root."""
        return self.of_optimizers.get(optimizer, self.of_only)

    def check_used(self, tensors: Sequence[StateRecord], items: ItemsInMemory) -> None:
        """Check that it names parameters only of optimizers that have state or groups.

        Raises:
            SourceError: it has names for others.
        """
        optimizers = set[str]()
        for path in [*(tensor.path for tensor in tensors), *(blob.path for blob in items.blobs)]:
            optimizers.update(key_of(path[:at]) for at, part in enumerate(path) if part in (STATE, PARAM_GROUPS))
        if not self.of_optimizers.keys() <= optimizers or (self.of_only and len(optimizers) > 1):
            raise SourceError(
                f"{NAMES_FILE} has names for {', '.join(self.of_optimizers) or 'one optimizer'}; optimizers here are "
                f"{', '.join(sorted(optimizers))}"
            )


def state_by_optimizer(tensors: Iterable[StateRecord]) -> dict[str, list[StateRecord]]:
    """Return the tensors that are state of optimizers, by the optimizers' keys."""
    state: defaultdict[str, list[StateRecord]] = defaultdict(list)
    for tensor in tensors:
        if tensor.path[-3:-2] == (STATE,):
            state[key_of(tensor.path[:-3])].append(tensor)
    return state


def optimizer_with_names(
    optimizer: Mapping[object, object], names_listed: Sequence[str] | None
) -> tuple[Mapping[object, object], Mapping[object, str]]:
    """Return a state dict with names in place of numbers, and the names by number; unchanged if nothing tells them.

    Args:
        names_listed: the names in the order of numbers, as a person wrote them.

    Raises:
        DamageError: as `parameters_in`, or a parameter with state is in no group.
        SourceError: names and numbers do not fit each other.
    """
    groups = [mapping(group) for group in expect(list, optimizer[PARAM_GROUPS])]
    numbers = parameters_in(groups)
    state = mapping(optimizer[STATE])
    # Each numbered parameter that has state is in a group; other keys are the optimizer's own (LoRA-FA).
    if strange := sorted(key for key in state.keys() - {*numbers} if type(key) is int):
        found = listed(map(str, strange), 3)
        raise DamageError(f"expected a group with the parameters that have state, found none with {found}")
    if not all(type(number) is int for number in numbers):
        return optimizer, {}
    # A name for each number, as the groups record them, or as a person wrote them.
    names = _read_names(groups) if names_listed is None else list(names_listed)
    if names is None:
        return optimizer, {}
    if len(names) != len(numbers):
        raise SourceError(f"expected a name for each of the {len(numbers)} parameters in groups, found {len(names)}")
    # No name may repeat; `parameters_in` has refused numbers that do.
    by_number: dict[object, str] = dict(zip(numbers, names, strict=True))
    if len(set(names)) < len(names):
        raise SourceError("expected every number and every name once, found one twice")
    # Groups and state with names in the place of numbers.
    named_groups = [{**group, PARAMS: [*map(by_number.__getitem__, sequence(group[PARAMS]))]} for group in groups]
    named_state = {by_number.get(number, number): slots for number, slots in state.items()}
    return {**optimizer, STATE: named_state, PARAM_GROUPS: named_groups}, by_number


def parameters_in(groups: Sequence[Mapping[object, object]]) -> list[int | str]:
    """Return the parameters of all groups in order, all by number or all by name.

    Raises:
        DamageError: a group lists none, or something else, or a parameter is listed twice.
    """
    parameters: list[int | str] = []
    for index, group in enumerate(groups):
        if PARAMS not in group:
            raise DamageError(f"expected the parameters of group {index} under {PARAMS!r}, found {listed(group)}")
        for parameter in expect(list, group[PARAMS]):
            if not isinstance(parameter, int | str) or (parameters and type(parameter) is not type(parameters[0])):
                raise DamageError(
                    f"expected numbers, or names, of the parameters of group {index}, found {parameter!r:.80}"
                )
            parameters.append(parameter)
    for parameter, count in Counter(parameters).items():
        if count > 1:
            raise DamageError(f"expected each parameter in one group, once; found {parameter!r:.80} {count} times")
    return parameters


def optimizers_with_names(
    content: Mapping[object, object], root: KeyPath, names: NamesFile
) -> tuple[Mapping[object, object], list[str]]:
    """Return content with names for optimizers' numbers, and the keys of optimizers without names.

    An optimizer may be the dict itself, a part of it, or in a list that is a part.  Raises as `optimizer_with_names`.
    """
    if is_optimizer(content):
        key = key_of(root)
        content, by_number = optimizer_with_names(content, names.of(key))
        has_numbers = any(type(number) is int for number in mapping(content[STATE]))
        return content, [key] if not by_number and has_numbers else []
    # The optimizers among its parts, and those in a list that is one.
    changed, numbered = dict(content), list[str]()
    for part, value in content.items():
        if _is_optimizer(value):
            changed[part], unnamed = optimizers_with_names(mapping(value), (*root, str(part)), names)
            numbered += unnamed
        elif type(value) is list and any(map(_is_optimizer, value)):
            states = []
            for position, entry in enumerate(value):
                state, unnamed = optimizers_with_names(mapping(entry), (*root, str(part), position), names)
                states.append(state)
                numbered += unnamed
            changed[part] = states
    return changed, numbered


def _is_optimizer(value: object) -> bool:
    return is_mapping(value) and is_optimizer(mapping(value))


def _read_names(groups: Sequence[Mapping[object, object]]) -> list[str] | None:
    names: list[str] = []
    for group in groups:
        if group.get("param_names") is None:
            return None
        group_names = expect(list, group["param_names"])
        names += (expect(str, name) for name in group_names)
        if len(group_names) != len(expect(list, group[PARAMS])):
            raise SourceError("expected as many param_names as parameters in a group, found others")
    return names


_WRAPPER = "torch._utils _rebuild_wrapper_subclass"
_DTENSOR = frozenset(
    f"torch.distributed.{module} DTensor" for module in ("tensor", "tensor._api", "_tensor", "_tensor.api")
)
_PLACEMENTS = ("torch.distributed.tensor.placement_types ", "torch.distributed._tensor.placement_types ")


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's part of a tensor of global ``shape``.

    Attributes:
        sizes: the sizes of the mesh's axes.
        coordinate: the rank's coordinate on the mesh.
        placements: one for each axis.
        local: the chunk of the rank's own elements, whose box begins at 0.
    """

    dtype: str
    shape: Index
    sizes: Index
    coordinate: Index
    placements: tuple[AxisPlacement, ...]
    local: Chunk


def is_dtensor(value: object) -> bool:
    match value:
        case Record(kind=kind, args=(Global() as call, Global() as tensor_class, *_)):
            return kind == WITH_TYPE and call == _WRAPPER and tensor_class in _DTENSOR
    return False


def rank_part(file: TorchFile, value: object) -> RankPart:
    """Return the part that a DTensor in a file describes.

    Raises:
        SourceError: it is not a DTensor of shards and replicas, or contradicts itself.
    """
    match value:
        case Record(args=(_, _, _, (_, dict(state)))) if is_dtensor(value):
            spec = _state_of(state.get("_spec"))
        case _:
            raise SourceError("expected a DTensor, found something else")
    # Its mesh, its cut and its global shape.
    local = file.tensor(state.get("_local_tensor"))
    mesh, meta = _state_of(spec.get("mesh")), expect(Record, spec.get("tensor_meta"))
    shape = sizes_of(expect(tuple, meta.args)[0])
    sizes, coordinate = _mesh_sizes(file, mesh), sizes_of(mesh.get("_coordinate_on_dim"))
    placements = tuple(_read_placement(entry, len(shape)) for entry in sequence(spec.get("placements")))
    has_equal_lengths = len(sizes) == len(coordinate) == len(placements)
    if not has_equal_lengths or any(map(operator.ge, coordinate, sizes)):
        raise SourceError(
            f"expected a coordinate on a mesh of sizes {sizes} and a placement for each axis, found {coordinate} and "
            f"{', '.join(map(str, placements))}"
        )
    # Torch before 2.10 has no order, and always cut from the first axis to the last.
    order = spec.get("shard_order")
    for entry in () if order is None else sequence(order):
        fields: Sequence[object] = sequence(entry.args if isinstance(entry, Record) else entry)
        axes = sizes_of(fields[-1])
        if list(axes) != sorted(axes):
            raise SourceError(
                f"expected shards cut from the first axis of the mesh to the last, found the order {axes}"
            )
    return RankPart(local.dtype, shape, sizes, coordinate, placements, local=local.chunk)


def _state_of(value: object) -> Mapping[object, object]:
    return expect(dict, expect(Record, value).state)


def _mesh_sizes(file: TorchFile, mesh: Mapping[object, object]) -> Index:
    """Return the sizes of a mesh, from torch's layout of it, or before 2.9 from a tensor of ranks."""
    match mesh.get("_layout"):
        case Record(state={"axes": axes}):
            return tuple(_total_size(_state_of(axis).get("shape")) for axis in sequence(axes))
        case Record(state={"shape": shape}):
            return tuple(map(_total_size, sequence(shape))) if type(shape) is tuple else (_total_size(shape),)
    return file.tensor(mesh.get("mesh")).shape


def _total_size(size: object) -> int:
    return math.prod(sizes_of(size)) if type(size) is tuple else sizes_of((size,))[0]


def _read_placement(value: object, ndim: int) -> AxisPlacement:
    # Its class, in whichever module of torch.
    record = expect(Record, value)
    name = next((record.kind.removeprefix(module) for module in _PLACEMENTS if record.kind.startswith(module)), "")
    fields = record.state if type(record.state) is dict else {}
    if name == "Replicate":
        return Replicate()
    if name in ("Shard", "_StridedShard"):
        dim = expect(int, fields.get("dim"))
        if not 0 <= dim < ndim:
            raise SourceError(f"expected a shard of one of {ndim} dims, found dim {dim}")
        if name == "Shard":
            return Shard(dim)
        split = expect(int, fields.get("split_factor"))
        if split < 1:
            raise SourceError(f"expected a split factor >= 1, found {split}")
        return StridedShard(dim, split)
    raise SourceError(
        f"expected Shard, _StridedShard or Replicate, found {record.kind}, which is not elements of a tensor"
    )
