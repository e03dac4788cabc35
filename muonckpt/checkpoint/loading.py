"""Loading a checkpoint into live tensors, on any mesh: all of it, or an error that is the same on all ranks.

The first rank reads and parses what describes the checkpoint.  All ranks agree on what to load and who reads what.
Then each reads its part to where it belongs, checks it on the way, and sends what others need.
"""

from __future__ import annotations

import os
import pickle
import socket
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ..names.collector import gc_paused
from ..names.errors import ADVICE, ArgumentError, DamageError, SourceError, UnseenError, called_like, warn_on_rank
from ..names.keys import key_of
from ..names.resumption import LOAD_LINES, NAMES_OF_GROUPS, Choices, LoadReport, LoadTraffic
from ..names.vocabulary import HISTORY_OPTIONS
from ..names.wording import listed
from ..record.columns import UNKNOWN
from ..record.record import Manifest, StateRecord
from ..store.io.location import Location, Remote, location, refuse_unseen
from ..store.open_checkpoint import OpenCheckpoint, checked_blob
from ..store.verify.diagnosis import advice_on, diagnosis_at, open_to_load
from ..store.verify.run import last_verification
from .all_ranks import (
    JointWork,
    broadcast_from_first,
    group_ranks,
    is_coordinator,
    place_in,
    refuse_differing,
    refuse_mixed_calls,
    unusable,
    wire_device,
)
from .attestation import TensorPrint, attest_loaded
from .chunk_reader import ChunkReader, PartialSum, judge_sums
from .joint_state import prove_asked_whole, with_joint_groups
from .live_state import LiveState, LocalParts, RankForm, RankState, refuse_no_state_dict
from .matching import judge, match
from .optimizer_matching import dropped_by_torch
from .reading_plan import ChunkUnits, JointRequest, ReadingRound, plan_reading
from .refusal import LOAD, Refusal
from .resume_proof import LoadedState
from .shared_memory import differing_ties, tied_origins
from .storable import load_plain
from .stored import Matching, Stored
from .transfer import Transfer

T = TypeVar("T")

WhenChecked = Literal["while", "before"]

STAGING_BYTES = 32 << 20
"""Bytes that a rank reads to send them, and again as many of its exchange buffers, by default."""

_MIN_BYTES = 1 << 20
"""The least of them: fewer would take a call for a few elements."""


# --- What was called --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LoadCall:
    """One call, with the arguments of `load`.

    Attributes:
        choices: the arguments of `Choices`, which are checked where an error reaches all ranks.
        name: what the user has called, for errors.
    """

    state_dict: dict[str, Any]
    path: str | os.PathLike[str]
    choices: Mapping[str, Any]
    name: str = LOAD
    attest: bool = False
    check: WhenChecked = "while"
    group: dist.ProcessGroup | None = None
    memory: int = STAGING_BYTES

    def checked(self) -> LoadCall:
        refuse_no_state_dict(self.state_dict, "to load into")
        _ = self.place, self.checked_choices
        return self

    @cached_property
    def place(self) -> Location:
        return location(self.path, SourceError)

    @cached_property
    def checked_choices(self) -> Choices:
        """The checked arguments; made once, as globs may come from an iterator."""
        if self.check not in ("while", "before"):
            raise ArgumentError(f"check is 'while' or 'before'; got {self.check!r}")
        if type(self.memory) is not int or self.memory < 1:
            raise ArgumentError(f"memory is a number of bytes, at least 1; got {self.memory!r}")
        return Choices.of(**self.choices)

    @property
    def arguments(self) -> Mapping[str, object]:
        """The arguments that must be the same on all ranks."""
        return {
            "path": str(self.place),
            **self.checked_choices.as_arguments(),
            "attest": self.attest,
            "check": self.check,
        }


# --- Stages: each makes a value of the one before ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SentCheckpoint:
    """The checkpoint that the first rank has opened, as a rank gets it.

    Attributes:
        opened: on the first rank.
        packed: on the others; None if each has to open it by itself.
    """

    opened: OpenCheckpoint | None
    packed: bytes | None

    def received(self, place: Location) -> tuple[OpenCheckpoint, str]:
        """Return the open checkpoint, and a digest of it as this rank sees it, or "" if it was sent.

        Raises:
            UnseenError: this rank does not see it.
            SourceError: it lacks a reader that the first one has.
        """
        if not self.opened:
            refuse_unseen(place, f"rank {dist.get_rank()}", SourceError)
        if self.packed is not None:
            return self.opened or pickle.loads(zlib.decompress(self.packed)), ""
        checkpoint = self.opened or open_to_load(place)
        return checkpoint, _outline_digest(checkpoint.outline) if dist.is_initialized() else ""


@gc_paused()
def send_checkpoint(
    group: dist.ProcessGroup | None, find: Callable[[], tuple[T, OpenCheckpoint | None]]
) -> tuple[T, SentCheckpoint]:
    """Find a checkpoint on the first rank, and send what it found to all: one broadcast."""
    opened: list[OpenCheckpoint | None] = []

    def pack() -> tuple[T, bytes | None]:
        found, checkpoint = find()
        opened.append(checkpoint)
        return found, _packed(checkpoint) if checkpoint and dist.is_initialized() else None

    found, packed = broadcast_from_first(group, pack)
    return found, SentCheckpoint(opened[0] if opened else None, packed)


def _packed(checkpoint: OpenCheckpoint) -> bytes | None:
    """Return a checkpoint as bytes; None if other ranks have to open it by themselves.

    Readers that cannot be sent are such as those of a plug-in.  Elements that have no checksum and lie where only the
    description says are not sent either: a rank that sees another file would take whatever bytes are there.
    """
    columns, elements = checkpoint.outline.columns, checkpoint.outline.elements
    in_items = columns.payload_length() == UNKNOWN  # their checksums are there, too
    if not (columns.has_digest | (columns.crc32 != UNKNOWN) | in_items | (elements == 0)).all():
        return None
    try:
        return zlib.compress(pickle.dumps(checkpoint), 1)  # columns are mostly zeros, or alike
    except Exception:  # whatever a reader raises that cannot be pickled
        return None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A rank's state dict, matched with the open checkpoint.

    Attributes:
        live: tensors that have grown are their first rows, as the checkpoint has them.
    """

    call: LoadCall
    checkpoint: OpenCheckpoint
    stored: Stored
    live: LiveState
    matching: Matching

    def refusal(self, matching: Matching) -> str:
        choices = self.call.checked_choices
        return str(Refusal(matching, choices, self.stored, self.live, self.checkpoint, self.call.name))


@dataclass(frozen=True, slots=True)
class _Question:
    """A rank's question to the first one; ``devices`` are the types of its tensors' devices.

    Attributes:
        boxes: where the tensors are that it asks for.
        outline_digest: of the checkpoint as it sees it.
        machine: a name that ranks have alike if they share a page cache.
    """

    arguments: Mapping[str, object]
    matching: Matching
    boxes: RankState
    memory: int
    devices: frozenset[str]
    outline_digest: str
    machine: str


@dataclass(frozen=True, slots=True)
class _Agreement:
    """The first rank's answer; attributes as of `_Question`, of all ranks together.

    Attributes:
        items: those that are not tensors and that several ranks ask for, as it has read them, by key.
    """

    request: JointRequest
    items: Mapping[str, bytes]
    report: LoadReport
    memory: int
    devices: frozenset[str]
    machines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """The facts that only the coordinator knows.

    Attributes:
        sources: keys of tensors of the checkpoint by those that all ranks know them under.
        unloaded_keys: those of the checkpoint that ``allow_extra`` and ``fresh`` leave there.
        grown_keys: those of tensors whose rows the checkpoint has in part.
    """

    sources: Mapping[str, str] = field(default_factory=dict)
    unloaded_keys: Sequence[str] = ()
    grown_keys: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """All that this rank needs to load, before it touches a tensor: who reads what, and the memory for it.

    Attributes:
        transfers: of the rounds.
        items: the values that are not tensors, by keys of the state dict.
        targets: the tensors of this rank, by the keys of the checkpoint that fill them.
    """

    rounds: Sequence[ReadingRound]
    reader: ChunkReader
    transfers: Sequence[Transfer]
    wire: Tensor
    items: Mapping[str, Any]
    targets: Mapping[str, Sequence[LocalParts]]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A finished load.  ``known`` is empty but on the coordinator."""

    asked: _Asked
    known: _Known
    report: LoadReport

    @property
    def state(self) -> LoadedState:
        """The loaded state; the recorded fingerprints of tensors are on the coordinator."""
        outline, known, matching = self.asked.checkpoint.outline, self.known, self.asked.matching
        records = {tensor.key: tensor for tensor in outline.tensors}
        prints: dict[str, TensorPrint] = {}
        for key, source in known.sources.items():
            record = records[source]
            if record.fingerprint is not None and key not in known.grown_keys:
                prints[key] = TensorPrint(record.shape, record.dtype, record.fingerprint)
        loaded_keys = [*matching.sources, *map(key_of, matching.added)]
        unset_keys = known.unloaded_keys, self.report.kept, known.grown_keys
        return LoadedState.of(self.asked.live, loaded_keys, prints, outline.provenance, *unset_keys)


def run_load(call: LoadCall) -> Loaded:
    """Open the checkpoint of a call, and load it."""
    refuse_mixed_calls(call.group, "load")
    _, sent = send_checkpoint(call.group, lambda: (None, open_to_load(call.checked().place)))
    return load_sent(call, sent)


def load_sent(call: LoadCall, sent: SentCheckpoint) -> Loaded:
    """Load in place, or fail on all ranks with one error; tell of doubts."""
    try:
        loaded = _load(call, sent)
    except (DamageError, UnseenError) as error:  # on all ranks
        if ADVICE in str(error):
            raise
        if isinstance(error, UnseenError) and not broadcast_from_first(
            call.group, lambda: bool(diagnosis_at(call.place))
        ):
            raise UnseenError(f"{error}. The first rank does: give a path that all nodes mount alike") from error
        advice = broadcast_from_first(call.group, lambda: advice_on(call.place))
        advice = ". ".join(filter(None, (error.advice, advice)))
        raise DamageError(error.fault, advice, keys=error.keys, has_overwritten=error.has_overwritten) from error
    matching = loaded.asked.matching
    if matching.own_options:
        kept_options = listed(matching.own_options, 3, "; ")
        warn_on_rank(
            f"{call.path}: the source did not say options, which stay as the running optimizer's: {kept_options}"
        )
    for doubt in matching.doubts:
        warn_on_rank(f"{call.path}: {doubt}")
    if dropped_options := dropped_by_torch(matching.added):
        warn_on_rank(
            f"{call.path} has {', '.join(dropped_options)}, which torch's set_state_dict drops from a flattened "
            "state dict, because the running optimizer's groups have no such option; a scheduler would then begin "
            "at the loaded lr: give the groups that option, of any value, before get_state_dict (a scheduler that "
            "is made then does), or load a nested state dict",
        )
    return loaded


@gc_paused()
def _load(call: LoadCall, sent: SentCheckpoint) -> Loaded:
    # 1. All ranks hear what all of them ask for.
    decided, known = None, None
    with JointWork(call.group, SourceError) as work:
        question, asked = _ask(call, *sent.received(call.place))
        questions = work.gather(question)
        if questions is not None:
            decided, known = _answer(questions, asked)
        agreement = work.broadcast(decided)
    checkpoint = asked.checkpoint
    # 2. All ranks derive who reads what, and take the memory for it; asked to, they read everything to check it.
    with JointWork(call.group, SourceError), _naming_unseen(call.group):
        prepared = _prepare(asked, agreement)
    reader = prepared.reader
    if call.check == "before":
        with JointWork(call.group, SourceError) as work, _naming_unseen(call.group):
            reader.check()
            work.broadcast(_judge(asked, work.gather((reader.sums, reader.bytes_read))))
    # 3. Elements are read to where they belong, and sent to the other ranks that ask for them.
    with unusable('; check="before" finds damage first'):
        failure = _fill(asked, prepared)
        with JointWork(call.group, SourceError) as work, _naming_unseen(call.group):
            if failure is not None:
                raise failure
            _finish(asked, prepared)
            num_read = work.broadcast(_judge(asked, work.gather((reader.sums, reader.bytes_read))))
    if call.attest:
        with unusable():
            attest_loaded(call.state_dict, checkpoint, known.sources if known else {}, asked.live.rows, call.group)
    checkpoint.close()
    num_sent = sum(each.bytes_sent for each in prepared.rounds)
    traffic = LoadTraffic(num_read, num_sent, 2 if call.check == "before" else 1)
    return Loaded(asked, known or _Known(), replace(agreement.report, traffic=traffic))


def rehearse_load(call: LoadCall, checkpoint: OpenCheckpoint) -> tuple[Matching, LoadReport, str]:
    """Match as a load does, on this rank alone, and return the error that a load would raise, or ""."""
    _, asked = _ask(call, checkpoint, "")
    matching, report = judge([asked.matching], asked.stored, call.checked_choices)
    return matching, report, "" if matching.fits else asked.refusal(matching)


def _ask(call: LoadCall, checkpoint: OpenCheckpoint, outline_digest: str) -> tuple[_Question, _Asked]:
    """Match this rank's state dict with the checkpoint."""
    choices = call.checked().checked_choices
    live = LiveState.of(call.state_dict, "to load into")
    proved = set[object]()
    for tensor in checkpoint.outline.tensors:
        geometry = tensor.shape, id(tensor.boxes), tensor.chunks.strides
        if geometry not in proved:
            tensor.chunk_layout()  # proves that the chunks tile it; no item is opened
            proved.add(geometry)
    stored = Stored.of(checkpoint, place_in(call.group))
    matching = match(live, stored, choices)
    # From here on tensors that have grown are their first rows, as the checkpoint has them.
    live = live.cut_to({key: checkpoint.tensors[matching.sources[key]].shape[0] for key in matching.grown})
    boxes = RankState.of(RankForm((), (), ()), ())
    if matching.fits:
        boxes = live.described.boxes({*matching.sources, *matching.zeros})
        _refuse_overwriting(call, checkpoint, tied_origins(live, matching.sources, matching.zeros))
    memory = max(call.memory, _MIN_BYTES)
    question = _Question(call.arguments, matching, boxes, memory, live.devices, outline_digest, machine_name())
    return question, _Asked(call, checkpoint, stored, live, matching)


def machine_name() -> str:
    """Return a name that the processes of this machine have alike, and those of no other."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot_id.read_text().strip() if boot_id.exists() else ''}"


def _answer(ranks: list[_Question], asked: _Asked) -> tuple[_Agreement, _Known]:
    """Decide for all ranks, on the coordinator."""
    call, stored, group = asked.call, asked.stored, asked.call.group
    refuse_differing(group, "load", [question.arguments for question in ranks])
    for rank, question in zip(group_ranks(group), ranks, strict=True):
        if question.outline_digest != ranks[0].outline_digest:
            raise SourceError(
                f"rank {rank} sees another checkpoint in {call.place} than the first rank: other "
                "tensors, chunks or files, or the same in another order. Put the same files there on all nodes; if "
                "a plug-in reads it, let it list tensors in one order"
            )
    matching, report = judge([question.matching for question in ranks], stored, call.checked_choices)
    if not matching.fits:
        raise SourceError(asked.refusal(matching))
    # 1. Keys that nothing takes; and the sources of tensors, by keys that ranks have in common, unlike group numbers.
    claimed = matching.covered_keys.union(*(question.matching.sources.values() for question in ranks))
    unloaded_keys = []
    for key in stored.entries.keys() - claimed:
        entry = stored.entries[key]
        is_dropped = isinstance(entry, StateRecord) and not {key, entry.name}.isdisjoint(report.dropped)
        is_left = is_dropped or call.checked_choices.allow_extra.match(key)
        if is_left and entry.path[-1] not in HISTORY_OPTIONS | NAMES_OF_GROUPS:
            unloaded_keys.append(key)
    sources = dict[str, str]()
    for question, joint in zip(ranks, with_joint_groups([question.boxes for question in ranks]), strict=True):
        for key, joint_key in zip(question.boxes.form.keys, joint.form.keys, strict=True):
            if key in question.matching.sources:
                sources[joint_key] = question.matching.sources[key]
    known = _Known(sources, sorted(unloaded_keys), sorted(matching.grown))
    # 2. The requests of all ranks, with items that several ask for; ranks share no cache of an object store.
    prove_asked_whole(dict(zip(group_ranks(group), [question.boxes for question in ranks], strict=True)), call.attest)
    request = JointRequest.of([(question.boxes, question.matching.sources) for question in ranks])
    items = _read_items(asked.checkpoint, {key for key, places in request.objects.items() if len(places) > 1})
    devices = frozenset[str]().union(*(question.devices for question in ranks))
    names = [*range(len(ranks))] if isinstance(call.place, Remote) else [question.machine for question in ranks]
    machines = tuple(map([*dict.fromkeys(names)].index, names))
    return _Agreement(request, items, report, min(question.memory for question in ranks), devices, machines), known


def _refuse_overwriting(call: LoadCall, checkpoint: OpenCheckpoint, tied: Collection[tuple[str, str]]) -> None:
    """Refuse tensors that are known to differ and share one memory: only the last copy would remain."""
    for keys in sorted(tied):
        one, other = (checkpoint.tensors[key].record for key in keys)
        if one.fingerprint is not None and other.fingerprint is not None:
            is_differing = one.fingerprint != other.fingerprint
        else:  # by the checksums of equal chunks, as far as there are any
            chunks, other_chunks = (tensor.chunks for tensor in checkpoint.locate((one, other)))
            by_box = {(chunk.box, chunk.strides): chunk.crc32 for chunk in chunks}
            sums = ((by_box.get((chunk.box, chunk.strides)), chunk.crc32) for chunk in other_chunks)
            is_differing = any(None not in of_chunks and of_chunks[0] != of_chunks[1] for of_chunks in sums)
        if is_differing:
            raise SourceError(differing_ties(*keys, call.place))


@contextmanager
def _naming_unseen(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Tell files that this rank does not see from those that may be lost.

    Raises:
        UnseenError: this rank does not see a file; the first rank finds whether it is there.
    """
    try:
        yield
    except DamageError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, FileNotFoundError):
            cause = cause.__cause__
        if cause is None or is_coordinator(group):
            raise
        raise UnseenError(f"rank {dist.get_rank()} does not see a file: {error}") from error


def _read_items(checkpoint: OpenCheckpoint, keys: Collection[str]) -> dict[str, bytes]:
    """Read items that are not tensors, in the order of the checkpoint, as their pickled bytes."""
    items = {}
    for blob in checkpoint.outline.blobs:
        if blob.key in keys:
            items[blob.key] = checked_blob(checkpoint.payloads, blob)
    return items


def _prepare(asked: _Asked, agreement: _Agreement) -> _Prepared:
    """Plan who reads what, open the items of this rank's chunks, and take memory."""
    call, checkpoint, (place, _) = asked.call, asked.checkpoint, place_in(asked.call.group)
    request, units = agreement.request, ChunkUnits(checkpoint)
    rounds = plan_reading(checkpoint.outline, request, agreement.machines, agreement.memory, units)
    transfers = [Transfer(each.moves, each.stages, call.group) for each in rounds]
    num_bytes = max((transfer.wire_bytes for transfer in transfers), default=0)
    wire = torch.empty(num_bytes, dtype=torch.uint8, device=wire_device(call.group, agreement.devices))
    targets: defaultdict[str, list[LocalParts]] = defaultdict(list)
    for source, tensors in request.tensors.items():
        for tensor in tensors:
            if asked.matching.sources.get(tensor.target) == source:
                targets[source].append(asked.live.local(tensor.target))
    own_keys = {key for key, places in request.objects.items() if places == (place,)}
    reader = ChunkReader(checkpoint, rounds, place, "cuda" in asked.live.devices)
    raw_items = {**agreement.items, **_read_items(checkpoint, own_keys)}
    items = {}
    for key, source in asked.matching.sources.items():
        if source in raw_items:
            items[key] = load_plain(source, raw_items[source])
    return _Prepared(rounds, reader, transfers, wire, items, targets)


def _judge(asked: _Asked, ranks: Sequence[tuple[Sequence[PartialSum], int]] | None) -> int | None:
    """Compare chunks that were read in parts, on the coordinator, and return the bytes that all have read."""
    if ranks is None:
        return None
    judge_sums(asked.checkpoint, chain.from_iterable(sums for sums, _ in ranks), group_ranks(asked.call.group))
    return sum(num_bytes for _, num_bytes in ranks)


def _fill(asked: _Asked, prepared: _Prepared) -> Exception | None:
    """Read elements into the tensors; return this rank's error, as it goes on exchanging.

    Raises:
        LostRankError: another rank was lost.
    """
    failure: Exception | None = None
    for number, transfer in enumerate(prepared.transfers):
        elements: Mapping[str, LocalParts] = {}
        if failure is None:
            try:
                elements = prepared.reader.read(number, prepared.targets)
            except Exception as error:
                failure = error
        failed = transfer.run(elements, asked.live.local, prepared.wire)
        failure = failure or failed
    return failure


def _finish(asked: _Asked, prepared: _Prepared) -> None:
    """Set everything that is not read from chunks."""
    live, matching = asked.live, asked.matching
    # Each element was put in its place once, by this rank or by one that has sent it.
    expected = sum(part.numel() for local in chain.from_iterable(prepared.targets.values()) for part in local.parts)
    placed = prepared.reader.placed + sum(transfer.received_elements for transfer in prepared.transfers)
    if placed != expected:
        raise SourceError(f"{placed} elements were loaded, of {expected}: this is a defect of muonckpt, report it")
    live.zero(matching.zeros)
    live.zero_new_rows()
    live.put(prepared.items, matching.added)


def _outline_digest(outline: Manifest) -> str:
    """Return a digest of what plans follow from."""
    digest = xxhash.xxh3_128()
    for tensor in outline.tensors:
        columns, rows = tensor.chunks.columns, slice(tensor.chunks.start, tensor.chunks.stop)
        files = [columns.names[number] for number in columns.file[rows].tolist()]
        digest.update(repr((tensor.key, tensor.shape, tensor.dtype, tensor.chunks.strides, files)).encode())
        digest.update(repr(((columns.crc32[rows] >= 0).tolist(), columns.payload_length(rows).tolist())).encode())
        digest.update(repr([(box.lo, box.hi) for box in tensor.boxes]).encode())
    digest.update(repr([(blob.key, blob.item.file, blob.item.length) for blob in outline.blobs]).encode())
    return digest.hexdigest()


@called_like(f"{LOAD_LINES}; muonckpt.open(path) reads a checkpoint without a model")
def load(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    allow_extra: bool | Iterable[str] = False,
    fresh: Iterable[str] = (),
    grow: Iterable[str] = (),
    ungrouped: Iterable[str] = (),
    attest: bool = False,
    check: WhenChecked = "while",
    memory: int = STAGING_BYTES,
    process_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load a checkpoint in place into the tensors of ``state_dict``, whatever mesh they are on.  Collective.

    Keys, coverage, shapes, dtypes, momentum conventions and the items of a stock checkpoint are checked on all ranks
    before any tensor is touched.  Each chunk is checked while it is read to where it belongs: an error that is found
    then says that the state dict is unusable.  Ranks of one machine read what they ask for; machines divide what they
    both ask for, and so do ranks that read from an object store.

    Args:
        state_dict: the template, nested as it was saved; other objects with ``load_state_dict`` are called.
        path: a path or a URL of a checkpoint in any format that this package reads, if its keys are those of the
            template.
        allow_extra: True: load only what the template asks for.  Globs of keys, such as ``["lr_scheduler.*"]``, where
            ``*`` matches any characters: leave only these.  Other keys that only one side has are an error; but
            options that a converted checkpoint lacks stay as the running optimizer has them, with a warning.
        fresh: globs of parameters' names as the optimizer's state has them, such as ``["lm_head.*"]``; the same on
            every rank.  The state of such parameters becomes zeros, the number of their steps too; their options are
            those of their group: the checkpoint's, unless no saved state fits the group.  A weight of such a name,
            which is the last part of its path, is loaded where both sides have it and keeps its values where the
            checkpoint has none.  State that only the checkpoint has is dropped.
        grow: globs of names, such as ``["embed.weight", "lm_head.weight"]``, of parameters that have more rows, which
            is their first dim, than the checkpoint, as after a vocabulary has grown.  The saved rows and their state
            are loaded; the new ones keep their values, and their state becomes zeros.  Equal ones are loaded.
        ungrouped: globs of names of parameters that are in no parameter group of the checkpoint, as where stock DCP
            has kept the groups of one pipeline stage.  Their state is loaded; their options are those of their group.
        attest: at the end compare fingerprints of the tensors in memory with those of the checkpoint
            (docs/guide/live_state.md).
        check: ``"while"``, as above.  ``"before"``: everything is read and checked once before any rank touches a
            tensor, and then loaded: it is read twice.
        memory: bytes of what a rank reads to send it, and again of its exchange buffers; the least that any rank gives
            counts, and 1 MiB at least.

    Returns:
        The result for each parameter, the same on every rank; print it.

    Raises:
        UnavailableError: the file system or the store cannot answer or be read now, which says nothing about it.
        SourceError: it is missing, damaged or does not fit, or a glob matches nothing; lists what differs.
        LayoutError: it has a hole or an overlap, or elements of the state dict share memory: one value would be left.
        AttestError: memory differs from the checkpoint.
        LostRankError: another rank was lost, or did not answer within the time-out of the process group.
        ArgumentError: an argument is not as described, or differs between ranks.
    """
    choices = {"allow_extra": allow_extra, "fresh": fresh, "grow": grow, "ungrouped": ungrouped}
    call = LoadCall(state_dict, path, choices, LOAD, attest, check, process_group, memory)
    loaded = run_load(call)
    last = last_verification(call.place) if is_coordinator(process_group) else None
    if last and last.has_loss:
        warn_on_rank(f"{path} is not whole, and what was loaded of it is: {last.finding}")
    return loaded.report
