"""A step by kernels has the bits of a step by operators, in launches that do not grow with the number of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.every_kind import assert_same_bits, make, snapshot, train, values
from support.interpreted import DEVICE, kernels
from support.launches import launches
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from muonckpt.optimizer import Muon, StepExecution
from muonckpt.optimizer.methods.muon import MUON
from muonckpt.optimizer.newton_schulz import products
from muonckpt.optimizer.newton_schulz.products import Form
from muonckpt.optimizer.step import planner, step
from muonckpt.optimizer.step.step import make_batches

kernels("step.kernels")

KERNELS = Form(kernels=True, gram=False)


def by_kernels(device: torch.device, dtype: torch.dtype, rows: int, columns: int, copies: int) -> Form:
    return KERNELS if dtype.itemsize == 2 else Form(kernels=False, gram=False)


@pytest.fixture
def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Element-wise parts by kernels also where there is no GPU."""
    monkeypatch.setattr(planner, "has_kernels", lambda device, dtype: True)


def placed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE)


def stepped(dtype: torch.dtype, steps: int = 2, **options: Any) -> list[torch.Tensor]:
    params = [nn.Parameter(placed(v)) for v in values(0, dtype)]
    opt = make(params, **options)
    train(params, opt, placed, dtype, steps)
    return snapshot(params, opt)


def test_a_step_by_kernels_has_the_bits_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused rows, columns, query groups, stacks, NorMuon, fp16, cautious decay, no Nesterov."""
    monkeypatch.setattr(planner, "has_kernels", lambda device, dtype: False)
    with launches() as names:
        expected = stepped(torch.float32)
    assert not {"_send", "_apply"} & set(names)
    monkeypatch.setattr(planner, "has_kernels", lambda device, dtype: True)
    with launches() as names:
        found = stepped(torch.float32)
    assert {"_send", "_apply"} <= set(names)
    assert_same_bits(found, expected)


@pytest.mark.usefixtures("by_default")
def test_batches_of_kernels_have_the_bits_of_one_matrix_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(12, 16), (16, 12), (12, 40), (2, 12, 16)]

    def trained() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        params = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in shapes]
        opt = Muon(params, execution=StepExecution(form=by_kernels), ns_steps=1)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(DEVICE)
        opt.step()
        [units] = [schedule.units for schedule in opt.schedules.values()]
        batches = make_batches(units, range(5), lambda param: opt.param_groups[0], lambda param: MUON)
        counts.append([len(batch.units) for batch in batches])
        return snapshot(params, opt)

    counts: list[list[int]] = []
    together = trained()
    monkeypatch.setattr("muonckpt.optimizer.step.step.MAX_BATCH_ELEMENTS", 1)
    assert_same_bits(trained(), together)
    assert counts == [[4, 1], [1] * 5]


def on_ranks(rank: int, world: int) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (world,))

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)

    before, planner.has_kernels = planner.has_kernels, lambda device, dtype: True
    try:
        params = [nn.Parameter(place(v)) for v in values(0, torch.float32)]
        opt = make(params)
        with launches() as names:
            train(params, opt, place, torch.float32, steps=2)
    finally:
        planner.has_kernels = before
    assert {"_send", "_carry", "_apply"} <= set(names)
    return snapshot(params, opt)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the ranks of this test have no interpreter where there is a GPU")
def test_ranks_with_kernels_have_the_bits_of_one_process() -> None:
    expected = stepped(torch.float32)
    for found in run(2, on_ranks):
        assert_same_bits(found, expected)


def launched(layers: int) -> list[str]:
    """Of a second step with so many layers of three shapes; sorted, as a stage has its batches in any order."""
    shapes = [(16, 48), (32, 64), (48, 16)] * layers
    params = [nn.Parameter(torch.ones(shape, device=DEVICE)) for shape in shapes]
    opt = Muon(params, execution=StepExecution(form=by_kernels, stages=1), ns_steps=1)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        with launches() as names:
            opt.step()
    return sorted(names)


@pytest.mark.usefixtures("by_default")
def test_launches_do_not_grow_with_the_number_of_layers() -> None:
    few = launched(1)
    assert few == launched(3)
    # For wide and for tall ones: updates into a stack, three for the norm, three products, results applied.
    assert len(few) == 2 * (1 + 3 + 3 + 1)


READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class NothingIsRead(TorchDispatchMode):
    """Stands for a device that cannot be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "has_kernels", lambda device, dtype: True)
    for module in (products, step):
        monkeypatch.setattr(module, "is_asynchronous", lambda device: True)
    params = [nn.Parameter(torch.randn(8, 12, device=DEVICE)) for _ in range(3)]
    groups: list[dict[str, Any]] = [{}, {"algorithm": "normuon"}, {"ns_dtype": "float16"}]
    opt = Muon([{"params": [p], **group} for p, group in zip(params, groups, strict=True)])
    for param in params:
        param.grad = torch.randn_like(param)
    opt.step()
    before = [param.detach().clone() for param in params]
    with NothingIsRead():
        opt.step()
    assert not any(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    with pytest.raises(RuntimeError, match="waits for the device"), NothingIsRead():
        float(params[0][0, 0])


@pytest.mark.usefixtures("by_default")
def test_autograd_knows_that_kernels_wrote() -> None:
    param = nn.Parameter(torch.ones(6, 8, device=DEVICE))
    opt = Muon([param])
    loss = param.square().sum()
    loss.backward(retain_graph=True)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
