"""The plan of all ranks together, which the coordinator keeps: who writes what, and what describes it afterwards."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ..box import Box
from ..errors import LayoutError
from ..fingerprint import as_hex, combine
from ..record import Blob, Chunk, Extent, Manifest, StateRecord
from ..store.formats.torch_save import tensor_item
from ..store.formats.torch_save.stored_zip import aligned
from ..store.formats.torch_save.tensor_item import ItemFrame
from ..vocabulary import KeyPath
from .annotation import Annotation
from .bits import dtype_name
from .receipt import unpacked
from .save_planner import CoveringSavePlanner, LocalPlan, empty, offsets_of

RankItems = tuple[list[int], list[int]]
"""Of one rank's `LocalPlan`, the numbers of the items that it writes, in the order of its file, and of the replicas
that it holds but another rank writes."""

_Row = int
"""A row of all receipts end to end."""


@dataclass(frozen=True, slots=True)
class _StoredBox:
    """A box that ``rank`` stores, which is row ``row``; its elements come behind ``head`` bytes of the item."""

    box: Box
    rank: int
    row: _Row
    head: int
    elements: int


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    record: StateRecord
    boxes: tuple[_StoredBox, ...]


@dataclass(frozen=True, slots=True)
class _StoredObject:
    key: str
    path: KeyPath
    rank: int
    row: _Row


@dataclass(frozen=True, slots=True)
class _Witness:
    """Row ``row`` has what ``rank`` holds of an item that ``writer`` stores, which is row ``stored``."""

    where: str
    tensor: bool
    rank: int
    row: _Row
    writer: int
    stored: _Row


@dataclass(frozen=True, slots=True)
class WholePlan:
    """The plan of all ranks, whose tensors have been proved whole; with their receipts it becomes the manifest."""

    shares: tuple[RankItems, ...]
    _tensors: tuple[_StoredTensor, ...]
    _objects: tuple[_StoredObject, ...]
    _witnesses: tuple[_Witness, ...]

    @classmethod
    def of(cls, planner: CoveringSavePlanner, ranks: Sequence[LocalPlan]) -> WholePlan:
        """Plan together what ranks could save: of replicas one is stored, the others are witnesses.

        Raises:
            LayoutError: a tensor has a hole or an overlap, or replicas are of different dtypes or shapes.
        """
        before = [SavePlan(local.items, planner_data=dict(local.paths)) for local in ranks]
        plans, metadata = planner.create_global_plan(before)
        shares = tuple(_share(local.items, plan.items) for local, plan in zip(ranks, plans, strict=True))
        stored: dict[MetadataIndex, tuple[int, _Row, WriteItem]] = {}
        witnessed: list[tuple[int, _Row, WriteItem]] = []
        row = 0
        for rank, (local, (written, seen)) in enumerate(zip(ranks, shares, strict=True)):
            for number in written:
                stored[local.items[number].index] = rank, row, local.items[number]
                row += 1
            for number in seen:
                witnessed.append((rank, row, local.items[number]))
                row += 1
        witnesses = tuple(_witness(stored[item.index], rank, row, item) for rank, row, item in witnessed)
        return cls(shares, *_described(metadata, stored, ranks), witnesses)

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
        digests, shares = rows["digest"].tobytes().hex(), rows["share"].tolist()
        lengths, checksums = rows["length"].tolist(), rows["crc32"].tolist()
        starts = np.concatenate([_starts(table["length"]) for table in tables]).tolist()
        files = [rank_file(rank) for rank in range(len(tables))]

        def chunk(box: _StoredBox) -> Chunk:
            file, row = files[box.rank], box.row
            item = Extent(file, starts[row], lengths[row])
            payload = Extent(file, starts[row] + box.head, box.elements)
            return Chunk(box.box, item, payload, digests[32 * row : 32 * row + 32], checksums[row])

        tensors, blobs = [], []
        for tensor in self._tensors:
            fingerprint = as_hex(combine(*(shares[box.row] for box in tensor.boxes)))
            chunks = tuple(map(chunk, tensor.boxes))
            tensors.append(replace(tensor.record, chunks=chunks, fingerprint=fingerprint))
        for blob in self._objects:
            row = blob.row
            item = Extent(files[blob.rank], starts[row], lengths[row])
            blobs.append(Blob(blob.key, blob.path, item, digests[32 * row : 32 * row + 32]))
        return Manifest(tuple(tensors), tuple(blobs), provenance)

    def _compare(self, digests: NDArray[Any]) -> None:
        """Check that replicas are equal: DCP stores one of them, and would lose the others silently."""
        mine, theirs = [each.row for each in self._witnesses], [each.stored for each in self._witnesses]
        for number in np.flatnonzero((digests[mine] != digests[theirs]).any(axis=1)):
            witness = self._witnesses[number]
            if witness.tensor:
                raise _drifted(witness)
            warnings.warn(
                f"{_difference(witness)} that is not a tensor; the copy of rank {witness.writer} was saved",
                stacklevel=2,
            )


def rank_file(rank: int) -> str:
    """The name of a rank's file, as stock DCP gives it."""
    return f"__{rank}_0.distcp"


def frame_of(item: WriteItem) -> ItemFrame:
    """The bytes around the elements of a planned tensor."""
    assert item.tensor_data is not None
    return tensor_item.frame(dtype_name(item.tensor_data.properties.dtype), tuple(item.tensor_data.chunk.sizes))


def _share(items: Sequence[WriteItem], kept: Sequence[WriteItem]) -> RankItems:
    """Blobs are written first, as DCP does."""
    written = {item.index for item in kept}
    mine = [number for number, item in enumerate(items) if item.index in written]
    mine.sort(key=lambda number: items[number].tensor_data is not None)
    return mine, [number for number, item in enumerate(items) if item.index not in written and not empty(item)]


def _described(
    metadata: Metadata, stored: Mapping[MetadataIndex, tuple[int, _Row, WriteItem]], ranks: Sequence[LocalPlan]
) -> tuple[tuple[_StoredTensor, ...], tuple[_StoredObject, ...]]:
    by_key: defaultdict[str, list[tuple[int, _Row, WriteItem]]] = defaultdict(list)
    for index, place in stored.items():
        by_key[index.fqn].append(place)
    paths, tensors, objects = metadata.planner_data or {}, [], []
    for key, entry in metadata.state_dict_metadata.items():
        path, places = tuple(paths.get(key, (key,))), by_key[key]
        if len({item.tensor_data is None for _, _, item in places}) > 1:
            raise LayoutError(
                f"{key!r} is a tensor on some ranks and another object on others; give it keys of its own"
            )
        if isinstance(entry, BytesStorageMetadata):
            [(rank, row, _)] = places
            objects.append(_StoredObject(key, path, rank, row))
            continue
        note = next((ranks[rank].annotations.get(key) for rank, _, _ in places), None) or Annotation()
        boxes = sorted((_stored_box(*place) for place in places), key=lambda each: each.box.lo)
        told = {each.name: getattr(note, each.name) for each in fields(note)}
        record = StateRecord(key, path, tuple(entry.size), dtype_name(entry.properties.dtype), (), **told)
        tensors.append(_StoredTensor(record, tuple(boxes)))
    return tuple(tensors), tuple(objects)


def _stored_box(rank: int, row: _Row, item: WriteItem) -> _StoredBox:
    assert item.tensor_data is not None
    frame = frame_of(item)
    box = Box.of(tuple(item.tensor_data.chunk.sizes)).shift(offsets_of(item))
    return _StoredBox(box, rank, row, frame.payload_offset, frame.payload_length)


def _witness(place: tuple[int, _Row, WriteItem], rank: int, row: _Row, item: WriteItem) -> _Witness:
    writer, stored, saved = place
    where = f"{item.index.fqn!r} at {tuple(item.index.offset or ())}"
    witness = _Witness(where, item.tensor_data is not None, rank, row, writer, stored)
    if item.tensor_data is not None and _kind(item) != _kind(saved):
        raise _drifted(witness)
    return witness


def _kind(item: WriteItem) -> tuple[Any, ...] | None:
    data = item.tensor_data
    return None if data is None else (data.properties.dtype, tuple(data.chunk.sizes))


def _starts(lengths: NDArray[Any]) -> NDArray[Any]:
    """Where items of these lengths begin, end to end and aligned; those of length 0 are not stored."""
    unit = aligned(1)
    room: NDArray[Any] = (lengths.astype(np.int64) + unit - 1) // unit * unit
    starts: NDArray[Any] = np.cumsum(room) - room
    return starts


def _difference(witness: _Witness) -> str:
    return f"{witness.where}: ranks {witness.writer} and {witness.rank} hold different data"


def _drifted(witness: _Witness) -> LayoutError:
    return LayoutError(
        f"{_difference(witness)} under one key, of which only one would be saved; replicas must be equal, and data "
        "that differs by rank needs a key of its own"
    )
