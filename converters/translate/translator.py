"""Translates a checkpoint of one program for another: parses it into a neutral optimizer, and renders that.

The renderer says of what each of the target's tensors and items is made, in the target's keys and words.  It moves no
data, and reports every difference from the source.  Only the manifest and a few small values are read.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from ...algebra.box import Box, Index
from ...algebra.layout import Fragment, Place, TensorLayout
from ...names.errors import SourceError
from ...names.keys import PARAM_GROUPS, key_of
from ...names.vocabulary import HISTORY_OPTIONS, MASTER, PARAMS, KeyPath
from ...names.wording import counted, listed
from ...programs.detection import Detected, confirm, detect, locate_dialect
from ...programs.dialect import Dialect, StoredMethod
from ...record.record import Blob, Manifest, StateRecord, no_chunks
from ...store.formats.torch_save.inert_pickle import Record
from ...store.formats.torch_save.plain_item import plain_item
from ...store.open_checkpoint import Values
from ..engine.outputs import Action, Findings, OutputItem, Outputs, OutputTensor, constant, sorted_checks
from .conventions import Overrides, agreed_convention, momentum_factor
from .groups import (
    GroupTemplate,
    SourceGroup,
    TargetGroup,
    entries_of,
    merge_equal,
    option_values,
    read_options,
    source_groups,
    write_options,
)
from .names import NameRules
from .parse import NeutralOptimizer, NeutralParameter, parse
from .structure import JoinedRows, TranslatedTensor

_AS_THE_PARAMETER = frozenset({"momentum", "first", "second"})
"""Slots, by common names, that have the shape of their parameter and begin as zeros; most keep its dtype."""

_COUNTS_TO: Mapping[str, int] = {"bfloat16": 256, "float16": 2048}
"""The number to which a counter of this dtype counts: adding one to it changes nothing."""


_FILLED = Action.SET, "state that was missing", "written as zeros; masters, where there are, as the weights"
_WITHOUT_STATE = (
    Action.LEFT,
    "no state in the source",
    "frozen, or never had a gradient, or kept by another rank that owns it and was not saved; where the target makes "
    "all state at once, --fill-missing writes zeros, and fresh=[…] of muonckpt.load lets them start anew",
)

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
        target: the dialect to write; None means the source's.
        source: the dialect of the checkpoint; None means that the keys tell.
        rules: are applied to parameters and to their state.
        drop: slots of state to leave out.
        like: the groups of the run that the result is for.

    Raises:
        SourceError: the dialect or a convention is unknown, the target has no place for some state, or two tensors or
            items would get the same key.
        TargetError: ``drop`` names a slot that does not exist, or no rule matches a parameter.
        LayoutError: rules do not fit the tensors, or a tensor has a hole or an overlap.
    """
    detected = _program(manifest, values) if source is None else locate_dialect(manifest, source)
    target = target or detected.dialect
    if not target.writable:
        raise SourceError(f"checkpoints of {target.name} can be read but not written; choose another program with --to")
    neutral = parse(manifest, values, detected, target, rules or NameRules(), overrides or Overrides(), drop)
    findings = Findings()
    renderer = _Renderer(neutral, target, like, findings)
    tensors, items = renderer.outputs()
    constants = tuple(renderer.constants.values())
    momenta: list[str] = []
    counts = Counter(neutral.convention(param) for param in neutral.stateful if "momentum" in param.slots)
    for (convention, reason), count in counts.items():
        whose = f" of {count} parameters" if len(counts) > 1 else ""
        momenta.append(f"momentum{whose}: {convention or 'unknown'}, because {reason}")
    lost = {*neutral.left_out}
    gone = (neutral.dialect.state.read(entry.path) for entry in entries_of(manifest) if entry.key in lost)
    for slot, count in Counter(fields["slot"] if fields else "weights" for fields in gone).items():
        findings.check(Action.LEFT, slot, f"{count} tensors or items")
    _report_losses(neutral, target, findings)
    _report_arguments(manifest, values, detected.dialect, target, findings)
    _check_off(tensors, items, "; ".join(momenta), findings)
    programs = f"source: {detected}", f"target: {target.name} ({target.who})"
    sentences = _sentences(tensors, items, constants)
    notes = (*programs, *momenta, *sentences, *(f"note: {note}" for note in sorted(findings.notes)))
    left_out = (*neutral.left_out, *neutral.private)
    return Outputs(tensors, items, left_out, notes, sorted_checks(findings.checks), constants)


def _program(manifest: Manifest, values: Values) -> Detected:
    """Return the program that the keys tell, and whose options the groups' values are."""
    detected = detect(manifest)
    groups = source_groups(manifest, detected.dialect, values)
    return confirm(manifest, detected, (option_values(group, values) for group in groups))


@dataclass(slots=True)
class _Renderer:
    """Writes one optimizer for one program.

    Attributes:
        like: the groups of the run that the result is for, if they are given.
        findings: gets every difference from the source.
        numbers: what keys of state have in place of names, if the target knows parameters by number.
        constants: tensors of one element that the source does not have, by dtype and bytes.
    """

    source: NeutralOptimizer
    target: Dialect
    like: GroupTemplate | None
    findings: Findings
    numbers: dict[str, str] = field(default_factory=dict)
    constants: dict[tuple[str, bytes], StateRecord] = field(default_factory=dict)
    _methods: dict[str, StoredMethod] = field(default_factory=dict)

    @property
    def same_dialect(self) -> bool:
        return self.target is self.source.dialect

    def outputs(self) -> tuple[list[OutputTensor], list[OutputItem]]:
        source, stateful, stateless = self.source, self.source.stateful, self.source.stateless
        for param in stateful:
            self.method(param)
        groups, items = self._groups()
        filled = stateless if source.overrides.fill_missing else []
        zeros = [zero for param in filled for zero in self._zero_state(param)]
        if stateless:
            action, subject, reason = _FILLED if filled else _WITHOUT_STATE
            self.findings.check(action, subject, *sorted(param.name for param in stateless), reason=reason)
        counters = [self._step_counter(p) for p in (*stateful, *filled) if "step" in self.method(p).slots]
        slots = dict.fromkeys(slot for param in stateful for slot in param.slots)
        tensors = [
            *(self._carried(tensor, tensor.path) for tensor in source.tensors),
            *(
                _made_of(self._record(None, param.weight, self.target.model.write(name=name)), param.weight)
                for name, param in source.parameters.items()
                if param.weight
            ),
            *(self._state(param, slot) for slot in slots for param in stateful if slot in param.slots),
            *zeros,
            *groups,
            *(counter for counter in counters if isinstance(counter, OutputTensor)),
        ]
        copied = ((blob.key if self.same_dialect else self.target.item(blob.key), blob) for blob in source.items)
        return tensors, [
            *(OutputItem(key, blob.path if key == blob.key else (key,), blob) for key, blob in copied),
            *(counter for counter in counters if isinstance(counter, OutputItem)),
            *items,
        ]

    def method(self, param: NeutralParameter) -> StoredMethod:
        """Return how the target stores the state of a parameter."""
        if param.name not in self._methods:
            self._methods[param.name] = param.method if self.same_dialect else self.target.writes(param.method)
        return self._methods[param.name]

    # Keys.

    def _chain(self, param: NeutralParameter) -> dict[str, str]:
        """Return the chain of a parameter, as a field of the target's keys if they have that field."""
        if not self.target.chained:
            return {}
        if len(param.chains) > 1:
            chains = sorted(param.chains)
            raise SourceError(f"parameter {param.name!r} is made of state of more than one optimizer: {chains}")
        kept = next(iter(param.chains), "") if self.target.state == self.source.dialect.state else ""
        return {"chain": self.target.chains.get(self.method(param).name, kept)}

    def _path(self, param: NeutralParameter, slot: str) -> KeyPath:
        name = param.name
        if self.numbers and name not in self.numbers:
            raise SourceError(
                f"{self.target.name} numbers the parameters of groups, and {name!r}, which has state, is in none"
            )
        return self.target.state.write(name=self.numbers.get(name, name), slot=slot, **self._chain(param))

    # Tensors.

    def _carried(self, tensor: StateRecord, path: KeyPath) -> OutputTensor:
        return OutputTensor(_under(tensor, path), tensor.chunk_layout(), (tensor.chunks,))

    def _record(self, slot: str | None, tensor: TranslatedTensor, path: KeyPath) -> StateRecord:
        """Return a record that keeps the source's fingerprint, pieces and names unless the tensor was restructured."""
        if tensor.restructured:
            return StateRecord(key_of(path), path, tensor.shape, tensor.dtype, no_chunks(len(tensor.shape)))
        return _under(self.source.records[slot, tensor.aliases[0]], path)

    def _state(self, param: NeutralParameter, common: str) -> OutputTensor:
        """Return the tensor of a slot; momentum is in the convention of the target."""
        tensor, slot = param.slots[common], self.method(param).slots[common]
        record = self._record(param.method.slots[common], tensor, self._path(param, slot))
        record = replace(record, name=param.name, slot=slot)
        wanted = (common in _AS_THE_PARAMETER and self.source.overrides.state_dtype) or tensor.dtype
        held = tensor.dtype if wanted != tensor.dtype else None
        if held is not None:
            record = replace(record, dtype=wanted, fingerprint=None)
        if common != "momentum":
            return _made_of(record, tensor, source_dtype=held)
        about = f"parameter {param.name!r}"
        source, _ = self.source.convention(param)
        says = {self.target.name: self.target.convention, "--target-convention": self.source.overrides.target}
        target = agreed_convention(about, "--target-convention", says) or source
        scale = momentum_factor(source, target, self.source.mu(param), about)
        if scale is not None and record.dtype == "float16":
            raise SourceError(
                f"{about}: its momentum is float16, in which a {source} multiplied by {scale:.4g} may overflow or "
                "vanish; keep the convention, or give --state-dtype float32"
            )
        record = replace(record, convention=target, fingerprint=record.fingerprint if scale is None else None)
        return _made_of(record, tensor, scale, held)

    def _step_counter(self, param: NeutralParameter) -> OutputTensor | OutputItem:
        """Return the step counter: the source's if it is a tensor or the dialect stays, else a new one."""
        slot = self.method(param).slots["step"]
        path = self._path(param, slot)
        counter = None if self.source.overrides.step is not None else param.counter
        if isinstance(counter, StateRecord):
            if counter.dtype == "float32" or (self.same_dialect and counter.dtype not in _COUNTS_TO):
                carried = self._carried(counter, path)
                return replace(carried, record=replace(carried.record, name=param.name, slot=slot))
            self._report_counter(counter, param.step)
        elif counter is not None and self.same_dialect:
            return OutputItem(key_of(path), path, counter)
        if param.step is None:
            raise self._unknown_steps(param)
        record = StateRecord(key_of(path), path, (), "float32", no_chunks(0), name=param.name, slot=slot)
        return self._filled(record, struct.pack("<f", param.step))

    def _filled(self, record: StateRecord, element: bytes = b"") -> OutputTensor:
        """Return a tensor of which every element has these bytes, or is zero if none are given."""
        content = record.dtype, element
        if content not in self.constants:
            self.constants[content] = constant(self.source.values.payloads, *content)
        return OutputTensor(record, _repeated(record.shape), (self.constants[content].chunks,))

    def _report_counter(self, counter: StateRecord, step: int | None) -> None:
        last = _COUNTS_TO.get(counter.dtype)
        doubt = (
            ""
            if last is None or step is None or step < last
            else (
                f"; in {counter.dtype} one more than {last} is {last} again, so the run may have taken more: "
                "if it did, give --step"
            )
        )
        self.findings.check(
            Action.SET, f"step counters in {counter.dtype}", str(step), reason=f"written in float32{doubt}"
        )

    def _unknown_steps(self, param: NeutralParameter) -> SourceError:
        return SourceError(
            f"parameter {param.name!r}: {self.target.name} stores the number of steps, which is unknown; give --step"
        )

    # Parameters without state.

    def _zero_state(self, param: NeutralParameter) -> Iterator[OutputTensor]:
        """Yield the first state of a parameter: zeros, and a master that is the weight."""
        slots = {common: slot for common, slot in self.method(param).slots.items() if common != "step"}
        unknown = [slot for common, slot in slots.items() if common not in (*_AS_THE_PARAMETER, "dion_rows", "master")]
        weight = param.weight
        if weight is None or unknown:
            why = f"not known how {', '.join(unknown)} begins" if weight else "no weight tells the shape"
            raise SourceError(
                f"parameter {param.name!r} has no state, and --fill-missing cannot write it: {why}; leave out the "
                "flag, and let the parameter start with fresh=[…] of muonckpt.load, or leave the slot out with --drop"
            )
        for common, slot in slots.items():
            path, none = self._path(param, slot), no_chunks(len(weight.shape))
            record = StateRecord(key_of(path), path, weight.shape, "float32", none, name=param.name, slot=slot)
            if common == "master":
                yield _made_of(record, weight, source_dtype=None if weight.dtype == "float32" else weight.dtype)
                continue
            own = param.method.slots[common]
            dtypes = (tensor.dtype for (other, _), tensor in self.source.records.items() if other == own)
            asked = self.source.overrides.state_dtype if common in _AS_THE_PARAMETER else None
            shape = (*weight.shape[:-1], 1) if common == "dion_rows" else weight.shape
            record = replace(record, shape=shape, dtype=asked or next(dtypes, weight.dtype))
            if common == "momentum":  # zeros are the same in any convention, so they are in that of the others
                known = self.target.convention, self.source.overrides.target, self.source.dialect.convention
                record = replace(record, convention=next(filter(None, known), None))
            yield self._filled(record)

    # Groups.

    def _groups(self) -> tuple[list[OutputTensor], list[OutputItem]]:
        source, target = self.source, self.target
        if any(target.holds_groups(item.path) for item in source.items):
            if target.chains:
                raise SourceError(f"the groups in {target.common} cannot be rewritten for {target.name}")
            self.findings.add("the common state is copied unchanged, with its groups")
            return [], []
        if not source.groups:
            self._number(())
            self.findings.add("the source does not say which parameters are in which group; no groups are written")
            return [], []
        if self.same_dialect and self.like is None:
            return self._renamed()
        by_listed = {param.listed: param for param in (*source.stateful, *source.stateless)}
        shapes, derived, groups = source.shapes(), list[OutputItem](), list[TargetGroup]()
        for group in source.groups:
            groups += self._translated(group, by_listed, shapes, derived)
        groups = merge_equal(groups)
        if self.like is not None:
            groups = self.like.arranged(groups, target, self.findings)
        if target.common is not None:
            return [], [_item(target.common, [self._common(groups, by_listed)])]
        self._number(groups)
        if f"{PARAM_GROUPS}.{{name}}.{{option}}" in str(target.option):
            self._report_schedules(groups)
        return [], [*self._items(groups), *derived]

    def _translated(
        self,
        group: SourceGroup,
        by_listed: Mapping[str, NeutralParameter],
        shapes: Mapping[str, Index],
        derived: list[OutputItem],
    ) -> Iterator[TargetGroup]:
        """Yield the target's groups for a group of the source, one for each set of options.

        Adds to ``derived`` the items of state that follow from a parameter's options and its shape.
        """
        known: dict[object, Mapping[str, object]] = {}
        members: defaultdict[str, list[str]] = defaultdict(list)
        options: dict[str, Mapping[str, object]] = {}
        steps = _steps(by_listed[name] for name in group.members if name in by_listed) or _steps(by_listed.values())
        for name in group.members:
            if name not in by_listed:
                self.findings.add(
                    f"{name} has no state, and no option says by which method; it is in no group of the target"
                )
                continue
            param, shape = by_listed[name], shapes.get(name, ())
            method = self.method(param)
            given = self.like.options_of(name) if self.like is not None else {}
            split = self._splits_unsaid(group, param, shape)
            fused = [tensor.fused for tensor in param.tensors if tensor.fused]
            joined = fused[-1] if fused and not split else None
            step = param.step if "step" in method.options else None
            if "step" in method.options and (step is None or param.stateless):  # a matrix has that of others
                if {"first", "second"} <= method.slots.keys() and not steps:
                    raise self._unknown_steps(param)
                step = max(steps, default=self.source.overrides.step or 0)
            kind = param.method.name, method.name, step, shape, split, joined, repr(given)
            if kind not in known:
                known[kind] = self._options(group, param, step, shape, given, split, joined)
            key = repr(sorted(known[kind].items()))
            members[key].append(name)
            options[key] = known[kind]
            if method.derived and (self.source.left_out or not self.same_dialect):
                common = read_options(group, self.source.dialect, param.method, self.source.values, shape).known
                values = {slot: value_of(common, shape) for slot, value_of in method.derived.items()}
                derived += (_item(self._path(param, slot), v) for slot, v in values.items() if v is not None)
        for key, names in members.items():
            yield TargetGroup(tuple(names), options[key], group.number is not None)

    def _options(
        self,
        group: SourceGroup,
        param: NeutralParameter,
        step: int | None,
        shape: Index,
        given: Mapping[str, object],
        split: bool,
        joined: JoinedRows | None,
    ) -> Mapping[str, object]:
        """Return the options of a group in the target's words; those ``given`` count where the source says nothing.

        Of rows that are ``split`` the source does not say how; what was ``joined`` is orthogonalised in its parts.
        """
        source, target, method = self.source, self.target, self.method(param)
        if param.method.shares_options_with(method):
            rescaled = source.overrides.target not in (None, source.dialect.convention)
            left_out = {PARAMS, *(target.unsaid if rescaled else ())}
            own = {option: source.values.read(item) for option, item in group.items.items() if option not in left_out}
            for coding in method.codings:
                if coding.write(coding.read({o: own[o] for o in coding.options if o in own}, shape), shape) is None:
                    said = ", ".join(f"{option}={own[option]!r}" for option in coding.options if option in own)
                    subject, reason = f"{said} of {method.name} groups", f"unknown to {target.name}"
                    self.findings.check(Action.SET, subject, reason=reason)
            return {**given, **own, **self._asked_step(method, own)}
        options = read_options(group, source.dialect, param.method, source.values, shape)
        known = dict(options.known) if step is None else {**options.known, "step": step}
        if split:
            known.pop("pieces", None)
        if joined is not None and "momentum" in param.method.slots and not known.get("pieces"):
            known["pieces"] = joined[0]
            known |= {"interleaved": joined[1]} if joined[1] > 1 else {}
        options = replace(options, known=known)
        return write_options(options, source.dialect, target, method, shape, self.findings, given)

    def _asked_step(self, method: StoredMethod, options: Collection[str]) -> dict[str, int]:
        """Return the user's number of steps as the option of a group that counts them; nothing if it has none."""
        step, option = self.source.overrides.step, method.options.get("step")
        return {} if step is None or option not in options else {str(option): step}

    def _splits_unsaid(self, group: SourceGroup, param: NeutralParameter, shape: Index) -> bool:
        """Return whether a slot that follows from the options has another value: its rows are split, unsaid.

        XTuner takes the sizes as an argument of its constructor.
        """
        source = self.source
        stored_by = (source.derived[alias] for alias in param.aliases if alias in source.derived)
        slots: Mapping[str, Blob] = next(stored_by, {})
        for slot, value_of in param.method.derived.items() if slots else ():
            options = read_options(group, source.dialect, param.method, source.values, shape)
            expected, stored = value_of(options.known, shape), source.values.item(slots[slot])
            if expected is not None and not math.isclose(stored, expected, rel_tol=1e-6):
                reason = (
                    f"{source.dialect.name} has {slot}={stored!r} and not {expected!r} of it, so its rows are split, "
                    "and no option says how: give pieces where the optimizer is made"
                )
                self.findings.check(Action.SET, f"pieces of {param.name}", reason=reason)
                return True
        return False

    def _number(self, written: Collection[TargetGroup]) -> None:
        """Number the parameters, if the target has numbers and the source has not.

        torch numbers them in the order of the run's groups, which the source's list or a template has.  Otherwise a
        number would be a guess, by which momentum would silently go to another parameter of the same shape.
        """
        source, target = self.source, self.target
        if not target.numbered or source.dialect.numbered:
            return
        groups = source.groups
        if self.like is None and not (groups and all(group.number is not None for group in groups)):
            known = "keeps options by parameter, without an order" if groups else "does not say what its groups are"
            raise SourceError(
                f"{target.name} numbers parameters in the order of the run's groups, and {source.dialect.name} "
                f"{known}; give that order with --like"
            )
        names = [name for group in written for name in group.params]
        if self.like is not None and not groups:
            names = [name for group in self.like.groups for name in group[PARAMS]]
        if lost := sorted({name for group in groups for name in group.members} - set(names)):
            raise SourceError(
                f"nothing says by which method these members of the source's groups are updated: "
                f"{listed(map(repr, lost), 1)}; so they are in no group of {target.name}, and all numbers after them "
                "would be wrong"
            )
        self.numbers = {name: str(number) for number, name in enumerate(names)}
        self.findings.check(
            Action.SET,
            "the order of parameters in the optimizer",
            *(f"{number} {name}" for name, number in self.numbers.items()),
            reason=f"{target.name} knows them by number; the run's groups must list them so",
        )

    def _report_schedules(self, groups: Iterable[TargetGroup]) -> None:
        """Report what schedulers have put into groups, which torch drops when it loads a flat state dict."""
        reason = (
            "of a flattened state dict torch loads it only into groups that have it: make the scheduler, or set any "
            "value, before loading"
        )
        for option in sorted(HISTORY_OPTIONS):
            values = {repr(group.options[option]) for group in groups if option in group.options}
            if values:
                self.findings.check(Action.SET, f"{option} of groups", *sorted(values), reason=reason)

    def _items(self, groups: list[TargetGroup]) -> Iterator[OutputItem]:
        target = self.target
        assert target.option is not None
        listed = target.option.listed
        # Of flat keys, torch takes groups with equal values for one.
        marks = [str(n) if listed else repr(sorted(group.options.items())) for n, group in enumerate(groups)]
        alike: defaultdict[str, list[str]] = defaultdict(list)
        for mark, group in zip(marks, groups, strict=True):
            alike[mark] += group.params
        for number, group in enumerate(groups):
            options = {**group.options, **({PARAMS: self._listing(group.params)} if listed else {})}
            if target.names_option:
                options[target.names_option] = alike[marks[number]]
            for name in ("",) if listed else group.params:
                fields = {"group": str(number)} if listed else {"name": name}
                for option, value in options.items():
                    yield _item(target.option.write(**fields, option=option), value)

    def _listing(self, names: tuple[str, ...]) -> list[str] | list[int]:
        return [int(self.numbers.get(name, name)) for name in names] if self.target.numbered else list(names)

    def _common(self, groups: list[TargetGroup], by_listed: Mapping[str, NeutralParameter]) -> dict[str, object]:
        """Return the optimizers' part of Megatron's common state: groups without parameters, and AdamW's step.

        The optimizer of a chain prefix is nested in dicts by its numbers: ``chained_0.`` becomes ``{0: …}``.
        """
        optimizers: defaultdict[tuple[int, ...], dict[str, Any]] = defaultdict(dict)
        for group in groups:
            params = [by_listed[name] for name in group.params if name in by_listed]
            optimizer = optimizers[tuple(map(int, re.findall("[0-9]+", self._chain(params[0])["chain"])))]
            optimizer.setdefault(PARAM_GROUPS, []).append(dict(group.options))
            adamw = (param for param in params if "first" in param.method.slots)
            for step in {param.step for param in adamw if param.step is not None}:
                if optimizer.setdefault("state", {"common_step": step}) != {"common_step": step}:
                    raise SourceError(
                        f"Megatron stores one step for an optimizer, but found {optimizer['state']} and {step}"
                    )
        state: dict[Any, Any] = {}
        for chain, optimizer in optimizers.items():
            node = state.setdefault("optimizer", {})
            for number in chain:
                node = node.setdefault(number, {})
            node["optimizer"] = optimizer
        return state

    def _renamed(self) -> tuple[list[OutputTensor], list[OutputItem]]:
        """Return the groups in the same dialect: all options unchanged, with the new names of their parameters."""
        items, tensors, template = list[OutputItem](), list[OutputTensor](), self.target.option
        assert template is not None
        counts = self.target.options_called("step") if self.source.overrides.step is not None else ()
        for group in self.source.groups:
            for option, item in group.items.items():
                if option in counts and group.number is not None:
                    items.append(_item(item.path, self.source.overrides.step))
                    continue
                if group.number is None:
                    paths = [template.write(name=name, option=option, **group.chain) for name in group.members]
                elif option == PARAMS and group.members != group.params:
                    items.append(_item(item.path, self._listing(group.members)))
                    continue
                else:
                    paths = [item.path]
                if isinstance(item, StateRecord):
                    tensors += [self._carried(item, path) for path in paths]
                else:
                    items += [OutputItem(key_of(path), path, item) for path in paths]
        return tensors, items


@lru_cache(maxsize=1024)
def _repeated(shape: Index) -> TensorLayout:
    """Return the layout of a tensor whose elements are all the one of buffer 0."""
    box = Box.of(shape)
    fragments = (Fragment(box, Place(0, 0, (0,) * box.ndim)),) if box.numel else ()
    return TensorLayout.of(shape, fragments)


def _steps(params: Iterable[NeutralParameter]) -> set[int]:
    return {param.step for param in params if param.step is not None and not param.stateless}


def _under(record: StateRecord, path: KeyPath) -> StateRecord:
    return replace(record, key=key_of(path), path=path, chunks=no_chunks(len(record.shape)), layout=None)


def _made_of(
    record: StateRecord, tensor: TranslatedTensor, scale: float | None = None, source_dtype: str | None = None
) -> OutputTensor:
    """Return the output of a tensor's elements, which are stored as ``source_dtype`` if that is another dtype."""
    return OutputTensor(record, tensor.layout, tensor.sources, scale, source_dtype)


def _item(path: KeyPath, value: object) -> OutputItem:
    return OutputItem(key_of(path), path, data=plain_item(value))


# The report.


def _report_arguments(manifest: Manifest, values: Values, source: Dialect, target: Dialect, findings: Findings) -> None:
    """Report what the arguments of the source's run say of its update, unless the target's program has the same."""
    if source.arguments is None or target.arguments is source.arguments:
        return
    stored: dict[str, object] = {}
    for blob in manifest.blobs:
        if source.holds_groups(blob.path) or blob.path == (_ARGUMENTS,):
            parts = values.parts(blob)
            parts = parts[0] if isinstance(parts, list) and parts else parts
            parts = parts.get(_ARGUMENTS) if isinstance(parts, dict) else parts
            if isinstance(parts, Record) and isinstance(parts.state, dict):  # a namespace
                stored |= parts.state
    for subject, found, reason in source.arguments(stored):
        findings.check(Action.SET, subject, *found, reason=reason)


_ARGUMENTS = "args"


def _report_losses(neutral: NeutralOptimizer, target: Dialect, findings: Findings) -> None:
    """Report what the target's program has no use for, or what it takes to use it."""
    if neutral.private:
        reason = f"{target.name} has no use for them"
        findings.check(Action.LEFT, "items of the program", *neutral.private, reason=reason)
    if neutral.overrides.step is not None:
        reason = "--step says so; what the source has is not read"
        findings.check(Action.SET, "the number of steps", str(neutral.overrides.step), reason=reason)
    if target is neutral.dialect:
        return
    if neutral.groups and (ungrouped := neutral.ungrouped):
        reason = f"{neutral.dialect.name} does not say in which of its groups they are; the running optimizer's stay"
        findings.check(Action.SET, f"options of {counted(len(ungrouped), 'parameter')}", reason=reason)
    if not target.private and any("master" in param.slots for param in neutral.stateful):
        findings.check(Action.SET, "float32 masters", reason=_MASTERS)
    if neutral.tensors:
        example = neutral.tensors[0].key
        findings.add(
            f"{len(neutral.tensors)} tensors are neither weights nor state and keep their keys, such as {example!r}"
        )


def _check_off(tensors: list[OutputTensor], items: list[OutputItem], momenta: str, findings: Findings) -> None:
    """Add to the checklist what became of tensors and items; ``momenta`` says what the momentum is, and why."""
    kinds = Counter((t.record.slot or "weights and others", t.scale, t.source_dtype, t.record.dtype) for t in tensors)
    carried = Counter(tensor.record.slot or "weights and others" for tensor in tensors if not tensor.computed)
    for slot, count in carried.items():
        findings.check(Action.CARRIED, slot, counted(count, "tensor"))
    for (slot, scale, held, dtype), count in kinds.items():
        rescaled = partial(findings.check, Action.RESCALED, slot, counted(count, "tensor"))
        if scale is not None:
            rescaled(f"times {scale!r}", reason=momenta)
        if held is not None:
            rescaled(f"from {held} to {dtype}", reason="" if slot == MASTER else "--state-dtype")
    if copied := sum(item.source is not None for item in items):
        findings.check(Action.CARRIED, "items that are no tensors", f"{copied}", reason="byte for byte")


def _sentences(tensors: list[OutputTensor], items: list[OutputItem], constants: Sequence[StateRecord]) -> Iterator[str]:
    places = {constant.chunks.place for constant in constants}
    new = [tensor.key for tensor in tensors if not places.isdisjoint(chunks.place for chunks in tensor.sources)]
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
