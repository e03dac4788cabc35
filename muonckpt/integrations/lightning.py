"""Lightning's Trainer: a strategy that saves and loads sharded runs by this package, and checkpoints on signals."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..checkpoint.all_ranks import broadcast_from_first
from ..checkpoint.async_saving import AsyncSave, async_save
from ..checkpoint.live_parts import LiveParts, frozen_parameters
from ..checkpoint.loading import LoadCall, run_load
from ..checkpoint.resume_check import compare
from ..checkpoint.resume_proof import LoadedState
from ..checkpoint.saving import save
from ..checkpoint.signals import On, Signals, sequels_of
from ..names.errors import ArgumentError, DestinationError, SourceError, warn_on_rank
from ..store.io.location import absolute_name, is_file, location
from ..store.io.publish import make_parents, remove_any, swap_in
from ..store.verify.diagnosis import open

TRAINER = "trainer"
"""The key of loops, schedules and callbacks, as torch.save writes them."""

STOCK = "meta.pt"
"""The file in which stock ModelParallelStrategy puts these."""

LAST = "last-whole.ckpt"
"""A link to a whole checkpoint, for ``ckpt_path="last"``, which takes the newest ``last*.ckpt`` there is."""


class _Restored(NamedTuple):
    """The step and the path of the checkpoint that was loaded, and what it held."""

    step: int
    path: str
    state: LoadedState


class MuonckptStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """ModelParallelStrategy (FSDP2, tensor parallelism), with checkpoints of this package.

    A checkpoint is a directory with the keys ``state_dict.*``, ``optimizer_0.*`` and ``trainer``.  It appears whole or
    not at all, has a digest of every chunk, and loads on any number of ranks.  One that Lightning writes over another
    is written beside it and swapped in.  Checkpoints of stock ModelParallelStrategy are loaded too.  When training goes
    on from a checkpoint, the first rank prints the proof, or warns of differences from the saved state.

    Args:
        arguments: of ModelParallelStrategy; ``data_parallel_size`` and ``tensor_parallel_size`` must be numbers.
        fresh: globs of names of parameters whose state starts fresh when the Trainer resumes, as for `muonckpt.load`; a
            warning lists what was restored.
        along: save while training goes on, as `muonckpt.async_save` does.  The next save, every load and the end wait
            for it; until then ``last-whole.ckpt`` names the checkpoint before, and whatever it is to replace stays.

    Raises:
        ArgumentError: a size is left to Lightning.
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
            raise ArgumentError(
                f"data_parallel_size={sizes[0]!r}, tensor_parallel_size={sizes[1]!r}: "
                'expected two numbers. Lightning\'s "auto" makes all ranks of a node tensor parallel, so that each '
                "steps over all the data: MuonckptStrategy(data_parallel_size=WORLD_SIZE, tensor_parallel_size=1) is "
                "FSDP2 over all ranks"
            )
        self._fresh = fresh
        self._along = along
        self._saving: tuple[AsyncSave, str] | None = None
        """A running save, and the path at which its checkpoint is to be."""
        self._outdated: list[Any] = []
        """Removed when the running save has succeeded."""
        self._restored: _Restored | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save what the Trainer has collected.  Collective.

        The step that was just restored is not saved again where it is, as Lightning asks amid accumulated gradients.

        Raises:
            ArgumentError: there are storage options.
            MuonckptError: as `muonckpt.save`; a URL must not exist.  Or the save before, running along, has failed.
        """
        self.settle()
        if storage_options is not None:
            raise ArgumentError(
                f"storage_options={storage_options!r}: they belong to a CheckpointIO, which is not used here"
            )
        # The path, and the place to write to, are those of the first rank.
        step = checkpoint["global_step"]
        path, staged = broadcast_from_first(None, lambda: self._places(str(filepath), step))
        if staged is None:
            return
        # Tensors are saved from all ranks; the other values, which are objects of Lightning's, from the first.
        trainer_state = dict(checkpoint)
        state = {"state_dict": trainer_state.pop("state_dict")}
        for number, slots in enumerate(trainer_state.pop("optimizer_states", ())):
            state[f"optimizer_{number}"] = slots
        packed = io.BytesIO()
        torch.save(trainer_state, packed)
        state[TRAINER] = self.broadcast(packed.getvalue())
        provenance = {"epoch": checkpoint["epoch"], "step": step, "frozen": frozen_parameters(self.model)}
        if self._along:
            self._saving = async_save(state, staged, provenance=provenance), path
        else:
            save(state, staged, provenance=provenance)
            self._publish(staged, path)

    def _places(self, filepath: str, step: int) -> tuple[str, str | None]:
        """Return the path of a checkpoint and the one to write it to, which is None if it is there already."""
        place = location(absolute_name(filepath), DestinationError)
        make_parents(place)
        if not isinstance(place, Path) or not os.path.lexists(place):
            return str(place), str(place)
        if self._restored is not None and self._restored.step == step and _hold_same(place, Path(self._restored.path)):
            return str(place), None
        staged = place.with_name(f".{place.name}.new")
        remove_any(staged)
        return str(place), str(staged)

    def _publish(self, staged: str, path: str) -> None:
        """Give a checkpoint that was written beside another one its name, on the first rank.

        The others hear of it by what follows: `teardown` may be of one rank that has failed, and so must not wait.
        """
        if staged != path and self.is_global_zero:
            swap_in(Path(staged), Path(path))

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
            self.settle()
        finally:
            super().teardown()

    def settle(self) -> None:
        """Wait for a running save, and raise its error or remove the checkpoints that it outdates."""
        running, outdated = self._saving, self._outdated
        self._saving, self._outdated = None, []
        if running is not None:
            saving, path = running
            saving.result()
            self._publish(saving.path, path)
            if self.is_global_zero:
                link_last(path)
        for filepath in outdated:
            super().remove_checkpoint(filepath)

    def on_train_start(self) -> None:
        """Compare what will run with what was loaded, now that all is set.  Collective.

        Schedules and loops are Lightning's.
        """
        super().on_train_start()
        if self._restored is None:
            return
        state, step = self._restored.state, self._restored.step
        proof = compare(lambda: LiveParts.of_objects(state, self.model, self.optimizers, None), step, None)
        if self.is_global_zero:
            proof.show()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and the state of optimizers where they belong, and return all else.  Collective.

        Without optimizers, as when a model is only evaluated, only weights are loaded.

        Raises:
            MuonckptError: as `muonckpt.load`; the state may be unusable then.  Or a running save has failed.
        """
        self.settle()
        # The template: live tensors, and what the Trainer keeps, which stock checkpoints have in a file of its own.
        path = self.broadcast(str(checkpoint_path))
        stock = is_file(Path(path) / STOCK)
        state: dict[str, Any] = {"state_dict": get_model_state_dict(self.model)}
        for number, optimizer in enumerate(self.optimizers):
            state[f"optimizer_{number}"] = get_optimizer_state_dict(self.model, optimizer)
        if not stock:
            state[TRAINER] = b""
        choices = {"allow_extra": not self.optimizers, "fresh": self._fresh if self.optimizers else ()}
        loaded = run_load(LoadCall(state_dict=state, path=path, choices=choices, name="MuonckptStrategy"))
        if self._fresh and self.is_global_zero:
            warn_on_rank(f"resuming with fresh={list(self._fresh)!r}:\n{loaded.report}")
        set_model_state_dict(self.model, state["state_dict"])
        for number, optimizer in enumerate(self.optimizers):
            set_optimizer_state_dict(self.model, optimizer, state[f"optimizer_{number}"])
        trainer = Path(path) / STOCK if stock else io.BytesIO(state[TRAINER])
        rest = dict(torch.load(trainer, weights_only=weights_only))
        self._restored = _Restored(rest["global_step"], absolute_name(path), loaded.state)
        return rest


def _hold_same(place: Path, other_place: Path) -> bool:
    """Return whether two checkpoints are one, or have the same tensors by their fingerprints."""
    if place.resolve() == other_place.resolve():
        return True
    with suppress(SourceError), open(place) as one, open(other_place) as other:
        prints, other_prints = (
            {key: tensor.fingerprint for key, tensor in each.tensors.items()} for each in (one, other)
        )
        return prints == other_prints and None not in prints.values()
    return False


def link_last(path: str) -> None:
    """Have ``ckpt_path="last"`` find a local checkpoint that is there."""
    place = location(path)
    if isinstance(place, Path):
        staged = place.with_name(f".{LAST}")
        staged.unlink(missing_ok=True)
        staged.symlink_to(place.name)
        staged.replace(place.with_name(LAST))


class CheckpointOnSignal(Callback):  # type: ignore[misc]
    """Saves ``step=N.ckpt`` when a signal has reached any rank, at the end of the step that is under way.

    ``ckpt_path="last"`` finds it if ModelCheckpoint saves to the same folder.  Then the program goes on, or ends with
    exit code 75 on all ranks, as with `muonckpt.Series`.  While the Trainer fits, it takes the place of Lightning's own
    handlers of the same signals: that of SIGTERM broadcasts on the ranks that have got the signal, and waits for the
    others.

    Args:
        folder: where to save.
        on: as for `muonckpt.Series`.
    """

    def __init__(self, folder: str | os.PathLike[str], on: On = (signal.SIGTERM,)) -> None:
        self._folder = Path(folder).absolute()
        self._on = sequels_of(on)
        self._formers = {number: signal.getsignal(number) for number in self._on}
        """The program's own handlers, which are called, too."""
        self._signals: Signals | None = None
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Install handlers, now that Lightning has installed its own."""
        for number, former in self._formers.items():
            signal.signal(number, former)
        self._signals, self._step = Signals(self._on, None), trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Save if a signal has requested it and a step has been taken.  Collective, as `muonckpt.Series.due`.

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
            if isinstance(trainer.strategy, MuonckptStrategy):
                trainer.strategy.settle()
            if trainer.is_global_zero:
                link_last(place)
            self._signals.met(place)

    def on_train_end(self, *_: Any) -> None:
        """Put former handlers back."""
        if self._signals is not None:
            self._signals.close()
