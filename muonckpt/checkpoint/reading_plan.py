"""Which rank reads which bytes of a checkpoint, so that each stored byte is read once by all ranks together.

What ranks ask for cuts each chunk into ranges of its elements.  A range that one rank asks for is read by that rank,
and nothing of it is sent.  What several ask for, as replicas do, is divided among them, and each sends its part to the
others.  The plan follows from the outline and from what all ranks ask for: every rank derives the same one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..algebra.box import Box, Index, flat_boxes
from ..algebra.layout import TensorLayout
from ..algebra.overlap import overlaps
from ..record.chunks import Boxes
from ..record.record import Extent, Manifest, StateRecord
from ..store.reading.dtypes import itemsize
from .joint_state import RankBoxes, filled_layout
from .live_state import RankState
from .transfer_plan import CopyTable, Move, Stage, divide_in_stages, make_copies

MIN_SHARED_BYTES = 256 << 10
"""The least bytes of a range that several ranks ask for, when it is divided among them: fewer are read by one rank."""


MAX_SHARED_PIECES = 32
"""The most ranks that divide one range: each piece goes to all ranks that ask for it, and all pairs are planned."""

MAX_TURNS = 8
"""The most ways in which the readers of tensors of one geometry are chosen: each of them is planned by itself."""


class ChunkRange(NamedTuple):
    """Elements ``start:stop`` of a chunk, in the row-major order of its box, that one rank reads.

    Attributes:
        chunk: its number in the tensor.
        reader: the rank's place in the process group.
        is_asked: False if they are read for the checksum of their chunk alone.
        is_whole: True if they are all of the chunk.
    """

    chunk: int
    start: int
    stop: int
    reader: int
    is_asked: bool
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
            classes[state.keys, state.numbers, tuple(sources.items())].append(place)
        tensors: dict[tuple[str, str], tuple[RankBoxes, ...]] = {}
        objects: dict[str, tuple[int, ...]] = {}
        for places in classes.values():
            state, sources = requests[places[0]]
            by_kind: dict[int, tuple[RankBoxes, ...]] = {}
            for key, number in zip(state.keys, state.numbers, strict=True):
                if key not in sources:  # state that begins as zeros
                    continue
                if number not in by_kind:
                    kinds = ((place, requests[place][0].kinds[number]) for place in places)
                    by_kind[number] = tuple(
                        RankBoxes(place, kind.boxes) for place, kind in kinds if kind and kind.boxes
                    )
                pair = sources[key], key
                tensors[pair] = tensors[pair] + by_kind[number] if pair in tensors else by_kind[number]
            for key in sources.keys() - {*state.keys}:
                objects[sources[key]] = (*objects.get(sources[key], ()), *places)
        by_source: defaultdict[str, tuple[AskedTensor, ...]] = defaultdict(tuple)
        for (source, target), ranks in tensors.items():
            if ranks:
                by_source[source] += (AskedTensor(target, ranks),)
        return cls(dict(by_source), {key: tuple(sorted(set(places))) for key, places in objects.items()})


WholeChunks = Mapping[str, Mapping[int, Extent | None]]
"""The chunks of which no part can be checked by itself, by key and number.

Each has its item, if that has chunks of several tensors, or alone has a checksum: one rank reads all of it then.
"""


@dataclass(frozen=True, eq=False)
class TensorReading:
    """The ranges of a tensor that ranks read together, and the copies that fill the targets from them.

    Tensors of one geometry share it.

    Attributes:
        ranges: of all ranks, in the order of chunks and elements.
        boxes: for each range the boxes of its elements in the tensor, in their order; none if it is not asked for.
        copies: for each key that asks for the tensor the tables of copies.
    """

    ranges: tuple[ChunkRange, ...]
    boxes: tuple[tuple[Box, ...], ...]
    copies: tuple[tuple[CopyTable, ...], ...]

    @cached_property
    def numbers_by_reader(self) -> Mapping[int, tuple[int, ...]]:
        """The numbers of each rank's ranges."""
        numbers: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
        for number, part in enumerate(self.ranges):
            numbers[part.reader] += (number,)
        return dict(numbers)

    @cached_property
    def _chunks_by_reader(self) -> Mapping[int, Sequence[int]]:
        chunks: defaultdict[int, dict[int, None]] = defaultdict(dict)
        for part in self.ranges:
            chunks[part.reader][part.chunk] = None
        return {reader: sorted(of_reader) for reader, of_reader in chunks.items()}

    def chunks_of(self, reader: int) -> Sequence[int]:
        """Return the numbers of the chunks of which a rank reads something, ascending."""
        return self._chunks_by_reader[reader]


@lru_cache(maxsize=4096)
def _bytes_by_reader(reading: TensorReading, num_ranks: int, itemsize: int) -> NDArray[np.int64]:
    """Return the bytes that each rank has in memory after it has read its ranges, ``[ranks]``.  Cached."""
    counts: NDArray[np.int64] = np.zeros(num_ranks, np.int64)
    for part in reading.ranges:
        counts[part.reader] += (part.stop - part.start) * itemsize * part.is_asked
    return counts


@dataclass(frozen=True)
class ReadingRound:
    """The readings whose elements are in memory together, and how they move from there.

    Attributes:
        readings: of tensors of the checkpoint.
        moves, stages: as for `transfer.Transfer`.
    """

    readings: Sequence[tuple[StateRecord, TensorReading]]
    moves: Sequence[Move]
    stages: Sequence[Stage]


@dataclass(frozen=True)
class ReadingPlan:
    """The plan of all ranks for one load.

    Attributes:
        rounds: in each of them no rank reads more than the memory that it may use.
        object_readers: for each item that is not a tensor the place of the rank that reads it.
    """

    rounds: Sequence[ReadingRound]
    object_readers: Mapping[str, int]

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensors that ranks send each other."""
        moves = chain.from_iterable(of_round.moves for of_round in self.rounds)
        return sum(move.copies.num_sent * move.itemsize for move in moves)

    @classmethod
    def of(
        cls,
        outline: Manifest,
        request: JointRequest,
        num_ranks: int,
        read_memory: int,
        wire_memory: int,
        whole_chunks: WholeChunks,
    ) -> ReadingPlan:
        """Plan a load; the same arguments give the same plan on all ranks.

        Args:
            outline: of the checkpoint.
            read_memory, wire_memory: bytes of what a rank reads in a round, and of its exchange buffers.
            whole_chunks: those that are not divided, however large they are.
        """
        planner = _Planner(num_ranks, read_memory, whole_chunks)
        rounds, readings, filled = [], list[tuple[StateRecord, TensorReading]](), np.zeros(num_ranks, np.int64)

        def finish_round() -> None:
            moves = [*_moves_of(readings, request)]
            rounds.append(ReadingRound(tuple(readings), moves, divide_in_stages(moves, num_ranks, wire_memory)))

        for tensor, reading in planner.readings(outline.tensors, request):
            added = _bytes_by_reader(reading, num_ranks, itemsize(tensor.dtype))
            if readings and int((filled + added).max()) > read_memory:
                finish_round()
                readings, filled = [], np.zeros(num_ranks, np.int64)
            readings.append((tensor, reading))
            filled += added
        if readings:
            finish_round()
        object_readers: dict[str, int] = {}
        for blob in outline.blobs:
            if blob.key in request.objects:
                asking = request.objects[blob.key]
                object_readers[blob.key] = asking[len(object_readers) % len(asking)]
        return cls(rounds, object_readers)


def _moves_of(readings: Sequence[tuple[StateRecord, TensorReading]], request: JointRequest) -> Iterator[Move]:
    for tensor, reading in readings:
        size = itemsize(tensor.dtype)
        for asked, tables in zip(request.tensors[tensor.key], reading.copies, strict=True):
            for copies in tables:
                yield Move(tensor.key, asked.target, size, tensor.shape, copies)


class _Need(NamedTuple):
    """A rank's need of elements of a chunk: all lie in ``start:stop``, in whole rows of the outermost dim cut."""

    start: int
    stop: int
    place: int


@dataclass(frozen=True)
class _Planner:
    """The choice of readers, among the ranks that ask for something, so that it is sent to as few others as possible.

    Attributes:
        max_bytes: the most bytes of one range.
        whole_chunks: those that one rank reads as one range.
    """

    num_ranks: int
    max_bytes: int
    whole_chunks: WholeChunks
    _reader_of: dict[Extent, int] = field(default_factory=dict)
    _divisible_by_columns: dict[int, tuple[bool, ...]] = field(default_factory=dict)

    def readings(
        self, tensors: Sequence[StateRecord], request: JointRequest
    ) -> Iterator[tuple[StateRecord, TensorReading]]:
        """Yield how ranks read the tensors that are asked for: one reading each, or several where memory is short."""
        periods: dict[object, tuple[int, Mapping[int, list[_Need]]]] = {}
        geometries: dict[object, tuple[TensorReading, ...]] = {}
        planned_bytes = 0
        for tensor in tensors:
            requests = request.tensors.get(tensor.key, ())
            if not requests or 0 in tensor.shape:
                continue
            divisible, whole = self._divisible_chunks(tensor), self._readers_of_whole_chunks(tensor, requests)
            request_ids = tuple(id(asked.ranks) for asked in requests)
            geometry = tensor.shape, tensor.dtype, tensor.boxes, divisible, tuple(whole.items()), request_ids
            if geometry not in periods:
                needs = _needs_by_chunk(tensor.boxes, requests)
                periods[geometry] = _turns(needs, divisible), needs
            period, needs = periods[geometry]
            # Small tensors that follow one another have one reader, which then reads them at once.
            between_turns = -(-period // MAX_TURNS)
            turn = planned_bytes // MIN_SHARED_BYTES % period // between_turns * between_turns
            planned_bytes += tensor.boxes.elements * itemsize(tensor.dtype)
            if (geometry, turn) not in geometries:
                planned = self._plan_geometry(tensor, requests, needs, divisible, whole, turn)
                geometries[geometry, turn] = tuple(planned)
            for reading in geometries[geometry, turn]:
                yield tensor, reading

    def _divisible_chunks(self, tensor: StateRecord) -> tuple[bool, ...]:
        """Return for each chunk whether several ranks may read parts of it."""
        columns, rows = tensor.chunks.columns, slice(tensor.chunks.start, tensor.chunks.stop)
        if id(columns) not in self._divisible_by_columns:  # tensors mostly share them
            # Items that are still closed have a CRC-32 inside, as torch.save writes it; that of parts can be joined.
            divisible = (columns.crc32 >= 0) | (columns.payload_length() < 0)
            self._divisible_by_columns[id(columns)] = tuple(divisible.tolist())
        divisible_rows, whole = self._divisible_by_columns[id(columns)][rows], self.whole_chunks.get(tensor.key)
        if whole is None:
            return divisible_rows
        return tuple(of_row and number not in whole for number, of_row in enumerate(divisible_rows))

    def _readers_of_whole_chunks(
        self, tensor: StateRecord, requests: Sequence[AskedTensor]
    ) -> Mapping[int, int | None]:
        """Return the reader of each chunk that is one range; None if any of the ranks that need it may read it."""
        whole_chunks, readers = self.whole_chunks.get(tensor.key), dict[int, int | None]()
        if whole_chunks is None:
            return readers
        # An item with several chunks has one reader, which is chosen with the first of them.
        asking = sorted({of_rank.rank for asked in requests for of_rank in asked.ranks})
        for number, item in whole_chunks.items():
            turn = len(self._reader_of) % len(asking)
            readers[number] = None if item is None else self._reader_of.setdefault(item, asking[turn])
        return readers

    def _plan_geometry(
        self,
        tensor: StateRecord,
        requests: Sequence[AskedTensor],
        needs_by_chunk: Mapping[int, list[_Need]],
        divisible: Sequence[bool],
        whole: Mapping[int, int | None],
        turn: int,
    ) -> Iterator[TensorReading]:
        """Plan who reads which ranges of the tensors of one geometry, and the copies from there."""
        # 1. Divide each chunk of which something is asked for among the ranks that need its parts.
        ranges = list[ChunkRange]()
        boxes = [*tensor.boxes]
        for chunk, needs in sorted(needs_by_chunk.items()):
            if divisible[chunk]:
                ranges += self._divide(chunk, boxes[chunk], needs, itemsize(tensor.dtype), turn + chunk)
                continue
            asking, numel = sorted({need.place for need in needs}), boxes[chunk].numel
            reader = asking[(turn + chunk) % len(asking)]
            if chunk in whole:
                of_item = whole[chunk]
                ranges.append(ChunkRange(chunk, 0, numel, reader if of_item is None else of_item, True, True))
            else:
                ranges += self._pieces(chunk, boxes[chunk], 0, numel, [reader], itemsize(tensor.dtype), 0)
        # 2. Part them so that no rank holds too much of the tensor at once.
        parts: defaultdict[int, list[ChunkRange]] = defaultdict(list)
        number_of_part: Counter[int] = Counter()
        bytes_in_part: Counter[int] = Counter()
        for part in ranges:
            part_bytes = (part.stop - part.start) * itemsize(tensor.dtype) * part.is_asked
            if bytes_in_part[part.reader] and bytes_in_part[part.reader] + part_bytes > self.max_bytes:
                number_of_part[part.reader] += 1
                bytes_in_part[part.reader] = 0
            parts[number_of_part[part.reader]].append(part)
            bytes_in_part[part.reader] += part_bytes
        # 3. Where elements are after that, and the copies from there to the ranks that ask for them.
        for _, part_ranges in sorted(parts.items()):
            range_boxes = [_boxes_of(boxes[part.chunk], part) for part in part_ranges]
            layout = _layout_of(tensor.shape, part_ranges, range_boxes)
            copies = (tuple(make_copies(layout, asked.ranks, range(self.num_ranks))) for asked in requests)
            yield TensorReading(tuple(part_ranges), tuple(range_boxes), tuple(copies))

    def _divide(self, chunk: int, box: Box, needs: Sequence[_Need], size: int, turn: int) -> Iterator[ChunkRange]:
        """Yield ranges that tile a chunk: those that nobody needs are read as well, for the checksum of the chunk."""
        changes: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for need in needs:
            changes[need.start][need.place] += 1
            changes[need.stop][need.place] -= 1
        # Go along the chunk from edge to edge, with the ranks that need what lies between two of them.
        edges = sorted({0, box.numel, *changes})
        needing: Counter[int] = Counter()
        readers = [needs[0].place]
        for start, stop in pairwise(edges):
            needing.update(changes[start])
            asking = sorted(place for place, count in needing.items() if count)
            readers = asking or readers[:1]
            for part in self._pieces(chunk, box, start, stop, readers, size, turn):
                yield part._replace(is_asked=bool(asking))

    def _pieces(
        self, chunk: int, box: Box, start: int, stop: int, readers: Sequence[int], size: int, turn: int
    ) -> Iterator[ChunkRange]:
        """Yield the range in pieces of one reader each: equal ones, of whole rows where rows are that small."""
        shared = 1
        if len(readers) > 1:
            shared = min(len(readers), MAX_SHARED_PIECES, (stop - start) * size // MIN_SHARED_BYTES)
        # Cut into equal pieces, as many as ranks share it or as memory asks for; rows stay whole if they are smaller.
        count = max(shared, -(-(stop - start) * size // self.max_bytes), 1)
        row = math.prod(box.shape[1:])
        if row > (stop - start) // count:
            row = 1
        cuts = [start, *((start + (stop - start) * number // count) // row * row for number in range(1, count)), stop]
        for number, (low, high) in enumerate(pairwise(cuts)):
            if low < high:
                reader = readers[(turn + number) % len(readers)]
                yield ChunkRange(chunk, low, high, reader, True, high - low == box.numel)


def _turns(needs_by_chunk: Mapping[int, list[_Need]], divisible: Sequence[bool]) -> int:
    """Return among how many ranks the readers of a tensor take turns: 1 if no two of them need the same elements."""
    longest = 1
    for chunk, needs in needs_by_chunk.items():
        in_order = sorted(needs)
        if not divisible[chunk] or any(after.start < before.stop for before, after in pairwise(in_order)):
            longest = max(longest, len({need.place for need in needs}))
    return longest


def _needs_by_chunk(chunks: Boxes, requests: Sequence[AskedTensor]) -> Mapping[int, list[_Need]]:
    """Return the needs of all ranks, by the numbers of chunks."""
    boxes = [*chunks]
    boxes_asked = [(box, of_rank.rank) for request in requests for of_rank in request.ranks for box in of_rank.boxes]
    corners = (
        np.array([corner or (side,) for corner in side_corners], np.int64)
        for side, side_corners in (
            (0, [box.lo for box in boxes]),
            (1, [box.hi for box in boxes]),
            (0, [box.lo for box, _ in boxes_asked]),
            (1, [box.hi for box, _ in boxes_asked]),
        )
    )
    needs: defaultdict[int, list[_Need]] = defaultdict(list)
    for chunk, number in zip(*overlaps(*corners), strict=True):
        box, place = boxes_asked[int(number)]
        common = box & boxes[int(chunk)]
        if common is None or not common.numel:  # of a chunk without elements
            continue
        needs[int(chunk)].append(_Need(*_rows_around(common, boxes[int(chunk)]), place))
    return needs


def _rows_around(box: Box, chunk: Box) -> tuple[int, int]:
    """Return the elements ``start:stop`` of a chunk that reach around a box in it: the box's own if they are a run."""
    start, row = 0, chunk.numel
    for low, length, chunk_low, chunk_length in zip(box.lo, box.shape, chunk.lo, chunk.shape, strict=True):
        row //= chunk_length
        start += (low - chunk_low) * row
        if length > 1:
            return start, start + length * row
    return start, start + row


def _boxes_of(chunk: Box, part: ChunkRange) -> tuple[Box, ...]:
    if not part.is_asked:
        return ()
    return tuple(box.shift(chunk.lo) for box in flat_boxes(chunk.shape, part.start, part.stop))


def _layout_of(shape: Index, ranges: Sequence[ChunkRange], boxes: Sequence[tuple[Box, ...]]) -> TensorLayout:
    """Return the layout of a tensor on the ranks that read it: their boxes end to end, all other elements nowhere."""
    by_reader: defaultdict[int, tuple[Box, ...]] = defaultdict(tuple)
    for part, part_boxes in zip(ranges, boxes, strict=True):
        by_reader[part.reader] += part_boxes
    ranks = [RankBoxes(reader, of_reader) for reader, of_reader in sorted(by_reader.items()) if of_reader]
    return filled_layout(shape, ranks)
