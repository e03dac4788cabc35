"""Who holds what: shards by file and rank, the balance over ranks, and tensors folded by module."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ...algebra.box import Box, Index
from ...layouts.buffers.parameters import Parameter, newton_schulz
from ...programs.model_view import ModelView, Role, matrix_sides
from ...record.record import Boxes, Manifest, StateRecord
from ...store.open_checkpoint import StoredPart
from ...store.reading.dtypes import itemsize
from ...store.reading.payloads import tensor_bytes
from ...store.verify.damage import rank_in_name
from .contents import ranges


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A stored box of a tensor: its file, the rank that wrote it, and its place there."""

    box: Box
    file: str
    rank: int | None
    offset: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return {"lo": self.box.lo, "hi": self.box.hi, "rank": self.rank, "file": self.file, "offset": self.offset,
                "bytes": self.bytes}  # fmt: skip


def part_as_json(part: StoredPart) -> dict[str, Any]:
    """Return a part of a tensor as JSON data, with the rank that wrote its file."""
    return {"lo": part.box.lo, "hi": part.box.hi, "rank": rank_in_name(part.file), "file": part.file,
            "offset": part.offset, "bytes": part.bytes, "run": part.run, "runs": part.runs,
            "strides": part.strides}  # fmt: skip


def shards_of(tensor: StateRecord) -> tuple[StoredShard, ...]:
    """Return a tensor's shards in the order of their first elements; ``offset`` is that of elements or item."""
    size = itemsize(tensor.dtype)
    shards = []
    for chunk in sorted(tensor.chunks, key=lambda chunk: (chunk.box.lo, chunk.box.hi)):
        file, offset = chunk.item.file, (chunk.payload or chunk.item).offset
        shards.append(
            StoredShard(chunk.box, file=file, rank=rank_in_name(file), offset=offset, bytes=chunk.box.numel * size)
        )
    return tuple(shards)


def shards_on_rank(manifest: Manifest, rank: int) -> dict[str, tuple[StoredShard, ...]]:
    """Return the shards in the files of a rank, by key."""
    files = {file for file in manifest.columns.names if rank_in_name(file) == rank}
    shards = {}
    for tensor in manifest.tensors:
        if any(chunk.item.file in files for chunk in tensor.chunks):
            shards[tensor.key] = tuple(shard for shard in shards_of(tensor) if shard.rank == rank)
    return shards


def writing_ranks(manifest: Manifest) -> list[int]:
    """Return the ranks that the names of the files tell."""
    ranks = set(map(rank_in_name, manifest.columns.names))
    return sorted(rank for rank in ranks if rank is not None)


def balance_of(shares: Mapping[int, int]) -> dict[str, Any]:
    """Compare the shares of ranks, as JSON data."""
    busiest = max(shares, key=lambda rank: (shares[rank], -rank))
    mean = sum(shares.values()) / len(shares)
    ratio = shares[busiest] / mean if mean else 1.0
    return {"ranks": len(shares), "least": min(shares.values()), "mean": round(mean, 3), "most": shares[busiest],
            "busiest_rank": busiest, "most_to_mean": round(ratio, 4)}  # fmt: skip


def bytes_by_rank(manifest: Manifest) -> dict[int, int]:
    """Return the bytes of elements in the files of each rank; empty if names of files do not tell ranks."""
    by_rank = _sums_by_rank(dict(zip(manifest.columns.names, bytes_by_file(manifest), strict=True)))
    return dict(sorted(by_rank.items())) if by_rank else {}


def _sums_by_rank(by_file: Mapping[str, int]) -> Counter[int] | None:
    """Return the sums of amounts by rank; None if the name of a file tells none."""
    by_rank: Counter[int] = Counter()
    for name, amount in by_file.items():
        rank = rank_in_name(name)
        if rank is None:
            return None
        by_rank[rank] += amount
    return by_rank


def bytes_by_file(manifest: Manifest) -> list[int]:
    """Return the bytes of elements in each file, in the order of the manifest's names of files."""
    sizes = np.array([itemsize(tensor.dtype) for tensor in manifest.tensors], np.int64)
    chunk_bytes = manifest.elements * np.repeat(sizes, [len(tensor.chunks) for tensor in manifest.tensors])
    by_file = np.zeros(len(manifest.columns.names), np.int64)
    np.add.at(by_file, manifest.columns.file, chunk_bytes)
    return [*by_file.tolist()]


def newton_schulz_by_rank(view: ModelView, ranks: Sequence[int]) -> dict[int, int] | None:
    """Return the FLOPs of one Newton-Schulz iteration on the matrices whose momentum each rank holds whole.

    None unless every matrix is whole on a rank: otherwise the training program decides who orthogonalises it.
    """
    # Work by file, if every matrix is whole.
    matrices = [tensor for tensor in view.tensors_of(Role.MOMENTUM) if len(tensor.shape) >= 2]
    if not matrices:
        return None
    by_file: Counter[str] = Counter()
    for tensor in matrices:
        amounts = _newton_schulz_by_box(tensor.shape, tensor.dtype, tensor.boxes)
        if amounts is None:
            return None
        chunks, columns = tensor.chunks, tensor.chunks.columns
        for file, amount in zip(columns.file[chunks.start : chunks.stop].tolist(), amounts, strict=True):
            by_file[columns.names[file]] += amount
    by_rank = _sums_by_rank(by_file)
    return None if by_rank is None else {rank: by_rank[rank] for rank in ranks}


@lru_cache(maxsize=1024)
def _newton_schulz_by_box(shape: Index, dtype: str, boxes: Boxes) -> tuple[int, ...] | None:
    """Return the FLOPs of each box; None if a matrix is cut.  Cached as `_cut_text` is."""
    sizes = boxes.hi - boxes.lo
    is_flattened = matrix_sides(shape) != shape[-2:]
    if is_flattened or (sizes[:, -2:] != shape[-2:]).any():
        return None
    flops = []
    for box_shape in map(tuple, sizes.tolist()):
        flops.append(newton_schulz(Parameter("", box_shape, dtype)) if math.prod(box_shape) else 0)
    return tuple(flops)


def cut_text(tensor: StateRecord) -> str:
    """Say how a tensor is cut into chunks: ``whole``, ``4 parts by rows``, ``2 x 3 parts by rows and columns``."""
    return _cut_text(tensor.shape, tensor.boxes)


@lru_cache(maxsize=1024)
def _cut_text(shape: Index, all_boxes: Boxes) -> str:
    """Say how a tensor is cut.  Cached: the tensors of a model are cut in few ways."""
    boxes = [box for box in all_boxes if box.numel]
    if not math.prod(shape):
        return "without elements"
    if len(boxes) == 1:
        return "whole"
    # In a grid there are as many boxes as the product of the numbers of starts along the dims.
    counts = [len({*starts}) for starts in zip(*(box.lo for box in boxes), strict=True)]
    if math.prod(counts) != len(boxes):
        return f"{len(boxes)} boxes of their own shapes"
    dims = {1: ("elements",), 2: ("rows", "columns")}.get(len(shape)) or [f"dim {dim}" for dim in range(len(shape))]
    cuts = {dim: str(count) for dim, count in zip(dims, counts, strict=True) if count > 1}
    return f"{' x '.join(cuts.values())} parts by {' and '.join(cuts)}"


@dataclass(frozen=True, slots=True)
class Branch:
    """A module or a tensor.

    Attributes:
        name: its part of the key; ``0-11`` or ``0,2,4-7`` for equal modules with these numbers.
        count: how many equal ones this represents within its parent; the other fields describe one of them.
        shape, dtype: None of a module.
    """

    name: str
    count: int
    tensors: int
    bytes: int
    shape: tuple[int, ...] | None
    dtype: str | None
    branches: tuple[Branch, ...]


def module_tree(tensors: Iterable[StateRecord]) -> tuple[Branch, ...]:
    """Fold tensors into a tree of the parts of their keys."""
    return _folded_branches([(tensor.key.split("."), tensor) for tensor in tensors])


_Entry = tuple[Sequence[str], StateRecord]


def _folded_branches(entries: Sequence[_Entry]) -> tuple[Branch, ...]:
    """Return the branches of these entries; numbered ones that are alike become one with a count."""
    children: defaultdict[str, list[_Entry]] = defaultdict(list)
    for parts, tensor in entries:
        children[parts[0]].append((parts[1:], tensor))
    # Numbered branches that are equal but for their numbers become one.
    groups: defaultdict[Any, list[Branch]] = defaultdict(list)
    for name, below in children.items():
        for branch in _branches(name, below):
            is_numbered = branch.name.isdecimal()
            content = (branch.bytes, branch.shape, branch.dtype, branch.branches) if is_numbered else branch.name
            groups[is_numbered, content].append(branch)
    merged = []
    for first, *others in groups.values():
        if others:
            numbers = [int(branch.name) for branch in (first, *others)]
            first = replace(first, name=ranges(sorted(numbers)), count=len(numbers))
        merged.append(first)
    return tuple(merged)


def _branches(name: str, below: Sequence[_Entry]) -> Iterator[Branch]:
    """Yield the tensors that end at a part of keys, and the module of the other tensors."""
    deeper: list[_Entry] = []
    for parts, tensor in below:
        if parts:
            deeper.append((parts, tensor))
        else:
            num_bytes = tensor_bytes(tensor)
            yield Branch(name, 1, tensors=1, bytes=num_bytes, shape=tensor.shape, dtype=tensor.dtype, branches=())
    inner = _folded_branches(deeper)
    is_chain = len(inner) == 1 and inner[0].count == 1
    if is_chain and not name.isdecimal() and not inner[0].name[:1].isdecimal():  # on one line; numbers can be folded
        yield replace(inner[0], name=f"{name}.{inner[0].name}")
    elif inner:
        tensors = sum(branch.tensors * branch.count for branch in inner)
        num_bytes = sum(branch.bytes * branch.count for branch in inner)
        yield Branch(name, count=1, tensors=tensors, bytes=num_bytes, shape=None, dtype=None, branches=inner)
