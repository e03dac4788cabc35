"""A script: several processes at one checkpoint, and signals at random moments; prints what came of it.

    crowds.py FOLDER TRIALS SEED [CROWD...]

Prints JSON lines: the crowd, what happened when, what is wrong with what came of it (or null), seconds, and whether a
process did not end.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import muonckpt
from muonckpt.cli.main import main as command_line
from support.acts import Wrong, expect
from support.damages import content
from support.launched import environment, free_port
from support.trials import HUNG

warnings.filterwarnings("ignore")

LIMIT = "8"
"""Seconds that a worker waits until the others are there."""

CODES = (0, 1, 3, 4, 5, 130)


def state(step: int) -> dict[str, Any]:
    """Enough that a signal can come amid the work."""
    return {f"w{number}": torch.full((64, 256), float(step * 100 + number)) for number in range(24)} | {"n": step}


class Crowd:
    """Processes that were forked, and where their errors go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start_time = time.monotonic()
        self.children: list[int] = []

    def start(self, work: Callable[[], object]) -> int:
        """Have another process do something; an error of ours is told, and is exit code 1."""
        child = os.fork()
        if child:
            self.children.append(child)
            return child
        code = 70
        try:
            error = os.open(self._errors(len(self.children)), os.O_WRONLY | os.O_CREAT)
            for number in (1, 2):
                os.dup2(error if number == 2 else os.open(os.devnull, os.O_WRONLY), number)
            work()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        except muonckpt.MuonckptError as ours:
            print(f"{type(ours).__name__}: {ours}", file=sys.stderr)
            code = 1
        except Exception:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        finally:
            sys.stderr.flush()
            os._exit(code)

    def command(self, *arguments: object, rank: int = 0, world: int = 1, port: int = 0) -> int:
        """Have another process run a command of ours, perhaps as one worker of several."""

        def work() -> None:
            if world > 1:
                os.environ |= environment(rank, world, port) | {"GLOO_SOCKET_IFNAME": "lo"}
            sys.argv = ["muonckpt", *map(str, arguments)]
            command_line()

        return self.start(work)

    def ended(self) -> list[int]:
        """Exit codes, when all have ended.

        Raises:
            Wrong: one did not end in time, or not as it may.
        """
        codes: dict[int, int] = {}
        while len(codes) < len(self.children) and time.monotonic() < self.start_time + HUNG:
            for child in set(self.children) - codes.keys():
                ended_child, status = os.waitpid(child, os.WNOHANG)
                if ended_child:
                    codes[child] = os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        for child in set(self.children) - codes.keys():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        expect(len(codes) == len(self.children), "HUNG")
        for number, child in enumerate(self.children):
            message = self._errors(number).read_text()
            code = codes[child]
            early = code in (-signal.SIGINT, -signal.SIGTERM) and not message  # before the program could catch it
            expect(code in CODES or early, f"process {number}: exit code {code}: {message}")
            expect("Traceback" not in message and "this is a bug" not in message, f"process {number}: {message}")
            expect(code in (0, 130) or early or message, f"process {number}: exit code {code}, and no word")
        return [codes[child] for child in self.children]

    def _errors(self, number: int) -> Path:
        return self.folder / f"process-{number}.err"


def reshard(crowd: Crowd, source: Path, out: Path, workers: int = 1) -> list[int]:
    """Start it; the workers' ids."""
    port = free_port()
    arguments = ["reshard", source, out, "--mesh", "dp=4", "--jobs", "1", "--timeout", LIMIT]
    return [crowd.command(*arguments, rank=rank, world=workers, port=port) for rank in range(workers)]


def settled(trial_folder: Path, expected_contents: Sequence[Any], codes: Sequence[int]) -> None:
    """Nothing torn is published, nothing lies beside it, and working again gives what is wanted."""
    out = trial_folder / "out"
    expect(out.exists() or 0 not in codes, "one succeeded, and there is nothing")
    if out.exists():
        expect(content(out) in expected_contents, "what was published is torn, or another one")
    names = {entry.name for entry in trial_folder.iterdir() if not entry.name.endswith(".err")}
    expect(names <= {"out"}, f"left: {names}")


def again(trial_folder: Path, source: Path) -> None:
    """As a user would."""
    if not (trial_folder / "out").exists():
        crowd = Crowd(trial_folder)
        reshard(crowd, source, trial_folder / "out")
        expect(crowd.ended() == [0], "working again failed: " + (trial_folder / "process-0.err").read_text())
        settled(trial_folder, [content(source)], [0])


def signals(folder: Path, trial_folder: Path, dice: random.Random, span: float) -> str:
    """One of two workers gets a signal."""
    crowd = Crowd(trial_folder)
    workers = reshard(crowd, folder / "source", trial_folder / "out", workers=2)
    victim, number = dice.choice(workers), dice.choice([signal.SIGINT, signal.SIGTERM, signal.SIGSTOP])
    at, until = dice.uniform(0, span), dice.uniform(0, 1.5)
    time.sleep(at)
    os.kill(victim, number)
    if number == signal.SIGSTOP:
        time.sleep(until)
        os.kill(victim, signal.SIGCONT)
    codes = crowd.ended()
    settled(trial_folder, [content(folder / "source")], codes)
    again(trial_folder, folder / "source")
    return f"{number.name} at {at:.2f} s to worker {workers.index(victim)}: {codes}"


def two_reshards(folder: Path, trial_folder: Path, dice: random.Random, span: float) -> str:
    crowd = Crowd(trial_folder)
    reshard(crowd, folder / "source", trial_folder / "out")
    delay = dice.uniform(0, span)
    time.sleep(delay)
    reshard(crowd, folder / "source", trial_folder / "out")
    codes = crowd.ended()
    settled(trial_folder, [content(folder / "source")], codes)
    expect(0 in codes, f"neither succeeded: {codes}")
    return f"{delay:.2f} s apart: {codes}"


def changed_source(folder: Path, trial_folder: Path, dice: random.Random, span: float) -> str:
    """It is deleted, replaced by another, or overwritten, while it is resharded."""
    source, other_source = folder / "changing", folder / "other"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(folder / "source", source)
    change, at = dice.choice(["deleted", "replaced", "overwritten"]), dice.uniform(0, span)
    crowd = Crowd(trial_folder)
    reshard(crowd, source, trial_folder / "out")
    time.sleep(at)
    if change == "overwritten":
        for file in other_source.iterdir():
            (source / file.name).write_bytes(file.read_bytes())
    else:
        source.rename(folder / "gone")
        if change == "replaced":
            shutil.copytree(other_source, folder / "new")
            (folder / "new").rename(source)
        shutil.rmtree(folder / "gone")
    codes = crowd.ended()
    settled(trial_folder, [content(folder / "source"), content(other_source)], codes)
    return f"{change} at {at:.2f} s: {codes}"


def two_saves(folder: Path, trial_folder: Path, dice: random.Random, span: float) -> str:
    crowd, delay = Crowd(trial_folder), dice.choice([0.0, dice.uniform(0, 0.05)])
    for step in (1, 2):
        crowd.start(lambda step=step: muonckpt.save(state(step), trial_folder / "out"))  # type: ignore[misc]
        time.sleep(delay)
    codes = crowd.ended()
    settled(trial_folder, [content(folder / "source"), content(folder / "other")], codes)
    expect(sorted(codes) == [0, 1], f"expected one of them to succeed: {codes}")
    return f"{delay:.3f} s apart: {codes}"


def pruned(folder: Path, trial_folder: Path, dice: random.Random, span: float) -> str:
    """Checkpoints of a series are loaded, verified and restored while a run saves and removes them."""
    run, last = trial_folder / "out", dice.randint(4, 8)
    series = muonckpt.Series(run, keep_last=1)
    series.save(0, state(0))
    crowd = Crowd(trial_folder)
    crowd.start(lambda: [series.save(step, state(step)) for step in range(1, last + 1)])

    def check(template: dict[str, Any], restored: int | None) -> None:
        steps_seen = {
            (float(value) - number) // 100 for number in range(24) for value in template[f"w{number}"].unique()
        }
        expect(
            steps_seen == ({restored} if restored is not None else {-1.0}),
            f"expected step {restored}, found {steps_seen}",
        )

    def read() -> None:
        while (newest := muonckpt.Series(run).latest()) is None or newest.step < last:
            template = state(-1)
            restored = muonckpt.Series(run).restore(template)
            check(template, restored and restored.step)
            if newest is None:
                continue
            template = state(-1)
            try:
                muonckpt.load(template, newest.path)
            except muonckpt.SourceError as error:
                if "UNUSABLE" not in str(error):
                    check(template, None)
            else:
                check(template, newest.step)
            try:
                muonckpt.verify(newest.path, jobs=1)
            except muonckpt.SourceError:
                time.sleep(0.001)

    crowd.start(read)
    codes = crowd.ended()
    expect(codes == [0, 0], f"{codes}: {(trial_folder / 'process-1.err').read_text()}")
    names = {entry.name for entry in run.iterdir()}
    expect(names == {f"step-{last:08d}", "resumes"}, f"left: {names}")
    return f"{last} steps"


CROWDS: dict[str, Callable[[Path, Path, random.Random, float], str]] = {
    "signals": signals,
    "two reshards": two_reshards,
    "a source that changes": changed_source,
    "two saves": two_saves,
    "a series that is pruned": pruned,
}


def main(folder: Path, trials: int, seed: str, *names: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell starts with it ignored
    torch.set_num_threads(1)
    dice = random.Random(seed)
    folder.mkdir(exist_ok=True)
    muonckpt.save(state(1), folder / "source")
    muonckpt.save(state(2), folder / "other")
    start_time, trial_folder = time.monotonic(), folder / "here"
    trial_folder.mkdir()
    crowd = Crowd(trial_folder)
    reshard(crowd, folder / "source", trial_folder / "out", workers=2)
    assert crowd.ended() == [0, 0], (trial_folder / "process-0.err").read_text()
    span = 1.2 * (time.monotonic() - start_time)
    shutil.rmtree(trial_folder)
    for name in names or CROWDS:
        for number in range(trials):
            trial_folder.mkdir()
            start_time, wrong = time.monotonic(), None
            description = f"trial {number}"
            try:
                description = CROWDS[name](folder, trial_folder, dice, span)
            except Wrong as error:
                wrong = str(error)
            hung = wrong == "HUNG"
            print(
                json.dumps([name, description, None if hung else wrong, time.monotonic() - start_time, hung]),
                flush=True,
            )
            shutil.rmtree(trial_folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
