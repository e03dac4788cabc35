"""Translates a checkpoint of one program for another: parses it into a model view, and renders that.

The renderer says of what each of the target's tensors and items is made, in the target's keys and words.  It moves no
data, and reports every difference from the source.  Only the manifest and a few small values are read.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any

from ...algebra.box import Box, Index
from ...algebra.layout import Fragment, Place, TensorLayout
from ...names.errors import SourceError
from ...names.keys import PARAM_GROUPS, key_of
from ...names.resumption import as_tuples
from ...names.vocabulary import FLATTEN, HISTORY_OPTIONS, PARAMS, STEP, Convention, KeyPath
from ...names.wording import listed
from ...programs.detection import confirm, detect, locate_dialect, roots_of, target_of
from ...programs.dialect import Dialect, StoredMethod
from ...programs.model_view import ParameterGroup
from ...programs.signs import GROUP_MEMBERS, SOURCE_ROOTS, UNSAID, unsaid_record
from ...record.record import Manifest, StateRecord, no_chunks
from ...store.formats.torch_save.plain_item import plain_item
from ...store.open_checkpoint import Values
from ..engine.outputs import Action, Findings, OutputItem, Outputs, OutputTensor, Topic, constant
from .conventions import Overrides, agreed_convention, momentum_factor
from .groups import (
    GroupTemplate,
    OptionFinding,
    WrittenOptions,
    checks_of,
    common_options,
    common_structure,
    restructured_options,
    write_options,
)
from .matrices import OPTIONS as STRUCTURE, UNKNOWN, Matrices
from .names import NameRules
from .parameters import TranslatedModel, TranslatedParameter, hides_pieces, translate_model
from .parse import NAMES, entries_of, merge_equal, parse, stored_groups
from .report import report_arguments, report_losses
from .structure import TranslatedTensor

_SHAPED_SLOTS = frozenset({"momentum", "first", "second"})
"""Slots, by common names, that have the shape of their parameter and begin as zeros; most keep its dtype."""

_MAX_COUNTS: Mapping[str, int] = {"bfloat16": 256, "float16": 2048}
"""The number to which a counter of this dtype counts: adding one to it changes nothing."""

_GONE = object()
"""The value of an option that a group no longer has."""

_FILLED = Action.SET, "state that was missing", "written as zeros; masters, where there are, as the weights"
_WITHOUT_STATE = (
    Action.LEFT,
    "no state in the source",
    "frozen, or never had a gradient, or kept by another rank that owns it and was not saved; where the target makes "
    "all state at once, `fill_missing=True` writes zeros, and fresh=[…] of muonckpt.load lets them start anew",
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
        target: the dialect to write; None means the source's.
        source: the dialect of the checkpoint; None means that the keys tell.
        rules: are applied to parameters and to their state.
        overrides: the user's statements where the checkpoint says nothing.
        drop: slots of state to leave out.
        like: the groups of the run that the result is for.

    Raises:
        SourceError: the dialect or a convention is unknown, the target has no place for some state, or two tensors or
            items would get the same key.
        TargetError: ``drop`` names a slot that does not exist, or no rule matches a parameter.
        LayoutError: rules do not fit the tensors, or a tensor has a hole or an overlap.
    """
    # Find the source's dialect: the keys tell it, unless the options of its groups cannot be that program's.
    if source is None:
        detected = detect(manifest)
        groups = stored_groups(manifest, detected.dialect, values)
        detected = confirm(manifest, detected, (group.options for group in groups))
    else:
        detected = locate_dialect(manifest, source)
    target = target_of(target, detected.dialect, manifest.provenance)
    if not target.writable:
        raise SourceError(
            f"checkpoints of {target.name} can be read but not written; choose another program with `to_dialect=`"
        )
    # Parse the source into a view that is in no dialect, translate its names, and render it in the target's keys.
    view = parse(manifest, values, detected.dialect)
    model = translate_model(
        view, manifest, values, detected, target, rules or NameRules(), overrides or Overrides(), drop
    )
    if target is not detected.dialect:
        target = target.with_optimizers_of(p.method.name for p in (*model.stateful, *model.stateless))
    findings = Findings()
    renderer = _Renderer(model, target, like, findings)
    tensors, items = renderer.outputs()
    renderer.report_divided()
    num_parameters = Counter(renderer.method(parameter).name for parameter in model.listed.values())
    for check in checks_of(renderer.option_findings, num_parameters):
        findings.checks.add((Topic.OPTIONS, check))
    constants = tuple(renderer.constants.values())
    # Report how momentum was read, what is left out, and what the target cannot say.
    with_momentum = [parameter for parameter in model.stateful if "momentum" in parameter.slots]
    counts = Counter(map(model.convention, with_momentum))
    slots = {model.convention(parameter): renderer.method(parameter).slots["momentum"] for parameter in with_momentum}
    for (convention, reason), count in counts.items():
        subject = f"momentum of {count} parameters" if len(counts) > 1 else "momentum"
        sentence = f"{subject}: {convention or 'unknown'}, because {reason}"
        findings.momenta.append((slots[convention, reason], sentence))
    left_out_keys = {*model.left_out}
    left_out_slots: Counter[str] = Counter()
    for entry in entries_of(manifest):
        if entry.key in left_out_keys:
            fields = model.dialect.state.read(entry.path)
            left_out_slots[fields["slot"] if fields else "weights"] += 1
    for slot, count in left_out_slots.items():
        findings.check(Action.LEFT, slot, f"{count} tensors or items", topic=Topic.ALL)
    report_losses(model, target, findings)
    report_arguments(manifest, values, detected.dialect, target, findings)
    findings.programs.extend((f"source: {detected}", f"target: {target.name} ({target.who})"))
    left_out = (*model.left_out, *model.private)
    roots = roots_of(detected.dialect) if target.name != detected.dialect.name else {}
    provenance: dict[str, object] = {SOURCE_ROOTS: roots} if roots else {}
    if renderer.unsaid or UNSAID in manifest.provenance:
        provenance[UNSAID] = unsaid_record(renderer.unsaid)
    if renderer.members or GROUP_MEMBERS in manifest.provenance:
        provenance[GROUP_MEMBERS] = renderer.members
    return Outputs(tensors, items, left_out, findings, (), constants, provenance)


@dataclass(slots=True)
class _Renderer:
    """Writes a translated model for one program.

    Attributes:
        like: the groups of the run that the result is for, if they are given.
        findings: gets every difference from the source.
        numbers: what keys of state have in place of names, if the target knows parameters by number.
        constants: tensors of one element that the source does not have, by dtype and bytes.
        option_findings: what the report says of options, by method, each with the parameters whose they are.
        members: the parameters of groups that Megatron's common state has without names, by optimizer.
        unsaid: options that are written and that the source does not say, by the parameters that groups list.
        divided: the parameters that have parts of one matrix of the source, by the names of those that it was in.
        other_names: names by which the target may list options, each with its stored names, by the first of these.
    """

    source: TranslatedModel
    target: Dialect
    like: GroupTemplate | None
    findings: Findings
    numbers: dict[str, str] = field(default_factory=dict)
    constants: dict[tuple[str, bytes], StateRecord] = field(default_factory=dict)
    other_names: dict[str, list[tuple[str, tuple[str, ...]]]] | None = None
    option_findings: dict[tuple[str, OptionFinding], list[str]] = field(default_factory=lambda: defaultdict(list))
    members: dict[str, list[list[str]]] = field(default_factory=dict)
    unsaid: dict[str, frozenset[str]] = field(default_factory=dict)
    divided: dict[tuple[str, ...], list[str]] = field(default_factory=dict)
    _methods: dict[str, StoredMethod] = field(default_factory=dict)

    @property
    def is_same_dialect(self) -> bool:
        return self.target is self.source.dialect

    def outputs(self) -> tuple[list[OutputTensor], list[OutputItem]]:
        source, stateful, stateless = self.source, self.source.stateful, self.source.stateless
        if self.target.numbered and source.dialect.numbered:
            self.numbers = {name: number for number, name in source.view.names.items()}
        # All methods before any group: the first that the target lacks is refused.
        for parameter in stateful:
            self.method(parameter)
        group_tensors, group_items = self._groups()
        # Parameters without state stay so, unless the user wants zeros.
        filled = stateless if source.overrides.fill_missing else []
        zeros = list(chain.from_iterable(map(self._zero_state, filled)))
        if stateless:
            action, subject, reason = _FILLED if filled else _WITHOUT_STATE
            self.findings.check(action, subject, *sorted(p.name for p in stateless), reason=reason)
        counters = [self._step_counter(p) for p in (*stateful, *filled) if "step" in self.method(p).slots]
        # In the order of files: what only moves, weights, state by slot, counters.
        tensors = [self._moved(tensor, tensor.path) for tensor in source.tensors]
        for name, parameter in source.parameters.items():
            if parameter.weight:
                record = self._record(None, parameter.weight, self._weight_path(name, parameter.weight))
                tensors.append(_computed(record, parameter.weight))
        for slot in dict.fromkeys(chain.from_iterable(parameter.slots for parameter in stateful)):
            tensors += [self._state(parameter, slot) for parameter in stateful if slot in parameter.slots]
        tensors += [*zeros, *group_tensors]
        tensors += [counter for counter in counters if isinstance(counter, OutputTensor)]
        derived = list(self._own_derived())
        tensors += [entry for entry in derived if isinstance(entry, OutputTensor)]
        items = [entry for entry in derived if isinstance(entry, OutputItem)]
        for blob in source.items:
            key = blob.key if self.is_same_dialect else self.target.item(blob.key)
            items.append(OutputItem(key, blob.path if key == blob.key else (key,), blob))
        items += [counter for counter in counters if isinstance(counter, OutputItem)]
        for item in group_items:
            items.append(replace(item, is_option=self.target.state.read(item.path) is None))
        return tensors, items

    def method(self, parameter: TranslatedParameter) -> StoredMethod:
        """Return how the target stores the state of a parameter."""
        if parameter.name not in self._methods:
            method = parameter.method if self.is_same_dialect else self.target.writes(parameter.method)
            self._methods[parameter.name] = method
        return self._methods[parameter.name]

    # Keys.

    def _chain(self, parameter: TranslatedParameter) -> dict[str, str]:
        """Return the chain of a parameter, as a field of the target's keys if they have that field."""
        if not self.target.chained:
            return {}
        if len(parameter.chains) > 1:
            chains = sorted(parameter.chains)
            raise SourceError(f"parameter {parameter.name!r} is made of state of more than one optimizer: {chains}")
        has_same_keys = self.target.state == self.source.dialect.state
        source_chain = next(iter(parameter.chains), "") if has_same_keys else ""
        return {"chain": source_chain or self.target.chains.get(self.method(parameter).name, "")}

    def _path(self, parameter: TranslatedParameter, slot: str) -> KeyPath:
        name = parameter.name
        if self.numbers and name not in self.numbers and not self.source.dialect.numbered:
            raise SourceError(
                f"{self.target.name} numbers the parameters of groups, and {name!r}, which has state, is in none"
            )
        return self.target.state.write(name=self.numbers.get(name, name), slot=slot, **self._chain(parameter))

    def _weight_path(self, name: str, weight: TranslatedTensor) -> KeyPath:
        """Return the path of a weight, which stays in its chunk where the target has the source's."""
        source_path = self.source.records[None, weight.aliases[0]].path
        fields = self.source.dialect.model.read(source_path) or {}
        chain_field = {"chain": fields["chain"]} if self.target.model.chained else {}
        return self.target.model.write(name=name, **chain_field)

    # Tensors.

    def _moved(self, tensor: StateRecord, path: KeyPath) -> OutputTensor:
        return OutputTensor(_record_at(tensor, path), tensor.chunk_layout(), (tensor.chunks,))

    def _record(self, slot: str | None, tensor: TranslatedTensor, path: KeyPath) -> StateRecord:
        """Return a record that keeps the source's fingerprint, pieces and names unless the tensor was restructured."""
        if tensor.restructured:
            return StateRecord(key_of(path), path, tensor.shape, tensor.dtype, no_chunks(len(tensor.shape)))
        return _record_at(self.source.records[slot, tensor.aliases[0]], path)

    def _state(self, parameter: TranslatedParameter, common: str) -> OutputTensor:
        """Return the tensor of a slot; momentum is in the convention of the target."""
        tensor, slot = parameter.slots[common], self.method(parameter).slots[common]
        record = self._record(parameter.method.slots[common], tensor, self._path(parameter, slot))
        record = replace(record, name=parameter.name, slot=slot)
        # The user may round averages; counters and rows of variances keep their dtype.
        target_dtype = (common in _SHAPED_SLOTS and self.source.overrides.state_dtype) or tensor.dtype
        source_dtype = tensor.dtype if target_dtype != tensor.dtype else None
        if source_dtype is not None:
            record = replace(record, dtype=target_dtype, fingerprint=None)
        if common != "momentum":
            return _computed(record, tensor, source_dtype=source_dtype)
        # Only momentum has a convention: between two of them all its elements are scaled.
        about, requested = f"parameter {parameter.name!r}", self.source.overrides.target
        convention, _ = self.source.convention(parameter)
        statements = {self.target.name: self.target.convention, "`target_convention=`": requested}
        target_convention = agreed_convention(about, "`target_convention=`", statements) or convention
        scale = momentum_factor(convention, target_convention, self.source.mu(parameter), about)
        self._report_convention(target_convention)
        if scale is not None and record.dtype == "float16":
            raise SourceError(
                f"{about}: its momentum is float16, in which a {convention} multiplied by {scale:.4g} may overflow or "
                'vanish; keep the convention, or give `state_dtype="float32"`'
            )
        fingerprint = record.fingerprint if scale is None else None
        record = replace(record, convention=target_convention, fingerprint=fingerprint)
        return _computed(record, tensor, scale, source_dtype)

    def _report_convention(self, convention: Convention | None) -> None:
        """Report a momentum that is written as it is, and that runs of the target's program take for another."""
        runs_keep = self.target.runs_keep
        if runs_keep in (None, convention, self.source.dialect.runs_keep):
            return
        factor = "1 / (1 - μ)" if runs_keep is Convention.EMA else "1 - μ"
        reason = f"runs of {self.target.name} keep {runs_keep}, and take it for that: "
        if convention is None:
            reason += f"if it is another, it is {factor} times what they expect; say it with `convention=`"
        else:
            reason += f'it is {factor} times what they expect; convert with `target_convention="{runs_keep}"`'
        self.findings.check(Action.SET, "the momentum's convention", convention or "unknown", reason=reason)

    def _step_counter(self, parameter: TranslatedParameter) -> OutputTensor | OutputItem:
        """Return the step counter: the source's if it is a tensor or the dialect stays, else a new one."""
        slot = self.method(parameter).slots["step"]
        path = self._path(parameter, slot)
        # The source's own counter moves as it is, where it can count on; else the number is written anew.
        counter = None if self.source.overrides.step is not None else parameter.counter
        if isinstance(counter, StateRecord):
            if counter.dtype == "float32" or (self.is_same_dialect and counter.dtype not in _MAX_COUNTS):
                tensor = self._moved(counter, path)
                return replace(tensor, record=replace(tensor.record, name=parameter.name, slot=slot))
            reason, max_count = "written in float32", _MAX_COUNTS.get(counter.dtype)
            if max_count is not None and parameter.step is not None and parameter.step >= max_count:
                reason += (
                    f"; in {counter.dtype} one more than {max_count} is {max_count} again, so the run may have taken "
                    "more: if it did, give `step=`"
                )
            self.findings.check(Action.SET, f"step counters in {counter.dtype}", str(parameter.step), reason=reason)
        elif counter is not None and self.is_same_dialect:
            return OutputItem(key_of(path), path, counter)
        if parameter.step is None:
            raise self._unknown_steps(parameter)
        record = StateRecord(key_of(path), path, (), "float32", no_chunks(0), name=parameter.name, slot=slot)
        return self._filled(record, struct.pack("<f", parameter.step))

    def _filled(self, record: StateRecord, element: bytes = b"") -> OutputTensor:
        """Return a tensor of which every element has these bytes, or is zero if none are given."""
        content = record.dtype, element
        if content not in self.constants:
            self.constants[content] = constant(self.source.values.payloads, *content)
        return OutputTensor(record, _repeated(record.shape), (self.constants[content].chunks,))

    def _unknown_steps(self, parameter: TranslatedParameter) -> SourceError:
        return SourceError(
            f"parameter {parameter.name!r}: {self.target.name} stores the number of steps, which neither its "
            "state nor its group says; give `step=`"
        )

    # Parameters without state.

    def _zero_state(self, parameter: TranslatedParameter) -> Iterator[OutputTensor]:
        """Yield the first state of a parameter: zeros, and a master that is the weight."""
        weight = parameter.weight
        slots = {common: slot for common, slot in self.method(parameter).slots.items() if common != "step"}
        unknown = [slot for common, slot in slots.items() if common not in (*_SHAPED_SLOTS, "dion_rows", "master")]
        if weight is None or unknown:
            reason = f"not known how {', '.join(unknown)} begins" if weight else "no weight tells the shape"
            raise SourceError(
                f"parameter {parameter.name!r} has no state, and `fill_missing=True` cannot write it: {reason}; leave "
                "that out, and let the parameter start with fresh=[…] of muonckpt.load, or leave the slot out with "
                "`drop=`"
            )
        overrides = self.source.overrides
        for common, slot in slots.items():
            path, chunks = self._path(parameter, slot), no_chunks(len(weight.shape))
            record = StateRecord(key_of(path), path, weight.shape, "float32", chunks, name=parameter.name, slot=slot)
            if common == "master":
                yield _computed(record, weight, source_dtype=None if weight.dtype == "float32" else weight.dtype)
                continue
            # Zeros are like the state of the others: of their dtype, and in their convention, whichever that is.
            source_slot = parameter.method.slots[common]
            dtypes = (tensor.dtype for (other, _), tensor in self.source.records.items() if other == source_slot)
            requested_dtype = overrides.state_dtype if common in _SHAPED_SLOTS else None
            shape = (*weight.shape[:-1], 1) if common == "dion_rows" else weight.shape
            record = replace(record, shape=shape, dtype=requested_dtype or next(dtypes, weight.dtype))
            if common == "momentum":
                conventions = self.target.convention, overrides.target, self.source.dialect.convention
                record = replace(record, convention=next(filter(None, conventions), None))
            yield self._filled(record)

    # Groups.

    def _groups(self) -> tuple[list[OutputTensor], list[OutputItem]]:
        source, target = self.source, self.target
        # Megatron's groups are in one item, which is copied whole or written whole.
        if any(target.holds_groups(item.path) for item in source.items):
            if target.chains:
                raise SourceError(f"the groups in {target.common} cannot be rewritten for {target.name}")
            self.findings.add("the common state is copied unchanged, with its groups")
            self.members = source.renamed_members()
            return [], []
        if not source.groups:
            self._number(())
            self.findings.add("the source does not say which parameters are in which group; no groups are written")
            return [], []
        # In the same words nothing is read: options are copied, and names in them replaced.
        if self.is_same_dialect and self.like is None:
            return self._renamed_groups()
        # In other words a group is split by what its options mean for each of its parameters.
        parameters = source.listed
        shapes, derived, groups = source.shapes(), list[OutputItem](), list[ParameterGroup]()
        for group, members in source.groups:
            groups += self._split_by_options(group, members, parameters, shapes, derived)
        groups = merge_equal(groups)
        if self.like is not None:
            groups = self.like.arrange(groups, target, self.findings)
        if target.common is not None:
            return [], [_item(target.common, [self._common_state(groups, parameters)])]
        self._number(groups)
        if f"{PARAM_GROUPS}.{{name}}.{{option}}" in str(target.option):
            self._report_schedules(groups)
        return [], [*self._option_items(groups, parameters), *derived]

    def _split_by_options(
        self,
        group: ParameterGroup,
        members: Collection[str],
        parameters: Mapping[str, TranslatedParameter],
        shapes: Mapping[str, Index],
        derived: list[OutputItem],
    ) -> Iterator[ParameterGroup]:
        """Yield the target's groups for a group of the source, one for each set of options.

        Adds to ``derived`` the items of state that follow from a parameter's options and its shape.
        """
        options_by_kind: dict[object, WrittenOptions] = {}
        names_by_options: defaultdict[str, list[str]] = defaultdict(list)
        options_by_key: dict[str, Mapping[str, object]] = {}
        # The steps that the group's parameters have counted, or else those of all.
        steps = _steps(parameters[name] for name in members if name in parameters) or _steps(parameters.values())
        for name in members:
            if name not in parameters:
                self.findings.add(
                    f"{name} has no state, and no option says by which method; it is in no group of the target"
                )
                continue
            parameter, shape = parameters[name], shapes.get(name, ())
            method = self.method(parameter)
            # Options depend on the rows that are split or joined, the number of steps and the template.
            template_options = self.like.options_of(name) if self.like is not None else {}
            matrices = self._matrices(parameter)
            step = parameter.step if "step" in method.options else None
            # Matrices do not count steps: an option that does gets the most that another parameter has counted.
            if "step" in method.options and (step is None or parameter.is_stateless):
                if {"first", "second"} <= method.slots.keys() and not steps:
                    raise self._unknown_steps(parameter)
                step = max(steps, default=self.source.overrides.step or 0)
            # Most parameters of a group are of one kind, for which options are translated once.
            is_flattened = any(tensor.flattened for tensor in parameter.slots.values())
            common_kind = parameter.method.name, method.name, step, shape, is_flattened, repr(template_options)
            unsaid = self.source.unsaid_options(parameter)
            kind = *common_kind, unsaid, matrices and (repr(matrices.options()), matrices.is_flat)
            if kind not in options_by_kind:
                options_by_kind[kind] = self._options(
                    group, parameter, step, shape, template_options, matrices, is_flattened
                )
            options = self._noted(parameter, options_by_kind[kind])
            key = repr(sorted(options.items()))
            names_by_options[key].append(name)
            options_by_key[key] = options
            # State that follows from options is not copied from the source, unless nothing changes: it is computed.
            for slot in () if self.is_same_dialect else method.derived:
                derived += self._computed_slot(parameter, slot, shape)
        for key, names in names_by_options.items():
            yield ParameterGroup(tuple(names), options_by_key[key], group.positions)

    def _matrices(self, parameter: TranslatedParameter) -> Matrices | None:
        """Return the matrices in a parameter, if not those of its options; tell of unknown ones."""
        matrices = parameter.matrices if "momentum" in parameter.method.slots else None
        if (matrices is None or not matrices.is_known) and parameter.sources:
            reasons = (hides_pieces(source, self.source.dialect, self.source.values) for source in parameter.sources)
            if reason := next(filter(None, reasons), ""):
                hint = self.source.dialect.hints.get("pieces", "give pieces where the optimizer is made")
                reason += f", and no option says how: {hint}"
                self.findings.check(Action.SET, f"pieces of {parameter.name}", reason=reason, topic=Topic.OPTIONS)
                return UNKNOWN
        if matrices is not None and matrices.options() is None:
            reason = "no options say which matrices its parts are"
            self.findings.check(Action.SET, f"pieces of {parameter.name}", reason=reason)
        if matrices is not None and matrices.is_divided:
            self.divided.setdefault(parameter.aliases, []).append(parameter.name)
        return matrices

    def _computed_slot(self, parameter: TranslatedParameter, slot: str, shape: Index) -> Iterator[OutputItem]:
        """Yield a slot that follows from a parameter's options and its shape, if they tell it."""
        group, matrices = parameter.group, self._matrices(parameter)
        if group is None or (matrices is not None and not matrices.is_known):
            return
        common = common_options(group.options, self.source.dialect, parameter.method, shape).common
        if matrices is not None:
            common = {**common, **common_structure(matrices, shape)}
        if (value := self.method(parameter).derived[slot](common, shape)) is not None:
            yield _item(self._path(parameter, slot), value)

    def _own_derived(self) -> Iterator[OutputTensor | OutputItem]:
        """Yield the slots that follow from options for the own program: the source's, but where rules change them."""
        source = self.source
        parameters_by_alias: defaultdict[str, list[TranslatedParameter]] = defaultdict(list)
        for parameter in source.parameters.values() if source.derived else ():
            for alias in parameter.aliases:
                parameters_by_alias[alias].append(parameter)
        written_paths = set[KeyPath]()
        for (name, slot), entry in source.derived.items():
            for parameter in parameters_by_alias[name]:
                path = self._path(parameter, slot)
                if path in written_paths:
                    continue
                written_paths.add(path)
                if parameter.matrices is not None:
                    yield from self._computed_slot(parameter, slot, parameter.shape)
                elif isinstance(entry, StateRecord):
                    yield self._moved(entry, path)
                else:
                    yield OutputItem(key_of(path), path, entry)

    def _options(
        self,
        group: ParameterGroup,
        parameter: TranslatedParameter,
        step: int | None,
        shape: Index,
        template_options: Mapping[str, object],
        matrices: Matrices | None,
        is_flattened: bool,
    ) -> WrittenOptions:
        """Return the options of a group in the target's words; the template's count where the source says nothing."""
        source, target, method = self.source, self.target, self.method(parameter)
        # Of one program, options keep their words; only what would tell another convention goes.
        if parameter.method.shares_options_with(method):
            is_rescaled = source.overrides.target not in (None, source.dialect.convention)
            omitted = target.unwritten_options if is_rescaled else ()
            options = {option: group.options[option] for option in group.options if option not in omitted}
            findings, unsaid = list[OptionFinding](), source.unsaid_options(parameter)
            if matrices is not None:
                restructured = restructured_options(options, target, method, matrices, shape)
                options, findings = dict(restructured.options), [*restructured.findings]
            for coding in method.codings:
                stated = {option: options[option] for option in coding.options if option in options}
                if coding.write(coding.read(stated, shape), shape) is None:
                    values = ", ".join(f"{option}={value!r}" for option, value in stated.items())
                    reason = f"unknown to {target.name}"
                    findings.append(OptionFinding(Action.SET, values, (), reason))
            requested_step, step_option = source.overrides.step, method.options.get("step")
            if requested_step is not None and step_option in options:
                options[step_option] = requested_step
            return WrittenOptions({**template_options, **options}, unsaid & options.keys(), tuple(findings))
        unsaid = source.unsaid_options(parameter)
        said_options = {option: group.options[option] for option in group.options if option not in unsaid}
        stored = common_options(said_options, source.dialect, parameter.method, shape)
        common = dict(stored.common) if step is None else {**stored.common, "step": step}
        if matrices is not None:
            common = {name: value for name, value in common.items() if name not in STRUCTURE}
            common |= common_structure(matrices, shape)
        # Momentum that is stored as a matrix was flattened, and so was one of more dims than a stack of matrices has.
        has_kernel_dims = len(shape) > 3 and FLATTEN not in stored.common and "momentum" in parameter.method.slots
        if is_flattened or has_kernel_dims:
            common[FLATTEN] = True
        stored, methods = replace(stored, common=common), (parameter.method, method)
        written = write_options(stored, source.dialect, target, methods, shape, template_options)
        if not (is_flattened or has_kernel_dims):
            return written
        evidence = "its momentum is stored as a matrix" if is_flattened else f"the parameter has {len(shape)} dims"
        reason = f"{source.dialect.name} does not say it, but {evidence}"
        flattened = OptionFinding(Action.SET, FLATTEN, ("True",), reason)
        return replace(written, findings=(*written.findings, flattened))

    def _noted(self, parameter: TranslatedParameter, written: WrittenOptions) -> Mapping[str, object]:
        """Return the options of a parameter's group; note what the report and the manifest say of them."""
        for finding in written.findings:
            self.option_findings[self.method(parameter).name, finding].append(parameter.listed)
        if written.unsaid:
            self.unsaid[parameter.listed] = written.unsaid
        return written.options

    def report_divided(self) -> None:
        """Report matrices that rules have cut, as their parts are orthogonalised by themselves from now on."""
        for parts in self.divided.values():
            names = sorted({*parts})
            reason = f"the source orthogonalises it as one; each part is a matrix by itself in {self.target.name}"
            self.findings.check(Action.LEFT, "a matrix that rules cut", *names, reason=reason)

    def _number(self, groups: Collection[ParameterGroup]) -> None:
        """Number the parameters of the target's groups, if the target has numbers and the source has not.

        torch numbers them in the order of the run's groups, which the source's list or a template has.  Otherwise a
        number would be a guess, by which momentum would silently go to another parameter of the same shape.
        """
        source, target = self.source, self.target
        if not target.numbered or source.dialect.numbered:
            return
        # The order of the run's groups has to be known.
        if self.like is None and not (source.groups and all(group.positions for group, _ in source.groups)):
            state = (
                "keeps options by parameter, without an order" if source.groups else "does not say what its groups are"
            )
            raise SourceError(
                f"{target.name} numbers parameters in the order of the run's groups, and {source.dialect.name} "
                f"{state}; give that order with `like=`"
            )
        names = list(chain.from_iterable(group.parameters for group in groups))
        if self.like is not None and not source.groups:
            names = list(chain.from_iterable(template[PARAMS] for template in self.like.groups))
        members = set[str]().union(*(members for _, members in source.groups))
        if ungrouped := sorted(members - set(names)):
            raise SourceError(
                f"nothing says by which method these members of the source's groups are updated: "
                f"{listed(map(repr, ungrouped), 1)}; so they are in no group of {target.name}, and all numbers after "
                "them would be wrong"
            )
        # From here on keys of state have numbers.
        self.numbers = {name: str(number) for number, name in enumerate(names)}
        self.findings.check(
            Action.SET,
            "the order of parameters in the optimizer",
            *(f"{number} {name}" for name, number in self.numbers.items()),
            reason=f"{target.name} knows them by number; the run's groups must list them so",
        )

    def _report_schedules(self, groups: Iterable[ParameterGroup]) -> None:
        """Report what schedulers have put into groups, which torch drops when it loads a flat state dict."""
        reason = (
            "of a flattened state dict torch loads it only into groups that have it: make the scheduler, or set any "
            "value, before loading"
        )
        for option in sorted(HISTORY_OPTIONS):
            values = {repr(group.options[option]) for group in groups if option in group.options}
            if values:
                self.findings.check(
                    Action.SET, f"{option} of groups", *sorted(values), reason=reason, topic=Topic.OPTIONS
                )

    def _option_items(
        self, groups: list[ParameterGroup], parameters: Mapping[str, TranslatedParameter]
    ) -> list[OutputItem]:
        target, items = self.target, list[OutputItem]()
        assert target.option is not None
        is_list = target.option.listed
        # Of flat keys, torch takes groups with equal values for one.
        names_by_values: defaultdict[str, list[str]] = defaultdict(list)
        for group in groups:
            names_by_values[repr(sorted(group.options.items()))] += group.parameters
        for number, group in enumerate(groups):
            options = dict(group.options)
            if is_list:
                options[PARAMS] = self._listing(group.parameters)
            if target.names_option:
                same_names = names_by_values[repr(sorted(group.options.items()))]
                options[target.names_option] = list(group.parameters) if is_list else same_names
            places: list[dict[str, str]] = [{"group": str(number)}] if is_list else []
            # What is listed by name stands in the optimizer of each parameter.
            names_by_chain: defaultdict[str, list[str]] = defaultdict(list)
            for name in () if is_list else group.parameters:
                names_by_chain[self._chain(parameters[name]).get("chain", "")].append(name)
            for chain_name, names in names_by_chain.items():
                chain_field = {"chain": chain_name} if target.chained else {}
                places += [{"name": name, **chain_field} for name in self._listed_names(names)]
            for place in places:
                for option, value in options.items():
                    items.append(_item(target.option.write(**place, option=option), value))
        return items

    def _listed_names(self, members: Sequence[str]) -> list[str]:
        """Return the names under which the target may look up the options of a group's members; it reads them all."""
        if self.other_names is None:
            self.other_names = defaultdict(list)
            names_in_groups = (parameter.listed for parameter in self.source.parameters.values())
            for name, parts in self.target.listed_names((*self.source.parameters, *names_in_groups)).items():
                self.other_names[parts[0]].append((name, parts))
        names = [*members]
        for member in members:
            names += [name for name, parts in self.other_names.get(member, ()) if {*parts} <= {*members}]
        return names

    def _listing(self, names: tuple[str, ...]) -> list[str] | list[int]:
        return [int(self.numbers.get(name, name)) for name in names] if self.target.numbered else list(names)

    def _common_state(
        self, groups: list[ParameterGroup], parameters: Mapping[str, TranslatedParameter]
    ) -> dict[str, object]:
        """Return the optimizers' part of Megatron's common state: groups without parameters, and AdamW's step.

        The optimizer of a chain prefix is nested in dicts by its numbers: ``chained_0.`` becomes ``{0: …}``.
        """
        # The optimizer of each chain, with its groups, and the step that AdamW counts for all parameters.
        optimizers: defaultdict[tuple[int, ...], dict[str, Any]] = defaultdict(dict)
        methods_by_chain: defaultdict[str, set[str]] = defaultdict(set)
        for group in groups:
            members = [parameters[name] for name in group.parameters if name in parameters]
            numbers = re.findall("[0-9]+", self._chain(members[0])["chain"])
            optimizer = optimizers[tuple(map(int, numbers))]
            methods_by_chain[self._chain(members[0])["chain"]] |= {self.method(member).name for member in members}
            optimizer.setdefault(PARAM_GROUPS, []).append(dict(group.options))
            self.members.setdefault(self._chain(members[0])["chain"], []).append([*group.parameters])
            adamw = (parameter for parameter in members if "first" in parameter.method.slots)
            for step in {parameter.step for parameter in adamw if parameter.step is not None}:
                if optimizer.setdefault("state", {"common_step": step}) != {"common_step": step}:
                    raise SourceError(
                        f"Megatron stores one step for an optimizer, but found {optimizer['state']} and {step}"
                    )
        for chain_prefix, methods in methods_by_chain.items():
            if chain_prefix and len(methods) > 1:
                raise SourceError(
                    f"{' and '.join(sorted(methods))} would both be {chain_prefix[:-1]} of {self.target.name}, and "
                    "Megatron steps all of one optimizer by one method; convert a copy without the state of one of "
                    "them, by `select=`"
                )
        # Nested as Megatron nests optimizers in each other.
        state: dict[Any, Any] = {}
        for numbers_of_chain, optimizer in optimizers.items():
            node = state.setdefault("optimizer", {})
            for number in numbers_of_chain:
                node = node.setdefault(number, {})
            node["optimizer"] = optimizer
        return state

    def _renamed_groups(self) -> tuple[list[OutputTensor], list[OutputItem]]:
        """Return the groups in the same dialect: all options unchanged, with the new names of their parameters."""
        items, tensors, template = list[OutputItem](), list[OutputTensor](), self.target.option
        assert template is not None
        step = self.source.overrides.step
        step_options = self.target.options_called("step") | {STEP} if step is not None else ()
        counted_by_groups = {p.listed for p in self.source.stateful if _is_counted_by_group(p)}
        num_added: defaultdict[str, int] = defaultdict(int)
        for group, members in self.source.groups:
            for number, (names, changes) in enumerate(self._split_by_structure(group, members)):
                # Groups that a list gets in addition move those behind them.
                num_added[group.chain] += number > 0
                places = [{"group": str(position + num_added[group.chain])} for position in group.positions]
                places = places or [{"name": name} for name in self._listed_names(names)]
                if template.chained:
                    places = [{**place, "chain": group.chain} for place in places]
                # What has changed is written again; all else is copied, for each name where it is by name.
                for option in {**group.entries, **changes}:
                    paths = [template.write(**place, option=option) for place in places]
                    entry = group.entries.get(option)
                    if option in changes:
                        items += [_item(path, changes[option]) for path in paths if changes[option] is not _GONE]
                    elif option in step_options:
                        items += [_item(path, step) for path in paths]
                    elif isinstance(entry, StateRecord):
                        tensors += [self._moved(entry, path) for path in paths]
                    else:
                        items += [OutputItem(key_of(path), path, entry) for path in paths]
                # The user's number of steps goes where AdamW looks for it, if it has no counters.
                counted_names = set(self._listed_names([name for name in names if name in counted_by_groups]))
                if step is not None and counted_names and STEP not in group.entries:
                    counted = [place for place in places if place.get("name", "") in {*counted_names, ""}]
                    items += [_item(template.write(**place, option=STEP), step) for place in counted]
        return tensors, items

    def _split_by_structure(
        self, group: ParameterGroup, members: tuple[str, ...]
    ) -> Iterator[tuple[tuple[str, ...], dict[str, object]]]:
        """Yield the members of a group that share what rules change in its options, with these changes."""
        changes_by_text, names_by_text = dict[str, dict[str, object]](), defaultdict[str, list[str]](list)
        for name in members:
            parameter, changes = self.source.listed.get(name), dict[str, object]()
            if parameter is not None and (unsaid := self.source.unsaid_options(parameter)):
                self.unsaid[name] = unsaid & group.options.keys()
            matrices = self._matrices(parameter) if parameter and parameter.matrices is not None else None
            if parameter is not None and matrices is not None:
                options = {option: group.options[option] for option in group.entries if option != PARAMS}
                written = restructured_options(options, self.target, parameter.method, matrices, parameter.shape)
                restructured = self._noted(parameter, written)
                for option in options.keys() | restructured.keys():
                    value = restructured.get(option, _GONE)
                    if repr(as_tuples(value)) != repr(as_tuples(options.get(option, _GONE))):
                        changes[option] = value
            text = repr(sorted(changes.items()))
            changes_by_text[text] = changes
            names_by_text[text].append(name)
        for text, names in names_by_text.items() or [("[]", [])]:
            changes = changes_by_text.get(text, {})
            if group.positions and tuple(names) != group.parameters:
                changes = {**changes, PARAMS: self._listing(tuple(names))}
            if NAMES in group.entries and self.source.new_names:
                changes = {**changes, NAMES: self._new_names(group, names)}
            yield tuple(names), changes

    def _new_names(self, group: ParameterGroup, members: Sequence[str]) -> list[str]:
        """Return the names that a group lists once more, after rules: its members', or all of a group with them."""
        stored_names, new_names = group.options[NAMES], self.source.new_names
        if {*stored_names} <= {*group.parameters}:
            return [*members]
        return [*dict.fromkeys(chain.from_iterable(new_names.get(name, (name,)) for name in stored_names))]


def _is_counted_by_group(parameter: TranslatedParameter) -> bool:
    return {"first", "second"} <= parameter.slots.keys() and STEP not in parameter.method.slots


def _steps(parameters: Iterable[TranslatedParameter]) -> set[int]:
    return {p.step for p in parameters if p.step is not None and not p.is_stateless}


@lru_cache(maxsize=1024)
def _repeated(shape: Index) -> TensorLayout:
    """Return the layout of a tensor whose elements are all the one of buffer 0."""
    box = Box.of(shape)
    fragments = (Fragment(box, Place(0, 0, (0,) * box.ndim)),) if box.numel else ()
    return TensorLayout.of(shape, fragments)


def _record_at(record: StateRecord, path: KeyPath) -> StateRecord:
    return replace(record, key=key_of(path), path=path, chunks=no_chunks(len(record.shape)), layout=None)


def _computed(
    record: StateRecord, tensor: TranslatedTensor, scale: float | None = None, source_dtype: str | None = None
) -> OutputTensor:
    """Return the output of a tensor's elements, which are stored as ``source_dtype`` if that is another dtype."""
    return OutputTensor(record, tensor.layout, tensor.sources, scale, source_dtype)


def _item(path: KeyPath, value: object) -> OutputItem:
    return OutputItem(key_of(path), path, data=plain_item(value))
