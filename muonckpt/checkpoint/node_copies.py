"""Copies of a run's state in the host memory of two nodes, outside the processes that train.

A copy is a checkpoint whose files lie apart: each rank's file in the folder of its own node, where it was written, and
in that of the next node, to which it was sent.  Every folder has the descriptions, so all of them together are the
checkpoint, and each is one with lost files.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash

from ..names.errors import DestinationError, SourceError, about, warn_on_rank
from ..programs.signs import METADATA_FILE
from ..record.record import MANIFEST_FILE, Extent, Manifest
from ..store.formats import native
from ..store.io import publish
from ..store.io.checksums import xxh3_128
from ..store.io.limits import gc_paused
from ..store.io.new_file import Writing, create_file, write_synced
from ..store.io.regular import read_text_file
from ..store.reading.payloads import Payloads
from ..store.verify.run import StepName
from .all_ranks import decide_on_first, exchange, gather_on_all, group_ranks, place_in
from .live_state import LiveState
from .saving import AgreedPlans, SaveProgress, agreed, described, write_share
from .whole_plan import rank_file

T = TypeVar("T")

_BAND_BYTES = 8 << 20
"""Bytes of a rank's file that are sent at a time."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a process group's ranks: ranks whose folder is the same directory are on one node.

    Attributes:
        numbers: each rank's node, by its place in the group; nodes are numbered in the order of their first ranks.
        partners: the rank to which each rank sends its file, on the next node; None if there is one node.
        place: that of this rank.
    """

    numbers: tuple[int, ...]
    partners: tuple[int | None, ...]
    place: int

    @classmethod
    def sharing(cls, folder: Path, process_group: dist.ProcessGroup | None) -> Nodes:
        """Make the folder on each node, and ask all ranks for theirs: one gather.

        Raises:
            DestinationError: a folder cannot be made.
        """

        def identity() -> tuple[str, int, int]:
            # Whatever would stop the first copy is told now, before any training.
            try:
                folder.mkdir(0o700, parents=True, exist_ok=True)
                [*folder.iterdir()]
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
            except OSError as error:
                raise DestinationError(
                    f"memory={str(folder)!r} cannot be used on this node: {error.strerror or error}. Another user or "
                    "program may have it: choose a folder of your own in /dev/shm, or none"
                ) from error
            # Containers of one machine may have folders of the same name that are not the same.
            status = folder.stat()
            return _BOOT.read_text(), status.st_dev, status.st_ino

        # Ranks with one directory are on one node.
        number_of: dict[object, int] = {}
        directories = gather_on_all(process_group, DestinationError, identity)
        numbers = tuple(number_of.setdefault(directory, len(number_of)) for directory in directories)
        members: defaultdict[int, list[int]] = defaultdict(list)
        for place, node in enumerate(numbers):
            members[node].append(place)
        # The ranks of a node send to those of the next one in turn.
        partners: list[int | None] = []
        for place, node in enumerate(numbers):
            next_members = members[(node + 1) % len(members)]
            turn = members[node].index(place)
            partners.append(None if len(members) == 1 else next_members[turn % len(next_members)])
        return cls(numbers, tuple(partners), place_in(process_group)[0])

    @property
    def leads(self) -> bool:
        """True on the first rank of each node, which looks after its folder."""
        return self.numbers.index(self.numbers[self.place]) == self.place


class NodeCopy:
    """One copy, made by all ranks together.

    Args:
        folder: that of this run's copies on this node; no other copy to it is under way.
        name: the same on all ranks; no copy had it before.
        provenance, process_group, plans, progress: as for `saving.JointSave`.
    """

    def __init__(
        self,
        folder: Path,
        name: StepName,
        nodes: Nodes,
        provenance: Mapping[str, Any],
        process_group: dist.ProcessGroup | None,
        plans: AgreedPlans,
        progress: SaveProgress,
    ) -> None:
        self._folder, self._name, self._nodes = folder, name, nodes
        self._staged = folder / f".{name}.{name.attempt:012x}.tmp"
        self._provenance = provenance
        self._group = process_group
        self._plans = plans
        self._progress = progress

    def run(self, state: Callable[[], LiveState]) -> None:
        """Copy what ``state`` returns, or fail on all ranks with one error and keep the copy before."""
        try:
            self._write(state)
        except BaseException:
            # The copy before is still there, and this one would only take memory.
            if self._nodes.leads:
                publish.discard(self._staged)
            raise

    def _write(self, state: Callable[[], LiveState]) -> None:
        live, plan, _ = agreed(self._group, self._plans, state, lambda: {"step": self._name.step}, lambda: None)
        this_place, file = self._nodes.place, self._staged / rank_file(self._nodes.place)
        receipt, blocks = b"", list[torch.Tensor]()
        num_origins = self._nodes.partners.count(this_place)

        # 1. Each rank writes its file on its node, and sends it to the next one.

        def write() -> int:
            nonlocal receipt
            # Memory for one band of each file is all that sending takes, however large the files are.
            if self._nodes.partners[this_place] is not None:
                blocks.extend(torch.empty(_BAND_BYTES * files, dtype=torch.uint8) for files in (1, num_origins))
            if self._nodes.leads:  # a run that went back has given up what came after
                remove_copies(self._folder, lambda name: name is None or name.step > self._name.step, self._staged)
            self._staged.mkdir(parents=True, exist_ok=True)
            receipt = write_share(live, plan.share, file, self._progress)
            return file.stat().st_size if file.exists() else 0

        sizes = gather_on_all(self._group, DestinationError, self._with_room(write))
        failure, file_digest = self._send(sizes, blocks)
        origins = [
            place for place, partner in enumerate(self._nodes.partners) if partner == this_place and sizes[place]
        ]

        # 2. The first rank compares what was sent with what has arrived, and describes the copy for all nodes.
        def answer() -> tuple[bytes, Mapping[int, str]]:
            if failure is not None:
                raise failure
            digests = {place: digest_of(self._staged, rank_file(place), sizes[place]) for place in origins}
            return receipt, {this_place: file_digest, **digests}

        def describe(answers: list[tuple[bytes, Mapping[int, str]]]) -> dict[str, bytes]:
            ranks = group_ranks(self._group)
            for place, (_, digests) in enumerate(answers):
                for origin, digest in digests.items():
                    if digest != answers[origin][1][origin]:
                        raise DestinationError(
                            f"the file of rank {ranks[origin]} arrived at rank {ranks[place]} with other bytes"
                        )
            manifest = described(plan, [receipt for receipt, _ in answers], self._provenance)
            native.write_native(manifest, self._staged)
            return {name: (self._staged / name).read_bytes() for name in (MANIFEST_FILE, METADATA_FILE)}

        texts = decide_on_first(self._group, DestinationError, self._with_room(answer), describe)

        # 3. It appears on each node, and the copy before goes when this one is everywhere.
        def publish_on_node() -> None:
            if self._nodes.leads:
                for name, text in texts.items():
                    if not (self._staged / name).exists():
                        write_synced(self._staged / name, text)
                publish.publish(self._staged, self._folder / str(self._name))

        gather_on_all(self._group, DestinationError, publish_on_node)
        if self._nodes.leads:
            remove_copies(self._folder, lambda name: name != self._name)

    def _with_room(self, work: Callable[[], T]) -> Callable[[], T]:
        """Return the same work, whose error says what to do where memory is full."""

        def advised_work() -> T:
            try:
                return work()
            except (DestinationError, OSError) as error:
                # Only a full file system has this cure; any other error goes on as it is.
                cause = error if isinstance(error, OSError) else error.__cause__
                if getattr(cause, "errno", None) != errno.ENOSPC:
                    raise
                memory = self._folder.parent
                free = shutil.disk_usage(memory).free
                raise DestinationError(
                    f"{memory} is full on this node ({free:,} bytes are free now), so step {self._name.step} is not "
                    "copied; the copy before is still there. Each copy takes there what two nodes hold of the state, "
                    "beside the one before: make the file system larger, or remove what other runs have left in it. To "
                    "train on without copies that fail: async_copy(..., on_error='warn')"
                ) from error

        return advised_work

    def _send(self, sizes: Sequence[int], blocks: Sequence[torch.Tensor]) -> tuple[Exception | None, str]:
        """Send this rank's file to its partner, and receive those of others; every byte travels once.

        Args:
            sizes: of the ranks' files, by their places in the group.
            blocks: memory for a band of the file that is sent, and of all that are received.

        Returns:
            An error of this rank, which goes on exchanging, so that the others do not hang; and the digest of what it
            has sent, as `digest_of` gives it.
        """
        this_place, partners = self._nodes.place, self._nodes.partners
        partner = partners[this_place]
        digest = xxhash.xxh3_128()
        if partner is None:
            return None, digest.hexdigest()
        origins = [place for place, other in enumerate(partners) if other == this_place and sizes[place]]
        failure: Exception | None = None
        files, handle, outputs = ExitStack(), -1, list[Writing]()

        def attempt(action: Callable[[], None]) -> None:
            """Act unless something has failed before: an error waits until the others need this rank no more."""
            nonlocal failure
            try:
                if failure is None:
                    action()
            except Exception as error:
                failure = error

        def open_files() -> None:
            nonlocal handle
            if sizes[this_place]:
                handle = os.open(self._staged / rank_file(this_place), os.O_RDONLY | os.O_CLOEXEC)
                files.callback(os.close, handle)
            for place in origins:
                outputs.append(files.enter_context(create_file(self._staged / rank_file(place), sizes[place])))

        def read_band() -> None:
            if os.preadv(handle, [send.numpy().data], start) != len(send):
                raise OSError(errno.EIO, f"{rank_file(this_place)} was cut while it was sent")
            digest.update(send.numpy().data)

        def write_bands() -> None:
            for output, parcel in zip(outputs, parcels, strict=True):
                output.write(parcel.numpy().data, start)

        # All ranks exchange as often as the longest file has bands, so that none waits for another.
        with suppress(OSError), files:  # what closing raises after a failure
            attempt(open_files)
            for start in range(0, max(sizes), _BAND_BYTES):
                # Sizes are known to all, so each rank computes what it sends and gets.
                lengths = [min(max(size - start, 0), _BAND_BYTES) for size in sizes]
                send_lengths, receive_lengths = [0] * len(sizes), [0] * len(sizes)
                send_lengths[partner] = lengths[this_place]
                for place in origins:
                    receive_lengths[place] = lengths[place]
                send, receive = blocks[0][: sum(send_lengths)], blocks[1][: sum(receive_lengths)]
                # The file is read in place, and what arrives is written before the next band overwrites it.
                if len(send):
                    attempt(read_band)
                exchange(self._group, send, send_lengths, receive, receive_lengths)
                parcels = torch.split(receive, [lengths[place] for place in origins])
                attempt(write_bands)
            attempt(files.close)
        return failure, digest.hexdigest()


def folders_in(folder: Path) -> list[Path]:
    """Return the folders in that of a run on this node, without following links.  Files there are not ours.

    Raises:
        OSError: it is no folder, or cannot be read.
    """
    if not os.path.lexists(folder):
        return []
    with os.scandir(folder) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]


def remove_copies(folder: Path, superfluous: Callable[[StepName | None], bool], spared: Path | None = None) -> None:
    """Remove copies from the folder of a run on this node, and what killed runs have left there, whose name is None.

    Warns of those that cannot be removed.

    Raises:
        OSError: as `folders_in`.
    """
    for entry in folders_in(folder):
        if entry != spared and superfluous(StepName.parsed(entry.name)):
            try:
                publish.remove(entry, ())
            except OSError as error:
                warn_on_rank(
                    f"cannot remove {entry}, so it takes memory on this node: {error.strerror or error}",
                    RuntimeWarning,
                )


def digest_of(folder: Path, name: str, size: int) -> str:
    """Return the xxh3-128 of a file as it lies in memory, in hex."""
    payloads = Payloads(folder)
    try:
        return xxh3_128(payloads.bands(Extent(name, 0, size)))
    finally:
        payloads.close()


# --- The copies that nodes have ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CopyOnNodes:
    """A copy, as nodes hold it together.

    Attributes:
        place: its directory on this node, or where that would be.
        name: its step, and the random number that tells it from other copies.
        holders: for the first rank of each node that has its directory, by place in the group, the sizes of the files.
        describer: the place of the first rank whose node has a whole manifest of it.
        provenance: that of this manifest.
    """

    place: Path
    name: StepName
    holders: Mapping[int, Mapping[str, int]]
    describer: int
    provenance: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.name.step

    def __str__(self) -> str:
        return str(self.place)


@dataclass(frozen=True, slots=True)
class _NodePart:
    """The files of a copy on one node by size, and digest and provenance of its manifest, or why it has none."""

    sizes: Mapping[str, int]
    digest: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""

    @classmethod
    @gc_paused()
    def of(cls, folder: Path) -> _NodePart:
        """Look at a copy's directory, which may hold anything: files are read as those of any checkpoint are."""
        sizes: dict[str, int] = {}
        try:
            # Sizes first: files of a copy without a description still serve another node's.
            with os.scandir(folder) as entries:
                sizes |= {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}
            text = read_text_file(folder / MANIFEST_FILE)
            with about(folder / MANIFEST_FILE):
                return cls(sizes, xxh3_128([text]), dict(Manifest.from_json(text).provenance))
        except SourceError as error:
            return cls(sizes, fault=str(error))
        except OSError as error:
            return cls(sizes, fault=f"cannot read {folder}: {error.strerror or error}")


@dataclass(frozen=True, slots=True)
class _NodeFolder:
    """The contents of the memory of one node: parts of copies of a run, folders of other runs, and faults."""

    parts: Mapping[StepName, _NodePart] = field(default_factory=dict)
    foreign: Sequence[str] = ()
    faults: Sequence[str] = ()

    @classmethod
    def of(cls, memory: Path, run: str | None) -> _NodeFolder:
        """Look at a node's folder; never raises, so that what is wrong with one node hides no other's copies."""
        parts: dict[StepName, _NodePart] = {}
        foreign: list[str] = []
        faults: list[str] = []
        folder = memory / (run or "")
        try:
            foreign += [str(other) for other in folders_in(memory) if other.name != run]
            # A copy that was being written when the run was killed never appeared, and is of no use.
            if run is not None:
                remove_copies(folder, lambda name: name is None)
                for entry in folders_in(folder):
                    if name := StepName.parsed(entry.name):
                        parts[name] = _NodePart.of(entry)
        except OSError as error:
            faults.append(f"cannot read {error.filename or folder}: {error.strerror or error}")
        return cls(parts, foreign, faults)


def find_copies(
    memory: Path, run: str | None, nodes: Nodes, process_group: dist.ProcessGroup | None
) -> list[CopyOnNodes]:
    """Find the copies of a run in the memory of nodes, after removing what killed runs have left.  Collective.

    Warns of other runs, and of all that cannot be read: the files of a copy on other nodes may be enough.

    Args:
        memory: the folder of copies on this rank's node.
        run: the name of the run's folder there; None if the run has made no copies.
    """
    folders = gather_on_all(
        process_group, SourceError, lambda: _NodeFolder.of(memory, run) if nodes.leads else _NodeFolder()
    )
    # Parts of one copy are known by its name, which no two copies share.
    ranks = group_ranks(process_group)
    parts: defaultdict[StepName, dict[int, _NodePart]] = defaultdict(dict)
    for place, folder in enumerate(folders):
        for fault in folder.faults:
            _warn(f"{fault}; what is there, on the node of rank {ranks[place]}, is not taken")
        for name, part in folder.parts.items():
            parts[name][place] = part

    # One copy for each description that is whole: where nodes differ in it, digests tell which files belong to which.
    copies: list[CopyOnNodes] = []
    for name, node_parts in sorted(parts.items(), reverse=True):
        path = memory / (run or "") / str(name)
        describers = {part.digest: place for place, part in reversed(node_parts.items()) if part.digest}
        instead = "that of another node is read" if describers else "the copy is not taken"
        for place, part in node_parts.items():
            if part.fault:
                _warn(f"{path} on the node of rank {ranks[place]} has no whole description: {part.fault}; {instead}")
        sizes = {place: part.sizes for place, part in node_parts.items()}
        copies += [CopyOnNodes(path, name, sizes, place, node_parts[place].provenance) for place in describers.values()]
    # Copies of other runs are left alone, but they take memory that this one may need.
    foreign = dict.fromkeys(chain.from_iterable(folder.foreign for folder in folders))
    if foreign:
        _warn(
            f"not of this run, and so not looked at: {', '.join(foreign)}; copies in memory stay until the machine "
            "starts again, so remove what no run needs"
        )
    return copies


def _warn(message: str) -> None:
    warn_on_rank(message, RuntimeWarning)
