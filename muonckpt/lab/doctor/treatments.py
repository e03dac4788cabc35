"""A treatment says which algorithm steps a parameter of a model, in which group of which optimizer, and why."""

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
    """The treatment of one parameter by the optimizers of a program.

    Attributes:
        names: its names in the model, several if it is shared; without parts that wrappers insert.
        algorithm: "muon", "normuon", "adamw", "lion", the class of an unknown optimizer, or "none".
        optimizer, group: the positions of the optimizer and of its group; None if no optimizer has it.
        matrices: how many matrices of it are orthogonalised.
        kind: of the rules' decision, where there were rules.
        why: the reason: a rule, a group, or that it is frozen.
        explicit: whether a rule names this parameter, so that the user has thought of it.
        options: of its group.
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
    options: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def by_muon(self) -> bool:
        return self.algorithm in MATRICES

    @property
    def has_matrices(self) -> bool:
        """Whether Muon steps it, and ours could: matrices, stacks of them, and kernels that are flattened."""
        return self.by_muon and (2 <= len(self.shape) <= 3 or (len(self.shape) > 3 and self.fused.flatten))

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
        plain_name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        names[parameter] = (*names.get(parameter, ()), plain_name)
    return names


def find_treatments(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[Treatment, ...]:
    """Return the treatment of each parameter, in the model's order."""
    # A parameter in several groups has the treatment of the last; `doctor` finds these.
    homes: dict[Tensor, tuple[int, int]] = {}
    decisions: dict[Tensor, Decision] = {}
    for optimizer_index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            homes |= dict.fromkeys(group["params"], (optimizer_index, group_index))
        # Muon.for_model records the decisions of its rules.
        decided = optimizer.decisions() if isinstance(optimizer, Muon) else None
        decisions |= {decision.parameter: decision for decision in decided or ()}
    treatments = []
    for parameter, names in names_of(model).items():
        decision = decisions.get(parameter)
        if parameter in homes:
            treatments.append(_treatment(parameter, names, *homes[parameter], optimizers, decision))
        else:
            kind, reason = decision.kind if decision else "", "in no group of any optimizer"
            if not parameter.requires_grad:
                kind, reason = FROZEN, "requires_grad=False, in no group"
            shape = tuple(parameter.shape)
            treatments.append(Treatment(parameter, names, shape, NOBODY, None, None, 0, kind, reason))
    return tuple(treatments)


def _treatment(
    parameter: Tensor,
    names: tuple[str, ...],
    optimizer_index: int,
    group_index: int,
    optimizers: Sequence[Optimizer],
    decision: Decision | None,
) -> Treatment:
    """Return the treatment of a parameter by a group."""
    optimizer, shape = optimizers[optimizer_index], tuple(parameter.shape)
    group = optimizer.param_groups[group_index]
    algorithm, fused = _method(optimizer, group, parameter)
    num_matrices = 0
    if algorithm in MATRICES:
        try:
            num_matrices = len(shapes_of(shape, fused))
        except LayoutError:  # another program orthogonalises it in another way, of which a finding tells
            num_matrices = 1
    owner = f" of {type(optimizer).__name__}" if len(optimizers) > 1 else ""
    return Treatment(
        parameter,
        names,
        shape,
        algorithm,
        optimizer_index,
        group_index,
        num_matrices,
        kind=decision.kind if decision else "",
        why=decision.why if decision and decision.why else f"group {group_index}{owner}",
        fused=fused,
        explicit=decision is not None and decision.rule is not None and decision.rule.names is not None,
        options=group,
    )


def _method(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> tuple[str, Fused]:
    """Return the algorithm of a parameter, and the matrices in it."""
    if isinstance(optimizer, Muon):
        algorithm = str(group["algorithm"])
        return algorithm, fused_of(group) if algorithm in MATRICES else ONE_MATRIX
    program = known_optimizer(optimizer)
    if program is None:
        return class_of(optimizer).rpartition(".")[2], ONE_MATRIX
    # `get`, because the state of a parameter without state is made when it is asked for.
    algorithm = program.method(group, optimizer.state.get(parameter, {}))
    is_flattened = algorithm in MATRICES and program.flattens(group, tuple(parameter.shape))
    return algorithm, Fused(flatten=is_flattened)


HEADERS = ("parameter", "count", "shape", "gets", "matrices", "because")


def table(treatments: Sequence[Treatment]) -> Iterator[tuple[str, ...]]:
    """Yield rows of treatments under `HEADERS`: one for all layers in which they are the same."""
    rows = []
    for treatment in treatments:
        shape = " x ".join(map(str, treatment.shape)) or "scalar"
        kind = f" ({treatment.kind})" if treatment.kind and treatment.kind != FROZEN else ""
        cells = (shape, treatment.algorithm, str(treatment.matrices or "-"), treatment.why + kind)
        rows.append((" = ".join(treatment.names), cells))
    for name, count, cells in folded(rows):
        yield (name, str(count), *cells)
