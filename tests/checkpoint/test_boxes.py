"""Tensors of which a rank holds several boxes, one or none: saved, loaded and attested as any other."""

from __future__ import annotations

import copy
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.every_kind import local_of
from support.placed import numbered, placed, strided
from support.workers import run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import muonckpt
from muonckpt import BoxedTensor, LayoutError
from muonckpt.algebra.box import Box
from muonckpt.layouts.boxed_tensor import parts_of
from muonckpt.layouts.tensors import declares_boxes
from muonckpt.optimizer.state import declare_boxes

S, R = Shard, Replicate()


PLACED = {
    "interleaved rows": ((4,), (strided(0, 3),), (29, 5)),
    "interleaved columns": ((4,), (strided(1, 2),), (3, 17)),
    "a comb": ((4,), (strided(0, 4),), (16,)),
    "rows and columns interleaved": ((2, 2), (strided(0, 3), strided(1, 2)), (13, 11)),
    "interleaved twice": ((2, 2), (strided(0, 5), strided(0, 3)), (37, 3)),
    "FSDP over TP": ((2, 2), (strided(0, 2), S(0)), (11, 3)),
    "replicas inside": ((2, 2), (strided(0, 2), R), (9, 4)),
    "replicas outside": ((2, 2), (R, strided(1, 3)), (5, 14)),
    "experts": ((2, 2), (S(0), strided(2, 2)), (3, 2, 9)),
    "empty on some ranks": ((4,), (strided(0, 2),), (3, 2)),
    "no elements": ((4,), (strided(0, 2),), (0, 2)),
    "rows": ((4,), (S(0),), (7, 2)),
    "all on each": ((4,), (R,), (2, 3)),
}
"""Mesh, placements and shape."""

FLAT = {"cut in rows": (7, 5), "cut in cubes": (3, 4, 5), "cut in a vector": (11,)}


def meshes() -> dict[tuple[int, ...], DeviceMesh]:
    """The meshes of a job, by shape, and one whose ranks are in order."""
    odd = {shape: DeviceMesh("cpu", torch.tensor([2, 0, 3, 1]).view(shape)) for shape in ((4,), (2, 2))}
    return odd | {(): DeviceMesh("cpu", torch.arange(4))}


def state(rank: int, on: dict[tuple[int, ...], DeviceMesh]) -> dict[str, Tensor]:
    """A tensor of every kind, which holds what `numbered` says."""
    made: dict[str, Tensor] = {}
    for name, (mesh_shape, placements, shape) in PLACED.items():
        made[name] = placed(numbered(shape), on[mesh_shape], placements)
    columns = made["interleaved columns"]
    columns._local_tensor = columns._local_tensor.t().contiguous().t()  # of other strides than those of a dense one
    for name, shape in FLAT.items():  # of uneven shares, one of them empty
        cuts = [0, 4, 4, 9, prod(shape)]
        flat = numbered(shape).flatten()[cuts[rank] : cuts[rank + 1]]
        made[name] = BoxedTensor.of_flat(shape, cuts[rank], flat.clone())
    padded = torch.cat([torch.full((2,), -1.0), numbered((4, 3)).flatten()[3 * rank : 3 * rank + 3]])
    made["in a padded buffer"] = BoxedTensor((4, 3), {(rank, 0): padded[2:].view(1, 3)})
    mesh = on[()]
    hooked = DTensor.from_local(numbered((2, 6)).flatten()[: 12 * (rank == 1)].clone(), mesh, [S(0)], run_check=False,
                                shape=torch.Size((2, 6)), stride=(6, 1))  # fmt: skip
    declare_boxes(hooked, [Box((0, 0), (2, 6))] if rank == 1 else [])
    made["by hooks"] = hooked
    rows = [numbered((8, 3))[[rank]].clone(), numbered((8, 3))[[rank + 4]].clone()]
    wrapper = LocalShardsWrapper(rows, [(rank, 0), (rank + 4, 0)])
    made["torch's wrapper"] = DTensor.from_local(wrapper, mesh, [S(0)], run_check=False, shape=torch.Size((8, 3)),
                                                 stride=(3, 1))  # fmt: skip
    made["plain"] = torch.tensor(5.0)
    return made


def all_boxed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """For stock DCP: every DTensor as the boxes that are here, unless it declares them itself."""
    return {
        key: BoxedTensor(tensor.shape, parts_of(tensor), tensor.dtype, tensor.device)
        if isinstance(tensor, DTensor) and not declares_boxes(tensor)
        else tensor
        for key, tensor in state.items()
    }


def memory_of(tensor: Tensor) -> list[Tensor]:
    if isinstance(tensor, BoxedTensor):
        return list(tensor.parts.values())
    local = local_of(tensor) if type(tensor) is Tensor else tensor._local_tensor
    return local.local_shards() if isinstance(local, LocalShardsWrapper) else [local.detach()]


def assert_loaded(rank: int, on: dict[tuple[int, ...], DeviceMesh], load, path: str) -> None:
    """Zeros become what this rank is to hold; what is around them in memory stays as it is."""
    expected, template = state(rank, on), {"t": state(rank, on), "lr": 0.0}
    for tensor in template["t"].values():
        for part in memory_of(tensor):
            part.zero_()
    load(template, path)
    assert template["lr"] == 0.5
    for name, tensor in template["t"].items():
        for mine, other in zip(memory_of(tensor), memory_of(expected[name]), strict=True):
            assert torch.equal(mine, other), name


def saved(rank: int, world: int, folder: str) -> None:
    on = meshes()
    live = {"t": state(rank, on), "lr": 0.5}
    muonckpt.save(live, f"{folder}/now")
    saving = muonckpt.async_save(live, f"{folder}/along")
    for tensor in live["t"].values():
        for part in memory_of(tensor):
            part.fill_(-7)
    saving.result()
    attested = muonckpt.attest({"t": state(rank, on)}, f"{folder}/along")
    assert attested.compared == len(state(rank, on))
    dcp.save({"t": all_boxed(state(rank, on))}, checkpoint_id=f"{folder}/stock")
    for path in ("now", "whole"):
        for load in (muonckpt.load, stock_load):
            assert_loaded(rank, on, load, f"{folder}/{path}")
    strange = state(rank, on)
    strange["rows"] = DTensor.from_local(torch.ones(1, 2), strange["rows"].device_mesh, [S(0)], run_check=False,
                                         shape=torch.Size((7, 2)), stride=(2, 1))  # fmt: skip
    with pytest.raises(LayoutError, match=r"tensor 't.rows': rank . holds a local tensor of shape"):
        muonckpt.save({"t": strange}, f"{folder}/wrong")


def stock_load(template: dict, path: str) -> None:
    """By stock DCP, which knows DTensors by their placements only unless they have hooks."""
    wrapped = {"t": all_boxed(template["t"]), "lr": template["lr"]}
    dcp.load(wrapped, checkpoint_id=path)
    template["lr"] = wrapped["lr"]


def whole_state() -> dict[str, Tensor]:
    shapes = {name: shape for name, (_, _, shape) in PLACED.items()} | FLAT
    shapes |= {"in a padded buffer": (4, 3), "by hooks": (2, 6), "torch's wrapper": (8, 3)}
    return {name: numbered(shape) for name, shape in shapes.items()} | {"plain": torch.tensor(5.0)}


def assert_whole(path: Path) -> None:
    """Stock DCP, in one process, reads whole tensors."""
    blank = {name: torch.zeros_like(value) for name, value in whole_state().items()}
    dcp.load({"t": blank}, checkpoint_id=path, no_dist=True)
    for name, value in blank.items():
        assert torch.equal(value, whole_state()[name]), name


def test_every_kind_is_saved_and_loaded_by_us_and_by_stock_dcp(tmp_path):
    dcp.save({"t": whole_state(), "lr": 0.5}, checkpoint_id=tmp_path / "whole", no_dist=True)
    run(4, saved, str(tmp_path))
    for name in ("now", "along", "stock"):
        assert_whole(tmp_path / name)
        assert not muonckpt.verify(tmp_path / name).findings
    manifests = [muonckpt.open(tmp_path / name).outline for name in ("now", "along")]
    prints = [{tensor.key: tensor.fingerprint for tensor in manifest.tensors} for manifest in manifests]
    alone = muonckpt.fingerprints({"t": whole_state()})
    assert prints[0] == prints[1] == {key: print_.fingerprint for key, print_ in alone.tensors.items()}
    [comb] = [tensor for tensor in manifests[0].tensors if tensor.key == "t.a comb"]
    assert len(comb.chunks) == 16 and comb.layout["placements"] == ["StridedShard(0, split=4)"]


def test_a_boxed_tensor_checks_its_boxes_and_is_copied_by_parts():
    part = torch.ones(2, 3)
    for parts, message in (
        ({(3, 0): part}, r"box \[3:5, 0:3\] reaches outside the tensor of shape \(4, 3\)"),
        ({(0, 0): part, (1, 0): part}, r"boxes \[0:2, 0:3\] and \[1:3, 0:3\] of one rank overlap"),
        ({(0, 0): part, (2, 0): part.double()}, r"box \[2:4, 0:3\] is torch.float64, the tensor is torch.float32"),
    ):
        with pytest.raises(LayoutError, match=message):
            BoxedTensor((4, 3), parts)
    made = BoxedTensor((4, 3), {(2, 0): part})
    copies = [copy.deepcopy(made), made.clone(), made.detach()]
    assert made.parts[2, 0].data_ptr() == part.data_ptr() and not torch.zeros_like(made).parts[2, 0].any()
    part.zero_()
    assert [bool(each.parts[2, 0].any()) for each in copies] == [True, True, False]
    assert repr(made) == "BoxedTensor(torch.float32 of shape (4, 3), here: [2:4, 0:3])"
    with pytest.raises(TypeError, match="compute with its parts"):
        made.relu()


def unheld(rank: int, world: int, folder: str) -> str:
    try:
        muonckpt.save({"w": BoxedTensor((2, 2), {})}, f"{folder}/c")
    except LayoutError as error:
        return str(error)
    return "no error"


def test_a_tensor_that_no_rank_holds_is_not_left_out(tmp_path):
    for message in run(2, unheld, str(tmp_path)):
        assert "tensor 'w': no rank holds any of its elements" in message
