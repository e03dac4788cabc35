"""What a new user stumbles over: mistakes are named one by one, counts agree, and tables fit the terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.commands import called, on_terminal, without_colour
from support.golden import golden

import muonckpt
from muonckpt.cli.printing import print_table


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("inspct run", "did you mean 'inspect'"),
        ("reshard run out --mesh dp=0", "dp has 0 ranks"),
        ("reshard run out --mesh dp=3,dp=2", "dp is named twice"),
        ("reshard run out --mesh dp=10000000", "expected 1 to 999999"),
        ("reshard run out --mesh dp", "'dp' is not an axis and its size"),
        ("reshard run out --mesh dp=2 --memory 1", "too little"),
        ("reshard {tiny} out --mesh dp=2 --select *wieght*", "weight"),
        ("inspect {tiny} --tree --items", "choose one"),
    ],
)
def test_a_mistake_is_named_with_what_would_be_right(line, said, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the demo leaves a folder "out" where it ran
    done = called(*line.format(tiny=tiny_checkpoint).split())
    assert done.returncode == 2 and said in done.stderr


def test_the_package_is_a_command():
    done = subprocess.run([sys.executable, "-m", "muonckpt", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("muonckpt, version")


@pytest.mark.parametrize("name", ["dion_fsdp4/ckpt", "torch_hsdp2x2/ckpt"])
def test_inspect_and_verify_count_the_same(name):
    inspection, report = muonckpt.inspect(golden(name)), muonckpt.verify(golden(name))
    assert inspection.empty_chunks > 0
    assert (inspection.tensors, inspection.chunks, inspection.bytes, inspection.other_items) == (
        report.tensors,
        report.chunks,
        report.payload_bytes,
        report.blobs,
    )


@pytest.mark.parametrize(
    "line", ["inspect {run}", "inspect {run} --json", "verify {run}", "stats {run}", "diff {run} {run}",
             "reshard {run} {out} --mesh dp=2", "convert {run} {out} --to-format zarr",
             "report {run} -o {out}", "plan --ckpt {run} --mesh dp=2"],
)  # fmt: skip
def test_a_warning_is_a_note_without_the_place_in_our_source(line, tmp_path):
    """Each command opens a checkpoint that has lost its manifest, which is worth a warning in Python."""
    weights = {"w": torch.ones(8, 4)}
    state = {"w": {"momentum_buffer": torch.ones(8, 4)}}
    groups = [{"params": ["w"], "algorithm": "muon", "lr": 0.02, "momentum": 0.95, "convention": "ema"}]
    muonckpt.save({"model": weights, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "run")
    (tmp_path / "run" / "muonckpt.json").unlink()
    done = called(*line.format(run=tmp_path / "run", out=tmp_path / "out").split())
    assert done.returncode != 70 and "Warning" not in done.stderr and not re.search(r"\.py:\d", done.stderr)
    lines = done.stderr.splitlines()
    assert len([note for note in lines if note.startswith("note: ") and "which is missing" in note]) <= 1
    if line.startswith("stats"):
        assert lines[0].startswith(f"note: {tmp_path / 'run'} was saved with a muonckpt.json, which is missing")


def test_a_file_of_torch_save_is_called_one(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    assert "torch.save" in called("inspect", tmp_path / "model.pt").stdout
    (tmp_path / "model.pt").rename(tmp_path / "model.safetensors")
    done = called("inspect", tmp_path / "model.safetensors")
    assert done.returncode == 3 and "torch.save" in done.stderr


@pytest.mark.parametrize("view", ["inspect", "inspect --tensors", "inspect --tree", "stats", "stats --all", "verify"])
def test_every_view_takes_keys_that_nobody_would_choose(view, tmp_path):
    keys = ["", "a\nb", "\x1b[31mred", "../..", "x" * 300, "[a]", "*", " "]
    muonckpt.save({key: torch.ones(2, 2) for key in keys}, tmp_path / "odd")
    command, *options = view.split()
    shown = called(command, tmp_path / "odd", *options)
    assert shown.returncode == 0 and "\x1b[31mred" not in shown.stdout


HOSTILE = "\x1b]0;hax\x07\x1b[31mred\u202e"
VIEWS = ("inspect", "inspect --tensors", "inspect --tree", "inspect --items", "inspect --groups", "inspect --ranks",
         "inspect --fits dp=2", "stats", "stats --all", "verify", "verify -v", "diff", "report")  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> tuple[Path, Path]:
    """Two files with such a name wherever a file can have one, and one in its own."""
    folder = tmp_path_factory.mktemp("hostile") / HOSTILE
    folder.mkdir()
    for step in (1, 2):
        state = {0: {name: torch.full((4, 3), float(step)) for name in ("exp_avg", "exp_avg_sq", HOSTILE)}}
        groups = [{"params": [0], "lr": 0.1, HOSTILE: HOSTILE, "param_names": [f"w{HOSTILE}"]}]
        content = {"model": {f"w{HOSTILE}": torch.ones(4, 3)}, "optimizer": {"state": state, "param_groups": groups}}
        torch.save({**content, HOSTILE: HOSTILE}, folder / f"{step}.pt")
    return folder / "1.pt", folder / "2.pt"


@pytest.mark.parametrize("columns", [None, 40])
@pytest.mark.parametrize("view", VIEWS)
def test_no_name_in_a_file_reaches_the_terminal_as_it_is(view, columns, hostile, tmp_path):
    command, *options = view.split()
    places = {"diff": hostile, "stats": [hostile[1], "--since", hostile[0]]}.get(command, hostile[:1])
    more = ["-o", tmp_path / "page.html", "--stats", "norms"] if command == "report" else []
    words = [command, *places, *options, *more]
    done = called(*words) if columns is None else on_terminal(columns, *words)
    assert done.returncode in (0, 1) and "hax" in done.stdout + done.stderr
    assert all(character.isprintable() or character == "\n" for character in without_colour(done.stdout))
    assert not re.search("\x1b]|\x07|\u202e", done.stderr)  # a bar moves the cursor


def test_the_title_of_a_page_is_a_name_that_nothing_can_control(tmp_path):
    muonckpt.save({"w": torch.ones(2)}, tmp_path / f"{HOSTILE}<b>")
    assert called("report", tmp_path / f"{HOSTILE}<b>", "-o", tmp_path / "page.html", "--stats", "none").returncode == 0
    page = (tmp_path / "page.html").read_text()
    title = r"\x1b]0;hax\x07\x1b[31mred\u202e&lt;b&gt; - muonckpt report"
    assert re.search("<title>(.*?)</title>", page)[1] == title
    assert all(character.isprintable() or character == "\n" for character in page)


def test_a_manifest_that_lacks_a_field_is_named_with_it(tmp_path):
    muonckpt.save({"w": torch.ones(3)}, tmp_path / "run")
    (tmp_path / "run" / "muonckpt.json").write_text('{"format": "muonckpt"}')
    done = called("inspect", tmp_path / "run")
    assert done.returncode == 1 and "muonckpt.json" in done.stdout and "lacks the field 'version'" in done.stdout
    printed = json.loads(called("inspect", tmp_path / "run", "--json").stdout)
    assert "lacks the field 'version'" in printed["damage"]


def test_ranks_that_get_much_more_than_others_are_warned_of(tmp_path):
    muonckpt.save({"experts": torch.ones(4, 64, 256), "dense": torch.ones(64, 8)}, tmp_path / "run")
    naive = called("reshard", tmp_path / "run", tmp_path / "out", "--mesh", "dp=32", "--dry-run").stdout
    assert "unbalanced" in naive and "'experts' has 4 parts for 32 ranks" in naive
    assert "a rank holds 8.06 KiB of tensors on average, 64.1 KiB at most" in naive
    arguments = ["reshard", tmp_path / "run", tmp_path / "out", "--mesh", "ep=4,dp=8", "--shard", "experts=ep:0,dp:1"]
    assert "unbalanced" not in called(*arguments).stdout


def test_names_are_not_folded_on_a_narrow_terminal(monkeypatch, capsys):
    key = "model.layers.17.mlp.experts.gate_up_proj.weight"
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_table(("tensor", "shape", "dtype", "bytes"), [(key, "128 x 4096 x 7168", "bfloat16", "7 GiB")])
    lines = without_colour(capsys.readouterr().out).splitlines()
    assert lines[1:] == [key, f"{'':<24}  128 x 4096 x 7168  bfloat16  7 GiB"]
    assert max(map(len, lines)) <= 60


def test_every_rank_of_a_mesh_is_listed(tiny_checkpoint, tmp_path):
    assert called("reshard", tiny_checkpoint, tmp_path / "three", "--mesh", "dp=3").returncode == 0
    rows = called("inspect", tmp_path / "three", "--ranks").stdout.splitlines()
    shares = rows[next(i for i, row in enumerate(rows) if row.startswith("rank ")) + 1 :]
    assert [row.split()[0] for row in shares] == ["0", "1", "2"]
    assert not re.search(r"^not_kept", "\n".join(rows), re.MULTILINE)
    assert "from checkpoint to rows on dp=3" in "\n".join(rows) and Path(tiny_checkpoint).name == "checkpoint"
