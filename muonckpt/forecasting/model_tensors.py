"""A model as planning and memory see it: its parameters with the optimizer's state, perhaps those of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..box import Index
from ..converters.look.contents import Role, StatefulParameter, first_look
from ..errors import TargetError
from ..record import StateRecord
from ..store.io.location import Location
from ..store.open_checkpoint import open
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
    """Give a parameter the state that `muonckpt.optimizer.Muon` makes: momentum, or AdamW's moments and counter."""
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
        return [parameter for parameter in self.parameters if parameter.matrix]


def model_of_checkpoint(path: Location) -> ModelTensors:
    """Read the parameters of a checkpoint: Muon steps those that carry momentum as matrices.

    Raises:
        SourceError: it cannot be read.
        TargetError: nothing in it carries momentum.
    """
    with open(path) as opened:
        contents = first_look(opened).contents
    momentum = {tensor.key: tensor for tensor in contents.tensors.get(Role.MOMENTUM, ())}
    parameters = tuple(_parameter(parameter, momentum) for parameter in contents.parameters.values())
    if not any(parameter.matrix for parameter in parameters):
        raise TargetError(
            f"{path}: expected matrices with momentum, found none, so who orthogonalises what is unknown; give a "
            "checkpoint with optimizer state, or the model's config.json"
        )
    return ModelTensors(str(path), parameters)


def _parameter(parameter: StatefulParameter, momentum: dict[str, StateRecord]) -> ModelParameter:
    tensors = [*([parameter.weight] if parameter.weight else []), *parameter.state.values()]
    own = next((tensor for tensor in parameter.state.values() if tensor.key in momentum), None)
    like = next(tensor for tensor in tensors if tensor.shape == parameter.shape)
    matrix = own is not None and len(own.shape) in (2, 3) and own.shape == parameter.shape and 0 not in own.shape
    return ModelParameter(
        parameter.name,
        parameter.shape,
        like.dtype,
        matrix,
        own.pieces if own and matrix else None,
        tuple(StateTensor(slot, tensor.shape, tensor.dtype) for slot, tensor in parameter.state.items()),
    )
