"""Parameter groups of a model: what each parameter is, by explicit rules.  What is unclear is refused, not guessed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from .decisions import FROZEN, Decision, Decisions, folded
from .rules import WHOLE, Rule, Use

WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""What torch.compile, activation checkpointing and FSDP1 insert into names; DCP leaves these out too."""


def sort_parameters(model: nn.Module, *layers: Sequence[Rule]) -> Decisions:
    """Decide what every parameter of ``model`` is.  Nothing but the rules decides, and all that is unclear is refused.

    Earlier layers beat later ones: the first layer with a rule for a parameter decides it, and all rules of that layer
    that select it must say the same.  A parameter that several modules share is one parameter with several names.  If
    it is an embedding under one name, and a head, or a module like any other, under the rest, it is a tied embedding.

    The model may be sharded (DTensors count with their global shape), compiled, checkpointed or wrapped for DDP: names
    are without what wrappers insert.  Parameters with ``requires_grad=False`` need no rule and come into no group.

    Args:
        layers: sequences of rules, such as your own and then a ready-made set.

    Raises:
        ValueError: lists everything that is unclear: parameters under no rule, rules that disagree, a shape that the
            kind cannot have or the split does not fit, a matrix as tall as an embedding that no rule names, matrices
            without a word about an output head, rules that select nothing, and flat or uninitialized parameters.
    """
    uses_of = _uses(model)
    decisions: list[Decision] = []
    problems = [("", f"{rule!r} selects nothing") for rule in _idle(layers, uses_of)]
    for parameter, uses in uses_of.items():
        try:
            decisions.append(_decide(parameter, uses, layers))
        except ValueError as error:
            owners = " and ".join(dict.fromkeys(type(use.owner).__name__ for use in uses))
            problems.append((_joined(uses), f"{list(parameter.shape)} in {owners}: {error}"))
    problems += _possible_heads(decisions, uses_of, layers)
    if problems:
        lines = [
            f"{name} ({count} alike) {what}" if count > 1 else f"{name} {what}"
            for name, count, what in folded(problems)
        ]
        raise ValueError("\n- ".join(["the parameters cannot be sorted:", *map(str.strip, lines)]))
    return Decisions(tuple(decisions))


def _uses(model: nn.Module) -> dict[Tensor, list[Use]]:
    """Every parameter and where it is, in the model's order."""
    modules = list(model.named_modules(remove_duplicate=False))
    replicated = [path for path, module in modules if isinstance(module, DistributedDataParallel)]
    inserted = {f"{path}.module".removeprefix(".") for path in replicated}
    uses_of: dict[Tensor, list[Use]] = {}
    for path, module in modules:
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = ".".join([*_without(path, inserted), attribute])
            if is_lazy(parameter):
                raise ValueError(f"{name} is uninitialized and has no shape yet; run the model once first")
            uses_of.setdefault(parameter, []).append(Use(name, module, attribute, parameter))
    return uses_of


def _without(path: str, inserted: set[str]) -> Iterator[str]:
    """The parts of a module's path but for those that wrappers insert: of the known names, or at these paths."""
    parts = path.split(".")
    for end, part in enumerate(parts, 1):
        if part and part not in WRAPPERS and ".".join(parts[:end]) not in inserted:
            yield part


def _idle(layers: Sequence[Sequence[Rule]], uses_of: Mapping[Tensor, Sequence[Use]]) -> Iterator[Rule]:
    """Rules that had to select something and do not: most likely a name has a typo."""
    uses = [use for uses in uses_of.values() for use in uses]
    for rule in (rule for layer in layers for rule in layer):
        if not rule.optional and not any(map(rule.reason, uses)):
            yield rule


def _decide(parameter: Tensor, uses: Sequence[Use], layers: Sequence[Sequence[Rule]]) -> Decision:
    names, shape = tuple(use.name for use in uses), tuple(parameter.shape)
    if not parameter.requires_grad:
        return Decision(parameter, names, shape, FROZEN, None, "requires_grad=False")
    if isinstance(parameter, FlatParameter):
        raise ValueError("FSDP1 made one vector of several parameters; shard the model with fully_shard")
    for layer in layers:
        selecting = [(rule, why) for rule in layer for use in uses if (why := rule.reason(use))]
        if selecting:
            rule, why = _agreed(selecting, shared=len(uses) > 1)
            whole = Decision(parameter, names, shape, rule.kind, rule, why)
            # Only now it is sure that what is split has rows and columns.
            return whole if rule.split == WHOLE else replace(whole, fused=rule.split.of(shape))
    raise ValueError("no rule selects it; add one")


def _agreed(selecting: Sequence[tuple[Rule, str]], shared: bool) -> tuple[Rule, str]:
    """The rule that decides, of those in one layer, and why."""
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
    """Matrices that may be an output head; nothing but a word of the user tells it from any other nn.Linear."""
    uses = [use for uses in uses_of.values() for use in uses]
    by_type = [decision for decision in decisions if _by_type(decision.rule)]
    heads = [rule for layer in layers for rule in layer if rule.kind == "head"]
    named = any(rule.names == () or any(map(rule.reason, uses)) for rule in heads)
    tied = any(_holds(nn.Embedding, uses) and _holds(nn.Linear, uses) for uses in uses_of.values())
    # Rules that name every matrix leave a head of another name unsorted, so it is enough that they know of heads.
    known = named or tied or (heads and not by_type)
    if not known and any(decision.kind == "matrix" for decision in decisions):
        yield "", "which matrix is the output head?  Add Rule('head', its name), or NO_HEAD if there is none"
    # Also frozen embeddings count, by their module.
    embeddings = [decision.parameter for decision in decisions if decision.kind == "embedding"]
    embeddings += [use.parameter for use in uses if isinstance(use.owner, nn.Embedding)]
    heights = {tensor.shape[0] for tensor in embeddings if tensor.dim() == 2}
    for decision in by_type:
        if decision.shape[0] in heights:
            name = decision.names[0]
            yield (
                _joined(uses_of[decision.parameter]),
                f"{list(decision.shape)} has as many rows as an embedding: is it an output head?  Add "
                f"Rule('head', {name!r}) or Rule('matrix', {name!r}) in an earlier layer",
            )


def _holds(module: type[nn.Module], uses: Sequence[Use]) -> bool:
    return any(isinstance(use.owner, module) for use in uses)


def _joined(uses: Sequence[Use]) -> str:
    return " = ".join(use.name for use in uses)
