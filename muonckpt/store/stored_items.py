"""The items of an open checkpoint that are not tensors: hyper-parameters and counters, decoded as plain data.

No code in an item is ever run.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..box import Box
from ..errors import SourceError, about
from ..record import Blob, Extent, Manifest, StateRecord
from .formats.torch_save.inert_pickle import Anything
from .formats.torch_save.plain_item import plain_value
from .formats.torch_save.stored_zip import read_members
from .io import limits
from .io.checksums import crc32, xxh3_128
from .reading.payloads import Payloads, compare
from .stored_tensor import TensorReader


def check_blob(payloads: Payloads, blob: Blob) -> None:
    """Compare an item that is not a tensor with its digest, or with the CRC-32s of the zip that it is.

    Raises:
        SourceError: they differ, or cannot be read; names the item and the file.
    """
    with about(f"item {blob.key!r} in {payloads.place(blob.item.file)} is damaged"):
        if blob.digest is not None:
            compare("digest", xxh3_128(payloads.bands(blob.item)), blob.digest)
            return
        item = blob.item

        def part(offset: int, length: int) -> Extent:
            return Extent(item.file, item.offset + offset, length)

        for member in read_members(lambda offset, length: bytes(payloads.view(part(offset, length))), item.length):
            if member.crc32 is not None:
                checksum = crc32(payloads.bands(part(member.offset, member.length)))
                compare(f"CRC-32 of {member.name}", f"{checksum:08x}", f"{member.crc32:08x}")


def checked_blob(payloads: Payloads, blob: Blob) -> bytes:
    """The bytes of an item that is not a tensor, after `check_blob`.

    Raises:
        LimitError: it has more bytes than its file has on the disk.
        SourceError: it is damaged; names the item and the file.
    """
    if blob.item.length > limits.SMALL_DESCRIPTION:
        most = limits.SMALL_DESCRIPTION + payloads.on_disk(blob.item.file)
        limits.check_limit(blob.item.length, most, f"bytes in item {blob.key!r} of {blob.item.file}")
    check_blob(payloads, blob)
    return bytes(payloads.view(blob.item))


_SCALARS: Mapping[str, str] = MappingProxyType({"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"})


class Values:
    """Reads small items of one checkpoint, each checked before it is used."""

    def __init__(self, payloads: Payloads, tensors: TensorReader) -> None:
        self._payloads = payloads
        self._tensors = tensors
        self._known: dict[Blob, Any] = {}

    def read(self, entry: Blob | StateRecord) -> Any:
        """An option of an optimizer, stored as an item or as a 0-d tensor."""
        return self.scalar(entry) if isinstance(entry, StateRecord) else self.item(entry)

    def item(self, blob: Blob) -> Any:
        """The object in an item: None, a bool, number or string, or lists, tuples and string-keyed dicts of these.

        Raises:
            SourceError: it is damaged, or holds something else.
        """
        if blob not in self._known:
            raw = checked_blob(self._payloads, blob)
            with about(f"item {blob.key!r}"):
                self._known[blob] = plain_value(raw)
        return self._known[blob]

    def parts(self, blob: Blob) -> Any:
        """The object in an item of which only parts are plain data; the rest are inert `Record`s."""
        return plain_value(checked_blob(self._payloads, blob), Anything())

    def part(self, blob: Blob, key: str, value: object) -> Blob:
        """Register a part of an item as an item of its own, for `item` to read."""
        part = replace(blob, key=f"{blob.key}#{key}")
        self._known[part] = value
        return part

    def scalar(self, tensor: StateRecord) -> float | int:
        """The one element of a tensor.

        Raises:
            SourceError: it is damaged, has more elements, or a dtype that no counter has.
        """
        if Box.of(tensor.shape).numel != 1 or tensor.dtype not in _SCALARS:
            raise SourceError(
                f"tensor {tensor.key!r}: expected one element of {', '.join(_SCALARS)}, "
                f"found shape {tensor.shape} of {tensor.dtype}"
            )
        (value,) = struct.unpack(_SCALARS[tensor.dtype], self._tensors.words(tensor, Box.of(tensor.shape)).tobytes())
        assert isinstance(value, float | int), "struct reads numbers"
        return value


def scalar_bytes(dtype: str, value: float) -> bytes:
    """The payload of a 0-d tensor of this dtype."""
    return struct.pack(_SCALARS[dtype], value)


class Items(Mapping[str, Any]):
    """The items of a checkpoint by key, each read, checked and decoded when it is first used.

    An item that is not plain data raises `SourceError`.
    """

    def __init__(self, blobs: Mapping[str, Blob], values: Values) -> None:
        self._blobs = blobs
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values.item(self._blobs[key])

    def __contains__(self, key: object) -> bool:
        return key in self._blobs

    def __iter__(self) -> Iterator[str]:
        return iter(self._blobs)

    def __len__(self) -> int:
        return len(self._blobs)


def read_torch_groups(manifest: Manifest, values: Values) -> dict[str, dict[str, Any]]:
    """The options of each parameter group, by the group's key, where keys are those of torch's state dicts.

    That is ``(…, "param_groups", number, option)``, or flattened ``param_groups.<parameter>.<option>``.

    Raises:
        SourceError: an option is damaged or not plain data.
    """
    groups: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    entries: tuple[Blob | StateRecord, ...] = (*manifest.blobs, *manifest.tensors)
    for entry in entries:
        match entry.path:
            case (*_, "param_groups", int(), str(option)):
                group = ".".join(map(str, entry.path[:-1]))
            case (*where, str(last)) if last.startswith("param_groups.") and last.count(".") > 1:
                parameter, _, option = last.rpartition(".")
                group = ".".join(map(str, (*where, parameter)))
            case _:
                continue
        groups[group][option] = values.read(entry)
    return dict(groups)
