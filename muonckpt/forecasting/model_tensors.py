"""A model as planning and memory see it: its parameters, and the state that an optimizer keeps for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..box import Index
from ..vocabulary import EXP_AVG, EXP_AVG_SQ, MOMENTUM, STEP


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A slot of a parameter's state; ``dtype`` is torch's name, such as ``"bfloat16"``."""

    slot: str
    shape: Index
    dtype: str


@dataclass(frozen=True, slots=True)
class ModelParameter:
    """A parameter.

    Attributes:
        matrix: whether it holds matrices that Muon orthogonalises; an element-wise method steps the others.
        pieces: the row counts of what is fused in it; None if nothing is.
        state: what the optimizer keeps for it.
    """

    name: str
    shape: Index
    dtype: str
    matrix: bool
    pieces: tuple[int, ...] | None
    state: tuple[StateTensor, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def fresh_parameter(
    name: str, shape: Index, dtype: str, *, matrix: bool, pieces: tuple[int, ...] | None = None
) -> ModelParameter:
    """A parameter with the state that `muonckpt.optimizer.Muon` makes: momentum, or AdamW's moments and counter."""
    like = [MOMENTUM] if matrix else [EXP_AVG, EXP_AVG_SQ]
    state = [StateTensor(slot, shape, dtype) for slot in like]
    if not matrix:
        state.append(StateTensor(STEP, (), "float32"))
    return ModelParameter(name, shape, dtype, matrix, pieces, tuple(state))


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The parameters of a model in forward order, and where they were read."""

    source: str
    parameters: tuple[ModelParameter, ...]

    @property
    def matrices(self) -> Sequence[ModelParameter]:
        """The parameters that hold matrices."""
        return [parameter for parameter in self.parameters if parameter.matrix]
