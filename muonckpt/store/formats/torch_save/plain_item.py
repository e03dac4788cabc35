"""Plain Python data as ``torch.save`` stores it: written byte for byte like it, read without running code.

It is a pickle in a small zip archive (:mod:`.stored_zip`).

Source: ``torch/serialization.py`` (``_save``) for the members and the pickle protocol.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Callable, Container
from typing import Any

from ....errors import SourceError
from .inert_pickle import Global, Record, unpickle
from .stored_zip import MEMBER_ALIGNMENT, directory, read_members, store
from .tensor_item import SERIALIZATION_ID

_LARGEST_PICKLE = 16 << 20
"""Bytes of the largest pickle that is read; the list of a group's parameter names is one pickle."""

_NUMBERS = ("numpy._core.multiarray scalar", "numpy.core.multiarray scalar")
"""The functions of numpy 2 and 1 that make a scalar: learning rates computed by schedules may be such scalars."""

_OF_NUMBERS = frozenset((*_NUMBERS, "numpy dtype", "_codecs encode"))
_CODES = {"f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "b1": "<?"}


def plain_value(raw: bytes, allowed: Container[str] = ()) -> Any:
    """The object in the bytes of an item: plain data, and `Record`s of the names that are allowed.

    A scalar of numpy becomes a Python number.

    Raises:
        SourceError: it is something else, or not an item at all.
    """
    members = {
        member.name: member for member in read_members(lambda offset, count: raw[offset : offset + count], len(raw))
    }
    pickled = members.get("data.pkl")
    if pickled is None or pickled.length > _LARGEST_PICKLE:
        raise SourceError(f"expected a data.pkl of at most {_LARGEST_PICKLE} bytes, found {pickled}")
    data = raw[pickled.offset : pickled.offset + pickled.length]
    if pickled.crc32 is not None and zlib.crc32(data) != pickled.crc32:
        raise SourceError(f"expected checksum {pickled.crc32:#010x} for data.pkl, found {zlib.crc32(data):#010x}")
    try:
        return _with_numbers(unpickle(data, allowed or _OF_NUMBERS), not allowed, {})
    except RecursionError:
        raise SourceError("expected plain data, found it nested too deeply") from None


def _with_numbers(value: Any, strict: bool, known: dict[int, Any]) -> Any:
    """A value with Python numbers in place of numpy's; ``known`` are the parts done, by id, as pickles share them.

    Raises:
        SourceError: if ``strict``, something is not plain data.
    """
    if id(value) not in known:
        known[id(value)] = _without_numpy(value, lambda part: _with_numbers(part, strict, known), strict)
    return known[id(value)]


def _without_numpy(value: Any, convert: Callable[[Any], Any], strict: bool) -> Any:
    match value:
        case list() | tuple():
            return type(value)(map(convert, value))
        case dict():
            return {convert(key): convert(part) for key, part in value.items()}
        case Record(
            kind=kind,
            args=(
                Record(kind="numpy dtype", args=(code, *_), state=(_, "<" | "|", *_)),
                Record(kind="_codecs encode", args=(str() as text, "latin1")),
            ),
        ) if kind in _NUMBERS and code in _CODES and len(text) == struct.calcsize(_CODES[code]) and max(text) <= "\xff":
            return struct.unpack(_CODES[code], text.encode("latin1"))[0]
        case Record() | Global() if strict:
            raise SourceError(f"expected plain data, found {getattr(value, 'kind', value)}; nothing was run")
    return value


def plain_item(value: object) -> bytes:
    """The item that ``torch.save(value)`` makes of plain data.

    Raises:
        TypeError: the value is not plain data.
    """
    _check_plain(value)
    contents = (
        ("data.pkl", pickle.dumps(value, protocol=2)),
        (".format_version", b"1"),
        (".storage_alignment", str(MEMBER_ALIGNMENT).encode()),
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
                if type(key) not in (str, int):
                    raise TypeError(f"expected strings or integers as keys, found {key!r}")
                _check_plain(part)
        case _:
            raise TypeError(f"expected plain data, found {type(value).__name__}")
