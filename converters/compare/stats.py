"""The figures of a checkpoint, alone or beside an earlier one's, and odd ones among them."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any

from ...algebra.grouping import batches
from ...names.errors import SourceError
from ...names.wording import Finding, counted, fields_of, unnumbered
from ...programs.model_view import Role, matrix_sides
from ...programs.quantised import scales_of_quantised
from ...record.record import StateRecord, by_key, match_keys, names_of
from ...store.io.location import Remote
from ...store.open_checkpoint import OpenCheckpoint
from ...store.reading.payloads import Progress, tensor_bytes
from ...store.verify.diagnosis import open_whole
from ...store.verify.small_tensors import stack_small
from ..engine.outputs import OutputTensor
from ..look.contents import FirstLook, first_look
from .elements import StoredSide, Tolerance, compare_elements
from .figures import ELEMENT_BYTES, TensorFigures, figures_of, figures_of_alike, is_numeric

STATS_MEMORY = 256 << 20

_BATCH_BYTES = 2 << 20
"""Bytes of small tensors that are measured at once."""

_ROLES = (Role.WEIGHTS, Role.MOMENTUM, Role.MASTERS, Role.MOMENTS, Role.STATE)


@dataclass(frozen=True, slots=True)
class CheckpointStats:
    """The numbers of a checkpoint.

    Attributes:
        since: the earlier checkpoint; None if there is none.
        steps: of the earlier checkpoint and of this one, None where unknown.
        tensors: figures of weights, momentum, masters and moments.
        updates: of the weights that both checkpoints have.
        health: what looks odd, with what it usually means.
        quantised: the keys of quantised weights, which are codes and not measured, each with that of its scales.
    """

    checkpoint: str
    since: str | None
    steps: tuple[int | float | None, int | float | None]
    tensors: tuple[TensorFigures, ...]
    updates: tuple[WeightUpdate, ...]
    health: tuple[Finding, ...]
    quantised: Mapping[str, str] = field(default_factory=dict)

    def folded(self) -> tuple[Mapping[str, Any], ...]:
        """Summarise tensors with layers folded, by parameter and role.

        ``pattern`` is their key and ``name`` their parameter, with layers and experts as ``*``; ``tensors`` is their
        number; ``rms`` has the least, median and most of them, ``largest`` is a magnitude, ``zeros`` a share,
        ``nonfinite`` a number of elements, ``stable_rank`` the median.
        """
        rows = []
        for (pattern, role), members in siblings_of(self.tensors).items():
            # Least, median and most tell a layer that is unlike the others.
            figures = [tensor.figures for tensor in members]
            rms, elements = [f.rms for f in figures], sum(f.elements for f in figures)
            ranks = [tensor.stable_rank for tensor in members if tensor.stable_rank is not None]
            rows.append(
                {
                    "pattern": pattern,
                    "name": unnumbered(members[0].name),
                    "role": role,
                    "tensors": len(members),
                    "rms": {"least": min(rms), "median": median(rms), "most": max(rms)},
                    "largest": max(f.largest for f in figures),
                    "zeros": sum(f.zeros for f in figures) / elements if elements else 0.0,
                    "nonfinite": sum(f.nan + f.infinite for f in figures),
                    "stable_rank": median(ranks) if ranks else None,
                }
            )
        return tuple(rows)

    def to_json(self) -> dict[str, Any]:
        return {**fields_of(self), "folded": self.folded(), "health": list(map(health_json, self.health))}


def health_json(finding: Finding) -> dict[str, Any]:
    return {"kind": finding.kind, "message": finding.message, "means": finding.means, "keys": finding.names}


def stats(
    path: str | os.PathLike[str] | Remote,
    since: str | os.PathLike[str] | Remote | None = None,
    *,
    select: Sequence[str] = (),
    spectra: bool = True,
    memory: int = STATS_MEMORY,
    jobs: int = 2,
    progress: Progress = lambda count, total: None,
) -> CheckpointStats:
    """Measure the weights and the optimizer state of a checkpoint, as ``muonckpt stats`` prints it; needs no torch.

    Args:
        path: a path or a URL, of any format.
        since: an earlier checkpoint of the run and program, to see how far weights have moved.
        select: shell patterns; only tensors whose key matches one are read.
        spectra: whether to sketch singular values, which takes most of the time.
        memory: bytes that elements may take; larger matrices are read several times.
        jobs: threads.
        progress: called with the bytes read since the last call, and with the total.

    Raises:
        SourceError: a checkpoint cannot be read, or is damaged.
        LayoutError: a tensor has a hole or an overlap.
        TargetError: a pattern matches nothing.
    """
    with ExitStack() as stack:
        # The tensors to measure, and the weights that an earlier checkpoint has in the same shape.
        opened = stack.enter_context(open_whole(path, partly=bool(select)))
        look = first_look(opened)
        chosen = measurable(look, select)
        earlier = stack.enter_context(open_whole(since, partly=bool(select))) if since is not None else None
        earlier_look = first_look(earlier) if earlier else None
        pairs: list[tuple[StateRecord, StateRecord]] = []
        if earlier_look is not None:
            keys = {record.key for _, record in chosen}
            former_weights = by_key(earlier_look.view.tensors_of(Role.WEIGHTS))
            for tensor in look.view.tensors_of(Role.WEIGHTS):
                former = former_weights.get(tensor.key)
                if tensor.key in keys and former is not None and former.shape == tensor.shape:
                    pairs.append((tensor, former))
        # Weights that both have are read twice: for their figures, and for their change.
        total = sum(tensor_bytes(record) for _, record in chosen) + 2 * sum(tensor_bytes(record) for record, _ in pairs)

        def passed(count: int) -> None:
            progress(count, total)

        tensors = measured(opened, look, chosen, spectra=spectra, memory=memory, jobs=jobs, passed=passed)
        changes = _rms_changes(opened, earlier, pairs, memory, passed) if earlier else {}
        return stats_of(opened, look, tensors, earlier, earlier_look, changes)


Measurable = Sequence[tuple[Role, StateRecord]]


def measurable(look: FirstLook, select: Sequence[str] = ()) -> Measurable:
    """Choose weights, momentum, masters and moments that match, or all tensors if the program is unknown.

    Quantised weights are left out: their elements are codes.

    Raises:
        TargetError: a pattern matches nothing.
    """
    tensors: list[tuple[Role, StateRecord]] = []
    for role in _ROLES:
        tensors += [(role, tensor) for tensor in look.view.tensors_of(role)]
    if not tensors:  # the program is unknown: all that is there
        tensors = [(Role.OTHER, tensor) for tensor in look.manifest.tensors if tensor.shape]
    names, noun = names_of(look.manifest.tensors), "tensor of weights or state"
    keys = match_keys(select, [tensor.key for _, tensor in tensors], names, noun)
    quantised = scales_of_quantised(look.manifest.tensors)
    return [(role, tensor) for role, tensor in tensors if tensor.key in keys and tensor.key not in quantised]


def measured(
    opened: OpenCheckpoint,
    look: FirstLook,
    tensors: Measurable,
    *,
    spectra: bool,
    memory: int,
    jobs: int,
    passed: Callable[[int], None],
) -> tuple[TensorFigures, ...]:
    """Measure these tensors, but those that are not numbers; ``passed`` receives bytes that have been read."""
    numeric = [(role, record) for role, record in tensors if is_numeric(record.dtype)]
    labels = [(look.view.owners.get(record.key, record.key), str(role)) for role, record in numeric]
    records = opened.locate([record for _, record in numeric])
    thread_memory = memory // jobs

    def measure(batch: Sequence[int]) -> list[TensorFigures]:
        """Measure a large tensor, or several small ones."""
        figures: dict[int, TensorFigures] = {}
        # Small tensors of one shape are measured together, as many as fit in memory.
        small = [records[number] for number in batch if _is_small(records[number], thread_memory)]
        for members, words in stack_small(opened.payloads, small):
            step = max(thread_memory // (2 * ELEMENT_BYTES * math.prod(words.shape[1:])), 1)
            for start in range(0, len(members), step):
                numbers, part = [batch[m] for m in members[start : start + step]], words[start : start + step]
                part_records, part_labels = [records[n] for n in numbers], [labels[n] for n in numbers]
                figures |= zip(numbers, figures_of_alike(part, part_records, part_labels, spectra), strict=True)
                passed(part.nbytes)
        for number in batch:
            if number not in figures:
                side = StoredSide(OutputTensor.copy_of(records[number]), opened.payloads)
                figures[number] = figures_of(side, *labels[number], thread_memory, spectra, passed)
        return [figures[number] for number in batch]

    with ThreadPoolExecutor(jobs) as pool:
        return tuple(chain.from_iterable(pool.map(measure, _batches(records, thread_memory))))


def _is_small(record: StateRecord, memory: int) -> bool:
    return 0 < math.prod(record.shape) * 2 * ELEMENT_BYTES <= memory


def _batches(records: Sequence[StateRecord], memory: int) -> Iterator[list[int]]:
    """Group numbers of tensors to measure at once: neighbours while they are small and few, each large one alone."""
    # Batches are small enough for all threads to have some.
    max_bytes = min(memory // 8, _BATCH_BYTES)

    def bytes_of(number: int) -> int:
        return tensor_bytes(records[number]) if _is_small(records[number], memory) else max_bytes + 1

    return batches(range(len(records)), bytes_of, max_bytes)


def stats_of(
    opened: OpenCheckpoint,
    look: FirstLook,
    tensors: tuple[TensorFigures, ...],
    earlier: OpenCheckpoint | None,
    earlier_look: FirstLook | None,
    changes: Mapping[str, float],
) -> CheckpointStats:
    """Return the numbers of measured tensors; ``changes`` is the root mean square of each weight's change, by key."""
    before, after = earlier_look.step if earlier_look else None, look.step
    num_steps = after - before if before is not None and after is not None else None
    # Changes per step, and by the rate: what Muon would have done if all updates pointed one way.
    parameters = {p.weight.key: p for p in look.view.parameters.values() if p.weight}
    updates = []
    for key, rms in changes.items():
        parameter = parameters.get(key)
        rate = parameter.options.get("lr") if parameter else None
        lr = float(rate) if isinstance(rate, int | float) else None
        per_step = rms / num_steps if num_steps and num_steps > 0 else None
        factor = None
        if parameter and parameter.is_matrix and lr and per_step is not None:
            factor = per_step / lr * math.sqrt(max(parameter.sides))
        updates.append(WeightUpdate(key, rms=rms, per_step=per_step, lr=lr, factor=factor))
    since = str(earlier.path) if earlier else None
    health, quantised = tuple(_health_findings(tensors, updates)), scales_of_quantised(look.manifest.tensors)
    return CheckpointStats(
        str(opened.path),
        since=since,
        steps=(before, after),
        tensors=tensors,
        updates=tuple(updates),
        health=health,
        quantised=quantised,
    )


def _rms_changes(
    opened: OpenCheckpoint,
    earlier: OpenCheckpoint,
    pairs: Sequence[tuple[StateRecord, StateRecord]],
    memory: int,
    passed: Callable[[int], None],
) -> dict[str, float]:
    """Return the root mean square of each weight's change."""
    if not pairs:
        raise SourceError(f"{opened.path} and {earlier.path} have no weights of one key and shape in common")
    records, former_records = opened.locate([pair[0] for pair in pairs]), earlier.locate([pair[1] for pair in pairs])
    changes = {}
    for record, former in zip(records, former_records, strict=True):
        before = StoredSide(OutputTensor.copy_of(former), earlier.payloads)
        after = StoredSide(OutputTensor.copy_of(record), opened.payloads)
        statistics = compare_elements(before, after, Tolerance(), memory, passed).statistics
        assert statistics is not None, "elements were compared"
        changes[record.key] = statistics.rms_change
    return changes


APART = 5.0
"""A tensor stands out that is so many times larger or smaller than the median of its siblings."""

_MIN_SIBLINGS = 3
_COLLAPSED_RANK = 1.1
"""The stable rank below which a momentum has one direction only."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The change of a weight between two checkpoints.

    Attributes:
        rms: the root mean square of the change; ``per_step`` is divided by the number of steps, None if unknown.
        lr: the learning rate of its group in the later checkpoint; None if unknown.
        factor: ``per_step / lr * √max(rows, columns)`` of a matrix: what the update is scaled by, at least, if Muon
            makes it, less as far as updates do not point one way; None if a part is unknown.
    """

    key: str
    rms: float
    per_step: float | None
    lr: float | None
    factor: float | None


def siblings_of(tensors: Sequence[TensorFigures]) -> Mapping[tuple[str, str], list[TensorFigures]]:
    """Group tensors by what they are in all layers: the key with layers and experts as ``*``, and the role."""
    groups: defaultdict[tuple[str, str], list[TensorFigures]] = defaultdict(list)
    for tensor in tensors:
        groups[unnumbered(tensor.key), tensor.role].append(tensor)
    return groups


def _health_findings(tensors: Sequence[TensorFigures], updates: Sequence[WeightUpdate]) -> Iterator[Finding]:
    """Yield what looks odd, with what it usually means."""

    def finding(kind: str, keys: Sequence[str], singular: str, plural: str, means: str) -> Iterator[Finding]:
        if keys:
            yield Finding.listing(kind, counted(len(keys), singular, plural), keys, means)

    # By itself: what no training leaves in a tensor.
    keys = [tensor.key for tensor in tensors if tensor.figures.nan or tensor.figures.infinite]
    means = "a step that diverged or overflowed: go back to a checkpoint before it"
    nonfinite = "infinite or NaN elements"
    yield from finding("nonfinite", keys, f"tensor has {nonfinite}", f"tensors have {nonfinite}", means)
    momenta = [tensor for tensor in tensors if tensor.role == Role.MOMENTUM]
    keys = [t.key for t in momenta if t.figures.elements and t.figures.zeros == t.figures.elements]
    means = "no gradient has come: a frozen or unused parameter, an expert without tokens, or state that was lost"
    yield from finding("zero_momentum", keys, "momentum is all zeros", "momenta are all zeros", means)
    # Beside its siblings in other layers; where parameters have numbers, these are no layers'.
    groups = siblings_of([tensor for tensor in tensors if not tensor.name.isdecimal()])
    means = "a layer that trains otherwise than its siblings: its initialisation, rate or data, or damage"
    for (pattern, _), members in groups.items():
        sibling_median, keys = _far_from_siblings({tensor.key: tensor.figures.rms for tensor in members})
        distance = f"an RMS more than {APART:g} times off the median {sibling_median:.3g} of {pattern}"
        yield from finding("outlier_rms", keys, f"tensor has {distance}", f"tensors have {distance}", means)
    means = "a matrix with other structure than its siblings: a collapsed, fused or transposed one"
    for (pattern, _), members in groups.items():
        sibling_median, keys = _far_from_siblings({tensor.key: tensor.stable_rank for tensor in members})
        distance = f"a stable rank more than {APART:g} times off the median {sibling_median:.3g} of {pattern}"
        yield from finding("outlier_stable_rank", keys, f"matrix has {distance}", f"matrices have {distance}", means)
    spectra = [tensor for tensor in momenta if min(matrix_sides(tensor.shape), default=0) >= 8 and tensor.stable_rank]
    keys = [tensor.key for tensor in spectra if (tensor.stable_rank or 2) < _COLLAPSED_RANK]
    if 2 * len(keys) > len(spectra) > 1:  # generated data are all alike: no finding about one matrix
        keys = []
    means = "one direction dominates: few tokens, a dead layer above, or gradients that all agree"
    yield from finding("collapsed", keys, "momentum has rank one", "momenta have rank one", means)
    # Beside the earlier checkpoint.
    keys = [update.key for update in updates if update.rms == 0]
    means = "frozen, without gradients, or stale in one of the checkpoints"
    yield from finding("still", keys, "weight has not changed", "weights have not changed", means)
    factors: defaultdict[str, dict[str, float | None]] = defaultdict(dict)
    for update in updates:
        factors[unnumbered(update.key)][update.key] = update.factor
    means = "another method or rate steps it than its siblings (Muon off, a group of its own)"
    for pattern, factor_by_key in factors.items():
        _, keys = _far_from_siblings(factor_by_key)
        distance = f"changed more than {APART:g} times off the median for its rate ({pattern})"
        yield from finding("outlier_update", keys, distance, distance, means)


def _far_from_siblings(values: Mapping[str, float | None]) -> tuple[float, list[str]]:
    """Return the median of the known values other than zero, and the keys far from it; none of too few values."""
    numbers = {key: value for key, value in values.items() if value}
    if len(numbers) < _MIN_SIBLINGS:
        return 0.0, []
    middle = median(numbers.values())
    return middle, [key for key, value in numbers.items() if not middle / APART <= value <= middle * APART]
