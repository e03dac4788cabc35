"""Opening files that somebody else made: regular ones only, without following a link or waiting for a pipe."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import SourceError


@contextmanager
def open_regular(file: Path) -> Iterator[int]:
    """A descriptor of a regular file, opened without following a link or waiting for a pipe."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise SourceError(f"cannot open {file}: {why}") from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise SourceError(f"{file}: expected a regular file, found another kind (a pipe, device or directory)")
        yield handle
    finally:
        os.close(handle)
