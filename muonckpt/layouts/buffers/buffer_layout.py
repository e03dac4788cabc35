"""Flat buffers of many parameters: the range of each, the buckets of collectives, and the shards of ranks.

One description serves padded, compact, ping-pong and byte-sharded buffers.  A *bucket* is communicated at once;
*shards* say which ranks hold which ranges once gradients are reduced.  An owner is the rank whose one shard holds all
of a parameter; no parameter covers padding.  All starts, stops and sizes are in elements of the buffer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

from ...algebra.box import Index
from ...algebra.layout import Buffer, TensorLayout
from ...names.errors import LayoutError
from ..flat import FlatShard, even_shards, flat_layout
from .parameters import Parameter

Span = tuple[int, int]
"""Elements ``start:stop`` of a buffer."""


@dataclass(frozen=True, slots=True)
class PlacedParameter:
    """A parameter and the range of a buffer that it fills, row-major from element ``start``, in one ``bucket``."""

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
    return -(-value // divisor) * divisor


def end_to_end(
    contents: Iterable[Sequence[Parameter]], alignment: int = 1, divisor: int = 1
) -> tuple[dict[str, PlacedParameter], tuple[Span, ...]]:
    """Place the contents of each bucket end to end, and return the parameters by name, and the buckets.

    Args:
        alignment: every parameter begins at a multiple of it.
        divisor: every bucket ends at a multiple of it; itself a multiple of the alignment.
    """
    ranges: dict[str, PlacedParameter] = {}
    buckets: list[Span] = []
    # Parameters are aligned, and buckets padded at their ends.
    start = 0
    for parameters in contents:
        stop = start
        for parameter in parameters:
            entry = ranges[parameter.name] = PlacedParameter(parameter, round_up(stop, alignment), len(buckets))
            stop = entry.stop
        buckets.append((start, round_up(stop, divisor)))
        start = buckets[-1][1]
    return ranges, tuple(buckets)


def bucket_shards(buckets: Iterable[Span], ranks: int) -> tuple[FlatShard, ...]:
    """Cut every bucket into equal parts, one per rank.

    Raises:
        LayoutError: a bucket does not divide; pad it first.
    """
    ranges: list[tuple[int, int, int]] = []
    for start, stop in buckets:
        parts = enumerate(even_shards(stop - start, ranks))
        ranges += [(start + part.start, start + part.stop, rank) for rank, part in parts]
    return consecutive_shards(ranges)


def owner_shards(parameters: Iterable[PlacedParameter], numel: int, owners: Mapping[str, int]) -> tuple[FlatShard, ...]:
    """Give every parameter of a buffer of ``numel`` elements to its owner, by name.

    Neighbours of one owner in a bucket make one shard, which reaches to the next shard or to the end of the buffer.
    """
    in_order = sorted(parameters, key=lambda entry: entry.start)
    runs = groupby(in_order, key=lambda entry: (entry.bucket, owners[entry.name]))
    heads = [(next(run).start, rank) for (_, rank), run in runs]
    return consecutive_shards((start, stop, rank) for (start, rank), (stop, _) in pairwise([*heads, (numel, 0)]))


def consecutive_shards(ranges: Iterable[tuple[int, int, int]]) -> tuple[FlatShard, ...]:
    """Make shards of (start, stop, rank), in order: a rank's lie one after the other in its buffer."""
    ends: defaultdict[int, int] = defaultdict(int)
    shards = []
    for start, stop, rank in ranges:
        shards.append(FlatShard(buffer=rank, start=start, stop=stop, offset=ends[rank]))
        ends[rank] += stop - start
    return tuple(shards)


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """One flat buffer.

    Proved on construction: buckets tile the buffer; shards, replicas counted once, tile every bucket, and a rank's lie
    one after the other in its buffer; parameters are disjoint, aligned, each in its bucket, and, if ``whole``, uncut.

    Args:
        algorithm, version: the name of the placement, and the version of its rules.
        ranks: size of the data-parallel group; shards name its ranks ``0 … ranks - 1``.
        parameters: in forward order of the model.
        buckets: in order, as are the shards, replicas by rank.
        alignment: every parameter begins at a multiple of it.
        options: further arguments of the algorithm, such as ``bucket_size``; JSON values.

    Raises:
        LayoutError: names the parameter, bucket or shard, and the rule that it breaks.
    """

    algorithm: str
    version: int
    ranks: int
    parameters: tuple[PlacedParameter, ...]
    buckets: tuple[Span, ...]
    shards: tuple[FlatShard, ...]
    alignment: int = 1
    whole: bool = False
    options: Mapping[str, int | bool | None] = field(default_factory=dict, hash=False)
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", tuple(shard.start for shard in self.shards))
        _prove_tiling("bucket", self.buckets, self.numel)
        _prove_shards(self)
        _prove_parameters(self)

    @property
    def numel(self) -> int:
        return self.buckets[-1][1] if self.buckets else 0

    @property
    def padding(self) -> int:
        """Number of elements that belong to no parameter."""
        return self.numel - sum(self.filled)

    @property
    def filled(self) -> tuple[int, ...]:
        """Number of elements of each bucket that belong to parameters."""
        filled = [0] * len(self.buckets)
        for entry in self.parameters:
            filled[entry.bucket] += entry.parameter.numel
        return tuple(filled)

    @property
    def owners(self) -> dict[str, int | None]:
        """The only rank that holds any of each parameter; None where it is cut or replicated."""
        owners: dict[str, int | None] = {}
        for entry in self.parameters:
            shard, *others = self.shards_of(entry)
            owners[entry.name] = None if others else rank_of(shard)
        return owners

    @property
    def origins(self) -> tuple[Index, ...]:
        """The first index of each parameter: one zero per dim."""
        return tuple((0,) * len(entry.parameter.shape) for entry in self.parameters)

    @property
    def even(self) -> bool:
        """True if every bucket is cut into ``ranks`` equal shards, in order, as a plain reduce-scatter needs."""
        divides = all((stop - start) % self.ranks == 0 for start, stop in self.buckets)
        return divides and self.shards == bucket_shards(self.buckets, self.ranks)

    def shards_of(self, entry: PlacedParameter) -> tuple[FlatShard, ...]:
        """Return the shards that hold any of a parameter, in order."""
        holder = max(bisect_right(self._starts, entry.start) - 1, 0)
        return self.shards[bisect_left(self._starts, self._starts[holder]) : bisect_left(self._starts, entry.stop)]

    def tensor_layouts(self, buffers: Sequence[Buffer] | None = None) -> dict[str, TensorLayout]:
        """Return each parameter's layout over the ranks' buffers, where shards lie one after the other.

        Args:
            buffers: names of the ranks' buffers, such as global ranks; None: ranks in the group.
        """
        names = range(self.ranks) if buffers is None else buffers
        layouts = {}
        for entry in self.parameters:
            shards = tuple(replace(shard, buffer=names[rank_of(shard)]) for shard in self.shards_of(entry))
            layouts[entry.name] = flat_layout(entry.parameter.shape, entry.start, shards)
        return layouts


def rank_of(shard: FlatShard) -> int:
    assert isinstance(shard.buffer, int)
    return shard.buffer


def _prove_shards(layout: BufferLayout) -> None:
    """Refuse shards of a rank that do not follow one another, replicas out of order, and holes between shards."""
    ends: defaultdict[Buffer, int] = defaultdict(int)
    for shard in layout.shards:
        if shard.buffer not in range(layout.ranks):
            raise LayoutError(f"{shard} is held by none of {layout.ranks} ranks")
        if shard.offset != ends[shard.buffer]:
            raise LayoutError(f"{shard} should follow at {ends[shard.buffer]} of what its rank holds")
        ends[shard.buffer] += shard.stop - shard.start
    for a, b in pairwise(layout.shards):
        if (a.start, a.stop) == (b.start, b.stop) and rank_of(a) >= rank_of(b):
            raise LayoutError(f"{a} and {b} are replicas, but not in the order of their ranks")
    # Without replicas they tile the buffer, and every bucket.
    _prove_tiling("shard", list(dict.fromkeys((shard.start, shard.stop) for shard in layout.shards)), layout.numel)
    cuts = {0, *(shard.stop for shard in layout.shards)}
    for bucket in layout.buckets:
        if not cuts.issuperset(bucket):
            raise LayoutError(f"a shard crosses an end of bucket {bucket}")


def _prove_tiling(noun: str, spans: Sequence[Span], numel: int) -> None:
    end = 0
    for start, stop in spans:
        if start != end or stop <= start:
            raise LayoutError(f"{noun} [{start}, {stop}) does not follow the one before it, which ends at {end}")
        end = stop
    if end != numel:
        raise LayoutError(f"the last {noun} ends at {end} of {numel} elements")


def _prove_parameters(layout: BufferLayout) -> None:
    """Refuse parameters that overlap, or are not where alignment, buckets and ``whole`` demand them."""
    if len({entry.name for entry in layout.parameters}) != len(layout.parameters):
        raise LayoutError("two parameters of one name")
    end = 0
    for entry in sorted(layout.parameters, key=lambda entry: entry.start):
        about = f"{entry.name!r} at [{entry.start}, {entry.stop})"
        if entry.start < end:
            raise LayoutError(f"{about} overlaps the parameter before it, which ends at {end}")
        if entry.start % layout.alignment:
            raise LayoutError(f"{about} does not begin at a multiple of {layout.alignment}")
        if entry.bucket not in range(len(layout.buckets)):
            raise LayoutError(
                f"{about} is in no bucket: expected a number below {len(layout.buckets)}, found {entry.bucket}"
            )
        start, stop = layout.buckets[entry.bucket]
        if not start <= entry.start <= entry.stop <= stop:
            raise LayoutError(f"{about} is not inside bucket {entry.bucket}, [{start}, {stop})")
        spans = {(shard.start, shard.stop) for shard in layout.shards_of(entry)}
        if layout.whole and len(spans) > 1:
            raise LayoutError(f"{about} is cut into {len(spans)}, though the layout keeps parameters whole")
        end = entry.stop
