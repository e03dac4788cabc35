"""The command line: exit codes, one clear paragraph for an error, and output that programs and people can read."""

from __future__ import annotations

import json
import os
import pickle
import pty
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import COMMAND, COMMANDS, arguments_of, called, cli, is_one_paragraph, without_progress
from support.sharded import as_stock, edit, manifest_edited, no_checksums

import muonckpt
from muonckpt import SourceError
from muonckpt.store import open_checkpoint


@pytest.fixture
def checkpoint(tiny_checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


# --- exit codes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_0_is_fine_and_standard_error_is_empty(command, tiny_checkpoint, tmp_path):
    done = called(*arguments_of(command, tiny_checkpoint, tmp_path))
    assert (done.returncode, without_progress(done.stderr)) == (0, "") and done.stdout


KEY = "optimizer.state.0.weight.momentum_buffer"


def flip(path: Path) -> Path:
    [chunk] = next(t for t in muonckpt.open(path).manifest.tensors if t.key == KEY).chunks
    edit(path / chunk.item.file, chunk.payload.offset + 3)
    return path


@pytest.mark.parametrize("stock", [False, True])
def test_1_is_a_finding(stock, checkpoint):
    if stock:
        as_stock(checkpoint)
    done = called("verify", flip(checkpoint))
    assert (done.returncode, done.stderr) == (1, "")
    assert KEY in done.stdout and "expected" in done.stdout
    done = called("verify", checkpoint, "--json")
    assert done.returncode == 1 and {finding["key"] for finding in json.loads(done.stdout)["findings"]} == {KEY}


USAGE = ["", "transmogrify a b", "inspect a --colour", "verify", "verify a --jobs -1"]


@pytest.mark.parametrize("line", USAGE)
def test_2_is_a_mistake_in_the_command_line(line):
    done = called(*line.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage:" in done.stderr and "Traceback" not in done.stderr


def without(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).unlink()
    return path


def written(path: Path, name: str, data: bytes) -> Path:
    (path / name).write_bytes(data)
    return path


FUTURE = b'{"format": "muonckpt", "version": 99}'
SOURCES = {
    "nothing": (lambda path: path / "nothing", COMMANDS, "nothing"),
    "a file": (lambda path: path / ".metadata", COMMANDS, "give its folder"),
    "an empty folder": (lambda path: (path / "empty").mkdir() or path / "empty", COMMANDS, "found no .metadata and"),
    "rank-local metadata": (
        lambda path: (without(path, "muonckpt.json") / ".metadata").rename(path / "__0.metadata").parent,
        COMMANDS,
        "use_collectives=False",
    ),
    "damaged metadata": (
        lambda path: written(without(path, "muonckpt.json"), ".metadata", b"\x80\x04]\x94."),
        COMMANDS,
        ".metadata",
    ),
    "damaged manifest": (
        lambda path: written(path, "muonckpt.json", b"{}}"),
        ("reshard",),
        "damaged manifest",
    ),
    "a manifest of the future": (lambda path: written(path, "muonckpt.json", FUTURE), COMMANDS, "version 99"),
    "a file missing": (
        lambda path: without(path, "muonckpt.json", "__0_0.distcp"),
        ("reshard",),
        "__0_0.distcp",
    ),
    "damage": (flip, ("reshard",), "is damaged"),
    "a hole": (
        lambda path: manifest_edited(path, lambda entries: entries[KEY]["chunks"].clear()) or path,
        ("reshard",),
        "no file has some elements",
    ),
}


@pytest.mark.parametrize(("case", "command"), [(case, c) for case, (_, all_of, _) in SOURCES.items() for c in all_of])
def test_3_is_a_source_that_cannot_be_read(case, command, checkpoint, tmp_path):
    make, _, message = SOURCES[case]
    done = called(*arguments_of(command, make(checkpoint), tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    assert message in done.stderr and is_one_paragraph(done.stderr)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_4_is_a_destination_that_cannot_be_written(tiny_checkpoint, tmp_path):
    (tmp_path / "out").mkdir()
    for more in ((), ("--dry-run",)):
        done = called(*arguments_of("reshard", tiny_checkpoint, tmp_path), *more)
        assert (done.returncode, done.stdout) == (4, "")
        assert "exists already" in done.stderr and is_one_paragraph(done.stderr)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", COMMANDS)
def test_4_is_output_that_cannot_be_written(command, tiny_checkpoint, tmp_path):
    with Path("/dev/full").open("w") as full:
        done = cli(*arguments_of(command, tiny_checkpoint, tmp_path), capture_output=False, stdout=full, stderr=-1)
    assert done.returncode == 4 and "No space left" in done.stderr and is_one_paragraph(done.stderr)


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (ZeroDivisionError("so"), 70), (SourceError("so"), 3)]
)
def test_every_error_has_its_code_and_only_debug_shows_a_traceback(error, code, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise error

    monkeypatch.setattr(open_checkpoint, "format_of", broken)
    for debug in ([], ["--debug"]):
        done = called(*debug, "inspect", tmp_path)
        assert (done.returncode, done.stdout) == (code, "")
        assert ("Traceback" in done.stderr) == (bool(debug) and code != 130)
        assert debug or is_one_paragraph(done.stderr.lstrip("\n"))
        assert code == 130 or "so" in done.stderr


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("where", [".metadata", "item"])
def test_code_in_a_checkpoint_is_never_run(command, where, tmp_path):
    source, ran = tmp_path / "source", tmp_path / "ran"
    dcp.save({"w": torch.ones(4), "x": Bomb(ran)}, checkpoint_id=source, no_dist=True)
    ran.unlink(missing_ok=True)
    if where == ".metadata":
        (source / ".metadata").write_bytes(pickle.dumps(Bomb(ran)))
    done = called(*arguments_of(command, source, tmp_path))
    assert done.returncode == (3 if where == ".metadata" else 0)
    assert not ran.exists()
    if where == ".metadata":
        assert "nothing was run" in done.stderr and is_one_paragraph(done.stderr)


# --- output -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)], ids=str)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_explains_itself(arguments, option):
    done = called(*arguments, option)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(" ".join(["Usage: muonckpt", *arguments]))
    lines = done.stdout.splitlines()
    assert len(lines) <= 50 and all(len(line) <= 80 for line in lines)  # one screen
    if not arguments:
        assert all(command in done.stdout for command in COMMANDS) and "Exit codes: 0" in done.stdout
        assert called("--version").stdout == f"muonckpt, version {version('muonckpt')}\n"


SUMMARY = ["checkpoint", "kind", "dialect", "provenance", "tensors", "chunks", "empty_chunks", "bytes", "other_items"]
SUMMARY += [
    "files",
    "step",
    "steps",
    "optimizer",
    "unknown_state",
    "conventions",
    "groups",
    "unread_groups",
    "roles",
    "layouts",
    "cuts",
]
SUMMARY += ["balance", "buffers", "quantised", "wrappers", "slots", "checks", "verified", "diagnosis", "symptoms"]
SUMMARY += ["notes"]
REWRITING = ["source", "destination", "format", "ranks", "mesh", "layout", "buffers", "files", "tensors", "checked"]
REWRITING += ["read", "avoided", "written", "unchecked", "items_file", "decoded", "undecoded", "left_out", "notes"]
REWRITING += ["checklist", "compared", "fingerprints"]
REPORT = ["tensors", "chunks", "blobs", "payload_bytes", "unchecked", "fingerprints", "findings", "notes", "verdict",
          "diagnosis"]  # fmt: skip
JSON = {
    "inspect": ([], SUMMARY),
    "inspect --tensors": (["--tensors"], [*SUMMARY, "manifest"]),
    "verify": ([], REPORT),
    "reshard": ([], REWRITING),
    "reshard --dry-run": (["--dry-run"], REWRITING),
}


@pytest.mark.parametrize("case", JSON)
@pytest.mark.parametrize("stock", [False, True])
def test_json_is_one_document_with_stable_keys_and_plain_numbers(case, stock, checkpoint, tmp_path):
    if stock:
        as_stock(checkpoint)
    more, keys = JSON[case]
    done = called(*arguments_of(case.split()[0], checkpoint, tmp_path), "--json", *more)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    found = json.loads(done.stdout)
    assert list(found) == [*keys, "seconds"] and found["seconds"] >= 0
    for name in {"tensors", "chunks", "bytes", "payload_bytes", "checked", "written", "unchecked"} & found.keys():
        assert type(found[name]) is int
    if "slots" in found:
        assert {tuple(slot) for slot in found["slots"]} == {("slot", "tensors", "elements", "bytes", "dtypes")}
        assert sum(slot["bytes"] for slot in found["slots"]) == found["bytes"]
    if "manifest" in found and not stock:
        assert found["manifest"] == json.loads((checkpoint / "muonckpt.json").read_text())
    assert (tmp_path / "out").exists() == (case == "reshard")


def test_inspect_says_what_is_there(tiny_checkpoint):
    done = called("inspect", tiny_checkpoint, "--tensors")
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line}
    assert lines["kind"][1] == "muonckpt,"
    sizes = [str(16 * 40 + 40 * 13), "4.53", "KiB", "float32"]
    assert ["momentum", "momentum_buffer", "2", *sizes] in [line.split() for line in done.stdout.splitlines()]
    *row, fingerprint = lines[KEY]
    assert row[1:] == ["40", "x", "16", "(24+8+8", "rows)", "float32", "ema", "1"] and len(fingerprint) == 16


def test_a_source_without_checksums_is_said_to_be_one(tmp_path):
    with no_checksums():
        dcp.save({"w": torch.ones(4, 3)}, checkpoint_id=tmp_path / "source", no_dist=True)
    assert "1 source chunk without a checksum" in called(*arguments_of("reshard", tmp_path / "source", tmp_path)).stderr
    done = called("verify", tmp_path / "source")
    assert (
        done.returncode == 0
        and "unchecked: 1 of 1 chunk without a checksum" in done.stdout
        and "readable, unchecked" in done.stdout
    )


NAMES = ["[bold]a[/bold]", "[/red]", ":warning:", "\x1b[31mred\x1b[0m\x07", "two\nlines", "ünï-çødé.権", "n" * 200]


@pytest.fixture(scope="module")
def oddly_named(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("odd") / "checkpoint"
    muonckpt.save({name: torch.ones(2) for name in NAMES} | {"x[b]": "[/b]"}, path, provenance={"run": "\x1b[2J[/x]"})
    return path


def on_terminal(*arguments: object, **environment: str) -> str:
    """What a terminal of 80 columns gets, standard error included."""
    ours, theirs = pty.openpty()
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    variables |= {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"} | environment
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdin=theirs, stdout=theirs, stderr=theirs, env=variables
    )
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 1 << 16):
            shown += data
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(ours)
    assert process.wait(600) == 0, shown
    return shown.decode()


COLOUR = re.compile(r"\x1b\[[0-9;]*(3[0-8]|9[0-7])[0-9;]*m")


@pytest.mark.parametrize("command", ["verify", "reshard"])
def test_a_terminal_gets_a_progress_bar_and_a_log_does_not(command, tiny_checkpoint, tmp_path):
    arguments = arguments_of(command, tiny_checkpoint, tmp_path)
    shown = on_terminal(*arguments)
    assert "━" in shown and command in shown and COLOUR.search(shown)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    shown = on_terminal(*arguments, NO_COLOR="1")
    assert "━" in shown and not COLOUR.search(shown)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    done = cli(*arguments, env={**os.environ, "TERM": "xterm-256color"})
    assert re.fullmatch(r"(took .+ s\n)?", done.stderr) and "━" not in done.stdout and "\x1b" not in done.stdout


def test_names_of_tensors_are_shown_as_they_are_and_control_nothing(oddly_named):
    plain = cli("inspect", "--tensors", oddly_named).stdout
    shown = on_terminal("inspect", "--tensors", oddly_named)
    for text in (plain, re.sub(r"\x1b\[1m|\x1b\[0m", "", shown)):  # rich prints headers bold
        assert "\x1b" not in text and "\x07" not in text and "…" not in text
        for name in ("[bold]a[/bold]", "[/red]", ":warning:", r"\x1b[31mred", r"two\nlines", "ünï-çødé.権"):
            assert name in text, name
    assert "n" * 200 in plain and shown.count("n") >= 200
    assert r"run           \x1b[2J[/x]" in plain


def test_names_that_the_locale_cannot_write_are_escaped(oddly_named):
    latin = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = cli("inspect", "--tensors", oddly_named, env=latin, encoding="latin-1")
    assert done.returncode == 0 and r"ünï-çødé.\u6a29" in done.stdout


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_has_seen_enough_is_no_error(stream, tiny_checkpoint, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    other = {"stdout": "stderr", "stderr": "stdout"}[stream]
    pipes = {stream: writing, other: subprocess.PIPE}
    done = cli("inspect", "--tensors", tiny_checkpoint, capture_output=False, **pipes)
    failed = cli("inspect", tmp_path / "nothing", capture_output=False, **pipes)
    os.close(writing)
    assert (done.returncode, failed.returncode) == ((141, 3) if stream == "stdout" else (0, 3))
    assert "Traceback" not in (done.stdout or done.stderr or "")
    if stream == "stdout":
        assert done.stderr == ""


def test_a_layout_of_an_algorithm_that_inspect_does_not_know_is_shown(checkpoint):
    layout = {"algorithm": "layer-wise", "version": 3, "owners": [0, 1]}
    manifest_edited(checkpoint, lambda entries: entries[KEY].update(layout=layout))
    done = called("inspect", checkpoint)
    assert done.returncode == 0 and "layer-wise" in done.stdout
