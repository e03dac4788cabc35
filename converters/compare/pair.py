"""Two tensors of the same key in two checkpoints, compared element by element in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...box import Box
from ...store.reading.bands import bands
from ...store.reading.dtypes import itemsize
from ...store.reading.payloads import Payloads, check_chunk
from ..engine.outputs import OutputTensor
from ..translate.conventions import Words
from .statistics import Statistics, Tolerance, statistics_of

BYTES_PER_ELEMENT = 80
"""The most memory that the comparison of one element takes: two words, their numbers, and what is computed of them."""

SAME, MOVED, CLOSE, CHANGED = "same", "moved", "close", "changed"
"""The same bits in the same boxes; in other boxes; other bits within the tolerance; and anything else."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """What became of one tensor.

    Attributes:
        status: ``same``, ``moved`` (the same elements in other boxes), ``close`` (within the tolerance), ``changed``.
        by: ``fingerprint`` if no element was read, else ``elements``; ``shape`` if shapes differ.
        shapes, dtypes: of both.
        statistics: of the elements; None if they were not read.
    """

    key: str
    status: str
    by: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    statistics: Statistics | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON data; statistics under their names, null where elements were not read."""
        s = self.statistics
        names = ("elements", "changed", "far", "max_abs", "max_rel", "norm_a", "norm_b", "rms_change", "cosine",
                 "nonfinite_a", "nonfinite_b")  # fmt: skip
        return {"key": self.key, "status": self.status, "by": self.by, "shapes": self.shapes, "dtypes": self.dtypes,
                **{name: None if s is None else getattr(s, name) for name in names}}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredSide:
    """A tensor of one of the two checkpoints, and the bytes of its chunks."""

    tensor: OutputTensor
    payloads: Payloads

    def boxes(self) -> frozenset[Box]:
        """The boxes in which it is stored."""
        return frozenset(fragment.box for fragment in self.tensor.layout.fragments)

    def check(self) -> None:
        """Compare the chunks with their checksums.

        Raises:
            SourceError: a chunk is damaged.
        """
        for chunk in self.tensor.chunks.values():
            if chunk.box.numel:
                check_chunk(self.payloads, self.tensor.record, chunk)

    def words(self, box: Box) -> Words:
        """The elements of a box, as raw words."""
        return self.tensor.elements(self.payloads, self.tensor.layout.fragments, box)


def known_to_be_equal(a: OutputTensor, b: OutputTensor) -> bool:
    """Whether fingerprints say that two tensors have the same elements."""
    mine, theirs = a.record, b.record
    same_kind = (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    return same_kind and mine.fingerprint is not None and mine.fingerprint == theirs.fingerprint


def compare_elements(
    a: StoredSide, b: StoredSide, tolerance: Tolerance, most: int, passed: Callable[[int], None]
) -> TensorDifference:
    """Compare two tensors of the same shape.

    Args:
        most: the most bytes of memory to use.
        passed: receives bytes that have been compared.

    Raises:
        SourceError: a chunk is damaged.
    """
    one, other = a.tensor.record, b.tensor.record
    a.check()
    b.check()
    found = Statistics()
    for band in bands(Box.of(one.shape), max(most // BYTES_PER_ELEMENT, 1)):
        for box in band.boxes:
            found += statistics_of(a.words(box), one.dtype, b.words(box), other.dtype, tolerance)
            passed(box.numel * (itemsize(one.dtype) + itemsize(other.dtype)))
    equal = found.changed == 0 and one.dtype == other.dtype
    status = CHANGED if tolerance.exact or found.far else CLOSE
    if equal:
        status = SAME if a.boxes() == b.boxes() else MOVED
    return TensorDifference(one.key, status, "elements", (one.shape, other.shape), (one.dtype, other.dtype), found)
