"""The command line as a process, for tests of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-c", "from muonckpt.cli.main import main; main()"]
COMMANDS = ("inspect", "verify", "reshard")


def cli(*arguments: object, **how) -> subprocess.CompletedProcess[str]:
    how = {"capture_output": True, "text": True, "timeout": 60} | how
    return subprocess.run([*COMMAND, *map(str, arguments)], **how)


def arguments_of(command: str, source: Path, tmp_path: Path) -> list[object]:
    return [command, source, *((tmp_path / "out", "--mesh", "dp=2") if command == "reshard" else ())]


def is_one_paragraph(stderr: str) -> bool:
    """One line for whoever reads it, and no traceback."""
    return bool(re.fullmatch(r"muonckpt: [^\n]+\n", stderr))
