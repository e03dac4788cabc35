"""DeepSpeed itself, where it is installed: its run goes on elsewhere and in ours, and comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support import deepspeed_run
from support.continued import EXACT, load_ours
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict

import muonckpt
from muonckpt.optimizer import Muon

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed: make peers"),
    pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run"),
]

TAG = "global_step3"


def deepspeed(ranks: int, stage: int, save: Path, **asked: object) -> dict[str, Tensor]:
    """Train in DeepSpeed; return what the run has in memory at its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    told = {"dtype": "fp32", "stage": stage, "save": str(save), **asked}
    command += [deepspeed_run.__file__, json.dumps(told, default=str)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return torch.load(save / "truth.pt")["tensors"]


def apart(run: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference, as a part of the largest element of its tensor."""
    assert run.keys() == other.keys()
    return max(float((run[key] - other[key]).abs().max() / run[key].abs().max()) for key in run)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    """The folder of a run on three ranks that was saved after three steps, and what it has after seven."""
    folder = tmp_path_factory.mktemp("deepspeed")
    return folder, deepspeed(3, 1, folder, steps=7, tags=[TAG])


def test_a_run_goes_on_in_another_stage_on_one_rank(run, tmp_path):
    folder, truth = run
    muonckpt.convert(folder / TAG, tmp_path / TAG, to_dialect="deepspeed")
    again = deepspeed(1, 2, tmp_path / "on", load=tmp_path, tag=TAG, steps=4, universal=True)
    assert apart(truth, again) < 2e-6


@pytest.mark.filterwarnings("ignore:group . keeps the code's ns_dtype")  # here is more exact than there
@pytest.mark.filterwarnings("ignore:.*did not say options.*pieces=None")  # DeepSpeed does not record per_head_muon
def test_a_run_goes_on_in_ours_and_back_in_deepspeed_on_one_rank(run, tmp_path):
    folder, truth = run
    model = deepspeed_run.Model()
    groups = []
    for group in model.groups(2):  # DeepSpeed makes two of each: Muon's are the matrices but for embeddings
        matrices = [p for p in group["params"] if p.ndim > 1 and p is not model.embed.weight]
        others = [p for p in group["params"] if all(p is not q for q in matrices)]
        groups += [{"params": matrices}, {"params": others, "algorithm": "adamw", "lr": 0.01}]
    optimizer = Muon(groups, lr=0.1, ns_coefficients="keller", **EXACT)
    muonckpt.reshard(folder / TAG, tmp_path / "translated", mesh={"dp": 1}, to_dialect="muonckpt")
    load_ours(model, optimizer, tmp_path / "translated")
    for step in (3, 4):
        x, y = deepspeed_run.batch(step)
        optimizer.zero_grad()
        deepspeed_run.loss_of(model(x), y).backward()
        optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    muonckpt.save({"model": weights, "optimizer": state}, tmp_path / "ours")
    back = tmp_path / "back"
    muonckpt.convert(tmp_path / "ours", back / "global_step5", to_dialect="deepspeed")
    again = deepspeed(1, 1, tmp_path / "on", load=back, tag="global_step5", steps=2, universal=True)
    assert apart(truth, again) < 2e-6
