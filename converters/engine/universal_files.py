"""DeepSpeed's universal folder as a destination: an archive of ``torch.save`` for each weight and each slot of state.

Source: ``load_checkpoint`` of DeepSpeed 0.19.8, for what it needs.
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from ...algebra.box import Box, row_major
from ...names.errors import SourceError, TargetError
from ...names.keys import PARAM_GROUPS, key_of
from ...names.vocabulary import MOMENTUM, PARAMS, STEP
from ...record.record import Manifest, entry_keys
from ...store.formats.torch_save.inert_pickle import PERSISTENT, Global, Pickler, Record
from ...store.formats.torch_save.plain_item import plain_value
from ...store.formats.torch_save.stored_zip import ZipEntry, descriptor, local_header, store_end, store_front
from ...store.io.checksums import Frame
from ...store.io.location import Location
from ...store.open_checkpoint import checked_blob
from ...store.reading.dtypes import DTYPES, itemsize
from ...store.reading.payloads import Payloads
from .container import Arranged, Container, WriteRequest
from .output_files import ChunkPlan, ChunkSums, OutputChunks, OutputFile, bare, chunk_plans
from .outputs import OutputTensor

_TORCH_SIZE = Global("torch Size")
_VERSION = "0.19.8"
"""The version of DeepSpeed whose files these are."""


class UniversalFiles(Container):
    """A universal folder, with Muon's momentum."""

    name, of_ranks = "universal", False

    def __init__(self, shard_bytes: int | None = None) -> None:
        if shard_bytes is not None:
            raise TargetError("a universal folder has a file for each tensor: leave out `shard_size=`")

    def arrange(self, request: WriteRequest) -> Arranged:
        sorted_request = _sort(request)
        weights, state, run = sorted_request.weights, sorted_request.state, sorted_request.run
        # A file for each weight and each slot of a parameter of a group.
        files: list[OutputFile] = []
        shapes: list[Record] = []
        grouped: set[str] = set()
        last_step = 0
        for number, group in enumerate(sorted_request.groups):
            names = _parameter_names(group, number, weights, state)
            grouped |= {*names}
            shapes.append(_ordered_dict({name: Record(_TORCH_SIZE, (weights[name].record.shape,)) for name in names}))
            for name in names:
                for slot, output in {"fp32": weights[name], **state.get(name, {})}.items():
                    tensor = _pickled_tensor(output, 0)
                    if slot == STEP:
                        last_step = max(last_step, int(_scalar_value(output, request.payloads)))
                    else:
                        tensor = {"param": tensor, "cat_dim": 0}
                    files.append(_archive_file(f"zero/{name}/{slot}.pt", tensor, [output]))
        # The groups as the optimizer of the partitions has them, each with one parameter.
        flat_groups = [{**group, PARAMS: [position]} for position, group in enumerate(sorted_request.groups)]
        files.append(_archive_file("zero/optimizer_state.pt", {PARAM_GROUPS: flat_groups, "ds_version": _VERSION}, ()))
        # Other weights, such as buffers, are in the file of the model.
        others = {name: output for name, output in weights.items() if name not in grouped}
        module = {name: _pickled_tensor(output, number) for number, (name, output) in enumerate(others.items())}
        model = {
            "optimizer": None,
            "lr_scheduler": None,
            "skipped_steps": 0,
            "ds_config": {},
            "buffer_names": [],
            "shared_params": {},
            **run,
            "mp_world_size": 1,
            "ds_version": _VERSION,
            "module": _ordered_dict(module),
            "param_shapes": shapes,
            "global_steps": run.get("global_steps", last_step),
            "dp_world_size": 1,
        }
        files.append(_archive_file("mp_rank_00_model_states.pt", model, [*others.values()]))
        layouts = dict.fromkeys(entry_keys(request.outputs.tensors))
        return Arranged(tuple(files), layouts, {})

    def describe(self, manifest: Manifest, folder: Location) -> None:
        """Nothing: the files describe themselves."""


Weights = Mapping[str, OutputTensor]
State = Mapping[str, Mapping[str, OutputTensor]]
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _SortedRequest:
    """The contents of a request: weights by name, state by name and slot, options of each group, values of the run."""

    weights: Weights
    state: State
    groups: Sequence[Options]
    run: Options


def _sort(request: WriteRequest) -> _SortedRequest:
    """Sort the tensors and items of a request by what DeepSpeed makes of them.

    Raises:
        SourceError: DeepSpeed's files have no place for something, or need groups that there are not.
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
    # Options and values, which are written into the pickles.
    groups: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    run: dict[str, Any] = {}
    for item in request.outputs.items:
        data = item.data if item.source is None else checked_blob(request.payloads, item.source)
        match item.path:
            case ("optimizer", "param_groups", int(number), str(option)):
                groups[number][option] = plain_value(data)
            case ("deepspeed", str(name)):
                run[name] = plain_value(data)
            case path:
                raise _no_place_for("item", path)
    if not groups or any(PARAMS not in group for group in groups.values()):
        raise SourceError(
            "DeepSpeed's files need parameter groups that list their parameters: convert with "
            '`to_dialect="deepspeed"` from a checkpoint that has groups'
        )
    return _SortedRequest(weights, state, groups=[groups[number] for number in sorted(groups)], run=run)


def _parameter_names(group: Options, number: int, weights: Weights, state: State) -> list[str]:
    """Return the names of a group's parameters, in DeepSpeed's order.

    Raises:
        SourceError: one has no weight, or another set of slots than its siblings.
    """
    names = list(map(str, group[PARAMS]))
    slot_sets = {tuple(sorted(state.get(name, ()))): name for name in names}
    weightless = [name for name in names if name not in weights]
    if weightless or len(slot_sets) > 1:
        several = " and ".join(map(repr, slot_sets.values()))
        fault = f"none of {weightless[0]!r}" if weightless else f"other slots of {several}"
        raise SourceError(f"group {number}: expected a weight and the same state for each parameter, found {fault}")
    if any(MOMENTUM in slots for slots in slot_sets):  # DeepSpeed's Muon sorts them so
        names.sort(key=lambda name: weights[name].record.shape, reverse=True)
    return names


def _no_place_for(noun: str, path: Sequence[str | int]) -> SourceError:
    return SourceError(f"DeepSpeed has no place for {noun} {key_of(tuple(path))!r}: leave it out by `select=`")


_SCALARS = {"float32": "<f4", "int64": "<i8", "float64": "<f8"}
"""numpy's names of the dtypes of step counters."""


def _scalar_value(output: OutputTensor, payloads: Payloads) -> float:
    words = output.elements(payloads, output.layout.fragments, Box.of(()))
    return float(words.reshape(-1).view(_SCALARS[output.record.dtype])[0])


def _ordered_dict(items: Mapping[str, object]) -> Record:
    return Record(Global("collections OrderedDict"), (), items=cast(dict[object, object], dict(items)))


def _pickled_tensor(output: OutputTensor, storage: int) -> object:
    """Return a tensor as torch pickles a contiguous one, with the number of its storage."""
    dtype, shape = output.record.dtype, output.record.shape
    kind = Global(f"torch {DTYPES[dtype].storage}")
    stored = Record(Global(PERSISTENT), ("storage", kind, str(storage), "cpu", math.prod(shape)))
    return Record(
        Global("torch._utils _rebuild_tensor_v2"), (stored, 0, shape, row_major(shape), False, _ordered_dict({}))
    )


def _archive_file(name: str, content: object, outputs: Sequence[OutputTensor]) -> OutputFile:
    """Return the file of this content, whose storages are these tensors."""
    # The pickle and its companions, then the storages, each framed as in a zip archive.
    pickler = Pickler()
    pickler.put(content)
    front, entries = store_front(bytes(pickler.out) + pickle.STOP)
    head, end, plans, storages = front, 0, list[ChunkPlan](), list[ZipEntry]()
    for number, output in enumerate(outputs):
        shape = output.record.shape
        entry = ZipEntry(
            f"data/{number}", end + len(head), size=math.prod(shape) * itemsize(output.record.dtype), crc32=0
        )
        head += local_header(entry)
        frame = Frame(entry.size, head, tail=partial(_descriptor, entry), tail_length=len(descriptor(entry)))
        [plan] = chunk_plans(output, [Box.of(shape)], bare)
        plans.append(replace(plan, frame=frame))
        storages.append(entry)
        end, head = end + frame.length, b""

    end += len(head)  # if there are no storages

    # The directory repeats the checksums, so the end of the archive is written last.
    def footer(sums: ChunkSums) -> bytes:
        stored = zip(storages, sums["checksum"].tolist(), strict=True)
        return head + store_end(end, [*entries, *(replace(entry, crc32=crc32) for entry, crc32 in stored)])

    chunks = OutputChunks.end_to_end(name, outputs, plans)
    length = end + len(store_end(end, [*entries, *storages]))
    return OutputFile(name, (), chunks=chunks, length=length, footer=footer)


def _descriptor(entry: ZipEntry, crc32: int) -> bytes:
    return descriptor(replace(entry, crc32=crc32))
