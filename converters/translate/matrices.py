"""The matrices in a parameter, which rules cut and join with it, and the options of groups that say them.

A program's table of codings says by which option it expresses them; here they have the names that `muonckpt.optimizer`
gives them: ``pieces``, ``columns``, ``interleaved`` and ``flatten``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from ...algebra.box import Index
from ...names.vocabulary import FLATTEN


class Label(NamedTuple):
    """The common label of a matrix's elements along a dim, and how many there are in the source."""

    key: Hashable
    size: int


Runs = tuple[tuple[Label, int], ...]
"""Labels along a dim, each with the number of its elements; neighbours have different ones."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices in a parameter: elements of one matrix have the same labels, and the same index of a stack.

    Attributes:
        runs: the labels along each dim; none if no option can say which matrices these are.
        is_flat: the first dim is the rows and all others the columns, as of a convolution; else the last two are.
    """

    runs: tuple[Runs, ...]
    is_flat: bool = False

    @classmethod
    def of(cls, options: Mapping[str, object], shape: Index) -> Matrices:
        """Return the matrices that common options say of a parameter of this shape."""
        is_flat = bool(options.get(FLATTEN, len(shape) > 3))
        runs = [_one_run(size) for size in shape]
        row_dim, last_dim = _row_dim(len(shape), is_flat), len(shape) - 1
        for dim, name, times in ((row_dim, "pieces", options.get("interleaved", 1)), (last_dim, "columns", 1)):
            sizes = options.get(name)
            if sizes is None or len(shape) < 2:
                continue
            if not isinstance(sizes, list | tuple) or not isinstance(times, int) or (dim > row_dim + 1):
                return UNKNOWN
            runs[dim] = tuple((Label(number, size * times), size) for number, size in enumerate(sizes)) * times
            if sum(size for _, size in runs[dim]) != shape[dim]:
                return UNKNOWN
        return cls(tuple(map(_merged_runs, runs)), is_flat)

    @property
    def is_known(self) -> bool:
        return bool(self.runs)

    @property
    def is_divided(self) -> bool:
        """Return whether a part of a matrix of the source is elsewhere."""
        for runs in self.runs[_row_dim(len(self.runs), self.is_flat) :]:
            sizes = Counter[Label]()
            for label, size in runs:
                sizes[label] += size
            if any(size != label.size for label, size in sizes.items()):
                return True
        return False

    def options(self) -> dict[str, object] | None:
        """Return the common options that say which matrices these are; None if there are none."""
        if len(self.runs) < 2:
            return None
        row_dim = _row_dim(len(self.runs), self.is_flat)
        # Rows may repeat a block of pieces in turns; columns may be divided in one dim, each piece a matrix by itself.
        column_runs = self.runs[row_dim + 1 :]
        columns = [[size for _, size in runs] for runs in column_runs]
        labels = [label for label, _ in chain.from_iterable(column_runs)]
        rows = self.runs[row_dim]
        count = len({label for label, _ in rows})
        block = rows[:count]
        times = len(rows) // count if count else 1
        has_turns = rows == block * times and len({label for label, _ in block}) == count
        has_columns = len(labels) > len(columns)
        if not has_turns or (has_columns and (len(columns) > 1 or len({*labels}) < len(labels))):
            return None
        return {
            "pieces": tuple(size for _, size in block) if count > 1 else None,
            "interleaved": times if count > 1 else 1,
            "columns": tuple(columns[0]) if has_columns else None,
            FLATTEN: self.is_flat,
        }

    # The effect of rules.

    def part(self, ranges: Sequence[tuple[int, int]], dim: int) -> Matrices:
        """Return the matrices in these ranges of a dim, one after the other."""
        if not self.is_known:
            return self
        runs = _merged_runs(chain.from_iterable(_runs_between(self.runs[dim], lo, hi) for lo, hi in ranges))
        if self._is_stack(dim):
            # Other indices of a stack are other matrices, so their labels differ by the range.
            relabelled: list[Runs] = []
            for dim_runs in self.runs:
                relabelled.append(tuple((Label((ranges[0], label.key), label.size), size) for label, size in dim_runs))
            relabelled[dim] = _one_run(sum(size for _, size in runs))
            return replace(self, runs=tuple(relabelled))
        return replace(self, runs=(*self.runs[:dim], runs, *self.runs[dim + 1 :]))

    def without_dim(self, dim: int) -> Matrices:
        """Return the matrices at one index of a dim."""
        return replace(self, runs=(*self.runs[:dim], *self.runs[dim + 1 :]))

    def with_dim(self, dim: int) -> Matrices:
        """Return the same matrices with one more dim, of size 1, of a stack of them."""
        has_stack = self.is_known and not self.is_flat
        return replace(self, runs=(*self.runs[:dim], _one_run(1), *self.runs[dim:])) if has_stack else UNKNOWN

    def _is_stack(self, dim: int) -> bool:
        return dim < _row_dim(len(self.runs), self.is_flat)


UNKNOWN = Matrices(())
"""Matrices that no option says."""


def joined(
    parts: Sequence[Matrices], origins: Sequence[Hashable], ranges: Sequence[Sequence[tuple[int, int]]], dim: int
) -> Matrices:
    """Return the matrices of a parameter that is made of several.

    Args:
        origins: of the parts; those of one origin are of one parameter of the source, whose matrices they share.
        ranges: of the whole's dim, for each part, in their order within the part.
    """
    first = parts[0]
    for part in parts:
        others = [_numbered_runs(runs) for number, runs in enumerate(part.runs) if number != dim]
        if not part.is_known or others != [_numbered_runs(r) for number, r in enumerate(first.runs) if number != dim]:
            return UNKNOWN
    is_stack, placed = first._is_stack(dim), list[tuple[int, Runs]]()
    for part, origin, part_ranges in zip(parts, origins, ranges, strict=True):
        others_of_part, start = (*part.runs[:dim], *part.runs[dim + 1 :]), 0
        for lo, hi in part_ranges:
            labelled = []
            for label, size in _runs_between(part.runs[dim], start, start + hi - lo):
                labelled.append((Label((origin, others_of_part, label.key), label.size), size))
            placed.append((lo, tuple(labelled)))
            start += hi - lo
    runs = _merged_runs(chain.from_iterable(runs for _, runs in sorted(placed, key=lambda pair: pair[0])))
    if is_stack:
        runs = _one_run(sum(size for _, size in runs))
    is_flat = first.is_flat and all(part.is_flat for part in parts)
    return Matrices((*first.runs[:dim], runs, *first.runs[dim + 1 :]), is_flat)


def _row_dim(num_dims: int, is_flat: bool) -> int:
    return 0 if is_flat else max(num_dims - 2, 0)


def _one_run(size: int) -> Runs:
    return ((Label(0, size), size),)


def _merged_runs(runs: Iterable[tuple[Label, int]]) -> Runs:
    """Return the runs with neighbours of one label as one."""
    merged: list[tuple[Label, int]] = []
    for label, size in runs:
        if merged and merged[-1][0] == label:
            merged[-1] = (label, merged[-1][1] + size)
        elif size:
            merged.append((label, size))
    return tuple(merged)


def _runs_between(runs: Runs, lo: int, hi: int) -> Iterator[tuple[Label, int]]:
    """Yield the runs of the elements from ``lo`` to ``hi``."""
    start = 0
    for label, size in runs:
        common = min(hi, start + size) - max(lo, start)
        if common > 0:
            yield label, common
        start += size


def _numbered_runs(runs: Runs) -> tuple[tuple[int, int], ...]:
    """Return runs with numbers as labels, in the order of their first elements."""
    numbers: dict[Label, int] = {}
    return tuple((numbers.setdefault(label, len(numbers)), size) for label, size in runs)
