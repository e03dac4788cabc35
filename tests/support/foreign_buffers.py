"""Flat buffers that we read and never make: compact ones without owners, and those of Megatron-FSDP.

Of the latter version 1 (Megatron-LM's training) and version 2 (its experimental ``DBuffer``); rules read from
Megatron-LM main d98e8a64 (``megatron_fsdp/param_and_grad_buffer.py``, ``experimental/layout.py``).  Every buffer is one
bucket, padded to equal shards.  All placement happens on a grid of ``factor`` elements, so that no shard ends inside a
row; version 1 does not keep to that for small parameters (`cut_rows` names them).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from muonckpt import LayoutError
from muonckpt.layouts.buffers.algorithms import decoupled_total_order
from muonckpt.layouts.buffers.buffer_layout import (
    BufferLayout,
    PlacedParameter,
    Span,
    bucket_shards,
    consecutive_shards,
    round_up,
)
from muonckpt.layouts.buffers.parameters import GroupSizes, Parameter, closes_at, in_buckets
from muonckpt.layouts.flat import Cuts, FlatShard

BUCKET = 40_000_000
"""Elements at which version 1 closes a buffer of parameters that are in no FSDP unit."""


def compact(
    parameters: Iterable[Parameter], sizes: GroupSizes, bucket_size: int | None = None
) -> tuple[BufferLayout, ...]:
    """Megatron's compact buffers as gradients are reduced in them: every rank holds all."""
    layouts = []
    for layout in decoupled_total_order(parameters, sizes, bucket_size):
        layouts.append(replace(layout, algorithm="compact", shards=replicated(layout.buckets, layout.ranks)))
    return tuple(layouts)


def replicated(buckets: Iterable[Span], ranks: int) -> tuple[FlatShard, ...]:
    """Every rank holds every bucket."""
    return consecutive_shards((start, stop, rank) for start, stop in buckets for rank in range(ranks))


def fsdp_v1(
    parameters: Iterable[Parameter], ranks: GroupSizes, bucket_size: int | None = BUCKET
) -> tuple[BufferLayout, ...]:
    """The buffers of version 1: one per FSDP unit, data type and expert group; long ones of no unit are split.

    Args:
        parameters: in forward order, trainable ones only (the others have buffers of their own).
        bucket_size: elements at which a buffer outside the units closes; None or 0: never.
    """
    return tuple(_v1(group, ranks.of(group[0]), bucket_size) for group in _v1_groups(parameters, bucket_size))


def fsdp_v2(parameters: Iterable[Parameter], cuts: Cuts) -> tuple[BufferLayout, ...]:
    """The buffers of version 2: one per data type of one FSDP root.

    Args:
        parameters: of the root, in its order.
        cuts: the mesh, and which axes are flat.  Upstream those are its last axes, the very last one coarsest, and
            the buffer is padded for all axes.  The layout numbers ranks by their position on the mesh, row-major.

    Raises:
        LayoutError: a scalar, which has no rows.
    """
    groups: defaultdict[str, list[Parameter]] = defaultdict(list)
    for parameter in parameters:
        if not parameter.shape:
            raise LayoutError(f"parameter {parameter.name!r} is a scalar, which has no rows")
        groups[parameter.dtype].append(parameter)
    return tuple(_v2(group, cuts) for group in groups.values())


def cut_rows(layout: BufferLayout) -> tuple[str, ...]:
    """Names of the parameters that a shard ends in the middle of a row of; version 1 makes such buffers, and fails."""
    return tuple(
        entry.name
        for entry in layout.parameters
        for shard in layout.shards_of(entry)
        if shard.stop < entry.stop and (shard.stop - entry.start) % row(entry.parameter)
    )


def row(parameter: Parameter) -> int:
    """Elements of one row, which is all but the first dim; 1 for vectors and scalars."""
    return math.prod(parameter.shape[1:])


def _v1_groups(parameters: Iterable[Parameter], bucket_size: int | None) -> Iterator[list[Parameter]]:
    groups: defaultdict[tuple[str, bool, int | None], list[Parameter]] = defaultdict(list)
    for parameter in parameters:
        groups[parameter.dtype, parameter.expert, parameter.unit].append(parameter)
    for (_, _, unit), group in groups.items():
        yield from in_buckets(group, closes_at((bucket_size or None) if unit is None else None))


def _v1(group: Sequence[Parameter], ranks: int, bucket_size: int | None) -> BufferLayout:
    widest_first = sorted(group, key=lambda p: -row(p))
    factor = row(widest_first[0])
    for p in widest_first:
        on_grid = row(p) == factor or (factor % row(p) == 0 and p.numel % factor == 0) or p.numel < factor
        factor = factor if on_grid else math.lcm(factor, row(p))
    small = [p for p in widest_first if p.numel < factor]
    starts, stop = _place([p for p in widest_first if p.numel >= factor], small, factor, align=lambda p: 1)
    size = round_up(stop, ranks * factor)
    return BufferLayout(
        algorithm="megatron-fsdp-v1",
        version=1,
        ranks=ranks,
        parameters=tuple(PlacedParameter(p, starts[p.name], 0) for p in group),
        buckets=((0, size),),
        shards=bucket_shards([(0, size)], ranks),
        options={"bucket_size": bucket_size, "factor": factor},
    )


def _v2(group: Sequence[Parameter], cuts: Cuts) -> BufferLayout:
    factor = math.lcm(*(row(p) for p in group))
    small = sorted((p for p in group if p.numel < factor), key=lambda p: -p.numel)
    starts, stop = _place([p for p in group if p.numel >= factor], small, factor, align=lambda p: row(p))
    size = round_up(stop, len(cuts.mesh.ranks) * factor)
    part = size // cuts.shards
    shards_of_ranks = enumerate(cuts.shard(coordinate) for coordinate in product(*map(range, cuts.mesh.shape)))
    return BufferLayout(
        algorithm="megatron-fsdp-v2",
        version=1,
        ranks=len(cuts.mesh.ranks),
        parameters=tuple(PlacedParameter(p, starts[p.name], 0) for p in group),
        buckets=((0, size),),
        shards=tuple(
            FlatShard(rank, number * part, (number + 1) * part)
            for rank, number in sorted(shards_of_ranks, key=lambda pair: pair[1])
        ),
        options={"factor": factor},
    )


def _place(
    large: Sequence[Parameter], small: Sequence[Parameter], factor: int, align: Callable[[Parameter], int]
) -> tuple[dict[str, int], int]:
    """Starts by name, and where the last parameter ends.

    ``large`` parameters begin or end on the grid: two whose remainders fit into one cell share it, one ending and one
    beginning there.  What is left of such a cell is filled with ``small`` ones, each at a multiple of ``align``, and
    the rest of those follows at the end.
    """
    starts: dict[str, int] = {}
    large, small = list(large), list(small)
    end = 0
    while large:
        first = large.pop(0)
        starts[first.name] = end
        remainder = first.numel % factor
        at = end + first.numel
        end = gap = round_up(at, factor)
        if not remainder:
            continue
        for other_member in large:
            if other_member.numel % factor and remainder + other_member.numel % factor <= factor:
                large.remove(other_member)
                gap = starts[other_member.name] = end - other_member.numel % factor
                end = gap + other_member.numel
                break
        for parameter in list(small):
            start = round_up(at, align(parameter))
            if start + parameter.numel <= gap:
                small.remove(parameter)
                starts[parameter.name] = start
                at = start + parameter.numel
    for parameter in small:
        starts[parameter.name] = end = round_up(end, align(parameter))
        end += parameter.numel
    return starts, end
