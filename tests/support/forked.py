"""Scripts as processes of their own that need not import torch: forked from the server of `support.workers`."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support import workers


class Scripts:
    """Workers of one run, each the same script; ended with the block.

    Args:
        folder: where their output is kept.
        variables: of the environment of each.
        command: the script and its arguments.
        timeout: in seconds, how long to wait for an end.
    """

    def __init__(
        self, folder: Path, variables: Sequence[Mapping[str, str]], *command: object, timeout: float = 120
    ) -> None:
        self.timeout = timeout
        self.output = [(folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(len(variables))]
        words = list(map(str, command))
        self.processes = [
            workers.context().Process(target=_run, args=(words, dict(variables_of_rank), *map(str, files)))
            for variables_of_rank, files in zip(variables, self.output, strict=True)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Scripts:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def ended(self, ranks: Sequence[int]) -> list[tuple[int | None, str, str]]:
        """Exit code, standard output and standard error of these workers, when they have ended."""
        for rank in ranks:
            self.processes[rank].join(self.timeout)
        return [(self.processes[rank].exitcode, *(file.read_text() for file in self.output[rank])) for rank in ranks]


def printed(folder: Path, *command: object, timeout: float = 120) -> str:
    """What one script prints, with the variables of this process; its error fails the test."""
    with Scripts(folder, [os.environ], *command, timeout=timeout) as started:
        [(code, out, err)] = started.ended([0])
    assert code == 0, err[-6000:]
    return out


def alone(function: Callable[..., Any], *args: Any, timeout: float) -> Any:
    """What a function at the top of a module returns in a process of its own, in which no other test has run."""
    receiver, sender = workers.context().Pipe(duplex=False)
    process = workers.context().Process(target=_send, args=(sender, function, args), daemon=True)
    process.start()
    sender.close()
    try:
        assert receiver.poll(timeout), f"{function.__name__} has not ended within {timeout:.0f} s"
        result, error = receiver.recv()
    finally:
        process.kill()
        process.join()
    assert not error, error
    return result


def _send(sender: Connection, function: Callable[..., Any], args: Sequence[Any]) -> None:
    try:
        sender.send((function(*args), ""))
    except BaseException:
        sender.send((None, traceback.format_exc()))


def _run(words: list[str], variables: dict[str, str], out: str, err: str) -> None:
    os.environ |= variables
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
