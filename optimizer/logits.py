"""Attention logits: the largest of every head, and QK-clip, which shrinks query and key weights where these are too
large (Kimi K2, arXiv 2507.20534).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..layouts.tensors import local_of, rows_of
from ..names.errors import ArgumentError, called_like, constructed_like
from .ground.tensors import rounded_once
from .planning.matrices import Split
from .rules import WHOLE
from .step.exchange import gather_tensor, max_over_ranks
from .step.rank_sets import group_of, groups_of_mesh, ranks_of

MAX_BLOCK_LOGITS = 1 << 24
"""The most logits that `largest_logits` has in memory at once."""


class MaxLogits:
    """The largest logit of each head of each layer since the last `reduce`.

    Layers are named by the user.  Recording the same logits twice, as recomputation in backward does, changes nothing.
    """

    def __init__(self) -> None:
        self._largest: dict[str, Tensor] = {}

    @called_like("logits.record(layer, scores)")
    @torch.no_grad()
    def record(self, layer: str, scores: Tensor) -> None:
        """Record logits, or their maxima, as attention kernels return them.

        Args:
            scores: ``[heads]``, or ``[batch, heads, ...]``, such as ``max_scores`` of FlexAttention's `AuxOutput`.
        """
        heads = scores.detach().float()
        if heads.ndim > 1:
            heads = heads.amax(dim=[dim for dim in range(heads.ndim) if dim != 1])
        recorded = self._largest.get(layer)
        if recorded is not None and recorded.shape != heads.shape:
            raise ArgumentError(f"layer {layer!r}: expected {len(recorded)} heads as before, found {len(heads)}")
        self._largest[layer] = heads.clone() if recorded is None else torch.maximum(recorded, heads)

    def attention(self, layer: str) -> Callable[..., Tensor]:
        """Return ``F.scaled_dot_product_attention`` that records the logits of a layer."""
        return partial(self._attend, layer)

    def _attend(
        self,
        layer: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.record(layer, largest_logits(query, key, attn_mask, is_causal, scale=scale))
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    @called_like("maxima = logits.reduce(mesh)")
    def reduce(self, mesh: DeviceMesh | None = None, heads: str | None = None) -> Mapping[str, Tensor]:
        """Return the largest logits of all ranks, ``[heads]`` of each layer, and restart.

        One collective for all layers, along each axis of the mesh.  `qk_clip` takes the result, and reduces
        it no more.

        Args:
            mesh: all ranks that share the model, who call this together with the same layers; None for one process.
            heads: the axis of the mesh along which ranks have heads of their own, as in tensor parallelism.

        Raises:
            ArgumentError: nothing was recorded, or the mesh has no such axis.
        """
        largest, names = self._largest, sorted(self._largest)
        if not names:
            raise ArgumentError(
                "no logits were recorded since the last reduce: does attention call record or attention?"
            )
        if mesh is None:
            self._largest = {}
            return largest
        if heads is not None and heads not in (mesh.mesh_dim_names or ()):
            raise ArgumentError(f"heads={heads!r}: expected an axis of the mesh, one of {mesh.mesh_dim_names}")
        # Pack all layers into one tensor [layers, 1, heads], which is sharded along the axis of heads.
        counts = [len(largest[name]) for name in names]
        packed = torch.full((len(names), 1, max(counts)), -torch.inf, device=largest[names[0]].device)
        for row, name in enumerate(names):
            packed[row, 0, : counts[row]] = largest[name]
        placements: list[Placement] = [Partial("max")] * mesh.ndim
        if heads is not None:
            placements[(mesh.mesh_dim_names or ()).index(heads)] = Shard(1)
        reduced = gather_tensor(DTensor.from_local(packed, mesh, placements, run_check=False))
        # Unpack: all ranks have all heads of all layers.
        self._largest, layers = {}, dict[str, Tensor]()
        for row, (name, count) in enumerate(zip(names, counts, strict=True)):
            local = reduced[row, :, :count].reshape(-1)
            layers[name] = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return layers


@torch.no_grad()
def largest_logits(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Tensor:
    """Return the largest logit of each query head, ``[heads]``, as ``F.scaled_dot_product_attention`` has them.

    Products are computed a second time, in blocks of queries, since fused kernels do not return them.

    Args:
        query, key: ``[batch, heads, length, width]``; fewer key heads are shared by as many query heads each.
        attn_mask, is_causal, scale: as there.
    """
    heads, key = query.shape[-3], key.detach()
    key = key.repeat_interleave(heads // key.shape[-3], dim=-3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    length, keys = query.shape[-2], key.shape[-2]
    rows = max(MAX_BLOCK_LOGITS // max(query.shape[:-2].numel() * keys, 1), 1)
    blocks = []
    for start in range(0, length, rows):
        logits = (query.detach()[..., start : start + rows, :] @ key.transpose(-2, -1)) * factor
        if is_causal:
            visible = torch.arange(keys, device=query.device) <= torch.arange(length, device=query.device)[:, None]
            logits = logits.masked_fill(~visible[start : start + rows], -torch.inf)
        if attn_mask is not None:
            mask = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., start : start + rows, :]
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
        blocks.append(logits.amax(dim=(-2, -1)))
    # Over all blocks, then over the batch.
    return torch.stack(blocks).amax(dim=0).reshape(-1, heads).amax(dim=0).float()


@constructed_like("Projection(qkv_proj.weight, stacked_qkv(heads, kv_heads, head_dim), piece=1)")
@dataclass(frozen=True, slots=True)
class Projection:
    """The rows of one piece of a parameter that make queries or keys, head after head.

    Args:
        weight: ``[rows, columns]``, as of an nn.Linear, or a bias ``[rows]``; plain, or a DTensor on any mesh.
        split: the pieces that are fused in it, as `groups.stacked_qkv` and `groups.grouped_qkv` make them; by default
            all rows are one piece.
        piece: the number of the piece.

    Raises:
        ArgumentError: an argument is of another kind, or ``split`` has no such piece.
        LayoutError: the pieces do not add up to the rows.
    """

    weight: Tensor
    split: Split = WHOLE
    piece: int = 0

    def __post_init__(self) -> None:
        self._range()

    def rows(self) -> int:
        """Return the number of rows of the piece."""
        start, stop = self._range()
        return (stop - start) * self.split.interleaved

    def local_factors(self, head_factors: Tensor) -> Tensor:
        """Return the heads' factors for every row that this rank holds; 1 outside the piece, and in place of NaN."""
        rows, heads = self.rows(), len(head_factors)
        if rows % heads:
            raise ArgumentError(f"{rows} rows are not a whole number for each of {heads} heads")
        start, stop = self._range()
        # Factors of all rows; this rank takes its own.
        head_factors = head_factors.where(~head_factors.isnan(), 1.0)
        row_factors = head_factors.new_ones(self.weight.shape[0]).view(self.split.interleaved, -1)
        row_factors[:, start:stop] = head_factors.repeat_interleave(rows // heads).view(self.split.interleaved, -1)
        row_factors = row_factors.view(-1).to(local_of(self.weight).device)
        local = torch.cat([row_factors[start:stop] for start, stop in rows_of(self.weight)] or [row_factors[:0]])
        return local.view(-1, *(1,) * (self.weight.ndim - 1))

    def _range(self) -> tuple[int, int]:
        """Return the piece's rows in each of the interleaved blocks."""
        height = self.weight.shape[0]
        pieces = list(self.split.of((height, 1)).rows_of(height))
        if not 0 <= self.piece < len(pieces):
            raise ArgumentError(f"piece={self.piece}: expected one of the {len(pieces)} pieces of {self.split}, from 0")
        return pieces[self.piece][0]


@called_like("qk_clip(q_proj.weight, k_proj.weight, max_logit, threshold=100.0)")
@torch.no_grad()
def qk_clip(
    query: Projection | Tensor,
    key: Projection | Tensor,
    max_logit: Tensor,
    threshold: float,
    *,
    alpha: float = 0.5,
    rotary_query: Projection | None = None,
) -> Tensor:
    """Scale query and key weights in place, so that no head's largest attention logit exceeds ``threshold``.

    For each head ``gamma = min(1, threshold / max_logit)``; its query rows are multiplied by ``gamma ** alpha`` and its
    key rows by ``gamma ** (1 - alpha)``.  Call it after an optimizer step, for every attention layer, and again with
    the biases if there are any.  Query heads that share a key head (grouped-query attention) take the smallest
    ``gamma`` among them, as in Megatron.

    In multi-head latent attention ``query`` and ``key`` are the parts without rotary embedding.  All heads share the
    rotary key, which stays unchanged, so the rotary queries take all of ``gamma``.

    Collective over the weights' mesh, if they are on one; every rank scales the rows that it holds.

    Args:
        query, key: a tensor consists of heads only, each key as long as a query.
        max_logit: ``[query heads]``, the largest logit of each head, as the softmax takes it.  A plain tensor may be of
            this rank's part of the batch: it is reduced over the weights' mesh.  For plain weights, as under DDP,
            reduce it first.  Where ranks have heads of their own, give a DTensor with the placement ``Shard(0)``, and
            ``Partial("max")`` over data-parallel ranks.
        rotary_query: the rotary part of the queries, if it is a piece of its own.

    Returns:
        ``gamma`` of each query head, float64.  NaN where a logit was not finite: the weights of such heads, and of
        those that share their key, are unchanged.

    Raises:
        ArgumentError: rows that are not a whole number of heads, or a threshold or ``alpha`` out of range.
        LayoutError: pieces that do not add up to the rows, or a weight whose placements do not say where its rows are.
    """
    if not threshold > 0:
        raise ArgumentError(f"threshold={threshold!r}: expected a positive number")
    if not 0 <= alpha <= 1:
        raise ArgumentError(f"alpha={alpha!r}: expected a number in [0, 1]")
    queries = Projection(query) if isinstance(query, Tensor) else query
    keys = Projection(key) if isinstance(key, Tensor) else key
    # The largest logits of all ranks.
    largest = gather_tensor(max_logit).double()
    if isinstance(queries.weight, DTensor) and not isinstance(max_logit, DTensor):
        group = group_of(ranks_of(queries.weight, None), *groups_of_mesh(queries.weight.device_mesh))
        largest = max_over_ranks(largest.to(local_of(queries.weight).device), group).to(largest.device)
    # Query heads that share a key head take the smallest factor among them.
    heads, key_heads = _count_heads(queries, keys, largest)
    gamma = torch.where(largest > threshold, threshold / largest, 1.0).where(largest.isfinite(), torch.nan)
    key_gamma = gamma.view(key_heads, -1).amin(dim=1)
    gamma = key_gamma.repeat_interleave(heads // key_heads)
    factors = [(queries, gamma**alpha), (keys, key_gamma ** (1 - alpha))]
    if rotary_query is not None:
        factors.append((rotary_query, gamma))
    # All local factors before any row changes, as they may be refused.
    local_factors = [projection.local_factors(head_factors) for projection, head_factors in factors]
    for (projection, _), row_factors in zip(factors, local_factors, strict=True):
        with rounded_once([local_of(projection.weight)]) as [[weight]]:
            weight.mul_(row_factors.to(weight.dtype))
    return gamma


def _count_heads(queries: Projection, keys: Projection, max_logit: Tensor) -> tuple[int, int]:
    """Return the numbers of query heads and of key heads."""
    if max_logit.ndim != 1 or not len(max_logit):
        raise ArgumentError(f"max_logit of shape {tuple(max_logit.shape)}: expected one number for each query head")
    heads, rows, key_rows = len(max_logit), queries.rows(), keys.rows()
    length = rows // heads
    if rows % heads:
        raise ArgumentError(f"{rows} rows of queries are not a whole number for each of the {heads} heads of max_logit")
    if key_rows % length or heads % (key_rows // length):
        raise ArgumentError(
            f"{heads} query heads of {length} rows, but {key_rows} rows of keys: expected as many heads, or a divisor"
        )
    return heads, key_rows // length
