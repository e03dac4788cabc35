"""The trail of a run: a line for each step and rank, whose numbers add up over ranks to those of the whole model.

Lines are in the run's folder, in a file for each rank and *attempt*: each start, and each restore, begins one.  In an
object store each rank has numbered objects instead.  As what ranks note are shares, trails compare across topologies.
``docs/design/never_lose_a_step.md`` has the reasons.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SourceError
from ..fingerprint import as_hex, combine
from ..wording import counted
from .io.location import Location, Remote, at_each, location
from .io.regular import open_regular

FOLDER = "trail"

WATCHED = 3
"""Steps after a restore that are compared with those of the run before."""

SIGNS = 8
"""Sums of sampled elements under pseudo-random signs.  They are linear: those of a difference tell its size."""

SUMS = ("gradient", "momentum", "weights")
"""The tensors of which a line has a sum of squares, and sums of sampled elements under signs."""

KEPT = "kept"
"""The momentum with which the step began, ``(m - gain * g) / mu``, of which a line has only the latter."""

LINES = 64
"""Lines of a rank in an object: as many steps as a program that is killed may lose of the trail in a store."""

_NAME = re.compile(r"(\d{4,})-rank-(\d{5,})(?:-(\d{5,}))?\.jsonl")

_AT_ONCE = 64
"""Objects of a store that are read together."""

RATE_BOUND, LOSS_BOUND, GRADIENT_BOUND, MOMENTUM_BOUND, WEIGHTS_BOUND, KEPT_BOUND = 1e-6, 0.25, 0.25, 0.1, 0.005, 0.25
"""How far two runs of the same step may be apart: of loss and rate the relative difference, else the norm of the
difference in terms of that of the run before.  Weights may besides be apart by three times what the run has moved since
the restore, as they would be with other data.  The last is for momentum before a step, which is worked out from it."""


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
        parameters: names and sizes of those that are noted, as one number of 16 hex digits.
    """

    step: int
    loss: float | None
    lr: float
    mu: float
    norms: Mapping[str, float]
    signed: Mapping[str, tuple[float, ...]]
    fingerprint: str
    parameters: str

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


@dataclass(frozen=True, slots=True)
class Attempt:
    """What ranks have noted from a start or a restore on.

    Attributes:
        number: from 1.
        ranks: how many there were; 0 if no line of them can be read.
        steps: those that all ranks have noted.
        faults: sentences about lines that are damaged, cut or missing, and so in no step.
    """

    number: int
    ranks: int
    steps: Steps
    faults: tuple[str, ...]


def attempts_in(folder: Location) -> list[int]:
    """Return the numbers of a run's attempts, the oldest first.

    Raises:
        SourceError: the folder cannot be read.
    """
    return sorted(_files(folder))


def steps_of_attempt(folder: Location, attempt: int, wanted: Collection[int]) -> Steps:
    """Return some of the steps that all ranks of an attempt have noted; raises as `attempts_in`."""
    return _attempt(folder, attempt, _files(folder).get(attempt, {}), wanted).steps


def attempts_of(path: str | os.PathLike[str] | Remote) -> tuple[Attempt, ...]:
    """Return what `Series.note` has noted of a run, attempt by attempt; nothing if it has no trail.

    Args:
        path: the folder of the run.

    Raises:
        SourceError: the folder cannot be read.
    """
    folder = location(path, SourceError)
    return tuple(_attempt(folder, number, files) for number, files in sorted(_files(folder).items()))


def steps_of(attempts: Iterable[Attempt]) -> dict[int, TrailStep]:
    """Return all steps in order: the last attempt's where several have noted one."""
    steps: dict[int, TrailStep] = {}
    for attempt in attempts:
        steps |= attempt.steps
    return dict(sorted(steps.items()))


def trail_of(path: str | os.PathLike[str] | Remote) -> dict[int, TrailStep]:
    """Return what `Series.note` has noted of a run, by step: the last attempt's where several have; empty if none has.

    Lines that cannot be read are left out; ``muonckpt diff`` and ``report`` tell of them.

    Args:
        path: the folder of the run.

    Raises:
        SourceError: the folder cannot be read.
    """
    return steps_of(attempts_of(path))


class ObjectLines:
    """A rank's lines in an object store, where nothing grows: every flush writes an object of its own."""

    def __init__(self, folder: Remote, stem: str) -> None:
        self._folder, self._stem = folder, stem
        self._lines: list[bytes] = []
        self._written = 0

    def write(self, line: bytes) -> None:
        self._lines.append(line)
        if len(self._lines) == LINES:
            self.flush()

    def flush(self) -> None:
        if self._lines:
            (self._folder / f"{self._stem}-{self._written:05d}.jsonl").write(b"".join(self._lines))
            self._lines.clear()
            self._written += 1

    def close(self) -> None:
        self.flush()


def new_lines(folder: Location, attempt: int, rank: int) -> FileIO | ObjectLines:
    """Begin the lines of a rank in an attempt; they raise `OSError` where they cannot be written."""
    stem = f"{attempt:04d}-rank-{rank:05d}"
    if isinstance(folder, Remote):
        return ObjectLines(folder / FOLDER, stem)
    return FileIO(folder / FOLDER / f"{stem}.jsonl", "a")


_Files = Mapping[int, Sequence[str]]
"""Names by rank, in the order in which they were written."""


def _files(folder: Location) -> dict[int, _Files]:
    try:
        names = [entry.name for entry in (folder / FOLDER).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise SourceError(f"cannot read {folder / FOLDER}: {error.strerror or error}") from error
    found = defaultdict[int, defaultdict[int, list[str]]](lambda: defaultdict(list))
    numbered = [([*map(int, match.groups("0"))], name) for name in names if (match := _NAME.fullmatch(name))]
    for (attempt, rank, _), name in sorted(numbered):
        found[attempt][rank].append(name)
    return dict(found)


@dataclass(frozen=True, slots=True)
class _Share:
    """What one rank has noted of a step, or several together; ``sums`` are squares, then signed sums."""

    ranks: int
    world: int
    loss: float | None
    lr: float
    mu: float
    sums: NDArray[np.float64]
    fingerprint: int
    parameters: int

    def __add__(self, other: _Share) -> _Share:
        return _Share(
            self.ranks + other.ranks,
            self.world if self.world == other.world else 0,
            None if self.loss is None or other.loss is None else self.loss + other.loss,
            max(self.lr, other.lr),
            max(self.mu, other.mu),
            self.sums + other.sums,
            combine(self.fingerprint, other.fingerprint),
            combine(self.parameters, other.parameters),
        )


def _attempt(folder: Location, number: int, files: _Files, wanted: Collection[int] | None = None) -> Attempt:
    """Read an attempt; of its steps only those that are ``wanted``."""
    together: dict[int, _Share] = {}
    unread: list[str] = []
    for own, bad in _by_rank(folder / FOLDER, files, wanted):
        unread += bad
        for step, share in own.items():
            together[step] = together[step] + share if step in together else share
    world = max((share.world for share in together.values()), default=0)
    faults = []
    if unread:
        more = f" …, {len(unread)} in all" if len(unread) > 1 else ""
        faults.append(f"attempt {number}: {unread[0]}{more}")
    if missing := world - sum(rank < world for rank in files):
        first = ", ".join(map(str, islice((rank for rank in range(world) if rank not in files), 4)))
        ranks = f"{first}{' …' * (missing > 4)}"
        faults.append(f"attempt {number}: nothing is here of {missing} of {counted(world, 'rank')}: {ranks}")
    partial_steps = sorted(step for step, share in together.items() if share.ranks != share.world)
    if partial_steps:
        which = f"{partial_steps[0]} to {partial_steps[-1]}" if len(partial_steps) > 1 else f"{partial_steps[0]}"
        steps = counted(len(partial_steps), "step")
        faults.append(f"attempt {number}: {steps} ({which}) not noted by all ranks, and left out")
    steps_noted = {
        step: _together(step, share) for step, share in sorted(together.items()) if share.ranks == share.world
    }
    return Attempt(number, world, steps_noted, tuple(faults))


def _by_rank(
    place: Location, files: _Files, wanted: Collection[int] | None
) -> Iterator[tuple[dict[int, _Share], list[str]]]:
    """Yield the lines of each rank by step, the last where a step is noted twice, and what cannot be read."""

    def text(name: str) -> bytes | SourceError:
        try:
            with open_regular(place / name) as file:
                return file.read(0, file.size)
        except SourceError as error:
            return error

    named = iter([(rank, name) for rank, names in sorted(files.items()) for name in names])
    rank, own, bad = -1, dict[int, _Share](), list[str]()
    while some := [*islice(named, _AT_ONCE if isinstance(place, Remote) else 1)]:
        for (of, name), found in zip(some, at_each(place, text, [name for _, name in some]), strict=True):
            if of != rank:
                yield own, bad
                rank, own, bad = of, {}, []
            if isinstance(found, SourceError):
                bad.append(str(found))
                continue
            lines = found.splitlines(keepends=True)
            for number, line in enumerate(lines, 1):
                try:
                    if wanted is None or int(line[len(b'{"step": ') : line.index(b",")]) in wanted:
                        step, own_share = _parsed(line)
                        own[step] = own_share
                except (ArithmeticError, KeyError, TypeError, ValueError, RecursionError):
                    bad.append(f"line {number} of {len(lines)} in {name} is {_how(line)}")
    yield own, bad


def _how(line: bytes) -> str:
    return "damaged" if line.endswith(b"\n") else "cut off"


def _parsed(line: bytes) -> tuple[int, _Share]:
    """Return what a line says; raises whatever Python does of data that are not as `Pending.line` writes them."""
    if not line.endswith(b"\n"):
        raise ValueError("it was cut")
    noted = json.loads(line)
    squares, signed = (np.array(noted[name], np.float64) for name in ("squares", "signed"))
    if squares.shape != (len(SUMS),) or signed.shape != (len(SUMS) + 1, SIGNS):
        raise ValueError("expected as many sums as are written")
    loss = None if noted["loss"] is None else float(noted["loss"])
    sums = np.concatenate([squares, signed.reshape(-1)])
    world, lr, mu = int(noted["world"]), float(noted["lr"]), float(noted["mu"])
    share = _Share(1, world, loss, lr, mu, sums, int(noted["fingerprint"]), int(noted["parameters"]))
    return int(noted["step"]), share


def _together(step: int, share: _Share) -> TrailStep:
    squares, signed = share.sums[: len(SUMS)], share.sums[len(SUMS) :].reshape(-1, SIGNS)
    with np.errstate(invalid="ignore"):  # of gradients that are not known, or not finite
        norms = np.sqrt(squares).tolist()
    return TrailStep(
        step,
        None if share.loss is None else share.loss / share.ranks,
        share.lr,
        share.mu,
        dict(zip(SUMS, norms, strict=True)),
        {what: tuple(own) for what, own in zip((*SUMS, KEPT), signed.tolist(), strict=True)},
        as_hex(share.fingerprint),
        as_hex(share.parameters),
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
        if own[step].parameters != past[step].parameters:
            return _others(step, restored)
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

_JUMP = 2.1
"""How many times larger or smaller a rate may be than that of the step before, or where that was bound: a warm-up
doubles it at most."""


def _others(step: int, restored: int) -> ResumedRun:
    return ResumedRun(
        False,
        f"step {step} is not compared with the run before, restored at step {restored}: optimizers have other "
        "parameters now, or of other names or shapes",
    )


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
    if first.parameters != last.parameters:
        return _others(first.step, restored)
    told = f"step {first.step} does not go on from step {restored}: "
    trend = 2 * last.lr - past[restored - 1].lr if restored - 1 in past else last.lr
    if last.lr and not min(last.lr, trend) / _JUMP <= first.lr <= max(last.lr, trend) * _JUMP:
        return ResumedRun(
            False,
            f"{told}the learning rate is {first.lr:.6g} behind {last.lr:.6g}: was the schedule restored, or its "
            "warm-up begun anew?",
        )
    moved = last.apart("weights", past[restored - 1]) if restored - 1 in past else _UNKNOWN_MOVE
    quicker = max(1.0, first.lr / last.lr) if last.lr else math.inf
    if (weights := first.apart("weights", last)) > 10 * quicker * moved + WEIGHTS_BOUND:
        return ResumedRun(False, told + _another_model("in one step", weights))
    if (momentum := first.apart(KEPT, last, "momentum")) > KEPT_BOUND:
        gap = f"momentum differs by {momentum:.0%} of its norm: {_momentum(first, last, 'momentum')}"
        return ResumedRun(False, told + gap)
    return ResumedRun(True, f"step {first.step} can follow step {restored}, with which the run before ended")
