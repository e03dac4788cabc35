"""Commands on the folder of a run: which steps it has, which is to be resumed from, and what changed."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import time
import warnings
from pathlib import Path

import pytest
import torch
from support.commands import called
from support.damages import flip_last_bit
from support.golden import golden

import muonckpt
from muonckpt import Series, SourceError
from muonckpt.names.errors import UnavailableError
from muonckpt.store.verify.diagnosis import moving


def printed(code: int, *arguments: object) -> str:
    done = called(*arguments)
    assert done.returncode == code, done.stderr
    return done.stdout


def test_inspect_prints_a_table_of_steps_that_fits_80_columns(run):
    (run / "step-00000003" / "__0_0.distcp").unlink()
    lines = printed(1, "inspect", run).splitlines()
    table = lines[2:6]
    assert [line.split()[:2] for line in table] == [
        ["step", "state"],
        ["step-00000003", "faulty"],
        ["step-00000002", "whole"],
        ["step-00000001", "whole"],
    ]
    assert max(map(len, table)) <= 80
    assert "newest whole  step-00000002, not verified yet" in lines


def test_inspect_prints_the_same_as_json(run):
    found = json.loads(printed(0, "inspect", run, "--json"))
    assert found["newest_whole"] == "step-00000003"
    assert [step["state"] for step in found["steps"]] == ["whole"] * 3
    assert [change["moved"]["weights"]["changed"] for change in found["changes"]] == [0, 0]


def test_a_view_of_a_run_is_that_of_its_newest_whole_step(run):
    (run / "step-00000003" / "__0_0.distcp").unlink()
    done = called("inspect", run, "--groups")
    assert done.stdout == printed(0, "inspect", run / "step-00000002", "--groups")
    assert "the newest whole: step-00000002" in done.stderr
    assert "note: step-00000003 is newer and passed over: it is faulty: rank 0's file " in done.stderr


def test_no_step_is_taken_for_the_newest_whole_one_while_a_newer_one_cannot_be_read(run, monkeypatch):
    opened, newest = os.open, run / "step-00000003"

    def refused(path: object, *arguments: int, **options: int) -> int:
        if str(path).startswith(f"{newest}/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refused)
    shown = printed(3, "inspect", run)
    assert "newest whole  unknown, as step-00000003 cannot be read" in shown and "Permission denied" in shown
    assert json.loads(printed(3, "inspect", run, "--json"))["newest_whole"] is None
    for command in (("inspect", run, "--groups"), ("diff", run), ("stats", run), ("convert", run, run / "out")):
        done = called(*command)
        assert done.returncode == 3 and "step-00000003 cannot be read: " in done.stderr and not done.stdout
    assert "newest whole  unknown" in printed(3, "verify", run)


def test_inspect_of_a_checkpoint_says_when_it_was_verified(run):
    step = run / "step-00000003"
    assert "verified      never" in printed(0, "inspect", step)
    printed(0, "verify", step)
    assert " UTC, whole" in printed(0, "inspect", step)
    flip_last_bit(step)
    assert "verified      never since last written" in printed(0, "inspect", step)
    printed(1, "verify", step)
    shown = printed(1, "inspect", step)
    assert shown.count("has damaged bytes") == 1 and " UTC, faulty; checksums: " in shown


def test_verify_finds_the_newest_step_that_is_whole(run):
    assert printed(0, "verify", run).splitlines()[-1] == "newest whole  step-00000003, verified"
    flip_last_bit(run / "step-00000003")
    lines = printed(1, "verify", run).splitlines()
    assert lines[0].startswith("step-00000003: faulty: ")
    assert lines[1].startswith("step-00000002: whole, ")
    assert lines[2] == "newest whole  step-00000002, verified"
    assert lines[3] == "next: start the job again (it resumes from step-00000002, verified)"
    assert lines[3] in printed(1, "inspect", run).splitlines()
    assert "(a) start the job again\n    it resumes from step-00000002, verified" in printed(
        1, "verify", run / "step-00000003"
    )
    with pytest.warns(RuntimeWarning, match="step-00000003 is not whole: .* A later save may remove it"):
        assert Series(run).latest().step == 2


def test_what_keeps_the_newest_step_comes_before_the_one_before(run):
    newest = run / "step-00000003"
    (newest / "__0_0.distcp").rename(newest / "__1_0.distcp")
    cure = f"mv {newest / '__1_0.distcp'} {newest / '__0_0.distcp'}"
    for command in ("verify", "inspect"):
        lines = [line for line in printed(1, command, run).splitlines() if line.startswith(("next: ", "or: "))]
        assert lines == [f"next: {cure} (gives every file its name back; then verify it)"]
    assert f"(a) {cure}" in printed(1, "verify", newest)


@pytest.mark.parametrize("lost", ["all files", "both descriptions"])
def test_a_step_without_descriptions_is_the_same_damage_to_all(lost, run):
    newest = run / "step-00000003"
    for file in newest.iterdir():
        if lost == "all files" or file.name in (".metadata", "muonckpt.json"):
            file.unlink()
    shown = printed(1, "verify", newest)
    found = shown.splitlines()[0].partition(f"{newest}: ")[2].rstrip(".")
    assert "(a) start the job again" in shown
    assert f"{newest}: nothing of it could be read: 1 finding" in shown.splitlines()
    assert "start the job again (it resumes from step-00000002, verified)" in printed(1, "verify", run)
    assert found.startswith("it cannot be opened: expected ")
    assert f"{newest.name}: faulty, not verified: {found}" in printed(1, "verify", run)
    assert f"{newest.name}: {found}" in printed(1, "inspect", run)
    with pytest.warns(RuntimeWarning, match=f"{newest} is not whole: .*; {run / 'step-00000002'} is the newest"):
        assert Series(run).latest().step == 2


def test_a_step_that_was_written_again_needs_nothing_more(run):
    newest, again = run / "step-00000003", run / "step-00000003.2"
    (newest / ".metadata").unlink()
    [command] = re.findall(r"^\(a\) muonckpt (.*)$", printed(1, "verify", newest), re.MULTILINE)
    printed(0, *shlex.split(command))
    printed(0, "verify", run)
    assert Series(run).latest().path == str(again)
    for damage in (lambda: None, lambda: flip_last_bit(newest)):  # lost files of it change nothing
        damage()
        assert f"(a) muonckpt verify {again}\n    reads all of {again.name}, the same" in printed(1, "verify", newest)
    shown = printed(0, "inspect", run)
    assert f"; {again.name} replaces it" in shown and "next: " not in shown
    assert "What to do" not in printed(0, "report", run, "-o", run.parent / "run.html")


def test_a_step_that_is_gone_is_missed_where_a_resume_was_recorded(run):
    newest, template = run / "step-00000003", {"w": torch.zeros(4)}
    for step in run.iterdir():
        shutil.rmtree(step)
    for step in (1, 3):
        Series(run).save(step, template)
    Series(run).restore(template)
    assert "missing" not in printed(0, "inspect", run)
    newest.rename(run.parent / "elsewhere")
    for command in ("inspect", "verify"):
        missing = (
            r"^missing +step 3, from which the run was resumed 2.* UTC; no copy of it is here, so look elsewhere first$"
        )
        shown = printed(1, command, run)
        assert (
            re.search(missing, shown, re.MULTILINE)
            and "next: start the job again (it resumes from step-00000001" in shown
        )
    page = muonckpt.report_run(run, stats="none")
    assert "missing: step 3, from which" in page.diagnosis.sentence and printed(
        1, "report", run, "-o", run.parent / "page.html"
    )
    with pytest.warns(RuntimeWarning, match=f"{run} lacks step 3, from which the run was resumed"):
        assert Series(run).restore(template).step == 1


@pytest.mark.parametrize("name", ["best", "step-00000003.bak", "step-00000003.tmp", "step-3"])
def test_a_step_that_lies_there_under_another_name_gets_its_name_back(name, run):
    """Nothing of it is lost, and all name the same command."""
    newest = run / "step-00000003"
    newest.rename(run / name)
    cure = f"mv {run / name} {newest}"
    for command in (["inspect", run], ["verify", run], ["report", run, "-o", run.parent / "page.html"]):
        shown = printed(1, *command)
        assert f"step 3, which is called {name}" in shown and cure in shown and f"{name}: " not in shown
    with pytest.warns(
        RuntimeWarning, match=f"{run} lacks step 3, which is called {name}. To take that, stop and {cure}"
    ):
        assert Series(run).latest().step == 2
    Path(run / name).rename(newest)
    assert "missing" not in printed(0, "inspect", run) and Series(run).latest().step == 3


def test_a_step_with_the_name_of_another_one_gets_its_own_back(run):
    newest, named = run / "step-00000003", run / "step-00000900"
    shutil.rmtree(newest)
    Series(run).save(3, {"w": torch.full((4,), 3.0)})
    newest.rename(named)
    cure = f"mv {named} {newest}"
    for command in (["inspect", run], ["verify", run], ["verify", named], ["inspect", named]):
        assert cure in printed(1, *command)
    assert "is step-00000900" in printed(1, "report", named, "-o", run.parent / "page.html", "--stats", "none")
    # A step that has that name already stays.
    shutil.copytree(run / "step-00000002", newest)
    assert f"mv {named} {newest}.2" in printed(1, "verify", named)
    shutil.rmtree(newest)
    source, target = shlex.split(cure)[1:]
    Path(source).rename(target)
    state = {"w": torch.zeros(4)}
    assert (
        printed(0, "verify", run)
        and Series(run).restore(state).step == 3
        and torch.equal(state["w"], torch.full((4,), 3.0))
    )


def test_a_step_that_gets_its_name_back_is_not_the_newest_where_a_later_one_lies(run):
    newest, named = run / "step-00000003", run / "step-00000900"
    shutil.rmtree(newest)
    for step in (3, 901):
        Series(run, keep_last=9).save(step, {"w": torch.full((4,), float(step))})
    newest.rename(named)
    cure = (
        f"mv {named} {newest} (it is step 3 again; a resume begins with the newest names, and step-00000901 is newer)"
    )
    assert f"next: {cure}" in printed(1, "verify", run)
    named.rename(newest)
    assert Series(run).restore({"w": torch.zeros(4)}).step == 901


def test_a_step_without_its_name_and_a_description_gets_both_back(run):
    newest, named = run / "step-00000003", run / "step-00000900"
    shutil.rmtree(newest)
    Series(run).save(3, {"w": torch.full((4,), 3.0)})
    newest.rename(named)
    (named / ".metadata").unlink()
    shown = printed(1, "verify", run)
    assert "its .metadata is missing" in shown and "saved as step 3, and its name is step-00000900" in shown
    assert f"next: mv {named} {newest} (" in shown and "reshard" not in shown
    named.rename(newest)
    cure = f"muonckpt reshard {newest} {newest}.2 --mesh dp=1"
    assert f"next: {cure} (" in printed(1, "verify", run)
    printed(0, *shlex.split(cure)[1:])
    assert f"newest whole  {newest.name}.2, verified" in printed(0, "verify", run)
    assert Series(run).restore({"w": torch.zeros(4)}).path == f"{newest}.2"


def test_a_file_with_the_name_of_a_step_is_damage_to_all(run):
    newest = run / "step-00000003"
    shutil.rmtree(newest)
    newest.write_text("not a checkpoint")
    fault = "it is a file, expected the folder of a checkpoint"
    for command in (["inspect", run], ["verify", run], ["verify", newest]):
        shown = printed(1, *command)
        assert fault in shown and "start the job again" in shown and "safetensors" not in shown
    with pytest.warns(RuntimeWarning, match=f"{newest} is not whole: {fault}"):
        assert Series(run).latest().step == 2


def test_a_copy_of_a_lost_step_takes_its_place(run):
    shutil.rmtree(run / "step-00000003")
    for step in (3, 4):
        Series(run, keep_last=9).save(step, {"w": torch.full((4,), float(step))})
    shutil.copytree(run / "step-00000003", run / "best")
    assert "best" not in printed(0, "inspect", run)
    for step in (3, 4):
        (run / f"step-0000000{step}" / "__0_0.distcp").unlink()
    cure = f"mv {run / 'best'} {run / 'step-00000003.2'}"
    for command in ("inspect", "verify"):
        assert f"next: {cure} (" in printed(1, command, run)
    (run / "best").rename(run / "step-00000003.2")
    state = {"w": torch.zeros(4)}
    with pytest.warns(RuntimeWarning, match="step-00000004 is not whole"):
        assert Series(run).restore(state).step == 3
    assert torch.equal(state["w"], torch.full((4,), 3.0))


def test_a_checkpoint_that_a_run_began_from_is_no_step_of_it(run):
    """Though it was saved as a later step; nor is a copy that is damaged."""
    Series(run.parent / "other").save(900, {"w": torch.zeros(4)})
    for name, seconds in (("begun-from", -1e6), ("damaged", 1e6)):
        begun = Path(shutil.copytree(run.parent / "other" / "step-00000900", run / name))
        for file in begun.iterdir():
            os.utime(file, (time.time() + seconds,) * 2)
    (run / "damaged" / "__0_0.distcp").unlink()
    for command in ("inspect", "verify"):
        assert "missing" not in printed(0, command, run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Series(run).latest().step == 3
    shutil.copytree(run / "begun-from", run.parent / "new" / "begun-from")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Series(run.parent / "new").latest() is None, "it has no step yet"


def test_a_fault_of_several_steps_is_printed_once(run):
    for step in (1, 2, 3):
        (run / f"step-0000000{step}" / "__0_0.distcp").unlink()
    lines = printed(1, "verify", run).splitlines()
    assert lines[0].startswith("step-00000003: faulty, not verified: rank 0's file __0_0.distcp is missing")
    assert lines[1:3] == [f"step-0000000{step}: faulty, not verified: as step-00000003" for step in (2, 1)]


def test_a_damaged_step_that_is_not_read_counts_as_much_as_in_inspect(run):
    (run / "step-00000001" / "__0_0.distcp").unlink()
    shown, verified = printed(1, "inspect", run).splitlines(), printed(1, "verify", run).splitlines()
    [fault] = [line for line in shown if line.startswith("faulty ")]
    assert fault in verified and "newest whole  step-00000003, verified" in verified


def test_a_loop_of_links_is_called_one(run):
    (run / "step-00000004").symlink_to("step-00000005")
    (run / "step-00000005").symlink_to("step-00000004")
    shown = printed(3, "verify", run)
    assert f"cannot read {run / 'step-00000005'}: Too many levels of symbolic links: links lead in a circle" in shown
    for command in ("inspect", "verify"):
        done = called(command, run / "step-00000005")
        assert done.returncode == 3 and "To go on from step-00000003 instead: mkdir -p " in done.stderr
    (run / "step-00000005").unlink()
    assert "step-00000004: a link to step-00000005, which is not there" in printed(3, "verify", run)
    (run / "step-00000004").unlink()
    assert printed(0, "verify", run).splitlines()[-1] == "newest whole  step-00000003, verified"


def test_both_commands_show_the_newest_step_first(run):
    flip_last_bit(run / "step-00000003"), flip_last_bit(run / "step-00000002")
    verified, shown = printed(1, "verify", run), printed(1, "inspect", run)
    for output in (verified, shown):
        assert re.findall(r"^(step-\d+)", output, re.MULTILINE) == [f"step-{step:08}" for step in (3, 2, 1)]


def test_a_report_without_a_file_says_which_command_to_write(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = called("report", run)
    assert done.returncode == 2
    line = done.stderr.partition("expected the page to write. Write muonckpt ")[2]
    assert called(*shlex.split(line)).returncode == 0 and Path(f"{run.name}.html").exists()


def lose_metadata(step: Path) -> None:
    (step / ".metadata").unlink()


def cut_metadata(step: Path) -> None:
    os.truncate(step / ".metadata", 100)


def record_as_not_finite(step: Path) -> None:
    shutil.rmtree(step)
    Series(step.parent, keep_last=9).save(3, {"w": torch.full((4,), math.nan)})
    printed(1, "verify", step)


def test_advice_passes_over_a_step_that_cannot_be_read_and_is_followed_to_an_older_one(tmp_path):
    for step in (1, 2, 3):
        Series(tmp_path, keep_last=9).save(step, {"w": torch.full((4,), float(step))})
    os.truncate(tmp_path / "step-00000003" / "__0_0.distcp", 100)
    shutil.rmtree(tmp_path / "step-00000002")
    (tmp_path / "step-00000002").symlink_to("step-00000002")
    shown = printed(1, "verify", tmp_path / "step-00000003")
    assert f"(a) {moving(tmp_path, ['step-00000002'])}\n    then start the job again: it" in shown
    assert "fresh" not in shown
    state = {"w": torch.zeros(4)}
    with pytest.raises(UnavailableError) as caught:
        Series(tmp_path).restore(state)
    _, cure = str(caught.value).split("To go on from step-00000001 instead: ")
    subprocess.run(cure, shell=True, check=True)
    with pytest.warns(RuntimeWarning, match="step-00000003 is not whole"):
        assert Series(tmp_path).restore(state).step == 1
    assert torch.equal(state["w"], torch.ones(4))


@pytest.mark.parametrize("harm", [lose_metadata, cut_metadata, record_as_not_finite])
def test_all_name_one_step_as_the_newest_whole_where_nothing_of_a_harmed_one_is_lost(harm, tmp_path):
    run, newest = tmp_path, tmp_path / "step-00000003"
    for step in (1, 2, 3):
        Series(run).save(step, {"w": torch.full((4,), float(step))})
    harm(newest)
    for options in ([], ["--all"]):
        lines = printed(1, "verify", run, *options).splitlines()
        [fault] = [line.partition(": faulty: ")[2] for line in lines if line.startswith(f"{newest.name}: ")]
        assert fault and f"newest usable {newest.name}, which has lost nothing" in lines
        assert json.loads(printed(1, "verify", run, *options, "--json"))["newest_whole"] == newest.name
    shown = printed(1, "inspect", run)
    assert f"newest usable {newest.name}, which has lost nothing\n" in shown and shown.count(fault) == 1
    assert f"the newest whole: {newest.name}" in called("inspect", run, "--groups").stderr
    with pytest.warns(RuntimeWarning, match="is taken, as nothing of it is lost, but: "):
        assert Series(run).restore({"w": torch.zeros(4)}).step == 3


def test_a_step_that_cannot_be_read_although_its_files_are_there_is_an_alarm(run):
    def fail(count: int, total: int) -> None:
        raise SourceError("input/output error")

    verdicts = [*muonckpt.verify_run(run, progress=fail)]
    assert len(verdicts) == 3 and all(verdict.is_damaged and not verdict.is_whole for verdict in verdicts)
    shutil.rmtree(run / "step-00000001")
    [*_, gone] = muonckpt.verify_run(
        run, progress=lambda count, total: shutil.rmtree(run, ignore_errors=True) or fail(0, 0)
    )
    assert not gone.is_damaged and "removed while it was read" in gone.sentence


def test_verify_says_the_same_of_a_run_however_often_it_is_asked(run):
    flip_last_bit(run / "step-00000003")
    first = printed(1, "verify", run)
    assert "step-00000003: faulty: " in first and printed(1, "verify", run) == first
    (run / "step-00000003" / "__0_0.distcp").unlink()
    lines = printed(1, "verify", run).splitlines()
    assert lines[0].startswith("step-00000003: faulty, not verified: rank 0's file __0_0.distcp is missing: ")
    assert lines[-2] == "newest whole  step-00000002, verified"


def test_what_verify_has_found_is_what_inspect_diff_and_fits_say(run):
    newer, older = run / "step-00000003", run / "step-00000002"
    before = (newer / "__0_0.distcp").read_bytes()
    flip_last_bit(newer)
    assert "nothing was read" in printed(0, "diff", newer, older)  # nobody knows yet
    found = printed(1, "verify", newer).splitlines()[0].partition(f"{newer}: ")[2].rstrip(".")
    for command in (["inspect", newer], ["inspect", newer, "--fits", "dp=2"]):
        said = called(*command).stdout
        assert called(*command).returncode == 1 and found in said and "it resumes from step-00000002" in said
    for pair in ((newer, older), (older, newer)):
        done = called("diff", *pair)
        assert (done.returncode, done.stdout) == (3, "") and found in done.stderr
    (newer / "__0_0.distcp").write_bytes(before)  # as a copy of the file is put in its place
    assert "nothing was read" in printed(0, "diff", newer, older)
    printed(0, "inspect", newer)


def test_a_line_of_a_run_names_the_roles_of_what_is_lost_as_those_of_a_checkpoint_do(tmp_path):
    step = Path(shutil.copytree(golden("titan_fsdp4/ckpt"), tmp_path / "step-10"))
    os.truncate(step / "__1_0.distcp", (step / "__1_0.distcp").stat().st_size // 2)
    lost = re.search(r"rank 1's file .*? have lost elements ", printed(1, "verify", step).splitlines()[0])[0]
    assert re.search("[0-9]+ of 13 weights, .* of 8 moments", lost)
    for command in ("inspect", "verify"):
        assert lost in called(command, tmp_path).stdout


def test_verify_all_gives_a_verdict_of_each_and_fails_if_any_is_damaged(run):
    assert printed(0, "verify", run, "--all", "--scrub", "1GiB/s").count(": whole, ") == 3
    flip_last_bit(run / "step-00000001")
    found = json.loads(printed(1, "verify", run, "--all", "--json"))
    assert {step["name"]: step["verdict"] for step in found["steps"]} == {
        "step-00000001": "faulty",
        "step-00000002": "whole",
        "step-00000003": "whole",
    }
    assert found["newest_whole"] == "step-00000003"


def test_a_save_that_goes_on_is_no_damage(run, tmp_path):
    """One of ours has another name until it is whole; other programs save in place."""
    (run / ".step-00000004.0123456789ab.tmp").mkdir()
    for command in (["verify", run, "--all"], ["inspect", run]):
        shown = printed(0, *command)
        assert shown.count("step-00000004") == 1
        assert "unpublished   .step-00000004.0123456789ab.tmp: a save that goes on, or was stopped" in shown
    shown = called("report", run, "-o", run.with_suffix(".html")).stdout
    assert "unpublished: .step-00000004.0123456789ab.tmp: a save that" in shown and "nothing odd" not in shown
    for step in (1, 2):
        shutil.copytree(run / f"step-0000000{step}", tmp_path / "other" / f"checkpoint-{step}")
    for description in ("muonckpt.json", ".metadata"):
        (tmp_path / "other" / "checkpoint-2" / description).unlink()
    lines = printed(0, "verify", tmp_path / "other").splitlines()
    assert any(line.startswith("checkpoint-2: incomplete, not verified") for line in lines)
    printed(0, "inspect", tmp_path / "other")


def test_a_step_of_ours_without_descriptions_is_damaged(run):
    for description in ("muonckpt.json", ".metadata"):
        (run / "step-00000003" / description).unlink()
    for command in (("verify", run), ("verify", run, "--all"), ("inspect", run), ("verify", run / "step-00000003")):
        assert ".metadata" in printed(1, *command)


def test_mistakes_about_runs_are_answered(run, tiny_checkpoint, tmp_path):
    assert "is for the folder of a run" in called("verify", tiny_checkpoint, "--all").stderr
    assert "expected a second checkpoint" in called("diff", tiny_checkpoint).stderr
    assert "write for example 50MiB/s" in called("verify", run, "--scrub", "fast").stderr
    for step in run.iterdir():
        (step / "__0_0.distcp").unlink()
    done = called("inspect", run, "--tree")
    assert done.returncode == 3
    assert "expected 1 whole step" in done.stderr and len(done.stderr.split()) <= 62  # "muonckpt:" and the duration


def test_diff_exits_with_3_where_a_file_is_lost_whatever_the_fingerprints_say(run):
    newer, older = run / "step-00000003", run / "step-00000002"
    assert "nothing was read" in printed(0, "diff", newer, older)
    (older / "__0_0.distcp").unlink()
    for pair in ((newer, older), (older, newer)):
        done = called("diff", *pair)
        assert (done.returncode, done.stdout) == (3, "")
        assert f"{older}: rank 0's file __0_0.distcp is missing" in done.stderr


def test_diff_and_stats_take_the_newest_whole_steps_and_report_all(run, tmp_path):
    (run / "step-00000003" / "__0_0.distcp").unlink()
    assert "step-00000001 and " in printed(0, "diff", run)
    found = json.loads(printed(0, "stats", run, "--no-spectra", "--json"))
    assert Path(found["checkpoint"]).name == "step-00000002"
    assert Path(found["since"]).name == "step-00000001"
    reported = printed(1, "report", run, "-o", tmp_path / "page.html", "--stats", "none")
    assert "1 of 3 steps not whole: step-00000003 (faulty)" in reported


def test_a_run_is_planned_and_rewritten_as_its_newest_whole_step_and_sizes_agree(run, tmp_path):
    (run / "step-00000003" / "__0_0.distcp").unlink()
    newest = run / "step-00000002"
    said = f"the newest whole: {newest.name}"
    done = called("reshard", run, tmp_path / "new", "--mesh", "dp=3")
    assert done.returncode == 0 and said in done.stderr
    done_plan, plan = (
        called("lab", "plan", "--ckpt", run, "--mesh", "dp=2"),
        printed(0, "lab", "plan", "--ckpt", newest, "--mesh", "dp=2"),
    )
    assert (done_plan.stdout, "padding: " in plan) == (plan, False) and said in done_plan.stderr
    # Bytes of tensors are the same wherever they are printed; those of files are called so.
    tensors = re.search(r"new: (.* tensors, .*?), over 3 ranks \(.* of files\)", done.stdout)[1].split(", ")[1]
    assert f", {tensors}; " in printed(0, "inspect", newest) and f", {tensors}: whole" in printed(0, "verify", newest)
    assert f", {tensors}: whole" in printed(0, "verify", tmp_path / "new")
