"""The parameters of a view as another program will name them: renamed, split and joined by rules, with their methods.

This chooses the view's tensors, items and slots that can be written at all; others are listed as left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain
from typing import Any

from ...names.errors import SourceError, TargetError, UnknownOptimizerError
from ...names.vocabulary import FLATTEN, STEP, Convention
from ...names.wording import listed
from ...programs.detection import Detected
from ...programs.dialect import Dialect
from ...programs.model_view import AVERAGES, Entry, ModelView, ParameterGroup, Role, StoredParameter, matrix_sides
from ...programs.signs import unsaid_by_name
from ...record.record import Blob, Manifest, StateRecord, entry_keys
from ...store.open_checkpoint import Values
from ..engine.outputs import Action, Findings, OutputTensor, Topic, unnamed_state
from .conventions import WeightsFrom, agreed_convention
from .groups import common_options, structure_options
from .matrices import UNKNOWN, Matrices
from .parse import other_items
from .request import Request
from .structure import TranslatedParameter, apply_rules, unflattened


@dataclass(frozen=True)
class TranslatedModel:
    """A checkpoint's parameters and groups under the target's names, still in the source's words.

    Attributes:
        detected: the source's dialect, and why it is this one.
        view: of the whole source.
        parameters: by the target's names.
        groups: in the source's order, each with the names of its parameters for the target's groups.
        left_slots: those that are not written.
        tensors, items: copied ones, neither weight nor state nor option.
        left_out: the keys of omitted weights and state, each with its slot.
        private: the keys of omitted items that only the source's program can use.
        findings: gets every difference from the source.
    """

    choices: Request
    manifest: Manifest
    values: Values
    detected: Detected
    target: Dialect
    view: ModelView
    parameters: Mapping[str, TranslatedParameter]
    groups: tuple[tuple[ParameterGroup, tuple[str, ...]], ...]
    left_slots: Set[str]
    tensors: tuple[StateRecord, ...]
    items: tuple[Blob, ...]
    left_out: Mapping[str, str]
    private: tuple[str, ...]
    findings: Findings = field(default_factory=Findings)

    @property
    def dialect(self) -> Dialect:
        return self.detected.dialect

    @property
    def is_same_dialect(self) -> bool:
        return self.target is self.dialect

    @property
    def copies_groups(self) -> bool:
        """Return whether groups are in the same words, and so are copied but for what rules and the user change."""
        return self.is_same_dialect and self.choices.like is None

    @property
    def common_items(self) -> list[Blob]:
        """The items in which Megatron has all groups."""
        return [item for item in self.items if self.target.holds_groups(item.path)]

    @property
    def copies_common_state(self) -> bool:
        """Return whether these are copied whole: no group changes its words or its optimizer."""
        return bool(self.common_items) and (self.is_same_dialect or not self.groups)

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
    def new_names(self) -> Mapping[str, Collection[str]]:
        """The names that groups list in place of others, by these."""
        new_names = _listed_by_alias(self.parameters.values())
        return {alias: names for alias, names in new_names.items() if [*names] != [alias]}

    def convention(self, parameter: TranslatedParameter) -> tuple[Convention | None, str]:
        """Return the convention of a parameter's momentum, and why it is this one.

        A program's convention counts only for groups that may be the program's.
        """
        dialect, requested = self.dialect, self.choices.convention
        slot = parameter.method.slots["momentum"]
        parts = [part for part in parameter.entries.get(slot, ()) if isinstance(part, StateRecord)]
        recorded = {f"the manifest ({part.key})": part.convention for part in parts}
        doubt = ""  # a checkpoint without any groups, as a copy of its tensors only is, raises none
        if dialect.convention is not None and self.groups:
            doubt = (
                dialect.contradiction(parameter.group.options)
                if parameter.group
                else "the parameter is in none of the groups"
            )
        declared = _option_of(parameter.group, "convention") if "convention" in dialect.always else None
        statements = recorded | {
            dialect.name: None if doubt else dialect.convention,
            "its group": None if declared is None else Convention(declared),
            "`convention=`": requested,
        }
        remedy = "leave `convention=` out if the checkpoint is right, or give "
        remedy += '`from_dialect="dcp"` if another program wrote it'
        convention = agreed_convention(f"parameter {parameter.name!r}", statements, remedy)
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

    def mu(self, parameter: TranslatedParameter) -> float | None:
        """Return the momentum coefficient of the parameter's group, or the user's."""
        option, requested = parameter.method.options.get("momentum", ""), self.choices.mu
        stored = _option_of(parameter.group, option)
        if stored is None:
            return requested
        about = f"parameter {parameter.name!r}"
        if not isinstance(stored, float | int):
            raise SourceError(f"{about}: expected a number as {option} of its group, found {stored!r}")
        if requested not in (None, stored):
            raise SourceError(f"{about}: its group says {option}={stored!r}, `mu=` says {requested!r}")
        return float(stored)


def _option_of(group: ParameterGroup | None, name: str | None) -> Any:
    return group.options.get(name) if group and name else None


def rename(
    view: ModelView,
    manifest: Manifest,
    values: Values,
    detected: Detected,
    target: Dialect,
    choices: Request,
) -> TranslatedModel:
    """Choose what of a checkpoint is written, and give its parameters the target's names.

    Raises:
        TargetError: ``drop`` names a slot that does not exist, or no rule matches a parameter.
        LayoutError: rules do not fit the tensors, or a tensor has a hole or an overlap.
    """
    dialect, rules, drop = detected.dialect, choices.rules, choices.drop
    slots = set[str]().union(*(parameter.slots for parameter in view.parameters.values()))
    if missing := sorted(drop - slots):
        raise TargetError(
            f"no slot {missing[0]!r} to drop; the slots of {dialect.name} here are {', '.join(sorted(slots))}"
        )
    # Not written: slots that the user drops, and state that the target's program computes again, or cannot use.
    if choices.weights is WeightsFrom.MODEL:
        drop |= dialect.slots_called("master")
    left_slots = drop if dialect is target else drop | dialect.derived
    stored, left_out = _stored_parameters(view, dialect, target, values, choices, left_slots)
    others: list[Entry] = [*view.tensors_of(Role.OTHER), *other_items(manifest, dialect)]
    for entry in others if dialect.opaque != target.opaque else ():
        if _matches_any(entry, dialect.opaque):
            raise SourceError(
                f"{entry.key!r} is a flat bucket of an optimizer's state, and nothing in it says which parameter lies "
                f"where, so {target.name} cannot take it: save with --dist-ckpt-optim-fully-reshardable in Megatron, "
                "which writes it under names, or first make a copy without the buckets, by `select=` of "
                "muonckpt.convert"
            )
    private_globs = dialect.private - target.private
    private = [entry for entry in others if _matches_any(entry, private_globs)]
    copied = [entry for entry in others if not _matches_any(entry, private_globs)]
    # All parameters under the target's names.
    if rules.rules:
        renamed = apply_rules(rules, stored)
        if not view.names and all(renamed.get(name) is parameter for name, parameter in stored.items()):
            raise TargetError(
                f"no rule matches a parameter; parameters are {listed(sorted(stored), 3)}, and the first rule is "
                f"{rules.rules[0]}"
            )
        stored = renamed
    return TranslatedModel(
        choices,
        manifest=manifest,
        values=values,
        detected=detected,
        target=target,
        view=view,
        parameters=stored,
        groups=(),
        left_slots=left_slots,
        tensors=tuple(entry for entry in copied if isinstance(entry, StateRecord)),
        items=tuple(entry for entry in copied if isinstance(entry, Blob)),
        left_out=left_out,
        private=tuple(entry_keys(private)),
    )


def _matches_any(entry: Entry, globs: Collection[str]) -> bool:
    return any(fnmatchcase(entry.key, glob) for glob in globs)


def for_target(model: TranslatedModel) -> TranslatedModel:
    """Return a model with the methods, groups and steps of its parameters, and with what the target has for these.

    Raises:
        SourceError: state belongs to no method or to several; parts of a parameter differ; the target has no place.
    """
    dialect, target = model.dialect, model.target
    # State of parameters that are in no group has no rates; Megatron's torch_dist does not say whose its groups are.
    grouped = model.view.groups_by_name.keys() if dialect.common is None else ()
    stateful = [parameter.aliases for parameter in model.parameters.values() if {*parameter.tensors} != {None}]
    if grouped and (ungrouped := sorted(aliases[0] for aliases in stateful if grouped.isdisjoint(aliases))):
        without_state = sorted(grouped - set[str]().union(*stateful))
        raise SourceError(
            f"found state of {listed(ungrouped)}, which no parameter group of {dialect.name} lists"
            + (f" (groups list {listed(without_state)}, which has none)" if without_state else "")
            + ", so their options would be lost: give `rules=` that make the names of both the same, or "
            "first make a copy without that state, by `select=` of muonckpt.convert"
        )
    # The source's methods, and its groups under the target's names, with their parameters without state.
    parameters = {name: _with_method(model, parameter) for name, parameter in model.parameters.items()}
    _refuse_forms(model, parameters)
    groups = _with_members(model.view.groups, parameters, structure_options(dialect))
    parameters |= _stateless_parameters(model, groups, parameters)
    # The target's methods and optimizers.
    with_method = {name: p for name, p in parameters.items() if p.is_stateful or p.is_stateless}
    if target is not dialect:
        target = target.with_optimizers_of(parameter.method.name for parameter in with_method.values())
    model = replace(model, target=target, groups=groups)
    unsaid = unsaid_by_name(model.manifest.provenance)
    return replace(
        model, parameters=parameters | {n: _with_target_method(model, p, unsaid) for n, p in with_method.items()}
    )


# Parameters.


def _stored_parameters(
    view: ModelView, dialect: Dialect, target: Dialect, values: Values, choices: Request, left_slots: Set[str]
) -> tuple[dict[str, TranslatedParameter], dict[str, str]]:
    """Return the parameters with their weights and state but for these slots; and the keys left out, with slots."""
    parameters, left_out = dict[str, TranslatedParameter](), dict[str, str]()
    masters = dialect.slots_called("master") if choices.weights is WeightsFrom.MASTERS else frozenset()
    # The matrices in a parameter matter where rules cut or join it, and for options that are written again.
    has_rules, has_masters = bool(choices.rules.rules), False
    is_rewritten = has_rules or dialect is not target or choices.like is not None
    for name, stored in view.parameters.items():
        entries: dict[str | None, Entry] = {None: stored.weight} if stored.weight else {}
        entries.update(stored.slots.items())
        left_out |= {entry.key: slot for slot, entry in stored.slots.items() if slot in left_slots}
        records: dict[str | None, StateRecord] = {}
        for slot, entry in entries.items():
            if slot in left_slots | dialect.slots_called("step") | dialect.derived:
                continue
            if isinstance(entry, Blob):
                raise SourceError(
                    f"expected a tensor at {entry.key!r}, found another item; leave {slot} out with `drop=`"
                )
            records[slot] = entry
        # The float32 masters are the weights if the user says so, and the model's rounded ones are left out.
        for slot in masters & records.keys():
            has_masters = True
            left_out |= {stored.weight.key: "weights"} if stored.weight else {}
            records[None] = replace(records.pop(slot), name=None, slot=None)
        if not records:
            continue
        tensors = {slot: OutputTensor.copy_of(record) for slot, record in records.items()}
        # Momentum of a convolution that some scripts keep as the matrix has the parameter's dims in other programs.
        is_flattened = False
        for slot in dialect.slots_called("momentum") & tensors.keys() if dialect is not target else ():
            copied, tensors[slot] = tensors[slot], unflattened(tensors[slot], stored.shape)
            is_flattened |= tensors[slot] is not copied
        hidden_pieces = _hidden_pieces(stored, dialect, values) if is_rewritten else ""
        parameters[name] = TranslatedParameter(
            name,
            listed=name,
            aliases=(name,),
            entries={slot: (entry,) for slot, entry in entries.items()},
            tensors=tensors,
            matrices=_matrices(stored, dialect, hidden_pieces) if has_rules else UNKNOWN,
            hidden_pieces=hidden_pieces,
            is_flattened=is_flattened,
        )
    if choices.weights is WeightsFrom.MASTERS and not has_masters:
        raise TargetError('`weights="masters"`: the source has no float32 masters; leave it out')
    return parameters, left_out


def _hidden_pieces(parameter: StoredParameter, dialect: Dialect, values: Values) -> str:
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


def _matrices(parameter: StoredParameter, dialect: Dialect, hidden_pieces: str) -> Matrices:
    """Return the matrices in a parameter that the options of its group say."""
    group, method, shape = parameter.group, parameter.method, parameter.shape
    if group is None or method is None or "momentum" not in method.slots:
        return Matrices.of({}, shape)
    if hidden_pieces:
        return UNKNOWN
    common = dict(common_options(group.options, dialect, method, shape).common)
    # Momentum that is stored as the matrix was flattened.
    matrix = (shape[0], math.prod(shape[1:])) if len(shape) > 2 else None
    if any(tensor.shape == matrix for tensor in parameter.state.values()):
        common[FLATTEN] = True
    return Matrices.of(common, shape)


def _with_method(model: TranslatedModel, parameter: TranslatedParameter) -> TranslatedParameter:
    """Return a parameter with its method, group and number of steps, if it has state."""
    name, dialect = parameter.name, model.dialect
    # Slots tell the method; the group may name it, or count the steps that no slot counts.
    counters = dialect.slots_called("step") - dialect.derived - model.left_slots
    slots = {slot for slot in parameter.tensors if slot is not None}
    slots |= counters & parameter.entries.keys()
    if not slots:
        return parameter
    groups = (model.view.groups_by_name.get(alias) for alias in parameter.aliases)
    group = next(filter(None, groups), None)
    if group and (foreign := dialect.foreign_method(group.options)):
        foreign_name, signs = foreign[0].name, foreign[1]
        raise UnknownOptimizerError(
            f"parameter {name!r}: its group has {signs} as groups of {foreign_name} have, whose state cannot be "
            "translated; first make a copy without its state, by `select=` of muonckpt.convert"
        )
    method = dialect.method(
        frozenset(slots), _option_of(group, dialect.method_option), name, model.left_slots - dialect.derived
    )
    if group and (strange := sorted(method.absent_options & group.options.keys())):
        raise SourceError(
            f"parameter {name!r} has {', '.join(sorted(slots))} as {method.name} of {dialect.name} "
            f"has, but its group has {strange[0]!r}, which {method.name} lacks: state of another method was lost; "
            "look for it with muonckpt.verify, or make a copy without the others, by `select=` of muonckpt.convert"
        )
    # State of several optimizers cannot become state of one.
    chains: set[str] = set()
    for entry in chain.from_iterable(entries for slot, entries in parameter.entries.items() if slot is not None):
        reading = dialect.keys.read_state(entry.path)
        chains.add(reading.chain if reading else "")
    parameter = replace(parameter, method=method, group=group, chains=frozenset(chains))
    return replace(parameter, step=_num_steps(model, parameter))


def _num_steps(model: TranslatedModel, parameter: TranslatedParameter) -> int | None:
    """Return the number of updates: the user's, that of the counters of all parts, or else that of the group."""
    if model.choices.step is not None:
        return model.choices.step
    counts, group = list(map(model.values.read, parameter.counters)), parameter.group
    option = parameter.method.options.get("step", STEP)
    if not counts and group is not None and option in group.options:
        counts = [group.options[option]]
    counts = counts or [model.view.counts[alias] for alias in parameter.aliases if alias in model.view.counts]
    for count in counts:
        if not (isinstance(count, int | float) and count == count // 1):
            raise SourceError(
                f"parameter {parameter.name!r}: expected a whole number of steps, found {count!r}; give `step=`"
            )
    steps = {int(count) for count in counts}
    if len(steps) > 1:
        raise SourceError(f"parameter {parameter.name!r} is made of parts that have taken {sorted(steps)} steps")
    return steps.pop() if steps else None


def _stateless_parameters(
    model: TranslatedModel,
    groups: Iterable[tuple[ParameterGroup, tuple[str, ...]]],
    parameters: Mapping[str, TranslatedParameter],
) -> dict[str, TranslatedParameter]:
    """Return the parameters in groups that have no state, where an option or their siblings tell the method.

    Programs that make state at a parameter's first update save none for parameters that never had a gradient.
    """
    # Siblings in a group share a method, unless an option names it for each; groups of one have their optimizer's.
    stateful = {parameter.listed: parameter for parameter in parameters.values() if parameter.is_stateful}
    parameters_of_chain: defaultdict[str, list[TranslatedParameter]] = defaultdict(list)
    for parameter in stateful.values() if model.dialect.chained else ():
        for chain_name in parameter.chains:
            parameters_of_chain[chain_name].append(parameter)
    stateless: dict[str, TranslatedParameter] = {}
    for group, members in groups:
        siblings = [stateful[name] for name in members if name in stateful]
        if not siblings and not group.positions:
            siblings = parameters_of_chain[group.chain]
        missing = [name for name in members if name not in stateful]
        methods = [parameter.method for parameter in siblings]
        if missing and model.dialect.method_option in group.options:
            method_name = _option_of(group, model.dialect.method_option)
            # The siblings' come first, as they may have masters.
            methods = [m for m in (*methods, *model.dialect.methods) if m.name == method_name]
        elif len({method.name for method in methods}) > 1:
            methods = []
        chains = siblings[0].chains if siblings else frozenset([group.chain])
        for name in missing if methods else ():
            parameter = parameters.get(name, TranslatedParameter(name, name, (name,)))
            if parameter.weight and not methods[0].steps_shape(parameter.shape):
                continue  # it is stepped otherwise than its siblings
            stateless[name] = replace(parameter, method=methods[0], group=group, step=0, chains=chains)
    return stateless


def _with_target_method(
    model: TranslatedModel, parameter: TranslatedParameter, unsaid: Mapping[str, frozenset[str]]
) -> TranslatedParameter:
    """Return a parameter with the target's method and optimizer, and the matrices that its options have to say."""
    dialect, target = model.dialect, model.target
    method = parameter.method if model.is_same_dialect else target.writes(parameter.method)
    chain_name = ""
    if target.chained:
        if len(parameter.chains) > 1:
            chains = sorted(parameter.chains)
            raise SourceError(f"parameter {parameter.name!r} is made of state of more than one optimizer: {chains}")
        if target.keys.optimizers == dialect.keys.optimizers:
            chain_name = next(iter(parameter.chains), "")
        chain_name = chain_name or target.chains.get(method.name, "")
    # Groups that are copied say what they said, unless rules have changed the parameter.
    matrices = None
    if parameter.regrouped or not model.copies_groups:
        matrices = parameter.matrices if parameter.regrouped and "momentum" in parameter.method.slots else None
        reason = ""
        if (matrices is None or not matrices.is_known) and parameter.hidden_pieces:
            hint = dialect.hints.get("pieces", "give pieces where the optimizer is made")
            reason, matrices = f"{parameter.hidden_pieces}, and no option says how: {hint}", UNKNOWN
        elif matrices is not None and matrices.options() is None:
            reason = "its parts are cut into matrices in several ways, and no options say that"
        if reason:
            model.findings.check(Action.SET, f"pieces of {parameter.name}", reason=reason, topic=Topic.OPTIONS)
    return replace(
        parameter,
        target_method=method,
        chain=chain_name,
        target_matrices=matrices,
        unsaid=frozenset().union(*(unsaid.get(alias, frozenset()) for alias in parameter.aliases)),
    )


def _refuse_forms(model: TranslatedModel, parameters: Mapping[str, TranslatedParameter]) -> None:
    """Refuse state that another program, or rules, cannot take: of unknown parameters, or of another shape."""
    dialect, names, vectors = model.dialect, {*model.view.names.values()}, list[str]()
    # State of numbered parameters whose names nothing tells, neither the checkpoint nor rules.
    for name, parameter in parameters.items() if dialect.numbered and not model.target.numbered else ():
        if name not in names and parameter.slots and parameter.aliases == (name,):
            raise unnamed_state(model.manifest.provenance, name)
    # Momentum of parameters that no method of matrices steps, as Megatron-FSDP's Muon keeps it (#6425).
    for name, parameter in parameters.items() if model.choices.rules.rules or not model.is_same_dialect else ():
        if parameter.is_stateful and not parameter.method.steps_shape(parameter.shape):
            vectors.append(name)
    if vectors:
        raise SourceError(
            f"{listed(sorted(vectors))} of less than two dims has momentum as if {dialect.name}'s Muon stepped it: it "
            "is plain momentum SGD there, in no Muon group, and no method here; make a copy without that state, by "
            "`select=` of muonckpt.convert, and let AdamW or Lion start fresh for it, with fresh=[…] of muonckpt.load"
        )
    # Averages without an element for each of the weight, such as GaLore's, which are of low rank.
    for name, parameter in parameters.items():
        is_changed = parameter.is_stateful and (parameter.regrouped or not model.is_same_dialect)
        for common in sorted(AVERAGES & parameter.slots.keys()) if is_changed and parameter.weight else ():
            shape, slot = parameter.slots[common].record.shape, parameter.method.slots[common]
            if shape not in (parameter.shape, matrix_sides(parameter.shape, flatten=True)):
                raise UnknownOptimizerError(
                    f"parameter {name!r} of shape {parameter.shape} has {slot} of shape {shape}: state of another "
                    f"optimizer than {parameter.method.name}, as GaLore's of low rank, which cannot be translated; "
                    "first make a copy without it, by `select=` of muonckpt.convert"
                )


def _with_members(
    groups: Iterable[ParameterGroup], parameters: Mapping[str, TranslatedParameter], structural: Collection[str]
) -> tuple[tuple[ParameterGroup, tuple[str, ...]], ...]:
    """Return groups with their parameters by the target's names; a name is in the first group with a part of it.

    Args:
        structural: options that say which matrices are in a parameter, or name it: parts may differ in them.

    Raises:
        SourceError: parts of a parameter are in groups with other options.
    """
    new_names = _listed_by_alias(parameters.values())
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


def _listed_by_alias(parameters: Iterable[TranslatedParameter]) -> dict[str, dict[str, None]]:
    """Return the names that the target's groups list, by those that the source's list; rules split and join."""
    names: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for parameter in parameters:
        for alias in parameter.aliases:
            names[alias][parameter.listed] = None
    return names
