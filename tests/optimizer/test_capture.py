"""What a CUDA graph needs of a step: nothing is read back from the device, and what cannot be captured is refused."""

from __future__ import annotations

import itertools
import shutil
from typing import Any

import pytest
import torch
from packaging.version import Version
from support.interpreted import DEVICE, kernels, on_gpu
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from muonckpt.optimizer import Muon, options, orthogonalize
from muonckpt.optimizer.ground import cuda_graphs as capture
from muonckpt.optimizer.methods import scalar
from muonckpt.optimizer.newton_schulz import products
from muonckpt.optimizer.newton_schulz.products import Form
from muonckpt.optimizer.step import planner, step as step_module

SHAPES = ((5, torch.float32), (300, torch.float32), (7, torch.bfloat16))
"""Elements and dtypes of parameters that are not matrices."""

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


def the_rest(rates: dict[str, Any]) -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
    """Every element-wise algorithm, with and without cautious decay, in 32 and 16 bits."""
    params, groups = [], []
    for algorithm, cautious in itertools.product(("adamw", "lion"), (False, True)):
        some = [nn.Parameter(torch.randn(n, device=DEVICE).to(dtype)) for n, dtype in SHAPES]
        params += some
        groups.append({"params": some, "algorithm": algorithm, "cautious": cautious, **rates})
    return params, groups


def whole_step(rates: dict[str, Any]) -> tuple[list[nn.Parameter], Muon]:
    params, opt = matrices(lr=rates["lr"], weight_decay=rates["weight_decay"])
    rest, groups = the_rest(rates)
    for group in groups:
        opt.add_param_group(group)
    return params + rest, opt


def live_rates() -> dict[str, Any]:
    lr, weight_decay, *betas = (torch.tensor(value, device=DEVICE) for value in (0.02, 0.1, 0.9, 0.95))
    return {"lr": lr, "weight_decay": weight_decay, "betas": tuple(betas)}


def change(rates: dict[str, Any], step: int) -> None:
    for value in (rates["lr"], rates["weight_decay"], *rates["betas"]):
        value.mul_(1 - 0.1 * step)


def everything(params: list[nn.Parameter], opt: Muon) -> list[torch.Tensor]:
    """Parameters and their state, as they are now."""
    return [t.detach().clone() for param in params for t in (param, *opt.state[param].values())]


def give_gradients(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.randn_like(param)


def test_a_step_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels("step.kernels")
    monkeypatch.setattr(planner, "has_kernels", lambda device, dtype: True)
    for module in (options, scalar, products, step_module):
        monkeypatch.setattr(module, "is_capturable", lambda device: True)
    params, opt = whole_step(rates := live_rates())
    give_gradients(params)
    opt.step()
    before = [param.detach().clone() for param in params]
    give_gradients(params)
    with NothingIsRead():
        opt.step()
    assert not any(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    with pytest.raises(RuntimeError, match="waits for the device"), NothingIsRead():
        float(rates["lr"])


def test_a_missing_gradient_is_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    capture.refuse_absent([(3, 4), (5,)], [True, True])
    with pytest.raises(RuntimeError, match=r"2 of 3 parameters have no gradient.*first is of shape \(3, 4\)"):
        capture.refuse_absent([(3, 4), (5, 6), (7, 8)], [False, True, False])
    params, opt = matrices()
    give_gradients(params)
    params[1].grad = None
    monkeypatch.setattr(step_module, "is_capturing", lambda: True)
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError, match="1 of 3 parameters"):
        opt.step()
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    assert not opt.state[params[0]]["momentum_buffer"].any()


@pytest.mark.parametrize("algorithm", ["adamw", "lion", "muon"])
def test_what_a_graph_would_leave_out_is_refused(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    opt = Muon([{"params": params, "algorithm": algorithm}])
    params[0].grad = torch.ones(3, 3)
    for module in (capture, scalar, step_module):
        monkeypatch.setattr(module, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="1 of 2 parameters have no gradient"):
        opt.step()
    params[1].grad = torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=f"'{algorithm}' has parameters on cpu"):
        opt.step()
    assert all(param.eq(1).all() for param in params)


class Recorded(NothingIsRead):
    """Stands for a CUDA graph: operators that can run again, on the very same memory, with the very same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls.append((func, args, kwargs or {}, found))
        return found

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, found in self.calls:
            for old, new in zip(tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)


def test_a_replayed_step_of_the_rest_follows_gradients_rates_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (options, scalar):
        monkeypatch.setattr(module, "is_capturable", lambda device: True)

    def trained(recorded: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        rates = live_rates()
        params, groups = the_rest(rates)
        opt, graph = Muon(groups), Recorded()
        give_gradients(params)
        with graph:
            opt.step()
        for step in range(4):
            change(rates, step)
            for param in params:
                assert param.grad is not None
                param.grad.copy_(torch.randn_like(param))
            graph.replay() if recorded else opt.step()
        assert opt.state[params[0]]["step"] == 5
        return everything(params, opt)

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


def test_numbers_are_uploaded_the_same_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    for values, dtype in (((1, 2**62 + 1), torch.int64), ((0.1, -1e300), torch.float64), ((0, 255), torch.uint8)):
        found = capture.upload_numbers(values, dtype, DEVICE)
        with monkeypatch.context() as patch:
            patch.setattr(capture, "is_capturing", lambda: True)
            assert torch.equal(capture.upload_numbers(values, dtype, DEVICE), found)
            with pytest.raises(RuntimeError, match="run one step"):
                capture.refuse_new_tables("nothing has been made")
        assert found.tolist() == list(values)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="older torch.compile makes no dataclasses")
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
        rates = live_rates()
        params, opt = whole_step(rates)
        give_gradients(params)
        opt.step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):  # nothing runs while it is captured
                opt.step()
        for step in range(3):
            change(rates, step)
            for param in params:
                assert param.grad is not None
                param.grad.copy_(torch.randn(param.shape).to(DEVICE))
            graph.replay() if captured else opt.step()
        return everything(params, opt)

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))
