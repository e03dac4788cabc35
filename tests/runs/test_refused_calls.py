"""A call to a file system or a store that fails once is an error, or asked again: never damage, never an older step.

Each act on a run goes through all its calls, one of which fails in one of five ways.  Afterwards the newest whole step
is restored.
"""

from __future__ import annotations

import errno
import functools
import io
import itertools
import os
import uuid
import zlib
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from support import store_server, sweep, workers

import muonckpt
from muonckpt import MuonckptError, Series, SourceError
from muonckpt.cli.main import run as cli

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*training goes on")

NEWEST = 3

LOCAL_CALLS = ("stat", "lstat", "listdir", "scandir", "open", "pread", "preadv", "fstat", "mkdir", "rename", "fsync")
LOCAL_CALLS += ("pwrite", "replace", "posix_fallocate", "unlink")
STORE_CALLS = ("ls", "info", "cat_file", "cat_ranges", "find", "exists", "isfile", "isdir", "pipe_file", "rm_file")
STORE_CALLS += ("open", "cp_file")

LOCAL_ERRNOS = (errno.EACCES, errno.EMFILE, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
STORE_ERRORS = (
    PermissionError("403 Forbidden"),
    OSError(errno.EREMOTEIO, "500 InternalError"),
    OSError(errno.EBUSY, "503 SlowDown"),
    TimeoutError("no answer"),
    ConnectionResetError(errno.ECONNRESET, "reset by peer"),
)


def state(step: int) -> dict[str, object]:
    return {"model": {f"w{number}": torch.full((40, 8), float(step)) for number in range(2)}, "step": step}


def command(*arguments: object) -> int:
    """Run a command in this process; return its exit code."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as errors:
        code = cli([str(argument) for argument in arguments])
    assert code in (0, 1, 3), f"exit {code}: {errors.getvalue()}"
    return code


def restore(run: str) -> None:
    into = state(0)
    restored = Series(run).restore(into)
    assert restored is not None and restored.step == NEWEST, f"restored {restored}"
    assert into["step"] == NEWEST and torch.equal(into["model"]["w1"], state(NEWEST)["model"]["w1"])


def latest(run: str) -> None:
    assert Series(run).latest().step == NEWEST


def save(run: str) -> None:
    Series(run).save(4, state(4))


def verify_run(run: str) -> None:
    """Verify the newest step, and if it cannot be read the one before."""
    was_read = False
    for verdict in muonckpt.verify_run(run, jobs=1):
        assert not was_read, "it has gone on to an older step"
        kinds = {finding.kind for finding in verdict.report.findings} if verdict.report else set()
        assert verdict.is_whole or verdict.is_unread or kinds == {"disk"}, verdict.sentence
        was_read = verdict.is_whole


def verify_step(run: str) -> None:
    report = muonckpt.verify(f"{run}/step-{NEWEST:08}", jobs=1)
    assert {finding.kind for finding in report.findings} <= {"disk"}, report.findings


def inspect_run(run: str) -> None:
    assert command("inspect", run) in (0, 3)


def verify_command(run: str) -> None:
    command("verify", run)


ACTS: dict[str, Callable[[str], None]] = {
    act.__name__: act for act in (restore, latest, save, verify_run, verify_step, inspect_run, verify_command)
}


class Failing:
    """Counts calls, and lets one of them fail."""

    def __init__(self) -> None:
        self.count, self.at, self.failure = 0, -1, Exception()

    def wrap(self, function: Callable, is_ours: Callable[[object], bool]) -> Callable:
        @functools.wraps(function)
        def call(*arguments: object, **options: object) -> object:
            if self.at >= 0 and is_ours(arguments[0] if arguments else None):
                self.count += 1
                if self.count == self.at:
                    raise self.failure
            return function(*arguments, **options)

        return call

    def calls_of(self, act: Callable[[str], None], run: str, at: int = 0, failure: Exception | None = None) -> int:
        """Do an act, of which a call fails, from 1; return the number of its calls until then."""
        self.count, self.at, self.failure = 0, at, failure or Exception()
        try:
            with suppress(MuonckptError):
                act(run)
        finally:
            self.at = -1
        return self.count


def newest_whole(run: str) -> int:
    with suppress(SourceError):
        if muonckpt.verify(f"{run}/step-{NEWEST + 1:08}", jobs=1).verdict == "whole":
            return NEWEST + 1
    return NEWEST


def try_each_call(
    act: Callable[[str], None], failing: Failing, failures: Sequence[Exception], make: Callable[[], str], every: int
) -> None:
    """Let each call of an act fail in all ways; or of so many calls one, and the ways in turn."""
    run = make()
    total = failing.calls_of(act, run)
    assert total > 10, "calls are counted"
    numbers = range(1 + zlib.crc32(act.__name__.encode()) % every, total + 1, every)
    trials = [(number, failure) for number in numbers for failure in failures]
    for number, failure in trials if every == 1 else trials[:: len(failures) + 1]:
        run = make() if act is save else run
        failing.calls_of(act, run, number, failure)
        into, expected = state(0), newest_whole(run)
        restored = Series(run).restore(into)
        assert restored is not None and (restored.step, into["step"]) == (expected, expected), (
            f"call {number} of {total} failed with {failure!r}: expected step {expected}, restored {restored}"
        )


def runs_in(place: str) -> Callable[[], str]:
    """Return a function that makes a run of three steps in a folder of its own."""
    numbers = itertools.count()

    def make() -> str:
        run = f"{place}/{next(numbers)}"
        for step in range(1, NEWEST + 1):
            Series(run).save(step, state(step))
        return run

    return make


def refused_on_one(rank: int, world: int, path: str, refused_rank: int) -> list[str]:
    """What each rank hears of a restore while one of them cannot open a file, and afterwards."""
    opened, said = os.open, []

    def refused(file: object, *arguments: int, **options: int) -> int:
        if rank == refused_rank and str(file).endswith(".distcp"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return opened(file, *arguments, **options)

    for opening in (refused, opened):
        os.open = opening
        try:
            into = state(0) | {"large": torch.zeros(1 << 21)}  # enough for each rank to read of it
            said.append(f"step {Series(path).restore(into).step}")
        except MuonckptError as error:
            said.append(f"{type(error).__name__} {'Permission denied' in str(error)}")
        finally:
            os.open = opened
    return said


@pytest.mark.parametrize("refused_rank", [0, 1])
def test_what_one_rank_cannot_read_is_an_error_on_all(refused_rank, tmp_path):
    for step in range(1, NEWEST + 1):
        Series(tmp_path).save(step, state(step))
    Series(tmp_path).save(NEWEST + 1, state(NEWEST) | {"large": torch.ones(1 << 21)})
    expected = ["UnavailableError True", f"step {NEWEST + 1}"]
    assert workers.run(2, refused_on_one, str(tmp_path), refused_rank) == [expected, expected]


EVERY = sweep([1, 16], 16)


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", ACTS)
def test_a_call_to_the_file_system_that_fails_once_costs_no_step(name, every, tmp_path, monkeypatch):
    failing = Failing()

    def is_ours(argument: object) -> bool:
        if isinstance(argument, int):
            link = Path(f"/proc/self/fd/{argument}")
            argument = link.readlink() if link.is_symlink() else ""
        return str(argument).startswith(str(tmp_path))

    for call in LOCAL_CALLS:
        monkeypatch.setattr(os, call, failing.wrap(getattr(os, call), is_ours))
    failures = [OSError(number, os.strerror(number)) for number in LOCAL_ERRNOS]
    try_each_call(ACTS[name], failing, failures, runs_in(str(tmp_path)), every)


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", ACTS)
def test_a_call_to_a_store_that_fails_once_costs_no_step(name, every, monkeypatch):
    failing = Failing()
    for call in STORE_CALLS:
        monkeypatch.setattr(MemoryFileSystem, call, failing.wrap(getattr(MemoryFileSystem, call), lambda fs: True))
    try_each_call(ACTS[name], failing, STORE_ERRORS, runs_in(f"memory://{uuid.uuid4().hex}"), every)


@pytest.mark.parametrize("every", sweep([1, 40], 40))
@pytest.mark.parametrize("name", sweep(["restore", "verify_run", "inspect_run"], "restore"))
def test_a_request_to_a_real_store_that_is_refused_once_costs_no_step(name, every, object_store):
    """The server answers with 403, as for an expired token, where libraries do not ask again."""
    server, _ = object_store
    failing = Failing()

    def refuse() -> bool:
        with suppress(PermissionError):
            failing.wrap(lambda: None, lambda argument: True)()
            return False
        return True

    with server.refusing(lambda query: refuse()):
        run = runs_in(f"s3://{store_server.BUCKET}/{uuid.uuid4().hex}")
        try_each_call(ACTS[name], failing, [PermissionError()], run, every)
