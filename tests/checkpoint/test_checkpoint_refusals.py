"""What save and load must refuse, or must know, on real state dicts: each of these once went wrong."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.leaves import leaves
from support.workers import run
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.masked import masked_tensor

import muonckpt
from muonckpt import ArgumentError, DestinationError, LayoutError, SourceError
from muonckpt.layouts.boxed_tensor import parts_of
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


def asked_by_some(rank, world, path):
    """What each load tells where a rank's template lacks what the rank holds a part of; a refused one loads nothing."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))

    def live(value):
        """Replicas of shards, a tensor on part of the ranks, boxes, a row, a plain tensor."""
        whole = torch.full((4, 3), value)
        half = distribute_tensor(whole, grid["shard"], [Shard(0)], src_data_rank=None)
        boxes = muonckpt.BoxedTensor((4, 3), {(rank, 0): whole[:1].clone()})
        both = distribute_tensor(whole, grid, [Replicate(), Shard(0)], src_data_rank=None)
        stage = {"half": half} if rank in (0, 1) else {}
        single = {"row": distribute_tensor(whole[:1], grid, [Replicate(), Shard(0)], src_data_rank=None)}
        return {"both": both, "boxes": boxes, "plain": whole.clone(), **stage, **single}

    muonckpt.save(live(1.0), path)
    told = []
    for victim, lacks in ((3, ()), (3, ("both",)), (1, ("half",)), (2, ("boxes",)), (0, ("plain",)), (1, ("row",))):
        for options in ({}, {"allow_extra": True}):
            template = {key: each for key, each in live(0.0).items() if rank != victim or key not in lacks}
            try:
                muonckpt.load(template, path, **options)
                told.append("loaded")
            except LayoutError as error:
                told.append(str(error))
            loaded = {bool(part.any()) for tensor in template.values() for part in parts_of(tensor).values()}
            assert loaded == {told[-1] == "loaded"}
    return told


def test_a_part_that_a_rank_holds_and_does_not_ask_for_is_named_before_anything_is_loaded(tmp_path):
    """What only some ranks hold, or hold nothing of, is no such part."""
    for told in run(4, asked_by_some, str(tmp_path / "c")):
        assert told[::2] == told[1::2]
        whole, both, half, boxes, plain, row = told[::2]
        assert [whole, plain, row] == ["loaded"] * 3
        assert "tensor 'both' is in the state dict of rank 0" in both and "but not in that of rank 3" in both
        assert "tensor 'half' is in the state dict of rank 0" in half and "but not in that of rank 1" in half
        assert "tensor 'boxes': no rank's state dict asks for box [2:3, 0:3]" in boxes


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
    opt = Muon([{"params": [net.weight], "pieces": (4, 2)}], lr=0.1 * (1 + seed))
    net.weight.grad = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
    opt.step()
    return net, opt


@pytest.mark.filterwarnings("ignore:hyper-parameters are those of the saved run")
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


class NoEmptySlice(torch.Tensor):
    """State in blocks, as torchao keeps it: a view of no elements divides by zero."""

    @staticmethod
    def __new__(cls, blocks):
        return torch.Tensor._make_wrapper_subclass(cls, (64, 256))

    def __init__(self, blocks):
        self.blocks = blocks

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].blocks)
        raise ZeroDivisionError("integer division or modulo by zero")


def _unwritable() -> dict[str, tuple[torch.Tensor, str]]:
    dense, ragged = torch.ones(3, 3), [torch.ones(2), torch.ones(3)]
    with FakeTensorMode():
        fake = torch.empty(3)
    with pytest.warns(UserWarning, match="prototype"):
        masked = masked_tensor(dense, dense > 0)
    with pytest.warns(UserWarning):
        csr, nested = dense.to_sparse_csr(), torch.nested.nested_tensor(ragged)
        quantized = torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8)
    return {
        "sparse": (dense.to_sparse(), "has the layout torch.sparse_coo"),
        "csr": (csr, "has the layout torch.sparse_csr"),
        "mkldnn": (dense.to_mkldnn(), "has the layout torch._mkldnn"),
        "meta": (torch.empty(3, device="meta"), "is on the device meta"),
        "nested": (nested, "is nested"),
        "jagged": (torch.nested.nested_tensor(ragged, layout=torch.jagged), "is nested"),
        "quantized": (quantized, "is quantized"),
        "lazy": (nn.LazyLinear(3).weight, "has not been initialized"),
        "bits": (torch.empty(3, dtype=torch.uint4), "has the dtype torch.uint4"),
        "fake": (fake, "is a FakeTensor"),
        "masked": (masked, "is a MaskedTensor"),
        "blocks": (NoEmptySlice(torch.ones(64)), "is a NoEmptySlice"),
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_a_tensor_that_no_checkpoint_holds_is_refused_by_its_key(tmp_path):
    for kind, (tensor, what) in _unwritable().items():
        state = {"model": {kind: {"w": tensor}}, "good": torch.ones(2)}
        for save in (muonckpt.save, lambda *arguments: muonckpt.async_save(*arguments).result()):
            with pytest.raises(DestinationError, match=f"'model.{kind}.w' {what}.*leave it out of the state dict"):
                save(state, tmp_path / kind)
        assert not (tmp_path / kind).exists()
    for other in ([torch.ones(2)], None, "model"):
        with pytest.raises(ArgumentError, match=f"expected a state dict to save, found {type(other).__name__}"):
            muonckpt.save(other, tmp_path / "other")


@pytest.mark.parametrize("twice", [{"a.b": torch.ones(2), "a": {"b": 1}}, {"a": {1: 0, "1": 1}}])
def test_two_parts_with_one_key_are_refused_by_it(tmp_path, twice):
    muonckpt.save({"a": 1}, tmp_path / "saved")
    for call, path in ((muonckpt.save, tmp_path / "new"), (muonckpt.load, tmp_path / "saved")):
        with pytest.raises(
            ArgumentError, match=r"two parts of the state dict to (save|load into) have the key 'a\.[b1]'"
        ):
            call(twice, path)


def nested_in(wrap: Callable[[Any], Any], count: int, value: Any = 1) -> Any:
    for _ in range(count):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda value: {"a": value}, lambda value: [value], lambda value: (value,)])
def test_containers_in_themselves_or_in_too_many_others_are_refused_by_key_and_the_most_are_loaded(tmp_path, wrap):
    endless: list[Any] = []
    endless.append(wrap(endless))
    muonckpt.save({"good": 1}, tmp_path / "saved")
    for value in (endless, nested_in(wrap, 101), nested_in(wrap, 600)):
        for call, path in (
            (muonckpt.save, tmp_path / "new"),
            (lambda *arguments: muonckpt.async_save(*arguments).result(), tmp_path / "new"),
            (muonckpt.load, tmp_path / "saved"),
        ):
            with pytest.raises(ArgumentError, match=r"'bad' of the state dict to .* contains itself, or more than 100"):
                call({"good": 1, "bad": value}, path)
    muonckpt.save({"most": nested_in(wrap, 100)}, tmp_path / "most")
    muonckpt.load(loaded := {"most": nested_in(wrap, 100, 0)}, tmp_path / "most")
    assert loaded == {"most": nested_in(wrap, 100)}


@pytest.mark.parametrize("save", [muonckpt.save, lambda state, path: dcp.save(state, checkpoint_id=path)])
def test_tensors_that_differ_are_not_loaded_into_one(tmp_path, save):
    """As of a model whose weights were not tied when it was saved: one of them would be lost."""
    same = torch.arange(12.0).reshape(4, 3)
    save({"embedding": same, "head": torch.zeros(4, 3), "copy": same.clone(), "rows": same[:2]}, tmp_path / "x")
    tied = torch.full((4, 3), 5.0)
    template = {"embedding": tied, "copy": tied}
    with pytest.raises(
        SourceError, match=r"(?s)'(embedding|copy)' and 'head' differ in .* share their memory here, as tied"
    ):
        muonckpt.load({**template, "head": tied}, tmp_path / "x")
    assert torch.equal(tied, torch.full((4, 3), 5.0))
    muonckpt.load(template, tmp_path / "x", allow_extra=["head", "rows"])
    assert torch.equal(tied, same)


def test_a_path_in_the_place_of_the_state_dict_is_told_apart(tmp_path):
    state = {"w": torch.ones(2)}
    muonckpt.save(state, tmp_path / "c")
    for call in (muonckpt.save, muonckpt.load, muonckpt.async_save):
        for place in (tmp_path / "c", str(tmp_path / "c")):
            with pytest.raises(
                ArgumentError, match="the state dict is the first argument, and the path comes after it"
            ):
                call(place, state)


def crossing(rank: int, world: int, folder: str) -> list[str]:
    """What each pair of different calls says; rank 1 makes the second one."""
    state = {"w": torch.ones(2)}
    series = muonckpt.Series(f"{folder}/series")
    calls = {
        "save": lambda: muonckpt.save(state, f"{folder}/a"),
        "load": lambda: muonckpt.load(state, f"{folder}/a"),
        "async_save": lambda: muonckpt.async_save(state, f"{folder}/a"),
        "attest": lambda: muonckpt.attest(state, f"{folder}/a"),
        "Series.save": lambda: series.save(1, state),
        "Series.restore": lambda: series.restore(state),
        "Series.latest": lambda: series.latest(),
    }
    said = []
    for one, other in permutations(calls, 2):
        with pytest.raises(ArgumentError) as refusal:
            calls[other if rank else one]()
        assert f"rank 0 called {one}, and rank 1 called {other}" in str(refusal.value)
        said.append(str(refusal.value))
    muonckpt.save(state, f"{folder}/after")  # nothing is left waiting
    return said


def test_ranks_that_make_different_calls_are_told_so_at_once(tmp_path):
    one, other = run(2, crossing, str(tmp_path))
    assert one == other and len(one) == 42


@pytest.mark.parametrize("folder", [".", ".."])
def test_a_folder_without_a_name_is_told_by_its_path(tmp_path, monkeypatch, folder):
    (tmp_path / "run" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run" / "inside")
    with pytest.raises(SourceError, match=str((tmp_path / "run" / "inside" / folder).resolve())):
        muonckpt.load({}, folder)


def test_a_refused_first_save_leaves_no_folder(tmp_path):
    with_hole = {"w": muonckpt.BoxedTensor((4, 3), {(0, 0): torch.ones(2, 3)})}
    series = muonckpt.Series(tmp_path / "runs" / "first")
    with pytest.raises(LayoutError):
        series.save(1, with_hole)
    assert not [*tmp_path.iterdir()]
    # Folders that others use stay.
    (tmp_path / "runs").mkdir()
    with pytest.raises(LayoutError):
        series.save(1, with_hole)
    assert [*tmp_path.rglob("*")] == [tmp_path / "runs"]
