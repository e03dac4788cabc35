"""Whole tensors with single owners (layer-wise optimizers, one-process state)."""

from __future__ import annotations

from functools import lru_cache

from ..box import Box, Index
from ..layout import Buffer, TensorLayout, dense


@lru_cache(maxsize=65536)
def owned_layout(shape: Index, owner: Buffer) -> TensorLayout:
    """The tensor lies dense and whole in the buffer of ``owner``."""
    box = Box.of(shape)
    return TensorLayout.of(shape, (dense(box, owner),) if box.numel else ())
