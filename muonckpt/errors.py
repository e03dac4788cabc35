"""Errors that a user can meet.

Each says what is wrong, what was expected, what was found, where, and what to do.  The command line maps the
four families to exit codes; nothing else depends on the hierarchy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MuonckptError(Exception):
    """Base of every error raised on purpose by this package."""


class LayoutError(MuonckptError, ValueError):
    """A layout or a plan is impossible: a hole, a partial overlap, a box out of bounds, a wrong shape."""


class TargetError(LayoutError):
    """What is asked for does not fit the checkpoint, whatever its state: an unknown axis, a dim that is not there."""


class SourceError(MuonckptError):
    """A checkpoint cannot be read: missing, refused, corrupt or incomplete."""


class DestinationError(MuonckptError):
    """A checkpoint cannot be written: the place is taken, full or not writable."""


class Interrupted(MuonckptError):
    """Work stopped half-way and can be resumed."""


@contextmanager
def about(subject: object) -> Iterator[None]:
    """Put what an error is about, such as a tensor or a file, in front of any error of ours that is raised inside."""
    try:
        yield
    except MuonckptError as error:
        raise type(error)(f"{subject}: {error}") from error
