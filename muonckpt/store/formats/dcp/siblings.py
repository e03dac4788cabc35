"""One checkpoint in sibling folders of DCP: models in some, optimizers in others, as accelerate saves them.

Whether folders belong together is read from what they hold: folders of which each has either weights or state are parts
of one checkpoint; folders that have both, or all the same, are checkpoints of a run, of which the user names one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ....errors import SourceError
from ....record import Blob, Manifest, StateRecord
from ....vocabulary import KeyPath
from ...io.location import Location
from ...reading.payloads import Payloads
from ..signs import folders_of_dcp
from .directory import DcpReader
from .items import located

_MOST_NAMES = 8


class SiblingsReader:
    """Reads all folders as one checkpoint.  Keys begin with the name of their folder only if folders share keys.

    ``faults`` are those of all folders.

    Raises:
        SourceError: the folders are not parts of one checkpoint, or one of them cannot be read.
    """

    def __init__(self, path: Location) -> None:
        self.payloads = Payloads(path)
        readers = {name: DcpReader(path / name) for name in folders_of_dcp(path)}
        outlines = {name: reader.outline for name, reader in readers.items()}
        kinds = {_holds_only_optimizers(outline) for outline in outlines.values()}
        if kinds != {True, False} or any(map(_holds_both, outlines.values())):
            names = ", ".join(list(outlines)[:_MOST_NAMES]) + ", …" * (len(outlines) > _MOST_NAMES)
            raise SourceError(
                f"expected a checkpoint in {path}, found several, in its folders {names}; give the path of one, "
                f"such as {path / list(outlines)[-1]}"
            )
        self.faults = tuple(fault for reader in readers.values() for fault in reader.faults)
        tensors = [tensor.key for outline in outlines.values() for tensor in outline.tensors]
        keys = tensors + [blob.key for outline in outlines.values() for blob in outline.blobs]
        shared = len(set(keys)) < len(keys)
        parts = [_moved(outline, name, shared) for name, outline in outlines.items()]
        self.outline = Manifest(
            tuple(tensor for part in parts for tensor in part.tensors),
            tuple(blob for part in parts for blob in part.blobs),
            {**parts[0].provenance, "folders": list(outlines)},
        )

    def locate(self, tensors: Sequence[StateRecord]) -> tuple[StateRecord, ...]:
        """The tensors with the place and the CRC-32 of each chunk, as its item says; in the order of files."""
        try:
            return located(self.payloads.directory, tensors)
        except OSError as error:
            raise SourceError(f"cannot read {self.payloads.directory}: {error}") from error


def _optimizers(outline: Manifest) -> Collection[KeyPath]:
    """The paths of optimizers: those with parameter groups, nested or flat."""
    paths = [entry.path for entries in (outline.tensors, outline.blobs) for entry in entries]
    return {
        path[:depth]
        for path in paths
        for depth, part in enumerate(path)
        if part == "param_groups" or str(part).startswith("param_groups.")
    }


def _is_state(tensor: StateRecord, optimizers: Collection[KeyPath]) -> bool:
    return any(tensor.path[: len(root)] == root for root in optimizers)


def _holds_only_optimizers(outline: Manifest) -> bool:
    optimizers = _optimizers(outline)
    return bool(optimizers) and all(_is_state(tensor, optimizers) for tensor in outline.tensors)


def _holds_both(outline: Manifest) -> bool:
    return bool(_optimizers(outline)) and not _holds_only_optimizers(outline)


def _moved(outline: Manifest, folder: str, named: bool) -> Manifest:
    """The outline with files, and keys if they are ``named``, as they are seen from the folder above."""
    moved = outline.moved(lambda file: f"{folder}/{file}")
    if not named:
        return moved

    def key(entry: StateRecord | Blob) -> dict[str, Any]:
        return {"key": f"{folder}.{entry.key}", "path": (folder, *entry.path)}

    tensors = tuple(replace(tensor, **key(tensor)) for tensor in moved.tensors)
    return replace(moved, tensors=tensors, blobs=tuple(replace(blob, **key(blob)) for blob in moved.blobs))
