"""Find the parameters whose treatment is probably not meant, with the line to write instead.

What a parameter should be is not guessed from its name: ready-made rules of a known family say it if they sort the
whole model, else the types of modules and the shapes beside each other do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ...names.resumption import in_globs
from ...names.wording import Finding, counted, listed
from ...optimizer.groups import (
    CONVOLUTIONS,
    DEEPSEEK,
    FROZEN,
    LLAMA,
    LORA,
    MIXTRAL,
    QWEN,
    TORCHTITAN,
    WHOLE,
    Split,
    sort_parameters,
    split_by_groups,
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
class ExpectedKind:
    """The usual kind of a parameter (one of `optimizer.groups`) and its split, with the ``reason`` to think so."""

    kind: str
    reason: str
    split: Split = WHOLE


def expect_kinds(model: nn.Module) -> tuple[dict[Tensor, ExpectedKind], str]:
    """Return the usual kinds of parameters, as far as something tells them, and the name of the rules that do."""
    # Rules count only if they sort the whole model and find matrices in it; a frozen parameter is as if trained.
    for name, rules in FAMILIES.items():
        try:
            decisions = [*sort_parameters(model, rules)]
        except ValueError:
            continue
        if any(decision.kind in ("matrix", "experts") for decision in decisions):
            reason = f"by the ready-made rules {name}"
            expected = {}
            for decision in decisions:
                trained = decision.if_trained or decision
                if trained.rule:
                    expected[decision.parameter] = ExpectedKind(trained.kind, reason, trained.rule.split)
            return expected, name
    return _expect_by_structure(model), ""


def _expect_by_structure(model: nn.Module) -> dict[Tensor, ExpectedKind]:
    parameter: Tensor
    modules_by_parameter: defaultdict[Tensor, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            modules_by_parameter[parameter].append(module)

    def is_in(parameter: Tensor, *types: type[nn.Module]) -> bool:
        return any(isinstance(module, types) for module in modules_by_parameter[parameter])

    # A head has as many rows as an embedding; but where an embedding is the head, no other matrix is one.
    embeddings = {p for p in modules_by_parameter if is_in(p, nn.Embedding, nn.EmbeddingBag)}
    tied = any(is_in(parameter, nn.Linear) for parameter in embeddings)
    head_rows = {parameter.shape[0] for parameter in embeddings if parameter.dim() == 2 and not tied}
    routers = _find_routers(model)

    # Routers are linear layers too, so they are asked for first.
    expected: dict[Tensor, ExpectedKind] = {}
    for parameter in modules_by_parameter:
        if parameter in embeddings:
            expected[parameter] = ExpectedKind("embedding", "its module is an embedding")
        elif parameter.dim() < 2:
            expected[parameter] = ExpectedKind("vector", f"it has {counted(parameter.dim(), 'dim')}")
        elif parameter in routers:
            reason = f"it has a row for each of {routers[parameter]} experts beside it"
            expected[parameter] = ExpectedKind("router", reason)
        elif is_in(parameter, nn.Linear):
            if parameter.shape[0] in head_rows:
                expected[parameter] = ExpectedKind("head", "it has as many rows as an embedding")
            else:
                expected[parameter] = ExpectedKind("matrix", "its module is an nn.Linear")
        elif is_in(parameter, *CONVOLUTIONS):
            convolution = next(m for m in modules_by_parameter[parameter] if isinstance(m, CONVOLUTIONS))
            reason = f"its module is a convolution of {counted(convolution.groups, 'group')}"
            expected[parameter] = ExpectedKind("convolution", reason, split_by_groups(convolution))
        elif is_in(parameter, nn.MultiheadAttention) and parameter.dim() == 2:
            split = Split(3) if parameter.shape[0] == 3 * parameter.shape[1] else WHOLE
            expected[parameter] = ExpectedKind("matrix", "it is of nn.MultiheadAttention", split)
    return expected


def _find_routers(model: nn.Module) -> dict[Tensor, int]:
    """Return the matrices that have a row for each of several experts beside them, with the number of experts."""
    routers: dict[Tensor, int] = {}
    for module in model.modules():
        # Experts are stacked in a parameter of three dims, or listed as modules of equal shapes.
        children = [*module.children()]
        expert_counts: set[int] = set()
        for parent in (module, *children):
            expert_counts |= {param.shape[0] for param in parent.parameters(recurse=False) if param.dim() == 3}
        expert_counts |= {len(child) for child in children if isinstance(child, nn.ModuleList) and _is_stack(child)}
        expert_counts -= {0, 1}
        # The router is a linear layer beside them, or one level below; layers of a list are experts themselves.
        for child in children:
            for layer in (child, *(() if isinstance(child, nn.ModuleList) else child.children())):
                if isinstance(layer, nn.Linear) and layer.weight.shape[0] in expert_counts:
                    routers[layer.weight] = layer.weight.shape[0]
    return routers


def _is_stack(modules: nn.ModuleList) -> bool:
    """Return whether these are several modules with parameters of the same shapes."""
    shapes: set[tuple[Sequence[int], ...]] = set()
    for module in modules:
        shapes.add(tuple(parameter.shape for parameter in module.parameters()))
    return len(modules) > 1 and len(shapes) == 1 and shapes != {()}


def suspicions(model: nn.Module, treatments: Sequence[Treatment]) -> tuple[Finding, ...]:
    """Return findings about treatments that are probably not meant, the gravest first."""
    case = _Case(model, treatments, *expect_kinds(model))
    checks = (
        _check_groups,
        _check_dims,
        _check_embeddings_and_heads,
        _check_adamw,
        _check_fused,
        _check_experts,
        _check_tied,
        _check_frozen,
    )
    findings: list[Finding] = []
    for check in checks:
        findings += check(case)
    return tuple(findings)


@dataclass(frozen=True, slots=True)
class _Case:
    """A model, the treatments of its parameters, and their usual kinds by ``rules`` (if any) that know the model."""

    model: nn.Module
    treatments: Sequence[Treatment]
    expected: Mapping[Tensor, ExpectedKind]
    rules: str

    def rule(self, kind: str, members: Sequence[Treatment], arguments: str = "") -> str:
        """Return the code of a rule for these parameters."""
        globs = self._globs(members)
        pattern = repr(globs[0]) if len(globs) == 1 else repr(tuple(globs))
        return f"Rule({kind!r}, {pattern}{arguments})"

    def line(self, kind: str, members: Sequence[Treatment], arguments: str = "") -> str:
        """Return the line to write, after `WRITE`."""
        rule = self.rule(kind, members, arguments)
        return f"{WRITE}Muon.for_model(model, rules=[[{rule}], {self.rules or 'MODULE_TYPES'}], …)"

    def finding(self, kind: str, message: str, members: Sequence[Treatment], means: str) -> Finding:
        """Return a finding whose message ends with the names of the parameters, folded over layers."""
        names = tuple(member.name for member in members)
        return Finding(kind, f"{message}: {listed(self._globs(members), 3)}", names, means)

    def _globs(self, members: Sequence[Treatment]) -> list[str]:
        names = [member.name for member in members]
        other_names: set[str] = set()
        for treatment in self.treatments:
            other_names |= {*treatment.names}
        return in_globs(names, other_names - {*names})

    def of_kinds(self, kinds: Sequence[str]) -> Iterator[tuple[Treatment, ExpectedKind]]:
        """Yield parameters that are usually of these kinds and that no rule names."""
        for treatment in self.treatments:
            expected = self.expected.get(treatment.parameter)
            if expected is not None and expected.kind in kinds and not treatment.explicit:
                yield treatment, expected


def _check_groups(case: _Case) -> Iterator[Finding]:
    members = [t for t in case.treatments if t.algorithm == NOBODY and t.parameter.requires_grad]
    if members:
        yield case.finding(
            "in_no_group",
            f"{counted(len(members), 'trained parameter')} in no group",
            members,
            "it is never updated, though gradients are computed for it; Muon.for_model takes every parameter; "
            "or set requires_grad=False",
        )


def _check_dims(case: _Case) -> Iterator[Finding]:
    vectors = [treatment for treatment in case.treatments if treatment.by_muon and len(treatment.shape) < 2]
    if vectors:
        yield case.finding(
            "vector_in_muon",
            f"{counted(len(vectors), 'parameter')} of one dim or none in Muon",
            vectors,
            "there is nothing to orthogonalise in it: its step fails, or is the gradient's direction at a rate far too "
            f"large{case.line('vector', vectors)}",
        )
    kernels = []
    for treatment in case.treatments:
        expected = case.expected.get(treatment.parameter)
        is_kernel = len(treatment.shape) > 3 or (expected is not None and expected.kind == "convolution")
        if treatment.by_muon and is_kernel and len(treatment.shape) > 2 and not treatment.fused.flatten:
            kernels.append(treatment)
    if kernels:
        yield case.finding(
            "convolution_in_muon",
            f"{counted(len(kernels), 'convolution')} in Muon, not flattened",
            kernels,
            "each kernel is orthogonalised by itself, if that is possible at all, and the rate is scaled by its sides; "
            "a convolution mixes channels by the matrix of its first dim and all others (flatten=True)"
            f"{case.line('convolution', kernels)}",
        )


_ADAMW_REASONS = {
    "embedding": "a row of an embedding has a gradient only where its token occurs, and orthogonalising mixes all rows",
    "head": "an output head takes large steps in few directions; all published recipes give it to AdamW",
}
"""The reasons why parameters of a kind are left to AdamW."""


def _check_embeddings_and_heads(case: _Case) -> Iterator[Finding]:
    """Yield embeddings and heads that Muon steps; tied ones have a finding of their own."""
    for kind, adamw_reason in _ADAMW_REASONS.items():
        by_reason: defaultdict[str, list[Treatment]] = defaultdict(list)
        for treatment, expected in case.of_kinds([kind]):
            if treatment.by_muon and len(treatment.names) == 1:
                by_reason[expected.reason].append(treatment)
        for reason, members in by_reason.items():
            alternative = f" (if it is not: {case.rule('matrix', members)})" if kind == "head" else ""
            yield case.finding(
                f"{kind}_in_muon",
                f"{counted(len(members), kind)} in Muon ({reason})",
                members,
                f"{adamw_reason}{case.line(kind, members)}{alternative}",
            )


def _check_adamw(case: _Case) -> Iterator[Finding]:
    """Yield matrices of hidden layers that something else than Muon steps."""
    by_kind: defaultdict[str, list[Treatment]] = defaultdict(list)
    for treatment, expected in case.of_kinds(["matrix", "experts"]):
        if not treatment.by_muon and treatment.algorithm != NOBODY:
            by_kind[expected.kind].append(treatment)
    for kind, members in by_kind.items():
        yield case.finding(
            "left_to_adamw",
            f"{len(members)} {'matrix' if len(members) == 1 else 'matrices'} of hidden layers not in Muon "
            f"({case.expected[members[0].parameter].reason}), "
            f"{sum(member.parameter.numel() for member in members):,} elements",
            members,
            f"it trains as without Muon{case.line(kind, members)}",
        )


def _check_fused(case: _Case) -> Iterator[Finding]:
    """Yield parameters with several matrices in their rows that are orthogonalised as one."""
    # The rules' split counts before the shapes beside a parameter, and a rule that names it before these.
    splits_by_shapes = _find_splits(case.model)
    groups: defaultdict[tuple[str, str], list[Treatment]] = defaultdict(list)
    for treatment in case.treatments:
        if not treatment.by_muon or treatment.fused.pieces or treatment.fused.columns:
            continue
        expected = case.expected.get(treatment.parameter)
        if expected is not None and expected.split != WHOLE:
            groups[_split_code(expected.split), expected.reason].append(treatment)
        elif treatment.parameter in splits_by_shapes and not treatment.explicit:
            groups[splits_by_shapes[treatment.parameter]].append(treatment)
    for (split, reason), members in groups.items():
        if not _splits_rows(members[0].options):
            kind = "experts" if len(members[0].shape) == 3 else "matrix"
            kind = "convolution" if members[0].fused.flatten else kind
            yield case.finding(
                "fused_whole",
                f"{counted(len(members), 'parameter')} with fused matrices, orthogonalised as one ({reason})",
                members,
                "the matrices are mixed with each other, and the rate is scaled by the shape of the whole"
                f"{case.line(kind, members, f', split={split}')}",
            )


def _splits_rows(options: Mapping[str, object]) -> bool:
    """Return whether another program's group splits rows, in its own words."""
    return any(options.get(word) not in (None, 1, ()) for word in ("split_sizes", "num_heads", "head_blocks"))


def _split_code(split: Split) -> str:
    arguments = [repr(split.pieces)] if split.pieces != 1 else []
    arguments += [f"columns={split.columns!r}"] if split.columns != 1 else []
    arguments += [f"interleaved={split.interleaved}"] if split.interleaved != 1 else []
    return f"Split({', '.join(arguments)})"


def _find_splits(model: nn.Module) -> dict[Tensor, tuple[str, str]]:
    """Return fused matrices, by the other matrix of their module: the code of their split, and its reason.

    A module of two matrices, ``(r, d)`` and then ``(d, a)``, uses ``a`` of what the first one makes; the other
    ``r - a`` rows are other matrices: a gate, or keys and values.
    """
    splits: dict[Tensor, tuple[str, str]] = {}
    for module in model.modules():
        linear: list[Tensor] = [child.weight for child in module.children() if isinstance(child, nn.Linear)]
        stacks = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
        for pair in (linear, stacks):
            if len(pair) == 2 and pair[0].shape[:-2] == pair[1].shape[:-2]:
                split = _split_before(*pair)
                if split is not None:
                    splits[pair[0]] = split
    return splits


def _split_before(matrix: Tensor, next_matrix: Tensor) -> tuple[str, str] | None:
    """Return the split of a matrix, or a stack of them, by the columns of the one that follows."""
    (rows, width), (height, columns) = matrix.shape[-2:], next_matrix.shape[-2:]
    unused_rows = rows - columns
    if width != height or unused_rows <= 0:
        return None
    reason = f"it has {rows} rows, and the other matrix of its module takes {columns}"
    if unused_rows == columns:
        return "Split(2)", f"{reason}: a gate beside it"
    # Grouped queries share keys and values, so these are no larger, and divide the queries.
    head_rows, odd_row = divmod(unused_rows, 2)
    if matrix.dim() == 2 and not odd_row and head_rows <= columns and columns % head_rows == 0:
        return f"Split({(columns, head_rows, head_rows)})", f"{reason}: keys and values below the queries"
    return None


def _check_experts(case: _Case) -> Iterator[Finding]:
    """Yield experts that are orthogonalised as one matrix."""
    expert_counts = set(_find_routers(case.model).values())
    flattened: list[Treatment] = []
    count_by_matrix: dict[Treatment, int] = {}
    for treatment in case.treatments:
        options = treatment.options
        if not treatment.by_muon:
            continue
        if len(treatment.shape) == 3 and treatment.fused.flatten and treatment.parameter not in case.expected:
            flattened.append(treatment)
        # A matrix that nothing else explains may be experts in its rows, if a router counts them.
        is_whole = not treatment.fused.pieces and not _splits_rows(options) and options.get("num_experts") in (None, 1)
        if len(treatment.shape) == 2 and treatment.parameter not in case.expected and is_whole:
            for count in expert_counts:
                if treatment.shape[0] > count and treatment.shape[0] % count == 0:
                    count_by_matrix[treatment] = count
    if flattened:
        yield case.finding(
            "experts_as_one",
            f"{counted(len(flattened), 'stack')} of experts flattened to one matrix (flatten=True)",
            flattened,
            "experts are mixed with each other; without flatten each matrix of three dims is orthogonalised by itself"
            f"{case.line('experts', flattened)}",
        )
    if count_by_matrix:
        members, count = [*count_by_matrix], next(iter(count_by_matrix.values()))
        yield case.finding(
            "experts_as_one",
            f"{counted(len(members), 'parameter')} of two dims beside a router of {count} rows, orthogonalised whole",
            members,
            f"if its rows are those of {count} experts, they are mixed with each other"
            f"{case.line('matrix', members, f', split=Split({count})')}",
        )


def _check_tied(case: _Case) -> Iterator[Finding]:
    tied = [t for t in case.treatments if len(t.names) > 1 and t.by_muon and not t.explicit]
    if tied:
        yield case.finding(
            "tied_in_muon",
            f"{counted(len(tied), 'tied weight')} in Muon ({' = '.join(tied[0].names)})",
            tied,
            "a weight with two names is usually an embedding that is also the output head; its gradient is the sum of "
            f"both uses{case.line('embedding', tied)}",
        )


def _check_frozen(case: _Case) -> Iterator[Finding]:
    in_groups = [treatment for treatment in case.treatments if treatment.algorithm != NOBODY]
    frozen = [t for t in in_groups if not t.parameter.requires_grad and t.kind != FROZEN]
    if frozen:
        yield case.finding(
            "frozen_in_group",
            f"{counted(len(frozen), 'frozen parameter')} in a group (requires_grad=False)",
            frozen,
            "it gets no gradient and no step, but its state takes memory; some programs step it with zeros, and decay "
            f"shrinks it{WRITE}[p for p in params if p.requires_grad]",
        )
