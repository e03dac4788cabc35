"""Translates a checkpoint of one program for another: parses it into a model view, and renders that.

The renderer says of what each of the target's tensors and items is made, in the target's keys and words.  It moves no
data, and reports every difference from the source.  Only the manifest and a few small values are read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from ...names.errors import SourceError
from ...names.keys import key_of
from ...names.wording import counted, listed
from ...programs.detection import confirm, detect, roots_of, target_of
from ...programs.dialect import Keys
from ...programs.signs import GROUP_MEMBERS, SOURCE_ROOTS, UNSAID, unsaid_record
from ...record.record import Manifest
from ...store.formats.torch_save.inert_pickle import Record
from ...store.open_checkpoint import OpenCheckpoint, Values
from ..engine.outputs import Action, Check, OutputItem, Outputs, OutputTensor, Topic, unchanged
from .group_writer import TargetGroups, common_members, derived_slots, translate_groups, write_groups
from .groups import WrittenOptions
from .parameters import TranslatedModel, for_target, rename
from .parse import parse, stored_groups
from .request import Request
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


def requested_outputs(source: OpenCheckpoint, request: Request) -> Outputs:
    """Return the outputs of a request made from a checkpoint, translated only if it asks for something.

    Outputs of the model alone have the target's names, and without a target the source's.

    Raises:
        SourceError, TargetError, LayoutError: as in `translate` and `unchanged`; or the model has no weights.
    """
    if not request.model_only:
        outputs = translate(source.manifest, source.values, request) if request.translates else unchanged(source)
        return outputs.tensors_only() if request.tensors_only else outputs
    # The target names weights, and decides no more: nothing has to be known of the optimizer, unless the request needs
    # it, as masters that become weights do.
    outputs = requested_outputs(source, replace(request, target=None, model_only=False))
    keys: Keys | None = None
    try:
        dialect = detect(source.manifest, request.source).dialect
        keys, target_keys = dialect.keys, target_of(request.target, dialect, source.manifest.provenance).keys
    except SourceError:
        if request.target is not None:
            raise
    # Where the program is unknown, tensors that are no state are the model's.
    tensors: list[OutputTensor] = []
    left_keys = dict.fromkeys(outputs.keys)
    for tensor in outputs.tensors:
        record = tensor.record
        reading = keys.read_weight(record.path) if keys else None
        if record.slot is None and (keys is None or reading):
            path = target_keys.write_weight(reading.name, reading.chain) if reading else record.path
            tensors.append(replace(tensor, record=replace(record, key=key_of(path), path=path)))
            del left_keys[tensor.key]
    if not tensors:
        raise SourceError(f"{source.path}: expected weights of a model under {keys and keys.model_form}, found none")
    kept_keys = {*outputs.keys} - left_keys.keys()
    reduced = outputs.reduced_to(tensors, (), kept_keys, "`model_only=True`")
    return replace(reduced, left_out=(*outputs.left_out, *left_keys))


def translate(manifest: Manifest, values: Values, choices: Request) -> Outputs:
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
    stored = stored_groups(manifest, detected.dialect, values)
    if choices.source is None:
        detected = confirm(manifest, detected, (group.options for group in stored))
    target = target_of(choices.target, detected.dialect, manifest.provenance)
    if not target.writable:
        raise SourceError(
            f"checkpoints of {target.name} can be read but not written; choose another program with `to_dialect=`"
        )
    # Parse the source into a view that is in no dialect.
    view = parse(manifest, values, detected.dialect, stored)
    # Choose what is written, under the target's names, and find the methods of its parameters in source and target.
    model = for_target(rename(view, manifest, values, detected, target, choices))
    # Write groups in the target's words, which decides its numbers of parameters, and then all in its keys.
    groups = translate_groups(model)
    state = StateWriter(model, groups.numbers)
    tensors, items = _outputs(model, groups, state)
    # Report every difference; the manifest keeps the source's roots, options that no run said, and members of groups.
    _report_meanings(model, groups.options)
    _report_losses(model)
    if not model.is_same_dialect:
        _report_change_of_program(model)
    target, findings = model.target, model.findings
    findings.programs.extend((f"source: {detected}", f"target: {target.name} ({target.who})"))
    roots = roots_of(detected.dialect) if target.name != detected.dialect.name else {}
    provenance: dict[str, object] = {SOURCE_ROOTS: roots} if roots else {}
    unsaid = {name: written.unsaid for name, written in groups.options.items() if written.unsaid}
    if unsaid or UNSAID in manifest.provenance:
        provenance[UNSAID] = unsaid_record(unsaid)
    if (members := common_members(model, groups.groups)) or GROUP_MEMBERS in manifest.provenance:
        provenance[GROUP_MEMBERS] = members
    left_out = (*model.left_out, *model.private)
    constants = tuple(state.constants.values())
    return Outputs(tensors, items, left_out=left_out, findings=findings, constants=constants, provenance=provenance)


def _outputs(
    model: TranslatedModel, groups: TargetGroups, state: StateWriter
) -> tuple[list[OutputTensor], list[OutputItem]]:
    """Return the outputs, tensors in the order of files: what only moves, weights, state by slot, counters."""
    target, stateful, stateless = model.target, model.stateful, model.stateless
    # Parameters without state stay so, unless the user wants zeros.
    filled = stateless if model.choices.fill_missing else []
    zeros = list(chain.from_iterable(map(state.zero_state, filled)))
    if stateless:
        action, subject, reason = _FILLED if filled else _WITHOUT_STATE
        model.findings.check(action, subject, *sorted(p.name for p in stateless), reason=reason)
    counters = [state.step_counter(p) for p in (*stateful, *filled) if "step" in p.target_method.slots]
    derived, of_groups = list(derived_slots(model, groups, state)), list(write_groups(model, groups))
    tensors = [moved(tensor, tensor.path) for tensor in model.tensors]
    tensors += [state.weight(p, p.weight) for p in model.parameters.values() if p.weight]
    for slot in dict.fromkeys(chain.from_iterable(parameter.slots for parameter in stateful)):
        tensors += [state.slot(parameter, slot) for parameter in stateful if slot in parameter.slots]
    tensors += [*zeros, *(entry for entry in (*of_groups, *counters, *derived) if isinstance(entry, OutputTensor))]
    # Items: the source's but for groups that are written again, counters, and options.
    derived_items = [entry for entry in derived if isinstance(entry, OutputItem)]
    items = derived_items if model.is_same_dialect else []
    group_items = [entry for entry in of_groups if isinstance(entry, OutputItem)]
    is_rewritten = any(target.holds_groups(item.path) for item in group_items)
    for blob in model.items:
        if not (is_rewritten and target.holds_groups(blob.path)):
            key = blob.key if model.is_same_dialect else target.item(blob.key)
            items.append(OutputItem(key, blob.path if key == blob.key else (key,), blob))
    items += [counter for counter in counters if isinstance(counter, OutputItem)]
    items += [replace(item, is_option=True) for item in group_items]
    return tensors, items if model.is_same_dialect else items + derived_items


# The report.


def _report_meanings(model: TranslatedModel, options: Mapping[str, WrittenOptions]) -> None:
    """Report how momentum was read and why, and differences in options, each with the parameters whose they are."""
    momenta: defaultdict[tuple[object, str], list[str]] = defaultdict(list)
    for parameter in model.stateful:
        if "momentum" in parameter.slots:
            momenta[model.convention(parameter)].append(parameter.target_method.slots["momentum"])
    for (convention, why), slots in momenta.items():
        subject = f"momentum of {len(slots)} parameters" if len(momenta) > 1 else "momentum"
        model.findings.momenta.append((slots[-1], f"{subject}: {convention or 'unknown'}, because {why}"))
    names_by_finding: defaultdict[tuple[str, Check], list[str]] = defaultdict(list)
    for name, written in options.items():
        for finding in written.findings:
            names_by_finding[model.listed[name].target_method.name, finding].append(name)
    num_parameters = Counter(parameter.target_method.name for parameter in model.listed.values())
    for (method, check), names in names_by_finding.items():
        # Parameters are named where others of the method have another value, or none to tell of.
        owners = f"{method} groups" if len(names) == num_parameters[method] else listed(sorted(names), 3)
        model.findings.checks.add((Topic.OPTIONS, replace(check, subject=f"{check.subject} of {owners}")))


def _report_losses(model: TranslatedModel) -> None:
    """Report what is left out, the number of steps if the user gives one, and matrices that rules cut."""
    target, findings, step = model.target, model.findings, model.choices.step
    for slot, count in Counter(model.left_out.values()).items():
        findings.check(Action.LEFT, slot, f"{count} tensors or items", topic=Topic.ALL)
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


def _report_change_of_program(model: TranslatedModel) -> None:
    """Report what the source's program does not say, and what runs of the target's program have to set."""
    source, target, findings = model.dialect, model.target, model.findings
    # Where no program is known, slots alone tell methods, and other programs may mean others by them.
    if not (source.unique_keys or source.marks):
        methods = Counter((p.method.name, ", ".join(p.method.slots.values())) for p in model.stateful)
        for (method, method_slots), count in methods.items():
            parameters = counted(count, "parameter")
            findings.add(f"the state of {parameters} was taken for {method} by its slots alone ({method_slots})")
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
