"""What `diff` says of two checkpoints, against numpy and torch on the tensors that were saved."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import called
from support.sharded import DTYPES, edit

import muonckpt
from muonckpt.converters.compare.elements import as_float64
from muonckpt.names.wording import as_json

NAMES = [f"layers.{layer}.weight" for layer in range(2)]


def state(seed: int = 0, steps: int = 5) -> dict:
    generator = torch.Generator().manual_seed(seed)
    model = {name: torch.randn(37, 11, generator=generator) for name in NAMES} | {"bias": torch.randn(5)}
    optimizer = {name: {"momentum_buffer": torch.randn(37, 11, generator=generator)} for name in NAMES}
    muon = {"params": NAMES, "algorithm": "muon", "lr": 0.02, "momentum": 0.95, "convention": "ema"}
    model["bias"] = torch.arange(5.0)
    return {"model": model, "optimizer": {"state": optimizer, "param_groups": [muon]}, "step": steps}


def saved(path: Path, content: dict, steps: int = 5) -> Path:
    muonckpt.save(content, path, provenance={"step": steps})
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("diff") / "run", state())


@pytest.fixture(scope="module")
def later(run) -> Path:
    """Other weights and momenta, all but one; another step and lr; one key more and one less."""
    content = state(1, 6)
    content["model"][NAMES[1]] = state()["model"][NAMES[1]]
    content["optimizer"]["param_groups"][0]["lr"] = 0.01
    content["model"]["new"] = content["model"].pop("bias")
    return saved(run.parent / "later", content, 6)


def test_statistics_are_those_of_numpy_whatever_the_memory(run, later):
    key = f"model.{NAMES[0]}"
    a, b = (content["model"][NAMES[0]].double().numpy() for content in (state(), state(1)))
    for memory in (1, 1000, 1 << 28):
        [found] = muonckpt.diff(run, later, select=[key], memory=memory).tensors
        s = found.statistics
        assert (found.status, s.changed, s.elements) == ("changed", a.size, a.size)
        assert s.max_abs == np.abs(b - a).max()
        assert s.max_rel == (np.abs(b - a) / np.maximum(np.abs(a), np.abs(b))).max()
        expected = [np.linalg.norm(a), np.linalg.norm(b), np.sqrt(((b - a) ** 2).mean()),
                    (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)]  # fmt: skip
        np.testing.assert_allclose([s.norm_a, s.norm_b, s.rms_change, s.cosine], expected, rtol=1e-12)


def test_keys_items_and_what_did_not_move_are_told(run, later):
    found = muonckpt.diff(run, later)
    assert found.differs and found.steps == (5, 6)
    assert {t.key for t in found.tensors if t.status == "same"} == {f"model.{NAMES[1]}"} == set(found.unmoved)
    assert (found.only_a, found.only_b) == (("model.bias",), ("model.new",))
    assert {item.key: (item.a, item.b) for item in found.items} == {
        "optimizer.param_groups.0.lr": (0.02, 0.01),
        "step": (5, 6),
    }
    done = called("diff", run, later)
    assert done.returncode == 1 and "identical although the steps differ (5 and 6)" in " ".join(done.stdout.split("\n"))
    assert called("diff", run, later, f"model.{NAMES[1]}").returncode == 0
    printed = json.loads(called("diff", run, later, "--json").stdout)
    assert printed.pop("seconds") >= 0 and printed == json.loads(json.dumps(found, default=as_json))


def test_a_run_on_another_mesh_has_only_moved_and_nothing_is_read(run, tmp_path):
    muonckpt.reshard(run, tmp_path / "three", mesh={"dp": 3})
    found = muonckpt.diff(run, tmp_path / "three")
    assert not found.differs and found.read == 0 and found.counts == {"same": 0, "moved": 5, "close": 0, "changed": 0}
    done = called("diff", run, tmp_path / "three", "--summary")
    assert done.returncode == 0 and "5 moved only (5 by fingerprint, nothing read)" in done.stdout


def test_formats_without_fingerprints_are_read(run, tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path / "stock", no_dist=True)
    muonckpt.convert(run, tmp_path / "one.safetensors", format="safetensors")
    for other, read in (("stock", 2 * 4 * (4 * 37 * 11 + 5)), ("one.safetensors", 0)):  # ours has fingerprints
        found = muonckpt.diff(run, tmp_path / other, select=["model.*", "optimizer.state.*"])
        assert not found.differs and found.counts["same"] == 5 and found.read == read


def test_one_bit_is_found_and_tolerances_decide(run, tmp_path):
    content = state()
    content["model"][NAMES[0]][3, 4] *= 1 + 1e-5
    near = saved(tmp_path / "near", content)
    [changed] = [tensor for tensor in muonckpt.diff(run, near).tensors if tensor.status != "same"]
    assert (changed.key, changed.statistics.changed) == (f"model.{NAMES[0]}", 1)
    assert called("diff", run, near).returncode == 1
    assert called("diff", run, near, "--rtol", "1e-4").returncode == 0
    assert called("diff", run, near, "--rtol", "1e-7").returncode == 1
    content["model"][NAMES[0]][3, 4] = torch.nan
    poisoned = saved(tmp_path / "nan", content)
    done = called("diff", run, poisoned, "--rtol", "1")
    assert done.returncode == 1 and f"infinite or NaN in B: model.{NAMES[0]}" in done.stdout


def test_programs_are_compared_in_the_words_and_convention_of_one(run, tmp_path):
    muonckpt.convert(run, tmp_path / "dion", to_dialect="dion")
    apart = muonckpt.diff(run, tmp_path / "dion")
    assert f"optimizer.state.{NAMES[0]}.momentum" in apart.only_b
    both = muonckpt.diff(run, tmp_path / "dion", to_dialect="dion", select=["model.*", "*.momentum"], rtol=1e-6)
    assert not both.differs and both.counts["same"] >= 3 and len(both.tensors) == 5


def test_other_shapes_and_dtypes_are_changes(tmp_path):
    one = saved(tmp_path / "one", {"w": torch.arange(6.0), "v": torch.ones(3)})
    other = saved(tmp_path / "other", {"w": torch.arange(6.0).bfloat16(), "v": torch.ones(1, 3)})
    found = {tensor.key: tensor for tensor in muonckpt.diff(one, other).tensors}
    assert (found["v"].status, found["v"].by) == ("changed", "shape")
    assert (found["w"].status, found["w"].statistics.changed) == ("changed", 0)
    assert called("diff", one, other).returncode == 1


def test_damage_and_mistakes_have_their_exit_codes(run, tmp_path):
    damaged = Path(shutil.copytree(run, tmp_path / "damaged"))
    [file] = damaged.glob("*.distcp")
    record = next(t for t in muonckpt.open(run).manifest.tensors if t.key == f"model.{NAMES[0]}")
    data = bytearray(file.read_bytes())
    data[record.chunks[0].payload.offset] ^= 1
    file.write_bytes(bytes(data))
    dcp.save(state(), checkpoint_id=tmp_path / "stock", no_dist=True)
    assert called("diff", damaged, tmp_path / "stock").returncode == 3
    assert called("diff", run, tmp_path / "nothing").returncode == 3
    for mistake in (["*nothing*"], ["--from-a", "dion"], ["--rtol", "-1"]):
        assert called("diff", run, run, *mistake).returncode == 2


def missing(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("harm", [missing, cut, a_folder])
def test_the_files_of_both_are_looked_at_and_a_fault_has_exit_code_3(harm, run, tmp_path):
    for file in sorted(entry.name for entry in run.iterdir()):
        copy = Path(shutil.copytree(run, tmp_path / file))
        harm(copy / file)
        for pair in ((run, copy), (copy, run)):
            done = called("diff", *pair, "model.*")
            harmless = file == ".metadata" or (harm, file) == (missing, "muonckpt.json")
            assert done.returncode == (0 if harmless else 3) and file in done.stderr, (pair, done)


@pytest.mark.filterwarnings("ignore:.*muonckpt.json")
def test_what_was_not_read_is_said_and_reading_finds_flipped_bytes(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    whole = muonckpt.diff(run, copy)
    assert (whole.differs, whole.read, whole.unread) == (False, 0, len(whole.tensors) + whole.same_items)
    assert "the same as recorded; nothing was read" in called("diff", run, copy).stdout
    checked = muonckpt.diff(run, copy, read=True)
    assert (checked.differs, checked.read, checked.unread) == (False, 2 * 4 * (4 * 37 * 11 + 5), 0)
    assert called("diff", run, copy, "--read").stdout.endswith("copy: the same\n")
    assert json.loads(called("diff", run, copy, "--read", "--json").stdout)["unread"] == 0
    for name in sorted(entry.name for entry in run.iterdir()):
        flipped = Path(shutil.copytree(run, tmp_path / f"flipped {name}"))
        size = (flipped / name).stat().st_size
        for place in range(0, size, size // 5):
            edit(flipped / name, place)
            expected = 3 if muonckpt.verify(flipped).diagnosis.has_loss else 0
            codes = [called("diff", *pair, "--read").returncode for pair in ((run, flipped), (flipped, run))]
            assert codes == [expected, expected], (name, place)
            edit(flipped / name, place)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
                                   torch.float8_e8m0fnu, torch.int8, torch.uint16], ids=str)  # fmt: skip
def test_every_word_of_every_type_is_the_number_that_torch_reads(dtype):
    name, size = str(dtype).removeprefix("torch."), dtype.itemsize
    highest = 2 if dtype == torch.bool else 256
    raw = torch.arange(highest * size * 3) % 251 % highest if size > 1 else torch.arange(highest)
    raw = raw.to(torch.uint8)
    numbers = raw.view(dtype)
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
    words = np.frombuffer(raw.numpy().tobytes(), f"<u{min(size, 8)}")
    np.testing.assert_array_equal(as_float64(words, name), numbers.to(torch.float64).reshape(-1).numpy())
