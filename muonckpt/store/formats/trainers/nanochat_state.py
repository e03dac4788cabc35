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
from ....names.vocabulary import MOMENTUM, PARAMS, Convention, KeyPath
from ....names.wording import listed
from ....programs import signs
from ....record.record import Chunk, Chunks, Extent, StateRecord
from ...io.location import Location
from ...reading.dtypes import itemsize
from ...reading.payloads import Reader
from ..torch_save.inert_pickle import expect
from ..torch_save.plain_item import ItemsInMemory
from ..torch_save.torch_file import TorchFile, checksums_inside, read_torch_file
from .state_tree import (
    NamesFile,
    PlainTensor,
    check_same_keys,
    check_shapes,
    decoded,
    mapping,
    names_in,
    optimizer_with_names,
    same_on_ranks,
    trainer_reader,
    whole_records,
)

_FILE = re.compile(r"(?:model_([0-9]{6,12})|optim_([0-9]{6,12})_rank(0|[1-9][0-9]{0,5}))\.pt")
_REPLICATED = 1024
"""All ranks have AdamW's whole state of parameters with fewer elements."""

_OPTIMIZER = "optimizer"


def reader(path: Location) -> Reader:
    """Read the one step in a folder, or the one whose ``model_{step}.pt`` is given, but no elements.

    Raises:
        SourceError: the folder has several steps, a file is missing or damaged, or ranks contradict each other.
    """
    folder = path if path.is_dir() else path.parent
    file_names = names_in(folder)
    matches = list(filter(None, map(_FILE.fullmatch, file_names)))
    step = _step(path, matches)
    model = f"model_{step}.pt"
    ranks = sorted(int(match[3]) for match in matches if match[2] == step)
    with about(folder):
        if model not in file_names or ranks != list(range(len(ranks))):
            raise DamageError(
                f"expected {model} and optim_{step}_rank{{r}}.pt of every rank from 0, found ranks {ranks}"
            )
        # The weights, whose names and shapes the optimizer's state has to fit.
        names = NamesFile.beside(folder)
        names.check_used([_OPTIMIZER])
        weights = read_torch_file(folder, model)
        files = [read_torch_file(folder, f"optim_{step}_rank{rank}.pt") for rank in ranks]
        items = ItemsInMemory()
        with about(weights.name):
            tensors = whole_records(decoded(weights, weights.content, ("model",)), items)
        has_names = True
        if files:
            shapes = {str(tensor.path[-1]): tensor.shape for tensor in tensors}
            state, has_names = _state(files, names.of_optimizers.get(_OPTIMIZER), shapes, items)
            tensors += state
    read = {model, *(file.name for file in files), signs.NAMES_FILE}
    provenance = {
        "step": int(step),
        "ranks": len(ranks),
        signs.NOT_READ: [name for name in file_names if name not in read],
        signs.NUMBERED: [] if has_names else [_OPTIMIZER],
    }
    checksums = checksums_inside((weights, *files), tensors)
    return trainer_reader(folder, tensors, items, checksums, provenance)


def _step(path: Location, matches: Sequence[re.Match[str]]) -> str:
    if not path.is_dir():
        return expect(str, (_FILE.fullmatch(str(path.name)) or [None, None])[1])
    steps = sorted({match[2] for match in matches if match[2]})
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
    files: Sequence[TorchFile], names_listed: Sequence[str] | None, shapes: Mapping[str, Index], items: ItemsInMemory
) -> tuple[list[StateRecord], bool]:
    """Return the tensors of the optimizer's state, and whether its parameters have names."""
    if unknown := sorted({*(names_listed or ())} - shapes.keys()):
        near = did_you_mean(unknown[0], [*shapes])
        raise SourceError(f"{signs.NAMES_FILE} names {unknown[0]!r}, which the model lacks{near}")
    ranks, has_names = [], False
    for file in files:
        with about(file.name):
            values, has_names = _values(file, names_listed)
        ranks.append(values)
    check_same_keys(ranks, [file.name for file in files])
    # State of a group of matrices is stacked under the first one.
    stacks: dict[str, list[str]] = {}
    for path, value in ranks[0].items():
        match path:
            case (_, "param_groups", number, "kind") if value == "muon":
                params = ranks[0].get((_OPTIMIZER, "param_groups", number, PARAMS))
                stack = list(map(str, expect(list, params)))
                stacks[stack[0]] = stack
    # Put the ranks' parts together, and keep once what is the same on all.
    tensors: list[StateRecord] = []
    for path in ranks[0]:
        values_of_ranks = [values[path] for values in ranks]
        with about(key_of(path)):
            parts = [value for value in values_of_ranks if isinstance(value, PlainTensor)]
            if not parts:
                items.add(path, same_on_ranks("value", dict(enumerate(values_of_ranks))))
                continue
            name, slot = str(path[-2]), str(path[-1])
            if len(parts) < len(ranks) or len({(part.dtype, part.chunk.box) for part in parts}) > 1:
                raise SourceError("expected tensors of one shape and dtype on all ranks, found others")
            if name in stacks:
                tensors += _unstacked(stacks[name], slot, parts)
            else:
                tensors.append(_rows(name, slot, parts, shapes.get(name) if has_names else None))
    if has_names:
        check_shapes(tensors, shapes)
    return tensors, has_names


def _values(file: TorchFile, names_listed: Sequence[str] | None) -> tuple[dict[KeyPath, object], bool]:
    """Return the values in a rank's file by path, and whether parameters have names."""
    # Versions before one optimizer for all had a list.
    if type(file.content) is list:
        raise SourceError(
            "expected the state of nanochat's MuonAdamW, found a list of optimizers, as nanochat saved before "
            "February 2026; their parts are not read: load them in that version"
        )
    content = mapping(file.content)
    if not is_optimizer(content):
        raise SourceError("expected the state of an optimizer, found something else")
    content, name_by_number = optimizer_with_names(content, names_listed)
    values = dict(decoded(file, content, (_OPTIMIZER,)))
    for path, value in values.items():
        if isinstance(value, PlainTensor) and value.chunk.strides is not None:
            raise SourceError(f"{key_of(path)}: expected elements in row-major order, found others")
    return values, bool(name_by_number)


def _unstacked(params: Sequence[str], slot: str, parts: Sequence[PlainTensor]) -> Iterator[StateRecord]:
    """Yield the state of each matrix of a stack, of which each rank has as many."""
    # The last rank's stack is filled up with zeros.
    num_matrices, *shape = parts[0].chunk.box.shape
    expected = -(-len(params) // len(parts))
    if num_matrices != expected:
        raise DamageError(
            f"expected {expected} of {len(params)} matrices on each of {len(parts)} ranks, found {num_matrices}: the "
            "file of a rank may be missing"
        )
    size = math.prod(shape) * itemsize(parts[0].dtype)
    for number, name in enumerate(params):
        stack = parts[number // num_matrices].chunk
        assert stack.payload is not None, "chunks of files have payloads"
        payload = Extent(stack.payload.file, stack.payload.offset + number % num_matrices * size, size)
        yield _record(name, slot, tuple(shape), parts[0].dtype, (Chunk(Box.of(tuple(shape)), stack.item, payload),))


def _rows(name: str, slot: str, parts: Sequence[PlainTensor], weight: Index | None) -> StateRecord:
    """Return the state of a parameter of AdamW, whole or cut by rows; ``weight`` is its shape, None if not known."""
    # Whole or cut: the weight's shape tells, or that they are small; else nothing does where all ranks have the same.
    local, dtype = parts[0].chunk.box.shape, parts[0].dtype
    stacked = (local[0] * len(parts), *local[1:]) if local else ()
    is_equal = len({part.chunk.crc32 for part in parts}) == 1
    is_whole = local == weight or len(parts) == 1 or math.prod(stacked) < _REPLICATED
    if not is_whole and stacked != weight and math.prod(local) < _REPLICATED and is_equal:
        raise SourceError(
            f"cannot tell whether shape {local}, equal on all ranks, is the whole parameter or a part of it: write the "
            f"names of the parameters to {signs.NAMES_FILE} beside the files (docs/formats/trainers.md)"
        )
    if weight is not None and (local if is_whole else stacked) != weight:
        raise DamageError(
            f"expected the shape {weight} of its weight, or rows of it, found {local} on {len(parts)} ranks: the file "
            "of a rank may be missing"
        )
    if is_whole:
        if not is_equal:
            raise SourceError("expected the same state on all ranks, found others")
        return _record(name, slot, local, dtype, (parts[0].chunk,))
    # Each rank's rows follow those of the rank before.
    chunks, zeros = [], (0,) * (len(local) - 1)
    for rank, part in enumerate(parts):
        box = Box((rank * local[0], *zeros), ((rank + 1) * local[0], *local[1:]))
        chunks.append(replace(part.chunk, box=box))
    return _record(name, slot, stacked, dtype, chunks)


def _record(name: str, slot: str, shape: Index, dtype: str, chunks: Sequence[Chunk]) -> StateRecord:
    path = (_OPTIMIZER, "state", name, slot)
    convention = Convention.EMA if slot == MOMENTUM else None
    return StateRecord(key_of(path), path, shape, dtype, Chunks.of(chunks, len(shape)), name, slot, convention)
