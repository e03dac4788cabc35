"""The documentation as a site: its pictures are what is drawn now, and it builds where its tools are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"


def test_pictures_are_what_the_planner_makes_now():
    """If this fails after a change that was meant: python docs/pictures/draw.py."""
    script = run_path(str(PICTURES / "draw.py"))
    drawn = {f"{name}.svg": script["drawn"](name) for name in script["PICTURES"]}
    assert drawn == {file.name: file.read_text() for file in PICTURES.glob("*.svg")}


def test_every_page_is_in_the_navigation_of_the_site():
    navigation = re.findall(r"- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(navigation) and len(navigation) == len(set(navigation))


@pytest.mark.exhaustive
def test_the_site_builds_without_a_broken_link_and_fetches_nothing(tmp_path):
    pytest.importorskip("mkdocs", reason="the site's tools are not installed: make site")
    shutil.rmtree(ROOT / "build" / "api", ignore_errors=True)  # as in a fresh clone
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = ("api/saving.html", "commands.html")
    api, commands = (re.sub("<[^>]*>", "", (tmp_path / page).read_text()) for page in pages)
    assert "a directory that all ranks see or in an object store" in api, "the first line of save's docstring"
    assert "muonckpt diff run-on-8 run-on-64 --summary" in commands, "an example of its help"
    assert "long_runs.html" in (tmp_path / "guide/reliability.html").read_text()
