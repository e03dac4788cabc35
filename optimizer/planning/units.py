"""What planning must know of parameters, as plain data, and what it makes of them: matrices with owners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...box import Index
from ...layout import Piece, TensorLayout
from ..newton_schulz.forms import Form
from ..newton_schulz.gram import gram_is_cheaper
from .matrices import Fused, matrices_of, rows_columns, shapes_of


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of a parameter that travels to the owners and back: where it rests, and in which dtype it travels."""

    name: str
    layout: TensorLayout
    fused: Fused
    there: torch.dtype
    back: torch.dtype

    @property
    def matrices(self) -> tuple[tuple[Piece, ...], ...]:
        return matrices_of(self.layout.shape, self.fused)

    @property
    def shapes(self) -> tuple[Index, ...]:
        """Of the matrices, in the parameter's rank."""
        return shapes_of(self.layout.shape, self.fused)


@dataclass(frozen=True, slots=True)
class Spec:
    """A parameter.

    Attributes:
        slots: what travels of it, the update first.
        cost: of orthogonalising an ``m x n`` matrix, in any unit.
        form: how an ``m x n`` matrix is orthogonalised, of which the parameter has ``copies``.
        scale: the learning-rate factor of an ``m x n`` matrix.
    """

    slots: tuple[Slot, ...]
    cost: Callable[[int, int], int]
    form: Callable[[int, int, int], Form] = lambda m, n, copies: Form(kernels=False, gram=gram_is_cheaper(m, n))
    scale: Callable[[int, int], float] = lambda m, n: 1.0


@dataclass(frozen=True, slots=True)
class Unit:
    """One matrix of a parameter.

    Attributes:
        param: number of the parameter in its schedule.
        index: number of the matrix in the parameter.
        shape: in the parameter's rank.
        owner: the global rank that orthogonalises it.
        stage: when.
        cost: of orthogonalising it.
        form: how.
    """

    param: int
    index: int
    shape: Index
    owner: int
    stage: int
    cost: int
    form: Form

    @property
    def rows_columns(self) -> tuple[int, int]:
        return rows_columns(self.shape)
