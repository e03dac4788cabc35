"""A format that another package brings is read by every command; a broken plug-in is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.commands import called

import muonckpt

PLUGIN = Path(__file__).parents[1] / "support" / "plugin"


@pytest.fixture
def arrays(tmp_path):
    folder = tmp_path / "arrays"
    folder.mkdir()
    values = {"up": np.arange(24, dtype=np.float32).reshape(6, 4), "norm": np.ones(5, np.float64)}
    for name, value in values.items():
        np.save(folder / f"{name}.npy", value)
    return folder, values


def installed(folder: Path, name: str, value: str) -> Path:
    """A package with one entry point, as pip leaves it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[muonckpt.formats]\n{name} = {value}\n")
    return folder


def test_a_plugin_is_found_where_it_is_installed_and_serves_every_command(arrays, tmp_path, monkeypatch):
    folder, values = arrays
    with pytest.raises(muonckpt.SourceError, match=r"expected \.metadata"):
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
