"""The published sets of Newton-Schulz coefficients: one polynomial of the singular values per step.

``docs/design/newton_schulz.md`` says how to choose one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice, repeat
from types import MappingProxyType
from typing import Any

from .errors import ArgumentError

Triple = tuple[float, float, float]

Plain = str | Triple | tuple[tuple[str, Any], ...]
"""Coefficients as plain values: the name of a published set, a triple for every step, or the fields of a user's set."""

#: The classic quintic, ``p(1) = 1`` and ``p'(1) = p''(1) = 0``: it draws any singular value between 0 and 1.5
#: towards 1, so appending it never undoes what the steps before it reached.
SAFE_TAIL: Triple = (1.875, -1.25, 0.375)

_KELLER: Triple = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True, slots=True)
class CoefficientSet:
    """A named polynomial per step.

    Attributes:
        steps: the triples ``(a, b, c)`` of the first steps, at least one.
        source: where the numbers come from.
        tail: the triple of every later step.  A list never restarts: its first triples are made for tiny singular
            values and throw those near 1 far away, even through zero.
        norm_scale: the matrix is divided by its Frobenius norm times this safety margin.

    Raises:
        ArgumentError: there is no step, or a number is not finite or out of range.
    """

    name: str
    steps: tuple[Triple, ...]
    source: str
    tail: Triple = SAFE_TAIL
    norm_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.steps:
            raise ArgumentError(f"coefficient set {self.name!r} needs at least one step")
        for triple in (*self.steps, self.tail):
            if len(triple) != 3 or not all(map(math.isfinite, triple)):
                raise ArgumentError(f"coefficient set {self.name!r}: want three finite numbers, got {triple}")
        if not 0 < self.norm_scale < 2:
            raise ArgumentError(f"coefficient set {self.name!r}: want 0 < norm_scale < 2, got {self.norm_scale}")

    def schedule(self, steps: int) -> tuple[Triple, ...]:
        """Return the triples of ``steps`` steps: the first of the list, then the tail as often as needed.

        Raises:
            ValueError: ``steps`` is less than 1.
        """
        if steps < 1:
            raise ArgumentError(f"Newton-Schulz needs at least one step, got steps={steps}")
        return self.steps[:steps] + (self.tail,) * (steps - len(self.steps))


def _damp(steps: tuple[Triple, ...], margin: float) -> tuple[Triple, ...]:
    """Return ``p(x / margin)`` for every polynomial: a singular value pushed above 1 by rounding then does no harm."""
    return tuple((a / margin, b / margin**3, c / margin**5) for a, b, c in steps)


_SETS = (
    CoefficientSet(
        "keller",
        (_KELLER,),
        "Keller Jordan, kellerjordan.github.io/posts/muon; also the default of torch.optim.Muon",
        # The same at every step by design: values end between 0.68 and 1.14, and never settle.
        tail=_KELLER,
    ),
    CoefficientSet(
        "quintic",
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        "You Jiacheng, x.com/YouJiacheng/status/1905861218138804534; as in modded-nanogpt, dion and XTuner",
    ),
    CoefficientSet(
        "polar_express",
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        "Polar Express, arXiv 2505.16932, damped by 1.01 as in its algorithm 1; as in Emerging-Optimizers",
    ),
    CoefficientSet(
        "polar_express_dion",
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        "Polar Express for five steps, all but the last damped by 1.02; as in modded-nanogpt and dion",
        norm_scale=1.02,
    ),
    CoefficientSet(
        "polar_express_gram",
        _damp(
            (
                (8.28721201814563, -23.595886519098837, 17.300387312530933),
                (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
                (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
                (3.3184196573706015, -2.488488024314874, 0.51004894012372),
                (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            ),
            margin=1.05,
        ),
        "Polar Express, arXiv 2505.16932, damped by 1.05 as in Dao-AILab/gram-newton-schulz",
    ),
    CoefficientSet(
        "cans",
        _damp(
            (
                (8.4703, -25.1081, 18.6293),
                (4.1828, -3.1087, 0.5806),
                (3.9619, -2.9541, 0.5630),
                (3.2866, -2.4647, 0.5074),
                (2.2737, -1.6447, 0.4162),
            ),
            # As published it lives on the very edge: values that round to more than 1 at its maxima grow by 12 a step,
            # up to infinity in 16 bits for matrices of one or two large singular values.
            margin=1.01,
        ),
        "CANS (Remez, adaptive interval), arXiv 2506.10935, as in Emerging-Optimizers, but damped by 1.01",
    ),
    CoefficientSet(
        "aol",
        (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        "thib-s/flash-newton-schulz, made for its AOL preconditioner; plain in Emerging-Optimizers",
    ),
    CoefficientSet(
        "deepseek_v4",
        (_KELLER,) * 8 + ((2.0, -1.5, 0.5),) * 2,
        "DeepSeek-V4 report: eight steps that grow, two that settle; meant for ten steps",
    ),
    CoefficientSet(
        "cubic5",
        (
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
        "relaxed cubic schedule, arXiv 2606.00371: two products a step instead of three",
    ),
)

#: The published sets by name, with the numbers of their sources, digit by digit.
COEFFICIENTS: Mapping[str, CoefficientSet] = MappingProxyType({published.name: published for published in _SETS})


EMERGING_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "simple": "keller",
        "quintic": "quintic",
        "polar_express": "polar_express",
        "cans": "cans",
        "aol": "aol",
        "deepseekv4": "deepseek_v4",
        "cubic5": "cubic5",
    }
)
"""Our name of each ``coefficient_type`` of Emerging-Optimizers, which Megatron-LM calls ``muon_coefficient_type``."""

_REPEATING_TYPES = frozenset({"polar_express", "cans", "deepseekv4"})
"""The types whose last triple is repeated past the end of their list; the lists of all others begin again there."""


def emerging_coefficients(kind: str, steps: int) -> str | tuple[Triple, ...]:
    """Return coefficients that make the update of Emerging-Optimizers' ``coefficient_type`` with so many steps.

    It is the published set, or a triple for each step where theirs goes on otherwise than ours: ``"aol"`` has four
    triples, so that the fifth of the default five steps there is the first one again.  Only ``"cans"`` stays damped.

    Source: ``newton_schulz`` of NVIDIA-NeMo/Emerging-Optimizers fd77292 (``muon_utils.py``).

    Raises:
        ArgumentError: there is no such type, or ``"cubic5"`` is to have another number of steps than its five.
    """
    if kind not in EMERGING_TYPES:
        raise ArgumentError(f"unknown coefficient type {kind!r}, expected one of {', '.join(EMERGING_TYPES)}")
    published = COEFFICIENTS[EMERGING_TYPES[kind]]
    if kind == "cubic5" and steps != len(published.steps):
        raise ArgumentError(f"cubic5 is a schedule of {len(published.steps)} steps, found steps={steps}")
    past_end = repeat(published.steps[-1]) if kind in _REPEATING_TYPES else cycle(published.steps)
    schedule = tuple(islice(chain(published.steps, past_end), steps))
    return published.name if kind == "cans" or schedule == published.schedule(steps) else schedule


Coefficients = str | CoefficientSet | Triple | Sequence[Triple] | Plain


def coefficient_set(coefficients: Coefficients) -> CoefficientSet:
    """Return the set of a name, a set, a triple for every step or for each, or a result of :func:`plain_coefficients`.

    Raises:
        ArgumentError: no set has this name, or these are not triples of finite numbers.
    """
    if isinstance(coefficients, CoefficientSet):
        return coefficients
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            names = ", ".join(COEFFICIENTS)
            raise ArgumentError(f"unknown Newton-Schulz coefficients {coefficients!r}, expected one of {names}")
        return COEFFICIENTS[coefficients]
    # One triple is for every step; rows are triples of the first steps, or the fields of a set.
    numbers: Any = coefficients
    try:
        if len(numbers) == 3 and all(isinstance(number, int | float) for number in numbers):
            return CoefficientSet("custom", (_triple(numbers),), "given by the user", _triple(numbers))
        fields = dict(numbers) if all(isinstance(name, str) for name, *_ in numbers) else {}
        steps = tuple(_triple(step) for step in fields.pop("steps", numbers))
        tail = _triple(fields.pop("tail", SAFE_TAIL))
        return CoefficientSet("custom", steps, "given by the user", tail, **fields)
    except TypeError as error:
        raise ArgumentError(f"expected triples (a, b, c) of finite numbers, got {coefficients!r}") from error


def plain_coefficients(coefficients: Coefficients) -> Plain:
    """Return coefficients as plain values for a parameter group: a published set's name, or the numbers of another."""
    polynomials = coefficient_set(coefficients)
    fields = tuple((field, getattr(polynomials, field)) for field in ("steps", "tail", "norm_scale"))
    # A set with the numbers of a published one gets its name, so that options compare equal.
    for name, published in COEFFICIENTS.items():
        if all(getattr(published, field) == value for field, value in fields):
            return name
    if polynomials.steps == (polynomials.tail,) and polynomials.norm_scale == 1:
        return polynomials.tail
    return fields


def _triple(numbers: Sequence[float]) -> Triple:
    a, b, c = map(float, numbers)
    return a, b, c
