"""Histories of a run, each drawn from one seed; and the oracle, which knows what was acknowledged."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

import muonckpt
from muonckpt.names.errors import Interrupted, UnsyncedError
from muonckpt.runs.step_folder import DESCRIPTIONS
from muonckpt.store.io.new_file import write_synced
from muonckpt.store.io.publish import MARK, sync_directory
from muonckpt.store.verify.step_names import StepName

from .machine import KINDS, Fault, Hung, Killed, Machine, Task
from .store import PROTOCOL

ROWS = 6

VALUES: dict[str, Callable[[int], Tensor]] = {
    "cut": lambda counter: torch.arange(ROWS * 3, dtype=torch.float32).view(ROWS, 3) + 100 * counter,
    "alike": lambda counter: torch.full((4,), float(counter)),
}
"""The tensors of a save: every element tells of which save it is."""


class Wrong(Exception):
    """The oracle has found something."""


# --- histories --------------------------------------------------------------------------------------------------------

SAVES = ("save", "replace", "async", "async, not waited for")
LOOKS = ("verify", "verify newest", "inspect", "reshard")


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
        return _disturbed(Program(acts=(dice.choice(LOOKS),)), dice, in_store)
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
        is_damaged: whether any byte of it was changed; ``is_cut``: in a way that the sizes of files show.
        is_gone: whether it was removed for later ones.
    """

    name: Any
    counter: int
    outcomes: dict[int, str] = field(default_factory=dict)
    is_damaged: bool = False
    is_cut: bool = False
    is_gone: bool = False

    @property
    def is_acknowledged(self) -> bool:
        return "saved" in self.outcomes.values()


class Training:
    """One rank of a program: a matrix that is cut by rows, and a vector that all have; with momenta of the same values.

    The series gets model and optimizer, or their state dicts.
    """

    def __init__(self, oracle: Oracle, rank: int = 0, ranks: int = 1) -> None:
        self.oracle, self.rank = oracle, rank
        length = -(-ROWS // ranks)
        self.rows = slice(rank * length, (rank + 1) * length)
        mesh = DeviceMesh("cpu", torch.arange(ranks)) if ranks > 1 else None
        self.model, self.momenta = nn.Module(), dict[str, Tensor]()
        self.elements: list[tuple[str, Tensor]] = []
        for name in VALUES:
            setattr(self.model, name, nn.Parameter(self._new(name, mesh)))
            self.momenta[name] = self._new(name, mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9)
        for name, parameter in self.model.named_parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = self.momenta[name]
        self.set(0)
        self.pending: tuple[Attempt, Any] | None = None
        self.is_saved = True

    def _new(self, name: str, mesh: DeviceMesh | None) -> Tensor:
        """Make a tensor, and note its elements of this rank."""
        elements = torch.zeros_like(self._value(name, 0))
        self.elements.append((name, elements))
        if mesh is None or name != "cut":
            return elements
        shape = torch.Size((ROWS, 3))
        return DTensor.from_local(elements, mesh, [Shard(0)], run_check=False, shape=shape, stride=(3, 1))

    def _value(self, name: str, counter: int) -> Tensor:
        return VALUES[name](counter)[self.rows if name == "cut" else ...]

    def set(self, counter: int) -> None:
        self.optimizer.param_groups[0]["lr"], self.counter = float(counter), counter
        for name, tensor in self.elements:
            tensor.copy_(self._value(name, counter))

    @property
    def state(self) -> tuple[dict[str, Any], ...]:
        """What a save and a resume take beside the objects."""
        if self.oracle.are_objects:
            return ()
        return ({"model": self.model.state_dict(), "momenta": self.momenta, "count": self.counter},)

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
        if not all(torch.equal(tensor, self._value(name, self.counter)) for name, tensor in self.elements):
            raise Wrong(f"mixed: {self.counter}, {self.elements}")

    def act(self, act: str, counter: int) -> None:
        """Save or export; a program whose calls fail goes on after an error, unless a rank was lost."""
        try:
            self._export(counter) if act == "export" else self._save(act, counter)
        except muonckpt.MuonckptError as error:
            if not self.oracle.machine.fault.times or isinstance(error, Interrupted):
                raise

    def _export(self, counter: int) -> None:
        if self.is_saved and not self.pending:
            export = partial(self.series.export, self.step, "hf")
            self.oracle.write(f"export-{counter}", self.oracle.attempts[self.counter], export)

    def _save(self, act: str, counter: int) -> None:
        replaces = act == "replace" and self.step >= 0
        self.step += self.is_saved and not replaces
        attempt = self.oracle.attempts.setdefault(counter, Attempt(StepName(self.step, 0), counter))
        self.set(counter)
        save = self.series.async_save if act.startswith("async") else self.series.save
        try:
            saving = save(self.step, *self.state, provenance={"counter": counter}, replace=replaces)
            self.settle("saved")  # the one before has ended well if this begins
            attempt.name, self.pending = StepName.parsed(saving.path.rpartition("/")[2]), (attempt, saving)
            if act == "async":
                saving.result()
        except SystemExit:  # after the save that a signal has asked for
            self.settle("saved")
            attempt.outcomes[self.rank] = "saved"
            raise
        except muonckpt.MuonckptError as error:
            outcome = "unknown" if isinstance(error, UnsyncedError | muonckpt.LostRankError) else "refused"
            if self.pending and self.pending[1].done() and self.pending[1].future.exception() is error:
                self.settle(outcome)
                outcome = "refused"  # this one has not begun
            attempt.outcomes.setdefault(self.rank, outcome)
            self.is_saved = False
            raise
        if act != "async, not waited for":
            self.settle("saved")

    def settle(self, outcome: str) -> None:
        """Note how the save that has begun has ended."""
        if self.pending:
            self.pending[0].outcomes[self.rank] = outcome
            self.pending, self.is_saved = None, outcome == "saved"


# --- the oracle -------------------------------------------------------------------------------------------------------


class Oracle:
    """Runs a history, and raises `Wrong` at the first thing that is not as promised.

    Attributes:
        attempts: the saves that have begun, by their counters.
        written: exports and resharded checkpoints of an event: of which saves, and whether they are acknowledged.
    """

    def __init__(self, seed: str, root: str) -> None:
        self.root, self.machine = root, Machine(seed, root)
        kinds = random.Random(f"{seed} disk")
        self.machine.disk.orders_names, self.are_objects = kinds.random() < 0.5, kinds.random() < 0.25
        self.is_store = is_in_store(seed)
        self.base = f"{PROTOCOL}://store" if self.is_store else root
        self.folder = f"{self.base}/run"
        self.attempts: dict[int, Attempt] = {}
        self.written: dict[str, tuple[Attempt, bool]] = {}
        self.programs = 0

    def happen(self, event: Event) -> None:
        match event:
            case Pause():
                self.machine.pass_time(3600 * event.hours + 1)
            case Damage():
                self._damage(event)
            case Program():
                self._run(event)
                if event.looks:
                    self._run(Program(acts=("inspect",)))
                # Whatever has happened, what was acknowledged is there, and the folder can be used.
                if event.kill or event.fault or event.beside:
                    self._run(Program(acts=event.acts if event.looks else ()))
                    if event.fault or (event.kill and event.kill[2]):
                        self._run(Program(acts=("verify newest",)))
                self._look_at_written()

    @property
    def newest(self) -> Attempt | None:
        """The newest save that has to be there."""
        there = [each for each in self.attempts.values() if each.is_acknowledged]
        there = [each for each in there if not (each.is_damaged or each.is_gone)]
        return max(there, key=lambda attempt: attempt.name, default=None)

    # --- what is in the folders -------------------------------------------------------------------------------------

    def _names(self, folder: str) -> list[str]:
        """The names in a folder of the machine."""
        if self.is_store:
            prefix = f"store/{folder}/"
            below = [path.removeprefix(prefix) for path in self.machine.objects if path.startswith(prefix)]
            return sorted({path.partition("/")[0] for path in below})
        with self.machine.unseen():
            place = Path(self.root, folder)
            return sorted(entry.name for entry in place.iterdir()) if place.exists() else []

    def _read(self, file: str) -> bytes:
        with self.machine.unseen():
            return self.machine.objects[f"store/{file}"][0] if self.is_store else Path(self.root, file).read_bytes()

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
            if attempt.is_acknowledged and attempt.name not in there:
                later = {name.step for name, each in there.items() if name > attempt.name and not each.is_cut}
                attempt.is_gone |= len(later) >= keep_last or attempt.name.step in later

    # --- programs ---------------------------------------------------------------------------------------------------

    def _run(self, program: Program) -> None:
        """Run a program, and the one beside it; compare what has come of it with what is promised."""
        machine, kills = self.machine, self.machine.kills
        programs = [program]
        if program.beside:
            programs.append(replace(program, ranks=1, acts=program.acts if program.beside == "writer" else ()))
        tasks: list[Task] = []
        for each in programs:
            work = partial(self._look, each.acts[0]) if each.looks else partial(self._train, each, self.programs)
            tasks += machine.start(f"program {self.programs}", each.ranks, work)
            self.programs += 1
        if program.kill:
            rank, at, loses_power = program.kill
            process = tasks[rank].process
            process.kill_at, process.loses_power = at, loses_power
        tasks[0].process.signal_at = program.signal_at
        machine.fault = Fault(*program.fault or ())
        machine.run()
        is_killed, is_struck = machine.kills > kills, machine.fault.hits > 0
        machine.fault = Fault()
        self._note_removals(program.keep_last)
        for attempt in () if is_killed else self.attempts.values():
            if len({*attempt.outcomes.values()}) > 1:
                raise Wrong(f"ranks disagree about {attempt.name}: {attempt.outcomes}")
        is_disturbed = is_killed or is_struck or program.beside or self._is_damaged
        allowed = (Killed, SystemExit, *((muonckpt.MuonckptError,) if is_disturbed else ()))
        for task in tasks:
            if isinstance(task.error, Wrong):
                raise task.error
            if task.error is not None and not isinstance(task.error, allowed):
                raise Wrong(f"rank {task.process.rank} of {task.process.name}: {task.trace}")
        saved = tasks[0].result
        if not (program.beside or self.is_store or saved is None or is_killed):
            self._refuse_leftovers(program, saved)

    @property
    def _is_damaged(self) -> bool:
        return any(attempt.is_damaged for attempt in self.attempts.values())

    def _train(self, program: Program, number: int, rank: int) -> int | None:
        """What a rank of a program does; return the last step if nothing has disturbed its save."""
        training, fault = Training(self, rank, program.ranks), self.machine.fault
        self._resume(training, program)
        hits = -1  # before the last save
        for at, act in enumerate(program.acts):
            hits = hits if act == "export" else fault.hits
            training.act(act, 100 * number + 100 + at)
        is_clean = not training.pending and training.is_saved and hits == fault.hits
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
        if extra and not self._is_damaged:
            raise Wrong(f"not removed: steps {extra} of {steps}, keep_last={keep_last}, keep_every={keep_every}")

    # --- exports and resharded checkpoints --------------------------------------------------------------------------

    def write(self, name: str, attempt: Attempt, write: Callable[[str], object]) -> None:
        """Write a checkpoint of a step elsewhere; what is there is looked at when all programs have ended."""
        self.written.setdefault(name, (attempt, False))
        write(f"{self.base}/{name}")
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
            training = Training(self)
            training.resume(f"{self.base}/{folder}")
            return training.counter

        [task] = self.machine.start("resharded", 1, resume)
        self.machine.run()
        if task.error is not None or task.result == 0:
            raise Wrong(f"{folder} is not whole: {task.trace}")
        if not self.is_store and (rest := {*self._names(folder)} - {"step-00000000", "resumes"}):
            raise Wrong(f"left behind: {rest}")
        return int(task.result)

    # --- programs that only look ------------------------------------------------------------------------------------

    def _look(self, act: str, rank: int) -> None:
        if act == "reshard":
            self._reshard()
        elif self._names("run"):
            try:
                if act == "inspect":
                    self._inspect()
                else:
                    self._verify(act == "verify")
            except muonckpt.SourceError as error:
                if self.newest:
                    raise Wrong(f"{act}: {error}") from error

    def _inspect(self) -> None:
        steps = muonckpt.look_at_run(self.folder).steps
        for step, attempt in self._known({each.name: each for each in steps}):
            if step.verified is not None and step.verified.is_whole == attempt.is_damaged:
                raise Wrong(f"false record of {step.name}: {step.verified}")
            if step.is_complete == attempt.is_cut and not self.machine.fault.hits:
                raise Wrong(f"false state of {step.name}: {step.state}, {step.fault}")

    def _verify(self, every: bool) -> None:
        verdicts = muonckpt.verify_run(self.folder, every=every, jobs=1)
        for verdict, attempt in self._known({each.step.name: each for each in verdicts}):
            if verdict.is_whole == attempt.is_damaged and (verdict.is_whole or not self.machine.fault.hits):
                raise Wrong(f"false verdict of {verdict.step.name}: {verdict.sentence or verdict.step.state}")

    def _known(self, said: dict[str, Any]) -> Iterator[tuple[Any, Attempt]]:
        """What is said of steps that are there; a store may keep a part of a save that nobody has been told of."""
        for name, attempt in self._steps().items():
            if str(name) in said and (attempt.is_acknowledged or attempt.is_damaged):
                yield said[str(name)], attempt

    def _reshard(self) -> None:
        if self.newest is None:
            return
        # Once more to the same place, unless something is there.
        name = next(iter(self.written), "")
        if not name or self._names(name):
            name = f"resharded-{self.programs}/step-00000000"
        self.write(name, self.newest, partial(muonckpt.reshard, f"{self.folder}/{self.newest.name}", mesh={"dp": 3}))

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
        attempt.is_damaged = True
        attempt.is_cut |= not is_byte
        self.machine.start("damage", 1, lambda rank: self._change(file, None if event.how == "lost" else damaged))
        self.machine.run()

    def _change(self, file: str, data: bytes | None) -> None:
        if self.is_store:
            del self.machine.objects[f"store/{file}"]
            if data is not None:
                self.machine.put(f"store/{file}", data)
        else:
            path = Path(self.root, file)
            path.unlink()
            if data is not None:
                write_synced(path, data)
            sync_directory(path.parent)


def history(seed: str, events: Sequence[Event]) -> str:
    """Run a history, and return a digest of all its calls, with what they wrote."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        TemporaryDirectory(prefix="muonckpt-machine-", dir="/dev/shm") as folder,
    ):
        oracle = Oracle(seed, f"{folder}/top")
        for event in events:
            oracle.happen(event)
        return oracle.machine.trace.hexdigest()


def fault_of(seed: str, events: Sequence[Event]) -> str | None:
    """What is wrong with a history; None if nothing is."""
    try:
        history(seed, events)
    except (Wrong, Hung) as wrong:
        return str(wrong)
    return None


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
