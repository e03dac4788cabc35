"""The user's request for names, structure and conventions, which makes the outputs from a source."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...names.errors import SourceError
from ...names.keys import key_of
from ...names.vocabulary import KeyPath
from ...programs.detection import detect, locate_dialect, with_slots
from ...programs.dialect import Dialect, Template
from ...store.open_checkpoint import OpenCheckpoint
from ..engine.outputs import OutputItem, Outputs, OutputTensor
from .conventions import Overrides
from .groups import GroupTemplate
from .names import NameRules


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a translation, which by default changes nothing: the arguments of :func:`.translator.translate`.

    ``tensors_only`` leaves out items that are not tensors, ``model_only`` all but the model's weights and buffers.
    """

    source: Dialect | None = None
    target: Dialect | None = None
    rules: NameRules = field(default_factory=NameRules)
    overrides: Overrides = field(default_factory=Overrides)
    drop: frozenset[str] = frozenset()
    tensors_only: bool = False
    model_only: bool = False
    like: GroupTemplate | None = None

    @property
    def translates(self) -> bool:
        """Return whether more is asked for than to leave something out."""
        return replace(self, tensors_only=False, model_only=False) != Request()

    @property
    def _of_weights(self) -> Request:
        """Return what the request says of weights: the program to write for names them, and decides no more."""
        return replace(self, target=None, model_only=False)

    def outputs(self, source: OpenCheckpoint) -> Outputs:
        """Return the outputs made from a checkpoint, translated only if something is asked for.

        Raises:
            SourceError, TargetError, LayoutError: as in `translate` and `unchanged`.
        """
        if self.model_only:
            return _model(source, self._of_weights, self.target)
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


def _model(source: OpenCheckpoint, request: Request, target: Dialect | None) -> Outputs:
    """Return the weights and buffers of the model, named as a program names them; None means the source's.

    Nothing has to be known of the optimizer, unless the request needs it, as masters that become weights do.  Where the
    program is unknown, what is no state is the model's.

    Raises:
        SourceError: there are none, or the program is unknown and another is to be written.
    """
    outputs = request.outputs(source)
    model: Template | None = None
    try:
        detected = (
            detect(source.manifest) if request.source is None else locate_dialect(source.manifest, request.source)
        )
        model = detected.dialect.model
    except SourceError:
        if target is not None:
            raise
    paths: dict[str, KeyPath] = {}
    for record in [tensor.record for tensor in outputs.tensors if tensor.record.slot is None]:
        if model is None:
            paths[record.key] = record.path
        elif fields := model.read(record.path):
            paths[record.key] = (target.model if target else model).write(**fields)
    if not paths:
        raise SourceError(f"{source.path}: expected weights of a model under {model}, found none")
    return replace(
        outputs,
        tensors=[
            replace(tensor, record=replace(tensor.record, key=key_of(paths[tensor.key]), path=paths[tensor.key]))
            for tensor in outputs.tensors
            if tensor.key in paths
        ],
        items=(),
        left_out=(*outputs.left_out, *(key for key in outputs.keys if key not in paths)),
    )


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
