"""The error where a state dict and a checkpoint do not fit each other: the facts, and one next step.

Every step keeps all that can be kept.  A test follows each of them to the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ..names.errors import SourceError
from ..names.keys import OptimizerKey
from ..names.renaming import Rule, as_toml, find_rules
from ..names.resumption import (
    UNGROUPED,
    Choices,
    advise_on_state,
    describe_differences,
    in_globs,
    in_modules,
    two_lists,
)
from ..names.vocabulary import has_our_options
from ..names.wording import command, counted, enumerated, fitted, listed
from ..programs.detection import detect, with_slots
from ..programs.quantised import describe_quantised, scales_of_quantised
from ..record.record import StateRecord
from ..store.open_checkpoint import OpenCheckpoint
from ..store.verify.step_names import StepName, new_attempt
from .bits import dtype_name
from .live_state import LiveState
from .stored import Matching, Stored
from .training import MODEL, OPTIMIZER, SCHEDULER

_MAX_KEYS = 2
"""Keys of one kind that the error lists."""

MOST_GLOBS = 12
"""Patterns of keys that the error lists to be pasted."""

TABLE = ", with FILE:\n"
"""Stands between a command and the lines of the file that it needs."""

LOAD, RESTORE, RESUME = "muonckpt.load", "Series.restore", "Series.resume"
"""The calls that take all of `Choices`; trainers take ``fresh`` alone."""

REDISTRIBUTE = "muonckpt.redistribute"
"""A call that takes ``fresh`` and ``allow_extra``."""

_WIDER = {
    "float64": {"float32", "float16", "bfloat16"},
    "float32": {"float16", "bfloat16"},
}
"""The dtypes all of whose values a dtype has."""


_Forms = Mapping[str, Hashable]
"""Shapes and dtypes of the weight and the state, by parameter."""


@dataclass(frozen=True)
class Refusal:
    """A state dict that does not fit, and what it was to be filled from.

    Attributes:
        matching: of all ranks.
        choices: what the user has said of it.
        live: this rank's state dict.
        checkpoint: None if the source is in memory.
        call: what the user has called.
    """

    matching: Matching
    choices: Choices
    stored: Stored
    live: LiveState
    checkpoint: OpenCheckpoint | None
    call: str

    def __str__(self) -> str:
        receiver = "the objects of the run" if self.call == RESUME else "the state dict"
        target = "the target" if self.checkpoint is None else receiver
        step = self._translation()
        if step and self.call == RESUME:
            return (
                f"{self._source} was saved with another optimizer. Begin a run in another folder, with its weights and "
                f"the state of each parameter whose method stays: resume(begin_from={self._source!r})"
            )
        step = step or self._dequantisation()
        renaming = "" if step else self._renaming()
        step = step or renaming or self._cure()
        subject = f"{self._source} does not fit {target}"
        facts = fitted(self._phrases(bool(renaming)), "; ", subject, step.partition(TABLE)[0])
        return ". ".join(filter(None, (f"{subject}: {facts}", step)))

    @property
    def _source(self) -> str:
        return "the source" if self.checkpoint is None else str(self.checkpoint.path)

    def _phrases(self, is_renamed: bool) -> Iterator[str]:
        """Yield what does not fit; where both sides have names of their own, these as a whole."""
        matching = self.matching
        here, there, _ = self._names if matching.missing_keys else ({}, {}, {})
        has_others = bool(here and there)
        yield from matching.faults
        if has_others:
            names = repr(min(here)) if len(here) == 1 else f"{len(here)} parameters such as {min(here)!r}"
            yield f"it has no {names}{', and the same shapes under other names' if is_renamed else ''}"
        elif matching.missing_keys:
            keys = in_modules(matching.missing_keys, self.stored.entries)
            yield f"missing key {listed(map(repr, keys), _MAX_KEYS)}"
        if matching.extra_keys and not has_others:
            keys = in_modules(matching.extra_keys, matching.sources)
            yield f"extra key {listed(map(repr, keys), _MAX_KEYS)}"
        if matching.misfits:
            yield listed((f"{key!r} {fault}" for key, fault in matching.misfits.items()), _MAX_KEYS, "; ")
        # Where a weight is missing, its state is too.
        differences = {
            name: reason for name, reason in matching.differences.items() if name not in here and name not in there
        }
        if differences:
            yield from describe_differences(differences, matching.names)

    def _cure(self) -> str:
        """Return the next step where names are those of the checkpoint; empty if the phrases contain it."""
        matching, call = self.matching, self.call
        # 1. Missing keys.
        if line := self._changed_objects():
            return line
        if matching.missing_keys:
            return self._advice_on_missing()
        # 2. Dtypes and shapes.
        if step := self._cast():
            return step
        if matching.growable and call in (LOAD, RESTORE, RESUME):
            globs = in_globs(sorted(matching.growable), matching.names - matching.growable)
            return f"If the new rows are meant: {call}(..., grow={globs!r})"
        if matching.misfits or matching.faults:
            return self._saved_shape()
        # 3. State of parameters whose weights fit.
        ungrouped = [name for name, reason in matching.differences.items() if reason == UNGROUPED]
        if ungrouped and call in (LOAD, RESTORE, RESUME):
            globs = in_globs(ungrouped, matching.names - {*ungrouped})
            return f"To load it with the options of their groups here: {call}(..., ungrouped={globs!r})"
        _, there, _ = self._names
        if there and {*matching.differences} == {*there}:
            globs = in_globs(sorted(there), matching.names - there.keys())
            return f"To load it, build the model of the saved run; to go on without: {call}(..., fresh={globs!r})"
        if matching.differences:
            return advise_on_state(matching.differences, matching.names, f"{call}(..., {{}})")
        # 4. Keys that only the checkpoint has.
        if call not in (LOAD, RESTORE, RESUME, REDISTRIBUTE):
            return ""
        extra = in_modules(matching.extra_keys, matching.sources)
        line = "To load it, give it in the state dict"
        if call == RESUME:
            line = self._absent_objects() or "To load it, give it to Series"
        return f"{line}; to leave it there: {call}(..., allow_extra={extra if len(extra) <= MOST_GLOBS else True!r})"

    def _changed_objects(self) -> str:
        """Return how other objects of a run get state that had other keys when it was saved; empty if none had."""
        differing_roots = {key.partition(".")[0] for key in (*self.matching.missing_keys, *self.matching.extra_keys)}
        saved_roots = {str(entry.path[0]) for entry in self.stored.entries.values()}
        roots = {str(root) for root in self.live.nested} & saved_roots & differing_roots
        roots -= {MODEL, OPTIMIZER, SCHEDULER}
        if self.call != RESUME or not roots:
            return ""
        return (
            f"The state of {listed(map(repr, sorted(roots)))} had other keys when it was saved. Before resume, give it "
            f"those, as muonckpt.open({self._source!r}).items has them"
        )

    def _absent_objects(self) -> str:
        """Return how a series gets the objects that only the checkpoint has the state of; empty if there are none."""
        roots = {str(self.stored.entries[key].path[0]) for key in self.matching.extra_keys}
        roots -= {str(path[0]) for path in self.live.paths.values()}
        others = sorted(filter(str.isidentifier, roots - {SCHEDULER}))
        names, arguments = [*map(repr, others)], []
        if SCHEDULER in roots:
            names.append("a scheduler")
            arguments.append("scheduler=scheduler")
        if others:
            arguments.append(f"extra={{{', '.join(f'{name!r}: {name}' for name in others)}}}")
        line = f"and this Series has none. Write Series(..., {', '.join(arguments)})"
        return f"The checkpoint has the state of {enumerated(names)}, {line}" if names else ""

    # Names and programs: each name by itself would be missing or extra.

    def _translation(self) -> str:
        """Return how state of another optimizer becomes that of the one here; empty where that is not what it needs."""
        prefixes = tuple(prefix for each in self.live.optimizers for prefix in (each.state, each.options))
        is_extra = any(key.startswith(prefixes) for key in self.matching.extra_keys)
        if self.checkpoint is None or not (self.matching.differences or self.matching.missing_keys or is_extra):
            return ""
        place, manifest = self.checkpoint.path, self.checkpoint.outline
        if not has_our_options(self.live.flat):
            # Options of ours mean nothing to an optimizer of torch, and some have other values there.
            is_of_torch = self.live.optimizers and has_our_options(self.stored.entries)
            to_torch = command("convert", place, "NEW", "--to", "torch")
            return f"State of our optimizer is translated first for one of torch: {to_torch}" if is_of_torch else ""
        if self.stored.translated:
            return ""
        program = "" if _is_known(self.checkpoint) else " --from PROGRAM"
        if not any(tensor.slot is not None for tensor in with_slots(manifest).tensors):
            return ""  # weights alone
        convert, inspect = command("convert", place), command("inspect", place)
        return (
            "State of another program or optimizer, such as torch.optim.Muon, is translated first: "
            f"{convert} NEW --to muonckpt{program} ({inspect} says whose keys these are)"
        )

    def _dequantisation(self) -> str:
        """Return what to do about quantised weights that something else is expected for."""
        matching = self.matching
        records = {record.key: record for record in self.stored.tensors}
        quantised: dict[str, str] = {}
        for key, scales in scales_of_quantised(records.values()).items():
            has_other_dtype = f"is {records[key].dtype}, expected" in matching.misfits.get(key, "")
            if has_other_dtype or (matching.missing_keys and key not in matching.sources):
                quantised[key] = scales
        if not quantised:
            return ""
        what = describe_quantised(quantised)
        return f"It has {what}: dequantise with the program that wrote it, as a cast would lose the scales"

    def _renaming(self) -> str:
        """Return the rules that give parameters the names that they have here; empty if that cannot be told exactly."""
        if self.checkpoint is None or not self.matching.missing_tensors or not _is_known(self.checkpoint):
            return ""
        live, saved, kept_names = self._names
        kept = dict.fromkeys(kept_names, frozenset[object]())
        rules = find_rules({**saved, **kept}, {**live, **kept}) if live else ()
        return f"If they were renamed{self._conversion(rules)}" if rules else ""

    def _conversion(self, rules: Sequence[Rule]) -> str:
        """Return the command that renames by rules, with their file; empty if its program is unknown."""
        if self.checkpoint is None or not _is_known(self.checkpoint):
            return ""
        convert = command("convert", self.checkpoint.path, "NEW", "--rules", "FILE")
        table = as_toml({"from": old, "to": new} for old, new in rules)
        return f"{self._place_in_run()}: {convert}{TABLE}{table}"

    def _place_in_run(self) -> str:
        """Return in words where a new checkpoint of this step is taken by the run; empty if this is of no series."""
        path = self.checkpoint.path if self.checkpoint else None
        if path is None or StepName.parsed(path.name) is None:
            return ""
        return f" (the run takes NEW if that is {path.parent / (new_attempt(path) or '')})"

    @cached_property
    def _names(self) -> tuple[_Forms, _Forms, set[str]]:
        """The parameters that the state dict alone has, those that the checkpoint alone has, and names of both."""
        matching, live = self.matching, self.live
        claimed_keys = {*matching.sources.values(), *matching.covered_keys, *live.flat}
        # State counts where the state dict asks for some, and weights where it has some.
        parents = {live.paths[key][:-1] for key, value in live.flat.items() if isinstance(value, Tensor)}
        saved_forms: defaultdict[str, set[object]] = defaultdict(set)
        kept_names, fresh = set[str](), self.choices.fresh
        manifest = with_slots(self.checkpoint.outline) if self.checkpoint else None
        for record in manifest.tensors if manifest else self.stored.tensors:
            name = str(record.path[-1]) if record.slot is None else str(record.name)
            if record.key in claimed_keys:
                kept_names.add(name)
            elif live.optimizers if record.slot is not None else record.path[:-1] in parents:
                saved_forms[name].add((record.slot or "", record.shape, record.dtype))
        live_forms: defaultdict[str, set[object]] = defaultdict(set)
        for tensor in matching.missing_tensors.values():
            live_forms[tensor.name].add((tensor.slot, tensor.shape, tensor.dtype))
        return (
            {name: frozenset(forms) for name, forms in live_forms.items() if name not in kept_names},
            {
                name: frozenset(of)
                for name, of in saved_forms.items()
                if name not in kept_names and not fresh.match(name)
            },
            kept_names,
        )

    # Missing keys.

    def _advice_on_missing(self) -> str:
        """Return what to do about keys that only the state dict has."""
        # A scheduler or another object of a run, that is new or of another kind: only a new run may begin without it.
        objects = {self.live.paths[key][0] for key in self.matching.missing_keys if key in self.live.paths}
        if self.call == RESUME and objects and not objects & {MODEL, OPTIMIZER}:
            names = listed(sorted(map(repr, objects)))
            return (
                f"It was saved without {names}, or with another kind. To go on with weights, optimizer state "
                "and the schedule's rates at that step, begin a run in another folder: "
                f"resume(begin_from={self._source!r})"
            )
        here, there, shared_names = self._names
        if here and there:
            # One form on both sides is a renaming that is not known; without it and a shared weight, it is another run.
            is_other = sorted(map(repr, here.values())) != sorted(map(repr, there.values()))
            if is_other and self.call in (RESTORE, RESUME) and not self._weight_keys - self.matching.misfits.keys():
                weights = sum(record.slot is None for record in self.stored.tensors)
                return (
                    f"The checkpoint is of another model: none of its {counted(weights, 'weight')} has the name and "
                    "shape of one here. Give Series another folder"
                )
            lists = two_lists(sorted(here), sorted(there))
            by_hand = self._conversion([(min(there), "ITS NAME HERE")])
            return f"{lists}. Write a rule for each{by_hand}" if by_hand else lists
        if here and self._weight_keys and not self.live.numbered:
            globs = in_globs(sorted(here), (self.matching.names | shared_names) - here.keys())
            return f"If they are new: {self.call}(..., fresh={globs!r}), and they stay as initialised"
        # A part without tensors that the checkpoint lacks is no model or optimizer: it can be left out as one.
        roots = {entry.path[0] for entry in self.stored.entries.values()}
        roots.update(self.live.paths[key][0] for key, value in self.live.flat.items() if isinstance(value, Tensor))
        absent = {self.live.paths[key][0] for key in self.matching.missing_keys if key in self.live.paths} - roots
        if absent:
            names = listed(sorted(map(repr, absent)))
            return f"The checkpoint has nothing of {names}: to load all else, leave it out of the state dict"
        step = "Build the model of the saved run"
        if self.checkpoint is None:
            return step
        return f"{step} ({command('inspect', self.checkpoint.path, '--tree')} shows what it has)"

    # Dtypes.

    def _cast(self) -> str:
        """Return how tensors of another dtype are loaded exactly, if that is all that is wrong."""
        matching, live = self.matching, self.live
        names = set[str]()
        pairs = set[tuple[str, str]]()
        is_of_state = set[bool]()
        for key, value in live.flat.items():
            entry = self.stored.entries.get(matching.sources.get(key, key))
            name = live.slots[live.paths[key]][0] if live.paths[key] in live.slots else None
            is_asked = key in matching.misfits or name in matching.differences
            if not is_asked or not isinstance(value, Tensor) or not isinstance(entry, StateRecord):
                continue
            if entry.shape != value.shape:
                return ""
            if entry.dtype != dtype_name(value.dtype):
                pairs.add((entry.dtype, dtype_name(value.dtype)))
                names.add(name or key)
                # A template without groups has state, too.
                is_of_state.add(name is not None or any(OptimizerKey.of_slot(live.paths[key])))
        if not pairs or not names >= matching.misfits.keys() | matching.differences.keys():
            return ""
        [(saved, dtype), *others] = pairs
        if live.optimizers and False in is_of_state and saved not in _FLOATS:
            return f"No optimizer steps a weight in {saved}: save it in 16 bits or more by the program that wrote it"
        if others or saved not in _FLOATS or dtype not in _FLOATS:
            return "Give each tensor the dtype that it has in the checkpoint"
        is_exact = saved in _WIDER.get(dtype, ())
        # Other weights may have their dtype already.
        are_others_right = any(
            live.flat[key].is_floating_point() for key in self._weight_keys - matching.misfits.keys()
        )
        if True in is_of_state and are_others_right and self.checkpoint:
            if is_exact and dtype == "float32":
                convert = command("convert", self.checkpoint.path, "NEW", "--state-dtype", dtype)
                return f"State alone is cast exactly: {convert}"
            if saved == "float32" and has_our_options(live.flat):
                return "To keep all bits, give groups momentum_dtype='float32', those of AdamW state_dtype='float32'"
        if not is_exact:
            return f"To keep all bits, build the model in {saved}"
        if False in is_of_state and are_others_right:
            there, back = (f"weight.data = weight.data.to(torch.{each})" for each in (saved, dtype))
            return f"Exact for {listed(sorted(names), 3)}: {there}, load, then {back}"
        return f"Exact: model.to(torch.{saved}), load, then model.to(torch.{dtype}), which the state follows"

    @property
    def _weight_keys(self) -> set[str]:
        """The keys of tensors that are no state of an optimizer, and that the checkpoint has."""
        prefixes = tuple(optimizer.state for optimizer in self.live.optimizers)
        tensors = (key for key in self.matching.sources if isinstance(self.live.flat.get(key), Tensor))
        return {key for key in tensors if not key.startswith(prefixes)}

    def _saved_shape(self) -> str:
        """Return the next step where a tensor has another shape in the checkpoint, or is none; empty without any."""
        for key, value in self.live.flat.items():
            entry = self.stored.entries.get(self.matching.sources.get(key, key))
            if entry is not None and isinstance(value, Tensor) is not isinstance(entry, StateRecord):
                saved = "a tensor" if isinstance(entry, StateRecord) else "no tensor"
                return f"Give {key!r} as it was saved, {saved}, and change it after loading"
            if isinstance(value, Tensor) and isinstance(entry, StateRecord) and entry.shape != value.shape:
                return (
                    f"No call cuts a saved tensor: build the model with the saved shapes ({key!r}: {entry.shape}), and "
                    "leave the rows that are not needed unused"
                )
        return ""


def _is_known(checkpoint: OpenCheckpoint) -> bool:
    """Return whether its keys tell which program wrote it."""
    try:
        detect(checkpoint.outline)
    except SourceError:
        return False
    return True


_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
