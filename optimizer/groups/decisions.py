"""What has been decided about a model's parameters: a table for people, and parameter groups for the optimizer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor

from ..planning.matrices import Fused, matrices_of
from ..scalar import SCALARS
from ..step.methods import MATRICES
from .rules import KINDS, AnyShape, Rule

FROZEN = "frozen"
"""Kind of a parameter with ``requires_grad=False``: it is in no group and has no state."""

FAMILIES: Mapping[str, tuple[str, ...]] = {"muon": tuple(MATRICES), "adamw": tuple(SCALARS)}
"""Algorithms that options may choose instead of the one in the table: those that take the same parameters."""

ONE_MATRIX = Fused()

Options = Mapping[str, Any]
_NONE: Options = MappingProxyType({})
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision:
    """What one parameter is.

    Args:
        names: all its qualified names, more than one if it is shared; without what wrappers insert.
        shape: global shape.
        kind: a key of `KINDS`, or "frozen".
        rule: the rule that decided, None for what is frozen.
        why: how that rule selected it.
        fused: the matrices in it, if it has any.

    Raises:
        ValueError: a kind that cannot have this shape, or what is fused does not add up to it.
    """

    parameter: Tensor = field(compare=False, repr=False)
    names: tuple[str, ...]
    shape: AnyShape
    kind: str
    rule: Rule | None
    why: str
    fused: Fused = ONE_MATRIX

    def __post_init__(self) -> None:
        kind = KINDS.get(self.kind)
        if kind and kind.dims is not None and len(self.shape) not in kind.dims:
            allowed = " or ".join(map(str, kind.dims))
            raise ValueError(f"kind {self.kind!r} has {allowed} dims; {kind.advice}")
        if self.algorithm == "muon":
            matrices_of(self.shape, self.fused)

    @property
    def algorithm(self) -> str:
        """ "muon", "adamw", or "none" for what is frozen."""
        return "none" if self.kind == FROZEN else KINDS[self.kind].algorithm

    def cells(self) -> tuple[str, ...]:
        """The decision in words, as the table has it."""
        return str(list(self.shape)), self.kind, self.algorithm, _words(self.fused), self.why


@dataclass(frozen=True, slots=True)
class Decisions:
    """What every parameter of a model is, in the model's order.  Printed, it is the table of decisions.

    Raises:
        ValueError: a parameter is there twice.
    """

    decisions: tuple[Decision, ...]

    def __post_init__(self) -> None:
        if len({id(decision.parameter) for decision in self.decisions}) != len(self.decisions):
            raise ValueError("a parameter is decided twice")

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.decisions)

    def groups(
        self, muon: Options = _NONE, adamw: Options = _NONE, kinds: Mapping[str, Options] = _NONE
    ) -> list[dict[str, Any]]:
        """Parameter groups for `Muon`; each parameter that is not frozen is in exactly one.

        Args:
            muon: options of all groups whose algorithm is "muon", such as ``lr``; ``algorithm="normuon"`` is one too.
            adamw: the same for "adamw"; ``algorithm="lion"`` is one too.  ``lr`` must be among them, unless that of
                matrices is AdamW's too (`Muon`).
            kinds: options by kind, over those.

        Raises:
            ValueError: an unknown kind, an algorithm that does not take these parameters, or an option that is the
                rules' to set.
        """
        if unknown := set(kinds) - set(KINDS):
            raise ValueError(f"options for unknown kinds {sorted(unknown)}; expected some of {', '.join(KINDS)}")
        base = {"muon": {"algorithm": "muon", **muon}, "adamw": {"algorithm": "adamw", **adamw}}
        options = {kind: {**base[KINDS[kind].algorithm], **kinds.get(kind, {})} for kind in KINDS}
        for kind, chosen in options.items():
            _check_options(kind, chosen)
        gathered: dict[tuple[str, Fused], list[Tensor]] = {}
        for decision in self.decisions:
            if decision.kind != FROZEN:
                # Kinds without options of their own share a group.
                key = decision.kind if decision.kind in kinds else decision.algorithm
                gathered.setdefault((key, decision.fused), []).append(decision.parameter)
        return [
            {**(options[key] if key in kinds else base[key]), **_given(fused), "params": params}
            for (key, fused), params in gathered.items()
        ]

    def __str__(self) -> str:
        rows = folded((" = ".join(decision.names), decision.cells()) for decision in self.decisions)
        table: list[tuple[str, ...]] = [("parameter", "count", "shape", "kind", "algorithm", "fused", "decided by")]
        table += [(name, str(count), *cells) for name, count, cells in rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join([*lines, *self._totals()])

    def _totals(self) -> Iterator[str]:
        for algorithm in dict.fromkeys(decision.algorithm for decision in self.decisions):
            sizes = [math.prod(decision.shape) for decision in self.decisions if decision.algorithm == algorithm]
            yield f"{algorithm}: {len(sizes)} parameters, {sum(sizes):,} elements"


def _check_options(kind: str, options: Options) -> None:
    if reserved := {"params", "pieces", "columns", "interleaved"} & set(options):
        raise ValueError(f"{sorted(reserved)} among the options of {kind!r}: the rules say that, not the options")
    family = FAMILIES[KINDS[kind].algorithm]
    if options["algorithm"] not in family:
        raise ValueError(
            f"algorithm {options['algorithm']!r} for {kind!r}, which takes one of {family}; to change who steps a "
            "parameter, change its kind by a rule"
        )


def _given(fused: Fused) -> dict[str, Any]:
    """What a group is told of it: all that is not the default."""
    return {name: value for name, value in asdict(fused).items() if value != getattr(ONE_MATRIX, name)}


def _words(fused: Fused) -> str:
    rows = _sum(fused.pieces) if fused.interleaved == 1 else f"{fused.interleaved} x ({_sum(fused.pieces)})"
    return ", ".join([rows] * bool(fused.pieces) + [f"columns {_sum(fused.columns)}"] * bool(fused.columns)) or "-"


def _sum(counts: AnyShape | None) -> str:
    counts = counts or ()
    alike = len(counts) > 2 and len(set(counts)) == 1
    return f"{len(counts)} x {counts[0]}" if alike else " + ".join(map(str, counts))


def folded(rows: Iterable[tuple[str, T]]) -> list[tuple[str, int, T]]:
    """Rows that differ only in numbers in the name, as those of layers do, as one with ``*`` there, and their count."""
    alike: dict[tuple[str, T], list[list[str]]] = {}
    for name, rest in rows:
        parts = re.split(r"([. ])", name)
        pattern = "".join("*" if part.isdecimal() else part for part in parts)
        alike.setdefault((pattern, rest), []).append(parts)
    return [(_common(names), len(names), rest) for (_, rest), names in alike.items()]


def _common(names: list[list[str]]) -> str:
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*names, strict=True))
