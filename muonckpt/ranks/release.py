"""Waits at the end of a program until gloo's threads have released the tensors of its last collectives.

A thread of gloo reports a collective as done before it releases the tensors, for which it needs the interpreter.  If
the interpreter ends in between, Python ends that thread amid C++ code, and the process aborts after all its work is
done: "terminate called without an active exception" (seen with torch 2.13 on a busy machine).
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque

from torch import Tensor

_LONGEST_WAIT = 2.0
"""Seconds; a collective that has failed may hold its tensors for good."""

_last_aliases: deque[weakref.ref[Tensor]] = deque(maxlen=16)
"""Aliases in the last collectives.  One lives while a thread of torch holds it."""


def in_flight(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor for a collective alone, so that the end of the program waits for its release.

    A tensor on a GPU is returned as it is: its collectives are not gloo's.
    """
    if tensor.device.type != "cpu":
        return tensor
    alias = tensor.detach()
    _last_aliases.append(weakref.ref(alias))
    return alias


@atexit.register
def _await_release() -> None:
    deadline = time.monotonic() + _LONGEST_WAIT
    while any(alias() is not None for alias in _last_aliases) and time.monotonic() < deadline:
        time.sleep(0.001)  # other threads run meanwhile
