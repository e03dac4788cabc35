"""What README.md and the guides show is run, in order, and all that it prints is shown.

In expected output a line of `…` stands for any number of lines, and `…` in a line for any characters.
"""

from __future__ import annotations

import builtins
import re
import shlex
import subprocess
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import called

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs" / "guide").rglob("*.md"))]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$(?:\n*^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)

IN_ORDER = "*Paste the examples in order, in one new folder and one session.*"


def commands(block: str) -> list[tuple[str, str]]:
    """(command, expected output) of a console block."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


def matches(expected: str, found: str) -> bool:
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "…" else re.escape(line).replace("…", ".*") + r"\n"
        for line in expected.strip().splitlines()
    )
    return re.fullmatch(pattern, found.strip() + "\n") is not None


def installed(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The program as a shell finds it."""
    program = Path(sys.executable).with_name("muonckpt")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.filterwarnings("ignore:all ranks are on one node", "ignore:hyper-parameters are those of the saved run")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_example_runs_and_prints_what_is_shown(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    ran = 0
    for language, block, shown in BLOCK.findall(page.read_text()):
        if language == "python":
            exec(compile(block, page.name, "exec"), names)
            printed = capsys.readouterr().out
            assert page == README or not printed or matches(shown, printed), f"{page.name} shows {shown}of {printed}"
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


def test_the_first_example_is_short_and_resumes_with_the_line_that_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [code, *_] = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    [shown, *_] = re.findall(r"^```text\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(code.splitlines()) <= 16 and "get_state_dict" not in code
    assert code.count("run.resume(), 10)") == 1
    exec(code.replace("run.resume(), 10)", "run.resume(), 7)"), {})  # interrupted after its first checkpoint
    assert (
        capsys.readouterr().out
        == f"no checkpoint in {tmp_path}/run: starting at step 0 (to make this an error: resume(required=True))\n"
    )
    exec(code, {})
    assert capsys.readouterr().out.startswith("resumed from step 4, ")
    exec(code, {})
    assert capsys.readouterr().out == shown


def test_links_between_pages_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def unexplained(block: str) -> set[str]:
    """The names that a Python block uses and does not define."""

    def tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
        yield table
        for inner in table.get_children():
            yield from tables(inner)

    top = symtable.symtable(block, "block", "exec")
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    used = {
        symbol.get_name()
        for table in tables(top)
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (table is top or symbol.is_global())
    }
    return used - defined - {*dir(builtins), "__name__"}


def needs_order(text: str) -> bool:
    """Whether an example of a page does not run when it is pasted alone."""
    blocks = BLOCK.findall(text)
    return any(
        number > 0 if language == "console" else unexplained(block)
        for number, (language, block, _) in enumerate(blocks)
    )


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("```python\nx = 1\ndef f(a): return a + x\n```\n```python\nprint(2)\n```\n", False),
        ("```python\nx = 1\n```\n```python\ndef f(): return x\n```\n", True),
        ("```python\nx = 1\n```\n```console\n$ muonckpt rules\n```\n", True),
    ],
)
def test_blocks_that_need_others_are_told_from_those_that_run_alone(text, answer):
    assert needs_order(text) is answer


def test_a_page_says_whether_its_examples_go_on_from_one_another():
    pages = {page: page.read_text() for page in [*PAGES, *(ROOT / "docs" / "integrations").glob("*.md")]}
    assert {page.name: needs_order(text) for page, text in pages.items()} == {
        page.name: IN_ORDER in text for page, text in pages.items()
    }
