"""The items of a DCP checkpoint, which describe dtype, shape, strides and place of their elements themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ....box import Box, Index
from ....chunks import Chunks, Strides, columns_of, on_columns
from ....columns import UNKNOWN
from ....errors import SourceError
from ....record import StateRecord
from ...io.location import Location
from ...io.regular import File, open_regular
from ..torch_save import tensor_item
from ..torch_save.tensor_item import ItemTemplate, TensorItem


def located(path: Location, tensors: Sequence[StateRecord]) -> tuple[StateRecord, ...]:
    """These tensors with ``payload``, ``crc32`` and ``strides`` of each chunk, as its item says.

    Raises:
        SourceError: an item is not the dense tensor that the metadata promise; names the tensor, the box and the file.
    """
    columns = columns_of(tensor.chunks for tensor in tensors)
    payload, payload_length, crc32 = (
        column.copy() for column in (columns.payload, columns.payload_length, columns.crc32)
    )
    strides: dict[int, Index | None] = {}
    stored = [(tensor, box) for tensor in tensors for box in tensor.boxes]
    offsets, lengths = columns.item.tolist(), columns.item_length.tolist()
    order = np.lexsort((columns.item, columns.file))
    by_file = np.split(order, np.flatnonzero(np.diff(columns.file[order])) + 1) if len(order) else []

    def read_items(rows: NDArray[np.int64]) -> None:
        name = columns.names[columns.file[rows[0]]]
        items = [
            (row, offsets[row], _template(stored[row][0].dtype, stored[row][1].shape, lengths[row]))
            for row in rows.tolist()
        ]
        with open_regular(path / name) as file:
            around = _Surroundings(file, ((each, offset) for _, offset, each in items if each is not None))
            for row, offset, template in items:
                if template is not None and (sums := around.crc32(template, offset)) is not None:
                    payload[row], payload_length[row] = offset + len(template.head), template.payload_length
                    crc32[row] = sums
                    continue
                tensor, box = stored[row]
                try:
                    item = _parsed(file, tensor, box, offset, lengths[row])
                except SourceError as error:
                    where = f"{path / name} at byte {offset}: tensor {tensor.key!r} box {box}"
                    raise SourceError(f"{where}: {error}") from error
                payload[row], payload_length[row] = item.offset, item.length
                crc32[row] = UNKNOWN if item.crc32 is None else item.crc32
                if not item.row_major:
                    strides[row] = item.strides  # saved while transposed or channels-last

    if len(by_file) > 1:
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            list(pool.map(read_items, by_file))
    else:
        list(map(read_items, by_file))
    known = replace(columns, payload=payload, payload_length=payload_length, crc32=crc32)
    return tuple(
        replace(tensor, chunks=replace(own, strides=_strides(own, strides)))
        for tensor, own in zip(tensors, on_columns((tensor.chunks for tensor in tensors), known), strict=True)
    )


def _strides(chunks: Chunks, of_rows: Mapping[int, Index | None]) -> Strides | None:
    if not of_rows:
        return None
    own = tuple(map(of_rows.get, range(chunks.start, chunks.stop)))
    return own if any(own) else None


_FILES_AT_ONCE = 16
"""Files, or objects, from which threads read at once: a store, or a disk in the network, is slow to answer."""


class _Surroundings:
    """The bytes before and after the payloads of items of one file, read many items at a time.

    Args:
        items: those that may be like their template, each with the byte at which it begins; in the order of the file.
    """

    def __init__(self, file: File, items: Iterable[tuple[ItemTemplate, int]]) -> None:
        self._file = file
        self._runs = _joined((span for item in items for span in _spans(*item)), file.gap, file.most)
        self._start = self._stop = 0
        self._data = b""
        """The run that was read last; shorter than from start to stop where the file ends."""

    def crc32(self, template: ItemTemplate, offset: int) -> int | None:
        """The CRC-32 that the next item has of its payload; None if the item is not like its template."""
        head, tail = (self._bytes(*span) for span in _spans(template, offset))
        return template.crc32_of(head, tail)

    def _bytes(self, start: int, stop: int) -> bytes:
        while stop > self._stop:
            self._start, self._stop = next(self._runs)
            self._data = self._file.read(self._start, self._stop - self._start)
        if start < self._start:  # items overlap, so that they cannot be read in order
            return b""
        return self._data[start - self._start : stop - self._start]


def _template(dtype: str, shape: Index, length: int) -> ItemTemplate | None:
    """The template of an item of this length, if there is one."""
    template = tensor_item.template(dtype, shape)
    return template if template is not None and template.length == length else None


def _spans(template: ItemTemplate, offset: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where the bytes of an item before and after its payload start and stop in the file."""
    return (offset, offset + len(template.head)), (offset + template.tail_offset, offset + template.length)


def _joined(spans: Iterable[tuple[int, int]], gap: int, most: int) -> Iterator[tuple[int, int]]:
    """Runs of bytes, each for one read of at most ``most`` bytes, that have these spans, of which each is shorter.

    Args:
        gap: the largest between two spans of a run.
    """
    start = stop = -1
    for first, last in spans:
        if start >= 0 and (first - stop > gap or last - start > most):
            yield start, stop
            start = -1
        start, stop = (first, last) if start < 0 else (start, max(stop, last))
    if start >= 0:
        yield start, stop


def _parsed(file: File, tensor: StateRecord, box: Box, offset: int, length: int) -> TensorItem:
    item = tensor_item.read_tensor(file.read, offset, length)
    if (item.dtype, item.shape) != (tensor.dtype, box.shape):
        raise SourceError(
            f"expected {tensor.dtype} of shape {box.shape}, as .metadata says; found {item.dtype} of shape {item.shape}"
        )
    return item
