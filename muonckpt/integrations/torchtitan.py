"""torchtitan's Trainer: Muon as its optimizer, and checkpoints of this package."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any

import tyro
from torch import nn
from torch.utils.data import DataLoader
from torchtitan.components.checkpointer import LR_SCHEDULER, MODEL, OPTIMIZER, CheckpointManager
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from ..checkpoint.all_ranks import broadcast_from_first, is_coordinator
from ..checkpoint.async_saving import async_save
from ..checkpoint.live_parts import LiveParts
from ..checkpoint.loading import LoadCall, run_load
from ..checkpoint.resume_check import compare
from ..checkpoint.saving import save
from ..checkpoint.signals import On, Signals
from ..names.errors import ArgumentError, SourceError
from ..optimizer import Muon
from ..optimizer.groups import TORCHTITAN, Rule
from ..store.io.location import is_folder, is_there, location, names_in
from ..store.verify.diagnosis import open

SAME_UPDATES = ("fused", "foreach", "for-loop")
"""Implementations of torch's optimizers that differ in speed only; Muon chooses its kernels itself."""

Rules = Sequence[Rule] | Sequence[Sequence[Rule]]


class MuonOptimizers(OptimizersContainer):  # type: ignore[misc]
    """One `Muon` for each model part and all of its parameters; built by ``MuonOptimizers.Config(...)``.

    The state has torchtitan's flat keys, such as ``state.layers.0.attention.wq.weight.momentum_buffer``, so pipeline
    stages and other numbers of ranks load it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """The ``optimizer`` of Trainer.Config.

        ``rules`` take the place of ``param_groups``; ``implementation`` makes no difference.
        """

        lr: float
        """The rate of matrices."""

        adamw_lr: float | None = None
        """The rate of everything else; may be missing with ``options={"adjust_lr_fn": "match_rms_adamw"}``."""

        rules: Annotated[Rules, tyro.conf.Suppress] = TORCHTITAN
        """The kind of each parameter, as for `Muon.for_model`."""

        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Other options of `Muon.for_model` and of the optimizer."""

        def to_dict(self) -> dict[str, Any]:
            """Return the configuration for torchtitan's log; rules hold types and functions, so they are described."""
            described = {"rules": repr(self.rules), "options": repr(self.options)}
            return {"lr": self.lr, "adamw_lr": self.adamw_lr, **described}

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        """Make the optimizers of model parts, and log a table of each.

        Raises:
            ArgumentError: the config sets options of torch's optimizers; or `Muon.for_model` refuses.
        """
        if config.param_groups or config.optimizer_factory_kwargs_by_name:
            raise ArgumentError(
                "param_groups and optimizer_factory_kwargs_by_name choose between torch's optimizers; here rules say "
                "what each parameter is, and options go to all of them: MuonOptimizers.Config(rules=[...], "
                "options={...}), as docs/integrations/torchtitan.md explains"
            )
        if config.implementation not in SAME_UPDATES:
            raise ArgumentError(
                f"implementation={config.implementation!r}: it changes the dtype of AdamW's state, which is that of "
                f"the parameters here; expected one of {', '.join(SAME_UPDATES)}"
            )
        # OptimizersContainer.__init__ would build torch's optimizers; this does the rest of it, and therefore calls
        # torchtitan's private `_validate_params` and `_post_init`.
        self.model_parts = model_parts
        self.optimizers = [
            Muon.for_model(part, lr=config.lr, adamw_lr=config.adamw_lr, rules=config.rules, **config.options)
            for part in model_parts
        ]
        # State has the names that torchtitan uses, whatever wraps the modules.
        for number, (part, optimizer) in enumerate(zip(model_parts, self.optimizers, strict=True)):
            name_of = {parameter: canonical_fqn(name) for name, parameter in part.named_parameters()}
            for group in optimizer.param_groups:
                group["param_names"] = [name_of[parameter] for parameter in group["params"]]
            logger.info(f"Muon (model_part={number}):\n{optimizer.report()}")
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers)
        parameters = list(chain.from_iterable(group["params"] for group in groups))
        self._validate_params(parameters)
        self._post_init(parameters)


class MuonckptManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's CheckpointManager, with checkpoints of this package; built by ``MuonckptManager.Config(...)``.

    It decides as before when to save, what to keep and what to load from where.  A checkpoint appears whole or not at
    all, has a digest of every chunk, and loads on any number of ranks; checkpoints of the stock manager with this
    optimizer are loaded too.  With ``async_mode="async"`` training pays for a copy of its state; the next save and the
    end wait for the running one.  Hugging Face's format is written and read by the stock manager.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The ``checkpoint`` of Trainer.Config.

        Raises:
            ArgumentError: another asynchronous mode, or CheckpointManager.Config refuses.
        """

        fresh: tuple[str, ...] = ()
        """Globs of parameters whose state starts fresh when a run is resumed, as for `muonckpt.load`."""

        on: Annotated[On, tyro.conf.Suppress] = ()
        """Signals to any rank that make all save at the end of the step under way, as for `Series`."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if self.async_mode not in ("disabled", "async"):
                raise ArgumentError(
                    f"async_mode={self.async_mode!r}: expected 'disabled' or 'async', which copies to pinned memory by "
                    "itself; or use torchtitan's CheckpointManager"
                )

    def __init__(self, config: Config, **components: Any) -> None:
        super().__init__(config, **components)
        self._fresh = config.fresh
        self._signals = Signals(config.on, None)
        if isinstance(loader := components.get("dataloader"), DataLoader):
            self._signals.spare_workers(loader)

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        """Return whether a save is due, also because a signal has requested it.  Collective, as `Series.due`."""
        if super()._should_save(curr_step, last_step):
            return True
        return self.enable and not self.load_only and self._signals.due(f"save({curr_step})") is not None

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if it is due, and return whether it was.  Collective.

        Raises:
            SystemExit: the checkpoint is there, and a signal has asked to stop.
        """
        saved: bool = super().save(curr_step, last_step)
        if saved:
            place = self._create_checkpoint_id(curr_step)
            # A program that a signal has asked to stop ends when the checkpoint is there.
            self._signals.ask(place)
            if self._signals.then == "stop" and self.save_future is not None:
                self._wait_for_saving()
            self._signals.met(place)
        return saved

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save to a new directory; if asynchronously, return the save's future.  Collective.

        Raises:
            MuonckptError: as `muonckpt.save`; ``checkpoint_id`` must not exist.
        """
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        if async_mode == AsyncMode.ASYNC:
            return async_save(state_dict, checkpoint_id).future
        save(state_dict, checkpoint_id)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection after a checkpoint was saved.")
        return None

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load what the state dict asks for.  Collective.

        If that is everything, the checkpoint may hold nothing else.  If it is only the model, or something was
        excluded, all else in the checkpoint is ignored.  Where a run goes on, its schedules have the rates of the saved
        run, and the first rank prints the proof, or warns of differences from the saved state.

        Raises:
            SourceError: a run asks for its state, and only the model was saved.
            MuonckptError: as `muonckpt.load`; the state dict may be unusable then.
        """
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        everything = self.states.keys() - {MODEL} <= state_dict.keys()
        choices = {"allow_extra": not everything, "fresh": self._fresh}
        goes_on = OPTIMIZER in state_dict
        if goes_on:
            broadcast_from_first(None, lambda: _refuse_model_alone(checkpoint_id))
        loaded = run_load(LoadCall(state_dict, path=checkpoint_id, choices=choices, name="MuonckptManager.Config"))
        logger.info(str(loaded.report))
        self.states[MODEL].load_state_dict(state_dict)
        if not goes_on:
            return
        # torchtitan saves no base rates of schedules; those of the saved run are in its groups.
        schedulers = self.states[LR_SCHEDULER].schedulers if LR_SCHEDULER in self.states else ()
        for scheduler in schedulers:
            scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]
            scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
        # Everything that will run is compared with what was loaded.
        step = int(checkpoint_id.rpartition("-")[2]) if re.search(r"step-\d+$", checkpoint_id) else 0
        schedulers_by_key = {f"{LR_SCHEDULER}.{number}": scheduler for number, scheduler in enumerate(schedulers)}

        def take_parts() -> LiveParts:
            parts = LiveParts.of_state_dict(loaded.state, self._states_to_load(model_only=False))
            return parts.with_schedules(schedulers_by_key, [*self.states[OPTIMIZER]])

        proof = compare(take_parts, step, None)
        if is_coordinator(None):
            proof.show()

    def _close(self) -> None:
        """Wait for a running save, and raise its error; put former signal handlers back."""
        self._signals.close()
        if self.save_future is not None:
            self._wait_for_saving()
        super()._close()

    def _find_load_step(self, folder: str = "") -> int:
        """Return the latest step with a complete checkpoint, or -1; raise `UnavailableError` if that is not known."""
        folder = folder or self.folder
        names = names_in(location(folder)) if is_folder(location(folder)) else []
        steps = [int(name[1]) for name in map(re.compile(r"step-(\d+)").fullmatch, names) if name]
        places = {step: location(self._create_checkpoint_id(step, folder)) for step in steps}
        return max((s for s, place in places.items() if is_there(place / ".metadata")), default=-1)


def _refuse_model_alone(checkpoint_id: str) -> None:
    """Raise `SourceError` if a checkpoint has no state of an optimizer."""
    with open(checkpoint_id) as opened:
        if not any(key.startswith(f"{OPTIMIZER}.") for key in (*opened.tensors, *opened.items)):
            raise SourceError(
                f"{checkpoint_id} has the model alone, as last_save_model_only=True, torchtitan's default, saves the "
                "last step: no run goes on from it. Move it out of the folder to go on from the step before, and give "
                "MuonckptManager.Config(last_save_model_only=False)"
            )
