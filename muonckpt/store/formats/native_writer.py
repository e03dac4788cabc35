"""Our own format, written: a manifest, and beside it DCP's ``.metadata``.

Apart from `native`, which every command imports that opens a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from ...errors import DestinationError
from ...record import MANIFEST_FILE, Manifest
from ..io.checksums import xxh3_128
from ..io.location import Location
from ..io.new_file import write_parts
from .dcp.metadata_writer import metadata_parts
from .signs import COMMON_FILE, METADATA_FILE


def stock_metadata(manifest: Manifest) -> Iterator[bytes]:
    """The parts of the ``.metadata`` that lies beside a manifest.

    Raises:
        LayoutError: a key occurs twice, or two chunks of a tensor begin at the same place.
    """
    described = replace(manifest, blobs=tuple(blob for blob in manifest.blobs if blob.item.file != COMMON_FILE))
    return metadata_parts(described)


def write_native(manifest: Manifest, directory: Location, others: Mapping[str, bytes] = MappingProxyType({})) -> None:
    """Write all descriptions of a checkpoint, ours, DCP's and ``others`` by the names of their files, and sync them.

    DCP's, which makes a directory a checkpoint to stock programs, comes last.

    Raises:
        LayoutError: a key occurs twice, or two chunks of a tensor begin at the same place.
        DestinationError: a file exists, or cannot be written.
    """
    digests = {name: xxh3_128([data]) for name, data in others.items()}
    digests[METADATA_FILE] = xxh3_128(stock_metadata(manifest))  # made twice: it can take more memory than all else
    texts = map(str.encode, replace(manifest, files=digests).json_parts())
    ours: dict[str, Iterable[bytes]] = {MANIFEST_FILE: texts}
    stock = {METADATA_FILE: stock_metadata(manifest)}
    for name, parts in (ours | {name: [data] for name, data in others.items()} | stock).items():
        try:
            write_parts(directory / name, parts)
        except OSError as error:
            raise DestinationError(f"cannot write {directory / name}: {error.strerror or error}") from error
