"""What a user asks of names, structure and conventions: the way from a source to its outputs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...store.open_checkpoint import OpenCheckpoint
from ..engine.outputs import OutputItem, Outputs, OutputTensor
from .conventions import Overrides
from .detection import with_slots
from .dialect import Dialect
from .names import NameRules


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of :func:`.translator.translate`, whose defaults ask for nothing; and whether what is no tensor is
    left out."""

    source: Dialect | None = None
    target: Dialect | None = None
    rules: NameRules = field(default_factory=NameRules)
    overrides: Overrides = field(default_factory=Overrides)
    drop: frozenset[str] = frozenset()
    tensors_only: bool = False

    def outputs(self, source: OpenCheckpoint) -> Outputs:
        """What is made of a checkpoint.  Nothing is translated where nothing is asked for.

        Raises:
            SourceError, TargetError, LayoutError: as `translate` and `unchanged`.
        """
        outputs = self._translated(source)
        return outputs.tensors_only() if self.tensors_only else outputs

    def _translated(self, source: OpenCheckpoint) -> Outputs:
        if replace(self, tensors_only=False) == Request():
            return unchanged(source)
        from .translator import translate  # few commands translate

        return translate(
            source.manifest,
            source.values,
            self.target,
            source=self.source,
            rules=self.rules,
            overrides=self.overrides,
            drop=self.drop,
        )


def unchanged(source: OpenCheckpoint) -> Outputs:
    """Every tensor and every item under its own name; slots, by which layouts sort tensors, are those of the keys
    where nothing is recorded.

    Raises:
        LayoutError: a tensor has a hole or an overlap.
    """
    manifest = source.manifest
    recorded = any(tensor.slot is not None for tensor in manifest.tensors)
    tensors = (manifest if recorded else with_slots(manifest)).tensors
    return Outputs(
        [OutputTensor(t, t.chunk_layout(), {str(i): chunk for i, chunk in enumerate(t.chunks)}) for t in tensors],
        [OutputItem(blob.key, blob.path, blob) for blob in manifest.blobs],
    )
