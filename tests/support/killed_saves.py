"""A script: processes that save to a series are killed, or prune while another restores; prints what was seen.

    killed_saves.py FOLDER

Prints JSON: what the folder holds after each act, what `latest` gives, and how often a reader restored.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import muonckpt

warnings.filterwarnings("ignore", message="torch.distributed is disabled")

DAY = timedelta(days=1, seconds=1)


def state(step: int) -> dict[str, Any]:
    return {f"w{number}": torch.full((64,), float(step)) for number in range(8)}


def restored(series: muonckpt.Series) -> int | None:
    """The step that was restored, which all values are."""
    template = state(-1)
    found = series.restore(template)
    assert found is None or all(torch.equal(template[key], value) for key, value in state(found.step).items())
    return found and found.step


def names(folder: Path) -> list[str]:
    """What lies in a folder, but for the records of resumes and verifications."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in ("resumes", ".muonckpt-verified"))


def killed_at(event: str, name: str, number: int = signal.SIGKILL) -> Callable[[], None]:
    """Have this process killed, or sent another signal, when it is about to do something to a path with this ending."""

    def hook(happens: str, arguments: tuple[object, ...]) -> None:
        if happens == event and str(arguments[0]).endswith(name):
            os.kill(os.getpid(), number)

    return lambda: sys.addaudithook(hook)


def forked(act: Callable[[], object]) -> int:
    child = os.fork()
    if not child:
        act()
        os._exit(0)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def save(folder: Path, step: int, first: Callable[[], None] = lambda: None) -> None:
    first()
    muonckpt.Series(folder, keep_last=1).save(step, state(step))


def seen(folder: Path, status: int) -> list[Any]:
    latest = muonckpt.Series(folder).latest()
    return [status, sorted(entry.name for entry in folder.iterdir()), latest and latest.step]


def age(folder: Path, seconds: float) -> None:
    for place in (folder, *folder.iterdir()):
        changed = place.stat().st_mtime - seconds
        os.utime(place, (changed, changed))


def main(folder: Path) -> None:
    kills, acts = folder / "kills", []
    acts.append(seen(kills, ended(forked(lambda: save(kills, 1)))))
    acts.append(seen(kills, ended(forked(lambda: save(kills, 2, killed_at("os.rename", ".tmp"))))))
    acts.append(seen(kills, ended(forked(lambda: save(kills, 3, killed_at("shutil.rmtree", ".removing"))))))
    acts.append(seen(kills, ended(forked(lambda: save(kills, 4)))))

    undisturbed = folder / "alone" / "out"

    def single(number: int) -> None:
        killed_at("open", ".metadata", number)()
        muonckpt.save(state(1), undisturbed)

    listed = []
    ended(forked(lambda: single(signal.SIGKILL)))
    listed.append(sorted(entry.name for entry in undisturbed.parent.iterdir()))
    stopped = forked(lambda: single(signal.SIGSTOP))
    os.waitpid(stopped, os.WUNTRACED)
    listed.append(sorted(entry.name for entry in undisturbed.parent.iterdir()))
    muonckpt.save(state(2), undisturbed)
    listed.append(sorted(entry.name for entry in undisturbed.parent.iterdir()))
    os.kill(stopped, signal.SIGCONT)
    ended(stopped)
    listed.append(sorted(entry.name for entry in undisturbed.parent.iterdir()))

    save(folder / "read", 0)
    writer = forked(lambda: [save(folder / "read", step) for step in range(1, 25)])
    restored = []
    while not restored or restored[-1] < 24:
        template = state(-1)
        newest = muonckpt.Series(folder / "read").restore(template)
        values = {float(value) for tensor in template.values() for value in tensor.unique()}
        assert newest is not None and values == {float(newest.step)}, (newest, values)
        restored.append(newest.step)
    print(json.dumps({"acts": acts, "restored": restored, "writer": ended(writer), "listed": listed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
