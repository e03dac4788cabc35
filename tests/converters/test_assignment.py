"""Which worker writes which file, and checks which chunk of the source."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.resharded import plan_job, saved

from muonckpt.converters.engine.job import Share, part_ends
from muonckpt.converters.engine.workers import Worker


@given(st.lists(st.integers(0, 40), max_size=7), st.integers(1, 5))
def test_parts_follow_each_other_and_the_largest_is_as_small_as_can_be(sizes, world):
    ends = [0, *part_ends(sizes, world)]
    assert len(ends) == world + 1 and ends[-1] == len(sizes) and sorted(ends) == ends

    def largest(inner: tuple[int, ...]) -> int:
        return max(sum(sizes[a:b]) for a, b in pairwise((0, *inner, len(sizes))))

    assert largest(tuple(ends[1:-1])) == min(
        map(largest, combinations_with_replacement(range(len(sizes) + 1), world - 1))
    )


@pytest.mark.parametrize("world", [1, 2, 3, 9])
def test_every_file_has_one_worker_and_every_chunk_is_checked_by_all_who_copy_from_it(world):
    job = plan_job(saved("own rows4"), 7)
    parts = [Share.of(job, Worker(rank, world)) for rank in range(world)]
    assert sorted(file.name for part in parts for file in part.files) == sorted(file.name for file in job.files)
    everything = set(np.flatnonzero(job.rows.has_elements).tolist())

    def checked(part: Share) -> set:
        return set(np.flatnonzero(part.checked).tolist())

    def copied(part: Share) -> set:
        chunks = [pair for file in part.files for pair in zip(file.chunks.outputs, file.chunks.plans, strict=True)]
        return {int(job.rows.rows([output], n)[0]) for output, plan in chunks for n in plan.copies.buffers}

    assert set().union(*map(checked, parts)) == everything
    for part in parts:
        others = set().union(*(copied(other) for other in parts if other is not part))
        assert copied(part) <= checked(part)
        assert set(np.flatnonzero(part.shared).tolist()) == copied(part) & others
    loads = [sum(file.length for file in part.files) for part in parts]
    assert max(loads) <= sum(loads) / world + max(file.length for file in job.files)
    if world in (2, 3):  # rows: who writes a part of the rows reads that part only
        assert sum(len(checked(part)) for part in parts) < world * len(everything)
