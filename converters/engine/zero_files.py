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
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from ...algebra.box import Box, Index
from ...layouts.buffers.algorithms import part_numel, partitioned_group, partitioned_parameters, touched_parameters
from ...layouts.buffers.buffer_layout import BufferLayout, PlacedParameter, rank_of
from ...layouts.buffers.parameters import Parameter
from ...names.errors import DestinationError, SourceError, TargetError
from ...names.keys import PARAM_GROUPS, STATE, key_of
from ...names.vocabulary import MOMENTUM, PARAMS, STEP
from ...record.record import Manifest, entry_keys
from ...store.formats.torch_save.inert_pickle import Global, Record
from ...store.formats.torch_save.plain_item import plain_value
from ...store.formats.torch_save.torch_file import Archive, ordered_dict, torch_size
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

_BAND_BYTES = 1 << 24

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
    """A parameter group: its parameters in the order of the partitions, their weights and their state.

    ``masters`` are the places where each rank's part of the weights begins.
    """

    layout: BufferLayout
    weights: Mapping[str, OutputTensor]
    state: Mapping[str, Mapping[str, OutputTensor]]
    masters: list[_Place] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.layout.parameters]

    def shapes(self) -> Record:
        return ordered_dict({name: torch_size(self.weights[name].record.shape) for name in self.names})

    def slots(self) -> Iterator[tuple[str, str, dict[str, OutputTensor]]]:
        """Yield each slot of state, its dtype, and the parameters' tensors by name."""
        for slot in self.state.get(self.names[0], ()):
            outputs = {name: self.state[name][slot] for name in self.names}
            yield slot, _dtype_of(f"dtype of {slot}", outputs), outputs


@dataclass(eq=False)
class _FolderPlan:
    """Elements that are written to archives, and bytes that are copied between these afterwards."""

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
        """Write a tensor that another one stands for to a storage that no tensor uses."""
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

    def write_step(self, output: OutputTensor, places: Sequence[_Place], payloads: Payloads) -> None:
        """Write a step counter, and note the largest of all."""
        self.write_whole(output, places)
        self.step = max(self.step, int(_scalar(output, payloads)))

    def copy_parts(self, output: OutputTensor, entry: PlacedParameter, group: _Group, target: _Place) -> None:
        """Copy a parameter of a group from the ranks' parts of the weights, one behind the other."""
        size = itemsize(output.record.dtype)
        for rank, start, stop, offset in _parts(group.layout, entry):
            source = group.masters[rank].behind(offset * size)
            self.copies.append((source, target.behind((start - entry.start) * size), (stop - start) * size))

    def file(self, archive: Archive) -> OutputFile:
        """Return the file of an archive that has been sealed."""
        self.archives.append(archive)
        columns = sorted(self.chunks[archive.name], key=lambda chunk: chunk[0].offset)
        offsets = np.array([place.offset for place, _, _ in columns], np.int64)
        outputs, plans = [output for _, output, _ in columns], [plan for _, _, plan in columns]
        return OutputFile(archive.name, (), OutputChunks(archive.name, outputs, plans, offsets), archive.length)

    def finish(self, folder: Location) -> None:
        """Copy what is to be copied, then fill in the archives' own bytes, and wait until they are on disk."""
        with ExitStack() as stack:
            files: dict[str, BinaryIO] = {}
            for archive in self.archives:
                files[archive.name] = stack.enter_context(Path(str(folder / archive.name)).open("r+b"))
            for source, target, size in self.copies:
                for start in range(0, size, _BAND_BYTES):
                    files[source.archive.name].seek(source.offset + start)
                    data = files[source.archive.name].read(min(_BAND_BYTES, size - start))
                    files[target.archive.name].seek(target.offset + start)
                    files[target.archive.name].write(data)
            # The checksums are of storages as they are after the copies.
            for archive in self.archives:
                file = files[archive.name]
                sums = [_crc32(file, *extent) for extent in zip(archive.offsets, archive.lengths, strict=True)]
                for offset, data in archive.around(sums):
                    file.seek(offset)
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())


def _crc32(file: BinaryIO, offset: int, length: int) -> int:
    file.seek(offset)
    checksum = 0
    for start in range(0, length, _BAND_BYTES):
        checksum = zlib.crc32(file.read(min(_BAND_BYTES, length - start)), checksum)
    return checksum


def _parts(layout: BufferLayout, entry: PlacedParameter) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each rank with elements of a parameter: the rank, their range in the group, and where they begin."""
    for shard in layout.shards_of(entry):
        start, stop = max(entry.start, shard.start), min(entry.stop, shard.stop)
        yield rank_of(shard), start, stop, shard.offset + start - shard.start


class _Archives(Container):
    """A folder of archives that are finished where they lie."""

    def __init__(self) -> None:
        self._plan = _FolderPlan()

    def staged(self, destination: Location) -> Location:
        if isinstance(destination, Remote):
            raise DestinationError(
                f"{destination}: format {self.name} is finished in place, which an object store does not allow: write "
                "to a folder, and copy that"
            )
        return super().staged(destination)

    def arrange(self, request: WriteRequest) -> Arranged:
        self._plan = _FolderPlan()
        archives = self.place(self._plan, _Content.of(request), request)
        step = {"mesh": dict(request.target.mesh)} if self.of_ranks else {}
        provenance = extended_provenance(request, "resharded", step, [], ())
        layouts = dict.fromkeys(entry_keys(request.outputs.tensors))
        return Arranged(tuple(map(self._plan.file, archives)), layouts, provenance)

    @abstractmethod
    def place(self, plan: _FolderPlan, content: _Content, request: WriteRequest) -> list[Archive]:
        """Return the archives, sealed, after all elements have got places in them."""

    def describe(self, manifest: Manifest, folder: Location) -> None:
        """Finish the archives: copy what several of them hold, and fill in their own bytes."""
        self._plan.finish(folder)


@dataclass(frozen=True, slots=True)
class _Content:
    """What is to be written: weights by name, state by name and slot, options of groups, and values of the run."""

    weights: Mapping[str, OutputTensor]
    state: Mapping[str, Mapping[str, OutputTensor]]
    options: Mapping[int, Mapping[str, Any]]
    run: Mapping[str, Any]

    @classmethod
    def of(cls, request: WriteRequest) -> _Content:
        """Sort the outputs of a request.

        Raises:
            SourceError: DeepSpeed's files have no place for one of them, or need groups that there are not.
        """
        # Tensors by name and slot.
        weights: dict[str, OutputTensor] = {}
        state: defaultdict[str, dict[str, OutputTensor]] = defaultdict(dict)
        for output in request.outputs.tensors:
            match output.record.path:
                case ("model", str(name)):
                    weights[name] = output
                case ("optimizer", "state", str(name), str(slot)):
                    state[name][slot] = output
                case path:
                    raise _no_place_for("the tensor", path)
        # Options of groups, and values of the run, which are written into the pickles.
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
                    raise _no_place_for("item", path)
        if not options or any(PARAMS not in group for group in options.values()):
            raise SourceError(
                "DeepSpeed's files need parameter groups that list their parameters: convert with "
                '`to_dialect="deepspeed"` from a checkpoint that has groups'
            )
        return cls(weights, state, options, run)

    def names(self, number: int) -> list[str]:
        """Return the parameters of a group, in DeepSpeed's order.

        Raises:
            SourceError: one has no weight, or another set of slots than its siblings.
        """
        names = list(map(str, self.options[number][PARAMS]))
        slot_sets = {tuple(sorted(self.state.get(name, ()))): name for name in names}
        weightless = [name for name in names if name not in self.weights]
        if weightless or len(slot_sets) > 1:
            several = " and ".join(map(repr, slot_sets.values()))
            fault = f"none of {weightless[0]!r}" if weightless else f"other slots of {several}"
            raise SourceError(f"group {number}: expected a weight and the same state for each parameter, found {fault}")
        if any(MOMENTUM in slots for slots in slot_sets):  # DeepSpeed's Muon sorts them so
            names.sort(key=lambda name: self.weights[name].record.shape, reverse=True)
        return names

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups as the optimizer of the partitions has them, each with one parameter."""
        groups = []
        for position, number in enumerate(sorted(self.options)):
            groups.append({**self.options[number], PARAMS: [position]})
        return groups

    def of_model(self, **entries: object) -> dict[str, object]:
        """Return the content of a file of the model: these entries, and those of every such file."""
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
            **entries,
        }


def _no_place_for(noun: str, path: Sequence[str | int]) -> SourceError:
    return SourceError(f"DeepSpeed has no place for {noun} {key_of(tuple(path))!r}: leave it out by `select=`")


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


@dataclass(eq=False)
class _ModelFile:
    """A file of the model: its archive, the tensors of the module, and under ZeRO 3 the parts of frozen parameters."""

    archive: Archive
    module: dict[str, object] = field(default_factory=dict)
    fragments: dict[str, object] = field(default_factory=dict)


class ZeroFiles(_Archives):
    """The folder of a tag.

    Args:
        name: the name of the format.
        stage: of ZeRO.
        prefix: of the optimizer's files.
        momentum_is_whole: whether a rank has Muon's momentum of a parameter whole, or as it has the weight.
    """

    of_ranks = True

    def __init__(self, name: str, stage: int, prefix: str = "", momentum_is_whole: bool = True) -> None:
        super().__init__()
        self.name, self.stage, self.prefix, self.momentum_is_whole = name, stage, prefix, momentum_is_whole

    def place(self, plan: _FolderPlan, content: _Content, request: WriteRequest) -> list[Archive]:
        target = request.target
        if target.rules or target.layout != ROWS:
            raise TargetError(f"format {self.name} cuts tensors as ZeRO does: leave out `shard=` and `layout=`")
        name = f"{self.prefix}zero_pp_rank_{{}}_mp_rank_00_optim_states.pt"
        ranks = [_Rank(Archive(name.format(rank))) for rank in range(target.ranks)]
        lay_out = partitioned_parameters if self.stage == 3 else partitioned_group
        groups = []
        for number in sorted(content.options):
            weights = {name: content.weights[name] for name in content.names(number)}
            parameters = [Parameter(name, output.record.shape) for name, output in weights.items()]
            groups.append(_Group(lay_out(parameters, len(ranks)), weights, content.state))
        # Files of the model copy from the optimizer's, so these come first.
        for group in groups:
            self._place_weights(plan, group, ranks)
            self._place_state(plan, group, ranks, request.payloads)
        for number, rank in enumerate(ranks):
            zero = self._zero(number, rank, groups, content.groups(), len(ranks))
            config = content.run.get("ds_config", {})
            rank.archive.seal({"optimizer_state_dict": zero, "ds_config": config, "ds_version": _VERSION})
        models = self._place_model(plan, groups, content, len(ranks))
        return [*(rank.archive for rank in ranks), *models]

    def _place_weights(self, plan: _FolderPlan, group: _Group, ranks: Sequence[_Rank]) -> None:
        """Place the parts of a group's weights, and note how much padding each has."""
        # The optimizer's files have the masters of a partition without the padding where its momentum is whole.
        layout, numel = group.layout, part_numel(group.layout)
        filled = layout.parameters[-1].stop
        dtype = _dtype_of("dtype", group.weights)
        for number, rank in enumerate(ranks):
            rank.paddings.append(min(max((number + 1) * numel - filled, 0), numel) if self.stage < 3 else 0)
            rank.states.append({})
            is_trimmed = self.stage < 3 and self.momentum_is_whole
            master, place = _new(rank.archive, dtype, (numel - rank.paddings[-1] * is_trimmed,))
            rank.masters.append(master)
            group.masters.append(place)
        for name, output in group.weights.items():
            plan.write_parts(output, name, layout, group.masters)

    def _place_state(self, plan: _FolderPlan, group: _Group, ranks: Sequence[_Rank], payloads: Payloads) -> None:
        """Place a group's state: a step for all parameters, momentum perhaps whole, and other slots as the weights."""
        layout = group.layout
        for slot, dtype, outputs in group.slots():
            # All parameters of a group have one step, whose other counters nobody reads.
            if slot == STEP:
                _common(slot, {name: _scalar(output, payloads) for name, output in outputs.items()})
                first, *copies = outputs.values()
                plan.write_step(first, [rank.add(slot, dtype, ()) for rank in ranks], payloads)
                for output in copies:
                    plan.write_unread(output, ranks[0].archive)
            # A rank has the whole momentum of all parameters of which it has a part, one behind the other.
            elif slot == MOMENTUM and self.stage < 3 and self.momentum_is_whole:
                places: defaultdict[str, list[_Place]] = defaultdict(list)
                for rank, parameters in zip(ranks, touched_parameters(layout), strict=True):
                    if not parameters:
                        continue
                    buffer = rank.add(slot, dtype, (parameters[-1].stop,))
                    for entry in parameters:
                        places[entry.name].append(buffer.behind(entry.start * itemsize(dtype)))
                for name, output in outputs.items():
                    plan.write_whole(output, places[name])
            else:
                parts = [rank.add(slot, dtype, (part_numel(layout),)) for rank in ranks]
                for name, output in outputs.items():
                    plan.write_parts(output, name, layout, parts)

    def _zero(
        self, number: int, rank: _Rank, groups: Sequence[_Group], options: Sequence[object], ranks: int
    ) -> dict[str, object]:
        """Return what ZeRO's optimizer restores a rank from."""
        # The state is that of an optimizer with a parameter for each group.
        below = {STATE: dict(enumerate(rank.states)), PARAM_GROUPS: list(options)}
        stage = Record(Global("deepspeed.runtime.zero.config ZeroStageEnum"), (self.stage,))
        if self.stage == 3:
            scaler = Global("deepspeed.runtime.fp16.loss_scaler LossScaler")
            return {
                "zero_stage": stage,
                "loss_scaler": Record(scaler, (), {"cur_scale": 1.0, "dynamic": False}),
                "dynamic_loss_scale": False,
                "overflow": False,
                "partition_count": ranks,
                "optimizer_state_dict": below,
                "fp32_flat_groups": rank.masters,
            }
        alignment = [[0] * len(group.names) for group in groups]
        return {
            **({"zero_stage": stage} if self.momentum_is_whole else {}),
            "base_optimizer_state": below,
            "single_partition_of_fp32_groups": rank.masters,
            "group_paddings": rank.paddings,
            **({"param_alignment_paddings": alignment} if self.momentum_is_whole else {}),
            "partition_count": [ranks] * len(groups),
            "ds_version": _VERSION,
            "param_slice_mappings": [ordered_dict(_addresses(group.layout, number)) for group in groups],
        }

    def _place_model(self, plan: _FolderPlan, groups: Sequence[_Group], content: _Content, ranks: int) -> list[Archive]:
        """Place the other weights, and copy those of the optimizer where files of the model have them whole."""
        is_zero3 = self.stage == 3
        files = [_ModelFile(Archive("mp_rank_00_model_states.pt"))]
        if is_zero3:
            names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)]
            files = [_ModelFile(Archive(name)) for name in names]
        # Weights that the optimizer has, those that are tied to one of them, and those that no gradient ever meets.
        trained: dict[str, tuple[PlacedParameter, _Group]] = {}
        for group in groups:
            trained |= {entry.name: (entry, group) for entry in group.layout.parameters}
        aliases = content.run.get("shared_params") or _aliases(content.weights, trained)
        buffers: Sequence[str] | None = content.run.get("buffer_names")
        frozen: dict[str, object] = {}
        # A weight is copied from the optimizer's files, or written whole, unread, or in parts of its own.
        for key, output in content.weights.items():
            shape, dtype = output.record.shape, output.record.dtype
            # Under ZeRO 3 a module has empty tensors for parameters, whose parts are elsewhere, and its buffers whole.
            is_empty = is_zero3 and (key in trained or key in aliases or (buffers is not None and key not in buffers))
            places = []
            for file in files:
                file.module[key], place = _new(file.archive, dtype, (0,) if is_empty else shape)
                places.append(place)
            if not is_empty and key in trained:
                plan.copy_parts(output, *trained[key], places[0])
            elif not is_empty:
                plan.write_whole(output, places)
            elif key in aliases:
                plan.write_unread(output, files[0].archive)
            elif key not in trained:
                layout, parts = partitioned_parameters([Parameter(key, shape)], ranks), []
                for file in files:
                    file.fragments[key], place = _new(file.archive, dtype, (part_numel(layout),))
                    parts.append(place)
                plan.write_parts(output, key, layout, parts)
                frozen[key] = torch_size(shape)
        # Every file repeats what a load needs of the run.
        if buffers is None:
            buffers = [key for key in content.weights if key not in trained and key not in aliases]
        for file in files:
            entries = content.of_model(
                module=ordered_dict(file.module),
                param_shapes=[group.shapes() for group in groups],
                frozen_param_shapes=ordered_dict(frozen) if is_zero3 else None,
                frozen_param_fragments=ordered_dict(file.fragments) if is_zero3 else None,
                buffer_names=buffers,
                shared_params=aliases,
                global_steps=content.run.get("global_steps", plan.step),
                dp_world_size=ranks,
            )
            file.archive.seal(entries)
        return [file.archive for file in files]


def _aliases(weights: Mapping[str, OutputTensor], trained: Mapping[str, object]) -> dict[str, str]:
    """Return the weights that are tied to a trained one, which has the same fingerprint, by name."""
    names: dict[str | None, str] = {}
    for name, output in weights.items():
        if name in trained:
            names[output.record.fingerprint] = name
    names.pop(None, None)
    aliases = {}
    for name, output in weights.items():
        if name not in trained and output.record.fingerprint in names:
            aliases[name] = names[output.record.fingerprint]
    return aliases


def _addresses(layout: BufferLayout, rank: int) -> dict[str, Record]:
    """Return where a rank's parts of parameters lie, as DeepSpeed's universal checkpoints use it."""
    kind, places = Global("deepspeed.utils.tensor_fragment fragment_address"), {}
    for entry in layout.parameters:
        for part_rank, start, stop, offset in _parts(layout, entry):
            if part_rank == rank:
                places[entry.name] = Record(kind, (), {"numel": stop - start, "start": offset})
    return places


_SCALARS = {"float32": "<f4", "int64": "<i8", "float64": "<f8"}
"""numpy's names of the dtypes of step counters."""


def _scalar(output: OutputTensor, payloads: Payloads) -> float:
    words = output.elements(payloads, [layout.fragments for layout in output.layouts], Box.of(()))
    return float(words.reshape(-1).view(_SCALARS[output.record.dtype])[0])


def _dtype_of(noun: str, outputs: Mapping[str, OutputTensor]) -> str:
    return _common(noun, {name: output.record.dtype for name, output in outputs.items()})


def _common(noun: str, values: Mapping[str, T]) -> T:
    """Return the value that all parameters of a group have.

    Raises:
        SourceError: two have different ones.
    """
    (name, value), *_ = values.items()
    for other_name, other in values.items():
        if other != value:
            raise SourceError(
                f"ZeRO has one {noun} for a group, found {value} for {name!r} and {other} for {other_name!r}: put them "
                "into groups of their own"
            )
    return value


zero1, zero2, zero3 = (partial(ZeroFiles, f"zero{stage}", stage) for stage in (1, 2, 3))
"""ZeRO in float32 or float16."""

zero1_bf16, zero2_bf16, zero3_bf16 = (partial(ZeroFiles, f"zero{stage}-bf16", stage, "bf16_") for stage in (1, 2, 3))
"""ZeRO in bfloat16."""

bf16_optimizer = partial(ZeroFiles, "bf16-optimizer", 1, "bf16_", momentum_is_whole=False)
"""BF16_Optimizer: ZeRO 1 in bfloat16 whose gradients are summed in float32."""


class Universal(_Archives):
    """A universal folder, with Muon's momentum."""

    name, of_ranks = "universal", False

    def place(self, plan: _FolderPlan, content: _Content, request: WriteRequest) -> list[Archive]:
        # An archive for each weight and each slot of a parameter of a group.
        archives: list[Archive] = []
        shapes: list[Record] = []
        grouped: dict[str, Record] = {}
        for number in sorted(content.options):
            names = content.names(number)
            shapes_by_name = {name: torch_size(content.weights[name].record.shape) for name in names}
            shapes.append(ordered_dict(shapes_by_name))
            grouped |= shapes_by_name
            for name in names:
                for slot, output in {"fp32": content.weights[name], **content.state.get(name, {})}.items():
                    archive = Archive(f"zero/{name}/{slot}.pt")
                    tensor, place = _new(archive, output.record.dtype, output.record.shape)
                    if slot == STEP:
                        plan.write_step(output, [place], request.payloads)
                    else:
                        plan.write_whole(output, [place])
                    archive.seal(tensor if slot == STEP else {"param": tensor, "cat_dim": 0})
                    archives.append(archive)
        # Other weights, such as buffers, are in the file of the model.
        model, module = Archive("mp_rank_00_model_states.pt"), dict[str, object]()
        for name, output in content.weights.items():
            if name not in grouped:
                module[name], place = _new(model, output.record.dtype, output.record.shape)
                plan.write_whole(output, [place])
        groups = Archive("zero/optimizer_state.pt")
        groups.seal({PARAM_GROUPS: content.groups(), "ds_version": _VERSION})
        steps = content.run.get("global_steps", plan.step)
        model.seal(
            content.of_model(module=ordered_dict(module), param_shapes=shapes, global_steps=steps, dp_world_size=1)
        )
        return [*archives, groups, model]


def universal(shard_bytes: int | None = None) -> Universal:
    """Return the container of a universal folder.

    Raises:
        TargetError: a size of files is given.
    """
    if shard_bytes is not None:
        raise TargetError("a universal folder has a file for each tensor: leave out `shard_size=`")
    return Universal()
