"""An offline reshard that is stopped: nothing half done is seen, and --resume goes on with what it can check."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import sharded, stopped, sweep
from support.forked import printed
from support.resharded import contents, make_job, nothing_but, once, plan_job, reshard, saved
from support.sharded import edit, elements_of
from support.trees import tree

import muonckpt
from muonckpt import DestinationError
from muonckpt.converters.engine.container import container_of
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.target.topology import Target
from muonckpt.converters.translate.request import unchanged
from muonckpt.names.errors import Interrupted

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


RANKS = "--format dcp --mesh dp=3"
STOPPED = {
    "kill": RANKS,
    "interrupt": RANKS,
    "error": RANKS,
    "kill file": "--format safetensors --tensors-only",
    "kill items": "--format safetensors",
    "kill zarr": "--format zarr --select w",
}


CASES = [(case, stride) for case in STOPPED for stride in (1, 4)]


@pytest.mark.parametrize(("case", "stride"), sweep(CASES, *CASES[1::2]))
def test_stopped_at_any_step_nothing_half_done_is_seen_and_resume_gives_the_same_bytes(case, stride, tmp_path):
    muonckpt.save({"w": torch.arange(15.0).reshape(5, 3), "n": torch.tensor(7), "lr": 0.1}, tmp_path / "source")
    (tmp_path / "here").mkdir()
    how, options = case.split()[0], [tmp_path / "source", tmp_path / "here", *STOPPED[case].split()]
    seen = json.loads(printed(tmp_path, stopped.__file__, how, stride, *options).splitlines()[-1])
    assert len(seen) > 20 / stride
    for step in enumerate(seen):
        status, nothing_or_all, staged, again, same, left = step[1]
        assert nothing_or_all and same and again in (None, 0), step
        strays = [name for name in left if name not in ("out", "whole", "out.items.json", "whole.items.json")]
        assert not strays or (how == "kill" and all(".out.reshard.tmp" in name for name in strays)), step
        assert case in ("kill file", "kill items") or not (strays and again is None), step  # nothing beside it
        assert ("out.items.json" in left) == (case == "kill items"), step  # never the one without the other
        ends = {"kill": (-9,), "interrupt": (5, 130), "error": (4,)}[how]
        assert status in ends or (status, again) == (0, None), step
        assert not (how == "error" and staged), step  # the disk may be full: it is given back
    assert how == "error" or sum(staged for _, _, staged, *_ in seen) > len(seen) / 2


class Stop:
    """A progress callback that interrupts after so many bytes."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, bytes]:
    """What a run makes that nothing stops."""
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    reshard(saved("own rows4"), out, 3)
    return contents(out)


@pytest.fixture
def unfinished(uninterrupted, tmp_path):
    """A source, a destination that was interrupted with two of three files done, and the bytes it should get."""
    source = saved("own rows4")
    job = plan_job(source, 3)
    two_files = sum(file.payload for file in job.files[:2])
    with pytest.raises(Interrupted, match=r"2 of 3 files.*resume=True"):
        run_job(job, tmp_path / "out", threads=1, progress=Stop(job.bytes_to_check + two_files + 1))
    return source, tmp_path / "out", tmp_path / ".out.reshard.tmp", uninterrupted


def rewrite(folder: Path, name: str, change) -> None:
    """Replace the content of the one file that fits a name by what ``change`` makes of it, without following a link."""
    [file] = list(folder.glob(name)) or [folder / name]
    data = change(file.read_bytes() if file.exists() else b"")
    file.unlink(missing_ok=True)
    if data is not None:
        file.write_bytes(data)


JOURNAL, LOCK = ".journal/*/0", ".journal/lock"
LEFT_BEHIND = {
    "nothing": (JOURNAL, lambda data: data),
    "payload": ("__0_0.distcp", lambda data: data[:-3000] + b"?" + data[-2999:]),
    "head of an item": ("__0_0.distcp", lambda data: b"?" + data[1:]),
    "tail of an item": ("__1_0.distcp", lambda data: data[:-80] + b"?" + data[-79:]),
    "padding": ("__1_0.distcp", lambda data: data[:-1] + b"?"),
    "short": ("__0_0.distcp", lambda data: data[:100]),
    "long": ("__0_0.distcp", lambda data: data + b"?"),
    "gone": ("__1_0.distcp", lambda data: None),
    "manifest": ("muonckpt.json", lambda data: b"?"),
    "metadata": (".metadata", lambda data: b"?"),
    "journal cut in a line": (JOURNAL, lambda data: data[:-20]),
    "journal cut before a line ends": (JOURNAL, lambda data: data[:-1]),
    "journal cut to nothing": (JOURNAL, lambda data: b""),
    "journal with zeros": (JOURNAL, lambda data: data + bytes(40) + b"\n"),
    "journal of something": (JOURNAL, lambda data: data + b'{"file": "x"}\n'),
    "journal of too little": (JOURNAL, lambda data: data + b'{"file": "__1_0.distcp", "blobs": [], "items": []}\n'),
    "journal with another digit": (JOURNAL, lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]),
    "journal gone": (JOURNAL, lambda data: None),
    "lock damaged": (LOCK, lambda data: b"?"),
    "lock gone": (LOCK, lambda data: None),
    "a file of another job": ("__7_0.distcp", lambda data: b"?"),
}


TIMES = [(left, twice) for twice in (False, True) for left in LEFT_BEHIND]
"""What was left behind by how many interruptions."""


@pytest.mark.parametrize(("left", "twice"), sweep(TIMES, *TIMES[: len(LEFT_BEHIND)], *TIMES[len(LEFT_BEHIND) :: 5]))
def test_resume_trusts_nothing_that_it_does_not_check(left, twice, unfinished, tmp_path):
    source, destination, staged, whole = unfinished
    name, change = LEFT_BEHIND[left]
    rewrite(staged, name, change)
    if twice:  # interrupted again, in the last file
        job = plan_job(source, 3)
        late = Stop(job.bytes_to_check + job.payload_to_write - 1)
        with pytest.raises(Interrupted):
            run_job(job, destination, resume=True, threads=1, progress=late)
    reshard(source, destination, 3, resume=True)
    assert contents(destination) == whole
    assert nothing_but(tmp_path, "out")


def test_resume_begins_anew_where_nothing_tells_what_is_finished(unfinished, tmp_path):
    source, destination, staged, whole = unfinished
    shutil.rmtree(staged / ".journal")
    reshard(source, destination, 3, resume=True)
    assert contents(destination) == whole and nothing_but(tmp_path, "out")


@pytest.mark.parametrize(("form", "at"), [("safetensors", 20), ("safetensors", -1), ("zarr", 20), ("zarr", -1)])
def test_resume_looks_at_headers_and_indices_as_well(form, at, tmp_path):
    container = container_of(form, 700)
    job = make_job(saved("own rows4"), Target({"dp": 1}), ["t.float*", "t.int64"], container=container)
    run_job(job, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run_job(job, tmp_path / "out", threads=1, progress=Stop(job.bytes_to_check + job.payload_to_write - 1))
    file = tmp_path / ".out.reshard.tmp" / job.files[0].name
    edit(file, at % file.stat().st_size)
    run_job(job, tmp_path / "out", resume=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole") and nothing_but(tmp_path, "out", "whole")


def test_resume_does_not_write_again_what_is_finished(unfinished):
    def written(folder: Path) -> list[tuple[int, int]]:
        states = [(folder / name).stat() for name in ("__0_0.distcp", "__1_0.distcp")]
        return [(state.st_ino, state.st_mtime_ns) for state in states]

    source, destination, staged, _ = unfinished
    before = written(staged)
    told: list[int] = []
    job = plan_job(source, 3)
    run_job(job, destination, resume=True, progress=told.append)
    assert written(destination) == before
    assert sum(told) == job.bytes_to_check + job.payload_to_write


def test_unfinished_work_is_neither_overwritten_nor_mixed_with_that_of_another_job(unfinished):
    source, destination, staged, _ = unfinished
    before = tree(staged)
    with pytest.raises(DestinationError, match="resume=True"):
        reshard(source, destination, 3)
    for other, ranks in ((source, 2), (saved("own rows3"), 3)):
        with pytest.raises(DestinationError, match="another job"):
            reshard(other, destination, ranks, resume=True)
    assert tree(staged) == before and not destination.exists()


def test_a_source_without_checksums_that_changed_in_between_is_another_job(tmp_path):
    """Nothing else could tell: half of the destination would be of the old one."""
    with sharded.no_checksums():
        dcp.save({"w": torch.arange(12.0).reshape(4, 3)}, checkpoint_id=tmp_path / "source", no_dist=True)
    job = plan_job(tmp_path / "source", 2)
    with pytest.raises(Interrupted):
        run_job(job, tmp_path / "out", threads=1, progress=Stop(job.bytes_to_check + 25))
    payload = job.manifest.tensors[0].chunks[0].payload
    edit(tmp_path / "source" / payload.file, payload.offset)
    with pytest.raises(DestinationError, match="another job"):
        reshard(tmp_path / "source", tmp_path / "out", 2, resume=True)


def test_the_same_names_made_of_other_elements_are_another_job(tmp_path):
    def swapped(source):
        outputs = unchanged(source)
        one, other = outputs.tensors
        tensors = [replace(a, layout=b.layout, sources=b.sources) for a, b in ((one, other), (other, one))]
        return replace(outputs, tensors=tensors)

    muonckpt.save({"q": torch.zeros(4, 3), "k": torch.ones(4, 3)}, tmp_path / "source")
    jobs = [make_job(tmp_path / "source", Target({"dp": 2}), make_outputs=how) for how in (unchanged, swapped)]
    again = make_job(tmp_path / "source", Target({"dp": 2}), make_outputs=swapped)
    assert jobs[0].digest() != jobs[1].digest() == again.digest()


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_do_not_write_into_one_place(resume, tmp_path):
    def second():
        with pytest.raises(DestinationError, match="another process is writing"):
            reshard(saved("own rows4"), tmp_path / "out", 3, resume=resume)
        refused.append(True)

    refused: list[bool] = []
    reshard(saved("own rows4"), tmp_path / "out", 3, progress=once(second))
    assert refused and elements_of(tmp_path / "out") == elements_of(saved("own rows4"))
    assert nothing_but(tmp_path, "out")


def test_the_place_is_held_until_the_checkpoint_is_published(tmp_path, monkeypatch):
    def rename_while_another_tries(source, target, **how):
        if Path(target) == tmp_path / "out":
            with pytest.raises(DestinationError, match="another process is writing"):
                reshard(saved("own rows4"), tmp_path / "out", 3, resume=True)
            refused.append(True)
        rename(source, target, **how)

    refused, rename = [], os.rename
    monkeypatch.setattr(os, "rename", rename_while_another_tries)
    reshard(saved("own rows4"), tmp_path / "out", 3)
    assert refused and elements_of(tmp_path / "out") == elements_of(saved("own rows4"))
