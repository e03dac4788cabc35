"""Tells which program wrote a checkpoint, and where its model and its optimizers lie; or lists the choices.

Nothing on disk names the program.  Keys in torch's forms, under any root, prove nothing but the form: a program, and
with it a momentum convention, is known only by slots and options that it alone writes.  Roots become a part of the
keys of a dialect (:func:`dialect_at`), and nothing else knows of them.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ..algebra.box import Index
from ..names.errors import SourceError, TargetError
from ..names.keys import NUMBER, PARAM_GROUPS, PARAMETER_OPTIONS, STATE, KeyPlace, OptimizerKey, key_of
from ..names.vocabulary import STEP, KeyPath
from ..names.wording import listed
from ..record.record import Manifest, StateRecord
from .dialect import WRAPPERS, Dialect, Keys, Mark, refuse_eight_bits
from .registry import DIALECTS, with_plugins
from .signs import SOURCE_ROOTS

_METHODS = tuple(chain.from_iterable(dialect.methods for dialect in DIALECTS.values()))
KNOWN_SLOTS = frozenset[str]().union(
    *(method.slots.values() for method in _METHODS), *(dialect.derived for dialect in DIALECTS.values())
)
"""The slots of all programs."""


@dataclass(frozen=True, slots=True)
class FoundKeys:
    """The keys of a checkpoint's optimizers and model, without places where nothing tells, and what is in them.

    Attributes:
        groups: the names of the options of each group.
        slots: the names of the slots of state.
        example: a key of state.
    """

    keys: Keys
    groups: tuple[frozenset[str], ...]
    slots: frozenset[str]
    example: str


def dialect_at(dialect: Dialect, keys: Keys) -> Dialect:
    """Return the dialect at these places, and at its own for what has none; only keys of `Keys`' forms have places."""
    if dialect.has_own_form:
        return dialect
    own = dialect.keys
    models = keys.models or own.models
    return dialect.at(replace(keys, models=models) if keys.optimizers else replace(own, models=models))


FORMS = ("nested", "flat")
"""The forms of keys that a target can be given."""

ROOTS = ("model", "optimizer", "parameters")
"""Parts of a target that can be given another root; that of parameters is in an optimizer of Megatron-LM's form."""


def with_target_keys(dialect: Dialect, form: str | None, roots: Mapping[str, str]) -> Dialect:
    """Return the dialect with its optimizer in keys of this form, and model and optimizer under these roots.

    Args:
        form: one of `FORMS`; None means the dialect's own.
        roots: dotted paths, by a name in `ROOTS`; an empty one is the top.  An optimizer that has one is the only one.

    Raises:
        TargetError: its keys are not of torch's forms, or have no such form.
    """
    keys = dialect.keys
    is_wrapped = keys.wrappers is not None
    if dialect.has_own_form or form not in (None, *FORMS) or (is_wrapped and form == "flat"):
        raise TargetError(
            f"`keys=` and `roots=`: expected {' or '.join(FORMS)}, and a program with torch's keys; found {form!r} for "
            f"{dialect.name}"
        )
    if unknown_roots := sorted(roots.keys() - {*ROOTS}):
        raise TargetError(f"`roots=`: expected one of {', '.join(ROOTS)}, found {unknown_roots[0]!r}")
    if "parameters" in roots and not is_wrapped:
        raise TargetError(f"`roots=`: optimizers of {dialect.name} have the model's names, so parameters have no root")
    # The target's optimizer is in one place, in its own form or the requested one.
    flat = keys.optimizers[0].flat if form is None else form == "flat"
    if flat and dialect.numbered:
        raise TargetError(f"`keys=`: {dialect.name} knows parameters by number, and flat keys have names")
    models = keys.models
    if "model" in roots:
        # In Megatron-LM's form the model's wrappers are a part of names.
        path = _path(roots["model"])
        depth = len(path)
        while is_wrapped and depth and path[depth - 1] == WRAPPER:
            depth -= 1
        models = (KeyPlace(path[:depth], "".join(f"{part}." for part in path[depth:])),)
    optimizer = KeyPlace(_path(roots.get("optimizer", "optimizer")), flat=flat)
    numbered = frozenset({optimizer} if dialect.numbered else ())
    wrappers = "".join(f"{part}." for part in _path(roots["parameters"])) if "parameters" in roots else keys.wrappers
    located = dialect.at(Keys((optimizer,), models, numbered=numbered, wrappers=wrappers))
    if not is_wrapped:
        return located
    # Roots that are the program's own are still a request: `target_of` takes only the program itself for none.
    return replace(located, chains={} if "optimizer" in roots else dialect.chains)


def target_of(requested: Dialect | None, source: Dialect, provenance: Mapping[str, Any]) -> Dialect:
    """Return the dialect to write, which is that of the source if none is requested.

    How many wrappers a program of Megatron-LM's form has, and whether its optimizers are chained, is decided by its
    run: what came from one goes back as it was, unless roots are given.
    """
    if requested is None or requested.keys.wrappers is None or requested is not DIALECTS.get(requested.name):
        return requested or source
    if source.name == requested.name:
        return source
    match provenance.get(SOURCE_ROOTS):
        case {requested.name: dict() as roots} if all(isinstance(root, str) for root in roots.values()):
            return with_target_keys(requested, None, roots)
    return requested


def roots_of(dialect: Dialect) -> dict[str, dict[str, str]]:
    """Return the roots with which `with_target_keys` makes this dialect of Megatron-LM's form; none of another form."""
    keys = dialect.keys
    if keys.wrappers is None:
        return {}
    # Chunks of a model have one root, as the names in them differ.
    model = keys.models[0] if len(keys.models) == 1 else replace(keys.models[0], root=(_MODEL,))
    roots = {"model": str(model), "parameters": keys.wrappers.removesuffix(".")}
    return {dialect.name: roots if dialect.chained else {**roots, "optimizer": key_of(keys.optimizers[0].root)}}


def _path(root: str) -> KeyPath:
    path = tuple(root.split(".")) if root else ()
    if not all(path):
        raise TargetError(f"`roots=`: expected names with dots between them, such as app.optimizer, found {root!r}")
    return path


def looks_like_state(path: KeyPath, optimizers: Collection[KeyPlace] = ()) -> bool:
    """Return whether a path that no keys read is in an optimizer's state, or has a part that only they have."""
    if any(path[: len(place.root) + 1] == (*place.root, STATE) for place in optimizers if not place.flat):
        return True
    parts = key_of(path).split(".")
    has_slot = STATE in parts and not KNOWN_SLOTS.isdisjoint(parts[1:])
    return has_slot or not {PARAM_GROUPS, PARAMETER_OPTIONS}.isdisjoint(parts)


def keys_in(manifest: Manifest) -> FoundKeys:
    """Return the places of the optimizers and of the model of a checkpoint.

    An optimizer is where state has parameter groups beside it, or if it has none, where all slots are known ones.  The
    model is where most of the parameters that have state are found under their names.  In Megatron-LM's form, the
    wrappers of optimizers and model are not a part of names.
    """
    # Read every path in all ways: as an option, and as state.
    keys_by_path = {entry.path: entry.key for entry in chain[Any](manifest.tensors, manifest.blobs)}
    groups: defaultdict[KeyPlace, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    names_by_option_place: defaultdict[KeyPlace, set[str]] = defaultdict(set)
    slots: defaultdict[KeyPlace, set[str]] = defaultdict(set)
    readings_by_path: dict[KeyPath, list[OptimizerKey]] = {}
    for path in keys_by_path:
        for option in OptimizerKey.of_option(path):
            groups[option.place][option.name].add(option.leaf)
        for option in OptimizerKey.of_parameter_option(path):
            groups[option.place][option.name].add(option.leaf)
            names_by_option_place[option.place].add(option.name)
        if readings := list(OptimizerKey.of_slot(path)):
            readings_by_path[path] = readings
        for reading in readings:
            slots[reading.place].add(reading.leaf)
    # Keep the readings in optimizers, the shortest prefix first.
    of_known_slots = {place for place, leaves in slots.items() if leaves <= KNOWN_SLOTS and leaves - {STEP}}
    optimizers_without_groups = of_known_slots - groups.keys()
    state: dict[KeyPath, OptimizerKey] = {}
    for path, readings in readings_by_path.items():
        in_groups = [reading for reading in readings if reading.place in groups]
        accepted = in_groups or [reading for reading in readings if reading.place in optimizers_without_groups]
        if accepted:
            state[path] = accepted[0]
    names_by_place: defaultdict[KeyPlace, set[str]] = defaultdict(set)
    for reading in state.values():
        names_by_place[reading.place].add(reading.name)
    # The model is where tensors have the names of the parameters, which some optimizers number.
    numbered = {p for p, names in names_by_place.items() if not p.flat and all(map(NUMBER.fullmatch, names))}
    names = set[str]().union(*(names for place, names in names_by_place.items() if place not in numbered))
    # A tensor that is no state may be a weight.
    weights = [tensor.path for tensor in manifest.tensors if tensor.path not in state]
    # Options by parameter are Megatron-LM's form, and so are the names of its wrappers where there are no options.
    is_wrapped = names and names_by_place.keys().isdisjoint(groups) and all(n.startswith(WRAPPERS) for n in names)
    places = tuple(sorted({*names_by_place, *names_by_option_place}, key=_number_order))
    found_keys = FoundKeys(
        Keys(places, (), frozenset(numbered)),
        tuple(map(frozenset, chain.from_iterable(groups[place].values() for place in names_by_place))),
        slots=frozenset(reading.leaf for reading in state.values()),
        example=next((keys_by_path[path] for path in state), ""),
    )
    if not (names_by_option_place or is_wrapped):
        models = _find_model(weights, names) or _find_numbered_model(manifest, state)
        return replace(found_keys, keys=replace(found_keys.keys, models=models))
    optimizers: defaultdict[frozenset[str], dict[KeyPlace, Collection[str]]] = defaultdict(dict)
    for place in places:
        kind = frozenset(chain.from_iterable(groups[place].values())) or frozenset(slots[place])
        optimizers[kind][place] = names_by_place[place] or names_by_option_place[place]
    return replace(found_keys, keys=_with_models_and_wrappers(found_keys.keys, optimizers, weights))


WRAPPER = "module"
"""The name of what a wrapper wraps."""


def _without_wrappers(name: str) -> str:
    return re.sub(rf"^({WRAPPER}\.)+", "", name)


def _common_wrappers(names: Iterable[str]) -> str:
    """Return the wrappers that all names begin with."""
    counts = ((len(name) - len(_without_wrappers(name))) // len(f"{WRAPPER}.") for name in names)
    return f"{WRAPPER}." * min(counts, default=0)


_WrappedOptimizers = Mapping[frozenset[str], Mapping[KeyPlace, Collection[str]]]
"""The parameters of optimizers in Megatron-LM's form, by place, by the options or else slots, which tell a class."""

_MODEL = "model"
_CHUNK = re.compile(f"{_MODEL}[0-9]+")
"""Megatron-LM's keys of the chunks of a virtual pipeline."""


def _with_models_and_wrappers(keys: Keys, optimizers: _WrappedOptimizers, weights: Iterable[KeyPath]) -> Keys:
    """Return the keys with the place of the model, or of its chunks, and what wrappers put before names in optimizers.

    Names are compared without wrappers: how many a name has differs between optimizers and model, from run to run.
    """
    names = set[str]().union(*chain.from_iterable(members.values() for members in optimizers.values()))
    bare_names = {_without_wrappers(name): name for name in names}
    bare_paths = {(*path[:-1], _without_wrappers(str(path[-1]))): str(path[-1]) for path in weights}
    # Chunks have a number after the model's key; otherwise the model is in one place.
    places = {KeyPlace(path[:-1]) for path in bare_paths if path[-1] in bare_names}
    is_in_chunks = len(places) > 1 and all(_CHUNK.fullmatch(str(place)) for place in places)
    models = tuple(sorted(places, key=_number_order)) if is_in_chunks else _find_model(bare_paths, bare_names)
    if not models:
        return replace(keys, wrappers=_common_wrappers(names))
    # All weights have the model's wrappers; what a parameter has more than its weight is the optimizer's.
    model_prefix = models[0].prefix
    names_by_root: dict[KeyPath, set[str]] = {model.root: set() for model in models}
    wrapped_names = [name for path, name in bare_paths.items() if path[:-1] in names_by_root]
    prefix = _common_wrappers(wrapped_names) + model_prefix
    prefixes: Counter[str] = Counter()
    for path, name in bare_paths.items():
        bare_name = str(path[-1]).removeprefix(model_prefix)
        if path[:-1] in names_by_root:
            names_by_root[path[:-1]].add(bare_name)
            if bare_name in bare_names:
                prefixes[bare_names[bare_name].removesuffix(name.removeprefix(prefix))] += 1
    models = tuple(replace(model, prefix=prefix) for model in models)
    qualifiers: dict[str, str] = {}
    if sum(map(len, names_by_root.values())) > len(set[str]().union(*names_by_root.values())):
        qualifiers = {str(model): f"{key_of(model.root)}." for model in models}
        # There is an optimizer of each class for each chunk, in their order.
        for members in optimizers.values():
            for (place, names_in_place), root in zip(members.items(), names_by_root, strict=False):
                is_known = {*map(_without_wrappers, names_in_place)} <= names_by_root[root]
                if len(members) != len(names_by_root) or not is_known:
                    raise SourceError(
                        f"{str(place)!r} has parameters of the same names as other chunks of the model, and nothing "
                        "says whose it is; make a copy of each chunk with its optimizers, by `select=` of "
                        "muonckpt.convert"
                    )
                qualifiers[str(place)] = f"{key_of(root)}."
    return replace(keys, models=models, wrappers=prefixes.most_common(1)[0][0], qualifiers=qualifiers)


def _number_order(place: KeyPlace) -> tuple[object, ...]:
    """Return a key that sorts numbers in places by value."""
    parts = re.split("([0-9]+)", str(place))
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


def _find_model(weights: Iterable[KeyPath], names: Collection[str]) -> tuple[KeyPlace, ...]:
    """Return the place where most of the parameters are found under their names."""
    # A weight's key can be split into place and name at every dot.
    counts: Counter[KeyPlace] = Counter()
    for path in weights:
        leaf = str(path[-1])
        starts = (0, *(match.end() for match in re.finditer(r"\.", leaf)))
        counts.update(KeyPlace(path[:-1], leaf[:start]) for start in starts if leaf[start:] in names)
    max_count = max(counts.values(), default=0)
    return _model_among([place for place, count in counts.items() if count == max_count])


def _find_numbered_model(manifest: Manifest, state: Mapping[KeyPath, OptimizerKey]) -> tuple[KeyPlace, ...]:
    """Return the place whose tensors have the shapes of all state, which has numbers: else the only place there is."""
    shapes_by_parameter: defaultdict[tuple[KeyPlace, str], list[Index]] = defaultdict(list)
    shapes_by_root: defaultdict[KeyPath, Counter[Index]] = defaultdict(Counter)
    for tensor in manifest.tensors:
        if reading := state.get(tensor.path):
            shapes_by_parameter[reading.place, reading.name].append(tensor.shape)
        else:
            shapes_by_root[tensor.path[:-1]][tensor.shape] += 1
    needed = Counter(max(shapes, key=math.prod) for shapes in shapes_by_parameter.values())
    roots = [root for root, shapes in shapes_by_root.items() if needed and needed <= shapes]
    if needed and len(shapes_by_root) == 1:
        roots = [*shapes_by_root]
    return _model_among([KeyPlace(root) for root in roots])


def _model_among(candidates: Sequence[KeyPlace]) -> tuple[KeyPlace, ...]:
    """Return the place of the model: one that is called ``model`` comes before copies, such as averages of weights."""
    usual = [place for place in (KeyPlace(("model",)), KeyPlace(())) if place in candidates]
    models = usual or [place for place in candidates if "model" in (*place.root[-1:], place.prefix.removesuffix("."))]
    places = models[:1] or candidates
    if len(places) > 1:
        raise SourceError(
            f"the optimizer's parameters are under {listed(map(repr, map(str, places)), separator=' and under ')}, and "
            "nothing says which is the model; copy one, with the optimizer, by muonckpt.convert with `select=`"
        )
    return tuple(places)


# The program.

_NAME_IT = "name one with `from_dialect=` of muonckpt.convert"
"""The cure, with its function: functions that only look at a checkpoint say so, too."""


@dataclass(frozen=True, slots=True)
class Detected:
    """A dialect with the places of its keys, and the ``reasons`` why it is this one, as sentences."""

    dialect: Dialect
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dialect.name} ({self.dialect.who}): {'; '.join(self.reasons)}"


def detect(manifest: Manifest, named: Dialect | None = None) -> Detected:
    """Return the dialect of a checkpoint, by its keys alone, or the one that the user names.

    Raises:
        SourceError: no dialect, or more than one, has such keys; the message lists them.  Or nothing says which of
            several places is that of the model.
    """
    if named is not None:
        return Detected(dialect_at(named, keys_in(manifest).keys), ("`from_dialect=` names it",))
    # Some keys have a form that tells the program.
    for dialect in DIALECTS.values():
        # Only known slots count, since a name could begin there.
        known_slots = frozenset[str]().union(*(method.slots.values() for method in dialect.methods))
        entries = chain[Any](manifest.tensors, manifest.blobs) if dialect.has_own_form else ()
        for entry, reading in dialect.state_in(entries):
            if reading.leaf in known_slots:
                return Detected(dialect, (f"its state is under keys such as {entry.key!r}",))
    # Options by parameter tell Megatron-FSDP's, whatever wraps its names.
    found_keys = keys_in(manifest)
    if found_keys.keys.wrappers is not None:
        example = found_keys.example
        reason = f"its state is under keys such as {example!r}" if example else "it has param_to_group_meta"
        return Detected(dialect_at(DIALECTS["fsdp_dtensor"], found_keys.keys), (reason,))
    # State in torch's forms tells it by slots and options.
    if found_keys.keys.optimizers:
        keys = found_keys.keys
        places = ", ".join(map(str, keys.optimizers))
        form = "flat" if any(place.flat for place in keys.optimizers) else "numbered" if keys.numbered else "nested"
        reason = f"{places} has torch's {form} keys, such as {found_keys.example!r}"
        # Plug-ins are asked only where no built-in program has a mark.
        marks, void_reasons = _marked_programs(found_keys, DIALECTS)
        if not marks:
            marks, void_reasons = _marked_programs(found_keys, with_plugins())
        if len(marks) > 1:
            programs_marked = ", ".join(f"{dialect.name} (only it writes the {mark})" for dialect, mark in marks)
            raise SourceError(f"{reason}, and marks of more than one program: {programs_marked}; {_NAME_IT}")
        for dialect, mark in marks:
            return Detected(dialect_at(dialect, keys), (reason, f"only it writes the {mark}"))
        return _unknown_program(keys, reason, *void_reasons or ("no slot or option is written by one program only",))
    # A model without an optimizer tells only where it lies.
    weights = [tensor.path for tensor in manifest.tensors if tensor.path[0] == "model"]
    models = [
        name for name in ("fsdp_dtensor", "dcp") if weights and all(map(DIALECTS[name].keys.read_weight, weights))
    ]
    if models:
        return Detected(DIALECTS[models[0]], (f"weights only, under {DIALECTS[models[0]].keys.model_form}",))
    roots = {tensor.path[:-1] for tensor in manifest.tensors}
    has_state = any(looks_like_state(tensor.path) for tensor in manifest.tensors)
    if len(roots) == 1 and not has_state and (root := roots.pop())[-1:] in ((), ("model",), ("state_dict",)):
        place = KeyPlace(root)
        where = f"under {str(place)!r}" if root else "at the top"
        return Detected(dialect_at(DIALECTS["dcp"], Keys((), (place,))), (f"weights only, {where}",))
    raise SourceError(f"the keys are not those of a known dialect ({', '.join(DIALECTS)}); {_NAME_IT}")


def with_slots(manifest: Manifest) -> Manifest:
    """Return the manifest with parameters and slots as `with_slots_of` its dialect; unchanged if that is unknown."""
    try:
        dialect = detect(manifest).dialect
    except SourceError:
        return manifest
    return with_slots_of(manifest, dialect)


def with_slots_of(manifest: Manifest, dialect: Dialect) -> Manifest:
    """Return the manifest with parameters and slots as this dialect's keys name them, where it does not record them.

    Raises:
        SourceError: there is state in 8 bits.
    """
    # Numbers of several optimizers collide, so a recorded slot is read again with its optimizer.
    numbered = dialect.chained and dialect.numbered
    tensors: list[StateRecord] = []
    for tensor in manifest.tensors:
        reading = dialect.keys.read_state(tensor.path) if tensor.slot is None or numbered else None
        if reading and (tensor.slot is None or tensor.name == reading.name.rpartition("#")[2]):
            tensor = replace(tensor, name=reading.name, slot=reading.leaf)
        refuse_eight_bits(tensor.name or tensor.key, {tensor.slot})
        tensors.append(tensor)
    return replace(manifest, tensors=tuple(tensors))


def _unknown_program(keys: Keys, *reasons: str) -> Detected:
    numbered = keys.numbered and keys.numbered == {*keys.optimizers}
    return Detected(dialect_at(DIALECTS["fully_shard" if numbered else "dcp"], keys), reasons)


def _marked_programs(
    found_keys: FoundKeys, dialects: Mapping[str, Dialect]
) -> tuple[Sequence[tuple[Dialect, Mark]], Iterable[str]]:
    """Return the programs of which the checkpoint bears a mark, each with its first, and why others are void.

    A mark is void if groups have an option that the program never writes.
    """
    marks, void_reasons = list[tuple[Dialect, Mark]](), dict[str, None]()
    for dialect in dialects.values():
        # Options count in groups with momentum, if there are any: others are of AdamW.
        momentum_options = dialect.options_called("momentum")
        groups = [group for group in found_keys.groups if momentum_options & group] or found_keys.groups
        unknown_options = dict.fromkeys(chain.from_iterable(map(dialect.unknown_options, groups)))
        for mark in dialect.marks:
            has_options = not mark.options or any(mark.options <= group for group in found_keys.groups)
            is_away = mark.at_home and not (found_keys.keys.models and found_keys.keys == dialect.keys)
            if is_away or not (mark.slots <= found_keys.slots and has_options):
                continue
            if unknown_options:
                void_reasons[
                    f"it has the {mark} of {dialect.who}, but also {listed(map(repr, unknown_options))}, which that "
                    f"never writes, so another program wrote it; {_NAME_IT}"
                ] = None
            else:
                marks.append((dialect, mark))
                break
    return [(dialect, mark) for dialect, mark in marks if mark.at_home] or marks, void_reasons


def confirm(manifest: Manifest, detected: Detected, groups: Iterable[Mapping[str, Any]]) -> Detected:
    """Return the detected program if the values of its groups' options are of its kinds; otherwise none."""
    dialect = detected.dialect
    for options in groups if dialect.beside is not None else ():
        for option, expected in dialect.misfits(options).items():
            # A value that the program would never write voids the claim of a closed table.
            doubt = (
                f"its groups have {option}={options[option]!r}, where {dialect.who} has {expected}, so another program "
                f"wrote it; {_NAME_IT}"
            )
            return _unknown_program(keys_in(manifest).keys, detected.reasons[0], doubt)
    return detected
