"""Small values of a checkpoint: hyper-parameters and counters, as plain data; nothing in an item is ever run."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...errors import SourceError
from ...record import Blob, StateRecord
from ..formats.registry import format_of
from ..formats.torch_save.inert_pickle import Anything
from ..formats.torch_save.plain_item import plain_value
from ..io.location import Location
from .payloads import check_blob, check_chunk, payload_of

_SCALARS: Mapping[str, str] = MappingProxyType({"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"})


class Values:
    """Reads small items of one checkpoint, each checked before it is used."""

    def __init__(self, path: Location) -> None:
        self._payloads = format_of(path).payloads(path)
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

    def parts(self, blob: Blob) -> Any:
        """The object in an item that may hold anything, of which parts are plain; the rest are inert `Record`s."""
        return plain_value(check_blob(self._payloads, blob), Anything())

    def part(self, blob: Blob, key: str, value: object) -> Blob:
        """A part of an item as an item of its own, for `item` to read."""
        mine = dataclasses.replace(blob, key=f"{blob.key}#{key}")
        self._known[mine] = value
        return mine

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
