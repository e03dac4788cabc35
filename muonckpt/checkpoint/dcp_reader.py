"""Loading through torch.distributed.checkpoint: its templates and in-place writes, our checks before and during.

Before any tensor is touched: the same keys on both sides, every element present, equal shapes, dtypes and momentum
conventions.  While reading: every chunk that is touched is checked whole.  A rank that needs a run of it reads no more
than that, and all ranks together compare with the chunk's CRC-32 (:mod:`.shared_check`); what is no run, or has no
CRC-32, is read whole and compared with its digest.  Nothing is unpickled but plain data.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..box import Index
from ..errors import SourceError
from ..record import Blob, Chunk, Extent, Manifest, StateRecord
from ..store.formats import native
from ..store.formats.registry import DCP, OWN, format_of
from ..store.io.checksums import crc32
from ..store.reading.dtypes import itemsize
from ..store.reading.payloads import Payloads, as_words, check_blob, check_chunk, elements, payload_of
from .annotation import Annotation, KeyPath, annotate
from .bits import bits_of, dtype_of, name_of
from .shared_check import Run, holds, run_of


class CheckingReader(StorageReader):
    """Reads the payloads of a checkpoint.  Those that it read a run of are checked at the end, by `judge`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.runs: defaultdict[tuple[str, Index], list[Run]] = defaultdict(list)
        """By tensor and first index of the chunk: what this rank has read of it."""
        self._chunks: dict[tuple[str, Index], tuple[StateRecord, Chunk]] = {}
        self._blobs: dict[str, Blob] = {}

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One reader reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in str(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """Nothing yet: DCP would hide why this failed.  The planner calls `describe`, where errors keep their type."""
        return Metadata(state_dict_metadata={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def describe(self) -> tuple[Manifest, Metadata]:
        """What the checkpoint holds, also in DCP's terms.

        Raises:
            SourceError: it cannot be read, or is in another format.
            LayoutError: a tensor has a hole or an overlap.
        """
        kind = format_of(self.path)
        if kind not in (OWN, DCP):
            raise SourceError(
                f"expected a DCP checkpoint, found {kind.name} at {self.path}: make one of it with "
                f"`muonckpt convert {self.path} DESTINATION --format dcp`"
            )
        manifest = native.read(self.path, payloads=True)
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for tensor in manifest.tensors:
            tensor.chunk_layout()  # proves coverage
            chunks = [chunk for chunk in tensor.chunks if chunk.box.numel]
            self._chunks.update({(tensor.key, chunk.box.lo): (tensor, chunk) for chunk in chunks})
            found[tensor.key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype_of(tensor.dtype)),
                size=torch.Size(tensor.shape),
                chunks=[ChunkStorageMetadata(torch.Size(c.box.lo), torch.Size(c.box.shape)) for c in chunks],
            )
        for blob in manifest.blobs:
            self._blobs[blob.key] = blob
            found[blob.key] = BytesStorageMetadata()
        paths = {tensor.key: tensor.path for tensor in manifest.tensors}
        paths |= {blob.key: blob.path for blob in manifest.blobs}
        return manifest, Metadata(state_dict_metadata=found, planner_data=paths)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with Payloads(self.path) as payloads:
            for item in plan.items:  # first, as they may be refused, and tensors are overwritten in place
                if not _is_tensor(item):
                    blob = self._blobs[item.storage_index.fqn]
                    planner.load_bytes(item, io.BytesIO(check_blob(payloads, blob)))
            # Megatron-FSDP's hooks plan a read of nothing for a rank whose part of a tensor is empty.
            wanted = [item for item in plan.items if _is_tensor(item) and 0 not in item.lengths]
            tensors = [(*self._stored(item.storage_index), item) for item in wanted]
            checked: set[Chunk] = set()
            for tensor, chunk, item in sorted(tensors, key=lambda found: (found[1].item.file, found[1].item.offset)):
                _copy(self._elements(payloads, tensor, chunk, item, checked), item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _elements(
        self, payloads: Payloads, tensor: StateRecord, chunk: Chunk, item: ReadItem, checked: set[Chunk]
    ) -> np.ndarray[Any, Any]:
        """What is wanted of a chunk: a run of it, noted for `judge`, or a window of what has been checked whole."""
        run = run_of(tuple(item.storage_offsets), tuple(item.lengths), chunk.box.shape)
        runs = chunk.strides is None and chunk.crc32 is not None
        if runs and run is not None and run != (0, chunk.box.numel):
            payload, size = payload_of(tensor, chunk), itemsize(tensor.dtype)
            start, stop = (place * size for place in run)
            extent = Extent(payload.file, payload.offset + start, stop - start)
            self.runs[tensor.key, chunk.box.lo].append(Run(start, stop, crc32(payloads.bands(extent))))
            return as_words(payloads.view(extent), tensor.dtype, tuple(item.lengths))
        if chunk not in checked:
            check_chunk(payloads, tensor, chunk)
            checked.add(chunk)
        box = (slice(lo, lo + n) for lo, n in zip(item.storage_offsets, item.lengths, strict=True))
        window: tuple[Any, ...] = (*box, ...)
        part: np.ndarray[Any, Any] = elements(payloads, tensor, chunk)[window]
        return part

    def judge(self, runs_of_ranks: list[Mapping[tuple[str, Index], list[Run]]]) -> None:
        """Compare the chunks that ranks have read in runs with what is recorded of them.

        Raises:
            SourceError: one is damaged, or was not read as it is.
        """
        runs: defaultdict[tuple[str, Index], list[Run]] = defaultdict(list)
        for of_rank in runs_of_ranks:
            for where, found in of_rank.items():
                runs[where] += found
        with Payloads(self.path) as payloads:
            for where, found in runs.items():
                tensor, chunk = self._chunks[where]
                assert chunk.crc32 is not None, "others are read whole"
                verdict = holds(found, payload_of(tensor, chunk).length, chunk.crc32)
                if not verdict:  # look at it whole, also to say what is wrong
                    check_chunk(payloads, tensor, chunk)
                if verdict is False:
                    raise SourceError(
                        f"tensor {tensor.key!r} box {chunk.box}: a rank read other bytes than {chunk.item.file} has"
                    )

    def _stored(self, index: MetadataIndex) -> tuple[StateRecord, Chunk]:
        return self._chunks[index.fqn, tuple(index.offset or ())]


class StrictLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, refusing what it would pass over.

    Args:
        reader: of the same load.
        allow_extra: the checkpoint may hold more than the template asks for.
    """

    def __init__(self, reader: CheckingReader, allow_extra: bool) -> None:
        super().__init__()
        self._reader = reader
        self._annotations: Mapping[KeyPath, Annotation] = {}
        self._allow_extra = allow_extra

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # Here, and not before DCP is called, so that what one rank refuses all ranks hear of.
        self._annotations = annotate(state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        manifest, self.metadata = self._reader.describe()
        self._refuse(list(self._problems(manifest)))
        return dataclasses.replace(super().create_local_plan(), planner_data=frozenset(self.state_dict))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        if not self._allow_extra:
            assert self.metadata is not None, "create_local_plan() came before"
            wanted = frozenset().union(*(plan.planner_data for plan in global_plan))
            extra = sorted(self.metadata.state_dict_metadata.keys() - wanted)
            self._refuse([f"extra key {key!r}" for key in extra])
        return super().create_global_plan(global_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, weights_only=True)  # plain data only; what passes here holds no code
        except pickle.UnpicklingError as error:
            value.seek(0)
            named: object = error
            with suppress(ValueError):  # it is no zip archive
                named = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(value)) or error
            raise SourceError(
                f"refused {read_item.storage_index.fqn!r}: it holds more than plain data ({named}); if you trust the "
                "checkpoint, name its classes with torch.serialization.add_safe_globals"
            ) from error
        value.seek(0)
        super().load_bytes(read_item, value)

    def _refuse(self, problems: list[str]) -> None:
        if problems:
            path = self._reader.path
            more = f"; and {len(problems) - 12} more" if len(problems) > 12 else ""
            hint = (
                ". Groups are matched by number: build the same, in the same order. What another program wrote is "
                f"translated first: muonckpt convert {path} NEW --to muonckpt"
            )
            told = hint if problems[0].startswith("missing") else ""
            raise SourceError(f"{path} does not fit the state dict: {'; '.join(problems[:12])}{more}{told}")

    def _problems(self, manifest: Manifest) -> Iterator[str]:
        stored = {tensor.key: tensor for tensor in manifest.tensors}
        keys = stored.keys() | {blob.key for blob in manifest.blobs}
        for key in sorted(self.state_dict.keys() - keys):
            yield f"missing key {key!r}"
        for key in sorted(keys & self.state_dict.keys()):
            wanted = self.state_dict[key]
            if isinstance(wanted, torch.Tensor) != (key in stored):
                stored_as, expected = ("a", "no") if key in stored else ("no", "a")
                yield f"{key!r} is {stored_as} tensor in the checkpoint, and {expected} tensor in the state dict"
            elif key in stored:
                yield from self._differences(stored[key], wanted)

    def _differences(self, stored: StateRecord, wanted: torch.Tensor) -> Iterator[str]:
        if stored.shape != tuple(wanted.shape):
            yield f"{stored.key!r} has shape {stored.shape}, expected {tuple(wanted.shape)}"
        if stored.dtype != name_of(wanted.dtype):
            yield f"{stored.key!r} is {stored.dtype}, expected {name_of(wanted.dtype)} (nothing is cast silently)"
        expected = self._annotations.get(tuple(self.mappings[stored.key]), Annotation()).convention
        if stored.convention and expected and stored.convention != expected:
            yield f"{stored.key!r} follows momentum convention {stored.convention}, expected {expected}"


def _is_tensor(item: ReadItem) -> bool:
    return item.type == LoadItemType.TENSOR


def _copy(source: np.ndarray[Any, Any], item: ReadItem, planner: LoadPlanner) -> None:
    target = planner.resolve_tensor(item).detach()
    staged = target if target.is_cpu else torch.empty(target.shape, dtype=target.dtype)
    np.copyto(bits_of(staged), source)
    if staged is not target:
        target.copy_(staged)
    planner.commit_tensor(item, target)
