"""Another program's groups as ours: options by the tables of `converters.programs`, and the lines to write instead."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...converters.engine.outputs import Findings, sorted_checks
from ...converters.translate.groups import EXECUTION_OPTIONS, SILENT_VALUES, GroupOptions, common_options, write_options
from ...names.coefficients import plain_coefficients
from ...names.errors import SourceError
from ...names.resumption import in_globs
from ...names.vocabulary import GROUP_OPTIONS, PARAMS
from ...optimizer.options import as_numbers
from ...programs import ours
from ...programs.codings import FACTORS
from ...programs.dialect import StoredMethod
from .programs import KnownOptimizer, known_optimizer
from .treatments import Treatment

_SCALES = {"none": "1.0", "original": "max(1.0, rows / columns) ** 0.5", "spectral": "(rows / columns) ** 0.5",
           "rms": "0.2 * max(rows, columns) ** 0.5"}  # fmt: skip
"""The code of each common scale (`FACTORS`)."""

SAME, IDLE, LOST = "as here", "does not change the update", "no counterpart"
"""The fates of another program's option for which we have no word."""


@dataclass(frozen=True, slots=True)
class ScaleFunction:
    """A common scale times a factor, which has no name: a function in code."""

    scale: str
    factor: float

    def lines(self) -> list[str]:
        return ["def scale(rows, columns):", f"    return {self.factor!r} * {_SCALES[self.scale]}"]


@lru_cache
def _function(definition: ScaleFunction) -> Callable[[int, int], float]:
    """Return the function: the same object in all groups, as an optimizer has one function of a name."""

    def scale(rows: int, columns: int) -> float:
        return definition.factor * FACTORS[definition.scale](rows, columns)

    return scale


@dataclass(frozen=True, slots=True)
class OptionPair:
    """One option, or several with one meaning: in another program's words, and in ours, or its fate."""

    theirs: str
    ours: str


@dataclass(frozen=True, slots=True)
class OurGroup:
    """A group of ours for parameters of another program's group.

    Attributes:
        source: the positions of the other optimizer and its group.
        options: all of ours, the algorithm among them.
        momentum: the other's coefficient, by which its momentum is compared; None for element-wise methods.
        method: how the other program stores the state.
        pairs: every option of the other, with ours.
    """

    source: tuple[int, int]
    members: tuple[Treatment, ...]
    options: Mapping[str, Any]
    program: KnownOptimizer
    method: StoredMethod
    momentum: float | None
    pairs: tuple[OptionPair, ...]

    def stated_options(self) -> dict[str, Any]:
        """Return the algorithm and the options that are not our defaults, and the rate."""
        defaults = {"algorithm": "muon", **GROUP_OPTIONS[self.options["algorithm"]]}
        order = [*defaults, *sorted(self.options.keys() - defaults.keys())]
        stated = {}
        for name in order:
            if name in self.options and (name == "lr" or self.options[name] != defaults.get(name, _NO_DEFAULT)):
                stated[name] = self.options[name]
        return stated


_NO_DEFAULT = object()


@dataclass(frozen=True, slots=True)
class Replacement:
    """Ours in place of another program's optimizers.

    Attributes:
        programs: the names of these.
        groups: of one optimizer of ours.
        notes: what has no counterpart, and what the other does not say.
        refused: the parameters that ours does not take, with the reason.
        scale: the function that ``adjust_lr_fn`` is, where it has no name.
        code: the lines to write, after ``model`` has been made.
    """

    programs: tuple[str, ...]
    groups: tuple[OurGroup, ...]
    notes: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    scale: ScaleFunction | None = None
    code: str = ""

    def to_json(self) -> dict[str, Any]:
        groups = []
        for group in self.groups:
            names = [member.name for member in group.members]
            options = {name: value for name, value in group.options.items() if not callable(value)}
            groups.append({"names": names, "options": options, "translated": group.pairs})
        return {"programs": self.programs, "groups": groups, "notes": self.notes, "refused": self.refused,
                "code": self.code}  # fmt: skip


def find_replacement(model: nn.Module, optimizers: Sequence[Optimizer], treatments: Sequence[Treatment]) -> Replacement:
    """Translate every group of these optimizers, all of known programs.

    Raises:
        SourceError: an option changes the update into one that ours does not have.
    """
    # Parameters of one group become several groups of ours where their options differ, such as their pieces.
    findings, refusals, scales = Findings(), dict[str, str](), set[ScaleFunction]()
    members: defaultdict[tuple[Any, ...], list[Treatment]] = defaultdict(list)
    group_by_key: dict[tuple[Any, ...], OurGroup] = {}
    for treatment in treatments:
        if treatment.optimizer is None:
            continue
        if treatment.by_muon and not treatment.has_matrices:
            num_dims = len(treatment.shape)
            cure = "flatten it" if num_dims > 3 else "reshape it in the model"
            refusals[treatment.name] = f"{num_dims} dims in Muon: give it to AdamW, or {cure}"
            continue
        group = _translate(optimizers[treatment.optimizer], treatment, findings, scales)
        key = (*group.source, treatment.algorithm, repr(sorted(group.options.items(), key=str)))
        group_by_key.setdefault(key, group)
        members[key].append(treatment)
    if len(scales) > 1:
        raise SourceError("the optimizers have several scales without a name; make one optimizer of ours for each")
    # In the order of the other program's groups, which schedulers know by number.
    groups = []
    for key in sorted(group_by_key, key=lambda key: key[:2]):
        groups.append(replace(group_by_key[key], members=tuple(members[key])))
    scale = next(iter(scales), None)
    programs = dict.fromkeys(group.program.dialect.who for group in groups)
    notes = tuple(map(str, sorted_checks(findings.checks)))
    code = "\n".join(_code(model, groups, scale))
    return Replacement(tuple(programs), tuple(groups), notes, refusals, scale, code)


def _translate(optimizer: Optimizer, treatment: Treatment, findings: Findings, scales: set[ScaleFunction]) -> OurGroup:
    """Return the group of ours that one parameter would have alone."""
    program = known_optimizer(optimizer)
    assert program is not None and treatment.optimizer is not None and treatment.group is not None
    dialect, shape = program.dialect, treatment.shape
    [source, *_] = [method for method in dialect.methods if method.name == treatment.algorithm]
    [target, *_] = [method for method in ours.PROGRAM.methods if method.name == treatment.algorithm]

    # The options of its group, in common terms, then those that only the living optimizer says.
    foreign_options = {}
    for option, value in treatment.options.items():
        if option not in (PARAMS, "param_names"):
            foreign_options[option] = as_numbers(value)
    translation = common_options(foreign_options, dialect, source, shape)
    options: dict[str, Any] = dict(translation.common)
    scale: ScaleFunction | None = None
    if treatment.by_muon:
        options_in_code = dict(program.options_in_code(optimizer, treatment.parameter))
        factor = options_in_code.pop("scale_factor", 1.0)
        options |= options_in_code
        if factor != 1.0:
            scale = ScaleFunction(str(options.pop("scale")), factor)
            scales.add(scale)
    options.pop("step", None)
    if "ns" in options:
        options["ns"] = plain_coefficients(options["ns"])

    # Written as ours; an inert option that is on is private to the other program, so that a note tells of it.
    private_options = dict(translation.private)
    for option, value in foreign_options.items():
        if _is_switched_on(option, value, source):
            private_options[option] = value
    neutral = GroupOptions(options, private_options)
    our_options = write_options(neutral, dialect, ours.PROGRAM, target, shape, findings)
    our_options.pop("convention", None)
    if scale is not None:
        our_options["adjust_lr_fn"] = _function(scale)
    pairs = _pairs(foreign_options, source, target, our_options, options, options.keys() - translation.common.keys())
    momentum = float(options["momentum"]) if treatment.by_muon else None
    place = treatment.optimizer, treatment.group
    return OurGroup(place, (treatment,), our_options, program, source, momentum, tuple(pairs))


_SWITCHES = frozenset({"amsgrad"})
"""Options of other programs that are inert only while they are off."""


def _is_switched_on(option: str, value: object, method: StoredMethod) -> bool:
    return option in method.inert_options and option in _SWITCHES and value != method.inert_options[option]


def _pairs(
    foreign_options: Mapping[str, Any],
    source: StoredMethod,
    target: StoredMethod,
    our_options: Mapping[str, Any],
    common_values: Mapping[str, Any],
    names_in_code: set[str],
) -> Iterator[OptionPair]:
    """Yield every option of another program's group with its counterpart here."""
    our_names: dict[str, tuple[str, ...]] = {common: (option,) for common, option in target.options.items()}
    for coding in target.codings:
        our_names |= dict.fromkeys(coding.common, coding.options)
    units: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    for common, option in source.options.items():
        units.append(((option,), (common,)))
    for coding in source.codings:
        units.append((coding.options, coding.common))
    # Options that we have a word for.  No word is needed where our update is that of the silent value.
    translated = {"algorithm", "step"}
    for foreign_names, common_names in units:
        present = [option for option in foreign_names if option in foreign_options]
        translated |= {*present}
        if present and "step" not in common_names:
            text = _our_text(common_names, our_names, our_options)
            is_same = all(common_values.get(n, SILENT_VALUES.get(n)) == SILENT_VALUES.get(n) for n in common_names)
            yield OptionPair(_text(foreign_options, present), text or (SAME if is_same else LOST))
    for name in sorted(names_in_code):
        text = _our_text([name], our_names, our_options)
        if text:
            yield OptionPair("in its code", text)
    for option in sorted(foreign_options.keys() - translated):
        is_idle = option in source.inert_options and not _is_switched_on(option, foreign_options[option], source)
        fate = IDLE if is_idle or option in EXECUTION_OPTIONS else LOST
        yield OptionPair(_text(foreign_options, [option]), fate)


def _our_text(
    common_names: Iterable[str], our_names: Mapping[str, tuple[str, ...]], our_options: Mapping[str, Any]
) -> str:
    """Return our options for these common ones, each once, as text; empty if we have none."""
    names: dict[str, None] = {}
    for common in common_names:
        names |= dict.fromkeys(option for option in our_names.get(common, ()) if option in our_options)
    return _text(our_options, names)


def _text(options: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={_literal(options[name])}" for name in names)


def _literal(value: Any) -> str:
    return "scale" if callable(value) else json.dumps(value) if isinstance(value, str) else repr(value)


def _code(model: nn.Module, groups: Sequence[OurGroup], scale: ScaleFunction | None) -> Iterator[str]:
    """Yield the lines that make the optimizer of these groups."""
    # The lines run on the user's model, so they have the names that wrappers make.
    raw_names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    all_names = set(raw_names.values())
    yield "from fnmatch import fnmatchcase"
    yield ""
    yield "from muonckpt.optimizer import Muon"
    yield ""
    yield ""
    yield "def named(*globs):"
    yield "    return [p for name, p in model.named_parameters() if any(fnmatchcase(name, glob) for glob in globs)]"
    yield ""
    yield ""
    if scale is not None:
        yield from (*scale.lines(), "", "")
    yield "optimizer = Muon("
    yield "    ["
    for group in groups:
        names = [raw_names[member.parameter] for member in group.members]
        globs = ", ".join(map(json.dumps, in_globs(names, all_names - {*names})))
        yield "        {"
        yield f'            "params": named({globs}),'
        for name, value in group.stated_options().items():
            yield f"            {json.dumps(name)}: {_literal(value)},"
        yield "        },"
    yield "    ]"
    yield ")"
