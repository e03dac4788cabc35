"""Tells which dialect a checkpoint's keys are written in, with the reasons; or refuses, and lists the choices.

Nothing on disk names the program.  Most dialects differ in the form of their keys; those that share torch's nested keys
differ in a slot or an option that only one of them writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...errors import SourceError
from ...record import Manifest, StateRecord
from ...vocabulary import KeyPath
from .dialect import Dialect
from .dialects import DIALECTS

_MARKS: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "dion": (("slot", "step_dev"), ("slot", "variance_neuron"), ("option", "cautious_wd")),
        "xtuner": (("slot", "lr_ratio"), ("option", "num_experts"), ("option", "clip_grad")),
        "moonlight": (("slot", "use_muon"), ("slot", "moment1")),
        "muonckpt": (("option", "convention"),),
        "torch": (("option", "ns_coefficients"),),
    }
)
"""Slots and options in torch's nested keys that only one of the known programs writes."""


@dataclass(frozen=True, slots=True)
class Detected:
    """A dialect, and the ``reasons`` why it is this one, as sentences."""

    dialect: Dialect
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dialect.name} ({self.dialect.who}): {'; '.join(self.reasons)}"


def detect(manifest: Manifest) -> Detected:
    """The dialect of a checkpoint, by its keys alone.

    Raises:
        SourceError: no dialect, or more than one, has such keys; the message lists them.
    """
    entries = [*((t.key, t.path) for t in manifest.tensors), *((b.key, b.path) for b in manifest.blobs)]
    shapes = {name: _first(dialect, entries) for name, dialect in DIALECTS.items()}
    for name in ("layer_wise", "fsdp_dtensor", "torch_dist", "fully_shard"):
        if shapes[name]:
            return Detected(DIALECTS[name], (f"its state is under keys such as {shapes[name]!r}",))
    if shapes["titan"]:
        return _flat(entries, shapes["titan"])
    if shapes["dcp"]:
        return _nested([path for _, path in entries], shapes["dcp"])
    weights = [tensor.path for tensor in manifest.tensors if tensor.path[0] == "model"]
    models = [name for name in ("fsdp_dtensor", "dcp") if weights and all(map(DIALECTS[name].model.read, weights))]
    if models:
        return Detected(DIALECTS[models[0]], (f"weights only, under {DIALECTS[models[0]].model}",))
    raise SourceError(f"the keys are not those of a known dialect ({', '.join(DIALECTS)}); name one with --from")


def with_slots(manifest: Manifest) -> Manifest:
    """The manifest with parameters and slots as its dialect's keys name them, where it does not record them.

    Unchanged if the dialect is unknown.
    """
    try:
        return with_slots_of(manifest, detect(manifest).dialect)
    except SourceError:
        return manifest


def with_slots_of(manifest: Manifest, dialect: Dialect) -> Manifest:
    """The manifest with parameters and slots as this dialect's keys name them, where it does not record them."""

    def with_slot(tensor: StateRecord) -> StateRecord:
        fields = dialect.state.read(tensor.path) if tensor.slot is None else None
        return dataclasses.replace(tensor, name=fields["name"], slot=fields["slot"]) if fields else tensor

    return dataclasses.replace(manifest, tensors=tuple(map(with_slot, manifest.tensors)))


def _first(dialect: Dialect, entries: list[tuple[str, KeyPath]]) -> str | None:
    """The first key of optimizer state in this dialect.

    If the slot comes before the name, it must be a known one, since a name could begin there as well.
    """
    known_slots = {slot for method in dialect.methods for slot in method.slots.values()}
    any_slot = dialect.state.parts[-1] == "{slot}" or dialect.state.parts[-1].endswith(".{slot}")
    for key, path in entries:
        fields = dialect.state.read(path)
        if fields and (any_slot or fields["slot"] in known_slots):
            return key
    return None


def _flat(entries: list[tuple[str, KeyPath]], example: str) -> Detected:
    reason = f"its optimizer is flat, with keys such as {example!r}"
    if any(DIALECTS["veomni"].model.read(path) for _, path in entries):
        return Detected(DIALECTS["veomni"], (reason, "its model is under 'model'"))
    state = {fields["name"] for _, path in entries if (fields := DIALECTS["titan"].state.read(path))}
    if any(path == (path[0],) and path[0] in state for _, path in entries):
        return Detected(DIALECTS["titan"], (reason, "its parameters are at the top"))
    raise SourceError(f"{reason}, but there is no model to tell titan from veomni; name one with --from")


def _nested(paths: list[KeyPath], example: str) -> Detected:
    reason = f"its optimizer has torch's nested keys, such as {example!r}"
    marks: dict[str, str] = {}
    for kind, value in sorted(_slots_and_options(paths)):
        marks |= {
            name: f"only it writes the {kind} {value!r}"
            for name, marks_of_program in _MARKS.items()
            if (kind, value) in marks_of_program
        }
    if len(marks) > 1:
        programs = ", ".join(f"{name} ({why})" for name, why in marks.items())
        raise SourceError(f"{reason}, and marks of more than one program: {programs}; name one with --from")
    for name, why in marks.items():
        return Detected(DIALECTS[name], (reason, why))
    return Detected(DIALECTS["dcp"], (reason, "no slot or option is written by one program only"))


def _slots_and_options(paths: list[KeyPath]) -> Iterator[tuple[str, str]]:
    """The slots and options in these paths, each with its kind."""
    nested = DIALECTS["dcp"]
    assert nested.option is not None
    for path in paths:
        for kind, template in (("slot", nested.state), ("option", nested.option)):
            fields = template.read(path)
            if fields:
                yield kind, fields[kind]
