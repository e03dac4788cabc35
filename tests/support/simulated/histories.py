"""Histories of a run, each drawn from one seed; and the oracle, which knows what was acknowledged."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
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

VALUES: dict[str, Callable[[int], Tensor]] = {
    "cut": lambda counter: torch.arange(ROWS * 3, dtype=torch.float32).view(ROWS, 3) + 100 * counter,
    "alike": lambda counter: torch.full((4,), float(counter)),
}
"""The tensors of a save: every element tells of which save it is."""

ROOT = f"/dev/shm/muonckpt-histories-{os.getpid():010}"


class Wrong(Exception):
    """The oracle has found something."""


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
        return _disturbed(Program(acts=(dice.choice([*LOOKS]),)), dice, in_store)
    saves = ("save", *SAVES)
    acts = [dice.choice((*saves, "export") if at else saves) for at in range(dice.choice((0, 1, 1, 2, 2, 3)))]
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


# --- one rank that trains ---------------------------------------------------------------------------------------------


@dataclass
class Attempt:
    """A save that has begun.

    Attributes:
        name: of its step; attempt 0 if nobody has been told which it is.
        outcomes: what each rank knows of it: "saved", "refused" or "unknown".
        damaged: whether any byte of it was changed; ``is_cut``: in a way that the sizes of files show.
        is_gone: whether it was removed for later ones.
    """

    name: StepName
    counter: int
    acknowledged: bool = False
    outcomes: dict[int, str] = field(default_factory=dict)
    damaged: bool = False
    is_cut: bool = False
    is_gone: bool = False

    def place(self, path: str) -> None:
        name = StepName.parsed(path.rpartition("/")[2])
        assert name is not None and name.step == self.name.step, path
        self.name = name

    def end(self, rank: int, outcome: str) -> None:
        self.outcomes[rank] = outcome
        self.acknowledged |= outcome == "saved"


class Training:
    """One rank of a program: a matrix that is cut by rows, and a vector that all have; with momenta of the same values.

    The series gets model and optimizer, or their state dicts.
    """

    def __init__(self, oracle: Oracle, program: Program, rank: int) -> None:
        self.oracle, self.rank = oracle, rank
        length = -(-ROWS // program.ranks)
        self.rows = slice(rank * length, (rank + 1) * length)
        cut = torch.zeros(ROWS, 3)[self.rows]
        if program.ranks > 1:
            mesh, shape = DeviceMesh("cpu", torch.arange(program.ranks)), torch.Size((ROWS, 3))
            cut = DTensor.from_local(cut, mesh, [Shard(0)], run_check=False, shape=shape, stride=(3, 1))
        self.model = nn.Module()
        self.model.cut, self.model.alike = nn.Parameter(cut), nn.Parameter(torch.zeros(4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9)
        for parameter in self.model.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.set(0)
        self.pending: tuple[Attempt, Any] | None = None
        self.is_saved = True

    def _expected(self, counter: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's elements, and their values in a save."""
        for name, parameter in self.model.named_parameters():
            value = VALUES[name](counter)[self.rows if name == "cut" else ...]
            for tensor in (parameter.detach(), self.optimizer.state[parameter]["momentum_buffer"]):
                yield tensor.to_local() if isinstance(tensor, DTensor) else tensor, value

    def set(self, counter: int) -> None:
        self.optimizer.param_groups[0]["lr"], self.counter = float(counter), counter
        for tensor, value in self._expected(counter):
            tensor.copy_(value)

    @property
    def state(self) -> tuple[dict[str, Any], ...]:
        """What a save and a resume take beside the objects."""
        if self.oracle.are_objects:
            return ()
        momenta = {name: self.optimizer.state[each]["momentum_buffer"] for name, each in self.model.named_parameters()}
        return ({"model": self.model.state_dict(), "momenta": momenta, "count": self.counter},)

    def resume(self, folder: str, **options: Any) -> None:
        """Begin with the newest step of a folder.

        Raises:
            Wrong: it is of several saves.
        """
        objects = (self.model, self.optimizer) if self.oracle.are_objects else ()
        self.series: Any = muonckpt.Series(folder, *objects, **options)
        if objects:
            self.step = self.series.resume() - 1
            self.counter = int(self.optimizer.param_groups[0]["lr"])
        else:
            restored = self.series.restore(state := self.state[0])
            self.step, self.counter = restored.step if restored else -1, state["count"]
        if not all(torch.equal(*pair) for pair in self._expected(self.counter)):
            raise Wrong(f"mixed: {self.counter}, {[tensor for tensor, _ in self._expected(0)]}")

    # --- what it does -----------------------------------------------------------------------------------------------

    def act(self, act: str, counter: int) -> None:
        if act == "export":
            if self.is_saved and not self.pending:
                export = partial(self.series.export, self.step, "hf")
                self.oracle.write(f"export-{counter}", self.oracle.attempts[self.counter], export)
            return
        replaces = act == "replace" and self.step >= 0
        self.step += self.is_saved and not replaces
        attempt = self.oracle.attempts.setdefault(counter, Attempt(StepName(self.step, 0), counter))
        self.set(counter)
        try:
            SAVES[act](self, attempt, *((True,) if replaces else ()))
        except SystemExit:
            self.settle("saved")
            attempt.end(self.rank, "saved")
            raise
        except muonckpt.MuonckptError as error:
            self._note_refusal(attempt, error)
            if isinstance(error, muonckpt.LostRankError) or self.oracle.is_calm:
                raise

    def save(self, attempt: Attempt, replaces: bool = False) -> None:
        note = {"provenance": {"counter": attempt.counter}}
        saved = self.series.save(attempt.name.step, *self.state, replace=replaces, **note)
        self.settle("saved")
        attempt.place(saved.path)
        attempt.end(self.rank, "saved")
        self.is_saved = True

    def begin_save(self, attempt: Attempt) -> None:
        note = {"provenance": {"counter": attempt.counter}}
        saving = self.series.async_save(attempt.name.step, *self.state, **note)
        self.settle("saved")  # the one before has ended well if this begins
        attempt.place(saving.path)
        self.pending = attempt, saving

    def save_async(self, attempt: Attempt) -> None:
        self.begin_save(attempt)
        assert self.pending is not None
        self.pending[1].result()
        self.settle("saved")

    def settle(self, outcome: str) -> None:
        if self.pending:
            self.pending[0].end(self.rank, outcome)
            self.pending, self.is_saved = None, outcome == "saved"

    def _note_refusal(self, attempt: Attempt, error: Exception) -> None:
        outcome = "unknown" if isinstance(error, UnsyncedError | muonckpt.LostRankError) else "refused"
        if self.pending and self.pending[1].done() and self.pending[1].future.exception() is error:
            self.settle(outcome)
            outcome = "refused"  # this one has not begun
        attempt.outcomes.setdefault(self.rank, outcome)
        self.is_saved = False


SAVES: dict[str, Callable[..., None]] = {
    "save": Training.save,
    "replace": Training.save,
    "async": Training.save_async,
    "async, not waited for": Training.begin_save,
}


# --- the oracle -------------------------------------------------------------------------------------------------------


class Oracle:
    """Runs a history, and raises `Wrong` at the first thing that is not as promised.

    Attributes:
        attempts: the saves that have begun, by their counters.
        written: exports and resharded checkpoints of an event: of which saves, and whether they are acknowledged.
        is_calm: whether no call fails.
    """

    def __init__(self, seed: str) -> None:
        self.machine = Machine(seed, ROOT)
        kinds = random.Random(f"{seed} disk")
        self.machine.disk.orders_names, self.are_objects = kinds.random() < 0.5, kinds.random() < 0.25
        self.is_store = is_in_store(seed)
        self.base = f"{PROTOCOL}://store" if self.is_store else ROOT
        self.folder = f"{self.base}/run"
        self.attempts: dict[int, Attempt] = {}
        self.written: dict[str, tuple[Attempt, bool]] = {}
        self.programs = 0
        self.is_damaged = False

    def happen(self, event: Event) -> None:
        match event:
            case Program():
                self._program(event)
            case Pause():
                self.machine.pass_time(3600 * event.hours + 1)
            case Damage():
                self._damage(event)

    @property
    def newest(self) -> Attempt | None:
        """The newest save that has to be there."""
        there = [each for each in self.attempts.values() if each.acknowledged and not (each.damaged or each.is_gone)]
        return max(there, key=lambda attempt: attempt.name, default=None)

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
            if attempt.acknowledged and attempt.name not in there:
                later = {name.step for name, each in there.items() if name > attempt.name and not each.is_cut}
                attempt.is_gone |= len(later) >= keep_last or attempt.name.step in later

    # --- programs ---------------------------------------------------------------------------------------------------

    def _program(self, program: Program) -> None:
        beside = {"": [], "reader": [replace(program, ranks=1, acts=())], "writer": [replace(program, ranks=1)]}
        self._do(program, *beside[program.beside])
        if program.looks:
            self._do(Program(acts=("inspect",)))
        # Whatever has happened, what was acknowledged is there, and the folder can be used.
        if program.kill or program.fault or program.beside:
            self._do(Program(acts=program.acts if program.looks else ()))
            if program.fault or (program.kill and program.kill[2]):
                self._do(Program(acts=("verify newest",)))
        self._look_at_written()

    def _do(self, first: Program, *others: Program) -> None:
        machine, kills = self.machine, self.machine.kills
        machine.fault = Fault(*first.fault) if first.fault else None
        self.is_calm = not first.fault
        tasks = []
        for program in (first, *others):
            counters = range(100 * self.programs + 100, 100 * self.programs + 200)
            work = partial(LOOKS[program.acts[0]], self) if program.looks else partial(self._train, program, counters)
            tasks.append(machine.start(f"program {self.programs}", program.ranks, work))
            self.programs += 1
        if first.kill:
            rank, at, loses_power = first.kill
            process = tasks[0][rank].process
            process.kill_at, process.loses_power = at, loses_power
        tasks[0][0].process.signal_at = first.signal_at
        machine.run()
        self.was_struck, machine.fault = self._hits > 0, None
        if machine.schedule.is_hung:
            raise Wrong("hung")
        is_disturbed = machine.kills > kills or self.was_struck
        if machine.schedule.time_outs and not is_disturbed:
            raise Wrong("ranks waited for each other")
        self._note_removals(first.keep_last)
        for attempt in self.attempts.values() if machine.kills == kills else ():
            if len({*attempt.outcomes.values()}) > 1:
                raise Wrong(f"ranks disagree about {attempt.name}: {attempt.outcomes}")
        allowed = (muonckpt.MuonckptError,) if is_disturbed or others or self.is_damaged else ()
        for task in (task for of_program in tasks for task in of_program):
            if isinstance(task.error, Wrong):
                raise task.error
            if not isinstance(task.error, (type(None), Killed, SystemExit, *allowed)):
                raise Wrong(f"rank {task.process.rank} of {task.process.name}: {task.trace}")
        result = tasks[0][0].result
        if callable(result):
            result()
        elif not (others or self.is_store or result is None or machine.kills > kills):
            self._refuse_leftovers(first, result)

    @property
    def _hits(self) -> int:
        return self.machine.fault.hits if self.machine.fault else 0

    def _train(self, program: Program, counters: Sequence[int], rank: int) -> int | None:
        """What a rank of a program does; return the last step if nothing has disturbed its save."""
        training = Training(self, program, rank)
        self._resume(training, program)
        hits = -1  # before the last save
        for counter, act in zip(counters, program.acts, strict=False):
            hits = hits if act == "export" else self._hits
            training.act(act, counter)
        is_clean = not training.pending and training.is_saved and hits == self._hits
        training.series.close()
        training.settle("saved")
        return training.step if is_clean else None

    def _resume(self, training: Training, program: Program) -> None:
        """Resume, and compare the step with what was acknowledged before."""
        limits = {"keep_last": program.keep_last, "keep_every": program.keep_every}
        expected = self.newest
        try:
            training.resume(self.folder, **limits, on=(15,) if program.signal_at else ())
        except muonckpt.DamageError as error:
            if expected:
                raise Wrong(f"lost: {expected.name}: {error}") from error
            raise
        if training.step < 0:
            if expected:
                raise Wrong(f"lost: {expected.name}, and the run begins at 0")
            return
        attempt = self.attempts.get(training.counter)
        if attempt is None or attempt.name.step != training.step:
            raise Wrong(f"invented: step {training.step}, {training.counter}")
        # A save that was killed has not said where it is.
        attempt.name = next((name for name, each in self._steps().items() if each is attempt), attempt.name)
        if expected and attempt.name < expected.name:
            raise Wrong(f"older: {attempt.name}, expected {expected.name}")
        if {*attempt.outcomes.values()} == {"refused"}:
            raise Wrong(f"{attempt.name} was refused, and is there")

    def _refuse_leftovers(self, program: Program, saved: int) -> None:
        """The folder has nothing but what is to be kept, after a save that nothing has disturbed."""
        there = self._steps()
        steps = [name.step for name in there if name.step <= saved]
        later = [attempt.name.step for attempt in self.attempts.values() if attempt.name.step > saved]
        recent = [rf"\.step-{step:08}.*" for step in later]
        expected = "|".join([*map(str, there), "resumes", r"\.muonckpt-verified", *recent])
        if rest := [name for name in self._names("run") if not re.fullmatch(expected, name)]:
            raise Wrong(f"left behind: {rest}")
        keep_last, keep_every = program.keep_last, program.keep_every
        extra = [step for step in sorted(steps)[:-keep_last] if not (keep_every and step % keep_every == 0)]
        if not self.is_damaged and extra:
            raise Wrong(f"not removed: steps {extra} of {steps}, keep_last={keep_last}, keep_every={keep_every}")

    # --- exports and resharded checkpoints --------------------------------------------------------------------------

    def write(self, name: str, attempt: Attempt, write: Callable[[str], object]) -> None:
        """Write a checkpoint of a step elsewhere; what is there is looked at when all programs have ended."""
        self.written.setdefault(name, (attempt, False))
        try:
            write(f"{self.base}/{name}")
        except muonckpt.MuonckptError as error:
            if self.is_calm or isinstance(error, muonckpt.LostRankError | Interrupted):
                raise
        else:
            self.written[name] = attempt, True

    def _look_at_written(self) -> None:
        """Each is whole, or is not there."""
        for name, (attempt, is_acknowledged) in self.written.items():
            if not is_acknowledged and (self.is_store or not self._names(name)):
                continue
            read = self._exported if name.startswith("export") else self._resharded
            if self.attempts[counter := read(name)].name.step != attempt.name.step:
                raise Wrong(f"{name} is of {counter}, expected {attempt}")
        self.written.clear()

    def _exported(self, name: str) -> int:
        """Return of which save an export is."""
        [file] = [file for file in self._names(name) if file.endswith(".safetensors")]
        loaded = safetensors.torch.load(self._read(f"{name}/{file}"))
        counter = int(loaded["alike"][0])
        if not all(torch.equal(tensor, VALUES[key](counter)) for key, tensor in loaded.items()):
            raise Wrong(f"{name} is mixed: {loaded}")
        return counter

    def _resharded(self, name: str) -> int:
        """Resume from the only step in a folder, and return of which save it is."""
        folder = name.partition("/")[0]

        def resume(rank: int) -> int:
            training = Training(self, Program(), rank)
            training.resume(f"{self.base}/{folder}")
            return training.counter

        [task] = self.machine.start("resharded", 1, resume)
        self.machine.run()
        if task.error is not None or task.result == 0:
            raise Wrong(f"{folder} is not whole: {task.trace}")
        if not self.is_store and (rest := {*self._names(folder)} - {"step-00000000", "resumes"}):
            raise Wrong(f"left behind: {rest}")
        return int(task.result)

    # --- programs that only look: each returns a check of what it was told, for when all has ended --------------------

    def verify(self, every: bool, rank: int) -> Callable[[], None] | None:
        if not self._names("run"):
            return None
        verdicts = [*muonckpt.verify_run(self.folder, every=every, jobs=1)]

        def check() -> None:
            for verdict, attempt in self._known([(each.step.name, each) for each in verdicts]):
                if verdict.is_whole == attempt.damaged and not (self.was_struck and not verdict.is_whole):
                    raise Wrong(f"false verdict of {verdict.step.name}: {verdict.sentence or verdict.step.state}")

        return check

    def inspect(self, rank: int) -> Callable[[], None] | None:
        if not self._names("run"):
            return None
        try:
            history = muonckpt.look_at_run(self.folder)
        except muonckpt.SourceError as error:
            if self.newest:
                raise Wrong(f"inspect: {error}") from error
            return None

        def check() -> None:
            for step, attempt in self._known([(each.name, each) for each in history.steps]):
                if step.verified is not None and step.verified.is_whole == attempt.damaged:
                    raise Wrong(f"false record of {step.name}: {step.verified}")
                if step.is_complete == attempt.is_cut and not self.was_struck:
                    raise Wrong(f"false state of {step.name}: {step.state}, {step.fault}")

        return check

    def reshard(self, rank: int) -> None:
        if self.newest is None:
            return
        # Once more to the same place, unless something is there.
        name = next(iter(self.written), "")
        if not name or self._names(name):
            name = f"resharded-{self.programs}/step-00000000"
        self.write(name, self.newest, partial(muonckpt.reshard, f"{self.folder}/{self.newest.name}", mesh={"dp": 3}))

    def _known(self, named: Sequence[tuple[str, Any]]) -> list[tuple[Any, Attempt]]:
        """What is said of steps that are there; a store may keep a part of a save that nobody has been told of."""
        steps = {str(name): attempt for name, attempt in self._steps().items()}
        pairs = [(each, steps[name]) for name, each in named if name in steps]
        return [(each, attempt) for each, attempt in pairs if attempt.acknowledged or attempt.damaged]

    # --- damage -----------------------------------------------------------------------------------------------------

    def _damage(self, event: Damage) -> None:
        steps = sorted(self._steps().items())
        name, attempt = steps[event.step % len(steps)] if steps else (None, None)
        files = [file for file in self._names(f"run/{name}") if file.endswith(".distcp")]
        if attempt is None or not files:
            return
        file = f"run/{name}/{files[event.file % len(files)]}"
        data = self._read(file)
        rows = [row.numpy().tobytes() for row in VALUES["cut"](attempt.counter)]
        places = [place for row in rows if (place := data.find(row)) >= 0]
        is_byte = event.how == "byte" and bool(places)
        at = places[int(event.place * len(places))] if is_byte else int(event.place * len(data))
        damaged = data[:at] + (bytes([data[at] ^ 1]) + data[at + 1 :] if is_byte else b"")
        attempt.damaged = self.is_damaged = True
        attempt.is_cut |= not is_byte
        change = self._change_object if self.is_store else self._change_file
        self.machine.start("damage", 1, lambda rank: change(file, None if event.how == "lost" else damaged))
        self.machine.run()

    def _change_object(self, file: str, data: bytes | None) -> None:
        del self.machine.store.objects[f"store/{file}"]
        if data is not None:
            self.machine.store.put(f"store/{file}", data)

    def _change_file(self, file: str, data: bytes | None) -> None:
        path = Path(ROOT, file)
        path.unlink()
        if data is not None:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT)
            os.pwrite(handle, data, 0)
            os.fsync(handle)
            os.close(handle)
        sync_directory(path.parent)


LOOKS: dict[str, Callable[..., Callable[[], None] | None]] = {
    "verify": lambda oracle, rank: oracle.verify(True, rank),
    "verify newest": lambda oracle, rank: oracle.verify(False, rank),
    "inspect": Oracle.inspect,
    "reshard": Oracle.reshard,
}


def fault_of(seed: str, events: Sequence[Event]) -> str | None:
    """What is wrong with a history; None if nothing is."""
    try:
        history(seed, events)
    except Wrong as wrong:
        return str(wrong)
    return None


def history(seed: str, events: Sequence[Event]) -> str:
    """Run a history, and return a digest of all its calls, with what they wrote."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        oracle = Oracle(seed)
        for event in events:
            oracle.happen(event)
        return oracle.machine.trace.hexdigest()


def shrunk(seed: str, events: tuple[Event, ...]) -> tuple[Event, ...]:
    """A shorter history that fails as well."""
    while smaller := next((each for each in _smaller(events) if fault_of(seed, each)), None):
        events = smaller
    return events


def _smaller(events: tuple[Event, ...]) -> Iterator[tuple[Event, ...]]:
    for at, event in enumerate(events):
        before, after = events[:at], events[at + 1 :]
        yield before + after
        if isinstance(event, Program):
            acts = event.acts
            fewer = [replace(event, acts=acts[:number] + acts[number + 1 :]) for number in range(len(acts))]
            fewer += [replace(event, ranks=event.ranks - 1)] if event.ranks > 1 and not event.kill else []
            fewer += [replace(event, fault=None)] if event.fault else []
            yield from ((*before, each, *after) for each in fewer)
