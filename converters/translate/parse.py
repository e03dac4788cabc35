"""Parses a checkpoint into one neutral optimizer: parameters with their weight and state, groups, and everything else.

Tensors are renamed, split and joined by rules, and put together as parameters under the target's names, with slots by
common name.  Options stay where they are stored until a group is written.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from ...algebra.box import Index
from ...names.errors import SourceError, TargetError
from ...names.vocabulary import PARAMS, STEP, Convention
from ...names.wording import listed
from ...programs.detection import Detected, is_of_optimizer
from ...programs.dialect import FOREIGN, Dialect, StoredMethod
from ...record.record import Blob, Manifest, StateRecord
from ...store.open_checkpoint import Values
from ..engine.outputs import unnamed_state
from .conventions import Overrides, WeightsFrom, agreed_convention
from .groups import Entry, SourceGroup, entries_of, option_values, source_groups, with_recorded_names
from .names import NameRules
from .structure import TranslatedTensor, apply_rules

_NO_METHOD = StoredMethod("none", {})


@dataclass(frozen=True, slots=True)
class NeutralParameter:
    """A parameter, under the target's name.

    Attributes:
        listed: the name by which the target's groups know it: the whole's, where rules split only tensors.
        aliases: the names by which the source's groups may know it.
        weight: its own tensor, if that is stored.
        slots: the tensors of its state, by common name.
        method: how the source updates and stores it, if that is known.
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
    method: StoredMethod = _NO_METHOD
    group: SourceGroup | None = None
    step: int | None = None
    counter: Entry | None = None
    chains: frozenset[str] = frozenset()
    stateless: bool = False

    @property
    def stateful(self) -> bool:
        return self.method is not _NO_METHOD and not self.stateless

    @property
    def tensors(self) -> tuple[TranslatedTensor, ...]:
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
        return self.detected.dialect

    @property
    def stateful(self) -> list[NeutralParameter]:
        return [param for param in self.parameters.values() if param.stateful]

    @property
    def stateless(self) -> list[NeutralParameter]:
        """The parameters that groups list and that have no state, where the method is known."""
        return [param for param in self.parameters.values() if param.stateless]

    @property
    def ungrouped(self) -> list[str]:
        """The names of parameters with state that are in no group, where the source does not say whose groups are."""
        grouped = {name for group in self.groups for name in group.members}
        return [param.name for param in self.stateful if param.listed not in grouped]

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
        """
        dialect, asked, slot = self.dialect, self.overrides.convention, param.method.slots["momentum"]
        aliases = param.slots["momentum"].aliases
        parts = [self.records[slot, alias] for alias in aliases if (slot, alias) in self.records]
        recorded = {f"the manifest ({part.key})": part.convention for part in parts}
        doubt = ""  # a checkpoint without any groups, as a copy of its tensors only is, raises none
        if dialect.convention is not None and self.groups:
            in_no_group = "the parameter is in none of the groups"
            doubt = self._doubt(param.group) if param.group else in_no_group
        written = "convention" in dialect.options.always
        own = _option(param.group, "convention", self.values) if written else None
        declared = {
            dialect.name: None if doubt else dialect.convention,
            "its group": None if own is None else Convention(own),
            "--convention": asked,
        }
        convention = agreed_convention(f"parameter {param.name!r}", "--convention", recorded | declared)
        if any(part.convention is not None for part in parts):
            return convention, "the manifest records it"
        if doubt and asked is None:
            raise SourceError(
                f"parameter {param.name!r}: momentum of {dialect.name} is {dialect.convention or 'unknown'}, "
                f"but {doubt}, so another program may have written it; give --convention {Convention.EMA} or "
                f"--convention {Convention.SUM}, whichever it keeps"
            )
        if dialect.convention is not None and not doubt:
            return convention, f"that is what {dialect.name} keeps: {self.detected.reasons[-1]}"
        if asked:
            return convention, f"--convention {asked} says so"
        return convention, "nothing in the source tells, nor does --convention"

    def _doubt(self, group: SourceGroup) -> str:
        """Say why a group with momentum is not the program's; empty if it may be."""
        table = self.dialect.options
        if doubt := table.contradicted_by(group.items):
            return doubt
        options = option_values(group, self.values) if table.closed else {}
        misfits = (f"{name}={options[name]!r}, not {kind}" for name, kind in table.misfits(options).items())
        return next((f"the group has {misfit} as the program does" for misfit in misfits), "")

    def mu(self, param: NeutralParameter) -> float | None:
        """Return the momentum coefficient of the parameter's group, or the user's."""
        option, given = param.method.options.get("momentum", ""), self.overrides.mu
        stored = _option(param.group, option, self.values)
        if stored is None:
            return given
        if not isinstance(stored, float | int):
            raise SourceError(f"parameter {param.name!r}: expected a number as {option} of its group, found {stored!r}")
        if given not in (None, stored):
            raise SourceError(f"parameter {param.name!r}: its group says {option}={stored!r}, --mu says {given!r}")
        return float(stored)


def _option(group: SourceGroup | None, name: str | None, values: Values) -> Any:
    return values.read(group.items[name]) if group and name and name in group.items else None


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
    if overrides.weights is WeightsFrom.MODEL:
        drop |= dialect.slots_called("master")
    left = drop if dialect is target and not rules.rules else drop | dialect.derived
    groups, names = source_groups(manifest, dialect, values), dict[str, str]()
    if dialect.numbered and not target.numbered:
        groups, names = with_recorded_names(groups, values)
        names |= _recorded_names(manifest, dialect)
        groups = tuple(replace(group, params=tuple(names.get(n, n) for n in group.params)) for group in groups)
    entries = _Entries(dialect, left, names)
    entries.sort(entries_of(manifest))
    if overrides.weights is WeightsFrom.MASTERS:
        entries.make_masters_weights()
    _refuse_unread(manifest, dialect, entries)
    globs = dialect.opaque if dialect.opaque != target.opaque else frozenset()
    for entry in entries.others:
        if _matches(entry, globs):
            raise SourceError(
                f"{entry.key!r} is a flat bucket of an optimizer's state, and nothing in it says which parameter lies "
                f"where, so {target.name} cannot take it: save with --dist-ckpt-optim-fully-reshardable in Megatron, "
                "which writes it under names, or first make a copy without the buckets, by `muonckpt convert --select`"
            )
    parser = _Parser(dialect, values, overrides, entries, {name: g for g in groups for name in g.params}, drop)
    parameters = parser.parameters(rules, must_match=not names)
    if dialect.numbered and not target.numbered:
        _refuse_numbers(manifest, parameters, {*names.values()})
    groups = _with_members(groups, parameters, values)
    private = dialect.private - target.private
    kept = [entry for entry in entries.others if not _matches(entry, private)]
    return NeutralOptimizer(
        detected,
        values,
        overrides,
        parameters | parser.stateless(groups, parameters),
        groups,
        entries.tensors,
        entries.derived,
        tuple(entry for entry in kept if isinstance(entry, StateRecord)),
        tuple(entry for entry in kept if isinstance(entry, Blob)),
        tuple(entries.left_out),
        tuple(entry.key for entry in entries.others if _matches(entry, private)),
    )


# The entries of a checkpoint by role.


@dataclass(slots=True)
class _Entries:
    """Collects the entries of a checkpoint by role; ``dropped`` slots are only listed, in ``left_out``.

    ``counters`` are step counters, by parameter and slot; ``others`` are neither weights nor state nor options.
    ``names`` are those of parameters by number, where the keys have numbers.
    """

    dialect: Dialect
    dropped: Collection[str]
    names: Mapping[str, str]
    tensors: dict[tuple[str | None, str], StateRecord] = field(default_factory=dict)
    counters: defaultdict[str, dict[str, Entry]] = field(default_factory=lambda: defaultdict(dict))
    chains: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    derived: defaultdict[str, dict[str, Blob]] = field(default_factory=lambda: defaultdict(dict))
    others: list[Entry] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def sort(self, entries: Iterable[Entry]) -> None:
        """Add these entries."""
        dialect = self.dialect
        steps = dialect.slots_called("step") - dialect.derived
        for entry in entries:
            if state := dialect.state.read(entry.path):
                name = self.names.get(state["name"], state["name"])
                self.chains[name].add(state.get("chain", ""))
                self._add_state(entry, name, state["slot"], steps)
            elif dialect.option is not None and dialect.option.read(entry.path):
                continue
            elif isinstance(entry, StateRecord) and (weight := dialect.model.read(entry.path)):
                self.tensors[None, weight["name"]] = entry
            else:
                self.others.append(entry)

    def _add_state(self, entry: Entry, name: str, slot: str, steps: Collection[str]) -> None:
        if slot in self.dialect.derived and isinstance(entry, Blob):
            self.derived[name][slot] = entry
        if slot in self.dropped:
            self.left_out.append(entry.key)
        elif slot in steps:
            self.counters[name][slot] = entry
        elif slot in self.dialect.derived:
            self.others.append(entry)
        elif isinstance(entry, Blob):
            raise SourceError(
                f"expected a tensor at {entry.key!r}, found another item; leave it out with --drop {slot}"
            )
        elif (slot, name) in self.tensors:
            raise SourceError(
                f"{self.tensors[slot, name].key!r} and {entry.key!r} are state of parameters of the same name in "
                "different optimizers; make a copy of each with its model, by `muonckpt convert --select`"
            )
        else:
            self.tensors[slot, name] = entry

    def make_masters_weights(self) -> None:
        """Take float32 masters for the weights, and leave out the model's rounded ones."""
        slots = self.dialect.slots_called("master")
        masters = [(slot, name) for slot, name in self.tensors if slot in slots]
        if not masters:
            raise TargetError("--weights masters: the source has no float32 masters; leave it out")
        for slot, name in masters:
            if (None, name) in self.tensors:
                self.left_out.append(self.tensors[None, name].key)
            self.tensors[None, name] = replace(self.tensors.pop((slot, name)), name=None, slot=None)


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
                "--from, or make a copy without it, by `muonckpt convert --select`"
            )


def _recorded_names(manifest: Manifest, dialect: Dialect) -> dict[str, str]:
    """Return the names that the manifest records of numbers."""
    names: dict[str, str] = {}
    for tensor in manifest.tensors:
        fields = dialect.state.read(tensor.path)
        if fields is not None and tensor.name not in (None, *_numbers(fields)):
            names[fields["name"]] = str(tensor.name)
    return names


def _numbers(fields: Mapping[str, str]) -> tuple[str, str]:
    """Return a number with its optimizer, and alone, as manifests have it."""
    return fields["name"], fields["name"].rpartition("#")[2]


def _refuse_numbers(manifest: Manifest, parameters: Mapping[str, NeutralParameter], names: Collection[str]) -> None:
    """Refuse state of numbered parameters whose names nothing tells, neither the checkpoint nor rules."""
    for name, param in parameters.items():
        if name not in names and any(tensor.aliases == (name,) for tensor in param.slots.values()):
            raise unnamed_state(manifest.provenance, name)


def _with_members(
    groups: tuple[SourceGroup, ...], parameters: Mapping[str, NeutralParameter], values: Values
) -> tuple[SourceGroup, ...]:
    """Return the groups with their parameters by the target's names; a name is in the first group with a part of it."""
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
                one, other = _option(first[name], option, values), _option(group, option, values)
                if repr(one) != repr(other):
                    raise SourceError(f"parts of {name!r} are in groups with {option}={one!r} and {option}={other!r}")
        own = tuple(name for name in members if name not in first)
        first |= dict.fromkeys(own, group)
        named.append(replace(group, members=own))
    return tuple(named)


# Parameters.


@dataclass(frozen=True, slots=True)
class _Parser:
    """Puts tensors and counters together as parameters; ``group_of`` has the source's groups by its names."""

    dialect: Dialect
    values: Values
    overrides: Overrides
    entries: _Entries
    group_of: Mapping[str, SourceGroup]
    dropped: Collection[str]

    def parameters(self, rules: NameRules, must_match: bool) -> dict[str, NeutralParameter]:
        """Return the parameters that have a weight or state, by the target's names."""
        by_slot: defaultdict[str | None, dict[str, TranslatedTensor]] = defaultdict(dict)
        for (slot, name), stored in self.entries.tensors.items():
            by_slot[slot][name] = TranslatedTensor(stored.dtype, stored.chunk_layout(), (stored.chunks,), name, (name,))
        tensors: defaultdict[str, dict[str | None, TranslatedTensor]] = defaultdict(dict)
        for slot, named in by_slot.items():
            for name, tensor in apply_rules(rules, named).items():
                tensors[name][slot] = tensor
        unmatched = all(not t.restructured and t.aliases == (name,) for name in tensors for t in tensors[name].values())
        if must_match and rules.rules and unmatched:
            raise TargetError(
                f"no rule matches a parameter; parameters are {listed(sorted(tensors), 3)}, and the first rule is "
                f"{rules.rules[0]}"
            )
        aliases_of: dict[str, tuple[str, ...]] = {}
        for name, own in tensors.items():
            aliases_of[name] = tuple(dict.fromkeys(alias for tensor in own.values() for alias in tensor.aliases))
        self._refuse_ungrouped([aliases for name, aliases in aliases_of.items() if tensors[name].keys() - {None}])
        parameters = {}
        for name, own in tensors.items():
            aliases = aliases_of[name]
            weight = own.pop(None, None)
            listed_name = next(tensor.group for tensor in (*own.values(), weight) if tensor is not None)
            slots = own.keys() | {slot for alias in aliases for slot in self.entries.counters.get(alias, ())}
            param = NeutralParameter(name, listed_name, aliases, weight)
            state = {str(slot): tensor for slot, tensor in own.items()}
            parameters[name] = self._with_state(param, state, slots) if slots else param
        return parameters

    def _refuse_ungrouped(self, stateful: Iterable[tuple[str, ...]]) -> None:
        """Refuse state of parameters, by their aliases, that are in no group: nobody would know their rates."""
        if not self.group_of or self.dialect.option is None:  # Megatron's torch_dist does not say whose its groups are
            return
        of_state = list(stateful)
        if lost := sorted(aliases[0] for aliases in of_state if self.group_of.keys().isdisjoint(aliases)):
            other = sorted(self.group_of.keys() - {alias for aliases in of_state for alias in aliases})
            raise SourceError(
                f"found state of {listed(lost)}, which no parameter group of {self.dialect.name} lists"
                + (f" (groups list {listed(other)}, which has none)" if other else "")
                + ", so their options would be lost: give --rules that make the names of both the same, or "
                "first make a copy without that state, with `muonckpt convert --select`"
            )

    def _with_state(
        self, param: NeutralParameter, state: Mapping[str, TranslatedTensor], slots: Collection[Any]
    ) -> NeutralParameter:
        entries, name = self.entries, param.name
        group = next((self.group_of[alias] for alias in param.aliases if alias in self.group_of), None)
        if group and (foreign := next(iter(FOREIGN.keys() & group.items.keys()), None)):
            raise SourceError(
                f"parameter {name!r}: its group has the option {foreign!r} of {FOREIGN[foreign].name}, whose state "
                "cannot be translated; first make a copy without its state, with `muonckpt convert --select`"
            )
        named = _option(group, self.dialect.method_option, self.values)
        counted = self.overrides.step is not None or (group is not None and STEP in group.items)
        method = self.dialect.method(frozenset(slots), named, name, self.dropped, counted)
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
        if self.overrides.step is not None:
            return self.overrides.step
        slot, option, counters = method.slots.get("step", ""), method.options.get("step", STEP), self.entries.counters
        stored = [counters[alias][slot] for alias in param.aliases if slot in counters.get(alias, ())]
        if not stored and group is not None and option in group.items:
            stored = [group.items[option]]
        steps = set()
        for value in map(self.values.read, stored):
            if not (isinstance(value, int | float) and value == value // 1):
                raise SourceError(
                    f"parameter {param.name!r}: expected a whole number of steps, found {value!r}; give --step"
                )
            steps.add(int(value))
        if len(steps) > 1:
            raise SourceError(f"parameter {param.name!r} is made of parts that have taken {sorted(steps)} steps")
        return steps.pop() if steps else None

    def stateless(
        self, groups: tuple[SourceGroup, ...], parameters: Mapping[str, NeutralParameter]
    ) -> dict[str, NeutralParameter]:
        """Return the parameters in groups that have no state, where an option or the group's others tell the method.

        Programs that make state at a parameter's first update save none of those that never had a gradient.
        """
        stateful = {param.listed: param for param in parameters.values() if param.stateful}
        stateless: dict[str, NeutralParameter] = {}
        for group in groups:
            others = [stateful[name] for name in group.members if name in stateful]
            lacking = [name for name in group.members if name not in stateful]
            methods = [param.method for param in others]
            if lacking and self.dialect.method_option in group.items:
                named = _option(group, self.dialect.method_option, self.values)
                methods = [m for m in (*methods, *self.dialect.methods) if m.name == named]  # masters where others have
            elif len({method.name for method in methods}) > 1:
                methods = []
            chains = others[0].chains if others else frozenset(group.chain.values())
            for name in lacking if methods else ():
                known = parameters.get(name, NeutralParameter(name, name, (name,)))
                stateless[name] = replace(known, method=methods[0], group=group, step=0, chains=chains, stateless=True)
        return stateless
