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
from functools import cached_property, lru_cache
from itertools import chain
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
from torch.distributed.checkpoint.planner_helpers import (
    _create_chunk_list,
    _create_read_items,
    create_read_items_for_chunk_list,
)

from ..box import Index
from ..chunks import Boxes, chunks_numbered
from ..errors import DamageError, SourceError
from ..layouts.boxed_tensor import all_boxed, parts_of
from ..overlap import overlaps
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
        opened: the checkpoint, if another rank has opened it for this one.
    """

    def __init__(self, place: Location, check: WhenChecked | None = None, opened: OpenCheckpoint | None = None) -> None:
        self.place = place
        self._opened = opened
        self._checks_before = (check or ("while" if isinstance(place, Remote) else "before")) == "before"
        self._checked: set[Chunk] = set()
        self._raw: list[tuple[ReadItem, bytes]] = []
        self.partly_read: dict[Where, PartlyRead] = {}
        """The runs that this rank has read of chunks that it did not read whole."""
        self.zeros: Sequence[Tensor] = ()
        """What becomes zeros instead of being read."""
        self._numbers: dict[str, tuple[int, ...]] = {}
        """The numbers of the chunks that this rank reads, by key."""
        self._chunks: dict[Where, tuple[StateRecord, Chunk]] = {}
        """Those chunks, with the places of their elements."""

    @cached_property
    def checkpoint(self) -> OpenCheckpoint:
        """The checkpoint, opened when a planner first needs it, where errors keep their type and reach all ranks.

        Raises:
            SourceError: it cannot be read.
        """
        return self._opened or open(self.place)

    @cached_property
    def _tensors(self) -> Mapping[str, StateRecord]:
        return {tensor.key: tensor for tensor in self.checkpoint.outline.tensors}

    @cached_property
    def _blobs(self) -> Mapping[str, Blob]:
        return {blob.key: blob for blob in self.checkpoint.outline.blobs}

    def prove_covered(self) -> None:
        """Check that the chunks of every tensor are the whole tensor; no item is opened.

        Raises:
            SourceError: the checkpoint cannot be read.
            LayoutError: a tensor has a hole or an overlap.
        """
        for tensor in self._tensors.values():
            tensor.chunk_layout()

    def reads_of(self, key: str, source: str, value: Any) -> list[ReadItem]:
        """What this rank is to read for a value of its state dict.

        Args:
            source: the key in the checkpoint.
            value: a tensor as `all_boxed` gives it, or any other object.
        """
        if source not in self._tensors:
            return _from(source, _create_read_items(key, BytesStorageMetadata(), value))
        tensor, local = self._tensors[source], _create_chunk_list(value)
        numbers = _touched(tensor.boxes, tuple((tuple(part.offsets), tuple(part.sizes)) for part in local))
        self._numbers[source] = numbers
        boxes = [tensor.boxes[number] for number in numbers]
        touched = TensorStorageMetadata(
            TensorProperties(dtype=torch_dtype(tensor.dtype)),
            torch.Size(tensor.shape),
            [ChunkStorageMetadata(torch.Size(box.lo), torch.Size(box.shape)) for box in boxes],
        )
        return _from(source, create_read_items_for_chunk_list(key, touched, local))

    def locate(self) -> None:
        """Open the items that `reads_of` was asked about, and no others.

        Raises:
            SourceError: one is damaged, or not what the metadata promise.
        """
        tensors = [tensor for key, tensor in self._tensors.items() if key in self._numbers]
        chunks = chunks_numbered([(tensor.chunks, self._numbers[tensor.key]) for tensor in tensors])
        requested = zip(tensors, chunks, strict=True)
        for tensor in self.checkpoint.locate([dataclasses.replace(each, chunks=own) for each, own in requested]):
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
            key, lo = where
            tensor = self._tensors[key]
            (number,) = (n for n, box in enumerate(tensor.boxes) if box.lo == lo and box.numel)
            # Read it whole, also to find out what is wrong.
            (located,) = self.checkpoint.locate([dataclasses.replace(tensor, chunks=tensor.chunks.only([number]))])
            (chunk,) = located.chunks
            check_chunk(self.checkpoint.payloads, tensor, chunk)
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
    plan: LoadPlan
    """What this rank reads for that."""

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

    def request(self) -> RankRequest:
        """What this rank asks for, to be told to the coordinator; if it can have it, `plan` has what it is to read.

        Raises:
            SourceError: the checkpoint cannot be read, or an item is damaged.
            LayoutError: a tensor of it has a hole or an overlap.
        """
        self._reader.prove_covered()
        self._stored = Stored.of(self._reader.checkpoint)
        matching = self.matching = match(self._template, self._stored, self._globs)
        if matching.fits:
            self._reader.zeros = [self._template.values[key] for key in matching.zeros]
            self.state_dict = all_boxed({key: self._template.values[key] for key in matching.sources})
            reads = (self._reader.reads_of(key, matching.sources[key], value) for key, value in self.state_dict.items())
            self.plan = LoadPlan(list(chain.from_iterable(reads)))
            self._reader.locate()
        return RankRequest(matching, self._template.optimizers, self._globs)

    def judge(self, requests: Sequence[RankRequest]) -> None:
        """Decide for all ranks, on the coordinator.

        Raises:
            SourceError: the checkpoint does not fit; no rank's error in particular.
        """
        matching, self.report = judge(requests, self._stored, self._extra)
        self.sources = matching.sources
        if not matching.fits:
            raise SourceError(self._refusal(matching))

    def _refusal(self, matching: Matching) -> str:
        path, problems = self._reader.place, misfit(matching, "muonckpt.load(..., {})")
        other_keys = matching.differences or matching.extra_state or matching.faults[0].startswith("missing")
        if other_keys and not self._stored.translated:
            problems += (
                ". State of another program or optimizer, such as torch.optim.Muon, is translated first: muonckpt "
                f"convert {path} NEW --to muonckpt (muonckpt inspect {path} says whose keys these are)"
            )
        return f"{path} does not fit the state dict: {problems}"


def _from(source: str, items: Sequence[ReadItem]) -> list[ReadItem]:
    """Items that DCP plans for one key of both sides, as reads of another key of the checkpoint."""
    return [
        item
        if item.storage_index.fqn == source
        else dataclasses.replace(item, storage_index=dataclasses.replace(item.storage_index, fqn=source))
        for item in items
    ]


@lru_cache(maxsize=1024)
def _touched(boxes: Boxes, local: tuple[tuple[Index, Index], ...]) -> tuple[int, ...]:
    """The numbers of the boxes that have elements of local ones, given by first index and shape.

    Cached: the tensors of a model have few geometries.
    """
    ndim = boxes.lo.shape[1]
    if not ndim:
        return tuple(range(len(boxes))) if local else ()
    lo = np.array([first for first, _ in local], np.int64).reshape(len(local), ndim)
    sizes = np.array([shape for _, shape in local], np.int64).reshape(len(local), ndim)
    _, numbers = overlaps(lo, lo + sizes, boxes.lo, boxes.hi)
    return tuple(np.unique(numbers).tolist())


def _is_tensor(item: ReadItem) -> bool:
    return item.type == LoadItemType.TENSOR


def _of_tensors(items: Iterable[ReadItem]) -> list[ReadItem]:
    """The items of tensors that have elements: Megatron-FSDP's hooks plan empty reads where a rank's part is empty."""
    return [item for item in items if _is_tensor(item) and 0 not in item.lengths]
