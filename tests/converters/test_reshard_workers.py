"""One reshard done by several workers: the same files as by one, published once; or nothing, and a way to go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations_with_replacement, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.commands import COMMAND
from support.resharded import contents, make_job, nothing_but, plan_job, tensors_only
from support.sharded import edit
from support.trees import tree

import muonckpt
from muonckpt.cli import main
from muonckpt.converters.engine import crew
from muonckpt.converters.engine.job import Job
from muonckpt.converters.engine.run import Part, part_of, run
from muonckpt.converters.engine.workers import LaunchError, Worker, cuts, worker_of
from muonckpt.converters.target.formats import container_of
from muonckpt.converters.target.topology import Target
from muonckpt.errors import DestinationError, Interrupted, SourceError
from muonckpt.record import Manifest
from muonckpt.store.formats.zarr import writer as zarr_writer
from muonckpt.store.io.location import Location, location

STAGED, JOURNALS = ".out.reshard.tmp", ".out.reshard.journal"
RANKS = 7


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A checkpoint of four files.  Do not change."""
    folder = tmp_path_factory.mktemp("workers")
    state = {"w": torch.arange(230.0).reshape(46, 5), "b": torch.randn(64, 9).bfloat16(), "e": torch.empty(0, 3)}
    muonckpt.save({**state, "n": torch.tensor(7), "lr": 0.1}, folder / "one")
    run(plan_job(folder / "one", 4), folder / "four")
    return folder / "four"


@pytest.fixture(scope="module")
def whole(source) -> dict[str, bytes]:
    """What a single process makes of it."""
    run(plan_job(source, RANKS), source.with_name("whole"))
    return contents(source.with_name("whole"))


# --- who does what ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), max_size=7), st.integers(1, 5))
def test_parts_follow_each_other_and_the_largest_is_as_small_as_can_be(sizes, world):
    ends = [0, *cuts(sizes, world)]
    assert len(ends) == world + 1 and ends[-1] == len(sizes) and sorted(ends) == ends
    assert [Worker(rank, world).part(sizes) for rank in range(world)] == [slice(a, b) for a, b in pairwise(ends)]

    def largest(inner: tuple[int, ...]) -> int:
        return max(sum(sizes[a:b]) for a, b in pairwise((0, *inner, len(sizes))))

    assert largest(tuple(ends[1:-1])) == min(
        map(largest, combinations_with_replacement(range(len(sizes) + 1), world - 1))
    )


@pytest.mark.parametrize("finished", [(), ("__0_0.distcp", "__1_0.distcp", "__5_0.distcp")], ids=["fresh", "resumed"])
@pytest.mark.parametrize("world", [1, 2, 3, 9])
def test_every_file_is_somebodys_and_every_chunk_is_checked_by_all_who_copy_from_it(world, finished, source):
    job = plan_job(source, RANKS)
    parts = [part_of(job, Worker(rank, world), finished) for rank in range(world)]
    assert sorted(file.name for part in parts for file in part.files) == sorted(file.name for file in job.files)
    everything = {c.item for tensor in job.manifest.tensors for c in tensor.chunks if c.box.numel}

    def checked(part: Part) -> set:
        return {chunk.item for _, chunk in part.chunks}

    assert set().union(*map(checked, parts)) == everything
    for part in parts:
        chunks = [chunk for file in part.files for chunk in file.chunks]
        assert {w.output.chunks[c.source.buffer].item for w in chunks for c in w.copies} <= checked(part)
    for these in (set(finished), {file.name for file in job.files} - set(finished)):
        loads = [sum(file.length for file in part.files if file.name in these) for part in parts]
        assert max(loads) <= sum(loads) / world + max(file.length for file in job.files)
    if world in (2, 3) and not finished:  # rows: who writes a part of the rows reads that part only
        assert sum(len(part.chunks) for part in parts) < world * len(everything)


ENVIRONMENTS = {
    "nothing": ({"HOME": "/"}, Worker(0, 1)),
    "torchrun": ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, Worker(2, 4)),
    "srun": ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3"}, Worker(1, 3)),
    "sbatch": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}, None),
    "Open MPI": ({"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "5"}, Worker(4, 5)),
    "MPICH": ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Worker(0, 1)),
    "torchrun under srun": (
        {"RANK": "3", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        Worker(3, 4),
    ),
    "half": ({"RANK": "1"}, None),
    "words": ({"RANK": "first", "WORLD_SIZE": "4"}, None),
    "too many": ({"RANK": "4", "WORLD_SIZE": "4"}, None),
    "negative": ({"RANK": "-1", "WORLD_SIZE": "4"}, None),
}


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_launchers_say_who_a_process_is(launcher):
    environment, expected = ENVIRONMENTS[launcher]
    if expected is None:
        with pytest.raises(LaunchError, match=r"worker 4 of 4|worker -1 of 4|expected two numbers"):
            worker_of(environment)
    else:
        assert worker_of(environment) == expected


def test_the_command_refuses_an_impossible_launch_and_only_the_leader_speaks(source, tmp_path, monkeypatch, capsys):
    def told(rank: int, command: str, *more: str) -> tuple[int, str, str]:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "4")
        return main.run([command, str(source), str(tmp_path / "out"), *more]), *capsys.readouterr()

    code, out, complaint = told(4, "reshard", "--mesh", "dp=3")
    assert (code, out) == (2, "") and "there is no worker 4 of 4" in complaint
    assert told(1, "convert", "--format", "safetensors", "--tensors-only", "--dry-run") == (0, "", "")
    assert told(1, "reshard", "--mesh", "dp=3", "--dry-run") == (0, "", "")
    assert told(0, "reshard", "--mesh", "dp=3", "--dry-run")[1].startswith("file") and nothing_but(tmp_path)


# --- together ---------------------------------------------------------------------------------------------------------


def together(destination: Location, *each: tuple, **how) -> list[object]:
    """Workers at once, each a job and a worker: what each returned, or the error that it raised."""
    with ThreadPoolExecutor(len(each)) as pool:
        started = [pool.submit(run, job, destination, worker=worker, **how) for job, worker in each]
        return [future.exception() or future.result() for future in started]


def crew_of(world: int, job: object) -> list[tuple]:
    return [(job, Worker(rank, world)) for rank in range(world)]


FORMS = {"file": ("safetensors", None), "shards": ("safetensors", 700), "zarr": ("zarr", 700)}


@pytest.fixture
def planned(source, tmp_path, monkeypatch):
    """A job that writes some format, and what a single process makes of it."""
    monkeypatch.setattr(zarr_writer, "CHUNK_BYTES", 300)

    def plan(form: str) -> tuple[Job, dict[str, bytes]]:
        job = plan_job(source, RANKS)
        if form in FORMS:
            container = container_of(*FORMS[form])
            job = make_job(source, Target({"dp": 1}), make_outputs=tensors_only, container=container)
        alone = tmp_path / "alone" / "out"
        run(job, alone)
        found = tree(alone)
        shutil.rmtree(alone.parent)
        return job, found

    return plan


@pytest.mark.parametrize(
    ("world", "form"), [(2, "ranks"), (3, "ranks"), (9, "ranks"), (2, "file"), (2, "shards"), (3, "zarr")]
)
def test_any_number_of_workers_writes_the_same_bytes_and_publishes_once(world, form, planned, tmp_path):
    job, whole = planned(form)
    published = together(tmp_path / "out", *crew_of(world, job), threads=1, verify=world == 3)
    assert isinstance(published[0], Manifest) and published[1:] == [None] * (world - 1)
    assert tree(tmp_path / "out") == whole and nothing_but(tmp_path, "out")


@pytest.mark.parametrize("form", ["ranks", "shards", "zarr"])
def test_an_object_store_gets_the_same_objects_and_can_be_gone_on_with(form, planned, tmp_path):
    (job, whole), out = planned(form), location(f"memory://{tmp_path.name}/out")
    staged = job.container.staged(out)
    [stopped] = together(out, (job, Worker(0, 2)), patience=0.5)
    assert isinstance(stopped, Interrupted) and 0 < len(out.fs.find(staged.path)) < len(job.files)
    before = {name: out.fs.created(name) for name in out.fs.find(out.path)}
    [refused] = together(out, (job, Worker()))
    assert isinstance(refused, DestinationError) and "--resume" in str(refused)
    published = together(out, *crew_of(3, job), resume=True, patience=5)
    assert isinstance(published[0], Manifest) and published[1:] == [None, None]
    found = out.fs.find(out.parent.path)
    assert {name.removeprefix(f"{out.path}/"): out.fs.cat_file(name) for name in found} == whole
    assert {name: out.fs.created(name) for name in before} == before
    [refused] = together(out, (job, Worker()), resume=True)
    assert isinstance(refused, DestinationError) and "exists already" in str(refused)


def test_damage_that_one_worker_meets_stops_all_and_leaves_nothing(source, tmp_path):
    shutil.copytree(source, tmp_path / "source")
    job = plan_job(tmp_path / "source", RANKS)
    met = [{chunk.item for _, chunk in part_of(job, Worker(rank, 3)).chunks} for rank in range(3)]
    [damaged, *_] = (
        chunk
        for tensor in job.manifest.tensors
        for chunk in tensor.chunks
        if chunk.box.numel and [chunk.item in mine for mine in met] == [False, False, True]
    )
    edit(tmp_path / "source" / damaged.payload.file, damaged.payload.offset)
    errors = together(tmp_path / "out", *crew_of(3, plan_job(tmp_path / "source", RANKS)))
    assert [type(error) for error in errors] == [SourceError] * 3
    assert "is damaged" in str(errors[2]) and all("worker 2 of 3 failed" in str(error) for error in errors[:2])
    assert nothing_but(tmp_path, "source")


@pytest.mark.parametrize("form", ["ranks", "shards", "zarr"])
def test_a_worker_that_never_comes_is_said_and_others_go_on_later(form, planned, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(crew, "_TELL", 0.02)
    job, whole = planned(form)
    [stopped] = together(tmp_path / "out", (job, Worker(0, 2)), patience=0.3)
    assert isinstance(stopped, Interrupted) and "worker 1 of 2 has not come in 0.3 s" in str(stopped)
    assert "now waiting for worker 1 of 2" in caplog.text
    assert nothing_but(tmp_path, STAGED, JOURNALS)
    before = {name: (tmp_path / STAGED / name).stat().st_ino for name in tree(tmp_path / STAGED)}
    assert 0 < len(before) < len(job.files)
    together(tmp_path / "out", *crew_of(3, job), resume=True)
    assert tree(tmp_path / "out") == whole and nothing_but(tmp_path, "out")
    assert {name: (tmp_path / "out" / name).stat().st_ino for name in before} == before


def test_without_a_leader_or_with_another_job_or_rank_nobody_works(source, tmp_path):
    job, other = plan_job(source, RANKS), plan_job(source, 3)
    [alone] = together(tmp_path / "out", (job, Worker(1, 2)), patience=0.3)
    assert isinstance(alone, DestinationError) and "waited 0.3 s for worker 0 to begin" in str(alone)
    assert nothing_but(tmp_path)
    who = [(job, Worker(0, 3)), (job, Worker(1, 3)), (job, Worker(1, 3)), (other, Worker(2, 3)), (job, Worker(1, 2))]
    errors = together(tmp_path / "out", *who, patience=1.5)
    assert isinstance(errors[0], Interrupted) and "worker 2 of 3 has not come" in str(errors[0])
    assert sorted(type(error).__name__ for error in errors[1:3]) == ["DestinationError", "Interrupted"]
    assert any("there is a worker 1 of 3 at" in str(error) for error in errors[1:3])
    assert all(isinstance(error, DestinationError) and "another job" in str(error) for error in errors[3:])
    assert not (tmp_path / "out").exists()


# --- on machines ------------------------------------------------------------------------------------------------------

VICTIM = """
import os, sys
from muonckpt.cli.main import main
from muonckpt.converters.engine.mover import Mover

number, write, written = int(sys.argv.pop()), Mover.write, []
def stopped(self, file):
    journals, world = self.staged.with_name(".out.reshard.journal"), int(os.environ["WORLD_SIZE"])
    while len(list(journals.glob("1.*"))) < world and not self._stop.wait(0.05):
        pass
    if written:
        os.kill(os.getpid(), number)
        self._stop.wait(60)
    written.append(file)
    return write(self, file)

Mover.write = stopped
main()
"""


def machine(name: str) -> list[str]:
    """A prefix that runs a command on a machine of its own: another name, and no network at all."""
    prefix = ["unshare", "-rnu", "sh", "-c", f'hostname {name} && exec "$@"', "sh"]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no other machine can be made here: {tried.stderr}")
    return prefix


def start(command: list[object], rank: int, world: int, *arguments: object) -> subprocess.Popen:
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)}
    texts = [*map(str, command), "reshard", "--jobs", "1", *map(str, arguments)]
    return subprocess.Popen(texts, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    try:
        said = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


@pytest.mark.parametrize(
    ("machines", "victim", "number", "again"),
    [(1, 0, signal.SIGKILL, 2), (2, 1, signal.SIGKILL, 1), (1, 2, signal.SIGTERM, 1)],
    ids=["the leader", "one on another machine", "one that says so"],
)
def test_a_lost_worker_stops_all_and_resume_redoes_what_is_missing(
    machines, victim, number, again, source, whole, tmp_path
):
    (tmp_path / "shared").mkdir()
    mounts = [tmp_path / f"mount{rank}" for rank in range(3)]
    for mount in mounts:  # every worker sees source and destination under names of its own
        mount.symlink_to(tmp_path / "shared")
        (tmp_path / f"{mount.name}-source").symlink_to(source)
    shared = tmp_path / "shared"

    def worker(rank: int) -> subprocess.Popen:
        prefix = machine(f"machine{rank}") if machines > 1 else []
        command = [sys.executable, "-c", VICTIM] if rank == victim else COMMAND
        places = (f"{mounts[rank]}-source", mounts[rank] / "out", "--mesh", f"dp={RANKS}", "--patience", patience)
        return start([*prefix, *command], rank, 3, *places, *([number.value] if rank == victim else []))

    # On one machine it is seen at once who is gone.  From another a silence tells, but all need time to start.
    patience = 30 if machines == 1 else 4
    first = ended([worker(rank) for rank in range(3)])
    codes = [code for code, _, _ in first]
    assert codes == [(-number if number is signal.SIGKILL else 5) if rank == victim else 5 for rank in range(3)], first
    assert all(f"worker {victim} of 3" in said for rank, (_, _, said) in enumerate(first) if rank != victim)
    assert all(out == "" and "Traceback" not in said for _, out, said in first)
    assert nothing_but(shared, STAGED, JOURNALS)
    lines = [
        json.loads(line) for journal in (shared / JOURNALS).iterdir() for line in journal.read_bytes().splitlines()
    ]
    before = {line["file"]: (shared / STAGED / line["file"]).stat().st_ino for line in lines if "file" in line}
    assert 0 < len(before) < RANKS
    done = together(shared / "out", *crew_of(again, plan_job(source, RANKS)), resume=True, patience=patience / 8)
    assert isinstance(done[0], Manifest) and done[1:] == [None] * (again - 1)
    assert contents(shared / "out") == whole and nothing_but(shared, "out")
    assert {name: (shared / "out" / name).stat().st_ino for name in before} == before  # not written again


def test_torchrun_starts_workers(source, whole, tmp_path):
    program = Path(sys.executable).with_name("muonckpt")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command = [*launch, program, "reshard", source, tmp_path / "out", "--mesh", f"dp={RANKS}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fingerprints compared") == 1
    assert contents(tmp_path / "out") == whole and nothing_but(tmp_path, "out")
