"""The input of the placement rules: a model's parameters in forward order, and the sizes of its process groups."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from ...algebra.box import MAX_DIMS, MAX_ELEMENTS, Index
from ...names.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter on a rank before data parallelism cuts it.

    Args:
        shape: after tensor and expert parallelism.
        dtype: keeps parameters in buffers of their own; any name, such as ``"bfloat16"`` or ``"uint8/float32"``.
        expert: reduced over the ranks of the expert data-parallel group, in a buffer of its own.
        tied: shared by the first and the last pipeline stage (Megatron's ``shared_embedding``), so in its own bucket.
        chunk: number of the model chunk (virtual pipeline stage).
        unit: number of the FSDP unit; None outside of units.
        fold: how often the rows are repeated before the matrix is whole (Megatron's ``gtp_remat_size``).

    Raises:
        LayoutError: the parameter has no elements, or more than any tensor.
    """

    name: str
    shape: Index
    dtype: str = "bfloat16"
    expert: bool = False
    tied: bool = False
    chunk: int = 0
    unit: int | None = None
    fold: int = 1

    def __post_init__(self) -> None:
        if min(self.shape, default=1) < 1 or self.fold < 1:
            raise LayoutError(f"parameter {self.name!r} of shape {self.shape} has no elements: leave it out")
        if len(self.shape) > MAX_DIMS or self.numel > MAX_ELEMENTS:
            raise LayoutError(f"parameter {self.name!r} has more than {MAX_DIMS} dims or {MAX_ELEMENTS} elements")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def newton_schulz(parameter: Parameter) -> int:
    """Return the FLOPs of one iteration, ``4 s² l + 2 s³`` for a matrix of sides s <= l; of a vector its elements."""
    if len(parameter.shape) < 2:
        return parameter.numel
    *stack, rows, columns = parameter.shape
    short, long = sorted((rows * parameter.fold, columns))
    return math.prod(stack) * (4 * short * short * long + 2 * short**3)


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """Sizes of the data-parallel groups of dense and of expert parameters, context parallelism included.

    Raises:
        LayoutError: a group without ranks.
    """

    dense: int
    expert: int = 1

    def __post_init__(self) -> None:
        if min(self.dense, self.expert) < 1:
            raise LayoutError(f"a data-parallel group needs ranks: {self}")

    def of(self, parameter: Parameter) -> int:
        """Return the size of the group over which the parameter, and so its whole buffer, is reduced."""
        return self.expert if parameter.expert else self.dense


def split(parameters: Iterable[Parameter]) -> tuple[tuple[Parameter, ...], ...]:
    """Split parameters into buffers, in forward order: one for each model chunk, expert group and data type.

    In Megatron's order (``group_params_for_buffers``): by chunk, dense before experts, then by first appearance.

    Raises:
        LayoutError: two parameters of one name.
    """
    buffers: defaultdict[tuple[int, bool, str], list[Parameter]] = defaultdict(list)
    for parameter in parameters:
        buffers[parameter.chunk, parameter.expert, parameter.dtype].append(parameter)
    # Names are keys of everything that follows.
    counts = Counter(parameter.name for parameter in chain.from_iterable(buffers.values()))
    if repeated := sorted(name for name, count in counts.items() if count > 1):
        raise LayoutError(f"expected a name of its own for every parameter, found more than once: {repeated}")
    return tuple(tuple(buffers[key]) for key in sorted(buffers, key=lambda key: key[:2]))


def in_buckets(
    parameters: Iterable[Parameter],
    is_full: Callable[[list[Parameter]], bool],
    is_alone: Callable[[Parameter], bool] = attrgetter("tied"),
) -> Iterator[list[Parameter]]:
    """Yield the contents of each bucket, never empty, in the order of the parameters.

    A bucket closes after the parameter that makes it full; a parameter that has to be alone gets a bucket of its own.
    """
    bucket: list[Parameter] = []
    for parameter in parameters:
        if bucket and is_alone(parameter):
            yield bucket
            bucket = []
        bucket.append(parameter)
        if is_alone(parameter) or is_full(bucket):
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def closes_at(size: int | None) -> Callable[[list[Parameter]], bool]:
    """Return a test that a bucket has at least ``size`` elements; None: never."""
    return lambda bucket: size is not None and numel(bucket) >= size


def numel(parameters: Iterable[Parameter]) -> int:
    return sum(parameter.numel for parameter in parameters)
