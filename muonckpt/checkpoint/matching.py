"""The matching of a checkpoint with a state dict: parameters by their names, parameter groups by their parameters.

`match` decides for one rank, `judge` for all of them together.  State outside of a `NamedOptimizer` goes by its key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from glob import escape
from itertools import chain, repeat

import torch

from ..names.keys import NUMBER, PARAM_GROUPS, OptimizerKey, StateForm, key_of, largest_parts
from ..names.resumption import (
    GONE,
    NAMES_OF_GROUPS,
    Choices,
    Globs,
    LoadReport,
    match_subtrees,
)
from ..names.vocabulary import BY_RANK, ZERO_SLOTS, KeyPath, has_our_options
from ..names.wording import listed
from ..record.record import StateRecord
from .bits import dtype_name
from .live_state import LiveState
from .optimizer_matching import CODE_OPTIONS, match_optimizer
from .shared_memory import tied_keys
from .stored import Matching, MissingTensor, OptimizerParameter, Stored, has_grown, misfits

# --- One rank ---------------------------------------------------------------------------------------------------------


def match(live: LiveState, stored: Stored, choices: Choices) -> Matching:
    """Decide what a rank's state dict takes from a checkpoint."""
    # Report only a fault of the whole: else each key by itself would be missing or extra.
    if faults := [*_find_other_forms(live, stored)] or _find_moved_subtrees(live, stored):
        return Matching(covered_keys=frozenset(stored.entries), faults=tuple(faults))
    matching = _match_parts(live, stored, choices)
    if matching.fits:
        return matching
    # The cures depend on these: the tensors without a counterpart, and whether only rows are new.
    grown = _match_parts(live, stored, replace(choices, grow=Globs(("*",))))
    growable = frozenset(grown.grown.values()).difference(grown.differences)
    if grown.misfits or {*grown.faults} - {*matching.faults}:
        growable = frozenset()
    missing = {}
    for key, value in live.flat.items():
        if isinstance(value, torch.Tensor) and key not in stored.entries:
            name, note = live.slots.get(live.paths[key], (str(live.paths[key][-1]), None))
            slot = note.slot or "" if note else ""
            missing[key] = MissingTensor(name, slot, tuple(value.shape), dtype_name(value.dtype))
    return replace(matching, missing_tensors=missing, growable=growable)


def _match_parts(live: LiveState, stored: Stored, choices: Choices) -> Matching:
    """Match optimizers by the names of their parameters, and everything else by its key."""
    faults = []
    for key in live.numbered if choices.fresh.patterns else ():
        faults.append(
            f"the parameters of {key!r} have numbers, so fresh={list(choices.fresh.patterns)!r} cannot name them: save "
            "and load get_optimizer_state_dict(model, optimizer), which has names"
        )
    matchings = [match_optimizer(optimizer, live, stored, choices) for optimizer in live.optimizers]
    return Matching.joined([Matching(faults=tuple(faults)), _match_by_key(live, stored, choices), *matchings])


_FORMS = {
    StateForm.NUMBERED: ("optimizer.state_dict(), by number", "optimizer"),
    StateForm.NESTED: ("get_optimizer_state_dict, by name", "get_optimizer_state_dict(model, optimizer)"),
    StateForm.FLAT: (
        "a flattened get_optimizer_state_dict, by name",
        "get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))",
    ),
}
"""The forms in which users save and load an optimizer, in words and as code."""


def _find_other_forms(live: LiveState, stored: Stored) -> Iterator[str]:
    """Yield a fault for each optimizer that the checkpoint has in another form than the template."""
    if has_our_options(live.flat) and not stored.translated:
        return  # another program's, and to be translated first
    forms = {optimizer.key: optimizer.form for optimizer in live.optimizers}
    for key, form in (forms | dict.fromkeys(live.numbered, StateForm.NUMBERED)).items():
        saved_form = stored.form(key)
        if saved_form is None or saved_form is form:
            continue
        saved, code = _FORMS[saved_form]
        setting = "" if saved_form is StateForm.NUMBERED else "; set_optimizer_state_dict sets it afterwards"
        yield (
            f"{key!r} was saved from {saved}, and is to be loaded into {_FORMS[form][0]}. To keep all of its "
            f"state, give what it was saved from, {key!r}: {code}{setting}"
        )


def _find_moved_subtrees(live: LiveState, stored: Stored) -> list[str]:
    """Return a fault if whole parts of the checkpoint stand at other keys than in the template."""
    template_paths = set(map(live.paths.__getitem__, live.paths.keys() - stored.entries.keys()))
    stored_paths = {stored.entries[key].path for key in stored.entries.keys() - live.flat.keys()}
    subtrees = match_subtrees(template_paths, stored_paths)
    if not subtrees:
        return []
    sentences, moved_paths = [], set[KeyPath]()
    for place, stored_place in subtrees:
        sentences.append(f"the checkpoint has at {_label(stored_place)} what the state dict has at {_label(place)}")
        moved_paths |= {path for path in template_paths if path[: len(place)] == place}
    if missing_roots := dict.fromkeys(repr(path[0]) for path in sorted(template_paths - moved_paths, key=str)):
        sentences.append(f"it has no {listed(missing_roots)}")
    return [f"{'; '.join(sentences)}. Give each in the state dict at its place in the checkpoint"]


def _label(path: KeyPath) -> str:
    return repr(key_of(path)) if path else "its top"


def _match_by_key(live: LiveState, stored: Stored, choices: Choices) -> Matching:
    """Match by their keys the values that are in no optimizer with names.

    Weights that the checkpoint lacks keep their values if ``fresh=`` names them, and rows that it lacks if ``grow=``
    does.
    """
    prefixes = tuple(chain.from_iterable((optimizer.state, optimizer.options) for optimizer in live.optimizers))
    sources, kept_weights, differing_values = dict[str, str](), dict[str, str](), dict[str, str]()
    grown, missing_keys, keys_of_other_ranks = dict[str, str](), list[str](), list[str]()
    # 1. Keys that both sides have, weights that may stay as they are, and keys that only the template has.  Where ranks
    # saved values of their own under a key, this rank's is its origin; it is a fault if only other ranks have one.
    for key in sorted(key for key in live.flat if not key.startswith(prefixes)):
        path = live.paths[key]
        if key in stored.entries:
            origin = stored.origin(key)
            if origin is None:
                keys_of_other_ranks.append(key)
                continue
            sources[key], entry = origin, stored.entries[origin]
            if has_grown(live.flat[key], entry) and (name := _growing_name(path)) and choices.grow.match(name):
                grown[key] = name
            if faults := misfits(live, key, entry, key in grown):
                differing_values[key] = " and ".join(faults)
        elif isinstance(live.flat[key], torch.Tensor) and choices.fresh.match(str(path[-1])):
            kept_weights[key] = str(path[-1])
        elif not (PARAM_GROUPS in path[:-1] and path[-1] in CODE_OPTIONS):
            missing_keys.append(key)
    # 2. Weights that are tied to one that is loaded have its values: the checkpoint has one of their names.
    if missing_keys:
        tied = tied_keys(live, sources)
        missing_keys = [key for key in missing_keys if key not in tied]
    # 3. Options that only the checkpoint has come into the groups whose other options are loaded.
    added: dict[str, KeyPath] = {}
    groups = {live.paths[key][:-1] for key in sources}
    for key, entry in stored.entries.items():
        if entry.path[-1] in CODE_OPTIONS and key not in live.flat and entry.path[:-1] in groups:
            added[key] = entry.path
    # 4. Parameters that have numbers instead of names, and slots of state that are loaded.
    loaded = set[OptimizerParameter]()
    for key in sources if live.numbered else ():
        for slot in OptimizerKey.of_slot(live.paths[key]):
            if (optimizer := key_of(slot.place.root)) in live.numbered:
                loaded.add((optimizer, f"{optimizer}#{slot.name}"))
    # 5. Keys that no value of the template is read from, and that are not extra in the checkpoint all the same.
    covered_keys = {key for key, origin in sources.items() if key != origin}
    covered_keys.update(keys_of_other_ranks, added)
    for key in keys_of_other_ranks:
        covered_keys |= {*stored.by_rank[key].values()}
    return Matching(
        sources,
        frozenset(covered_keys),
        grown=grown,
        loaded=frozenset(loaded),
        kept_weights=kept_weights,
        optimizers=live.optimizers,
        added={path: stored.option(key) for key, path in added.items()},
        misfits=differing_values,
        missing_keys=tuple(missing_keys),
        faults=tuple(_describe_values_of_other_ranks(keys_of_other_ranks, live, stored)),
    )


def _growing_name(path: KeyPath) -> str | None:
    """Return the name of a weight, or of a parameter whose slot begins as zeros; None for what cannot grow."""
    slot = next(OptimizerKey.of_slot(path), None)
    if slot is None:
        return str(path[-1])
    is_growable = slot.leaf in ZERO_SLOTS and not NUMBER.fullmatch(slot.name)
    return slot.name if is_growable else None


def _describe_values_of_other_ranks(keys: Sequence[str], live: LiveState, stored: Stored) -> Iterator[str]:
    """Yield a fault about items without a value on a rank, with the argument that leaves them out."""
    if not keys:
        return
    ranks, absent_paths = set[tuple[int, int]](), set[KeyPath]()
    for key in keys:
        ranks.update(stored.by_rank[key])
        absent_paths.add(live.paths[key])
    saved_ranks = f"{len(ranks)} of {max(ranks)[1]}" if len(ranks) < max(ranks)[1] else str(len(ranks))
    # The largest parts of the state dict that hold nothing else are left out.
    parts, globs = dict[str, None](), dict[str, None]()
    other_paths = (path for path in live.paths.values() if path not in absent_paths)
    for part in largest_parts(sorted(absent_paths, key=str), other_paths):
        parts[repr(key_of(part))] = None
        globs[escape(key_of(part)) + ".*" * (part not in absent_paths)] = None
    yield (
        f"{listed(map(repr, keys), 1)} differ from rank to rank: {saved_ranks} ranks saved a "
        f"value each, and {stored.place[1]} load, some without one. To go on without, leave {', '.join(parts)} out of "
        f"the state dict, with allow_extra={[*globs, f'{BY_RANK}.*']!r}; muonckpt.open(...).items has all values"
    )


# --- All ranks --------------------------------------------------------------------------------------------------------


def judge(ranks: Sequence[Matching], stored: Stored, choices: Choices) -> tuple[Matching, LoadReport]:
    """Decide what all ranks together take, with all that does not fit."""
    # 1. Another rank may take what one leaves, so only items that all of them leave are left.
    extra, fresh, joint = choices.allow_extra, choices.fresh, Matching.joined(ranks)
    taken_keys = set[str]().union(*(matching.sources.values() for matching in ranks))
    unclaimed_keys = sorted(stored.entries.keys() - taken_keys - joint.covered_keys)
    # 2. State that no rank takes: of parameters that are dropped on purpose, or gone.
    dropped_names, explained_keys, differences = set[str](), set[str](), dict[str, str]()
    for optimizer in {optimizer.key: optimizer for optimizer in joint.optimizers}.values():
        parameter_names = {name for key, name in joint.parameters if key == optimizer.key}
        stored_names = set(chain.from_iterable(group.names for group in stored.groups(optimizer)))
        unclaimed_state = optimizer.state_of_names(unclaimed_keys, parameter_names | stored_names)
        for name, keys in unclaimed_state.items():
            explained_keys.update(keys.values())
            if name not in parameter_names and fresh.match(name):
                dropped_names.add(name)
            elif name not in parameter_names and not all(map(extra.match, keys.values())):
                differences[name] = GONE
        # Names need no warning, nor do options of groups without loaded parameters.
        for group_names, options in stored.groups(optimizer):
            is_used = not joint.loaded.isdisjoint(zip(repeat(optimizer.key), group_names, strict=False))
            for option, option_keys in options.items():
                explained_keys.update(option_keys if not is_used or option in NAMES_OF_GROUPS else ())
    # 3. Everything else that only the checkpoint has: weights dropped on purpose, and extra items.
    dropped_weights, extra_keys = dict[str, str](), list[str]()
    for key in unclaimed_keys:
        entry = stored.entries[key]
        name = str(entry.path[-1])
        if key in explained_keys:
            continue
        if isinstance(entry, StateRecord) and entry.slot is None and fresh.match(name):
            dropped_weights[key] = name
        elif not extra.match(key):
            extra_keys.append(key)
    # 4. A glob that no rank had a use for is a mistake.  The script that has let a tensor grow is started again, from a
    # checkpoint that has all of its rows.
    names = {*joint.names, *dropped_names, *differences, *joint.kept_weights.values(), *dropped_weights.values()}
    growing_names = set(joint.grown.values())
    for key in taken_keys if choices.grow.patterns else ():
        if (growing_name := _growing_name(stored.entries[key].path)) is not None:
            growing_names.add(growing_name)
    faults = []
    for pattern in fresh.unmatched(names):
        faults.append(f"fresh={pattern!r} matches no parameter with state, and no weight that only one side has")
    for pattern in choices.grow.unmatched(growing_names):
        faults.append(f"grow={pattern!r} matches no tensor that is loaded")
    for pattern in choices.ungrouped.unmatched(name for _, name in joint.ungrouped | joint.loaded):
        faults.append(f"ungrouped={pattern!r} matches no parameter that is in no group of the checkpoint")
    entries = map(stored.entries.__getitem__, taken_keys)
    report = LoadReport(
        tuple(sorted({name for _, name in joint.loaded})),
        tuple(sorted({name for _, name in joint.fresh})),
        tuple(sorted(joint.discarded)),
        tuple(sorted({*dropped_names, *dropped_weights})),
        tuple(sorted(joint.kept_weights)),
        tuple(sorted({*joint.grown.values()})),
        joint.own_options,
        weights=sum(isinstance(entry, StateRecord) and entry.slot is None for entry in entries),
    )
    misfit = Matching(differences=differences, extra_keys=tuple(extra_keys), faults=tuple(faults))
    return Matching.joined([joint, misfit]), report
