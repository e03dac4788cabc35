"""The form of a matrix method: what it keeps of a matrix, what it needs, its options, and its update.

Reasons are in ``docs/design/optimizer.md``; docs/guide/own_method.md shows how to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ...algebra.box import Index
from ...names.errors import ArgumentError, constructed_like
from ...names.vocabulary import FLATTEN, FUSION, GROUP_OPTIONS, MOMENTUM, OF_EVERY_GROUP, ParamGroup
from ..ground.tensors import align_matrices
from ..planning.matrices import PRECISIONS, SHAPES, Fused, Precision, Reduced

OPTIONS_OF_INPUT: Mapping[str, tuple[str, ...]] = {
    "gradient": ("adjust_lr_fn", *FUSION),
    "momentum": ("momentum", "nesterov", "adjust_lr_fn", *FUSION, "convention"),
    "orthogonal": (*(name for name in GROUP_OPTIONS["muon"] if name not in OF_EVERY_GROUP), FLATTEN),
}
"""The matrix that a method can take, with the options that groups get by it: a gradient, the momentum (with
Nesterov's look ahead), or that after Newton-Schulz."""


@dataclass(frozen=True, slots=True)
class MethodSlot:
    """State that a method keeps of each matrix; zeros before the first update.  It is sharded as the parameter is, and
    travels to the owner and back.

    Args:
        shape: a key of `planning.matrices.SHAPES`, such as ``"[m, 1]"``.
        dtype: None: the parameter's.

    Raises:
        ArgumentError: an unknown shape, or no floating dtype.
    """

    shape: str = "[m, n]"
    dtype: torch.dtype | None = torch.float32

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ArgumentError(f"shape={self.shape!r}: expected one of {', '.join(SHAPES)}")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ArgumentError(f"dtype={self.dtype}: expected a floating-point dtype, or None for the parameter's")

    @property
    def dtype_name(self) -> str | None:
        """The dtype's name, such as ``"float32"``; None for the parameter's."""
        return None if self.dtype is None else str(self.dtype).removeprefix("torch.")

    def of(self, shape: Index, fused: Fused) -> Reduced:
        """Return its shape for a parameter."""
        return SHAPES[self.shape](shape, fused)


def dtype_named(name: str) -> torch.dtype | None:
    """Return a floating-point dtype by its name, such as ``"float32"``; None if there is none."""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a method's groups: its default, a check, and in words what the check expects."""

    default: Any
    holds: Callable[[Any], bool] = lambda value: True
    expected: str = "another value"


FRACTION: tuple[Callable[[Any], bool], str] = (lambda value: 0 <= value < 1, "a number in [0, 1)")


@dataclass(frozen=True, slots=True, eq=False)
class WholeMatrix:
    """A whole matrix at its owner, or equal ones as ``[B, m, n]`` if the method is ``stacked``.

    Attributes:
        matrix: ``[m, n]``: what the method takes.  Not to be changed, but it may be returned.
        state: by slot, to be changed in place or replaced by tensors of the same shape and dtype.
        weight: ``[m, n]``, in the parameter's dtype, before decay; None unless the method asks for it.
        options: of the parameter group, ``lr`` among them.
    """

    matrix: Tensor
    state: dict[str, Tensor]
    weight: Tensor | None
    options: ParamGroup


def of_each(reduce: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    """Return what ``reduce`` makes of each of the matrices ``[B, m, n]``, in three dims.

    One after the other, each where a memory of its own might begin: the order in which a GPU sums elements may depend
    on how many matrices there are, and on where they lie.
    """
    reduced = torch.stack([reduce(matrix) for matrix in align_matrices(matrices).unbind()])
    return reduced if reduced.ndim == 3 else reduced.view(-1, 1, 1)


@constructed_like("MatrixMethod('signed', update=lambda each: each.matrix.sign())")
@dataclass(frozen=True, slots=True)
class MatrixMethod:
    """An algorithm for matrices.  Give it to a group as ``{"params": ..., "algorithm": method}``.

    Args:
        name: what state dicts call it.
        update: returns the update of a matrix, which is subtracted ``lr`` times, scaled by ``adjust_lr_fn``.  It must
            depend on nothing but the `WholeMatrix`; every rank may be the owner.
        slots: what it keeps of a matrix besides momentum, by name; or a function of a group's options that returns it.
        options: options of its groups besides those that ``takes`` brings, or other defaults of them.
        takes: a key of `OPTIONS_OF_INPUT`.
        before: is applied to the momentum ahead of Newton-Schulz; element by element.
        weight: the weight travels to the owner, too.
        cost: FLOPs for an ``m x n`` matrix besides Newton-Schulz, given m, n and the group; owners follow from it.
        rms: the root mean square that an update of an ``m x n`` matrix is expected to have, for reports, given m, n and
            the group; None where it is unknown.
        stacked: ``update`` takes equal matrices together, and gives each the bits that it has alone: element by
            element, and by `of_each` where it sums or multiplies.

    Raises:
        ArgumentError: a name that state dicts cannot have, an unknown ``takes``, or a ``before`` without Newton-Schulz.
    """

    name: str
    update: Callable[[WholeMatrix], Tensor]
    slots: Mapping[str, MethodSlot] | Callable[[ParamGroup], Mapping[str, MethodSlot]] = field(default_factory=dict)
    options: Mapping[str, Option] = field(default_factory=dict)
    takes: Literal["orthogonal", "momentum", "gradient"] = "orthogonal"
    before: Callable[[Tensor], Tensor] | None = None
    weight: bool = False
    cost: Callable[[int, int, ParamGroup], float] = lambda m, n, group: 0
    rms: Callable[[int, int, ParamGroup], float | None] = lambda m, n, group: None
    stacked: bool = False

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ArgumentError(f"name={self.name!r}: expected a word of letters, digits and underscores")
        if self.takes not in OPTIONS_OF_INPUT:
            raise ArgumentError(f"takes={self.takes!r}: expected one of {', '.join(OPTIONS_OF_INPUT)}")
        if self.before is not None and not self.orthogonalizes:
            raise ArgumentError(f"method {self.name!r}: before= is for takes='orthogonal'; do it in update")
        slots = self.slots if isinstance(self.slots, Mapping) else {}
        if wrong := [slot for slot in slots if slot == MOMENTUM or not slot.isidentifier()]:
            raise ArgumentError(f"method {self.name!r}: a slot cannot be called {wrong[0]!r}")

    @property
    def orthogonalizes(self) -> bool:
        return self.takes == "orthogonal"

    @property
    def averages(self) -> bool:
        """True if its groups have momentum."""
        return self.takes != "gradient"

    def slots_of(self, group: ParamGroup) -> Mapping[str, MethodSlot]:
        """Return what it keeps of a matrix of a group besides momentum, by slot."""
        return self.slots if isinstance(self.slots, Mapping) else self.slots(group)

    def defaults(self, common: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a new group, given the optimizer's for matrices."""
        options = {name: value for name, value in common.items() if name in OPTIONS_OF_INPUT[self.takes]}
        return options | {name: option.default for name, option in self.options.items()}

    def precision(self, group: ParamGroup) -> Precision:
        """Return the dtypes in which matrices travel and are multiplied."""
        return PRECISIONS[group["ns_dtype"] if self.orthogonalizes else "float32"]

    def updated(self, whole: WholeMatrix) -> Tensor:
        """Return the update of a matrix, after checking that it is one.

        Raises:
            ValueError: the update, or a slot, is of another shape or dtype than declared.
        """
        slots = dict(whole.state)
        update = self.update(whole)
        self._check_like("the update", update, whole.matrix)
        if whole.state.keys() != slots.keys():
            raise ArgumentError(
                f"method {self.name!r} has slots {_listed_slots(slots)}, and it left {_listed_slots(whole.state)}"
            )
        # A slot that was replaced is copied to its memory, from where it goes back to where it rests.
        for name, tensor in slots.items():
            if (replacement := whole.state[name]) is not tensor:
                self._check_like(name, replacement, tensor)
                if replacement.dtype != tensor.dtype:
                    raise ArgumentError(
                        f"method {self.name!r}: {name} is {replacement.dtype}, declared is {tensor.dtype}"
                    )
                whole.state[name] = tensor.copy_(replacement)
        return update

    def _check_like(self, name: str, value: Any, like: Tensor) -> None:
        if not isinstance(value, Tensor) or value.shape != like.shape or not value.is_floating_point():
            actual = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ArgumentError(
                f"method {self.name!r}: {name} is {actual}, expected floats of shape {tuple(like.shape)}"
            )


def _listed_slots(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
