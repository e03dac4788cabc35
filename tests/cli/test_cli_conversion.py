"""Names, conventions and formats on the command line: `reshard` and `convert`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import called
from support.sharded import elements_of
from support.translated import nested

import muonckpt
from muonckpt.converters.translate.names import READY_MADE, NameRules, load_rules
from muonckpt.record.record import Manifest
from muonckpt.store.formats.registry import BUFFERS, OWN, format_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Q, K, V = torch.arange(12.0).reshape(4, 3), torch.ones(2, 3), torch.zeros(2, 3)
PARTS = {"a.q_proj.weight": Q, "a.k_proj.weight": K, "a.v_proj.weight": V}
FUSED = torch.cat([Q, K, V])


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Path:
    """Weights and momentum in three parts.  Do not change."""
    path = tmp_path_factory.mktemp("split") / "checkpoint"
    state = {name: {"momentum_buffer": 2 * value} for name, value in PARTS.items()}
    muonckpt.save({"model": PARTS, "optimizer": {"state": state}}, path)
    return path


@pytest.fixture
def stock(tmp_path) -> Path:
    """One matrix whose momentum follows nobody knows what."""
    path = tmp_path / "stock"
    dcp.save(nested({"momentum_buffer": torch.full((2, 3), 0.25)}, momentum=0.75), checkpoint_id=path, no_dist=True)
    return path


def read(path: Path) -> Manifest:
    return muonckpt.open(path).manifest


def floats(path: Path) -> dict[str, list[float]]:
    return {
        key: torch.frombuffer(bytearray(raw), dtype=torch.float32).tolist() for key, raw in elements_of(path).items()
    }


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_printed_table_edited_and_passed_does_what_it_says(split, tmp_path):
    printed = called("convert", "--show-rules", "hf-qkv")
    assert printed.returncode == 0 and NameRules.from_toml(printed.stdout) == load_rules("hf-qkv")
    (tmp_path / "rules.toml").write_text(printed.stdout.replace("qkv_proj", "wqkv") + "shares = [2, 1, 1]\n")
    there = ("--mesh", "dp=2", "--rules", tmp_path / "rules.toml")
    assert called("reshard", split, tmp_path / "fused", *there).returncode == 0
    found = floats(tmp_path / "fused")
    assert found["model.a.wqkv.weight"] == FUSED.reshape(-1).tolist()
    assert found["optimizer.state.a.wqkv.weight.momentum_buffer"] == (2 * FUSED).reshape(-1).tolist()
    back = ("--mesh", "dp=3", "--rules", f"inverse:{tmp_path / 'rules.toml'}")
    assert called("reshard", tmp_path / "fused", tmp_path / "back", *back).returncode == 0
    assert floats(tmp_path / "back") == floats(split)


def test_parts_that_were_cut_by_columns_are_joined_into_a_whole_tensor(split, tmp_path):
    columns = ("--mesh", "dp=2", "--shard", "*=dp:1")
    assert called("reshard", split, tmp_path / "columns", *columns).returncode == 0
    done = called("convert", tmp_path / "columns", tmp_path / "out", "--format", "zarr", "--rules", "hf-qkv")
    assert done.returncode == 0
    assert called("reshard", tmp_path / "out", tmp_path / "back", "--mesh", "dp=1").returncode == 0
    assert floats(tmp_path / "back")["model.a.qkv_proj.weight"] == FUSED.reshape(-1).tolist()


@pytest.mark.parametrize("command", ["reshard", "convert"])
def test_every_ready_made_table_is_listed_and_printed(command):
    assert all(f"{name} " in called(command, "--list-rules").stdout for name in READY_MADE)
    for name in READY_MADE:
        printed = called(command, "--show-rules", f"inverse:{name}").stdout
        assert NameRules.from_toml(printed) == load_rules(name).inverse()


def test_what_is_decided_is_said_before_it_is_done_and_recorded_after(split, tmp_path):
    line = (
        "convert",
        split,
        tmp_path / "out",
        "--format",
        "safetensors",
        "--to",
        "dion",
        "--convention",
        "ema",
        "--mu",
        0.5,
    )
    dry = called(*line, "--dry-run")
    assert dry.returncode == 0 and "3 momenta are multiplied by 2.0" in dry.stdout and not (tmp_path / "out").exists()
    plan = json.loads(called(*line, "--dry-run", "--json").stdout)
    assert plan["notes"] and plan["files"][0]["file"] == "out"
    done = called(*line)
    assert done.returncode == 0 and "fingerprints compared with the source's, all equal; " in done.stdout
    assert "for 3 tensors the source has no fingerprint to compare with" in done.stdout
    manifest = read(tmp_path / "out")
    assert manifest.provenance["exported"]["notes"] == plan["notes"]
    assert (tmp_path / "out").stat().st_size == plan["written"]
    assert {t.convention for t in manifest.tensors if t.slot == "momentum"} == {"sum"}


def test_tensors_that_are_renamed_are_selected_by_their_new_names(split, tmp_path):
    done = called(
        "convert", split, tmp_path / "out", "--format", "dcp", "--rules", "hf-qkv", "--select", "*.qkv_proj.*"
    )
    assert done.returncode == 0
    assert floats(tmp_path / "out").keys() == {
        "model.a.qkv_proj.weight",
        "optimizer.state.a.qkv_proj.weight.momentum_buffer",
    }


def test_a_slot_may_be_left_behind(split, tmp_path):
    done = called("reshard", split, tmp_path / "out", "--mesh", "dp=2", "--drop", "momentum_buffer", "--to", "titan")
    assert done.returncode == 0 and "left out: optimizer.state.a." in done.stdout
    assert floats(tmp_path / "out").keys() == PARTS.keys()
    assert len(read(tmp_path / "out").provenance["resharded"][-1]["left_out"]) == 3


@pytest.mark.parametrize(
    ("command", "target"), [(("reshard", "--mesh", "dp=2"), "torch_dist"), (("convert",), "torch_dist_chained")]
)
def test_a_checkpoint_for_megatron_stays_one(command, target, split, tmp_path):
    to = ("--to", target, "--convention", "ema", "--tensors-only")
    assert called("convert", split, tmp_path / "a", *to).returncode == 0
    assert called(command[0], tmp_path / "a", tmp_path / "b", *command[1:]).returncode == 0
    for name in "ab":
        assert json.loads((tmp_path / name / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


@pytest.mark.parametrize("written", ["zarr", "safetensors", "buffers"])
def test_small_values_are_read_from_any_format(written, tmp_path):
    state = {"exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.ones(2, 3), "step": torch.tensor(7.0)}
    muonckpt.save(nested(state), tmp_path / "own")
    assert called("convert", tmp_path / "own", tmp_path / "a", "--format", written, "--tensors-only").returncode == 0
    line = ("reshard", tmp_path / "a", tmp_path / "b", "--mesh", "dp=1", "--from", "dcp", "--to", "dion")
    assert called(*line, "--format", "dcp").returncode == 0
    assert floats(tmp_path / "b")["optimizer.state.w.step_dev"] == [7.0]


# --- conventions ------------------------------------------------------------------------------------------------------


def test_a_convention_that_nothing_says_must_be_said(stock, tmp_path):
    line = ("reshard", stock, tmp_path / "out", "--mesh", "dp=2")
    asked = called(*line, "--to", "torch", "--from", "dcp")
    assert asked.returncode == 3 and "--convention ema or --convention sum" in asked.stderr
    assert called(*line, "--to", "torch", "--from", "dcp", "--convention", "sum").returncode == 0
    assert floats(tmp_path / "out")["optimizer.state.w.momentum_buffer"] == [0.0625] * 6
    [momentum] = (t for t in read(tmp_path / "out").tensors if t.slot)
    assert momentum.convention == "ema"
    contradicted = called("reshard", tmp_path / "out", tmp_path / "next", "--mesh", "dp=1", "--convention", "sum")
    assert contradicted.returncode == 3 and "leave --convention out" in contradicted.stderr


def test_without_a_word_about_names_nothing_is_translated(stock, tmp_path):
    assert called("convert", stock, tmp_path / "out", "--format", "dcp").returncode == 0
    assert elements_of(tmp_path / "out") == elements_of(stock)
    [note] = json.loads(called("convert", stock, tmp_path / "x", "--format", "dcp", "--dry-run", "--json").stdout)[
        "notes"
    ]
    assert note.startswith("momentum: unknown, because")


# --- formats ----------------------------------------------------------------------------------------------------------


USAGE = {
    "convert a b --to-format tar": "tar",
    "convert a b --to-format dcp --mesh dp=2": "No such option",
    "reshard a b --mesh dp=2 --to moonlight": "moonlight",
    "reshard a b --mesh dp=2 --from nobody": "nobody",
    "reshard a b --mesh dp=2 --rules nobody": "none of megatron-swiglu",
    "reshard a b --mesh dp=2 --convention average": "average",
    "reshard a b --mesh dp=2 --mu 1": "--mu",
    "reshard a b --mesh dp=2 --step -1": "--step",
    "convert --show-rules nobody": "nobody",
}


@pytest.mark.parametrize("line", USAGE)
def test_2_is_a_mistake_in_the_command_line(line):
    done = called(*line.split())
    assert (done.returncode, done.stdout) == (2, "") and USAGE[line] in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "--mesh"),
        ("--format torch_dist", "--mesh"),
        ("--mesh dp=2 --shard-size 1MB", "--shard-size has no meaning for format dcp"),
        ("--format zarr --layout flat", "--layout has no meaning for format zarr"),
        ("--format safetensors --shard *=dp:0 --mesh dp=2", "--shard has no meaning"),
    ],
)
def test_2_is_an_option_that_a_format_needs_or_has_no_use_for(options, message, split, tmp_path):
    done = called("reshard", split, tmp_path / "out", *options.split())
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr
    assert not (tmp_path / "out").exists()


def test_2_is_also_a_slot_to_drop_that_is_not_there(split, tmp_path):
    done = called("reshard", split, tmp_path / "out", "--mesh", "dp=2", "--drop", "momentum")
    assert done.returncode == 2 and "here are momentum_buffer" in done.stderr


def test_2_is_a_table_that_fits_nothing(split, tmp_path):
    done = called("reshard", split, tmp_path / "out", "--mesh", "dp=2", "--rules", "megatron-experts")
    assert done.returncode == 2 and "no rule matches a parameter; parameters are a.k_proj.weight" in done.stderr


def test_2_is_a_table_that_is_none(split, tmp_path):
    (tmp_path / "rules.toml").write_text("[[rule]]\nfrom = 'a'\n")
    done = called("reshard", split, tmp_path / "out", "--mesh", "dp=2", "--rules", tmp_path / "rules.toml")
    assert done.returncode == 2 and "rules" in done.stderr


def test_one_rank_is_enough_and_whole_tensors_need_none(split, tmp_path):
    assert called("convert", split, tmp_path / "one", "--format", "dcp").returncode == 0
    assert {chunk.item.file for t in read(tmp_path / "one").tensors for chunk in t.chunks} == {"__0_0.distcp"}
    written = called("reshard", split, tmp_path / "zarr", "--format", "zarr")
    assert written.returncode == 0 and "note" not in written.stderr
    noted = called("reshard", split, tmp_path / "file", "--format", "safetensors", "--mesh", "dp=4")
    assert noted.returncode == 0 and "safetensors holds whole tensors" in noted.stdout


def test_a_format_that_is_not_named_is_that_of_the_source_where_ranks_write_it(split, tmp_path):
    for written in ("buffers", "zarr"):
        assert called("convert", split, tmp_path / written, "--format", written).returncode == 0
    for source, kind in ((split, OWN), (tmp_path / "buffers", BUFFERS), (tmp_path / "zarr", OWN)):
        out = tmp_path / f"of {source.name}"
        assert called("reshard", source, out, "--layout", "padded-nscost", "--mesh", "dp=2").returncode == 0
        assert format_of(out) is kind


def test_items_that_are_no_tensors_are_left_out_of_any_format_when_asked(stock, tmp_path):
    for number, written in enumerate(("dcp", "safetensors")):
        out = tmp_path / str(number)
        assert called("convert", stock, out, "--format", written, "--tensors-only").returncode == 0
        assert not read(out).blobs and len(read(out).tensors) == 2


def test_the_plan_of_a_layout_of_buffers_says_its_padding_and_balance(tiny_checkpoint, tmp_path):
    line = ("reshard", tiny_checkpoint, tmp_path / "out", "--mesh", "dp=2", "--layout", "padded-nscost", "--dry-run")
    shared = json.loads(called(*line, "--json").stdout)["buffers"]
    assert {each["of"] for each in shared} >= {"momentum_buffer", "exp_avg", "(not optimizer state)"}
    assert all(each["padding"] > 0 and len(each["ranks"]) == 2 for each in shared)
    told = called(*line).stdout
    assert "padded-nscost v1" in told and "of the mean" in told
