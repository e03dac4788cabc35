"""An optimizer reports its groups, updates and traffic, and warns of matrices that it does not orthogonalize."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from support.workers import run
from torch import nn
from torch.distributed.fsdp import fully_shard

from muonckpt.optimizer import Muon
from muonckpt.optimizer.report import LARGEST_VECTOR, MuonReport


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"qkv": (48, 16), "up": (40, 16), "norm": (16,), "embedding": (10, 16)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm * (x + (x @ self.qkv.T)[:, :16] + x @ self.up.T @ self.up) @ self.embedding.T).square()


def optimizer(net: Net, **options) -> Muon:
    groups = [
        {"params": [net.qkv], "pieces": (16, 16, 16), "name": "attention"},
        {"params": [net.up], "algorithm": "normuon", "update_norm": "rms", "adjust_lr_fn": "none"},
        {"params": [net.norm], "algorithm": "lion", "lr": 1e-3, "weight_decay": 0.25},
        {"params": [net.embedding], "algorithm": "adamw", "lr": 1e-2},
    ]
    return Muon(groups, lr=0.5, weight_decay=0.0, **options)


def stepped(net: Net, opt: Muon) -> MuonReport:
    net(torch.ones(3, 16)).sum().backward()
    opt.step()
    return opt.report()


def test_groups_and_the_size_of_their_updates():
    net = Net()
    opt = optimizer(net)
    # Before the first step: the groups, and no owners.
    report = opt.report()
    assert [(g.name, g.algorithm, g.parameters, g.matrices, g.elements, g.weight_decay) for g in report.groups] == [
        ("attention", "muon", 1, 3, 768, 0.0),
        ("", "normuon", 1, 1, 640, 0.0),
        ("", "lion", 1, 0, 16, 0.25),
        ("", "adamw", 1, 0, 160, 0.0),
    ]
    assert (report.matrices_by_rank, report.sent_bytes, report.doubts) == (None, None, ())
    # After a step: the size of each update is as forecast, and owners are known.
    before = [param.detach().clone() for param in net.parameters()]
    for param in net.parameters():
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(1))
    opt.step()
    report = opt.report()
    for number, (param, start) in enumerate(zip(net.parameters(), before, strict=True)):
        if number < 3:
            low, high = report.groups[number].update_rms
            assert low * 0.6 <= float((param.detach() - start).square().mean().sqrt()) <= high * 1.2, number
    assert (report.matrices_by_rank, report.sent_bytes) == ((4, 4, 4), 0)
    assert "owners are known" not in str(report) and "attention  muon" in str(report)


def test_a_report_is_a_table():
    lines = str(optimizer(Net()).report()).splitlines()
    assert lines[0].split()[:7] == ["group", "name", "algorithm", "parameters", "matrices", "elements", "decay"]
    state = 4 * (768 + 640 + 40 + 16 + 2 * 160 + 1)
    assert lines[-1] == f"{state:,} bytes of state on this rank"
    assert len(lines) == 8 and lines[1].split() == ["0", "attention", "muon", "1", "3", "768", "0", "0.12"]
    assert lines[5] == "group 0, in each parameter: 3 x 16"


def test_a_report_names_the_parameters_of_each_group():
    """They include routers, which Muon steps as any other nn.Linear; a group shows at most so many names."""
    layer = {"up": nn.Linear(4, 8, bias=False), "norm": nn.RMSNorm(4), "router": nn.Linear(4, 3, bias=False)}
    net = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict(copy.deepcopy(layer)) for _ in range(3)])})
    for named in (False, True):
        opt = Muon.for_model(net, lr=0.02, adamw_lr=3e-4, named=named)
        report = opt.report()
        assert report.groups[0].names[:2] == ("layers.0.up.weight", "layers.0.router.weight")
        lines = str(report).splitlines()
        assert "group 0: layers.*.up.weight (3), layers.*.router.weight (3)" in lines
        assert "group 1: layers.*.norm.weight (3)" in lines
    wide = nn.ModuleDict({chr(97 + n): nn.Linear(4, 4, bias=False) for n in range(25)})
    lines = str(Muon(wide.named_parameters()).report()).splitlines()
    assert lines[2].startswith("group 0: a.weight, b.weight, ") and lines[2].endswith("t.weight and 5 more")


def sharded(rank: int, world: int) -> tuple[tuple[int, int, int] | None, int | None]:
    net = Net()
    fully_shard(net)
    report = stepped(net, optimizer(net))
    return report.matrices_by_rank, report.sent_bytes


def test_owners_and_bytes_of_every_rank():
    reports = run(2, sharded)
    assert sum(owned[2] for owned, _ in reports) == 4
    assert all(owned[:2] == (min(r[0][2] for r in reports), max(r[0][2] for r in reports)) for owned, _ in reports)
    assert all(num_bytes > 0 for _, num_bytes in reports)


def test_matrices_that_adamw_steps_are_warned_of():
    net = Net()
    groups = [
        {"params": [net.up]},
        {"params": [net.qkv, net.embedding, net.norm], "algorithm": "adamw", "lr": 1e-2},
    ]
    opt = Muon(groups)
    with pytest.warns(RuntimeWarning, match="59% of the elements in parameters of two dims or more") as warned:
        report = opt.report()
    assert [warning.filename for warning in warned] == [__file__] and "warning: 59%" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert opt.report(most_elementwise=0.6).doubts == ()


def test_flattened_matrices_are_warned_of():
    flat = nn.Parameter(torch.empty(LARGEST_VECTOR + 1, device="meta"))
    opt = Muon([{"params": [flat], "algorithm": "adamw", "lr": 1e-3}])
    with pytest.warns(RuntimeWarning, match=f"a vector of {LARGEST_VECTOR + 1:,} elements"):
        opt.report()
