"""Conversion between the momentum conventions: sum and exponential moving average.

A sum ``m = mu * m + g`` and an average ``m = mu * m + (1 - mu) * g`` of the same gradients with the same, constant
``mu`` differ by the factor ``1 - mu`` (also with Nesterov's lookahead), so a multiplication of every element converts
one to the other.  A forgotten factor raises no error; it only weighs old gradients against new ones by
``1 / (1 - mu)``.  So a convention is never assumed: it is recorded in the checkpoint, documented for the program that
wrote it, or given by the user.

Products are computed in float64 and rounded once to the tensor's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import SourceError
from ...vocabulary import Convention

Words = NDArray[Any]
"""Raw elements as unsigned words of their size; elements of 16 bytes as two words each, in a last dim of 2."""

Values64 = NDArray[np.float64]

NATIVE_FLOATS: Mapping[str, str] = MappingProxyType({"float64": "<f8", "float32": "<f4", "float16": "<f2"})
"""The floating-point dtypes that numpy has, by torch's names."""

STATE_DTYPES = ("float32", "bfloat16")
"""The dtypes to which state can be rounded."""


class WeightsFrom(StrEnum):
    """What weights are made of where the source has them twice: rounded in the model, in float32 in the optimizer."""

    MASTERS = "masters"
    """The optimizer's float32 masters, which then are no state any more."""
    MODEL = "model"
    """The model's; the masters are left out."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the user says about the state if the checkpoint does not.

    Attributes:
        convention: the convention of the source (``--convention``).
        target: the convention to write if the target's dialect has none of its own (``--target-convention``).
        mu: the momentum coefficient of parameters whose group does not have one (``--mu``).
        step: the number of steps taken, if the target stores it and the source does not (``--step``).
        fill_missing: whether the state that parameters of groups lack is written as zeros (``--fill-missing``).
        weights: what weights are made of (``--weights``); None: both stay, if the target has a place for masters.
        state_dtype: the dtype of momentum and moments (``--state-dtype``); None: that of the source.
    """

    convention: Convention | None = None
    target: Convention | None = None
    mu: float | None = None
    step: int | None = None
    fill_missing: bool = False
    weights: WeightsFrom | None = None
    state_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.mu is not None:
            _check_mu(self.mu, "--mu")


def spoken(convention: Convention | None) -> str:
    """The convention in a word."""
    return {None: "unknown", Convention.EMA: "average", Convention.SUM: "sum"}[convention]


def _check_mu(mu: float, where: str) -> float:
    """Check a momentum coefficient, and return it.

    Raises:
        SourceError: momentum cannot be converted with it.
    """
    if not 0 <= mu < 1:
        raise SourceError(f"{where}: expected a momentum coefficient in [0, 1), found {mu!r}")
    return mu


def agreed_convention(about: str, flag: str, sources: Mapping[str, Convention | None]) -> Convention | None:
    """The convention that the sources name, None if none does; ``flag`` is the option by which a user gives it.

    Raises:
        SourceError: two sources name different conventions.
    """
    named = {source: convention for source, convention in sources.items() if convention is not None}
    if len(set(named.values())) > 1:
        statements = ", ".join(f"{source} says {convention}" for source, convention in named.items())
        raise SourceError(
            f"{about}: {statements}; leave {flag} out if the checkpoint is right, or give "
            "--from dcp if another program wrote it"
        )
    return next(iter(named.values()), None)


def momentum_factor(source: Convention | None, target: Convention | None, mu: float | None, about: str) -> float | None:
    """The factor for a momentum; None if nothing changes, so that the bytes can be copied.

    Raises:
        SourceError: the convention of the source, or the coefficient, is needed and unknown.
    """
    if target is None or source == target:
        return None
    if source is None:
        raise SourceError(
            f"{about}: the target follows convention {target}, but that of the source is unknown; "
            f"give --convention {Convention.EMA} or --convention {Convention.SUM}"
        )
    if mu is None:
        raise SourceError(f"{about}: converting {source} to {target} needs the momentum coefficient; give --mu")
    _check_mu(mu, about)
    return 1 - mu if target is Convention.EMA else 1 / (1 - mu)


def _read_native(kind: str) -> Callable[[Words], Values64]:
    return lambda words: words.view(kind).astype(np.float64)


def _write_native(kind: str) -> Callable[[Values64], Words]:
    return lambda values: values.astype(kind).view(f"<u{np.dtype(kind).itemsize}")


def _read_bfloat16(words: Words) -> Values64:
    values: Values64 = (words.astype("<u4") << 16).view("<f4").astype(np.float64)
    return values


def bfloat16_words(values: Values64) -> Words:
    """The bits of the nearest numbers of bfloat16, ties to even.

    Rounds to float32 first.  That changes the second rounding only where it gives the middle of two numbers of
    bfloat16, and the value is not it: there the float32 number beside it, on the value's side, is taken.
    """
    near = values.astype("<f4")
    bits = near.view("<u4")
    middle = (bits & 0xFFFF) == 0x8000
    if middle.any():
        back = near.astype(np.float64)
        inexact = middle & (back != values)
        if inexact.any():
            above = np.abs(values) > np.abs(back)
            bits = bits + (inexact & above).astype("<u4") - (inexact & ~above).astype("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    words: Words = rounded.astype("<u2")
    nans = np.isnan(values)
    if nans.any():
        words[nans] = near.view("<u4")[nans] >> 16 | 0x40
    return words


_FLOATS: Mapping[str, tuple[Callable[[Words], Values64], Callable[[Values64], Words]]] = MappingProxyType(
    {name: (_read_native(kind), _write_native(kind)) for name, kind in NATIVE_FLOATS.items()}
    | {"bfloat16": (_read_bfloat16, bfloat16_words)}
)
"""How elements become float64, and how they are rounded from there."""


def scaled(words: Words, dtype: str, by: float, to: str | None = None) -> Words:
    """Elements multiplied by a factor, each rounded once (to nearest, ties to even).

    Args:
        words: the raw elements, of any shape.
        dtype: torch's name of their dtype.
        to: that of the result; None: the same.

    Raises:
        SourceError: elements of these dtypes cannot be computed.
    """
    for name in (dtype, to or dtype):
        if name not in _FLOATS:
            raise SourceError(f"state of dtype {name} cannot be scaled or cast; expected one of {', '.join(_FLOATS)}")
    read, _ = _FLOATS[dtype]
    _, write = _FLOATS[to or dtype]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return write(read(words) * by)
