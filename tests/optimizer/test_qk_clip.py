"""QK-clip: heads by hand in one process, and the same bits of every row wherever it lies."""

from __future__ import annotations

import math

import pytest
import torch
from support import sweep
from support.every_kind import local_of
from support.topologies import HARD, TOPOLOGIES, Home, part_of, placer, world_of
from support.workers import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from muonckpt import LayoutError
from muonckpt.optimizer import Projection, qk_clip
from muonckpt.optimizer.groups import Split, grouped_qkv, stacked_qkv

THRESHOLD = 100.0
WIDTH = 10
# 8 query heads of 3 rows over 2 key heads; the largest logits of each.
LOGITS = torch.tensor([50.0, 100.0, 101.0, 250.0, 3.0, 400.0, 99.0, -7.0])
HEADS, KEY_HEADS, LENGTH = 8, 2, 3
GROUPED = [100 / 250] * 4 + [100 / 400] * 4
"""Gamma of each query head, where four share a key."""
ALONE = [1.0, 1.0, 100 / 101, 100 / 250, 1.0, 100 / 400, 1.0, 1.0]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def times(weight: torch.Tensor, factors: dict[tuple[int, int], float]) -> torch.Tensor:
    """Rows from one to the other, times a factor each, in float32."""
    weight = weight.clone()
    for (start, stop), factor in factors.items():
        weight[start:stop] = (weight[start:stop].float() * torch.tensor(factor, dtype=torch.float64).float()).to(
            weight.dtype
        )
    return weight


def heads_from(first: int, factors: list[float], length: int = LENGTH, step: int | None = None) -> dict:
    step = step or length
    return {(first + head * step, first + head * step + length): factor for head, factor in enumerate(factors)}


# By name: weights, what is done with them, and what must become of them.


def separate() -> tuple[list, list]:
    query, key = random(24, WIDTH), random(24, WIDTH, seed=1)
    roots = [math.sqrt(gamma) for gamma in ALONE]
    return [query, key], [times(query, heads_from(0, roots)), times(key, heads_from(0, roots))]


def grouped() -> tuple[list, list]:
    query, key = random(24, WIDTH), random(6, WIDTH, seed=1)
    mine = [math.sqrt(gamma) for gamma in GROUPED]
    return [query, key], [times(query, heads_from(0, mine)), times(key, heads_from(0, [mine[0], mine[4]]))]


def uneven_alpha() -> tuple[list, list]:
    query, key = random(24, WIDTH, dtype=torch.bfloat16), random(24, WIDTH, seed=1, dtype=torch.bfloat16)
    most, rest = [gamma**0.75 for gamma in ALONE], [gamma**0.25 for gamma in ALONE]
    return [query, key], [times(query, heads_from(0, most)), times(key, heads_from(0, rest))]


def stacked() -> tuple[list, list]:
    qkv = random(24 + 6 + 6, WIDTH)
    mine = [math.sqrt(gamma) for gamma in GROUPED]
    return [qkv], [times(qkv, heads_from(0, mine) | heads_from(24, [mine[0], mine[4]]))]


def interleaved() -> tuple[list, list]:
    """Of each key head: 12 rows of its queries, 3 of its own, 3 of values."""
    qkv = random(2 * 18, WIDTH)
    mine = [math.sqrt(gamma) for gamma in GROUPED]
    first = heads_from(0, mine[:4]) | {(12, 15): mine[0]}
    return [qkv], [times(qkv, first | heads_from(18, mine[4:]) | {(30, 33): mine[4]})]


def latent() -> tuple[list, list]:
    """Of each head: 3 rows without and 2 with rotary embedding; 3 of keys and 4 of values."""
    query, key_value = random(8 * 5, WIDTH), random(8 * 7, WIDTH, seed=1)
    roots = [math.sqrt(gamma) for gamma in ALONE]
    queries = times(times(query, heads_from(0, roots, step=5)), heads_from(3, ALONE, length=2, step=5))
    return [query, key_value], [queries, times(key_value, heads_from(0, roots, step=7))]


def biases() -> tuple[list, list]:
    query, key = random(24), random(24, seed=1)
    roots = [math.sqrt(gamma) for gamma in ALONE]
    return [query, key], [times(query, heads_from(0, roots)), times(key, heads_from(0, roots))]


def clip(kind: str, weights: list[torch.Tensor], logits: torch.Tensor = LOGITS) -> torch.Tensor:
    match kind, weights:
        case (("separate" | "grouped" | "biases"), (query, key)):
            return qk_clip(query, key, logits, THRESHOLD)
        case "uneven_alpha", (query, key):
            return qk_clip(query, key, logits, THRESHOLD, alpha=0.75)
        case "stacked", (qkv,):
            split = stacked_qkv(HEADS, KEY_HEADS, LENGTH)
            return qk_clip(Projection(qkv, split, 0), Projection(qkv, split, 1), logits, THRESHOLD)
        case "interleaved", (qkv,):
            split = grouped_qkv(HEADS, KEY_HEADS, LENGTH)
            return qk_clip(Projection(qkv, split, 0), Projection(qkv, split, 1), logits, THRESHOLD)
        case "latent", (query, key_value):
            parts, keys = Split((3, 2), interleaved=HEADS), Split((3, 4), interleaved=HEADS)
            rotary = Projection(query, parts, 1)
            return qk_clip(Projection(query, parts), Projection(key_value, keys), logits, 100.0, rotary_query=rotary)
    raise AssertionError(kind)


KINDS = {
    "separate": separate,
    "grouped": grouped,
    "uneven_alpha": uneven_alpha,
    "stacked": stacked,
    "interleaved": interleaved,
    "latent": latent,
    "biases": biases,
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_head_is_scaled_as_by_hand(kind):
    weights, expected = KINDS[kind]()
    params = [nn.Parameter(weight.clone()) for weight in weights]
    gamma = clip(kind, params)
    shares_keys = kind in ("grouped", "stacked", "interleaved")
    assert gamma.tolist() == pytest.approx(GROUPED if shares_keys else ALONE, rel=1e-15)
    for before, param, after in zip(weights, params, expected, strict=True):
        assert torch.equal(param, after) and not torch.equal(param, before)


def clip_all(rank: int, world: int, homes: tuple[Home | None, ...]) -> list[str]:
    """The kinds of which this rank has other bits than its part of what a single process has."""
    place = placer(homes)
    wrong = []
    for kind, make in KINDS.items():
        weights, expected = make()
        params = [nn.Parameter(place(index, weight.clone())) for index, weight in enumerate(weights)]
        clip(kind, params)
        parts = [part_of(after, param) for param, after in zip(params, expected, strict=True)]
        if not all(map(torch.equal, map(local_of, params), parts)):
            wrong.append(kind)
    return wrong


HOMES = [name for name in TOPOLOGIES if "experts" not in name and "columns, 6" not in name]


@pytest.mark.parametrize("name", sweep(HOMES, *(name for name in HARD if name in HOMES)))
def test_a_sharded_weight_gets_the_bits_of_a_whole_one(name):
    homes = TOPOLOGIES[name]
    assert run(world_of(homes), clip_all, homes) == [[]] * world_of(homes)


def logits_of(query: torch.Tensor, key: torch.Tensor, rotary: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """The largest logit of each head, of ``[heads, length, width]`` weights and of a rotary key that heads share."""
    tokens = 20 * random(16, WIDTH, seed=7, dtype=torch.float64)
    scores = torch.einsum("th,nlh,nlk,sk->nts", tokens, query, key.repeat_interleave(len(query) // len(key), 0), tokens)
    return (scores + torch.einsum("th,nlh,lk,sk->nts", tokens, rotary, shared, tokens)).amax(dim=(1, 2))


@pytest.mark.parametrize("key_heads", [8, 2])
def test_no_logit_exceeds_the_threshold_afterwards(key_heads):
    query, key, rotary = (random(heads * 3, WIDTH, seed=heads, dtype=torch.float64) for heads in (8, key_heads, 4 + 4))
    shared = random(3, WIDTH, seed=5, dtype=torch.float64) if key_heads == 8 else torch.zeros(3, WIDTH).double()

    def logits() -> torch.Tensor:
        return logits_of(query.view(8, 3, -1), key.view(key_heads, 3, -1), rotary.view(8, 3, -1), shared)

    before = logits()
    threshold = float(before.median())
    gamma = qk_clip(query, key, before, threshold, rotary_query=Projection(rotary))
    torch.testing.assert_close(logits(), gamma * before)
    assert (logits() <= threshold * (1 + 1e-12)).all() and (before > threshold).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_head_with_a_logit_that_is_not_finite_is_left_alone(bad):
    weights, expected = separate()
    params = [nn.Parameter(weight.clone()) for weight in weights]
    logits = LOGITS.clone()
    logits[3] = bad
    gamma = clip("separate", params, logits)
    assert gamma.isnan().tolist() == [head == 3 for head in range(HEADS)]
    for before, param, after in zip(weights, params, expected, strict=True):
        assert torch.equal(param[9:12], before[9:12])
        assert torch.equal(param[:9], after[:9]) and torch.equal(param[12:], after[12:])


def clip_with_local_logits(rank: int, world: int) -> bool:
    """Ranks have seen other tokens along one mesh axis, and have other heads along the other."""
    mesh = init_device_mesh("cpu", (2, 2))
    mine = LOGITS.chunk(2)[rank % 2].clone()
    mine[rank // 2 :: 2] = -1e9
    weights, expected = separate()
    gamma = qk_clip(*weights, DTensor.from_local(mine, mesh, [Partial("max"), Shard(0)]), THRESHOLD)
    return all(map(torch.equal, weights, expected)) and gamma.tolist() == ALONE


def test_logits_may_be_spread_over_a_mesh():
    assert run(4, clip_with_local_logits) == [True] * 4


def clip_with_logits_of_own_tokens(rank: int, world: int) -> tuple[bool, list[float]]:
    """Each rank gives what its own tokens have shown, as a plain tensor; one of them NaN for the last head."""
    mesh = init_device_mesh("cpu", (2, 2))
    mine = torch.where(torch.arange(HEADS) % world == rank, LOGITS, -1e9)
    mine[-1] = math.nan if rank == 2 else 1.0
    weights, expected = separate()
    placed = [distribute_tensor(weight, mesh, [Replicate(), Shard(0)], src_data_rank=None) for weight in weights]
    gamma = qk_clip(*placed, mine, THRESHOLD)
    rows = slice(0, (HEADS - 1) * LENGTH)
    whole = [weight.full_tensor() for weight in placed]
    return all(torch.equal(w[rows], e[rows]) for w, e in zip(whole, expected, strict=True)), gamma.nan_to_num(
        -1
    ).tolist()


def test_ranks_that_have_seen_other_tokens_scale_by_the_same():
    assert run(4, clip_with_logits_of_own_tokens) == [(True, [*ALONE[:-1], -1.0])] * 4


def test_what_are_no_heads_is_refused():
    query, key = random(24, WIDTH), random(24, WIDTH)
    split = stacked_qkv(HEADS, KEY_HEADS, LENGTH)
    for message, arguments in {
        "24 rows of queries are not a whole number for each of the 7 heads": (query, key, LOGITS[:7], 100.0),
        "8 query heads of 3 rows, but 7 rows of keys": (query, key[:7], LOGITS, 100.0),
        "8 query heads of 3 rows, but 9 rows of keys": (query, key[:9], LOGITS, 100.0),
        r"max_logit of shape \(8, 1\)": (query, key, LOGITS[:, None], 100.0),
        "threshold=0": (query, key, LOGITS, 0),
        "threshold=nan": (query, key, LOGITS, math.nan),
    }.items():
        with pytest.raises(ValueError, match=message):
            qk_clip(*arguments)
    with pytest.raises(LayoutError, match="add up to the 24 rows"):
        Projection(query, split)
    with pytest.raises(ValueError, match="piece=3: expected one of the 3 pieces of"):
        Projection(random(36, 1), split, 3)
    with pytest.raises(ValueError, match=r"alpha=1.5: expected a number in \[0, 1\]"):
        qk_clip(query, key, LOGITS, 100.0, alpha=1.5)
    with pytest.raises(ValueError, match="21 rows are not a whole number for each of 8 heads"):
        qk_clip(query, key, LOGITS, 100.0, rotary_query=Projection(random(21, WIDTH)))
    assert torch.equal(query, random(24, WIDTH)) and torch.equal(key, random(24, WIDTH))
