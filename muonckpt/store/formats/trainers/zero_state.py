"""DeepSpeed's ZeRO checkpoints: ``*_optim_states.pt`` with the flat partitions of each rank, and model states.

Weights are the float32 masters, under ``model``; state is under ``optimizer``, and the run's own values, such as
``global_steps``, under ``deepspeed``.  What the flat tensors hold follows from ``param_shapes`` in the model states.
Objects of DeepSpeed, such as ``fragment_address``, are read as inert data.

Where several ranks hold the momentum of a matrix whole, one copy is read, and compared with the others when it is
checked.

Source: ``engine.py``, ``stage_1_and_2.py``, ``stage3.py`` and ``bf16_optimizer.py`` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

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
from ...io.location import Location
from ...reading.dtypes import itemsize
from ...reading.payloads import BAND_BYTES
from ...reading.reader import LocatedReader
from ..torch_save.inert_pickle import Record, expect, sizes_of
from ..torch_save.plain_item import HeldItems, PlainParts
from ..torch_save.torch_file import (
    MemberPayloads,
    TorchFile,
    checksums_inside,
    is_tensor,
    read_torch_file,
    whole_record,
)
from .state_tree import PlainTensor, check_shared, is_mapping, mapping

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(0|[1-9][0-9]{0,5})_mp_rank_([0-9]{2,5})_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(0|[1-9][0-9]{0,5})_)?mp_rank_([0-9]{2,5})_model_states\.pt")

_MOST_RANKS = 1 << 16

_STEPS = "steps-in-memory"
"""The name that stands for numbers of updates as tensors."""

_MASTERS, _MASTERS_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
"""The keys of the float32 partitions in ZeRO 1 and 2, and in ZeRO 3."""

_RUN = "deepspeed"
"""The root of the run's own values."""

T = TypeVar("T")

_NOT_OF_THE_RUN = frozenset(
    {"module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"}
    | {"dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"}
)
"""Keys of model states that are read otherwise, or that say how the run was spread over ranks."""


def reader(path: Location) -> LocatedReader:
    """Read the folder of a tag, but no elements.  Where the file of a rank is missing, tensors have holes.

    Raises:
        SourceError: the file of a rank is damaged, ranks contradict each other, or tensor, pipeline or expert
            parallelism cuts the model; nothing in a file is run.
    """
    return _read(path, None)


def remains(path: Location, without: Collection[str]) -> LocatedReader:
    """Read what is left of such a folder without these files, and those that cannot be opened.

    Raises:
        SourceError: as `reader`, but for damaged files; or no file names the parameters.
    """
    return _read(path, without)


def _read(path: Location, without: Collection[str] | None) -> LocatedReader:
    listed = sorted(str(entry.name) for entry in path.iterdir())
    with about(path):
        models = dict(_opened(path, listed, _MODEL_FILE, without))
        if not models:
            raise DamageError("expected *_model_states.pt, which name the parameters, found none that can be read")
        run = mapping(next(iter(models.values())).content)
        ranks = expect(int, run.get("dp_world_size"))
        limits.check_limit(ranks, _MOST_RANKS, "data-parallel ranks")
        files = dict(_opened(path, listed, _OPTIMIZER_FILE, without))
        missing = _missing(files, ranks) + (_missing(models, ranks) if all(map(_of_rank, models.values())) else [])
        found = _Found()
        flats = _add_optimizer(found, run, {rank: _Rank.of(file) for rank, file in files.items()}, ranks)
        _add_model(found, run, models, ranks)
        _add_run(found, next(iter(models.values())))
        for file in (*files.values(), *models.values()):
            check_shared(
                file, (chunk for t in found.tensors if t.shape for chunk in t.chunks if chunk.item.file == file.name)
            )
    names = (name for name in listed if not (_OPTIMIZER_FILE.fullmatch(name) or _MODEL_FILE.fullmatch(name)))
    provenance = {"zero": {"ranks": ranks, **flats}, signs.NOT_READ: [*names, *found.not_read]}
    said = {name: value for name, value in provenance.items() if value}
    manifest = Manifest(tuple(found.tensors), tuple(found.items.blobs), said, dict.fromkeys(missing, ""))
    checksums = checksums_inside((*files.values(), *models.values()), [*found.tensors, *found.compared])
    held = {**found.items.in_memory, _STEPS: bytes(found.steps)}
    faults = tuple(LostFileError(f"{path / name} is missing") for name in missing)
    return LocatedReader(manifest, _ZeroPayloads(path, held, checksums, found.copies), faults)


def _opened(
    path: Location, listed: Sequence[str], pattern: re.Pattern[str], without: Collection[str] | None
) -> Iterator[tuple[int, TorchFile]]:
    """Yield the data-parallel ranks of files with such names, and the files; one of all ranks counts as rank 0's."""
    known: dict[int, str] = {}
    for name in listed:
        match = pattern.fullmatch(name)
        if match is None or name in (without or ()):
            continue
        rank = int(match[1] or 0)
        if int(match[2]) or (other := known.setdefault(rank, name)) != name:
            raise SourceError(
                f"expected one file of a rank, found {name if int(match[2]) else f'{other} and {name}'}: parts of "
                "tensor- and pipeline-parallel models are not joined; ds_to_universal.py of DeepSpeed joins them where "
                "no group is Muon's, and universal folders are read"
            )
        try:
            yield rank, read_torch_file(path, name)
        except DamageError:
            if without is None:
                raise


def _of_rank(file: TorchFile) -> bool:
    """Return whether a file of the model is of one rank, as in ZeRO 3, and has buffers and parts only."""
    return file.name.startswith("zero")


def _missing(files: Mapping[int, TorchFile], ranks: int) -> list[str]:
    """Return the names of the files of other ranks, which are not there.

    Raises:
        DamageError: no rank has a file, so that nothing tells the names.
        SourceError: there is the file of a rank that the run did not have.
    """
    if not files:
        raise DamageError(f"expected *_optim_states.pt of {ranks} ranks, found none that can be read")
    if max(files) >= ranks:
        raise SourceError(f"the model states are of {ranks} ranks, found {files[max(files)].name}: move it away")
    before, after = re.split("zero_pp_rank_[0-9]+_", files[max(files)].name)
    return [f"{before}zero_pp_rank_{rank}_{after}" for rank in range(ranks) if rank not in files]


@dataclass(frozen=True, slots=True)
class _Copies:
    """Bytes that are the same if all is well: what several ranks hold of a parameter ``name``.

    ``places`` are the ranks, with their storages and the extents in them.
    """

    name: str
    places: tuple[tuple[int, Extent, Extent], ...]


class _ZeroPayloads(MemberPayloads):
    """The bytes of such files, which knows the copies of what is read, by the item of the chunk."""

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

    def check_item(self, item: Extent) -> None:
        """Compare a storage with its CRC-32, or the copies of a parameter with each other and so their storages."""
        if item not in self._copies:
            super().check_item(item)
            return
        copies = self._copies[item]
        (first, _, one), *others = copies.places
        for _, storage, _ in copies.places:
            super().check_item(storage)
        for rank, _, other in others:
            for start in range(0, one.length, BAND_BYTES):
                band = min(BAND_BYTES, one.length - start)
                expected = bytes(self.read_scratch(Extent(one.file, one.offset + start, band)))
                if expected != self.read_scratch(Extent(other.file, other.offset + start, band)):
                    raise DamageError(
                        f"ranks {first} and {rank} both hold the whole momentum of {copies.name!r}, which their "
                        f"partitions cut, and {one.file} and {other.file} differ in it: one of them is wrong"
                    )


@dataclass(frozen=True, slots=True)
class _Found:
    """What a checkpoint holds.

    Attributes:
        copies: the copies of what is read, by the item of its chunk; each is in ``compared``.
    """

    tensors: list[StateRecord] = field(default_factory=list)
    items: HeldItems = field(default_factory=HeldItems)
    copies: dict[Extent, _Copies] = field(default_factory=dict)
    compared: list[StateRecord] = field(default_factory=list)
    not_read: list[str] = field(default_factory=list)
    steps: bytearray = field(default_factory=bytearray)

    def add(self, path: KeyPath, shape: Index, dtype: str, chunks: Iterable[Chunk]) -> None:
        own = Chunks.of(chunks, len(shape))
        self.tensors.append(StateRecord(key_of(path), path, shape, dtype, own))

    def add_number(self, path: KeyPath, value: object) -> None:
        """Add state that is no tensor; a number of updates, which fused optimizers keep so, as torch's AdamW has it."""
        if path[-1] != STEP or type(value) is not int:
            self.items.add(path, value)
            return
        raw = struct.pack("<f", value)
        place = Extent(_STEPS, len(self.steps), len(raw))
        self.steps.extend(raw)
        self.add(path, (), "float32", [Chunk(Box.of(()), place, place, crc32=zlib.crc32(raw))])

    def add_parts(self, root: KeyPath, end: KeyPath, layout: BufferLayout, parts: Mapping[int, PlainTensor]) -> None:
        """Add the parameters of a layout, of which each rank has a flat part; those of other ranks are lost."""
        dtype = _same("dtype", {rank: part.dtype for rank, part in parts.items()})
        held = layout.tensor_layouts()
        for placed in layout.parameters:
            places = ((f.box, f.place.offset, parts.get(_rank(f.place.buffer))) for f in held[placed.name].fragments)
            chunks = [_chunk(box, offset, part) for box, offset, part in places if part]
            self.add((*root, placed.name, *end), placed.parameter.shape, dtype, chunks)


def _rank(buffer: object) -> int:
    assert isinstance(buffer, int), "the buffers of a group are its ranks"
    return buffer


def _chunk(box: Box, offset: int, part: PlainTensor) -> Chunk:
    """Return the chunk of a box whose elements lie in a flat tensor from element ``offset`` on."""
    size, payload = itemsize(part.dtype), part.chunk.payload
    assert payload is not None, "chunks of files have payloads"
    if offset + box.numel > part.chunk.box.numel:
        raise SourceError(
            f"expected at least {offset + box.numel} elements in a flat tensor of {payload.file}, found "
            f"{part.chunk.box.numel}: the groups or the number of ranks are not those of the model states"
        )
    return Chunk(box, part.chunk.item, Extent(payload.file, payload.offset + offset * size, box.numel * size))


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank's optimizer: the state of ZeRO and, below it, of the optimizer that updates the partitions."""

    file: TorchFile
    zero: Mapping[object, object]
    masters: Sequence[object]
    state: Mapping[object, object]
    groups: Sequence[Mapping[object, object]]

    @classmethod
    def of(cls, file: TorchFile) -> _Rank:
        with about(file.name):
            zero = mapping(mapping(file.content).get("optimizer_state_dict"))
            below = zero.get("optimizer_state_dict" if _MASTERS_3 in zero else "base_optimizer_state")
            if type(below) is list:
                raise SourceError(
                    "expected the whole state of each partition, found an elastic checkpoint, which cuts Muon's "
                    'momentum as if it were padded: save it again without "elastic_checkpoint"'
                )
            masters = expect(list, zero.get(_MASTERS_3 if _MASTERS_3 in zero else _MASTERS))
            groups = [mapping(group) for group in expect(list, mapping(below).get(PARAM_GROUPS))]
            return cls(file, zero, masters, mapping(mapping(below).get(STATE)), groups)

    def listed(self, key: str, number: int, missing: object = None) -> object:
        """Return what ZeRO has for a group; ``missing`` where it has no such list."""
        values = self.zero.get(key)
        return missing if values is None else dict(enumerate(expect(list, values))).get(number)

    def configured(self, *keys: str) -> object:
        """Return a value of the configuration of ZeRO; None if it has none."""
        node: object = self.file.content
        for key in ("ds_config", "zero_optimization", *keys):
            node = mapping(node).get(key) if is_mapping(node) else None
        return node


def _add_optimizer(
    found: _Found, run: Mapping[object, object], optimizers: Mapping[int, _Rank], ranks: int
) -> dict[str, object]:
    """Add weights and state; return the stage, for the provenance."""
    first = next(iter(optimizers.values()))
    numbers = [number for group in first.groups for number in expect(list, group.get(PARAMS))]
    shapes = [_shapes(group) for group in expect(list, run.get("param_shapes"))]
    for rank in optimizers.values():
        if not len(numbers) == len(shapes) == len(rank.masters):
            raise SourceError(
                f"{rank.file.name}: expected flat partitions of {len(shapes)} groups, as the model states have, found "
                f"{len(rank.masters)}"
            )
        counts = rank.zero.get("partition_count")
        if any(count != ranks for count in (counts if type(counts) is list else [counts])):
            raise SourceError(
                f"{rank.file.name}: expected groups over all {ranks} ranks, found {counts}: those of experts are not "
                "read; ds_to_universal.py of DeepSpeed joins them where no group is Muon's"
            )
    layouts = []
    for number, parameters in enumerate(shapes):
        masters = {rank: _flat(own.file, own.masters[number]) for rank, own in optimizers.items()}
        with about(f"group {number}"):
            layouts.append(_layout(parameters, number, optimizers, masters, ranks))
            found.add_parts(("model",), (), layouts[-1], masters)
            _add_state(found, layouts[-1], {rank: (own, numbers[number]) for rank, own in optimizers.items()})
    position = 0
    for number, group in enumerate(first.groups):
        own = layouts[position : position + len(expect(list, group.get(PARAMS)))]
        position += len(own)
        root = ("optimizer", PARAM_GROUPS, number)
        for option in group:
            values = {rank: _plain(other, other.groups[number].get(option)) for rank, other in optimizers.items()}
            if option != PARAMS:
                found.items.add((*root, expect(str, option)), _same(f"{option} of group {number}", values))
        found.items.add((*root, PARAMS), [placed.name for layout in own for placed in layout.parameters])
    stage = first.zero.get("zero_stage")
    return {"stage": stage.args[0] if isinstance(stage, Record) and type(stage.args) is tuple else 1}


def _shapes(group: object) -> list[Parameter]:
    return [Parameter(expect(str, name), sizes_of(shape), "float32") for name, shape in mapping(group).items()]


def _layout(
    parameters: Sequence[Parameter],
    number: int,
    optimizers: Mapping[int, _Rank],
    masters: Mapping[int, PlainTensor],
    ranks: int,
) -> BufferLayout:
    """Return how a group is partitioned.

    Raises:
        SourceError: the partitions have other sizes, or DeepSpeed recorded other places.
    """
    first = next(iter(optimizers.values()))
    sizes = {rank: part.chunk.box.numel for rank, part in masters.items()}
    try:
        if _MASTERS_3 in first.zero:
            layout = partitioned_parameters(parameters, ranks)
        else:
            if "zero_stage" in first.zero:  # else they are of BF16_Optimizer, which stores the padding
                cut_off = {rank: expect(int, own.listed("group_paddings", number)) for rank, own in optimizers.items()}
                sizes = {rank: size + cut_off[rank] for rank, size in sizes.items()}
            between = [
                expect(int, count) for count in expect(list, first.listed("param_alignment_paddings", number, []))
            ]
            layout = partitioned_group(parameters, ranks, _same("size of the partitions", sizes), between)
    except LayoutError as error:
        raise SourceError(f"the partitions do not hold the parameters of the model states: {error}") from error
    _check_sizes(sizes, layout)
    _check_recorded(layout, number, optimizers)
    return layout


def _check_recorded(layout: BufferLayout, number: int, optimizers: Mapping[int, _Rank]) -> None:
    """Compare a layout with the places that DeepSpeed recorded for a universal checkpoint.

    Raises:
        SourceError: they differ.
    """
    expected: dict[int, dict[object, object]] = {rank: {} for rank in optimizers}
    for placed in layout.parameters:
        for shard in layout.shards_of(placed):
            if (rank := rank_of(shard)) in expected:
                lo, hi = max(placed.start, shard.start), min(placed.stop, shard.stop)
                expected[rank][placed.name] = {"numel": hi - lo, "start": shard.offset + lo - shard.start}
    for rank, own in optimizers.items():
        recorded = own.listed("param_slice_mappings", number)
        if recorded is None or own.configured("round_robin_gradients"):  # with that it records another order
            continue
        places = {name: expect(Record, address).state for name, address in mapping(recorded).items()}
        if places != expected[rank]:
            name = next(name for name in {**expected[rank], **places} if places.get(name) != expected[rank].get(name))
            raise SourceError(
                f"{own.file.name}: expected {name!r} at {expected[rank].get(name)}, as param_shapes of the model "
                f"states say, found {places.get(name)}: the files are of different runs"
            )


def _add_state(found: _Found, layout: BufferLayout, owners: Mapping[int, tuple[_Rank, object]]) -> None:
    """Add the state of a group's parameters, given the ranks and the number of its state on each."""
    whole = touched_parameters(layout)
    states = {}
    for rank, (own, number) in owners.items():
        state = mapping(own.state.get(number, {}))
        if whole[rank] or state:
            states[rank] = (own, state)
    if not states:
        return
    slots = [expect(str, slot) for slot in next(iter(states.values()))[1]]
    names = [placed.name for placed in layout.parameters]
    for slot in slots:
        with about(slot):
            values = {rank: state.get(slot) for rank, (_, state) in states.items()}
            _same("state", {rank: is_tensor(value) for rank, value in values.items()})
            if not is_tensor(values[min(values)]):
                value = _same("value", {rank: _plain(states[rank][0], value) for rank, value in values.items()})
                for name in names:
                    found.add_number(("optimizer", STATE, name, slot), value)
                continue
            decoded = {rank: PlainTensor(*states[rank][0].file.chunk(value)) for rank, value in values.items()}
            if not _same("dims", {rank: part.chunk.box.ndim for rank, part in decoded.items()}):
                _same("value", {rank: part.chunk.crc32 for rank, part in decoded.items()})
                part = decoded[min(decoded)]
                for name in names:
                    found.tensors.append(whole_record(("optimizer", STATE, name, slot), part.dtype, part.chunk))
            elif slot == MOMENTUM and _is_whole(decoded, layout, whole, states):
                _add_whole(found, slot, whole, decoded)
            else:
                _check_sizes({rank: part.chunk.box.numel for rank, part in decoded.items()}, layout)
                found.add_parts(("optimizer", STATE), (slot,), layout, decoded)


def _is_whole(
    parts: Mapping[int, PlainTensor],
    layout: BufferLayout,
    whole: Sequence[Sequence[PlacedParameter]],
    states: Mapping[int, tuple[_Rank, object]],
) -> bool:
    """Return whether momentum lies as `touched_parameters` says, and not as the partitions do.

    Raises:
        SourceError: it has the size of neither.
    """
    own = states[min(parts)][0]
    if "zero_stage" not in own.zero or _MASTERS_3 in own.zero:
        return False
    if own.configured("offload_optimizer", "device") not in (None, "none"):
        return False
    shards = [(placed, list(layout.shards_of(placed))) for placed in layout.parameters]
    cut = {rank_of(shard) for _, own_shards in shards if len(own_shards) > 1 for shard in own_shards}
    for rank, part in parts.items():
        numel = whole[rank][-1].stop if whole[rank] else 0
        uncut = rank not in cut
        if part.chunk.box.numel != numel and not (uncut and part.chunk.box.numel == part_numel(layout)):
            raise SourceError(
                f"{states[rank][0].file.name}: expected {numel} elements, as many as the parameters of its partition "
                f"have whole, found {part.chunk.box.numel}"
            )
    return True


def _add_whole(
    found: _Found, slot: str, whole: Sequence[Sequence[PlacedParameter]], parts: Mapping[int, PlainTensor]
) -> None:
    """Add parameters whose state each rank that has a part of them holds whole."""
    dtype = _same("dtype", {rank: part.dtype for rank, part in parts.items()})
    copies: dict[str, list[tuple[int, Chunk]]] = {}
    shapes: dict[str, Index] = {}
    for rank, held in enumerate(whole):
        for placed in held:
            shapes[placed.name] = placed.parameter.shape
            own = copies.setdefault(placed.name, [])
            if rank in parts:
                own.append((rank, _chunk(Box.of(placed.parameter.shape), placed.start, parts[rank])))
    for name, places in copies.items():
        path = ("optimizer", STATE, name, slot)
        chunks = [chunk for _, chunk in places[:1]]
        if len(places) > 1 and (read := chunks[0].payload):
            chunks = [replace(chunks[0], item=read)]
            found.copies[read] = _Copies(name, tuple((rank, c.item, c.payload) for rank, c in places if c.payload))
            found.compared.extend(whole_record(path, dtype, chunk) for _, chunk in places)
        found.add(path, shapes[name], dtype, chunks)


def _add_model(found: _Found, run: Mapping[object, object], models: Mapping[int, TorchFile], ranks: int) -> None:
    """Add what the optimizer does not have: buffers, frozen parameters, and the other names of shared ones."""
    file = models[min(models)]
    known = {str(tensor.path[-1]): tensor for tensor in found.tensors if tensor.path[0] == "model"}
    for alias, name in _items(run, "shared_params"):
        if (tensor := known.get(str(name))) is not None:
            path = ("model", expect(str, alias))
            found.tensors.append(replace(tensor, key=key_of(path), path=path))
            known[str(alias)] = tensor
    in_parts = _of_rank(file)
    buffers = expect(list, run.get("buffer_names") or [])
    for name, value in _items(run, "module"):
        if name not in known and is_tensor(value) and (name in buffers or not in_parts):
            found.tensors.append(whole_record(("model", expect(str, name)), *file.chunk(value)))
    for name, shape in _items(run, "frozen_param_shapes") if in_parts else ():
        layout = partitioned_parameters([Parameter(expect(str, name), sizes_of(shape))], ranks)
        parts = {
            rank: _flat(own, dict(_items(mapping(own.content), "frozen_param_fragments")).get(name))
            for rank, own in models.items()
        }
        found.add_parts(("model",), (), layout, parts)


def _add_run(found: _Found, file: TorchFile) -> None:
    for key, value in mapping(file.content).items():
        if key not in _NOT_OF_THE_RUN and value is not None:
            try:
                found.items.add((_RUN, expect(str, key)), PlainParts(file.described).part(value))
            except SourceError:
                found.not_read.append(f"{key!r} in {file.name}")


def _items(of: Mapping[object, object], key: str) -> Iterable[tuple[object, object]]:
    value = of.get(key)
    return () if value is None else mapping(value).items()


def _flat(file: TorchFile, value: object) -> PlainTensor:
    dtype, chunk = file.chunk(value)
    if chunk.box.ndim != 1:
        raise SourceError(f"{file.name}: expected a flat tensor, found shape {chunk.box.shape}")
    return PlainTensor(dtype, chunk)


def _plain(rank: _Rank, value: object) -> object:
    return PlainParts(rank.file.described).part(value)


def _same(what: str, values: Mapping[int, T]) -> T:
    """Return what all ranks have.

    Raises:
        SourceError: two ranks have something else.
    """
    first = min(values)
    for rank, value in values.items():
        if repr(value) != repr(values[first]):
            raise SourceError(
                f"expected the same {what} on all ranks, found {values[first]!r:.80} on rank {first} and "
                f"{value!r:.80} on rank {rank}"
            )
    return values[first]


def _check_sizes(parts: Mapping[int, int], layout: BufferLayout) -> None:
    if _same("size of the partitions", parts) != part_numel(layout):
        raise SourceError(f"expected partitions of {part_numel(layout)} elements, found {parts[min(parts)]}")
