"""Megatron's per-rank files of the layer-wise optimizer, ``layer_wise_optimizer_{rank}.pt``, as one checkpoint.

Names and owners come from a description beside the files (:mod:`.layer_wise_names`), which must agree with the files
and with the weights, to which the fp32 masters must round: docs/formats/layer_wise.md.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ...algebra.box import Index
from ...layouts.buffers.buffer_layout import BufferLayout, PlacedParameter
from ...layouts.buffers.records import GroupBuffer
from ...names.errors import DamageError, SourceError
from ...names.keys import key_of
from ...names.vocabulary import MASTER, PARAMS
from ...names.wording import listed
from ...record.record import Manifest, StateRecord, by_key, entry_keys
from ..io.location import Location, is_file, is_folder, names_in
from ..reading.dtypes import rounded
from ..reading.payloads import Payloads, Reader, as_words, chunk_elements
from . import dcp
from .layer_wise_names import (
    DESCRIPTION_PARSERS,
    Description,
    ListedParameter,
    ParameterState,
    RankFile,
    RankShares,
    TensorParallelism,
    distribute,
    read_description,
    read_rank_file,
)
from .torch_save import torch_file
from .torch_save.inert_pickle import Record
from .torch_save.plain_item import ItemsInMemory
from .torch_save.torch_file import MemberPayloads, SavedTensor, whole_record

_EXPERTS = "is_expert_parallel"

_RANK = re.compile(r"layer_wise_optimizer_(0|[1-9][0-9]*)\.pt")

_STATE = ("layer_wise", "state")
_OPTION = ("layer_wise", "param_groups")
"""Paths of keys: state by parameter and slot, options by group and name.  Weights are under ``model``."""


def reader(path: Location) -> Reader:
    """Read the files of a directory; of elements only some of each parameter, to compare them with the weights.

    Raises:
        SourceError: there is no description, or a file is missing, damaged or contradicts the description.
    """
    description = read_description(path)
    if description is None:
        raise SourceError(
            f"{path} holds Megatron's per-rank optimizer files, which record neither names nor owners: "
            f"write {next(iter(DESCRIPTION_PARSERS))} beside them (docs/formats/layer_wise.md)"
        )
    parts = [_read_part(path, description, folder) for folder in description.folders]
    first, files = parts[0], list(chain.from_iterable(part.files for part in parts))
    params: defaultdict[int, list[str]] = defaultdict(list)
    for member in first.members:
        params[member.group].append(member.parameter.name)

    # Options, and state that is no tensor, become items in memory, under the name of the description.
    items = ItemsInMemory(next(name for name in DESCRIPTION_PARSERS if is_file(path / name)))
    for number, options in _collect_options(files, params):
        for option, value in options.items():
            items.add((*_OPTION, number, option), value)
    for name, state in first.states.items():
        for slot, value in state.items():
            if not isinstance(value, SavedTensor):
                items.add((*_STATE, name, slot), value)

    provenance: dict[str, object] = {
        "format": "layer_wise_optimizer",
        "dealt": {"algorithm": description.algorithm, "ranks": len(first.files)},
        "not_kept": sorted(set().union(*(file.not_kept for file in files))),
    }
    if description.tensor_parallel is None:
        provenance["buffers"] = [buffer.to_json() for buffer in _buffers_of_slots(first.shares, first.states)]
        manifest = Manifest(tuple(first.records), tuple(items.blobs), provenance)
        return Reader(manifest, Payloads(path, items.in_memory))
    # Joined tensors may have parts of a storage, which the checksum of the whole storage still checks.
    records = tuple(_join_parts(parts, description.tensor_parallel))
    manifest = Manifest(records, tuple(items.blobs), {**provenance, "tensor_parallel": len(parts)})
    stored_records = chain.from_iterable(part.records for part in parts)
    chunks = (record.chunks[0] for record in stored_records)
    checksums = {chunk.item: chunk.crc32 for chunk in chunks if chunk.crc32 is not None}
    return Reader(manifest, MemberPayloads(path, items.in_memory, checksums))


@dataclass(frozen=True, slots=True)
class _Part:
    """Holds the files of a tensor-parallel rank's data-parallel ranks, and their content."""

    files: Sequence[RankFile]
    members: Sequence[ListedParameter]
    shares: RankShares
    states: Mapping[str, ParameterState]
    records: Sequence[StateRecord]


def _read_part(path: Location, description: Description, folder: str) -> _Part:
    """Read the files of one tensor-parallel rank, whose names begin with ``folder``; empty without such ranks."""
    # The description and the weights say which parameters there are, and its algorithm who owns them.
    names = description.files or _find_rank_files(path / folder.rstrip("/") if folder else path)
    files = [read_rank_file(path, f"{folder}{name}") for name in names]
    model = read_weights(path, f"{folder}{description.model}") if description.model else None
    weights = model.weights if model else {}
    members = description.selected([(name, weight.shape, weight.dtype) for name, weight in weights.items()])
    shares = distribute(description, members, len(files))

    # The files' own descriptions must not contradict it.
    for group, expert in {(member.group, member.parameter.expert) for member in members}:
        for file in files:
            stored = file.groups[group].options.get(_EXPERTS, expert) if group < len(file.groups) else expert
            if stored != expert:
                raise SourceError(
                    f"group {group} of {file.name} says {_EXPERTS}={stored}, the description says the opposite"
                )
    shapes = {member.parameter.name: member.parameter.shape for member in members}
    states = dict(_name_states(files, shares, shapes, description.algorithm))
    if model:
        model.check_masters(path, states)
    weights_here = weights.values() if model and model.folder == path else ()
    return _Part(files, members, shares, states, records=(*_make_records(shares, states), *weights_here))


def _join_parts(parts: Sequence[_Part], parallelism: TensorParallelism) -> Iterator[StateRecord]:
    """Yield each tensor of all tensor-parallel ranks as one.

    Raises:
        SourceError: the ranks have other tensors, other numbers, or parts that do not fit.
    """
    # Each rank has the same parameters, and the same values that are not tensors.
    first, folders = parts[0], parallelism.folders
    for rank, part in enumerate(parts):
        if [member.parameter for member in part.members] != [member.parameter for member in first.members]:
            raise SourceError(f"the models in {folders[0]} and {folders[rank]} have other parameters or shapes")
        parallelism.check_masters(rank, part.states)
        for name, state in first.states.items():
            expected_values, values = _plain_values(state), _plain_values(part.states[name])
            if values != expected_values:
                raise SourceError(
                    f"state of {name!r} is {expected_values} in {folders[0]}, {values} in {part.files[0]}"
                )
    # Each tensor is joined of its parts.
    records_by_key: defaultdict[str, list[StateRecord]] = defaultdict(list)
    for folder, part in zip(folders, parts, strict=True):
        keys = {*entry_keys(part.records)}
        if differing := sorted(keys ^ (records_by_key.keys() or keys)):
            raise SourceError(f"only one of {folders[0]} and {folder} has {differing[0]!r}")
        for record in part.records:
            records_by_key[record.key].append(record)
    for key, records in records_by_key.items():
        yield parallelism.join(records[0].name or key.removeprefix("model."), records)


def _plain_values(state: ParameterState) -> dict[str, object]:
    return {slot: value for slot, value in state.items() if not isinstance(value, SavedTensor)}


def _find_rank_files(path: Location) -> tuple[str, ...]:
    if not is_folder(path):
        raise SourceError(f"expected a folder with the files of every rank at {path}, found none")
    matches = map(_RANK.fullmatch, names_in(path))
    names_by_rank = {int(match[1]): match[0] for match in matches if match}
    ranks = sorted(names_by_rank)
    if not ranks or ranks != list(range(len(ranks))):
        raise DamageError(f"{path}: expected a file of every rank from 0, found those of {listed(ranks)}")
    return tuple(names_by_rank[rank] for rank in ranks)


def _name_states(
    files: Sequence[RankFile], shares: RankShares, shapes: Mapping[str, Index], algorithm: str
) -> Iterator[tuple[str, ParameterState]]:
    """Yield each parameter's state by name; raise `SourceError` where a group cannot have those of its share."""
    counts = {len(file.groups) for file in files}
    num_groups = 1 + max(group for _, group in shares.names)
    if len(counts) > 1 or num_groups > max(counts):
        raise SourceError(f"the ranks' files have {sorted(counts)} parameter groups, the description has {num_groups}")
    # In each group of each file the shapes of states are those of the parameters that the rank owns, in order.
    for rank, file in enumerate(files):
        for number, group in enumerate(file.groups):
            names = shares.names.get((rank, number), ())
            for position, (name, state) in enumerate(zip_longest(names, group.states, fillvalue=None)):
                state_shape = {value.shape for value in (state or {}).values() if _is_elementwise(value)}
                if name is None or state_shape != {shapes[name]}:
                    expected = name and (name, shapes[name])
                    raise SourceError(
                        f"{file.name}: group {number} has {len(group.states)} parameters, with {algorithm} its rank "
                        f"owns {len(names)}: number {position} should be {expected}, found shape {state_shape}; the "
                        "algorithm or the parameters differ"
                    )
            yield from zip(names, group.states, strict=True)


def _is_elementwise(value: object) -> TypeGuard[SavedTensor]:
    return isinstance(value, SavedTensor) and value.shape != ()


def _make_records(shares: RankShares, states: Mapping[str, ParameterState]) -> Iterator[StateRecord]:
    layouts: dict[str, dict[str, Any]] = {}
    for _, buffer in shares.buffers:
        layout = {"algorithm": buffer.algorithm, "version": buffer.version}
        layout |= {"mesh": [buffer.ranks], "axes": ["dp"], "cuts": []}
        layouts |= dict.fromkeys((placement.name for placement in buffer.parameters), layout)
    for name, state in states.items():
        for slot, value in state.items():
            if isinstance(value, SavedTensor):
                record = whole_record((*_STATE, name, slot), value)
                yield replace(record, name=name, slot=slot, layout=layouts[name] if value.shape else None)


def _buffers_of_slots(shares: RankShares, states: Mapping[str, ParameterState]) -> Iterator[GroupBuffer]:
    """Yield each buffer of the run once for every slot of state, with the keys of the slot's tensors as names."""
    for number, (ranks, buffer) in enumerate(shares.buffers):
        slots = dict.fromkeys(chain.from_iterable(states[placement.name] for placement in buffer.parameters))
        for slot in slots:
            placements = _placements_of_slot(buffer, slot, states)
            if placements:
                layout = replace(buffer, parameters=placements)
                yield GroupBuffer(slot=slot, part=number, group=ranks, origins=layout.origins, layout=layout)


def _placements_of_slot(
    buffer: BufferLayout, slot: str, states: Mapping[str, ParameterState]
) -> tuple[PlacedParameter, ...]:
    """Return where the tensors of a slot would lie in a buffer; parameters without the slot leave gaps."""
    placements = []
    for placement in buffer.parameters:
        if _is_elementwise(value := states[placement.name].get(slot)):
            key = key_of((*_STATE, placement.name, slot))
            placements.append(replace(placement, parameter=replace(placement.parameter, name=key, dtype=value.dtype)))
    return tuple(placements)


def _collect_options(
    files: Sequence[RankFile], params: Mapping[int, Sequence[str]]
) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the options of each group that has parameters, with the names of the parameters."""
    for number, names in sorted(params.items()):
        # Ranks without parameters of the group have options that no parameter used.
        owners = [file for file in files if file.groups[number].states]
        first = owners[0].groups[number].options
        for file in owners:
            options = file.groups[number].options
            if repr(options) != repr(first):
                differing = sorted(set(map(repr, options.items())) ^ set(map(repr, first.items())))[0]
                raise SourceError(f"group {number}: {owners[0].name} and {file.name} differ in {differing}")
        yield number, {**first, PARAMS: list(names)}


_COMPARED_ELEMENTS = 1 << 14

_OPTIMIZER_KEY = re.compile(r"(chained_[0-9]+\.)*optimizer\.")


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Holds a model's weights by name, in the order of its checkpoint; their chunks are in files of ``folder``."""

    folder: Location
    weights: Mapping[str, StateRecord]

    def check_masters(self, path: Location, states: Mapping[str, ParameterState]) -> None:
        """Compare the first rows of each fp32 master (in files of ``path``), rounded, with the weight.

        Raises:
            SourceError: a weight is missing, has another shape, or differs from its rounded master.
        """
        with Payloads(path) as payloads, Payloads(self.folder) as weight_payloads:
            for name, state in states.items():
                master, weight = state.get(MASTER), self.weights.get(name)
                if not isinstance(master, SavedTensor):
                    continue
                chunks = [chunk for chunk in weight.chunks if chunk.box.numel] if weight else []
                if weight is None or (weight.shape, master.dtype) != (master.shape, "float32") or not chunks:
                    stored = "none" if weight is None else f"shape {weight.shape} in {len(chunks)} chunks"
                    raise SourceError(
                        f"expected a weight {name!r} of shape {master.shape} in {self.folder}, and a float32 master; "
                        f"found {stored}, and {master.dtype}"
                    )
                # The first rows of the weight's first chunk, and the same part of the master.
                box = chunks[0].box
                rows = slice(max(1, _COMPARED_ELEMENTS * box.shape[0] // box.numel)) if box.shape else ()
                words = as_words(payloads.view(master.chunk.item), master.dtype, master.shape)
                part = words[tuple(map(slice, box.lo, box.hi))][rows]
                if not np.array_equal(
                    _rounded(part, weight.dtype), chunk_elements(weight_payloads, weight, chunks[0])[rows]
                ):
                    raise SourceError(
                        f"the master of {name!r} in {master.chunk.item.file} does not round to that in {self.folder}: "
                        "another algorithm, another order of the parameters, or weights of another step"
                    )


def read_weights(path: Location, place: str) -> ModelWeights:
    """Read the weights under ``model`` in a file of ``torch.save``, or of a DCP checkpoint in the directory.

    Raises:
        SourceError: neither exists, or it is damaged.
    """
    if is_folder(path / place):
        stored = dcp.reader(path / place)
        for fault in stored.faults:
            raise fault
        tensors = [tensor for tensor in stored.outline.tensors if not _OPTIMIZER_KEY.match(tensor.key)]
        return ModelWeights(path / place, by_key(stored.locate(tensors)))
    file = torch_file.read_torch_file(path, place)
    content = file.content.get("model") if isinstance(file.content, dict) else None
    entries = content.items if isinstance(content, Record) else content
    if not isinstance(entries, dict):
        raise SourceError(f"{path / place}: expected weights by name under 'model'")
    weights = {}
    for name, value in entries.items():  # among them `_extra_state`s of modules, which are not tensors
        if isinstance(name, str) and isinstance(value, Record) and value.kind.startswith("torch._"):
            weights[name] = whole_record(("model", name), file.whole_tensor(value))
    return ModelWeights(path, weights)


def _rounded(words: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Round float32 elements to nearest even in a dtype of weights, from bits to bits."""
    if dtype == "float32":
        return words
    if dtype not in ("float16", "bfloat16"):
        raise SourceError(f"expected weights of float32, float16 or bfloat16, found {dtype}")
    return rounded(np.ascontiguousarray(words).view("<f4").astype(np.float64), dtype)
