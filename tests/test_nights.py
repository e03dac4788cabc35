"""Each night of ``examples/nights`` is solved from its message alone, by the commands that it prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NIGHTS = Path(__file__).parents[1] / "examples" / "nights"


@pytest.mark.parametrize("script", sorted(path.stem for path in NIGHTS.glob("*.py") if path.stem != "night"))
def test_the_message_of_a_night_solves_it(script, tmp_path):
    path = os.pathsep.join(filter(None, (str(NIGHTS), os.environ.get("PYTHONPATH"))))
    program = [sys.executable, NIGHTS / f"{script}.py"]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(program, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.splitlines()[-1] == "solved"
