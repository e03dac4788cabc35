"""Commands of one process, under every Python at hand, with the oldest and the newest versions of what they need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.environments import installed, pythons, requirements
from support.trees import tree
from support.trials import SCALE, tally

COMMANDS = {
    "inspect": (),
    "verify": (),
    "stats": (),
    "reshard dcp": ("reshard", "--mesh", "dp=3"),
    "reshard flat": ("reshard", "--mesh", "dp=2", "--layout", "flat"),
    "reshard buffers": ("reshard", "--mesh", "dp=2", "--layout", "flat", "--format", "buffers"),
    "safetensors": ("reshard", "--format", "safetensors"),
    "zarr": ("reshard", "--format", "zarr"),
    "torch": ("reshard", "--to", "torch", "--mesh", "dp=2"),
}


def done(python: list[str], name: str, source: Path, out: Path) -> tuple[int, str, dict[str, bytes] | None]:
    """What a command comes to: its exit code, what it prints, and the files that it makes."""
    command, *options = COMMANDS[name] or (name,)
    places = [source, out] if command == "reshard" else [source]
    line = [*python, "-m", "muonckpt", command, *map(str, places), *options]
    ran = subprocess.run(line, cwd=out.parent, capture_output=True, text=True, timeout=120, check=False)
    return ran.returncode, ran.stderr if ran.returncode else ran.stdout.replace(str(out), "OUT"), tree(out)


@pytest.mark.skipif(SCALE == 0, reason="installs other versions from the registry: `make trust`")
def test_other_versions_make_the_same_files_without_a_warning(tiny_checkpoint, tmp_path):
    expected = {name: done([sys.executable], name, tiny_checkpoint, tmp_path / name) for name in COMMANDS}
    assert {code for code, *_ in expected.values()} == {0}, expected
    with tally("versions") as row:
        for version, python in pythons().items():
            for oldest in (True, False) if version == (3, 11) else (False,):
                label = f"Python {version[0]}.{version[1]}, {'oldest' if oldest else 'newest'}"
                home = tmp_path / label
                needed = requirements(oldest)
                del needed["torch"]
                command = ["env", "PYTHONWARNINGS=error", *installed(python, home, needed.values())]
                for name in COMMANDS:
                    code, printed, files = done(command, name, tiny_checkpoint, home / name)
                    same = (code, files) == (expected[name][0], expected[name][2])
                    row.add(f"{label}: {name}", None if same else f"exit code {code}, other files or: {printed[-300:]}")
