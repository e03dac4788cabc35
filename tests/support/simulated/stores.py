"""An object store in memory: puts are atomic, and a request of a killed process may come late."""

from __future__ import annotations

import errno
from typing import Any


class Store:
    def __init__(self, machine: Any) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}


def refusal(number: int) -> Exception:
    return PermissionError(errno.EACCES, "403") if number == 403 else OSError(errno.EIO, str(number))
