"""State dicts that one process saved with ``torch.save``: a file, the files of a model and its optimizers, or
DeepSpeed's.

In a folder, ``optimizer.pt`` (Hugging Face's Trainer) or ``optimizer.bin``, ``optimizer_1.bin``, … (accelerate) are
under ``optimizer``, ``optimizer_1``, …; weights beside them, in ``model.safetensors`` or ``pytorch_model.bin``, in one
file or in several with an index, are under ``model``.  A file alone keeps its own keys, but for a bare optimizer's,
which are under ``optimizer``.  What else lies beside them is not read; the provenance lists it.

DeepSpeed's universal folders ``zero/{parameter}`` have a file for each slot: ``fp32.pt`` is the weight, under
``model``; ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt`` are AdamW's state.  From ZeRO 1 and 2 a file holds a dict
with the tensor under ``param``; from ZeRO 3 a flat tensor, whose shape is in ``param_shapes`` of a
``*_model_states.pt`` beside ``zero``.  The groups of ``zero/optimizer_state.pt`` are not read: they number flattened
partitions of unknown parameters.

Sources: ``save_accelerator_state`` and ``save_fsdp_model`` of accelerate (1.15), ``_save_optimizer_and_scheduler`` of
transformers' Trainer, ``ds_to_universal.py`` of DeepSpeed (0.19).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ....box import Box, Index
from ....errors import DamageError, SourceError, about
from ....keys import is_optimizer, key_of
from ....record import Extent, StateRecord
from ....vocabulary import KeyPath
from ...io.location import Location
from ...io.regular import read_whole
from ...reading.reader import LocatedReader
from .. import safetensors, signs
from ..torch_save.inert_pickle import expect, sizes_of
from ..torch_save.plain_item import HeldItems
from ..torch_save.torch_file import (
    TorchFile,
    checksums_inside,
    is_tensor,
    read_torch_file,
    whole_record,
)
from .state_tree import (
    NamesFile,
    check_shapes,
    check_shared,
    is_dtensor,
    is_mapping,
    leaves,
    mapping,
    optimizers_with_names,
    trainer_reader,
)

_OPTIMIZER = re.compile(r"(optimizer(?:_[0-9]{1,4})?)\.(?:pt|bin)")
_MODEL = re.compile(r"(?:pytorch_model|pytorch_model_fsdp)(_[0-9]{1,4})?\.bin")
_WEIGHTS = re.compile(r"model(_[0-9]{1,4})?\.safetensors")
_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True, slots=True)
class _Parts:
    """The files of ``torch.save`` and of safetensors that are read of a folder, by root, and the names of others."""

    folder: Location
    pickles: Mapping[str, KeyPath]
    weights: Mapping[Location, KeyPath]
    others: tuple[str, ...]


def reader(path: Location) -> LocatedReader:
    """Read a file or a folder, but no elements.

    Raises:
        SourceError: a file is missing, damaged, or holds more than tensors and plain data; nothing in it is run.
    """
    safetensors.refuse_stray(path)
    parts = _parts_of_folder(path) if path.is_dir() else _Parts(path.parent, {path.name: ()}, {}, ())
    names = NamesFile.beside(parts.folder)
    tensors: list[StateRecord] = []
    for place, root in parts.weights.items():
        read = safetensors.read_safetensors(place).tensors
        tensors += (replace(t, key=f"{root[0]}.{t.key}", path=(*root, t.key)) for t in read)
    items, checksums, numbered = HeldItems(), dict[Extent, int](), list[str]()
    for name, root in parts.pickles.items():
        file = read_torch_file(parts.folder, name)
        with about(parts.folder / name):
            found, states = _read(file, root, names, items)
            tensors += found
            numbered += states
            check_shared(file, (chunk for tensor in found for chunk in tensor.chunks))
            checksums |= checksums_inside([file], found)
    with about(parts.folder):
        names.check_used({key_of(t.path[:-3]) for t in tensors if "state" in t.path[-3:-2]})
        weights = {str(t.path[-1]): t.shape for t in tensors if len(t.path) == 2 and str(t.path[0]).startswith("model")}
        named = (t for t in tensors if "state" in t.path[-3:-2] and key_of(t.path[:-3]) not in numbered)
        check_shapes(((str(t.path[-2]), str(t.path[-1]), t.shape) for t in named), weights)
    provenance = {
        "files": [*parts.pickles, *(str(place.name) for place in parts.weights)],
        signs.NOT_READ: list(parts.others) or None,
        signs.NUMBERED: numbered or None,
    }
    return trainer_reader(parts.folder, tensors, items, checksums, provenance)


def _parts_of_folder(path: Location) -> _Parts:
    names = sorted(str(entry.name) for entry in path.iterdir())
    pickles: dict[str, KeyPath] = {n: (match[1],) for n in names if (match := _OPTIMIZER.fullmatch(n))}
    if len(set(pickles.values())) < len(pickles):
        raise SourceError(f"{path}: expected optimizer.pt or optimizer.bin, found both; give the path of one")
    weights: dict[Location, KeyPath] = {
        path / n: (f"model{match[1] or ''}",) for n in names if (match := _WEIGHTS.fullmatch(n))
    }
    used = {str(place.name) for place in weights}
    if not weights and any(n.endswith((".safetensors", ".safetensors.index.json")) for n in names):
        weights = {path: ("model",)}
        used = {n for n in names if n.endswith((".safetensors", ".safetensors.index.json"))}
    elif not weights and _INDEX in names:
        pickles |= dict.fromkeys(_indexed(path / _INDEX), ("model",))
        used = {_INDEX}
    for n in names:
        match = _MODEL.fullmatch(n)
        if match and not weights and (root := (f"model{match[1] or ''}",)) not in pickles.values():
            pickles[n] = root
    others = tuple(n for n in names if n not in pickles and n not in used and n != signs.NAMES_FILE)
    return _Parts(path, pickles, weights, others)


def _indexed(index: Location) -> Sequence[str]:
    with about(index):
        try:
            match json.loads(read_whole(index)):
                case {"weight_map": dict(files)} if all(isinstance(name, str) for name in files.values()):
                    return sorted({Extent(name, 0, 0).file for name in files.values()})
        except (ValueError, RecursionError) as error:
            raise SourceError(f"expected JSON, {error}") from error
        raise SourceError("expected a weight_map of file names, found something else")


def _read(file: TorchFile, root: KeyPath, names: NamesFile, items: HeldItems) -> tuple[list[StateRecord], list[str]]:
    """Return a file's tensors, and the roots of its optimizers whose parameters have only numbers."""
    content: object = file.content
    if not is_mapping(content):
        raise SourceError("expected a state dict, found something else; nothing was run")
    if not root and is_optimizer(mapping(content)):
        root = ("optimizer",)
    content, numbered = optimizers_with_names(mapping(content), root, names)
    tensors = []
    for path, value in leaves(file, content, root):
        if is_dtensor(value):
            raise SourceError(
                f"{key_of(path)} is a DTensor, of which this file has the part of one rank: give the folder with "
                "the files of all ranks, under the names that verl or accelerate gave them (docs/formats/trainers.md)"
            )
        if is_tensor(value):
            tensors.append(whole_record(path, *file.chunk(value)))
        else:
            items.add(path, value)
    return tensors, numbered


_ZERO = "zero"
_WEIGHT = "fp32"
_PARAM = "param"


def universal_reader(path: Location) -> LocatedReader:
    """Read DeepSpeed's universal folder, but no elements.

    Raises:
        SourceError: a parameter has no weight, a file is damaged or holds something else, or a shape is not known.
    """
    listed = sorted(str(entry.name) for entry in path.iterdir())
    parameters = {
        str(entry.name): sorted(str(file.name) for file in entry.iterdir())
        for entry in (path / _ZERO).iterdir()
        if entry.is_dir()
    }
    loose = [f"{_ZERO}/{entry.name}" for entry in (path / _ZERO).iterdir() if not entry.is_dir()]
    items, shapes = HeldItems(), dict[str, Index]()
    with about(path):
        if not parameters:
            raise DamageError(f"expected folders of parameters in {_ZERO}, found none")
        tensors = []
        for name, files in sorted(parameters.items()):
            if f"{_WEIGHT}.pt" not in files:
                raise DamageError(f"expected {_ZERO}/{name}/{_WEIGHT}.pt, found {', '.join(files) or 'nothing'}")
            for file in files:
                tensor = _read_universal(path, name, file, items, shapes, listed)
                tensors += [tensor] if tensor is not None else []
    others = sorted(name for name in (*listed, *loose) if name != _ZERO)
    return trainer_reader(path, tensors, items, {}, {signs.NOT_READ: others or None})


def _read_universal(
    path: Location, name: str, file: str, items: HeldItems, shapes: dict[str, Index], listed: list[str]
) -> StateRecord | None:
    """Read the tensor in a file; None if it is a number, which becomes an item."""
    slot, ending, _ = file.partition(".pt")
    if not ending:
        raise SourceError(f"expected files of torch.save in {_ZERO}/{name}, found {file}")
    opened = read_torch_file(path, f"{_ZERO}/{name}/{file}")
    key = ("model", name) if slot == _WEIGHT else ("optimizer", "state", name, slot)
    with about(opened.name):
        content = opened.content
        value = mapping(content).get(_PARAM) if is_mapping(content) else content
        if type(value) in (int, float):
            items.add(key, value)
            return None
        if not is_tensor(value):
            raise SourceError(f"expected a tensor, alone or under {_PARAM!r}, found something else; nothing was run")
        dtype, chunk = opened.chunk(value)
        if chunk.crc32 is None:
            raise SourceError("expected a storage of just the tensor, found a view of it")
        if not is_mapping(content) and chunk.box.shape and slot != "step":
            if not shapes:
                shapes.update(_shapes(path, listed))
            if (shape := shapes.get(name)) is None:
                raise SourceError(
                    "expected its shape in param_shapes of a *_model_states.pt beside zero, found none: from ZeRO 3 "
                    "tensors are flat, and DeepSpeed copies these files there"
                )
            if len(chunk.box.shape) != 1 or math.prod(shape) != chunk.box.numel:
                raise SourceError(
                    f"expected {math.prod(shape)} elements for the shape {shape}, found shape {chunk.box.shape}"
                )
            chunk = replace(chunk, box=Box.of(shape))
        return whole_record(key, dtype, chunk)


def _shapes(path: Location, listed: list[str]) -> Iterator[tuple[str, Index]]:
    for file in listed:
        if file.endswith("_model_states.pt"):
            content = read_torch_file(path, file).content
            with about(path / file):
                recorded = mapping(content).get("param_shapes") if is_mapping(content) else None
                groups = expect(list, recorded) if type(recorded) is list else [recorded]
                for group in groups:
                    known: Mapping[object, object] = mapping(group) if is_mapping(group) else {}
                    yield from ((expect(str, name), sizes_of(shape)) for name, shape in known.items())
            return
