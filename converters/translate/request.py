"""The user's request for names, structure and conventions, which makes the outputs from a source."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...store.open_checkpoint import OpenCheckpoint
from ..engine.outputs import OutputItem, Outputs, OutputTensor
from ..programs.dialect import Dialect
from .conventions import Overrides
from .detection import with_slots
from .groups import GroupTemplate
from .names import NameRules


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a translation, which by default changes nothing: the arguments of :func:`.translator.translate`.

    ``tensors_only`` leaves out items that are not tensors.
    """

    source: Dialect | None = None
    target: Dialect | None = None
    rules: NameRules = field(default_factory=NameRules)
    overrides: Overrides = field(default_factory=Overrides)
    drop: frozenset[str] = frozenset()
    tensors_only: bool = False
    like: GroupTemplate | None = None

    @property
    def translates(self) -> bool:
        """Return whether more is asked for than to leave items out."""
        return replace(self, tensors_only=False) != Request()

    def outputs(self, source: OpenCheckpoint) -> Outputs:
        """Return the outputs made from a checkpoint, translated only if something is asked for.

        Raises:
            SourceError, TargetError, LayoutError: as in `translate` and `unchanged`.
        """
        if self.translates:
            from .translator import translate  # imported here because few commands translate

            outputs = translate(
                source.manifest,
                source.values,
                self.target,
                source=self.source,
                rules=self.rules,
                overrides=self.overrides,
                drop=self.drop,
                like=self.like,
            )
        else:
            outputs = unchanged(source)
        return outputs.tensors_only() if self.tensors_only else outputs


def unchanged(source: OpenCheckpoint) -> Outputs:
    """Return all tensors and items of a checkpoint under their own keys.

    Layouts sort tensors by slot; where the manifest records none, the keys tell.

    Raises:
        LayoutError: a tensor has a hole or an overlap.
    """
    manifest = source.manifest
    recorded = any(tensor.slot is not None for tensor in manifest.tensors)
    tensors = (manifest if recorded else with_slots(manifest)).tensors
    return Outputs(
        [OutputTensor.copy_of(t) for t in tensors], [OutputItem(blob.key, blob.path, blob) for blob in manifest.blobs]
    )
