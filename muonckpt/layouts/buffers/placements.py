"""Every way to place a model's parameters in flat buffers so that matrices stay whole, by its public name.

The name is the same in training (``LayerWise(layout=...)``), on the command line (``--layout``), in
``layer_wise.toml``, and as ``algorithm`` in every record of a buffer; docs/design/buffers.md says how names were
chosen.  The algorithms are imported when they are used: a program that only lists names starts fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from .parameters import GroupSizes, Parameter

if TYPE_CHECKING:
    from .buffer_layout import BufferLayout


@dataclass(frozen=True, slots=True)
class ToPlace:
    """The parameters of a model, and the options of a training run that concern its buffers.

    Args:
        parameters: in forward order.
        matrices: names of the parameters that must have an owner, a rank that holds all of the parameter.
        groups: names in each parameter group of the optimizer, in its order; None if unknown.
        bucket_size: elements at which a bucket closes; None: one bucket.
        busbw: whether Megatron's ``pad_buckets_for_high_nccl_busbw`` was on.
        previous: owners by name, which `balanced` keeps where it can.
    """

    parameters: tuple[Parameter, ...]
    matrices: frozenset[str]
    sizes: GroupSizes
    groups: tuple[tuple[str, ...], ...] | None = None
    bucket_size: int | None = None
    busbw: bool = False
    previous: Mapping[str, int | None] | None = None

    @property
    def whole(self) -> list[Parameter]:
        return [parameter for parameter in self.parameters if parameter.name in self.matrices]

    @property
    def rest(self) -> list[Parameter]:
        return [parameter for parameter in self.parameters if parameter.name not in self.matrices]


@dataclass(frozen=True, slots=True)
class BufferPlacement:
    """One way to place parameters.

    Args:
        description: one line for help texts.
        place: makes the buffers; those of matrices record the placement's name as their ``algorithm``.
    """

    description: str
    place: Callable[[ToPlace], tuple[BufferLayout, ...]]


def _padded_nscost(model: ToPlace) -> tuple[BufferLayout, ...]:
    from .megatron import padded_nscost

    return *padded_nscost(model.whole, model.sizes, model.bucket_size, model.busbw), *_cut_evenly(model)


def _padded_numel(model: ToPlace) -> tuple[BufferLayout, ...]:
    from .megatron import padded_numel

    return *padded_numel(model.whole, model.sizes, model.bucket_size, model.busbw), *_cut_evenly(model)


def _decoupled_total_order(model: ToPlace) -> tuple[BufferLayout, ...]:
    from .megatron import decoupled_total_order

    return *decoupled_total_order(model.whole, model.sizes, model.bucket_size), *_cut_evenly(model)


def _legacy_pingpong(model: ToPlace) -> tuple[BufferLayout, ...]:
    from .megatron import legacy_pingpong

    return legacy_pingpong(model.parameters, model.sizes, model.bucket_size, model.groups)


def _balanced(model: ToPlace) -> tuple[BufferLayout, ...]:
    from .balanced import balanced

    return *balanced(model.whole, model.sizes, model.bucket_size, model.previous), *_cut_evenly(model)


def _cut_evenly(model: ToPlace) -> tuple[BufferLayout, ...]:
    """Place what is no matrix in equal shards that may end inside a parameter."""
    from .megatron import distributed_optimizer

    return distributed_optimizer(model.rest, model.sizes, model.bucket_size, model.busbw)


PLACEMENTS: Mapping[str, BufferPlacement] = MappingProxyType(
    {
        "padded-nscost": BufferPlacement("Megatron main: padded, owners by Newton-Schulz cost", _padded_nscost),
        "padded-numel": BufferPlacement("Megatron core 0.18, 0.19: padded, owners by elements", _padded_numel),
        "decoupled-total-order": BufferPlacement("Megatron dev: no padding, ping-pong owners", _decoupled_total_order),
        "legacy-pingpong": BufferPlacement("Megatron core 0.16 to 0.19: ping-pong owners of all", _legacy_pingpong),
        "balanced": BufferPlacement("ours: no padding, owners by Newton-Schulz cost", _balanced),
    }
)
"""By public name.  All but "legacy-pingpong" put the other parameters into buffers of their own, in equal shards."""
