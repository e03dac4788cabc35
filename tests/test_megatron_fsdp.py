"""Megatron-FSDP's uneven shards: where they are, and steps on them that are those of a single process, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron_model import Net, Topology, fully_sharded, offsets, on_cpu, whole
from oracle import arange, scatter
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from workers import run

import muonckpt
from muonckpt.errors import LayoutError
from muonckpt.layouts.tensors import local_of
from muonckpt.optimizer import Muon
from muonckpt.optimizer.megatron_fsdp import attach, finish_gradients, layouts

with_the_package = pytest.mark.skipif(not find_spec("megatron_fsdp"), reason="pip install megatron-fsdp==0.6.1")

TOPOLOGIES = {
    "FSDP, 2 ranks": Topology(shard=2),
    "FSDP": Topology(shard=4),
    "ZeRO-2": Topology(shard=4, zero=2),
    "ZeRO-1": Topology(shard=4, zero=1),
    "HSDP": Topology(outer=2, shard=2),
    "HSDP, outer sharded": Topology(outer=2, shard=2, outer_sharded=True),
    "HSDP, nothing sharded": Topology(outer=2, shard=2, zero=0),
    "FSDP x TP": Topology(shard=2, tensor=2),
    "HSDP x TP, outer sharded": Topology(outer=2, shard=2, tensor=2, outer_sharded=True),
    "FSDP and EP": Topology(shard=4, expert=2),
    "FSDP and EP, experts unsharded": Topology(shard=2, expert=2),
    "HSDP and EP": Topology(outer=2, shard=2, expert=2),
}


# --- where the elements are -------------------------------------------------------------------------------------


def numbered(topology: Topology) -> Net:
    """Every element is its own index in the whole tensor."""
    net = Net(experts=3 if topology.expert else 0)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.arange(param.numel()).view(param.shape))
    return net


def misplaced(rank: int, model: nn.Module) -> list[str]:
    """Parameters whose local tensor does not hold, element by element, what the layout says."""
    layout = layouts(model)
    wrong = []
    for name, param in model.named_parameters():
        expected = scatter(arange(tuple(param.shape)), layout(param)).get(rank, {})
        found = dict(enumerate(local_of(param).flatten().tolist()))
        if found != expected or not set(layout(param).buffers) <= set(param.device_mesh.mesh.flatten().tolist()):
            wrong.append(name)
    return wrong


def misplaced_over(rank: int, world: int, topology: Topology) -> list[str]:
    with on_cpu():
        return misplaced(rank, fully_sharded(numbered(topology), topology))


@with_the_package
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_rank_holds_the_elements_that_the_layout_says(name):
    topology = TOPOLOGIES[name]
    assert run(topology.world, misplaced_over, topology) == [[]] * topology.world


def misplaced_of_tensor_parallel_dtensors(rank: int, world: int) -> list[str]:
    """torch's tensor parallelism instead of Megatron's.  Shards of dim 1 are beyond megatron-fsdp 0.6.1."""
    topology = Topology(shard=2, tensor=2)
    net, mesh = numbered(topology), init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    for layer in net.layers:
        parallelize_module(layer, mesh["tensor"], {"qkv": ColwiseParallel(), "proj": ColwiseParallel()})
    with on_cpu():
        return misplaced(rank, fully_sharded(net, topology, cut=False))


@with_the_package
def test_parameters_that_torch_has_cut_already():
    assert run(4, misplaced_of_tensor_parallel_dtensors) == [[]] * 4


# --- steps ------------------------------------------------------------------------------------------------------


def groups(params: dict[str, torch.Tensor], algorithm: str = "muon") -> list[dict]:
    """Every parameter in a group of its own; names are as in `megatron.Net`."""

    def options(name: str) -> dict:
        if "embedding" in name or "router" in name or params[name].ndim == 1:
            return {"algorithm": "adamw", "lr": 1e-2}
        return {"algorithm": algorithm, **({"pieces": (8, 8, 8)} if "qkv" in name else {})}

    return [{"params": [param], "lr": 0.02, **options(name)} for name, param in params.items()]


def build(rank: int, topology: Topology, algorithm: str = "muon", dtype=torch.float32, **options):
    """A model, of which only the experts differ between ranks, its parameters, and their optimizer."""
    torch.manual_seed(0)
    net = Net(experts=3 if topology.expert else 0)
    torch.manual_seed(1 + rank // topology.tensor % topology.shard * topology.expert // topology.shard)
    for layer in net.layers:
        layer.proj.requires_grad_(False)
        for expert in layer.experts:
            expert.reset_parameters()
    model = fully_sharded(net.to(dtype), topology, **options)
    params = {name.removeprefix("module."): param for name, param in model.named_parameters()}
    return model, params, Muon(groups(params, algorithm), layout=layouts(model))


def backward(model: nn.Module, rank: int, step: int, topology: Topology) -> None:
    """Two micro-batches.  Expert 0 sees every token, expert 1 a few on some ranks, expert 2 none ever."""
    replica = rank // topology.tensor
    for micro in range(2):
        model.is_last_microbatch = micro == 1
        tokens = torch.randint(37, (5,), generator=torch.Generator().manual_seed(100 * step + 10 * micro + replica))
        routed = (0, 1) if (step + replica) % 3 == 0 else (0,)
        model(tokens, routed if topology.expert else ()).backward()


def slots(params: dict[str, torch.Tensor], optimizer: Muon, slot: str) -> dict[str, torch.Tensor]:
    """A slot of the optimizer's state, by name of the parameter, where there is one."""
    return {name: optimizer.state[param][slot] for name, param in params.items() if slot in optimizer.state[param]}


def trained(rank: int, world: int, topology: Topology, algorithm: str = "muon", **options) -> tuple[list[str], int]:
    """What differs after five steps from a single process that is given the same global gradients; empty shards."""
    with on_cpu():
        model, params, optimizer = build(rank, topology, algorithm, **options)
        where = offsets(params)
        alone = {name: nn.Parameter(value) for name, value in whole(params, where).items()}
        reference = Muon(groups(alone, algorithm))
        attach(optimizer, model)
        for step in range(5):
            backward(model, rank, step, topology)
            with patch.object(dist, "all_gather_object", side_effect=AssertionError("all_gather_object")):
                optimizer.step()
            gradients = {name: param.grad for name, param in params.items() if param.requires_grad}
            for name, gradient in whole(gradients, where).items():
                alone[name].grad = gradient
            reference.step()
            model.zero_grad_buffer()
        wrong = [name for name, value in whole(params, where).items() if not torch.equal(value, alone[name])]
        for slot in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            expected = slots(alone, reference, slot)
            found = whole(slots(params, optimizer, slot), where)
            wrong += [f"{name}.{slot}" for name in expected if not torch.equal(found[name], expected[name])]
        return wrong, sum(local_of(param).numel() == 0 for param in params.values())


def assert_as_alone(found: list[tuple[list[str], int]], empty: bool = True) -> None:
    assert [wrong for wrong, _ in found] == [[]] * len(found)
    assert any(count for _, count in found) == empty


@with_the_package
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_five_steps_are_those_of_a_single_process(name):
    topology = TOPOLOGIES[name]
    assert_as_alone(run(topology.world, trained, topology), empty=topology.zero > 0)


@with_the_package
@pytest.mark.parametrize("options", [{"algorithm": "normuon"}, {"dtype": torch.bfloat16}], ids=str)
def test_so_they_are_with_row_statistics_and_with_weights_in_16_bits(options):
    assert_as_alone(run(4, trained_with, TOPOLOGIES["HSDP, outer sharded"], options))


@with_the_package
def test_so_they_are_if_the_model_synchronises_after_every_backward_pass():
    assert_as_alone(run(2, trained_with, TOPOLOGIES["FSDP, 2 ranks"], {"sync_model_each_microbatch": True}))


def trained_with(rank: int, world: int, topology: Topology, options: dict) -> tuple[list[str], int]:
    return trained(rank, world, topology, **options)


# --- the step contract ------------------------------------------------------------------------------------------


def recorded(rank: int, world: int) -> tuple[list[str], list[str], bool, bool]:
    """What is called in a step with the hooks and without; does the forward pass use new weights after each?"""
    topology, calls = TOPOLOGIES["FSDP"], []

    def spy(name: str, real):
        def called(*args, **kwargs):
            calls.append(name)
            return real(*args, **kwargs)

        return called

    with on_cpu(), torch.no_grad():
        model, _, optimizer = build(rank, topology)
        attached = attach(optimizer, model)
        for name in ("finish_grad_sync", "install_optimized_model_weights"):
            setattr(model, name, spy(name, getattr(model, name)))
        optimizer._pipelines = spy("step", optimizer._pipelines)
        outputs, traces = [], []
        for hooked in (True, False):
            if not hooked:
                attached.remove()
            outputs.append(model(torch.arange(5)))
            with torch.enable_grad():
                backward(model, rank, 0, topology)
            calls.clear()
            optimizer.step()
            traces.append(list(calls))
            model.synchronize_gradient_reduce()
            model.zero_grad_buffer()
        outputs.append(model(torch.arange(5)))
        return *traces, bool(outputs[1] != outputs[0]), bool(outputs[2] != outputs[1])


@with_the_package
def test_gradients_are_finished_before_the_step_and_weights_installed_after_it():
    for hooked, bare, moved, moved_without in run(4, recorded):
        assert hooked == ["finish_grad_sync", "step", "install_optimized_model_weights"]
        assert bare == ["step"] and moved and not moved_without


def clipped(rank: int, world: int) -> bool:
    """Half-precision gradients of single-precision parameters are copies, which a second finish would make anew."""
    topology = TOPOLOGIES["FSDP"]
    with on_cpu():
        model, params, optimizer = build(rank, topology, dtype=torch.bfloat16)
        attach(optimizer, model)
        backward(model, rank, 0, topology)
        finish_gradients(model)
        norm = nn.utils.clip_grad_norm_([param for param in params.values() if param.requires_grad], 1e-3)
        optimizer.step()
        return norm > 0.01 and all(
            momentum.abs().max() <= 1e-3 * (1 - 0.95)
            for value in slots(params, optimizer, "momentum_buffer").values()
            if (momentum := local_of(value)).numel()
        )


@with_the_package
def test_gradients_may_be_clipped_before_the_step():
    assert all(run(4, clipped))


def without_gradients(rank: int, world: int) -> bool:
    """A step of what is frozen, or without a backward pass, changes nothing."""
    topology = TOPOLOGIES["FSDP"]
    with on_cpu():
        model, params, optimizer = build(rank, topology)
        attach(optimizer, model)
        before = {name: local_of(param).clone() for name, param in params.items()}
        backward(model, rank, 0, topology)
        optimizer.step()
        after = {name: local_of(param).clone() for name, param in params.items()}
        model.zero_grad_buffer()
        optimizer.step()
        untouched = [name for name in params if torch.equal(before[name], after[name])]
        still = all(torch.equal(after[name], local_of(param)) for name, param in params.items())
        return still and untouched == [n for n in params if "proj" in n or after[n].numel() == 0]


@with_the_package
def test_without_gradients_nothing_moves():
    assert all(run(4, without_gradients))


def refused(rank: int, world: int) -> list[str]:
    messages = []

    def attempt(error: type[Exception], function, *args) -> None:
        with pytest.raises(error) as caught:
            function(*args)
        messages.append(str(caught.value))

    topology = TOPOLOGIES["FSDP, 2 ranks"]
    with on_cpu():
        model, params, optimizer = build(rank, topology)
        attach(optimizer, model)
        attempt(RuntimeError, optimizer.step, lambda: 0.0)
        attempt(LayoutError, layouts(model), nn.Parameter(torch.ones(4, 4)))
        params["embedding.weight"]._local_tensor = torch.ones(1, 16)
        attempt(LayoutError, layouts(model), params["embedding.weight"])
        model(torch.arange(5))
        attempt(LayoutError, lambda: Muon(model.parameters(), layout=layouts(model)))
        model, _, optimizer = build(rank, topology, use_decoupled_grad=True)
        attempt(ValueError, attach, optimizer, model)
    return messages


@with_the_package
def test_what_would_go_wrong_silently_is_refused():
    expected = [
        "closure",
        "not an optimizer parameter",
        "holds 16 elements",
        "before the first forward",
        "decoupled_grad",
    ]
    for messages in run(2, refused):
        for words, message in zip(expected, messages, strict=True):
            assert words in message


def trained_by_the_guide(rank: int, world: int) -> list[float]:
    names: dict = {}
    page = (Path(__file__).parents[1] / "docs" / "guide" / "megatron_fsdp.md").read_text()
    exec(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0], names)
    tokens, losses = torch.arange(5), []
    with on_cpu():
        net = Net()
        for layer in net.layers:
            layer.stack.requires_grad_(False)  # the guide's model has no stacks of matrices
        model = fully_sharded(net, Topology(shard=2), sync_model_each_microbatch=True)
        optimizer = names["optimizer_for"](model)
        for _ in range(3):
            losses.append(model(tokens).item())
            names["train"](model, optimizer, [tokens] * 3)
    return losses


@with_the_package
def test_the_loop_of_the_guide_trains():
    for losses in run(2, trained_by_the_guide):
        assert losses[0] > losses[1] > losses[2]


# --- state ------------------------------------------------------------------------------------------------------


def all_state(params: dict[str, torch.Tensor], optimizer: Muon) -> dict[str, torch.Tensor]:
    """Momentum, which is as uneven as the parameters, and statistics of rows, which are not."""
    rows = {f"{name}.rows": value.full_tensor() for name, value in slots(params, optimizer, "second_moment").items()}
    return rows | whole(slots(params, optimizer, "momentum_buffer"), offsets(params))


Action = Callable[[dict[str, object], str], object]


def stock_save(state: dict[str, object], path: str) -> None:
    dcp.save(state, checkpoint_id=path)


def stock_load(state: dict[str, object], path: str) -> None:
    dcp.load(state, checkpoint_id=path)


def saved(
    rank: int, world: int, topology: Topology, path: str, save: Callable[..., object]
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Keys of the state, and the state, of a run that is then saved."""
    with on_cpu():
        model, params, optimizer = build(rank, topology, "normuon")
        attach(optimizer, model)
        backward(model, rank, 0, topology)
        optimizer.step()
        state = get_optimizer_state_dict(model, optimizer)
        save({"optimizer": state}, path)
        keys = [f"{name}.{slot}" for name, found in state["state"].items() for slot in found]
        return keys, all_state(params, optimizer)


def loaded(
    rank: int, world: int, topology: Topology, path: str, load: Callable[..., object]
) -> dict[str, torch.Tensor]:
    with on_cpu():
        model, params, optimizer = build(rank, topology, "normuon")
        attach(optimizer, model)
        state = get_optimizer_state_dict(model, optimizer)
        load({"optimizer": state}, path)
        set_optimizer_state_dict(model, optimizer, state)
        return all_state(params, optimizer)


@with_the_package
@pytest.mark.parametrize(
    ("source", "target"),
    [("FSDP", "FSDP, 2 ranks"), ("FSDP, 2 ranks", "HSDP, outer sharded"), ("FSDP x TP", "FSDP"), ("FSDP", "FSDP x TP")],
)
@pytest.mark.parametrize("io", ["stock", "muonckpt"])
def test_a_checkpoint_takes_the_state_to_another_topology(source, target, io, tmp_path):
    save, load = {"stock": (stock_save, stock_load), "muonckpt": (muonckpt.save, muonckpt.load)}[io]
    source, target, path = TOPOLOGIES[source], TOPOLOGIES[target], str(tmp_path / "checkpoint")
    of_ranks = run(source.world, saved, source, path, save)
    keys, state = of_ranks[0]
    assert all(of_rank[0] == keys for of_rank in of_ranks)
    names = {name.removesuffix(".rows") for name in state}
    assert len(names) == len(state) / 2 and {f"module.{name}.momentum_buffer" for name in names} <= set(keys)
    assert sum(bool(value.any()) for value in state.values()) == len(state) - 4  # two frozen parameters
    for found in run(target.world, loaded, target, path, load):
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], value) for name, value in state.items())
