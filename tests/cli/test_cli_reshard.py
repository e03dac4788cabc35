"""`muonckpt reshard` on the command line: its options, its plan, and how it is interrupted."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time

import pytest
import torch
from support import sweep
from support.commands import COMMAND, arguments_of, called, cli, is_one_paragraph, without_progress
from support.launched import STRUCK
from support.sharded import elements_of

import muonckpt
from muonckpt.names.vocabulary import PLACEMENTS

LAYOUTS = ("rows", "flat", *PLACEMENTS)
HUGE = "9" * 5000
USAGE = [
    *(f"--mesh {mesh}" for mesh in ("dp=0", "dp=-2", "dp", "4", "dp=2,dp=2", "dp=HUGE")),
    *(f"--mesh dp=2 --memory {memory}" for memory in ("much", "1", "12parsec", "-1", "1.5GiB", "HUGE")),
    *(f"--mesh dp=2 --shard {rule}" for rule in ("x", "=dp:0", "*=dp", "*=dp:-1", "*=dp:0,", "*=:0", "*=dp:HUGE")),
    "--mesh dp=2 --jobs 0",
    "--mesh dp=2 --layout diagonal",
]


@pytest.mark.parametrize("line", USAGE)
def test_2_is_a_mistake_in_the_command_line(line):
    done = called("reshard", "a", "b", *line.replace("HUGE", HUGE).split())
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage:" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--shard", "*=tp:0"), "expected axes of the mesh (dp)"),
        (("--shard", "*weight*=dp:0,dp:1"), "each at most once"),
        (("--shard", "*=dp:1"), "does not have"),
        (("--shard", "x*=dp:0"), "matches none of"),
        (("--select", "x*"), "matches 'x*'"),
    ],
)
def test_2_is_also_a_target_that_does_not_fit_the_checkpoint(more, message, tiny_checkpoint, tmp_path):
    done = called(*arguments_of("reshard", tiny_checkpoint, tmp_path), *more)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mesh_rules_layout_selection_and_verify_in_one_pass(layout, tiny_checkpoint, tmp_path):
    more = ["--shard", "*.weight*=tp:1", "--layout", layout, "--select", "optimizer.*", "--json"]
    done = called("reshard", tiny_checkpoint, tmp_path / "out", "--mesh", "dp=2,tp=2", *more)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    found = json.loads(done.stdout)
    whole = {key: raw for key, raw in elements_of(tiny_checkpoint).items() if key.startswith("optimizer.")}
    assert elements_of(tmp_path / "out") == whole and found["fingerprints"].keys() == whole.keys()
    manifest = muonckpt.open(tmp_path / "out").outline
    step = manifest.provenance["resharded"][-1]
    assert [step[name] for name in ("mesh", "layout", "shard", "select")] == [
        {"dp": 2, "tp": 2}, layout, ["*.weight*=tp:1"], ["optimizer.*"]]  # fmt: skip
    [momentum] = [t for t in manifest.tensors if t.key == "optimizer.state.0.weight.momentum_buffer"]
    assert all(chunk.box.hi[1] <= 8 or chunk.box.lo[1] >= 8 for chunk in momentum.chunks)


def test_an_unknown_layout_is_a_usage_error_that_names_what_comes_close(tiny_checkpoint, tmp_path):
    done = called("reshard", tiny_checkpoint, tmp_path / "out", "--mesh", "dp=2", "--layout", "padded")
    assert done.returncode == 2 and "did you mean 'padded-n" in done.stderr


def test_help_names_every_layout(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # in a narrow terminal a name may be wrapped
    shown = " ".join(called("reshard", "--help").stdout.split())
    assert f"Layout of the output: {', '.join(LAYOUTS)}." in shown


@pytest.mark.parametrize("memory", ["64kb", "1 GiB", "2gib", "300MB"])
def test_memory_may_be_written_in_the_usual_ways(memory, tiny_checkpoint, tmp_path):
    assert called(*arguments_of("reshard", tiny_checkpoint, tmp_path), "--memory", memory).returncode == 0


def test_4_is_a_file_system_that_is_full(tiny_checkpoint, tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = cli(*arguments_of("reshard", tiny_checkpoint, tmp_path), preexec_fn=limit)
    assert done.returncode == 4 and "File too large" in done.stderr and is_one_paragraph(done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", sweep([2, 15], 15), ids=["SIGINT", "SIGTERM"])
def test_130_is_interrupted_and_leaves_nothing(number, tiny_checkpoint, tmp_path):
    command = [*STRUCK, str(number), "0", *arguments_of("reshard", tiny_checkpoint, tmp_path)]
    alone = os.environ | {"RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=alone)
    assert (done.returncode, done.stdout) == (130, "") and not list(tmp_path.iterdir())


def test_a_dry_run_says_what_would_be_written_and_a_run_writes_that(tiny_checkpoint, tmp_path):
    arguments = arguments_of("reshard", tiny_checkpoint, tmp_path)
    dry = called(*arguments, "--dry-run")
    assert dry.returncode == 0 and "would check" in dry.stdout and list(tmp_path.iterdir()) == []
    plan = json.loads(called(*arguments, "--dry-run", "--json").stdout)
    assert called(*arguments).returncode == 0
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "out").glob("*.distcp")}
    assert sizes == {file["file"]: file["bytes"] for file in plan["files"]}
    assert plan["written"] == sum(sizes.values())


@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.4])
def test_told_to_end_in_its_first_moments_it_ends_in_order(seconds, tmp_path):
    muonckpt.save({"w": torch.arange(6.0)}, tmp_path / "source")
    process = subprocess.Popen(
        [*COMMAND, "reshard", tmp_path / "source", tmp_path / "out", "--mesh", "dp=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(seconds)
    process.terminate()
    _, told = process.communicate(timeout=600)
    assert process.returncode in (0, 5, 130, -signal.SIGTERM), told
    assert "Traceback" not in told and "bug" not in told
    # What was told to end after it has published says 130, and no longer 5.
    published = (tmp_path / "out").exists()
    assert published or process.returncode != 0
    assert not published or (process.returncode != 5 and called("verify", tmp_path / "out").returncode == 0)
