"""How the learning rate of a group of matrices grows with the shape of a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Scale = Callable[[int, int], float]

ADJUST_LR: Mapping[str, Scale] = {
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "spectral": lambda m, n: math.sqrt(m / n),
    "none": lambda m, n: 1.0,
}
"""Learning-rate factor of an ``m x n`` matrix.  "original": Jordan et al. 2024; "match_rms_adamw": Liu et al. 2025
(arXiv 2502.16982), so that AdamW's rate and decay carry over; "spectral": Bernstein & Newhouse (arXiv 2410.21265)."""

UNNAMED = "original"
"""What ``adjust_lr_fn=None`` means, as in torch."""


@dataclass
class Scales:
    """The scales that an optimizer's groups know by name: those of `ADJUST_LR`, and functions that users gave.

    Groups hold plain values, so a function is kept here.
    """

    given: dict[str, Scale] = field(default_factory=dict)

    def name_of(self, scale: str | Scale | None) -> str:
        """The name by which a group knows a scale.

        Raises:
            ValueError: another function has this name.
        """
        if not callable(scale):
            return scale or UNNAMED
        name = f"{scale.__module__}.{scale.__qualname__}"
        if self.given.setdefault(name, scale) is not scale:
            raise ValueError(f"adjust_lr: two different functions are called {name}")
        return name

    def as_given(self, group: Mapping[str, Any]) -> dict[str, str | Scale]:
        """The scale of a group as it was given, which may be a function; nothing if the group has none."""
        name = group.get("adjust_lr")
        return {} if name is None else {"adjust_lr": self.given.get(name, name)}

    @property
    def names(self) -> list[str]:
        return [*ADJUST_LR, *self.given]

    def factor(self, group: Mapping[str, Any], rows: int, columns: int) -> float:
        """What the rate of a group is multiplied by for a matrix of it."""
        return {**ADJUST_LR, **self.given}[group["adjust_lr"]](rows, columns)
