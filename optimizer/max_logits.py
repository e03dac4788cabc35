"""The largest attention logits of every head, taken where attention is computed, for `qk_clip`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .step.exchange import gather_tensor

LOGITS_AT_A_TIME = 1 << 24
"""The most logits that `largest_logits` has in memory at once."""


class MaxLogits:
    """The largest logit of each head of each layer since the last `reduce`.

    Layers are named by the user.  What is recorded twice, as by recomputation in backward, changes nothing.
    """

    def __init__(self) -> None:
        self._largest: dict[str, Tensor] = {}

    @torch.no_grad()
    def record(self, layer: str, scores: Tensor) -> None:
        """Take note of logits, or of their maxima, as attention kernels return them.

        Args:
            scores: ``[heads]``, or ``[batch, heads, ...]``, such as ``max_scores`` of FlexAttention's `AuxOutput`.
        """
        heads = scores.detach().float()
        if heads.ndim > 1:
            heads = heads.amax(dim=[dim for dim in range(heads.ndim) if dim != 1])
        before = self._largest.get(layer)
        if before is not None and before.shape != heads.shape:
            raise ValueError(f"layer {layer!r}: expected {len(before)} heads as before, found {len(heads)}")
        self._largest[layer] = heads.clone() if before is None else torch.maximum(before, heads)

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

    def reduce(self, mesh: DeviceMesh | None = None, heads: str | None = None) -> Mapping[str, Tensor]:
        """Return the largest logits of all ranks, ``[heads]`` of each layer, and begin anew.

        One collective for all layers, along each axis of the mesh.  `qk_clip` takes the result as it is, and reduces
        it no more.

        Args:
            mesh: all ranks that share the model, who call this together with the same layers; None for one process.
            heads: the axis of the mesh along which ranks have heads of their own, as in tensor parallelism.

        Raises:
            ValueError: nothing was recorded, or the mesh has no such axis.
        """
        names = sorted(self._largest)
        if not names:
            raise ValueError("no logits were recorded since the last reduce: does attention call record or attention?")
        if mesh is None:
            found, self._largest = self._largest, {}
            return found
        if heads is not None and heads not in (mesh.mesh_dim_names or ()):
            raise ValueError(f"heads={heads!r}: expected an axis of the mesh, one of {mesh.mesh_dim_names}")
        counts = [len(self._largest[name]) for name in names]
        packed = torch.full((len(names), 1, max(counts)), -torch.inf, device=self._largest[names[0]].device)
        for row, name in enumerate(names):
            packed[row, 0, : counts[row]] = self._largest[name]
        axes = mesh.mesh_dim_names or (None,) * mesh.ndim
        placements: list[Placement] = [Shard(1) if heads and axis == heads else Partial("max") for axis in axes]
        of_all = gather_tensor(DTensor.from_local(packed, mesh, placements, run_check=False))
        self._largest = {}
        everywhere = [Replicate()] * mesh.ndim
        return {
            name: DTensor.from_local(of_all[row, :, :count].reshape(-1), mesh, everywhere, run_check=False)
            for row, (name, count) in enumerate(zip(names, counts, strict=True))
        }


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
    blocks = [block.amax(dim=(-2, -1)) for block in _logits(query.detach(), key, attn_mask, is_causal, factor)]
    largest = torch.stack(blocks).amax(dim=0)
    return largest.reshape(-1, heads).amax(dim=0).float()


def _logits(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, factor: float) -> Iterator[Tensor]:
    """Yield the logits of some queries at a time."""
    length, keys = query.shape[-2], key.shape[-2]
    rows = max(LOGITS_AT_A_TIME // max(query.shape[:-2].numel() * keys, 1), 1)
    for start in range(0, length, rows):
        block = query[..., start : start + rows, :]
        logits = (block @ key.transpose(-2, -1)) * factor
        if causal:
            seen = torch.arange(keys, device=query.device) <= torch.arange(length, device=query.device)[:, None]
            logits = logits.masked_fill(~seen[start : start + rows], -torch.inf)
        if mask is not None:
            part = mask if mask.shape[-2] == 1 else mask[..., start : start + rows, :]
            logits = logits.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else logits + part
        yield logits
