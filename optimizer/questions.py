"""Questions about parameters that rules leave unclear, and the arguments that answer them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn

from ..names.errors import ArgumentError
from ..names.resumption import in_globs
from ..names.wording import find_heads, fitted, folded, unnumbered
from .decisions import Decision
from .families import FUSED, FUSED_PARTS, GATED
from .rules import Rule, Use

Uses = Mapping[Tensor, Sequence[Use]]
Results = Mapping[Tensor, Decision | ValueError]
"""The result for each parameter, in the model's order."""

_BELOW = re.compile(r"\.(base_layer|lora_B)\b.*|(\.(weight[0-9]*|linear|layer|module|[0-9]+))+$")
"""The end of a name below a projection: of a weight, a wrapper, or the half of an adapter that has its rows."""


class UnclearError(ArgumentError):
    """Rules leave a parameter unclear; one more ``rule`` would decide it."""

    def __init__(self, message: str, rule: Rule) -> None:
        super().__init__(message)
        self.rule = rule


class UnselectedError(UnclearError):
    """No rule selects a parameter."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a parameter, or about a rule, which has no names.

    Attributes:
        rule: would decide it, unless an argument of its own does.
        may_be_head: ``head`` may decide it.
        fused: ``split`` decides it: its name there, and the matrices in it.
    """

    names: tuple[str, ...]
    text: str
    rule: Rule | None = None
    may_be_head: bool = False
    fused: tuple[str, str] | None = None


class UnsortedError(ArgumentError):
    """Parameters of a model are unclear; ``arguments`` would decide them: code, by the argument's name."""

    def __init__(self, questions: Sequence[Question], uses_of: Uses, results: Results, given_rules: str) -> None:
        lines = []
        # One line for parameters that are alike in all layers.
        for name, count, text in folded((" = ".join(question.names), question.text) for question in questions):
            lines.append(f"{name}{f' ({count} alike)' if count > 1 else ''} {text}".strip())
        self.arguments, notes = _suggest_arguments(questions, uses_of, results, given_rules)
        code = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        failure, answers = "the parameters cannot be sorted:\n- ", [*([f"Write {code}"] if code else []), *notes]
        super().__init__("\n".join([failure + fitted(lines, "\n- ", failure, *answers), *answers]))


def find_questions(uses_of: Uses, results: Results, layers: Sequence[Sequence[Rule]]) -> Iterator[Question]:
    """Yield the open questions about the parameters of a model."""
    shapes = {use.name: tuple(use.parameter.shape) for use in chain(*uses_of.values())}
    heights = _find_head_heights(uses_of, results, layers)
    for parameter, uses in uses_of.items():
        names, shape, result = tuple(use.name for use in uses), tuple(parameter.shape), results[parameter]
        place = f"{list(shape)} in {' and '.join(dict.fromkeys(type(use.owner).__name__ for use in uses))}"
        rule = result.rule if isinstance(result, Decision | UnclearError) else None
        fused = next(filter(None, (_find_fused(use, shapes) for use in uses)), None)
        is_tall = len(shape) == 2 and (shape[0] in heights or (bool(heights) and "lm_head" in names[0]))
        if isinstance(result, Decision) and result.algorithm != "muon":
            continue
        # A rule that has a split, or spells the name out, says which matrices a projection holds.
        is_known = not fused or rule is None or rule.split is not None
        if fused and rule is not None and not is_known:
            is_known = any(fused.name in selector for selector in (*rule.patterns, rule.attribute or ""))
        if fused and (isinstance(result, UnselectedError) or (isinstance(result, Decision) and not is_known)):
            text = f"{list(shape)} holds {fused.matrices} by its name"
            yield Question(names, text, fused=(fused.pattern, fused.matrices))
        elif isinstance(result, ValueError):
            yield Question(
                names,
                text=f"{place}: {result}",
                rule=rule,
                may_be_head=is_tall and rule is not None and rule.kind == "matrix",
            )
        elif is_tall and is_typed_matrix(rule):
            yield Question(names, f"{list(shape)} has as many rows as an embedding", may_be_head=True)


def is_typed_matrix(rule: Rule | None) -> bool:
    """Return whether a rule selects matrices without names, such as those of every `nn.Linear`."""
    return rule is not None and rule.kind == "matrix" and rule.names is None


def is_in(uses: Sequence[Use], *module_types: type[nn.Module]) -> bool:
    """Return whether a parameter is in a module of the types."""
    return any(isinstance(use.owner, module_types) for use in uses)


def _find_head_heights(uses_of: Uses, results: Results, layers: Sequence[Sequence[Rule]]) -> Collection[int]:
    """Return the rows that an untied output head may have: those of embeddings, unless it is known which it is."""
    all_uses = [*chain(*uses_of.values())]
    head_rules = [rule for rule in chain(*layers) if rule.kind == "head"]
    is_known = any(rule.names == () or any(map(rule.reason, all_uses)) for rule in head_rules)
    if is_known or any(is_in(uses, nn.Embedding) and is_in(uses, nn.Linear) for uses in uses_of.values()):
        return ()
    # Frozen embeddings count too, by their module.
    embeddings = [use.parameter for use in all_uses if isinstance(use.owner, nn.Embedding)]
    for parameter, result in results.items():
        embeddings += [parameter] if isinstance(result, Decision) and result.kind == "embedding" else []
    return {embedding.shape[0] for embedding in embeddings if embedding.dim() == 2}


@dataclass(frozen=True, slots=True)
class _FusedProjection:
    """A projection of several matrices: its known name, its ``pattern`` in ``split``, and the matrices in words."""

    name: str
    pattern: str
    matrices: str


def _find_fused(use: Use, shapes: Mapping[str, tuple[int, ...]]) -> _FusedProjection | None:
    """Return what the name of a projection says of its matrices; None where it says nothing."""
    shape = tuple(use.parameter.shape)
    *before, name = _BELOW.sub("", use.name).split(".")
    parts = FUSED.get(name) or FUSED.get(name.removesuffix("_weight"))
    parts = parts or next((parts for part, parts in FUSED_PARTS.items() if part in name.lower()), None)
    if name in GATED:
        # It holds a gate as well if it has twice the rows that the next projection takes.
        partners, parts_with_gate = GATED[name]
        taken = []
        for other, other_shape in shapes.items():
            *module, last = _BELOW.sub("", other).split(".")
            if module == before and last in partners and ".lora_" not in other:
                taken.append(other_shape[-1])
        parts = parts_with_gate if shape[-2:-1] and shape[-2] in [2 * columns for columns in taken] else None
    if parts is None or len(shape) < 2:
        return None
    tail = use.name.removesuffix(".weight").split(".")[len(before) :]
    return _FusedProjection(name, ".".join([*(["*"] if before else []), *tail]), parts)


def _suggest_arguments(
    questions: Sequence[Question], uses_of: Uses, results: Results, given_rules: str
) -> tuple[dict[str, str], list[str]]:
    """Return the arguments that answer questions, as code by name, and what else may be written in their place."""
    arguments, notes = {}, []
    # A matrix that may be the head, and likely is none, would lose Muon.
    matrices = []
    for parameter, uses in uses_of.items():
        rule = getattr(results[parameter], "rule", None)
        matrices += [uses[0].name] if rule is not None and rule.kind == "matrix" else []
    may_be_heads = [question.names[0] for question in questions if question.may_be_head]
    heads = find_heads(may_be_heads, matrices)
    if may_be_heads:
        arguments["head"] = head_as_code([name for name in may_be_heads if name in heads])
        notes.append("head: None if there is none")
    # A short pattern where all projections of a name are alike.
    texts: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for question in questions:
        if question.fused:
            texts[question.fused].add(question.text)
    splits = {}
    for question in questions:
        if question.fused:
            pattern, parts = question.fused
            is_short = len(texts[question.fused]) == 1
            splits[pattern if is_short else unnumbered(question.names[0].removesuffix(".weight"))] = parts
    if splits:
        arguments["split"] = f"{{{', '.join(f'{pattern!r}: ({parts})' for pattern, parts in splits.items())}}}"
        notes.append("split: the rows of each matrix, or None for one matrix")
    if code := _as_code([q.rule for q in questions if q.rule and q.names[0] not in heads], uses_of):
        arguments["rules"] = f"[[{', '.join(code)}], {given_rules}]"
        notes.append("rules: check these kinds")
    return arguments, notes


def head_as_code(names: Sequence[str]) -> str:
    """Return the argument ``head`` for matrices with these names, as code."""
    modules = [name.removesuffix(".weight") for name in names]
    return repr(modules[0] if len(modules) == 1 else modules or None)


def _as_code(rules: Sequence[Rule], uses_of: Uses) -> list[str]:
    """Return rules of names as code, those of a kind as one."""
    all_names = {use.name for use in chain(*uses_of.values())}
    code = []
    for kind, split in dict.fromkeys((rule.kind, rule.split) for rule in rules):
        names = [*chain(*(rule.patterns for rule in rules if (rule.kind, rule.split) == (kind, split)))]
        globs = in_globs(names, all_names - {*names})
        code.append(repr(Rule(kind, globs[0] if len(globs) == 1 else tuple(globs), split=split)))
    return code
