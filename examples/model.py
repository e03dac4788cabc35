"""A small byte-level transformer with the parameter shapes that make a large one hard to shard.

Grouped-query attention with one fused qkv projection (unequal query, key and value rows), a fused gate/up
pair, and a mixture-of-experts layer whose expert weights are three-dimensional. The model itself says, in
`weights()`, the kind of each parameter, which its name need not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Kind = Literal["matrix", "experts", "router", "embedding", "head", "vector"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model's sizes. `hidden` (8/3 of `dim`) does not divide over ranks, on purpose."""

    vocabulary: int = 256
    dim: int = 128
    layers: int = 3
    query_heads: int = 8
    kv_heads: int = 2
    hidden: int = 341
    moe_layer: int = 1
    experts: int = 6
    experts_per_token: int = 2
    expert_hidden: int = 256

    @property
    def head_dim(self) -> int:
        return self.dim // self.query_heads


@dataclass(frozen=True, slots=True)
class Weight:
    """What one parameter is.

    `row_blocks` are the sizes, along dimension -2, of the matrices fused in the parameter (for experts: in
    each of them); it is empty when nothing is fused.
    """

    kind: Kind
    parameter: Tensor
    row_blocks: tuple[int, ...] = ()


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.heads = (config.query_heads, config.kv_heads, config.kv_heads)
        self.rows = tuple(heads * config.head_dim for heads in self.heads)
        self.qkv = nn.Linear(config.dim, sum(self.rows), bias=False)
        self.out = nn.Linear(self.rows[0], config.dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """x: [batch, seq, dim]; rotation: [2, seq, head_dim / 2] -> [batch, seq, dim]"""
        q, k, v = (
            part.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)  # [batch, heads, seq, head_dim]
            for part, heads in zip(self.qkv(x).split(self.rows, dim=-1), self.heads, strict=True)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(q, rotation), rotate(k, rotation), v, is_causal=True, enable_gqa=True
        )
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return result

    def weights(self) -> Iterator[Weight]:
        yield Weight("matrix", self.qkv.weight, self.rows)
        yield Weight("matrix", self.out.weight)


class GatedMlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] -> [batch, seq, dim]"""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result: Tensor = self.down(F.silu(gate) * up)
        return result

    def weights(self) -> Iterator[Weight]:
        yield Weight("matrix", self.gate_up.weight, (self.down.in_features,) * 2)
        yield Weight("matrix", self.down.weight)


class Experts(nn.Module):
    """Gated MLPs side by side, one per index of dim 0 of the weights.  Under expert parallelism the weights are
    DTensors, of which a rank works with its own experts.

    Every expert sees every token, with a gate that is zero unless it was chosen: at this size that is simpler than
    dispatching tokens, and no expert's gradient is ever missing.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.expert_hidden, config.dim))
        self.down = nn.Parameter(torch.empty(config.experts, config.dim, config.expert_hidden))

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """x: [batch, seq, dim]; gates: [batch, seq, experts of this rank] -> [batch, seq, dim], their sum by gates

        Row by row, so that the products, hence their bits, do not depend on how many rows come together here.
        """
        weights = tuple(w.to_local() if isinstance(w, DTensor) else w for w in (self.gate_up, self.down))
        return torch.stack([self.row(*row, *weights) for row in zip(x, gates, strict=True)])

    def row(self, x: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """x: [seq, dim]; gates: [seq, experts] -> [seq, dim]

        One product an expert (a plain ``@`` would make one of all of them, with sums across experts in it). Weights
        may be kept in a wider dtype than the products': their gradients are then added up in that.
        """
        copies = x.expand(len(gate_up), *x.shape)
        gate, up = torch.bmm(copies, gate_up.to(x.dtype).mT).chunk(2, dim=-1)  # [experts, seq, expert_hidden] each
        hidden = F.silu(gate) * up * gates.T.unsqueeze(-1)
        return torch.bmm(hidden, down.to(x.dtype).mT).sum(dim=0)

    def weights(self) -> Iterator[Weight]:
        yield Weight("experts", self.gate_up, (self.down.shape[-1],) * 2)
        yield Weight("experts", self.down)


class MixtureOfExperts(nn.Module):
    """A router, and the experts that it chooses for each token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.router = nn.Linear(config.dim, config.experts)
        nn.init.zeros_(self.router.bias)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim] -> [batch, seq, dim]"""
        scores = self.router(x)  # [batch, seq, experts]
        best, index = scores.topk(self.experts_per_token, dim=-1)
        gates = torch.zeros_like(scores).scatter(-1, index, best.softmax(dim=-1))
        result: Tensor = self.experts(x, gates)
        return result

    def weights(self) -> Iterator[Weight]:
        yield Weight("router", self.router.weight)
        yield Weight("vector", self.router.bias)
        yield from self.experts.weights()


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = MixtureOfExperts(config) if layer == config.moe_layer else GatedMlp(config)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """x: [batch, seq, dim]; rotation: [2, seq, head_dim / 2] -> [batch, seq, dim]"""
        x = x + self.attention(self.attention_norm(x), rotation)
        x = x + self.mlp(self.mlp_norm(x))
        return x

    def weights(self) -> Iterator[Weight]:
        yield Weight("vector", self.attention_norm.weight)
        yield from self.attention.weights()
        yield Weight("vector", self.mlp_norm.weight)
        yield from self.mlp.weights()


class Transformer(nn.Module):
    """The language model, initialised whole from `seed`, so that it is the same on any number of ranks."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for weight in self.weights():
            if weight.kind != "vector":
                nn.init.normal_(weight.parameter, std=weight.parameter.shape[-1] ** -0.5, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [batch, seq] int64 -> logits: [batch, seq, vocabulary]"""
        x: Tensor = self.embedding(tokens)
        rotation = rotary(tokens.shape[-1], self.head_dim, tokens.device)
        for block in self.blocks:
            x = block(x, rotation)
        x = self.head(self.norm(x))
        return x

    def weights(self) -> Iterator[Weight]:
        """Every parameter exactly once, in a fixed order; valid before and after sharding."""
        yield Weight("embedding", self.embedding.weight)
        for block in cast(Iterable[Block], self.blocks):
            yield from block.weights()
        yield Weight("vector", self.norm.weight)
        yield Weight("head", self.head.weight)


def rotary(seq: int, head_dim: int, device: torch.device) -> Tensor:
    """Cosine and sine of the rotary embedding's angles: [2, seq, head_dim / 2]."""
    frequencies = 10_000 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.outer(torch.arange(seq, device=device), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """x: [..., seq, head_dim], its halves turned against each other -> [..., seq, head_dim]"""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
