"""Rules that say what a parameter is, given as data by the user, and ready-made sets for known model families.

A rule selects parameters by module type, number of dims, or name patterns, and gives them a kind.  The kind decides
how they are stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from fnmatch import fnmatchcase

from torch import Tensor, nn

from ..planning.matrices import Fused

AnyShape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParamKind:
    """A kind of parameter: its algorithm, the numbers of dims it may have (None: any), and advice if it has others."""

    algorithm: str
    dims: tuple[int, ...] | None = None
    advice: str = ""


_OTHERWISE = "kind 'other' gives anything to AdamW"

KINDS: Mapping[str, ParamKind] = {
    "matrix": ParamKind("muon", (2,), f"a stack of matrices is kind 'experts', and {_OTHERWISE}"),
    "experts": ParamKind("muon", (3,), f"one expert's own matrix is kind 'matrix', and {_OTHERWISE}"),
    "embedding": ParamKind("adamw"),
    "head": ParamKind("adamw"),
    "router": ParamKind("adamw"),
    "vector": ParamKind("adamw", (0, 1), _OTHERWISE),
    "other": ParamKind("adamw"),
}
"""Embeddings and output heads go to AdamW by custom (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982).  So do
routers, whose few rows score experts: a cautious choice of ours, which a rule of kind "matrix" in an earlier layer
changes."""


@dataclass(frozen=True, slots=True)
class Split:
    """How several matrices are fused in one parameter; Muon orthogonalises each by itself.

    Args:
        pieces: row counts of the matrices, or the number of equal pieces.
        columns: the same along the columns, such as one per head of an output projection.
        interleaved: the rows are this many equal blocks of ``pieces``; the k-th pieces of all blocks are one matrix.

    Raises:
        ValueError: a count below 1, or interleaved blocks of a single piece.
    """

    pieces: int | AnyShape = 1
    columns: int | AnyShape = 1
    interleaved: int = 1

    def __post_init__(self) -> None:
        for counts in (self.pieces, self.columns, self.interleaved):
            if min((counts,) if isinstance(counts, int) else counts, default=0) < 1:
                raise ValueError(f"{self}: expected counts of at least 1")
        if self.interleaved > 1 and self.pieces == 1:
            raise ValueError(f"{self}: say which pieces each of the interleaved blocks has")

    def of(self, shape: AnyShape) -> Fused:
        """Return the row and column counts for a parameter of this shape, of at least two dims."""

        def counts(value: int | AnyShape, total: int) -> AnyShape | None:
            if not isinstance(value, int):
                return value
            # If these do not add up to the total, the decision is refused.
            return (total // value,) * value if value > 1 else None

        *_, rows, columns = shape
        pieces = counts(self.pieces, rows // self.interleaved)
        return Fused(pieces, counts(self.columns, columns), self.interleaved)


WHOLE = Split()


@dataclass(frozen=True, slots=True)
class Use:
    """One place that holds a parameter: its qualified name, its module, and its name in that module."""

    name: str
    owner: nn.Module
    attribute: str
    parameter: Tensor


@dataclass(frozen=True, slots=True, repr=False)
class Rule:
    """The kind of the parameters that all given selectors select; at least one selector must be given.

    Args:
        kind: a key of `KINDS`.
        names: one or more patterns over the whole qualified name.  ``*`` stands for anything (dots too), ``?`` for one
            character, ``[qkv]`` for one of these; case counts.
        module: type of the module that holds the parameter; subclasses count.
        attribute: name of the parameter in that module.
        dims: the numbers of dims that the parameter may have.
        where: a condition on that module.
        split: the matrices that are fused in the parameter.
        optional: the rule may select nothing, as in a set for several models; otherwise that is an error.
        why: a reason for people, shown with the decision.

    Raises:
        ValueError: an unknown kind, no selector, or a split of what Muon does not step.
    """

    kind: str
    names: str | tuple[str, ...] | None = None
    _: KW_ONLY
    module: type[nn.Module] | None = None
    attribute: str | None = None
    dims: tuple[int, ...] | None = None
    where: Callable[[nn.Module], bool] | None = None
    split: Split = WHOLE
    optional: bool = False
    why: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self!r}: unknown kind; expected one of {', '.join(KINDS)}")
        if all(given is None for given in (self.names, self.module, self.attribute, self.dims, self.where)):
            raise ValueError(f"{self!r} would select every parameter; give it names, a module, an attribute or dims")
        if self.split != WHOLE and KINDS[self.kind].algorithm != "muon":
            raise ValueError(f"{self!r}: only matrices and experts are split")

    def reason(self, use: Use) -> str | None:
        """Return in words why this rule selects a parameter, or None."""
        patterns = (self.names,) if isinstance(self.names, str) else self.names or ()
        matching = [pattern for pattern in patterns if fnmatchcase(use.name, pattern)]
        holds = (
            self.names is None or bool(matching),
            self.module is None or isinstance(use.owner, self.module),
            self.attribute is None or use.attribute == self.attribute,
            self.dims is None or use.parameter.dim() in self.dims,
        )
        # A condition on the module may rely on the other selectors.
        if not all(holds) or not (self.where is None or self.where(use.owner)):
            return None
        place = ".".join(filter(None, [self.module.__name__ if self.module else "", self.attribute]))
        dims = f"{use.parameter.dim()}-D" if self.dims else ""
        where = getattr(self.where, "__name__", repr(self.where)) if self.where else ""
        reason = " and ".join(filter(None, [*matching[:1], place, dims, where]))
        return f"{reason} ({self.why})" if self.why else reason

    def __repr__(self) -> str:
        given = ((field, getattr(self, field.name)) for field in fields(self))
        return f"Rule({', '.join(f'{field.name}={value!r}' for field, value in given if value != field.default)})"


def stacked_qkv(heads: int, kv_heads: int, head_dim: int) -> Split:
    """Return the split of a projection whose rows are all queries, then all keys, then all values."""
    return Split((heads * head_dim, kv_heads * head_dim, kv_heads * head_dim))


def grouped_qkv(heads: int, kv_heads: int, head_dim: int) -> Split:
    """Return the split of a projection with a block of rows for each key head: its queries, its key, its value.

    This is the order of Megatron's ``linear_qkv`` and torchtitan's ``wqkv``.

    Raises:
        ValueError: ``heads`` is not a multiple of ``kv_heads``.
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
    parts = ("gate_proj", "up_proj", "down_proj")
    return Rule("matrix", tuple(f"*{place}.{part}.weight" for place in places for part in parts))


def gate_over_up(experts: nn.Module) -> bool:
    """Return whether stacked experts lie as in an nn.Linear: gate over up ``[E, 2f, d]``, and down ``[E, d, f]``.

    Some models keep them transposed under the same names; then gate and up are columns.
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

MODULE_TYPES = _ready(Rule("matrix", module=nn.Linear, attribute="weight"))
"""torch's own modules: embeddings, every nn.Linear a matrix, and vectors.  If an nn.Linear is the model's head, name it
in an earlier layer; if none is, add `NO_HEAD`."""

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
which hold several heads or a latent and a rope part, stay whole, as their sizes are not known here."""

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
