"""The state dict of a user's model and optimizer on one of many ranks, without the memory and the other ranks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ...names.errors import TargetError
from ...names.keys import StateForm
from ..built import Built, Maker, build

_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that launchers set, which a user's function may read."""


@contextmanager
def fake_ranks(world_size: int, rank: int) -> Iterator[None]:
    """Make this process believe that it is one of many ranks: collectives return at once, and send nothing.

    Raises:
        TargetError: this process has a process group already.
    """
    if dist.is_initialized():
        raise TargetError(
            "preflight makes a process group of its own, and this process has one: call it in another one"
        )
    environment = {name: os.environ.get(name) for name in _ENVIRONMENT}
    values = (rank, 0, world_size, 1, "localhost", 29500)
    os.environ.update(zip(_ENVIRONMENT, map(str, values), strict=True))
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def build_on(make: Maker, source: str, mesh: Mapping[str, int]) -> Built:
    """Call the user's function, with a device mesh if it takes an argument.

    Raises:
        TargetError: the function fails, or returns something else than a model and an optimizer.
    """
    maker: Callable[..., Any] = make
    if inspect.signature(make).parameters:
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        return build(partial(maker, device_mesh), source)
    return build(make, source)


def state_of(built: Built, form: StateForm | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dicts of the model and of its optimizers, in the form in which a checkpoint has the latter."""
    weights = get_model_state_dict(built.model)
    # torch's call also gives optimizers that have not stepped the state that they will have.
    options = StateDictOptions(flatten_optimizer_state_dict=form is StateForm.FLAT)
    state = get_optimizer_state_dict(built.model, built.optimizers, options=options)
    if form is StateForm.NUMBERED and len(built.optimizers) == 1:
        state = built.optimizers[0].state_dict()
    stand_ins: dict[Any, Tensor] = {}
    return _with_stand_ins(weights, stand_ins), _with_stand_ins(state, stand_ins)


def _with_stand_ins(value: Any, stand_ins: dict[Any, Tensor]) -> Any:
    """Return a nested value with tensors of the meta device replaced; tied ones stay tied."""
    match value:
        case Mapping():
            return {key: _with_stand_ins(part, stand_ins) for key, part in value.items()}
        case list():
            return [_with_stand_ins(part, stand_ins) for part in value]
        case DTensor() if value.is_meta:
            local = _stand_in(value.to_local(), stand_ins)
            return DTensor.from_local(
                local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        case Tensor() if value.is_meta:
            return _stand_in(value, stand_ins)
    return value


def _stand_in(tensor: Tensor, stand_ins: dict[Any, Tensor]) -> Tensor:
    """Return a tensor of the same shape in memory that nobody writes, and so takes none; tied tensors share it."""
    key = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape
    if key not in stand_ins:
        stand_ins[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return stand_ins[key]
