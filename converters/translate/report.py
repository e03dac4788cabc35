"""What a translation reports: which tensors and items moved, which were computed, and what the target cannot say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from ...names.vocabulary import MASTER
from ...names.wording import counted
from ...programs.dialect import Dialect
from ...record.record import Manifest, StateRecord
from ...store.formats.torch_save.inert_pickle import Record
from ...store.open_checkpoint import Values
from ..engine.outputs import Action, Findings, OutputItem, OutputTensor
from .parameters import TranslatedModel

_MASTERS = (
    "they stay state beside the 16-bit weights, which LayerWise takes; for Muon and a float32 model convert with "
    '`weights="masters"`, for Muon and a 16-bit model with `weights="model"` `state_dtype="bfloat16"`'
)

_PARTS = (
    "it is orthogonalised whole there, and each of its parts by itself here: join them with `rules=`, by the tables "
    "megatron-mla and megatron-swiglu for two"
)

_ARGUMENTS = "args"


def report_arguments(manifest: Manifest, values: Values, source: Dialect, target: Dialect, findings: Findings) -> None:
    """Report what the arguments of the source's run say of its update, unless the target's program has the same."""
    if source.arguments is None or target.arguments is source.arguments:
        return
    # They are a namespace in the program's own item, of which only plain values are read.
    arguments: dict[str, object] = {}
    for blob in manifest.blobs:
        if source.holds_groups(blob.path) or blob.path == (_ARGUMENTS,):
            state = values.parts(blob)
            state = state[0] if isinstance(state, list) and state else state
            namespace = state.get(_ARGUMENTS) if isinstance(state, dict) else state
            if isinstance(namespace, Record) and isinstance(namespace.state, dict):
                arguments |= namespace.state
    for subject, settings, reason in source.arguments(arguments):
        findings.check(Action.SET, subject, *settings, reason=reason)


def report_losses(model: TranslatedModel, target: Dialect, findings: Findings) -> None:
    """Report what the target's program has no use for, or what it takes to use it."""
    source = model.dialect
    if model.private:
        reason = f"{target.name} has no use for them"
        findings.check(Action.LEFT, "items of the program", *model.private, reason=reason)
    if model.overrides.step is not None:
        reason = "`step=` says so; what the source has is not read"
        findings.check(Action.SET, "the number of steps", str(model.overrides.step), reason=reason)
    if target is source:
        return
    if model.groups and (ungrouped := model.ungrouped):
        reason = f"{source.name} does not say in which of its groups they are; the running optimizer's stay"
        findings.check(Action.SET, f"options of {counted(len(ungrouped), 'parameter')}", reason=reason)
    # Options by name that are those of several parameters are of one that is stored in parts.
    matrices = {parameter.listed for parameter in model.stateful if "momentum" in parameter.slots}
    for group, members in model.groups:
        if not group.positions and len(parts := sorted(matrices.intersection(members))) > 1:
            findings.check(Action.SET, "matrices of which the source's optimizer makes one", *parts, reason=_PARTS)
    if not target.private and any("master" in parameter.slots for parameter in model.stateful):
        findings.check(Action.SET, "float32 masters", reason=_MASTERS)
    if model.tensors:
        count, example = len(model.tensors), model.tensors[0].key
        findings.add(f"{count} tensors are neither weights nor state and keep their keys, such as {example!r}")


def report_tensors(tensors: list[OutputTensor], items: list[OutputItem], momenta: str, findings: Findings) -> None:
    """Add to the checklist what became of tensors and items; ``momenta`` says what the momentum is, and why."""
    # What moved bit for bit, and what was computed, once for each slot.
    intact = Counter(tensor.record.slot or "weights and others" for tensor in tensors if not tensor.computed)
    for slot, count in intact.items():
        findings.check(Action.CARRIED, slot, counted(count, "tensor"))
    kinds = Counter((t.record.slot or "weights and others", t.scale, t.source_dtype, t.record.dtype) for t in tensors)
    for (slot, scale, source_dtype, dtype), count in kinds.items():
        rescaled = partial(findings.check, Action.RESCALED, slot, counted(count, "tensor"))
        if scale is not None:
            rescaled(f"times {scale!r}", reason=momenta)
        if source_dtype is not None:
            rescaled(f"from {source_dtype} to {dtype}", reason="" if slot == MASTER else "`state_dtype=`")
    if copied := sum(item.source is not None for item in items):
        findings.check(Action.CARRIED, "items that are no tensors", f"{copied}", reason="byte for byte")


def summary_sentences(
    tensors: list[OutputTensor], items: list[OutputItem], constants: Sequence[StateRecord]
) -> Iterator[str]:
    """Yield sentences that say how many tensors, items and options were written, and how."""
    places = {constant.chunks.place for constant in constants}
    # Tensors made of a constant are not the source's.
    new = [tensor.key for tensor in tensors if not places.isdisjoint(chunks.place for chunks in tensor.sources)]
    scales = Counter(tensor.scale for tensor in tensors if tensor.scale is not None)
    num_moved, copied = len(tensors) - len(new), sum(item.source is not None for item in items)
    exact = num_moved - sum(tensor.computed for tensor in tensors)
    share = f"{exact} of them " if exact < num_moved else ""
    yield counted(num_moved, "tensor") + (f", {share}bit for bit" if exact else "")
    for scale, count in scales.items():
        noun = "momentum is" if count == 1 else "momenta are"
        yield f"{count} {noun} multiplied by {scale!r}, each element rounded once"
    if new:
        yield f"{counted(len(new), 'tensor')} not in the source, such as {new[0]}"
    if copied:
        yield f"{counted(copied, 'item')} other than tensors, byte for byte"
    if options := len(items) - copied:
        yield f"{counted(options, 'option')} of parameter groups, written in the words of the target"
