"""What of an optimizer's groups is probably not meant, and the line to write instead.

What a parameter should be is not guessed from its name: ready-made rules of a known family say it if they sort the
whole model, else the types of modules and the shapes beside each other do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ...names.resumption import in_globs
from ...names.wording import Finding, counted, listed
from ...optimizer.groups import (
    DEEPSEEK,
    FROZEN,
    LLAMA,
    LORA,
    MIXTRAL,
    QWEN,
    TORCHTITAN,
    WHOLE,
    Decision,
    Split,
    sort_parameters,
)
from .treatments import NOBODY, Treatment

FAMILIES = {
    "LLAMA": LLAMA,
    "QWEN": QWEN,
    "MIXTRAL": MIXTRAL,
    "DEEPSEEK": DEEPSEEK,
    "TORCHTITAN": TORCHTITAN,
    "LORA": LORA,
}
"""The ready-made rules that name what they select."""


WRITE = "; write: "
"""Stands between what a finding means and the line to write."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a parameter usually is: a kind of `optimizer.groups`, its split, and how that is known."""

    kind: str
    how: str
    split: Split = WHOLE


def expected_kinds(model: nn.Module) -> tuple[dict[Tensor, Expected], str]:
    """Return what each parameter usually is, as far as that is known, and the name of the rules that say so."""
    for name, rules in FAMILIES.items():
        try:
            decisions = [*sort_parameters(model, rules)]
        except ValueError:
            continue
        if any(decision.kind in ("matrix", "experts") for decision in decisions):
            trained = [(decision.parameter, decision.if_trained or decision) for decision in decisions]
            return {param: _by_rules(own, name) for param, own in trained if own.rule}, name
    return _by_structure(model), ""


def _by_rules(decision: Decision, name: str) -> Expected:
    assert decision.rule is not None
    return Expected(decision.kind, f"by the ready-made rules {name}", decision.rule.split)


def _by_structure(model: nn.Module) -> dict[Tensor, Expected]:
    expected: dict[Tensor, Expected] = {}
    parameter: Tensor
    owners: defaultdict[Tensor, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter].append(module)
    embeddings = {p for p, own in owners.items() if any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in own)}
    tied = any(any(isinstance(module, nn.Linear) for module in owners[parameter]) for parameter in embeddings)
    # Where an embedding is the head, no other matrix is one.
    heights = {parameter.shape[0] for parameter in embeddings if parameter.dim() == 2 and not tied}
    routers = _routers(model)
    for parameter, modules in owners.items():
        if parameter in embeddings:
            expected[parameter] = Expected("embedding", "its module is an embedding")
        elif parameter.dim() < 2:
            expected[parameter] = Expected("vector", f"it has {counted(parameter.dim(), 'dim')}")
        elif parameter in routers:
            expected[parameter] = Expected("router", f"it has a row for each of {routers[parameter]} experts beside it")
        elif any(isinstance(module, nn.Linear) for module in modules):
            if parameter.shape[0] in heights:
                expected[parameter] = Expected("head", "it has as many rows as an embedding")
            else:
                expected[parameter] = Expected("matrix", "its module is an nn.Linear")
        elif any(isinstance(module, nn.MultiheadAttention) for module in modules) and parameter.dim() == 2:
            fused = parameter.shape[0] == 3 * parameter.shape[1]
            expected[parameter] = Expected("matrix", "it is of nn.MultiheadAttention", Split(3) if fused else WHOLE)
    return expected


def _routers(model: nn.Module) -> dict[Tensor, int]:
    """Return the matrices with a row for each of several experts that are beside them, and how many these are."""
    routers: dict[Tensor, int] = {}
    for module in model.modules():
        children = [*module.children()]
        counts = {p.shape[0] for own in (module, *children) for p in own.parameters(recurse=False) if p.dim() == 3}
        stacks = [child for child in children if isinstance(child, nn.ModuleList) and _alike(child)]
        counts |= {len(stack) for stack in stacks}
        for child in children:
            for inner in (child, *(() if isinstance(child, nn.ModuleList) else child.children())):
                if isinstance(inner, nn.Linear) and inner.weight.shape[0] in counts - {0, 1}:
                    routers[inner.weight] = inner.weight.shape[0]
    return routers


def _alike(modules: nn.ModuleList) -> bool:
    shapes = {tuple(tuple(p.shape) for p in module.parameters()) for module in modules}
    return len(modules) > 1 and len(shapes) == 1 and shapes != {()}


def suspicions(
    model: nn.Module, every: Sequence[Treatment], options: Callable[[Treatment], Mapping[str, object]]
) -> tuple[Finding, ...]:
    """Return what is probably not meant, the gravest first.

    Args:
        options: returns the options of a parameter's group.
    """
    expected, rules = expected_kinds(model)
    names = [name for one in every for name in one.names]
    case = _Case(model, every, expected, _Writer(names, rules), options)
    return tuple(
        finding
        for look in (_left_out, _vectors, _kinds, _left_to_adamw, _fused, _experts, _tied, _frozen)
        for finding in look(case)
    )


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes rules about parameters, given all names, and the ready-made rules that know the model."""

    names: Sequence[str]
    rules: str

    def rule(self, kind: str, members: Iterable[Treatment], more: str = "") -> str:
        named = [one.name for one in members]
        globs = in_globs(named, set(self.names) - {*named})
        pattern = repr(globs[0]) if len(globs) == 1 else repr(tuple(globs))
        return f"Rule({kind!r}, {pattern}{more})"

    def line(self, kind: str, members: Iterable[Treatment], more: str = "") -> str:
        """Return the line to write, after `WRITE`."""
        known = self.rules or "MODULE_TYPES"
        return f"{WRITE}Muon.for_model(model, rules=[[{self.rule(kind, members, more)}], {known}], …)"


@dataclass(frozen=True, slots=True)
class _Case:
    """What is looked at: a model, what its parameters get, and what they usually are.

    Attributes:
        options: returns the options of a parameter's group.
    """

    model: nn.Module
    every: Sequence[Treatment]
    expected: Mapping[Tensor, Expected]
    writer: _Writer
    options: Callable[[Treatment], Mapping[str, object]]

    def finding(self, kind: str, message: str, members: Iterable[Treatment], means: str) -> Finding:
        """Return a finding whose message ends with the names of the parameters, folded over layers."""
        named = [one.name for one in members]
        shown = in_globs(named, {*self.writer.names} - {*named})
        return Finding(kind, f"{message}: {listed(shown, 3)}", tuple(named), means)


def _left_out(case: _Case) -> Iterator[Finding]:
    lost = [one for one in case.every if one.algorithm == NOBODY and one.parameter.requires_grad]
    if lost:
        yield case.finding(
            "in_no_group",
            f"{counted(len(lost), 'trained parameter')} in no group",
            lost,
            "it is never updated, though gradients are computed for it; Muon.for_model takes every parameter; "
            "or set requires_grad=False",
        )


def _vectors(case: _Case) -> Iterator[Finding]:
    flat = [one for one in case.every if one.by_muon and len(one.shape) < 2]
    if flat:
        yield case.finding(
            "vector_in_muon",
            f"{counted(len(flat), 'parameter')} of one dim or none in Muon",
            flat,
            "there is nothing to orthogonalise in it: its step fails, or is the gradient's direction at a rate far too "
            f"large{case.writer.line('vector', flat)}",
        )
    deep = [one for one in case.every if one.by_muon and len(one.shape) > 3]
    if deep:
        yield case.finding(
            "convolution_in_muon",
            f"{counted(len(deep), 'parameter')} of more than three dims in Muon",
            deep,
            "some programs flatten it to one matrix, muonckpt does not: keep the weight in two dims in the model and "
            f"view it in the forward pass, or give it to AdamW{case.writer.line('other', deep)}",
        )


_WRONG = {
    "embedding": "a row of an embedding has a gradient only where its token occurs, and orthogonalising mixes all rows",
    "head": "an output head takes large steps in few directions; all published recipes give it to AdamW",
}


def _kinds(case: _Case) -> Iterator[Finding]:
    """Yield embeddings and heads that Muon steps, unless a rule names them."""
    for kind, why in _WRONG.items():
        members = [
            one
            for one in case.every
            if one.by_muon
            and not one.explicit
            and len(one.names) == 1
            and one.parameter in case.expected
            and case.expected[one.parameter].kind == kind
        ]
        by_how: defaultdict[str, list[Treatment]] = defaultdict(list)
        for one in members:
            by_how[case.expected[one.parameter].how].append(one)
        for how, own in by_how.items():
            either = f" (if it is not: {case.writer.rule('matrix', own)})" if kind == "head" else ""
            yield case.finding(
                f"{kind}_in_muon",
                f"{counted(len(own), kind)} in Muon ({how})",
                own,
                f"{why}{case.writer.line(kind, own)}{either}",
            )


def _left_to_adamw(case: _Case) -> Iterator[Finding]:
    left = [
        one
        for one in case.every
        if not one.by_muon
        and one.algorithm != NOBODY
        and not one.explicit
        and one.parameter in case.expected
        and case.expected[one.parameter].kind in ("matrix", "experts")
    ]
    by_kind: defaultdict[str, list[Treatment]] = defaultdict(list)
    for one in left:
        by_kind[case.expected[one.parameter].kind].append(one)
    for kind, own in by_kind.items():
        yield case.finding(
            "left_to_adamw",
            f"{len(own)} {'matrix' if len(own) == 1 else 'matrices'} of hidden layers not in Muon "
            f"({case.expected[own[0].parameter].how}), {sum(one.parameter.numel() for one in own):,} elements",
            own,
            f"it trains as without Muon{case.writer.line(kind, own)}",
        )


def _fused(case: _Case) -> Iterator[Finding]:
    """Yield parameters with several matrices in their rows that are orthogonalised as one."""
    beside = _beside(case.model)
    groups: defaultdict[tuple[str, str], list[Treatment]] = defaultdict(list)
    for one in case.every:
        if not one.by_muon or one.fused.pieces or one.fused.columns:
            continue
        known = case.expected.get(one.parameter)
        if known is not None and known.split != WHOLE:
            groups[_split_text(known.split), known.how].append(one)
        elif one.parameter in beside and not one.explicit:
            groups[beside[one.parameter]].append(one)
    for (split, how), own in groups.items():
        if _says_pieces(case.options(own[0])):
            continue
        kind = "experts" if len(own[0].shape) == 3 else "matrix"
        yield case.finding(
            "fused_whole",
            f"{counted(len(own), 'parameter')} with fused matrices, orthogonalised as one ({how})",
            own,
            "the matrices are mixed with each other, and the rate is scaled by the shape of the whole"
            f"{case.writer.line(kind, own, f', split={split}')}",
        )


def _says_pieces(options: Mapping[str, object]) -> bool:
    """Return whether another program's group splits rows, in its own words."""
    return any(options.get(word) not in (None, 1, ()) for word in ("split_sizes", "num_heads", "head_blocks"))


def _split_text(split: Split) -> str:
    given = [repr(split.pieces)] if split.pieces != 1 else []
    given += [f"columns={split.columns!r}"] if split.columns != 1 else []
    given += [f"interleaved={split.interleaved}"] if split.interleaved != 1 else []
    return f"Split({', '.join(given)})"


def _beside(model: nn.Module) -> dict[Tensor, tuple[str, str]]:
    """Return matrices that are several fused ones, by the other one of their module: the split, and how it is known.

    A module of two matrices, ``(r, d)`` and then ``(d, a)``, uses ``a`` of what the first one makes; the other
    ``r - a`` rows are other matrices: a gate, or keys and values.
    """
    found: dict[Tensor, tuple[str, str]] = {}
    for module in model.modules():
        linear: list[Tensor] = [child.weight for child in module.children() if isinstance(child, nn.Linear)]
        stacks = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
        for own in (linear, stacks):
            if len(own) == 2 and own[0].shape[:-2] == own[1].shape[:-2] and (fused := _fused_over(*own)):
                found[own[0]] = fused
    return found


def _fused_over(first: Tensor, second: Tensor) -> tuple[str, str] | None:
    """Return the split of the first of two matrices, or stacks of them, by what the second one takes."""
    (rows, width), (height, used) = first.shape[-2:], second.shape[-2:]
    rest, how = rows - used, f"it has {rows} rows, and the other matrix of its module takes {used}"
    if width != height or rest <= 0:
        return None
    if rest == used:
        return "Split(2)", f"{how}: a gate beside it"
    if first.dim() == 2 and rest % 2 == 0 and rest <= 2 * used and used % (rest // 2) == 0:
        return f"Split({(used, rest // 2, rest // 2)})", f"{how}: keys and values below the queries"
    return None


def _experts(case: _Case) -> Iterator[Finding]:
    """Yield stacks of experts that are orthogonalised as one matrix."""
    flat = [one for one in case.every if one.by_muon and len(one.shape) == 3 and case.options(one).get("flatten")]
    heights = set(_routers(case.model).values())
    counts = {
        one: count
        for one in case.every
        if one.by_muon and len(one.shape) == 2 and one.parameter not in case.expected and not one.fused.pieces
        and not _says_pieces(case.options(one)) and case.options(one).get("num_experts") in (None, 1)
        for count in heights
        if one.shape[0] > count and one.shape[0] % count == 0
    }  # fmt: skip
    if flat:
        yield case.finding(
            "experts_as_one",
            f"{counted(len(flat), 'stack')} of experts flattened to one matrix (flatten=True)",
            flat,
            "experts are mixed with each other; muonckpt orthogonalises each matrix of three dims by itself, so leave "
            "flatten out",
        )
    if counts:
        count = next(iter(counts.values()))
        yield case.finding(
            "experts_as_one",
            f"{counted(len(counts), 'parameter')} of two dims beside a router of {count} rows, orthogonalised whole",
            [*counts],
            f"if its rows are those of {count} experts, they are mixed with each other"
            f"{case.writer.line('matrix', counts, f', split=Split({count})')}",
        )


def _tied(case: _Case) -> Iterator[Finding]:
    tied = [one for one in case.every if len(one.names) > 1 and one.by_muon and not one.explicit]
    if tied:
        yield case.finding(
            "tied_in_muon",
            f"{counted(len(tied), 'tied weight')} in Muon ({' = '.join(tied[0].names)})",
            tied,
            "a weight with two names is usually an embedding that is also the output head; its gradient is the sum of "
            f"both uses{case.writer.line('embedding', tied)}",
        )


def _frozen(case: _Case) -> Iterator[Finding]:
    held = [
        one for one in case.every if one.algorithm != NOBODY and not one.parameter.requires_grad and one.kind != FROZEN
    ]
    if held:
        yield case.finding(
            "frozen_in_group",
            f"{counted(len(held), 'frozen parameter')} in a group (requires_grad=False)",
            held,
            "it gets no gradient and no step, but its state takes memory; some programs step it with zeros, and decay "
            f"shrinks it{WRITE}[p for p in params if p.requires_grad]",
        )
