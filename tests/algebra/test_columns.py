"""Columns of byte ranges give back the rows that they were made of, whichever files and lengths these share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from muonckpt import SourceError
from muonckpt.algebra.box import MAX_ELEMENTS
from muonckpt.record.columns import UNKNOWN, Columns, ColumnsBuilder, Row

lengths = st.integers(0, 3)


@st.composite
def rows(draw) -> list[Row]:
    """Draw chunks of a few files; some payloads are unknown, and some begin before their item."""
    table = []
    for _ in range(draw(st.integers(0, 9))):
        name, item, length = draw(st.sampled_from(["a", "b", "c"])), draw(lengths), draw(lengths)
        payload = draw(st.one_of(st.just((UNKNOWN, UNKNOWN)), st.tuples(lengths, lengths)))
        digest = draw(st.sampled_from([None, "00" * 16, "ab" * 16]))
        table.append((name, item, length, *payload, digest, draw(st.sampled_from([UNKNOWN, 0, 2**32 - 1]))))
    return table


def all_rows(columns: Columns) -> list[Row]:
    return list(columns.rows(slice(None)))


@given(rows(), st.data())
def test_rows_come_out_as_they_went_in_however_they_are_taken(table, data):
    columns, count = Columns.of(table), len(table)
    assert all_rows(columns) == table
    # By column, then row by row, then by numbers, then as a slice.
    assert columns.item_end().tolist() == [row[1] + row[2] for row in table]
    for number in range(count):
        payload = table[number][3:5]
        assert (columns.payload(number), columns.payload_length(number)) == payload
        assert columns.payload_at(number) == (None if payload == (UNKNOWN, UNKNOWN) else payload)
    numbers = data.draw(st.lists(st.integers(0, count - 1), max_size=5)) if count else []
    assert list(columns.rows(np.array(numbers, np.int64))) == [table[number] for number in numbers]
    start = data.draw(st.integers(0, count))
    assert all_rows(columns.select(slice(start, None))) == table[start:]


@given(st.lists(rows(), max_size=4), st.data())
def test_columns_with_other_files_and_frames_are_joined(blocks, data):
    builder, expected = ColumnsBuilder(), []
    for block in blocks:
        # Two parts of a block, in the other order.
        columns, start = Columns.of(block), data.draw(st.integers(0, len(block)))
        builder.add(columns, start, len(block))
        builder.add(columns, 0, start)
        expected += block[start:] + block[:start]
    assert all_rows(builder.build()) == expected


@pytest.mark.parametrize("row", [("a", 5, MAX_ELEMENTS, 0, 1), ("a", 0, 1, MAX_ELEMENTS, 1), ("a", 2**62, 1, 0, 1)])
def test_a_range_that_ends_too_far_away_is_refused(row):
    with pytest.raises(SourceError, match="refused byte range"):
        Columns.of([("a", 0, 1, 0, 1, None, UNKNOWN), (*row, None, UNKNOWN)])
