"""What a salvage writes is of one save: files, arrays, items and sources of another one are found by what they hold."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import sweep
from support.commands import called

import muonckpt
from muonckpt import SourceError, TargetError

pytestmark = pytest.mark.filterwarnings("ignore:.*was saved with a muonckpt.json")

NAMES = ("up.weight", "down.weight")


def state(seed: int, step: int, lr: float = 0.02) -> dict:
    rng = torch.Generator().manual_seed(seed)
    model = {name: torch.randn(8, 4, generator=rng) for name in NAMES}
    momenta = {
        name: {"momentum_buffer": torch.randn(8, 4, generator=rng), "step": torch.tensor(float(step))} for name in NAMES
    }
    muon = {"params": list(NAMES), "algorithm": "muon", "lr": lr, "momentum": 0.95}
    return {"model": model, "optimizer": {"state": momenta, "param_groups": [muon]}, "step": step}


@pytest.fixture(scope="module")
def saves(tmp_path_factory) -> Path:
    """The same step of two runs, ``a`` and ``b``, and another step, ``c``; on one rank and on four.  Do not change."""
    folder = tmp_path_factory.mktemp("saves")
    for name, saved in (("a", state(0, 1000)), ("b", state(1, 1000, lr=0.5)), ("c", state(2, 2000, lr=0.01))):
        muonckpt.save(saved, folder / f"{name}1", provenance={"step": saved["step"]})
        muonckpt.reshard(folder / f"{name}1", folder / name, mesh={"dp": 4})
    return folder


def contents(path: Path) -> dict:
    with muonckpt.open(path) as opened:
        return {key: tensor.bits().tolist() for key, tensor in opened.tensors.items()} | dict(opened.items)


def is_one_of(path: Path, saves: Path) -> str | None:
    """Return the save whose elements and items these are, all of them."""
    mine = contents(path)
    return next((name for name in "abc" if contents(saves / name) == mine), None)


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


MANIFESTS = {
    "lost": lambda file: file.unlink(),
    "flipped": lambda file: flip(file, file.stat().st_size // 2),
}
STRAYS = [*product(MANIFESTS, (0, 2), "bc")]


@pytest.mark.parametrize(("manifest", "stray", "other"), sweep(STRAYS, *STRAYS[::3], STRAYS[-2]))
def test_a_file_of_another_save_is_replaced_from_a_source_of_the_save_of_the_others(
    manifest, stray, other, saves, tmp_path
):
    broken = Path(shutil.copytree(saves / "a", tmp_path / "broken"))
    shutil.copy(saves / other / f"__{stray}_0.distcp", broken)
    MANIFESTS[manifest](broken / "muonckpt.json")
    for number, names in enumerate((["a1"], [f"{other}1", "a1"], ["a1", f"{other}1"], ["a"])):
        report = muonckpt.salvage(broken, tmp_path / f"new{number}", others=[saves / name for name in names])
        assert is_one_of(tmp_path / f"new{number}", saves) == "a"
        assert f"__{stray}_0.distcp has " in report.notes[0]
        assert {box.lo[0] // 2 for _, box, *_ in report.substituted() if box.ndim} == {stray}
        assert muonckpt.verify(tmp_path / f"new{number}").verdict == "whole"
    with pytest.raises(SourceError, match=r"(?s)another (save|run).*Nothing was written"):
        muonckpt.salvage(broken, tmp_path / "new", others=[saves / f"{other}1"])


def test_without_a_source_it_says_that_a_whole_cannot_be_judged_unless_digests_are_left(saves, tmp_path):
    broken = Path(shutil.copytree(saves / "a", tmp_path / "broken"))
    flip(broken / "muonckpt.json", 30)
    report = muonckpt.salvage(broken, tmp_path / "flipped")
    assert is_one_of(tmp_path / "flipped", saves) == "a" and report.salvaged["notes"] == []
    (broken / "muonckpt.json").unlink()
    report = muonckpt.salvage(broken, tmp_path / "lost")
    assert "whether all of it is of one save cannot be judged" in report.salvaged["notes"][0]
    report = muonckpt.salvage(broken, tmp_path / "compared", others=[saves / "a1"])
    assert report.salvaged["notes"] == [] and report.compared == report.tensors
    report = muonckpt.salvage(broken, tmp_path / "foreign", others=[saves / "b1"])
    first, second = report.salvaged["notes"]
    assert "b1, which is of the same step of another run (tensor 'model.up.weight' [0:2, 0:4] is another there" in first
    assert "cannot be judged" in second


@pytest.mark.parametrize("part", sweep(range(4), 0))
def test_a_manifest_with_any_byte_flipped_still_has_its_other_digests(part, saves, tmp_path):
    """A file of another save is found by them, and what one damaged record says is not what the others say."""
    length = (saves / "a" / "muonckpt.json").stat().st_size
    for at in range(part * length // 4, (part + 1) * length // 4, max(1, length // 48)):
        broken = Path(shutil.copytree(saves / "a", tmp_path / "broken"))
        flip(broken / "muonckpt.json", at)
        muonckpt.salvage(broken, tmp_path / "new")
        assert is_one_of(tmp_path / "new", saves) == "a", at
        shutil.copy(saves / "b" / "__1_0.distcp", broken)
        with pytest.raises(SourceError, match="Nothing was written"):
            muonckpt.salvage(broken, tmp_path / "again")
        for folder in (broken, tmp_path / "new"):
            shutil.rmtree(folder)


def test_the_same_step_of_another_run_fills_nothing_of_a_stock_checkpoint(saves, tmp_path):
    broken = Path(shutil.copytree(saves / "a", tmp_path / "broken"))
    (broken / "muonckpt.json").unlink()
    (broken / "__2_0.distcp").unlink()
    with pytest.raises(SourceError, match=r"b has it of the same step of another run \(tensor 'model.up.weight' \[0:2"):
        muonckpt.salvage(broken, tmp_path / "new", others=[saves / "b"])
    report = muonckpt.salvage(broken, tmp_path / "mixed", others=[saves / "b"], mix_steps=True)
    assert any("weights of 2 tensors are those of the same step of another run" in note for note in report.notes)
    muonckpt.salvage(broken, tmp_path / "new", others=[saves / "b", saves / "a1"])
    assert is_one_of(tmp_path / "new", saves) == "a"


@pytest.mark.parametrize("manifest", [True, False])
def test_a_lost_item_is_taken_from_a_source_of_the_same_save_only(manifest, saves, tmp_path):
    broken = Path(shutil.copytree(saves / "a", tmp_path / "broken"))
    with muonckpt.open(saves / "a") as opened:
        item = next(blob.item for blob in opened.outline.blobs if blob.key.endswith(".lr"))
    flip(broken / item.file, item.offset + item.length // 2)
    if not manifest:
        (broken / "muonckpt.json").unlink()
    edited = state(0, 1000, lr=0.7)
    muonckpt.save(edited, tmp_path / "edited", provenance={"step": 1000})
    with pytest.raises(SourceError, match=r"param_groups.0.lr.*`mix_steps=True`"):
        muonckpt.salvage(broken, tmp_path / "new", others=[saves / "b"])
    if manifest:  # which has the digest of the item
        with pytest.raises(SourceError, match="of another save"):
            muonckpt.salvage(broken, tmp_path / "new", others=[tmp_path / "edited"])
    else:
        with pytest.raises(SourceError, match=r"param_groups.0.lr' is lost, .*edited and .*a1 have others"):
            muonckpt.salvage(broken, tmp_path / "new", others=[tmp_path / "edited", saves / "a1"])
    muonckpt.salvage(broken, tmp_path / "new", others=[saves / "b", saves / "a1"])
    assert is_one_of(tmp_path / "new", saves) == "a"


def test_a_source_with_the_same_weights_and_another_momentum_is_another_save(saves, tmp_path):
    forked = state(0, 1000)
    forked["optimizer"]["state"][NAMES[0]]["momentum_buffer"] += 1
    muonckpt.save(forked, tmp_path / "fork", provenance={"step": 1000})
    broken = Path(shutil.copytree(saves / "a", tmp_path / "broken"))
    (broken / "muonckpt.json").unlink()
    (broken / "__3_0.distcp").unlink()
    with pytest.raises(SourceError, match=r"fork has it of .* \(tensor 'optimizer.state.up.weight.momentum_buffer'"):
        muonckpt.salvage(broken, tmp_path / "new", others=[tmp_path / "fork"])


def test_sources_that_disagree_about_what_is_lost_are_named(saves, tmp_path):
    """What is whole is the same in both."""
    fork = state(0, 1000)
    fork["model"][NAMES[0]][7] += 1
    muonckpt.save(fork, tmp_path / "fork", provenance={"step": 1000})
    broken = Path(shutil.copytree(saves / "a", tmp_path / "broken"))
    (broken / "muonckpt.json").unlink()
    (broken / "__3_0.distcp").unlink()
    for others in ([tmp_path / "fork", saves / "a1"], [saves / "a1", tmp_path / "fork"]):
        with pytest.raises(SourceError, match=r"'model.up.weight' \[6:8, 0:4\] is lost, .*nothing tells which"):
            muonckpt.salvage(broken, tmp_path / "new", others=others)


def test_a_source_that_has_files_of_two_saves_itself_mixes_nothing(saves, tmp_path):
    """Nobody recorded digests, so that either of the two may be wrong."""
    broken, copy = (Path(shutil.copytree(saves / "a", tmp_path / name)) for name in ("broken", "copy"))
    for folder in (broken, copy):
        (folder / "muonckpt.json").unlink()
    (broken / "__1_0.distcp").unlink()
    shutil.copy(saves / "b" / "__2_0.distcp", copy)
    with pytest.raises(SourceError, match=r"of another save, .* move it out of .*broken and salvage again") as raised:
        muonckpt.salvage(broken, tmp_path / "new", others=[copy])
    assert "__2_0.distcp" in str(raised.value)
    muonckpt.salvage(broken, tmp_path / "new", others=[copy, saves / "a1"])
    assert is_one_of(tmp_path / "new", saves) == "a"


def test_a_source_that_is_damaged_itself_still_tells_which_file_is_of_another_save(saves, tmp_path):
    """It records what a tensor was that it has lost; where that differs, other tensors say."""
    broken = Path(shutil.copytree(saves / "a", tmp_path / "broken"))
    (broken / "muonckpt.json").unlink()
    shutil.copy(saves / "c" / "__1_0.distcp", broken)
    muonckpt.convert(saves / "a1", tmp_path / "zarr", format="zarr")
    flip(tmp_path / "zarr" / "model" / NAMES[0] / "value" / "c" / "0" / "0", 5)
    with pytest.raises(SourceError, match="of another save"):
        muonckpt.salvage(broken, tmp_path / "new", others=[tmp_path / "zarr"])
    muonckpt.salvage(broken, tmp_path / "new", others=[tmp_path / "zarr", saves / "a1"])
    assert is_one_of(tmp_path / "new", saves) == "a"


def test_an_array_whose_record_is_of_another_save_is_not_filled_from_that(saves, tmp_path):
    """The root of a zarr tree says that one record is of another save, so that a record proves nothing."""
    for name in "ac":
        muonckpt.convert(saves / f"{name}1", tmp_path / name, format="zarr")
    array = Path("model", NAMES[0], "value")
    shutil.copy(tmp_path / "c" / array / "zarr.json", tmp_path / "a" / array)
    for names in (["c1"], ["c1", "a1"], ["a1", "c1"]):
        with pytest.raises(SourceError, match="Nothing was written"):
            muonckpt.salvage(tmp_path / "a", tmp_path / "new", others=[saves / name for name in names])


def test_the_cure_for_files_of_two_saves_is_followed(saves, tmp_path):
    broken = Path(shutil.copytree(saves / "a", tmp_path / "broken"))
    copy = Path(shutil.copytree(saves / "a", tmp_path / "copy"))
    shutil.copy(saves / "b" / "__2_0.distcp", broken)
    for folder in (broken, copy):
        (folder / "muonckpt.json").unlink()
    with pytest.raises(SourceError, match=r"if __2_0.distcp here is wrong, move it out of"):
        muonckpt.salvage(broken, tmp_path / "new", others=[copy])
    (broken / "__2_0.distcp").rename(tmp_path / "__2_0.distcp")
    muonckpt.salvage(broken, tmp_path / "new", others=[copy])
    assert is_one_of(tmp_path / "new", saves) == "a"


@pytest.fixture
def run(saves, tmp_path) -> Path:
    """The folder of a run, whose last step has lost a file, and the whole one beside it."""
    for name, step in (("a", 1000), ("c", 2000)):
        shutil.copytree(saves / name, tmp_path / "run" / f"step-{step:08}")
    (tmp_path / "run" / "step-00002000" / "__1_0.distcp").unlink()
    return tmp_path / "run"


def test_what_is_printed_after_a_salvage_is_found_by_inspect_and_restored_by_a_series(run, saves):
    broken, advised = run / "step-00002000", re.compile(r"muonckpt salvage (\S+) (\S+) --from")
    [(source, new)] = {
        match.groups() for match in map(advised.search, called("inspect", broken).stdout.splitlines()) if match
    }
    assert (source, new) == (str(broken), f"{broken}.2")
    done = called("salvage", source, new, "--from", saves / "c1")
    assert f"next: Series.restore takes it, and muonckpt inspect {run} lists it" in done.stdout
    assert called("verify", new).returncode == 0
    assert "step-00002000.2" in called("inspect", run).stdout
    loaded = state(7, 7)
    with muonckpt.Series(run) as series:
        assert series.restore(loaded).path == new
    assert torch.equal(loaded["model"][NAMES[0]], state(2, 2000)["model"][NAMES[0]])


def test_a_name_that_nobody_finds_is_said_with_the_command_that_changes_it(run, saves):
    for number, name in enumerate(("salvaged", "step-2000.2", "step-00001000.2")):
        report = muonckpt.salvage(run / "step-00002000", run / name, others=[saves / "c1"])
        command = next(line for line in report.advice if line.startswith("mv ")).split()
        assert command[:3] == ["mv", str(run / name), str(run / f"step-00002000.{number + 2}")]
        Path(command[1]).rename(command[2])
        with muonckpt.Series(run) as series:
            assert series.restore(state(7, 7)).path == command[2]


@pytest.mark.parametrize("state_of_newest", ["whole", "damaged"])
def test_a_newer_step_is_named_with_what_becomes_of_it(state_of_newest, run, saves):
    newest = Path(shutil.copytree(saves / "b", run / "step-00003000"))
    if state_of_newest == "damaged":
        (newest / "__0_0.distcp").unlink()
    report = muonckpt.salvage(run / "step-00002000", run / "step-00002000.2", others=[saves / "c1"])
    said = "is newer and whole" if state_of_newest == "whole" else "which is newer, is damaged, and passed over"
    assert any("step-00003000" in line and said in line for line in report.advice)
    with muonckpt.Series(run) as series, nullcontext() if state_of_newest == "whole" else pytest.warns(RuntimeWarning):
        restored = series.restore(state(7, 7))
    assert restored.step == (3000 if state_of_newest == "whole" else 2000)


def test_attempts_at_steps_of_other_programs_are_found_beside_them(saves, tmp_path):
    run = tmp_path / "run"
    for step in (500, 1000):
        muonckpt.convert(saves / "a1", run / f"checkpoint-{step}", format="safetensors", shard_size=200)
    (run / "checkpoint-1000" / "model-00002-of-00004.safetensors").unlink()
    report = muonckpt.salvage(run / "checkpoint-1000", run / "checkpoint-1000.2", others=[saves / "a1"])
    assert any("resume from it" in line for line in report.advice)
    shown = json.loads(called("inspect", run, "--json").stdout)
    steps = [(one["name"], one["step"], one["attempt"], one["state"]) for one in shown["steps"]]
    assert steps[1:] == [("checkpoint-1000", 1000, 1, "damaged"), ("checkpoint-1000.2", 1000, 2, "whole")]


def test_a_mixture_that_was_allowed_is_named(saves, tmp_path):
    broken = Path(shutil.copytree(saves / "a", tmp_path / "broken"))
    shutil.copy(saves / "b" / "__2_0.distcp", broken)
    (broken / "muonckpt.json").unlink()
    report = muonckpt.salvage(broken, tmp_path / "new", others=[saves / "b1"], mix_steps=True)
    assert "__2_0.distcp has the bytes of another save than all other files" in report.notes[0]
    assert {(box.lo[0], source) for _, box, source, _ in report.substituted()} == {(4, "b1")}
    for kind in ("weights", "momenta"):
        assert any(f"{kind} of 2 tensors are those of another save" in note for note in report.notes)


def test_the_common_file_of_megatron_is_missed_without_a_manifest(saves, tmp_path):
    broken = tmp_path / "broken"
    muonckpt.reshard(saves / "a1", broken, mesh={"dp": 2}, format="torch_dist")
    copy = shutil.copytree(broken, tmp_path / "copy")
    (broken / "muonckpt.json").unlink()
    (broken / "common.pt").unlink()
    assert muonckpt.verify(broken).verdict == "faulty"
    with pytest.raises(SourceError, match=r"1: item 'common.pt'\. Nothing was written"):
        muonckpt.salvage(broken, tmp_path / "new")
    muonckpt.salvage(broken, tmp_path / "new", others=[copy])
    assert (tmp_path / "new" / "common.pt").read_bytes() == (copy / "common.pt").read_bytes()


def test_momenta_of_another_convention_are_not_compared(tmp_path):
    """They differ in every element, and the weights beside them still fill what is lost."""
    for name, factor in (("ema", 1), ("sum", 20)):
        saved = state(0, 1000)
        saved["optimizer"]["param_groups"][0]["convention"] = name
        for slots in saved["optimizer"]["state"].values():
            slots["momentum_buffer"] *= factor
        muonckpt.save(saved, tmp_path / name, provenance={"step": 1000})
    muonckpt.convert(tmp_path / "sum", tmp_path / "sum.safetensors", format="safetensors")
    broken = tmp_path / "broken"
    muonckpt.reshard(tmp_path / "ema", broken, mesh={"dp": 4})
    with muonckpt.open(broken) as opened:
        payload = opened.tensors[f"model.{NAMES[0]}"].record.chunks[2].payload
    (broken / "muonckpt.json").unlink()
    flip(broken / payload.file, payload.offset)
    muonckpt.salvage(broken, tmp_path / "new", others=[tmp_path / "sum.safetensors"])
    assert contents(tmp_path / "new") == contents(tmp_path / "ema")


def test_shards_of_bare_weights_that_differ_from_a_copy_are_named_with_their_file(saves, tmp_path):
    """Weights alone do not tell which is of the save, and the cure is followed."""
    from safetensors.torch import save_file

    for folder, seed in (("one", 0), ("copy", 0), ("other", 1)):
        (tmp_path / folder).mkdir()
        for number, (name, weight) in enumerate(state(seed, 1000)["model"].items(), 1):
            save_file({name: weight}, tmp_path / folder / f"model-0000{number}-of-00002.safetensors")
        names = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate(NAMES, 1)}
        index = {"metadata": {"total_size": 256}, "weight_map": names}
        (tmp_path / folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shard = tmp_path / "one" / "model-00002-of-00002.safetensors"
    shutil.copy(tmp_path / "other" / shard.name, shard)
    with pytest.raises(TargetError, match=rf"'down.weight' .* is another there .* in {shard.name}, is of another one"):
        muonckpt.salvage(tmp_path / "one", tmp_path / "new", others=[tmp_path / "copy"])
    shard.rename(tmp_path / shard.name)
    with pytest.raises(SourceError, match="of an unknown step, which `mix_steps=True` allows"):
        muonckpt.salvage(tmp_path / "one", tmp_path / "new", others=[tmp_path / "copy"])
    muonckpt.salvage(tmp_path / "one", tmp_path / "new", others=[tmp_path / "copy"], mix_steps=True)
    for name, weight in state(0, 1000)["model"].items():
        assert contents(tmp_path / "new")[name] == weight.view(torch.uint32).tolist()


@pytest.mark.parametrize("word", ["model.up.weight", "up.weight", "optimizer.state.up.weight.step", "groups.0.lr"])
def test_a_letter_flipped_in_a_stock_description_is_spelt_as_it_was_or_refused(word, saves, tmp_path):
    """A key and its path are two records: which of them is damaged a copy tells, or the rest of the parameter."""
    dcp.save(state(0, 1000), checkpoint_id=tmp_path / "copy", no_dist=True)
    raw = (tmp_path / "copy" / ".metadata").read_bytes()
    written = contents(tmp_path / "copy")
    places = [match.end() - 2 for match in re.finditer(re.escape(word.encode()), raw)]
    assert places
    for number, at in enumerate(places):
        broken = tmp_path / f"broken-{number}"
        shutil.copytree(tmp_path / "copy", broken)
        flip(broken / ".metadata", at)
        if not any(finding.kind == "key" for finding in muonckpt.verify(broken).findings):
            continue  # a letter of something else, which other tests have
        muonckpt.salvage(broken, tmp_path / f"new-{number}", others=[tmp_path / "copy"])
        assert contents(tmp_path / f"new-{number}") == written
        paths = {tensor.key: tensor.path for tensor in muonckpt.open(tmp_path / f"new-{number}").manifest.tensors}
        assert paths == {tensor.key: tensor.path for tensor in muonckpt.open(tmp_path / "copy").manifest.tensors}
        try:
            muonckpt.salvage(broken, tmp_path / f"alone-{number}")
        except SourceError as error:
            assert "nothing tells which is right" in str(error) and "`others=`" in str(error)
        else:
            assert contents(tmp_path / f"alone-{number}") == written


def test_a_misspelt_weight_that_has_state_is_spelt_without_a_copy(saves, tmp_path):
    dcp.save(state(0, 1000), checkpoint_id=tmp_path / "broken", no_dist=True)
    written, raw = contents(tmp_path / "broken"), (tmp_path / "broken" / ".metadata").read_bytes()
    flip(tmp_path / "broken" / ".metadata", raw.index(b"model.up.weight") + len("model."))
    muonckpt.salvage(tmp_path / "broken", tmp_path / "new")
    assert contents(tmp_path / "new") == written
