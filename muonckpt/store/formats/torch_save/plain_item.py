"""Plain Python data as ``torch.save`` stores it: written byte for byte like it, read without running code.

It is a pickle in a small zip archive (:mod:`.stored_zip`).

Source: ``torch/serialization.py`` (``_save``) for the members and the pickle protocol.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Container, Iterable
from types import NoneType
from typing import Any

from ....names.errors import SourceError
from ....names.keys import key_of
from ....names.vocabulary import KeyPath
from ....record.record import Blob, Extent
from ...io import limits
from .inert_pickle import Global, Record, unpickle
from .stored_zip import data_pickle, store_end, store_front

_NUMBERS = ("numpy._core.multiarray scalar", "numpy.core.multiarray scalar")
"""The functions of numpy 2 and 1 that make a scalar: learning rates computed by schedules may be such scalars."""

_ENCODED, _NO_BYTES = "_codecs encode", "__builtin__ bytes"
"""The calls by which pickles of torch.save's protocol hold bytes: one encodes text, the other has no arguments."""

_WORDS = frozenset({"torch.optim._muon NewtonSchulzAlgorithm"})
"""Enumerations of words, whose members are read as the word: PyTorch #187132."""

_PLAIN_NAMES = frozenset((*_NUMBERS, "numpy dtype", _ENCODED, _NO_BYTES, *_WORDS))
_CODES = {"f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "b1": "<?"}


def plain_value(raw: bytes, names: Container[str] = ()) -> Any:
    """Return the object in the bytes of an item: plain data, and `Record`s of the named classes.

    numpy's scalars become Python's numbers, members of an enumeration of words that word, and bytes stay bytes.

    Raises:
        SourceError: it is something else, or not an item at all.
    """
    pickled = data_pickle(raw)
    content = unpickle(pickled, names or _PLAIN_NAMES, limits.ITEM_CONTAINERS)
    return PlainParts(len(pickled), strict=not names).part(content)


class PlainParts:
    """Makes plain data of parts of one pickle, as much as is in proportion to its length in bytes.

    Args:
        strict: refuse everything that is not plain data.
    """

    def __init__(self, length: int, strict: bool = True) -> None:
        self._strict = strict
        self._max_size = limits.SMALL_DESCRIPTION + limits.UNFOLDED * length
        self._size = 0
        self._converted: dict[int, tuple[Any, int]] = {}
        """Converted containers and calls, each with its size, by id: pickles share them."""
        self._encoded: dict[str, bytes | None] = {}
        """Bytes by the text that a pickle has of them, None if it has none: many calls can share one text."""

    def part(self, value: object) -> Any:
        """Return a part of the pickle's content as plain data, with Python's numbers in place of numpy's.

        Raises:
            LimitError: all parts together, with shared ones repeated, have too many elements and characters.
            SourceError: it is something else.
        """
        try:
            plain, size = self._convert(value)
        except RecursionError:
            raise SourceError("expected plain data, found it nested too deeply") from None
        self._size += size
        limits.check_limit(self._size, self._max_size, "elements and characters in an item's data")
        return plain

    def _convert(self, value: Any) -> tuple[Any, int]:
        """Return a converted value, and how many elements and characters it has."""
        # Shared parts count each time: written out, a small pickle could fill the memory.
        if type(value) is str:
            return value, 1 + len(value)
        if type(value) in (int, float, bool, NoneType):
            return value, 1
        if id(value) not in self._converted:
            self._converted[id(value)] = self._convert_object(value)
        return self._converted[id(value)]

    def _convert_object(self, value: Any) -> tuple[Any, int]:
        """Return a container, or the call that makes an object, as plain data, and its size as `_convert` does.

        Bytes, numpy's scalars and enumerations of words are calls.  Others are refused, or stay if not ``strict``.
        """
        match value:
            # Containers, part by part.
            case list() | tuple():
                parts, size = self._convert_all(value)
                return type(value)(parts), 1 + size
            case dict():
                keys, key_size = self._convert_all(value)
                if self._strict and (kinds := {type(key).__name__ for key in keys} - {"str", "int"}):
                    raise SourceError(f"expected strings or integers as dict keys, found {', '.join(sorted(kinds))}")
                parts, size = self._convert_all(value.values())
                return dict(zip(keys, parts, strict=True)), 1 + key_size + size
            case bytes():
                return value, 1 + len(value)
            # Bytes, which a pickle of torch.save's own protocol makes of text.
            case Record() if (data := self._decode_bytes(value)) is not None:
                return data, 1 + len(data)
            # A scalar of numpy, from the code of its dtype and the bytes of its element.
            case Record(
                kind=kind,
                args=(Record(kind="numpy dtype", args=(code, *_), state=(_, "<" | "|", *_)), Record() as elements),
            ) if (
                kind in _NUMBERS
                and code in _CODES
                and (data := self._decode_bytes(elements)) is not None
                and len(data) == struct.calcsize(_CODES[code])
            ):
                return struct.unpack(_CODES[code], data)[0], 1
            # A member of an enumeration of words, as that word.
            case Record(kind=kind, args=tuple((word,)), state=None, items=None) if kind in _WORDS and type(word) is str:
                return word, 1 + len(word)
            case Record() | Global() if self._strict:
                raise SourceError(f"expected plain data, found {getattr(value, 'kind', value)}; nothing was run")
        return value, 1

    def _decode_bytes(self, call: Record) -> bytes | None:
        """Return the bytes that a call makes of nothing or of a text, in just the form that a pickler writes."""
        match call:
            case Record(kind=kind, args=(), state=None, items=None) if kind == _NO_BYTES:
                return b""
            case Record(kind=kind, args=tuple((text, "latin1")), state=None, items=None) if kind == _ENCODED:
                if type(text) is not str:
                    return None
                if text not in self._encoded:
                    self._encoded[text] = text.encode("latin1") if max(text, default="") <= "\xff" else None
                return self._encoded[text]
        return None

    def _convert_all(self, values: Iterable[Any]) -> tuple[list[Any], int]:
        parts, total_size = [], 0
        for value in values:
            part, size = self._convert(value)
            parts.append(part)
            total_size += size
        return parts, total_size


def plain_item(value: object) -> bytes:
    """Return the item that ``torch.save(value)`` makes of plain data.

    Raises:
        TypeError: the value is not plain data.
    """
    _check_plain(value)
    front, entries = store_front(pickle.dumps(value, protocol=2))
    return front + store_end(len(front), entries)


class ItemsInMemory:
    """Items made of plain data in files, one after another in memory.

    Args:
        file: the name of this memory in extents.
    """

    def __init__(self, file: str = "items-in-memory") -> None:
        self._file, self._data = file, bytearray()
        self.blobs: list[Blob] = []

    def add(self, path: KeyPath, value: object) -> None:
        item = plain_item(value)
        self.blobs.append(Blob(key_of(path), path, Extent(self._file, len(self._data), len(item))))
        self._data += item

    @property
    def in_memory(self) -> dict[str, bytes]:
        return {self._file: bytes(self._data)}


def _check_plain(value: object) -> None:
    match value:
        case None | bool() | int() | float() | str() | bytes():
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
