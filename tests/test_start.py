"""The complete script of the page `start`: under FSDP2 on two ranks, and resumed on one."""

from __future__ import annotations

import re
import tomllib

from support.pages import DOCS, script, whole
from support.workers import run

import muonckpt

ROOT = DOCS.parent


def parameters(rank: int, world: int, folder: str, until: int) -> dict[str, object]:
    names = script("start.md", "guide")
    names |= {"STEPS": 40, "EVERY": 5}
    model = names["train"](folder, until)
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def test_the_script_goes_on_where_it_was_on_another_number_of_ranks(tmp_path):
    """Up to rounding: against a run of as many steps that does not resume, and far from one that has fewer."""
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    uninterrupted = run(2, parameters, str(through), 10)[0]
    half = run(2, parameters, str(stopped), 5)[0]
    resumed = run(3, parameters, str(stopped), 10)[0]

    def farthest(one, other):
        return max((one[name] - other[name]).abs().max().item() for name in one)

    assert farthest(uninterrupted, resumed) < 0.0001 < 0.001 < farthest(uninterrupted, half)
    assert muonckpt.Series(str(stopped)).latest().step == 9


def test_what_is_installed_without_torch_is_all_else_that_is_needed():
    """The command of the page names every dependency but torch."""
    [command] = re.findall(r"^pip install (numpy .*)$", (DOCS / "guide" / "start.md").read_text(), re.MULTILINE)
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {"torch", *command.split()} == {re.split("[>=<]", requirement)[0] for requirement in needed}
