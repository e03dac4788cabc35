"""Environments of their own: any Python that is at hand, with chosen versions of what the package needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pythons() -> dict[tuple[int, ...], str]:
    """Every Python that we support and that this machine has, by version: on the path, or of pyenv."""
    shims = (shutil.which(f"python3.{minor}") for minor in range(11, 20))
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob("3.*/bin/python3")
    interpreters = {sys.version_info[:2]: sys.executable}
    for candidate in [*filter(None, shims), *map(str, pyenv)]:
        answer = subprocess.run(
            [candidate, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True, check=False
        )
        if answer.returncode == 0 and (version := tuple(map(int, answer.stdout.split()))) >= (3, 11):
            interpreters.setdefault(version, candidate)
    return dict(sorted(interpreters.items()))


def requirements(oldest: bool) -> dict[str, str]:
    """What the package needs, by name: its lower bounds, or the versions that they name and no newer."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = {bound.partition(">=")[0]: bound for bound in dependencies}
    return {name: f"{bound.replace('>=', '==')}.*" if oldest else bound for name, bound in bounds.items()}


def installed(python: str, folder: Path, dependencies: Iterable[str]) -> list[str]:
    """A command that runs the Python of a new environment, which has what is needed, and the package from its source.

    Raises:
        CalledProcessError: pip found no such versions for this Python; ``stderr`` says which.
    """
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-cache-dir", "--only-binary", ":all:"]
    subprocess.run([*pip, *dependencies], check=True, timeout=1800, stderr=subprocess.PIPE, text=True)
    package = folder / "package/muonckpt"
    package.mkdir(parents=True)
    for entry in (ROOT / "muonckpt").iterdir():  # the optimizer, the converters and the commands are links in it
        (package / entry.name).symlink_to(entry)
    return ["env", f"PYTHONPATH={folder / 'package'}", "PYTHONSAFEPATH=1", str(folder / "bin/python")]
