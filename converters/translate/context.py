"""The source of a translation, and the tensors that are made from its elements."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ...errors import SourceError, about
from ...layout import Buffer, TensorLayout
from ...record import Chunk, Manifest, StateRecord
from ...store.stored_items import Values
from ...vocabulary import KeyPath
from ..engine.outputs import OutputTensor
from .conventions import Overrides
from .dialect import Dialect
from .group_options import SourceGroup
from .group_template import GroupTemplate
from .roles import Roles


@dataclass(frozen=True, slots=True)
class SourceChunks:
    """The chunks of a source, each a buffer with a unique name, so that parts of several tensors can be joined.

    Attributes:
        by_buffer: all chunks by their names.
        buffers: the names of each tensor's chunks, by its key.
    """

    by_buffer: Mapping[Buffer, Chunk]
    buffers: Mapping[str, tuple[Buffer, ...]]

    @classmethod
    def of(cls, manifest: Manifest) -> SourceChunks:
        """The chunks of all tensors of a checkpoint."""
        by_buffer: dict[Buffer, Chunk] = {}
        buffers: dict[str, tuple[Buffer, ...]] = {}
        for tensor in manifest.tensors:
            names = [f"chunk {number}" for number in range(len(by_buffer), len(by_buffer) + len(tensor.chunks))]
            buffers[tensor.key] = tuple(names)
            by_buffer.update(zip(names, tensor.chunks, strict=True))
        return cls(by_buffer, buffers)

    def layout(self, tensor: StateRecord) -> TensorLayout:
        """The layout of a tensor in its chunks.

        Raises:
            LayoutError: the chunks leave a hole, or overlap.
        """
        stored = zip(self.buffers[tensor.key], tensor.chunks, strict=True)
        with about(f"tensor {tensor.key!r}"):
            return TensorLayout.of(
                tensor.shape, tuple(chunk.stored(buffer) for buffer, chunk in stored if chunk.box.numel)
            )

    def output(
        self, record: StateRecord, layout: TensorLayout, scale: float | None = None, held: str | None = None
    ) -> OutputTensor:
        """The tensor made of the elements that ``layout`` names, which are ``held`` in that dtype if in another."""
        chunks = {buffer: self.by_buffer[buffer] for buffer in layout.buffers}
        return OutputTensor(record, layout, chunks, scale=scale, held=held)


@dataclass(frozen=True, slots=True)
class Context:
    """What a translation knows: the source and the target, ``groups`` by parameter, and the ``dropped`` slots.

    ``reason`` says in a sentence why the source is in this dialect.
    ``like`` has the groups of the run that the result is for, if they are given.  ``numbers`` are what keys of state
    have in place of names, if the target knows parameters by number.
    """

    dialect: Dialect
    target: Dialect
    values: Values
    overrides: Overrides
    chunks: SourceChunks
    roles: Roles
    groups: Mapping[str, SourceGroup]
    dropped: Collection[str] = ()
    reason: str = "--from names it"
    like: GroupTemplate | None = None
    numbers: Mapping[str, str] = field(default_factory=dict)

    @property
    def same_dialect(self) -> bool:
        """Whether only names, structure or the convention change."""
        return self.target is self.dialect

    def state_path(self, name: str, slot: str, chain: Mapping[str, str]) -> KeyPath:
        """The path of a parameter's slot in the target; ``chain`` is a field of its keys, if they have it.

        Raises:
            SourceError: the target numbers parameters, and this one is in no group.
        """
        if self.numbers and name not in self.numbers:
            raise SourceError(
                f"{self.target.name} numbers the parameters of groups, and {name!r}, which has state, is in none"
            )
        return self.target.state.write(name=self.numbers.get(name, name), slot=slot, **chain)
