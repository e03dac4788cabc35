"""Applying rules to a model: the decision on each parameter, as a table for people and as parameter groups."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..methods.matrix import MATRICES
from ..methods.scalar import SCALARS
from ..planning.matrices import Fused, matrices_of
from .rules import KINDS, WHOLE, AnyShape, Rule, Use

FROZEN = "frozen"
"""The kind of parameters with ``requires_grad=False``, which are in no group and have no state."""

FAMILIES: Mapping[str, tuple[str, ...]] = {"muon": tuple(MATRICES), "adamw": tuple(SCALARS)}
"""The algorithms that options may choose for a kind, by the one in `KINDS`: all take the same parameters."""

ONE_MATRIX = Fused()

Options = Mapping[str, Any]
_NONE: Options = MappingProxyType({})
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on one parameter.

    Args:
        names: all its qualified names, several if it is shared; without what wrappers insert.
        shape: global shape.
        kind: a key of `KINDS`, or "frozen".
        rule: the rule that decided; None for a frozen parameter.
        why: how that rule selected it.
        fused: the matrices in it, if any.
        if_trained: the decision on a frozen parameter if it were trained, if the rules make one.

    Raises:
        ValueError: a kind that cannot have this shape, or fused matrices that do not add up to it.
    """

    parameter: Tensor = field(compare=False, repr=False)
    names: tuple[str, ...]
    shape: AnyShape
    kind: str
    rule: Rule | None
    why: str
    fused: Fused = ONE_MATRIX
    if_trained: Decision | None = field(default=None, repr=False)

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
        """Return the cells of this decision's row in the table."""
        counts = {"": self.fused.pieces or (), "columns ": self.fused.columns or ()}
        fused = {}
        for what, sizes in counts.items():
            alike = len(sizes) > 2 and len(set(sizes)) == 1
            fused[what] = f"{len(sizes)} x {sizes[0]}" if alike else " + ".join(map(str, sizes))
        if self.fused.interleaved > 1:
            fused[""] = f"{self.fused.interleaved} x ({fused['']})"
        words = ", ".join(f"{what}{text}" for what, text in fused.items() if counts[what]) or "-"
        return str(list(self.shape)), self.kind, self.algorithm, words, self.why


@dataclass(frozen=True, slots=True)
class Decisions:
    """The decisions on all parameters of a model, in its order; ``str`` makes a table of them.

    Raises:
        ValueError: a parameter occurs twice.
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
        """Return parameter groups for `Muon`; each parameter that is not frozen is in exactly one.

        Schedulers know groups by number, so the order depends on rules and ``kinds`` only: matrices, the rest, then
        kinds with options of their own, in the order of `KINDS`.  A group whose parameters are all frozen is empty and
        keeps its number, unless no group comes after it.

        Args:
            muon: options of all groups of matrices, such as ``lr`` or ``algorithm="normuon"``.
            adamw: options of all other groups, such as ``algorithm="lion"``.  Give ``lr`` here, unless one rate serves
                both (`Muon`).
            kinds: options by kind, which override the others.

        Raises:
            ValueError: an unknown kind, an algorithm that does not take these parameters, or an option that rules set.
        """
        if unknown := set(kinds) - set(KINDS):
            raise ValueError(f"options for unknown kinds {sorted(unknown)}; expected some of {', '.join(KINDS)}")
        base = {"muon": {"algorithm": "muon", **muon}, "adamw": {"algorithm": "adamw", **adamw}}
        options = {kind: {**base[KINDS[kind].algorithm], **kinds.get(kind, {})} for kind in KINDS}
        for kind, chosen in options.items():
            if reserved := {"params", "pieces", "columns", "interleaved"} & set(chosen):
                raise ValueError(
                    f"{sorted(reserved)} among the options of {kind!r}: the rules say that, not the options"
                )
            if chosen["algorithm"] not in FAMILIES[KINDS[kind].algorithm]:
                raise ValueError(
                    f"algorithm {chosen['algorithm']!r} for {kind!r}, which takes one of "
                    f"{FAMILIES[KINDS[kind].algorithm]}; to change who steps a parameter, change its kind by a rule"
                )
        gathered: dict[tuple[str, Fused], list[Tensor]] = {}
        for decision in self.decisions:
            trained = decision.if_trained or decision
            if trained.kind != FROZEN:
                # Kinds without options of their own share a group.
                key = trained.kind if trained.kind in kinds else trained.algorithm
                gathered.setdefault((key, trained.fused), []).extend([decision.parameter] * (trained is decision))
        order = [*FAMILIES, *KINDS]

        def in_order(item: tuple[str, Fused]) -> tuple[Any, ...]:
            key, fused = item
            return order.index(key), fused.pieces or (), fused.columns or (), fused.interleaved

        keys = sorted(gathered, key=in_order)
        while keys and not gathered[keys[-1]]:
            keys.pop()
        return [
            {
                **(options[key] if key in kinds else base[key]),
                **{name: value for name, value in asdict(fused).items() if value != getattr(ONE_MATRIX, name)},
                "params": gathered[key, fused],
            }
            for key, fused in keys
        ]

    def __str__(self) -> str:
        rows = folded((" = ".join(decision.names), decision.cells()) for decision in self.decisions)
        header = ("parameter", "count", "shape", "kind", "algorithm", "fused", "decided by")
        lines = table([header, *((name, str(count), *cells) for name, count, cells in rows)])
        for algorithm in dict.fromkeys(decision.algorithm for decision in self.decisions):
            sizes = [math.prod(decision.shape) for decision in self.decisions if decision.algorithm == algorithm]
            lines.append(f"{algorithm}: {len(sizes)} parameters, {sum(sizes):,} elements")
        return "\n".join(lines)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def folded(rows: Iterable[tuple[str, T]]) -> list[tuple[str, int, T]]:
    """Merge rows whose names differ only in numbers, as those of layers do: the name with ``*`` there, and a count."""
    alike: dict[tuple[str, T], list[list[str]]] = {}
    for name, rest in rows:
        parts = re.split(r"([. ])", name)
        pattern = "".join("*" if part.isdecimal() else part for part in parts)
        alike.setdefault((pattern, rest), []).append(parts)
    return [
        ("".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*names, strict=True)), len(names), rest)
        for (_, rest), names in alike.items()
    ]


WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Parts that torch.compile, activation checkpointing and FSDP1 insert into names; DCP drops them too."""


def sort_parameters(model: nn.Module, *layers: Sequence[Rule]) -> Decisions:
    """Decide by rules what every parameter of ``model`` is, and refuse everything that they leave unclear.

    The first layer with a rule for a parameter decides it, and all rules of that layer that select it must agree.  A
    parameter that several modules share has several names; if one of them makes it an embedding, and the others a head
    or a matrix by its module type, it is a tied embedding.

    The model may be sharded (DTensors count with their global shape), compiled, checkpointed or wrapped for DDP: names
    are without what wrappers insert.  Parameters with ``requires_grad=False`` need no rule and are in no group.

    Args:
        layers: sequences of rules, such as your own and then a ready-made set.

    Raises:
        ValueError: lists everything that is unclear: parameters under no rule, rules that disagree, a shape that the
            kind cannot have or the split does not fit, a matrix as tall as an embedding that no rule names, matrices
            while no rule speaks of an output head, rules that select nothing, and flat or uninitialized parameters.
    """
    uses_of = _uses(model)
    every_use = [use for uses in uses_of.values() for use in uses]
    problems = [
        ("", f"{rule!r} selects nothing")
        for layer in layers
        for rule in layer
        if not rule.optional and not any(map(rule.reason, every_use))
    ]
    decisions: list[Decision] = []
    for parameter, uses in uses_of.items():
        try:
            decisions.append(_decide(parameter, uses, layers))
        except ValueError as error:
            owners = " and ".join(dict.fromkeys(type(use.owner).__name__ for use in uses))
            names = " = ".join(use.name for use in uses)
            problems.append((names, f"{list(parameter.shape)} in {owners}: {error}"))
    problems += _possible_heads(decisions, uses_of, layers)
    if problems:
        lines = [
            f"{name} ({count} alike) {what}" if count > 1 else f"{name} {what}"
            for name, count, what in folded(problems)
        ]
        raise ValueError("\n- ".join(["the parameters cannot be sorted:", *map(str.strip, lines)]))
    return Decisions(tuple(decisions))


def _uses(model: nn.Module) -> dict[Tensor, list[Use]]:
    modules = list(model.named_modules(remove_duplicate=False))
    replicated = [path for path, module in modules if isinstance(module, DistributedDataParallel)]
    inserted = {f"{path}.module".removeprefix(".") for path in replicated}
    uses_of: dict[Tensor, list[Use]] = {}
    for path, module in modules:
        parts = path.split(".")
        own = [
            part
            for end, part in enumerate(parts, 1)
            if part and part not in WRAPPERS and ".".join(parts[:end]) not in inserted
        ]
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = ".".join([*own, attribute])
            if is_lazy(parameter):
                raise ValueError(f"{name} is uninitialized and has no shape yet; run the model once first")
            uses_of.setdefault(parameter, []).append(Use(name, module, attribute, parameter))
    return uses_of


def _decide(parameter: Tensor, uses: Sequence[Use], layers: Sequence[Sequence[Rule]]) -> Decision:
    if parameter.requires_grad:
        return _by_rules(parameter, uses, layers)
    names = tuple(use.name for use in uses)
    frozen = Decision(parameter, names, tuple(parameter.shape), FROZEN, None, "requires_grad=False")
    try:
        return replace(frozen, if_trained=_by_rules(parameter, uses, layers))
    except ValueError:  # it needs no rule
        return frozen


def _by_rules(parameter: Tensor, uses: Sequence[Use], layers: Sequence[Sequence[Rule]]) -> Decision:
    names, shape = tuple(use.name for use in uses), tuple(parameter.shape)
    if isinstance(parameter, FlatParameter):
        raise ValueError("FSDP1 made one vector of several parameters; shard the model with fully_shard")
    for layer in layers:
        selecting = [(rule, why) for rule in layer for use in uses if (why := rule.reason(use))]
        if selecting:
            rule, why = _agreed(selecting, shared=len(uses) > 1)
            whole = Decision(parameter, names, shape, rule.kind, rule, why)
            # Its kind has been checked to have rows and columns.
            return whole if rule.split == WHOLE else replace(whole, fused=rule.split.of(shape))
    raise ValueError("no rule selects it; add one")


def _agreed(selecting: Sequence[tuple[Rule, str]], shared: bool) -> tuple[Rule, str]:
    if len({(rule.kind, rule.split) for rule, _ in selecting}) == 1:
        return selecting[0]
    embedding = next(((rule, why) for rule, why in selecting if rule.kind == "embedding"), None)
    # A rule for a module type does not know that its parameter is an embedding elsewhere; a rule with names does.
    by_type = all(rule.kind in ("embedding", "head") or _by_type(rule) for rule, _ in selecting)
    if shared and embedding and by_type:
        return embedding[0], f"{embedding[1]} (tied)"
    disagreeing = " and ".join(dict.fromkeys(repr(rule) for rule, _ in selecting))
    raise ValueError(f"{disagreeing} disagree; put the one that shall win into an earlier layer")


def _by_type(rule: Rule | None) -> bool:
    return rule is not None and rule.kind == "matrix" and rule.names is None


def _possible_heads(
    decisions: Sequence[Decision], uses_of: Mapping[Tensor, Sequence[Use]], layers: Sequence[Sequence[Rule]]
) -> Iterator[tuple[str, str]]:
    """Yield names and problems of matrices that may be an output head: only the user can tell it from any nn.Linear."""
    uses = [use for uses in uses_of.values() for use in uses]
    by_type = [decision for decision in decisions if _by_type(decision.rule)]
    heads = [rule for layer in layers for rule in layer if rule.kind == "head"]
    named = any(rule.names == () or any(map(rule.reason, uses)) for rule in heads)
    tied = any(
        all(any(isinstance(use.owner, module) for use in shared) for module in (nn.Embedding, nn.Linear))
        for shared in uses_of.values()
    )
    # Rules that name every matrix leave a head of another name unsorted, so it is enough that they know of heads.
    known = named or tied or (heads and not by_type)
    if not known and any(decision.kind == "matrix" for decision in decisions):
        yield "", "which matrix is the output head?  Add Rule('head', its name), or NO_HEAD if there is none"
    # Frozen embeddings count too, by their module.
    embeddings = [decision.parameter for decision in decisions if decision.kind == "embedding"]
    embeddings += [use.parameter for use in uses if isinstance(use.owner, nn.Embedding)]
    heights = {tensor.shape[0] for tensor in embeddings if tensor.dim() == 2}
    for decision in by_type:
        if decision.shape[0] in heights:
            name = decision.names[0]
            yield (
                " = ".join(decision.names),
                f"{list(decision.shape)} has as many rows as an embedding: is it an output head?  Add "
                f"Rule('head', {name!r}) or Rule('matrix', {name!r}) in an earlier layer",
            )
