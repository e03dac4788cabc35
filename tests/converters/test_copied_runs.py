"""Chunks of a source are checked by what is copied from them, in whatever runs and order."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from support.sharded import edit

import muonckpt
from muonckpt import SourceError
from muonckpt.converters.engine.source_rows import SourceChecks, SourceRows


def runs_of(payload: bytes, random: random.Random) -> list[tuple[int, bytes]]:
    """The payload cut at random places, in random order, some runs twice."""
    cuts = sorted(random.sample(range(1, len(payload)), random.choice([0, 1, 2, 9])))
    runs = [(a, payload[a:b]) for a, b in zip([0, *cuts], [*cuts, len(payload)], strict=True)]
    runs += random.sample(runs, len(runs) // 3)
    random.shuffle(runs)
    return runs


def test_the_runs_of_a_chunk_tell_whether_it_is_whole(tmp_path: Path):
    muonckpt.save({"a": torch.randn(500), "b": torch.randn(500)}, tmp_path / "c")
    rng = random.Random(0)
    with muonckpt.open(tmp_path / "c") as opened:
        rows, payloads = SourceRows(opened.manifest), opened.payloads
        chunks, others = (tensor.chunks for tensor in opened.manifest.tensors)
        payload = bytes(payloads.view(chunks[0].payload))

        def checks_of(progress) -> SourceChecks:
            return SourceChecks(payloads, rows, rows.has_elements, np.zeros(len(rows), np.bool_), progress)

        for _ in range(40):
            passed = list[int]()
            checks, runs = checks_of(passed.append), runs_of(payload, rng)
            checks.read(others, 0, 4, memoryview(payload)[4:8])  # never whole: it stays unchecked
            for number, (start, raw) in enumerate(runs):
                assert (checks.waiting.tolist() == [1]) is ({*runs[:number]} == {*runs})
                checks.read(chunks, 0, start, memoryview(raw))
            assert passed == [len(payload)] and checks.waiting.tolist() == [1]

        def read_all(of: bytes) -> None:
            checks = checks_of(lambda count: None)
            for start, raw in runs_of(of, rng):
                checks.read(chunks, 0, start, memoryview(raw))

        flipped = bytes([payload[0] ^ 1, *payload[1:]])
        with pytest.raises(SourceError, match=r"tensor 'a' box \[0:500\] in .* changed while it was read"):
            read_all(flipped)
        edit(tmp_path / "c" / chunks[0].item.file, chunks[0].payload.offset)
        with pytest.raises(SourceError, match="is damaged: digest"):
            read_all(flipped)


def test_a_chunk_is_checked_whose_item_begins_where_one_without_elements_does(tmp_path: Path):
    muonckpt.save({"empty": torch.zeros(0, 3), "full": torch.arange(50.0)}, tmp_path / "own")
    muonckpt.convert(tmp_path / "own", tmp_path / "c.safetensors", format="safetensors")
    with muonckpt.open(tmp_path / "c.safetensors") as opened:
        empty, full = (tensor.chunks[0] for tensor in opened.manifest.tensors)
    assert (empty.item.offset, empty.item.length) == (full.item.offset, 0)
    edit(tmp_path / "c.safetensors", -5)
    with pytest.raises(SourceError, match=r"tensor 'full' box \[0:50\] in .* is damaged: digest"):
        muonckpt.reshard(tmp_path / "c.safetensors", tmp_path / "out", mesh={"dp": 2})
