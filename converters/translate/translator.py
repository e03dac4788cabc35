"""Translates a checkpoint of one program for another: parses it into a neutral optimizer, and renders that.

:func:`translate` needs only the manifest and a few small values; it moves no data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

from ...errors import SourceError
from ...record import Manifest
from ...store.open_checkpoint import Values
from ...vocabulary import MASTER, Convention
from ...wording import counted
from ..engine.outputs import Action, Findings, OutputItem, Outputs, OutputTensor, sorted_checks
from ..programs.dialect import Dialect
from .conventions import Overrides, spoken
from .detection import detect, named
from .groups import GroupTemplate
from .names import NameRules
from .parse import NeutralOptimizer, entries_of, parse
from .render import Renderer

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
    target = target or detected.dialect
    if not target.writable:
        raise SourceError(f"checkpoints of {target.name} can be read but not written; choose another program with --to")
    neutral = parse(manifest, values, detected, target, rules or NameRules(), overrides or Overrides(), drop)
    findings = Findings()
    tensors, items = Renderer(neutral, target, like, findings).outputs()
    momenta = tuple(_momentum_sentences(neutral))
    _report_losses(neutral, target, findings)
    lost = {*neutral.left_out}
    gone = [entry.path for entry in entries_of(manifest) if entry.key in lost]
    slots = [(neutral.dialect.state.read(path) or {"slot": "weights"})["slot"] for path in gone]
    _check_off(tensors, items, slots, momenta, findings)
    summary = (f"source: {detected}", f"target: {target.name} ({target.who})", *momenta, *_sentences(tensors, items))
    notes = (*summary, *(f"note: {note}" for note in sorted(findings.notes)))
    left_out = (*neutral.left_out, *neutral.private)
    return Outputs(tensors, items, left_out, notes, sorted_checks(findings.checks))


def _momentum_sentences(neutral: NeutralOptimizer) -> Iterator[str]:
    """Say what the source's momenta accumulate, and why."""
    momenta = (param for param in neutral.stateful.values() if "momentum" in param.slots)
    counts: Counter[tuple[Convention | None, str]] = Counter(map(neutral.convention, momenta))
    for (convention, reason), count in counts.items():
        whose = f" of {count} parameters" if len(counts) > 1 else ""
        yield f"momentum{whose}: {spoken(convention)}, because {reason}"


def _report_losses(neutral: NeutralOptimizer, target: Dialect, findings: Findings) -> None:
    """Report what the target's program has no use for, or what it takes to use it."""
    if neutral.private:
        findings.check(
            Action.LEFT, "items of the program", *neutral.private, reason=f"{target.name} has no use for them"
        )
    if target is neutral.dialect:
        return
    if not target.private and any("master" in param.slots for param in neutral.stateful.values()):
        findings.check(Action.SET, "float32 masters", reason=_MASTERS)
    if neutral.tensors:
        example = neutral.tensors[0].key
        findings.add(
            f"{len(neutral.tensors)} tensors are neither weights nor state and keep their keys, such as {example!r}"
        )


def _check_off(
    tensors: list[OutputTensor],
    items: list[OutputItem],
    left_out: Iterable[str],
    momenta: tuple[str, ...],
    findings: Findings,
) -> None:
    """Add to the checklist what became of tensors and items.

    ``left_out`` are the slots of what is in the source only; ``momenta`` say what the momentum is, and why.
    """
    kinds = Counter((t.record.slot or "weights and others", t.scale, t.held, t.record.dtype) for t in tensors)
    carried = Counter(tensor.record.slot or "weights and others" for tensor in tensors if not tensor.computed)
    for slot, count in carried.items():
        findings.check(Action.CARRIED, slot, counted(count, "tensor"))
    for (slot, scale, held, dtype), count in kinds.items():
        rescaled = partial(findings.check, Action.RESCALED, slot, counted(count, "tensor"))
        if scale is not None:
            rescaled(f"times {scale!r}", reason="; ".join(momenta))
        if held is not None:
            rescaled(f"from {held} to {dtype}", reason="" if slot == MASTER else "--state-dtype")
    copied = [item.key for item in items if item.source is not None]
    if copied:
        findings.check(Action.CARRIED, "items that are no tensors", f"{len(copied)}", reason="byte for byte")
    for slot, count in Counter(left_out).items():
        findings.check(Action.LEFT, slot, f"{count} tensors or items")


def _sentences(tensors: list[OutputTensor], items: list[OutputItem]) -> Iterator[str]:
    """Say what happens to elements and items."""
    new = [tensor.key for tensor in tensors if any(isinstance(source, bytes) for source in tensor.sources)]
    scales = Counter(tensor.scale for tensor in tensors if tensor.scale is not None)
    moved, copied = len(tensors) - len(new), sum(item.source is not None for item in items)
    exact = moved - sum(tensor.computed for tensor in tensors)
    some = f"{exact} of them " if exact < moved else ""
    yield counted(moved, "tensor") + (f", {some}bit for bit" if exact else "")
    for scale, count in scales.items():
        noun = "momentum is" if count == 1 else "momenta are"
        yield f"{count} {noun} multiplied by {scale!r}, each element rounded once"
    if new:
        yield f"{counted(len(new), 'tensor')} not in the source, such as {new[0]}"
    if copied:
        yield f"{counted(copied, 'item')} other than tensors, byte for byte"
    if options := len(items) - copied:
        yield f"{counted(options, 'option')} of parameter groups, written in the words of the target"
