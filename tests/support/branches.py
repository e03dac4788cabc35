"""A run whose processes are killed and start again elsewhere, at random; an oracle that knows its branches.

Every state is a number, and the history remembers from which state each was trained, when each was saved or copied, and
what was damaged.  So it can say which state a restart has to restore, and which it must not.
"""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muonckpt import DamageError, MuonckptError, Series
from muonckpt.store.verify.run import StepName

MANIFEST = "muonckpt.json"

FILE_HARMS: dict[str, Callable[[Path], object]] = {
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "cut": lambda path: os.truncate(path, 10),
    "missing": Path.unlink,
}
SPECIAL_HARMS: dict[str, Callable[[Path], object]] = {
    **FILE_HARMS,
    "garbage": lambda path: path.write_bytes(b"\x93garbage" * 50),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "link": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "dangling": lambda path: (path.unlink(), path.symlink_to("/nowhere")),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}


@dataclass(frozen=True)
class State:
    """A state of training; its number is its value."""

    number: int
    step: int
    parent: State | None

    def follows(self, other_state: State) -> bool:
        state: State | None = self
        while state is not None:
            if state is other_state:
                return True
            state = state.parent
        return False


@dataclass(frozen=True)
class Restart:
    """A restore: even numbers if it is recorded, odd ones between; ``damaged`` are newer saves that it passed over."""

    number: int
    damaged: frozenset[Stored] = frozenset()


@dataclass(eq=False)
class Stored:
    """A save or a copy of a state at a time; ``forks`` counts how often its process had gone back by itself."""

    name: StepName
    state: State
    time: int
    restart: Restart
    forks: int
    files: set[str] = field(default_factory=set)
    harms: set[tuple[int, str]] = field(default_factory=set)
    """Files that were damaged, with the number of the node; -1 for the disk."""
    has_history: bool = True

    def comes_before(self, other_state: Stored) -> bool:
        return other_state.time > self.time and other_state.state.follows(self.state)


class Unstorable:
    def __reduce__(self) -> str:
        raise TypeError("this cannot be saved")


class History:
    """One random history.

    Args:
        folder: empty, the same on all ranks.
        sync: waits for all ranks.
    """

    def __init__(self, folder: Path, seed: int, rank: int, world: int, nodes: int, sync: Callable[[], object]) -> None:
        self.random = random.Random(seed)
        self.folder, self.run, self.rank, self.world, self.sync = folder, folder / "run", rank, world, sync
        self.nodes = [folder / f"node{number}" for number in range(nodes)]
        self.time = self.forks = self.count = 0
        self.recorded = 0
        self.past_saves: list[Stored] = []
        self.has_memory = True
        self.visible: set[int] = set()
        self.saves: dict[StepName, Stored] = {}
        self.copies: dict[StepName, Stored] = {}
        self.state: State | None = None
        self.last_step = -1
        self.log: list[str] = []
        self.outcomes: list[str] = []

    # --- What happens

    def play(self, events: int) -> None:
        self.start()
        actions = {
            self.train: 5, self.save: 4, self.fail_to_save: 1, self.copy: 5, self.copy_and_be_killed: 1, self.start: 3,
            self.restore_again: 0.5, self.go_back: 0.7, self.harm_save: 1.5, self.harm_copy: 1.5, self.lose_node: 0.3,
            self.move_save: 0.5,
        }  # fmt: skip
        for action in self.random.choices([*actions], [*actions.values()], k=events):
            self.sync()
            action()
        self.start()

    def only_first(self, act: Callable[[], object]) -> None:
        self.sync()
        if self.rank == 0:
            act()
        self.sync()

    def tensors(self, number: int) -> dict[str, Any]:
        return {f"w{rank}": torch.full((3,), float(number)) for rank in range(self.world)}

    def train(self, steps: int = 0) -> None:
        assert self.state is not None
        self.count += 1
        self.state = State(self.count, self.state.step + (steps or self.random.randint(1, 2)), self.state)

    def reach(self, is_save: bool) -> State:
        """Note that a state is stored, and whether its process has gone back."""
        assert self.state is not None
        self.time += 1
        if self.state.step < self.last_step:
            self.forks += 1
        self.last_step = self.state.step
        return self.state

    def save(self) -> None:
        state = self.reach(True)
        names = [name for name in self.on_disk() if name.step == state.step]
        if any(self.is_whole(self.saves[name]) for name in names):
            self.forks += 1
        if self.random.random() < 0.7:
            path = self.series.save(state.step, self.tensors(state.number), replace=True).path
        else:
            saving = self.series.async_save(state.step, self.tensors(state.number), replace=True)
            saving.result()
            path = saving.path
        self.sync()
        name = StepName.parsed(Path(path).name)
        assert name is not None
        save = Stored(name, state, self.time, self.restart, self.forks, has_history=self.has_memory)
        save.files = {file.name for file in Path(path).iterdir()}
        self.saves[name] = save
        self.past_saves.append(save)
        self.log.append(f"saved {name} = {state.number}")
        self.train()

    def fail_to_save(self) -> None:
        state = self.reach(True)
        try:
            self.series.save(state.step, {"w": Unstorable()}, replace=True)
        except MuonckptError:
            self.log.append(f"failed to save {state.step}")
            self.train()
            return
        raise AssertionError("it was saved")

    def copy(self) -> None:
        if not self.has_memory:
            return
        state = self.reach(False)
        copying = self.series.async_copy(state.step, self.tensors(state.number))
        assert copying is not None
        copying.result()
        self.sync()
        ((name, _),) = {path: 0 for path in self.folders() if path not in self.copies}.items()
        copy = Stored(name, state, self.time, self.restart, self.forks)
        for node in self.visible:
            copy.files |= {file.name for file in self.place(node, name).iterdir()}
        self.copies[name] = copy
        self.log.append(f"copied {name} = {state.number} to {sorted(self.visible)}")
        self.train()

    def copy_and_be_killed(self) -> None:
        """Leave some nodes as they were before the copy, with unfinished files."""
        if not self.has_memory:
            return
        behind = [node for node in sorted(self.visible) if self.random.random() < 0.5]
        copy_folder = self.folder / "kept"

        def keep() -> None:
            for node in behind:
                if self.nodes[node].exists():
                    shutil.copytree(self.nodes[node], copy_folder / f"{node}", symlinks=True)

        def put_back() -> None:
            for node in behind:
                shutil.rmtree(self.nodes[node])
                if (copy_folder / f"{node}").exists():
                    shutil.move(copy_folder / f"{node}", self.nodes[node])
                    for run in self.nodes[node].iterdir():
                        (run / ".step-00000001.00000000000a.tmp").mkdir(exist_ok=True)

        if any(stored.harms for stored in self.copies.values()):
            return  # pipes cannot be copied
        self.only_first(keep)
        self.copy()
        self.only_first(put_back)
        self.only_first(lambda: shutil.rmtree(copy_folder, ignore_errors=True))
        self.log.append(f"killed before nodes {behind} had it")
        self.start()

    def go_back(self) -> None:
        """Go back in memory to a state before the last that was stored, and store what comes after."""
        state = self.state
        while state is not None and state.step + 1 >= self.last_step:
            state = state.parent
        if state is not None:
            self.log.append(f"went back to {state.step} = {state.number}")
            self.state = state
            self.train(1)  # a larger step does not tell where the process has gone back to
            self.random.choice([self.save, self.copy])()

    def harm_save(self) -> None:
        names = [name for name in self.on_disk() if not self.saves[name].harms]
        if names and self.random.random() < 0.7:
            name = self.random.choice(sorted(names)[-2:])
            file = self.random.choice(sorted(self.saves[name].files - {".metadata"}))
            harm = self.random.choice([*FILE_HARMS])
            self.only_first(lambda: FILE_HARMS[harm](self.run / str(name) / file))
            self.saves[name].harms.add((-1, file))
            self.log.append(f"{harm}: {file} of {name}")

    def harm_copy(self) -> None:
        places = [(node, name) for node in range(len(self.nodes)) for name in sorted(self.folders([node]))]
        if places:
            node, name = self.random.choice(places)
            harms, place = self.copies[name].harms, self.place(node, name)
            files = sorted(self.copies[name].files - {".metadata"} - {file for node_, file in harms if node_ == node})
            files = [file for file in files if (place / file).exists()]
            if files:
                file, harm = self.random.choice(files), self.random.choice([*SPECIAL_HARMS])
                self.only_first(lambda: SPECIAL_HARMS[harm](self.place(node, name) / file))
                self.copies[name].harms.add((node, file))
                self.log.append(f"{harm}: {file} of {name} on node {node}")

    def lose_node(self) -> None:
        node = self.random.randrange(len(self.nodes))
        self.only_first(lambda: shutil.rmtree(self.nodes[node], ignore_errors=True))
        self.log.append(f"lost node {node}")
        self.start()

    def move_save(self) -> None:
        names = sorted(self.on_disk())
        if names:
            self.only_first(lambda: (self.run / str(names[-1])).rename(self.folder / f"moved{self.time}"))
            self.time += 1
            del self.saves[names[-1]]
            self.log.append(f"moved {names[-1]} away")
            self.start()

    # --- What is there

    def on_disk(self) -> set[StepName]:
        return {name for path in self.run.glob("step-*") if (name := StepName.parsed(path.name)) is not None}

    def place(self, node: int, name: StepName) -> Path:
        for run in self.nodes[node].glob("*"):
            if (run / str(name)).is_dir():
                return run / str(name)
        return self.nodes[node] / "nowhere"

    def folders(self, nodes: list[int] | None = None) -> set[StepName]:
        return {
            name
            for node in (self.visible if nodes is None else nodes)
            for path in self.nodes[node].glob("*/step-*")
            if (name := StepName.parsed(path.name)) is not None
        }

    def is_whole(self, save: Stored) -> bool:
        return not save.harms

    def is_whole_copy(self, copy: Stored) -> bool:
        def is_there(file: str) -> bool:
            return any(
                (self.place(node, copy.name) / file).is_file() and (node, file) not in copy.harms
                for node in self.visible
            )

        return all(map(is_there, copy.files))

    # --- What a restart restores

    def start(self) -> None:
        """End this process in one way or the other, and start it elsewhere."""
        if self.state is not None and self.random.random() < 0.15:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.series.close()
        self.has_memory = self.random.random() < 0.85
        nodes_of_ranks = [self.random.randrange(len(self.nodes)) for _ in range(self.world)]
        self.visible = set(nodes_of_ranks)
        memory = self.nodes[nodes_of_ranks[self.rank]] if self.has_memory else None
        self.sync()
        self.series: Series = Series(self.run, keep_last=self.random.randint(1, 3), memory=memory)
        self.log.append(f"start on {sorted(self.visible) if self.has_memory else 'no memory'}")
        self.restore_again()

    def restore_again(self) -> None:
        self.sync()
        expected, doubts = self.expectation()
        self.sync()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            template = self.tensors(0)
            try:
                restored = self.series.restore(template)
            except DamageError:
                outcome: object = "no whole one"
            else:
                outcome = None if restored is None else template["w0"][0].item()
                assert len({tensor[0].item() for tensor in template.values()}) == 1
        lines = [str(warning.message) for warning in caught]
        self.log.append(f"restored {outcome}, expected {expected}")
        kind = str(outcome) if outcome in (None, "no whole one") else "memory" if restored.memory else "disk"
        self.outcomes.append(kind)
        log_text = "\n".join([*self.log, *lines])
        assert outcome == expected or outcome in doubts, log_text
        state = next((s.state for s in self.everything() if s.state.number == outcome), None)
        step = -1 if state is None else state.step
        newer = [name for name in self.on_disk() if name.step > step]
        newer += [name for name in self.folders() if name.step > step] if self.has_memory else []
        if outcome != "no whole one" and self.rank == 0:  # the first rank tells it for all
            assert all(any(str(name) in line for line in lines) for name in newer), log_text
        # From here on it is another line of steps.
        self.recorded = 2 * (self.recorded // 2) + (2 if state is not None else 1)
        whole = [name for name in self.on_disk() if self.is_whole(self.saves[name])]
        damaged = {self.saves[name] for name in self.on_disk() if not whole or name > max(whole)}
        self.restart = Restart(self.recorded, frozenset(damaged))
        self.forks, self.last_step = 0, -1
        if state is None:
            self.count += 1
            state = State(self.count, 0, None)
            self.state = state
        else:
            self.state = state
            self.train()

    def everything(self) -> Iterator[Stored]:
        yield from self.saves.values()
        yield from self.copies.values()

    def expectation(self) -> tuple[object, set[object]]:
        """Return the state to restore, and others that are right where a damaged manifest leaves doubts."""
        disk = sorted(self.on_disk())
        whole = [name for name in disk if self.is_whole(self.saves[name])]
        newest = self.saves[whole[-1]] if whole else None
        damaged = [self.saves[name] for name in disk if newest is None or name > newest.name]
        on_disk: object = newest.state.number if newest else ("no whole one" if damaged else None)
        if not self.has_memory:
            return on_disk, set()
        good = [
            copy
            for name in self.folders()
            if self.is_good(copy := self.copies[name], newest, damaged) and self.is_whole_copy(copy)
        ]
        if not good:
            return on_disk, set()
        best = max(good, key=lambda copy: (copy.restart.number, copy.forks, copy.name))
        # Processes that began with nothing leave no record, so the order of two of them is not known.
        unrecorded = [copy for copy in good if best.restart.number % 2 and copy.restart.number == best.restart.number]
        doubts: set[object] = {copy.state.number for copy in unrecorded}
        if any((-1, MANIFEST) in save.harms or not save.has_history for save in damaged):
            doubts.add(on_disk)
            doubts |= {copy.state.number for copy in good}
        return best.state.number, doubts

    def is_good(self, copy: Stored, newest: Stored | None, damaged: list[Stored]) -> bool:
        """Return whether a copy may be preferred to the newest whole save."""
        if newest is not None and not newest.comes_before(copy):
            is_same_state = newest.state is copy.state  # copied before it was saved
            if not is_same_state:
                return False
        for save in damaged:
            related = save.comes_before(copy) or copy.comes_before(save) or save.state is copy.state
            if not related and save not in copy.restart.damaged:
                return False
        parents = [save for save in self.past_saves if save.comes_before(copy)]
        if parents:
            parent = max(parents, key=lambda save: save.time)
            if newest is None or parent.state.step > newest.state.step:
                return any(save is parent or parent.comes_before(save) for save in damaged)
        return True


def play(rank: int, world: int, folder: Path, seeds: range, nodes: int, events: int = 14) -> Counter[str]:
    """Play a history for each seed on all ranks together; return how often each kind of restore was right."""
    outcomes = Counter[str]()
    for seed in seeds:
        history = History(folder / f"{seed}", seed, rank, world, nodes, dist.barrier if world > 1 else lambda: None)
        history.play(events)
        outcomes.update(history.outcomes)
        history.only_first(lambda: shutil.rmtree(folder / f"{seed}", ignore_errors=True))  # noqa: B023
    return outcomes
