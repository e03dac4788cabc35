"""A step of matrices: momentum, exchange, orthogonalise in batches, exchange back, apply.

Stages overlap: while the matrices of one are orthogonalised, the next one's updates are on their way to their owners
and the previous one's results on their way back, so at most two are in memory.

Every part of an exchange begins with a note, a digest of what its sender is about to do.  All ranks compare the notes,
so that they go on or raise together.

A `Batch` is orthogonalised together, a `Step` is for one set of ranks, and `Steps` updates those of all sets in order.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from ...algebra.grouping import batches
from ...names.coefficients import coefficient_set
from ...names.vocabulary import ParamGroup
from ..ground.devices import is_asynchronous
from ..ground.tensors import Places, RowsColumns, align_matrices
from ..methods.form import MatrixMethod, WholeMatrix
from ..newton_schulz.iterations import orthogonalize_all
from ..newton_schulz.products import Form
from ..newton_schulz.recipe import Recipe
from ..planning.matrices import WEIGHT, Spec, Unit
from ..planning.schedule import Ranks, Schedule
from .agreement import AGREE_ON_STEP, NO_INTENT, PLAN_FACT, AgreedError, Facts, Intent
from .elementwise import Elementwise, LocalTensors
from .exchange import Arrival, Notes, StepExchange, Wire
from .matrix_state import MatrixState
from .rank_sets import RankSet, State, rank_sets, refuse_ended_groups

MAX_BATCH_ELEMENTS = 1 << 25
"""Elements of a batch by kernels: two matrices of 4096 x 4096, which is more than a GPU does at a time."""

MAX_STACK_ELEMENTS = 1 << 18
"""The same by torch's products, 1 MiB there and back in 16 bits; `products.CACHED_ELEMENTS` is how many they multiply
at a time."""

MIN_TILES = 64
"""Tiles of 128 x 128 that keep a large GPU busy: half of its multiprocessors, as tiles can be smaller."""

STAGES_IN_FLIGHT = 2
"""Stages whose updates are under way when the first notes are read."""


Kind = tuple[Form, str, Recipe | None]
"""The common properties of a batch's matrices besides their shapes: form, name of the method, recipe."""


@dataclass(frozen=True)
class Batch:
    """Matrices that are orthogonalised by one call, with the numbers of their units.

    Attributes:
        recipe: None: the method takes them as they are.
        stack_sizes: how many of them at a time the method updates, in their order.

    Raises:
        ValueError: no unit, or not as many as there are places.
    """

    units: tuple[int, ...]
    places: Places
    form: Form
    method: MatrixMethod
    recipe: Recipe | None
    stack_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.units or len(self.units) != len(self.places):
            raise ValueError(f"a batch of {len(self.units)} matrices, with {len(self.places)} places")

    @cached_property
    def sizes(self) -> dict[int, int]:
        """The number of elements of each unit, in their order."""
        return {number: rows * columns for number, (rows, columns) in zip(self.units, self.places, strict=True)}

    def orthogonalized(self, memory: Tensor) -> Tensor:
        """Return the matrices of ``[places.numel]`` as the method takes them."""
        if self.recipe is None:
            return memory
        matrices = memory if self.method.before is None else self.method.before(memory)
        return orthogonalize_all(matrices, self.places, self.recipe, self.form)


def fills_gpu(rows: int, columns: int, copies: int) -> bool:
    """Return whether the Gram matrices of so many matrices have `MIN_TILES` tiles: one has from 1281² on."""
    side = -(-min(rows, columns) // 128)
    return copies * side * (side + 1) // 2 >= MIN_TILES


def make_batches(
    units: Sequence[Unit],
    numbers: Iterable[int],
    group_of: Callable[[int], ParamGroup],
    method_of: Callable[[int], MatrixMethod],
    state_kind_of: Callable[[int], Hashable] = lambda param: None,
) -> list[Batch]:
    """Return units, by number, in batches.

    Kernels take up to `MAX_BATCH_ELEMENTS` at a time: matrices of one shape if these fill a GPU, else all that do not
    together, tall ones apart.  torch's products take up to `MAX_STACK_ELEMENTS`, of matrices of one shape.

    Args:
        group_of, method_of, state_kind_of: by number of the parameter; a method updates together matrices of one group
            and kind of state.
    """
    # Matrices of one shape that are done in the same way.
    by_shape: defaultdict[tuple[RowsColumns, Kind], list[int]] = defaultdict(list)
    methods: dict[str, MatrixMethod] = {}
    for number in numbers:
        unit, group = units[number], group_of(units[number].param)
        method, recipe = method_of(unit.param), None
        if method.orthogonalizes:
            gram = None if group["gram"] is None else tuple(group["gram"])
            dtype = method.precision(group).compute
            coefficients = coefficient_set(group["ns_coefficients"])
            recipe = Recipe(coefficients, steps=group["ns_steps"], dtype=dtype, eps=group["eps"], gram=gram)
        methods[method.name] = method
        by_shape[unit.rows_columns, (unit.form, method.name, recipe)].append(number)

    # Kernels do matrices of several shapes in one launch, where those of one shape leave a GPU idle; tall ones apart,
    # as a launch transposes all of its matrices or none.
    by_launch: defaultdict[tuple[RowsColumns | bool, Kind], list[int]] = defaultdict(list)
    for (shape, kind), members in by_shape.items():
        (rows, columns), (form, _, recipe) = shape, kind
        is_alone = not form.kernels or recipe is None or fills_gpu(rows, columns, len(members))
        by_launch[shape if is_alone else rows > columns, kind] += members

    # Batches are cut to a size, and within them the method updates equal neighbours as one stack.
    launches = []
    for (_, (form, name, recipe)), members in by_launch.items():
        max_elements = MAX_BATCH_ELEMENTS if form.kernels else MAX_STACK_ELEMENTS
        for part in batches(members, lambda number: math.prod(units[number].rows_columns), max_elements):
            shapes = [units[number].rows_columns for number in part]
            stack_sizes = (1,) * len(part)
            if methods[name].stacked:
                params = [units[number].param for number in part]
                kinds = [(id(group_of(param)), state_kind_of(param)) for param in params]
                stack_sizes = tuple(len(list(stack)) for _, stack in groupby(zip(shapes, kinds, strict=True)))
            launches.append(
                Batch(
                    units=tuple(part),
                    places=Places.of(shapes),
                    form=form,
                    method=methods[name],
                    recipe=recipe,
                    stack_sizes=stack_sizes,
                )
            )
    return launches


@dataclass(eq=False)
class Step:
    """The steps of one set of ranks, with a wire there and one back for each stage.

    Args:
        group: None for this process alone.
        device: where ranks exchange.
    """

    schedule: Schedule
    params: Sequence[Tensor]
    specs: Sequence[Spec]
    methods: Sequence[MatrixMethod]
    labels: Sequence[str]
    elementwise: Elementwise
    group: dist.ProcessGroup | None
    wires: Sequence[tuple[Wire, Wire]]
    device: torch.device

    def __post_init__(self) -> None:
        self._notes = Notes(self.group, self.device) if self.group is not None else None
        self._state = MatrixState(self.schedule, self.specs, self.device)
        self._state_kinds: list[tuple[Hashable, ...]] = []
        for param, spec in zip(self.params, self.specs, strict=True):
            self._state_kinds.append((param.device, *(slot.sent_dtype for slot in spec.slots)))
        self._gradient_dtypes: tuple[torch.dtype | None, ...] = ()
        self._batches: list[list[Batch]] = [[] for _ in self.wires]
        self._num_steps = 0
        # The stages whose updates are under way when the first notes are read.
        self._first_stages = range(min(STAGES_IN_FLIGHT, len(self.wires)))

    def update(
        self,
        rank_set: RankSet,
        groups: Sequence[ParamGroup],
        failure: Exception | None,
        constants: Facts,
    ) -> None:
        """Update the parameters that have a gradient.  Collective.

        Args:
            rank_set: all parameters of the ranks, matrices or not.
            failure: of this rank; the others learn of it.
            constants: facts that must be the same on all ranks.

        Raises:
            AgreedError: on all ranks, if their intents differ, or one of them fails.
        """
        # On a GPU a failure late in the last step is raised here: reading its notes in that step would have made the
        # host wait for the device.
        if self._notes is not None:
            self._notes.read()

        # This rank's intent: what must be the same on all ranks, or the error that keeps it from going on.
        intent = NO_INTENT
        if not rank_set.is_alone:
            constants = {**constants, "the number of steps by this plan": str(self._num_steps)}
            intent = rank_set.step_intent(groups, constants)
        self._num_steps += 1
        if failure is not None:
            intent = intent.failed(failure)
        exchange, last = StepExchange(intent, self._notes), len(self.schedule.stages) - 1
        # Autocast would round exact values.
        casts = torch.is_autocast_enabled(self.device.type)
        with torch.autocast(self.device.type, enabled=False) if casts else nullcontext():
            # Momenta accumulate gradients, and the updates of the first stages leave, with notes in front; after a
            # failure zeros leave instead, as the others wait for something.
            groups_of_matrices = [groups[member.group] for member in rank_set.matrices]
            local = exchange.attempt(self._read_gradients, groups_of_matrices, rank_set.matrix_states)
            arrivals = deque([self._send(exchange, local, number) for number in self._first_stages])

            results: Arrival | None = None
            for number, (_, wire_back) in enumerate(self.wires):
                # The next stage's updates travel while this one's are computed; the first two already do.
                if 0 < number < last:
                    arrivals.append(self._send(exchange, local, number + 1))

                # Updates come to their owners, with notes that say whether all ranks are well.  The first are read at
                # once: all ranks have the same notes, so they go on or raise alike.
                updates = arrivals.popleft()(number == 0)
                if not self.schedule.units:
                    return

                # Owners orthogonalise, batch by batch; results for parts of this rank are applied at once.
                memory = wire_back.memory()
                for batch in self._batches[number]:
                    exchange.attempt(self._update, batch, local, number, updates, memory)

                # All other results travel back while those of the stage before are applied.
                next_results = exchange.start(wire_back, memory)
                del updates, memory  # two stages are in memory, not three
                if results is not None:
                    exchange.attempt(self._apply, local, number - 1, results(False))
                results = next_results

            # The last results have no work left to overlap with.
            assert local is not None and results is not None, "all ranks stop at the first notes if one has failed"
            exchange.attempt(self._apply, local, last, results(False))
            exchange.attempt(local.end)
            exchange.end()

    def retire(self, failure: Exception | None) -> None:
        """Take part in this plan for the last time, with notes only.  Collective; raises an `AgreedError` on all ranks
        if not all of them plan again, or one of them fails.
        """
        if self._notes is None:
            return
        self._notes.read()
        intent = Intent.of(
            AGREE_ON_STEP, {PLAN_FACT: "made again, as options or groups have changed or a state was loaded"}
        )
        exchange = StepExchange(intent if failure is None else intent.failed(failure), self._notes)
        # Ranks that do not plan again send updates, so the wires are those of a step.
        for receive in [self._send(exchange, None, number) for number in self._first_stages]:
            receive(True)

    def _read_gradients(self, groups: Sequence[ParamGroup], states: Sequence[Mapping[str, Tensor]]) -> LocalTensors:
        """Return the tensors of this step; batches are made again if other parameters have gradients."""
        local = LocalTensors.of(self.params, groups, states)
        if self._gradient_dtypes != local.gradient_dtypes:
            units, is_active = self.schedule.units, local.is_active
            by_param = groups.__getitem__, self.methods.__getitem__, self._state_kinds.__getitem__
            self._batches = []
            for stage in self.schedule.stages:
                numbers = [number for number in stage.owned if is_active[units[number].param]]
                self._batches.append(make_batches(units, numbers, *by_param))
            self._state.forget_blocks()
            self._gradient_dtypes = local.gradient_dtypes
        self.elementwise.begin(local)
        return local

    def _send(self, exchange: StepExchange, local: LocalTensors | None, stage: int) -> Arrival:
        """Start to send the updates of a stage to their owners, and the state that goes with them."""
        wire, _ = self.wires[stage]
        memory = wire.memory()
        if local is not None:
            exchange.attempt(self.elementwise.send, local, stage, memory)
            exchange.attempt(self._state.send, local, stage, memory)
        return exchange.start(wire, memory)

    def _apply(self, local: LocalTensors, stage: int, arrived: Tensor) -> None:
        self.elementwise.apply(local, stage, arrived)
        self._state.apply(local, stage, arrived)

    def _update(self, batch: Batch, local: LocalTensors, stage: int, arrived: Tensor, back: Tensor) -> None:
        """Make the updates of whole matrices, and write them to the wire or apply them here."""
        matrices = batch.orthogonalized(self.elementwise.assemble(local, stage, batch.sizes, arrived))
        param = self.schedule.units[batch.units[0]].param
        dtype = self.specs[param].slots[0].returned_dtype
        results = matrices if matrices.dtype == dtype else torch.empty_like(matrices, dtype=dtype)

        # The method's own update, a stack of equal matrices at a time, in the memory of the results.
        first = start = 0
        has_changed = False
        for count in batch.stack_sizes:
            units, end = batch.units[first : first + count], start + count * batch.sizes[batch.units[first]]
            unit, state = self.schedule.units[units[0]], self._state.assemble(local, stage, units, arrived)
            is_stack = batch.method.stacked
            shape = (count, *unit.rows_columns) if is_stack else unit.rows_columns
            matrix = matrices[start:end].view(shape)
            slots = dict(state) if is_stack else {slot: tensor[0] for slot, tensor in state.items()}
            weight = slots.pop(WEIGHT, None)
            stack = WholeMatrix(
                matrix=align_matrices(matrix), state=slots, weight=weight, options=local.groups[unit.param]
            )
            try:
                update = batch.method.updated(stack)
            except Exception as error:
                raise self._method_error(units[0], batch.method, f"{type(error).__name__}: {error}") from error
            if update is not matrix or results is not matrices:
                # A view of the matrix, such as its transpose, is not written over itself.
                is_view = update.untyped_storage().data_ptr() == results.untyped_storage().data_ptr()
                results[start:end].view(shape).copy_(update.clone() if is_view else update)
                has_changed = True
            self._state.release(local, units, state, back)
            first, start = first + count, end

        # A method that makes finite matrices infinite is named.  On a device the host does not wait to look.  A
        # sum takes a tenth of the time of looking at each element.
        if has_changed and not is_asynchronous(self.device) and not results.sum(dtype=torch.float32).isfinite():
            matrices = batch.orthogonalized(self.elementwise.assemble(local, stage, batch.sizes, arrived))
            pairs = zip(batch.places.split_matrices(matrices), batch.places.split_matrices(results), strict=True)
            for number, (matrix, result) in zip(batch.units, pairs, strict=True):
                if matrix.isfinite().all() and not result.isfinite().all():
                    raise self._method_error(number, batch.method, "the update of a finite matrix is not finite")
        self.elementwise.release(local, stage, batch.sizes, results, back)

    def _method_error(self, unit: int, method: MatrixMethod, problem: str) -> RuntimeError:
        return RuntimeError(f"{self.labels[self.schedule.units[unit].param]}, method {method.name!r}: {problem}")


class Steps:
    """One `Step` for each `RankSet` of an optimizer.

    Attributes:
        planned: by ranks; made by the first update, and again after `plan_again`.
    """

    def __init__(self) -> None:
        self.planned: dict[Ranks, Step] = {}
        self._outdated: dict[Ranks, Step] = {}
        self._sets: list[RankSet] | None = None

    def plan_again(self) -> None:
        """Let the next update make new plans, once ranks have seen that all of them do."""
        self._outdated |= self.planned
        self.planned, self._sets = {}, None

    def refresh_state(self) -> None:
        """Let the next update find the state of parameters again: its tensors have been replaced."""
        self._sets = None

    def update(
        self,
        groups: Sequence[ParamGroup],
        state: State,
        replicas: dist.ProcessGroup | None,
        plan: Callable[[RankSet, Exception | None], Step],
        failure: Exception | None,
        constants: Callable[[Ranks], Facts],
    ) -> None:
        """Update all matrices that have a gradient.  Collective.

        Args:
            plan: plans the steps of a set of ranks, or tells them of a failure.
            failure: of this rank; the others learn of it.
            constants: facts that must be the same on all ranks of a set.

        Raises:
            Exception: on all ranks, if one of them fails; at once, without the other sets, if it is not `AgreedError`.
        """
        # The sets of ranks, in the one order in which all of them exchange.
        refuse_ended_groups(replicas, *[step.group for step in self.planned.values()])
        sets = self._sets or rank_sets(groups, replicas, state)
        if failure is None:  # which may be that groups are not as they should be
            self._sets = sets

        # All plans come before the first exchange: then all connections are made.  A failure in one set is reported in
        # the next, so that no rank of any waits.
        for is_planned in (False, True):
            for rank_set in sets:
                ranks = rank_set.ranks
                if rank_set.is_alone and (failure or not rank_set.matrices):
                    continue
                try:
                    if not is_planned and ranks not in self.planned:
                        # Ranks that would step by the old plan learn there that this one plans again.
                        if ranks in self._outdated:
                            self._outdated[ranks].retire(failure)
                        self.planned[ranks] = plan(rank_set, failure)
                        self._outdated.pop(ranks, None)
                    elif is_planned and rank_set.members and ranks in self.planned:
                        self.planned[ranks].update(rank_set, groups, failure, constants(ranks))
                except AgreedError as agreed:
                    failure = failure or agreed.error

        if failure is not None:
            raise failure
