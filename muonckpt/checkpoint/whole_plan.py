"""The plan of all ranks together, which the coordinator keeps: who writes what, and what describes it afterwards.

Tensors that ranks hold alike are proved and laid out once.  A stored box is a row of arrays.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..algebra.box import Box
from ..algebra.fingerprint import as_hex
from ..names.errors import DestinationError, LayoutError, about
from ..names.keys import KeyPlace, is_of_optimizer, key_of, optimizers_of, rank_in, rank_key
from ..names.vocabulary import BY_RANK, KeyPath
from ..record.chunks import Boxes, Chunks
from ..record.columns import Column, Columns
from ..record.record import Blob, Extent, Manifest, StateRecord
from ..store.formats.torch_save import tensor_item
from ..store.formats.torch_save.stored_zip import aligned
from .joint_state import (
    Holder,
    RankBoxes,
    holders_by_key,
    layout_on_ranks,
    other_options,
    refuse_other_groups,
    with_joint_groups,
)
from .live_state import Digests, RankState, ShardSpec, record_of

RankItems = tuple[list[int], list[int]]
"""The numbers of the items that a rank writes, in the order of its file, and of those that it holds as a witness."""

AlikeItems = Mapping[int, list[int]]
"""The items of a rank that are no tensors and that other ranks have alike, by a number for all ranks that have them."""

_ROW = struct.Struct("<16sQQI")
_ROWS = np.dtype([("digest", "<u8", (2,)), ("share", "<u8"), ("length", "<u8"), ("crc32", "<u4")])


def receipt_row(digest: str, share: int = 0, length: int = 0, crc32: int = 0) -> bytes:
    """Return the 36 bytes that a rank's receipt has for an item, in the order of its `RankItems`.

    Args:
        digest: xxh3-128, in hex, of the elements of a tensor, or of the bytes of an object.
        share: of the tensor's fingerprint.
        length: bytes of the item in the file; 0 if this rank does not write it.
        crc32: of the elements of a tensor.
    """
    return _ROW.pack(bytes.fromhex(digest), share, length, crc32)


@dataclass(frozen=True, slots=True)
class _Geometry:
    """The way in which ranks hold the tensors that are cut alike.

    Attributes:
        boxes: those that are stored, by their first index.
        replicas: for each box the positions of its holders, and its number among the holder's boxes.
        sizes, heads: for each box the bytes of its elements, and those of its item before them.
    """

    kind: ShardSpec
    boxes: Boxes
    replicas: tuple[tuple[tuple[int, int], ...], ...]
    sizes: tuple[int, ...]
    heads: tuple[int, ...]


class _PlannedTensor(NamedTuple):
    """A tensor with the boxes that are stored; its chunks and its fingerprint are known when it is written."""

    key: str
    path: KeyPath
    name: str | None
    kind: ShardSpec
    boxes: Boxes


@dataclass(frozen=True, slots=True)
class WholePlan:
    """The plan of all ranks, whose tensors have been proved whole; with their receipts it becomes the manifest.

    Rows are those of all receipts, end to end.

    Attributes:
        shares: the items that each rank writes, and those that it holds as a witness.
        common_items: objects of each rank that were equal on several ranks when the plan was made, and have to be
            whenever it is used: one of these ranks writes them, and nobody compares what is written.
        objects: key, path and row.
        rank, row, head, size: for each stored box the rank that writes it, its row, and the bytes of its item before
            its elements, and of these.
        witnesses: rows of replicas that are not stored, and of those that are: ``[2, replicas]``.
        names: of the rows that have witnesses.
    """

    shares: tuple[RankItems, ...]
    common_items: tuple[AlikeItems, ...]
    tensors: tuple[_PlannedTensor, ...]
    objects: tuple[tuple[str, KeyPath, int], ...]
    rank: NDArray[np.int32]
    row: Column
    head: Column
    size: Column
    witnesses: Column
    names: Mapping[int, str]

    @classmethod
    def of(cls, ranks: Sequence[RankState], digests: Sequence[Digests]) -> WholePlan:
        """Plan who saves what: of replicas one is stored, the others are witnesses.

        Objects that differ from rank to rank are stored for each rank, below `BY_RANK`, and the first one by its key.

        Raises:
            LayoutError: a tensor has a hole or an overlap, or ranks hold different things under one key of which there
                can be one only, such as an option of an optimizer.
        """
        return _Planning(ranks, digests).plan()

    def manifest(self, receipts: Sequence[bytes], provenance: Mapping[str, Any]) -> Manifest:
        """Describe what ranks have written, after comparing replicas.

        Raises:
            LayoutError: replicas of a tensor differ.
            DestinationError: a rank has not done what it planned.
        """
        # A short receipt would shift the rows of all ranks behind it.
        expected = [len(stored) + len(witnessed) for stored, witnessed in self.shares]
        for rank, receipt in enumerate(receipts):
            if len(receipt) != expected[rank] * _ROW.size:
                raise DestinationError(
                    f"rank {rank} planned to write or compare {expected[rank]} items and did so with "
                    f"{len(receipt) / _ROW.size:g}"
                )
        # Receipts become one table, and replicas are compared before anything is described.
        tables = [np.frombuffer(receipt, _ROWS) for receipt in receipts]
        rows, ranks = np.concatenate(tables), np.repeat(np.arange(len(tables)), expected)
        self._compare(rows["digest"], ranks)
        # Ranks lay their items end to end, so lengths alone say where each of them begins.
        starts = np.concatenate([_starts(table["length"]) for table in tables])
        blobs = []
        for key, path, row in self.objects:
            item = Extent(rank_file(int(ranks[row])), int(starts[row]), int(rows["length"][row]))
            blobs.append(Blob(key, path, item, rows["digest"][row].tobytes().hex()))
        return Manifest(tuple(self._described(rows, starts)), tuple(blobs), provenance)

    def _described(self, rows: NDArray[Any], starts: Column) -> Iterator[StateRecord]:
        # One set of columns for all stored boxes: a million of them cost no objects.
        items, digests = starts[self.row], np.ascontiguousarray(rows["digest"]).view(np.uint8)
        storing, file = np.unique(self.rank, return_inverse=True)
        columns = Columns.of_extents(
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
        # Each tensor is a slice of the columns; its fingerprint is the sum of the shares there.
        ends = np.cumsum([0, *(len(tensor.boxes) for tensor in self.tensors)])
        sums = np.append(np.uint64(0), np.cumsum(rows["share"][self.row], dtype=np.uint64))
        prints = map(as_hex, np.diff(sums[ends]).tolist())
        for (key, path, name, kind, boxes), start, fingerprint in zip(
            self.tensors, ends.tolist(), prints, strict=False
        ):
            yield record_of(key, path, name, kind, Chunks(columns, start, boxes), fingerprint)

    def _compare(self, digests: NDArray[Any], ranks: NDArray[np.int64]) -> None:
        """Check that replicas of tensors are equal, as only one of them is stored."""
        rows, stored_rows = self.witnesses
        for number in np.flatnonzero((digests[rows] != digests[stored_rows]).any(axis=1)):
            raise _drifted(
                self.names[int(stored_rows[number])], int(ranks[stored_rows[number]]), int(ranks[rows[number]])
            )


_Placed = tuple[int, int]
"""A rank, and the number of an item of it."""


class _Planning:
    """The making of a plan: every item is given to a rank, and then looked up by its row in the receipts."""

    def __init__(self, ranks: Sequence[RankState], digests: Sequence[Digests]) -> None:
        refuse_other_groups(ranks, digests)
        self._ranks, self._digests = with_joint_groups(ranks), digests
        self._load = [0] * len(ranks)
        """Bytes that each rank writes; an object, whose size is not known, counts for one."""
        self._stored_items: list[tuple[list[int], list[int]]] = [([], []) for _ in ranks]
        """The objects and the boxes that each rank writes."""
        self._stored_boxes: list[_Placed] = []
        """Where each stored box of all tensors is written, in their order."""
        self._witness_items: list[list[int]] = [[] for _ in ranks]
        self._witnesses: list[_Placed] = []
        self._witnessed: list[_Placed] = []
        self._witness_names: list[str] = []
        """Each replica of a box that is not stored, the one that is, and its name."""
        self._objects: list[tuple[str, KeyPath, int]] = []
        """Key, path, and the number of copies that the rank writes right after the object."""
        self._stored_objects: list[_Placed] = []
        self._common_items: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in ranks]
        self._numbers_of_holders: dict[tuple[int, ...], int] = {}

    def plan(self) -> WholePlan:
        # Each tensor or object is given to a rank; layers repeat, so equal geometry is proved whole once.
        described = self._describe_keys()
        optimizers = optimizers_of(path for path, _ in described.values())
        geometries: dict[object, _Geometry | None] = {}
        shared_boxes: dict[Boxes, Boxes] = {}
        """One object for equal boxes: what is made of them later is known by it."""
        tensors, heads, sizes = list[_PlannedTensor](), list[int](), list[int]()
        for key, holders in holders_by_key(self._ranks).items():
            path, name = described[key]
            geometry_key = tuple([(holder.place, holder.number) for holder in holders])
            if geometry_key not in geometries:
                geometries[geometry_key] = _geometry(key, holders, shared_boxes)
            geometry = geometries[geometry_key]
            if geometry is None:
                self._store_object(key, path, [(holder.place, holder.item) for holder in holders], optimizers)
                continue
            self._store_tensor(key, holders, geometry)
            tensors.append(_PlannedTensor(key, path, name, geometry.kind, geometry.boxes))
            heads += geometry.heads
            sizes += geometry.sizes
        # Ranks write objects first, then boxes; receipts follow that order, so rows of items are known now.
        shares: list[RankItems] = []
        for (objects, boxes), witness_items in zip(self._stored_items, self._witness_items, strict=True):
            shares.append((sorted(objects) + sorted(boxes), sorted(witness_items)))
        first_items, row_of_item = self._rows_of_items(shares)

        def rows(items: Sequence[_Placed]) -> Column:
            ranks, numbers = np.array(items, np.int64).reshape(-1, 2).T
            numbered_rows: Column = row_of_item[first_items[ranks] + numbers]
            return numbered_rows

        # All that was given out by rank and item is looked up by row from here on.
        object_rows, witnesses = rows(self._stored_objects), np.stack([rows(self._witnesses), rows(self._witnessed)])
        objects_planned = []
        for (key, path, copies_after), row in zip(self._objects, object_rows.tolist(), strict=True):
            objects_planned.append((key, path, row - copies_after))
        return WholePlan(
            tuple(shares),
            tuple(map(dict, self._common_items)),
            tuple(tensors),
            tuple(objects_planned),
            np.array([rank for rank, _ in self._stored_boxes], np.int32),
            rows(self._stored_boxes),
            np.array(heads, np.int64),
            np.array(sizes, np.int64),
            witnesses,
            dict(zip(witnesses[1].tolist(), self._witness_names, strict=True)),
        )

    def _describe_keys(self) -> dict[str, tuple[KeyPath, str | None]]:
        """Return path and parameter of each key; where ranks call one differently, the first rank's count.

        Raises:
            LayoutError: a user's key stands where a rank's value of another would be written.
        """
        described: dict[str, tuple[KeyPath, str | None]] = {}
        for state in reversed(self._ranks):
            described |= zip(state.keys, zip(state.paths, state.names, strict=True), strict=True)
        for key, (path, _) in described.items():
            if (value := rank_in(path)) is not None and key_of(value.path) in described:
                raise LayoutError(
                    f"{key!r} stands where rank {value.rank}'s value of {key_of(value.path)!r} would be: rename "
                    f"{BY_RANK!r} in the state dict"
                )
        return described

    def _rows_of_items(self, shares: Sequence[RankItems]) -> tuple[Column, Column]:
        """Return the first item of each rank, counted through all ranks, and the row of each item; -1 without one."""
        counts = [state.first_items()[-1] for state in self._ranks]
        first_items = np.cumsum([0, *counts])
        receipts = []
        for first, (stored_items, witness_items) in zip(first_items, shares, strict=False):
            receipts.append(first + np.array([*stored_items, *witness_items], np.int64))
        items = np.concatenate(receipts)
        row_of_item = np.full(first_items[-1], -1, np.int64)
        row_of_item[items] = np.arange(len(items))  # of copies, the last
        return first_items, row_of_item

    def _store_tensor(self, key: str, holders: Sequence[Holder], geometry: _Geometry) -> None:
        """Give each box of a tensor to the rank with least to write of those that have a replica."""
        for number, replicas in enumerate(geometry.replicas):
            items = [(holders[holder].place, holders[holder].item + box) for holder, box in replicas]
            rank, item = stored_item = self._lightest(items) if len(items) > 1 else items[0]
            self._stored_boxes.append(stored_item)
            self._load[rank] += geometry.sizes[number]
            self._stored_items[rank][1].append(item)
            # The other replicas are its witnesses.
            for replica in items if len(items) > 1 else ():
                if replica != stored_item:
                    self._witness_items[replica[0]].append(replica[1])
                    self._witnesses.append(replica)
                    self._witnessed.append(stored_item)
                    self._witness_names.append(f"{key!r} at {geometry.boxes[number].lo}")

    def _store_object(
        self, key: str, path: KeyPath, replicas: Sequence[_Placed], optimizers: Collection[KeyPlace]
    ) -> None:
        """Have one rank write an object where ranks have it equal, otherwise each rank its value."""
        if len({self._digests[rank][item] for rank, item in replicas}) > 1:
            self._store_by_rank(key, path, replicas, optimizers)
            return
        self._write(key, path, self._lightest(replicas))
        # Ranks that have an object in common keep it so, or the plan does not serve again.
        ranks = tuple(rank for rank, _ in replicas)
        number = self._numbers_of_holders.setdefault(ranks, len(self._numbers_of_holders))
        for rank, item in replicas if len(replicas) > 1 else ():
            self._common_items[rank][number].append(item)

    def _lightest(self, replicas: Sequence[_Placed]) -> _Placed:
        """Return the replica whose rank has least to write so far."""
        return min(replicas, key=lambda replica: self._load[replica[0]])

    def _store_by_rank(
        self, key: str, path: KeyPath, replicas: Sequence[_Placed], optimizers: Collection[KeyPlace]
    ) -> None:
        """Have each rank write its value of an object.

        Raises:
            LayoutError: it belongs to parameters, which have one value on all ranks.
        """
        # A parameter's option has one value everywhere: with two, a resumed run would depend on who reads it.
        if is_of_optimizer(path, optimizers):
            (first, first_item), *other_items = replicas
            for rank, item in other_items:
                if self._digests[rank][item] != self._digests[first][first_item]:
                    raise other_options(repr(key), first, rank)
        self._write(key, path, replicas[0], 1)  # what programs read that know no ranks
        for rank, item in replicas:
            self._write(*rank_key(key, path, rank, len(self._ranks)), (rank, item))

    def _write(self, key: str, path: KeyPath, place: _Placed, copies_after: int = 0) -> None:
        rank, item = place
        self._load[rank] += 1
        self._stored_items[rank][0].append(item)
        self._objects.append((key, path, copies_after))
        self._stored_objects.append(place)


def _geometry(key: str, holders: Sequence[Holder], shared_boxes: dict[Boxes, Boxes]) -> _Geometry | None:
    """Return how ranks hold a tensor, after proving it whole; None for an object."""
    # Ranks have to speak of one tensor before boxes can be laid side by side.
    kinds = [holder.kind for holder in holders if holder.kind is not None]
    if not kinds:
        return None
    if len(kinds) < len(holders):
        raise LayoutError(f"{key!r} is a tensor on some ranks and another object on others; give it keys of its own")
    first = kinds[0]
    for kind, holder in zip(kinds, holders, strict=True):
        if (kind.dtype, kind.shape) != (first.dtype, first.shape):
            for lo in {box.lo for box in kind.boxes} & {box.lo for box in first.boxes}:
                raise _drifted(f"{key!r} at {lo}", holders[0].place, holder.place)
            raise LayoutError(
                f"tensor {key!r}: rank {holders[0].place} says {first.dtype} of shape {first.shape}, and rank "
                f"{holder.place} {kind.dtype} of shape {kind.shape}; all ranks have to hold parts of one tensor"
            )
    # The layout is the proof: no hole, no overlap in part.
    rank_boxes, items = [], list[tuple[int, int]]()
    for number, (kind, holder) in enumerate(zip(kinds, holders, strict=True)):
        rank_boxes.append(RankBoxes(holder.place, kind.boxes))
        items += zip(repeat(number), range(len(kind.boxes)), strict=False)
    with about(f"tensor {key!r}"):
        layout = layout_on_ranks(first.shape, tuple(rank_boxes))
    record_of(key, (), None, first)  # refuses more dims than a manifest can have, before work is spent
    # Its rows are the holders' boxes in their order; those of equal boxes are replicas.
    rows, begin = layout.by_box
    replicas_by_box: dict[Box, tuple[tuple[int, int], ...]] = {}
    for rows_of_box in np.split(rows, begin[1:-1]):
        replicas = tuple(map(items.__getitem__, rows_of_box.tolist()))
        if replicas:
            holder_number, box_number = replicas[0]
            replicas_by_box[kinds[holder_number].boxes[box_number]] = replicas
    # Boxes are stored by their first index; the bytes of their items follow from their shapes.
    ordered_boxes = sorted(replicas_by_box, key=lambda box: box.lo)
    sizes, heads = [], []
    for box in ordered_boxes:
        frame = tensor_item.frame(first.dtype, box.shape)
        sizes.append(frame.payload_length)
        heads.append(frame.payload_offset)
    boxes = Boxes.of_all(ordered_boxes, len(first.shape))
    replicas_in_order = tuple(map(replicas_by_box.__getitem__, ordered_boxes))
    return _Geometry(first, shared_boxes.setdefault(boxes, boxes), replicas_in_order, tuple(sizes), tuple(heads))


def rank_file(rank: int) -> str:
    """Return the name of a rank's file, as stock DCP has it."""
    return f"__{rank}_0.distcp"


def _starts(lengths: NDArray[Any]) -> Column:
    """Return where items of these lengths begin in a file; those of length 0 are not stored."""
    unit = aligned(1)
    room: Column = (lengths.astype(np.int64) + unit - 1) // unit * unit
    starts: Column = np.cumsum(room) - room
    return starts


def _drifted(label: str, writer: int, rank: int) -> LayoutError:
    return LayoutError(
        f"{label}: ranks {writer} and {rank} hold different data under one key, of which only one would be saved; "
        "replicas must be equal, as training leaves them if gradients are averaged; a shard is given as the DTensor it "
        "is a part of, as get_state_dict(model, optimizer) has it; and data that differs by rank needs a key of its own"
    )
