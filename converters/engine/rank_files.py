"""Destinations in which every rank of the target has a file."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...algebra.box import Index
from ...algebra.layout import Buffer, TensorLayout
from ...layouts.mesh import Mesh, MeshPlacement, Replicate, mesh_layout
from ...names.errors import TargetError, did_you_mean
from ...programs.signs import COMMON_FILE
from ...record.record import Manifest, StateRecord, entry_keys
from ...store.formats import native
from ...store.formats.torch_save import tensor_item
from ...store.formats.torch_save.stored_zip import MEMBER_ALIGNMENT, aligned
from ...store.io.checksums import Frame
from ...store.io.location import Location
from ...store.reading.dtypes import itemsize
from ..target.topology import ROWS, AxisCut, Target, TargetLayouts
from .container import Arranged, Container, WriteRequest, extended_provenance
from .output_files import (
    ChunkPlan,
    FrameOf,
    OutputChunks,
    OutputFile,
    chunk_plans,
    items_file,
    place_items,
)
from .outputs import OutputItem, OutputTensor

if TYPE_CHECKING:
    from ...layouts.buffers.records import GroupBuffer


LocalBoxes = list[tuple[OutputTensor, ChunkPlan]]
"""The boxes that a rank writes."""


class RankFiles(Container):
    """Tensors laid out by the target, in a file for each rank."""

    of_ranks = True

    def arrange(self, request: WriteRequest) -> Arranged:
        # Layouts say which ranks hold each box, and loads which of them writes it.
        outputs, target = request.outputs, request.target
        layouts = lay_out(target, [output.record for output in outputs.tensors], request.provenance)
        boxes = _boxes_by_rank(outputs.tensors, layouts, target.ranks, self.frame_of)
        files, buffers = self.fill(layouts.buffers, outputs.items, boxes)
        # The provenance tells readers how the tensors were laid out, and when.
        step = {
            "mesh": dict(target.mesh),
            "layout": target.layout,
            "shard": list(map(str, target.rules)),
            "select": list(request.select),
        }
        former_steps = request.provenance.get("resharded", [])
        provenance = extended_provenance(request, "resharded", step, former_steps, buffers)
        return Arranged(tuple(file for file in files if file.length), layouts.recorded, provenance)

    @staticmethod
    @abstractmethod
    def frame_of(dtype: str, shape: Index) -> Frame:
        """Return the bytes stored around elements of a dtype (torch's name) in a box of a shape."""

    @abstractmethod
    def fill(
        self, buffers: Sequence[GroupBuffer], items: Sequence[OutputItem], boxes: Sequence[LocalBoxes]
    ) -> tuple[list[OutputFile], list[dict[str, Any]]]:
        """Return the files, and the flat buffers as the manifest records them.

        Args:
            buffers: the flat buffers that ranks share, if the layout has any.
            boxes: the boxes of each rank.
        """


class DcpFiles(RankFiles):
    """A directory that `torch.distributed.checkpoint` reads, with our manifest.

    Each chunk is an item as torch saves it; non-tensor items are in the first rank's file.
    """

    name = "dcp"

    frame_of = staticmethod(tensor_item.frame)

    def fill(
        self, buffers: Sequence[GroupBuffer], items: Sequence[OutputItem], boxes: Sequence[LocalBoxes]
    ) -> tuple[list[OutputFile], list[dict[str, Any]]]:
        files = []
        for rank, local in enumerate(boxes):  # items lie end to end, each aligned, those that are no tensors first
            name = f"__{rank}_0.distcp"
            rank_items, start = place_items(name, () if rank else items)
            outputs, plans = [output for output, _ in local], [plan for _, plan in local]
            chunks = OutputChunks.end_to_end(name, outputs, plans, start, MEMBER_ALIGNMENT)
            files.append(OutputFile(name, rank_items, chunks=chunks, length=max(aligned(chunks.end), start)))
        return files, [buffer.to_json() for buffer in buffers]

    def describe(self, manifest: Manifest, folder: Location) -> None:
        native.write_native(manifest, folder)


class TorchDistFiles(DcpFiles):
    """A directory that Megatron's `dist_checkpointing` reads, too: docs/formats/torch_dist.md.

    If the source had the common state in a file of its own, where Megatron looks for it, so has the destination.
    """

    name = "torch_dist"

    def fill(
        self, buffers: Sequence[GroupBuffer], items: Sequence[OutputItem], boxes: Sequence[LocalBoxes]
    ) -> tuple[list[OutputFile], list[dict[str, Any]]]:
        files, recorded = super().fill(buffers, [item for item in items if item.key != COMMON_FILE], boxes)
        common = (item for item in items if item.key == COMMON_FILE)
        files += (replace(items_file(COMMON_FILE, [item]), length=item.length) for item in common)
        return files, recorded

    def describe(self, manifest: Manifest, folder: Location) -> None:
        native.write_torch_dist(manifest, folder)


def _boxes_by_rank(
    tensors: Sequence[OutputTensor], layouts: TargetLayouts, ranks: int, frame_of: FrameOf
) -> list[LocalBoxes]:
    """Return the boxes of each rank; a replica is written by the rank with the least to write so far."""
    boxes: list[LocalBoxes] = [[] for _ in range(ranks)]
    loads: dict[Buffer, int] = dict.fromkeys(range(ranks), 0)
    for output in tensors:
        holders = layouts.layouts[output.key].holders
        plans = chunk_plans(output, [replicas[0].box for replicas in holders], frame_of)
        for replicas, plan in zip(holders, plans, strict=True):
            rank = min((fragment.place.buffer for fragment in replicas), key=lambda rank: (loads[rank], rank))
            assert isinstance(rank, int), "the buffers of a target are ranks"
            loads[rank] += plan.box.numel * itemsize(plan.dtype)
            boxes[rank].append((output, plan))
    return boxes


def lay_out(
    target: Target, tensors: Sequence[StateRecord], provenance: Mapping[str, Any] = MappingProxyType({})
) -> TargetLayouts:
    """Lay tensors out on the target.

    Args:
        provenance: of their source.  If it records buffers of the target's layout, in which the same ranks share the
            same tensors, these are used as they are, so that owners do not change.

    Raises:
        TargetError: a rule matches no tensor, or cuts a dim that a matching tensor does not have.
        SourceError: the provenance is damaged.
    """
    for rule in target.rules:
        if not any(fnmatchcase(tensor.key, rule.glob) for tensor in tensors):
            close = did_you_mean(rule.glob, entry_keys(tensors))
            raise TargetError(f"rule {rule} matches none of {len(tensors)} tensors{close}")
    if target.layout != ROWS:
        from ..target.buffer_layouts import lay_out_in_buffers  # not needed for rows

        return lay_out_in_buffers(target, tensors, provenance)
    # Tensors that are cut alike share a mesh and its placements.
    layouts: dict[str, TensorLayout] = {}
    recorded: dict[str, Mapping[str, Any] | None] = {}
    placements: dict[tuple[AxisCut, ...], tuple[MeshPlacement, Mapping[str, Any]]] = {}
    all_axes = tuple((axis, 0) for axis in target.mesh)
    for tensor in tensors:
        if not tensor.shape:
            layouts[tensor.key], recorded[tensor.key] = mesh_layout((), Mesh.of(1), (Replicate(),)), None
            continue
        cuts = target.cuts(tensor, all_axes)
        if cuts not in placements:
            placement = target.placement(cuts)
            placements[cuts] = placement, placement.to_json()
        placement, recorded[tensor.key] = placements[cuts]
        layouts[tensor.key] = mesh_layout(tensor.shape, placement.mesh, placement.placements)
    return TargetLayouts(layouts, recorded)
