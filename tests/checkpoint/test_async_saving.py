"""muonckpt.async_save: the state at the call is what is saved, errors are not lost, and training pays for a copy."""

from __future__ import annotations

import ctypes
import resource
import shutil
import subprocess
import sys
import threading
import warnings
from collections import OrderedDict
from concurrent import futures
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.every_kind import assert_same_bits, whole
from support.fsdp_model import build, steps
from support.workers import run
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

import muonckpt
from muonckpt import DestinationError, LayoutError
from muonckpt.algebra.box import Box
from muonckpt.optimizer.state import declare_boxes


class Slow:
    """Blobs whose pickling waits for so many seconds, or until it may go on, so that a save is still running."""

    def __init__(self, seconds: float = 60.0) -> None:
        self.seconds, self.may_go_on = seconds, threading.Event()

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        self.may_go_on.wait(self.seconds)
        return (OrderedDict, ())


def state(value: float) -> dict:
    return {"w": torch.full((300, 7), value), "half": torch.full((5,), value).bfloat16()[1:4], "step": int(value)}


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    slow = Slow()
    live = {**state(1.0), "slow": slow}
    kept = torch.arange(20.0)
    live["views"] = [kept[3:9], kept.view(4, 5).mT]
    saving = muonckpt.async_save(live, tmp_path / "one", provenance={"step": 1})
    assert not saving.done()
    with pytest.raises(TimeoutError):
        saving.result(timeout=0.01)
    live["w"].fill_(-1)
    kept.zero_()
    live["step"] = 9
    slow.may_go_on.set()
    saving.result()
    assert saving.done() and saving.progress.written == saving.progress.total > 300 * 7 * 4
    with muonckpt.open(tmp_path / "one") as opened:
        assert (opened.tensors["w"].numpy() == 1).all() and (opened.tensors["half"].numpy() == 1).all()
        assert opened.tensors["views.0"].numpy().tolist() == [3, 4, 5, 6, 7, 8]
        assert opened.tensors["views.1"].numpy().tolist() == torch.arange(20.0).view(4, 5).mT.tolist()
        assert opened.items["step"] == 1
    assert not muonckpt.verify(tmp_path / "one").findings


def test_a_relative_path_is_that_of_the_call(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    muonckpt.async_save({"slow": Slow(0.3)}, "before")
    saving = muonckpt.async_save({"slow": Slow(0.3)}, "one")
    monkeypatch.chdir(tmp_path / "other")
    saving.result()
    assert Path(saving.path) == tmp_path / "one" and muonckpt.verify(tmp_path / "one").verdict == "whole"
    assert not [*(tmp_path / "other").iterdir()]


def test_tensors_that_are_not_what_their_memory_holds(tmp_path):
    """Lazy ones, one with something that cannot be copied hanging on it, and one that has grown since the last save."""
    complex_ = torch.tensor([1 + 2j, 3 - 4j])
    hung = torch.nn.Parameter(torch.ones(2))
    hung.lock = threading.Lock()
    live = {"conj": complex_.conj(), "neg": complex_.conj().imag, "hung": hung, "grown": torch.ones(3)}
    live["gathered"] = AsyncCollectiveTensor(torch.full((4,), 7.0))
    muonckpt.async_save(live, tmp_path / "one").result()
    with torch.no_grad():
        live["grown"].resize_(5).fill_(2)
    muonckpt.async_save(live, tmp_path / "two").result()
    muonckpt.save({key: value.detach().clone() for key, value in live.items()}, tmp_path / "now")
    with muonckpt.open(tmp_path / "two") as opened, muonckpt.open(tmp_path / "now") as now:
        for key in live:
            assert (opened.tensors[key].numpy() == now.tensors[key].numpy()).all(), key


def boxes_of_a_subgroup(rank: int, world: int, folder: str) -> list[float] | None:
    """Saves state of which only hooks say where it lies, on ranks that know of different numbers of groups."""
    pair, _ = dist.new_group([0, 1]), dist.new_group([1, 2])
    if rank == 2:
        return None
    mesh = DeviceMesh.from_group(pair, "cpu")
    local = torch.full((12 * rank,), 5.0)  # rank 1 has all of it
    live = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((4, 3)), stride=(3, 1))
    declare_boxes(live, [Box((0, 0), (1, 3)), Box((1, 0), (4, 3))][: 2 * rank])
    saving = muonckpt.async_save({"w": live, "slow": Slow(0.2)}, f"{folder}/pair", process_group=pair)
    local.zero_()
    saving.result()
    return muonckpt.open(f"{folder}/pair").tensors["w"].numpy().flatten().tolist()


def test_a_subgroup_saves_what_hooks_said_at_the_call(tmp_path):
    assert run(3, boxes_of_a_subgroup, str(tmp_path)) == [[5.0] * 12, [5.0] * 12, None]


def saves_amid_groups(rank: int, world: int, folder: str) -> list[str]:
    """Saves of all ranks, and of two of them, which have made groups that their members alone make, and ended some."""
    own = [dist.new_group([0, 1], use_local_synchronization=True) for _ in range(rank < 2 and 3)]
    for group in own[:1]:
        dist.destroy_process_group(group)
    for group in own[2:]:
        muonckpt.async_save({"w": torch.ones(2)}, f"{folder}/pair", process_group=group).result()
    muonckpt.async_save({"w": torch.ones(3)}, f"{folder}/all").result()
    return [path.name for path in sorted(Path(folder).iterdir())]


def test_saving_does_not_depend_on_the_groups_that_ranks_have_made_and_ended(tmp_path):
    assert run(3, saves_amid_groups, str(tmp_path)) == [["all", "pair"]] * 3


def leaves(template) -> list[torch.Tensor]:
    return [whole(leaf).clone() for leaf in tree_leaves(template) if isinstance(leaf, torch.Tensor)]


def trained(rank: int, world: int, folder: str) -> None:
    """Saves each state twice: at once, and while training goes on."""
    model, opt = build()

    def live() -> dict:
        weights, momenta = get_state_dict(model, opt)
        return {"model": weights, "optimizer": momenta}

    for number in range(3):
        steps(model, opt, number, number + 1)
        muonckpt.save(live(), f"{folder}/now-{number}")
        saving = muonckpt.async_save(live(), f"{folder}/along-{number}")
        steps(model, opt, number + 7, number + 8)
    saving.result()
    for number in range(3):
        both = []
        for kind in ("now", "along"):
            template = live()
            muonckpt.load(template, f"{folder}/{kind}-{number}")
            both.append(leaves(template))
            steps(model, opt, 20, 21)  # what is loaded next is not there yet
        assert_same_bits(*both)


def test_training_goes_on_and_buffers_are_used_again(tmp_path):
    run(2, trained, str(tmp_path))


def replicas(rank: int, world: int, folder: str) -> list[str]:
    """One rank's replica differs, or its state cannot be made: all hear of it, and the one before is whole."""
    mesh = init_device_mesh("cpu", (2,))

    def tensors(value: float):
        return {"w": distribute_tensor(torch.full((4, 4), value), mesh, [Replicate()], src_data_rank=None)}

    muonckpt.async_save(tensors(1.0), f"{folder}/good").result()
    drifted = tensors(2.0)
    drifted["w"].to_local()[0, 0] += rank
    said = []
    saving = muonckpt.async_save(drifted, f"{folder}/drifted")
    try:
        saving.result()
    except LayoutError as error:
        said.append(str(error))

    class Untravelled(Exception):
        def __init__(self, text, more):
            super().__init__(text)

    class Broken:
        def state_dict(self):
            if dist.get_rank() == 1:
                raise Untravelled("no such luck", 2)
            return {}

        def load_state_dict(self, state):
            raise AssertionError

    muonckpt.async_save({**tensors(3.0), "other": Broken()}, f"{folder}/broken")  # nobody asks
    try:
        muonckpt.async_save(tensors(4.0), f"{folder}/next")
    except DestinationError as error:
        said.append(str(error))
    muonckpt.async_save({**tensors(3.0), "other": Broken()}, f"{folder}/again", on_error="warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        slow = Slow()
        saving = muonckpt.async_save({**tensors(5.0), "slow": slow}, f"{folder}/last")
    said += [str(each.message) for each in caught if each.category is RuntimeWarning]
    try:
        muonckpt.async_save(tensors(6.0), f"{folder}/refused", when_busy="refuse")
    except DestinationError as error:
        said.append(str(error).replace(folder, ""))
    slow.may_go_on.set()
    saving.result()
    failed = muonckpt.async_save(drifted, f"{folder}/asked")
    if rank == 0:
        with pytest.raises(LayoutError):
            failed.result()
    muonckpt.async_save(tensors(7.0), f"{folder}/after").result()  # one rank has asked: none raises
    return said


def test_an_error_of_one_rank_is_raised_on_all_and_training_can_go_on(tmp_path):
    first, second = run(2, replicas, str(tmp_path))
    assert first == second
    drifted, raised, warned, refused = first
    assert "ranks 0 and 1 hold different data" in drifted
    assert "no such luck" in raised and "rank 1" in raised
    assert "no such luck" in warned and "again" in warned
    assert refused == "/last is still being saved: /refused is not"
    assert {path.name for path in tmp_path.iterdir()} == {"good", "last", "after"}
    assert all(not muonckpt.verify(tmp_path / name).findings for name in ("good", "last"))


UNASKED = """
import collections, os, sys, time, torch, muonckpt
class Slow:
    def __reduce__(self):
        time.sleep(0.5)
        return (collections.OrderedDict, ())
    def __deepcopy__(self, memo):
        return self
muonckpt.async_save({"slow": Slow()}, sys.argv[1] + "-slow")
if os.fork() == 0:
    sys.exit()  # waits for no thread of its parent
os.wait()
muonckpt.async_save({"w": torch.ones(3)}, sys.argv[1])
muonckpt.async_save({"w": torch.ones(3)}, sys.argv[1])
"""


def test_the_end_of_a_program_waits_and_prints_what_nobody_asked_for(tmp_path):
    # From 3.12 on Python warns of a fork beside threads.
    command = [sys.executable, "-W", "ignore:This process", "-c", UNASKED, str(tmp_path / "one")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 120 and done.stderr.count("\n") == 1 and "exists already" in done.stderr
    assert not muonckpt.verify(tmp_path / "one").findings


def test_an_error_outlives_its_process_group(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        muonckpt.async_save(state(1.0), tmp_path / "one").result()
        futures.wait([muonckpt.async_save(state(2.0), tmp_path / "one").future])  # which is not to ask
    finally:
        dist.destroy_process_group()
    with pytest.warns(RuntimeWarning, match="one failed: .*exists already"):
        muonckpt.async_save(state(3.0), tmp_path / "two").result()


def test_host_memory_does_not_grow_with_the_number_of_saves(tmp_path):
    def resident() -> int:
        ctypes.CDLL(None).malloc_trim(0)  # what is free in the arena of some thread is not held by anybody
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    for number in range(24):
        live = {"kept": KEPT, "made anew": torch.full((1 << 18,), float(number))}
        muonckpt.async_save(live, tmp_path / str(number)).result()
        shutil.rmtree(tmp_path / str(number))
        if number == 3:
            before = resident()
    assert resident() < before + (8 << 20)  # 20 more copies are 40 MiB


KEPT = torch.ones(1 << 18)


def test_refusals(tmp_path):
    for wrong in ({"on_error": "ignore"}, {"when_busy": "never"}):
        with pytest.raises(ValueError, match="'raise' or 'warn'"):
            muonckpt.async_save(state(1.0), tmp_path / "one", **wrong)
    with pytest.raises(TypeError):
        muonckpt.async_save(state(1.0), tmp_path / "one", provenance={"step": object()}).result()
    assert not any(tmp_path.iterdir())
