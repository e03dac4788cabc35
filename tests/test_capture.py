"""What a CUDA graph needs of a step: nothing is read back from the device, and what cannot be captured is refused."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from interpreted import DEVICE, kernels, on_gpu
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from muonckpt.optimizer import Muon, capture, orthogonalize, pipeline
from muonckpt.optimizer.forms import Form

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class NothingIsRead(TorchDispatchMode):
    """Stands for a device that cannot be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def matrices(**options: Any) -> tuple[list[nn.Parameter], Muon]:
    params = [nn.Parameter(torch.randn(8, 12, device=DEVICE)) for _ in range(3)]
    groups: list[dict[str, Any]] = [{}, {"algorithm": "normuon"}, {"ns_dtype": "float16"}]
    return params, Muon([{"params": [p], **group} for p, group in zip(params, groups, strict=True)], **options)


def give_gradients(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.randn_like(param)


def test_a_step_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels("fused")
    monkeypatch.setattr(pipeline, "has_kernels", lambda device, dtype: True)
    rate = torch.tensor(0.02, device=DEVICE)
    params, opt = matrices(lr=rate)
    give_gradients(params)
    opt.step()
    before = [param.detach().clone() for param in params]
    give_gradients(params)
    with NothingIsRead():
        opt.step()
    assert not any(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    with pytest.raises(RuntimeError, match="waits for the device"), NothingIsRead():
        float(rate)


def test_a_missing_gradient_is_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    capture.refuse_absent([(3, 4), (5,)], [True, True])
    with pytest.raises(RuntimeError, match=r"2 of 3 parameters have no gradient.*first is of shape \(3, 4\)"):
        capture.refuse_absent([(3, 4), (5, 6), (7, 8)], [False, True, False])
    params, opt = matrices()
    give_gradients(params)
    params[1].grad = None
    monkeypatch.setattr(pipeline, "capturing", lambda: True)
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError, match="1 of 3 parameters"):
        opt.step()
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    assert not opt.state[params[0]]["momentum_buffer"].any()


@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
def test_what_counts_on_the_host_is_refused_while_a_graph_is_captured(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    param = nn.Parameter(torch.ones(3))
    opt = Muon([{"params": [param], "algorithm": algorithm}])
    param.grad = torch.ones(3)
    monkeypatch.setattr(capture, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match=f"'{algorithm}' keeps its rates"):
        opt.step()
    assert param.eq(1).all()


def test_numbers_are_uploaded_the_same_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    for values, dtype in (((1, 2**62 + 1), torch.int64), ((0.1, -1e300), torch.float64), ((0, 255), torch.uint8)):
        found = capture.uploaded(values, dtype, DEVICE)
        with monkeypatch.context() as patch:
            patch.setattr(capture, "capturing", lambda: True)
            assert torch.equal(capture.uploaded(values, dtype, DEVICE), found)
            with pytest.raises(RuntimeError, match="run one step"):
                capture.settled("nothing has been made")
        assert found.tolist() == list(values)


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_newton_schulz_compiles() -> None:
    torch._dynamo.reset()
    matrix, options = torch.randn(24, 64), {"steps": 2, "gram": (1,), "dtype": torch.float32}
    form = Form(kernels=False, gram=True)
    found = torch.compile(orthogonalize, dynamic=False, fullgraph=True)(matrix, form=form, **options)
    torch.testing.assert_close(found, orthogonalize(matrix, form=form, **options), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@on_gpu
def test_a_captured_step_follows_gradients_and_rates() -> None:
    def trained(captured: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        rate = torch.tensor(0.02, device=DEVICE)
        params, opt = matrices(lr=rate)
        give_gradients(params)
        opt.step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):  # nothing runs while it is captured
                opt.step()
        for step in range(3):
            rate.fill_(0.02 / (step + 1))
            for param in params:
                assert param.grad is not None
                param.grad.copy_(torch.randn(param.shape).to(DEVICE))
            graph.replay() if captured else opt.step()
        return [param.detach().clone() for param in params]

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))
