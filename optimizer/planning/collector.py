"""Python's collector of cycles, which would look at all that a plan is made of again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Collect no cycles meanwhile: plans have none.

    A plan for thousands of ranks is hundreds of thousands of objects that stay.  While they are made, the collector
    goes through everything that the process has, models and imported modules included, which took half of the time.
    What other threads leave behind meanwhile is collected afterwards.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
