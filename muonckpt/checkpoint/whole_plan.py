"""The plan of all ranks together, which the coordinator keeps: who writes what, and what describes it afterwards.

Tensors that ranks hold alike are proved and laid out once.  A stored box is a row of arrays.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..algebra.box import Index
from ..algebra.fingerprint import as_hex
from ..algebra.overlap import expanded
from ..names.errors import DestinationError, LayoutError, about
from ..names.keys import KeyPlace, is_of_optimizer, key_of, optimizers_of, rank_in, rank_key
from ..names.vocabulary import BY_RANK, KeyPath
from ..record.chunks import Boxes, Chunks
from ..record.columns import Column, Columns
from ..record.record import Blob, Extent, Manifest, StateRecord
from ..store.formats.torch_save import tensor_item
from ..store.formats.torch_save.stored_zip import aligned
from .joint_state import (
    AlikeHolders,
    HeldBoxes,
    forms_of,
    holders_by_key,
    other_options,
    refuse_other_groups,
    with_joint_groups,
)
from .live_state import Digests, RankState, ShardSpec, record_of

RankItems = tuple[list[int], list[int]]
"""The numbers of the items that a rank writes, in the order of its file, and of the items that it witnesses."""

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
        replicas: of all boxes, one box after the other: the rank's place, the number of the holders, and of their box.
        begin: where each box's replicas begin; the last entry is their count.
        sizes, heads: for each box the bytes of its elements, and those of its item before them.
    """

    kind: ShardSpec
    boxes: Boxes
    replicas: NDArray[np.int32]
    begin: Column
    sizes: Column
    heads: Column


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
            whenever it is used: one rank writes them, and their bytes are not compared.
        objects: key, path and row.
        rank, row, head, size: for each stored box the rank that writes it, its row, and the bytes of its item before
            its elements, and of the elements.
        witnesses: rows of replicas that are not stored, and of stored ones: ``[2, replicas]``.
        names: of these replicas.
        global_ranks: names of the ranks in errors; elsewhere they are known by their places in the group.
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
    names: tuple[str, ...]
    global_ranks: tuple[int, ...]

    @classmethod
    def of(cls, ranks: Sequence[RankState], digests: Sequence[Digests], global_ranks: Sequence[int]) -> WholePlan:
        """Plan who saves what: of replicas one is stored, the others are witnesses.

        Objects that differ from rank to rank are stored for each rank, below `BY_RANK`, and the first one by its key.

        Raises:
            LayoutError: a tensor has a hole or an overlap, or ranks hold different values under a key that can have one
                alone, such as an option of an optimizer.
        """
        return _Planning(ranks, digests, tuple(global_ranks)).plan()

    def manifest(self, receipts: Sequence[bytes], provenance: Mapping[str, Any]) -> Manifest:
        """Describe what ranks have written, after comparing replicas.

        Raises:
            LayoutError: replicas of a tensor differ.
            DestinationError: a rank has not done what it planned.
        """
        # A short receipt would shift the rows of all ranks after it.
        expected = [len(stored) + len(witnessed) for stored, witnessed in self.shares]
        for rank, receipt in enumerate(receipts):
            if len(receipt) != expected[rank] * _ROW.size:
                raise DestinationError(
                    f"rank {self.global_ranks[rank]} planned to write or compare {expected[rank]} items and did so "
                    f"with {len(receipt) / _ROW.size:g}"
                )
        # Receipts become one table, and replicas are compared before anything is described.
        tables = [np.frombuffer(receipt, _ROWS) for receipt in receipts]
        rows, ranks = np.concatenate(tables), np.repeat(np.arange(len(tables)), expected)
        digests, (witness_rows, stored_rows) = rows["digest"], self.witnesses
        for number in np.flatnonzero((digests[witness_rows] != digests[stored_rows]).any(axis=1)):
            writer, witness = ranks[stored_rows[number]], ranks[witness_rows[number]]
            raise _drifted(self.names[number], self.global_ranks[writer], self.global_ranks[witness])
        # Ranks lay their items end to end, so lengths alone say where each of them begins.
        unit = aligned(1)
        spaces = [(table["length"].astype(np.int64) + unit - 1) // unit * unit for table in tables]
        starts = np.concatenate([np.cumsum(of_rank) - of_rank for of_rank in spaces])
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


_Placed = tuple[int, int]
"""A rank, and the number of an item of it."""


class _Planning:
    """The making of a plan: in the order of keys, every item is given to the rank with the least to write so far."""

    def __init__(self, ranks: Sequence[RankState], digests: Sequence[Digests], global_ranks: tuple[int, ...]) -> None:
        refuse_other_groups(ranks, digests, global_ranks)
        self._global_ranks = global_ranks
        self._ranks, self._digests = with_joint_groups(ranks), digests
        self._load = [0] * len(ranks)
        """Bytes that each rank writes; an object, whose size is not known, counts for one."""
        self._objects: list[tuple[str, KeyPath]] = []
        self._object_places: list[_Placed] = []
        self._num_boxes = 0
        self._box_ranks, self._box_items = [_NONE], [_NONE]
        """The stored boxes of each tensor."""
        self._witnesses: list[_Placed] = []
        self._witnessed: list[int] = []
        self._witness_names: list[str] = []
        """Each replica of a box that is not stored, the number of the stored box among all, and its name."""
        self._common_items: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in ranks]
        self._numbers_of_holders: dict[tuple[int, ...], int] = {}

    def plan(self) -> WholePlan:
        tensors, heads, sizes = self._store_all()
        # Receipts have objects first, as ranks write them, then boxes, then witnesses, each in the order of items.
        box_ranks, box_items = np.concatenate(self._box_ranks), np.concatenate(self._box_items)
        places = [_columns_of(self._object_places), (box_ranks, box_items), _columns_of(self._witnesses)]
        ranks, items = (np.concatenate(column) for column in zip(*places, strict=True))
        lengths = [len(ranks_of_kind) for ranks_of_kind, _ in places]
        part = 3 * ranks + np.repeat(np.arange(3), lengths)
        order = np.lexsort((items, part))
        # So the rows of all are known, and each rank's share.
        rows = np.empty(len(order), np.int64)
        rows[order] = np.arange(len(order))
        object_rows, box_rows, witness_rows = np.split(rows, np.cumsum(lengths)[:-1])
        ends = np.cumsum(np.bincount(part, minlength=3 * len(self._ranks))).tolist()
        sorted_items = items[order].tolist()
        parts = iter([sorted_items[begin:end] for begin, end in pairwise([0, *ends])])
        shares = [(objects + boxes, witnesses) for objects, boxes, witnesses in zip(parts, parts, parts, strict=True)]
        return WholePlan(
            tuple(shares),
            tuple(map(dict, self._common_items)),
            tensors,
            tuple((*described, row) for described, row in zip(self._objects, object_rows.tolist(), strict=True)),
            box_ranks.astype(np.int32),
            box_rows,
            heads,
            sizes,
            np.stack([witness_rows, box_rows[np.array(self._witnessed, np.int64)]]),
            tuple(self._witness_names),
            self._global_ranks,
        )

    def _store_all(self) -> tuple[tuple[_PlannedTensor, ...], Column, Column]:
        """Give each tensor and object to a rank; return the tensors, and heads and sizes of their stored boxes."""
        described = self._describe_keys()
        optimizers = optimizers_of(path for path, _ in described.values())
        # Layers repeat, so equal geometry is proved whole once.
        geometries: dict[object, _Geometry | None] = {}
        shared_boxes: dict[Boxes, Boxes] = {}
        """One object for equal boxes, so that later results are found by it."""
        tensors, heads, sizes = list[_PlannedTensor](), [_NONE], [_NONE]
        for key, holders in holders_by_key(self._ranks).items():
            path, name = described[key]
            identity = tuple([each.identity for each in holders])
            if identity not in geometries:
                geometries[identity] = _geometry(key, holders, shared_boxes, self._global_ranks)
            geometry = geometries[identity]
            if geometry is None:
                replicas = sorted((place, each.item) for each in holders for place in each.places.tolist())
                self._store_object(key, path, replicas, optimizers)
                continue
            self._store_tensor(key, holders, geometry)
            tensors.append(_PlannedTensor(key, path, name, geometry.kind, geometry.boxes))
            heads.append(geometry.heads)
            sizes.append(geometry.sizes)
        return tuple(tensors), np.concatenate(heads), np.concatenate(sizes)

    def _describe_keys(self) -> dict[str, tuple[KeyPath, str | None]]:
        """Return path and parameter of each key; where ranks call one differently, the first rank's count.

        Raises:
            LayoutError: a user's key stands where a rank's value of another would be written.
        """
        described: dict[str, tuple[KeyPath, str | None]] = {}
        for form in reversed(forms_of(self._ranks)):
            described |= zip(form.keys, zip(form.paths, form.names, strict=True), strict=True)
        for key, (path, _) in described.items():
            if (value := rank_in(path)) is not None and key_of(value.path) in described:
                raise LayoutError(
                    f"{key!r} stands where rank {value.rank}'s value of {key_of(value.path)!r} would be: rename "
                    f"{BY_RANK!r} in the state dict"
                )
        return described

    def _store_tensor(self, key: str, holders: Sequence[AlikeHolders], geometry: _Geometry) -> None:
        """Give each box of a tensor to one of the ranks with a replica; those of the others are its witnesses."""
        first_items = np.array([each.item for each in holders], np.int64)
        ranks, index, number = geometry.replicas.astype(np.int64)
        items = first_items[index] + number
        stored_rows = geometry.begin[:-1]
        if len(stored_rows) < len(ranks):
            stored_rows = self._choose_replicas(key, ranks.tolist(), items.tolist(), geometry)
        else:
            for rank, size in zip(ranks.tolist(), geometry.sizes.tolist(), strict=True):
                self._load[rank] += size
        self._box_ranks.append(ranks[stored_rows])
        self._box_items.append(items[stored_rows])
        self._num_boxes += len(stored_rows)

    def _choose_replicas(self, key: str, ranks: list[int], items: list[int], geometry: _Geometry) -> Column:
        """Return the row of the replica of each box that is stored."""
        stored_rows = []
        for number, (begin, end) in enumerate(pairwise(geometry.begin.tolist())):
            row = min(range(begin, end), key=lambda row: self._load[ranks[row]])
            self._load[ranks[row]] += geometry.sizes.item(number)
            stored_rows.append(row)
            name = f"{key!r} at {tuple(geometry.boxes.lo[number].tolist())}" if end > begin + 1 else ""
            for other in range(begin, end):
                if other != row:
                    self._witnesses.append((ranks[other], items[other]))
                    self._witnessed.append(self._num_boxes + number)
                    self._witness_names.append(name)
        return np.array(stored_rows, np.int64)

    def _store_object(
        self, key: str, path: KeyPath, replicas: Sequence[_Placed], optimizers: Collection[KeyPlace]
    ) -> None:
        """Have one rank write an object where ranks have it equal, otherwise each rank its value."""
        if len({self._digests[rank][item] for rank, item in replicas}) > 1:
            self._store_by_rank(key, path, replicas, optimizers)
            return
        # The rank with the least to write so far.
        self._write(key, path, min(replicas, key=lambda replica: self._load[replica[0]]))
        # Ranks that have an object in common keep it so, or the plan does not serve again.
        ranks = tuple(rank for rank, _ in replicas)
        number = self._numbers_of_holders.setdefault(ranks, len(self._numbers_of_holders))
        for rank, item in replicas if len(replicas) > 1 else ():
            self._common_items[rank][number].append(item)

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
                    raise other_options(repr(key), self._global_ranks[first], self._global_ranks[rank])
        self._write(key, path, replicas[0])  # what programs read that know no ranks
        for rank, item in replicas:
            self._write(*rank_key(key, path, rank, len(self._ranks)), (rank, item))

    def _write(self, key: str, path: KeyPath, place: _Placed) -> None:
        self._load[place[0]] += 1
        self._objects.append((key, path))
        self._object_places.append(place)


def _geometry(
    key: str, holders: Sequence[AlikeHolders], shared_boxes: dict[Boxes, Boxes], global_ranks: Sequence[int]
) -> _Geometry | None:
    """Return how ranks hold a tensor, after proving it whole; None for an object."""
    # Ranks have to speak of one tensor before boxes can be laid side by side.
    kinds = [each.kind for each in holders if each.kind is not None]
    if not kinds:
        return None
    if len(kinds) < len(holders):
        raise LayoutError(f"{key!r} is a tensor on some ranks and another object on others; give it keys of its own")
    first = kinds[0]
    for kind, each in zip(kinds, holders, strict=True):
        if (kind.dtype, kind.shape) != (first.dtype, first.shape):
            first_rank, rank = global_ranks[holders[0].places[0]], global_ranks[each.places[0]]
            for lo in {*map(tuple, each.lo[0].tolist())} & {*map(tuple, holders[0].lo[0].tolist())}:
                raise _drifted(f"{key!r} at {lo}", first_rank, rank)
            raise LayoutError(
                f"tensor {key!r}: rank {first_rank} says {first.dtype} of shape {first.shape}, and rank "
                f"{rank} {kind.dtype} of shape {kind.shape}; all ranks have to hold parts of one tensor"
            )
    # The layout is the proof: no hole, no overlap in part.
    held = HeldBoxes.of(holders)
    with about(f"tensor {key!r}"):
        layout = held.layout(first.shape, global_ranks)
    record_of(key, (), None, first)  # refuses more dims than a manifest can have, before work is spent
    # Boxes are stored by their first index; rows of equal boxes are replicas.
    ordered = np.lexsort(layout.starts.T[::-1])
    rows, begin = layout.by_box
    counts = np.diff(begin)[ordered]
    _, in_order = expanded(begin[:-1][ordered], counts)
    corners = [corner[ordered, : len(first.shape)] for corner in (layout.starts, layout.stops)]
    boxes = Boxes.of(*corners)
    # The bytes of items follow from the shapes of boxes, which are few.
    frames: dict[Index, tuple[int, int]] = {}
    lengths = []
    for shape in map(tuple, (boxes.hi - boxes.lo).tolist()):
        if shape not in frames:
            frame = tensor_item.frame(first.dtype, shape)
            frames[shape] = frame.payload_length, frame.payload_offset
        lengths.append(frames[shape])
    sizes, heads = np.array(lengths, np.int64).reshape(-1, 2).T
    replicas = np.stack([column[rows[in_order]] for column in held[:3]]).astype(np.int32)
    begins = np.append(0, np.cumsum(counts))
    return _Geometry(first, shared_boxes.setdefault(boxes, boxes), replicas, begins, sizes, heads)


_NONE = np.zeros(0, np.int64)


def _columns_of(placed: Sequence[_Placed]) -> tuple[Column, Column]:
    ranks, items = np.array(placed, np.int64).reshape(-1, 2).T
    return ranks, items


def rank_file(rank: int) -> str:
    """Return the name of a rank's file in stock DCP's form."""
    return f"__{rank}_0.distcp"


def _drifted(label: str, writer: int, rank: int) -> LayoutError:
    return LayoutError(
        f"{label}: ranks {writer} and {rank} hold different data under one key, and only one would be saved. Replicas "
        "must be equal: shard the model (fully_shard), wrap it in DDP, or seed all ranks alike. A shard is given as "
        "the DTensor it is a part of (get_state_dict makes it); data that differs by rank needs its own key"
    )
