"""A run that loses a machine while it saves, and takes it back: every step is accounted for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
from support.trials import SCALE

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "elastic.py"

SHOWN = """4 ranks, from nothing: steps 0 to 11, none of them again
3 ranks, from the checkpoint of step 7: steps 8 to 16, of which 8 to 11 again, from the same states
4 ranks, from the checkpoint of step 16: steps 17 to 23, none of them again"""


def test_the_guide_shows_what_the_recorded_run_came_to(tmp_path):
    example = run_path(str(EXAMPLE))
    (tmp_path / example["LOG"]).write_bytes((ROOT / "docs" / "pictures" / "elastic.jsonl").read_bytes())
    recorded = example["steps"](str(tmp_path))
    assert "\n".join(example["account"](recorded)) == SHOWN
    assert SHOWN in (ROOT / "docs" / "guide" / "long_runs.md").read_text()
    with pytest.raises(ValueError, match="steps were left out: \\[23\\]"):
        example["account"](recorded[:-1])
    with pytest.raises(ValueError, match="step 8 was repeated from another state"):
        example["account"]([*recorded, {**recorded[8], "from": "other"}])


@pytest.mark.skipif(SCALE == 0, reason="it waits for launchers: make trust")
def test_a_machine_is_lost_in_a_save_and_comes_back(tmp_path):
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    first, second, third = done.stdout.splitlines()
    *expected, _ = SHOWN.splitlines()
    assert [first, second] == expected, done.stderr[-4000:]
    assert third.endswith("to 23, none of them again")
