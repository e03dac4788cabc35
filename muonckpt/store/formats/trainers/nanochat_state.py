"""nanochat's checkpoints: ``model_{step}.pt``, and ``optim_{step}_rank{r}.pt`` with the part of each rank.

Its optimizer has no DTensors.  What a rank has follows from the group's ``kind``:

* ``muon``: the state of a group lies under its first parameter, stacked: rank ``r`` of ``W`` has that of the matrices
  ``r * n`` to ``(r + 1) * n``, where ``n = ceil(K / W)`` for ``K`` matrices, and zeros behind the last;
* ``adamw``: state of a parameter of 1024 elements or more is cut by rows over the ranks; that of others all ranks have.

Source: ``MuonAdamW`` and ``checkpoint_manager.save_checkpoint`` of nanochat (July 2026).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ....algebra.box import Box, Index
from ....names.errors import DamageError, SourceError, about, did_you_mean
from ....names.keys import is_optimizer, key_of
from ....names.vocabulary import MOMENTUM, PARAMS, Convention
from ....names.wording import listed
from ....programs import signs
from ....record.record import Chunk, Chunks, Extent, StateRecord
from ...io.location import Location
from ...reading.dtypes import itemsize
from ...reading.reader import LocatedReader
from ..torch_save.inert_pickle import expect
from ..torch_save.plain_item import HeldItems
from ..torch_save.torch_file import TorchFile, checksums_inside, read_torch_file, whole_record
from .state_tree import (
    NamesFile,
    PlainTensor,
    check_same_keys,
    check_shapes,
    decoded,
    mapping,
    optimizer_with_names,
    trainer_reader,
)

_FILE = re.compile(r"(?:model_([0-9]{6,12})|optim_([0-9]{6,12})_rank(0|[1-9][0-9]{0,5}))\.pt")
_REPLICATED = 1024
"""All ranks have AdamW's whole state of parameters with fewer elements."""

_OPTIMIZER = "optimizer"


def reader(path: Location) -> LocatedReader:
    """Read the one step in a folder, or the one whose ``model_{step}.pt`` is given, but no elements.

    Raises:
        SourceError: the folder has several steps, a file is missing or damaged, or ranks contradict each other.
    """
    folder = path if path.is_dir() else path.parent
    file_names = sorted(str(entry.name) for entry in folder.iterdir())
    step = _step(path, file_names)
    model = f"model_{step}.pt"
    ranks = sorted(int(m[3]) for name in file_names if (m := _FILE.fullmatch(name)) and m[2] == step)
    with about(folder):
        if model not in file_names or ranks != list(range(len(ranks))):
            raise DamageError(
                f"expected {model} and optim_{step}_rank{{r}}.pt of every rank from 0, found ranks {ranks}"
            )
        names = NamesFile.beside(folder)
        names.check_used([_OPTIMIZER])
        weights = read_torch_file(folder, model)
        files = [read_torch_file(folder, f"optim_{step}_rank{rank}.pt") for rank in ranks]
        items = HeldItems()
        tensors: list[StateRecord] = []
        with about(weights.name):
            for key, value in decoded(weights, weights.content, ("model",), dtensors=False):
                if isinstance(value, PlainTensor):
                    tensors.append(whole_record(key, value.dtype, value.chunk))
                else:
                    items.add(key, value)
        shapes = {str(tensor.path[-1]): tensor.shape for tensor in tensors}
        numbered = False
        if files:
            state, numbered = _state(files, names, shapes, items)
            tensors += state
    read = {model, *(file.name for file in files), signs.NAMES_FILE}
    provenance = {
        "step": int(step),
        "ranks": len(ranks),
        signs.NOT_READ: [name for name in file_names if name not in read],
        signs.NUMBERED: [_OPTIMIZER] if numbered else None,
    }
    checksums = checksums_inside((weights, *files), tensors)
    return trainer_reader(folder, tensors, items, checksums, provenance)


def _step(path: Location, file_names: Sequence[str]) -> str:
    if not path.is_dir():
        return expect(str, (_FILE.fullmatch(str(path.name)) or [None, None])[1])
    steps = sorted({m[2] for name in file_names if (m := _FILE.fullmatch(name)) and m[2]})
    if not steps:
        raise DamageError(
            f"{path}: expected nanochat's model_{{step}}.pt beside its optim_{{step}}_rank*.pt, found none"
        )
    if len(steps) > 1:
        raise SourceError(
            f"{path} holds the steps {listed(steps)} of a run of nanochat: name one by its model, such as "
            f"{path / f'model_{steps[-1]}.pt'}"
        )
    return steps[0]


def _state(
    files: Sequence[TorchFile], names: NamesFile, shapes: Mapping[str, Index], items: HeldItems
) -> tuple[list[StateRecord], bool]:
    """Return the tensors of the optimizer's state, and whether its parameters have only numbers."""
    ranks = []
    for file in files:
        with about(file.name):
            if type(file.content) is list:
                raise SourceError(
                    "expected the state of nanochat's MuonAdamW, found a list of optimizers, as nanochat saved before "
                    "February 2026; their parts are not read: load them in that version"
                )
            content = mapping(file.content)
            if not is_optimizer(content):
                raise SourceError("expected the state of an optimizer, found something else")
            content, by_number = optimizer_with_names(content, names.of_optimizers.get(_OPTIMIZER))
            if unknown := sorted({*names.of_optimizers.get(_OPTIMIZER, ())} - shapes.keys()):
                near = did_you_mean(unknown[0], [*shapes])
                raise SourceError(f"{signs.NAMES_FILE} names {unknown[0]!r}, which the model lacks{near}")
            values = dict(decoded(file, content, (_OPTIMIZER,), dtensors=False))
            for path, value in values.items():
                if isinstance(value, PlainTensor) and value.chunk.strides is not None:
                    raise SourceError(f"{key_of(path)}: expected elements in row-major order, found others")
            ranks.append(values)
    check_same_keys(ranks, files)
    tensors: list[StateRecord] = []
    stacked: dict[str, list[str]] = {}
    for path, value in ranks[0].items():
        match path:
            case (_, "param_groups", number, "kind") if value == "muon":
                params = ranks[0].get((_OPTIMIZER, "param_groups", number, PARAMS))
                names_of_stack = list(map(str, expect(list, params)))
                stacked[names_of_stack[0]] = names_of_stack
    for path in ranks[0]:
        own = [values[path] for values in ranks]
        with about(key_of(path)):
            parts = [value for value in own if isinstance(value, PlainTensor)]
            if not parts:
                if len({repr(value) for value in own}) > 1:
                    raise SourceError(f"expected the same value on all ranks, found {own[0]!r:.80} and others")
                items.add(path, own[0])
                continue
            name, slot = str(path[-2]), str(path[-1])
            if len(parts) < len(own) or len({(part.dtype, part.chunk.box) for part in parts}) > 1:
                raise SourceError("expected tensors of one shape and dtype on all ranks, found others")
            if name in stacked:
                tensors += _unstacked(stacked[name], slot, parts)
            else:
                tensors.append(_rows(name, slot, parts, None if not by_number else shapes.get(name)))
    if by_number:
        check_shapes(((str(t.path[-2]), str(t.path[-1]), t.shape) for t in tensors), shapes)
    return tensors, not by_number


def _unstacked(params: Sequence[str], slot: str, parts: Sequence[PlainTensor]) -> Iterator[StateRecord]:
    count, *shape = parts[0].chunk.box.shape
    if count != -(-len(params) // len(parts)):
        raise DamageError(
            f"expected {-(-len(params) // len(parts))} of {len(params)} matrices on each of {len(parts)} ranks, found "
            f"{count}: the file of a rank may be missing"
        )
    size = math.prod(shape) * itemsize(parts[0].dtype)
    for number, name in enumerate(params):
        part = parts[number // count]
        payload = part.chunk.payload
        assert payload is not None, "chunks of files have payloads"
        own = Extent(payload.file, payload.offset + number % count * size, size)
        chunk = Chunk(Box.of(tuple(shape)), part.chunk.item, own)
        yield _record(name, slot, tuple(shape), part.dtype, (chunk,))


def _rows(name: str, slot: str, parts: Sequence[PlainTensor], weight: Index | None) -> StateRecord:
    local, dtype = parts[0].chunk.box.shape, parts[0].dtype
    cut = (local[0] * len(parts), *local[1:]) if local else ()
    equal = len({part.chunk.crc32 for part in parts}) == 1
    whole = local == weight or len(parts) == 1 or math.prod(cut) < _REPLICATED
    if not whole and cut != weight and math.prod(local) < _REPLICATED and equal:
        raise SourceError(
            f"cannot tell whether shape {local}, equal on all ranks, is the whole parameter or a part of it: write the "
            f"names of the parameters to {signs.NAMES_FILE} beside the files (docs/formats/trainers.md)"
        )
    if weight is not None and (local if whole else cut) != weight:
        raise DamageError(
            f"expected the shape {weight} of its weight, or rows of it, found {local} on {len(parts)} ranks: the file "
            "of a rank may be missing"
        )
    if whole:
        if not equal:
            raise SourceError("expected the same state on all ranks, found others")
        return _record(name, slot, local, dtype, (parts[0].chunk,))
    zeros = (0,) * (len(local) - 1)
    chunks = tuple(
        replace(part.chunk, box=Box((rank * local[0], *zeros), ((rank + 1) * local[0], *local[1:])))
        for rank, part in enumerate(parts)
    )
    return _record(name, slot, cut, dtype, chunks)


def _record(name: str, slot: str, shape: Index, dtype: str, chunks: Sequence[Chunk]) -> StateRecord:
    path = (_OPTIMIZER, "state", name, slot)
    convention = Convention.EMA if slot == MOMENTUM else None
    return StateRecord(key_of(path), path, shape, dtype, Chunks.of(chunks, len(shape)), name, slot, convention)
