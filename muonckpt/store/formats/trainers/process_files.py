"""State dicts that one process saved with ``torch.save``: a file, or the files of a model and its optimizers.

In a folder, ``optimizer.pt`` (Hugging Face's Trainer) or ``optimizer.bin``, ``optimizer_1.bin``, … (accelerate) are
under ``optimizer``, ``optimizer_1``, …; weights beside them, in ``model.safetensors`` or ``pytorch_model.bin``, in one
file or in several with an index, are under ``model``.  A file alone keeps its own keys, but for a bare optimizer's,
which are under ``optimizer``.  What else lies beside them is not read; the provenance lists it.

Sources: ``save_accelerator_state`` and ``save_fsdp_model`` of accelerate (1.15), ``_save_optimizer_and_scheduler`` of
transformers' Trainer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ....box import Index
from ....errors import SourceError, about
from ....record import Extent, Manifest, StateRecord
from ....vocabulary import KeyPath
from ...io.location import Location
from ...io.regular import read_whole
from ...reading.reader import LocatedReader
from .. import signs
from ..safetensors import folder as safetensors
from ..torch_save.member_payloads import MemberPayloads
from ..torch_save.torch_file import TorchFile, is_tensor, read_torch_file
from .dtensor_pickle import is_dtensor
from .parameter_names import NamesFile, check_shapes, is_optimizer, optimizers_with_names
from .state_tree import HeldItems, check_shared, is_mapping, key_of_path, leaves, mapping, whole_record

_OPTIMIZER = re.compile(r"(optimizer(?:_[0-9]{1,4})?)\.(?:pt|bin)")
_MODEL = re.compile(r"(?:pytorch_model|pytorch_model_fsdp)(_[0-9]{1,4})?\.bin")
_WEIGHTS = re.compile(r"model(_[0-9]{1,4})?\.safetensors")
_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is read of a folder: files of ``torch.save`` and of safetensors with their roots, and names of others."""

    folder: Location
    pickles: Mapping[str, KeyPath]
    weights: Mapping[Location, KeyPath]
    others: tuple[str, ...]


def reader(path: Location) -> LocatedReader:
    """The checkpoint in a file or a folder.  Reads no elements.

    Raises:
        SourceError: a file is missing, damaged, or holds more than tensors and plain data; nothing in it is run.
    """
    try:
        parts = _parts_of_folder(path) if path.is_dir() else _Parts(path.parent, {path.name: ()}, {}, ())
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error}") from error
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
            used = [chunk for tensor in found for chunk in tensor.chunks]
            check_shared(file, iter(used))
            checksums |= {c.item: file.checksums[c.item] for c in used if c.crc32 is None and c.item in file.checksums}
    with about(parts.folder):
        names.check_used({key_of_path(t.path[:-3]) for t in tensors if "state" in t.path[-3:-2]})
        _check_names(tensors, numbered)
    provenance: dict[str, object] = {"files": [*parts.pickles, *(str(place.name) for place in parts.weights)]}
    if parts.others:
        provenance[signs.NOT_READ] = list(parts.others)
    if numbered:
        provenance[signs.NUMBERED] = numbered
    manifest = Manifest(tuple(tensors), tuple(items.blobs), provenance)
    return LocatedReader(manifest, MemberPayloads(parts.folder, items.in_memory, checksums))


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
    """The files that an index of weights names."""
    with about(index):
        try:
            match json.loads(read_whole(index)):
                case {"weight_map": dict(files)} if all(isinstance(name, str) for name in files.values()):
                    return sorted({Extent(name, 0, 0).file for name in files.values()})
        except (ValueError, RecursionError) as error:
            raise SourceError(f"expected JSON, {error}") from error
        raise SourceError("expected a weight_map of file names, found something else")


def _read(file: TorchFile, root: KeyPath, names: NamesFile, items: HeldItems) -> tuple[list[StateRecord], list[str]]:
    """The tensors of a file, and the roots of the optimizers in it whose parameters have numbers only."""
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
                f"{key_of_path(path)} is a DTensor, of which this file has the part of one rank: give the folder with "
                "the files of all ranks, under the names that verl or accelerate gave them (docs/formats/trainers.md)"
            )
        if is_tensor(value):
            tensors.append(whole_record(path, *file.chunk(value)))
        else:
            items.add(path, value)
    return tensors, numbered


def _check_names(tensors: Sequence[StateRecord], numbered: Sequence[str]) -> None:
    weights = {str(t.path[-1]): t.shape for t in tensors if len(t.path) == 2 and str(t.path[0]).startswith("model")}

    def slots() -> Iterator[tuple[str, str, Index]]:
        for tensor in tensors:
            match tensor.path:
                case (*root, "state", name, slot) if key_of_path(tuple(root)) not in numbered:
                    yield str(name), str(slot), tensor.shape

    check_shapes(slots(), weights)
