"""State in host memory has the bits of state on the device, whenever the copies between the two are done."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.every_kind import TENSORS, assert_same_bits, make, single, snapshot, train, values
from support.interpreted import DEVICE, on_gpu
from support.topologies import TOPOLOGIES, placer
from support.workers import run
from torch import Tensor, nn

from muonckpt.optimizer import Muon, muon as muon_module
from muonckpt.optimizer.ground import host_memory
from muonckpt.optimizer.ground.host_memory import STATE_MEMORIES, Transfers

HERE = torch.device("cpu")

MOST = 3000
"""Bytes of state that come together: two or three of these tensors."""


class LateTransfers(Transfers):
    """Copies as two streams may do them at worst: those to the device at once, those back when somebody waits for them.
    Between the two there is only NaN (in codes, 85) where a tensor rests.
    """

    bytes_here = peak_bytes = most_together = 0

    def fetch(self, resting: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        here, wait = super().fetch(resting)
        cls = LateTransfers
        cls.most_together = max(cls.most_together, sum(tensor.nbytes for tensor in here))
        for tensor, home in zip(here, resting, strict=True):
            home.fill_(math.nan if home.is_floating_point() else 85)
            cls.bytes_here += tensor.nbytes
            weakref.finalize(tensor, cls.left, tensor.nbytes)
        cls.peak_bytes = max(cls.peak_bytes, cls.bytes_here)
        return here, wait

    def send_back(self, resting: Sequence[Tensor], here: Sequence[Tensor]) -> Callable[[], None]:
        targets, sources = list(resting), list(here)

        def wait() -> None:
            Transfers.send_back(self, targets, sources)
            sources.clear()

        return wait

    @classmethod
    def left(cls, nbytes: int) -> None:
        cls.bytes_here -= nbytes


def late(patch: pytest.MonkeyPatch) -> type[LateTransfers]:
    """Let copies be late, and state come a little at a time."""
    patch.setattr(host_memory, "transfers_of", LateTransfers)
    patch.setitem(STATE_MEMORIES, "cpu", replace(STATE_MEMORIES["cpu"], turn_bytes=MOST))
    LateTransfers.bytes_here = LateTransfers.peak_bytes = LateTransfers.most_together = 0
    return LateTransfers


EXTRA: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((3, 6, 8), {"algorithm": "adamuon"}),
    ((9, 12), {"algorithm": "hyperball"}),
    ((16, 12), {"momentum_dtype": "bfloat16", "rounding_seed": 3}),
    ((11, 5), {"algorithm": "adamw", "state_dtype": "bfloat16", "rounding_seed": 3}),
    ((8, 64), {"momentum_dtype": "8bit", "block_size": 32, "rounding_seed": 3}),
    ((3, 64), {"algorithm": "adamw", "state_dtype": "8bit", "block_size": 32}),
    *[((30, 7), {"algorithm": "adamw"})] * 6,
]


def trained(dtype: torch.dtype, device: torch.device = HERE, **options: Any) -> list[Tensor]:
    """Four steps of parameters of every kind and method, some of which have no gradient in some steps."""
    generator = torch.Generator().manual_seed(1)
    kinds = [*TENSORS, *EXTRA]
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape, _ in kinds]
    groups = [{"params": [p], "lr": 0.02, **group} for p, (_, group) in zip(params, kinds, strict=True)]
    opt = Muon(groups, **options)
    for step in range(4):
        for number, param in enumerate(params):
            gradient = torch.randn(param.shape, generator=generator).to(device, dtype)
            param.grad = gradient if (number + step) % 5 or not step else None
        opt.step()
    return [tensor.cpu() for tensor in snapshot(params, opt)]


@on_gpu
def test_streams_beside_a_gpus_own_give_the_same_bits() -> None:
    assert_same_bits(trained(torch.float32, DEVICE, offload="cpu", stages=6), trained(torch.float32, DEVICE, stages=3))


@pytest.mark.parametrize(("dtype", "stages"), [(torch.float32, None), (torch.bfloat16, 6)], ids=str)
def test_a_process_has_the_same_bits(dtype: torch.dtype, stages: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(dtype, stages=3)
    copies = late(monkeypatch)
    assert_same_bits(trained(dtype, offload="cpu", stages=stages), expected)
    assert copies.peak_bytes and not copies.bytes_here


def on_ranks(rank: int, world: int, names: list[str], expected: list[Tensor]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        copies = late(patch)
        for name in names:
            place = placer(TOPOLOGIES[name])
            params = [nn.Parameter(place(number, v)) for number, v in enumerate(values(0, torch.float32))]
            opt = make(params, replicas=torch.distributed.group.WORLD, offload="cpu")
            for step in range(1, 4):
                for number, (param, g) in enumerate(zip(params, values(step, torch.float32), strict=True)):
                    param.grad = place(number, g)
                opt.step()
            assert_same_bits(snapshot(params, opt), expected)
            assert copies.peak_bytes and not copies.bytes_here


def test_ranks_have_the_bits_of_a_process_with_state_on_its_device() -> None:
    run(4, on_ranks, ["plain and sharded in one group"], single(torch.float32))


@pytest.mark.filterwarnings("ignore:100% of the elements")
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_three_turns_of_state_are_on_the_device_at_most(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [nn.Parameter(torch.randn(15, 16)) for _ in range(20)]
    opt = Muon([{"params": params, "algorithm": algorithm, "lr": 0.1}], offload="cpu")
    copies = late(monkeypatch)
    for param in params:
        param.grad = torch.randn(15, 16)
    opt.step()
    state = sum(tensor.nbytes for slots in opt.state.values() for tensor in slots.values() if tensor.ndim)
    assert copies.most_together <= MOST and copies.peak_bytes <= 3 * copies.most_together < state / 2
    report = opt.report()
    assert (report.state_bytes, report.visiting_bytes) == (state + 4 * 20 * (algorithm == "adamw"), copies.peak_bytes)
    assert f"; it rests in host memory, and a step has at most {copies.peak_bytes:,} bytes" in str(report)


@pytest.mark.parametrize(("saved", "resumed"), [(None, "cpu"), ("cpu", None)])
def test_a_state_dict_goes_from_one_memory_to_the_other(saved: str | None, resumed: str | None) -> None:
    params = [nn.Parameter(v) for v in values(0, torch.float32)]
    opt = make(params, offload=saved)
    train(params, opt, lambda g: g, torch.float32, steps=1)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    other = make(others, offload=resumed)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    twin = copy.deepcopy(other)
    twins = [param for group in twin.param_groups for param in group["params"]]
    for some, own in ((params, opt), (others, other), (twins, twin)):
        train(some, own, lambda g: g, torch.float32, steps=2)
    assert_same_bits(snapshot(others, other), snapshot(params, opt))
    assert_same_bits(snapshot(twins, twin), snapshot(params, opt))


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [nn.Parameter(torch.ones(3, 3))]
    with pytest.raises(ValueError, match=r"offload='disk': expected one of \[None, 'cpu'\]"):
        Muon(params, offload="disk")
    opt = Muon(params, offload="cpu")
    params[0].grad = torch.ones(3, 3)
    monkeypatch.setattr(muon_module, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"offload='cpu': a step waits .* CUDA graph"):
        opt.step()
