"""Whether a run would resume: for faults of the field, the answer of preflight is what a real load then does."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import muonckpt
from muonckpt import TargetError, preflight
from muonckpt.cli.main import run as muonckpt_command
from muonckpt.optimizer import Muon

Maker = Callable[[], tuple[nn.Module, Optimizer]]


class Net(nn.Module):
    """A small network with the parts in which runs differ."""

    def __init__(self, width=16, layers=2, vocabulary=24, tied=False, bias=True, name="up", dtype=torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, dtype=dtype)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            self.layers.append(nn.ModuleDict({name: nn.Linear(width, 2 * width, bias=bias, dtype=dtype)}))
        self.head = nn.Linear(width, vocabulary, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight


def ours(net: Callable[[], nn.Module] = Net, frozen: str = "", **options: Any) -> Maker:
    """Return a function that makes a network and our optimizer, with the options of its matrices."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = net()
        matrices, others = [], []
        for name, parameter in model.named_parameters():
            if frozen and frozen in name:
                parameter.requires_grad_(False)
            elif parameter.ndim == 2 and "layers" in name:
                matrices.append(parameter)
            else:
                others.append(parameter)
        groups = [{"params": matrices, **options}, {"params": others, "algorithm": "adamw", "lr": 3e-4}]
        return model, Muon([group for group in groups if group["params"]])

    return make


def torchs(kind: type[Optimizer] = torch.optim.AdamW, net: Callable[[], nn.Module] = Net, **options: Any) -> Maker:
    def make() -> tuple[nn.Module, Optimizer]:
        model = net()
        return model, kind(model.parameters(), **options)

    return make


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = Net()


def all_in_one_group() -> tuple[nn.Module, Optimizer]:
    model = Net()
    return model, Muon([{"params": [*model.parameters()], "algorithm": "adamw", "lr": 3e-4}])


def three_groups() -> tuple[nn.Module, Optimizer]:
    model = Net()
    first, second = ([p for p in layer.parameters() if p.ndim == 2] for layer in model.layers)
    others = [p for n, p in model.named_parameters() if p.ndim == 1 or "layers" not in n]
    return model, Muon([{"params": first}, {"params": second}, {"params": others, "algorithm": "adamw", "lr": 3e-4}])


def net(**options: Any) -> Callable[[], nn.Module]:
    return lambda: Net(**options)


FAULTS: dict[str, tuple[Maker, Maker]] = {
    "nothing": (ours(), ours()),
    "renamed module": (ours(), ours(net(name="gate"))),
    "wrapped model": (ours(), ours(Wrapped)),
    "unwrapped model": (ours(Wrapped), ours()),
    "wider": (ours(), ours(net(width=24))),
    "a layer more": (ours(), ours(net(layers=3))),
    "a layer less": (ours(), ours(net(layers=1))),
    "padded vocabulary": (ours(), ours(net(vocabulary=32))),
    "head tied now": (ours(), ours(net(tied=True))),
    "head untied now": (ours(net(tied=True)), ours()),
    "biases gone": (ours(), ours(net(bias=False))),
    "biases new": (ours(net(bias=False)), ours()),
    "weights in bfloat16 now": (ours(), ours(net(dtype=torch.bfloat16))),
    "weights in float32 now": (ours(net(dtype=torch.bfloat16)), ours()),
    "momentum in bfloat16 now": (ours(), ours(momentum_dtype="bfloat16")),
    "another rate": (ours(lr=0.02), ours(lr=0.01)),
    "another decay": (ours(weight_decay=0.0), ours()),
    "another scale": (ours(), ours(adjust_lr_fn="match_rms_adamw")),
    "other coefficients": (ours(), ours(ns_coefficients="polar_express")),
    "normuon now": (ours(), ours(algorithm="normuon")),
    "muon now": (ours(algorithm="normuon"), ours()),
    "fused rows now": (ours(), ours(pieces=[16, 16])),
    "everything in one group": (ours(), all_in_one_group),
    "a group split": (ours(), three_groups),
    "groups joined": (three_groups, ours()),
    "embedding frozen": (ours(), ours(frozen="embedding")),
    "embedding trained now": (ours(frozen="embedding"), ours()),
    "layers frozen": (ours(), ours(frozen="layers.0")),
    "AdamW before": (torchs(), ours()),
    "AdamW now": (ours(), torchs()),
    "AdamW as before": (torchs(lr=0.1), torchs(lr=0.2)),
    "SGD now": (torchs(), torchs(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "torch's Muon before": (
        torchs(torch.optim.Muon, net=lambda: nn.Linear(8, 8, bias=False)),
        ours(lambda: nn.ModuleDict({"layers": nn.Linear(8, 8, bias=False)})),
    ),
}


def _step(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    optimizer.zero_grad()


def state_of(make: Maker) -> dict[str, Any]:
    """Return the state dict of what a function makes, after a step on gradients of ones."""
    torch.manual_seed(0)
    model, optimizer = make()
    _step(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def asked(path: Path, make: Maker, **options: Any) -> muonckpt.Preflight:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return preflight(path, make, **options)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_answer_is_what_a_load_does(tmp_path, fault):
    before, now = FAULTS[fault]
    path = tmp_path / "checkpoint"
    muonckpt.save(state_of(before), path)
    answer = asked(path, now)
    template = state_of(now)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = muonckpt.load(template, path)
    except muonckpt.SourceError as error:
        assert answer.refusal == str(error)
        assert not answer
    else:
        assert answer, answer.refusal
        assert answer.report == report


@pytest.mark.parametrize("fault", FAULTS)
def test_the_answer_for_stock_dcp_is_what_it_does(tmp_path, fault):
    before, now = FAULTS[fault]
    path = tmp_path / "checkpoint"
    dcp.save(state_of(before), checkpoint_id=path, no_dist=True)
    answer = asked(path, now, loader="dcp")
    template = state_of(now)
    failed = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.load(template, checkpoint_id=path, no_dist=True)
        except (CheckpointException, ValueError, RuntimeError):
            failed = True
    assert bool(answer) is not failed, answer.sentence


POSITIONAL = {
    "nothing": (torchs(), torchs()),
    "another rate": (torchs(lr=0.1), torchs(lr=0.2)),
    "renamed module": (torchs(), torchs(net=net(name="gate"))),
    "wider": (torchs(), torchs(net=net(width=24))),
    "a layer more": (torchs(), torchs(net=net(layers=3))),
    "a layer less": (torchs(), torchs(net=net(layers=1))),
    "padded vocabulary": (torchs(), torchs(net=net(vocabulary=32))),
    "head tied now": (torchs(), torchs(net=net(tied=True))),
}


@pytest.mark.parametrize("fault", POSITIONAL)
def test_the_answer_for_a_trainer_is_what_torch_does(tmp_path, fault):
    before, now = POSITIONAL[fault]
    torch.manual_seed(0)
    model, optimizer = before()
    _step(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    answer = asked(tmp_path / "checkpoint.pt", now, loader="huggingface")
    saved = torch.load(tmp_path / "checkpoint.pt")
    model, optimizer = now()
    failed = False
    try:
        optimizer.load_state_dict(saved["optimizer"])
        _step(model, optimizer)
    except (ValueError, RuntimeError):
        failed = True
    assert bool(answer) is not failed, answer.sentence


def test_ours_in_a_trainer_has_rules_of_its_own(tmp_path):
    muonckpt.save(state_of(ours()), tmp_path / "checkpoint")
    with pytest.raises(TargetError, match="loader='muonckpt'"):
        asked(tmp_path / "checkpoint", ours(), loader="huggingface")


def test_state_that_stock_dcp_leaves_behind_is_told(tmp_path):
    dcp.save(state_of(torchs()), checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    answer = asked(tmp_path / "checkpoint", torchs(net=net(layers=1)), loader="dcp")
    assert answer
    assert any("left in the checkpoint without a word" in warning for warning in answer.warnings)


def test_a_saved_rate_that_replaces_the_codes_is_told(tmp_path):
    muonckpt.save(state_of(ours(lr=0.02)), tmp_path / "checkpoint")
    answer = asked(tmp_path / "checkpoint", ours(lr=0.01))
    [change] = answer.changes
    assert (change.option, change.saved_value, change.code_value) == ("lr", 0.02, 0.01)
    assert change.group == "layers.*.up.weight (2)"


def test_hundreds_of_ranks_are_asked_without_their_memory(tmp_path):
    def make(mesh: DeviceMesh) -> tuple[nn.Module, Optimizer]:
        assert (mesh.size(), mesh.mesh_dim_names) == (512, ("dp", "ep"))
        model, optimizer = nn.Module(), None
        model.layers = nn.ModuleList([nn.Linear(1 << 14, 1 << 14, bias=False) for _ in range(4)])  # 4 GiB
        fully_shard(model, mesh=mesh["dp"])
        optimizer = Muon(model.named_parameters(), lr=0.02)
        return model, optimizer

    muonckpt.save(state_of(ours()), tmp_path / "checkpoint")
    answer = asked(tmp_path / "checkpoint", make, mesh={"dp": 128, "ep": 4})
    assert not answer
    assert "layers.0.weight" in answer.refusal


def test_what_nobody_asks_for_is_listed(tmp_path):
    state = {**state_of(ours()), "lr_scheduler": {"last_epoch": 3}}
    muonckpt.save(state, tmp_path / "checkpoint")
    answer = asked(tmp_path / "checkpoint", ours())
    assert answer
    assert answer.unasked == ("lr_scheduler",)


def test_the_command_exits_with_1_for_no(tmp_path, capsys):
    muonckpt.save(state_of(ours()), tmp_path / "checkpoint")
    code = tmp_path / "build.py"
    code.write_text(
        "from torch import nn\nfrom muonckpt.optimizer import Muon\n\n\n"
        "def make():\n    model = nn.Linear(4, 4)\n    return model, Muon([model.weight])\n"
    )
    assert muonckpt_command(["preflight", str(tmp_path / "checkpoint"), f"{code}:make", "--mesh", "dp=8"]) == 1
    assert capsys.readouterr().out.startswith("no: ")


def test_the_answer_says_whether_the_bytes_were_verified(tmp_path):
    path = tmp_path / "step-00000001"
    muonckpt.save(state_of(ours()), path)
    assert preflight(path, ours()).sentence.endswith(f"; bytes not verified (muonckpt verify {path})")
    assert all(verdict.is_whole for verdict in muonckpt.verify_run(tmp_path))
    assert preflight(path, ours()).sentence.endswith(" parameters would be loaded")


def test_the_cure_for_a_step_of_a_series_is_a_call_of_the_series(tmp_path):
    run = muonckpt.Series(tmp_path, *ours()())
    larger = ours(net(vocabulary=32))
    refusal = preflight(run.save(3), larger).refusal
    [globs] = re.findall(r"Series\.resume\(\.\.\., grow=(\[.*\])\)$", refusal)
    assert muonckpt.Series(tmp_path, *larger()).resume(grow=eval(globs)) == 4
    # What the run has begun fresh before is loaded the next time.
    run = muonckpt.Series(tmp_path, *ours()())
    assert "would begin from zero" in preflight(run.latest(), ours(), fresh=["head.*"]).sentence
    run.resume(fresh=["head.*"])
    assert "would begin from zero" not in preflight(run.save(4), ours(), fresh=["head.*"]).sentence


def test_the_answer_says_from_where_a_run_takes_a_converted_checkpoint(tmp_path):
    step = muonckpt.Series(tmp_path / "run").save(3, state_of(ours())).path
    assert preflight(step, ours()).next_step == ""
    muonckpt.convert(step, tmp_path / "new")
    answer = preflight(tmp_path / "new", ours())
    [place] = re.findall(r"RUN/\S+, or as RUN/(\S+) where that is there", answer.next_step)
    (tmp_path / "new").rename(tmp_path / "run" / place)
    assert muonckpt.Series(tmp_path / "run").latest().path == str(tmp_path / "run" / place)
    muonckpt.save(state_of(ours()), tmp_path / "other")
    assert preflight(tmp_path / "other", ours()).next_step.endswith(f"run.resume(begin_from='{tmp_path / 'other'}')")


def test_a_process_group_of_the_caller_is_left_alone(tmp_path):
    muonckpt.save(state_of(ours()), tmp_path / "checkpoint")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(TargetError, match="this process has one"):
            preflight(tmp_path / "checkpoint", ours())
        assert torch.distributed.is_initialized()
    finally:
        with contextlib.suppress(ValueError):
            torch.distributed.destroy_process_group()


def test_a_renamed_module_is_resumed_by_the_table_that_the_command_prints(tmp_path, capsys, monkeypatch):
    muonckpt.save(state_of(ours()), tmp_path / "old")
    monkeypatch.setattr(f"{__name__}.renamed_job", ours(net(name="gate")), raising=False)
    code = tmp_path / "job.py"
    code.write_text(f"import sys\n\nmake = sys.modules[{__name__!r}].renamed_job\n")
    assert muonckpt_command(["preflight", str(tmp_path / "old"), f"{code}:make"]) == 1
    rules = tmp_path / "rules.toml"
    rules.write_text(capsys.readouterr().out.partition(", with FILE:\n")[2])
    arguments = ["--rules", str(rules)]
    assert muonckpt_command(["convert", str(tmp_path / "old"), str(tmp_path / "new"), *arguments]) == 0
    renamed = asked(tmp_path / "new", ours(net(name="gate")))
    assert renamed and not renamed.report.fresh


def test_a_rate_that_a_scheduler_has_changed_is_no_change(tmp_path):
    model, optimizer = ours()()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _step(model, optimizer)
    scheduler.step()
    weights, state = get_state_dict(model, optimizer)
    muonckpt.save({"model": weights, "optimizer": state}, tmp_path / "checkpoint")
    assert not asked(tmp_path / "checkpoint", ours()).changes
