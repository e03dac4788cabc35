"""DTensors that each rank saved with torch.save, as trainers do: assembled, resharded, trained on with."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
from support.commands import called
from support.continued import load_ours
from support.golden import golden
from support.saved_ranks import Block, muon, runs, train
from support.translated import truth_of
from support.workers import run

import muonckpt
from muonckpt import DamageError, SourceError
from muonckpt.programs.signs import NOT_READ
from muonckpt.store.formats.registry import RANK_STATE, format_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WORLD = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folders, and what was in memory.  Do not change."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run(WORLD, runs, folder)[0]


@pytest.mark.parametrize("program", ["verl", "accelerate", "torch_checkpointing"])
def test_a_run_of_hybrid_shards_is_read_and_goes_on_on_other_ranks(program, saved, tmp_path):
    folder, truth = saved
    assert format_of(folder / program) is RANK_STATE
    assert muonckpt.verify(folder / program).verdict == "whole"
    assert called("inspect", folder / program).returncode == 0
    report = muonckpt.reshard(folder / program, tmp_path / "out", mesh={"dp": 3})
    assert any("extra_state_world_size_4_rank_0.pt" in note for note in report.notes) == (program == "verl")
    with muonckpt.open(tmp_path / "out") as out:
        for name, value in truth["weights"].items():
            np.testing.assert_array_equal(out.tensors[f"model.{name}"].numpy(), value.numpy())
        for name, value in truth["momenta"].items():
            np.testing.assert_array_equal(out.tensors[f"optimizer.state.{name}.momentum_buffer"].numpy(), value.numpy())
        assert [*out.groups["optimizer.param_groups.0"]["params"]] == [*truth["momenta"]]
    model = Block()
    optimizer = muon(model)
    load_ours(model, optimizer, tmp_path / "out", allow_extra=["step"] if program == "torch_checkpointing" else [])
    train(model, optimizer, range(3, 5))
    assert all(torch.equal(param.detach(), truth["later"][name]) for name, param in model.named_parameters())


def test_what_torch_checkpointing_wrote_is_read():
    path = golden("torch_checkpointing") / "ckpt"
    assert muonckpt.verify(path).verdict == "whole"
    with muonckpt.open(path) as opened:
        assert opened.outline.provenance.get(NOT_READ) is None
        for name, words in truth_of("torch_checkpointing").items():
            key = re.sub(
                "^(param|state)/", lambda kind: {"param": "model.", "state": "optimizer.state."}[kind[1]], name
            )
            np.testing.assert_array_equal(opened.tensors[key.replace("/", ".")].bits(), words)


def test_bytes_of_data_loaders_are_read_under_the_keys_of_their_ranks(tmp_path):
    """Torchtitan's items, whose loader has a key for each rank."""
    source = shutil.copytree(golden("upstream/titan_torch_checkpointing") / "ckpt", tmp_path / "source")
    states = {f"dp_rank_{rank}": bytes([rank, 0x80, 0xFF, 10]) * 9 for rank in range(2)}
    for rank, (key, state) in enumerate(states.items()):
        own = {key: state, f"generator_{rank}": torch.full((6,), rank, dtype=torch.uint8)}
        torch.save({"version": 1, **own}, source / f"dataloader_{rank}.pt")
    kept = {f"dataloader.{key}": state for key, state in states.items()} | {"lr_scheduler.last_epoch": 10}
    assert muonckpt.verify(source).verdict == "whole"
    muonckpt.reshard(source, tmp_path / "dcp", mesh={"dp": 2})
    for folder in (source, tmp_path / "dcp"):
        with muonckpt.open(folder) as opened:
            assert {key: opened.items[key] for key in kept} == kept
            for rank in range(2):  # as torchdata's samplers keep theirs
                np.testing.assert_array_equal(opened.tensors[f"dataloader.generator_{rank}"].numpy(), [rank] * 6)
    # JSON has no bytes, so the file of items lists them.
    muonckpt.reshard(source, tmp_path / "out.safetensors", format="safetensors")
    listed = json.loads((tmp_path / "out.safetensors.items.json").read_text())["undecoded"]
    assert {item["key"] for item in listed} == {f"dataloader.{key}" for key in states}


@pytest.mark.parametrize("differing", ["a value", "a tensor", "a tensor for a value"])
def test_ranks_that_contradict_each_other_beside_data_loaders_are_refused(differing, tmp_path):
    source = shutil.copytree(golden("upstream/titan_torch_checkpointing") / "ckpt", tmp_path / "source")
    torch.save({"dp_rank_0": b"x", "generator": torch.zeros(2)}, source / "dataloader_0.pt")
    values = {"a value": b"y", "a tensor": b"x", "a tensor for a value": torch.zeros(2)}
    generator = torch.full((2,), float(differing == "a tensor"))
    torch.save({"dp_rank_0": values[differing], "generator": generator}, source / "dataloader_1.pt")
    with pytest.raises(SourceError, match=r"same (value|tensor) on all ranks.*dataloader_0.pt"):
        muonckpt.open(source)


def test_strided_shards_of_tensor_parallelism_are_put_together(saved):
    folder, truth = saved
    with muonckpt.open(folder / "parallel") as opened:
        np.testing.assert_array_equal(opened.tensors["model.weight"].numpy(), truth["parallel"]["weight"].numpy())


def test_lost_mixed_and_foreign_ranks_are_refused(saved, tmp_path):
    folder, _ = saved
    place = tmp_path / "run"
    file = "{}_world_size_4_rank_{}.pt".format

    def anew():
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder / "verl", place)

    anew()
    (place / file("optim", 2)).unlink()
    with pytest.raises(DamageError, match="optimizer of each of 4 ranks, found none of rank 2"):
        muonckpt.open(place)
    shutil.copy(place / file("optim", 3), place / file("optim", 2))
    with pytest.raises(SourceError, match=r"shards overlap: .*_2.pt and .*_3.pt are both of coordinate \(1, 1\)"):
        muonckpt.open(place)
    shutil.rmtree(place)
    shutil.copytree(folder / "accelerate", place)
    for lost in place.glob("*_rank3.bin"):
        lost.unlink()
    with pytest.raises(SourceError, match=r"every rank of a mesh of sizes \(2, 2\), found the files of 3 ranks"):
        muonckpt.open(place)
    anew()
    shutil.copy(place / file("model", 0), place / "model_world_size_2_rank_0.pt")
    with pytest.raises(SourceError, match="one run, found some of 2 and some of 4 ranks"):
        muonckpt.open(place)
    anew()
    data = bytearray((place / file("model", 3)).read_bytes())
    with muonckpt.open(place) as opened:
        first = opened.tensors["model.up"].record.chunks[0]
    data[first.payload.offset] ^= 1
    (place / file("model", 0)).write_bytes(bytes(data))  # rank 3's file under the name of rank 0's
    with pytest.raises(SourceError, match="overlap"):
        muonckpt.open(place)
    anew()
    data = bytearray((place / file("model", 0)).read_bytes())
    data[first.payload.offset] ^= 1
    (place / file("model", 0)).write_bytes(bytes(data))
    assert muonckpt.verify(place).verdict == "faulty"
    with pytest.raises(SourceError, match="DTensor, and this file has the part of one rank"):
        muonckpt.open(place / file("model", 1))
    anew()
    for rank in range(4):
        torch.save({"flat": torch.full((3,), float(rank))}, place / file("model", rank))
    with pytest.raises(SourceError, match="flat parameters of FSDP1"):
        muonckpt.open(place)
