"""``muonckpt.open``: tensors, items and groups of a checkpoint of any format, read once."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import run
from support.sharded import edit

import muonckpt
from muonckpt import LayoutError, SourceError
from muonckpt.names.wording import as_json
from muonckpt.record.json_fields import sealed_text
from muonckpt.store.io.location import location
from muonckpt.store.open_checkpoint import checked_blob

STATE = {
    "w": torch.arange(120.0).reshape(12, 10) / 7,
    "half": torch.linspace(-3, 3, 30, dtype=torch.bfloat16).reshape(3, 2, 5),
    "wide": torch.arange(6).reshape(2, 3) * torch.tensor(1 + 2j, dtype=torch.complex128),
    "mask": torch.tensor([True, False, True]),
    "small": torch.zeros(4, dtype=torch.float8_e4m3fn),
    "none": torch.zeros(0, 4),
    "step": torch.tensor(3),
}
OPTIMIZER = {
    "state": {"w": {"momentum_buffer": torch.ones(12, 10)}},
    "param_groups": [{"params": ["w"], "lr": 0.02, "betas": (0.9, 0.95), "weight_decay": torch.tensor(0.5)}],
}
NUMBERS = {key: value for key, value in STATE.items() if key not in ("wide", "small")}
"""Those that every format has a type for."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint of ours, a stock one, and its tensors in the formats of whole tensors.  Do not change."""
    folder = tmp_path_factory.mktemp("saved")
    muonckpt.save({"model": STATE, "optimizer": OPTIMIZER, "epoch": 2}, folder / "own", provenance={"step": 7})
    dcp.save({"model": STATE, "optimizer": OPTIMIZER, "epoch": 2}, checkpoint_id=folder / "stock", no_dist=True)
    muonckpt.save(NUMBERS, folder / "numbers")
    for name, form in WHOLE.items():
        assert run(["convert", str(folder / "numbers"), str(folder / name), "--format", form]) == 0
    assert run(["convert", str(folder / "own"), str(folder / "buffers"), "--format", "buffers"]) == 0
    for name in ("own", "stock"):
        assert run(["reshard", str(folder / name), str(folder / f"{name} columns"), *COLUMNS]) == 0
    return folder


COLUMNS = ["--mesh", "dp=2,tp=2", "--shard", "model.w=dp:0,tp:1", "--shard", "*="]
WHOLE = {"model.safetensors": "safetensors", "zarr": "zarr"}
KINDS = {"own": "muonckpt", "stock": "stock DCP", "own columns": "muonckpt", "buffers": "flat buffers"}


def values(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_items_and_groups(kind, saved):
    with muonckpt.open(saved / kind) as checkpoint:
        assert checkpoint.format.name == KINDS[kind]
        assert checkpoint.tensors.keys() == {f"model.{key}" for key in STATE} | {
            "optimizer.state.w.momentum_buffer",
            "optimizer.param_groups.0.weight_decay",
        }
        for key in STATE.keys() - {"small"}:
            tensor = checkpoint.tensors[f"model.{key}"]
            assert (tensor.shape, f"torch.{tensor.dtype}") == (tuple(STATE[key].shape), str(STATE[key].dtype))
            array = tensor.numpy()
            assert array.dtype == values(STATE[key]).dtype and np.array_equal(array, values(STATE[key])), key
        momentum = checkpoint.tensors["optimizer.state.w.momentum_buffer"]
        assert (momentum.name, momentum.slot) == ("w", "momentum_buffer")
        assert checkpoint.items["epoch"] == 2 and checkpoint.items["optimizer.param_groups.0.betas"] == (0.9, 0.95)
        assert sorted(checkpoint.items) == [
            "epoch",
            *(f"optimizer.param_groups.0.{o}" for o in ("betas", "lr", "params")),
        ]
        assert checkpoint.groups == {
            "optimizer.param_groups.0": {"params": ["w"], "lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.5}
        }
        assert checkpoint.provenance.get("step") == (None if kind == "stock" else 7)


SELECTIONS = [
    np.s_[:],
    np.s_[...],
    np.s_[3],
    np.s_[-1, -2],
    np.s_[2:7],
    np.s_[2:7, ...],
    np.s_[..., 4:6],
    np.s_[5:5],
    np.s_[9:3, :2],
    np.s_[3:100, -4:],
    np.s_[4, 2:9],
]


@pytest.mark.parametrize("kind", ["own", "stock", "own columns", "stock columns", "buffers"])
@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_a_box_is_read_as_numpy_indexes_it(selection, kind, saved):
    box = muonckpt.open(saved / kind).tensors["model.w"][selection]
    expected = STATE["w"].numpy()[selection]
    assert box.shape == expected.shape and np.array_equal(box, expected)


def test_what_numpy_would_not_index_is_refused(saved):
    tensor = muonckpt.open(saved / "own").tensors["model.w"]
    for selection in (12, np.s_[0, 10], np.s_[::2], np.s_[1, 2, 3], np.s_[..., 1, ...]):
        with pytest.raises(IndexError):
            tensor[selection]
    assert muonckpt.open(saved / "own").tensors["model.step"][()] == 3


def test_types_that_numpy_lacks_are_given_as_bits(saved):
    tensors = muonckpt.open(saved / "own").tensors
    with pytest.raises(SourceError, match=r"'model.small': numpy has no float8_e4m3fn; bits\(\)"):
        tensors["model.small"].numpy()
    assert tensors["model.small"].bits().dtype == np.uint8
    assert np.array_equal(tensors["model.half"].bits(), STATE["half"].view(torch.uint16).numpy())


def test_damage_is_seen_when_the_chunk_is_read(saved, tmp_path):
    muonckpt.save({"w": STATE["w"], "v": torch.ones(5), "lr": 0.5}, tmp_path / "c")
    chunk = muonckpt.open(tmp_path / "c").tensors["w"].record.chunks[0]
    edit(tmp_path / "c" / chunk.payload.file, chunk.payload.offset + 4 * 70)
    damaged = muonckpt.open(tmp_path / "c")
    assert damaged.tensors["v"].numpy().sum() == 5 and damaged.items["lr"] == 0.5
    with pytest.raises(SourceError, match=r"tensor 'w' box \[0:12, 0:10\] .* is damaged: digest"):
        damaged.tensors["w"][0, :2]  # these bytes are right, and nobody can know it


def test_a_hole_is_refused(saved, tmp_path):
    text = (saved / "own columns" / "muonckpt.json").read_text()
    (tmp_path / "muonckpt.json").write_text(
        sealed_text(
            text.replace('"lo": [[0, 0], [0, 5], [6, 0], [6, 5]]', '"lo": [[0, 0], [0, 5], [6, 0], [6, 6]]').rpartition(
                ",\n"
            )[0]
        )
    )
    with pytest.raises(LayoutError, match=r"model\.w"):
        muonckpt.open(tmp_path).tensors["model.w"].numpy()


def test_a_key_that_occurs_twice_is_refused(tmp_path):
    muonckpt.save({"w": torch.ones(2), "lr": 1}, tmp_path / "c")
    manifest = muonckpt.open(tmp_path / "c").manifest
    doubled = replace(manifest, tensors=manifest.tensors * 2, blobs=manifest.blobs * 2)
    (tmp_path / "c" / "muonckpt.json").write_text(doubled.to_json())
    for key, read in (("w", "tensors"), ("lr", "items")):
        with pytest.raises(SourceError, match=f"each key once, found '{key}' twice"):
            getattr(muonckpt.open(tmp_path / "c"), read)


def test_an_item_that_holds_more_than_plain_data_is_refused_and_not_run(tmp_path):
    dcp.save({"w": torch.ones(2), "when": Path("x")}, checkpoint_id=tmp_path, no_dist=True)
    checkpoint = muonckpt.open(tmp_path)
    assert "when" in checkpoint.items
    with pytest.raises(SourceError, match=r"item 'when': .*pathlib"):
        checkpoint.items["when"]


def test_flattened_groups_go_by_their_parameter(tmp_path):
    muonckpt.save({"param_groups.a.b.weight.lr": 0.5, "param_groups.a.b.weight.betas": [1.0], "x": 1}, tmp_path / "c")
    groups = muonckpt.open(tmp_path / "c").groups
    assert groups == {"param_groups.a.b.weight": {"lr": 0.5, "betas": [1.0]}}


def test_what_is_not_there_and_what_nobody_speaks_is_said(tmp_path):
    with pytest.raises(SourceError, match="no directory"):
        muonckpt.open(tmp_path / "nothing")
    with pytest.raises(SourceError, match="cannot open nonsense://x/y"):
        muonckpt.open("nonsense://x/y")


def test_the_home_directory_and_urls_are_places(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(saved))
    assert muonckpt.open("~/own").tensors.keys() == muonckpt.open((saved / "own").as_uri()).tensors.keys()
    assert run(["reshard", str(saved / "own"), "memory://bucket/opened", "--mesh", "dp=3"]) == 0
    with muonckpt.open("memory://bucket/opened") as remote:
        assert np.array_equal(remote.tensors["model.w"].numpy(), STATE["w"].numpy())
    assert not muonckpt.verify("memory://bucket/opened").findings
    location("memory://bucket/opened").remove()


@pytest.mark.parametrize("kind", KINDS)
def test_inspect_returns_what_the_command_prints(kind, saved, capsys):
    inspection = muonckpt.inspect(saved / kind)
    assert run(["inspect", str(saved / kind), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("seconds") >= 0 and printed == json.loads(json.dumps(inspection, default=as_json))
    assert (inspection.kind, inspection.tensors, inspection.other_items) == (KINDS[kind], len(STATE) + 2, 4)
    assert {
        "slot": "momentum_buffer",
        "tensors": 1,
        "elements": 120,
        "bytes": 480,
        "dtypes": ["float32"],
    } in inspection.slots


def test_all_that_the_package_exports_is_there_and_listed():
    assert {name for name in muonckpt.__all__ if getattr(muonckpt, name, None) is None} == set()
    assert set(muonckpt.__all__) <= set(dir(muonckpt))
    with pytest.raises(AttributeError, match="no attribute 'close'"):
        muonckpt.close  # noqa: B018


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch) -> Counter:
    """Every read of an open file: (path, offset) and how often."""
    counted: Counter = Counter()
    read = os.pread

    def counting(handle: int, length: int, offset: int) -> bytes:
        counted[str(Path(f"/proc/self/fd/{handle}").readlink()), offset] += 1
        return read(handle, length, offset)

    monkeypatch.setattr(os, "pread", counting)
    return counted


def test_to_look_at_the_tensors_of_a_stock_checkpoint_opens_no_item(saved, reads):
    checkpoint = muonckpt.open(saved / "stock")
    assert checkpoint.tensors["model.w"].shape == (12, 10) and len(checkpoint.items) == 4
    assert {Path(name).name for name, _ in reads} == {".metadata"} and set(reads.values()) == {1}
    checkpoint.tensors["model.w"].numpy()
    item = checkpoint.tensors["model.w"].record.chunks[0].item
    assert all(item.offset <= offset < item.end for name, offset in reads if ".metadata" not in name)
    seen = reads.total()
    checkpoint.tensors["model.w"][3:]
    assert reads.total() == seen


COMMANDS = {
    "inspect": ["inspect", "--tensors"],
    "verify": ["verify"],
    "reshard": ["reshard", "--mesh", "dp=2"],
    "convert": ["convert", "--format", "zarr", "--tensors-only"],
    "plan": ["reshard", "--mesh", "dp=3", "--dry-run"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", [*KINDS, *WHOLE])
def test_a_command_reads_no_metadata_and_no_head_of_an_item_twice(kind, command, saved, tmp_path, reads):
    name, *options = COMMANDS[command]
    places = [str(saved / kind), *([str(tmp_path / "out")] if name in ("reshard", "convert") else [])]
    select = ["--select", "*w*"] if name == "convert" else []  # zarr has no type for all of them
    assert run([name, *places, *options, *select]) in (0, 1)  # some numbers are NaN
    mine = {read: count for read, count in reads.items() if read[0].startswith(str(saved))}
    assert mine and set(mine.values()) == {1}, {read: count for read, count in mine.items() if count > 1}


@pytest.mark.parametrize("look", [muonckpt.verify, muonckpt.open])
def test_a_checkpoint_that_is_published_while_somebody_looks_is_missing_or_whole(look, tmp_path, monkeypatch):
    staged = tmp_path / "staged"
    muonckpt.save({"w": torch.ones(3)}, staged)
    real = Path.stat

    def overtaken(path: Path, **options: bool) -> os.stat_result:
        try:
            return real(path, **options)
        finally:
            if path == tmp_path / "out" and staged.exists():
                staged.rename(path)

    monkeypatch.setattr(Path, "stat", overtaken)
    with pytest.raises(SourceError, match="found no directory"):
        look(tmp_path / "out")
    assert muonckpt.verify(tmp_path / "out").verdict == "whole"


@pytest.mark.parametrize("kind", ["own", "stock", "buffers", *WHOLE])
def test_an_open_checkpoint_stays_where_it_was_when_the_program_goes_to_another_folder(kind, saved, monkeypatch):
    monkeypatch.chdir(saved)
    with muonckpt.open(kind) as opened:
        monkeypatch.chdir("/")
        half = next(tensor for key, tensor in opened.tensors.items() if key.endswith("half"))
        assert half.numpy().tobytes() == STATE["half"].float().numpy().tobytes()
        opened.close()  # a file is opened again when it is read
        assert sum(tensor.bits().size for tensor in opened.tensors.values()) > 150
        assert all(opened.items[key] is not ... for key in opened.items)


@pytest.mark.parametrize("name", ["own", "stock"])
def test_an_item_is_read_once_so_that_its_bytes_are_those_that_were_checked(name, saved, monkeypatch):
    opened, honest, seen = muonckpt.open(saved / name), os.preadv, set[int]()

    def changing(handle: int, buffers: tuple[memoryview, ...], offset: int) -> int:
        filled = honest(handle, buffers, offset)
        if offset in seen:  # by another program, in the meantime
            buffers[0][:filled] = bytes(filled)
        seen.add(offset)
        return filled

    blob = next(blob for blob in opened.outline.blobs if blob.key == "epoch")
    monkeypatch.setattr(os, "preadv", changing)
    assert torch.load(io.BytesIO(checked_blob(opened.payloads, blob))) == 2
    with pytest.raises(SourceError, match=r"item 'epoch' in .* is damaged"):
        checked_blob(opened.payloads, blob)
