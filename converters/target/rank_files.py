"""Files of ranks: every rank of a target has one, which holds what is the rank's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from ...box import Box
from ...layout import Buffer
from ...plan import Copy
from ...record import Chunk, Extent, Manifest
from ...store.formats import native
from ...store.formats.dcp.directory import COMMON_FILE
from ...store.formats.megatron import torch_dist
from ...store.formats.torch_save import tensor_item
from ...store.formats.torch_save.stored_zip import aligned
from ...store.io.location import Location
from ...store.reading.dtypes import itemsize
from ..engine.output_files import Arranged, OutputChunk, OutputFile, WriteRequest, place_items
from ..engine.outputs import OutputItem, OutputTensor
from .container import Container, extended_provenance
from .layouts import lay_out
from .topology import LaidOut

if TYPE_CHECKING:
    from ...layouts.buffers.group_buffer import GroupBuffer

_frame = lru_cache(maxsize=1024)(tensor_item.frame)  # few dtypes and shapes


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of a tensor that some rank has, and the copies that make it."""

    output: OutputTensor
    box: Box
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """The files to write, and the flat buffers used, as the manifest records them."""

    files: tuple[OutputFile, ...]
    buffers: tuple[Mapping[str, Any], ...]


class RankFiles(Container):
    """Everything where the target says, in files of its ranks."""

    of_ranks: ClassVar[bool] = True

    def arrange(self, task: WriteRequest) -> Arranged:
        outputs, target = task.outputs, task.target
        laid = lay_out(target, [output.record for output in outputs.tensors], task.provenance)
        filled = self.fill(laid.buffers, outputs.items, _by_rank(outputs.tensors, laid, target.ranks))
        step = {
            "mesh": dict(target.mesh),
            "layout": target.layout,
            "shard": list(map(str, target.rules)),
            "select": list(task.select),
        }
        earlier = task.provenance.get("resharded", [])
        files = tuple(file for file in filled.files if file.length)
        return Arranged(files, laid.words, extended_provenance(task, "resharded", step, earlier, filled.buffers))

    @abstractmethod
    def fill(
        self, buffers: Sequence[GroupBuffer], items: Sequence[OutputItem], boxes: Sequence[Sequence[LocalBox]]
    ) -> Filled:
        """Make the files.

        Args:
            buffers: the flat buffers that ranks share, if the layout has any.
            items: what is no tensor.
            boxes: what each rank has, in the order of the ranks.
        """


class DcpFiles(RankFiles):
    """A directory that `torch.distributed.checkpoint` reads, with our manifest.

    Each chunk is an item as torch saves it; what is no tensor is in the first rank's file.
    """

    name: ClassVar[str] = "dcp"

    def fill(
        self, buffers: Sequence[GroupBuffer], items: Sequence[OutputItem], boxes: Sequence[Sequence[LocalBox]]
    ) -> Filled:
        first: list[Sequence[OutputItem]] = [items, *[()] * (len(boxes) - 1)]
        files = (_items_of(f"__{rank}_0.distcp", first[rank], mine) for rank, mine in enumerate(boxes))
        return Filled(tuple(files), tuple(buffer.to_json() for buffer in buffers))

    def describe(self, manifest: Manifest, folder: Location) -> None:
        native.write_native(manifest, folder)


class TorchDistFiles(DcpFiles):
    """A directory that Megatron's `dist_checkpointing` reads as well: docs/formats/torch_dist.md.

    The common state stays where Megatron looks for it, if the source had it in a file of its own.
    """

    name: ClassVar[str] = "torch_dist"

    def fill(
        self, buffers: Sequence[GroupBuffer], items: Sequence[OutputItem], boxes: Sequence[Sequence[LocalBox]]
    ) -> Filled:
        inside = super().fill(buffers, [item for item in items if item.key != COMMON_FILE], boxes)
        common = [item for item in items if item.key == COMMON_FILE]
        files = (OutputFile(COMMON_FILE, place_items(COMMON_FILE, [item])[0], (), item.length) for item in common)
        return Filled((*inside.files, *files), inside.buffers)

    def describe(self, manifest: Manifest, folder: Location) -> None:
        torch_dist.write_torch_dist(manifest, folder)


def _items_of(name: str, items: Sequence[OutputItem], boxes: Sequence[LocalBox]) -> OutputFile:
    """Items end to end, each aligned; those that are no tensors first, as DCP does."""
    placed, end = place_items(name, items)
    chunks = []
    for local in boxes:
        frame = _frame(local.output.record.dtype, local.box.shape)
        item = Extent(name, end, frame.length)
        payload = Extent(name, item.offset + frame.payload_offset, frame.payload_length)
        chunks.append(OutputChunk(local.output, Chunk(local.box, item, payload), frame, local.copies))
        end = aligned(item.end)
    return OutputFile(name, placed, tuple(chunks), end)


def _by_rank(tensors: Sequence[OutputTensor], laid: LaidOut, ranks: int) -> list[list[LocalBox]]:
    """What each rank has.  Of replicas, that of the rank that has the least to write so far is written."""
    boxes: list[list[LocalBox]] = [[] for _ in range(ranks)]
    written = [0] * ranks
    for output in tensors:
        holders = laid.layouts[output.key].holders
        copies = output.copies([replicas[0].box for replicas in holders])
        for replicas, mine in zip(holders, copies, strict=True):
            box = replicas[0].box
            rank = min((written[_rank(f.place.buffer)], _rank(f.place.buffer)) for f in replicas)[1]
            written[rank] += box.numel * itemsize(output.record.dtype)
            boxes[rank].append(LocalBox(output, box, mine))
    return boxes


def _rank(buffer: Buffer) -> int:
    assert isinstance(buffer, int), "the buffers of a target are ranks"
    return buffer
