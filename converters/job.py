"""What a reshard will do, decided without the data: which boxes go into which file, and where in it.

The way of a tensor: the source's manifest says where its elements are; a *translation* may rename, split or join
tensors, which only makes other layouts of the same buffers; the target says which rank has which boxes; one plan per
tensor says which bytes go where.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..box import Box
from ..errors import DestinationError, SourceError, about
from ..layout import Buffer, TensorLayout, dense
from ..plan import Copy, make_plan
from ..record import Chunk, Extent, Manifest, StateRecord
from ..store import directory
from ..store.dtypes import itemsize
from ..store.formats import format_of
from ..store.stored_zip import ALIGNMENT
from ..store.torch_zip import Frame
from .container import DCP, Container
from .content import Entry, Translate, Wanted, as_they_are
from .target import Target


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor item to write: where it goes (``chunk``), its frame, and the copies that fill it.

    The places of the copies: the source's in a buffer of ``wanted``, the target's in the payload of this item.
    """

    wanted: Wanted
    chunk: Chunk
    frame: Frame
    copies: tuple[Copy, ...]

    @property
    def tensor(self) -> StateRecord:
        return self.wanted.record


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One file to write.  ``length`` in bytes."""

    name: str
    entries: tuple[Entry, ...]
    items: tuple[Item, ...]
    length: int

    @property
    def payload(self) -> int:
        """Bytes of elements in it."""
        return sum(item.frame.payload_length for item in self.items)


@dataclass(frozen=True, slots=True)
class Job:
    """Everything about a reshard that does not need the data.

    Args:
        manifest: of the source, as much of it as is read.
        state: tells whether the source has changed since.
        container: what the files are.
        select: what the tensors and items were chosen by.
        tensors: to write, without their chunks.
        words: each tensor's layout for the manifest, by key; ``buffers`` the flat buffers that these speak of.
    """

    source: Path
    manifest: Manifest
    state: tuple[object, ...]
    target: Target
    container: Container
    select: tuple[str, ...]
    tensors: tuple[StateRecord, ...]
    words: Mapping[str, Mapping[str, Any] | None]
    buffers: tuple[Mapping[str, Any], ...]
    files: tuple[TargetFile, ...]

    @property
    def bytes_to_check(self) -> int:
        """Payload of the source that is used: all of it is checked before."""
        return sum(c.payload.length for t in self.manifest.tensors for c in t.chunks if c.payload)

    @property
    def bytes_to_write(self) -> int:
        """Length of all files."""
        return sum(file.length for file in self.files)

    @property
    def payload_to_write(self) -> int:
        """Bytes of elements in them: as many are read to write them."""
        return sum(file.payload for file in self.files)

    @property
    def reads_avoided(self) -> int:
        """Bytes that need not be read to fill the items, but that a reader of whole chunks, as stock DCP is, would."""
        whole = 0
        for file in self.files:
            for item in file.items:
                chunks, size = item.wanted.chunks, itemsize(item.tensor.dtype)
                read = [copy for copy in item.copies if copy.source.buffer in chunks]
                whole += sum(chunks[buffer].box.numel * size for buffer in {copy.source.buffer for copy in read})
                whole -= sum(copy.box.numel * size for copy in read)
        return whole

    def digest(self) -> str:
        """Equal for two jobs that would write the same files from the same source."""
        whole = hashlib.blake2b(self.manifest.to_json().encode(errors="surrogatepass"), digest_size=16)
        whole.update(repr((self.state, self.target, self.container.name, self.select)).encode(errors="surrogatepass"))
        for file in self.files:
            targets = [(item.tensor.key, item.chunk, item.wanted.made, item.wanted.scale) for item in file.items]
            whole.update(repr((file.name, file.length, file.entries, targets)).encode(errors="surrogatepass"))
        return whole.hexdigest()


def make_job(
    source: Path,
    target: Target,
    select: Sequence[str] = (),
    translate: Translate = as_they_are,
    container: Container = DCP,
) -> Job:
    """Plan to write a checkpoint's tensors as ``target`` says: one file a rank, items without elements in the first.

    Args:
        select: shell patterns; what is to be called a key that fits none of them is not written, and nothing that
            only it needs is read.  Empty: everything.

    Raises:
        SourceError: the source cannot be read.
        TargetError: the target does not fit the tensors, or a pattern fits nothing.
        LayoutError: a tensor of the source has a hole or an overlap.
    """
    manifest = format_of(source).read(source)
    content = translate(manifest).selected(select)
    manifest = content.used(manifest)
    laid = target.lay_out([each.record for each in content.tensors])
    parts: list[list[Part]] = [[] for _ in range(target.ranks)]
    filled = [0] * target.ranks
    for each in content.tensors:
        key, size = each.record.key, itemsize(each.record.dtype)
        holders = laid.layouts[key].holders
        with about(key):
            copies = _copies(each.layout, tuple(replicas[0].box for replicas in holders))
        for replicas, mine in zip(holders, copies, strict=True):
            # Of replicas, that of the rank that has the least to write so far.
            rank = min((filled[_rank(f.place.buffer)], _rank(f.place.buffer)) for f in replicas)[1]
            filled[rank] += replicas[0].box.numel * size
            parts[rank].append((each, replicas[0].box, mine))
    entries = [content.entries, *[()] * (target.ranks - 1)]
    files = [_file(container, rank, entries[rank], mine) for rank, mine in enumerate(parts)]
    return Job(
        source,
        manifest,
        state_of(source, manifest),
        target,
        container,
        tuple(select),
        tuple(each.record for each in content.tensors),
        laid.words,
        laid.buffers,
        tuple(file for file in files if file.length),
    )


def check_destination(source: Path, destination: Path) -> None:
    """Raises:
    DestinationError: something is there already, or it lies inside the source.
    """
    directory.refuse_existing(destination)
    if source.resolve() in destination.resolve().parents:
        raise DestinationError(f"{destination} lies inside the source {source}; choose a place outside of it")


def state_of(source: Path, manifest: Manifest) -> tuple[object, ...]:
    """Which files the source has, how long they are and when they were changed.

    Raises:
        SourceError: one is missing.
    """
    names = {c.item.file for t in manifest.tensors for c in t.chunks} | {b.item.file for b in manifest.blobs}
    folder = source if source.is_dir() else source.parent  # a single file is its own checkpoint
    found = []
    for name in sorted(names):
        try:
            state = (folder / name).lstat()
        except OSError as error:
            raise SourceError(f"cannot read {folder / name}: {error.strerror}") from error
        found.append((name, state.st_ino, state.st_size, state.st_mtime_ns))
    return tuple(found)


@lru_cache(maxsize=65536)
def _copies(source: TensorLayout, boxes: tuple[Box, ...]) -> tuple[tuple[Copy, ...], ...]:
    """For each box the copies that make it, dense from element 0.  Cached: tensors of one geometry share them."""
    target = TensorLayout(source.shape, tuple(dense(box, number) for number, box in enumerate(boxes)))
    copies: defaultdict[Buffer, list[Copy]] = defaultdict(list)
    for copy in make_plan(source, target).copies:
        copies[copy.target.buffer].append(copy)
    return tuple(tuple(copies[number]) for number in range(len(boxes)))


def _rank(buffer: Buffer) -> int:
    assert isinstance(buffer, int), "the buffers of a target are ranks"
    return buffer


Part = tuple[Wanted, Box, tuple[Copy, ...]]
"""A box of a tensor that some rank has, and the copies that make it."""


def _file(container: Container, rank: int, entries: Sequence[Entry], parts: Sequence[Part]) -> TargetFile:
    """Items end to end, each aligned; those that are no tensors first, as DCP does."""
    name = container.file(rank)
    at = 0
    placed = []
    for entry in entries:
        blob = dataclasses.replace(entry.target, item=Extent(name, at, entry.target.item.length))
        placed.append(dataclasses.replace(entry, target=blob))
        at = _aligned(blob.item.end)
    items = []
    for wanted, box, copies in parts:
        frame = container.frame(wanted.record.dtype, box.shape)
        item = Extent(name, at, frame.length)
        payload = Extent(name, at + frame.payload_offset, frame.payload_length)
        items.append(Item(wanted, Chunk(box, item, payload), frame, copies))
        at = _aligned(item.end)
    return TargetFile(name, tuple(placed), tuple(items), at)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
