"""Megatron's compact buffers: parameters end to end in backprop order, and the ping-pong owners that go with them.

Rules read from Megatron-LM main d98e8a64 and branch dev d48bd6be (``param_and_grad_buffer.py``,
``layer_wise_optimizer.py``).  Gradients are all-reduced; an owner steps its whole parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ...errors import LayoutError
from .layout import BufferLayout
from .parameters import Parameter, Ranks, in_buckets, reaching, split
from .ranges import end_to_end, owned, replicated


def compact(parameters: Iterable[Parameter], ranks: Ranks, bucket_size: int | None = None) -> tuple[BufferLayout, ...]:
    """Buffers without padding, which every rank holds in full.

    Args:
        parameters: in forward order.
        bucket_size: elements; a bucket closes after the parameter that fills it; None: one bucket.
    """
    return tuple(_compact(own, ranks.of(own[0]), bucket_size) for own in split(parameters))


def pingpong_legacy(
    parameters: Sequence[Parameter],
    ranks: Ranks,
    bucket_size: int | None = None,
    groups: Sequence[Sequence[str]] | None = None,
) -> tuple[BufferLayout, ...]:
    """Compact buffers with the owners of main, 0.16 to 0.19: by elements, equal ones in the order of ``groups``.

    Args:
        groups: names in each of the optimizer's parameter groups; None: dense parameters, then those of experts, each
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
    buffers = compact(parameters, ranks, bucket_size)
    return _with_owners("legacy-pingpong", buffers, sorted(listed, key=lambda p: p.numel), ranks)


def pingpong_total_order(
    parameters: Iterable[Parameter], ranks: Ranks, bucket_size: int | None = None
) -> tuple[BufferLayout, ...]:
    """Compact buffers with the owners of branch dev: by elements, equal ones by model chunk, buffer and start.

    Arguments as for `compact`.
    """
    buffers = compact(parameters, ranks, bucket_size)
    listed = sorted(
        (slot.parameter.numel, slot.parameter.chunk, number, slot.start, slot.parameter)
        for number, buffer in enumerate(buffers)
        for slot in buffer.slots
    )
    return _with_owners("decoupled-total-order", buffers, [parameter for *_, parameter in listed], ranks)


def _compact(parameters: Sequence[Parameter], ranks: int, bucket_size: int | None) -> BufferLayout:
    chunks = in_buckets(reversed(parameters), reaching(bucket_size), alone=lambda parameter: False)
    slots, buckets = end_to_end(chunks)
    return BufferLayout(
        algorithm="compact",
        version=1,
        ranks=ranks,
        slots=tuple(slots[parameter.name] for parameter in parameters),
        buckets=buckets,
        shards=replicated(buckets, ranks),
        whole=True,
        options={"bucket_size": bucket_size},
    )


def _with_owners(
    algorithm: str, buffers: Sequence[BufferLayout], listed: Iterable[Parameter], ranks: Ranks
) -> tuple[BufferLayout, ...]:
    """Deal the parameters to ranks 0 … n-1, n-1 … 0, again and again; dense and expert ranks each in their turn."""
    dealt: defaultdict[bool, int] = defaultdict(int)
    owners = {}
    for parameter in listed:
        size = ranks.of(parameter)
        turn = dealt[parameter.expert] % (2 * size)
        owners[parameter.name] = min(turn, 2 * size - 1 - turn)
        dealt[parameter.expert] += 1
    return tuple(
        replace(buffer, algorithm=algorithm, shards=owned(buffer.slots, buffer.numel, owners)) for buffer in buffers
    )
