"""Tensors in small chunks, checked whole: few calls a chunk, where `audit` and `descriptions` make many.

Everything is compared that they compare.  What is not as it should be is not reported here, but left to them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import xxhash

from ..box import Index
from ..chunks import Boxes, Extent
from ..columns import UNKNOWN
from ..errors import MuonckptError
from ..fingerprint import as_hex, fingerprint
from ..record import Manifest, StateRecord
from .formats.native_writer import stock_metadata
from .formats.signs import METADATA_FILE
from .formats.torch_save.tensor_item import ItemTemplate, template
from .io.checksums import crc32, xxh3_128
from .io.location import Location, at_each
from .io.regular import open_regular, read_whole
from .reading.dtypes import dtype
from .reading.finite import nonfinite
from .reading.payloads import BAND_BYTES, Payloads

_READ_WHOLE = 4096
"""The longest item, in bytes, that is read with its payload rather than in two parts."""


def sound_fingerprint(payloads: Payloads, tensor: StateRecord) -> str | None:
    """The fingerprint of a tensor of small chunks if nothing at all is wrong with it; None for others.

    The bytes of each chunk agree with its checksums, and those of the tensor with its fingerprint; every element is
    there once, and none is infinite or NaN.
    """
    kind, shape = dtype(tensor.dtype), tensor.shape
    if tensor.chunks.strides or kind.itemsize > 8 or tensor.boxes.numel.sum() * kind.itemsize > BAND_BYTES:
        return None
    words = np.empty(shape, kind.bits)
    try:
        tensor.chunk_layout()
        for row, (places, part, numel) in zip(tensor.chunks.rows, _places(tensor.boxes), strict=True):
            file, item, item_length, offset, length, digest, recorded = row
            if not numel:
                continue
            if length != numel * kind.itemsize:
                return None
            raw = payloads.glance(Extent(file, offset, length))
            payloads.check_inside(Extent(file, item, item_length))
            if digest is not None and xxhash.xxh3_128_hexdigest(raw) != digest:
                return None
            if recorded not in (UNKNOWN, crc32([raw])):
                return None
            words[places] = np.frombuffer(raw, kind.bits).reshape(part)
    except MuonckptError:
        return None  # `audit` finds out what is wrong
    computed = as_hex(fingerprint(words, (0,) * len(shape)))
    return None if nonfinite(words, tensor.dtype) or tensor.fingerprint not in (None, computed) else computed


@lru_cache(maxsize=64)
def _places(boxes: Boxes) -> tuple[tuple[tuple[slice, ...], Index, int], ...]:
    """The slices of each box, its shape and the number of its elements.  Cached for tensors that are cut alike."""
    return tuple((tuple(map(slice, box.lo, box.hi)), box.shape, box.numel) for box in boxes)


def is_as_written(manifest: Manifest, payloads: Payloads) -> bool:
    """Whether DCP's metadata and the items say what the manifest says, in the very bytes that this package writes.

    Also that nothing in the files overlaps or reaches beyond their ends.
    """
    try:
        return (
            _lie_in_files(manifest, payloads.directory)
            and _is_metadata_of(manifest, read_whole(payloads.directory / METADATA_FILE))
            and _frames_agree(manifest, payloads)
        )
    except (MuonckptError, OSError):
        return False  # `descriptions` finds out what is wrong


def _lie_in_files(manifest: Manifest, directory: Location) -> bool:
    """Whether items follow one another in their files."""
    columns = manifest.columns
    numbers = {name: number for number, name in enumerate(columns.names)}
    of_blobs = [(numbers.setdefault(b.item.file, len(numbers)), b.item.offset, b.item.end) for b in manifest.blobs]
    of_chunks = np.stack([columns.file, columns.item, columns.item + columns.item_length], axis=1)
    extents = np.concatenate([of_chunks, np.array(of_blobs, np.int64).reshape(-1, 3)])
    extents = extents[np.lexsort((extents[:, 1], extents[:, 0]))]
    following = extents[1:]
    same_file = extents[:-1, 0] == following[:, 0]
    if (extents[:-1, 2] > following[:, 1])[same_file].any():
        return False
    ends = np.zeros(len(numbers), np.int64)
    np.maximum.at(ends, extents[:, 0], extents[:, 2])

    def size(name: str) -> int:
        with open_regular(directory / name) as file:
            return file.size

    return bool((np.array(at_each(directory, size, numbers), np.int64) >= ends).all())


def _is_metadata_of(manifest: Manifest, data: bytes) -> bool:
    """Whether these are the bytes of the ``.metadata`` that is written for a manifest."""
    position = 0
    for part in stock_metadata(manifest):
        if data[position : position + len(part)] != part:
            return False
        position += len(part)
    recorded = manifest.files.get(METADATA_FILE)
    return position == len(data) and recorded in (None, xxh3_128([data]))


def _frames_agree(manifest: Manifest, payloads: Payloads) -> bool:
    """Whether each item is that of its box, and has its elements and their CRC-32 where the manifest says."""
    for tensor in manifest.tensors:
        templates = _templates(tensor.dtype, tensor.boxes)
        for (file, item, length, payload, _, _, crc32_of_payload), own in zip(
            tensor.chunks.rows, templates, strict=True
        ):
            if own is None or (own.length, item + len(own.head)) != (length, payload):
                return False
            if length <= _READ_WHOLE:
                whole = bytes(payloads.glance(Extent(file, item, length)))
                head, tail = whole[: len(own.head)], whole[own.tail_offset :]
            else:
                head = bytes(payloads.glance(Extent(file, item, len(own.head))))
                tail = bytes(payloads.glance(Extent(file, item + own.tail_offset, length - own.tail_offset)))
            if own.crc32_of(head, tail) != crc32_of_payload:
                return False
    return True


@lru_cache(maxsize=64)
def _templates(dtype: str, boxes: Boxes) -> tuple[ItemTemplate | None, ...]:
    """The template of the item of each box.  Cached for tensors that are cut alike."""
    return tuple(template(dtype, box.shape) for box in boxes)
