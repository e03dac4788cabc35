"""What only version 2 of Megatron-FSDP has: packed buffers, gradients of other dtypes, groups that differ by rank."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import sweep
from support.every_kind import local_of
from support.megatron_model import Net, Topology, fully_sharded, last_microbatch, offsets, on_cpu, whole
from support.megatron_training import TOPOLOGIES, backward, build, groups, slots, with_the_package
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import muonckpt
from muonckpt import LayoutError
from muonckpt.optimizer import Muon
from muonckpt.optimizer.groups import MODULE_TYPES, Rule
from muonckpt.optimizer.megatron_fsdp import attach, layouts

THREE = TOPOLOGIES["version 2, 3 ranks"]


def result_of(params: dict[str, nn.Parameter], optimizer: Muon) -> dict[str, torch.Tensor]:
    """Weights and momenta, whole."""
    where = offsets(params)
    momenta = whole(slots(params, optimizer, "momentum_buffer"), where)
    return whole(params, where) | {f"{name}.momentum": value for name, value in momenta.items()}


def without_empty_shards(rank: int, world: int, named: bool) -> tuple[dict, dict, list[int]]:
    """Two runs, of which the second leaves out of its groups what is empty on a rank; what it has left out."""
    results, left_out = [], []
    for leaves_out in (False, True):
        with on_cpu():
            model, params, _ = build(rank, THREE)
            of_groups: dict[str, dict] = {}
            for name, group in zip(params, groups(params), strict=True):
                options = {key: value for key, value in group.items() if key != "params"}
                same = of_groups.setdefault(repr(options), {"params": [], **options})
                if leaves_out and not local_of(params[name]).numel():
                    left_out.append(name)
                else:
                    same["params"].append((name, params[name]) if named else params[name])
            for same in of_groups.values():
                if named and not same["params"]:
                    same["param_names"] = []
            optimizer = Muon(list(of_groups.values()), layout=layouts(model))
            attach(optimizer, model)
            for step in range(2):
                backward(model, rank, step, THREE)
                optimizer.step()
                model.zero_grad()
            results.append(result_of(params, optimizer))
    keys = optimizer.state_dict()["state"].keys()
    return results[0], results[1], [len(left_out), len(keys)]


@with_the_package
@pytest.mark.parametrize("named", sweep([False, True], True))
def test_groups_may_leave_out_parameters_whose_shards_are_empty_on_a_rank(named):
    counts = []
    for complete, partial, (num_left_out, num_state) in run(3, without_empty_shards, named):
        assert complete.keys() == partial.keys()
        assert [name for name, value in complete.items() if not torch.equal(value, partial[name])] == []
        counts.append(num_left_out)
        assert num_state == len([name for name in complete if not name.endswith(".momentum")])
    assert min(counts) > 0 and len(set(counts)) > 1


def refused_groups(rank: int, world: int) -> list[str]:
    messages = []
    with on_cpu():
        for change in ("groups", "elements", "late"):
            model, params, _ = build(rank, THREE)
            chosen = dict(params)
            if change == "elements" and rank == 1:
                name = next(name for name, param in params.items() if local_of(param).numel())
                del chosen[name]
            if change != "elements":
                chosen = {name: param for name, param in chosen.items() if local_of(param).numel()}
            made = [{"params": list(chosen.values()), "lr": 0.02, "algorithm": "adamw"}]
            if change == "groups" and rank == 1:
                made.append({"params": [], "lr": 0.02})
            optimizer = Muon(made, layout=layouts(model))
            if change == "late":
                optimizer.load_state_dict(optimizer.state_dict())
            with pytest.raises(ValueError) as caught:
                attach(optimizer, model)
            messages.append(str(caught.value))
    return messages


@with_the_package
def test_groups_that_cannot_be_made_the_same_are_refused_on_all_ranks():
    expected = ["1 to 2 parameter groups", "which have elements of it, in none", "has been stepped or loaded"]
    found = run(3, refused_groups)
    assert found == [found[0]] * 3
    for words, message in zip(expected, found[0], strict=True):
        assert words in message


def dtypes_in_a_step(rank: int, world: int, options: dict) -> list[bool]:
    """Whether gradients have their parameters' dtypes within a step, and are as before after it, also if it fails."""
    with on_cpu():
        model, params, optimizer = build(rank, THREE, dtype=torch.bfloat16, **options)
        attach(optimizer, model)
        seen, fails = [], False

        def look(*_: object) -> None:
            seen.append(all(param.grad is None or param.grad.dtype == param.dtype for param in params.values()))
            if fails:
                raise ArithmeticError("a hook")

        optimizer.register_step_pre_hook(look)
        found = []
        for fails in (False, True, False):
            backward(model, rank, 0, THREE)
            before = {name: param.grad for name, param in params.items()}
            differ = any(grad is not None and grad.dtype != params[name].dtype for name, grad in before.items())
            try:
                optimizer.step()
            except ArithmeticError:
                assert fails
            found.append(differ and seen.pop() and all(params[name].grad is before[name] for name in params))
            model.zero_grad()
        return found


@with_the_package
@pytest.mark.parametrize(
    "options",
    [{}, {"main_params_dtype": torch.bfloat16, "main_grads_dtype": torch.float32}],
    ids=["main weights in float32", "main gradients in float32"],
)
def test_a_step_takes_gradients_in_the_dtype_of_parameters_and_leaves_them_as_they_were(options):
    assert run(3, dtypes_in_a_step, options) == [[True, True, True]] * 3


def not_the_last_microbatch(rank: int, world: int) -> str:
    topology = Topology(outer=2, shard=2, version=2)
    with on_cpu():
        model, _, optimizer = build(rank, topology)
        attach(optimizer, model)
        with last_microbatch(model, is_last=False):
            model(torch.arange(5)).backward()
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        with last_microbatch(model, is_last=True):
            model(torch.arange(5)).backward()
        optimizer.step()
        return str(caught.value)


@with_the_package
def test_gradients_that_hybrid_fsdp_has_not_reduced_are_refused_and_the_advice_helps():
    for message in run(4, not_the_last_microbatch):
        assert "gradients are not reduced yet" in message and "is_last=True" in message


class Outside(nn.Module):
    """A model of which Megatron-FSDP shards a part."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.head = nn.Linear(1, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(tokens).view(1)).sum()


def partly_sharded(rank: int, world: int) -> tuple[list[bool], list[str]]:
    """Whether what Megatron-FSDP shards and what it does not have moved; the algorithms of both, by for_model."""
    with on_cpu():
        torch.manual_seed(0)
        model = Outside()
        fully_sharded(model.net, Topology(shard=world, version=2))
        rules = [[Rule("experts", "*.stack")], MODULE_TYPES]
        where = {"layout": layouts(model), "replicas": dist.group.WORLD}
        optimizer = Muon.for_model(
            model, head="head", split={"*.qkv": None}, rules=rules, lr=0.02, adamw_lr=1e-3, **where
        )
        attach(optimizer, model)
        before = {name: local_of(param).clone() for name, param in model.named_parameters()}
        model(torch.arange(5)).backward()
        optimizer.step()
        moved = {name for name, param in model.named_parameters() if not torch.equal(local_of(param), before[name])}
        names = {param: name for name, param in model.named_parameters()}
        algorithms = []
        for group in optimizer.param_groups:
            algorithms += [f"{names[param]} {group['algorithm']}" for param in group["params"]]
        return ["head.weight" in moved, any(name.startswith("net.") for name in moved)], algorithms


@with_the_package
def test_a_part_of_a_model_may_be_sharded_and_rules_sort_all_of_it():
    found = run(3, partly_sharded)
    assert [moved for moved, _ in found] == [[True, True]] * 3
    assert {"net.layers.0.qkv.weight muon", "net.layers.1.stack muon", "head.weight adamw"} <= set(found[0][1])


def refused(rank: int, world: int, path: str) -> list[str]:
    messages = []

    def attempt(error: type[Exception], function, *args) -> None:
        with pytest.raises(error) as caught:
            function(*args)
        messages.append(str(caught.value))

    with on_cpu():
        model, params, optimizer = build(rank, THREE)
        attempt(LayoutError, Muon, [params["embedding.weight"]])
        attempt(LayoutError, muonckpt.save, model.state_dict(), path)
        attach(optimizer, model)
        muonckpt.save(model.state_dict(), path)  # as the message says
        attempt(RuntimeError, optimizer.step, lambda: 0.0)
        attempt(LayoutError, layouts(model), nn.Parameter(torch.ones(4, 4)))
        [group, *_] = [group for module in model.modules() for group in getattr(module, "parameter_groups", ())]
        attempt(LayoutError, layouts(model), group.unsharded_parameters[0])
        params["embedding.weight"]._local_tensor = torch.ones(1, 16)
        attempt(LayoutError, layouts(model), params["embedding.weight"])
        group.main_weight.offset += 16
        attempt(LayoutError, layouts(model), group.sharded_parameters[0])
    return messages


@with_the_package
def test_what_would_go_wrong_silently_is_refused(tmp_path):
    cure, foreign = "give Muon layout=layouts(model) and call attach(optimizer, model)", "not an optimizer parameter"
    expected = [cure, cure, "closure", foreign, foreign, "holds 16 elements", "others that the layout knows"]
    for messages in run(3, refused, str(tmp_path / "saved")):
        for words, message in zip(expected, messages, strict=True):
            assert words in message


ATOMS = {"a": (1, (6, 4)), "b": (0, (3, 4)), "c": (2, (2, 5, 4)), "d": (1, (7,))}
"""By name, the rank that has all of a tensor, and its shape."""

BLOCKS = {"rows": {0: (0, 5), 2: (5, 8)}}
"""By name, the first and last row on the ranks that have any."""


def atoms(rank: int, world: int, shift: int = 0) -> nn.Module:
    """A model whose parameters are whole on one rank, or cut in blocks of rows, and say so by DCP's hooks alone."""
    mesh, rank = init_device_mesh("cpu", (world,)), (rank + shift) % world
    model = nn.Module()
    for name, shape in [*((name, shape) for name, (_, shape) in ATOMS.items()), ("rows", (8, 4))]:
        torch.manual_seed(sum(shape))
        value = torch.randn(shape)
        if name in ATOMS:
            lo, hi = (0, shape[0]) if ATOMS[name][0] == rank else (0, 0)
        else:
            lo, hi = BLOCKS[name].get(rank, (0, 0))
        local = value[lo:hi].clone()
        param = nn.Parameter(
            DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())
        )
        chunk = ChunkStorageMetadata(torch.Size((lo, *[0] * (len(shape) - 1))), local.shape)
        param._local_tensor.__create_chunk_list__ = lambda chunk=chunk: [chunk]
        param.whole = value
        setattr(model, name, param)
    return model


def optimizer_of(params: dict[str, nn.Parameter], **options) -> Muon:
    """An optimizer with a group for each parameter."""
    kinds = {name: "muon" if param.ndim > 1 else "adamw" for name, param in params.items()}
    return Muon([{"params": [p], "lr": 0.02, "algorithm": kinds[name]} for name, p in params.items()], **options)


def stepped_atoms(rank: int, world: int, path: str) -> list[str]:
    """What differs from a single process; the run is saved."""
    model = atoms(rank, world)
    params = dict(model.named_parameters())
    alone = {name: nn.Parameter(param.whole.clone()) for name, param in params.items()}
    optimizer, reference = optimizer_of(params, layout=layouts(model)), optimizer_of(alone)
    attach(optimizer, model)
    for step in range(2):
        for name, param in params.items():
            torch.manual_seed(step + param.numel())
            gradient = alone[name].grad = torch.randn(param.shape)
            [chunk] = param._local_tensor.__create_chunk_list__()
            rows = slice(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
            param.grad = DTensor.from_local(
                gradient[rows].clone(), param.device_mesh, param.placements, run_check=False, shape=param.shape,
                stride=param.stride(),
            )  # fmt: skip
        optimizer.step()
        reference.step()
    wrong = []
    for name, param in params.items():
        [chunk] = param._local_tensor.__create_chunk_list__()
        rows = slice(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
        if not torch.equal(local_of(param), alone[name][rows]):
            wrong.append(name)
    weights, state = get_state_dict(model, optimizer)
    muonckpt.save({"model": weights, "optimizer": state}, path)
    return wrong


def loaded_atoms(rank: int, world: int, path: str) -> list[str]:
    """The parameters of which a rank has elements that another one had, loaded and compared with what was saved."""
    model = atoms(rank, world, shift=1)
    params = dict(model.named_parameters())
    optimizer = optimizer_of(params, layout=layouts(model))
    attach(optimizer, model)
    weights, state = get_state_dict(model, optimizer)
    for tensor in (*weights.values(), *(slot for slots_of in state["state"].values() for slot in slots_of.values())):
        local_of(tensor).fill_(-1)
    muonckpt.load({"model": weights, "optimizer": state}, path)
    muonckpt.attest({"model": weights, "optimizer": state}, path)
    return [name for name, weight in weights.items() if local_of(weight).numel()]


@pytest.mark.parametrize("world", [3, 4])
def test_parameters_may_be_whole_on_one_rank_if_they_declare_it_by_the_hooks_of_dcp(world, tmp_path):
    path = str(tmp_path / "saved")
    assert run(world, stepped_atoms, path) == [[]] * world
    held = run(7 - world, loaded_atoms, path)
    assert held[0] == ["a", "d"] and "c" in held[1] and "b" in held[-1]


def with_wrong_boxes(rank: int, world: int) -> list[str]:
    messages = []
    for wrong in (0, 1):
        model = atoms(rank, world)
        if rank == 1:
            chunk = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((5, 4))), None][wrong]
            if chunk is None:
                del model.a._local_tensor.__create_chunk_list__
            else:
                model.a._local_tensor.__create_chunk_list__ = lambda chunk=chunk: [chunk]
        with pytest.raises(LayoutError) as caught:
            layouts(model)
        messages.append(str(caught.value))
    return messages


def test_boxes_that_do_not_make_up_a_tensor_are_refused_on_all_ranks():
    for messages in run(3, with_wrong_boxes):
        assert all("a: " in message for message in messages), messages


def of_the_guide() -> dict:
    """What the guide defines for version 2."""
    names: dict = {"stacks": [[Rule("experts", "*.stack")], MODULE_TYPES]}
    page = (Path(__file__).parents[2] / "docs" / "guide" / "megatron_fsdp.md").read_text()
    section = page.partition("\n## Version 2\n")[2]
    code = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[0]
    head = 'head="lm_head", '
    assert head in code
    # The model here has no head, and stacks of matrices.
    exec(code.replace(head, 'rules=stacks, split={"*.qkv": None}, '), names)
    return names


def week(rank: int, world: int, folder: str, dtype: torch.dtype, frozen: bool) -> dict:
    """A job of the guide's: what it began and ended with, whole."""
    guide = of_the_guide()
    with on_cpu():
        torch.manual_seed(0)
        net = Net().to(dtype)
        net.layers[0].proj.requires_grad_(not frozen)
        guide["shard"](net, init_device_mesh("cpu", (world,)))
        optimizer = guide["optimizer_for"](net)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        params = dict(net.named_parameters())
        began: dict = {}

        def note(*_: object) -> None:
            began.update(began or result_of(params, optimizer))

        optimizer.register_step_pre_hook(note)
        batches = [torch.arange(5) + number for number in range(3)]
        fresh = [] if frozen else ["layers.0.proj.weight"]
        series = muonckpt.Series(folder, net, optimizer, scheduler=schedule)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            guide["train"](series, net, optimizer, schedule, batches, fresh=fresh)
        rates = [group["lr"] for group in optimizer.param_groups]
        told = [str(warning.message) for warning in caught if "resumed from" in str(warning.message)]
        return {"began": began, "ended": result_of(params, optimizer), "rates": rates, "told": told}


@with_the_package
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_a_run_goes_on_in_its_second_week_on_other_ranks_with_a_parameter_unfrozen(dtype, tmp_path):
    folder, name = str(tmp_path / "run"), "layers.0.proj.weight"
    first = run(3, week, folder, dtype, True)[0]
    assert first["told"] == [] and f"{name}.momentum" not in first["ended"]
    assert not torch.equal(first["began"]["embedding.weight"], first["ended"]["embedding.weight"])
    second = run(2, week, folder, dtype, False)[0]
    ended, began = first["ended"], second["began"]
    [told] = second["told"]
    assert f"not as it was saved: {name}.requires_grad: False -> True; 61 tensors and" in told
    assert not began[f"{name}.momentum"].any() and second["ended"][f"{name}.momentum"].any()
    assert {key for key, value in ended.items() if not torch.equal(began[key], value)} == set()
    assert began.keys() - ended.keys() == {f"{name}.momentum"}
    assert first["rates"] == [rate * 4 for rate in second["rates"]] != second["rates"]
