"""Which dialect a checkpoint's keys are written in, with the reasons; or a refusal that lists the choices.

Nothing on disk names the program.  The shape of the keys tells most dialects apart; those that share torch's nested
keys are told apart by a slot or an option that only one of them writes.
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
"""What only one of the known programs writes into torch's nested keys."""


@dataclass(frozen=True, slots=True)
class Detected:
    """A dialect and why it is that; ``reasons`` are sentences for people."""

    dialect: Dialect
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dialect.name} ({self.dialect.who}): {'; '.join(self.reasons)}"


def detect(manifest: Manifest) -> Detected:
    """The dialect of a checkpoint, by its keys alone.

    Raises:
        SourceError: no dialect has such keys, or several do; the message lists them.
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
    raise SourceError(f"no keys of a known dialect ({', '.join(DIALECTS)}); name one with --from")


def with_slots(manifest: Manifest) -> Manifest:
    """The same, with the parameter and the slot that keys of its dialect speak of, where nothing else says them.

    Unchanged if the dialect cannot be told.
    """
    try:
        template = detect(manifest).dialect.state
    except SourceError:
        return manifest

    def known(tensor: StateRecord) -> StateRecord:
        found = template.read(tensor.path) if tensor.slot is None else None
        return dataclasses.replace(tensor, name=found["name"], slot=found["slot"]) if found else tensor

    return dataclasses.replace(manifest, tensors=tuple(map(known, manifest.tensors)))


def _first(dialect: Dialect, entries: list[tuple[str, KeyPath]]) -> str | None:
    """The first key that has this dialect's place for optimizer state.

    Where the slot comes before the name, only a known slot tells it from a name that begins there.
    """
    known = {slot for method in dialect.methods for slot in method.slots.values()}
    any_slot = dialect.state.parts[-1] == "{slot}" or dialect.state.parts[-1].endswith(".{slot}")
    for key, path in entries:
        found = dialect.state.read(path)
        if found and (any_slot or found["slot"] in known):
            return key
    return None


def _flat(entries: list[tuple[str, KeyPath]], example: str) -> Detected:
    reason = f"its optimizer is flat, with keys such as {example!r}"
    if any(DIALECTS["veomni"].model.read(path) for _, path in entries):
        return Detected(DIALECTS["veomni"], (reason, "its model is under 'model'"))
    state = {found["name"] for _, path in entries if (found := DIALECTS["titan"].state.read(path))}
    if any(path == (path[0],) and path[0] in state for _, path in entries):
        return Detected(DIALECTS["titan"], (reason, "its parameters are at the top"))
    raise SourceError(f"{reason}, without the model that tells titan from veomni: name one with --from")


def _nested(paths: list[KeyPath], example: str) -> Detected:
    reason = f"its optimizer has torch's nested keys, such as {example!r}"
    marks: dict[str, str] = {}
    for kind, value in sorted(_words(paths)):
        marks |= {
            name: f"only it writes the {kind} {value!r}" for name, mine in _MARKS.items() if (kind, value) in mine
        }
    if len(marks) > 1:
        told = ", ".join(f"{name} ({why})" for name, why in marks.items())
        raise SourceError(f"{reason}, and marks of more than one program: {told}; name one with --from")
    for name, why in marks.items():
        return Detected(DIALECTS[name], (reason, why))
    return Detected(DIALECTS["dcp"], (reason, "no slot or option that one program alone writes"))


def _words(paths: list[KeyPath]) -> Iterator[tuple[str, str]]:
    """The slots and options that occur."""
    nested = DIALECTS["dcp"]
    assert nested.option is not None
    for path in paths:
        for kind, template in (("slot", nested.state), ("option", nested.option)):
            found = template.read(path)
            if found:
                yield kind, found[kind]
