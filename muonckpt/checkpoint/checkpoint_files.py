"""The files of a checkpoint as the ranks of a job see them: where they are, who reads which, and what damage means."""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

import torch.distributed as dist
import xxhash

from ..names.errors import SourceError
from ..record.columns import UNKNOWN
from ..record.record import Blob, StateRecord
from ..store.io.location import Location, location
from ..store.open_checkpoint import OpenCheckpoint
from ..store.verify.diagnosis import open_to_load
from .all_ranks import broadcast_from_first, group_ranks
from .reading_plan import FileReaders


class CheckpointFiles(FileReaders, Protocol):
    """The files of one checkpoint as the ranks of a job see them.

    Attributes:
        place: where this rank sees them.
        identity: the name of the checkpoint, which has to be the same on all ranks.
        raw_items: bytes of items that are not tensors, as far as every rank has them already.
    """

    @property
    def place(self) -> Location: ...

    @property
    def identity(self) -> str: ...

    @property
    def raw_items(self) -> Mapping[str, bytes]: ...

    def open_together(
        self, process_group: dist.ProcessGroup | None, check_arguments: Callable[[], None]
    ) -> Callable[[], OpenCheckpoint]:
        """Return a function that returns the open checkpoint; called once, where an error reaches all ranks.

        Args:
            check_arguments: is called on the rank that opens it, before that.
        """
        ...

    def outline_digest(self, checkpoint: OpenCheckpoint) -> str:
        """Return a digest of what plans follow from, as this rank sees it; nothing if all ranks have one outline."""
        ...

    def value_of(self, checkpoint: OpenCheckpoint, entry: StateRecord | Blob) -> Any:
        """Read a small value, such as an option of a parameter group."""
        ...

    def report(self, faults: Mapping[str, SourceError]) -> Mapping[str, str]:
        """Return what other ranks have to know of this rank's damaged files, or raise the first of the errors."""
        ...

    def refuse(self, faults: Sequence[Mapping[str, str]]) -> None:
        """Note that each rank cannot read some files; raise `DamageError` if nobody can."""
        ...


class SharedFiles:
    """Files that all ranks see in the same place."""

    divides_chunks = True
    raw_items: Mapping[str, bytes] = MappingProxyType({})

    def __init__(self, path: str | os.PathLike[str], process_group: dist.ProcessGroup | None) -> None:
        self._path = path
        self._ranks = range(len(group_ranks(process_group)))
        self._is_sent = False

    @cached_property
    def place(self) -> Location:
        return location(self._path, SourceError)

    @property
    def identity(self) -> str:
        return str(self.place)

    def of(self, file: str) -> Sequence[int]:
        return self._ranks

    def open_together(
        self, process_group: dist.ProcessGroup | None, check_arguments: Callable[[], None]
    ) -> Callable[[], OpenCheckpoint]:
        """Open the checkpoint on the first rank, and send it to the others where they can use it.

        They cannot with readers that cannot be sent, such as those of a plug-in; and not with elements that have no
        checksum and lie where only the description says: a rank that sees another file would take whatever bytes are
        there.  A rank may also lack a reader that the first one has, hence the function.
        """
        opened: list[OpenCheckpoint] = []

        def pack() -> bytes | None:
            check_arguments()
            opened.append(open_to_load(self.place))
            columns, elements = opened[0].outline.columns, opened[0].outline.elements
            in_items = columns.payload_length() == UNKNOWN  # their checksums are there, too
            is_checked = columns.has_digest | (columns.crc32 != UNKNOWN) | in_items
            if not dist.is_initialized() or not (is_checked | (elements == 0)).all():
                return None
            try:
                return zlib.compress(pickle.dumps(opened[0]), 1)  # columns are mostly zeros, or alike
            except Exception:  # whatever a reader raises that cannot be pickled
                return None

        packed = broadcast_from_first(process_group, SourceError, pack)

        self._is_sent = packed is not None

        def unpack() -> OpenCheckpoint:
            if opened:
                return opened[0]
            if packed is None:
                return open_to_load(self.place)
            checkpoint: OpenCheckpoint = pickle.loads(zlib.decompress(packed))
            return checkpoint

        return unpack

    def outline_digest(self, checkpoint: OpenCheckpoint) -> str:
        if self._is_sent or not dist.is_initialized():
            return ""
        outline, digest = checkpoint.outline, xxhash.xxh3_128()
        for tensor in outline.tensors:
            columns, rows = tensor.chunks.columns, slice(tensor.chunks.start, tensor.chunks.stop)
            files = [columns.names[number] for number in columns.file[rows].tolist()]
            digest.update(repr((tensor.key, tensor.shape, tensor.dtype, tensor.chunks.strides, files)).encode())
            digest.update(repr(((columns.crc32[rows] >= 0).tolist(), columns.payload_length(rows).tolist())).encode())
            digest.update(repr([(box.lo, box.hi) for box in tensor.boxes]).encode())
        digest.update(repr([(blob.key, blob.item.file, blob.item.length) for blob in outline.blobs]).encode())
        return digest.hexdigest()

    def value_of(self, checkpoint: OpenCheckpoint, entry: StateRecord | Blob) -> Any:
        return checkpoint.values.read(entry)

    def report(self, faults: Mapping[str, SourceError]) -> Mapping[str, str]:
        raise_first(faults)
        return {}

    def refuse(self, faults: Sequence[Mapping[str, str]]) -> None:
        """Do nothing: `report` has raised all errors."""


def raise_first(faults: Mapping[str, SourceError]) -> None:
    """Raise the first of a rank's faults, if there is one."""
    for error in faults.values():
        raise error
