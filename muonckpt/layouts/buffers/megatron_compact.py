"""Megatron's compact buffers: parameters end to end in backprop order, without padding, and ping-pong owners.

Parameters sorted by elements are dealt to ranks 0 … n-1, n-1 … 0, and so on; two versions of Megatron break ties in
different orders.  Gradients are all-reduced; an owner steps its whole parameters.

Rules read from Megatron-LM main d98e8a64 and branch dev d48bd6be (``param_and_grad_buffer.py``,
``layer_wise_optimizer.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ...errors import LayoutError
from .buffer_layout import BufferLayout
from .parameters import GroupSizes, Parameter, in_buckets, reaching, split
from .ranges import PlacedParameter, Span, end_to_end, owned

_CompactBuffer = tuple[tuple[PlacedParameter, ...], tuple[Span, ...]]
"""A buffer without owners yet: its parameters in forward order, and its buckets."""


def legacy_pingpong(
    parameters: Sequence[Parameter],
    sizes: GroupSizes,
    bucket_size: int | None = None,
    groups: Sequence[Sequence[str]] | None = None,
) -> tuple[BufferLayout, ...]:
    """Compact buffers with the owners of core 0.16 to 0.19: by elements, equal parameters in the order of ``groups``.

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
    """Compact buffers with the owners of branch dev: by elements, equal parameters by model chunk, buffer and start.

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
