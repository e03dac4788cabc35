"""The ready-made layers of rules against models of the same structure as the families that they name.

The structures were taken from transformers 4.57 and 5.23 and from torchtitan; where transformers is installed, its own
models are sorted too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from support.modules import linear, placed_once, stack, tree, under
from torch import nn

from muonckpt.lab.forecasting.models import model_of_config
from muonckpt.optimizer import Muon
from muonckpt.optimizer.groups import (
    DEEPSEEK,
    LLAMA,
    MIXTRAL,
    MODULE_TYPES,
    QWEN,
    TORCHTITAN,
    Decisions,
    Rule,
    Split,
    UnsortedError,
    grouped_qkv,
    sort_parameters,
    stacked_qkv,
)
from muonckpt.optimizer.planning.matrices import Fused

Parts = Mapping[str, nn.Module | nn.Parameter]

# Width 8, 4 experts of width 6, a vocabulary of 32.


def mlp(width: int = 12) -> Parts:
    return {"gate_proj": linear(width, 8), "up_proj": linear(width, 8), "down_proj": linear(8, width)}


def gqa(bias: bool = False) -> Parts:
    return {"q_proj": linear(8, 8, bias), "k_proj": linear(4, 8, bias), "v_proj": linear(4, 8, bias),
            "o_proj": linear(8, 8), "q_norm": nn.RMSNorm(2), "k_norm": nn.RMSNorm(2)}  # fmt: skip


def mla() -> Parts:
    return {"q_a_proj": linear(4, 8), "q_a_layernorm": nn.RMSNorm(4), "q_b_proj": linear(12, 4),
            "kv_a_proj_with_mqa": linear(6, 8), "kv_a_layernorm": nn.RMSNorm(4), "kv_b_proj": linear(16, 4),
            "o_proj": linear(8, 8)}  # fmt: skip


def stacked() -> Parts:
    return {"gate_up_proj": stack(4, 12, 8), "down_proj": stack(4, 8, 6)}


def separate() -> Parts:
    return {f"{expert}.{name}": part for expert in range(4) for name, part in mlp(6).items()}


def mixtral_experts() -> Parts:
    return {f"{expert}.{name}": linear(6, 8) if name != "w2" else linear(8, 6)
            for expert in range(4) for name in ("w1", "w2", "w3")}  # fmt: skip


def dense(attention: Parts) -> Parts:
    return {**under("self_attn", attention), **under("mlp", mlp())}


def moe(attention: Parts, experts: Parts, place: str = "mlp") -> Parts:
    """A layer whose router is an nn.Linear if its experts are modules, and a bare parameter if they are stacked."""
    router: Parts = {"gate.weight": stack(4, 8)} if "gate_up_proj" in experts else {"gate": linear(4, 8)}
    return {**under("self_attn", attention), **under(place, router), **under(f"{place}.experts", experts)}


def transformers_like(*layers: Parts) -> nn.Module:
    numbered = (
        under(f"model.layers.{i}", {**layer, "input_layernorm": nn.RMSNorm(8)}) for i, layer in enumerate(layers)
    )
    return tree(
        {"model.embed_tokens": nn.Embedding(32, 8)}, *numbered, {"model.norm": nn.RMSNorm(8), "lm_head": linear(32, 8)}
    )


def tied(model: nn.Module) -> nn.Module:
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def titan(place: str, names: str) -> Parts:
    return {f"{place}.{name}": linear(8, 8) for name in names.split()}


def torchtitan_like(*layers: Parts, head: str = "lm_head") -> nn.Module:
    numbered = (under(f"layers.{i}", {**layer, "ffn_norm": nn.RMSNorm(8)}) for i, layer in enumerate(layers))
    return tree({"tok_embeddings": nn.Embedding(32, 8)}, *numbered, {"norm": nn.RMSNorm(8), head: linear(32, 8)})


def titan_experts(place: str, *names: str) -> Parts:
    return {f"{place}.{name}": stack(4, 8, 8) for name in names}


SPLIT_QKV = {**titan("attention.qkv_linear", "wq wk wv"), **titan("attention", "wo")}
FFN = titan("feed_forward", "w1 w2 w3")
GROUPED = "moe.routed_experts.inner_experts"
FAMILIES = {
    "llama": (LLAMA, lambda: transformers_like(dense(gqa(bias=True)), dense(gqa()))),
    "llama tied": (LLAMA, lambda: tied(transformers_like(dense(gqa()), dense(gqa())))),
    "qwen stacked": (QWEN, lambda: transformers_like(dense(gqa()), moe(gqa(), stacked()))),
    "qwen modules": (QWEN, lambda: transformers_like(dense(gqa()), moe(gqa(), separate()))),
    "qwen2 moe": (
        QWEN,
        lambda: transformers_like({
            **moe(gqa(), stacked()), **under("mlp.shared_expert", mlp(6)), "mlp.shared_expert_gate": linear(1, 8)
        }),
    ),
    "mixtral stacked": (MIXTRAL, lambda: transformers_like(moe(gqa(), stacked()))),
    "mixtral modules": (MIXTRAL, lambda: transformers_like(moe(gqa(), mixtral_experts(), "block_sparse_moe"))),
    "deepseek stacked": (
        DEEPSEEK,
        lambda: transformers_like(
            dense(mla()), {**moe(mla(), stacked()), **under("mlp.shared_experts", mlp(6))}
        ),
    ),
    "deepseek modules": (
        DEEPSEEK,
        lambda: transformers_like(
            dense({"q_proj": linear(12, 8)}), {**moe(mla(), separate()), **under("mlp.shared_experts", mlp(6))}
        ),
    ),
    "torchtitan llama": (
        TORCHTITAN,
        lambda: torchtitan_like({**titan("attention", "wq wk wv wo"), **FFN}, head="output"),
    ),
    "torchtitan qwen": (
        TORCHTITAN,
        lambda: torchtitan_like(
            {**SPLIT_QKV, **FFN},
            {"moe.router.gate": linear(4, 8), **titan_experts(GROUPED, "w1_EFD", "w2_EDF", "w3_EFD")},
        ),
    ),
    "torchtitan deepseek": (
        TORCHTITAN,
        lambda: torchtitan_like({
            **titan("attention", "wq_a wq_b wkv_a wkv_b wo"), "moe.router.gate": linear(4, 8),
            **titan_experts("moe.experts", "w1", "w2", "w3"), **titan("moe.shared_experts", "w1 w2 w3"),
        }),
    ),
}  # fmt: skip

NAMED = {
    "*embed*.weight": "embedding",
    "lm_head.weight": "head",
    "output.weight": "head",
    "*.gate.weight": "router",
    "*shared_expert_gate.weight": "router",
}
BY_DIMS = {1: "vector", 2: "matrix", 3: "experts"}


def check(model: nn.Module, decisions: Decisions) -> None:
    for decision in decisions:
        [name, *_] = decision.names
        special = [kind for pattern, kind in NAMED.items() if fnmatchcase(name, pattern)]
        assert decision.kind == (special or [BY_DIMS[len(decision.shape)]])[0], name
        fused = name.endswith("gate_up_proj")
        assert decision.fused == (Fused((decision.shape[1] // 2,) * 2) if fused else Fused()), name
    placed_once(model, decisions)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_sorted_by_its_layer_alone(family):
    rules, build = FAMILIES[family]
    model = build()
    check(model, sort_parameters(model, rules))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_family_does_not_have_is_refused_and_nothing_else(family):
    rules, build = FAMILIES[family]
    model = build()
    model.value_head, model.conv = linear(1, 8), nn.Conv1d(4, 4, 2)
    with pytest.raises(ValueError) as refused:
        sort_parameters(model, rules)
    found = [line.partition("; add one")[0] for line in str(refused.value).splitlines()[1:3]]
    assert found == [
        "- value_head.weight [1, 8] in Linear: no rule selects it",
        "- conv.weight [4, 4, 2] in Conv1d: no rule selects it",
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pipeline_stage_without_ends_is_sorted_too(family):
    rules, build = FAMILIES[family]
    layers = next(part for name, part in build().named_modules() if name.endswith("layers"))
    check(layers, sort_parameters(layers, rules))


def test_transposed_experts_under_the_same_names_are_refused():
    transposed = {"gate_up_proj": stack(4, 8, 12), "down_proj": stack(4, 6, 8)}
    with pytest.raises(ValueError) as refused:
        sort_parameters(transformers_like(moe(gqa(), transposed)), QWEN)
    assert re.findall(r"experts\.(\w+) (\[.*?\]) (.*)", str(refused.value)) == [
        ("gate_up_proj", "[4, 8, 12]", "holds gate, up by its name"),
        ("down_proj", "[4, 6, 8]", "in Module: no rule selects it"),
    ]


def test_fused_experts_are_stepped_exactly_as_separate_ones():
    fused, apart = transformers_like(moe(gqa(), stacked())), transformers_like(moe(gqa(), separate()))
    together = fused.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    shares = [
        ((expert, rows), apart.get_parameter(f"model.layers.0.mlp.experts.{expert}.{name}.weight"))
        for expert in range(4)
        for name, rows in (("gate_proj", slice(0, 6)), ("up_proj", slice(6, 12)))
    ]
    stepped_alike(together, shares, sort_parameters(fused, QWEN), sort_parameters(apart, QWEN))


@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("order", ["stacked", "grouped"])
def test_fused_qkv_is_stepped_exactly_as_separate_ones(order, heads):
    (count, groups), size = heads, 3
    rows = torch.arange((count + 2 * groups) * size)
    # The rows of q, k and v in the fused projection, written down without the splits under test.
    if order == "stacked":
        places = rows.split([count * size, groups * size, groups * size])
    else:
        block = rows.view(groups, count // groups + 2, size)
        places = [part.flatten() for part in block.split([count // groups, 1, 1], dim=1)]
    fused = tree({"wqkv": linear(len(rows), 8)})
    apart = tree({name: linear(len(place), 8) for name, place in zip("qkv", places, strict=True)})
    split = {"stacked": stacked_qkv, "grouped": grouped_qkv}[order](count, groups, size)
    stepped_alike(
        fused.wqkv.weight,
        [(place, apart.get_parameter(f"{name}.weight")) for name, place in zip("qkv", places, strict=True)],
        sort_parameters(fused, split={"wqkv": split}),
        sort_parameters(apart),
    )


def stepped_alike(together: nn.Parameter, shares: list[tuple[Any, nn.Parameter]], *sorted_: Decisions) -> None:
    """Whether a fused parameter and its shares, by index, get the same bits from the same gradient."""
    before = together.detach().clone()
    together.grad = torch.randn(together.shape)
    for place, weight in shares:
        weight.data.copy_(together.data[place])
        weight.grad = together.grad[place].clone()
    for decisions in sorted_:
        Muon(decisions.groups(muon={"lr": 0.1}, adamw={"lr": 0.1})).step()
    assert all(torch.equal(weight, together[place]) for place, weight in shares)
    assert not torch.equal(before, together)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "num_attention_heads": 8,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS = {
    "llama": (LLAMA, {}),
    "qwen2": (QWEN, {}),
    "qwen3": (QWEN, {}),
    "qwen2_moe": (QWEN, {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": (QWEN, {**EXPERTS, "num_experts": 4, "mlp_only_layers": [0]}),
    "mixtral": (MIXTRAL, {"num_local_experts": 4}),
    "deepseek_v3": (
        DEEPSEEK,
        {**EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
         "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_own_models_are_sorted(name, tie, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    rules, sizes = CONFIGS[name]
    config = transformers.AutoConfig.for_model(name, **SIZES, **sizes, num_key_value_heads=2, tie_word_embeddings=tie)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    decisions = sort_parameters(model, rules)
    check(model, decisions)
    assert [decision.names for decision in decisions if decision.kind in ("embedding", "head")] == (
        [("model.embed_tokens.weight", "lm_head.weight")]
        if tie
        else [("model.embed_tokens.weight",), ("lm_head.weight",)]
    )
    # What `muonckpt lab plan` reads from the configuration alone.
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    forecast = {p.name: p for p in model_of_config(tmp_path / "config.json", "float32").parameters}
    assert {p.name: p.shape for p in forecast.values()} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    for decision in decisions:
        said = forecast[decision.names[0]]
        assert (said.method is not None) == (decision.kind in ("matrix", "experts", "router"))
        assert said.method is None or said.fused == decision.fused


def of_config(name: str, **sizes: Any) -> nn.Module:
    """A model of transformers on the meta device."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(name, **{**SIZES, "num_key_value_heads": 2, **sizes})
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


LINEAR = {
    "num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "phi3": ({"pad_token_id": 0}, {"*.qkv_proj": (64, 16, 16), "*.gate_up_proj": 2}),
    "gpt_neox": ({}, {"*.query_key_value": Split((8, 8, 8), interleaved=8)}),
    "falcon": ({"new_decoder_architecture": False, "multi_query": True}, {"*.query_key_value": (64, 8, 8)}),
    "mamba2": ({"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16}, {"*.in_proj": (128, 128, 32, 32, 8)}),
    "qwen3_5_text": (
        {**LINEAR, "linear_key_head_dim": 8},
        {"*.in_proj_qkv": (16, 16, 32), "*.q_proj": Split((8, 8), interleaved=8)},
    ),
    "qwen3_next": (
        {**LINEAR, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
        {
            "*.in_proj_qkvz": Split((8, 8, 16, 16), interleaved=2), "*.in_proj_ba": Split(2, interleaved=2),
            "*.q_proj": Split((8, 8), interleaved=8), "*.gate_up_proj": 2,
        },
    ),
    "deepseek_v3": (
        {**EXPERTS, "n_routed_experts": 4, "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8,
         "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
         "num_key_value_heads": 8},
        {"*.kv_a_proj_with_mqa": (16, 8), "*.kv_b_proj": Split((8, 8), interleaved=8), "*.gate_up_proj": 2},
    ),
}  # fmt: skip
"""Sizes of models, and how the projections lie in them that `for_model` must not take for one matrix."""


@pytest.mark.parametrize("name", ASKED)
def test_a_model_without_rules_is_asked_for_exactly_its_fused_projections(name):
    sizes, split = ASKED[name]
    model = of_config(name, tie_word_embeddings=False, **sizes)
    with pytest.raises(UnsortedError) as asked:
        sort_parameters(model)
    arguments = dict(asked.value.arguments)
    assert arguments.pop("head") == "'lm_head'"
    assert {*re.findall(r"'(.*?)': \(", arguments.pop("split", ""))} == split.keys()
    # Routers of their own type are the only other question.
    rules = eval(arguments.pop("rules", "()"), {"Rule": Rule, "MODULE_TYPES": MODULE_TYPES})
    assert not arguments and all(rule.kind == "matrix" and "gate" in str(rule.names) for rule in (rules or [()])[0])
    decisions = sort_parameters(model, rules, head="lm_head", split=split)
    placed_once(model, decisions)
    for decision in decisions:
        fused = [glob for glob in split if fnmatchcase(decision.names[0].removesuffix(".weight"), glob)]
        is_fused = decision.algorithm == "muon" and bool(fused) and decision.kind != "convolution"
        assert (decision.fused.pieces is not None) == is_fused or decision.kind == "convolution", decision
        assert (decision.algorithm == "adamw") == (decision.kind in ("embedding", "head", "vector"))


def test_a_family_without_a_gate_does_not_take_a_query_with_one_for_one_matrix():
    """Qwen3.5 has the names of Qwen3, and twice the rows in its queries."""
    model = of_config("qwen3_5_text", tie_word_embeddings=False, **LINEAR)
    with pytest.raises(UnsortedError) as asked:
        sort_parameters(model, QWEN)
    assert "'*.q_proj': (q, gate)" in asked.value.arguments["split"]
    rules = eval(asked.value.arguments["rules"], {"Rule": Rule, "RULES": QWEN})
    split = ASKED["qwen3_5_text"][1]
    [convolution, *_] = [d for d in sort_parameters(model, rules, split=split) if d.kind == "convolution"]
    assert convolution.fused.pieces == (1,) * convolution.shape[0], "a depthwise one has a matrix for each channel"
    named = [[Rule("matrix", ("*.q_proj.weight", "*.in_proj_qkv.weight"))], MODULE_TYPES]
    assert {decision.kind for decision in sort_parameters(model, named, head="lm_head")} >= {"matrix", "head"}


def test_modules_of_torch_and_adapters_are_asked_about_by_the_names_that_they_have():
    attention = nn.TransformerEncoderLayer(8, 2)
    adapted = tree({"qkv_proj.base_layer": linear(24, 8).requires_grad_(False),
                    "qkv_proj.lora_A.default": linear(2, 8), "qkv_proj.lora_B.default": linear(24, 2)})  # fmt: skip
    convolution = tree({"mid.to_qkv": nn.Conv2d(8, 24, 1, bias=False)})
    plain = tree({"mlp.linear_fc1": linear(12, 8), "mlp.linear_fc2": linear(8, 12)})
    gated = tree({"mlp.linear_fc1": linear(24, 8), "mlp.linear_fc2": linear(8, 12)})
    query = tree({f"a.{name}.base_layer": part.requires_grad_(False)
                  for name, part in (("q_proj", linear(24, 8)), ("o_proj", linear(8, 12)))}
                 | {"a.q_proj.lora_A.x": linear(2, 8), "a.q_proj.lora_B.x": linear(24, 2)})  # fmt: skip
    for model, pattern in (
        (tree({"fused_qkv": linear(24, 8)}), "fused_qkv"), (tree({"b.qkv.linear": linear(24, 8)}), "*.qkv.linear"),
        (tree({"mlp.up_gate_proj.0": linear(24, 8)}), "*.up_gate_proj.0"), (query, "*.q_proj.lora_B.x"),
        (tree({"experts.w13_weight": stack(4, 12, 8)}), "*.w13_weight"),
        (tree({"a.to_q": linear(24, 8), "a.to_out.0": linear(8, 12)}), "*.to_q"),
        (tree({"a.to_q": linear(12, 8), "a.to_out.0": linear(8, 12)}), ""),
        (attention, "*.in_proj_weight"), (adapted, "qkv_proj.lora_B.default"), (convolution, "*.to_qkv"),
        (gated, "*.linear_fc1"), (plain, ""),
    ):  # fmt: skip
        if pattern:
            with pytest.raises(UnsortedError) as asked:
                sort_parameters(model)
            assert re.findall(r"^\{'(.*?)': \(", asked.value.arguments["split"]) == [pattern]
        decisions = sort_parameters(model, split={pattern: 2} if pattern else {})
        assert [len(decision.fused.pieces) for decision in decisions if decision.fused.pieces] == [2] * bool(pattern)


def test_projections_of_one_name_and_several_shapes_are_told_apart():
    model = tree({"text.0.qkv": linear(24, 8), "text.1.qkv": linear(24, 8), "picture.0.qkv": linear(12, 4)})
    with pytest.raises(UnsortedError) as asked:
        sort_parameters(model)
    assert asked.value.arguments == {"split": "{'text.*.qkv': (q, k, v), 'picture.*.qkv': (q, k, v)}"}
