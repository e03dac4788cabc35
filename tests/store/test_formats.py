"""One door for every format: inspect, verify and reshard take what convert writes, and what others wrote."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from safetensors.torch import save_file
from support import sharded
from support.commands import run
from support.sharded import bits

import muonckpt
from muonckpt import DamageError, SourceError
from muonckpt.store.formats.registry import DCP, OWN, SAFETENSORS, ZARR, format_of

KINDS = {
    "file": (SAFETENSORS, ["--format", "safetensors"]),
    "shards": (SAFETENSORS, ["--format", "safetensors", "--shard-size", "500"]),
    "hierarchy": (ZARR, ["--format", "zarr"]),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint, and the same in every format.  Do not change."""
    folder = tmp_path_factory.mktemp("made")
    values = {key: value for key, value in sharded.small().items() if not value.is_complex()}
    tensors = {key: torch.nan_to_num(value.float()) for key, value in values.items()}
    muonckpt.save(tensors, folder / "own")
    for name, (_, arguments) in KINDS.items():
        assert run(["convert", str(folder / "own"), str(folder / name), *arguments]) == 0
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_what_was_exported_is_inspected_verified_and_resharded(name, made, tmp_path, capsys):
    assert format_of(made / "own") is OWN and format_of(made / name) is KINDS[name][0]
    assert run(["inspect", str(made / name), "--json", "--tensors"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["kind"] == KINDS[name][0].name
    assert summary["tensors"] == len(muonckpt.open(made / "own").tensors)
    assert run(["verify", str(made / name)]) == 0
    assert "cannot be judged" not in capsys.readouterr().out
    assert run(["reshard", str(made / name), str(tmp_path / "out"), "--mesh", "dp=3"]) == 0
    before, after = muonckpt.open(made / "own").outline, muonckpt.open(tmp_path / "out").outline
    assert {t.key: t.fingerprint for t in before.tensors} == {t.key: t.fingerprint for t in after.tensors}
    assert sharded.elements_of(tmp_path / "out") == sharded.elements_of(made / "own")


@pytest.mark.parametrize("codec", [None, "auto"])
def test_arrays_of_others_are_resharded(codec, tmp_path):
    data = np.arange(60.0, dtype="f4").reshape(12, 5)
    how = {"chunks": (5, 3), "compressors": codec, "config": {"write_empty_chunks": True}}
    zarr.open_group(tmp_path / "z", mode="w").create_array("w", data=data, **how)
    save_file({"w": torch.from_numpy(data)}, tmp_path / "f")
    for name in ("z", "f"):
        assert run(["verify", str(tmp_path / name)]) == 0
        assert run(["reshard", str(tmp_path / name), str(tmp_path / f"{name}4"), "--mesh", "dp=4"]) == 0
        assert sharded.elements_of(tmp_path / f"{name}4") == {"w": bits(torch.from_numpy(data))}


def test_what_shows_no_format_is_taken_for_dcp(tmp_path):
    assert format_of(tmp_path) is DCP
    with pytest.raises(muonckpt.SourceError, match="found no directory"):
        format_of(tmp_path / "nothing")
    assert run(["inspect", str(tmp_path / "nothing")]) == 3


UNREAD = {
    "zarr v2": (lambda place: zarr_2(place), r"\.zgroup is of zarr v2, which is not read: .* zarr_format=3"),
    "a lone array of zarr v2": (
        lambda place: (zarr_2(place), (place / ".zgroup").unlink()),
        r"w/\.zarray is of zarr v2, which is not read",
    ),
    "OCDBT": (lambda place: write(place / "ocdbt.process_0" / "manifest.ocdbt"), "is of an OCDBT database"),
    "zarr v3 without groups": (lambda place: ungrouped(place), r"a/b/w/zarr.json is of zarr v3 whose groups lack"),
    "GGUF": (lambda place: write(place / "q4.gguf"), r"q4\.gguf is of GGUF"),
    "nothing known": (lambda place: write(place / "notes.txt"), r"found no \.metadata and no other known file$"),
}


def write(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x")


def zarr_2(place: Path) -> None:
    zarr.open_group(place, mode="w", zarr_format=2).create_array("w", data=np.arange(6.0), chunks=(3,))


def ungrouped(place: Path) -> None:
    """As tensorstore writes arrays: nothing describes the groups above them."""
    data = np.arange(6.0)
    zarr.open_group(place / "a", mode="w").require_group("b").create_array(
        "w", data=data, chunks=(3,), compressors=None
    )
    for group in (place / "a", place / "a" / "b"):
        (group / "zarr.json").unlink()


@pytest.mark.parametrize("kind", UNREAD)
def test_what_is_recognised_and_not_read_is_named(kind, tmp_path):
    make, why = UNREAD[kind]
    make(tmp_path / "x")
    with pytest.raises(SourceError, match=why):
        muonckpt.open(tmp_path / "x")


def test_arrays_without_groups_are_read_after_what_the_error_advises(tmp_path):
    ungrouped(tmp_path / "x")
    assert [*muonckpt.open(tmp_path / "x" / "a" / "b" / "w").tensors] == ["w"]
    with pytest.raises(SourceError) as error:
        muonckpt.open(tmp_path / "x")
    text = re.search(r"\{.*\}", str(error.value))
    for group in ("x", "x/a", "x/a/b"):
        (tmp_path / group / "zarr.json").write_text(text[0])
    with muonckpt.open(tmp_path / "x") as opened:
        np.testing.assert_array_equal(opened.tensors["a/b/w"].numpy(), np.arange(6.0))


@pytest.mark.parametrize("file", ["own/__0_0.distcp", "own/.metadata", "own/muonckpt.json", "hierarchy/zarr.json"])
def test_one_file_of_a_checkpoint_is_told_from_its_folder(file, made):
    with pytest.raises(
        SourceError, match=f"is one file of a checkpoint: give its folder, {(made / file).parent}"
    ) as error:
        muonckpt.open(made / file)
    assert muonckpt.open(str(error.value).rpartition(", ")[2]).tensors


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
def test_a_hierarchy_whose_root_repeats_the_arrays_loses_none_in_silence(tmp_path):
    """zarr's consolidated metadata: a description that is lost is taken from there, and a difference is told."""
    how = {"chunks": (3,), "compressors": None, "config": {"write_empty_chunks": True}}
    group = zarr.open_group(tmp_path / "z", mode="w")
    for name in ("a", "b", "c"):
        group.create_array(name, data=np.arange(6.0), **how)
    zarr.consolidate_metadata(tmp_path / "z")
    assert muonckpt.open(tmp_path / "z").tensors.keys() == {"a", "b", "c"}
    described = (tmp_path / "z" / "b" / "zarr.json").read_text()
    (tmp_path / "z" / "b" / "zarr.json").unlink()
    with pytest.raises(DamageError, match=r"its zarr.json of b is missing; all 3 arrays are there"):
        muonckpt.open(tmp_path / "z")
    (tmp_path / "z" / "b" / "zarr.json").write_text(described.replace('"float64"', '"int64"', 1))
    with pytest.raises(DamageError, match=r"do not say the same of that array"):
        muonckpt.open(tmp_path / "z")
    shutil.rmtree(tmp_path / "z" / "b")
    report = muonckpt.verify(tmp_path / "z")
    assert [tensor.key for tensor in report.damage.tensors] == ["b"]
