"""Each night of ``examples/nights`` is solved from its message alone, by the commands that it prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NIGHTS = Path(__file__).parents[1] / "examples" / "nights"
SCRIPTS = sorted(path.stem for path in NIGHTS.glob("*.py") if path.stem != "night")

DRIVER = """
import multiprocessing, os, runpy, sys
from pathlib import Path
import night  # and torch, once for all

def play(script):
    os.chdir(Path(script).stem)
    output = os.open("output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    runpy.run_path(script, run_name="__main__")

for script in sys.argv[1:]:
    Path(Path(script).stem).mkdir()
    child = multiprocessing.get_context("fork").Process(target=play, args=(script,))
    child.start()
    child.join()
    Path(Path(script).stem, "code").write_text(str(child.exitcode))
"""
"""Runs each script in a folder and a process of its own, which leaves its output and its exit code there."""


@pytest.fixture(scope="module")
def nights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nights")
    path = os.pathsep.join(filter(None, (str(NIGHTS), os.environ.get("PYTHONPATH"))))
    program = [sys.executable, "-c", DRIVER, *(NIGHTS / f"{script}.py" for script in SCRIPTS)]
    subprocess.run(program, cwd=folder, env={**os.environ, "PYTHONPATH": path}, timeout=600, check=True)
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_message_of_a_night_solves_it(script, nights):
    output = (nights / script / "output").read_text()
    assert (nights / script / "code").read_text() == "0", output
    assert output.splitlines()[-1] == "solved"
