"""A DTensor in a file of ``torch.save``, as data: the part that one rank has, and where on the mesh that is.

Sources: ``DTensor``, ``DTensorSpec``, ``DeviceMesh`` and the placements of torch 2.4 to 2.13, whose fields are pickled
as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....box import Index
from ....errors import SourceError
from ....layouts.mesh import AxisPlacement, Replicate, Shard, StridedShard
from ....record import Chunk
from ..torch_save.inert_pickle import Global, Record, expect, sequence, sizes_of
from ..torch_save.torch_file import WITH_TYPE, TorchFile

_WRAPPER = "torch._utils _rebuild_wrapper_subclass"
_DTENSOR = frozenset(
    f"torch.distributed.{module} DTensor" for module in ("tensor", "tensor._api", "_tensor", "_tensor.api")
)
_PLACEMENTS = ("torch.distributed.tensor.placement_types ", "torch.distributed._tensor.placement_types ")


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank has of a tensor of global ``shape``.

    Attributes:
        sizes: of the mesh's axes.
        coordinate: of the rank on the mesh.
        placements: one for each axis.
        local: the chunk of the rank's own elements, whose box begins at 0.
    """

    dtype: str
    shape: Index
    sizes: Index
    coordinate: Index
    placements: tuple[AxisPlacement, ...]
    local: Chunk


def is_dtensor(value: object) -> bool:
    """Whether a part of a pickle stands for a DTensor."""
    match value:
        case Record(kind=kind, args=(Global() as call, Global() as own, *_)):
            return kind == WITH_TYPE and call == _WRAPPER and own in _DTENSOR
    return False


def rank_part(file: TorchFile, value: object) -> RankPart:
    """The part that a DTensor in a file stands for.

    Raises:
        SourceError: it is not a DTensor of shards and replicas, or what it says of itself is contradictory.
    """
    match value:
        case Record(args=(_, _, _, (_, dict(state)))) if is_dtensor(value):
            spec = _fields(state.get("_spec"))
        case _:
            raise SourceError("expected a DTensor, found something else")
    dtype, local = file.chunk(state.get("_local_tensor"))
    mesh, meta = _fields(spec.get("mesh")), expect(Record, spec.get("tensor_meta"))
    shape = sizes_of(expect(tuple, meta.args)[0])
    sizes, coordinate = _sizes(file, mesh), sizes_of(mesh.get("_coordinate_on_dim"))
    placements = tuple(_placement(each, len(shape)) for each in sequence(spec.get("placements")))
    if not len(sizes) == len(coordinate) == len(placements) or any(
        index >= size for index, size in zip(coordinate, sizes, strict=True)
    ):
        raise SourceError(
            f"expected a coordinate on a mesh of sizes {sizes} and a placement for each axis, found {coordinate} and "
            f"{', '.join(map(str, placements))}"
        )
    _check_order(spec.get("shard_order"))
    return RankPart(dtype, shape, sizes, coordinate, placements, local)


def _fields(value: object) -> Mapping[object, object]:
    """The attributes of an object."""
    return expect(dict, expect(Record, value).state)


def _sizes(file: TorchFile, mesh: Mapping[object, object]) -> Index:
    """The sizes of a mesh: of torch's layout of it, or before 2.9 of a tensor of ranks."""
    match mesh.get("_layout"):
        case Record(state={"axes": axes}):
            return tuple(_product(_fields(axis).get("shape")) for axis in sequence(axes))
        case Record(state={"shape": shape}):
            return tuple(map(_product, sequence(shape))) if type(shape) is tuple else (_product(shape),)
    _, ranks = file.chunk(mesh.get("mesh"))
    return ranks.box.shape


def _product(size: object) -> int:
    return math.prod(sizes_of(size)) if type(size) is tuple else sizes_of((size,))[0]


def _placement(value: object, ndim: int) -> AxisPlacement:
    record = expect(Record, value)
    name = next((record.kind.removeprefix(module) for module in _PLACEMENTS if record.kind.startswith(module)), "")
    fields = record.state if type(record.state) is dict else {}
    if name == "Replicate":
        return Replicate()
    if name in ("Shard", "_StridedShard"):
        dim = expect(int, fields.get("dim"))
        if not 0 <= dim < ndim:
            raise SourceError(f"expected a shard of one of {ndim} dims, found dim {dim}")
        if name == "Shard":
            return Shard(dim)
        split = expect(int, fields.get("split_factor"))
        if split < 1:
            raise SourceError(f"expected a split factor >= 1, found {split}")
        return StridedShard(dim, split)
    raise SourceError(
        f"expected Shard, _StridedShard or Replicate, found {record.kind}, which is not elements of a tensor"
    )


def _check_order(order: object) -> None:
    """Refuse shards that were not cut from the first axis of the mesh to the last.  Torch before 2.10 has no others."""
    for entry in () if order is None else sequence(order):
        fields: Sequence[object] = sequence(entry.args if isinstance(entry, Record) else entry)
        axes = sizes_of(fields[-1])
        if list(axes) != sorted(axes):
            raise SourceError(
                f"expected shards cut from the first axis of the mesh to the last, found the order {axes}"
            )
