"""What a destination's files are: how items lie in them, and what describes them all.

What only one of them needs is imported when it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...record import Manifest
from ...store.formats import native, signs
from ...store.formats.megatron import torch_dist
from ...store.formats.torch_save import tensor_item
from ...store.io import publish
from ...store.io.location import Location
from ..engine.output_files import Arrange
from ..engine.outputs import Entry
from .rank_files import Filled, Part, framed, over_ranks
from .torch_dist_files import beside

if TYPE_CHECKING:
    from ...layouts.buffers.group_buffer import GroupBuffer


@dataclass(frozen=True, slots=True)
class Container:
    """One kind of destination.

    Args:
        arrange: says what goes where in which file.
        describe: writes what readers need besides the files, synced, into the finished directory.
        descriptions: the names of what that is.
        staged: where files are written before the destination is published.
        root: the one file that the destination is; without a name it is the directory with all of them.
    """

    name: str
    arrange: Arrange
    describe: Callable[[Manifest, Location], None]
    descriptions: tuple[str, ...]
    staged: Callable[[Location], Location] = publish.staged
    root: str = ""


_FRAMED = framed("__{}_0.distcp".format, lru_cache(maxsize=1024)(tensor_item.frame))  # few dtypes and shapes

DCP = Container("dcp", over_ranks(_FRAMED), native.write_manifest, ("muonckpt.json", ".metadata"))
"""A directory that `torch.distributed.checkpoint` reads, with our manifest."""


def _raw(buffers: Sequence[GroupBuffer], entries: Sequence[Entry], parts: Sequence[Sequence[Part]]) -> Filled:
    from .buffer_files import raw

    return raw(buffers, entries, parts)


def _write_index(manifest: Manifest, folder: Location) -> None:
    from ...store.formats.flat_buffers import write_index

    write_index(manifest, folder)


BUFFERS = Container("buffers", over_ranks(_raw), _write_index, (signs.FLAT_BUFFERS,))
"""Flat buffers as they lie in the memory of ranks, and an index: docs/formats/flat_buffers.md."""

TORCH_DIST = Container("torch_dist", over_ranks(beside(_FRAMED)), torch_dist.write_manifest, torch_dist.DESCRIPTIONS)
"""A directory that Megatron's `dist_checkpointing` reads as well: docs/formats/torch_dist.md."""

CONTAINERS: Mapping[str, Container] = MappingProxyType({each.name: each for each in (DCP, BUFFERS, TORCH_DIST)})
"""By name, those whose files are of ranks."""


def in_safetensors(shard_bytes: int | None) -> Container:
    """A safetensors file, or a folder of such files and their index.  One file alone is a checkpoint to its readers,
    so in an object store it appears under its name when it is all there."""
    from ...store.formats.safetensors import folder as safetensors
    from .whole_files import MODEL, safetensors_files

    arrange = safetensors_files(shard_bytes)
    if shard_bytes is None:
        return Container("safetensors", arrange, lambda manifest, folder: None, (), publish.beside, MODEL)
    return Container("safetensors", arrange, safetensors.write_index, (safetensors.INDEX,))


def in_zarr(shard_bytes: int | None) -> Container:
    """A zarr hierarchy."""
    from ...store.formats.zarr import array as zarr_array
    from ...store.formats.zarr import writer as zarr_writer
    from .whole_files import zarr_files

    def describe(manifest: Manifest, folder: Location) -> None:
        zarr_writer.describe(manifest, folder, shard_bytes)

    return Container("zarr", zarr_files(shard_bytes), describe, (zarr_array.METADATA,))


WHOLE_TENSORS: Mapping[str, Callable[[int | None], Container]] = MappingProxyType(
    {"safetensors": in_safetensors, "zarr": in_zarr}
)
"""By name, those of whole tensors, for the most bytes of elements in a file; without a number as is usual."""
