"""A translation as something to write: the step between :mod:`.translate` and :mod:`.content`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...box import Box
from ...layout import TensorLayout, dense
from ...record import Blob, Extent, Manifest
from ...store.io.location import Location
from ...store.open_checkpoint import OpenCheckpoint
from ..engine.outputs import Content, Entry, Translate, Wanted, as_they_are
from .conventions import Said
from .dialects import Dialect
from .names import Rules

if TYPE_CHECKING:
    from .translation import Translation

_MADE = "made"
_SCALAR = TensorLayout((), (dense(Box((), ()), _MADE),))


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks of names, structure and conventions: the arguments of :func:`.translate.translate`."""

    source: Dialect | None = None
    target: Dialect | None = None
    rules: Rules = field(default_factory=Rules)
    said: Said = field(default_factory=Said)
    drop: frozenset[str] = frozenset()

    def of(self, path: Location) -> Translate:
        """What is made of the checkpoint at ``path``.  Nothing is translated where nothing is asked for."""

        def translated(manifest: Manifest) -> Content:
            from .translator import translate

            values = OpenCheckpoint(path).values  # TODO
            found = translate(
                manifest, values, self.target, source=self.source, rules=self.rules, said=self.said, drop=self.drop
            )
            return content(found)

        return as_they_are if self == Request() else translated


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
    return Content([*moved, *made], [*carried, *items], translation.left, tuple(translation.lines()))
