"""What each parameter of a model gets from its optimizers, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...names.errors import LayoutError
from ...names.wording import folded
from ...optimizer import Muon
from ...optimizer.groups import FROZEN, ONE_MATRIX, WRAPPERS, Decision
from ...optimizer.methods.matrix import MATRICES, fused_of
from ...optimizer.planning.matrices import Fused, shapes_of
from .programs import class_of, known_optimizer

NOBODY = "none"
"""The algorithm of a parameter that no optimizer has."""


@dataclass(frozen=True, slots=True)
class Treatment:
    """What one parameter gets.

    Attributes:
        names: its names in the model, several if it is shared; without parts that wrappers insert.
        algorithm: "muon", "normuon", "adamw", "lion", the class of an unknown optimizer, or "none".
        optimizer, group: the positions of the optimizer and of its group; None if no optimizer has it.
        matrices: how many matrices of it are orthogonalised.
        kind: of the rules' decision, where there were rules.
        why: the reason: a rule, a group, or that it is frozen.
        explicit: whether a rule names this parameter, so that the user has thought of it.
    """

    parameter: Tensor = field(compare=False, repr=False)
    names: tuple[str, ...]
    shape: tuple[int, ...]
    algorithm: str
    optimizer: int | None
    group: int | None
    matrices: int
    kind: str
    why: str
    fused: Fused = ONE_MATRIX
    explicit: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def by_muon(self) -> bool:
        return self.algorithm in MATRICES

    def to_json(self) -> dict[str, Any]:
        return {
            "names": self.names,
            "shape": self.shape,
            "gets": self.algorithm,
            "optimizer": self.optimizer,
            "group": self.group,
            "matrices": self.matrices,
            "kind": self.kind,
            "why": self.why,
        }


def names_of(model: nn.Module) -> dict[Tensor, tuple[str, ...]]:
    """Return the names of each parameter, without parts that wrappers insert."""
    names: dict[Tensor, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        names[parameter] = (*names.get(parameter, ()), plain)
    return names


def treatments(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[Treatment, ...]:
    """Return what each parameter of the model gets, in the model's order."""
    homes = {
        parameter: (number, place, group)
        for number, optimizer in enumerate(optimizers)
        for place, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    decisions: dict[Tensor, Decision] = {}
    for optimizer in optimizers:
        decided = optimizer.decisions() if isinstance(optimizer, Muon) else None
        decisions |= {decision.parameter: decision for decision in decided or ()}
    return tuple(
        _treatment(parameter, names, homes.get(parameter), optimizers, decisions.get(parameter))
        for parameter, names in names_of(model).items()
    )


def _treatment(
    parameter: Tensor,
    names: tuple[str, ...],
    home: tuple[int, int, Mapping[str, Any]] | None,
    optimizers: Sequence[Optimizer],
    decision: Decision | None,
) -> Treatment:
    shape, kind = tuple(parameter.shape), decision.kind if decision else ""
    if home is None:
        frozen = not parameter.requires_grad
        why = "requires_grad=False, in no group" if frozen else "in no group of any optimizer"
        return Treatment(parameter, names, shape, NOBODY, None, None, 0, FROZEN if frozen else kind, why)
    number, place, group = home
    optimizer = optimizers[number]
    algorithm, fused = _method(optimizer, group, parameter)
    count = 0
    if algorithm in MATRICES:
        try:
            count = len(shapes_of(shape, fused))
        except LayoutError:  # another program orthogonalises it in another way, of which a finding tells
            count = 1
    whose = type(optimizer).__name__ if len(optimizers) > 1 else ""
    why = decision.why if decision and decision.why else f"group {place}{f' of {whose}' if whose else ''}"
    explicit = decision is not None and decision.rule is not None and decision.rule.names is not None
    return Treatment(parameter, names, shape, algorithm, number, place, count, kind, why, fused, explicit)


def _method(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> tuple[str, Fused]:
    """Return the algorithm of a parameter, and the matrices in it."""
    if isinstance(optimizer, Muon):
        algorithm = str(group["algorithm"])
        return algorithm, fused_of(group) if algorithm in MATRICES else ONE_MATRIX
    known = known_optimizer(optimizer)
    if known is None:
        return class_of(optimizer).rpartition(".")[2], ONE_MATRIX
    # `get`, because the state of a parameter without state is made when it is asked for.
    return known.method(group, optimizer.state.get(parameter, {})), ONE_MATRIX


def table(every: Sequence[Treatment]) -> Iterator[tuple[str, ...]]:
    """Yield rows of what parameters get: one for all layers in which it is the same."""
    rows = [
        (
            " = ".join(one.names),
            (
                _shape(one.shape),
                one.algorithm,
                str(one.matrices or "-"),
                one.why + (f" ({one.kind})" if one.kind and one.kind != FROZEN else ""),
            ),
        )
        for one in every
    ]
    for name, count, cells in folded(rows):
        yield (name, str(count), *cells)


HEADERS = ("parameter", "count", "shape", "gets", "matrices", "because")


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
