"""What looks odd in a checkpoint's numbers, and what it usually means."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ..look.contents import Role, unnumbered
from .tensor_figures import TensorFigures

APART = 5.0
"""How many times larger or smaller than the median of its siblings a tensor stands out."""

_LEAST_SIBLINGS = 3
_COLLAPSED = 1.1
"""A stable rank below which one direction is all there is of a momentum."""


_COMPARED: Mapping[str, Callable[[TensorFigures], float | None]] = {
    "rms": lambda tensor: tensor.figures.rms,
    "stable_rank": lambda tensor: tensor.stable_rank,
}
"""What is compared with siblings."""


@dataclass(frozen=True, slots=True)
class Oddity:
    """Something odd: a ``kind`` for programs, what was found, what that usually ``means``, and the keys."""

    kind: str
    message: str
    means: str
    keys: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "message": self.message, "means": self.means, "keys": self.keys}


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """How a weight changed between two checkpoints.

    Attributes:
        rms: the root mean square of the change.
        per_step: the same divided by the number of steps; None if that is unknown.
        lr: the learning rate of its group in the later checkpoint; None if unknown.
        factor: ``per_step / lr * √max(rows, columns)`` of a matrix: what the update is scaled by, at least, if Muon
            makes it.  It is less than the scale as far as updates do not point one way; None if a part is unknown.
    """

    key: str
    rms: float
    per_step: float | None
    lr: float | None
    factor: float | None

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "rms": self.rms, "per_step": self.per_step, "lr": self.lr, "factor": self.factor}


def siblings_of(tensors: Sequence[TensorFigures]) -> Mapping[tuple[str, str], list[TensorFigures]]:
    """The tensors by what they are in all layers: the key with layers and experts as ``*``, and the role."""
    groups: defaultdict[tuple[str, str], list[TensorFigures]] = defaultdict(list)
    for tensor in tensors:
        groups[unnumbered(tensor.key), tensor.role].append(tensor)
    return groups


def findings_of(tensors: Sequence[TensorFigures], updates: Sequence[WeightUpdate]) -> Iterator[Oddity]:
    """Everything that is odd, the gravest first."""
    bad = [t.key for t in tensors if t.figures.nan or t.figures.infinite]
    if bad:
        means = "a step that diverged or overflowed: go back to a checkpoint before it"
        yield _finding("nonfinite", bad, "has infinite or NaN elements", "have infinite or NaN elements", means)
    groups = siblings_of(tensors)
    zero = [t for t in tensors if t.figures.elements and t.figures.zeros == t.figures.elements]
    momenta = [t.key for t in zero if t.role == Role.MOMENTUM]
    if momenta:
        means = "no gradient has come: a frozen or unused parameter, an expert without tokens, or state that was lost"
        yield _finding("zero_momentum", momenta, "momentum is all zeros", "momenta are all zeros", means)
    for what, value in _COMPARED.items():
        for (pattern, _), members in groups.items():
            known = [(t, v) for t in members if (v := value(t))]
            if len(known) < _LEAST_SIBLINGS:
                continue
            middle = median(v for _, v in known)
            far = [t.key for t, v in known if not middle / APART <= v <= middle * APART]
            if far:
                words = "an RMS" if what == "rms" else "a stable rank"
                is_far = f"{words} more than {APART:g} times off the median {middle:.3g} of {pattern}"
                means = (
                    "a layer that trains otherwise than its siblings: its initialisation, rate or data, or damage"
                    if what == "rms"
                    else "a matrix with other structure than its siblings: a collapsed, fused or transposed one"
                )
                yield _finding(f"outlier_{what}", far, f"has {is_far}", f"have {is_far}", means)
    flat = [
        t.key
        for t in tensors
        if t.role == Role.MOMENTUM and min(t.shape[-2:], default=0) >= 8 and (t.stable_rank or 2) < _COLLAPSED
    ]
    if flat:
        means = "one direction dominates: few tokens, a dead layer above, or gradients that all agree"
        yield _finding("collapsed", flat, "momentum has rank one", "momenta have rank one", means)
    still = [update.key for update in updates if update.rms == 0]
    if still:
        means = "frozen, without gradients, or stale in one of the checkpoints"
        yield _finding("still", still, "weight has not changed", "weights have not changed", means)
    by_kind: defaultdict[str, list[WeightUpdate]] = defaultdict(list)
    for update in updates:
        if update.factor:
            by_kind[unnumbered(update.key)].append(update)
    for pattern, alike in by_kind.items():
        middle = median(update.factor or 0 for update in alike)
        far = [u.key for u in alike if not middle / APART <= (u.factor or 0) <= middle * APART]
        if len(alike) >= _LEAST_SIBLINGS and far:
            means = "another method or rate steps it than its siblings (Muon off, a group of its own)"
            is_far = f"changed more than {APART:g} times off the median for its rate ({pattern})"
            yield _finding("outlier_update", far, is_far, is_far, means)


def _finding(kind: str, keys: Sequence[str], one: str, many: str, means: str) -> Oddity:
    named = ", ".join(keys[:3]) + " …" * (len(keys) > 3)
    noun = {"nonfinite": "tensor", "outlier_rms": "tensor", "outlier_stable_rank": "matrix"}.get(kind, "")
    plural = {"tensor": "tensors", "matrix": "matrices"}.get(noun, "")
    text = f"1 {noun} {one}" if len(keys) == 1 else f"{len(keys)} {plural} {many}"
    return Oddity(kind, f"{' '.join(text.split())}: {named}", means, tuple(keys))
