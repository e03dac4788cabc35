"""The matching of a checkpoint with a template: parameters by their names, parameter groups by their parameters.

`match` decides for one rank, `judge` for all of them together.  What is not in a `NamedOptimizer` goes by its key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from itertools import chain, repeat
from typing import Any

import torch

from ..names.errors import ArgumentError
from ..names.keys import PARAM_GROUPS, NamedOptimizer, OptimizerKey, StateForm, key_of
from ..names.resumption import (
    GONE,
    NAMES_OF_GROUPS,
    Globs,
    LoadReport,
    describe_wrappers,
    match_subtrees,
)
from ..names.vocabulary import BY_RANK, KeyPath
from ..names.wording import listed
from ..record.record import StateRecord
from .optimizer_matching import CODE_OPTIONS, match_optimizer
from .template import LoadTemplate, Matching, OptimizerParameter, Stored


def selection(allow_extra: bool | Iterable[str], fresh: Iterable[str]) -> tuple[Globs, Globs]:
    """Return what a user has given as ``allow_extra=`` and ``fresh=``.

    Raises:
        ArgumentError: one of them is something else.
    """
    try:
        return Globs.of_extra(allow_extra), Globs.of(fresh)
    except TypeError as error:
        raise ArgumentError(str(error)) from error


# --- One rank ---------------------------------------------------------------------------------------------------------


def match(template: LoadTemplate, stored: Stored, globs: Globs) -> Matching:
    """Decide what a rank's template takes from a checkpoint."""
    # What is wrong as a whole is told alone: each key by itself would be missing or extra.
    if faults := [*_find_other_forms(template, stored)] or _find_moved_subtrees(template, stored):
        return Matching(covered_keys=frozenset(stored.entries), faults=tuple(faults))
    # Optimizers go by the names of parameters, everything else by its key.
    for key in template.numbered if globs.patterns else ():
        faults.append(
            f"the parameters of {key!r} have numbers, so fresh={list(globs.patterns)!r} cannot name them: save and "
            "load get_optimizer_state_dict(model, optimizer), which has names"
        )
    matchings = [match_optimizer(optimizer, template, stored, globs) for optimizer in template.optimizers]
    return Matching.joined([Matching(faults=tuple(faults)), _match_by_key(template, stored, globs), *matchings])


_FORM_CODE = {
    StateForm.NUMBERED: "optimizer",
    StateForm.NESTED: "get_optimizer_state_dict(model, optimizer)",
    StateForm.FLAT: (
        "get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))"
    ),
}
"""The code of the values that users save and load, by the form of these."""

_FORM_PHRASES = {
    StateForm.NUMBERED: "the optimizer itself, or optimizer.state_dict(), whose parameters have numbers",
    StateForm.NESTED: f"{_FORM_CODE[StateForm.NESTED]}, whose parameters have names",
    StateForm.FLAT: f"{_FORM_CODE[StateForm.FLAT]}, whose parameters have names",
}


def _find_other_forms(template: LoadTemplate, stored: Stored) -> Iterator[str]:
    """Yield a fault for each optimizer that the checkpoint has in another form than the template."""
    if template.is_ours and not stored.translated:
        return  # another program's, and to be translated first
    forms = [(optimizer.key, optimizer.form) for optimizer in template.optimizers]
    for key, form in (*forms, *zip(template.numbered, repeat(StateForm.NUMBERED), strict=False)):
        saved_form = stored.form(key)
        if saved_form not in (None, form):
            next_line = "which load then sets itself, without set_optimizer_state_dict"
            if saved_form is not StateForm.NUMBERED:
                next_line = f"and then set_optimizer_state_dict(model, optimizer, optim_state_dict=state_dict[{key!r}])"
            yield (
                f"{key!r} was saved from {_FORM_PHRASES[saved_form]}, and is to be loaded into {_FORM_PHRASES[form]}. "
                "To keep all of "
                f"its state, load it into what it was saved from. Write {key!r}: {_FORM_CODE[saved_form]} in the state "
                f"dict, {next_line}"
            )


def _find_moved_subtrees(template: LoadTemplate, stored: Stored) -> list[str]:
    """Return a fault if whole parts of the checkpoint stand at other keys than in the template."""
    template_paths = set(map(template.paths.__getitem__, template.paths.keys() - stored.entries.keys()))
    stored_paths = {stored.entries[key].path for key in stored.entries.keys() - template.values.keys()}
    subtrees = match_subtrees(template_paths, stored_paths)
    if not subtrees:
        return []
    # The parts that stand elsewhere, in words, and the code that gives them at the place of the checkpoint.
    sentences, moved_paths, code_by_path = [], set[KeyPath](), dict[KeyPath, str]()
    for place, stored_place in subtrees:
        sentences.append(f"the checkpoint has at {_label(stored_place)} what the state dict has at {_label(place)}")
        moved_paths |= {path for path in template_paths if path[: len(place)] == place}
        code_by_path[stored_place] = _code_of(place)
    # The code gives all else where it is; what the checkpoint lacks as well is told.
    for path in template.paths.values():
        if path not in template_paths:
            code_by_path[path[:1]] = _code_of(path[:1])
    missing_roots = dict.fromkeys(repr(path[0]) for path in sorted(template_paths - moved_paths, key=str))
    if missing_roots:
        sentences.append(f"it has no {', '.join(missing_roots)}")
    return [f"{'; '.join(sentences)}. Write state_dict = {code_by_path.get(()) or _nested_code(code_by_path)}"]


def _label(path: KeyPath) -> str:
    return repr(key_of(path)) if path else "its top"


def _code_of(path: KeyPath) -> str:
    """Return the code of the part of the state dict at a path."""
    return f"state_dict{''.join(f'[{part!r}]' for part in path)}"


def _nested_code(values: Mapping[KeyPath, str]) -> str:
    """Return the code of a nested state dict, from the code of values by their paths."""
    parts: defaultdict[Any, dict[KeyPath, str]] = defaultdict(dict)
    for (root, *path), code in values.items():
        parts[root][tuple(path)] = code
    return f"{{{', '.join(f'{root!r}: {part.get(()) or _nested_code(part)}' for root, part in parts.items())}}}"


def _match_by_key(template: LoadTemplate, stored: Stored, globs: Globs) -> Matching:
    """Match by their keys the values that are in no optimizer with names.

    Weights that the checkpoint lacks keep their values if ``fresh=`` names them.
    """
    prefixes = _prefixes(template.optimizers)
    sources, kept_weights = dict[str, str](), dict[str, str]()
    missing_keys, faults, keys_of_other_ranks = list[str](), list[str](), list[str]()
    # 1. Keys that both sides have, weights that may stay as they are, and keys that only the template has.  Where ranks
    # saved values of their own under a key, this rank's is its origin; it is a fault if only other ranks have one.
    for key in sorted(key for key in template.values if not key.startswith(prefixes)):
        path = template.paths[key]
        if key in stored.entries:
            origin = stored.origin(key)
            if origin is None:
                keys_of_other_ranks.append(key)
                continue
            sources[key] = origin
            for fault in template.misfits(key, stored.entries[origin]):
                faults.append(f"{key!r} {fault}")
        elif isinstance(template.values[key], torch.Tensor) and globs.match(str(path[-1])):
            kept_weights[key] = str(path[-1])
        elif not (PARAM_GROUPS in path[:-1] and path[-1] in CODE_OPTIONS):
            missing_keys.append(key)
    # 2. Weights that are tied to one that is loaded have its values: the checkpoint has one of their names.
    if missing_keys:
        tied_keys = template.tied_keys(sources)
        missing_keys = [key for key in missing_keys if key not in tied_keys]
    missing_faults = [*_describe_wrapped_names(missing_keys, template, stored)]
    missing_faults += _describe_missing_keys(missing_keys, template, stored)
    # 3. Options that only the checkpoint has come into the groups whose other options are loaded.
    options = [key for key, entry in stored.entries.items() if entry.path[-1] in CODE_OPTIONS]
    added_keys, added_options = list[str](), {}
    if options:
        groups = {template.paths[key][:-1] for key in sources}
        for key in options:
            path = stored.entries[key].path
            if key not in template.values and path[:-1] in groups:
                added_keys.append(key)
                added_options[path] = stored.option(key)
    # 4. Keys that no value of the template is read from, and that are not extra in the checkpoint all the same.
    covered_keys = {key for key, origin in sources.items() if key != origin}
    covered_keys.update(keys_of_other_ranks, added_keys)
    for key in keys_of_other_ranks:
        covered_keys |= {*stored.by_rank[key].values()}
    faults += _describe_values_of_other_ranks(keys_of_other_ranks, template, stored)
    return Matching(
        sources,
        frozenset(covered_keys),
        loaded=frozenset(_numbered_parameters(template, sources)),
        kept_weights=kept_weights,
        added=added_options,
        faults=(*missing_faults, *faults),
    )


def _prefixes(optimizers: Iterable[NamedOptimizer]) -> tuple[str, ...]:
    """Return the beginnings of all keys of these optimizers."""
    return tuple(chain.from_iterable((optimizer.state, optimizer.options) for optimizer in optimizers))


def _describe_wrapped_names(missing_keys: Sequence[str], template: LoadTemplate, stored: Stored) -> Iterator[str]:
    """Yield the cure for each place at which a wrapper of the model changes all names in the same way."""
    missing_names, extra_names = defaultdict[KeyPath, set[str]](set), defaultdict[KeyPath, set[str]](set)
    for key in missing_keys:
        path = template.paths[key]
        missing_names[path[:-1]].add(str(path[-1]))
    for key, entry in stored.entries.items() if missing_keys else ():
        if key not in template.values:
            extra_names[entry.path[:-1]].add(str(entry.path[-1]))
    for parents, names in missing_names.items():
        if fault := describe_wrappers(names, extra_names[parents]):
            yield fault


def _describe_values_of_other_ranks(keys: Sequence[str], template: LoadTemplate, stored: Stored) -> Iterator[str]:
    """Yield a fault about items of which a rank has no value of its own, with what leaves them out."""
    if not keys:
        return
    ranks, absent_paths = set[tuple[int, int]](), set[KeyPath]()
    for key in keys:
        ranks.update(stored.by_rank[key])
        absent_paths.add(template.paths[key])
    saved_ranks = f"{len(ranks)} of {max(ranks)[1]}" if len(ranks) < max(ranks)[1] else str(len(ranks))
    # The beginnings of paths at which the state dict holds something else as well.
    other_prefixes = set[KeyPath]()
    for path in template.paths.values():
        if path not in absent_paths:
            other_prefixes |= {path[:end] for end in range(1, len(path))}
    # The largest parts of the state dict that hold nothing else are left out.
    lines, globs = dict[str, None](), dict[str, None]()
    for path in sorted(absent_paths, key=str):
        end = 1
        while path[:end] in other_prefixes:
            end += 1
        lines[f"del {_code_of(path[:end])}"] = None
        globs[escape(key_of(path[:end])) + ".*" * (path[:end] not in absent_paths)] = None
    yield (
        f"{listed(map(repr, keys), 1)} differ from rank to rank: {saved_ranks} ranks saved a "
        f"value each, and {stored.place[1]} load, some without one. To go on without: {'; '.join(lines)}, with "
        f"allow_extra={[*globs, f'{BY_RANK}.*']!r}; muonckpt.open(...).items has all values"
    )


def _numbered_parameters(template: LoadTemplate, keys: Iterable[str]) -> Iterator[OptimizerParameter]:
    """Yield the parameters of optimizers with numbers that have state at these keys, as ``"optimizer#0"``."""
    for key in keys if template.numbered else ():
        for reading in OptimizerKey.of_slot(template.paths[key]):
            if (optimizer := key_of(reading.place.root)) in template.numbered:
                yield optimizer, f"{optimizer}#{reading.name}"


def _describe_missing_keys(keys: Sequence[str], template: LoadTemplate, stored: Stored) -> Iterator[str]:
    """Yield what only the state dict has; what holds no tensors, and the checkpoint has nothing of, as one."""
    if not keys:
        return
    shared_roots = {entry.path[0] for entry in stored.entries.values()}
    for key, value in template.values.items():
        if isinstance(value, torch.Tensor):
            shared_roots.add(template.paths[key][0])
    # Where neither side has tensors in common a part is no model or optimizer: it can be left out as one.
    roots: defaultdict[Any, list[str]] = defaultdict(list)
    for key in keys:
        root = template.paths[key][0]
        if root in shared_roots:
            yield f"missing key {key!r}"
        else:
            roots[root].append(key)
    for root, missing in roots.items():
        advice = f"the checkpoint has nothing of it; to load the rest: state_dict.pop({root!r})"
        yield f"missing key {listed(map(repr, missing), 1)} ({advice})"


# --- All ranks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankRequest:
    """A rank's request to the coordinator."""

    matching: Matching
    optimizers: tuple[NamedOptimizer, ...]
    globs: Globs


def judge(requests: Sequence[RankRequest], stored: Stored, extra: Globs) -> tuple[Matching, LoadReport]:
    """Decide what all ranks together take, with all that does not fit.

    Args:
        extra: what the checkpoint may hold besides what the templates ask for.
    """
    # 1. What one rank leaves another may take, so only what all of them leave is left.
    globs, joint = requests[0].globs, Matching.joined([request.matching for request in requests])
    claimed_keys, optimizers = set(joint.covered_keys), dict[str, NamedOptimizer]()
    for request in requests:
        if request.globs != globs:
            patterns, other_patterns = list(globs.patterns), list(request.globs.patterns)
            fault = f"ranks were given different fresh={patterns!r} and {other_patterns!r}"
            return Matching(faults=(fault,)), LoadReport()
        claimed_keys.update(request.matching.sources.values())
        for optimizer in request.optimizers:
            optimizers[optimizer.key] = optimizer
    unclaimed_keys = sorted(stored.entries.keys() - claimed_keys)
    # 2. State that no rank takes: of parameters that are dropped on purpose, or gone.
    dropped_names, explained_keys, differences = set[str](), set[str](), dict[str, str]()
    for optimizer in optimizers.values():
        parameter_names = {name for key, name in joint.parameters if key == optimizer.key}
        unclaimed_state = optimizer.state_of_names(unclaimed_keys, parameter_names | stored.names(optimizer))
        for name, keys in unclaimed_state.items():
            explained_keys.update(keys.values())
            if name not in parameter_names and globs.match(name):
                dropped_names.add(name)
            elif name not in parameter_names and not all(map(extra.match, keys.values())):
                differences[name] = GONE
        explained_keys.update(_superfluous_options(optimizer, unclaimed_keys, stored, joint.loaded))
    # 3. Everything else that only the checkpoint has: weights dropped on purpose, and what is extra.
    dropped_weights, extra_keys = dict[str, str](), list[str]()
    for key in unclaimed_keys:
        entry = stored.entries[key]
        name = str(entry.path[-1])
        if key in explained_keys:
            continue
        if isinstance(entry, StateRecord) and entry.slot is None and globs.match(name):
            dropped_weights[key] = name
        elif not extra.match(key):
            extra_keys.append(key)
    faults = _describe_extra_keys(extra_keys, joint.sources)
    # 4. A glob that no rank had a use for is a mistake.
    matched_names = (
        *joint.names,
        *dropped_names,
        *differences,
        *joint.kept_weights.values(),
        *dropped_weights.values(),
    )
    for pattern in globs.unmatched(matched_names):
        faults.append(f"fresh={pattern!r} matches no parameter with state, and no weight that only one side has")
    report = LoadReport(
        _sorted_names(joint.loaded),
        _sorted_names(joint.fresh),
        tuple(sorted(joint.discarded)),
        tuple(sorted({*dropped_names, *dropped_weights})),
        tuple(sorted(joint.kept_weights)),
        joint.own_options,
    )
    prefixes = _prefixes(optimizers.values())
    extra_state = tuple(key for key in extra_keys if key.startswith(prefixes))
    misfit = Matching(differences=differences, extra_state=extra_state, faults=tuple(faults))
    return Matching.joined([joint, misfit]), report


def _sorted_names(parameters: Iterable[OptimizerParameter]) -> tuple[str, ...]:
    """Return the names of parameters, whichever optimizers have them."""
    return tuple(sorted({name for _, name in parameters}))


def _describe_extra_keys(keys: Sequence[str], template: Iterable[str]) -> list[str]:
    """Return what only the checkpoint has, by roots where these are its own, and how to leave it."""
    template_roots = {key.partition(".")[0] for key in template}
    keys_by_glob: defaultdict[str, list[str]] = defaultdict(list)
    for key in keys:
        root, dot, _ = key.partition(".")
        keys_by_glob[escape(key) if root in template_roots or not dot else f"{escape(root)}.*"].append(key)
    faults = [f"extra key {listed(map(repr, members), 1)}" for members in keys_by_glob.values()]
    if faults:
        globs = list(keys_by_glob)[:12]
        faults[0] += f" (to load them, give them in the state dict; allow_extra={globs!r} loses them)"
    return faults


def _superfluous_options(
    optimizer: NamedOptimizer, keys: Sequence[str], stored: Stored, loaded: frozenset[OptimizerParameter]
) -> Iterator[str]:
    """Yield options that nobody misses: names, and all of groups of which nothing is loaded."""
    if optimizer.groups is None:
        for name, option_keys in optimizer.options_of_names(keys).items():
            yield from option_keys.values() if (optimizer.key, name) not in loaded else ()
        return
    groups = stored.groups(optimizer)
    for number, options in optimizer.options_of_groups(keys).items():
        is_used = not loaded.isdisjoint(zip(repeat(optimizer.key), groups[number], strict=False))
        for option, key in options.items():
            if not is_used or option in NAMES_OF_GROUPS:
                yield key
