"""What README.md and the guides show is run: Python blocks in order, console blocks with their output compared.

In expected output a line of `…` stands for any number of lines.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import called

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs" / "guide").rglob("*.md"))]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[tuple[str, str]]:
    """(command, expected output) of a console block."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


def matches(expected: str, found: str) -> bool:
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "…" else re.escape(line) + r"\n" for line in expected.strip().splitlines()
    )
    return re.fullmatch(pattern, found.strip() + "\n") is not None


def installed(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The program as a shell finds it."""
    program = Path(sys.executable).with_name("muonckpt")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_example_runs_and_prints_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    ran = 0
    for language, block in BLOCK.findall(page.read_text()):
        if language == "python":
            exec(compile(block, page.name, "exec"), names)
            ran += 1
            continue
        for command, expected in commands(block):
            program, *arguments = shlex.split(command)
            assert program == "muonckpt"
            done = installed(*arguments) if page == README else called(*arguments)
            assert done.returncode == 0, done.stderr
            assert matches(expected, done.stdout), f"$ {command}\n{done.stdout}"
            ran += 1
    assert ran, "a page without a single example"


def test_links_between_pages_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
