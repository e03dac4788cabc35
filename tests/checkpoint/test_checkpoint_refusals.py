"""What save and load must refuse, or must know, on real state dicts: each of these once went wrong."""

from __future__ import annotations

import argparse

import pytest
import torch
from support.leaves import leaves
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import muonckpt
from muonckpt.errors import DestinationError, LayoutError, SourceError
from muonckpt.optimizer import Muon


def contradicting(rank, world, path):
    """Rows 3 + 5 of 8, and terms of a sum: neither is what the placements say a checkpoint could hold."""
    mesh = init_device_mesh("cpu", (world,))
    local = torch.ones(3 if rank == 0 else 5, 4)
    uneven = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 4)), stride=(4, 1))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    messages = []
    for value in (uneven, partial):
        try:
            muonckpt.save({"x": value}, path)
        except LayoutError as error:
            messages.append(str(error))
    return messages


def test_a_tensor_that_could_not_be_read_back_is_not_saved(tmp_path):
    for uneven, partial in run(2, contradicting, str(tmp_path / "c")):
        assert "local tensor of shape" in uneven and "terms of a sum" in partial
    assert list(tmp_path.iterdir()) == []


def lacking(rank, world, path):
    """Rank 1 leaves its half of a matrix out of the state dict."""
    mesh = init_device_mesh("cpu", (world,))
    matrix = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)], src_data_rank=None)
    try:
        muonckpt.save({"w": matrix} if rank == 0 else {"v": torch.ones(2)}, path)
    except LayoutError as error:
        return str(error)
    return "no error"


def test_a_part_that_no_rank_saves_is_named(tmp_path):
    for message in run(2, lacking, str(tmp_path / "c")):
        assert "tensor 'w'" in message and "no buffer holds box [2:4, 0:3]" in message and "rank 0" in message
    assert list(tmp_path.iterdir()) == []


def annotated(path) -> tuple[str | None, str | None, object, object]:
    [tensor] = [t for t in muonckpt.open(path).outline.tensors if "momentum_buffer" in t.key]
    return tensor.name, tensor.slot, tensor.convention, tensor.pieces


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FORMS = {
    "nested": lambda net, opt: {"o": get_optimizer_state_dict(net, opt)},
    "flat": lambda net, opt: {"o": get_optimizer_state_dict(net, opt, options=FLAT)},
    "raw": lambda net, opt: {"o": opt.state_dict()},
    "object": lambda net, opt: {"o": opt},
    "listed": lambda net, opt: {"o": [get_optimizer_state_dict(net, opt)]},
}


def stepped(seed: int) -> tuple[nn.Module, Muon]:
    """A matrix with a momentum of its own."""
    net = nn.Linear(3, 6, bias=False)
    opt = Muon(net.parameters(), pieces=(4, 2), lr=0.1 * (1 + seed))
    net.weight.grad = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
    opt.step()
    return net, opt


@pytest.mark.parametrize("form", FORMS)
def test_momentum_is_annotated_in_every_form_in_which_optimizers_are_saved(form, tmp_path):
    (net, opt), (other_net, other_opt) = stepped(0), stepped(1)
    muonckpt.save(FORMS[form](net, opt), tmp_path / "c")
    name = "weight" if form in ("nested", "flat", "listed") else "0"
    assert annotated(tmp_path / "c") == (name, "momentum_buffer", "ema", (4, 2))
    template = FORMS[form](other_net, other_opt)
    muonckpt.load(template, tmp_path / "c")
    assert leaves(template) == leaves(FORMS[form](net, opt)) != leaves(FORMS[form](*stepped(1)))


def pipeline(rank, world, path):
    """Two stages: each rank has parameters that the other does not."""
    net, opt = stepped(rank)
    muonckpt.save({f"stage{rank}": get_optimizer_state_dict(net, opt)}, path)
    template = {f"stage{rank}": get_optimizer_state_dict(*stepped(2))}
    muonckpt.load(template, path)
    return leaves(template[f"stage{rank}"]), leaves(get_optimizer_state_dict(net, opt))


def test_stages_with_different_keys_save_annotated_and_load_strictly(tmp_path):
    (first, expected), (second, other) = run(2, pipeline, str(tmp_path / "c"))
    assert first == expected != second == other
    conventions = {t.key: t.convention for t in muonckpt.open(tmp_path / "c").outline.tensors}
    assert conventions == {f"stage{rank}.state.weight.momentum_buffer": "ema" for rank in range(2)}


def test_something_that_only_looks_like_an_optimizer_is_saved_as_it_is(tmp_path):
    def state(value, item):
        return {
            "x": {"state": torch.full((2,), value), "param_groups": item},
            "y": {"state": {"a": item}, "param_groups": [f"b{item}"]},
        }

    muonckpt.save(state(1.0, 3), tmp_path / "c")
    template = state(0.0, 0)
    muonckpt.load(template, tmp_path / "c")
    assert leaves(template) == leaves(state(1.0, 3))


def test_what_load_would_refuse_is_not_saved_and_refused_before_tensors_are_overwritten(tmp_path):
    state = {"w": torch.ones(3), "run": {"args": argparse.Namespace(lr=1), "lr": 1}}
    with pytest.raises(DestinationError, match=r"'run\.args' holds more than plain data \(argparse\.Namespace\)"):
        muonckpt.save(state, tmp_path / "c")
    with pytest.raises(DestinationError, match=r"'run\.args' holds more"):
        muonckpt.async_save(state, tmp_path / "c").result()
    assert not list(tmp_path.iterdir())
    with torch.serialization.safe_globals([argparse.Namespace]):
        muonckpt.save(state, tmp_path / "c")
    template = {"w": torch.zeros(3), "run": {"args": None, "lr": None}}
    with pytest.raises(SourceError, match="more than plain data"):
        muonckpt.load(template, tmp_path / "c")
    assert not template["w"].any() and template["run"]["lr"] is None


def test_counters_of_eight_bytes_are_saved(tmp_path):
    net, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    net.num_batches_tracked += 2**40
    muonckpt.save({"model": net.state_dict()}, tmp_path / "c")
    muonckpt.load({"model": other.state_dict()}, tmp_path / "c")
    assert other.num_batches_tracked == 2**40


def test_unknown_protocols_and_bad_provenance_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DestinationError, match="cannot open nonsense://bucket/checkpoint"):
        muonckpt.save({"w": torch.ones(1)}, "nonsense://bucket/checkpoint")
    with pytest.raises(SourceError, match="cannot open nonsense://bucket/checkpoint"):
        muonckpt.load({"w": torch.ones(1)}, "nonsense://bucket/checkpoint")
    with pytest.raises(ValueError, match="JSON"):
        muonckpt.save({"w": torch.ones(1)}, "c", provenance={"loss": float("nan")})
    with pytest.raises(TypeError, match="JSON"):
        muonckpt.save({"w": torch.ones(1)}, "c", provenance={"path": tmp_path})
    assert list(tmp_path.iterdir()) == []


def reshaped_replicas(rank, world, path):
    try:
        muonckpt.save({"x": torch.zeros((3, 2) if rank else (2, 3))}, path)
    except LayoutError as error:
        return str(error)
    return "no error"


def test_replicas_of_other_shapes_are_not_equal_even_if_their_bytes_are(tmp_path):
    for message in run(2, reshaped_replicas, str(tmp_path / "c")):
        assert "hold different data" in message
