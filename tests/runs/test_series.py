"""Series: the newest whole checkpoint is found, the one before stands in for it, and the last whole one stays."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shlex
import sys
import time
import uuid
import warnings
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from support import killed_saves
from support.commands import called
from support.damages import flip_last_bit
from support.forked import printed
from support.workers import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import muonckpt
from muonckpt import ArgumentError, DamageError, DestinationError, MuonckptError, Series, SourceError
from muonckpt.checkpoint import all_ranks
from muonckpt.optimizer import Muon
from muonckpt.runs import step_folder
from muonckpt.runs.run_audit import verify_run
from muonckpt.runs.step_folder import superfluous
from muonckpt.store.formats import native
from muonckpt.store.io.location import location
from muonckpt.store.verify.run import run_of
from muonckpt.store.verify.step_names import StepName

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

names, restored, state = killed_saves.names, killed_saves.restored, killed_saves.state


S = StepName


@pytest.mark.parametrize(
    ("saved", "torn", "removed"),
    [
        (S(9), (), {S(2), S(3), S(6)}),
        (S(9), (S(8),), {S(2), S(3)}),  # it stays, and does not count
        (S(9), (S(9), S(8), S(6), S(4)), {S(2)}),  # what was just saved counts, whatever is said of it
        (S(6), (), {S(3), S(2)}),  # the run went back: later steps are left alone
        (S(8, 2), (), {S(8), S(3), S(2)}),  # saved again
        (S(2), (S(2), S(4)), set()),
    ],
)
def test_what_is_kept(saved, torn, removed):
    there = {S(2), S(3), S(4), S(6), S(8), S(9), saved}
    gone = list(superfluous(there, saved, 2, 4, lambda name: name not in torn))
    assert set(gone) == removed and gone == sorted(gone, reverse=True)


def test_names_are_read_as_they_are_written():
    for name in (S(0), S(12), S(99_999_999), S(100_000_000, 3)):
        assert StepName.parsed(str(name)) == name
    for other in ("step-1000", "step-00001000.1", "step-00001000.02", "step-000000001000", "Step-00001000", "step-"):
        assert StepName.parsed(other) is None


def test_a_series_from_its_first_start_on(tmp_path):
    series = Series(tmp_path / "run", keep_last=2, keep_every=4)
    assert series.latest() is None and restored(series) is None and not (tmp_path / "run").exists()
    with pytest.raises(SourceError, match="is it the folder of this run"):
        series.restore(state(-1), required=True)
    for step in range(1, 8):
        saved = series.save(step, state(step), provenance={"loss": 0.5})
    assert names(tmp_path / "run") == ["step-00000004", "step-00000006", "step-00000007"]
    assert series.latest() == saved and restored(Series(tmp_path / "run")) == 7
    assert muonckpt.open(saved).provenance["step"] == 7 and muonckpt.open(saved).provenance["loss"] == 0.5


def test_a_series_that_keeps_all_removes_none(tmp_path):
    for step in range(5):
        Series(tmp_path, keep_last=None).save(step, state(step))
    assert len(names(tmp_path)) == 5


def test_a_run_stays_where_it_was_when_the_program_goes_to_another_folder(tmp_path, monkeypatch):
    """Hydra changes the working directory when its function begins, and some launchers do."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    series = Series("run")
    first = series.save(1, state(1))
    monkeypatch.chdir(tmp_path / "other")
    assert series.latest() == first and Path(first.path) == tmp_path / "run/step-00000001"
    saving = series.async_save(2, state(2))
    saving.result()
    assert restored(series) == 2 and Path(saving.path) == tmp_path / "run/step-00000002"
    assert not names(tmp_path / "other")


def test_a_url_of_a_file_names_no_machine(tmp_path, monkeypatch):
    """Of file://run, "run" would be a machine: the series would be in the working directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DestinationError, match=r"file://run names a machine, 'run': write a path, or three slashes"):
        Series("file://run")
    for place in (f"file://{tmp_path}/run", f"file://localhost{tmp_path}/run", os.fsencode(tmp_path / "run")):
        Series(place).save(1, state(1), replace=True)
    assert names(tmp_path) == ["run"] and restored(Series(tmp_path / "run")) == 1


def test_a_later_step_that_cannot_be_read_is_warned_of(tmp_path):
    """Nothing is known of it, so it is not taken for one that is not whole."""
    series = Series(tmp_path, keep_last=3)
    for step in (1, 2):
        series.save(step, state(step))
    manifest = tmp_path / "step-00000002" / "muonckpt.json"
    manifest.unlink()
    manifest.symlink_to(manifest.name)
    with pytest.warns(RuntimeWarning, match="step-00000002 is of a later step"):
        Series(tmp_path, keep_last=3).save(1, state(1), replace=True)
    assert names(tmp_path) == ["step-00000001.2", "step-00000002"]


def restored_with_what_is_told(folder: Path) -> tuple[int | None, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        latest, step = Series(folder).latest(), restored(Series(folder))
    assert (latest and latest.step) == step
    assert run_of(folder).newest_whole.step == step
    return step, [str(each.message) for each in caught]


@pytest.mark.parametrize("is_verified", [False, True])
@pytest.mark.parametrize(
    "lost",
    [
        ("muonckpt.json",),
        (".metadata",),
        ("__0_0.distcp",),
        ("muonckpt.json", ".metadata"),
        ("muonckpt.json", "__0_0.distcp"),
        (".metadata", "__0_0.distcp"),
    ],
)
def test_nobody_goes_back_without_a_word_and_all_say_the_same_of_a_run(lost, is_verified, tmp_path):
    series = Series(tmp_path)
    for step in (1, 2, 3):
        series.save(step, state(step))
    if is_verified:
        assert all(verdict.is_whole for verdict in verify_run(tmp_path, every=True))
    for file in lost:
        (tmp_path / "step-00000003" / file).unlink()
    step, told = restored_with_what_is_told(tmp_path)
    newer = tmp_path / "step-00000003"
    if lost == (".metadata",):  # which our manifest does without
        assert step == 3 and len(told) == 2
        assert all(
            f"{newer} is taken, as nothing of it is lost, but: its .metadata is missing" in each for each in told
        )
    else:
        assert step == 2 and len(told) == 2
        assert all(message.startswith(f"{newer} is not whole: ") for message in told)
        assert all(re.search(r" missing|has no muonckpt\.json|expected \.metadata", message) for message in told)
    *_, last = verdicts = list(verify_run(tmp_path))
    assert last.step.step == step and [verdict.is_whole for verdict in verdicts] == [False, True][: 4 - step]


def test_what_a_verification_has_found_lost_is_passed_over_and_what_only_looks_odd_is_not(tmp_path):
    series = Series(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        series.save(step, state(step))
    flip_last_bit(tmp_path / "step-00000003")
    assert Series(tmp_path).latest().step == 3  # nobody has read it
    assert [verdict.is_whole for verdict in verify_run(tmp_path)] == [False, True]
    step, told = restored_with_what_is_told(tmp_path)
    assert step == 2 and len(told) == 2 and all("damaged bytes" in message for message in told)
    Series(tmp_path, keep_last=2).save(4, state(4))  # what is known to be damaged does not count
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]
    muonckpt.save({"w": torch.full((2,), torch.nan)}, tmp_path / "step-00000005")
    assert not next(verify_run(tmp_path)).is_whole
    template = {"w": torch.zeros(2)}
    with pytest.warns(RuntimeWarning, match="as nothing of it is lost, but: tensor 'w' .*: 2 elements infinite"):
        assert Series(tmp_path).restore(template).step == 5 and template["w"].isnan().all()


def test_a_run_of_which_the_only_step_has_lost_its_manifest_does_not_begin_anew(tmp_path):
    Series(tmp_path).save(1, state(1))
    (tmp_path / "step-00000001" / "muonckpt.json").unlink()
    with pytest.raises(DamageError, match=r"its muonckpt\.json is missing"):
        Series(tmp_path).restore(state(-1))


def test_the_warning_of_a_newer_step_ends_with_the_command_that_says_how_to_have_it(tmp_path):
    for step in (1, 2):
        Series(tmp_path).save(step, state(step))
    (tmp_path / "step-00000002" / "muonckpt.json").unlink()
    with pytest.warns(RuntimeWarning, match="is not whole: .* instead") as told:
        assert restored(Series(tmp_path)) == 1
    command = shlex.split(str(told[0].message).rpartition("Whether it can be recovered: muonckpt ")[2])
    [cure] = re.findall(r"^\(a\) muonckpt (.*)$", called(*command).stdout, re.MULTILINE)
    assert called(*shlex.split(cure)).returncode == 0
    assert restored(Series(tmp_path)) == 2


def test_a_flipped_bit_sends_back_to_the_one_before_and_a_misfit_does_not(tmp_path):
    series = Series(tmp_path, keep_last=2)
    paths = [Path(series.save(step, state(step)).path) for step in (1, 2, 3)][1:]
    flip_last_bit(paths[1])
    assert Series(tmp_path).latest().step == 3  # its files have their sizes
    with pytest.raises(SourceError, match="does not fit the state dict") as refusal:
        series.restore({**state(-1), "other": torch.ones(2)})
    assert not isinstance(refusal.value, DamageError)
    with pytest.warns(
        RuntimeWarning, match=f"{paths[1]} is not whole: .*'w7'.* damaged.*; restoring {paths[0]} instead"
    ):
        assert restored(series) == 2
    assert series.save(3, state(3)).path == f"{paths[1]}.2" and not paths[1].exists() and restored(series) == 3
    with pytest.raises(DestinationError, match="replace=True"):
        series.save(3, state(4))
    assert series.save(3, state(3), replace=True).path == f"{paths[1]}.3"
    assert names(tmp_path) == ["step-00000002", "step-00000003.3"]
    flip_last_bit(paths[0]), flip_last_bit(tmp_path / "step-00000003.3")
    with pytest.warns(RuntimeWarning), pytest.raises(DamageError, match="found none among 2") as none:
        series.restore(state(-1))
    assert str(paths[0]) in str(none.value) and "step-00000003.3" in str(none.value)
    assert f"What to do: (a) muonckpt verify {tmp_path / 'step-00000003.3'} (lists all" in str(none.value)
    assert "(b)" not in str(none.value)


@pytest.mark.parametrize("how", ["cut", "flipped", "whole"])
def test_a_save_says_on_one_line_which_step_it_replaces_and_why(how, tmp_path, capsys):
    series = Series(tmp_path)
    for step in (1, 2):
        path = Path(series.save(step, state(step)).path)
    reason = "replace=True"
    if how == "cut":
        os.truncate(path / "__0_0.distcp", 100)
        reason = "rank 0's file __0_0.distcp is cut short (100 of "
    elif how == "flipped":
        flip_last_bit(path)
        with pytest.warns(RuntimeWarning):
            assert restored(series) == 1
        reason = "tensor "
    capsys.readouterr()
    saved = series.save(2, state(2), replace=how == "whole")
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{saved.path} replaces step-00000002, which is removed afterwards: {reason}")
    assert (
        "UNUSABLE" not in line and saved.path == f"{path}.2" and names(tmp_path) == ["step-00000001", path.name + ".2"]
    )
    series.save(3, state(3))
    assert capsys.readouterr().out == ""


def test_a_restore_with_fresh_names_the_step_that_it_takes_and_no_older_one(tmp_path):
    for step in (1, 2):
        [file] = Path(Series(tmp_path).save(step, state(step)).path).glob("*.distcp")
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning) as caught, contextlib.suppress(SourceError):
        Series(tmp_path).restore(state(-1), fresh=["x*"], allow_extra=True)
    told = [str(each.message) for each in caught if "restoring it but for fresh state" in str(each.message)]
    assert len(told) == 1 and "step-00000002 is not whole" in told[0]
    assert not [each for each in caught if "step-00000001 is not whole" in str(each.message)]


@pytest.mark.parametrize("record", ["written", "refused"])
def test_all_hear_of_damage_that_a_restore_has_met_until_the_file_is_replaced(record, tmp_path):
    for step in (1, 2, 3):
        path = Path(Series(tmp_path).save(step, state(step)).path)
    [file] = path.glob("*.distcp")
    saved = file.read_bytes()
    flip_last_bit(path)
    if record == "refused":
        (tmp_path / ".muonckpt-verified").write_text("no folder")
    with pytest.warns(RuntimeWarning, match=f"{path} is not whole: .* is damaged") as told:
        assert restored(Series(tmp_path)) == 2
    assert "UNUSABLE" not in str(told[0].message) and 'check="before"' not in str(told[0].message), "it was restored"
    newest = run_of(tmp_path).newest_whole
    if record == "refused":
        assert newest.step == 3
        return
    assert newest.step == 2
    assert run_of(tmp_path).steps[2].fault.startswith(f"rank 0's file {file.name} has damaged bytes: ")
    with pytest.warns(RuntimeWarning, match=f"{path} is not whole: {re.escape(run_of(tmp_path).steps[2].fault)}"):
        assert Series(tmp_path).latest().step == 2
    copy = tmp_path / "copy"
    copy.write_bytes(saved)
    copy.replace(file)
    assert run_of(tmp_path).newest_whole.step == 3 and restored(Series(tmp_path)) == 3


def test_one_wrong_read_of_a_whole_step_is_not_recorded(tmp_path, monkeypatch):
    """Elements arrive with other bits once, and as they were saved when they are read again."""
    for step in (1, 2):
        Series(tmp_path).save(step, state(step))
    honest, wrong_reads = os.preadv, []

    def read(handle: int, buffers: list[memoryview], *where: int) -> int:
        count = honest(handle, buffers, *where)
        if not wrong_reads and "step-00000002/__0_0" in str(Path(f"/proc/self/fd/{handle}").readlink()):
            wrong_reads.append(handle)
            for buffer in buffers:
                buffer[:] = bytes(byte ^ 1 for byte in buffer)
        return count

    monkeypatch.setattr(os, "preadv", read)
    with pytest.warns(RuntimeWarning, match="step-00000002 is not whole: .*damaged"):
        assert restored(Series(tmp_path)) == 1
    assert wrong_reads and run_of(tmp_path).newest_whole.step == 2 and not (tmp_path / ".muonckpt-verified").exists()


def run_of_one_step(folder: Path) -> tuple[Series, torch.nn.Linear, Path]:
    """Return a run with one step, its model, whose weight is zeros now, and the path of the step."""
    model = torch.nn.Linear(64, 64, bias=False)
    series = Series(folder, model, Muon(model.parameters(), lr=0.1))
    path = Path(series.save(1).path)
    with torch.no_grad():
        model.weight.zero_()
    return series, model, path


def fail(*_: object, **options: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("cause", ["bytes", "disk", "object", "interrupt"])
def test_a_run_whose_resume_has_failed_half_way_saves_nothing_until_one_succeeds(cause, tmp_path, monkeypatch):
    series, model, path = run_of_one_step(tmp_path)
    if cause == "bytes":
        flip_last_bit(path)
    elif cause in ("disk", "interrupt"):
        honest, end = os.preadv, fail if cause == "disk" else interrupt
        # Items that are not tensors are short, and read first.
        monkeypatch.setattr(os, "preadv", lambda *call: end() if len(call[1][0]) > 16384 else honest(*call))
    else:
        monkeypatch.setattr(Muon, "load_state_dict", fail)
    with warnings.catch_warnings(action="ignore"), pytest.raises((MuonckptError, OSError, KeyboardInterrupt)):
        series.resume()
    monkeypatch.undo()
    for save in (series.save, series.async_save):
        with pytest.raises(DestinationError, match=f"nothing is saved: a restore of {path} has failed or was"):
            save(2)
    assert names(tmp_path) == [path.name]
    if cause != "bytes":
        assert series.resume() == 2 and model.weight.any() and series.save(2).step == 2


def test_a_checkpoint_that_does_not_fit_stops_no_save(tmp_path):
    series = Series(tmp_path)
    series.save(1, state(1))
    with pytest.raises(SourceError, match="does not fit"):
        series.restore({"other": torch.zeros(2)})
    assert series.save(2, state(2)).step == 2


@pytest.mark.parametrize(
    "where", ["muonckpt.store.formats.native.read_native", "muonckpt.runs.series.series.load_sent"]
)
def test_a_reader_is_overtaken_by_a_save_that_removes_what_it_found(where, tmp_path, monkeypatch):
    """Between listing and looking, and between looking and loading: neither is damage, or an empty series."""
    Series(tmp_path, keep_last=1).save(1, state(1))
    module, _, name = where.rpartition(".")
    real, calls = getattr(sys.modules[module], name), []

    def overtaken(*arguments, **options):
        calls.append(1)
        if len(calls) == 1:
            Series(tmp_path, keep_last=1).save(2, state(2))
        return real(*arguments, **options)

    monkeypatch.setattr(where, overtaken)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert restored(Series(tmp_path)) == 2 and names(tmp_path) == ["step-00000002"]


def test_a_restore_parses_the_manifest_once(tmp_path, monkeypatch):
    Series(tmp_path).save(1, state(1))
    parsed, read = [], native.read_native
    monkeypatch.setattr(native, "read_native", lambda path: parsed.append(path) or read(path))
    assert restored(Series(tmp_path)) == 1 and len(parsed) == 1


@pytest.mark.parametrize("file", ["__0_0.distcp", "muonckpt.json"])
def test_a_file_that_has_become_a_folder_sends_back_to_the_one_before(file, tmp_path):
    paths = [Path(Series(tmp_path).save(step, state(step)).path) for step in (1, 2)]
    (paths[1] / file).unlink()
    (paths[1] / file).mkdir()
    with pytest.warns(RuntimeWarning, match=f"{paths[1]} is not whole: .*regular file.*; restoring {paths[0]} instead"):
        assert restored(Series(tmp_path)) == 1


def of_ranks(world: int, step: int) -> dict:
    mesh = init_device_mesh("cpu", (world,))
    return {"w": distribute_tensor(torch.full((5, 3), float(step)), mesh, [Shard(0)])}


def life(rank, world, folder):
    """What each rank is told, while rank 0 does the damage."""
    series, seen = Series(folder, keep_last=2), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen.append(series.restore(of_ranks(world, -1)))
        for step in (1, 2, 3):
            series.save(step, of_ranks(world, step))
        if rank == 0:
            flip_last_bit(Path(folder) / "step-00000003")
        seen.append(series.latest().step)
        template = of_ranks(world, -1)
        seen.append(series.restore(template).step)
        seen.append(template["w"].to_local().unique().tolist())
        for attempt in (
            lambda: series.save(2, of_ranks(world, 2)),
            lambda: series.save(4, {"w": torch.full((3,), float(rank))}),  # replicas differ
            lambda: series.restore({"v": of_ranks(world, -1)["w"]}),
        ):
            try:
                attempt()
            except muonckpt.MuonckptError as error:
                seen.append(type(error).__name__)
        seen.append(series.latest().step)
    return seen, [str(each.message) for each in caught if each.category is RuntimeWarning]


def test_all_ranks_agree_whatever_happens(tmp_path):
    results = run(2, life, str(tmp_path))
    for seen, _ in results:
        assert seen == [None, 3, 2, [2.0], "DestinationError", "LayoutError", "SourceError", 2]
    # What all ranks know is said once.
    counts = [sum("3 is not whole" in text and "step-00000002 instead" in text for text in told) for _, told in results]
    assert counts[0] and not any(counts[1:])
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    assert run_of(tmp_path).newest_whole.step == 2, "rank 1 has met the damage, and rank 0 has recorded it"


def fail_to_record(rank, world, folder):
    """Return what each rank is told where the first one fails while it records damage."""
    template, told = of_ranks(world, -1), "nothing"
    with warnings.catch_warnings(), patch("muonckpt.runs.run_audit.damage_in", side_effect=KeyError("defect")):
        warnings.simplefilter("ignore")
        try:
            Series(folder).restore(template)
        except MuonckptError as error:
            told = f"{type(error).__name__}: {error}"
    return told


def test_an_unexpected_error_while_damage_is_recorded_reaches_all_ranks(tmp_path):
    run(2, save_two_steps, str(tmp_path))
    flip_last_bit(tmp_path / "step-00000002")
    assert run(2, fail_to_record, str(tmp_path)) == ["SourceError: KeyError: 'defect'"] * 2


def save_two_steps(rank, world, folder):
    for step in (1, 2):
        Series(folder).save(step, of_ranks(world, step))


def strict_on_the_first(rank, world, folder):
    """All that warns between collectives, or on one rank alone, where the first rank makes warnings errors."""
    model = torch.nn.Linear(4, 3, bias=False)
    optimizer = Muon(model.named_parameters(), lr=0.1, replicas=torch.distributed.group.WORLD)
    seen = []
    with redirect_stderr(io.StringIO()) as told, warnings.catch_warnings():
        warnings.simplefilter("error" if rank == 0 else "ignore")
        optimizer.step()  # no gradient
        optimizer.load_state_dict(Muon(model.named_parameters(), lr=0.2).state_dict())
        series = Series(folder, keep_last=1)
        series.save(9, of_ranks(world, 9))
        seen.append(Path(series.save(3, {"model": of_ranks(world, 3)}, also="hf").path).name)  # 9 is later
        series.async_save(4, of_ranks(world, 4)).result()
        seen.append(Path(series.save(5, of_ranks(world, 5)).path).name)
        if rank == 0:
            flip_last_bit(Path(folder) / "step-00000009")
        seen.append(series.restore(of_ranks(world, -1)).step)
        if rank == 0:
            (Path(folder) / "step-00000009" / "muonckpt.json").unlink()
        seen.append(Series(folder).latest().step)
    return seen, told.getvalue()


def test_a_rank_that_makes_warnings_errors_leaves_no_other_waiting(tmp_path):
    (first, told), (second, _) = run(2, strict_on_the_first, str(tmp_path))
    assert first == second == ["step-00000003", "step-00000005", 5, 5]
    for warning in (
        "no parameter of this optimizer has a gradient",
        "hyper-parameters are those of the saved run",
        "is of a later step",
        "step-00000009 is not whole: ",
        "its muonckpt.json is missing",
    ):
        assert warning in told, warning


def along(rank, world, folder):
    """Five saves along with training, on all ranks; the third fails, and is only warned of."""
    series = Series(folder, keep_last=2)
    told = []
    for step in range(5):
        live = of_ranks(world, step)
        if step == 2:
            live["local"] = torch.full((3,), float(rank))  # replicas that differ
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saving = series.async_save(step, live, on_error="warn")
        told += [str(each.message) for each in caught if "hold different data" in str(each.message)]
        for value in live.values():
            value.zero_()
    saving.result()
    template = of_ranks(world, -1)
    found = series.restore(template, attest=True)
    assert all(torch.equal(template[key].to_local(), value.to_local()) for key, value in of_ranks(world, 4).items())
    return found.step, len(told)


def test_old_checkpoints_are_removed_along_with_training_too(tmp_path):
    assert run(2, along, str(tmp_path)) == [(4, 1)] * 2
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert all(not muonckpt.verify(tmp_path / name).findings for name in names(tmp_path))


def test_a_step_that_is_still_being_saved(tmp_path):
    """The next save of any kind sees what this one has made."""
    series = Series(tmp_path, keep_last=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        series.async_save(1, state(1))
        saving = series.async_save(1, state(1), replace=True)
        with pytest.raises(DestinationError, match="replace=True"):
            series.async_save(1, state(1))
        series.async_save(2, state(2))
        series.save(2, state(3), replace=True)
    assert saving.path.endswith("step-00000001.2") and names(tmp_path) == ["step-00000001.2", "step-00000002.2"]


def test_a_step_that_is_removed_while_it_is_looked_at_is_no_reason_for_an_older_one(tmp_path, monkeypatch):
    for step in (0, 1):
        Series(tmp_path).save(step, state(step))
    look = step_folder.look_at_step

    def look_late(*arguments):
        monkeypatch.setattr(step_folder, "look_at_step", look)
        Series(tmp_path, keep_last=1, keep_every=2).save(2, state(2))
        return look(*arguments)

    monkeypatch.setattr(step_folder, "look_at_step", look_late)
    assert restored(Series(tmp_path)) == 2 and names(tmp_path) == ["step-00000000", "step-00000002"]


def test_a_removal_that_fails_is_a_warning(tmp_path):
    series = Series(tmp_path, keep_last=1)
    series.save(1, state(1))
    with pytest.MonkeyPatch.context() as patch, pytest.warns(RuntimeWarning, match="training goes on: .*read-only"):
        patch.setattr("shutil.rmtree", unable)
        series.save(2, state(2))
    assert restored(series) == 2 and [name[:15] for name in names(tmp_path)] == [".step-00000001.", "step-00000002"]
    series.save(3, state(3))
    assert names(tmp_path) == ["step-00000003"]


def unable(*arguments: object) -> None:
    raise OSError("read-only file system")


def test_processes_that_are_killed_and_readers_that_race(tmp_path):
    seen = json.loads(printed(tmp_path, killed_saves.__file__, tmp_path))
    held = [
        [code, [re.sub("[0-9a-f]{12}", "*", name) for name in there], latest] for code, there, latest in seen["acts"]
    ]
    assert held == [
        [0, ["step-00000001"], 1],
        [-9, [".step-00000002.*.tmp", "step-00000001"], 1],  # killed in the middle of a save
        [-9, [".step-00000001.*.removing", "step-00000003"], 3],  # and of a removal
        [0, ["step-00000004"], 4],
    ]
    killed, stopped, saved, last = seen["listed"]  # one save is killed, the next one removes its files and is stopped
    assert len(killed) == len(stopped) == 1 and killed != stopped
    assert saved == [*stopped, "out"] and last == ["out"]  # it lives, so the third leaves its files to it
    assert seen["writer"] == 0 and seen["restored"] == sorted(seen["restored"])


# --- object stores ----------------------------------------------------------------------------------------------------


def test_a_series_in_a_store(monkeypatch):
    """There a save that was killed leaves objects under the name, and a removal that was, a mark."""
    url = f"memory://{uuid.uuid4().hex}"
    place, series = location(url), Series(url, keep_last=1)
    files = lambda step: {each.name for each in (place / f"step-{step:08}").below()}  # noqa: E731
    series.save(1, state(1))
    delete = MemoryFileSystem.rm_file

    def cut_off(fs, path):
        if path.endswith(".distcp"):
            raise OSError("no answer")
        delete(fs, path)

    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="training goes on: .*no answer"):
        patch.setattr(MemoryFileSystem, "rm_file", cut_off)
        series.save(2, state(2))
    assert files(1) == {"__0_0.distcp", ".muonckpt.removing"} and restored(Series(url)) == 2

    for name in ("__0_0.distcp", "muonckpt.json"):
        (place / f"step-00000003/{name}").write(place.fs.cat_file(f"{place.path}/step-00000002/{name}"))
    (place / "step-00000003/.muonckpt.saving").write(b"")
    (place / "step-00000005/other").write(b"of another program")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert restored(Series(url)) == 2
        assert series.save(3, state(3)).path.endswith("step-00000003.2") and restored(series) == 3
        assert not files(1) and len(files(3)) == 3  # not a day old: it might still be written
        for each in (place / "step-00000003").below():
            place.fs.store[each.path].modified -= killed_saves.DAY
        series.save(4, state(4))
    assert {each.name for each in place.iterdir()} == {"step-00000004", "step-00000005", "resumes"}


@pytest.mark.parametrize("step", [{"w": torch.ones(2)}, torch.ones(2), "3", 3.0, True, None, -1])
def test_a_step_is_an_integer_and_comes_first(step, tmp_path):
    series = muonckpt.Series(tmp_path / "run")
    for save in (series.save, series.async_save):
        with pytest.raises(ArgumentError, match="a step is an integer, 0 or more; found"):
            save(step, {"w": torch.ones(2)})
    assert not (tmp_path / "run").exists()


def test_processes_that_do_not_know_of_each_other_do_not_restore(tmp_path, monkeypatch):
    series = Series(tmp_path / "run")
    series.save(1, {"w": torch.ones(2)})
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DestinationError, match="init_process_group"):
        series.restore({"w": torch.zeros(2)})


def late(rank: int, world: int, folder: str, which: str) -> str:
    """Save on all ranks, the second one only after the first has said on stderr that it waits."""
    told, stderr = Path(folder, "told"), io.StringIO()
    stderr.flush = lambda: told.touch()  # type: ignore[method-assign]
    series = muonckpt.Series(f"{folder}/run")
    calls = {"Series.save": partial(series.save, 1), "save": lambda values: muonckpt.save(values, f"{folder}/saved")}
    while rank == 1 and not told.exists():
        time.sleep(0.01)
    with patch.object(all_ranks, "LONG_SECONDS", 0.05), redirect_stderr(stderr):
        calls[which]({"w": torch.ones(2)})
    return stderr.getvalue()


@pytest.mark.parametrize("which", ["Series.save", "save"])
def test_a_rank_that_waits_for_the_others_says_so(which, tmp_path):
    first, _ = run(2, late, str(tmp_path), which)
    assert first.startswith("muonckpt: rank 0 has waited 0.05 s in ") and f" in {which} for other ranks" in first
