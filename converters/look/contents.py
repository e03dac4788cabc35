"""A checkpoint's metadata, sorted: tensors by role, parameters with their state, groups with their options, steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

from ...names.errors import LayoutError, SourceError
from ...names.keys import STATE, key_of, optimizers_of
from ...names.vocabulary import CONVENTION, PARAMS
from ...names.wording import unnumbered
from ...programs.detection import Detected, confirm, detect, with_slots_of
from ...programs.dialect import Dialect
from ...programs.model_view import Entry, ModelView, ParameterGroup, Role, model_view
from ...record.record import Manifest, StateRecord
from ...store.io.location import Remote
from ...store.open_checkpoint import OpenCheckpoint, Values
from ..translate.parse import NAMES, merge_equal, name_numbers, stored_groups

NO_STATE = "(not optimizer state)"
"""The label of tensors that are in no slot of optimizer state."""


def option_value(value: object) -> str:
    """Return an option as tables show it."""
    match value:
        case [*parts]:
            return "/".join(map(option_value, parts))
        case float():
            return f"{value:.6g}"
        case _:
            return str(value)


def folded_names(names: Sequence[str]) -> tuple[str, ...]:
    """Write many names as few: numbers as ``*`` or as ranges, and what differs between two of them in braces."""
    # Names that end in numbers of parameters.
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for name in names:
        optimizer, sign, number = name.rpartition("#")
        if number.isdecimal():
            numbers[optimizer + sign].append(int(number))
    if sum(map(len, numbers.values())) == len(names):
        return tuple(f"{optimizer}{ranges(sorted(members))}" for optimizer, members in numbers.items())
    # Names of parameters: those that differ only between the last layer's number and their own last part.
    middles: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for pattern in dict.fromkeys(map(unnumbered, names)):
        head, star, below = pattern.rpartition("*.")
        middle, dot, tail = below.rpartition(".")
        middles[f"{head}{star}", f"{dot}{tail}"].append(middle)
    folded = []
    for (head, tail), members in middles.items():
        middle = f"{{{', '.join(members)}}}" if len(members) > 1 else members[0]
        folded.append(f"{head}{middle}{tail}")
    return tuple(folded)


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers with runs as ranges: ``0-3,7``."""
    text = ""
    for index, number in enumerate(numbers):
        if not index or numbers[index - 1] != number - 1:
            text += f",{number}"
        elif index + 1 == len(numbers) or numbers[index + 1] != number + 1:
            text += f"-{number}"
    return text[1:]


_MAX_COUNTERS = 32
_MAX_GROUPS = 1000
_MAX_REMOTE_GROUPS = 64
"""The most step counters, and the most groups of one parameter each in a folder and in an object store, that are read.
"""


def _merge_options(groups: Sequence[ParameterGroup], dialect: Dialect) -> tuple[ParameterGroup, ...]:
    """Merge groups with equal options, those that matter to the update first."""
    update_options = [dialect.method_option or ""]
    for method in dialect.methods:
        update_options += chain.from_iterable(coding.options for coding in method.encodings)
    order = dict.fromkeys((*update_options, CONVENTION))
    merged: dict[str, ParameterGroup] = {}
    for group in groups:
        options = {name: group.options[name] for name in order if name in group.options}
        for name in sorted(group.options.keys() - {*order, NAMES}):  # no rule of ours depends on them
            try:
                options[name] = group.options[name]
            except (SourceError, LayoutError):
                options[name] = "(not plain data)"
        key = repr(sorted(options.items()))
        former = merged.get(key, ParameterGroup((), options))
        parameters, positions = (*former.parameters, *group.parameters), (*former.positions, *group.positions)
        merged[key] = ParameterGroup(parameters, options, positions)
    return tuple(merged.values())


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The ``least`` and ``most`` of the step counters that were ``read`` (None if none), and how many there are."""

    least: int | float | None
    most: int | float | None
    read: int
    counters: int


def steps_of(view: ModelView, values: Values) -> StepCounts:
    """Read step counters of parameters, evenly spread, or else those of the groups."""
    # Counters of parameters, as tensors or as items.
    dialect = view.dialect
    counters: list[Entry] = [*view.tensors_of(Role.STEPS)]
    if dialect is not None:
        slots = dialect.slots_called("step")
        for parameter in view.parameters.values():
            counters += [item for slot, item in parameter.items.items() if slot in slots]
    steps: list[int | float] = []
    for counter in _spread(counters, _MAX_COUNTERS):
        with suppress(SourceError, LayoutError):  # it is damaged or lost, as `verify` says
            value = values.read(counter)
            if isinstance(value, int | float):
                steps.append(int(value) if value == value // 1 else value)
    # Some programs count in an option of the group.
    if not counters and dialect is not None:
        options = {method.options["step"] for method in dialect.methods if "step" in method.options}
        for group in view.groups:
            group_steps = (value for option, value in group.options.items() if option in options)
            steps += (value for value in group_steps if isinstance(value, int | float))
    return StepCounts(
        min(steps, default=None), max(steps, default=None), read=len(steps), counters=len(counters) or len(steps)
    )


def plain_items(manifest: Manifest, values: Values) -> dict[str, Any]:
    """Decode all items and scalar tensors, by key; an item that is no plain data becomes a sentence that says so."""
    decoded: dict[str, Any] = {}
    scalars = [tensor for tensor in manifest.tensors if tensor.shape == ()]
    entries: list[Entry] = [*manifest.blobs, *scalars]
    for entry in entries:
        try:
            decoded[entry.key] = values.read(entry)
        except (SourceError, LayoutError) as error:
            kind = f"scalar of {entry.dtype}" if isinstance(entry, StateRecord) else "not plain data"
            decoded[entry.key] = f"({kind}: {error})"
    return decoded


T = TypeVar("T")


def _spread(sequence: Sequence[T], limit: int) -> list[T]:
    """Choose members up to a limit, evenly spread, the first and the last among them."""
    if len(sequence) <= limit:
        return list(sequence)
    return [sequence[index * (len(sequence) - 1) // (limit - 1)] for index in range(limit)]


@dataclass(frozen=True, slots=True)
class FirstLook:
    """A checkpoint's metadata, sorted.

    Attributes:
        program: whose keys it has, or a sentence that says why that is unknown.
        manifest: with parameters and slots as the program's keys name them, or groups where keys have numbers.
        unread_groups: the number of groups of one parameter each that were not looked at because there are many.
        notes: why groups cannot be read.
    """

    program: Detected | str
    manifest: Manifest
    view: ModelView
    steps: StepCounts
    unread_groups: int
    notes: tuple[str, ...]

    @property
    def step(self) -> int | float | None:
        """Return the step that the saving program recorded, or else that of the step counters if they agree."""
        recorded = recorded_step(self.manifest)
        if recorded is not None:
            return recorded
        return self.steps.most if self.steps.least == self.steps.most else None


def first_look(checkpoint: OpenCheckpoint) -> FirstLook:
    """Sort a checkpoint's metadata, and read its hyper-parameters and step counters."""
    manifest, values = checkpoint.outline, checkpoint.values
    try:
        program = detect(manifest)
    except SourceError as error:
        view, note = model_view(manifest, None), "the program is unknown, and so are its parameter groups"
        return FirstLook(
            str(error), manifest=manifest, view=view, steps=steps_of(view, values), unread_groups=0, notes=(note,)
        )
    # The options of the groups; of groups of one parameter those of some, evenly spread.
    groups, names, unread_groups, notes = tuple[ParameterGroup, ...](), dict[str, str](), 0, tuple[str, ...]()
    try:
        stored = stored_groups(manifest, program.dialect, values)
        if program.dialect.numbered:
            stored, names = name_numbers(stored, values)
        limit = _MAX_REMOTE_GROUPS if isinstance(checkpoint.path, Remote) else _MAX_GROUPS
        chosen = [group for group in stored if group.positions]
        chosen += _spread([group for group in stored if not group.positions], limit)
        groups, unread_groups = _merge_options(chosen, program.dialect), len(stored) - len(chosen)
    except (SourceError, LayoutError) as error:
        names, notes = {}, (f"the parameter groups cannot be read: {error}",)
    # Options can tell programs apart whose keys are equal.
    program = confirm(manifest, program, (group.options for group in groups))
    manifest = with_slots_of(manifest, program.dialect)
    # State of numbered parameters gets the names that the groups record.
    if names:
        tensors = []
        for tensor in manifest.tensors:
            name = names.get(tensor.name or "")
            tensors.append(replace(tensor, name=name) if name else tensor)
        manifest = replace(manifest, tensors=tuple(tensors))
    view = model_view(manifest, program.dialect, groups, names)
    return FirstLook(
        program, manifest=manifest, view=view, steps=steps_of(view, values), unread_groups=unread_groups, notes=notes
    )


def unknown_state(look: FirstLook, not_read: Sequence[str]) -> Iterator[str]:
    """Yield the keys of entries in the state of optimizers with groups, and in no slot of a parameter."""
    manifest, items = look.manifest, dict[str, Entry]()
    for parameter in look.view.parameters.values():
        items |= {item.key: item for item in parameter.items.values() if parameter.state}
    blobs = (blob for blob in manifest.blobs if blob.key not in items)
    entries: list[Entry] = [*look.view.tensors_of(Role.OTHER), *blobs]
    keys = [*(entry.key for entry in entries if STATE in entry.path), *(name for name in not_read if STATE in name)]
    if keys:
        places = optimizers_of([*(tensor.path for tensor in manifest.tensors), *(blob.path for blob in manifest.blobs)])
        beginnings = tuple(f"{key_of((*place.root, STATE))}." for place in places if not place.flat)
        yield from (key for key in keys if key.startswith(beginnings))


def recorded_step(manifest: Manifest) -> int | float | None:
    step = manifest.provenance.get("step")
    return step if isinstance(step, int | float) else None


def groups_as_data(manifest: Manifest, values: Values) -> list[dict[str, Any]]:
    """Return the groups in their order: names of parameters, and options as the program calls them.

    Where options are by parameter, those with equal ones are together.

    Raises:
        SourceError: the program is unknown, or an option is damaged or not plain data.
    """
    groups = merge_equal(stored_groups(manifest, detect(manifest).dialect, values))
    return [{PARAMS: list(group.parameters), **group.options} for group in groups]


def groups_as_code(groups: Sequence[dict[str, Any]], width: int = 120) -> str:
    """Return a Python list of groups, with as many options on a line as fit in ``width``."""
    lines: list[str] = []
    for group in groups:
        # The words of code between which a line may end.
        words: list[str] = []
        for option, value in group.items():
            parts = [repr(value)]
            if isinstance(value, list) and value:
                parts = list(map(repr, value))
                parts[0] = f"[{parts[0]}"
                parts[-1] += "]"
            parts[0] = f"{option!r}: {parts[0]}"
            words += [f"{part}," for part in parts]
        # A group begins on a line of its own, and its options are filled in as words of a text.
        first, *others = words or [""]
        lines.append(f"{' ' if lines else '['}{{{first}")
        for word in others:
            if len(lines[-1]) + len(word) + len(" },]") > width:
                lines.append(f"  {word}")
            else:
                lines[-1] += f" {word}"
        lines[-1] = f"{lines[-1].removesuffix(',')}}},"
    return "\n".join(lines).removesuffix(",") + "]" if lines else "[]"
