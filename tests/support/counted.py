"""The collectives that are called in a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The collectives that are called inside."""
    calls: Counter[str] = Counter()

    def recorded(name, honest):
        def call(*args, **kwargs):
            calls[name] += 1
            return honest(*args, **kwargs)

        return call

    names = ("all_to_all_single", "all_gather", "all_reduce", "broadcast", "all_gather_object", "barrier")
    patches = [patch.object(dist, name, recorded(name, getattr(dist, name))) for name in names]
    for patcher in patches:
        patcher.start()
    try:
        yield calls
    finally:
        for patcher in patches:
            patcher.stop()
