"""Export: every element arrives in the other format, and a reader of that format sees it; or nothing appears."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch as stock_torch
import torch
import zarr
from click.testing import CliRunner
from support import sharded
from support.golden import golden
from support.resharded import make_job, plan_job, tensors_only
from support.sharded import bits, edit
from support.trees import tree

import muonckpt
from muonckpt.cli.convert import command
from muonckpt.converters.engine.job import Job
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.target.formats import _WHOLE_TENSOR_FORMATS, container_of
from muonckpt.converters.target.topology import Target
from muonckpt.converters.translate.request import unchanged
from muonckpt.errors import DestinationError, LayoutError, SourceError
from muonckpt.record import Manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KINDS = {
    "file": ("safetensors", None),
    "shards": ("safetensors", 700),
    "zarr": ("zarr", None),
    "zarr in parts": ("zarr", 300),
}


def plan(source: Path, kind: str, make_outputs=unchanged) -> Job:
    form, shard_bytes = KINDS[kind]
    return make_job(source, Target({"dp": 1}), make_outputs=make_outputs, container=container_of(form, shard_bytes))


def export(source: Path, destination: Path, kind: str, **how) -> Manifest:
    return run_job(plan(source, kind, tensors_only), destination, **how)


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


@pytest.fixture(scope="session")
def own(tmp_path_factory):
    """A checkpoint of this package on three ranks, of types that every format has.  Do not change."""
    folder = tmp_path_factory.mktemp("own")
    tensors = {key: value for key, value in sharded.small().items() if key != "complex128"}
    muonckpt.save({"t": tensors, "odd": {"ä b/c": torch.ones(3)}}, folder / "one")
    run_job(plan_job(folder / "one", 3), folder / "three")
    return folder / "three"


@pytest.fixture
def source(own, tmp_path):
    """The same, to be damaged."""
    return Path(shutil.copytree(own, tmp_path / "source"))


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


def test_the_budget_changes_no_byte(own, tmp_path):
    for kind in KINDS:
        for memory in (1, 1 << 30):
            export(own, tmp_path / f"{kind}{memory}", kind, memory=memory)
        one, other = (tree(tmp_path / f"{kind}{memory}") for memory in (1, 1 << 30))
        assert one == other and one


@pytest.mark.parametrize("name", ["own grid2x2", "stock turned2x2"])
def test_any_layout_of_any_type_becomes_zarr(name, tmp_path):
    sharded.save_all(name, "small", tmp_path / "source")
    export(tmp_path / "source", tmp_path / "out", "zarr")
    assert stock_read(tmp_path / "out") == {f"t.{k}": bits(v) for k, v in sharded.small().items()}


@pytest.mark.parametrize("name", sharded.GOLDENS)
def test_checkpoints_of_other_programs_keep_every_element(name, tmp_path):
    source = golden(name)
    expected = sharded.stock_load(source, muonckpt.open(source).outline)
    for kind in KINDS:
        export(source, tmp_path / kind, kind)
        assert stock_read(tmp_path / kind) == expected, kind


def test_formats_become_each_other_and_keep_their_fingerprints(own, tmp_path):
    chain = [own]
    for number, kind in enumerate(["zarr", "shards", "zarr in parts", "file", "shards", "zarr"]):
        chain.append(tmp_path / str(number))
        export(chain[-2], chain[-1], kind)
        assert described(muonckpt.open(chain[-1]).manifest) == described(muonckpt.open(own).outline)
        assert stock_read(chain[-1]) == stock_read(chain[1])
    step = muonckpt.open(chain[-1]).manifest.provenance
    assert step["exported"]["source"] == "4" and "resharded" in step


def test_what_others_wrote_is_exported_too(tmp_path):
    tensors = {"w": torch.arange(20.0).reshape(4, 5), "n": torch.tensor(3)}
    stock_torch.save_file(tensors, tmp_path / "a.safetensors")
    zarr.open_group(tmp_path / "z", mode="w").create_array("w", data=tensors["w"].numpy(), chunks=(3, 2))
    export(tmp_path / "a.safetensors", tmp_path / "b", "zarr")
    export(tmp_path / "z", tmp_path / "c", "file")
    assert stock_read(tmp_path / "b") == {key: bits(value) for key, value in tensors.items()}
    assert stock_read(tmp_path / "c") == {"w": bits(tensors["w"])}


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


MEASURED = """
import re, sys
from pathlib import Path
import muonckpt
from muonckpt.converters.engine.job import make_job
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.target.formats import container_of
from muonckpt.converters.target.topology import Target
from muonckpt.converters.translate.request import unchanged
def watch(count):
    seen.append(int(re.search(r"RssAnon:\\s*([0-9]+) kB", Path("/proc/self/status").read_text())[1]))
job, seen = make_job(muonckpt.open(sys.argv[1]), Target({"dp": 1}), (), unchanged, container_of(sys.argv[3])), []
watch(0)
run_job(job, Path(sys.argv[2]), memory=16 << 20, progress=watch)
print(max(seen) - seen[0])
"""


@pytest.mark.parametrize("target", _WHOLE_TENSOR_FORMATS)
def test_memory_stays_within_the_budget_whatever_the_shapes(target, tmp_path):
    shapes = {"matrix": (4096, 3200), "long": (12_000_000,), "tall": (6_000_000, 2), "row": (1, 2_000_000)}
    muonckpt.save({n: torch.ones(shape) for n, shape in shapes.items()}, tmp_path / "a")
    assert sum(file.stat().st_size for file in (tmp_path / "a").iterdir()) > 150e6
    script = [sys.executable, "-c", MEASURED, tmp_path / "a", tmp_path / "b", target]
    grown = int(subprocess.run(script, capture_output=True, check=True).stdout)
    assert grown < (16 << 10) + (24 << 10)  # KiB: the budget; and code, stacks and the weights of the fingerprint


# --- refused, or damaged ----------------------------------------------------------------------------------------------


def test_what_is_no_tensor_is_left_out_when_asked(tmp_path):
    muonckpt.save({"w": torch.ones(3), "lr": 0.5, "betas": (0.9, 0.95)}, tmp_path / "a")
    for kind in KINDS:
        manifest = export(tmp_path / "a", tmp_path / kind, kind)
        assert sorted(manifest.provenance["exported"]["left_out"]) == ["betas", "lr"]


def test_a_type_that_the_format_lacks_is_refused_by_name_before_anything_is_written(tmp_path):
    muonckpt.save({"w": torch.ones(3, dtype=torch.complex128)}, tmp_path / "a")
    with pytest.raises(SourceError, match="'w': safetensors has no dtype complex128"):
        plan(tmp_path / "a", "file")
    export(tmp_path / "a", tmp_path / "z", "zarr")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["t.bfloat16", "t.scalar"])
def test_a_flipped_bit_in_the_source_stops_everything(kind, key, source, tmp_path):
    (tensor,) = (tensor for tensor in muonckpt.open(source).outline.tensors if tensor.key == key)
    edit(source / tensor.chunks[-1].item.file, tensor.chunks[-1].payload.end - 1)
    with pytest.raises(SourceError, match=rf"'{re.escape(key)}'.*is damaged"):
        export(source, tmp_path / "out", kind)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("first", KINDS)
def test_a_flipped_bit_in_what_was_exported_stops_the_next(first, own, tmp_path):
    manifest = export(own, tmp_path / "a", first)
    (tensor,) = (tensor for tensor in manifest.tensors if tensor.key == "t.bfloat16")
    payload = tensor.chunks[-1].payload
    edit((tmp_path / "a" if first == "file" else tmp_path / "a" / payload.file), payload.end - 1)
    with pytest.raises(SourceError, match=r"'t\.bfloat16'.*(is damaged|have fingerprint)"):
        export(tmp_path / "a", tmp_path / "out", "zarr")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_hole_is_an_error_and_a_wrong_fingerprint_too(source, tmp_path):
    sharded.manifest_edited(source, lambda entries: entries["t.cube"].update(fingerprint="0" * 16))
    with pytest.raises(SourceError, match=r"'t\.cube'.*fingerprint [0-9a-f]{16}, .* 0{16}"):
        export(source, tmp_path / "out", "file")
    sharded.manifest_edited(source, lambda entries: entries["t.cube"]["chunks"].pop(1))
    with pytest.raises(LayoutError, match=r"'t\.cube'.*no buffer holds box"):
        export(source, tmp_path / "out", "file")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_a_source_that_changes_meanwhile_is_not_published(source, tmp_path):
    def touch(count: int) -> None:
        os.utime(source / "__1_0.distcp", ns=(0, 0))

    with pytest.raises(SourceError, match="changed while it was read"):
        export(source, tmp_path / "out", "zarr", progress=touch)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_spoilt_on_the_way_to_the_disk_is_found(kind, own, tmp_path, monkeypatch):
    real, written = os.pwrite, []

    def spoilt(handle: int, data: bytes | memoryview, at: int) -> int:
        elements = bytes(data[8:9]) != b"{"  # not the header of a file of safetensors
        written.extend([at] if elements else [])
        return real(handle, bytes(len(data)) if elements and len(written) == 1 else data, at)

    monkeypatch.setattr(os, "pwrite", spoilt)
    with pytest.raises(DestinationError, match="does not hold what was written"):
        export(own, tmp_path / "out", kind, verify=True)
    assert not list(tmp_path.iterdir()) and written


TAKEN = {
    "folder": lambda folder: (folder / "out").mkdir(),
    "file": lambda folder: (folder / "out").touch(),
    "dangling link": lambda folder: (folder / "out").symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("late", [False, True])
def test_what_is_there_is_never_replaced(kind, taken, late, own, tmp_path):
    def appears(count: int) -> None:
        if not os.path.lexists(tmp_path / "out"):
            TAKEN[taken](tmp_path)

    if not late:
        appears(0)
    with pytest.raises(DestinationError):
        export(own, tmp_path / "out", kind, progress=appears)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").is_symlink() or tree(tmp_path / "out") in ({}, {".": b""})


def test_a_place_inside_the_source_is_refused(source):
    with pytest.raises(DestinationError, match="inside the source"):
        export(source, source / "out", "zarr")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_did(own, tmp_path):
    done = CliRunner().invoke(command, [str(own), str(tmp_path / "a"), "--format", "zarr"])
    assert done.exit_code == 0, done.output
    assert re.search(r"17 tensors whole in 15 files, .*; 17 fingerprints compared with .*, all equal", done.output)
    muonckpt.save({"w": torch.ones(3), "lr": 0.5}, tmp_path / "b")
    more = ["--format", "safetensors", "--tensors-only", "--shard-size", "1MB", "--memory", "1MiB"]
    done = CliRunner().invoke(command, [str(tmp_path / "b"), str(tmp_path / "c"), *more])
    assert done.exit_code == 0 and "left out: lr\n" in done.output
    done = CliRunner().invoke(command, [str(tmp_path / "c"), str(tmp_path / "d"), *more[:2], "--json"])
    result = json.loads(done.stdout)
    assert result["fingerprints"] == {t.key: t.fingerprint for t in muonckpt.open(tmp_path / "b").outline.tensors}
    assert (result["read"], result["left_out"], result["format"]) == (12, [], "safetensors")


LOADED = """
import sys
from muonckpt.cli.convert import command
command(sys.argv[1:], standalone_mode=False)
print(sorted({"torch", "zarr", "safetensors"} & set(sys.modules)))
"""


@pytest.mark.parametrize("target", _WHOLE_TENSOR_FORMATS)
def test_neither_torch_nor_the_formats_own_libraries_are_needed(target, own, tmp_path):
    script = [sys.executable, "-c", LOADED, own, tmp_path / "a", "--format", target]
    out = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_the_plan_is_what_is_written_and_the_bytes_told_are_those_checked_written_and_read_back(own, tmp_path):
    for kind in KINDS:
        told: list[int] = []
        job = plan(own, kind)
        run_job(job, tmp_path / kind, verify=True, progress=told.append)
        assert sum(told) == job.bytes_to_check + 2 * job.payload_to_write
        sizes = sum(math.prod(t.shape) * getattr(torch, t.dtype).itemsize for t in job.manifest.tensors)
        assert job.bytes_to_check == job.payload_to_write == sizes
        described = ("zarr.json", "index.json")
        written = {name: len(data) for name, data in tree(tmp_path / kind).items() if not name.endswith(described)}
        assert written == {"." if file.name == job.container.root else file.name: file.length for file in job.files}
