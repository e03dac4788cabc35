"""What is lost is said in terms of a run, in one wording, and what is advised works when it is pasted."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import sweep
from support.commands import called
from support.golden import golden
from support.sharded import as_stock
from support.stored_bytes import bytes_read

import muonckpt
from muonckpt import DamageError, Series
from muonckpt.names import wording
from muonckpt.record.chunks import Boxes, Chunks
from muonckpt.record.columns import Columns
from muonckpt.record.record import Manifest, StateRecord
from muonckpt.store.verify.damage import Damage
from muonckpt.store.verify.diagnosis import Diagnosis, diagnosis_by_files, open_damaged

NAMES = ("layers.0.weight", "layers.1.weight")


@pytest.mark.parametrize("name", ["a b", "it's", "two\nlines", "it's\ta \\tab", "\u202eturned", "\x85", "\udcff"])
def test_bash_reads_the_name_in_a_command_that_is_shown(name):
    line = wording.printable(wording.command("verify", name)).replace("muonckpt verify", "printf %s")
    assert subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout == os.fsencode(name)


def state(step: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(step)
    model = {name: torch.randn(24, 16, generator=rng) for name in NAMES}
    momenta = {name: {"momentum_buffer": torch.randn(24, 16, generator=rng)} for name in NAMES}
    muon = {"params": list(NAMES), "algorithm": "muon", "lr": 0.02, "momentum": 0.95, "convention": "ema"}
    return {"model": model, "optimizer": {"state": momenta, "param_groups": [muon]}}


@pytest.fixture(scope="module")
def saves(tmp_path_factory) -> Path:
    """A series of two steps on two ranks.  Do not change."""
    folder = tmp_path_factory.mktemp("saves")
    for step in (2, 3):
        muonckpt.save(state(step), folder / f"{step}", provenance={"step": step})
        muonckpt.reshard(folder / f"{step}", folder / "run" / f"step-{step:08}", mesh={"dp": 2})
    return folder / "run"


@pytest.fixture
def series(saves, tmp_path) -> Path:
    """Its copy; the last step is for damage."""
    return Path(shutil.copytree(saves, tmp_path / "run"))


@pytest.fixture
def alone(saves, tmp_path) -> Path:
    """A copy of its last step in a folder where nothing else is."""
    return Path(shutil.copytree(saves / "step-00000003", tmp_path / "alone" / "checkpoint"))


def bits(path: Path | str) -> dict[str, bytes]:
    with muonckpt.open(path) as opened:
        return {key: tensor.bits().tobytes() for key, tensor in opened.tensors.items()}


def diagnosed(path: Path) -> Diagnosis:
    return muonckpt.verify(path).diagnosis


def pasted(command: str) -> str:
    """Run an advised line; return the checkpoint that its last command has written, if it writes one."""
    *before, last = command.split(" && ")
    for line in before:
        subprocess.run(["bash", "-ec", line], check=True)
    program, *arguments = shlex.split(last)
    done = called(*arguments)
    assert (program, done.returncode) == ("muonckpt", 0), (command, done.stdout, done.stderr)
    return arguments[2] if len(arguments) > 2 else arguments[1]


def flipped_in(path: Path, key: str) -> None:
    """Change a bit of a tensor's last chunk."""
    with muonckpt.open(path) as opened:
        payload = opened.tensors[key].record.chunks[-1].payload
    raw = bytearray((path / payload.file).read_bytes())
    raw[payload.end - 1] ^= 1
    (path / payload.file).write_bytes(raw)


MOMENTUM = f"optimizer.state.{NAMES[1]}.momentum_buffer"


# --- the sentence -----------------------------------------------------------------------------------------------------


def test_a_whole_checkpoint_has_nothing_to_say(alone):
    found = diagnosed(alone)
    assert not found and not found.remedies and not [*found.lines] and found.to_json() is None
    assert called("verify", alone).stdout.count("\n") == 1


@pytest.mark.parametrize(
    "damaged", [lambda data: data[:-20], lambda data: b"", lambda data: data.replace(b"weight", b"thgiew")]
)
def test_a_damaged_metadata_file_has_one_verdict_and_costs_no_step(damaged, series):
    broken = series / "step-00000003"
    file = broken / ".metadata"
    file.write_bytes(damaged(file.read_bytes()))
    assert {called(command, broken).returncode for command in ("verify", "inspect")} == {1}
    found = muonckpt.inspect(broken).diagnosis
    assert "its .metadata is damaged" in found.sentence
    with pytest.warns(UserWarning, match=r"is read although not whole: its \.metadata is damaged"):
        assert not muonckpt.diff(broken, broken).differs
    assert bits(pasted(found.remedies[0].command)) == bits(broken)
    assert Series(series).latest().path.endswith("step-00000003.2")
    shutil.rmtree(series / "step-00000003.2")
    restored = state(0)
    with pytest.warns(RuntimeWarning, match=r"is taken, as nothing of it is lost, but: .*\.metadata "):
        assert Series(series).restore(restored).step == 3
    assert torch.equal(restored["model"][NAMES[0]], state(3)["model"][NAMES[0]])


def test_a_missing_file_is_one_sentence_wherever_it_is_met(series):
    broken = series / "step-00000003"
    (broken / "__1_0.distcp").unlink()
    lost = "rank 1's file __1_0.distcp is missing: all 4 tensors have lost elements"
    assert diagnosed(broken).sentence.startswith(lost)
    assert muonckpt.inspect(broken).diagnosis.sentence.startswith(lost)
    for command in (["verify"], ["inspect"]):
        assert called(*command, broken).stdout.startswith(f"{broken}: {lost}")
    for call, fault in (
        (lambda: muonckpt.diff(broken, series / "step-00000002"), lost),
        (lambda: muonckpt.load(state(0), broken), f"cannot open {broken / '__1_0.distcp'}: No such file"),
    ):
        with pytest.raises(DamageError, match=r"What to do: .*step-00000002") as caught:
            call()
        assert fault in str(caught.value) and len(str(caught.value).split()) <= 60
    with pytest.raises(DamageError, match="What to do: ") as caught:
        muonckpt.open(as_stock(broken))
    assert lost in str(caught.value)


def test_a_run_says_of_a_step_that_cannot_be_opened_whole_what_its_commands_say(saves, tmp_path):
    for step in (2, 3):
        file = tmp_path / f"checkpoint-{step}" / "model.safetensors"
        muonckpt.convert(saves / f"step-{step:08}", file, format="safetensors", select=["model.*"])
    broken = file.parent
    os.truncate(file, file.stat().st_size - 8)
    fault = muonckpt.look_at_run(tmp_path).steps[-1].fault
    assert f"{file.name} is cut short" in fault and "1 of 2 weights has lost elements" in fault
    assert muonckpt.inspect(broken).diagnosis.sentence == fault
    with pytest.raises(DamageError) as caught:
        muonckpt.open(broken)
    assert caught.value.fault == f"{broken}: {fault}"


def test_a_loss_is_counted_by_kind(tmp_path):
    """Rank 1's file has a quarter of each layer, and half of the embedding, whose first half is replicated."""
    model = {f"layers.{layer}.weight": torch.randn(8, 4) for layer in (0, 1, 2, 5)} | {
        "embed.weight": torch.randn(4, 4)
    }
    momenta = {name: {"momentum_buffer": torch.randn_like(weight)} for name, weight in model.items()}
    muon = {"params": list(model), "algorithm": "muon", "lr": 0.02, "momentum": 0.95, "convention": "ema"}
    whole = {"model": model, "optimizer": {"state": momenta, "param_groups": [muon]}}
    muonckpt.save(whole, tmp_path / "whole")
    muonckpt.reshard(
        tmp_path / "whole",
        tmp_path / "cut",
        mesh={"dp": 2, "tp": 2},
        shard={"*layers.*.weight*": [("dp", 0), ("tp", 0)]},
    )
    with muonckpt.open(tmp_path / "cut") as opened:
        files = {chunk.item.file for chunk in opened.tensors["model.layers.5.weight"].record.chunks}
    (tmp_path / "cut" / max(files)).unlink()
    found = diagnosed(tmp_path / "cut").sentence
    assert "all 10 tensors have lost elements" in found


def test_flipped_bytes_and_a_file_of_another_save_are_counted(series):
    broken = series / "step-00000003"
    flipped_in(broken, MOMENTUM)
    assert diagnosed(broken).sentence == (
        "rank 1's file __1_0.distcp has damaged bytes: 1 of 2 momenta has lost elements ("
        "optimizer.state.layers.1.weight.momentum_buffer)"
    )
    shutil.copyfile(series / "step-00000002" / "__1_0.distcp", broken / "__1_0.distcp")
    assert "rank 1's file __1_0.distcp has damaged bytes: all 4 tensors have lost" in diagnosed(broken).sentence


def test_a_manifest_of_another_save_is_told_from_files_whose_bytes_are_damaged(series, saves):
    broken, before = series / "step-00000003", series / "step-00000002"
    shutil.copyfile(before / "muonckpt.json", broken / "muonckpt.json")
    found = diagnosed(broken)
    assert found.sentence.startswith("each of 2 files (__0_0.distcp, __1_0.distcp) is of another save than ")
    assert bits(pasted(found.remedies[0].command)) == bits(saves / "step-00000003")
    shutil.rmtree(series / "step-00000003.2")
    shutil.copyfile(before / "muonckpt.json", broken / "muonckpt.json")
    for rank in (0, 1):
        file = broken / f"__{rank}_0.distcp"
        file.write_bytes(bytes(file.stat().st_size))
    assert "each of 2 files (__0_0.distcp, __1_0.distcp) has damaged bytes" in diagnosed(broken).sentence


@pytest.mark.parametrize("length", [0, 1000])
def test_a_cut_file_says_how_much_of_it_is_there(alone, length):
    os.truncate(alone / "__0_0.distcp", length)
    assert f"rank 0's file __0_0.distcp is cut short ({length} of " in diagnosed(alone).sentence


def test_a_file_that_cannot_be_opened_is_not_called_missing(alone, tmp_path):
    (alone / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (alone / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    assert "__0_0.distcp cannot be opened: " in diagnosed(alone).sentence
    assert "symbolic link" in diagnosed(alone).sentence


@pytest.mark.parametrize(
    ("format", "lost"),
    [({"format": "zarr"}, "zarr.json"), ({"format": "buffers", "layout": "balanced"}, "flat_buffers.json")],
)
def test_a_checkpoint_that_has_lost_what_shows_its_format_is_damaged(format, lost, saves, tmp_path):
    muonckpt.convert(saves / "step-00000003", tmp_path / "checkpoint", **format)
    (tmp_path / "checkpoint" / lost).unlink()
    done = called("verify", tmp_path / "checkpoint")
    assert done.returncode == 1
    assert f"its {lost} is missing" in done.stdout.splitlines()[0] and "What to do:" in done.stdout


@pytest.mark.parametrize(
    ("format", "lost", "is_refused"),
    [("safetensors", "*.index.json", True), ("zarr", "zarr.json", True), (None, ".metadata", False)],
)
def test_a_lost_description_counts_as_a_loss_if_the_checkpoint_is_refused_without_it(
    format, lost, is_refused, saves, tmp_path
):
    path = tmp_path / "copy"
    shutil.copytree(saves / "step-00000003", path)
    if format:
        shard_size = 200 if format == "safetensors" else None
        muonckpt.convert(saves / "step-00000003", tmp_path / format, format=format, shard_size=shard_size)
        path = tmp_path / format
    [file] = path.glob(lost)
    file.unlink()
    found = diagnosed(path)
    assert found and not found.damage and found.has_loss == is_refused
    with pytest.raises(DamageError) if is_refused else nullcontext():
        muonckpt.open(path).close()


def test_values_that_are_not_finite_are_not_called_lost(tmp_path):
    for step in (1, 2):
        value = torch.full((4,), float("nan") if step == 2 else 1.0)
        muonckpt.save({"w": value}, tmp_path / "run" / f"step-{step:08}")
    found = diagnosed(tmp_path / "run" / "step-00000002")
    assert (
        found.sentence.startswith("tensor 'w' box [0:4] in __0_0.distcp: 4 elements infinite or NaN")
        and "lost" not in found.sentence
    )
    [remedy] = found.remedies
    assert remedy.step == "step-00000001"
    subprocess.run(["bash", "-ec", remedy.command], check=True)
    assert (tmp_path / "run.aside" / "step-00000002").is_dir()
    assert Series(tmp_path / "run").latest().step == 1


@pytest.mark.parametrize("name", ["titan_fsdp4/ckpt", "megatron/fsdp_dtensor/dp4/iter_0000010", "dion_fsdp4/ckpt"])
def test_roles_of_other_programs_tensors_are_named(name, tmp_path):
    broken = Path(shutil.copytree(golden(name), tmp_path / "checkpoint"))
    (broken / "__1_0.distcp").unlink()
    said = called("verify", broken).stdout.splitlines()[0]
    assert f"{broken}: rank 1's file __1_0.distcp is missing: " in said
    assert "momenta" in said and "weights" in said
    assert called("inspect", broken).stdout.splitlines()[0] == said, "it was verified"
    with pytest.raises(DamageError) as refused:  # the library says the same without being asked whose the keys are
        muonckpt.open(broken)
    assert said.removesuffix(".") in str(refused.value)


def renamed(path: Path, names: dict[str, str]) -> None:
    """Give files other names at once."""
    aside = {new: (path / old).rename(path / f"{new}.tmp") for old, new in names.items()}
    for new, place in aside.items():
        place.rename(path / new)


A, B, C = (f"__{rank}_0.distcp" for rank in range(3))
RENAMED = [{A: B, B: A}, {A: B, B: C, C: A}, {B: "__1_0.distcp.bak"}, {A: "old", B: A}, {A: B, B: "old"}]


NAMED = [(program, names) for program in (None, "dion_fsdp4/ckpt") for names in RENAMED]


@pytest.fixture(scope="module")
def uneven(saves, tmp_path_factory) -> Path:
    """A checkpoint whose three ranks have 10, 10 and 4 rows of each tensor.  Do not change."""
    path = tmp_path_factory.mktemp("uneven") / "one"
    muonckpt.reshard(saves / "step-00000003", path, mesh={"dp": 3}, shard={"*": [("dp", 0)]})
    return path


@pytest.mark.parametrize(("program", "names"), sweep(NAMED, *NAMED[:6]))
def test_files_with_each_others_names_are_told_and_get_theirs_back(program, names, uneven, tmp_path):
    source = golden(program) if program else uneven
    path = Path(shutil.copytree(source, tmp_path / "a run" / "one"))
    renamed(path, names)
    for command in ("inspect", "verify"):
        done = called(command, path)
        said = done.stdout.splitlines()[0]
        assert done.returncode == 1 and f"{len(names)} file" in said and "with other names" in said
        assert said.endswith("; nothing else is wrong, and nothing is lost.")
    [remedy] = diagnosed(path).remedies
    assert muonckpt.inspect(path).diagnosis.remedies == (remedy,), "the record of the verification keeps it"
    subprocess.run(["bash", "-ec", remedy.command], check=True)
    assert called("verify", path).returncode == 0 and bits(path) == bits(source)


def test_a_file_that_was_copied_over_another_is_lost(uneven, tmp_path):
    path = Path(shutil.copytree(uneven, tmp_path / "one"))
    shutil.copy(path / A, path / B)
    found = diagnosed(path)
    assert not found.damage.misplaced and found.damage.chunks.sum() == 4


def test_small_chunks_tell_a_file_of_a_step_that_is_recorded_as_damaged(tmp_path):
    """A large chunk may be as large as a disk reads in a minute, while all ranks wait."""
    tensors = {"large": torch.randn(2, (1 << 20) + 1), "small": torch.randn(2, 64)}
    muonckpt.save({"model": tensors}, tmp_path / "whole")
    path = tmp_path / "one"
    muonckpt.reshard(tmp_path / "whole", path, mesh={"dp": 2}, shard={"*": [("dp", 0)]})
    renamed(path, {A: B, B: A})
    assert called("verify", path).returncode == 1
    before = bytes_read()
    [remedy] = muonckpt.inspect(path).diagnosis.remedies
    assert remedy.command.startswith("mv ") and 0 < bytes_read() - before < tensors["large"].nbytes / 2


def test_what_is_lost_besides_is_said(uneven, tmp_path):
    path = Path(shutil.copytree(uneven, tmp_path / "one"))
    renamed(path, {A: B, B: A})
    (path / C).unlink()
    found = diagnosed(path)
    assert called("verify", path).returncode == 1
    assert muonckpt.inspect(path).diagnosis.remedies == found.remedies, "a few bytes give the exact cure again"
    assert found.sentence.startswith(f"2 files with other names than when it was saved: that of {A} is called {B}")
    assert f"; rank 2's file {C} is missing: all 4 tensors have lost elements" in found.sentence
    subprocess.run(["bash", "-ec", found.remedies[0].command], check=True)
    assert diagnosed(path).sentence.startswith(f"rank 2's file {C} is missing")


# --- what to do -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [".metadata", "muonckpt.json", "damaged muonckpt.json"])
def test_a_lost_description_is_rebuilt_exactly(lost, series, saves):
    broken = series / "step-00000003"
    if lost.startswith("damaged"):
        raw = (broken / "muonckpt.json").read_bytes()
        (broken / "muonckpt.json").write_bytes(raw[: len(raw) // 2])
    else:
        (broken / lost).unlink()
    if lost == ".metadata":
        with pytest.warns(RuntimeWarning, match="as nothing of it is lost, but: its .metadata is missing"):
            assert Series(series).restore(state(0)).step == 3
    if lost.startswith("damaged"):
        with pytest.warns(RuntimeWarning, match="cannot be opened: muonckpt.json: damaged manifest"):
            assert Series(series).restore(state(0)).step == 2, "it is not taken in silence"
    if lost != ".metadata":
        rebuilt, back = diagnosed(broken).remedies
        assert "CRC-32s alone" in rebuilt.gives and back.command == "start the job again"
    else:
        assert "nothing is lost, and a resume takes it as it is" in diagnosed(broken).remedies[0].gives
    new = pasted(diagnosed(broken).remedies[0].command)
    assert bits(new) == bits(saves / "step-00000003") and not diagnosed(Path(new))
    assert Series(series).restore(state(0)).path == str(new)


def test_a_rewrite_that_meets_damage_names_the_step_from_which_the_run_goes_on(series):
    broken = series / "step-00000003"
    flipped_in(broken, MOMENTUM)
    (broken / "muonckpt.json").rename(broken / "muonckpt.json.aside")
    done = called("reshard", broken, f"{broken}.2", "--mesh", "dp=2")
    assert done.returncode == 3 and done.stderr.strip().endswith(
        "What to do: (a) start the job again (it resumes from step-00000002, not verified yet)"
    )
    assert not Path(f"{broken}.2").exists()
    with pytest.warns(RuntimeWarning, match="is not whole"):
        assert Series(series).restore(state(0)).step == 2


def test_the_step_before_is_advised_first_and_restore_takes_it(series):
    broken = series / "step-00000003"
    (broken / "__1_0.distcp").unlink()
    [back] = diagnosed(broken).remedies
    assert (back.command, back.gives) == ("start the job again", "it resumes from step-00000002, not verified yet")
    assert [step.is_whole for step in muonckpt.verify_run(series)] == [False, True]
    assert diagnosed(broken).remedies[0].gives == "it resumes from step-00000002, verified"
    template = state(0)
    with pytest.warns(RuntimeWarning, match="is not whole"):
        assert Series(series).restore(template).step == 2
    assert torch.equal(template["model"][NAMES[0]], state(2)["model"][NAMES[0]])


def test_of_a_run_without_a_whole_step_restore_says_what_each_has_lost_and_what_to_do(series):
    (series / "step-00000002" / "__0_0.distcp").unlink()
    (series / "step-00000003" / "__1_0.distcp").unlink()
    with pytest.raises(DamageError, match="found none among 2") as caught:
        Series(series).restore(state(0))
    assert str(caught.value).count("all 4 tensors have lost elements") == 2
    assert "(a) muonckpt verify COPY (tells whether a copy of this checkpoint is whole" in str(caught.value)
    # One fault of several steps is listed once.
    for name in ("step-00000002/__1_0.distcp", "step-00000003/__0_0.distcp"):
        (series / name).unlink()
    with pytest.raises(DamageError) as caught:
        Series(series).restore(state(0))
    assert "\n- step-00000003, step-00000002: " in str(caught.value)


def test_nothing_that_loses_state_is_advised_where_another_step_keeps_it(series):
    flipped_in(series / "step-00000003", MOMENTUM)
    assert "fresh" not in str(diagnosed(series / "step-00000003"))
    with pytest.raises(DamageError) as caught:
        muonckpt.load(state(0), series / "step-00000003")
    assert "fresh" not in str(caught.value)


def test_without_another_step_a_copy_is_asked_for_and_no_weight_is_given_up(alone, saves):
    (alone / "__1_0.distcp").unlink()
    [remedy] = diagnosed(alone).remedies
    copy = pasted(remedy.command.replace("COPY", shlex.quote(str(saves / "step-00000003"))))
    shutil.copy(f"{copy}/__1_0.distcp", alone)
    assert not diagnosed(alone) and bits(alone) == bits(copy)


def test_what_is_loaded_of_a_step_that_is_recorded_as_damaged_is_whole_and_the_rest_is_told(series):
    broken = series / "step-00000003"
    flipped_in(broken, MOMENTUM)
    assert called("verify", broken).returncode == 1
    template = {"model": state(0)["model"]}
    with pytest.warns(
        UserWarning, match="is not whole, and what was loaded of it is: verified .* 1 of 2 momenta has lost elements"
    ):
        muonckpt.load(template, broken, allow_extra=True)
    assert all(torch.equal(template["model"][name], state(3)["model"][name]) for name in NAMES)
    with pytest.warns(UserWarning, match="is read although not whole: verified "):
        muonckpt.stats(broken, select=["model.*"], spectra=False)
    with pytest.raises(DamageError, match=r"verified .* 1 of 2 momenta has lost elements"):
        muonckpt.stats(broken, spectra=False)


def test_lost_momenta_alone_can_begin_anew(alone):
    flipped_in(alone, MOMENTUM)
    _, python = diagnosed(alone).remedies
    template = state(0)
    assert exec(python.command, {"muonckpt": muonckpt, "state": template}) is None
    true = state(3)
    assert not template["optimizer"]["state"][NAMES[1]]["momentum_buffer"].any()
    for name in NAMES:
        assert torch.equal(template["model"][name], true["model"][name])
    first = template["optimizer"]["state"][NAMES[0]]["momentum_buffer"]
    assert torch.equal(first, true["optimizer"]["state"][NAMES[0]]["momentum_buffer"])


@pytest.mark.parametrize("stock", [False, True])
def test_a_load_does_not_need_the_files_of_what_begins_anew(stock, saves, tmp_path):
    broken = Path(shutil.copytree(saves.parent / "3", tmp_path / "checkpoint"))
    with muonckpt.open(broken) as opened:
        items = {tensor.key: tensor.chunks[0].item for tensor in opened.outline.tensors}
    key = max(items, key=lambda key: items[key].offset)
    assert key == MOMENTUM
    if stock:
        as_stock(broken)
    with (broken / "__0_0.distcp").open("r+b") as file:  # the last of its tensors, and whatever comes after
        file.truncate(items[key].offset + 9)
    true, template = state(3), {"model": state(0)["model"]}
    muonckpt.load(template, broken, allow_extra=True)
    assert all(torch.equal(template["model"][name], true["model"][name]) for name in NAMES)
    with pytest.raises(DamageError, match=r"it was cut|expected 1024 bytes at byte [0-9]+ of the file, found 9"):
        muonckpt.load(state(0), broken)


# --- many chunks ------------------------------------------------------------------------------------------------------


def test_many_lost_chunks_are_told_without_a_loop_over_them(monkeypatch):
    count = 200_000
    lo = np.arange(count, dtype=np.int64)[:, None]
    zeros, ones = np.zeros(count, np.int64), np.ones(count, np.int64)
    file, digest = np.zeros(count, np.int32), np.zeros((count, 16), np.uint8)
    columns = Columns.of_extents(("__0_0.distcp",), file, zeros, ones * 4, zeros, ones * 4, digest, ones > 0, ones)
    chunks = Chunks(columns, 0, Boxes.of(lo, lo + 1))
    manifest = Manifest((StateRecord("model.w", ("model", "w"), (count,), "float32", chunks),))

    def refuse(*_: object) -> None:
        raise AssertionError("a chunk was looked at by itself")

    for name in ("__iter__", "__getitem__"):
        monkeypatch.setattr(Boxes, name, refuse)
        monkeypatch.setattr(Chunks, name, refuse)
    damage = Damage(manifest, np.ones(count, np.bool_), files={"__0_0.distcp": "is missing"}, read=True)
    assert damage.sentence == ("rank 0's file __0_0.distcp is missing: 1 of 1 weights has lost elements (model.w)")
    found = damage.to_json()
    assert found["boxes"]["lo"][-1] == [count - 1] and len(found["boxes"]["tensor"]) == count
    whole = replace(damage, chunks=np.zeros(count, np.bool_), files={})
    assert not whole and not whole.tensors


def test_json_of_the_commands_has_the_lost_boxes_as_columns(alone):
    (alone / "__1_0.distcp").unlink()
    for command in ("verify", "inspect"):
        found = json.loads(called(command, alone, "--json").stdout)["diagnosis"]
        assert list(found) == ["sentence", "remedies", "lost"]
        lost = found["lost"]
        assert lost["chunks"] == 4 and lost["files"] == {"__1_0.distcp": "is missing"}
        assert lost["boxes"]["tensor"] == [0, 1, 2, 3] and lost["boxes"]["lo"] == [[12, 0]] * 4


def test_what_files_tell_agrees_with_what_reading_tells(alone):
    (alone / "__1_0.distcp").unlink()
    with open_damaged(alone) as opened:
        by_files = diagnosis_by_files(opened, None).damage
    assert np.array_equal(by_files.chunks, diagnosed(alone).damage.chunks)
