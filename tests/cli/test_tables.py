"""What a terminal shows: tables at any width, no word broken, nothing lost, and colours where they are wanted."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.commands import called, on_terminal, without_colour
from support.golden import golden

import muonckpt
from muonckpt.cli.tables import folding_of
from muonckpt.names.wording import size

WIDTHS = (60, 80, 120, 160)
LONG = "model.decoder.layers.{}.mixture_of_experts.shared_expert_intermediate.gate_up_projection.weight"
VIEWS = [
    "inspect {run}",
    "inspect {run} *experts* --sort bytes",
    "inspect {run} --tensors",
    "inspect {run} --ranks",
    "inspect {run} --tree",
    "inspect {run} --items",
    "inspect {run} --rank 0",
    "inspect {run} --tensor model.{key}",
    "inspect {run} --tensor model.{key}[2:5]",
    "inspect {run} --fits dp=5,tp=2",
    "inspect {steps}",
    "verify {steps}",
    "diff {steps}",
    "diff {steps} {others}",
    "verify {run}",
    "diff {run} {other}",
    "diff {run} {other} --all",
    "stats {run}",
    "stats {run} --all",
    "stats {other} --since {run}",
    "reshard {run} {out} --mesh dp=2,tp=2 --dry-run",
    "reshard {run} {out} --mesh dp=2,tp=2 --layout balanced --dry-run",
    "convert {run} {out} --to dion --dry-run",
    "lab plan --ckpt {run} --mesh dp=2 --mesh dp=64,tp=4 --mesh pp=2,dp=8,tp=4 --mesh dp=512",
    "convert --list-rules",
]


def saved(path: Path, scale: float) -> None:
    names = [LONG.format(layer) for layer in range(3)]
    model = {name: scale * torch.arange(48.0).reshape(8, 6) for name in names} | {"a": torch.ones(3)}
    state = {name: {"momentum_buffer": scale * torch.ones(8, 6)} for name in names}
    group = {"params": names, "algorithm": "muon", "lr": 0.02, "momentum": 0.95, "convention": "ema"}
    muonckpt.save({"model": model, "optimizer": {"state": state, "param_groups": [group]}, "note": "x y " * 50}, path)


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path | str]:
    folder = tmp_path_factory.mktemp("tables")
    saved(folder / "steps" / "step-1", 1.0)
    saved(folder / "steps" / "step-2", 2.0)
    saved(folder / "others" / "checkpoint-1", 1.0)
    saved(folder / "others" / "checkpoint-2", 3.0)
    muonckpt.reshard(folder / "steps" / "step-1", folder / "run", mesh={"dp": 3})
    return {"run": folder / "run", "other": folder / "steps" / "step-2", "steps": folder / "steps",
            "others": folder / "others", "out": folder / "out", "key": LONG.format(1)}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_a_terminal_shows_every_word_whole_and_no_line_is_too_wide(view, places):
    line = view.format(**places).split()
    wide = called(*line)
    for width in WIDTHS:
        shown = on_terminal(width, *line)
        assert shown.returncode == wide.returncode in (0, 1), shown.stderr
        lines = without_colour(shown.stdout).splitlines()
        assert Counter(word for line in lines for word in line.split()) == Counter(wide.stdout.split())
        too_wide = [line for line in lines if len(line) > width and len(line.split()) > 1]
        alone = r"(\([a-z]\) )?muonckpt |\S* +\S+$"  # a command to paste, or one word behind its label
        assert not [line for line in too_wide if not re.match(alone, line)]


@pytest.mark.parametrize("name", ["titan_fsdp4/ckpt", "megatron/fsdp_dtensor/dp4tp2ep2/iter_0000010"])
def test_groups_as_code_fit_the_terminal_and_are_the_same_code(name):
    said = called("inspect", golden(name), "--groups").stdout
    for width in WIDTHS:
        shown = without_colour(on_terminal(width, "inspect", golden(name), "--groups").stdout)
        assert ast.literal_eval(shown) == ast.literal_eval(said)


def folded_lines(headers: tuple[str, ...], rows: list[tuple[str, ...]], width: int) -> list[str]:
    form = folding_of(headers, rows, width)
    return [line for row in (headers, *rows) for line in form.lines(row)]


def test_a_long_key_stands_on_its_own_line_and_the_columns_below_it_stay_in_line():
    rows = [("short", "8 x 6", "float32"), (LONG, "128 x 4096", "bfloat16")]
    assert folded_lines(("tensor", "shape", "dtype"), rows, 60) == [
        f"{'tensor':<38}  shape       dtype",
        f"{'short':<38}  8 x 6       float32",
        LONG,
        f"{'':<38}  128 x 4096  bfloat16",
    ]


def test_columns_that_find_no_place_go_on_below_and_headers_with_them():
    assert folded_lines(("key", "one", "two", "three"), [("k", "1" * 20, "2" * 20, "3" * 20)], 50) == [
        "key  one                   two",
        "     three",
        f"k    {'1' * 20}  {'2' * 20}",
        f"     {'3' * 20}",
    ]


def test_words_are_folded_in_their_column():
    rows = [("note", "a long text of many words"), ("b", "2")]
    assert folded_lines(("item", "value"), rows, 20)[1:] == ["note  a long text of", "      many words", "b     2"]


COLOUR = re.compile(r"\x1b\[[0-9;]+m")


@pytest.mark.parametrize(
    ("options", "no_color", "coloured"),
    [([], "", True), ([], "1", False), (["--color", "never"], "", False), (["--color", "always"], "1", True)],
)
def test_a_terminal_has_colours_unless_they_are_not_wanted(options, no_color, coloured, places, monkeypatch):
    monkeypatch.setenv("NO_COLOR", no_color)
    after = on_terminal(100, "inspect", places["run"], *options).stdout
    before = on_terminal(100, *options, "inspect", places["run"]).stdout
    assert bool(COLOUR.search(after)) == bool(COLOUR.search(before)) == coloured


def test_a_pipe_has_colours_only_if_they_are_asked_for(places):
    plain = called("inspect", places["run"]).stdout
    assert not COLOUR.search(plain)
    coloured = called("inspect", places["run"], "--color", "always").stdout
    assert COLOUR.search(coloured) and without_colour(coloured) == plain


def test_a_fault_is_red(tmp_path):
    muonckpt.save({"w": torch.ones(2, 2)}, tmp_path / "run")
    [file] = (tmp_path / "run").glob("*.distcp")
    file.unlink()
    for command in ("inspect", "verify"):
        lines = on_terminal(100, command, tmp_path / "run").stdout.splitlines()
        assert any("\x1b[31m" in line and "missing" in line for line in lines), command


def test_what_only_one_has_is_red_and_green(tmp_path):
    muonckpt.save({"w": torch.ones(2), "old": torch.ones(2)}, tmp_path / "a")
    muonckpt.save({"w": torch.ones(2), "new": torch.ones(2)}, tmp_path / "b")
    shown = on_terminal(80, "diff", tmp_path / "a", tmp_path / "b").stdout
    assert "\x1b[31mold\x1b[0m" in shown and "\x1b[32mnew\x1b[0m" in shown


def test_an_error_is_folded_on_a_terminal_and_one_line_elsewhere(tmp_path):
    line = ("inspect", tmp_path / "there" / "is" / "no" / "checkpoint" / "of" / "this" / "name")
    told = called(*line).stderr
    shown = without_colour(on_terminal(60, *line).stderr).splitlines()
    assert told.count("\n") == 1 and " ".join(shown).split() == told.split() and len(shown) > 1


def test_a_command_to_paste_is_one_line(tmp_path):
    """Also on a terminal that is narrower than it."""
    muonckpt.save({"w": torch.ones(2, 2)}, tmp_path / "steps" / "step-1")
    muonckpt.save({"w": torch.ones(2, 2)}, tmp_path / "steps" / "step-2")
    next((tmp_path / "steps" / "step-2").glob("*.distcp")).unlink()
    line = ("verify", tmp_path / "steps" / "step-2")
    commands = [text for text in called(*line).stdout.splitlines() if re.match(r"\([a-z]\) muonckpt ", text)]
    shown = without_colour(on_terminal(40, *line).stdout).splitlines()
    assert commands and all(command in shown for command in commands)


def test_a_size_just_below_the_next_unit_has_no_exponent():
    assert [size(count) for count in (1000, 1023 * 1024, 1025859)] == ["1000 B", "1023 KiB", "1002 KiB"]
