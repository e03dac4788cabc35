"""State from copies in the memory of nodes: checked, attested, and moved to any number of ranks.

Nobody sees all files of a copy, so each is read by one rank of a node that has it, and `redistribute` moves elements to
where they are asked for.  Nothing of a copy is used before all of it has been compared with its fingerprints.
"""

from __future__ import annotations

import io
import mmap
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element

from ..algebra.box import Index
from ..layouts.boxed_tensor import BoxedTensor
from ..names.errors import AttestError, DamageError, SourceError, warn_on_rank
from ..names.resumption import LoadReport
from ..record.record import MANIFEST_FILE, Manifest
from ..store.open_checkpoint import checked_blob
from ..store.reading.payloads import Payloads, check_chunk, payload_of
from .all_ranks import broadcast_from_first, decide_on_first, group_ranks
from .attestation import TensorPrint
from .node_copies import FoundCopy, Nodes
from .redistribution import redistribute_attested
from .resume_check import LoadedState
from .storable import refuse_code


def load_copy(
    state_dict: dict[str, Any],
    copy: FoundCopy,
    nodes: Nodes,
    process_group: dist.ProcessGroup | None,
    *,
    allow_extra: bool | Iterable[str],
    fresh: Iterable[str],
) -> tuple[LoadReport, LoadedState]:
    """Load a copy as `load` loads a checkpoint, whatever ranks have made it.  Collective.

    Raises:
        DamageError: a part of it is on no node, or damaged on each, or it is not what its fingerprints say; or the
            state dict does not hold what was sent, and is unusable.
        SourceError, LayoutError, ArgumentError, LostRankError: as `redistribute`.
    """

    def text() -> bytes:
        return zlib.compress((copy.place / MANIFEST_FILE).read_bytes(), 1)

    manifest = Manifest.from_json(
        zlib.decompress(broadcast_from_first(process_group, SourceError, text, copy.describer))
    )
    source = _Source(manifest, copy.place, Payloads(copy.place))
    objects: dict[str, bytes] = {}
    refused: set[tuple[int, str]] = set()
    missing = source.files
    while missing:
        readers = _readers(missing, copy, nodes, refused)

        def read(readers: Mapping[str, int] = readers) -> tuple[dict[str, bytes], dict[str, str]]:
            return source.read({name for name, place in readers.items() if place == nodes.here})

        def joined(ranks: list[tuple[dict[str, bytes], dict[str, str]]]) -> tuple[dict[str, bytes], dict[str, str]]:
            return _union([of_rank for of_rank, _ in ranks]), _union([faults for _, faults in ranks])

        more, faults = decide_on_first(process_group, SourceError, read, joined)
        objects |= more
        ranks = group_ranks(process_group)
        for name, fault in faults.items():
            refused.add((nodes.of[readers[name]], name))
            warn_on_rank(
                f"the copy of step {copy.step} on the node of rank {ranks[readers[name]]} is damaged: {fault}; "
                "another node's is taken, if there is one",
                RuntimeWarning,
                stacklevel=3,
            )
        missing = list(faults)
    nested = source.nested(objects)
    try:
        report, target, filled, sources = redistribute_attested(
            nested, state_dict, source.prints, group=process_group, allow_extra=allow_extra, fresh=fresh
        )
    except AttestError as error:
        raise DamageError(str(error)) from error
    prints = {key: source.prints[origin] for key, origin in sources.items() if origin in source.prints}
    return report, LoadedState.of(target, filled, prints, manifest.provenance)


def _readers(names: Iterable[str], copy: FoundCopy, nodes: Nodes, refused: set[tuple[int, str]]) -> dict[str, int]:
    """Return the place of the rank that reads each file: of those whose node has it the one with least to read.

    Raises:
        DamageError: no node has one of them.
    """
    load = [0] * len(nodes.of)
    readers = {}
    for name in names:
        sizes = {nodes.of[place]: files[name] for place, files in copy.holders.items() if name in files}
        able = [place for place, node in enumerate(nodes.of) if node in sizes and (node, name) not in refused]
        if not able:
            raise DamageError(f"{name} of the copy of step {copy.step} is whole in the memory of no node")
        readers[name] = min(able, key=load.__getitem__)
        load[readers[name]] += sizes[nodes.of[readers[name]]]
    return readers


def _union(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


@dataclass(frozen=True)
class _Source:
    """What this rank reads of a copy, as a state dict."""

    manifest: Manifest
    folder: Path
    payloads: Payloads
    parts: defaultdict[str, dict[Index, Tensor]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def files(self) -> list[str]:
        return sorted(self.manifest.columns.files_of() | {blob.item.file for blob in self.manifest.blobs})

    @property
    def prints(self) -> Mapping[str, TensorPrint]:
        return {
            tensor.key: TensorPrint(tensor.shape, tensor.dtype, tensor.fingerprint or "")
            for tensor in self.manifest.tensors
        }

    def read(self, files: set[str]) -> tuple[dict[str, bytes], dict[str, str]]:
        """Check what lies in some files, and take it; return other objects than tensors, and the first fault of a file.

        Elements stay where they are: the state is not in memory a third time, and pages that are there cost little.
        """
        objects: dict[str, bytes] = {}
        faults: dict[str, str] = {}
        for blob in self.manifest.blobs:
            if blob.item.file in files:
                try:
                    objects[blob.key] = checked_blob(self.payloads, blob)
                    refuse_code(blob.key, objects[blob.key])
                except SourceError as error:
                    faults.setdefault(blob.item.file, str(error))

        @cache
        def mapped(name: str) -> mmap.mmap:
            with (self.folder / name).open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

        wanted, start = self.manifest.columns.is_in(files), 0
        for tensor in self.manifest.tensors:
            of_tensor, start = wanted[start : start + len(tensor.chunks)], start + len(tensor.chunks)
            for number in np.flatnonzero(of_tensor).tolist():
                chunk = tensor.chunks[number]
                if not chunk.box.numel:
                    continue
                try:
                    check_chunk(self.payloads, tensor, chunk)
                except SourceError as error:
                    faults.setdefault(chunk.item.file, str(error))
                else:
                    payload, kind = payload_of(tensor, chunk), getattr(torch, tensor.dtype)
                    whole = mapped(payload.file)
                    part = torch.frombuffer(whole, dtype=kind, count=chunk.box.numel, offset=payload.offset)
                    self.parts[tensor.key][chunk.box.lo] = part.view(chunk.box.shape)
        self.payloads.close()
        return objects, faults

    def nested(self, objects: Mapping[str, bytes]) -> dict[str, Any]:
        """Return what was read, nested as it was saved: every key on every rank, as lists have no gaps."""
        nested: dict[str, Any] = {}
        for tensor in self.manifest.tensors:
            kind = getattr(torch, tensor.dtype)
            empty = 0 in tensor.shape
            parts = self.parts[tensor.key]
            value = torch.empty(tensor.shape, dtype=kind) if empty else BoxedTensor(tensor.shape, parts, kind, "cpu")
            set_element(nested, tensor.path, value)
        for blob in self.manifest.blobs:
            set_element(nested, blob.path, torch.load(io.BytesIO(objects[blob.key]), weights_only=False))
        return nested
