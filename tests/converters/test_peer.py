"""Journals as others see them, in files of this machine, of another one, and in an object store."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from support.resharded import plan_job

import muonckpt
from muonckpt.converters.engine import journal as journals
from muonckpt.converters.engine.journal import Done, Folder, Journal, Step, Sum
from muonckpt.converters.engine.peer import Peer, Sight
from muonckpt.converters.engine.run import run
from muonckpt.converters.engine.workers import Worker
from muonckpt.errors import Interrupted
from muonckpt.store.io.location import location

DONE = Done(("ab" * 16,), (Sum("cd" * 16, 7, 2**64 - 1),))
PATIENCE = 0.3


@pytest.fixture(params=["here", "another machine", "no locks", "object store"])
def place(request, tmp_path, monkeypatch):
    """Where a journal will be.  Only here a lock tells whether its process lives."""
    if request.param == "another machine":
        monkeypatch.setattr(journals, "this_host", lambda: "5eed another")
    if request.param == "no locks":
        monkeypatch.setattr("fcntl.flock", lambda *how: (_ for _ in ()).throw(OSError("not implemented")))
    if request.param == "object store":
        return Folder(location(f"memory://{tmp_path.name}")).journal(1, 0)
    return Folder(tmp_path).journal(1, 0)


@pytest.fixture
def tells_at_once(request):
    return request.node.callspec.params["place"] == "here"


def test_life_and_death(place, tells_at_once):
    peer = Peer(place, PATIENCE)
    assert peer.look() is Sight.ABSENT and peer.header is None
    mine = Journal(place, "job", 3)
    assert peer.look() is (Sight.ALIVE if tells_at_once else Sight.UNSURE)
    assert (peer.header.job, peer.header.world, peer.header.locked) == ("job", 3, peer.header.locked)
    time.sleep(0.02)  # file systems count in steps of their own
    mine.beat()
    assert peer.look() is Sight.ALIVE
    time.sleep(1.2 * PATIENCE)
    assert peer.look() is (Sight.ALIVE if tells_at_once else Sight.LOST)
    mine.beat()
    assert peer.look() is Sight.ALIVE
    mine.close()
    time.sleep(0 if tells_at_once else 1.2 * PATIENCE)
    assert peer.look() is Sight.LOST


def test_one_writes_and_others_read_what_is_new(place):
    mine, peer = Journal(place, "job", 1), Peer(place, PATIENCE)
    with pytest.raises(FileExistsError):
        Journal(place, "other job", 1)
    mine.say(Step.BEGUN)
    peer.look()
    assert peer.header.job == "job" and peer.steps == {Step.BEGUN} and not peer.done
    mine.add("__0_0.distcp", DONE)
    mine.say(Step.ENDED, ("SourceError", "it is damaged"))
    assert peer.look() is Sight.ENDED and peer.done == {"__0_0.distcp": DONE}
    assert peer.error == ("SourceError", "it is damaged") and not peer.ended_well
    late = Peer(place, PATIENCE)
    assert (late.look(), late.done, late.error) == (Sight.ENDED, peer.done, peer.error)


def test_a_journal_that_was_removed_is_noticed_by_its_writer(place):
    mine, folder = Journal(place, "job", 1), Folder(place.parent)
    assert list(folder.found()) == [(1, 0)]
    folder.clear(0)
    mine.beat()
    folder.clear(1)
    with pytest.raises(OSError, match="removed"):
        mine.beat()
    assert folder.found() == {} and Peer(place, PATIENCE).look() is Sight.ABSENT


@pytest.mark.parametrize(
    "line", [b"", b"\0" * 9, b"{}", b"[]", b'{"step": "sung"}', b'{"file": "x"}', b'{"job": 1, "a": 2}']
)
@pytest.mark.parametrize("at", [0, 1])
def test_a_bad_line_and_what_follows_is_void(at, line, tmp_path):
    mine = Journal(tmp_path / "1.0", "job", 1)
    mine.add("one", DONE)
    mine.close()
    lines = (tmp_path / "1.0").read_bytes().splitlines()
    (tmp_path / "1.0").write_bytes(b"\n".join([*lines[:at], line, *lines[at:], b""]))
    peer = Peer(tmp_path / "1.0", PATIENCE)
    assert peer.look() is Sight.LOST and not peer.done and (peer.header is None) == (at == 0)


def test_a_worker_that_was_taken_for_lost_stops_when_another_run_has_begun(tmp_path):
    muonckpt.save({"w": torch.arange(12.0).reshape(4, 3)}, tmp_path / "source")
    folder = Folder(tmp_path / ".out.reshard.journal")
    raised: list[Exception] = []

    def sleeper() -> None:
        try:
            run(plan_job(tmp_path / "source", 4), tmp_path / "out", worker=Worker(0, 2), patience=5)
        except Interrupted as error:
            raised.append(error)

    thread = threading.Thread(target=sleeper)
    thread.start()
    leader = Peer(folder.journal(1, 0), PATIENCE)
    while Step.BEGUN not in leader.steps and thread.is_alive():
        leader.look()
    Journal(folder.journal(2, 0), leader.header.job, 2).say(Step.BEGUN)
    thread.join()
    assert "another run goes on" in str(raised[0]) and not (tmp_path / "out").exists()
    assert (tmp_path / ".out.reshard.tmp").is_dir() and list(folder.found()) == [(1, 0), (2, 0)]
