"""The largest logits: those that attention has, of every head, whichever rank has seen them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.workers import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from muonckpt.optimizer import MaxLogits, logits as module, qk_clip

BATCH, HEADS, LENGTH, WIDTH = 4, 4, 10, 8


def random(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plainly(query: Tensor, key: Tensor, bias: Tensor | float = 0.0, scale: float = WIDTH**-0.5) -> Tensor:
    """Every logit at once."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return (torch.einsum("bhqd,bhkd->bhqk", query, key) * scale + bias).amax(dim=(0, 2, 3))


CAUSAL = torch.zeros(LENGTH, LENGTH).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf)


@pytest.mark.parametrize("at_a_time", [1, 1 << 24])
@pytest.mark.parametrize(
    ("options", "bias"),
    [
        ({}, 0.0),
        ({"is_causal": True}, CAUSAL),
        ({"attn_mask": CAUSAL == 0}, CAUSAL),
        ({"attn_mask": random(BATCH, 1, LENGTH, LENGTH, seed=9)}, random(BATCH, 1, LENGTH, LENGTH, seed=9)),
        ({"attn_mask": (CAUSAL == 0)[-1:], "scale": 1.0}, CAUSAL[-1:]),
    ],
    ids=["all", "causal", "a mask", "a bias", "one row"],
)
def test_attention_is_as_ever_and_its_largest_logits_are_known(options, bias, at_a_time, monkeypatch):
    monkeypatch.setattr(module, "MAX_BLOCK_LOGITS", at_a_time)
    query, key = random(BATCH, HEADS, LENGTH, WIDTH), random(BATCH, 2, LENGTH, WIDTH, seed=1)
    seen = MaxLogits()
    found = seen.attention("a")(query, key, key, **options, enable_gqa=True)
    assert torch.equal(found, F.scaled_dot_product_attention(query, key, key, **options, enable_gqa=True))
    torch.testing.assert_close(seen.reduce()["a"], plainly(query, key, bias, options.get("scale", WIDTH**-0.5)))
    with pytest.raises(ValueError, match="no logits were recorded"):
        seen.reduce()


def test_what_a_kernel_returns_is_recorded_and_recomputation_changes_nothing():
    query, key = random(BATCH, HEADS, LENGTH, WIDTH), random(BATCH, HEADS, LENGTH, WIDTH, seed=1)
    seen = MaxLogits()
    of_each_query = torch.einsum("bhqd,bhkd->bhqk", query, key).amax(dim=3)
    for part in (of_each_query[:1], of_each_query, of_each_query[1:]):
        seen.record("a", part)
    assert torch.equal(seen.reduce()["a"], of_each_query.amax(dim=(0, 2)))
    seen.record("a", torch.ones(2))
    with pytest.raises(ValueError, match="layer 'a': expected 2 heads as before, found 3"):
        seen.record("a", torch.ones(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: CPUs do not return these maxima")
def test_flex_attention_returns_them():
    query, key = (random(BATCH, HEADS, 128, 64, seed=seed).cuda() for seed in (0, 1))
    _, aux = torch.compile(flex_attention)(query, key, key, return_aux=AuxRequest(max_scores=True))
    seen = MaxLogits()
    seen.record("flex", aux.max_scores)
    torch.testing.assert_close(seen.reduce()["flex"], plainly(query, key, scale=64**-0.5), rtol=1e-2, atol=1e-2)


def _on_a_mesh(rank: int, world: int, shape: dict[str, int]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp") if "tp" in shape else 0
    batch, heads = BATCH // shape["dp"], HEADS // shape.get("tp", 1)
    seen = MaxLogits()
    for layer in range(3):
        query, key = (random(BATCH, HEADS, LENGTH, WIDTH, seed=2 * layer + side) for side in (0, 1))
        part = slice(dp * batch, (dp + 1) * batch), slice(tp * heads, (tp + 1) * heads)
        seen.attention(f"layers.{layer}")(query[part], key[part], key[part])
    largest = seen.reduce(mesh, heads="tp" if "tp" in shape else None)
    layer = nn.Linear(6, HEADS * WIDTH, bias=False)
    layer.weight.data = random(HEADS * WIDTH, 6, seed=7)
    fully_shard(layer, mesh=mesh["dp"])
    clipped = qk_clip(layer.weight, layer.weight, largest["layers.1"], 5.0)
    assert isinstance(largest["layers.1"], DTensor)
    return {"largest": {name: value.to_local() for name, value in largest.items()}, "gamma": clipped,
            "weight": layer.weight.full_tensor().detach()}  # fmt: skip


@pytest.mark.parametrize("shape", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_all_ranks_have_the_largest_of_all_and_clip_alike(shape):
    answers = run(math.prod(shape.values()), _on_a_mesh, shape)
    alone = MaxLogits()
    for layer in range(3):
        query, key = (random(BATCH, HEADS, LENGTH, WIDTH, seed=2 * layer + side) for side in (0, 1))
        alone.attention(f"layers.{layer}")(query, key, key)
    expected = alone.reduce()
    weight = random(HEADS * WIDTH, 6, seed=7)
    gamma = qk_clip(weight, weight, expected["layers.1"], 5.0)
    for answer in answers:
        assert all(torch.equal(answer["largest"][name], value) for name, value in expected.items())
        assert torch.equal(answer["gamma"], gamma) and torch.equal(answer["weight"], weight)
