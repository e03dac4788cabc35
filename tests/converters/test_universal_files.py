"""DeepSpeed's universal folder as a destination: whole, as torch reads it, and the same in an object store."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file
from support.golden import golden

import muonckpt
from muonckpt import SourceError, TargetError

TAG = "global_step3"


@pytest.mark.parametrize("name", ["deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_bf16"])
def test_what_was_trained_elsewhere_is_whole(name, tmp_path):
    truth = load_file(golden(name) / "truth.safetensors")
    muonckpt.reshard(golden(name) / TAG, tmp_path / "ours", mesh={"dp": 2}, to_dialect="muonckpt")
    path = tmp_path / "universal"
    muonckpt.convert(tmp_path / "ours", path, to_dialect="deepspeed")
    assert muonckpt.verify(path).verdict == "whole"
    model = torch.load(path / "mp_rank_00_model_states.pt", weights_only=False)
    assert model["global_steps"] == 3 and model["module"]["scale"].tolist() == [0.5, 2.0]
    with muonckpt.open(path) as opened:
        for key, value in truth.items():
            word = {2: torch.uint16, 4: torch.uint32}[value.element_size()]
            np.testing.assert_array_equal(opened.tensors[key].bits(), value.view(word).numpy(), key)
            name, slot = key.removeprefix("optimizer.state.").rsplit(".", 1)
            if key.startswith("model."):
                name, slot = key.removeprefix("model."), "fp32"
            file = path / "zero" / name / f"{slot}.pt"
            assert torch.equal(torch.load(file, weights_only=False)["param"], value)


def test_an_object_store_gets_the_same_files(tmp_path):
    source, store = golden("deepspeed_zero3") / TAG, MemoryFileSystem()
    for path in (tmp_path / "folder", "memory://universal"):
        muonckpt.convert(source, path, to_dialect="deepspeed")
    files = {str(file.relative_to(tmp_path / "folder")): file for file in (tmp_path / "folder").rglob("*.pt")}
    assert {name.removeprefix("/universal/") for name in store.find("/universal")} == {*files}
    for name, file in files.items():
        assert store.cat_file(f"/universal/{name}") == file.read_bytes(), name
    store.rm("/universal", recursive=True)


def test_what_a_universal_folder_cannot_hold_is_refused(tmp_path):
    source = golden("deepspeed_zero1") / TAG
    with pytest.raises(TargetError, match="a file for each tensor: leave out `shard_size=`"):
        muonckpt.convert(source, tmp_path / "x", format="universal", shard_size=1000)
    with pytest.raises(SourceError, match="need parameter groups"):
        muonckpt.convert(source, tmp_path / "x", format="universal", select=["model.*"])
