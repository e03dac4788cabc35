"""The formats that can be written, by name; what only one of them needs is imported when it is asked for."""

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
"""Those whose files are of ranks."""

_WHOLE_TENSOR_FORMATS: Mapping[str, Callable[[int | None], Container]] = MappingProxyType(
    {"safetensors": _safetensors, "zarr": _zarr}
)
"""Those of whole tensors, for the most bytes of elements in a file; without a number as is usual."""

FORMATS = (*_RANK_FORMATS, *_WHOLE_TENSOR_FORMATS)
"""The names of all."""


def container_of(name: str, shard_bytes: int | None = None) -> Container:
    """What writes the format of this name.

    Raises:
        TargetError: there is none; or its files are of ranks, and ``shard_bytes`` means nothing there.
    """
    if name in _WHOLE_TENSOR_FORMATS:
        return _WHOLE_TENSOR_FORMATS[name](shard_bytes)
    if name not in _RANK_FORMATS:
        raise TargetError(f"no format {name!r} to write; there are {', '.join(FORMATS)}")
    if shard_bytes is not None:
        raise TargetError(f"--shard-size means nothing to format {name}; leave it out")
    return _RANK_FORMATS[name]()
