"""The result of a restore: what was loaded, and the proof that what runs now is that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...checkpoint.all_ranks import group_ranks, is_coordinator
from ...checkpoint.live_parts import LiveParts
from ...checkpoint.loading import Loaded
from ...checkpoint.resume_check import compare
from ...checkpoint.resume_proof import LoadedState, ResumeProof
from ...checkpoint.training import Training
from ...names.errors import called_like, going_on
from ...names.resumption import LoadReport
from ...store.io.location import Location
from ..resumes import add_proof, add_resume


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of `Series.restore`.

    Attributes:
        step, path: those of the checkpoint that was loaded; training goes on after it.
        report: what was done with which parameters; ``print`` shows all of this in one line.
    """

    step: int
    path: str
    report: LoadReport
    _loaded: LoadedState = field(kw_only=True, repr=False, compare=False)
    _folder: Location = field(kw_only=True, repr=False, compare=False)
    _group: dist.ProcessGroup | None = field(kw_only=True, repr=False, compare=False)
    _record: str | None = field(kw_only=True, repr=False, compare=False)

    @classmethod
    def recorded(
        cls, step: int, saved_as: int, path: str, loaded: Loaded, folder: Location, group: dist.ProcessGroup | None
    ) -> Restored:
        """Return a result after recording in the run's folder that the run was resumed, as not checked yet.

        Args:
            saved_as: the step that is recorded, which another name of the checkpoint does not change.
        """
        state, record = loaded.state, None
        if is_coordinator(group):
            with going_on(f"the resume cannot be recorded in {folder}"):
                record = add_resume(folder, saved_as, path, state.world_size, len(group_ranks(group)))
        return cls(step, path, loaded.report, _loaded=state, _folder=folder, _group=group, _record=record)

    @called_like("proof = restored.check(model, optimizer, scheduler=scheduler)")
    def check(self, model: nn.Module, *optimizers: Optimizer, scheduler: Any | None = None) -> ResumeProof:
        """Compare what will run with what was saved, and record the outcome in the run.  Collective; changes nothing.

        Call it when all state is set, before the first step: after ``set_state_dict``, and after a scheduler has loaded
        its state.  Every tensor is compared by its fingerprint, and by value every option of every group, step counts,
        names, and what the scheduler keeps; on any mesh.  It costs one look at all live state, and reads no file.

        Args:
            optimizers: all that were restored, in any class.
            scheduler: one whose ``state_dict()`` was restored.

        Returns:
            The differences, the same on all ranks; print it.

        Raises:
            ArgumentError: nothing that was restored has the keys of one of them, or several parts have.
            AttestError: the state of one of them cannot be taken.
        """
        return self._compared(lambda: LiveParts.of_objects(self._loaded, model, optimizers, scheduler))

    def check_training(self, training: Training) -> ResumeProof:
        """Compare the objects of a training as `check` does, with all that is restored with them."""
        return self._compared(lambda: LiveParts.of_training(self._loaded, training))

    def compare(self, state_dict: Mapping[str, Any]) -> ResumeProof:
        """Compare a state dict, nested as that of `Series.restore` and taken again, as `check` does.

        Raises:
            AttestError: as in `check`.
        """
        return self._compared(lambda: LiveParts.of_state_dict(self._loaded, state_dict))

    def _compared(self, take_parts: Callable[[], LiveParts]) -> ResumeProof:
        """Compare, and record the proof in the run."""
        # The comparison is collective; the record is the first rank's.
        proof = compare(take_parts, self.step, self._group)
        if self._record is not None:
            with going_on(f"the resume cannot be recorded in {self._folder}"):
                add_proof(self._folder, self._record, proof.to_json())
        return proof

    def __str__(self) -> str:
        return f"step {self.step} restored from {self.path}: {'; '.join(str(self.report).splitlines())}"

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(
            f"Series.restore returns the step, {self.step}, the path and a report; what was loaded is in the state "
            "dict that it was given. Write first = restored.step + 1"
        )

    __add__ = __getitem__
