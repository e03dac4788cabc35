"""The parameters that `LayerWise` trains, the flat buffers in which they lie, and the collectives on these."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...algebra.box import Box, flat_boxes
from ...algebra.layout import Fragment, dense
from ...layouts.buffers.buffer_layout import BufferLayout, PlacedParameter, rank_of
from ...layouts.buffers.parameters import GroupSizes, Parameter
from ...layouts.buffers.placements import PlacementRequest, place_parameters
from ...layouts.buffers.records import to_json
from ...names.errors import ArgumentError, LayoutError, did_you_mean, lost_ranks
from ...names.vocabulary import PLACEMENTS
from ...names.wording import listed
from ...ranks.release import in_flight
from ..ground.tensors import exact_dtype
from ..methods.matrix import is_matrix_method
from ..options import options_of, params_of
from ..step.agreement import Facts, plan_facts
from ..step.exchange import ALL_GATHER

SharingGroup = dist.ProcessGroup | None
"""The group of ranks that share a parameter; None for this process alone."""


@dataclass(frozen=True, slots=True)
class Members:
    """The parameters of some groups of a model, in its order.

    Attributes:
        named, name_of: parameters by name, and names by parameter.
        group_of: the process group that shares a parameter, by name.
        experts: names of experts' parameters.
        sizes: of the two process groups.
    """

    named: Mapping[str, Tensor]
    name_of: Mapping[Tensor, str]
    group_of: Mapping[str, SharingGroup]
    experts: frozenset[str]
    sizes: GroupSizes

    @classmethod
    def of(
        cls,
        model: nn.Module,
        groups: Sequence[Mapping[str, Any]],
        group: SharingGroup,
        experts: Iterable[Tensor],
        expert_group: SharingGroup,
    ) -> Members:
        """Return the model's parameters that are in ``groups``.

        Raises:
            ArgumentError: they are not all of the model's, or cannot be in flat buffers.
        """
        grouped = {*map(id, params_of(groups))}
        named = {name: param for name, param in model.named_parameters() if id(param) in grouped}
        if len(named) < len(grouped):
            raise ArgumentError(f"{len(grouped) - len(named)} parameters in the groups are not the model's")
        if ungrouped := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in grouped]:
            raise ArgumentError(f"parameters in no group, whose gradients would not be reduced: {listed(ungrouped)}")
        for name, param in named.items():
            _refuse_unfit(name, param)
        # Experts are shared by other ranks than all other parameters.
        name_of: dict[Tensor, str] = {param: name for name, param in named.items()}
        experts = list(experts)
        if strangers := [tuple(param.shape) for param in experts if param not in name_of]:
            raise ArgumentError(f"experts that are in no group: of shapes {strangers[:8]}")
        expert_names = frozenset(name_of[param] for param in experts)
        if expert_names and expert_group is None and dist.is_initialized():
            raise ArgumentError("experts need an expert_group: the ranks that hold the same ones")
        group_of = dict.fromkeys(named, group) | dict.fromkeys(expert_names, expert_group)
        return cls(
            named, name_of, group_of, experts=expert_names, sizes=GroupSizes(size_of(group), size_of(expert_group))
        )

    def placement_request(
        self, groups: Sequence[Mapping[str, Any]], bucket_size: int | None, previous: Mapping[str, int | None] | None
    ) -> PlacementRequest:
        """Return the input of a placement, given groups with all their options."""
        # Matrices get owners; placements keep them whole.
        group_names: list[tuple[str, ...]] = []
        matrices: set[str] = set()
        for group in groups:
            group_names.append(tuple(map(self.name_of.__getitem__, group["params"])))
            if is_matrix_method(group["algorithm"]):
                matrices |= {*group_names[-1]}
        parameters = []
        for name, param in self.named.items():
            dtype = str(param.dtype).removeprefix("torch.")
            parameters.append(Parameter(name, tuple(param.shape), dtype, expert=name in self.experts))
        return PlacementRequest(
            tuple(parameters),
            frozenset(matrices),
            self.sizes,
            groups=tuple(group_names),
            bucket_size=bucket_size,
            previous=previous,
        )

    def facts(self, groups: Sequence[Mapping[str, Any]], buffers: Sequence[BufferLayout]) -> Facts:
        """Return the facts that must be the same on all ranks, given groups with all their options."""
        parameters = {}
        for number, group in enumerate(groups):
            for param in group["params"]:
                fact = f"{tuple(param.shape)} {param.dtype}, in group {number}"
                parameters[f"parameter {self.name_of[param]}"] = fact
        # The buffers follow from placement, bucket size and previous owners, so comparing them compares all.
        digest = hashlib.blake2b(json.dumps([*map(to_json, buffers)]).encode(), digest_size=8).hexdigest()
        return {**parameters, **plan_facts(dict(enumerate(groups))), "the layout of buffers": digest}

    def group_of_buffer(self, buffer: BufferLayout) -> SharingGroup:
        return self.group_of[buffer.parameters[0].parameter.name]


def replace_params(groups: Iterable[Mapping[str, Any]], tensors: Mapping[Tensor, Tensor]) -> list[dict[str, Any]]:
    """Return parameter groups with other tensors in place of the parameters that have one."""
    replaced = []
    for group in groups:
        params = [tensors[param] for param in group["params"] if param in tensors]
        replaced.append({**options_of(group), "params": params})
    return replaced


def size_of(group: SharingGroup) -> int:
    return dist.get_world_size(group) if group is not None else 1


def _refuse_unfit(name: str, param: Tensor) -> None:
    """Raise ArgumentError for a parameter that cannot be in flat buffers."""
    description = f"parameter {name!r}, {param.dtype} of shape {tuple(param.shape)}"
    if type(param.data) is not Tensor:
        raise ArgumentError(
            f"{description}: a {type(param.data).__name__}; layer-wise buffers hold plain tensors, of data parallelism "
            "only. Muon steps DTensors"
        )
    if not param.is_floating_point() or param.dtype.itemsize < 2:
        raise ArgumentError(
            f"{description}: FP8 and FP4 parameters cannot be gathered; keep parameters in 16 bits or more"
        )
    if not param.requires_grad:
        raise ArgumentError(f"{description}: frozen; leave it out of the groups")
    if not param.ndim or not param.numel():
        raise ArgumentError(f"{description}: give it a dim and an element, as sharded data parallelism demands as well")
    if getattr(param, "_post_accumulate_grad_hooks", None):
        raise ArgumentError(
            f"{description}: its gradients go elsewhere already (FSDP, or another LayerWise, which has a close()); "
            "several optimizer instances for one model are not supported"
        )


def make_layouts(layout: str | Sequence[BufferLayout], request: PlacementRequest) -> tuple[BufferLayout, ...]:
    """Return the buffers of a model, as one of `PLACEMENTS` makes them, or as they were recorded if they fit."""
    if isinstance(layout, str):
        if layout not in PLACEMENTS:
            close = did_you_mean(layout, [*PLACEMENTS])
            raise ArgumentError(
                f"layout={layout!r}: expected one of {', '.join(PLACEMENTS)}, or recorded buffers{close}"
            )
        return place_parameters(layout, request)
    # Recorded buffers must have the same parameters, ranks and whole matrices.
    recorded: dict[Parameter, BufferLayout] = {}
    for buffer in layout:
        recorded |= {placed.parameter: buffer for placed in buffer.parameters}
    if differing := {*recorded} ^ {*request.parameters}:
        names = sorted({parameter.name for parameter in differing})
        raise LayoutError(f"the recorded buffers do not fit the model: {listed(names)}")
    for parameter, buffer in recorded.items():
        if buffer.ranks != request.sizes.of(parameter):
            raise LayoutError(f"recorded for {buffer.ranks} ranks, but {parameter.name!r} has {request.sizes}")
        if parameter.name in request.matrices and buffer.owners[parameter.name] is None:
            raise LayoutError(f"matrix {parameter.name!r} has no owner in the recorded buffers")
    return tuple(layout)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """This rank's part of a parameter once gradients are reduced.

    Attributes:
        boxes: of the parameter, in the order of memory; none if the rank holds nothing.
        weight, gradient: views of the buffers: flat, or of the parameter's shape if the rank holds all of it.
        master: the tensor to step: the weight itself, or a float32 copy of one of 16 bits.
    """

    boxes: tuple[Box, ...]
    weight: Tensor
    gradient: Tensor
    master: Tensor

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The boxes with their places in the master."""
        offsets = accumulate((box.numel for box in self.boxes), initial=0)
        return tuple(dense(box, 0, offset) for box, offset in zip(self.boxes, offsets, strict=False))

    @property
    def has_master(self) -> bool:
        """Whether the master is a tensor of its own."""
        return self.master is not self.weight

    def refresh_master(self) -> None:
        """Update the master where the weight was written since `publish`, as when a model is loaded."""
        if self.has_master:
            is_current = self.master.to(self.weight.dtype) == self.weight
            self.master.copy_(self.master.where(is_current, self.weight.to(self.master.dtype)))

    def publish(self) -> None:
        """Round the master to the weight."""
        if self.has_master:
            self.weight.copy_(self.master)


class FlatBuffer:
    """The memory of one `BufferLayout`, whose parameters become views of it.

    Args:
        params: by name; all of one dtype and device.
        group: the ranks of the layout.
        gradient_dtype: of the gradient buffer; None: the parameters'.
    """

    def __init__(
        self,
        layout: BufferLayout,
        params: Mapping[str, Tensor],
        group: SharingGroup,
        gradient_dtype: torch.dtype | None,
    ) -> None:
        self.layout, self.group = layout, group
        self.rank = dist.get_rank(group) if group is not None else 0
        example = params[layout.parameters[0].parameter.name]
        # Padding stays zero: it is never written, and collectives add up zeros.
        self.weights = torch.zeros(layout.numel, dtype=example.dtype, device=example.device)
        self.gradients = torch.zeros(layout.numel, dtype=gradient_dtype or example.dtype, device=example.device)
        self.gradient_of: dict[str, Tensor] = {}
        for placed in layout.parameters:
            weight = self.weights[placed.start : placed.stop].view(placed.parameter.shape)
            self.gradient_of[placed.name] = self.gradients[placed.start : placed.stop].view(placed.parameter.shape)
            weight.copy_(params[placed.name].detach())
            params[placed.name].data = weight
        if group is not None:
            dist.broadcast(self.weights, group=group, group_src=0)

    def part_of(self, placed: PlacedParameter) -> Part:
        """Return this rank's part of a parameter, with a new master."""
        # The shard of this rank that meets the parameter; at most one.
        start, stop = placed.start, placed.start
        for shard in self.layout.shards_of(placed):
            if rank_of(shard) == self.rank:
                if stop > start:
                    raise LayoutError(f"rank {self.rank} holds several ranges of {placed.name!r}")
                start, stop = max(placed.start, shard.start), min(placed.stop, shard.stop)
        shape = placed.parameter.shape if stop - start == placed.parameter.numel else (stop - start,)
        weight, gradient = (memory[start:stop].view(shape) for memory in (self.weights, self.gradients))
        boxes = flat_boxes(placed.parameter.shape, start - placed.start, stop - placed.start) if start < stop else ()
        return Part(boxes=tuple(boxes), weight=weight, gradient=gradient, master=weight.to(exact_dtype(weight)))


# torch 2.13 has a new name for it, and warns of the old one.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Bucket:
    """A part of a buffer that one reduction and one gather move.

    Args:
        exact: reduce unequal shards to their owners only, else by one all-reduce.

    Attributes:
        gradient_of: views of the gradients by parameter name.
        even: every rank holds an equal shard, in the order of ranks.
    """

    def __init__(self, buffer: FlatBuffer, number: int, exact: bool) -> None:
        layout = buffer.layout
        start, stop = layout.buckets[number]
        self.gradient_of: dict[str, Tensor] = {}
        for entry in layout.parameters:
            if entry.bucket == number:
                self.gradient_of[entry.name] = buffer.gradient_of[entry.name]
        self.even, self.group = layout.even, buffer.group
        self._rank, self._exact = buffer.rank, exact
        self._weights, self._gradients = buffer.weights[start:stop], buffer.gradients[start:stop]
        self._shards = [shard for shard in layout.shards if start <= shard.start < stop]
        self._start = start

    def _shard_views(self, memory: Tensor) -> list[tuple[int, Tensor]]:
        """Return each shard's rank in the group and its view of the weights or gradients."""
        start, shards = self._start, self._shards
        return [(rank_of(shard), memory[shard.start - start : shard.stop - start]) for shard in shards]

    def reduce(self) -> list[dist.Work]:
        """Begin to add up gradients in place; afterwards only the memory of each rank's shard is defined."""
        memory, group = self._gradients, self.group
        if group is None:
            return []
        # Equal shards by one reduce-scatter, others by one reduction each to their owners, or all by one all-reduce.
        shards = self._shard_views(memory)
        if self.even:
            return [REDUCE_SCATTER(shards[self._rank][1], memory, group=group, async_op=True)]
        if not self._exact:
            return [dist.all_reduce(memory, group=group, async_op=True)]
        return [dist.reduce(shard, group=group, group_dst=rank, async_op=True) for rank, shard in shards]

    def gather(self) -> list[dist.Work]:
        """Begin to gather the weights in place, on every rank."""
        memory, group = self._weights, self.group
        if group is None:
            return []
        shards = self._shard_views(memory)
        if self.even:
            return [ALL_GATHER(memory, in_flight(shards[self._rank][1]), group=group, async_op=True)]
        return [dist.broadcast(in_flight(shard), group=group, group_src=rank, async_op=True) for rank, shard in shards]


def fill_buffers(
    layouts: Sequence[BufferLayout], members: Members, gradient_dtype: torch.dtype | None, exact: bool
) -> tuple[dict[str, Part], list[Bucket]]:
    """Make buffers with rank 0's values; return this rank's parts by name, and buckets in the order of backward passes.

    Collective.  Moves the first bucket of each kind once, to connect the ranks (`exchange.connect`), while gradients
    are zeros and weights the same on all of them.
    """
    parts: dict[str, Part] = {}
    buckets: list[Bucket] = []
    for layout in layouts:
        buffer = FlatBuffer(
            layout, params=members.named, group=members.group_of_buffer(layout), gradient_dtype=gradient_dtype
        )
        parts |= {placed.name: buffer.part_of(placed) for placed in layout.parameters}
        buckets += [Bucket(buffer, number, exact) for number in range(len(layout.buckets))]
    # A bucket is full when the first of its parameters in the forward pass has its gradient.
    order = {name: number for number, name in enumerate(members.named)}
    buckets.sort(key=lambda bucket: min(map(order.__getitem__, bucket.gradient_of)), reverse=True)
    for bucket in {(bucket.group, bucket.even): bucket for bucket in reversed(buckets)}.values():
        _wait_for([*bucket.reduce(), *bucket.gather()])
    return parts, buckets


def _bucket_numbers(buckets: Sequence[Bucket]) -> dict[str, int]:
    """Return the number of each parameter's bucket, by its name."""
    numbers: dict[str, int] = {}
    for number, bucket in enumerate(buckets):
        numbers |= dict.fromkeys(bucket.gradient_of, number)
    return numbers


def _wait_for(works: Iterable[dist.Work]) -> None:
    for work in works:
        with lost_ranks():
            work.wait()


class Gradients:
    """Moves gradients from autograd to the buffers, and reduces each bucket once it is full.

    A bucket waits for those before it, full or not: ranks whose graphs differ must reduce in the same order.

    Args:
        params: by name; each in one bucket.
        buckets: in the order in which they are reduced.

    Attributes:
        arrived_names: names of the parameters that have got a gradient since the last `drop`.
    """

    def __init__(self, params: Mapping[str, Tensor], buckets: Sequence[Bucket]) -> None:
        self.arrived_names: set[str] = set()
        self._params = params
        self._buckets = tuple(buckets)
        self._number_of = _bucket_numbers(buckets)
        self._is_last_pass = True
        self._begin_step()
        self._handles: list[RemovableHandle] = []
        for name, param in params.items():
            hook = partial(self._collect, name)
            self._handles.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _begin_step(self) -> None:
        self._pending_names = [set(bucket.gradient_of) for bucket in self._buckets]
        self._num_reduced = 0
        self._works: list[dist.Work] = []

    @contextmanager
    def accumulate_only(self) -> Iterator[None]:
        """Keep backward passes inside from reducing."""
        was_last_pass, self._is_last_pass = self._is_last_pass, False
        try:
            yield
        finally:
            self._is_last_pass = was_last_pass

    def finish(self) -> None:
        """Reduce the remaining buckets, and wait for all."""
        while self._num_reduced < len(self._buckets):
            self._reduce_next()
        self._wait()

    def collect_written(self) -> None:
        """Collect gradients that code has written to parameters, where no backward pass has given one."""
        for name, param in self._params.items():
            if param.grad is None:
                continue
            if name in self.arrived_names:
                raise ArgumentError(
                    f"{name!r} has a gradient in param.grad, and another in its buffer, from a backward pass: only one "
                    "can count. Change gradients while they are made, with parameter.register_hook(function), or write "
                    "param.grad without a backward pass; zero_grad() drops both"
                )
            self._collect(name, param)

    def drop(self) -> None:
        """Drop all gradients, reduced, accumulated or written."""
        self._wait()
        for param in self._params.values():
            param.grad = None
        self.arrived_names.clear()
        self._begin_step()

    def close(self) -> None:
        """Leave gradients to autograd again."""
        self._wait()
        for handle in self._handles:
            handle.remove()

    def _collect(self, name: str, param: Tensor) -> None:
        """Move ``param.grad`` to its bucket, and reduce full buckets.  Collective in the last backward pass."""
        number = self._number_of[name]
        assert param.grad is not None
        if number < self._num_reduced:
            raise RuntimeError(
                f"a gradient of {name!r} after its bucket was reduced: run all backward passes of a step but the last "
                "under no_sync(), and call step() or zero_grad() before the next"
            )
        # Into the buffer, in place of the last step's or beside that of an earlier pass.
        target = self._buckets[number].gradient_of[name]
        if name in self.arrived_names:
            target.add_(param.grad)
        else:
            target.copy_(param.grad)
            self.arrived_names.add(name)
        param.grad = None
        # In the last pass it may have filled its bucket.
        if self._is_last_pass:
            self._pending_names[number].discard(name)
            while self._num_reduced < len(self._buckets) and not self._pending_names[self._num_reduced]:
                self._reduce_next()

    def _reduce_next(self) -> None:
        """Begin to reduce the next bucket, with zeros for gradients that have not arrived.  Collective."""
        bucket = self._buckets[self._num_reduced]
        for name in bucket.gradient_of.keys() - self.arrived_names:
            bucket.gradient_of[name].zero_()  # or the last step's
        self._works += bucket.reduce()
        self._num_reduced += 1

    def _wait(self) -> None:
        _wait_for(self._works)
        self._works = []


class Gathers:
    """Gathers the weights of buckets; `wait` for a bucket before its parameters are used."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(buckets)
        self._pending: dict[int, Sequence[dist.Work]] = {}

    def start(self) -> None:
        """Begin all gathers, those of the first layers first: these are last in the backward pass."""
        for number in reversed(range(len(self._buckets))):
            self._pending[number] = self._buckets[number].gather()

    def wait(self, numbers: Sequence[int] | None = None, *_: object) -> None:
        """Wait for some buckets, or for all; other arguments are those of hooks."""
        for number in list(self._pending) if numbers is None else numbers:
            _wait_for(self._pending.pop(number, ()))

    def hook(self, model: nn.Module, name_of: Mapping[Tensor, str]) -> list[RemovableHandle]:
        """Make modules wait for their own parameters before their forward, and the model for all before it is saved."""
        number_of = _bucket_numbers(self._buckets)
        # Children have hooks of their own.
        handles: list[RemovableHandle] = []
        for module in model.modules():
            params = [param for param in module.parameters(recurse=False) if param in name_of]
            numbers = [number_of[name_of[param]] for param in params]
            handles.append(module.register_forward_pre_hook(partial(self.wait, numbers)))
        handles.append(model.register_state_dict_pre_hook(partial(self.wait, None)))  # type: ignore[no-untyped-call]
        return handles
