"""Chunks of a source are checked by what is copied from them, in whatever runs and order."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest
import torch
from support.sharded import edit

import muonckpt
from muonckpt import SourceError
from muonckpt.converters.engine.source_rows import CopiedRuns, SourceRows, Unchecked


def runs_of(payload: bytes, random: random.Random) -> list[tuple[int, int, int]]:
    """The payload cut at random places, in random order, some runs twice."""
    cuts = sorted(random.sample(range(1, len(payload)), random.choice([0, 1, 2, 9])))
    runs = [(a, b, zlib.crc32(payload[a:b])) for a, b in zip([0, *cuts], [*cuts, len(payload)], strict=True)]
    runs += random.sample(runs, len(runs) // 3)
    random.shuffle(runs)
    return runs


def test_the_runs_of_a_chunk_tell_whether_it_is_whole(tmp_path: Path):
    muonckpt.save({"a": torch.randn(500), "b": torch.randn(500)}, tmp_path / "c")
    rng = random.Random(0)
    with muonckpt.open(tmp_path / "c") as opened:
        rows, payloads = SourceRows(opened.manifest), opened.payloads
        chunk = opened.manifest.tensors[0].chunks[0]
        payload = bytes(payloads.view(chunk.payload))
        for _ in range(40):
            unchecked, passed = Unchecked(rows), list[int]()
            copied, runs = CopiedRuns(payloads, unchecked, passed.append), runs_of(payload, rng)
            copied.add(1, 4, 8, 0)  # never whole: it stays unchecked
            for number, run in enumerate(runs):
                assert (len(unchecked) == 1) is ({*runs[:number]} == {*runs})
                copied.add(0, *run)
            assert passed == [len(payload)]
            assert list(unchecked) == [1]

        def add_all(of: bytes) -> None:
            copied = CopiedRuns(payloads, Unchecked(rows), lambda count: None)
            for run in runs_of(of, rng):
                copied.add(0, *run)

        flipped = bytes([payload[0] ^ 1, *payload[1:]])
        with pytest.raises(SourceError, match=r"tensor 'a' box \[0:500\] in .* changed while it was read"):
            add_all(flipped)
        edit(tmp_path / "c" / chunk.item.file, chunk.payload.offset)
        with pytest.raises(SourceError, match="is damaged: digest"):
            add_all(flipped)


def test_a_chunk_is_checked_whose_item_begins_where_one_without_elements_does(tmp_path: Path):
    muonckpt.save({"empty": torch.zeros(0, 3), "full": torch.arange(50.0)}, tmp_path / "own")
    muonckpt.convert(tmp_path / "own", tmp_path / "c.safetensors", format="safetensors")
    with muonckpt.open(tmp_path / "c.safetensors") as opened:
        empty, full = (tensor.chunks[0] for tensor in opened.manifest.tensors)
    assert (empty.item.offset, empty.item.length) == (full.item.offset, 0)
    edit(tmp_path / "c.safetensors", -5)
    with pytest.raises(SourceError, match=r"tensor 'full' box \[0:50\] in .* is damaged: digest"):
        muonckpt.reshard(tmp_path / "c.safetensors", tmp_path / "out", mesh={"dp": 2})
