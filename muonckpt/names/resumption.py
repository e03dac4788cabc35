"""Resuming with other parameters than were saved: what starts fresh, what groups take over, what is refused.

`ParameterMatcher` decides it, for ``checkpoint`` of what lies in files, for the optimizer of state dicts.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from typing import Any, NamedTuple

from .vocabulary import ALGORITHM, CONVENTION, FUSION, PARAMS, ZERO_SLOTS, depends_on_fusion
from .wording import unnumbered

NAMES_OF_GROUPS = frozenset({PARAMS, "param_names", "name"})
"""Keys of a parameter group that say what it consists of and how it is called; the rest are its options."""

NEW = "new, without state in the checkpoint"
GONE = "only in the checkpoint"
UNGROUPED = "in no parameter group of the checkpoint, so that nothing says their rates and decay"


def meaning_options(slots: Collection[str]) -> tuple[str, ...]:
    """Return the options of a parameter group on which the meaning of state in these slots depends."""
    return (ALGORITHM, CONVENTION, *(FUSION if any(map(depends_on_fusion, slots)) else ()))


@dataclass(frozen=True, slots=True)
class Globs:
    """Patterns of the names of parameters that start fresh: ``*`` stands for any characters, dots among them."""

    patterns: tuple[str, ...] = ()

    @classmethod
    def of(cls, patterns: Iterable[str]) -> Globs:
        """Read a user's ``fresh=``.

        Raises:
            TypeError: it is not a list of strings; a string is not one either.
        """
        given = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in given):
            raise TypeError(f"fresh={patterns!r}: expected a list of globs, such as fresh=[{str(given[0])!r}]")
        return cls(given)

    def match(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the globs that match none of these names."""
        names = list(names)
        return [pattern for pattern in self.patterns if not any(fnmatchcase(name, pattern) for name in names)]


@dataclass(frozen=True, slots=True)
class Extra(Globs):
    """Patterns of the keys that a checkpoint may have besides those that are asked for."""

    @classmethod
    def of(cls, patterns: bool | Iterable[str]) -> Extra:
        """Read a user's ``allow_extra=``: everything, nothing, or globs.

        Raises:
            TypeError: it is neither a bool nor a list of strings.
        """
        if isinstance(patterns, bool):
            return cls(("*",) if patterns else ())
        given = () if isinstance(patterns, str) else tuple(patterns)
        if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in given):
            raise TypeError(
                f"allow_extra={patterns!r}: expected True or a list of globs, such as allow_extra=['lr_scheduler.*']"
            )
        return cls(given)

    @property
    def matches_all(self) -> bool:
        return "*" in self.patterns


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load, on all ranks together.

    Attributes:
        loaded: names of parameters whose state was loaded.
        fresh: names of parameters whose state starts fresh: zeros, no steps counted.
        discarded: the fresh ones whose state in the checkpoint would have fitted.
        dropped: parameters and weights that only the checkpoint has; nothing takes them.
        kept: keys of weights that the checkpoint lacks; they keep the values that they had.
        own_options: options that the checkpoint lacks and that stay as the running optimizer has them, as text.
    """

    loaded: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    discarded: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    own_options: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = {
            "state starts fresh": self.fresh,
            "of these, would have fitted": self.discarded,
            "dropped, only in the checkpoint": self.dropped,
            "weights kept, not in the checkpoint": self.kept,
        }
        others = {*self.loaded, *self.fresh}
        lines = [f"state loaded: {len(self.loaded)}"]
        for what, names in rows.items():
            if names:
                lines.append(f"{what}: {len(names)} ({', '.join(in_globs(names, others - {*names}))})")
        if self.own_options:
            lines.append(f"options of the running optimizer, not in the checkpoint: {'; '.join(self.own_options)}")
        return "\n".join(lines)


def in_globs(names: Collection[str], others: Iterable[str]) -> list[str]:
    """Return names as globs for ``fresh=``: one for names that differ only in numbers, unless it matches others too."""
    others = list(others)
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[unnumbered(escape(name))].append(name)
    globs: list[str] = []
    for glob, members in alike.items():
        one = len(members) > 1 and not any(fnmatchcase(other, glob) for other in others)
        globs += [glob] if one else map(escape, members)
    return globs


UNCAST = "nothing is cast silently"
CAST = (
    "Write model.to(...) of the dtype of the checkpoint, load, and cast the model then: its state follows, and nothing "
    "is lost"
)
"""How weights and state of another dtype are loaded."""

KEPT = "Their state is kept where names, groups and rules are those of the saved run"


def describe_differences(differences: Mapping[str, str], names: Collection[str]) -> str:
    """Return a message that lists what differs, by reason and name; arguments as `explain_differences`."""
    parts = [
        f"{reason}: {', '.join(in_globs(members, set(names) - {*members}))}"
        for reason, members in _by_reason(differences).items()
    ]
    parameters = "1 parameter differs" if len(differences) == 1 else f"{len(differences)} parameters differ"
    return f"{parameters}: {'; '.join(parts)}"


def _by_reason(differences: Mapping[str, str]) -> defaultdict[str, list[str]]:
    of_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in differences.items():
        of_reason[reason].append(name)
    return of_reason


def explain_differences(
    differences: Mapping[str, str], names: Collection[str], cure: str, kept: str = KEPT, cast: str = CAST
) -> str:
    """Return a message that lists what differs, by reason and name, and says what to do.

    Args:
        differences: the reason, by parameter.
        names: all parameters on both sides.
        cure: where ``fresh`` is given, such as ``"muonckpt.load(..., {})"``.
        kept: how parameters keep their state.
        cast: how state of another dtype is loaded.
    """
    of_reason = _by_reason(differences)
    globs = in_globs(differences, set(names) - differences.keys())
    wrapped = describe_wrappers(of_reason[NEW], of_reason[GONE])
    told = f"{describe_differences(differences, names)}{f'. {wrapped}' if wrapped else ''}"
    if all(UNCAST in reason for reason in differences.values()):  # something else keeps all of it
        return f"{told}. {cast}"
    if kept == KEPT and {*differences.values()} == {NEW} and not wrapped:
        kept = "It has none to lose"
    for family, kind in (("adamw", "other"), ("muon", "matrix")):
        if members := of_reason.get(option_difference("algorithm", family, "muon" if family == "adamw" else "adamw")):
            rule = f"Rule({kind!r}, {tuple(in_globs(members, set(names) - {*members}))!r})"
            kept += f", as by rules=[[{rule}], RULES] where RULES are those given now"
    return f"{told}. {kept}. To go on without their state: {cure.format(f'fresh={globs!r}')}"


STATE_LINE = "weights, state = get_state_dict(model, optimizer)"
STATE_DICT = "{'model': weights, 'optimizer': state}"
SET_LINE = "set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)"
LOAD_LINES = f"{STATE_LINE}, then muonckpt.load({STATE_DICT}, path), then {SET_LINE}"
"""Lines to write, for errors, with the names of torch.distributed.checkpoint.state_dict."""

IN_A_TRAINER = " (in a trainer, to muon(...), MuonckptStrategy(...) or MuonckptManager.Config(...))"
"""Where ``fresh`` is given to what loads without being asked by the user."""


def describe_wrappers(mine: Collection[str], theirs: Collection[str]) -> str | None:
    """Return what wrappers have put into the names of one side, and the cure; None if that is not why they differ.

    Args:
        mine: names that only the program has.
        theirs: names that only the checkpoint has.
    """
    for longer, shorter, where in ((theirs, mine, "checkpoint"), (mine, theirs, "program")):
        if inserted := _inserted({*longer}, {*shorter}):
            prefix, word = inserted
            long, short = (f"{prefix}{{p*}}", "{p*}") if prefix else (f"{{a*}}.{word}.{{b*}}", "{a*}.{b*}")
            what = f"begin with {prefix!r}" if prefix else f"contain {f'{word}.'!r}"
            old, new = (long, short) if longer is theirs else (short, long)
            rule = f"muonckpt convert OLD NEW --to-format dcp --rules FILE, with [[rule]] from = {old!r}, to = {new!r}"
            unwrapped = "get_state_dict, and the names of the model without its wrapper, do not have it"
            cure = f"{unwrapped}; or {rule}" if prefix else unwrapped
            return f"names in the {where} {what}, the others do not: {rule if longer is theirs else cure}"
    return None


def match_subtrees(
    mine: Collection[tuple[Any, ...]], theirs: Collection[tuple[Any, ...]]
) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Return the places, here and there, of parts that are the same but for what stands before them.

    Args:
        mine: paths that only the program has.
        theirs: paths that only the checkpoint has.
    """
    left, known, places = {*mine}, {*theirs}, []
    ending: defaultdict[Any, list[tuple[Any, ...]]] = defaultdict(list)
    for path in theirs:
        ending[path[-1]].append(path)

    def before(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[int, int]:
        alike = 0
        while alike < min(len(one), len(other)) and one[-1 - alike] == other[-1 - alike]:
            alike += 1
        return len(one) - alike, len(other) - alike

    while left:
        first = min(left, key=str)
        cuts = {(first[:here], other[:there]) for other in ending[first[-1]] for here, there in [before(first, other)]}
        for here, there in sorted(cuts, key=lambda cut: (len(cut[0]) + len(cut[1]), str(cut))):
            part = {path for path in left if path[: len(here)] == here}
            if len(here) <= 1 and len(there) <= 2 and all((*there, *path[len(here) :]) in known for path in part):
                places.append((here, there))
                left -= part
                break
        else:
            left = {path for path in left if path[0] != first[0]}
    return places


def _inserted(longer: set[str], shorter: set[str]) -> tuple[str, str] | None:
    """Return the prefix, or else the part inside, without which the longer names are all of the shorter ones."""
    first = min(shorter, default=None)
    if first is None:
        return None
    for prefix in sorted(name.removesuffix(first) for name in longer if name.endswith(f".{first}")):
        if all(f"{prefix}{name}" in longer for name in shorter):
            return prefix, ""
    parts = [{part for name in names for part in name.split(".")} for names in (longer, shorter)]
    for word in sorted(parts[0] - parts[1]):
        if {".".join(part for part in name.split(".") if part != word) for name in longer} >= shorter:
            return "", word
    return None


def option_difference(option: str, then: Any, now: Any) -> str:
    """Return why state does not fit: an option of its group differs."""
    if option == ALGORITHM:
        return f"moved from {then!r} to {now!r}"
    if option == CONVENTION:
        return f"of momentum convention {then}, expected {now} (convert it first: m_ema = (1 - momentum) * m_sum)"
    return f"{option}={then!r} in the checkpoint, {now!r} now"


def as_tuples(value: Any) -> Any:
    """Return an option with its lists as tuples, because a format may keep either."""
    return tuple(map(as_tuples, value)) if isinstance(value, list | tuple) else value


def same_value(one: Any, other: Any) -> bool:
    """Return whether two hyper-parameters are equal, but for the rounding of one that was a tensor of float32."""
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same_value, one, other))
    return math.isclose(one, other, rel_tol=1e-6)


class ParameterState(NamedTuple):
    """A parameter on one side of a resume.

    Attributes:
        slots: its state: tensors, or the keys of tensors.
        options: those of its group; of the saved one, at least those on which the meaning of its state depends.
        groups: the numbers of its groups in the saved run; of several, if ranks that had it had it together with other
            parameters.  None where options are kept by parameter.
    """

    slots: Mapping[str, Any]
    options: Mapping[str, Any]
    groups: Sequence[int] | None = None


class Continuation(NamedTuple):
    """How the parameters of an optimizer go on.

    Attributes:
        differences: why the state of a parameter cannot be loaded, by name.
        faults: what else does not fit.
        origins: for each parameter group the number of the saved one whose options it takes; None if it keeps its own,
            because all of it starts fresh.
    """

    report: LoadReport
    differences: Mapping[str, str]
    faults: tuple[str, ...]
    origins: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class ParameterMatcher:
    """The parameters of an optimizer, of a program and of the saved run, by name.

    Attributes:
        groups: the names of the parameters of each live group; empty where options are kept by parameter.
        group_options: returns the options of a saved group in which others may not differ that become one with it.
        slot_fault: returns why the second cannot be loaded as the first of a slot, in words that follow the slot.
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

    def match(self, globs: Globs) -> Continuation:
        """Decide how each parameter goes on, and which saved group each of the live groups takes.

        Args:
            globs: names of the parameters that start fresh.
        """
        loaded, fresh, discarded, faults = [], [], [], []
        differences: dict[str, str] = {}
        for name, parameter in self.live.items():
            reason = self._difference(parameter, self.saved.get(name))
            if globs.match(name):
                fresh.append(name)
                discarded += [name] if parameter.slots and not reason else []
                if begun := [slot for slot in parameter.slots if not self.is_zeroed(parameter, slot)]:
                    faults.append(
                        f"{name!r} cannot start fresh: it is not known how its {', '.join(begun)} begins, only that "
                        f"tensors {', '.join(sorted(ZERO_SLOTS))} begin as zeros; load it"
                    )
            elif reason:
                differences[name] = reason
            else:
                loaded.append(name)
        # Nothing takes the state of parameters that only the saved run has: users have to say so.
        only_saved = [name for name, parameter in self.saved.items() if name not in self.live and parameter.slots]
        dropped = [name for name in only_saved if globs.match(name)]
        differences |= {name: GONE for name in only_saved if name not in dropped}
        # Each group goes on as the one where most of its loaded parameters were; the others had to have its options.
        homes = {name: groups[0] for name in loaded if (groups := self.saved[name].groups)}
        origins: list[int | None] = []
        for names in self.groups:
            counts = Counter(homes[name] for name in names if name in homes)
            numbers = sorted(counts, key=lambda number: (-counts[number], number))
            origins.append(next(iter(numbers), None))
            for other in numbers[1:]:
                if options := self._differing_options(numbers[0], other):
                    reason = f"from a group with other options than the rest of theirs ({options})"
                    differences |= {name: reason for name in names if homes.get(name) == other}
        report = LoadReport(*map(tuple, (loaded, fresh, discarded, dropped)))
        return Continuation(report, differences, tuple(faults), tuple(origins))

    def _difference(self, live: ParameterState, saved: ParameterState | None) -> str | None:
        """Return why a parameter's saved state cannot be loaded, or None."""
        if saved is None or (live.slots and not saved.slots):
            return NEW
        if saved.groups is not None and not saved.groups:
            return UNGROUPED
        first, *others = saved.groups or (0,)
        if any(self._differing_options(first, number) for number in others):
            return "in several parameter groups of the checkpoint, with different options"
        # State that means something else often has another form as well, and the meaning is why.
        for option in meaning_options(saved.slots):
            if option in live.options and option in saved.options:
                then, now = as_tuples(saved.options[option]), as_tuples(live.options[option])
                if then != now:
                    return option_difference(option, then, now)
        here, there = live.slots.keys(), saved.slots.keys()
        if here != there and not (self.partial and here <= there):
            return f"with {', '.join(sorted(there))} in the checkpoint, expected {', '.join(sorted(here)) or 'nothing'}"
        faults = ((slot, self.slot_fault(live.slots[slot], saved.slots[slot])) for slot in here)
        return next((f"whose {slot} {fault}" for slot, fault in faults if fault), None)

    def _differing_options(self, origin: int, other: int) -> str:
        """Return in which options a saved group differs from another, with the values of both; empty if in none."""
        common, others = self.group_options(origin), self.group_options(other)
        keys = [key for key in sorted(common.keys() | others.keys()) if common.get(key) != others.get(key)]
        return ", ".join(f"{key}={common.get(key)!r}, theirs {others.get(key)!r}" for key in keys)


def scheduler_misfit(saved: Sequence[Any], now: Sequence[Any]) -> str | None:
    """Return why the state of a saved run's scheduler does not fit these groups; None if it does, or there was none.

    Args:
        saved: the ``initial_lr`` of each saved group, which a scheduler writes; None where it has none.
        now: the same of each group after the saved state has been loaded; None where it is not known.
    """
    then, here = ([None if rate is None else float(rate) for rate in rates] for rates in (saved, now))
    alike = len(then) == len(here) and all(None in pair or same_value(*pair) for pair in zip(then, here, strict=True))
    if alike or set(then) == {None}:
        return None
    return (
        f"schedulers know groups by their numbers: the saved run has groups with initial_lr {then}, this optimizer "
        f"{here}, so that the scheduler of the saved run would give groups rates of others, or fail. Build the groups "
        "of the saved run, by the same rules and kinds=; or load the optimizer before a scheduler is made, and then "
        "make a new one for these groups (last_epoch=...) instead of loading its state"
    )
