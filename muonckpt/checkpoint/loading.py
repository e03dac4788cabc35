"""Loading a checkpoint into live tensors, on any mesh: all of it, or an error that is the same on all ranks.

The first rank reads and parses what describes the checkpoint.  All ranks agree on what to load, each checks what it is
to read, and then reads it.  An error before that leaves all tensors as they were.
"""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..names.errors import ADVICE, ArgumentError, DamageError, SourceError, called_like, warn_on_rank
from ..names.keys import key_of
from ..names.resumption import CAST_ADVICE, IN_A_TRAINER, LOAD_LINES, NAMES_OF_GROUPS, Globs, LoadReport
from ..names.vocabulary import HISTORY_OPTIONS, has_our_options
from ..programs.detection import detect, with_slots
from ..record.columns import UNKNOWN
from ..store.io.location import Location, location
from ..store.open_checkpoint import OpenCheckpoint
from ..store.verify.diagnosis import open_to_load
from .all_ranks import (
    broadcast_from_first,
    decide_on_first,
    group_ranks,
    place_in,
    refuse_crossed,
    refuse_differing,
    unusable,
)
from .attestation import TensorPrint, attest_loaded
from .bits import dtype_name
from .chunk_reader import ChunkReader, PartlyRead, WhenChecked, Where
from .live_state import LiveState, RankState, prove_asked_whole, refuse_no_state_dict
from .matching import RankRequest, dropped_by_torch, judge, match, selection
from .resume_check import LoadedState
from .template import LoadTemplate, Matching, Stored, joint_sources


@dataclass(frozen=True, slots=True)
class _Question:
    """A rank's question to the first one.

    Attributes:
        arguments: those that have to be the same on all ranks.
        placed: for each kind of ``asked`` the global ranks that hold elements, where placements say that.
    """

    arguments: Mapping[str, object]
    request: RankRequest
    asked: RankState
    placed: Sequence[Collection[int]]


@dataclass(eq=False)
class _JointLoad:
    """One load, with the arguments of `load`; ``matching`` exists once it is decided what this rank takes."""

    state_dict: dict[str, Any]
    path: str | os.PathLike[str]
    allow_extra: bool | Iterable[str]
    fresh: Iterable[str]
    attest: bool
    check: WhenChecked | None
    group: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        self.matching: Matching
        self._live: LiveState
        self._reader: ChunkReader
        self._stored: Stored
        self._report: LoadReport
        self._sources: Mapping[str, str] = {}
        """Keys of tensors of the checkpoint by those that all ranks know them under; on the coordinator alone."""
        self._unloaded_keys: Sequence[str] = ()
        """Keys of the checkpoint that ``allow_extra`` leaves there; on the coordinator alone."""

    @cached_property
    def _checked(self) -> tuple[Location, Globs, Globs]:
        """The checked arguments; made once, as globs may come from an iterator."""
        if self.check not in (None, "before", "while"):
            raise ArgumentError(f"check is 'before', 'while' or None; got {self.check!r}")
        return location(self.path, SourceError), *selection(self.allow_extra, self.fresh)

    def run(self) -> LoadReport:
        """Load in place, or fail on all ranks with one error."""

        def place() -> Location:
            refuse_no_state_dict(self.state_dict, "to load into")
            return self._checked[0]

        opened = _opened_together(self.group, place)
        decide_on_first(self.group, SourceError, lambda: self.ask(opened), self.answer)

        def read() -> Mapping[Where, PartlyRead]:
            values = self._reader.read()
            self._live.zero(self.matching.zeros)
            self._live.put(values, self.matching.added)
            return self._reader.partly_read

        def report(ranks: list[Mapping[Where, PartlyRead]]) -> LoadReport:
            self._reader.judge(ranks)
            return self._report

        # All ranks hear of it before any of them writes.
        decide_on_first(self.group, SourceError, self._reader.check, self._reader.judge)
        with unusable('; check="before" finds damage before any tensor is touched'):
            loaded = decide_on_first(self.group, SourceError, read, report)
        if self.attest:
            with unusable():
                attest_loaded(self.state_dict, self._reader.checkpoint, lambda: self._sources, self.group)
        self._reader.checkpoint.close()
        return loaded

    @property
    def loaded_state(self) -> LoadedState:
        """What was loaded, after `run`: the recorded fingerprints of tensors are on the coordinator."""
        tensors = self._reader.checkpoint.tensors
        stored = {key: tensors[source] for key, source in self._sources.items() if source in tensors}
        prints = {
            key: TensorPrint(tensor.shape, tensor.dtype, tensor.fingerprint)
            for key, tensor in stored.items()
            if tensor.fingerprint is not None
        }
        loaded_keys = [*self.matching.sources, *map(key_of, self.matching.added)]
        provenance = self._reader.checkpoint.outline.provenance
        return LoadedState.of(self._live, loaded_keys, prints, provenance, self._unloaded_keys)

    def advice(self) -> str:
        """Return on all ranks what to do about damage, after it was found."""
        from ..store.verify.diagnosis import advice_on  # not needed where nothing is wrong

        return broadcast_from_first(self.group, SourceError, lambda: advice_on(self._checked[0]))

    def ask(self, opened: Callable[[], OpenCheckpoint | None]) -> _Question:
        place, extra, globs = self._checked
        live = self._live = LiveState.of(self.state_dict, "to load into")
        self._reader = ChunkReader(place, self.check, opened())
        for tensor in self._reader.checkpoint.outline.tensors:
            tensor.chunk_layout()  # proves that the chunks tile it; no item is opened
        self._stored = Stored.of(self._reader.checkpoint, place_in(self.group))
        template = LoadTemplate.of(live, extra.matches_all)
        matching = self.matching = match(template, self._stored, globs)
        asked = RankState((), (), ())
        if matching.fits:
            self._reader.plan(live, matching.sources, matching.zeros)
            asked = live.described.boxes({*matching.sources, *matching.zeros})
        arguments = {
            "path": str(place), "allow_extra": extra.patterns, "attest": self.attest, "check": self.check
        }  # fmt: skip
        return _Question(arguments, RankRequest(matching, template.optimizers, globs), asked, live.placed_on(asked))

    def answer(self, ranks: list[_Question]) -> None:
        """Decide for all ranks, on the coordinator."""
        refuse_differing(self.group, "load", [question.arguments for question in ranks])
        matching, self._report = judge([question.request for question in ranks], self._stored, self._checked[1])
        if not matching.fits:
            raise SourceError(self.refusal(matching))
        claimed = matching.spared.union(*(question.request.matching.sources.values() for question in ranks))
        self._unloaded_keys = sorted(
            key
            for key, entry in self._stored.entries.items()
            if key not in claimed
            and self._checked[1].match(key)
            and entry.path[-1] not in HISTORY_OPTIONS | NAMES_OF_GROUPS
        )
        self._sources = joint_sources([(question.asked, question.request.matching) for question in ranks])
        asked = ((question.asked, question.placed) for question in ranks)
        prove_asked_whole(dict(zip(group_ranks(self.group), asked, strict=True)))

    def refusal(self, matching: Matching) -> str:
        begin, cure = f"{self._reader.place} does not fit the state dict", f"muonckpt.load(..., {{}}){IN_A_TRAINER}"
        translated = self._translation()
        other_keys = matching.differences or matching.extra_state or matching.faults[0].startswith("missing")
        if not other_keys or not translated:
            return f"{begin}: {matching.misfit(cure, cast=self._cast(matching))}"
        return f"{begin}: {matching.misfit(cure, translated)}{'' if matching.differences else f'. {translated}'}"

    def _translation(self) -> str:
        """Return how state of another program becomes that of our optimizer; empty where that is not what it needs."""
        place, manifest, program = self._reader.place, self._reader.checkpoint.outline, ""
        if self._stored.translated or not has_our_options(self._live.flat):
            return ""
        try:
            detect(manifest)
        except SourceError:
            program = " --from PROGRAM"
        if not any(tensor.slot is not None for tensor in with_slots(manifest).tensors):
            return ""  # weights alone
        return (
            "State of another program or optimizer, such as torch.optim.Muon, is translated first: muonckpt "
            f"convert {place} NEW --to muonckpt{program} (muonckpt inspect {place} says whose keys these are)"
        )

    def _cast(self, matching: Matching) -> str:
        """Return how state of another dtype is loaded: with weights that fit, it alone has to be cast."""
        entries, live = self._stored.entries, self._live
        prefixes = tuple(optimizer.state for optimizer in live.optimizers)
        tensors = {key: dtype_name(value.dtype) for key, value in live.flat.items() if isinstance(value, Tensor)}
        has_weights = any(not key.startswith(prefixes) for key in tensors.keys() & matching.sources.keys())
        state = {key: entry for key, entry in entries.items() if key in tensors and key.startswith(prefixes)}
        dtypes = {tensors[key] for key, entry in state.items() if getattr(entry, "dtype", tensors[key]) != tensors[key]}
        if not has_weights or len(dtypes) != 1 or not dtypes <= {*_STATE_DTYPES}:
            return CAST_ADVICE
        [dtype] = dtypes
        line = f"muonckpt convert {self._reader.place} NEW --state-dtype {dtype}"
        return f"The weights fit, and state alone is cast: {line} ({_STATE_DTYPES[dtype]})"


_STATE_DTYPES = {
    "float32": "exactly, as float32 has all values of bfloat16",
    "bfloat16": "rounded; to keep all bits, leave momentum_dtype= and state_dtype= out of groups with float32 weights",
}
"""What becomes of state in these dtypes, in which ``--state-dtype`` writes it."""


def _opened_together(
    process_group: dist.ProcessGroup | None, place: Callable[[], Location]
) -> Callable[[], OpenCheckpoint | None]:
    """Open a checkpoint on the first rank, and return a function that gives it on each; None where each has to open it.

    That is so with readers that cannot be sent, such as those of a plug-in; and with elements that have no checksum
    and lie where only the description says: a rank that sees another file would take whatever bytes are there.
    Call the function once, where an error reaches all ranks: this one may lack a reader that the first has.
    """
    mine: list[OpenCheckpoint] = []

    def packed() -> bytes | None:
        mine.append(open_to_load(place()))
        columns, elements = mine[0].outline.columns, mine[0].outline.elements
        in_items = columns.payload_length() == UNKNOWN  # their checksums are there, too
        guarded = columns.has_digest | (columns.crc32 != UNKNOWN) | in_items
        if not dist.is_initialized() or not (guarded | (elements == 0)).all():
            return None
        try:
            return zlib.compress(pickle.dumps(mine[0]), 1)  # columns are mostly zeros, or alike
        except Exception:  # whatever a reader raises that cannot be pickled
            return None

    heard = broadcast_from_first(process_group, SourceError, packed)
    return lambda: mine[0] if mine else None if heard is None else pickle.loads(zlib.decompress(heard))


@called_like(f"{LOAD_LINES}; muonckpt.open(path) reads a checkpoint without a model")
def load(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    allow_extra: bool | Iterable[str] = False,
    fresh: Iterable[str] = (),
    attest: bool = False,
    check: WhenChecked | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load a checkpoint in place into the tensors of ``state_dict``, whatever mesh they are on.  Collective.

    Keys, coverage, shapes, dtypes, momentum conventions and the items of a stock checkpoint are checked on all ranks
    before any tensor is touched, and so are digests and checksums unless ``check`` says otherwise.  A rank that needs
    one run of elements of a chunk, such as rows, reads only that, and all ranks check the chunk together.

    Args:
        state_dict: the template, nested as it was saved; other objects with ``load_state_dict`` are called.
        path: a path or a URL of a checkpoint in any format that this package reads, if its keys are those of the
            template.
        allow_extra: True: load only what the template asks for.  Globs of keys, such as ``["lr_scheduler.*"]``, where
            ``*`` stands for any characters: leave only these.  Other keys that only one side has are an error; but
            options that a converted checkpoint lacks stay as the running optimizer has them, with a warning.
        fresh: globs of parameters' names as the optimizer's state has them, such as ``["lm_head.*"]``; the same on
            every rank.  The state of these parameters becomes zeros, the number of their steps too; their options are
            those of their group.  A weight of such a name, which is the last part of its path, is loaded where both
            sides have it and keeps its values where the checkpoint has none.  What only the checkpoint has is dropped.
        attest: at the end compare fingerprints of the tensors in memory with those of the checkpoint
            (docs/guide/attest.md).
        check: ``"before"``: no rank touches a tensor unless what all of them load is whole.  ``"while"``: each chunk is
            checked when it is read; the error that reports damage says that the state dict is unusable.  None:
            ``"before"``, or for an object store, from which bytes would be read twice, ``"while"``.

    Returns:
        What was done with which parameters, the same on every rank; print it.

    Raises:
        SourceError: it is missing, damaged or does not fit, or a glob matches nothing; lists what differs.
        LayoutError: it has a hole or an overlap, or elements of the state dict share memory: one value would be left.
        AttestError: what is in memory is not what the checkpoint has.
        LostRankError: another rank was lost, or did not answer within the time-out of the process group.
        ArgumentError: an argument is none of these, or not the same on all ranks.
    """
    return _run(_JointLoad(state_dict, path, allow_extra, fresh, attest, check, process_group))


def load_to_prove(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    allow_extra: bool | Iterable[str],
    fresh: Iterable[str],
    attest: bool,
    process_group: dist.ProcessGroup | None,
) -> tuple[LoadReport, LoadedState]:
    """Load as `load` does, and return besides what a proof of the resume is compared with."""
    joint = _JointLoad(state_dict, path, allow_extra, fresh, attest, None, process_group)
    return _run(joint), joint.loaded_state


def _run(joint: _JointLoad) -> LoadReport:
    """Run a load, and tell of its doubts."""
    refuse_crossed(joint.group, "load")
    path = joint.path
    try:
        report, matching = joint.run(), joint.matching
    except DamageError as error:  # on all ranks
        if ADVICE in str(error):
            raise
        raise DamageError(str(error), joint.advice()) from error
    if matching.own_options:
        own = "; ".join(matching.own_options)
        warn_on_rank(f"{path} does not say options, which stay as the running optimizer's: {own}", stacklevel=4)
    for doubt in matching.doubts:
        warn_on_rank(f"{path}: {doubt}", stacklevel=4)
    if dropped := dropped_by_torch(matching.added):
        warn_on_rank(
            f"{path} has {', '.join(dropped)}, which torch's set_state_dict drops from a flattened state dict, because "
            "the running optimizer's groups have no such option; a scheduler would then begin at the loaded lr: give "
            "the groups that option, of any value, before get_state_dict (a scheduler that is made then does), or load "
            "a nested state dict",
            stacklevel=4,
        )
    return report
