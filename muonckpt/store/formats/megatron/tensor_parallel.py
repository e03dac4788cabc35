"""Parameters that tensor parallelism cuts: the parts in the files of its ranks, as one tensor.

A rank has a range of a dim, or with ``interleaved`` several: a gate and an up half that are fused by rows lie as
``g0 u0`` on rank 0 and ``g1 u1`` on rank 1, which is ``g0 g1 u0 u1`` when joined.  What no rank cuts, every rank has
whole.

Source: ``_initialize_affine_weight_cpu`` of Megatron's ``tensor_parallel/layers.py``, where ``stride`` is what is
called ``interleaved`` here; ``set_tensor_model_parallel_attributes`` for what masters say of themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ....box import Box
from ....errors import SourceError
from ....record import Chunk, Chunks, Extent, StateRecord
from ...io.checksums import crc32
from ...io.location import Location
from ...reading.payloads import Payloads, compare
from ..torch_save.torch_file import SavedTensor
from .rank_file import ParameterState


@dataclass(frozen=True, slots=True)
class TensorCut:
    """Cuts the parameters that one of these shell patterns fits: along ``dim``, in ``interleaved`` ranges for a rank.

    Raises:
        SourceError: it cuts no dim, or ranges of another dim than the first.
    """

    names: tuple[str, ...]
    dim: int = 0
    interleaved: int = 1

    def __post_init__(self) -> None:
        if self.dim < 0 or self.interleaved < 1 or (self.interleaved > 1 and self.dim):
            raise SourceError(f"expected a cut of a dim from 0, interleaved only along dim 0, found {self}")

    def fits(self, name: str) -> bool:
        """Whether it cuts the parameter of this name."""
        return any(fnmatchcase(name, pattern) for pattern in self.names)

    def ranges(self, length: int, ranks: int) -> Iterator[tuple[int, int, int]]:
        """The ranges of a dim of this length on every rank: the rank, the start there, and that in the whole.

        Raises:
            SourceError: the ranges of a rank cannot be of equal length.
        """
        each, rest = divmod(length, self.interleaved)
        if rest:
            raise SourceError(f"{length} rows do not divide into {self.interleaved} interleaved ranges")
        for rank in range(ranks):
            for turn in range(self.interleaved):
                yield rank, turn * each, (turn * ranks + rank) * each


class PartsPayloads(Payloads):
    """The bytes of the files, of which some items hold several chunks: their checksums are of the whole item.

    Args:
        checksums: the CRC-32 of these items.
    """

    def __init__(self, directory: Location, in_memory: Mapping[str, bytes], checksums: Mapping[Extent, int]) -> None:
        super().__init__(directory, in_memory)
        self._checksums = checksums

    def is_checked(self, chunk: Chunk) -> bool:
        return super().is_checked(chunk) or chunk.item in self._checksums

    def check_inside(self, item: Extent) -> None:
        expected = self._checksums.get(item)
        if expected is not None:
            compare("CRC-32", f"{crc32(self.bands(item)):08x}", f"{expected:08x}")


@dataclass(frozen=True, slots=True)
class TensorParallelism:
    """How the ranks' parts become whole: the ``folders`` of the ranks, in order, and the ``cuts``, the first of which
    that fits a name counts."""

    folders: tuple[str, ...]
    cuts: tuple[TensorCut, ...]

    def cut_of(self, name: str) -> TensorCut | None:
        """The cut of a parameter; None if every rank has all of it."""
        return next((cut for cut in self.cuts if cut.fits(name)), None)

    def joined(self, name: str, parts: Sequence[StateRecord]) -> StateRecord:
        """A tensor of a parameter, of one chunk on each rank.

        Raises:
            SourceError: the parts do not fit each other; or ranks differ in what all of them should have whole.
        """
        first, cut = parts[0], self.cut_of(name)
        if any((part.shape, part.dtype) != (first.shape, first.dtype) for part in parts):
            found = ", ".join(f"{part.dtype} {part.shape}" for part in parts)
            raise SourceError(f"{first.key!r}: expected parts of one shape and dtype, found {found}")
        if cut is None or not first.shape:
            checksums = {part.chunks[0].crc32 for part in parts}
            if len(checksums) > 1 or None in checksums:
                raise SourceError(
                    f"{first.key!r} is not the same on all tensor-parallel ranks, or its files have no checksums that "
                    "tell: where tensor parallelism cuts it, say so in a [[cut]]"
                )
            return first
        if cut.dim >= len(first.shape):
            raise SourceError(f"{first.key!r} of shape {first.shape} has no dim {cut.dim} for {cut}")
        shape = [*first.shape]
        shape[cut.dim] *= len(parts)
        chunks = []
        for rank, start, lies_at in cut.ranges(first.shape[cut.dim], len(parts)):
            chunk = parts[rank].chunks[0]
            length = first.shape[cut.dim] // cut.interleaved
            lo, hi = [0] * len(shape), [*shape]
            lo[cut.dim], hi[cut.dim] = lies_at, lies_at + length
            chunks.append(_range(chunk, Box(tuple(lo), tuple(hi)), start, cut))
        return replace(first, shape=tuple(shape), chunks=Chunks.of(chunks, len(shape)), layout=None)

    def check_masters(self, rank: int, states: Mapping[str, ParameterState]) -> None:
        """Compare the cuts with what masters in the files of a rank say of themselves.

        Raises:
            SourceError: they say something else.
        """
        for name, state in states.items():
            for value in state.values():
                recorded = value.attributes if isinstance(value, SavedTensor) else {}
                if "partition_dim" not in recorded:
                    continue
                cut, dim = self.cut_of(name), recorded["partition_dim"]
                stride = recorded.get("partition_stride", 1)
                parallel = recorded.get("tensor_model_parallel") is True
                expected = None if cut is None else cut.dim
                if (dim if parallel else None) != expected or (cut and stride not in (1, cut.interleaved)):
                    raise SourceError(
                        f"the master of {name!r} in {self.folders[rank]} says tensor_model_parallel={parallel}, "
                        f"partition_dim={dim}, partition_stride={stride}; the description says {cut}"
                    )


def _range(chunk: Chunk, box: Box, start: int, cut: TensorCut) -> Chunk:
    """The chunk of a range that begins at ``start`` of a rank's part, which is stored in row-major order."""
    if cut.interleaved == 1:
        return replace(chunk, box=box)
    assert chunk.payload is not None, "files of torch.save say where their elements are"
    rows = chunk.box.shape[0]
    size = chunk.payload.length // rows
    payload = replace(chunk.payload, offset=chunk.payload.offset + start * size, length=box.shape[0] * size)
    return replace(chunk, box=box, payload=payload, crc32=None)
