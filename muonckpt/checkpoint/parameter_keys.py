"""The keys of state dicts by parameter: one form for all in which optimizers are saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint._traverse import set_element

from ..names.keys import PARAM_GROUPS, STATE, OptimizerKey, key_of
from ..names.resumption import NAMES_OF_GROUPS, in_short
from ..names.vocabulary import PARAMS, KeyPath


@dataclass(frozen=True, slots=True)
class ParameterKeys:
    """The keys of a state dict by parameter, in whichever form optimizers were saved.

    Numbers of groups, and of parameters that have names, differ between runs that are the same.  So an option of a
    group occurs once for each of its parameters, as in torch's flat form, and a parameter is found by its name.

    Attributes:
        paths: by key, a path for each.
        origins: by key, the key in the state dict.
        groups: by the path of an optimizer and the label of a parameter, its group.
        roots: the paths of optimizers that have groups.
        by_number: those of optimizers whose parameters go by numbers.
    """

    paths: Mapping[str, KeyPath]
    origins: Mapping[str, str]
    groups: Mapping[tuple[KeyPath, str], GroupLabel]
    roots: frozenset[KeyPath]
    by_number: frozenset[KeyPath]

    @classmethod
    def of(cls, values: Mapping[str, Any], paths: Mapping[str, KeyPath], by_name: bool) -> ParameterKeys:
        """Read the groups of a state dict; numbered parameters take their names if ``by_name``."""
        # The parameters of each group, and their labels.
        groups = _groups_in(values, paths)
        labels: dict[tuple[KeyPath, Any], list[str]] = {}
        label_of: defaultdict[KeyPath, dict[str, str]] = defaultdict(dict)
        by_number = set[KeyPath]()
        described: dict[tuple[KeyPath, str], GroupLabel] = {}
        for root, options_by_group in groups.items():
            names = _names_of_numbers(options_by_group) if by_name else {}
            for number, options in options_by_group.items():
                members = options[PARAMS]
                labels[root, number] = [names.get(member, str(member)) for member in members]
                label_of[root] |= dict(zip(map(str, members), labels[root, number], strict=True))
                if not names and any(isinstance(member, int) for member in members):
                    by_number.add(root)
                called = options.get("name") or in_short(labels[root, number])
                group = GroupLabel(f"group {number} ({called})", len(members))
                described |= {(root, label): group for label in labels[root, number]}
        # Each option of a group once for each parameter; state by the label.
        new_paths: dict[str, KeyPath] = {}
        origins: dict[str, str] = {}
        for key, path in paths.items():
            for new_path in _labelled(path, labels, label_of):
                new_key = key_of(new_path)
                new_paths[new_key], origins[new_key] = new_path, key
        return cls(new_paths, origins, described, frozenset(groups), frozenset(by_number))


@dataclass(frozen=True, slots=True)
class GroupLabel:
    """A parameter group in words, and how many parameters it has."""

    text: str
    num_parameters: int


def _groups_in(
    values: Mapping[str, Any], paths: Mapping[str, KeyPath]
) -> Mapping[KeyPath, Mapping[Any, Mapping[str, Any]]]:
    """Return what names the groups of each optimizer in a state dict and their parameters, by path and number."""
    groups: defaultdict[KeyPath, defaultdict[Any, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for key, path in paths.items():
        if len(path) > 2 and path[-3] == PARAM_GROUPS and path[-1] in NAMES_OF_GROUPS and key in values:
            groups[tuple(path[:-3])][path[-2]][str(path[-1])] = values[key]
    return {root: named for root, named in groups.items() if all(PARAMS in options for options in named.values())}


def _names_of_numbers(groups: Mapping[Any, Mapping[str, Any]]) -> dict[int, str]:
    """Return the names of an optimizer's numbered parameters; empty where some have none, or share one."""
    members, names = list[Any](), list[str]()
    for options in groups.values():
        members += options[PARAMS]
        names += options.get("param_names", ())
    is_named = len({*names}) == len(names) == len(members) and all(isinstance(member, int) for member in members)
    return dict(zip(members, names, strict=True)) if is_named else {}


def has_names(values: Mapping[str, Any], paths: Mapping[str, KeyPath]) -> bool:
    """Return whether each optimizer in a state dict whose parameters have numbers also has their names."""
    for groups in _groups_in(values, paths).values():
        is_numbered = any(isinstance(member, int) for options in groups.values() for member in options[PARAMS])
        if is_numbered and not _names_of_numbers(groups):
            return False
    return True


def _labelled(
    path: KeyPath, labels: Mapping[tuple[KeyPath, Any], Sequence[str]], label_of: Mapping[KeyPath, Mapping[str, str]]
) -> Iterator[KeyPath]:
    """Yield the paths by parameter of a path in a state dict; none for what only names groups and parameters."""
    for depth in range(len(path) - 2):
        root = path[:depth]
        if root not in label_of:
            continue
        rest = ".".join(map(str, path[depth + 2 :]))
        if path[depth] == PARAM_GROUPS:
            if rest not in NAMES_OF_GROUPS:
                for label in labels[root, path[depth + 1]]:
                    yield (*root, f"{PARAM_GROUPS}.{label}.{rest}")
            return
        if path[depth] == STATE:
            member = str(path[depth + 1])
            yield (*root, f"{STATE}.{label_of[root].get(member, member)}.{rest}")
            return
    is_name = any(key.leaf in NAMES_OF_GROUPS and key.place.flat for key in OptimizerKey.of_option(path))
    if not is_name:
        yield path


def nested_by_parameter(values: Mapping[str, Any], keys: ParameterKeys) -> dict[str, Any]:
    """Return a state dict with its options and state by parameter, and with dicts in the place of lists.

    A list without its empty members would be taken for one value.
    """
    nested: dict[str, Any] = {}
    for key, path in keys.paths.items():
        set_element(nested, tuple(map(str, path)), values[keys.origins[key]])
    return nested
