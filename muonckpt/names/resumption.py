"""Decides, when a run resumes with other parameters than were saved, which are loaded, start fresh or are refused.

`ParameterMatcher` does it, for ``checkpoint`` with state in files, for the optimizer with state dicts.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from glob import escape
from typing import Any, NamedTuple

from .errors import ArgumentError
from .renaming import common_tail
from .vocabulary import (
    ALGORITHM,
    CONVENTION,
    EIGHT_BIT_SLOTS,
    FLATTEN,
    FUSION,
    FUSION_FREE_SLOTS,
    MASTER,
    PARAMS,
    ZERO_SLOTS,
)
from .wording import LAYER_NUMBER, counted, listed, merged_names, unnumbered

NAMES_OF_GROUPS = frozenset({PARAMS, "param_names", "name"})
"""Keys of a parameter group that are not options: its parameters and its name."""

NEW = "new, without state in the checkpoint"
GONE = "only in the checkpoint"
UNGROUPED = "in no parameter group of the checkpoint, which has their state without options"
OTHER_CONVENTION = "of momentum convention"
"""The beginning of the reason where momentum accumulates otherwise."""

OTHER_OPTIONS = "from a group with other options than their other groups"
"""The same where parameters of one group come from several that differ."""

ELSEWHERE = "not here"
"""The end of the reason where the checkpoint has slots that no method of ours keeps, as wrappers of optimizers do."""

_MEANING = (ALGORITHM, CONVENTION)
_FUSED_MEANING = (*_MEANING, *FUSION)
_ALWAYS_FUSION = {*FUSION} - {FLATTEN}


def meaning_options(slots: Collection[str]) -> tuple[str, ...]:
    """Return the options of a parameter group on which the meaning of state in these slots depends."""
    return _MEANING if FUSION_FREE_SLOTS.issuperset(slots) else _FUSED_MEANING


def with_flatten(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a group; one of ours that is not flattened does not say so."""
    return {FLATTEN: False, **options} if options.keys() >= _ALWAYS_FUSION else options


@dataclass(frozen=True, slots=True)
class Globs:
    """Patterns of names or keys: ``*`` matches any characters, dots among them."""

    patterns: tuple[str, ...] = ()

    @classmethod
    def of(cls, value: Iterable[str], argument: str = "fresh") -> Globs:
        """Read the value of a user's argument.

        Raises:
            ArgumentError: it is not a list of strings; a string is not one either.
        """
        return cls(_patterns(argument, value, "a list of globs"))

    @property
    def matches_all(self) -> bool:
        return "*" in self.patterns

    def match(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the globs that match none of the names."""
        names, unmatched = list(names), []
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                unmatched.append(pattern)
        return unmatched


def _patterns(argument: str, value: Iterable[str], expected: str, example: str = "") -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value)
    if isinstance(value, str) or not all(isinstance(pattern, str) for pattern in patterns):
        example = example or str(patterns[0])
        raise ArgumentError(f"{argument}={value!r}: expected {expected}, such as {argument}=[{example!r}]")
    return patterns


NO_GLOBS = Globs()


@dataclass(frozen=True, slots=True)
class Choices:
    """A user's globs for the parts that do not fit; `load` says what each argument does."""

    allow_extra: Globs
    fresh: Globs
    grow: Globs
    ungrouped: Globs

    @classmethod
    def of(
        cls,
        allow_extra: bool | Iterable[str] = False,
        fresh: Iterable[str] = (),
        grow: Iterable[str] = (),
        ungrouped: Iterable[str] = (),
    ) -> Choices:
        """Read the arguments.

        Raises:
            ArgumentError: ``allow_extra`` is neither a bool nor a list of strings, or another one is no such list.
        """
        if isinstance(allow_extra, bool):
            extra = Globs(("*",) if allow_extra else ())
        else:
            extra = Globs(_patterns("allow_extra", allow_extra, "True or a list of globs", "lr_scheduler.*"))
        return cls(extra, Globs.of(fresh), Globs.of(grow, "grow"), Globs.of(ungrouped, "ungrouped"))

    def without_fresh(self, patterns: object) -> Choices:
        """Return the choices without those patterns of ``fresh`` that a run has followed before it saved."""
        followed = patterns if isinstance(patterns, list) else []
        return replace(self, fresh=Globs(tuple(pattern for pattern in self.fresh.patterns if pattern not in followed)))

    def as_arguments(self) -> dict[str, tuple[str, ...]]:
        """Return the globs by argument."""
        return {name: getattr(self, name).patterns for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class LoadTraffic:
    """Bytes of tensors that all ranks together have read and sent in a load.

    Attributes:
        passes: 2 if everything was read to be checked, and again to be loaded; else 1.
    """

    bytes_read: int
    bytes_sent: int
    passes: int

    def __str__(self) -> str:
        times = " in two passes; the first one has checked them" if self.passes == 2 else ""
        return f"{self.bytes_read:,} bytes read{times}; {self.bytes_sent:,} bytes sent between ranks"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load, on all ranks together.

    Attributes:
        loaded: names of parameters whose state was loaded.
        fresh: names of parameters whose state starts fresh: zeros, no steps counted.
        discarded: the fresh ones whose state in the checkpoint would have fitted.
        dropped: parameters and weights that only the checkpoint has; nothing takes them.
        kept: keys of weights that the checkpoint lacks; they keep the values that they had.
        grown: names of parameters that have more rows here; the new ones keep their values, with state of zeros.
        own_options: options that the checkpoint lacks and that stay as the running optimizer has them, as text.
        weights: how many tensors that are no state of an optimizer were loaded.
        traffic: the bytes that were read and sent; None if nothing was read.
    """

    loaded: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    discarded: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    grown: tuple[str, ...] = ()
    own_options: tuple[str, ...] = ()
    weights: int = field(default=0, compare=False, kw_only=True)
    traffic: LoadTraffic | None = field(default=None, compare=False, kw_only=True)

    def __str__(self) -> str:
        rows = {
            "state starts fresh": self.fresh,
            "of these, would have fitted": self.discarded,
            "grown, new rows begin": self.grown,
            "dropped, only in the checkpoint": self.dropped,
        }
        # Weights that were not loaded come first, as they cost most.  Globs may not match parameters of other lists.
        parameters = {*self.loaded, *self.fresh}
        lines = [f"{as_initialised(len(self.kept))}: {', '.join(merged_names(self.kept))}"] if self.kept else []
        has_state = parameters or not self.weights
        lines.append(f"state loaded: {len(self.loaded)}" if has_state else f"weights loaded: {self.weights}")
        for title, names in rows.items():
            if names:
                lines.append(f"{title}: {len(names)} ({', '.join(in_globs(names, parameters - {*names}))})")
        if self.own_options:
            lines.append(
                f"options that the source did not say, as the optimizer has them: {'; '.join(self.own_options)}"
            )
        return "\n".join(lines)


_DOT = re.compile(r"\.")


def as_initialised(weights: int) -> str:
    """Return how many weights a resume has left as the program initialised them, in words."""
    return f"{counted(weights, 'weight')} {'stays' if weights == 1 else 'stay'} as initialised"


def in_globs(names: Collection[str], other_names: Iterable[str]) -> list[str]:
    """Return names as globs for ``fresh=``: one for names that differ only in numbers, unless it matches others too."""
    other_names = list(other_names)
    members_by_glob: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        members_by_glob[unnumbered(escape(name))].append(name)
    globs: list[str] = []
    # A glob that would match another name is spelled out, or as its module.
    spelled: list[str] = []
    for glob, members in members_by_glob.items():
        is_common = len(members) > 1 and not any(fnmatchcase(name, glob) for name in other_names)
        if is_common:
            globs.append(glob)
        else:
            spelled += members
    return [*globs, *(in_modules(spelled, other_names) if other_names else map(escape, spelled))]


def in_modules(names: Iterable[str], other_names: Iterable[str]) -> list[str]:
    """Return names as globs: one for several that are all of a module, such as ``blocks.2.*``."""
    others = {name[: dot.start()] for name in other_names for dot in _DOT.finditer(name)}
    members_by_module: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        modules = (name[: dot.start()] for dot in _DOT.finditer(name))
        members_by_module[next((module for module in modules if module not in others), name)].append(name)
    globs: list[str] = []
    for module, members in members_by_module.items():
        globs.append(escape(members[0]) if len(members) == 1 else f"{escape(module)}.*")
    return _in_ranges(globs) if len(globs) > MAX_GLOBS else globs


def _in_ranges(globs: Iterable[str]) -> list[str]:
    """Return globs that match the same names, with one for many that differ in a number: ``blocks.3[0-9].*``."""
    rows = [tuple(glob.split(".")) for glob in globs]
    for place in range(max(map(len, rows))):
        numbers_by_rest: defaultdict[tuple[tuple[str, ...], tuple[str, ...] | None], list[str]] = defaultdict(list)
        for parts in rows:
            if place < len(parts) and LAYER_NUMBER.fullmatch(parts[place]):
                numbers_by_rest[parts[:place], parts[place + 1 :]].append(parts[place])
            else:
                numbers_by_rest[parts, None] = []
        rows = []
        for (before, after), numbers in numbers_by_rest.items():
            rows += [before] if after is None else [(*before, digits, *after) for digits in _digit_ranges(numbers)]
    return [".".join(parts) for parts in rows]


def _digit_ranges(numbers: Iterable[str]) -> list[str]:
    """Return patterns of digits that match exactly these numbers, such as ``3[0-9]``."""
    rests: defaultdict[tuple[int, str], list[str]] = defaultdict(list)
    for number in numbers:
        rests[len(number), number[0]].append(number[1:])
    # First digits that the same digits follow are a range where they are consecutive.
    firsts: defaultdict[tuple[int, tuple[str, ...]], list[str]] = defaultdict(list)
    for (length, first), following in rests.items():
        firsts[length, tuple(_digit_ranges(following) if length > 1 else [""])].append(first)
    patterns: list[str] = []
    for (_, tails), digits in firsts.items():
        runs: list[str] = []
        for digit in sorted(digits):
            if runs and int(digit) == int(runs[-1][-1]) + 1:
                runs[-1] += digit
            else:
                runs.append(digit)
        heads = [run if len(run) == 1 else f"[{run[0]}-{run[-1]}]" for run in runs]
        patterns += [head + tail for head in heads for tail in tails]
    return patterns


MAX_GLOBS = 4
"""Patterns of names that a phrase lists, or places."""


def in_short(names: Sequence[str]) -> str:
    """Return the first of these names, with `merged_names`."""
    return listed(merged_names(names), MAX_GLOBS)


def describe_differences(differences: Mapping[str, str], names: Collection[str]) -> list[str]:
    """Return what differs, a phrase for each reason, with names; the first begins with the number of parameters.

    Args:
        differences: the reason, by parameter.
        names: all parameters on both sides.
    """
    names_by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in differences.items():
        names_by_reason[reason].append(name)
    phrases = []
    for reason, members in names_by_reason.items():
        phrases.append(f"{reason}: {listed(in_globs(members, set(names) - {*members}), MAX_GLOBS)}")
    parameters = "1 parameter differs" if len(differences) == 1 else f"{len(differences)} parameters differ"
    return [f"{parameters}: {phrases[0]}", *phrases[1:]]


def advise_on_state(differences: Mapping[str, str], names: Collection[str], call: str) -> str:
    """Return the next step where the state of parameters cannot be loaded, and their weights can.

    Args:
        differences, names: as in `describe_differences`.
        call: what takes ``fresh``, such as ``"muonckpt.load(..., {})"``.
    """
    reasons = {*differences.values()}
    if {NEW, GONE} <= reasons:
        new, gone = ([name for name in differences if differences[name] == reason] for reason in (NEW, GONE))
        return two_lists(new, gone)
    if all(OTHER_CONVENTION in reason for reason in reasons):
        return "Convert it first: m_ema = (1 - momentum) * m_sum"
    arguments = call.format(f"fresh={in_globs(differences, set(names) - differences.keys())!r}")
    if reasons == {NEW}:
        return f"They have no state to lose; to begin it: {arguments}"
    if reasons == {GONE}:
        return (
            f"To keep their state, give their optimizer, and unfreeze them until it is loaded; to lose it: {arguments}"
        )
    keep = "group them as in the saved run"
    if any(reason.endswith(ELSEWHERE) for reason in reasons):
        keep = "use the optimizer of the saved run, after a step if it makes state there"
    return f"To keep their state, {keep}; to discard it: {arguments}"


def two_lists(live_names: Sequence[str], saved_names: Sequence[str]) -> str:
    """Return a sentence with names that one side alone has, where no rule leads from the ones to the others."""
    lists = f"here {listed(live_names, 5)}; there {listed(saved_names, 5)}"
    return f"If parameters were renamed, it cannot be told which is which: {lists}"


STATE_LINE = "weights, state = get_state_dict(model, optimizer)"
STATE_DICT = "{'model': weights, 'optimizer': state}"
SET_LINE = "set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)"
LOAD_LINES = f"{STATE_LINE}, then muonckpt.load({STATE_DICT}, path), then {SET_LINE}"
"""Lines to write, for errors, with the names of torch.distributed.checkpoint.state_dict."""


def match_subtrees(
    live_paths: Collection[tuple[Any, ...]], saved_paths: Collection[tuple[Any, ...]]
) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Find subtrees that differ only by what stands before them: pairs of a prefix here and one in the checkpoint.

    Args:
        live_paths, saved_paths: paths that only the program has, and only the checkpoint.
    """
    unmatched, saved, prefixes = {*live_paths}, {*saved_paths}, []
    saved_by_leaf: defaultdict[Any, list[tuple[Any, ...]]] = defaultdict(list)
    for path in saved_paths:
        saved_by_leaf[path[-1]].append(path)
    while unmatched:
        path = min(unmatched, key=str)
        root = path[0]
        # A path and a saved one with the same end suggest prefixes; the shortest go with the largest subtrees.
        candidates = set[tuple[tuple[Any, ...], tuple[Any, ...]]]()
        for saved_path in saved_by_leaf[path[-1]]:
            common = common_tail(path, saved_path)
            candidates.add((path[: len(path) - common], saved_path[: len(saved_path) - common]))
        for live_prefix, saved_prefix in sorted(candidates, key=lambda pair: (len(pair[0]) + len(pair[1]), str(pair))):
            depth = len(live_prefix)
            subtree = {path for path in unmatched if path[:depth] == live_prefix}
            is_saved = all((*saved_prefix, *path[depth:]) in saved for path in subtree)
            if depth <= 1 and len(saved_prefix) <= 2 and is_saved:
                prefixes.append((live_prefix, saved_prefix))
                unmatched -= subtree
                break
        else:  # nothing under this root was only moved
            unmatched = {path for path in unmatched if path[0] != root}
    return prefixes


def option_difference(option: str, saved: Any, live: Any) -> str:
    """Return why state does not fit: an option of its group differs."""
    if option == ALGORITHM:
        return f"moved from {saved!r} to {live!r}"
    if option == CONVENTION:
        return f"{OTHER_CONVENTION} {saved}, expected {live}"
    return f"{option}={saved!r} in the checkpoint, {live!r} now"


def as_tuples(value: Any) -> Any:
    """Return an option with its lists as tuples, because a format may keep either."""
    return tuple(map(as_tuples, value)) if isinstance(value, list | tuple) else value


def are_close(a: Any, b: Any) -> bool:
    """Return whether two hyper-parameters are equal, but for the rounding of one that was a tensor of float32."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(are_close, a, b))
    # Megatron's groups have None as the bounds of a schedule that they do not follow.
    return a is b if a is None or b is None else math.isclose(a, b, rel_tol=1e-6)


class ParameterState(NamedTuple):
    """A parameter on one side of a resume.

    Attributes:
        slots: its state: tensors, or the keys of tensors.
        options: those of its group; for a saved one at least those on which the meaning of its state depends.
        groups: the numbers of its groups in the saved run, which may differ on ranks.
    """

    slots: Mapping[str, Any]
    options: Mapping[str, Any]
    groups: Sequence[int] = ()


class Continuation(NamedTuple):
    """How the parameters of an optimizer go on.

    Attributes:
        differences: why the state of a parameter cannot be loaded, by name.
        faults: what else does not fit.
        origins: for each group the number of the saved one whose options it takes; None if no saved state fits it.
    """

    report: LoadReport
    differences: Mapping[str, str]
    faults: tuple[str, ...]
    origins: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class ParameterMatcher:
    """The parameters of an optimizer, of a program and of the saved run, by name.

    Attributes:
        groups: the names of the parameters of each live group.
        group_options: returns the options of a saved group that have to be equal in groups which become one.
        slot_fault: returns why a saved slot (second) cannot be loaded as a live one, in words that follow the slot.
        is_zeroed: returns whether a live parameter's slot begins as zeros, so that it can start fresh.
        partial: saved parameters may have more slots than live ones.
    """

    live: Mapping[str, ParameterState]
    saved: Mapping[str, ParameterState]
    groups: Sequence[Sequence[str]]
    group_options: Callable[[int], Mapping[str, Any]]
    slot_fault: Callable[[Any, Any], str | None]
    is_zeroed: Callable[[ParameterState, str], bool]
    partial: bool = False

    def match(self, fresh_globs: Globs, ungrouped_globs: Globs = NO_GLOBS) -> Continuation:
        """Decide how each parameter goes on, and which saved group each of the live groups takes."""
        loaded, fresh, discarded, faults = [], [], [], []
        differences: dict[str, str] = {}
        # Each live parameter starts fresh if the user says so, and is otherwise loaded if it fits.
        for name, parameter in self.live.items():
            reason = self._difference(parameter, self.saved.get(name), ungrouped_globs.match(name))
            if fresh_globs.match(name):
                fresh.append(name)
                discarded += [name] if parameter.slots and not reason else []
                if unknown_slots := [slot for slot in parameter.slots if not self.is_zeroed(parameter, slot)]:
                    faults.append(
                        f"{name!r} cannot start fresh: it is not known how its {', '.join(unknown_slots)} begins, only "
                        f"that tensors {', '.join(sorted(ZERO_SLOTS))} begin as zeros; load it"
                    )
            elif reason:
                differences[name] = reason
            else:
                loaded.append(name)
        # Nothing takes the state of parameters that only the saved run has: users have to say so.
        only_saved = [name for name, parameter in self.saved.items() if name not in self.live and parameter.slots]
        dropped = [name for name in only_saved if fresh_globs.match(name)]
        differences |= {name: GONE for name in only_saved if name not in dropped}
        # Each group goes on as the one where most of its loaded parameters were; the others had to have its options.
        saved_groups, discarded_groups = dict[str, int](), dict[str, int]()
        for members, numbers_by_name in ((loaded, saved_groups), (discarded, discarded_groups)):
            for name in members:
                if numbers := self.saved[name].groups:
                    numbers_by_name[name] = numbers[0]
        origins: list[int | None] = []
        for names in self.groups:
            counts = Counter(saved_groups[name] for name in names if name in saved_groups)
            # State that begins again has lost no rate: without a loaded parameter the discarded ones tell the group.
            counts = counts or Counter(discarded_groups[name] for name in names if name in discarded_groups)
            by_count = sorted(counts, key=lambda number: (-counts[number], number))
            origins.append(by_count[0] if by_count else None)
            for number in by_count[1:]:
                if options := self._option_differences(by_count[0], number):
                    reason = f"{OTHER_OPTIONS} ({options})"
                    differences |= {name: reason for name in names if saved_groups.get(name) == number}
        report = LoadReport(*map(tuple, (loaded, fresh, discarded, dropped)))
        return Continuation(report, differences, tuple(faults), tuple(origins))

    def _difference(self, live: ParameterState, saved: ParameterState | None, may_be_ungrouped: bool) -> str | None:
        """Return why a parameter's saved state cannot be loaded, or None."""
        # Its groups: one, or several with the same options.
        if saved is None or (live.slots and not saved.slots):
            return NEW
        if not saved.groups and not may_be_ungrouped:
            return UNGROUPED
        origin, *numbers = saved.groups or (0,)
        if numbers and any(self._option_differences(origin, number) for number in numbers):
            return "in several parameter groups of the checkpoint, with different options"
        # Its meaning, before its form: state that means something else often has another form as well.
        live_options, saved_options = with_flatten(live.options), with_flatten(saved.options)
        for option in meaning_options(saved.slots):
            if option in live_options and option in saved_options:
                saved_value, live_value = saved_options[option], live_options[option]
                if saved_value != live_value and as_tuples(saved_value) != as_tuples(live_value):
                    return option_difference(option, as_tuples(saved_value), as_tuples(live_value))
        # Its form: the same slots, and each fits.
        if eight_bit_slots := sorted(EIGHT_BIT_SLOTS & saved.slots.keys()):
            return f"with {eight_bit_slots[0]} in the checkpoint: state in 8 bits, which is not read"
        live_slots, saved_slots = live.slots.keys(), saved.slots.keys()
        if live_slots != saved_slots and not (self.partial and live_slots <= saved_slots):
            others = sorted(saved_slots - live_slots - ZERO_SLOTS - {MASTER})
            if others and live_slots <= saved_slots:
                return f"with {listed(others, 2)} in the checkpoint, {ELSEWHERE}"
            expected = ", ".join(sorted(live_slots)) or "nothing"
            return f"with {', '.join(sorted(saved_slots))} in the checkpoint, expected {expected}"
        for slot in live_slots:
            if fault := self.slot_fault(live.slots[slot], saved.slots[slot]):
                return f"{slot} {fault}"
        return None

    def _option_differences(self, origin: int, number: int) -> str:
        """Return in which options a saved group differs from another, with the values of both; empty if in none."""
        expected, options = self.group_options(origin), self.group_options(number)
        keys = [key for key in sorted(expected.keys() | options.keys()) if expected.get(key) != options.get(key)]
        return ", ".join(f"{key}={expected.get(key)!r}, theirs {options.get(key)!r}" for key in keys)


def _rate(value: Any) -> float | None:
    return None if value is None else float(value)


def scheduler_misfit(saved: Sequence[Any], live: Sequence[Any]) -> str | None:
    """Return why the state of a saved run's scheduler does not fit these groups; None if it does, or there was none.

    Args:
        saved: the ``initial_lr`` of each saved group, which a scheduler writes; None where it has none.
        live: the same of each group after the saved state has been loaded; None where it is not known.
    """
    then, now = list(map(_rate, saved)), list(map(_rate, live))
    fits = len(then) == len(now) and all(None in pair or are_close(*pair) for pair in zip(then, now, strict=True))
    # Without an initial rate no scheduler was made.
    if fits or set(then) == {None}:
        return None
    return (
        f"schedulers know groups by their numbers: the saved run has groups with initial_lr {then}, this optimizer "
        f"{now}. Load the optimizer before a scheduler is made, and make a new one for these groups (last_epoch=...) "
        "instead of loading its state"
    )
