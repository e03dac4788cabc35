"""A chunk that several ranks read in runs: none reads more than it needs, and damage is found all the same."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from support.sharded import as_stock
from support.workers import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonckpt
from muonckpt import SourceError
from muonckpt.checkpoint.chunk_reader import ByteRun, ChunkReader, PartlyRead, holds, run_of
from muonckpt.store.io.checksums import join_crc32
from muonckpt.store.io.regular import LocalFile


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 1 << 40))
def test_the_sum_of_two_runs_is_that_of_both_end_to_end(first, second, far):
    assert join_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
    in_two_steps = join_crc32(join_crc32(zlib.crc32(first), 0, far), 0, 5)
    assert join_crc32(zlib.crc32(first), 0, far + 5) == in_two_steps


@st.composite
def windows(draw):
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    lo = [draw(st.integers(0, size - 1)) for size in shape]
    return tuple(lo), tuple(draw(st.integers(1, size - at)) for at, size in zip(lo, shape, strict=True)), tuple(shape)


@given(windows())
def test_a_window_is_a_run_if_and_only_if_its_elements_follow_each_other(window):
    lo, lengths, shape = window
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    mine = numbers[tuple(slice(at, at + n) for at, n in zip(lo, lengths, strict=True))].reshape(-1)
    follow = mine[-1] - mine[0] == len(mine) - 1
    assert run_of(lo, lengths, shape) == ((mine[0], mine[-1] + 1) if follow else None)


DATA = bytes(range(200))


def part(start: int, stop: int, flip: int = 0) -> ByteRun:
    return ByteRun(start, stop, zlib.crc32(DATA[start:stop]) ^ flip)


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ([part(120, 200), part(0, 50), part(50, 120)], True),
        ([part(0, 50), part(50, 200), part(0, 50)], True),  # replicas
        ([part(0, 50), part(50, 200, flip=4)], False),
        ([part(0, 50), part(50, 200), part(0, 50, flip=1)], False),  # replicas that differ
        ([part(0, 50), part(60, 200)], None),
        ([part(0, 50), part(40, 200)], None),
        ([], None),
    ],
)
def test_runs_tell_whether_they_are_the_payload_or_that_they_cannot(runs, verdict):
    assert holds([PartlyRead(len(DATA), zlib.crc32(DATA), tuple(runs))]) is verdict
    reads = [PartlyRead(len(DATA), zlib.crc32(DATA), (run,)) for run in runs]
    assert not reads or holds(reads) is verdict


@pytest.mark.parametrize("flip", range(1, 9))
def test_ranks_whose_items_say_other_things_do_not_agree(flip):
    whole = zlib.crc32(DATA)
    halves = [PartlyRead(len(DATA), whole, (part(0, 100),)), PartlyRead(len(DATA), whole ^ flip, (part(100, 200),))]
    assert holds(halves) is holds(halves[::-1]) is False


def state(world: int, values: bool) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world,))
    sources = {"w": torch.arange(70.0).reshape(14, 5), "cube": torch.arange(3 * 7 * 2).reshape(3, 7, 2)}
    state = {name: value if values else torch.zeros_like(value) for name, value in sources.items()}
    placed = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in state.items()}
    return {**placed, "all": distribute_tensor(state["w"], mesh, [Replicate()])}


def save_job(rank, world, path):
    muonckpt.save(state(world, values=True), path)


def load_job(rank, world, path):
    """Bytes of payloads that this rank needs and those that it looked at, or the error."""
    seen, fill = set(), LocalFile.fill
    LocalFile.fill = lambda self, buffer, offset: (
        seen.update(range(offset, offset + len(buffer))) or fill(self, buffer, offset)
    )
    mine = state(world, values=False)
    try:
        muonckpt.load(mine, path)
    except SourceError as error:
        return str(error)
    finally:
        LocalFile.fill = fill
    for name, expected in state(world, values=True).items():
        assert torch.equal(mine[name].to_local(), expected.to_local()), name
    return sum(value.to_local().nbytes for value in mine.values()), len(seen)


def test_no_rank_reads_more_than_it_needs_when_there_are_more_ranks(tmp_path):
    run(1, save_job, str(tmp_path / "c"))
    for need, read in run(4, load_job, str(tmp_path / "c")):
        assert read == need


@pytest.mark.parametrize("stock", [False, True], ids=["manifest", "stock"])
def test_every_rank_hears_of_damage_in_what_one_has_read(stock, tmp_path):
    run(1, save_job, str(tmp_path / "c"))
    tensor = next(t for t in muonckpt.open(tmp_path / "c").outline.tensors if t.key == "w")
    payload = tensor.chunks[0].payload
    if stock:
        as_stock(tmp_path / "c")
    with (tmp_path / "c" / payload.file).open("r+b") as file:
        file.seek(payload.end - 1)
        file.write(b"?")
    for message in run(4, load_job, str(tmp_path / "c")):
        assert f"tensor 'w' box {tensor.chunks[0].box}" in message and payload.file in message
        assert f"is damaged: {'CRC-32' if stock else 'digest'}" in message


def test_what_a_rank_misread_is_an_error_although_the_file_is_whole(tmp_path):
    muonckpt.save({"w": torch.arange(12.0).reshape(4, 3)}, tmp_path / "c")
    reader = ChunkReader(tmp_path / "c")
    chunk = muonckpt.open(tmp_path / "c").tensors["w"].record.chunks[0]
    half = chunk.payload.length // 2
    first, second = (
        {("w", chunk.box.lo): PartlyRead(2 * half, chunk.crc32, (ByteRun(at, at + half, 1),))} for at in (0, half)
    )
    reader.judge([first])  # they do not tile it: the file is looked at
    with pytest.raises(SourceError, match=r"'w'.*a rank read other bytes"):
        reader.judge([first, second])
