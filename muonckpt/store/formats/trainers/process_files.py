"""State dicts that one process saved with ``torch.save``: a file, the files of a model and its optimizers, or
DeepSpeed's.

In a folder, ``optimizer.pt`` (Hugging Face's Trainer) or ``optimizer.bin``, ``optimizer_1.bin``, … (accelerate) are
under ``optimizer``, ``optimizer_1``, …; weights beside them, in ``model.safetensors`` or ``pytorch_model.bin``, in one
file or in several with an index, are under ``model``.  A file alone keeps its own keys, but for a bare optimizer's,
which are under ``optimizer``.  Other files beside them are not read; the provenance lists them.

DeepSpeed's universal folders ``zero/{parameter}`` have a file for each slot, and nothing lists them; a loss shows
by the other files of a parameter, and by other parameters: ``fp32.pt`` is the weight, under
``model``; ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt`` are AdamW's state.  From ZeRO 1 and 2 a file holds a dict
with the tensor under ``param``; from ZeRO 3 a flat tensor, whose shape is in ``param_shapes`` of a
``*_model_states.pt`` beside ``zero``.  It lists the parameters of each group of ``zero/optimizer_state.pt``, which
numbers flattened partitions; where there are not as many lists as groups, the groups are not read.

Sources: ``save_accelerator_state`` and ``save_fsdp_model`` of accelerate (1.15), ``_save_optimizer_and_scheduler`` of
transformers' Trainer, ``ds_to_universal.py`` of DeepSpeed (0.19).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain

from ....algebra.box import Box, Index
from ....names.errors import DamageError, SourceError, UnlistedError, about
from ....names.keys import PARAM_GROUPS, is_optimizer, key_of
from ....names.vocabulary import EXP_AVG, EXP_AVG_SQ, MOMENTUM, PARAMS, STEP, KeyPath
from ....names.wording import counted, listed as listed_names
from ....programs import signs
from ....record.record import StateRecord
from ...io.location import Location, is_folder, names_in
from ...reading.payloads import Reader
from .. import safetensors
from ..torch_save.inert_pickle import expect, sizes_of
from ..torch_save.plain_item import ItemsInMemory
from ..torch_save.torch_file import (
    SavedTensor,
    TorchFile,
    is_mapping,
    is_tensor,
    mapping,
    read_torch_file,
    whole_record,
)
from ..weight_files import (
    INDEX_NAME,
    SHARD_NAME,
    WeightIndex,
    matches_in,
    models_in,
    read_shards,
    read_shards_without_index,
)
from .state_tree import (
    AS_PARAMETER,
    NamesFile,
    Undecoded,
    decoded,
    kind_in,
    optimizers_with_names,
    state_by_optimizer,
    trainer_reader,
)

_OPTIMIZER = re.compile(r"(optimizer(?:_[0-9]{1,4})?)\.(?:pt|bin)")
_ENDING = ".bin"
_ADAPTER = "adapter_model.bin"


@dataclass
class _Parts:
    """The tensors and items of the files that are read, as they are added.

    Attributes:
        names: the parameters' names that a person wrote beside the files.
        not_read: copies of tensors, and objects that are no plain data, each with its file.
    """

    folder: Location
    names: NamesFile
    tensors: list[StateRecord] = field(default_factory=list)
    items: ItemsInMemory = field(default_factory=ItemsInMemory)
    torch_files: list[TorchFile] = field(default_factory=list)
    numbered: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    not_read: list[str] = field(default_factory=list)
    faults: list[SourceError] = field(default_factory=list)

    def add_file(self, name: str, root: KeyPath, keys: Collection[str] | None = None) -> None:
        """Add what a file of ``torch.save`` has, or of its tensors only those with these keys."""
        file = read_torch_file(self.folder, name)
        with about(self.folder / name):
            content = _read_state_dict(file, root, self.names, self.items)
            self.tensors += [t for t in content.tensors if keys is None or _bare_key(t, root) in keys]
            self.numbered += content.numbered
            self.not_read += content.undecoded
        self.torch_files.append(file)
        self.files.append(name)

    def add_shards(self, index: str | None, root: KeyPath, names: Collection[str]) -> None:
        """Add the weights in several files of ``torch.save``."""

        def read(name: str, digest: str | None) -> dict[str, StateRecord]:
            with about(name):
                content = _read_state_dict(read_torch_file(self.folder, name), root, self.names, ItemsInMemory())
            return {_bare_key(tensor, root): tensor for tensor in content.tensors}

        # Files and index are compared first, by the keys in them.
        if index is None:
            shards = read_shards_without_index(self.folder, names, _ENDING, read)
        else:
            described = WeightIndex.read(self.folder / index)
            with about(self.folder):
                shards = read_shards(described, names, _ENDING, read)
            self.files.append(index)
        # Then each file gives the tensors that count.
        for name, tensors in shards.files.items():
            self.add_file(name, root, tensors.keys())
        self.not_read += shards.copies
        self.faults += shards.faults

    def add_safetensors(self, place: Location, root: KeyPath) -> None:
        """Add the weights in a file of safetensors, in the files of an index, or in a folder of them."""
        weights = safetensors.read_weights(place)
        self.tensors += (replace(t, key=f"{root[0]}.{t.key}", path=(*root, t.key)) for t in weights.tensors)
        self.files += weights.files
        self.not_read += weights.copies
        self.faults += weights.faults


def _bare_key(tensor: StateRecord, root: KeyPath) -> str:
    return key_of(tensor.path[len(root) :])


def reader(path: Location) -> Reader:
    """Read a file or a folder, but no elements.  Faults are lost files of weights, and a lost or wrong index.

    Raises:
        SourceError: another file is damaged, or one holds more than tensors and plain data; nothing in it is run.
    """
    safetensors.refuse_stray(path)
    folder = path if is_folder(path) else path.parent
    listed = names_in(folder)
    # Add what there is, as the programs that write such files would load it.
    parts = _Parts(folder, NamesFile.beside(folder))
    if is_folder(path):
        _add_folder(parts, listed)
    elif INDEX_NAME.fullmatch(path.name):
        parts.add_shards(path.name, ("model",), listed)
    else:
        parts.add_file(path.name, ())
    tensors = parts.tensors
    # Names have to fit the optimizers, and their state the weights with their names.
    with about(path):
        state = state_by_optimizer(tensors)
        parts.names.check_used(tensors, parts.items)
        weights = {str(t.path[-1]): t.shape for t in tensors if len(t.path) == 2 and str(t.path[0]).startswith("model")}
        for optimizer, slots in state.items():
            if optimizer not in parts.numbered:
                _check_shapes(slots, weights)
    not_read = [name for name in listed if name not in parts.files and name != signs.NAMES_FILE]
    provenance = {
        "files": parts.files,
        signs.NOT_READ: [*(not_read if is_folder(path) else ()), *parts.not_read],
        signs.NUMBERED: parts.numbered,
    }
    return trainer_reader(folder, tensors, parts.items, parts.torch_files, provenance, parts.faults)


def _check_shapes(tensors: Sequence[StateRecord], weights: Mapping[str, Index]) -> None:
    """Refuse state in the shapes of other weights than those of its names: numbers are in another order.

    State in shapes that no weights have is not in another order; GaLore keeps momenta of fewer rows.
    """
    state = [tensor for tensor in tensors if tensor.path[-1] in AS_PARAMETER and str(tensor.path[-2]) in weights]
    shapes = {tensor.path[-2]: tensor.shape for tensor in state}
    if Counter(shapes.values()) - Counter(weights.values()):
        return
    for tensor in state:
        name, slot = map(str, tensor.path[-2:])
        if weights[name] != tensor.shape:
            raise SourceError(
                f"expected {slot} of {name!r} in the shape {weights[name]} of its weight, found {tensor.shape}: the "
                "names are in another order than the optimizer's parameters"
            )


def _add_folder(parts: _Parts, listed: Sequence[str]) -> None:
    """Add the optimizers of a folder, and the weights that its programs would load."""
    folder = parts.folder
    # Optimizers: the Trainer has one file, accelerate one for each.
    optimizers = list(filter(None, map(_OPTIMIZER.fullmatch, listed)))
    if len({match[1] for match in optimizers}) < len(optimizers):
        raise SourceError(f"{folder}: expected optimizer.pt or optimizer.bin, found both; give the path of one")
    for match in optimizers:
        parts.add_file(match[0], (match[1],))
    # Weights whose names say nothing of a model: a folder of safetensors, shards without an index, an adapter.
    models = models_in(listed)
    if "model" not in models:
        if any(safetensors.ENDING in name for name in listed):
            parts.add_safetensors(folder, ("model",))
        elif matches_in(listed, SHARD_NAME, _ENDING):
            parts.add_shards(None, ("model",), listed)
        elif _ADAPTER in listed:
            parts.add_file(_ADAPTER, ("model",))
    # The file of each model, or the index of its files.
    for model, name in models.items():
        if safetensors.ENDING in name:
            parts.add_safetensors(folder / name, (model,))
        elif INDEX_NAME.fullmatch(name):
            parts.add_shards(name, (model,), listed)
        else:
            parts.add_file(name, (model,))


@dataclass(frozen=True, slots=True)
class _FileContent:
    """The tensors of a file, the roots of its optimizers whose parameters have numbers only, and undecoded objects."""

    tensors: list[StateRecord]
    numbered: list[str]
    undecoded: list[str]


def _read_state_dict(file: TorchFile, root: KeyPath, names: NamesFile, items: ItemsInMemory) -> _FileContent:
    """Read the state dict in a file, and add what is no tensor to ``items``."""
    content: object = file.content
    if not is_mapping(content):
        raise SourceError(
            f"expected a state dict, found {kind_in(content):.80}; nothing was run. Load it in the program that wrote "
            "it, and save its state_dict()"
        )
    if not root and is_optimizer(mapping(content)):
        root = ("optimizer",)
    content, numbered = optimizers_with_names(mapping(content), root, names)
    tensors, undecoded = [], []
    for path, value in decoded(file, content, root):
        if isinstance(value, SavedTensor):
            tensors.append(whole_record(path, value))
        elif isinstance(value, Undecoded):
            undecoded.append(value.entry(path, file.name))
        else:
            items.add(path, value)
    return _FileContent(tensors, numbered, undecoded)


_ZERO = "zero"
_WEIGHT = "fp32"
_PARAM = "param"
_GROUPS = f"{_ZERO}/optimizer_state.pt"


_COMPLETE = ({EXP_AVG}, {MOMENTUM}, {MOMENTUM, STEP}, {EXP_AVG, EXP_AVG_SQ}, {EXP_AVG, EXP_AVG_SQ, STEP})
"""Slots that some method keeps, although another method keeps further ones beside them."""


def universal_reader(path: Location) -> Reader:
    """Read DeepSpeed's universal folder, but no elements.

    Files that are lost, or another file in the place of one, are its `faults`.

    Raises:
        SourceError: a parameter has no weight, a file is damaged or holds something else, or a shape is not known.
    """
    # The files of each parameter, and other files.
    listed, loose = names_in(path), list[str]()
    files: dict[str, list[str]] = {}
    for name in names_in(path / _ZERO):
        folder = path / _ZERO / name
        if is_folder(folder):
            files[name] = names_in(folder)
        else:
            loose.append(f"{_ZERO}/{name}")
    items, tensors, shapes = ItemsInMemory(), list[StateRecord](), cache(partial(_param_shapes, path, listed))
    not_read = {*listed, *loose} - {_ZERO}
    with about(path):
        if not files:
            raise DamageError(f"expected folders of parameters in {_ZERO}, found none")
        for name, names in files.items():
            if f"{_WEIGHT}.pt" not in names:
                raise DamageError(f"expected {_ZERO}/{name}/{_WEIGHT}.pt, found {', '.join(names) or 'nothing'}")
            # A parameter is its weight, and a file for each slot of its state.
            for file in names:
                tensors += _read_universal_tensor(path, name, file, items, shapes)
        if _GROUPS in loose and _add_groups(path, [list(group) for group in shapes()], items):
            not_read.remove(_GROUPS)
    # Nothing lists the files: their shapes, and the files of other parameters, show the faults.
    slots: dict[str, set[str]] = {}
    for name, names in files.items():
        slots[name] = {file.removesuffix(".pt") for file in names}
    faults = dict([*_find_misplaced(tensors), *_find_lost_slots(slots)])
    keys = list(chain.from_iterable(faults.values()))
    fault = [UnlistedError(listed_names([*faults], 3, "; "))] if faults else []
    provenance = {signs.NOT_READ: sorted(not_read)}
    return trainer_reader(path, [t for t in tensors if t.key not in keys], items, (), provenance, fault)


def _find_misplaced(tensors: Sequence[StateRecord]) -> Iterator[tuple[str, list[str]]]:
    """Yield, for each parameter whose files have several shapes, a fault, and the keys of the tensors to blame.

    The shape that most files have is right; where two are as frequent, nothing tells.
    """
    by_name: defaultdict[str, dict[str, StateRecord]] = defaultdict(dict)
    for tensor in tensors:
        if tensor.path[0] == "model":
            by_name[str(tensor.path[-1])][_WEIGHT] = tensor
        elif tensor.path[-1] in AS_PARAMETER:
            name, slot = map(str, tensor.path[-2:])
            by_name[name][slot] = tensor
    for name, by_slot in by_name.items():
        (shape, count), *rarer = Counter(tensor.shape for tensor in by_slot.values()).most_common()
        if rarer:
            shapes = ", ".join(f"{tensor.shape} in {slot}.pt" for slot, tensor in by_slot.items())
            message = f"expected files of one shape in {_ZERO}/{name}, found {shapes}: another file is in their place"
            is_tie = rarer[0][1] == count
            yield message, [tensor.key for tensor in by_slot.values() if is_tie or tensor.shape != shape]


def _find_lost_slots(slots_by_name: Mapping[str, AbstractSet[str]]) -> Iterator[tuple[str, list[str]]]:
    """Yield, for each parameter that lacks slots which others have beside the same, a fault, and the lacking keys."""
    states = {name: frozenset(names - {_WEIGHT}) for name, names in slots_by_name.items()}
    counts = Counter(states.values())
    for name, state in states.items():
        # The smallest set of slots of others that has more; a complete one may only lack its number of updates.
        larger = [slots for slots in counts if slots > state and (state not in _COMPLETE or slots - state == {STEP})]
        if larger and state:
            usual = min(larger, key=len)
            lost_slots = sorted(usual - state)
            files, numbers = ".pt and ".join(lost_slots), counted(counts[usual], "parameter")
            keys = [f"optimizer.state.{name}.{slot}" for slot in lost_slots]
            yield f"{_ZERO}/{name} has lost {files}.pt, which {numbers} with the same other files have", keys


def _read_universal_tensor(
    path: Location, name: str, file: str, items: ItemsInMemory, shapes: Callable[[], Sequence[Mapping[str, Index]]]
) -> Iterator[StateRecord]:
    """Yield the tensor in a file; a number becomes an item."""
    slot, suffix, _ = file.partition(".pt")
    if not suffix:
        raise SourceError(f"expected files of torch.save in {_ZERO}/{name}, found {file}")
    opened = read_torch_file(path, f"{_ZERO}/{name}/{file}")
    key = ("model", name) if slot == _WEIGHT else ("optimizer", "state", name, slot)
    with about(opened.name):
        content = opened.content
        value = mapping(content).get(_PARAM) if is_mapping(content) else content
        if type(value) in (int, float):
            items.add(key, value)
            return
        if not is_tensor(value):
            raise SourceError(f"expected a tensor, alone or under {_PARAM!r}, found something else; nothing was run")
        tensor = opened.tensor(value)
        if tensor.chunk.crc32 is None:
            raise SourceError("expected a storage of just the tensor, found a view of it")
        # ZeRO 3 stores tensors flat, alone in their files.
        if not is_mapping(content) and tensor.shape and slot != "step":
            if (shape := next((group[name] for group in shapes() if name in group), None)) is None:
                raise SourceError(
                    "expected its shape in param_shapes of a *_model_states.pt beside zero, found none: from ZeRO 3 "
                    "tensors are flat, and DeepSpeed copies these files there"
                )
            if tensor.shape != (math.prod(shape),):
                raise SourceError(
                    f"expected {math.prod(shape)} elements for the shape {shape}, found shape {tensor.shape}"
                )
            tensor = replace(tensor, chunk=replace(tensor.chunk, box=Box.of(shape)))
        yield whole_record(key, tensor)


def _add_groups(path: Location, names_of_groups: Sequence[Sequence[str]], items: ItemsInMemory) -> bool:
    """Add the options of parameter groups; return False where nothing says whose they are.

    The file has a partition for each group; ``names_of_groups`` are those of the parameters in it.
    """
    opened = read_torch_file(path, _GROUPS)
    with about(opened.name):
        groups = mapping(opened.content).get(PARAM_GROUPS) if is_mapping(opened.content) else None
        if type(groups) is not list or len(groups) != len(names_of_groups) or not all(map(is_mapping, groups)):
            return False
        options: list[tuple[KeyPath, object]] = []
        for number, (group, names) in enumerate(zip(groups, names_of_groups, strict=True)):
            root = "optimizer", PARAM_GROUPS, number
            options += [pair for pair in decoded(opened, group, root) if pair[0] != (*root, PARAMS)]
            options.append(((*root, PARAMS), names))
        if any(isinstance(value, SavedTensor | Undecoded) for _, value in options):
            return False
        for option_path, value in options:
            items.add(option_path, value)
    return True


def _param_shapes(path: Location, listed: Sequence[str]) -> list[dict[str, Index]]:
    """Return the shapes of parameters by name, for each group, from the model states beside ``zero``, if any."""
    shapes: list[dict[str, Index]] = []
    for file in [name for name in listed if name.endswith("_model_states.pt")][:1]:
        content = read_torch_file(path, file).content
        with about(path / file):
            recorded = mapping(content).get("param_shapes") if is_mapping(content) else None
            for group in recorded if type(recorded) is list else [recorded]:
                sizes = mapping(group).items() if is_mapping(group) else ()
                shapes.append({expect(str, name): sizes_of(shape) for name, shape in sizes})
    return shapes
