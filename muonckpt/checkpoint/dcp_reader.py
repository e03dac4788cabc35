"""Loading through torch.distributed.checkpoint: its templates and in-place writes, with our checks.

Before any tensor is touched: the same on both sides (:mod:`.matching`), every element present, equal shapes, dtypes and
momentum conventions; then, or while reading, every chunk that is touched is checked whole.  A rank that needs one run
of bytes of it reads only that, and all ranks together compare with the chunk's CRC-32 (:mod:`.shared_check`); other
chunks are read whole and compared with their digest.  Only plain data is unpickled.
"""

from __future__ import annotations

import dataclasses
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ..box import Index
from ..errors import DamageError, SourceError
from ..layouts.boxed_tensor import all_boxed, parts_of
from ..record import Blob, Chunk, Extent, StateRecord
from ..resumption import Extra, Globs, LoadReport
from ..store.io.checksums import crc32
from ..store.io.location import Location, Remote
from ..store.open_checkpoint import OpenCheckpoint, open
from ..store.reading.dtypes import itemsize
from ..store.reading.payloads import as_words, check_chunk, checked_elements, payload_of
from ..store.stored_items import checked_blob
from .annotation import annotations_of
from .bits import bits_of, torch_dtype
from .load_template import LoadTemplate, Matching, template_of
from .matching import RankRequest, judge, match, misfit
from .named_optimizer import Stored
from .plain_objects import refuse_code
from .shared_check import ByteRun, PartlyRead, holds, run_of

WhenChecked = Literal["before", "while"]

Where = tuple[str, Index]
"""Identifies a chunk: its tensor's key, and its first index."""


class CheckingReader:
    """Reads the elements of a checkpoint, after all that ranks read has been checked, or chunk by chunk while it is.

    Chunks of which it read runs are checked by `judge`.

    Args:
        place: the checkpoint.
        check: when its bytes are compared with their checksums; None: ``"before"``, but in an object store, from which
            they would be read twice, ``"while"``.
    """

    def __init__(self, place: Location, check: WhenChecked | None = None) -> None:
        self.place = place
        self._checks_before = (check or ("while" if isinstance(place, Remote) else "before")) == "before"
        self._checked: set[Chunk] = set()
        self._raw: list[tuple[ReadItem, bytes]] = []
        self.partly_read: dict[Where, PartlyRead] = {}
        """The runs that this rank has read of chunks that it did not read whole."""
        self.zeros: Sequence[Tensor] = ()
        """What becomes zeros instead of being read."""
        self._chunks: dict[Where, tuple[StateRecord, Chunk]] = {}
        self._blobs: dict[str, Blob] = {}

    @cached_property
    def checkpoint(self) -> OpenCheckpoint:
        """The checkpoint, opened when a planner first needs it, where errors keep their type and reach all ranks.

        Raises:
            SourceError: it cannot be read.
        """
        return open(self.place)

    def describe(self) -> Metadata:
        """The contents of the checkpoint as DCP's metadata; no item is opened.

        Raises:
            SourceError: it cannot be read.
            LayoutError: a tensor has a hole or an overlap.
        """
        manifest = self.checkpoint.outline
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for tensor in manifest.tensors:
            tensor.chunk_layout()  # proves coverage
            chunks = [chunk for chunk in tensor.chunks if chunk.box.numel]
            self._chunks.update({(tensor.key, chunk.box.lo): (tensor, chunk) for chunk in chunks})
            entries[tensor.key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=torch_dtype(tensor.dtype)),
                size=torch.Size(tensor.shape),
                chunks=[ChunkStorageMetadata(torch.Size(c.box.lo), torch.Size(c.box.shape)) for c in chunks],
            )
        for blob in manifest.blobs:
            self._blobs[blob.key] = blob
            entries[blob.key] = BytesStorageMetadata()
        paths = {tensor.key: tensor.path for tensor in manifest.tensors}
        paths |= {blob.key: blob.path for blob in manifest.blobs}
        return Metadata(state_dict_metadata=entries, planner_data=paths)

    def locate(self, items: Sequence[ReadItem]) -> None:
        """Open the items that this rank is to read, and no others.

        Raises:
            SourceError: one is damaged, or not what the metadata promise.
        """
        chunks: defaultdict[str, set[Index]] = defaultdict(set)
        for item in _of_tensors(items):
            chunks[item.storage_index.fqn].add(tuple(item.storage_index.offset or ()))
        requested = [
            dataclasses.replace(tensor, chunks=tuple(c for c in tensor.chunks if c.box.lo in chunks[tensor.key]))
            for tensor in self.checkpoint.outline.tensors
            if tensor.key in chunks
        ]
        for tensor in self.checkpoint.locate(requested):
            self._chunks.update({(tensor.key, chunk.box.lo): (tensor, chunk) for chunk in tensor.chunks})

    def check(self, plan: LoadPlan) -> Mapping[Where, PartlyRead]:
        """Read what is not a tensor, and check the elements of a plan unless that is done while they are read.

        Returns:
            The runs that this rank has read, for `judge`.
        """
        for item in plan.items:
            if not _is_tensor(item):
                key = item.storage_index.fqn
                self._raw.append((item, checked_blob(self.checkpoint.payloads, self._blobs[key])))
                refuse_code(key, self._raw[-1][1])
        for read in self._reads(plan) if self._checks_before else ():
            self._check(*read)
        return self.partly_read

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> Mapping[Where, PartlyRead]:
        """Read the elements of a plan, after all ranks have done `check`, into the tensors of its planner.

        Returns:
            As `check`, of what has been read since.
        """
        if self._checks_before:
            self._checked.update(chunk for _, chunk, _ in self._reads(plan))
            self.partly_read = {}
        for item, data in self._raw:
            planner.load_bytes(item, io.BytesIO(data))
        for fresh in self.zeros:
            for part in parts_of(fresh).values():
                part.zero_()
        for tensor, chunk, item in self._reads(plan):
            self._copy(tensor, chunk, item, planner)
        return self.partly_read

    def _reads(self, plan: LoadPlan) -> list[tuple[StateRecord, Chunk, ReadItem]]:
        """In the order in which they lie in files."""
        reads = [(*self._chunk(item), item) for item in _of_tensors(plan.items)]
        return sorted(reads, key=lambda read: (read[1].item.file, read[1].item.offset))

    def _check(self, tensor: StateRecord, chunk: Chunk, item: ReadItem) -> None:
        """Check what an item asks for: a run of the chunk, noted for `judge`, or the whole chunk, once."""
        if chunk in self._checked:
            return
        part = self._run(tensor, chunk, item)
        if part is None:
            check_chunk(self.checkpoint.payloads, tensor, chunk)
            self._checked.add(chunk)
        else:
            run = Extent(chunk.item.file, payload_of(tensor, chunk).offset + part.start, len(part))
            self._note(tensor, chunk, ByteRun(part.start, part.stop, crc32(self.checkpoint.payloads.bands(run))))

    def _copy(self, tensor: StateRecord, chunk: Chunk, item: ReadItem, planner: LoadPlanner) -> None:
        """Copy what an item asks for, checking it on the way if it has not been checked."""
        target = planner.resolve_tensor(item).detach()
        staged = target if target.is_cpu else torch.empty(target.shape, dtype=target.dtype)
        words, payload, lengths = bits_of(staged), payload_of(tensor, chunk), tuple(item.lengths)
        if chunk not in self._checked and (part := self._run(tensor, chunk, item)):
            raw = self.checkpoint.payloads.view(Extent(payload.file, payload.offset + part.start, len(part)))
            self._note(tensor, chunk, ByteRun(part.start, part.stop, crc32([raw])))
            np.copyto(words, as_words(raw, tensor.dtype, lengths))
        elif chunk not in self._checked and lengths == chunk.box.shape:
            np.copyto(words, checked_elements(self.checkpoint.payloads, tensor, chunk))
            self._checked.add(chunk)
        else:
            self._check(tensor, chunk, item)
            place = chunk.stored("").place_at(tuple(map(int.__add__, chunk.box.lo, item.storage_offsets)))
            self.checkpoint.payloads.gather_into(words, payload, tensor.dtype, place, lengths)
        if staged is not target:
            target.copy_(staged)
        planner.commit_tensor(item, target)

    def _run(self, tensor: StateRecord, chunk: Chunk, item: ReadItem) -> range | None:
        """The bytes of the payload that an item asks for, if they are a run that can be checked by itself."""
        if chunk.strides is not None or chunk.crc32 is None or tuple(item.lengths) == chunk.box.shape:
            return None
        run = run_of(tuple(item.storage_offsets), tuple(item.lengths), chunk.box.shape)
        return None if run is None else range(*(place * itemsize(tensor.dtype) for place in run))

    def _note(self, tensor: StateRecord, chunk: Chunk, run: ByteRun) -> None:
        assert chunk.crc32 is not None, "other chunks are read whole"
        where = tensor.key, chunk.box.lo
        known = self.partly_read.get(where, PartlyRead(payload_of(tensor, chunk).length, chunk.crc32, ()))
        self.partly_read[where] = dataclasses.replace(known, runs=(*known.runs, run))

    def judge(self, partly_read: Sequence[Mapping[Where, PartlyRead]]) -> None:
        """Compare the chunks that ranks have read in runs with their recorded checksums.

        Raises:
            SourceError: a chunk is damaged, or a rank read other bytes than it has.
        """
        reads: defaultdict[Where, list[PartlyRead]] = defaultdict(list)
        for of_rank in partly_read:
            for where, read in of_rank.items():
                reads[where].append(read)
        for where, of_chunk in reads.items():
            verdict = holds(of_chunk)
            if verdict:
                continue
            tensor, chunk = self._chunks[where]  # read it whole, also to find out what is wrong
            (located,) = self.checkpoint.locate([dataclasses.replace(tensor, chunks=(chunk,))])
            check_chunk(self.checkpoint.payloads, tensor, located.chunks[0])
            if verdict is False:
                raise DamageError(
                    f"tensor {tensor.key!r} box {chunk.box}: a rank read other bytes than {chunk.item.file} has"
                )

    def _chunk(self, item: ReadItem) -> tuple[StateRecord, Chunk]:
        return self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]


class StrictLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, made strict: it refuses the differences that DCP ignores.

    Args:
        reader: of the same load.
        extra: what the checkpoint may hold besides what the template asks for.
        globs: the parameters that start fresh.
    """

    report: LoadReport
    """What all ranks do with parameters; exists on the coordinator, once the load is planned."""
    sources: Mapping[str, str]
    """Keys of the checkpoint by those of the state dict, of what any rank loads; likewise."""
    matching: Matching
    """What this rank takes."""

    def __init__(self, reader: CheckingReader, extra: Extra, globs: Globs) -> None:
        super().__init__()
        self._reader = reader
        self._extra = extra
        self._globs = globs
        self._template: LoadTemplate
        self._stored: Stored

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # Here, and not before DCP is called, so that an error of one rank reaches all ranks.
        annotations = annotations_of(state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._template = template_of(state_dict, self.state_dict, self.mappings, annotations, self._extra.everything)

    def create_local_plan(self) -> LoadPlan:
        described = self._reader.describe()
        self._stored = Stored.of(self._reader.checkpoint)
        matching = self.matching = match(self._template, self._stored, self._globs)
        request = RankRequest(matching, self._template.optimizers, self._globs)
        if not matching.fits:  # the coordinator refuses them, with those of other ranks
            return LoadPlan([], planner_data=request)
        self._reader.zeros = [self._template.values[key] for key in matching.zeros]
        self.state_dict = all_boxed({key: self._template.values[key] for key in matching.sources})
        entries = described.state_dict_metadata
        self.metadata = Metadata({key: entries[source] for key, source in matching.sources.items()})
        plan = super().create_local_plan()
        items = [
            dataclasses.replace(item, storage_index=dataclasses.replace(item.storage_index, fqn=source))
            for item in plan.items
            for source in [matching.sources[item.storage_index.fqn]]
        ]
        self._reader.locate(items)
        return dataclasses.replace(plan, items=items, planner_data=request)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        matching, self.report = judge([plan.planner_data for plan in global_plan], self._stored, self._extra)
        self.sources = matching.sources
        refusal = None if matching.fits else self._refusal(matching)
        return [dataclasses.replace(plan, planner_data=refusal) for plan in global_plan]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        if new_plan.planner_data is not None:  # every rank raises, as the error is no rank's in particular
            raise SourceError(new_plan.planner_data)
        return new_plan

    def _refusal(self, matching: Matching) -> str:
        path, problems = self._reader.place, misfit(matching, "muonckpt.load(..., {})")
        missing = matching.differences or matching.faults[0].startswith("missing")
        if missing and not self._stored.translated:
            problems += f". What another program wrote is translated first: muonckpt convert {path} NEW --to muonckpt"
        return f"{path} does not fit the state dict: {problems}"


def _is_tensor(item: ReadItem) -> bool:
    return item.type == LoadItemType.TENSOR


def _of_tensors(items: Iterable[ReadItem]) -> list[ReadItem]:
    """The items of tensors that have elements: Megatron-FSDP's hooks plan empty reads where a rank's part is empty."""
    return [item for item in items if _is_tensor(item) and 0 not in item.lengths]
