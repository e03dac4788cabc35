"""The chunks of a source that are still to be checked, as arrays: there may be a million of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...chunks import columns_of
from ...record import Chunk, Extent, StateRecord

_NOTHING = np.array([-1]), np.array([0])
"""A file in which no item begins."""


class UncheckedChunks:
    """Chunks with their tensors; safe to use from several threads.

    Args:
        tensors: all tensors of the source.  Their chunks, one after the other, have numbers; all that have elements
            are to be checked.
    """

    def __init__(self, tensors: Sequence[StateRecord]) -> None:
        self._tensors = tensors
        columns = columns_of([tensor.chunks for tensor in tensors])
        elements = np.concatenate([np.zeros(0, np.int64), *(tensor.boxes.numel for tensor in tensors)])
        self._waiting: NDArray[np.bool_] = elements > 0
        self._shared = np.zeros(len(elements), np.bool_)
        self._ends = np.cumsum([len(tensor.chunks) for tensor in tensors])
        self._by_file: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
        full = np.flatnonzero(self._waiting)  # an item without elements can begin where one with elements does
        order = full[np.lexsort((columns.item[full], columns.file[full]))]
        bounds = np.searchsorted(columns.file[order], np.arange(len(columns.names) + 1))
        for name, start, stop in zip(columns.names, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if start < stop:
                self._by_file[name] = columns.item[order[start:stop]], order[start:stop]
        self._taking = Lock()

    def __len__(self) -> int:
        return int(np.count_nonzero(self._waiting))

    def __iter__(self) -> Iterator[tuple[StateRecord, Chunk]]:
        return map(self._chunk, np.flatnonzero(self._waiting).tolist())

    def numbered(self, items: Iterable[tuple[str, Sequence[int]]]) -> NDArray[np.bool_]:
        """Whether each chunk is in one of these items: files of the source, and offsets in bytes."""
        wanted = np.zeros(len(self._waiting), np.bool_)
        for file, offsets in items:
            rows, found = self._rows(file, offsets)
            wanted[rows[found]] = True
        return wanted

    def keep(self, chosen: NDArray[np.bool_], shared: NDArray[np.bool_]) -> None:
        """Leave only the chosen chunks to be checked; other processes copy from the shared ones as well."""
        self._waiting &= chosen
        self._shared = shared

    def shared_out(self, most: int) -> Iterator[Iterator[Extent]]:
        """The items that are still to be checked, in at most so many parts."""
        waiting = np.flatnonzero(self._waiting)
        for numbers in np.array_split(waiting, max(min(most, len(waiting)), 1)):
            yield (self._chunk(number)[1].item for number in numbers.tolist())

    def take(self, file: str, offsets: Sequence[int]) -> list[bool]:
        """Which of the items at these offsets of a file, in bytes, were still to be checked; now they are not."""
        rows, found = self._rows(file, offsets)
        with self._taking:
            taken: NDArray[np.bool_] = self._waiting[rows] & found
            self._waiting[rows[found]] = False
        answer: list[bool] = taken.tolist()
        return answer

    def waits(self, item: Extent) -> bool:
        """Whether the chunk in an item is still to be checked; False for items that are not the source's."""
        return self._says(self._waiting, item)

    def is_shared(self, item: Extent) -> bool:
        """Whether other processes copy from the chunk in an item as well."""
        return self._says(self._shared, item)

    def at(self, item: Extent) -> tuple[StateRecord, Chunk]:
        """The chunk in an item that is one of the source's."""
        rows, _ = self._rows(item.file, [item.offset])
        return self._chunk(int(rows[0]))

    def _rows(self, file: str, offsets: Sequence[int]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The numbers of the chunks in these items, and whether there is one."""
        known, rows = self._by_file.get(file, _NOTHING)
        at = np.minimum(np.searchsorted(known, offsets), len(known) - 1)
        return rows[at], known[at] == offsets

    def _says(self, column: NDArray[np.bool_], item: Extent) -> bool:
        rows, found = self._rows(item.file, [item.offset])
        return bool(found[0] and column[rows[0]])

    def _chunk(self, row: int) -> tuple[StateRecord, Chunk]:
        number = int(np.searchsorted(self._ends, row, side="right"))
        tensor = self._tensors[number]
        return tensor, tensor.chunks[row - int(self._ends[number])]
