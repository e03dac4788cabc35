"""QK-clip: query and key weights shrink where attention logits have grown too large (Kimi K2, arXiv 2507.20534)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..layouts.tensors import local_of, rows_of
from ..names.errors import LayoutError
from .ground.tensors import rounded_once
from .groups import WHOLE, Split
from .step.exchange import gather_tensor, max_over_ranks
from .step.rank_sets import group_of, groups_of_mesh, ranks_of


@dataclass(frozen=True, slots=True)
class Projection:
    """The rows of one piece of a parameter that make queries or keys, head after head.

    Attributes:
        weight: ``[rows, columns]``, as of an nn.Linear, or a bias ``[rows]``; plain, or a DTensor on any mesh.
        split: the pieces that are fused in it, as `groups.stacked_qkv` and `groups.grouped_qkv` make them; by default
            all rows are one piece.
        piece: the number of the piece.
    """

    weight: Tensor
    split: Split = WHOLE
    piece: int = 0

    def rows(self) -> int:
        """Return the number of rows of the piece.

        Raises:
            LayoutError: the pieces do not add up to the parameter's rows, or there is no such piece.
        """
        start, stop = self._range()
        return (stop - start) * self.split.interleaved

    def local_factors(self, of_head: Tensor) -> Tensor:
        """Return the heads' factors for every row that this rank holds; 1 outside the piece, and in place of NaN.

        Raises:
            ValueError: the rows are not a whole number for each head.
        """
        rows, heads = self.rows(), len(of_head)
        if rows % heads:
            raise ValueError(f"{rows} rows are not a whole number for each of {heads} heads")
        start, stop = self._range()
        of_head = of_head.where(~of_head.isnan(), 1.0)
        of_row = of_head.new_ones(self.weight.shape[0]).view(self.split.interleaved, -1)
        of_row[:, start:stop] = of_head.repeat_interleave(rows // heads).view(self.split.interleaved, -1)
        of_row = of_row.view(-1).to(local_of(self.weight).device)
        mine = torch.cat([of_row[start:stop] for start, stop in rows_of(self.weight)] or [of_row[:0]])
        return mine.view(-1, *(1,) * (self.weight.ndim - 1))

    def _range(self) -> tuple[int, int]:
        """Return the piece's rows in each of the interleaved blocks."""
        height = self.weight.shape[0]
        pieces = list(self.split.of((height, 1)).rows_of(height))
        if not 0 <= self.piece < len(pieces):
            raise LayoutError(f"piece {self.piece} of {self.split}, which has {len(pieces)}")
        return pieces[self.piece][0]


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
    rotary key, which stays as it is, so the rotary queries take all of ``gamma``.

    Collective over the weights' mesh, if they are on one; every rank scales the rows that it holds.

    Args:
        query, key: a tensor consists of heads only, each key as long as a query.
        max_logit: ``[query heads]``, the largest logit of each head, as the softmax takes it.  A plain tensor may be of
            this rank's part of the batch: it is reduced over the weights' mesh.  For plain weights, as under DDP,
            reduce it first.  Where ranks have heads of their own, give a DTensor with the placement ``Shard(0)``, and
            ``Partial("max")`` over data-parallel ranks.
        rotary_query: the rotary part of the queries, if it is a piece of its own.

    Returns:
        ``gamma`` of each query head, float64.  NaN where a logit was not finite: the weights of these heads, and of
        those that share their key, are unchanged.

    Raises:
        ValueError: rows that are not a whole number of heads, or a threshold or ``alpha`` out of range.
        LayoutError: pieces that do not add up to the rows, or a weight whose placements do not say where its rows are.
    """
    if not threshold > 0:
        raise ValueError(f"threshold={threshold!r}: expected a positive number")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha!r}: expected a number in [0, 1]")
    queries, keys = (side if isinstance(side, Projection) else Projection(side) for side in (query, key))
    largest = gather_tensor(max_logit).double()
    if isinstance(queries.weight, DTensor) and not isinstance(max_logit, DTensor):
        group = group_of(ranks_of(queries.weight, None), *groups_of_mesh(queries.weight.device_mesh))
        largest = max_over_ranks(largest.to(local_of(queries.weight).device), group).to(largest.device)
    heads, key_heads = _heads(queries, keys, largest)
    gamma = torch.where(largest > threshold, threshold / largest, 1.0).where(largest.isfinite(), torch.nan)
    shared = gamma.view(key_heads, -1).amin(dim=1)
    gamma = shared.repeat_interleave(heads // key_heads)
    scaled = [(queries, gamma**alpha), (keys, shared ** (1 - alpha))]
    if rotary_query is not None:
        scaled.append((rotary_query, gamma))
    # All of them before any row changes, as they may be refused.
    factors = [projection.local_factors(of_head) for projection, of_head in scaled]
    for (projection, _), of_row in zip(scaled, factors, strict=True):
        with rounded_once([local_of(projection.weight)]) as [[weight]]:
            weight.mul_(of_row.to(weight.dtype))
    return gamma


def _heads(queries: Projection, keys: Projection, max_logit: Tensor) -> tuple[int, int]:
    """Return the numbers of query heads and of key heads."""
    if max_logit.ndim != 1 or not len(max_logit):
        raise ValueError(f"max_logit of shape {tuple(max_logit.shape)}: expected one number for each query head")
    heads, rows, key_rows = len(max_logit), queries.rows(), keys.rows()
    length = rows // heads
    if rows % heads:
        raise ValueError(f"{rows} rows of queries are not a whole number for each of the {heads} heads of max_logit")
    if key_rows % length or heads % (key_rows // length):
        raise ValueError(
            f"{heads} query heads of {length} rows, but {key_rows} rows of keys: expected as many heads, or a divisor"
        )
    return heads, key_rows // length
