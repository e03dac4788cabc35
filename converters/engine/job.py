"""What a reshard will do, decided without the data: which boxes go into which file, and where in it.

The way of a tensor: the source's manifest says where its elements are; a translation may rename, split or join
tensors, which only makes other layouts of the same buffers; the container says which boxes lie in which file, by what
the target says of ranks if its files are those of ranks; one plan per tensor says which bytes go where.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import DestinationError
from ...record import Extent, Manifest, StateRecord
from ...store.io import publish
from ...store.io.checksums import xxh3_128
from ...store.io.gc_paused import gc_paused
from ...store.io.location import Location, at_each
from ...store.io.regular import open_regular
from ...store.open_checkpoint import OpenCheckpoint
from ...store.reading.dtypes import itemsize
from ..target.container import Container
from ..target.item_file import ItemFile
from ..target.topology import Target
from .output_files import OutputFile, WriteRequest
from .outputs import MakeOutputs


@dataclass(frozen=True, slots=True)
class Job:
    """Everything about a reshard that does not need the data.

    Args:
        manifest: of the source, as much of it as is read.
        state: tells whether the source has changed since.
        container: what the files are.
        select: what the tensors and items were chosen by.
        tensors: to write, without their chunks.
        words, provenance: for the manifest: each tensor's layout, by key; where everything comes from.
        left_out, notes: as `Outputs` has them.
        items: the file with what is no tensor, beside a destination that cannot hold it.
    """

    source: OpenCheckpoint
    manifest: Manifest
    state: tuple[object, ...]
    target: Target
    container: Container
    select: tuple[str, ...]
    tensors: tuple[StateRecord, ...]
    words: Mapping[str, Mapping[str, Any] | None]
    provenance: Mapping[str, Any]
    files: tuple[OutputFile, ...]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    items: ItemFile | None = None

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
    def buffers(self) -> Sequence[Mapping[str, Any]]:
        """The flat buffers that are recorded."""
        return tuple(self.provenance.get("buffers", ()))

    @property
    def reads_avoided(self) -> int:
        """Bytes that need not be read to fill the chunks, but that a reader of whole chunks, as stock DCP is, would."""
        whole = 0
        for file in self.files:
            touched: dict[Extent, int] = {}
            for written in file.chunks:
                chunks, size = written.output.chunks, itemsize(written.tensor.dtype)
                read = [copy for copy in written.copies if copy.source.buffer in chunks]
                whole_chunks = [chunks[copy.source.buffer] for copy in read]
                touched |= {chunk.item: chunk.box.numel * size for chunk in whole_chunks}
                whole -= sum(copy.box.numel * size for copy in read)
            whole += sum(touched.values())
        return whole

    def digest(self) -> str:
        """Equal for two jobs that would write the same files from the same source."""
        return xxh3_128(text.encode(errors="surrogatepass") for text in self._described())

    def _described(self) -> Iterator[str]:
        """All that makes two jobs differ, in parts."""
        yield self.manifest.to_json()
        yield Manifest(self.tensors, (), self.provenance).to_json()
        yield repr((self.state, self.target, self.container.name, self.select, self.items))
        for output in {id(chunk.output): chunk.output for file in self.files for chunk in file.chunks}.values():
            places = (output.layout.fragments, [(buffer, chunk.item) for buffer, chunk in output.chunks.items()])
            yield repr((output.key, places, output.made, output.scale))
        for file in self.files:
            chunks = [(chunk.tensor.key, chunk.stored) for chunk in file.chunks]
            yield repr((file.name, file.length, file.items, chunks))


@gc_paused()
def make_job(
    source: OpenCheckpoint,
    target: Target,
    select: Sequence[str],
    make_outputs: MakeOutputs,
    container: Container,
) -> Job:
    """Plan to write a checkpoint's tensors as ``target`` says, in files as ``container`` makes them.

    Args:
        make_outputs: says what is made of the source.
        select: shell patterns; what is to be called a key that fits none of them is not written, and nothing that
            only it needs is read.  Empty: everything.

    Raises:
        SourceError: the source cannot be read, or the container cannot hold what is in it.
        TargetError: the target does not fit the tensors, or a pattern fits nothing.
        LayoutError: a tensor of the source has a hole or an overlap.
    """
    outputs = make_outputs(source).selected(select)
    manifest = outputs.used(source.manifest)
    name = source.path.resolve().name
    task = WriteRequest(name, manifest.provenance, source.payloads, outputs, target, tuple(select))
    arranged = container.arrange(task)
    return Job(
        source,
        manifest,
        file_states(source.path, manifest),
        target,
        container,
        tuple(select),
        tuple(output.record for output in outputs.tensors),
        arranged.words,
        arranged.provenance,
        arranged.files,
        outputs.left_out,
        outputs.notes,
        arranged.items,
    )


def check_destination(source: Location, destination: Location, container: Container) -> None:
    """Raises:
    DestinationError: something is there already, or it lies inside the source.
    """
    publish.refuse_existing(destination, container.staged(destination))
    if source.resolve() in destination.resolve().parents:
        raise DestinationError(f"{destination} lies inside the source {source}; choose a place outside of it")


def file_states(source: Location, manifest: Manifest) -> tuple[object, ...]:
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
