"""The optimizer refuses what does not fit before it changes anything, and takes how to compute from the code."""

from __future__ import annotations

import pytest
import torch
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from muonckpt import LayoutError
from muonckpt.optimizer import Muon
from muonckpt.optimizer.state import check_gradients


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
def test_how_to_compute_comes_from_the_code_and_what_a_run_carries_from_the_checkpoint():
    saved = Muon([nn.Parameter(torch.randn(6, 3))], lr=0.5).state_dict()
    opt = Muon([nn.Parameter(torch.randn(6, 3))], ns_steps=6, ns_coefficients="cans", adjust_lr_fn="spectral")
    with pytest.warns(UserWarning, match="keeps the code's.*ns_steps=6 .saved 5."):
        opt.load_state_dict(saved)
    [group] = opt.param_groups
    assert (group["ns_steps"], group["ns_coefficients"], group["adjust_lr_fn"]) == (6, "cans", "spectral")
    assert group["lr"] == 0.5


def test_a_frozen_parameter_keeps_its_state_when_stock_dcp_leaves_it_out():
    net = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 3, bias=False))
    opt = Muon(net.parameters())
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    net[0].weight.requires_grad_(False)
    momentum = opt.state[net[0].weight]["momentum_buffer"].clone()
    model, state = get_state_dict(net, opt)
    set_state_dict(net, opt, model_state_dict=model, optim_state_dict=state)
    assert torch.equal(opt.state[net[0].weight]["momentum_buffer"], momentum) and momentum.any()


def plain_state_into_shards(rank: int, world: int) -> str:
    """Load the state of a plain parameter for a sharded one, and return the error."""
    mesh = init_device_mesh("cpu", (world,))
    saved = Muon([nn.Parameter(torch.randn(4, 16))]).state_dict()
    p = nn.Parameter(distribute_tensor(torch.randn(4, 16), mesh, [Shard(0)], src_data_rank=None))
    try:
        Muon([p]).load_state_dict(saved)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_state_laid_out_otherwise_is_refused():
    for message in run(2, plain_state_into_shards):
        assert "not distributed, expected (4, 16) as" in message


def unfitting_gradient(rank: int, world: int) -> list[str]:
    """Check gradients of which torch refuses to attach some; the optimizer's check must not rely on that."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 0])]
    shard, reverse = (distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None) for mesh in meshes)
    messages = []
    for param, gradient in ((torch.ones(4, 4), shard), (shard, reverse), (shard, torch.ones(4, 4))):
        try:
            check_gradients([param], [gradient])
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_a_gradient_on_another_mesh_is_refused():
    for messages in run(2, unfitting_gradient):
        assert len(messages) == 3 and all("redistribute the gradient" in message for message in messages)


def crossing_meshes(rank: int, world: int) -> bool:
    """Step on four meshes of two ranks, listed in a cyclic order that would deadlock if each rank followed its list."""
    pairs = {0: [(0, 1), (0, 2)], 1: [(1, 3), (0, 1)], 2: [(0, 2), (2, 3)], 3: [(2, 3), (1, 3)]}[rank]
    meshes = {pair: DeviceMesh("cpu", list(pair)) for pair in [(0, 1), (0, 2), (1, 3), (2, 3)]}
    params = []
    for pair in pairs:
        value = distribute_tensor(torch.ones(4, 4), meshes[pair], [Shard(0)], src_data_rank=None)
        params.append(nn.Parameter(value))
        params[-1].grad = torch.ones_like(value)
    Muon(params).step()
    return True


def test_ranks_may_list_their_meshes_in_any_order():
    assert run(4, crossing_meshes) == [True] * 4


def test_matrices_without_elements_are_fine_and_four_dims_are_not_guessed():
    params = [nn.Parameter(torch.empty(shape)) for shape in [(0, 5), (5, 0), (0, 3, 4)]]
    for p in params:
        p.grad = torch.empty_like(p)
    Muon(params).step()
    with pytest.raises(LayoutError, match=r"\(8, 3, 3, 3\).*not clear"):
        Muon([nn.Parameter(torch.empty(8, 3, 3, 3))])
    with pytest.raises(ValueError, match="real floating-point"):
        Muon([nn.Parameter(torch.empty(4, 4, dtype=torch.complex64))])
