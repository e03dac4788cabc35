"""The parameters of a checkpoint of any program, from its metadata."""

from __future__ import annotations

from ..converters.look.contents import Role, StatefulParameter
from ..converters.look.first_look import first_look
from ..errors import TargetError
from ..record import StateRecord
from ..store.io.location import Location
from ..store.open_checkpoint import open
from .model_tensors import ModelParameter, ModelTensors, StateTensor


def model_of_checkpoint(path: Location) -> ModelTensors:
    """The parameters of a checkpoint: Muon steps those that carry momentum as matrices.

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
