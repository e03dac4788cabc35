"""Where a checkpoint keeps its model and its optimizers, and the form of their keys: found once, then data.

torch's optimizers have two forms of keys, whatever program they are from, and a trainer puts them where it likes:

* nested: ``(*root, "state", "w", "exp_avg")`` and ``(*root, "param_groups", 0, "lr")``; parameters may be numbers;
* flat: ``(*root, "state.w.exp_avg")`` and ``(*root, "param_groups.w.lr")``; a root may be in the same string.

:func:`keys_of` finds the roots, and :func:`under` gives a dialect templates with them.  So a root is a part of the
templates: reading strips it and writing puts it back, and nothing else knows of it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ...errors import SourceError, TargetError
from ...record import Manifest
from ...vocabulary import STEP, KeyPath
from .dialect import AnyTemplate, Dialect, Template, Templates, key_of
from .dialects import DIALECTS

_NUMBER = re.compile("0|[1-9][0-9]*")
KNOWN_SLOTS = frozenset(
    slot
    for dialect in DIALECTS.values()
    for slot in (*dialect.derived, *(slot for method in dialect.methods for slot in method.slots.values()))
)
"""The slots of all programs."""


@dataclass(frozen=True, slots=True)
class OptimizerPlace:
    """Where one optimizer lies: the path ``root``, then ``prefix`` in the string of a ``flat`` key."""

    root: KeyPath
    prefix: str = ""
    flat: bool = False

    def state(self, numbered: bool = False) -> Template:
        """The template of its state."""
        if self.flat:
            return Template((f"{self.prefix}state.{{name}}.{{slot}}",), self.root)
        return Template(("state", "{number}" if numbered else "{name}", "{slot}"), self.root)

    def option(self) -> Template:
        """The template of the options of its groups."""
        if self.flat:
            return Template((f"{self.prefix}param_groups.{{name}}.{{option}}",), self.root)
        return Template(("param_groups", "{group}", "{option}"), self.root)

    def __str__(self) -> str:
        return key_of((*self.root, self.prefix.removesuffix("."))).strip(".") or "the top"


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Where a model lies: the path ``root``, then ``prefix`` in the string that names the parameter."""

    root: KeyPath
    prefix: str = ""

    def template(self) -> Template:
        """The template of its weights."""
        return Template((f"{self.prefix}{{name}}",), self.root)

    def __str__(self) -> str:
        return key_of((*self.root, self.prefix.removesuffix("."))).strip(".") or "the top"


@dataclass(frozen=True, slots=True)
class Keys:
    """The places of a checkpoint's optimizers, and of its model: None if it has none, or if nothing tells.

    Attributes:
        numbered: whether parameters are known by their number in the optimizer.
        groups: the names of the options of each group.
        slots: the names of the slots of state.
        example: a key of state.
    """

    optimizers: tuple[OptimizerPlace, ...] = ()
    model: ModelPlace | None = None
    numbered: bool = False
    groups: tuple[frozenset[str], ...] = ()
    slots: frozenset[str] = frozenset()
    example: str = ""

    @property
    def flat(self) -> bool:
        """Whether a key is flat."""
        return any(place.flat for place in self.optimizers)


_FLAT = OptimizerPlace(("optimizer",), flat=True).state()
_FORMS = (OptimizerPlace(("optimizer",)).state(), OptimizerPlace(("optimizer",)).state(numbered=True), _FLAT)


def under(dialect: Dialect, keys: Keys) -> Dialect:
    """The dialect with templates for these places; itself if nothing changes, or if its keys are not of torch's forms.

    Megatron's keys are of other forms, which have no roots.
    """
    if dialect.state not in _FORMS:
        return dialect
    state: AnyTemplate = dialect.state
    option, model = dialect.option, dialect.model
    if keys.optimizers:
        state = _one_or_more({str(place): place.state(keys.numbered) for place in keys.optimizers})
        option = _one_or_more({str(place): place.option() for place in keys.optimizers})
    if keys.model is not None:
        model = keys.model.template()
    unchanged = (state, option, model) == (dialect.state, dialect.option, dialect.model)
    return dialect if unchanged else replace(dialect, state=state, option=option, model=model)


FORMS = ("nested", "flat")
"""The forms of keys that a target can be given."""


ROOTS = ("model", "optimizer")
"""What a target can be given another root for."""


def placed(dialect: Dialect, form: str | None, roots: Mapping[str, str]) -> Dialect:
    """The dialect with its optimizer in keys of this form, and model and optimizer under these roots.

    Args:
        form: one of `FORMS`; None means the dialect's own.
        roots: dotted paths in the nested state dict, by a name in `ROOTS`; an empty one is the top.  Without one the
            optimizer is under ``optimizer``, and the model where the dialect has it.

    Raises:
        TargetError: its keys are not of torch's forms, or have no such form.
    """
    if dialect.state not in _FORMS or form not in (None, *FORMS):
        raise TargetError(f"--keys and --root: expected {' or '.join(FORMS)}, and a program with torch's keys; found "
                          f"{form!r} for {dialect.name}")  # fmt: skip
    if unknown := sorted(roots.keys() - {*ROOTS}):
        raise TargetError(f"--root: expected one of {', '.join(ROOTS)}, found {unknown[0]!r}")
    flat = dialect.state == _FLAT if form is None else form == "flat"
    if flat and dialect.numbered:
        raise TargetError(f"--keys: {dialect.name} knows parameters by number, and flat keys have names")
    model = ModelPlace(_path(roots["model"])) if "model" in roots else None
    optimizer = OptimizerPlace(_path(roots.get("optimizer", "optimizer")), flat=flat)
    return under(dialect, Keys((optimizer,), model, dialect.numbered))


def _path(root: str) -> KeyPath:
    path = tuple(root.split(".")) if root else ()
    if not all(path) or {"{", "}"} & {*root}:
        raise TargetError(f"--root: expected names with dots between them, such as app.optimizer, found {root!r}")
    return path


def is_of_optimizer(path: KeyPath) -> bool:
    """Whether a path that no template reads has a part that only optimizers have, between dots or alone."""
    parts = key_of(path).split(".")
    return "param_groups" in parts or (not KNOWN_SLOTS.isdisjoint(parts[1:]) and "state" in parts)


def _one_or_more(templates: Mapping[str, Template]) -> AnyTemplate:
    return next(iter(templates.values())) if len(templates) == 1 else Templates(templates)


class _Reading(NamedTuple):
    """A way to read a path as state or as an option: ``name`` is a parameter or a group, ``leaf`` a slot or option."""

    place: OptimizerPlace
    name: str
    leaf: str


def _readings(path: KeyPath, word: str) -> Iterator[_Reading]:
    """The ways to read a path that has ``word`` before the name, those with the shortest prefix first."""
    if len(path) > 2 and path[-3] == word:
        yield _Reading(OptimizerPlace(path[:-3]), str(path[-2]), str(path[-1]))
    last = str(path[-1])
    for match in _after_dot(word).finditer(last) if word in last else ():
        name, _, leaf = last[match.end() :].rpartition(".")
        prefix = last[: match.start()]
        if name and leaf and not {"{", "}"} & set(prefix):
            yield _Reading(OptimizerPlace(path[:-1], prefix, True), name, leaf)


@lru_cache
def _after_dot(word: str) -> re.Pattern[str]:
    return re.compile(rf"(?:(?<=\.)|^){word}\.")


def keys_of(manifest: Manifest) -> Keys:
    """The places of the optimizers and of the model of a checkpoint.

    An optimizer is where state has parameter groups beside it, or if it has none, where all slots are known ones.  The
    model is where most of the parameters that have state are found under their names.

    Raises:
        SourceError: there are several such places of the model.
    """
    paths = {entry.path: entry.key for entries in (manifest.tensors, manifest.blobs) for entry in entries}
    groups: defaultdict[OptimizerPlace, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in paths:
        for option in _readings(path, "param_groups"):
            if option.place.flat or _NUMBER.fullmatch(option.name):
                groups[option.place][option.name].add(option.leaf)
    states = {path: tuple(readings) for path in paths if (readings := tuple(_readings(path, "state")))}
    slots: defaultdict[OptimizerPlace, set[str]] = defaultdict(set)
    for readings in states.values():
        for reading in readings:
            slots[reading.place].add(reading.leaf)
    bare = {place for place, found in slots.items() if found <= KNOWN_SLOTS and found - {STEP} and place not in groups}
    chosen: dict[KeyPath, _Reading] = {}
    for path, readings in states.items():
        accepted = [r for r in readings if r.place in groups] or [r for r in readings if r.place in bare]
        if accepted:
            chosen[path] = accepted[0]
    places = tuple(dict.fromkeys(reading.place for reading in chosen.values()))
    names = {reading.name for reading in chosen.values()}
    numbered = bool(names) and not any(p.flat for p in places) and all(map(_NUMBER.fullmatch, names))
    weights = [tensor.path for tensor in manifest.tensors if tensor.path not in chosen]
    return Keys(
        tuple(sorted(places, key=_order)),
        _model(weights, frozenset() if numbered else names),
        numbered,
        tuple(frozenset(options) for place in places for options in groups[place].values()),
        frozenset(reading.leaf for reading in chosen.values()),
        next((paths[path] for path in chosen), ""),
    )


def _order(place: OptimizerPlace) -> tuple[object, ...]:
    """Optimizers in the order of their numbers, then of their names."""
    parts = re.split("([0-9]+)", str(place))
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


def _model(weights: Iterable[KeyPath], names: Collection[str]) -> ModelPlace | None:
    """The place where most of these parameters are; one that is called ``model`` comes before its copies.

    Raises:
        SourceError: there are several.
    """
    found: Counter[ModelPlace] = Counter()
    for path in weights:
        last = str(path[-1])
        starts = (0, *(match.end() for match in re.finditer(r"\.", last)))
        found.update(ModelPlace(path[:-1], last[:start]) for start in starts if last[start:] in names)
    most = [place for place, count in found.items() if count == max(found.values())]
    usual = [place for place in (ModelPlace(("model",)), ModelPlace(())) if place in most]
    named = usual or [place for place in most if "model" in (*place.root[-1:], place.prefix.removesuffix("."))]
    places = named[:1] or most
    if len(places) > 1:
        raise SourceError(
            f"the optimizer's parameters are under {' and under '.join(map(repr, map(str, places)))}, and nothing says "
            "which is the model; make a copy of one, with the optimizer, by `muonckpt reshard --select`"
        )
    return next(iter(places), None)
