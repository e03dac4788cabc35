"""DeepSpeed's ZeRO checkpoints, as DeepSpeed 0.19.8 wrote them: read without it, and what is wrong with them said."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.commands import called
from support.golden import golden
from torch import Tensor

import muonckpt
from muonckpt import SourceError

RUNS = ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_bf16")
TAG = "global_step3"


def rezip(path: Path, change: Callable[[str, bytes], bytes]) -> None:
    """Change each member of a `torch.save` file, given its name below the root, with its checksum made anew."""
    with zipfile.ZipFile(path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members:
            archive.writestr(name, change(name.partition("/")[2], data))


def copied(name: str, folder: Path) -> Path:
    return shutil.copytree(golden(name) / TAG, folder / TAG)


def check(path: Path, truth: dict[str, Tensor]) -> None:
    """Compare every tensor of the truth with the checkpoint's, bit for bit."""
    with muonckpt.open(path) as opened:
        for key, value in truth.items():
            stored = opened.tensors[key]
            assert (stored.shape, stored.dtype) == (tuple(value.shape), str(value.dtype).removeprefix("torch."))
            word = {2: torch.uint16, 4: torch.uint32}[value.element_size()]
            np.testing.assert_array_equal(stored.bits(), value.view(word).numpy(), key)


@pytest.mark.parametrize("name", RUNS)
def test_everything_of_a_run_is_read_and_resharded_bit_for_bit(name, tmp_path):
    path, truth = golden(name) / TAG, load_file(golden(name) / "truth.safetensors")
    check(path, truth)
    assert muonckpt.verify(path).verdict == "whole"
    with muonckpt.open(path) as opened:
        assert opened.items["deepspeed.global_steps"] == 3
        assert opened.tensors["model.scale"].numpy().tolist() == [0.5, 2.0]
        np.testing.assert_array_equal(opened.tensors["model.shift"].numpy(), np.linspace(0, 1, 5, dtype=np.float32))
        tied = [opened.tensors[f"model.{name}.weight"].bits() for name in ("embed", "lm_head")]
        np.testing.assert_array_equal(*tied)
        assert opened.tensors["optimizer.state.a.bias.step"].numpy() == 3
    muonckpt.reshard(path, tmp_path / "ours", mesh={"dp": 3}, to_dialect="muonckpt")
    check(tmp_path / "ours", truth)
    with muonckpt.open(tmp_path / "ours") as ours:
        assert ours.tensors["optimizer.state.b.weight.momentum_buffer"].convention == "ema"
        rates = {group["lr"] for group in ours.groups.values()}
        assert rates == ({0.02, 0.01} if name == "deepspeed_bf16" else {0.03, 0.02, 0.01})
        muon = next(group for group in ours.groups.values() if group["algorithm"] == "muon")
        said = {"ns_coefficients": "keller", "ns_steps": 5, "nesterov": True, "adjust_lr_fn": "original", "gram": None}
        assert {option: muon[option] for option in said} == said


def test_a_run_shows_its_tags_and_the_latest(tmp_path):
    run = shutil.copytree(golden("deepspeed_zero2"), tmp_path / "run", ignore=lambda *_: ["truth.safetensors"])
    shown = called("inspect", run).stdout
    assert "global_step2  whole" in shown
    assert "the file latest says global_step3" in shown
    assert "momentum_buffer" in called("diff", *(golden("deepspeed_zero2") / f"global_step{n}" for n in (2, 3))).stdout


def changed_momentum(path: Path, truth: dict[str, Tensor]) -> None:
    """Change an element of the momentum of ``mix``, which begins on rank 0, in the copy of rank 1."""
    whole = truth["optimizer.state.mix.momentum_buffer"].view(torch.uint8).numpy().tobytes()
    other = bytes([whole[0] ^ 1]) + whole[1:]
    file = path / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    before = file.read_bytes()
    rezip(file, lambda name, data: data.replace(whole, other) if name.startswith("data/") else data)
    assert before.count(whole) == 1 and file.read_bytes().count(whole) == 0


def test_copies_of_a_cut_matrix_that_differ_are_an_error_that_names_the_matrix_and_the_ranks(tmp_path):
    path, truth = copied("deepspeed_zero2", tmp_path), load_file(golden("deepspeed_zero2") / "truth.safetensors")
    changed_momentum(path, truth)
    said = r"ranks 0 and 1 both hold the whole momentum of 'mix'"
    report = muonckpt.verify(path)
    assert report.verdict == "faulty"
    assert len(report.findings) == 1
    assert said in report.findings[0].message
    with pytest.raises(SourceError, match=said):
        muonckpt.reshard(path, tmp_path / "out", mesh={"dp": 2})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["deepspeed_zero2", "deepspeed_zero3"])
def test_the_missing_file_of_a_rank_is_diagnosed(name, tmp_path):
    path = copied(name, tmp_path)
    (path / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(SourceError, match=r"(?s)rank 1's file .* is missing.*lost.*What to do: "):
        muonckpt.open(path)


class Code:
    def __reduce__(self):
        return exec, ("raise AssertionError",)


def made(folder: Path, optimizer: dict[str, object] | None = None, model: dict[str, object] | None = None) -> Path:
    """Write a run of one rank with a matrix of 2 by 3, with other values for some keys."""
    state = {"state": {0: {"momentum_buffer": torch.arange(6.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    zero = {"base_optimizer_state": state, "single_partition_of_fp32_groups": [torch.arange(6.0)],
            "zero_stage": 2, "group_paddings": [0], "partition_count": [1]}  # fmt: skip
    folder.mkdir()
    torch.save({"optimizer_state_dict": zero | (optimizer or {})}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    states = {"module": {}, "param_shapes": [{"w": torch.Size([2, 3])}], "dp_world_size": 1, **(model or {})}
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    return folder


def test_objects_in_the_files_are_data_and_not_run(tmp_path):
    path = made(tmp_path / "run", {"loss_scaler": Code()}, {"client": Code(), "epoch": 7})
    with muonckpt.open(path) as opened:
        assert opened.tensors["model.w"].numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
        assert opened.items["deepspeed.epoch"] == 7
        assert opened.provenance["not_read"] == ["'client' in mp_rank_00_model_states.pt"]


def test_a_number_of_updates_that_is_no_tensor_becomes_one(tmp_path):
    """As fused optimizers keep it."""
    slots = {"step": 7, "exp_avg": torch.ones(6), "exp_avg_sq": torch.ones(6)}
    group = {"lr": 0.1, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "params": [0]}
    path = made(tmp_path / "run", {"base_optimizer_state": {"state": {0: slots}, "param_groups": [group]}})
    assert muonckpt.verify(path).verdict == "whole"
    muonckpt.reshard(path, tmp_path / "ours", mesh={"dp": 2}, to_dialect="muonckpt")
    with muonckpt.open(tmp_path / "ours") as ours:
        assert ours.tensors["optimizer.state.w.step"].numpy() == 7


@pytest.mark.parametrize(
    ("optimizer", "model", "message"),
    [
        ({"base_optimizer_state": [{}]}, {}, 'save it again without "elastic_checkpoint"'),
        ({"partition_count": [2]}, {}, "those of experts are not read"),
        ({"single_partition_of_fp32_groups": [torch.zeros(4)]}, {}, "do not hold the parameters"),
        ({"single_partition_of_fp32_groups": []}, {}, "flat partitions of 1 groups"),
        ({"param_slice_mappings": [{"v": None}]}, {}, "expected Record, found NoneType"),
        ({}, {"dp_world_size": 1 << 40}, "data-parallel ranks"),
        ({"partition_count": [2]}, {"dp_world_size": 2}, "(?s)rank 1's file zero_pp_rank_1_.* is missing"),
        ({}, {"param_shapes": [{"w": torch.Size([2, 4])}]}, "do not hold the parameters"),
    ],
)  # fmt: skip
def test_files_that_contradict_each_other_are_refused(optimizer, model, message, tmp_path):
    with pytest.raises(SourceError, match=message):
        muonckpt.open(made(tmp_path / "run", optimizer, model))


def test_parts_of_other_parallelism_are_refused_with_what_to_do(tmp_path):
    path = made(tmp_path / "run")
    shutil.copy(path / "mp_rank_00_model_states.pt", path / "mp_rank_01_model_states.pt")
    with pytest.raises(SourceError, match=r"mp_rank_01_model_states.pt.*ds_to_universal.py"):
        muonckpt.open(path)
