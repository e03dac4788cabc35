"""What a reshard will do, decided without the data: which boxes go into which file, and where in it.

The way of a tensor: the source's manifest says where its elements are; a *translation* may rename, split or join
tensors, which only makes other layouts of the same buffers; the target says which rank has which boxes; one plan per
tensor says which bytes go where.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..box import Box
from ..errors import DestinationError, about
from ..layout import Buffer, TensorLayout, dense
from ..plan import Copy, make_plan
from ..record import Manifest, StateRecord
from ..store import directory
from ..store.dtypes import itemsize
from ..store.formats import format_of
from ..store.regular import open_regular
from ..store.remote import Location, at_each
from .container import DCP, Container
from .content import Translate, as_they_are
from .files import Part, TargetFile
from .target import Target


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
        left_out, notes: as `Content` has them.
    """

    source: Location
    manifest: Manifest
    state: tuple[object, ...]
    target: Target
    container: Container
    select: tuple[str, ...]
    tensors: tuple[StateRecord, ...]
    words: Mapping[str, Mapping[str, Any] | None]
    buffers: tuple[Mapping[str, Any], ...]
    files: tuple[TargetFile, ...]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

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
        for each in {id(item.wanted): item.wanted for file in self.files for item in file.items}.values():
            places = (each.layout.fragments, [(buffer, chunk.item) for buffer, chunk in each.chunks.items()])
            whole.update(repr((each.record.key, places, each.made, each.scale)).encode(errors="surrogatepass"))
        for file in self.files:
            targets = [(item.tensor.key, item.chunk) for item in file.items]
            whole.update(repr((file.name, file.length, file.entries, targets)).encode(errors="surrogatepass"))
        return whole.hexdigest()


def make_job(
    source: Location,
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
    laid = target.lay_out([each.record for each in content.tensors], manifest.provenance)
    parts: list[list[Part]] = [[] for _ in range(target.ranks)]
    written = [0] * target.ranks
    for each in content.tensors:
        key, size = each.record.key, itemsize(each.record.dtype)
        holders = laid.layouts[key].holders
        with about(key):
            copies = _copies(each.layout, tuple(replicas[0].box for replicas in holders))
        for replicas, mine in zip(holders, copies, strict=True):
            # Of replicas, that of the rank that has the least to write so far.
            rank = min((written[_rank(f.place.buffer)], _rank(f.place.buffer)) for f in replicas)[1]
            written[rank] += replicas[0].box.numel * size
            parts[rank].append((each, replicas[0].box, mine))
    filled = container.fill(laid.buffers, content.entries, parts)
    return Job(
        source,
        manifest,
        state_of(source, manifest),
        target,
        container,
        tuple(select),
        tuple(each.record for each in content.tensors),
        laid.words,
        filled.buffers,
        filled.files,
        content.left_out,
        content.notes,
    )


def check_destination(source: Location, destination: Location) -> None:
    """Raises:
    DestinationError: something is there already, or it lies inside the source.
    """
    directory.refuse_existing(destination)
    if source.resolve() in destination.resolve().parents:
        raise DestinationError(f"{destination} lies inside the source {source}; choose a place outside of it")


def state_of(source: Location, manifest: Manifest) -> tuple[object, ...]:
    """Which files the source has, how long they are and when they were changed.

    Raises:
        SourceError: one is missing.
    """
    names = {c.item.file for t in manifest.tensors for c in t.chunks} | {b.item.file for b in manifest.blobs}
    folder = source if source.is_dir() else source.parent  # a single file is its own checkpoint

    def state(name: str) -> tuple[object, ...]:
        with open_regular(folder / name) as file:
            return name, *file.state

    return tuple(at_each(folder, state, sorted(names)))


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
