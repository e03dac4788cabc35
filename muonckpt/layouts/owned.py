"""Whole tensors with single owners (layer-wise optimizers, one-process state)."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from ..box import Box, Index
from ..errors import LayoutError
from ..layout import Buffer, TensorLayout, dense


@lru_cache(maxsize=65536)
def owned_layout(shape: Index, owner: Buffer) -> TensorLayout:
    """The tensor lies dense and whole in the buffer of ``owner``."""
    box = Box.of(shape)
    return TensorLayout(shape, (dense(box, owner),) if box.numel else ())


def blocks_of(shape: Index, blocks: int) -> list[Box]:
    """A matrix (all dims but the last two are 1) cut along its longer side, the columns if it is square.

    Blocks are of ``ceil(side / blocks)``; the last ones may be short or empty.
    """
    rows, columns = shape[-2:]
    dim = len(shape) - (1 if rows <= columns else 2)
    size = -(-shape[dim] // blocks)
    cuts = [min(block * size, shape[dim]) for block in range(blocks + 1)]

    def along(bound: int) -> Index:
        return tuple(bound if d == dim else n for d, n in enumerate(shape))

    start = tuple(0 for _ in shape)
    return [Box((*start[:dim], lo, *start[dim + 1 :]), along(hi)) for lo, hi in pairwise(cuts)]


@lru_cache(maxsize=65536)
def blocks_layout(shape: Index, owners: tuple[Buffer, ...], blocks: int) -> TensorLayout:
    """The blocks of a matrix with its owners: an equal number of consecutive ones each, dense, one after the other.

    Raises:
        LayoutError: the blocks do not divide over the owners.
    """
    if blocks < 1 or blocks % len(owners):
        raise LayoutError(f"{blocks} blocks do not divide over {len(owners)} owners")
    held = dict.fromkeys(owners, 0)
    fragments = []
    for number, box in enumerate(blocks_of(shape, blocks)):
        owner = owners[number * len(owners) // blocks]
        if box.numel:
            fragments.append(dense(box, owner, held[owner]))
            held[owner] += box.numel
    return TensorLayout(shape, tuple(fragments))
