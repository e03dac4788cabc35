"""Bugs that other distributed Muons have or had, as far as no other file tests what must hold here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import sweep
from support.every_kind import assert_same_bits, whole
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from muonckpt.optimizer import Muon, orthogonalize

# --- a small model of everything: matrices, experts and vectors, under every algorithm --------------------------

SHAPES = {"muon": (7, 10), "normuon": (10, 6), "experts": (5, 6, 4), "adamw": (9, 5), "lion": (11,)}
ALGORITHM = {name: "normuon" if name == "experts" else name for name in SHAPES}


def uneven_rows(name: str, seed: int) -> torch.Tensor:
    """Rows of very different sizes, which a norm of a part of them does not show."""
    values = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))
    sizes = torch.logspace(-2, 2, values.shape[-2] if values.ndim > 1 else 1)
    return values * (sizes[:, None] if values.ndim > 1 else sizes)


def everywhere(shape: tuple[int, ...], placements: tuple[Placement, ...], names: tuple[str, ...]):
    """What places a tensor on a mesh; a dim that a tensor does not have is its last."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        fit = [Shard(min(p.dim % 3, tensor.ndim - 1)) if type(p) is Shard else p for p in placements]
        return distribute_tensor(tensor, mesh, fit, src_data_rank=None)

    return place


def test_what_is_compiled_is_called():
    products, calls = [], []

    def counting(graph, inputs):
        products.append(sum("mm" in str(node.target) or "matmul" in str(node.target) for node in graph.graph.nodes))

        def called(*args):
            calls.append(len(products))
            return graph(*args)

        return called

    torch._dynamo.reset()
    compiled = torch.compile(orthogonalize, backend=counting, dynamic=False)
    matrix = uneven_rows("muon", 0)
    for _ in range(3):
        assert torch.equal(compiled(matrix), orthogonalize(matrix))
    # Each of five steps has three products, and every call runs what was compiled once.
    assert sum(products) == 15 and len(calls) == 3 * len(products)


class Sixteen(nn.Module):
    """A bf16 model under every algorithm."""

    def __init__(self) -> None:
        super().__init__()
        for name in SHAPES:
            self.register_parameter(name, nn.Parameter(uneven_rows(name, 0).bfloat16()))

    def forward(self) -> torch.Tensor:
        return sum(p.square().sum() for p in self.parameters())


def build() -> tuple[Sixteen, Muon]:
    net = Sixteen()
    fully_shard(net, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    named = dict(net.named_parameters())
    return net, Muon([{"params": [named[name]], "algorithm": ALGORITHM[name], "lr": 0.02} for name in SHAPES])


def train(net: Sixteen, opt: Muon, first: int, last: int) -> list[torch.Tensor]:
    for step in range(first, last):
        for name, p in net.named_parameters():
            p.grad = distribute_tensor(
                uneven_rows(name, 1 + step).bfloat16(), p.device_mesh, p.placements, src_data_rank=None
            )
        opt.step()
    params = list(net.parameters())
    return [whole(t).clone() for p in params for t in (p, *(opt.state[p][slot] for slot in sorted(opt.state[p])))]


def saved(rank: int, world: int, path: str) -> list[torch.Tensor]:
    net, opt = build()
    train(net, opt, 0, 2)
    for slots in opt.state.values():
        if "step" in slots:
            slots["step"].fill_(257)  # which bf16 does not have
    model, state = get_state_dict(net, opt)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=path)
    return train(net, opt, 2, 4)


def resumed(rank: int, world: int, path: str) -> list[torch.Tensor]:
    net, opt = build()
    model, state = get_state_dict(net, opt)
    dcp.load({"model": model, "optimizer": state}, checkpoint_id=path)
    set_state_dict(net, opt, model_state_dict=model, optim_state_dict=state)
    return train(net, opt, 2, 4)


@pytest.mark.parametrize("world", sweep([1, 3], 3))
def test_stock_dcp_reshards_all_state_of_a_16_bit_model_and_counters_stay_float32(world, tmp_path):
    path = str(tmp_path / "checkpoint")
    expected = run(4, saved, path)[0]
    for found in run(world, resumed, path):
        assert_same_bits(found, expected)
    counters = [t for t in expected if t.shape == () and t.dtype == torch.float32]
    assert [t.item() for t in counters] == [259.0]


def state_placement(rank: int, world: int) -> list[str]:
    """What is wrong with where the state lies, or with what groups hold."""
    place = everywhere((2, 2), (Shard(0), Shard(1)), ("x", "y"))
    params = {name: nn.Parameter(place(uneven_rows(name, 0))) for name in SHAPES if len(SHAPES[name]) > 1}
    opt = Muon([{"params": [p], "algorithm": ALGORITHM[name], "lr": 0.02} for name, p in params.items()])
    wrong = []
    for name, p in params.items():
        for slot in opt.state[p].keys() - {"step"}:
            value = opt.state[p][slot]
            placed = (value.device_mesh, value.placements) if isinstance(value, DTensor) else None
            wrong += [f"{name}.{slot}"] * (placed != (p.device_mesh, p.placements))
    for group in opt.param_groups:
        wrong += [key for key, value in group.items() if key != "params" and not plain(value)]
    return wrong


def plain(value) -> bool:
    return value is None or isinstance(value, (bool, int, float, str)) or all(map(plain, value))


def test_state_lies_where_its_parameter_does_and_groups_hold_plain_values():
    assert run(4, state_placement) == [[]] * 4
