"""A script: stops an export at each of its steps that change the disk, and prints what it saw.

    stopped_export.py kill|interrupt|error SOURCE FOLDER FORMAT [SHARD_BYTES]

Prints a JSON list with an entry per step: the exit status of the stopped run; whether the destination was then absent
or whole; whether a new run made it byte for byte that of a run that was not stopped; what the stopped run left behind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from stopped import Steps

from muonckpt.converters.export import plan_export, run
from muonckpt.errors import DestinationError


def contents(path: Path) -> dict[str, bytes] | None:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in files} if path.exists() else None


def main(how: str, source: Path, folder: Path, target: str, *shard_bytes: str) -> None:
    job = plan_export(source, target, shard_bytes=int(shard_bytes[0]) if shard_bytes else None)
    steps = Steps(how)
    os.link, os.rmdir = steps._counted(os.link), steps._counted(os.rmdir)

    def export(to: Path) -> int:
        try:
            run(job, to)
        except KeyboardInterrupt:
            return 130
        except DestinationError:
            return 4
        return 0

    assert export(folder / "out") == 0
    whole, seen, out = contents(folder / "out"), [], folder / "out"
    remove(out)
    for stop_at in range(1, steps.done + 1):
        steps.done, steps.stop_at = 0, stop_at
        child = os.fork()
        if not child:
            os._exit(export(out))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        steps.stop_at = 0
        first = contents(out)
        left = [entry.name for entry in folder.iterdir() if entry != out]
        if first is None:
            assert export(out) == 0
        seen.append([status, first in (None, whole), contents(out) == whole, left])
        for entry in folder.iterdir():
            remove(entry)
    print(json.dumps(seen))


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell starts with it ignored
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
