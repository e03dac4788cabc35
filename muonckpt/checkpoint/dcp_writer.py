"""Saving through torch.distributed.checkpoint: its planning and collectives, our files, digests and publish.

Every rank writes one ``__{rank}_0.distcp`` of stock items into a temporary sibling of the destination, or in an object
store under the destination's name, and returns what it wrote.  The coordinator checks that against the plan, writes the
manifest and ``.metadata``, and renames; in a store these two are what makes it a checkpoint.
"""

from __future__ import annotations

import dataclasses
import io
import os
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.metadata import TensorStorageMetadata as TensorMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..box import Box
from ..errors import DestinationError, LayoutError
from ..fingerprint import as_hex, combine
from ..record import Blob, Chunk, Extent, Manifest, StateRecord
from ..store.formats import native
from ..store.formats.torch_save import tensor_item
from ..store.formats.torch_save.stored_zip import aligned
from ..store.formats.torch_save.tensor_item import ItemFrame
from ..store.io import publish
from ..store.io.checksums import Sums, xxh3_128
from ..store.io.location import Location
from ..store.io.new_file import Writing, created
from .annotation import Annotation
from .bits import bits_of, dtype_name
from .save_planner import CoveringSavePlanner, offsets_of, planned_tensor


@dataclass(frozen=True, slots=True)
class _Target:
    """Where one rank writes, and the replicas that it holds but another rank writes."""

    directory: Location
    file: str
    witnessed: tuple[WriteItem, ...]


@dataclass(frozen=True, slots=True)
class _Written:
    """One item as a rank holds it: xxh3-128 of its raw bytes, dtype and shape, share of the fingerprint, place.

    A witness, which stores nothing, has no ``item``.
    """

    rank: int
    digest: str
    kind: str = ""
    share: int = 0
    item: Extent | None = None
    payload: Extent | None = None
    crc32: int | None = None
    annotation: Annotation | None = None


@dataclass(slots=True)
class SaveProgress:
    """Of one rank's file, in bytes; another thread may look."""

    written: int = 0
    total: int = 0


class PublishingWriter(StorageWriter):
    """Writes under a temporary name, checks, describes and publishes the checkpoint: whole, or not at all.

    Args:
        destination: the checkpoint; nothing may exist there.
        planner: the planner of the same save.
        provenance: goes into the manifest.
        progress: follows this rank's file.
    """

    def __init__(
        self,
        destination: Location,
        planner: CoveringSavePlanner,
        provenance: Mapping[str, Any],
        progress: SaveProgress,
    ) -> None:
        super().__init__()
        self.destination = destination
        self.staged: Location | None = None
        self._planner = planner
        self._provenance = provenance
        self._progress = progress
        self._rank = 0

    @property
    def checkpoint_id(self) -> str:
        return str(self.destination)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One writer serves one save: the destination is fixed."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank", 0)

    def storage_meta(self) -> StorageMeta | None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        try:
            self.staged = publish.reserve(self.destination)
        except OSError as error:
            raise DestinationError(f"cannot write {self.destination}: {error}") from error
        return [
            dataclasses.replace(plan, storage_data=_Target(self.staged, f"__{rank}_0.distcp", witnessed))
            for rank, (plan, witnessed) in enumerate(zip(plans, self._planner.witnesses, strict=True))
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        target: _Target = plan.storage_data
        writer = _FileWriter(self._rank, target, self._planner, self._progress)
        try:
            results = writer.write(plan.items) if plan.items else []
        except OSError as error:
            raise DestinationError(f"rank {self._rank} cannot write {target.directory}: {error}") from error
        results += [writer.witness(item) for item in target.witnessed]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self.staged is not None, "finish() runs on the coordinator, after prepare_global_plan()"
        stored, witnessed = _sort(result for of_rank in results for result in of_rank)
        _check_stored(self._planner.plans, stored)
        _check_witnesses(stored, witnessed, metadata)
        native.write_native(self._manifest(metadata, stored), self.staged)
        publish.publish(self.staged, self.destination)

    def _manifest(self, metadata: Metadata, stored: Mapping[MetadataIndex, _Written]) -> Manifest:
        by_key: defaultdict[str, list[tuple[MetadataIndex, _Written]]] = defaultdict(list)
        for index, written in stored.items():
            by_key[index.fqn].append((index, written))
        paths = metadata.planner_data or {}
        tensors, blobs = [], []
        for key, entry in metadata.state_dict_metadata.items():
            path = tuple(paths.get(key, (key,)))
            if not isinstance(entry, TensorMetadata):
                [(_, written)] = by_key[key]
                assert written.item is not None
                blobs.append(Blob(key, path, written.item, written.digest))
                continue
            sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
            chunks = [
                Chunk(
                    _box(tuple(index.offset or ()), sizes), written.item, written.payload, written.digest, written.crc32
                )
                for index, written in by_key[key]
                if written.item is not None
            ]
            annotation = next((written.annotation for _, written in by_key[key] if written.annotation), Annotation())
            tensors.append(
                StateRecord(
                    key=key,
                    path=path,
                    shape=tuple(entry.size),
                    dtype=dtype_name(entry.properties.dtype),
                    chunks=tuple(sorted(chunks, key=lambda chunk: chunk.box.lo)),
                    fingerprint=as_hex(combine(*(written.share for _, written in by_key[key]))),
                    **{f.name: getattr(annotation, f.name) for f in dataclasses.fields(annotation)},
                )
            )
        return Manifest(tuple(tensors), tuple(blobs), self._provenance)


class _FileWriter:
    """Writes one rank's file: items end to end, digested in the pass that writes them."""

    def __init__(self, rank: int, target: _Target, planner: CoveringSavePlanner, progress: SaveProgress) -> None:
        self._rank = rank
        self._target = target
        self._planner = planner
        self._progress = progress

    def write(self, items: Sequence[WriteItem]) -> list[WriteResult]:
        """Write blobs first, as DCP does, then tensors, and return when they are on the disk or in the store."""
        blobs = [(item, _blob(self._planner, item)) for item in items if item.type == WriteItemType.BYTE_IO]
        tensors = [(item, _frame(item)) for item in items if item.type != WriteItemType.BYTE_IO]
        starts, end = [], 0
        for length in (*(len(data) for _, data in blobs), *(frame.length for _, frame in tensors)):
            starts.append(aligned(end))
            end = starts[-1] + length
        self._progress.total = end
        with created(self._target.directory / self._target.file, end) as output:
            results = [self._put_blob(output, *blob, start) for blob, start in zip(blobs, starts, strict=False)]
            rest = starts[len(blobs) :]
            results += [self._put_tensor(output, *tensor, start) for tensor, start in zip(tensors, rest, strict=True)]
        return results

    def witness(self, item: WriteItem) -> WriteResult:
        """Digest and fingerprint of this rank's replica of an item that another rank writes."""
        if item.type == WriteItemType.BYTE_IO:
            written = _Written(self._rank, xxh3_128([_blob(self._planner, item)]))
        else:
            tensor, sums = _tensor(self._planner, item), Sums()
            for _ in sums.passing(bits_of(tensor), offsets_of(item)):
                pass
            written = _Written(self._rank, sums.digest, _kind(tensor), sums.share)
        return WriteResult(index=item.index, size_in_bytes=0, storage_data=written)

    def _put_blob(self, output: Writing, item: WriteItem, data: memoryview, start: int) -> WriteResult:
        self._progress.written = output.write(data, start)
        written = _Written(self._rank, xxh3_128([data]), item=Extent(self._target.file, start, len(data)))
        return WriteResult(index=item.index, size_in_bytes=len(data), storage_data=written)

    def _put_tensor(self, output: Writing, item: WriteItem, frame: ItemFrame, start: int) -> WriteResult:
        tensor, sums = _tensor(self._planner, item), Sums()
        payload = Extent(self._target.file, start + frame.payload_offset, frame.payload_length)
        end = output.write(frame.head, start)
        for part in sums.passing(bits_of(tensor), offsets_of(item)):
            end = self._progress.written = output.write(part, end)
        self._progress.written = output.write(frame.tail(sums.checksum), end)
        where = Extent(self._target.file, start, frame.length)
        note = self._planner.annotation(item.index.fqn)
        written = _Written(self._rank, sums.digest, _kind(tensor), sums.share, where, payload, sums.checksum, note)
        return WriteResult(index=item.index, size_in_bytes=payload.length, storage_data=written)


def _frame(item: WriteItem) -> ItemFrame:
    """The bytes around the elements of a planned tensor."""
    assert item.tensor_data is not None
    return tensor_item.frame(dtype_name(item.tensor_data.properties.dtype), tuple(item.tensor_data.chunk.sizes))


def _kind(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"


def _tensor(planner: SavePlanner, item: WriteItem) -> Tensor:
    return planned_tensor(planner, item).resolve_conj().resolve_neg().cpu().contiguous()


def _blob(planner: SavePlanner, item: WriteItem) -> memoryview:
    stream = planner.resolve_data(item)
    assert isinstance(stream, io.BytesIO)
    return stream.getbuffer()


def _box(offsets: tuple[int, ...], sizes: Mapping[tuple[int, ...], tuple[int, ...]]) -> Box:
    return Box(offsets, tuple(lo + n for lo, n in zip(offsets, sizes[offsets], strict=True)))


def _sort(
    results: Any,
) -> tuple[dict[MetadataIndex, _Written], list[tuple[MetadataIndex, _Written]]]:
    stored: dict[MetadataIndex, _Written] = {}
    witnessed = []
    for result in results:
        if result.storage_data.item is None:
            witnessed.append((result.index, result.storage_data))
        else:
            stored[result.index] = result.storage_data
    return stored, witnessed


def _check_stored(plans: Sequence[SavePlan], stored: Mapping[MetadataIndex, _Written]) -> None:
    planned = {item.index for plan in plans for item in plan.items}
    if planned != stored.keys():
        lost = sorted(f"{index.fqn} at {tuple(index.offset or ())}" for index in planned - stored.keys())
        raise DestinationError(f"{len(lost)} planned items were not written: {', '.join(lost[:8])}")


def _check_witnesses(
    stored: Mapping[MetadataIndex, _Written], witnessed: Sequence[tuple[MetadataIndex, _Written]], metadata: Metadata
) -> None:
    """Check that replicas are equal: DCP stores one of them, and would lose the others silently."""
    for index, replica in witnessed:
        saved = stored[index]
        if (saved.digest, saved.kind) == (replica.digest, replica.kind):
            continue
        difference = (
            f"{index.fqn!r} at {tuple(index.offset or ())}: ranks {saved.rank} and {replica.rank} hold different data"
        )
        if isinstance(metadata.state_dict_metadata[index.fqn], TensorMetadata):
            raise LayoutError(
                f"{difference} under one key, of which only one would be saved; replicas must be equal, and data that "
                "differs by rank needs a key of its own"
            )
        warnings.warn(f"{difference} that is not a tensor; the copy of rank {saved.rank} was saved", stacklevel=2)
