"""Every system call of what changes the disk may fail, or be the last one before a kill or a loss of power."""

from __future__ import annotations

import json
import random
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import interposed
from support.acts import Wrong, acts, in_new_folders
from support.trials import SCALE, SEED, count, tally

pytestmark = pytest.mark.skipif(interposed.NO_COMPILER is not None, reason=interposed.NO_COMPILER or "")


IN_SUITE = ("save", "series", "reshard", "to safetensors", *(act.name for act in in_new_folders(Path())))
"""`make trust` tries all acts."""


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """The folder of the acts, and what came of the trials."""
    folder = tmp_path_factory.mktemp("faults")
    names = IN_SUITE if SCALE == 0 else ()
    lines = interposed.script("faulted.py", folder, count(1, 400), SEED, *names, timeout=24 * 3600).splitlines()
    return folder / "base", [json.loads(line) for line in lines]


def test_a_system_call_that_fails_or_is_the_last_one_loses_nothing(tried):
    by_act = defaultdict(list)
    for act, *trial in tried[1]:
        by_act[act].append(trial)
    for act, trials in by_act.items():
        with tally(f"system calls: {act}") as row:
            for what, fault, seconds, hung in trials:
                row.add(what, fault, seconds, hung)
    assert len(by_act) == (len(IN_SUITE) if SCALE == 0 else len(acts(tried[0])))


# --- what a disk may hold after a loss of power -----------------------------------------------------------------------
#
# Recorded calls are replayed, with any of those lost that nothing had synced.  The model is the weakest that POSIX
# allows, but for two things that file systems do give: a rename happens or does not, and what happened to one file or
# to one name happened in order.  What was written to a file is safe when the file was synced, a name in a directory
# when the directory was.

Tree = dict[str, bytes | None]
"""Content of files by path below a folder; None: a directory."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that changed the disk; paths are relative to the folder."""

    name: str
    path: str
    other: str
    number: int
    data: bytes


def recorded(log: bytes, folder: Path) -> list[Call]:
    """The calls of a log of `system_calls.c`."""
    calls, at = [], 0
    while at < len(log):
        end = log.index(b"\n", at)
        name, path, other, number, length = log[at:end].decode().split("\t")
        at = end + 1 + int(length)
        calls.append(Call(name, *(_below(each, folder) for each in (path, other)), int(number), log[end + 1 : at]))
        at += 1
    return calls


def _below(path: str, folder: Path) -> str:
    return path.removeprefix(str(folder)).lstrip("/").removesuffix(" (deleted)")


@dataclass(eq=False, slots=True)
class _Node:
    """A file, or a directory with names."""

    names: dict[str, _Node] | None = None


@dataclass(frozen=True, eq=False, slots=True)
class _Effect:
    """What one call did.

    Attributes:
        names: (directory, name, what it stands for since then, or None) of directories.
        written: (file, offset, data): data at an offset; of None: the size that it has since then.
        synced_by: what has to be synced to make it safe.
    """

    names: tuple[tuple[_Node, str, _Node | None], ...] = ()
    written: tuple[_Node, int, bytes | None] | None = None
    synced_by: _Node | None = None


@dataclass(slots=True)
class History:
    """Effects of calls in order, from what was safe in the beginning.

    Attributes:
        safe: for each effect, after how many effects it was synced; None: never.
    """

    root: _Node = field(default_factory=lambda: _Node({}))
    effects: list[_Effect] = field(default_factory=list)
    safe: list[int | None] = field(default_factory=list)

    @classmethod
    def of(cls, before: Tree, calls: Sequence[Call]) -> History:
        made = cls()
        for path, data in sorted(before.items()):
            made._add(Call("mkdir" if data is None else "open", path, "", 0, b""))
            if data:
                made._add(Call("write", path, "", 0, data))
        made.safe = [0] * len(made.effects)
        made.begun = len(made.effects)
        for call in calls:
            made._add(call)
        return made

    begun: int = 0

    def _add(self, call: Call) -> None:
        if call.name == "sync":
            node = self._find(call.path)
            for number, effect in enumerate(self.effects):
                if effect.synced_by is node and self.safe[number] is None:
                    self.safe[number] = len(self.effects)
            return
        for effect in self._effects(call):
            for folder, name, node in effect.names:
                assert folder.names is not None
                folder.names.pop(name, None)
                if node is not None:
                    folder.names[name] = node
            self.effects.append(effect)
            self.safe.append(None)

    def _effects(self, call: Call) -> Iterator[_Effect]:
        folder, name = self._place(call.path)
        here = (folder.names or {}).get(name)
        match call.name:
            case "mkdir":
                yield _Effect(((folder, name, _Node({})),), synced_by=folder)
            case "open":
                if here is None:
                    yield _Effect(((folder, name, _Node()),), synced_by=folder)
                elif call.number:  # O_TRUNC
                    yield _Effect(written=(here, 0, None), synced_by=here)
            case "unlink":
                yield _Effect(((folder, name, None),), synced_by=folder)
            case "rename":
                to, new = self._place(call.other)
                yield _Effect(((folder, name, None), (to, new, here)), synced_by=to)
            case "link":
                to, new = self._place(call.other)
                yield _Effect(((to, new, here),), synced_by=to)
            case "write":
                assert here is not None, call
                yield _Effect(written=(here, call.number, call.data), synced_by=here)
            case "cut" | "extend":
                assert here is not None, call
                yield _Effect(written=(here, call.number, None), synced_by=here)
            case _:
                raise ValueError(f"unknown call {call}")

    def _find(self, path: str) -> _Node:
        node = self.root
        for part in Path(path).parts:
            assert node.names is not None
            node = node.names[part]
        return node

    def _place(self, path: str) -> tuple[_Node, str]:
        folder, _, name = path.rpartition("/")
        return self._find(folder), name

    def states(self, dice: random.Random) -> Iterator[tuple[str, Tree, bool]]:
        """What the disk may hold: in words, the files, and whether all calls had returned before; each once.

        At each call: with all that was not synced, with none of it, without or with one of it alone, or with any part
        of it, the last write whole or half of it.
        """
        seen = set()
        for stop in range(len(self.effects), self.begun - 1, -1):
            pending = [at for at in range(stop) if (safe := self.safe[at]) is None or safe > stop]
            kept = [at for at in range(stop) if at not in set(pending)]
            parts = [set(pending), set[int](), *({at} for at in pending), *(set(pending) - {at} for at in pending)]
            parts += [{at for at in pending if dice.random() < 0.5} for _ in range(len(pending))]
            for part in parts:
                for torn in (None, *sorted(part)[-1:]):  # what was safe is not torn
                    tree = self._tree(sorted([*kept, *part]), torn)
                    done = stop == len(self.effects)
                    if (key := (done, *sorted(tree.items(), key=lambda item: item[0]))) not in seen:
                        seen.add(key)
                        yield f"after {stop} of {len(self.effects)} with {sorted(part)}", tree, done

    def _tree(self, effects: Sequence[int], torn: int | None) -> Tree:
        names: dict[_Node, dict[str, _Node]] = {self.root: {}}
        content: dict[_Node, bytearray] = {}
        for at in effects:
            effect = self.effects[at]
            for folder, name, node in effect.names:
                names.setdefault(folder, {}).pop(name, None)
                if node is not None:
                    names[folder][name] = node
            if effect.written:
                node, offset, data = effect.written
                held = content.setdefault(node, bytearray())
                if data is None:
                    held[:] = held[:offset].ljust(offset, b"\0")
                else:
                    part = data[: len(data) // 2] if at == torn else data
                    held[:] = held.ljust(offset, b"\0")
                    held[offset : offset + len(part)] = part
        tree: Tree = {}

        def walk(folder: _Node, path: str) -> None:
            for name, node in names.get(folder, {}).items():
                tree[f"{path}{name}"] = None if node.names is not None else bytes(content.get(node, b""))
                if node.names is not None:
                    walk(node, f"{path}{name}/")

        walk(self.root, "")
        return tree


def tree_of(folder: Path) -> Tree:
    entries = sorted(folder.rglob("*"))
    return {str(each.relative_to(folder)): None if each.is_dir() else each.read_bytes() for each in entries}


def laid_out(tree: Tree, folder: Path) -> None:
    """Make these files in a new folder."""
    folder.mkdir()
    for path, data in sorted(tree.items()):
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)


def test_after_a_loss_of_power_there_is_the_old_checkpoint_or_the_new_one(tried, tmp_path):
    base, _ = tried
    dice = random.Random(SEED)
    for act in acts(base):
        log = base / "logs" / act.name
        if not log.exists() or not log.stat().st_size:
            continue  # of several ranks, or nothing was changed
        here = tmp_path / "here"
        here.mkdir()
        act.before(here)
        before = tree_of(here)
        shutil.rmtree(here)
        history = History.of(before, recorded(log.read_bytes(), base / "here"))
        states = list(history.states(dice))
        ended = [state for state in states if state[2]]  # all of them: what a caller has been told is there stays
        states = states[len(ended) :]
        chosen = dice.sample(states, min(count(6, 400), len(states)))
        with tally(f"loss of power: {act.name}") as row:
            for what, tree, done in [*ended, *chosen]:
                laid_out(tree, here)
                row.add(what, wrong(act, here, done))
                shutil.rmtree(here)


def wrong(act, here, done: bool) -> str | None:
    try:
        act.check(here, done)
    except Wrong as error:
        return str(error)
    except Exception as error:
        return f"afterwards: {type(error).__name__}: {error}"
    return None
