"""Which file and rank holds what: shards of a tensor, contents of a rank, and the balance over ranks."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...box import Box, Index
from ...layouts.buffers.parameters import Parameter, newton_schulz
from ...record import Boxes, Manifest, StateRecord
from ...store.reading.dtypes import itemsize
from .contents import Contents, Role

_RANK_IN_NAME = re.compile(
    r"(?:.*/)?(?:__([0-9]{1,7})_[0-9]+\.distcp|(?:rank|layer_wise_optimizer)_([0-9]{1,7})\.[a-z]+)"
)
"""Names of files that a rank writes alone, in the formats that say so: DCP, flat buffers, layer-wise files."""


@lru_cache(maxsize=1 << 16)
def rank_in_name(file: str) -> int | None:
    """The rank that wrote a file, if the name of the file tells."""
    match = _RANK_IN_NAME.fullmatch(file)
    return None if match is None else int(match[1] or match[2])


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A stored box of a tensor: its range in each dim, its ``file`` and the ``rank`` that wrote it, and its size."""

    box: Box
    file: str
    rank: int | None
    offset: int
    bytes: int

    def holds(self, index: Sequence[int]) -> bool:
        """Whether it has elements at these indices of the first dims."""
        bounds = zip(index, self.box.lo, self.box.hi, strict=False)
        return bool(self.box.numel) and all(lo <= wanted < hi for wanted, lo, hi in bounds)

    def to_json(self) -> dict[str, Any]:
        return {"lo": self.box.lo, "hi": self.box.hi, "rank": self.rank, "file": self.file, "offset": self.offset,
                "bytes": self.bytes}  # fmt: skip


def shards_of(tensor: StateRecord) -> tuple[StoredShard, ...]:
    """The shards of a tensor, in the order of their first elements; ``offset`` is that of the item in its file."""
    size = itemsize(tensor.dtype)
    chunks = sorted(tensor.chunks, key=lambda chunk: (chunk.box.lo, chunk.box.hi))
    return tuple(
        StoredShard(
            chunk.box,
            chunk.item.file,
            rank_in_name(chunk.item.file),
            (chunk.payload or chunk.item).offset,
            chunk.box.numel * size,
        )
        for chunk in chunks
    )


def held_by(manifest: Manifest, rank: int) -> dict[str, tuple[StoredShard, ...]]:
    """What the files of a rank hold, by key."""
    files = {file for file in _files(manifest) if rank_in_name(file) == rank}
    held = {}
    for tensor in manifest.tensors:
        if any(chunk.item.file in files for chunk in tensor.chunks):
            held[tensor.key] = tuple(shard for shard in shards_of(tensor) if shard.rank == rank)
    return held


def writing_ranks(manifest: Manifest) -> list[int]:
    """The ranks whose files hold something."""
    return sorted({rank for file in _files(manifest) if (rank := rank_in_name(file)) is not None})


def _files(manifest: Manifest) -> set[str]:
    return set(manifest.columns.names)


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly ranks hold something: the number of ranks, the least, the mean and the most, and who has the most."""

    ranks: int
    least: int
    mean: float
    most: int
    busiest: int

    @property
    def ratio(self) -> float:
        """The most in terms of the mean."""
        return self.most / self.mean if self.mean else 1.0

    def to_json(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "least": self.least, "mean": round(self.mean, 3), "most": self.most,
                "busiest_rank": self.busiest, "most_to_mean": round(self.ratio, 4)}  # fmt: skip


def balance_of(shares: Mapping[int, int]) -> Balance | None:
    """The balance of these shares by rank; None if there are no ranks."""
    if not shares:
        return None
    busiest = max(shares, key=lambda rank: (shares[rank], -rank))
    mean = sum(shares.values()) / len(shares)
    return Balance(len(shares), min(shares.values()), mean, shares[busiest], busiest)


def bytes_by_rank(manifest: Manifest) -> dict[int, int]:
    """The bytes of elements in the files of each rank."""
    columns = manifest.columns
    held = np.zeros(len(columns.names), np.int64)
    np.add.at(held, columns.file, chunk_bytes(manifest))
    return _by_rank(dict(zip(columns.names, held.tolist(), strict=True)))


def chunk_bytes(manifest: Manifest) -> NDArray[np.int64]:
    """The bytes of elements of each chunk, in the order of the manifest's columns."""
    sizes = [itemsize(tensor.dtype) for tensor in manifest.tensors]
    return manifest.elements * np.repeat(np.array(sizes, np.int64), [len(tensor.chunks) for tensor in manifest.tensors])


def newton_schulz_by_rank(contents: Contents, ranks: Sequence[int]) -> dict[int, int] | None:
    """FLOPs of one Newton-Schulz iteration on the matrices whose momentum each rank holds whole.

    None unless every matrix is whole on a rank: otherwise the training program decides who orthogonalises it.
    """
    matrices = [tensor for tensor in contents.tensors.get(Role.MOMENTUM, ()) if len(tensor.shape) >= 2]
    amounts = [_newton_schulz(tensor.shape, tensor.dtype, tensor.boxes) for tensor in matrices]
    if not matrices or None in amounts:
        return None
    of_files: defaultdict[str, int] = defaultdict(int)
    for tensor, of_chunks in zip(matrices, amounts, strict=True):
        chunks, columns = tensor.chunks, tensor.chunks.columns
        for file, own in zip(columns.file[chunks.start : chunks.stop].tolist(), of_chunks or (), strict=True):
            of_files[columns.names[file]] += own
    work = dict.fromkeys(ranks, 0)
    for name, amount in of_files.items():
        rank = rank_in_name(name)
        if rank is None:
            return None
        work[rank] += amount
    return work


@lru_cache(maxsize=1024)
def _newton_schulz(shape: Index, dtype: str, boxes: Boxes) -> tuple[int, ...] | None:
    """FLOPs of one iteration on the matrices in each box; None if a matrix is cut.  Cached: see `_cut`."""
    sizes = boxes.hi - boxes.lo
    if (sizes[:, -2:] != shape[-2:]).any():
        return None
    return tuple(newton_schulz(Parameter("", tuple(own), dtype)) if math.prod(own) else 0 for own in sizes.tolist())


def _by_rank(held: Mapping[str, int]) -> dict[int, int]:
    by_rank: defaultdict[int, int] = defaultdict(int)
    for file, amount in held.items():
        rank = rank_in_name(file)
        if rank is None:
            return {}
        by_rank[rank] += amount
    return dict(sorted(by_rank.items()))


def cut_in_words(tensor: StateRecord) -> str:
    """How a tensor is cut into chunks: ``whole``, ``4 parts by rows``, ``2 x 3 parts by rows and columns``."""
    return _cut(tensor.shape, tensor.boxes)


@lru_cache(maxsize=1024)
def _cut(shape: Index, every: Boxes) -> str:
    """Cached: the tensors of a model are cut in few ways."""
    boxes = [box for box in every if box.numel]
    if not math.prod(shape):
        return "without elements"
    if len(boxes) == 1:
        return "whole"
    counts = [len({box.lo[dim] for box in boxes}) for dim in range(len(shape))]
    cuts = [(count, _dim_in_words(dim, len(shape))) for dim, count in enumerate(counts) if count > 1]
    if math.prod(counts) != len(boxes):
        return f"{len(boxes)} boxes of their own shapes"
    return f"{' x '.join(str(count) for count, _ in cuts)} parts by {' and '.join(word for _, word in cuts)}"


def _dim_in_words(dim: int, dims: int) -> str:
    words = {1: ("elements",), 2: ("rows", "columns")}.get(dims, ())
    return words[dim] if words else f"dim {dim}"
