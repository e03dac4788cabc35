"""Small runs of one process that are saved by stock DCP, converted, and trained on, in float32 arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import contextmanager

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

import muonckpt

EXACT = {"ns_dtype": "float32"}


class Exact(torch.Tensor):
    """A tensor that does not become bfloat16."""

    def bfloat16(self):
        return self

    def to(self, *args, **kwargs):
        return self


@contextmanager
def exact_torch_muon(monkeypatch):
    """torch.optim.Muon whose Newton-Schulz is in float32."""
    from torch.optim import _muon

    torch_function = _muon._zeropower_via_newtonschulz
    with monkeypatch.context() as patched:
        patched.setattr(
            _muon,
            "_zeropower_via_newtonschulz",
            lambda matrix, *load_options: torch_function(matrix.as_subclass(Exact), *load_options).as_subclass(
                torch.Tensor
            ),
        )
        yield


class Model(nn.Module):
    """Two matrices of other shapes, fused rows, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"qkv": (20, 12), "up": (24, 12), "down": (12, 24), "scale": (12,), "shift": (12,)}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))

    @property
    def matrices(self) -> list[nn.Parameter]:
        return [self.qkv, self.up, self.down]

    @property
    def vectors(self) -> list[nn.Parameter]:
        return [self.scale, self.shift]


def placed(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The tensor, which every rank has whole, sharded as the parameter is."""
    if not isinstance(param, DTensor):
        return tensor
    return distribute_tensor(tensor, param.device_mesh, param.placements, src_data_rank=None)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def train(model: nn.Module, optimizers: Sequence, steps: Iterable[int], schedulers: Sequence = (), idle=()) -> None:
    """Steps with the gradients of their numbers; parameters of names in ``idle`` have none."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 + step)
        for name, param in model.named_parameters():
            gradient = torch.randn(param.shape, generator=generator)
            param.grad = None if name in idle else placed(gradient, param)
        for optimizer in (*optimizers, *schedulers):
            optimizer.step()


def save(model: nn.Module, optimizers: Sequence, path, **more_items) -> None:
    """As a program does that uses stock DCP."""
    weights, state = get_state_dict(model, list(optimizers))
    dcp.save({"model": weights, "optimizer": state, **more_items}, checkpoint_id=path, no_dist=True)


def load_ours(model: nn.Module, optimizer, path, **load_options):
    """As the guide has it."""
    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optimizer": state}
    report = muonckpt.load(loaded, path, **load_options)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=loaded["optimizer"])
    return report


def load_stock(model: nn.Module, optimizers: Sequence, path, state_of=None, put=None) -> None:
    """As a program does that uses stock DCP: its own template, and every key of it must be there.

    ``state_of`` and ``put`` are how the program gets its optimizers' state and sets it, if not as torch does.
    """
    with torch.no_grad():
        for optimizer in optimizers:  # as torch does for optimizers that make their state at the first step
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = 0.0
                for param in group["params"]:
                    param.grad = torch.zeros_like(param)
            optimizer.step()
            for group, lr in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = lr
    weights, state = get_state_dict(model, list(optimizers))
    loaded = {"model": weights, "optimizer": state if state_of is None else state_of()}
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    if put is not None:
        put(loaded["optimizer"])
        set_model_state_dict(model, weights)
        return
    set_state_dict(model, list(optimizers), model_state_dict=weights, optim_state_dict=loaded["optimizer"])


def furthest(model: nn.Module, other_model: nn.Module, start: dict[str, torch.Tensor]) -> float:
    """The largest difference of updates since ``start``, as a part of the update."""
    return max(
        float((param - torch_function).norm() / (param - start[name]).norm())
        for (name, param), torch_function in zip(
            weights_of(model).items(), weights_of(other_model).values(), strict=True
        )
        if not torch.equal(param, start[name]) or not torch.equal(torch_function, start[name])
    )


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(param).clone() for name, param in model.named_parameters()}
