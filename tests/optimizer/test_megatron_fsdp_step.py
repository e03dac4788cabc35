"""What a step on Megatron-FSDP calls and when, what it leaves alone, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.every_kind import local_of
from support.megatron_model import Net, Topology, fully_sharded, on_cpu, zero_gradients
from support.megatron_training import TOPOLOGIES, backward, build, slots, with_the_package
from support.workers import run
from torch import nn

from muonckpt import LayoutError
from muonckpt.optimizer import Muon, clip_grad_norm_
from muonckpt.optimizer.megatron_fsdp import attach, finish_gradients, layouts

BOTH = ["FSDP, 2 ranks", "version 2, 2 ranks"]


def recorded(rank: int, world: int) -> tuple[list[str], list[str], bool, bool]:
    """What is called in a step with the hooks and without; does the forward pass use new weights after each?"""
    topology, calls = TOPOLOGIES["FSDP, 2 ranks"], []

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
        dist.all_to_all_single = spy("step", dist.all_to_all_single)
        outputs, traces = [], []
        for hooked in (True, False):
            if not hooked:
                attached.remove()
            outputs.append(model(torch.arange(5)))
            with torch.enable_grad():
                backward(model, rank, 0, topology)
            calls.clear()
            optimizer.step()
            traces.append(list(dict.fromkeys(calls)))
            model.synchronize_gradient_reduce()
            zero_gradients(model)
        outputs.append(model(torch.arange(5)))
        return *traces, bool(outputs[1] != outputs[0]), bool(outputs[2] != outputs[1])


@with_the_package
def test_gradients_are_finished_before_the_step_and_weights_installed_after_it():
    for hooked, bare, moved, moved_without in run(2, recorded):
        assert hooked == ["finish_grad_sync", "step", "install_optimized_model_weights"]
        assert bare == ["step"] and moved and not moved_without


def clipped(rank: int, world: int, topology: Topology, dtype: torch.dtype) -> bool:
    """Half-precision gradients of single-precision parameters are copies, which a second finish would make anew."""
    with on_cpu():
        model, params, optimizer = build(rank, topology, dtype=dtype)
        attach(optimizer, model)
        backward(model, rank, 0, topology)
        finish_gradients(model)
        trained = [param for param in params.values() if param.requires_grad]
        ours, norm = clip_grad_norm_(trained, 1e9), nn.utils.clip_grad_norm_(trained, 1e-3)
        optimizer.step()
        return (
            ours == pytest.approx(float(norm), rel=1e-3)
            and norm > 0.01
            and all(
                momentum.abs().max() <= 1e-3 * (1 - 0.95)
                for value in slots(params, optimizer, "momentum_buffer").values()
                if (momentum := local_of(value)).numel()
            )
        )


@with_the_package
@pytest.mark.parametrize(("name", "dtype"), [*zip(BOTH, (torch.bfloat16, torch.float32), strict=True)])
def test_gradients_may_be_clipped_before_the_step(name, dtype):
    assert all(run(2, clipped, TOPOLOGIES[name], dtype))


def without_gradients(rank: int, world: int, topology: Topology) -> bool:
    """A step of what is frozen, or without a backward pass, changes nothing."""
    with on_cpu():
        model, params, optimizer = build(rank, topology)
        attach(optimizer, model)
        before = {name: local_of(param).clone() for name, param in params.items()}
        backward(model, rank, 0, topology)
        optimizer.step()
        after = {name: local_of(param).clone() for name, param in params.items()}
        zero_gradients(model)
        optimizer.step()
        untouched = [name for name in params if torch.equal(before[name], after[name])]
        still = all(torch.equal(after[name], local_of(param)) for name, param in params.items())
        return still and untouched == [n for n in params if "proj" in n or after[n].numel() == 0]


@with_the_package
@pytest.mark.parametrize("name", BOTH)
def test_without_gradients_nothing_moves(name):
    assert all(run(2, without_gradients, TOPOLOGIES[name]))


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
    page = (Path(__file__).parents[2] / "docs" / "guide" / "megatron_fsdp.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    head = 'head="module.lm_head"'
    assert head in code
    exec(code.replace(head, 'split={"*.qkv": None}'), names)  # the model here has no head
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
