"""Parameter groups of a model by explicit rules; parameters that they leave unclear are refused, not guessed.

A rule selects parameters by module type, number of dims, or name patterns, and gives them a kind, which decides how
they are stepped.  `sort_parameters` applies rules to a model; open it first.  `rules` has their form, `families` the
ready-made ones, `decisions` what comes out, and `questions` what users are asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from glob import escape
from itertools import accumulate, chain
from types import EllipsisType, MappingProxyType

from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..names.errors import ArgumentError, called_like, did_you_mean
from ..names.renaming import WRAPPERS
from ..names.wording import find_heads, listed
from .decisions import FROZEN, Decision, Decisions
from .families import DEEPSEEK, LLAMA, LORA, MIXTRAL, MODULE_TYPES, QWEN, TORCHTITAN
from .planning.matrices import Fused, Split
from .questions import (
    Question,
    UnclearError,
    UnselectedError,
    UnsortedError,
    find_questions,
    head_as_code,
    is_in,
    is_typed_matrix,
)
from .rules import (
    CONVOLUTIONS,
    KINDS,
    WHOLE,
    ParamKind,
    Rule,
    Rules,
    Use,
    grouped_qkv,
    is_convolution,
    is_match,
    is_no_convolution,
    layers_of,
    stacked_qkv,
)

__all__ = [
    "DEEPSEEK",
    "KINDS",
    "LLAMA",
    "LORA",
    "MIXTRAL",
    "MODULE_TYPES",
    "QWEN",
    "TORCHTITAN",
    "Decision",
    "Decisions",
    "ParamKind",
    "Rule",
    "Rules",
    "Split",
    "UnsortedError",
    "grouped_qkv",
    "sort_parameters",
    "stacked_qkv",
]

FSDP1 = (
    "a wrapper such as FSDP1 (FullyShardedDataParallel) flattens parameters and cuts the vector, so that no rank has "
    "matrices; shard the model with fully_shard (FSDP2), in Lightning with ModelParallelStrategy"
)

Heads = str | nn.Module | Sequence[str | nn.Module] | EllipsisType | None
"""The output head: a module or its name, several of them, or None if there is none; ``...`` leaves it open."""

Splits = Mapping[str, Split | int | Sequence[int] | None]
"""The matrices in fused projections, by patterns of their names: how many rows each has, N for N equal ones, a `Split`,
or None for one matrix."""

NO_SPLITS: Splits = MappingProxyType({})


@called_like("sort_parameters(model)")
def sort_parameters(model: nn.Module, *rules: Rules, head: Heads = ..., split: Splits = NO_SPLITS) -> Decisions:
    """Decide the kind of every parameter of ``model``, and refuse everything that is left unclear.

    The first layer with a rule for a parameter decides it, and all rules of that layer that select it must agree; the
    first layers are ``head`` and ``split``.  A shared parameter that is an embedding under one name, and a head or a
    matrix by module type under the others, is a tied embedding.  Frozen parameters need no rule.

    The model may be sharded (DTensors count with their global shape), compiled, checkpointed or wrapped for DDP; names
    are without parts that wrappers insert.

    Args:
        rules, head, split: as for `Muon.for_model`.

    Raises:
        UnsortedError: lists everything that is unclear, and the arguments that decide it: parameters under no rule,
            rules that disagree or select nothing, a shape that does not fit the kind or the split, a matrix that may be
            an output head, and a projection that holds several matrices by its name.
        ArgumentError: an argument is wrong, such as a ``head`` that names no matrix; or parameters are flat or
            uninitialized.
    """
    return sort_by_layers(model, layers_for(model, rules, head, split), "RULES" if layers_of(rules) else "MODULE_TYPES")


def layers_for(model: nn.Module, rules: Rules, head: Heads, split: Splits) -> list[tuple[Rule, ...]]:
    """Return the layers of rules that these arguments make."""
    uses = [*chain(*_find_uses(model).values())]
    of_head = [] if head is ... else [(_make_head_rule(head, uses),)]
    return [
        *of_head,
        *([tuple(_make_split_rules(split, uses))] if split else []),
        *(layers_of(rules) or [MODULE_TYPES]),
    ]


def _make_head_rule(head: Heads, uses: Sequence[Use]) -> Rule:
    """Return the rule of an output head; it has no names where there is none, or the head is the embedding."""
    tables = {use.parameter for use in uses if isinstance(use.owner, nn.Embedding)}
    heights = {table.shape[0] for table in tables}
    named: list[Use] = []
    for part in head if isinstance(head, Sequence) and not isinstance(head, str) else [head]:
        modules = {*part.modules()} if isinstance(part, nn.Module) else set()
        if not isinstance(part, str | nn.Module | None):
            raise ArgumentError(
                f"head: expected a module or its name, found a {type(part).__name__}. Write head='lm_head'"
            )
        # All parameters of a module but vectors.
        matrices = []
        for use in uses:
            is_named = isinstance(part, str) and f"{use.name}.".startswith(f"{part}.")
            matrices += [use] if use.parameter.dim() > 1 and (is_named or use.owner in modules) else []
        if part is not None and not matrices:
            close = _suggest_names(part, uses) if isinstance(part, str) else ""
            raise ArgumentError(
                f"head={part!r}: no such matrix in the model{close or '.'} Write head=None if it has none"
            )
        if len(layers := _layers(matrices)) > 1 and any(use.parameter.shape[0] not in heights for use in layers):
            likely = _likely_heads(layers, heights) or _likely_heads(_layers(uses), heights) or [layers[-1].name]
            raise ArgumentError(
                f"head: expected the one layer that is the output head, found {len(layers)}: "
                f"{listed((use.name for use in layers), 3)}. Write head={head_as_code(likely)}, or all in a list"
            )
        named += matrices
    # A classifier has the rows of no embedding either, but then no other layer has those of the vocabulary.
    is_tall = any(use.parameter.shape[0] in heights for use in _layers(named))
    if named and not is_tall and (likely := _likely_heads(_layers(uses), heights)):
        found = f"{named[0].name} {list(named[0].parameter.shape)} in {type(named[0].owner).__name__}"
        raise ArgumentError(
            f"head: expected a layer with the {max(heights)} rows of an embedding, found {found}. "
            f"Write head={head_as_code(likely)}"
        )
    return Rule("head", tuple(escape(use.name) for use in named if use.parameter not in tables), optional=True)


def _layers(uses: Sequence[Use]) -> list[Use]:
    """Return the matrices that are no embeddings, and no parts of adapters."""
    return [use for use in uses if not isinstance(use.owner, nn.Embedding) and ".lora_" not in use.name]


def _likely_heads(layers: Sequence[Use], heights: Collection[int]) -> list[str]:
    """Return the names of those that have the rows of the tallest embedding, and are likely output heads."""
    matrices = [use for use in layers if use.parameter.dim() == 2]
    tall = [use.name for use in matrices if use.parameter.shape[0] == max(heights, default=None)]
    return sorted(find_heads(tall, [use.name for use in matrices])) if tall else []


def _make_split_rules(split: Splits, uses: Sequence[Use]) -> Iterator[Rule]:
    """Yield the rules that say which matrices are fused in parameters, or modules, with the names."""
    matrices = [use.name for use in uses if use.parameter.dim() > 1]
    for pattern, parts in split.items():
        names = pattern, f"{pattern}.weight"
        if not any(is_match(name, glob) for name in matrices for glob in names):
            raise ArgumentError(f"split: {pattern!r} names no matrix{_suggest_names(pattern, uses)}")
        match parts:
            case None:
                cut = WHOLE
            case Split():
                cut = parts
            case int() | tuple() | list():
                cut = Split(parts if isinstance(parts, int) else tuple(parts))
            case _:
                raise ArgumentError(f"split: expected the rows of each matrix of {pattern!r}, found {parts!r}")
        yield Rule("matrix", names, dims=(2,), split=cut, optional=True)
        yield Rule("convolution", names, dims=(3, 4, 5), where=is_convolution, split=cut, optional=True)
        yield Rule("experts", names, dims=(3,), where=is_no_convolution, split=cut, optional=True)


def _suggest_names(name: str, uses: Sequence[Use]) -> str:
    return did_you_mean(name.strip("*."), [use.name.removesuffix(".weight") for use in uses])


def sort_by_layers(model: nn.Module, layers: Sequence[Sequence[Rule]], given_rules: str = "RULES") -> Decisions:
    """Decide each parameter by layers of rules; an error's code calls those that a user gave by this name."""
    uses_of = _find_uses(model)
    questions = []
    all_uses = [*chain(*uses_of.values())]
    for rule in chain(*layers):
        if not rule.optional and not any(map(rule.reason, all_uses)):
            close = "".join(did_you_mean(name, [use.name for use in all_uses]) for name in rule.patterns[:1])
            questions.append(Question((), f"{rule!r} selects nothing{close}"))
    # Each parameter is decided or refused, and a decision may still be a question.
    results: dict[Tensor, Decision | ValueError] = {}
    for parameter, uses in uses_of.items():
        decision: Decision | ValueError
        try:
            decision = _apply_rules(parameter, uses, layers)
        except ValueError as error:
            decision = error
        if not parameter.requires_grad:  # it needs no rule
            names, if_trained = tuple(use.name for use in uses), decision if isinstance(decision, Decision) else None
            why = "requires_grad=False"
            decision = Decision(
                parameter, names, shape=tuple(parameter.shape), kind=FROZEN, rule=None, why=why, if_trained=if_trained
            )
        results[parameter] = decision
    questions += find_questions(uses_of, results, layers)
    if questions:
        raise UnsortedError(questions, uses_of, results, given_rules)
    return Decisions(tuple(result for result in results.values() if isinstance(result, Decision)))


def _find_uses(model: nn.Module) -> dict[Tensor, list[Use]]:
    """Return the places of each parameter in a model, with names as they are without wrappers."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model: expected a model, whose names and modules decide, found a {type(model).__name__}")
    modules = list(model.named_modules(remove_duplicate=False))
    if any(isinstance(module, FullyShardedDataParallel) for _, module in modules):  # also with use_orig_params
        raise ArgumentError(FSDP1)
    replicated = [path for path, module in modules if isinstance(module, DistributedDataParallel | DataParallel)]
    inserted = {f"{path}.module".removeprefix(".") for path in replicated}
    # A parameter has as many uses as modules that share it.
    uses_of: dict[Tensor, list[Use]] = {}
    for path, module in modules:
        parts = []
        names, prefixes = path.split("."), accumulate(path.split("."), "{}.{}".format)
        for name, prefix in zip(names, prefixes, strict=True):
            if name and name not in WRAPPERS and prefix not in inserted:
                parts.append(name)
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = ".".join([*parts, attribute])
            if is_lazy(parameter):
                raise ArgumentError(f"{name} is uninitialized and has no shape yet; run the model once first")
            uses_of.setdefault(parameter, []).append(Use(name, owner=module, attribute=attribute, parameter=parameter))
    return uses_of


def _apply_rules(parameter: Tensor, uses: Sequence[Use], layers: Sequence[Sequence[Rule]]) -> Decision:
    """Decide a parameter by the first layer that selects it; raise ValueError if none does, or its rules disagree."""
    names, shape = tuple(use.name for use in uses), tuple(parameter.shape)
    # A linear weight without rows was flattened, unless a rule gives it to AdamW by name.
    is_linear = any(isinstance(use.owner, nn.Linear) and use.attribute == "weight" for use in uses)
    if isinstance(parameter, FlatParameter) or (is_linear and parameter.dim() < 2):
        adamw = [rule for rule in chain(*layers) if rule.names and KINDS[rule.kind].algorithm == "adamw"]
        if isinstance(parameter, FlatParameter) or not any(any(map(rule.reason, uses)) for rule in adamw):
            raise ArgumentError(FSDP1)
    usual_rule = _guess_rule(uses, names)
    for layer in layers:
        reasons: list[tuple[Rule, str]] = []
        for rule in layer:
            reasons += [(rule, reason) for reason in map(rule.reason, uses) if reason]
        if reasons:
            rule, why = _agree_on_rule(reasons, uses)
            flatten = KINDS[rule.kind].flatten
            try:
                if rule.kind == "experts" and is_in(uses, *CONVOLUTIONS):
                    raise ArgumentError(
                        "a convolution's weight is one matrix of its first dim and all others, and no stack of experts"
                    )
                decision = Decision(parameter, names, shape, rule.kind, rule, why, fused=Fused(flatten=flatten))
            except ValueError as error:
                raise UnclearError(str(error), usual_rule) from error
            # Its kind has been checked to have rows and columns.
            split = _find_split(rule, uses)
            return decision if split == WHOLE else replace(decision, fused=split.of(shape, flatten))
    raise UnselectedError("no rule selects it", usual_rule)


def _guess_rule(uses: Sequence[Use], names: tuple[str, ...]) -> Rule:
    """Return the rule that most likely decides a parameter: advice, for the user to check."""
    for use in uses:
        for rule in MODULE_TYPES:
            if rule.reason(use):
                return Rule(rule.kind, names, split=rule.split)
    match tuple(uses[0].parameter.shape):
        case (_, _):
            return Rule("matrix", names)
        # A stack of one is more often of positions.
        case (count, _, _) if count > 1 and not is_in(uses, *CONVOLUTIONS):
            return Rule("experts", names)
    return Rule("other", names)


def _find_split(rule: Rule, uses: Sequence[Use]) -> Split:
    return next(rule.split_in(use.owner) for use in uses if rule.reason(use))


def _agree_on_rule(reasons: Sequence[tuple[Rule, str]], uses: Sequence[Use]) -> tuple[Rule, str]:
    """Return the rule on which a layer's rules agree, and its reason."""
    rules = list(dict.fromkeys(rule for rule, _ in reasons))
    if len({(rule.kind, _find_split(rule, uses)) for rule in rules}) == 1:
        return reasons[0]
    embedding = next(((rule, why) for rule, why in reasons if rule.kind == "embedding"), None)
    # A rule for a module type does not know that its parameter is an embedding elsewhere; a rule with names does.
    is_tied = all(rule.kind in ("embedding", "head") or is_typed_matrix(rule) for rule in rules)
    if len(uses) > 1 and embedding and is_tied:
        return embedding[0], f"{embedding[1]} (tied)"
    winner = next((rule for rule in rules if rule.names), rules[0])
    raise UnclearError(
        f"{listed(map(repr, rules), separator=' and ')} disagree; put the one that shall win into an earlier layer",
        winner,
    )
