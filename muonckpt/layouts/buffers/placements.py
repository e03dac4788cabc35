"""The ways to place a model's parameters in flat buffers so that matrices stay whole: `vocabulary.PLACEMENTS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from . import algorithms
from .buffer_layout import BufferLayout
from .parameters import GroupSizes, Parameter


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The parameters of a model, and the options of a training run that concern its buffers.

    Args:
        parameters: in forward order.
        matrices: names of the parameters that must stay whole on one rank, their owner.
        groups: names in each parameter group of the optimizer, in its order; None if unknown.
        bucket_size: elements at which a bucket closes; None: one bucket.
        busbw: Megatron's ``pad_buckets_for_high_nccl_busbw`` was on.
        previous: owners by name, which ``balanced`` keeps where it can.
    """

    parameters: tuple[Parameter, ...]
    matrices: frozenset[str]
    sizes: GroupSizes
    groups: tuple[tuple[str, ...], ...] | None = None
    bucket_size: int | None = None
    busbw: bool = False
    previous: Mapping[str, int | None] | None = None


def place_parameters(name: str, request: PlacementRequest) -> tuple[BufferLayout, ...]:
    """Make the buffers of a placement; those of matrices record its name as their ``algorithm``."""
    sizes, bucket_size = request.sizes, request.bucket_size
    matrices = [parameter for parameter in request.parameters if parameter.name in request.matrices]
    match name:
        case "padded-nscost":
            buffers = algorithms.padded_nscost(matrices, sizes, bucket_size, request.busbw)
        case "padded-numel":
            buffers = algorithms.padded_numel(matrices, sizes, bucket_size, request.busbw)
        case "decoupled-total-order":
            buffers = algorithms.decoupled_total_order(matrices, sizes, bucket_size)
        case "balanced":
            buffers = algorithms.balanced(matrices, sizes, bucket_size, request.previous)
        case _:
            return algorithms.legacy_pingpong(request.parameters, sizes, bucket_size, request.groups)
    # Parameters that are no matrices may be cut anywhere.
    others = [parameter for parameter in request.parameters if parameter.name not in request.matrices]
    return buffers + algorithms.distributed_optimizer(others, sizes, bucket_size, request.busbw)
