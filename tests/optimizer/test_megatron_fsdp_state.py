"""State of a run on Megatron-FSDP, saved and loaded on other topologies, by stock DCP and by us."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import sweep
from support.megatron_model import Topology, offsets, on_cpu, whole
from support.megatron_training import TOPOLOGIES, backward, build, slots, with_the_package
from support.workers import run
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

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


def ways(of: dict[str, object], topology: Topology) -> dict[str, object]:
    """The ways of saving or loading that know all boxes: the package's finds wrong ones on the meshes of version 1."""
    return {name: way for name, way in of.items() if name != "the package" or topology.version == 2}


def by_the_package(state: dict[str, object]) -> dict[str, object]:
    """The state, with the hooks by which megatron-fsdp itself declares boxes."""
    from megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor

    return preprocess_state_dict_for_uneven_dtensor(state)


SAVE = {
    "stock": stock_save,
    "muonckpt": muonckpt.save,
    "the package": lambda state, path: stock_save(by_the_package(state), path),
}
LOAD = {
    "stock": stock_load,
    "muonckpt": muonckpt.load,
    "the package": lambda state, path: stock_load(by_the_package(state), path),
}

RESHARDED = "what the package has written, resharded offline"


def in_a_step(model: torch.nn.Module, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a run, and what a forward pass makes of those that it uses."""
    with torch.no_grad():
        return whole(params, offsets(params)) | {"output": model(torch.arange(5))}


def saved(rank: int, world: int, topology: Topology, path: str, options: dict) -> tuple[list[str], dict, dict]:
    """Keys of the state, the state, and the weights, of a run that is then saved in all ways."""
    with on_cpu():
        model, params, optimizer = build(rank, topology, "normuon", **options)
        attach(optimizer, model)
        backward(model, rank, 0, topology)
        optimizer.step()
        weights, state = get_state_dict(model, optimizer)
        for name, save in ways(SAVE, topology).items():
            save({"model": weights, "optimizer": state}, f"{path}/{name}")
        keys = [f"{name}.{slot}" for name, found in state["state"].items() for slot in found]
        return keys, all_state(params, optimizer), in_a_step(model, params)


def loaded(rank: int, world: int, topology: Topology, path: str, options: dict) -> dict[str, tuple[dict, dict]]:
    """State and weights of a run that has loaded them, by who did; each starts from what is no state of any run."""
    found = {}
    with on_cpu():
        sources = {**ways(LOAD, topology)}
        if Path(path, RESHARDED).exists():
            sources[RESHARDED] = muonckpt.load
        for name, load in sources.items():
            model, params, optimizer = build(rank, topology, "normuon", **options)
            attach(optimizer, model)
            with torch.no_grad():
                for slots_of in optimizer.state.values():
                    for value in slots_of.values():
                        value.fill_(-1)
                for param in params.values():
                    param.fill_(-1)
            weights, state = get_state_dict(model, optimizer)
            load({"model": weights, "optimizer": state}, f"{path}/{name}")
            if name == "stock":  # which fills the tensors, as the others do: that is enough
                set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
            found[name] = all_state(params, optimizer), in_a_step(model, params)
    return found


V2 = "version 2, {} ranks".format
PAIRS = [
    ("FSDP x TP", "HSDP, outer sharded"),
    ("FSDP, 2 ranks", "HSDP, outer sharded"),
    ("FSDP x TP", "FSDP, 2 ranks"),
    ("FSDP", "FSDP x TP"),
    (V2(3), V2(2)),
    (V2(2), V2(4)),
    (V2(4), "version 2, 1 rank"),
    ("version 2, 1 rank", V2(3)),
    ("version 2, HSDP", V2(3)),
]


@with_the_package
@pytest.mark.parametrize("options", sweep([{}, {"dtype": torch.bfloat16}], {}), ids=str)
@pytest.mark.parametrize(("source", "target"), sweep(PAIRS, PAIRS[4]))
def test_a_checkpoint_takes_weights_and_state_to_another_topology(source, target, options, tmp_path):
    source, target, path = TOPOLOGIES[source], TOPOLOGIES[target], str(tmp_path)
    of_ranks = run(source.world, saved, source, path, options)
    keys, state, weights = of_ranks[0]
    assert all(of_rank[0] == keys for of_rank in of_ranks)
    names, prefix = {name.removesuffix(".rows") for name in state}, "module." if source.version == 1 else ""
    assert len(names) == len(state) / 2 and {f"{prefix}{name}.momentum_buffer" for name in names} <= set(keys)
    assert sum(bool(value.any()) for value in state.values()) == len(state) - 4  # two frozen parameters
    names_of_loads = {*ways(LOAD, target)}
    if source.version == 2:
        # What the package has written is read, judged and rewritten without it.
        written = f"{path}/the package"
        report, inspection = muonckpt.verify(written), muonckpt.inspect(written)
        assert not report.findings and report.tensors == len(inspection.manifest.tensors)
        assert {row["method"] for row in inspection.optimizer} == {"adamw", "normuon"}
        muonckpt.reshard(written, f"{path}/{RESHARDED}", mesh={"dp": target.world})
        names_of_loads.add(RESHARDED)
    for of_rank in run(target.world, loaded, target, path, options):
        assert of_rank.keys() == names_of_loads
        for found, found_weights in of_rank.values():
            if source.tensor != target.tensor:  # which adds the terms of the output in another order
                found_weights["output"] = weights["output"]
            assert found.keys() == state.keys() and found_weights.keys() == weights.keys()
            assert [name for name, value in state.items() if not torch.equal(found[name], value)] == []
            assert [name for name, value in weights.items() if not torch.equal(found_weights[name], value)] == []
