"""Checkpoints of formats of whole tensors for tests: written by the engine out of memory, read by box."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from muonckpt.algebra.box import Box
from muonckpt.algebra.layout import dense
from muonckpt.converters.engine.container import Container
from muonckpt.converters.engine.outputs import Outputs, OutputTensor
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.target.topology import Target
from muonckpt.layouts.flat import owned_layout
from muonckpt.record.chunks import no_chunks
from muonckpt.record.record import MANIFEST_FILE, Chunk, Chunks, Manifest, StateRecord
from muonckpt.store.io.checksums import xxh3_128
from muonckpt.store.open_checkpoint import OpenCheckpoint
from muonckpt.store.reading.blocks import slices_within
from muonckpt.store.reading.dtypes import dtype
from muonckpt.store.reading.payloads import Payloads, payload_of
from support.resharded import make_job
from support.sharded import bits


def record(key: str, value: torch.Tensor, **facts) -> StateRecord:
    dtype = str(value.dtype).removeprefix("torch.")
    return StateRecord(key, (key,), tuple(value.shape), dtype, no_chunks(value.dim()), **facts)


def write(path: Path, container: Container, tensors: Iterable[tuple[StateRecord, bytes]], **options: Any) -> Manifest:
    """These tensors and their elements in a container, from a source whose provenance is ``{"step": 3}``."""
    tensors = list(tensors)

    def in_memory(opened: OpenCheckpoint) -> Outputs:
        stored, outputs = [], []
        for record, raw in tensors:
            place, box = opened.payloads.keep(raw), Box.of(record.shape)
            chunks = Chunks.of([Chunk(box, place, place, xxh3_128([raw]))], box.ndim)
            stored.append(replace(record, chunks=chunks))
            outputs.append(OutputTensor(record, owned_layout(record.shape, 0), (chunks,)))
        return Outputs(outputs, constants=tuple(stored))

    source = path.with_name(f"{path.name}-source")
    source.mkdir(parents=True)
    (source / MANIFEST_FILE).write_text(Manifest((), (), {"step": 3}).to_json())
    job = make_job(source, Target({"dp": 1}), make_outputs=in_memory, container=container)
    return run_job(job, path, **options)


def write_values(path: Path, container: Container, tensors: dict[str, torch.Tensor], **options: Any) -> Manifest:
    return write(path, container, [(record(key, value), bits(value)) for key, value in tensors.items()], **options)


def assemble(payloads: Payloads, tensor: StateRecord, box: Box) -> np.ndarray:
    """The elements of a box from the chunks that hold them; `StateRecord.chunk_layout` proves that some do."""
    kind = dtype(tensor.dtype)
    words = np.empty((*box.shape, *(2,) * (kind.itemsize > 8)), kind.bits)
    for chunk in tensor.chunks:
        common = chunk.box & box
        if common is not None:
            place = dense(chunk.box, chunk.item.file).place_at(common.lo)
            elements = payloads.gather(payload_of(tensor, chunk), tensor.dtype, place, common.shape)
            words[slices_within(common, box.lo)] = elements
    return words
