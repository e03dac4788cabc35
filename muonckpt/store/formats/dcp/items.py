"""The items of a DCP checkpoint, which describe dtype, shape, strides and place of their elements themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from ....chunks import in_columns
from ....errors import SourceError
from ....record import Chunk, Extent, StateRecord
from ...io.location import Location, at_each
from ...io.regular import File, open_regular
from ..torch_save import tensor_item
from ..torch_save.stored_zip import Read
from ..torch_save.tensor_item import ItemTemplate


def located(path: Location, tensors: Sequence[StateRecord]) -> tuple[StateRecord, ...]:
    """These tensors with ``payload``, ``crc32`` and ``strides`` of each chunk, as its item says.

    Raises:
        SourceError: an item is not the dense tensor that the metadata promise; names the tensor, the box and the file.
    """
    chunks = [list(tensor.chunks) for tensor in tensors]
    jobs = [
        (chunk.item, number, part) for number, own_chunks in enumerate(chunks) for part, chunk in enumerate(own_chunks)
    ]
    jobs.sort(key=lambda job: (job[0].file, job[0].offset))

    def read_items(of_one_file: list[tuple[Extent, int, int]]) -> None:
        name = of_one_file[0][0].file
        with open_regular(path / name) as file:
            for item, number, part in of_one_file:
                tensor, chunk = tensors[number], chunks[number][part]
                try:
                    chunks[number][part] = _located(file, tensor, chunk)
                except SourceError as error:
                    where = f"{path / name} at byte {item.offset}: tensor {tensor.key!r} box {chunk.box}"
                    raise SourceError(f"{where}: {error}") from error

    at_each(path, read_items, [list(own_chunks) for _, own_chunks in groupby(jobs, key=lambda job: job[0].file)])
    found = in_columns((own, len(tensor.shape)) for tensor, own in zip(tensors, chunks, strict=True))
    return tuple(replace(tensor, chunks=own) for tensor, own in zip(tensors, found, strict=True))


_READ_WHOLE = 4096
"""The longest item, in bytes, that is read with its payload rather than in two parts."""


def _located(file: File, tensor: StateRecord, chunk: Chunk) -> Chunk:
    template = tensor_item.template(tensor.dtype, chunk.box.shape)
    if template is not None and template.length == chunk.item.length:
        crc32 = template.crc32_of(*_around(file.read, chunk.item.offset, template))
        if crc32 is not None:
            payload = Extent(chunk.item.file, chunk.item.offset + len(template.head), template.payload_length)
            return Chunk(chunk.box, chunk.item, payload, chunk.digest, crc32)
    return _parsed(file, tensor, chunk)


def _around(read: Read, offset: int, template: ItemTemplate) -> tuple[bytes, bytes]:
    """The bytes of an item before and after its payload."""
    if template.length <= _READ_WHOLE:
        item = read(offset, template.length)
        return item[: len(template.head)], item[template.tail_offset :]
    after = template.length - template.tail_offset
    return read(offset, len(template.head)), read(offset + template.tail_offset, after)


def _parsed(file: File, tensor: StateRecord, chunk: Chunk) -> Chunk:
    item = tensor_item.read_tensor(file.read, chunk.item.offset, chunk.item.length)
    if (item.dtype, item.shape) != (tensor.dtype, chunk.box.shape):
        raise SourceError(
            f"expected {tensor.dtype} of shape {chunk.box.shape}, as .metadata says; "
            f"found {item.dtype} of shape {item.shape}"
        )
    strides = None if item.row_major else item.strides  # saved while transposed or channels-last
    payload = Extent(chunk.item.file, item.offset, item.length)
    return replace(chunk, payload=payload, crc32=item.crc32, strides=strides)
