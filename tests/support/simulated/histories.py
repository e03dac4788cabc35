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

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

import muonckpt
from muonckpt.names.errors import Interrupted, UnsyncedError
from muonckpt.runs.step_folder import DESCRIPTIONS
from muonckpt.store.io.publish import MARK, sync_directory
from muonckpt.store.verify.run import StepName

from .ranks import Killed
from .stores import PROTOCOL
from .world import KINDS, Fault, Machine

ROWS = 6

ROOT = f"/dev/shm/muonckpt-histories-{os.getpid():010}"


class Wrong(Exception):
    """The oracle has found something."""


# --- what is saved: every element tells of which save it is -----------------------------------------------------------


def _rows(counter: int) -> Tensor:
    return torch.arange(ROWS * 3, dtype=torch.float32).view(ROWS, 3) + 100 * counter


def _vector(counter: int) -> Tensor:
    return torch.full((4,), float(counter))


class Values:
    """What a rank trains: a matrix that is cut by rows, and a vector that all have; with momenta of the same values.

    Args:
        are_objects: whether the series gets model and optimizer, or state dicts.
    """

    def __init__(self, rank: int, ranks: int, are_objects: bool) -> None:
        length = -(-ROWS // ranks)
        self.are_objects, self.rows = are_objects, slice(rank * length, (rank + 1) * length)
        cut = torch.zeros(ROWS, 3)[self.rows]
        if ranks > 1:
            mesh = DeviceMesh("cpu", torch.arange(ranks))
            shape = torch.Size((ROWS, 3))
            cut = DTensor.from_local(cut, mesh, [Shard(0)], run_check=False, shape=shape, stride=(3, 1))
        self.model = nn.Module()
        self.model.cut, self.model.alike = nn.Parameter(cut), nn.Parameter(torch.zeros(4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9)
        for parameter in self.model.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.set(0)

    @property
    def objects(self) -> tuple[Any, ...]:
        return (self.model, self.optimizer) if self.are_objects else ()

    @property
    def state(self) -> tuple[dict[str, Any], ...]:
        state = self.model.state_dict()
        momenta = {
            name: self.optimizer.state[value]["momentum_buffer"] for name, value in self.model.named_parameters()
        }
        return () if self.are_objects else ({"model": state, "momenta": momenta, "count": self.counter},)

    def _expected(self, counter: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's elements, and their values in a save."""
        pairs = []
        for parameter, value in ((self.model.cut, _rows(counter)[self.rows]), (self.model.alike, _vector(counter))):
            for tensor in (parameter.detach(), self.optimizer.state[parameter]["momentum_buffer"]):
                pairs.append((tensor.to_local() if isinstance(tensor, DTensor) else tensor, value))
        return pairs

    def set(self, counter: int) -> None:
        self.optimizer.param_groups[0]["lr"], self.counter = float(counter), counter
        for tensor, value in self._expected(counter):
            tensor.copy_(value)

    def resume(self, series: muonckpt.Series) -> int:
        """Return the step that is loaded, -1 if there is none.

        Raises:
            Wrong: it is of several saves.
        """
        if self.are_objects:
            step = series.resume() - 1
            self.counter = int(self.optimizer.param_groups[0]["lr"])
        else:
            restored = series.restore(state := self.state[0])
            step, self.counter = restored.step if restored else -1, state["count"]
        if not all(torch.equal(*pair) for pair in self._expected(self.counter)):
            raise Wrong(f"mixed: {self.counter}, {[tensor for tensor, _ in self._expected(0)]}")
        return step


# --- histories --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A program that resumes, unless it only looks, and then does something several times.

    Attributes:
        acts: of `SAVES`, "export", or one of `LOOKS`.
        kill: the rank that is killed, at which of its calls, and whether the machine loses power then.
        fault: the error of calls, the first that fails, and how many.
        beside: "reader" or "writer": another program at the same time.
    """

    ranks: int = 1
    acts: tuple[str, ...] = ()
    keep_last: int = 2
    keep_every: int | None = None
    kill: tuple[int, int, bool] | None = None
    fault: tuple[int, int, int] | None = None
    signal_at: int = 0
    beside: str = ""

    @property
    def looks(self) -> bool:
        return not {*self.acts}.isdisjoint(LOOKS)


SAVES = ("save", "save", "replace", "async", "async, not waited for")
LOOKS = ("verify", "verify newest", "inspect", "reshard")


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


Event = Program | Damage | Pause


def is_in_store(seed: str) -> bool:
    return random.Random(f"{seed} store").random() < 0.25


def drawn(seed: str) -> tuple[Event, ...]:
    dice, in_store = random.Random(f"{seed} history"), is_in_store(seed)
    events = list[Event]()
    for _ in range(dice.choice((2, 2, 3))):
        events.append(_event(dice, in_store, dice.random() if events else 1.0))
        if isinstance(events[-1], Damage) and dice.random() < 0.5:
            events.append(_disturbed(Program(acts=("verify",)), dice, in_store))
    return tuple(events)


def _event(dice: random.Random, in_store: bool, kind: float) -> Event:
    if kind < 0.06:
        return Pause(dice.choice((1, 30)))
    if kind < 0.16:
        return Damage(dice.randrange(8), dice.randrange(8), dice.random(), dice.choice(("byte", "byte", "cut", "lost")))
    if kind < 0.28:
        return _disturbed(Program(acts=(dice.choice(LOOKS),)), dice, in_store)
    acts = [dice.choice((*SAVES, "export") if at else SAVES) for at in range(dice.choice((0, 1, 1, 2, 2, 3)))]
    ranks, limits = dice.choice((1, 1, 1, 1, 2, 2, 3, 4)), (dice.choice((1, 1, 2, 3)), dice.choice((None, None, 2)))
    return _disturbed(Program(ranks, tuple(acts), *limits), dice, in_store)


def _disturbed(program: Program, dice: random.Random, in_store: bool) -> Program:
    calls = 60 if program.looks else 70 + 50 * len(program.acts)
    match dice.randrange(8):
        case 0 | 1 | 2:
            return replace(program, kill=(dice.randrange(program.ranks), dice.randint(1, calls), dice.random() < 0.6))
        case 3 | 4:
            numbers = [number for number, kinds in KINDS.items() if ("ask" in kinds) == in_store]
            at = dice.choice((dice.randint(0, 12), dice.randint(0, calls)))
            return replace(program, fault=(dice.choice(numbers), at, dice.choice((1, 1, 2, 5, 1000))))
        case 5 if not program.looks:
            return replace(program, beside=dice.choice(("reader", "writer")))
        case 6 if not program.looks:
            return replace(program, signal_at=dice.randint(1, calls))
    return program


# --- the oracle -------------------------------------------------------------------------------------------------------


@dataclass
class Attempt:
    """A save that has begun.

    Attributes:
        outcomes: what each rank knows of it: "saved", "refused" or "unknown".
        damaged: whether any byte of it was changed; ``is_cut``: in a way that the sizes of files show.
        is_gone: whether it was removed for later ones.
    """

    step: int
    counter: int
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
    def is_refused(self) -> bool:
        """True if the save has told everybody that there is nothing of it."""
        return bool(self.outcomes) and {*self.outcomes.values()} == {"refused"}


def _outcome(error: Exception) -> str:
    return "unknown" if isinstance(error, UnsyncedError | muonckpt.LostRankError) else "refused"


class Oracle:
    """Runs a history, and raises `Wrong` at the first thing that is not as promised."""

    def __init__(self, seed: str) -> None:
        self.machine = Machine(seed, ROOT)
        self.disk = self.machine.disk
        kinds = random.Random(f"{seed} disk")
        self.disk.orders_names, self.are_objects = kinds.random() < 0.5, kinds.random() < 0.25
        self.is_store = is_in_store(seed)
        self.base = f"{PROTOCOL}://store" if self.is_store else ROOT
        self.folder = f"{self.base}/run"
        self.attempts: dict[int, Attempt] = {}
        self.written: dict[str, tuple[Attempt, bool]] = {}
        """Exports and resharded checkpoints of an event, of which saves, and whether they are acknowledged."""
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

    @property
    def newest(self) -> Attempt | None:
        """The newest save that has to be there."""
        there = [each for each in self.attempts.values() if each.acknowledged and not (each.damaged or each.is_gone)]
        return max(there, key=lambda attempt: attempt.key, default=None)

    # --- what is in the folders -------------------------------------------------------------------------------------

    def _names(self, folder: str) -> list[str]:
        """The names in a folder of the machine."""
        if self.is_store:
            prefix = f"store/{folder}/"
            below = [path.removeprefix(prefix) for path in self.machine.store.objects if path.startswith(prefix)]
            return sorted({path.partition("/")[0] for path in below})
        with self.machine.unseen():
            place = Path(ROOT, folder)
            return sorted(entry.name for entry in place.iterdir()) if place.exists() else []

    def _read(self, file: str) -> bytes:
        """The bytes of a file.

        Raises:
            OSError, KeyError: it is not there.
        """
        with self.machine.unseen():
            return self.machine.store.objects[f"store/{file}"][0] if self.is_store else Path(ROOT, file).read_bytes()

    def _steps(self) -> dict[StepName, Attempt]:
        """The published steps in the folder of the run, and the save of which each is by its manifest."""
        steps = {}
        for name in filter(None, map(StepName.parsed, self._names("run"))):
            files = {*self._names(f"run/{name}")}
            if files >= {*DESCRIPTIONS} and MARK not in files:
                with contextlib.suppress(ValueError):
                    manifest = json.loads(self._read(f"run/{name}/muonckpt.json"))
                    steps[name] = self.attempts[manifest["provenance"]["counter"]]
        return steps

    def _note_removals(self, keep_last: int) -> None:
        """Note which saves are gone for a reason: so many later ones are there, and are not known to be damaged."""
        there = self._steps()
        for attempt in self.attempts.values():
            if attempt.acknowledged and attempt.key not in there:
                later = {name.step for name, each in there.items() if name > attempt.key and not each.is_cut}
                attempt.is_gone |= len(later) >= keep_last or attempt.step in later

    # --- programs ---------------------------------------------------------------------------------------------------

    def _program(self, program: Program) -> None:
        besides = {"": [], "reader": [replace(program, ranks=1, acts=())], "writer": [replace(program, ranks=1)]}
        self._do([program, *besides[program.beside]])
        if program.looks:
            self._do([Program(acts=("inspect",))])
        # Whatever has happened, what was acknowledged is there, and the folder can be used.
        if program.kill or program.fault or program.beside:
            self._do([Program(acts=program.acts if program.looks else ())])
            if program.fault or (program.kill and program.kill[2]):
                self._do([Program(acts=("verify newest",))])
        self._look_at_written()

    def _do(self, programs: Sequence[Program]) -> None:
        machine, first, kills = self.machine, programs[0], self.machine.kills
        machine.fault = Fault(*first.fault) if first.fault else None
        self._is_calm = not first.fault
        tasks = []
        for program in programs:
            counters = range(100 * self.programs + 100, 100 * self.programs + 200)
            work = partial(self._look, program.acts[0]) if program.looks else partial(self._train, program, counters)
            tasks.append(machine.start(f"program {self.programs}", program.ranks, work))
            self.programs += 1
        if first.kill:
            rank, at, loses_power = first.kill
            process = tasks[0][rank].process
            process.kill_at, process.loses_power = at, loses_power
        tasks[0][0].process.signal_at = first.signal_at
        machine.run()
        self._was_struck, machine.fault = bool(machine.fault and machine.fault.hits), None
        if machine.schedule.is_hung:
            raise Wrong("hung")
        is_disturbed = machine.kills > kills or self._was_struck
        if machine.schedule.time_outs and not is_disturbed:
            raise Wrong("ranks waited for each other")
        self._note_removals(first.keep_last)
        for attempt in self.attempts.values() if machine.kills == kills else ():
            if len({*attempt.outcomes.values()}) > 1:
                raise Wrong(f"ranks disagree about step {attempt.step}: {attempt.outcomes}")
        may_fail = is_disturbed or len(programs) > 1 or self.is_damaged
        for task in (task for of_program in tasks for task in of_program):
            if isinstance(task.error, Wrong):
                raise task.error
            is_ours = isinstance(task.error, muonckpt.MuonckptError) and may_fail
            if not (task.error is None or isinstance(task.error, Killed | SystemExit) or is_ours):
                raise Wrong(f"rank {task.process.rank} of {task.process.name}: {task.trace}")
        result = tasks[0][0].result
        if callable(result):
            result()
        elif len(programs) == 1 and not self.is_store and result is not None:
            self._refuse_leftovers(first, result)

    def _train(self, program: Program, counters: Sequence[int], rank: int) -> int | None:
        """What a rank of a program does; return the last step if nothing has disturbed its save."""
        values = Values(rank, program.ranks, self.are_objects)
        limits = {"keep_last": program.keep_last, "keep_every": program.keep_every}
        series = muonckpt.Series(self.folder, *values.objects, **limits, on=(15,) if program.signal_at else ())  # type: ignore[arg-type]
        step = self._resume(series, values)
        pending: list[tuple[Attempt, Any]] = []
        is_saved, goes_on = True, True

        def settle(outcome: str) -> None:
            nonlocal is_saved
            if pending:
                pending.pop()[0].end(rank, outcome)
                is_saved = outcome == "saved"

        for counter, act in zip(counters, program.acts, strict=False):
            hits = self._hits
            if act == "export":
                if is_saved and not pending:
                    export = partial(series.export, step, "hf")
                    self._write(f"export-{counter}", self.attempts[values.counter], export)
                continue
            replaces = act == "replace" and step >= 0
            step += is_saved and not replaces
            attempt = self.attempts.setdefault(counter, Attempt(step, counter))
            values.set(counter)
            note = {"provenance": {"counter": counter}}
            try:
                if act.startswith("async"):
                    saving = series.async_save(step, *values.state, **note)  # type: ignore[arg-type]
                    settle("saved")  # the one before has ended well if this begins
                    attempt.place(saving.path)
                    pending.append((attempt, saving))
                    if act == "async":
                        saving.result()
                        settle("saved")
                else:
                    saved = series.save(step, *values.state, replace=replaces, **note)  # type: ignore[arg-type]
                    settle("saved")
                    attempt.place(saved.path)
                    attempt.end(rank, "saved")
                    is_saved = True
            except SystemExit:
                settle("saved")
                attempt.end(rank, "saved")
                raise
            except muonckpt.MuonckptError as error:
                is_of_pending = bool(pending) and pending[0][1].done() and pending[0][1].future.exception() is error
                if is_of_pending:
                    settle(_outcome(error))
                if not attempt.outcomes.get(rank):
                    attempt.end(rank, "refused" if is_of_pending else _outcome(error))
                is_saved, goes_on = False, goes_on and not isinstance(error, muonckpt.LostRankError)
                if not goes_on or self._is_calm:
                    raise
        is_clean = not pending and is_saved and program.acts and hits == self._hits
        series.close()
        settle("saved")
        return step if is_clean else None

    @property
    def _hits(self) -> int:
        return self.machine.fault.hits if self.machine.fault else 0

    def _resume(self, series: muonckpt.Series, values: Values) -> int:
        """Resume, and return the step."""
        expected = self.newest
        try:
            step = values.resume(series)
        except muonckpt.DamageError as error:
            if expected:
                raise Wrong(f"lost: step {expected.step}: {error}") from error
            raise
        if step < 0:
            if expected:
                raise Wrong(f"lost: step {expected.step}, and the run begins at 0")
            return -1
        attempt = self.attempts.get(values.counter)
        if attempt is None or attempt.step != step:
            raise Wrong(f"invented: step {step}, {values.counter}")
        # A save that was killed has not said where it is.
        attempt.number = next((name.attempt for name, each in self._steps().items() if each is attempt), attempt.number)
        if expected and attempt.key < expected.key:
            raise Wrong(f"older: {attempt.key}, expected {expected.key}")
        if attempt.is_refused:
            raise Wrong(f"step {step} was refused, and is there")
        return step

    def _refuse_leftovers(self, program: Program, saved: int) -> None:
        """The folder has nothing but what is to be kept, after a save that nothing has disturbed."""
        there = self._steps()
        steps = [name.step for name in there if name.step <= saved]
        recent = [rf"\.step-{attempt.step:08}.*" for attempt in self.attempts.values() if attempt.step > saved]
        expected = "|".join([*map(str, there), "resumes", r"\.muonckpt-verified", *recent])
        if rest := [name for name in self._names("run") if not re.fullmatch(expected, name)]:
            raise Wrong(f"left behind: {rest}")
        keep_last, keep_every = program.keep_last, program.keep_every
        extra = [step for step in sorted(steps)[:-keep_last] if not (keep_every and step % keep_every == 0)]
        if not self.is_damaged and extra:
            raise Wrong(f"not removed: steps {extra} of {steps}, keep_last={keep_last}, keep_every={keep_every}")

    # --- exports and resharded checkpoints --------------------------------------------------------------------------

    def _write(self, name: str, attempt: Attempt, write: Callable[[str], object]) -> None:
        """Write a checkpoint of a step elsewhere; what is there is looked at when all programs have ended."""
        self.written.setdefault(name, (attempt, False))
        try:
            write(f"{self.base}/{name}")
        except muonckpt.MuonckptError as error:
            if self._is_calm or isinstance(error, muonckpt.LostRankError | Interrupted):
                raise
        else:
            self.written[name] = attempt, True

    def _look_at_written(self) -> None:
        """Each is whole, or is not there."""
        for name, (attempt, is_acknowledged) in self.written.items():
            if not is_acknowledged and (self.is_store or not self._names(name)):
                continue
            if name.startswith("export"):
                files = [file for file in self._names(name) if file.endswith(".safetensors")]
                [loaded] = [safetensors.torch.load(self._read(f"{name}/{file}")) for file in files]
                counter = int(loaded["alike"][0])
                if not (torch.equal(loaded["cut"], _rows(counter)) and torch.equal(loaded["alike"], _vector(counter))):
                    raise Wrong(f"{name} is mixed: {loaded}")
            else:
                counter = self._resumed(name.partition("/")[0])
            if self.attempts[counter].step != attempt.step:
                raise Wrong(f"{name} is of {counter}, expected {attempt}")
        self.written.clear()

    def _resumed(self, folder: str) -> int:
        """Resume from the only step in a folder, and return of which save it is."""

        def resume(rank: int) -> int:
            values = Values(0, 1, self.are_objects)
            values.resume(muonckpt.Series(f"{self.base}/{folder}", *values.objects))
            return values.counter

        [task] = self.machine.start("resharded", 1, resume)
        self.machine.run()
        if task.error is not None or task.result == 0:
            raise Wrong(f"{folder} is not whole: {task.trace}")
        if not self.is_store and (rest := {*self._names(folder)} - {"step-00000000", "resumes"}):
            raise Wrong(f"left behind: {rest}")
        return int(task.result)

    # --- programs that only look ------------------------------------------------------------------------------------

    def _look(self, act: str, rank: int) -> Callable[[], None] | None:
        """Do it, and return a check of what it has said, for when all has ended; None where nothing is there."""
        if not self._names("run"):
            return None
        if act == "inspect":
            try:
                history = muonckpt.look_at_run(self.folder)
            except muonckpt.SourceError as error:
                if self.newest:
                    raise Wrong(f"inspect: {error}") from error
                return None
            return partial(self._check_inspection, history)
        if act == "reshard":
            if self.newest is None:
                return None
            # Once more to the same place, unless something is there.
            name = next(iter(self.written), f"resharded-{self.programs}/step-00000000")
            if self._names(name):
                name = f"resharded-{self.programs}/step-00000000"
            source = f"{self.folder}/{StepName(*self.newest.key)}"
            self._write(name, self.newest, partial(muonckpt.reshard, source, mesh={"dp": 3}))
            return None
        return partial(self._check_verdicts, [*muonckpt.verify_run(self.folder, every=act == "verify", jobs=1)])

    def _check_verdicts(self, verdicts: Sequence[Any]) -> None:
        for verdict, attempt in self._known([(each.step.name, each) for each in verdicts]):
            if verdict.is_whole == attempt.damaged and not (self._was_struck and not verdict.is_whole):
                raise Wrong(f"false verdict of {verdict.step.name}: {verdict.sentence or verdict.step.state}")

    def _check_inspection(self, history: Any) -> None:
        """The sizes of files, and the records of verifications, have to be true."""
        for step, attempt in self._known([(each.name, each) for each in history.steps]):
            if step.verified is not None and step.verified.is_whole == attempt.damaged:
                raise Wrong(f"false record of {step.name}: {step.verified}")
            if step.is_complete == attempt.is_cut and not self._was_struck:
                raise Wrong(f"false state of {step.name}: {step.state}, {step.fault}")

    def _known(self, named: Sequence[tuple[str, Any]]) -> list[tuple[Any, Attempt]]:
        """What is said of steps that are there; a store may keep a part of a save that nobody has been told of."""
        steps = {str(name): attempt for name, attempt in self._steps().items()}
        pairs = [(each, steps[name]) for name, each in named if name in steps]
        return [(each, attempt) for each, attempt in pairs if attempt.acknowledged or attempt.damaged]

    # --- damage -----------------------------------------------------------------------------------------------------

    def _damage(self, event: Damage) -> None:
        steps = sorted(self._steps().items())
        if not steps:
            return
        name, attempt = steps[event.step % len(steps)]
        files = [file for file in self._names(f"run/{name}") if file.endswith(".distcp")]
        if not files:
            return
        file = f"run/{name}/{files[event.file % len(files)]}"
        data = self._read(file)
        places = [at for row in _rows(attempt.counter) if (at := data.find(row.numpy().tobytes())) >= 0]
        is_byte = event.how == "byte" and bool(places)
        at = places[int(event.place * len(places))] if is_byte else int(event.place * len(data))
        damaged = data[:at] + (bytes([data[at] ^ 1]) + data[at + 1 :] if is_byte else b"")
        attempt.damaged = self.is_damaged = True
        attempt.is_cut |= not is_byte

        def damage(rank: int) -> None:
            path, objects = Path(ROOT, file), self.machine.store.objects
            if self.is_store:
                del objects[f"store/{file}"]
            elif event.how == "lost":
                path.unlink()
            if event.how != "lost":
                if self.is_store:
                    self.machine.store.put(f"store/{file}", damaged)
                else:
                    handle = os.open(path, os.O_RDWR)
                    os.pwrite(handle, damaged, 0)
                    os.ftruncate(handle, len(damaged))
                    os.fsync(handle)
                    os.close(handle)
            if not self.is_store:
                sync_directory(path.parent)

        self.machine.start("damage", 1, damage)
        self.machine.run()


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


def shrunk(seed: str, events: tuple[Event, ...]) -> tuple[Event, ...]:
    """A shorter history that fails as well."""
    while smaller := next((each for each in _smaller(events) if fault_of(seed, each)), None):
        events = smaller
    return events


def _smaller(events: tuple[Event, ...]) -> list[tuple[Event, ...]]:
    found = [events[:at] + events[at + 1 :] for at in range(len(events))]
    for at, event in enumerate(events):
        if isinstance(event, Program):
            acts = event.acts
            fewer = [replace(event, acts=acts[:number] + acts[number + 1 :]) for number in range(len(acts))]
            fewer += [replace(event, ranks=event.ranks - 1)] if event.ranks > 1 and not event.kill else []
            fewer += [replace(event, fault=None)] if event.fault else []
            found += [(*events[:at], each, *events[at + 1 :]) for each in fewer]
    return found
