"""Megatron-FSDP's uneven shards: where they are, and steps on them that are those of a single process, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support import sweep
from support.every_kind import local_of
from support.megatron_model import Net, Topology, fully_sharded, offsets, on_cpu, whole, zero_gradients
from support.megatron_training import TOPOLOGIES, backward, build, groups, slots, with_the_package
from support.oracle import scatter
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from muonckpt.algebra.layout import TensorLayout
from muonckpt.optimizer import Muon
from muonckpt.optimizer.groups import MODULE_TYPES, Rule, Split, sort_parameters
from muonckpt.optimizer.megatron_fsdp import attach, layouts

Where = Callable[[torch.Tensor], TensorLayout]


def misplaced(
    rank: int, params: Mapping[str, nn.Parameter], where: Where, values: Mapping[str, torch.Tensor]
) -> list[str]:
    """Parameters whose local tensor is not, element by element, what the layout says of the whole one."""
    wrong = []
    for name, param in params.items():
        expected = scatter(values[name].float().numpy(), where(param)).get(rank, {})
        found = dict(enumerate(local_of(param).float().flatten().tolist()))
        if found != expected or not set(where(param).buffers) <= set(param.device_mesh.mesh.flatten().tolist()):
            wrong.append(f"{name}: misplaced")
    return wrong


def trained(rank: int, world: int, topology: Topology, algorithm: str = "muon", **options) -> tuple[list[str], int]:
    """What differs after three steps from a single process that is given the same global gradients, or is not where
    the layout says; empty shards.  What all ranks have gathered, the first one compares."""
    with on_cpu():
        model, params, optimizer = build(rank, topology, algorithm, **options)
        where = offsets(params)
        alone = {name: nn.Parameter(value) for name, value in whole(params, where).items()}
        reference = Muon(groups(alone, algorithm))
        attach(optimizer, model)
        for step in range(3):
            backward(model, rank, step, topology)
            with patch.object(dist, "all_gather_object", side_effect=AssertionError("all_gather_object")):
                optimizer.step()
            gradients = {name: param.grad for name, param in params.items() if param.requires_grad}
            for name, gradient in whole(gradients, where).items():
                alone[name].grad = gradient.to(alone[name].dtype)
            if rank == 0:
                reference.step()
            zero_gradients(model)
        values = whole(params, where)
        wrong = misplaced(rank, params, layouts(model), values)
        found, expected = dict(values), dict(alone)
        for slot in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            expected |= {f"{name}.{slot}": value for name, value in slots(alone, reference, slot).items()}
            gathered = whole(slots(params, optimizer, slot), where)
            found |= {f"{name}.{slot}": value for name, value in gathered.items()}
        assert found.keys() == expected.keys()
        if rank == 0:
            wrong += [name for name, value in found.items() if not torch.equal(value, expected[name])]
        return wrong, sum(local_of(param).numel() == 0 for param in params.values())


def assert_as_alone(found: list[tuple[list[str], int]], empty: bool = True) -> None:
    assert [wrong for wrong, _ in found] == [[]] * len(found)
    assert any(count for _, count in found) == empty


@with_the_package
@pytest.mark.parametrize("name", sweep(TOPOLOGIES, "FSDP and EP", "version 2, HSDP"))
def test_elements_are_where_the_layout_says_and_three_steps_are_those_of_a_single_process(name):
    topology = TOPOLOGIES[name]
    assert_as_alone(run(topology.world, trained, topology), empty=topology.zero > 0 and topology.world > 1)


@with_the_package
@pytest.mark.parametrize("options", [{"algorithm": "normuon"}, {"dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("name", sweep(["FSDP, 2 ranks", "version 2, 2 ranks"], "version 2, 2 ranks"))
def test_so_they_are_with_row_statistics_and_with_weights_in_16_bits(name, options):
    assert_as_alone(run(2, trained_with, TOPOLOGIES[name], options))


@with_the_package
def test_so_they_are_if_the_model_synchronises_after_every_backward_pass():
    assert_as_alone(run(2, trained_with, TOPOLOGIES["FSDP, 2 ranks"], {"sync_model_each_microbatch": True}))


def trained_with(rank: int, world: int, topology: Topology, options: dict) -> tuple[list[str], int]:
    return trained(rank, world, topology, **options)


def misplaced_of_tensor_parallel_dtensors(rank: int, world: int) -> list[str]:
    """torch's tensor parallelism instead of Megatron's.  Shards of dim 1 are beyond megatron-fsdp 0.6.1."""
    topology, net = Topology(shard=2, tensor=2), Net()
    values = {name: torch.arange(param.numel()).view(param.shape) for name, param in net.named_parameters()}
    net.load_state_dict(values)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    for layer in net.layers:
        parallelize_module(layer, mesh["tensor"], {"qkv": ColwiseParallel(), "proj": ColwiseParallel()})
    with on_cpu():
        model = fully_sharded(net, topology, cut=False)
        params = {name.removeprefix("module."): param for name, param in model.named_parameters()}
        return misplaced(rank, params, layouts(model), values)


@with_the_package
def test_parameters_that_torch_has_cut_already_are_where_the_layout_says():
    assert run(4, misplaced_of_tensor_parallel_dtensors) == [[]] * 4


RULES = [Rule("matrix", "*.qkv.weight", split=Split((8, 8, 8))), Rule("experts", "*.stack")]


def sorted_and_stepped(rank: int, world: int) -> dict[str, str]:
    """By name, the algorithm of each parameter, once a step has been made with groups that rules have sorted."""
    topology = TOPOLOGIES["FSDP, 2 ranks"]
    with on_cpu():
        model = fully_sharded(Net(), topology)
        decisions = sort_parameters(model, RULES, MODULE_TYPES)
        optimizer = Muon(decisions.groups(muon={"lr": 0.02}, adamw={"lr": 3e-4}), layout=layouts(model))
        attach(optimizer, model)
        before = {name: local_of(param).clone() for name, param in model.named_parameters()}
        backward(model, rank, 0, topology)
        optimizer.step()
        moved = any(not torch.equal(local_of(param), before[name]) for name, param in model.named_parameters())
        return {decision.names[0]: decision.algorithm for decision in decisions} if moved else {}


@with_the_package
def test_rules_sort_a_sharded_model_as_they_sort_the_model_itself():
    expected = {f"module.{d.names[0]}": d.algorithm for d in sort_parameters(Net(), RULES, MODULE_TYPES)}
    assert {"muon", "adamw"} <= set(expected.values())
    assert run(2, sorted_and_stepped) == [expected] * 2
