"""The command line, as a process or in this one, for tests of it."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from warnings import catch_warnings, filterwarnings

import click
import pytest

from muonckpt.cli.lab import lab_command
from muonckpt.cli.main import COMMANDS as AT_THE_DOOR, cli as group, run

COMMAND = [sys.executable, "-c", "from muonckpt.cli.main import main; main()"]
COMMANDS = ("inspect", "verify", "reshard")
LINES = [*(name for name in AT_THE_DOOR if name != "lab"), *(f"lab {name}" for name in lab_command.commands)]
"""All commands, with the group in which they are."""


def command_of(line: str) -> click.Command:
    """The command of one of `LINES`."""
    command = group
    for word in line.split():
        command = command.get_command(click.Context(command), word)
    return command


def cli(*arguments: object, **how) -> subprocess.CompletedProcess[str]:
    how = {"capture_output": True, "text": True, "timeout": 600} | how
    return subprocess.run([*COMMAND, *map(str, arguments)], **how)


def called(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The same in this process: without what starting one, signals and terminals add."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err, catch_warnings():
        filterwarnings("default", category=UserWarning)  # which a command prints as a note
        code = run(list(map(str, arguments)))
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


class Terminal(io.StringIO):
    """Text that is written to a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(width: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """As `called`, with both outputs on a terminal of so many columns; the text keeps its colours."""
    with redirect_stdout(Terminal()) as out, redirect_stderr(Terminal()) as err, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        patch.setenv("TERM", "xterm-256color")
        code = run(list(map(str, arguments)))
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def without_colour(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def arguments_of(command: str, source: Path, tmp_path: Path) -> list[object]:
    return [command, source, *((tmp_path / "out", "--mesh", "dp=2") if command == "reshard" else ())]


def without_progress(stderr: str) -> str:
    """What a command says besides how far it is, which it says when a second is over: on a busy machine, always."""
    return re.sub(r"^.*\(\d+ %\)\n|^took .*\n", "", stderr, flags=re.MULTILINE)


def is_one_paragraph(stderr: str) -> bool:
    """One line for whoever reads it, and no traceback."""
    return bool(re.fullmatch(r"muonckpt: [^\n]+\n", without_progress(stderr)))
