"""A translation as something to write: the step between :mod:`.translate` and :mod:`.content`."""

from __future__ import annotations

import dataclasses

from ..box import Box
from ..layout import TensorLayout, dense
from ..record import Blob, Extent
from .content import Content, Entry, Wanted
from .translation import Translation

_MADE = "made"
_SCALAR = TensorLayout((), (dense(Box((), ()), _MADE),))


def content(translation: Translation) -> Content:
    """What the destination is to hold: tensors from the source's chunks, and what is new from memory."""
    moved = (
        Wanted(m.record, m.layout, {b: translation.chunk(b)[1] for b in m.layout.buffers}, scale=m.scale)
        for m in translation.moved
    )
    made = (Wanted(m.record, _SCALAR, {}, {_MADE: m.payload}) for m in translation.made)
    carried = (Entry(dataclasses.replace(c.source, key=c.key, path=c.path), c.source) for c in translation.carried)
    items = (
        Entry(Blob(item.key, item.path, Extent(_MADE, 0, len(item.data))), None, item.data)
        for item in translation.items
    )
    return Content([*moved, *made], [*carried, *items])
