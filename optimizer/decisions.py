"""Decisions on the parameters of a model: the kind of each, and the groups that they make for `Muon`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ..names.errors import ArgumentError
from ..names.vocabulary import FUSION
from ..names.wording import folded, table
from .methods.form import MatrixMethod
from .methods.matrix import MATRICES
from .methods.scalar import SCALARS
from .planning.matrices import Fused, matrices_of
from .rules import KINDS, Rule

FROZEN = "frozen"
"""The kind of parameters with ``requires_grad=False``, which are in no group and have no state."""

FAMILIES: Mapping[str, tuple[str, ...]] = {"muon": tuple(MATRICES), "adamw": tuple(SCALARS)}
"""The algorithms that options may choose for a kind, by the one in `KINDS`: all take the same parameters."""

ONE_MATRIX = Fused()

Options = Mapping[str, Any]
_NONE: Options = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on one parameter.

    Args:
        names: its qualified names, several if it is shared; without parts that wrappers insert.
        shape: global shape.
        kind: a key of `KINDS`, or "frozen".
        rule: the rule that decided; None for a frozen parameter.
        why: how that rule selected it.
        fused: the matrices in it.
        if_trained: the rules' decision, if any, on a frozen parameter.
    """

    parameter: Tensor = field(compare=False, repr=False)
    names: tuple[str, ...]
    shape: tuple[int, ...]
    kind: str
    rule: Rule | None
    why: str
    fused: Fused = ONE_MATRIX
    if_trained: Decision | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        kind = KINDS.get(self.kind)
        if kind and kind.dims is not None and len(self.shape) not in kind.dims:
            allowed = " or ".join(map(str, kind.dims))
            raise ArgumentError(f"kind {self.kind!r} has {allowed} dims; {kind.advice}")
        if self.algorithm == "muon":
            matrices_of(self.shape, self.fused)

    @property
    def algorithm(self) -> str:
        """ "muon", "adamw", or "none" if frozen."""
        return "none" if self.kind == FROZEN else KINDS[self.kind].algorithm

    def cells(self) -> tuple[str, ...]:
        """Return this decision's row of the table, without names and count."""
        return str(list(self.shape)), self.kind, self.algorithm, str(self.fused) or "-", self.why


@dataclass(frozen=True, slots=True)
class Decisions:
    """The decisions on all parameters of a model, in its order, each once; ``str`` makes a table of them."""

    decisions: tuple[Decision, ...]

    def __post_init__(self) -> None:
        if len({id(decision.parameter) for decision in self.decisions}) != len(self.decisions):
            raise ArgumentError("a parameter is decided twice")

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.decisions)

    def groups(
        self, muon: Options = _NONE, adamw: Options = _NONE, kinds: Mapping[str, Options] = _NONE
    ) -> list[dict[str, Any]]:
        """Return parameter groups for `Muon`; each parameter that is not frozen is in exactly one.

        Schedulers know groups by number, so the order depends on rules and ``kinds`` only: matrices, other parameters,
        then kinds with options of their own, in the order of `KINDS`.  A group of frozen parameters is empty, unless
        last.

        Args:
            muon: options of all groups of matrices, such as ``lr`` or ``algorithm="normuon"``.
            adamw: options of all other groups, such as ``algorithm="lion"``, and ``lr`` unless one rate serves both.
            kinds: options by kind, which override the others.
        """
        if unknown := set(kinds) - set(KINDS):
            raise ArgumentError(f"options for unknown kinds {sorted(unknown)}; expected some of {', '.join(KINDS)}")
        # The options of each kind, which may not change who steps it.
        base = {"muon": {"algorithm": "muon", **muon}, "adamw": {"algorithm": "adamw", **adamw}}
        options = {kind: {**base[KINDS[kind].algorithm], **kinds.get(kind, {})} for kind in KINDS}
        for kind, kind_options in options.items():
            if reserved := {"params", *FUSION} & set(kind_options):
                raise ArgumentError(
                    f"{sorted(reserved)} among the options of {kind!r}: the rules say that, not the options"
                )
            algorithm, usual = kind_options["algorithm"], KINDS[kind].algorithm
            is_custom = isinstance(algorithm, MatrixMethod) and usual == "muon"
            if not is_custom and algorithm not in FAMILIES[usual]:
                raise ArgumentError(
                    f"algorithm {algorithm!r} for {kind!r}, which takes one of {FAMILIES[usual]}; to change who steps "
                    "a parameter, change its kind by a rule"
                )
        # Kinds without options of their own share a group.  Frozen parameters make groups, and are in none.
        params: dict[tuple[str, Fused], list[Tensor]] = {}
        for decision in self.decisions:
            trained = decision.if_trained or decision
            if trained.kind != FROZEN:
                key = trained.kind if trained.kind in kinds else trained.algorithm
                params.setdefault((key, trained.fused), []).extend([decision.parameter] * (trained is decision))
        # In an order that does not depend on the model; frozen groups at the end are left out.
        order = [*FAMILIES, *KINDS]

        def group_order(item: tuple[str, Fused]) -> tuple[Any, ...]:
            key, fused = item
            return order.index(key), fused.pieces or (), fused.columns or (), fused.interleaved, fused.flatten

        keys = sorted(params, key=group_order)
        while keys and not params[keys[-1]]:
            keys.pop()
        groups = []
        for key, fused in keys:
            split = {name: value for name, value in asdict(fused).items() if value != getattr(ONE_MATRIX, name)}
            groups.append({**(options[key] if key in kinds else base[key]), **split, "params": params[key, fused]})
        return groups

    def __str__(self) -> str:
        rows = folded((" = ".join(decision.names), decision.cells()) for decision in self.decisions)
        header = ("parameter", "count", "shape", "kind", "algorithm", "fused", "decided by")
        lines = table([header, *((name, str(count), *cells) for name, count, cells in rows)])
        for algorithm in dict.fromkeys(decision.algorithm for decision in self.decisions):
            sizes = [math.prod(decision.shape) for decision in self.decisions if decision.algorithm == algorithm]
            lines.append(f"{algorithm}: {len(sizes)} parameters, {sum(sizes):,} elements")
        return "\n".join(lines)
