"""A whole checkpoint out of a damaged one: bit for bit where it was whole, and listed where it was not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import called
from support.golden import golden
from support.saved_ranks import runs as trainers_runs
from support.workers import run

import muonckpt
from muonckpt import DestinationError, Execution, MuonckptError, SourceError, TargetError
from muonckpt.algebra.box import Box
from muonckpt.record.record import Manifest, StateRecord

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAMES = ("layers.0.weight", "layers.1.weight")


def state(seed: int, step: int, lr: float = 0.02) -> dict:
    rng = torch.Generator().manual_seed(seed)
    model = {name: torch.randn(37, 11, generator=rng).bfloat16() for name in NAMES}
    model |= {"bias": torch.randn(9, generator=rng), "scale": torch.randn((), generator=rng)}
    momenta = {name: {"momentum_buffer": torch.randn(37, 11, generator=rng)} for name in NAMES}
    muon = {"params": list(NAMES), "algorithm": "muon", "lr": lr, "momentum": 0.95, "convention": "ema"}
    return {"model": model, "optimizer": {"state": momenta, "param_groups": [muon]}, "step": step}


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> dict[int, Path]:
    """Two steps of a run on three ranks.  Do not change."""
    folder = tmp_path_factory.mktemp("run")
    for step in (2, 3):
        muonckpt.save(state(step, step, lr=step / 100), folder / f"{step}", provenance={"step": step})
        muonckpt.reshard(folder / f"{step}", folder / f"step-{step}", mesh={"dp": 3})
    return {step: folder / f"step-{step}" for step in (2, 3)}


@pytest.fixture
def broken(steps, tmp_path) -> Path:
    return Path(shutil.copytree(steps[3], tmp_path / "broken"))


def bits(path: Path) -> dict[str, np.ndarray]:
    with muonckpt.open(path) as opened:
        return {key: tensor.bits() for key, tensor in opened.tensors.items()}


def same(a: Path, b: Path) -> None:
    """Both have the same elements, the same fingerprints and the same items, and the second is whole."""
    mine, theirs = bits(a), bits(b)
    assert mine.keys() == theirs.keys()
    for key in mine:
        np.testing.assert_array_equal(mine[key], theirs[key], key)
    with muonckpt.open(a) as one, muonckpt.open(b) as other:
        assert dict(one.items) == dict(other.items)
    assert muonckpt.verify(b).verdict == "whole"


def record(path: Path, key: str) -> StateRecord:
    with muonckpt.open(path) as opened:
        return opened.tensors[key].record


def flip(path: Path, file: str, at: int) -> None:
    raw = bytearray((path / file).read_bytes())
    raw[at] ^= 4
    (path / file).write_bytes(raw)


def flip_chunk(path: Path, key: str = f"model.{NAMES[0]}", number: int = 1) -> Box:
    """Flip a bit in the last byte of a chunk; return its box."""
    chunk = record(path, key).chunks[number]
    flip(path, chunk.payload.file, chunk.payload.end - 1)
    return chunk.box


def flip_item(path: Path) -> None:
    with muonckpt.open(path) as opened:
        item = next(blob.item for blob in opened.outline.blobs if blob.key.endswith("lr"))
    flip(path, item.file, item.offset + item.length // 2)


def cut(path: Path) -> None:
    data = (path / "__1_0.distcp").read_bytes()
    (path / "__1_0.distcp").write_bytes(data[: len(data) // 2])


def edited(path: Path, change: Callable[[Manifest], Manifest]) -> None:
    file = path / "muonckpt.json"
    file.write_text(change(Manifest.from_json(file.read_bytes())).to_json())


def with_hole(path: Path) -> None:
    """Let the manifest forget a chunk, as a writer would that never came so far."""

    def without(tensor: StateRecord) -> StateRecord:
        if tensor.key != f"model.{NAMES[1]}":
            return tensor
        return StateRecord(tensor.key, tensor.path, tensor.shape, tensor.dtype, tensor.chunks.select([0, 2]))

    edited(path, lambda m: Manifest(tuple(map(without, m.tensors)), m.blobs, m.provenance, m.files))
    (path / ".metadata").unlink()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "first file missing": lambda path: (path / "__0_0.distcp").unlink(),
    "last file missing": lambda path: (path / "__2_0.distcp").unlink(),
    "file cut": cut,
    "file empty": lambda path: (path / "__1_0.distcp").write_bytes(b""),
    "bit of a chunk": flip_chunk,
    "bit of a tensor without dims": lambda path: flip_chunk(path, "model.scale", 0),
    "bit of an item": flip_item,
    "hole": with_hole,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_copy_of_the_same_step_restores_every_bit(damage, steps, broken, tmp_path):
    DAMAGES[damage](broken)
    assert muonckpt.verify(broken).verdict == "faulty"
    with pytest.raises(SourceError, match="Nothing was written"):
        muonckpt.salvage(broken, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    report = muonckpt.salvage(broken, tmp_path / "new", others=[steps[3]])
    same(steps[3], tmp_path / "new")
    assert report.fingerprints == {key: record(steps[3], key).fingerprint for key in bits(steps[3])}
    assert {source for *_, source, _ in report.substituted()} <= {"step-3"}
    assert report.salvaged["notes"] == []


def test_boxes_of_another_step_are_taken_only_if_told_and_listed_for_ever(steps, broken, tmp_path):
    (broken / "__1_0.distcp").unlink()
    with pytest.raises(SourceError, match=r"rank 1's file .*/step-2 has it of step 2, which `mix_steps=True` allows"):
        muonckpt.salvage(broken, tmp_path / "new", others=[steps[2]])
    report = muonckpt.salvage(broken, tmp_path / "new", others=[steps[2]], mix_steps=True)
    expected, other = bits(steps[3]), bits(steps[2])
    taken = list(report.substituted())
    assert len(taken) == sum(
        chunk.item.file == "__1_0.distcp" and chunk.box.numel > 0
        for key in expected
        for chunk in record(steps[3], key).chunks
    )
    for key, box, source, step in taken:
        assert (source, step) == ("step-2", 2)
        within = tuple(map(slice, box.lo, box.hi))
        assert not np.array_equal(expected[key][within], other[key][within])
        expected[key][within] = other[key][within]
    for key, value in bits(tmp_path / "new").items():
        np.testing.assert_array_equal(value, expected[key], key)
    untouched = expected.keys() - {key for key, *_ in taken}
    assert untouched
    assert all(report.fingerprints[key] == record(steps[3], key).fingerprint for key in untouched)
    assert muonckpt.verify(tmp_path / "new").verdict == "whole"
    mixed = " ".join(report.notes)
    assert "momenta of 2 tensors are those of step 2 where they were lost" in mixed
    assert "decays within 1 / (1 - mu) steps (20 here)" in mixed
    assert "weights of 3 tensors are those of step 2" in mixed
    assert "no moment of the run" in mixed
    # Whoever looks later finds it, also after another reshard.
    muonckpt.reshard(tmp_path / "new", tmp_path / "later", mesh={"dp": 2})
    for path in (tmp_path / "new", tmp_path / "later"):
        shown = called("inspect", path).stdout
        assert (
            f"salvaged      from broken, and {len(taken)} boxes of {len(taken)} tensors from step-2 (step 2)" in shown
        )
        entry = json.loads(called("inspect", path, "--json").stdout)["provenance"]["salvaged"][0]
        assert entry == report.salvaged
    template = state(0, 0)
    muonckpt.load(template, tmp_path / "new")
    stock = state(0, 0)
    dcp.load(stock, checkpoint_id=tmp_path / "new", no_dist=True)
    for loaded in (template, stock):
        for name in NAMES:
            np.testing.assert_array_equal(
                loaded["model"][name].view(torch.uint16).numpy(), expected[f"model.{name}"].view(np.uint16)
            )


@pytest.mark.parametrize("name", [".metadata", "muonckpt.json"])
@pytest.mark.parametrize("how", ["missing", "damaged", "empty"])
def test_either_description_stands_in_for_the_other(name, how, steps, broken, tmp_path):
    data = (broken / name).read_bytes()
    (broken / name).unlink()
    if how != "missing":
        middle = len(data) // 3
        (broken / name).write_bytes(b"" if how == "empty" else data[:middle] + b"?" + data[middle + 1 :])
    muonckpt.salvage(broken, tmp_path / "new")
    same(steps[3], tmp_path / "new")


def test_without_any_description_it_says_what_to_do(steps, broken, tmp_path):
    (broken / ".metadata").unlink()
    (broken / "muonckpt.json").write_text("{")
    with pytest.raises(SourceError, match="restore the missing description or file from a copy of this checkpoint"):
        muonckpt.salvage(broken, tmp_path / "new", others=[steps[2]])
    (broken / "muonckpt.json").unlink()
    with pytest.raises(SourceError, match="restore the missing description"):
        muonckpt.salvage(broken, tmp_path / "new")


def test_a_description_that_is_lost_and_a_file_that_is_damaged(steps, broken, tmp_path):
    (broken / "muonckpt.json").unlink()
    (broken / "__2_0.distcp").unlink()
    muonckpt.salvage(broken, tmp_path / "new", others=[steps[3]], mix_steps=True)
    mine, theirs = bits(steps[3]), bits(tmp_path / "new")
    assert all(np.array_equal(mine[key], theirs[key]) for key in mine)


def test_sources_are_asked_in_order_each_for_what_those_before_it_lack(steps, broken, tmp_path):
    """The first has one lost file and lacks the other; the second has another mesh; a damaged one is passed over."""
    for number in (1, 2):
        (broken / f"__{number}_0.distcp").unlink()
    first = Path(shutil.copytree(steps[3], tmp_path / "first"))
    damaged = {key: flip_chunk(first, key, 1) for key in bits(steps[3]) if len(record(steps[3], key).chunks) == 3}
    muonckpt.reshard(steps[3], tmp_path / "second", mesh={"dp": 4}, shard={"*weight*": [("dp", 1)]})
    report = muonckpt.salvage(broken, tmp_path / "new", others=[first, tmp_path / "second"])
    same(steps[3], tmp_path / "new")
    given = {(key, source) for key, _, source, _ in report.substituted()}
    for key, box in damaged.items():
        assert {(key, "first"), (key, "second")} <= given
        boxes = [taken for name, taken, source, _ in report.substituted() if (name, source) == (key, "second")]
        assert sum(taken.numel for taken in boxes) == box.numel


@pytest.mark.parametrize("description", [".metadata", "muonckpt.json"])
def test_two_copies_that_have_lost_different_files_are_one_whole_one(description, steps, broken, tmp_path):
    other = Path(shutil.copytree(steps[3], tmp_path / "other"))
    (broken / "__0_0.distcp").unlink()
    (other / "__1_0.distcp").unlink()
    (other / description).unlink()
    unknown = description == "muonckpt.json"  # which alone says the step of this run
    muonckpt.salvage(broken, tmp_path / "new", others=[other], mix_steps=unknown)
    mine, theirs = bits(steps[3]), bits(tmp_path / "new")
    assert all(np.array_equal(mine[key], theirs[key]) for key in mine)


def test_weights_come_from_a_consolidated_file_and_state_begins_anew(steps, broken, tmp_path):
    (broken / "__2_0.distcp").unlink()
    muonckpt.convert(steps[3], tmp_path / "model.safetensors", format="safetensors", select=["model.*"])
    others = [tmp_path / "model.safetensors"]
    with pytest.raises(SourceError, match=r"momentum_buffer.*Nothing was written. What to do: "):
        muonckpt.salvage(broken, tmp_path / "new", others=others)
    report = muonckpt.salvage(broken, tmp_path / "new", others=others, fresh=["*momentum_buffer"])
    expected = bits(steps[3])
    for key, box, source, _ in report.substituted():
        assert source == ("zeros" if key.endswith("momentum_buffer") else "model.safetensors")
        if source == "zeros":
            expected[key][tuple(map(slice, box.lo, box.hi))] = 0
    for key, value in bits(tmp_path / "new").items():
        np.testing.assert_array_equal(value, expected[key], key)
    assert "momenta of 2 tensors begin anew, as zeros, where nothing has them" in report.notes
    assert muonckpt.verify(tmp_path / "new").verdict == "whole"


def test_weights_never_begin_as_zeros_and_patterns_match_something(broken, tmp_path):
    (broken / "__2_0.distcp").unlink()
    with pytest.raises(SourceError, match="weights do not begin as zeros"):
        muonckpt.salvage(broken, tmp_path / "new", fresh=["*"])
    with pytest.raises(TargetError, match="no tensor matches 'momenta'"):
        muonckpt.salvage(broken, tmp_path / "new", fresh=["momenta"])


def test_a_file_of_bare_weights_is_known_by_the_names_of_parameters(steps, broken, tmp_path):
    """Its step is unknown, so its fingerprints decide; where nothing is recorded of a tensor, it counts as another."""
    from safetensors.torch import save_file

    flip_chunk(broken)
    for step in (2, 3):
        save_file({name: state(step, step)["model"][name] for name in NAMES}, tmp_path / f"hf{step}.safetensors")
    with pytest.raises(
        SourceError, match=r"of another save \(tensor 'model.layers.0.weight'.*which `mix_steps=True` allows"
    ):
        muonckpt.salvage(broken, tmp_path / "new", others=[tmp_path / "hf2.safetensors"])
    muonckpt.salvage(broken, tmp_path / "new", others=[tmp_path / "hf2.safetensors", tmp_path / "hf3.safetensors"])
    same(steps[3], tmp_path / "new")


def test_the_same_step_of_another_run_counts_as_another_step(steps, broken, tmp_path):
    flip_chunk(broken)
    muonckpt.save(state(9, 3), tmp_path / "foreign", provenance={"step": 3})
    with pytest.raises(SourceError, match="of the same step of another run"):
        muonckpt.salvage(broken, tmp_path / "new", others=[tmp_path / "foreign"])


def test_tensors_that_never_changed_need_no_permission(steps, broken, tmp_path):
    """Their fingerprints are the same in both steps."""
    frozen = state(3, 2)
    muonckpt.save(frozen, tmp_path / "before", provenance={"step": 2})
    flip_chunk(broken)
    muonckpt.salvage(broken, tmp_path / "new", others=[tmp_path / "before"])
    same(steps[3], tmp_path / "new")


@pytest.mark.parametrize("what", ["shape", "dtype", "momentum convention"])
def test_sources_that_do_not_fit_are_refused_by_name(what, broken, tmp_path):
    other = state(3, 3)
    name, key = NAMES[0], f"model.{NAMES[0]}"
    if what == "shape":
        other["model"][name] = torch.zeros(37, 12).bfloat16()
    elif what == "dtype":
        other["model"][name] = other["model"][name].float()
    else:
        key = f"optimizer.state.{NAMES[0]}.momentum_buffer"
        other["optimizer"]["param_groups"][0]["convention"] = "sum"
    muonckpt.save(other, tmp_path / "other", provenance={"step": 3})
    (broken / "__1_0.distcp").unlink()
    with pytest.raises(SourceError, match=rf"tensor '{key}': expected the {what} .* found .*other"):
        muonckpt.salvage(broken, tmp_path / "new", others=[tmp_path / "other"], mix_steps=True)


def test_a_momentum_of_unrecorded_convention_fills_none_of_a_recorded_one_nor_is_filled_by_it(steps, broken, tmp_path):
    from safetensors.torch import save_file

    key, bare = f"optimizer.state.{NAMES[0]}.momentum_buffer", tmp_path / "bare.safetensors"
    save_file({key: state(2, 2)["optimizer"]["state"][NAMES[0]]["momentum_buffer"]}, bare)
    flip_chunk(broken, key)
    with pytest.raises(SourceError, match=rf"'{key}': expected the momentum convention ema .* found \(not recorded\)"):
        muonckpt.salvage(broken, tmp_path / "new", others=[bare], mix_steps=True)
    bare.write_bytes(bare.read_bytes()[:-7])
    with pytest.raises(SourceError, match=rf"'{key}': expected the momentum convention \(not recorded\) .* found ema"):
        muonckpt.salvage(bare, tmp_path / "new", others=[steps[3]], mix_steps=True)


def test_what_is_whole_is_not_salvaged_and_places_are_kept_apart(steps, broken, tmp_path):
    with pytest.raises(TargetError, match="is whole: nothing of it is lost"):
        muonckpt.salvage(broken, tmp_path / "new")
    flip_chunk(broken)
    for place in (steps[3], broken / "inside"):
        with pytest.raises(DestinationError):
            muonckpt.salvage(broken, place, others=[steps[3]])


def test_a_plan_writes_nothing_and_the_command_prints_what_python_returns(steps, broken, tmp_path):
    box = flip_chunk(broken)
    arguments = ("salvage", broken, tmp_path / "new", "--from", steps[2], "--mix-steps")
    planned = called(*arguments, "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert not (tmp_path / "new").exists()
    done = called(*arguments)
    assert done.returncode == 0, done.stderr
    for text in (planned.stdout, done.stdout):
        row = next(line.split("  ") for line in text.splitlines() if line.startswith(f"model.{NAMES[0]} "))
        assert [cell.strip() for cell in row if cell.strip()] == [f"model.{NAMES[0]}", str(box), "step-2", "2"]
    report = json.loads(called("salvage", broken, tmp_path / "again", *arguments[3:], "--json").stdout)
    assert report["salvaged"]["tensors"] == [f"model.{NAMES[0]}"]
    assert called("salvage", broken, tmp_path / "third").returncode == 3
    assert called("salvage", steps[3], tmp_path / "third").returncode == 2


def test_an_interrupted_salvage_is_resumed(steps, broken, tmp_path):
    (broken / "__1_0.distcp").unlink()
    calls = []

    def stop(count: int, total: int) -> None:
        calls.append(count)
        if sum(calls) > total // 2 + 1:
            raise KeyboardInterrupt

    others = {"others": [steps[3]]}
    with pytest.raises((KeyboardInterrupt, MuonckptError)):
        muonckpt.salvage(broken, tmp_path / "new", **others, execution=Execution(jobs=1, progress=stop))
    assert not (tmp_path / "new").exists()
    left = any("new" in entry.name for entry in tmp_path.iterdir())
    muonckpt.salvage(broken, tmp_path / "new", **others, execution=Execution(resume=left))
    same(steps[3], tmp_path / "new")


# Other programs' checkpoints.


@pytest.mark.parametrize("name", ["torch_fsdp4", "torch_hsdp2x2", "dion_fsdp4", "xtuner_fsdp4"])
def test_stock_checkpoints_are_salvaged_from_an_export(name, tmp_path):
    whole, broken = golden(name) / "ckpt", tmp_path / "broken"
    shutil.copytree(whole, broken)
    muonckpt.reshard(whole, tmp_path / "copy", mesh={"dp": 2})
    (broken / "__1_0.distcp").unlink()
    muonckpt.salvage(broken, tmp_path / "new", others=[tmp_path / "copy"], mix_steps=True)
    mine, theirs = bits(whole), bits(tmp_path / "new")
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[key], theirs[key]) for key in mine)
    assert muonckpt.verify(tmp_path / "new").verdict == "whole"


@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
@pytest.mark.parametrize("format", ["safetensors", "zarr", "buffers"])
def test_damaged_files_of_other_formats_are_salvaged(format, how, steps, tmp_path):
    broken = tmp_path / f"broken.{format}"
    layout = {"layout": "balanced", "mesh": {"dp": 3}} if format == "buffers" else {}
    muonckpt.reshard(steps[3], broken, format=format, **layout)
    with muonckpt.open(broken) as opened:
        extent = opened.tensors[f"optimizer.state.{NAMES[0]}.momentum_buffer"].record.chunks[0].item
    file = broken / extent.file if broken.is_dir() else broken
    raw = bytearray(file.read_bytes())
    raw[extent.offset + extent.length // 2] ^= 1
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(raw if how == "flipped" else raw[:-40])
    if (format, how) == ("safetensors", "missing"):
        with pytest.raises(SourceError):
            muonckpt.salvage(broken, tmp_path / "new", others=[steps[3]])
        return
    report = muonckpt.salvage(broken, tmp_path / "new", others=[steps[3]])
    assert list(report.substituted())
    assert any(".items.json are not read" in note for note in report.notes) == (format != "buffers")
    mine, theirs = bits(steps[3]), bits(tmp_path / "new")
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[key], theirs[key]) for key in mine)
    assert muonckpt.verify(tmp_path / "new").verdict == "whole"


UNLISTED = {
    "the root": ("zarr", ["zarr.json"], True),
    "a group": ("zarr", ["model/zarr.json"], False),
    "an array": ("zarr", [f"model/{NAMES[0]}/value/zarr.json"], True),
    "the index": ("safetensors", ["model.safetensors.index.json"], False),
    "a file": ("safetensors", ["model-00002-of-00005.safetensors"], True),
    "the index and a file": ("safetensors", ["model.safetensors.index.json", "model-00001-of-00005.safetensors"], True),
}


@pytest.mark.parametrize("what", UNLISTED)
def test_what_no_description_lists_any_more_another_checkpoint_says(what, steps, tmp_path):
    format, names, needed = UNLISTED[what]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    muonckpt.reshard(steps[3], whole, format=format, shard_size=800)
    shutil.copytree(whole, broken)
    for name in names:
        (broken / name).unlink()
    assert called("verify", broken).returncode == 1
    if needed:
        with pytest.raises(SourceError, match=r"with `others=`: it says what there was$"):
            muonckpt.salvage(broken, tmp_path / "new")
    muonckpt.salvage(broken, tmp_path / "new", others=[steps[3]] * needed)
    mine, theirs = bits(steps[3]), bits(tmp_path / "new")
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[key], theirs[key]) for key in mine)
    assert muonckpt.verify(tmp_path / "new").verdict == "whole"


@pytest.mark.parametrize("format", ["zarr", "safetensors"])
@pytest.mark.parametrize("description", ["whole", "lost"])
def test_an_array_of_another_save_is_not_taken_for_one_of_this(format, description, steps, tmp_path):
    for step in (2, 3):
        muonckpt.reshard(steps[step], tmp_path / f"{step}", format=format, shard_size=800)
    name = f"model/{NAMES[0]}" if format == "zarr" else "model-00002-of-00005.safetensors"
    index = "model/zarr.json" if format == "zarr" else "model.safetensors.index.json"
    whole, broken = tmp_path / "2" / name, tmp_path / "3" / name
    if whole.is_dir():
        shutil.rmtree(broken)
    (shutil.copytree if whole.is_dir() else shutil.copy)(whole, broken)
    if description == "lost":
        (tmp_path / "3" / index).unlink()
    assert called("verify", tmp_path / "3").returncode == 1
    for others in ([], [steps[2]]):
        with pytest.raises(
            SourceError,
            match=r"another save.*Nothing was written|give a copy of this save, in any format, as `others=`",
        ):
            muonckpt.salvage(tmp_path / "3", tmp_path / "new", others=others)
    for number, others in enumerate(([steps[3]], [steps[2], steps[3]])):
        new = tmp_path / f"new{number}"
        report = muonckpt.salvage(tmp_path / "3", new, others=others)
        assert {source for *_, source, _ in report.substituted()} == {"step-3"}
        mine, theirs = bits(steps[3]), bits(new)
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[key], theirs[key]) for key in mine)
        with muonckpt.open(new) as opened:
            assert opened.provenance["step"] == 3


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Path:
    """Files of four ranks in two replicas of two shards.  Do not change."""
    folder = tmp_path_factory.mktemp("ranks")
    run(4, trainers_runs, folder)
    return folder


@pytest.mark.parametrize("program", ["verl", "accelerate", "torch_checkpointing"])
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_replicas_of_hybrid_shards_fill_what_a_rank_has_lost(program, damage, hybrid, tmp_path):
    whole, broken = hybrid / program, tmp_path / "broken"
    shutil.copytree(whole, broken)
    key = next(key for key, value in bits(whole).items() if value.ndim == 2)
    chunk = record(whole, key).chunks[0]
    file = broken / chunk.item.file
    if damage == "flipped":
        flip(broken, chunk.item.file, chunk.payload.offset)
    elif damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:100])
    report = muonckpt.salvage(broken, tmp_path / "new")
    mine, theirs = bits(whole), bits(tmp_path / "new")
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[key], theirs[key]) for key in mine)
    if damage == "flipped":
        assert (key, chunk.box) in [(key, box) for key, box, *_ in report.substituted()]
        assert {box for _, box, *_ in report.substituted()} == {chunk.box}  # tied weights are the same bytes
