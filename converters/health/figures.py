"""The figures of a checkpoint's weights, momentum, moments and masters, alone or with an earlier checkpoint's."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

from ...errors import SourceError, TargetError, did_you_mean
from ...record import StateRecord
from ...store.io.location import Remote
from ...store.open_checkpoint import OpenCheckpoint, open
from ...store.reading.dtypes import itemsize
from ...store.reading.payloads import Progress
from ..compare.pair import StoredSide, compare_elements
from ..compare.statistics import Tolerance
from ..engine.outputs import OutputTensor
from ..look.contents import Role
from ..look.first_look import FirstLook, first_look
from .findings import Oddity, WeightUpdate, findings_of, siblings_of
from .tensor_figures import TensorFigures, figures_of

STATS_MEMORY = 256 << 20
"""Bytes that elements may take."""

_ROLES = (Role.WEIGHTS, Role.MOMENTUM, Role.MASTERS, Role.MOMENTS)


@dataclass(frozen=True, slots=True)
class CheckpointStats:
    """The numbers of a checkpoint.

    Attributes:
        checkpoint: where it is; ``since`` the earlier one, None if there is none.
        steps: of the earlier checkpoint and of this one, None where unknown.
        tensors: figures of weights, momentum, masters and moments.
        updates: of the weights that both checkpoints have.
        health: what looks odd, with what it usually means.
    """

    checkpoint: str
    since: str | None
    steps: tuple[int | float | None, int | float | None]
    tensors: tuple[TensorFigures, ...]
    updates: tuple[WeightUpdate, ...]
    health: tuple[Oddity, ...]

    def folded(self) -> tuple[Mapping[str, Any], ...]:
        """The tensors with layers folded: for each parameter and role ``tensors`` (their number) and, over them, the
        least, median and most of ``rms``, the largest magnitude, the share of zeros, the number of elements that are
        not finite, and the median stable rank."""
        return tuple(
            {"pattern": pattern, "role": role, "tensors": len(members), **_summary(members)}
            for (pattern, role), members in siblings_of(self.tensors).items()
        )

    def to_json(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "checkpoint": self.checkpoint,
            "since": self.since,
            "steps": self.steps,
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "folded": self.folded(),
            "updates": [update.to_json() for update in self.updates],
            "health": [finding.to_json() for finding in self.health],
        }


def _summary(members: Sequence[TensorFigures]) -> dict[str, Any]:
    rms = [tensor.figures.rms for tensor in members]
    elements = sum(tensor.figures.elements for tensor in members)
    ranks = [tensor.stable_rank for tensor in members if tensor.stable_rank is not None]
    return {
        "rms": {"least": min(rms), "median": median(rms), "most": max(rms)},
        "largest": max(tensor.figures.largest for tensor in members),
        "zeros": sum(tensor.figures.zeros for tensor in members) / elements if elements else 0.0,
        "nonfinite": sum(tensor.figures.nan + tensor.figures.infinite for tensor in members),
        "stable_rank": median(ranks) if ranks else None,
    }


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
        since: an earlier checkpoint of the run, to see how far weights have moved; of the same program.
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
        opened = stack.enter_context(open(path))
        known = first_look(opened)
        chosen = measurable(known, select)
        earlier = stack.enter_context(open(since)) if since is not None else None
        before = first_look(earlier) if earlier else None
        pairs = list(_weights_in_both(known, before, {record.key for _, record in chosen})) if before else []
        total = bytes_of_elements(record for _, record in chosen) + 2 * bytes_of_elements(record for record, _ in pairs)

        def passed(count: int) -> None:
            progress(count, total)

        tensors = measured(opened, known, chosen, spectra=spectra, memory=memory, jobs=jobs, passed=passed)
        changes = _changes(opened, earlier, pairs, memory, passed) if earlier else {}
        return stats_of(opened, known, tensors, earlier, before, changes)


Measurable = Sequence[tuple[Role, StateRecord]]
"""Tensors to measure, with what each is for."""


def measurable(known: FirstLook, select: Sequence[str] = ()) -> Measurable:
    """The weights, momentum, masters and moments, or what is there if the program is unknown.

    Args:
        select: shell patterns; only tensors whose key matches one.

    Raises:
        TargetError: a pattern matches nothing.
    """
    tensors = [(role, tensor) for role in _ROLES for tensor in known.contents.tensors.get(role, ())]
    if not tensors:  # the program is unknown: all that is there
        tensors = [(Role.OTHER, tensor) for tensor in known.manifest.tensors if tensor.shape]
    keys = [tensor.key for _, tensor in tensors]
    for glob in select:
        if not any(fnmatchcase(key, glob) for key in keys):
            raise TargetError(f"no tensor of weights or state matches {glob!r}{did_you_mean(glob, keys)}")
    return [(role, t) for role, t in tensors if not select or any(fnmatchcase(t.key, glob) for glob in select)]


def measured(
    opened: OpenCheckpoint,
    known: FirstLook,
    tensors: Measurable,
    *,
    spectra: bool,
    memory: int,
    jobs: int,
    passed: Callable[[int], None],
) -> tuple[TensorFigures, ...]:
    """The figures of these tensors, those that are not numbers left out; the other arguments are as of `stats`.

    Args:
        passed: receives bytes that have been read.

    Raises:
        SourceError: a chunk is damaged.
        LayoutError: a tensor has a hole or an overlap.
    """
    names = {t.key: p.name for p in known.contents.parameters.values()
             for t in ([p.weight] if p.weight else []) + list(p.state.values())}  # fmt: skip
    sides = zip(_stored(opened, [record for _, record in tensors]), tensors, strict=True)

    def measure(item: tuple[StoredSide, tuple[Role, StateRecord]]) -> TensorFigures | None:
        side, (role, record) = item
        return figures_of(side, names.get(record.key, record.key), str(role), memory // jobs, spectra, passed)

    with ThreadPoolExecutor(jobs) as pool:
        return tuple(figures for figures in pool.map(measure, sides) if figures)


def stats_of(
    opened: OpenCheckpoint,
    known: FirstLook,
    tensors: tuple[TensorFigures, ...],
    earlier: OpenCheckpoint | None,
    before: FirstLook | None,
    changes: Mapping[str, float],
) -> CheckpointStats:
    """The numbers of a checkpoint whose tensors have been measured.

    Args:
        changes: the root mean square of the change since the earlier checkpoint, of weights by key.
    """
    steps = before.step if before else None, known.step
    updates = tuple(_updates(known, steps, changes))
    since = str(earlier.path) if earlier else None
    return CheckpointStats(str(opened.path), since, steps, tensors, updates, tuple(findings_of(tensors, updates)))


def bytes_of_elements(tensors: Iterable[StateRecord]) -> int:
    """The bytes of all their elements."""
    return sum(math.prod(tensor.shape) * itemsize(tensor.dtype) for tensor in tensors)


def _stored(opened: OpenCheckpoint, records: Sequence[StateRecord]) -> list[StoredSide]:
    """Tensors with the places of their elements."""
    return [StoredSide(OutputTensor.copy_of(record), opened.payloads) for record in opened.locate(records)]


def _weights_in_both(known: FirstLook, before: FirstLook, keys: set[str]) -> Iterator[tuple[StateRecord, StateRecord]]:
    """The weights of one shape that both have, as this checkpoint and as the earlier one has them."""
    former = {t.key: t for t in before.contents.tensors.get(Role.WEIGHTS, ())}
    for tensor in known.contents.tensors.get(Role.WEIGHTS, ()):
        other = former.get(tensor.key)
        if tensor.key in keys and other is not None and other.shape == tensor.shape:
            yield tensor, other


def _changes(
    opened: OpenCheckpoint,
    earlier: OpenCheckpoint,
    pairs: Sequence[tuple[StateRecord, StateRecord]],
    memory: int,
    passed: Callable[[int], None],
) -> dict[str, float]:
    """The root mean square of each weight's change.

    Raises:
        SourceError: there is no weight to compare, or one is damaged.
    """
    if not pairs:
        raise SourceError(f"{opened.path} and {earlier.path} have no weights of one key and shape in common")
    now, then = (_stored(side, [pair[n] for pair in pairs]) for n, side in enumerate((opened, earlier)))
    changes = {}
    for one, other in zip(then, now, strict=True):
        found = compare_elements(one, other, Tolerance(), memory, passed).statistics
        assert found is not None, "elements were compared"
        changes[other.tensor.record.key] = found.rms_change
    return changes


def _updates(
    known: FirstLook, steps: tuple[int | float | None, int | float | None], changes: Mapping[str, float]
) -> Iterator[WeightUpdate]:
    """Changes in terms of the steps between and of the learning rate."""
    taken = steps[1] - steps[0] if steps[0] is not None and steps[1] is not None else None
    rates = {name: group.options.get("lr") for group in known.groups.groups for name in group.parameters}
    parameters = {p.weight.key: p for p in known.contents.parameters.values() if p.weight}
    for key, rms in changes.items():
        parameter = parameters.get(key)
        lr = rates.get(parameter.name) if parameter else None
        lr = float(lr) if isinstance(lr, int | float) else None
        per_step = rms / taken if taken and taken > 0 else None
        factor = None
        if parameter and parameter.is_matrix and lr and per_step is not None:
            factor = per_step / lr * math.sqrt(max(parameter.shape[-2:]))
        yield WeightUpdate(key, rms, per_step, lr, factor)
