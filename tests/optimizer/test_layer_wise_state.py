"""State of layer-wise runs in checkpoints: every layout and number of ranks loads into every other, and into FSDP."""

from __future__ import annotations

import json
import pickle
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import sweep
from support.layer_wise_training import PARAMETERS, Net, alone, gradients, groups, of_dense, of_pair
from support.manifest_json import manifest_at
from support.workers import run
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonckpt
from muonckpt import LayoutError
from muonckpt.layouts.buffers.records import from_json
from muonckpt.layouts.tensors import local_of
from muonckpt.optimizer import LayerWise, Muon

OWNERS = [
    ("padded-nscost", 3),
    ("decoupled-total-order", 3),
    ("legacy-pingpong", 1),
    ("legacy-pingpong", 4),
    ("balanced", 3),
]
RUNS = [*OWNERS, ("rows", 3), ("hsdp", 4), ("process", 1)]


def few_groups(net: Net) -> list[dict]:
    """As few as there are algorithms and fusings: a checkpoint has an item for each option of each group."""
    found: dict[tuple, dict] = {}
    for name, p in net.named_parameters():
        options = {key: value for key, value in PARAMETERS[name][1].items() if key in ("algorithm", "pieces")}
        found.setdefault(tuple(options.items()), {"params": [], "lr": 0.02, **options})["params"].append(p)
    return list(found.values())


def built(kind: str, world: int, dtype: torch.dtype = torch.float32) -> tuple[Net, Muon | LayerWise]:
    net = Net(dtype=dtype)
    if kind in ("rows", "hsdp"):
        mesh = init_device_mesh("cpu", (world,) if kind == "rows" else (2, world // 2))
        placements = [Shard(0)] if kind == "rows" else [Replicate(), Shard(0)]
        for name in PARAMETERS:
            placed = distribute_tensor(net.get_parameter(name).detach(), mesh, placements, src_data_rank=None)
            net.register_parameter(name, nn.Parameter(placed))
    if kind in ("rows", "hsdp", "process"):
        return net, Muon(few_groups(net))
    return net, LayerWise(net, few_groups(net), layout=kind, bucket_size=700)


def held(tensor: torch.Tensor) -> list[tuple[tuple[slice, ...], torch.Tensor]]:
    """What this rank holds: where it is in the whole tensor, and a view of it."""
    if not hasattr(tensor, "__create_chunk_list__"):
        return [((), tensor.detach())]
    return [
        (
            tuple(slice(lo, lo + n) for lo, n in zip(c.offsets, c.sizes, strict=True)),
            tensor.__get_tensor_shard__(MetadataIndex("", c.offsets)).detach(),
        )
        for c in tensor.__create_chunk_list__()
    ]


def truth(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Values of this key's own; a counter is a count."""
    generator = torch.Generator().manual_seed(sum(map(ord, key)))
    if tensor.ndim == 0:
        return torch.tensor(17.0)
    return torch.randn(tuple(tensor.shape), generator=generator).to(tensor.dtype)


def tensors(net: Net, opt: Muon | LayerWise) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": p for name, p in net.named_parameters()}
    for name, p in net.named_parameters():
        found |= {f"{name}.{slot}": value for slot, value in opt.state[p].items()}
    return found


def fill(net: Net, opt: Muon | LayerWise) -> None:
    with torch.no_grad():
        for key, tensor in tensors(net, opt).items():
            for box, part in held(tensor):
                part.copy_(truth(key, tensor)[box])


def wrong(net: Net, opt: Muon | LayerWise) -> list[str]:
    return [
        key
        for key, tensor in tensors(net, opt).items()
        if not all(torch.equal(part, truth(key, tensor)[box]) for box, part in held(tensor))
    ]


def saved(rank: int, world: int, path: str, kind: str, dtype: torch.dtype = torch.float32) -> None:
    net, opt = built(kind, world, dtype)
    fill(net, opt)
    model, optimizer = get_state_dict(net, opt)
    provenance = opt.provenance() if isinstance(opt, LayerWise) else {}
    muonckpt.save({"model": model, "optimizer": optimizer}, path, provenance=provenance)


def snapshot(rank: int, world: int, folder: str) -> list[str]:
    """Save a deep copy after the state has changed; then pickle the state, and have torch gather it."""
    net, opt = built("balanced", world)
    fill(net, opt)
    state = get_state_dict(net, opt)[1]
    muonckpt.save(state, f"{folder}/then")
    copied = deepcopy(state)
    for slots in opt.state.values():
        local_of(slots["momentum_buffer"] if "momentum_buffer" in slots else slots["exp_avg"]).zero_()
    muonckpt.save(copied, f"{folder}/copied")
    with pytest.raises(pickle.PicklingError) as refused:
        torch.save(opt.state_dict(), f"{folder}/{rank}.pt")
    with pytest.raises(LayoutError, match=r"which torch cannot gather .* save it on all ranks"):
        get_state_dict(net, opt, options=StateDictOptions(full_state_dict=True))
    return [str(refused.value)]


def test_a_deep_copy_is_what_state_was_and_neither_pickle_nor_torch_can_gather_it(tmp_path):
    for [refused] in run(2, snapshot, str(tmp_path)):
        assert "save it on all ranks, by muonckpt.save" in refused
    assert fingerprints(tmp_path / "then") == fingerprints(tmp_path / "copied")


def fingerprints(path: Path) -> dict[str, str]:
    manifest = json.loads((path / "muonckpt.json").read_text())
    return {tensor["key"]: tensor["fingerprint"] for tensor in manifest["tensors"]}


def loaded(rank: int, world: int, kind: str, paths: list[str], again: str) -> list[list[str]]:
    """Keys that differ after each load; and one more checkpoint of what is there in the end."""
    net, opt = built(kind, world)
    model, optimizer = get_state_dict(net, opt)
    state = {"model": model, "optimizer": optimizer}
    found = []
    for path in paths:
        with torch.no_grad():
            for tensor in tensors(net, opt).values():
                for _, part in held(tensor):
                    part.fill_(torch.nan)
        muonckpt.load(state, path)  # into the live tensors
        found.append(wrong(net, opt))
    set_state_dict(net, opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found.append(wrong(net, opt))
    muonckpt.save(state, again)
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[tuple[str, int], Path]:
    folder = tmp_path_factory.mktemp("layer-wise")
    paths = {(kind, world): folder / f"{kind}{world}" for kind, world in RUNS}
    for (kind, world), path in paths.items():
        run(world, saved, str(path), kind)
    return paths


@pytest.mark.parametrize(("kind", "world"), sweep(RUNS, ("hsdp", 4), ("process", 1)))
def test_every_run_loads_the_checkpoints_of_all(kind, world, checkpoints, tmp_path):
    """The table of pairs: each of its rows is a test."""
    found = run(world, loaded, kind, list(map(str, checkpoints.values())), str(tmp_path / "again"))
    assert found == [[[]] * (len(checkpoints) + 1)] * world
    assert fingerprints(tmp_path / "again") == fingerprints(checkpoints["process", 1])


@pytest.mark.parametrize("run_", OWNERS, ids=str)
def test_a_manifest_says_who_owns_what_and_has_the_fingerprints_of_all(run_, checkpoints):
    assert fingerprints(checkpoints[run_]) == fingerprints(checkpoints["rows", 3])
    manifest = manifest_at(checkpoints[run_] / "muonckpt.json")
    recorded = manifest["provenance"]["layer_wise"]
    buffers = [from_json(buffer) for buffer in recorded["buffers"]]
    owners = {name: owner for buffer in buffers for name, owner in buffer.owners.items()}
    assert recorded["layout"] == run_[0] and all(buffer.version == 1 for buffer in buffers)
    chunks = {tensor["key"]: tensor["chunks"] for tensor in manifest["tensors"]}
    for name, (_, options) in PARAMETERS.items():
        if options.get("algorithm", "muon") in ("muon", "normuon"):
            files = {chunk["file"] for chunk in chunks[f"optimizer.state.{name}.momentum_buffer"]}
            assert files == {f"__{owners[name]}_0.distcp"}
    # Byte ranges that begin and end in the middle of a row are boxes of whole rows and of parts of rows.
    if run_ == ("padded-nscost", 3):
        boxes = chunks["optimizer.state.embedding.exp_avg"]
        assert len(boxes) > 3 and any(box["hi"][1] - box["lo"][1] < 15 for box in boxes)


# --- 16-bit parameters --------------------------------------------------------------------------------------------


def summed(rank: int, world: int, kind: str, path: str, steps: range) -> dict[str, torch.Tensor]:
    """Parameters after these steps, each with the gradients of 4 ranks; loaded before if not the first, else saved."""
    net = Net(dtype=torch.bfloat16)
    opt = LayerWise(net, groups(net), layout=kind, bucket_size=700, average=False)
    if steps.start:
        model, optimizer = get_state_dict(net, opt)
        state = {"model": model, "optimizer": optimizer}
        muonckpt.load(state, path)
        set_state_dict(net, opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for step in steps:
        first, *more = (gradients(net, step, each) for each in range(rank, 4, world))
        with opt.no_sync():
            for given in more:
                net(given).backward()
        net(first).backward()
        opt.step()
    if not steps.start:
        model, optimizer = get_state_dict(net, opt)
        muonckpt.save({"model": model, "optimizer": optimizer}, path, provenance=opt.provenance())
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize(
    ("before", "after"),
    [(("padded-nscost", 3), ("decoupled-total-order", 2)), (("legacy-pingpong", 4), ("balanced", 1))],
)
def test_a_run_goes_on_elsewhere_with_its_masters_as_if_it_had_not_stopped(before, after, tmp_path):
    run(before[1], summed, before[0], str(tmp_path / "middle"), range(2))
    expected = alone(4, 4, torch.bfloat16)
    for found in run(after[1], summed, after[0], str(tmp_path / "middle"), range(2, 4)):
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


def exchanged_with_fsdp(rank: int, world: int, path: str) -> list[list[str]]:
    """Masters and momentum go to a run on rows whose own parameters are float32, and come back."""
    net, opt = built("decoupled-total-order", world, torch.bfloat16)
    fill(net, opt)
    _, optimizer = get_state_dict(net, opt)
    muonckpt.save({"model": _masters(optimizer), "optimizer": _without_masters(optimizer)}, f"{path}/there")
    rows, muon = built("rows", world)
    model, optimizer = get_state_dict(rows, muon)
    state = {"model": model, "optimizer": optimizer}
    muonckpt.load(state, f"{path}/there")
    expected = {key: truth(key.replace("model.", "") + ".fp32_param", t) for key, t in tensors(rows, muon).items()}
    expected |= {key: truth(key, t) for key, t in tensors(rows, muon).items() if not key.startswith("model.")}
    there = [
        key
        for key, tensor in tensors(rows, muon).items()
        if not all(torch.equal(part, expected[key][box]) for box, part in held(tensor))
    ]
    muonckpt.save(state, f"{path}/back")
    back, other = built("padded-nscost", world, torch.bfloat16)
    _, optimizer = get_state_dict(back, other)
    muonckpt.load({"model": _masters(optimizer), "optimizer": _without_masters(optimizer)}, f"{path}/back")
    set_optimizer_state_dict(back, other, optimizer)
    rounded = {name: truth(f"{name}.fp32_param", p.float()).bfloat16() for name, p in back.named_parameters()}
    unlike = [name for name, p in back.named_parameters() if not torch.equal(p, rounded[name])]
    return [there, [key for key in wrong(back, other) if not key.startswith("model.")], unlike]


def _masters(optimizer: dict) -> dict[str, torch.Tensor]:
    return {name: slots["fp32_param"] for name, slots in optimizer["state"].items()}


def _without_masters(optimizer: dict) -> dict:
    state = {
        name: {slot: value for slot, value in slots.items() if slot != "fp32_param"}
        for name, slots in optimizer["state"].items()
    }
    return {**optimizer, "state": state}


def test_masters_are_the_parameters_of_a_run_on_fsdp(tmp_path):
    assert run(3, exchanged_with_fsdp, str(tmp_path)) == [[[], [], []]] * 3


# --- stock DCP, and what is refused --------------------------------------------------------------------------------


def through_stock(rank: int, world: int, path: str) -> list[str]:
    net, opt = built("balanced", world)
    fill(net, opt)
    model, optimizer = get_state_dict(net, opt)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    net, opt = built("padded-nscost", world)
    model, optimizer = get_state_dict(net, opt)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    set_state_dict(net, opt, model_state_dict=model, optim_state_dict=optimizer)
    return wrong(net, opt)


def test_stock_dcp_saves_and_loads_it_too(tmp_path):
    assert run(3, through_stock, str(tmp_path / "stock")) == [[]] * 3


def refused(rank: int, world: int) -> tuple[list[str], list[str]]:
    """State of another layout is not taken for one's own, though mesh and placements are the same; nor are DTensors for
    plain parameters."""
    net, opt = built("padded-nscost", world)
    fill(net, opt)
    other = built("legacy-pingpong", world)[1].state_dict()
    given = opt.state_dict()
    qkv = given["param_groups"][1]["params"][0]
    without = {**given, "state": {**given["state"], qkv: {}}}
    inert = {**given, "param_groups": [{**group, "convention": "sum"} for group in given["param_groups"]]}
    messages = []
    for state in (other, without, inert):
        try:
            opt.load_state_dict(state)
        except ValueError as error:
            messages.append(str(error))
    rows = built("rows", world)[0]
    for action in (lambda: pickle.dumps(opt), lambda: LayerWise(rows, few_groups(rows))):
        try:
            action()
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    return messages, wrong(net, opt)


def test_state_that_does_not_fit_is_refused_and_changes_nothing():
    for (elsewhere, without, convention, pickled, sharded), changed in run(2, refused):
        assert "exp_avg is cut otherwise; load it through a checkpoint" in elsewhere
        assert "new, without state in the checkpoint" in without and "expected ema" in convention
        assert "bound to its model" in pickled and not changed
        assert "'embedding'" in sharded and "a DTensor; layer-wise buffers hold plain tensors" in sharded


# --- experts that ranks call by one name ---------------------------------------------------------------------------


def experts(rank: int, world: int, path: str, renamed: bool) -> str:
    """Ranks 0 and 2 share experts, 1 and 3 others; with names of their own in the state dict, or with equal ones."""
    shared = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    net = Net()
    mine = {"experts": [net.up, net.down], "expert_group": shared}
    opt = LayerWise(net, groups(net), layout="decoupled-total-order", average=False, bucket_size=700, **mine)
    for step in range(2):
        net(gradients(net, step, rank)).backward()
        opt.step()
    model, optimizer = get_state_dict(net, opt, options=StateDictOptions(flatten_optimizer_state_dict=True))
    if renamed:
        model, optimizer = ({_own(key, rank % 2): value for key, value in each.items()} for each in (model, optimizer))
    try:
        muonckpt.save({"model": model, "optimizer": optimizer}, path, provenance=opt.provenance())
    except LayoutError as error:
        return str(error)
    return ""


def _own(key: str, pair: int) -> str:
    """A key of a state dict with the expert's name made one of the ranks that share it: ``state.up.step``."""
    return ".".join(f"{pair}-{part}" if part in ("up", "down") else part for part in key.split("."))


def test_different_experts_of_one_name_are_refused_and_with_names_of_their_own_saved(tmp_path):
    for message in run(4, experts, str(tmp_path / "one"), False):
        assert "hold different data under one key" in message and "needs its own key" in message
    assert not (tmp_path / "one").exists()
    assert run(4, experts, str(tmp_path / "own"), True) == [""] * 4
    expected = {f"optimizer.state.{key}": value for key, value in of_dense(alone(4, 2)).items() if "." in key}
    for pair in (0, 1):
        expected |= {_own(f"optimizer.state.{key}", pair): value for key, value in of_pair(pair).items() if "." in key}
    muonckpt.save(expected, tmp_path / "alone")
    found = fingerprints(tmp_path / "own")
    assert fingerprints(tmp_path / "alone").items() <= found.items() and len(found) == len(expected) + 9 + 2


def test_what_starts_fresh_has_the_weight_as_its_master():
    net, opt = built("padded-nscost", 1, torch.bfloat16)
    net(gradients(net, 0, 0)).backward()
    opt.step()
    names = {p: name for name, p in net.named_parameters()}
    saved = opt.state_dict()
    for group, own in zip(saved["param_groups"], opt.param_groups, strict=True):
        group["params"] = [names[p] for p in own["params"]]
    before = {name: {k: v.clone() for k, v in opt.state[p].items()} for p, name in names.items()}
    saved["state"] = {name: before[name] for name in names.values()}
    param = net.up
    with torch.no_grad():
        param.fill_(3.0)
    assert opt.load_state_dict(saved, fresh=["up"]).fresh == ("up",)
    state = opt.state[param]
    assert not state["momentum_buffer"].any() and (state["fp32_param"] == 3).all() and (param == 3).all()
    assert torch.equal(opt.state[net.down]["fp32_param"], before["down"]["fp32_param"])
