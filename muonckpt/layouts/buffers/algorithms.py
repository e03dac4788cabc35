"""Algorithms that place parameters in flat buffers; but for DeepSpeed's all in the reverse of the forward order.

Megatron's *padded* buffers hold whole parameters in equal shards (layer-wise optimizer), or cut them anywhere (all
others).  Its *compact* ones lay parameters end to end without padding, and give them, sorted by elements, to ranks
0 … n-1, n-1 … 0, and so on; two versions break ties in different orders.  Gradients are all-reduced there; an owner
steps its whole parameters.

Megatron's rules were read from Megatron-LM main d98e8a64, branch dev d48bd6be (``layer_wise_optimizer.py``,
``distrib_optimizer.py``, ``param_layout.py``, ``param_and_grad_buffer.py``) and megatron-core 0.19.2.  Where upstream
computes in floating point, so do we: the last bit can decide where a parameter goes.

Megatron's shards must be equal, so a bucket takes at least ``ranks * largest parameter``.  In our own *balanced*
buffers shards may be unequal, so a bucket takes what its parameters take, and does not restrict their owners: one
assignment balances all buckets of all buffers, dense and expert together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import numpy as np

from ...names.errors import LayoutError
from ..flat import FlatShard
from .buffer_layout import (
    BufferLayout,
    PlacedParameter,
    Span,
    bucket_shards,
    end_to_end,
    owner_shards,
    rank_of,
    round_up,
)
from .parameters import GroupSizes, Parameter, closes_at, in_buckets, newton_schulz, numel, split

ALIGNMENT = 64
"""Parameters begin at multiples of this many elements, except in compact buffers; balanced, also at their owner."""

TOLERANCE = 1.02
"""The busiest rank may work this many times as long as with a fresh assignment if parameters then keep their owners."""

_MIN_FILL = 0.9
"""A bucket stays open until it fills this fraction of shards as large as its largest parameter."""

_MAX_FILL = 1 + 0.3
"""Cost-balanced packing may fill a shard up to this many times the mean of its bucket."""

_PackedBucket = list[tuple[Parameter, int, int]]
"""The contents of one bucket: (parameter, shard, start in the shard)."""

_Entries = Mapping[str, PlacedParameter]
"""Parameters in a buffer, by name."""


def padded_numel(
    parameters: Iterable[Parameter], sizes: GroupSizes, bucket_size: int | None = None, busbw: bool = False
) -> tuple[BufferLayout, ...]:
    """Balance shards by elements (core 0.18 and 0.19, branch dev): largest parameter first, to the emptiest shard.

    Args:
        parameters: in forward order.
        bucket_size: elements at which a bucket closes (a soft minimum); None: one bucket.
        busbw: buckets end at multiples of 2¹⁶ elements too (``pad_buckets_for_high_nccl_busbw``).
    """
    buffers = []
    for group, ranks in _groups(parameters, sizes):
        contents = in_buckets(reversed(group), partial(_is_full, ranks=ranks, bucket_size=bucket_size))
        packed = []
        for bucket in contents:
            filled, largest_first = [0] * ranks, sorted(bucket, key=lambda p: -p.numel)
            packed.append([_append_to_shard(parameter, _emptiest_shard(filled), filled) for parameter in largest_first])
        buffers.append(_place_padded("padded-numel", group, ranks, packed, bucket_size, busbw))
    return tuple(buffers)


def padded_nscost(
    parameters: Iterable[Parameter], sizes: GroupSizes, bucket_size: int | None = None, busbw: bool = False
) -> tuple[BufferLayout, ...]:
    """Balance shards by the cost of Newton-Schulz over the whole buffer (main since 2026-08-12).

    Arguments as for `padded_numel`.  A full bucket still takes parameters that fit into its padding.
    """
    buffers = []
    for group, ranks in _groups(parameters, sizes):
        load = [0] * ranks
        contents = _grown_buckets(group, ranks, bucket_size, _shard_divisor(ranks, busbw))
        packed = [_pack_by_cost(bucket, load) for bucket in contents if bucket]
        buffers.append(_place_padded("padded-nscost", group, ranks, packed, bucket_size, busbw))
    return tuple(buffers)


def distributed_optimizer(
    parameters: Iterable[Parameter], sizes: GroupSizes, bucket_size: int | None = None, busbw: bool = False
) -> tuple[BufferLayout, ...]:
    """Place parameters that are not matrices end to end, cut anywhere (the byte-sharded optimizer).

    Arguments as for `padded_numel`; here a bucket closes after the parameter that fills it.
    """

    def is_full(bucket: list[Parameter]) -> bool:
        *sizes, last_size = (parameter.numel for parameter in bucket)
        aligned = sum(round_up(size, ALIGNMENT) for size in sizes)
        return bucket_size is not None and aligned + last_size >= bucket_size

    buffers, options = [], {"bucket_size": bucket_size, "busbw": busbw}
    for group, ranks in _groups(parameters, sizes):
        contents = in_buckets(reversed(group), is_full)
        entries, buckets = end_to_end(contents, ALIGNMENT, _bucket_divisor(ranks, busbw))
        shards = bucket_shards(buckets, ranks)
        buffers.append(
            _make_layout("distributed-optimizer", group, ranks, entries, buckets, shards, options, whole=False)
        )
    return tuple(buffers)


def _groups(parameters: Iterable[Parameter], sizes: GroupSizes) -> Iterator[tuple[tuple[Parameter, ...], int]]:
    """Yield the parameters of each buffer, in forward order, and the number of its ranks."""
    for group in split(parameters):
        yield group, sizes.of(group[0])


def _make_layout(
    algorithm: str,
    group: Iterable[Parameter],
    ranks: int,
    entries: _Entries,
    buckets: Sequence[Span],
    shards: tuple[FlatShard, ...],
    options: Mapping[str, int | bool | None],
    alignment: int = ALIGNMENT,
    whole: bool = True,
) -> BufferLayout:
    parameters = tuple(entries[parameter.name] for parameter in group)
    return BufferLayout(
        algorithm,
        version=1,
        ranks=ranks,
        parameters=parameters,
        buckets=tuple(buckets),
        shards=shards,
        alignment=alignment,
        whole=whole,
        options=options,
    )


def _matrix_cost(parameter: Parameter) -> int:
    """Estimate Newton-Schulz as Megatron does: ``long * short²`` for a matrix, else the number of elements."""
    if len(parameter.shape) != 2:
        return parameter.numel
    short, long = sorted((parameter.shape[0] * parameter.fold, parameter.shape[1]))
    return long * short * short


def _bucket_divisor(ranks: int, busbw: bool) -> int:
    return math.lcm(ranks, 128, 2**16 if busbw else 1)


def _shard_divisor(ranks: int, busbw: bool) -> int:
    return math.lcm(ALIGNMENT, _bucket_divisor(ranks, busbw) // ranks)


def _is_full(bucket: list[Parameter], ranks: int, bucket_size: int | None) -> bool:
    if bucket_size is None or not bucket:
        return False
    return numel(bucket) >= max(bucket_size, int(ranks * max(p.numel for p in bucket) * _MIN_FILL))


def _grown_buckets(
    parameters: Sequence[Parameter], ranks: int, bucket_size: int | None, divisor: int
) -> Iterator[list[Parameter]]:
    """Yield the contents of each bucket: a full one closes only before a parameter that would enlarge its shards.

    That is estimated by sending each parameter, in turn, to the emptiest shard.
    """
    bucket: list[Parameter] = []
    filled = [0] * ranks
    for parameter in reversed(parameters):
        # A tied parameter has a bucket of its own.
        if parameter.tied:
            yield from (bucket, [parameter])
            bucket, filled = [], [0] * ranks
            continue
        # A full bucket still takes what fits into its padding.
        fits_padding = round_up(min(filled), ALIGNMENT) + parameter.numel <= round_up(max(filled), divisor)
        if not fits_padding and _is_full(bucket, ranks, bucket_size):
            yield bucket
            bucket, filled = [], [0] * ranks
        _append_to_shard(parameter, _emptiest_shard(filled), filled)
        bucket.append(parameter)
    yield bucket


def _emptiest_shard(filled: Sequence[int]) -> int:
    return filled.index(min(filled))


def _append_to_shard(parameter: Parameter, shard: int, filled: list[int]) -> tuple[Parameter, int, int]:
    """Put a parameter at the end of a shard and update ``filled``, the end of each shard."""
    start = round_up(filled[shard], ALIGNMENT)
    filled[shard] = start + parameter.numel
    return parameter, shard, start


def _pack_by_cost(bucket: list[Parameter], load: list[int]) -> _PackedBucket:
    """Pack by cost and add to ``load``, the cost of each shard so far.  A tied parameter costs nothing."""
    if bucket[0].tied:
        return [(bucket[0], 0, 0)]
    contents: _PackedBucket = []
    filled = [0] * len(load)
    max_stop = numel(bucket) / len(load) * _MAX_FILL
    for parameter in sorted(bucket, key=lambda p: -_matrix_cost(p)):
        # The cheapest of the shards with space, or else the emptiest.
        shards = [s for s, stop in enumerate(filled) if round_up(stop, ALIGNMENT) + parameter.numel <= max_stop]
        shard = min(shards, key=lambda s: load[s]) if shards else _emptiest_shard(filled)
        contents.append(_append_to_shard(parameter, shard, filled))
        load[shard] += _matrix_cost(parameter)
    return contents


def _place_padded(
    algorithm: str,
    group: Iterable[Parameter],
    ranks: int,
    packed: Iterable[_PackedBucket],
    bucket_size: int | None,
    busbw: bool,
) -> BufferLayout:
    """Put buckets end to end, every shard of a bucket as large as its fullest."""
    entries: dict[str, PlacedParameter] = {}
    buckets: list[Span] = []
    base = 0
    for number, contents in enumerate(packed):
        # Shards of a bucket are equal, as the fullest one needs.
        size = round_up(max(start + p.numel for p, _, start in contents), _shard_divisor(ranks, busbw))
        entries |= {p.name: PlacedParameter(p, base + shard * size + start, number) for p, shard, start in contents}
        buckets.append((base, base + ranks * size))
        base += ranks * size
    options = {"bucket_size": bucket_size, "busbw": busbw}
    return _make_layout(algorithm, group, ranks, entries, buckets, bucket_shards(buckets, ranks), options)


_CompactBuffer = tuple[tuple[Parameter, ...], _Entries, tuple[Span, ...]]
"""A buffer without owners yet: its parameters in forward order, their entries, and its buckets."""


def legacy_pingpong(
    parameters: Sequence[Parameter],
    sizes: GroupSizes,
    bucket_size: int | None = None,
    groups: Sequence[Sequence[str]] | None = None,
) -> tuple[BufferLayout, ...]:
    """Place compactly with the owners of core 0.16 to 0.19: by elements, equal parameters in the order of ``groups``.

    Args:
        parameters: in forward order.
        bucket_size: elements; a bucket closes after the parameter that fills it; None: one bucket.
        groups: names in each of the optimizer's parameter groups; None: dense parameters, then expert ones.

    Raises:
        LayoutError: the groups do not name every parameter once.
    """
    # Sorting is stable: equal parameters stay in the order of groups.
    in_order = sorted(parameters, key=lambda p: p.expert)
    if groups is not None:
        order = {name: number for number, name in enumerate(chain.from_iterable(groups))}
        if order.keys() != {p.name for p in in_order} or len(order) != sum(map(len, groups)):
            raise LayoutError("the parameter groups do not name every parameter exactly once")
        in_order.sort(key=lambda p: order[p.name])
    in_order.sort(key=lambda p: p.numel)
    return _place_with_owners(
        "legacy-pingpong", _place_compactly(parameters, bucket_size), in_order, sizes, bucket_size
    )


def decoupled_total_order(
    parameters: Iterable[Parameter], sizes: GroupSizes, bucket_size: int | None = None
) -> tuple[BufferLayout, ...]:
    """Place compactly with the owners of branch dev: by elements, equal parameters by model chunk, buffer and start.

    Arguments as for `legacy_pingpong`.
    """
    buffers = _place_compactly(parameters, bucket_size)
    sort_keys: dict[str, tuple[int, ...]] = {}
    for number, (_, entries, _) in enumerate(buffers):
        sort_keys |= {e.name: (e.parameter.numel, e.parameter.chunk, number, e.start) for e in entries.values()}
    in_order = sorted(chain.from_iterable(group for group, *_ in buffers), key=lambda p: sort_keys[p.name])
    return _place_with_owners("decoupled-total-order", buffers, in_order, sizes, bucket_size)


def _place_compactly(parameters: Iterable[Parameter], bucket_size: int | None) -> list[_CompactBuffer]:
    """Place the parameters of each buffer end to end, without padding; tied ones get no bucket of their own."""
    buffers: list[_CompactBuffer] = []
    for group in split(parameters):
        contents = in_buckets(reversed(group), closes_at(bucket_size), is_alone=lambda parameter: False)
        buffers.append((group, *end_to_end(contents)))
    return buffers


def _place_with_owners(
    algorithm: str,
    buffers: Iterable[_CompactBuffer],
    in_order: Iterable[Parameter],
    sizes: GroupSizes,
    bucket_size: int | None,
) -> tuple[BufferLayout, ...]:
    """Give the parameters, in this order, to ranks 0 … n-1, n-1 … 0, and so on, dense and expert ones by themselves."""
    # Owners.
    counts: defaultdict[bool, int] = defaultdict(int)
    owners = {}
    for parameter in in_order:
        ranks = sizes.of(parameter)
        turn = counts[parameter.expert] % (2 * ranks)
        owners[parameter.name] = min(turn, 2 * ranks - 1 - turn)
        counts[parameter.expert] += 1
    # Buffers: neighbours of one owner are one shard.
    layouts = []
    for group, entries, buckets in buffers:
        shards, options = owner_shards(entries.values(), buckets[-1][1], owners), {"bucket_size": bucket_size}
        layouts.append(
            _make_layout(algorithm, group, sizes.of(group[0]), entries, buckets, shards, options, alignment=1)
        )
    return tuple(layouts)


def balanced(
    parameters: Sequence[Parameter],
    sizes: GroupSizes,
    bucket_size: int | None = None,
    previous: Mapping[str, int | None] | None = None,
) -> tuple[BufferLayout, ...]:
    """Place parameters in buffers whose shards are unequal, with owners from `balanced_owners`.

    Args:
        parameters, bucket_size: as for `legacy_pingpong`.
        previous: as for `balanced_owners`.
    """
    owners = balanced_owners(parameters, sizes, previous)
    buffers = []
    for group, ranks in _groups(parameters, sizes):
        contents = in_buckets(reversed(group), closes_at(bucket_size))
        # Neighbours of one owner make one shard.
        by_owner = (sorted(bucket, key=lambda parameter: owners[parameter.name]) for bucket in contents)
        entries, buckets = end_to_end(by_owner, ALIGNMENT, ALIGNMENT)
        shards, options = owner_shards(entries.values(), buckets[-1][1], owners), {"bucket_size": bucket_size}
        buffers.append(_make_layout("balanced", group, ranks, entries, buckets, shards, options))
    return tuple(buffers)


def balanced_owners(
    parameters: Sequence[Parameter],
    sizes: GroupSizes,
    previous: Mapping[str, int | None] | None = None,
) -> dict[str, int]:
    """Choose the owner of each parameter by name, a rank of its own data-parallel group.

    Longest processing time first (Graham 1969), over dense and expert parameters at once.  Among equally loaded ranks:
    the one that awaits the least of its previous parameters, then the one with the fewest elements, then the first.
    Tied parameters belong to rank 0 whatever their cost, so that the pipeline stages that share them agree.

    Expert rank ``e`` is assumed to be the dense ranks from ``e * dense / expert`` on; else only the balance suffers.

    Args:
        previous: owners by name.  A parameter keeps its owner, if that is still a rank, unless the rank would then work
            longer than `TOLERANCE` times the busiest of a fresh assignment.
    """
    tied = {parameter.name: 0 for parameter in parameters if parameter.tied}
    fresh, busiest = _assign_longest_first(parameters, sizes, tied, 0)
    if previous is None:
        return fresh
    return _assign_longest_first(parameters, sizes, {**previous, **tied}, int(busiest * TOLERANCE))[0]


def _assign_longest_first(
    parameters: Sequence[Parameter], sizes: GroupSizes, homes: Mapping[str, int | None], limit: int
) -> tuple[dict[str, int], int]:
    """Return owners by name, each at its home while that rank's load stays within ``limit``; and the greatest load.

    Loads are kept per *seat*: dense and expert ranks alike are equal groups of neighbouring seats.
    """
    seats = math.lcm(*(sizes.of(parameter) for parameter in parameters))
    cost = {parameter.name: newton_schulz(parameter) for parameter in parameters}
    load, numels, awaited = np.zeros((3, seats), np.int64)
    # Ranks await the cost of the parameters whose home they are.
    for p in parameters:
        if (home := homes.get(p.name)) is not None and home < sizes.of(p):
            awaited.reshape(sizes.of(p), -1)[home] += cost[p.name]
    # The longest first: at home if that is within the limit, else on the rank with the least load.
    owners: dict[str, int] = {}
    for p in sorted(parameters, key=lambda p: (-cost[p.name], -p.numel)):
        loads, elements, waiting = (seat.reshape(sizes.of(p), -1) for seat in (load, numels, awaited))
        owner = int(np.lexsort((elements.max(1), waiting.max(1), loads.max(1)))[0])
        if (home := homes.get(p.name)) is not None and home < len(loads):
            waiting[home] -= cost[p.name]
            if p.tied or loads[home].max() + cost[p.name] <= limit:
                owner = home
        loads[owner] += cost[p.name]
        elements[owner] += p.numel
        owners[p.name] = owner
    return owners, int(load.max())


# DeepSpeed's partitions of a parameter group: ZeRO 1 and 2 cut the group, ZeRO 3 each parameter.
# Source: ``stage_1_and_2.py`` and ``stage3.py`` of DeepSpeed 0.19.8.

PARTITION_ALIGNMENT = 2
"""Each partition of ZeRO 1 and 2 has a multiple of so many elements."""


def partitioned_group(
    parameters: Sequence[Parameter], ranks: int, size: int | None = None, paddings: Sequence[int] = ()
) -> BufferLayout:
    """Lay the parameters of a group end to end and cut them evenly, as ZeRO 1 and 2 do.

    Args:
        size: elements of each partition; None: as few as fit.
        paddings: elements after each parameter, if any.

    Raises:
        LayoutError: the partitions are too small.
    """
    entries: list[PlacedParameter] = []
    start = 0
    for number, parameter in enumerate(parameters):
        entries.append(PlacedParameter(parameter, start, 0))
        start = entries[-1].stop + (paddings[number] if paddings else 0)
    if size is None:
        size = round_up(entries[-1].stop, PARTITION_ALIGNMENT * ranks) // ranks
    buckets = ((0, size * ranks),)
    return BufferLayout(
        algorithm="zero",
        version=1,
        ranks=ranks,
        parameters=tuple(entries),
        buckets=buckets,
        shards=bucket_shards(buckets, ranks),
    )


def partitioned_parameters(parameters: Sequence[Parameter], ranks: int) -> BufferLayout:
    """Cut each parameter evenly, padded, and lay the parts of each rank end to end, as ZeRO 3 does."""
    entries, buckets = end_to_end([[parameter] for parameter in parameters], divisor=ranks)
    return BufferLayout(
        algorithm="zero-3",
        version=1,
        ranks=ranks,
        parameters=tuple(entries.values()),
        buckets=buckets,
        shards=bucket_shards(buckets, ranks),
    )


def touched_parameters(layout: BufferLayout) -> list[list[PlacedParameter]]:
    """Return for each rank the parameters that its partition touches, placed end to end as its momentum is.

    Muon under ZeRO 1 and 2 keeps momentum whole, so matrices at the ends of partitions lie on several ranks.
    """
    parameters_by_rank: list[list[Parameter]] = [[] for _ in range(layout.ranks)]
    for entry in layout.parameters:
        for shard in layout.shards_of(entry):
            parameters_by_rank[rank_of(shard)].append(entry.parameter)
    return [list(end_to_end([parameters])[0].values()) for parameters in parameters_by_rank]


def part_numel(layout: BufferLayout) -> int:
    """Return the elements of each rank's part, padding included."""
    return layout.numel // layout.ranks
