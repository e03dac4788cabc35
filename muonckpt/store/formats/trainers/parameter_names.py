"""Names of the parameters that a torch optimizer numbers.

An optimizer's state dict knows parameters by number: the order in which its groups list them.  Names are taken from
``param_names``, which torch records in the groups of an optimizer that was made of named parameters, or from
``parameter_names.json``, which a person writes beside the files.  Nothing else says them for sure: weights of one shape
look alike, and files of weights are not in the order of an optimizer.  docs/formats/trainers.md has the two lines of
code that write the names.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ....box import Index
from ....errors import SourceError, about
from ....vocabulary import BEGIN_AS_ZEROS, MASTER, PARAMS, SECOND_MOMENT, STEP, KeyPath
from ...io.location import Location
from ...io.regular import read_whole
from ..signs import NAMES_FILE
from ..torch_save.inert_pickle import expect
from .state_tree import is_mapping, key_of_path, mapping

AS_PARAMETER = (BEGIN_AS_ZEROS | {MASTER}) - {STEP, SECOND_MOMENT}
"""Slots that have the shape of their parameter in every program that writes them."""


@dataclass(frozen=True, slots=True)
class NamesFile:
    """The names of each optimizer's parameters in the order of its numbers, by the optimizer's root."""

    of_optimizers: Mapping[str, Sequence[str]]

    @classmethod
    def beside(cls, folder: Location) -> NamesFile:
        """The file in a folder: a list of names, for ``optimizer``, or a dict of such lists; empty if there is none.

        Raises:
            SourceError: it is damaged, or holds something else.
        """
        file = folder / NAMES_FILE
        if not file.is_file():
            return cls({})
        with about(file):
            try:
                data = json.loads(read_whole(file))
            except (ValueError, RecursionError) as error:
                raise SourceError(f"expected JSON, {error}") from error
            lists = {"optimizer": data} if isinstance(data, list) else data
            if not isinstance(lists, dict) or not all(
                isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists.values()
            ):
                raise SourceError("expected a list of names, or such a list for each of several optimizers")
        return cls(lists)

    def check_used(self, roots: Collection[str]) -> None:
        """Check that it has names for these optimizers only.

        Raises:
            SourceError: it has some for others.
        """
        if not self.of_optimizers.keys() <= {*roots}:
            raise SourceError(
                f"{NAMES_FILE} has names for {', '.join(self.of_optimizers)}; optimizers here are {', '.join(roots)}"
            )


def is_optimizer(content: Mapping[object, object]) -> bool:
    """Whether a dict is the state dict of one of torch's optimizers."""
    return {"state", "param_groups"} <= content.keys()


def optimizer_with_names(
    optimizer: Mapping[object, object], listed: Sequence[str] | None
) -> tuple[Mapping[object, object], Mapping[object, str]]:
    """A state dict with its parameters under names, and the names by number; as it is, and none, if nothing says them.

    Args:
        listed: the names in the order of numbers, as a person wrote them.

    Raises:
        SourceError: names and numbers do not fit each other.
    """
    groups = [mapping(group) for group in expect(list, optimizer["param_groups"])]
    numbers = [number for group in groups for number in expect(list, group[PARAMS])]
    state = mapping(optimizer["state"])
    if not all(type(number) is int for number in (*numbers, *state)):
        return optimizer, {}
    names = _recorded(groups) if listed is None else list(listed)
    if names is None:
        return optimizer, {}
    if len(names) != len(numbers):
        raise SourceError(f"expected a name for each of the {len(numbers)} parameters in groups, found {len(names)}")
    by_number = dict(zip(numbers, names, strict=True))
    if len(by_number) < len(numbers) or len(set(names)) < len(names):
        raise SourceError("expected every number and every name once, found one twice")
    if not state.keys() <= by_number.keys():
        raise SourceError(
            f"expected a group with parameter {min(state.keys() - by_number.keys(), key=str)}, found none"
        )
    regrouped = [{**group, PARAMS: [by_number[number] for number in expect(list, group[PARAMS])]} for group in groups]
    named_state = {by_number[number]: slots for number, slots in state.items()}
    return {**optimizer, "state": named_state, "param_groups": regrouped}, by_number


def optimizers_with_names(
    content: Mapping[object, object], root: KeyPath, names: NamesFile
) -> tuple[Mapping[object, object], list[str]]:
    """The content with names for numbers, if it is an optimizer's or has some; and the keys of those without names.

    Optimizers are looked for in the dict itself, in its parts, and in lists that are its parts.

    Raises:
        SourceError: as in `optimizer_with_names`.
    """
    if is_optimizer(content):
        key = key_of_path(root)
        content, by_number = optimizer_with_names(content, names.of_optimizers.get(key))
        return content, [key] if not by_number and has_numbers(content) else []
    changed, numbered = dict(content), list[str]()
    for part, value in content.items():
        if is_mapping(value) and is_optimizer(mapping(value)):
            changed[part], unnamed = optimizers_with_names(mapping(value), (*root, str(part)), names)
            numbered += unnamed
        elif type(value) is list and any(is_mapping(each) and is_optimizer(mapping(each)) for each in value):
            both = [optimizers_with_names(mapping(each), (*root, str(part), i), names) for i, each in enumerate(value)]
            changed[part] = [each for each, _ in both]
            numbered += (key for _, unnamed in both for key in unnamed)
    return changed, numbered


def has_numbers(optimizer: Mapping[object, object]) -> bool:
    """Whether state is known by number."""
    return any(type(number) is int for number in mapping(optimizer["state"]))


def _recorded(groups: Sequence[Mapping[object, object]]) -> list[str] | None:
    names: list[str] = []
    for group in groups:
        own = group.get("param_names")
        if own is None:
            return None
        names += (expect(str, name) for name in expect(list, own))
        if len(expect(list, own)) != len(expect(list, group[PARAMS])):
            raise SourceError("expected as many param_names as parameters in a group, found others")
    return names


def check_shapes(slots: Iterator[tuple[str, str, Index]], weights: Mapping[str, Index]) -> None:
    """Compare the shapes of state (parameter, slot, shape) with those of the weights that lie beside it.

    Raises:
        SourceError: they differ, so names and numbers are not in the same order.
    """
    for name, slot, shape in slots:
        if slot in AS_PARAMETER and weights.get(name, shape) != shape:
            raise SourceError(
                f"expected {slot} of {name!r} in the shape {weights[name]} of its weight, found {shape}: the names are "
                "in another order than the optimizer's parameters"
            )
