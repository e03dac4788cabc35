"""Options of parameter groups in the words of another program, and a template of the groups of a given run.

Options are read from one program into common words, and written in those of another.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...algebra.box import Index
from ...names.coefficients import plain_coefficients
from ...names.errors import SourceError, TargetError
from ...names.resumption import as_tuples
from ...names.vocabulary import FLATTEN, FUSION, HISTORY_OPTIONS, PARAMS, PLAIN
from ...programs.dialect import Dialect, StoredMethod
from ...programs.model_view import ParameterGroup
from ..engine.outputs import Action, Check, Findings, Topic
from .matrices import Matrices
from .parse import NAMES


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The options of a group for parameters of one shape.

    Attributes:
        common: by their common names.
        private: options without a common name, by the source's names, each with what was expected where
            its value is of another kind.
    """

    common: Mapping[str, Any]
    private: Mapping[str, str]


_EXECUTION_OPTIONS = frozenset(
    {"foreach", "fused", "capturable", "differentiable", "use_cuda_graph", "clip_grad", NAMES, "name"}
)
"""Options of how a program computes, or of a group's name, that do not change the results."""

_ROUNDING = frozenset({"gram", "ns_dtype"})
"""Common options that only change how a result is rounded; of them "bfloat16" is what every program computes in."""

_REFUSED = {"maximize": "it goes up the gradient", "coupled": "decay that is added to the gradient"}
"""Common options without which an update is another one altogether, and what they mean."""

_SILENT_VALUES: Mapping[str, object] = MappingProxyType(
    {**PLAIN, "pieces": None, "columns": None, "interleaved": 1, "maximize": False, "amsgrad": False,
     "flatten": False, "gram": None, "ns_dtype": "bfloat16"}
)  # fmt: skip
"""Common options that need no word where they have this value."""

_RANGES: Mapping[str, tuple[float, float, str]] = MappingProxyType(
    dict.fromkeys(("lr", "weight_decay", "eps"), (0, sys.float_info.max, "a finite number of at least 0"))
    | dict.fromkeys(("momentum", "beta1", "beta2"), (0, 1, "a number from 0 to 1"))
)
"""The least and the largest value of common options with which there is an update, and in words."""


def common_options(
    group_options: Mapping[str, Any], dialect: Dialect, method: StoredMethod, shape: Index
) -> GroupOptions:
    """Return a program's options of a group in common words, as it would read them for a parameter of this shape."""
    # Values of another kind than the program's mean nothing that is known.
    expectations = dialect.misfits(group_options)
    options = {option: value for option, value in group_options.items() if option not in expectations}
    # Constants of the program come first; the options of its group replace them.
    common: dict[str, Any] = dict(dialect.constant_options.get(method.name, {}))
    option_names: dict[str, tuple[str, ...]] = {}
    for coding in method.encodings:
        common |= coding.decode(options, shape)
        option_names |= dict.fromkeys(coding.common, coding.options)
    if "ns_coefficients" in common:
        with suppress(ValueError, TypeError):  # a value that is no set of coefficients stays unchanged
            common["ns_coefficients"] = plain_coefficients(common["ns_coefficients"])
    common |= {option: value for option, value in options.items() if option in HISTORY_OPTIONS}
    # A number with which no update is possible is said, and goes nowhere.
    for name, (least, largest, words) in _RANGES.items():
        value = common.get(name)
        if isinstance(value, int | float) and not least <= value <= largest:
            expectations |= {option: words for option in option_names.get(name, ()) if option in options}
            del common[name]
    named = method.all_options | _EXECUTION_OPTIONS | HISTORY_OPTIONS | structure_options(dialect)
    private = dict.fromkeys(options.keys() - named - {dialect.method_option}, "")
    return GroupOptions(common, private | expectations)


@dataclass(frozen=True, slots=True)
class WrittenOptions:
    """The options of a group that are written.

    Attributes:
        unsaid: those of them that the source does not say.
        findings: every difference from the source, by option; the translator says whose they are.
    """

    options: Mapping[str, object]
    unsaid: frozenset[str] = frozenset()
    findings: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True)
class OptionWriter:
    """Translates the options of a group to the target's names and values, and reports the lost and the added ones.

    The stored ``options`` of the source count first, then the template, then a new optimizer of the target's program;
    what none of them has, the running optimizer keeps.  ``source_method`` and ``method`` are how the source and the
    target store the state.
    """

    source: Dialect
    target: Dialect
    source_method: StoredMethod
    method: StoredMethod
    options: Mapping[str, Any]
    stored: GroupOptions
    shape: Index

    def write(self, template_options: Mapping[str, object]) -> WrittenOptions:
        """Return the target's options; those of a template count where the source says nothing.

        Raises:
            SourceError: the target cannot store a value without which the update is another one altogether.
        """
        target, method = self.target, self.method
        options, losses = self._translated_options()
        # Defaults of a new optimizer replace the options that the target cannot express.
        replacements: dict[str, dict[str, object]] = {name: {} for name in losses}
        for coding in method.codings:
            defaults = {o: method.default_options[o] for o in coding.options if o in method.default_options}
            for name in losses.keys() & {*coding.common}:
                replacements[name] |= defaults
        findings = [*self._loss_findings(losses, replacements)]
        # Constants of the target's program, with which it computes whatever the source did and left out.
        constants = target.constant_options.get(method.name, {})
        for name in constants.keys() - self.stored.common.keys() - _SILENT_VALUES.keys():
            hint = self.source.hints.get(name, "unknown")
            reason = f"always so in {target.name}; {self.source.name} does not say it: {hint}"
            findings.append(_options_check(Action.SET, {name: constants[name]}, reason))
        # Options without a common name are left out, as the target may mean something else by them.
        target_names = set[str]().union(*(target_method.all_options for target_method in target.methods))
        for option, expected in self.stored.private.items():
            reason = f"no counterpart in {target.name}"
            if expected:
                reason = f"expected {expected}, so what it means is unknown"
            elif option in target_names:
                reason = f"nothing says that it means what {target.name}'s option of this name does"
            findings.append(_options_check(Action.LEFT, {option: self.options[option]}, reason))
        # The template's options that the source does not say; those that change no update are not reported.
        additions = {o: v for o, v in template_options.items() if o not in {*options, target.method_option}}
        reason = f"{self.source.name} does not say it; taken from the template"
        for option in additions.keys() - method.inert_options.keys() - _EXECUTION_OPTIONS:
            findings.append(_options_check(Action.CARRIED, {option: additions[option]}, reason))
        options |= additions
        # Options of a new optimizer of the target's program, which cannot run without them.
        unsaid, replacing_options = set[str](), {*chain.from_iterable(replacements.values())}
        for option, value in method.default_options.items():
            if option in options or option in target.unwritten_options:
                continue
            options[option] = value
            if option not in replacing_options:
                unsaid.add(option)
                reason = f"{self._silence_reason(option)}; the value is a new optimizer's, recorded as unsaid"
                findings.append(_options_check(Action.SET, {option: value}, reason))
        options = {**options, **{o: v for o, v in method.inert_options.items() if o not in options}}
        # The running optimizer decides options that no source gives.
        required = {o for coding in method.encodings if not coding.optional for o in coding.options}
        for option in required - options.keys() - target.unwritten_options - {method.options.get("step")}:
            findings.append(
                Check(Action.SET, option, (), f"{self._silence_reason(option)}; the running optimizer's stays")
            )
        if target.method_option:
            options[target.method_option] = method.name
        return WrittenOptions(options, frozenset(unsaid), tuple(findings))

    def _translated_options(self) -> tuple[dict[str, object], dict[str, object]]:
        """Return the common options by the target's names, and by common name the values that it cannot store."""
        common, target_options, losses = self.stored.common, dict[str, object](), dict[str, object]()
        translatable_names = {*HISTORY_OPTIONS, "step"}
        # A coding says several options together, or none.
        for coding in self.method.encodings:
            meanings = coding.meanings(common)
            encoded = coding.write(meanings, self.shape)
            translatable_names |= {*coding.common}
            if encoded is None:
                losses |= meanings
            else:
                target_options |= encoded
        target_options |= {option: value for option, value in common.items() if option in HISTORY_OPTIONS}
        # A value without a name is no loss where the target's program always computes with it, or it changes nothing.
        constants = self.target.constant_options.get(self.method.name, {})
        for name, value in common.items():
            if name not in translatable_names and value not in (constants.get(name), _SILENT_VALUES.get(name)):
                losses[name] = value
        return {o: v for o, v in target_options.items() if o not in self.target.unwritten_options}, losses

    def _loss_findings(
        self, losses: Mapping[str, object], replacements: Mapping[str, Mapping[str, object]]
    ) -> Iterator[Check]:
        """Yield a finding for each value that the target cannot store, with the default that replaces it.

        Args:
            losses: the values by common name.
            replacements: the target's options and values, by the common name that they stand for.
        """
        for name, value in sorted(losses.items()):
            if name in _REFUSED:
                raise SourceError(
                    f"{self.method.name} groups have {name}={value!r}: {_REFUSED[name]}; {self.target.name} has no "
                    "such thing, so training would go on altogether differently. Leave out the state of these "
                    "parameters with `select=`"
                )
            if replacements[name].get(name) == value:
                continue
            # Rules may have changed which matrices are in the parameter: others are said as they are stored.
            coding = next((coding for coding in self.source_method.encodings if name in coding.common), None)
            words: Mapping[str, object] | None = None
            if coding is not None and name in FUSION:
                words = coding.write(coding.meanings(self.stored.common), self.shape)
            elif coding is not None:
                options = (name,) if name in coding.options else coding.options
                words = {o: self.options[o] for o in options if o in self.options}
            reason = f"{self.target.name} has no option for it"
            if replacements[name]:
                written = ", ".join(f"{option}={default!r}" for option, default in replacements[name].items())
                reason = f"{self.target.name} cannot say it; {written} is written, as in a new optimizer"
            action = Action.LEFT if name in _ROUNDING else Action.SET
            if name == "adjust_lr_fn" and self.method.derived:
                action, reason = Action.CARRIED, f"by {', '.join(self.method.derived)} of each parameter"
            yield _options_check(action, words or {name: value}, reason)

    def _silence_reason(self, option: str) -> str:
        """Say that the source does not say an option, and in brackets where a user finds its value, if known."""
        names: list[str] = []
        for coding in self.method.encodings:
            if option in coding.options:
                names += [option] if option in coding.common else coding.common[:1]
        hint = next((self.source.hints[name] for name in names if name in self.source.hints), "")
        return f"{self.source.name} does not say it{f' ({hint})' if hint else ''}"


def _options_check(action: Action, options: Mapping[str, object], reason: str) -> Check:
    return Check(action, " and ".join(options), tuple(map(repr, options.values())), reason)


# Options that say which matrices are in a parameter.


def structure_options(dialect: Dialect) -> frozenset[str]:
    """Return a program's options that say which matrices are in a parameter, and those that name parameters."""
    names = {NAMES, "name"}
    for method in dialect.methods:
        names.update(*(coding.options for coding in method.encodings if not {*FUSION}.isdisjoint(coding.common)))
    return frozenset(names)


def common_structure(matrices: Matrices, shape: Index) -> dict[str, object]:
    """Return the common options that say these matrices of a parameter; without pieces if none do."""
    common = matrices.options() or {"columns": None, "interleaved": 1, FLATTEN: matrices.is_flat}
    return {name: value for name, value in common.items() if name != FLATTEN or len(shape) > 2}


def restructured_options(
    options: Mapping[str, Any], target: Dialect, method: StoredMethod, matrices: Matrices, shape: Index
) -> WrittenOptions:
    """Return a program's own options of a group with those for these matrices."""
    common = {"pieces": None, **common_structure(matrices, shape)}
    restructured, losses = dict(options), dict[str, object]()
    for coding in method.encodings:
        if not (meanings := coding.meanings(common)):
            continue
        encoded = coding.write(meanings, shape)
        losses |= meanings if encoded is None else {}
        for option in coding.options:
            restructured.pop(option, None)
            if option in options and option in coding.neutral:
                restructured[option] = coding.neutral[option]
        restructured |= encoded or {}
        common = {name: value for name, value in common.items() if name not in meanings}
    losses |= {name: value for name, value in common.items() if value != _SILENT_VALUES[name]}
    reason = f"{target.name} has no option for it"
    findings = tuple(Check(Action.SET, name, (repr(value),), reason) for name, value in losses.items())
    return WrittenOptions(restructured, findings=findings)


# A template.

_RATES = frozenset({"lr", "weight_decay", "momentum", "betas", "eps", "step", *HISTORY_OPTIONS})
"""Options that belong to a run, and that a template need not have as the source has them."""


@dataclass(frozen=True, slots=True)
class GroupTemplate:
    """The groups of a run, to which a conversion makes its result fit.

    Its JSON is that of ``Muon.describe()``, or of torch's nested state dicts.

    Raises:
        TargetError: a group does not list its parameters, or a parameter is in two groups.
    """

    groups: tuple[Mapping[str, Any], ...]

    def __post_init__(self) -> None:
        names = list(chain.from_iterable(group.get(PARAMS, ()) for group in self.groups))
        if not all(isinstance(group.get(PARAMS), tuple) for group in self.groups) or len(set(names)) < len(names):
            raise TargetError("a template's groups list the names of their parameters under 'params', each name once")

    @classmethod
    def read(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> GroupTemplate:
        """Read a template from a file of JSON, or from its data.

        Raises:
            TargetError: it cannot be read, or is no template.
        """
        try:
            data = source if isinstance(source, Mapping) else json.loads(Path(source).read_text(encoding="utf-8"))
            groups = []
            for group in data["param_groups"]:
                groups.append({option: as_tuples(value) for option, value in group.items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TargetError(
                f"cannot read the template {source!r} ({type(error).__name__}: {error}); expected JSON as "
                'Muon.describe() returns it: {"param_groups": [{"params": [names], "lr": 0.02, …}, …]}'
            ) from error
        return cls(tuple(groups))

    def options_of(self, name: str) -> Mapping[str, Any]:
        group = next((group for group in self.groups if name in group[PARAMS]), {})
        return {option: value for option, value in group.items() if option not in (PARAMS, NAMES)}

    def arrange(self, groups: Sequence[ParameterGroup], target: Dialect, findings: Findings) -> list[ParameterGroup]:
        """Return these groups' parameters in the groups of the template, in its order.

        Raises:
            SourceError: the parameters are others, or those of one group differ in an option or in their method.
        """
        options: dict[str, Mapping[str, object]] = {}
        for group in groups:
            options |= dict.fromkeys(group.parameters, group.options)
        names = set(chain.from_iterable(group[PARAMS] for group in self.groups))
        if options.keys() != names:
            missing, extra = sorted(names - options.keys()), sorted(options.keys() - names)
            raise SourceError(
                f"the template and the source have other parameters: only the template has {missing[:5]}, only the "
                f"source has {extra[:5]}; `rules=` renames, splits and joins"
            )
        arranged: list[ParameterGroup] = []
        for number, template in enumerate(self.groups):
            # The source's options are written, so members of one group must have the same ones.
            members = template[PARAMS]
            common = options[members[0]] if members else {o: value for o, value in template.items() if o != PARAMS}
            for name in members:
                for option in options[name].keys() | common.keys():
                    values = common.get(option), options[name].get(option)
                    if values[0] != values[1]:
                        raise SourceError(
                            f"group {number} of the template has {members[0]!r} and {name!r}, which in the source have "
                            f"{option}={values[0]!r} and {option}={values[1]!r}: give the run a group for each"
                        )
            # The method of the run is only compared: another method cannot take the state.
            for option in sorted(common.keys() & template.keys() - _RATES):
                if common[option] == template[option]:
                    continue
                if option == target.method_option:
                    raise SourceError(
                        f"group {number} of the template is of {template[option]!r}, and the source's state of "
                        f"{members[0]!r} is of {common[option]!r}: leave it out with `select=` and start it fresh"
                    )
                reason = f"the template has {template[option]!r}; the source's was written"
                subject, value = f"{option} of group {number}", repr(common[option])
                findings.check(Action.SET, subject, value, reason=reason, topic=Topic.OPTIONS)
            arranged.append(ParameterGroup(members, common, (number,)))
        return arranged
