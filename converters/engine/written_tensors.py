"""What the finished files hold: the chunks of each tensor as they were written, and its fingerprint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ...chunks import Boxes, Chunks
from ...columns import UNKNOWN, Columns, check_name
from ...store.io.checksums import crc32_of
from .journal import SUMS, ChunkSums, FinishedFile
from .output_chunks import ChunkPlan
from .output_files import OutputFile
from .outputs import OutputTensor


def written_tensors(
    outputs: Sequence[OutputTensor], files: Sequence[OutputFile], files_done: Mapping[str, FinishedFile]
) -> Iterator[tuple[Chunks, int]]:
    """The chunks of each of these tensors, in the order of the files, and its fingerprint."""
    numbers = {output.key: number for number, output in enumerate(outputs)}
    plans = list(chain.from_iterable(file.chunks.plans for file in files))
    owners = (numbers[output.key] for file in files for output in file.chunks.outputs)
    owner = np.fromiter(owners, np.int32, len(plans))
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=len(outputs))).tolist()
    sums = np.concatenate([np.empty(0, SUMS), *(files_done[file.name].chunks for file in files)])[order]
    columns, known = _columns(files, plans, order, sums), dict[Boxes, Boxes]()
    shares = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sums["share"])])  # modulo 2**64
    for start, end, output in zip([0, *ends], ends, outputs, strict=False):
        boxes = _boxes(tuple([plans[number] for number in order[start:end].tolist()]), len(output.record.shape))
        yield Chunks(columns, start, known.setdefault(boxes, boxes)), (int(shares[end]) - int(shares[start])) % 2**64


@lru_cache(maxsize=1024)
def _boxes(plans: tuple[ChunkPlan, ...], ndim: int) -> Boxes:
    """Cached, because tensors that lie alike share their plans."""
    return Boxes.of_all([plan.box for plan in plans], ndim)


def _columns(
    files: Sequence[OutputFile], plans: Sequence[ChunkPlan], order: NDArray[np.intp], sums: ChunkSums
) -> Columns:
    """The columns of chunks of files, in this order, in which their sums are already."""
    known: dict[ChunkPlan, int] = {}
    number = np.fromiter((known.setdefault(plan, len(known)) for plan in plans), np.int32, len(plans))[order]
    frames = [plan.frame for plan in known]
    lengths = [(f.length, f.payload_offset, f.payload_length, f.checksum_of is crc32_of) for f in frames]
    length, start, payload_length, has_crc32 = np.array(lengths, np.int64).reshape(-1, 4).T
    offset = np.concatenate([np.zeros(0, np.int64), *(file.chunks.offsets for file in files)])[order]
    for file in files:
        check_name(file.name)
    return Columns(
        names=tuple(file.name for file in files),
        file=np.repeat(np.arange(len(files), dtype=np.int32), [len(file.chunks) for file in files])[order],
        item=offset,
        item_length=length[number],
        payload=offset + start[number],
        payload_length=payload_length[number],
        digest=np.ascontiguousarray(sums["digest"]).view(np.uint8).reshape(-1, 16),
        has_digest=np.ones(len(order), np.bool_),
        crc32=np.where(has_crc32[number], sums["checksum"], UNKNOWN).astype(np.int64),
    )
