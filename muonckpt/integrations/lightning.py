"""Lightning's Trainer: a strategy that saves and loads sharded runs by this package, and checkpoints on signals."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..checkpoint.async_saving import AsyncSave, async_save
from ..checkpoint.loading import load_for
from ..checkpoint.saving import save
from ..checkpoint.signals import On, Signals
from ..names.errors import warn_on_rank
from ..store.io.location import absolute_name, is_file

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

    Raises:
        ValueError: a size is left to Lightning.
    """

    def __init__(
        self,
        *arguments: Any,
        fresh: Sequence[str] = (),
        along: bool = False,
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
        # Tensors are saved from all ranks.
        trainer_state = dict(checkpoint)
        state = {"state_dict": trainer_state.pop("state_dict")}
        for number, slots in enumerate(trainer_state.pop("optimizer_states", ())):
            state[f"optimizer_{number}"] = slots
        # The path, and the other values, which are objects of Lightning's, are those of the first rank.
        packed = io.BytesIO()
        torch.save(trainer_state, packed)
        path, state[TRAINER] = self.broadcast((str(filepath), packed.getvalue()))
        provenance = {"epoch": checkpoint["epoch"], "step": checkpoint["global_step"]}
        if self._along:
            self._saving = async_save(state, path, provenance=provenance)
        else:
            save(state, path, provenance=provenance)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, but not before a running save has ended."""
        if self._saving is None:
            super().remove_checkpoint(filepath)
        else:
            self._outdated.append(absolute_name(filepath))

    def teardown(self) -> None:
        """Tear down when the last save has ended.

        Raises:
            MuonckptError: it has failed.
        """
        try:
            self._settle()
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
        stock = is_file(Path(path) / STOCK)
        state: dict[str, Any] = {"state_dict": get_model_state_dict(self.model)}
        for number, optimizer in enumerate(self.optimizers):
            state[f"optimizer_{number}"] = get_optimizer_state_dict(self.model, optimizer)
        if not stock:
            state[TRAINER] = b""
        choices = {"allow_extra": not self.optimizers, "fresh": self._fresh if self.optimizers else ()}
        report, _ = load_for("MuonckptStrategy", state, path, choices)
        if self._fresh and self.is_global_zero:
            warn_on_rank(f"resuming with fresh={list(self._fresh)!r}:\n{report}")
        set_model_state_dict(self.model, state["state_dict"])
        for number, optimizer in enumerate(self.optimizers):
            set_optimizer_state_dict(self.model, optimizer, state[f"optimizer_{number}"])
        trainer = Path(path) / STOCK if stock else io.BytesIO(state[TRAINER])
        return dict(torch.load(trainer, weights_only=weights_only))


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
