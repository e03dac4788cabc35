"""Decides, when a run resumes with other parameters than were saved, what is loaded, starts fresh or is refused.

`ParameterMatcher` does it, for ``checkpoint`` with state in files, for the optimizer with state dicts.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import escape
from itertools import chain
from typing import Any, NamedTuple

from .vocabulary import ALGORITHM, CONVENTION, EIGHT_BIT_SLOTS, FLATTEN, FUSION, FUSION_FREE_SLOTS, PARAMS, ZERO_SLOTS
from .wording import listed, unnumbered

NAMES_OF_GROUPS = frozenset({PARAMS, "param_names", "name"})
"""Keys of a parameter group that are not options: its parameters and its name."""

NEW = "new, without state in the checkpoint"
GONE = "only in the checkpoint"
UNGROUPED = "in no parameter group of the checkpoint, so that nothing says their rates and decay"


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
    """Patterns of names or keys: ``*`` stands for any characters, dots among them."""

    patterns: tuple[str, ...] = ()

    @classmethod
    def of(cls, fresh: Iterable[str]) -> Globs:
        """Read a user's ``fresh=``, the names of parameters that start fresh.

        Raises:
            TypeError: it is not a list of strings; a string is not one either.
        """
        return cls(_patterns("fresh", fresh, "a list of globs"))

    @classmethod
    def of_extra(cls, allow_extra: bool | Iterable[str]) -> Globs:
        """Read a user's ``allow_extra=``, the keys that a checkpoint may have besides those asked for.

        Raises:
            TypeError: it is neither a bool nor a list of strings.
        """
        if isinstance(allow_extra, bool):
            return cls(("*",) if allow_extra else ())
        return cls(_patterns("allow_extra", allow_extra, "True or a list of globs", "lr_scheduler.*"))

    @property
    def matches_all(self) -> bool:
        return "*" in self.patterns

    def match(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the globs that match none of these names."""
        names, unmatched = list(names), []
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                unmatched.append(pattern)
        return unmatched


def _patterns(argument: str, value: Iterable[str], expected: str, example: str = "") -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value)
    if isinstance(value, str) or not all(isinstance(pattern, str) for pattern in patterns):
        example = example or str(patterns[0])
        raise TypeError(f"{argument}={value!r}: expected {expected}, such as {argument}=[{example!r}]")
    return patterns


@dataclass(frozen=True, slots=True)
class LoadTraffic:
    """Bytes of tensors that all ranks together have read and sent in a load.

    Attributes:
        passes: 1: each byte was read once; 2: it was read to be checked, and again later.
    """

    bytes_read: int
    bytes_sent: int
    passes: int

    def __str__(self) -> str:
        times = "once" if self.passes == 1 else "twice, as not all of it could be kept until it was checked"
        return f"{self.bytes_read:,} bytes read, each {times}; {self.bytes_sent:,} bytes sent between ranks"


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
        traffic: the bytes that were read and sent; None if nothing was read.
    """

    loaded: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    discarded: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    own_options: tuple[str, ...] = ()
    traffic: LoadTraffic | None = field(default=None, compare=False, kw_only=True)

    def __str__(self) -> str:
        rows = {
            "state starts fresh": self.fresh,
            "of these, would have fitted": self.discarded,
            "dropped, only in the checkpoint": self.dropped,
            "weights kept, not in the checkpoint": self.kept,
        }
        # Only lists with something in them; globs may not match parameters of other lists.
        parameters = {*self.loaded, *self.fresh}
        lines = [f"state loaded: {len(self.loaded)}"]
        for title, names in rows.items():
            if names:
                lines.append(f"{title}: {len(names)} ({', '.join(in_globs(names, parameters - {*names}))})")
        if self.own_options:
            lines.append(f"options of the running optimizer, not in the checkpoint: {'; '.join(self.own_options)}")
        return "\n".join(lines)


def in_globs(names: Collection[str], other_names: Iterable[str]) -> list[str]:
    """Return names as globs for ``fresh=``: one for names that differ only in numbers, unless it matches others too."""
    other_names = list(other_names)
    members_by_glob: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        members_by_glob[unnumbered(escape(name))].append(name)
    globs: list[str] = []
    # A glob that would match another name is spelled out.
    for glob, members in members_by_glob.items():
        is_common = len(members) > 1 and not any(fnmatchcase(name, glob) for name in other_names)
        globs += [glob] if is_common else map(escape, members)
    return globs


MAX_GLOBS = 4
"""Patterns of names that a phrase lists, or places."""


def in_short(names: Sequence[str]) -> str:
    """Return names as globs, the first of them, and how many names there are where globs stand for several."""
    globs = in_globs(names, ())
    return f"{listed(globs, MAX_GLOBS)}{f' ({len(names)})' if len(names) > len(globs) else ''}"


NO_CAST = "nothing is cast silently"
CAST_ADVICE = (
    "Write model.to(...) of the dtype of the checkpoint, load, and cast the model then: its state follows, and nothing "
    "is lost"
)
"""How weights and state of another dtype are loaded."""

KEEP_ADVICE = "Their state is kept where names, groups and rules are those of the saved run"


def describe_differences(differences: Mapping[str, str], names: Collection[str]) -> str:
    """Return a message that lists what differs, by reason and name; arguments as `explain_differences`."""
    parts = []
    for reason, members in _by_reason(differences).items():
        parts.append(f"{reason}: {', '.join(in_globs(members, set(names) - {*members}))}")
    parameters = "1 parameter differs" if len(differences) == 1 else f"{len(differences)} parameters differ"
    return f"{parameters}: {'; '.join(parts)}"


def _by_reason(differences: Mapping[str, str]) -> defaultdict[str, list[str]]:
    names_by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in differences.items():
        names_by_reason[reason].append(name)
    return names_by_reason


def explain_differences(
    differences: Mapping[str, str],
    names: Collection[str],
    cure: str,
    keep_advice: str = KEEP_ADVICE,
    cast_advice: str = CAST_ADVICE,
) -> str:
    """Return a message that lists what differs, by reason and name, and says what to do.

    Args:
        differences: the reason, by parameter.
        names: all parameters on both sides.
        cure: where ``fresh`` is given, such as ``"muonckpt.load(..., {})"``.
        keep_advice: how parameters keep their state.
        cast_advice: how state of another dtype is loaded.
    """
    names_by_reason = _by_reason(differences)
    wrappers = describe_wrappers(names_by_reason[NEW], names_by_reason[GONE])
    message = describe_differences(differences, names) + (f". {wrappers}" if wrappers else "")
    # State that only has another dtype is kept by a cast: nothing has to start fresh.
    if all(NO_CAST in reason for reason in differences.values()):
        return f"{message}. {cast_advice}"
    if keep_advice == KEEP_ADVICE and {*differences.values()} == {NEW} and not wrappers:
        keep_advice = "It has none to lose"
    # Parameters whose algorithm has changed keep their state by a rule that restores it.
    for family, kind in (("adamw", "other"), ("muon", "matrix")):
        reason = option_difference(ALGORITHM, family, "muon" if family == "adamw" else "adamw")
        if members := names_by_reason.get(reason):
            rule = f"Rule({kind!r}, {tuple(in_globs(members, set(names) - {*members}))!r})"
            keep_advice += f", as by rules=[[{rule}], RULES] where RULES are those given now"
    if names_by_reason[NEW] and names_by_reason[GONE] and not wrappers:
        keep_advice += (
            "; if they were only renamed, muonckpt convert OLD NEW --to-format dcp --rules FILE gives them their new "
            "names, with [[rule]] from = 'old.{a*}', to = 'new.{a*}' for each"
        )
    globs = in_globs(differences, set(names) - differences.keys())
    return f"{message}. {keep_advice}. To go on without their state: {cure.format(f'fresh={globs!r}')}"


STATE_LINE = "weights, state = get_state_dict(model, optimizer)"
STATE_DICT = "{'model': weights, 'optimizer': state}"
SET_LINE = "set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)"
LOAD_LINES = f"{STATE_LINE}, then muonckpt.load({STATE_DICT}, path), then {SET_LINE}"
"""Lines to write, for errors, with the names of torch.distributed.checkpoint.state_dict."""

IN_A_TRAINER = " (in a trainer, to muon(...), MuonckptStrategy(...) or MuonckptManager.Config(...))"
"""Where ``fresh`` is given to what loads without being asked by the user."""


def describe_wrappers(live_names: Collection[str], saved_names: Collection[str]) -> str | None:
    """Describe what wrappers have put into the names of one side, with the cure; None if that is not why they differ.

    Args:
        live_names, saved_names: names that only the program has, and only the checkpoint.
    """
    for longer, shorter, side in ((saved_names, live_names, "checkpoint"), (live_names, saved_names, "program")):
        if insertion := _find_insertion({*longer}, {*shorter}):
            # The rule that renames the saved names, for a conversion.
            prefix, part = insertion
            long, short = (f"{prefix}{{p*}}", "{p*}") if prefix else (f"{{a*}}.{part}.{{b*}}", "{a*}.{b*}")
            difference = f"begin with {prefix!r}" if prefix else f"contain {f'{part}.'!r}"
            old, new = (long, short) if longer is saved_names else (short, long)
            rule = f"muonckpt convert OLD NEW --to-format dcp --rules FILE, with [[rule]] from = {old!r}, to = {new!r}"
            # Torch's functions leave a wrapper out of the program's names; in a checkpoint only a rule does.
            unwrapped = "get_state_dict, and the names of the model without its wrapper, do not have it"
            cure = f"{unwrapped}; or {rule}" if prefix else unwrapped
            return f"names in the {side} {difference}, the others do not: {rule if side == 'checkpoint' else cure}"
    return None


def _find_insertion(longer: set[str], shorter: set[str]) -> tuple[str, str] | None:
    """Return the prefix, or else the part inside, without which the longer names are all of the shorter ones."""
    example = min(shorter, default=None)
    if example is None:
        return None
    # A prefix before all names, as DDP's.
    for prefix in sorted(name.removesuffix(example) for name in longer if name.endswith(f".{example}")):
        if all(f"{prefix}{name}" in longer for name in shorter):
            return prefix, ""
    # A part inside names, as a compiler's or a checkpoint wrapper's.
    parts = {*chain.from_iterable(name.split(".") for name in longer)}
    for part in sorted(parts.difference(*(name.split(".") for name in shorter))):
        if {".".join(filter(part.__ne__, name.split("."))) for name in longer} >= shorter:
            return "", part
    return None


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
        candidates = {_prefixes(path, saved_path) for saved_path in saved_by_leaf[path[-1]]}
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


def _prefixes(live_path: tuple[Any, ...], saved_path: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what stands in two paths before their longest common end."""
    common = 0
    while common < min(len(live_path), len(saved_path)) and live_path[-1 - common] == saved_path[-1 - common]:
        common += 1
    return live_path[: len(live_path) - common], saved_path[: len(saved_path) - common]


def option_difference(option: str, saved: Any, live: Any) -> str:
    """Return why state does not fit: an option of its group differs."""
    if option == ALGORITHM:
        return f"moved from {saved!r} to {live!r}"
    if option == CONVENTION:
        return f"of momentum convention {saved}, expected {live} (convert it first: m_ema = (1 - momentum) * m_sum)"
    return f"{option}={saved!r} in the checkpoint, {live!r} now"


def as_tuples(value: Any) -> Any:
    """Return an option with its lists as tuples, because a format may keep either."""
    return tuple(map(as_tuples, value)) if isinstance(value, list | tuple) else value


def same_value(a: Any, b: Any) -> bool:
    """Return whether two hyper-parameters are equal, but for the rounding of one that was a tensor of float32."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same_value, a, b))
    # Megatron's groups have None as the bounds of a schedule that they do not follow.
    return a is b if a is None or b is None else math.isclose(a, b, rel_tol=1e-6)


class ParameterState(NamedTuple):
    """A parameter on one side of a resume.

    Attributes:
        slots: its state: tensors, or the keys of tensors.
        options: those of its group; for a saved one at least those on which the meaning of its state depends.
        groups: the numbers of its groups in the saved run, which may differ on ranks; None if options are by parameter.
    """

    slots: Mapping[str, Any]
    options: Mapping[str, Any]
    groups: Sequence[int] | None = None


class Continuation(NamedTuple):
    """How the parameters of an optimizer go on.

    Attributes:
        differences: why the state of a parameter cannot be loaded, by name.
        faults: what else does not fit.
        origins: for each group the number of the saved one whose options it takes; None if all of it starts fresh.
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

    def match(self, fresh_globs: Globs) -> Continuation:
        """Decide how each parameter goes on, and which saved group each of the live groups takes."""
        loaded, fresh, discarded, faults = [], [], [], []
        differences: dict[str, str] = {}
        # Each live parameter starts fresh if the user says so, and is otherwise loaded if it fits.
        for name, parameter in self.live.items():
            reason = self._difference(parameter, self.saved.get(name))
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
        saved_groups = {}
        for name in loaded:
            if numbers := self.saved[name].groups:
                saved_groups[name] = numbers[0]
        origins: list[int | None] = []
        for names in self.groups:
            counts = Counter(saved_groups[name] for name in names if name in saved_groups)
            by_count = sorted(counts, key=lambda number: (-counts[number], number))
            origins.append(by_count[0] if by_count else None)
            for number in by_count[1:]:
                if options := self._option_differences(by_count[0], number):
                    reason = f"from a group with other options than the rest of theirs ({options})"
                    differences |= {name: reason for name in names if saved_groups.get(name) == number}
        report = LoadReport(*map(tuple, (loaded, fresh, discarded, dropped)))
        return Continuation(report, differences, tuple(faults), tuple(origins))

    def _difference(self, live: ParameterState, saved: ParameterState | None) -> str | None:
        """Return why a parameter's saved state cannot be loaded, or None."""
        # Its groups: one, or several with the same options.
        if saved is None or (live.slots and not saved.slots):
            return NEW
        if saved.groups is not None and not saved.groups:
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
        # Its form: the same slots, each of which fits.
        if eight_bit_slots := sorted(EIGHT_BIT_SLOTS & saved.slots.keys()):
            return f"with {eight_bit_slots[0]} in the checkpoint: state in 8 bits, which is not read"
        live_slots, saved_slots = live.slots.keys(), saved.slots.keys()
        if live_slots != saved_slots and not (self.partial and live_slots <= saved_slots):
            expected = ", ".join(sorted(live_slots)) or "nothing"
            return f"with {', '.join(sorted(saved_slots))} in the checkpoint, expected {expected}"
        for slot in live_slots:
            if fault := self.slot_fault(live.slots[slot], saved.slots[slot]):
                return f"whose {slot} {fault}"
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
    fits = len(then) == len(now) and all(None in pair or same_value(*pair) for pair in zip(then, now, strict=True))
    # Without an initial rate no scheduler was made.
    if fits or set(then) == {None}:
        return None
    return (
        f"schedulers know groups by their numbers: the saved run has groups with initial_lr {then}, this optimizer "
        f"{now}, so that the scheduler of the saved run would give groups rates of others, or fail. Build the groups "
        "of the saved run, by the same rules and kinds=; or load the optimizer before a scheduler is made, and then "
        "make a new one for these groups (last_epoch=...) instead of loading its state"
    )
