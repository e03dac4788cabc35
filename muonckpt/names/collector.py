"""The cycle collector during long plans; apart, as stores and the optimizer's planner share nothing else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the collector while a million small objects are made that all stay: it would search them in vain."""
    is_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if is_enabled:
            gc.enable()
