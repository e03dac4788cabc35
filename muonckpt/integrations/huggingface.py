"""transformers' Trainer: Muon as its optimizer, and callbacks that check what was saved, and save on a signal."""

from __future__ import annotations

import fnmatch
import json
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoint.all_ranks import JointWork, broadcast_from_first, group_ranks
from ..checkpoint.attestation import Fingerprints, fingerprints
from ..checkpoint.live_parts import LiveParts, frozen_parameters
from ..checkpoint.live_state import LiveState
from ..checkpoint.resume_check import compare
from ..checkpoint.resume_proof import LoadedState
from ..checkpoint.signals import On, Signals
from ..checkpoint.training import Training
from ..names.errors import MuonckptError, SourceError, warn_on_rank
from ..names.wording import fitted, listed
from ..optimizer import FreshStart, Muon
from ..optimizer.groups import DEEPSEEK, LLAMA, MIXTRAL, QWEN, Rule
from ..store.io.location import is_there, local_errors, names_in
from .saved import check_saved

RULES: Mapping[str, tuple[Rule, ...]] = {
    "deepseek_v3": DEEPSEEK,
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": MIXTRAL,
    "qwen2": QWEN,
    "qwen2_moe": QWEN,
    "qwen3": QWEN,
    "qwen3_moe": QWEN,
}
"""Ready-made rules of known models, by the ``model_type`` of their config."""


def muon(
    lr: float | Tensor,
    adamw_lr: float | Tensor | None = None,
    rules: Sequence[Rule] | Sequence[Sequence[Rule]] | None = None,
    fresh: Sequence[str] = (),
    **options: Any,
) -> tuple[type[Factory], dict[str, Any]]:
    """Return the argument of ``Trainer(..., optimizer_cls_and_kwargs=muon(...))``.

    The Trainer's schedule multiplies the rates given here; ``learning_rate``, ``weight_decay`` and ``optim`` of
    TrainingArguments are for optimizers that it makes itself.

    Args:
        lr, adamw_lr: as for `Muon.for_model`: the rates of matrices and of everything else; ``adamw_lr`` may be missing
            with ``adjust_lr_fn="match_rms_adamw"``.
        rules: as for `Muon.for_model`; by default the rules of the model's family, if there are some (`RULES`).
        fresh: globs of names of parameters whose state starts fresh when the Trainer resumes, as for
            `Muon.load_state_dict`; a warning lists what was restored.  Not under FSDP2, where the Trainer loads through
            stock DCP: use `muonckpt.load`.
        options: of `Muon.for_model` and of the optimizer, except for ``replicas``.
    """
    return Factory, {"lr": lr, "adamw_lr": adamw_lr, "rules": rules, "fresh": fresh, **options}


class Factory:
    """Makes the optimizer.  As it is no subclass of Optimizer, the Trainer calls it with its model."""

    def __call__(
        self,
        model: nn.Module,
        *,
        rules: Sequence[Rule] | Sequence[Sequence[Rule]] | None,
        fresh: Sequence[str],
        **options: Any,
    ) -> Muon:
        """Make the optimizer of this model.

        Under DDP all ranks hold all parameters, and the Trainer wraps the model only later: so plain tensors are
        replicas over the whole world.  Under FSDP2 it replaces them by DTensors, which know where they lie.

        Raises:
            ArgumentError: `Muon.for_model` refuses.
        """
        if rules is None:
            rules = RULES.get(str(getattr(getattr(model, "config", None), "model_type", None)), ())
        optimizer = Muon.for_model(model, rules=rules, **{"replicas": dist.group.WORLD, "named": True, **options})
        if fresh:
            optimizer.register_load_state_dict_pre_hook(FreshStart(fresh))
        return optimizer


RECORD = "VerifySaved"
"""The key of what `VerifySaved` writes into ``trainer_state.json``, among the states of callbacks."""


class VerifySaved(TrainerCallback):  # type: ignore[misc]
    """Checks every checkpoint as soon as it is saved, and proves what training goes on from.

    When all ranks have saved, the first one reads the files back, as far as they can be judged (`saved.check_saved`),
    and adds to ``trainer_state.json`` the fingerprints of the live tensors and the other values of model, optimizer and
    schedule.  When training goes on from there, what will run is compared with them: the first rank prints the proof,
    or warns of differences from the saved state.
    """

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Prove what training goes on from, or warn that a checkpoint has no optimizer, or no record.  Collective."""
        record = state.stateful_callbacks.get(RECORD, {})
        state.stateful_callbacks[RECORD] = {"ranks": len(group_ranks(None))}
        if not state.global_step:
            return
        if record.get("step") != state.global_step:
            warning = "of which VerifySaved has no record, so nothing proves that all of it was loaded"
        elif record["model_only"]:
            parameters = Counter[str]()
            for group in optimizer.param_groups:
                parameters[group.get("algorithm", "the optimizer")] += len(group["params"])
            counts = ", ".join(f"{name}'s of {count} parameters" for name, count in parameters.items() if count)
            warning = (
                f"without optimizer: all state begins from zero ({counts}), and the schedule with its warm-up. For the "
                "same run, resume from one that was saved with save_only_model=False"
            )
        else:
            try:
                training = _training(model, optimizer, lr_scheduler)
                loaded = _loaded_state(record, training)
                proof = compare(lambda: LiveParts.of_training(loaded, training), state.global_step, None)
            except MuonckptError as error:
                warning = f"that cannot be compared with what will run: {error}"
            else:
                if state.is_world_process_zero:
                    proof.show()
                return
        if state.is_world_process_zero:
            warn_on_rank(f"training goes on at step {state.global_step} from a checkpoint {warning}", RuntimeWarning)

    def on_save(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Check and record ``checkpoint-N`` when all ranks have saved.  Collective.

        Raises:
            SourceError: lists the damage, on all ranks.
        """
        place = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        with JointWork(None, SourceError) as work:
            if work.gather(None) is not None:
                check_saved(place)
        try:
            record = _record(_training(model, optimizer, lr_scheduler))
        except MuonckptError as error:  # such as buffers of replicas that differ, or another optimizer
            if state.is_world_process_zero:
                warn_on_rank(f"{place} is whole, but nothing will prove a resume from it: {error}", RuntimeWarning)
            return
        facts = {"step": state.global_step, "ranks": len(group_ranks(None)), "model_only": args.save_only_model}
        state.stateful_callbacks[RECORD] = facts | record

        def write() -> None:
            draft = place / f".{TRAINER_STATE_NAME}"
            state.save_to_json(str(draft))
            draft.replace(place / TRAINER_STATE_NAME)

        broadcast_from_first(None, write)


def _training(model: nn.Module, optimizer: Any, scheduler: Any) -> Training:
    """Return the objects without accelerate's wrappers."""
    return Training.of(
        model, getattr(optimizer, "optimizer", optimizer), getattr(scheduler, "scheduler", scheduler), None
    )


def _record(training: Training) -> dict[str, Any]:
    """Return what is live, as JSON data.  Collective."""
    live = LiveState.of(training.state_dict(), "to record")
    values = {}
    for key, value in live.flat.items():
        with suppress(TypeError, ValueError):  # what JSON lacks is not compared
            values[key] = live.paths[key], json.loads(json.dumps(value))
    prints = fingerprints(live.nested).as_json()
    return {"tensors": prints, "values": json.dumps(values), "frozen": frozen_parameters(training.model)}


def _loaded_state(record: Mapping[str, Any], training: Training) -> LoadedState:
    """Return the basis for the proof: what was live when the checkpoint was saved."""
    values = json.loads(record["values"])
    paths = dict(LiveState.of(training.state_dict(), "to check").paths)
    paths |= {key: tuple(path) for key, (path, _) in values.items()}
    items = {key: value for key, (_, value) in values.items()}
    prints = Fingerprints.from_json(record["tensors"]).tensors
    return LoadedState(
        paths, items, prints, world_size=record["ranks"], unloaded_keys=(), frozen=frozenset(record["frozen"])
    )


def last_whole(folder: str | os.PathLike[str]) -> str | None:
    """Return the newest ``checkpoint-N`` of a folder that is whole, for ``resume_from_checkpoint``; None if none is.

    One that `VerifySaved` has recorded is whole; of others all parts are read back.  A warning names what a killed save
    has left.

    Raises:
        SourceError: checkpoints were finished, and none is whole.
        UnavailableError: the folder, or a newer checkpoint in it, cannot be read now.
    """
    faults: dict[Path, str] = {}
    is_finished = False
    names: list[str] = []
    with suppress(FileNotFoundError):
        names = names_in(Path(folder))
    places = [Path(folder, name) for name in fnmatch.filter(names, f"{PREFIX_CHECKPOINT_DIR}-*[0-9]")]
    for place in sorted(places, key=_step_of, reverse=True):
        try:
            with local_errors(place):
                state = TrainerState.load_from_json(str(place / TRAINER_STATE_NAME))
        except (OSError, ValueError, TypeError) as error:  # the Trainer writes this file last
            faults[place] = f"{TRAINER_STATE_NAME}: {error}"
            continue
        is_finished = True
        record = state.stateful_callbacks.get(RECORD, {})
        ranks = record.get("ranks", 1)
        missing = [f"rng_state_{rank}.pth" for rank in range(ranks) if not is_there(place / f"rng_state_{rank}.pth")]
        try:
            if record.get("step") != _step_of(place):
                if ranks > 1 and missing:
                    raise SourceError(f"{listed(missing)}: not there")
                check_saved(place)
        except SourceError as error:
            faults[place] = str(error)
            continue
        for left, fault in faults.items():
            warn_on_rank(f"{left} is not whole ({fault}); resuming from {place}", RuntimeWarning)
        return str(place)
    if is_finished:
        failure = f"expected a whole checkpoint in {folder}, found none; move these away to begin:\n- "
        lines = fitted((f"{place}: {fault}" for place, fault in faults.items()), "\n- ", failure)
        raise SourceError(f"{failure}{lines}")
    return None


def _step_of(place: Path) -> int:
    return int(place.name.rpartition("-")[2])


class SaveOnSignal(TrainerCallback):  # type: ignore[misc]
    """Saves ``checkpoint-N`` when a signal has reached any rank, at the end of the step that is under way.

    Then the program goes on, or ends with exit code 75 on all ranks, as with `Series`.  Give it after `VerifySaved`.

    Args:
        on: as for `Series`.
    """

    def __init__(self, on: On = (signal.SIGTERM,)) -> None:
        self._signals = Signals(on, None)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, eval_dataloader: Any = None, **_: Any
    ) -> None:
        """Have workers of data loaders ignore the signals, which would else end them before there is a checkpoint."""
        for loader in (train_dataloader, eval_dataloader):
            for candidate in {loader, getattr(loader, "base_dataloader", loader)}:  # accelerate's has another inside
                if isinstance(candidate, DataLoader):
                    self._signals.spare_workers(candidate)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Have the Trainer save if a signal has asked for it.  Collective, as `Series.due`."""
        if self._signals.due(f"on_step_end({state.global_step})"):
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Go on, or end the program, when all ranks have saved.  Collective.

        Raises:
            SystemExit: a signal has asked to stop.
        """
        place = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self._signals.ask(place)
        self._signals.met(str(Path(args.output_dir) / place))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put former handlers back."""
        self._signals.close()
