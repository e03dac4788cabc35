"""Publishing: a checkpoint is there or not, and an error says which."""

from __future__ import annotations

import errno
import os
import shutil
import threading

import fsspec
import numpy as np
import pytest
import torch
from support.golden import golden

import muonckpt
from muonckpt import DestinationError
from muonckpt.store.io import publish
from muonckpt.store.io.location import location

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def unsynced(monkeypatch):
    """Makes the sync of folders of this name fail, as a disk that is full or broken does."""

    def fail(name: str) -> None:
        honest = publish.sync_directory

        def sync_directory(path):
            if path.name == name:
                raise OSError(errno.EIO, "Input/output error")
            honest(path)

        monkeypatch.setattr(publish, "sync_directory", sync_directory)

    return fail


WRITE = {
    "save": lambda here: muonckpt.save({"w": torch.arange(4.0), "n": 3}, here / "run" / "new"),
    "reshard": lambda here: muonckpt.reshard(here / "old", here / "run" / "new", mesh={"dp": 2}),
    "convert": lambda here: muonckpt.convert(here / "plain", here / "run" / "new", format="safetensors"),
}


@pytest.mark.parametrize("how", WRITE)
def test_a_checkpoint_whose_folder_cannot_be_synced_is_there_and_the_error_says_so(how, unsynced, tmp_path):
    muonckpt.save({"w": torch.arange(4.0), "n": 3}, tmp_path / "old")
    muonckpt.save({"w": torch.arange(4.0)}, tmp_path / "plain")
    (tmp_path / "run").mkdir()
    unsynced("run")
    with pytest.raises(DestinationError, match=r"run/new is published and whole, but its folder could not be synced"):
        WRITE[how](tmp_path)
    assert not muonckpt.verify(tmp_path / "run" / "new").findings
    with muonckpt.open(tmp_path / "run" / "new") as opened:
        np.testing.assert_array_equal(opened.tensors["w"].numpy(), np.arange(4.0))


def test_a_checkpoint_that_cannot_be_renamed_is_not_there_and_the_error_says_so(tmp_path, monkeypatch):
    def rename(self, target):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(type(tmp_path), "rename", rename)
    with pytest.raises(DestinationError, match=r"cannot publish .*, so it is not there"):
        muonckpt.save({"w": torch.arange(4.0)}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_whose_folders_cannot_be_listed_to_be_synced_is_not_there(tmp_path, monkeypatch):
    def scandir(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DestinationError, match=r"cannot publish .*, so it is not there"):
        muonckpt.save({"w": torch.arange(4.0)}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_in_a_store_is_there_though_its_claim_cannot_be_deleted(monkeypatch):
    store = fsspec.filesystem("memory")
    monkeypatch.setattr(type(store), "rm_file", unable)
    muonckpt.save({"w": torch.arange(4.0)}, "memory://claimed/step-00000001")
    assert store.exists("/claimed/step-00000001/.muonckpt.saving")
    assert not muonckpt.verify("memory://claimed/step-00000001").findings
    template = {"w": torch.zeros(4)}
    restored = muonckpt.Series("memory://claimed").restore(template)
    assert restored is not None and restored.step == 1 and torch.equal(template["w"], torch.arange(4.0))


def test_an_unfinished_folder_of_a_store_that_another_program_has_removed_is_not_stale():
    """A history found it: two programs cleaned one run, and the second had listed the folder before."""
    run = location("memory://cleaned")
    (run / "step-00000001" / ".muonckpt.saving").write(b"")
    publish.discard(run / "step-00000001")
    assert not publish.is_stale(run / "step-00000001", run)


def unable(*arguments: object) -> None:
    raise OSError(errno.EIO, "503")


def test_where_the_items_beside_a_file_cannot_be_synced_nothing_is_left(unsynced, tmp_path):
    muonckpt.save({"w": torch.arange(4.0), "n": 3}, tmp_path / "old")
    (tmp_path / "run").mkdir()
    unsynced("run")
    with pytest.raises(DestinationError, match="cannot write"):
        muonckpt.convert(tmp_path / "old", tmp_path / "run" / "new", format="safetensors")
    assert not [entry.name for entry in (tmp_path / "run").iterdir() if entry.name.startswith("new")]


def test_every_folder_is_on_the_disk_before_the_checkpoint_appears(tmp_path, monkeypatch):
    honest, synced, parents = publish.sync_directory, list[str](), []

    def sync_directory(path):
        if not path.is_relative_to(tmp_path):
            parents.append(path)
            return honest(path)
        synced.append(str(path.relative_to(tmp_path)).partition(".tmp")[2])
        assert (tmp_path / "new").exists() == (path == tmp_path)
        return honest(path)

    monkeypatch.setattr(publish, "sync_directory", sync_directory)
    muonckpt.convert(golden("deepspeed_bf16") / "global_step3", tmp_path / "new", to_dialect="deepspeed")
    folders = [path for path in (tmp_path / "new").rglob("*") if path.is_dir()]
    assert {*synced} == {"", *(f"/{path.relative_to(tmp_path / 'new')}" for path in folders)} and len(folders) > 5
    assert parents == [tmp_path.parent], "a process may have been killed between making the folder and syncing this"


@pytest.mark.parametrize("has_exchange", [True, False])
@pytest.mark.parametrize("former", ["folder", "file", "link"])
def test_a_finished_folder_takes_the_name_of_whatever_is_there(former, has_exchange, tmp_path, monkeypatch):
    if not has_exchange:  # a C library of another system
        monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: None)
    place, finished, other = tmp_path / "best", tmp_path / ".best.new", tmp_path / "other"
    for folder in (finished, other):
        folder.mkdir()
        (folder / "a").write_text(folder.name)
    if former == "folder":
        shutil.copytree(other, place)
    elif former == "file":
        place.write_text("old")
    else:
        place.symlink_to("other")
    publish.swap_in(finished, place)
    assert not place.is_symlink()
    assert (place / "a").read_text() == ".best.new"
    assert (other / "a").read_text() == "other", "a link is replaced, not followed"
    assert {path.name for path in tmp_path.iterdir()} == {"best", "other"}


def test_the_name_is_there_at_any_moment_of_an_exchange(tmp_path):
    place, finished, is_over = tmp_path / "best", tmp_path / ".best.new", threading.Event()
    place.mkdir()
    missing = 0

    def look() -> None:
        nonlocal missing
        while not is_over.is_set():
            missing += not place.exists()

    looker = threading.Thread(target=look)
    looker.start()
    for _ in range(200):
        finished.mkdir()
        publish.swap_in(finished, place)
    is_over.set()
    looker.join()
    assert not missing
