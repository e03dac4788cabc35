"""What planning and describing a save costs the coordinator: muonckpt against plain DCP, with many small tensors.

    save_planning.py [--quick]

Ranks are threads of one process with a process group of their own each, so both programs run as they are, collectives
too.  Times are those of the coordinator's thread on the processor, so other ranks and waiting do not count: planning is
all before the first file is written, the whole is the save without writing.  Bytes are those that the coordinator gets
and sends, pickled.  Of each rank every tensor is a shard; with more ranks tensors have more rows.  Every save is of the
same structure and other values; garbage is collected between the rows, as one rank's collection would go through the
objects of all; the first round warms up.  The programs alternate; a ratio is taken in every round, and the table shows
medians.
"""

from __future__ import annotations

import gc
import os
import pickle
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from machine import describe
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

from muonckpt.checkpoint import joint_save
from muonckpt.checkpoint.dcp_writer import SaveProgress
from muonckpt.checkpoint.joint_save import AgreedPlans, JointSave
from muonckpt.store.io.location import location

QUICK = "--quick" in sys.argv
SIZES = [(100, 8)] if QUICK else [(100, 8), (400, 8), (100, 16), (100, 32), (100, 64)]
ROUNDS = 2 if QUICK else 3
PROGRAMS = ("dcp", "anew", "later")
"""Plain DCP; muonckpt when it plans anew, and when the ranks have agreed on a plan before."""

marks = threading.local()
traffic: defaultdict[str, int] = defaultdict(int)
_lock = threading.Lock()


def mark(function: Callable) -> Callable:
    """Note when this thread's planning ends; and leave writing out of the time of the whole."""

    def marked(*args, **kwargs):
        begin = marks.planned = time.thread_time()
        result = function(*args, **kwargs)
        marks.writing = time.thread_time() - begin
        return result

    return marked


class MarkedWriter(dcp.FileSystemWriter):
    write_data = mark(dcp.FileSystemWriter.write_data)


joint_save.write_items = mark(joint_save.write_items)


def counted() -> None:
    """Count what collectives of objects carry from now on."""

    def counting(function: Callable, sizes: Callable[..., int]) -> Callable:
        def call(*args, **kwargs):
            if getattr(marks, "who", None):
                with _lock:
                    traffic[marks.who] += sizes(*args, **kwargs)
            return function(*args, **kwargs)

        return call

    def dealt(scatter_object_output_list, scatter_object_input_list=None, **_) -> int:
        return sum(len(pickle.dumps(each)) for each in scatter_object_input_list or ())

    def told(object_list, **_) -> int:
        return (dist.get_world_size() - 1) * len(pickle.dumps(object_list[0])) if dist.get_rank() == 0 else 0

    dist.gather_object = counting(dist.gather_object, lambda obj, **_: len(pickle.dumps(obj)))
    dist.scatter_object_list = counting(dist.scatter_object_list, dealt)
    dist.broadcast_object_list = counting(dist.broadcast_object_list, told)


def state(rank: int, ranks: int, tensors: int, step: int) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (ranks,))
    shape, stride = torch.Size((2 * ranks, 4)), (4, 1)
    return {
        f"layers.{number}.momentum_buffer": DTensor.from_local(
            torch.full((2, 4), float(step + number + rank)), mesh, [Shard(0)], run_check=False, shape=shape,
            stride=stride,
        )
        for number in range(tensors)
    }  # fmt: skip


def saver(rank: int, ranks: int, tensors: int, folder: Path, found: dict[str, list[tuple[float, float]]]) -> None:
    plans = AgreedPlans()
    for number in range(ROUNDS + 2):
        counting = number == ROUNDS + 1
        dist.barrier()
        if counting and rank == 0:
            counted()
        for who in PROGRAMS if number % 2 else reversed(PROGRAMS):
            held, place = state(rank, ranks, tensors, number), folder / f"{who}-{number}"
            dist.barrier()
            marks.who = who if counting else None
            begin = time.thread_time()
            if who == "dcp":
                dcp.save(held, storage_writer=MarkedWriter(place, sync_files=False), planner=DefaultSavePlanner())
            else:
                kept = plans if who == "later" else AgreedPlans()
                JointSave(location(place, ValueError), {}, None, kept, SaveProgress()).run(lambda held=held: held)
            whole = time.thread_time() - begin - marks.writing
            marks.who = None
            if rank == 0 and not counting:
                found[who].append((marks.planned - begin, whole))
            dist.barrier()


def measure(tensors: int, ranks: int) -> tuple[dict[str, list[tuple[float, float]]], dict[str, int]]:
    """Of each program the coordinator's seconds (planning, whole) of each save, and the bytes of the last."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store, errors = dist.HashStore(), []
    plain = dist.gather_object, dist.scatter_object_list, dist.broadcast_object_list
    traffic.clear()

    def thread(rank: int, folder: Path) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            saver(rank, ranks, tensors, folder, found)
            dist.destroy_process_group()
        except BaseException as error:
            errors.append(error)
            raise

    with tempfile.TemporaryDirectory(dir=os.environ.get("MUONCKPT_BENCH_DIR")) as folder:
        threads = [threading.Thread(target=thread, args=(rank, Path(folder)), daemon=True) for rank in range(ranks)]
        for each in threads:
            each.start()
        while any(each.is_alive() for each in threads) and not errors:
            time.sleep(0.1)
    dist.gather_object, dist.scatter_object_list, dist.broadcast_object_list = plain
    _uninstall_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return found, dict(traffic)


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    gc.disable()
    print(f"{describe()}; {ROUNDS} alternating rounds\n")
    print(
        "| tensors of a rank | ranks | planning ms: DCP | planned anew | later saves | later / DCP | whole ms: DCP | "
        "planned anew | later saves | later / DCP | KB exchanged: DCP | planned anew | later saves |"
    )
    print("|---" * 13 + "|")
    for tensors, ranks in SIZES:
        found, sent = measure(tensors, ranks)
        gc.collect()
        cells = [str(tensors), str(ranks)]
        for kind in range(2):
            times = {who: [each[kind] for each in found[who][1:]] for who in PROGRAMS}
            ratios = [ours / theirs for ours, theirs in zip(times["later"], times["dcp"], strict=True)]
            cells += [f"{1e3 * statistics.median(times[who]):.1f}" for who in PROGRAMS]
            cells += [f"{statistics.median(ratios):.2f}"]
        print(f"| {' | '.join([*cells, *(f'{sent[who] / 1e3:.0f}' for who in PROGRAMS)])} |", flush=True)


if __name__ == "__main__":
    main()
