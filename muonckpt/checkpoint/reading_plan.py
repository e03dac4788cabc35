"""The plan of a load: the bytes that each rank reads, and those that ranks send each other.

The requests of the ranks cut each chunk into ranges of its elements.  Ranks of one machine share its page cache, so
each of them reads the ranges that it needs, and sends nothing.  Ranges that several machines need are divided among
them, and each sends its part to the others.  The plan follows from the outline, the requests and the machines: every
rank derives the same one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from ..algebra.box import Box, flat_boxes
from ..algebra.layout import corners_of
from ..algebra.overlap import IntArray, overlaps
from ..record.columns import UNKNOWN
from ..record.record import Extent, Manifest, StateRecord
from ..store.open_checkpoint import OpenCheckpoint
from ..store.reading.dtypes import itemsize
from .joint_state import RankBoxes, filled_layout
from .live_state import RankState
from .transfer_plan import CopyTable, Move, Stage, divide_in_stages, make_copies

MIN_SHARED_BYTES = 256 << 10
"""The least bytes of a range that several machines ask for, when it is divided among them: fewer are read by one."""

MAX_SHARED_PIECES = 32
"""The most machines that divide one range: each piece goes to all ranks that ask for it, and all pairs are planned."""

MAX_TURNS = 8
"""The ways in which the senders of tensors of one geometry are chosen: each of them is planned by itself."""

MAX_AMPLIFICATION = 4
"""How many times the elements that they need of a chunk the ranks of a machine read, each for itself, rather than send.

To read bytes from the page cache and check them takes about a fourth of the time that it takes to send them.
"""


class ChunkRange(NamedTuple):
    """Elements ``start:stop`` of a chunk, in the row-major order of its box.

    Attributes:
        chunk: its number in the tensor.
        readers: the places in the process group of the ranks that read it; others that ask for it get it from them.
        boxes: those of the elements in the tensor, in their order, if there are such others; else none.
        is_whole: True if they are all of the chunk.
    """

    chunk: int
    start: int
    stop: int
    readers: tuple[int, ...]
    boxes: tuple[Box, ...]
    is_whole: bool


class AskedTensor(NamedTuple):
    """The boxes of a tensor that ranks ask for under one key of the state dict; ranks by their places in the group."""

    target: str
    ranks: tuple[RankBoxes, ...]


@dataclass(frozen=True)
class JointRequest:
    """The requests of all ranks together, by keys of the checkpoint.

    Attributes:
        tensors: the boxes; tensors that are held alike share them.
        objects: for each item that is not a tensor the places of the ranks that ask for it.
    """

    tensors: Mapping[str, tuple[AskedTensor, ...]]
    objects: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, requests: Sequence[tuple[RankState, Mapping[str, str]]]) -> JointRequest:
        """Join requests: for each rank the tensors that it asks for, and keys of the checkpoint by all of its keys."""
        # Ranks that ask for the same, but for their boxes, are looked at once.
        classes: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for place, (state, sources) in enumerate(requests):
            classes[state.form.keys, state.form.numbers, tuple(sources.items())].append(place)
        tensors: dict[tuple[str, str], tuple[RankBoxes, ...]] = {}
        objects: dict[str, tuple[int, ...]] = {}
        for places in classes.values():
            state, sources = requests[places[0]]
            by_kind: dict[int, tuple[RankBoxes, ...]] = {}
            for key, number in zip(state.form.keys, state.form.numbers, strict=True):
                if key not in sources:  # state that begins as zeros
                    continue
                if number not in by_kind:
                    of_ranks = ((place, requests[place][0].boxes_by_kind[number]) for place in places)
                    by_kind[number] = tuple(RankBoxes(place, boxes) for place, boxes in of_ranks if boxes)
                pair = sources[key], key
                tensors[pair] = tensors[pair] + by_kind[number] if pair in tensors else by_kind[number]
            for key in sources.keys() - {*state.form.keys}:
                objects[sources[key]] = (*objects.get(sources[key], ()), *places)
        by_source: defaultdict[str, tuple[AskedTensor, ...]] = defaultdict(tuple)
        for (source, target), ranks in tensors.items():
            if ranks:
                by_source[source] += (AskedTensor(target, ranks),)
        return cls(dict(by_source), {key: tuple(sorted(set(places))) for key, places in objects.items()})


class ChunkUnits:
    """The chunks that can be read in parts: their checksum follows from those of the parts, or they have none.

    One rank reads all of any other chunk, together with all chunks of its item where they share that.

    Args:
        checkpoint: whose metadata tell it; no item is opened.
    """

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        columns, payloads = checkpoint.outline.columns, checkpoint.payloads
        is_open = columns.payload_length() != UNKNOWN
        # Tensors of one storage share its item, which alone has a checksum then.
        order = np.lexsort((columns.item, columns.file))
        is_same = (np.diff(columns.file[order]) == 0) & (np.diff(columns.item[order]) == 0)
        self._is_shared = np.zeros(len(columns), np.bool_)
        self._is_shared[order[1:][is_same]] = self._is_shared[order[:-1][is_same]] = True
        self._is_shared &= is_open & ~columns.has_digest
        # A CRC-32 of all follows from those of parts; bytes that are made of a file are made of all of it.
        is_verbatim = np.array([payloads.is_verbatim(name) for name in columns.names], np.bool_)[columns.file]
        self._divisible = is_open & (columns.crc32 != UNKNOWN) & ~self._is_shared
        self._unchecked = is_open & (columns.crc32 == UNKNOWN) & ~columns.has_digest & is_verbatim & ~self._is_shared
        self._payloads = payloads
        self._rows = dict[str, slice]()
        row = 0
        for tensor in checkpoint.outline.tensors:
            self._rows[tensor.key] = slice(row, row + len(tensor.chunks))
            row += len(tensor.chunks)

    def divisible(self, tensor: StateRecord) -> tuple[bool, ...]:
        """Return for each chunk whether several ranks may read parts of it."""
        rows = self._rows[tensor.key]
        divisible = self._divisible[rows]
        if (unchecked := self._unchecked[rows]).any():
            divisible = divisible | [
                is_unchecked and not self._payloads.has_checksum(chunk)
                for is_unchecked, chunk in zip(unchecked.tolist(), tensor.chunks, strict=True)
            ]
        if tensor.chunks.strides:
            divisible = divisible & [strides is None for strides in tensor.chunks.strides]
        return tuple(divisible.tolist())

    def shared_items(self, tensor: StateRecord) -> Mapping[int, Extent]:
        """Return the items that chunks share with others, by the numbers of the chunks."""
        numbers = np.flatnonzero(self._is_shared[self._rows[tensor.key]]).tolist()
        return {number: tensor.chunks[number].item for number in numbers}


@dataclass(frozen=True, eq=False)
class TensorReading:
    """The ranges of a tensor that ranks read together, and the copies of what they send.

    Tensors of one geometry share it.

    Attributes:
        ranges: of all ranks, in the order of chunks and elements.
        copies: for each key that asks for the tensor the tables of copies from rank to rank.
        kept_bytes: those that each rank keeps until they are sent, ``[ranks]``.
    """

    ranges: Sequence[ChunkRange]
    copies: Sequence[Sequence[CopyTable]]
    kept_bytes: IntArray

    @cached_property
    def ranges_by_reader(self) -> Mapping[int, Sequence[ChunkRange]]:
        by_reader: defaultdict[int, list[ChunkRange]] = defaultdict(list)
        for part in self.ranges:
            for reader in part.readers:
                by_reader[reader].append(part)
        return dict(by_reader)


@dataclass(frozen=True)
class ReadingRound:
    """The readings whose sent elements are in memory together, and how they move from there.

    Attributes:
        readings: of tensors of the checkpoint.
        moves, stages: as for `transfer.Transfer`.
    """

    readings: Sequence[tuple[StateRecord, TensorReading]]
    moves: Sequence[Move]
    stages: Sequence[Stage]

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensors that ranks send each other."""
        return sum(move.copies.num_sent * move.itemsize for move in self.moves)


def plan_reading(
    outline: Manifest, request: JointRequest, machines: Sequence[int], memory: int, units: ChunkUnits
) -> list[ReadingRound]:
    """Plan a load in rounds; the same arguments give the same plan on all ranks.

    Args:
        outline: of the checkpoint.
        machines: the number of each rank's machine; ranks that share no cache have different ones.
        memory: bytes that a rank keeps until they are sent, and bytes of its exchange buffers.
        units: which chunks can be read in parts.
    """
    rounds = list[list[tuple[StateRecord, TensorReading]]]()
    filled = np.zeros(len(machines), np.int64)
    for tensor, reading in _readings(outline.tensors, request, machines, memory, units):
        is_full = filled.any() and int((filled + reading.kept_bytes).max()) > memory
        # Chunks of one item are read at once.
        is_bound = is_full and bool(units.shared_items(tensor)) and rounds[-1][-1][0] is not tensor
        if not rounds or (is_full and not is_bound):
            rounds.append([])
            filled = np.zeros_like(filled)
        rounds[-1].append((tensor, reading))
        filled = filled + reading.kept_bytes
    planned = []
    for readings in rounds:
        moves = list[Move]()
        for tensor, reading in readings:
            for asked, tables in zip(request.tensors[tensor.key], reading.copies, strict=False):
                facts = tensor.key, asked.target, itemsize(tensor.dtype), tensor.shape
                moves += [Move(*facts, copies) for copies in tables if copies.num_sent]
        planned.append(ReadingRound(readings, moves, divide_in_stages(moves, len(machines), memory)))
    return planned


def _readings(
    tensors: Sequence[StateRecord], request: JointRequest, machines: Sequence[int], memory: int, units: ChunkUnits
) -> Iterator[tuple[StateRecord, TensorReading]]:
    """Yield how ranks read the requested tensors: one reading each, or several where memory is short."""
    turns = [number * -(-len(machines) // MAX_TURNS) for number in range(MAX_TURNS)]
    num_turns = bytes_in_turn = 0
    geometries: dict[object, dict[int, Sequence[TensorReading]]] = {}
    homes_of_items = dict[Extent, tuple[Sequence[int], int]]()
    for tensor in tensors:
        requests = request.tensors.get(tensor.key, ())
        if not requests or 0 in tensor.shape:
            continue
        # Small tensors that follow one another have one reader of what is sent, which then reads them at once.
        boxes, size = tensor.boxes, itemsize(tensor.dtype)
        turn = turns[num_turns % MAX_TURNS]
        bytes_in_turn += boxes.elements * size
        if bytes_in_turn >= MIN_SHARED_BYTES:
            num_turns, bytes_in_turn = num_turns + 1, 0
        # Tensors of one geometry are planned once for each turn, or once if nothing is sent.
        divisible, shared_items = units.divisible(tensor), units.shared_items(tensor)
        request_ids = tuple(id(asked.ranks) for asked in requests)
        geometry = tensor.shape, tensor.dtype, boxes, divisible, tuple(shared_items.items()), request_ids
        by_turn = geometries.setdefault(geometry, {})
        if turn not in by_turn:
            ranges = list[ChunkRange]()
            for chunk in _needed_chunks(tensor, requests, divisible, shared_items):
                ranges += _ranges(chunk, size, machines, memory, turn + chunk.number, homes_of_items)
            readings = [*_cut_to_memory(tensor, requests, ranges, len(machines), memory)]
            is_any_sent = any(part.boxes for part in ranges)
            by_turn |= dict.fromkeys([turn] if is_any_sent else turns, readings)
        for reading in by_turn[turn]:
            yield tensor, reading


class _NeededChunk(NamedTuple):
    """A chunk, and the needs of all ranks.

    Attributes:
        item: the one that it shares with other chunks.
        needs: each rank's place, and how many elements it needs within ``start:stop``: whole rows of the first dim cut.
    """

    number: int
    box: Box
    is_divisible: bool
    item: Extent | None
    needs: Sequence[tuple[int, int, int, int]]


def _needed_chunks(
    tensor: StateRecord, requests: Sequence[AskedTensor], divisible: Sequence[bool], shared_items: Mapping[int, Extent]
) -> Iterator[_NeededChunk]:
    """Yield the chunks of a tensor that ranks need elements of, in order."""
    asked, places = list[Box](), list[int]()
    for of_rank in chain.from_iterable(request.ranks for request in requests):
        asked += of_rank.boxes
        places += [of_rank.rank] * len(of_rank.boxes)
    boxes, (asked_lo, asked_hi) = tensor.boxes, corners_of(tensor.shape, asked)
    lo, hi = (boxes.lo, boxes.hi) if tensor.shape else corners_of((), boxes)
    chunk, number = overlaps(lo, hi, asked_lo, asked_hi)
    # The common elements by their places in the chunk.
    sizes, begin = (hi - lo)[chunk], np.maximum(lo[chunk], asked_lo[number]) - lo[chunk]
    lengths = np.minimum(hi[chunk], asked_hi[number]) - lo[chunk] - begin
    # Rows of the first dim that is cut reach around them; these are the common elements themselves if they are a run.
    strides = np.ones_like(sizes)
    strides[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
    dims = np.arange(sizes.shape[1])
    cut = np.where(lengths > 1, dims, dims[-1]).min(axis=1)[:, None]
    start = (begin * strides * (dims <= cut)).sum(axis=1)
    stop = start + (lengths * strides * (dims == cut)).sum(axis=1)
    needs = list(
        zip(*(column.tolist() for column in (np.array(places)[number], start, stop, lengths.prod(axis=1))), strict=True)
    )
    heads = np.flatnonzero(np.diff(chunk, prepend=-1, append=-1)).tolist()
    for low, high in pairwise(heads):
        head = int(chunk[low])
        yield _NeededChunk(head, boxes[head], divisible[head], shared_items.get(head), needs[low:high])


def _ranges(
    chunk: _NeededChunk,
    size: int,
    machines: Sequence[int],
    memory: int,
    turn: int,
    homes_of_items: dict[Extent, tuple[Sequence[int], int]],
) -> Iterator[ChunkRange]:
    """Yield who reads which ranges of a chunk, so that little is sent, and little is read twice.

    Elements have a *home* where they are read: a machine, of which each rank reads what it needs itself; or one rank,
    where the ranks of a machine would read much more than they need.

    Args:
        size: bytes of an element.
        homes_of_items: the homes of an item's chunks, and the one that is chosen with the first of them.
    """
    numel = chunk.box.numel
    num_read = sum(stop - start if chunk.is_divisible else numel for _, start, stop, _ in chunk.needs)
    is_shared_at_home = num_read <= MAX_AMPLIFICATION * sum(num_needed for *_, num_needed in chunk.needs)
    homes = machines if is_shared_at_home else range(len(machines))
    if not chunk.is_divisible:
        places = {place for place, *_ in chunk.needs}
        present_homes = [*_by_home(places, homes)]
        home = present_homes[turn % len(present_homes)]
        if chunk.item is not None:
            homes, home = homes_of_items.setdefault(chunk.item, (homes, home))
        readers = _by_home(places, homes).get(home) or (homes.index(home),)
        yield ChunkRange(chunk.number, 0, numel, readers, (chunk.box,) if places.difference(readers) else (), True)
        return
    # Ranges tile the chunk: unneeded ones are read as well, for its checksum.  Go along it from edge to edge, with the
    # ranks that need what lies between two of them.
    changes: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for place, start, stop, _ in chunk.needs:
        changes[start].append((place, 1))
        changes[stop].append((place, -1))
    needing = Counter[int]()
    readers = (chunk.needs[0][0],)
    for start, stop in pairwise(sorted({0, numel, *changes})):
        for place, change in changes[start]:
            needing[place] += change
        by_home = _by_home([place for place, count in needing.items() if count], homes)
        if len(by_home) < 2:
            readers = next(iter(by_home.values()), readers[:1])
            yield ChunkRange(chunk.number, start, stop, readers, (), stop - start == numel)
            continue
        # Homes take equal pieces of whole rows, unless rows are longer; sent bytes must fit into memory.
        length = (stop - start) * size
        count = max(min(len(by_home), MAX_SHARED_PIECES, length // MIN_SHARED_BYTES), -(-length // memory), 1)
        row = math.prod(chunk.box.shape[1:])
        if row > (stop - start) // count:
            row = 1
        inner = [(start + (stop - start) * number // count) // row * row for number in range(1, count)]
        for number, (low, high) in enumerate(pairwise([start, *inner, stop])):
            if low < high:
                readers = by_home[[*by_home][(turn + number) % len(by_home)]]
                boxes = (part.shift(chunk.box.lo) for part in flat_boxes(chunk.box.shape, low, high))
                yield ChunkRange(chunk.number, low, high, readers, tuple(boxes), high - low == numel)


def _by_home(places: Iterable[int], homes: Sequence[int]) -> Mapping[int, tuple[int, ...]]:
    """Return the places of ranks by their homes, ascending."""
    by_home: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
    for home, place in sorted((homes[place], place) for place in places):
        by_home[home] += (place,)
    return by_home


def _cut_to_memory(
    tensor: StateRecord, requests: Sequence[AskedTensor], ranges: Sequence[ChunkRange], num_ranks: int, memory: int
) -> Iterator[TensorReading]:
    """Yield the readings of a tensor, each small enough for every rank, with the copies of the sent parts."""
    parts, filled, size = [list[ChunkRange]()], [np.zeros(num_ranks, np.int64)], itemsize(tensor.dtype)
    for part in ranges:
        kept_bytes = (part.stop - part.start) * size * bool(part.boxes)
        readers = [*part.readers]
        most_filled = int(filled[-1][readers].max())
        if kept_bytes and most_filled and most_filled + kept_bytes > memory:
            parts.append([])
            filled.append(np.zeros(num_ranks, np.int64))
        parts[-1].append(part)
        filled[-1][readers] += kept_bytes
    for part_ranges, kept in zip(parts, filled, strict=True):
        copies = list[list[CopyTable]]()
        if kept.any():
            # The boxes that a rank sends lie end to end; all other elements are nowhere.
            boxes_by_reader: defaultdict[int, tuple[Box, ...]] = defaultdict(tuple)
            for part in part_ranges:
                for reader in part.readers if part.boxes else ():
                    boxes_by_reader[reader] += part.boxes
            layout = filled_layout(tensor.shape, map(RankBoxes._make, sorted(boxes_by_reader.items())))
            for asked in requests:
                copies.append([table.between_ranks() for table in make_copies(layout, asked.ranks)])
        yield TensorReading(part_ranges, copies, kept)
