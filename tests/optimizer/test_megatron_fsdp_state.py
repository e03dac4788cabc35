"""State of a run on Megatron-FSDP, saved and loaded on other topologies, by stock DCP and by us."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import sweep
from support.megatron_model import Topology, offsets, on_cpu, whole
from support.megatron_training import TOPOLOGIES, backward, build, slots, with_the_package
from support.workers import run
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import muonckpt
from muonckpt.optimizer import Muon
from muonckpt.optimizer.megatron_fsdp import attach


def all_state(params: dict[str, torch.Tensor], optimizer: Muon) -> dict[str, torch.Tensor]:
    """Momentum, which is as uneven as the parameters, and statistics of rows, which are not."""
    rows = {f"{name}.rows": value.full_tensor() for name, value in slots(params, optimizer, "second_moment").items()}
    return rows | whole(slots(params, optimizer, "momentum_buffer"), offsets(params))


def stock_save(state: dict[str, object], path: str) -> None:
    dcp.save(state, checkpoint_id=path)


def stock_load(state: dict[str, object], path: str) -> None:
    dcp.load(state, checkpoint_id=path)


SAVE = {"stock": stock_save, "muonckpt": muonckpt.save}
LOAD = {"stock": stock_load, "muonckpt": muonckpt.load}


def saved(rank: int, world: int, topology: Topology, path: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Keys of the state, and the state, of a run that is then saved in both ways."""
    with on_cpu():
        model, params, optimizer = build(rank, topology, "normuon")
        attach(optimizer, model)
        backward(model, rank, 0, topology)
        optimizer.step()
        state = get_optimizer_state_dict(model, optimizer)
        for name, save in SAVE.items():
            save({"optimizer": state}, f"{path}/{name}")
        keys = [f"{name}.{slot}" for name, found in state["state"].items() for slot in found]
        return keys, all_state(params, optimizer)


def loaded(rank: int, world: int, topology: Topology, path: str) -> dict[str, dict[str, torch.Tensor]]:
    """The state of a run that has loaded it, by who did; each starts from what is no state of any run."""
    found = {}
    with on_cpu():
        model, params, optimizer = build(rank, topology, "normuon")
        attach(optimizer, model)
        for name, load in LOAD.items():
            for slots_of in optimizer.state.values():
                for value in slots_of.values():
                    value.fill_(-1)
            state = get_optimizer_state_dict(model, optimizer)
            load({"optimizer": state}, f"{path}/{name}")
            set_optimizer_state_dict(model, optimizer, state)
            found[name] = all_state(params, optimizer)
    return found


PAIRS = [
    ("FSDP x TP", "HSDP, outer sharded"),
    ("FSDP, 2 ranks", "HSDP, outer sharded"),
    ("FSDP x TP", "FSDP, 2 ranks"),
    ("FSDP", "FSDP x TP"),
]


@with_the_package
@pytest.mark.parametrize(("source", "target"), sweep(PAIRS, PAIRS[0]))
def test_a_checkpoint_takes_the_state_to_another_topology(source, target, tmp_path):
    source, target, path = TOPOLOGIES[source], TOPOLOGIES[target], str(tmp_path)
    of_ranks = run(source.world, saved, source, path)
    keys, state = of_ranks[0]
    assert all(of_rank[0] == keys for of_rank in of_ranks)
    names = {name.removesuffix(".rows") for name in state}
    assert len(names) == len(state) / 2 and {f"module.{name}.momentum_buffer" for name in names} <= set(keys)
    assert sum(bool(value.any()) for value in state.values()) == len(state) - 4  # two frozen parameters
    for of_rank in run(target.world, loaded, target, path):
        assert of_rank.keys() == LOAD.keys()
        for found in of_rank.values():
            assert found.keys() == state.keys()
            assert all(torch.equal(found[name], value) for name, value in state.items())
