"""Parses a checkpoint into one neutral optimizer: parameters with their weight and state, groups, and everything else.

Tensors are renamed, split and joined by rules, and put together as parameters under the target's names, with slots by
common name.  Options stay where they are stored until a group is written (:mod:`.options`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from ...box import Index
from ...errors import SourceError, TargetError
from ...record import Blob, Manifest, StateRecord
from ...store.open_checkpoint import Values
from ...vocabulary import PARAMS, Convention
from ..programs.dialect import Dialect, StoredMethod
from .conventions import Overrides, WeightsFrom, agreed_convention, spoken
from .detection import Detected, is_of_optimizer
from .groups import SourceGroup, source_groups
from .names import NameRule, NameRules
from .structure import TranslatedTensor, apply_rules

FOREIGN_OPTIONS: Mapping[str, str] = MappingProxyType({"dampening": "torch.optim.SGD, whose momentum_buffer is a sum"})
"""Options of optimizers whose state looks like that of a known method, but has another meaning."""

Entry = StateRecord | Blob


@dataclass(frozen=True, slots=True)
class NeutralParameter:
    """A parameter, under the target's name.

    Attributes:
        listed: the name by which the target's groups know it: the whole's, where rules split only tensors.
        aliases: the names by which the source's groups may know it.
        weight: its own tensor, if that is stored.
        slots: the tensors of its state, by common name.
        method: how the source updates and stores it; None if it has no state.
        group: the source's group with its options.
        step: the number of updates, if the source or the user says it.
        counter: where the source stores that.
        chains: the optimizers, as keys name them, that its state belongs to.
        stateless: whether the source has no state of it, because it never had a gradient.
    """

    name: str
    listed: str
    aliases: tuple[str, ...]
    weight: TranslatedTensor | None = None
    slots: Mapping[str, TranslatedTensor] = field(default_factory=dict)
    method: StoredMethod | None = None
    group: SourceGroup | None = None
    step: int | None = None
    counter: Entry | None = None
    chains: frozenset[str] = frozenset()
    stateless: bool = False

    @property
    def tensors(self) -> tuple[TranslatedTensor, ...]:
        """The tensors of its state, and its weight."""
        return (*self.slots.values(), *((self.weight,) if self.weight else ()))


@dataclass(frozen=True, slots=True)
class NeutralOptimizer:
    """A checkpoint's model and optimizer, in no program's words.

    Attributes:
        detected: the source's dialect, and why it is this one.
        parameters: by the target's names.
        groups: in the source's order, with ``members`` by the target's names.
        records: weights, by (None, parameter), and state, by (slot, parameter), as the source has them.
        derived: items of slots that follow from options, by the source's names of parameter and slot.
        tensors, items: what is neither weight nor state nor option, and is copied.
        left_out: the keys of what is left out, and ``private`` those of what only the source's program can use.
    """

    detected: Detected
    values: Values
    overrides: Overrides
    parameters: Mapping[str, NeutralParameter]
    groups: tuple[SourceGroup, ...]
    records: Mapping[tuple[str | None, str], StateRecord]
    derived: Mapping[str, Mapping[str, Blob]]
    tensors: tuple[StateRecord, ...]
    items: tuple[Blob, ...]
    left_out: tuple[str, ...]
    private: tuple[str, ...]

    @property
    def dialect(self) -> Dialect:
        """The source's."""
        return self.detected.dialect

    @property
    def stateful(self) -> dict[str, NeutralParameter]:
        """The parameters with state, by name."""
        return {name: param for name, param in self.parameters.items() if param.method and not param.stateless}

    @property
    def stateless(self) -> dict[str, NeutralParameter]:
        """The parameters that groups list and that have no state, where the method is known."""
        return {name: param for name, param in self.parameters.items() if param.stateless}

    def shapes(self) -> dict[str, Index]:
        """Return the shapes of parameters, by the names that groups list: of the weights, or of state."""
        shapes: dict[str, Index] = {}
        for param in self.parameters.values():
            for tensor in param.tensors:
                if math.prod(tensor.shape) >= math.prod(shapes.get(param.listed, ())):
                    shapes[param.listed] = tensor.shape
        return shapes | {p.listed: p.weight.shape for p in self.parameters.values() if p.weight}

    def convention(self, param: NeutralParameter) -> tuple[Convention | None, str]:
        """Return the convention of a parameter's momentum, and why it is this one.

        A program's convention is taken only for groups that may be the program's.

        Raises:
            SourceError: two of those that say it contradict each other, or the group contradicts the program.
        """
        assert param.method is not None
        dialect, asked, slot = self.dialect, self.overrides.convention, param.method.slots["momentum"]
        aliases = param.slots["momentum"].aliases
        parts = [self.records[slot, alias] for alias in aliases if (slot, alias) in self.records]
        recorded = {f"the manifest ({part.key})": part.convention for part in parts}
        doubt = ""  # a checkpoint without any groups, as a copy of its tensors only is, raises none
        if dialect.convention is not None and self.groups:
            in_no_group = "the parameter is in none of the groups"
            doubt = dialect.momentum_options.contradicted_by(param.group.items) if param.group else in_no_group
        own = None
        if param.group and "convention" in dialect.momentum_options.always & param.group.items.keys():
            own = Convention(self.values.read(param.group.items["convention"]))
        declared = {dialect.name: None if doubt else dialect.convention, "its group": own, "--convention": asked}
        convention = agreed_convention(f"parameter {param.name!r}", "--convention", recorded | declared)
        if any(part.convention is not None for part in parts):
            return convention, "the manifest records it"
        if doubt and asked is None:
            raise SourceError(
                f"parameter {param.name!r}: momentum of {dialect.name} is {spoken(dialect.convention)}, "
                f"but {doubt}, so another program may have written it; give --convention {Convention.EMA} or "
                f"--convention {Convention.SUM}, whichever it keeps"
            )
        if dialect.convention is not None and not doubt:
            return convention, f"that is what {dialect.name} keeps: {self.detected.reasons[-1]}"
        if asked:
            return convention, f"--convention {asked} says so"
        return convention, "nothing in the source tells, nor does --convention"

    def mu(self, param: NeutralParameter) -> float | None:
        """Return the momentum coefficient of the parameter's group, or the user's.

        Raises:
            SourceError: the group's is no number, or is not the user's.
        """
        assert param.method is not None
        option, given = param.method.options.get("momentum", ""), self.overrides.mu
        stored = self.values.read(param.group.items[option]) if param.group and option in param.group.items else None
        if stored is None:
            return given
        if not isinstance(stored, float | int):
            raise SourceError(f"parameter {param.name!r}: expected a number as {option} of its group, found {stored!r}")
        if given not in (None, stored):
            raise SourceError(f"parameter {param.name!r}: its group says {option}={stored!r}, --mu says {given!r}")
        return float(stored)


def parse(
    manifest: Manifest,
    values: Values,
    detected: Detected,
    target: Dialect,
    rules: NameRules,
    overrides: Overrides,
    drop: frozenset[str],
) -> NeutralOptimizer:
    """Parse a checkpoint.

    Args:
        target: the dialect that it will be written in: what that cannot use is left out.
        rules: from the source's names to the target's.
        drop: slots to leave out.

    Raises:
        SourceError: state is not recognised, or belongs to no method or to several; or parts of a parameter differ.
        TargetError: ``drop`` names a slot that does not exist, or no rule matches a parameter.
        LayoutError: rules do not fit the tensors, or a tensor has a hole or an overlap.
    """
    dialect = detected.dialect
    slots = {fields["slot"] for entry in entries_of(manifest) if (fields := dialect.state.read(entry.path))}
    if missing := sorted(drop - slots):
        known = ", ".join(sorted(slots))
        raise TargetError(f"no slot {missing[0]!r} to drop; the slots of {dialect.name} here are {known}")
    masters = dialect.slots_called("master")
    drop = drop | masters if overrides.weights is WeightsFrom.MODEL else drop
    left = drop if dialect is target and not rules.rules else drop | dialect.derived
    entries = _Entries.of(manifest, dialect, left)
    if overrides.weights is WeightsFrom.MASTERS:
        entries = entries.with_masters_as_weights(masters)
    _refuse_unread(manifest, dialect, entries)
    globs = dialect.opaque if dialect.opaque != target.opaque else frozenset()
    for entry in entries.others:
        if _matches(entry, globs):
            raise SourceError(
                f"{entry.key!r} is a flat bucket of an optimizer's state, and nothing in it says which parameter lies "
                f"where, so {target.name} cannot take it: save with --dist-ckpt-optim-fully-reshardable in Megatron, "
                "which writes it under names, or first make a copy without the buckets, by `muonckpt reshard --select`"
            )
    recorded = NameRules() if target.numbered else _recorded_names(manifest, dialect)
    tensors = _by_slot(entries, recorded + rules)
    if not recorded.rules:
        _refuse_unfit(rules, tensors)
    groups = source_groups(manifest, dialect, values)
    source = _Source(dialect, values, overrides, entries, {name: g for g in groups for name in g.params}, drop)
    parameters = {param.name: param for param in source.parameters(tensors)}
    groups = _with_members(groups, parameters, values)
    private = dialect.private - target.private
    return NeutralOptimizer(
        detected,
        values,
        overrides,
        parameters | source.stateless(groups, parameters),
        groups,
        entries.tensors,
        entries.derived,
        tuple(tensor for tensor in entries.other_tensors if not _matches(tensor, private)),
        tuple(item for item in entries.items if not _matches(item, private)),
        entries.left_out,
        tuple(entry.key for entry in entries.others if _matches(entry, private)),
    )


# The entries of a checkpoint by role.


def entries_of(manifest: Manifest) -> tuple[Entry, ...]:
    """Return the tensors and the items of a checkpoint."""
    return (*manifest.tensors, *manifest.blobs)


@dataclass(frozen=True, slots=True)
class _Entries:
    """The entries of a checkpoint by role; the fields are explained where `NeutralOptimizer` has them.

    ``counters`` are the step counters of parameters, by parameter and slot.
    """

    tensors: Mapping[tuple[str | None, str], StateRecord]
    counters: Mapping[str, Mapping[str, Entry]]
    other_tensors: tuple[StateRecord, ...]
    items: tuple[Blob, ...]
    left_out: tuple[str, ...]
    chains: Mapping[str, Collection[str]]
    derived: Mapping[str, Mapping[str, Blob]]

    @classmethod
    def of(cls, manifest: Manifest, dialect: Dialect, dropped: Collection[str]) -> _Entries:
        """Sort the entries of a checkpoint; ``dropped`` slots are only listed.

        Raises:
            SourceError: state other than a counter is not a tensor, or two optimizers have a parameter of one name.
        """
        steps = dialect.slots_called("step") - dialect.derived
        tensors: dict[tuple[str | None, str], StateRecord] = {}
        counters: defaultdict[str, dict[str, Entry]] = defaultdict(dict)
        chains: defaultdict[str, set[str]] = defaultdict(set)
        derived: defaultdict[str, dict[str, Blob]] = defaultdict(dict)
        other_tensors, items, left_out = list[StateRecord](), list[Blob](), list[str]()

        def copy(entry: Entry) -> None:
            if isinstance(entry, StateRecord):
                other_tensors.append(entry)
            else:
                items.append(entry)

        def add_state(entry: Entry, name: str, slot: str) -> None:
            if slot in dialect.derived and isinstance(entry, Blob):
                derived[name][slot] = entry
            if slot in dropped:
                left_out.append(entry.key)
            elif slot in steps:
                counters[name][slot] = entry
            elif slot in dialect.derived:
                copy(entry)
            elif isinstance(entry, Blob):
                raise SourceError(
                    f"expected a tensor at {entry.key!r}, found another item; leave it out with --drop {slot}"
                )
            elif (slot, name) in tensors:
                raise SourceError(
                    f"{tensors[slot, name].key!r} and {entry.key!r} are state of parameters of the same name in "
                    "different optimizers; make a copy of each with its model, by `muonckpt reshard --select`"
                )
            else:
                tensors[slot, name] = entry

        for entry in entries_of(manifest):
            if state := dialect.state.read(entry.path):
                chains[state["name"]].add(state.get("chain", ""))
                add_state(entry, state["name"], state["slot"])
            elif dialect.option is not None and dialect.option.read(entry.path):
                continue
            elif isinstance(entry, StateRecord) and (weight := dialect.model.read(entry.path)):
                tensors[None, weight["name"]] = entry
            else:
                copy(entry)
        return cls(tensors, counters, tuple(other_tensors), tuple(items), tuple(left_out), chains, derived)

    @property
    def others(self) -> tuple[Entry, ...]:
        """The tensors and items to copy."""
        return (*self.other_tensors, *self.items)

    def with_masters_as_weights(self, slots: Collection[str]) -> _Entries:
        """Return the entries with masters, which are in these slots, as weights; the model's rounded ones are left out.

        Raises:
            TargetError: there are no masters.
        """
        masters = {name: tensor for (slot, name), tensor in self.tensors.items() if slot in slots}
        if not masters:
            raise TargetError("--weights masters: the source has no float32 masters; leave it out")
        others = {(slot, name): tensor for (slot, name), tensor in self.tensors.items() if slot not in slots}
        replaced = tuple(others[None, name].key for name in masters if (None, name) in others)
        promoted = {(None, name): replace(tensor, name=None, slot=None) for name, tensor in masters.items()}
        return replace(self, tensors=others | promoted, left_out=(*self.left_out, *replaced))


def _matches(entry: Entry, globs: Collection[str]) -> bool:
    return any(fnmatchcase(entry.key, glob) for glob in globs)


def _refuse_unread(manifest: Manifest, dialect: Dialect, entries: _Entries) -> None:
    """Refuse state that is not recognised, which would keep its keys and its convention silently."""
    keys = f"keys of {dialect.name} are like {dialect.state} and {dialect.model}"
    if not (entries.tensors or entries.counters or entries.left_out):
        examples = ", ".join(repr(entry.key) for entry in entries_of(manifest)[:3])
        raise SourceError(f"found neither weights nor state: {keys}, but the checkpoint has keys such as {examples}")
    for entry in entries.others:
        known = dialect.state.read(entry.path) is not None or dialect.holds_groups(entry.path)
        if not known and (is_of_optimizer(entry.path) or getattr(entry, "slot", None) is not None):
            raise SourceError(
                f"{entry.key!r} is state of an optimizer that was not understood: {keys}; name the program with "
                "--from, or make a copy without it, by `muonckpt reshard --select`"
            )


# Names.

_BySlot = Mapping[str | None, Mapping[str, TranslatedTensor]]
"""The weights (under None) and the tensors of each slot of the source, by the target's names of parameters."""


def _recorded_names(manifest: Manifest, dialect: Dialect) -> NameRules:
    """Return rules from numbers to the names that the manifest records; none if the dialect has names."""
    names: dict[str, str] = {}
    for tensor in manifest.tensors if dialect.numbered else ():
        fields = dialect.state.read(tensor.path)
        if fields is not None and tensor.name not in (None, fields["name"]):
            names[fields["name"]] = str(tensor.name)
    return NameRules(tuple(NameRule((number,), (name,)) for number, name in names.items()))


def _by_slot(entries: _Entries, rules: NameRules) -> _BySlot:
    by_slot: defaultdict[str | None, dict[str, TranslatedTensor]] = defaultdict(dict)
    for (slot, name), tensor in entries.tensors.items():
        by_slot[slot][name] = TranslatedTensor(tensor.dtype, tensor.chunk_layout(), (tensor.chunks,), name, (name,))
    return {slot: apply_rules(rules, tensors) for slot, tensors in by_slot.items()}


def _refuse_unfit(rules: NameRules, by_slot: _BySlot) -> None:
    tensors = [(name, tensor) for named in by_slot.values() for name, tensor in named.items()]
    matched = any(tensor.restructured or tensor.aliases != (name,) for name, tensor in tensors)
    if rules.rules and not matched:
        examples = ", ".join(sorted({name for name, _ in tensors})[:3])
        raise TargetError(
            f"no rule matches a parameter; parameters are {examples} … and the first rule is {rules.rules[0]}"
        )


def _with_members(
    groups: tuple[SourceGroup, ...], parameters: Mapping[str, NeutralParameter], values: Values
) -> tuple[SourceGroup, ...]:
    """Return the groups with their parameters by the target's names; a name is in the first group with a part of it.

    Raises:
        SourceError: parts of one parameter are in groups with different options.
    """
    new_names: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for param in parameters.values():
        for alias in param.aliases:
            new_names[alias][param.listed] = None
    first: dict[str, SourceGroup] = {}
    named = []
    for group in groups:
        members = dict.fromkeys(new for name in group.params for new in new_names.get(name, {name: None}))
        for name in members.keys() & first.keys():
            for option in sorted((first[name].items.keys() | group.items.keys()) - {PARAMS}):
                one, other = (values.read(g.items[option]) if option in g.items else None for g in (first[name], group))
                if repr(one) != repr(other):
                    raise SourceError(f"parts of {name!r} are in groups with {option}={one!r} and {option}={other!r}")
        own = tuple(name for name in members if name not in first)
        first |= dict.fromkeys(own, group)
        named.append(replace(group, members=own))
    return tuple(named)


# Parameters.


@dataclass(frozen=True, slots=True)
class _Source:
    dialect: Dialect
    values: Values
    overrides: Overrides
    entries: _Entries
    group_of: Mapping[str, SourceGroup]
    dropped: Collection[str]

    def parameters(self, by_slot: _BySlot) -> Iterator[NeutralParameter]:
        """Yield the parameters that have a weight or state."""
        tensors: defaultdict[str, dict[str | None, TranslatedTensor]] = defaultdict(dict)
        for slot, named in by_slot.items():
            for name, tensor in named.items():
                tensors[name][slot] = tensor
        for name, own in tensors.items():
            aliases = tuple(dict.fromkeys(alias for tensor in own.values() for alias in tensor.aliases))
            weight = own.pop(None, None)
            listed = next(tensor.group for tensor in (*own.values(), weight) if tensor is not None)
            slots = own.keys() | {slot for alias in aliases for slot in self.entries.counters.get(alias, ())}
            param = NeutralParameter(name, listed, aliases, weight)
            yield self._with_state(param, {str(s): t for s, t in own.items()}, slots) if slots else param

    def _with_state(
        self, param: NeutralParameter, state: Mapping[str, TranslatedTensor], slots: Collection[Any]
    ) -> NeutralParameter:
        entries, name = self.entries, param.name
        group = next((self.group_of[alias] for alias in param.aliases if alias in self.group_of), None)
        if group and (foreign := next(iter(FOREIGN_OPTIONS.keys() & group.items.keys()), None)):
            raise SourceError(
                f"parameter {name!r}: its group has the option {foreign!r} of {FOREIGN_OPTIONS[foreign]}, which cannot "
                "be translated; first make a copy without its state, with `muonckpt reshard --select`"
            )
        option = self.dialect.method_option or ""
        named = self.values.read(group.items[option]) if group and option in group.items else None
        method = self.dialect.method(frozenset(slots), named, name, self.dropped)
        counter = method.slots.get("step", "")
        chains = (entries.chains[alias] for alias in param.aliases if alias in entries.chains)
        return replace(
            param,
            slots={common: state[slot] for common, slot in method.slots.items() if slot in state},
            method=method,
            group=group,
            step=self._step(param, method, group),
            counter=entries.counters.get(param.aliases[0], {}).get(counter),
            chains=frozenset().union(*chains),
        )

    def _step(self, param: NeutralParameter, method: StoredMethod, group: SourceGroup | None) -> int | None:
        slot, option, counters = method.slots.get("step", ""), method.options.get("step", ""), self.entries.counters
        stored = [counters[alias][slot] for alias in param.aliases if slot in counters.get(alias, ())]
        if not stored and group is not None and option in group.items:
            stored = [group.items[option]]
        steps = set()
        for value in map(self.values.read, stored):
            if not (isinstance(value, int | float) and value == value // 1):
                raise SourceError(f"parameter {param.name!r}: expected a whole number of steps, found {value!r}")
            steps.add(int(value))
        if len(steps) > 1:
            raise SourceError(f"parameter {param.name!r} is made of parts that have taken {sorted(steps)} steps")
        return steps.pop() if steps else self.overrides.step

    def stateless(
        self, groups: tuple[SourceGroup, ...], parameters: Mapping[str, NeutralParameter]
    ) -> dict[str, NeutralParameter]:
        """Return the parameters in groups that have no state, where an option or the group's others tell the method.

        Programs that make state at a parameter's first update save none of those that never had a gradient.
        """
        stateful = {param.listed: param for param in parameters.values() if param.method}
        stateless: dict[str, NeutralParameter] = {}
        for group in groups:
            others = [stateful[name] for name in group.members if name in stateful]
            chains = others[0].chains if others else frozenset(group.chain.values())
            lacking = [name for name in group.members if name not in stateful]
            method = self._method_of(group, others) if lacking else None
            for name in lacking if method else ():
                known = parameters.get(name, NeutralParameter(name, name, (name,)))
                stateless[name] = replace(known, method=method, group=group, step=0, chains=chains, stateless=True)
        return stateless

    def _method_of(self, group: SourceGroup, others: list[NeutralParameter]) -> StoredMethod | None:
        methods = [param.method for param in others if param.method]
        option = self.dialect.method_option or ""
        if option in group.items:
            named = self.values.read(group.items[option])  # the methods beside have masters, if there are some
            return next((method for method in (*methods, *self.dialect.methods) if method.name == named), None)
        return methods[0] if len({method.name for method in methods}) == 1 else None
