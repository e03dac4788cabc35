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
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash

from ..names.errors import DestinationError, SourceError, warn_on_rank
from ..programs.signs import METADATA_FILE
from ..record.record import MANIFEST_FILE, Extent
from ..store.formats import native
from ..store.io import publish
from ..store.io.checksums import xxh3_128
from ..store.io.new_file import Writing, create_file, write_synced
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
        of: each rank's node, by its place in the group; nodes are numbered in the order of their first ranks.
        partners: the rank to which each rank sends its file, on the next node; None if there is one node.
        here: the place of this rank.
    """

    of: tuple[int, ...]
    partners: tuple[int | None, ...]
    here: int

    @classmethod
    def sharing(cls, folder: Path, process_group: dist.ProcessGroup | None) -> Nodes:
        """Make the folder on each node, and ask all ranks for theirs: one gather.

        Raises:
            DestinationError: a folder cannot be made.
        """

        def identity() -> tuple[str, int, int]:
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
            status = folder.stat()
            return _BOOT.read_text(), status.st_dev, status.st_ino

        numbers: dict[object, int] = {}
        directories = gather_on_all(process_group, DestinationError, identity)
        of = [numbers.setdefault(directory, len(numbers)) for directory in directories]
        return cls.numbered(of, place_in(process_group)[0])

    @classmethod
    def numbered(cls, of: Sequence[int], here: int) -> Nodes:
        members: defaultdict[int, list[int]] = defaultdict(list)
        partners: list[int | None] = []
        for place, node in enumerate(of):
            members[node].append(place)
        seen: defaultdict[int, int] = defaultdict(int)
        for node in of:
            others = members[(node + 1) % len(members)]
            partners.append(None if len(members) == 1 else others[seen[node] % len(others)])
            seen[node] += 1
        return cls(tuple(of), tuple(partners), here)

    @property
    def leads(self) -> bool:
        """True on the first rank of each node, which looks after its folder."""
        return self.of.index(self.of[self.here]) == self.here


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
            if self._nodes.leads:
                publish.discard(self._staged)
            raise

    def _write(self, state: Callable[[], LiveState]) -> None:
        live, plan, _ = agreed(self._group, self._plans, state, lambda: {"step": self._name.step}, lambda: None)
        here, own = self._nodes.here, self._staged / rank_file(self._nodes.here)
        receipt = b""

        def write() -> int:
            nonlocal receipt
            if self._nodes.leads:  # a run that went back has given up what came after
                remove_copies(self._folder, lambda name: name is None or name.step > self._name.step, self._staged)
            self._staged.mkdir(parents=True, exist_ok=True)
            receipt = write_share(live, plan.share, own, self._progress)
            return own.stat().st_size if own.exists() else 0

        sizes = gather_on_all(self._group, DestinationError, self._with_room(write))
        failure, sent = self._send(sizes)
        received = {place: size for place, size in enumerate(sizes) if size and self._nodes.partners[place] == here}

        def answer() -> tuple[bytes, Mapping[int, str]]:
            if failure is not None:
                raise failure
            arrived = {place: digest_of(self._staged, rank_file(place), size) for place, size in received.items()}
            return receipt, {here: sent, **arrived}

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

        def publish_here() -> None:
            if self._nodes.leads:
                for name, text in texts.items():
                    if not (self._staged / name).exists():
                        write_synced(self._staged / name, text)
                publish.publish(self._staged, self._folder / str(self._name))

        gather_on_all(self._group, DestinationError, publish_here)
        if self._nodes.leads:  # now every node has it
            remove_copies(self._folder, lambda name: name != self._name)

    def _with_room(self, work: Callable[[], T]) -> Callable[[], T]:
        """Return the same work, whose error says what to do where memory is full."""

        def worked() -> T:
            try:
                return work()
            except (DestinationError, OSError) as error:
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

        return worked

    def _send(self, sizes: Sequence[int]) -> tuple[Exception | None, str]:
        """Send this rank's file to its partner, and receive those of others; every byte travels once.

        Returns an error of this rank, which goes on exchanging, so that the others do not hang, and the digest of what
        it has sent, as `digest_of` gives it.
        """
        here, partners = self._nodes.here, self._nodes.partners
        partner = partners[here]
        digest = xxhash.xxh3_128()
        if partner is None:
            return None, digest.hexdigest()
        origins = [place for place, other in enumerate(partners) if other == here and sizes[place]]
        blocks = [torch.empty(_BAND_BYTES * files, dtype=torch.uint8) for files in (1, len(origins))]
        failure: Exception | None = None
        with ExitStack() as files:
            own, outputs = -1, list[Writing]()
            try:
                if sizes[here]:
                    own = os.open(self._staged / rank_file(here), os.O_RDONLY | os.O_CLOEXEC)
                    files.callback(os.close, own)
                for place in origins:
                    outputs += [files.enter_context(create_file(self._staged / rank_file(place), sizes[place]))]
            except OSError as error:
                failure = error
            for start in range(0, max(sizes), _BAND_BYTES):
                lengths = [min(max(size - start, 0), _BAND_BYTES) for size in sizes]
                give, take = [0] * len(sizes), [0] * len(sizes)
                give[partner] = lengths[here]
                for place in origins:
                    take[place] = lengths[place]
                send, receive = (block[: sum(splits)] for block, splits in zip(blocks, (give, take), strict=True))
                if failure is None and lengths[here]:
                    os.preadv(own, [send.numpy().data], start)
                    digest.update(send.numpy().data)
                exchange(self._group, send, give, receive, take)
                parcels = torch.split(receive, [lengths[place] for place in origins])
                for output, parcel in zip(outputs, parcels, strict=False) if failure is None else ():
                    output.write(parcel.numpy().data, start)
        return failure, digest.hexdigest()


def folders_in(folder: Path) -> list[Path]:
    """Return the folders of copies in that of a run on this node.  Files there are not ours."""
    return [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []


def remove_copies(folder: Path, superfluous: Callable[[StepName | None], bool], spared: Path | None = None) -> None:
    """Remove copies from the folder of a run on this node, and what killed runs have left there, whose name is None."""
    for entry in folders_in(folder):
        if entry != spared and superfluous(StepName.parsed(entry.name)):
            publish.remove(entry, ())


def digest_of(folder: Path, name: str, size: int) -> str:
    """Return the xxh3-128 of a file as it lies in memory, in hex."""
    payloads = Payloads(folder)
    try:
        return xxh3_128(payloads.bands(Extent(name, 0, size)))
    finally:
        payloads.close()


@dataclass(frozen=True, slots=True)
class FoundCopy:
    """A copy, as nodes hold it together.

    Attributes:
        place: its directory on this node, or where that would be.
        step: its step.
        holders: for the first rank of each node that has its manifest, by place in the group, the sizes of the files.
    """

    place: Path
    step: int
    holders: Mapping[int, Mapping[str, int]]

    def __str__(self) -> str:
        return str(self.place)


def found_copies(folder: Path, nodes: Nodes, process_group: dist.ProcessGroup | None) -> list[FoundCopy]:
    """Return the copies of a run, newest first, after removing what killed runs have left.  Collective.

    Warns of copies of other runs.

    Raises:
        SourceError: a folder cannot be read.
    """

    def look() -> tuple[dict[tuple[StepName, str], dict[str, int]], list[str]]:
        if not nodes.leads:
            return {}, []
        remove_copies(folder, lambda name: name is None)
        held = {}
        for entry in folders_in(folder):
            name = StepName.parsed(entry.name)
            assert name is not None, "others have been removed"
            sizes = {file.name: file.stat().st_size for file in entry.iterdir()}
            if MANIFEST_FILE in sizes:
                held[name, xxh3_128([(entry / MANIFEST_FILE).read_bytes()])] = sizes
        return held, [str(other) for other in folder.parent.iterdir() if other.name != folder.name and other.is_dir()]

    holders: defaultdict[tuple[StepName, str], dict[int, Mapping[str, int]]] = defaultdict(dict)
    others: dict[str, None] = {}
    for place, (held, foreign) in enumerate(gather_on_all(process_group, SourceError, look)):
        others |= dict.fromkeys(foreign)
        for copy, sizes in held.items():
            holders[copy][place] = sizes
    if others:
        warn_on_rank(
            f"not of this run, and so not looked at: {', '.join(others)}; copies in memory stay until the machine "
            "starts again, so remove what no run needs",
            RuntimeWarning,
            stacklevel=3,
        )
    return [FoundCopy(folder / str(name), name.step, on) for (name, _), on in sorted(holders.items(), reverse=True)]
