"""Destinations in which every rank of the target has a file."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ...box import Index
from ...errors import TargetError, did_you_mean
from ...layout import Buffer, TensorLayout
from ...layouts.flat import owned_layout
from ...layouts.mesh import AxisPlacement, Mesh, Replicate, Shard, mesh_layout
from ...record import Manifest, StateRecord
from ...store.formats import native
from ...store.formats.signs import COMMON_FILE
from ...store.formats.torch_save import tensor_item
from ...store.formats.torch_save.stored_zip import MEMBER_ALIGNMENT, aligned
from ...store.io.location import Location
from ...store.reading.dtypes import itemsize
from ..target.topology import ROWS, AxisCut, LaidOut, Target
from .container import Arranged, Container, WriteRequest, extended_provenance
from .output_files import (
    ChunkPlan,
    FrameOf,
    OutputChunks,
    OutputFile,
    PayloadFrame,
    chunk_plans,
    place_items,
)
from .outputs import OutputItem, OutputTensor

if TYPE_CHECKING:
    from ...layouts.buffers.records import GroupBuffer

_frame = lru_cache(maxsize=1024)(tensor_item.frame)  # there are few dtypes and shapes


@dataclass(frozen=True, slots=True)
class LocalBoxes:
    """The boxes that a rank writes, in columns: the tensor of each, and its plan."""

    outputs: list[OutputTensor] = field(default_factory=list)
    plans: list[ChunkPlan] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Filled:
    """The files to write, and the flat buffers as the manifest records them."""

    files: tuple[OutputFile, ...]
    buffers: tuple[Mapping[str, Any], ...]


class RankFiles(Container):
    """Tensors laid out by the target, in a file for each rank."""

    of_ranks: ClassVar[bool] = True

    def arrange(self, request: WriteRequest) -> Arranged:
        outputs, target = request.outputs, request.target
        laid = lay_out(target, [output.record for output in outputs.tensors], request.provenance)
        filled = self.fill(laid.buffers, outputs.items, _by_rank(outputs.tensors, laid, target.ranks, self.frame))
        step = {
            "mesh": dict(target.mesh),
            "layout": target.layout,
            "shard": list(map(str, target.rules)),
            "select": list(request.select),
        }
        earlier = request.provenance.get("resharded", [])
        files = tuple(file for file in filled.files if file.length)
        return Arranged(files, laid.recorded, extended_provenance(request, "resharded", step, earlier, filled.buffers))

    @abstractmethod
    def frame(self, dtype: str, shape: Index) -> PayloadFrame:
        """Return what is stored around elements of this dtype (torch's name) in a box of this shape."""

    @abstractmethod
    def fill(self, buffers: Sequence[GroupBuffer], items: Sequence[OutputItem], boxes: Sequence[LocalBoxes]) -> Filled:
        """Decide on the files.

        Args:
            buffers: the flat buffers that ranks share, if the layout has any.
            items: the non-tensor items.
            boxes: the boxes of each rank, in the order of the ranks.
        """


class DcpFiles(RankFiles):
    """A directory that `torch.distributed.checkpoint` reads, with our manifest.

    Each chunk is an item as torch saves it; non-tensor items are in the first rank's file.
    """

    name: ClassVar[str] = "dcp"

    def frame(self, dtype: str, shape: Index) -> PayloadFrame:
        return _frame(dtype, shape)

    def fill(self, buffers: Sequence[GroupBuffer], items: Sequence[OutputItem], boxes: Sequence[LocalBoxes]) -> Filled:
        files = (
            _dcp_file(f"__{rank}_0.distcp", () if rank else items, local_boxes)
            for rank, local_boxes in enumerate(boxes)
        )
        return Filled(tuple(files), tuple(buffer.to_json() for buffer in buffers))

    def describe(self, manifest: Manifest, folder: Location) -> None:
        native.write_native(manifest, folder)


class TorchDistFiles(DcpFiles):
    """A directory that Megatron's `dist_checkpointing` reads, too: docs/formats/torch_dist.md.

    If the source had the common state in a file of its own, where Megatron looks for it, so has the destination.
    """

    name: ClassVar[str] = "torch_dist"

    def fill(self, buffers: Sequence[GroupBuffer], items: Sequence[OutputItem], boxes: Sequence[LocalBoxes]) -> Filled:
        filled = super().fill(buffers, [item for item in items if item.key != COMMON_FILE], boxes)
        common = [item for item in items if item.key == COMMON_FILE]
        none = OutputChunks.end_to_end(COMMON_FILE, (), ())
        files = (OutputFile(COMMON_FILE, place_items(COMMON_FILE, [item])[0], none, item.length) for item in common)
        return Filled((*filled.files, *files), filled.buffers)

    def describe(self, manifest: Manifest, folder: Location) -> None:
        native.write_torch_dist(manifest, folder)


def _dcp_file(name: str, items: Sequence[OutputItem], boxes: LocalBoxes) -> OutputFile:
    """Lay items end to end, each aligned; non-tensor items come first, as in DCP."""
    placed, start = place_items(name, items)
    chunks = OutputChunks.end_to_end(name, boxes.outputs, boxes.plans, start, MEMBER_ALIGNMENT)
    return OutputFile(name, placed, chunks, max(aligned(chunks.end), start))


def _by_rank(tensors: Sequence[OutputTensor], laid: LaidOut, ranks: int, frame_of: FrameOf) -> list[LocalBoxes]:
    """Return the boxes of each rank.  Of replicas, the rank with the least to write so far writes one."""
    boxes = [LocalBoxes() for _ in range(ranks)]
    written = [0] * ranks
    for output in tensors:
        holders = laid.layouts[output.key].holders
        plans = chunk_plans(output, [replicas[0].box for replicas in holders], frame_of)
        for replicas, plan in zip(holders, plans, strict=True):
            rank = min((written[_rank(f.place.buffer)], _rank(f.place.buffer)) for f in replicas)[1]
            written[rank] += plan.box.numel * itemsize(plan.dtype)
            boxes[rank].outputs.append(output)
            boxes[rank].plans.append(plan)
    return boxes


def _rank(buffer: Buffer) -> int:
    assert isinstance(buffer, int), "the buffers of a target are ranks"
    return buffer


def lay_out(
    target: Target, tensors: Sequence[StateRecord], provenance: Mapping[str, Any] = MappingProxyType({})
) -> LaidOut:
    """Lay these tensors out on the target.

    Args:
        provenance: of their source.  If it records buffers of the target's layout, in which the same ranks share the
            same tensors, these buffers are used as they are, so that owners do not change.

    Raises:
        TargetError: a rule matches no tensor, or cuts a dim that a matching tensor does not have.
        SourceError: the provenance is damaged.
    """
    for rule in target.rules:
        if not any(fnmatchcase(tensor.key, rule.glob) for tensor in tensors):
            close = did_you_mean(rule.glob, [tensor.key for tensor in tensors])
            raise TargetError(f"rule {rule} matches none of {len(tensors)} tensors{close}")
    if target.layout == ROWS:
        return _in_rows(target, tensors)
    from ..target.buffer_layouts import lay_out_in_buffers  # not needed for rows

    return lay_out_in_buffers(target, tensors, provenance)


def _in_rows(target: Target, tensors: Sequence[StateRecord]) -> LaidOut:
    layouts: dict[str, TensorLayout] = {}
    recorded: dict[str, Mapping[str, Any] | None] = {}
    grids: dict[tuple[AxisCut, ...], tuple[Mesh, tuple[AxisPlacement, ...], Mapping[str, Any]]] = {}
    all_axes = tuple((axis, 0) for axis in target.mesh)
    for tensor in tensors:
        if not tensor.shape:
            layouts[tensor.key], recorded[tensor.key] = owned_layout((), 0), None
            continue
        cuts = target.cuts(tensor, all_axes)
        if cuts not in grids:
            grids[cuts] = _grid(target, cuts)
        mesh, placements, recorded[tensor.key] = grids[cuts]
        layouts[tensor.key] = mesh_layout(tensor.shape, mesh, placements)
    return LaidOut(layouts, recorded)


def _grid(target: Target, cuts: Sequence[AxisCut]) -> tuple[Mesh, tuple[AxisPlacement, ...], Mapping[str, Any]]:
    """Return the mesh and the placements of tensors with these cuts, and both as JSON data."""
    mesh, axes = target.grid(cuts)
    placements: list[AxisPlacement] = [Shard(dim) for _, dim in cuts]
    placements += [Replicate()] * (len(axes) - len(cuts))
    recorded = {
        "algorithm": "mesh",
        "version": 1,
        "mesh": list(mesh.shape),
        "axes": list(axes),
        "ranks": list(mesh.ranks),
        "placements": list(map(str, placements)),
    }
    return mesh, tuple(placements), recorded
