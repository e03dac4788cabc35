"""Work that changes the disk, and what must hold whenever it was cut off: for `faulted.py` and for crash states."""

from __future__ import annotations

import io
import shutil
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import muonckpt
from muonckpt.cli.main import run
from muonckpt.converters.engine.run import run_job
from muonckpt.converters.engine.workers import joined
from muonckpt.store.io import publish
from support.damages import content
from support.interposed import BROKEN, CHANGED, CUT, FULL, HALF, INTERRUPTED, KILLED, READ_ONLY, TORN, Fault
from support.launched import environment
from support.resharded import plan_job
from support.trees import tree

warnings.filterwarnings("ignore")

LIMIT = 10.0
"""Seconds after which ranks give up on one that says nothing."""


class Wrong(Exception):
    """What came of a trial is not what may."""


def expect(condition: object, text: str) -> None:
    if not condition:
        raise Wrong(text)


def state(step: int) -> dict[str, Any]:
    values = torch.arange(15.0).reshape(5, 3) + step
    return {"w": values, "b": torch.full((4,), float(step)).bfloat16(), "n": torch.tensor(step), "lr": 0.1}


class Act:
    """Work on the disk.  ``here`` is an empty folder for each trial; ``base`` holds what all trials read.

    Attributes:
        source: the checkpoint that it reads, if it reads one.
        ranks: how many processes do it.
        faults: that are tried.
    """

    ranks = 1
    faults: tuple[Fault, ...] = (KILLED, TORN, BROKEN, FULL, READ_ONLY, HALF, INTERRUPTED)

    def __init__(self, name: str, base: Path) -> None:
        self.name, self.base, self.source = name, base, base / "source"

    def before(self, folder: Path) -> None:
        """Prepare the folder of a trial."""

    def do(self, folder: Path, rank: int) -> None:
        """The work; an error of ours, or a traceback."""
        raise NotImplementedError

    def check(self, folder: Path, succeeded: bool) -> None:
        """What must hold whenever nobody works; then work again, as a user would, and what must hold then."""
        raise NotImplementedError


class Make(Act):
    """Making a checkpoint, under the name ``out``: it is whole or not there."""

    def reference(self) -> Path:
        """The checkpoint that nothing disturbed."""
        if not (self.base / self.name).exists():
            (self.base / self.name).mkdir()
            self.again(self.base / self.name)
        return self.base / self.name / "out"

    def again(self, folder: Path) -> None:
        """Work once more, alone."""
        self.do(folder, 0)

    def check(self, folder: Path, succeeded: bool) -> None:
        out = folder / "out"
        expect(out.exists() or not succeeded, "it succeeded, and there is nothing")
        if out.exists():
            self._same(folder)
        strays = [entry.name for entry in folder.iterdir() if not entry.name.startswith(("out", ".out."))]
        expect(not strays, f"nobody knows what these are: {strays}")
        if not out.exists():
            self.again(folder)
            self._same(folder)

    def _same(self, folder: Path) -> None:
        if tree(folder / "out") != tree(self.reference()):
            expect(muonckpt.verify(folder / "out", jobs=1).verdict == "whole", "what was published is damaged")
            expect(content(folder / "out") == content(self.reference()), "what was published is another one")


class Save(Make):
    def do(self, folder: Path, rank: int) -> None:
        muonckpt.save(state(1), folder / "out")


class AsyncSave(Make):
    def do(self, folder: Path, rank: int) -> None:
        muonckpt.async_save(state(1), folder / "out").result()


class Rewrite(Make):
    """A command."""

    faults = (*Make.faults, CUT, CHANGED)

    def __init__(self, name: str, base: Path, *options: str) -> None:
        super().__init__(name, base)
        self.options = options

    def do(self, folder: Path, rank: int) -> None:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = run([*self.command(), str(folder / "out"), "--jobs", "1", *self.options])
        message = err.getvalue()
        if (
            code not in (0, 1, 3, 4, 5, 130)
            or "this is a bug" in message
            or "Traceback" in message
            or (code and not message)
        ):
            raise RuntimeError(f"exit code {code}: {message}")
        if code:
            raise muonckpt.MuonckptError(message)

    def command(self) -> list[str]:
        """Its name, and the sources."""
        return ["reshard", str(self.source)]


class Convert(Rewrite):
    def command(self) -> list[str]:
        return ["convert", str(self.source)]


class SaveTogether(Make):
    """A save by two ranks, of a tensor by rows."""

    ranks = 2
    faults = (KILLED, BROKEN, FULL)

    def do(self, folder: Path, rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        rows = distribute_tensor(state(1)["w"], mesh, [Shard(0)], src_data_rank=None)
        muonckpt.save({**state(1), "w": rows}, folder / "out")

    def reference(self) -> Path:
        if not (self.base / self.name).exists():
            (self.base / self.name).mkdir()
            muonckpt.save(state(1), self.base / self.name / "out")
        return self.base / self.name / "out"

    def again(self, folder: Path) -> None:
        muonckpt.save(state(1), folder / "out")

    def _same(self, folder: Path) -> None:
        expect(muonckpt.verify(folder / "out", jobs=1).verdict == "whole", "what was published is damaged")
        expect(content(folder / "out") == content(self.reference()), "what was published is another one")


class ReshardTogether(Make):
    """A reshard by two workers."""

    ranks = 2
    faults = (KILLED, BROKEN, FULL)

    def do(self, folder: Path, rank: int) -> None:
        with joined(environment(rank, 2), timeout=LIMIT) as group:
            run_job(plan_job(self.source, 3), folder / "out", workers=group, threads=1)

    def again(self, folder: Path) -> None:
        run_job(plan_job(self.source, 3), folder / "out")


class Retention(Act):
    """Saving to a series that keeps one checkpoint: there is always a whole one, the old or the new."""

    def before(self, folder: Path) -> None:
        if not (self.base / "series").exists():
            muonckpt.Series(self.base / "series").save(1, state(1))
        shutil.copytree(self.base / "series", folder / "run")

    def do(self, folder: Path, rank: int) -> None:
        muonckpt.Series(folder / "run", keep_last=1).save(2, state(2))

    def check(self, folder: Path, succeeded: bool) -> None:
        self._holds(folder, (2,) if succeeded else (1, 2))
        muonckpt.Series(folder / "run", keep_last=1).save(3, state(3))
        self._holds(folder, (3,))
        expected_names = ("step-00000003", "resumes")
        strays = [entry.name for entry in (folder / "run").iterdir() if entry.name not in expected_names]
        expect(all(map(publish.staged_name, strays)), f"left for ever: {strays}")

    def _holds(self, folder: Path, steps: tuple[int, ...]) -> None:
        template = state(0)
        restored = muonckpt.Series(folder / "run").restore(template)
        expect(restored is not None and restored.step in steps, f"expected step {steps}, restored {restored}")
        assert restored is not None
        expect(
            all(torch.equal(template[key], value) for key, value in state(restored.step).items() if key != "lr"),
            f"step {restored.step} has other elements",
        )


class InNewFolders(Act):
    """Other work, in folders that nobody has made: what is there afterwards does not go with them."""

    def __init__(self, act: Act) -> None:
        super().__init__(f"{act.name}, in new folders", act.base)
        self.act, self.faults = act, act.faults

    def do(self, folder: Path, rank: int) -> None:
        self.act.source = self.source
        self.act.do(folder / "new" / "run", rank)

    def check(self, folder: Path, succeeded: bool) -> None:
        below = folder / "new" / "run"
        expect(below.exists() or not succeeded, "it succeeded, and its folder is not there")
        below.mkdir(parents=True, exist_ok=True)
        self.act.source = self.source
        self.act.check(below, succeeded)


class First(Act):
    """The first checkpoint of a series."""

    def do(self, folder: Path, rank: int) -> None:
        muonckpt.Series(folder / "series").save(1, state(1))

    def check(self, folder: Path, succeeded: bool) -> None:
        template = state(0)
        restored = muonckpt.Series(folder / "series").restore(template)
        expect(restored or not succeeded, "it succeeded, and there is nothing")
        expect(restored is None or torch.equal(template["w"], state(1)["w"]), "other elements")
        if restored is None:
            self.do(folder, 0)


class AsyncFirst(First):
    def do(self, folder: Path, rank: int) -> None:
        muonckpt.Series(folder / "series").async_save(1, state(1)).result()


class Load(Act):
    """Loading: what was saved, or an error that leaves everything as it was, or says that it did not."""

    faults = (BROKEN, HALF, CUT, CHANGED)

    def do(self, folder: Path, rank: int) -> None:
        template = {key: torch.full_like(value, 77) for key, value in state(1).items() if key != "lr"}
        try:
            muonckpt.load(template, self.source, allow_extra=True)
        except muonckpt.MuonckptError as error:  # what a second read finds is found late
            touched = [key for key, tensor in template.items() if not bool((tensor == 77).all())]
            expect(not touched or "UNUSABLE" in str(error), f"it raised, and had overwritten {touched}: {error}")
            raise
        expect(all(torch.equal(tensor, state(1)[key]) for key, tensor in template.items()), "other elements")

    def check(self, folder: Path, succeeded: bool) -> None:
        expect(not [*folder.iterdir()], "a load writes nothing")


class Verify(Load):
    """Verifying: a file that cannot be read is no whole one."""

    def do(self, folder: Path, rank: int) -> None:
        expect(muonckpt.verify(self.source, jobs=1).verdict in ("whole", "faulty"), "another verdict")


def in_new_folders(base: Path) -> list[InNewFolders]:
    return [
        InNewFolders(Save("save", base)),
        InNewFolders(AsyncSave("async save", base)),
        InNewFolders(First("series", base)),
        InNewFolders(AsyncFirst("async series", base)),
        InNewFolders(Rewrite("reshard", base, "--mesh", "dp=2")),
        InNewFolders(Rewrite("to zarr", base, "--format", "zarr")),
        InNewFolders(Convert("convert", base, "--format", "safetensors")),
    ]


def acts(base: Path) -> list[Act]:
    return [
        Save("save", base),
        AsyncSave("async save", base),
        Retention("series", base),
        Load("load", base),
        Verify("verify", base),
        Rewrite("reshard", base, "--mesh", "dp=2"),
        Rewrite("to torch_dist", base, "--mesh", "dp=2", "--format", "torch_dist"),
        Rewrite("to buffers", base, "--mesh", "dp=2", "--format", "buffers", "--layout", "balanced"),
        Rewrite("to safetensors", base, "--format", "safetensors"),
        Rewrite("to shards", base, "--format", "safetensors", "--shard-size", "40"),
        Rewrite("to zarr", base, "--format", "zarr"),
        SaveTogether("save, 2 ranks", base),
        ReshardTogether("reshard, 2 workers", base),
        *in_new_folders(base),
    ]
