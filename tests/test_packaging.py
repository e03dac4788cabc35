"""One import name, from a wheel and from an editable install alike."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK = (
    "import importlib.util as u, muonckpt, muonckpt.cli.main, muonckpt.converters, muonckpt.store.audit\n"
    "from muonckpt.optimizer import Muon\n"
    "assert all(u.find_spec(n) is None for n in ('optimizer', 'converters', 'cli', 'layouts', 'store'))\n"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what is tracked, so that building leaves nothing in the tree."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("muonckpt", "optimizer", "converters", "cli"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def pip(python: Path | str, *arguments: str) -> None:
    """This environment's pip, acting on another one, so that both build with the same setuptools."""
    command = [sys.executable, "-m", "pip", "--python", str(python), *arguments]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    done = subprocess.run(command + options, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """What is installed elsewhere, built once."""
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", str(source), "--wheel-dir", str(folder))
    [built] = folder.glob("*.whl")
    return built


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_one_import_name(editable, source, wheel, tmp_path):
    """Installed into a bare environment that sees this one's dependencies."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    site = next((tmp_path / "env/lib").glob("python*/site-packages"))
    mine = Path(next(p for p in sys.path if p.endswith("site-packages")))
    (site / "zz_dependencies.pth").write_text(f"{mine}\n")
    pip(python, "install", *(["--editable", str(source)] if editable else [str(wheel)]))
    done = subprocess.run([str(python), "-P", "-c", CHECK], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "env/bin/muonckpt").exists()


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"muonckpt", "muonckpt-0.1.0.dist-info"}
    assert {"muonckpt/py.typed", "muonckpt/manifest.schema.json", "muonckpt/optimizer/muon.py"} <= set(names)
    assets = {f"muonckpt/page/assets/{file.name}" for file in (ROOT / "muonckpt/page/assets").iterdir()}
    assert assets and assets <= set(names)


def test_the_hashed_files_are_of_the_versions_that_are_installed_otherwise():
    def pinned(name: str) -> dict[str, str]:
        lines = (
            line.split() for line in (ROOT / name).read_text().splitlines() if "==" in line and line[0] not in "# "
        )
        pairs = (line[0].split("==") for line in lines)
        return {re.sub("[-_.]+", "-", package).lower(): version for package, version in pairs}

    versions, hashed = pinned("constraints.txt"), pinned("requirements.lock")
    assert hashed.items() <= versions.items()
    assert not {"numpy", "pytest", "setuptools", "torchtitan", "xxhash", "zarr"} - hashed.keys()
    text = (ROOT / "requirements.lock").read_text()
    assert text.count(" \\\n    --hash=sha256:") >= len(hashed)
