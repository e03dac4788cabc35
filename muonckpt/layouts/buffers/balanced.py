"""Our own buffers: owners balanced over all buffers, almost no padding, and few elements moved when something changes.

Megatron pads because its shards must be equal: a bucket takes at least ``ranks * largest parameter``.  Here a bucket
takes what its parameters take, each rank's side by side, and shards may be unequal.  So buckets do not restrict
owners: one assignment balances all buckets of all buffers, dense and expert together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from .buffer_layout import BufferLayout, end_to_end, owned
from .parameters import GroupSizes, Parameter, in_buckets, newton_schulz, reaching, split

ALIGNMENT = 64
"""Every parameter begins at a multiple of this many elements, in the buffer and at its owner."""

TOLERANCE = 1.02
"""The busiest rank may work so many times as long as with a fresh assignment if parameters then keep their owners."""


def balanced(
    parameters: Sequence[Parameter],
    sizes: GroupSizes,
    bucket_size: int | None = None,
    previous: Mapping[str, int | None] | None = None,
) -> tuple[BufferLayout, ...]:
    """Place parameters in buffers whose shards are unequal, with owners from `balanced_owners`.

    Args:
        parameters: in forward order.
        bucket_size: elements; a bucket closes after the parameter that fills it, in backprop order; None: one bucket.
            Owners do not depend on it.
        previous: as for `balanced_owners`.
    """
    owners = balanced_owners(parameters, sizes, previous)
    return tuple(_buffer(own, sizes.of(own[0]), bucket_size, owners) for own in split(parameters))


def balanced_owners(
    parameters: Sequence[Parameter],
    sizes: GroupSizes,
    previous: Mapping[str, int | None] | None = None,
) -> dict[str, int]:
    """Choose the owner of each parameter by name, a rank of its own data-parallel group.

    Longest processing time first (Graham 1969), over dense and expert parameters at once.  Among equally loaded ranks:
    the one that still waits for the least of what it owned before, then the one with the fewest elements, then the
    first.

    Expert rank ``e`` is assumed to be the dense ranks from ``e * dense / expert`` to ``(e + 1) * dense / expert``, as
    where expert parallelism is the innermost axis.  Elsewhere only the balance suffers.

    Args:
        previous: owners by name.  A parameter stays with its own, if that is still a rank, unless that rank would then
            work longer than `TOLERANCE` times the busiest of a fresh assignment.

    Tied parameters belong to rank 0 whatever their cost, so that the pipeline stages that share them agree.
    """
    tied = {parameter.name: 0 for parameter in parameters if parameter.tied}
    fresh, busiest = _longest_first(parameters, sizes, tied, 0)
    if previous is None:
        return fresh
    return _longest_first(parameters, sizes, {**previous, **tied}, int(busiest * TOLERANCE))[0]


def _longest_first(
    parameters: Sequence[Parameter], sizes: GroupSizes, homes: Mapping[str, int | None], limit: int
) -> tuple[dict[str, int], int]:
    """Return owners by name, each at its home while that rank's load stays within ``limit``; and the greatest load.

    Loads are kept per *seat*: dense and expert ranks alike are equal groups of neighbouring seats.
    """
    seats = math.lcm(*(sizes.of(parameter) for parameter in parameters))
    cost = {parameter.name: newton_schulz(parameter) for parameter in parameters}
    load, held, awaited = np.zeros((3, seats), np.int64)
    for p in parameters:
        if (home := homes.get(p.name)) is not None and home < sizes.of(p):
            awaited.reshape(sizes.of(p), -1)[home] += cost[p.name]
    owners: dict[str, int] = {}
    for p in sorted(parameters, key=lambda p: (-cost[p.name], -p.numel)):
        loads, elements, waiting = (seat.reshape(sizes.of(p), -1) for seat in (load, held, awaited))
        owner = int(np.lexsort((elements.max(1), waiting.max(1), loads.max(1)))[0])
        if (home := homes.get(p.name)) is not None and home < len(loads):
            waiting[home] -= cost[p.name]
            if p.tied or loads[home].max() + cost[p.name] <= limit:
                owner = home
        loads[owner] += cost[p.name]
        elements[owner] += p.numel
        owners[p.name] = owner
    return owners, int(load.max())


def _buffer(
    parameters: Sequence[Parameter], ranks: int, bucket_size: int | None, owners: Mapping[str, int]
) -> BufferLayout:
    contents = in_buckets(reversed(parameters), reaching(bucket_size))
    by_owner = (sorted(bucket, key=lambda parameter: owners[parameter.name]) for bucket in contents)
    ranges, buckets = end_to_end(by_owner, ALIGNMENT, ALIGNMENT)
    return BufferLayout(
        algorithm="balanced",
        version=1,
        ranks=ranks,
        parameters=tuple(ranges[parameter.name] for parameter in parameters),
        buckets=buckets,
        shards=owned(ranges.values(), buckets[-1][1], owners),
        alignment=ALIGNMENT,
        whole=True,
        options={"bucket_size": bucket_size},
    )
