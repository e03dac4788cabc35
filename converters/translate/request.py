"""The user's request for names, structure and conventions, which makes the outputs from a source."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...names.errors import SourceError
from ...names.keys import key_of
from ...names.vocabulary import Convention
from ...programs.detection import detect, target_of
from ...programs.dialect import Dialect, Keys
from ...store.open_checkpoint import OpenCheckpoint
from ..engine.outputs import Outputs, OutputTensor, unchanged
from .conventions import WeightsFrom, check_mu
from .groups import GroupTemplate
from .names import NameRules


@dataclass(frozen=True, slots=True)
class Request:
    """A request for outputs; by default nothing changes.

    Attributes:
        source: the dialect of the checkpoint; None means that the keys tell.
        target: the dialect to write; None means the source's.
        rules: are applied to parameters and to their state.
        convention: of the source, where nothing in it says that.
        target_convention: the convention to write, if the target has none of its own.
        mu: the momentum coefficient, where a group has none.
        step: the number of updates, whatever the source says.
        fill_missing: whether missing state is written as zeros.
        weights: what weights are made of; None: both stay.
        state_dtype: the dtype of momentum and moments; None: the source's.
        drop: slots of state to leave out.
        like: the groups of the run that the result is for.
        tensors_only: whether items that are no tensors are left out.
        model_only: whether all but the model's weights and buffers is left out.
    """

    source: Dialect | None = None
    target: Dialect | None = None
    rules: NameRules = field(default_factory=NameRules)
    convention: Convention | None = None
    target_convention: Convention | None = None
    mu: float | None = None
    step: int | None = None
    fill_missing: bool = False
    weights: WeightsFrom | None = None
    state_dtype: str | None = None
    drop: frozenset[str] = frozenset()
    like: GroupTemplate | None = None
    tensors_only: bool = False
    model_only: bool = False

    def __post_init__(self) -> None:
        if self.mu is not None:
            check_mu(self.mu, "`mu=`")

    @property
    def translates(self) -> bool:
        """Return whether the request is for more than to leave something out."""
        return replace(self, tensors_only=False, model_only=False) != Request()

    def outputs(self, source: OpenCheckpoint) -> Outputs:
        """Return the outputs made from a checkpoint, translated only if something is requested.

        Raises:
            SourceError, TargetError, LayoutError: as in `translate` and `unchanged`; or the model has no weights.
        """
        if self.model_only:
            return self._model_outputs(source)
        if self.translates:
            from .translator import translate  # imported here because few commands translate

            outputs = translate(source.manifest, source.values, self)
        else:
            outputs = unchanged(source)
        return outputs.tensors_only() if self.tensors_only else outputs

    def _model_outputs(self, source: OpenCheckpoint) -> Outputs:
        """Return the weights and buffers of the model, named as the target names them; without one as the source does.

        Nothing has to be known of the optimizer, unless the request needs it, as masters that become weights do.  Where
        the program is unknown, tensors that are no state are the model's.
        """
        # The target names weights, and decides no more.
        outputs = replace(self, target=None, model_only=False).outputs(source)
        keys: Keys | None = None
        try:
            dialect = detect(source.manifest, self.source).dialect
            keys, target_keys = dialect.keys, target_of(self.target, dialect, source.manifest.provenance).keys
        except SourceError:
            if self.target is not None:
                raise
        tensors: list[OutputTensor] = []
        left_keys = dict.fromkeys(outputs.keys)
        for tensor in outputs.tensors:
            record = tensor.record
            reading = keys.read_weight(record.path) if keys else None
            if record.slot is None and (keys is None or reading):
                path = target_keys.write_weight(reading.name, reading.chain) if reading else record.path
                tensors.append(replace(tensor, record=replace(record, key=key_of(path), path=path)))
                del left_keys[tensor.key]
        if not tensors:
            raise SourceError(
                f"{source.path}: expected weights of a model under {keys and keys.model_form}, found none"
            )
        kept_keys = {*outputs.keys} - left_keys.keys()
        reduced = outputs.reduced_to(tensors, (), kept_keys, "`model_only=True`")
        return replace(reduced, left_out=(*outputs.left_out, *left_keys))
