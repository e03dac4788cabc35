"""One reshard done by several workers: the same files as by one, published once; or nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Timer

import numpy as np
import pytest
import torch
import torch.distributed
from support import sweep, workers
from support.commands import cli
from support.forked import Scripts
from support.golden import golden
from support.launched import STRUCK, environment, free_port, together
from support.resharded import contents, make_job, nothing_but, plan_job, tensors_only
from support.sharded import edit
from support.trees import tree
from torch.distributed import distributed_c10d

import muonckpt
from muonckpt import MuonckptError
from muonckpt.converters.engine.container import container_of
from muonckpt.converters.engine.job import Job, Share
from muonckpt.converters.engine.outputs import unchanged
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.engine.workers import Worker, joined
from muonckpt.converters.target.topology import Target
from muonckpt.names.errors import Interrupted

RANKS = 10


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A checkpoint of four files.  Do not change."""
    folder = tmp_path_factory.mktemp("workers")
    state = {"w": torch.arange(230.0).reshape(46, 5), "b": torch.randn(64, 9).bfloat16(), "e": torch.empty(0, 3)}
    muonckpt.save({**state, "n": torch.tensor(7), "lr": 0.1}, folder / "one")
    run_job(plan_job(folder / "one", 4), folder / "four")
    return folder / "four"


@pytest.fixture(scope="module")
def whole(source) -> dict[str, bytes]:
    """What a single process makes of it."""
    run_job(plan_job(source, RANKS), source.with_name("whole"))
    return contents(source.with_name("whole"))


FORMS = {"file": ("safetensors", None), "shards": ("safetensors", 700), "zarr": ("zarr", 700)}


def plan(rank: int, source: Path, form: str = "ranks") -> Job:
    """The same job on every worker."""
    if form not in FORMS:
        return plan_job(source, RANKS)
    name, shard_bytes = FORMS[form]
    container = container_of(name, shard_bytes)
    return make_job(source, Target({"dp": 1}), make_outputs=tensors_only, container=container)


# --- together ---------------------------------------------------------------------------------------------------------


TOGETHER = [(2, "ranks"), (3, "ranks"), (8, "ranks"), (2, "file"), (2, "shards"), (3, "zarr")]


@pytest.mark.parametrize(("world", "form"), sweep(TOGETHER, *TOGETHER[1::2]))
def test_any_number_of_workers_writes_the_same_bytes_and_publishes_once(world, form, source, tmp_path):
    run_job(plan(0, source, form), tmp_path / "alone")
    told = together(world, plan, source, form, destination=tmp_path / "out", threads=1)
    assert told == ["published", *["done"] * (world - 1)]
    assert tree(tmp_path / "out") == tree(tmp_path / "alone") and nothing_but(tmp_path, "alone", "out")


def test_damage_that_one_worker_meets_ends_all_and_leaves_nothing(source, tmp_path):
    shutil.copytree(source, tmp_path / "source")
    job = plan_job(tmp_path / "source", RANKS)
    met = [set(np.flatnonzero(Share.of(job, Worker(rank, 3)).checked).tolist()) for rank in range(3)]
    _, damaged = job.rows.at(min(met[2] - met[0] - met[1]))
    edit(tmp_path / "source" / damaged.payload.file, damaged.payload.offset)
    told = together(3, plan, tmp_path / "source", destination=tmp_path / "out")
    assert all("ChecksumError" in error and "is damaged" in error for error in told)
    assert told[0] == told[1] == told[2] and told[0].endswith("(rank 2)")
    assert nothing_but(tmp_path, "source")


def another(rank: int, source: Path) -> Job:
    return plan_job(source, RANKS + (rank == 2))


def missing(rank: int, source: Path) -> Job:
    return plan_job(source.with_name("nothing") if rank == 1 else source, RANKS)


def broken(rank: int, source: Path) -> Job:
    if rank:
        raise MuonckptError(f"broken on {rank}")
    return plan_job(source, RANKS)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        (another, "LaunchError: worker 2 of 3 has planned another job"),
        (missing, "SourceError: .*nothing"),
        (broken, "MuonckptError: .*broken on 1"),
    ],
)
def test_an_error_of_one_worker_is_that_of_all_and_the_first_counts(how, error, source, tmp_path):
    told = together(3, how, source, destination=tmp_path / "out")
    assert all(re.match(error, text) for text in told), told
    assert nothing_but(tmp_path)


# --- busy, failed, and lost -------------------------------------------------------------------------------------------


def longest_wait(rank: int, world: int, timeout: float) -> float:
    """Return the seconds that a worker waits for the others at work, once all have met."""
    known = {*distributed_c10d._world.pg_map}
    with joined(environment(rank, world), timeout):
        [group] = {*distributed_c10d._world.pg_map} - known
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_a_worker_may_be_busy_for_longer_than_the_timeout():
    assert min(workers.run(2, longest_wait, 100.0)) > 24 * 3600


def uneven(rank: int, world: int) -> str:
    try:
        with joined(environment(rank, world), 60) as group:
            if rank:
                group.gather(rank)
    except MuonckptError as error:
        return str(error)
    return "no error"


def test_workers_that_do_not_run_the_same_are_told_so():
    assert workers.run(2, uneven) == ["no error", "the workers do not run the same command"]


def failing(rank: int, world: int, how: str, failed: int) -> str:
    try:
        with joined(environment(rank, world), 60) as group:
            if rank != failed:
                while True:
                    group.check_others()
                    time.sleep(0.01)
            if how == "fails":
                raise FileExistsError("broken")
            signal.signal(signal.SIGINT, signal.default_int_handler)
            Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            group.gather(rank)  # in vain: the others never come, but for its signal
    except MuonckptError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return "no error"


@pytest.mark.parametrize("failed", [0, 2])
@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("fails", r"DestinationError: FileExistsError: broken \(rank \d\)"),
        ("is interrupted", "Interrupted: .*run the command again"),
    ],
)
def test_a_worker_that_fails_or_is_interrupted_while_it_waits_ends_all(how, error, failed):
    told = workers.run(3, failing, how, failed)
    assert all(re.match(error, text) for text in told) and len(set(told)) == 1, told


def counted_calls(rank: int, world: int, source: Path, destination: Path, fails: bool) -> int:
    """How often a worker has moved bytes.  The last one fails once the first has moved some, which goes on slowly."""
    calls = 0
    begun = source.parent / "begun"

    def moved(count: int) -> None:
        nonlocal calls
        calls += 1
        if fails and rank == world - 1:
            while not begun.exists():
                time.sleep(0.01)
            raise MuonckptError("broken")
        begun.touch()
        with suppress(Interrupted):
            while fails and calls == 1:
                group.check_others()
        time.sleep(0.5 * fails)

    with suppress(MuonckptError), joined(environment(rank, world), 60) as group:
        run_job(plan_job(source, RANKS), destination, threads=1, workers=group, progress=moved)
    return calls


def test_no_worker_writes_in_vain_when_another_has_failed(source, tmp_path):
    most = workers.run(2, counted_calls, source, tmp_path / "whole", False)
    (source.parent / "begun").unlink()
    calls = workers.run(2, counted_calls, source, tmp_path / "out", True)
    assert 0 < calls[0] < most[0] / 2
    assert nothing_but(tmp_path, "whole")


# --- commands ---------------------------------------------------------------------------------------------------------


ENDED = {"killed": (signal.SIGKILL, -9), "told to end": (signal.SIGTERM, 5)}


@pytest.mark.parametrize(("how", "victim"), [("killed", 0), ("killed", 1), ("told to end", 2)])
def test_a_lost_worker_ends_all_and_the_next_run_begins_again(how, victim, source, whole, tmp_path):
    number, code = ENDED[how]
    (tmp_path / "told").mkdir()
    port = free_port()
    variables = [environment(rank, 3, port) | {"GLOO_SOCKET_IFNAME": "lo"} for rank in range(3)]
    arguments = ["reshard", source, tmp_path / "out", "--mesh", f"dp={RANKS}", "--jobs", "1"]
    with Scripts(tmp_path / "told", variables, STRUCK[1], int(number), victim, *arguments) as started:
        others = [rank for rank in range(3) if rank != victim]
        for left, out, told in started.ended(others):
            assert (left, out) == (5, "") and told.count("muonckpt:") == 1 and "run the command again" in told, told
            [line] = [line for line in told.splitlines() if line.startswith("muonckpt:")]  # torch may log more
            assert "Traceback" not in line and "frame #" not in line
        assert started.ended([victim])[0][0] == code
    staged = [entry.name for entry in tmp_path.iterdir() if entry.name != "told"]
    assert len(staged) == (how == "killed" and victim == 0)  # the coordinator removes what is not published
    run_job(plan_job(source, RANKS), tmp_path / "out")
    assert contents(tmp_path / "out") == whole and nothing_but(tmp_path, "told", "out")


def test_all_workers_exit_with_the_code_of_the_one_that_failed(source, tmp_path):
    shutil.copytree(source, tmp_path / "source")
    job = plan_job(tmp_path / "source", RANKS)
    payload = max((c.payload for t in job.manifest.tensors for c in t.chunks), key=lambda payload: payload.length)
    edit(tmp_path / "source" / payload.file, payload.offset)
    (tmp_path / "told").mkdir()
    port = free_port()
    variables = [environment(rank, 2, port) | {"GLOO_SOCKET_IFNAME": "lo"} for rank in range(2)]
    command = (STRUCK[1], 0, "none", "reshard", tmp_path / "source", tmp_path / "out", "--mesh", "dp=2")
    with Scripts(tmp_path / "told", variables, *command) as started:
        ended = started.ended([0, 1])
    assert [code for code, _, _ in ended] == [3, 3]
    assert all(out == "" and "is damaged" in told and told.count("muonckpt:") == 1 for _, out, told in ended), ended
    assert nothing_but(tmp_path, "source", "told")


@pytest.mark.exhaustive
def test_torchrun_starts_a_killed_worker_again(source, whole, tmp_path):
    arguments = ["reshard", source, tmp_path / "out", "--mesh", f"dp={RANKS}", "--jobs", "1"]
    torchrun = [
        Path(torch.distributed.__file__).with_name("run.py"),
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    ]
    struck = [STRUCK[1], int(signal.SIGKILL), 1]
    (tmp_path / "told").mkdir()
    with Scripts(tmp_path / "told", [{}], *torchrun, "--monitor-interval", "0.1", *struck, *arguments) as started:
        [(code, out, told)] = started.ended([0])
    assert code == 0, told
    assert out.count("fingerprints compared") == 1
    assert "SIGKILL" in told or "exitcode: -9" in told, "nobody was killed"
    assert contents(tmp_path / "out") == whole and nothing_but(tmp_path, "told", "out")


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


@pytest.mark.parametrize("name", ["deepspeed_zero1", "deepspeed_bf16"])
def test_processes_whose_sets_have_other_orders_plan_the_same_job(name, tmp_path):
    for seed in "12":
        done = cli(
            "convert",
            golden(name) / "global_step3",
            tmp_path / seed,
            "--to",
            "muonckpt",
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "1") == tree(tmp_path / "2")
