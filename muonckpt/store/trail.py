"""The trail of a run: a line for each step and rank, whose numbers add up over ranks to those of the whole model.

Lines are in the run's folder, in a file for each rank and *attempt*: each start, and each restore, begins one.  As what
ranks note are shares, trails compare across topologies.  ``docs/design/never_lose_a_step.md`` has the reasons.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SourceError
from ..fingerprint import as_hex, combine
from ..wording import counted
from .io.location import Location, Remote, location

FOLDER = "trail"

WATCHED = 3
"""Steps after a restore that are compared with those of the run before."""

SIGNS = 8
"""Sums of sampled elements under pseudo-random signs.  They are linear: those of a difference tell its size."""

SUMS = ("gradient", "momentum", "weights")
"""The tensors of which a line has a sum of squares, and sums of sampled elements under signs."""

KEPT = "kept"
"""The momentum with which the step began, ``(m - gain * g) / mu``, of which a line has only the latter."""

_NAME = re.compile(r"(\d{4,})-rank-\d{5,}\.jsonl")

RATE_BOUND, LOSS_BOUND, GRADIENT_BOUND, MOMENTUM_BOUND, WEIGHTS_BOUND, KEPT_BOUND = 1e-6, 0.25, 0.25, 0.1, 0.005, 0.25
"""How far two runs of the same step may be apart: of loss and rate the relative difference, else the norm of the
difference in terms of that of the run before.  Weights may besides be apart by three times what the run has moved since
the restore, as they would be with other data.  The last is for momentum before a step, which is worked out from it."""


def name_of(attempt: int, rank: int) -> str:
    return f"{attempt:04d}-rank-{rank:05d}.jsonl"


@dataclass(frozen=True, slots=True)
class TrailStep:
    """A step of a run, with the numbers of all ranks together.

    Attributes:
        loss: the mean over ranks; None unless all gave it.
        lr: the largest of any parameter group.
        mu: the largest of any group: what stays of momentum in a step.
        norms: by `SUMS`, after the step; NaN of gradients if they are not known.
        signed: by `SUMS`, and of what momentum was before, the `SIGNS` sums.
        fingerprint: of sampled weights, 16 hex digits.
    """

    step: int
    loss: float | None
    lr: float
    mu: float
    norms: Mapping[str, float]
    signed: Mapping[str, tuple[float, ...]]
    fingerprint: str

    def apart(self, what: str, other: TrailStep, theirs: str = "") -> float:
        """Return the norm of the difference from another step, estimated, in terms of that step's norm.

        It is 0 if nothing is known of the other step.
        """
        own, past = np.array(self.signed[what]), np.array(other.signed[theirs or what])
        size, gap = float(np.linalg.norm(past)), float(np.linalg.norm(own - past))
        return 0.0 if math.isnan(size) or not (gap or size) else gap / size if size else math.inf

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Steps = Mapping[int, TrailStep]


def attempts_in(folder: Location) -> list[int]:
    """Return the numbers of a run's attempts, the oldest first.

    Raises:
        SourceError: the folder cannot be read.
    """
    try:
        names = [entry.name for entry in (folder / FOLDER).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SourceError(f"cannot read {folder / FOLDER}: {error.strerror or error}") from error
    return sorted({int(match[1]) for name in names if (match := _NAME.fullmatch(name))})


def steps_of_attempt(folder: Location, attempt: int, wanted: Collection[int] | None = None) -> dict[int, TrailStep]:
    """Return the steps that all ranks of an attempt have noted; a line that was cut ends its file.

    Args:
        wanted: only these.
    """
    lines = defaultdict[int, list[dict[str, Any]]](list)
    world = 0
    while True:  # the files of an attempt are of ranks 0, 1, … of its group
        own = dict(_lines(folder / FOLDER / name_of(attempt, world), wanted))
        if not own and not (folder / FOLDER / name_of(attempt, world)).exists():
            break
        world += 1
        for step, line in own.items():
            lines[step].append(line)
    return {
        step: _together(step, noted)
        for step, noted in sorted(lines.items())
        if len(noted) == noted[0]["world"] == world
    }


def trail_of(path: str | os.PathLike[str] | Remote) -> dict[int, TrailStep]:
    """Return what `Series.note` has noted of a run, by step: the last attempt's where several have; empty if none has.

    Args:
        path: the folder of the run.

    Raises:
        SourceError: the folder cannot be read.
    """
    folder = location(path, SourceError)
    steps: dict[int, TrailStep] = {}
    for attempt in attempts_in(folder):
        steps |= steps_of_attempt(folder, attempt)
    return dict(sorted(steps.items()))


def _lines(file: Location, wanted: Collection[int] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    if not isinstance(file, Path) or not file.exists():
        return
    with file.open("rb") as opened:
        for raw in opened:
            try:
                if wanted is not None and int(raw[len(b'{"step": ') : raw.index(b",")]) not in wanted:
                    continue
                line = json.loads(raw) if raw.endswith(b"\n") else None
            except ValueError:
                return
            if line is None:
                return
            yield line["step"], line


def _together(step: int, ranks: Sequence[Mapping[str, Any]]) -> TrailStep:
    losses = [line["loss"] for line in ranks]
    return TrailStep(
        step,
        None if None in losses else sum(losses) / len(losses),
        max(line["lr"] for line in ranks),
        max(line["mu"] for line in ranks),
        {what: math.sqrt(sum(line["squares"][own] for line in ranks)) for own, what in enumerate(SUMS)},
        {
            what: tuple(np.sum([line["signed"][n] for line in ranks], 0).tolist())
            for n, what in enumerate((*SUMS, KEPT))
        },
        as_hex(combine(*(line["fingerprint"] for line in ranks))),
    )


# --- Whether a run goes on as another did -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """Whether a resumed run is the run that it resumes, in a sentence; ``same`` is False if it is not."""

    same: bool
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def before(folder: Location, attempt: int, restored: int) -> Steps:
    """Return the steps around a restored one of the last attempt before this that took it, or that began there."""
    around = range(restored - 1, restored + WATCHED + 1)
    found: Steps = {}
    for earlier in reversed([one for one in attempts_in(folder) if one < attempt]):
        steps = steps_of_attempt(folder, earlier, around)
        if restored in steps:
            return steps
        found = steps or found
    return found


def judge(own: Steps, past: Steps, restored: int) -> ResumedRun | None:
    """Compare the first steps after a restore with those of the run before; None while nothing can be said.

    Where that run ended with the restored step, the first step is held against that one: it is told then if the model
    is another, or its momentum.
    """
    went_on = [step for step in range(restored + 1, restored + WATCHED + 1) if step in past]
    if not went_on:
        return _ends(own, past, restored)
    moved = 0.0
    for step in went_on:
        if step not in own:
            return None
        moved += past[step].apart("weights", past[step - 1]) if step - 1 in past else _UNKNOWN_MOVE
        if fault := _fault(own[step], past[step], moved):
            return ResumedRun(
                False, f"the run restored at step {restored} is not the run that went on from there: {fault}"
            )
    which = f"the first {counted(len(went_on), 'step')} after step {restored}: as in the run before"
    if all(own[step].fingerprint == past[step].fingerprint for step in went_on):
        return ResumedRun(True, f"{which}, bit for bit")
    most = {what: max(own[step].apart(what, past[step]) for step in went_on) for what in SUMS}
    parts = ", ".join(f"{what} by {apart:.2g}" for what, apart in most.items())
    return ResumedRun(True, f"{which}, within bounds; at most they differ, in terms of norms: {parts}")


_UNKNOWN_MOVE = 0.05


def _fault(own: TrailStep, past: TrailStep, moved: float) -> str | None:
    """Return what differs in a step, by its causes: rate; what gradients come from, model and data; momentum."""
    at = f"at step {own.step}"
    if not abs(own.lr - past.lr) <= RATE_BOUND * abs(past.lr):
        return (
            f"{at} the learning rate is {own.lr:.6g} where it was {past.lr:.6g}: was the schedule restored, or its "
            "warm-up begun anew?"
        )
    weights, gradient = own.apart("weights", past), own.apart("gradient", past)
    if not weights <= 3 * moved + WEIGHTS_BOUND and not gradient <= GRADIENT_BOUND:
        return _another_model(at, weights)
    if not gradient <= GRADIENT_BOUND:
        norms = f"its norm is {own.norms['gradient']:.4g} where it was {past.norms['gradient']:.4g}"
        return f"{at} the gradient differs by {gradient:.0%} of its norm ({norms}): other data, or another scale"
    if not (momentum := own.apart("momentum", past)) <= MOMENTUM_BOUND:
        return f"{at} momentum differs by {momentum:.0%} of its norm: {_momentum(own, past, KEPT)}"
    if not weights <= 3 * moved + WEIGHTS_BOUND:
        return _another_model(at, weights)
    if None not in (own.loss, past.loss) and not abs(own.loss - past.loss) <= LOSS_BOUND * abs(past.loss):  # type: ignore[operator,arg-type]
        return f"{at} the loss is {own.loss:.6g} where it was {past.loss:.6g}: other data"
    return None


def _another_model(at: str, apart: float) -> str:
    return f"{at} weights differ by {apart:.0%} of their norm: it is another model"


def _momentum(own: TrailStep, past: TrailStep, what: str) -> str:
    """Say what the momentum was with which a step began, where that is not what it was in the past."""
    began, was = (float(np.linalg.norm(signed)) for signed in (own.signed[KEPT], past.signed[what]))
    if not math.isfinite(began) or not was:
        return "it is not this run's, or the data are not"
    if (ratio := began / was) < 0.1:
        return "it began at zero"
    convention = 1 / (1 - own.mu) if own.mu < 1 else math.nan
    for factor, name in ((convention, "1 / (1 - mu)"), (1 / convention, "1 - mu")):
        if 0.8 < ratio / factor < 1.25:
            return f"it began {ratio:.3g} times as large, as by another convention: {name} = {factor:.3g}"
    return f"it began {ratio:.3g} times as large, and is not this run's"


def _ends(own: Steps, past: Steps, restored: int) -> ResumedRun | None:
    """Hold the first step after a restore against the restored one."""
    if restored not in past or restored + 1 not in own:
        return None
    first, last = own[restored + 1], past[restored]
    told = f"step {first.step} does not go on from step {restored}: "
    moved = last.apart("weights", past[restored - 1]) if restored - 1 in past else _UNKNOWN_MOVE
    quicker = max(1.0, first.lr / last.lr) if last.lr else math.inf
    if (weights := first.apart("weights", last)) > 10 * quicker * moved + WEIGHTS_BOUND:
        return ResumedRun(False, told + _another_model("in one step", weights))
    if (momentum := first.apart(KEPT, last, "momentum")) > KEPT_BOUND:
        gap = f"momentum differs by {momentum:.0%} of its norm: {_momentum(first, last, 'momentum')}"
        return ResumedRun(False, told + gap)
    return ResumedRun(True, f"step {first.step} can follow step {restored}, with which the run before ended")
