"""The parts of a flat buffer: where parameters begin, and which ranks hold which ranges.  Sizes are in elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..flat import FlatShard, even_shards
from .parameters import Parameter

Span = tuple[int, int]
"""Elements ``start:stop`` of a buffer."""


@dataclass(frozen=True, slots=True)
class PlacedParameter:
    """A parameter and the range of a buffer that it fills, row-major from element ``start``, in one bucket.

    Args:
        bucket: the number of the bucket.
    """

    parameter: Parameter
    start: int
    bucket: int

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel


def round_up(value: int, divisor: int) -> int:
    """The smallest multiple of ``divisor`` that is not below ``value``."""
    return -(-value // divisor) * divisor


def end_to_end(
    contents: Iterable[Sequence[Parameter]], alignment: int = 1, divisor: int = 1
) -> tuple[dict[str, PlacedParameter], tuple[Span, ...]]:
    """Place the contents of each bucket end to end.  Returns the parameters by name, and the buckets.

    Args:
        alignment: every parameter begins at a multiple of it.
        divisor: every bucket ends at a multiple of it; itself a multiple of the alignment.
    """
    ranges: dict[str, PlacedParameter] = {}
    buckets: list[Span] = []
    start = 0
    for parameters in contents:
        stop = start
        for parameter in parameters:
            placed = ranges[parameter.name] = PlacedParameter(parameter, round_up(stop, alignment), len(buckets))
            stop = placed.stop
        buckets.append((start, round_up(stop, divisor)))
        start = buckets[-1][1]
    return ranges, tuple(buckets)


def divided(buckets: Iterable[Span], ranks: int) -> tuple[FlatShard, ...]:
    """Every bucket cut into equal parts, one per rank.

    Raises:
        LayoutError: a bucket does not divide; pad it first.
    """
    return consecutive_shards(
        (start + part.start, start + part.stop, rank)
        for start, stop in buckets
        for rank, part in enumerate(even_shards(stop - start, ranks))
    )


def owned(parameters: Iterable[PlacedParameter], numel: int, owners: Mapping[str, int]) -> tuple[FlatShard, ...]:
    """The shards of a buffer of ``numel`` elements that give every parameter to its owner, by name.

    Neighbours of one owner in a bucket make one shard, which reaches to the next shard or to the end of the buffer.
    """
    in_order = sorted(parameters, key=lambda placed: placed.start)
    runs = groupby(in_order, key=lambda placed: (placed.bucket, owners[placed.name]))
    heads = [(next(run).start, rank) for (_, rank), run in runs]
    ends = [*(start for start, _ in heads[1:]), numel]
    return consecutive_shards((start, stop, rank) for (start, rank), stop in zip(heads, ends, strict=False))


def consecutive_shards(held: Iterable[tuple[int, int, int]]) -> tuple[FlatShard, ...]:
    """Shards from (start, stop, rank), in order: those of a rank lie one after the other in its buffer."""
    ends: defaultdict[int, int] = defaultdict(int)
    shards = []
    for start, stop, rank in held:
        shards.append(FlatShard(rank, start, stop, ends[rank]))
        ends[rank] += stop - start
    return tuple(shards)
