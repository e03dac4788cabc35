"""The memory of nodes, as a series uses it: copies of its run that descend from what it has saved, and no others."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ...checkpoint.all_ranks import is_coordinator
from ...checkpoint.async_saving import AsyncSave, Lane, OnError
from ...checkpoint.node_copies import CopyOnNodes, NodeCopy, Nodes, find_copies, folders_in, remove_copies
from ...checkpoint.node_recovery import load_copy
from ...checkpoint.resume_check import LoadedState
from ...names.errors import DamageError, SourceError, warn_on_rank
from ...names.resumption import LoadReport
from ...programs.signs import METADATA_FILE
from ...record.record import MANIFEST_FILE, Manifest
from ...store.io.checksums import xxh3_128
from ...store.io.limits import check_description
from ...store.io.location import Location
from ...store.io.regular import open_regular, read_text_file
from ...store.verify.run import StepName
from ..step_folder import Newest, StepFolder

DESCENT = "descent"
"""The key of a `Descent` in the provenance of what a series with memory saves and copies."""

_REWRITES = {"exported", "merged", "resharded", "salvaged"}
"""Keys in the provenance of a checkpoint that a command has written: its state may be another than the one saved."""

_MAX_LINES = 256


class Line(NamedTuple):
    """A part of a run's history: the steps that a series has taken since it was restored, up to one of them.

    Attributes:
        number: no smaller than those of lines that began before; see `NodeMemory.begin_line`.
        token: random, or the digest of a checkpoint that records no history.
        step: the last step.
    """

    number: int
    token: str
    step: int


@dataclass(frozen=True, slots=True)
class Descent:
    """The history of a state, by which branches of a run are told apart.

    Attributes:
        lines: the lines that led to it, oldest first; the last of them ends with the state itself.
        save: the end of the newest save in that history; None if there is none.
        damaged: names of newer checkpoints that were damaged when the last line began.
    """

    lines: tuple[Line, ...]
    save: Line | None = None
    damaged: tuple[str, ...] = ()

    @classmethod
    def parsed(cls, provenance: Mapping[str, Any]) -> Descent | None:
        """Return the descent that a provenance records, whoever has written it; None if there is none."""
        try:
            fields = provenance[DESCENT]
            lines = [_line(*line) for line in fields["lines"]]
            save = None if fields["save"] is None else _line(*fields["save"])
            return cls(tuple(lines), save, tuple(map(str, fields["damaged"]))) if lines else None
        except (KeyError, TypeError, ValueError):
            return None

    @classmethod
    def of_checkpoint(cls, path: Location, step: int) -> Descent | None:
        """Return the descent of a checkpoint on disk, with itself as its newest save; None if it cannot be read.

        A checkpoint that records none, or that of another step, begins a history under the digest of its description.
        """
        # The description is enough, and is read even where elements are damaged.
        provenance: Mapping[str, Any] = {}
        try:
            if (path / MANIFEST_FILE).exists():
                text = read_text_file(path / MANIFEST_FILE)
                provenance = Manifest.from_json(text).provenance
            else:  # stock DCP's, of a trainer
                with open_regular(path / METADATA_FILE) as file:
                    check_description(path / METADATA_FILE, file.size)
                    text = file.read(0, file.size)
        except (SourceError, OSError):
            return None
        # What a command has rewritten may be another state than the one that its descent tells of.
        descent = None if provenance.keys() & _REWRITES else cls.parsed(provenance)
        if descent is None or descent.lines[-1].step != step:
            descent = cls((Line(0, xxh3_128([text]), step),))
        return replace(descent, save=descent.lines[-1])

    def includes(self, state: Line) -> bool:
        """Return whether a state, the end of this line, is in the history, or is this one."""
        return any(line[:2] == state[:2] and line.step >= state.step for line in self.lines)

    def as_json(self) -> dict[str, Any]:
        return {"lines": self.lines, "save": self.save, "damaged": self.damaged}


def _line(number: object, token: object, step: object) -> Line:
    if type(number) is not int or type(token) is not str or type(step) is not int:
        raise TypeError("not a line")
    return Line(number, token, step)


@dataclass(frozen=True, slots=True)
class Saves:
    """The checkpoints of a run from the newest whole one on, which decide what copies in memory are of use.

    Attributes:
        step, path, descent: of the newest whole one; -1, empty and None if there is none.
        damaged: newer ones by name, each with its descent; None where that cannot be read.
    """

    step: int = -1
    path: str = ""
    descent: Descent | None = None
    damaged: Mapping[StepName, Descent | None] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, folder: StepFolder, newest: Newest) -> Saves:
        """Read what the newest whole checkpoint of a folder and newer ones record; no elements."""

        def descent_of(name: StepName) -> Descent | None:
            path = folder.path(name)
            return Descent.of_checkpoint(path, name.step) if (path / MANIFEST_FILE).exists() else None

        damaged = {name: descent_of(name) for name in newest.faults}
        if newest.name is None:
            return cls(damaged=damaged)
        return cls(newest.name.step, str(folder.path(newest.name)), descent_of(newest.name), damaged)

    @classmethod
    def of_trainer(cls, step: int, path: Location | None) -> Saves:
        """Return a checkpoint that a trainer has saved by itself, without a descent if nothing is known of it."""
        return cls(step) if path is None else cls(step, str(path), Descent.of_checkpoint(path, step))

    def fault(self, copy: CopyOnNodes) -> str | None:
        """Return why a copy is not to be restored beside these checkpoints; None if it is to be preferred."""
        # What is on disk is newer: nothing is won by the copy.
        if copy.step < self.step:
            return self.age_fault(copy)
        descent = Descent.parsed(copy.provenance)
        if descent is None or descent.lines[-1].step != copy.step:
            return "it does not record from which save it descends"
        # A user who has gone back to an older checkpoint has left the branch of newer copies.
        if self.descent is not None and not descent.includes(self.descent.lines[-1]):
            return f"it does not descend from {self.path}, so it is of a branch that was left"
        # A damaged checkpoint may be of a branch that the copy knows nothing of, and would be lost with it.
        for name, saved in self.damaged.items():
            if saved is None:  # only its name tells whether it is the save that the copy descends from
                is_related = descent.save is not None and descent.save.step == name.step
            else:
                is_related = descent.includes(saved.lines[-1]) or saved.includes(descent.lines[-1])
            if not is_related and str(name) not in descent.damaged:
                return f"it does not descend from {name}, which is damaged but newer than what else there is on disk"
        return self._loss(descent)

    def age_fault(self, copy: CopyOnNodes) -> str | None:
        """Return why a copy is too old, as far as steps alone tell; None if it is not."""
        return f"it is older than {self.path or f'step {self.step}'}" if copy.step < self.step else None

    def _loss(self, descent: Descent) -> str | None:
        """Return a sentence if the newest save in a copy's history is gone: somebody has moved it, to go back."""
        if descent.save is None or descent.save.step <= self.step:
            return None
        # A damaged save is still there: nobody has taken it away.
        for name, saved in self.damaged.items():
            if saved.includes(descent.save) if saved is not None else name.step == descent.save.step:
                return None
        return f"the run does not go on from the save of step {descent.save.step}, from which it descends"


class NodeMemory:
    """A folder in shared memory on each node; in it, one for each run.

    It keeps the history of what the series trains; the first rank's is recorded.

    Args:
        folder: on this rank's node.
    """

    def __init__(self, folder: Path, process_group: dist.ProcessGroup | None) -> None:
        self._folder = folder
        self._group = process_group
        self._used: Path | None = None
        """The folder of this run, once it was looked at or written to."""
        self._copies: set[StepName] = set()
        """Names of the copies that this series has made or restored."""
        self._descent: Descent | None = None
        """The history of the state that the series has last restored, saved or copied."""
        self._last_number = 0
        """The greatest number of a line that was seen."""
        self._parents: list[tuple[int, Location]] = []
        """Checkpoints that a trainer has saved or loaded since the last copy, by step."""

    @cached_property
    def _nodes(self) -> Nodes:
        """Asked for once, by all ranks."""
        return Nodes.sharing(self._folder, self._group)

    @staticmethod
    def new_name(step: int) -> StepName:
        """Return a name that no copy had before, so that parts of two copies are never taken for one."""
        return StepName(step, 2 + secrets.randbelow(2**48 - 2))

    # --- The history that saves and copies record

    def begin_line(self, origin: Descent | None, damaged: Iterable[StepName], number: int) -> None:
        """Begin a line of steps behind a state that was restored, or behind none.

        Args:
            damaged: checkpoints that are newer, but damaged.
            number: twice that of the run's last recorded resume, and one more if this is none of the record.
        """
        # Numbers of lines only grow, so that the newest line is found even where clocks differ.
        past = origin or Descent(())
        self._last_number = max([self._last_number, number, *(line.number for line in past.lines)])
        self._extend(replace(past, damaged=tuple(map(str, damaged))))

    def _extend(self, past: Descent) -> None:
        line = Line(self._last_number, secrets.token_hex(8), -1)
        self._descent = replace(past, lines=(*past.lines[-_MAX_LINES:], line))

    def descent_of_save(self, step: int) -> Mapping[str, Any]:
        """Return what the provenance of a save records."""
        descent = self._reached(step)
        if descent.save == descent.lines[-1]:  # the step is saved anew, so another state may replace it
            descent = self._forked(step)
        return {DESCENT: descent.as_json()}

    def descent_of_copy(self, step: int) -> Mapping[str, Any]:
        """Return what the provenance of a copy records."""
        # A trainer's save may have failed, so it counts from when it is there.  The one before is its past.
        for parent_step, path in self._parents:
            if (parent := Descent.of_checkpoint(path, parent_step)) is not None:
                past = () if self._descent is None else self._descent.lines
                self._extend(replace(parent, lines=(*past, *parent.lines)))
        self._parents.clear()
        return {DESCENT: self._reached(step).as_json()}

    def record_parent(self, step: int, path: Location) -> None:
        """Let copies from now on descend from a checkpoint that a trainer has saved or loaded, if it is there then."""
        if is_coordinator(self._group):
            self._parents.append((step, path))

    def note_published(self, step: int) -> None:
        """Let copies from now on descend from the save of a step that was recorded last."""
        if self._descent is not None and self._descent.lines[-1].step == step:
            self._descent = replace(self._descent, save=self._descent.lines[-1])

    def _reached(self, step: int) -> Descent:
        """Return the history up to a new step, on another line if the run has gone back without a restore."""
        # A run that was never restored begins its first line here.
        if self._descent is None:
            self._extend(Descent(()))
        assert self._descent is not None, "it has begun"
        *past, line = self._descent.lines
        if step < line.step:
            return self._forked(step)
        self._descent = replace(self._descent, lines=(*past, line._replace(step=step)))
        return self._descent

    def _forked(self, step: int) -> Descent:
        """Return the history up to a step that the process has reached anew, without what it stored from there on."""
        assert self._descent is not None, "it has begun"
        # Lines are cut before that step, as what they led to will be another state; so is the newest save.
        lines = (line._replace(step=min(line.step, step - 1)) for line in self._descent.lines)
        save = self._descent.save
        self._extend(replace(self._descent, lines=tuple(lines), save=save if save and save.step < step else None))
        return self._reached(step)

    # --- Copies

    def copy(
        self,
        lane: Lane,
        run: str,
        name: StepName,
        state_dict: Mapping[str, Any],
        provenance: Mapping[str, Any],
        on_error: OnError,
    ) -> AsyncSave:
        """Copy a state in the thread of a lane that is free; ``run`` and ``name`` are the same on all ranks."""
        if self._used is None and None in self._nodes.partners and is_coordinator(self._group):
            warn_on_rank(
                f"all ranks are on one node, or have one folder, {self._folder}: copies outlive the processes that "
                "train, but not the node",
                RuntimeWarning,
            )
        # The copy is this series' from now on, even if it fails: `end` looks for what has become of it.
        self._used = self._folder / run
        self._copies.add(name)
        write = partial(NodeCopy, self._used, name, self._nodes)
        details = {**provenance, **self.descent_of_copy(name.step)}
        return lane.submit(state_dict, str(self._used / str(name)), details, on_error, write, lambda: None)

    def find(self, run: str | None) -> list[CopyOnNodes]:
        """Return the copies of a run, those of the newest lines first.  Collective; warns as `find_copies`."""
        if run is not None:
            self._used = self._folder / run
        # The newest line counts before the newest step: a run that went back has fewer steps, and is meant.
        copies = find_copies(self._folder, run, self._nodes, self._group)

        def age(copy: CopyOnNodes) -> tuple[int, int, StepName]:
            descent = Descent.parsed(copy.provenance) or Descent((Line(0, "", 0),))
            return descent.lines[-1].number, len(descent.lines), copy.name

        self._last_number = max([self._last_number, *(number for number, _, _ in map(age, copies))])
        return sorted(copies, key=age, reverse=True)

    def load(
        self,
        copies: list[CopyOnNodes],
        fault: Callable[[CopyOnNodes], str | None],
        state_dict: dict[str, Any],
        allow_extra: bool | Iterable[str],
        fresh: Iterable[str],
    ) -> tuple[CopyOnNodes, tuple[LoadReport, LoadedState]] | None:
        """Load the first of these copies without a fault that turns out to be whole; None if there is none.

        Collective; raises as `load_copy`.  Warns of each copy that is passed over, and takes those that it has tried
        from the list.
        """
        # A copy may turn out to be damaged only when it is read; then the next one is tried.
        for copy in [copy for copy in copies if fault(copy) is None]:
            copies.remove(copy)
            try:
                loaded = load_copy(state_dict, copy, self._nodes, self._group, allow_extra=allow_extra, fresh=fresh)
            except DamageError as error:
                _warn(f"{copy} is not taken: {error.fault}")
                continue
            # A newer one that is passed over needs a reason that its owner can read.
            for other in copies:
                if other.step > copy.step:
                    _warn(f"{other} is not taken: {fault(other) or f'the run has left that branch, for {copy}'}")
            self._copies.add(copy.name)
            return copy, loaded
        # None is left to take, so all of them are told.
        for copy in copies:
            _warn(f"{copy} is not taken: {fault(copy)}")
        return None

    def end(self, saved: int) -> None:
        """Remove copies that are no newer than a saved step; on this node, without asking others."""
        if self._used is None or not self._nodes.leads:
            return
        # What is saved needs no copy, and memory outlives the process.
        try:
            remove_copies(self._used, lambda name: name is None or name.step <= saved)
            names = [StepName.parsed(path.name) for path in folders_in(self._used)]
            if self._used.exists() and not any(self._used.iterdir()):
                self._used.rmdir()
        except OSError as error:
            _warn(f"cannot remove what was copied to {self._used}: {error.strerror or error}")
            return
        # Copies of branches that were left are not taken again.
        newer = [self._used / str(name) for name in sorted(self._copies.intersection(names))]
        if newer and is_coordinator(self._group):
            _warn(
                f"{newer[-1]} is newer than all that was saved: started again on these nodes, the run goes on from "
                "there; else save the last step, so that it is removed"
            )


def _warn(message: str) -> None:
    warn_on_rank(message, RuntimeWarning)
