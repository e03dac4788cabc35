"""A checkpoint that one rank opens for all: what describes it is read and parsed once, whatever the number of ranks."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable

import torch.distributed as dist

from ..errors import SourceError
from ..store.io.location import Location
from ..store.open_checkpoint import OpenCheckpoint, open
from .all_ranks import told_by_first


def opened_together(process_group: dist.ProcessGroup | None, place: Callable[[], Location]) -> OpenCheckpoint | None:
    """The checkpoint at a place that all ranks see; None where each has to open it for itself.  Collective.

    So it is with formats whose readers keep what cannot be sent, such as zarr's decoders or those of a plug-in.

    Args:
        place: asked on the first rank of the group, whose errors are those of all.

    Raises:
        MuonckptError: of the first rank; the same on every rank.
        LostRankError: another rank was lost.
    """
    mine: list[OpenCheckpoint] = []

    def of_first() -> bytes | None:
        mine.append(open(place()))
        return _packed(mine[0]) if dist.is_initialized() else None

    told = told_by_first(process_group, SourceError, of_first)
    return mine[0] if mine else None if told is None else _unpacked(told)


def _packed(checkpoint: OpenCheckpoint) -> bytes | None:
    try:
        return zlib.compress(pickle.dumps(checkpoint), 1)  # columns are mostly zeros, or alike
    except (pickle.PicklingError, TypeError, AttributeError):  # which of them depends on what cannot be pickled
        return None


def _unpacked(told: bytes) -> OpenCheckpoint:
    checkpoint = pickle.loads(zlib.decompress(told))
    assert isinstance(checkpoint, OpenCheckpoint)
    return checkpoint
