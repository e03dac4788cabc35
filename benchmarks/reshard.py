"""Resharding momentum offline: ours, a plain copy, and what people use today.

    reshard.py [--sizes 0.25,1,2,4,8] [--rounds 5] [--only growth|ways|others]

All ways of a table alternate in one run; every ratio is to the ``cp -r`` and sync of the same round; tables show
medians, with the smallest and largest ratio.  Every way ends with its bytes on the disk, and starts as a command of its
own, imports included (from bytecode, as an installed package has it).  Reads are warm, but where it says cold: there
the pages of the source's files are given back (``posix_fadvise``) before each run, also before ``cp``.  Memory is the
most anonymous memory that the process was seen with, the interpreter included: mapped pages of files are not its own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from machine import describe

import muonckpt
from muonckpt.converters.engine.container import container_of
from muonckpt.converters.engine.job import Job, make_job
from muonckpt.converters.engine.outputs import unchanged
from muonckpt.converters.target.topology import Target

SHAPES = ((4611, 1536), (1538, 1536), (5123, 1536), (5123, 1536), (1538, 5123))
"""A layer's matrices (q, k and v; output; gate; up; down); no row count divides by 4 or 8."""

EXPERTS = ((16, 1372, 1500),)
"""Of a layer with experts, as many bytes."""

LAYER = 4 * sum(rows * columns for rows, columns in SHAPES)
"""Bytes."""

SAVE_ONE = """
import sys, torch, torch.distributed.checkpoint as dcp
values = [torch.randn(shape) for shape in eval(sys.argv[2])]
state = {f"{layer}.{at}": value for layer in range(int(sys.argv[3])) for at, value in enumerate(values)}
dcp.save({"momentum": state}, checkpoint_id=sys.argv[1], no_dist=True)
"""

LOAD_AND_SAVE = """
import sys, torch, torch.distributed.checkpoint as dcp
shapes, layers = eval(sys.argv[3]), int(sys.argv[4])
state = {f"{layer}.{at}": torch.empty(shape) for layer in range(layers) for at, shape in enumerate(shapes)}
dcp.load({"momentum": state}, checkpoint_id=sys.argv[1], no_dist=True)
dcp.save({"momentum": state}, checkpoint_id=sys.argv[2], no_dist=True)
"""

EIGHT_RANKS = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp, torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros
def worker(rank, source, to, shapes, layers, meeting):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=8)
    mesh = init_device_mesh("cpu", (8,))
    state = {f"{layer}.{at}": zeros(*shape, device_mesh=mesh, placements=[Shard(0)])
             for layer in range(layers) for at, shape in enumerate(shapes)}
    dcp.load({"momentum": state}, checkpoint_id=source)
    dcp.save({"momentum": state}, checkpoint_id=to)
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(worker, (sys.argv[1], sys.argv[2], eval(sys.argv[3]), int(sys.argv[4]), sys.argv[2] + ".meeting"), 8)
"""

ROWS_4 = ("--mesh", "dp=4")
EP_FSDP = ("--mesh", "fsdp={},ep={}", "--shard", "*=ep:0,fsdp:1")


@dataclass(frozen=True)
class Run:
    """Of a command: wall and processor seconds (children included), and MiB of anonymous memory (0: not looked at)."""

    wall: float
    busy: float
    memory: float = 0.0


Way = Callable[[Path], Run]
"""Makes a directory."""


def command(*arguments: object) -> Run:
    before, begin, peak = os.times(), time.perf_counter(), 0
    process = subprocess.Popen(list(map(str, arguments)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        try:
            code = process.wait(0.02)
            break
        except subprocess.TimeoutExpired:
            runs_of_way = re.search(r"RssAnon:\s*(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            peak = max(peak, int(runs_of_way[1]) if runs_of_way else 0)
    wall, after = time.perf_counter() - begin, os.times()
    if code:
        raise SystemExit(f"{' '.join(map(str, arguments))} failed with {code}")
    if not peak:
        raise SystemExit(f"{' '.join(map(str, arguments))} ended before its memory could be looked at")
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    return Run(wall, busy, peak / 1024)


def reshard(source: Path, to: Path, *options: str) -> Run:
    return command(sys.executable, "-c", "from muonckpt.cli.main import main; main()", "reshard", source, to, *options)


def copy(source: Path, to: Path) -> Run:
    return without_memory(command("sh", "-c", f"cp -r {source} {to} && sync {to}/* {to}"))


def without_memory(run: Run) -> Run:
    """Of a command whose work is done by its children."""
    return Run(run.wall, run.busy)


def floor(job: Job, to: Path) -> Run:
    """The bytes of the elements, from where they lie into files, copied inside the kernel by two threads."""
    begin, busy = time.perf_counter(), time.process_time()
    to.mkdir()
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(lambda file: _copy_ranges(job, file, to), job.files):
            pass
    return Run(time.perf_counter() - begin, time.process_time() - busy)


def _copy_ranges(job, file, to: Path) -> None:
    handle, at = os.open(to / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), 0
    os.posix_fallocate(handle, 0, file.length)
    for output, plan in zip(file.chunks.outputs, file.chunks.plans, strict=True):
        for part in plan.copies.fragments():
            chunks, number = output.locate(part.place.buffer)
            payload = chunks.payload(number)
            source = os.open(job.source.path / payload.file, os.O_RDONLY)
            start, bytes_left = payload.offset + 4 * part.place.offset, 4 * part.box.numel
            while bytes_left:
                moved_bytes = os.copy_file_range(source, handle, bytes_left, start, at)
                start, at, bytes_left = start + moved_bytes, at + moved_bytes, bytes_left - moved_bytes
            os.close(source)
    os.fsync(handle)
    os.close(handle)


def forget(folder: Path) -> None:
    """Give the pages of a directory's files back, as far as no process has them mapped."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def measure(way: Way, to: Path, cold: Path | None = None) -> Run:
    """What was written is removed, and the disk idle, before the next."""
    os.sync()
    if cold is not None:
        forget(cold)
    runs_of_way = way(to)
    shutil.rmtree(to)
    to.with_name(to.name + ".meeting").unlink(missing_ok=True)
    return runs_of_way


def save(folder: Path, name: str, gigabytes: float, shapes: Sequence[tuple[int, ...]], *options: str) -> Path:
    """A checkpoint of stock DCP of about this size, resharded with these options."""
    layers = max(round(gigabytes * 1e9 / LAYER), 1)
    command(sys.executable, "-c", SAVE_ONE, folder / "one", shapes, layers)
    reshard(folder / "one", folder / name, *options)
    shutil.rmtree(folder / "one")
    return folder / name


def bare(source: Path) -> Path:
    """Stock DCP: nothing but CRC-32s tells what the bytes should be."""
    (source / "muonckpt.json").unlink()
    return source


def growth(folder: Path, gigabytes: float, rounds: int) -> None:
    """Warm and cold, at one size."""
    source = bare(save(folder, "source", gigabytes, SHAPES, *ROWS_4))
    ways: dict[str, Way] = {
        "`cp -r` and sync": lambda to: copy(source, to),
        "rows 4 -> 8": lambda to: reshard(source, to, "--mesh", "dp=8"),
    }
    for cold in (None, source):
        runs: dict[str, list[Run]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                runs[name].append(measure(way, folder / "out", cold))
        rows(runs, f"{_gigabytes(source):.2f} GB {'cold' if cold else 'warm'}: ")
    shutil.rmtree(source)


def ways(folder: Path, gigabytes: float, rounds: int) -> None:
    """Rank counts and layouts, at one size."""
    four = bare(save(folder, "four", gigabytes, SHAPES, *ROWS_4))
    owned = save(folder, "owned", gigabytes, SHAPES, *ROWS_4, "--layout", "balanced")
    padded = save(folder, "padded", gigabytes, SHAPES, *ROWS_4, "--layout", "padded-nscost")
    ep = [glob.format(2, 4) for glob in EP_FSDP]
    experts = save(folder, "experts", gigabytes, EXPERTS, *ep)
    job = make_job(muonckpt.open(four), Target({"dp": 8}), (), unchanged, container_of("dcp"))

    def ours(source: Path, *options: str) -> Way:
        return lambda to: reshard(source, to, *options)

    table: dict[str, Way] = {
        "`cp -r` and sync": lambda to: copy(four, to),
        "floor: `copy_file_range` into 8 files": lambda to: floor(job, to),
        "rows 4 -> 8": ours(four, "--mesh", "dp=8"),
        "rows 4 -> 3": ours(four, "--mesh", "dp=3"),
        "rows 4 -> 64": ours(four, "--mesh", "dp=64"),
        "rows 4 -> 8, `--jobs 1`": ours(four, "--mesh", "dp=8", "--jobs", "1"),
        "rows 4 -> flat 8": ours(four, "--mesh", "dp=8", "--layout", "flat"),
        "rows 4 -> owners 8": ours(four, "--mesh", "dp=8", "--layout", "balanced"),
        "rows 4 -> columns 8": ours(four, "--mesh", "dp=8", "--shard", "*=dp:1"),
        "owners 4 -> rows 8": ours(owned, "--mesh", "dp=8"),
        "padded 4 -> compact 8": ours(padded, "--mesh", "dp=8", "--layout", "decoupled-total-order"),
        "experts, EP 4 x FSDP 2 -> EP 2 x FSDP 4": ours(experts, *(glob.format(4, 2) for glob in EP_FSDP)),
    }
    runs: dict[str, list[Run]] = {name: [] for name in table}
    for _ in range(rounds):
        for name, way in table.items():
            runs[name].append(measure(way, folder / "out"))
    rows(runs, f"{_gigabytes(four):.2f} GB: ")
    for source in (four, owned, padded, experts):
        shutil.rmtree(source)


def others(folder: Path, gigabytes: float) -> None:
    """What people use today, once: it takes long."""
    source = bare(save(folder, "source", gigabytes, SHAPES, *ROWS_4))
    (folder / "eight.py").write_text(EIGHT_RANKS)
    layers = round(gigabytes * 1e9 / LAYER)
    table: dict[str, Way] = {
        "`cp -r` and sync": lambda to: copy(source, to),
        "rows 4 -> 8": lambda to: reshard(source, to, "--mesh", "dp=8"),
        "dcp load + save, 1 process, still 1 shard": lambda to: command(
            sys.executable, "-c", LOAD_AND_SAVE, source, to, SHAPES, layers
        ),
        "dcp load + save, 8 gloo processes": lambda to: without_memory(
            command(sys.executable, folder / "eight.py", source, to, SHAPES, layers)
        ),
    }
    rows({name: [measure(way, folder / "out")] for name, way in table.items()}, f"{_gigabytes(source):.2f} GB: ")
    shutil.rmtree(source)


def _gigabytes(source: Path) -> float:
    return sum(file.stat().st_size for file in source.iterdir()) / 1e9


def rows(runs: dict[str, list[Run]], before: str) -> None:
    """The first way is what the others are compared with."""
    plain = next(iter(runs.values()))
    for way, runs_of_way in runs.items():
        ratios = [our_run.wall / copied.wall for our_run, copied in zip(runs_of_way, plain, strict=True)]
        wall, busy = (statistics.median(getattr(run, name) for run in runs_of_way) for name in ("wall", "busy"))
        memory = max(run.memory for run in runs_of_way)
        print(
            f"| {before}{way} | {wall:.2f} | {statistics.median(ratios):.2f} | {min(ratios):.2f} - {max(ratios):.2f} | "
            f"{busy:.2f} | {f'{memory:.0f}' if memory else ''} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="0.25,1,2", help="of the growth table, in GB")
    parser.add_argument("--size", type=float, default=1.6, help="of the other tables, in GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("growth", "ways", "others"))
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory(dir=os.environ.get("MUONCKPT_BENCH_DIR")) as name:
        folder = Path(name)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        print(f"{describe()}; {options.rounds} alternating rounds; load {os.getloadavg()[0]:.1f}\n")
        print("| way | wall s (median) | x cp (median) | x cp (min - max) | CPU s (median) | memory MiB (most) |")
        print("|---|---|---|---|---|---|", flush=True)
        if options.only in (None, "growth"):
            for size in map(float, options.sizes.split(",")):
                growth(folder, size, options.rounds)
        if options.only in (None, "ways"):
            ways(folder, options.size, options.rounds)
        if options.only in (None, "others"):
            others(folder, options.size)
        print(f"\nload {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
