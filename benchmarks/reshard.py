"""Resharding momentum offline, 4 -> 8 uneven row shards and other ways: ours, a plain copy, and what people use today.

    reshard.py [--quick]

All ways alternate in one run; every ratio is to the ``cp -r`` and sync of the same round; the table shows medians,
with the smallest and largest ratio.  Every way ends with its bytes on the disk, and starts as a command of its own,
imports included.  Reads are warm.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from machine import describe

from muonckpt.converters.job import Job, make_job
from muonckpt.converters.target import Target

SHAPES = ((4611, 1536), (1538, 1536), (5123, 1536), (5123, 1536), (1538, 5123))
"""A layer's matrices (q, k and v; output; gate; up; down); no row count divides by 4 or 8."""

FULL = (12, 5, 1)
QUICK = (2, 3, 1)
"""Layers of 132 MB in float32, rounds, and in how many of these the slow ways take part."""

SAVE_ONE = """
import sys, torch, torch.distributed.checkpoint as dcp
shapes, layers = eval(sys.argv[2]), int(sys.argv[3])
state = {f"{layer}.{at}": torch.randn(shape) for layer in range(layers) for at, shape in enumerate(shapes)}
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


def command(*arguments: object) -> float:
    """Seconds of processor time of a command and its children."""
    before = os.times()
    subprocess.run(list(map(str, arguments)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def reshard(source: Path, to: Path, *options: str) -> float:
    start = "from muonckpt.cli.main import main; main()"
    return command(sys.executable, "-c", start, "reshard", source, to, *options)


def copy(source: Path, to: Path) -> float:
    return command("sh", "-c", f"cp -r {source} {to} && sync {to}/* {to}")


def floor(job: Job, to: Path) -> float:
    """The bytes of the elements, from where they lie into 8 files, copied inside the kernel by two threads."""
    before = time.process_time()
    to.mkdir()
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(lambda file: _copy_ranges(job, file, to), job.files):
            pass
    return time.process_time() - before


def _copy_ranges(job, file, to: Path) -> None:
    handle, at = os.open(to / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), 0
    os.posix_fallocate(handle, 0, file.length)
    for item in file.items:
        for part in item.copies:
            chunk = item.wanted.chunks[part.source.buffer]
            source = os.open(job.source / chunk.payload.file, os.O_RDONLY)
            start, left = chunk.payload.offset + 4 * part.source.offset, 4 * part.box.numel
            while left:
                moved = os.copy_file_range(source, handle, left, start, at)
                start, at, left = start + moved, at + moved, left - moved
            os.close(source)
    os.fsync(handle)
    os.close(handle)


def measure(way: Callable[[Path], float], to: Path) -> tuple[float, float]:
    """Wall and processor seconds; what was written is removed, and the disk idle, before the next."""
    os.sync()
    begin = time.perf_counter()
    busy = way(to)
    wall = time.perf_counter() - begin
    shutil.rmtree(to)
    to.with_name(to.name + ".meeting").unlink(missing_ok=True)
    return wall, busy


def main() -> None:
    layers, rounds, slow_rounds = QUICK if "--quick" in sys.argv else FULL
    with tempfile.TemporaryDirectory(dir=os.environ.get("MUONCKPT_BENCH_DIR")) as name:
        folder = Path(name)
        (folder / "scripts").mkdir()
        eight = folder / "scripts" / "eight.py"
        eight.write_text(EIGHT_RANKS)
        command(sys.executable, "-c", SAVE_ONE, folder / "one", SHAPES, layers)
        source, size = folder / "four", (SHAPES, layers)
        reshard(folder / "one", source, "--mesh", "dp=4")
        shutil.rmtree(folder / "one")
        (source / "muonckpt.json").unlink()  # stock DCP: nothing but CRC-32s tells what the bytes should be
        job = make_job(source, Target({"dp": 8}))
        fast: dict[str, Callable[[Path], float]] = {
            "`cp -r` and sync": lambda to: copy(source, to),
            "floor: `copy_file_range` into 8 files": lambda to: floor(job, to),
            "rows 4 -> 8": lambda to: reshard(source, to, "--mesh", "dp=8"),
            "rows 4 -> 8, `--verify`": lambda to: reshard(source, to, "--mesh", "dp=8", "--verify"),
            "rows 4 -> 8, 1 thread": lambda to: reshard(source, to, "--mesh", "dp=8", "--jobs", "1"),
            "rows 4 -> columns 8": lambda to: reshard(source, to, "--mesh", "dp=8", "--shard", "*=dp:1"),
            "rows 4 -> owners 8": lambda to: reshard(source, to, "--mesh", "dp=8", "--layout", "owned"),
            "rows 4 -> flat 8": lambda to: reshard(source, to, "--mesh", "dp=8", "--layout", "flat"),
        }
        slow: dict[str, Callable[[Path], float]] = {
            "dcp load + save, 1 process, still 1 shard": lambda to: command(
                sys.executable, "-c", LOAD_AND_SAVE, source, to, *size
            ),
            "dcp load + save, 8 gloo processes": lambda to: command(sys.executable, eight, source, to, *size),
        }
        print(f"{describe()}; {job.payload_to_write / 1e9:.2f} GB, {rounds} alternating rounds", flush=True)
        seconds: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for number in range(rounds):
            for way, run in {**fast, **(slow if number < slow_rounds else {})}.items():
                seconds[way].append(measure(run, folder / "out"))
    report(seconds)


def report(seconds: dict[str, list[tuple[float, float]]]) -> None:
    first = next(iter(seconds))
    print("\n| way | wall s (median) | x cp (median) | x cp (min - max) | CPU s (median) |\n|---|---|---|---|---|")
    for way, found in seconds.items():
        ratios = [mine[0] / plain[0] for mine, plain in zip(found, seconds[first], strict=False)]
        wall, busy = (statistics.median(column) for column in zip(*found, strict=True))
        spread = f"{min(ratios):.2f} - {max(ratios):.2f}"
        print(f"| {way} | {wall:.2f} | {statistics.median(ratios):.2f} | {spread} | {busy:.2f} |")


if __name__ == "__main__":
    main()
