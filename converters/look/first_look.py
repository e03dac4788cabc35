"""What is known of an open checkpoint before any element is read: program, groups, roles and steps."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import SourceError
from ...record import Manifest
from ...store.open_checkpoint import OpenCheckpoint
from ..translate.detection import Detected, detect, with_slots_of
from .contents import Contents, contents_of
from .hyper_parameters import HyperParameters, StepCounts, hyper_parameters, steps_of


@dataclass(frozen=True, slots=True)
class FirstLook:
    """A checkpoint's metadata, sorted.

    Attributes:
        program: whose keys it has, or a sentence that says why that is unknown.
        manifest: with parameters and slots as the keys of the program name them.
        groups, contents, steps: hyper-parameters, tensors by role, and step counters.
    """

    program: Detected | str
    manifest: Manifest
    groups: HyperParameters
    contents: Contents
    steps: StepCounts

    @property
    def step(self) -> int | float | None:
        """The step that the saving program recorded, or else that of the step counters if they agree."""
        counted = self.steps.most if self.steps.least == self.steps.most else None
        return counted if (recorded := recorded_step(self.manifest)) is None else recorded


def first_look(checkpoint: OpenCheckpoint) -> FirstLook:
    """Sort what the metadata of a checkpoint say, and read its hyper-parameters and step counters."""
    outline, values = checkpoint.outline, checkpoint.values
    program = _program(outline)
    dialect = program.dialect if isinstance(program, Detected) else None
    manifest = with_slots_of(outline, dialect) if dialect else outline
    groups = hyper_parameters(manifest, dialect, values)
    contents = contents_of(manifest, dialect, groups.values_of(dialect.method_option if dialect else None))
    return FirstLook(program, manifest, groups, contents, steps_of(contents, manifest, values, groups))


def recorded_step(manifest: Manifest) -> int | float | None:
    """The step that the saving program recorded."""
    step = manifest.provenance.get("step")
    return step if isinstance(step, int | float) else None


def _program(manifest: Manifest) -> Detected | str:
    try:
        return detect(manifest)
    except SourceError as error:
        return str(error)
