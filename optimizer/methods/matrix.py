"""Methods for matrices by name, and how the rate of a matrix grows with its shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...algebra.box import Index
from ...names.errors import ArgumentError
from ...names.vocabulary import FLATTEN, ParamGroup
from ..planning.matrices import SHAPES, Fused, Reduced
from .form import MatrixMethod, MethodSlot, dtype_named
from .muon import ADAMUON, HYPERBALL, MUON, NORMUON
from .scalar import SCALARS

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
"""The meaning of ``adjust_lr_fn=None``, as in torch."""


@dataclass
class Scales:
    """Scales by the names that groups hold: `ADJUST_LR`, and functions that users gave."""

    registered: dict[str, Scale] = field(default_factory=dict)

    def name_of(self, scale: str | Scale | None) -> str:
        """Return a scale's name; raise ArgumentError if another function has that name."""
        if not callable(scale):
            return scale or UNNAMED
        name = f"{scale.__module__}.{scale.__qualname__}"
        if self.registered.setdefault(name, scale) is not scale:
            raise ArgumentError(f"adjust_lr_fn: two different functions are called {name}")
        return name

    def as_given(self, group: Mapping[str, Any]) -> dict[str, str | Scale]:
        """Return a group's ``adjust_lr_fn`` as the user gave it; empty if it has none."""
        name = group.get("adjust_lr_fn")
        return {} if name is None else {"adjust_lr_fn": self.registered.get(name, name)}

    @property
    def names(self) -> list[str]:
        return [*ADJUST_LR, *self.registered]

    def factor(self, group: Mapping[str, Any], rows: int, columns: int) -> float:
        """Return the learning-rate factor of an ``m x n`` matrix of a group."""
        return {**ADJUST_LR, **self.registered}[group["adjust_lr_fn"]](rows, columns)


MATRICES: Mapping[str, MatrixMethod] = {method.name: method for method in (MUON, NORMUON, ADAMUON, HYPERBALL)}
"""The methods that groups choose by name."""


def is_matrix_method(algorithm: str) -> bool:
    """Return whether an algorithm of a group is one of matrices: ours by name, or a user's."""
    return algorithm not in SCALARS


@dataclass
class Methods:
    """Methods by the names that groups hold: `MATRICES`, and those that users gave."""

    registered: dict[str, MatrixMethod] = field(default_factory=dict)

    def name_of(self, algorithm: str | MatrixMethod) -> str:
        """Return the name of what a user gives as ``algorithm``.

        Raises:
            ValueError: there is no such algorithm, or another one has its name.
        """
        if isinstance(algorithm, MatrixMethod):
            # Two optimizers may be given one method, but no two methods one name.
            shipped = SCALARS.get(algorithm.name) or MATRICES.get(algorithm.name)
            if (shipped or self.registered.setdefault(algorithm.name, algorithm)) != algorithm:
                raise ArgumentError(f"algorithm: two different methods are called {algorithm.name!r}")
            return algorithm.name
        if algorithm not in (names := {*MATRICES, *SCALARS, *self.registered}):
            raise ArgumentError(f"unknown algorithm {algorithm!r}; expected one of {sorted(names)}, or a MatrixMethod")
        return algorithm

    def as_given(self, group: Mapping[str, Any]) -> dict[str, str | MatrixMethod]:
        """Return a group's ``algorithm`` as the user gave it."""
        return {"algorithm": self.registered.get(group["algorithm"], group["algorithm"])}

    def __getitem__(self, algorithm: str) -> MatrixMethod:
        return self.registered.get(algorithm) or MATRICES[algorithm]


def method_slots(shape: Index, group: ParamGroup, method: MatrixMethod) -> dict[str, tuple[MethodSlot, Reduced]]:
    """Return the state of a parameter besides momentum: how it is kept, and its shape."""
    fused = fused_of(group)
    return {name: (slot, slot.of(shape, fused)) for name, slot in method.slots_of(group).items()}


def as_stored(
    name: str, shape: Index, fused: Fused, state: Mapping[str, tuple[Index, str]], *, averages: bool
) -> MatrixMethod:
    """Return a method with only its state known: shapes and names of dtypes, by slot.

    Its own FLOPs are unknown.
    """
    slots: dict[str, MethodSlot] = {}
    for name_of_slot, (slot_shape, dtype_name) in state.items():
        if name_of_slot.isidentifier() and (dtype := dtype_named(dtype_name)):
            for kind in (kind for kind in SHAPES if kind != "longer"):  # which is one of two others
                slot = MethodSlot(kind, dtype)
                if slot.of(shape, fused).shape == slot_shape:
                    slots[name_of_slot] = slot
    return MatrixMethod(name, MUON.update, slots=slots, takes="orthogonal" if averages else "gradient")


def fused_of(group: Mapping[str, Any]) -> Fused:
    """Return a group's fused matrices."""
    pieces, columns = tuple(group["pieces"] or ()), tuple(group["columns"] or ())
    is_flattened = group.get(FLATTEN, False)
    return Fused(pieces or None, columns or None, interleaved=group["interleaved"], flatten=is_flattened)
