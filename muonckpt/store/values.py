"""Small values of a checkpoint: hyper-parameters and counters, as plain data.

An item that is not a tensor is what ``torch.save`` makes of one Python object: a pickle in a small zip archive
(:mod:`.stored_zip`).  Here it is read as plain data, or refused; nothing in it is run (:mod:`.inert_pickle`).  And it
is written, byte for byte as ``torch.save`` writes it, for plain data.

Source: ``torch/serialization.py`` (``_save``) for the members and the pickle protocol.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import SourceError
from ..record import Blob, StateRecord
from .inert_pickle import unpickle
from .payload import Payloads, check_blob, check_chunk, payload_of
from .stored_zip import ALIGNMENT, directory, read_members, store
from .torch_zip import SERIALIZATION_ID

LARGEST = 16 << 20
"""Bytes of the largest pickle that is read: the names of all parameters of a group are one."""

_SCALARS: Mapping[str, str] = MappingProxyType({"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"})


class Values:
    """Reads small items of one checkpoint, each checked before it is used."""

    def __init__(self, path: Path) -> None:
        self._payloads = Payloads(path)
        self._known: dict[Blob, Any] = {}

    def read(self, entry: Blob | StateRecord) -> Any:
        """An option of an optimizer, whichever way it is stored: a number as an item or as a 0-d tensor."""
        return self.scalar(entry) if isinstance(entry, StateRecord) else self.item(entry)

    def item(self, blob: Blob) -> Any:
        """The object in an item: None, a bool, number or string, or lists, tuples and string-keyed dicts of these.

        Raises:
            SourceError: it is damaged, or holds anything else.
        """
        if blob not in self._known:
            raw = check_blob(self._payloads, blob)
            try:
                self._known[blob] = plain_value(raw)
            except SourceError as error:
                raise SourceError(f"item {blob.key!r}: {error}") from error
        return self._known[blob]

    def scalar(self, tensor: StateRecord) -> float | int:
        """The one element of a tensor, whose chunks must know their payloads.

        Raises:
            SourceError: it is damaged, has more elements, or a dtype that no counter has.
        """
        chunks = [chunk for chunk in tensor.chunks if chunk.box.numel]
        if [chunk.box.numel for chunk in chunks] != [1] or tensor.dtype not in _SCALARS:
            raise SourceError(
                f"tensor {tensor.key!r}: expected one element of {', '.join(_SCALARS)}, "
                f"found shape {tensor.shape} of {tensor.dtype}"
            )
        check_chunk(self._payloads, tensor, chunks[0])
        (value,) = struct.unpack(_SCALARS[tensor.dtype], self._payloads.view(payload_of(tensor, chunks[0])))
        assert isinstance(value, float | int), "struct reads numbers"
        return value


def scalar_bytes(dtype: str, value: float) -> bytes:
    """The payload of a 0-d tensor of this dtype."""
    return struct.pack(_SCALARS[dtype], value)


def plain_value(raw: bytes) -> Any:
    """The object in the bytes of an item.

    Raises:
        SourceError: it is not plain data, or no item at all.
    """
    members = {member.name: member for member in read_members(lambda at, count: raw[at : at + count], 0, len(raw))}
    found = members.get("data.pkl")
    if found is None or found.length > LARGEST:
        raise SourceError(f"expected a data.pkl of at most {LARGEST} bytes, found {found}")
    data = raw[found.offset : found.offset + found.length]
    if found.crc32 is not None and zlib.crc32(data) != found.crc32:
        raise SourceError(f"expected checksum {found.crc32:#010x} for data.pkl, found {zlib.crc32(data):#010x}")
    return unpickle(data, ())


def plain_item(value: object) -> bytes:
    """The item that ``torch.save(value)`` makes of plain data.

    Raises:
        TypeError: the value is not plain data.
    """
    _check_plain(value)
    contents = (
        ("data.pkl", pickle.dumps(value, protocol=2)),
        (".format_version", b"1"),
        (".storage_alignment", str(ALIGNMENT).encode()),
        ("byteorder", b"little"),
        ("version", b"3\n"),
        (".data/serialization_id", SERIALIZATION_ID),
    )
    out, entries = store(contents, 0)
    return out + directory(entries, len(out))


def _check_plain(value: object) -> None:
    match value:
        case None | bool() | int() | float() | str():
            pass
        case list() | tuple():
            for part in value:
                _check_plain(part)
        case dict():
            for key, part in value.items():
                if type(key) is not str:
                    raise TypeError(f"expected string keys, found {key!r}")
                _check_plain(part)
        case _:
            raise TypeError(f"expected plain data, found {type(value).__name__}")
