"""The file of one rank: stock items end to end, digested in the pass that writes them; and the receipt for it."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..box import Index
from ..errors import DestinationError
from ..store.formats.torch_save import tensor_item
from ..store.formats.torch_save.stored_zip import aligned
from ..store.io.checksums import Sums, xxh3_128
from ..store.io.location import Location
from ..store.io.new_file import Writing, created
from .bits import bits_of, dtype_name
from .live_state import Item, LiveState


@dataclass(slots=True)
class SaveProgress:
    """The bytes of one rank's file; another thread may look."""

    written: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class ItemSums:
    """The checksums of an item that a rank has written, or holds as a replica of what another has written.

    Attributes:
        digest: xxh3-128, in hex, of the elements of a tensor, or of the bytes of an object.
        share: of the fingerprint of the tensor; 0 for an object.
        length: bytes of the item in the file; 0 if this rank does not write it.
        crc32: of the elements of a tensor; 0 for an object.
    """

    digest: str
    share: int = 0
    length: int = 0
    crc32: int = 0


_ROW = struct.Struct("<16sQQI")
_ROWS = np.dtype([("digest", "<u8", (2,)), ("share", "<u8"), ("length", "<u8"), ("crc32", "<u4")])


def packed(items: Iterable[ItemSums]) -> bytes:
    """Return a receipt: 36 bytes for each item, in the order of the plan."""
    return b"".join(_ROW.pack(bytes.fromhex(item.digest), item.share, item.length, item.crc32) for item in items)


def unpacked(receipt: bytes, expected: int, rank: int) -> NDArray[Any]:
    """Return the rows of a receipt.

    Raises:
        DestinationError: there are more or fewer than the rank has planned.
    """
    if len(receipt) != expected * _ROW.size:
        raise DestinationError(
            f"rank {rank} planned to write or compare {expected} items and did so with {len(receipt) / _ROW.size:g}"
        )
    return np.frombuffer(receipt, _ROWS)


def write_items(live: LiveState, items: Sequence[Item], file: Location, progress: SaveProgress) -> list[ItemSums]:
    """Write a rank's file, and return when it is on the disk or in the store.  No items, no file.

    Args:
        items: objects first.
        progress: follows.

    Raises:
        DestinationError: it cannot be written.
    """
    if not items:
        return []
    blobs = [_pickled(live, key) for key, lo in items if lo is None]
    tensors = [(live.parts[key][lo], lo) for key, lo in items if lo is not None]
    frames = [tensor_item.frame(dtype_name(part.dtype), tuple(part.shape)) for part, _ in tensors]
    starts, end = [], 0
    for length in (*map(len, blobs), *(frame.length for frame in frames)):
        starts.append(aligned(end))
        end = starts[-1] + length
    progress.total = end

    def put_blob(output: Writing, data: memoryview, start: int) -> ItemSums:
        progress.written = output.write(data, start)
        return ItemSums(xxh3_128([data]), length=len(data))

    def put_tensor(output: Writing, part: Tensor, lo: Index, frame: tensor_item.ItemFrame, start: int) -> ItemSums:
        sums, end = Sums(), output.write(frame.head, start)
        for band in sums.passing(bits_of(_on_host(part)), lo):
            end = progress.written = output.write(band, end)
        progress.written = output.write(frame.tail(sums.checksum), end)
        return ItemSums(sums.digest, sums.share, frame.length, sums.checksum)

    try:
        with created(file, end) as output:
            receipt = [put_blob(output, blob, start) for blob, start in zip(blobs, starts, strict=False)]
            for (part, lo), frame, start in zip(tensors, frames, starts[len(blobs) :], strict=True):
                receipt.append(put_tensor(output, part, lo, frame, start))
    except OSError as error:
        raise DestinationError(f"cannot write {file}: {error}") from error
    return receipt


def witness(live: LiveState, item: Item) -> ItemSums:
    """Return the digest of this rank's replica of an item that another rank writes."""
    key, lo = item
    if lo is None:
        return ItemSums(xxh3_128([_pickled(live, key)]))
    sums = Sums()
    for _ in sums.passing(bits_of(_on_host(live.parts[key][lo])), lo):
        pass
    return ItemSums(sums.digest)


def _on_host(part: Tensor) -> Tensor:
    return part.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _pickled(live: LiveState, key: str) -> memoryview:
    """Return an object as DCP stores it."""
    stream = io.BytesIO()
    torch.save(live.flat[key], stream)
    return stream.getbuffer()
