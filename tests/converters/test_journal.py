"""Journals and locks, in a directory and in an object store."""

from __future__ import annotations

import numpy as np
import pytest

from muonckpt.converters.engine.staging import SUMS, FinishedFile, Journal, finished, sealed, unsealed
from muonckpt.store.io import lock
from muonckpt.store.io.location import location
from muonckpt.store.io.new_file import read_lines

SUMS_DONE = np.array([(b"\xcd" * 16, 7, 2**64 - 1), (bytes(16), 0, 5)], SUMS)
DONE = FinishedFile(("ab" * 16,), SUMS_DONE.tobytes())


@pytest.fixture(params=["directory", "object store"])
def place(request, tmp_path):
    """An empty place."""
    return tmp_path if request.param == "directory" else location(f"memory://{tmp_path.name}")


def test_what_is_noted_is_read_whole(place):
    journal = Journal(place / "0", "job")
    for number in range(12):
        journal.add(f"file {number}\n", DONE)
    journal.add("file 3\n", FinishedFile((), b""))
    journal.close()
    told = finished(read_lines(place / "0"), "job")
    assert told == {f"file {number}\n": DONE for number in range(12)} | {"file 3\n": FinishedFile((), b"")}
    assert np.array_equal(told["file 0\n"].chunks, SUMS_DONE) and not len(told["file 3\n"].chunks)
    assert finished(read_lines(place / "0"), "another job") == {}


def test_every_damaged_byte_of_a_line_costs_that_line_and_no_other():
    lines = [sealed("job", {"file": name, "finished": DONE.to_json()}) for name in "abc"]
    for position in range(len(lines[1])):
        damaged = lines[1][:position] + bytes([lines[1][position] ^ 1]) + lines[1][position + 1 :]
        told = finished([line for part in (lines[0], damaged, lines[2]) for line in part.splitlines()], "job")
        assert told == {"a": DONE, "c": DONE}, position
    for length in range(len(lines[1])):
        assert unsealed("job", lines[1][:length]) is None


def test_a_lock_has_one_owner_and_the_next_sees_what_the_first_wrote(place):
    first = lock.open_lock(place, "lock")
    assert first.earlier is None
    first.sign(b"one")
    assert first.is_mine()
    first.close()
    second = lock.open_lock(place, "lock")
    assert [line for line in second.earlier if line] == [b"one"] and first.is_mine() and not second.is_mine()
    second.sign(b"two")
    assert second.is_mine() and not first.is_mine()
    second.close()


def test_a_directory_is_locked_as_long_as_its_lock_is_open(tmp_path):
    first = lock.open_lock(tmp_path, "journal/lock")
    with pytest.raises(lock.InUse):
        lock.open_lock(tmp_path, "journal/lock")
    first.close()
    lock.open_lock(tmp_path, "journal/lock").close()


def test_of_two_that_make_a_lock_in_a_store_at_once_one_is_refused(tmp_path):
    place = location(f"memory://{tmp_path.name}")
    first, second = lock.open_lock(place, "lock"), lock.open_lock(place, "lock")
    first.sign(b"one")
    with pytest.raises(lock.InUse):
        second.sign(b"two")
    assert first.is_mine() and not second.is_mine()
