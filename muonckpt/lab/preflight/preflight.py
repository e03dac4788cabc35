"""The public question: if this job were started now, would it resume from this checkpoint, and with what?

The answer is that of `load` itself, which matches the state dict of one rank with the checkpoint; nothing is read but
metadata and options.
"""

from __future__ import annotations

import glob
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ...checkpoint.loading import JointLoad
from ...checkpoint.template import Stored
from ...names.errors import MuonckptError, TargetError
from ...names.keys import OptimizerKey, key_of
from ...names.resumption import NAMES_OF_GROUPS, LoadReport, as_tuples, in_globs
from ...names.vocabulary import HISTORY_OPTIONS, PARAMS, KeyPath
from ...names.wording import fields_of, listed
from ...optimizer import Muon
from ...programs.model_view import Role, view_by_keys
from ...store.io.location import Remote
from ...store.open_checkpoint import OpenCheckpoint
from ...store.verify.diagnosis import open
from ..built import Built, Maker, maker_of
from .loaders import LOADERS, POSITIONAL, Outcome
from .stand_ins import build_on, fake_ranks, state_of


@dataclass(frozen=True, slots=True)
class OptionChange:
    """An option of a parameter group that the code gives another value than the checkpoint; the saved one counts.

    Attributes:
        group: the first parameters of the group, as text.
    """

    group: str
    option: str
    saved_value: Any
    code_value: Any


@dataclass(frozen=True, slots=True)
class Preflight:
    """The answer whether a run would resume; true if it would.

    Attributes:
        loader: whose rules were applied.
        refusal: the error that the loader would raise, with the cure; empty if there is none.
        report: what would be loaded and what would begin anew.
        changes: options of which the saved values would replace those of the code.
        warnings: what the loader would not say, and the user would want to know.
        unasked: roots of the checkpoint's keys that neither the model nor the optimizer has, such as "lr_scheduler".
    """

    checkpoint: str
    source: str
    mesh: Mapping[str, int]
    loader: str
    refusal: str
    report: LoadReport
    changes: tuple[OptionChange, ...]
    warnings: tuple[str, ...]
    unasked: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.refusal

    @property
    def sentence(self) -> str:
        """The answer in one sentence, yes or no first."""
        if self.refusal:
            return f"no: {self.refusal}"
        fresh = f", {len(self.report.fresh)} would begin anew" if self.report.fresh else ""
        return f"yes: the state of {len(self.report.loaded)} parameters would be loaded{fresh}"

    def to_json(self) -> dict[str, Any]:
        return {"resumes": bool(self), "sentence": self.sentence, **fields_of(self)}


def preflight(
    checkpoint: str | os.PathLike[str] | Remote,
    make: str | Maker,
    mesh: Mapping[str, int] | None = None,
    *,
    rank: int = 0,
    loader: str = "muonckpt",
    allow_extra: bool | Iterable[str] = False,
    fresh: Iterable[str] = (),
) -> Preflight:
    """Say whether a job would resume from a checkpoint, before it is queued, as ``muonckpt preflight`` prints it.

    The function is called on the meta device, in a fake process group of the size of the mesh; a file that is named is
    imported, which runs it, with your rights.  Of the checkpoint only metadata and options are read.

    Args:
        make: a function that returns a model and an optimizer (or several), or "FILE.py:FUNCTION".  If it takes an
            argument, that is the device mesh.
        mesh: sizes of axes by name, the outermost first; by default one rank.
        rank: the rank that is asked, as stages of a pipeline hold other parameters.
        loader: "muonckpt", or the program whose loader is used: "dcp", "torchtitan", "huggingface" or "lightning".
        allow_extra, fresh: as for `load`.

    Raises:
        SourceError: the checkpoint cannot be read.
        TargetError: the function fails, or an argument does not fit.
    """
    mesh = {"dp": 1} if mesh is None else mesh
    if loader not in ("muonckpt", *LOADERS):
        raise TargetError(f"loader={loader!r}: expected muonckpt, or one of {', '.join(LOADERS)}")
    source = make if isinstance(make, str) else getattr(make, "__qualname__", repr(make))
    with open(checkpoint) as opened, fake_ranks(math.prod(mesh.values()), rank):
        # 1. The state dict that the code would load into, with the keys that the checkpoint has for its parts.
        built = build_on(maker_of(make) if isinstance(make, str) else make, source, mesh)
        if loader in POSITIONAL and any(isinstance(optimizer, Muon) for optimizer in built.optimizers):
            raise TargetError(
                f"loader={loader!r}: muonckpt's optimizer checks what a trainer loads into it: ask loader='muonckpt'"
            )
        stored = Stored.of(opened, (rank, math.prod(mesh.values())))
        model_root, optimizer_root = _roots(opened, built)
        weights, state = state_of(built, stored.form(key_of(optimizer_root)))
        state_dict: dict[str, Any] = {}
        _put(state_dict, model_root, weights)
        _put(state_dict, optimizer_root, state)
        unasked = tuple(_unasked_roots(stored, state_dict))
        # 2. What the loader would do with both.
        if loader == "muonckpt":
            unasked_keys = [f"{glob.escape(root)}*" for root in unasked]
            patterns = (
                allow_extra if isinstance(allow_extra, bool) and allow_extra else [*(allow_extra or ()), *unasked_keys]
            )
            outcome = _as_load(opened, state_dict, patterns, fresh)
        else:
            outcome = LOADERS[loader](stored, state_dict)
        changes = tuple(_option_changes(outcome, stored, state_dict))
    return Preflight(
        str(checkpoint), source, dict(mesh), loader, outcome.refusal, outcome.report, changes, outcome.warnings, unasked
    )


def _roots(opened: OpenCheckpoint, built: Built) -> tuple[KeyPath, KeyPath]:
    """Return where a checkpoint has weights and the state of the optimizer, as most of their keys say."""
    view = view_by_keys(opened.outline)
    names = {name for name, _ in built.model.named_parameters()}
    models: Counter[KeyPath] = Counter()
    for tensor in view.tensors_of(Role.WEIGHTS, Role.OTHER):
        if tensor.path[-1] in names:
            models[tensor.path[:-1]] += 1
    optimizers: Counter[KeyPath] = Counter()
    for tensor in view.tensors_of(Role.MOMENTUM, Role.MOMENTS, Role.STATE):
        for reading in OptimizerKey.of_slot(tensor.path):
            optimizers[reading.place.root] += 1
    model_root = models.most_common(1)[0][0] if models else ("model",)
    return model_root, optimizers.most_common(1)[0][0] if optimizers else ("optimizer",)


def _put(state_dict: dict[str, Any], root: KeyPath, values: Mapping[str, Any]) -> None:
    """Put values into a nested state dict below a root."""
    node = state_dict
    for part in root:
        node = node.setdefault(str(part), {})
    node.update(values)


def _unasked_roots(stored: Stored, state_dict: Mapping[str, Any]) -> Iterator[str]:
    """Yield the first parts of keys that the state dict has nothing of."""
    yield from dict.fromkeys(
        str(entry.path[0]) for entry in stored.entries.values() if str(entry.path[0]) not in state_dict
    )


def _as_load(
    opened: OpenCheckpoint, state_dict: dict[str, Any], allow_extra: bool | Iterable[str], fresh: Iterable[str]
) -> Outcome:
    """Ask `load` itself, up to where it would begin to read."""
    joint = JointLoad(state_dict, str(opened.path), allow_extra, fresh, False, None, None)
    try:
        matching, report, refusal = joint.rehearse(opened)
    except MuonckptError as error:
        return Outcome({}, LoadReport(), str(error))
    return Outcome(matching.sources, report, refusal, matching.doubts)


def _option_changes(outcome: Outcome, stored: Stored, state_dict: Mapping[str, Any]) -> Iterator[OptionChange]:
    """Yield the options whose saved values would replace other ones of the code, each once for all groups alike."""
    values, paths = flatten_state_dict(dict(state_dict))
    members = {key: value for key, value in values.items() if paths[key][-1] == PARAMS}
    owners: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    changes: dict[tuple[str, str, str], tuple[Any, Any]] = {}
    for key in outcome.sources.keys() & values.keys():
        reading = next(OptimizerKey.of_option(paths[key]), None)
        if reading is None or reading.leaf in NAMES_OF_GROUPS | HISTORY_OPTIONS:
            continue
        # Rates that a scheduler has changed are compared as they began.
        initial_key = f"{key.removesuffix(reading.leaf)}initial_{reading.leaf}"
        saved_key = initial_key if initial_key in stored.entries else outcome.sources[key]
        saved_value, code_value = as_tuples(stored.option(saved_key)), as_tuples(values.get(initial_key, values[key]))
        if saved_value != code_value:
            change = reading.leaf, repr(saved_value), repr(code_value)
            names = members.get(f"{key.removesuffix(reading.leaf)}{PARAMS}", [reading.name])
            owners[change] += map(str, names)
            changes[change] = saved_value, code_value
    for change, (saved_value, code_value) in sorted(changes.items()):
        yield OptionChange(listed(in_globs(owners[change], ()), 3), change[0], saved_value, code_value)
