"""Lightning's Trainer: a strategy that saves and loads sharded runs by this package, and checkpoints on signals."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..checkpoint.all_ranks import broadcast_from_first
from ..checkpoint.async_saving import AsyncSave, async_save
from ..checkpoint.loading import load
from ..checkpoint.saving import save
from ..checkpoint.signals import On, Signals
from ..names.errors import SourceError, warn_on_rank
from ..names.resumption import LoadReport
from ..runs.series.series import Series
from ..store.io.location import absolute_name, location
from ..store.open_checkpoint import OpenCheckpoint

TRAINER = "trainer"
"""The key of loops, schedules and callbacks, as torch.save writes them."""

STOCK = "meta.pt"
"""The file in which stock ModelParallelStrategy puts these."""


class MuonckptStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """ModelParallelStrategy (FSDP2, tensor parallelism), with checkpoints of this package.

    A checkpoint is a directory with the keys ``state_dict.*``, ``optimizer_0.*`` and ``trainer``.  It appears whole or
    not at all, has a digest of every chunk, and loads on any number of ranks.  Checkpoints of stock
    ModelParallelStrategy are loaded too.

    Args:
        arguments: of ModelParallelStrategy; ``data_parallel_size`` and ``tensor_parallel_size`` must be numbers.
        fresh: globs of names of parameters whose state starts fresh when the Trainer resumes, as for `muonckpt.load`; a
            warning lists what was restored.
        along: save while training goes on, as `muonckpt.async_save` does.  The next save, every load and the end wait
            for it; a checkpoint that ModelCheckpoint removes meanwhile stays until the new one is there.
        memory: a series with a ``memory``, to which `CopyToMemory` copies.  A run that resumes from a checkpoint takes
            a copy instead if one is as new, or newer.

    Raises:
        ValueError: a size is left to Lightning.
    """

    def __init__(
        self,
        *arguments: Any,
        fresh: Sequence[str] = (),
        along: bool = False,
        memory: Series | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        # Lightning's guess would train the same data on all ranks.
        sizes = self._data_parallel_size, self._tensor_parallel_size
        if "auto" in sizes:
            raise ValueError(
                f"data_parallel_size={sizes[0]!r}, tensor_parallel_size={sizes[1]!r}: "
                'expected two numbers. Lightning\'s "auto" makes all ranks of a node tensor parallel, so that each '
                "steps over all the data: MuonckptStrategy(data_parallel_size=WORLD_SIZE, tensor_parallel_size=1) is "
                "FSDP2 over all ranks"
            )
        self._fresh = fresh
        self._along = along
        self._memory = memory
        self._saved = -1
        self._saving: AsyncSave | None = None
        self._outdated: list[Any] = []
        """Removed when the running save has succeeded."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save what the Trainer has collected.  Collective.

        Raises:
            TypeError: there are storage options.
            MuonckptError: as `muonckpt.save`; ``filepath`` must not exist.  Or the save before, running along, has
                failed.
        """
        self._settle()
        if storage_options is not None:
            raise TypeError(
                f"storage_options={storage_options!r}: they belong to a CheckpointIO, which is not used here"
            )
        path, state = self._packed(checkpoint, str(filepath))
        provenance = {"epoch": checkpoint["epoch"], "step": checkpoint["global_step"]}
        if self._along:
            self._saving = async_save(state, path, provenance=provenance)
        else:
            save(state, path, provenance=provenance)
        self._saved = checkpoint["global_step"]
        if self._memory is not None:
            self._memory.record_parent(self._saved, path)

    def copy_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Copy what the Trainer has collected to memory, unless a save or a copy is under way.  Collective.

        Raises:
            ValueError: the strategy has no memory.
            MuonckptError: as `Series.async_copy`.
        """
        if self._memory is None:
            raise ValueError("there is no memory: MuonckptStrategy(..., memory=Series('saved', memory='/dev/shm/me'))")
        _, state = self._packed(checkpoint, "")
        self._memory.async_copy(checkpoint["global_step"], state, provenance={"epoch": checkpoint["epoch"]})

    def _packed(self, checkpoint: Mapping[str, Any], path: str) -> tuple[str, dict[str, Any]]:
        """Return the path and the state to save: all ranks save to one path, and one rank's loops and callbacks."""
        # Tensors are saved from all ranks.
        trainer_state = dict(checkpoint)
        state = {"state_dict": trainer_state.pop("state_dict")}
        for number, slots in enumerate(trainer_state.pop("optimizer_states", ())):
            state[f"optimizer_{number}"] = slots
        # The other values are objects of Lightning's, of which the first rank's count.
        packed = io.BytesIO()
        torch.save(trainer_state, packed)
        path, trainer = self.broadcast((path, packed.getvalue()))
        return path, {**state, TRAINER: trainer}

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, but not before a running save has ended."""
        if self._saving is None:
            super().remove_checkpoint(filepath)
        else:
            self._outdated.append(absolute_name(filepath))

    def teardown(self) -> None:
        """Tear down when the last save has ended, and remove copies in memory that are no newer.

        Raises:
            MuonckptError: it has failed.
        """
        try:
            self._settle()
            if self._memory is not None:
                self._memory.close(saved=self._saved)
        finally:
            super().teardown()

    def _settle(self) -> None:
        """Wait for a running save, and raise its error or remove the checkpoints that it outdates."""
        saving, outdated = self._saving, self._outdated
        self._saving, self._outdated = None, []
        if saving is not None:
            saving.result()
        for filepath in outdated:
            super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and the state of optimizers where they belong, and return the rest.  Collective.

        Without optimizers, as when a model is only evaluated, only weights are loaded.

        Raises:
            MuonckptError: as `muonckpt.load`; then nothing has been loaded.  Or a running save has failed.
        """
        self._settle()
        # The template: live tensors, and what the Trainer keeps, which stock checkpoints have in a file of its own.
        path = self.broadcast(str(checkpoint_path))
        stock = (Path(path) / STOCK).is_file()
        state: dict[str, Any] = {"state_dict": get_model_state_dict(self.model)}
        for number, optimizer in enumerate(self.optimizers):
            state[f"optimizer_{number}"] = get_optimizer_state_dict(self.model, optimizer)
        if not stock:
            state[TRAINER] = b""
        # A copy in memory may be newer.
        report = self._from_memory(path, state) or load(
            state, path, allow_extra=not self.optimizers, fresh=self._fresh if self.optimizers else ()
        )
        if self._fresh and self.is_global_zero:
            warn_on_rank(f"resuming with fresh={list(self._fresh)!r}:\n{report}")
        set_model_state_dict(self.model, state["state_dict"])
        for number, optimizer in enumerate(self.optimizers):
            set_optimizer_state_dict(self.model, optimizer, state[f"optimizer_{number}"])
        trainer = Path(path) / STOCK if stock else io.BytesIO(state[TRAINER])
        return dict(torch.load(trainer, weights_only=weights_only))

    def _from_memory(self, path: str, state: dict[str, Any]) -> LoadReport | None:
        """Load a copy instead of a checkpoint that is older, or as old; None if there is none."""
        if self._memory is None or not self.optimizers or TRAINER not in state:
            return None

        def step() -> object:
            with OpenCheckpoint(location(path, SourceError)) as opened:
                return opened.manifest.provenance.get("step")

        # The checkpoint's step, which a copy has to reach.
        since = broadcast_from_first(None, SourceError, step)
        if not isinstance(since, int):
            return None
        restored = self._memory.restore_copy(state, since=since, parent=path, fresh=self._fresh)
        if restored is None:
            return None
        rank_zero_info(f"Not {path}, but {restored}")
        return restored.report


class CopyToMemory(Callback):  # type: ignore[misc]
    """Copies the state to the memory of two nodes at the end of a step; for `MuonckptStrategy` with a ``memory``.

    Args:
        every: how many steps lie between copies.

    Raises:
        ValueError: it is below 1.
    """

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every={every}: expected 1 or more steps")
        self._every = every
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count behind what was restored."""
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Copy if a step has been taken and it is due.  Collective.

        Raises:
            ValueError, MuonckptError: as `MuonckptStrategy.copy_checkpoint`.
        """
        if trainer.global_step != self._step and trainer.global_step % self._every == 0:
            trainer.strategy.copy_checkpoint(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))
        self._step = trainer.global_step


class CheckpointOnSignal(Callback):  # type: ignore[misc]
    """Saves ``step=N.ckpt`` when a signal has reached any rank, at the end of the step that is under way.

    Then the program goes on, or ends with exit code 75 on all ranks, as with `muonckpt.Series`.  While the Trainer
    fits, it takes the place of Lightning's own handlers of these signals: that of SIGTERM broadcasts on the ranks that
    have got the signal, and waits for the others.

    Args:
        folder: where to save.
        on: as for `muonckpt.Series`.
    """

    def __init__(self, folder: str | os.PathLike[str], on: On = (signal.SIGTERM,)) -> None:
        self._folder = Path(folder).absolute()
        self._on = on
        self._formers = {number: signal.getsignal(number) for number in on}
        """The program's own handlers, which are called, too."""
        self._signals: Signals | None = None
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Install handlers, now that Lightning has installed its own."""
        for number, former in self._formers.items():
            signal.signal(number, former)
        self._signals, self._step = Signals(self._on, None), trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Save if a signal has asked for it and a step has been taken.  Collective, as `muonckpt.Series.due`.

        Raises:
            SystemExit: a signal has asked to stop.
        """
        if self._signals is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._signals.due(f"on_train_batch_end({self._step})"):
            place = str(self._folder / f"step={self._step}.ckpt")
            self._signals.ask(place)
            trainer.save_checkpoint(place)
            self._signals.met(place)

    def on_train_end(self, *_: Any) -> None:
        """Put former handlers back."""
        if self._signals is not None:
            self._signals.close()
