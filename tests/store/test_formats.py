"""One door for every format: inspect, verify and reshard take what convert writes, and what others wrote."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import zarr
from safetensors.torch import save_file
from support import sharded
from support.commands import run
from support.sharded import bits, edit

import muonckpt
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


@pytest.mark.parametrize("name", KINDS)
def test_a_flipped_bit_is_a_finding_in_every_format(name, made, tmp_path):
    assert run(["convert", str(made / "own"), str(tmp_path / "a"), *KINDS[name][1]]) == 0
    checkpoint = muonckpt.open(tmp_path / "a")
    payload = checkpoint.tensors["float32"].record.chunks[0].payload
    edit(checkpoint.payloads.directory / payload.file, payload.end - 1, bit=0)
    assert {"fingerprint"} <= {finding.kind for finding in muonckpt.verify(tmp_path / "a").findings}
    assert run(["verify", str(tmp_path / "a")]) == 1
    assert run(["reshard", str(tmp_path / "a"), str(tmp_path / "b"), "--mesh", "dp=2"]) == 3
    assert not (tmp_path / "b").exists()


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
