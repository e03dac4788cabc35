"""DeepSpeed's ZeRO files as a destination: each rank's flat partitions in the archives that ``torch.save`` makes.

The elements of tensors are written at their places in the archives, as everywhere.  Then each file is finished where it
lies: what several ranks hold is copied, and the archive's own bytes, which need the checksums of whole storages, are
filled in.  So the destination has to be a folder, and not in an object store.

Source: ``load_checkpoint`` of DeepSpeed 0.19.8, for what it needs.
"""

from __future__ import annotations

import math
import os
import zlib
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar

import numpy as np

from ...algebra.box import Box, Index
from ...layouts.buffers.buffer_layout import BufferLayout, PlacedParameter, rank_of
from ...layouts.buffers.parameters import Parameter
from ...layouts.buffers.zero import part_numel, partitioned_group, partitioned_parameters, touched_parameters
from ...names.errors import DestinationError, SourceError, TargetError
from ...names.keys import PARAM_GROUPS, STATE, key_of
from ...names.vocabulary import MOMENTUM, PARAMS, STEP
from ...record.record import Manifest
from ...store.formats.torch_save.archive import Archive, ordered, sizes
from ...store.formats.torch_save.inert_pickle import Global, Record
from ...store.formats.torch_save.plain_item import plain_value
from ...store.io.location import Location, Remote
from ...store.open_checkpoint import checked_blob
from ...store.reading.dtypes import itemsize
from ...store.reading.payloads import Payloads
from ..target.topology import ROWS
from .container import Arranged, Container, WriteRequest, extended_provenance
from .output_files import ChunkPlan, OutputChunks, OutputFile, bare, chunk_plans
from .outputs import OutputTensor

_VERSION = "0.19.8"
"""The version of DeepSpeed whose files these are."""

_BAND = 1 << 24

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Place:
    """Bytes of a storage from ``start`` on."""

    archive: Archive
    storage: int
    start: int = 0

    @property
    def offset(self) -> int:
        return self.archive.offsets[self.storage] + self.start

    def behind(self, size: int) -> _Place:
        return replace(self, start=self.start + size)


def _new(archive: Archive, dtype: str, shape: Index) -> tuple[Record, _Place]:
    """Return a new tensor of an archive, and where it begins."""
    return archive.tensor(dtype, shape), _Place(archive, len(archive.lengths) - 1)


@dataclass(frozen=True, slots=True)
class _Group:
    """A parameter group: its parameters in the order of the partitions, their weights and their state."""

    layout: BufferLayout
    weights: Mapping[str, OutputTensor]
    state: Mapping[str, Mapping[str, OutputTensor]]

    @property
    def names(self) -> list[str]:
        return [placed.name for placed in self.layout.parameters]

    def shapes(self) -> dict[str, Record]:
        return {name: sizes(self.weights[name].record.shape) for name in self.names}

    def slots(self) -> Iterator[tuple[str, dict[str, OutputTensor]]]:
        """Yield each slot of state, with the parameters' tensors by name."""
        for slot in self.state.get(self.names[0], ()):
            yield slot, {name: self.state[name][slot] for name in self.names}


@dataclass(eq=False)
class _Planned:
    """What goes where: elements that are written to archives, and bytes that are copied between them afterwards."""

    chunks: defaultdict[str, list[tuple[_Place, OutputTensor, ChunkPlan]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    copies: list[tuple[_Place, _Place, int]] = field(default_factory=list)
    archives: list[Archive] = field(default_factory=list)
    step: int = 0

    def write(self, output: OutputTensor, boxes: Sequence[Box], places: Sequence[_Place]) -> None:
        for plan, place in zip(chunk_plans(output, boxes, bare), places, strict=True):
            self.chunks[place.archive.name].append((place, output, plan))

    def write_whole(self, output: OutputTensor, places: Sequence[_Place]) -> None:
        """Write a tensor at the first of these places, and copy it to the others."""
        shape = output.record.shape
        self.write(output, [Box.of(shape)], places[:1])
        size = math.prod(shape) * itemsize(output.record.dtype)
        self.copies += [(places[0], place, size) for place in places[1:]]

    def write_unread(self, output: OutputTensor, archive: Archive) -> None:
        """Write a tensor that others stand for to a storage that no tensor uses."""
        self.write_whole(output, [_new(archive, output.record.dtype, output.record.shape)[1]])

    def write_parts(self, output: OutputTensor, name: str, layout: BufferLayout, parts: Sequence[_Place]) -> None:
        """Write a parameter of a layout, given where the part of each rank begins."""
        size = itemsize(output.record.dtype)
        boxes, places = [], []
        for fragment in layout.tensor_layouts()[name].fragments:
            assert isinstance(fragment.place.buffer, int), "the buffers of a group are its ranks"
            boxes.append(fragment.box)
            places.append(parts[fragment.place.buffer].behind(fragment.place.offset * size))
        self.write(output, boxes, places)

    def copy_parts(
        self, output: OutputTensor, placed: PlacedParameter, layout: BufferLayout, parts: Sequence[_Place], to: _Place
    ) -> None:
        """Copy a parameter of a layout from the ranks' parts, one behind the other."""
        size = itemsize(output.record.dtype)
        for shard in layout.shards_of(placed):
            lo, hi = max(placed.start, shard.start), min(placed.stop, shard.stop)
            source = parts[rank_of(shard)].behind((shard.offset + lo - shard.start) * size)
            self.copies.append((source, to.behind((lo - placed.start) * size), (hi - lo) * size))

    def file(self, archive: Archive) -> OutputFile:
        """Return the file of an archive that has been sealed."""
        self.archives.append(archive)
        own = sorted(self.chunks[archive.name], key=lambda chunk: chunk[0].offset)
        offsets = np.array([place.offset for place, _, _ in own], np.int64)
        chunks = OutputChunks(archive.name, [output for _, output, _ in own], [plan for _, _, plan in own], offsets)
        return OutputFile(archive.name, (), chunks, archive.length)

    def finish(self, folder: Location) -> None:
        """Copy what is to be copied, then fill in the archives' own bytes, and wait until they are on disk."""
        with ExitStack() as stack:
            files = {own.name: stack.enter_context(Path(str(folder / own.name)).open("r+b")) for own in self.archives}
            for source, target, size in self.copies:
                for start in range(0, size, _BAND):
                    files[source.archive.name].seek(source.offset + start)
                    data = files[source.archive.name].read(min(_BAND, size - start))
                    files[target.archive.name].seek(target.offset + start)
                    files[target.archive.name].write(data)
            for archive in self.archives:
                file = files[archive.name]
                sums = [_crc32(file, *where) for where in zip(archive.offsets, archive.lengths, strict=True)]
                for offset, data in archive.around(sums):
                    file.seek(offset)
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())


def _crc32(file: BinaryIO, offset: int, length: int) -> int:
    file.seek(offset)
    checksum = 0
    for start in range(0, length, _BAND):
        checksum = zlib.crc32(file.read(min(_BAND, length - start)), checksum)
    return checksum


@dataclass(eq=False)
class _Rank:
    """The optimizer of a rank: its archive, and for each group the masters, the state and the padding."""

    archive: Archive
    masters: list[object] = field(default_factory=list)
    states: list[dict[str, object]] = field(default_factory=list)
    paddings: list[int] = field(default_factory=list)

    def add(self, slot: str, dtype: str, shape: Index) -> _Place:
        """Add a slot to the state of the last group; return where its tensor begins."""
        self.states[-1][slot], place = _new(self.archive, dtype, shape)
        return place


class _Archives(Container):
    """A folder of archives that are finished where they lie."""

    def __init__(self) -> None:
        self._planned = _Planned()

    def staged(self, destination: Location) -> Location:
        if isinstance(destination, Remote):
            raise DestinationError(
                f"{destination}: format {self.name} is finished in place, which an object store does not allow: write "
                "to a folder, and copy that"
            )
        return super().staged(destination)

    def arrange(self, request: WriteRequest) -> Arranged:
        outputs, target = request.outputs, request.target
        self._planned = _Planned()
        archives = self.place(self._planned, _Content.of(request), request)
        files = tuple(self._planned.file(archive) for archive in archives)
        step = {"mesh": dict(target.mesh)} if self.of_ranks else {}
        provenance = extended_provenance(request, "resharded", step, [], ())
        return Arranged(files, dict.fromkeys(output.key for output in outputs.tensors), provenance)

    @abstractmethod
    def place(self, planned: _Planned, content: _Content, request: WriteRequest) -> list[Archive]:
        """Return the archives, sealed, after all elements have got places in them."""

    def describe(self, manifest: Manifest, folder: Location) -> None:
        """Finish the archives: copy what several of them hold, and fill in their own bytes."""
        self._planned.finish(folder)


@dataclass(frozen=True, slots=True)
class _Content:
    """What is to be written: weights by name, state by name and slot, options of groups, and values of the run."""

    weights: Mapping[str, OutputTensor]
    state: Mapping[str, Mapping[str, OutputTensor]]
    options: Mapping[int, Mapping[str, Any]]
    run: Mapping[str, Any]

    @classmethod
    def of(cls, request: WriteRequest) -> _Content:
        weights: dict[str, OutputTensor] = {}
        state: defaultdict[str, dict[str, OutputTensor]] = defaultdict(dict)
        for output in request.outputs.tensors:
            match output.record.path:
                case ("model", str(name)):
                    weights[name] = output
                case ("optimizer", "state", str(name), str(slot)):
                    state[name][slot] = output
                case path:
                    raise SourceError(
                        f"DeepSpeed has no place for the tensor {key_of(path)!r}: leave it out by `select=`"
                    )
        options: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        run: dict[str, Any] = {}
        for item in request.outputs.items:
            data = item.data if item.source is None else checked_blob(request.payloads, item.source)
            match item.path:
                case ("optimizer", "param_groups", int(number), str(option)):
                    options[number][option] = plain_value(data)
                case ("deepspeed", str(name)):
                    run[name] = plain_value(data)
                case path:
                    raise SourceError(f"DeepSpeed has no place for item {key_of(path)!r}: leave it out by `select=`")
        if not options or any(PARAMS not in group for group in options.values()):
            raise SourceError(
                "DeepSpeed's files need parameter groups that list their parameters: convert with "
                '`to_dialect="deepspeed"` from a checkpoint that has groups'
            )
        return cls(weights, state, options, run)

    def names(self, number: int) -> list[str]:
        """Return the parameters of a group, in DeepSpeed's order.

        Raises:
            SourceError: one has no weight, or other state than the rest.
        """
        names = list(map(str, self.options[number][PARAMS]))
        kinds = {tuple(sorted(self.state.get(name, ()))): name for name in names}
        if (lost := [name for name in names if name not in self.weights]) or len(kinds) > 1:
            found = f"none of {lost[0]!r}" if lost else f"other slots of {' and '.join(map(repr, kinds.values()))}"
            raise SourceError(f"group {number}: expected a weight and the same state for each parameter, found {found}")
        if any(MOMENTUM in slots for slots in kinds):  # DeepSpeed's Muon sorts them so
            names.sort(key=lambda name: self.weights[name].record.shape, reverse=True)
        return names

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups as the optimizer of the partitions has them, each with one parameter."""
        return [{**self.options[number], PARAMS: [position]} for position, number in enumerate(sorted(self.options))]

    def of_model(self, **others: object) -> dict[str, object]:
        """Return what is in every file of the model."""
        return {
            "optimizer": None,
            "lr_scheduler": None,
            "skipped_steps": 0,
            "ds_config": {},
            "buffer_names": [],
            "shared_params": {},
            **self.run,
            "mp_world_size": 1,
            "ds_version": _VERSION,
            **others,
        }


class ZeroFiles(_Archives):
    """The folder of a tag.

    Attributes:
        stage: of ZeRO.
        prefix: of the optimizer's files.
        whole: whether a rank has Muon's momentum of a parameter whole, or as it has the weight.
    """

    of_ranks: ClassVar[bool] = True
    stage: ClassVar[int]
    prefix: ClassVar[str] = ""
    whole: ClassVar[bool] = True

    def place(self, planned: _Planned, content: _Content, request: WriteRequest) -> list[Archive]:
        target = request.target
        if target.rules or target.layout != ROWS:
            raise TargetError(f"format {self.name} cuts tensors as ZeRO does: leave out `shard=` and `layout=`")
        name = f"{self.prefix}zero_pp_rank_{{}}_mp_rank_00_optim_states.pt"
        ranks = [_Rank(Archive(name.format(rank))) for rank in range(target.ranks)]
        cut = partitioned_parameters if self.stage == 3 else partitioned_group
        groups = []
        for number in sorted(content.options):
            weights = {name: content.weights[name] for name in content.names(number)}
            parameters = [Parameter(name, output.record.shape) for name, output in weights.items()]
            groups.append(_Group(cut(parameters, len(ranks)), weights, content.state))
        masters = [self._place(planned, group, ranks, request) for group in groups]
        for number, rank in enumerate(ranks):
            zero = self._zero(number, rank, groups, content.groups(), len(ranks))
            config = content.run.get("ds_config", {})
            rank.archive.seal({"optimizer_state_dict": zero, "ds_config": config, "ds_version": _VERSION})
        models = self._place_model(planned, groups, masters, content, len(ranks))
        return [*(rank.archive for rank in ranks), *models]

    def _place(self, planned: _Planned, group: _Group, ranks: Sequence[_Rank], request: WriteRequest) -> list[_Place]:
        """Place the weights and the state of a group; return where each rank's part of the weights begins."""
        layout, numel = group.layout, part_numel(group.layout)
        filled = layout.parameters[-1].stop
        for number, rank in enumerate(ranks):
            rank.paddings.append(min(max((number + 1) * numel - filled, 0), numel) if self.stage < 3 else 0)
            rank.states.append({})
        trimmed = self.stage < 3 and self.whole
        dtype = _one("dtype", {name: output.record.dtype for name, output in group.weights.items()})
        parts = []
        for rank in ranks:
            master, place = _new(rank.archive, dtype, (numel - rank.paddings[-1] * trimmed,))
            rank.masters.append(master)
            parts.append(place)
        for name, output in group.weights.items():
            planned.write_parts(output, name, layout, parts)
        for slot, outputs in group.slots():
            dtype = _one(f"dtype of {slot}", {name: output.record.dtype for name, output in outputs.items()})
            if slot == STEP:
                step = _one(slot, {name: _scalar(o, request.payloads) for name, o in outputs.items()})
                planned.step = max(planned.step, int(step))
                first, *others = outputs.values()
                planned.write_whole(first, [rank.add(slot, dtype, ()) for rank in ranks])
                for output in others:
                    planned.write_unread(output, ranks[0].archive)
            elif slot == MOMENTUM and trimmed:
                places: defaultdict[str, list[_Place]] = defaultdict(list)
                for rank, held in zip(ranks, touched_parameters(layout), strict=True):
                    whole = [rank.add(slot, dtype, (held[-1].stop,))] if held else []
                    for one in held:
                        places[one.name].append(whole[0].behind(one.start * itemsize(dtype)))
                for name, output in outputs.items():
                    planned.write_whole(output, places[name])
            else:
                cut = [rank.add(slot, dtype, (numel,)) for rank in ranks]
                for name, output in outputs.items():
                    planned.write_parts(output, name, layout, cut)
        return parts

    def _zero(
        self, number: int, rank: _Rank, groups: Sequence[_Group], listed: Sequence[object], ranks: int
    ) -> dict[str, object]:
        """Return what ZeRO's optimizer restores a rank from."""
        below = {STATE: dict(enumerate(rank.states)), PARAM_GROUPS: list(listed)}
        stage = Record(Global("deepspeed.runtime.zero.config ZeroStageEnum"), (self.stage,))
        if self.stage == 3:
            scaler = Record(
                Global("deepspeed.runtime.fp16.loss_scaler LossScaler"), (), {"cur_scale": 1.0, "dynamic": False}
            )
            return {
                "zero_stage": stage,
                "loss_scaler": scaler,
                "dynamic_loss_scale": False,
                "overflow": False,
                "partition_count": ranks,
                "optimizer_state_dict": below,
                "fp32_flat_groups": rank.masters,
            }
        return {
            **({"zero_stage": stage} if self.whole else {}),
            "base_optimizer_state": below,
            "single_partition_of_fp32_groups": rank.masters,
            "group_paddings": rank.paddings,
            **({"param_alignment_paddings": [[0] * len(group.names) for group in groups]} if self.whole else {}),
            "partition_count": [ranks] * len(groups),
            "ds_version": _VERSION,
            "param_slice_mappings": [ordered(_addresses(group.layout, number)) for group in groups],
        }

    def _place_model(
        self,
        planned: _Planned,
        groups: Sequence[_Group],
        masters: Sequence[Sequence[_Place]],
        content: _Content,
        ranks: int,
    ) -> list[Archive]:
        """Place the other weights, and copy those of the optimizer where files of the model have them whole."""
        parted = self.stage == 3
        count, name = (
            (ranks, "zero_pp_rank_{}_mp_rank_00_model_states.pt") if parted else (1, "mp_rank_00_model_states.pt")
        )
        archives = [Archive(name.format(rank)) for rank in range(count)]
        modules: list[dict[str, object]] = [{} for _ in archives]
        fragments: list[dict[str, object]] = [{} for _ in archives]
        frozen: dict[str, object] = {}
        trained = {one.name: (one, group.layout, parts) for group, parts in zip(groups, masters, strict=True)
                   for one in group.layout.parameters}  # fmt: skip
        buffers: Sequence[str] | None = content.run.get("buffer_names")
        prints = {
            output.record.fingerprint: name
            for name, output in content.weights.items()
            if name in trained and output.record.fingerprint
        }
        aliases = content.run.get("shared_params") or {
            name: prints[output.record.fingerprint]
            for name, output in content.weights.items()
            if name not in trained and output.record.fingerprint in prints
        }
        for key, output in content.weights.items():
            shape, dtype = output.record.shape, output.record.dtype
            empty = parted and (key in trained or key in aliases or (buffers is not None and key not in buffers))
            places = []
            for archive, module in zip(archives, modules, strict=True):
                module[key], place = _new(archive, dtype, (0,) if empty else shape)
                places.append(place)
            if not empty and key in trained:
                planned.copy_parts(output, *trained[key], places[0])
            elif not empty:
                planned.write_whole(output, places)
            elif key in aliases:
                planned.write_unread(output, archives[0])
            elif key not in trained:
                layout, parts = partitioned_parameters([Parameter(key, shape)], ranks), []
                for archive, own in zip(archives, fragments, strict=True):
                    own[key], place = _new(archive, dtype, (part_numel(layout),))
                    parts.append(place)
                planned.write_parts(output, key, layout, parts)
                frozen[key] = sizes(shape)
        if buffers is None:
            buffers = [key for key in content.weights if key not in trained and key not in aliases]
        for archive, module, own in zip(archives, modules, fragments, strict=True):
            archive.seal(
                content.of_model(
                    module=ordered(module),
                    param_shapes=[ordered(group.shapes()) for group in groups],
                    frozen_param_shapes=ordered(frozen) if parted else None,
                    frozen_param_fragments=ordered(own) if parted else None,
                    buffer_names=[key for key in module if key not in (*trained, *aliases)]
                    if buffers is None
                    else buffers,
                    shared_params=aliases,
                    global_steps=content.run.get("global_steps", planned.step),
                    dp_world_size=ranks,
                )
            )
        return archives


def _addresses(layout: BufferLayout, rank: int) -> dict[str, Record]:
    """Return where a rank's parts of parameters lie, as DeepSpeed's universal checkpoints use it."""
    kind, places = Global("deepspeed.utils.tensor_fragment fragment_address"), {}
    for placed in layout.parameters:
        for shard in layout.shards_of(placed):
            if rank_of(shard) == rank:
                lo, hi = max(placed.start, shard.start), min(placed.stop, shard.stop)
                places[placed.name] = Record(kind, (), {"numel": hi - lo, "start": shard.offset + lo - shard.start})
    return places


def _scalar(output: OutputTensor, payloads: Payloads) -> float:
    words = output.elements(payloads, [layout.fragments for layout in output.layouts], Box.of(()))
    return float(
        words.reshape(-1).view(f"<{ {'float32': 'f4', 'int64': 'i8', 'float64': 'f8'}[output.record.dtype] }")[0]
    )


def _one(what: str, values: Mapping[str, T]) -> T:
    """Return what all parameters of a group have.

    Raises:
        SourceError: two have something else.
    """
    (name, first), *others = values.items()
    for other, value in others:
        if value != first:
            raise SourceError(
                f"ZeRO has one {what} for a group, found {first} for {name!r} and {value} for {other!r}: put them into "
                "groups of their own"
            )
    return first


class Zero1(ZeroFiles):
    """ZeRO 1 in float32 or float16."""

    name, stage = "zero1", 1


class Zero2(ZeroFiles):
    """ZeRO 2 in float32 or float16."""

    name, stage = "zero2", 2


class Zero3(ZeroFiles):
    """ZeRO 3 in float32 or float16."""

    name, stage = "zero3", 3


class Zero1Bf16(Zero1):
    """ZeRO 1 in bfloat16."""

    name, prefix = "zero1-bf16", "bf16_"


class Zero2Bf16(Zero2):
    """ZeRO 2 in bfloat16."""

    name, prefix = "zero2-bf16", "bf16_"


class Zero3Bf16(Zero3):
    """ZeRO 3 in bfloat16."""

    name, prefix = "zero3-bf16", "bf16_"


class Bf16Optimizer(Zero1Bf16):
    """BF16_Optimizer: ZeRO 1 in bfloat16 whose gradients are summed in float32."""

    name, whole = "bf16-optimizer", False


class Universal(_Archives):
    """A universal folder, with Muon's momentum."""

    name, of_ranks = "universal", False

    def place(self, planned: _Planned, content: _Content, request: WriteRequest) -> list[Archive]:
        archives = []
        model = Archive("mp_rank_00_model_states.pt")
        module: dict[str, object] = {}
        shapes: list[object] = []
        written: set[str] = set()
        for number in sorted(content.options):
            names = content.names(number)
            shapes.append(ordered({name: sizes(content.weights[name].record.shape) for name in names}))
            written.update(names)
            for name in names:
                for slot, output in {"fp32": content.weights[name], **content.state.get(name, {})}.items():
                    archive = Archive(f"zero/{name}/{slot}.pt")
                    tensor, place = _new(archive, output.record.dtype, output.record.shape)
                    planned.write_whole(output, [place])
                    archive.seal(tensor if slot == STEP else {"param": tensor, "cat_dim": 0})
                    if slot == STEP:
                        planned.step = max(planned.step, int(_scalar(output, request.payloads)))
                    archives.append(archive)
        for name, output in content.weights.items():
            if name not in written:
                module[name], place = _new(model, output.record.dtype, output.record.shape)
                planned.write_whole(output, [place])
        groups = Archive("zero/optimizer_state.pt")
        groups.seal({PARAM_GROUPS: content.groups(), "ds_version": _VERSION})
        steps = content.run.get("global_steps", planned.step)
        model.seal(content.of_model(module=ordered(module), param_shapes=shapes, global_steps=steps, dp_world_size=1))
        return [*archives, groups, model]


def universal(shard_bytes: int | None = None) -> Universal:
    """Return the container of a universal folder.

    Raises:
        TargetError: a size of files is given.
    """
    if shard_bytes is not None:
        raise TargetError("a universal folder has a file for each tensor: leave out `shard_size=`")
    return Universal()
