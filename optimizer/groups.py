"""Parameter groups of a model by explicit rules; parameters that they leave unclear are refused, not guessed.

A rule selects parameters by module type, number of dims, or name patterns, and gives them a kind, which decides how
they are stepped.  `sort_parameters` applies rules to a model; open it first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any, Union

from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..names.errors import called_like, did_you_mean
from ..names.resumption import in_globs
from ..names.vocabulary import FUSION
from ..names.wording import find_heads, folded, table
from .methods.form import MatrixMethod
from .methods.matrix import MATRICES
from .methods.scalar import SCALARS
from .planning.matrices import Fused, Split as Split, matrices_of

AnyShape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParamKind:
    """A kind of parameter: its algorithm, the numbers of dims it may have (None: any), advice for other ones, and
    whether it is flattened to a matrix (`Fused`).
    """

    algorithm: str
    dims: tuple[int, ...] | None = None
    advice: str = ""
    flatten: bool = False


_OTHER = "kind 'other' gives anything to AdamW"

KINDS: Mapping[str, ParamKind] = {
    "matrix": ParamKind("muon", (2,), f"a stack is kind 'experts', a kernel is kind 'convolution', and {_OTHER}"),
    "experts": ParamKind("muon", (3,), f"one expert's own matrix is kind 'matrix', and {_OTHER}"),
    "convolution": ParamKind("muon", (3, 4, 5), f"one of two dims is kind 'matrix', and {_OTHER}", flatten=True),
    "embedding": ParamKind("adamw"),
    "head": ParamKind("adamw"),
    "router": ParamKind("muon", (2,), _OTHER),
    "vector": ParamKind("adamw", (0, 1), _OTHER),
    "other": ParamKind("adamw"),
}
"""Embeddings and output heads go to AdamW by custom (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982).  Routers
are matrices as any other: so have it the code of Liu et al., torchtitan's recipe for Kimi K2.5, and Megatron."""


WHOLE = Split()


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def split_by_groups(convolution: nn.Module) -> Split:
    """Return the split of a convolution's weight into a matrix for each of its groups: equal parts of the first dim,
    which is the out channels, or the in channels of a transposed convolution.
    """
    return Split(convolution.groups)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Use:
    """One place of a parameter in a model: its qualified name, its module, and its name there."""

    name: str
    owner: nn.Module
    attribute: str
    parameter: Tensor


@dataclass(frozen=True, slots=True, repr=False)
class Rule:
    """A kind, and selectors of the parameters that have it: all that are given must match, and one must be given.

    Args:
        kind: a key of `KINDS`.
        names: one or more patterns over the whole qualified name.  ``*`` matches anything (dots too), ``?`` one
            character, ``[qkv]`` one of these; case counts.
        module: type of the module that holds the parameter, or a base of it.
        attribute: name of the parameter in that module.
        dims: numbers of dims of the parameter.
        where: a condition on that module.
        split: the matrices that are fused in the parameter, or a function of that module that returns them.
        optional: selecting nothing is no error, as in a set for several models.
        why: a reason, shown with the decision.
    """

    kind: str
    names: str | tuple[str, ...] | None = None
    _: KW_ONLY
    module: type[nn.Module] | None = None
    attribute: str | None = None
    dims: tuple[int, ...] | None = None
    where: Callable[[nn.Module], bool] | None = None
    split: Split | Callable[[nn.Module], Split] = WHOLE
    optional: bool = False
    why: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self!r}: unknown kind; expected one of {', '.join(KINDS)}")
        if all(selector is None for selector in (self.names, self.module, self.attribute, self.dims, self.where)):
            raise ValueError(f"{self!r} would select every parameter; give it names, a module, an attribute or dims")
        if self.split != WHOLE and KINDS[self.kind].algorithm != "muon":
            raise ValueError(f"{self!r}: only matrices, experts, convolutions and routers are split")

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.names,) if isinstance(self.names, str) else self.names or ()

    def split_in(self, module: nn.Module) -> Split:
        """Return the matrices that are fused in a parameter of this module."""
        return self.split if isinstance(self.split, Split) else self.split(module)

    def reason(self, use: Use) -> str | None:
        """Return in words why this rule selects a parameter, or None."""
        matching = [pattern for pattern in self.patterns if fnmatchcase(use.name, pattern)]
        is_selected = (
            (self.names is None or matching)
            and (self.module is None or isinstance(use.owner, self.module))
            and (self.attribute is None or use.attribute == self.attribute)
            and (self.dims is None or use.parameter.dim() in self.dims)
            and (self.where is None or self.where(use.owner))  # last, as it may rely on the other selectors
        )
        if not is_selected:
            return None
        place = ".".join(filter(None, [self.module.__name__ if self.module else "", self.attribute]))
        dims = f"{use.parameter.dim()}-D" if self.dims else ""
        where = getattr(self.where, "__name__", repr(self.where)) if self.where else ""
        reason = " and ".join(filter(None, [*matching[:1], place, dims, where]))
        return f"{reason} ({self.why})" if self.why else reason

    def __repr__(self) -> str:
        arguments = []
        for parameter in fields(self):
            value = getattr(self, parameter.name)
            if value != parameter.default:
                keyword = "" if parameter.name in ("kind", "names") else f"{parameter.name}="
                text = getattr(value, "__name__", repr(value))
                text = f"{value.__module__}.{value.__qualname__}" if parameter.name == "module" else text
                arguments.append(f"{keyword}{text}")
        return f"Rule({', '.join(arguments)})"


Rules = Union[Rule, Iterable["Rules"]]  # noqa: UP007
"""Rules as users give them: rules side by side are one layer, of which an earlier one beats a later one.  So
``[[Rule("head", "out.weight")], MODULE_TYPES]`` has two layers; how deep they are nested says nothing."""

EXAMPLE = "[[Rule('head', 'lm_head.weight')], MODULE_TYPES]"
"""Rules as they are written in a line of code; NO_HEAD stands in the place of its rule where no matrix is a head."""


def layers_of(rules: Rules) -> list[tuple[Rule, ...]]:
    """Return the layers of rules, the first one to be asked first; raise TypeError if something is no rule."""
    if isinstance(rules, Rule):
        return [(rules,)]
    if isinstance(rules, str | nn.Module) or not isinstance(rules, Iterable):
        intruder = repr(rules) if isinstance(rules, str) else f"a {type(rules).__name__}"
        raise TypeError(f"rules: expected rules in lists, as in rules={EXAMPLE}; found {intruder} among them")
    # A list among rules makes layers of its own, and ends the layer before it.
    layers: list[tuple[Rule, ...]] = []
    follows_rule = False
    for item in rules:
        if isinstance(item, Rule) and follows_rule:
            layers[-1] += (item,)
        else:
            layers += layers_of(item)
        follows_rule = isinstance(item, Rule)
    return layers


def stacked_qkv(heads: int, kv_heads: int, head_dim: int) -> Split:
    """Return the split of a projection of all queries, then all keys, then all values."""
    return Split((heads * head_dim, kv_heads * head_dim, kv_heads * head_dim))


def grouped_qkv(heads: int, kv_heads: int, head_dim: int) -> Split:
    """Return the split of a projection with a block of rows for each key head: its queries, its key, its value, as in
    Megatron's ``linear_qkv`` and torchtitan's ``wqkv``.
    """
    if heads % kv_heads:
        raise ValueError(f"{heads} heads of queries are not {kv_heads} equal groups")
    return Split((heads // kv_heads * head_dim, head_dim, head_dim), interleaved=kv_heads)


NO_HEAD = Rule("head", (), optional=True)
"""States that the model has no output head."""

_COMMON = (
    Rule("embedding", module=nn.Embedding, attribute="weight"),
    Rule("embedding", module=nn.EmbeddingBag, attribute="weight"),
    Rule("vector", dims=(0, 1)),
)
_HEAD = Rule("head", ("lm_head.weight", "*.lm_head.weight"))


def _ready(*rules: Rule) -> tuple[Rule, ...]:
    """Return a set for several models, in each of which some rules may select nothing."""
    return tuple(replace(rule, optional=True) for rule in (*_COMMON, *rules))


def _mlp(*places: str) -> Rule:
    """Return the rule of gated MLPs of three nn.Linear in these places, as transformers names them."""
    names: list[str] = []
    for place in places:
        names += f"*{place}.gate_proj.weight", f"*{place}.up_proj.weight", f"*{place}.down_proj.weight"
    return Rule("matrix", tuple(names))


def gate_over_up(experts: nn.Module) -> bool:
    """Return whether stacked experts lie as in an nn.Linear: gate over up ``[E, 2f, d]``, and down ``[E, d, f]``.

    Some models have them transposed under the same names.
    """
    match {name: tuple(parameter.shape) for name, parameter in experts.named_parameters(recurse=False)}:
        case {"gate_up_proj": (count, height, width), "down_proj": down}:
            return down == (count, width, height // 2) and height % 2 == 0
    return False


_HF_ATTENTION = Rule("matrix", "*self_attn.[qkvo]_proj.weight")
_HF_EXPERTS = (
    Rule("router", "*mlp.gate.weight"),
    Rule("experts", "*mlp.experts.gate_up_proj", where=gate_over_up, split=Split(2)),
    Rule("experts", "*mlp.experts.down_proj", where=gate_over_up),
)

MODULE_TYPES = _ready(
    *(Rule("convolution", module=kind, attribute="weight", split=split_by_groups) for kind in CONVOLUTIONS),
    Rule("matrix", module=nn.Linear, attribute="weight"),
)
"""torch's own modules: embeddings, every nn.Linear a matrix, every convolution a matrix for each of its groups, and
vectors.  If an nn.Linear is the model's head, name it in an earlier layer; if none is, add `NO_HEAD`."""

LLAMA = _ready(_HEAD, _HF_ATTENTION, _mlp("mlp"))
"""transformers: Llama, Mistral, Qwen2, Qwen3 and others of these names."""

QWEN = _ready(
    _HEAD,
    _HF_ATTENTION,
    _mlp("mlp", "mlp.shared_expert", "mlp.experts.*"),
    Rule("router", "*mlp.shared_expert_gate.weight"),
    *_HF_EXPERTS,
)
"""transformers: Qwen2, Qwen3, Qwen2-MoE and Qwen3-MoE, with experts as 3-D parameters (from 5.0) or as modules."""

MIXTRAL = _ready(
    _HEAD,
    _HF_ATTENTION,
    Rule("router", "*block_sparse_moe.gate.weight"),
    Rule("matrix", "*block_sparse_moe.experts.*.w[123].weight"),
    *_HF_EXPERTS,
)
"""transformers: Mixtral, with experts as 3-D parameters (from 5.0) or as modules."""

DEEPSEEK = _ready(
    _HEAD,
    Rule("matrix", ("*self_attn.[qo]_proj.weight", "*self_attn.q_[ab]_proj.weight"), why="whole"),
    Rule("matrix", ("*self_attn.kv_a_proj_with_mqa.weight", "*self_attn.kv_b_proj.weight"), why="whole"),
    _mlp("mlp", "mlp.shared_experts", "mlp.experts.*"),
    *_HF_EXPERTS,
)
"""transformers: DeepSeek-V2 and V3, with experts as 3-D parameters (from 5.0) or as modules.  The latent projections,
of several heads, or a latent and a rope part, stay whole, as their sizes are not known here."""

TORCHTITAN = _ready(
    _HEAD,
    Rule("head", "output.weight"),
    Rule("matrix", ("*attention.w[qkvo].weight", "*attention.qkv_linear.w[qkv].weight")),
    Rule("matrix", ("*attention.wq_[ab].weight", "*attention.wkv_[ab].weight"), why="whole"),
    Rule("matrix", ("*feed_forward.w[123].weight", "*moe.shared_experts.w[123].weight")),
    Rule("matrix", "*mtp_layers.*.eh_proj.weight"),
    Rule("router", ("*moe.router.gate.weight", "*moe.shared_experts.gate.weight")),
    Rule("experts", ("*moe.experts.w[123]", "*moe.routed_experts.inner_experts.w[123]_E*")),
)
"""torchtitan: Llama 3, Qwen3 and DeepSeek-V3, dense or with grouped experts.  A fused ``wqkv`` needs a rule of its own,
with `grouped_qkv` and the model's sizes."""

LORA = _ready(
    _HEAD,
    Rule("head", "*.lm_head.modules_to_save.*.weight"),
    Rule("matrix", ("*.lora_A.*.weight", "*.lora_B.*.weight"), dims=(2,)),
    Rule("other", ("*.lora_embedding_A.*", "*.lora_embedding_B.*")),
)
"""Adapters of peft: each half, ``[r, in]`` and ``[out, r]``, is a matrix of its own; those of embeddings are AdamW's.
Everything else that is trained needs a layer behind it, as in ``[LORA, LLAMA]``."""


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
        """ "muon", "adamw", or "none" if frozen."""
        return "none" if self.kind == FROZEN else KINDS[self.kind].algorithm

    def cells(self) -> tuple[str, ...]:
        """Return this decision's row of the table, without names and count."""
        texts = ["flattened"] if self.fused.flatten else []
        for unit, sizes in (("", self.fused.pieces or ()), ("columns ", self.fused.columns or ())):
            is_even = len(sizes) > 2 and len(set(sizes)) == 1
            text = f"{len(sizes)} x {sizes[0]}" if is_even else " + ".join(map(str, sizes))
            if sizes and not unit and self.fused.interleaved > 1:
                text = f"{self.fused.interleaved} x ({text})"
            if sizes:
                texts.append(f"{unit}{text}")
        return str(list(self.shape)), self.kind, self.algorithm, ", ".join(texts) or "-", self.why


@dataclass(frozen=True, slots=True)
class Decisions:
    """The decisions on all parameters of a model, in its order, each once; ``str`` makes a table of them."""

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
        kinds with options of their own, in the order of `KINDS`.  A group of frozen parameters is empty, unless last.

        Args:
            muon: options of all groups of matrices, such as ``lr`` or ``algorithm="normuon"``.
            adamw: options of all other groups, such as ``algorithm="lion"``, and ``lr`` unless one rate serves both.
            kinds: options by kind, which override the others.
        """
        if unknown := set(kinds) - set(KINDS):
            raise ValueError(f"options for unknown kinds {sorted(unknown)}; expected some of {', '.join(KINDS)}")
        # The options of each kind, which may not change who steps it.
        base = {"muon": {"algorithm": "muon", **muon}, "adamw": {"algorithm": "adamw", **adamw}}
        options = {kind: {**base[KINDS[kind].algorithm], **kinds.get(kind, {})} for kind in KINDS}
        for kind, kind_options in options.items():
            if reserved := {"params", *FUSION} & set(kind_options):
                raise ValueError(
                    f"{sorted(reserved)} among the options of {kind!r}: the rules say that, not the options"
                )
            algorithm, usual = kind_options["algorithm"], KINDS[kind].algorithm
            is_custom = isinstance(algorithm, MatrixMethod) and usual == "muon"
            if not is_custom and algorithm not in FAMILIES[usual]:
                raise ValueError(
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


class _Unclear(ValueError):
    """Rules leave a parameter unclear; one more ``rule`` would decide it, of a matrix or head if it ``may_be_head``."""

    def __init__(self, message: str, rule: Rule, may_be_head: bool = False) -> None:
        super().__init__(message)
        self.rule, self.may_be_head = rule, may_be_head


FSDP1 = (
    "a wrapper such as FSDP1 (FullyShardedDataParallel) flattens parameters and cuts the vector, so that no rank has "
    "matrices; shard the model with fully_shard (FSDP2), in Lightning with ModelParallelStrategy"
)

WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Parts that torch.compile, activation checkpointing and FSDP1 insert into names; DCP drops them too."""

_WHERE = (
    "where RULES are those given now; check the kinds: Muon steps a 'matrix', a 'convolution' and all 'experts', AdamW "
    "the others"
)


@called_like(f"sort_parameters(model, {EXAMPLE})")
def sort_parameters(model: nn.Module, *rules: Rules) -> Decisions:
    """Decide the kind of every parameter of ``model`` by rules, and refuse everything that they leave unclear.

    The first layer with a rule for a parameter decides it, and all rules of that layer that select it must agree.  A
    shared parameter that is an embedding under one name, and a head or a matrix by module type under the others, is a
    tied embedding.  Frozen parameters need no rule.

    The model may be sharded (DTensors count with their global shape), compiled, checkpointed or wrapped for DDP; names
    are without parts that wrappers insert.

    Args:
        rules: as for `Muon.for_model`: a set, or several in a list, of which earlier ones beat later ones.

    Raises:
        TypeError: this is no model, or something among the rules is no rule.
        ValueError: lists everything that is unclear, and rules that would decide it: parameters under no rule, rules
            that disagree or select nothing, a shape that does not fit the kind or the split, a matrix that may be an
            output head, and flat or uninitialized parameters.
    """
    uses_of = _uses(model)
    if not (layers := layers_of(rules)):
        raise ValueError(
            f"rules: expected some of muonckpt.optimizer.groups, found none. Write rules={rules_to_write(model)}"
        )
    return _sort(uses_of, layers, f"RULES], {_WHERE}")


def rules_to_write(model: nn.Module) -> str:
    """Return rules that sort the modules of torch in a model, as code to begin with."""
    try:
        _sort(_uses(model), [MODULE_TYPES], "MODULE_TYPES]")
    except ValueError as error:
        _, separator, code = str(error).rpartition("rules=")
        return code if separator else EXAMPLE
    return "MODULE_TYPES"


def _sort(uses_of: Mapping[Tensor, Sequence[Use]], layers: Sequence[Sequence[Rule]], present_rules: str) -> Decisions:
    """Decide each parameter, or raise ValueError with code that puts rules before the present ones."""
    all_uses = [*chain(*uses_of.values())]
    all_names = [use.name for use in all_uses]
    problems: list[tuple[str, Exception]] = []
    for rule in chain(*layers):
        if not rule.optional and not any(map(rule.reason, all_uses)):
            close = "".join(did_you_mean(name, all_names) for name in rule.patterns[:1])
            problems.append(("", ValueError(f"{rule!r} selects nothing{close}")))
    # A matrix as tall as an embedding may be an output head.
    heights = {use.parameter.shape[0] for use in all_uses if isinstance(use.owner, nn.Embedding)}
    decisions: list[Decision] = []
    for parameter, uses in uses_of.items():
        try:
            decisions.append(_decide(parameter, uses, layers))
        except ValueError as error:
            owners = " and ".join(dict.fromkeys(type(use.owner).__name__ for use in uses))
            problem: Exception = ValueError(f"{list(parameter.shape)} in {owners}: {error}")
            if isinstance(error, _Unclear):
                may_be_head = error.rule.kind == "matrix" and parameter.shape[0] in heights
                problem = _Unclear(str(problem), error.rule, may_be_head)
            problems.append((" = ".join(use.name for use in uses), problem))
    problems += _possible_heads(decisions, uses_of, layers)
    if not problems:
        return Decisions(tuple(decisions))
    # One line for parameters that are alike in all layers, and the rules to write.
    lines = ["the parameters cannot be sorted:"]
    for name, count, text in folded((name, str(problem)) for name, problem in problems):
        lines.append((f"{name} ({count} alike) {text}" if count > 1 else f"{name} {text}").strip())
    unclear = [problem for _, problem in problems if isinstance(problem, _Unclear)]
    code = _as_code(_rules_to_add(unclear, decisions, all_names), all_names)
    cure = f"\nWrite rules=[[{', '.join(code)}], {present_rules}" if code else ""
    raise ValueError("\n- ".join(lines) + cure)


def _rules_to_add(unclear: Sequence[_Unclear], decisions: Sequence[Decision], all_names: Sequence[str]) -> list[Rule]:
    """Return the rules to write; a matrix that may be a head and likely is none would lose Muon, and stays a matrix."""
    questions = {problem.rule.patterns[0] for problem in unclear if problem.may_be_head}
    matrices = questions | {decision.names[0] for decision in decisions if decision.kind == "matrix"}
    matrices.update(*(problem.rule.patterns[:1] for problem in unclear if problem.rule.kind == "matrix"))
    # Names are compared in the model's order, in which a head comes late.
    heads = find_heads(list(filter(questions.__contains__, all_names)), list(filter(matrices.__contains__, all_names)))
    if any(decision.kind == "head" for decision in decisions):
        heads = set()
    rules = []
    for problem in unclear:
        rule = problem.rule
        if problem.may_be_head:
            rule = replace(rule, kind="head" if rule.patterns[0] in heads else "matrix")
        rules.append(rule)
    return rules


def _as_code(rules: Sequence[Rule], all_names: Collection[str]) -> list[str]:
    """Return rules as code, those with names alone joined by their kind."""
    name_rules = [rule for rule in rules if rule.names and rule == Rule(rule.kind, rule.names)]
    joined = []
    for kind in dict.fromkeys(rule.kind for rule in name_rules):
        names = [*chain(*(rule.patterns for rule in name_rules if rule.kind == kind))]
        globs = in_globs(names, {*all_names} - {*names}) if {*names} <= {*all_names} else names
        joined.append(Rule(kind, globs[0] if len(globs) == 1 else tuple(globs)))
    joined += [rule for rule in rules if rule not in name_rules]
    return ["NO_HEAD" if rule == NO_HEAD else repr(rule) for rule in dict.fromkeys(joined)]


def _uses(model: nn.Module) -> dict[Tensor, list[Use]]:
    """Return the places of each parameter in a model, with names as they are without wrappers."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a model, whose names and modules decide, found a {type(model).__name__}")
    modules = list(model.named_modules(remove_duplicate=False))
    if any(isinstance(module, FullyShardedDataParallel) for _, module in modules):  # also with use_orig_params
        raise ValueError(FSDP1)
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
                raise ValueError(f"{name} is uninitialized and has no shape yet; run the model once first")
            uses_of.setdefault(parameter, []).append(Use(name, module, attribute, parameter))
    return uses_of


def _decide(parameter: Tensor, uses: Sequence[Use], layers: Sequence[Sequence[Rule]]) -> Decision:
    if parameter.requires_grad:
        return _apply_rules(parameter, uses, layers)
    names = tuple(use.name for use in uses)
    frozen = Decision(parameter, names, tuple(parameter.shape), FROZEN, None, "requires_grad=False")
    try:
        return replace(frozen, if_trained=_apply_rules(parameter, uses, layers))
    except ValueError:  # it needs no rule
        return frozen


def _apply_rules(parameter: Tensor, uses: Sequence[Use], layers: Sequence[Sequence[Rule]]) -> Decision:
    names, shape = tuple(use.name for use in uses), tuple(parameter.shape)
    # A linear weight without rows was flattened, unless a rule gives it to AdamW by name.
    is_linear = any(isinstance(use.owner, nn.Linear) and use.attribute == "weight" for use in uses)
    if isinstance(parameter, FlatParameter) or (is_linear and parameter.dim() < 2):
        adamw = [rule for rule in chain(*layers) if rule.names and KINDS[rule.kind].algorithm == "adamw"]
        if isinstance(parameter, FlatParameter) or not any(any(map(rule.reason, uses)) for rule in adamw):
            raise ValueError(FSDP1)
    kind = _usual_kind(uses)
    # The first layer that selects it decides.
    for layer in layers:
        reasons: list[tuple[Rule, str]] = []
        for rule in layer:
            reasons += [(rule, reason) for reason in map(rule.reason, uses) if reason]
        if reasons:
            rule, why = _agreed_rule(reasons, is_shared=len(uses) > 1)
            flatten = KINDS[rule.kind].flatten
            try:
                if rule.kind == "experts" and _is_in(uses, *CONVOLUTIONS):
                    raise ValueError(
                        "a convolution's weight is one matrix of its first dim and all others, and no stack of experts"
                    )
                decision = Decision(parameter, names, shape, rule.kind, rule, why, Fused(flatten=flatten))
            except ValueError as error:
                raise _Unclear(str(error), Rule("other" if kind == "vector" else kind, names)) from error
            # Its kind has been checked to have rows and columns.
            split = next(rule.split_in(use.owner) for use in uses if rule.reason(use))
            return decision if split == WHOLE else replace(decision, fused=split.of(shape, flatten))
    hints = {"experts": "is a stack of matrices", "matrix": "multiplies activations", "convolution": "mixes channels"}
    hint = f" of kind {kind!r} if it {hints[kind]}, of kind 'other' if not" if kind in hints else ""
    raise _Unclear(f"no rule selects it; add one{hint}", Rule(kind, names))


def _usual_kind(uses: Sequence[Use]) -> str:
    """Return the kind that a parameter most likely has: advice, which the user is told to check."""
    for use in uses:
        for rule in MODULE_TYPES:
            if rule.reason(use):
                return rule.kind
    return "other" if _is_in(uses, *CONVOLUTIONS) else {2: "matrix", 3: "experts"}.get(uses[0].parameter.dim(), "other")


def _agreed_rule(reasons: Sequence[tuple[Rule, str]], is_shared: bool) -> tuple[Rule, str]:
    """Return the rule on which a layer's rules agree, and its reason."""
    rules = list(dict.fromkeys(rule for rule, _ in reasons))
    if all((rule.kind, rule.split) == (rules[0].kind, rules[0].split) for rule in rules):
        return reasons[0]
    embedding = next(((rule, why) for rule, why in reasons if rule.kind == "embedding"), None)
    # A rule for a module type does not know that its parameter is an embedding elsewhere; a rule with names does.
    is_tied = all(rule.kind in ("embedding", "head") or _is_typed_matrix(rule) for rule in rules)
    if is_shared and embedding and is_tied:
        return embedding[0], f"{embedding[1]} (tied)"
    winner = next((rule for rule in rules if rule.names), rules[0])
    listed = " and ".join(map(repr, rules))
    raise _Unclear(f"{listed} disagree; put the one that shall win into an earlier layer", winner)


def _is_in(uses: Sequence[Use], *module_types: type[nn.Module]) -> bool:
    return any(isinstance(use.owner, module_types) for use in uses)


def _is_typed_matrix(rule: Rule | None) -> bool:
    """Return whether a rule selects matrices without names, such as those of every `nn.Linear`."""
    return rule is not None and rule.kind == "matrix" and rule.names is None


def _possible_heads(
    decisions: Sequence[Decision], uses_of: Mapping[Tensor, Sequence[Use]], layers: Sequence[Sequence[Rule]]
) -> Iterator[tuple[str, _Unclear]]:
    """Yield names and questions of matrices that may be an output head, which AdamW trains: only the user can tell."""
    all_uses = [*chain(*uses_of.values())]
    typed_matrices = [decision for decision in decisions if _is_typed_matrix(decision.rule)]
    # The question is answered by a rule that selects a head, by NO_HEAD, or by an embedding that is the head too.
    head_rules = [rule for rule in chain(*layers) if rule.kind == "head"]
    has_answer = any(rule.names == () or any(map(rule.reason, all_uses)) for rule in head_rules)
    is_tied = any(_is_in(uses, nn.Embedding) and _is_in(uses, nn.Linear) for uses in uses_of.values())
    # Where all matrices are selected by names, a head of an unforeseen name has no rule, and is refused as such.
    has_answer = has_answer or is_tied or bool(head_rules and not typed_matrices)
    # First question: a matrix as tall as an embedding.  Frozen embeddings count too, by their module.
    embeddings = [decision.parameter for decision in decisions if decision.kind == "embedding"]
    embeddings += [use.parameter for use in all_uses if isinstance(use.owner, nn.Embedding)]
    heights = {tensor.shape[0] for tensor in embeddings if tensor.dim() == 2}
    tall_matrices = [decision for decision in typed_matrices if decision.shape[0] in heights and not is_tied]
    for decision in tall_matrices:
        question = f"{list(decision.shape)} has as many rows as an embedding: is it an output head?"
        yield " = ".join(decision.names), _Unclear(question, Rule("head", decision.names), may_be_head=True)
    # Otherwise the user is asked once about all matrices together.
    matrices = [decision.names[0] for decision in decisions if decision.kind == "matrix"]
    if not has_answer and not tall_matrices and matrices:
        rows = folded((name, "") for name in matrices)
        names = ", ".join(name for name, _, _ in rows)
        question = f"which matrix is the output head, if there is one: {names}?  Then Rule('head', its name)"
        yield "", _Unclear(question, NO_HEAD)
