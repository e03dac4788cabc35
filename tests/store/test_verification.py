"""The record of when checkpoints were last verified: whose word holds, for which files, and who may write it."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
import uuid
from pathlib import Path

import pytest
from support.damages import flip_last_bit

import muonckpt
from muonckpt import SourceError
from muonckpt.names.version import VERSION
from muonckpt.runs.run_audit import verdicts_of, verify_recorded, verify_run
from muonckpt.runs.step_folder import StepFolder
from muonckpt.store.io.location import entries_of, location
from muonckpt.store.io.publish import MARK
from muonckpt.store.io.regular import Pace
from muonckpt.store.verify.audit import verify
from muonckpt.store.verify.run import last_verification, run_of
from muonckpt.store.verify.step_names import StepName
from muonckpt.store.verify.verification import (
    RECORD,
    Verification,
    look_at_files,
    read_verification,
    record_verification,
)


def recorded(folder) -> list[str]:
    """The names of the checkpoints in a folder that have been verified."""
    return sorted(entry.name for entry in entries_of(folder) if read_verification(entry) is not None)


def test_what_was_verified_is_known_until_its_files_change(run):
    step = run / "step-00000003"
    assert last_verification(step) is None
    report, _, note = verify_recorded(step, verify)
    assert (report.verdict, note) == ("whole", "")
    assert last_verification(step).verdict == "whole"
    assert muonckpt.inspect(step).verified == last_verification(step)
    flip_last_bit(step)
    assert last_verification(step) is None


def test_a_change_in_place_is_noticed_though_the_time_of_writing_was_put_back(run):
    """As `rsync --inplace --times`, ``cp -p`` into the file, and a restored backup do."""
    step = run / "step-00000003"
    assert [v.is_whole for v in verify_run(run)] == [True]
    file = step / "__0_0.distcp"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    flip_last_bit(step)
    os.utime(file, ns=times)
    assert file.stat().st_mtime_ns == times[1]
    assert last_verification(step) is None and run_of(run).steps[-1].verified is None
    assert [v.is_whole for v in verify_run(run)] == [False, True]


def test_a_run_is_verified_where_it_was_when_the_program_goes_to_another_folder(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    verdicts = verify_run(run.name, every=True)
    first = next(verdicts)
    monkeypatch.chdir("/")
    assert [verdict.is_whole for verdict in (first, *verdicts)] == [True] * 3
    assert [step.verified is not None for step in run_of(run).steps] == [True] * 3


def test_a_copy_does_not_inherit_it(run, tmp_path):
    """Not even one that keeps all times: nobody has compared the bytes that the copy has."""
    verify_recorded(run / "step-00000003", verify)
    shutil.copytree(run, tmp_path / "copy")
    assert (tmp_path / "copy" / RECORD).exists()
    assert last_verification(tmp_path / "copy" / "step-00000003") is None
    run.rename(tmp_path / "moved")
    assert last_verification(tmp_path / "moved" / "step-00000003") is not None


def test_a_step_that_was_found_damaged_counts_as_damaged(run):
    flip_last_bit(run / "step-00000003")
    assert run_of(run).newest_whole.name == "step-00000003"
    assert [(v.step.name, v.is_whole) for v in verify_run(run)] == [("step-00000003", False), ("step-00000002", True)]
    after = run_of(run)
    assert after.newest_whole.name == "step-00000002"
    assert "damaged bytes" in after.steps[2].fault
    assert [(v.step.name, v.is_whole) for v in verify_run(run)] == [("step-00000003", False), ("step-00000002", True)]


def test_all_are_verified_those_longest_ago_last_verified_first(run):
    (run / "step-00000004").mkdir()
    verify_recorded(run / "step-00000002", verify)
    verdicts = list(verify_run(run, every=True))
    assert [v.step.step for v in verdicts] == [4, 3, 1, 2]
    assert [v.is_damaged for v in verdicts] == [True, False, False, False]
    assert recorded(run) == [f"step-{step:08}" for step in (1, 2, 3, 4)]


def test_what_was_read_before_an_interruption_is_recorded(run):
    def audited(place):
        if place.name == "step-00000002":
            raise KeyboardInterrupt
        return verify(place)

    with pytest.raises(KeyboardInterrupt):
        list(verdicts_of(run_of(run), audited, every=True))
    assert recorded(run) == ["step-00000003"]


def test_a_checkpoint_that_changes_while_it_is_read_is_not_recorded(run):
    step = run / "step-00000003"

    def audited(place):
        report = verify(place)
        flip_last_bit(step)
        return report

    _, _, note = verify_recorded(step, audited)
    assert "changed while they were verified" in note
    assert last_verification(step) is None


def test_checkpoints_that_are_gone_leave_the_record(run):
    list(verify_run(run, every=True))
    shutil.rmtree(run / "step-00000001")
    verify_recorded(run / "step-00000003", verify)
    assert recorded(run) == ["step-00000002", "step-00000003"]


def test_a_draft_of_a_process_that_was_killed_leaves_the_record(run):
    (run / RECORD).mkdir()
    (run / RECORD / f".step-00000009.{uuid.uuid4().hex}").write_text("{")
    assert verify_recorded(run / "step-00000003", verify)[2] == ""
    assert [entry.name for entry in (run / RECORD).iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", '{"timestamp": []}'])
def test_a_record_that_others_spoilt_counts_as_none_and_is_replaced(text, run):
    (run / RECORD).mkdir()
    (run / RECORD / "step-00000003").write_text(text)
    step = run / "step-00000003"
    assert last_verification(step) is None
    assert verify_recorded(step, verify)[2] == ""
    assert last_verification(step).verdict == "whole"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_a_note(run):
    run.chmod(0o555)
    try:
        report, _, note = verify_recorded(run / "step-00000003", verify)
    finally:
        run.chmod(0o755)
    assert report.verdict == "whole"
    assert "cannot be recorded" in note


def test_a_record_that_cannot_be_replaced_is_a_note(run):
    (run / RECORD / "step-00000003" / "in the way").mkdir(parents=True)
    report, _, note = verify_recorded(run / "step-00000003", verify)
    assert report.verdict == "whole"
    assert "cannot be recorded" in note
    assert [entry.name for entry in (run / RECORD).iterdir()] == ["step-00000003"]


def test_a_record_that_is_a_link_is_a_note(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (run / RECORD).symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in verify_recorded(run / "step-00000003", verify)[2]
    assert not [*(tmp_path / "elsewhere").iterdir()]


def whole_entry(place: Path) -> Verification:
    return Verification(time.time(), "whole", "", False, VERSION, look_at_files(place).digest)


def _record_each(run: str, names: list[str]) -> None:
    for name in names:
        place = Path(run) / name
        assert record_verification(place, whole_entry(place)) == ""


def test_of_what_several_processes_record_at_once_nothing_is_lost(tmp_path):
    names = [f"step-{step:08}" for step in range(40)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_record_each, args=(str(tmp_path), names[part::4])) for part in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0, 0]
    assert recorded(tmp_path) == names
    assert sorted(entry.name for entry in (tmp_path / RECORD).iterdir()) == names


def test_a_store_keeps_an_object_for_each_checkpoint(run):
    place = location(f"memory://{uuid.uuid4().hex}/run")
    place.fs.put(str(run), place.path, recursive=True)
    verdicts = list(verify_run(place, every=True))
    assert [(v.is_whole, v.note) for v in verdicts] == [(True, "")] * 3
    assert recorded(place) == ["step-00000001", "step-00000002", "step-00000003"]
    assert last_verification(place / "step-00000003").verdict == "whole"
    assert muonckpt.inspect(place / "step-00000003").verified is not None
    assert [step.verified is not None for step in run_of(place).steps] == [True] * 3


def test_a_step_of_a_store_whose_removal_has_begun_is_being_removed(run):
    place = location(f"memory://{uuid.uuid4().hex}/run")
    place.fs.put(str(run), place.path, recursive=True)
    (place / "step-00000003" / MARK).write(b"")
    for look in (muonckpt.verify, muonckpt.inspect):
        with pytest.raises(SourceError, match="step-00000003 is being removed"):
            look(place / "step-00000003")


def test_a_series_leaves_the_record_alone(run):
    list(verify_run(run, every=True))
    folder = StepFolder(run)
    assert folder.newest(())[0].name == StepName(3)
    folder.prune(StepName(3), 1, None, lambda name: True)
    folder.clean()
    record_verification(run / "step-00000003", whole_entry(run / "step-00000003"))
    assert sorted(entry.name for entry in run.iterdir()) == [RECORD, "step-00000003"]


class Clock:
    """A clock that only sleeping advances."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_a_pace_lets_reads_begin_when_the_earlier_ones_have_had_their_time():
    clock = Clock()
    pace = Pace(100, lambda: clock.now, clock.sleep)
    for count in (50, 100, 10):
        pace(count)
    assert clock.slept == [0.5, 1.0]
    clock.now += 10  # an idle time is not made up for
    pace(10)
    pace(10)
    assert clock.slept == [0.5, 1.0, pytest.approx(0.1)]


def test_every_byte_that_a_verification_reads_goes_through_the_pace(run):
    clock, counts = Clock(), []

    class Counting(Pace):
        def __call__(self, count: int) -> None:
            counts.append(count)
            super().__call__(count)

    step = run / "step-00000003"
    report = verify(step, jobs=1, pace=Counting(1000, lambda: clock.now, clock.sleep))
    assert report.verdict == "whole"
    assert sum(counts) >= report.payload_bytes
    assert max(counts) <= 1 << 20
    assert clock.now == pytest.approx((sum(counts) - counts[-1]) / 1000)
