"""Real text that every Python has: the sources of its own standard library, as bytes."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def standard_library(limit: int = 4_000_000) -> Tensor:
    """The top-level modules of the standard library, in the order of their names: uint8 [at most `limit`]."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise FileNotFoundError(f"this Python keeps no sources of its standard library in {folder}")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def global_batch(text: Tensor, *, seed: int, step: int, rows: int, seq: int) -> Tensor:
    """The whole batch of one step, a pure function of its arguments: int64 [rows, seq + 1].

    A row is `seq + 1` consecutive bytes from a random place: inputs are `[:, :-1]`, targets `[:, 1:]`.
    """
    place = random.Random(f"{seed}/{step}")  # seeded by a string: stable across platforms and Python versions
    starts = [place.randrange(len(text) - seq) for _ in range(rows)]
    return torch.stack([text[start : start + seq + 1] for start in starts]).long()


def rank_rows(batch: Tensor, rank: int, world: int) -> Tensor:
    """The consecutive rows of `batch` that `rank` trains on: [rows / world, seq + 1]."""
    if len(batch) % world:
        raise ValueError(f"a batch of {len(batch)} rows does not divide evenly over {world} ranks")
    return batch.chunk(world)[rank]
