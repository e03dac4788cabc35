"""The report of a translation: tensors and items that moved, that were computed, or that the target cannot express."""

from __future__ import annotations

from collections import Counter, defaultdict

from ...names.wording import counted
from ...store.formats.torch_save.inert_pickle import Record
from ..engine.outputs import Action, Topic
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


def report_arguments(model: TranslatedModel) -> None:
    """Report what the arguments of the source's run say of its update, unless the target's program has the same."""
    source = model.dialect
    if source.arguments is None or model.target.arguments is source.arguments:
        return
    # They are a namespace in the program's own item, with only plain values read.
    arguments: dict[str, object] = {}
    for blob in model.manifest.blobs:
        if source.holds_groups(blob.path) or blob.path == (_ARGUMENTS,):
            state = model.values.parts(blob)
            state = state[0] if isinstance(state, list) and state else state
            namespace = state.get(_ARGUMENTS) if isinstance(state, dict) else state
            if isinstance(namespace, Record) and isinstance(namespace.state, dict):
                arguments |= namespace.state
    for subject, settings, reason in source.arguments(arguments):
        model.findings.check(Action.SET, subject, *settings, reason=reason)


def report_losses(model: TranslatedModel) -> None:
    """Report what the target's program has no use for, or what it takes to use it."""
    source, target, findings, step = model.dialect, model.target, model.findings, model.choices.step
    if model.private:
        reason = f"{target.name} has no use for them"
        findings.check(Action.LEFT, "items of the program", *model.private, reason=reason, topic=Topic.ALL)
    if step is not None:
        reason = "`step=` says so; what the source has is not read"
        findings.check(Action.SET, "the number of steps", str(step), reason=reason)
    # The parts of a matrix that rules cut are orthogonalised by themselves from now on.
    parts_by_source: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for parameter in model.listed.values():
        if parameter.regrouped and "momentum" in parameter.method.slots and parameter.matrices.is_divided:
            parts_by_source[parameter.aliases].append(parameter.name)
    for names in parts_by_source.values():
        reason = f"the source orthogonalises it as one; each part is a matrix by itself in {target.name}"
        findings.check(Action.LEFT, "a matrix that rules cut", *sorted(names), reason=reason)
    if target is source:
        return
    # Where no program is known, slots alone tell methods, and other programs may mean others by them.
    if not (source.unique_keys or source.marks):
        methods = Counter((p.method.name, ", ".join(p.method.slots.values())) for p in model.stateful)
        for (method, slots), count in methods.items():
            parameters = counted(count, "parameter")
            findings.add(f"the state of {parameters} was taken for {method} by its slots alone ({slots})")
    grouped = set[str]().union(*(members for _, members in model.groups))
    ungrouped = [parameter.name for parameter in model.stateful if parameter.listed not in grouped]
    if model.groups and ungrouped:
        reason = f"{source.name} does not say in which of its groups they are; the running optimizer's stay"
        findings.check(Action.SET, f"options of {counted(len(ungrouped), 'parameter')}", reason=reason)
    # Options by name that are those of several parameters are of one that is stored in parts.
    matrices = {parameter.listed for parameter in model.stateful if "momentum" in parameter.slots}
    for group, members in model.groups:
        if not group.positions and len(parts := sorted(matrices.intersection(members))) > 1:
            findings.check(Action.SET, "matrices that the source's optimizer takes as one", *parts, reason=_PARTS)
    if not target.private and any("master" in parameter.slots for parameter in model.stateful):
        findings.check(Action.SET, "float32 masters", reason=_MASTERS)
    if model.tensors:
        count, example = len(model.tensors), model.tensors[0].key
        findings.add(f"{count} tensors are neither weights nor state and keep their keys, such as {example!r}")
