"""DeepSpeed's ZeRO checkpoints: ``*_optim_states.pt`` with the flat partitions of each rank, and model states.

Weights are the float32 masters, under ``model``; state is under ``optimizer``, and the run's own values, such as
``global_steps``, under ``deepspeed``.  The contents of the flat tensors follow from ``param_shapes`` in the model
states.  Objects of DeepSpeed, such as ``fragment_address``, are read as inert data.

Where several ranks hold the momentum of a matrix whole, one copy is read, and compared with the others when it is
checked.

Source: ``engine.py``, ``stage_1_and_2.py``, ``stage3.py`` and ``bf16_optimizer.py`` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from ....algebra.box import Box, Index
from ....layouts.buffers.algorithms import part_numel, partitioned_group, partitioned_parameters, touched_parameters
from ....layouts.buffers.buffer_layout import BufferLayout, PlacedParameter, rank_of
from ....layouts.buffers.parameters import Parameter
from ....names.errors import DamageError, LayoutError, LostFileError, SourceError, about
from ....names.keys import PARAM_GROUPS, STATE, key_of
from ....names.vocabulary import MOMENTUM, PARAMS, STEP, KeyPath
from ....programs import signs
from ....record.record import Chunk, Chunks, Extent, Manifest, StateRecord
from ...io import limits
from ...io.location import Location, names_in
from ...reading.dtypes import itemsize
from ...reading.payloads import Reader
from ..torch_save.inert_pickle import Record, expect, sizes_of
from ..torch_save.plain_item import ItemsInMemory, PlainParts
from ..torch_save.torch_file import (
    MemberPayloads,
    SavedTensor,
    TorchFile,
    checksums_inside,
    is_mapping,
    is_tensor,
    mapping,
    read_torch_file,
    whole_record,
)
from .state_tree import check_shared, same_on_ranks

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(0|[1-9][0-9]{0,5})_mp_rank_([0-9]{2,5})_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(0|[1-9][0-9]{0,5})_)?mp_rank_([0-9]{2,5})_model_states\.pt")

_MAX_RANKS = 1 << 16

_STEPS = "steps-in-memory"
"""The name of numbers of updates as tensors."""

_MASTERS, _MASTERS_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
"""The keys of the float32 partitions in ZeRO 1 and 2, and in ZeRO 3."""

_RUN = "deepspeed"
"""The root of the run's own values."""

_NOT_OF_THE_RUN = frozenset(
    {"module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"}
    | {"dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"}
)
"""Keys of model states that are read otherwise, or that say how the run was spread over ranks."""


def reader(path: Location) -> Reader:
    """Read the folder of a tag, but no elements.  Where the file of a rank is missing or damaged, tensors have holes.

    Raises:
        SourceError: ranks contradict each other, or tensor, pipeline or expert parallelism cuts the model; nothing in a
            file is run.  Or no file names the parameters.
    """
    listed = names_in(path)
    with about(path):
        # Model states say what the run was; those of ZeRO 3 are of a rank each.
        models = dict(_open_files(path, listed, _MODEL_FILE))
        if not models:
            raise DamageError("expected *_model_states.pt, which name the parameters, found none that can be read")
        run = mapping(next(iter(models.values())).content)
        num_ranks = expect(int, run.get("dp_world_size"))
        limits.check_limit(num_ranks, _MAX_RANKS, "data-parallel ranks")
        files = dict(_open_files(path, listed, _OPTIMIZER_FILE))
        missing = _missing_files(files, num_ranks)
        if all(map(_is_of_rank, models.values())):
            missing += _missing_files(models, num_ranks)
        # The optimizer has the weights, too; the model states have everything else.
        contents = _Contents()
        first = _add_optimizer(contents, run, {rank: _Optimizer.of(file) for rank, file in files.items()}, num_ranks)
        _add_model(contents, run, models, num_ranks)
        # The run's own values.
        model = next(iter(models.values()))
        for key, value in run.items():
            if key not in _NOT_OF_THE_RUN and value is not None:
                try:
                    contents.items.add((_RUN, expect(str, key)), PlainParts(model.described).part(value))
                except SourceError:
                    contents.not_read.append(f"{key!r} in {model.name}")
        opened = (*files.values(), *models.values())
        for file in opened:
            chunks = chain.from_iterable(tensor.chunks for tensor in contents.tensors if tensor.shape)
            check_shared(file, (chunk for chunk in chunks if chunk.item.file == file.name))
    names = (name for name in listed if not (_OPTIMIZER_FILE.fullmatch(name) or _MODEL_FILE.fullmatch(name)))
    not_read = [*names, *contents.not_read]
    zero = {"ranks": num_ranks, "stage": first.stage, "format": first.kind}
    provenance = {"zero": zero} | ({signs.NOT_READ: not_read} if not_read else {})
    manifest = Manifest(
        tensors=tuple(contents.tensors),
        blobs=tuple(contents.items.blobs),
        provenance=provenance,
        files=dict.fromkeys(missing, ""),
    )
    checksums = checksums_inside(opened, [*contents.tensors, *contents.compared])
    in_memory = {**contents.items.in_memory, _STEPS: bytes(contents.steps)}
    faults: list[SourceError] = []
    for name in missing:
        is_damaged = name in listed
        faults.append(
            DamageError(f"{path / name} is damaged") if is_damaged else LostFileError(f"{path / name} is missing")
        )
    return Reader(manifest, _ZeroPayloads(path, in_memory, checksums, contents.copies), tuple(faults))


def _open_files(path: Location, listed: Sequence[str], pattern: re.Pattern[str]) -> Iterator[tuple[int, TorchFile]]:
    """Yield the data-parallel ranks of files with such names, and the files; one of all ranks counts as rank 0's.

    Damaged files are left out.
    """
    name_by_rank: dict[int, str] = {}
    for name in listed:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        # The second number is that of tensor and pipeline parallelism.
        rank = int(match[1] or 0)
        if int(match[2]) or (known_name := name_by_rank.setdefault(rank, name)) != name:
            raise SourceError(
                f"expected one file of a rank, found {name if int(match[2]) else f'{known_name} and {name}'}: parts of "
                "tensor- and pipeline-parallel models are not joined; ds_to_universal.py of DeepSpeed joins them where "
                "no group is Muon's, and universal folders are read"
            )
        with suppress(DamageError):
            yield rank, read_torch_file(path, name)


def _is_of_rank(file: TorchFile) -> bool:
    """Return whether a file of the model is of one rank, as in ZeRO 3, and has buffers and parts only."""
    return file.name.startswith("zero")


def _missing_files(files: Mapping[int, TorchFile], num_ranks: int) -> list[str]:
    """Return the names of the files of other ranks, which are not there, or damaged.

    Raises:
        DamageError: no rank has a file, so that nothing tells the names.
        SourceError: there is the file of a rank that the run did not have.
    """
    if not files:
        raise DamageError(f"expected *_optim_states.pt of {num_ranks} ranks, found none that can be read")
    if max(files) >= num_ranks:
        raise SourceError(f"the model states are of {num_ranks} ranks, found {files[max(files)].name}: move it away")
    prefix, suffix = re.split("zero_pp_rank_[0-9]+_", files[max(files)].name)
    return [f"{prefix}zero_pp_rank_{rank}_{suffix}" for rank in range(num_ranks) if rank not in files]


@dataclass(frozen=True, slots=True)
class _Copy:
    """One rank's copy of a momentum: ``elements`` is a part of ``storage``, which has a checksum as a whole."""

    rank: int
    storage: Extent
    elements: Extent


@dataclass(frozen=True, slots=True)
class _Copies:
    """The copies of a parameter's momentum, one for each rank that holds it; undamaged ones have the same bytes."""

    parameter_name: str
    copies: tuple[_Copy, ...]


class _ZeroPayloads(MemberPayloads):
    """The bytes of such files, with the copies of each chunk, by its item."""

    def __init__(
        self,
        directory: Location,
        in_memory: Mapping[str, bytes],
        checksums: Mapping[Extent, int],
        copies: Mapping[Extent, _Copies],
    ) -> None:
        super().__init__(directory, in_memory, checksums)
        self._copies = copies

    def has_checksum(self, chunk: Chunk) -> bool:
        return super().has_checksum(chunk) or chunk.item in self._copies

    def check_item(self, item: Extent, parts: Iterable[memoryview] | None = None) -> None:
        """Compare a storage with its CRC-32, or the copies of a parameter with each other and so their storages."""
        if item not in self._copies:
            super().check_item(item, parts)
            return
        # Each storage has a checksum, and then the first copy is compared with the others.
        for copy in self._copies[item].copies:
            super().check_item(copy.storage)
        first, *others = self._copies[item].copies
        start = 0
        for part in self.bands(first.elements) if parts is None else parts:
            expected = bytes(part)  # scratch memory is used again
            for copy in others:
                file = copy.elements.file
                if expected != self.read_scratch(Extent(file, copy.elements.offset + start, len(expected))):
                    raise DamageError(
                        f"ranks {first.rank} and {copy.rank} both hold the whole momentum of "
                        f"{self._copies[item].parameter_name!r}, which their partitions cut, and "
                        f"{first.elements.file} and {file} differ in it: one of them is wrong"
                    )
            start += len(expected)


@dataclass(frozen=True, slots=True)
class _Contents:
    """The tensors and items of a checkpoint, as they are added.

    Attributes:
        copies: the copies of a chunk, by its item; each is in ``compared``.
        steps: numbers of updates as bytes of float32.
    """

    tensors: list[StateRecord] = field(default_factory=list)
    items: ItemsInMemory = field(default_factory=ItemsInMemory)
    copies: dict[Extent, _Copies] = field(default_factory=dict)
    compared: list[StateRecord] = field(default_factory=list)
    not_read: list[str] = field(default_factory=list)
    steps: bytearray = field(default_factory=bytearray)

    def add(self, path: KeyPath, shape: Index, dtype: str, chunks: Iterable[Chunk]) -> None:
        self.tensors.append(
            StateRecord(key=key_of(path), path=path, shape=shape, dtype=dtype, chunks=Chunks.of(chunks, len(shape)))
        )

    def add_number(self, path: KeyPath, value: object) -> None:
        """Add state that is no tensor; numbers of updates take the form of torch's AdamW."""
        if path[-1] != STEP or type(value) is not int:
            self.items.add(path, value)
            return
        raw = struct.pack("<f", value)
        place = Extent(_STEPS, len(self.steps), len(raw))
        self.steps.extend(raw)
        self.add(path, (), "float32", [Chunk(Box.of(()), place, place, crc32=zlib.crc32(raw))])

    def add_parts(self, root: KeyPath, end: KeyPath, layout: BufferLayout, parts: Mapping[int, SavedTensor]) -> None:
        """Add the parameters of a layout with a flat part on each rank; parts of other ranks are lost."""
        dtype = same_on_ranks("dtype", {rank: part.dtype for rank, part in parts.items()})
        layouts = layout.tensor_layouts()
        for parameter in layout.parameters:
            chunks = []
            for fragment in layouts[parameter.name].fragments:
                rank = fragment.place.buffer
                assert isinstance(rank, int), "the buffers of a group are its ranks"
                if rank in parts:
                    chunks.append(_make_chunk(fragment.box, fragment.place.offset, parts[rank]))
            self.add((*root, parameter.name, *end), parameter.parameter.shape, dtype, chunks)


def _make_chunk(box: Box, offset: int, part: SavedTensor) -> Chunk:
    """Return the chunk of a box whose elements begin at element ``offset`` of a flat tensor."""
    size, payload = itemsize(part.dtype), part.chunk.payload
    assert payload is not None, "chunks of files have payloads"
    if offset + box.numel > part.chunk.box.numel:
        raise SourceError(
            f"expected at least {offset + box.numel} elements in a flat tensor of {payload.file}, found "
            f"{part.chunk.box.numel}: the groups or the number of ranks are not those of the model states"
        )
    return Chunk(box, part.chunk.item, Extent(payload.file, payload.offset + offset * size, box.numel * size))


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """One rank's optimizer: the state of ZeRO, and in it the state of the optimizer that updates the partitions."""

    file: TorchFile
    is_stage_3: bool
    zero: Mapping[object, object]
    masters: Sequence[object]
    state: Mapping[object, object]
    groups: Sequence[Mapping[object, object]]

    @classmethod
    def of(cls, file: TorchFile) -> _Optimizer:
        """Read a rank's file.  ZeRO 3 has other keys for the base optimizer and the masters than ZeRO 1 and 2."""
        with about(file.name):
            zero = mapping(mapping(file.content).get("optimizer_state_dict"))
            is_stage_3 = _MASTERS_3 in zero
            base_state = zero.get("optimizer_state_dict" if is_stage_3 else "base_optimizer_state")
            if type(base_state) is list:
                raise SourceError(
                    "expected the whole state of each partition, found an elastic checkpoint, which cuts Muon's "
                    'momentum as if it were padded: save it again without "elastic_checkpoint"'
                )
            masters = expect(list, zero.get(_MASTERS_3 if is_stage_3 else _MASTERS))
            groups = [mapping(group) for group in expect(list, mapping(base_state).get(PARAM_GROUPS))]
            state = mapping(mapping(base_state).get(STATE))
            return cls(file, is_stage_3, zero=zero, masters=masters, state=state, groups=groups)

    @property
    def stage(self) -> object:
        """The stage of ZeRO; BF16_Optimizer, which records none, is of stage 1."""
        stage = self.zero.get("zero_stage")
        return stage.args[0] if isinstance(stage, Record) and type(stage.args) is tuple else 1

    @property
    def kind(self) -> str:
        """The stage and the dtype, or the optimizer, in a word for manifests."""
        if "zero_stage" not in self.zero:
            return "bf16-optimizer"
        return f"zero{self.stage}{'-bf16' if self.file.name.startswith('bf16_') else ''}"

    def group_value(self, key: str, number: int, default: object = None) -> object:
        """Return what ZeRO has for a group; the default where it has no such list."""
        values = self.zero.get(key)
        return default if values is None else dict(enumerate(expect(list, values))).get(number)

    def config_value(self, *keys: str) -> object:
        """Return a value of the configuration of ZeRO; None if it has none."""
        node: object = self.file.content
        for key in ("ds_config", "zero_optimization", *keys):
            node = mapping(node).get(key) if is_mapping(node) else None
        return node

    def plain(self, value: object) -> object:
        return PlainParts(self.file.described).part(value)


def _add_optimizer(
    contents: _Contents, run: Mapping[object, object], optimizers: Mapping[int, _Optimizer], num_ranks: int
) -> _Optimizer:
    """Add the weights, state and options that ranks' optimizers have; return the first rank's.

    ZeRO flattens the parameters of each of its own groups to one tensor, cut over ranks.  To the optimizer that it
    wraps, each such tensor is one parameter, and a parameter group of that optimizer may have several of them.
    """
    first = next(iter(optimizers.values()))
    flat_numbers = list(chain.from_iterable(expect(list, group.get(PARAMS)) for group in first.groups))
    # The model states say the parameters of each flat tensor, in the order in which they are flattened.
    flat_groups = [_read_parameters(group) for group in expect(list, run.get("param_shapes"))]
    for optimizer in optimizers.values():
        _check_groups(optimizer, len(flat_groups), len(flat_numbers), num_ranks)
    # Weights and state are in the ranks' parts of the flat tensors.
    layouts = []
    for index, parameters in enumerate(flat_groups):
        masters = {rank: _read_flat(optimizer.file, optimizer.masters[index]) for rank, optimizer in optimizers.items()}
        with about(f"group {index}"):
            layout = _partition_layout(parameters, index, optimizers, masters, num_ranks)
            contents.add_parts(("model",), (), layout, masters)
            _add_state(contents, layout, optimizers, flat_numbers[index])
            layouts.append(layout)
    # Options are of the wrapped optimizer's groups, which name the parameters of all their flat tensors.
    remaining = iter(layouts)
    for number, group in enumerate(first.groups):
        root = ("optimizer", PARAM_GROUPS, number)
        for option in group:
            if option == PARAMS:
                continue
            values: dict[int, object] = {}
            for rank, rank_optimizer in optimizers.items():
                values[rank] = rank_optimizer.plain(rank_optimizer.groups[number].get(option))
            contents.items.add((*root, expect(str, option)), same_on_ranks(f"{option} of group {number}", values))
        layouts_of_group = islice(remaining, len(expect(list, group.get(PARAMS))))
        parameters_of_group = chain.from_iterable(layout.parameters for layout in layouts_of_group)
        contents.items.add((*root, PARAMS), [parameter.name for parameter in parameters_of_group])
    return first


def _check_groups(optimizer: _Optimizer, num_groups: int, num_parameters: int, num_ranks: int) -> None:
    """Refuse a rank whose optimizer has other groups than the model states, or groups over other ranks."""
    if not num_parameters == num_groups == len(optimizer.masters):
        raise SourceError(
            f"{optimizer.file.name}: expected flat partitions of {num_groups} groups, as the model states have, found "
            f"{len(optimizer.masters)}"
        )
    counts = optimizer.zero.get("partition_count")
    if counts != ([num_ranks] * len(counts) if type(counts) is list else num_ranks):
        raise SourceError(
            f"{optimizer.file.name}: expected groups over all {num_ranks} ranks, found {counts}: those of experts are "
            "not read; ds_to_universal.py of DeepSpeed joins them where no group is Muon's"
        )


def _read_parameters(group: object) -> list[Parameter]:
    return [Parameter(expect(str, name), sizes_of(shape), "float32") for name, shape in mapping(group).items()]


def _partition_layout(
    parameters: Sequence[Parameter],
    number: int,
    optimizers: Mapping[int, _Optimizer],
    masters: Mapping[int, SavedTensor],
    num_ranks: int,
) -> BufferLayout:
    """Return how a group is partitioned.

    Raises:
        SourceError: the partitions have other sizes, or DeepSpeed recorded other places.
    """
    first = next(iter(optimizers.values()))
    sizes = {rank: part.chunk.box.numel for rank, part in masters.items()}
    try:
        if first.is_stage_3:
            layout = partitioned_parameters(parameters, num_ranks)
        else:
            if "zero_stage" in first.zero:  # else they are of BF16_Optimizer, which stores the padding
                for rank, optimizer in optimizers.items():
                    sizes[rank] += expect(int, optimizer.group_value("group_paddings", number))
            alignment = expect(list, first.group_value("param_alignment_paddings", number, []))
            between = [expect(int, count) for count in alignment]
            layout = partitioned_group(parameters, num_ranks, same_on_ranks("size of the partitions", sizes), between)
    except LayoutError as error:
        raise SourceError(f"the partitions do not hold the parameters of the model states: {error}") from error
    _check_sizes(sizes, layout)
    _check_recorded(layout, number, optimizers)
    return layout


def _check_recorded(layout: BufferLayout, number: int, optimizers: Mapping[int, _Optimizer]) -> None:
    """Compare a layout with the places that DeepSpeed recorded for a universal checkpoint.

    Raises:
        SourceError: they differ.
    """
    expected: dict[int, dict[object, object]] = {rank: {} for rank in optimizers}
    for parameter in layout.parameters:
        for shard in layout.shards_of(parameter):
            if (rank := rank_of(shard)) in expected:
                lo, hi = max(parameter.start, shard.start), min(parameter.stop, shard.stop)
                expected[rank][parameter.name] = {"numel": hi - lo, "start": shard.offset + lo - shard.start}
    # A universal checkpoint records a fragment for each parameter of a rank.
    for rank, optimizer in optimizers.items():
        recorded = optimizer.group_value("param_slice_mappings", number)
        if recorded is None or optimizer.config_value("round_robin_gradients"):  # with that it records another order
            continue
        places = {name: expect(Record, address).state for name, address in mapping(recorded).items()}
        for name in {**expected[rank], **places}:
            if places.get(name) != expected[rank].get(name):
                raise SourceError(
                    f"{optimizer.file.name}: expected {name!r} at {expected[rank].get(name)}, as param_shapes of the "
                    f"model states say, found {places.get(name)}: the files are of different runs"
                )


def _add_state(contents: _Contents, layout: BufferLayout, optimizers: Mapping[int, _Optimizer], number: object) -> None:
    """Add the state of a group's parameters, given the number of its flat parameter."""
    touched = touched_parameters(layout)
    states = {rank: mapping(optimizer.state.get(number, {})) for rank, optimizer in optimizers.items()}
    states = {rank: state for rank, state in states.items() if touched[rank] or state}
    if not states:
        return
    roots = [("optimizer", STATE, parameter.name) for parameter in layout.parameters]
    for slot in (expect(str, slot) for slot in next(iter(states.values()))):
        with about(slot):
            values = {rank: state.get(slot) for rank, state in states.items()}
            # A value that all parameters share.
            if not same_on_ranks("state", {rank: is_tensor(value) for rank, value in values.items()}):
                value = same_on_ranks("value", {rank: optimizers[rank].plain(value) for rank, value in values.items()})
                for root in roots:
                    contents.add_number((*root, slot), value)
                continue
            parts = {rank: optimizers[rank].file.tensor(value) for rank, value in values.items()}
            # A tensor without dims that all parameters share.
            if not same_on_ranks("dims", {rank: len(part.shape) for rank, part in parts.items()}):
                same_on_ranks("value", {rank: part.chunk.crc32 for rank, part in parts.items()})
                contents.tensors.extend(whole_record((*root, slot), parts[min(parts)]) for root in roots)
            # Momenta that each rank holds whole, or the partitions' elements.
            elif slot == MOMENTUM and _is_momentum_whole(parts, layout, touched, optimizers):
                _add_whole(contents, touched, parts)
            else:
                _check_sizes({rank: part.chunk.box.numel for rank, part in parts.items()}, layout)
                contents.add_parts(("optimizer", STATE), (slot,), layout, parts)


def _is_momentum_whole(
    parts: Mapping[int, SavedTensor],
    layout: BufferLayout,
    touched: Sequence[Sequence[PlacedParameter]],
    optimizers: Mapping[int, _Optimizer],
) -> bool:
    """Return whether momentum lies as `touched_parameters` says, and not as the partitions do.

    Raises:
        SourceError: it has the size of neither.
    """
    first = optimizers[min(parts)]
    if "zero_stage" not in first.zero or first.is_stage_3:
        return False
    if first.config_value("offload_optimizer", "device") not in (None, "none"):
        return False
    # A rank that holds no part of a cut parameter has the same elements both ways.
    cutting_ranks = set()
    for parameter in layout.parameters:
        shards = list(layout.shards_of(parameter))
        cutting_ranks |= set(map(rank_of, shards)) if len(shards) > 1 else set()
    for rank, part in parts.items():
        numel, expected = part.chunk.box.numel, touched[rank][-1].stop if touched[rank] else 0
        if numel != expected and (rank in cutting_ranks or numel != part_numel(layout)):
            raise SourceError(
                f"{optimizers[rank].file.name}: expected {expected} elements, as many as the parameters of its "
                f"partition have whole, found {numel}"
            )
    return True


def _add_whole(
    contents: _Contents, touched: Sequence[Sequence[PlacedParameter]], parts: Mapping[int, SavedTensor]
) -> None:
    """Add momenta that each rank with a part of them holds whole."""
    dtype = same_on_ranks("dtype", {rank: part.dtype for rank, part in parts.items()})
    copies: dict[str, list[tuple[int, Chunk]]] = {}
    shapes: dict[str, Index] = {}
    for rank, parameters in enumerate(touched):
        for parameter in parameters:
            shapes[parameter.name] = parameter.parameter.shape
            copies.setdefault(parameter.name, [])
            if rank in parts:
                chunk = _make_chunk(Box.of(parameter.parameter.shape), parameter.start, parts[rank])
                copies[parameter.name].append((rank, chunk))
    for name, places in copies.items():
        path = ("optimizer", STATE, name, MOMENTUM)
        chunks = [chunk for _, chunk in places[:1]]
        # One copy is read, and compared with the others when it is checked.
        if len(places) > 1 and (payload := chunks[0].payload):
            chunks = [replace(chunks[0], item=payload)]
            rank_copies = (_Copy(rank, chunk.item, chunk.payload) for rank, chunk in places if chunk.payload)
            contents.copies[payload] = _Copies(name, tuple(rank_copies))
            contents.compared.extend(whole_record(path, SavedTensor(dtype, chunk)) for _, chunk in places)
        contents.add(path, shapes[name], dtype, chunks)


def _add_model(
    contents: _Contents, run: Mapping[object, object], models: Mapping[int, TorchFile], num_ranks: int
) -> None:
    """Add what the optimizer does not have: buffers, frozen parameters, and the other names of shared ones."""
    file = models[min(models)]
    weights = {str(tensor.path[-1]): tensor for tensor in contents.tensors if tensor.path[0] == "model"}
    for alias, name in _items_under(run, "shared_params"):
        if (tensor := weights.get(str(name))) is not None:
            path = ("model", expect(str, alias))
            weights[str(alias)] = replace(tensor, key=key_of(path), path=path)
            contents.tensors.append(weights[str(alias)])
    # The model state of a rank of ZeRO 3 has buffers, and placeholders of weights.
    is_of_rank = _is_of_rank(file)
    buffers = expect(list, run.get("buffer_names") or [])
    for name, value in _items_under(run, "module"):
        if name not in weights and is_tensor(value) and (name in buffers or not is_of_rank):
            contents.tensors.append(whole_record(("model", expect(str, name)), file.tensor(value)))
    # In ZeRO 3 frozen parameters are cut as others are.
    for name, shape in _items_under(run, "frozen_param_shapes") if is_of_rank else ():
        layout = partitioned_parameters([Parameter(expect(str, name), sizes_of(shape))], num_ranks)
        parts = {}
        for rank, model in models.items():
            fragments = dict(_items_under(mapping(model.content), "frozen_param_fragments"))
            parts[rank] = _read_flat(model, fragments.get(name))
        contents.add_parts(("model",), (), layout, parts)


def _items_under(content: Mapping[object, object], key: str) -> Iterable[tuple[object, object]]:
    value = content.get(key)
    return () if value is None else mapping(value).items()


def _read_flat(file: TorchFile, value: object) -> SavedTensor:
    tensor = file.tensor(value)
    if len(tensor.shape) != 1:
        raise SourceError(f"{file.name}: expected a flat tensor, found shape {tensor.shape}")
    return tensor


def _check_sizes(sizes: Mapping[int, int], layout: BufferLayout) -> None:
    if same_on_ranks("size of the partitions", sizes) != part_numel(layout):
        raise SourceError(f"expected partitions of {part_numel(layout)} elements, found {sizes[min(sizes)]}")
