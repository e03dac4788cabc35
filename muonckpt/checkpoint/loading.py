"""Loading a checkpoint into live tensors, on any mesh: all of it, or an error that is the same on all ranks.

The first rank reads and parses what describes the checkpoint.  All ranks agree on what to load, each checks what it is
to read, and then reads it.  An error before that leaves all tensors as they were.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ..names.errors import ADVICE, ArgumentError, DamageError, SourceError, UnseenError, called_like, warn_on_rank
from ..names.keys import key_of
from ..names.resumption import LOAD_LINES, NAMES_OF_GROUPS, Choices, LoadReport, LoadTraffic
from ..names.vocabulary import HISTORY_OPTIONS
from ..record.columns import UNKNOWN
from ..record.record import Extent, Manifest, StateRecord
from ..store.io.limits import gc_paused
from ..store.io.location import Location, Remote, is_there, location, refuse_unseen
from ..store.open_checkpoint import OpenCheckpoint, checked_blob
from ..store.verify.diagnosis import advice_on, diagnosis_by_files, open_to_load, recorded_loss
from .all_ranks import (
    broadcast_from_first,
    decide_on_first,
    exchange,
    gather_on_all,
    group_ranks,
    is_coordinator,
    place_in,
    refuse_differing,
    refuse_mixed_calls,
    unusable,
    wire_device,
)
from .attestation import TensorPrint, attest_loaded
from .chunk_reader import ChunkReader, PartialSum, ReadMemory, RoundElements, judge_sums, whole_chunks
from .joint_state import prove_asked_whole
from .live_state import NO_PARTS, LiveState, LocalParts, RankState, refuse_no_state_dict
from .matching import RankRequest, judge, match
from .optimizer_matching import dropped_by_torch
from .reading_plan import JointRequest, ReadingPlan, ReadingRound
from .refusal import LOAD, Refusal
from .resume_proof import LoadedState
from .shared_memory import differing_ties, tied_origins
from .storable import refuse_code
from .template import LoadTemplate, Matching, Stored, joint_sources
from .transfer import Transfer

T = TypeVar("T")

WhenChecked = Literal["before", "while"]

KEPT_BYTES = 4 << 30
"""Bytes of a checkpoint that a rank keeps at most between their check and the first write to a tensor, by default.

Where all that it reads fits, each byte is read once; else it is read a second time, and checked the first time.
"""

_MIN_BYTES = 1 << 20
"""Bytes that a rank may read at a time, however little memory is given: fewer would take a call for a few elements."""

_WIRE_BYTES = 32 << 20
"""Bytes of a rank's exchange buffers: more would be fresh memory in each load, which costs more than to send."""

_ROUND_BYTES = 128 << 20
"""Bytes that a rank reads at a time where it cannot keep all of them: the next are read while these are sent."""


@dataclass(frozen=True, slots=True)
class _Question:
    """A rank's question to the first one.

    Attributes:
        arguments: those that have to be the same on all ranks.
        asked: the tensors that it asks for.
        memory: bytes of what it may keep.
        devices: types of devices on which it has tensors.
        outline_digest: of the checkpoint as it sees it.
    """

    arguments: Mapping[str, object]
    request: RankRequest
    asked: RankState
    memory: int
    devices: frozenset[str]
    outline_digest: str


@dataclass(frozen=True, slots=True)
class _Agreement:
    """The first rank's answer; attributes as of `_Question`, of all ranks together."""

    request: JointRequest
    report: LoadReport
    memory: int
    devices: frozenset[str]


_Inbox = tuple[Tensor, Mapping[str, int]]
"""Items that other ranks have sent, end to end, and the length of each."""


@dataclass(frozen=True, slots=True)
class _Checked:
    """A rank's check of what it has read: checksums of parts of chunks, and the bytes so far."""

    sums: Sequence[PartialSum]
    bytes_read: int


@dataclass(eq=False)
class JointLoad:
    """One load, with the arguments of `load`.

    Attributes:
        choices: the arguments of `Choices`, which are checked where an error reaches all ranks.
        call: what the user has called, for errors.
    """

    state_dict: dict[str, Any]
    path: str | os.PathLike[str]
    choices: Mapping[str, Any]
    call: str = LOAD
    attest: bool = False
    check: WhenChecked | None = None
    group: dist.ProcessGroup | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        self._matching: Matching
        self._live: LiveState
        self._checkpoint: OpenCheckpoint
        self._stored: Stored
        self._plan: ReadingPlan
        self._reader: ChunkReader
        self._kept: RoundElements | None = None
        """The elements that this rank has read, if all ranks keep theirs until they are checked."""
        self._whole_chunks: dict[str, dict[int, Extent | None]]
        self._has_closed_items: bool
        self._raw_items: dict[str, bytes] = {}
        self._sources: Mapping[str, str] = {}
        """Keys of tensors of the checkpoint by those that all ranks know them under; on the coordinator alone."""
        self._unloaded_keys: Sequence[str] = ()
        """Keys of the checkpoint that ``allow_extra`` leaves there; on the coordinator alone."""
        self._initialised_keys: Sequence[str] = ()
        self._grown_keys: Sequence[str] = ()
        """Keys of weights that the checkpoint lacks, and of tensors of which it lacks rows; likewise."""

    def _check_arguments(self) -> None:
        refuse_no_state_dict(self.state_dict, "to load into")
        _ = self._place, self._choices

    @cached_property
    def _place(self) -> Location:
        return location(self.path, SourceError)

    @cached_property
    def _choices(self) -> Choices:
        """The checked arguments; made once, as globs may come from an iterator."""
        if self.check not in (None, "before", "while"):
            raise ArgumentError(f"check is 'before', 'while' or None; got {self.check!r}")
        if self.memory is not None and (type(self.memory) is not int or self.memory < 1):
            raise ArgumentError(f"memory is a number of bytes, at least 1, or None; got {self.memory!r}")
        return Choices.of(**self.choices)

    def run(self) -> LoadReport:
        """Load in place, or fail on all ranks with one error; tell of doubts."""
        refuse_mixed_calls(self.group, "load")
        try:
            report, matching = self._load(), self._matching
        except (DamageError, UnseenError) as error:  # on all ranks
            if ADVICE in str(error):
                raise
            if isinstance(error, UnseenError) and not broadcast_from_first(self.group, self._has_lost_files):
                raise UnseenError(f"{error}. The first rank does: give a path that all nodes mount alike") from error
            advice = broadcast_from_first(self.group, lambda: advice_on(self._place))
            raise DamageError(str(error), advice) from error
        if matching.own_options:
            kept_options = "; ".join(matching.own_options)
            warn_on_rank(f"{self.path} does not say options, which stay as the running optimizer's: {kept_options}")
        for doubt in matching.doubts:
            warn_on_rank(f"{self.path}: {doubt}")
        if dropped_options := dropped_by_torch(matching.added):
            warn_on_rank(
                f"{self.path} has {', '.join(dropped_options)}, which torch's set_state_dict drops from a flattened "
                "state dict, because the running optimizer's groups have no such option; a scheduler would then begin "
                "at the loaded lr: give the groups that option, of any value, before get_state_dict (a scheduler that "
                "is made then does), or load a nested state dict",
            )
        return report

    @gc_paused()
    def _load(self) -> LoadReport:
        # 1. The checkpoint is opened once, and all ranks hear what all of them ask for.
        opened = self._open_once()
        agreement = decide_on_first(self.group, SourceError, lambda: self._ask(*opened()), self._answer)
        # 2. Each byte is read by one rank, and checked, before any rank writes.
        if self._has_closed_items:
            self._open_together(agreement)
        decide_on_first(self.group, SourceError, lambda: self._seen(lambda: self._read(agreement)), self._judge)
        # 3. Elements go to the ranks that asked for them.
        with unusable('; check="before" finds damage before any tensor is touched'):
            device = wire_device(self.group, agreement.devices)
            inbox = self._exchange_items(agreement.request.objects, device)
            failure = self._fill(device)
            bytes_read = decide_on_first(self.group, SourceError, lambda: self._finish(inbox, failure), self._judge)
        if self.attest:
            with unusable():
                attest_loaded(self.state_dict, self._checkpoint, self._sources, self._matching.rows, self.group)
        self._checkpoint.close()
        return replace(agreement.report, traffic=LoadTraffic(bytes_read, self._plan.bytes_sent, self._passes))

    def rehearse(self, checkpoint: OpenCheckpoint) -> tuple[Matching, LoadReport, str]:
        """Match as a load does, on this rank alone, and return the error that a load would raise, or ""."""
        question = self._ask(checkpoint, "")
        matching, report = judge([question.request], self._stored, self._choices)
        return matching, report, "" if matching.fits else self._refusal(matching)

    @property
    def loaded_state(self) -> LoadedState:
        """What was loaded, after `run`: the recorded fingerprints of tensors are on the coordinator."""
        tensors = self._checkpoint.tensors
        stored = {key: tensors[source] for key, source in self._sources.items() if source in tensors}
        prints = {
            key: TensorPrint(tensor.shape, tensor.dtype, tensor.fingerprint)
            for key, tensor in stored.items()
            if tensor.fingerprint is not None and key not in self._grown_keys
        }
        loaded_keys = [*self._matching.sources, *map(key_of, self._matching.added)]
        provenance = self._checkpoint.outline.provenance
        return LoadedState.of(
            self._live, loaded_keys, prints, provenance, self._unloaded_keys, self._initialised_keys, self._grown_keys
        )

    def _open_once(self) -> Callable[[], tuple[OpenCheckpoint, str]]:
        """Open the checkpoint on the first rank, and send it to the others where they can use it.

        They cannot with readers that cannot be sent, such as those of a plug-in; and not with elements that have no
        checksum and lie where only the description says: a rank that sees another file would take whatever bytes are
        there.

        Returns:
            A function that returns the open checkpoint, and a digest of it as this rank sees it, or "" if it was sent.
            A rank may lack a reader that the first one has: the function is called where its error reaches all ranks.
        """
        opened: list[OpenCheckpoint] = []

        def pack() -> bytes | None:
            self._check_arguments()
            opened.append(open_to_load(self._place))
            columns, elements = opened[0].outline.columns, opened[0].outline.elements
            in_items = columns.payload_length() == UNKNOWN  # their checksums are there, too
            is_checked = columns.has_digest | (columns.crc32 != UNKNOWN) | in_items
            if not dist.is_initialized() or not (is_checked | (elements == 0)).all():
                return None
            try:
                return zlib.compress(pickle.dumps(opened[0]), 1)  # columns are mostly zeros, or alike
            except Exception:  # whatever a reader raises that cannot be pickled
                return None

        packed = broadcast_from_first(self.group, pack)

        def unpack() -> tuple[OpenCheckpoint, str]:
            if not opened:
                refuse_unseen(self._place, f"rank {dist.get_rank()}", SourceError)
            if packed is not None:
                return opened[0] if opened else pickle.loads(zlib.decompress(packed)), ""
            checkpoint = opened[0] if opened else open_to_load(self._place)
            return checkpoint, _outline_digest(checkpoint.outline) if dist.is_initialized() else ""

        return unpack

    def _ask(self, checkpoint: OpenCheckpoint, outline_digest: str) -> _Question:
        """Match this rank's state dict with the checkpoint."""
        self._check_arguments()
        choices = self._choices
        live = self._live = LiveState.of(self.state_dict, "to load into")
        columns = checkpoint.outline.columns
        self._checkpoint, self._whole_chunks = checkpoint, whole_chunks(checkpoint, columns)
        self._has_closed_items = bool((columns.payload_length() == UNKNOWN).any())
        proved = set[object]()
        for tensor in checkpoint.outline.tensors:
            geometry = tensor.shape, id(tensor.boxes), tensor.chunks.strides
            if geometry not in proved:
                tensor.chunk_layout()  # proves that the chunks tile it; no item is opened
                proved.add(geometry)
        self._stored = Stored.of(checkpoint, place_in(self.group))
        template = LoadTemplate.of(live, choices.allow_extra.matches_all)
        matching = self._matching = match(template, self._stored, choices)
        # From here on tensors that have grown are their first rows, as the checkpoint has them.
        self._live = live = live.cut_to(matching.rows)
        asked = RankState((), (), ())
        if matching.fits:
            asked = live.described.boxes({*matching.sources, *matching.zeros})
            self._refuse_overwriting(tied_origins(live, matching.sources, matching.zeros))
        arguments = {"path": str(self._place), **choices.as_arguments(), "attest": self.attest, "check": self.check}
        request = RankRequest(matching, template.optimizers)
        memory = self.memory
        if memory is None:  # a part of what there is, shared with the other ranks of this machine
            memory = min(KEPT_BYTES, available_memory() // (4 * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        memory = max(memory, _MIN_BYTES)
        return _Question(arguments, request, asked, memory, live.devices, outline_digest)

    def _answer(self, ranks: list[_Question]) -> _Agreement:
        """Decide for all ranks, on the coordinator."""
        refuse_differing(self.group, "load", [question.arguments for question in ranks])
        for rank, question in zip(group_ranks(self.group), ranks, strict=True):
            if question.outline_digest != ranks[0].outline_digest:
                raise SourceError(
                    f"rank {rank} sees another checkpoint in {self._place} than the first rank: other "
                    "tensors, chunks or files, or the same in another order. Put the same files there on all nodes; if "
                    "a plug-in reads it, let it list tensors in one order"
                )
        matching, report = judge([question.request for question in ranks], self._stored, self._choices)
        if not matching.fits:
            raise SourceError(self._refusal(matching))
        claimed = matching.covered_keys.union(*(question.request.matching.sources.values() for question in ranks))
        self._unloaded_keys = sorted(
            key
            for key, entry in self._stored.entries.items()
            if key not in claimed
            and self._choices.allow_extra.match(key)
            and entry.path[-1] not in HISTORY_OPTIONS | NAMES_OF_GROUPS
        )
        self._initialised_keys, self._grown_keys = report.kept, sorted(matching.rows)
        self._sources = joint_sources([(question.asked, question.request.matching) for question in ranks])
        asked = [question.asked for question in ranks]
        prove_asked_whole(dict(zip(group_ranks(self.group), asked, strict=True)), self.attest)
        request = JointRequest.of([(question.asked, question.request.matching.sources) for question in ranks])
        devices = frozenset[str]().union(*(question.devices for question in ranks))
        return _Agreement(request, report, min(question.memory for question in ranks), devices)

    def _refuse_overwriting(self, tied: Collection[tuple[str, str]]) -> None:
        """Refuse tensors that differ and would come into one memory: what is copied last would be left of them."""
        records = {tensor.key: tensor for tensor in self._checkpoint.outline.tensors}
        for key, other_key in sorted(tied):
            if _differ(self._checkpoint, (records[key], records[other_key])):
                raise SourceError(differing_ties(key, other_key, self._place))

    def _open_together(self, agreement: _Agreement) -> None:
        """Open this rank's chunks, of which only the items tell whether a part of them is a run of bytes."""
        whole = self._whole_chunks
        while True:
            on_ranks = gather_on_all(
                self.group, SourceError, lambda: self._seen(lambda: self._open_chunks(agreement).strided_chunks)
            )
            strided = frozenset[tuple[str, int]]().union(*on_ranks)
            if all(chunk in whole.get(key, {}) for key, chunk in strided):
                return
            for key, chunk in strided:
                whole.setdefault(key, {}).setdefault(chunk)

    def _seen(self, work: Callable[[], T]) -> T:
        """Return what ``work`` does, and tell files that this rank does not see from those that may be lost.

        Raises:
            UnseenError: this rank does not see a file, of which the first one has to say whether it is there.
        """
        try:
            return work()
        except DamageError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, FileNotFoundError):
                cause = cause.__cause__
            if cause is None or is_coordinator(self.group):
                raise
            raise UnseenError(f"rank {dist.get_rank()} does not see a file: {error}") from error

    def _has_lost_files(self) -> bool:
        return not is_there(self._place) or bool(diagnosis_by_files(self._checkpoint))

    def _open_chunks(self, agreement: _Agreement) -> ChunkReader:
        """Plan who reads what, and open the items of this rank's chunks."""
        outline, (place, num_ranks) = self._checkpoint.outline, place_in(self.group)

        def plan(read_memory: int) -> ReadingPlan:
            sizes = num_ranks, read_memory, _WIRE_BYTES
            return ReadingPlan.of(outline, agreement.request, *sizes, self._whole_chunks)

        # Everything is kept until it has been checked, or read a part at a time.
        self._plan = plan(agreement.memory)
        self._keeps_all = len(self._plan.rounds) <= 1
        if self.check == "while" or not self._keeps_all:
            self._plan = plan(min(agreement.memory, _ROUND_BYTES))
        self._reader = ChunkReader(self._checkpoint, self._plan.rounds, place, self._has_closed_items)
        return self._reader

    def _read(self, agreement: _Agreement) -> _Checked:
        """Read what this rank is to read, once, and check it; or check it alone, where it does not fit into memory."""
        reader = self._reader if self._has_closed_items else self._open_chunks(agreement)
        is_remote = isinstance(self._place, Remote)  # from there nothing is read twice
        checks_before = self.check == "before" or (self.check is None and (self._keeps_all or not is_remote))
        # Items that are not tensors are small: their reader keeps them.
        blobs = {blob.key: blob for blob in self._checkpoint.outline.blobs}
        for key, place in self._plan.object_readers.items():
            if place == place_in(self.group)[0]:
                self._raw_items[key] = checked_blob(self._checkpoint.payloads, blobs[key])
                refuse_code(key, self._raw_items[key])
        self._passes = 2 if checks_before and not self._keeps_all else 1
        if self._passes == 2:
            reader.check()
        elif checks_before and self._plan.rounds:
            self._kept = reader.read(0)
        return _Checked(reader.sums, reader.bytes_read)

    def _judge(self, ranks: list[_Checked]) -> int:
        """Compare chunks that were read in parts, on the coordinator, and return the bytes that all have read."""
        judge_sums(self._checkpoint, chain.from_iterable(checked.sums for checked in ranks))
        return sum(checked.bytes_read for checked in ranks)

    def _fill(self, device: torch.device) -> Exception | None:
        """Move elements into the tensors; return this rank's error, as it goes on exchanging.

        Raises:
            LostRankError: another rank was lost.
        """
        self._reader.sums.clear()
        failure: Exception | None = None
        for of_round, elements_of in zip(self._plan.rounds, self._elements_by_round(), strict=True):
            prepare = partial(self._prepare, of_round, elements_of, device)
            try:
                # A rank that cannot take part in an exchange, for want of memory, would leave the others waiting in it.
                transfer, memory = _prepare_together(self.group, prepare) if of_round.stages else prepare()
            except Exception as error:
                if of_round.stages:  # on all ranks
                    raise
                failure = failure or error
                continue
            transfer.run()
            failure = failure or transfer.failure
            memory.release()
        self._kept = None
        return failure

    def _prepare(
        self, of_round: ReadingRound, elements_of: Callable[[], RoundElements], device: torch.device
    ) -> tuple[Transfer, ReadMemory]:
        """Return the transfer of what this rank has read in a round, and the memory of that."""
        elements, moves, stages = elements_of(), of_round.moves, of_round.stages

        def sources(key: str) -> LocalParts:
            return elements.parts.get(key, NO_PARTS)

        return Transfer(sources, self._live.local, moves, stages, self.group, device), elements.memory

    def _elements_by_round(self) -> Iterator[Callable[[], RoundElements]]:
        """Yield functions that return what this rank has read; the next elements are read while these are exchanged."""
        if (kept := self._kept) is not None:
            yield lambda: kept
        elif self._plan.rounds:
            with ThreadPoolExecutor(1) as thread:
                following = thread.submit(self._reader.read, 0)
                for number in range(1, len(self._plan.rounds)):
                    elements, following = following, thread.submit(self._reader.read, number)
                    yield elements.result
                yield following.result

    def _exchange_items(self, objects: Mapping[str, Sequence[int]], device: torch.device) -> _Inbox | None:
        """Send items that are not tensors from the ranks that have read them to those that ask for them.

        Args:
            objects: the places of the ranks that ask for each.
        """
        place, num_ranks = place_in(self.group)
        lengths = {blob.key: blob.item.length for blob in self._checkpoint.outline.blobs}
        outgoing: list[list[str]] = [[] for _ in range(num_ranks)]
        incoming: list[list[str]] = [[] for _ in range(num_ranks)]
        is_needed = False  # the same on all ranks
        for key, reader in self._plan.object_readers.items():
            if tuple(objects[key]) == (reader,):
                continue
            is_needed = True
            if reader == place:
                for taker in objects[key]:
                    outgoing[taker] += [key] * (taker != place)
            elif place in objects[key]:
                incoming[reader].append(key)
        if not is_needed:
            return None
        splits = [[sum(lengths[key] for key in keys) for keys in by_rank] for by_rank in (outgoing, incoming)]
        wires: list[torch.Tensor] = []

        def prepare() -> None:
            outbox = b"".join(self._raw_items[key] for keys in outgoing for key in keys)
            wires.append(torch.tensor(np.frombuffer(bytearray(outbox), np.uint8), device=device))
            wires.append(torch.empty(sum(splits[1]), dtype=torch.uint8, device=device))

        gather_on_all(self.group, SourceError, prepare)
        exchange(self.group, wires[0], splits[0], wires[1], splits[1])
        return wires[1], {key: lengths[key] for keys in incoming for key in keys}

    def _finish(self, inbox: _Inbox | None, failure: Exception | None) -> _Checked:
        """Set everything that is not read from chunks, after raising this rank's error, if there is one."""
        if failure is not None:
            raise failure
        if inbox is not None:
            raw_items, lengths = inbox
            for key, item in zip(lengths, torch.split(raw_items.cpu(), [*lengths.values()]), strict=True):
                self._raw_items[key] = item.numpy().tobytes()
        self._live.zero(self._matching.zeros)
        self._live.zero_new_rows()
        raw = {key: self._raw_items.get(source) for key, source in self._matching.sources.items()}
        values = {
            key: torch.load(io.BytesIO(item), weights_only=False) for key, item in raw.items() if item is not None
        }
        self._live.put(values, self._matching.added)
        return _Checked(self._reader.sums, self._reader.bytes_read)

    def _refusal(self, matching: Matching) -> str:
        return str(Refusal(matching, self._choices, self._stored, self._live, self._checkpoint, self.call))


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process can still have: as Linux estimates them, or its cgroups limit them.

    Args:
        root: where ``proc`` and ``sys`` are mounted.
    """
    [line] = [line for line in (root / "proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:")]
    available = int(line.split()[1]) << 10
    for limit, usage, statistics, reclaimable in _limited_cgroups(root):
        with suppress(OSError, ValueError):  # a limit of "max" is none
            if (max_bytes := int(limit.read_text())) < 1 << 60:
                counts = dict(count.split() for count in statistics.read_text().splitlines())
                used = int(usage.read_text()) - int(counts.get(reclaimable, 0))  # files that nobody needs any more
                available = min(available, max_bytes - used)
    return max(available, 0)


@lru_cache
def _limited_cgroups(root: Path) -> Sequence[tuple[Path, Path, Path, str]]:
    """Return the files with the limit, the use and the statistics of each cgroup that this process is in.

    Each group on the way to the process's own may have a limit; a container may see its own group alone, as the root.
    """
    files: list[tuple[Path, Path, Path, str]] = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            limit, usage, reclaimable = "memory.max", "memory.current", "inactive_file"
            folder = root / "sys/fs/cgroup"
            if controllers:  # version 1
                limit, usage, reclaimable = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                folder /= "memory"
            if not controllers or "memory" in controllers.split(","):
                folders = accumulate(Path(group).parts[1:], Path.joinpath, initial=folder)
                files += ((each / limit, each / usage, each / "memory.stat", reclaimable) for each in folders)
    return [each for each in files if each[0].exists()]


def _prepare_together(process_group: dist.ProcessGroup | None, prepare: Callable[[], T]) -> T:
    """Return what this rank has prepared; where one rank cannot prepare its own, all raise its error."""
    prepared: list[T] = []
    gather_on_all(process_group, SourceError, lambda: prepared.append(prepare()))
    return prepared[0]


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


def _differ(checkpoint: OpenCheckpoint, pair: tuple[StateRecord, StateRecord]) -> bool:
    """Return whether two tensors are known to differ, by their fingerprints or else by checksums of equal chunks."""
    prints = [tensor.fingerprint for tensor in pair]
    if None not in prints:
        return prints[0] != prints[1]
    chunks, other_chunks = (tensor.chunks for tensor in checkpoint.locate(pair))
    by_box = {(chunk.box, chunk.strides): chunk.crc32 for chunk in chunks}
    sums = [(by_box.get((chunk.box, chunk.strides)), chunk.crc32) for chunk in other_chunks]
    return any(None not in of_chunks and of_chunks[0] != of_chunks[1] for of_chunks in sums)


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
    check: WhenChecked | None = None,
    memory: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load a checkpoint in place into the tensors of ``state_dict``, whatever mesh they are on.  Collective.

    Keys, coverage, shapes, dtypes, momentum conventions and the items of a stock checkpoint are checked on all ranks
    before any tensor is touched, and so are digests and checksums unless ``check`` says otherwise.  Each byte is read
    by one rank and sent to those that ask for it; where that is the same rank, nothing is sent.

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
        grow: globs of names, such as ``["embed.weight", "lm_head.weight"]``, of parameters that have more rows, which
            is their first dim, than the checkpoint, as after a vocabulary has grown.  The saved rows and their state
            are loaded; the new ones keep their values, and their state becomes zeros.
        ungrouped: globs of names of parameters that are in no parameter group of the checkpoint, as where stock DCP
            has kept the groups of one pipeline stage.  Their state is loaded; their options are those of their group.
        attest: at the end compare fingerprints of the tensors in memory with those of the checkpoint
            (docs/guide/live_state.md).
        check: ``"before"``: no rank touches a tensor unless what all of them load is whole.  ``"while"``: each chunk is
            checked when it is read; the error that reports damage says that the state dict is unusable.  None:
            ``"before"``, or ``"while"`` for an object store from which bytes would be read twice.
        memory: bytes that a rank keeps between their check and the first write to a tensor; where what it reads is
            more, it is read twice.  The least that any rank gives counts, and 1 MiB at least.  None: 4 GiB; less
            where a fourth of the memory that is available, within the limits of cgroups and shared by the ranks of the
            machine, is less.

    Returns:
        What was done with which parameters, the same on every rank; print it.

    Raises:
        UnavailableError: the file system or the store cannot answer or be read now, which says nothing about it.
        SourceError: it is missing, damaged or does not fit, or a glob matches nothing; lists what differs.
        LayoutError: it has a hole or an overlap, or elements of the state dict share memory: one value would be left.
        AttestError: what is in memory is not what the checkpoint has.
        LostRankError: another rank was lost, or did not answer within the time-out of the process group.
        ArgumentError: an argument is none of these, or not the same on all ranks.
    """
    choices = {"allow_extra": allow_extra, "fresh": fresh, "grow": grow, "ungrouped": ungrouped}
    report = JointLoad(state_dict, path, choices, LOAD, attest, check, process_group, memory).run()
    if is_coordinator(process_group) and (loss := recorded_loss(location(path, SourceError))):
        warn_on_rank(f"{path} is not whole, and what was loaded of it is: {loss}")
    return report


def load_for(
    call: str,
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    choices: Mapping[str, Any],
    *,
    attest: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[LoadReport, LoadedState]:
    """Load as `load` does, for another call of the user, and return besides what a proof is compared with.

    Args:
        call: its name, for errors.
        choices: arguments of `Choices`.
    """
    joint = JointLoad(state_dict, path, choices, call, attest, None, process_group)
    return joint.run(), joint.loaded_state
