"""A format that another package brings is read and written by every command; a broken plug-in is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import called

import muonckpt
from muonckpt.converters.engine.container import FORMATS, Container
from muonckpt.programs.registry import with_plugins
from muonckpt.store.formats.registry import BUILT_IN, import_named

PLUGIN = Path(__file__).parents[1] / "support" / "plugin"


@pytest.fixture
def arrays(tmp_path):
    folder = tmp_path / "arrays"
    folder.mkdir()
    values = {"up": np.arange(24, dtype=np.float32).reshape(6, 4), "norm": np.ones(5, np.float64)}
    for name, value in values.items():
        np.save(folder / f"{name}.npy", value)
    return folder, values


def installed(folder: Path, name: str, value: str, group: str = "muonckpt.formats") -> Path:
    """A package with one entry point, as pip leaves it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    return folder


def test_a_plugin_is_found_where_it_is_installed_and_serves_every_command(arrays, tmp_path, monkeypatch):
    folder, values = arrays
    with pytest.raises(muonckpt.SourceError, match=r"found no \.metadata"):
        muonckpt.open(folder)
    monkeypatch.syspath_prepend(PLUGIN)
    with muonckpt.open(folder) as checkpoint:
        assert checkpoint.format.name == "a folder of .npy files"
        assert {key: tensor.numpy().tolist() for key, tensor in checkpoint.tensors.items()} == {
            key: value.tolist() for key, value in values.items()
        }
    assert muonckpt.verify(folder).verdict == "readable, unchecked"
    assert called("reshard", folder, tmp_path / "two", "--mesh", "dp=2").returncode == 0
    assert called("diff", folder, tmp_path / "two", "--summary").returncode == 0
    assert (muonckpt.open(tmp_path / "two").tensors["up"].numpy() == values["up"]).all()


def test_a_plugin_refuses_what_it_cannot_read_as_it_lies(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(PLUGIN)
    folder = tmp_path / "arrays"
    folder.mkdir()
    np.save(folder / "w.npy", np.arange(3, dtype=">f4"))
    with pytest.raises(muonckpt.SourceError, match="elements of >f4 cannot be read as they lie"):
        muonckpt.inspect(folder)
    np.save(folder / "w.npy", np.arange(3, dtype="<f4"))
    whole = (folder / "w.npy").read_bytes()
    (folder / "w.npy").write_bytes(whole.replace(b"(3,)", b"((3,"))
    with pytest.raises(muonckpt.SourceError):
        muonckpt.inspect(folder)


def test_a_plugin_writes(tiny_checkpoint, tmp_path, monkeypatch):
    arguments = ("convert", tiny_checkpoint, tmp_path / "out", "--format", "npy", "--tensors-only")
    refused = called(*arguments)
    assert refused.returncode == 2 and "'npy' is not one of 'dcp'" in refused.stderr
    with pytest.raises(muonckpt.TargetError, match=r"unknown format .npy.; expected one of dcp, .* or of a plug-in"):
        muonckpt.reshard(tiny_checkpoint, tmp_path / "out", mesh={"dp": 2}, format="npy")
    monkeypatch.syspath_prepend(PLUGIN)
    assert called(*arguments).returncode == 0
    muonckpt.reshard(tiny_checkpoint, tmp_path / "beside", format="npy")
    with muonckpt.open(tiny_checkpoint) as source, muonckpt.open(tmp_path / "beside") as beside:
        assert {key: tensor.numpy().tolist() for key, tensor in source.tensors.items()} == {
            file.stem: np.load(file).tolist() for file in (tmp_path / "out").iterdir()
        }
        assert beside.tensors.keys() == source.tensors.keys()
    assert muonckpt.verify(tmp_path / "beside").verdict == "readable, unchecked"


def test_a_format_is_registered_as_a_plugin_is():
    """What built-in formats name by import path is there, and no word means two formats."""
    for format in BUILT_IN:
        assert callable(import_named(format.reader))
        assert (format.written_as is None) is (format.writer is None)
        assert format.writer is None or issubclass(type(import_named(format.writer)()), Container)
    assert len({format.written_as for format in BUILT_IN if format.written_as}) == len(FORMATS)


def test_formats_of_ours_are_not_shown_to_plugins(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(installed(tmp_path / "broken", "broken", "no_such_module:FORMAT"))
    assert muonckpt.open(tiny_checkpoint).format.name == "muonckpt"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("broken", "no_such_module:FORMAT", "'broken' .* of broken 1.0 .* cannot be imported: ModuleNotFoundError"),
        ("other", "json:loads", "expected a Format, found function"),
        ("twin", "npy_folder:FORMAT", "several plug-ins read such files: .*npy.*twin.*uninstall all but one"),
    ],
)
def test_a_plugin_that_is_wrong_is_named(name, value, said, arrays, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(installed(tmp_path / "site", name, value))
    monkeypatch.syspath_prepend(PLUGIN)
    with pytest.raises(muonckpt.SourceError, match=said):
        muonckpt.open(arrays[0])


def test_a_program_of_a_plugin_is_read_and_written_as_built_in_ones_are(tmp_path, monkeypatch):
    source, out = tmp_path / "source", tmp_path / "out"
    group = {"params": ["w"], "algorithm": "muon", "convention": "ema", "momentum": 0.5, "lr": 0.1, "weight_decay": 0.0}
    optimizer = {"state": {"w": {"momentum_buffer": torch.ones(2, 3)}}, "param_groups": [group]}
    muonckpt.save({"model": {"w": torch.ones(2, 3)}, "optimizer": optimizer}, source)
    with pytest.raises(muonckpt.MuonckptError, match="unknown program 'mine'; expected one of torch, "):
        muonckpt.convert(source, out, to_dialect="mine")
    monkeypatch.syspath_prepend(PLUGIN)
    assert called("convert", source, out, "--to", "mine").returncode == 0
    with muonckpt.open(out) as checkpoint:
        assert checkpoint.tensors["optimizer.state.w.velocity"].numpy().tolist() == [[2.0] * 3] * 2  # average to sum
        assert checkpoint.items["optimizer.param_groups.0.inertia"] == 0.5
    assert "mine" in called("convert", out, tmp_path / "back", "--to", "torch", "--dry-run").stdout


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_module:PROGRAM", "'broken' .* for programs cannot be imported: ModuleNotFoundError"),
        ("json:loads", "expected a Dialect, found function"),
        ("muonckpt.programs.dion:PROGRAM", "there is a program 'dion' already; uninstall it"),
    ],
)
def test_a_plugin_with_a_wrong_program_is_named(value, said, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(installed(tmp_path / "site", "broken", value, "muonckpt.programs"))
    with pytest.raises(muonckpt.SourceError, match=said):
        with_plugins()
