"""The formats that can be written, by name; modules that only one format needs are imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ...errors import TargetError
from .container import Container
from .rank_files import DcpFiles, TorchDistFiles


def _buffers() -> Container:
    from .buffer_files import BufferFiles

    return BufferFiles()


def _safetensors(shard_bytes: int | None) -> Container:
    from .safetensors_files import SafetensorsFile, SafetensorsFolder

    return SafetensorsFile() if shard_bytes is None else SafetensorsFolder(shard_bytes)


def _zarr(shard_bytes: int | None) -> Container:
    from .zarr_files import ZarrFiles

    return ZarrFiles(shard_bytes)


_RANK_FORMATS: Mapping[str, Callable[[], Container]] = MappingProxyType(
    {"dcp": DcpFiles, "buffers": _buffers, "torch_dist": TorchDistFiles}
)
"""Formats with a file for each rank."""

_WHOLE_TENSOR_FORMATS: Mapping[str, Callable[[int | None], Container]] = MappingProxyType(
    {"safetensors": _safetensors, "zarr": _zarr}
)
"""Formats of whole tensors; the argument is the most bytes of elements in a file, None for the format's default."""

FORMATS = (*_RANK_FORMATS, *_WHOLE_TENSOR_FORMATS)
"""The names of all formats."""


def container_of(name: str, shard_bytes: int | None = None) -> Container:
    """The container of the format with this name.

    Raises:
        TargetError: there is no such format; or each rank has a file in it, and ``shard_bytes`` is given.
    """
    if name in _WHOLE_TENSOR_FORMATS:
        return _WHOLE_TENSOR_FORMATS[name](shard_bytes)
    if name not in _RANK_FORMATS:
        raise TargetError(f"unknown format {name!r}; expected one of {', '.join(FORMATS)}")
    if shard_bytes is not None:
        raise TargetError(f"--shard-size has no meaning for format {name}; leave it out")
    return _RANK_FORMATS[name]()
