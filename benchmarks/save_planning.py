"""What planning and describing a save costs the ranks: muonckpt against plain DCP, with many small tensors.

Ranks are threads (`rank_threads`); times are those of a rank's thread on the processor.  Planning is all before the
first file is written, the whole is the save without writing; of another rank, the mean of all but the coordinator.
Bytes are those that the coordinator gets and sends, pickled.  Every rank has a shard of every tensor.  Every save is of
the same structure and other values; garbage is collected between the rows, as one rank's collection would go through
the objects of all; the first round warms up.  The programs alternate; the table shows medians.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from machine import describe
from rank_threads import Traffic, asked, in_threads, shards
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from muonckpt.checkpoint import saving
from muonckpt.checkpoint.live_state import LiveState
from muonckpt.checkpoint.saving import AgreedPlans, SaveProgress, run_save
from muonckpt.store.io.location import location

PROGRAMS = ("dcp", "again", "later")
"""Plain DCP; muonckpt when it plans again, and when the ranks have agreed on a plan before."""

Seconds = tuple[float, float]
"""Of a rank: planning, and the whole."""

marks = threading.local()


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


saving.write_items = mark(saving.write_items)


def measure(tensors: int, ranks: int, rounds: int) -> tuple[dict[str, list[dict[int, Seconds]]], dict[str, int]]:
    """Of each program in each round, the seconds of each rank; and the bytes of one save."""
    times_of_rounds: dict[str, list[dict[int, Seconds]]] = {
        program: [{} for _ in range(rounds + 1)] for program in PROGRAMS
    }

    def saver(rank: int, folder: Path, traffic: Traffic) -> None:
        plans = AgreedPlans()
        for number in range(rounds + 2):
            counting = number == rounds + 1
            for program in PROGRAMS if number % 2 else reversed(PROGRAMS):
                state, place = shards(rank, ranks, tensors, number), folder / f"{program}-{number}"
                dist.barrier()
                traffic.counted(program if counting else None)
                begin = time.thread_time()
                if program == "dcp":
                    dcp.save(state, storage_writer=MarkedWriter(place, sync_files=False), planner=DefaultSavePlanner())
                else:
                    agreed_plans = plans if program == "later" else AgreedPlans()
                    live = partial(LiveState.of, state, "to save")
                    run_save(live, location(place, ValueError), {}, None, agreed_plans, SaveProgress())
                whole = time.thread_time() - begin - marks.writing
                traffic.counted(None)
                if not counting:
                    times_of_rounds[program][number][rank] = marks.planned - begin, whole
                dist.barrier()

    traffic = in_threads(ranks, saver)
    return {program: rounds[1:] for program, rounds in times_of_rounds.items()}, dict(traffic.bytes)


def main() -> None:
    sizes, count = asked(__doc__)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    gc.disable()
    print(f"{describe()}; {count} alternating round{'s' * (count > 1)}; DCP / planned again / later saves\n")
    print(
        "| tensors | ranks | coordinator, planning ms | to DCP | coordinator, whole ms | to DCP | another rank, whole "
        "ms | KB exchanged |"
    )
    print("|---" * 8 + "|")
    for tensors, ranks in sizes:
        rounds, sent = measure(tensors, ranks, count)
        gc.collect()
        cells, other_counts = [str(tensors), str(ranks)], {}
        for kind in range(2):
            ms = {program: statistics.median(1e3 * of[0][kind] for of in rounds[program]) for program in PROGRAMS}
            cells.append(" / ".join(f"{ms[program]:.0f}" for program in PROGRAMS))
            cells.append(" / ".join(f"{ms[program] / ms['dcp']:.2f}" for program in PROGRAMS[1:]))
        for program in PROGRAMS:
            means = [statistics.mean(whole for rank, (_, whole) in of.items() if rank) for of in rounds[program]]
            other_counts[program] = 1e3 * statistics.median(means)
        cells.append(" / ".join(f"{other_counts[program]:.0f}" for program in PROGRAMS))
        print(
            f"| {' | '.join([*cells, ' / '.join(f'{sent[program] / 1e3:.0f}' for program in PROGRAMS)])} |", flush=True
        )


if __name__ == "__main__":
    main()
