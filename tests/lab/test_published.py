"""Forecasts held against what others have measured or derived, and of state in other dtypes: tables of the guide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import muonckpt
from muonckpt.lab.forecasting.models import ModelTensors, fresh_parameter, model_of_config, with_state_in
from muonckpt.lab.forecasting.prospects import prospect_of
from muonckpt.lab.forecasting.topologies import MuonOptions
from muonckpt.names.state_forms import STATE_DTYPES
from muonckpt.names.wording import size
from muonckpt.optimizer import Muon
from muonckpt.optimizer.newton_schulz.recipe import flops

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "plan.md"

KIMI = {
    "model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 64, "vocab_size": 163840, "moe_intermediate_size": 2048, "n_routed_experts": 384,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
QWEN = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip


SMALL = {
    "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
TINY = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 700, "num_hidden_layers": 1,
    "num_attention_heads": 4, "vocab_size": 300,
}  # fmt: skip


def layers(width: int, count: int) -> ModelTensors:
    """Equal square matrices in bfloat16."""
    matrices = [
        fresh_parameter(f"{n}", (width, width), "bfloat16", matrix=True, used=1.0) for n in range(count)
    ]  # fmt: skip
    return ModelTensors("made", tuple(matrices))


def newton_schulz(model: ModelTensors) -> float:
    """FLOPs of all matrices of a model."""
    total = 0
    for parameter in model.matrices:
        *stack, rows, columns = parameter.shape
        for piece in parameter.fused.pieces or (rows,):
            total += (stack[0] if stack else 1) * flops(piece, columns, 5)
    return total


def of_config(folder: Path, fields: dict[str, object]) -> ModelTensors:
    (folder / "config.json").write_text(json.dumps(fields))
    return model_of_config(folder / "config.json")


def rows(folder: Path) -> Iterator[tuple[str, str, float, float, str]]:
    def of(scheme: str, ranks: int, model: ModelTensors, tokens: float | None = None) -> dict[str, float]:
        training = muonckpt.Training(scheme, tokens=tokens)
        [found] = prospect_of(model, [{"dp": ranks}], {}, MuonOptions(), training=training).topologies
        return {**found.iteration, "most": max(found.newton_schulz["mean"], found.newton_schulz["most"])}

    model = layers(1024, 16)
    parameters = sum(p.numel * 2 for p in model.parameters)
    share = of("fsdp", 4, layers(4096, 4), 2**20)["newton_schulz_share"]
    yield "Essential AI: Newton-Schulz over model FLOPs, `5 d / B`", "d = 4096, B = 1 Mi", share, 5 * 4096 / 2**20, ""
    for scheme, factor in (("layerwise", 2), ("owned", 3)):
        found = of(scheme, 16, model)
        sent = (found["parameters"] + found["gradients"] + found["exchange"]) / parameters
        what = f"DMuon: bytes of an iteration over P, `{factor}(N - 1)/N`"
        yield what, f"N = 16, `{scheme}`", sent, factor * 15 / 16, ""
    alone = of("fsdp", 1, layers(512, 16))["most"]
    for ranks, published in ((2, 44 / 85), (4, 22 / 85)):
        part = of("fsdp", ranks, layers(512, 16))["most"] / alone
        yield "dion #96: Newton-Schulz, share of one GPU's time", f"{ranks} H100", part, published, ""
    seconds = 17.24e12 / muonckpt.rates_of("h100", "nvlink4").flops
    yield "dion #99: seconds of 17.24 TFLOP of Newton-Schulz", "4 H100", seconds, 17.9e-3, ""
    calls = of("fsdp", 32, layers(512, 32))["collectives"] - 3 * 32
    yield "Megatron-LM #6676: collectives of a step", "32 GB300", calls, 4, "dense and expert matrices travel together"
    for name, ranks, fields, batch, muon, adamw, counted in (
        ("Kimi K2", 256, KIMI, 2048, 1029, 1051, 51), ("Qwen3-30B-A3B", 8, QWEN, 512, 686, 713, 35),
    ):  # fmt: skip
        model = of_config(folder, fields)
        work, forward = newton_schulz(model), 6 * model.active * batch * 4096
        where = f"{ranks} GB300, {batch} x 4096 tokens"
        yield f"NVIDIA, {name}: Muon's FLOPs over the model's", where, work / forward, counted / muon, BATCH
        seconds = work / ranks / muonckpt.rates_of("gb300", "nvlink5").flops
        lost = seconds / (seconds + forward / ranks / (adamw * 1e12))
        yield f"NVIDIA, {name}: throughput lost to Muon", where, lost, 1 - muon / adamw, PEAK


BATCH = "the batch is that of Megatron Bridge's recipe; the article gives none"
PEAK = "the same; and Newton-Schulz at its peak rate, which small experts do not reach"


def test_the_table_of_the_page_is_what_is_forecast(tmp_path):
    head = "| published | where | forecast | published figure | ratio | why not 1 |\n|---|---|---|---|---|---|\n"
    lines = []
    for what, where, forecast, published, why in rows(tmp_path):
        ratio = forecast / published
        if not why:
            assert ratio == pytest.approx(1, rel=0.05), what
        lines.append(f"| {what} | {where} | {forecast:.4g} | {published:.4g} | {ratio:.2f} | {why} |\n")
    made = head + "".join(lines)
    found = re.search(re.escape(head) + r"(\|.*\n)*", PAGE.read_text())
    assert found and found[0] == made, f"the page should have:\n{made}"


@pytest.mark.exhaustive  # it lists the matrices of a trillion parameters, five times
def test_the_table_of_state_in_other_dtypes_is_what_is_forecast(tmp_path):
    titles = (
        "model, ranks",
        "state",
        "its bytes",
        "all memory",
        "state read and written a step",
        "sent a step",
    )
    head = f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|\n"
    stage = ["model.layers.[1-9].*", "model.layers.1[0-5].*"]
    lines = []
    for name, fields, mesh, more in (
        ("1.5B, 8", SMALL, {"dp": 8}, {}),
        ("70B, 64", LLAMA, {"dp": 64}, {}),
        ("1T MoE, 64 of 256", KIMI, {"ep": 64}, {"select": stage, "shard": {"*experts*": [("ep", 0)]}}),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        for dtype in STATE_DTYPES:
            options = {"state_dtype": dtype, **more}
            found = muonckpt.forecast([mesh], model=tmp_path / "config.json", **options).topologies[0]
            state, total, sent = found.memory["state"], found.memory["total"], found.sent["most"]
            lines.append(f"| {name} | {dtype} | {size(state)} | {size(total)} | {size(2 * state)} | {size(sent)} |\n")
    made = head + "".join(lines)
    found = re.search(re.escape(head) + r"(\|.*\n)*", (PAGE.parent / "costs.md").read_text())
    assert found and found[0] == made, f"the page should have:\n{made}"


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_state_in_another_dtype_is_forecast_as_the_optimizer_keeps_it(dtype, tmp_path):
    model = of_config(tmp_path, TINY)
    groups = []
    for parameter in model.parameters:
        own = {} if parameter.method else {"algorithm": "adamw", "lr": 1e-3}
        kept = "float32" if dtype == "8bit" and len(parameter.shape) < 2 else dtype
        option = "momentum_dtype" if parameter.method else "state_dtype"
        groups.append({"params": [torch.nn.Parameter(torch.zeros(parameter.shape))], option: kept, **own})
    [found] = prospect_of(with_state_in(model, dtype), [{"dp": 1}], {}, MuonOptions()).topologies
    assert found.memory["state"] == Muon(groups).report(most_elementwise=1).state_bytes
    with pytest.raises(muonckpt.TargetError, match="unknown state_dtype 'int4'; expected one of float32, bfloat16, 8"):
        with_state_in(model, "int4")


def test_traffic_is_that_of_rings_along_the_axes_that_share_a_parameter(tmp_path):
    model = layers(64, 6)
    size = 64 * 64 * 2 * 6

    def of(mesh: dict[str, int], training: muonckpt.Training, **rules: Any) -> dict[str, float]:
        [found] = prospect_of(model, [mesh], rules, MuonOptions(), training=training).topologies
        return {**found.iteration, "weights": found.memory["weights"]}

    rows = of({"dp": 4}, muonckpt.Training())
    assert (rows["parameters"], rows["gradients"]) == (2 * 3 / 4 * size, 3 / 4 * size)
    assert (
        rows["collectives"] == 6 * 3 + 2
    )  # each layer is gathered twice and reduced once; and the exchange of a stage
    hybrid = of({"copy": 2, "dp": 2}, muonckpt.Training(), **{"*": [("dp", 0)]})
    assert hybrid["gradients"] == size / 2 + 2 * (size / 2) / 2
    kept = of({"dp": 2, "tp": 2}, muonckpt.Training(keep=frozenset({"tp"})), **{"*": [("tp", 1), ("dp", 0)]})
    assert kept["parameters"] == 2 * (size / 2) / 2
    whole = of({"dp": 4}, muonckpt.Training("zero2"))
    assert (
        whole["parameters"] == 3 / 4 * size and whole["weights"] == size and whole["exchange"] == rows["exchange"] > 0
    )
    assert of({"dp": 4}, muonckpt.Training("layerwise"))["exchange"] == 0
    with pytest.raises(muonckpt.TargetError, match="unknown scheme 'ddp'"):
        muonckpt.forecast([{"dp": 2}], model=tmp_path, training=muonckpt.Training("ddp"))
    with pytest.raises(muonckpt.TargetError, match="unknown GPU 'v100'"):
        muonckpt.rates_of("v100", "nvlink4")
