"""What helps before anything runs: examples in every `--help`, completion, and words that come close to a mistake."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import click
import pytest
import torch
from click.shell_completion import BashComplete, FishComplete, ZshComplete
from support.commands import LINES, called, command_of

import muonckpt
from muonckpt.cli.main import cli
from muonckpt.cli.printing import with_options

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [*(DOCS / "guide").rglob("*.md"), *(DOCS / "formats").glob("*.md")]
FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


@pytest.mark.parametrize("name", LINES)
def test_every_help_has_two_examples_that_parse(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = called(*name.split(), "--help").stdout
    examples = re.findall(rf"^  muonckpt {name} (.*)$", shown, re.MULTILINE)
    assert len(examples) >= 2
    command = command_of(name)
    for example in examples:
        line = shlex.split(example.partition(" > ")[0])
        assert command.make_context(name, line, resilient_parsing=False).params


@pytest.mark.parametrize("name", LINES)
def test_every_option_is_explained_by_the_help_and_by_a_page(name):
    options = [option for option in command_of(name).params if isinstance(option, click.Option)]
    shown = {option.opts[-1]: option for option in options if not option.hidden}
    assert [flag for flag, option in shown.items() if not option.help] == []
    explained = {flag for page in PAGES for flag in FLAG.findall(page.read_text())}
    assert [flag for flag, option in shown.items() if not explained & {*option.opts}] == []


@pytest.mark.parametrize("name", ["reshard", "convert"])
def test_messages_that_name_arguments_name_the_options_of_the_command(name):
    command = command_of(name)
    for option in (
        option for option in command.params if isinstance(option, click.Option) and option.name != "as_json"
    ):
        if option.expose_value:
            assert with_options(f"leave out `{option.name}=`").removeprefix("leave out ") in option.opts
    assert with_options('run it with `dry_run=True` and `to_dialect="dion"`') == "run it with --dry-run and --to dion"
    assert with_options("the others are in `.groups`, `.to_json()`") == "the others are in --groups, --json"
    assert with_options("`load` takes `1e-8`") == "`load` takes `1e-8`"


def completed(*words: str) -> list[tuple[str, str]]:
    *before, last = words
    items = BashComplete(cli, {}, "muonckpt", "_MUONCKPT_COMPLETE").get_completions(before, last)
    return [(item.type, item.value) for item in items]


def test_commands_paths_tables_and_words_are_completed():
    assert completed("ins") == [("plain", "inspect")]
    assert completed("lab", "aud") == [("plain", "audit-step")]
    assert completed("inspect", "run/st") == [("file", "run/st")], "the shell lists paths itself"
    assert ("plain", "inverse:hf-qkv") in completed("convert", "--show-rules", "inverse:")
    assert completed("reshard", "a", "b", "--rules", "hf-q") == [("plain", "hf-qkv")]
    assert completed("reshard", "a", "b", "--rules", "./my") == [("file", "./my")]
    assert completed("convert", "a", "b", "--to", "tit") == [("plain", "titan")]


def test_a_key_that_could_control_a_terminal_is_not_completed(tmp_path):
    muonckpt.save({"up\x1b[31m": torch.ones(1), "up\nplain,rm": torch.ones(1), "up": torch.ones(1)}, tmp_path / "one")
    assert completed("inspect", str(tmp_path / "one"), "u") == [("plain", "up")]


def test_keys_of_the_checkpoint_on_the_line_are_completed(tiny_checkpoint, tmp_path):
    tiny = str(tiny_checkpoint)
    keys = [*muonckpt.open(tiny).tensors]
    weights = [("plain", key) for key in keys if key.startswith("model.")]
    assert weights and completed("inspect", tiny, "--tensor", "model.") == weights
    for line in (["inspect", tiny], ["stats", tiny], ["diff", tiny, tiny], ["reshard", tiny, "out", "--select"]):
        assert set(weights) <= set(completed(*line, "model.")), line
    shortened = completed("inspect", tiny, "--tensor", weights[0][1].removeprefix("model."))
    assert ("plain", weights[0][1].removeprefix("model.")) in shortened
    shutil.copytree(tiny, tmp_path / "run" / "step-00000001")
    assert completed("inspect", str(tmp_path / "run"), "--tensor", "model.") == weights, "of a run its last checkpoint"


def test_completion_is_silent_where_there_is_nothing_to_read(tmp_path, capfd):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "muonckpt.json").write_text("{")
    for place in ("nowhere", tmp_path, tmp_path / "damaged", "s3://bucket/step-1"):
        assert completed("inspect", str(place), "--tensor", "mod") == []
    assert completed("inspect", "--tensor", "mod") == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("completion", [BashComplete, ZshComplete, FishComplete])
def test_shells_are_answered_by_their_variables(completion, tiny_checkpoint, monkeypatch):
    key = next(iter(muonckpt.open(tiny_checkpoint).tensors))
    monkeypatch.setenv("COMP_WORDS", f"muonckpt inspect {tiny_checkpoint} --tensor {key[:-1]}")
    monkeypatch.setenv("COMP_CWORD", key[:-1] if completion is FishComplete else "4")
    assert key in completion(cli, {}, "muonckpt", "_MUONCKPT_COMPLETE").complete()


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("convert {tiny} out --to torsh", "torch"),
        ("convert {tiny} out --to-format safetensor", "safetensors"),
        ("reshard {tiny} out --mesh dp=2 --layout row", "rows"),
        ("reshard {tiny} out --mesh data=2 --shard *=dat:0", "data"),
        ("reshard {tiny} out --mesh dp=2 --shard *wieght=dp:0", "weight"),
        ("reshard {tiny} out --mesh dp=2 --rules megatron-swigl", "megatron-swiglu"),
        ("convert --show-rules hf-qvk", "hf-qkv"),
        ("diff {tiny} {tiny} *wieght*", "weight"),
        ("stats {tiny} *wieght*", "weight"),
        ("inspect {tiny} --tensor model.0.wieght", "model.0.weight"),
        ("inspect {tiny} --sort byte", "bytes"),
    ],
)
def test_a_word_that_comes_close_is_suggested(line, meant, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = called(*line.format(tiny=tiny_checkpoint).split())
    assert (
        done.returncode == 2 and "did you mean" in done.stderr and repr(meant) in done.stderr.split("did you mean")[1]
    )
