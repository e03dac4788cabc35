"""Folders whose index disagrees with the files: read as transformers does, and nothing that is there counts as lost."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import muonckpt
from muonckpt import DamageError, SourceError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KEYS = [f"layers.{number}.weight" for number in range(4)]

FORMS = {"safetensors": ("model", save_file, ""), "bin": ("pytorch_model", torch.save, "model.")}
"""By ending: how such files are called, what writes them, and the root under which their keys are read."""


def state(value: float = 0, keys: list[str] = KEYS) -> dict[str, torch.Tensor]:
    return {key: torch.full((4, 4), float(value + number)) for number, key in enumerate(keys)}


def write_shards(folder: Path, ending: str, value: float = 0, count: int = 2, in_index: int | None = None) -> None:
    """Write files of ``count``, and an index in which they are of ``in_index``."""
    stem, save, _ = FORMS[ending]
    folder.mkdir(exist_ok=True)
    files, values = {}, state(value)
    for number in range(count):
        part = dict(list(values.items())[number * 4 // count : (number + 1) * 4 // count])
        save(part, folder / f"{stem}-{number + 1:05d}-of-{count:05d}.{ending}")
        files |= dict.fromkeys(part, f"{stem}-{number + 1:05d}-of-{in_index or count:05d}.{ending}")
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def edit_index(folder: Path, **changes: str) -> None:
    (index,) = folder.glob("*.index.json")
    data = json.loads(index.read_text())
    data["weight_map"] |= {f"layers.{key[1:]}.weight": name for key, name in changes.items()}
    index.write_text(json.dumps(data))


def values_in(path: Path, root: str = "") -> dict[str, float]:
    with muonckpt.open(path) as opened:
        assert {tensor.shape for tensor in opened.tensors.values()} == {(4, 4)}
        return {key.removeprefix(root): float(tensor.numpy()[0, 0]) for key, tensor in opened.tensors.items()}


def expected(value: float = 0) -> dict[str, float]:
    return {key: float(tensor[0, 0]) for key, tensor in state(value).items()}


SOURCES = {
    "model.safetensors": lambda folder: save_file(state(100), folder / "model.safetensors"),
    "model.safetensors.index.json": lambda folder: write_shards(folder, "safetensors", 200),
    "pytorch_model.bin": lambda folder: torch.save(state(300), folder / "pytorch_model.bin"),
    "pytorch_model.bin.index.json": lambda folder: write_shards(folder, "bin", 400),
}
STRAYS = ("adapter_model.safetensors", "consolidated.safetensors", "model.fp16.safetensors")


@pytest.fixture(scope="module")
def tiny():
    """A model of transformers with these parameters."""
    transformers = pytest.importorskip("transformers")

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4, 4))

    class Tiny(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config) -> None:
            super().__init__(config)
            self.layers = torch.nn.ModuleList(Layer() for _ in KEYS)
            self.post_init()

        def _init_weights(self, module) -> None:
            pass

    return Tiny


@pytest.mark.parametrize("optimizer", [False, True])
def test_of_several_descriptions_that_counts_which_transformers_takes(optimizer, tiny, tmp_path):
    """Whatever else lies there, and the same with an optimizer beside it; what is not read is named."""
    choices = itertools.chain.from_iterable(itertools.combinations(SOURCES, count) for count in range(1, 5))
    for number, names in enumerate(choices):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in names:
            SOURCES[name](folder)
        if optimizer:
            torch.save({"state": {}, "param_groups": [{"params": [], "lr": 1e-3}]}, folder / "optimizer.pt")
        for stray in STRAYS:
            save_file({"lora": torch.ones(1)}, folder / stray)
        tiny(tiny.config_class()).config.save_pretrained(folder)
        loaded = tiny.from_pretrained(folder).state_dict()
        with muonckpt.open(folder) as opened:
            read = {key.removeprefix("model."): tensor.numpy() for key, tensor in opened.tensors.items()}
            unread = opened.not_read
        assert read.keys() == loaded.keys()
        assert all(np.array_equal(read[key], value.numpy()) for key, value in loaded.items()), names
        assert {*STRAYS, *names[1:]} <= {*unread} and not {names[0], "optimizer.pt"} & {*unread}
        for look in (muonckpt.verify, muonckpt.inspect):
            assert any(note.startswith("not read: ") and STRAYS[0] in note for note in look(folder).notes)


@pytest.mark.parametrize("ending", FORMS)
def test_a_whole_file_beside_a_stale_index_is_read(ending, tmp_path):
    stem, save, root = FORMS[ending]
    write_shards(tmp_path / "a", ending)
    for shard in (tmp_path / "a").glob("*-of-*"):
        shard.unlink()
    save(state(7), tmp_path / "a" / f"{stem}.{ending}")
    assert values_in(tmp_path / "a", root) == expected(7)
    report = muonckpt.verify(tmp_path / "a")
    assert not report.findings and report.notes == (f"not read: {stem}.{ending}.index.json",)


@pytest.mark.parametrize("ending", FORMS)
@pytest.mark.parametrize("leftover", [None, "adapter_model", "training_args"])
def test_an_index_of_other_file_names_is_wrong_and_nothing_is_lost(leftover, ending, tmp_path):
    write_shards(tmp_path / "a", ending, in_index=4)
    if leftover:
        FORMS[ending][1]({"lora": torch.ones(2)}, tmp_path / "a" / f"{leftover}.{ending}")
    check_misdescribed(tmp_path, "all 4 tensors are in .*-00001-of-00002")


def check_misdescribed(tmp_path: Path, reason: str) -> None:
    """Check that only the description is called wrong, and that a copy is asked for."""
    with pytest.raises(DamageError, match=reason):
        muonckpt.open(tmp_path / "a")
    report = muonckpt.verify(tmp_path / "a")
    assert report.verdict == "faulty" and not report.damage
    assert "lost" not in report.diagnosis.sentence
    assert [remedy.command for remedy in report.diagnosis.remedies] == ["muonckpt verify COPY"]


@pytest.mark.parametrize("ending", FORMS)
def test_an_index_that_names_other_files_than_have_the_tensors_loses_none(ending, tmp_path):
    stem = FORMS[ending][0]
    write_shards(tmp_path / "a", ending)
    edit_index(tmp_path / "a", _0=f"{stem}-00002-of-00002.{ending}")
    check_misdescribed(tmp_path, "disagree about 1 tensor, such as 'layers.0.weight'")


@pytest.mark.parametrize("ending", FORMS)
def test_shards_without_their_index_are_no_empty_checkpoint(ending, tmp_path):
    write_shards(tmp_path / "a", ending)
    next((tmp_path / "a").glob("*.index.json")).unlink()
    check_misdescribed(tmp_path, "expected one index")


@pytest.mark.parametrize("ending", FORMS)
def test_what_a_lost_shard_had_is_lost_and_files_with_such_names_are_told(ending, tmp_path):
    """A tensor of the same name in a file of another save is not taken for it, but named."""
    stem, save, _ = FORMS[ending]
    write_shards(tmp_path / "a", ending)
    (tmp_path / "a" / f"{stem}-00002-of-00002.{ending}").unlink()
    lost = r"2 of 4 tensors are lost with it \(layers.2.weight, layers.3.weight\)"
    with pytest.raises(DamageError, match=rf"00002-of-00002.{ending} is missing; {lost}\."):
        muonckpt.open(tmp_path / "a")
    other = tmp_path / "a" / f"other.{ending}"
    save({key: value for key, value in state(50).items() if key in KEYS[1:]}, other)
    with pytest.raises(DamageError, match=rf"{lost}; tensors with the same names are in other.{ending}, which"):
        muonckpt.open(tmp_path / "a")


@pytest.mark.parametrize("ending", FORMS)
def test_of_two_copies_that_counts_which_index_and_transformers_take(ending, tmp_path):
    stem, save, root = FORMS[ending]
    write_shards(tmp_path / "a", ending)
    save({KEYS[0]: torch.full((4, 4), 9.0)}, tmp_path / "a" / f"{stem}-overlay.{ending}")
    edit_index(tmp_path / "a", _0=f"{stem}-overlay.{ending}")
    assert values_in(tmp_path / "a", root) == expected() | {KEYS[0]: 9}
    with muonckpt.open(tmp_path / "a") as opened:
        assert opened.not_read == [f"{KEYS[0]} in {stem}-00001-of-00002.{ending}"]
    edit_index(tmp_path / "a", _0=f"{stem}-00001-of-00002.{ending}", _1=f"{stem}-overlay.{ending}")
    with pytest.raises(DamageError, match=r"'layers.0.weight' is in another file as well: .* the path of the file"):
        muonckpt.open(tmp_path / "a")


def test_two_sets_of_files_that_an_index_may_mean_are_refused_and_each_has_a_path(tmp_path):
    write_shards(tmp_path / "a", "safetensors", in_index=4)
    save_file(state(5), tmp_path / "a" / "consolidated.safetensors")
    with pytest.raises(DamageError, match=r"several others have all its tensors .*: give the path"):
        muonckpt.open(tmp_path / "a")
    assert values_in(tmp_path / "a" / "consolidated.safetensors") == expected(5)


@pytest.mark.parametrize("swap", [False, True])
def test_files_of_ours_under_other_names_are_told_by_their_digests(swap, tmp_path):
    muonckpt.save(state(), tmp_path / "own")
    muonckpt.convert(tmp_path / "own", tmp_path / "a", format="safetensors", shard_size=70)
    first, second = sorted((tmp_path / "a").glob("*.safetensors"))[:2]
    first.rename(tmp_path / "a" / "x.safetensors")
    if swap:
        second.rename(first)
        (tmp_path / "a" / "x.safetensors").rename(second)
    check_misdescribed(tmp_path, "the file that the index calls model-00001-of-00004.safetensors is called")


def test_a_variant_and_a_model_of_another_name_are_read_where_they_are_alone(tmp_path):
    for name in ("model.fp16", "adapter_model", "consolidated", "diffusion_pytorch_model"):
        (tmp_path / name).mkdir()
        save_file(state(1), tmp_path / name / f"{name}.safetensors")
        assert values_in(tmp_path / name) == expected(1)
    write_shards(tmp_path / "variant", "safetensors", 2)
    for file in (tmp_path / "variant").iterdir():
        text = file.name.replace("model-", "model.fp16-").replace("index", "index.fp16")
        if file.suffix == ".json":
            file.write_text(file.read_text().replace("model-", "model.fp16-"))
        file.rename(file.with_name(text))
    assert values_in(tmp_path / "variant") == expected(2)
    (tmp_path / "adapter").mkdir()
    torch.save(state(3), tmp_path / "adapter" / "adapter_model.bin")
    assert values_in(tmp_path / "adapter", "model.") == expected(3)


def test_of_several_models_without_a_known_name_one_has_to_be_named(tmp_path):
    for value, name in enumerate(("a", "b")):
        save_file(state(value), tmp_path / f"{name}.safetensors")
    with pytest.raises(SourceError, match=r"found 0 and the files a\.safetensors, b\.safetensors: give the path"):
        muonckpt.open(tmp_path)
    assert values_in(tmp_path / "b.safetensors") == expected(1)
    shutil.copy(tmp_path / "a.safetensors", tmp_path / "model.safetensors")
    assert values_in(tmp_path) == expected(0)


@pytest.mark.parametrize("ending", FORMS)
def test_an_index_is_a_path_too(ending, tmp_path):
    stem, save, root = FORMS[ending]
    write_shards(tmp_path / "a", ending, 3)
    save(state(8), tmp_path / "a" / f"{stem}.{ending}")
    assert values_in(tmp_path / "a" / f"{stem}.{ending}.index.json", root) == expected(3)
    assert values_in(tmp_path / "a", root) == expected(8)


PEOPLES_NAMES = ("epoch=3-step=100", "model-00001-of-00002 (1)", "modèle @ 7~ä+b,#1")


@pytest.mark.parametrize("ending", FORMS)
@pytest.mark.parametrize("stem", PEOPLES_NAMES)
def test_a_file_is_read_under_the_names_that_people_and_trainers_give(stem, ending, tmp_path):
    _, save, root = FORMS[ending]
    save(state(5), tmp_path / f"{stem}.{ending}")
    assert values_in(tmp_path / f"{stem}.{ending}", root) == expected(5)


@pytest.mark.parametrize("stem", ["a\x1b[31m", "a\nb", "a\u202eb", ".a"])
def test_a_name_that_a_terminal_would_obey_is_refused(stem, tmp_path):
    save_file(state(5), tmp_path / f"{stem}.safetensors")
    with pytest.raises(SourceError, match="refused file name"):
        muonckpt.open(tmp_path / f"{stem}.safetensors")


@pytest.mark.parametrize("ending", FORMS)
def test_a_shard_that_was_downloaded_twice_and_got_another_name_is_told(ending, tmp_path):
    write_shards(tmp_path / "a", ending)
    (shard,) = (tmp_path / "a").glob("*-00001-of-*")
    shard.rename(shard.with_stem(f"{shard.stem} (1)"))
    (finding,) = muonckpt.verify(tmp_path / "a").findings
    assert f"tensors with the same names are in {shard.stem} (1).{ending}" in finding.message


@pytest.mark.parametrize("ending", FORMS)
def test_the_files_of_an_index_may_lie_in_folders_below_it(ending, tmp_path):
    write_shards(tmp_path / "a", ending)
    (tmp_path / "a" / "sub").mkdir()
    for shard in (tmp_path / "a").glob("*-of-*"):
        shard.rename(tmp_path / "a" / "sub" / shard.name)
    numbers = {key: f"sub/{FORMS[ending][0]}-{key // 2 + 1:05d}-of-00002.{ending}" for key in range(4)}
    edit_index(tmp_path / "a", **{f"_{key}": name for key, name in numbers.items()})
    assert values_in(tmp_path / "a", FORMS[ending][2]) == expected()
    assert not muonckpt.verify(tmp_path / "a").findings


@pytest.mark.parametrize("ending", FORMS)
@pytest.mark.parametrize("named", [0, 2])
def test_an_index_that_was_cut_to_fewer_tensors_hides_none_of_the_others(named, ending, tmp_path):
    write_shards(tmp_path / "a", ending)
    (index,) = (tmp_path / "a").glob("*.index.json")
    data = json.loads(index.read_text())
    data["weight_map"] = dict(list(data["weight_map"].items())[:named])
    index.write_text(json.dumps(data))
    check_misdescribed(tmp_path, "the index and the files disagree about . tensors")


def test_of_lost_shards_the_weights_in_another_format_are_told_and_have_a_path(tmp_path):
    write_shards(tmp_path / "a", "safetensors")
    write_shards(tmp_path / "a", "bin", 300)
    for shard in (tmp_path / "a").glob("model-*"):
        shard.unlink()
    with pytest.raises(DamageError, match=r"pytorch_model.bin.index.json may have them, and is not read"):
        muonckpt.open(tmp_path / "a")
    assert values_in(tmp_path / "a" / "pytorch_model.bin.index.json", "model.") == expected(300)
