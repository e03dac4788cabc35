"""The element-wise parts of a step by Triton kernels, in a few launches.

One pass over gradients and momenta writes updates to the wire or the stack, one pass applies results.  Where this rank
sends all elements of a parameter, its momentum accumulates the gradient on the way.  This file needs Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...algebra.plan import Copies
from ...names.vocabulary import ParamGroup
from ..ground.devices import upload_numbers
from ..planning.matrices import Spec
from ..planning.schedule import Schedule
from ..triton import updates
from ..triton.updates import Segments, TensorTable, addresses
from .boxes import Sizes, SlotCopies
from .elementwise import LocalTensors, params_by_first_stage


@dataclass(frozen=True, slots=True)
class LaunchKind:
    """The common properties of a launch's tensors.

    Attributes:
        momentum, gradient, weight: dtypes of the tensors.
        sent_dtype, returned_dtype: of updates and results on the wire.
        accumulate: whether the kernel that sends updates also adds gradients to the momenta.
    """

    momentum: torch.dtype
    gradient: torch.dtype
    weight: torch.dtype
    sent_dtype: torch.dtype
    returned_dtype: torch.dtype
    accumulate: bool


class KernelElementwise:
    """The `Elementwise` backend for NVIDIA GPUs.  An entry is a parameter and a shape, as rates depend on both.

    Args:
        specs: of the schedule's parameters.
        numels: elements of each parameter that rest on this rank.
    """

    def __init__(self, schedule: Schedule, specs: Sequence[Spec], numels: Sequence[int], device: torch.device) -> None:
        self._copies, self._specs, self._device = SlotCopies(schedule), specs, device
        entries = list(dict.fromkeys((unit.param, unit.rows_columns) for unit in schedule.units))
        number = {entry: index for index, entry in enumerate(entries)}
        self._params = [param for param, _ in entries]
        self._scales = [specs[param].scale(*shape) for param, shape in entries]
        self._entry = np.array([number[unit.param, unit.rows_columns] for unit in schedule.units], np.int64)
        # A kernel that sends all elements of a parameter can accumulate its gradient in the same pass.
        sent_elements = np.zeros(len(specs), np.int64)
        np.add.at(sent_elements, [unit.param for unit in schedule.units], self._copies.sent_elements())
        self._accumulated_by_kernels = {param for param, numel in enumerate(numels) if sent_elements[param] == numel}
        self._params_of_stages = params_by_first_stage(schedule, len(specs))
        # Launches are planned once for each list of kinds, tables sent to the device when they change.
        self._kinds: list[LaunchKind] = []
        self._numbers_of_kinds: dict[LaunchKind, int] = {}
        self._number_of_kind = np.empty(0, np.int64)
        self._segments: dict[Hashable, list[tuple[LaunchKind, Segments]]] = {}
        self._wire_segments: dict[Hashable, Segments | None] = {}
        self._tables: dict[Hashable, tuple[tuple[float, ...], Tensor]] = {}

    def begin(self, local: LocalTensors) -> None:
        # Launches serve as long as the dtypes are those of the step before.
        kinds = [self._launch_kind(local, param) for param in self._params]
        if kinds != self._kinds:
            self._kinds, self._segments, self._wire_segments = kinds, {}, {}
            self._numbers_of_kinds = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
            self._number_of_kind = np.array([self._numbers_of_kinds[kind] for kind in kinds], np.int64)

        # Tensors are found by address, 0 where the parameter takes no part.
        gradients: list[Tensor | None] = []
        momenta: list[Tensor | None] = []
        weights: list[Tensor | None] = []
        changed_tensors: list[Tensor] = []
        for param in self._params:
            gradient, momentum, weight = local.gradients[param], local.momenta[param], local.weights[param]
            gradients.append(gradient)
            momenta.append(None if gradient is None else momentum)
            weights.append(None if gradient is None else weight)
            if gradient is not None:
                changed_tensors += momentum, weight
        self._gradients = self._tensors("gradients", gradients, lambda kind: kind.gradient)
        self._momenta = self._tensors("momenta", momenta, lambda kind: kind.momentum)
        self._weights = self._tensors("weights", weights, lambda kind: kind.weight)
        # Kernels write behind torch's back: autograd must know that what it saved is no longer there.
        torch.autograd.graph.increment_version(changed_tensors)

        # Rates of each entry.
        groups = [local.groups[param] for param in self._params]
        momentum = self._group_option("momentum", groups)
        nesterov = self._group_option("nesterov", groups)
        self._averaging = torch.stack([1 - momentum, torch.where(nesterov > 0, momentum, 1.0)], dim=1).float()
        self._rates = updates.rate_table(
            lambda name: self._group_option(name, groups), self._numbers("scale", self._scales)
        )

    def send(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        # Kernels accumulate the other gradients, here or in `assemble`.
        numbers = [param for param in self._params_of_stages[stage] if param not in self._accumulated_by_kernels]
        local.accumulate(local.equal_momenta(numbers))
        self._send(("update", stage), lambda: self._copies.update_sends[stage], wire)

    def assemble(self, local: LocalTensors, stage: int, sizes: Sizes, wire: Tensor) -> Tensor:
        dtype = self._kinds[self._entry[next(iter(sizes))]].sent_dtype
        stack = torch.empty(sum(sizes.values()), dtype=dtype, device=self._device)
        copies = lambda: self._copies.local(stage, sizes, dtype.itemsize)  # noqa: E731
        self._send(("local", stage, *sizes), copies, stack.view(torch.uint8))
        receives = lambda: self._copies.update_receives(stage, sizes)  # noqa: E731
        self._carry(("receives", stage, *sizes), receives, stack, wire, back=True)
        return stack

    def release(self, local: LocalTensors, stage: int, sizes: Sizes, results: Tensor, wire: Tensor) -> None:
        sends = lambda: self._copies.result_sends(stage, sizes)  # noqa: E731
        self._carry(("sends", stage, *sizes), sends, results, wire, back=False)
        copies = lambda: self._copies.local(stage, sizes, results.element_size())  # noqa: E731
        self._apply(("local back", stage, *sizes), copies, results.view(torch.uint8))

    def apply(self, local: LocalTensors, stage: int, wire: Tensor) -> None:
        self._apply(("result", stage), lambda: self._copies.result_receives[stage], wire)

    def _send(self, key: Hashable, copies: Callable[[], Copies], buffer: Tensor) -> None:
        for kind, segments in self._planned_segments(key, copies, lambda kind: kind.sent_dtype):
            momenta, gradients = self._momenta[kind], self._gradients[kind]
            dtype, accumulate = kind.sent_dtype, kind.accumulate
            updates.send(segments, momenta, gradients, self._averaging, buffer, dtype, accumulate=accumulate)

    def _apply(self, key: Hashable, copies: Callable[[], Copies], buffer: Tensor) -> None:
        for kind, segments in self._planned_segments(key, copies, lambda kind: kind.returned_dtype):
            updates.apply(segments, self._weights[kind], self._rates, buffer, kind.returned_dtype)

    def _carry(self, key: Hashable, copies: Callable[[], Copies], stack: Tensor, wire: Tensor, *, back: bool) -> None:
        if key not in self._wire_segments:
            # The stack is the only tensor of the launch.
            table = copies()
            one_source = replace(table, source=np.zeros_like(table.source))
            segments = Segments.of(one_source, 1, stack.dtype, self._device) if len(table) else None
            self._wire_segments[key] = segments
        if (segments := self._wire_segments[key]) is not None:
            stack_table = TensorTable(upload_numbers((stack.data_ptr(),), torch.int64, self._device), stack.dtype)
            updates.carry(segments, stack_table, wire, back=back)

    def _planned_segments(
        self, key: Hashable, copies: Callable[[], Copies], dtype: Callable[[LaunchKind], torch.dtype]
    ) -> list[tuple[LaunchKind, Segments]]:
        """Return the launches of copies, one for each kind of tensors that has some."""
        if key not in self._segments:
            table = copies()
            table = replace(table, source=self._entry[table.source])
            row_kind = self._number_of_kind[table.source]
            self._segments[key] = []
            for kind, number in self._numbers_of_kinds.items():
                if (row_kind == number).any():
                    rows = table.rows(row_kind == number)
                    segments = Segments.of(rows, len(self._params), dtype(kind), self._device)
                    self._segments[key].append((kind, segments))
        return self._segments[key]

    def _launch_kind(self, local: LocalTensors, param: int) -> LaunchKind:
        weight, gradient, update = local.weights[param], local.gradients[param], self._specs[param].slots[0]
        # Kernels pass over a parameter without a gradient: any dtype does, and its weight's needs no other launch.
        gradient = weight if gradient is None else gradient
        return LaunchKind(
            momentum=local.momenta[param].dtype,
            gradient=gradient.dtype,
            weight=weight.dtype,
            sent_dtype=update.sent_dtype,
            returned_dtype=update.returned_dtype,
            accumulate=param in self._accumulated_by_kernels,
        )

    def _tensors(
        self, name: str, tensors: Sequence[Tensor | None], dtype: Callable[[LaunchKind], torch.dtype]
    ) -> dict[LaunchKind, TensorTable]:
        """Return a table of the entries' tensors for each kind of launch, without those of other kinds."""
        lists: dict[LaunchKind, list[Tensor | None]] = {}
        for kind in self._numbers_of_kinds:
            lists[kind] = [None] * len(tensors)
        for number, (kind, tensor) in enumerate(zip(self._kinds, tensors, strict=True)):
            lists[kind][number] = tensor
        tables = {}
        for kind, tensors_of_kind in lists.items():
            table = self._table((name, kind), addresses(tensors_of_kind, self._device), torch.int64)
            tables[kind] = TensorTable(table, dtype(kind))
        return tables

    def _group_option(self, name: str, groups: Sequence[ParamGroup]) -> Tensor:
        """Return an option of each entry's group as a number, 0 for methods that have no such option."""
        return self._numbers(name, [group.get(name, 0.0) for group in groups])

    def _numbers(self, name: str, values: Sequence[float | Tensor]) -> Tensor:
        """Return a number for each entry, fp64."""
        return self._table(name, tuple(map(float, values)), torch.float64)

    def _table(self, name: Hashable, values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        """Return numbers on the device, sent when they change."""
        cached = self._tables.get(name)
        if cached is None or cached[0] != values:
            cached = self._tables[name] = values, upload_numbers(values, dtype, self._device)
        return cached[1]
