"""The plan of all ranks together, which the coordinator keeps: who writes what, and what describes it afterwards.

Tensors that ranks hold alike are proved and laid out once, and what is known of each stored box is a row of arrays.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..chunks import Boxes, Chunks, no_chunks
from ..columns import Column, Columns
from ..errors import LayoutError, about
from ..fingerprint import as_hex
from ..layout import TensorLayout, dense
from ..record import Blob, Extent, Manifest, StateRecord
from ..store.formats.torch_save import tensor_item
from ..store.formats.torch_save.stored_zip import aligned
from ..vocabulary import KeyPath
from .annotation import Annotation
from .offer import HeldPart, ItemKind, Offer
from .receipt import unpacked

RankItems = tuple[list[int], list[int]]
"""Of one rank's `LocalPlan`, the numbers of the items that it writes, in the order of its file, and of the replicas
that it holds but another rank writes."""

_Held = tuple[int, int, int]
"""A rank, the number of an item of it, and the number of the item's kind among those of the rank."""


@dataclass(frozen=True, slots=True)
class _Geometry:
    """How ranks hold the tensors that are cut alike.

    Attributes:
        boxes: those that are stored, by their first index.
        replicas: of each box, which of the tensor's items have it.
        part: dtype and shape of the tensor.
        sizes: of each box, bytes of its elements.
        heads: of each box, bytes of its item before them.
    """

    boxes: Boxes
    replicas: tuple[tuple[int, ...], ...]
    part: HeldPart
    sizes: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WholePlan:
    """The plan of all ranks, whose tensors have been proved whole; with their receipts it becomes the manifest.

    Rows are those of all receipts, end to end.

    Attributes:
        tensors: without chunks and fingerprints, with the boxes that are stored.
        objects: key, path and row.
        rank, row, head, size: of each stored box of all tensors, who stores it, in which row, behind how many bytes of
            its item, and the bytes of its elements.
        witnesses: rows of replicas that are not stored, and of those that are: ``[2, replicas]``.
        names: of the rows that others witness, what to call them, and whether they are of a tensor.
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
    def of(cls, ranks: Sequence[Offer]) -> WholePlan:
        """Plan together what ranks could save: of replicas one is stored, the others are witnesses.

        Raises:
            LayoutError: a tensor has a hole or an overlap, or ranks hold different things under one key.
        """
        held: defaultdict[str, list[_Held]] = defaultdict(list)
        for rank, offer in enumerate(ranks):
            for number, (key, kind) in enumerate(zip(offer.keys, offer.kinds, strict=True)):
                held[key].append((rank, number, kind))
        for key in (key for offer in ranks for key in offer.paths if key not in held):
            raise LayoutError(f"tensor {key!r}: no rank holds any of its elements")
        return _Planning(ranks, held).plan()

    def manifest(self, receipts: Sequence[bytes], provenance: Mapping[str, Any]) -> Manifest:
        """What ranks have written, after comparing replicas.

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


class _Planning:
    """One planning of all ranks.

    Args:
        held: of each key, by ranks and the order of their items.
    """

    def __init__(self, ranks: Sequence[Offer], held: Mapping[str, Sequence[_Held]]) -> None:
        self._ranks, self._held = ranks, held
        self._load = [0] * len(ranks)
        """Bytes that each rank writes; an object counts for one, as its size is not known."""
        self._written: list[tuple[list[int], list[int]]] = [([], []) for _ in ranks]
        """Of each rank, the numbers of the objects and of the tensors' boxes that it writes."""
        self._seen: list[list[int]] = [[] for _ in ranks]
        self._pairs: list[tuple[_Held, _Held, str]] = []
        """Of each replica that is not stored: it, the one that is, and the key."""

    def plan(self) -> WholePlan:
        geometries: dict[Any, _Geometry] = {}
        tensors, stored, heads, sizes, objects = [], list[_Held](), list[int](), list[int](), []
        for key, held in self._held.items():
            if self._kind(held[0]).part is None:
                objects.append((key, self._path(key), self._stored_object(key, held)))
                continue
            name = tuple((rank, kind) for rank, _, kind in held)
            if name not in geometries:
                geometries[name] = self._geometry(key, held)
            geometry = geometries[name]
            for replicas, size in zip(geometry.replicas, geometry.sizes, strict=True):
                stored.append(held[replicas[0]] if len(replicas) == 1 else self._chosen(key, held, replicas))
                rank, number, _ = stored[-1]
                self._load[rank] += size
                self._written[rank][1].append(number)
            heads += geometry.heads
            sizes += geometry.sizes
            tensors.append((self._record(key, held, geometry.part), geometry.boxes))
        shares = tuple(
            (sorted(blobs) + sorted(boxes), sorted(seen))
            for (blobs, boxes), seen in zip(self._written, self._seen, strict=True)
        )
        rows = _Rows(self._ranks, shares)
        witnesses = np.stack(
            [rows.of([mine for mine, _, _ in self._pairs]), rows.of([stored for _, stored, _ in self._pairs])]
        )
        names = {
            row: (self._kind(writer).where(key), self._kind(writer).part is not None)
            for row, (_, writer, key) in zip(witnesses[1].tolist(), self._pairs, strict=True)
        }
        return WholePlan(
            shares,
            tuple(tensors),
            tuple((key, path, int(rows.of([place])[0])) for key, path, place in objects),
            np.array([rank for rank, _, _ in stored], np.int32),
            rows.of(stored),
            np.array(heads, np.int64),
            np.array(sizes, np.int64),
            witnesses,
            names,
        )

    def _kind(self, held: _Held) -> ItemKind:
        rank, _, kind = held
        return self._ranks[rank].distinct_kinds[kind]

    def _path(self, key: str) -> KeyPath:
        return next((tuple(offer.paths[key]) for offer in self._ranks if key in offer.paths), (key,))

    def _record(self, key: str, held: Sequence[_Held], part: HeldPart) -> StateRecord:
        note = next((note for rank, _, _ in held if (note := self._ranks[rank].note(key))), Annotation())
        told = {each.name: getattr(note, each.name) for each in fields(note)}
        return StateRecord(key, self._path(key), part.shape, part.dtype, no_chunks(len(part.shape)), **told)

    def _stored_object(self, key: str, held: Sequence[_Held]) -> _Held:
        for other in held:
            if self._kind(other).part is not None:
                raise _mixed(key)
        chosen = self._chosen(key, held, range(len(held)))
        self._load[chosen[0]] += 1
        self._written[chosen[0]][0].append(chosen[1])
        return chosen

    def _chosen(self, key: str, held: Sequence[_Held], replicas: Sequence[int]) -> _Held:
        """Of replicas the one whose rank has least to write so far; the others become its witnesses."""
        place = min(replicas, key=lambda place: self._load[held[place][0]])
        for other in replicas:
            if other != place:
                rank, number, _ = held[other]
                self._seen[rank].append(number)
                self._pairs.append((held[other], held[place], key))
        return held[place]

    def _geometry(self, key: str, held: Sequence[_Held]) -> _Geometry:
        """How ranks hold a tensor, after proving that they hold all of it."""
        kinds, parts = list(map(self._kind, held)), list[HeldPart]()
        by_offset: defaultdict[Any, list[int]] = defaultdict(list)
        for place, kind in enumerate(kinds):
            if kind.part is None:
                raise _mixed(key)
            parts.append(kind.part)
            if not kind.empty:
                by_offset[kind.offset].append(place)
        for first, *others in by_offset.values():
            for other in others:
                if (parts[other].dtype, parts[other].box) != (parts[first].dtype, parts[first].box):
                    raise _drifted(kinds[first].where(key), held[first][0], held[other][0])
        whole = parts[0]
        for part, (rank, _, _) in zip(parts, held, strict=True):
            if (part.dtype, part.shape) != (whole.dtype, whole.shape):
                raise LayoutError(
                    f"tensor {key!r}: rank {held[0][0]} says {whole.dtype} of shape {whole.shape}, and rank {rank} "
                    f"{part.dtype} of shape {part.shape}; all ranks have to hold parts of one tensor"
                )
        stored = sorted(by_offset.values(), key=lambda replicas: parts[replicas[0]].box.lo)
        boxes = [parts[replicas[0]].box for replicas in stored]
        with about(f"tensor {key!r}"):
            first_holders = [held[replicas[0]][0] for replicas in stored]
            TensorLayout.of(
                whole.shape, tuple(dense(box, f"rank {rank}") for box, rank in zip(boxes, first_holders, strict=True))
            )
        frames = [tensor_item.frame(whole.dtype, box.shape) for box in boxes]
        return _Geometry(
            Boxes.of_all(boxes, len(whole.shape)),
            tuple(map(tuple, stored)),
            whole,
            tuple(frame.payload_length for frame in frames),
            tuple(frame.payload_offset for frame in frames),
        )


class _Rows:
    """Where the items of ranks are in their receipts, end to end."""

    def __init__(self, ranks: Sequence[Offer], shares: Sequence[RankItems]) -> None:
        self._begin = np.cumsum([0, *(len(offer.keys) for offer in ranks)])
        self._rows = np.full(self._begin[-1], -1, np.int64)
        told = 0
        for begin, (written, seen) in zip(self._begin, shares, strict=False):
            numbers = np.array([*written, *seen], np.int64)
            self._rows[begin + numbers] = np.arange(told, told + len(numbers))
            told += len(numbers)

    def of(self, held: Sequence[_Held]) -> Column:
        """The rows of items."""
        ranks, numbers, _ = np.array(held, np.int64).reshape(-1, 3).T
        rows: Column = self._rows[self._begin[ranks] + numbers]
        return rows


def rank_file(rank: int) -> str:
    """The name of a rank's file, as stock DCP gives it."""
    return f"__{rank}_0.distcp"


def _starts(lengths: NDArray[Any]) -> Column:
    """Where items of these lengths begin, end to end and aligned; those of length 0 are not stored."""
    unit = aligned(1)
    room: Column = (lengths.astype(np.int64) + unit - 1) // unit * unit
    starts: Column = np.cumsum(room) - room
    return starts


def _difference(where: str, writer: int, rank: int) -> str:
    return f"{where}: ranks {writer} and {rank} hold different data"


def _drifted(where: str, writer: int, rank: int) -> LayoutError:
    return LayoutError(
        f"{_difference(where, writer, rank)} under one key, of which only one would be saved; replicas must be equal, "
        "and data that differs by rank needs a key of its own"
    )


def _mixed(key: str) -> LayoutError:
    return LayoutError(f"{key!r} is a tensor on some ranks and another object on others; give it keys of its own")
