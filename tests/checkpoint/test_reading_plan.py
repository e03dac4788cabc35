"""A reading plan reads every byte once, and moves every requested element to all who request it."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from support.random_layouts import READERS, random_shape

from muonckpt.algebra.box import Box, flat_boxes
from muonckpt.checkpoint.joint_state import RankBoxes
from muonckpt.checkpoint.reading_plan import AskedTensor, JointRequest, ReadingPlan
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


@pytest.mark.parametrize("seed", range(25))
def test_each_element_is_read_once_and_comes_to_all_who_ask_for_it(seed, monkeypatch):
    monkeypatch.setattr("muonckpt.checkpoint.reading_plan.MIN_SHARED_BYTES", 16)
    # Draw tensors in chunks, of which some are not to be divided, and one or two layouts requested of each tensor.
    rng = np.random.default_rng(seed)
    memory = int(rng.integers(40, 400))
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
    plan = ReadingPlan.of(Manifest(tuple(tensors), ()), JointRequest(requests, {}), 8, memory, memory, whole_chunks)

    # Follow the plan by elements: readers read ranges of chunks, and moves bring boxes to those who requested them.
    read: Counter = Counter()
    received: Counter = Counter()
    chunk_readers: dict[tuple[str, int], set[int]] = {}
    for reading_round in plan.rounds:
        elements_of_reader: dict[tuple[str, int], list[tuple[int, ...]]] = {}
        load: Counter = Counter()
        lengths = []
        for tensor, reading in reading_round.readings:
            for part, boxes in zip(reading.ranges, reading.boxes, strict=True):
                chunk = tensor.chunks[part.chunk]
                lengths.append(part.stop - part.start)
                assert part.is_whole == ((part.start, part.stop) == (0, chunk.box.numel))
                chunk_readers.setdefault((tensor.key, part.chunk), set()).add(part.reader)
                read.update((tensor.key, part.chunk, element) for element in range(part.start, part.stop))
                range_boxes = [box.shift(chunk.box.lo) for box in flat_boxes(chunk.box.shape, part.start, part.stop)]
                assert boxes == (tuple(range_boxes) if part.is_asked else ())
                elements = elements_of_reader.setdefault((tensor.key, part.reader), [])
                for box in boxes:
                    elements += sorted(indices(box))
                load[part.reader] += sum(box.numel for box in boxes) * (4 if tensor.dtype == "float32" else 2)
        # A rank reads no more in a round than its memory, or one range that is larger.
        assert max(load.values()) <= max(memory, 4 * max(lengths))
        for move in reading_round.moves:
            copies = move.copies
            columns = (column.tolist() for column in (copies.lo, copies.hi, copies.source, copies.target))
            for (lo, hi, source, target), offset in zip(
                zip(*columns, strict=True), copies.source_offset.tolist(), strict=True
            ):
                box = Box(tuple(lo), tuple(hi))
                elements = elements_of_reader[move.source, source]
                assert elements[offset] == box.lo and indices(box) <= set(elements)
                received.update((move.target, target, index) for index in indices(box))
    # No element is read twice, chunks are read in full, and each by one rank where they are not to be divided.
    assert set(read.values()) <= {1}
    item_readers: set[int] = set()
    for tensor in tensors:
        chunks = {key[1] for key in read if key[0] == tensor.key}
        assert sum(tensor.boxes[chunk].numel for chunk in chunks) == sum(key[0] == tensor.key for key in read)
        for chunk in chunks:
            is_whole = chunk in whole_chunks.get(tensor.key, {})
            if is_whole or tensor.chunks[chunk].crc32 is None:
                assert len(chunk_readers[tensor.key, chunk]) == 1
            if is_whole and whole_chunks[tensor.key][chunk] is not None:
                item_readers |= chunk_readers[tensor.key, chunk]
    assert len(item_readers) <= 1
    # Whoever requested a box has received each of its elements, once.
    expected: Counter = Counter()
    for targets in requests.values():
        for target, ranks in targets:
            for rank, boxes in ranks:
                for box in boxes:
                    expected.update((target, rank, index) for index in indices(box))
    assert received == expected


def test_replicas_on_many_ranks_are_planned_with_few_tables_and_read_evenly():
    """Each of 200 tensors is on all of 256 ranks: readers take turns, and few ways of reading are planned."""
    num_ranks, shape = 256, (1024, 1024)
    everywhere = tuple(RankBoxes(rank, (Box.of(shape),)) for rank in range(num_ranks))
    extents = [Extent("file", number << 22, 1 << 22) for number in range(200)]
    chunks = [Chunks.of([Chunk(Box.of(shape), extent, extent, "0" * 32, 1)], 2) for extent in extents]
    tensors = [StateRecord(str(n), (str(n),), shape, "float32", of_tensor) for n, of_tensor in enumerate(chunks)]
    asked = {tensor.key: (AskedTensor(tensor.key, everywhere),) for tensor in tensors}
    plan = ReadingPlan.of(Manifest(tuple(tensors), ()), JointRequest(asked, {}), num_ranks, 1 << 30, 1 << 28, {})
    readings = [reading for of_round in plan.rounds for _, reading in of_round.readings]
    assert len({id(reading) for reading in readings}) <= 8
    bytes_by_rank = Counter()
    for reading in readings:
        for part in reading.ranges:
            bytes_by_rank[part.reader] += part.stop - part.start
    assert sum(bytes_by_rank.values()) == 200 << 20
    assert len(bytes_by_rank) >= num_ranks // 2
    assert max(bytes_by_rank.values()) <= 3 * (200 << 20) / num_ranks
