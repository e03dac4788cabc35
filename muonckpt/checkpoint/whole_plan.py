"""The plan of all ranks together, which the coordinator keeps: who writes what, and what describes it afterwards.

Tensors that ranks hold alike are proved and laid out once, and what is known of each stored box is a row of arrays.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..box import Index
from ..chunks import Boxes, Chunks
from ..columns import Column, Columns
from ..errors import LayoutError, about
from ..fingerprint import as_hex
from ..record import Blob, Extent, Manifest, StateRecord
from ..store.formats.torch_save import tensor_item
from ..store.formats.torch_save.stored_zip import aligned
from ..vocabulary import KeyPath
from .live_state import HeldTensor, Holder, RankBoxes, RankState, held_layout, holders_by_key, record_of
from .rank_file import unpacked

RankItems = tuple[list[int], list[int]]
"""The numbers of the items that a rank writes, in the order of its file, and of the replicas that it holds but another
rank writes."""


@dataclass(frozen=True, slots=True)
class _Geometry:
    """How ranks hold the tensors that are cut alike.

    Attributes:
        kind: dtype, shape and annotation of the tensors.
        boxes: those that are stored, by their first index.
        replicas: for each box the holders that have it, by their positions, and its number among those of the holder.
        sizes, heads: for each box the bytes of its elements, and those of its item before them.
    """

    kind: HeldTensor
    boxes: Boxes
    replicas: tuple[tuple[tuple[int, int], ...], ...]
    sizes: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WholePlan:
    """The plan of all ranks, whose tensors have been proved whole; with their receipts it becomes the manifest.

    Rows are those of all receipts, end to end.

    Attributes:
        tensors: without chunks and fingerprints, with the boxes that are stored.
        objects: key, path and row.
        rank, row, head, size: for each stored box the rank that stores it, its row, and the bytes of its item before
            its elements, and of these.
        witnesses: rows of replicas that are not stored, and of those that are: ``[2, replicas]``.
        names: for rows that others witness what to call them, and whether they are of a tensor.
    """

    shares: tuple[RankItems, ...]
    tensors: tuple[tuple[StateRecord, Boxes], ...]
    objects: tuple[tuple[str, KeyPath, int], ...]
    rank: NDArray[np.int32]
    row: Column
    head: Column
    size: Column
    witnesses: Column
    names: Mapping[int, tuple[str, bool]]

    @classmethod
    def of(cls, ranks: Sequence[RankState]) -> WholePlan:
        """Plan together what ranks could save: of replicas one is stored, the others are witnesses.

        Raises:
            LayoutError: a tensor has a hole or an overlap, or ranks hold different things under one key.
        """
        return _Planning(ranks).plan()

    def manifest(self, receipts: Sequence[bytes], provenance: Mapping[str, Any]) -> Manifest:
        """Describe what ranks have written, after comparing replicas.

        Args:
            receipts: of all ranks.

        Raises:
            LayoutError: replicas of a tensor differ.
            DestinationError: a rank has not done what it planned.
        """
        tables = [
            unpacked(receipt, len(written) + len(seen), rank)
            for rank, (receipt, (written, seen)) in enumerate(zip(receipts, self.shares, strict=True))
        ]
        rows = np.concatenate(tables)
        self._compare(rows["digest"])
        starts = np.concatenate([_starts(table["length"]) for table in tables])
        return Manifest(tuple(self._described(rows, starts)), tuple(self._blobs(rows, starts)), provenance)

    def _described(self, rows: NDArray[Any], starts: Column) -> Iterator[StateRecord]:
        items, digests = starts[self.row], np.ascontiguousarray(rows["digest"]).view(np.uint8)
        storing, file = np.unique(self.rank, return_inverse=True)
        columns = Columns(
            tuple(map(rank_file, storing.tolist())),
            file.astype(np.int32),
            items,
            rows["length"][self.row].astype(np.int64),
            items + self.head,
            self.size,
            digests[self.row],
            np.ones(len(self.row), np.bool_),
            rows["crc32"][self.row].astype(np.int64),
        )
        ends = np.cumsum([0, *(len(boxes) for _, boxes in self.tensors)])
        sums = np.append(np.uint64(0), np.cumsum(rows["share"][self.row], dtype=np.uint64))
        prints = map(as_hex, np.diff(sums[ends]).tolist())
        for (record, boxes), start, fingerprint in zip(self.tensors, ends.tolist(), prints, strict=False):
            yield replace(record, chunks=Chunks(columns, start, boxes), fingerprint=fingerprint)

    def _blobs(self, rows: NDArray[Any], starts: Column) -> Iterator[Blob]:
        ends = np.cumsum([len(written) + len(seen) for written, seen in self.shares])
        for key, path, row in self.objects:
            file = rank_file(int(np.searchsorted(ends, row, side="right")))
            item = Extent(file, int(starts[row]), int(rows["length"][row]))
            yield Blob(key, path, item, rows["digest"][row].tobytes().hex())

    def _compare(self, digests: NDArray[Any]) -> None:
        """Check that replicas are equal: DCP stores one of them, and would lose the others silently."""
        mine, theirs = self.witnesses
        ends = np.cumsum([len(written) + len(seen) for written, seen in self.shares])
        for number in np.flatnonzero((digests[mine] != digests[theirs]).any(axis=1)):
            where, tensor = self.names[int(theirs[number])]
            rank, writer = (int(np.searchsorted(ends, rows[number], side="right")) for rows in (mine, theirs))
            if tensor:
                raise _drifted(where, writer, rank)
            warnings.warn(
                f"{_difference(where, writer, rank)} that is not a tensor; the copy of rank {writer} was saved",
                stacklevel=2,
            )


_Placed = tuple[int, int]
"""A rank, and the number of an item of it."""


class _Planning:
    def __init__(self, ranks: Sequence[RankState]) -> None:
        self._ranks = ranks
        self._held = holders_by_key(ranks)
        self._load = [0] * len(ranks)
        """Bytes that each rank writes; an object counts for one, as its size is not known."""
        self._written: list[tuple[list[int], list[int]]] = [([], []) for _ in ranks]
        """For each rank the numbers of the objects and of the tensors' boxes that it writes."""
        self._seen: list[list[int]] = [[] for _ in ranks]
        self._pairs: list[tuple[_Placed, _Placed, str, Index | None]] = []
        """Each replica that is not stored, the one that is, their key, and their first index."""

    def plan(self) -> WholePlan:
        described: dict[str, tuple[KeyPath, str | None]] = {}
        for state in reversed(self._ranks):
            described |= zip(state.keys, zip(state.paths, state.names, strict=True), strict=True)
        geometries: dict[Any, _Geometry] = {}
        tensors, stored, heads, sizes, objects = [], list[_Placed](), list[int](), list[int](), []
        for key, held in self._held.items():
            if self._kind(held[0]) is None:
                objects.append((key, described[key][0], self._stored_object(key, held)))
                continue
            name = tuple((rank, kind) for rank, _, kind in held)
            if name not in geometries:
                geometries[name] = self._geometry(key, held)
            geometry = geometries[name]
            for number, replicas in enumerate(geometry.replicas):
                items = [(held[holder].place, held[holder].item + box) for holder, box in replicas]
                lo = geometry.boxes[number].lo if len(items) > 1 else ()
                rank, item = items[0] if len(items) == 1 else self._chosen(key, lo, items)
                stored.append((rank, item))
                self._load[rank] += geometry.sizes[number]
                self._written[rank][1].append(item)
            heads += geometry.heads
            sizes += geometry.sizes
            tensors.append((record_of(key, *described[key], geometry.kind), geometry.boxes))
        shares = tuple(
            (sorted(blobs) + sorted(boxes), sorted(seen))
            for (blobs, boxes), seen in zip(self._written, self._seen, strict=True)
        )
        rows = _Rows(self._ranks, shares)
        witnesses = np.stack(
            [rows.of([mine for mine, _, _, _ in self._pairs]), rows.of([theirs for _, theirs, _, _ in self._pairs])]
        )
        names = {
            row: (_where(key, lo), lo is not None)
            for row, (_, _, key, lo) in zip(witnesses[1].tolist(), self._pairs, strict=True)
        }
        return WholePlan(
            shares,
            tuple(tensors),
            tuple((key, path, int(rows.of([item])[0])) for key, path, item in objects),
            np.array([rank for rank, _ in stored], np.int32),
            rows.of(stored),
            np.array(heads, np.int64),
            np.array(sizes, np.int64),
            witnesses,
            names,
        )

    def _kind(self, holder: Holder) -> HeldTensor | None:
        return self._ranks[holder.place].kinds[holder.number]

    def _stored_object(self, key: str, held: Sequence[Holder]) -> _Placed:
        if any(self._kind(other) is not None for other in held):
            raise _mixed(key)
        rank, item = self._chosen(key, None, [(holder.place, holder.item) for holder in held])
        self._load[rank] += 1
        self._written[rank][0].append(item)
        return rank, item

    def _chosen(self, key: str, lo: Index | None, replicas: Sequence[_Placed]) -> _Placed:
        """Return the replica whose rank has least to write so far; the others become its witnesses."""
        chosen = min(replicas, key=lambda replica: self._load[replica[0]])
        for other in replicas:
            if other != chosen:
                self._seen[other[0]].append(other[1])
                self._pairs.append((other, chosen, key, lo))
        return chosen

    def _geometry(self, key: str, held: Sequence[Holder]) -> _Geometry:
        """Return how ranks hold a tensor, after proving that they hold all of it."""
        kinds = [kind for holder in held if (kind := self._kind(holder)) is not None]
        if len(kinds) < len(held):
            raise _mixed(key)
        first = kinds[0]
        for kind, holder in zip(kinds, held, strict=True):
            if (kind.dtype, kind.shape) != (first.dtype, first.shape):
                for lo in {box.lo for box in kind.boxes} & {box.lo for box in first.boxes}:
                    raise _drifted(_where(key, lo), held[0].place, holder.place)
                raise LayoutError(
                    f"tensor {key!r}: rank {held[0].place} says {first.dtype} of shape {first.shape}, and rank "
                    f"{holder.place} {kind.dtype} of shape {kind.shape}; all ranks have to hold parts of one tensor"
                )
        boxes = tuple(RankBoxes(holder.place, kind.boxes) for kind, holder in zip(kinds, held, strict=True))
        with about(f"tensor {key!r}"):
            layout = held_layout(first.shape, boxes)
        items = [(number, box) for number, kind in enumerate(kinds) for box in range(len(kind.boxes))]
        rows, begin = layout.by_box
        replicas = [tuple(items[row] for row in of_box.tolist()) for of_box in np.split(rows, begin[1:-1])]
        stored = sorted(
            ((kinds[of_box[0][0]].boxes[of_box[0][1]], of_box) for of_box in replicas if of_box),
            key=lambda pair: pair[0].lo,
        )
        frames = [tensor_item.frame(first.dtype, box.shape) for box, _ in stored]
        return _Geometry(
            first,
            Boxes.of_all([box for box, _ in stored], len(first.shape)),
            tuple(of_box for _, of_box in stored),
            tuple(frame.payload_length for frame in frames),
            tuple(frame.payload_offset for frame in frames),
        )


class _Rows:
    """The rows of the ranks' items in their receipts, end to end."""

    def __init__(self, ranks: Sequence[RankState], shares: Sequence[RankItems]) -> None:
        self._begin = np.cumsum([0, *(state.first_items()[-1] for state in ranks)])
        self._rows = np.full(self._begin[-1], -1, np.int64)
        first = 0
        for begin, (written, seen) in zip(self._begin, shares, strict=False):
            numbers = np.array([*written, *seen], np.int64)
            self._rows[begin + numbers] = np.arange(first, first + len(numbers))
            first += len(numbers)

    def of(self, items: Sequence[_Placed]) -> Column:
        ranks, numbers = np.array(items, np.int64).reshape(-1, 2).T
        rows: Column = self._rows[self._begin[ranks] + numbers]
        return rows


def rank_file(rank: int) -> str:
    """Return the name of a rank's file, as stock DCP has it."""
    return f"__{rank}_0.distcp"


def _starts(lengths: NDArray[Any]) -> Column:
    """Return where items of these lengths begin, end to end and aligned; those of length 0 are not stored."""
    unit = aligned(1)
    room: Column = (lengths.astype(np.int64) + unit - 1) // unit * unit
    starts: Column = np.cumsum(room) - room
    return starts


def _where(key: str, lo: Index | None) -> str:
    return f"{key!r} at {lo or ()}"


def _difference(where: str, writer: int, rank: int) -> str:
    return f"{where}: ranks {writer} and {rank} hold different data"


def _drifted(where: str, writer: int, rank: int) -> LayoutError:
    return LayoutError(
        f"{_difference(where, writer, rank)} under one key, of which only one would be saved; replicas must be equal, "
        "and data that differs by rank needs a key of its own"
    )


def _mixed(key: str) -> LayoutError:
    return LayoutError(f"{key!r} is a tensor on some ranks and another object on others; give it keys of its own")
