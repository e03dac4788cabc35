"""Several open checkpoints as one source: the files of the first are called ``0/NAME``, and so on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from ...algebra.fingerprint import as_hex, combine
from ...record.columns import Columns, ColumnsBuilder
from ...record.record import Chunk, Extent, Manifest, StateRecord
from ...store.io.location import Location
from ...store.io.regular import FileBytes
from ...store.open_checkpoint import OpenCheckpoint
from ...store.reading.payloads import Payloads, Reader, chunk_share


class JoinedPayloads(Payloads):
    """The bytes of the files of several checkpoints."""

    def __init__(self, parts: Sequence[Payloads]) -> None:
        super().__init__(parts[0].directory)
        self._parts = parts

    def place(self, name: str) -> Location:
        part, part_name = self._part(name)
        return part.place(part_name)

    def keep(self, raw: bytes) -> Extent:
        extent = self._parts[0].keep(raw)
        return replace(extent, file=f"0/{extent.file}")

    def is_in_memory(self, name: str) -> bool:
        part, part_name = self._part(name)
        return part.is_in_memory(part_name)

    def close(self) -> None:
        super().close()
        for part in self._parts:
            part.close()

    def has_checksum(self, chunk: Chunk) -> bool:
        part, part_name = self._part(chunk.item.file)
        return part.has_checksum(replace(chunk, item=replace(chunk.item, file=part_name)))

    def check_item(self, item: Extent, parts: Iterable[memoryview] | None = None) -> None:
        part, part_name = self._part(item.file)
        part.check_item(replace(item, file=part_name), parts)

    def on_disk(self, name: str) -> int:
        part, part_name = self._part(name)
        return part.on_disk(part_name)

    def _bytes(self, name: str) -> FileBytes:
        part, part_name = self._part(name)
        return part.open_file(part_name, 0)

    def _part(self, name: str) -> tuple[Payloads, str]:
        number, _, part_name = name.partition("/")
        return self._parts[int(number)], part_name


def joined_checkpoints(checkpoints: Iterable[OpenCheckpoint]) -> list[OpenCheckpoint]:
    """Return checkpoints, located, whose files have the names of `JoinedPayloads`, and whose chunks share columns.

    Each is let go before the next is asked for: the columns of many chunks should be in memory once.
    """
    builder, parts = ColumnsBuilder(), []
    for number, checkpoint in enumerate(checkpoints):
        manifest = checkpoint.manifest.renamed(f"{number}/{{}}".format)
        columns, start = manifest.columns, builder.rows
        builder.add(columns, 0, len(columns))
        empty_manifest = manifest.on_columns(Columns.of(()))
        parts.append((checkpoint.path, checkpoint.format, checkpoint.payloads, empty_manifest, start))
        del checkpoint, manifest, columns
    # All rows are in one place; each manifest is put on its own stretch of them.
    columns, payloads = builder.build(), JoinedPayloads([payloads for _, _, payloads, _, _ in parts])
    joined = []
    for path, format, _, manifest, start in parts:
        joined.append(OpenCheckpoint(path, format, Reader(manifest.on_columns(columns, start), payloads)))
    return joined


@dataclass(frozen=True)
class JoinedCheckpoints:
    """Checkpoints as one source of a job.

    Attributes:
        manifests: of each, with the names that files have in ``payloads``.
        provenance: of the result.
    """

    path: Location
    payloads: Payloads
    manifests: Sequence[Manifest]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def manifest(self) -> Manifest:
        """The tensors and items of all, under their own keys."""
        tensors = tuple(chain.from_iterable(manifest.tensors for manifest in self.manifests))
        blobs = tuple(chain.from_iterable(manifest.blobs for manifest in self.manifests))
        return Manifest(tensors, blobs, self.provenance)


def input_fingerprints(source: OpenCheckpoint, keys: Collection[str], threads: int) -> dict[str, str]:
    """Return the fingerprint of each tensor with one of these keys.  Tensors without a recorded one are read.

    Raises:
        SourceError: a file cannot be read.
    """
    tensors = [tensor for tensor in source.manifest.tensors if tensor.key in keys]
    # A fingerprint is the sum of its chunks' shares, so chunks can be read in any order.
    fingerprints = {tensor.key: tensor.fingerprint or as_hex(0) for tensor in tensors}
    chunks: list[tuple[StateRecord, Chunk]] = []
    for tensor in tensors:
        if tensor.fingerprint is None:
            chunks += [(tensor, chunk) for chunk in tensor.chunks if chunk.box.numel]
    with ThreadPoolExecutor(threads) as pool:
        shares = pool.map(lambda place: chunk_share(source.payloads, *place), chunks)
        for (tensor, _), share in zip(chunks, shares, strict=True):
            fingerprints[tensor.key] = as_hex(combine(int(fingerprints[tensor.key], 16), share))
    return fingerprints
