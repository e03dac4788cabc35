"""The weight matrices of six public models, layer by layer, in forward order.

Only what Muon takes: no embeddings, heads, norms, biases or convolutions.  The routed experts of a layer are three 3-D
parameters, gate, up and down, of shape ``[experts, rows, columns]``.  Sizes are those of the published configurations
(``config.json`` of each model); what we assumed beside them is said at the model.  All sizes are in elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

STEPS = 5
"""Newton-Schulz iterations, of ours and of every peer."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """``copies`` equal matrices (experts of one parameter, else 1), from row ``first`` of their ``total`` rows on."""

    rows: int
    columns: int
    copies: int
    first: int
    total: int

    @property
    def numel(self) -> int:
        """Elements of one copy."""
        return self.rows * self.columns

    @property
    def flops(self) -> int:
        """Floating-point operations to orthogonalise one copy: ``k (4 s² l + 2 s³)``, short side s, long side l."""
        short, long = sorted((self.rows, self.columns))
        return STEPS * (4 * short * short * long + 2 * short**3)


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of a layer.  ``pieces`` are the row counts of what is fused in it; empty if nothing is.

    Raises:
        ValueError: the shape has not two or three dims, or the pieces do not add up to the rows.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.shape) not in (2, 3) or (self.pieces and sum(self.pieces) != self.shape[-2]):
            raise ValueError(f"{self.name}: shape {self.shape} with pieces {self.pieces} is no stack of matrices")

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        *stack, total, columns = self.shape
        heights = self.pieces or (total,)
        starts = [sum(heights[:index]) for index in range(len(heights))]
        return tuple(
            Matrix(rows, columns, math.prod(stack), first, total) for rows, first in zip(heights, starts, strict=True)
        )


Layer = tuple[Weight, ...]


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    layers: tuple[Layer, ...]

    @property
    def dense(self) -> Model:
        """All weights but the routed experts."""
        return self._part("dense", lambda weight: len(weight.shape) == 2)

    @property
    def experts(self) -> Model:
        """The routed experts alone."""
        return self._part("experts", lambda weight: len(weight.shape) == 3)

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(weight for layer in self.layers for weight in layer)

    @property
    def numel(self) -> int:
        return sum(math.prod(weight.shape) for weight in self.weights)

    @property
    def matrices(self) -> tuple[tuple[Matrix, ...], ...]:
        """The matrices of each layer."""
        return tuple(tuple(matrix for weight in layer for matrix in weight.matrices) for layer in self.layers)

    @property
    def expert_count(self) -> int:
        """Experts of a layer; 1 if the model has none."""
        return max((weight.shape[0] for weight in self.experts.weights), default=1)

    @property
    def apart(self) -> Model:
        """The same with every expert as three parameters of its own."""
        layers = []
        for layer in self.layers:
            matrices_of_layer = ([weight] if len(weight.shape) == 2 else _apart(weight) for weight in layer)
            layers.append(tuple(chain.from_iterable(matrices_of_layer)))
        return replace(self, name=f"{self.name}, 2-D experts", layers=tuple(layers))

    def _part(self, part_name: str, belongs: Callable[[Weight], bool]) -> Model:
        layers = tuple(tuple(filter(belongs, layer)) for layer in self.layers)
        return replace(self, name=f"{self.name}, {part_name}", layers=layers)


def _apart(weight: Weight) -> list[Weight]:
    count, *shape = weight.shape
    return [Weight(weight.name, (shape[0], shape[1]), weight.pieces)] * count


def _attention(hidden: int, heads: int, kv_heads: int, head: int) -> Layer:
    """Grouped-query attention, q, k, v and o unfused."""
    return (
        Weight("q", (heads * head, hidden)),
        Weight("k", (kv_heads * head, hidden)),
        Weight("v", (kv_heads * head, hidden)),
        Weight("o", (hidden, heads * head)),
    )


def _feed_forward(hidden: int, inner: int, name: str = "mlp") -> Layer:
    return (
        Weight(f"{name}.gate", (inner, hidden)),
        Weight(f"{name}.up", (inner, hidden)),
        Weight(f"{name}.down", (hidden, inner)),
    )


def _mixture(hidden: int, inner: int, experts: int) -> Layer:
    """The router and the routed experts."""
    routed = (replace(weight, shape=(experts, *weight.shape)) for weight in _feed_forward(hidden, inner, "experts"))
    return (Weight("router", (experts, hidden)), *routed)


def llama3_8b() -> Model:
    return Model("Llama3-8B", 32 * ((*_attention(4096, 32, 8, 128), *_feed_forward(4096, 14336)),))


def llama3_70b() -> Model:
    return Model("Llama3-70B", 80 * ((*_attention(8192, 64, 8, 128), *_feed_forward(8192, 28672)),))


def llama3_405b() -> Model:
    return Model("Llama3-405B", 126 * ((*_attention(16384, 128, 8, 128), *_feed_forward(16384, 53248)),))


def qwen3_30b() -> Model:
    return Model("Qwen3-30B-A3B", 48 * ((*_attention(2048, 32, 4, 128), *_mixture(2048, 768, 128)),))


def qwen3_235b() -> Model:
    return Model("Qwen3-235B-A22B", 94 * ((*_attention(4096, 64, 4, 128), *_mixture(4096, 1536, 128)),))


def _latent(name: str, heads: int, dense: int, sparse: int, experts: int) -> Model:
    """Latent attention (ranks 1536 and 512, heads of 128 + 64, values of 128); dense layers, then those with one shared
    and routed experts.  Without the multi-token-prediction layer."""
    hidden = 7168
    attention = (
        Weight("q_a", (1536, hidden)),
        Weight("q_b", (heads * (128 + 64), 1536)),
        Weight("kv_a", (512 + 64, hidden)),
        Weight("kv_b", (heads * (128 + 128), 512)),
        Weight("o", (hidden, heads * 128)),
    )
    first = (*attention, *_feed_forward(hidden, 18432))
    rest = (*attention, *_feed_forward(hidden, 2048, "shared"), *_mixture(hidden, 2048, experts))
    return Model(name, dense * (first,) + sparse * (rest,))


def deepseek_v3() -> Model:
    return _latent("DeepSeek-V3", 128, 3, 58, 256)


def kimi_k2() -> Model:
    return _latent("Kimi-K2", 64, 1, 60, 384)


def moe_397b() -> Model:
    """Sizes as of Qwen3.5-397B-A17B: 60 layers, 512 routed experts of 1024 and a shared one; every fourth layer has
    gated attention (32 heads of 256, the gate in q's rows, 2 KV heads), the others a gated delta net (16 key heads and
    64 value heads of 128) with q, k and v fused.  Without vision tower and multi-token prediction.  Assumed: the gate
    inside ``q`` is orthogonalised with it, and gate and up of the routed experts are stored as two parameters (they
    would be the same matrices in one)."""
    hidden, keys, values = 4096, 16 * 128, 64 * 128
    q, *rest = _attention(hidden, 32, 2, 256)
    full = (replace(q, shape=(2 * 32 * 256, hidden)), *rest)
    linear = (
        Weight("qkv", (2 * keys + values, hidden), (keys, keys, values)),
        Weight("z", (values, hidden)),
        Weight("b", (64, hidden)),
        Weight("a", (64, hidden)),
        Weight("o", (hidden, values)),
    )
    sparse = (*_feed_forward(hidden, 1024, "shared"), *_mixture(hidden, 1024, 512))
    return Model("397B MoE of 60 layers", 15 * (3 * ((*linear, *sparse),) + ((*full, *sparse),)))


LARGE = (llama3_405b, qwen3_235b, deepseek_v3, kimi_k2)
"""Models whose plans on many ranks are the largest."""

MODELS = (llama3_8b, llama3_70b, qwen3_30b, qwen3_235b, deepseek_v3, moe_397b)
