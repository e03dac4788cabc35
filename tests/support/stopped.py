"""A script: stops a reshard at each step that changes the disk, begins it again, and prints what it saw.

    stopped.py kill|interrupt|error SOURCE FOLDER OPTION...

The options are those of `convert`.

Prints a JSON list with an entry per step: the exit status of the stopped run; whether the destination was then absent
or whole; whether unfinished work was left; the exit code of the next run (None where there was nothing to do);
whether the destination is now byte for byte that of a run that was not stopped; what the folder holds.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muonckpt.cli.main import run
from support.trees import tree


class Steps:
    """Counts the calls that change the disk, and stops this process at one of them (never at number 0)."""

    def __init__(self, manner: str) -> None:
        self.manner, self.steps_done, self.stop_at = manner, 0, 0
        for name in ("mkdir", "pwrite", "fsync", "posix_fallocate", "rename", "replace", "unlink"):
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self.steps_done += 1
            if self.steps_done == self.stop_at:
                if self.manner == "error":
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                os.kill(os.getpid(), signal.SIGKILL if self.manner == "kill" else signal.SIGINT)
            return real(*args, **kwargs)

        return step


def main(manner: str, source: str, folder: Path, *options: str) -> None:
    def reshard(to: Path) -> int:
        return run(["reshard", source, str(to), "--jobs", "1", *options])

    steps = Steps(manner)
    os.link, os.rmdir = steps._counted(os.link), steps._counted(os.rmdir)
    assert reshard(folder / "whole") == 0
    whole, codes, out = tree(folder / "whole"), [], folder / "out"
    for stop_at in range(1, steps.steps_done + 1):
        steps.steps_done, steps.stop_at = 0, stop_at
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
            os._exit(reshard(out))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        steps.stop_at = 0
        first, unfinished = tree(out), any(folder.glob(".out.*.tmp"))
        again = reshard(out) if first is None else None
        names_left = [entry.name for entry in folder.iterdir()]
        codes.append([status, first in (None, whole), unfinished, again, tree(out) == whole, names_left])
        for entry in set(folder.iterdir()) - {folder / "whole"}:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    print(json.dumps(codes))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell starts with it ignored
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
