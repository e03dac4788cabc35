"""The parameter groups of a given run, to which a conversion makes its result fit (``--like``).

A template is JSON as ``Muon.describe()`` returns it, or as torch's nested state dicts have it: ``{"param_groups":
[{"params": [names], option: value, …}, …]}``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...errors import SourceError, TargetError
from ...vocabulary import PARAMS, SCHEDULED
from ..engine.checklist import Action, Findings
from .dialect import Dialect
from .group_options import TargetGroup

_RATES = frozenset({"lr", "weight_decay", "momentum", "betas", "eps", "step", *SCHEDULED})
"""Options that belong to a run, and that a template need not have as the source has them."""

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class GroupTemplate:
    """Groups with their parameters' names under `PARAMS`, and with all options that the run's optimizer has.

    Raises:
        TargetError: a group does not list its parameters, or a parameter is in two groups.
    """

    groups: tuple[Mapping[str, Any], ...]

    def __post_init__(self) -> None:
        names = [name for group in self.groups for name in group.get(PARAMS, ())]
        if not all(isinstance(group.get(PARAMS), tuple) for group in self.groups) or len(set(names)) < len(names):
            raise TargetError("a template's groups list the names of their parameters under 'params', each name once")

    @classmethod
    def read(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> GroupTemplate:
        """A template from a file of JSON, or from its data.

        Raises:
            TargetError: it cannot be read, or is no template.
        """
        try:
            data = source if isinstance(source, Mapping) else json.loads(Path(source).read_text(encoding="utf-8"))
            groups = [{option: _as_tuples(value) for option, value in group.items()} for group in data["param_groups"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TargetError(
                f"cannot read the template {source!r} ({type(error).__name__}: {error}); expected JSON as "
                'Muon.describe() returns it: {"param_groups": [{"params": [names], "lr": 0.02, …}, …]}'
            ) from error
        return cls(tuple(groups))

    def options_of(self, name: str) -> Mapping[str, Any]:
        """The options of a parameter, by name."""
        group = next((group for group in self.groups if name in group[PARAMS]), _NONE)
        return {option: value for option, value in group.items() if option not in (PARAMS, "param_names")}

    def arranged(self, groups: Sequence[TargetGroup], target: Dialect, findings: Findings) -> list[TargetGroup]:
        """These groups' parameters in the groups of the template, in its order.

        Raises:
            SourceError: one side has parameters that the other has not, or a group would need two values of an option.
        """
        options = {name: group.options for group in groups for name in group.params}
        wanted = {name for group in self.groups for name in group[PARAMS]}
        if options.keys() != wanted:
            lacking, extra = sorted(wanted - options.keys()), sorted(options.keys() - wanted)
            raise SourceError(
                f"the template and the source have other parameters: only the template has {lacking[:5]}, only the "
                f"source has {extra[:5]}; --rules renames, splits and joins"
            )
        return [self._group(number, group, options, target, findings) for number, group in enumerate(self.groups)]

    def _group(
        self,
        number: int,
        mine: Mapping[str, Any],
        options: Mapping[str, Mapping[str, object]],
        target: Dialect,
        findings: Findings,
    ) -> TargetGroup:
        names = mine[PARAMS]
        first = options[names[0]] if names else {name: value for name, value in mine.items() if name != PARAMS}
        for name in names:
            for option in options[name].keys() | first.keys():
                values = first.get(option), options[name].get(option)
                if values[0] != values[1]:
                    raise SourceError(
                        f"group {number} of the template has {names[0]!r} and {name!r}, which in the source have "
                        f"{option}={values[0]!r} and {option}={values[1]!r}: give the run a group for each"
                    )
        for option in sorted(first.keys() & mine.keys() - _RATES):
            if first[option] != mine[option]:
                if option == target.method_option:
                    raise SourceError(
                        f"group {number} of the template is of {mine[option]!r}, and the source's state of "
                        f"{names[0]!r} is of {first[option]!r}: leave it out with --select and start it fresh"
                    )
                reason = f"the template has {mine[option]!r}; the source's was written"
                findings.check(Action.SET, f"{option} of group {number}", repr(first[option]), reason=reason)
        return TargetGroup(names, first, listed=True)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value
