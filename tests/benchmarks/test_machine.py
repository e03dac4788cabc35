"""The counters of benchmarks: what gets past one is an error, and no figure."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from checkpoint import LOADERS, SAVERS
from machine import bytes_read
from rank_threads import in_threads


@pytest.mark.parametrize("who", LOADERS)
def test_what_a_load_reads_is_counted(who, tmp_path):
    saved = torch.arange(500_000.0)
    SAVERS[who]({"w": saved}, tmp_path / who)
    into = {"w": torch.zeros_like(saved)}
    assert bytes_read(lambda: LOADERS[who](into, tmp_path / who), saved.nbytes) >= saved.nbytes
    assert torch.equal(into["w"], saved)


def test_the_system_counts_each_byte_that_a_call_reads(tmp_path):
    (tmp_path / "file").write_bytes(bytes(3_000_000))
    with (tmp_path / "file").open("rb") as file:
        around = bytes_read(lambda: None, 0)  # reading the count itself
        assert bytes_read(lambda: os.pread(file.fileno(), 2_000_000, 7), 0) == pytest.approx(2_000_000 + around, abs=64)


def test_bytes_that_are_read_past_the_counter_are_an_error(tmp_path):
    (tmp_path / "file").write_bytes(bytes(3_000_000))
    with (
        (tmp_path / "file").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        pytest.raises(RuntimeError, match="bytes read, which cannot be fewer than 3000000"),
    ):
        bytes_read(lambda: bytes(mapped), 3_000_000)


def exchanging(rank, folder, traffic):
    traffic.counted("it")
    sent = torch.zeros(4)
    dist.gather(sent, [torch.zeros(4), torch.zeros(4)] if rank == 0 else None)
    dist.broadcast(sent, src=0)
    with pytest.raises(RuntimeError, match="all_reduce is not counted"):
        dist.all_reduce(torch.ones(1))
    traffic.counted(None)
    dist.all_reduce(torch.ones(1))


def test_what_ranks_exchange_is_counted_or_refused():
    honest = dist.gather
    assert in_threads(2, exchanging).bytes["it"] == 3 * 16
    assert dist.gather is honest
