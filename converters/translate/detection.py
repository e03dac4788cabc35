"""Tells which dialect a checkpoint's keys are written in, with the reasons; or refuses, and lists the choices.

Nothing on disk names the program.  Megatron's keys have forms of their own.  Those of torch's forms, nested or flat,
under any root, prove nothing but the form: a program, and with it a momentum convention, is known only by slots and
options that this program alone writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import SourceError
from ...record import Manifest, StateRecord
from ...vocabulary import PARAMS, KeyPath
from .conventions import spoken
from .dialect import Dialect
from .dialects import DIALECTS
from .key_forms import Keys, ModelPlace, OptimizerPlace, keys_of, under


@dataclass(frozen=True, slots=True)
class _Mark:
    """Slots, and options of one group, that together only one program writes."""

    program: str
    slots: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()

    def __str__(self) -> str:
        named = (("slot", sorted(self.slots)), ("option", sorted(self.options)))
        return " and the ".join(
            f"{kind}{'s' * (len(names) > 1)} {', '.join(map(repr, names))}" for kind, names in named if names
        )

    def is_on(self, keys: Keys) -> bool:
        """Whether the checkpoint bears it."""
        return self.slots <= keys.slots and (not self.options or any(self.options <= group for group in keys.groups))


def _mark(program: str, *slots: str, options: tuple[str, ...] = ()) -> _Mark:
    return _Mark(program, frozenset(slots), frozenset(options))


_MARKS = (
    _mark("dion", "step_dev"),
    _mark("dion", "variance_neuron"),
    _mark("dion", options=("cautious_wd", "algorithm", "epsilon", "mu")),
    _mark("xtuner", "lr_ratio"),
    _mark("xtuner", options=("num_experts", "algorithm", "epsilon", "mu")),
    _mark("xtuner", options=("clip_grad", "algorithm", "epsilon", "mu")),
    _mark("moonlight", "use_muon", options=("wd", "adamw_betas", "adamw_eps")),
    _mark("moonlight", "use_muon", "moment1"),
    _mark("veomni", options=("ns_implementation", "gram_ns_reset_iterations")),
    _mark("muonckpt", options=("convention",)),
)

_TORCH_MUON = frozenset(
    {"lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"}
)
"""The options of a group of torch.optim.Muon.  Others write some of them, and other options beside them."""

_ADDED_BY_TORCH = frozenset(
    {PARAMS, "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "param_names"}
    | {"betas", "amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
)
"""What torch's schedulers and state dicts add to groups, and the options of AdamW beside Muon."""


@dataclass(frozen=True, slots=True)
class Detected:
    """A dialect, with templates for where its keys lie, and the ``reasons`` why it is this one, as sentences."""

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
    for name in ("layer_wise", "fsdp_dtensor", "torch_dist"):
        if example := _first(DIALECTS[name], entries):
            return Detected(DIALECTS[name], (f"its state is under keys such as {example!r}",))
    keys = keys_of(manifest)
    if keys.optimizers:
        return _by_marks(keys)
    weights = [tensor.path for tensor in manifest.tensors if tensor.path[0] == "model"]
    models = [name for name in ("fsdp_dtensor", "dcp") if weights and all(map(DIALECTS[name].model.read, weights))]
    if models:
        return Detected(DIALECTS[models[0]], (f"weights only, under {DIALECTS[models[0]].model}",))
    roots = {tensor.path[:-1] for tensor in manifest.tensors}
    if len(roots) == 1 and (root := roots.pop())[-1:] in (("model",), ("state_dict",)):
        place = ModelPlace(root)
        return Detected(under(DIALECTS["dcp"], Keys(model=place)), (f"weights only, under {str(place)!r}",))
    raise SourceError(f"the keys are not those of a known dialect ({', '.join(DIALECTS)}); name one with --from")


def named(manifest: Manifest, dialect: Dialect) -> Detected:
    """The dialect that the user names, with templates for where its keys lie.

    Raises:
        SourceError: nothing says which of several places is that of the model.
    """
    return Detected(under(dialect, keys_of(manifest)), ("--from names it",))


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


def momentum_note(manifest: Manifest) -> tuple[str, ...]:
    """A sentence on what the momenta of a checkpoint accumulate, and why; none if it has no momentum.

    Args:
        manifest: with slots, as `with_slots` gives it.
    """
    recorded = {tensor.convention for tensor in manifest.tensors if tensor.convention is not None}
    if recorded:
        return (f"momentum: {' and '.join(sorted(map(spoken, recorded)))}, because the manifest records it",)
    try:
        detected = detect(manifest)
    except SourceError:
        return ()
    dialect = detected.dialect
    slots = {method.slots["momentum"] for method in dialect.methods if "momentum" in method.slots}
    if not any(tensor.slot in slots for tensor in manifest.tensors):
        return ()
    why = f"that is what {dialect.name} keeps: {detected.reasons[-1]}" if dialect.convention else detected.reasons[-1]
    return (f"momentum: {spoken(dialect.convention)}, because {why}",)


def _first(dialect: Dialect, entries: list[tuple[str, KeyPath]]) -> str | None:
    """The first key of state in this dialect; the slot must be a known one, since a name could begin there."""
    known_slots = {slot for method in dialect.methods for slot in method.slots.values()}
    for key, path in entries:
        fields = dialect.state.read(path)
        if fields and fields["slot"] in known_slots:
            return key
    return None


def _by_marks(keys: Keys) -> Detected:
    """The program that the slots and options tell, or none.

    Raises:
        SourceError: they tell more than one.
    """
    where = ", ".join(map(str, keys.optimizers))
    form = "flat" if keys.flat else "numbered" if keys.numbered else "nested"
    reason = f"{where} has torch's {form} keys, such as {keys.example!r}"
    marks: dict[str, str] = {}
    for name, why in _marks(keys):
        marks.setdefault(name, why)
    if len(marks) > 1:
        programs = ", ".join(f"{name} ({why})" for name, why in marks.items())
        raise SourceError(f"{reason}, and marks of more than one program: {programs}; name one with --from")
    for name, why in marks.items():
        return Detected(under(DIALECTS[name], keys), (reason, why))
    unknown = DIALECTS["fully_shard" if keys.numbered else "dcp"]
    return Detected(under(unknown, keys), (reason, "no slot or option is written by one program only"))


def _marks(keys: Keys) -> Iterator[tuple[str, str]]:
    """The programs of which the checkpoint bears a mark, each with a sentence that says which."""
    yield from ((mark.program, f"only it writes the {mark}") for mark in _MARKS if mark.is_on(keys))
    averages = [group for group in keys.groups if "momentum" in group]
    if averages and all(_TORCH_MUON <= group <= _TORCH_MUON | _ADDED_BY_TORCH for group in averages):
        why = "its groups have the options of torch.optim.Muon, such as 'ns_coefficients', and no others"
        titan = (OptimizerPlace(("optimizer",), flat=True),), ModelPlace(())
        if (keys.optimizers, keys.model) == titan:
            yield "titan", f"{why}; its parameters are at the top"
        else:
            yield "torch", why
