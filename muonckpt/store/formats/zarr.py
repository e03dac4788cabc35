"""Checkpoints in a zarr v3 hierarchy: a group for each parameter, an array for each of its tensors.

Arrays of unencoded elements (with or without shards and checksums) are read from their files; the zarr library decodes
those of other codecs.  ``zarr.json`` is read without trust.

Source: the Zarr v3 core specification, and those of the codecs ``bytes``, ``crc32c`` and ``sharding_indexed`` 1.0.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import xxhash

from ...algebra.box import MAX_DIMS, MAX_ELEMENTS, Box, Index
from ...names.errors import (
    DamageError,
    MisdescribedError,
    SeveralSavesError,
    SourceError,
    UnlistedError,
    about,
)
from ...names.wording import listed
from ...programs.signs import ZARR_FILE
from ...record import json_fields
from ...record.json_fields import check_digest, digest_of
from ...record.record import Chunk, Chunks, Extent, Manifest, StateRecord
from ..io import limits
from ..io.location import Location, is_there, listing
from ..io.regular import BytesInMemory, FileBytes, open_regular, read_text_file
from ..reading.dtypes import DTYPES, itemsize
from ..reading.payloads import Payloads, Reader
from .native import tensor_of

MANIFEST_ATTRIBUTE = "muonckpt"
"""The attribute with all that zarr's own fields cannot express."""

SEAL = "digest"
"""The field of that attribute with the digest of the others."""

INDEX_CHECKSUM = 4

_ZARR_DTYPES = frozenset(
    name
    for name in DTYPES
    if name.startswith(("bool", "int", "uint", "float16", "float32", "float64", "complex64", "complex128"))
)
"""Element types that zarr has, under the same names; the others are stored as their bits."""

MISSING_CHUNK = 2**64 - 1
"""Offset and length, in a shard's index, of a chunk that is not there."""

_READABLE = _ZARR_DTYPES | {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
"""The last three are extensions, which tensorstore writes and stock zarr cannot read."""

_CRC32C = {"name": "crc32c"}
_INDEX_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, _CRC32C]


def stored_as(dtype: str) -> str:
    """Return the zarr data type that holds this one: itself, or unsigned integers of its bits."""
    return dtype if dtype in _ZARR_DTYPES else f"uint{8 * itemsize(dtype)}"


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """Describes one array, with zarr's ``dtype``.

    ``file_shape`` and ``chunk_shape`` are the shapes of one file and of one chunk in it (the same without shards), with
    the dims of ``shape``.  ``trailer`` counts the bytes after each chunk's elements (its CRC-32C); None where elements
    are encoded.  ``sharded`` files end (``index_first``: begin) with an index.

    Raises:
        SourceError: the shapes do not fit each other.
    """

    node: str
    shape: Index
    dtype: str
    file_shape: Index
    chunk_shape: Index
    trailer: int | None
    sharded: bool
    index_first: bool = False
    prefix: str = "c"
    separator: str = "/"
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = (self.shape, self.file_shape, self.chunk_shape)
        if len({len(shape) for shape in shapes}) != 1 or len(self.shape) > MAX_DIMS:
            raise SourceError(f"expected an array, files and chunks with equal numbers of dims, found {shapes!s:.200}")
        if max(chain.from_iterable(shapes), default=0) > MAX_ELEMENTS:
            raise SourceError(f"expected sizes of at most {MAX_ELEMENTS}, found larger ones")
        if min(self.shape, default=0) < 0 or min((*self.file_shape, *self.chunk_shape), default=1) < 1:
            raise SourceError(f"expected a shape and chunks of at least one element, found {shapes}")
        if any(size % part for size, part in zip(self.file_shape, self.chunk_shape, strict=True)):
            raise SourceError(f"expected shards {self.file_shape} that are whole numbers of chunks {self.chunk_shape}")

    @property
    def is_plain(self) -> bool:
        """Return whether every chunk's elements inside the array are a prefix of its stored bytes."""
        # The edge may cut a chunk along its first dim of several elements only: along others it would leave gaps.
        first = next((dim for dim, size in enumerate(self.chunk_shape) if size > 1), len(self.shape))
        has_gaps = any(self.shape[dim] % self.chunk_shape[dim] for dim in range(first + 1, len(self.shape)))
        return self.trailer is not None and not has_gaps

    @property
    def chunk_bytes(self) -> int:
        """Return the bytes of one chunk's elements, those beyond the array's edge included."""
        return math.prod(self.chunk_shape) * itemsize(self.dtype)

    @property
    def chunks_per_file(self) -> int:
        return math.prod(self.file_shape) // math.prod(self.chunk_shape)

    @property
    def index_bytes(self) -> int:
        return 16 * self.chunks_per_file + INDEX_CHECKSUM if self.sharded else 0

    def files(self) -> Iterator[tuple[str, Box]]:
        """Yield each file, by its path below the root, and its box of the array."""
        # Without a prefix an array without dims would have a file without a name, which zarr calls 0.
        for cell, box in _grid(Box.of(self.shape), self.file_shape):
            key = self.separator.join((self.prefix, *map(str, cell)) if self.prefix else map(str, cell)) or "0"
            yield f"{self.node}/{key}" if self.node else key, box

    def chunks(self, file: Box) -> Iterator[tuple[int, Box]]:
        """Yield, in row-major order, the number and the box of each chunk of a file that has elements."""
        for cell, box in _grid(file, self.chunk_shape):
            number = 0
            for index, size, part in zip(cell, self.file_shape, self.chunk_shape, strict=True):
                number = number * (size // part) + index
            yield number, box

    def to_json(self) -> str:
        little = {"configuration": {"endian": "little"}} if itemsize(self.dtype) > 1 else {}
        codecs: list[dict[str, Any]] = [{"name": "bytes", **little}, _CRC32C]
        zeros = {"bool": False, "float": 0.0, "complex": [0.0, 0.0]}
        if self.sharded:
            inside = {"chunk_shape": list(self.chunk_shape), "codecs": codecs, "index_codecs": _INDEX_CODECS}
            codecs = [{"name": "sharding_indexed", "configuration": {**inside, "index_location": "end"}}]
        return json.dumps(
            {
                "zarr_format": 3,
                "node_type": "array",
                "shape": list(self.shape),
                "data_type": self.dtype,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.file_shape)}},
                "chunk_key_encoding": {"name": "default", "configuration": {"separator": self.separator}},
                "fill_value": next((zero for kind, zero in zeros.items() if self.dtype.startswith(kind)), 0),
                "codecs": codecs,
                "attributes": dict(self.attributes),
            },
            indent=1,
        )


def array_seal(array: ZarrArray, entry: Mapping[str, Any]) -> str:
    """Return the digest of an array's shape, data type and entry, without the digest in it."""
    return digest_of([list(array.shape), array.dtype, {key: value for key, value in entry.items() if key != SEAL}])


def parse_node(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data.decode())
        if fields["zarr_format"] != 3 or fields["node_type"] not in ("group", "array"):
            raise SourceError(f"expected a node of zarr format 3, found {fields['zarr_format']!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamageError(f"damaged {ZARR_FILE}: {type(error).__name__}: {error}") from error
    if not isinstance(fields.setdefault("attributes", {}), dict):
        raise DamageError(f"damaged {ZARR_FILE}: expected attributes by name")
    return dict(fields)


def parse_array(node: str, fields: Mapping[str, Any]) -> ZarrArray:
    """Parse the fields of an array.

    Raises:
        DamageError: a field is missing or of another type; or an array of ours has something that we never write.
        SourceError: the data type, the grid, the key encoding or a storage transformer is unknown.
    """
    try:
        # Refuse settings that would give the bytes another meaning.
        if fields.get("storage_transformers"):
            raise SourceError(f"expected no storage transformers, found {fields['storage_transformers']!r:.200}")
        if fields["data_type"] not in _READABLE:
            kinds = ", ".join(sorted(_READABLE))
            raise SourceError(f"expected one of the data types {kinds}, found {fields['data_type']!r:.200}")
        # The shapes of files and of chunks in them, and the names of files.
        match fields["chunk_grid"]:
            case {"name": "regular", "configuration": dict(configuration)}:
                files = _read_ints(configuration["chunk_shape"])
            case grid:
                raise SourceError(f"expected 'regular' with a configuration, found {grid!r:.200}")
        prefix, separator = _parse_key_encoding(fields["chunk_key_encoding"])
        codecs = _parse_codecs(fields["codecs"])
        return ZarrArray(
            node=node,
            shape=_read_ints(fields["shape"]),
            dtype=fields["data_type"],
            file_shape=files,
            chunk_shape=files if codecs.chunk_shape is None else codecs.chunk_shape,
            trailer=codecs.trailer,
            sharded=codecs.chunk_shape is not None,
            index_first=codecs.index_first,
            prefix=prefix,
            separator=separator,
            attributes=fields["attributes"],
        )
    except SourceError as error:
        if MANIFEST_ATTRIBUTE in fields["attributes"]:
            raise DamageError(str(error)) from error
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamageError(f"damaged {ZARR_FILE}: {type(error).__name__}: {error}") from error


def _grid(box: Box, step: Index) -> Iterator[tuple[Index, Box]]:
    """Yield the cells, in row-major order, of a regular grid from the box's corner on, each with its part inside."""
    counts = [-(-size // part) for size, part in zip(box.shape, step, strict=True)]
    for number in range(math.prod(counts)):  # one at a time: a hostile array may have very many
        cell = [0] * len(counts)
        for dim in reversed(range(len(counts))):
            number, cell[dim] = divmod(number, counts[dim])
        lo = tuple(start + index * part for start, index, part in zip(box.lo, cell, step, strict=True))
        hi = tuple(min(start + part, end) for start, part, end in zip(lo, step, box.hi, strict=True))
        yield tuple(cell), Box(lo, hi)


@dataclass(frozen=True, slots=True)
class _Codecs:
    """How a file's chunks are stored: ``chunk_shape`` is that of chunks in a shard, None without shards."""

    chunk_shape: Index | None
    trailer: int | None
    index_first: bool = False


def _parse_codecs(codecs: Any) -> _Codecs:
    match codecs:
        case [{"name": "sharding_indexed", "configuration": {"chunk_shape": shape, "codecs": inner, **index}}]:
            location = index.get("index_location", "end")
            if index.get("index_codecs") != _INDEX_CODECS or location not in ("start", "end"):
                raise SourceError("expected a shard index of little-endian numbers with a CRC-32C")
            inner_codecs = _parse_codecs(inner)
            if inner_codecs.chunk_shape is not None:
                raise SourceError("expected no shards within shards")
            return _Codecs(_read_ints(shape), inner_codecs.trailer, index_first=location == "start")
        case [{"name": "bytes", **codec}] if _get_setting(codec, "endian", "little") == "little":
            return _Codecs(None, trailer=0)
        case [{"name": "bytes", **codec}, {"name": "crc32c"}] if _get_setting(codec, "endian", "little") == "little":
            return _Codecs(None, trailer=INDEX_CHECKSUM)
        case [*_]:
            return _Codecs(None, trailer=None)  # encoded: the zarr library decodes whole files
    raise SourceError(f"expected a list of codecs, found {codecs!r:.200}")


def _get_setting(extension: Mapping[Any, Any], name: str, default: str) -> Any:
    return extension.get("configuration", {}).get(name, default)


def _parse_key_encoding(encoding: Any) -> tuple[str, str]:
    """Return prefix and separator of chunks' names."""
    match encoding:
        case {"name": "default", **settings}:
            prefix, separator = "c", _get_setting(settings, "separator", "/")
        case {"name": "v2", **settings}:
            prefix, separator = "", _get_setting(settings, "separator", ".")
        case _:
            raise SourceError(f"expected a chunk key encoding default or v2, found {encoding!r:.200}")
    if separator not in ("/", "."):
        raise SourceError(f"expected a separator / or ., found {separator!r:.200}")
    return prefix, separator


def _read_ints(value: Any) -> Index:
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise SourceError(f"expected a list of integers, found {value!r:.200}")
    return tuple(value)


_DECODED_FILES = 4


class ZarrPayloads(Payloads):
    """Reads the bytes of elements from files, or from decoded files where they are encoded."""

    def __init__(self, directory: Location, arrays: Sequence[ZarrArray]) -> None:
        super().__init__(directory)
        self._encoded: dict[str, tuple[ZarrArray, Box]] = {}
        self._with_checksums: set[str] = set()
        for array in arrays:
            if array.trailer:
                self._with_checksums.update(file for file, _ in array.files())
            if not _is_read_raw(array):
                self._encoded.update((file, (array, box)) for file, box in array.files())
        self._decode = lru_cache(_DECODED_FILES)(self._decode_file)

    def _bytes(self, name: str) -> FileBytes:
        return BytesInMemory(self._decode(name)) if name in self._encoded else super()._bytes(name)

    def is_verbatim(self, name: str) -> bool:
        return name not in self._encoded

    has_inner_checksums = True

    def has_checksum(self, chunk: Chunk) -> bool:
        return chunk.item.file in self._with_checksums

    def check_item(self, item: Extent, parts: Iterable[memoryview] | None = None) -> None:
        """Check the CRC-32C after an unencoded chunk; decoding checks that of an encoded one."""
        from google_crc32c import value as crc32c

        if item.file in self._with_checksums and item.file not in self._encoded:
            raw = bytes(self.view(item)) if parts is None else b"".join(parts)
            actual, expected = crc32c(raw[:-INDEX_CHECKSUM]), int.from_bytes(raw[-INDEX_CHECKSUM:], "little")
            if actual != expected:
                raise DamageError(f"CRC-32C {actual:08x}, expected {expected:08x}")

    def _decode_file(self, file: str) -> memoryview:
        array, box = self._encoded[file]
        size = math.prod(array.file_shape) * itemsize(array.dtype)
        limits.check_limit(size, limits.DECODED + 1000 * self.on_disk(file), f"bytes in {file} when it is decoded")
        if self.pace:
            self.pace(self.on_disk(file))
        # The library decodes the part of the file inside the array.
        try:
            import zarr

            opened = zarr.open_array(str(self.directory / array.node), mode="r")
            block = np.asarray(opened[tuple(map(slice, box.lo, box.hi))])
        except Exception as error:  # whatever a codec raises
            raise SourceError(f"cannot decode {self.directory / file}: {type(error).__name__}: {error}") from error
        # As unencoded chunks have them: little-endian, dense.
        little = block.astype(block.dtype.newbyteorder("<"), copy=False)
        return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data


def reader(path: Location) -> Reader:
    """Read the metadata of a hierarchy and the indices of shards.

    A chunk's ``item`` is its stored bytes, its ``payload`` the elements; of encoded arrays an extent of the whole
    decoded file, which `ZarrPayloads` provides.  Chunks that are missing or cut leave holes: zarr would read zeros.

    Raises:
        SourceError: there is none, or it is refused.
    """
    errors, chunk_errors = list[DamageError](), list[DamageError]()
    attributes, arrays, consolidated = _read_nodes(path, errors)
    tensors, seals, readable = list[StateRecord](), dict[str, object](), list[ZarrArray]()
    for array in arrays:
        with _collecting_errors(errors):
            tensors.append(_read_tensor(path, array, chunk_errors))
            readable.append(array)
            if isinstance(entry := array.attributes.get(MANIFEST_ATTRIBUTE), dict):
                seals[array.node] = entry.get(SEAL)

    # The root of a hierarchy of ours says how many arrays it has, and binds them by the digest of their seals.
    provenance: Mapping[str, Any] = {"format": "zarr"}
    count = len({*consolidated, *(array.node for array in arrays)}) if consolidated else None
    seals_digest = None
    with _collecting_errors(errors):
        if (root := attributes.get(MANIFEST_ATTRIBUTE)) is not None:
            with about(path / ZARR_FILE):
                provenance, count, seals_digest = _read_root(root)
            if count != len(tensors):
                raise DamageError(f"{path}: expected {count} arrays, found {len(tensors)}")
    faults = list[SourceError]()
    if seals_digest is not None and count == len(tensors):
        try:
            check_digest(seals_digest, seals)
        except DamageError as error:
            faults.append(SeveralSavesError(f"{path}: the arrays are not those of {ZARR_FILE}: {error}"))

    # A fault of descriptions tells which arrays may be lost; if there is none, the first that is lost of an array.
    reason = listed(errors, 1, "; ")
    if errors and not faults and count == len(tensors):
        faults.append(MisdescribedError(f"{reason}; all {count} arrays are there"))
    elif errors and not faults:
        faults.append(UnlistedError(f"{reason}; nothing else says which arrays there were"))
    elif not faults:
        faults += chunk_errors[:1]
    manifest = Manifest(tuple(tensors), (), provenance)
    return Reader(manifest, ZarrPayloads(path, readable), tuple(faults))


def lacks_root(path: Location) -> bool:
    """Return whether a folder is a hierarchy of ours but for the root's description: an array says where it lies."""
    # The first array that is found decides; a node without a description may have lost it, so one below is looked at.
    _, top_folders = listing(path)
    pending = sorted(top_folders, reverse=True)
    while pending:
        node = pending.pop()
        files, folders = listing(path / node)
        if ZARR_FILE not in files:
            below = [name for name in sorted(folders) if is_there(path / node / name / ZARR_FILE)]
            pending += [f"{node}/{name}" for name in below[:1]]
            continue
        try:
            fields = parse_node(read_text_file(path / node / ZARR_FILE))
            entry = fields["attributes"].get(MANIFEST_ATTRIBUTE)
            if fields["node_type"] == "array":
                return isinstance(entry, dict) and nodes([tensor_of(entry)]) == [node]
        except SourceError:
            return False
        pending += [f"{node}/{name}" for name in sorted(folders, reverse=True)]
    return False


@contextmanager
def _collecting_errors(errors: list[DamageError]) -> Iterator[None]:
    try:
        yield
    except DamageError as error:
        errors.append(error)


def _read_root(fields: Any) -> tuple[Mapping[str, Any], int, str | None]:
    """Return the provenance of a hierarchy of ours, the number of its arrays, and the digest of their seals."""
    seals_digest: str | None = None
    match fields:
        case {"arrays": str(arrays), "digest": digest, **sealed}:
            check_digest(digest, {**sealed, "arrays": arrays})
            seals_digest = arrays
    match fields:
        case {"tensors": int(count), "provenance": provenance}:
            try:
                return json_fields.provenance(provenance), count, seals_digest
            except (TypeError, ValueError) as error:
                raise DamageError(f"damaged provenance: {error}") from error
    raise DamageError(f"damaged attribute {MANIFEST_ATTRIBUTE!r}")


def _read_nodes(
    path: Location, errors: list[DamageError]
) -> tuple[Mapping[str, Any], list[ZarrArray], Mapping[str, Mapping[str, Any]]]:
    """Return the root's attributes, by name all arrays below it or the root itself, and those that it describes too.

    No link is followed.  Each folder is listed once: a hierarchy may have very many groups.
    """
    attributes: Mapping[str, Any] = {}
    consolidated: Mapping[str, Mapping[str, Any]] = {}
    arrays, pending = list[ZarrArray](), [""]
    while pending:
        node = pending.pop()
        place = path / node
        files, folders = listing(place)
        # A folder without a description is a group that has lost it, if nodes are in it; the root always is.
        if node and ZARR_FILE not in files and not any(is_there(place / name / ZARR_FILE) for name in folders):
            continue
        with _collecting_errors(errors):
            if ZARR_FILE not in files:
                raise DamageError(f"its {ZARR_FILE}{f' of {node}' * bool(node)} is missing")
            with about(place / ZARR_FILE):
                fields = parse_node(read_text_file(place / ZARR_FILE))
                if not node:
                    attributes, consolidated = fields["attributes"], _consolidated(fields)
                if fields["node_type"] == "array":
                    arrays.append(parse_array(node, fields))
                    continue
        pending += [f"{node}/{name}".lstrip("/") for name in sorted(folders, reverse=True)]

    # The root's copy of an array's description replaces a lost one, and must not contradict an existing one.
    arrays_by_node = {array.node: array for array in arrays}
    for node, copied_fields in sorted(consolidated.items()):
        with _collecting_errors(errors):
            with about(path / ZARR_FILE):
                array = parse_array(node, copied_fields)
            if node not in arrays_by_node:
                arrays.append(array)
                raise DamageError(f"{path}: its {ZARR_FILE} of {node} is missing")
            if dataclasses.replace(arrays_by_node[node], attributes=array.attributes) != array:
                raise DamageError(f"{path}: its {ZARR_FILE} and that of {node} do not say the same of that array")
    return attributes, arrays, consolidated


def _consolidated(fields: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the fields of the arrays that the root of a hierarchy repeats, by the paths of the arrays."""
    match fields.get("consolidated_metadata"):
        case {"metadata": dict(nodes_below)}:
            described = {str(node): fields for node, fields in nodes_below.items() if isinstance(fields, dict)}
            arrays = ((node, fields) for node, fields in described.items() if fields.get("node_type") == "array")
            return {node: {"attributes": {}, **fields} for node, fields in arrays}
    return {}


def _read_tensor(path: Location, array: ZarrArray, chunk_errors: list[DamageError]) -> StateRecord:
    """Return the tensor of an array; ``chunk_errors`` receives the errors of chunks, which leave holes."""
    with about(path / array.node):
        entry = array.attributes.get(MANIFEST_ATTRIBUTE, {})
        if not isinstance(entry, dict):
            raise DamageError(f"damaged attribute {MANIFEST_ATTRIBUTE!r}")
        if entry.get(SEAL, seal := array_seal(array, entry)) != seal:
            raise DamageError(f"its description has digest {seal}, expected {entry[SEAL]}")
        # An array of another program is a tensor by its path.
        chunks = list(_locate_chunks(path, array, chunk_errors)) if 0 not in array.shape else []
        if MANIFEST_ATTRIBUTE not in array.attributes:
            parts = tuple(array.node.split("/"))
            stored = Chunks.of(filter(None, chunks), len(array.shape))
            return StateRecord(
                key=array.node or path.name, path=parts, shape=array.shape, dtype=array.dtype, chunks=stored
            )
        # One of ours has a record, which must agree, and the digests of its chunks.
        tensor = tensor_of(entry)
        if (tensor.shape, stored_as(tensor.dtype)) != (array.shape, array.dtype):
            raise DamageError(
                f"{array.dtype} of shape {array.shape}, but attribute {MANIFEST_ATTRIBUTE!r} says otherwise"
            )
        digests = entry.get("digests", [None] * len(chunks))
        if len(digests) != len(chunks):
            raise DamageError(f"expected {len(digests)} chunks, as attribute {MANIFEST_ATTRIBUTE!r} says")
        digested = (dataclasses.replace(c, digest=digest) for c, digest in zip(chunks, digests, strict=True) if c)
        return dataclasses.replace(tensor, chunks=Chunks.of(digested, len(tensor.shape)))


def _is_read_raw(array: ZarrArray) -> bool:
    """Return whether no decoding is needed: it checks a CRC-32C unless there is a fingerprint to compare with."""
    return array.is_plain and (array.trailer == 0 or MANIFEST_ATTRIBUTE in array.attributes)


_MAX_LOST = 1 << 13
"""The most chunks of an array that may be lost, and as many more as are there."""


def _locate_chunks(path: Location, array: ZarrArray, errors: list[DamageError]) -> Iterator[Chunk | None]:
    """Yield chunks in order, and None for each chunk of a file that is missing, or whose index is damaged.

    Raises:
        DamageError: very many are missing, as if the array had never been so large.
    """
    chunks_per_file = array.chunks_per_file if _is_read_raw(array) and array.sharded else 1
    files = _files_below(path, array.node)
    num_files = math.prod(-(-size // part) for size, part in zip(array.shape, array.file_shape, strict=True))
    num_missing = (num_files - len(files)) * chunks_per_file  # or more: there may be other files
    max_missing = _MAX_LOST + len(files) * chunks_per_file
    try:
        limits.check_limit(num_missing, max_missing, f"chunks of {array.node} that are missing")
    except limits.LimitError as error:
        raise DamageError(str(error)) from error
    for file, box in array.files():
        try:
            if file not in files:
                raise _not_stored_error(f"{path / file}")
            yield from list(_locate_chunks_in(path, array, file, box))
        except DamageError as error:
            errors.append(error)
            yield from [None] * (sum(1 for _ in array.chunks(box)) if chunks_per_file > 1 else 1)


def _files_below(path: Location, node: str) -> set[str]:
    """Return the files below a node, by their paths from the root of the hierarchy; its description is none of them."""
    paths, pending = set[str](), [node]
    while pending:
        folder = pending.pop()
        prefix = f"{folder}/" if folder else ""
        with suppress(FileNotFoundError):
            files, folders = listing(path / folder)
            paths.update(f"{prefix}{name}" for name in files)
            pending += [f"{prefix}{name}" for name in folders]
    return paths - {f"{node}/{ZARR_FILE}" if node else ZARR_FILE}


def _locate_chunks_in(path: Location, array: ZarrArray, file: str, box: Box) -> Iterator[Chunk]:
    """Yield the chunks of one file, which is this box of the array; one for the whole file if it is decoded."""
    size = _size(path, file)
    with about(path / file):
        if _is_read_raw(array):
            for part, offset, length in _stored_chunks(path, array, file, size, box):
                if length != array.chunk_bytes + (array.trailer or 0):
                    raise DamageError(f"box {part}: expected {array.chunk_bytes} bytes and a checksum, found {length}")
                payload = Extent(file, offset, part.numel * itemsize(array.dtype))
                yield Chunk(part, Extent(file, offset, length), payload)
            return
        if array.sharded:
            list(_stored_chunks(path, array, file, size, box))  # checks that no chunk is missing
    yield Chunk(box, Extent(file, 0, size), Extent(file, 0, box.numel * itemsize(array.dtype)))


def _stored_chunks(path: Location, array: ZarrArray, file: str, size: int, box: Box) -> Iterator[tuple[Box, int, int]]:
    """Yield the box of each chunk in a file, with the offset and the number of its stored bytes."""
    if not array.sharded:
        yield box, 0, size
        return
    # Every chunk of a shard has to be there, and inside the file.
    index = _read_index(path, array, file, size)
    for number, part in array.chunks(box):
        offset, length = map(int, index[number])
        if offset == MISSING_CHUNK:
            raise _not_stored_error(f"box {part}")
        if offset + length > size:
            raise DamageError(f"box {part}: expected bytes within {size}, found {offset}+{length}: the file was cut")
        yield part, offset, length


def _read_index(path: Location, array: ZarrArray, file: str, size: int) -> Any:
    from google_crc32c import value as crc32c

    # The index is at either end of the file, with a checksum at its own end.
    if size < array.index_bytes:
        raise DamageError(f"expected a shard index of {array.index_bytes} bytes in a file of {size}: it was cut")
    with open_regular(path / file) as opened:
        max_bytes = limits.SMALL_DESCRIPTION + opened.on_disk
        limits.check_limit(array.index_bytes, max_bytes, f"bytes of the index of {file}")
        raw = opened.read(0 if array.index_first else size - array.index_bytes, array.index_bytes)
    index, checksum = raw[:-INDEX_CHECKSUM], int.from_bytes(raw[-INDEX_CHECKSUM:], "little")
    if crc32c(index) != checksum:
        raise DamageError(f"shard index with CRC-32C {crc32c(index):08x}, expected {checksum:08x}")
    return np.frombuffer(index, "<u8").reshape(-1, 2)


def _size(path: Location, file: str) -> int:
    """Return the size of the file of a chunk; a link anywhere on the way is refused."""
    # Where no file is, zarr would read zeros.
    place = path / file
    if not is_there(place):
        raise _not_stored_error(f"{place}")
    if place.resolve() != path.resolve() / file:
        raise SourceError(f"cannot open {place}: one of its directories is a symbolic link")
    with open_regular(place) as opened:
        return opened.size


def _not_stored_error(noun: str) -> DamageError:
    return DamageError(
        f"{noun} is not stored: zarr reads the fill value instead, but it may have been lost; write it with "
        "write_empty_chunks"
    )


_MAX_NAME = 200


def nodes(tensors: Sequence[StateRecord]) -> list[str]:
    """Return the node of each tensor: its path in the state dict, which ends in its slot or in ``value``.

    Raises:
        SourceError: two tensors would share a node, or one would lie inside another.
    """
    paths = []
    for tensor in tensors:
        ends_in_slot = tensor.slot is not None and tensor.path[-1:] == (tensor.slot,)
        path = tensor.path if ends_in_slot else (*tensor.path, "value")
        paths.append("/".join(map(_name, path)))
    counts = Counter(paths)
    groups = set(chain.from_iterable(map(parents, paths)))
    for tensor, node in zip(tensors, paths, strict=True):
        if counts[node] > 1 or node in groups:
            raise SourceError(f"tensor {tensor.key!r}: its place {node!r} in the hierarchy is taken by another one")
    return paths


def _name(part: str | int) -> str:
    """Return a part of a path as a plain file name, with a hash if characters had to be replaced."""
    # Names that file systems or zarr treat in a special way are replaced.
    text = str(part)
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", text)[:_MAX_NAME]
    if plain == text and text and not text.startswith((".", "__")) and text != ZARR_FILE:
        return text
    digest = xxhash.xxh3_64_hexdigest(text.encode(errors="surrogatepass"))
    return f"{plain.lstrip('._')}-{digest}"


def parents(node: str) -> Iterator[str]:
    parts = node.split("/")
    for depth in range(1, len(parts)):
        yield "/".join(parts[:depth])
