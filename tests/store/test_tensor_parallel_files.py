"""Megatron's per-rank files of tensor-parallel ranks: parts that become whole tensors, and parts that do not fit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support.rank_files import described, written
from support.resharded import grouped

import muonckpt
from muonckpt import SourceError


@pytest.mark.parametrize("algorithm", ["padded-numel", "legacy-pingpong"])
def test_parts_of_tensor_parallel_ranks_are_joined(algorithm, tmp_path):
    """Rows, columns, fused halves by turns, and what every rank has whole: as the whole run of one such rank."""
    (tmp_path / "whole").mkdir()
    whole, path = written(tmp_path / "whole", algorithm, 3), written(tmp_path, algorithm, 3, parts=2)
    actual, expected = muonckpt.open(path).tensors, muonckpt.open(whole).tensors
    assert actual.keys() == expected.keys() and len(actual) > 20
    for key, tensor in expected.items():
        assert np.array_equal(actual[key].bits(), tensor.bits()), key
    assert {blob.key for blob in muonckpt.open(path).manifest.blobs} == {
        blob.key for blob in muonckpt.open(whole).manifest.blobs
    }
    assert muonckpt.verify(path).verdict == "whole"
    to = "torch_dist_chained" if algorithm == "legacy-pingpong" else "torch_dist"
    for source, out in ((path, "joined"), (whole, "one")):
        muonckpt.convert(source, tmp_path / out, to_dialect=to, mesh={"dp": 3})
    assert not muonckpt.diff(tmp_path / "joined", tmp_path / "one").differs
    damaged = next(t for t in muonckpt.open(path).manifest.tensors if t.key.endswith("fc.momentum_buffer")).chunks[3]
    data = bytearray((path / damaged.item.file).read_bytes())
    data[damaged.payload.offset] ^= 1
    (path / damaged.item.file).write_bytes(data)
    assert muonckpt.verify(path).verdict == "faulty"
    with pytest.raises(SourceError, match="CRC-32"):
        muonckpt.convert(path, tmp_path / "no", **grouped(format="zarr", tensors_only=True))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda told: told.pop("cut"), "expected both: tensor_parallel with the folders"),
        (lambda told: told["cut"].pop(0), r"tensor_model_parallel=True, partition_dim=0.*the description says None"),
        (lambda told: told["cut"][0].update(dim=1), r"partition_dim=0, .*says TensorCut.*dim=1"),
        (lambda told: told["cut"][1].update(interleaved=4), r"partition_stride=2.*interleaved=4"),
        (lambda told: told["cut"].append({"names": ["norm"]}), r"'norm'.*tensor_model_parallel=False.*says TensorCut"),
        (lambda told: told["cut"][0].update(dim=1, interleaved=2), "interleaved only along dim 0"),
        (lambda told: told["tensor_parallel"].append("mp_rank_02"), "mp_rank_02"),
        (lambda told: told.update(experts=2), "expert parallelism as well"),
    ],
)
def test_parts_that_do_not_fit_are_not_joined(change, message, tmp_path):
    path = written(tmp_path, "legacy-pingpong", 2, parts=2)
    told = json.loads((path / "layer_wise.json").read_text())
    change(told)
    with pytest.raises(SourceError, match=message):
        muonckpt.open(described(path, **told))


def test_ranks_that_differ_in_what_no_cut_names_are_refused(tmp_path):
    """Masters without attributes do not tell it, as those of early versions."""
    path = written(tmp_path, "padded-numel", 2, parts=2)
    for file in path.glob("*/layer_wise_optimizer_*.pt"):
        saved = torch.load(file, weights_only=False)
        saved["fp32_from_fp16_params"] = [[m.data.clone() for m in group] for group in saved["fp32_from_fp16_params"]]
        torch.save(saved, file)
    told = json.loads((path / "layer_wise.json").read_text())
    with pytest.raises(SourceError, match=r"'.*\.o.*' is not the same on all .*say so in a \[\[cut\]\]"):
        muonckpt.open(described(path, **told | {"cut": told["cut"][:2]}))
