"""Copies in the memory of nodes: each element on two of them, sent once; a node may go, and damage is refused."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections import OrderedDict
from functools import partial
from pathlib import Path
from threading import Event

import pytest
import torch
from support import noded, sweep
from support.workers import WorkersFailed, run

import muonckpt
from muonckpt import ArgumentError, DestinationError, Series
from muonckpt.store.formats.native import read_native

NODES = (0, 0, 1, 2)
"""The nodes of four ranks: the first has two."""

LAST, SAVED = 2, 1


def on(folder: Path, *nodes: int) -> list[Path]:
    return [folder / f"node{node}" for node in nodes]


def copies(folder: Path, node: int) -> list[Path]:
    return sorted((folder / (f"node{node}" if type(node) is int else node)).glob("*/step-*"))


def payloads(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.glob("*.distcp")}


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_link(target: str, path: Path) -> None:
    path.unlink()
    path.symlink_to(target)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_huge(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(1 << 40)


HARMS = {
    "a pipe": as_fifo,
    "a device": partial(as_link, "/dev/zero"),
    "a link to nothing": partial(as_link, "/nowhere"),
    "a link to itself": lambda path: as_link(path.name, path),
    "a folder": as_folder,
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, 100),
    "huge": as_huge,
    "garbage": lambda path: path.write_bytes(os.urandom(5000)),
    "deep": lambda path: path.write_bytes(b"[" * 200_000),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that copied three steps and saved the second, and what its ranks say."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, run(len(NODES), noded.train, folder / "run", on(folder, *NODES), LAST, SAVED)


@pytest.fixture
def memory(trained, tmp_path):
    """The nodes of `trained`, as they are after all its processes have ended; for one test."""
    for node in set(NODES):
        shutil.copytree(trained[0] / f"node{node}", tmp_path / f"node{node}")
    return tmp_path


def test_each_file_lies_on_two_nodes_and_was_sent_once_and_all_folders_together_are_the_checkpoint(trained, tmp_path):
    folder, ranks = trained
    held = {node: copies(folder, node) for node in set(NODES)}
    assert all(len(places) == 1 and places[0].name.startswith(f"step-{LAST:08}.") for places in held.values())
    files = {node: payloads(place) for node, (place,) in held.items()}
    assert {node: sorted(name[2] for name in of_node) for node, of_node in files.items()} == {
        0: ["0", "1", "3"], 1: ["0", "1", "2"], 2: ["2", "3"]
    }  # fmt: skip
    whole = tmp_path / "whole"
    whole.mkdir()
    for (place,) in held.values():
        for file in place.iterdir():
            known = whole / file.name
            assert not known.exists() or known.read_bytes() == file.read_bytes()
            shutil.copy(file, known)
    assert [sent for _, sent in ranks] == [(whole / f"__{rank}_0.distcp").stat().st_size for rank in range(len(NODES))]
    assert muonckpt.verify(whole).verdict == "whole"
    with muonckpt.open(whole) as opened:
        assert {key: tensor.fingerprint for key, tensor in opened.tensors.items()} == {
            key: tensor.fingerprint for key, tensor in ranks[0][0][LAST].items()
        }
    (part,) = held[2]
    assert any("__0_0.distcp" in str(finding) for finding in muonckpt.verify(part).findings)
    muonckpt.salvage(part, tmp_path / "salvaged", others=held[0])
    assert not muonckpt.diff(whole, tmp_path / "salvaged").differs


RESTARTS = [((0, 0, 1, 2), ()), ((0, 0, 2), (1,)), ((0, 1, 1, 3, 4, 4), (2,)), ((3, 1, 2), (0,))]


@pytest.mark.parametrize(
    ("nodes", "lost"),
    sweep(RESTARTS, *RESTARTS[1:3]),
    ids=["the same ranks", "3 ranks, without a node", "6 ranks, three on new nodes", "3 ranks, one on a new node"],
)
def test_a_restart_takes_the_newest_state_from_the_memory_of_the_nodes_that_are_left(trained, memory, nodes, lost):
    for node in lost:
        shutil.rmtree(memory / f"node{node}")
    found = run(len(nodes), noded.restored, trained[0] / "run", on(memory, *nodes))
    for step, from_memory, said, prints, warned, _ in found:
        assert (step, from_memory, warned) == (LAST, True, []) and "from memory" in said
        assert prints == trained[1][0][0][LAST]


def flip(place: Path, name: str) -> None:
    """Change a bit of the last element in a file of a copy."""
    manifest = read_native(place)
    ends = [c.payload.end for t in manifest.tensors for c in t.chunks if c.item.file == name and c.payload.length]
    raw = bytearray((place / name).read_bytes())
    raw[max(ends) - 1] ^= 1
    (place / name).write_bytes(raw)


def test_a_copy_with_a_flipped_bit_is_refused_by_name_and_the_replica_on_another_node_taken(trained, memory):
    flip(*copies(memory, 0), "__1_0.distcp")
    (step, from_memory, _, prints, warned, _), *others = run(4, noded.restored, trained[0] / "run", on(memory, *NODES))
    assert (step, from_memory, prints) == (LAST, True, trained[1][0][0][LAST])
    assert len(warned) == 1 and "on the node of rank 1 is damaged: tensor " in warned[0] and "box" in warned[0]
    assert all(other[3:5] == (prints, warned) for other in others)


@pytest.mark.parametrize("harm", ["bits", "nodes", "descriptions"])
def test_where_no_whole_copy_is_left_the_older_checkpoint_on_disk_is_taken(trained, memory, harm):
    nodes = NODES
    if harm == "bits":
        flip(*copies(memory, 0), "__1_0.distcp")
        flip(*copies(memory, 1), "__1_0.distcp")
    elif harm == "nodes":
        nodes = (2, 2)
        for node in (0, 1):
            shutil.rmtree(memory / f"node{node}")
    else:
        for node in set(NODES):
            (manifest,) = (place / "muonckpt.json" for place in copies(memory, node))
            raw = bytearray(manifest.read_bytes())
            raw[raw.index(b'"fingerprint"') + 20] ^= 1  # another hex digit, or none
            manifest.write_bytes(raw)
    found = run(len(nodes), noded.restored, trained[0] / "run", on(memory, *nodes))
    for step, from_memory, said, prints, warned, _ in found:
        assert (step, from_memory, prints) == (SAVED, False, trained[1][0][0][SAVED])
        assert "step-00000001" in said and "is not taken" in warned[-1]


IN_PLACE = ["a pipe", "a device", "garbage", "missing", "a file for the folder"]


@pytest.mark.parametrize("harm", sweep(IN_PLACE, *IN_PLACE[::2]))
def test_what_is_wrong_on_one_node_stops_no_other_and_its_whole_files_are_read(trained, memory, harm):
    """Nodes 0 and 2 have all files together; what describes them is bad on node 0, which alone has those of rank 0."""
    shutil.rmtree(memory / "node1")
    (place,) = copies(memory, 0)
    if harm == "a file for the folder":
        shutil.rmtree(place.parent)
        place.parent.write_text("no folder")
    else:
        HARMS[harm](place / "muonckpt.json")
    ranks = run(3, noded.restored, trained[0] / "run", on(memory, 0, 2, 2))
    taken = harm != "a file for the folder"
    for step, from_memory, _, prints, lines, _ in ranks:
        assert (step, from_memory, prints) == (LAST if taken else SAVED, taken, trained[1][0][0][step])
        told = [line for line in lines if str(place.parent.name) in line and "on the node of rank 0" in line]
        assert len(told) == 1, lines


@pytest.mark.parametrize("other", ["copied", "newer on disk"])
def test_copies_of_another_run_or_of_an_earlier_step_are_not_taken(trained, memory, tmp_path, other):
    folder = tmp_path / "run"
    if other == "copied":  # a run that goes on from a copy of the folder is another run
        shutil.copytree(trained[0] / "run", folder)
    else:
        folder = trained[0] / "run"
        shutil.copytree(folder / f"step-{SAVED:08}", folder / "step-00000009")
    try:
        found = run(4, noded.restored, folder, on(memory, *NODES))
    finally:
        shutil.rmtree(trained[0] / "run" / "step-00000009", ignore_errors=True)
    for step, from_memory, _, prints, warned, _ in found:
        assert not from_memory and prints == trained[1][0][0][SAVED]
        assert step == (SAVED if other == "copied" else 9)
        assert len(warned) == 1 and ("not of this run" if other == "copied" else "it is older than") in warned[0]


@pytest.mark.parametrize(("event", "name"), [("open", "__1_0.distcp"), ("os.rename", ".tmp")])
def test_a_node_that_is_killed_in_mid_copy_leaves_the_copy_before_or_a_whole_one(trained, tmp_path, event, name):
    """``__1_0.distcp`` is opened on node 1 when it is received, and ``.tmp`` renamed when a copy is published."""
    nodes, killed = (0, 0, 1, 1), partial(noded.killed_in, event, name, [2, 3])
    with pytest.raises(WorkersFailed, match="exit code -9"):
        run(4, noded.train, tmp_path / "run", on(tmp_path, *nodes), LAST, 0, killed)
    found = run(3, noded.restored, tmp_path / "run", on(tmp_path, 1, 0, 1))
    for step, from_memory, _, prints, _, left in found:
        assert from_memory and prints == trained[1][0][0][step]
        assert step == LAST - 1 if event == "open" else step in (LAST - 1, LAST)
        assert not any(entry.startswith(".") for entry in left), "what was cut off has been removed"


class Waits:
    """Is written when somebody says so."""

    said = Event()

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        assert Waits.said.wait(60)
        return OrderedDict, ()


def one(value: float) -> dict[str, torch.Tensor]:
    return {"large": torch.full((6_000_000,), value), "small": torch.tensor([value])}


def alone(folder: Path) -> Series:
    return Series(folder / "run", memory=folder / "node")


def test_one_process_has_one_node_and_the_end_removes_what_was_saved_as_well(tmp_path):
    with alone(tmp_path) as series:
        with pytest.warns(RuntimeWarning, match="not the node"):
            series.async_copy(3, one(3.0)).result()
        template = one(0.0)
        found = alone(tmp_path).restore(template)
        assert found.memory and torch.equal(template["large"], one(3.0)["large"])
        series.async_copy(2, one(2.0)).result()  # a run that went back: the later copy is given up
        assert [path.name[:13] for path in (tmp_path / "node").glob("*/*")] == ["step-00000002"]
        series.save(2, one(2.0))
    assert not [*(tmp_path / "node").iterdir()]
    with pytest.warns(RuntimeWarning, match="newer than all that was saved"), alone(tmp_path) as series:
        series.restore(one(0.0))
        series.async_copy(4, one(4.0))
    assert alone(tmp_path).restore(one(0.0)).step == 4


@pytest.mark.filterwarnings("ignore:all ranks are on one node")
def test_full_memory_is_told_with_what_to_do_and_the_copy_before_stays(tmp_path, monkeypatch):
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    series = alone(tmp_path)
    series.async_copy(1, one(1.0)).result()
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(DestinationError, match=r"is full on this node \(.*step 2 is not copied.*on_error='warn'"):
            series.async_copy(2, one(2.0)).result()
    assert [path.name[:13] for path in (tmp_path / "node").glob("*/*")] == ["step-00000001"]
    assert alone(tmp_path).restore(one(0.0)).step == 1


@pytest.mark.filterwarnings("ignore:all ranks are on one node")
def test_memory_that_cannot_be_used_is_named(tmp_path):
    Series(tmp_path / "run", memory=tmp_path / "other").async_copy(0, one(0.0)).result()
    (tmp_path / "node").write_text("no folder")
    for call in (lambda series: series.async_copy(1, one(1.0)), lambda series: series.restore(one(0.0))):
        with pytest.raises(DestinationError, match=r"memory='.*node' cannot be used on this node: .* of your own"):
            call(alone(tmp_path))


@pytest.mark.filterwarnings("ignore:all ranks are on one node")
def test_a_file_of_somebody_else_beside_the_copies_stays_there(tmp_path):
    series = alone(tmp_path)
    series.async_copy(1, one(1.0)).result()
    (folder,) = (tmp_path / "node").iterdir()
    (folder / "notes.txt").write_text("mine")
    series.async_copy(2, one(2.0)).result()
    assert alone(tmp_path).restore(one(0.0)).step == 2
    assert (folder / "notes.txt").read_text() == "mine"
    with series:
        series.save(2, one(2.0))
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt"]


@pytest.mark.filterwarnings("ignore:all ranks are on one node")
def test_nothing_is_copied_while_a_save_is_under_way_and_a_failed_copy_is_told(tmp_path):
    series = alone(tmp_path)
    saving = series.async_save(1, {**one(1.0), "waits": Waits()})
    assert series.async_copy(2, one(2.0)) is None
    Waits.said.set()
    saving.result()
    series.async_copy(2, one(2.0)).result()
    (folder,) = (tmp_path / "node").iterdir()
    folder.rename(tmp_path / "away")
    folder.write_text("no folder")
    with pytest.raises(DestinationError, match="node"):
        series.async_copy(3, one(3.0)).result()
    folder.unlink()
    with pytest.raises(ArgumentError, match="memory='/dev/shm/me'"):
        Series(tmp_path / "run").async_copy(3, one(3.0))
    with pytest.raises(ArgumentError, match="a step is an integer"):
        series.async_copy(one(3.0), 3)


# --- Which copies are taken: a bad one hides no whole one, and those of a branch that was left are passed over


def value(number: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8,), float(number))}


def restored(run: Path, node: Path) -> tuple[int | None, float, list[str]]:
    """Restore into zeros; return the step, the value and the warnings."""
    template = value(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = Series(run, memory=node).restore(template)
    return done and done.step, template["w"][0].item(), [str(warning.message) for warning in caught]


@pytest.mark.filterwarnings("ignore:all ranks are on one node")
@pytest.mark.parametrize("file", ["muonckpt.json", "__0_0.distcp"])
@pytest.mark.parametrize("harm", HARMS)
def test_a_bad_copy_is_passed_over_with_a_sentence_and_hides_no_whole_one(harm, file, tmp_path):
    run, node = tmp_path / "run", tmp_path / "node"
    with Series(run, memory=node) as series:
        series.save(3, value(3))
        series.async_copy(4, value(4)).result()
        (older,) = copies(tmp_path, "node")
        shutil.copytree(older, tmp_path / "older")
        series.async_copy(5, value(5)).result()
        (newer,) = copies(tmp_path, "node")
        shutil.copytree(newer, tmp_path / "newer")
        # As after a copy that was killed before the one before was removed.
        shutil.copytree(tmp_path / "older", older)
        for bad, step in ((older, 5), (newer, 4)):
            HARMS[harm](bad / file)
            *state, lines = restored(run, node)
            assert state == [step, step]
            refusals = [line for line in lines if "is not taken" in line]
            assert len(refusals) == (bad == newer or file == "muonckpt.json")  # an older one's elements are not read
            assert all(str(bad) in line for line in refusals)
            shutil.rmtree(bad)
            shutil.copytree(tmp_path / ("older" if bad == older else "newer"), bad)
        for bad in (older, newer):
            HARMS[harm](bad / file)
        *state, lines = restored(run, node)
        assert state == [3, 3] and sum("is not taken" in line for line in lines) == 2
        series.async_copy(6, value(6)).result()  # which removes the bad ones
        assert restored(run, node) == (6, 6, [])
        series.save(6, value(6))
    assert not [*node.iterdir()]


@pytest.mark.filterwarnings("ignore:all ranks are on one node")
def test_whatever_lies_in_the_place_of_the_folders_stops_nobody(tmp_path):
    run, node = tmp_path / "run", tmp_path / "node"
    series = Series(run, memory=node)
    series.save(3, value(3))
    series.async_copy(4, value(4)).result()
    (copy,) = copies(tmp_path, "node")
    copy.with_name("step-00000009").write_text("a file")
    copy.with_name("step-00000008").symlink_to(copy)
    copy.with_name("step-00000007").mkdir()
    step, number, told = restored(run, node)
    assert (step, number) == (4, 4)
    assert len(told) == 1 and "step-00000007" in told[0] and "muonckpt.json" in told[0]
    for kind in ("file", "link", "pipe"):
        folder = node / copy.parent.name
        folder.rename(tmp_path / "away")
        match kind:
            case "file":
                folder.write_text("a file")
            case "link":
                folder.symlink_to("/nowhere")
            case "pipe":
                os.mkfifo(folder)
        step, number, told = restored(run, node)
        assert (step, number, len(told)) == (3, 3, 1) and str(folder) in told[0], told
        folder.unlink()
        (tmp_path / "away").rename(folder)
    identity = run / ".muonckpt.run"
    identity.rename(tmp_path / "identity")
    assert restored(run, node)[:2] == (3, 3) and "not of this run" in restored(run, node)[2][0]
    os.mkfifo(identity)
    step, number, told = restored(run, node)
    assert (step, number, len(told)) == (3, 3, 1) and "copies in memory are not taken" in told[0]


class Branches:
    """A run of processes that are killed: each says what it restores, and state is a number."""

    def __init__(self, folder: Path) -> None:
        self.run, self.folder = folder / "run", folder

    def start(self, node: str, expected: int | None, told: str = "") -> Series:
        series, template = Series(self.run, memory=self.folder / node), value(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            done = series.restore(template)
        lines = [str(warning.message) for warning in caught]
        assert (template["w"][0].item() if done else None) == expected, lines
        assert any(told in line for line in lines) if told else not lines, lines
        return series


@pytest.fixture
def branches(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "all ranks are on one node")
        yield Branches(tmp_path)


LEFT = "it is of a branch that was left"


def test_a_copy_of_a_branch_that_was_left_is_passed_over_with_a_sentence(branches):
    first = branches.start("a", None)
    first.save(5, value(5))
    first.async_copy(10, value(110)).result()
    second = branches.start("b", 5)
    branches.start("a", 110)  # the other branch has saved nothing yet
    for step in (6, 7, 8):
        second.save(step, value(200 + step))
    for _ in range(2):
        third = branches.start("a", 208, LEFT)
    third.async_copy(9, value(309)).result()  # the copy that was left is removed
    branches.start("a", 309)


def test_a_branch_without_memory_is_one_too(branches):
    first = branches.start("a", None)
    first.save(5, value(5))
    first.async_copy(10, value(10)).result()
    Series(branches.run).save(8, value(208))
    branches.start("a", 208, LEFT).async_copy(9, value(9)).result()
    branches.start("a", 9)


def test_copies_descend_through_copies_through_saves_that_are_pruned_and_past_saves_that_fail(branches):
    branches.start("a", None).async_copy(1, value(1)).result()
    series = branches.start("a", 1)
    series.save(5, value(5))
    series.async_copy(10, value(10)).result()
    series = branches.start("a", 10)
    series.async_copy(12, value(12)).result()
    series = branches.start("a", 12)
    for step in (13, 14, 15, 16):
        series.save(step, value(step))
    with pytest.raises(muonckpt.MuonckptError):
        series.save(17, {"w": Unstorable()})
    series.async_copy(18, value(18)).result()
    assert not (branches.run / "step-00000005").exists(), "it is pruned"
    branches.start("a", 18)


class Unstorable:
    def __reduce__(self):
        raise TypeError("this cannot be saved")


@pytest.mark.filterwarnings("ignore:.* is of a later step")
@pytest.mark.parametrize("harm", ["data", "description"])
def test_a_save_that_is_damaged_hides_no_copy_that_descends_from_it(branches, harm):
    series = branches.start("a", None)
    series.save(5, value(5))
    series.save(8, value(8))
    series.async_copy(12, value(12)).result()
    os.truncate(branches.run / "step-00000008" / ("__0_0.distcp" if harm == "data" else "muonckpt.json"), 50)
    branches.start("a", 12)
    other = branches.start("b", 5, "is not whole")
    other.async_copy(9, value(209)).result()
    branches.start("b", 209)
    other.save(6, value(206))
    branches.start("a", 206, "is not whole")
    branches.start("b", 206, "is not whole")  # copied before step 6 was saved, by whom nobody knows


def test_a_save_that_is_replaced_or_moved_away_takes_its_copies_with_it(branches):
    series = branches.start("a", None)
    series.save(5, value(5))
    series.save(8, value(8))
    series.async_copy(9, value(9)).result()
    again = branches.start("b", 8)
    again.save(8, value(208), replace=True)
    branches.start("a", 208, LEFT)
    again.async_copy(9, value(209)).result()
    branches.start("b", 209)
    again.save(8, value(308), replace=True)  # the same process has gone back
    branches.start("b", 308, LEFT)
    again.async_copy(9, value(309)).result()
    (branches.run / "step-00000008.3").rename(branches.run / "moved")
    branches.start("b", 5, "the run does not go on from the save of step 8, from which it descends")
    branches.start("b", 5, "the save of step 8").save(8, value(408))  # under the name that the first one had
    branches.start("a", 408, LEFT)
    branches.start("b", 408, LEFT)


def test_of_two_branches_that_have_saved_nothing_the_one_that_began_last_is_taken(branches):
    series = branches.start("a", None)
    series.save(5, value(5))
    series.async_copy(10, value(10)).result()
    branches.start("b", 5).async_copy(7, value(207)).result()
    (copy,) = copies(branches.folder, "b")
    shutil.copytree(copy, next((branches.folder / "a").iterdir()) / copy.name)
    branches.start("a", 207, "the run has left that branch, for")


def test_copies_beside_the_checkpoints_of_a_trainer_descend_from_those_that_it_tells(branches, tmp_path):
    def trainer(node: str, since: int, expected: int | None) -> Series:
        series, template = Series(branches.run, memory=branches.folder / node), value(0)
        path = None if since < 0 else tmp_path / f"{since}"
        done = series.restore_copy(template, since=since, parent=path)
        assert (template["w"][0].item() if done else None) == expected
        return series

    def save(series: Series, step: int) -> None:
        muonckpt.save(value(step), tmp_path / f"{step}")
        series.record_parent(step, tmp_path / f"{step}")

    first = trainer("a", -1, None)
    first.async_copy(1, value(1)).result()
    trainer("a", -1, 1)
    save(first, 5)
    first.async_copy(10, value(10)).result()
    trainer("a", 5, 10).async_copy(12, value(12)).result()
    second = trainer("b", 5, None)
    second.async_copy(6, value(206)).result()
    trainer("b", 5, 206)
    save(second, 8)
    with pytest.warns(RuntimeWarning, match=LEFT):
        trainer("a", 8, None)
    second.record_parent(9, tmp_path / "9")  # a save that failed
    second.async_copy(9, value(209)).result()
    trainer("b", 8, 209)


@pytest.mark.filterwarnings("ignore:all ranks are on one node")
def test_the_end_tells_what_it_cannot_remove_and_says_nothing_of_branches_that_were_left(branches):
    branches.start("a", None).async_copy(9, value(9)).result()
    Series(branches.run).save(5, value(5))
    with branches.start("a", 5, LEFT) as series:
        series.save(6, value(6))
    assert len(copies(branches.folder, "a")) == 1, "it may be looked at"
    with pytest.warns(RuntimeWarning, match="cannot remove what was copied to .*: Not a directory"), series:
        (folder,) = (branches.folder / "a").iterdir()
        shutil.rmtree(folder)
        folder.write_text("no folder")


@pytest.mark.parametrize(
    ("call", "file"), [("preadv", "__1_0.distcp"), ("pwrite", "__0_0.distcp"), ("fsync", "__0_0.distcp")]
)
def test_a_fault_of_one_node_while_files_are_sent_is_the_same_error_on_all_and_keeps_the_copy_before(
    call, file, tmp_path
):
    """Rank 1 reads its own file to send it, and writes that of rank 0."""
    ranks = run(3, noded.copied_with_fault, tmp_path / "run", on(tmp_path, 0, 1, 2), call, file)
    assert {said for said, _ in ranks} == {"DestinationError: OSError: [Errno 5] Input/output error (rank 1)"}
    assert all(names == ["step-00000001"] for _, names in ranks)
