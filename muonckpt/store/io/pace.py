"""Reading at a bounded rate, for work in the background of a training that needs the disk and the network."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock


class Pace:
    """Holds the threads that read back to a rate; called with the bytes of each read, before it.

    Args:
        rate: bytes a second.
        clock, sleep: of this process; others are for tests.
    """

    def __init__(
        self, rate: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        if not rate > 0:
            raise ValueError(f"a rate of {rate} bytes a second reads nothing")
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._free = clock()
        self._lock = Lock()

    def __call__(self, count: int) -> None:
        """Wait until all earlier reads have had their time."""
        with self._lock:
            now = self._clock()
            start = max(self._free, now)
            self._free = start + count / self._rate
        if start > now:
            self._sleep(start - now)
