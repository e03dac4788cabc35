"""Ranks that differ are told, and an error on one rank reaches all of them: nobody waits for a time-out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support import sweep
from support.failing import OutOfMemory, raised
from support.layer_wise_training import Net, gradients, groups
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from muonckpt.optimizer import LayerWise, Muon, StepExecution, clip_grad_norm_
from muonckpt.optimizer.step import exchange as exchange_module
from muonckpt.optimizer.step.agreement import AGREE_ON_STEP, Intent, refusal
from muonckpt.optimizer.step.exchange import LINKS

ODD = 1
"""The rank that differs from the others, or fails."""


def rows(mesh: DeviceMesh, *shape: int) -> nn.Parameter:
    """A parameter whose rows lie on the ranks of a mesh, with a gradient."""
    generator = torch.Generator().manual_seed(sum(shape))
    value, gradient = (
        distribute_tensor(torch.randn(shape, generator=generator), mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
        for _ in range(2)
    )
    param = nn.Parameter(value)
    param.grad = gradient
    return param


def plain(*shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(sum(shape))
    param = nn.Parameter(torch.randn(shape, generator=generator))
    param.grad = torch.randn(shape, generator=generator)
    return param


# --- options --------------------------------------------------------------------------------------------------------

OPTIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("lr", {}, {"lr": 0.5}),
    ("lr", {"algorithm": "adamw", "lr": 0.1}, {"lr": torch.tensor(0.5)}),
    ("momentum", {}, {"momentum": 0.5}),
    ("weight_decay", {"algorithm": "lion", "lr": 0.1}, {"weight_decay": 0.5}),
    ("nesterov", {}, {"nesterov": False}),
    ("cautious", {}, {"cautious": True}),
    ("betas", {"algorithm": "adamw", "lr": 0.1}, {"betas": (0.9, 0.5)}),
    ("beta2", {"algorithm": "normuon"}, {"beta2": 0.5}),
    ("update_norm", {"algorithm": "normuon"}, {"update_norm": "rms"}),
    ("ns_coefficients", {}, {"ns_coefficients": [(2.0, -1.5, 0.5)] * 5}),
    ("eps", {}, {"eps": 1e-3}),
    ("eps", {"algorithm": "adamw", "lr": 0.1}, {"eps": 1e-3}),
    ("ns_coefficients", {}, {"ns_coefficients": "keller"}),
    ("ns_steps", {}, {"ns_steps": 4}),
    ("ns_dtype", {}, {"ns_dtype": "float32"}),
    ("gram", {"gram": (2,)}, {"gram": (3,)}),
    ("adjust_lr_fn", {}, {"adjust_lr_fn": "spectral"}),
    ("pieces", {}, {"pieces": (4, 4)}),
    ("algorithm", {}, {"algorithm": "normuon"}),
]


def differing_options(rank: int, world: int, replicated: bool) -> list[str]:
    mesh, found = init_device_mesh("cpu", (world,)), []
    for _, common, odd in OPTIONS:
        params = [plain(8, 12)] if replicated else [rows(mesh, 8, 12)]
        group = {"params": params, **common, **(odd if rank == ODD else {})}
        opt = Muon([group], replicas=dist.group.WORLD if replicated else None)
        found.append(raised(opt.step))
    return found


@pytest.mark.parametrize("replicated", sweep([False, True], True))
def test_options_that_differ_are_named_on_every_rank(replicated: bool) -> None:
    for messages in run(3, differing_options, replicated):
        for (name, _, _), message in zip(OPTIONS, messages, strict=True):
            assert message.startswith("RuntimeError: ") and f"rank {ODD}: {name} of group 0" in message, (name, message)


def rate_of_one_rank(rank: int, world: int) -> list[str]:
    """After some steps; then all ranks agree again."""
    mesh = init_device_mesh("cpu", (world,))
    opt, found = Muon([rows(mesh, 8, 12)]), []
    for rate in (0.1, 0.1 if rank == ODD else 0.2, 0.1):
        opt.param_groups[0]["lr"] = rate
        found.append(raised(opt.step))
    return found


def test_a_rate_that_changes_on_one_rank_is_named_and_training_can_go_on() -> None:
    for before, differing, after in run(3, rate_of_one_rank):
        assert before == after == "no error"
        assert "lr of group 0 is 0.1, on rank 0 0.2" in differing


def plans_of_one_rank(rank: int, world: int) -> list[str]:
    """One rank alone changes an option, loads a state, and adds a group; then the others do so, too."""
    mesh, found = init_device_mesh("cpu", (world,)), []
    opt = Muon([rows(mesh, 8, 12) for _ in range(9)])
    opt.step()
    for change in (
        lambda: opt.param_groups[0].update(ns_steps=4),
        lambda: opt.load_state_dict(opt.state_dict()),
        lambda: opt.add_param_group({"params": [rows(mesh, 4, 4)]}),
    ):
        if rank == ODD:
            change()
        found.append(raised(opt.step))
        if rank != ODD:
            change()
        found.append(raised(opt.step))
    return found


def test_a_rank_that_alone_plans_anew_is_named() -> None:
    for messages in run(3, plans_of_one_rank):
        assert all(f"rank {ODD}: the plan is made again" in message for message in messages[::2])
        assert set(messages[1::2]) == {"no error"}


def settings(rank: int, world: int) -> Iterator[dict[str, Any]]:
    def broken(*_: Any) -> int:
        raise OSError("the table of costs is gone")

    yield {"execution": StepExecution(exchange="all_gather")} if rank == ODD else {}
    yield {"execution": StepExecution(cost=broken)} if rank == ODD else {}
    yield {"execution": StepExecution(cost=lambda m, n, steps, gram: m)} if rank == ODD else {}


def differing_settings(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world,))
    shapes = [(8, 12), (40, 4), (4, 40), (16, 16), (30, 6)]
    return [raised(Muon([rows(mesh, *s) for s in shapes], **options).step) for options in settings(rank, world)]


def test_settings_of_the_optimizer_that_differ_or_fail_stop_every_rank() -> None:
    for rank, (exchange, broken, cost) in enumerate(run(3, differing_settings)):
        assert f"rank {ODD}: exchange is all_gather, on rank 0 all_to_all" in exchange
        assert f"rank {ODD}: the plan is" in cost
        assert (
            broken.startswith("OSError: the table" if rank == ODD else "RuntimeError: ") and "table of costs" in broken
        )


def named_in_another_order(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (world,))
    named = {name: rows(mesh, 8, 12) for name in ("query", "key", "norm")}
    order = ["key", "query"] if rank == ODD else ["query", "key"]
    return raised(Muon([(name, named[name]) for name in order]).step)


def test_equal_matrices_in_another_order_are_told_by_their_names() -> None:
    for message in run(3, named_in_another_order):
        assert f"rank {ODD}: parameter 0 is parameter 'key', (8, 12)" in message


# --- gradients ------------------------------------------------------------------------------------------------------


def missing_gradients(rank: int, world: int) -> list[str]:
    mesh, found = init_device_mesh("cpu", (world,)), []
    for algorithm in ("muon", "adamw", "lion"):
        vector, matrix = rows(mesh, 12), rows(mesh, 8, 12)
        groups = [{"params": [vector, matrix], "algorithm": algorithm, "lr": 0.1}]
        if algorithm == "muon":
            groups = [{"params": [matrix]}, {"params": [vector], "algorithm": "adamw", "lr": 0.1}]
        for param in (vector, matrix):
            if rank == ODD:
                param.grad = None
            opt = Muon(groups)
            found.append(raised(opt.step))
            param.grad = torch.ones_like(param)
            found.append(raised(opt.step))
    return found


def test_a_gradient_that_is_missing_on_one_rank_stops_every_rank_in_groups_of_any_algorithm() -> None:
    for messages in run(3, missing_gradients):
        for message in messages[::2]:
            assert f"rank {ODD}: the gradient of parameter" in message and "is missing, on rank 0 there" in message
        assert set(messages[1::2]) == {"no error"}


def bad_gradients(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world,))
    dense, sharded = plain(8, 12), rows(mesh, 8, 12)
    if rank == ODD:
        dense.grad = torch.ones(8, 12).to_sparse()
        sharded.grad = distribute_tensor(torch.ones(8, 12), mesh, [Replicate()], src_data_rank=None)
    return [raised(Muon([param], replicas=dist.group.WORLD).step) for param in (dense, sharded)]


def test_a_gradient_that_one_rank_cannot_take_stops_every_rank() -> None:
    for rank, (sparse, placed) in enumerate(run(3, bad_gradients)):
        assert "does not take sparse gradients" in sparse and "redistribute the gradient" in placed
        assert all((f"rank {ODD}: raised" not in message) == (rank == ODD) for message in (sparse, placed))


# --- errors ---------------------------------------------------------------------------------------------------------


def failing_owners(rank: int, world: int, exchange: str) -> list[str]:
    """The products fail at once, in the middle of a step, and before its last stage; then nothing does."""
    mesh, found = init_device_mesh("cpu", (world,)), []
    params = [rows(mesh, 16, 40) for _ in range(4 * world)]
    opt = Muon(params, execution=StepExecution(stages=3, exchange=exchange))
    opt.step()
    for after in (0, 7, 25, 40):
        if rank != ODD:
            found.append(raised(opt.step))
            continue
        with OutOfMemory(after):
            found.append(raised(opt.step))
    return [*found, raised(opt.step)]


@pytest.mark.parametrize("exchange", LINKS)
def test_an_owner_that_fails_is_named_on_every_rank(exchange: str) -> None:
    for rank, (*failed, after) in enumerate(run(3, failing_owners, exchange)):
        wanted = "MemoryError: out of memory" if rank == ODD else f"rank {ODD}: raised MemoryError: out of memory"
        assert all(wanted in message for message in failed) and after == "no error"


def read_later(rank: int, world: int) -> tuple[list[str], bool]:
    """As on a GPU, where the notes after the first ones are read when the next step begins."""
    mesh = init_device_mesh("cpu", (world,))
    params = [rows(mesh, 16, 40) for _ in range(4 * world)]
    opt = Muon(params, execution=StepExecution(stages=2))
    opt.step()
    with patch.object(exchange_module, "is_asynchronous", lambda device: True):
        if rank == ODD:
            with OutOfMemory(7):
                return [raised(opt.step)], True
        found = [raised(opt.step), raised(opt.step)]
    return found, all(bool(param.to_local().isfinite().all()) for param in params)


def test_where_notes_are_read_later_an_owner_that_fails_sends_zeros_and_stops_the_next_step() -> None:
    for rank, (messages, finite) in enumerate(run(3, read_later)):
        later = "RuntimeError: another rank failed during the last optimizer step"
        wanted = ["MemoryError: out of memory"] if rank == ODD else ["no error", later]
        assert finite and len(messages) == len(wanted) and all(map(str.startswith, messages, wanted))


def failing_closures_and_hooks(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world,))
    opt = Muon([rows(mesh, 8, 12)])

    def fail(*_: Any) -> float:
        if rank == ODD:
            raise KeyError("no such batch")
        return 1.0

    found = [raised(opt.step, fail), raised(opt.step, fail)]
    hook = opt.register_step_pre_hook(lambda *_: fail() and None)
    found.append(raised(opt.step))
    hook.remove()
    return [*found, raised(opt.step)]


def test_an_error_in_a_closure_or_a_hook_reaches_every_rank_also_at_the_first_step() -> None:
    for rank, (*failed, after) in enumerate(run(3, failing_closures_and_hooks)):
        wanted = "KeyError: 'no such batch'" if rank == ODD else f"rank {ODD}: raised KeyError: 'no such batch'"
        assert all(wanted in message for message in failed) and after == "no error"


# --- sets of ranks --------------------------------------------------------------------------------------------------


def part_of_a_mesh(rank: int, world: int, axes: tuple[str, ...]) -> list[str]:
    """Gradients are missing on the last rank: of a parameter on one axis only.  All ranks share others."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    params = [rows(grid[axis], 8, 12) for axis in axes]
    if rank == world - 1:
        params[0].grad = None
    opt = Muon(params)
    found = [raised(opt.step)]
    for param in params:
        param.grad = torch.ones_like(param)
    return [*found, raised(opt.step)]


@pytest.mark.parametrize("axes", [("b", ("a", "b")), ("a", ("a", "b")), ("b", "a")], ids=str)
def test_what_a_part_of_a_mesh_does_not_agree_on_stops_the_whole_mesh(axes: tuple[str, ...]) -> None:
    """A rank that shares nothing with the one that differs is told by those that do."""
    for first, second in run(4, part_of_a_mesh, axes):
        assert first.startswith("RuntimeError") and "the gradient of parameter 0" in first
        assert second == "no error"


def other_groups(rank: int, world: int) -> list[str]:
    """One rank lacks the matrices: those that are sharded, and those that are replicated."""
    mesh, found = init_device_mesh("cpu", (world,)), []
    for matrix, vector in ((rows(mesh, 8, 12), rows(mesh, 12)), (plain(8, 12), rows(mesh, 12))):
        groups = [{"params": [vector], "algorithm": "adamw", "lr": 0.1}]
        if rank != ODD:
            groups.append({"params": [matrix], "algorithm": "muon", "lr": 0.1})
        found.append(raised(Muon(groups, replicas=dist.group.WORLD).step))
    return found


def test_a_rank_without_a_group_of_matrices_is_told() -> None:
    for messages in run(3, other_groups):
        assert all(f"rank {ODD}: " in message and "of group 1 is unknown" in message for message in messages)


# --- steps ----------------------------------------------------------------------------------------------------------


def crossed_optimizers(rank: int, world: int, layer_wise: bool) -> list[str]:
    """Of two with equal parameters, one rank steps the second one first: at the first step, and later."""
    mesh = init_device_mesh("cpu", (world,))

    def one() -> tuple[Callable[[], object], Any]:
        if not layer_wise:
            return lambda: None, Muon([rows(mesh, 8, 12), rows(mesh, 4, 4)])
        net = Net(("qkv", "bias"))
        return lambda: net(gradients(net, 0, rank)).backward(), LayerWise(net, groups(net))

    found = []
    for steps in (0, 2):
        pair = [one(), one()]
        for _ in range(steps):
            found += [raised(opt.step) for backward, opt in pair if backward() is None]
        for backward, _ in pair:
            backward()
        found += [raised(opt.step) for _, opt in (pair[::-1] if rank == ODD else pair)]
    return found


@pytest.mark.parametrize("layer_wise", [False, True])
def test_optimizers_with_equal_parameters_are_told_apart(layer_wise: bool) -> None:
    for messages in run(3, crossed_optimizers, layer_wise):
        assert messages[2:6] == ["no error"] * 4
        for told in (*messages[:2], *messages[6:]):
            assert f"rank {ODD}: the optimizer's number among those with equal parameters is" in told


def left_out(rank: int, world: int, ranks: tuple[int, ...], made_up: int) -> list[str]:
    """Some ranks leave out the third step, as a scaler of gradients does, and one of them makes it up later."""
    mesh = init_device_mesh("cpu", (world,))
    params = [rows(mesh, 8, 12), rows(mesh, 4, 4)]
    opt, found = Muon(params), []
    for step in range(5):
        opt.zero_grad()
        for param in params:
            param.grad = distribute_tensor(torch.full(param.shape, step + 1.0), mesh, [Shard(0)], src_data_rank=None)
        if step != 2 or rank not in ranks:
            found.append(raised(opt.step))
        if step == made_up and rank in ranks and found[-1] == "no error":
            found.append(raised(opt.step))
        if found[-1] != "no error":
            break
    return found


@pytest.mark.parametrize("made_up", [3, 4])
def test_a_step_that_one_rank_leaves_out_is_told_in_that_step(made_up: int) -> None:
    for messages in run(3, left_out, (ODD,), made_up):
        assert messages[:2] == ["no error"] * 2 and len(messages) == 3
        assert f"rank {ODD}: the number of times that gradients were dropped without a step is 1" in messages[2]
    assert run(3, left_out, (0, 1, 2), made_up) == [["no error"] * 5] * 3


def other_dtypes(rank: int, world: int) -> list[str]:
    """A momentum and a gradient of another dtype on one rank, before the first step and after some."""
    mesh, found = init_device_mesh("cpu", (world,)), []
    for params in ([rows(mesh, 8, 12)], [rows(mesh, 8, 12)], [rows(mesh, 12)], [rows(mesh, 8, 12)]):
        group = {"params": params} if params[0].ndim > 1 else {"params": params, "algorithm": "adamw", "lr": 0.1}
        opt = Muon([group])
        for _ in range(len(found) % 2):
            opt.step()
        if rank == ODD and len(found) < 3:
            slots = opt.state[params[0]]
            slot = "momentum_buffer" if params[0].ndim > 1 else "exp_avg"
            slots[slot] = slots[slot].bfloat16()
        elif rank == ODD:
            params[0].grad_dtype = None
            params[0].grad = params[0].grad.bfloat16()
        found.append(raised(opt.step))
    return found


def test_dtypes_of_gradients_and_momenta_are_compared() -> None:
    for *momenta, gradient in run(3, other_dtypes):
        for told in momenta:
            assert f"rank {ODD}: the momentum of parameter 0 is torch.bfloat16, on rank 0 torch.float32" in told
        assert f"rank {ODD}: the gradient of parameter 0 is there, torch.bfloat16, on rank 0 there, torch" in gradient


def other_limits(rank: int, world: int) -> list[str]:
    mesh, found = init_device_mesh("cpu", (world,)), []
    limit = 0.5 if rank == ODD else 0.25
    param = rows(mesh, 8, 12)
    found.append(raised(clip_grad_norm_, [param], limit))
    net = Net(("qkv", "bias"))
    opt = LayerWise(net, groups(net))
    net(gradients(net, 0, rank)).backward()
    found.append(raised(opt.clip_grad_norm_, limit))
    return found


def test_limits_of_norms_that_differ_are_told() -> None:
    for rank, (clipped, layer_wise) in enumerate(run(3, other_limits)):
        mine, others = (0.5, 0.25) if rank == ODD else (0.25, 0.5)
        for told in (clipped, layer_wise):
            assert f"max_norm is {mine} on rank {rank}, and {others} on others" in told


# --- the words ------------------------------------------------------------------------------------------------------


def test_a_refusal_names_ranks_once_and_is_short() -> None:
    text = str(refusal(AGREE_ON_STEP, {rank: "lr differs" if rank else "" for rank in range(4096)}))
    assert "ranks 1, 2, 3, 4, 5 and 4090 more: lr differs." in text and len(text) < 500
    facts = {f"option {number}": "1" for number in range(100)}
    complaint = Intent.of(AGREE_ON_STEP, facts).complaint(0, dict.fromkeys(facts, "2"))
    assert complaint.startswith("option 0 is 1, on rank 0 2; ") and complaint.endswith("and 98 more")
    assert len(Intent.of(AGREE_ON_STEP, {}).failed(ValueError("x" * 9999)).complaint(0, {})) < 600
