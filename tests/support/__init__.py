"""What tests share: worlds of ranks, oracles, golden checkpoints, and models.  No test file imports another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def sweep(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the cases of a parametrised test; those that are not kept are `exhaustive`, for `make check`.

    They are of sweeps that have found nothing for long, beside cases that go through the same lines.
    """
    import pytest  # scripts that tests start need it not

    cases = list(cases)
    assert all(case in cases for case in kept), "what is kept is a case"
    return [
        case
        if case in kept
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive)
        for case in cases
    ]
