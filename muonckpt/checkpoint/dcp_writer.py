"""The file of one rank: stock items end to end, digested in the pass that writes them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from ..errors import DestinationError
from ..store.formats.torch_save import tensor_item
from ..store.formats.torch_save.stored_zip import aligned
from ..store.formats.torch_save.tensor_item import ItemFrame
from ..store.io.checksums import Sums, xxh3_128
from ..store.io.location import Location
from ..store.io.new_file import Writing, created
from .bits import bits_of, dtype_name
from .receipt import ItemSums
from .save_planner import offsets_of, planned_tensor


@dataclass(slots=True)
class SaveProgress:
    """Of one rank's file, in bytes; another thread may look."""

    written: int = 0
    total: int = 0


def write_items(
    planner: SavePlanner, items: Sequence[WriteItem], file: Location, progress: SaveProgress
) -> list[ItemSums]:
    """Write a rank's file, and return when it is on the disk or in the store.  No items, no file.

    Args:
        items: of the rank's plan, blobs first.
        progress: follows.

    Raises:
        DestinationError: it cannot be written.
        LayoutError: a local tensor is not what was planned.
    """
    if not items:
        return []
    blobs = [_blob(planner, item) for item in items if item.tensor_data is None]
    tensors = [(item, _frame(item)) for item in items[len(blobs) :]]
    starts, end = [], 0
    for length in (*map(len, blobs), *(frame.length for _, frame in tensors)):
        starts.append(aligned(end))
        end = starts[-1] + length
    progress.total = end
    try:
        with created(file, end) as output:
            sums = [_put_blob(output, blob, start, progress) for blob, start in zip(blobs, starts, strict=False)]
            for (item, frame), start in zip(tensors, starts[len(blobs) :], strict=True):
                sums.append(_put_tensor(output, planner, item, frame, start, progress))
    except OSError as error:
        raise DestinationError(f"cannot write {file}: {error}") from error
    return sums


def witness(planner: SavePlanner, item: WriteItem) -> ItemSums:
    """The digest of this rank's replica of an item that another rank writes."""
    if item.tensor_data is None:
        return ItemSums(xxh3_128([_blob(planner, item)]))
    sums = Sums()
    for _ in sums.passing(bits_of(_tensor(planner, item)), offsets_of(item)):
        pass
    return ItemSums(sums.digest)


def _put_blob(output: Writing, data: memoryview, start: int, progress: SaveProgress) -> ItemSums:
    progress.written = output.write(data, start)
    return ItemSums(xxh3_128([data]), length=len(data))


def _put_tensor(
    output: Writing, planner: SavePlanner, item: WriteItem, frame: ItemFrame, start: int, progress: SaveProgress
) -> ItemSums:
    sums, end = Sums(), output.write(frame.head, start)
    for part in sums.passing(bits_of(_tensor(planner, item)), offsets_of(item)):
        end = progress.written = output.write(part, end)
    progress.written = output.write(frame.tail(sums.checksum), end)
    return ItemSums(sums.digest, sums.share, frame.length, sums.checksum)


def _frame(item: WriteItem) -> ItemFrame:
    """The bytes around the elements of a planned tensor."""
    assert item.tensor_data is not None
    return tensor_item.frame(dtype_name(item.tensor_data.properties.dtype), tuple(item.tensor_data.chunk.sizes))


def _tensor(planner: SavePlanner, item: WriteItem) -> Tensor:
    return planned_tensor(planner, item).resolve_conj().resolve_neg().cpu().contiguous()


def _blob(planner: SavePlanner, item: WriteItem) -> memoryview:
    stream = planner.resolve_data(item)
    assert isinstance(stream, io.BytesIO)
    return stream.getbuffer()
