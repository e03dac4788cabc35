"""DeepSpeed's files as a destination: equal to DeepSpeed's own on its ranks, and whole on any others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from support import sweep
from support.golden import golden
from torch import uint16, uint32

import muonckpt
from muonckpt import SourceError, TargetError
from muonckpt.store.formats.torch_save.inert_pickle import Record
from muonckpt.store.formats.torch_save.torch_file import TorchFile, is_tensor, read_torch_file

TAG = "global_step3"
WRITTEN = {"deepspeed_zero1": "zero1", "deepspeed_zero2": "zero2-bf16", "deepspeed_zero3": "zero3-bf16",
           "deepspeed_bf16": "bf16-optimizer"}  # fmt: skip
"""The format in which each run was written, and the run's number of ranks."""

RANKS = {"deepspeed_zero1": 3}


def plain(file: TorchFile, folder: Path, value: object) -> object:
    """Return part of a file with bytes for tensors, without the parts that no load reads."""
    if is_tensor(value):
        dtype, chunk = file.chunk(value)
        payload = chunk.payload
        assert payload is not None
        raw = (folder / payload.file).read_bytes()[payload.offset : payload.end]
        return dtype, chunk.box.shape, raw
    if isinstance(value, Record) and value.items is not None:
        value = value.items
    if isinstance(value, Record):
        return value.kind, plain(file, folder, value.args), plain(file, folder, value.state)
    if isinstance(value, dict):
        return {key: plain(file, folder, part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(file, folder, part) for part in value]
    return value


@pytest.mark.parametrize("name", WRITTEN)
def test_on_as_many_ranks_the_optimizers_files_hold_what_deepspeed_wrote(name, tmp_path):
    source, path = golden(name) / TAG, tmp_path / TAG
    muonckpt.reshard(source, path, mesh={"dp": RANKS.get(name, 2)}, format=WRITTEN[name])
    assert {file.name for file in path.iterdir()} == {file.name for file in source.iterdir()}
    for file in source.glob("*_optim_states.pt"):
        theirs, ours = (
            plain(read, folder, read.content["optimizer_state_dict"])
            for folder in (source, path)
            for read in [read_torch_file(folder, file.name)]
        )
        for key in theirs.keys() - ours.keys():
            assert key in {"loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"}, key
        for key in ours.keys() - {"fp32_flat_groups"}:  # ZeRO 3 pads weights with whatever was in memory
            assert ours[key] == theirs[key], key


@pytest.mark.parametrize("ranks", sweep([1, 5], 5))
@pytest.mark.parametrize("name", WRITTEN)
def test_what_was_trained_elsewhere_is_whole_on_any_number_of_ranks(name, ranks, tmp_path):
    truth = load_file(golden(name) / "truth.safetensors")
    muonckpt.reshard(golden(name) / TAG, tmp_path / "ours", mesh={"dp": 2}, to_dialect="muonckpt")
    formats = [WRITTEN[name], "universal"] + ["zero2"] * (name == "deepspeed_zero3")
    for format in formats:
        path = tmp_path / format
        muonckpt.convert(tmp_path / "ours", path, mesh={"dp": ranks}, to_dialect="deepspeed", format=format)
        assert muonckpt.verify(path).verdict == "whole"
        with muonckpt.open(path) as opened:
            for key, value in truth.items():
                word = {2: uint16, 4: uint32}[value.element_size()]
                np.testing.assert_array_equal(opened.tensors[key].bits(), value.view(word).numpy(), key)
            if format != "universal":
                assert opened.tensors["model.scale"].numpy().tolist() == [0.5, 2.0]
                assert opened.items["deepspeed.global_steps"] == 3


def test_what_zero_cannot_hold_is_refused(tmp_path):
    source = golden("deepspeed_zero1") / TAG
    with pytest.raises(TargetError, match="leave out `shard=` and `layout=`"):
        muonckpt.reshard(source, tmp_path / "x", mesh={"dp": 2}, format="zero2", layout="flat")
    with pytest.raises(SourceError, match="need parameter groups"):
        muonckpt.reshard(source, tmp_path / "x", mesh={"dp": 2}, format="zero3", select=["model.*"])
