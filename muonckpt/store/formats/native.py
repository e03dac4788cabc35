"""Our own format: a DCP directory that a manifest describes as well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from ... import record
from ...errors import DestinationError, SourceError, about
from ...record import Manifest
from ..io.checksums import xxh3_128
from ..io.location import Location
from ..io.new_file import write_parts
from ..io.regular import read_whole
from .dcp import directory as dcp


def read_native(path: Location) -> Manifest:
    """The manifest of a checkpoint in our own format.

    Raises:
        DamageError: it is missing or damaged.
        SourceError: it is of another version, or cannot be read.
    """
    file = path / record.MANIFEST_FILE
    try:
        with about(file):
            return Manifest.from_json(read_whole(file))
    except OSError as error:
        raise SourceError(f"cannot read {file}: {error}") from error


def stock_metadata(manifest: Manifest) -> Iterator[bytes]:
    """The parts of the ``.metadata`` that lies beside a manifest.

    Raises:
        LayoutError: a key occurs twice, or two chunks of a tensor begin at the same place.
    """
    described = replace(manifest, blobs=tuple(blob for blob in manifest.blobs if blob.item.file != dcp.COMMON_FILE))
    return dcp.metadata_parts(described)


def write_native(manifest: Manifest, directory: Location, others: Mapping[str, bytes] = MappingProxyType({})) -> None:
    """Write all descriptions of a checkpoint, ours, DCP's and ``others`` by the names of their files, and sync them.

    DCP's, which makes a directory a checkpoint to stock programs, comes last.

    Raises:
        LayoutError: a key occurs twice, or two chunks of a tensor begin at the same place.
        DestinationError: a file exists, or cannot be written.
    """
    digests = {name: xxh3_128([data]) for name, data in others.items()}
    digests[dcp.METADATA_FILE] = xxh3_128(stock_metadata(manifest))  # made twice: it can take more memory than all else
    texts = map(str.encode, replace(manifest, files=digests).json_parts())
    ours: dict[str, Iterable[bytes]] = {record.MANIFEST_FILE: texts}
    stock = {dcp.METADATA_FILE: stock_metadata(manifest)}
    for name, parts in (ours | {name: [data] for name, data in others.items()} | stock).items():
        try:
            write_parts(directory / name, parts)
        except OSError as error:
            raise DestinationError(f"cannot write {directory / name}: {error.strerror or error}") from error
