"""A script: one of three ranks is killed while all save to a series; prints what the others and the series say.

    lost_ranks.py FOLDER URL

Prints JSON: of each case what each survivor got, within how many seconds, and what is there afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import warnings
from collections import OrderedDict
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

import muonckpt
from muonckpt.store.io.location import is_there, location
from muonckpt.store.io.publish import CLAIM

warnings.filterwarnings("ignore")

RANKS = 3


class Deadly:
    """Ends the process when it is written; before that it is pickled twice, to be checked and compared."""

    def __init__(self) -> None:
        self.looks = 2

    def __deepcopy__(self, memo: Any) -> Deadly:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        if not self.looks:
            os.kill(os.getpid(), signal.SIGKILL)
        self.looks -= 1
        return OrderedDict, ()


def state(rank: int, step: int) -> dict[str, Any]:
    return {f"of rank {rank}": torch.full((64,), float(step)), "same": torch.full((8,), float(step))}


def at_publish(happens: str, arguments: tuple[object, ...]) -> None:
    if happens == "os.rename" and str(arguments[0]).endswith(".tmp"):
        os.kill(os.getpid(), signal.SIGKILL)


def saver(rank: int, store: str, place: str, victim: int, manner: str, messages: Any) -> None:
    """Saves a step; then all save another one, in which the victim dies; then a survivor tries once more."""
    timeout = timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timeout)
    series = muonckpt.Series(place)
    series.async_save(1, state(rank, 1)).result()
    doomed = state(rank, 2)
    if rank == victim and manner == "writing":
        doomed[f"deadly {rank}"] = Deadly()
    if rank == victim and manner == "publishing":
        sys.addaudithook(at_publish)
    received = []
    saving = series.async_save(2, doomed)
    for again in (saving.result, lambda: muonckpt.async_save(state(rank, 3), f"{place}/third").result()):
        try:
            again()
        except muonckpt.LostRankError as error:
            received.append(str(error))
    messages.put((rank, received))
    messages.close()
    messages.join_thread()
    os._exit(0)  # nobody is left to say goodbye to


def case(place: str, victim: int, manner: str) -> dict[str, Any]:
    context = get_context("fork")
    messages = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=saver, args=(rank, f"{folder}/store", place, victim, manner, messages))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        survivors = sorted(messages.get(timeout=200) for _ in range(RANKS - 1))
        for process in ranks:
            process.join()
    return {"survivors": survivors, "codes": [process.exitcode for process in ranks]}


def main(folder: str, url: str) -> None:
    import s3fs  # noqa: F401  # once, and not by each of the ranks that are forked

    cases = [(folder, 0, "publishing"), (url, 1, "writing")]
    outcomes = [case(*arguments) for arguments in cases]
    for (place, _, _), answer in zip(cases, outcomes, strict=True):
        series = muonckpt.Series(place)
        template = {key: torch.zeros_like(value) for rank in range(RANKS) for key, value in state(rank, 0).items()}
        answer["restored"] = series.restore(template).step
        answer["values"] = sorted({float(value) for tensor in template.values() for value in tensor})
        answer["claimed"] = is_there(location(place) / "step-00000002" / CLAIM)
        answer["next"] = series.save(2, template).path.removeprefix(place)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
