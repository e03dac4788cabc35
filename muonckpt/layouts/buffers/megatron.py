"""Megatron's placements of parameters in flat buffers, taken in backprop order, the reverse of the forward order.

Padded buffers hold whole parameters in equal shards (layer-wise optimizer), or cut them anywhere (all others).  Compact
ones lay parameters end to end without padding, and deal them, sorted by elements, to ranks 0 … n-1, n-1 … 0, and so
on; two versions of Megatron break ties in different orders.  Gradients are all-reduced; an owner steps its whole
parameters.

Rules read from Megatron-LM main d98e8a64, branch dev d48bd6be (``layer_wise_optimizer.py``, ``distrib_optimizer.py``,
``param_layout.py``, ``param_and_grad_buffer.py``) and megatron-core 0.19.2.  Where upstream computes in floating point,
so do we: the last bit can decide where a parameter goes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ...errors import LayoutError
from .buffer_layout import BufferLayout, PlacedParameter, Span, divided, end_to_end, owned, round_up
from .parameters import GroupSizes, Parameter, in_buckets, numel, reaching, split

_ALIGNMENT = 64

_FILL = 0.9
"""A bucket stays open until it fills this fraction of shards as large as its largest parameter."""

_SLACK = 1 + 0.3
"""Cost-balanced packing may fill a shard up to this many times the mean of its bucket."""

_PackedBucket = list[tuple[Parameter, int, int]]
"""The contents of one bucket: (parameter, shard, start in the shard)."""


def padded_numel(
    parameters: Iterable[Parameter], sizes: GroupSizes, bucket_size: int | None = None, busbw: bool = False
) -> tuple[BufferLayout, ...]:
    """Balance shards by elements (core 0.18 and 0.19, branch dev): largest parameter first, to the emptiest shard.

    Args:
        parameters: in forward order.
        bucket_size: elements at which a bucket closes (a soft minimum); None: one bucket.
        busbw: buckets end at multiples of 2¹⁶ elements too (``pad_buckets_for_high_nccl_busbw``).
    """

    def buffer(own: Sequence[Parameter], shards: int) -> BufferLayout:
        contents = in_buckets(reversed(own), lambda bucket: _is_full(bucket, shards, bucket_size))
        packed = (_by_numel(bucket, shards) for bucket in contents)
        return _assemble("padded-numel", own, shards, packed, bucket_size, busbw)

    return tuple(buffer(own, sizes.of(own[0])) for own in split(parameters))


def padded_nscost(
    parameters: Iterable[Parameter], sizes: GroupSizes, bucket_size: int | None = None, busbw: bool = False
) -> tuple[BufferLayout, ...]:
    """Balance shards by the cost of Newton-Schulz over the whole buffer (main since 2026-08-12).

    Arguments as for `padded_numel`.  A full bucket still takes parameters that fit into its padding.
    """

    def buffer(own: Sequence[Parameter], shards: int) -> BufferLayout:
        load = [0] * shards
        contents = _closed_when_grown(own, shards, bucket_size, _shard_divisor(shards, busbw))
        packed = (_by_cost(bucket, load) for bucket in contents if bucket)
        return _assemble("padded-nscost", own, shards, packed, bucket_size, busbw)

    return tuple(buffer(own, sizes.of(own[0])) for own in split(parameters))


def distributed_optimizer(
    parameters: Iterable[Parameter], sizes: GroupSizes, bucket_size: int | None = None, busbw: bool = False
) -> tuple[BufferLayout, ...]:
    """Place parameters that are not matrices end to end, cut anywhere (the byte-sharded optimizer).

    Arguments as for `padded_numel`; here a bucket closes after the parameter that fills it.
    """
    return tuple(_cut_anywhere(own, sizes.of(own[0]), bucket_size, busbw) for own in split(parameters))


def _matrix_cost(parameter: Parameter) -> int:
    """Estimate Newton-Schulz as Megatron does: ``long * short²`` for a matrix, else the number of elements."""
    if len(parameter.shape) != 2:
        return parameter.numel
    short, long = sorted((parameter.shape[0] * parameter.fold, parameter.shape[1]))
    return long * short * short


def _bucket_divisor(ranks: int, busbw: bool) -> int:
    return math.lcm(ranks, 128, 2**16 if busbw else 1)


def _shard_divisor(ranks: int, busbw: bool) -> int:
    return math.lcm(_ALIGNMENT, _bucket_divisor(ranks, busbw) // ranks)


def _is_full(bucket: list[Parameter], ranks: int, bucket_size: int | None) -> bool:
    if bucket_size is None or not bucket:
        return False
    return numel(bucket) >= max(bucket_size, int(ranks * max(p.numel for p in bucket) * _FILL))


def _closed_when_grown(
    parameters: Sequence[Parameter], ranks: int, bucket_size: int | None, divisor: int
) -> Iterator[list[Parameter]]:
    """Yield the contents of each bucket: a full one closes only before a parameter that would enlarge its shards.

    That is estimated by sending each parameter, in turn, to the emptiest shard.
    """
    bucket: list[Parameter] = []
    filled = [0] * ranks
    for parameter in reversed(parameters):
        if parameter.tied:
            yield from (bucket, [parameter])
            bucket, filled = [], [0] * ranks
            continue
        fits = round_up(min(filled), _ALIGNMENT) + parameter.numel <= round_up(max(filled), divisor)
        if not fits and _is_full(bucket, ranks, bucket_size):
            yield bucket
            bucket, filled = [], [0] * ranks
        _append(parameter, _emptiest(filled), filled)
        bucket.append(parameter)
    yield bucket


def _emptiest(filled: Sequence[int]) -> int:
    return filled.index(min(filled))


def _append(parameter: Parameter, shard: int, filled: list[int]) -> tuple[Parameter, int, int]:
    """Put a parameter at the end of a shard and update ``filled``, the end of each shard."""
    start = round_up(filled[shard], _ALIGNMENT)
    filled[shard] = start + parameter.numel
    return parameter, shard, start


def _by_numel(bucket: list[Parameter], ranks: int) -> _PackedBucket:
    filled = [0] * ranks
    return [_append(parameter, _emptiest(filled), filled) for parameter in sorted(bucket, key=lambda p: -p.numel)]


def _by_cost(bucket: list[Parameter], load: list[int]) -> _PackedBucket:
    """Pack by cost and add to ``load``, the cost of each shard so far.  A tied parameter costs nothing."""
    if bucket[0].tied:
        return [(bucket[0], 0, 0)]
    placed: _PackedBucket = []
    filled = [0] * len(load)
    most = sum(parameter.numel for parameter in bucket) / len(load) * _SLACK
    for parameter in sorted(bucket, key=lambda p: -_matrix_cost(p)):
        fitting = [s for s, stop in enumerate(filled) if round_up(stop, _ALIGNMENT) + parameter.numel <= most]
        shard = min(fitting, key=lambda s: load[s]) if fitting else _emptiest(filled)
        placed.append(_append(parameter, shard, filled))
        load[shard] += _matrix_cost(parameter)
    return placed


def _assemble(
    algorithm: str,
    parameters: Sequence[Parameter],
    ranks: int,
    packed: Iterable[_PackedBucket],
    bucket_size: int | None,
    busbw: bool,
) -> BufferLayout:
    """Put buckets one after the other, every shard of a bucket as large as its fullest."""
    ranges: dict[str, PlacedParameter] = {}
    buckets: list[Span] = []
    base = 0
    for placed in packed:
        size = round_up(max(start + p.numel for p, _, start in placed), _shard_divisor(ranks, busbw))
        number = len(buckets)
        ranges |= {p.name: PlacedParameter(p, base + shard * size + start, number) for p, shard, start in placed}
        buckets.append((base, base + ranks * size))
        base += ranks * size
    return BufferLayout(
        algorithm=algorithm,
        version=1,
        ranks=ranks,
        parameters=tuple(ranges[parameter.name] for parameter in parameters),
        buckets=tuple(buckets),
        shards=divided(buckets, ranks),
        alignment=_ALIGNMENT,
        whole=True,
        options={"bucket_size": bucket_size, "busbw": busbw},
    )


def _cut_anywhere(parameters: Sequence[Parameter], ranks: int, bucket_size: int | None, busbw: bool) -> BufferLayout:
    def full(bucket: list[Parameter]) -> bool:
        *before, last = (parameter.numel for parameter in bucket)
        return bucket_size is not None and sum(round_up(size, _ALIGNMENT) for size in before) + last >= bucket_size

    contents = in_buckets(reversed(parameters), full)
    ranges, buckets = end_to_end(contents, _ALIGNMENT, _bucket_divisor(ranks, busbw))
    return BufferLayout(
        algorithm="distributed-optimizer",
        version=1,
        ranks=ranks,
        parameters=tuple(ranges[parameter.name] for parameter in parameters),
        buckets=buckets,
        shards=divided(buckets, ranks),
        alignment=_ALIGNMENT,
        options={"bucket_size": bucket_size, "busbw": busbw},
    )


_CompactBuffer = tuple[tuple[PlacedParameter, ...], tuple[Span, ...]]
"""A buffer without owners yet: its parameters in forward order, and its buckets."""


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
        groups: names in each of the optimizer's parameter groups; None: dense parameters, then expert parameters, both
            in forward order.

    Raises:
        LayoutError: the groups do not name every parameter once.
    """
    listed = sorted(parameters, key=lambda p: p.expert)
    if groups is not None:
        order = {name: number for number, name in enumerate(name for group in groups for name in group)}
        if order.keys() != {p.name for p in listed} or len(order) != sum(map(len, groups)):
            raise LayoutError("the parameter groups do not name every parameter exactly once")
        listed.sort(key=lambda p: order[p.name])
    listed.sort(key=lambda p: p.numel)
    return _with_owners("legacy-pingpong", _compact(parameters, bucket_size), listed, sizes, bucket_size)


def decoupled_total_order(
    parameters: Iterable[Parameter], sizes: GroupSizes, bucket_size: int | None = None
) -> tuple[BufferLayout, ...]:
    """Place compactly with the owners of branch dev: by elements, equal parameters by model chunk, buffer and start.

    Arguments as for `legacy_pingpong`.
    """
    buffers = _compact(parameters, bucket_size)
    listed = sorted(
        (placed.parameter.numel, placed.parameter.chunk, number, placed.start, placed.parameter)
        for number, (ranges, _) in enumerate(buffers)
        for placed in ranges
    )
    return _with_owners("decoupled-total-order", buffers, [p for *_, p in listed], sizes, bucket_size)


def _compact(parameters: Iterable[Parameter], bucket_size: int | None) -> list[_CompactBuffer]:
    buffers: list[_CompactBuffer] = []
    for own in split(parameters):
        contents = in_buckets(reversed(own), reaching(bucket_size), alone=lambda parameter: False)
        ranges, buckets = end_to_end(contents)
        buffers.append((tuple(ranges[parameter.name] for parameter in own), buckets))
    return buffers


def _with_owners(
    algorithm: str,
    buffers: Iterable[_CompactBuffer],
    listed: Iterable[Parameter],
    sizes: GroupSizes,
    bucket_size: int | None,
) -> tuple[BufferLayout, ...]:
    """Deal the parameters in this order; dense and expert ranks each take their turns."""
    dealt: defaultdict[bool, int] = defaultdict(int)
    owners = {}
    for parameter in listed:
        ranks = sizes.of(parameter)
        turn = dealt[parameter.expert] % (2 * ranks)
        owners[parameter.name] = min(turn, 2 * ranks - 1 - turn)
        dealt[parameter.expert] += 1
    return tuple(
        BufferLayout(
            algorithm=algorithm,
            version=1,
            ranks=sizes.of(ranges[0].parameter),
            parameters=ranges,
            buckets=buckets,
            shards=owned(ranges, buckets[-1][1], owners),
            whole=True,
            options={"bucket_size": bucket_size},
        )
        for ranges, buckets in buffers
    )
