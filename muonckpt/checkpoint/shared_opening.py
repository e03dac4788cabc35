"""A checkpoint that one rank opens for all: what describes it is read and parsed once, whatever the number of ranks."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable

import torch.distributed as dist

from ..columns import UNKNOWN
from ..errors import SourceError
from ..record import Manifest
from ..store.io.location import Location
from ..store.open_checkpoint import OpenCheckpoint, open
from .all_ranks import told_by_first


def opened_together(
    process_group: dist.ProcessGroup | None, place: Callable[[], Location]
) -> Callable[[], OpenCheckpoint | None]:
    """Makes the checkpoint at a place that all ranks see; None where each has to open it for itself.  Collective.

    So it is with formats whose readers keep what cannot be sent, such as zarr's decoders or those of a plug-in; and
    with elements that have no checksum, and lie where only the description says: a rank that sees another file would
    take whatever bytes are there.

    Args:
        place: asked on the first rank of the group, whose errors are those of all.

    Returns:
        What is called once, where an error of this rank reaches the others: it may lack a reader that the first has.

    Raises:
        MuonckptError: of the first rank; the same on every rank.
        LostRankError: another rank was lost.
    """
    mine: list[OpenCheckpoint] = []

    def of_first() -> bytes | None:
        mine.append(open(place()))
        return _packed(mine[0]) if dist.is_initialized() and _is_guarded(mine[0].outline) else None

    told = told_by_first(process_group, SourceError, of_first)
    return lambda: mine[0] if mine else None if told is None else _unpacked(told)


def _is_guarded(outline: Manifest) -> bool:
    """Whether every chunk has a checksum, or is in an item that says what it is, which the rank that reads it opens."""
    columns = outline.columns
    guarded = columns.has_digest | (columns.crc32 != UNKNOWN) | (columns.payload == UNKNOWN)
    return bool((guarded | (outline.elements == 0)).all())


def _packed(checkpoint: OpenCheckpoint) -> bytes | None:
    try:
        return zlib.compress(pickle.dumps(checkpoint), 1)  # columns are mostly zeros, or alike
    except Exception:  # whatever a reader raises that cannot be pickled; then each rank opens the checkpoint
        return None


def _unpacked(told: bytes) -> OpenCheckpoint:
    checkpoint = pickle.loads(zlib.decompress(told))
    assert isinstance(checkpoint, OpenCheckpoint)
    return checkpoint
