"""Describes how one program names its state: a :class:`Dialect` is data, and reads and writes by the same keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from ..algebra.box import Index
from ..names.errors import SourceError, UnknownOptimizerError
from ..names.keys import NUMBER, PARAM_GROUPS, PARAMETER_OPTIONS, STATE, KeyPlace, OptimizerKey, key_of
from ..names.renaming import compiled, filled
from ..names.vocabulary import EIGHT_BIT_SLOTS, FUSION, HISTORY_OPTIONS, PARAMS, STEP, Convention, KeyPath
from ..record.record import Blob, StateRecord
from .codings import Coding, renamed
from .signs import COMMON_FILE

AnyEntry = TypeVar("AnyEntry", StateRecord, Blob)


# The keys of a program.


class KeyMeaning(NamedTuple):
    """The meaning of a key.

    Attributes:
        name: of a parameter, or the number of a group that is ``listed``.
        leaf: the slot or the option; empty for a weight.
        chain: tells several optimizers, or chunks of a model, apart.
    """

    name: str
    leaf: str = ""
    chain: str = ""
    listed: bool = False


WRAPPERS = "module.module.module."
"""Prefixes that Megatron-LM's three wrappers give the names of parameters in its optimizers."""


@dataclass(frozen=True)
class Keys:
    """Keys in torch's forms, or in Megatron-LM's, by the places of optimizers and model; they are written as read.

    Each of several optimizers numbers its parameters from 0, so a number is read as a name with the optimizer:
    ``"muon#0"``.  A name that several chunks of a model have is read with its qualifier.

    Attributes:
        optimizers: several ones are told apart by their place, and so are chunks of a model.
        models: where the model is, or the chunks that a virtual pipeline has of it.
        numbered: the optimizers in which parameters are known by their number.
        wrappers: what stands before the names of parameters in optimizers of Megatron-LM's form; None in torch's.
        qualifiers: what tells parameters of the same name in several chunks apart, by place of optimizers and chunks.
    """

    optimizers: tuple[KeyPlace, ...] = (KeyPlace(("optimizer",)),)
    models: tuple[KeyPlace, ...] = (KeyPlace(("model",)),)
    numbered: frozenset[KeyPlace] = frozenset()
    wrappers: str | None = None
    qualifiers: Mapping[str, str] = field(default_factory=dict)

    @property
    def chained(self) -> bool:
        """Return whether keys say to which of several optimizers they belong."""
        return len(self.optimizers) > 1

    @property
    def listed(self) -> bool:
        """Return whether keys have groups by their position in a list."""
        return self.wrappers is None and not any(place.flat for place in self.optimizers)

    def read_weight(self, path: KeyPath) -> KeyMeaning | None:
        for place in self.models if path else ():
            leaf = str(path[-1])
            if path[:-1] == place.root and leaf.startswith(place.prefix) and leaf != place.prefix:
                chain = str(place) if len(self.models) > 1 else ""
                return KeyMeaning(self.qualifiers.get(chain, "") + leaf.removeprefix(place.prefix), "", chain)
        return None

    def read_state(self, path: KeyPath) -> KeyMeaning | None:
        for key in OptimizerKey.of_slot(path):
            has_name = key.place not in self.numbered or NUMBER.fullmatch(key.name)
            if key.place in self.optimizers and has_name and key.leaf and "." not in key.leaf:
                return self._reading(key)
        return None

    def read_option(self, path: KeyPath) -> KeyMeaning | None:
        readings = OptimizerKey.of_option if self.wrappers is None else OptimizerKey.of_parameter_option
        for key in readings(path):
            if key.place in self.optimizers and key.leaf and "." not in key.leaf:
                is_listed = self.wrappers is None and not key.place.flat
                return KeyMeaning(key.name, key.leaf, self._chain(key.place), True) if is_listed else self._reading(key)
        return None

    def write_weight(self, name: str, chain: str = "") -> KeyPath:
        """Return the key of a weight.

        Raises:
            SourceError: it could not be read back; so do the others.
        """
        chain = chain if len(self.models) > 1 else ""
        place = next((place for place in self.models if str(place) == chain), self.models[0])
        bare_name = name.removeprefix(self.qualifiers.get(chain, ""))
        return self._checked((*place.root, place.prefix + bare_name), self.read_weight, KeyMeaning(name, "", chain))

    def write_state(self, name: str, slot: str, chain: str = "") -> KeyPath:
        place = self._place(chain)
        path = self._path(place, STATE, self._stored_name(name, chain), slot)
        return self._checked(path, self.read_state, KeyMeaning(name, slot, self._chain(place)))

    def write_option(self, name: str, option: str, chain: str = "") -> KeyPath:
        """Return the key of an option of a group in a list, by the group's number, or of a parameter by its name."""
        place = self._place(chain)
        is_listed = self.wrappers is None and not place.flat
        word = PARAM_GROUPS if self.wrappers is None else PARAMETER_OPTIONS
        path = self._path(place, word, int(name) if is_listed else self._stored_name(name, chain), option)
        return self._checked(path, self.read_option, KeyMeaning(name, option, self._chain(place), is_listed))

    def full_name(self, name: str, chain: str) -> str:
        """Return the name of a parameter from its name or number in an optimizer."""
        if not self.chained:
            return name
        return f"{chain}#{name}" if self._place(chain) in self.numbered else self.qualifiers.get(chain, "") + name

    @property
    def state_form(self) -> str:
        """The form of the keys of state, for messages."""
        name, number = f"{self.wrappers or ''}{{name}}", "{number}"
        names = {place: number if place in self.numbered else name for place in self.optimizers}
        return " and ".join(key_of(self._path(place, STATE, name, "{slot}")) for place, name in names.items())

    @property
    def model_form(self) -> str:
        """The form of the keys of weights, for messages."""
        return " and ".join(key_of((*place.root, f"{place.prefix}{{name}}")) for place in self.models)

    def _reading(self, key: OptimizerKey) -> KeyMeaning | None:
        chain, wrappers = self._chain(key.place), self.wrappers or ""
        if not key.name.startswith(wrappers) or key.name == wrappers:
            return None
        return KeyMeaning(self.full_name(key.name.removeprefix(wrappers), chain), key.leaf, chain)

    def _chain(self, place: KeyPlace) -> str:
        return str(place) if self.chained else ""

    def _place(self, chain: str) -> KeyPlace:
        return next((place for place in self.optimizers if str(place) == chain), self.optimizers[0])

    def _path(self, place: KeyPlace, word: str, name: str | int, leaf: str) -> KeyPath:
        return (*place.root, *((f"{place.prefix}{word}.{name}.{leaf}",) if place.flat else (word, name, leaf)))

    def _stored_name(self, name: str, chain: str) -> str:
        return (self.wrappers or "") + name.removeprefix(self.full_name("", chain))

    def _checked(self, path: KeyPath, read: Callable[[KeyPath], KeyMeaning | None], expected: KeyMeaning) -> KeyPath:
        if read(path) != expected:
            raise SourceError(f"{key_of(path)!r} cannot hold {expected}")
        return path


FLAT = KeyPlace(("optimizer",), flat=True)


# Programs.

RATES: Mapping[str, str] = MappingProxyType({"lr": "lr", "weight_decay": "weight_decay"})
"""Options that have these names in most programs."""

UNFUSED: Mapping[str, object] = MappingProxyType({"columns": None, "interleaved": 1, "maximize": False})
"""Constant options of every program but ours: no parameter has fused columns or interleaved rows."""


@dataclass(frozen=True, slots=True)
class StoredMethod:
    """An update method as a program stores it.

    Attributes:
        slots: the program's names of slots, by common name (``momentum``, ``first``, ``second``, ``step``, ``master``).
        options: the program's names of options whose values are common ones (``lr``, ``momentum``, ``pieces``, …).
        codings: the other options that change the update.
        inert_options: options of a group that do not change this update, with their values in a new optimizer.
        default_options: options that change it and that the program needs, with their values in a new optimizer.
        derived: functions that compute slots from common options and a shape; they return None if they cannot.
        family: methods of one family have the same options with the same meaning.
        absent_options: options that no group of this method has: one that does has lost slots of another method.
    """

    name: str
    slots: Mapping[str, str]
    options: Mapping[str, str] = field(default_factory=dict)
    codings: tuple[Coding, ...] = ()
    inert_options: Mapping[str, object] = field(default_factory=dict)
    default_options: Mapping[str, object] = field(default_factory=dict)
    derived: Mapping[str, Callable[[Mapping[str, Any], Index], float | None]] = field(default_factory=dict)
    family: str | None = None
    absent_options: frozenset[str] = frozenset()

    @property
    def all_options(self) -> frozenset[str]:
        """Return the program's names of all options that a group of this method may have."""
        return frozenset(self.inert_options).union(*(coding.options for coding in self.encodings))

    @property
    def encodings(self) -> tuple[Coding, ...]:
        """Return the codings of all options that change the update."""
        return (*(renamed(option, name) for name, option in self.options.items()), *self.codings)

    def steps_shape(self, shape: Index) -> bool:
        """Return whether it steps parameters of this shape: orthogonalised ones have two dims or more."""
        return "momentum" not in self.slots or len(shape) >= 2


_MOMENTS: Mapping[str, str] = MappingProxyType({"first": "exp_avg", "second": "exp_avg_sq", STEP: STEP})
"""The slots of AdamW, which many methods have."""

_AMSGRAD = frozenset({"amsgrad"})
"""The option that torch's Adam and AdamW have, and their relatives lack."""

_FOREIGN: Mapping[tuple[str, ...], StoredMethod] = MappingProxyType(
    {
        ("dampening",): StoredMethod("torch.optim.SGD", {"momentum": "momentum_buffer"}),
        ("alpha", "centered"): StoredMethod("torch.optim.RMSprop", {"momentum": "momentum_buffer", STEP: STEP}),
        ("momentum_decay",): StoredMethod("torch.optim.NAdam", _MOMENTS),
        ("betas", "foreach"): StoredMethod("torch.optim.RAdam or Adamax", _MOMENTS, absent_options=_AMSGRAD),
        ("update_proj_gap",): StoredMethod("GaLore", _MOMENTS),
        ("grad_averaging",): StoredMethod("LAMB", _MOMENTS),
        ("wd_ratio",): StoredMethod("AdamP", _MOMENTS),
        ("final_lr",): StoredMethod("AdaBound", _MOMENTS),
        ("initial_accumulator",): StoredMethod("Yogi", _MOMENTS),
    }
)
"""Methods whose state looks like that of a known one but means something else, by options that their groups have."""


@dataclass(frozen=True, slots=True)
class OptionKind:
    """A kind of values of an option, with its description for messages."""

    description: str
    includes: Callable[[Any], bool]

    def or_none(self) -> OptionKind:
        return OptionKind(f"{self.description} or None", lambda value: value is None or self.includes(value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_all(includes: Callable[[Any], bool], value: object, count: int | None = None) -> bool:
    return isinstance(value, list | tuple) and count in (None, len(value)) and all(map(includes, value))


_NUMBER = OptionKind("a number", _is_number)
_COUNT = OptionKind("a whole number", lambda value: _is_number(value) and value % 1 == 0)
_COUNTS = OptionKind("whole numbers", lambda value: _are_all(_COUNT.includes, value))
FLAG = OptionKind("True or False", lambda value: isinstance(value, int) and value in (0, 1))
_WORD = OptionKind("a word", lambda value: isinstance(value, str))
_PAIR = OptionKind("two numbers", lambda value: _are_all(_is_number, value, 2))
ANYTHING = OptionKind("anything", lambda value: True)
TRIPLE = OptionKind("three numbers", lambda value: _are_all(_is_number, value, 3))
_TRIPLES = OptionKind(
    "three numbers, or three for each step", lambda v: TRIPLE.includes(v) or (bool(v) and _are_all(TRIPLE.includes, v))
)

_KINDS: Mapping[str, OptionKind] = MappingProxyType(
    dict.fromkeys(("lr", "weight_decay", "wd", "momentum", "mu", "beta1", "beta2", "muon_beta2"), _NUMBER)
    | dict.fromkeys(("eps", "epsilon", "adamw_eps"), _NUMBER)
    | dict.fromkeys(("step", "ns_steps", "num_experts", "head_blocks"), _COUNT)
    | dict.fromkeys(("nesterov", "cautious", "cautious_wd", "flatten", "use_muon", "clip_grad"), FLAG)
    | dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable", "decoupled_weight_decay"), FLAG)
    | dict.fromkeys(("foreach", "fused"), FLAG.or_none())
    | dict.fromkeys(("algorithm", "convention", "ns_method", "ns_implementation"), _WORD)
    | dict.fromkeys(("adjust_lr", "adjust_lr_fn"), _WORD.or_none())
    | dict.fromkeys(("betas", "adamw_betas"), _PAIR)
    | dict.fromkeys(("ns_coefficients", "gram_ns_coefficients"), _TRIPLES)
    | {
        "split_sizes": _COUNTS.or_none(),
        "num_heads": _COUNT.or_none(),
        "gram_ns_reset_iterations": _COUNTS,
        "gram_newton_schulz_config": OptionKind("a dict", lambda value: isinstance(value, Mapping)).or_none(),
        "ns_algorithm": OptionKind('"standard" or "gram"', lambda value: value in ("standard", "gram")),
        "use_cuda_graph": FLAG,
    }
)
"""The kinds of options, by the names that programs have for them."""


_COMMON_OPTIONS = frozenset({PARAMS, "param_names", "name"}) | HISTORY_OPTIONS
"""Options that state dicts, schedulers and users add to the groups of any program."""


class OptionName(NamedTuple):
    """Names by which a program lists options, where it stores the parameters under others: patterns of `renaming`.

    Attributes:
        listed: the name in options.
        stored: the names of weights and state; several where a parameter is stored in parts.
        beside: is stored as well, where options have this form; empty if they always may.
    """

    listed: str
    stored: tuple[str, ...]
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A sign that only one program leaves in a checkpoint: these slots, and these options of one group, together.

    A mark ``at_home`` counts where the keys lie as the program puts them, and goes before the others.
    """

    slots: Set[str] = frozenset()
    options: Set[str] = frozenset()
    at_home: bool = False

    def __str__(self) -> str:
        named = (("slot", sorted(self.slots)), ("option", sorted(self.options)))
        signs = " and the ".join(
            f"{kind}{'s' * (len(names) > 1)} {', '.join(map(repr, names))}" for kind, names in named if names
        )
        return f"{signs}, with parameters at the top" if self.at_home else signs


@dataclass(frozen=True, slots=True)
class Dialect:
    """A description of one program's checkpoints.

    Attributes:
        name: the value of ``to_dialect=`` and ``from_dialect=``.
        who: the program.
        convention: the convention of the momentum; None if the user must say it.
        methods: the update methods, in the order in which they are tried.
        always: options of every group with momentum, in all versions of the program: its convention holds for these.
        beside: options that a group with momentum may have beside those of its method; None if it may have any.
        kinds: the kinds of options that have another one in this program than in most.
        keys: of its model, its state and its options.
        option_names: names by which options are listed, where parameters are stored under others.
        marks: each of them alone tells the program.
        unique_keys: whether the form of its keys tells the program.
        derived: slots that the program can compute again; they are left out when another dialect is written.
        method_option: the group option that names the method; None if the slots tell it.
        takes_methods: whether this option may name methods of users, which are not listed.
        names_option: the option in which groups list the names of their parameters once more; None if none is written.
        constant_options: common options that are constants of the program, by method and name.
        hints: where a user finds common options that the program does not store.
        writable: whether checkpoints of this dialect can be written.
        common: the item that holds all groups and all other non-tensor values; None if there is none.
        chains: the key prefix for the state of each method, or the number of its optimizer, if the source has none.
        item: makes the key for an item of another program that this one does not know.
        unwritten_options: options that are never added, as they would point to a program, and so to a convention.
        private: globs of items that mean nothing to other programs; a program with the same glob keeps them.
        opaque: globs of state that only the program can read, as nothing says whose it is.
        arguments: reads the stored arguments of the run, and yields what must be set in code because of them, with the
            values and the reason; None if the program stores none.
        format: the format that the program needs; None if any that DCP reads will do.
        runs_keep: the convention that the program's runs keep, where its checkpoints do not prove it.
    """

    name: str
    who: str
    convention: Convention | None
    methods: tuple[StoredMethod, ...]
    always: frozenset[str] = frozenset()
    beside: frozenset[str] | None = None
    kinds: Mapping[str, OptionKind] = field(default_factory=dict)
    keys: Keys = Keys()
    option_names: tuple[OptionName, ...] = ()
    marks: tuple[Mark, ...] = ()
    unique_keys: bool = False
    derived: frozenset[str] = frozenset()
    method_option: str | None = None
    takes_methods: bool = False
    names_option: str | None = None
    constant_options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    writable: bool = True
    common: KeyPath | None = None
    chains: Mapping[str, str] = field(default_factory=dict)
    item: Callable[[str], str] = str
    unwritten_options: frozenset[str] = frozenset()
    private: frozenset[str] = frozenset()
    opaque: frozenset[str] = frozenset()
    arguments: Callable[[Mapping[str, object]], Iterable[tuple[str, tuple[str, ...], str]]] | None = None
    format: str | None = None
    runs_keep: Convention | None = None

    def at(self, keys: Keys) -> Dialect:
        """Return the dialect with these keys; itself if nothing changes."""
        return self if keys == self.keys else replace(self, keys=keys)

    @property
    def numbered(self) -> bool:
        return bool(self.keys.numbered)

    @property
    def has_own_form(self) -> bool:
        """Return whether its keys have a form of its own, and so no other places."""
        return self.unique_keys and self.keys.wrappers is None

    def state_in(self, entries: Iterable[AnyEntry]) -> Iterator[tuple[AnyEntry, KeyMeaning]]:
        """Yield the entries that are state, with the meaning of their keys."""
        for entry in entries:
            if (reading := self.keys.read_state(entry.path)) is not None:
                yield entry, reading

    def unknown_options(self, options: Iterable[str]) -> list[str]:
        """Return the options of a group with momentum that the program never writes."""
        if self.beside is None:
            return []
        methods = (method.all_options for method in self.methods if "momentum" in method.slots)
        known_options = self.always.union(self.beside, _COMMON_OPTIONS, {self.method_option}, *methods)
        return sorted({*options} - known_options)

    def misfits(self, options: Mapping[str, Any]) -> dict[str, str]:
        """Return the options whose values are of another kind than the program's, each with what was expected."""
        kinds = {option: self.kinds.get(option, _KINDS.get(option)) for option in options}
        return {o: kind.description for o, kind in kinds.items() if kind and not kind.includes(options[o])}

    def contradiction(self, options: Mapping[str, Any]) -> str:
        """Say why a group with momentum and these options is not the program's; empty if it may be."""
        if missing_options := sorted(self.always - options.keys()):
            return f"the group lacks {', '.join(map(repr, missing_options))}, which the program always writes"
        if unknown_options := self.unknown_options(options):
            return f"the group has {', '.join(map(repr, unknown_options))}, which the program never writes"
        for option, kind in self.misfits(options).items() if self.beside is not None else ():
            return f"the group has {option}={options[option]!r}, not {kind} as the program does"
        return ""

    def slots_called(self, name: str) -> frozenset[str]:
        """Return the names of the slot with this common name in all methods."""
        return frozenset(method.slots[name] for method in self.methods if name in method.slots)

    def options_called(self, name: str) -> frozenset[str]:
        """Return the names of the option with this common name in all methods."""
        return frozenset(method.options[name] for method in self.methods if name in method.options)

    def listed_names(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return the other names by which options of stored names may be listed, each with all its stored names."""
        stored_names: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
        own_names = {*stored_names}
        for listed, parts, beside in self.option_names:
            for name in tuple(stored_names):
                if (match := compiled(parts[0]).fullmatch(name)) is None:
                    continue
                placeholders = match.groupdict()
                names_of_parts = [filled(pattern, placeholders) for pattern in parts]
                names_beside = [filled(pattern, placeholders) for pattern in beside]
                if all(part in stored_names for part in (*names_of_parts, *names_beside)):
                    members = chain.from_iterable(stored_names[part] for part in names_of_parts)
                    stored_names.setdefault(filled(listed, placeholders), tuple(members))
        return {name: parts for name, parts in stored_names.items() if name not in own_names}

    def holds_groups(self, path: KeyPath) -> bool:
        """Return whether this is the item that holds all groups."""
        return self.common is not None and path in (self.common, (COMMON_FILE,))

    @property
    def chained(self) -> bool:
        return self.keys.chained

    def with_optimizers_of(self, methods: Iterable[str]) -> Dialect:
        """Return the dialect with an optimizer for each method, if `chains` puts them into several."""
        chains = sorted(map(str, {*map(self.chains.get, methods)} - {None}))
        if self.chained or len(chains) < 2:
            return self
        (optimizer,) = self.keys.optimizers
        places = {chain: replace(optimizer, root=(*optimizer.root, chain)) for chain in chains}
        names = {method: str(places[chain]) for method, chain in self.chains.items() if chain in places}
        return replace(self, keys=replace(self.keys, optimizers=tuple(places.values())), chains=names)

    def writes(self, method: StoredMethod) -> StoredMethod:
        """Return the method of this dialect for state that another dialect stores as ``method``.

        Raises:
            SourceError: there is none, or none with slots for all of that state.
        """
        candidates = [candidate for candidate in self.methods if candidate.name == method.name]
        needed = method.slots.keys() - {"step"}
        for candidate in candidates:
            if needed <= candidate.slots.keys():
                return candidate
        # No method has slots for all of that state.
        slots = sorted(set[str]().union(*(candidate.slots.values() for candidate in candidates)))
        available = ", ".join(slots) or "no such method"
        missing = ", ".join(sorted(method.slots[name] for name in needed))
        raise SourceError(
            f"{self.name} has no place for {method.name} with {missing} (it has {available}); leave out slots "
            'with `drop=`, and where these are float32 masters, make them weights with `weights="masters"`, or leave '
            'them out with `weights="model"`'
        )

    def foreign_method(self, options: Mapping[str, Any]) -> tuple[StoredMethod, str] | None:
        """Return the method of no program here that the options of a group tell, and which options do."""
        if self.method_option in options:
            return None
        for signs, method in _FOREIGN.items():
            if {*signs} <= options.keys() and method.absent_options.isdisjoint(options):
                absent = "".join(f" without {option!r}" for option in method.absent_options)
                return method, " and ".join(map(repr, signs)) + absent
        return None

    def methods_with(self, slots: frozenset[str], name: str | None) -> list[StoredMethod]:
        """Return the methods that keep these slots, perhaps besides one for the number of steps.

        Args:
            name: of the method, if the parameter's group says it; its own comes first.
        """
        stored = slots - self.derived
        if self.takes_methods and name is not None and all(method.name != name for method in self.methods):
            # A user's method, whose matrices are described as those of any other.
            common_names = {slot: common for common in ("momentum", "master") for slot in self.slots_called(common)}
            stored_slots = {common_names.get(slot, f"own {slot}"): slot for slot in sorted(stored)}
            usual = self.methods[0]
            options = {common: option for common, option in usual.options.items() if common in FUSION}
            codings = tuple(coding for coding in usual.codings if {*coding.common} <= {*FUSION})
            return [StoredMethod(name, stored_slots, options=options, codings=codings, family=self.name)]
        methods = [m for m in self.methods if {*m.slots.values()} in (stored, stored | {m.slots.get("step")})]
        return sorted(methods, key=lambda method: method.name != name)

    def method(
        self,
        slots: frozenset[str],
        name: str | None,
        parameter: str,
        dropped_slots: Collection[str] = (),
    ) -> StoredMethod:
        """Return the method of a parameter with these slots.

        Args:
            name: of the method, if the parameter's group says it.
            dropped_slots: slots left out by the user: NorMuon without its row variances is Muon.

        Raises:
            SourceError: no method has these slots, or more than one.
        """
        refuse_eight_bits(parameter, slots)
        stored = slots - self.derived
        # The method that the group names, or one that keeps as much of it as the user has left.
        namesakes = [method for method in self.methods if method.name == name]
        reduced_slots = [{c: s for c, s in method.slots.items() if s not in dropped_slots} for method in namesakes]
        candidates = [
            method
            for method in self.methods_with(slots, name)
            if name in (None, method.name) or ("momentum" in method.slots and method.slots in reduced_slots)
        ]
        if len({method.name for method in candidates}) == 1:
            for method in candidates:
                if {*method.slots.values()} == stored:
                    return method
            # No slot counts steps, as optimizers keep that count by group.
            slots_kept = {common: slot for common, slot in candidates[0].slots.items() if common != STEP}
            return replace(candidates[0], slots=slots_kept, options={STEP: STEP, **candidates[0].options})
        if dropped_slots and not candidates:
            raise SourceError(
                f"parameter {parameter!r} has {', '.join(sorted(stored)) or 'nothing'} without the slots that `drop=` "
                f"leaves out, and no method of {self.name} keeps just that: leave out all of its state, by `select=`, "
                "and let it start with fresh=[…] of muonckpt.load"
            )
        available = "; ".join(f"{m.name}: {', '.join(m.slots.values())}" for m in self.methods)
        state = f"{', '.join(sorted(stored))}" + (f" in a group of {name!r}" if name else "")
        count = "more than one method" if candidates else "no method"
        error = SourceError if candidates else UnknownOptimizerError
        raise error(
            f"parameter {parameter!r} has {state}: {count} of {self.name} ({available}) fits; muonckpt.convert leaves "
            "a slot out with `drop=`, and takes the name of another program with `from_dialect=`"
        )


def refuse_eight_bits(name: str, slots: Set[str | None]) -> None:
    """Raise SourceError if the state of a parameter, or a tensor, is in 8 bits."""
    if eight_bit_slots := sorted(EIGHT_BIT_SLOTS & slots):
        raise UnknownOptimizerError(
            f"{name!r} has {eight_bit_slots[0]}: state in 8 bits, which is not read. Take the weights by "
            "muonckpt.load(state_dict, path, fresh=['*']), and save them again"
        )
