"""The tensors of a translated checkpoint: their keys, their conventions, and the elements that they are made of."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from ...box import Box
from ...errors import SourceError
from ...layout import TensorLayout, dense
from ...record import StateRecord, no_chunks
from ...store.stored_items import scalar_bytes
from ...vocabulary import Convention, KeyPath
from ..engine.outputs import OutputItem, OutputTensor
from .context import Context
from .conventions import agreed_convention, momentum_factor, spoken
from .dialect import key_of
from .names import NameRules
from .source_parameters import AS_THE_PARAMETER, Param, SlotTensors
from .structure import TranslatedTensor, apply_rules

_COUNTER = "counter"
_ONE_ELEMENT = TensorLayout.of((), (dense(Box((), ()), _COUNTER),))


def tensors_by_slot(context: Context, rules: NameRules) -> SlotTensors:
    """The weights and the state of the source, renamed, split and joined by the rules."""
    by_slot: defaultdict[str | None, dict[str, TranslatedTensor]] = defaultdict(dict)
    for (slot, name), tensor in context.roles.tensors.items():
        by_slot[slot][name] = TranslatedTensor(tensor.dtype, context.chunks.layout(tensor), name, (name,))
    return {slot: apply_rules(rules, tensors) for slot, tensors in by_slot.items()}


def carried_tensor(context: Context, tensor: StateRecord, path: KeyPath) -> OutputTensor:
    """An unchanged tensor of the source, under this path."""
    return context.chunks.output(_under(tensor, path), context.chunks.layout(tensor))


def weight_tensor(context: Context, name: str, tensor: TranslatedTensor) -> OutputTensor:
    """The output tensor of a parameter."""
    record = _record(context, None, tensor, context.target.model.write(name=name))
    return context.chunks.output(record, tensor.layout)


def state_tensor(context: Context, slot: str, tensor: TranslatedTensor, param: Param) -> OutputTensor:
    """The output tensor of a slot of a parameter; momentum is in the convention of the target.

    Raises:
        SourceError: a convention or a coefficient is needed and unknown, or sources of it contradict each other.
    """
    common = next(name for name, own_slot in param.source_method.slots.items() if own_slot == slot)
    target_slot = param.target_method.slots[common]
    path = context.state_path(param.name, target_slot, param.chain)
    record = dataclasses.replace(_record(context, slot, tensor, path), name=param.name, slot=target_slot)
    wanted = (common in AS_THE_PARAMETER and context.overrides.state_dtype) or tensor.dtype
    held = tensor.dtype if wanted != tensor.dtype else None
    if held is not None:
        record = dataclasses.replace(record, dtype=wanted, fingerprint=None)
    if common != "momentum":
        return context.chunks.output(record, tensor.layout, held=held)
    source, target = source_convention(context, slot, tensor, param)[0], _target_convention(context, param)
    target = target or source
    scale = momentum_factor(source, target, _mu(context, param), f"parameter {param.name!r}")
    if scale is not None and record.dtype == "float16":
        raise SourceError(
            f"parameter {param.name!r}: its momentum is float16, in which a {source} multiplied by {scale:.4g} may "
            "overflow or vanish; keep the convention, or give --state-dtype float32"
        )
    fingerprint = record.fingerprint if scale is None else None
    record = dataclasses.replace(record, convention=target, fingerprint=fingerprint)
    return context.chunks.output(record, tensor.layout, scale, held)


def step_counter(context: Context, param: Param) -> OutputTensor | OutputItem:
    """The step counter of a parameter: the source's if it is a tensor or the dialect stays the same, else a new tensor.

    Raises:
        SourceError: the number of steps is unknown.
    """
    slot = param.target_method.slots["step"]
    path = context.state_path(param.name, slot, param.chain)
    stored_counter = context.roles.counters.get(param.aliases[0], {}).get(param.source_method.slots.get("step", ""))
    if isinstance(stored_counter, StateRecord):
        record = dataclasses.replace(_under(stored_counter, path), name=param.name, slot=slot)
        return context.chunks.output(record, context.chunks.layout(stored_counter))
    if stored_counter is not None and context.same_dialect:
        return OutputItem(key_of(path), path, stored_counter)
    if param.step is None:
        raise SourceError(
            f"parameter {param.name!r}: {context.target.name} stores the number of steps, which is unknown; give --step"
        )
    record = StateRecord(key_of(path), path, (), "float32", no_chunks(0), name=param.name, slot=slot)
    return OutputTensor(record, _ONE_ELEMENT, in_memory={_COUNTER: scalar_bytes("float32", param.step)})


def _under(record: StateRecord, path: KeyPath) -> StateRecord:
    """The record of a tensor that will be stored under this path."""
    return dataclasses.replace(record, key=key_of(path), path=path, chunks=no_chunks(len(record.shape)), layout=None)


def _record(context: Context, slot: str | None, tensor: TranslatedTensor, path: KeyPath) -> StateRecord:
    """The record of a target tensor; it keeps the source's fingerprint, pieces and names unless it was restructured."""
    if tensor.restructured:
        return StateRecord(key_of(path), path, tensor.shape, tensor.dtype, no_chunks(len(tensor.shape)))
    return _under(context.roles.tensors[slot, tensor.aliases[0]], path)


def source_convention(
    context: Context, slot: str, tensor: TranslatedTensor, param: Param
) -> tuple[Convention | None, str]:
    """The convention of the source's momentum, and why it is this one.

    Raises:
        SourceError: two of those that say it contradict each other.
    """
    tensors, asked = context.roles.tensors, context.overrides.convention
    parts = [tensors[slot, alias] for alias in tensor.aliases if (slot, alias) in tensors]
    recorded = {f"the manifest ({part.key})": part.convention for part in parts}
    declared = {context.dialect.name: context.dialect.convention, "--convention": asked}
    convention = agreed_convention(f"parameter {param.name!r}", "--convention", recorded | declared)
    if any(part.convention is not None for part in parts):
        return convention, "the manifest records it"
    if context.dialect.convention is not None:
        return convention, f"that is what {context.dialect.name} keeps: {context.reason}"
    return (
        convention,
        f"--convention {asked} says so" if asked else "nothing in the source tells, nor does --convention",
    )


def _target_convention(context: Context, param: Param) -> Convention | None:
    """The convention to write; None for that of the source."""
    target = {context.target.name: context.target.convention, "--target-convention": context.overrides.target}
    return agreed_convention(f"parameter {param.name!r}", "--target-convention", target)


def momentum_sentences(context: Context, by_slot: SlotTensors, params: Mapping[str, Param]) -> Iterator[str]:
    """What the source's momenta accumulate, and why."""
    counts: Counter[tuple[Convention | None, str]] = Counter()
    for slot, tensors in by_slot.items():
        if slot is not None:
            counts.update(
                source_convention(context, slot, tensor, params[name])
                for name, tensor in tensors.items()
                if params[name].source_method.slots.get("momentum") == slot
            )
    for (convention, reason), count in counts.items():
        whose = f" of {count} parameters" if len(counts) > 1 else ""
        yield f"momentum{whose}: {spoken(convention)}, because {reason}"


def _mu(context: Context, param: Param) -> float | None:
    """The momentum coefficient of the parameter's group, or the user's if the group has none."""
    option, given = param.source_method.options.get("momentum", ""), context.overrides.mu
    if param.group is None or option not in param.group.items:
        return given
    stored = context.values.read(param.group.items[option])
    if stored is None:
        return given
    if not isinstance(stored, float | int):
        raise SourceError(f"parameter {param.name!r}: expected a number as {option} of its group, found {stored!r}")
    if given not in (None, stored):
        raise SourceError(f"parameter {param.name!r}: its group says {option}={stored!r}, --mu says {given!r}")
    return float(stored)
