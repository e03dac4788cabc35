"""A reading plan reads every byte once, and moves every requested element to all who request it."""

from __future__ import annotations

from collections import Counter
from itertools import chain, product

import numpy as np
import pytest
from support.random_layouts import READERS, random_shape

from muonckpt.algebra.box import Box, flat_boxes
from muonckpt.checkpoint.joint_state import RankBoxes
from muonckpt.checkpoint.reading_plan import AskedTensor, JointRequest, plan_reading
from muonckpt.record.record import Chunk, Chunks, Extent, Manifest, StateRecord


def boxes_of(layout) -> tuple[RankBoxes, ...]:
    """Return the boxes of each rank, which is the number of a buffer of the layout."""
    boxes: dict[int, list[Box]] = {}
    for fragment in layout.fragments:
        boxes.setdefault(int(fragment.place.buffer), []).append(fragment.box)
    return tuple(RankBoxes(rank, tuple(rank_boxes)) for rank, rank_boxes in sorted(boxes.items()))


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(product(*map(range, box.lo, box.hi)))


def stored(key: str, shape, layout, rng, dtype: str) -> StateRecord:
    """Return a tensor in chunks like the boxes of a layout, in three files, some with a CRC-32."""
    boxes = sorted({fragment.box for fragment in layout.fragments}, key=lambda box: box.lo)
    size, chunks = {"float32": 4, "bfloat16": 2}[dtype], []
    for number, box in enumerate(boxes):
        extent = Extent(f"file{rng.integers(3)}", 1000 * number, box.numel * size)
        crc32 = int(rng.integers(100)) if rng.random() < 0.8 else None
        chunks.append(Chunk(box, extent, extent, "0" * 32, crc32))
    return StateRecord(key, (key,), shape, dtype, Chunks.of(chunks, len(shape)))


class Units:
    """Stands for what a checkpoint tells of its chunks: which are not divided, and whose item others share."""

    def __init__(self, whole_chunks: dict[str, dict[int, Extent | None]]) -> None:
        self._whole = whole_chunks

    def divisible(self, tensor: StateRecord) -> tuple[bool, ...]:
        whole = self._whole.get(tensor.key, {})
        return tuple(chunk.crc32 is not None and n not in whole for n, chunk in enumerate(tensor.chunks))

    def shared_items(self, tensor: StateRecord) -> dict[int, Extent]:
        return {number: item for number, item in self._whole.get(tensor.key, {}).items() if item is not None}


MACHINES = (range(8), (0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1), (0, 1, 2, 0, 1, 2, 0, 1))


@pytest.mark.parametrize("seed", [*range(40), 161, 282])
def test_each_element_is_read_or_received_once_by_all_who_ask_for_it(seed, monkeypatch):
    monkeypatch.setattr("muonckpt.checkpoint.reading_plan.MIN_SHARED_BYTES", 16)
    # Draw tensors in chunks, of which some are not to be divided, and one or two layouts requested of each tensor.
    rng = np.random.default_rng(seed)
    memory, machines = int(rng.integers(40, 400)), MACHINES[seed % len(MACHINES)]
    tensors, requests, whole_chunks = [], {}, {}
    for number in range(6):
        shape, key, dtype = random_shape(rng), f"{number}", str(rng.choice(["float32", "bfloat16"]))
        tensors.append(stored(key, shape, READERS[rng.integers(len(READERS))](rng, shape), rng, dtype))
        layouts = [READERS[rng.integers(len(READERS))](rng, shape) for _ in range(int(rng.integers(1, 3)))]
        requests[key] = tuple(AskedTensor(f"{key}.{n}", boxes_of(layout)) for n, layout in enumerate(layouts))
        if rng.random() < 0.3:
            whole_chunks[key] = {
                chunk: (None, Extent("item", 0, 1))[rng.integers(2)]
                for chunk in range(len(tensors[-1].boxes))
                if rng.random() < 0.5
            }
    units = Units(whole_chunks)
    rounds = plan_reading(Manifest(tuple(tensors), ()), JointRequest(requests, {}), machines, memory, units)

    # Follow the plan by elements: readers read ranges of chunks, and moves bring boxes to those who requested them.
    read: Counter = Counter()  # by reader
    received: Counter = Counter()
    readers_of_chunk: dict[tuple[str, int], set[int]] = {}
    for reading_round in rounds:
        sent_elements: dict[tuple[str, int], list[tuple[int, ...]]] = {}
        load: Counter = Counter()
        lengths = [0]
        for tensor, reading in reading_round.readings:
            for part in reading.ranges:
                chunk = tensor.chunks[part.chunk]
                lengths.append(part.stop - part.start)
                assert part.is_whole == ((part.start, part.stop) == (0, chunk.box.numel))
                readers_of_chunk.setdefault((tensor.key, part.chunk), set()).update(part.readers)
                range_boxes = [box.shift(chunk.box.lo) for box in flat_boxes(chunk.box.shape, part.start, part.stop)]
                assert part.boxes in ((), tuple(range_boxes))
                for reader in part.readers:
                    assert part in reading.ranges_by_reader[reader]
                    for box in range_boxes:
                        read.update((tensor.key, reader, index) for index in indices(box))
                    for box in part.boxes:
                        sent_elements.setdefault((tensor.key, reader), []).extend(sorted(indices(box)))
                    load[reader] += sum(box.numel for box in part.boxes) * (4 if tensor.dtype == "float32" else 2)
        # A rank keeps no more in a round than its memory, or one range or item that is larger.
        if not any(units.shared_items(tensor) for tensor, _ in reading_round.readings):
            assert max(load.values(), default=0) <= max(memory, 4 * max(lengths))
        for move in reading_round.moves:
            copies = move.copies
            columns = (column.tolist() for column in (copies.lo, copies.hi, copies.source, copies.target))
            for (lo, hi, source, target), offset in zip(
                zip(*columns, strict=True), copies.source_offset.tolist(), strict=True
            ):
                box = Box(tuple(lo), tuple(hi))
                elements = sent_elements[move.source, source]
                assert source != target and elements[offset] == box.lo and indices(box) <= set(elements)
                received.update((move.target, target, index) for index in indices(box))
    # No rank reads an element twice, and chunks are read in full: by one rank's machine where they are not divided.
    assert set(read.values()) <= {1}
    for tensor in tensors:
        for number, box in enumerate(tensor.boxes):
            readers = readers_of_chunk.get((tensor.key, number), set())
            distinct = {index for reader in readers for index in indices(box) if (tensor.key, reader, index) in read}
            assert distinct == (indices(box) if readers else set())
            if not units.divisible(tensor)[number]:
                assert all((tensor.key, reader, index) in read for reader in readers for index in indices(box))
                assert len({machines[reader] for reader in readers}) <= 1
    # Whoever requested a box has read each of its elements, or received it once; each machine's reads are its own.
    for targets in requests.values():
        for target, ranks in targets:
            for rank, boxes in ranks:
                for index in chain.from_iterable(map(indices, boxes)):
                    assert ((target.partition(".")[0], rank, index) in read) + received[target, rank, index] == 1
    if len(set(machines)) == len(machines):
        assert len({(key, index) for key, _, index in read}) == len(read)


def test_replicas_on_many_ranks_are_planned_with_few_tables_and_read_evenly():
    """Each of 200 tensors is on all of 256 ranks: readers take turns, and few ways of reading are planned."""
    num_ranks, shape = 256, (1024, 1024)
    everywhere = tuple(RankBoxes(rank, (Box.of(shape),)) for rank in range(num_ranks))
    extents = [Extent("file", number << 22, 1 << 22) for number in range(200)]
    chunks = [Chunks.of([Chunk(Box.of(shape), extent, extent, "0" * 32, 1)], 2) for extent in extents]
    tensors = [StateRecord(str(n), (str(n),), shape, "float32", of_tensor) for n, of_tensor in enumerate(chunks)]
    asked = {tensor.key: (AskedTensor(tensor.key, everywhere),) for tensor in tensors}
    manifest, request = Manifest(tuple(tensors), ()), JointRequest(asked, {})
    rounds = plan_reading(manifest, request, range(num_ranks), 1 << 28, Units({}))
    readings = [reading for of_round in rounds for _, reading in of_round.readings]
    assert len({id(reading) for reading in readings}) <= 8
    bytes_by_rank = Counter()
    for reading in readings:
        for part in reading.ranges:
            (reader,) = part.readers
            bytes_by_rank[reader] += part.stop - part.start
    assert sum(bytes_by_rank.values()) == 200 << 20
    assert len(bytes_by_rank) >= num_ranks // 2
    assert max(bytes_by_rank.values()) <= 3 * (200 << 20) / num_ranks
    # On one machine each of them reads all, and sends nothing.
    (only,) = plan_reading(manifest, request, [0] * num_ranks, 1 << 28, Units({}))
    assert only.bytes_sent == 0
    assert {part.readers for _, reading in only.readings for part in reading.ranges} == {(*range(num_ranks),)}
