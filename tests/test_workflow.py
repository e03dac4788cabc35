"""The workflow on GitHub: its form, and that it runs commands which this repository has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.matrix import CORE

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
JOB = {"runs-on", "steps"}
OF_JOB = JOB | {"timeout-minutes", "name", "needs", "if", "env", "permissions", "strategy"}
OF_STEP = {"uses", "with", "run", "name", "if", "env"}


def workflow() -> dict[str, Any]:
    loaded = yaml.load(
        (ROOT / ".github/workflows/ci.yml").read_text(), yaml.BaseLoader
    )  # in YAML 1.1 `on` is a boolean
    assert isinstance(loaded, dict)
    return loaded


def steps() -> list[dict[str, Any]]:
    return [step for job in workflow()["jobs"].values() for step in job["steps"]]


def test_it_has_the_keys_that_are_needed_and_no_others():
    top = workflow()
    assert {"name", "on", "jobs"} <= top.keys() <= {"name", "on", "jobs", "permissions", "concurrency", "env"}
    assert top["on"].keys() <= {"push", "pull_request", "schedule", "workflow_dispatch"}
    for job in top["jobs"].values():
        assert JOB <= job.keys() <= OF_JOB
        assert int(job["timeout-minutes"]) > 0
    for step in steps():
        assert step.keys() <= OF_STEP
        assert ("uses" in step) != ("run" in step)
        assert "with" not in step or "uses" in step
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))


def test_it_runs_the_commands_of_a_clone_and_nothing_else():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [step["run"] for step in steps() if "run" in step]
    assert sorted(commands) == [".ci/run", "make check", "make dist", "make matrix"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    assert {command.split()[1] for command in commands if command.startswith("make")} <= {*targets}


def test_its_pythons_are_those_that_the_package_names():
    asked = {version for step in steps() for version in step.get("with", {}).get("python-version", "").split()}
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert asked == {*named}


def test_the_core_of_the_matrix_is_there():
    assert [path for path in CORE if not (ROOT / path).exists()] == []
