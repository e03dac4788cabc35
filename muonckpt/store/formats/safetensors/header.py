"""The header of a safetensors file: read without trust, written so that every reader of the format accepts it.

A file is 8 bytes (the header's length, little-endian), the header (JSON), and the data.  The header maps each tensor
to its dtype, shape and byte range in the data; ``__metadata__`` maps strings to strings.  The ranges tile the data.

Source: the format's description and the checks of its Rust reader, safetensors 0.8 (``tensor.rs``: ``HeaderTooLarge``
at 100 MB, ``InvalidOffset``, ``TensorInvalidInfo``, ``MetadataIncompleteBuffer``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ....box import MOST_DIMS, MOST_ELEMENTS, Index
from ....errors import DamageError, SourceError
from ...io import limits
from ...io.checksums import xxh3_128
from ...io.regular import File
from ...reading.dtypes import itemsize

_ZIP = b"PK\x03\x04"
"""The first bytes of a zip archive."""

MAX_HEADER_BYTES = 100_000_000
"""Longest header that stock readers accept."""

METADATA_KEY = "__metadata__"
"""The one name that no tensor can have."""

MANIFEST_KEY = "muonckpt"
"""Name of our manifest among the metadata; files without it were written by other programs."""

DTYPE_OF_CODE: Mapping[str, str] = MappingProxyType(
    {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
    }
)
"""Our name of each element type by the format's.  Its types of less than a byte (F4, F6) are not supported."""

CODE_OF_DTYPE: Mapping[str, str] = MappingProxyType({name: code for code, name in DTYPE_OF_CODE.items()})

_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor: ``dtype`` by torch's name, ``start`` and ``stop`` in bytes from the begin of the data.

    Raises:
        SourceError: the length of the range is not what dtype and shape need.
    """

    dtype: str
    shape: Index
    start: int
    stop: int

    def __post_init__(self) -> None:
        if len(self.shape) > MOST_DIMS or not all(
            0 <= number <= MOST_ELEMENTS for number in (*self.shape, self.start, self.stop)
        ):
            raise DamageError(f"expected at most {MOST_DIMS} sizes, and offsets, of 0 to {MOST_ELEMENTS}, found others")
        needed = math.prod(self.shape) * itemsize(self.dtype)
        if self.stop - self.start != needed:
            raise DamageError(
                f"expected {needed} bytes for {self.dtype} of shape {self.shape}, found {self.start}:{self.stop}"
            )


@dataclass(frozen=True, slots=True)
class Header:
    """``entries`` in the order of their bytes, without gap or overlap.

    Raises:
        SourceError: there is a gap, an overlap or a wrong order.
    """

    entries: Mapping[str, HeaderEntry]
    metadata: Mapping[str, str]

    def __post_init__(self) -> None:
        end = 0
        for name, entry in self.entries.items():
            if entry.start != end:
                raise DamageError(f"expected tensor {name!r} at byte {end} of the data, found it at {entry.start}")
            end = entry.stop

    @property
    def data_length(self) -> int:
        return max((entry.stop for entry in self.entries.values()), default=0)

    def encode(self) -> bytes:
        """The bytes before the data, a multiple of 8, so that 8-byte elements are aligned."""
        fields: dict[str, Any] = {METADATA_KEY: dict(self.metadata)}
        for name, entry in self.entries.items():
            place = [entry.start, entry.stop]
            fields[name] = {"dtype": CODE_OF_DTYPE[entry.dtype], "shape": list(entry.shape), "data_offsets": place}
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def read_header(file: File) -> tuple[Header, int, str]:
    """The header of an open file, the byte at which its data begins, and the xxh3-128 of the header's text in hex.

    Raises:
        SourceError: it is not a safetensors file, or contradicts itself or its length.
    """
    size = file.size
    head = file.read(0, 8)
    length = int.from_bytes(head, "little")
    most = min(max(size - 8, 0), MAX_HEADER_BYTES)
    if head[:4] == _ZIP:
        raise SourceError(
            "expected a safetensors file, found a zip archive, such as torch.save writes: load it and save it with "
            "torch.distributed.checkpoint or safetensors"
        )
    if size < 8 or length > most:
        kind = DamageError if file.read(8, 1) == b"{" else SourceError  # cut, or another kind of file
        raise kind(
            f"expected a safetensors file (checkpoints of other formats are directories): a header of at most {most} "
            f"bytes in {size}, found one of {length}"
        )
    if length > limits.SMALL_DESCRIPTION:
        rest = max(file.on_disk - 8 - length, 0)
        limits.check_limit(
            length, limits.SMALL_DESCRIPTION + rest, f"bytes of a header before {rest} bytes on the disk"
        )
    text = file.read(8, length)
    header = parse_header(text)
    if 8 + length + header.data_length != size:
        raise DamageError(f"expected {8 + length + header.data_length} bytes, found {size}: it was cut or grew")
    return header, 8 + length, xxh3_128([text])


def parse_header(text: bytes) -> Header:
    """Parse the text of a header.

    Raises:
        SourceError: it is not the JSON that the format prescribes; names the tensor.
    """
    limits.check_text(text)
    try:
        fields = _fields(json.loads(text.decode(), object_pairs_hook=_unique))
    except (ValueError, RecursionError) as error:
        raise DamageError(f"damaged safetensors header: {type(error).__name__}: {error}") from error
    metadata = fields.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamageError(f"expected strings in {METADATA_KEY}, found something else")
    strange = DamageError if MANIFEST_KEY in metadata else SourceError
    entries = {name: _entry(name, value, strange) for name, value in fields.items()}
    return Header(dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop))), metadata)


def _fields(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def _entry(name: str, value: Any, strange: type[SourceError]) -> HeaderEntry:
    """``strange``: the error for a dtype that we never write; other programs may know more."""
    match value:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [start, stop], **more} if not more and all(
            type(number) is int
            for number in (*shape, start, stop)  # a bool is not a number here
        ):
            pass
        case _:
            raise DamageError(f"tensor {name!r}: expected dtype, shape and data_offsets, found {str(value)[:200]}")
    if code not in DTYPE_OF_CODE:
        raise strange(f"tensor {name!r}: expected one of the dtypes {', '.join(DTYPE_OF_CODE)}, found {code!r}")
    try:
        return HeaderEntry(DTYPE_OF_CODE[code], tuple(shape), start, stop)
    except DamageError as error:
        raise DamageError(f"tensor {name!r}: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields
