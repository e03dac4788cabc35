"""Conversion between the momentum conventions, `sum` and `ema` (a moving average).

``m = mu * m + g`` and ``m = mu * m + (1 - mu) * g`` of the same gradients with constant ``mu`` differ by the factor
``1 - mu``, also with Nesterov's lookahead.  A forgotten factor raises no error; it only weighs old gradients against
new ones by ``1 / (1 - mu)``.  So a convention is never assumed: it is recorded, documented for the program that wrote
the checkpoint, or given by the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from ...names.errors import SourceError
from ...names.vocabulary import Convention


class WeightsFrom(StrEnum):
    """The source of weights where there are two: the model's rounded ones, or the optimizer's float32 masters."""

    MASTERS = "masters"
    """The optimizer's float32 masters, which then are no state any more."""
    MODEL = "model"
    """The model's; the masters are left out."""


def check_mu(mu: float, where: str) -> None:
    """Raise SourceError if a momentum coefficient is impossible."""
    if not 0 <= mu < 1:
        raise SourceError(f"{where}: expected a momentum coefficient in [0, 1), found {mu!r}")


def agreed_convention(about: str, statements: Mapping[str, Convention | None], remedy: str) -> Convention | None:
    """Return the convention of a momentum that all statements agree on; None if no statement names one.

    Args:
        about: the parameter, as the error names it.
        statements: conventions by who states them.
        remedy: what the user can do about a contradiction.

    Raises:
        SourceError: two statements name different conventions.
    """
    stated = {source: convention for source, convention in statements.items() if convention is not None}
    if len(set(stated.values())) > 1:
        contradiction = ", ".join(f"{source} says {convention}" for source, convention in stated.items())
        raise SourceError(f"{about}: {contradiction}; {remedy}")
    return next(iter(stated.values()), None)


def momentum_factor(source: Convention | None, target: Convention | None, mu: float | None, about: str) -> float | None:
    """Return the factor for a momentum; None if nothing changes.

    Raises:
        SourceError: the source's convention, or the coefficient, is needed and unknown.
    """
    if target is None or source == target:
        return None
    if source is None:
        raise SourceError(
            f"{about}: the target follows convention {target}, but that of the source is unknown; "
            f'give `convention="{Convention.EMA}"` or `convention="{Convention.SUM}"`'
        )
    # A sum weighs a new gradient by 1, an average by 1 - mu; that ratio stays while mu does.
    if mu is None:
        raise SourceError(f"{about}: converting {source} to {target} needs the momentum coefficient; give `mu=`")
    check_mu(mu, about)
    return 1 - mu if target is Convention.EMA else 1 / (1 - mu)
