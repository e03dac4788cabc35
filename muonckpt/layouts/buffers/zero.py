"""DeepSpeed's flat partitions of a parameter group: ZeRO 1 and 2 cut the group, ZeRO 3 each parameter.

Muon under ZeRO 1 and 2 is the exception.  Each rank keeps the momentum of every parameter that its partition touches,
whole, end to end, so that matrices at the ends of partitions lie on several ranks.

Source: ``stage_1_and_2.py`` and ``stage3.py`` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Sequence

from .buffer_layout import BufferLayout, PlacedParameter, bucket_shards, end_to_end, rank_of, round_up
from .parameters import Parameter

ALIGNMENT = 2
"""Each partition of ZeRO 1 and 2 has a multiple of so many elements."""


def partitioned_group(
    parameters: Sequence[Parameter], ranks: int, size: int | None = None, paddings: Sequence[int] = ()
) -> BufferLayout:
    """Lay the parameters of a group end to end and cut them evenly, as ZeRO 1 and 2 do.

    Args:
        size: elements of each partition; None: as few as fit.
        paddings: elements behind each parameter, if any.

    Raises:
        LayoutError: the partitions are too small.
    """
    placed, start = [], 0
    for number, parameter in enumerate(parameters):
        placed.append(PlacedParameter(parameter, start, 0))
        start = placed[-1].stop + (paddings[number] if paddings else 0)
    if size is None:
        size = round_up(placed[-1].stop, ALIGNMENT * ranks) // ranks
    buckets = ((0, size * ranks),)
    return BufferLayout("zero", 1, ranks, tuple(placed), buckets, bucket_shards(buckets, ranks))


def partitioned_parameters(parameters: Sequence[Parameter], ranks: int) -> BufferLayout:
    """Cut each parameter evenly, padded, and lay the parts of each rank end to end, as ZeRO 3 does."""
    placed, buckets = end_to_end([[parameter] for parameter in parameters], divisor=ranks)
    return BufferLayout("zero-3", 1, ranks, tuple(placed.values()), buckets, bucket_shards(buckets, ranks))


def touched_parameters(layout: BufferLayout) -> list[list[PlacedParameter]]:
    """Return for each rank the parameters of which it holds any, placed end to end as a rank's momentum is."""
    held: list[list[Parameter]] = [[] for _ in range(layout.ranks)]
    for placed in layout.parameters:
        for shard in layout.shards_of(placed):
            held[rank_of(shard)].append(placed.parameter)
    return [list(end_to_end([parameters])[0].values()) for parameters in held]


def part_numel(layout: BufferLayout) -> int:
    """Return the elements of each rank's part, padding included."""
    return layout.numel // layout.ranks
