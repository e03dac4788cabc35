"""Translates a checkpoint of one program for another: parses it into a model view, and renders that.

The renderer says of what each of the target's tensors and items is made, in the target's keys and words.  It moves no
data, and reports every difference from the source.  Only the manifest and a few small values are read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain

from ...names.errors import SourceError
from ...programs.detection import confirm, detect, roots_of, target_of
from ...programs.signs import GROUP_MEMBERS, SOURCE_ROOTS, UNSAID, unsaid_record
from ...record.record import Manifest
from ...store.open_checkpoint import Values
from ..engine.outputs import Action, OutputItem, Outputs, OutputTensor, Topic
from .choices import TranslationChoices
from .group_writer import GroupWriter
from .groups import checks_of
from .parameters import translate_model
from .parse import parse, stored_groups
from .report import report_arguments, report_losses
from .state_writer import StateWriter, moved

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
    for check in checks_of(group_writer.option_findings, num_parameters):
        findings.checks.add((Topic.OPTIONS, check))
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
    report_losses(model)
    report_arguments(model)
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
