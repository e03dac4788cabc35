"""Export: every element arrives in the other format, and a reader of that format sees it; or nothing appears."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch as stock_torch
import torch
import zarr
from support import sharded, sweep
from support.commands import called
from support.golden import golden
from support.resharded import KINDS, export, plain, plan_export
from support.sharded import bits
from support.trees import tree

import muonckpt
from muonckpt import SourceError
from muonckpt.converters.engine.run import run_job
from muonckpt.record.record import Manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def stock_read(path: Path) -> dict[str, bytes]:
    """Every tensor, as the format's own library reads it."""
    if (path / "zarr.json").exists():
        nodes = [node for _, node in zarr.open_group(path, mode="r").members(None) if isinstance(node, zarr.Array)]
        return {node.attrs["muonckpt"]["key"]: np.ascontiguousarray(node[...]).tobytes() for node in nodes}
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {key: bits(value) for file in files for key, value in stock_torch.load_file(file).items()}


def described(manifest: Manifest) -> dict[str, tuple]:
    return {
        t.key: (t.path, t.shape, t.dtype, t.name, t.slot, t.convention, t.pieces, t.layout, t.fingerprint)
        for t in manifest.tensors
    }


@pytest.fixture
def own() -> Path:
    return plain()


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", [1, 256 << 20])
def test_every_element_and_fact_arrives_and_the_budget_changes_no_byte(kind, memory, own, tmp_path):
    manifest = export(own, tmp_path / "out", kind, memory=memory)
    again = muonckpt.open(tmp_path / "out").manifest
    assert described(manifest) == described(muonckpt.open(own).outline) == described(again)
    tensors = {f"t.{key}": value for key, value in sharded.small().items() if key != "complex128"}
    expected = {key: bits(value) for key, value in tensors.items()}
    assert stock_read(tmp_path / "out") == expected | {"odd.ä b/c": bits(torch.ones(3))}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert "left_out" not in manifest.provenance["exported"]


@pytest.mark.parametrize("name", ["own grid2x2", "stock turned2x2"])
def test_any_layout_of_any_type_becomes_zarr(name, tmp_path):
    sharded.save_all(name, "small", tmp_path / "source")
    export(tmp_path / "source", tmp_path / "out", "zarr")
    assert stock_read(tmp_path / "out") == {f"t.{k}": bits(v) for k, v in sharded.small().items()}


@pytest.mark.parametrize("kinds", sweep(["file, zarr in parts", "shards, zarr"], "file, zarr in parts"))
@pytest.mark.parametrize("name", sweep(sharded.GOLDENS, *sharded.GOLDENS[1::2]))
def test_checkpoints_of_other_programs_keep_every_element(name, kinds, tmp_path):
    source = golden(name)
    expected = sharded.stock_load(source, muonckpt.open(source).outline)
    for kind in kinds.split(", "):
        export(source, tmp_path / kind, kind)
        assert stock_read(tmp_path / kind) == expected, kind


def test_wide_rows_and_many_chunks(tmp_path):
    wide = {key: value for key, value in sharded.wide().items() if value.dtype != torch.complex128}
    muonckpt.save(wide | {"big": torch.arange(3_000_000.0).reshape(1500, 2000)}, tmp_path / "a")
    for kind in ("file", "zarr"):
        export(tmp_path / "a", tmp_path / kind, kind)
        found = stock_read(tmp_path / kind)
        assert {key: found[key] for key in wide} == {key: bits(value) for key, value in wide.items()}
        assert np.frombuffer(found["big"], "<f4")[-1] == 2_999_999
    manifest = muonckpt.open(tmp_path / "zarr").manifest
    assert {t.key: len(t.chunks) for t in manifest.tensors}["big"] == 3  # of 4 MiB at most


# --- refused, or damaged ----------------------------------------------------------------------------------------------


def test_a_type_that_the_format_lacks_is_refused_by_name_before_anything_is_written(tmp_path):
    muonckpt.save({"w": torch.ones(3, dtype=torch.complex128)}, tmp_path / "a")
    with pytest.raises(SourceError, match="'w': safetensors has no dtype complex128"):
        plan_export(tmp_path / "a", "file")
    export(tmp_path / "a", tmp_path / "z", "zarr")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_did(own, tmp_path):
    done = called("convert", own, tmp_path / "a", "--format", "zarr")
    assert done.returncode == 0, done.stderr
    assert re.search(r"17 tensors, .*, whole in 15 files .*; 17 fingerprints compared with .*, all equal", done.stdout)
    muonckpt.save({"w": torch.ones(3), "lr": 0.5}, tmp_path / "b")
    more = ["--format", "safetensors", "--tensors-only", "--shard-size", "1MB", "--memory", "1MiB"]
    done = called("convert", tmp_path / "b", tmp_path / "c", *more)
    assert done.returncode == 0 and "left out: lr\n" in done.stdout
    done = called("convert", tmp_path / "c", tmp_path / "d", *more[:2], "--json")
    result = json.loads(done.stdout)
    assert result["fingerprints"] == {t.key: t.fingerprint for t in muonckpt.open(tmp_path / "b").outline.tensors}
    assert (result["read"], result["left_out"], result["format"]) == (12, [], "safetensors")


LOADED = """
import sys
from muonckpt.cli.rewriting import convert_command
convert_command(sys.argv[1:], standalone_mode=False)
print(sorted({"torch", "zarr", "safetensors"} & set(sys.modules)))
"""


@pytest.mark.parametrize("target", ["safetensors", "zarr"])
def test_neither_torch_nor_the_formats_own_libraries_are_needed(target, own, tmp_path):
    script = [sys.executable, "-c", LOADED, own, tmp_path / "a", "--format", target]
    out = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_the_plan_is_what_is_written_and_the_bytes_told_are_those_checked_and_written(own, tmp_path):
    for kind in KINDS:
        told: list[int] = []
        job = plan_export(own, kind)
        run_job(job, tmp_path / kind, progress=told.append)
        assert sum(told) == job.bytes_to_check + job.payload_to_write
        sizes = sum(math.prod(t.shape) * getattr(torch, t.dtype).itemsize for t in job.manifest.tensors)
        assert job.bytes_to_check == job.payload_to_write == sizes
        described = ("zarr.json", "index.json")
        written = {name: len(data) for name, data in tree(tmp_path / kind).items() if not name.endswith(described)}
        assert written == {"." if file.name == job.container.root else file.name: file.length for file in job.files}
