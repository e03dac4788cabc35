"""Commands of one process, under every Python at hand, with the oldest and the newest versions of what they need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.trees import tree
from support.trials import SCALE, tally

ROOT = Path(__file__).parents[2]

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


def pythons() -> dict[tuple[int, ...], str]:
    """Every Python that we support and that this machine has, by version: on the path, or of pyenv."""
    shims = (shutil.which(f"python3.{minor}") for minor in range(11, 20))
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob("3.*/bin/python3")
    found = {sys.version_info[:2]: sys.executable}
    for candidate in [*filter(None, shims), *map(str, pyenv)]:
        asked = subprocess.run(
            [candidate, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True, check=False
        )
        if asked.returncode == 0 and (version := tuple(map(int, asked.stdout.split()))) >= (3, 11):
            found.setdefault(version, candidate)
    return found


def requirements(oldest: bool) -> list[str]:
    """What the package needs, but for torch."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = [each for each in needed if not each.startswith("torch")]
    return [f"{bound.replace('>=', '==')}.*" for bound in bounds] if oldest else bounds


def installed(python: str, folder: Path, oldest: bool) -> list[str]:
    """A command that runs the package in an environment of its own."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    subprocess.run([*pip, *requirements(oldest)], check=True, timeout=600)
    package = folder / "package/muonckpt"
    package.mkdir(parents=True)
    for entry in [*(ROOT / "muonckpt").iterdir(), *(ROOT / name for name in ("optimizer", "converters", "cli"))]:
        (package / entry.name).symlink_to(entry)
    return ["env", f"PYTHONPATH={folder / 'package'}", "PYTHONWARNINGS=error", str(folder / "bin/python")]


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
        for version, python in sorted(pythons().items()):
            for oldest in (True, False) if version == (3, 11) else (False,):
                label = f"Python {version[0]}.{version[1]}, {'oldest' if oldest else 'newest'}"
                home = tmp_path / label
                command = installed(python, home, oldest)
                for name in COMMANDS:
                    code, printed, files = done(command, name, tiny_checkpoint, home / name)
                    same = (code, files) == (expected[name][0], expected[name][2])
                    row.add(f"{label}: {name}", None if same else f"exit code {code}, other files or: {printed[-300:]}")
