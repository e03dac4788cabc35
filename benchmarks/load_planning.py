"""What loading many small tensors costs the ranks: muonckpt against plain DCP, from the same checkpoint.

Ranks are threads (`rank_threads`); times are those of a rank's thread on the processor for the whole load, from opening
the checkpoint to the last element; of another rank, the mean of all but the coordinator.  Bytes exchanged are those
that the coordinator gets and sends, pickled; files opened, reads and bytes read are those of all ranks, divided by
their number, as the system counts them.  Every rank has a shard of every tensor, as when they were saved, and every
load is into zeros and then compared.  Three rows of figures: DCP of its own checkpoint, muonckpt of the same
checkpoint, and muonckpt of its own.  The first round warms up.  The programs alternate; the table shows medians.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from machine import at_least, describe, system_reads
from rank_threads import Traffic, asked, in_threads, shards

import muonckpt

PROGRAMS = ("dcp", "stock", "own")
"""Plain DCP; muonckpt, of a checkpoint of plain DCP; muonckpt, of a checkpoint of muonckpt."""

opened: Counter[str] = Counter()
"""Files that were opened in folders of checkpoints, by folder."""


def count_opening(event: str, args: tuple[object, ...]) -> None:
    """Count what is opened by Python; an audit hook."""
    if event == "open" and isinstance(args[0], str | Path):
        opened[Path(args[0]).parent.name] += 1


def measure(
    tensors: int, ranks: int, rounds: int
) -> tuple[dict[str, list[dict[int, float]]], dict[str, tuple[float, ...]]]:
    """Of each program in each round, the seconds of each rank; and opened files, reads, KB read, KB exchanged."""
    times_of_rounds: dict[str, list[dict[int, float]]] = {
        program: [{} for _ in range(rounds + 1)] for program in PROGRAMS
    }
    counts: dict[str, tuple[float, ...]] = {}

    def loader(rank: int, folder: Path, traffic: Traffic) -> None:
        dcp.save(state := shards(rank, ranks, tensors, 0), checkpoint_id=folder / "stock")
        muonckpt.save(state, folder / "own")
        for number in range(rounds + 2):
            counting = number == rounds + 1
            for program in PROGRAMS if number % 2 else reversed(PROGRAMS):
                into = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
                place = folder / ("own" if program == "own" else "stock")
                dist.barrier()
                traffic.counted(program if counting else None)
                if rank == 0:
                    opened.clear()
                    before = system_reads()
                dist.barrier()
                begin = time.thread_time()
                if program == "dcp":
                    dcp.load(into, checkpoint_id=place)
                else:
                    muonckpt.load(into, place)
                seconds = time.thread_time() - begin
                dist.barrier()
                if rank == 0 and counting:
                    reads, read = (
                        count_now - count_before for count_now, count_before in zip(system_reads(), before, strict=True)
                    )
                    state_bytes = ranks * sum(tensor.to_local().nbytes for tensor in state.values())
                    files = at_least(ranks, opened[place.name], "files opened")
                    counts[program] = (
                        files / ranks,
                        reads / ranks,
                        at_least(state_bytes, read, "bytes read") / 1e3 / ranks,
                    )
                traffic.counted(None)
                if not counting:
                    times_of_rounds[program][number][rank] = seconds
                for key, tensor in into.items():
                    assert torch.equal(tensor.to_local(), state[key].to_local())
                dist.barrier()

    traffic = in_threads(ranks, loader)
    every = {program: (*counts[program], traffic.bytes[program] / 1e3) for program in PROGRAMS}
    return {program: rounds[1:] for program, rounds in times_of_rounds.items()}, every


def main() -> None:
    sizes, count = asked(__doc__)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    gc.disable()
    sys.addaudithook(count_opening)
    print(f"{describe()}; {count} alternating round{'s' * (count > 1)}; DCP / muonckpt of the same / of its own\n")
    print(
        "| tensors | ranks | coordinator, ms | to DCP | another rank, ms | to DCP | files opened by a rank | reads of "
        "a rank | KB read by a rank | KB exchanged |"
    )
    print("|---" * 10 + "|")
    for tensors, ranks in sizes:
        rounds, counts = measure(tensors, ranks, count)
        gc.collect()
        cells = [str(tensors), str(ranks)]
        for is_ours in (True, False):
            ms = {
                program: statistics.median(
                    1e3 * statistics.mean(seconds for rank, seconds in of.items() if (rank == 0) == is_ours)
                    for of in rounds[program]
                )
                for program in PROGRAMS
            }
            cells.append(" / ".join(f"{ms[program]:.0f}" for program in PROGRAMS))
            cells.append(" / ".join(f"{ms[program] / ms['dcp']:.2f}" for program in PROGRAMS[1:]))
        cells += [" / ".join(f"{counts[program][kind]:.0f}" for program in PROGRAMS) for kind in range(4)]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
