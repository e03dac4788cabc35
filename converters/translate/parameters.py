"""The parameters of a view as another program will name them: renamed, split and joined by rules, with their methods.

Of the view's tensors, items and slots, this chooses those that can be written at all; others are listed as left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain
from typing import Any

from ...algebra.box import Index
from ...names.errors import SourceError, TargetError, UnknownOptimizerError
from ...names.vocabulary import FLATTEN, STEP, Convention
from ...names.wording import listed
from ...programs.detection import Detected
from ...programs.dialect import FOREIGN, Dialect, StoredMethod
from ...programs.model_view import Entry, ModelView, ParameterGroup, Role, StoredParameter
from ...programs.signs import GROUP_MEMBERS, unsaid_by_name
from ...record.record import Blob, Manifest, StateRecord, entry_keys
from ...store.open_checkpoint import Values
from ..engine.outputs import unnamed_state
from .conventions import Overrides, WeightsFrom, agreed_convention
from .groups import common_options, structure_options
from .matrices import UNKNOWN, Matrices
from .names import NameRules
from .parse import entries_of, other_items
from .structure import TranslatedTensor, apply_rules, unflattened

_NO_METHOD = StoredMethod("none", {})


@dataclass(frozen=True, slots=True)
class TranslatedParameter:
    """A parameter under the target's name.

    Attributes:
        listed: the name by which the target's groups know it: the whole's, where rules split only tensors.
        aliases: the names by which the source's groups may know it.
        sources: the parameters of the source that it is made of.
        weight: its own tensor, if that is stored.
        slots: the tensors of its state, by common name.
        method: how the source updates and stores it, if that is known.
        group: the source's group with its options.
        step: the number of updates, if the source or the user says it.
        counter: where the source stores that.
        chains: the optimizers, as keys name them, that its state belongs to.
        is_stateless: whether the source has no state of it, because it never had a gradient.
    """

    name: str
    listed: str
    aliases: tuple[str, ...]
    sources: tuple[StoredParameter, ...] = ()
    weight: TranslatedTensor | None = None
    slots: Mapping[str, TranslatedTensor] = field(default_factory=dict)
    method: StoredMethod = _NO_METHOD
    group: ParameterGroup | None = None
    step: int | None = None
    counter: Entry | None = None
    chains: frozenset[str] = frozenset()
    is_stateless: bool = False

    @property
    def is_stateful(self) -> bool:
        return self.method is not _NO_METHOD and not self.is_stateless

    @property
    def tensors(self) -> tuple[TranslatedTensor, ...]:
        return (*self.slots.values(), *((self.weight,) if self.weight else ()))

    @property
    def shape(self) -> Index:
        return self.weight.shape if self.weight else max((tensor.shape for tensor in self.tensors), key=math.prod)

    @property
    def matrices(self) -> Matrices | None:
        """The matrices in it, if rules have split or joined it; else its group's options say them."""
        tensors = (self.weight, self.slots.get("momentum"))
        return next((tensor.matrices for tensor in tensors if tensor is not None and tensor.regrouped), None)


@dataclass(frozen=True)
class TranslatedModel:
    """A checkpoint's parameters and groups under the target's names, still in the source's words.

    Attributes:
        detected: the source's dialect, and why it is this one.
        view: of the whole source, and its ``provenance``.
        parameters: by the target's names.
        groups: in the source's order, each with the names of its parameters for the target's groups.
        records: the weights, under None, and the state, by slot, that are written, by the source's name.
        derived: slots that follow from options, by the source's name and slot, if the own program gets them back.
        tensors, items: copied ones, neither weight nor state nor option.
        left_out: the keys of omitted tensors and items; ``private`` those that only the source's program can use.
    """

    detected: Detected
    view: ModelView
    provenance: Mapping[str, Any]
    values: Values
    overrides: Overrides
    parameters: Mapping[str, TranslatedParameter]
    groups: tuple[tuple[ParameterGroup, tuple[str, ...]], ...]
    records: Mapping[tuple[str | None, str], StateRecord]
    derived: Mapping[tuple[str, str], Entry]
    tensors: tuple[StateRecord, ...]
    items: tuple[Blob, ...]
    left_out: tuple[str, ...]
    private: tuple[str, ...]

    @property
    def dialect(self) -> Dialect:
        return self.detected.dialect

    @property
    def stateful(self) -> list[TranslatedParameter]:
        return [parameter for parameter in self.parameters.values() if parameter.is_stateful]

    @property
    def stateless(self) -> list[TranslatedParameter]:
        """The parameters that groups list and that have no state, where the method is known."""
        return [parameter for parameter in self.parameters.values() if parameter.is_stateless]

    @cached_property
    def listed(self) -> Mapping[str, TranslatedParameter]:
        """The parameters with a method, by the names that groups list."""
        return {parameter.listed: parameter for parameter in (*self.stateful, *self.stateless)}

    @cached_property
    def _unsaid(self) -> Mapping[str, frozenset[str]]:
        return unsaid_by_name(self.provenance)

    def unsaid_options(self, parameter: TranslatedParameter) -> frozenset[str]:
        """Return the options of a parameter's group that the source has from no run, but from a new optimizer."""
        return frozenset().union(*(self._unsaid.get(alias, frozenset()) for alias in parameter.aliases))

    @cached_property
    def new_names(self) -> Mapping[str, Collection[str]]:
        """The names that groups list in place of others, by these."""
        new_names: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for parameter in self.parameters.values():
            for alias in parameter.aliases:
                new_names[alias][parameter.listed] = None
        return {alias: names for alias, names in new_names.items() if [*names] != [alias]}

    def renamed_members(self) -> dict[str, list[list[str]]]:
        """Return what the provenance says of the members of Megatron's groups, under the target's names."""
        members: dict[str, list[list[str]]] = {}
        for chain_name, groups in self.provenance.get(GROUP_MEMBERS, {}).items():
            members[chain_name] = []
            for names in groups:
                new_names = chain.from_iterable(self.new_names.get(name, (name,)) for name in names)
                members[chain_name].append([*dict.fromkeys(new_names)])
        return members

    @property
    def ungrouped(self) -> list[str]:
        """The names of parameters with state that are in no group, where the source does not say whose groups are."""
        grouped = set[str]().union(*(members for _, members in self.groups))
        return [parameter.name for parameter in self.stateful if parameter.listed not in grouped]

    def shapes(self) -> dict[str, Index]:
        """Return the shapes of parameters, by the names that groups list: of the weights, or of state."""
        shapes: dict[str, Index] = {}
        for parameter in self.parameters.values():
            for tensor in parameter.tensors:
                if math.prod(tensor.shape) >= math.prod(shapes.get(parameter.listed, ())):
                    shapes[parameter.listed] = tensor.shape
        return shapes | {p.listed: p.weight.shape for p in self.parameters.values() if p.weight}

    def convention(self, parameter: TranslatedParameter) -> tuple[Convention | None, str]:
        """Return the convention of a parameter's momentum, and why it is this one.

        A program's convention counts only for groups that may be the program's.
        """
        dialect, requested = self.dialect, self.overrides.convention
        slot = parameter.method.slots["momentum"]
        parts = [self.records[slot, n] for n in parameter.slots["momentum"].aliases if (slot, n) in self.records]
        recorded = {f"the manifest ({part.key})": part.convention for part in parts}
        doubt = ""  # a checkpoint without any groups, as a copy of its tensors only is, raises none
        if dialect.convention is not None and self.groups:
            doubt = self._doubt(parameter.group) if parameter.group else "the parameter is in none of the groups"
        declared = _option(parameter.group, "convention") if "convention" in dialect.options.always else None
        statements = recorded | {
            dialect.name: None if doubt else dialect.convention,
            "its group": None if declared is None else Convention(declared),
            "`convention=`": requested,
        }
        convention = agreed_convention(f"parameter {parameter.name!r}", "`convention=`", statements)
        if any(part.convention is not None for part in parts):
            return convention, "the manifest records it"
        if doubt and requested is None:
            raise SourceError(
                f"parameter {parameter.name!r}: momentum of {dialect.name} is {dialect.convention or 'unknown'}, "
                f'but {doubt}, so another program may have written it; give `convention="{Convention.EMA}"` or '
                f'`convention="{Convention.SUM}"`, whichever it keeps'
            )
        if dialect.convention is not None and not doubt:
            return convention, f"that is what {dialect.name} keeps: {self.detected.reasons[-1]}"
        if requested:
            return convention, f'`convention="{requested}"` says so'
        return convention, "nothing in the source tells, nor does `convention=`"

    def _doubt(self, group: ParameterGroup) -> str:
        """Say why a group with momentum is not the program's; empty if it may be."""
        table = self.dialect.options
        if doubt := table.contradicted_by(group.options):
            return doubt
        for option, kind in table.misfits(group.options).items() if table.closed else ():
            return f"the group has {option}={group.options[option]!r}, not {kind} as the program does"
        return ""

    def mu(self, parameter: TranslatedParameter) -> float | None:
        """Return the momentum coefficient of the parameter's group, or the user's."""
        option, requested = parameter.method.options.get("momentum", ""), self.overrides.mu
        stored = _option(parameter.group, option)
        if stored is None:
            return requested
        about = f"parameter {parameter.name!r}"
        if not isinstance(stored, float | int):
            raise SourceError(f"{about}: expected a number as {option} of its group, found {stored!r}")
        if requested not in (None, stored):
            raise SourceError(f"{about}: its group says {option}={stored!r}, `mu=` says {requested!r}")
        return float(stored)


def hides_pieces(parameter: StoredParameter, dialect: Dialect, values: Values) -> str:
    """Say why a parameter seems split into matrices that no option names; empty if nothing shows that.

    A slot that follows from the options has another value then: XTuner takes the sizes from its constructor.
    """
    group, method = parameter.group, parameter.method
    if group is None or method is None or parameter.items.keys().isdisjoint(dialect.derived):
        return ""
    for slot, value_of in method.derived.items():
        common = common_options(group.options, dialect, method, parameter.shape).common
        expected, stored = value_of(common, parameter.shape), values.item(parameter.items[slot])
        if expected is not None and not math.isclose(stored, expected, rel_tol=1e-6):
            return f"{dialect.name} has {slot}={stored!r} and not {expected!r} of it, so its rows are split"
    return ""


def _option(group: ParameterGroup | None, name: str | None) -> Any:
    return group.options.get(name) if group and name else None


def translate_model(
    view: ModelView,
    manifest: Manifest,
    values: Values,
    detected: Detected,
    target: Dialect,
    rules: NameRules,
    overrides: Overrides,
    drop: frozenset[str],
) -> TranslatedModel:
    """Give the parameters of a view the target's names, and choose what of the checkpoint is written.

    Args:
        rules: from the source's names to the target's.
        drop: slots to leave out.

    Raises:
        SourceError: state belongs to no method or to several; or parts of a parameter differ.
        TargetError: ``drop`` names a slot that does not exist, or no rule matches a parameter.
        LayoutError: rules do not fit the tensors, or a tensor has a hole or an overlap.
    """
    dialect = detected.dialect
    slots = set[str]().union(*(parameter.slots for parameter in view.parameters.values()))
    if missing := sorted(drop - slots):
        raise TargetError(
            f"no slot {missing[0]!r} to drop; the slots of {dialect.name} here are {', '.join(sorted(slots))}"
        )
    # Not written: slots that the user drops, and state that the target's program computes again, or cannot use.
    if overrides.weights is WeightsFrom.MODEL:
        drop |= dialect.slots_called("master")
    is_unchanged = dialect is target and not rules.rules
    assembly = _Assembly(view, dialect, values, overrides, drop, is_rewritten=dialect is not target)
    assembly.choose(entries_of(manifest), drop | dialect.derived if dialect is not target else drop)
    others: list[Entry] = [*view.tensors_of(Role.OTHER), *other_items(manifest, dialect)]
    for entry in others if dialect.opaque != target.opaque else ():
        if _matches(entry, dialect.opaque):
            raise SourceError(
                f"{entry.key!r} is a flat bucket of an optimizer's state, and nothing in it says which parameter lies "
                f"where, so {target.name} cannot take it: save with --dist-ckpt-optim-fully-reshardable in Megatron, "
                "which writes it under names, or first make a copy without the buckets, by `select=` of "
                "muonckpt.convert"
            )
    private_globs = dialect.private - target.private
    private = [entry for entry in others if _matches(entry, private_globs)]
    copied = [entry for entry in others if not _matches(entry, private_globs)]
    # All others under the target's names, with a method for every parameter with state.
    parameters = assembly.parameters(rules)
    if not target.numbered:
        _refuse_numbers(manifest, view, parameters)
    if not is_unchanged:
        _refuse_vectors(parameters.values(), dialect)
    groups = _with_members(view.groups, parameters, structure_options(dialect))
    return TranslatedModel(
        detected,
        view,
        manifest.provenance,
        values,
        overrides,
        parameters | assembly.stateless(groups, parameters),
        groups,
        assembly.records,
        assembly.derived,
        tuple(entry for entry in copied if isinstance(entry, StateRecord)),
        tuple(entry for entry in copied if isinstance(entry, Blob)),
        tuple(assembly.left_out),
        tuple(entry_keys(private)),
    )


def _matches(entry: Entry, globs: Collection[str]) -> bool:
    return any(fnmatchcase(entry.key, glob) for glob in globs)


# Parameters.


@dataclass(slots=True)
class _Assembly:
    """Chooses the part of a view that is written, and puts it together as parameters under the target's names.

    Attributes:
        dropped: the slots that the user leaves out.
        is_rewritten: whether another program will read the result.
        records: weights, under None, and state, by slot, each by the name of its parameter.
        counters: where step counters are stored, by name and slot.
        derived: slots that follow from options, and that the own program gets back, by name and slot.
        left_out: the keys that are not written.
    """

    view: ModelView
    dialect: Dialect
    values: Values
    overrides: Overrides
    dropped: Collection[str]
    is_rewritten: bool
    records: dict[tuple[str | None, str], StateRecord] = field(default_factory=dict)
    counters: defaultdict[str, dict[str, Entry]] = field(default_factory=lambda: defaultdict(dict))
    derived: dict[tuple[str, str], Entry] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def choose(self, entries: Iterable[Entry], left_slots: Collection[str]) -> None:
        """Choose weights and state but for these slots, in the order of the entries."""
        dialect = self.dialect
        steps = dialect.slots_called("step") - dialect.derived
        weights: dict[str, str] = {}
        states: dict[str, tuple[str, str]] = {}
        for name, parameter in self.view.parameters.items():
            weights |= {parameter.weight.key: name} if parameter.weight else {}
            states |= {entry.key: (name, slot) for slot, entry in parameter.slots.items()}
        for key, entry in ((entry.key, entry) for entry in entries):
            if key in weights and isinstance(entry, StateRecord):
                self.records[None, weights[key]] = entry
            if key not in states:
                continue
            name, slot = states[key]
            if slot in left_slots:
                self.left_out.append(key)
            elif slot in steps:
                self.counters[name][slot] = entry
            elif slot in dialect.derived:
                self.derived[name, slot] = entry
            elif isinstance(entry, Blob):
                raise SourceError(f"expected a tensor at {key!r}, found another item; leave {slot} out with `drop=`")
            else:
                self.records[slot, name] = self.view.parameters[name].state[slot]
        # The float32 masters are the weights if the user says so, and the model's rounded ones are left out.
        if self.overrides.weights is WeightsFrom.MASTERS:
            slots = dialect.slots_called("master")
            masters = [(slot, name) for slot, name in self.records if slot in slots]
            if not masters:
                raise TargetError('`weights="masters"`: the source has no float32 masters; leave it out')
            for slot, name in masters:
                if (None, name) in self.records:
                    self.left_out.append(self.records[None, name].key)
                self.records[None, name] = replace(self.records.pop((slot, name)), name=None, slot=None)

    def parameters(self, rules: NameRules) -> dict[str, TranslatedParameter]:
        """Return the parameters that have a weight or state, by the target's names."""
        # Rules apply to the tensors of each slot by themselves.
        sources_by_slot: defaultdict[str | None, dict[str, TranslatedTensor]] = defaultdict(dict)
        for (slot, name), record in self.records.items():
            stored = self.view.parameters[name]
            tensor = TranslatedTensor(record.dtype, record.chunk_layout(), (record.chunks,), name, (name,))
            # Some scripts keep the momentum of a convolution as the matrix; other programs as the parameter.
            if self.is_rewritten and slot in self.dialect.slots_called("momentum"):
                tensor = unflattened(tensor, stored.shape)
            if rules.rules:
                tensor = replace(tensor, matrices=self._matrices(stored, tensor.shape))
            sources_by_slot[slot][name] = tensor
        tensors_by_name: defaultdict[str, dict[str | None, TranslatedTensor]] = defaultdict(dict)
        for slot, slot_tensors in sources_by_slot.items():
            for name, tensor in apply_rules(rules, slot_tensors).items():
                tensors_by_name[name][slot] = tensor
        self._refuse_unused_rules(rules, tensors_by_name)
        # A parameter is what has one name in the slots, and in the source's groups the names of its parts.
        aliases_of: dict[str, tuple[str, ...]] = {}
        for name, tensors in tensors_by_name.items():
            repeated_aliases = chain.from_iterable(tensor.aliases for tensor in tensors.values())
            aliases_of[name] = tuple(dict.fromkeys(repeated_aliases))
        self._refuse_ungrouped([aliases_of[name] for name, tensors in tensors_by_name.items() if {*tensors} != {None}])
        parameters = {}
        for name, tensors in tensors_by_name.items():
            aliases, weight = aliases_of[name], tensors.pop(None, None)
            listed_name = next(tensor.group for tensor in (*tensors.values(), weight) if tensor is not None)
            sources = tuple(self.view.parameters[alias] for alias in aliases if alias in self.view.parameters)
            parameter = TranslatedParameter(name, listed_name, aliases, sources, weight)
            slots = {str(slot): tensor for slot, tensor in tensors.items()}
            counters = set[str]().union(*(self.counters.get(alias, ()) for alias in aliases))
            has_state = bool(slots or counters)
            parameters[name] = self._with_state(parameter, slots, counters) if has_state else parameter
        return parameters

    def _matrices(self, parameter: StoredParameter, shape: Index) -> Matrices:
        """Return the matrices in a parameter, or in state of this shape, that the options of its group say."""
        group, method = parameter.group, parameter.method
        if group is None or method is None or "momentum" not in method.slots:
            return Matrices.of({}, shape)
        if hides_pieces(parameter, self.dialect, self.values):
            return UNKNOWN
        common = dict(common_options(group.options, self.dialect, method, shape).common)
        # Momentum that is stored as the matrix was flattened.
        matrix = (shape[0], math.prod(shape[1:])) if len(shape) > 2 else None
        if any(tensor.shape == matrix for tensor in parameter.state.values()):
            common[FLATTEN] = True
        return Matrices.of(common, shape)

    def _refuse_unused_rules(
        self, rules: NameRules, tensors: Mapping[str, Mapping[str | None, TranslatedTensor]]
    ) -> None:
        """Refuse rules that change nothing, unless they may be for numbers that have names now."""
        if not rules.rules or self.view.names:
            return
        for name, parts in tensors.items():
            if any(tensor.restructured or tensor.aliases != (name,) for tensor in parts.values()):
                return
        raise TargetError(
            f"no rule matches a parameter; parameters are {listed(sorted(tensors), 3)}, and the first rule is "
            f"{rules.rules[0]}"
        )

    def _refuse_ungrouped(self, aliases_with_state: Sequence[tuple[str, ...]]) -> None:
        """Refuse state of parameters, by their aliases, that are in no group: their rates are unknown."""
        grouped = self.view.groups_by_name.keys()
        if not grouped or self.dialect.option is None:  # Megatron's torch_dist does not say whose its groups are
            return
        if ungrouped := sorted(aliases[0] for aliases in aliases_with_state if grouped.isdisjoint(aliases)):
            without_state = sorted(grouped - set[str]().union(*aliases_with_state))
            raise SourceError(
                f"found state of {listed(ungrouped)}, which no parameter group of {self.dialect.name} lists"
                + (f" (groups list {listed(without_state)}, which has none)" if without_state else "")
                + ", so their options would be lost: give `rules=` that make the names of both the same, or "
                "first make a copy without that state, by `select=` of muonckpt.convert"
            )

    def _with_state(
        self, parameter: TranslatedParameter, slots: Mapping[str, TranslatedTensor], counters: Collection[str]
    ) -> TranslatedParameter:
        name = parameter.name
        groups = (self.view.groups_by_name.get(alias) for alias in parameter.aliases)
        group = next(filter(None, groups), None)
        if group and (foreign := next(iter(FOREIGN.keys() & group.options.keys()), None)):
            raise UnknownOptimizerError(
                f"parameter {name!r}: its group has the option {foreign!r} of {FOREIGN[foreign].name}, whose state "
                "cannot be translated; first make a copy without its state, by `select=` of muonckpt.convert"
            )
        # Slots tell the method; the group may name it, or count the steps that no slot counts.
        method_name = _option(group, self.dialect.method_option)
        stored_slots = frozenset({*slots, *counters})
        method = self.dialect.method(stored_slots, method_name, name, self.dropped)
        if group and (strange := sorted(method.absent_options & group.options.keys())):
            raise SourceError(
                f"parameter {name!r} has {', '.join(sorted(stored_slots))} as {method.name} of {self.dialect.name} "
                f"has, but its group has {strange[0]!r}, which {method.name} lacks: state of another method was lost; "
                "look for it with muonckpt.verify, or make a copy without the others, by `select=` of muonckpt.convert"
            )
        # State of several optimizers cannot become state of one.
        chains: set[str] = set()
        for source in parameter.sources:
            for entry in source.slots.values():
                chains.add((self.dialect.state.read(entry.path) or {}).get("chain", ""))
        return replace(
            parameter,
            slots={common: slots[slot] for common, slot in method.slots.items() if slot in slots},
            method=method,
            group=group,
            step=self._step(parameter, method, group),
            counter=self.counters.get(parameter.aliases[0], {}).get(method.slots.get("step", "")),
            chains=frozenset(chains),
        )

    def _step(self, parameter: TranslatedParameter, method: StoredMethod, group: ParameterGroup | None) -> int | None:
        """Return the number of updates: the user's, that of the counters, or else that of the group."""
        if self.overrides.step is not None:
            return self.overrides.step
        slot, option = method.slots.get("step", ""), method.options.get("step", STEP)
        # Each part has a counter of its own, or the group counts for all.
        counters = (self.counters.get(alias, {}) for alias in parameter.aliases)
        counts = [self.values.read(entries[slot]) for entries in counters if slot in entries]
        if not counts and group is not None and option in group.options:
            counts = [group.options[option]]
        counts = counts or [self.view.counts[alias] for alias in parameter.aliases if alias in self.view.counts]
        for count in counts:
            if not (isinstance(count, int | float) and count == count // 1):
                raise SourceError(
                    f"parameter {parameter.name!r}: expected a whole number of steps, found {count!r}; give `step=`"
                )
        steps = {int(count) for count in counts}
        if len(steps) > 1:
            raise SourceError(f"parameter {parameter.name!r} is made of parts that have taken {sorted(steps)} steps")
        return steps.pop() if steps else None

    def stateless(
        self,
        groups: Iterable[tuple[ParameterGroup, tuple[str, ...]]],
        parameters: Mapping[str, TranslatedParameter],
    ) -> dict[str, TranslatedParameter]:
        """Return the parameters in groups that have no state, where an option or their siblings tell the method.

        Programs that make state at a parameter's first update save none for parameters that never had a gradient.
        """
        # Siblings in a group share a method, unless an option names it for each; groups of one have their optimizer's.
        stateful = {parameter.listed: parameter for parameter in parameters.values() if parameter.is_stateful}
        parameters_of_chain: defaultdict[str, list[TranslatedParameter]] = defaultdict(list)
        for parameter in stateful.values() if self.dialect.chained else ():
            for chain_name in parameter.chains:
                parameters_of_chain[chain_name].append(parameter)
        stateless: dict[str, TranslatedParameter] = {}
        for group, members in groups:
            siblings = [stateful[name] for name in members if name in stateful]
            if not siblings and not group.positions:
                siblings = parameters_of_chain[group.chain]
            missing = [name for name in members if name not in stateful]
            methods = [parameter.method for parameter in siblings]
            if missing and self.dialect.method_option in group.options:
                method_name = _option(group, self.dialect.method_option)
                # The siblings' come first, as they may have masters.
                methods = [m for m in (*methods, *self.dialect.methods) if m.name == method_name]
            elif len({method.name for method in methods}) > 1:
                methods = []
            chains = siblings[0].chains if siblings else frozenset([group.chain])
            for name in missing if methods else ():
                parameter = parameters.get(name, TranslatedParameter(name, name, (name,)))
                if parameter.weight and not methods[0].steps_shape(parameter.weight.shape):
                    continue  # it is stepped otherwise than its siblings
                parameter = replace(parameter, method=methods[0], group=group, step=0, chains=chains)
                stateless[name] = replace(parameter, is_stateless=True)
        return stateless


def _refuse_vectors(parameters: Iterable[TranslatedParameter], dialect: Dialect) -> None:
    """Refuse momentum of parameters that no method of matrices steps, as Megatron-FSDP's Muon keeps it (#6425)."""
    vectors = []
    for parameter in parameters:
        shapes = (tensor.shape for tensor in parameter.tensors)
        if parameter.is_stateful and not parameter.method.steps_shape(max(shapes, key=math.prod)):
            vectors.append(parameter.name)
    if vectors:
        raise SourceError(
            f"{listed(sorted(vectors))} of less than two dims has momentum as if {dialect.name}'s Muon stepped it: it "
            "is plain momentum SGD there, in no Muon group, and no method here; make a copy without that state, by "
            "`select=` of muonckpt.convert, and let AdamW or Lion start fresh for it, with fresh=[…] of muonckpt.load"
        )


def _refuse_numbers(manifest: Manifest, view: ModelView, parameters: Mapping[str, TranslatedParameter]) -> None:
    """Refuse state of numbered parameters whose names nothing tells, neither the checkpoint nor rules."""
    names = {*view.names.values()}
    for name, parameter in parameters.items() if view.dialect and view.dialect.numbered else ():
        if name not in names and any(tensor.aliases == (name,) for tensor in parameter.slots.values()):
            raise unnamed_state(manifest.provenance, name)


def _with_members(
    groups: Iterable[ParameterGroup], parameters: Mapping[str, TranslatedParameter], structural: Collection[str]
) -> tuple[tuple[ParameterGroup, tuple[str, ...]], ...]:
    """Return groups with their parameters by the target's names; a name is in the first group with a part of it.

    Args:
        structural: options that say which matrices are in a parameter, or name it: parts may differ in them.

    Raises:
        SourceError: parts of a parameter are in groups with other options.
    """
    # A rule may make several parameters of one, or one of several.
    new_names: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for parameter in parameters.values():
        for alias in parameter.aliases:
            new_names[alias][parameter.listed] = None
    # Parts that are joined may be in several groups, if these have the same options.
    first_groups: dict[str, ParameterGroup] = {}
    groups_with_members = []
    for group in groups:
        names: dict[str, None] = {}
        for name in group.parameters:
            names |= new_names.get(name, {name: None})
        for name in names.keys() & first_groups.keys():
            first_options = first_groups[name].options
            for option in sorted((first_options.keys() | group.options.keys()) - {*structural}):
                values = first_options.get(option), group.options.get(option)
                if repr(values[0]) != repr(values[1]):
                    raise SourceError(
                        f"parts of {name!r} are in groups with {option}={values[0]!r} and {option}={values[1]!r}"
                    )
        members = tuple(name for name in names if name not in first_groups)
        first_groups |= dict.fromkeys(members, group)
        groups_with_members.append((group, members))
    return tuple(groups_with_members)
