"""One zarr v3 array: its ``zarr.json``, read without trust and written, and the places of its chunks.

Source: the Zarr v3 core specification, and those of the codecs ``bytes``, ``crc32c`` and ``sharding_indexed`` 1.0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ....box import MOST_DIMS, MOST_ELEMENTS, Box, Index
from ....errors import DamageError, SourceError
from ....seal import digest_of
from ...reading.dtypes import DTYPES, itemsize
from ..signs import ZARR_FILE

MANIFEST_ATTRIBUTE = "muonckpt"
"""The attribute with what zarr's own fields cannot express."""

SEAL = "digest"
"""The field of that attribute with the digest of what it describes; absent from what earlier releases wrote."""

INDEX_CHECKSUM = 4
"""Bytes of the CRC-32C behind a chunk or an index."""

_ZARR_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        name: name
        for name in DTYPES
        if name.startswith(("bool", "int", "uint", "float16", "float32", "float64", "complex64", "complex128"))
    }
)
"""Our element types that zarr has, under the same names.  The others are stored as their bits."""

MISSING_CHUNK = 2**64 - 1
"""Offset and length, in the index of a shard, of a chunk that is not there."""

_READABLE = _ZARR_DTYPES.keys() | {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
"""The last ones are extensions, which tensorstore writes and stock zarr cannot read."""

_CRC32C = {"name": "crc32c"}
_INDEX_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, _CRC32C]


def stored_as(dtype: str) -> str:
    """The zarr data type that holds this one: itself, or unsigned integers of its bits."""
    return _ZARR_DTYPES.get(dtype, f"uint{8 * itemsize(dtype)}")


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """One array.

    ``file_shape`` is the shape of one file, ``chunk_shape`` of one chunk in it (the same without shards); both have as
    many dims as ``shape``.

    ``trailer`` is the number of bytes that follow the elements of each chunk (its CRC-32C), None where the elements
    are not stored as they are.  ``sharded`` files end (``index_first``: begin) with an index.  ``dtype`` is zarr's.

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
        if len({len(shape) for shape in shapes}) != 1 or len(self.shape) > MOST_DIMS:
            raise SourceError(f"expected an array, files and chunks with equal numbers of dims, found {shapes!s:.200}")
        if max((size for shape in shapes for size in shape), default=0) > MOST_ELEMENTS:
            raise SourceError(f"expected sizes of at most {MOST_ELEMENTS}, found larger ones")
        if min(self.shape, default=0) < 0 or min((*self.file_shape, *self.chunk_shape), default=1) < 1:
            raise SourceError(f"expected a shape and chunks of at least one element, found {shapes}")
        if any(whole % part for whole, part in zip(self.file_shape, self.chunk_shape, strict=True)):
            raise SourceError(f"expected shards {self.file_shape} that are whole numbers of chunks {self.chunk_shape}")

    @property
    def is_plain(self) -> bool:
        """Whether every chunk's elements inside the array are a prefix of its stored bytes."""
        first = next((dim for dim, size in enumerate(self.chunk_shape) if size > 1), len(self.shape))
        cut = any(self.shape[d] % self.chunk_shape[d] for d in range(first + 1, len(self.shape)))
        return self.trailer is not None and not cut

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the elements of one chunk, those beyond the array's edge included."""
        return math.prod(self.chunk_shape) * itemsize(self.dtype)

    @property
    def chunks_per_file(self) -> int:
        return math.prod(self.file_shape) // math.prod(self.chunk_shape)

    @property
    def index_bytes(self) -> int:
        return 16 * self.chunks_per_file + INDEX_CHECKSUM if self.sharded else 0

    def files(self) -> Iterator[tuple[str, Box]]:
        """Each file, by its path below the root, and the box of the array that it holds."""
        for cell, box in _grid(Box.of(self.shape), self.file_shape):
            key = self.separator.join((self.prefix, *map(str, cell)) if self.prefix else map(str, cell)) or "0"
            yield f"{self.node}/{key}" if self.node else key, box

    def chunks(self, file: Box) -> Iterator[tuple[int, Box]]:
        """The number of each chunk of a file that has elements, in row-major order, and its box of the array."""
        for cell, box in _grid(file, self.chunk_shape):
            number = 0
            for index, whole, part in zip(cell, self.file_shape, self.chunk_shape, strict=True):
                number = number * (whole // part) + index
            yield number, box

    def to_json(self) -> str:
        """The text of the ``zarr.json`` of an array whose chunks carry a CRC-32C each."""
        codecs = [_bytes_codec(self.dtype), _CRC32C]
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
                "fill_value": _fill_value(self.dtype),
                "codecs": codecs,
                "attributes": dict(self.attributes),
            },
            indent=1,
        )


def array_seal(array: ZarrArray, entry: Mapping[str, Any]) -> str:
    """The digest of an array's description: its shape, its data type and our entry for it, without the digest."""
    return digest_of([list(array.shape), array.dtype, {key: value for key, value in entry.items() if key != SEAL}])


def parse_node(data: bytes) -> dict[str, Any]:
    """The fields of a ``zarr.json``.

    Raises:
        SourceError: it is not the JSON of a group or an array of version 3.
    """
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
    """The array that these fields describe.

    Raises:
        DamageError: a field is missing or not what it should be; or it has our attribute, and something that we never
            write.
        SourceError: the data type, the grid, the key encoding or a storage transformer is one that this program does
            not know.
    """
    try:
        return _parsed(node, fields)
    except SourceError as error:
        if MANIFEST_ATTRIBUTE in fields["attributes"]:
            raise DamageError(str(error)) from error
        raise


def _parsed(node: str, fields: Mapping[str, Any]) -> ZarrArray:
    try:
        if fields.get("storage_transformers"):
            raise SourceError(f"expected no storage transformers, found {fields['storage_transformers']!r:.200}")
        if fields["data_type"] not in _READABLE:
            kinds = ", ".join(_READABLE)
            raise SourceError(f"expected one of the data types {kinds}, found {fields['data_type']!r:.200}")
        files = _ints(_configuration(fields["chunk_grid"], "regular")["chunk_shape"])
        prefix, separator = _keys(fields["chunk_key_encoding"])
        chunks, trailer, index_first = _codecs(fields["codecs"])
        return ZarrArray(
            node=node,
            shape=_ints(fields["shape"]),
            dtype=fields["data_type"],
            file_shape=files,
            chunk_shape=files if chunks is None else chunks,
            trailer=trailer,
            sharded=chunks is not None,
            index_first=index_first,
            prefix=prefix,
            separator=separator,
            attributes=fields["attributes"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamageError(f"damaged {ZARR_FILE}: {type(error).__name__}: {error}") from error


def _grid(box: Box, step: Index) -> Iterator[tuple[Index, Box]]:
    """The cells of a regular grid that begins at the corner of the box, in row-major order, and their parts inside."""
    counts = [-(-size // part) for size, part in zip(box.shape, step, strict=True)]
    for number in range(math.prod(counts)):  # one at a time: a hostile array may have very many
        cell = _cell(number, counts)
        lo = tuple(start + index * part for start, index, part in zip(box.lo, cell, step, strict=True))
        hi = tuple(min(start + part, end) for start, part, end in zip(lo, step, box.hi, strict=True))
        yield cell, Box(lo, hi)


def _cell(number: int, counts: list[int]) -> Index:
    """The cell of this number, in row-major order, of a grid with these counts of cells per dim."""
    cell = []
    for count in reversed(counts):
        number, index = divmod(number, count)
        cell.append(index)
    return tuple(reversed(cell))


def _codecs(codecs: Any) -> tuple[Index | None, int | None, bool]:
    """Shape of the chunks in a shard (None without shards), their trailer (see `ZarrArray`), the index's place."""
    match codecs:
        case [{"name": "sharding_indexed", "configuration": {"chunk_shape": shape, "codecs": inner, **rest}}]:
            if rest.get("index_codecs") != _INDEX_CODECS or rest.get("index_location", "end") not in ("start", "end"):
                raise SourceError("expected a shard index of little-endian numbers with a CRC-32C")
            chunks, trailer, _ = _codecs(inner)
            if chunks is not None:
                raise SourceError("expected no shards within shards")
            return _ints(shape), trailer, rest.get("index_location") == "start"
        case [{"name": "bytes", **how}] if _is_little(how):
            return None, 0, False
        case [{"name": "bytes", **how}, {"name": "crc32c"}] if _is_little(how):
            return None, INDEX_CHECKSUM, False
        case [*_]:
            return None, None, False
    raise SourceError(f"expected a list of codecs, found {codecs!r:.200}")


def _is_little(codec: Mapping[Any, Any]) -> bool:
    return bool(_setting(codec, "endian", "little") == "little")


def _setting(extension: Mapping[Any, Any], name: str, usual: str) -> Any:
    """A field of the configuration of a codec or an encoding, both of which may be left out."""
    return extension.get("configuration", {}).get(name, usual)


def _keys(encoding: Any) -> tuple[str, str]:
    """Prefix and separator of the names of chunks."""
    match encoding:
        case {"name": "default", **rest}:
            prefix, usual = "c", "/"
        case {"name": "v2", **rest}:
            prefix, usual = "", "."
        case _:
            raise SourceError(f"expected a chunk key encoding default or v2, found {encoding!r:.200}")
    separator = _setting(rest, "separator", usual)
    if separator not in ("/", "."):
        raise SourceError(f"expected a separator / or ., found {separator!r:.200}")
    return prefix, separator


def _configuration(value: Any, name: str) -> dict[str, Any]:
    match value:
        case {"name": kind, "configuration": dict(configuration)} if kind == name:
            return configuration
    raise SourceError(f"expected {name!r} with a configuration, found {value!r:.200}")


def _ints(value: Any) -> Index:
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise SourceError(f"expected a list of integers, found {value!r:.200}")
    return tuple(value)


def _bytes_codec(dtype: str) -> dict[str, Any]:
    return {"name": "bytes", **({"configuration": {"endian": "little"}} if itemsize(dtype) > 1 else {})}


def _fill_value(dtype: str) -> Any:
    kinds = {"bool": False, "float": 0.0, "complex": [0.0, 0.0]}
    return next((value for kind, value in kinds.items() if dtype.startswith(kind)), 0)
