"""One import name, from a wheel and from an editable install alike; and what `make dist` would publish."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support import sweep

ROOT = Path(__file__).parents[1]
FOLDERS = {"muonckpt": "", "optimizer": "optimizer/", "converters": "converters/", "cli": "cli/"}
LINKED = "src"
"""The folder that has the package and nothing else, by a link."""
DIST = os.environ.get("MUONCKPT_DIST", "")
"""Where `make dist` has put what would be published."""
released = pytest.mark.skipif(not DIST, reason="of what `make dist` has built")
CHECK = (
    "import importlib.util as u, muonckpt, muonckpt.cli.main, muonckpt.converters, muonckpt.store.verify.audit\n"
    "assert u.find_spec('muonckpt.optimizer')\n"
    "assert all(u.find_spec(n) is None for n in ('optimizer', 'converters', 'cli', 'layouts', 'store'))\n"
    "print(muonckpt.__file__)"
)
"""Without torch, which takes seconds."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what is tracked, so that building leaves nothing in the tree."""
    copy = tmp_path_factory.mktemp("source")
    for name in (*FOLDERS, LINKED):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def pip(python: Path | str, *arguments: str) -> None:
    """This environment's pip, acting on another one, so that both build with the same setuptools."""
    command = [sys.executable, "-m", "pip", "--python", str(python), *arguments]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it hides what lacks
    done = subprocess.run(command + options, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """What is installed elsewhere: what would be published, or else built here, once."""
    if DIST:
        [built] = Path(DIST).glob("*.whl")
        return built
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", str(source), "--wheel-dir", str(folder))
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def pythons(source, wheel, tmp_path_factory) -> Callable[[str], Path]:
    """Return the Python of a bare environment that sees this one's dependencies, by how muonckpt is installed there."""

    @cache
    def python(installed: str) -> Path:
        python = bare_environment(tmp_path_factory.mktemp("environment") / "env")
        if arguments := {"wheel": [str(wheel)], "editable": ["--editable", str(source)]}.get(installed):
            pip(python, "install", "--no-compile", *arguments)
        return python

    return python


@pytest.mark.parametrize("installed", sweep(["wheel", "editable"], "wheel"))
def test_one_import_name(installed, pythons, tmp_path):
    python = pythons(installed)
    done = subprocess.run([str(python), "-I", "-c", CHECK], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (python.parent / "muonckpt").exists()


@pytest.mark.parametrize("installed", sweep(["not installed", "wheel"], "wheel"))
def test_a_newcomer_imports_it_in_the_clone(installed, pythons, source):
    """Python in a clone finds its `muonckpt/` before any that is installed: the links make it the whole package."""
    python = pythons(installed)
    lines = "import muonckpt.converters, muonckpt.cli.main as m; print(m.__file__)"
    done = subprocess.run([str(python), "-c", lines], capture_output=True, text=True, cwd=source)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == source / "muonckpt/cli/main.py"


def test_an_editable_install_puts_the_package_alone_on_the_path():
    """As a folder, not by an import hook, which a type checker does not run."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-dir"] == {"": LINKED} and settings["packages"]["find"]["where"] == [LINKED]
    assert {entry.name for entry in (ROOT / LINKED).iterdir()} - {"muonckpt.egg-info"} == {"muonckpt"}
    assert (ROOT / LINKED / "muonckpt" / "py.typed").samefile(ROOT / "muonckpt" / "py.typed")


@pytest.mark.exhaustive  # it reads all of torch's types
@pytest.mark.parametrize("installed", ["wheel", "editable"])
def test_a_type_checker_sees_every_room(installed, pythons, tmp_path):
    """A user's file: a wrong argument of each room is an error, and nothing is Any."""
    imports = [
        "from muonckpt import save",
        "from muonckpt.optimizer import Muon",
        "from muonckpt.converters.report import Report",
        "from muonckpt.cli.main import run",
    ]
    uses = ["reveal_type(Muon)", "reveal_type(Report)", "reveal_type(run)", "save({}, 'run', colour=1)"]
    (tmp_path / "user.py").write_text("\n".join([*imports, *uses]))
    command = [sys.executable, "-m", "mypy", "--python-executable", str(pythons(installed)), "user.py"]
    environment = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    said = re.findall(r'user.py:(\d+): (?:note: Revealed type is "([^"]*)"|error: (.*))', done.stdout)
    assert [line for line, _, _ in said] == ["5", "6", "7", "8"], done.stdout + done.stderr
    assert not [kind for _, kind, _ in said[:3] if kind == "Any"] and "Unexpected keyword" in said[3][2], done.stdout


def bare_environment(place: Path) -> Path:
    """The Python of a new environment that sees this one's dependencies, but not this one's muonckpt."""
    venv.create(place, with_pip=False)
    site = next((place / "lib").glob("python*/site-packages"))
    mine = Path(next(p for p in sys.path if p.endswith("site-packages")))
    (site / "zz_dependencies.pth").write_text(f"{mine}\n")
    return place / "bin/python"


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    metadata = email.message_from_bytes(held["muonckpt-0.1.0.dist-info/METADATA"])
    expected = {
        f"muonckpt/{place}{file.relative_to(ROOT / folder)}": file.read_bytes()
        for folder, place in FOLDERS.items()
        for file in (ROOT / folder).rglob("*.*")
        if file.is_file() and file.suffix != ".pyc"
    }
    assert {"muonckpt/py.typed", "muonckpt/lab/page/assets/map.js"} <= expected.keys()
    assert {name: data for name, data in held.items() if not name.startswith("muonckpt-0.1.0.dist-info/")} == expected
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["Requires-Python"] == project["requires-python"]
    assert {*project["dependencies"]} <= {*metadata.get_all("Requires-Dist")}


@released
def test_the_sdist_holds_what_is_tracked():
    [archive] = Path(DIST).glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {name.partition("/")[2] for name in opened.getnames() if not opened.getmember(name).isdir()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    made = {name for name in held if name.startswith("src/muonckpt.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    links = {"src/muonckpt", *(f"src/muonckpt/{name}" for name in ("optimizer", "converters", "cli"))}
    # A link of the tree is the folder itself in the archive.
    expected = {re.sub(r"^(optimizer|converters|cli)/", r"muonckpt/\1/", name) for name in listed.splitlines()}
    expected = {re.sub(r"^muonckpt/", "src/muonckpt/", name) for name in expected}
    assert held - made == expected - links - {".gitignore"}


@released
def test_the_demo_runs_from_the_wheel_without_the_source(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, f"{wheel}[demo]"], check=True)
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run([python, "examples/demo.py"], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    asked = [python, "-c", "import muonckpt; print(muonckpt.__file__)"]
    place = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert Path(place.strip()).is_relative_to(tmp_path / "env/lib")


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
