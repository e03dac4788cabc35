"""The user's request for names, structure and conventions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...names.vocabulary import Convention
from ...programs.dialect import Dialect
from .conventions import WeightsFrom, check_mu
from .groups import GroupTemplate
from .names import NameRules


@dataclass(frozen=True, slots=True)
class Request:
    """A request for outputs; by default nothing changes.

    Attributes:
        source: the dialect of the checkpoint; None means that the keys tell.
        target: the dialect to write; None means the source's.
        rules: are applied to parameters and to their state.
        convention: of the source, where nothing in it says that.
        target_convention: the convention to write, if the target has none of its own.
        mu: the momentum coefficient, where a group has none.
        step: the number of updates, whatever the source says.
        fill_missing: whether missing state is written as zeros.
        weights: what weights are made of; None: both stay.
        state_dtype: the dtype of momentum and moments; None: the source's.
        drop: slots of state to leave out.
        like: the groups of the run that the result is for.
        tensors_only: whether items that are no tensors are left out.
        model_only: whether all but the model's weights and buffers is left out.
    """

    source: Dialect | None = None
    target: Dialect | None = None
    rules: NameRules = field(default_factory=NameRules)
    convention: Convention | None = None
    target_convention: Convention | None = None
    mu: float | None = None
    step: int | None = None
    fill_missing: bool = False
    weights: WeightsFrom | None = None
    state_dtype: str | None = None
    drop: frozenset[str] = frozenset()
    like: GroupTemplate | None = None
    tensors_only: bool = False
    model_only: bool = False

    def __post_init__(self) -> None:
        if self.mu is not None:
            check_mu(self.mu, "`mu=`")

    @property
    def translates(self) -> bool:
        """Return whether the request is for more than to leave something out."""
        return replace(self, tensors_only=False, model_only=False) != Request()
