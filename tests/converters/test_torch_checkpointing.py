"""torch_checkpointing's files: what its manager saves is read, and it resumes from what is written for it."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from support.saved_ranks import Block, muon, train, whole
from support.workers import run
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import muonckpt
from muonckpt import TargetError
from muonckpt.converters.options import grouped

pytest.importorskip("torch_checkpointing")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def manager(reshards=True):
    """Return a manager.  For resharders, 0.1.1 needs CUDA to save on several ranks, but not to load."""
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    items = {key: ItemSpec(resharder=DefaultResharder() if reshards else None) for key in ("model", "optimizer")}
    storage = LocalFileSystemStorageConfig(use_direct_io=False)  # which not every file system has
    config = CheckpointManager.Config(items=items, save=SyncCheckpointSaverConfig(), storage_config=storage)
    return closing(CheckpointManager(config))


def made(world):
    model = Block()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, muon(model)


def state_of(model, optimizer):
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def held(model, optimizer):
    momenta = {name: optimizer.state[param]["momentum_buffer"] for name, param in model.named_parameters()}
    return whole(dict(model.named_parameters())), whole(momenta)


RUN = {"train_state": {"step": torch.tensor(3)}}


def loader_state(rank):
    """Return the state of one rank's data loader as torchtitan has it: bytes under a key of the rank."""
    return {f"dp_rank_{rank}": bytes([rank, 0, 0x80, 0xFF]), "world_size": 2}


def began(rank, world, path):
    model, optimizer = made(world)
    train(model, optimizer, range(3))
    with manager(reshards=False) as own:
        own.save(str(path), {**state_of(model, optimizer), "step": 3, "dataloader": loader_state(rank), **RUN})
    saved = held(model, optimizer)
    train(model, optimizer, range(3, 5))
    return saved, held(model, optimizer)


def resumed(rank, world, path):
    model, optimizer = made(world)
    train(model, optimizer, range(1))  # the state that the loader fills
    state = state_of(model, optimizer)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    with manager() as own:
        loader, train_state = dict.fromkeys(loader_state(rank % 2)), {"step": torch.tensor(0)}
        loaded = own.load(
            str(path), into={**state, "step": 0, "dataloader": loader, "train_state": train_state}, strict=True
        )
    assert loaded["dataloader"] == loader_state(rank % 2) and train_state["step"] == 3
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optimizer"])
    found = held(model, optimizer)
    train(model, optimizer, range(3, 5))
    return loaded["step"], found, held(model, optimizer)


def equal(one, other):
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in b)


def test_a_run_goes_on_in_torch_checkpointing_on_other_ranks(tmp_path):
    """Files of three ranks from those of two, loaded by the library on two and on three."""
    two, path = tmp_path / "two", tmp_path / "three"
    saved, later = run(2, began, two)[0]
    assert muonckpt.verify(two).verdict == "whole"
    muonckpt.reshard(two, path, **grouped(mesh={"dp": 3}, format="torch_checkpointing", verify=True))
    assert muonckpt.verify(path).verdict == "whole" and not muonckpt.diff(two, path).differs
    for world in (2, 3):
        for step, found, after in run(world, resumed, path):
            assert step == 3 and equal(found, saved) and equal(after, later)
    archive = path / "optimizer_1.pt"
    data = bytearray(archive.read_bytes())
    data[data.index(b"param_groups")] ^= 1  # in its pickle, where no tensor is
    archive.write_bytes(data)
    assert "optimizer_1.pt" in str(muonckpt.verify(path).findings)
    (path / "step_2.pt").unlink()
    assert "step_2.pt" in str(muonckpt.verify(path).findings)
    with pytest.raises(TargetError, match="no flat buffers"):
        options = grouped(mesh={"dp": 2}, layout="flat", format="torch_checkpointing")
        muonckpt.reshard(two, tmp_path / "flat", **options)
