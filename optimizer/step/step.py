"""A step of matrices: momentum, exchange, orthogonalise in batches, exchange back, apply.

Stages overlap: while the matrices of one are orthogonalised, the next one's updates are on their way to their owners
and the previous one's results on their way back, so at most two are in memory.

A `Batch` is orthogonalised together, a `Step` is for one set of ranks, and `Steps` takes those of all sets in order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from ...layouts.tensors import local_of
from ...names.coefficients import coefficient_set
from ...names.vocabulary import ParamGroup
from ..ground.cuda_graphs import is_capturable, is_capturing, refuse_absent, refuse_host
from ..ground.host_memory import StateMemory, peak_bytes
from ..ground.tensors import Places, RowsColumns, align_matrices
from ..methods.form import MatrixMethod, WholeMatrix
from ..newton_schulz.iterations import orthogonalize_all
from ..newton_schulz.products import Form
from ..newton_schulz.recipe import Recipe
from ..planning.matrices import WEIGHT, Spec, Unit
from ..planning.schedule import Ranks, Schedule
from .agreement import AGREE_ON_STEP, PLAN_FACT, AgreedError, Facts, Intent
from .elementwise import VISITS, Elementwise, LocalTensors, params_by_first_stage, state_of
from .exchange import Link, Notes, StepExchange, Wire
from .matrix_state import MatrixState
from .rank_sets import RankSet, State, crossing_error, rank_sets, refuse_ended_groups

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
"""What matrices of one batch have in common besides their shapes: form, name of the method, recipe."""


@dataclass(frozen=True)
class Batch:
    """Matrices that are orthogonalised by one call, with the numbers of their units.

    Attributes:
        recipe: None: the method takes them as they are.
        portions: how many of them at a time the method takes, in their order.

    Raises:
        ValueError: no unit, or not as many as there are places.
    """

    units: tuple[int, ...]
    places: Places
    form: Form
    method: MatrixMethod
    recipe: Recipe | None
    portions: tuple[int, ...]

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
        given = memory if self.method.before is None else self.method.before(memory)
        return orthogonalize_all(given, self.places, self.recipe, self.form)


def fills_gpu(rows: int, columns: int, copies: int) -> bool:
    """Return whether the Gram matrices of so many matrices have `MIN_TILES` tiles: one has from 1281² on."""
    side = -(-min(rows, columns) // 128)
    return copies * side * (side + 1) // 2 >= MIN_TILES


def make_batches(
    units: Sequence[Unit],
    numbers: Iterable[int],
    group_of: Callable[[int], ParamGroup],
    method_of: Callable[[int], MatrixMethod],
    state_of: Callable[[int], Hashable] = lambda param: None,
) -> list[Batch]:
    """Return units, by number, in batches.

    Kernels take up to `MAX_BATCH_ELEMENTS` at a time: matrices of one shape if these fill a GPU, else all that do not
    together, tall ones apart.  torch's products take up to `MAX_STACK_ELEMENTS`, of matrices of one shape.

    Args:
        group_of, method_of, state_of: by number of the parameter; a method takes together what has equal ``state_of``.
    """
    alike: defaultdict[tuple[RowsColumns, Kind], list[int]] = defaultdict(list)
    methods: dict[str, MatrixMethod] = {}
    for number in numbers:
        unit, group = units[number], group_of(units[number].param)
        method, recipe = method_of(unit.param), None
        if method.orthogonalizes:
            gram = None if group["gram"] is None else tuple(group["gram"])
            dtype = method.precision(group).compute
            recipe = Recipe(coefficient_set(group["ns_coefficients"]), group["ns_steps"], dtype, group["eps"], gram)
        methods[method.name] = method
        alike[unit.rows_columns, (unit.form, method.name, recipe)].append(number)
    together: defaultdict[tuple[RowsColumns | bool, Kind], list[int]] = defaultdict(list)
    for (shape, kind), members in alike.items():
        rows, columns = shape
        alone = not kind[0].kernels or kind[2] is None or fills_gpu(rows, columns, len(members))
        together[shape if alone else rows > columns, kind] += members
    batches = []
    for (_, kind), members in together.items():
        most = MAX_BATCH_ELEMENTS if kind[0].kernels else MAX_STACK_ELEMENTS
        cuts: list[list[int]] = []
        held = 0
        for number in members:
            rows, columns = units[number].rows_columns
            if not cuts or held + rows * columns > most:
                cuts.append([])
                held = 0
            cuts[-1].append(number)
            held += rows * columns
        form, name, recipe = kind
        for cut in cuts:
            shapes = [units[number].rows_columns for number in cut]
            portions = (1,) * len(cut)
            if methods[name].stacked:
                kept = [(id(group_of(param)), state_of(param)) for param in (units[number].param for number in cut)]
                portions = tuple(len(list(same)) for _, same in groupby(zip(shapes, kept, strict=True)))
            batches.append(Batch(tuple(cut), Places.of(shapes), form, methods[name], recipe, portions))
    return batches


@dataclass(frozen=True, slots=True, eq=False)
class PendingStep:
    """A step of which the first notes, and the first of the updates ``coming`` to their owners, have arrived."""

    exchange: StepExchange
    local: LocalTensors
    coming: deque[Wire]
    skipped: bool

    def leave(self) -> None:
        """Leave it undone, but wait for what is under way."""
        self.local.restore_momenta()
        for wire in list(self.coming)[1:]:
            wire.arrive()


class Step:
    """The steps of one set of ranks, with a link there and one back for each stage.

    Args:
        group: None for this process alone.
        device: where ranks exchange.
        memory: where state rests.
        guarded: whether a step may be skipped: then momenta change only after the first notes have arrived.
        noisy: whether momenta are rounded with noise.  Then they cannot be known before they change, so those that are
            needed for the first notes are kept.
    """

    def __init__(
        self,
        schedule: Schedule,
        params: Sequence[Tensor],
        specs: Sequence[Spec],
        methods: Sequence[MatrixMethod],
        labels: Sequence[str],
        rank: int,
        elementwise: Elementwise,
        group: dist.ProcessGroup | None,
        links: Sequence[tuple[Link, Link]],
        device: torch.device,
        memory: StateMemory,
        *,
        guarded: bool = False,
        noisy: bool = False,
    ) -> None:
        self.schedule, self.group = schedule, group
        self._memory, self._params_of_stages = memory, schedule.params()
        self._params, self._rank, self._links, self._device = tuple(params), rank, links, device
        self._elementwise, self._state = elementwise, MatrixState(schedule, specs, rank, device)
        self._specs, self._methods, self._labels = specs, methods, labels
        self._kinds = [
            (weight.device, *(slot.there for slot in spec.slots)) for weight, spec in zip(params, specs, strict=True)
        ]
        self._ahead, self._keeps = guarded and not noisy, guarded and noisy
        self._params_by_first_stage = params_by_first_stage(schedule, len(params))
        self._notes = Notes(group, device) if group is not None else None
        self._active: tuple[bool, ...] = ()
        self._batches: list[list[Batch]] = []
        self._begun = 0

    def begin(
        self,
        held: RankSet,
        groups: Sequence[ParamGroup],
        state: State,
        failure: Exception | None,
        skip: Tensor | None,
        constants: Facts = MappingProxyType({}),
    ) -> PendingStep:
        """Begin to update those parameters that have a gradient, up to where the first notes have arrived.  Collective.

        Args:
            held: all parameters of these ranks, matrices or not.
            failure: of this rank; the others learn of it.
            skip: see `StepExchange`.
            constants: facts that must be the same on all ranks.

        Raises:
            AgreedError: on all ranks, if their intents differ, or one of them fails.
        """
        if self._notes is not None:
            self._notes.read()
        intent = Intent.of(AGREE_ON_STEP, {})
        if not held.is_alone:
            constants = {**constants, "the number of steps by this plan": str(self._begun)}
            intent = held.step_intent(groups, constants)
        self._begun += 1
        if failure is not None:
            intent = intent.failed(failure, self._rank)
        if captured := is_capturing():
            refuse_absent([tuple(param.shape) for param in self._params], [p.grad is not None for p in self._params])
            if not is_capturable(self._device):
                refuse_host("muon", self._device)
        with torch.autocast(self._device.type, enabled=False):  # it would round what is meant to be exact
            # A graph is captured on all ranks or on none, and nothing can be read meanwhile.
            exchange = StepExchange(intent, None if captured else self._notes, skip)
            groups_of_matrices = [groups[member.group] for member in held.matrices]
            local = exchange.attempt(self._read_gradients, groups_of_matrices, state)
            coming = self._first_wires(exchange, local)
            try:
                skipped = exchange.check_first(coming[0])
            except AgreedError:
                if local is not None:
                    local.restore_momenta()
                raise
        assert local is not None, "all ranks stop at the first check if one has failed"
        return PendingStep(exchange, local, coming, skipped)

    def finish(self, pending: PendingStep, failure: Exception | None = None) -> None:
        """Do the rest of a step.  Collective; raises an `AgreedError` on all ranks if one of them fails."""
        exchange, local, coming = pending.exchange, pending.local, pending.coming
        if failure is not None:
            exchange.fail(failure)
        with torch.autocast(self._device.type, enabled=False):
            if self._ahead:
                for ahead in range(len(coming)):
                    exchange.attempt(self._elementwise.accumulate_gradients, local, ahead)
            returning: Wire | None = None
            stages = self.schedule.stages if self.schedule.units else ()
            for number, stage in enumerate(stages):
                if 0 < number < len(stages) - 1:
                    coming.append(self._gather(exchange, local, number + 1))
                arrived = coming.popleft()
                if number:
                    arrived.arrive()
                    exchange.check(arrived)
                back = Wire(stage.scatter, self._links[number][1], self._device)
                for batch in self._batches[number]:
                    exchange.attempt(self._update, batch, local, number, arrived.memory, back.memory)
                del arrived
                exchange.start(back)
                exchange.attempt(local.computed, number)
                if returning:
                    self._apply(exchange, local, number - 1, returning)
                returning = back
            if returning:
                self._apply(exchange, local, len(stages) - 1, returning)
                exchange.attempt(local.end)
            exchange.end()

    def retire(self, failure: Exception | None) -> None:
        """Take part in this plan for the last time, with notes only.  Collective; raises an `AgreedError` on all ranks
        if not all of them plan anew, or one of them fails.
        """
        if self._notes is None or is_capturing():
            return
        self._notes.read()
        intent = Intent.of(
            AGREE_ON_STEP, {PLAN_FACT: "made anew, as options or groups have changed or a state was loaded"}
        )
        exchange = StepExchange(intent if failure is None else intent.failed(failure, self._rank), self._notes)
        first, *others = self._first_wires(exchange, None)
        exchange.check_first(first)
        for wire in others:
            wire.arrive()

    def peak_state_bytes(self, state: State) -> int:
        """Return the most bytes of state that a step has on the device at once, if it rests elsewhere."""
        slots: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
        for number, param in enumerate(self._params):
            for name, tensor in state[param].items():
                slots[name][number] = local_of(tensor)
        return sum(
            peak_bytes([state_of(params, slots, self._specs, returning) for params in self._params_of_stages], ahead)
            for returning, ahead in VISITS
        )

    def _read_gradients(self, groups: Sequence[ParamGroup], state: State) -> LocalTensors:
        """Return the tensors of this step."""
        stages = self._params_of_stages, self._memory, self._device
        local = LocalTensors.of(self._params, groups, state, self._specs, self._rank, *stages)
        active = local.is_active
        if self._active != active:
            units = self.schedule.units
            of_param = groups.__getitem__, self._methods.__getitem__, self._kinds.__getitem__
            self._batches = [
                make_batches(units, (n for n in stage.owned if active[units[n].param]), *of_param)
                for stage in self.schedule.stages
            ]
            self._state.forget_blocks()
            self._active = active
        self._elementwise.begin(local)
        return local

    def _first_wires(self, exchange: StepExchange, local: LocalTensors | None) -> deque[Wire]:
        stages = range(min(STAGES_IN_FLIGHT, len(self.schedule.stages)))
        coming = deque(self._gather(exchange, local, stage) for stage in stages)
        coming[0].arrive()
        return coming

    def _gather(self, exchange: StepExchange, local: LocalTensors | None, stage: int) -> Wire:
        wire = Wire(self.schedule.stages[stage].gather, self._links[stage][0], self._device)
        if local is not None:
            if exchange.attempt(local.fetch_state, stage):
                exchange.attempt(self._elementwise.locate, local)
            first = stage < STAGES_IN_FLIGHT
            if first and self._keeps:
                exchange.attempt(local.save_momenta, self._params_by_first_stage[stage])
            if not (ahead := first and self._ahead):
                exchange.attempt(self._elementwise.accumulate_gradients, local, stage)
            send = self._elementwise.send_ahead if ahead else self._elementwise.send
            exchange.attempt(send, local, stage, wire.memory)
            exchange.attempt(self._state.send, local, stage, wire.memory)
        exchange.start(wire)
        return wire

    def _update(self, batch: Batch, local: LocalTensors, stage: int, arrived: Tensor, back: Tensor) -> None:
        """Make the updates of whole matrices, and write them to the wire or apply them here."""
        matrices = batch.orthogonalized(self._elementwise.assemble(local, stage, batch.sizes, arrived))
        param = self.schedule.units[batch.units[0]].param
        dtype = self._specs[param].slots[0].back
        results = matrices if matrices.dtype == dtype else torch.empty_like(matrices, dtype=dtype)
        first = begin = 0
        made = False
        for count in batch.portions:
            units, end = batch.units[first : first + count], begin + count * batch.sizes[batch.units[first]]
            state = self._state.assemble(local, stage, units, arrived)
            given = self._whole(batch.method, units, local, state, matrices[begin:end])
            try:
                update = batch.method.updated(given)
            except Exception as error:
                raise self._failure(units[0], batch.method, f"{type(error).__name__}: {error}") from error
            place = results[begin:end].view(given.matrix.shape)
            if update is not given.matrix or update.data_ptr() != place.data_ptr():
                # A view of the matrix, such as its transpose, is not written over itself.
                alias = update.untyped_storage().data_ptr() == results.untyped_storage().data_ptr()
                place.copy_(update.clone() if alias else update)
                made = True
            self._state.release(local, units, state, back)
            first, begin = first + count, end
        if made and not is_capturable(self._device) and not results.sum(dtype=torch.float32).isfinite():
            # On a device the host does not wait to look.  A sum takes a tenth of the time of looking at each element.
            matrices = batch.orthogonalized(self._elementwise.assemble(local, stage, batch.sizes, arrived))
            pairs = zip(batch.places.split_matrices(matrices), batch.places.split_matrices(results), strict=True)
            for unit, (matrix, result) in zip(batch.units, pairs, strict=True):
                if matrix.isfinite().all() and not result.isfinite().all():
                    raise self._failure(unit, batch.method, "the update of a finite matrix is not finite")
        self._elementwise.release(local, stage, batch.sizes, results, back)

    def _failure(self, unit: int, method: MatrixMethod, what: str) -> RuntimeError:
        return RuntimeError(f"{self._labels[self.schedule.units[unit].param]}, method {method.name!r}: {what}")

    def _whole(
        self,
        method: MatrixMethod,
        units: Sequence[int],
        local: LocalTensors,
        state: Mapping[str, Tensor],
        memory: Tensor,
    ) -> WholeMatrix:
        """Return what a method takes at a time: equal matrices, of one group, that lie end to end in a memory."""
        unit = self.schedule.units[units[0]]
        kept = {slot: tensor if method.stacked else tensor[0] for slot, tensor in state.items()}
        shape = (len(units), *unit.rows_columns) if method.stacked else unit.rows_columns
        return WholeMatrix(align_matrices(memory.view(shape)), kept, kept.pop(WEIGHT, None), local.groups[unit.param])

    def _apply(self, exchange: StepExchange, local: LocalTensors, stage: int, returning: Wire) -> None:
        returning.arrive()
        exchange.check(returning)
        exchange.attempt(self._elementwise.apply, local, stage, returning.memory)
        exchange.attempt(self._state.apply, local, stage, returning.memory)
        exchange.attempt(local.applied, stage)


class Steps:
    """One `Step` for each `RankSet` of an optimizer.

    Attributes:
        planned: by ranks; made by the first step, and anew after `plan_anew`.
    """

    def __init__(self) -> None:
        self.planned: dict[Ranks, Step] = {}
        self._outdated: dict[Ranks, Step] = {}
        self._sets: list[RankSet] | None = None

    def plan_anew(self) -> None:
        """Let the next step make new plans, once ranks have seen that all of them do."""
        self._outdated |= self.planned
        self.planned, self._sets = {}, None

    def look_anew(self) -> None:
        """Let the next step take what parameters have as state from where it is now."""
        self._sets = None

    @property
    def widest(self) -> dist.ProcessGroup | None:
        """The group of all ranks that decide together whether a step is taken."""
        held = [held for held in self._sets or () if held.members and held.ranks in self.planned]
        return self.planned[held[-1].ranks].group if held else None

    def update(
        self,
        groups: Sequence[ParamGroup],
        state: State,
        replicas: dist.ProcessGroup | None,
        plan: Callable[[RankSet, Exception | None], Step],
        failure: Exception | None,
        skip: Tensor | None,
        constants: Callable[[Ranks], Facts],
    ) -> bool:
        """Update all matrices that have a gradient; returns False if some rank skips it.  Collective.

        If the step may be skipped, the first notes of all sets are read before anything is changed.  The last set
        contains all ranks that this one shares parameters with, so they decide alike.

        Args:
            plan: plans the steps of a set of ranks, or tells them of a failure.
            failure: of this rank; the others learn of it.
            skip: see `StepExchange`.
            constants: facts that must be the same on all ranks of a set.

        Raises:
            Exception: on all ranks, if one of them fails; at once, without the other sets, if it is not `AgreedError`.
        """
        refuse_ended_groups(replicas, *(step.group for step in self.planned.values()))
        sets = self._sets or rank_sets(groups, replicas, state)
        if failure is None:  # which may be that groups are not as they should be
            self._sets = sets
        if skip is not None:
            failure = failure or crossing_error([held.ranks for held in sets if held.members and not held.is_alone])
        begun: list[tuple[Step, PendingStep]] = []

        def make_plan(held: RankSet) -> None:
            if held.ranks not in self.planned:
                if held.ranks in self._outdated:
                    self._outdated[held.ranks].retire(failure)
                self.planned[held.ranks] = plan(held, failure)
                self._outdated.pop(held.ranks, None)

        def begin(held: RankSet) -> None:
            if held.members and held.ranks in self.planned:
                step = self.planned[held.ranks]
                pending = step.begin(held, groups, state, failure, skip, constants(held.ranks))
                if skip is None:
                    step.finish(pending)
                else:
                    begun.append((step, pending))

        missing = {held.ranks for held in sets} - self.planned.keys()
        # All plans before the first exchange: then all connections are made.
        for work in (make_plan, begin) if missing else (begin,):
            for held in sets:
                if held.is_alone and (failure or not held.matrices):
                    continue
                try:
                    work(held)
                except AgreedError as agreed:
                    if is_capturing():
                        raise agreed.error from None
                    failure = failure or agreed.error
        skipped = skip is not None and (begun[-1][1].skipped if begun else bool(skip))
        is_stopped = skipped or failure is not None
        for step, pending in begun:
            if is_stopped:
                pending.leave()
                continue
            try:  # what fails in one set of ranks is told in the next
                step.finish(pending, failure)
            except AgreedError as agreed:
                failure = failure or agreed.error
        if failure is not None:
            raise failure
        return not skipped
