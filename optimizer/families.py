"""Ready-made rules of known model families, and the names of projections that hold several matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import nn

from .planning.matrices import Split
from .rules import CONVOLUTIONS, Rule

_COMMON = (
    Rule("embedding", module=nn.Embedding, attribute="weight"),
    Rule("embedding", module=nn.EmbeddingBag, attribute="weight"),
    Rule("vector", dims=(0, 1)),
)
_HEAD = Rule("head", "*.lm_head.weight")


def _ready(*rules: Rule) -> tuple[Rule, ...]:
    """Return a set for several models; in each, some rules may select nothing."""
    return tuple(replace(rule, optional=True) for rule in (*_COMMON, *rules))


def _mlp(*places: str) -> Rule:
    """Return the rule of gated MLPs of three nn.Linear in these places, as transformers names them."""
    names: list[str] = []
    for place in places:
        names += f"*{place}.gate_proj.weight", f"*{place}.up_proj.weight", f"*{place}.down_proj.weight"
    return Rule("matrix", tuple(names))


def is_stacked_mlp(experts: nn.Module) -> bool:
    """Return whether a module's parameters of three dims are an MLP for each expert, as their shapes prove: several
    matrices in each, ``[E, f, d]`` and ``[E, d, f]``.  Squares prove nothing.
    """
    stacks = {tuple(parameter.shape) for parameter in experts.parameters(recurse=False) if parameter.dim() == 3}
    are_rectangles = all(count > 1 and rows != columns for count, rows, columns in stacks)
    return len(stacks) == 2 and are_rectangles and stacks == {(count, columns, rows) for count, rows, columns in stacks}


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
    *(Rule("convolution", module=kind, attribute="weight") for kind in CONVOLUTIONS),
    Rule("matrix", module=nn.Linear, attribute="weight"),
    Rule("experts", dims=(3,), where=is_stacked_mlp),
    Rule("experts", dims=(3,), where=gate_over_up),
)
"""The rules of a model for which none are given: embeddings, every nn.Linear a matrix, every convolution a matrix for
each of its groups, stacks that are an MLP for each expert, and vectors."""

LLAMA = _ready(_HEAD, _HF_ATTENTION, _mlp("mlp"))
"""transformers: Llama, Mistral, Qwen2, Qwen3 and others with the same names."""

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
Everything else that is trained needs a layer after it, as in ``[LORA, LLAMA]``."""


FUSED: Mapping[str, str] = {
    **dict.fromkeys(("qkv", "qkv_proj", "qkv_linear", "to_qkv", "linear_qkv", "Wqkv", "wqkv", "W_pack"), "q, k, v"),
    **dict.fromkeys(("query_key_value", "c_attn", "in_proj_weight", "in_proj_qkv"), "q, k, v"),
    **dict.fromkeys(("kv_proj", "to_kv", "kv_b_proj", "linear_kv_up_proj"), "k, v"),
    **dict.fromkeys(("kv_a_proj_with_mqa", "linear_kv_down_proj"), "latent, rope"),
    "in_proj_qkvz": "q, k, v, z",
    "in_proj_ba": "b, a",
    "in_proj": "x, z, ...",
    "x_proj": "dt, B, C",
    **dict.fromkeys(("gate_up_proj", "w12", "w13"), "gate, up"),
}
"""The matrices in projections with known names, of a module or a parameter, in Megatron, torch, transformers, timm and
others: users give their order."""

FUSED_PARTS: Mapping[str, str] = {
    "qkv": "q, k, v",
    **dict.fromkeys(("gate_up", "gate_and_up", "up_gate", "w1_w3", "w1w3"), "gate, up"),
}
"""The matrices in projections with these in their names, in lower case."""

GATED: Mapping[str, tuple[Collection[str], str]] = {
    **dict.fromkeys(("q_proj", "wq", "to_q"), (("o_proj", "out_proj", "wo", "to_out"), "q, gate")),
    "linear_fc1": (("linear_fc2",), "gate, up"),
    "fc1": (("fc2",), "gate, up"),
    "ff_proj": (("ff_out",), "gate, up"),
    "wi": (("wo",), "gate, up"),
    "Wi": (("Wo",), "gate, up"),
    "input_linear": (("output_linear",), "gate, up"),
    "dense_h_to_4h": (("dense_4h_to_h",), "gate, up"),
}
"""Projections that hold two matrices where they have twice as many rows as a projection beside them has columns."""
