"""Which ranges of a file are read for boxes and chunks, their checksums, and in which parts a file goes up."""

from __future__ import annotations

import operator
import pickle
import resource
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from muonckpt import DamageError
from muonckpt.algebra.box import row_major
from muonckpt.algebra.grouping import batches
from muonckpt.record.record import Extent
from muonckpt.store.io.checksums import JoinedCrc
from muonckpt.store.io.location import PART, part_bytes
from muonckpt.store.reading.blocks import blocks, join_ranges
from muonckpt.store.reading.payloads import Payloads

boxes = st.integers(0, 3).flatmap(
    lambda ndim: st.tuples(*[st.tuples(st.integers(1, 5), st.integers(0, 2), st.integers(0, 2)) for _ in range(ndim)])
)


@settings(max_examples=100)
@given(boxes, st.integers(0, 40), st.integers(1, 60))
def test_blocks_tile_a_box_and_keep_to_their_bounds(dims, gap, most):
    outer = tuple(before + length + after for length, before, after in dims)
    shape, strides = tuple(length for length, _, _ in dims), row_major(outer)
    found = list(blocks(shape, strides, gap, most))
    count = np.zeros(shape, int)
    for block in found:
        count[block.slices] += 1
        places = [0]
        for length, stride in zip(block.shape, strides, strict=True):
            places = [place + step * stride for place in places for step in range(length)]
        assert block.start == sum(map(operator.mul, (part.start for part in block.slices), strides))
        assert block.span == max(places) + 1 <= most
        assert max(np.diff(sorted(places)), default=1) - 1 <= gap
    assert (count == 1).all()
    together = list(batches(found, lambda block: block.span, most))
    assert [block for batch in together for block in batch] == found
    assert all(sum(block.span for block in batch) <= most for batch in together)


ranges = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 90), st.integers(1, 12)), max_size=20)


@settings(max_examples=200)
@given(ranges, st.integers(0, 9), st.integers(1, 60))
def test_joined_ranges_are_covered_by_few_runs_that_keep_to_their_bounds(places, gap, most):
    places.sort()
    file, start, length = np.array(places, np.int64).reshape(-1, 3).T
    stop = start + length
    runs = join_ranges(start, stop, gap, most, file)
    members = list(runs.members(len(places)))
    assert [number for run in members for number in run] == list(range(len(places)))
    for run, lo, hi in zip(members, runs.start, runs.stop, strict=True):
        assert len(set(file[run])) == 1 and (lo, hi) == (start[run].min(), stop[run].max())
        assert hi - lo <= most or len(run) == 1
        assert all(start[b] - stop[a] <= gap for a, b in pairwise(run))
    for one, other in pairwise(members):
        a, b = one[-1], other[0]
        reach = max(stop[one].max(), stop[b]) - start[one[0]]
        assert file[a] != file[b] or start[b] - stop[a] > gap or reach > most


@given(st.permutations(range(6)), st.integers(0, 6))
def test_the_crc_of_a_whole_follows_from_its_ranges_in_any_order(order, lacking):
    data, crc = bytes(range(60)), JoinedCrc()
    for number in order:
        if number != lacking:
            crc.add(10 * number, 10 * number + 10, zlib.crc32(data[10 * number : 10 * number + 10]))
    assert (crc.reached, crc.crc32) == (10 * lacking, zlib.crc32(data[: 10 * lacking]))


@pytest.mark.parametrize("length", [0, 1, PART, 9_000 * PART, 9_000 * PART + 1, 5 << 40])
def test_parts_are_few_enough_and_whole_mebibytes(length):
    part = part_bytes(length)
    assert part >= PART and part % (1 << 20) == 0 and -(-length // part) <= 10_000


def test_few_of_the_files_that_a_process_may_open_are_open_at_once(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for number in range(40):
        (tmp_path / str(number)).write_bytes(bytes([number]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        payloads = Payloads(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with payloads:
        for number in (*range(40), *range(40)):
            assert bytes(payloads.view(Extent(str(number), 0, 1))) == bytes([number])
        assert len(list(Path("/proc/self/fd").iterdir())) - open_before == 16
        (tmp_path / "0").write_bytes(b"other")
        with pytest.raises(DamageError, match="changed while it was read"):  # it was closed in between
            payloads.view(Extent("0", 0, 1))


def test_bytes_that_are_kept_are_read_as_those_of_a_file_in_every_process(tmp_path):
    payloads = Payloads(tmp_path)
    place = payloads.keep(b"abcd")
    assert payloads.keep(b"abcd") == place and payloads.is_in_memory(place.file)
    for copy in (payloads, pickle.loads(pickle.dumps(payloads))):
        assert bytes(copy.view(Extent(place.file, 1, 2))) == b"bc"
        with pytest.raises(DamageError, match="expected at least 5"):
            copy.view(Extent(place.file, 1, 4))
