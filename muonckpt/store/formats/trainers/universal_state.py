"""DeepSpeed's universal checkpoints: a folder ``zero/{parameter}`` with a file of ``torch.save`` for each slot.

``fp32.pt`` is the float32 weight, under ``model``; ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt`` are AdamW's
state.  From ZeRO 1 and 2 a file holds a dict with the tensor under ``param``; from ZeRO 3 a flat tensor, whose shape
is in ``param_shapes`` of a ``*_model_states.pt`` beside ``zero``.  The groups of ``zero/optimizer_state.pt`` are not
read: they number flattened partitions, and nothing says which parameters are in them.

Source: ``ds_to_universal.py`` of DeepSpeed (0.19).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ....box import Box, Index
from ....errors import DamageError, SourceError, about
from ....record import Chunk, Manifest, StateRecord
from ...io.location import Location
from ...reading.reader import LocatedReader
from .. import signs
from ..torch_save.inert_pickle import expect, sizes_of
from ..torch_save.member_payloads import MemberPayloads
from ..torch_save.torch_file import is_tensor, read_torch_file
from .state_tree import HeldItems, is_mapping, mapping, whole_record

_ZERO = "zero"
_WEIGHT = "fp32"
_PARAM = "param"


def reader(path: Location) -> LocatedReader:
    """The checkpoint in a folder.  Reads no elements.

    Raises:
        SourceError: a parameter has no weight, a file is damaged or holds something else, or a shape is not known.
    """
    try:
        listed = sorted(str(entry.name) for entry in path.iterdir())
        parameters = {
            str(entry.name): sorted(str(file.name) for file in entry.iterdir())
            for entry in (path / _ZERO).iterdir()
            if entry.is_dir()
        }
        loose = [f"{_ZERO}/{entry.name}" for entry in (path / _ZERO).iterdir() if not entry.is_dir()]
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error}") from error
    items, shapes = HeldItems(), dict[str, Index]()
    with about(path):
        if not parameters:
            raise DamageError(f"expected folders of parameters in {_ZERO}, found none")
        tensors = []
        for name, files in sorted(parameters.items()):
            if f"{_WEIGHT}.pt" not in files:
                raise DamageError(f"expected {_ZERO}/{name}/{_WEIGHT}.pt, found {', '.join(files) or 'nothing'}")
            for file in files:
                tensor = _read(path, name, file, items, shapes, listed)
                tensors += [tensor] if tensor is not None else []
    others = [name for name in (*listed, *loose) if name != _ZERO]
    provenance = {signs.NOT_READ: sorted(others)} if others else {}
    manifest = Manifest(tuple(tensors), tuple(items.blobs), provenance)
    return LocatedReader(manifest, MemberPayloads(path, items.in_memory, {}))


def _read(
    path: Location, name: str, file: str, items: HeldItems, shapes: dict[str, Index], listed: list[str]
) -> StateRecord | None:
    """The tensor in a file; None if it is a number, which becomes an item."""
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
            chunk = _shaped(chunk, shapes.get(name))
        return whole_record(key, dtype, chunk)


def _shaped(flat: Chunk, shape: Index | None) -> Chunk:
    """A flat chunk as a tensor of this shape."""
    if shape is None:
        raise SourceError(
            "expected its shape in param_shapes of a *_model_states.pt beside zero, found none: from ZeRO 3 "
            "tensors are flat, and DeepSpeed copies these files there"
        )
    if len(flat.box.shape) != 1 or math.prod(shape) != flat.box.numel:
        raise SourceError(f"expected {math.prod(shape)} elements for the shape {shape}, found shape {flat.box.shape}")
    return replace(flat, box=Box((0,) * len(shape), shape))


def _shapes(path: Location, listed: list[str]) -> Iterator[tuple[str, Index]]:
    """The shapes of all parameters, by name, of the first file that has them."""
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
