"""Histories of a run, each drawn from one seed; and the oracle, which knows what was acknowledged."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import muonckpt
from muonckpt import BoxedTensor
from muonckpt.names.errors import UnsyncedError
from muonckpt.runs.step_folder import DESCRIPTIONS
from muonckpt.store.io.location import location
from muonckpt.store.io.publish import MARK, sync_directory
from muonckpt.store.verify.run import StepName, look_at_folder

from . import world
from .ranks import Killed
from .stores import PROTOCOL
from .world import KINDS, Fault, Machine

ROWS = 6

ROOT = f"/dev/shm/muonckpt-histories-{os.getpid():010}"


class Wrong(Exception):
    """The oracle has found something."""


# --- what is saved: every element tells of which save it is -----------------------------------------------------------


def _rows(counter: int) -> torch.Tensor:
    return torch.arange(ROWS * 3, dtype=torch.float32).view(ROWS, 3) + 100 * counter


def state(counter: int, rank: int, ranks: int) -> dict[str, Any]:
    """Cut by rows, the same on all ranks, and an object."""
    lo, hi = ROWS * rank // ranks, ROWS * (rank + 1) // ranks
    cut = BoxedTensor((ROWS, 3), {(lo, 0): _rows(counter)[lo:hi].clone()}, torch.float32, "cpu")
    return {"model": {"cut": cut, "alike": torch.full((4,), counter)}, "extra": {"count": counter}}


def counter_of(loaded: dict[str, Any], rank: int, ranks: int) -> int:
    """Which save this is.

    Raises:
        Wrong: it is of several, or none.
    """
    counter = loaded["extra"]["count"]
    same = isinstance(counter, int) and torch.equal(loaded["model"]["alike"], torch.full((4,), counter))
    if same:
        expected = state(counter, rank, ranks)["model"]["cut"].parts
        found = loaded["model"]["cut"].parts
        same = expected.keys() == found.keys() and all(torch.equal(expected[lo], found[lo]) for lo in expected)
    if not same:
        raise Wrong(f"mixed: {loaded}")
    return int(counter)


# --- histories --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A program that resumes and saves.

    Attributes:
        saves: how, one after the other: "save", "async", "async, not waited for".
        kill: the rank that is killed, at which of its calls, and whether the machine loses power then.
        fault: the error of calls, the first that fails, and how many.
        beside: "reader" or "writer": another program at the same time.
    """

    ranks: int
    saves: tuple[str, ...]
    keep_last: int = 2
    keep_every: int | None = None
    kill: tuple[int, int, bool] | None = None
    fault: tuple[int, int, int] | None = None
    signal_at: int = 0
    beside: str = ""


@dataclass(frozen=True)
class Damage:
    """A step, of a number of them, of which a byte is changed, or a file cut or lost."""

    step: int
    file: int
    place: float
    how: str


@dataclass(frozen=True)
class Pause:
    hours: int


@dataclass(frozen=True)
class Verify:
    kill: int = 0
    fault: tuple[int, int, int] | None = None


Event = Program | Damage | Pause | Verify


def is_in_store(seed: str) -> bool:
    return random.Random(f"{seed} store").random() < 0.25


def drawn(seed: str) -> tuple[Event, ...]:
    dice, in_store = random.Random(f"{seed} history"), is_in_store(seed)
    events = list[Event]()
    for _ in range(dice.choice((2, 2, 3))):
        events.append(_event(dice, in_store))
        if isinstance(events[-1], Damage) and dice.random() < 0.5:
            events.append(_verification(dice, in_store))
    return tuple(events)


def _verification(dice: random.Random, in_store: bool) -> Verify:
    return Verify(dice.choice((0, dice.randint(1, 60))), dice.choice((None, None, _fault(dice, 60, in_store))))


def _fault(dice: random.Random, calls: int, in_store: bool) -> tuple[int, int, int]:
    at = dice.choice((dice.randint(0, 12), dice.randint(0, calls)))
    numbers = [number for number, kinds in KINDS.items() if ("ask" in kinds) == in_store]
    return dice.choice(numbers), at, dice.choice((1, 1, 2, 5, 1000))


def _event(dice: random.Random, in_store: bool) -> Event:
    kind = dice.random()
    if kind < 0.06:
        return Pause(dice.choice((1, 30)))
    if kind < 0.16:
        return Damage(dice.randrange(8), dice.randrange(8), dice.random(), dice.choice(("byte", "byte", "cut", "lost")))
    if kind < 0.24:
        return _verification(dice, in_store)
    ranks = dice.choice((1, 1, 1, 1, 2, 2, 3, 4))
    saves = tuple(
        dice.choice(("save", "save", "replace", "async", "async, not waited for"))
        for _ in range(dice.choice((0, 1, 1, 2, 2, 3)))
    )
    program = Program(ranks, saves, dice.choice((1, 1, 2, 3)), dice.choice((None, None, 2)))
    calls = 20 + 50 * (len(saves) + 1)
    match dice.randrange(8):
        case 0 | 1 | 2:
            return replace(program, kill=(dice.randrange(ranks), dice.randint(1, calls), dice.random() < 0.6))
        case 3 | 4:
            return replace(program, fault=_fault(dice, calls, in_store))
        case 5:
            return replace(program, beside=dice.choice(("reader", "writer")))
        case 6:
            return replace(program, signal_at=dice.randint(1, calls))
    return program


# --- the oracle -------------------------------------------------------------------------------------------------------


@dataclass
class Attempt:
    """A save that has begun."""

    step: int
    number: int = 0
    acknowledged: bool = False
    outcomes: dict[int, str] = field(default_factory=dict)
    damaged: bool = False
    is_cut: bool = False
    is_gone: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.step, self.number

    def place(self, path: str) -> None:
        name = StepName.parsed(path.rpartition("/")[2])
        assert name is not None and name.step == self.step, path
        self.number = name.attempt

    def end(self, rank: int, outcome: str) -> None:
        self.outcomes[rank] = outcome
        self.acknowledged |= outcome == "saved"

    @property
    def refused(self) -> bool:
        """True if the save has told everybody that there is nothing of it."""
        return bool(self.outcomes) and {*self.outcomes.values()} == {"refused"}


def _outcome(error: Exception) -> str:
    return "unknown" if isinstance(error, UnsyncedError | muonckpt.LostRankError) else "refused"


class Oracle:
    """Runs a history, and raises `Wrong` at the first thing that is not as promised."""

    def __init__(self, seed: str) -> None:
        self.machine = Machine(seed, ROOT)
        self.disk = self.machine.disk
        self.disk.orders_names = random.Random(f"{seed} disk").random() < 0.5
        self.is_store = is_in_store(seed)
        self.folder = f"{PROTOCOL}://store/run" if self.is_store else f"{ROOT}/run"
        self.attempts: dict[int, Attempt] = {}
        self.programs = 0
        self.is_damaged = False

    def happen(self, event: Event) -> None:
        match event:
            case Program():
                self._program(event)
            case Pause():
                self.disk.now += event.hours * 3600 * 10**9 + 10**9
            case Damage():
                self._damage(event)
            case Verify():
                self._verify(event.fault, event.kill)
                if event.kill or event.fault:
                    self._verify()

    def newest(self) -> tuple[int, int]:
        """The step, and the attempt at it, that has to be there at least."""
        whole = [
            each.key for each in self.attempts.values() if each.acknowledged and not (each.damaged or each.is_gone)
        ]
        return max(whole, default=(-1, 0))

    def _names(self, folder: str = "") -> list[str]:
        """The names in the folder of the run, or in one of its steps."""
        if self.is_store:
            prefix = f"store/run/{folder and f'{folder}/'}"
            below = [path.removeprefix(prefix) for path in self.machine.store.objects if path.startswith(prefix)]
            return sorted({path.partition("/")[0] for path in below})
        place = Path(self.folder) / folder
        return sorted(entry.name for entry in place.iterdir()) if place.exists() else []

    def _read(self, name: str) -> bytes:
        """The bytes of a file in the folder of the run.

        Raises:
            OSError, KeyError: it is not there.
        """
        if self.is_store:
            return self.machine.store.objects[f"store/run/{name}"][0]
        return (Path(self.folder) / name).read_bytes()

    def _note_removals(self, keep_last: int) -> None:
        """Note which saves are gone for a reason: so many later ones are there, and are not known to be damaged."""
        there = {name for name in map(StepName.parsed, self._names()) if name and self._is_published(name)}
        cut = {attempt.key for attempt in self.attempts.values() if attempt.is_cut}
        for attempt in self.attempts.values():
            if attempt.acknowledged and attempt.key not in there:
                later = {name.step for name in there - cut if name > attempt.key}
                attempt.is_gone |= len(later) >= keep_last or attempt.step in later

    def _is_published(self, name: StepName) -> bool:
        files = {*self._names(str(name))}
        return files >= {*DESCRIPTIONS} and MARK not in files

    # --- programs ---------------------------------------------------------------------------------------------------

    def _program(self, program: Program) -> None:
        self._do([program, *([replace(program, ranks=1, saves=())] if program.beside == "reader" else [])]
                 if program.beside != "writer" else [program, replace(program, ranks=1)])  # fmt: skip
        # Whatever has happened, what was acknowledged is there, and the folder can be used.
        if program.kill or program.fault or program.beside:
            self._do([Program(1, ())])
            if program.fault or (program.kill and program.kill[2]):
                self._verify(every=False)

    def _do(self, programs: Sequence[Program]) -> None:
        machine = self.machine
        names = [f"program {self.programs + number}" for number in range(len(programs))]
        self.programs += len(programs)
        kills, first = machine.kills, programs[0]
        machine.fault = Fault(*first.fault) if first.fault else None
        self._is_calm = not first.fault
        starts = []
        for name, program in zip(names, programs, strict=True):
            counters = [100 * (self.programs + names.index(name)) + at for at in range(len(program.saves))]
            tasks = machine.start(name, program.ranks, partial(self._rank, program, counters))
            starts.append(tasks)
        if first.kill:
            rank, at, loses_power = first.kill
            process = starts[0][rank].process
            process.kill_at, process.loses_power = at, loses_power
        starts[0][0].process.signal_at = first.signal_at
        machine.run()
        was_struck = bool(machine.fault and machine.fault.hits)
        machine.fault = None
        if machine.schedule.is_hung:
            raise Wrong("hung")
        disturbed = machine.kills > kills or was_struck
        if machine.schedule.time_outs and not disturbed:
            raise Wrong("ranks waited for each other")
        self._note_removals(min(program.keep_last for program in programs))
        if machine.kills == kills:
            for attempt in self.attempts.values():
                if len({*attempt.outcomes.values()}) > 1:
                    raise Wrong(f"ranks disagree about step {attempt.step}: {attempt.outcomes}")
        for task in (task for tasks in starts for task in tasks):
            if isinstance(task.error, Wrong):
                raise task.error
            ours = isinstance(task.error, muonckpt.MuonckptError) and (
                disturbed or len(programs) > 1 or self.is_damaged
            )
            if not (task.error is None or isinstance(task.error, Killed | SystemExit) or ours):
                raise Wrong(f"rank {task.process.rank} of {task.process.name}: {task.trace}")
        if len(programs) == 1 and not self.is_store and starts[0][0].result is not None:
            self._refuse_leftovers(first, starts[0][0].result)

    def _rank(self, program: Program, counters: Sequence[int], rank: int) -> int | None:
        """What a rank of a program does; return the last step if nothing has disturbed its save."""
        on = (15,) if program.signal_at else ()
        series = muonckpt.Series(self.folder, keep_last=program.keep_last, keep_every=program.keep_every, on=on)  # type: ignore[arg-type]
        step = self._restore(series, state(0, rank, program.ranks), rank, program.ranks)
        pending: tuple[Attempt, Any] | None = None
        is_saved, goes_on = True, True

        def settle(outcome: str) -> None:
            nonlocal pending, is_saved
            if pending is not None:
                pending[0].end(rank, outcome)
                pending, is_saved = None, outcome == "saved"

        for counter, how in zip(counters, program.saves, strict=True):
            replaces = how == "replace" and step >= 0
            step += is_saved and not replaces
            attempt = self.attempts.setdefault(counter, Attempt(step))
            hits = self._hits
            try:
                if how.startswith("async"):
                    saving = series.async_save(
                        step, state(counter, rank, program.ranks), provenance={"counter": counter}
                    )
                    settle("saved")  # the one before has ended well if this begins
                    attempt.place(saving.path)
                    pending = attempt, saving
                    if how == "async":
                        saving.result()
                        settle("saved")
                else:
                    values = state(counter, rank, program.ranks)
                    saved = series.save(step, values, replace=replaces, provenance={"counter": counter})
                    settle("saved")
                    attempt.place(saved.path)
                    attempt.end(rank, "saved")
                    is_saved = True
            except SystemExit:
                settle("saved")
                attempt.end(rank, "saved")
                raise
            except muonckpt.MuonckptError as error:
                is_of_pending = pending is not None and pending[1].done() and pending[1].future.exception() is error
                if is_of_pending:
                    settle(_outcome(error))
                if not attempt.outcomes.get(rank):
                    attempt.end(rank, _outcome(error) if not is_of_pending else "refused")
                is_saved, goes_on = False, goes_on and not isinstance(error, muonckpt.LostRankError)
                if not goes_on or self._is_calm:
                    raise
        is_clean = pending is None and is_saved and program.saves and hits == self._hits
        series.close()
        settle("saved")
        return step if is_clean else None

    @property
    def _hits(self) -> int:
        return self.machine.fault.hits if self.machine.fault else 0

    def _restore(self, series: Any, template: dict[str, Any], rank: int, ranks: int) -> int:
        """Restore, and return the step."""
        expected = self.newest()
        try:
            restored = series.restore(template)
        except muonckpt.DamageError as error:
            if expected[0] >= 0:
                raise Wrong(f"lost: step {expected[0]}: {error}") from error
            raise
        if restored is None:
            if expected[0] >= 0:
                raise Wrong(f"lost: step {expected[0]}, and the run begins at 0")
            return -1
        counter = counter_of(template, rank, ranks)
        attempt = self.attempts.get(counter)
        if attempt is None or attempt.step != restored.step:
            raise Wrong(f"invented: step {restored.step}, {counter}")
        attempt.place(restored.path)
        if attempt.key < expected:
            raise Wrong(f"older: {attempt.key}, expected {expected}")
        if attempt.refused:
            raise Wrong(f"step {attempt.step} was refused, and is there")
        return int(restored.step)

    def _refuse_leftovers(self, program: Program, saved: int) -> None:
        """The folder has nothing but what is to be kept, after a save that nothing has disturbed."""
        names = self._names()
        steps = {name for name in names if re.fullmatch(r"step-\d{8}(\.\d+)?", name)}
        recent = {f".step-{attempt.step:08}" for attempt in self.attempts.values() if attempt.step > saved}
        rest = {name for name in names if not name.startswith(tuple(recent) or "/")} - steps
        rest -= {"resumes", ".muonckpt-verified"}
        if rest:
            raise Wrong(f"left behind: {sorted(rest)}")
        keep_last, keep_every = program.keep_last, program.keep_every
        numbers = sorted(int(name[5:13]) for name in steps if int(name[5:13]) <= saved)
        extra = [number for number in numbers[:-keep_last] if not (keep_every and number % keep_every == 0)]
        if not self.is_damaged and extra:
            raise Wrong(f"not removed: steps {extra} of {numbers}, keep_last={keep_last}, keep_every={keep_every}")

    # --- other events -----------------------------------------------------------------------------------------------

    def _attempt_in(self, name: str) -> Attempt | None:
        """The save of which a step is, by its manifest."""
        try:
            return self.attempts[json.loads(self._read(f"{name}/muonckpt.json"))["provenance"]["counter"]]
        except (OSError, KeyError):
            return None

    def _damage(self, event: Damage) -> None:
        steps = [name for name in self._names() if StepName.parsed(name)]
        if not steps:
            return
        name = steps[event.step % len(steps)]
        files = [file for file in self._names(name) if file.endswith(".distcp")]
        attempt = self._attempt_in(name)
        if attempt is None or not files:
            return
        file = f"{name}/{files[event.file % len(files)]}"
        data, path = self._read(file), Path(self.folder) / file
        counter = next(counter for counter, each in self.attempts.items() if each is attempt)
        rows = [data.find(row.numpy().tobytes()) for row in _rows(counter)]
        places = [at for at in rows if at >= 0]
        at = places[int(event.place * len(places))] if places and event.how == "byte" else int(event.place * len(data))
        attempt.damaged = self.is_damaged = True
        attempt.is_cut |= event.how != "byte" or not places

        def damage(rank: int) -> None:
            if self.is_store:
                self._damage_object(f"store/run/{file}", event.how if places else "cut", at)
            elif event.how == "lost":
                path.unlink()
            else:
                handle = os.open(path, os.O_RDWR)
                if event.how == "byte" and places:
                    os.pwrite(handle, bytes([data[at] ^ 1]), at)
                else:
                    os.ftruncate(handle, at)
                os.fsync(handle)
                os.close(handle)
            if not self.is_store:
                sync_directory(path.parent)

        self.machine.start("damage", 1, damage)
        self.machine.run()

    def _damage_object(self, path: str, how: str, at: int) -> None:
        store = self.machine.store
        data, _ = store.objects.pop(path)
        if how != "lost":
            store.put(path, data[:at] + (bytes([data[at] ^ 1]) + data[at + 1 :] if how == "byte" else b""))

    def _verify(self, fault: Any = None, kill_at: int = 0, every: bool = True) -> None:
        """Verify steps; then what is recorded has to be true."""
        if not self._names():
            return
        machine, kills = self.machine, self.machine.kills
        machine.fault = Fault(*fault) if fault else None
        [task] = machine.start("verify", 1, lambda rank: [*muonckpt.verify_run(self.folder, every=every, jobs=1)])
        task.process.kill_at = kill_at
        machine.run()
        was_struck, machine.fault = bool(machine.fault and machine.fault.hits), None
        disturbed = was_struck or machine.kills > kills
        if task.error is not None and not (disturbed and isinstance(task.error, Killed | muonckpt.MuonckptError)):
            raise Wrong(f"verify: {task.trace}")
        for verdict in task.result or ():
            attempt = self._attempt_in(verdict.step.name)
            if attempt is None or not (attempt.acknowledged or attempt.damaged):
                continue  # a store may keep a part of it
            if attempt.is_gone and verdict.step.state == "incomplete":
                continue  # its removal has begun, and is not finished
            if verdict.is_whole == attempt.damaged and not (was_struck and not verdict.is_whole):
                raise Wrong(f"false verdict of {verdict.step.name}: {verdict.sentence or verdict.step.state}")
        if not every:
            return
        # The record.
        [task] = machine.start("look", 1, lambda rank: look_at_folder(location(self.folder)))
        machine.run()
        if task.error is not None:
            raise Wrong(f"look: {task.trace}")
        for step in task.result.steps:
            attempt = self._attempt_in(step.name)
            if attempt is None or step.verified is None or not (attempt.acknowledged or attempt.damaged):
                continue
            if step.verified.is_whole == attempt.damaged:
                raise Wrong(f"false record of {step.name}: {step.verified}")


def fault_of(seed: str, events: Sequence[Event]) -> str | None:
    """What is wrong with a history; None if nothing is."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        oracle = Oracle(seed)
        try:
            for event in events:
                oracle.happen(event)
        except Wrong as wrong:
            return str(wrong)
    return None


def traced(seed: str) -> str:
    """A digest of all calls of a history, with what they wrote."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        oracle = Oracle(seed)
        for event in drawn(seed):
            oracle.happen(event)
        return oracle.machine.trace.hexdigest()


def shrunk(
    seed: str, events: Sequence[Event], test: Callable[[str, Sequence[Event]], str | None] = fault_of
) -> tuple[Event, ...]:
    """A shorter history that fails as well."""
    kept, is_shorter = tuple(events), True
    while is_shorter:
        is_shorter = False
        for smaller in _smaller(kept):
            if test(seed, smaller):
                kept, is_shorter = smaller, True
                break
    return kept


def _smaller(events: tuple[Event, ...]) -> list[tuple[Event, ...]]:
    found = [events[:at] + events[at + 1 :] for at in range(len(events))]
    for at, event in enumerate(events):
        if isinstance(event, Program):
            fewer = [
                replace(event, saves=event.saves[:number] + event.saves[number + 1 :])
                for number in range(len(event.saves))
            ]
            fewer += [replace(event, ranks=event.ranks - 1)] if event.ranks > 1 and not event.kill else []
            fewer += [replace(event, fault=None)] if event.fault else []
            found += [(*events[:at], each, *events[at + 1 :]) for each in fewer]
    return found


def main(first: int, count: int) -> None:
    """Try histories, and print what is wrong."""
    import time

    start, calls, kills = time.process_time(), 0, 0
    with world.intercepted():
        for number in range(first, first + count):
            seed = str(number)
            if fault := fault_of(seed, drawn(seed)):
                print("seed", seed, fault, *shrunk(seed, drawn(seed)), sep="\n  ", flush=True)
    print(count, time.process_time() - start, calls, kills)


if __name__ == "__main__":
    import sys

    main(int(sys.argv[1]), int(sys.argv[2]))
