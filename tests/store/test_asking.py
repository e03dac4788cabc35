"""A question to a file system or a store has three answers, and the third is an error: never damage, never recorded."""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from support.commands import called

import muonckpt
from muonckpt import Series, SourceError, UnavailableError
from muonckpt.names.errors import DiskError
from muonckpt.runs.run_audit import verify_recorded
from muonckpt.store.io import publish
from muonckpt.store.io.location import entries_of, is_folder, is_link, is_there, kind_of, location
from muonckpt.store.io.regular import open_regular
from muonckpt.store.verify.diagnosis import moving
from muonckpt.store.verify.verification import RECORD, read_verification

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NEWEST = "step-00000002"


def state(step: int) -> dict[str, object]:
    return {"model": {f"w{number}": torch.full((40, 8), float(step)) for number in range(3)}, "step": step}


def saved(run: object) -> str:
    for step in (1, 2):
        Series(str(run)).save(step, state(step))
    return str(run)


def failure_of_web(status: int) -> Exception:
    failure = RuntimeError(f"status {status}")
    failure.status = status
    return failure


def raising(failure: Exception) -> Callable:
    def call(*arguments: object, **options: object) -> None:
        raise failure

    return call


def test_what_is_there_is_told_from_what_is_not(tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name, target in (("link", "file"), ("dangling", "nothing"), ("loop", "loop")):
        (tmp_path / name).symlink_to(target)
    kinds = {entry.name: kind_of(entry) for entry in entries_of(tmp_path) if entry.name != "loop"}
    assert kinds == {"file": "file", "pipe": "other", "link": "file", "dangling": None}
    assert all(map(is_there, entries_of(tmp_path))) and is_link(tmp_path / "loop") and is_folder(tmp_path)
    for nothing in ("nothing", "file/below", "a\0b"):
        assert kind_of(tmp_path / nothing) is None and not is_there(tmp_path / nothing)
    with pytest.raises(FileNotFoundError):
        entries_of(tmp_path / "nothing")
    for question in (kind_of, is_folder, entries_of, open_regular):
        with pytest.raises(UnavailableError, match="Too many levels of symbolic links"):
            question(tmp_path / "loop")


@pytest.mark.parametrize("command", ["verify", "inspect", "stats", "report -o PAGE", "convert NEW --format zarr"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("loop", "Too many levels of symbolic links"),
        ("loop/step-00000002", "Too many levels of symbolic links"),
        ("x" * 300, "File name too long"),
        ("file/step-00000002", "found no directory"),
    ],
)
def test_a_path_that_leads_nowhere_cannot_be_read(command, name, reason, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    verb, *options = command.replace("PAGE", str(tmp_path / "page.html")).split()
    done = called(verb, tmp_path / name, *(tmp_path / "new" if option == "NEW" else option for option in options))
    assert done.returncode == 3 and reason in done.stderr, done.stderr
    if name.startswith("loop"):
        with pytest.raises(UnavailableError, match=reason):
            Series(tmp_path / name).restore(state(0))


def test_a_step_behind_a_link_is_one_for_all_and_is_left_alone(tmp_path):
    run = saved(tmp_path / "run")
    shutil.move(f"{run}/{NEWEST}", tmp_path / "disk")
    link = Path(run, NEWEST)
    link.symlink_to(tmp_path / "disk")
    assert Series(run).restore(state(0)).step == 2
    assert muonckpt.look_at_run(run).newest_whole.name == NEWEST
    Series(run, keep_last=1).save(3, state(3))
    assert link.is_symlink() and (tmp_path / "disk" / "muonckpt.json").exists()
    link.unlink()
    link.symlink_to(link)
    assert muonckpt.look_at_run(run).newest_whole.step == 3
    shutil.rmtree(Path(run, "step-00000003"))
    assert muonckpt.look_at_run(run).newest_whole is None
    with pytest.raises(UnavailableError, match=f"{NEWEST}: Too many levels"):
        Series(run).restore(state(0))


def test_a_link_that_leads_nowhere_is_no_step_that_was_never_saved(tmp_path):
    run, gone = saved(tmp_path / "run"), tmp_path / "gone"
    newest = Path(run, NEWEST)
    newest.rename(tmp_path / "disk")
    newest.symlink_to(gone)
    fault = f"cannot read {newest}: a link to {gone}, which is not there"
    move = moving(Path(run), [NEWEST])
    with pytest.raises(UnavailableError, match=f"{fault}.* To go on from step-00000001 instead: {move}"):
        Series(run).restore(state(0))
    done = called("verify", run)
    assert done.returncode == 3 and fault in done.stdout and f"next: {move} " in done.stdout
    assert called("verify", newest).returncode == 3 and fault in called("verify", newest).stderr
    # None is there: the run has steps nevertheless, and does not begin.
    Path(run, "step-00000001").rename(tmp_path / "other")
    Path(run, "step-00000001").symlink_to(gone)
    with pytest.raises(UnavailableError, match=fault):
        Series(run).restore(state(0))
    done = called("verify", run)
    assert done.returncode == 3 and fault in done.stdout
    # The folder of the run, or the one around it.
    (tmp_path / "link").symlink_to(gone)
    for place in (tmp_path / "link", tmp_path / "link" / "run"):
        with pytest.raises(UnavailableError, match=f"cannot read {place}: .*a link to {gone}, which is not there"):
            Series(place).restore(state(0))
        done = called("verify", place)
        assert done.returncode == 3 and f"a link to {gone}, which is not there" in done.stderr


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ESTALE, errno.ENAMETOOLONG, errno.EIO])
def test_a_file_system_that_cannot_say_is_an_error(number, tmp_path, monkeypatch):
    for name in ("stat", "scandir", "listdir"):
        monkeypatch.setattr(os, name, raising(OSError(number, os.strerror(number))))
    for question in (kind_of, is_there, entries_of):
        with pytest.raises(UnavailableError, match=os.strerror(number)) as raised:
            question(tmp_path)
        assert isinstance(raised.value, DiskError) == (number == errno.EIO) and str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("failures", "asked", "passes"),
    [
        ([OSError(errno.EBUSY, "503 SlowDown")], 2, True),
        ([TimeoutError(), ConnectionResetError()], 3, True),
        ([OSError(errno.EREMOTEIO, "500")] * 3, 3, False),
        ([PermissionError("403 Forbidden")], 1, False),
        ([OSError(errno.EINVAL, "400 Bad Request")], 1, False),
    ],
)
def test_a_store_is_asked_again_only_where_that_may_help(failures, asked, passes, monkeypatch):
    place = location(f"memory://{uuid.uuid4().hex}")
    (place / "object").write(b"123")
    info, left, count = MemoryFileSystem.info, list(failures), []

    def failing(fs: MemoryFileSystem, path: str, **options: object) -> object:
        count.append(path)
        if left:
            raise left.pop(0)
        return info(fs, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "info", failing)
    if passes:
        assert kind_of(place / "object") == "file"
    else:
        with pytest.raises(UnavailableError, match="object"):
            kind_of(place / "object")
    assert len(count) == asked
    assert kind_of(place / "other") is None and kind_of(place) == "folder"


@pytest.mark.parametrize(
    ("cause", "kind"),
    [(None, None), (KeyError("x"), None), (failure_of_web(404), None), (OSError("no such repository"), None)]
    + [
        (each, UnavailableError)
        for each in (failure_of_web(403), ConnectionRefusedError(111, "refused"), TimeoutError())
    ],
)
def test_a_library_that_finds_nothing_for_any_failure_is_asked_for_its_cause(cause, kind, monkeypatch):
    """As fsspec's of the web does."""
    place = location(f"memory://{uuid.uuid4().hex}")

    def info(fs: MemoryFileSystem, path: str, **options: object) -> object:
        raise FileNotFoundError(path) from cause

    monkeypatch.setattr(MemoryFileSystem, "info", info)
    if kind is None:
        assert kind_of(place) is None
    else:
        with pytest.raises(kind, match="no damage"):
            kind_of(place)


def test_a_server_that_serves_whole_files_only_is_no_damage(monkeypatch):
    place = location(f"memory://{uuid.uuid4().hex}") / "model.safetensors"
    place.write(bytes(1000))
    whole = lambda fs, paths, starts, stops, **options: [fs.store[path].getvalue() for path in paths]  # noqa: E731
    monkeypatch.setattr(MemoryFileSystem, "cat_ranges", whole)
    with pytest.raises(
        UnavailableError, match="expected 4 bytes at byte 0, found 1000: its server does not serve parts"
    ):
        place.open().read(0, 4)


def test_a_listing_of_a_store_leaves_nothing_out_in_silence(monkeypatch):
    """The search of fsspec's own passes over folders that it cannot list."""
    place, ls = location(f"memory://{uuid.uuid4().hex}"), MemoryFileSystem.ls
    (place / "a" / "b").write(b"1")
    assert [*place.described()] == ["a/b"]

    def refused(fs: MemoryFileSystem, path: str, **options: object) -> object:
        if path.endswith("/a"):
            raise PermissionError("403")
        return ls(fs, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "ls", refused)
    with pytest.raises(UnavailableError, match="403"):
        place.described()


@pytest.mark.parametrize("file", ["__0_0.distcp", "muonckpt.json", ".metadata"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE])
def test_what_one_reader_cannot_open_is_no_damage_and_not_recorded(number, file, tmp_path, monkeypatch):
    run, open_file = saved(tmp_path / "run"), os.open

    def refused(path: object, *arguments: int, **options: int) -> int:
        if str(path) == f"{run}/{NEWEST}/{file}":
            raise OSError(number, os.strerror(number), str(path))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refused)
    for place in (run, f"{run}/{NEWEST}"):
        done = called("verify", place)
        assert done.returncode == 3 and os.strerror(number) in done.stdout + done.stderr
        assert file in done.stdout + done.stderr
    newest, before = muonckpt.verify_run(run)
    assert newest.is_unread and not newest.is_damaged and before.is_whole
    way_back = f"To go on from step-00000001 instead: {moving(Path(run), [NEWEST])}"
    with pytest.raises(UnavailableError, match=rf"{file}.*\. {way_back}$"):
        Series(run).restore(state(0))
    move = moving(Path(run), [NEWEST])
    unlock = [f"chmod -R u+rX {run}/{NEWEST}"] if number == errno.EACCES else []
    for command in ("verify", "inspect"):
        said = called(command, run).stdout
        assert f"{'or' if unlock else 'next'}: {move} (then start the job again: it resumes from" in said
        assert all(f"next: {line} (lets its owner read it; then start the job again)" in said for line in unlock)
    page = muonckpt.report_run(run, stats="none")
    assert [remedy.command for remedy in page.diagnosis.remedies] == [*unlock, move]
    assert f"{NEWEST} (unread)" in page.diagnosis.sentence
    assert read_verification(tmp_path / "run" / NEWEST) is None
    Path(run, NEWEST).rename(tmp_path / NEWEST)
    assert Series(run).restore(state(0)).step == 1
    monkeypatch.undo()
    (tmp_path / NEWEST).rename(Path(run, NEWEST))
    assert Series(run).restore(state(0)).step == 2


def test_a_step_that_cannot_be_listed_has_no_size(tmp_path, monkeypatch):
    run = saved(tmp_path / "run")
    Path(run, NEWEST, "loop").symlink_to("loop")
    lines = called("inspect", run).stdout.splitlines()
    assert next(line for line in lines if line.startswith(NEWEST)).split() == [NEWEST, "unread", "-", "-", "never"]


def test_an_item_that_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    with muonckpt.open(f"{saved(tmp_path / 'run')}/{NEWEST}") as opened:
        monkeypatch.setattr(os, "open", raising(PermissionError(errno.EACCES, "Permission denied")))
        with pytest.raises(UnavailableError, match=r"^item '.*' in .*: cannot read .*: Permission denied") as raised:
            [*opened.items.values()]
    assert "is damaged" not in str(raised.value)


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_file_that_the_disk_cannot_read_is_damaged_here_and_not_recorded(call, tmp_path, monkeypatch):
    run, real, broken = saved(tmp_path / "run"), getattr(os, call), f"{NEWEST}/__0_0.distcp"

    def failing(file: object, *arguments: object, **options: object) -> object:
        path = str(Path(f"/proc/self/fd/{file}").readlink()) if isinstance(file, int) else str(file)
        if path.endswith(broken):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, *arguments, **options)

    monkeypatch.setattr(os, call, failing)
    report, _, note = verify_recorded(Path(run, NEWEST), muonckpt.verify)
    assert {finding.kind for finding in report.findings} >= {"disk"} and report.verdict == "faulty"
    assert "rank 0's file __0_0.distcp cannot be read, as a disk fails (EIO)" in report.diagnosis.sentence
    assert "not recorded" in note and moving(Path(run), [NEWEST]) in str(report.diagnosis)
    assert called("verify", run).returncode == (1 if call == "preadv" else 3)  # all that tells steps apart is sizes
    assert not Path(run, RECORD, NEWEST).exists()
    with pytest.raises(
        DiskError, match=rf"__0_0\.distcp: Input/output error.*\. To go on from .*: {moving(Path(run), [NEWEST])}"
    ):
        Series(run).restore(state(0))
    monkeypatch.undo()
    assert Series(run).restore(state(0)).step == 2


def by_retention(step: Path) -> None:
    publish.remove(step, ("muonckpt.json", ".metadata"))


def by_rename(step: Path) -> None:
    step.rename(step.with_name(".moved"))


def file_by_file(step: Path) -> None:
    (step / "__0_0.distcp").unlink()


@pytest.mark.parametrize("remove", [by_retention, by_rename, file_by_file, shutil.rmtree])
def test_what_is_removed_while_it_is_read_is_no_damage(remove, tmp_path, monkeypatch):
    step = tmp_path

    def go(count: int, total: int) -> None:
        if (step / "__0_0.distcp").exists():
            remove(step)

    for name in ("verify", "diff"):
        step = Path(saved(tmp_path / name)) / NEWEST
        with pytest.raises(SourceError, match="while it was read"):
            if name == "verify":
                muonckpt.verify(step, progress=go)
            else:
                muonckpt.diff(step, step.with_name("step-00000001"), progress=go)
    step = Path(saved(tmp_path / "run")) / NEWEST
    removed, whole = muonckpt.verify_run(tmp_path / "run", progress=go)
    assert not removed.is_damaged and removed.sentence == "it was removed while it was read" and whole.is_whole
    assert removed.step.state == "removed"


@pytest.mark.parametrize("remove", [by_retention, by_rename, shutil.rmtree])
def test_inspect_tells_a_removal_from_damage(remove, tmp_path, monkeypatch):
    """In a folder, and in that of a run, where others are looked at as well."""
    opened = os.open
    for place in ("step", "run"):
        step = Path(saved(tmp_path / place)) / NEWEST

        def going(path: object, *arguments: int, step: Path = step, **options: int) -> int:
            if str(path).endswith(f"{NEWEST}/__0_0.distcp") and step.exists():
                remove(step)
            return opened(path, *arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", going)
            if place == "step":
                with pytest.raises(SourceError, match="was removed while it was read"):
                    muonckpt.inspect(step)
            else:
                steps = muonckpt.look_at_run(tmp_path / "run").steps
                assert [one.state for one in steps] == ["whole", "removed"] and steps[1].fault == "it is gone"


TWO_ANSWERS = re.compile(r"\.(exists|is_file|is_dir|is_symlink|glob|isfile|isdir)\(")

ALLOWED = {
    ("checkpoint/loading.py", "exists"): "files of the kernel",
    ("cli/argument_types.py", "exists"): "completion in a shell, which tells no error",
    ("cli/argument_types.py", "is_dir"): "the same",
    ("lab/built.py", "is_file"): "a script of the user",
    ("store/io/location.py", "is_dir"): "an entry of a listing",
    ("store/verify/verification.py", "is_dir"): "an entry of a listing",
    ("store/verify/verification.py", "is_file"): "the same",
}


def test_no_other_question_is_asked_in_two_answers():
    """Python's own have two, and newer versions of it call more errors nothing."""
    package, found = Path(muonckpt.__file__).parent, set()
    for folder, _, names in os.walk(package, followlinks=True):
        for file in (Path(folder, name) for name in names if name.endswith(".py")):
            calls = TWO_ANSWERS.findall(file.read_text())
            found.update((str(file.relative_to(package)), call) for call in calls)
    assert found == {*ALLOWED}
