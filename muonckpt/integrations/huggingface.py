"""transformers' Trainer: Muon as its optimizer, and callbacks that check what was saved, and save on a signal."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoint.signals import On, Signals
from ..names.errors import warn_on_rank
from ..optimizer import FreshStart, Muon
from ..optimizer.groups import DEEPSEEK, LLAMA, MIXTRAL, QWEN, Rule
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
            ValueError: `Muon.for_model` refuses.
        """
        if rules is None:
            rules = RULES.get(str(getattr(getattr(model, "config", None), "model_type", None)), ())
        optimizer = Muon.for_model(model, rules=rules, **{"replicas": dist.group.WORLD, "named": True, **options})
        if fresh:
            optimizer.register_load_state_dict_pre_hook(FreshStart(fresh))
        return optimizer


class VerifySaved(TrainerCallback):  # type: ignore[misc]
    """Checks every checkpoint as soon as it is saved, as far as its files can be judged (`saved.check_saved`).

    The first rank reads the files back, and raises if they are not whole; the launcher then ends the others.  It also
    warns of a run that goes on without the state of its optimizer, of which the Trainer says nothing.
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, lr_scheduler: Any = None, **_: Any
    ) -> None:
        """Warn if training goes on from a checkpoint without optimizer and schedule, as ``save_only_model`` leaves it.

        The Trainer loads both or none.
        """
        # The schedule is loaded with the optimizer, and begins where that does.
        is_schedule_new = lr_scheduler is not None and lr_scheduler.state_dict().get("last_epoch") == 0
        if state.is_world_process_zero and state.global_step and is_schedule_new:
            parameters = Counter[str]()
            for group in optimizer.param_groups:
                parameters[group.get("algorithm", "the optimizer")] += len(group["params"])
            counts = ", ".join(f"{name}'s of {count} parameters" for name, count in parameters.items() if count)
            warn_on_rank(
                f"training goes on at step {state.global_step} from a checkpoint without optimizer: all state begins "
                f"anew ({counts}), and the schedule with its warm-up. For the same run, resume from one that was saved "
                "with save_only_model=False",
                RuntimeWarning,
            )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check ``checkpoint-N`` when it is complete; the Trainer calls this on all ranks.

        Raises:
            SourceError: lists the damage.
        """
        if state.is_world_process_zero:
            check_saved(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


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
