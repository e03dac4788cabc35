"""Translates a checkpoint of one program for another: parses it into a model view, and renders that.

The renderer says of what each of the target's tensors and items is made, in the target's keys and words.  It moves no
data, and reports every difference from the source.  Only the manifest and a few small values are read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import chain

from ...names.errors import SourceError
from ...names.wording import counted, listed
from ...programs.detection import confirm, detect, roots_of, target_of
from ...programs.signs import GROUP_MEMBERS, SOURCE_ROOTS, UNSAID, unsaid_record
from ...record.record import Manifest
from ...store.formats.torch_save.inert_pickle import Record
from ...store.open_checkpoint import Values
from ..engine.outputs import Action, OutputItem, Outputs, OutputTensor, Topic
from .choices import TranslationChoices
from .group_writer import GroupWriter
from .parameters import TranslatedModel, translate_model
from .parse import parse, stored_groups
from .state_writer import StateWriter, moved

_MASTERS = (
    "they stay state beside the 16-bit weights, which LayerWise takes; for Muon and a float32 model convert with "
    '`weights="masters"`, for Muon and a 16-bit model with `weights="model"` `state_dtype="bfloat16"`'
)

_PARTS = (
    "it is orthogonalised whole there, and each of its parts by itself here: join them with `rules=`, by the tables "
    "megatron-mla and megatron-swiglu for two"
)

_FILLED = Action.SET, "state that was missing", "written as zeros; masters, where there are, as the weights"
_WITHOUT_STATE = (
    Action.LEFT,
    "no state in the source",
    "frozen, or never had a gradient, or kept by another rank that owns it and was not saved; where the target makes "
    "all state at once, `fill_missing=True` writes zeros, and fresh=[…] of muonckpt.load lets them start from zero",
)


def translate(manifest: Manifest, values: Values, choices: TranslationChoices) -> Outputs:
    """Translate a checkpoint to another dialect, or change names, structure or the convention in its own dialect.

    Args:
        manifest: the manifest, with payloads.

    Raises:
        SourceError: the dialect or a convention is unknown, the target has no place for some state, or two tensors or
            items would get the same key.
        TargetError: ``drop`` names a slot that does not exist, or no rule matches a parameter.
        LayoutError: rules do not fit the tensors, or a tensor has a hole or an overlap.
    """
    # Find the source's dialect: the keys tell it, unless the options of its groups cannot be that program's.
    detected = detect(manifest, choices.source)
    groups = stored_groups(manifest, detected.dialect, values)
    if choices.source is None:
        detected = confirm(manifest, detected, (group.options for group in groups))
    target = target_of(choices.target, detected.dialect, manifest.provenance)
    if not target.writable:
        raise SourceError(
            f"checkpoints of {target.name} can be read but not written; choose another program with `to_dialect=`"
        )
    # Parse the source into a view that is in no dialect, translate its names, and render it in the target's keys.
    view = parse(manifest, values, detected.dialect, groups)
    model = translate_model(view, manifest, values, detected, target, choices)
    target, findings = model.target, model.findings
    state = StateWriter(model)
    group_writer = GroupWriter(model, state)
    tensors, items = _outputs(state, group_writer)
    num_parameters = Counter(state.method(parameter).name for parameter in model.listed.values())
    for (method, check), names in group_writer.option_findings.items():
        # Parameters are named where others of the method have another value, or none to tell of.
        owners = f"{method} groups" if len(names) == num_parameters[method] else listed(sorted(names), 3)
        findings.checks.add((Topic.OPTIONS, replace(check, subject=f"{check.subject} of {owners}")))
    constants = tuple(state.constants.values())
    # Report how momentum was read, the omitted state, and options that the target cannot express.
    with_momentum = [parameter for parameter in model.stateful if "momentum" in parameter.slots]
    counts = Counter(map(model.convention, with_momentum))
    slots = {model.convention(parameter): state.method(parameter).slots["momentum"] for parameter in with_momentum}
    for (convention, reason), count in counts.items():
        subject = f"momentum of {count} parameters" if len(counts) > 1 else "momentum"
        sentence = f"{subject}: {convention or 'unknown'}, because {reason}"
        findings.momenta.append((slots[convention, reason], sentence))
    for slot, count in Counter(model.left_out.values()).items():
        findings.check(Action.LEFT, slot, f"{count} tensors or items", topic=Topic.ALL)
    _report_losses(model)
    findings.programs.extend((f"source: {detected}", f"target: {target.name} ({target.who})"))
    left_out = (*model.left_out, *model.private)
    roots = roots_of(detected.dialect) if target.name != detected.dialect.name else {}
    provenance: dict[str, object] = {SOURCE_ROOTS: roots} if roots else {}
    if group_writer.unsaid or UNSAID in manifest.provenance:
        provenance[UNSAID] = unsaid_record(group_writer.unsaid)
    if group_writer.members or GROUP_MEMBERS in manifest.provenance:
        provenance[GROUP_MEMBERS] = group_writer.members
    return Outputs(tensors, items, left_out, findings, (), constants, provenance)


def _outputs(state: StateWriter, groups: GroupWriter) -> tuple[list[OutputTensor], list[OutputItem]]:
    """Return the outputs; ``groups`` come before keys, which may have the numbers of parameters in them."""
    source, target = state.source, state.source.target
    stateful, stateless = source.stateful, source.stateless
    if target.numbered and source.dialect.numbered:
        state.numbers = {name: number for number, name in source.view.names.items()}
    # All methods before any group: the first that the target lacks is refused.
    for parameter in stateful:
        state.method(parameter)
    of_groups = groups.outputs()
    # Parameters without state stay so, unless the user wants zeros.
    filled = stateless if source.choices.fill_missing else []
    zeros = list(chain.from_iterable(map(state.zero_state, filled)))
    if stateless:
        action, subject, reason = _FILLED if filled else _WITHOUT_STATE
        source.findings.check(action, subject, *sorted(p.name for p in stateless), reason=reason)
    counters = [state.step_counter(p) for p in (*stateful, *filled) if "step" in state.method(p).slots]
    derived = list(groups.own_derived())
    # In the order of files: what only moves, weights, state by slot, counters.
    tensors = [moved(tensor, tensor.path) for tensor in source.tensors]
    tensors += [state.weight(p, p.weight) for p in source.parameters.values() if p.weight]
    for slot in dict.fromkeys(chain.from_iterable(parameter.slots for parameter in stateful)):
        tensors += [state.slot(parameter, slot) for parameter in stateful if slot in parameter.slots]
    tensors += [*zeros, *(entry for entry in (*of_groups, *counters, *derived) if isinstance(entry, OutputTensor))]
    items = [entry for entry in derived if isinstance(entry, OutputItem)]
    group_items = [entry for entry in of_groups if isinstance(entry, OutputItem)]
    is_rewritten = any(target.holds_groups(item.path) for item in group_items)
    for blob in source.items:
        if is_rewritten and target.holds_groups(blob.path):
            continue
        key = blob.key if source.is_same_dialect else target.item(blob.key)
        items.append(OutputItem(key, blob.path if key == blob.key else (key,), blob))
    items += [counter for counter in counters if isinstance(counter, OutputItem)]
    for item in group_items:
        items.append(replace(item, is_option=target.keys.read_state(item.path) is None))
    return tensors, items


def _report_losses(model: TranslatedModel) -> None:
    """Report what the target's program has no use for, what it takes to use it, and what its runs have to set."""
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
    # The arguments of the source's run are a namespace in the program's own item, with only plain values read.
    arguments: dict[str, object] = {}
    is_asked = source.arguments is not None and target.arguments is not source.arguments
    for blob in model.manifest.blobs if is_asked else ():
        if source.holds_groups(blob.path) or blob.path == ("args",):
            state = model.values.parts(blob)
            state = state[0] if isinstance(state, list) and state else state
            namespace = state.get("args") if isinstance(state, dict) else state
            if isinstance(namespace, Record) and isinstance(namespace.state, dict):
                arguments |= namespace.state
    for subject, settings, reason in source.arguments(arguments) if source.arguments and is_asked else ():
        findings.check(Action.SET, subject, *settings, reason=reason)
