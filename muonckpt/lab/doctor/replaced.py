"""Another program's groups as ours: options by the tables of `converters.programs`, and the lines to write instead."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

_MOST_DIMS = 3

SAME, IDLE, LOST = "as here", "does not change the update", "no counterpart"
"""What an option of another program is here that has no word of ours."""


@dataclass(frozen=True, slots=True)
class ScaleFunction:
    """A common scale times a factor, which has no name: a function in code."""

    scale: str
    factor: float

    def lines(self) -> list[str]:
        return ["def scale(rows, columns):", f"    return {self.factor!r} * {_SCALES[self.scale]}"]


@lru_cache
def _function(of: ScaleFunction) -> Callable[[int, int], float]:
    """Return the function: the same object in all groups, as an optimizer has one function of a name."""

    def scale(rows: int, columns: int) -> float:
        return of.factor * FACTORS[of.scale](rows, columns)

    return scale


@dataclass(frozen=True, slots=True)
class OptionPair:
    """One option, or several that mean one thing: another program's words, and ours or what became of it."""

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
    known: KnownOptimizer
    method: StoredMethod
    momentum: float | None
    pairs: tuple[OptionPair, ...]

    def said(self) -> dict[str, Any]:
        """Return the algorithm and the options that are not our defaults, and the rate."""
        defaults = {"algorithm": "muon", **GROUP_OPTIONS[self.options["algorithm"]]}
        order = [*defaults, *sorted(self.options.keys() - defaults.keys())]
        chosen = {name: self.options[name] for name in order if name in self.options}
        return {name: value for name, value in chosen.items() if name == "lr" or value != defaults.get(name, _NO)}


_NO = object()


@dataclass(frozen=True, slots=True)
class Replacement:
    """Ours in place of another program's optimizers.

    Attributes:
        programs: whose they are.
        groups: of one optimizer of ours.
        notes: what has no counterpart, and what the other does not say.
        refused: parameters that ours does not take, with the reason.
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
        groups = [
            {
                "names": [one.name for one in group.members],
                "options": {name: value for name, value in group.options.items() if not callable(value)},
                "translated": [{"theirs": pair.theirs, "ours": pair.ours} for pair in group.pairs],
            }
            for group in self.groups
        ]
        return {"programs": self.programs, "groups": groups, "notes": self.notes, "refused": self.refused,
                "code": self.code}  # fmt: skip


def find_replacement(model: nn.Module, optimizers: Sequence[Optimizer], every: Sequence[Treatment]) -> Replacement:
    """Translate every group of these optimizers, all of known programs.

    Raises:
        SourceError: an option changes the update into one that ours does not have.
    """
    findings, refused, scales = Findings(), dict[str, str](), set[ScaleFunction]()
    gathered: defaultdict[tuple[Any, ...], list[Treatment]] = defaultdict(list)
    made: dict[tuple[Any, ...], OurGroup] = {}
    for one in every:
        if one.optimizer is None or one.group is None:
            continue
        if one.by_muon and not 2 <= len(one.shape) <= _MOST_DIMS:
            refused[one.name] = f"{len(one.shape)} dims in Muon: give it to AdamW, or reshape it in the model"
            continue
        group = _group(optimizers[one.optimizer], one, findings, scales)
        key = (one.optimizer, one.group, one.algorithm, repr(sorted(group.options.items(), key=str)))
        made.setdefault(key, group)
        gathered[key].append(one)
    if len(scales) > 1:
        raise SourceError("the optimizers have several scales without a name; make one optimizer of ours for each")
    groups = tuple(
        OurGroup(g.source, tuple(gathered[key]), g.options, g.known, g.method, g.momentum, g.pairs)
        for key, g in sorted(made.items(), key=lambda item: item[0][:2])
    )
    scale = next(iter(scales), None)
    programs = dict.fromkeys(group.known.dialect.who for group in groups)
    notes = tuple(map(str, sorted_checks(findings.checks)))
    code = "\n".join(_code(model, groups, scale))
    return Replacement(tuple(programs), groups, notes, refused, scale, code)


def _group(optimizer: Optimizer, one: Treatment, findings: Findings, scales: set[ScaleFunction]) -> OurGroup:
    """Return the group of ours that one parameter would have alone."""
    known = known_optimizer(optimizer)
    assert known is not None and one.optimizer is not None and one.group is not None, "only known ones are translated"
    dialect = known.dialect
    [source, *_] = [method for method in dialect.methods if method.name == one.algorithm]
    [target, *_] = [method for method in ours.PROGRAM.methods if method.name == one.algorithm]
    given = {option: value for option, value in optimizer.param_groups[one.group].items() if option != PARAMS}
    own = {option: as_numbers(value) for option, value in given.items() if option != "param_names"}
    stated = common_options(own, dialect, source, one.shape)
    known_options: dict[str, Any] = dict(stated.common)
    scale: ScaleFunction | None = None
    if one.by_muon:
        said = dict(known.said(optimizer, one.parameter))
        factor = said.pop("scale_factor", 1.0)
        known_options |= said
        if factor != 1.0:
            scale = ScaleFunction(str(known_options.pop("scale")), factor)
            scales.add(scale)
    known_options.pop("step", None)
    if "ns" in known_options:
        known_options["ns"] = plain_coefficients(known_options["ns"])
    active = {o: v for o, v in own.items() if o in source.idle and _odd(o, v, source)}
    options = GroupOptions(known_options, {**stated.private, **active})
    written = write_options(options, dialect, ours.PROGRAM, target, one.shape, findings)
    written.pop("convention", None)
    if scale is not None:
        written["adjust_lr_fn"] = _function(scale)
    pairs = tuple(_pairs(own, source, target, written, known_options, known_options.keys() - stated.common.keys()))
    momentum = float(known_options["momentum"]) if one.by_muon else None
    return OurGroup((one.optimizer, one.group), (one,), written, known, source, momentum, pairs)


_ON = frozenset({"amsgrad"})
"""Idle options of other programs that are idle only while they are off."""


def _odd(option: str, value: object, method: StoredMethod) -> bool:
    return option in _ON and value != method.idle[option]


def _pairs(
    own: Mapping[str, Any],
    source: StoredMethod,
    target: StoredMethod,
    written: Mapping[str, Any],
    known: Mapping[str, Any],
    in_code: set[str],
) -> Iterator[OptionPair]:
    """Yield every option of another program's group with what it is here."""
    places: dict[str, tuple[str, ...]] = {common: (option,) for common, option in target.options.items()}
    places |= {common: coding.options for coding in target.codings for common in coding.common}
    units: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
        ((option,), (common,)) for common, option in source.options.items()
    ]
    units += [(coding.options, coding.common) for coding in source.codings]
    told: set[str] = set()
    for theirs, common in units:
        present = [option for option in theirs if option in own]
        told |= {*present}
        mine = dict.fromkeys(option for name in common for option in places.get(name, ()) if option in written)
        if present and "step" not in common:
            same = all(name not in known or known[name] == SILENT_VALUES.get(name) for name in common)
            yield OptionPair(_said(own, present), _said(written, mine) or (SAME if same else LOST))
    for name in sorted(in_code):
        if told_here := [option for option in places.get(name, ()) if option in written]:
            yield OptionPair("in its code", _said(written, told_here))
    rest = sorted(own.keys() - told - {"algorithm", "step"})
    for option in rest:
        idle = option in source.idle and not _odd(option, own[option], source)
        yield OptionPair(_said(own, [option]), IDLE if idle or option in EXECUTION_OPTIONS else LOST)


def _said(options: Mapping[str, Any], names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_text(options[name])}" for name in names)


def _text(value: Any) -> str:
    return "scale" if callable(value) else json.dumps(value) if isinstance(value, str) else repr(value)


# Code.


def _code(model: nn.Module, groups: Sequence[OurGroup], scale: ScaleFunction | None) -> Iterator[str]:
    """Yield the lines that make the optimizer of these groups."""
    raw: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    names = set(raw.values())
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
        own = [raw[one.parameter] for one in group.members]
        globs = ", ".join(map(json.dumps, in_globs(own, names - {*own})))
        yield "        {"
        yield f'            "params": named({globs}),'
        for name, value in group.said().items():
            yield f"            {json.dumps(name)}: {_text(value)},"
        yield "        },"
    yield "    ]"
    yield ")"
