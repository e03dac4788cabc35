"""Translates a checkpoint of one program for another: decides what each target tensor is made of.

:func:`translate` needs only the manifest and a few small values; it moves no data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from ...errors import SourceError, TargetError
from ...record import Blob, Manifest, StateRecord
from ...store.stored_items import Values
from ...vocabulary import MASTER
from ...wording import counted
from ..engine.checklist import Action, Findings, sorted_checks
from ..engine.outputs import OutputItem, Outputs, OutputTensor
from .context import Context, SourceChunks
from .conventions import Overrides, WeightsFrom
from .detection import detect, named
from .dialect import Dialect
from .group_options import source_groups
from .group_template import GroupTemplate
from .key_forms import is_of_optimizer
from .missing_state import report_missing, stateless_params, zero_state
from .names import NameRules
from .numbering import recorded_names
from .output_tensors import (
    carried_tensor,
    momentum_sentences,
    state_tensor,
    step_counter,
    tensors_by_slot,
    weight_tensor,
)
from .regroup import names_of_groups, regroup
from .roles import Roles, roles_of, with_masters_as_weights, without_private_items
from .source_parameters import SlotTensors, params_of

_MASTERS = (
    "they stay state beside the 16-bit weights, which LayerWise takes; for Muon and a float32 model convert with "
    "--weights masters, for Muon and a 16-bit model with --weights model --state-dtype bfloat16"
)


def translate(
    manifest: Manifest,
    values: Values,
    target: Dialect | None = None,
    *,
    source: Dialect | None = None,
    rules: NameRules | None = None,
    overrides: Overrides | None = None,
    drop: frozenset[str] = frozenset(),
    like: GroupTemplate | None = None,
) -> Outputs:
    """Translate a checkpoint to another dialect, or change names, structure or the convention in its own dialect.

    Args:
        manifest: the manifest, with payloads.
        values: the values of the same checkpoint.
        target: the dialect to write; None means the source's.
        source: the dialect of the checkpoint; None means that the keys tell.
        rules: names and structure; they are applied to parameters and to their state.
        overrides: what the user says about the momentum if the checkpoint does not.
        drop: slots of state to leave out.
        like: the groups of the run that the result is for.

    Raises:
        SourceError: the dialect or a convention is unknown, the target has no place for some state, or two tensors or
            items would get the same key.
        TargetError: ``drop`` names a slot that does not exist, or no rule matches a parameter.
        LayoutError: rules do not fit the tensors, or a tensor has a hole or an overlap.
    """
    detected = detect(manifest) if source is None else named(manifest, source)
    dialect, target, rules = detected.dialect, target or detected.dialect, rules or NameRules()
    if not target.writable:
        raise SourceError(f"checkpoints of {target.name} can be read but not written; choose another program with --to")
    _refuse_unknown(manifest, dialect, drop)
    overrides = overrides or Overrides()
    masters = dialect.slots_called("master")
    drop = drop | masters if overrides.weights is WeightsFrom.MODEL else drop
    roles = roles_of(manifest, dialect, drop if dialect is target and not rules.rules else drop | dialect.derived)
    if overrides.weights is WeightsFrom.MASTERS:
        roles = with_masters_as_weights(roles, masters)
    _refuse_unread(manifest, dialect, roles)
    _refuse_opaque(roles, dialect, target)
    roles, private = without_private_items(roles, dialect, target)
    groups = source_groups(manifest, dialect, values)
    group_of = {name: group for group in groups for name in group.params}
    chunks = SourceChunks.of(manifest)
    context = Context(dialect, target, values, overrides, chunks, roles, group_of, drop, detected.reasons[-1], like)
    recorded = NameRules() if target.numbered else recorded_names(manifest, dialect)
    by_slot = tensors_by_slot(context, recorded + rules)
    if not recorded.rules:
        _refuse_unfit(rules, by_slot)
    params = {param.name: param for param in params_of(context, by_slot)}
    notes = Findings()
    names = names_of_groups(context, groups, by_slot)
    stateless = stateless_params(context, groups, names, params)
    regrouped = regroup(context, groups, names, by_slot, params | stateless, notes)
    context, grouped = replace(context, numbers=regrouped.numbers), regrouped.outputs
    zeros: list[OutputTensor] = []
    if context.overrides.fill_missing:
        zeros = list(zero_state(context, by_slot, stateless, notes))
    else:
        report_missing(stateless, notes)
    counted = [*params.values(), *(stateless.values() if zeros else ())]
    counters = [step_counter(context, param) for param in counted if "step" in param.target_method.slots]
    if private:
        notes.check(Action.LEFT, "items of the program", *private, reason=f"{target.name} has no use for them")
    if masters & by_slot.keys() and not context.same_dialect and not target.private:
        notes.check(Action.SET, "float32 masters", reason=_MASTERS)
    if roles.other_tensors and not context.same_dialect:
        example = roles.other_tensors[0].key
        notes.add(
            f"{len(roles.other_tensors)} tensors are neither weights nor state and keep their keys, such as {example!r}"
        )
    tensors = [
        *(carried_tensor(context, tensor, tensor.path) for tensor in roles.other_tensors),
        *(weight_tensor(context, name, tensor) for name, tensor in by_slot.get(None, {}).items()),
        *(
            state_tensor(context, slot, tensor, params[name])
            for slot, tensors in by_slot.items()
            if slot is not None
            for name, tensor in tensors.items()
        ),
        *zeros,
        *grouped.tensors,
        *(entry for entry in counters if isinstance(entry, OutputTensor)),
    ]
    items = [
        *(_item(context, blob) for blob in roles.items),
        *(entry for entry in counters if isinstance(entry, OutputItem)),
        *grouped.items,
    ]
    momenta = tuple(momentum_sentences(context, by_slot, params))
    _check_off(tensors, items, _slots(manifest, dialect, roles.left_out), momenta, notes)
    summary = (f"source: {detected}", f"target: {target.name} ({target.who})", *momenta, *_sentences(tensors, items))
    sentences = (*summary, *(f"note: {note}" for note in sorted(notes.notes)))
    return Outputs(tensors, items, (*roles.left_out, *private), sentences, sorted_checks(notes.checks))


def _refuse_unknown(manifest: Manifest, dialect: Dialect, drop: frozenset[str]) -> None:
    paths = (entry.path for entries in (manifest.tensors, manifest.blobs) for entry in entries)
    slots = {fields["slot"] for path in paths if (fields := dialect.state.read(path))}
    if missing := sorted(drop - slots):
        raise TargetError(
            f"no slot {missing[0]!r} to drop; the slots of {dialect.name} here are {', '.join(sorted(slots))}"
        )


def _refuse_unread(manifest: Manifest, dialect: Dialect, roles: Roles) -> None:
    """Refuse state that is not recognised, which would keep its keys and its convention silently."""
    keys = f"keys of {dialect.name} are like {dialect.state} and {dialect.model}"
    if not (roles.tensors or roles.counters or roles.left_out):
        entries: tuple[StateRecord | Blob, ...] = (*manifest.tensors, *manifest.blobs)
        examples = ", ".join(repr(entry.key) for entry in entries[:3])
        raise SourceError(f"found neither weights nor state: {keys}, but the checkpoint has keys such as {examples}")
    others: tuple[StateRecord | Blob, ...] = (*roles.other_tensors, *roles.items)
    for entry in others:
        known = dialect.state.read(entry.path) is not None or dialect.holds_groups(entry.path)
        if not known and (is_of_optimizer(entry.path) or getattr(entry, "slot", None) is not None):
            raise SourceError(
                f"{entry.key!r} is state of an optimizer that was not understood: {keys}; name the program with "
                "--from, or make a copy without it, by `muonckpt reshard --select`"
            )


def _refuse_opaque(roles: Roles, dialect: Dialect, target: Dialect) -> None:
    """Refuse to carry state to a program that cannot read it."""
    entries: tuple[StateRecord | Blob, ...] = (*roles.other_tensors, *roles.items)
    for entry in entries if target.opaque != dialect.opaque else ():
        if any(fnmatchcase(entry.key, glob) for glob in dialect.opaque):
            raise SourceError(
                f"{entry.key!r} is a flat bucket of an optimizer's state, and nothing in it says which parameter lies "
                f"where, so {target.name} cannot take it: save with --dist-ckpt-optim-fully-reshardable in Megatron, "
                "which writes it under names, or first make a copy without the buckets, by `muonckpt reshard --select`"
            )


def _refuse_unfit(rules: NameRules, by_slot: SlotTensors) -> None:
    tensors = [(name, tensor) for named in by_slot.values() for name, tensor in named.items()]
    matched = any(tensor.restructured or tensor.aliases != (name,) for name, tensor in tensors)
    if rules.rules and not matched:
        examples = ", ".join(sorted({name for name, _ in tensors})[:3])
        raise TargetError(
            f"no rule matches a parameter; parameters are {examples} … and the first rule is {rules.rules[0]}"
        )


def _item(context: Context, blob: Blob) -> OutputItem:
    """An item that is neither state nor an option, under the target's key for it."""
    key = blob.key if context.same_dialect else context.target.item(blob.key)
    return OutputItem(key, blob.path if key == blob.key else (key,), blob)


def _check_off(
    tensors: list[OutputTensor],
    items: list[OutputItem],
    left_out: Iterable[str],
    momenta: tuple[str, ...],
    findings: Findings,
) -> None:
    """Add what became of tensors and items to the checklist.

    ``left_out`` are the slots of what is in the source only; ``momenta`` say of the momentum what it is and why.
    """
    slots = Counter((t.record.slot or "weights and others", t.scale, t.held, t.record.dtype) for t in tensors)
    carried = Counter(tensor.record.slot or "weights and others" for tensor in tensors if not tensor.computed)
    for slot, count in carried.items():
        findings.check(Action.CARRIED, slot, counted(count, "tensor"))
    for (slot, scale, held, dtype), count in slots.items():
        if scale is not None:
            number = counted(count, "tensor")
            findings.check(Action.RESCALED, slot, number, f"times {scale!r}", reason="; ".join(momenta))
        if held is not None:
            findings.check(
                Action.RESCALED,
                slot,
                counted(count, "tensor"),
                f"from {held} to {dtype}",
                reason="" if slot == MASTER else "--state-dtype",
            )
    copied = [item.key for item in items if item.source is not None]
    if copied:
        findings.check(Action.CARRIED, "items that are no tensors", f"{len(copied)}", reason="byte for byte")
    for slot, count in Counter(left_out).items():
        findings.check(Action.LEFT, slot, f"{count} tensors or items")


def _slots(manifest: Manifest, dialect: Dialect, keys: Collection[str]) -> Iterator[str]:
    """What kind of thing each of these keys has: a slot, or weights."""
    entries: tuple[StateRecord | Blob, ...] = (*manifest.tensors, *manifest.blobs)
    for entry in entries:
        if entry.key in keys:
            yield (dialect.state.read(entry.path) or {"slot": "weights"})["slot"]


def _sentences(tensors: list[OutputTensor], items: list[OutputItem]) -> Iterator[str]:
    """Sentences that say what happens to elements and items."""
    made = [tensor.key for tensor in tensors if tensor.in_memory]
    scales = Counter(tensor.scale for tensor in tensors if tensor.scale is not None)
    moved, copied = len(tensors) - len(made), sum(item.source is not None for item in items)
    exact = moved - sum(tensor.computed for tensor in tensors)
    some = f"{exact} of them " if exact < moved else ""
    yield counted(moved, "tensor") + (f", {some}bit for bit" if exact else "")
    for scale, count in scales.items():
        noun = "momentum is" if count == 1 else "momenta are"
        yield f"{count} {noun} multiplied by {scale!r}, each element rounded once"
    if made:
        yield f"{counted(len(made), 'tensor')} not in the source, such as {made[0]}"
    if copied:
        yield f"{counted(copied, 'item')} other than tensors, byte for byte"
    if options := len(items) - copied:
        yield f"{counted(options, 'option')} of parameter groups, written in the words of the target"
