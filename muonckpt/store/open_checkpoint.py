"""A checkpoint, opened and parsed once: what every command reads from, and what ``muonckpt.open`` gives."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any, TypeVar

from ..errors import SourceError
from ..record import MANIFEST_FILE, Blob, Manifest, StateRecord
from .formats.registry import DCP, format_of
from .formats.signs import OUR_MARK
from .io.gc_paused import gc_paused
from .io.location import Location, Remote, location
from .reading.payloads import Payloads
from .reading.reader import Format, Reader
from .stored_items import Items, Values, read_torch_groups
from .stored_tensor import StoredTensor, TensorReader


class OpenCheckpoint:
    """A checkpoint of any format whose metadata have been read; its items and elements are read when asked for.

    A context manager, which closes the files at its end.  Arrays that were read stay valid.  It may have `faults`, for
    which `open` refuses it.

    Raises:
        SourceError: there is no checkpoint, or its metadata are damaged or refused.
    """

    @gc_paused()
    def __init__(self, path: Location) -> None:
        self.path = path
        self.format: Format = format_of(path)
        """Its format; ``format.name`` is what a user calls it."""
        self._reader = self.format.reader(path)
        self._tensors = TensorReader(self._reader)

    def __reduce__(self) -> tuple[Any, ...]:
        return _told, (self.path, self.format, self._reader)

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.format.name} checkpoint at {self.path}: {len(self.outline.tensors)} tensors>"

    def close(self) -> None:
        """Close the files.  Reading afterwards opens them again."""
        self.payloads.close()

    # For users.

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors by their flat keys, in the order of the checkpoint."""
        return {
            key: StoredTensor(tensor, self._tensors) for key, tensor in _by_key(self.path, self.outline.tensors).items()
        }

    @cached_property
    def items(self) -> Mapping[str, Any]:
        """Items that are not tensors, by flat keys, as plain data; each is decoded safely when it is first read."""
        return Items(_by_key(self.path, self.outline.blobs), self.values)

    @cached_property
    def groups(self) -> Mapping[str, Mapping[str, Any]]:
        """The options of the parameter groups, by the group's key such as ``"optimizer.param_groups.0"``.

        Groups that are stored under other keys than torch's, as Megatron's are, are not here.

        Raises:
            SourceError: an option is damaged or not plain data.
        """
        return read_torch_groups(self.outline, self.values)

    @property
    def provenance(self) -> Mapping[str, Any]:
        """JSON data of its metadata on the program, step and meshes that made it."""
        return self.outline.provenance

    # For code that works on whole checkpoints.

    @property
    def faults(self) -> Sequence[SourceError]:
        """Damage that shows without reading data, such as missing files."""
        return self._reader.faults

    @property
    def lacks_manifest(self) -> bool:
        """Whether it is what is left of a checkpoint of ours without `muonckpt.json`."""
        return self.format is DCP and OUR_MARK in self.outline.provenance.get("not_kept", ())

    @property
    def outline(self) -> Manifest:
        """The manifest without opened items: the places of a chunk's elements may be unknown."""
        return self._reader.outline

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest with the places of all elements: the items of a stock DCP checkpoint are opened to find them.

        Raises:
            SourceError: an item is damaged, or not what the metadata promise.
        """
        return replace(self.outline, tensors=self.locate(self.outline.tensors))

    def locate(self, tensors: Sequence[StateRecord]) -> tuple[StateRecord, ...]:
        """Tensors of the outline, perhaps with some of their chunks only, with the places of the chunks' elements.

        Raises:
            SourceError: an item is damaged, or not what the metadata promise.
        """
        return self._reader.locate(tensors)

    @property
    def payloads(self) -> Payloads:
        """The bytes of the checkpoint's files."""
        return self._reader.payloads

    @cached_property
    def values(self) -> Values:
        """Small items and 0-d tensors as plain data."""
        return Values(self.payloads, self._tensors)


def _told(path: Location, kind: Format, reader: Reader) -> OpenCheckpoint:
    """A checkpoint whose metadata another process has read."""
    checkpoint = OpenCheckpoint.__new__(OpenCheckpoint)
    checkpoint.path, checkpoint.format, checkpoint._reader = path, kind, reader
    checkpoint._tensors = TensorReader(reader)
    return checkpoint


def open(path: str | os.PathLike[str] | Remote) -> OpenCheckpoint:
    """Open a checkpoint of any known format, in a folder, a file, or an object store.

    Reads its metadata; needs no torch.

    Args:
        path: a path, or a URL such as ``s3://bucket/step1000``.

    Raises:
        SourceError: there is no checkpoint, its metadata are damaged or refused, or no installed library supports the
            protocol.
    """
    checkpoint = OpenCheckpoint(location(path, SourceError))
    for fault in checkpoint.faults:
        raise fault
    if checkpoint.lacks_manifest:
        warnings.warn(
            f"{checkpoint.path} was saved with a {MANIFEST_FILE}, which is missing: it is read as a stock checkpoint, "
            "without digests, momentum conventions and layouts; restore that file from a copy of the checkpoint",
            stacklevel=2,
        )
    return checkpoint


_Entry = TypeVar("_Entry", StateRecord, Blob)


def _by_key(path: Location, entries: Iterable[_Entry]) -> dict[str, _Entry]:
    """Entries by their keys.

    Raises:
        SourceError: a key occurs twice.
    """
    entries_of_keys: dict[str, _Entry] = {}
    for entry in entries:
        if entries_of_keys.setdefault(entry.key, entry) is not entry:
            raise SourceError(f"{path}: expected each key once, found {entry.key!r} twice")
    return entries_of_keys
