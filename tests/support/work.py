"""How much a block of code does, counted, where time would depend on the machine: calls, and looks at files."""

from __future__ import annotations

import sys
import threading
from types import FrameType, TracebackType
from typing import Any

_LOOKS = frozenset({"open", "stat", "lstat", "scandir", "listdir"})
"""Functions of the system that look up a path."""


class Work:
    """The calls of functions and the looks at paths in a block, also in threads that begin in it.

    Attributes:
        calls: of functions, Python's own and those in C.
        looks: of those, calls of the system by which a path is looked up, opened or listed.
    """

    def __init__(self) -> None:
        self.calls = self.looks = 0

    def __enter__(self) -> Work:
        threading.setprofile(self._count)
        sys.setprofile(self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _count(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            self.calls += 1
            if function.__name__ in _LOOKS and function.__module__ == "posix":
                imports = frame.f_code.co_filename.startswith("<frozen importlib")  # once a process, in whichever test
                self.looks += not imports
        elif event == "call":
            self.calls += 1
