"""Saving to and loading from whatever a command takes: URLs and other formats; and what each rank of a load opens."""

from __future__ import annotations

import os
import pickle
import uuid
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save_file
from support import store_server
from support.commands import run as command
from support.workers import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonckpt
from muonckpt import DestinationError, SourceError
from muonckpt.store.io.location import Remote, location

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

VALUES = {"w": torch.arange(84.0).reshape(14, 6), "cube": torch.arange(30.0).reshape(5, 3, 2), "b": torch.ones(5)}


def sharded(world: int, placement, factor: float) -> dict:
    mesh = init_device_mesh("cpu", (world,))
    placed = {key: distribute_tensor(factor * value, mesh, [placement]) for key, value in VALUES.items()}
    return {"model": placed, "optimizer": {"lr": 0.25 * factor}}


def equal(state: dict) -> bool:
    return all(torch.equal(state["model"][key].full_tensor(), value) for key, value in VALUES.items())


@pytest.fixture
def memory() -> Remote:
    return location(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def server(object_store) -> str:
    _, address = object_store
    return address


def names(place: Remote) -> set[str]:
    return {name.removeprefix(f"{place.path}/") for name in place.fs.find(place.path)}


# --- object stores ----------------------------------------------------------------------------------------------------


def saving(rank, world, address, url):
    os.environ |= store_server.environment(address)
    muonckpt.save(sharded(world, Shard(0), 1.0), url, provenance={"step": 4})


def loading(rank, world, address, url, dim):
    os.environ |= store_server.environment(address)
    state = sharded(world, Shard(dim) if dim is not None else Replicate(), 0.0)
    muonckpt.load(state, url)
    return equal(state) and state["optimizer"]["lr"] == 0.25


def test_ranks_save_to_a_store_and_others_load_from_it(server, tmp_path):
    url = f"s3://{store_server.BUCKET}/{uuid.uuid4().hex}/step4"
    run(2, saving, server, url)
    assert names(location(url)) == {"__0_0.distcp", "__1_0.distcp", "muonckpt.json", ".metadata"}
    report = muonckpt.verify(url)
    assert not report.findings and not report.notes and muonckpt.open(url).provenance["step"] == 4
    assert all(run(3, loading, server, url, 0) + run(2, loading, server, url, None))
    run(2, saving, server, str(tmp_path / "local"))
    prints = [{key: t.fingerprint for key, t in muonckpt.open(p).tensors.items()} for p in (url, tmp_path / "local")]
    assert prints[0] == prints[1]


def differing(rank, world, address, url):
    os.environ |= store_server.environment(address)
    try:
        muonckpt.save({"w": torch.full((3,), float(rank)), "v": torch.ones(2)}, url)
    except muonckpt.LayoutError as error:
        return str(error)


def test_a_save_that_fails_on_a_rank_leaves_nothing_in_the_store(server):
    url = f"s3://{store_server.BUCKET}/{uuid.uuid4().hex}"
    assert all("hold different data" in text for text in run(2, differing, server, url))
    assert names(location(url)) == set()


def test_a_series_in_a_store(server):
    """On a real server, whose clock and listings are its own; the rest is in test_series."""
    series = muonckpt.Series(f"s3://{store_server.BUCKET}/{uuid.uuid4().hex}/run", keep_last=2, keep_every=2)
    place, template = location(series.save(1, VALUES)).parent, {key: torch.zeros_like(v) for key, v in VALUES.items()}
    (place / "step-00000001/.muonckpt.removing").write(b"")
    for name in ("__0_0.distcp", ".muonckpt.saving"):
        (place / f"step-00000003/{name}").write(b"of a save that was killed")
    assert series.latest() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for step in (2, 3, 4):
            series.save(step, VALUES)
    assert {entry.name for entry in place.iterdir()} == {
        "step-00000002",
        "step-00000003.2",
        "step-00000004",
        "step-00000003",
    }
    assert series.restore(template).step == 4 and all(
        torch.equal(template[key], value) for key, value in VALUES.items()
    )


def test_what_describes_a_save_comes_last_and_what_fails_before_it_is_gone(memory, monkeypatch):
    put, seen = MemoryFileSystem.pipe_file, []

    def full(fs, path, value, *rest, **options):
        seen.append((Path(path).name, names(memory / "run")))
        if path.endswith(".metadata"):
            raise OSError("the store is full")
        return put(fs, path, value, *rest, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", full)
    with pytest.raises(DestinationError, match="the store is full"):
        muonckpt.save(VALUES, str(memory / "run"))
    assert seen[-2] == ("muonckpt.json", {"__0_0.distcp", seen[0][0]}) and names(memory) == set()
    monkeypatch.undo()
    muonckpt.save(VALUES, str(memory / "run"))
    state = {key: torch.zeros_like(value) for key, value in VALUES.items()}
    muonckpt.load(state, str(memory / "run"))
    assert all(torch.equal(state[key], value) for key, value in VALUES.items())


def unseen(monkeypatch, name: str) -> None:
    """Whoever asks whether there is anything of this name hears that there is not: another process was quicker."""
    info = MemoryFileSystem.info

    def hidden(fs, path, **options):
        if path.endswith(f"/{name}"):
            raise FileNotFoundError(path)
        return info(fs, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "info", hidden)


def test_a_place_that_is_taken_is_refused_and_left_as_it_is(memory, monkeypatch):
    muonckpt.save(VALUES, str(memory / "run"))
    before = {name: memory.fs.cat_file(f"{memory.path}/{name}") for name in names(memory)}
    with pytest.raises(DestinationError, match="exists already"):
        muonckpt.save(VALUES, str(memory / "run"))
    unseen(monkeypatch, "run")  # and has been published when this save claims the place
    with pytest.raises(DestinationError, match="another save"):
        muonckpt.save(VALUES, str(memory / "run"))
    assert {name: memory.fs.cat_file(f"{memory.path}/{name}") for name in names(memory)} == before


def test_of_two_saves_that_see_nothing_one_goes_on(memory, monkeypatch):
    place, put, others = str(memory / "run"), MemoryFileSystem.pipe_file, []

    def second(fs, path, value, *rest, **options):
        put(fs, path, value, *rest, **options)
        if not others:
            others.append("asked")
            with pytest.raises(DestinationError, match="another save"):
                muonckpt.save({"x": torch.ones(3)}, place)

    unseen(monkeypatch, "run")
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", second)
    muonckpt.save(VALUES, place)
    monkeypatch.undo()
    assert others and muonckpt.open(place).tensors.keys() == VALUES.keys() and not muonckpt.verify(place).findings


# --- other formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["safetensors", "zarr", "buffers", "torch_dist"])
def test_any_format_is_loaded_whose_keys_are_those_of_the_template(form, tmp_path):
    muonckpt.save(VALUES, tmp_path / "own")
    assert command(["convert", str(tmp_path / "own"), str(tmp_path / "out"), "--format", form]) == 0
    state = {key: torch.zeros_like(value) for key, value in VALUES.items()}
    muonckpt.load(state, tmp_path / "out", allow_extra=form == "torch_dist")  # which has an item for Megatron
    assert all(torch.equal(state[key], value) for key, value in VALUES.items())
    if form != "zarr":
        sent = pickle.loads(pickle.dumps(muonckpt.open(tmp_path / "out")))
        assert all((sent.tensors[key].numpy() == value.numpy()).all() for key, value in VALUES.items())


# --- what a rank opens ------------------------------------------------------------------------------------------------


def stock_save(rank, world, path):
    dcp.save(sharded(world, Shard(0), 1.0), checkpoint_id=path)


def opened(rank, world, path, *parts):
    """The reads of each file by this rank while it loads these parts of the state."""
    reads: Counter = Counter()
    pread = os.pread

    def counting(handle: int, length: int, offset: int) -> bytes:
        reads[Path(f"/proc/self/fd/{handle}").readlink().name] += 1
        return pread(handle, length, offset)

    os.pread = counting
    try:
        state = sharded(world, Shard(0), 0.0)
        state = {part: state[part] for part in parts}
        muonckpt.load(state, path)
    finally:
        os.pread = pread
    assert equal(state)
    return reads


def test_one_rank_reads_the_metadata_for_all_and_each_opens_the_items_that_it_loads(tmp_path):
    run(2, stock_save, str(tmp_path / "stock"))
    first, second = run(2, opened, str(tmp_path / "stock"), "model", "optimizer")
    assert first.pop(".metadata") == 1 and set(first) == {"__0_0.distcp"} and set(second) == {"__1_0.distcp"}
    run(2, saving, "", str(tmp_path / "own"))
    assert run(2, opened, str(tmp_path / "own"), "model", "optimizer") == [{"muonckpt.json": 1}, {}]
    # What reads zarr cannot be sent to another rank.
    assert command(["convert", str(tmp_path / "own"), str(tmp_path / "zarr"), "--format", "zarr"]) == 0
    first, second = run(2, opened, str(tmp_path / "zarr"), "model")
    assert first["zarr.json"] and first["zarr.json"] == second["zarr.json"]


def refused(rank, world, path):
    state = sharded(world, Shard(0), 0.0)
    try:
        muonckpt.load(state, path)
    except SourceError as error:
        return str(error), not any(value.to_local().any() for value in state["model"].values())


def test_an_item_that_one_rank_finds_damaged_is_refused_before_any_rank_has_changed_a_tensor(tmp_path):
    run(2, stock_save, str(tmp_path / "c"))
    chunk = next(c for c in muonckpt.open(tmp_path / "c").tensors["model.w"].record.chunks if c.box.lo == (7, 0))
    with (tmp_path / "c" / chunk.item.file).open("r+b") as file:
        file.seek(chunk.item.offset + 70)
        file.write(b"?")
    for message, untouched in run(2, refused, str(tmp_path / "c")):
        assert untouched and "tensor 'model.w' box [7:14, 0:6]" in message and chunk.item.file in message


def in_sight_of_its_own(rank, world, folder):
    """What loading a file of the same name in a folder of each rank's own gives."""
    before = Path.cwd()
    os.chdir(f"{folder}/{rank}")
    try:
        state = {key: torch.zeros_like(value) for key, value in VALUES.items()}
        muonckpt.load(state, "c.safetensors")
    except SourceError as error:
        return str(error)
    finally:
        os.chdir(before)
    return state


def test_a_rank_that_sees_another_file_without_checksums_reads_it_by_its_own_header_or_all_refuse(tmp_path):
    for rank, note in enumerate(({}, {"written": "by another program, after a longer header"})):
        (tmp_path / str(rank)).mkdir()
        save_file(VALUES, tmp_path / str(rank) / "c.safetensors", metadata=note)
    states = run(2, in_sight_of_its_own, str(tmp_path))
    assert all(torch.equal(state[key], value) for state in states for key, value in VALUES.items())
    (tmp_path / "1" / "c.safetensors").unlink()
    first, second = run(2, in_sight_of_its_own, str(tmp_path))
    assert first == second and "rank 1 does not see c.safetensors" in first and "UNUSABLE" not in first
